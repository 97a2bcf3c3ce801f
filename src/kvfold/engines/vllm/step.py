"""A step of one layer, on the pages and windows that vLLM allocated."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from kvfold.engines.vllm.settings import Stored
from kvfold.formats import Fields
from kvfold.kernels import paged
from kvfold.kernels.paged import PagedCall, PagedStep
from kvfold.methods import Method


@dataclass(frozen=True)
class Step:
    """What the layers of a step share."""

    paged: PagedStep

    @classmethod
    def of(cls, method: Method, packed: Any, window_table: torch.Tensor, window_block: int) -> Self:
        """From vLLM's metadata of the packed group, and the windows' block table."""
        return cls(
            PagedStep(
                query_start=packed.query_start,
                seq_lens=packed.seq_lens,
                table=packed.block_table,
                window_table=window_table,
                max_query_len=packed.max_query_len,
                recent=method.recent,
                sink=method.sink,
                block=method.block,
                window_block=window_block,
            )
        )


class Layer:
    """A layer's formats, and its views of what vLLM allocated."""

    def __init__(self, stored: Stored, scale: float) -> None:
        self.stored, self.scale = stored, scale
        self._bound: tuple[int, int] | None = None
        self.keys: Fields = {}
        self.values: Fields = {}
        self.window_keys = self.window_values = torch.empty(0)

    def bind(self, cache: torch.Tensor, window: torch.Tensor) -> None:
        """Look at the caches; anew only where they moved.

        Parameters
        ----------
        cache : Tensor [blocks, num_kv_heads, 128, bytes of a token / bytes of an element]
        window : Tensor [blocks, num_kv_heads, window_block, 2 head_dim]
        """
        if self._bound == (cache.data_ptr(), window.data_ptr()):
            return
        self.keys, self.values = self.stored.layout.views(cache.flatten(2).view(torch.uint8))
        width = self.stored.spec.head_dim
        tokens = window.transpose(1, 2)
        self.window_keys, self.window_values = tokens[..., :width], tokens[..., width:]
        self._bound = cache.data_ptr(), window.data_ptr()


def run(
    layer: Layer, step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor
) -> None:
    """Store the step's tokens, then attend: a request may read pages that another one completes in this step."""
    key_format, value_format = layer.stored.formats
    call = PagedCall(
        step=step.paged,
        key_format=key_format,
        value_format=value_format,
        keys=layer.keys,
        values=layer.values,
        window_keys=layer.window_keys,
        window_values=layer.window_values,
        scale=layer.scale,
        new_keys=key,
        new_values=value,
    )
    paged.store(call)
    paged.attend(replace(call, query=query), out)
