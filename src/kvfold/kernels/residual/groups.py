"""Decode attention over TaSQ's storage: tables in shared memory; see :mod:`kvfold.kernels.residual._decode`."""

from typing import Any

import torch

from kvfold.arithmetic import beside
from kvfold.formats import Format, GroupCodes
from kvfold.formats.grouped import GroupBook
from kvfold.formats.packing import UNIT
from kvfold.kernels.common.tables import Tables, TablesPlan, unit_turns
from kvfold.kernels.device import settled
from kvfold.kernels.residual._decode import residual_kernel, shared_bytes
from kvfold.kernels.stored import rotation_of
from kvfold.rope import Rope


class GroupTables(Tables):
    """TaSQ's: a row of eight channels is read at once. VQLLM's kernel, in its variant for groups."""

    begin = 20  # 12 and 40 made no difference
    waits = True
    value_fields = ("codes", "rms")

    def foreign(self, key_format: Format, value_format: Format) -> str | None:
        for side, form in (("keys", key_format), ("values", value_format)):
            if not isinstance(form, GroupCodes):
                return f"{side}: {form.kind} storage; allowed: {GroupCodes.kind}"
            if (form.head_dim, form.vector, form.codes) != (128, 8, 256):
                return f"{side}: {form.describe()} of {form.head_dim}; allowed: 256 codes for 8 channels of 128"
            if form.block % UNIT:
                return f"{side}: blocks of {form.block} tokens; allowed: multiples of {UNIT}"
            if form.strided != (side == "keys"):
                return f"{side}: strided={form.strided}; allowed: {side == 'keys'}"
            if form.book is None:
                return f"{side}: no codebook"
        assert isinstance(key_format, GroupCodes) and isinstance(value_format, GroupCodes)
        return None if key_format.centred == value_format.centred else "a mean of one side alone"

    def kernel(self) -> Any:
        return residual_kernel

    def constants(self, key_format: Format, value_format: Format, plan: TablesPlan) -> dict[str, Any]:
        assert isinstance(key_format, GroupCodes)
        return {"K": 4, "V": 4, "C": plan.columns, "GROUPS": 2 if key_format.centred else 1}

    def program_bytes(self, key_format: Format, value_format: Format, plan: TablesPlan) -> int:
        fixed = self.constants(key_format, value_format, plan)
        return int(shared_bytes(fixed["K"], fixed["V"], fixed["C"], plan.warps, fixed["GROUPS"]))

    def beside(
        self, key_format: Format, value_format: Format, rope: Rope, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Rows of keys and of values, turns, and both means; where there are none, something else in their place."""
        assert isinstance(key_format, GroupCodes) and isinstance(value_format, GroupCodes)
        assert key_format.book is not None and value_format.book is not None
        books = key_format.book.on(device), value_format.book.on(device)
        rows = _rows(books[0]), _rows(books[1])
        means = rows
        if key_format.centred:
            assert books[0].mean is not None and books[1].mean is not None
            means = books[0].mean, books[1].mean
        return *rows, rotation_of(rope, 64, UNIT, 1, 128, device).freq, turns(rope, device), *means


@beside
def _rows(book: GroupBook) -> torch.Tensor:
    """Rows as lanes read them, made once: graphs know where they are; fp16 [heads, 2, codes, 2, 4, 8], of group 8 i + 4 e + t
    in [i, code, e, t]."""
    rows = book.codes.to(torch.float16).unflatten(1, (2, 2, 4)).permute(0, 1, 4, 2, 3, 5)
    return settled(rows.contiguous())


def turns(rope: Rope, device: torch.device) -> torch.Tensor:
    """Cosines and sines of a unit's tokens as lanes read them from shared memory, fp16 [tokens, 4, 4, 8].

    Of group 4 i + t four cosines, then four sines, of pairs 4 i + t + 16 m. Odd tokens have i 0 and 1, and 2 and 3, the other
    way round.
    """
    return unit_turns(rope, device, (1, 3, 4, 0, 2))
