"""Launches of kernels that read storage for tensor cores: one for each span, their arguments, and the merge."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from kvfold.formats import Fields
from kvfold.kernels.call import Span, Windows
from kvfold.kernels.common.partials import Partials
from kvfold.kernels.device import device_info

MAX_TOKENS = 16
"""Query tokens of a call at most."""


class Shape(Protocol):
    """What of a plan says how many programs there are."""

    @property
    def columns(self) -> int: ...
    @property
    def splits(self) -> int: ...
    @property
    def dense_splits(self) -> int: ...


P = TypeVar("P", bound=Shape)
Launch = Callable[[Span, Partials, int, P, bool], None]
"""Of a span: where results go, the first part of them, the plan, and whether the launch is early."""


def parts(plan: Shape) -> int:
    """Parts that a launch writes: of packed tokens, and of the windows."""
    return plan.splits + plan.dense_splits


def sizes(q: torch.Tensor, windows: Windows) -> tuple[int, int, int]:
    """KV heads of all sequences, query rows of each, and places in the windows; of ``q`` [batch, num_heads, tokens, head_dim].

    Raises
    ------
    ValueError
        More query tokens than kernels take.
    """
    batch, num_heads, tokens, _ = q.shape
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"tokens={tokens}: 1 to {MAX_TOKENS} query tokens are allowed")
    heads = windows.sink[0].shape[1]
    return batch * heads, num_heads // heads * tokens, windows.sink[0].shape[2] + windows.ring[0].shape[2]


def attend(
    q: torch.Tensor,
    windows: Windows,
    spans: Sequence[Span],
    plans: Sequence[P],
    launch: Launch[P],
    parts_of: Callable[[P], int],
    out: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One launch for each span, and the merge of all parts.

    Parameters
    ----------
    parts_of
        How many parts a launch of a plan writes.
    out, sinks
        As of :func:`kvfold.kernels.affine.decode.decode_attention`.
    """
    jobs, rows, _ = sizes(q, windows)
    early = device_info(q.device).has_pdl
    partials = Partials.empty(jobs, sum(map(parts_of, plans)), rows, q.shape[3], q.device)
    at = 0
    for plan, span in zip(plans, spans, strict=True):
        launch(span, partials, at, plan, early)
        at += parts_of(plan)
    return partials.merge(torch.empty_like(q) if out is None else out, early, sinks, q.shape[2])


def slab_fields(stored: Fields, names: Iterable[str]) -> list[torch.Tensor]:
    """A side's fields by name, as kernels take them; what a span leaves out at the end may follow each KV head.

    Raises
    ------
    ValueError
        They do not lie as a slab's.
    """
    found = [stored[name] for name in names]
    for x in found:
        if not (x.is_contiguous() or x.stride(0) == x.shape[1] * x.stride(1)):
            raise ValueError(f"packed storage: strides {x.stride()} of {tuple(x.shape)} are not those of a slab")
    return found


def arguments(
    windows: Windows,
    partials: Partials,
    part: int,
    plan: Shape,
    span: Span,
    scale: float,
    tokens: int,
    rooms: Sequence[int],
    turned: Sequence[torch.Tensor] = (),
) -> list[Any]:
    """What the kernels take after a span's fields, in their order.

    Parameters
    ----------
    part
        The first of the parts that are written.
    tokens
        Query tokens.
    rooms
        From one KV head's storage to the next one's: blocks, and pages of keys and of values where there are some.
    turned
        Positions and tables of RoPE, where a kernel takes them.
    """
    sink, ring = windows.sink, windows.ring
    lengths = [windows.packed_len, *turned, *sink, windows.sink_len, *ring, windows.recent_len]
    rows = [float(scale), sink[0].shape[1], partials.out.shape[2], tokens, plan.columns, span.start, *rooms]
    splits = [sink[0].shape[2], ring[0].shape[2], plan.splits, plan.dense_splits, partials.splits, part]
    return [*lengths, partials.out, partials.top, partials.total, *rows, *splits]
