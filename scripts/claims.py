"""What the README says first, as sentences made of the committed rows; ``tables.py`` writes them."""

from typing import Any

from bench_tables import FUSED, on_cpu, rows
from evidence import Pair

from kvfold.bench.cpu import BASELINE
from kvfold.bench.generation import PLAIN, STATIC
from kvfold.bench.memory import gains
from kvfold.bench.rows import of_last_commit

LONG = 32_768
"""Tokens from which on packed attention is claimed to be faster."""


def only(found: list[Any], **wanted: object) -> Any:
    """The one row with these values."""
    (row,) = (row for row in found if all(getattr(row, name) == value for name, value in wanted.items()))
    return row


def headline(bits: float, best: Pair, ratio: Pair) -> str:
    """What folding a long context does to size, speed and quality.

    Parameters
    ----------
    bits, best, ratio
        Of fold: effective bits, and its divergence over that of the best KIVI and over KIVI-2's.
    """
    found = rows("decode", "model", "batch", "context", "method")
    fold, full = (
        only(found, model="llama-3.1-8b", batch=1, context=131_072, method=method) for method in ("fold", "bf16")
    )
    gpu = fold.gpu.removeprefix("NVIDIA ")  # speed is over full precision of the same run, size is always the same
    (low, high), (least, most) = (sorted(p.by_model.values())[:: len(p.by_model) - 1] for p in (ratio, best))
    return "\n".join(
        (
            f"- **{full.cache_gb / fold.cache_gb:.1f} times smaller**: {fold.cache_gb:.1f} GB, everything counted.",
            f"- **{fold.ratio:.2f} times as fast** for the whole model, {fold.tokens_per_s:.0f} tokens/s instead of "
            f"{fold.tokens_per_s / fold.ratio:.0f} ([rows](docs/performance.md#end-to-end), one {gpu}).",
            f"- **{least:.2f} to {most:.2f} of the divergence of the best KIVI at 3.00 bits** (keys of 3 bits, values of 2, "
            f"groups of 64), with {bits:.2f} bits; {low:.2f} to {high:.2f} of KIVI-2's, the common baseline "
            f"([three models, {best.items} windows of five kinds of text, up to 30,000 tokens](docs/evidence.md)).",
        )
    )


def attention() -> str:
    """Decode attention of fold and of KIVI's storage at long contexts."""
    found = [
        row
        for row in rows("attention", "work", "dtype", "kernel", "batch", "num_heads", "num_kv_heads", "head_dim",
                        "query_tokens", "context")
        if row.kernel in FUSED and row.dtype == "float16" and row.query_tokens == 1 and row.context >= LONG and row.ratio
    ]  # fmt: skip
    fold, kivi = (
        [row.ratio for row in found if row.work.partition(",")[0].endswith(work)]
        for work in ("fold 3/2", "kivi 2-bit g32")
    )
    low, high = min(fold + kivi), max(fold + kivi)
    return "\n".join(
        (
            f"**Attention over packed caches is {low:.1f} to {high:.1f} times as fast as the fastest fp16 kernel** on an H200,",
            f"from {LONG:,} tokens on: {min(fold):.1f} to {max(fold):.1f} times for `fold` at 2.8 bits, "
            f"{min(kivi):.1f} to {max(kivi):.1f} times for KIVI's storage at 3.0",
            "([docs/performance.md](docs/performance.md)).",
        )
    )


def throughput(cache: str = "kivi:recent=32") -> str:
    """What a GPU of 80 GB runs."""
    found = rows("memory", "cache", "prompt", "output", choose=of_last_commit)

    def of(prompt: int, output: int) -> tuple[list[Any], dict[str, Any]]:
        some = [row for row in found if (row.prompt, row.output) == (prompt, output)]
        return some, {gain.baseline: gain for gain in gains(some) if gain.cache == cache}

    short, gained = of(161, 338)
    largest = {row.cache: row.batch for row in short if row.largest}
    _, longer = of(1792, 256)
    plain, static = gained[PLAIN].throughput, gained[STATIC].throughput
    return "\n".join(
        (
            f"**Under 80 GB, Llama-2-7B runs {largest[cache]} sequences at once instead of {largest[STATIC]}** with KIVI's",
            "storage, prompts of 161 and outputs of 338 tokens.",
            f"It generates {plain:.1f} times as many tokens per second as with Transformers' own cache, and",
            f"{static:.1f} times as many as with a bf16 cache without any waste.",
            f"With 2,048 tokens a sequence, decoding alone is {longer[STATIC].decode_throughput:.2f} times as fast as over",
            f"that bf16 cache, a whole run {longer[STATIC].throughput:.2f} times.",
        )
    )


def laptop() -> str:
    """Decoding on a CPU: every method on a small model, and a larger one at length."""
    small, large = on_cpu("SmolLM2-135M-Instruct", 4096), on_cpu("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", 16384)
    ratios = [row.ratio for (threads, _, kernel), row in small.items() if threads == 2 and kernel == "cpu"]
    full, fold, none = large[2, BASELINE, "sdpa"], large[2, "fold", "cpu"], large[2, "none", "cpu"]
    return "\n".join(
        (
            f"**On two CPU cores, in float32, a token of a 1.5B model after 16,384 takes {fold.p50_ms:.0f} ms with `fold` "
            f"instead of {full.p50_ms:.0f} with Transformers' cache**,",
            f"and the cache {fold.cache_mb:.0f} MB instead of {full.cache_mb:.0f} (`none`, kvfold's full precision, which does "
            f"not copy itself: {none.p50_ms:.0f} ms). At 4,096 tokens of SmolLM2-135M",
            f"folded caches take {min(ratios):.1f} to {max(ratios):.1f} times as long as Transformers' cache "
            "([docs/performance-cpu.md](docs/performance-cpu.md)).",
        )
    )


def serving() -> str:
    """What a server gains."""
    found = [row for row in rows("serving", "what", "cache", "batch", "total", "gpus") if row.gpus == 1]
    long = {row.cache: row for row in found if (row.what, row.batch, row.context) == ("decode", 8, 32_768)}
    most = {
        cache: max(
            (r for r in found if (r.what, r.cache, r.context) == ("decode", cache, 32_768)), key=lambda r: r.batch
        )
        for cache in ("fold", "bfloat16", "fp8")
    }
    room = {row.cache: row.tokens for row in found if (row.what, row.context) == ("capacity", 33_280)}
    prompt = {row.cache: row for row in found if (row.what, row.context) == ("prefill", 32_768)}
    fold, plain = most["fold"], most["bfloat16"]
    return "\n".join(
        (
            f"**With `fold`, vLLM holds {room['fold'] / room['bfloat16']:.1f} times as many tokens as in bfloat16** "
            f"({room['fold'] / room['fp8']:.1f} times as many as in fp8), and",
            f"{fold.batch} requests of 32,768 tokens instead of {plain.batch} decode "
            f"{fold.tokens_per_s / plain.tokens_per_s:.1f} times as many tokens a second. A step of 8 such requests takes",
            f"{long['fold'].ms:.1f} ms instead of {long['bfloat16'].ms:.1f} ms ({long['fp8'].ms:.1f} ms with fp8); a prompt of "
            f"32,768 tokens takes {prompt['fold'].ms / prompt['bfloat16'].ms:.2f} times",
            "as long (Llama-3.1-8B's shape, one H200).",
        )
    )
