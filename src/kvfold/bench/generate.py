"""What a user gets: ``model.generate`` over folded caches, against Transformers' own caches, in one run.

``kvfold bench generate`` times the steps of greedy decoding after prompts of several lengths. Every cache decodes twice, and
the second time counts: compilation of kernels and of Transformers' static cache is no step. The step in which a decode graph
is captured is not either, and has a column of its own.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import kvfold
from kvfold.bench.rows import append, environment, need_gpu, options, progress, script, show
from kvfold.engines.transformers import names
from kvfold.errors import KVFoldError

ROWS = Path("benchmarks/rows/generate.csv")
DEFAULT, STATIC = "transformers", "transformers-static"
"""Transformers' ``DynamicCache``, run eagerly; its static cache, whose steps ``generate`` compiles."""
METHODS = ("fold", "kivi")
PROMPTS = (128, 8192, 30000)
TOKENS = 64
STEPS = ("plain", "compiled")
"""How folded caches decode: in a graph of the model as it is, and of the model as ``torch.compile`` fuses it."""
FEW = 8
"""Least tokens to generate: a median is taken of their steps."""

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-coder-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }
}


@dataclass(frozen=True)
class GenerateRow:
    """One model, batch, prompt and cache.

    Attributes
    ----------
    ms, p20_ms, p80_ms : float
        Of a decode step, as the program sees it: token to token.
    prefill_ms, begin_ms : float
        Until the first token; from it to the second (a graph is captured there).
    steps : str
        Of a folded cache: ``plain``, or ``compiled``.
    same : int
        Tokens of the first sequence, from its first on, that are those of Transformers' default.
    path : str
        How steps ran.
    times_default, times_best : float or None
        How many times as long a step of Transformers' default takes, and of the faster one of its caches in this run.
    """

    model: str
    batch: int
    prompt: int
    tokens: int
    cache: str
    steps: str
    ms: float
    p20_ms: float
    p80_ms: float
    prefill_ms: float
    begin_ms: float
    tokens_per_s: float
    same: int
    path: str
    times_default: float | None
    times_best: float | None
    gpu: str
    driver: str
    torch: str
    triton: str
    transformers: str
    commit: str


