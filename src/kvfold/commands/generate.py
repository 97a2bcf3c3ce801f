"""The command ``kvfold generate``."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import click

import kvfold
from kvfold.commands.terminal import (
    JSON_HELP,
    Stream,
    check_temperature,
    json_target,
    load,
    method_option,
    model_options,
    prepare,
    prompt_text,
    publish,
    sampling_options,
    say,
    wake,
)
from kvfold.errors import KVFoldError


@click.command(short_help="Answer a prompt with a folded cache.")
@click.argument("prompt", required=False)
@method_option("Method of the cache.")
@model_options
@sampling_options(128, "Stop after so many tokens.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it stands, without the model's chat template.")
@click.option("--compile", "fuse", is_flag=True, help="On a GPU, have torch.compile fuse the model's small operations.")
@click.option("--json", "json_path", metavar="FILE", help=JSON_HELP)
def generate(
    prompt: str | None,
    spec: str,
    model: str | None,
    dtype: str | None,
    device: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    raw: bool,
    fuse: bool,
    json_path: str | None,
) -> None:
    """Answer PROMPT with a folded cache, as a stream; then say speed, cache size and saving.

    Without PROMPT, or with -, it is read from standard input: echo Hello | kvfold generate
    """
    prompt = prompt_text(prompt)
    if max_new_tokens < 1:
        raise KVFoldError(f"max-new-tokens: {max_new_tokens}; give at least 1")
    check_temperature(temperature)
    target = json_target(json_path)
    wake()
    import torch

    from kvfold import methods, models
    from kvfold.engines.transformers import names, sizes
    from kvfold.engines.transformers.graph import decoding

    method = methods.ready(spec)
    loaded, tokenizer, info = load(model, dtype, device)
    chat = prompt if raw or not tokenizer.chat_template else [{"role": "user", "content": prompt}]
    ids = torch.tensor([models.prompt_tokens(tokenizer, chat, info.name)], device=loaded.device)
    prompt_tokens = ids.shape[1]
    if info.max_context is not None and prompt_tokens + max_new_tokens > info.max_context:
        room = info.max_context - prompt_tokens
        if room < 1:
            raise KVFoldError(
                f"prompt: it has {prompt_tokens} tokens, and the model's context {info.max_context}; give a shorter prompt"
            )
        raise KVFoldError(
            f"max-new-tokens: prompt {prompt_tokens} + {max_new_tokens} tokens is beyond the model's context "
            f"of {info.max_context}; give at most {room}, or a shorter prompt"
        )
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    # None rather than the model's own values: they only warn when nothing is sampled.
    sampling |= {"temperature": temperature} if temperature > 0 else {"temperature": None, "top_p": None, "top_k": None}
    if tokenizer.pad_token_id is None:
        sampling["pad_token_id"] = tokenizer.eos_token_id
    on_gpu = loaded.device.type == "cuda"
    if fuse and not on_gpu:
        raise KVFoldError(
            f"compile: device={loaded.device.type} is not allowed: only decode graphs are compiled; allowed: cuda"
        )
    cache = kvfold.fold(loaded, method, max_length=prompt_tokens + max_new_tokens if on_gpu else None)
    streamer = Stream(tokenizer, sys.stderr if json_path == "-" else sys.stdout, needed=json_path is None)
    graphs = decoding(loaded, cache, max_new_tokens, required=False, compile=fuse) if on_gpu else nullcontext()
    reading = streamer.waiting(f"reading {prompt_tokens:,} tokens")
    with reading, torch.inference_mode(), graphs as steps:
        prepare(cache, loaded.device)
        output = loaded.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **{names.CACHE: cache},
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            **sampling,
        )
    new = output[0, prompt_tokens:]
    result = {
        "method": str(method),
        "model": info.name,
        "dtype": info.dtype,
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(new),
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "tokens_per_s": streamer.tokens_per_s(),
        "decoding": "step by step" if steps is None else str(steps),
        **sizes.to_dict(cache, loaded.dtype, info.max_context),
    }

    def summary() -> None:
        if streamer.failed is not None:
            raise streamer.failed
        speed = "" if result["tokens_per_s"] is None else f", {result['tokens_per_s']:.1f} tokens/s"
        click.echo()
        say(f"[{method}] {len(new)} tokens{speed}; {sizes.said(cache, loaded.dtype)}" + (f"; {steps}" if steps else ""))
        if ahead := sizes.ahead(cache, loaded.dtype, info.max_context):
            say(ahead)

    publish(result, json_path, target, summary)
