"""Decode attention over CommVQ's storage: tables of a KV head in shared memory; see :mod:`kvfold.kernels.commvq._decode`."""

from typing import Any

import torch

from kvfold.arithmetic import beside
from kvfold.formats import Format
from kvfold.formats.binary import BinaryCodes
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook
from kvfold.formats.packing import UNIT
from kvfold.kernels.common.tables import Tables, TablesPlan
from kvfold.kernels.commvq._decode import codebook_kernel, shared_bytes
from kvfold.kernels.stored import rotation_of
from kvfold.rope import Rope

SEEN = frozenset({(11, 128), (21, 256)})
"""Stages of keys and bits of values whose numbers a run on a GPU has shown right."""


class CodebookTables(Tables):
    """CommVQ's: stages of keys, and bits of values whose sums another map turns into vectors."""

    begin = 10
    waits = False  # to begin early gained nothing
    value_fields = ("bits",)

    def foreign(self, key_format: Format, value_format: Format) -> str | None:
        if not isinstance(key_format, AdditiveCodes):
            return f"keys: {key_format.kind} storage; allowed: {AdditiveCodes.kind}"
        if not isinstance(value_format, BinaryCodes) or value_format.joint > 1:
            return f"values: {value_format.kind} storage; allowed: {BinaryCodes.kind}, of every head its own"
        if key_format.head_dim != 128 or value_format.codes not in (128, 256):
            return f"head_dim={key_format.head_dim}, {value_format.codes} bits of values; allowed: 128, and 128 or 256"
        if key_format.levels != 64:
            return f"keys: levels={key_format.levels}; allowed: 64"
        book = key_format.codebook
        if book is None or book.steps is None:
            return "keys: centres that are not in steps"
        if book.rotary != 128:
            return f"keys: RoPE of {book.rotary} channels; allowed: 128"
        if value_format.operand != "plain":
            return f"values: operand={value_format.operand}; allowed: plain"
        return None

    def unseen(self, key_format: Format, value_format: Format) -> str | None:
        assert isinstance(key_format, AdditiveCodes) and isinstance(value_format, BinaryCodes)
        if (key_format.stages, value_format.codes) in SEEN:
            return None
        return f"{key_format.stages} stages, {value_format.codes} bits of values: not seen right on a GPU yet"

    def kernel(self) -> Any:
        return codebook_kernel

    def constants(self, key_format: Format, value_format: Format, plan: TablesPlan) -> dict[str, Any]:
        assert isinstance(key_format, AdditiveCodes) and isinstance(value_format, BinaryCodes)
        return {"STAGES": key_format.stages, "V": value_format.codes, "C": plan.columns}

    def program_bytes(self, key_format: Format, value_format: Format, plan: TablesPlan) -> int:
        assert isinstance(key_format, AdditiveCodes) and isinstance(value_format, BinaryCodes)
        return int(shared_bytes(key_format.stages, value_format.codes, plan.columns, plan.warps))

    def beside(
        self, key_format: Format, value_format: Format, rope: Rope, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Rows of keys, what scores are multiplied with, and turns."""
        assert isinstance(key_format, AdditiveCodes) and key_format.codebook is not None
        turning = rotation_of(rope, 64, UNIT, 1, 128, device)
        return *rows_of(key_format.codebook.on(device)), turning.freq, turning.table


@beside
def rows_of(book: KeyCodebook) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as lanes read them, and what scores are multiplied with by head; made once: graphs know where they are.

    Of every head uint8 [stages, 64, 2, 4, 16], then fp16 [groups - 1, 64] ratios of steps, fp16 [128] what sums of numbers
    lack, and float32 [64] steps of stage 0.
    """
    steps = book.steps
    assert steps is not None
    at = torch.arange(64, device=steps.numbers.device)
    # byte p of word v of lane t: bytes 0 and 2, and 1 and 3, are neighbours
    word = at // 4 % 4 * 2 + at % 2
    channel = word // 4 * 32 + at // 16 * 8 + word % 4 * 2 + at // 2 % 2
    rows = steps.numbers[..., torch.cat((channel, channel + 64))].flatten(1)
    real, imaginary = steps.shift.unflatten(-1, (2, -1)).unbind(1)
    more = torch.cat((real - imaginary, real + imaginary), -1).to(torch.float16)
    rest = (steps.ratio.flatten(1), more, steps.step)
    whole = torch.cat((rows, *(x.contiguous().view(torch.uint8) for x in rest)), -1)
    return whole.view(torch.float16).contiguous(), torch.ones_like(steps.step[:, 0])
