"""Codes into tables that fit shared memory (CommVQ's keys, VQLLM, TaSQ), decoded to 16 bits; see
:mod:`kvfold.kernels.long._tables`."""

from typing import Any

import torch

from kvfold.arithmetic import beside, lasting
from kvfold.formats import Fields, Format, GroupCodes, ResidualCodes
from kvfold.formats.codebook import AdditiveCodes
from kvfold.formats.grouped import GroupBook
from kvfold.formats.packing import UNIT
from kvfold.formats.residual import Codebook
from kvfold.kernels.device import device_info
from kvfold.kernels.stored import room_between, rotation_of
from kvfold.rope import Rope

WARPS = 8
"""Of a program."""
PAIRS = 64
REGISTERS = 65536
"""Of a multiprocessor."""
BESIDE = 168
"""Registers of CommVQ's keys, beside which a program of its values has a place."""
Tabled = AdditiveCodes | ResidualCodes | GroupCodes


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
    elif isinstance(form, GroupCodes):
        good = form.vector in (4, 8) and (form.codes, form.strided) == (256, rope is not None)
        good = good and form.block % UNIT == 0 and form.book is not None
    else:
        return False
    return good and bytes_of(form) <= device_info(device).shared_memory


def bytes_of(form: Tabled) -> int:
    """Bytes of shared memory of a program."""
    from kvfold.kernels.long._tables import shared_bytes

    return int(shared_bytes(_stages(form), isinstance(form, AdditiveCodes), _keys(form), WARPS, _groups(form)))


def _stages(form: Tabled) -> int:
    """Of codes of groups a quarter of their number: bytes of a unit are as many as those of so many stages."""
    return form.groups // 4 if isinstance(form, GroupCodes) else form.stages


def _groups(form: Tabled) -> int:
    """0, or of codes of groups 1, and 2 where vectors have a mean."""
    return 0 if not isinstance(form, GroupCodes) else 2 if form.centred else 1


def _keys(form: Tabled) -> bool:
    return isinstance(form, AdditiveCodes) or form.strided


def constants(form: Tabled, bf16: bool) -> dict[str, Any]:
    """What the kernel is specialized on."""
    return {
        "STAGES": _stages(form),
        "STEPS": isinstance(form, AdditiveCodes),
        "KEYS": _keys(form),
        "BF16": bf16,
        "GROUPS": _groups(form),
    }


def resident(form: Tabled, device: torch.device) -> int:
    """Programs of a multiprocessor at a time. Values of bits are unpacked beside CommVQ's keys, and need a place."""
    if isinstance(form, AdditiveCodes):
        return 1
    return 2 if 2 * bytes_of(form) <= device_info(device).shared_memory else 1


def options(form: Tabled, programs: int) -> dict[str, int]:
    """Launch options where a multiprocessor has so many programs."""
    most = BESIDE if isinstance(form, AdditiveCodes) else REGISTERS // (32 * WARPS * programs) // 8 * 8
    return {"num_warps": WARPS} | ({"maxnreg": most} if most < 256 else {})


def rows(form: Tabled, device: torch.device) -> torch.Tensor:
    """Tables as lanes read them, made once: graphs know where they are."""
    from kvfold.kernels.commvq import decode as codebook

    if isinstance(form, GroupCodes):
        assert form.book is not None
        book_of_groups = form.book.on(device)
        return eights(book_of_groups) if form.vector == 8 else fours(book_of_groups, form.strided)
    if isinstance(form, AdditiveCodes):
        assert form.codebook is not None
        return codebook.rows_of(form.codebook.on(device))[0]
    assert form.book is not None
    book = form.book.on(device)
    return _stage_rows(book, form.strided)


@beside
def _stage_rows(book: Codebook, keys: bool) -> torch.Tensor:
    """Rows of stages as lanes read them; of values a lane's eight channels lie together.

    Bytes [stages / 4, codes, 4, 32], then fp16 [2, 32]: steps, and what sums of numbers and 1024 have too much, negative.
    """
    element, steps = torch.arange(32, device=book.codes.device), book.steps
    assert steps is not None
    if keys:  # 8 t + 4 h + m is channel 16 h + 4 t + m of the group
        element = element // 4 % 2 * 16 + element // 8 * 4 + element % 4
    # bytes 0 and 2, and 1 and 3, of each four become words of two channels
    rows = steps.numbers[:, :, element.view(-1, 2, 2).mT.flatten()]
    rows = rows.unflatten(0, (-1, 4)).transpose(1, 2).contiguous()
    extra = (steps.shift - 64 * len(steps.numbers) - 1024) * steps.step
    both = torch.stack((steps.step, extra))[:, element].to(torch.float16)
    return torch.cat((rows.flatten(), both.flatten().view(torch.uint8))).view(torch.float16)


@beside
def eights(book: GroupBook) -> torch.Tensor:
    """Rows of eight channels as lanes read them, made once; fp16 [heads, 2, codes, 2, 4, 8], of group 8 i + 4 e + t in
    [i, code, e, t]."""
    return book.codes.to(torch.float16).unflatten(1, (2, 2, 4)).permute(0, 1, 4, 2, 3, 5).contiguous()


@beside
def fours(book: GroupBook, keys: bool) -> torch.Tensor:
    """Rows of four channels as lanes read them, made once; fp16 [heads, 2, codes, 4, 4, 4].

    Of keys' group 16 f + 4 t + 2 i + e in [i, code, 2 f + e, t]; of values' group 8 i + 2 t + e in [e, code, i, t].
    """
    codes = book.codes.to(torch.float16)
    if keys:
        codes = codes.unflatten(1, (2, 4, 2, 2)).permute(0, 3, 5, 1, 4, 2, 6)
    else:
        codes = codes.unflatten(1, (4, 4, 2)).permute(0, 3, 4, 1, 2, 5)
    return codes.reshape(len(codes), 2, -1, 4, 4, 4).contiguous()


@lasting(256)
def turns(rope: Rope, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns per token of pairs and what float32 leaves of them, float32 [2, 64]; cosines and sines of a unit's tokens, fp16
    [2, 32, 64]."""
    from kvfold.kernels.fragments.layout import rope_turns

    return rope_turns(rope, device)[0], rotation_of(rope, PAIRS, UNIT, 1, 2 * PAIRS, device).table


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
    assert isinstance(form, Tabled)
    rows(form, device)
    if rope is not None:
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
    rope: Rope | None,
    first_position: torch.Tensor | None,
) -> None:
    """Decode tokens of a span to ``out`` [batch, num_kv_heads, tokens, head_dim], whole units from number ``first`` on; as of
    :func:`kvfold.kernels.generic.unpack.unpack`."""
    assert isinstance(form, Tabled)
    batch, heads, tokens, _ = out.shape
    units, device = tokens // UNIT, out.device
    together = resident(form, device)
    programs = min(units, max(1, together * device_info(device).sms // (batch * heads)))
    table = rows(form, device)
    freq, near, position = table, table, table  # not read where nothing is rotated
    if rope is not None:
        assert first_position is not None
        (freq, near), position = turns(rope, device), first_position
        if isinstance(form, GroupCodes):
            near = group_turns(rope, device)
    mean = table  # not read where there is none
    if isinstance(form, GroupCodes) and form.centred:
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
        position,
        mean,
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
