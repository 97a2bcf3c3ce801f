"""Where a test runs: on which device and in which dtype. The same test functions serve all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Target:
    """A device and the dtype of models, keys, values and queries there; named ``cpu-float32``."""

    name: str

    def __post_init__(self) -> None:
        kind, _, dtype = self.name.partition("-")
        if kind not in ("cpu", "cuda") or dtype not in DTYPES:
            raise ValueError(f"target: {self.name!r}; allowed: cpu or cuda, a dash, and one of {', '.join(DTYPES)}")

    @property
    def device(self) -> torch.device:
        return torch.device(self.name.partition("-")[0])

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name.partition("-")[2]]

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_exact(self) -> bool:
        """Whether what is equal in theory is equal to the last token: rounding decides between no two of them."""
        return self.dtype == torch.float32

    @property
    def max_length(self) -> int | None:
        """For layers that attend: on a GPU, storage in one piece; tests of several set their own."""
        return None if self.name == "cpu-float32" else 1024

    @property
    def attention(self) -> float:
        """Relative RMS error of attention against a plain softmax over the decoded cache (issue 4's limits)."""
        return {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[self.dtype]

    @property
    def logits(self) -> float:
        """Relative RMS difference between logits of one model computed in two ways."""
        return {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[self.dtype]

    @property
    def scores(self) -> float:
        """Difference of two runs' scores of a token, in standard deviations of the scores: where inputs are rounded
        differently, single codes of a quantized cache fall on the other side."""
        return 0.0 if self.is_exact else 0.16


CPU = Target("cpu-float32")

_current = CPU


def current() -> Target:
    """The running test's target."""
    return _current


def use(target: Target) -> None:
    global _current
    _current = target


def available() -> list[Target]:
    """The CPU in float32, and a CUDA device in both of the kernels' dtypes."""
    names = ["cuda-float16", "cuda-bfloat16"] if torch.cuda.is_available() else []
    return [CPU, *map(Target, names)]


def turn(test: str, names: Sequence[str]) -> str:
    """Which of some targets has its turn with a test, by its name: about as many tests for each, and always the same ones."""
    return sorted(names)[crc32(test.encode()) % len(names)]
