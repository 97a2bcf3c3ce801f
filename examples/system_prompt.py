"""A system prompt folded once, kept in a file, and reused for every question.

python examples/system_prompt.py [hub id, local folder or .gguf file] [file of the folded prompt]
"""

import copy
import sys
from itertools import takewhile
from pathlib import Path

import torch

import kvfold
from kvfold import models

SYSTEM = "You are the help desk of a railway. Answer in one sentence, and name the form to fill in.\n" + "\n".join(
    f"Rule {i}: a journey of {30 * i} minutes may be changed {i} hours before it begins, with form {100 + i}."
    for i in range(1, 21)
)
QUESTIONS = ("My journey takes 90 minutes. When may I change it?", "Which form is for 5 hours?", "Who are you?")


@torch.inference_mode()
def main(name: str | None = None, file: str = "system_prompt.safetensors", new_tokens: int = 40) -> list[str]:
    model, tokenizer, _ = models.load(name)
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in QUESTIONS]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    prompts = [tokenizer.apply_chat_template(chat, **options).to(model.device) for chat in chats]
    if not Path(file).exists():  # another day, or another process, starts below
        columns = zip(*(prompt["input_ids"][0].tolist() for prompt in prompts), strict=False)
        shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        cache = kvfold.fold(model, "fold")
        model(prompts[0]["input_ids"][:, :shared], past_key_values=cache)
        cache.save(file)
    system = kvfold.load_cache(file, model)
    print(f"{system.get_seq_length()} tokens in {system.nbytes()['total']:,} bytes, {system.full_nbytes():,} unfolded")
    answers = []
    for question, prompt in zip(QUESTIONS, prompts, strict=True):
        cache = copy.deepcopy(system)  # each question goes on from the same prompt
        out = model.generate(**prompt, past_key_values=cache, max_new_tokens=new_tokens, do_sample=False)
        answers.append(tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
        print(f"\n{question}\n{answers[-1]}")
    return answers


if __name__ == "__main__":
    main(*sys.argv[1:])
