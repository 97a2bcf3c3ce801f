"""Kernels over pages against the float32 reference. ``python paged_kernels_case.py NAME...`` runs cases by name, under Triton's
interpreter where TRITON_INTERPRET is set."""

import sys
from dataclasses import replace

import torch

from books_case import layer
from helpers import multiprocessors
from interpreter import quicken
from kvfold.formats import Projected
from kvfold.kernels import paged
from kvfold.kernels.paged import attention, check, work
from kvfold.kernels.paged import books as storing_of_books
from kvfold.kernels.paged.storing import store
from kvfold.methods import LayerSpec, get
from kvfold.methods.base import Observation
from paged_case import Server, cuts, formats_of

SHORT = 4
"""Tokens of the calls that kernels attend to, in these cases."""


def workspace(server, **options):
    most = {"max_seqs": server.rows, "max_tokens": 4096, "max_len": max(server.lengths), "short": SHORT}
    sizes = {"num_heads": server.heads * server.per_head, "head_dim": server.dim, "device": server.device}
    return work.Workspace.make(**most, **sizes, **options)


def with_layer(method, learned, device, options):
    """A method's string, or the method and its layer with an artefact of random tables (:mod:`books_case`)."""
    if learned is None:
        return method, options
    sizes = {
        "dim": options.get("head_dim", 64),
        "per_head": options.get("per_head", 2),
        "heads": options.get("heads", 2),
    }
    made = layer(method, device=str(device), dtype=options.get("dtype", torch.float32), **sizes, **learned)
    return made.method, options | {"layer": made}


def storing(method, lengths=(1, 150, 33), most=70, device="cpu", fragments=True, learned=None, **options):
    """Pages after random steps: bytes as the formats encode them, up to ties; the same after other steps."""
    found = []
    method, options = with_layer(method, learned, device, options)
    for seed in (1, 2):
        server = Server(method, lengths, fragments=fragments, device=device, **options)
        space = workspace(server)
        if device == "cpu" and seed == 2:  # programs enough for blocks of a page to be shared out
            space = replace(space, processors=4)
        for counts in cuts(lengths, most, torch.Generator().manual_seed(seed)):
            call = server.step(counts)
            work.prepare(call.step, space, call.seen)
            store(call, space)
            windows = check_windows(server)
            assert windows, "windows"
        found.append(server)
    for i in range(len(lengths)):
        if not found[0].closed(i):
            continue
        for side, source in enumerate(("keys", "values")):
            form = found[0].formats[side]
            want = found[0].encoded(i, form, getattr(found[0], source), found[0].closed(i))
            a, b = ({n: t[:, :, : want[n].shape[2]] for n, t in s.stored(i, side).items()} for s in found)
            assert all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a), (i, source)
            x, y = form.decode(a), form.decode(want)
            error = float((x - y).norm() / y.norm())
            assert error < 0.02 or equally_near(found[0], i, side, a, want), (i, source, error)


def equally_near(server, i, side, got, want):
    """Whether codes are searched, so that a few of a sequence's may differ; those have to be as near to rounding."""
    form = server.formats[side]
    if not storing_of_books.searches(form):
        return False
    closed = server.closed(i)
    x = (server.keys, server.values)[side][i][:closed].float().transpose(0, 1).unsqueeze(0)
    if side == 0 and "rope" in server.on_cpu:
        x = server.on_cpu["rope"].unrotate(x, torch.arange(closed).view(1, 1, -1))
    if isinstance(form, Projected):  # codes are compared where the map has taken keys
        x = (x - form.maps.mean.unsqueeze(-2)) @ form.maps.apply
        form = form.inner
    missed, least = (float((form.decode(fields) - x).square().sum()) for fields in (got, want))
    same = float((got["codes"] == want["codes"]).float().mean())
    assert abs(missed - least) < 1e-3 * least, (missed, least)
    assert same > 0.995, same
    return True


