import dataclasses
import json
import re

import pytest
import torch
from transformers import DynamicCache

import kvfold
from helpers import llama, prompt
from kvfold import models
from kvfold.errors import KVFoldError
from kvfold.evaluation import Row, Text, compare, decoding, domains, load_text, reference, score, windows
from kvfold.evaluation.schema import Sidecar
from kvfold.evaluation.suites import beginning
from kvfold.evaluation.windows import encode
from tiny_model import byte_tokenizer, tiny_llama

PREFIX, TOKENS = 320, 96


@pytest.fixture(scope="module")
def tiny():
    return tiny_llama()


@pytest.fixture(scope="module")
def ids():
    return encode(byte_tokenizer(), load_text(), PREFIX, TOKENS, 8, None)[PREFIX]


@pytest.fixture(scope="module")
def truth(tiny, ids):
    return reference(tiny, ids, PREFIX)


@pytest.fixture(scope="module")
def smol():
    model, tokenizer, info = models.load(device="cpu")
    ids = encode(tokenizer, load_text(), 512, 128, 8, info.max_context)[512]
    return model, ids, reference(model, ids, 512)


def folded_score(model, ids, method, truth, prefix):
    try:
        return score(model, ids, prefix, kvfold.fold(model, method), reference=truth)
    finally:
        kvfold.unfold(model)


# ---- scoring ---------------------------------------------------------------------------------------------------------


def test_a_full_precision_cache_scores_like_one_forward_pass(tiny, ids, truth):
    result = score(tiny, ids, PREFIX, DynamicCache(config=tiny.config), reference=truth)
    with torch.inference_mode():
        logits = tiny(ids).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[PREFIX:-1], ids[0, PREFIX + 1 :], reduction="none")
    assert result.nll.shape == (TOKENS,)
    torch.testing.assert_close(result.nll, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.last_logits, logits[-2], rtol=1e-4, atol=1e-4)
    assert result.ppl == pytest.approx(float(expected.mean().exp()), rel=1e-4)
    assert result.kld == 0 and result.top1 == 1
    assert result.prefill_seconds > 0 and result.score_seconds > 0


@pytest.mark.parametrize("chunk", [1, 7, 96, 1000])
def test_chunks_do_not_change_a_full_precision_score(tiny, ids, chunk):
    whole = score(tiny, ids, PREFIX, DynamicCache(config=tiny.config))
    cut = score(tiny, ids, PREFIX, DynamicCache(config=tiny.config), chunk=chunk)
    torch.testing.assert_close(cut.nll, whole.nll, rtol=1e-4, atol=1e-4)


def test_every_token_is_reported_once(tiny, ids):
    done = []
    score(tiny, ids, PREFIX, DynamicCache(config=tiny.config), on_tokens=done.append)
    assert sum(done) == PREFIX + TOKENS
    done.clear()
    reference(tiny, ids, PREFIX, chunk=50, on_tokens=done.append)
    assert sum(done) == PREFIX + TOKENS


