"""Every command with bad input: one line that says what and what is allowed, status 2, nothing written, no traceback.

Status 2 is for what was asked; nothing may come of it, so each case also checks that its folder holds what it held.
"""

import os
import re
from pathlib import Path

import pytest

import kvfold
from kvfold.cli import main
from kvfold.errors import KVFoldError, MethodError
from kvfold.methods import REGISTRY
from tiny_model import save, tiny_llama

HUGE = str(10**30)

BAD = [
    # numbers
    ("generate Hi --seed -1", "seed.*-1 is not allowed; allowed: 0 to 9223372036854775807"),
    ("generate Hi --seed 9223372036854775808", "seed.*allowed: 0 to 9223372036854775807"),
    (f"generate Hi --seed {HUGE}", "seed.*allowed: 0 to"),
    ("generate Hi --seed one", "seed.*not a valid integer"),
    ("generate Hi --seed 1.5", "seed.*not a valid integer"),
    ("compare --seed 18446744073709551616", "seed.*allowed: 0 to"),
    ("calibrate --text prose --out x --seed -1", "seed.*allowed: 0 to"),
    ("chat --seed -1", "seed.*allowed: 0 to"),
    ("generate Hi --temperature 1e-300", "temperature: 1e-300; give 0, or 0.001 to 1000"),
    ("generate Hi --temperature 1e308", "temperature: 1e\\+308; give 0"),
    ("generate Hi --temperature -0.5", "temperature: -0.5"),
    ("chat --temperature nan", "temperature: nan"),
    ("generate Hi --max-new-tokens -1", "max-new-tokens: -1"),
    (f"generate Hi --max-new-tokens {HUGE}", "max-new-tokens: .*context"),
    ("compare --tokens 0", "tokens: 0 is too small"),
    (f"compare --prefix {HUGE}", "prefix: .*context"),
    ("compare --prefix -5", "prefix: -5 is too small"),
    ("compare --prefix 320 --tokens 64 --new-tokens 0", "new_tokens: 0 is too small"),
    ("compare --chunk -1", "chunk: -1"),
    ("domains --windows 10001", "windows: 10001; give at most 10000"),
    (f"domains --windows {HUGE} --domains retrieval", "windows: .*give at most 10000"),
    ("domains --prefix 320 --tokens 64 --windows 10000", "text: .* 10000 windows need"),
    ("calibrate --text prose --out x --tokens -1", "tokens: -1 is too small"),
    ("calibrate --text prose --out x --tokens 99999999999", "text: .*fewer --tokens"),
    ("bench cpu --context -1", "context=-1 is not allowed; allowed: 6 or more"),
    ("bench cpu --turns 0", "turns=0 is not allowed"),
    # options of methods
    ("generate Hi --method none:bits=2", "none: option 'bits' has no effect"),
    ("generate Hi --method squat:rank=9999", "squat: rank=9999 is not allowed; allowed: 0 to 64"),
    (f"generate Hi --method fold:recent={HUGE}", "fold: recent=.*allowed: 0 to 1048576"),
    (f"explain --method gear:seed={HUGE}", "gear: seed=.*allowed: 0 to"),
    ("compare --methods kivi:bits=", "is not an option"),
    ("compare --prefix 320 --tokens 64 --methods commvq", "commvq: artefact is missing"),
    ("compare --prefix 320 --tokens 64 --methods commvq:artefact=nowhere.safetensors", "artefact: there is no file"),
    ("compare --prefix 320 --tokens 64 --methods kvquant:artefact=prose", "artefact: .*not a safetensors file"),
    ("compare --prefix 320 --tokens 64 --methods kvquant:artefact=folder", "artefact: the folder folder holds no"),
    ("calibrate --text prose --out x --method kivi", "learns nothing beforehand"),
    ("calibrate --text prose --out x --method k=tasq:bits=2+v=fold", "several parts.* give tasq:bits=2"),
    ("calibrate --text prose --out x --method kvquant --preset paper", "preset: kvquant has none"),
    ("calibrate --text prose --out x --method kvquant --encoder mlp", "encoder: kvquant has none"),
    ("calibrate --text prose --out x --preset slow", "preset: 'slow' is not known; allowed: fast"),
    # files that are read
    ("compare --text nowhere", "text: cannot read 'nowhere': No such file"),
    ("compare --text folder", "text: cannot read 'folder': Is a directory"),
    ("compare --text empty", "text: empty is empty"),
    ("compare --text bytes", "text: bytes is not UTF-8 text \\(byte 3\\)"),
    ("compare --text late", "text: late is not UTF-8 text \\(byte 1048577\\)"),
    ("compare --text utf16", "text: utf16 is not UTF-8 text"),
    ("compare --text zeros", "text: zeros holds zero bytes"),
    ("compare --text /dev/zero", "text: /dev/zero holds zero bytes"),
    ("compare --text /dev/urandom", "text: /dev/urandom is not UTF-8 text|holds zero bytes"),
    ("compare --prefix 320 --tokens 64 --text word", "text: word has 4 tokens, and"),
    ("domains --text a=word --domains prose --prefix 320 --tokens 64", "text: word has 4 tokens"),
    ("domains --text a=list.jsonl", "text: line 1 of list.jsonl is not a JSON object"),
    ("domains --text =word", "is not NAME=FILE"),
    ("domains --text \udcff=word", "a domain's name: it is not UTF-8 text"),
    ("calibrate --text nowhere --out x", "text: cannot read"),
    ("calibrate --text prose --text nowhere --out x", "text: cannot read 'nowhere'"),
    ("explain --model nowhere/", "model: "),
    ("explain --model folder", "model: the folder folder has no config.json"),
    ("explain --model word", "model: word is a file but not a .gguf file"),
    ("explain --model broken", "model: broken cannot be loaded"),
    ("explain --model empty.gguf", "model: "),
    ("artefact info empty", "artefact: .*not a safetensors file"),
    ("artefact info folder", "artefact: the folder folder holds no"),
    ("artefact verify nowhere.safetensors", "artefact: there is no file"),
    ("artefact push word folder", "not a safetensors file"),
    ("artefact push folder folder", "artefact: there is no file folder"),
    ("bench modes --saved bytes", "rows: bytes is not a CSV file"),
    ("bench modes --saved folder", "rows: cannot read folder: Is a directory"),
    # the home of nobody
    ("explain --model ~nobody-here/model", "model: there is no folder or file ~nobody-here/model"),
    ("explain --method commvq:artefact=~nobody-here/a", "artefact: there is no file, folder or hub id ~nobody-here/a"),
    ("compare --text ~nobody-here/a.txt", "text: cannot read '~nobody-here/a.txt': No such file"),
    ("compare --artefacts ~nobody-here", "artefacts: ~nobody-here is not a folder"),
    ("compare --force", "force: there is no file to replace"),
    ("domains --force --json -", "force: there is no file to replace"),
    ("compare --json ~nobody-here/a.json", "json: there is no folder .*~nobody-here"),
    ("report ~nobody-here", "results: there is no ~nobody-here"),
    ("calibrate --text word --out ~nobody-here/a", "out: there is no folder .*~nobody-here"),
    # files that are written
    ("compare --json folder", "json: folder is a folder"),
    ("compare --json nowhere/x", "json: there is no folder .*nowhere"),
    ("compare --json word/x", "json: cannot write word/x: Not a directory"),
    (f"compare --json {'n' * 300}", "json: cannot write n*: File name too long"),
    ("compare --json loop", "json: cannot write loop: Too many levels of symbolic links"),
    ("generate Hi --json folder", "json: folder is a folder"),
    ("explain --json nowhere/x", "json: there is no folder"),
    ("methods --json folder", "json: folder is a folder"),
    ("domains --json folder", "json: folder is a folder"),
    ("explain --json prose", "json: prose exists and is not JSON; give another name, or remove it"),
    ("report list.jsonl --out prose", "out: prose exists and is not a page; give another name, or remove it"),
    ("calibrate --text prose --out folder", "out: folder is a folder"),
    ("calibrate --text prose --out nowhere/x", "out: there is no folder"),
    ("calibrate --text prose --out word", "out: word exists .not a sound artefact.; allowed: another name, or --force"),
    ("calibrate --text prose --out fifo --force", "out: fifo is a device or pipe"),
    ("bench cpu --rows folder", "rows: folder is a folder"),
    # text
    ("generate \udcff\udcfe", "prompt: it is not UTF-8 text"),
    ("chat --system \udcff", "system: it is not UTF-8 text"),
    ("generate Hi --method \udcff", "method: "),
    ("generate Hi --device meta", "device: 'meta' is unknown or not there"),
    ("generate Hi --device cuda:99", "device: 'cuda:99' is unknown or not there"),
    ("generate Hi --device cpu --compile", "compile: device=cpu is not allowed: .*allowed: cuda"),
    ("generate Hi --dtype float8", "dtype: 'float8' is unknown; allowed: float32"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("misuse")
    save(folder / "model")
    for name, content in {
        "empty": b"",
        "empty.gguf": b"",
        "word": b"word",
        "bytes": b"abc\xff\xfe",
        "late": b"a" * 1048575 + b"\xc3\xa9" + b"\xff",
        "utf16": "text".encode("utf-16"),
        "zeros": b"a\0b",
        "list.jsonl": b"[1, 2]\n",
        "prose": b"The cache was folded twice. " * 400,
    }.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"model_type": ')
    return folder


UNLOADED = [
    *(f"{command} --method" for command in ("generate Hi", "chat", "explain")),
    *(f"{command} --methods" for command in ("compare --text prose", "domains", "eval --out results")),
]


def held(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in folder.rglob("*")}


@pytest.mark.parametrize(("command", "says"), BAD, ids=[ascii(command)[:70] for command, _ in BAD])
def test_bad_input_is_one_line(command, says, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    arguments = command.split(" ")
    if (
        arguments[0] in ("compare", "domains", "generate", "explain", "chat", "calibrate")
        and "--model" not in arguments
    ):
        arguments += ["--model", "model"]
    before = held(place)
    status = main(arguments)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not re.match(r"kvfold: (loading|checking|converting|threads)", line)]
    assert status == 2 and out == "", err
    assert len(lines) == 1 and lines[0].startswith("kvfold: error: ") and re.search(says, lines[0]), err
    assert held(place) == before


@pytest.mark.parametrize(
    ("command", "spec"),
    [(command, spec) for command in UNLOADED for spec in ("commvq", "commvq:artefact=prose", "fold+0=tasq")]
    + [("recommend --budget 2.5 --method", f"tasq:bits=2,values=fold{more}") for more in ("", ",artefact=prose")],
)
def test_artefacts_are_looked_at_before_a_model_is_loaded(command, spec, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    before = held(place)
    assert main([*command.split(" "), spec, "--model", "model"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("kvfold: threads")]
    assert len(lines) == 1 and re.match("kvfold: error: .*artefact", lines[0]) and held(place) == before


@pytest.mark.parametrize("value", [None, 5, b"fold", ["fold"], REGISTRY["fold"]], ids=str)
def test_a_method_of_another_type_is_refused(value):
    model = tiny_llama()
    for give in (
        lambda: kvfold.fold(model, value),
        lambda: kvfold.explain(model, value),
        lambda: kvfold.Pair("fold", value),
        lambda: kvfold.Recipe(value),
        lambda: kvfold.Recipe("fold", layers={1: value}),
        lambda: kvfold.folding(model, value).__enter__(),
    ):
        with pytest.raises(
            MethodError, match=r"is not a method; allowed: text as in 'fold:bits=2', or a kvfold.Method"
        ):
            give()


@pytest.mark.parametrize("value", [1.5, None, b"01", -1, True, [0.0]], ids=str)
def test_layers_of_another_type_are_refused(value):
    with pytest.raises(MethodError, match="is not a layer; allowed: numbers"):
        kvfold.Recipe("fold", keep=value)
    with pytest.raises(MethodError, match=r"is not a mapping; allowed: \{5: METHOD"):
        kvfold.Recipe("fold", layers=[value])


@pytest.mark.parametrize("value", ["9", 1.5, True, 0, -1], ids=str)
@pytest.mark.parametrize("always", [False, True])
def test_a_max_length_that_is_none_is_refused_before_anything_changes(value, always):
    model = tiny_llama()
    with pytest.raises(KVFoldError, match=r"max_length: .* allowed: a number of tokens from 1 on, or None"):
        kvfold.fold(model, max_length=value, always=always)
    assert model.config._attn_implementation == "sdpa"
