"""Folding a long prompt into one layer: time and memory of encoding by kernel and by torch operations.

``kvfold bench prefill`` appends a prompt to a folded layer of Llama-3.1-8B's shape, as its first call does after attending, in
the order in which its attention kernel reads. The two encoders' packed bytes are compared before a time is taken; where no
kernel encodes, there is torch's time alone.

An idle GPU waits for the host, which launches; in a prefill it is busy with the layers before, and the host is ahead. So there
are two times: from an idle GPU, and behind work that lasts longer than the launches. If the host waits for the device
meanwhile, the second time shows it. ``percent`` of a prefill is the second one's, for all layers of the model.

A row's ``error`` is the fraction of bytes that differ from torch's; ``extra_mb`` is the most memory that was allocated while
appending, beyond what the layer keeps; ``ratio`` is how many times as long torch takes.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvfold.bench import storage
from kvfold.bench.encode import Work, prefill_ms
from kvfold.bench.rows import append, environment, need_gpu, options, script, show
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.methods import LayerSpec, get
from kvfold.plan import Encoder, packed_for
from kvfold.rope import Rope

ROWS = Path("benchmarks/rows/prefill.csv")
METHODS = (
    *("kivi", "squat", "squat:paper=true", "fold", "turboquant", "turboquant:bits=3", "qjl", "gear"),
    *("zipcache", "innerq"),
    *(f"innerq:paper=true,mode={mode}" for mode in ("asym", "sym", "hybrid")),
    *("kvquant:bits=3", "vqllm:bits=1", "vqllm", "gsrq", "commvq:bits=1", "commvq"),
    *("kvarn", "nova", "tasq", "fold:bits=2,codebook=true", "tasq:bits=2,values=fold"),
)
"""Learned methods have random tables of the right size."""
LIMITS = {
    **dict.fromkeys(("squat", "squat:paper=true"), 1e-3),
    **dict.fromkeys(("fold", "innerq", "turboquant", "turboquant:bits=3", "qjl", "gear"), 5e-3),
    "innerq:paper=true,mode=hybrid": 1e-4,
    **dict.fromkeys(
        (
            "zipcache",
            "vqllm:bits=1",
            "vqllm",
            "gsrq",
            "tasq",
            "tasq:mean=false",
            "kvarn",
            "nova",
            "commvq:bits=1",
            "fold:bits=2,codebook=true",
            "tasq:bits=2,values=fold",
        ),
        5e-2,
    ),
    "commvq": 8e-2,
}
"""Bytes that may differ: products that round differently flip a code; hybrid groups of equal error, a group; sums of another
order, the last bit of a page's mean; a code that is nearly as near, those of the stages after it. CommVQ has most stages."""
CLOCK = 2e6
"""Cycles in a millisecond, or more: of the fastest GPUs."""
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
REPEATS, SLOW_MS = 7, 100.0
"""Runs of an append; one where it takes longer than ``SLOW_MS``."""
LAYERS = 32
"""Of the model whose prefill a layer's time is compared with."""


@dataclass(frozen=True)
class Prefill:
    """One method's prompt, encoded in one way."""

    method: str
    encoder: str
    batch: int
    context: int
    dtype: str
    error: float
    limit: float
    p20_ms: float | None
    p50_ms: float | None
    p80_ms: float | None
    busy_ms: float | None
    percent: float | None
    extra_mb: float | None
    kept_mb: float | None
    ratio: float | None
    gpu: str
    driver: str
    torch: str
    triton: str
    commit: str


