"""Decoding end to end: a whole model's step in a CUDA graph, folded against bf16, random weights in real shapes."""

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

import kvfold
from kvfold.bench.rows import append, environment, need_gpu, options, progress, script, show
from kvfold.engines.transformers.graph import DecodeGraph
from kvfold.engines.transformers.names import passing

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072 + 1024,
    },
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 131072 + 1024,
    },
}
ROWS = Path("benchmarks/rows/decode.csv")
METHODS = ("fold", "fold:bits=2", "kivi", "innerq:paper=true,mode=asym", "innerq:paper=true")
TORCH = "bf16, Torch"
"""Full precision as its user has it: norms and MLPs compiled, products Torch's."""
PARTS = ("LlamaRMSNorm", "LlamaMLP")
"""What is compiled of a model."""
STEPS = 64


@dataclass
class DecodeRow:
    """One model, batch, context and cache; ``ms`` per step, median of the replays."""

    model: str
    batch: int
    context: int
    method: str
    ms: float
    p20_ms: float
    p80_ms: float
    tokens_per_s: float
    cache_gb: float
    peak_gb: float
    ratio: float | None
    gpu: str
    driver: str
    torch: str
    triton: str
    commit: str


class SliceLayer(DynamicLayer):
    """Full precision in one buffer of fixed size: a step writes its token to the last slot and reads all of them, so that
    SDPA runs without a mask and a captured step does the same work as a growing cache's at this length."""

    def __init__(self, batch: int, heads: int, length: int, dim: int, device: torch.device) -> None:
        super().__init__()
        self.keys, self.values = torch.randn(2, batch, heads, length, dim, dtype=torch.bfloat16, device=device)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):  # type: ignore[no-untyped-def]
        assert self.keys is not None and self.values is not None
        self.keys[:, :, -1:].copy_(key_states)
        self.values[:, :, -1:].copy_(value_states)
        return self.keys, self.values


def full_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):  # type: ignore[no-untyped-def]
    """SDPA over grouped heads without a mask: what the fastest kernels want."""
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("kvfold_bench_full", full_attention)


def build(
    shape: str, device: torch.device, compiled: bool = True, dynamic: bool | None = None, layers: int | None = None
) -> PreTrainedModel:
    """The model with random weights, bf16, without a weight on the host.

    Parameters
    ----------
    shape : str
        A key of :data:`SHAPES`.
    compiled : bool
        Compile norms and MLPs, for every cache alike: their small kernels would otherwise be a third of a step.
    dynamic : bool or None
        Compile for all batch sizes at once; None: as Torch chooses.
    layers : int or None
        Fewer layers than the model has.
    """
    config = LlamaConfig(**SHAPES[shape])
    config.num_hidden_layers = layers or config.num_hidden_layers
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
    for module in model.modules():
        if compiled and type(module).__name__ in PARTS:
            module.compile(dynamic=dynamic)
    return model.eval()


def filled(model: PreTrainedModel, method: str, batch: int, context: int, room: int) -> kvfold.FoldedCache:
    """A folded cache of ``context`` random tokens: speed and memory do not depend on what they are."""
    cache = kvfold.fold(model, method, max_length=context + room)
    config, device = model.config, model.device
    shape = (batch, config.num_key_value_heads, context, config.head_dim)
    for layer in cache.folded:
        k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        q = torch.randn(
            batch, config.num_attention_heads, context, config.head_dim, dtype=torch.bfloat16, device=device
        )
        layer.lazy_initialization(k, v)
        layer.append(k, v, q, None)
    return cache


