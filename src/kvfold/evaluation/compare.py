"""The main job: the same text and prompt under every method, one row each at every prefix."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.engines.transformers.graph import decoding
from kvfold.errors import KVFoldError
from kvfold.evaluation.perplexity import CHUNK, Reference, now, prefill, reference, score
from kvfold.evaluation.schema import Header, Row, Sidecar, finite, write_json
from kvfold.evaluation.text import Text
from kvfold.evaluation.windows import CHARACTERS, as_prefixes, bos_of, check_context, tail
from kvfold.models import ModelInfo

if TYPE_CHECKING:
    from kvfold.engines.transformers.cache import FoldedCache
    from kvfold.methods.base import Method

PREFIX = 1024
TOKENS = 512
NEW_TOKENS = 16
# Fewer say nothing: the windows alone of most methods hold 128 tokens.
MIN_PREFIX = 64
MIN_TOKENS = 32
MIN_NEW_TOKENS = 2  # the first one's step is not timed

Job = tuple[str, int]
"""Method and prefix of a row."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Header and rows: prefix by prefix, in the order of the methods."""

    header: Header
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        return {"header": dataclasses.asdict(self.header), "rows": [dataclasses.asdict(row) for row in self.rows]}


def encode(
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    prefix: int | Sequence[int],
    tokens: int,
    new_tokens: int,
    max_context: int | None,
) -> dict[int, torch.Tensor]:
    """The beginning of a text, as it is read at every prefix.

    At each the same tokens are scored, those after the longest prefix; a shorter one begins later.

    Returns
    -------
    dict
        Prefix to ``[1, prefix + tokens + 1]`` int64, ascending.

    Raises
    ------
    KVFoldError
        Too few tokens asked for, more than the model's context, or more than the text has.
    """
    prefixes = as_prefixes(prefix)
    if prefixes[0] < MIN_PREFIX:
        raise KVFoldError(f"prefix: {prefixes[0]} is too small; give at least {MIN_PREFIX} tokens")
    if tokens < MIN_TOKENS:
        raise KVFoldError(f"tokens: {tokens} is too small; give at least {MIN_TOKENS}")
    if new_tokens < MIN_NEW_TOKENS:
        raise KVFoldError(f"new_tokens: {new_tokens} is too small; give at least {MIN_NEW_TOKENS}")
    check_context(prefixes, tokens, new_tokens, max_context)
    needed = prefixes[-1] + tokens + 1
    # Encoding all of a long book would take longer than a method; its beginning nearly always has the tokens.
    ids = tokenizer(text.text[: CHARACTERS * needed], return_tensors="pt", verbose=False).input_ids[0, :needed]
    if len(ids) < needed:
        ids = tokenizer(text.text, return_tensors="pt", verbose=False).input_ids[0, :needed]
    if len(ids) < needed:
        raise KVFoldError(
            f"text: {text.source} has {len(ids)} tokens, and {needed} are needed "
            f"(prefix {prefixes[-1]} + tokens {tokens} + 1); give a longer text, or smaller --prefix or --tokens"
        )
    bos = bos_of(tokenizer, ids)
    return {p: tail(ids, p + tokens + 1, bos) for p in prefixes}


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    info: ModelInfo,
    methods: Sequence[str | Method],
    text: Text,
    *,
    prefix: int | Sequence[int] = PREFIX,
    tokens: int = TOKENS,
    new_tokens: int = NEW_TOKENS,
    chunk: int = CHUNK,
    seed: int = 0,
    json_path: Path | None = None,
    on_start: Callable[[list[Job], dict[Job, Row]], None] | None = None,
    on_tokens: Callable[[str, int], None] | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> Comparison:
    """Score the same text under every method, at every prefix.

    Each method prefills a prefix, scores the next `tokens` through its cache, and goes on greedily for `new_tokens`.
    Full-precision logits are computed once per prefix.

    Parameters
    ----------
    model, tokenizer, info
        As `kvfold.models.load` returns them.
    methods
        Method strings or objects; repeated ones are run once.
    text
        What is read, from its beginning; see `encode`.
    prefix
        Tokens prefilled: a number, or several for as many rows of each method.
    tokens, new_tokens, chunk
        Token counts; see `Header`.
    seed
        Given to torch before each row. The methods carry their own seeds; this one is for the rest.
    json_path
        Where the result goes, written at the end in one step. Rows are kept beside it meanwhile, and a later call with
        the same header takes them over.
    on_start, on_tokens, on_row
        For progress: all rows to be made, as (method, prefix), and those taken over; (what runs, tokens done); each new row.

    Raises
    ------
    KVFoldError
        A method, the text or a count does not fit the model. All are tried before the first is run.
    OutputError
        The result cannot be written; it carries the :class:`Comparison`, and the rows stay beside the file.
    """
    import kvfold
    from kvfold import methods as registry

    specs = {str(method): method for method in (registry.get(m) if isinstance(m, str) else m for m in methods)}
    if not specs:
        raise KVFoldError(f"methods: none given; known: {', '.join(registry.REGISTRY)}")
    pieces = encode(tokenizer, text, prefix, tokens, new_tokens, info.max_context)
    for method in specs.values():
        kvfold.explain(model, method)
    header = make_header(
        model,
        info,
        text=text.source,
        text_sha256=text.sha256,
        texts={text.source: text.sha256},
        prefixes=list(pieces),
        tokens=tokens,
        chunk=chunk,
        new_tokens=new_tokens,
        seed=seed,
    )
    sidecar = Sidecar.of(json_path, Row)
    kept = sidecar.start(header) if sidecar else {}
    jobs: list[Job] = [(name, length) for length in pieces for name in specs]
    done = {(row.method, row.prefix): row for row in kept.values() if (row.method, row.prefix) in jobs}
    if on_start is not None:
        on_start(jobs, done)
    for length, piece in pieces.items():
        ids = piece.to(model.device)
        truth: Reference | None = None
        for name, method in specs.items():
            if (name, length) in done:
                continue
            if truth is None:
                truth = _reference(model, ids, length, chunk, on_tokens)
            report = None if on_tokens is None else (lambda n, name=name: on_tokens(name, n))
            warm_up(model, method, ids, length, chunk)
            torch.manual_seed(seed)
            try:
                row = _row(model, tokenizer, method, ids, length, new_tokens, truth, report)
            finally:
                kvfold.unfold(model)
            done[name, length] = row
            if sidecar is not None:
                sidecar.add(row)
            if on_row is not None:
                on_row(row)
    result = Comparison(header, [done[job] for job in jobs])
    if json_path is not None:
        write_json(json_path, result.to_dict(), result)
    if sidecar is not None:
        sidecar.remove()
    return result


