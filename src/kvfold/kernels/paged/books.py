"""Storing a step where codes are chosen from learned codebooks (VQLLM, CommVQ): a kernel for the windows, one for each side."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton

from kvfold.formats import Fields, Format, ResidualCodes
from kvfold.formats.codebook import AdditiveCodes, BinaryCodes, BitSearch, KeyCodebook, times_i
from kvfold.formats.residual import Codebook
from kvfold.kernels.paged._store_books import append_kernel, close_kernel
from kvfold.kernels.paged.call import PagedCall
from kvfold.kernels.paged.work import Workspace, closing_arguments
from kvfold.rope import Rope

BOOKS = (ResidualCodes, AdditiveCodes, BinaryCodes)
MOST_LEVELS = 64
"""Of a stage of CommVQ's keys, whose scores a program holds."""
MOST_BITS = 256
"""Of a value of CommVQ, likewise."""
WARPS = {ResidualCodes: 4, AdditiveCodes: 2, BinaryCodes: 4}
EACH = 4
"""Levels of a stage that are compared with all others side by side."""
RESIDENT = {ResidualCodes: 2, AdditiveCodes: 4, BinaryCodes: 2}
"""Programs per multiprocessor."""


def serves(key_format: Format, value_format: Format) -> bool:
    """Whether either side's codes are of codebooks: then this module is asked, and nobody else."""
    return isinstance(key_format, BOOKS) or isinstance(value_format, BOOKS)


def unsupported(key_format: Format, value_format: Format) -> str | None:
    """Why no kernel encodes these formats; None if one does."""
    for side, form in (("keys", key_format), ("values", value_format)):
        if why := _unsupported(form):
            return f"{side}: {why}"
    return None


def _unsupported(form: Format) -> str | None:
    if form.head_dim > 256 or form.head_dim % 8:
        return f"head_dim={form.head_dim}; allowed: multiples of 8 up to 256"
    if isinstance(form, ResidualCodes):
        if form.fit != "rms":
            return f"scales fitted by fit={form.fit}; allowed: rms"
        return None if form.vector <= 64 else f"vector={form.vector}; allowed: up to 64"
    if isinstance(form, AdditiveCodes):
        return None if form.levels <= MOST_LEVELS else f"levels={form.levels}; allowed: up to {MOST_LEVELS}"
    if isinstance(form, BinaryCodes):
        if form.joint > 1:
            return "one code for all heads"
        if form.operand != "plain":
            return f"operand={form.operand}; allowed: plain"
        return None if form.codes <= MOST_BITS else f"{form.codes} bits; allowed: up to {MOST_BITS}"
    return f"{form.kind} storage beside codes of codebooks; allowed: {', '.join(each.kind for each in BOOKS)}"


def store(call: PagedCall, new: list[torch.Tensor], workspace: Workspace) -> None:
    """See :func:`kvfold.kernels.paged.store`; ``new``: keys and values of the windows' dtype, channels side by side."""
    step, dim = call.step, call.window_keys.shape[3]
    windows = call.window_keys, call.window_values
    append_kernel[(4 * workspace.processors,)](
        *_strided(new),
        *(x for window in windows for x in (window, *window.stride()[:3])),
        step.query_start,
        workspace.slots,
        step.seqs,
        call.num_kv_heads,
        D=dim,
        H=triton.next_power_of_2(call.num_kv_heads),
        WINDOW_BLOCK=step.window_block,
        num_warps=4,
    )
    sides = ((call.key_format, call.keys), (call.value_format, call.values))
    for i, (form, fields) in enumerate(sides):
        tables, constants = tables_of(form, call.bits, new[i].device)
        codes, scale = _addressed(form, fields)
        rope = call.rope if i == 0 else None
        warps, programs = WARPS[type(form)], RESIDENT[type(form)] * workspace.processors
        own = programs * 16 * MOST_LEVELS if isinstance(form, AdditiveCodes) else 0
        close_kernel[(programs,)](
            *_strided(new[i : i + 1]),
            windows[i],
            *windows[i].stride()[:3],
            *closing_arguments(step, workspace),
            codes,
            *codes.stride()[:2],
            scale,
            *scale.stride()[:2],
            tables,
            workspace.top if rope is None else frequencies(rope, new[i].device),
            1.0 if rope is None else 1.0 / rope.scaling,
            torch.empty(own, dtype=torch.float32, device=codes.device),
            step.seqs,
            call.num_kv_heads,
            FORM=constants,
            ROPE=0 if rope is None else 2 * rope.inv_freq.numel(),
            BLOCK=step.block,
            WINDOW_BLOCK=step.window_block,
            num_warps=warps,
            num_stages=1,
        )


@lru_cache(maxsize=64)
def frequencies(rope: Rope, device: torch.device) -> torch.Tensor:
    """A rotation's, where kernels read them."""
    return rope.inv_freq.to(device)


def _strided(some: list[torch.Tensor]) -> list[Any]:
    return [x for t in some for x in (t, *t.stride()[:2])]


def _addressed(form: Format, fields: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and scales; bits have none, and what stands for them is never written."""
    return (fields["bits"], fields["bits"]) if isinstance(form, BinaryCodes) else (fields["codes"], fields["rms"])


Tables = tuple[tuple[torch.Tensor, ...], tuple[int, ...]]


def tables_of(form: Format, bits: BitSearch | None, device: torch.device) -> Tables:
    """What the kernel reads, and what it is specialized on; made once for a codebook, for graphs know where it lies.

    Raises
    ------
    ValueError
        Where bits are to be chosen and nothing says how.
    """
    if isinstance(form, ResidualCodes):
        assert form.book is not None
        shape = (0, form.head_dim, form.vector, form.codes, form.stages, int(form.strided))
        return _once(form.book.on(device), _of_vectors), shape
    if isinstance(form, AdditiveCodes):
        assert form.codebook is not None
        book = form.codebook.on(device)
        sizes = form.head_dim, form.stages, form.levels, form.passes, book.rotary
        return _once(book, _of_keys), (1, *sizes, min(EACH, form.levels))
    assert isinstance(form, BinaryCodes)
    if bits is None:
        raise ValueError("bits: None; allowed: how a value's bits are chosen")
    return bits.tables, (2, form.head_dim, form.codes, bits.flips, bits.hidden)


_made: WeakKeyDictionary[Any, tuple[torch.Tensor, ...]] = WeakKeyDictionary()


def _once(book: Any, make: Callable[[Any], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    if book not in _made:
        _made[book] = make(book)
    return _made[book]


def _of_vectors(book: Codebook) -> tuple[torch.Tensor, ...]:
    codes = book.codes.to(torch.float16).contiguous()
    return codes, codes.float().square().sum(-1).contiguous()


def _of_keys(book: KeyCodebook) -> tuple[torch.Tensor, ...]:
    """The metric commutes with i, so one half of a stage's centres says what the other is."""
    metric = book.metric.float().contiguous()
    seen = (book.centres.float() @ metric.unsqueeze(1)).contiguous()
    cross = 2 * seen @ times_i(seen, book.rotary).mT
    return metric, seen, seen.square().sum(-1).contiguous(), cross.contiguous()
