"""Decode attention over TaSQ's keys and values by fold's codebook; see :mod:`kvfold.kernels.learned._decode`."""

import math
from dataclasses import replace
from typing import Any

import torch

from kvfold.arithmetic import beside, lasting
from kvfold.formats import Format, GroupCodes, Hadamard, Paged, ResidualCodes
from kvfold.formats.grouped import GroupBook
from kvfold.formats.packing import UNIT
from kvfold.formats.paged import PAGE
from kvfold.kernels.call import AttentionCall, Span
from kvfold.kernels.common.tables import Tables, TablesPlan
from kvfold.kernels.device import device_info, settled
from kvfold.kernels.learned._decode import learned_keys_kernel
from kvfold.kernels.learned._scores import shared_bytes
from kvfold.kernels.stored import pages_between, rotation_of, table_rows
from kvfold.rope import Rope


class LearnedKeyTables(Tables):
    """TaSQ's keys of four channels, and values of four or eight as pages of ``fold`` have them."""

    begin = 1
    waits = True
    value_fields = ("codes", "rms", "mean")

    def foreign(self, key_format: Format, value_format: Format) -> str | None:
        if not isinstance(key_format, GroupCodes):
            return f"keys: {key_format.kind} storage; allowed: {GroupCodes.kind}"
        if (key_format.head_dim, key_format.vector, key_format.codes) != (128, 4, 256):
            return f"keys: {key_format.describe()} of {key_format.head_dim}; allowed: 256 codes for 4 channels of 128"
        if not key_format.strided:
            return "keys: groups of neighbours; allowed: strided"
        if key_format.book is None:
            return "keys: no codebook"
        if not isinstance(value_format, Paged) or not isinstance(value_format.inner, ResidualCodes):
            return f"values: {value_format.kind} storage; allowed: {ResidualCodes.kind} in pages"
        codes = value_format.inner
        if (codes.vector, codes.codes, codes.stages, codes.strided) not in ((4, 256, 1, False), (8, 256, 1, False)):
            return f"values: {codes.describe()}; allowed: one stage of 256 codes for 4 or 8 neighbours"
        if codes.book is None:
            return "values: no codebook"
        if (value_format.page, value_format.mean, value_format.norm) != (PAGE, True, ""):
            return f"values: {value_format.describe()}; allowed: pages of {PAGE} tokens with a mean"
        if not isinstance(value_format.basis, Hadamard) or not 16 <= value_format.basis.block <= 128:
            return "values: allowed: a Hadamard rotation of 16 to 128 channels"
        for side, form in (("keys", key_format), ("values", value_format)):
            if form.block % UNIT:
                return f"{side}: blocks of {form.block} tokens; allowed: multiples of {UNIT}"
        return None

    def kernel(self) -> Any:
        return learned_keys_kernel

    def constants(self, key_format: Format, value_format: Format, plan: TablesPlan) -> dict[str, Any]:
        assert isinstance(key_format, GroupCodes) and isinstance(value_format, Paged)
        assert isinstance(value_format.basis, Hadamard)
        return {
            "V": _codes(value_format).groups,
            "MIX": value_format.basis.block,
            "CENTRED": key_format.centred,
            "C": plan.columns,
        }

    def program_bytes(self, key_format: Format, value_format: Format, plan: TablesPlan) -> int:
        assert isinstance(value_format, Paged)
        return int(shared_bytes(_codes(value_format).groups, plan.columns, plan.warps))

    def beside(
        self, key_format: Format, value_format: Format, rope: Rope, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Rows of keys and of values, frequencies and turns, the mean of keys (rows where there is none), and signs."""
        assert isinstance(key_format, GroupCodes) and isinstance(value_format, Paged)
        basis, keys, values = value_format.basis, key_format.book, _codes(value_format).book
        assert isinstance(basis, Hadamard) and keys is not None and values is not None
        book = keys.on(device)
        rows = key_rows(book)
        mean = book.mean if key_format.centred else rows
        assert mean is not None
        turns = rotation_of(rope, 64, UNIT, 1, 128, device).freq, lane_turns(rope, device)
        return rows, table_rows(values.on(device)), *turns, mean, basis.signs(device)

    def plan_of(self, call: AttentionCall, span: Span) -> TablesPlan:
        batch, heads, rows, _ = call.shape
        pages = math.ceil(span.keys["codes"].shape[2] * call.key_format.block / PAGE)
        return make_plan(batch * heads, self.shape(rows), rows, pages, device_info(call.query.device).sms)

    def room(self, call: AttentionCall, span: Span) -> int:
        room = super().room(call, span)
        if (pages := pages_between(call.value_format, span.values)) != math.ceil(room / PAGE):
            raise ValueError(f"packed storage: values have {pages} pages for {room} tokens of a head")
        return room


@lasting()
def make_plan(jobs: int, plan: TablesPlan, rows: int, pages: int, processors: int) -> TablesPlan:
    """Split ``plan`` for ``jobs`` KV heads of ``rows`` query rows and storage of ``pages`` pages.

    A page takes a warp the longer the more others are busy beside it; where there are few, they go to all multiprocessors.
    """
    jobs *= math.ceil(rows / plan.columns)

    def cost(splits: int) -> float:
        own = math.ceil(pages / splits)
        each, busy = math.ceil(own / plan.warps), min(own, plan.warps)
        return math.ceil(jobs * splits / processors) * (each * (1 + busy / plan.warps) + LearnedKeyTables.begin)

    return replace(plan, splits=min(range(1, max(2, min(256, pages))), key=cost))


def _codes(value_format: Paged) -> ResidualCodes:
    assert isinstance(value_format.inner, ResidualCodes)
    return value_format.inner


@beside
def key_rows(book: GroupBook) -> torch.Tensor:
    """Rows as lanes read them, fp16 [heads, b, codes, t, j, 4] of group 16 b + 4 t + j; made once: graphs keep addresses."""
    groups = book.codes.to(torch.float16).unflatten(1, (2, 4, 4))  # b, t, j
    return settled(groups.permute(0, 1, 4, 2, 3, 5).contiguous())


@lasting(64)
def lane_turns(rope: Rope, device: torch.device) -> torch.Tensor:
    """Cosines and sines of a unit's tokens as lanes read them: fp16 [eights of places, 4, lanes, 2, 2, 2].

    Of eight p and step 2 b + s, lane (g, t) has of groups G, 16 b + 4 t + 2 s and the next one, two cosines and two sines, of
    pairs G and G + 32, at place 8 p + (g ^ g // 4).
    """
    table = rotation_of(rope, 64, UNIT, 1, 128, device).table  # [2, tokens, 64]
    g = torch.arange(8, device=device)
    placed = table.unflatten(1, (4, 8))[:, :, g ^ (g >> 2)]
    parts = placed.unflatten(-1, (2, 2, 4, 2, 2))  # [cosine or sine, p, g, half, b, t, s, group]
    return settled(parts.permute(1, 4, 6, 2, 5, 7, 0, 3).contiguous())
