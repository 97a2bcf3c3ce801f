"""Models that are traced: a folded model cannot be, and says what to do instead."""

import torch

from kvfold.errors import UnsupportedModelError

NOT_TRACED = (
    "a folded cache decides on the host where tokens go, which no trace holds: torch.compile breaks its graph here "
    "(fullgraph=False), and torch.export takes unfolded models; call kvfold.unfold(model) first, and kvfold.fold(model) "
    "afterwards"
)


def refuse_tracing() -> None:
    """Refuse a folded cache where ``torch.export`` or ``torch.jit.trace`` records what a model does.

    Raises
    ------
    UnsupportedModelError
    """
    by = "torch.export" if torch.compiler.is_exporting() else "torch.jit.trace" if torch._C._is_tracing() else None
    if by is not None:
        raise UnsupportedModelError(
            f"{by}: a FoldedCache cannot be exported or traced, for it decides on the host where tokens go; call "
            "kvfold.unfold(model) first, and kvfold.fold(model) afterwards"
        )
