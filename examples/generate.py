"""A model whose cache is folded: generate as ever, then see how large the cache is.

python examples/generate.py [hub id, local folder or .gguf file] [method]
"""

import sys
from contextlib import nullcontext

import torch

import kvfold
from kvfold import models
from kvfold.evaluation import load_text


@torch.inference_mode()
def main(name: str | None = None, method: str = "fold", new_tokens: int = 60, letters: int = 6000) -> str:
    model, tokenizer, _ = models.load(name)
    inputs = tokenizer(load_text().text[:letters], return_tensors="pt").to(model.device)
    cache = kvfold.fold(model, method)  # a transformers Cache; the model attends through it
    graphs = kvfold.decoding(model, cache, room=new_tokens) if model.device.type == "cuda" else nullcontext()
    with graphs:
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=new_tokens, do_sample=False)
    text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    print(text + "\n")
    sizes = cache.nbytes()
    print(f"{cache.get_seq_length():,} tokens: {sizes['total']:,} bytes, unfolded {cache.full_nbytes():,}")
    print(", ".join(f"{part} {size:,}" for part, size in sizes.items() if part != "total" and size))
    print(f"{cache.effective_bits():.2f} bits per packed element")
    return text


if __name__ == "__main__":
    main(*sys.argv[1:])
