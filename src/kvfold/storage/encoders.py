"""Closing blocks: with the method's and formats' own operations, or by the kernels that write the same bytes."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from kvfold.formats import LowRank
from kvfold.formats.paged import norms
from kvfold.kernels.lengths import Lengths
from kvfold.methods.base import PIECE, finite
from kvfold.plan import any_searched, has_pages, is_dense, is_mixed, is_searched
from kvfold.storage.following import BlockStates, Following
from kvfold.storage.layout import Layout
from kvfold.storage.reader import Reader
from kvfold.storage.ring import Pair, Ring
from kvfold.storage.sequences import ALL, Rows
from kvfold.storage.slabs import Slab

LONG_PIECE = 32768
"""Tokens whose angles exist at a time where kernels un-rotate keys."""


@dataclass(frozen=True)
class Unpacked:
    """Tokens of some sequences, alike in length and in what is packed, that are not packed yet.

    Tokens count from the end of the sink: those up to ``old`` lie in the ring, those of a call follow.

    Attributes
    ----------
    ids : list of int
        The sequences.
    rows : slice or Tensor
        The same as an index.
    old : int
    keys, values : Tensor [len(ids), num_kv_heads, n, head_dim]
        Of the call.
    queries : Tensor or None [len(ids), num_heads, n, head_dim]
        Of the call; None where the ring of queries has them all.
    """

    ids: list[int]
    rows: Rows
    old: int
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor | None

    @property
    def stop(self) -> int:
        return self.old + self.keys.shape[-2]

    def read(self, ring: Ring, start: int, stop: int) -> Pair:
        """Keys and values of tokens ``start`` to ``stop``."""
        part = slice(max(start - self.old, 0), max(stop - self.old, 0))
        new = self.keys[:, :, part], self.values[:, :, part]
        if start >= self.old:
            return new
        waiting = ring.read(self.rows, start, min(self.old, stop))
        return torch.cat((waiting[0], new[0]), -2), torch.cat((waiting[1], new[1]), -2)


class TorchEncoder:
    """With the method's own operations, on float32 copies of :data:`~kvfold.methods.base.PIECE` tokens at a time."""

    def __init__(self, reader: Reader, following: Following) -> None:
        self.layout, self.sequences, self.slabs, self.ring = reader.layout, reader.sequences, reader.slabs, reader.ring
        self.sink, self.following = reader.sink, following

    def encode(self, slab: Slab, tokens: Unpacked, start: int, stop: int, prompt: bool, states: BlockStates) -> None:
        """Encode tokens ``start`` to ``stop`` into a slab.

        Parameters
        ----------
        prompt : bool
            Whether their blocks belong wholly to the sequences' first call.
        states : BlockStates
            What the method's encoder knows of queries, for these blocks at least.
        """
        layout, method, rows = self.layout, self.layout.method, tokens.rows
        block, spec = layout.block, layout.spec
        for low in range(start, stop, PIECE // block * block):
            high = min(low + PIECE // block * block, stop)
            first, last = low // block - slab.first, high // block - slab.first
            if not 0 <= first < last <= slab.blocks:  # an assignment beyond the end would write nothing, without a word
                raise IndexError(f"packed storage: blocks {first} to {last} of a slab that has {slab.blocks}")
            far = self.slabs.seen(slab, first, last)  # statistics look beyond the blocks of a page that are due
            k, v = (finite(t) for t in tokens.read(self.ring, low, max(high, far)))
            pages = self.slabs.statistics(slab, rows, k, v, first, last)
            k, v = k[:, :, : high - low], v[:, :, : high - low]
            positions = self.sequences.positions(tokens.ids, low, high)
            state = states.of(low, high)
            keys = method.encode_keys(k, state, spec, positions, prompt, pages[0])
            values = method.encode_values(v, state, spec, prompt, pages[1])
            for target, source in ((slab.keys, keys), (slab.values, values)):
                for name, tensor in source.items():
                    target[name][rows, :, first:last] = tensor

    def append(self, keys: torch.Tensor, values: torch.Tensor, lengths: Lengths) -> None:
        """A decode graph's step: write the new token, [batch, num_kv_heads, 1, head_dim], to the windows."""
        from kvfold.kernels.dense.encode import append

        append(keys, values, lengths, self.sink.pair, self.ring.pair)


def _slice_of(rows: Rows) -> tuple[slice, torch.Tensor | None]:
    """Sequences as a slice of storage that is no copy, and which of it, where they do not lie together."""
    return (ALL, rows) if isinstance(rows, torch.Tensor) else (rows, None)


class KernelEncoder:
    """By kernels, straight from the ring and the call."""

    def __init__(self, reader: Reader, following: Following) -> None:
        self.layout, self.slabs, self.sink, self.ring = reader.layout, reader.slabs, reader.sink, reader.ring
        self.following = following

    def encode(self, slab: Slab, tokens: Unpacked, start: int, stop: int, prompt: bool, states: BlockStates) -> None:
        """See :meth:`TorchEncoder.encode`. A block that begins in the ring and ends in the call is completed in the ring, where
        those before it have made room."""
        block, old, rows = self.layout.block, tokens.old, tokens.rows
        whole = min(old // block * block, stop)
        if start < whole:
            self.launch(slab, rows, self.ring.pair, start, whole, prompt, True, states)
            start = whole
        if start < min(old, stop):
            end = start + block
            self.ring.write(rows, old, end, tokens.keys[:, :, : end - old], tokens.values[:, :, : end - old])
            self.launch(slab, rows, self.ring.pair, start, end, prompt, True, states)
            start = end
        if start < stop:
            part = slice(start - old, stop - old)
            new = tokens.keys[:, :, part], tokens.values[:, :, part]
            self.launch(slab, rows, new, start, stop, prompt, False, states)

    def launch(
        self,
        slab: Slab,
        rows: Rows,
        source: Pair,
        start: int,
        stop: int,
        prompt: bool,
        ring: bool,
        states: BlockStates,
    ) -> None:
        """Encode whole blocks of the ring, or of a call's tokens from its first on."""
        from kvfold.kernels.affine import encode

        layout, (rows, index) = self.layout, _slice_of(rows)
        how_keys = self._transform(rows)
        if states.each:
            numbers = states.numbers(start, stop, source[0].device)
            how_keys = replace(how_keys, update=states.each["update"], numbers=numbers)
        for form, x, fields, how in zip(
            layout.read_as, source, (slab.keys, slab.values), (how_keys, None), strict=True
        ):
            encode.encode_blocks(
                x[rows] if ring else x,
                {name: t[rows] for name, t in fields.items()},
                form,
                start // layout.block - slab.first,
                how,
                layout.method.group_mode(prompt),
                index,
                slab.first,
                (stop - start) // layout.block if ring else None,
            )

    def close(
        self, keys: torch.Tensor | None, values: torch.Tensor | None, lengths: Lengths, boundary: torch.Tensor | None
    ) -> None:
        """Close the block that is due and write the new token, by lengths on the device.

        Parameters
        ----------
        keys, values : Tensor or None [batch, num_kv_heads, 1, head_dim]
            Of the new token; None: there is none.
        lengths : Lengths
            Before the token.
        boundary : Tensor or None, int32 [batch]
            Packed tokens of the prompt, where groups' modes depend on that.
        """
        from kvfold.kernels.affine.encode import append_and_close

        (slab,) = self.slabs
        key_format, value_format = self.layout.read_as
        append_and_close(
            keys,
            values,
            lengths,
            self.sink.pair,
            self.ring.pair,
            self.layout.method.recent,
            slab.keys,
            key_format,
            slab.values,
            value_format,
            self._transform(ALL),
            boundary,
        )

    def _transform(self, rows: slice) -> Any:
        """What the kernels do to keys before they encode them."""
        from kvfold.kernels.affine.encode import KeyTransform

        shared, update = self.slabs.shared[0], self.following.state.get("update")
        mean = shared["mean"][rows, :, 0].float() if "mean" in shared else None
        norm = norms(shared["norm"][rows, :, 0]) if "norm" in shared else None
        return KeyTransform(mean=mean, norm=norm, update=None if update is None else update[rows])


def encode_side(
    layout: Layout, side: int, ring: Ring, slab: Slab, tokens: Unpacked, start: int, stop: int, prompt: bool
) -> None:
    """Encode keys (``side`` 0) or values by :mod:`kvfold.kernels.fold.encode`, see :meth:`TorchEncoder.encode`. Ring and call
    are read where they lie; statistics look beyond ``stop``."""
    from kvfold.kernels.fold import encode as encode_pages
    from kvfold.kernels.fragments import encode_rank

    form, x, (rows, index) = layout.formats[side], (tokens.keys, tokens.values)[side], _slice_of(tokens.rows)
    fields = {name: t[rows] for name, t in (slab.keys, slab.values)[side].items()}
    where = start, stop, slab.first, ring.pair[side][rows], tokens.old
    if isinstance(form, LowRank):
        encode_rank.encode_rank(x, fields, form, *where, index)
    else:
        encode_pages.encode_pages(x, fields, form, *where, layout.method.group_mode(prompt), index)


class PagesEncoder:
    """By kernels, where a format has statistics per page."""

    def __init__(self, reader: Reader) -> None:
        self.layout, self.slabs, self.sink, self.ring = reader.layout, reader.slabs, reader.sink, reader.ring

    def encode(self, slab: Slab, tokens: Unpacked, start: int, stop: int, prompt: bool, states: BlockStates) -> None:
        """See :meth:`TorchEncoder.encode`."""
        for side in (0, 1):
            encode_side(self.layout, side, self.ring, slab, tokens, start, stop, prompt)

    def close(
        self, keys: torch.Tensor | None, values: torch.Tensor | None, lengths: Lengths, boundary: torch.Tensor | None
    ) -> None:
        """See :meth:`KernelEncoder.close`. Of many sequences, the new tokens are written by a kernel of their own."""
        from kvfold.kernels.dense.encode import append
        from kvfold.kernels.fold.encode import append_and_close, heads_together

        (slab,) = self.slabs
        batch, heads, _, _ = self.ring.pair[0].shape
        each = heads_together(batch, heads, self.ring.pair[0].device)
        append_and_close(
            keys if each == 1 else None,
            values if each == 1 else None,
            lengths,
            self.sink.pair,
            self.ring.pair,
            self.layout.method.recent,
            slab.keys,
            self.layout.formats[0],
            slab.values,
            self.layout.formats[1],
            boundary,
            each=each,
        )
        if each > 1 and keys is not None and values is not None:
            append(keys, values, lengths, self.sink.pair, self.ring.pair)


class DenseEncoder(KernelEncoder):
    """By kernels that copy, where vectors are stored as they are."""

    def launch(
        self,
        slab: Slab,
        rows: Rows,
        source: Pair,
        start: int,
        stop: int,
        prompt: bool,
        ring: bool,
        states: BlockStates,
    ) -> None:
        from kvfold.kernels.dense import encode as encode_dense

        layout, (rows, index) = self.layout, _slice_of(rows)
        for form, x, fields in zip(layout.formats, source, (slab.keys, slab.values), strict=True):
            encode_dense.encode_blocks(
                x[rows] if ring else x,
                {name: t[rows] for name, t in fields.items()},
                form,
                start // layout.block - slab.first,
                index,
                slab.first,
                (stop - start) // layout.block if ring else None,
            )

    def close(
        self, keys: torch.Tensor | None, values: torch.Tensor | None, lengths: Lengths, boundary: torch.Tensor | None
    ) -> None:
        """See :meth:`KernelEncoder.close`."""
        from kvfold.kernels.dense.encode import append_and_close

        (slab,) = self.slabs
        append_and_close(
            keys,
            values,
            lengths,
            self.sink.pair,
            self.ring.pair,
            self.layout.method.recent,
            slab.keys,
            self.layout.formats[0],
            slab.values,
            self.layout.formats[1],
        )


class SearchEncoder(TorchEncoder):
    """By kernels of :mod:`kvfold.kernels.searched.encode`, straight from the call; of the ring, blocks are copied. A side that
    they do not encode goes by those for statistics per page."""

    def encode(self, slab: Slab, tokens: Unpacked, start: int, stop: int, prompt: bool, states: BlockStates) -> None:
        """See :meth:`TorchEncoder.encode`."""
        for side, form in enumerate(self.layout.formats):
            if not is_searched(form):
                encode_side(self.layout, side, self.ring, slab, tokens, start, stop, prompt)
        self._in_pieces(slab, tokens, start, stop, states)

    def _in_pieces(self, slab: Slab, tokens: Unpacked, start: int, stop: int, states: BlockStates) -> None:
        """Of the ring, and of at most LONG_PIECE tokens of the call."""
        block = self.layout.block
        waiting = min(max(start, -(-tokens.old // block) * block), stop)
        cuts = [start, *range(waiting, stop, LONG_PIECE // block * block), stop]
        for low, high in pairwise(cuts):
            if low < high:
                self._launch(slab, tokens, low, high, states)

    def close(
        self, keys: torch.Tensor | None, values: torch.Tensor | None, lengths: Lengths, boundary: torch.Tensor | None
    ) -> None:
        """Nothing: blocks are closed between a graph's steps."""
        raise NotImplementedError("these kernels close no block by lengths on the device")

    def _launch(self, slab: Slab, tokens: Unpacked, low: int, high: int, states: BlockStates) -> None:
        from kvfold.kernels.common.encode_source import Source, angles
        from kvfold.kernels.searched import encode as encode_search

        layout, spec, (rows, index) = self.layout, self.layout.spec, _slice_of(tokens.rows)
        turned: dict[str, Any] = {}
        if layout.method.pre_rope and spec.rope is not None:
            positions = self.sequences.positions(tokens.ids, low, high)[:, 0]
            turned = {"angles": angles(spec.rope, positions), "factor": 1 / spec.rope.scaling}
        first = low // layout.block - slab.first
        tables = {"tables": layout.method.value_tables(spec, self.sequences.device)}
        for form, x, fields, how in zip(
            layout.formats, tokens.read(self.ring, low, high), (slab.keys, slab.values), (turned, tables), strict=True
        ):
            if not is_searched(form):
                continue
            some = {name: t[rows] for name, t in fields.items()}
            encode_search.encode(form, Source(x, some, first, index, **how))


class MixedEncoder(SearchEncoder):
    """By the kernel of :mod:`kvfold.kernels.fragments.encode_mixed`."""

    def encode(self, slab: Slab, tokens: Unpacked, start: int, stop: int, prompt: bool, states: BlockStates) -> None:
        """See :meth:`TorchEncoder.encode`."""
        self._in_pieces(slab, tokens, start, stop, states)

    def _launch(self, slab: Slab, tokens: Unpacked, low: int, high: int, states: BlockStates) -> None:
        from kvfold.kernels.fragments import encode_mixed

        layout, (rows, index) = self.layout, _slice_of(tokens.rows)
        keys, values = tokens.read(self.ring, low, high)
        encode_mixed.encode(
            keys,
            values,
            {name: t[rows] for name, t in slab.keys.items()},
            {name: t[rows] for name, t in slab.values.items()},
            *layout.formats,
            low // layout.block - slab.first,
            states.each["probe"],
            states.numbers(low, high, keys.device),
            index,
        )


def kernel_encoder(reader: Reader, following: Following) -> KernelEncoder | PagesEncoder | SearchEncoder:
    """What encodes by kernels, if :func:`choose_encoder` says so."""
    if is_mixed(reader.layout.formats):
        return MixedEncoder(reader, following)
    if any_searched(reader.layout.formats):
        return SearchEncoder(reader, following)
    if is_dense(reader.layout.formats):
        return DenseEncoder(reader, following)
    return PagesEncoder(reader) if has_pages(reader.layout.formats) else KernelEncoder(reader, following)
