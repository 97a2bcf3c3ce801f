"""The fused kernels, over affine groups and over pages, as choices of the registry."""

from typing import TYPE_CHECKING

import torch

from kvfold.formats import AffineGroups, Format, GroupCodes, Paged
from kvfold.formats.codebook import AdditiveCodes
from kvfold.kernels.base import GPUKernel
from kvfold.kernels.call import AttentionCall, Windows
from kvfold.kernels.device import no_gpu
from kvfold.kernels.reference import ReferenceKernel

if TYPE_CHECKING:
    from kvfold.kernels.common.tables import Tables

BLOCK = 32
LONG = 64
"""Query tokens beyond which packed storage is unpacked for the platform's flash attention, if it can be."""


class GluonKernel(GPUKernel):
    """Affine groups on NVIDIA GPUs (sm_80 and later); calls of any length, with padding or without.

    Up to 16 query tokens without padding are written to the windows first and attended to in one launch per slab. Of longer
    calls those of up to 64 tokens read packed storage with the same kernel, and the windows and new tokens with another; beyond
    that bounded pieces are unpacked to 16 bits for the platform's flash attention.
    """

    name = "gluon"
    unpacks_from = LONG + 1

    def why_not(self, key_format: Format, value_format: Format, device: torch.device, pre_rope: bool) -> str | None:
        if why := _needs(key_format, device, pre_rope):
            return why
        try:
            from kvfold.kernels.affine.decode import unsupported
        except ImportError as error:
            return f"needs Triton 3.6 with Gluon ({error})"
        return unsupported(key_format, value_format)

    def read_packed(self, call: AttentionCall) -> torch.Tensor:
        from kvfold.kernels.affine.decode import decode_attention, long_attention

        keys, values, windows, new, query = call.key_format, call.value_format, call.windows, call.new, call.query
        assert isinstance(keys, AffineGroups) and isinstance(values, AffineGroups) and isinstance(windows, Windows)
        assert call.rope is None and call.unproject is None
        packed, bias = _projected(call)
        if new is None:
            return decode_attention(
                query, keys, values, call.spans, windows, call.scale, packed, bias, sinks=call.sinks
            )  # fmt: skip
        return long_attention(
            query.to(new.keys.dtype),
            keys,
            values,
            call.spans,
            windows,
            new.keys,
            new.values,
            new.valid,
            call.scale,
            packed_q=packed,
            bias=bias,
            sinks=call.sinks,
        )


class PagesKernel(GPUKernel):
    """Pages of uniform codes (fold) on NVIDIA GPUs (sm_80 and later); calls of any length.

    Up to 16 query tokens without padding are written to the windows first and attended to in one launch per slab. Longer
    calls unpack bounded pieces to 16 bits for the platform's flash attention; those whose queries need gradients go to the
    reference.
    """

    name = "pages"
    unpacks_from = 1
    otherwise = "the float32 reference serves them"

    def why_not(self, key_format: Format, value_format: Format, device: torch.device, pre_rope: bool) -> str | None:
        if why := _needs(key_format, device, pre_rope):
            return why
        try:
            from kvfold.kernels.fold.decode import unsupported
        except ImportError as error:
            return f"needs Triton 3.6 with Gluon ({error})"
        return unsupported(key_format, value_format)

    def read_packed(self, call: AttentionCall) -> torch.Tensor:
        if call.new is not None:
            return ReferenceKernel().attend(call)
        from kvfold.kernels.fold.decode import decode_attention

        keys, values = call.key_format, call.value_format
        assert isinstance(keys, Paged) and isinstance(values, Paged) and isinstance(call.windows, Windows)
        return decode_attention(call.query, keys, values, call.spans, call.windows, call.scale, sinks=call.sinks)


