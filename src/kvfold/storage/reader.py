"""Looking at what a layer holds: as kernels are given it, or decoded."""

import torch

from kvfold.formats import Projected
from kvfold.formats.paged import norms
from kvfold.formats.projected import HeadMaps
from kvfold.kernels import AttentionCall, NewTokens, Windows
from kvfold.kernels.lengths import Lengths
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
        new: NewTokens | None,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        lengths: Lengths | None = None,
    ) -> AttentionCall:
        """What a kernel needs to attend over what is held and over a call's own tokens.

        Parameters
        ----------
        query : Tensor [batch, num_heads, tokens, head_dim]
        new : NewTokens or None
            None: the call's tokens lie in the windows already.
        scale, softcap, sinks
            See :class:`AttentionCall`.
        lengths : Lengths or None
            On the device, where a decode graph keeps its own: all room of the storage is given then. None: those of now.
        """
        layout, sequences = self.layout, self.sequences
        method = layout.method
        blocks = None if lengths is not None else max(sequences.packed) // layout.block
        now = lengths or sequences.lengths
        key_format, value_format = layout.read_as
        return AttentionCall(
            query,
            scale,
            layout.spec.num_kv_heads,
            key_format,
            value_format,
            self.slabs.spans(blocks) if blocks != 0 else [],
            now.packed,
            Windows(self.sink.pair, self.ring.pair, now.sink, now.packed, now.recent),
            new,
            uniform=lengths is None and len(set(sequences.packed)) == 1,
            packed=tuple(sequences.packed) if lengths is None else None,
            project=None if key_format is layout.key_format else self.project,
            rope=layout.spec.rope if method.pre_rope else None,
            first_position=sequences.first_packed if method.pre_rope else None,
            unproject=method.value_map(layout.spec, query.device) if method.maps_values else None,
            softcap=softcap,
            sinks=sinks,
        )

    def project(self, queries: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries as stored keys meet them, where statistics belong to whole sequences or to the model; see :func:`plain`.

        Parameters
        ----------
        queries : Tensor, float32 or the model's dtype [batch, num_kv_heads, rows, head_dim]
        dtype : torch.dtype
            Of what is returned.

        Returns
        -------
        projected : Tensor, ``dtype``, of the same shape; or ``queries`` itself
        bias : Tensor or None, float32 [batch, num_kv_heads, rows]
            The score of a query and a packed key is ``projected . decoded + bias``.
        """
        if isinstance(form := self.layout.key_format, Projected):
            assert form.maps is not None
            return mapped(form.maps, queries, dtype)
        shared = self.slabs.shared[0]
        norm, mean = shared.get("norm"), shared.get("mean")
        if norm is None and mean is None:
            return queries.to(dtype), None
        if queries.is_cuda and not queries.requires_grad:  # three to seven kernels in one, in every layer of every step
            from kvfold.kernels.queries import with_statistics

            return with_statistics(queries, norm, mean, dtype)
        queries = queries.float()
        bias = None if mean is None else (queries * mean.float()).sum(-1)
        return (queries if norm is None else queries * norms(norm)).to(dtype), bias

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


def mapped(maps: HeadMaps, queries: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """:meth:`HeadMaps.queries` as ``dtype``, on a GPU in one launch instead of five."""
    if not queries.is_cuda or queries.requires_grad or queries.shape[-1] % 16:
        projected, bias = maps.queries(queries)
        return projected.to(dtype), bias
    from kvfold.kernels.queries import through_maps

    return through_maps(maps, queries, dtype)
