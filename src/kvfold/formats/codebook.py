"""Additive codebooks: R stages of two-part codes and a norm per token (CommVQ keys; its values: :mod:`kvfold.formats.binary`).

A vector is seen as d/2 complex numbers, the pairs that RoPE rotates. Stage r has N complex vectors z per KV head, and
its code (a, b) stands for the centre ``z_a + i z_b`` (CommVQ, eq. 24); a key is its norm times the sum of its stages'
centres. Multiplication by i is a rotation of every pair, so centres commute with RoPE. For d = 128, N = 64:

======  ==========  ========  ==============
stages  code bits   norm      bits / element
======  ==========  ========  ==============
11      132         16        1.16
21      252         16        2.09
======  ==========  ========  ==============

The norm is per KV head, so that heads can live on different devices; one for all heads, as in the paper, would save
``16 / d`` bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvfold.arithmetic import beside
from kvfold.formats.affine import to_fp16
from kvfold.formats.base import Fields, Format
from kvfold.formats.packing import UNIT

ENCODE_CHUNK = {"cpu": 128}
"""Tokens whose scores against all N^2 centres exist at once, by device: few enough for a CPU's cache, many elsewhere."""


def times_i(x: torch.Tensor, rotary: int) -> torch.Tensor:
    """Multiply RoPE's complex pairs by i: (x_j, x_{j + n/2}) -> (-x_{j + n/2}, x_j).

    Parameters
    ----------
    x : Tensor [..., head_dim]
    rotary : int
        Channels that RoPE rotates; the others are paired in the same way among themselves.
    """
    parts = []
    for half in (x[..., :rotary], x[..., rotary:]):
        if half.shape[-1]:
            real, imaginary = half.chunk(2, -1)
            parts += [-imaginary, real]
    return torch.cat(parts, -1)


# ---- codes of any width up to 16 bits, as one bit stream per 32 tokens ------------------------------------------------


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers below 2^bits without gaps.

    Parameters
    ----------
    codes : Tensor, integer [..., 32]
    bits : int
        1 to 16.

    Returns
    -------
    Tensor, int16 [..., 2 * bits]
        Bit j of code t is bit ``(t * bits + j) mod 16`` of word ``(t * bits + j) // 16``.
    """
    shifts = torch.arange(bits, device=codes.device, dtype=torch.int32)
    stream = ((codes.to(torch.int32).unsqueeze(-1) >> shifts) & 1).flatten(-2).unflatten(-1, (-1, 16))
    weight = 1 << torch.arange(16, device=codes.device, dtype=torch.int32)
    return (stream * weight).sum(-1, dtype=torch.int32).to(torch.int16)  # wraps to the same 16 bits


def unpack_codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of :func:`pack_codes`: int16 [..., 2 * bits] -> int64 [..., 32]."""
    words = words.to(torch.int64) & 0xFFFF
    start = torch.arange(UNIT, device=words.device) * bits
    low, shift = start // 16, start % 16
    high = (low + 1).clamp_max(words.shape[-1] - 1)  # past the end only where nothing of it is needed
    return ((words[..., low] | (words[..., high] << 16)) >> shift) & ((1 << bits) - 1)


# ---- keys --------------------------------------------------------------------------------------------------------------


