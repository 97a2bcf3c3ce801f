"""Launch shapes on an H100 or H200 (132 multiprocessors), over a grid of shapes: those that were measured there."""

from hashlib import sha256
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from kvfold.formats import AffineGroups
from kvfold.kernels.affine import decode
from kvfold.kernels.affine import row_major as plain
from kvfold.kernels.dense import decode as dense
from kvfold.kernels.device import HOPPER, DeviceInfo
from kvfold.kernels.fold import decode as pages
from kvfold.kernels.fragments import decode as fragments
from kvfold.methods import LayerSpec, get
from specializations import MODES, formats

JOBS, ROWS, BLOCKS, SLOTS = (1, 8, 64, 128, 300, 2048), (1, 4, 8, 9, 16), (4, 64, 512, 4096), (0, 160)
PAGED = ("fold", "fold:bits=2", "fold:bits=3", "fold:codebook=true", "fold:bits=2,codebook=true")
FRAGMENTS = ("innerq", "innerq:mode=asym", "qjl", "qjl:k_bits=1")


def of_method(name, dim):
    method, spec = get(name), LayerSpec(0, 1, 8, 2, dim, torch.float16)
    return method.key_format(spec), method.value_format(spec)


def of_pages(name, device):
    for dim, jobs, rows, blocks, slots in product((64, 128, 256), JOBS, ROWS, BLOCKS, SLOTS):
        forms = of_method(name, dim)
        if pages.unsupported(*forms) is None:
            yield pages.make_plan(*forms, jobs, rows, blocks, slots, device)


def of_fragments(name, device):
    for dim, jobs, rows, blocks, wide in product((64, 128, 256), JOBS, ROWS, BLOCKS, (False, True)):
        forms = of_method(name, dim)
        if fragments.unsupported(*forms) is None:
            yield fragments.make_plan(*forms, jobs, rows, blocks, 160, device, wide)


def of_affine(mode, device):
    for bits, dim, jobs, rows, blocks in product((1, 2, 3, 4, 8), (64, 128, 256), JOBS, ROWS, BLOCKS):
        yield decode.make_plan(*formats(mode, bits, dim), jobs, rows, blocks, 160, device)
    for bits, dim, jobs, rows in product((1, 2, 4), (64, 128, 256), (1, 8), (65, 256, 2048)):
        yield decode.make_long_plan(*formats(mode, bits, dim), jobs, rows, 1024, device)


def of_row_major(_, device):
    for dim, rotary, jobs, blocks in product((64, 80, 96, 128), (False, True), JOBS, BLOCKS):
        forms = [
            AffineGroups(dim, 32, "plain", 2, axis, "asym", 16 if dim == 80 else 32) for axis in ("token", "channel")
        ]
        yield plain.make_plan(*forms, jobs, blocks, rotary, device)


def of_dense(_, device):
    for dim, jobs, rows, held in product((64, 96, 128, 256), JOBS, ROWS, (32, 4096, 131072)):
        yield dense.make_plan(dim, jobs, rows, held, device)


def digest(of, name, device=HOPPER):
    return sha256("\n".join(map(repr, of(name, device))).encode()).hexdigest()[:16]


MEASURED = {
    "fold": "5c7f2aa69c184cf1",
    "fold:bits=2": "2acd48f8d06f77f7",
    "fold:bits=3": "60466c0aba272181",
    "fold:codebook=true": "c0a196134793b228",
    "fold:bits=2,codebook=true": "c51e8dddd3afb973",
    "innerq": "e4e53898d418900d",
    "innerq:mode=asym": "e4e53898d418900d",
    "qjl": "d9430e4fa6942721",
    "qjl:k_bits=1": "ca84d3621a051025",
    "kivi": "d9b332c94469400f",
    "asym": "68510eace6722db0",
    "sym": "acb980ccf29224ef",
    "hybrid": "4a42e0d3163a40c6",
    "row major": "9aea7d868972e9ed",
    "dense": "129dd067bceeebdc",
}
"""Digests of all plans of a family, in the order of the grid."""


CASES = {
    **dict.fromkeys(PAGED, of_pages),
    **dict.fromkeys(FRAGMENTS, of_fragments),
    **dict.fromkeys(MODES, of_affine),
    "row major": of_row_major,
    "dense": of_dense,
}


@pytest.mark.parametrize("name", CASES)
def test_plans_are_those_that_were_measured(name):
    assert digest(CASES[name], name) == MEASURED[name]


def test_a_smaller_device_has_plans_of_its_own():
    """Shared memory of 99 KB holds fewer programs of a multiprocessor, but always one."""
    small = DeviceInfo(142, (8, 9), 99 * 1024, 100 * 1024)
    assert digest(of_pages, "fold:codebook=true", small) != digest(of_pages, "fold:codebook=true")
    assert small.programs(60 * 1024) == small.programs(200 * 1024) == 1 and HOPPER.programs(60 * 1024) == 3
    assert HOPPER.programs(0) == 227 and not small.has_wgmma and not small.has_pdl
