import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvfold
from kvfold import kernels, methods
from kvfold.cli import main
from kvfold.commands import compare, terminal
from tiny_model import CONTEXT, byte_tokenizer, save, tiny_llama

SMALL = ["--prefix", "320", "--tokens", "64", "--new-tokens", "4"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run(capsys):
    def run(*arguments):
        capsys.readouterr()
        status = main(list(arguments))
        out, err = capsys.readouterr()
        return status, out, err

    return run


def errors(err):
    """Standard error without the lines that say what goes on."""
    return [line for line in err.splitlines() if not re.match(r"kvfold: (loading|checking|\[)", line)]


# ---- what works ------------------------------------------------------------------------------------------------------


def test_version_and_help_of_every_command(run):
    assert run("--version") == (0, f"kvfold {kvfold.__version__}\n", "")
    status, out, _ = run("--help")
    assert status == 0
    for command in ("compare", "domains", "eval", "generate", "explain", "methods"):
        assert command in out
        status, text, _ = run(command, "--help")
        assert status == 0 and "--json" in text


def test_methods_lists_every_method_with_options_and_defaults(run):
    status, out, _ = run("methods")
    assert status == 0
    status, text, _ = run("methods", "--json", "-")
    entries = {entry["name"]: entry for entry in json.loads(text)}
    assert set(entries) == set(methods.REGISTRY)
    for name, kind in methods.REGISTRY.items():
        assert name in out
        assert entries[name]["effective_bits"] == pytest.approx(kind().effective_bits(head_dim=128))
        assert entries[name]["options"]["sink"] == kind().sink
        assert set(entries[name]["options"]) == set(methods.options_of(kind))


def test_explain_covers_every_layer(run, tiny, tmp_path):
    status, out, err = run("explain", "--model", tiny, "--method", "fold", "--json", str(tmp_path / "x.json"))
    assert status == 0 and errors(err) == []
    assert "0-1" in out and any(name in out for name in kernels.REGISTRY)
    assert "bytes per token" in out and "not folded: nothing" in out
    plan = json.loads((tmp_path / "x.json").read_text())
    assert [layer["layer_idx"] for layer in plan["layers"]] == [0, 1]
    status, out, _ = run("explain", "--model", tiny, "--json", "-")
    assert json.loads(out) == plan


def test_compare_prints_a_row_per_method(run, tiny, tmp_path):
    out_file = tmp_path / "x.json"
    status, out, err = run(
        "compare", "--model", tiny, "--methods", "none", "kivi:recent=32", *SMALL, "--json", str(out_file)
    )
    assert status == 0 and errors(err) == []
    result = json.loads(out_file.read_text())
    assert [row["method"] for row in result["rows"]] == ["none", "kivi:recent=32"]
    for row in result["rows"]:
        assert re.search(rf"^ *{re.escape(row['method'])} .*{row['ppl']:.3f}", out, re.M)
    assert (result["header"]["prefixes"], result["header"]["tokens"]) == ([320], 64)
    assert {row["decode_path"] for row in result["rows"]} == {"steps: no CUDA device"}
    assert "decoded step by step: all (no CUDA device)" in out
    assert "320 tokens prefilled" in out and "not tested" not in out
    assert "float32" in out and result["header"]["text_sha256"][:12] in out


def test_compare_takes_several_prefixes_and_says_where_nothing_was_tested(run, tiny, tmp_path):
    arguments = ["compare", "--model", tiny, "--methods", "none", "kivi", *SMALL[2:], "--prefix", "320", "64", "--json"]
    status, out, err = run(*arguments, str(tmp_path / "x.json"))
    assert status == 0 and errors(err) == []
    result = json.loads((tmp_path / "x.json").read_text())
    rows = result["rows"]
    assert [(row["prefix"], row["method"]) for row in rows] == [(p, m) for p in (64, 320) for m in ("none", "kivi")]
    assert result["header"]["prefixes"] == [64, 320] and "64 and 320 tokens prefilled" in out
    assert rows[1]["tested"] == 0 and rows[1]["kld"] is None
    assert len(re.findall("not tested", out)) == 1
    assert "kivi after 64 tokens: nothing was tested: no scored token read anything packed" in out
    assert "(its windows hold 32 + 96 tokens); give --prefix 160 or more" in out
    for row in (rows[0], *rows[2:]):
        assert re.search(rf"{re.escape(row['method'])} .*{row['ppl']:.3f}", out)
    status, out, _ = run(*arguments, "-")
    assert status == 0 and [row["kld"] for row in json.loads(out)["rows"]] == [row["kld"] for row in rows]


def test_compare_says_once_that_nothing_was_tested(run, tiny):
    arguments = ["compare", "--model", tiny, "--prefix", "64", "--tokens", "64", "--new-tokens", "4", "--methods"]
    status, out, _ = run(*arguments, "fold", "kivi", "kivi:sink=0,recent=0")
    assert status == 0 and len(re.findall("not tested", out)) == 2
    (line,) = (line for line in out.splitlines() if "tested:" in line)
    assert line == (
        "fold, kivi after 64 tokens: nothing was tested: no scored token read anything packed "
        "(their windows hold 32 + 96 tokens); give --prefix 160 or more"
    )


def test_the_table_says_what_was_decoded_in_a_graph():
    from dataclasses import replace

    from kvfold.evaluation import Header, Row

    header = Header({}, "m", 1, "bfloat16", "a GPU", 1, "t", "0" * 64, {}, [1024], 512, 32, 16, 0, "now")
    row = Row("kivi", 1024, 512, 3.0, 3.0, 1, 8, 9.0, 0.1, 0.9, 1e4, 300.0, "graph", 1.0, 1, 0, 0, 0, 1536, "")
    rows = [row, replace(row, method="gear", decode_path="steps: layer 0: its kernel is triton; needs gluon")]
    assert ("graph", "steps") in zip(*compare._compare_table(header, rows).rows, strict=True)
    notes = compare._compare_notes(header, rows)
    assert "decoded in a CUDA graph: kivi" in notes
    assert "decoded step by step: gear (layer 0: its kernel is triton; needs gluon)" in notes


def test_domains_take_several_prefixes_and_chunks(run, tiny, tmp_path):
    arguments = ["domains", "--model", tiny, "--methods", "none", "kivi", "--windows", "1", "--tokens", "64"]
    arguments += ["--domains", "prose", "retrieval", "--prefix", "96", "512", "--chunk", "16", "--json"]
    status, out, err = run(*arguments, str(tmp_path / "x.json"))
    assert status == 0 and errors(err) == []
    assert "[1/8] prose 0 after 96: none: KL 0.0000" in err and "nothing tested" in err
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["header"]["chunk"] == 16 and result["header"]["prefixes"] == [96, 512]
    keys = [(row["domain"], row["prefix"], row["method"]) for row in result["rows"]]
    assert keys == [(d, p, m) for d in ("prose", "retrieval") for p in (96, 512) for m in ("none", "kivi")]
    (row,) = (row for row in result["rows"] if (row["domain"], row["prefix"], row["method"]) == ("prose", 512, "kivi"))
    assert f"{row['kld']:z.3f} / {100 * row['top1']:.0f}%" in out
    assert len(re.findall("not tested", out)) == 2 and "kivi after 96 tokens: nothing was tested" in out


def test_a_killed_run_of_domains_says_what_is_kept_and_goes_on(run, tiny, tmp_path, monkeypatch):
    from kvfold.evaluation import loop

    arguments = ["domains", "--model", tiny, "--methods", "none", "kivi", "--windows", "1", "--tokens", "64"]
    arguments += ["--domains", "prose", "--prefix", "320", "512", "--json", str(tmp_path / "x.json")]
    score, calls = loop.score, []

    def fail(*args, **how):
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return score(*args, **how)

    monkeypatch.setattr(loop, "score", fail)
    with pytest.raises(RuntimeError):
        run(*arguments)
    assert not (tmp_path / "x.json").exists()
    monkeypatch.setattr(loop, "score", score)
    status, _, err = run(*arguments)
    assert status == 0 and "kvfold: 3 of 4 rows taken over from an earlier run" in err
    assert "[4/4] prose 0 after 512: kivi: KL" in err and "[3/4]" not in err
    assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 4


def test_compare_reads_a_file_and_prints_json_alone(run, tiny, tmp_path):
    (tmp_path / "a.txt").write_text("The cache was folded twice. " * 50)
    status, out, _ = run(
        "compare", "--json", "-", "--text", str(tmp_path / "a.txt"), *SMALL, "--model", tiny, "--methods", "kivi"
    )
    assert status == 0
    assert json.loads(out)["header"]["text"] == str(tmp_path / "a.txt")


def test_domains_prints_means_and_takes_texts_and_artefacts(run, tiny, tmp_path):
    (tmp_path / "a.txt").write_text("The cache was folded twice. " * 100)
    learned = ["calibrate", "--model", tiny, "--method", "kvquant:bits=2", "--text", str(tmp_path / "a.txt")]
    (tmp_path / "artefacts").mkdir()
    status, *_ = run(*learned, "--tokens", "1024", "--out", str(tmp_path / "artefacts" / "kvquant.safetensors"))
    assert status == 0
    arguments = ["domains", "--model", tiny, "--methods", "none", "kivi", "--domains", "retrieval", "--windows", "1"]
    arguments += ["--prefix", "320", "--tokens", "64", "--text", f"folded={tmp_path / 'a.txt'}"]
    arguments += ["--artefacts", str(tmp_path / "artefacts"), "--json"]
    status, out, err = run(*arguments, str(tmp_path / "x.json"))
    assert status == 0 and errors(err) == [] and "retrieval" in out and "folded" in out
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [(row["domain"], row["method"].partition(":")[0]) for row in rows] == [
        (domain, method) for domain in ("retrieval", "folded") for method in ("none", "kivi", "kvquant")
    ]
    assert f"{rows[1]['kld']:z.3f} / {100 * rows[1]['top1']:.0f}% ({100 * rows[1]['exact']:.0f}%)" in out
    status, out, _ = run(*arguments, "-")
    assert status == 0 and [row["kld"] for row in json.loads(out)["rows"]] == [row["kld"] for row in rows]


def test_artefacts_of_another_model_are_left_out_and_said(run, tiny, tmp_path):
    other = str(save(tmp_path / "other", tiny_llama(head_dim=32)))
    (tmp_path / "a.txt").write_text("The cache was folded twice. " * 100)
    out_file = tmp_path / "kvquant.safetensors"
    learned = ["--method", "kvquant", "--text", str(tmp_path / "a.txt"), "--tokens", "1024", "--out", str(out_file)]
    assert run("calibrate", "--model", other, *learned)[0] == 0
    arguments = ["compare", "--model", tiny, "--methods", "none", *SMALL, "--artefacts", str(tmp_path), "--json", "-"]
    status, out, err = run(*arguments)
    assert status == 0 and [row["method"] for row in json.loads(out)["rows"]] == ["none"]
    assert errors(err) == [f"kvfold: kvquant.safetensors was made for {other}; left out"]


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        (["--methods", "a", "b", "--tokens", "9"], ["--methods", "a", "--methods", "b", "--tokens", "9"]),
        (["--methods", "a", "--methods", "b"], ["--methods", "a", "--methods", "b"]),
        (["--methods=a", "--json", "-"], ["--methods=a", "--json", "-"]),
        (["--methods"], ["--methods"]),
        (["--prefix", "1", "2", "--methods", "a"], ["--prefix", "1", "--prefix", "2", "--methods", "a"]),
        (["--domains", "a", "b", "--json", "-"], ["--domains", "a", "--domains", "b", "--json", "-"]),
        (["--text", "a", "b"], ["--text", "a", "b"]),
    ],
)
def test_one_flag_takes_several_values(given, spread):
    assert terminal.spread(["compare", *given]) == ["compare", *spread]