def lines(table: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """Lines of ``table`` [heads, N, n] by ``code``, int64 [heads, tokens]: [heads, tokens, n]."""
    first = torch.arange(len(table), device=code.device).unsqueeze(1) * table.shape[1]
    return torch.nn.functional.embedding(code + first, table.flatten(0, 1))


Pair = tuple[torch.Tensor, torch.Tensor]


def nearest(scores_a: torch.Tensor, scores_b: torch.Tensor, table: torch.Tensor) -> Pair:
    """Index (a, b) of the largest ``scores_a[a] + scores_b[b] - table[a, b]``, by maximizing over b first.

    Parameters
    ----------
    scores_a, scores_b : Tensor, float32 [heads, tokens, N]
    table : Tensor, float32 [heads, N, N]

    Returns
    -------
    a, b : Tensor, int64 [heads, tokens]
    """
    best_a, best_b = [], []
    chunk = ENCODE_CHUNK.get(scores_a.device.type, 8192)
    for one_a, one_b in zip(scores_a.split(chunk, 1), scores_b.split(chunk, 1), strict=True):
        over_b = (one_b.unsqueeze(-2) - table.unsqueeze(1)).amax(-1)  # [heads, tokens, N]
        a = (one_a + over_b).argmax(-1)
        best_a.append(a)
        best_b.append((one_b - lines(table, a)).argmax(-1))
    return torch.cat(best_a, 1), torch.cat(best_b, 1)


def first_pair(scores_a: torch.Tensor, scores_b: torch.Tensor, table: torch.Tensor) -> Pair:
    """The better of two pairs: the b of the largest score and the best a beside it, or the other way round.

    Parameters and results are those of :func:`nearest`, whose sum it may miss: of N^2 pairs it compares 2N.
    """
    most_a, a = scores_a.max(-1)
    most_b, b = scores_b.max(-1)
    of_a, best_a = (scores_a - lines(table.mT, b)).max(-1)
    of_b, best_b = (scores_b - lines(table, a)).max(-1)
    from_b = most_b + of_a >= most_a + of_b
    return torch.where(from_b, best_a, a), torch.where(from_b, b, best_b)


def next_pair(scores_a: torch.Tensor, scores_b: torch.Tensor, table: torch.Tensor, b: torch.Tensor) -> Pair:
    """The best a beside a token's own ``b``, int64 [heads, tokens], then the best b beside that; never worse than the pair with
    that b which there was. Other parameters and results are those of :func:`nearest`."""
    a = (scores_a - lines(table.mT, b)).argmax(-1)
    return a, (scores_b - lines(table, a)).argmax(-1)


def turning_points(stages: int) -> tuple[int, int, int]:
    """Where :func:`choices` turns back: before which stage, to which, and to which after the last one."""
    return 5 * stages // 8, stages // 4, 8 * stages // 15


def choices(stages: int, passes: int) -> tuple[int, ...]:
    """Stages in the order in which codes are chosen; a stage that occurs again is chosen again, given all others so far.

    Without passes each stage occurs once. The first pass goes back twice, when five eighths of the stages are chosen and at
    the end (:func:`turning_points`); each further one is the end's once more. The first stages are long, and hardly any code of
    theirs would change.
    """
    if passes == 0:
        return tuple(range(stages))
    middle, low, late = turning_points(stages)
    again = tuple(range(late, stages)) * passes
    return (*range(middle), *range(low, middle), *range(middle, stages), *again)


@dataclass(frozen=True)
class Search:
    """What finding nearest centres needs, derived from a :class:`KeyCodebook`.

    With them the squared distance of a vector x (under the metric) to the centre (a, b) is
    ``|x|^2 - (2 halves_a . x - squares_a) - (2 halves_b . x - squares_b) + cross_ab``: 2N inner products instead of N^2.

    Attributes
    ----------
    halves : Tensor, float32 [num_kv_heads, stages, 2N, head_dim]
        ``z_a`` and then ``i z_b`` under the metric.
    squares : Tensor, float32 [num_kv_heads, stages, 2N]
        Their squared lengths.
    cross : Tensor, float32 [num_kv_heads, stages, N, N]
        ``2 <z_a, i z_b>``.
    """

    halves: torch.Tensor
    squares: torch.Tensor
    cross: torch.Tensor


def sharing(stages: int) -> tuple[int, ...]:
    """How many stages share their steps, one group after the other: the first none, the last ones in fours."""
    first, rest = min(stages, 1), (stages - 1) % 4
    return (first, *((rest,) if rest else ()), *(4,) * ((stages - 1) // 4))


def largest(together: int) -> int:
    """Largest number of a stage, where so many share their steps: with it, sums of two numbers a stage fill a byte."""
    return 255 // (2 * together)


@dataclass(frozen=True)
class KeySteps:
    """Centres in steps, of which every group of stages (:func:`sharing`) and every pair of channels have one of their own.

    A centre is ``(number - top / 2) * step``, with the group's :func:`largest` number as top; steps of groups behind the first
    are ``ratio * step``, and centres of stage 0 have ``shift * step`` more.

    Attributes
    ----------
    numbers : Tensor, uint8 [num_kv_heads, stages, N, head_dim]
        0 to 127 in stage 0; to 63, 42 or 31 where two, three or four stages share steps.
    step : Tensor, float32 [num_kv_heads, head_dim / 2]
        Of a pair, channels j and j + head_dim / 2, in stage 0.
    ratio : Tensor, float16 [num_kv_heads, groups - 1, head_dim / 2]
        2^-10 to 16.
    shift : Tensor, float32 [num_kv_heads, head_dim]
        Whole numbers from -256 to 256.
    """

    numbers: torch.Tensor
    step: torch.Tensor
    ratio: torch.Tensor
    shift: torch.Tensor

    @classmethod
    def of(cls, centres: torch.Tensor) -> KeySteps:
        """The nearest to ``centres``, float [num_kv_heads, stages, N, head_dim], in the shortest steps that reach them."""
        z = centres.float()
        groups = sharing(z.shape[1])
        low, high = z[:, 0].amin(1), z[:, 0].amax(1)
        reach = [torch.maximum((high - low) / 126, (high + low).abs() / 512)]
        for part, together in zip(z.split(groups, 1)[1:], groups[1:], strict=True):
            reach.append(part.abs().amax((1, 2)) * (2 / largest(together)))
        need = torch.stack(reach, 1).unflatten(-1, (2, -1)).amax(-2)  # [num_kv_heads, groups, head_dim / 2]
        step = torch.maximum(need[:, 0], need.amax(1) / 16).clamp_min(2.0**-20)
        longer = need[:, 1:] / step.unsqueeze(1) * (1 + 2.0**-11)  # so that fp16 does not make it shorter
        ratio = longer.clamp(2.0**-10, 16).to(torch.float16)
        shift = ((low + high) / 2 / torch.cat((step, step), -1)).round()
        found = cls(z, step, ratio, shift)
        whole = z / found._each()
        whole[:, 0] -= shift[:, None]
        top = found._top()
        return cls((whole + top / 2).round().clamp_min(0).minimum(top).to(torch.uint8), step, ratio, shift)

    def _each(self) -> torch.Tensor:
        """Steps of every stage and channel, float32 [num_kv_heads, stages, 1, head_dim]."""
        steps = torch.cat((self.step.unsqueeze(1), self.ratio.float() * self.step.unsqueeze(1)), 1)
        groups = torch.tensor(sharing(self.numbers.shape[1]), device=steps.device)
        each = steps.repeat_interleave(groups, 1)
        return torch.cat((each, each), -1).unsqueeze(2)

    def _top(self) -> torch.Tensor:
        """Largest numbers of every stage, float32 [stages, 1, 1]."""
        tops = [largest(together) for together in sharing(self.numbers.shape[1]) for _ in range(together)]
        return torch.tensor(tops, dtype=torch.float32, device=self.step.device).view(-1, 1, 1)

    @property
    def centres(self) -> torch.Tensor:
        """float32, as they were."""
        whole = self.numbers.float() - self._top() / 2
        whole[:, 0] += self.shift[:, None]
        return whole * self._each()

    def to(self, device: torch.device) -> KeySteps:
        return KeySteps(*(x.to(device) for x in (self.numbers, self.step, self.ratio, self.shift)))


class KeyCodebook:
    """One layer's key codebooks, and the metric in which centres are compared.

    Parameters
    ----------
    centres : Tensor, float [num_kv_heads, stages, N, head_dim]
        The vectors z in RoPE's pairs, for keys of unit root mean square under the metric.
    metric : Tensor, float [num_kv_heads, head_dim, head_dim]
        Real matrix F that commutes with multiplication by i; the distance of keys x and c is ``|(x - c) F|``. The identity
        is the paper's distance.
    rotary : int
        Channels that RoPE rotates.
    """

    def __init__(self, centres: torch.Tensor, metric: torch.Tensor, rotary: int, steps: KeySteps | None = None) -> None:
        self.centres, self.metric, self.rotary, self.steps = centres, metric, rotary, steps
        self.heads, self.stages, self.levels, self.head_dim = centres.shape

    @classmethod
    def rounded(cls, centres: torch.Tensor, metric: torch.Tensor, rotary: int) -> KeyCodebook:
        """Of the nearest centres in steps, where all channels are rotated: kernels read those, a byte a channel."""
        if rotary != centres.shape[-1]:
            return cls(centres, metric, rotary)
        steps = KeySteps.of(centres)
        return cls(steps.centres.to(centres.dtype), metric, rotary, steps)

    def on(self, device: torch.device) -> KeyCodebook:
        """The same tables on another device; moved once."""
        return self if device == self.centres.device else self._moved(device)

    @beside
    def _moved(self, device: torch.device) -> KeyCodebook:
        steps = None if self.steps is None else self.steps.to(device)
        return KeyCodebook(self.centres.to(device), self.metric.to(device), self.rotary, steps)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything held, by name; what else is needed is derived from these in every call, for it is larger."""
        return {"centres": self.centres, "metric": self.metric}

    def halves(self, exact: bool = False) -> torch.Tensor:
        """Both halves of all codes, ``z_a`` and then ``i z_b``: float32 [num_kv_heads, stages, 2N, head_dim].

        ``exact``: of steps, which are decoded; what is compared when codes are chosen is of the centres' own dtype.
        """
        plain = self.steps.centres if exact and self.steps is not None else self.centres.float()
        return torch.cat((plain, times_i(plain, self.rotary)), -2)

    def search(self) -> Search:
        """Tables for :meth:`assign`."""
        seen = self.halves() @ self.metric.float().unsqueeze(1)
        cross = 2 * seen[:, :, : self.levels] @ seen[:, :, self.levels :].transpose(-1, -2)
        return Search(seen, seen.square().sum(-1), cross)

    def assign(self, x: torch.Tensor, passes: int, search: Search | None = None) -> torch.Tensor:
        """Codes of vectors: stages in the order of :func:`choices`, each given the others that are chosen by then.

        Parameters
        ----------
        x : Tensor, float32 [num_kv_heads, tokens, head_dim]
            Under the metric, divided by its norm.
        passes : int
            0: every stage is chosen once, among all pairs of codes. Otherwise only the first stage is; others take
            :func:`first_pair`, and :func:`next_pair` when they are chosen again. From one pass to two, and so on, the error
            never grows.

        Returns
        -------
        Tensor, int64 [num_kv_heads, tokens, stages, 2]
        """
        search = self.search() if search is None else search
        codes = x.new_zeros(*x.shape[:2], self.stages, 2, dtype=torch.int64)
        rest = x.clone()
        chosen = set()
        for r in choices(self.stages, passes):
            halves, had = search.halves[:, r], codes[:, :, r]
            if r in chosen:
                rest += self._part(halves, had)
            scores = 2 * rest @ halves.transpose(-1, -2) - search.squares[:, r].unsqueeze(1)
            given = scores[..., : self.levels], scores[..., self.levels :], search.cross[:, r]
            if r in chosen:
                pair = next_pair(*given, had[..., 1])
            else:
                pair = nearest(*given) if r == 0 or passes == 0 else first_pair(*given)
            codes[:, :, r] = torch.stack(pair, -1)
            rest -= self._part(halves, codes[:, :, r])
            chosen.add(r)
        return codes

    def _part(self, halves: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Sum of a stage's two halves, float32 [heads, tokens, d]; ``halves`` [heads, 2N, d], ``codes`` [heads, tokens, 2]."""
        return lines(halves, codes[..., 0]) + lines(halves, codes[..., 1] + self.levels)

    def sum(self, codes: torch.Tensor, halves: torch.Tensor | None = None) -> torch.Tensor:
        """Sum of all stages' centres.

        Parameters
        ----------
        codes : Tensor, int64 [num_kv_heads, tokens, stages, 2]
        halves : Tensor or None, float32 [num_kv_heads, stages, 2N, n]
            What to sum; None: the centres themselves.

        Returns
        -------
        Tensor, float32 [num_kv_heads, tokens, n]
        """
        table = self.halves(exact=True) if halves is None else halves
        per_head = 2 * self.levels * self.stages
        offset = torch.arange(self.stages, device=codes.device)[:, None] * (2 * self.levels)
        offset = offset + torch.tensor([0, self.levels], device=codes.device)
        heads = torch.arange(self.heads, device=codes.device)[:, None, None, None] * per_head
        index = (codes + offset + heads).flatten(-2).flatten(0, 1)
        out = torch.nn.functional.embedding_bag(index, table.reshape(self.heads * per_head, -1), mode="sum")
        return out.unflatten(0, codes.shape[:2])


@dataclass(frozen=True)
class AdditiveCodes(Format):
    """Codes of R additive stages and one norm per token and KV head (CommVQ, sec. 4.2).

    Parameters
    ----------
    stages : int
        R of the paper.
    levels : int
        N_c' of the paper: a power of two from 2 to 256.
    passes : int
        How often stages are chosen again, each given the others (:func:`choices`, :meth:`KeyCodebook.assign`); 0 is the
        paper's greedy assignment.
    codebook : KeyCodebook or None
        None: sizes are known, but nothing can be encoded.

    Notes
    -----
    Fields, per block and KV head: ``codes`` int16 [block / 32, stages, 4 log2(levels)], for every stage a stream of 32 codes
    ``a + levels b`` of :func:`pack_codes`; ``rms`` fp16 [block]: what the sum of centres is multiplied with, the projection of
    the key on it, near the key's root mean square.
    """

    stages: int = 1
    levels: int = 64
    passes: int = 0
    codebook: KeyCodebook | None = field(default=None, compare=False, repr=False)

    kind: ClassVar[str] = "additive codes"

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: RoPE pairs need an even number of channels")
        if self.levels not in (2, 4, 8, 16, 32, 64, 128, 256):
            raise ValueError(f"levels={self.levels}: allowed: powers of two from 2 to 256")
        if self.stages < 1:
            raise ValueError(f"stages={self.stages}: allowed: 1 or more")
        if self.block % UNIT:
            raise ValueError(f"block={self.block}: must be a multiple of {UNIT} tokens")

    @property
    def code_bits(self) -> int:
        """Bits of one stage's code."""
        return 2 * (self.levels.bit_length() - 1)

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "codes": ((self.block // UNIT, self.stages, 2 * self.code_bits), torch.int16),
            "rms": ((self.block,), torch.float16),
        }

    def _tables(self, device: torch.device) -> KeyCodebook:
        if self.codebook is None:
            raise ValueError("codebook: none is loaded, so keys cannot be encoded or decoded")
        return self.codebook.on(device)

    def encode(self, x: torch.Tensor) -> Fields:
        """``x``: keys before RoPE, float32 [batch, num_kv_heads, tokens, head_dim]."""
        tables = self._tables(x.device)
        batch = x.shape[0]
        # one product per block of tokens: the same codes whatever the call's length
        search = tables.search()
        metric = tables.metric.float().unsqueeze(1)
        seen = (x.float().unflatten(-2, (-1, self.block)) @ metric).flatten(-3, -2)
        rms = seen.square().mean(-1, keepdim=True).sqrt()
        unit = seen / rms.clamp_min(torch.finfo(torch.float32).tiny)
        by_head = unit.transpose(0, 1).flatten(1, 2)  # heads first: [num_kv_heads, batch * tokens, head_dim]
        codes = tables.assign(by_head, self.passes, search)
        centre = tables.sum(codes, search.halves)
        length = centre.square().sum(-1, keepdim=True)
        gain = (by_head * centre).sum(-1, keepdim=True) / length.clamp_min(1e-12)
        rms = rms.squeeze(-1) * gain.squeeze(-1).unflatten(1, (batch, -1)).transpose(0, 1)
        joined = (codes[..., 0] + self.levels * codes[..., 1]).unflatten(1, (batch, -1, UNIT))  # [H, B, units, 32, R]
        words = pack_codes(joined.permute(1, 0, 2, 4, 3), self.code_bits)
        return {
            "codes": words.unflatten(2, (-1, self.block // UNIT)),
            "rms": to_fp16(rms).unflatten(-1, (-1, self.block)),
        }

    def codes(self, fields: Fields) -> torch.Tensor:
        """The codes (a, b) themselves, int64 [batch, num_kv_heads, tokens, stages, 2]."""
        joined = unpack_codes(fields["codes"].flatten(2, 3), self.code_bits).transpose(-1, -2).flatten(2, 3)
        return torch.stack((joined % self.levels, joined // self.levels), -1)

    def decode(self, fields: Fields) -> torch.Tensor:
        tables = self._tables(fields["codes"].device)
        codes = self.codes(fields).clamp_(0, self.levels - 1)
        batch = codes.shape[0]
        out = tables.sum(codes.transpose(0, 1).flatten(1, 2)).unflatten(1, (batch, -1)).transpose(0, 1)
        return out * fields["rms"].flatten(-2).unsqueeze(-1).float()

    def describe(self) -> str:
        return f"{self.stages} stages of {self.code_bits}-bit codes and a norm ({self.bits:.2f} bits)"


def stages_for(bits: float, head_dim: int, levels: int) -> int:
    """Stages R whose codes come closest to ``bits`` per element with g = head_dim / 2 (eq. 21): 11 and 21 at d = 128."""
    return max(1, math.floor(bits * head_dim / (2 * math.log2(levels)) + 0.5))