class FragmentsKernel(GPUKernel):
    """Pages of affine groups or signs of a sketch (InnerQ, QJL) on NVIDIA GPUs, from sm_80 on; calls of any length.

    Calls as of :class:`PagesKernel`.
    """

    name = "fragments"
    unpacks_from = 1
    otherwise = "the float32 reference serves them"

    def why_not(self, key_format: Format, value_format: Format, device: torch.device, pre_rope: bool) -> str | None:
        if why := no_gpu(device):
            return why
        try:
            from kvfold.kernels.fragments.decode import unsupported
        except ImportError as error:
            return f"needs Triton 3.6 with Gluon ({error})"
        return unsupported(key_format, value_format, pre_rope)

    def read_packed(self, call: AttentionCall) -> torch.Tensor:
        if call.new is not None:
            return ReferenceKernel().attend(call)
        from kvfold.kernels.fragments.decode import decode_attention

        keys, values, windows = call.key_format, call.value_format, call.windows
        assert isinstance(windows, Windows) and call.project is None
        return decode_attention(call.query, keys, values, call.spans, windows, call.scale, sinks=call.sinks)


class TablesKernel(GPUKernel):
    """Codes whose tables shared memory holds (CommVQ, TaSQ's keys with fold's values) on NVIDIA GPUs, from sm_80 on.

    Up to 8 query rows of a KV head are read by a kernel with tables in the place of
    :class:`~kvfold.kernels.generic.decode.BlocksKernel`, which attends to the rest of a call, and to other calls.
    """

    name = "tables"
    limits = "calls of more than 8 query rows per KV head (its query heads times tokens) are read by the kernel blocks"

    def why_not(self, key_format: Format, value_format: Format, device: torch.device, pre_rope: bool) -> str | None:
        if why := no_gpu(device):
            return why
        try:
            from kvfold.kernels.generic import decode as blocks

            of = tables_of(key_format, value_format)
        except ImportError as error:
            return f"needs Triton 3.6 with Gluon ({error})"
        if of is None:
            return f"keys: {key_format.kind} storage; allowed: {', '.join(TABLED)}"
        if not pre_rope:
            return "keys are stored after RoPE"
        return (
            of.foreign(key_format, value_format)
            or of.unseen(key_format, value_format)
            or blocks.unsupported(key_format, value_format, pre_rope)
        )

    def why_not_queries(
        self, key_format: Format, value_format: Format, device: torch.device, rows: int, rotary: int
    ) -> str | None:
        of = tables_of(key_format, value_format)
        assert of is not None
        return of.unsupported(key_format, value_format, rotary) or of.no_room(key_format, value_format, rows, device)

    def read_packed(self, call: AttentionCall) -> torch.Tensor:
        from kvfold.kernels.generic import decode as blocks

        of = tables_of(call.key_format, call.value_format)
        return blocks.attend(call, of=None if of is None or of.declines(call) else of)


TABLED = AdditiveCodes.kind, GroupCodes.kind


def tables_of(key_format: Format, value_format: Format) -> "Tables | None":
    """The kernel with tables in shared memory that storage may be for; None if there is none."""
    if isinstance(key_format, AdditiveCodes):
        from kvfold.kernels.commvq.decode import CodebookTables

        return CodebookTables()
    if isinstance(key_format, GroupCodes):
        from kvfold.kernels.learned.decode import LearnedKeyTables

        return LearnedKeyTables()
    return None


def _needs(key_format: Format, device: torch.device, pre_rope: bool) -> str | None:
    if why := no_gpu(device):
        return why
    if pre_rope:
        return "keys are stored before RoPE"
    if key_format.block != BLOCK:
        return f"blocks of {key_format.block} tokens; allowed: {BLOCK}"
    return None


def _projected(call: AttentionCall) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Queries as packed keys meet them, and their bias, as queries lie; None where nothing is put into them."""
    if call.project is None or not call.spans:
        return None, None
    packed, bias = call.project(call.grouped(call.query if call.new is None else call.query.float()), torch.float32)
    return call.ungrouped(packed), None if bias is None else call.ungrouped(bias)
