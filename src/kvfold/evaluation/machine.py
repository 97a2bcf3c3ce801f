"""Where and with what something was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvfold.evaluation.schema import Header
from kvfold.models import ModelInfo


def make_header(model: PreTrainedModel, info: ModelInfo, **what: Any) -> Header:
    """A header of now, of this process and this model; ``what`` are the fields that say what is run."""
    return Header(
        versions=versions(),
        model=info.name,
        parameters=info.parameters,
        dtype=info.dtype,
        device=device_name(model.device),
        threads=torch.get_num_threads(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **what,
    )


def versions() -> dict[str, str]:
    """Of what results depend on."""
    import kvfold

    return {
        "kvfold": kvfold.__version__,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the CPU and its number of usable cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return name
