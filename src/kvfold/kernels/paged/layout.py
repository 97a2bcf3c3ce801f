"""How a page's bytes lie in a region that somebody else allocates: K codes, K metadata, V codes, V metadata of 128 tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from kvfold.errors import KVFoldError
from kvfold.formats import Fields, Format, PagedFormat
from kvfold.formats.paged import PAGE

ALIGN = 16
"""Bytes that every field begins at a multiple of: the widest load."""


@dataclass(frozen=True)
class Place:
    """Where one field lies in a region: ``count`` units (or 1 page) of ``shape`` each, from byte ``at`` on."""

    at: int
    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.count * prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PageLayout:
    """The bytes of one page of one KV head: keys' fields, then values', each with those of blocks before those of the page.

    Parameters
    ----------
    key_format, value_format : Format
        Whose blocks have the same length, which divides a page's 128 tokens.

    Raises
    ------
    KVFoldError
        Where the formats cannot be stored page by page.
    """

    key_format: Format
    value_format: Format

    def __post_init__(self) -> None:
        if why := self.unsupported(self.key_format, self.value_format):
            raise KVFoldError(f"pages: {why}")

    @staticmethod
    def unsupported(key_format: Format, value_format: Format) -> str | None:
        """Why these formats cannot be stored in pages; None if they can."""
        if key_format.block != value_format.block:
            return f"blocks of {key_format.block} and {value_format.block} tokens; allowed: equal ones"
        if PAGE % key_format.block:
            return f"blocks of {key_format.block} tokens; allowed: those that divide {PAGE}"
        for side, form in (("keys", key_format), ("values", value_format)):
            if isinstance(form, PagedFormat) and form.page != PAGE:
                return f"{side}: statistics of {form.page or 'all'} tokens; allowed: {PAGE}"
        return None

    @cached_property
    def _places(self) -> tuple[dict[str, Place], dict[str, Place]]:
        at, sides = 0, []
        for form in (self.key_format, self.value_format):
            side = {}
            for name, (count, shape, dtype) in _fields(form):
                side[name] = place = Place(at, count, shape, dtype)
                at += -(-place.bytes // ALIGN) * ALIGN
            sides.append(side)
        return sides[0], sides[1]

    @property
    def bytes(self) -> int:
        """Bytes of a region: a multiple of 128, so that every token has as many, and of 16."""
        last = [place for side in self._places for place in side.values()][-1]
        return -(-(last.at + last.bytes) // PAGE) * PAGE

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token and KV head, keys and values together."""
        return self.bytes // PAGE

    def views(self, region: torch.Tensor) -> tuple[Fields, Fields]:
        """The formats' fields as views of pages.

        Parameters
        ----------
        region : Tensor, uint8 [num_pages, num_kv_heads, at least ``bytes``]
            The bytes of a page and head lie side by side; strides of pages and heads are multiples of 16.

        Returns
        -------
        keys, values : Fields
            ``[num_pages, num_kv_heads, units of a page, ...]``, fields of pages ``[num_pages, num_kv_heads, 1, ...]``.
        """
        if region.dtype != torch.uint8 or region.ndim != 3 or region.stride(2) != 1 or region.shape[2] < self.bytes:
            raise ValueError(
                f"region: {region.dtype} {tuple(region.shape)} with strides {region.stride()}; "
                f"allowed: uint8 [pages, heads, {self.bytes} or more], bytes side by side"
            )
        if any(step % ALIGN for step in (region.storage_offset(), *region.stride()[:2])):
            raise ValueError(f"region: strides {region.stride()}; allowed: multiples of {ALIGN} bytes")
        keys, values = ({name: _view(region, place) for name, place in side.items()} for side in self._places)
        return keys, values


def _fields(form: Format) -> Iterator[tuple[str, tuple[int, tuple[int, ...], torch.dtype]]]:
    for name, (shape, dtype) in form.fields().items():
        yield name, (PAGE // form.block, shape, dtype)
    if isinstance(form, PagedFormat):
        for name, (shape, dtype) in form.page_fields().items():
            yield name, (1, shape, dtype)


def _view(region: torch.Tensor, place: Place) -> torch.Tensor:
    part = region[:, :, place.at : place.at + place.bytes].view(place.dtype)
    return part.unflatten(2, (place.count, *place.shape))


def closed_from(form: Format) -> int:
    """Tokens of a page that must be there before any of its blocks can be closed: what its statistics are taken of."""
    return form.seen if isinstance(form, PagedFormat) and form.page_fields() else 0


__all__ = ["ALIGN", "PageLayout", "Place", "closed_from"]
