"""What launches ask of a device."""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Within it kernels start on ``device``: Triton launches on the current GPU and its stream, wherever the arguments lie,
    and a model split over several GPUs leaves the first one current. Nothing changes for a CPU, nor where a GPU is only asked
    about."""
    return torch.cuda.device(device) if device.type == "cuda" and torch.cuda.is_initialized() else nullcontext()
