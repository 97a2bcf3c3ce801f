"""What launch shapes ask of a device."""

from functools import lru_cache

import torch


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