def replay_times(step: torch.cuda.CUDAGraph, steps: int = STEPS) -> list[float]:
    """Milliseconds of each replay."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(steps)]
    for start, end in events:
        start.record()
        step.replay()
        end.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in events]


@dataclass
class Captured:
    """A step in a graph; ``nbytes`` of its cache, which ``holds`` keeps alive."""

    graph: torch.cuda.CUDAGraph
    nbytes: int
    holds: Any

    def times(self) -> list[float]:
        """Milliseconds of each of :data:`STEPS` replays."""
        replay_times(self.graph, 8)
        return replay_times(self.graph)


@contextmanager
def compiled_parts(model: PreTrainedModel) -> Iterator[None]:
    """Within it norms and MLPs are compiled, each kind once."""
    parts = [module for module in model.modules() if type(module).__name__ in PARTS]
    for module in parts:
        module.compile()
    try:
        yield
    finally:
        for module in parts:
            module._compiled_call_impl = None


def full_precision(model: PreTrainedModel, batch: int, context: int, as_torch: bool = False) -> list[Captured]:
    """Steps over a bf16 cache by SDPA's flash and cuDNN kernels; norms, products and all else as in a folded step, or
    (``as_torch``) compiled norms and MLPs, and Torch's products."""
    from kvfold.engines.transformers.fused import small_operations

    config, device = model.config, model.device
    model.set_attn_implementation("kvfold_bench_full")
    layers = [
        SliceLayer(batch, config.num_key_value_heads, context, config.head_dim, device)
        for _ in range(config.num_hidden_layers)
    ]
    cache = Cache(layers=list(layers))
    ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
    positions = torch.full((batch, 1), context - 1, device=device)
    size = 2 * batch * config.num_key_value_heads * context * config.head_dim * 2 * config.num_hidden_layers
    found = []
    for backend in (torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        with (
            torch.no_grad(),
            torch.nn.attention.sdpa_kernel(backend),
            compiled_parts(model) if as_torch else nullcontext(),
            small_operations(model, products=not as_torch),
        ):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(2):
                    model(input_ids=ids, position_ids=positions, **passing(model, cache), use_cache=True)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(input_ids=ids, position_ids=positions, **passing(model, cache), use_cache=True)
        found.append(Captured(graph, size, (cache, ids, positions)))
    model.set_attn_implementation("sdpa")
    return found


def captured(model: PreTrainedModel, method: str, batch: int, context: int) -> list[Captured]:
    """A method's step; ``bf16`` and :data:`TORCH`: those of full precision, of which the fastest counts."""
    if method in ("bf16", TORCH):
        return full_precision(model, batch, context, method == TORCH)
    cache = filled(model, method, batch, context, STEPS + 32)
    graph = DecodeGraph(model, cache, STEPS + 16)
    return [Captured(graph.graph, cache.nbytes()["total"], graph)]


def timed(
    steps: list[Captured], shape: str, batch: int, context: int, method: str, base: float | None, env: dict[str, Any]
) -> DecodeRow:
    """The row of the fastest of ``steps``; ``base``: milliseconds of full precision, None where this is it."""
    known = {f.name for f in fields(DecodeRow)}
    times = min((step.times() for step in steps), key=statistics.median)
    ms, cuts = statistics.median(times), statistics.quantiles(times, n=5)
    return DecodeRow(
        model=shape,
        batch=batch,
        context=context,
        method=method,
        ms=ms,
        p20_ms=cuts[0],
        p80_ms=cuts[-1],
        tokens_per_s=batch / ms * 1e3,
        cache_gb=steps[0].nbytes / 1e9,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9,
        ratio=None if base is None else base / ms,
        **{k: v for k, v in env.items() if k in known},
    )


def measure(shape: str, batch: int, context: int, methods: list[str]) -> Iterator[DecodeRow]:
    """Full precision first, with the products of a folded step and as Torch computes it, then each method, in one run.

    Rows come as they are measured, so that a run that is ended keeps those before.
    """
    device = torch.device("cuda")
    model, env = build(shape, device, compiled=False), environment()
    base: float | None = None
    for method in ("bf16", TORCH, *methods):
        progress(f"{shape} B={batch} N={context}: {method}")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        row = timed(captured(model, method, batch, context), shape, batch, context, method, base, env)
        base = row.ms if base is None else base
        yield row


def line(row: DecodeRow) -> str:
    """One row for people."""
    ratio = "" if row.ratio is None else f"  {row.ratio:.2f}x"
    shape = f"{row.model} B={row.batch} N={row.context}"
    return f"{shape} {row.method:24} {row.ms:.3f} ms  {row.tokens_per_s:.0f} tokens/s  {row.cache_gb:.2f} GB{ratio}"


def main(argv: list[str] | None = None) -> int:
    parser = options("decode", __doc__, ROWS)
    parser.add_argument("--model", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--methods", nargs="+", action="extend", metavar="METHOD", help=f"default: {' '.join(METHODS)}")
    args = parser.parse_args(argv)
    chosen = args.methods or list(METHODS)
    for method in chosen:
        kvfold.methods.get(method)
    need_gpu("decode")
    for row in measure(args.model, args.batch, args.context, chosen):
        show(row, line(row), args.json)
        if args.rows is not None:
            append(args.rows, [row])
    return 0


if __name__ == "__main__":
    sys.exit(script(main))
