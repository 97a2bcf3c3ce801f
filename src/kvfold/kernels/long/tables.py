"""Keys of codes into tables that fit shared memory (CommVQ's, TaSQ's of four channels), decoded to 16 bits; see
:mod:`kvfold.kernels.long._tables`.

The kernel with readers makes CommVQ's calls of 512 tokens take 1.41 and 1.69 times fp16's time, at 1 and 2 bits.
"""

import math
from typing import Any

import torch

from kvfold.arithmetic import beside, lasting
from kvfold.formats import Fields, Format, GroupCodes
from kvfold.formats.codebook import AdditiveCodes
from kvfold.formats.grouped import GroupBook
from kvfold.formats.packing import UNIT
from kvfold.kernels.device import device_info
from kvfold.kernels.stored import room_between, rotation_of
from kvfold.rope import Rope

WARPS = 8
"""Of a program."""
PAIRS = 64
REGISTERS = 65536
"""Of a multiprocessor."""
Tabled = AdditiveCodes | GroupCodes


def serves(form: Format, rope: Rope | None, device: torch.device) -> bool:
    """Whether :func:`unpack_tables` decodes a format of keys that are rotated as they are read."""
    if device.type != "cuda" or form.head_dim != 2 * PAIRS or rope is None or rope.inv_freq.numel() != PAIRS:
        return False
    if isinstance(form, AdditiveCodes):
        book = form.codebook
        good = form.levels == 64 and book is not None and book.steps is not None and book.rotary == 2 * PAIRS
    elif isinstance(form, GroupCodes):
        good = (form.vector, form.codes, form.strided) == (4, 256, True)
        good = good and form.block % UNIT == 0 and form.book is not None
    else:
        return False
    return good and bytes_of(form) <= device_info(device).shared_memory


def bytes_of(form: Tabled) -> int:
    """Bytes of shared memory of a program."""
    from kvfold.kernels.long._tables import shared_bytes

    return int(shared_bytes(_stages(form), isinstance(form, AdditiveCodes), WARPS))


def _stages(form: Tabled) -> int:
    return form.stages if isinstance(form, AdditiveCodes) else 1


def constants(form: Tabled, bf16: bool) -> dict[str, Any]:
    """What the kernel is specialized on."""
    return {
        "STAGES": _stages(form),
        "STEPS": isinstance(form, AdditiveCodes),
        "CENTRED": isinstance(form, GroupCodes) and form.centred,
        "BF16": bf16,
    }


def resident(form: Tabled, device: torch.device) -> int:
    """Programs of a multiprocessor at a time; with CommVQ at 1 bit, two take as long as one."""
    if isinstance(form, AdditiveCodes):
        return 1
    return 2 if 2 * bytes_of(form) <= device_info(device).shared_memory else 1


def options(programs: int) -> dict[str, int]:
    """Launch options where a multiprocessor has so many programs."""
    most = REGISTERS // (32 * WARPS * programs) // 8 * 8
    return {"num_warps": WARPS} | ({"maxnreg": most} if most < 256 else {})


def rows(form: Tabled, device: torch.device) -> torch.Tensor:
    """Tables as lanes read them, made once: graphs know where they are."""
    from kvfold.kernels.commvq import decode as codebook

    if isinstance(form, GroupCodes):
        assert form.book is not None
        return fours(form.book.on(device))
    assert form.codebook is not None
    return codebook.rows_of(form.codebook.on(device))[0]


@beside
def fours(book: GroupBook) -> torch.Tensor:
    """Rows of four channels as lanes read them, made once; fp16 [heads, 2, codes, 4, 4, 4].

    Of group 16 f + 4 t + 2 i + e in [i, code, 2 f + e, t].
    """
    codes = book.codes.to(torch.float16).unflatten(1, (2, 4, 2, 2)).permute(0, 3, 5, 1, 4, 2, 6)
    return codes.reshape(len(codes), 2, -1, 4, 4, 4).contiguous()


@lasting(256)
def turns(rope: Rope, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns per token of pairs and what float32 leaves of them, float32 [2, 64]; cosines and sines of a unit's tokens, fp16
    [2, 32, 64]."""
    turns = rope.inv_freq.double().cpu() / (2 * math.pi)
    parts = torch.stack((turns.float(), (turns - turns.float().double()).float()))
    return parts.to(device), rotation_of(rope, PAIRS, UNIT, 1, 2 * PAIRS, device).table


@lasting(256)
def group_turns(rope: Rope, device: torch.device) -> torch.Tensor:
    """Cosines and sines of a unit's tokens as lanes of keys of groups read them, fp16 [32, 4, 4, 8].

    Of part m, lane t four cosines, then four sines, of pairs 16 m + 4 t on. Odd tokens have parts 0 and 1, and 2 and 3, the
    other way round.
    """
    table = rotation_of(rope, PAIRS, UNIT, 1, 2 * PAIRS, device).table  # [2, tokens, 64]
    parts = table.view(2, UNIT, 4, 4, 4).permute(1, 2, 3, 0, 4)
    odd = torch.arange(UNIT, device=device) % 2 == 1
    return torch.where(odd.view(-1, 1, 1, 1, 1), parts[:, [1, 0, 3, 2]], parts).flatten(-2).contiguous()


def make_tables(form: Format, rope: Rope | None, device: torch.device) -> None:
    """Make what :func:`unpack_tables` reads, on the current stream."""
    assert isinstance(form, Tabled) and rope is not None
    rows(form, device)
    turns(rope, device)
    if isinstance(form, GroupCodes):
        group_turns(rope, device)


def _kernel() -> Any:
    from kvfold.kernels.long._tables import unpack_tables_kernel

    return unpack_tables_kernel


def unpack_tables(
    form: Format,
    fields: Fields,
    start: int,
    first: int,
    out: torch.Tensor,
    rope: Rope,
    first_position: torch.Tensor,
) -> None:
    """Decode tokens of a span to ``out`` [batch, num_kv_heads, tokens, head_dim], whole units from number ``first`` on; as of
    :func:`kvfold.kernels.generic.unpack.unpack`."""
    assert isinstance(form, Tabled)
    batch, heads, tokens, _ = out.shape
    units, device = tokens // UNIT, out.device
    together = resident(form, device)
    programs = min(units, max(1, together * device_info(device).sms // (batch * heads)))
    table, (freq, near) = rows(form, device), turns(rope, device)
    mean = table  # not read where there is none
    if isinstance(form, GroupCodes):
        near = group_turns(rope, device)
        if form.centred:
            assert form.book is not None
            held = form.book.on(device).mean
            assert held is not None
            mean = held
    _kernel()[(programs, batch * heads)](
        fields["codes"],
        fields["rms"],
        table,
        freq,
        near,
        first_position,
        mean,
        out,
        heads,
        start,
        first // UNIT,
        units,
        room_between(form, fields) // UNIT,
        out.stride(1) // out.stride(2),
        float(rope.scaling),
        **constants(form, out.dtype == torch.bfloat16),
        **options(together),
    )
