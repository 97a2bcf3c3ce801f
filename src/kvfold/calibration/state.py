"""What a calibration keeps on disk while it runs, so that a killed one goes on where it stopped."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file

from kvfold import files
from kvfold.errors import KVFoldError, OutputError


@dataclass(frozen=True)
class Fit:
    """What was learned for one layer: its tensors by name, and its errors on held-out text."""

    tensors: dict[str, torch.Tensor]
    errors: dict[str, float]


def share_of(error: torch.Tensor, whole: torch.Tensor) -> float:
    """One sum of squares over another; 0 of nothing that is wrong nowhere."""
    return float(error / whole) if float(error) else 0.0


class State:
    """A run's files, next to the artefact that is being made.

    ``run.json`` says what is run; ``layer-NNN.safetensors`` holds a finished layer; learners keep what they need to go on
    under names of their own. Every file is replaced in one step.

    Parameters
    ----------
    folder : Path
        Made if missing. What another run left there is removed.
    identity : dict
        What is run; a run that differs in it starts afresh.

    Raises
    ------
    KVFoldError
        If the folder cannot be written, or has files that no run left.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        about = folder / "run.json"
        known = None
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(about.read_text(encoding="utf-8"))
        if known != json.loads(json.dumps(identity)):
            if (
                folder.is_dir()
                and not about.exists()
                and any(not p.name.startswith(".kvfold-") for p in folder.iterdir())
            ):
                raise KVFoldError(f"out: {folder}, where finished layers go, has other files; give another name")
            self.remove()
        try:
            folder.mkdir(exist_ok=True)
            files.write(about, json.dumps(identity))
        except OSError as error:
            raise KVFoldError(f"out: cannot write {folder}: {error.strerror or error}") from error

    def path(self, name: str) -> Path:
        """File of a name."""
        return self.folder / f"{name}.safetensors"

    def save(self, name: str, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
        """Write tensors, and what is known of them, in one step."""
        # safetensors stores no empty file
        kept = {"about": torch.zeros(1), **{n: t.contiguous() for n, t in tensors.items()}}
        try:
            files.write(self.path(name), lambda part: save_file(kept, part, metadata={"about": json.dumps(about)}))
        except (OSError, safetensors.SafetensorError) as error:
            raise OutputError(f"out: cannot write {self.path(name)}: {error}; finished layers are kept") from error

    def about(self, name: str) -> dict[str, Any] | None:
        """What is known of saved tensors; None where they are missing or damaged."""
        with (
            contextlib.suppress(OSError, KeyError, ValueError, safetensors.SafetensorError),
            safetensors.safe_open(self.path(name), framework="pt") as file,
        ):
            known: dict[str, Any] = json.loads(file.metadata()["about"])
            return known
        return None

    def load(self, name: str) -> dict[str, torch.Tensor]:
        """Saved tensors."""
        tensors = load_file(self.path(name))
        del tensors["about"]
        return tensors

    def add(self, layer: int, fit: Fit) -> None:
        """Keep a finished layer."""
        self.save(f"layer-{layer:03d}", fit.tensors, fit.errors)

    def layer(self, layer: int) -> Fit | None:
        """A finished layer; None if there is none."""
        errors = self.about(f"layer-{layer:03d}")
        return None if errors is None else Fit(self.load(f"layer-{layer:03d}"), errors)

    def done(self) -> int:
        """Finished layers, counted from the first without a gap."""
        count = 0
        while self.about(f"layer-{count:03d}") is not None:
            count += 1
        return count

    def remove(self) -> None:
        """Delete the run's files and, if nothing else lies there, the folder."""
        if self.folder.is_dir():
            for pattern in ("run.json", "*.safetensors", ".kvfold-*"):
                for path in self.folder.glob(pattern):
                    path.unlink()
            with contextlib.suppress(OSError):
                self.folder.rmdir()
