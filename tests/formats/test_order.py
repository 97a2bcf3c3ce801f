"""Codes in another order are those that the same format encodes with that order."""

import pytest
import torch

from kvfold.formats import Dense
from kvfold.formats.lookup import ChannelScales
from kvfold.formats.order import reorderable, reordered
from kvfold.methods import LayerSpec, get
from kvfold.methods.kvquant import Learned
from kvfold.methods.turboquant import lloyd_max

SPECS = [LayerSpec(0, 1, 4, 2, 128, fragments=fragments) for fragments in (True, False)]
METHODS = [
    *("turboquant", "turboquant:bits=1", "turboquant:bits=3", "turboquant:bits=4", "gear", "gear:bits=4", "zipcache"),
    *("innerq", "innerq:mode=asym", "innerq:mode=sym", "innerq:paper=true", "qjl", "fold", "kivi", "kivi:group=64"),
    "kvquant:bits=3",
]


def formats(name, side):
    method = get(name)
    if name == "kvquant:bits=3":
        draw = torch.Generator().manual_seed(0)
        scales = ChannelScales(torch.randn(2, 128, generator=draw), torch.rand(2, 128, generator=draw) + 1)
        levels = tuple(x / 3 for x in lloyd_max(3))
        return [method.format(spec, side, Learned(levels, levels, scales)) for spec in SPECS]
    return [getattr(method, f"{side}_format")(spec) for spec in SPECS]


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", METHODS)
def test_every_bit_is_where_the_other_order_has_it(name, side):
    fused, plain = formats(name, side)
    x = torch.randn(2, 2, 256, 128, generator=torch.Generator().manual_seed(1))
    x = x * torch.exp(x[:, :, :1]) + x[:, :, 1:2]
    stored = [{n: t for n, t in form.encode(x).items() if n in form.fields()} for form in (fused, plain)]
    for old, new, fields, wanted in ((fused, plain, *stored), (plain, fused, *stored[::-1])):
        got = reordered(fields, old, new)
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[n].view(torch.int16), wanted[n].view(torch.int16)) for n in wanted)
    assert reordered(stored[0], fused, fused) is stored[0]


def test_what_has_no_codes_is_not_known():
    assert not reorderable(Dense(64, 32, "key"))
    assert all(map(reorderable, formats("gear", "key")))
