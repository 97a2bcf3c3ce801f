"""What a basis turns, unpacked by tensor cores: warps in NumPy, compiled ahead, and the formats it is meant for."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import lanes
from aot.turned import compile_turned
from helpers import multiprocessors
from kvfold.kernels.long import _rotated as _turned_gluon
from kvfold.kernels.long import rotated as turned
from kvfold.methods import LayerSpec, get
from warps import Machine, on_cpu, register, scalar

TOKENS = 160  # a page, and a quarter of the next one


PLAIN = [("kvarn", "keys"), ("kvarn", "values"), ("kvarn:rotation=32", "keys"), ("nova", "values")]
"""In plain order. NOVA-KV's keys are codes of groups, which others unpack."""


def form_of(method, side):
    made = get(method)
    layer = LayerSpec(0, 1, 1, 1, 128, torch.float16, fragments=(method, side) not in PLAIN)
    if method == "nova":  # no artefact
        return made.formats(layer)[side == "values"]
    return made.key_format(layer) if side == "keys" else made.value_format(layer)


def unpacked(form, fields):
    """Two heads' tokens, decoded by warps; what is not written stays NaN."""
    heads, blocks = fields["norm" if form.norm else "mean"].shape[1], TOKENS // 32
    machine, fixed = Machine(1), turned.constants(form, False)
    codes, scale, mean, norm = (machine.put(x) for x in turned.arrays(form, fields))
    out = machine.put(torch.full((heads, TOKENS, 128), float("nan"), dtype=torch.float16))
    table = turned.tables_of(form, torch.device("cpu"))[0]
    matrix = 4096
    machine.shared[matrix : matrix + 2 * table.numel()] = np.frombuffer(table.numpy().tobytes(), np.uint8)
    room, pages = (fields[n].shape[2] for n in (next(iter(form.fields())), "mean"))
    size = 4 * fixed["WIDTH"] * fixed["BITS"]
    names = ("D", "WIDTH", "BLOCK", "BITS", "KIND", "VALUE", "MEAN", "NORM", "FACTOR", "TABLE", "BF16")
    lane, kernel = register(np.arange(32, dtype=np.int32)), on_cpu(_turned_gluon, machine)
    for unit in range(heads * blocks):
        head, number = divmod(unit, blocks)
        block, page = head * room + number, head * pages + number // 4
        at = codes + block * size, scale + block * 64, mean + page * 256, norm + page * 128, out + unit * 32 * 256
        kernel.turn_unit(
            matrix + lane * 16, None, lane, *(scalar(x, np.int64) for x in at), *(fixed[name] for name in names)
        )  # fmt: skip
    found = machine.memory[out : out + heads * TOKENS * 256].view(np.float16)
    return torch.from_numpy(found.astype(np.float32)).view(heads, TOKENS, 128)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize(
    "method",
    [
        *(f"fold:bits={b}" for b in (1, 2, 3, 4)),
        "turboquant:bits=2",
        "turboquant:bits=3",
        "qjl",
        "fold:rotation=32",
        "fold:rotation=128",
    ],
)
def test_numbers_are_those_of_the_format(method, side):
    if method == "qjl" and side == "values":
        pytest.skip("QJL's values have no basis")
    form = form_of(method, side)
    draw = torch.Generator().manual_seed(0)
    shape = torch.exp(0.7 * torch.randn(1, 2, 1, 128, generator=draw))
    x = torch.randn(1, 2, TOKENS, 128, generator=draw) * shape + torch.randn(1, 2, 1, 128, generator=draw)
    fields = form.allocate(1, 2, TOKENS // 32 + 3, "cpu")
    for y in fields.values():
        y.fill_(float("nan") if y.is_floating_point() else -1)
    for name, y in form.encode(x).items():
        fields[name][:, :, : y.shape[2]] = y
    want = form.decode(fields)[0, :, :TOKENS]
    assert float((unpacked(form, fields) - want).norm() / want.norm()) < 5e-4


class Emulated:
    """The kernel, whose launches PyTorch runs."""

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **constants):
            run = _turned_gluon.turned_kernel
            lanes.run(run, (*grid, 1, 1), arguments, constants, num_warps, 227 << 10)

        return launch


LIMIT = {torch.float16: 5e-4, torch.bfloat16: 3e-3}
CODED = ["fold:bits=2,codebook=true", "fold:bits=1,codebook=true", "fold:bits=2,codebook=true,rotation=128"]


@pytest.mark.parametrize("dtype", LIMIT, ids=["fp16", "bf16"])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("method", ["fold", *CODED, "fold:bits=1,codebook=true,rotation=32,normalize=false"])
def test_launches_on_a_cpu(method, side, dtype, monkeypatch):
    monkeypatch.setattr(turned, "device_info", multiprocessors(1))
    monkeypatch.setattr(turned, "_kernel", Emulated)
    assert error(method, side, dtype, "cpu", 320) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", LIMIT, ids=["fp16", "bf16"])
@pytest.mark.parametrize("method, side", PLAIN)
def test_launches_of_plain_order_on_a_cpu(method, side, dtype, monkeypatch):
    monkeypatch.setattr(turned, "device_info", multiprocessors(1))
    monkeypatch.setattr(turned, "_kernel", Emulated)
    assert error(method, side, dtype, "cpu", 384) < LIMIT[dtype]


