"""What readers of formats around another format share: the inner format's reader, called by its address."""

from typing import Any

import torch

from kvfold.formats import Fields
from kvfold.kernels.cpu.readers import reader_of
from kvfold.kernels.cpu.readers.base import CPUReader, F


class NestedReader(CPUReader[F]):
    """A reader of a format that decodes what ``form.inner`` decodes to.

    Its row ends with what :meth:`inside` returns; :func:`~kvfold.kernels.cpu._numbers.decode_inside` decodes a unit by it. The
    inner format's reader may use all of the scratch, which is free again when it is done.
    """

    def __init__(self, form: Any) -> None:
        super().__init__(form)
        self.inner = reader_of(form.inner)

    @property
    def scratch(self) -> int:
        return max(self.inner.scratch, self.own_scratch)

    @property
    def own_scratch(self) -> int:
        """Floats of memory that are needed after the inner format's unit is decoded."""
        return 0

    def inside(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Address of the inner format's decoder, and the row that it is given."""
        return [type(self.inner).decode.address, *self.inner.row(fields, keep)]