def test_generate_streams_and_ends_with_what_it_saved(run, tiny):
    arguments = ["generate", "Hello", "--model", tiny, "--method", "kivi:sink=0,recent=0", "--max-new-tokens", "80"]
    status, out, err = run(*arguments)
    assert status == 0 and errors(err) == []
    saved, ahead = out.splitlines()[-2:]
    size = r".* instead of .* in float32: [\d.]+x smaller, ([\d.]+x (smaller|larger) than|as large as) in 16 bits"
    tokens = r"\[kivi:sink=0,recent=0\] \d+ tokens, [\d.]+ tokens/s; cache of \d+ tokens, \d+ of them packed"
    assert re.fullmatch(f"{tokens}: {size}", saved)
    assert re.fullmatch(f"at 1,024 tokens: {size}", ahead)


def test_generate_says_when_nothing_is_packed_yet_and_what_will_be(run, tiny):
    status, out, _ = run("generate", "Hello", "--model", tiny, "--max-new-tokens", "8")
    packed, ahead = out.splitlines()[-2:]
    assert status == 0 and "tokens: nothing is packed yet, " in packed and "smaller" not in packed
    assert re.fullmatch(r"packing begins at 160 tokens; at 1,024 tokens: .*: [\d.]+x smaller, .*", ahead)
    _, out, _ = run("generate", "Hello", "--model", tiny, "--max-new-tokens", "8", "--method", "none")
    assert "packing" not in out and "packed" not in out and out.splitlines()[-1].startswith("[none] ")


