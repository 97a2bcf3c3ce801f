"""Make ``src/kvfold/formats/gaussian_codes.bin``: 256 codes for 4, and for 8, coordinates of a standard normal.

K-means on pseudo-random vectors, then the nearest whole steps, which are bytes. The file is committed, because sums come out
differently on different machines, and codes of a saved cache must mean the same everywhere.
"""

from pathlib import Path

import torch

from kvfold.formats.gaussian import STEP

TARGET = Path(__file__).parents[1] / "src/kvfold/formats/gaussian_codes.bin"
SAMPLES, ROUNDS = 1 << 18, 40


def codes(vector: int) -> torch.Tensor:
    """Centres, float32 [256, vector]."""
    x = torch.randn(SAMPLES, vector, generator=torch.Generator().manual_seed(0))
    centres = x[:256].clone()
    for _ in range(ROUNDS):
        half = centres.square().sum(-1) / 2
        at = torch.cat([(half - part @ centres.T).argmin(-1) for part in x.split(4096)])
        counts = torch.bincount(at, minlength=256).clamp_min(1).unsqueeze(-1)
        centres = torch.zeros_like(centres).index_add_(0, at, x) / counts
    return centres


if __name__ == "__main__":
    tables = [(codes(vector) / STEP).round().to(torch.int8) for vector in (4, 8)]
    TARGET.write_bytes(b"".join(table.numpy().tobytes() for table in tables))
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")