def test_kld_is_the_definition(tiny, ids, truth):
    noise = torch.randn(truth.logits.shape, generator=torch.Generator().manual_seed(0))
    other = dataclasses.replace(truth, logits=truth.logits + noise)
    result = score(tiny, ids, PREFIX, DynamicCache(config=tiny.config), reference=other)
    full = torch.log_softmax(other.logits, -1)
    expected = torch.nn.functional.kl_div(
        torch.log_softmax(truth.logits, -1), full, log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(result.kl, expected, rtol=1e-3, atol=1e-5)
    assert result.top1 == pytest.approx(float((truth.logits.argmax(-1) == other.logits.argmax(-1)).float().mean()))


def test_wrong_shapes_and_foreign_references_are_refused(tiny, ids, truth):
    cache = DynamicCache(config=tiny.config)
    for args, says in [
        ((ids.repeat(2, 1), PREFIX, cache), "input_ids: shape"),
        ((ids, 0, cache), "prefix: 0"),
        ((ids, PREFIX, cache, 0), "chunk: 0"),
        ((ids[:, :PREFIX], PREFIX, cache), "nothing to score"),
        ((ids, PREFIX - 1, cache, 32, truth), "reference: made for"),
        ((ids, PREFIX, cache, 16, truth), "reference: made for"),
    ]:
        with pytest.raises(KVFoldError, match=says):
            score(tiny, *args)


def test_none_gives_the_logits_of_the_models_own_cache(tiny, ids, truth):
    result = folded_score(tiny, ids, "none", truth, PREFIX)
    assert result.kld < 1e-7
    own = score(tiny, ids, PREFIX, DynamicCache(config=tiny.config))
    error = (result.last_logits - own.last_logits).norm() / own.last_logits.norm()
    assert error < 1e-5
    torch.testing.assert_close(result.nll, own.nll, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", kvfold.methods.DEFAULT)
def test_every_default_method_scores_finitely(tiny, ids, truth, method):
    result = folded_score(tiny, ids, method, truth, PREFIX)
    assert torch.isfinite(result.nll).all() and torch.isfinite(result.kl).all()
    assert result.kl.min() > -1e-4


def break_encoding(monkeypatch):
    """Folded layers now store noise of the same size as what they were given, whatever encodes and reads it."""
    from kvfold.storage.writer import Writer

    encode = Writer._encode

    def noisy(self, tokens, *args):
        generator, sides = torch.Generator().manual_seed(0), (tokens.keys, tokens.values)
        keys, values = (torch.randn(x.shape, generator=generator).to(x) * x.float().std().to(x) for x in sides)
        return encode(self, dataclasses.replace(tokens, keys=keys, values=values), *args)

    monkeypatch.setattr(Writer, "_encode", noisy)


@pytest.mark.targets
@pytest.mark.parametrize("method", ["kivi:bits=8", "fold:bits=8", "innerq:bits=8", "squat:bits=8"])
def test_a_broken_quantizer_shows_on_every_device(method, target, monkeypatch):
    model, ids = llama(initializer_range=0.1), prompt(1, 320)
    truth = reference(model, ids, 256)
    good = folded_score(model, ids, f"{method},sink=0,recent=0", truth, 256)
    break_encoding(monkeypatch)
    bad = folded_score(model, ids, f"{method},sink=0,recent=0", truth, 256)
    assert good.kld < 1e-3 and bad.kld > 50 * good.kld


@pytest.mark.slow
def test_a_broken_quantizer_makes_perplexity_and_divergence_explode(smol, monkeypatch):
    model, ids, truth = smol
    good = folded_score(model, ids, "kivi:bits=4,recent=32", truth, 512)
    break_encoding(monkeypatch)
    bad = folded_score(model, ids, "kivi:bits=4,recent=32", truth, 512)
    assert good.kld < 0.05 and good.top1 > 0.85
    assert bad.kld > 1 and bad.kld > 50 * good.kld
    assert bad.ppl > 3 * good.ppl
    assert bad.top1 < 0.6


@pytest.mark.slow
def test_eight_bits_without_windows_are_nearly_lossless_on_real_text(smol):
    model, ids, truth = smol
    result = folded_score(model, ids, "kivi:bits=8,sink=0,recent=0", truth, 512)
    assert result.kld < 1e-3
    assert result.top1 > 0.97


@pytest.mark.slow
def test_fewer_bits_cost_more_on_real_text(smol):
    model, ids, truth = smol
    klds = [folded_score(model, ids, f"kivi:bits={bits},recent=32", truth, 512).kld for bits in (8, 4, 2, 1)]
    assert klds == sorted(klds)
    assert klds[2] > 5 * klds[1]


# ---- compare ---------------------------------------------------------------------------------------------------------

METHODS = ["none", "kivi:bits=4,recent=32", "kivi:recent=32"]


def run(tiny, json_path=None, methods=METHODS, **options):
    info = models.ModelInfo("tiny", "float32", "cpu", 1024, sum(p.numel() for p in tiny.parameters()))
    options = {"prefix": PREFIX, "tokens": TOKENS, "new_tokens": 4} | options
    return compare(tiny, byte_tokenizer(), info, methods, load_text(), json_path=json_path, **options)


def test_compare_measures_what_it_says(tiny, tmp_path):
    result = run(tiny, tmp_path / "out.json")
    assert [row.method for row in result.rows] == METHODS
    none, four, two = result.rows
    held = PREFIX + TOKENS
    assert all(row.cache_tokens == held for row in result.rows)
    assert {row.full_cache_bytes for row in result.rows} == {2 * 2 * 2 * 64 * 4 * held}
    assert none.kld < 1e-7 and none.top1 == 1
    assert two.kld > four.kld > none.kld
    assert two.cache_bytes < four.cache_bytes < none.cache_bytes
    for row in result.rows:
        assert row.cache_bytes == row.packed_bytes + row.window_bytes + row.state_bytes + row.table_bytes
        assert row.prefill_tokens_per_s > 0 and row.decode_tokens_per_s > 0 and row.seconds > 0
    assert 2 < two.effective_bits < 3.2 and 4 < four.effective_bits < 5.2

    written = json.loads((tmp_path / "out.json").read_text())
    assert written == result.to_dict()
    needed = {"method", "effective_bits", "cache_bytes", "full_cache_bytes", "ppl", "kld", "top1"}
    needed |= {"prefill_tokens_per_s", "decode_tokens_per_s", "seconds"}
    assert all(needed <= set(row) for row in written["rows"])
    header = written["header"]
    assert header["prefixes"] == [PREFIX] and {row["prefix"] for row in written["rows"]} == {PREFIX}
    assert all(row.tested == TOKENS for row in result.rows)
    assert header["texts"] == {"pydoc_data.topics": load_text().sha256}
    assert {"kvfold", "torch", "transformers", "python"} == set(header["versions"])
    assert header["model"] == "tiny" and header["text_sha256"] == load_text().sha256 and header["seed"] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


class Clock:
    """In place of the machine's, which may be busy: a millisecond passes with each look, more where a test says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", self.look)

    def look(self):
        self.now += 0.001
        return self.now


@pytest.mark.parametrize("method", ["none", "kivi:recent=32", "innerq"])
def test_what_a_method_needs_first_is_in_no_speed(tiny, monkeypatch, method):
    """The first call that packs, the first that reads packed tokens and the first decoded token are slow, as where they are
    compiled: none of them is timed."""
    from kvfold.storage.reader import Reader
    from kvfold.storage.writer import Writer

    seen, clock = set(), Clock(monkeypatch)

    def slowly(kind, name):
        own = getattr(kind, name)

        def slow(self, *args, **kwargs):
            if name not in seen:
                seen.add(name)
                clock.now += 1000
            return own(self, *args, **kwargs)

        return slow

    for kind, name in ((Writer, "_encode"), (Reader, "call")):
        monkeypatch.setattr(kind, name, slowly(kind, name))
    (row,) = run(tiny, methods=[method]).rows
    assert "call" in seen and row.prefill_tokens_per_s > PREFIX and row.decode_tokens_per_s > 4 and row.seconds < 2


def test_continuations_are_greedy_and_their_first_step_is_not_timed(tiny, ids, monkeypatch):
    cache = kvfold.fold(tiny, "none")
    try:
        result = score(tiny, ids, PREFIX, cache)
        own, calls, clock = tiny.forward, [], Clock(monkeypatch)

        def slow(*args, **kwargs):
            calls.append(kwargs)
            if len(calls) == 1:  # as a capture
                clock.now += 1000
            return own(*args, **kwargs)

        monkeypatch.setattr(tiny, "forward", slow)
        decoded = decoding.decode(tiny, cache, result.last_logits, 6)
    finally:
        kvfold.unfold(tiny)
    assert len(calls) == 6 and decoded.seconds < 0.5 and decoded.path == "steps: no CUDA device"
    monkeypatch.undo()
    with torch.inference_mode():
        expected = tiny.generate(ids[:, :-1], max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, -6:]
    assert decoded.tokens[:5] == expected.tolist()[:5]


def test_on_a_gpu_rows_are_decoded_in_graphs_that_a_throw_away_cache_came_before(tiny, monkeypatch):
    """With a graph that is none: which cache, how much room, how often."""
    from kvfold.engines.transformers import graph
    from steps import Steps

    made, lengths = [], []

    class Graph(Steps):
        def __init__(self, model, cache, room, compile=False):
            super().__init__(model, cache, room, compile)
            made.append((cache.get_seq_length(), room))

    own = kvfold.fold

    def fold(model, method, max_length):
        lengths.append(max_length)
        return own(model, method, max_length=max_length)

    monkeypatch.setattr(decoding, "on_gpu", lambda model: True)
    monkeypatch.setattr(graph, "DecodeGraph", Graph)
    monkeypatch.setattr(kvfold, "fold", fold)
    (row,) = run(tiny, methods=["kivi"], new_tokens=6, pairs=0).rows
    assert row.decode_path == "graph"
    assert lengths == [PREFIX + 32 + 2, PREFIX + TOKENS + 6]
    assert made == [(PREFIX + 32, 2), (PREFIX + TOKENS, 6)]
    monkeypatch.undo()
    (again,) = run(tiny, methods=["kivi"], new_tokens=6).rows
    assert (row.continuation, row.kld) == (again.continuation, again.kld)
    assert again.decode_path == "steps: no CUDA device"


def test_rows_say_how_they_were_decoded():
    assert decoding.decode_path(16, 16, None) == "graph"
    assert decoding.decode_path(0, 16, "layer 0: why") == "steps: layer 0: why"
    assert decoding.decode_path(14, 16, None) == "steps: 2 of 16 tokens before a graph"


def test_several_prefixes_give_the_rows_of_each_and_one_reference_a_prefix(tiny, tmp_path, monkeypatch):
    references = []

    def counted(model, ids, prefix, *args):
        references.append(prefix)
        return reference(model, ids, prefix, *args)

    monkeypatch.setattr(beginning, "reference", counted)
    result = run(tiny, tmp_path / "out.json", prefix=[PREFIX, 512])
    assert references == [PREFIX, 512] and result.header.prefixes == [PREFIX, 512]
    assert [(row.method, row.prefix) for row in result.rows] == [(m, p) for p in (PREFIX, 512) for m in METHODS]
    assert [row.cache_tokens for row in result.rows] == [p + TOKENS for p in (PREFIX, 512) for _ in METHODS]
    alone = run(tiny, prefix=512)
    assert [(row.kld, row.ppl) for row in result.rows[3:]] == [(row.kld, row.ppl) for row in alone.rows]


def test_what_lies_within_the_windows_is_not_given_numbers(tiny):
    """`kivi` keeps 128 newest tokens: up to 159 nothing is packed, and nothing is tested."""
    none, kivi, innerq = run(tiny, methods=["none", "kivi", "innerq"], prefix=64, tokens=64).rows
    assert none.tested == 64 and none.kld is not None
    for row in (kivi, innerq):
        assert row.tested == row.packed_bytes == 0 and row.effective_bits is None
        assert (row.ppl, row.kld, row.top1) == (None, None, None)
    # 64 + 96 tokens are in the cache, and 32 packed, when the fourth call of 32 begins
    (kivi,) = run(tiny, methods=["kivi"], prefix=64, tokens=192).rows
    assert kivi.tested == 192 - 96 and kivi.kld is not None


def test_compare_repeats_its_numbers(tiny):
    first, second = run(tiny), run(tiny)
    for a, b in zip(first.rows, second.rows, strict=True):
        assert (a.ppl, a.kld, a.top1, a.continuation) == (b.ppl, b.kld, b.top1, b.continuation)
        assert (a.cache_bytes, a.effective_bits) == (b.cache_bytes, b.effective_bits)
        assert a.pairs_nll is not None and (a.pairs_exact, a.pairs_nll) == (b.pairs_exact, b.pairs_nll)


def test_the_model_is_as_before_after_a_comparison(tiny, ids):
    before = tiny.config._attn_implementation
    run(tiny)
    assert tiny.config._attn_implementation == before


class Killed(BaseException):
    pass


def test_a_killed_comparison_goes_on_where_it_stopped(tiny, tmp_path):
    out = tmp_path / "out.json"
    rows = []

    def kill(row):
        rows.append(row)
        if len(rows) == 2:
            raise Killed

    with pytest.raises(Killed):
        run(tiny, out, on_row=kill)
    assert not out.exists()
    sidecar = Sidecar.of(out, Row).path
    with sidecar.open("a") as file:
        file.write('{"method": "kivi:bi')

    taken, new = {}, []
    result = run(tiny, out, on_start=lambda names, done: taken.update(done), on_row=new.append)
    assert taken == {(row.method, PREFIX): row for row in rows}
    assert [row.method for row in new] == METHODS[2:]
    assert result.rows[:2] == rows and [row.method for row in result.rows] == METHODS
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_a_killed_comparison_of_several_prefixes_goes_on_between_them(tiny, tmp_path):
    rows, new = [], []

    def kill(row):
        rows.append(row)
        if len(rows) == 4:
            raise Killed

    prefixes = [PREFIX, 512]
    with pytest.raises(Killed):
        run(tiny, tmp_path / "out.json", prefix=prefixes, on_row=kill)
    result = run(tiny, tmp_path / "out.json", prefix=prefixes, on_row=new.append)
    assert [(row.method, row.prefix) for row in new] == [(METHODS[1], 512), (METHODS[2], 512)]
    assert result.rows == rows + new


@pytest.mark.parametrize("change", [{"prefix": [PREFIX, 400]}, {"seed": 1}, {"tokens": TOKENS - 1}, {"chunk": 16}])
def test_rows_of_another_run_are_neither_taken_over_nor_lost(tiny, tmp_path, change):
    out = tmp_path / "out.json"

    def kill(row):
        raise Killed

    with pytest.raises(Killed):
        run(tiny, out, on_row=kill)
    held = Sidecar.of(out, Row).path.read_bytes()
    with pytest.raises(KVFoldError, match=rf"^json: .*partial holds 1 row of a stopped run of .*{next(iter(change))}"):
        run(tiny, out, **change)
    assert Sidecar.of(out, Row).path.read_bytes() == held and [p.name for p in tmp_path.iterdir()] == [
        "out.json.partial"
    ]
    taken = {}
    run(tiny, out, on_start=lambda names, done: taken.update(done), force=True, **change)
    assert taken == {} and [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_a_method_that_does_not_fit_stops_everything_before_the_work(tiny, tmp_path):
    ran = []
    with pytest.raises(KVFoldError, match="group"):
        run(tiny, tmp_path / "out.json", ["none", "kivi:group=96"], on_row=ran.append)
    assert ran == [] and list(tmp_path.iterdir()) == []


def test_repeated_methods_run_once_and_no_method_is_an_error(tiny):
    result = run(tiny, methods=["kivi:recent=32", "kivi:bits=2,recent=32", "kivi:recent=32"])
    assert len(result.rows) == 1
    with pytest.raises(KVFoldError, match="methods: none given"):
        run(tiny, methods=[])


# ---- domains ---------------------------------------------------------------------------------------------------------


def test_windows_are_spread_over_the_text_and_a_short_one_is_refused():
    tokenizer, text = byte_tokenizer(), Text("abcdefghij" * 100, "t")
    found = windows.windows_of(tokenizer, "x", text, 64, 32, 4)
    assert [w.ids.shape for w in found] == [(1, 97)] * 4 and [w.index for w in found] == [0, 1, 2, 3]
    whole = tokenizer(text.text, return_tensors="pt").input_ids[0]
    middles = [125, 375, 625, 875]
    for window, middle in zip(found, middles, strict=True):
        assert torch.equal(window.ids[0], whole[middle - 48 : middle + 49])
    with pytest.raises(
        KVFoldError, match=r"^text: t has 1000 tokens, and 11 windows need 1067 .*--windows .at most 10"
    ):
        windows.windows_of(tokenizer, "x", text, 64, 32, 11)


def test_windows_of_several_prefixes_end_alike(monkeypatch):
    tokenizer, text = byte_tokenizer(), Text("".join(f"{i:05d}" for i in range(3000)), "t")
    found = windows.windows_of(tokenizer, "x", text, [256, 64], 32, 2)
    assert [(w.prefix, w.prefilled, w.index) for w in found] == [(64, 64, 0), (64, 64, 1), (256, 256, 0), (256, 256, 1)]
    for short, long in zip(found[:2], found[2:], strict=True):
        assert torch.equal(short.ids, long.ids[:, -97:]) and long.ids.shape == (1, 289)
    alone = windows.windows_of(tokenizer, "x", text, 256, 32, 2)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(alone, found[2:], strict=True))


def test_of_a_long_text_only_what_is_around_the_windows_is_tokenized(monkeypatch):
    tokenizer, text = byte_tokenizer(), Text("".join(f"{i:05d}" for i in range(20_000)), "t")
    whole = windows.windows_of(tokenizer, "x", text, 256, 32, 2)
    monkeypatch.setattr(windows, "LONG", 1000)
    seen = []

    def counting(part, **options):
        seen.append(len(part))
        return tokenizer(part, **options)

    counting.bos_token_id = None
    found = windows.windows_of(counting, "x", text, 256, 32, 2)
    assert seen == [32 * 289] * 2 or seen == [32 * 289 - 1] * 2 or sum(seen) < 20_000
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(whole, found, strict=True))


def test_built_in_texts_hold_a_window_at_16384_tokens():
    """As byte-pair tokenizers count them: at most 5 characters of prose a token, and 4.5 of code."""
    assert len(load_text().text) > 5 * (16_384 + 1_024 + 1)
    assert len(windows.library_source().text) > 3 * 4.5 * (16_384 + 1_024 + 1)
    with pytest.raises(KVFoldError, match=r"^text: t has 1000 tokens, and 1 windows need 1097 .* or --windows$"):
        windows.windows_of(byte_tokenizer(), "x", Text("abcdefghij" * 100, "t"), [64, 1064], 32, 1)


def test_retrieval_asks_for_values_that_the_prefix_lists():
    tokenizer = byte_tokenizer()
    for window in windows.retrieval(tokenizer, 600, 200, 2):
        listed = tokenizer.decode(window.ids[0, : window.prefilled])
        scored = window.ids[0, window.prefilled + 1 :]
        assert 500 < window.prefilled <= window.prefix == 600
        assert window.ids.shape[1] <= 600 + 201 and window.answers
        for first, stop in window.answers:
            answer = tokenizer.decode(scored[first:stop])
            question = tokenizer.decode(window.ids[0, window.prefilled : window.prefilled + 1 + first]).splitlines()[-1]
            assert question + answer.rstrip("\n") in listed and answer.endswith(".\n")


def test_retrieval_asks_for_keys_that_stand_once():
    """Of a thousand draws among 65,536 some are alike; a key with two values has no answer."""
    window = windows.retrieval_window(byte_tokenizer(), 30_000, 200, 0)
    listed = re.findall("Key ([0-9a-f]{4}) has", byte_tokenizer().decode(window.ids[0, : window.prefilled]))
    assert len(set(listed)) == len(listed) > 1000


def test_json_lines_are_read_as_text_and_others_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "one", "n": 1, "answer": "two"}\n{"question": "three"}\n')
    assert windows.load_domain("a", str(tmp_path / "a.jsonl")).text == "one\ntwo\n\nthree\n"
    (tmp_path / "b.jsonl").write_text('{"question": "one"}\n[1]\n')
    with pytest.raises(KVFoldError, match=r"^text: line 2 of .*b.jsonl is not a JSON object"):
        windows.load_domain("b", str(tmp_path / "b.jsonl"))


@pytest.mark.slow
def test_domains_score_every_method_on_every_window_and_go_on_after_a_kill(tiny, tmp_path):
    info = models.ModelInfo("tiny", "float32", "cpu", None, 1)
    pieces = windows.make_windows(byte_tokenizer(), windows.load_texts(windows.BUILT_IN, {}), 320, 64, 2)
    assert [(w.domain, w.index) for w in pieces] == [(d, i) for d in windows.BUILT_IN for i in range(2)]
    out = tmp_path / "rows.json"

    def stop(row, done, total):
        assert total == 4 * len(windows.BUILT_IN)  # two methods, two windows
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        domains.run(tiny, info, ["none", "kivi:bits=2"], pieces, json_path=out, on_row=stop)
    assert len((tmp_path / "rows.json.partial").read_text().splitlines()) == 1 + 5
    seen, kept = [], []
    header, rows = domains.run(
        tiny,
        info,
        ["none", "kivi:bits=2"],
        pieces,
        json_path=out,
        on_start=lambda *counts: kept.append(counts),
        on_row=lambda row, *_: seen.append(row),
    )
    assert kept == [(5, 4 * len(windows.BUILT_IN))] and seen == rows[5:]
    assert json.loads(out.read_text()).items() >= domains.to_dict(header, rows).items() and not list(
        tmp_path.glob("*.partial")
    )
    kept = [dataclasses.replace(row, seconds=0.0) for row in rows]
    _, again = domains.run(tiny, info, ["none", "kivi:bits=2"], pieces)
    assert kept == [dataclasses.replace(row, seconds=0.0) for row in again]
    by_method = domains.means(rows)
    assert by_method["none"]["prose"].kld == pytest.approx(0, abs=1e-6) and by_method["none"]["code"].top1 == 1.0
    folded = by_method[rows[1].method]
    assert folded["prose"].kld > 0 and folded["prose"].lowest <= folded["prose"].kld <= folded["prose"].highest
    assert all((r.exact is not None) == (r.domain == "retrieval") for r in rows)


def test_an_unknown_domain_is_named():
    with pytest.raises(KVFoldError, match=r"^domain: 'poetry' is not built in; allowed: prose, code, tools, retrieval"):
        windows.load_texts(["poetry"], {})


def test_exact_answers_are_those_of_the_text(tiny):
    """A scored token is correct where the argmax of the logits before it is the token itself."""
    window = windows.retrieval(byte_tokenizer(), 320, 96, 1)[0]
    result = score(tiny, window.ids, window.prefilled, DynamicCache(config=tiny.config))
    with torch.inference_mode():
        logits = tiny(window.ids).logits[0, window.prefilled : -1]
    assert torch.equal(result.correct, logits.argmax(-1) == window.ids[0, window.prefilled + 1 :])


def test_domains_has_rows_of_every_method_text_window_and_prefix(tiny):
    info = models.ModelInfo("tiny", "float32", "cpu", None, 1)
    texts = windows.load_texts(["prose", "retrieval"], {})
    pieces = windows.make_windows(byte_tokenizer(), texts, [320, 512], 64, 2)
    header, rows = domains.run(tiny, info, ["none", "kivi:recent=32"], pieces, texts=texts)
    assert header.prefixes == [320, 512] and header.texts == {"prose: pydoc_data.topics": load_text().sha256}
    assert len({row.key for row in rows}) == len(rows) == 16
    same = [r.kld for r in rows if r.method == "none"]
    assert max(map(abs, same)) < 1e-6 < min(r.kld for r in rows if r.method != "none")
    retrieved = [r for r in rows if r.domain == "retrieval"]
    assert all(r.prefilled and r.tested == r.tokens for r in retrieved)


def test_references_lie_on_a_gpu_only_where_there_is_room(monkeypatch):
    from kvfold.evaluation import perplexity

    logits = torch.empty(32, 1000, dtype=torch.bfloat16)
    assert perplexity._storage(logits, 64).shape == (64, 1000)
    assert perplexity._storage(logits, 64).dtype == torch.bfloat16

    class OnGPU:
        device, dtype, shape = torch.device("cuda"), torch.bfloat16, (32, 1000)

    places = []
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: places.append(device.type))
    for free in (4 * 64 * 1000 * 2, 4 * 64 * 1000 * 2 - 1):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place, free=free: (free, 0))
        perplexity._storage(OnGPU, 64)
    assert places == ["cuda", "cpu"]
