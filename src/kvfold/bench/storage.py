"""Packed storage of every method, for measurements: formats with tables that no calibration made, and contents."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from kvfold import methods
from kvfold.arithmetic import lasting
from kvfold.errors import KVFoldError
from kvfold.formats import Fields, Format, PagedFormat
from kvfold.formats.codebook import KeyCodebook
from kvfold.formats.grouped import GroupBook
from kvfold.formats.lookup import ChannelScales
from kvfold.formats.projected import HeadMaps, Projected
from kvfold.formats.residual import Codebook
from kvfold.kernels.call import Project
from kvfold.methods import LayerSpec, Method
from kvfold.methods.commvq import CommVQ, ValueCodebook
from kvfold.methods.kvquant import KVQuant, Learned
from kvfold.methods.learned import LearnedMethod
from kvfold.methods.nova import ByteCodes, Tables
from kvfold.methods.turboquant import lloyd_max
from kvfold.methods.vqllm import VQLLM
from kvfold.storage.reader import mapped

Map = Callable[[torch.Tensor], torch.Tensor]

SAMPLE = 4096
"""Tokens that are encoded; the rest of a long sequence repeats them."""


@lasting(16)
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
    from kvfold.kernels.fold import decode as pages
    from kvfold.kernels.fragments.decode import unsupported

    first = replace(spec, fragments=fused)
    if isinstance(made, CommVQ):
        book, values = tables(made, heads, head_dim, device)
        return *made.formats(spec, book), values.value_map(heads)
    if isinstance(made, VQLLM):
        books = tables(made, heads, head_dim, device)
        return made.format(spec, "key", books["key"]), made.format(spec, "value", books["value"]), None
    if isinstance(made, ByteCodes):
        return *made.formats(spec, tables(made, heads, head_dim, device)), None
    if isinstance(made, KVQuant):
        learned = tables(made, heads, head_dim, device)
        return made.format(spec, "key", learned), made.format(spec, "value", learned), None
    pair = made.key_format(first), made.value_format(first)
    return (
        (*pair, None)
        if None in (unsupported(*pair), pages.unsupported(*pair))
        else (made.key_format(spec), made.value_format(spec), None)
    )


def tables(made: Method, heads: int, head_dim: int, device: torch.device) -> Any:
    """Random tables of the right size, as :meth:`LearnedMethod.learned` gives those of an artefact."""
    draw = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=draw)

    eye = torch.eye(head_dim, device=device).expand(heads, -1, -1)
    if isinstance(made, CommVQ):
        centres = random(heads, made.stages(head_dim), made.levels, head_dim) / made.stages(head_dim) ** 0.5
        return KeyCodebook.rounded(centres, eye, head_dim), _value_book(
            made.value_codes(head_dim), heads, head_dim, random
        )
    if isinstance(made, VQLLM):
        bits = {"key": made.key_bits, "value": made.value_bits}
        sizes = {side: (made.stages(b), made.codes, made.vector) for side, b in bits.items()}
        return {side: Codebook.rounded(random(*size).half() / size[0] ** 0.5) for side, size in sizes.items()}
    if isinstance(made, ByteCodes):
        books = [
            GroupBook(
                random(heads, head_dim * bits // 8, 256, 8 // bits).half(),
                mean=random(heads, head_dim).half() if made.centres(side) else None,
            )
            for side, bits in (("key", made.key_bits), ("value", made.value_bits))
        ]
        maps = HeadMaps(random(heads, head_dim), eye, eye) if made.maps_keys else None
        return Tables(books[0], maps, books[1] if made.values == "codes" else None)
    if isinstance(made, KVQuant):
        levels = [tuple(x / 3 for x in lloyd_max(bits)) for bits in (made.key_bits, made.value_bits)]
        scales = ChannelScales(random(heads, head_dim), 3 * random(heads, head_dim).abs() + 1)
        return Learned(levels[0], levels[1], scales)
    raise KVFoldError(f"{made.name}: no random tables are known of it; allowed: commvq, vqllm, nova, tasq, kvquant")


def _value_book(codes: int, heads: int, head_dim: int, random: Callable[..., torch.Tensor]) -> ValueCodebook:
    """Of scalar codes of as many bits for each component, then flipped."""
    book, offset = random(heads, codes, head_dim) / codes**0.5, random(heads, head_dim)
    bits, which = codes // head_dim, torch.arange(codes, device=book.device)
    eye = torch.eye(head_dim, device=book.device).expand(heads, -1, -1).contiguous()
    return ValueCodebook(
        {
            **{"codebook": book, "offset": offset, "metric": eye, "axes": eye},
            "shift": torch.full((heads, head_dim), 0.5, device=book.device),
            "top": torch.full((heads, head_dim), 2.0**bits - 1, device=book.device),
            "component": (which // bits).expand(heads, -1).contiguous(),
            "place": (which % bits).expand(heads, -1).contiguous(),
        }
    )


def with_tables(made: Method, heads: int, head_dim: int, device: torch.device) -> Method:
    """A learned method that has :func:`tables` in place of an artefact's; others as they are."""
    if not isinstance(made, LearnedMethod):
        return made
    learned = tables(made, heads, head_dim, device)
    kind = type(made)
    given = type(kind.__name__, (kind,), {"learned": lambda self, spec: learned})
    return cast(Method, given(**{f.name: getattr(made, f.name) for f in dataclasses.fields(made)}))


def fill(form: Format, fields: Fields, vectors: torch.Tensor, tokens: int) -> None:
    """Write ``tokens`` tokens into storage: ``vectors`` [batch, heads, n, head_dim] first, then the same again."""
    encoded = form.encode(vectors) if not is_learned(form) else _random(form, vectors)
    pages = form.page_fields() if isinstance(form, PagedFormat) else {}
    for name, x in encoded.items():
        each = form.page if name in pages else form.block  # type: ignore[attr-defined]
        count = -(-tokens // each)
        index = torch.arange(count, device=x.device) % x.shape[2]
        fields[name][:, :, :count] = x[:, :, index]


def read_as(key_format: Format, value_format: Format) -> tuple[tuple[Format, Format], Project | None]:
    """Formats as kernels are given them, and what queries go through before they meet keys, as in a cache."""
    if not isinstance(key_format, Projected):
        return (key_format, value_format), None
    assert key_format.maps is not None
    return (key_format.inner, value_format), partial(mapped, key_format.maps)


def kernel_of(key_format: Format, value_format: Format, rows: int) -> str:
    """Name in the registry of what attends to ``rows`` query rows of a KV head over formats that readers take."""
    from kvfold.kernels.fold import decode as pages
    from kvfold.kernels.fragments.decode import unsupported
    from kvfold.kernels.gluon import tables_of

    forms = key_format, value_format
    if pages.unsupported(*forms) is None:
        return "pages"
    if unsupported(*forms) is None:
        return "fragments"
    of = tables_of(*forms)
    if of is None or of.unsupported(*forms, key_format.head_dim) or of.no_room(*forms, rows, torch.device("cuda")):
        return "blocks"
    return "tables"


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
