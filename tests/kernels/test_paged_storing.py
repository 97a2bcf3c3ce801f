"""Storing a step in pages: compiled ahead, and (``-m gpu``) on a GPU; interpreted in test_paged_kernels.py."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from books_case import layer
from kvfold.kernels import paged
from kvfold.kernels.paged import books, check, storing, work
from paged_case import Server
from paged_kernels_case import STORES, workspace
from paged_kernels_case import storing as case
from test_paged_kernels import GPU, compiled, needs_gpu


def test_tables_of_a_layer_are_made_once():
    """A graph reads them where they lay when it was captured."""
    made, device = layer("nova:values=codes", heads=1), torch.device("cpu")
    paged.ready(*made.formats, {}, device)
    first, second = ([t.data_ptr() for f in made.formats for t in books.tables_of(f, None, device)[0]] for _ in "12")
    assert first == second


def closings(method, dtype=torch.bfloat16):
    """Kernels of a layer whose sides are stored one after the other, each with the arguments of its launch."""
    launched = []

    class Launched:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *given, **options: launched.append(
                (self.kernel, dict(zip(self.kernel.arg_names, given, strict=False)) | options)
            )

    made = layer(method, dim=128, dtype=dtype)
    call = Server(made.method, (200,), head_dim=128, layer=made, dtype=dtype).step([200])
    space = work.Workspace.make(2, 200, 200, 4, 128, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((books, "close_kernel"), (storing, "close_pages_kernel")):
            patch.setattr(module, name, Launched(getattr(module, name)))
        storing.store(call, space)
    return launched


STACK = 32
"""Bytes: the table of 2 / pi with which a sine of a large angle is found; under a map, an address or two."""


@pytest.mark.parametrize("method", ["tasq", "tasq:bits=2", "nova:values=codes"])
def test_four_programs_that_store_groups_fit_on_a_multiprocessor(method):
    """Of 128 threads, 65,536 registers in all; nothing on the stack but what keys need before they are searched for."""
    for (kernel, given), is_key in zip(closings(method), (True, False), strict=True):
        report = compiled(kernel, given)
        assert report.registers <= 128 and report.spilled <= (STACK if is_key else 0)
        assert report.instructions["HMMA"] > 0 and report.shared <= 48 * 1024


def test_pages_of_a_side_compile_without_spills():
    (_, keys), (kernel, values) = closings("tasq:bits=2,values=fold")
    assert keys["SEEN"] == values["SEEN"] == 128 and (keys["H"], values["H"]) == (2, 0)  # who writes to the windows
    report = compiled(kernel, values)
    assert report.registers <= 128 and report.spilled == 0


def test_rotated_groups_compile_without_spills():
    _, (kernel, values) = closings("nova", torch.float16)
    assert compiled(kernel, values).spilled == 0


# ---- on a GPU --------------------------------------------------------------------------------------------------------

GROUPS = (
    "tasq",
    "tasq:mean=false",
    "tasq:refit=false",
    "tasq:bits=2",
    "tasq:bits=4",
    "tasq:bits=2,values=affine",
    "tasq:bits=2,values=fold",
    "tasq:bits=2,values=fold,v_bits=1",
    "nova",
    "nova:values=codes",
    "nova:values=fold",
)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", STORES)
def test_storing_on_a_gpu(name):
    case(**STORES[name] | GPU)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    "method", [*GROUPS, "kivi + tasq", "tasq + kivi", "fold + tasq", "fold:codebook=true + tasq", "vqllm + fold"]
)
def test_storing_sides_on_a_gpu(method, dtype):
    """The shape of a model's heads, prompts of several pages, and steps of all lengths."""
    case(method, (1, 700, 131, 256, 33), most=300, head_dim=128, heads=3, learned={}, **GPU | {"dtype": dtype})


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("method", ["tasq", "tasq:bits=2,values=fold", "nova:values=codes"])
def test_a_store_is_replayed_on_a_gpu(method):
    """A graph of a step, replayed with other tokens and lengths, leaves the bytes that steps leave without one."""
    made = layer(method, dim=128, device="cuda", dtype=torch.float16)
    found = []
    for replays in (False, True):
        server = Server(made.method, (320, 150), head_dim=128, layer=made, device="cuda", dtype=torch.float16)
        space = workspace(server)
        paged.ready(*server.formats, server.maps, torch.device("cuda"))
        call = server.step([300, 96])
        work.prepare(call.step, space, call.seen)
        storing.store(call, space)
        graph, held = None, None
        for counts in ([1, 1], *[[1, 3]] * 17, [1, 1], [1, 1]):
            call = server.step(counts)
            if not replays:
                work.prepare(call.step, space, call.seen)
                storing.store(call, space)
                continue
            if graph is None:
                held = Held(call)
                graph = held.captured(space)
            held.fill(call)
            graph.replay()
        torch.cuda.synchronize()
        found.append([server.stored(i, side) for i in (0, 1) for side in (0, 1)])
    for plain, replayed in zip(*found, strict=True):
        assert all(torch.equal(plain[n].view(torch.uint8), replayed[n].view(torch.uint8)) for n in plain)


class Held:
    """A step's tensors where a graph reads them, with room for four tokens a sequence."""

    def __init__(self, call):
        step = call.step
        self.step = replace(
            step,
            **{n: getattr(step, n).clone() for n in ("query_start", "seq_lens", "table", "window_table")},
            max_query_len=4,
        )
        self.new = [torch.zeros(4 * step.seqs, *t.shape[1:], dtype=t.dtype, device=t.device) for t in self._new(call)]
        self.call = replace(call, step=self.step, query=None, new_keys=self.new[0], new_values=self.new[1])

    def _new(self, call):
        return call.new_keys, call.new_values

    def fill(self, call):
        for name in ("query_start", "seq_lens", "table", "window_table"):
            getattr(self.step, name).copy_(getattr(call.step, name))
        for to, some in zip(self.new, self._new(call), strict=True):
            to[: len(some)].copy_(some)

    def captured(self, space):
        """A graph of the step; padding alone is stored meanwhile."""
        self.step.seq_lens.zero_()
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            work.prepare(self.step, space, self.call.seen)
            storing.store(self.call, space)
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work.prepare(self.step, space, self.call.seen)
            storing.store(self.call, space)
        return graph


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("method", GROUPS)
@pytest.mark.parametrize("heads", [1, 8])
def test_the_check_of_groups_on_a_gpu(method, heads):
    """What a server runs before it starts."""
    made, device = layer(method, dim=128, heads=heads, dtype=torch.bfloat16), torch.device("cuda")
    given = made.maps(device)
    maps = paged.Maps.of(heads, given) if given else None
    paged.ready(*made.formats, given, device)
    assert paged.why_not_stored(*made.formats, maps=maps) is None
    assert check.self_test.__wrapped__(*made.formats, device, maps=maps) is None