class Prompt:
    """A prompt's keys, values and queries, appended to a new layer at every call."""

    def __init__(self, method: str, context: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def random(heads: int, tokens: int = context) -> torch.Tensor:
            shape = (1, heads, tokens, HEAD_DIM)
            return torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16)

        self.keys = random(KV_HEADS) * torch.exp(0.7 * random(KV_HEADS, 1)) + random(KV_HEADS, 1)
        self.values = random(KV_HEADS)
        # as in a model, a few directions hold most of the queries: SQuat's state depends on it
        self.queries = random(HEADS) * torch.exp(0.7 * random(HEADS, 1)) + random(HEADS, 1)
        rope = Rope(10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM))
        spec = LayerSpec(0, 1, HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, rope)
        made = storage.with_tables(get(method), KV_HEADS, HEAD_DIM, device)
        self.layer = FoldedLayer(made, packed_for(made, spec, device, None), max_length=context)
        self.layer.lazy_initialization(self.keys, self.values)
        self.encoders = ("torch", "triton") if self.layer.encoder.name == "triton" else ("torch",)

    def __call__(self, encoder: str, behind_ms: float = 0.0) -> tuple[float, int, int]:
        """Milliseconds, bytes allocated at most beyond those kept, and bytes kept; ``behind_ms``: with the device busy for so
        long when it is asked."""
        layer = self.layer
        layer.reset()
        layer.lazy_initialization(self.keys, self.values)
        if encoder == "torch":
            layer.writer.encoder = Encoder("torch", "asked for")
        elif layer.encoder.name != encoder:
            raise AssertionError(layer.encoder.reason)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if behind_ms:
            torch.cuda._sleep(int(behind_ms * CLOCK))
        start.record()
        layer.append(self.keys, self.values, self.queries, None)
        stop.record()
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated()
        return start.elapsed_time(stop), torch.cuda.max_memory_allocated() - after, after - before

    def packed(self) -> list[torch.Tensor]:
        """The packed bytes, without storage that holds nothing yet."""
        layer = self.layer
        (slab,), blocks = layer.slabs, layer.packed[0] // layer.block
        sides = zip(layer.layout.formats, (slab.keys, slab.values), strict=True)
        stored = [t for form, fields in sides for t in form.take(fields, blocks).values()]
        return [t.contiguous().view(torch.uint8).clone() for t in stored]


def differing(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Fraction of bytes that differ."""
    return sum(int((a != b).sum()) for a, b in zip(got, want, strict=True)) / sum(b.numel() for b in want)


def run(methods: Sequence[str] = METHODS, context: int = 32768, rows: Path | None = None) -> Iterator[Prefill]:
    """Measure method by method, torch first; ``rows``: CSV file that rows are appended to.

    Raises
    ------
    KVFoldError
        Without a CUDA GPU.
    """
    device, env = need_gpu("prefill"), environment()
    whole = prefill_ms(Work("kivi", context=context, layers=LAYERS), device)
    for method in methods:
        prompt = Prompt(method, context, device)
        prompt("torch")
        want, slow = prompt.packed(), None
        for encoder in prompt.encoders:
            prompt(encoder)
            error, limit = differing(prompt.packed(), want), LIMITS.get(method, 0.0)
            fast = prompt(encoder)[0] < SLOW_MS
            count, behind = (REPEATS, 3) if fast else (1, 1)
            runs = sorted(prompt(encoder) for _ in range(count)) if error <= limit else []
            p20, p50, p80 = (runs[int(f * (count - 1))][0] for f in (0.2, 0.5, 0.8)) if runs else (None,) * 3
            slow = slow or p50
            waits = sorted(prompt(encoder, 20 + 2 * runs[-1][0])[0] for _ in range(behind)) if runs else [None]
            busy = waits[len(waits) // 2]
            row = Prefill(
                method=method,
                encoder=encoder,
                batch=1,
                context=context,
                dtype="bfloat16",
                error=error,
                limit=limit,
                p20_ms=p20,
                p50_ms=p50,
                p80_ms=p80,
                busy_ms=busy,
                percent=None if busy is None else 100 * LAYERS * busy / whole,
                extra_mb=max(r[1] for r in runs) / 1e6 if runs else None,
                kept_mb=runs[0][2] / 1e6 if runs else None,
                ratio=slow / p50 if slow and p50 else None,
                **env,
            )
            if rows is not None:
                append(rows, [row])
            yield row


def line(row: Any) -> str:
    """One row for people."""
    head = f"{row.method:18} {row.encoder:6} {row.context:>7} tokens"
    if row.p50_ms is None:
        return f"{head}  {row.error:.1e} of the bytes differ > {row.limit:.0e}: not timed"
    share = "" if row.percent is None else f" ({row.percent:.1f} % of a prefill)"
    text = (
        f"{head}  {row.p50_ms:.3f} ms ({row.p20_ms:.3f} - {row.p80_ms:.3f})  behind others {row.busy_ms:.3f} ms{share}"
    )
    text = f"{text}  {row.extra_mb:.1f} MB beyond"
    return f"{text} {row.kept_mb:.1f} MB kept  {row.ratio:.1f} times as fast as torch  differ {row.error:.1e}"


def main(argv: list[str] | None = None) -> int:
    args = options("prefill", __doc__, ROWS).parse_args(argv)
    failed = False
    for row in run(rows=args.rows):
        failed |= row.p50_ms is None
        show(row, line(row), args.json)
    return int(failed)


if __name__ == "__main__":
    sys.exit(script(main))
