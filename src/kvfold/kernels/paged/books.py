"""Storing a step where vectors are encoded one by one: codes of learned codebooks (VQLLM, TaSQ, NOVA-KV, CommVQ) and rotated
affine groups (values of NOVA-KV). A kernel for each side."""

from typing import Any

import torch

from kvfold.arithmetic import beside, lasting
from kvfold.formats import AffineGroups, Fields, Format, GroupCodes, Hadamard, Paged, Projected, ResidualCodes
from kvfold.formats.binary import BinaryCodes, BitSearch
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook, times_i
from kvfold.formats.grouped import GroupBook
from kvfold.formats.projected import HeadMaps
from kvfold.formats.residual import Codebook
from kvfold.kernels.commvq import encode as encode_pairs
from kvfold.kernels.paged._store_books import close_kernel
from kvfold.kernels.paged.call import PagedCall
from kvfold.kernels.paged.work import Workspace, closing_arguments
from kvfold.kernels.searched import encode as encode_search
from kvfold.rope import Rope

BEFORE_ROPE = (ResidualCodes, AdditiveCodes, GroupCodes)
"""Storage whose kernel takes the rotation of keys back."""
GROUPS = {"PART": 256, "num_warps": 4, "num_stages": 1}
"""Codes of a group that a program compares at a time: all, so that it waits for a group's table once; its warps."""
MOST_LEVELS = 64
"""Of a stage of CommVQ's keys, whose scores a program holds."""
MOST_BITS = 256
"""Of a value of CommVQ, likewise."""
WARPS = {ResidualCodes: 4, AdditiveCodes: 2, BinaryCodes: 4, Paged: 2}
EACH = 4
"""Levels of a stage that are compared with all others side by side."""
RESIDENT = {ResidualCodes: 2, AdditiveCodes: 4, BinaryCodes: 2, Paged: 8}
"""Programs per multiprocessor; of groups those of 16 warps, which have 128 registers a thread."""


def serves(form: Format) -> bool:
    """Whether vectors are encoded one by one: then this module is asked, and nobody else."""
    return isinstance(form, ResidualCodes | AdditiveCodes | BinaryCodes | GroupCodes | Projected) or _is_rotated(form)


def _is_rotated(form: Format) -> bool:
    """Whether these are affine groups of rotated vectors, without statistics of a page."""
    return (
        isinstance(form, Paged)
        and not form.page_fields()
        and isinstance(form.inner, AffineGroups)
        and form.inner.axis == "channel"
        and isinstance(form.basis, Hadamard)
    )


def searches(form: Format) -> bool:
    """Whether a kernel compares codes to 15 bits of their distance: of two that are as near, it may take the other one."""
    inner = form.inner if isinstance(form, Paged | Projected) else form
    return isinstance(inner, GroupCodes) or (form is not inner and isinstance(inner, ResidualCodes))


def heads_of(form: Format) -> int | None:
    """KV heads that there are tables of; None: tables are those of all, or there are none."""
    return encode_search.heads_of(form) if isinstance(form, AdditiveCodes | GroupCodes | Projected) else None


def unsupported(form: Format) -> str | None:
    """Why no kernel encodes this format; None if one does."""
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
    if isinstance(form, Projected) and not isinstance(form.inner, GroupCodes):
        return f"{form.inner.kind} storage under a map; allowed: {GroupCodes.kind}"
    return encode_search.unsupported(form)


