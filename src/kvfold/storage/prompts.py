"""What an encoder learns of the queries of a whole prompt, by kernels."""

from dataclasses import dataclass

import torch

from kvfold.kernels.affine import eigen
from kvfold.methods import Observation
from kvfold.methods.eigenpairs import Eigh

FEW = 1024
"""Tokens that are multiplied in float64. Bits of float32 average out over many; SQuat at ``channels=1`` sees them of few."""


@dataclass(frozen=True)
class PromptObservation(Observation):
    """Queries on a GPU: a kernel sums their products, from the model's own numbers, and nothing waits for the device."""

    @property
    def eigh(self) -> Eigh | None:
        """The kernel's solver where it passed its test on this device."""
        return eigen.eigh if eigen.is_right(self.model_queries.device) else None

    def gram(self, num_kv_heads: int) -> torch.Tensor:
        """See :meth:`Observation.gram`; queries of 32 bits are multiplied in float64, and so are few."""
        queries = self.model_queries
        if queries.dtype not in (torch.float16, torch.bfloat16) or queries.shape[-1] > 128 or queries.shape[-2] <= FEW:
            return super().gram(num_kv_heads)
        return eigen.gram(queries, num_kv_heads)
