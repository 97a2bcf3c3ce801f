"""Pages that somebody else allocates: the float32 reference against formats and plain attention."""

from dataclasses import replace

import pytest
import torch

from books_case import layer
from kvfold.errors import KVFoldError
from kvfold.kernels import paged
from paged_case import Server, cuts, formats_of


def error(got, want):
    return float((got.cpu() - want).norm() / want.norm())


def run(server, most=70):
    """Grow the sequences; every step's attention is right."""
    draw = torch.Generator().manual_seed(1)
    for counts in cuts(server.lengths, most, draw):
        call = server.step(counts)
        paged.store(call)
        if max(counts) == 1:  # a decode step reads its tokens from the windows
            call = replace(call, new_keys=None, new_values=None)
        out = paged.attend(call, torch.full_like(call.query, float("nan"), dtype=torch.float32))
        assert error(out, server.expected()) < 1e-5


def same_bytes(server):
    for i in range(len(server.lengths)):
        for side, (form, source) in enumerate(zip(server.formats, (server.keys, server.values), strict=True)):
            closed = server.closed(i)
            if not closed:
                continue
            want, got = server.encoded(i, form, source, closed), server.stored(i, side)
            for name, t in want.items():
                assert torch.equal(got[name][:, :, : t.shape[2]].view(torch.uint8), t.view(torch.uint8)), name


METHODS = ["fold", "kivi", "innerq", "turboquant", "k=qjl+v=kivi", "gear"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("windows", [(96, 32), (128, 0)])
def test_attention_and_bytes_of_random_cuts(method, windows):
    server = Server(method, (1, 300, 131, 33, 520), recent=windows[0], sink=windows[1])
    run(server)
    same_bytes(server)


@pytest.mark.parametrize("method", ["vqllm:bits=1", "commvq:bits=1,levels=16"])
def test_methods_with_codebooks_of_random_cuts(method):
    """Keys before RoPE, and values that a head's codebook makes of sums of bits."""
    server = Server(method, (1, 300, 33), layer=layer(method))
    run(server)
    same_bytes(server)


@pytest.mark.parametrize(
    "method, recent, sink",
    [("kivi", 0, 0), ("fold:recent=0", 0, 0), ("fold:recent=32", 32, 32), ("kivi:group=64", 70, 64)],
)
def test_other_windows_and_blocks(method, recent, sink):
    server = Server(method, (1, 210, 131), recent=recent, sink=sink)
    run(server, most=40)
    same_bytes(server)


def test_one_token_at_a_time():
    server = Server("fold", (300, 200), seed=3)
    run(server, most=1)
    same_bytes(server)


@pytest.mark.parametrize("sink", [0, 32])
def test_a_shared_prefix_is_read_packed(sink):
    """Another sequence's pages, and no window blocks for them."""
    server = Server("fold", (256, 300), sink=sink)
    server.step([256, 0])
    paged.store(server.call)
    server.keys[1][:256], server.values[1][:256] = server.keys[0], server.values[0]
    server.table[1, :2] = server.table[0, :2]
    server.window_table[1, :16] = 0
    server.now[1] = 256
    for count in (1, 3, 40):
        call = server.step([0, count])
        paged.store(call)
        out = paged.attend(call, torch.empty_like(call.query))
        n0 = server.now[1] - count
        sides = []
        for form, source in zip(server.formats, (server.keys, server.values), strict=True):
            x = source[1][: server.now[1]].transpose(0, 1).clone()
            x[:, :256] = form.decode(server.encoded(1, form, source, 256))[0]
            sides.append(x)
        q = call.query.transpose(0, 1).unflatten(0, (server.heads, -1))
        scores = q @ sides[0].unsqueeze(1).mT * call.scale + torch.full((count, n0 + count), -torch.inf).triu(n0 + 1)
        want = (scores.softmax(-1) @ sides[1].unsqueeze(1)).flatten(0, 1).transpose(0, 1)
        assert error(out, want) < 1e-5


def test_padded_rows_are_not_looked_at():
    server = Server("kivi", (40,), spare_rows=3)
    call = server.step([40])
    assert call.step.seq_lens.tolist() == [40, 0, 0, 0]
    padded = torch.cat((call.query, call.query[:3] * torch.nan))
    call = replace(call, query=padded)
    paged.store(call)
    out = paged.attend(call, torch.full_like(padded, torch.nan))
    assert out[40:].isnan().all()
    assert error(out[:40], server.expected()) < 1e-5


def test_unpack_is_what_attention_sees():
    server = Server("fold", (300,), dtype=torch.float16)
    call = server.step([300])
    paged.store(call)
    keys, values = paged.unpack(call, 0, 64, 200)
    for got, form, source in zip((keys, values), server.formats, (server.keys, server.values), strict=True):
        want = form.decode(server.encoded(0, form, source, 256))[0, :, 64:200].transpose(0, 1)
        assert got.dtype == torch.float16 and torch.equal(got, want.half())


# ---- calls of many tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fold", "gear"])
@pytest.mark.parametrize("piece", [128, 8192])
def test_long_calls_are_unpacked_in_pieces(method, piece, monkeypatch):
    monkeypatch.setattr(paged.long, "PIECE", piece)
    server = Server(method, (700, 300, 90, 1), per_head=3)
    for counts in ([500, 0, 30, 1], [150, 299, 60, 0], [50, 1, 0, 0]):
        call = server.step(counts)
        paged.store(call)
        call = replace(call, sinks=torch.linspace(-1, 2, 6))
        got, want = (torch.full_like(call.query, torch.nan) for _ in "gw")
        paged.long.attend(call, got, None)
        assert error(got, paged.attend(call, want)) < 1e-5


@pytest.mark.parametrize("method", ["vqllm:bits=1", "commvq:bits=1,levels=16"])
def test_long_calls_of_methods_with_codebooks(method, monkeypatch):
    monkeypatch.setattr(paged.long, "PIECE", 128)
    server = Server(method, (400, 60), per_head=3, layer=layer(method, per_head=3))
    for counts in ([300, 30], [100, 30]):
        call = server.step(counts)
        paged.store(call)
        got, want = (torch.full_like(call.query, torch.nan) for _ in "gw")
        paged.long.attend(call, got, None)
        assert error(got, paged.attend(call, want)) < 1e-5


def test_the_platforms_attention_is_called_with_bounded_pieces(monkeypatch):
    monkeypatch.setattr(paged.long, "PIECE", 256)
    server = Server("kivi", (900,), sink=0)
    paged.store(server.step([700]))
    call = server.step([200])
    paged.store(call)
    seen = []

    def flash(query, keys, values, scale, causal):
        seen.append((len(keys), causal))
        return paged.long.torch_flash(query, keys, values, scale, causal)

    out = torch.empty_like(call.query)
    paged.long.attend(call, out, None, paged.Flash(flash, paged.long.merged))
    assert seen == [(200, True), (256, False), (256, False), (64 + 124, False)]  # the last with what is raw
    assert error(out, server.expected()) < 1e-5


def test_lengths_on_the_host_spare_asking_the_device():
    server = Server("kivi", (100, 40))
    call = server.step([100, 30])
    step = replace(
        call.step, query_start=None, seq_lens=None, host_query_start=[0, 100, 130, 130], host_seq_lens=[100, 30, 0]
    )
    assert [(row.before, row.after) for row in step.host] == [(0, 100), (0, 30), (0, 0)]


# ---- the layout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, head_dim",
    [*((m, d) for m in METHODS for d in (64, 128)), ("fold", 80), ("turboquant", 80), ("kivi:group=16", 80)],
)
def test_fields_lie_in_a_region_without_touching(method, head_dim):
    forms = formats_of(method, head_dim)
    layout = paged.PageLayout(*forms)
    region = torch.zeros(3, 2, layout.bytes + 32, dtype=torch.uint8)
    sides = layout.views(region[:, :, : layout.bytes])
    stored = 0
    for form, side in zip(forms, sides, strict=True):
        for name, t in side.items():
            assert t.shape[:2] == (3, 2) and t.data_ptr() % 16 == 0
            before = int(region.count_nonzero())
            t.view(torch.uint8).fill_(1)
            assert int(region.count_nonzero()) == before + t.numel() * t.element_size(), name
            stored += t[0, 0].numel() * t.element_size()
        form.decode({n: t[:1] for n, t in side.items()})
    assert layout.bytes % 128 == 0 and stored <= layout.bytes < stored + 16 * 8 + 128


