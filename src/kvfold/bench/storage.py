"""Packed storage of every method, for measurements: formats with tables that no calibration made, and contents."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from kvfold import methods
from kvfold.formats import Fields, Format, PagedFormat
from kvfold.formats.codebook import KeyCodebook, ValueRows
from kvfold.formats.grouped import GroupBook
from kvfold.formats.lookup import ChannelScales
from kvfold.formats.projected import HeadMaps
from kvfold.formats.residual import Codebook
from kvfold.methods import LayerSpec
from kvfold.methods.commvq import CommVQ, ValueCodebook
from kvfold.methods.kvquant import KVQuant, Learned
from kvfold.methods.nova import ByteCodes, Tables
from kvfold.methods.turboquant import lloyd_max
from kvfold.methods.vqllm import VQLLM

Map = Callable[[torch.Tensor], torch.Tensor]

SAMPLE = 4096
"""Tokens that are encoded; the rest of a long sequence repeats them."""


@lru_cache(maxsize=16)
def formats(
    method: str, heads: int, head_dim: int, device: torch.device, fused: bool = True
) -> tuple[Format, Format, Map | None]:
    """Formats of keys and values in the order that their kernel reads, and what turns sums of values into outputs.

    Parameters
    ----------
    method : str
        As on the command line, without an artefact: learned tables are random ones of the right size.
    fused : bool
        In tensor-core order where a kernel reads that; else in plain order.
    """
    spec = LayerSpec(0, 1, heads, heads, head_dim, fragments=False)
    made: Any = methods.get(method)
    from kvfold.kernels.fragments import unsupported

    first = replace(spec, fragments=fused)
    draw = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=draw)

    if isinstance(made, CommVQ):
        centres = random(heads, made.stages(head_dim), made.levels, head_dim) / made.stages(head_dim) ** 0.5
        metric = torch.eye(head_dim, device=device).expand(heads, -1, -1)
        codes = made.value_codes(head_dim)
        values = ValueCodebook(
            {"codebook": random(heads, codes, head_dim) / codes**0.5, "offset": random(heads, head_dim)}
        )
        keys, stored = made.formats(spec, KeyCodebook(centres, metric, head_dim))
        rows = values.rows(heads)
        return keys, stored, ValueRows(rows)
    if isinstance(made, VQLLM):
        sides = [
            made.format(
                spec,
                side,
                Codebook(random(made.stages(bits), made.codes, made.vector).half() / made.stages(bits) ** 0.5),
            )
            for side, bits in (("key", made.key_bits), ("value", made.value_bits))
        ]
        return sides[0], sides[1], None
    if isinstance(made, ByteCodes):
        books = [
            GroupBook(random(heads, head_dim * bits // 8, 256, 8 // bits).half())
            for bits in (made.key_bits, made.value_bits)
        ]
        turn = torch.eye(head_dim, device=device).expand(heads, -1, -1)
        maps = HeadMaps(random(heads, head_dim), turn, turn) if made.maps_keys else None
        return *made.formats(spec, Tables(books[0], maps, books[1])), None
    if isinstance(made, KVQuant):
        levels = [tuple(x / 3 for x in lloyd_max(bits)) for bits in (made.key_bits, made.value_bits)]
        scales = ChannelScales(random(heads, head_dim), 3 * random(heads, head_dim).abs() + 1)
        learned = Learned(levels[0], levels[1], scales)
        both = [(made.format(s, "key", learned), made.format(s, "value", learned)) for s in (first, spec)]
        return (*next(p for p in both if unsupported(*p, pre_rope=True) is None or p is both[1]), None)
    pair = made.key_format(first), made.value_format(first)
    return (*pair, None) if unsupported(*pair) is None else (made.key_format(spec), made.value_format(spec), None)


def fill(form: Format, fields: Fields, vectors: torch.Tensor, tokens: int) -> None:
    """Write ``tokens`` tokens into storage: ``vectors`` [batch, heads, n, head_dim] first, then the same again."""
    encoded = form.encode(vectors) if not is_learned(form) else _random(form, vectors)
    pages = form.page_fields() if isinstance(form, PagedFormat) else {}
    for name, x in encoded.items():
        each = form.page if name in pages else form.block  # type: ignore[attr-defined]
        count = -(-tokens // each)
        index = torch.arange(count, device=x.device) % x.shape[2]
        fields[name][:, :, :count] = x[:, :, index]


def is_learned(form: Format) -> bool:
    """Whether encoding searches tables, which random codes need not."""
    return form.kind in ("additive codes", "binary codes", "residual codes", "group codes", "projected")


def _random(form: Format, like: torch.Tensor) -> Fields:
    """Random codes with scales around 1."""
    fields = form.allocate(like.shape[0], like.shape[1], like.shape[2] // form.block, like.device)
    draw = torch.Generator(like.device).manual_seed(1)
    for x in fields.values():
        if x.is_floating_point():
            x.uniform_(0.5, 1.5, generator=draw)
        else:
            bounds = torch.iinfo(x.dtype)
            x.random_(bounds.min, bounds.max + 1, generator=draw)
    return fields