def close(
    call: PagedCall, is_key: bool, new: torch.Tensor, appended: tuple[Any, ...], lanes: int, workspace: Workspace
) -> None:
    """Encode the blocks of keys or of values that a step completes into their pages.

    Parameters
    ----------
    new : Tensor [tokens, num_kv_heads, head_dim]
        The step's keys or values, of the windows' dtype, channels side by side.
    appended : tuple
        As :func:`kvfold.kernels.paged._store.append_step` takes it.
    lanes : int
        KV heads, rounded up to a power of two, whose tokens this launch writes to the windows; 0: none.
    """
    step, (form, fields, window) = call.step, call.side(is_key)
    tables, constants = tables_of(form, call.bits, new.device)
    codes, scale = _addressed(form, fields)
    rope = call.rope if is_key else None
    programs = RESIDENT.get(type(form), 16 // GROUPS["num_warps"]) * workspace.processors
    close_kernel[(programs,)](
        new,
        *new.stride()[:2],
        window,
        *window.stride()[:3],
        *closing_arguments(step, workspace),
        codes,
        *codes.stride()[:2],
        scale,
        *scale.stride()[:2],
        tables,
        workspace.top if rope is None else frequencies(rope, new.device),
        1.0 if rope is None else 1.0 / rope.scaling,
        torch.empty(programs * _own(form), dtype=torch.float32, device=codes.device),
        appended,
        step.seqs,
        call.num_kv_heads,
        FORM=constants,
        H=lanes,
        ROPE=0 if rope is None else 2 * rope.inv_freq.numel(),
        BLOCK=step.block,
        WINDOW_BLOCK=step.window_block,
        SEEN=call.seen,
        **options(form),
    )


def options(form: Format) -> dict[str, Any]:
    """How the kernel is compiled for a format."""
    if isinstance(form, GroupCodes | Projected):
        return {name: x for name, x in GROUPS.items() if name != "PART"} | {"maxnreg": 128}
    return {"num_warps": WARPS[type(form)], "num_stages": 1, "enable_fp_fusion": not _is_rotated(form)}


def _own(form: Format) -> int:
    """Numbers that a program keeps for itself."""
    if isinstance(form, GroupCodes | Projected):
        return 32 * form.head_dim
    return 16 * MOST_LEVELS if isinstance(form, AdditiveCodes) else 0


@lasting(64)
def frequencies(rope: Rope, device: torch.device) -> torch.Tensor:
    """A rotation's, where kernels read them."""
    return rope.inv_freq.to(device)


def _addressed(form: Format, fields: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and scales; bits have none, and what stands for them is never written."""
    if isinstance(form, BinaryCodes):
        return fields["bits"], fields["bits"]
    if _is_rotated(form):
        return fields["codes"].view(torch.uint8), fields["meta"]
    return fields["codes"], fields["rms"]


Tables = tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]


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
        return _of_vectors(form.book.on(device)), shape
    if isinstance(form, Projected):
        assert form.maps is not None and isinstance(form.inner, GroupCodes)
        found, constants = tables_of(form.inner, bits, device)
        return found[:5] + _of_maps(form.maps.on(device)), (*constants[:-1], 1)
    if isinstance(form, GroupCodes):
        assert form.book is not None
        some = _of_groups(form.book.on(device))
        flags = int(form.strided), form.fit, int(form.centred)
        return (*some, some[1], some[1]), (
            3,
            form.head_dim,
            form.vector,
            form.codes,
            *flags,
            min(GROUPS["PART"], form.codes),
            0,
        )
    if isinstance(form, Paged):
        assert isinstance(form.inner, AffineGroups) and isinstance(form.basis, Hadamard)
        return (form.basis.signs(device),), (4, form.head_dim, form.inner.bits_per_code, form.basis.block)
    if isinstance(form, AdditiveCodes):
        assert form.codebook is not None
        book = form.codebook.on(device)
        sizes = form.head_dim, form.stages, form.levels, book.rotary, min(EACH, form.levels)
        return _of_keys(book), (1, *sizes, *encode_pairs.order(form).values())
    assert isinstance(form, BinaryCodes)
    if bits is None:
        raise ValueError("bits: None; allowed: how a value's bits are chosen")
    return bits.tables, (2, form.head_dim, form.codes, bits.flips, bits.hidden)


@beside
def _of_vectors(book: Codebook) -> tuple[torch.Tensor, ...]:
    codes = book.codes.to(torch.float16).contiguous()
    return codes, codes.float().square().sum(-1).contiguous()


@beside
def _of_groups(book: GroupBook) -> tuple[torch.Tensor, ...]:
    """What the search reads, and the mean; anything where there is none."""
    table, halves, codes, sizes = encode_search.group_tables(book)
    return table, halves, codes, sizes, halves if book.mean is None else book.mean.contiguous()


@beside
def _of_maps(maps: HeadMaps) -> tuple[torch.Tensor, ...]:
    return maps.mean.float().contiguous(), maps.apply.float().contiguous()


@beside
def _of_keys(book: KeyCodebook) -> tuple[torch.Tensor, ...]:
    """The metric commutes with i, so one half of a stage's centres says what the other is."""
    metric = book.metric.float().contiguous()
    seen = (book.centres.float() @ metric.unsqueeze(1)).contiguous()
    cross = 2 * seen @ times_i(seen, book.rotary).mT
    return metric, seen, seen.square().sum(-1).contiguous(), cross.contiguous()
