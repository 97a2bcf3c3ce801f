"""Packed storage: a list of slabs that are filled in place; a new slab is an eighth of what exists.

Nothing is copied, but once when a decode graph begins and there are several: it knows the addresses of one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvfold.formats import Fields, Format, PagedFormat
from kvfold.kernels import Span
from kvfold.methods.base import finite
from kvfold.storage.layout import Layout
from kvfold.storage.sequences import Rows


@dataclass
class Slab:
    """Packed storage of blocks ``first`` to ``first + blocks`` of every sequence; whole pages, where formats have pages."""

    first: int
    blocks: int
    keys: Fields
    values: Fields

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.keys.values()
        yield from self.values.values()


class Slabs:
    """A layer's packed blocks, and the statistics of whole sequences where a format has any.

    Attributes
    ----------
    slabs : list of Slab
        Iterating, ``len`` and indices are the list's.
    shared : pair of Fields
        Statistics of whole sequences, of keys and of values.
    fixed : list of bool
        Whether a sequence's are there, or none are needed.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.clear()

    def clear(self) -> None:
        self.slabs: list[Slab] = []
        self.shared: tuple[Fields, Fields] = ({}, {})
        self.start(0)

    def start(self, batch: int) -> None:
        """Begin with nothing packed."""
        self.fixed = [not self.layout.of_sequence] * batch

    def __len__(self) -> int:
        return len(self.slabs)

    def __iter__(self) -> Iterator[Slab]:
        return iter(self.slabs)

    def __getitem__(self, index: int) -> Slab:
        return self.slabs[index]

    def reserve(self, blocks: int, at_first: int, batch: int, device: torch.device) -> None:
        """Have storage for ``blocks`` blocks of ``batch`` sequences, the first slab with at least ``at_first``."""
        have = sum(slab.blocks for slab in self.slabs)
        if blocks <= have:
            return
        wanted = max(blocks - have, have // 8) if have else max(blocks, at_first)
        layout = self.layout
        wanted = -(-wanted // layout.page_blocks) * layout.page_blocks
        keys, values = (f.allocate(batch, layout.spec.num_kv_heads, wanted, device) for f in layout.formats)
        self.slabs.append(Slab(have, wanted, keys, values))

    def gather(self, blocks: int, batch: int, device: torch.device) -> None:
        """Have one slab, with storage for ``blocks`` blocks; if need be what is packed is copied into a new one."""
        layout, old = self.layout, self.slabs
        blocks = -(-max(blocks, 1) // layout.page_blocks) * layout.page_blocks
        if len(old) == 1 and old[0].blocks >= blocks:
            return
        self.slabs = []
        self.reserve(blocks, blocks, batch, device)
        for slab in old:
            for form, to, of in zip(
                layout.formats, (self.slabs[0].keys, self.slabs[0].values), (slab.keys, slab.values), strict=True
            ):
                for name, there in form.take(to, slab.blocks, slab.first).items():
                    there.copy_(of[name])

    def at(self, token: int) -> Slab:
        """The slab of a packed token."""
        block = token // self.layout.block
        return max((slab for slab in self.slabs if slab.first <= block), key=lambda slab: slab.first)

    def spans(self, blocks: int | None = None) -> list[Span]:
        """Packed storage: all of it, or what holds the first ``blocks`` blocks."""
        found = []
        for slab in self.slabs:
            used = slab.blocks if blocks is None else min(slab.blocks, blocks - slab.first)
            if used > 0:
                sides = [
                    form.take(side, used) | shared
                    for form, side, shared in zip(
                        self.layout.formats, (slab.keys, slab.values), self.shared, strict=True
                    )
                ]
                found.append(Span(slab.first * self.layout.block, *sides))
        return found

    def decode(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``start`` to ``stop`` of one sequence as they are stored, float32 [1, num_kv_heads, n, width]."""
        key_format, value_format = self.layout.formats
        keys, values = [], []
        for span in self.spans(-(-stop // self.layout.block)):
            keys.append(key_format.decode({n: t[row : row + 1] for n, t in span.keys.items()}))
            values.append(value_format.decode({n: t[row : row + 1] for n, t in span.values.items()}))
        return torch.cat(keys, -2)[:, :, start:stop], torch.cat(values, -2)[:, :, start:stop]

    # ---- statistics --------------------------------------------------------------------------------------------------

    def fix(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the statistics of a whole sequence from its keys and values by now, [1, num_kv_heads, tokens, head_dim]."""
        self.fixed[row] = True
        for form, shared, x in zip(self.layout.formats, self.shared, (keys, values), strict=True):
            if isinstance(form, PagedFormat) and not form.page:
                for name, tensor in form.statistics(finite(x).unsqueeze(2)).items():
                    if name not in shared:
                        shared[name] = tensor.new_zeros(len(self.fixed), *tensor.shape[1:])
                    shared[name][row] = tensor[0]

    def unfix(self, row: int) -> None:
        """Nothing of a sequence is packed any more: its statistics will be those of what follows."""
        if self.layout.of_sequence:
            self.fixed[row] = False

    def seen(self, slab: Slab, first: int, last: int) -> int:
        """End of the packed tokens that statistics of pages which begin with blocks ``first`` to ``last`` of a slab are taken
        of."""
        far = 0
        for form in self.layout.formats:
            if isinstance(form, PagedFormat) and form.page:
                per_page = form.page // form.block
                page = (last - 1) // per_page
                if page * per_page >= first:
                    far = max(far, (slab.first + page * per_page) * form.block + form.seen)
        return far

    def statistics(
        self, slab: Slab, rows: Rows, keys: torch.Tensor, values: torch.Tensor, first: int, last: int
    ) -> tuple[Fields | None, Fields | None]:
        """Statistics of the pages of blocks ``first`` to ``last`` of a slab, of keys and of values; those of pages that begin
        here are made and stored. None where the format has none.

        ``keys``, ``values``: the blocks' tokens, and what follows as far as :meth:`seen` says.
        """
        (key_format, value_format), (key_shared, value_shared) = self.layout.formats, self.shared
        return (
            _statistics(key_format, slab.keys, key_shared, rows, keys, first, last),
            _statistics(value_format, slab.values, value_shared, rows, values, first, last),
        )

    # ---- as a batch --------------------------------------------------------------------------------------------------

    def select(self, rows: list[int], pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Rearrange the batch: ``rows`` says which old sequence each new one is, ``pick`` does it to a tensor."""
        self.fixed = [self.fixed[row] for row in rows]
        self._map(pick)

    def move(self, device: torch.device) -> None:
        self._map(lambda t: t.to(device))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        keys, values = ({name: change(t) for name, t in side.items()} for side in self.shared)
        self.shared = (keys, values)
        for slab in self.slabs:
            slab.keys = {name: change(t) for name, t in slab.keys.items()}
            slab.values = {name: change(t) for name, t in slab.values.items()}

    def tensors(self) -> list[torch.Tensor]:
        return [t for slab in self.slabs for t in slab.tensors()]

    def snapshot(self) -> tuple[Any, ...]:
        """What there is. Packed blocks are never rewritten, so tensors are not copied."""
        return self.slabs.copy(), (self.shared[0].copy(), self.shared[1].copy()), self.fixed.copy()

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Be again what :meth:`snapshot` saw."""
        self.slabs, self.shared, self.fixed = snapshot


def _statistics(
    form: Format, fields: Fields, shared: Fields, rows: Rows, x: torch.Tensor, first: int, last: int
) -> Fields | None:
    """See :meth:`Slabs.statistics`."""
    if not isinstance(form, PagedFormat):
        return None
    if not form.page:
        return {name: t[rows] for name, t in shared.items()}
    per_page = form.page // form.block
    begun = -(-first // per_page)  # the first page that begins here
    if begun * per_page < last:
        for name, tensor in form.statistics_of(x[:, :, (begun * per_page - first) * form.block :]).items():
            fields[name][rows, :, begun : begun + tensor.shape[2]] = tensor
    page = first // per_page
    used = {name: fields[name][rows, :, page : -(-last // per_page)] for name in form.page_fields()}
    return form.spread(used, first - page * per_page, last - first)
