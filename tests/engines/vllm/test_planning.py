"""What is decided before vLLM allocates anything: methods, windows, blocks, capacity. Needs no vLLM."""

import json
from importlib.util import find_spec

import pytest
import torch

from books_case import artefact
from kvfold import cli, methods
from kvfold.engines.vllm import capacity, shapes
from kvfold.engines.vllm.settings import layer_spec, method_of, stored, unservable
from kvfold.engines.vllm.step import Batch
from kvfold.engines.vllm.windows import Window
from kvfold.errors import KVFoldError


def llama(spec, dtype=torch.bfloat16, dim=128):
    return [stored(methods.get(spec), layer_spec(i, 32, 32, 8, dim, dtype, True)) for i in range(32)]


@pytest.mark.parametrize("given", [None, {}, {"kvfold": 3}, {"kvfold": None}, "fold"])
def test_a_missing_method_is_asked_for(given):
    with pytest.raises(
        KVFoldError, match=r"additional_config: kvfold=.* names no method; allowed: .*--additional-config"
    ):
        method_of(given)


def test_an_unknown_method_is_refused_as_everywhere():
    with pytest.raises(KVFoldError, match="did you mean fold"):
        method_of({"kvfold": "fodl"})
    assert str(method_of({"kvfold": "fold:bits=2"})) == "fold:bits=2"


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (
            "squat:recent=64",
            "squat: recent=64: a page waits for its 128 tokens; allowed: 96 or more, or a subspace of a text: calibrate its "
            "subspace with 'kvfold calibrate --method squat",
        ),
        ("zipcache", "zipcache: its encoder"),
        ("kivi:paper=true", "paper=true takes statistics of a whole first call"),
        ("kivi:group=64", "group=64: blocks of 64 tokens"),
        ("none", "none folds nothing"),
        ("fold:sink=48", "sink=48: allowed: 0, 32, 64, 96"),
        ("squat_pre", "squat_pre: its encoder"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(spec, why):
    assert why in unservable(methods.get(spec))


@pytest.mark.parametrize("spec", ["fold", "fold:bits=2", "kivi", "kivi:bits=4", "innerq", "qjl", "turboquant", "squat"])
def test_what_can_be_served_is(spec):
    assert unservable(methods.get(spec)) is None
    for dtype in (torch.bfloat16, torch.float32):
        layer = llama(spec, dtype)[0]
        assert layer.layout.bytes <= layer.page_bytes < layer.layout.bytes + 128 * dtype.itemsize
        assert layer.page_bytes % (128 * dtype.itemsize) == 0


def test_windows_hold_a_query_where_pages_follow_theirs():
    """Beside keys and values; at 128 channels this fits into blocks that are as large as pages anyway."""
    own, kivi = llama("squat"), llama("kivi")
    assert own[0].follows and own[0].window_bytes == 3 * 128 * 2 and kivi[0].window_bytes == 2 * 128 * 2
    own_fits, kivi_fits = (capacity.folded(1 << 36, 33280, layers, 8) for layers in (own, kivi))
    assert own_fits == kivi_fits
    narrow = [capacity.folded(1 << 36, 2048, llama(spec), 8).tokens for spec in ("squat:bits=1", "kivi:bits=1")]
    assert narrow[0] < narrow[1]


@pytest.mark.parametrize(("recent", "sink", "drafts"), [(96, 32, 0), (0, 0, 0), (40, 64, 3), (128, 0, 5)])
def test_a_window_holds_what_a_step_reads_and_no_more(recent, sink, drafts):
    """Blocks by the rule, against tokens counted one by one; never more than what vLLM is told."""
    window, step = Window(recent, sink, drafts, 16), (1, 1, 7, 130, 1, 256, 33)
    held: set[int] = set()
    tokens = entries = 0
    for turn in range(200):
        after = tokens + step[turn % len(step)]
        packed = max(0, (tokens - recent) // 32 * 32)
        assert window.packed(tokens) == packed
        assert all(p // 16 in held for p in [*range(min(sink, tokens)), *range(packed, tokens)]), "a token is missing"
        held = {i for i in held if i < sink // 16 or i >= packed // 16}
        new = {i for i in range(entries, window.blocks(after)) if window.exists(i, window.tail(after))}
        assert len(new) == window.new(entries, after)
        assert len(held | new) <= window.most(10**6)
        held, entries = held | new, window.blocks(after)
        tokens = after - min(turn % (drafts + 1), after - tokens - 1)  # some drafts are taken back


def test_llama_8b_as_in_the_issue():
    """33,280 and 8,704 tokens, 109 GB for caches."""
    room = 109_200_000_000
    ratio = {}
    for context in (33_280, 8_704, 1_024):
        bf16 = capacity.dense(room, context, 32, 8, 128, 2).tokens
        ratio[context] = [capacity.folded(room, context, llama(spec), 8).tokens / bf16 for spec in ("fold", "kivi")]
    assert ratio[33_280][0] > 5.2 and ratio[33_280][1] > 4.8
    assert ratio[8_704][0] > 4.4 and ratio[8_704][1] > 4.2
    assert ratio[1_024][0] < 2  # where folding hardly pays
    assert capacity.dense(room, 33_280, 32, 8, 128, 2).tokens == pytest.approx(833_136, rel=1e-3)


def test_windows_in_several_groups_when_pages_are_small():
    one, several = (capacity.folded(1 << 30, 4096, llama(spec), 8) for spec in ("fold", "fold:bits=1"))
    held = Window(96, 32, 0, 16).most(4096)
    assert one.request_blocks == 32 + held and several.request_blocks == 32 + 2 * held


def test_a_batch_divides_into_decodes_and_chunks():
    batch = Batch.of([0, 1, 2, 7, 7, 47], [100, 5, 5, 0, 300], 1)
    assert (batch.decodes, batch.most) == (2, 1)
    assert [(c.row, c.start, c.count, c.before) for c in batch.chunks] == [(2, 2, 5, 0), (4, 7, 40, 260)]
    assert batch.chunks[1].span == slice(7, 47)
    drafts = Batch.of([0, 4, 5, 25], [50, 60, 20], 4)
    assert (drafts.decodes, drafts.most, len(drafts.chunks)) == (2, 4, 1)


@pytest.fixture
def folder(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 500, "intermediate_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 64, "torch_dtype": "bfloat16"}))
    return str(tmp_path)


def test_the_plan_is_printed(folder, capsys):
    assert cli.main(["plan", "--model", folder, "--context", "8192", "--kv-bytes", "1000000000", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["method"], row["context"]): row for row in found["rows"]}
    assert {context for _, context in rows} == {8192, 4096, 1024}
    expected = capacity.folded(10**9, 8192, shapes.layers_of(shapes.of_model(folder, 1), "fold"), 2)
    assert rows["fold", 8192]["tokens"] == expected.tokens > 3 * rows["none", 8192]["tokens"]
    assert (
        cli.main(["plan", "--model", folder, "--context", "4096", "--gpu-memory", "24", "--methods", "fold", "kivi"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "4,096" in shown and "an estimate" in shown and "x" in shown


def test_a_plan_says_why_methods_of_other_sizes_take_as_much_room(folder, capsys):
    """Pages of head size 64 are filled up to whole elements of every token: fold's 6,016 bytes to KIVI's 6,144."""
    arguments = ["plan", "--model", folder, "--context", "1024", "--kv-bytes", "1000000000", "--json", "-", "--methods"]
    assert cli.main([*arguments, "fold", "kivi", "innerq"]) == 0
    found = json.loads(capsys.readouterr().out)
    per_token = {row["method"]: row["bytes_per_token"] for row in found["rows"]}
    assert per_token["fold"] == per_token["kivi"] < per_token["innerq"]
    (note,) = (note for note in found["notes"] if "as many bytes per token" in note)
    assert note.startswith("fold, kivi: ") and "(6,016, 6,144 bytes in a page" in note and "multiple of 256" in note
    assert cli.main([*arguments, "kivi", "innerq"]) == 0
    assert "as many bytes" not in capsys.readouterr().out


def test_a_plan_without_triton_says_that_kernels_were_not_asked(folder, capsys, monkeypatch):
    monkeypatch.setattr(shapes, "find_spec", lambda _: None)
    assert cli.main(["plan", "--model", folder, "--context", "64", "--kv-bytes", "100000000", "--methods", "gear"]) == 0
    assert "Triton is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("spec", ["tasq:bits=2,values=fold", "nova", "commvq:bits=1", "vqllm", "gsrq", "kvquant"])
def test_a_plan_needs_no_artefact_and_counts_as_with_one(spec, folder, tmp_path, capsys):
    """Codebooks are counted from their shapes: numbers are those of an artefact, and a note says where they are from."""
    arguments = ["plan", "--model", folder, "--context", "2048", "--kv-bytes", "100000000", "--json", "-", "--methods"]
    assert cli.main([*arguments, spec]) == 0
    without = json.loads(capsys.readouterr().out)
    assert f"{spec}: " in without["notes"][0] and "counted from their shapes" in without["notes"][0]
    if not spec.startswith(("gsrq", "kvquant")):  # a server on a GPU takes these
        assert not any("no kernel" in note for note in without["notes"])
    if spec == "kvquant":
        return
    given = artefact(spec, tmp_path / "a.safetensors", 2, 64, layers=4)
    assert cli.main([*arguments, given]) == 0
    with_one = json.loads(capsys.readouterr().out)
    assert "counted from their shapes" not in with_one["notes"][0]
    for ours, theirs in zip(without["rows"], with_one["rows"], strict=True):
        kept = {name: value for name, value in theirs.items() if name not in ("method", "table_bytes")}
        assert {name: ours[name] for name in kept} == kept
        assert (ours["table_bytes"] > 0) == (ours["method"] != "none")


def test_an_artefact_that_is_named_is_read_for_a_plan(folder, capsys):
    arguments = ["plan", "--model", folder, "--context", "64", "--kv-bytes", "10000000", "--methods"]
    assert cli.main([*arguments, "tasq:artefact=not-there.safetensors"]) == 2
    assert "not-there.safetensors" in capsys.readouterr().err


def test_the_plan_says_what_a_server_refuses(folder, capsys):
    arguments = ["plan", "--model", folder, "--context", "1000000", "--kv-bytes", "1000", "--json", "-"]
    assert cli.main([*arguments, "--methods", "fold", "gear"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [note.split(":")[0] for note in notes][-1] == "context"
    assert [note.split(":")[0] for note in notes][:-1] == (["gear"] if find_spec("triton") else ["methods"])
    assert cli.main([*arguments[:-2], "--methods", "fold"]) == 0
    shown = capsys.readouterr().out
    assert "0.00x" not in shown and "vLLM refuses a longer one" in shown


def test_two_gpus_hold_twice_as_much(folder):
    one, two = (shapes.folded(shapes.of_model(folder, tp), 10**9, 8192, "fold") for tp in (1, 2))
    assert two.tokens == pytest.approx(2 * one.tokens, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "64"], "give one of --kv-bytes and --gpu-memory"),
        (["--context", "64", "--kv-bytes", "8GB"], "'8GB' is not a valid integer"),
        (["--context", "64", "--kv-bytes", "9", "--gpu-memory", "9"], "give one of --kv-bytes and --gpu-memory"),
        (["--context", "0", "--kv-bytes", "9"], "context"),
        (["--context", "64", "--kv-bytes", "10000000", "--tp", "3"], "tp: 3 GPUs do not share 8 heads and 2 KV heads"),
        (["--context", "64", "--kv-bytes", "10000000", "--methods", "zipcache"], "zipcache: its encoder follows"),
        (
            ["--context", "64", "--kv-bytes", "9", "--tp", "2", "--methods", "vqllm"],
            "vqllm's tables are of all KV heads",
        ),
        (["--context", "64", "--kv-bytes", "9", "--methods", "commvq:joint=true"], "allowed: joint=false"),
        (["--context", "64", "--gpu-memory", "1"], "gpu-memory: 1 GiB do not hold"),
    ],
)
def test_wrong_plans_end_with_status_2(folder, arguments, message, capsys):
    assert cli.main(["plan", "--model", folder, *arguments]) == 2
    assert message in capsys.readouterr().err
