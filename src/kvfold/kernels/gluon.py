"""The fused kernels over affine groups as a choice of the registry."""

from typing import TYPE_CHECKING, Any

import torch

from kvfold.formats import AffineGroups, Format
from kvfold.formats.paged import plain
from kvfold.kernels.base import AttentionCall, AttentionKernel, Windows

if TYPE_CHECKING:
    from kvfold.layer import FoldedLayer

BLOCK = 32


class GluonKernel(AttentionKernel):
    """Affine groups on NVIDIA GPUs (sm_80 and later); calls of any length, with padding or without.

    Up to 16 query tokens without padding are written to the windows first and attended to in one launch per slab; others
    read packed storage with the same kernel and the windows and new tokens with another.
    """

    name = "gluon"
    in_place_tokens = 16
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
        from kvfold.kernels.decode import long_attention

        assert isinstance(call.key_format, AffineGroups) and isinstance(call.value_format, AffineGroups)
        assert isinstance(call.dense, Windows) and call.rope is None and call.unproject is None
        dtype, tokens = call.new_keys.dtype, call.new_keys.shape[2]
        packed, bias = call.packed_queries, call.packed_bias
        out = long_attention(
            _heads(call.rows, tokens).to(dtype),
            call.key_format,
            call.value_format,
            call.spans,
            call.dense,
            call.new_keys,
            call.new_values,
            call.new_valid,
            call.scale,
            packed_q=None if packed is None or packed is call.rows else _heads(packed, tokens),
            bias=None if bias is None else _heads(bias, tokens),
            sinks=call.sinks,
        )
        return out.unflatten(1, (call.rows.shape[1], -1)).flatten(2, 3)

    def attend_in_place(
        self,
        layer: "FoldedLayer",
        query: torch.Tensor,
        scale: float,
        lengths: Any = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from kvfold.kernels.decode import decode_attention

        keys, values = plain(layer.key_format), layer.value_format
        assert isinstance(keys, AffineGroups) and isinstance(values, AffineGroups)
        rows = query.unflatten(1, (layer.spec.num_kv_heads, -1)).flatten(2, 3)
        projected, bias = layer.project(rows)
        return decode_attention(
            query,
            keys,
            values,
            layer.spans(),
            layer.windows(lengths),
            scale,
            packed_q=None if projected is rows else _heads(projected, query.shape[2]),
            bias=None if bias is None else _heads(bias, query.shape[2]),
            sinks=sinks,
        )


def _heads(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """[batch, num_kv_heads, rows, ...] as queries lie: [batch, num_heads, tokens, ...]."""
    return x.unflatten(2, (-1, tokens)).flatten(1, 2)
