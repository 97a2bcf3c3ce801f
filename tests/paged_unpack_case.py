"""Unpacking pages by the kernel against the format's own decoding; run by test_paged_unpack.py in an interpreter's process."""

import sys

import torch

from interpreter import quicken
from kvfold import methods
from kvfold.formats import PagedFormat
from kvfold.kernels.paged import PageLayout, unpacking
from kvfold.methods import LayerSpec


def unpacking_case(spec, head_dim, device="cpu", dtype=torch.float16, spans=((0, 256), (32, 97), (128, 160), (0, 384))):
    """Pages in any order, bytes beside them NaN; the largest relative RMS error."""
    torch.manual_seed(0)
    method = methods.get(spec)
    layer = LayerSpec(0, 1, 4, 2, head_dim, dtype, fragments=True)
    formats = method.key_format(layer), method.value_format(layer)
    layout = PageLayout(*formats)
    region = torch.full((7, 2, layout.bytes + 256), 255, dtype=torch.uint8, device=device)
    table = torch.tensor([5, 1, 3], dtype=torch.int32, device=device)
    worst = 0.0
    for form, fields in zip(formats, layout.views(region), strict=True):
        assert unpacking.why_not(form) is None
        x = torch.randn(1, 2, 384, head_dim, device=device) * torch.rand(head_dim, device=device) * 3 + 1
        stored = form.encode(x)
        own = form.page_fields() if isinstance(form, PagedFormat) else {}
        for name, t in stored.items():
            each = 1 if name in own else 4
            for page, place in enumerate(table.tolist()):
                fields[name][place] = t[0, :, page * each : (page + 1) * each]
        expected = form.decode(stored)[0].transpose(0, 1)
        for start, stop in spans:
            found = unpacking.any_unpack(form, fields, table, start, stop, dtype)
            assert found.shape == (stop - start, 2, head_dim) and found.dtype == dtype
            part = expected[start:stop]
            worst = max(worst, float((found.float() - part).norm() / part.norm()))
    return worst


CASES = {
    "fold-128": ("fold", 128),
    "fold-64": ("fold:rotation=16", 64),
    "fold-1-4": ("fold:k_bits=4,v_bits=1", 64),
    "fold-8": ("fold:bits=8,normalize=false", 64),
    "kivi-128": ("kivi", 128),
    "kivi-64": ("kivi:bits=4", 64),
    "innerq-64": ("innerq", 64),
    "qjl-64": ("qjl", 64),
}

if __name__ == "__main__":
    quicken()
    for name in sys.argv[1:]:
        error = unpacking_case(*CASES[name])
        print(f"{name}: {error:.2e}")
        assert error < 5e-4, (name, error)
