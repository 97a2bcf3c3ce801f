"""Codes into tables that fit shared memory (CommVQ's keys, VQLLM), decoded to 16 bits; see
:mod:`kvfold.kernels._unpack_tables_gluon`."""

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvfold.formats import Fields, Format, ResidualCodes
from kvfold.formats.codebook import AdditiveCodes
from kvfold.formats.packing import UNIT
from kvfold.formats.residual import Codebook
from kvfold.kernels.device import multiprocessors
from kvfold.kernels.stored import room_between, rotation_of
from kvfold.kernels.windows import program_memory
from kvfold.rope import Rope

WARPS = 8
PAIRS = 64


def serves(form: Format, rope: Rope | None, device: torch.device) -> bool:
    """Whether :func:`unpack_tables` decodes a format, with keys before RoPE where there is one."""
    if device.type != "cuda" or form.head_dim != 2 * PAIRS or (rope is not None and rope.inv_freq.numel() != PAIRS):
        return False
    if isinstance(form, AdditiveCodes):
        book = form.codebook
        good = (
            rope is not None
            and form.levels == 64
            and book is not None
            and book.steps is not None
            and book.rotary == 128
        )
    elif isinstance(form, ResidualCodes):
        good = (form.vector, form.codes, form.strided) == (32, 256, rope is not None) and form.stages in (4, 8)
        good = good and form.block % UNIT == 0 and form.book is not None and form.book.steps is not None
    else:
        return False
    return good and bytes_of(form) <= program_memory(device)


def bytes_of(form: AdditiveCodes | ResidualCodes) -> int:
    """Bytes of shared memory of a program."""
    from kvfold.kernels._unpack_tables_gluon import shared_bytes

    return int(shared_bytes(form.stages, isinstance(form, AdditiveCodes), _keys(form), WARPS))


def _keys(form: AdditiveCodes | ResidualCodes) -> bool:
    return isinstance(form, AdditiveCodes) or form.strided


def constants(form: AdditiveCodes | ResidualCodes, bf16: bool) -> dict[str, Any]:
    """What the kernel is specialized on."""
    return {
        "STAGES": form.stages,
        "STEPS": isinstance(form, AdditiveCodes),
        "KEYS": _keys(form),
        "BF16": bf16,
    }


def resident(form: AdditiveCodes | ResidualCodes, device: torch.device) -> int:
    """Programs of a multiprocessor at a time."""
    return 2 if 2 * bytes_of(form) <= program_memory(device) else 1


def options(form: AdditiveCodes | ResidualCodes, programs: int) -> dict[str, int]:
    """Launch options where a multiprocessor has so many programs."""
    return {"num_warps": WARPS} | ({"maxnreg": 128} if programs > 1 else {})


_values: WeakKeyDictionary[Codebook, torch.Tensor] = WeakKeyDictionary()


def rows(form: AdditiveCodes | ResidualCodes, device: torch.device) -> torch.Tensor:
    """Tables as lanes read them, made once: graphs know where they are."""
    from kvfold.kernels import codebook, residual

    if isinstance(form, AdditiveCodes):
        assert form.codebook is not None
        return codebook.rows_of(form.codebook.on(device))[0]
    assert form.book is not None
    book = form.book.on(device)
    if form.strided:
        return residual._rows(book, True)
    if book not in _values:  # a lane's eight channels lie together
        _values[book] = residual._with_steps(book, torch.arange(form.vector, device=device))
    return _values[book]


@lru_cache(maxsize=256)
def turns(rope: Rope, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns per token of pairs and what float32 leaves of them, float32 [2, 64]; cosines and sines of a unit's tokens, fp16
    [2, 32, 64]."""
    from kvfold.kernels.fragments import _turns

    return _turns(rope, device)[0], rotation_of(rope, PAIRS, UNIT, 1, 2 * PAIRS, device).table


def make_tables(form: Format, rope: Rope | None, device: torch.device) -> None:
    """Make what :func:`unpack_tables` reads, on the current stream."""
    assert isinstance(form, AdditiveCodes | ResidualCodes)
    rows(form, device)
    if rope is not None:
        turns(rope, device)


def _kernel() -> Any:
    from kvfold.kernels._unpack_tables_gluon import unpack_tables_kernel

    return unpack_tables_kernel


def unpack_tables(
    form: Format,
    fields: Fields,
    start: int,
    first: int,
    out: torch.Tensor,
    rope: Rope | None,
    first_position: torch.Tensor | None,
) -> None:
    """Decode tokens of a span to ``out`` [batch, num_kv_heads, tokens, head_dim], whole units from number ``first`` on; as of
    :func:`kvfold.kernels.unpack.unpack`."""
    assert isinstance(form, AdditiveCodes | ResidualCodes)
    batch, heads, tokens, _ = out.shape
    units, device = tokens // UNIT, out.device
    together = resident(form, device)
    programs = min(units, max(1, together * multiprocessors(device) // (batch * heads)))
    table = rows(form, device)
    freq, near, position = table, table, table  # not read where nothing is rotated
    if rope is not None:
        assert first_position is not None
        (freq, near), position = turns(rope, device), first_position
    _kernel()[(programs, batch * heads)](
        fields["codes"],
        fields["rms"],
        table,
        freq,
        near,
        position,
        out,
        heads,
        start,
        first // UNIT,
        units,
        room_between(form, fields) // UNIT,
        out.stride(1) // out.stride(2),
        1.0 if rope is None else float(rope.scaling),
        **constants(form, out.dtype == torch.bfloat16),
        **options(form, together),
    )
