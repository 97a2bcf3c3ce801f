"""Time SQuat's state of one layer and sequence, as Llama-3.1-8B has them: 8 KV heads of 128 channels, 4,096 queries each.

usage: python scripts/squat_state.py

Queries with leading directions, as a model's have, and without any; on a GPU if there is one.
"""

import time
from collections.abc import Callable

import torch

from kvfold.methods.eigenpairs import top_eigenpairs
from kvfold.methods.squat import SQuat, penalty_matrix, update_matrix

HEADS, TOKENS, DIM = 8, 4096, 128


def milliseconds(call: Callable[[], object], repeats: int = 5) -> float:
    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    call()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - start) / repeats * 1e3


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    method, width = SQuat(), SQuat().slice_width(DIM)
    flat = random(1, HEADS, TOKENS, DIM)
    spread = flat * torch.exp(0.7 * random(1, HEADS, 1, DIM)) + random(1, HEADS, 1, DIM)
    print(f"{device}, ms: {'queries':>24} {'eigh':>8} {'iteration':>10} {'state':>8}")
    for name, queries in (("leading directions", spread), ("none", flat)):
        gram = queries.double().transpose(-1, -2) @ queries.double()

        def state(queries: torch.Tensor = queries) -> torch.Tensor:
            return update_matrix(penalty_matrix(queries, method.rank, method.lam), width)

        eigh = milliseconds(lambda gram=gram: torch.linalg.eigh(gram))
        found = milliseconds(lambda gram=gram: top_eigenpairs(gram, method.rank, iterate=True))
        print(f"{'':{len(device) + 5}} {name:>24} {eigh:8.2f} {found:10.2f} {milliseconds(state):8.2f}")


if __name__ == "__main__":
    main()
