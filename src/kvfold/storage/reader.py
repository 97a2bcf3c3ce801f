"""Looking at what a layer holds: as kernels are given it, or decoded."""

from typing import Any

import torch

from kvfold.formats.paged import norms
from kvfold.kernels import AttentionCall, Windows
from kvfold.storage.layout import Layout
from kvfold.storage.ring import Ring, Sink
from kvfold.storage.sequences import Sequences
from kvfold.storage.slabs import Slabs


class Reader:
    """A layer's storage, to be read; it has nothing of its own.

    Parameters
    ----------
    layout, sequences, slabs, sink, ring
        Of the layer.
    """

    def __init__(self, layout: Layout, sequences: Sequences, slabs: Slabs, sink: Sink, ring: Ring) -> None:
        self.layout, self.sequences, self.slabs, self.sink, self.ring = layout, sequences, slabs, sink, ring

    def call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        valid: torch.Tensor | None,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> AttentionCall:
        """What a kernel needs to attend over cache and new tokens; ``query`` [batch, num_heads, tokens, head_dim]."""
        sequences, spec, method = self.sequences, self.layout.spec, self.layout.method
        rows = query.float().unflatten(1, (spec.num_kv_heads, -1)).flatten(2, 3)
        longest = max(sequences.packed)
        packed_queries, bias = self.project(rows) if longest else (None, None)
        key_format, value_format = self.layout.read_as
        windows = self.windows()
        return AttentionCall(
            rows=rows,
            packed_queries=packed_queries,
            packed_bias=bias,
            scale=scale,
            key_format=key_format,
            value_format=value_format,
            spans=self.slabs.spans(longest // self.layout.block),
            packed_len=windows.packed_len,
            uniform=len(set(sequences.packed)) == 1,
            dense=windows,
            new_keys=key,
            new_values=value,
            new_valid=valid,
            first_position=sequences.first_packed,
            rope=spec.rope if method.pre_rope else None,
            unproject=self._unproject if method.maps_values else None,
            softcap=softcap,
            sinks=sinks,
        )

    def project(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries as stored keys meet them, where statistics belong to whole sequences; see :func:`plain`.

        Parameters
        ----------
        queries : Tensor, float32 or the model's dtype [batch, num_kv_heads, rows, head_dim]

        Returns
        -------
        projected : Tensor, float32, of the same shape; or ``queries`` itself
        bias : Tensor or None, float32 [batch, num_kv_heads, rows]
            The score of a query and a packed key is ``projected . decoded + bias``.
        """
        if self.layout.read_as[0] is self.layout.key_format:
            return queries, None
        shared, bias = self.slabs.shared[0], None
        if "mean" in shared:
            bias = (queries * shared["mean"].float()).sum(-1)
        return (queries * norms(shared["norm"]) if "norm" in shared else queries), bias

    def _unproject(self, values: torch.Tensor) -> torch.Tensor:
        return self.layout.method.unproject_values(values, self.layout.spec)

    def windows(self, lengths: Any = None) -> Windows:
        """What is in full precision, as kernels read it; ``lengths``: others than the layer's own."""
        lengths = lengths or self.sequences.lengths
        return Windows(self.sink.pair, self.ring.pair, lengths.sink, lengths.packed, lengths.recent)

    def decoded(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys after RoPE and values of a sequence as attention sees them, float32 [num_kv_heads, len, head_dim]."""
        length, packed, window = self.sequences.lens[row], self.sequences.packed[row], self.sequences.sink
        sink = min(length, window)
        parts = [tuple(t[row, :, :sink].float() for t in self.sink)]
        if packed:
            parts.append(self.decode(row, 0, packed))
        if length > sink + packed:
            recent = self.ring.read(slice(row, row + 1), packed, length - window)
            parts.append(tuple(t[0].float() for t in recent))
        keys, values = (torch.cat(side, -2) for side in zip(*parts, strict=True))
        return keys, values

    def decode(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed tokens ``start`` to ``stop`` of one sequence, float32 [num_kv_heads, n, head_dim]: keys after RoPE, values."""
        layout = self.layout
        keys, values = self.slabs.decode(row, start, stop)
        keys = layout.method.restore_keys(keys, layout.spec, self.sequences.positions([row], start, stop))
        return keys[0], layout.method.unproject_values(values, layout.spec)[0]