def make_header(model: PreTrainedModel, info: ModelInfo, **what: Any) -> Header:
    """A header of now, of this process and this model; ``what`` are the fields that say what is run."""
    return Header(
        versions=versions(),
        model=info.name,
        parameters=info.parameters,
        dtype=info.dtype,
        device=device_name(model.device),
        threads=torch.get_num_threads(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **what,
    )


def versions() -> dict[str, str]:
    """Of what results depend on."""
    import kvfold

    return {
        "kvfold": kvfold.__version__,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
    }


def _reference(
    model: PreTrainedModel,
    ids: torch.Tensor,
    prefix: int,
    chunk: int,
    on_tokens: Callable[[str, int], None] | None,
) -> Reference:
    # The first calls of a process pay for thread pools and lazy set-up: without this the first method would.
    with torch.inference_mode():
        model(ids[:, :MIN_PREFIX], logits_to_keep=1)
    report = None if on_tokens is None else (lambda n: on_tokens("full precision", n))
    return reference(model, ids, prefix, chunk, report)


def _row(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    ids: torch.Tensor,
    prefix: int,
    new_tokens: int,
    truth: Reference,
    on_tokens: Callable[[int], None] | None,
) -> Row:
    import kvfold

    started = time.perf_counter()
    cache = kvfold.fold(model, method, max_length=room(model, ids.shape[1] - 1 + new_tokens))
    result = score(model, ids, prefix, cache, truth.chunk, truth, on_tokens)
    sizes, full, held = cache.nbytes(), cache.full_nbytes(), cache.get_seq_length()
    bits = [float(cache.effective_bits(tables)) if sizes["packed"] else None for tables in (False, True)]
    decoded = decode(model, cache, result.last_logits, new_tokens)
    if on_tokens is not None:
        on_tokens(new_tokens)
    return Row(
        method=str(method),
        prefix=prefix,
        tested=result.tested,
        bits_without_tables=bits[0],
        effective_bits=bits[1],
        cache_bytes=int(sizes["total"]),
        full_cache_bytes=int(full),
        ppl=finite(result.ppl) if result.tested else None,
        kld=finite(result.kld) if result.tested else None,
        top1=finite(result.top1) if result.tested else None,
        prefill_tokens_per_s=prefix / result.prefill_seconds,
        decode_tokens_per_s=(new_tokens - 1) / decoded.seconds,
        decode_path=decoded.path,
        seconds=time.perf_counter() - started,
        packed_bytes=int(sizes["packed"]),
        window_bytes=int(sizes["windows"]),
        state_bytes=int(sizes["state"]),
        table_bytes=int(sizes["tables"]),
        cache_tokens=int(held),
        continuation=str(tokenizer.decode(decoded.tokens)),
    )


def warm_up(model: PreTrainedModel, method: Method, ids: torch.Tensor, prefix: int, chunk: int) -> None:
    """Fill a throw-away cache, so that what is compiled for a method is there before it is timed.

    On a GPU with all of the prefix, since kernels are compiled for lengths too. On a CPU with as many of its tokens as make a
    method pack some: its loops are the same for all lengths, and a prefill takes as long as the row.

    Parameters
    ----------
    ids
        ``[1, tokens]`` int64, more than `prefix` tokens.
    prefix, chunk
        Tokens that will be prefilled, and given to a scoring call.
    """
    import kvfold

    tokens = prefix
    if not on_gpu(model):
        tokens = min(prefix, method.sink + method.recent + 2 * method.block)
    more = ids[:, tokens : tokens + chunk]
    cache = kvfold.fold(model, method, max_length=room(model, tokens + more.shape[1] + 2))
    try:
        prefill(model, ids, tokens, cache)
        with torch.inference_mode():
            logits = model(more, past_key_values=cache, use_cache=True).logits[0, -1]
        decode(model, cache, logits, 2)
    finally:
        kvfold.unfold(model)


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What :func:`decode` generated.

    Attributes
    ----------
    tokens
        Greedy choices, one after the other.
    seconds
        For all but the first.
    path
        ``graph``, or ``steps: `` and why not in one.
    """

    tokens: list[int]
    seconds: float
    path: str


def decode(model: PreTrainedModel, cache: FoldedCache, logits: torch.Tensor, new_tokens: int) -> Decoded:
    """Decode greedily after the cache's content; does not stop at an end token.

    On a GPU in a CUDA graph where there can be one. The first step is not timed: it captures the graph.

    Parameters
    ----------
    logits
        ``[vocab]``, the prediction of the first token.
    new_tokens
        At least 2.
    """
    graphs = decoding(model, cache, new_tokens, required=False) if on_gpu(model) else nullcontext()
    tokens = [logits.argmax().to(model.device).view(1, 1)]

    def step() -> None:
        logits = model(tokens[-1], past_key_values=cache, use_cache=True).logits
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))

    with torch.inference_mode(), graphs as steps:
        step()
        started = now(model)
        for _ in range(new_tokens - 1):
            step()
        seconds = now(model) - started
        path = "steps: no CUDA device" if steps is None else decode_path(steps.replayed, new_tokens, steps.reason)
    return Decoded(torch.cat(tokens[:new_tokens], dim=1)[0].tolist(), seconds, path)


def decode_path(replayed: int, tokens: int, reason: str | None) -> str:
    """How tokens were decoded, as rows say it: ``graph``, or ``steps: `` and the reason."""
    if replayed == tokens:
        return "graph"
    return f"steps: {reason}" if not replayed else f"steps: {tokens - replayed} of {tokens} tokens before a graph"


def room(model: PreTrainedModel, tokens: int) -> int | None:
    """`max_length` of a cache for so many tokens: on a GPU storage is taken at once, on a CPU as it is needed."""
    return tokens if on_gpu(model) else None


def on_gpu(model: PreTrainedModel) -> bool:
    """Whether a model can decode in CUDA graphs."""
    return bool(model.device.type == "cuda")


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the CPU and its number of usable cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return name