def test_generate_json_has_bytes_and_bits(run, tiny):
    def result(*more):
        return json.loads(run("generate", "Hello", "--model", tiny, "--json", "-", *more)[1])

    young = result("--max-new-tokens", "4")
    assert young["packed_bytes"] == 0 and young["effective_bits"] is None and young["packs_at"] == 160
    assert young["window_bytes"] > 0 and young["foretold"]["ratio_fp16"] > 1
    later = result("--max-new-tokens", "80", "--method", "kivi:sink=0,recent=0")
    assert later["packed_bytes"] > 0 and later["effective_bits"] == pytest.approx(3.0)
    assert later["ratio_fp16"] == pytest.approx(later["fp16_cache_bytes"] / later["cache_bytes"])
    assert later["kernel"] in kernels.REGISTRY and later["tokens_per_s"] > 0
    assert later["cache_tokens"] == later["prompt_tokens"] + later["new_tokens"] - 1


class Piped:
    """Standard input that is not a terminal."""

    def __init__(self, data):
        self.buffer = io.BytesIO(data)

    def isatty(self):
        return False


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_generate_reads_its_prompt_from_standard_input(run, tiny, monkeypatch, arguments):
    given = json.loads(run("generate", "Grüße", "--model", tiny, "--max-new-tokens", "8", "--json", "-")[1])
    monkeypatch.setattr(sys, "stdin", Piped("Grüße\n".encode()))
    status, out, _ = run("generate", *arguments, "--model", tiny, "--max-new-tokens", "8", "--json", "-")
    assert status == 0 and json.loads(out)["text"] == given["text"]


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "prompt: it is empty"), (b" \n", "prompt: it is empty"), (b"a\xff", "not UTF-8 text .byte 1")],
)
def test_standard_input_that_is_no_prompt(run, tiny, monkeypatch, data, says):
    monkeypatch.setattr(sys, "stdin", Piped(data))
    status, out, err = run("generate", "--model", tiny)
    assert status == 2 and out == "" and re.search(says, err) and len(errors(err)) == 1


