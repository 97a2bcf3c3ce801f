"""Decode attention over VQLLM's storage: tables in shared memory; see :mod:`kvfold.kernels.residual._decode`."""

from typing import Any

import torch

from kvfold.arithmetic import beside
from kvfold.formats import Format, ResidualCodes
from kvfold.formats.packing import UNIT
from kvfold.formats.residual import Codebook
from kvfold.kernels.common.tables import Tables, TablesPlan, unit_turns
from kvfold.kernels.device import settled
from kvfold.kernels.residual._decode import residual_kernel, shared_bytes
from kvfold.kernels.stored import rotation_of
from kvfold.rope import Rope

SEEN = frozenset({(4, 4), (8, 8)})
"""Stages of keys and of values whose numbers a run on a GPU has shown right."""


class ResidualTables(Tables):
    """VQLLM's and GSRQ's: stages of keys and of values are added up."""

    begin = 12
    waits = True
    value_fields = ("codes", "rms")

    def foreign(self, key_format: Format, value_format: Format) -> str | None:
        for side, form in (("keys", key_format), ("values", value_format)):
            if not isinstance(form, ResidualCodes):
                return f"{side}: {form.kind} storage; allowed: {ResidualCodes.kind}"
            if (form.head_dim, form.vector, form.codes) != (128, 32, 256):
                return f"{side}: {form.describe()} of {form.head_dim}; allowed: 256 codes for 32 channels of 128"
            if form.block % UNIT:
                return f"{side}: blocks of {form.block} tokens; allowed: multiples of {UNIT}"
            if form.stages not in (4, 8):
                return f"{side}: {form.stages} stages; allowed: 4, 8"
            if form.strided != (side == "keys"):
                return f"{side}: strided={form.strided}; allowed: {side == 'keys'}"
            if form.book is None or form.book.steps is None:
                return f"{side}: a codebook that is not in whole steps"
        return None

    def unseen(self, key_format: Format, value_format: Format) -> str | None:
        assert isinstance(key_format, ResidualCodes) and isinstance(value_format, ResidualCodes)
        if (key_format.stages, value_format.stages) in SEEN:
            return None
        return f"{key_format.stages} and {value_format.stages} stages: not seen right on a GPU yet"

    def kernel(self) -> Any:
        return residual_kernel

    def constants(self, key_format: Format, value_format: Format, plan: TablesPlan) -> dict[str, Any]:
        assert isinstance(key_format, ResidualCodes) and isinstance(value_format, ResidualCodes)
        return {"K": key_format.stages, "V": value_format.stages, "C": plan.columns, "GROUPS": 0}

    def program_bytes(self, key_format: Format, value_format: Format, plan: TablesPlan) -> int:
        assert isinstance(key_format, ResidualCodes) and isinstance(value_format, ResidualCodes)
        return int(shared_bytes(key_format.stages, value_format.stages, plan.columns, plan.warps))

    def beside(
        self, key_format: Format, value_format: Format, rope: Rope, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Rows of keys and of values, and turns; there are no means, so rows stand in their place."""
        assert isinstance(key_format, ResidualCodes) and isinstance(value_format, ResidualCodes)
        assert key_format.book is not None and value_format.book is not None
        rows = _rows(key_format.book.on(device), True), _rows(value_format.book.on(device), False)
        return *rows, rotation_of(rope, 64, UNIT, 1, 128, device).freq, turns(rope, device), *rows


@beside
def _rows(book: Codebook, keys: bool) -> torch.Tensor:
    """Rows as lanes read them, made once: graphs know where they are.

    Bytes [stages / 4, codes, 4, 32], then fp16 [2, 32]: steps, and what sums of numbers and 1024 have too much, negative.
    """
    at = torch.arange(32, device=book.codes.device)
    if keys:  # 8 t + 4 h + m is channel 16 h + 4 t + m of the group
        element = at // 4 % 2 * 16 + at // 8 * 4 + at % 4
    else:  # 8 t + 2 w + b is channel 8 w + 2 t + b
        element = at // 2 % 4 * 8 + at // 8 * 2 + at % 2
    return settled(_with_steps(book, element))


def _with_steps(book: Codebook, element: torch.Tensor) -> torch.Tensor:
    steps = book.steps
    assert steps is not None
    # bytes 0 and 2, and 1 and 3, of each four become words of two channels
    rows = steps.numbers[:, :, element.view(-1, 2, 2).mT.flatten()]
    rows = rows.unflatten(0, (-1, 4)).transpose(1, 2).contiguous()
    extra = (steps.shift - 64 * len(steps.numbers) - 1024) * steps.step
    both = torch.stack((steps.step, extra))[:, element].to(torch.float16)
    return torch.cat((rows.flatten(), both.flatten().view(torch.uint8))).view(torch.float16)


def turns(rope: Rope, device: torch.device) -> torch.Tensor:
    """Cosines and sines of a unit's tokens as lanes read them from shared memory, fp16 [tokens, 4, 4, 8].

    Of group i, lane t four cosines, then four sines, of pairs 16 t + 4 m + i. Odd tokens have groups 0 and 1, and 2 and 3, the
    other way round.
    """
    return unit_turns(rope, device, (1, 4, 2, 0, 3))