class Clock:
    """A streamer of ``generate`` that keeps the time of every token; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Tokens on the host: whatever made them is over."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def build(name: str, device: torch.device) -> PreTrainedModel:
    """A model of random weights in bf16; speed does not depend on what they are."""
    config = Qwen2Config(**SHAPES[name])
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Qwen2ForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
    return model.eval()


@contextmanager
def _static_steps(model: PreTrainedModel, path: str) -> Iterator[str]:
    """Transformers' static cache at its best: as long as this prompt needs, and compiled for that length.

    By itself it stays as long as the longest that the model had, and Dynamo makes the second length that it meets a variable.
    """
    model.__dict__.pop("_previous_max_cache_length", None)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        yield path


def _generate(
    model: PreTrainedModel, ids: torch.Tensor, tokens: int, cache: str, compile: bool = False
) -> tuple[torch.Tensor, Clock, str]:
    """Tokens, their times, and how steps ran."""
    clock = Clock()
    how: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": tokens,
        "min_new_tokens": tokens,
        "do_sample": False,
        "pad_token_id": 0,
        "streamer": clock,
    }
    steps: Any = nullcontext("eager")
    if cache == STATIC:
        how["cache_implementation"], steps = "static", _static_steps(model, "compiled" if ids.is_cuda else "eager")
    elif cache == DEFAULT:
        how[names.CACHE] = DynamicCache(config=model.config)
    else:
        folded = kvfold.fold(model, cache, max_length=ids.shape[1] + tokens)
        how[names.CACHE], steps = folded, kvfold.decoding(model, folded, tokens, required=False, compile=compile)
    try:
        with steps as path:
            decode: Any = model.generate
            out = decode(ids, **how)
    finally:
        if cache not in (DEFAULT, STATIC):
            kvfold.unfold(model)
    return out[:, ids.shape[1] :], clock, str(path)


def measure(
    model: PreTrainedModel,
    name: str,
    batch: int,
    prompt: int,
    tokens: int,
    caches: Sequence[str],
    env: dict[str, str],
    steps: Sequence[str] = STEPS,
    runs: int = 2,
) -> Iterator[GenerateRow]:
    """Time every cache over the same prompts, Transformers' own first; folded ones with each kind of ``steps``.

    The last of ``runs`` counts: what has to be compiled is compiled in those before.
    """
    draw = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary, (batch, prompt), generator=draw).to(model.device)
    others: dict[str, float] = {}
    first: torch.Tensor | None = None
    order = sorted(caches, key=lambda c: (c != DEFAULT, c != STATIC))
    for cache, how in ((c, how) for c in order for how in (("",) if c in (DEFAULT, STATIC) else steps)):
        progress(f"{name} B={batch} N={prompt}: {' '.join((cache, how)).strip()}")
        for _ in range(runs):
            began = time.perf_counter()
            out, clock, path = _generate(model, ids, tokens, cache, how == "compiled")
        first = out[0] if cache == DEFAULT else first
        agrees = (out[0] == first).long().cumprod(0).sum() if first is not None else torch.zeros(())
        _, start, second, *rest = clock.times
        took = [1e3 * (b - a) for a, b in zip((second, *rest), rest, strict=False)]
        ms, cuts = statistics.median(took), statistics.quantiles(took, n=5)
        theirs = [others[c] for c in (DEFAULT, STATIC) if c in others]
        yield GenerateRow(
            model=name,
            batch=batch,
            prompt=prompt,
            tokens=tokens,
            cache=cache,
            steps=how,
            ms=ms,
            p20_ms=cuts[0],
            p80_ms=cuts[-1],
            prefill_ms=1e3 * (start - began),
            begin_ms=1e3 * (second - start),
            tokens_per_s=batch / ms * 1e3,
            same=int(agrees),
            path=path,
            times_default=others[DEFAULT] / ms if DEFAULT in others else None,
            times_best=min(theirs) / ms if theirs else None,
            transformers=transformers.__version__,
            **env,
        )
        if cache in (DEFAULT, STATIC):
            others[cache] = ms


def line(row: GenerateRow) -> str:
    """One row for people."""
    ratio = "" if row.times_best is None else f"  {row.times_best:.2f}x the best of Transformers"
    cache = f"{row.cache} {row.steps}".strip()
    return (
        f"{row.model} B={row.batch} N={row.prompt:<6} {cache:20} {row.ms:7.2f} ms a step  {row.tokens_per_s:6.0f} tokens/s"
        f"  begins in {row.begin_ms:.0f} ms{ratio}  ({row.path})"
    )


def main(argv: list[str] | None = None) -> int:
    parser = options("generate", __doc__, ROWS)
    parser.add_argument("--model", choices=list(SHAPES), default=next(iter(SHAPES)))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompts", type=int, nargs="+", default=list(PROMPTS), metavar="TOKENS")
    parser.add_argument(
        "--steps", nargs="+", choices=STEPS, default=list(STEPS), help="of folded caches (default: both)"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"to generate (default: {TOKENS})")
    parser.add_argument(
        "--caches",
        nargs="+",
        default=[DEFAULT, STATIC, *METHODS],
        metavar="CACHE",
        help=f"methods, {DEFAULT}, {STATIC} (default: {DEFAULT} {STATIC} {' '.join(METHODS)})",
    )
    args = parser.parse_args(argv)
    for cache in args.caches:
        if cache not in (DEFAULT, STATIC):
            kvfold.methods.get(cache)
    longest = SHAPES[args.model]["max_position_embeddings"]
    for flag, value, allowed in (
        ("batch", args.batch, range(1, 1025)),
        ("tokens", args.tokens, range(FEW, 4097)),
        *(("prompts", n, range(1, longest - args.tokens + 1)) for n in args.prompts),
    ):
        if value not in allowed:
            raise KVFoldError(
                f"bench generate: {flag}={value} is not allowed; allowed: {allowed[0] if allowed else 1} to {allowed.stop - 1}"
            )
    device = need_gpu("generate")
    model, env = build(args.model, device), environment()
    for prompt in args.prompts:
        for row in measure(model, args.model, args.batch, prompt, args.tokens, args.caches, env, args.steps):
            show(row, line(row), args.json)
            if args.rows is not None:
                append(args.rows, [row])
    return 0


if __name__ == "__main__":
    sys.exit(script(main))
