"""Residual vector quantization: a byte per stage and group of channels, and a scale per token. The storage of VQLLM."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvfold.arithmetic import beside
from kvfold.formats.affine import to_fp16
from kvfold.formats.base import Fields
from kvfold.formats.uniform import fitted
from kvfold.formats.vectors import VectorCodes

CHUNK = {"cpu": 8192, "cuda": 1 << 17}
"""Vectors whose distances to all codes exist at once: few stay in a CPU's caches, many keep a GPU busy."""


@dataclass(frozen=True)
class Steps:
    """A codebook in whole steps: code c of stage s is ``(numbers[s, c] - 64 + (shift if s == 0 else 0)) * step``.

    Attributes
    ----------
    numbers : Tensor, uint8 [stages, codes, vector]
        0 to 127.
    step, shift : Tensor, float32 [vector]
        Steps have five significant bits; shifts are multiples of 32 from -480 to 480.
    """

    numbers: torch.Tensor
    step: torch.Tensor
    shift: torch.Tensor

    @property
    def codes(self) -> torch.Tensor:
        """float32 [stages, codes, vector]"""
        whole = self.numbers.float() - 64
        return torch.cat((whole[:1] + self.shift, whole[1:])) * self.step


def in_steps(codes: torch.Tensor) -> Steps:
    """The nearest whole steps to ``codes``, float [stages, codes, vector]; each channel has the shortest steps that reach."""
    codes = codes.float()
    low, high = codes[0].amin(0), codes[0].amax(0)
    rest = codes[1:].abs().amax((0, 1)) / 63 if len(codes) > 1 else torch.zeros_like(low)
    shift = 32.0 * torch.arange(-15, 16, device=codes.device).unsqueeze(-1)
    first, last = shift - 64, shift + 63
    # of a shift, the shortest step that reaches both ends, where longer ones do
    below = torch.where(first < 0, low / first, torch.zeros_like(low))
    above = torch.where(last > 0, high / last, torch.zeros_like(high))
    step = _five_bits(torch.stack((below, above, rest.expand_as(below))).amax(0).clamp_min(2.0**-20))
    reaches = (low >= first * step) & (high <= last * step)
    best = torch.where(reaches, step, torch.inf).argmin(0, keepdim=True)
    step, shift = step.gather(0, best)[0], shift.expand_as(step).gather(0, best)[0]
    whole = torch.cat((codes[:1] / step - shift, codes[1:] / step)).round() + 64
    return Steps(whole.clamp(0, 127).to(torch.uint8), step, shift)


def _five_bits(x: torch.Tensor) -> torch.Tensor:
    """The next larger numbers of five significant bits."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ceil(mantissa * 32), exponent - 5)


class Codebook:
    """Codes of all stages, shared by the KV heads of a layer: floating [stages, codes, vector]; fp16 halves them.

    ``steps``: the same codes as numbers of a byte, where they are such (:meth:`rounded`); kernels read these.
    """

    def __init__(self, codes: torch.Tensor, steps: Steps | None = None) -> None:
        self.codes = codes
        self.steps = steps

    @classmethod
    def rounded(cls, codes: torch.Tensor) -> "Codebook":
        """Of the nearest codes in whole steps, fp16."""
        steps = in_steps(codes)
        return cls(steps.codes.half(), steps)

    def on(self, device: torch.device) -> "Codebook":
        """The same codebook on another device; moved once."""
        return self if device == self.codes.device else self._moved(device)

    @beside
    def _moved(self, device: torch.device) -> "Codebook":
        steps = self.steps
        if steps is not None:
            steps = Steps(steps.numbers.to(device), steps.step.to(device), steps.shift.to(device))
        return Codebook(self.codes.to(device), steps)


@dataclass(frozen=True)
class ResidualCodes(VectorCodes):
    """Each group of ``vector`` channels as the sum of one code per stage, times the token's scale.

    Parameters
    ----------
    vector : int
        Channels that are quantized together; divides ``head_dim``.
    codes : int
        Codes per stage, at most 256: an index takes a byte.
    stages : int
    strided : bool
        Group channels i, i + head_dim / vector, ... instead of neighbours.
    book : Codebook or None
        Without it the format knows its size only.
    fit : {"rms", "least", "size", "unbiased"}
        The stored scale: the vector's root mean square, which codes are chosen for; or what is fitted to the chosen codes
        (:mod:`kvfold.formats.uniform`).

    Notes
    -----
    Fields, per block and KV head: ``codes`` uint8 [block, head_dim / vector, stages]; ``rms`` fp16 [block].
    """

    vector: int
    codes: int
    stages: int
    strided: bool = False
    book: Codebook | None = field(default=None, compare=False, repr=False)
    fit: str = "rms"

    kind: ClassVar[str] = "residual codes"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.codes <= 256 or self.stages < 1:
            raise ValueError(f"codes={self.codes}, stages={self.stages}: 2 to 256 codes and at least 1 stage")

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "codes": ((self.block, self.groups, self.stages), torch.uint8),
            "rms": ((self.block,), torch.float16),
        }

    def encode(self, x: torch.Tensor) -> Fields:
        assert self.book is not None
        x = x.float()
        rms = to_fp16(x.square().mean(-1, keepdim=True).sqrt())
        safe = torch.where(rms == 0, torch.ones_like(rms), rms).float()
        vectors = self.split(x / safe)
        codes = choose(vectors.flatten(0, -2), self.book.on(x.device).codes.float()).view(
            *vectors.shape[:-1], self.stages
        )
        if self.fit != "rms":
            rms = to_fp16(fitted(x, self._vectors(codes), self.fit))
        return {
            "codes": codes.to(torch.uint8).unflatten(-3, (-1, self.block)),
            "rms": rms.squeeze(-1).unflatten(-1, (-1, self.block)),
        }

    def _vectors(self, codes: torch.Tensor) -> torch.Tensor:
        """Vectors of unit scale of codes, int64 [..., groups, stages]: float32 [..., head_dim]."""
        assert self.book is not None
        stages = self.book.on(codes.device).codes.float()
        vectors = stages[0][codes[..., 0]]
        for stage in range(1, self.stages):
            vectors = vectors + stages[stage][codes[..., stage]]
        return self.join(vectors)

    def decode(self, fields: Fields) -> torch.Tensor:
        codes = fields["codes"].flatten(-4, -3).long().clamp_max(self.codes - 1)
        return self._vectors(codes) * fields["rms"].flatten(-2).float().unsqueeze(-1)

    def describe(self) -> str:
        stages = f"{self.stages} stages of " if self.stages > 1 else ""
        return f"{stages}{self.codes} codes for {self.vector} channels ({self.bits:.2f} bits)"


def choose(x: torch.Tensor, stages: torch.Tensor) -> torch.Tensor:
    """Nearest code of each stage to what the stages before it left over.

    Parameters
    ----------
    x : Tensor, float32 [n, vector]
    stages : Tensor, float32 [stages, codes, vector]

    Returns
    -------
    Tensor, int64 [n, stages]
    """
    chosen = torch.empty(len(x), len(stages), dtype=torch.int64, device=x.device)
    chunk = CHUNK[x.device.type]
    for start in range(0, len(x), chunk):
        rest = x[start : start + chunk]
        for index, codes in enumerate(stages):
            best = nearest(rest, codes)
            chosen[start : start + chunk, index] = best
            rest = rest - codes[best]
    return chosen


def nearest(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Index of the nearest code: x [n, vector], codes [codes, vector] -> int64 [n]."""
    return torch.addmm(codes.square().sum(-1), x, codes.T, alpha=-2).argmin(-1)