def test_a_prompt_is_not_waited_for_at_a_terminal(run, tiny, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Piped(b""))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    status, _, err = run("generate", "--model", tiny)
    assert status == 2 and "prompt: there is none; give some text, or -" in err


def test_generate_is_the_models_own_text_without_folding(run, tiny):
    status, out, _ = run(
        "generate", "Hello", "--model", tiny, "--method", "none", "--max-new-tokens", "20", "--json", "-"
    )
    assert status == 0
    from kvfold.models import load

    model, tokenizer, _ = load(tiny)
    chat = [{"role": "user", "content": "Hello"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    result = json.loads(out)
    assert result["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert result["prompt_tokens"] == inputs["input_ids"].shape[1]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages[5].content }}", "model: the chat template .* refuses this chat"),
        ("{% if 0 %}{% endif %}", "no tokens"),
    ],
)
def test_a_template_that_refuses_the_prompt_is_one_line(run, tmp_path, template, says):
    tokenizer = byte_tokenizer()
    save(tmp_path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    status, out, err = run("generate", "Hello", "--model", str(tmp_path))
    assert status == 2 and not out and re.search(says, err) and "Traceback" not in err
    assert run("generate", "Hello", "--raw", "--model", str(tmp_path), "--max-new-tokens", "1")[0] == 0


def test_raw_prompts_and_sampling(run, tiny):
    def text(*more):
        _, out, _ = run("generate", "Hello", "--model", tiny, "--max-new-tokens", "12", "--json", "-", *more)
        return json.loads(out)

    assert text("--raw")["prompt_tokens"] == 5
    sampled = [text("--temperature", "1", "--seed", str(seed))["text"] for seed in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]


# ---- what does not ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compare", "--methods", "abacus"], "method: 'abacus' .*kivi"),
        (["compare", "--methods", "none", "kivi:bits=5"], "bits=5 .*1, 2, 3, 4, 8"),
        (["compare", "--methods", "kivi:bit=2"], "'bit' .*bits"),
        (["compare", "--methods", "kivi:bits=two"], "bits=two .*integer"),
        (["compare", "--methods"], "--methods"),
        (["compare", "--text", "/not/there"], "text: cannot read"),
        (["compare", "--text", sys.executable], "text: .*not UTF-8"),
        (["compare", "--text", os.devnull], "text: .*empty"),
        (["compare", "--json", "/not/there/x.json"], "json: there is no folder"),
        (["compare", "--json", "/"], "json: / is a folder"),
        (["compare", "--tokens", "many"], "--tokens.*not a valid integer"),
        (["compare", "--tokens", "3"], "tokens: 3 is too small"),
        (["compare", "--chunk", "0"], "chunk: 0"),
        (["compare", "--prefix", "2", *SMALL[2:]], "prefix: 2 is too small"),
        (["compare", "--prefix", "320", "--tokens", "5000"], f"tokens: .*context of {CONTEXT}; give at most"),
        (["compare", "--dtype", "int4"], "dtype: 'int4' .*float32"),
        (["compare", "--device", "abacus"], "device: 'abacus' .*cpu"),
        (["compare", *SMALL, "--methods", "kivi:group=96"], "group"),
        (["compare", "--artefacts", "/not/there"], "artefacts: /not/there is not a folder"),
        (
            ["compare", "--prefix", "320", "4096", "--tokens", "64"],
            f"prefix: 4096 .*context of {CONTEXT}; give at most 944",
        ),
        (["compare", "--prefix", "320", "many"], "--prefix.*not a valid integer"),
        (
            ["domains", "--prefix", "320", "4096", "--tokens", "64"],
            f"prefix: 4096 .*context of {CONTEXT}; give at most",
        ),
        (["domains", "--prefix", "320", "63"], "prefix: 63; give at least 64"),
        (["domains", "--chunk", "0"], "chunk: 0"),
        (
            ["domains", "--domains", "prose", "--windows", "500", "--prefix", "320"],
            "text: pydoc_data.topics has .* 500 windows need",
        ),
        (["domains", "--text", "prose.txt"], "text: 'prose.txt' is not NAME=FILE"),
        (["domains", "--text", "a=/not/there"], "text: cannot read"),
        (["domains", "--domains", "poetry"], "domain: 'poetry' .*prose"),
        (["domains", "--windows", "0"], "windows: 0"),
        (["domains", "--prefix", "320", "--tokens", "5000"], f"tokens: .*context of {CONTEXT}"),
        (["generate", ""], "prompt: it is empty"),
        (["generate", " \n"], "prompt: it is empty"),
        (["generate", "Hi", "--max-new-tokens", "0"], "max-new-tokens: 0"),
        (["generate", "Hi", "--max-new-tokens", "99999"], f"context of {CONTEXT}"),
        (["generate", "Hi", "--temperature", "-1"], "temperature: -1"),
        (["generate", "Hi", "--temperature", "nan"], "temperature: nan"),
        (["generate", "Hi", "--method", "kivi:bits=5"], "bits=5"),
        (["explain", "--method", "innerq:mode=best"], "mode=best .*hybrid"),
        (["explain", "--abacus"], "--abacus"),
        (["abacus"], "abacus"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(run, tiny, arguments, says):
    if arguments[0] in ("compare", "domains", "generate", "explain"):
        arguments = [*arguments[:1], "--model", tiny, *arguments[1:]]
    status, out, err = run(*arguments)
    assert status == 2 and out == ""
    (line,) = errors(err)
    assert line.startswith("kvfold: error: ") and re.search(says, line)


@pytest.mark.parametrize("model", ["", "./nowhere", "nobody/nothing"])
def test_a_model_that_is_not_there(run, model):
    status, out, err = run("explain", "--model", model)
    (line,) = errors(err)
    assert status == 2 and out == "" and line.startswith("kvfold: error: model: ")


def test_a_model_without_rotary_embeddings_is_named(run, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=258, n_embd=64, n_layer=1, n_head=1, n_positions=CONTEXT, bos_token_id=0, eos_token_id=257
    )
    folder = save(tmp_path / "gpt2", GPT2LMHeadModel(config))
    for command in (["compare", *SMALL, "--methods", "squat_pre"], ["explain", "--method", "squat_pre"]):
        status, out, err = run(command[0], "--model", str(folder), *command[1:])
        (line,) = errors(err)
        assert status == 2 and out == "" and "rotary" in line


def test_a_head_that_the_group_does_not_divide_is_named(run, tmp_path):
    folder = save(tmp_path / "odd", tiny_llama(head_dim=40))
    status, _, err = run("explain", "--model", str(folder), "--method", "kivi")
    (line,) = errors(err)
    assert status == 2 and "head_dim" in line and "40" in line


@pytest.mark.parametrize("position", [0, 1, 2])
def test_nothing_is_written_when_something_is_wrong(run, tiny, tmp_path, position):
    out_file = tmp_path / "x.json"
    out_file.write_text("old")
    bad = [["--methods", "kivi:bits=5"], ["--tokens", "5000"], ["--prefix", "320", "4096"]][position]
    status, _, _ = run("compare", "--model", tiny, "--json", str(out_file), *bad)
    assert status == 2
    assert out_file.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("command, of", [("compare", " compare"), ("eval", " eval"), ("", "")])
def test_an_option_without_its_value_points_to_the_commands_help(run, command, of):
    status, out, err = run(*command.split(), "--model")
    assert (status, out) == (2, "") and f"(see kvfold{of} --help)" in err


def test_an_interrupt_exits_with_130(run, tiny, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "load", interrupted)
    status, out, err = run("compare", "--model", tiny)
    assert (status, out, err) == (130, "", "\nkvfold: interrupted\n")


@pytest.mark.slow
def test_a_real_interrupt_keeps_finished_rows_and_the_next_run_goes_on(tiny, tmp_path):
    command = [sys.executable, "-m", "kvfold", "compare", "--model", tiny, "--prefix", "512", "--tokens", "200"]
    command += [
        "--chunk",
        "1",
        "--json",
        str(tmp_path / "x.json"),
        "--methods",
        "none",
        *map("kivi:bits={}".format, (1, 3, 4)),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    sidecar = tmp_path / "x.json.partial"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if sidecar.exists() and len(sidecar.read_text().splitlines()) >= 2:
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.02)
    try:
        process.wait(timeout=60)
    except (
        subprocess.TimeoutExpired
    ):  # Python drops an interrupt that arrives within a callback: a person presses again
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == "" and "Traceback" not in err and "rows are kept" in err
    assert not (tmp_path / "x.json").exists()
    kept = len(sidecar.read_text().splitlines()) - 1
    assert kept >= 1
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and f"{kept} of 4 rows taken over" in done.stderr
    assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 4
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly():
    command = f"{sys.executable} -m kvfold methods | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1 and "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.slow
def test_the_whole_way_on_the_embedded_model(run, tmp_path):
    status, out, err = run(
        *["compare", "--prefix", "512", "--tokens", "64", "--new-tokens", "4", "--json", str(tmp_path / "x.json")],
        *["--methods", "none", "kivi:recent=32", "innerq"],
    )
    assert status == 0, err
    none, kivi, innerq = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert none["kld"] < 1e-6 and none["top1"] == 1
    # A trained model on plain English: neither lost nor by heart.
    assert 3 < none["ppl"] < 60
    for row in (kivi, innerq):
        assert 0 < row["kld"] < 0.5 and row["top1"] > 0.7
        assert row["cache_bytes"] < 0.5 * row["full_cache_bytes"]
    status, out, _ = run(
        "generate", "What is the capital of France? Answer with one word.", "--method", "kivi:bits=4,recent=0"
    )
    assert status == 0 and "Paris" in out


# ---- what is committed -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tables_of_readme_and_docs_are_those_of_the_rows():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "scripts/tables.py", "--check"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def domain_rows(**divergences):
    """Rows as ``kvfold domains`` writes them: two texts at each prefix; the second text's divergence is double the first's."""
    from kvfold.evaluation.domains import DomainRow

    return [
        DomainRow(spec, text, 0, prefix, 64, 3.0, 3.0 + 16 / prefix, 9.0, kld * factor, 0.9, None, 1.0, prefix, 64)
        for spec, by_prefix in divergences.items()
        for prefix, kld in by_prefix.items()
        for text, factor in (("prose", 1), ("code", 2))
    ]


def test_a_table_of_lengths_has_a_column_for_each_prefix(tmp_path):
    import dataclasses

    rows = domain_rows(
        **{
            "kivi": {1024: 0.2, 16384: 0.4},
            "kivi:sink=0,recent=128": {1024: 0.1, 16384: 0.3},
            "innerq": {1024: 0.05, 16384: 0.6},
            "commvq:artefact=somewhere/a.safetensors": {1024: 0.1, 16384: 0.1},
            "squat:recent=64": {1024: 0.1},
        }
    )
    result = {"header": {"prefixes": [1024, 16384]}, "rows": [dataclasses.asdict(row) for row in rows]}
    (tmp_path / "x.json").write_text(json.dumps(result))
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "scripts/tables.py"), "--lengths", "x.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "| method | effective bits | KL at 1,024 | 16,384 | of KIVI-2's at 1,024 | 16,384 |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| `kivi` | 3.00 | 0.3000 | 0.6000 | 1.00 | 1.00 |",
        "| `kivi:sink=0,recent=128` | 3.00 | 0.1500 | 0.4500 | 0.50 | 0.75 |",
        "| `innerq` | 3.00 | 0.0750 | 0.9000 | 0.25 | 1.50 |",
        "| `commvq` | 3.00 | 0.1500 | 0.1500 | 0.50 | 0.25 |",
        "| `squat:recent=64` | - | 0.1500 | - | 0.50 | - |",
    ]


def test_a_table_of_lengths_reads_files_of_one_prefix(tmp_path):
    """They have it in their header; a retrieval row's own was what its pairs filled."""
    import dataclasses

    rows = [dataclasses.asdict(row) for row in domain_rows(kivi={1024: 0.2}, innerq={1024: 0.05})]
    for row in rows:
        del row["prefilled"], row["tested"]
        row["prefix"] = 1003 if row["domain"] == "code" else 1024
    (tmp_path / "old.json").write_text(json.dumps({"header": {"prefix": 1024}, "rows": rows}))
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "scripts/tables.py"), "--lengths", "old.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "| method | effective bits | KL at 1,024 | of KIVI-2's at 1,024 |",
        "| --- | ---: | ---: | ---: |",
        "| `kivi` | 3.02 | 0.3000 | 1.00 |",
        "| `innerq` | 3.02 | 0.0750 | 0.25 |",
    ]
