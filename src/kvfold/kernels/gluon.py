"""The fused kernels over affine groups as a choice of the registry."""

import torch

from kvfold.formats import AffineGroups, Format
from kvfold.kernels.base import AttentionKernel
from kvfold.kernels.call import AttentionCall, Windows

BLOCK = 32


class GluonKernel(AttentionKernel):
    """Affine groups on NVIDIA GPUs (sm_80 and later); calls of any length, with padding or without.

    Up to 16 query tokens without padding are written to the windows first and attended to in one launch per slab; others
    read packed storage with the same kernel and the windows and new tokens with another.
    """

    name = "gluon"
    in_place_tokens = 16
    captures = True
    dtypes = frozenset({torch.float16, torch.bfloat16})

    def why_not(self, key_format: Format, value_format: Format, device: torch.device, pre_rope: bool) -> str | None:
        if device.type != "cuda":
            return "needs an NVIDIA GPU"
        if torch.cuda.get_device_capability(device)[0] < 8:
            return "needs compute capability 8.0"
        if pre_rope:
            return "keys are stored before RoPE"
        if key_format.block != BLOCK:
            return f"blocks of {key_format.block} tokens; allowed: {BLOCK}"
        try:
            from kvfold.kernels.decode import unsupported
        except ImportError as error:
            return f"needs Triton 3.6 with Gluon ({error})"
        return unsupported(key_format, value_format)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        from kvfold.kernels.decode import decode_attention, long_attention

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


def _projected(call: AttentionCall) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Queries as packed keys meet them, and their bias, as queries lie; None where nothing is put into them."""
    if call.project is None or not call.spans:
        return None, None
    packed, bias = call.project(call.grouped(call.query if call.new is None else call.query.float()))
    return call.ungrouped(packed), None if bias is None else call.ungrouped(bias)
