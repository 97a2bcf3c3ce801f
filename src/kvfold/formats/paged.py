"""Formats with statistics of their own per page: what they hold can be read without anything of the sequence.

A page is 128 consecutive packed tokens of one KV head::

    x  ->  (x - mean) / norm  ->  basis  ->  inner format           (encode)
    x  =  norm * basis'(inner) + mean                               (decode)

Mean and norm are taken of the page's tokens and stored in the page. A block is closed when ``recent`` newer tokens are
there, so with the default window of 96 all 128 tokens of a page are known when its first block of 32 is closed: blocks close
one by one with statistics of the whole page, and what is stored does not depend on how calls were cut. Attention over a page
needs no decoded copy: with a query q,

    score = (basis(norm * q)) . inner + q . mean,     output = norm * basis'(sum of p * inner) + (sum of p) * mean.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvfold.formats.affine import to_fp16
from kvfold.formats.base import Fields, Format
from kvfold.formats.basis import Basis
from kvfold.formats.projected import Projected

PAGE = 128
"""Tokens of a page."""

NORM_STEPS = 48
"""Steps of a norm's code per factor of two: a norm is ``2^(-code / 48)``, within 0.7 %."""


@dataclass(frozen=True)
class PagedFormat(Format):
    """A format that stores something per page beside its blocks.

    Its ``Fields`` hold tensors of blocks, ``[batch, num_kv_heads, blocks, ...]``, and tensors of pages,
    ``[batch, num_kv_heads, pages, ...]``; the first block belongs to the first page.

    Parameters
    ----------
    page : int
        Tokens of a page, a multiple of ``block``; 0: the whole sequence is one page, whose statistics are those of the
        tokens that are packed first (``paper=true``).
    seen : int
        First tokens of a page that its statistics are taken of: as many as are there when its first block is closed.
    """

    page: int = field(default=PAGE, kw_only=True)
    seen: int = field(default=PAGE, kw_only=True)

    def __post_init__(self) -> None:
        if self.page % self.block:
            raise ValueError(f"block={self.block}: a page of {self.page} tokens is no multiple of it")
        if self.page and not self.block <= self.seen <= self.page:
            raise ValueError(
                f"seen={self.seen}: allowed: from the block's {self.block} to the page's {self.page} tokens"
            )

    @abstractmethod
    def page_fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape (per page and KV head) and dtype of what is stored per page."""

    @abstractmethod
    def statistics(self, first: torch.Tensor) -> Fields:
        """What pages store, from their first ``seen`` tokens, float32 [batch, num_kv_heads, pages, tokens, head_dim]."""

    @abstractmethod
    def encode(self, x: torch.Tensor, page: Fields | None = None, **how: object) -> Fields:
        """Encode vectors.

        Parameters
        ----------
        x : Tensor, float32 [batch, num_kv_heads, tokens, head_dim]
            Whole blocks.
        page : Fields or None
            Statistics of every block's page, each ``[batch, num_kv_heads, blocks or 1, ...]``. None: ``x`` begins with a
            page, and the statistics are made, and returned with the blocks' fields.
        how
            Handed on to the inner format.
        """

    @property
    def page_bytes(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.page_fields().values())

    @property
    def bits(self) -> float:
        own = super().bits
        return own + (8 * self.page_bytes / (self.page * self.head_dim) if self.page else 0.0)

    def pages(self, blocks: int) -> int:
        """Pages that hold ``blocks`` blocks."""
        return -(-blocks * self.block // self.page) if self.page else 1

    def spread(self, page: Fields, first: int, blocks: int) -> Fields:
        """Statistics per page as statistics of ``blocks`` blocks, the first of them block ``first`` of the first page."""
        if not self.page:
            return page
        if not page:
            return {}
        index = torch.arange(first, first + blocks, device=next(iter(page.values())).device) // (
            self.page // self.block
        )
        return {name: t.index_select(2, index) for name, t in page.items()}

    def statistics_of(self, x: torch.Tensor) -> Fields:
        """Statistics of the pages of ``x``, float32 [batch, num_kv_heads, tokens, head_dim], which begins with a page.

        The last page may have fewer tokens than the statistics are to be taken of.
        """
        if not self.page:
            return self.statistics(x.unsqueeze(2))
        tokens, whole = x.shape[-2], 0
        parts = []
        if tokens >= self.seen:
            heads = x.unfold(-2, self.seen, self.page).transpose(
                -1, -2
            )  # a view: [batch, num_kv_heads, pages, seen, d]
            whole = heads.shape[2]
            parts.append(self.statistics(heads))
        if whole * self.page < tokens:
            parts.append(self.statistics(x[:, :, whole * self.page :].unsqueeze(2)))
        return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}

    def with_statistics(self, x: torch.Tensor, page: Fields | None) -> tuple[Fields, Fields]:
        """(statistics of the blocks' pages, what is to be returned with the blocks' fields)."""
        if page is not None:
            return page, {}
        made = self.statistics_of(x)
        return self.spread(made, 0, x.shape[-2] // self.block), made

    def split(self, fields: Fields) -> tuple[Fields, Fields]:
        """(fields of blocks, statistics of every block's page)."""
        own = self.page_fields()
        inner = {name: t for name, t in fields.items() if name not in own}
        blocks = next(iter(inner.values())).shape[2]
        return inner, self.spread({name: fields[name] for name in own}, 0, blocks)

    def take(self, fields: Fields, blocks: int, first: int = 0) -> Fields:
        """As :meth:`Format.take`; ``first`` begins a page."""
        if self.page and first * self.block % self.page:
            raise ValueError(f"first={first}: a page begins every {self.page // self.block} blocks")
        page = first * self.block // self.page if self.page else 0
        pages = slice(page, page + self.pages(blocks))
        own = self.page_fields()
        return {name: t[:, :, pages if name in own else slice(first, first + blocks)] for name, t in fields.items()}

    def allocate(self, batch: int, heads: int, blocks: int, device: torch.device | str) -> Fields:
        """Storage for ``blocks`` blocks; statistics of a whole sequence (``page`` 0) are allocated by its owner."""
        pages = {} if not self.page else self.page_fields()
        return super().allocate(batch, heads, blocks, device) | {
            name: torch.empty(batch, heads, self.pages(blocks), *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in pages.items()
        }


@dataclass(frozen=True)
class Paged(PagedFormat):
    """Another format, for vectors that a page's mean and channel norms, and a fixed basis, prepared.

    Parameters
    ----------
    inner : Format
        With this format's ``block`` and ``operand``.
    mean : bool
        Subtract the page's mean. For keys attention is unchanged by it (softmax ignores a shift of all scores of a page
        only if every page has the same, so the shift ``q . mean`` is added to the page's scores).
    norm : {"", "rms", "max"}
        Divide each channel by the square root of its root mean square, or of its largest magnitude, relative to the largest
        such norm of the head: channels are balanced half-way between their size and their error's weight (InnerQ, sec. 4.3).
    basis : Basis or None

    Notes
    -----
    Fields per page and KV head: ``mean`` fp16 [head_dim]; ``norm`` uint8 [head_dim]: ``2^(-norm / 48)``. A norm is at
    least 0.025 of the largest: the error of a channel that is near zero is better spent than hidden.
    """

    inner: Format
    mean: bool = True
    norm: str = ""
    basis: Basis | None = None

    kind: ClassVar[str] = "paged"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.inner.block, self.inner.operand) != (self.block, self.operand):
            raise ValueError("inner: needs the block and operand of the paged format")
        if self.norm not in ("", "rms", "max"):
            raise ValueError(f"norm={self.norm}: allowed: none, rms, max")

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return self.inner.fields()

    def page_fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.mean:
            fields["mean"] = ((self.head_dim,), torch.float16)
        if self.norm:
            fields["norm"] = ((self.head_dim,), torch.uint8)
        return fields

    def statistics(self, first: torch.Tensor) -> Fields:
        fields = {}
        if self.mean:
            fields["mean"] = to_fp16(first.mean(-2))
            first = first - fields["mean"].float().unsqueeze(-2)
        if self.norm:
            size = first.square().mean(-2).sqrt() if self.norm == "rms" else first.abs().amax(-2)
            relative = size / size.amax(-1, keepdim=True).clamp_min(1e-30)
            code = (relative.clamp_min(1e-30).log2() * (-NORM_STEPS / 2)).round().clamp(0, 255)
            fields["norm"] = torch.where(size.amax(-1, keepdim=True) > 0, code, torch.zeros_like(code)).to(torch.uint8)
        return fields

    def encode(self, x: torch.Tensor, page: Fields | None = None, **how: object) -> Fields:
        page, made = self.with_statistics(x, page)
        blocks = x.float().unflatten(-2, (-1, self.block))
        if self.mean:
            blocks = blocks - page["mean"].float().unsqueeze(-2)
        if self.norm:
            blocks = blocks / norms(page["norm"]).unsqueeze(-2)
        prepared = blocks.flatten(-3, -2)
        if self.basis is not None:
            prepared = self.basis.apply(prepared)
        return self.inner.encode(prepared, **how) | made

    def decode(self, fields: Fields) -> torch.Tensor:
        inner, page = self.split(fields)
        x = self.inner.decode(inner)
        if self.basis is not None:
            x = self.basis.restore(x)
        x = x.unflatten(-2, (-1, self.block))
        if self.norm:
            x = x * norms(page["norm"]).unsqueeze(-2)
        if self.mean:
            x = x + page["mean"].float().unsqueeze(-2)
        return x.flatten(-3, -2)

    def describe(self) -> str:
        what = [name for name, has in (("mean", self.mean), ("norms", bool(self.norm))) if has]
        where = "page" if self.page else "sequence"
        turned = "" if self.basis is None else f", {type(self.basis).__name__.lower()}"
        return f"{self.inner.describe()}{turned}, {' and '.join(what) or 'nothing'} per {where} ({self.bits:.2f} bits in all)"


def norms(code: torch.Tensor) -> torch.Tensor:
    """Channel norms of their codes, float32."""
    return torch.exp2(code.float() * (-1 / NORM_STEPS))


def plain(form: Format) -> Format:
    """A key format as kernels read it: where statistics belong to a whole sequence or to the model, they go into the query,
    once a call, and what is left is the inner format."""
    if isinstance(form, Projected):
        return form.inner
    return form.inner if isinstance(form, Paged) and not form.page and form.basis is None else form