@pytest.mark.parametrize("size", [1e-3, 1e3])
@pytest.mark.parametrize("method, side", PLAIN)
def test_small_and_large_numbers_of_plain_order_keep_their_digits(method, side, size, monkeypatch):
    monkeypatch.setattr(turned, "device_info", multiprocessors(1))
    monkeypatch.setattr(turned, "_kernel", Emulated)
    assert error(method, side, torch.float16, "cpu", 256, size) < 1e-3


@pytest.mark.parametrize("method, side", PLAIN)
def test_numbers_of_plain_order_become_no_infinities(method, side, monkeypatch):
    monkeypatch.setattr(turned, "device_info", multiprocessors(1))
    monkeypatch.setattr(turned, "_kernel", Emulated)
    form = form_of(method, side)
    fields = form.encode(torch.randn(1, 1, 128, 128, generator=torch.Generator().manual_seed(0)))
    for name in {"meta", "factor"} & set(fields):
        fields[name].fill_(60000.0)
    out = torch.empty(1, 1, 128, 128, dtype=torch.float16)
    turned.unpack_turned(form, fields, 0, out)
    assert torch.isfinite(out).all() and out.abs().max() == 65504


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", LIMIT, ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    "method, side",
    [
        *((m, side) for m in ("fold", "fold:bits=1", "turboquant:bits=3", *CODED) for side in ("keys", "values")),
        *PLAIN,
    ],
)
def test_numbers_on_a_gpu(method, side, dtype):
    tokens = 1280 if (method, side) in PLAIN else 1312
    assert error(method, side, dtype, "cuda", tokens) < LIMIT[dtype]


def error(method, side, dtype, device, tokens, size=1.0):
    """Relative RMS error of what is decoded from the second page on; beyond it nothing is written."""
    form, draw = form_of(method, side), torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, tokens, 128, generator=draw) + torch.randn(1, 2, 1, 128, generator=draw)
    x *= size
    fields = {name: y.to(device) for name, y in form.encode(x).items()}
    want = form.decode(fields)[:, :, 128:]
    whole = torch.full((2, 2, tokens, 128), float("nan"), dtype=dtype, device=device)
    turned.unpack_turned(form, fields, 128, whole[:, :, :-128])
    assert whole[:, :, -128:].isnan().all()
    return float((whole[:, :, :-128].float() - want).norm() / want.norm())


def test_rows_of_a_table_never_meet_in_a_bank(monkeypatch):
    """A half of a warp reads 8 bytes a lane at once, a quarter 16, from as many banks."""
    read, seen = lanes.Program.load_shared, {2: [], 4: []}

    def load_shared(self, address, offset, count):
        if int(address.min()) >= 1024 + 16384:  # behind the basis
            seen[count].append((address + offset).view(-1, 32 // count) // (4 * count) % (32 // count))
        return read(self, address, offset, count)

    monkeypatch.setattr(lanes.Program, "load_shared", load_shared)
    monkeypatch.setattr(turned, "device_info", multiprocessors(1))
    monkeypatch.setattr(turned, "_kernel", Emulated)
    for count, method in zip(seen, CODED[:2], strict=True):
        assert error(method, "values", torch.float16, "cpu", 160) < LIMIT[torch.float16]
        assert seen[count] and all(len(set(part.tolist())) == len(part) for x in seen[count] for part in x)


def test_large_numbers_do_not_become_infinities():
    form = form_of("fold", "values")
    fields = form.encode(torch.randn(1, 1, TOKENS, 128, generator=torch.Generator().manual_seed(0)))
    fields["scale"].fill_(60000.0)
    found = unpacked(form, fields)
    assert torch.isfinite(found).all() and found.abs().max() == 65504


@pytest.mark.parametrize("method", ["fold", "turboquant:bits=3", "qjl", *CODED[:2]])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_compiles_without_spills(method, side):
    if method == "qjl" and side == "values":
        pytest.skip("QJL's values have no basis")
    report = compile_turned(form_of(method, side))
    assert report.spilled == 0
    assert report.instructions["HMMA"] == {"turboquant:bits=3": 256, "qjl": 512}.get(method, 128)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("method, side", PLAIN)
def test_plain_order_compiles_without_spills(method, side, bf16):
    report = compile_turned(form_of(method, side), bf16)
    assert report.spilled == 0
    assert report.instructions["HMMA"] == (128 if "=" in method else 256)


def test_which_formats_it_serves():
    gpu = torch.device("cuda")
    coded = ((method, side) for method in CODED[:2] for side in ("keys", "values"))
    for method, side in (
        ("fold", "keys"),
        ("fold", "values"),
        ("turboquant:bits=3", "keys"),
        ("qjl", "keys"),
        *PLAIN,
        *coded,
    ):
        assert turned.serves(form_of(method, side), gpu) and not turned.serves(
            form_of(method, side), torch.device("cpu")
        )
    others = (
        ("qjl", "values"),
        ("kivi", "keys"),
        ("fold:rotation=1", "keys"),
        ("turboquant:bits=4", "keys"),
        ("fold:bits=8", "keys"),
        ("kvarn:rotation=64", "keys"),  # packed for tensor cores
    )
    assert not any(turned.serves(form_of(*other), gpu) for other in others)
    plain = LayerSpec(0, 1, 1, 1, 128, torch.float16, fragments=False)
    for method in ("kvarn:bits=3", "kvarn:group=64", "kvarn:rotation=1"):
        assert not turned.serves(get(method).key_format(plain), gpu)
