"""What an encoder learns of the queries of a whole prompt, by kernels."""

from dataclasses import dataclass

import torch

from kvfold.kernels import eigen
from kvfold.methods import Observation
from kvfold.methods.eigenpairs import Eigh


@dataclass(frozen=True)
class PromptObservation(Observation):
    """Queries on a GPU: a kernel sums their products, from the model's own numbers, and nothing waits for the device."""

    @property
    def eigh(self) -> Eigh:
        return eigen.eigh

    def gram(self, num_kv_heads: int) -> torch.Tensor:
        """See :meth:`Observation.gram`; queries of 32 bits are multiplied in float64."""
        queries = self.model_queries
        if queries.dtype not in (torch.float16, torch.bfloat16) or queries.shape[-1] > 128:
            return super().gram(num_kv_heads)
        return eigen.gram(queries, num_kv_heads)
