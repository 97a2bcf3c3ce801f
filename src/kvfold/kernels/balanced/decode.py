"""Decode attention over balanced tiles of 2-bit codes (KVarN); see :mod:`kvfold.kernels.balanced._decode`."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import Balanced, Format, Hadamard, Paged
from kvfold.formats.basis import Basis
from kvfold.kernels.balanced._decode import balanced_kernel, shared_bytes
from kvfold.kernels.call import AttentionCall, Span
from kvfold.kernels.common.partials import LOG2E, early_launch
from kvfold.kernels.device import DeviceInfo, device_info
from kvfold.kernels.stored import inner, room_of

BLOCK = 128
"""Tokens of a tile."""
MOST_ROWS = 16
"""Query rows of a KV head; each eight of them read all tokens."""
WARPS, REGISTERS = 4, 168
"""Of a program, and of a thread at most: three programs have room on a multiprocessor."""
RESIDENT = 3


FEW = 8
"""Multiprocessors for each KV head from which on what follows begins early."""


@dataclass(frozen=True)
class Plan:
    """Launch shape; ``splits``: parts of a span's tokens."""

    splits: int


def unsupported(key_format: Format, value_format: Format) -> str | None:
    """Why the kernel does not serve these formats; None if it does."""
    for name, form, by_token in (("keys", key_format, True), ("values", value_format, False)):
        tile = inner(form)
        if not isinstance(tile, Balanced) or (isinstance(form, Paged) and form.page_fields()):
            return f"{name}: {form.kind if not isinstance(form, Paged) else tile.kind} storage; allowed: balanced"
        if tile.inner.operand != "plain" or tile.inner.bits_per_code != 2:
            return f"{name}: {tile.inner.bits_per_code} bits, operand={tile.inner.operand}; allowed: 2, plain"
        if tile.block != BLOCK or tile.by_token != by_token:
            return f"{name}: tiles of {tile.block} tokens, by_token={tile.by_token}; allowed: {BLOCK}, {by_token}"
        if form.head_dim % 16 or form.head_dim > 128:
            return f"{name}: head_dim={form.head_dim}; allowed: multiples of 16 up to 128"
        if not isinstance(_basis(form), Hadamard | None):
            return f"{name}: a basis that is no Hadamard rotation"
    return None if _basis(key_format) == _basis(value_format) else "values: another rotation than that of keys"


def no_room(rows: int, device: torch.device) -> str | None:
    """Why the kernel leaves ``rows`` query rows of a KV head to another; None if it does not."""
    return None if rows <= MOST_ROWS else f"{rows} query rows; allowed: up to {MOST_ROWS}"


def _basis(form: Format) -> Basis | None:
    return form.basis if isinstance(form, Paged) else None


@lasting()
def make_plan(dim: int, jobs: int, blocks: int, device: DeviceInfo, early: bool = False) -> Plan:
    """Choose a launch shape for ``jobs`` KV heads (times eights of query rows) and storage of ``blocks`` tiles; ``early``: one
    program for each multiprocessor, so that what follows finds room beside it."""
    resident = 1 if early else min(RESIDENT, device.programs(program_bytes(dim)))

    def cost(n: int) -> float:
        """As in :func:`kvfold.kernels.affine.decode.make_plan`; starting and ending a program is worth two tiles."""
        waves, rest = divmod(jobs * n, device.sms * resident)
        fill = math.ceil(rest / device.sms) / resident
        return (math.ceil(math.ceil(blocks / n) / WARPS) + 2) * (waves + (max(9 / 16, fill**0.9) if rest else 0))

    return Plan(min(range(1, max(2, min(256, blocks // WARPS + 2))), key=cost))


def program_bytes(dim: int) -> int:
    """Bytes of shared memory of a program."""
    return int(shared_bytes(dim, WARPS))


class BalancedTiles:
    """What reads packed spans of balanced tiles; see :func:`kvfold.kernels.generic.decode.attend`."""

    def early(self, call: AttentionCall) -> bool:
        """Where there are few windows to attend to beside it. With many, programs come to lie three to a multiprocessor on some
        and one on others."""
        device = call.query.device
        return device_info(device).has_pdl and FEW * _jobs(call) <= device_info(device).sms

    def plan_of(self, call: AttentionCall, span: Span) -> Plan:
        """Choose a launch shape for a call over one span."""
        blocks, device = span.keys["codes"].shape[2], device_info(call.query.device)
        return make_plan(call.shape[-1], _jobs(call), blocks, device, self.early(call))

    def attend_packed(
        self,
        call: AttentionCall,
        span: Span,
        packed: torch.Tensor,
        out: torch.Tensor,
        top: torch.Tensor,
        total: torch.Tensor,
        part: int,
        plan: Plan,
    ) -> None:
        """Write partial results over one span to the parts ``part`` to ``part + plan.splits``; as of
        :class:`kvfold.kernels.common.partials.Partials`.

        Raises
        ------
        ValueError
            If keys and values have room for different numbers of tokens.
        """
        batch, heads, rows, _ = packed.shape
        keys, values = call.key_format, call.value_format
        room = room_of((keys, span.keys), (values, span.values))
        arrays = [fields[name] for fields in (span.keys, span.values) for name in ("codes", "meta", "factor")]
        arrays[0], arrays[3] = arrays[0].view(torch.uint8), arrays[3].view(torch.uint8)
        basis, columns, early = _basis(keys), math.ceil(rows / 8), self.early(call)
        balanced_kernel[(batch * heads * columns, plan.splits)](
            packed.contiguous(),
            *arrays,
            basis.signs(packed.device) if isinstance(basis, Hadamard) else total,
            call.packed_len,
            out,
            top,
            total,
            float(call.scale) * LOG2E,
            heads,
            rows,
            columns,
            span.start,
            arrays[0].shape[2],
            room // BLOCK,
            plan.splits,
            part,
            top.shape[1],
            **constants(keys),
            EARLY=early,
            num_warps=WARPS,
            maxnreg=REGISTERS,
            **early_launch(early),
        )


def _jobs(call: AttentionCall) -> int:
    batch, heads, rows, _ = call.shape
    return batch * heads * math.ceil(rows / 8)


def constants(key_format: Format) -> dict[str, Any]:
    """What the kernel is specialized on."""
    basis = _basis(key_format)
    return {"D": key_format.head_dim, "BLOCK": basis.block if isinstance(basis, Hadamard) else 1}
