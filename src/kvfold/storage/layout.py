"""What a layer stores: its method and shapes, and the formats that follow from them."""

from dataclasses import replace

import torch

from kvfold.formats import PagedFormat
from kvfold.formats.paged import plain
from kvfold.methods import LayerSpec, Method


class Layout:
    """A layer's method, shapes and formats. Everything that stores or reads for the layer refers to the same one.

    Attributes
    ----------
    key_format, value_format : Format
    block : int
        Tokens of a block.
    page_blocks : int
        Blocks of a page; 1 where nothing is stored per page.
    """

    def __init__(self, method: Method, spec: LayerSpec) -> None:
        self.method, self.spec, self.block = method, spec, method.block
        self._choose_formats()

    def _choose_formats(self) -> None:
        self.key_format, self.value_format = self.method.key_format(self.spec), self.method.value_format(self.spec)
        self.formats = self.key_format, self.value_format
        self.page_blocks = max([f.page // f.block for f in self.formats if isinstance(f, PagedFormat)] + [1])
        self.read_as = plain(self.key_format), self.value_format
        """Formats as attention kernels meet them, where queries know of a sequence's statistics."""
        self.of_sequence = any(isinstance(f, PagedFormat) and not f.page for f in self.formats)
        """Whether a format has statistics of a whole sequence."""

    def pack_as(self, fragments: bool) -> None:
        """Have codes in the order of tensor cores, or in the plain one."""
        if self.spec.fragments != fragments:
            self.spec = replace(self.spec, fragments=fragments)
            self._choose_formats()

    def store_in(self, dtype: torch.dtype) -> None:
        """Have what is stored as it is in the dtype in which keys and values come: autocast's may differ from the model's."""
        if self.spec.dtype != dtype:
            self.spec = replace(self.spec, dtype=dtype)
            self._choose_formats()

    def move(self, device: torch.device) -> None:
        """Have the rotation's frequencies on a device."""
        if self.spec.rope is not None:
            self.spec = replace(self.spec, rope=replace(self.spec.rope, inv_freq=self.spec.rope.inv_freq.to(device)))
