"""Units of a format as the CPU kernel's readers decode them."""

import ctypes

import torch

from kvfold.formats import Fields, Format
from kvfold.kernels.cpu.readers import reader_of, why_not
from kvfold.kernels.cpu.readers.base import ROW

TILE = 32
ARGUMENTS = (ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


def decoded(form: Format, fields: Fields, spare: int = 5) -> torch.Tensor:
    """All units, float32 [batch, heads, tokens, width]; tiles are ``spare`` channels wider, which must stay as they are."""
    assert why_not(form) is None
    reader, keep = reader_of(form), []
    row = reader.row(fields, keep)
    assert len(row) <= ROW
    numbers = torch.tensor(row + [0] * (ROW - len(row)))
    function = ctypes.CFUNCTYPE(None, *ARGUMENTS)(type(reader).decode.address)
    blocks = next(iter(fields[name] for name in form.fields()))
    batch, heads, units = *blocks.shape[:2], blocks.shape[2] * form.block // TILE
    width = form.width + spare
    out = torch.full((batch, heads, units, TILE, width), 7.0)
    scratch = torch.full((reader.scratch + 8,), float("nan"))
    for b in range(batch):
        for h in range(heads):
            for u in range(units):
                function(numbers.data_ptr(), b, h, u, out[b, h, u].data_ptr(), width, scratch.data_ptr())
    assert scratch[-8:].isnan().all(), "memory beyond the scratch was written"
    assert (out[..., form.width :] == 7.0).all(), "channels beyond the format's were written"
    return out[..., : form.width].flatten(2, 3)


def missed(form: Format, fields: Fields) -> float:
    """Relative RMS error of the reader's numbers, against the format's."""
    got, expected = decoded(form, fields), form.decode(fields)
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp_min(1e-30))