def test_regions_that_do_not_fit_are_refused():
    layout = paged.PageLayout(*formats_of("kivi", 64))
    for region in (
        torch.zeros(3, 2, layout.bytes - 1, dtype=torch.uint8),
        torch.zeros(3, 2, layout.bytes, dtype=torch.int8),
        torch.zeros(3, layout.bytes, 2, dtype=torch.uint8).transpose(1, 2),
        torch.zeros(3, 2, layout.bytes + 8, dtype=torch.uint8)[:, :, 8:],
    ):
        with pytest.raises(ValueError, match="region"):
            layout.views(region)


@pytest.mark.parametrize(
    "method, recent, sink, why",
    [
        ("fold", 95, 0, "keys: recent=95: statistics of 128 tokens; allowed: recent from 96 on"),
        ("fold", 96, 128, "keys: sink=128"),
        ("innerq:paper=true", 128, 0, "keys: statistics of all tokens"),
        ("kivi:group=256", 128, 0, "blocks of 256 tokens; allowed: those that divide 128"),
    ],
)
def test_what_is_refused(method, recent, sink, why):
    forms = formats_of(method, 256)
    assert why in paged.unsupported(*forms, recent, sink)


@pytest.mark.parametrize("options", [{"sink": 16}, {"sink": -32}, {"recent": -1}, {"window_block": 48}])
def test_steps_that_are_refused(options):
    nothing = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(KVFoldError, match=r"(sink|window_block)="):
        paged.PagedStep(nothing, nothing, nothing, nothing, 1, **{"recent": 96} | options)
