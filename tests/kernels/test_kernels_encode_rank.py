"""The kernels that encode affine groups with a low-rank part, against the format's own encoding in float32 on the CPU.

As in test_kernels_encode.py: Triton's interpreter by default, real launches with ``pytest -m gpu``.
"""

import pytest
import torch

pytest.importorskip("triton")

from helpers import ENCODING, interpreted_module, relative, spec
from kvfold.formats import LowRank
from kvfold.kernels.fragments import encode_rank as compiled
from kvfold.methods import get

INTERPRETED = (
    *ENCODING,
    "kvfold.kernels.affine.encode",
    "kvfold.kernels.fold._encode",
    "kvfold.kernels.fold.encode",
    "kvfold.kernels.fragments._encode_rank",
)


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_module("kvfold.kernels.fragments.encode_rank", *INTERPRETED)


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda" if request.param == "gpu" else "cpu")


@pytest.fixture
def kernels(device, interpreted):
    return compiled if device.type == "cuda" else interpreted


def formats(method="gear", plain=False):
    shape = spec(head_dim=64, fragments=not plain)
    return {"key": get(method).key_format(shape), "value": get(method).value_format(shape)}


def vectors(tokens, heads=2):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, heads, tokens, 64, generator=draw)
    return (x * torch.exp(torch.randn(64, generator=draw)) + torch.randn(64, generator=draw)).half()


@pytest.mark.parametrize("operand", ["key", "value"])
@pytest.mark.parametrize("method", ["gear", "gear:rank=4,loops=1"])
def test_what_is_missed_is_encoded_as_the_format_does(method, operand, kernels, device):
    form, x = formats(method)[operand], vectors(288)
    fields = form.allocate(1, 2, 9, device)
    kernels.encode_missed(x[:, :, :256].to(device), fields, form, 0, 256)
    want = form.encode(x[:, :, :256].float())
    got = {**want, "row": fields["row"][:, :, :8].cpu(), "basis": fields["basis"][:, :, :2].cpu()}
    assert relative(form.decode(got), form.decode(want)) < 1e-3
    gram = got["basis"].float().mT @ got["basis"].float()
    assert (gram - torch.eye(form.rank)).abs().max() < 2e-3


@pytest.mark.parametrize("operand", ["key", "value"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_groups_in_plain_order_have_the_formats_bytes(bits, operand, kernels, device):
    form, x = formats(f"gear:bits={bits}", plain=True)[operand], vectors(256)
    x[:, :, 7] = x[:, :, 7, :1]  # constant groups along channels, and along tokens
    x[:, 1, 32:64, 3] = -0.1
    fields = form.allocate(1, 2, 9, device)
    kernels.encode_rank(x.to(device), fields, form, 0, 256)
    want = form.encode(x.float())
    for name in ("codes", "meta"):
        assert torch.equal(fields[name][:, :, :8].cpu().view(torch.int16), want[name].view(torch.int16)), name
    got = {name: t[:, :, : want[name].shape[2]].cpu() for name, t in fields.items()}
    assert relative(form.decode(got), form.decode(want)) < 1e-3


@pytest.mark.parametrize("operand", ["key", "value"])
@pytest.mark.parametrize("plain", [False, True])
def test_bytes_do_not_depend_on_how_calls_were_cut(plain, operand, kernels, device):
    """Blocks of a page that began before, and tokens that wait in a ring."""
    form, x = formats(plain=plain)[operand], vectors(384).to(device)
    whole, parts = (form.allocate(1, 2, 12, device) for _ in range(2))
    kernels.encode_missed(x, whole, form, 0, 384)
    kernels.encode_missed(x[:, :, :288], parts, form, 0, 160)
    ring = torch.roll(x[:, :, 160:288], 160 % 128, 2).contiguous()
    kernels.encode_missed(x[:, :, 288:], parts, form, 160, 384, 0, ring, 288)
    for name in ("row", "basis", *(("codes", "meta") if plain else ())):
        assert torch.equal(whole[name], parts[name]), name


@pytest.mark.parametrize("kind", ["zero", "one direction", "large"])
def test_pages_of_few_directions(kind, kernels, device):
    form, x = formats()["key"], vectors(128)
    x = {"zero": x * 0, "one direction": x[:, :, :, :1] * x[:, :, :1], "large": (100 * x).clamp(-6e4, 6e4)}[kind]
    fields = form.allocate(1, 2, 4, device)
    kernels.encode_missed(x.to(device), fields, form, 0, 128)
    want = form.encode(x.float())
    got = form.decode({**want, "row": fields["row"].cpu(), "basis": fields["basis"].cpu()})
    assert torch.isfinite(got).all() and (got - form.decode(want)).norm() <= 1e-2 * form.decode(want).norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["gear", "gear:rank=4", "gear:bits=3"])
@pytest.mark.parametrize("plain", [False, True])
def test_prompts_are_encoded_as_on_this_device(plain, method):
    for form in formats(method, plain).values():
        assert compiled.self_test(form, torch.device("cuda")) is None


def test_what_kernels_do_not_encode_is_named():
    assert compiled.unsupported(formats()["key"]) is None
    assert compiled.unsupported(formats(plain=True)["key"]) is None
    assert "rank=9; allowed: 1, 2" in compiled.unsupported(formats("gear:rank=9")["key"])
    assert "storage" in compiled.unsupported(formats("gear:outliers=0.01")["key"])
    assert "page=0" in compiled.unsupported(formats("gear:paper=true")["key"])
    assert "storage" in compiled.unsupported(get("kivi").key_format(spec()))
    assert isinstance(formats()["key"], LowRank)
