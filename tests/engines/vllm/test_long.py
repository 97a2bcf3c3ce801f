"""A prompt's chunk from unpacked pages, against the float32 reference; Torch's flash attention stands in for vLLM's."""

import pytest
import torch

from kvfold import methods
from kvfold.engines.vllm.settings import layer_spec, stored
from kvfold.kernels import paged
from kvfold.kernels.paged import PagedCall, PagedStep, long
from kvfold.kernels.paged.long import TORCH, Chunk, attend_chunk

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 64, 16


class Server:
    """Pages and windows of some sequences; blocks that no window needs any more are null, as a server has them."""

    def __init__(self, spec, seqs=2, tokens=1024):
        self.found = stored(methods.get(spec), layer_spec(0, 1, HEADS, KV_HEADS, DIM, torch.float32, False))
        self.method = self.found.method
        pages = tokens // 128
        region = torch.full((1 + seqs * pages, KV_HEADS, self.found.page_bytes), 255, dtype=torch.uint8)
        self.keys, self.values = self.found.layout.views(region)
        self.table = (torch.arange(seqs * pages, dtype=torch.int32) + 1).view(seqs, pages)
        self.window = torch.full((2, 1 + seqs * tokens // WINDOW, WINDOW, KV_HEADS, DIM), float("nan"))
        self.window_table = (torch.arange(seqs * tokens // WINDOW, dtype=torch.int32) + 1).view(seqs, -1)
        self.length = [0] * seqs

    def call(self, counts, **given):
        after = [n + c for n, c in zip(self.length, counts, strict=True)]
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        step = PagedStep(
            starts, torch.tensor(after, dtype=torch.int32), self.table, self.window_table, max(counts), self.method.recent,
            self.method.sink,
        )  # fmt: skip
        return PagedCall(
            step, *self.found.formats, self.keys, self.values, self.window[0], self.window[1], DIM**-0.5, **given
        )

    def step(self, *counts):
        """Store random tokens, then attend: (the reference's output, the call)."""
        total = sum(counts)
        query, keys, values = (torch.randn(total, h, DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
        call = self.call(counts, query=query, new_keys=keys, new_values=values)
        paged.store(call)
        out = paged.attend(call, torch.empty(total, HEADS, DIM))
        chunks = [Chunk(row, int(call.step.query_start[row]), n, self.length[row]) for row, n in enumerate(counts) if n]
        self.length = [n + c for n, c in zip(self.length, counts, strict=True)]
        return out, call, chunks


@pytest.mark.parametrize("piece", [256, 8192])
@pytest.mark.parametrize("spec", ["fold", "fold:sink=0", "kivi:recent=40", "innerq", "turboquant:sink=64"])
def test_a_chunk_reads_what_the_reference_reads(spec, piece, monkeypatch):
    monkeypatch.setattr(long, "PIECE", piece)
    torch.manual_seed(0)
    server = Server(spec)
    for counts in ((20, 130), (57, 1), (200, 300), (3, 17), (400, 0), (100, 250)):
        expected, call, chunks = server.step(*counts)
        out = torch.full_like(expected, float("nan"))
        for chunk in chunks:
            attend_chunk(call, chunk, out, TORCH)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_a_prefix_that_has_no_window_is_read_packed():
    """After a hit the blocks of recent tokens are null, and the sink's may be."""
    torch.manual_seed(1)
    for sink_is_there in (True, False):
        server = Server("fold", seqs=1)
        server.step(256)
        with_window = server.call((5,))
        server.window_table = server.window_table.clone()
        server.window_table[0, 2 if sink_is_there else 0 : 16] = 0
        expected, call, chunks = server.step(40)
        assert call.step.host[0].packed == 256 and with_window.step.host[0].packed == 160
        assert call.step.host[0].sink == (32 if sink_is_there else 0)
        out = torch.full_like(expected, float("nan"))
        attend_chunk(call, chunks[0], out, TORCH)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
