"""Attention over parts of the tokens, each normalized, joined to attention over all of them.

Flash attention gives such results, with the log-sum-exp of scores; so does
:func:`kvfold.kernels.common.windows.windows_result`.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from kvfold.kernels.common.partials import Partials

JOIN = 8
"""Results that wait to be joined, at most."""
ROWS, WARPS = 16, 4
"""Query rows of a program, and its warps."""
RESULTS = 64 << 20
"""Their bytes, apart from one's."""
Result = tuple[torch.Tensor, torch.Tensor]
"""Attention over some keys [batch, num_kv_heads, rows, head_dim], of any strides but adjacent channels, and its log-sum-exp,
contiguous float32 [batch, num_kv_heads, rows], natural units."""


@triton.jit(do_not_specialize=["scale", "heads", "rows", "kv_heads", "tokens"])
def join_kernel(  # type: ignore[no-untyped-def]
    part_out, part_top, part_sum, others, totals, strides, bias_ptr, excess_ptr, sinks, out, scale,
    heads, rows, kv_heads, tokens,
    D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, COUNT: tl.constexpr, PLAIN: tl.constexpr, HAS_PART: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_EXCESS: tl.constexpr, HAS_SINKS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Join normalized attention over parts of the tokens, and with HAS_PART a partial result; with LAST write all to ``out``,
    else to that partial result.

    Grid: (blocks of rows, batch * heads). ``others``: COUNT tensors [batch, heads, rows, D] with the ``strides`` of their
    first three dimensions; ``totals``: their log-sum-exps, contiguous, in natural units. ``bias_ptr``, [batch * heads, rows],
    times ``scale`` is added to those but the first PLAIN ones. A learned sink (HAS_SINKS; one per query head, in natural units)
    is what sums begin with. ``excess_ptr`` (HAS_EXCESS): what the last of the normalizers have too much, base-2 logarithms
    [batch * heads, rows].
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * R + tl.arange(0, R)
    channel = tl.arange(0, DP)
    inside = row < rows
    both = inside[:, None] & (channel < D)[None, :]
    at = head.to(tl.int64) * rows + row
    top = tl.full([R], -1.0e30, tl.float32)  # finite, so that differences are never NaN
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, DP], tl.float32)
    if HAS_PART:
        top = tl.load(part_top + at, mask=inside, other=-1.0e30)
        total = tl.load(part_sum + at, mask=inside, other=0.0)
        acc = tl.load(part_out + at[:, None] * D + channel[None, :], mask=both, other=0.0)
    bias = tl.zeros([R], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    for i in tl.static_range(COUNT):
        other = tl.load(totals[i] + at, mask=inside, other=0.0) * 1.4426950408889634
        over = tl.zeros([R], tl.float32) + 1.0
        if HAS_EXCESS and i == COUNT - 1:
            # the real part is never less than one part of COPIES + 1: the bound is for rounding alone
            over = tl.maximum(1.0 - tl.exp2(tl.load(excess_ptr + at, mask=inside, other=-1e30) - other), 1e-4)
            other += tl.log2(over)
        if i >= PLAIN:
            other += bias * 1.4426950408889634
        source = others[i] + (head // heads).to(tl.int64) * strides[3 * i] + (head % heads) * strides[3 * i + 1]
        x = tl.load(source + row[:, None] * strides[3 * i + 2] + channel[None, :], mask=both, other=0.0)
        new = tl.maximum(top, other)
        before, weight = tl.exp2(top - new), tl.exp2(other - new)
        total = total * before + weight
        acc = acc * before[:, None] + (weight / over)[:, None] * x.to(tl.float32)
        top = new
    if LAST:
        if HAS_SINKS:
            sink = tl.load(sinks + head % kv_heads * (rows // tokens) + row // tokens, mask=inside, other=0.0)
            sink = sink.to(tl.float32) * 1.4426950408889634
            new = tl.maximum(top, sink)
            before = tl.exp2(top - new)
            total = total * before + tl.exp2(sink - new)
            acc = acc * before[:, None]
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + at[:, None] * D + channel[None, :], acc.to(out.dtype.element_ty), mask=both)
    else:
        tl.store(part_top + at, top, mask=inside)
        tl.store(part_sum + at, total, mask=inside)
        tl.store(part_out + at[:, None] * D + channel[None, :], acc, mask=both)


@dataclass
class Joint:
    """Results for ``rows`` [batch, num_kv_heads, rows, head_dim] that are joined, a few at a time.

    Attributes
    ----------
    bias : Tensor or None, float32 [batch, num_kv_heads, rows]
        Was left out of every score of a row; see :meth:`end` for those that have none.
    scale : float
        Of ``bias``.
    """

    rows: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    _waiting: list[Result] = field(default_factory=list)
    _excess: torch.Tensor | None = None
    _partials: Partials | None = None

    def add(self, result: Result) -> None:
        """One more, over other tokens."""
        if self._excess is not None or len(self._waiting) >= self._most:
            self._join()
        self._waiting.append(result)

    def take_off(self, excess: torch.Tensor) -> None:
        """What the normalizers of the last result have too much: :func:`kvfold.kernels.long.pad.excess`."""
        self._excess = excess

    def end(self, out: torch.Tensor, others: list[Result], sinks: torch.Tensor | None = None, tokens: int = 1) -> None:
        """Write attention over all tokens.

        Parameters
        ----------
        out : Tensor, contiguous, like ``rows``
        others : list of Result
            More results, whose scores have no bias.
        sinks : Tensor or None, contiguous float [num_heads]
            Learned sinks: a score more in the softmax of each query head, in natural units, for a value of zeros.
        tokens : int
            Query tokens of a call with sinks: rows are query heads times these.
        """
        self._join(out, others, sinks, tokens)

    @property
    def _most(self) -> int:
        return max(1, min(JOIN, RESULTS // max(1, self.rows.numel() * self.rows.itemsize)))

    def _join(
        self,
        out: torch.Tensor | None = None,
        others: list[Result] | None = None,
        sinks: torch.Tensor | None = None,
        tokens: int = 1,
    ) -> None:
        batch, heads, count, dim = self.rows.shape
        results = (others or []) + self._waiting
        partials, begins = self._partials, self._partials is None
        if partials is None and out is None:
            partials = self._partials = Partials.empty(batch * heads, 1, count, dim, self.rows.device)
        excess = self._excess
        self._waiting, self._excess = [], None
        nothing = results[0][1]  # stands for what is not read
        parts = (nothing,) * 3 if partials is None else (partials.out, partials.top, partials.total)
        join_kernel[(triton.cdiv(count, ROWS), batch * heads)](
            *parts,
            tuple(x for x, _ in results),
            tuple(total for _, total in results),
            tuple(stride for x, _ in results for stride in x.stride()[:3]),
            nothing if self.bias is None else self.bias.contiguous(),
            nothing if excess is None else excess,
            nothing if sinks is None else sinks,
            parts[0] if out is None else out,
            float(self.scale),
            heads,
            count,
            1 if sinks is None else sinks.numel() * tokens // count,
            tokens,
            D=dim,
            DP=triton.next_power_of_2(dim),
            R=ROWS,
            COUNT=len(results),
            PLAIN=0 if others is None else len(others),
            HAS_PART=not begins,
            HAS_BIAS=self.bias is not None,
            HAS_EXCESS=excess is not None,
            HAS_SINKS=sinks is not None,
            LAST=out is not None,
            num_warps=WARPS,
        )
