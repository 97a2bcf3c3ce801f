"""The benchmark of ``generate``, on a tiny model and without a GPU: what it runs, and what its rows say."""

import dataclasses

import pytest
import torch

import kvfold
from helpers import llama
from kvfold.bench import generate
from kvfold.bench.rows import append, read

ENVIRONMENT = dict.fromkeys(("gpu", "driver", "torch", "triton", "commit"), "none")
CACHES = ("kivi:sink=4,recent=16", generate.STATIC, "none:sink=4,recent=16", generate.DEFAULT)


@pytest.fixture(scope="module")
def rows():
    return list(generate.measure(llama(), "tiny", 2, 40, 12, CACHES, ENVIRONMENT, steps=("plain",)))


def test_transformers_come_first_and_all_decode_the_same_tokens(rows):
    assert [row.cache for row in rows] == [generate.DEFAULT, generate.STATIC, CACHES[0], CACHES[2]]
    exact = {row.cache: row.same for row in rows}
    assert exact[generate.DEFAULT] == exact[generate.STATIC] == exact["none:sink=4,recent=16"] == 12
    assert 0 <= exact[CACHES[0]] <= 12


def test_folded_caches_are_timed_with_each_kind_of_steps():
    caches = (generate.DEFAULT, "kivi:sink=4,recent=16")
    found = list(generate.measure(llama(), "tiny", 1, 20, 8, caches, ENVIRONMENT))
    assert [(row.cache, row.steps) for row in found] == [(caches[0], ""), (caches[1], "plain"), (caches[1], "compiled")]


def test_times_are_of_steps_alone(rows):
    for row in rows:
        assert 0 < row.p20_ms <= row.ms <= row.p80_ms and row.prefill_ms > 0 and row.begin_ms > 0
        assert row.tokens_per_s == pytest.approx(2 / row.ms * 1e3)
    default, static, folded, _ = rows
    assert folded.times_default == pytest.approx(default.ms / folded.ms)
    assert folded.times_best == pytest.approx(min(default.ms, static.ms) / folded.ms)
    assert default.times_default is None


def test_rows_say_how_steps_ran(rows):
    assert [row.path for row in rows[:2]] == ["eager", "eager"]
    assert all(row.path.startswith("decoded step by step: decode graph: layer 0: its kernel is ") for row in rows[2:])


def test_the_model_is_given_back():
    model = llama()
    before = model.config._attn_implementation
    generate._generate(model, torch.ones(1, 20, dtype=torch.long), 8, "kivi")
    assert model.config._attn_implementation == before and "forward" not in model.__dict__
    assert kvfold.methods.get("kivi") is not None


def test_rows_are_appended(rows, tmp_path):
    path = tmp_path / "generate.csv"
    append(path, rows)
    found = read(path)
    assert [row["cache"] for row in found] == [row.cache for row in rows]
    assert list(found[0]) == [f.name for f in dataclasses.fields(generate.GenerateRow)]


def test_a_line_names_the_shape_and_the_path(rows):
    assert "tiny B=2 N=40" in generate.line(rows[0]) and "eager" in generate.line(rows[0])
    assert "x the best of Transformers" in generate.line(rows[2])


def test_the_model_has_the_published_shape():
    with torch.device("meta"):
        model = generate.build("qwen2.5-coder-1.5b", torch.device("meta"))
    assert 1.5e9 < sum(p.numel() for p in model.parameters()) < 1.6e9
    assert model.config.num_hidden_layers == 28 and model.dtype == torch.bfloat16