def check_windows(server):
    """Whether the windows hold what is read of them after the step."""
    for i, n in enumerate(server.now):
        low = max(n - server.recent, 0) // server.block * server.block
        for at in (*range(min(server.sink, n)), *range(low, n)):
            block = int(server.window_table[i, at // 16])
            for window, source in zip(server.windows, (server.keys, server.values), strict=True):
                if not torch.equal(window[block, at % 16].cpu(), source[i][at]):
                    return False
    return True


def attending(
    method,
    lengths=(1, 200, 131, 33),
    steps=4,
    device="cpu",
    limit=2e-3,
    start=None,
    short=SHORT,
    sinks=False,
    learned=None,
    processors=None,
    **options,
):
    """Attention of a few short calls, the first in place, against the float32 reference of the same bytes.

    ``processors``: as on a device with so many, with pieces that follow the batch.
    """
    method, options = with_layer(method, learned, device, options)
    server = Server(method, [n + steps * short for n in lengths], device=device, spare_rows=2, **options)
    if processors:
        space = replace(workspace(server, num_kv_heads=server.heads), processors=processors)
    else:
        space = workspace(server, piece_pages=1)
    paged.store(server.step(list(lengths)))
    draw = torch.Generator().manual_seed(5)
    for i in range(steps):
        counts = [1] * len(lengths) if i == 0 else torch.randint(0, short + 1, (len(lengths),), generator=draw).tolist()
        if i == 1:
            counts[0] = 0  # a row of padding between others
        call = server.step(counts)
        paged.store(call)
        if i % 2 == 0:
            call = replace(call, new_keys=None, new_values=None)
        if sinks:
            call = replace(call, sinks=torch.randn(call.query.shape[1], generator=draw).to(device))
        work.prepare(call.step, space, call.seen)
        space.out.fill_(float("nan"))
        got = attention.attend(call, torch.full_like(call.query, float("nan"), dtype=torch.float32), space)
        want = paged.attend(call, torch.empty_like(got))
        error = float((got - want).norm() / want.norm())
        assert error < limit, (i, error)
        assert not space.counters.any()
        rows = server.expected() if not sinks else want.cpu()
        missed = float((want.cpu() - rows).norm() / rows.norm())
        assert missed < 1e-3, (i, missed)


STORES = {
    "vqllm": {"method": "vqllm:bits=1", "learned": {"rotary": 32}, "lengths": (1, 70), "most": 40, "heads": 1},
    "commvq": {"method": "commvq:bits=1,levels=16", "learned": {}, "lengths": (1, 70), "most": 40, "heads": 1},
    "commvq-network": {
        "method": "commvq:levels=2,passes=0",
        "learned": {"network": True},
        "lengths": (40,),
        "heads": 1,
    },
    "tasq": {"method": "tasq", "learned": {"rotary": 32}, "lengths": (1, 70), "most": 40},
    "tasq-2": {"method": "tasq:bits=2,mean=false", "learned": {}, "lengths": (40,), "heads": 1},
    "tasq-plain-scales": {"method": "tasq:refit=false", "learned": {}, "lengths": (40,), "heads": 1},
    "tasq-fold": {"method": "tasq:bits=2,values=fold", "learned": {}, "lengths": (130, 33), "heads": 1},
    "tasq-fold-1": {"method": "tasq:bits=2,values=fold,v_bits=1", "learned": {}, "lengths": (140,), "heads": 1},
    "tasq-affine": {"method": "tasq:bits=2,values=affine", "learned": {}, "lengths": (40,), "heads": 1},
    "nova": {"method": "nova", "learned": {}, "lengths": (1, 70), "most": 40},
    "nova-codes": {"method": "nova:values=codes", "learned": {}, "lengths": (40,), "heads": 1},
    "nova-fold": {"method": "nova:values=fold", "learned": {}, "lengths": (140,), "heads": 1},
    "affine-and-groups": {"method": "kivi + tasq", "learned": {}, "lengths": (40,), "heads": 1},
    "groups-and-levels": {"method": "tasq:bits=4 + fold", "learned": {}, "lengths": (140,), "heads": 1},
    "vectors-and-affine": {"method": "vqllm:bits=1 + kivi", "learned": {}, "lengths": (40,), "heads": 1},
    "fold": {"method": "fold", "lengths": (1, 150), "heads": 1},
    "fold-d128": {"method": "fold", "sink": 0, "head_dim": 128, "lengths": (133,), "dtype": torch.float16, "heads": 1},
    "fold-no-window": {"method": "fold:recent=0", "lengths": (70, 40), "sink": 0, "heads": 1},
    "fold-codebook": {"method": "fold:k_bits=1,v_bits=2,codebook=true", "lengths": (1, 150), "heads": 1},
    "kivi": {"method": "kivi", "lengths": (1, 70, 33), "heads": 1},
    "kivi-64": {"method": "kivi:group=64", "sink": 64, "lengths": (130, 70), "heads": 1},
    "innerq": {"method": "innerq", "lengths": (140,), "heads": 1},
    "turboquant": {"method": "turboquant:bits=3", "lengths": (140,), "heads": 1},
    "sketch": {"method": "k=qjl+v=turboquant", "lengths": (140,), "heads": 1},
    "fold-plain": {"method": "fold", "lengths": (140,), "heads": 1, "head_dim": 96, "fragments": False},
    "turboquant-plain": {"method": "turboquant:bits=3", "lengths": (140,), "heads": 1, "fragments": False},
}

ATTENDS = {
    "vqllm": {"method": "vqllm:bits=1", "learned": {}, "lengths": (1, 170), "steps": 2},
    "commvq": {"method": "commvq:bits=1,levels=16,passes=0", "learned": {}, "lengths": (1, 170), "steps": 2},
    "commvq-96": {
        "method": "commvq:levels=16,passes=0",
        "learned": {"rotary": 32},
        "head_dim": 96,
        "lengths": (300, 20),
    },
    "tasq": {"method": "tasq", "learned": {}, "lengths": (1, 170), "steps": 2},
    "nova": {"method": "nova", "learned": {}, "lengths": (1, 170), "steps": 2},
    "nova-fold": {"method": "nova:values=fold", "learned": {}, "lengths": (1, 300), "per_head": 4, "steps": 2},
    "turboquant": {"method": "turboquant:bits=3"},
    "fold-d96": {"method": "fold", "head_dim": 96, "lengths": (300, 20)},
    "kivi-sinks": {"method": "kivi", "sinks": True, "per_head": 4},
    "gear": {"method": "gear", "lengths": (270, 1)},
    "qjl": {"method": "k=qjl+v=turboquant", "lengths": (150, 260), "sink": 0},
    "zipcache": {"method": "zipcache:group=32", "lengths": (150, 33)},
    "innerq-fragments": {"method": "innerq", "lengths": (270, 33), "fragments": True},
    "qjl-fragments": {"method": "qjl", "lengths": (150, 260), "fragments": True},
    "turboquant-fragments": {"method": "turboquant:bits=3", "lengths": (150, 33), "fragments": True},
}


def lists(device="cpu"):
    """A step's lists are those that its definition says, also where windows are missing or the workspace is full."""
    server = Server("fold", (3000, 700, 129, 1, 40), device=device)
    server.step([2900, 650, 128, 0, 3])
    call = server.step([100, 1, 1, 1, 37])
    server.window_table[1, : 650 // 16] = 0  # a shared prefix, without the sink
    step = replace(call.step, window_table=server.window_table.to(device), max_query_len=100)
    fixed = {"piece_pages": 1}
    for options in (fixed, fixed | {"cached_tokens": 800}, {"num_kv_heads": server.heads}):
        space = workspace(server, **options)
        work.prepare(step, space, call.seen)
        rows, seqs = step.host, step.seqs
        assert space.packed[:seqs].tolist() == [row.packed for row in rows]
        assert space.sink[:seqs].tolist() == [row.sink for row in rows]
        assert space.before[:seqs].tolist() == [row.before for row in rows]
        count = int(space.items[seqs])
        found, last = space.item_list[:count].tolist(), {}
        for seq, first, stop, packed, sink, start, tokens, _ in found:
            row = rows[seq]
            assert (packed, sink, start, tokens) == (row.packed, row.sink, row.start, row.count)
            assert first == last.get(seq, 0) and first < stop <= first + 64
            last[seq] = stop
        assert last == {row.index: -(-row.packed // 128) for row in rows if row.packed > row.sink}
        assert [item[0] for item in found] == sorted(item[0] for item in found)
        assert count <= space.item_list.shape[0]
        closes = sorted({(row.index, at // 128) for row in rows for at in row.due(call.seen)})
        assert space.close_list[: len(closes)].tolist() == [list(c) for c in closes]
        assert int(space.closes[seqs]) == len(closes) == 1


def filling(device="cpu"):
    """Pieces and parts of raw tokens follow the batch where they may, and a sequence's own length where they are to."""

    def cut(lengths, parts=False, **options):
        count, most = len(lengths), max(lengths)
        sizes = {"max_seqs": count, "max_tokens": count, "max_len": most, "num_heads": 32, "head_dim": 128}
        right, work.device_info = work.device_info, multiprocessors(132)
        try:
            space = work.Workspace.make(**sizes, device=device, **options)
        finally:
            work.device_info = right
        numbers = torch.arange(count + 1, dtype=torch.int32, device=device)
        lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        tables = (torch.ones(count, -(-most // size) + 1, dtype=torch.int32, device=device) for size in (128, 16))
        step = paged.PagedStep(numbers, lens, *tables, 1, 96, 32)
        if parts:
            return work.raw_parts(step, space)
        work.prepare(step, space, 128)
        return space.items[1 : count + 1].diff(prepend=space.items[:1]).tolist()

    length = 32768 + 97
    assert cut([length] * 16, num_kv_heads=8) == [3] * 16  # 384 of 396 programs
    assert cut([length] * 8, num_kv_heads=8) == [6] * 8
    assert cut([length], num_kv_heads=8)[0] >= 24
    assert cut([length]) == cut([length, 300])[:1] == [11]
    assert cut([8192] * 64, num_kv_heads=8) == [2] * 64  # 1,024 pieces: raw tokens for those who have two, not three
    assert [cut([300] * count, parts=True, num_kv_heads=8) for count in (8, 16, 24, 64)] == [3, 3, 2, 1]
    assert cut([300] * 64, parts=True) == cut([300], parts=True) == 3
    mixed = cut([131072, *[2048] * 15], num_kv_heads=8)
    assert mixed[0] >= 16 and mixed[0] > max(mixed[1:]), mixed


def mixed(method="turboquant", device="cpu", dtype=torch.float32, **options):
    """A prompt's chunk beside sequences that decode: some rows by kernels, some unpacked."""
    server = Server(method, (240, 200, 40, 300), device=device, dtype=dtype, **options)
    paged.store(server.step([200, 120, 39, 200]))
    call = server.step([1, 80, 1, 3])
    paged.store(call)
    space = workspace(server, piece_pages=1)
    paged.prepare(call.step, space, call.seen)
    got, want = (torch.full_like(call.query, float("nan"), dtype=torch.float32) for _ in "gw")
    paged.attend(call, got, space)
    paged.attend(call, want)
    assert float((got - want).norm() / want.norm()) < 2e-3


def checks():
    """The test that a device's kernels have to pass, and that it sees wrong bytes."""
    cpu = torch.device("cpu")
    forms = formats_of("turboquant:bits=3", 64)
    assert check.self_test(*forms, cpu, torch.float32) is None
    right, check.storing.store = check.storing.store, lambda call, space: None
    try:
        assert "stored in pages" in check.self_test.__wrapped__(*forms, cpu, torch.float32)
    finally:
        check.storing.store = right
    right, check.attention.attend = check.attention.attend, lambda call, out, space: out
    try:
        assert "attention over pages" in check.self_test.__wrapped__(*forms, cpu, torch.float32)
    finally:
        check.attention.attend = right


def books():
    """The same test with what is learned; wrong tables are seen."""
    cpu = torch.device("cpu")
    check.LENGTHS = (140, 40)  # this process runs nothing else of it
    for method in ("vqllm:bits=1,vector=16,codes=16", "commvq:bits=1,levels=4,passes=0,flips=2"):
        made = layer(method, heads=1)
        maps = paged.Maps.of(1, made.maps(cpu))
        paged.ready(*made.formats, maps.given, cpu)
        assert check.self_test(*made.formats, cpu, torch.float32, maps=maps) is None
    wrong = replace(maps.given["bits"], tables=tuple(t.flip(-1) for t in maps.given["bits"].tables))
    maps = paged.Maps.of(1, maps.given | {"bits": wrong})
    assert "values stored in pages" in check.self_test.__wrapped__(*made.formats, cpu, torch.float32, maps=maps)


def groups():
    """The same with codes of groups, keys before RoPE; a wrong codebook is seen."""
    cpu = torch.device("cpu")
    check.LENGTHS = (140, 40)  # this process runs nothing else of it
    for method in ("nova", "tasq", "tasq:bits=2,values=fold"):
        made = layer(method, heads=1)
        maps = paged.Maps.of(1, made.maps(cpu)) if made.maps(cpu) else None
        assert check.self_test(*made.formats, cpu, torch.float32, maps=maps) is None
    own = storing_of_books.tables_of

    def wrong(form, bits, device):
        tables, constants = own(form, bits, device)
        return (tables[0].flip(1), *tables[1:]) if form.centred else tables, constants

    storing_of_books.tables_of = wrong
    try:
        assert "keys stored in pages" in check.self_test.__wrapped__(*made.formats, cpu, torch.float32, maps=maps)
    finally:
        storing_of_books.tables_of = own


def steering(head_dim=64, heads=1, device="cpu", seed=3):
    """SQuat's formats, and what moves its keys."""
    spec = LayerSpec(0, 1, 2 * heads, heads, head_dim, fragments=True)
    method = get("squat")
    queries = torch.randn(1, 2 * heads, 64, head_dim, generator=torch.Generator().manual_seed(seed)) + 1
    state = method.observe(Observation(queries.to(device), torch.arange(64, device=device).view(1, -1)), spec)

    def encode(x, positions, page):
        return method.encode_keys(x, state, spec, positions, False, page)

    return formats_of(method, head_dim, heads, fragments=True), paged.Steering(
        head_dim // 2, state["update"][0], encode
    )


def check_of_steering(device="cpu"):
    """The test that a device's kernels have to pass stores with a method's own update, and sees another one."""
    device = torch.device(device)
    forms, how = steering(device=device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    assert check.self_test.__wrapped__(*forms, device, dtype, how) is None
    other = replace(how, update=how.update.mT.contiguous())
    assert "keys stored in pages" in check.self_test.__wrapped__(*forms, device, dtype, other)


def steered(device="cpu"):
    """SQuat's update goes the same way in the kernel and in the method's own encoding."""
    found = []
    for by_kernel in (True, False):
        draw = torch.Generator().manual_seed(3)
        server = Server("squat", (70, 33), heads=1, fragments=True, device=device)
        spec = LayerSpec(0, 1, 2, 1, server.dim)
        queries = torch.randn(1, 2, 64, server.dim, generator=draw).to(device)
        state = server.method.observe(Observation(queries, torch.arange(64, device=device).view(1, -1)), spec)

        def encode(x, positions, page, method=server.method, state=state, spec=spec):
            return method.encode_keys(x, state, spec, positions, False, page)

        space = workspace(server)
        for counts in ([40, 1], [30, 32]):
            call = replace(server.step(counts), update=state["update"][0], encode_keys=encode)
            if by_kernel:
                assert paged.why_not_stored(*server.formats, call) is None
                paged.prepare(call.step, space, call.seen)
            paged.store(call, space if by_kernel else None)
        form = server.formats[0]
        found.append([form.decode(form.take(server.stored(i, 0), server.closed(i) // server.block)) for i in range(2)])
    for got, want in zip(*found, strict=True):
        assert float((got - want).norm() / want.norm()) < 0.02


def following(server):
    """The server, whose pages follow their own queries as SQuat's do."""
    spec, method = LayerSpec(0, 1, server.heads, server.heads, server.dim, fragments=True), server.method

    def encode(keys, positions, queries):
        heads = replace(spec, num_heads=keys.shape[1], num_kv_heads=keys.shape[1])
        state = method.observe(Observation(queries, positions[0]), heads)
        return method.encode_keys(keys, state, heads, positions, False, None)

    server.following = paged.Following(server.dim // 2, method.rank, method.lam, encode)
    return server


def followed(by_kernel, every, lengths=(150, 33), device="cpu", **options):
    """A server whose sequences have grown by up to ``every`` tokens at a time."""
    server = following(Server("squat", lengths, fragments=True, device=device, **options))
    space = workspace(server, update_size=server.heads * (server.dim // 2) ** 2)
    while any(left := [n - now for n, now in zip(lengths, server.now, strict=True)]):
        call = server.step([min(every, n) for n in left])
        if by_kernel:
            assert paged.why_not_stored(*server.formats, call) is None
            paged.prepare(call.step, space, call.seen)
        paged.store(call, space if by_kernel else None)
    return server


def own_pages(server, i):
    """Keys of a sequence's whole pages as SQuat makes them of each page and the queries that count, float32."""
    method, form, n = server.method, server.formats[0], server.now[i] // 128 * 128
    keys, queries = (x[i][:n].float() for x in (server.keys, server.queries))
    grouped = queries.unflatten(1, (server.heads, -1))
    chosen = torch.stack([grouped[t, :, t % 16 % server.per_head] for t in range(n)], 1)  # [kv_heads, tokens, d]
    spec = LayerSpec(0, 1, server.heads, server.heads, server.dim, fragments=True)
    pages = []
    for first in range(0, n, 128):
        at = torch.arange(first, first + 128)
        state = method.observe(Observation(chosen[None, :, first : first + 128], at[None]), spec)
        page = keys[first : first + 128].transpose(0, 1)[None]
        pages.append(form.decode(method.encode_keys(page, state, spec, at.view(1, 1, -1), False, None)))
    plain = form.decode(form.encode(keys.transpose(0, 1)[None]))
    return torch.cat(pages, 2), plain


def follows(device="cpu", **options):
    """Pages that follow their own queries: by kernels and by the reference, however steps are cut, as SQuat defines them."""
    truth = followed(False, 70, device=device, **options)
    found = [followed(True, every, device=device, **options) for every in (70, 300)]
    form = truth.formats[0]
    for i, n in enumerate(truth.now):
        assert truth.closed(i) == n // 128 * 128
        if n < 128:
            continue
        want, plain = own_pages(truth, i)
        got = [form.decode(form.take(s.stored(i, 0), s.closed(i) // s.block)) for s in (truth, *found)]
        errors = [float((x - want).norm() / want.norm()) for x in (plain, *got)]
        assert errors[0] > 0.1 and errors[1] < 1e-3 and max(errors[2:]) < 0.02, errors
        stored = [s.stored(i, 0) for s in found]
        assert all(torch.equal(stored[0][n].view(torch.uint8), stored[1][n].view(torch.uint8)) for n in stored[0])


def check_of_following(device="cpu"):
    """The test that a device's kernels have to pass makes pages' own updates, and sees wrong ones."""
    device = torch.device(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    server = following(Server("squat", (16,), fragments=True))
    assert check.self_test.__wrapped__(*server.formats, device, dtype, server.following) is None
    right, check.storing.follow = check.storing.follow, lambda call, space: space.updates.zero_()
    try:
        assert "keys stored in pages" in check.self_test.__wrapped__(*server.formats, device, dtype, server.following)
    finally:
        check.storing.follow = right
    for wrong, said in (({"rank": 5}, "rank=5"), ({"lam": 99.0}, "lam=99"), ({"width": 16}, "channels=16")):
        assert said in paged.why_not_stored(*server.formats, steering=replace(server.following, **wrong))


CASES = {
    "books": books,
    "groups": groups,
    "follows": follows,
    "check-following": check_of_following,
    "steered": steered,
    "check-steering": check_of_steering,
    "lists": lists,
    "filling": filling,
    "mixed": mixed,
    "checks": checks,
}
CASES |= {f"attend-{name}": lambda options=options: attending(**options) for name, options in ATTENDS.items()}
CASES |= {f"store-{name}": lambda options=options: storing(**options) for name, options in STORES.items()}

if __name__ == "__main__":
    quicken()
    for name in sys.argv[1:]:
        CASES[name]()
