"""Benchmarks: what of them runs without a GPU, and what they say where one is missing."""

import builtins
import csv
import importlib
import itertools
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvfold
from kvfold.bench import generation as generations
from kvfold.bench import matvec, memory, modes, plot, profile, rows
from kvfold.bench import static as buffers
from kvfold.cli import main
from kvfold.commands.bench import BENCHMARKS
from kvfold.errors import KVFoldError
from kvfold.kernels.device import HOPPER
from tiny_model import save, tiny_llama

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "rows"
GPU = [name for name in BENCHMARKS if name not in ("cpu", "plot")]


@pytest.fixture
def run(capsys):
    def run(*arguments):
        capsys.readouterr()
        status = main(list(arguments))
        return status, *capsys.readouterr()

    return run


# ---- command line ----------------------------------------------------------------------------------------------------


def test_bench_lists_every_benchmark(run):
    status, out, _ = run("bench", "--help")
    assert status == 0
    for name in BENCHMARKS:
        assert f"  {name}" in out


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_help_page(run, name):
    status, out, err = run("bench", name, "--help")
    assert status == 0 and err == ""
    assert "usage:" in out and ("--json" in out or name == "plot")


@pytest.mark.parametrize("name", sorted({*BENCHMARKS} - {"plot"}))
def test_no_benchmark_writes_rows_unless_asked(name):
    """``--rows`` has no default: a look at a benchmark must not change the committed rows."""
    module = importlib.import_module(f"kvfold.bench.{name}")
    parser = rows.options(name, module.__doc__, module.ROWS)
    assert parser.parse_args([]).rows is None and parser.parse_args(["--rows", "x.csv"]).rows == Path("x.csv")
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert f'options("{name}", __doc__, ROWS)' in source and '"--rows"' not in source


@pytest.mark.parametrize("name", ["attention", "encode", "modes", "prefill"])
def test_rows_go_to_the_file_that_is_named_and_to_no_other(run, tmp_path, monkeypatch, name):
    module = importlib.import_module(f"kvfold.bench.{name}")
    row = SimpleNamespace(p50_ms=1.0)
    given = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "run", lambda *args, **options: given.append([*args, *options.values()][-1]) or [row])
    monkeypatch.setattr(module, "line", lambda row: "a line")
    monkeypatch.setattr(module, "asdict", lambda row: {}, raising=False)
    monkeypatch.setattr(module, "table", lambda rows: [], raising=False)
    assert run("bench", name)[0] == 0
    assert run("bench", name, "--rows", "x.csv")[0] == 0
    assert given == [None, Path("x.csv")] and list(tmp_path.iterdir()) == []


def test_what_encodes_pages_is_compared_before_it_is_timed(monkeypatch):
    """On the CPU, with kernels in the interpreter: the gates of a prompt and of a step see a wrong code."""
    pytest.importorskip("triton")
    from helpers import ENCODING, interpreted_module
    from kvfold.bench import encode
    from kvfold.kernels import fold

    module = interpreted_module(
        "kvfold.kernels.fold.encode", *ENCODING, "kvfold.kernels.affine.encode", "kvfold.kernels.fold._encode"
    )
    monkeypatch.setitem(sys.modules, "kvfold.kernels.fold.encode", module)
    monkeypatch.setattr(fold, "encode", module, raising=False)
    work = encode.Work("fold", bits=0, context=256, layers=1, num_heads=1, num_kv_heads=1, head_dim=64)
    made = encode.make_layer(work, 256, torch.device("cpu"))
    assert encode.gate(work, made, encode.make_transform(work, made.keys)) <= work.limit
    step = encode.Step(replace(work, layers=0, context=256), torch.device("cpu"))
    assert step.gate() <= work.limit

    def encode_wrong(work, keys, values, how):
        fields = [form.encode(x.float()) for form, x in zip(work.formats, (keys, values), strict=True)]
        fields[1]["codes"][..., ::16] ^= -1
        return tuple(fields)

    monkeypatch.setattr(encode, "reference", encode_wrong)
    assert encode.gate(work, made, encode.make_transform(work, made.keys)) > work.limit
    assert encode.Step(replace(work, layers=0, context=256), torch.device("cpu")).gate() > work.limit


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("name", GPU)
def test_without_a_gpu_a_benchmark_says_so(run, name):
    status, out, err = run("bench", name)
    assert status == 2 and out == ""
    assert "a CUDA GPU is needed" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["memory", "--model", "gpt-5"], "--model"),
        (["memory", "--output", "1"], "output=1"),
        (["memory", "--batches", "8"], "batches=[8]"),
        (["memory", "--caches", "kivy"], "kivy"),
        (["memory", "--caches", "kivi:bits=5"], "bits=5"),
        (["profile", "--contexts", "7"], "context=7"),
        (["profile", "--methods", "kivi", "kivy"], "kivy"),
        (["decode", "--methods", "kivi", "kivy"], "kivy"),
        (["generate", "--caches", "kivi", "kivy"], "kivy"),
        (["generate", "--tokens", "3"], "tokens=3"),
        (["generate", "--prompts", "128", "40000"], "prompts=40000"),
        (["generate", "--model", "gpt-5"], "--model"),
        (["cpu", "--methods", "kivi", "kivy"], "kivy"),
        (["cpu", "--turns", "1"], "turns=1"),
        (["matvec", "--models", "gpt-5"], "--models"),
        (["matvec", "--lengths", "100"], "length=100"),
        (["modes", "--lengths", "100"], "length=100"),
        (["plot", "--nonsense"], "--nonsense"),
        (["plot", "pie"], "pie is not a plot"),
    ],
)
def test_wrong_input_is_named(run, arguments, named):
    status, out, err = run("bench", *arguments)
    assert status == 2 and out == "" and named in err


# ---- rows ------------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    name: str
    value: float
    count: int | None


def test_rows_are_appended_and_read_back(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    rows.append(path, [Sample("a", 1.23456789, 3)])
    rows.append(path, [Sample("b, c", float("inf"), None)])
    rows.append(path, [])
    assert rows.read(path) == [
        {"name": "a", "value": "1.2346", "count": "3"},
        {"name": "b, c", "value": "inf", "count": ""},
    ]


def test_rows_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("name,other\n")
    with pytest.raises(KVFoldError, match="has other columns"):
        rows.append(path, [Sample("a", 1.0, 1)])
    assert path.read_text() == "name,other\n"


def test_missing_rows_are_named(tmp_path):
    with pytest.raises(KVFoldError, match=r"nowhere\.csv"):
        rows.read(tmp_path / "nowhere.csv")


@pytest.mark.parametrize("path", sorted(COMMITTED.glob("*.csv")), ids=lambda path: path.stem)
def test_committed_rows_have_one_header_and_whole_lines(path):
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    assert len(lines) > 1 and {len(line) for line in lines} == {len(lines[0])}
    assert lines[0] not in lines[1:]
    assert all(row["commit"] not in ("", "unknown") for row in rows.read(path))


# ---- cpu -------------------------------------------------------------------------------------------------------------


def test_cpu_prints_a_row_per_cache_and_appends_them(run, tmp_path):
    model, path = str(save(tmp_path / "tiny")), tmp_path / "cpu.csv"
    arguments = [
        "cpu",
        "--model",
        model,
        "--context",
        "700",
        "--turns",
        "4",
        "--rows",
        str(path),
        "--methods",
        "kivi",
        "none",
    ]
    status, out, _ = run("bench", *arguments)
    assert status == 0 and [line.split()[0] for line in out.splitlines()] == ["DynamicCache", "kivi", "none"]
    status, out, _ = run("bench", *arguments, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert [row["cache"] for row in found] == ["DynamicCache", "kivi", "none"]
    assert all(row["p50_ms"] > 0 and row["context"] == 700 for row in found)
    assert len(rows.read(path)) == 6


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["kivi:recent=32", "innerq:paper=true", "innerq", "squat", "squat:paper=true"])
def test_a_batch_prefilled_in_parts_is_the_batch(method):
    model = tiny_llama()
    ids = memory.prompts(model, 5, 203)
    ids, tokens = ids[:, :200], ids[:, 200:]
    made = type("Eager", (generations.EagerFoldedGeneration,), {"method": method, "kernel": "reference"})
    with torch.no_grad():
        parts, whole = made(model, ids, 4, 2), made(model, ids, 4, 5)
        got, want = (memory.logits_of(x, tokens) for x in (parts, whole))
    assert (got - want).norm() < 1e-4 * want.norm()
    for a, b in zip(parts.cache.folded, whole.cache.folded, strict=True):
        assert (a.lens, a.packed, a.columns.count, a.slabs.fixed) == (b.lens, b.packed, b.columns.count, b.slabs.fixed)
    assert parts.nbytes() == whole.nbytes()
    kvfold.unfold(model)


def test_transformers_own_cache_is_the_baseline_that_it_is_without_us():
    model = tiny_llama()
    ids = memory.prompts(model, 3, 60)
    ids, tokens = ids[:, :56], ids[:, 56:]
    with torch.no_grad():
        generation = generations.PlainGeneration(model, ids, 5, 3)
        got = memory.logits_of(generation, tokens)
        want = model(torch.cat([ids, tokens], 1)).logits[:, 56:].float()
    assert (got - want).norm() < 1e-4 * want.norm()
    assert generation.nbytes() == 2 * 2 * 3 * 2 * 60 * 64 * 4  # layers, K and V, batch, heads, tokens, dims, float32


def test_a_static_buffer_decodes_as_a_growing_cache(monkeypatch):
    monkeypatch.setattr(buffers, "sdpa_kernel", lambda *args, **kwargs: nullcontext())  # it names kernels of GPUs
    model = tiny_llama().to(torch.bfloat16)
    ids = memory.prompts(model, 5, 44)
    ids, tokens = ids[:, :40], ids[:, 40:]
    with torch.no_grad():
        static, plain = generations.StaticGeneration(model, ids, 5, 2), generations.PlainGeneration(model, ids, 5, 5)
        got, want = (memory.logits_of(x, tokens) for x in (static, plain))
    assert (got - want).norm() < 1e-2 * want.norm()
    assert static.nbytes() == 2 * 2 * 5 * 2 * 45 * 64 * 2  # one slot more than the growing cache has


@pytest.mark.parametrize("prompt, output", [(161, 338), (10, 3), (10, 2)])
def test_steps_between_captured_lengths_are_interpolated(monkeypatch, prompt, output):
    generation = generations.StaticGeneration(None, torch.zeros(1, prompt, dtype=torch.long), output, 1)
    generation.input = torch.zeros(1, 1, dtype=torch.long)
    captured = []

    def step(used):
        captured.append(used)
        return 2.0 + 0.5 * used, 0.1

    monkeypatch.setattr(generation, "_step_seconds", step)
    once, total = generation.decode(torch.zeros(1, 1, dtype=torch.long))
    assert total == pytest.approx(sum(2.0 + 0.5 * n for n in range(prompt + 1, prompt + output)))
    assert once == pytest.approx(0.1 * len(captured)) and len(captured) <= generations.POINTS
    assert (captured[0], captured[-1]) == (prompt + 1, prompt + output - 1)


@pytest.mark.parametrize("kind", ["fits", "memory", "capture", "other"])
def test_an_attempt_says_when_memory_ended_and_nothing_else(monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)

    class Attempt:
        def run(self):
            if kind == "fits":
                return "timing"
            if kind == "other":
                raise RuntimeError("a bug")
            try:
                raise torch.OutOfMemoryError("no memory")
            finally:
                if kind == "capture":
                    raise RuntimeError("operation failed due to a previous error during capture")

    if kind == "other":
        with pytest.raises(RuntimeError, match="a bug"):
            memory.attempt(Attempt)
    else:
        assert memory.attempt(Attempt) == ("timing" if kind == "fits" else None)


@pytest.mark.parametrize("fixed, each, step", [(10.0, 1.0, 8), (3.0, 0.37, 4), (79.0, 0.001, 100), (0.0, 70.0, 1)])
@pytest.mark.parametrize("bend", [0.0, 1e-5, -1e-7])
def test_search_finds_the_largest_batch(fixed, each, step, bend):
    cap = 80.0

    def need(batch):
        return fixed + each * batch + bend * batch * batch

    def run(batch):
        tried.append(batch)
        return need(batch) if need(batch) <= cap else None

    tried, expected = [], None
    for batch in itertools.count(step, step):
        if need(batch) > cap:
            break
        expected = batch
    assert memory.Search(run, step, cap)([step, 2 * step]) == expected
    assert expected + step in tried and len(tried) == len(set(tried)) < 16  # the next one was seen to fail


def test_search_ends_where_nothing_fits():
    assert memory.Search(lambda batch: None, 8, 80.0)([8, 16]) is None


def result(cache, batch, peak, rate, decode_rate, fits=True):
    return SimpleNamespace(
        cache=cache, batch=batch, fits=fits, peak_gb=peak, tokens_per_s=rate, decode_tokens_per_s=decode_rate
    )


def test_gains_compare_equal_batches_and_largest_ones():
    found = memory.gains(
        [
            result("bf16", 10, 20.0, 100.0, 120.0),
            result("bf16", 20, 40.0, 150.0, 200.0),
            result("bf16", 30, None, None, None, fits=False),
            result("kivi", 10, 16.0, 90.0, 100.0),
            result("kivi", 20, 10.0, 180.0, 220.0),
            result("kivi", 50, 40.0, 450.0, 500.0),
        ]
    )
    (gain,) = found
    assert (gain.cache, gain.baseline, gain.batch) == ("kivi", "bf16", 2.5)
    assert gain.memory == (1.25, 4.0) and gain.throughput == 3.0 and gain.decode_throughput == 2.5


# ---- profile ---------------------------------------------------------------------------------------------------------


class Event:
    """As the profiler records one."""

    def __init__(self, name, start, end, device=False):
        self.values = name, start, end
        kinds = torch.autograd.DeviceType
        self.device = kinds.CUDA if device else kinds.CPU

    def name(self):
        return self.values[0]

    def start_ns(self):
        return self.values[1]

    def end_ns(self):
        return self.values[2]

    def duration_ns(self):
        return self.values[2] - self.values[1]

    def device_type(self):
        return self.device


def test_profile_counts_what_happens_in_the_step():
    events = [
        Event(profile.MARK, 100, 200),
        Event(profile.MARK, 105, 300, device=True),
        Event("cudaLaunchKernel", 110, 111),
        Event("cuLaunchKernelEx", 112, 113),
        Event("cudaGraphLaunch", 114, 115),
        Event("cudaStreamSynchronize", 120, 121),
        Event("cudaDeviceSynchronize", 250, 260),  # after the step
        Event("aten::add", 110, 112),
        Event("kernel", 130, 1_000_130, device=True),
        Event("kernel", 130, 1_000_130, device=True),
        Event("Memcpy HtoD (Pinned -> Device)", 130, 140, device=True),
        Event("Memcpy DtoH (Device -> Pageable)", 130, 140, device=True),
        Event("Memcpy DtoD (Device -> Device)", 130, 140, device=True),
        Event("Memset (Device)", 130, 140, device=True),
    ]
    assert profile.count(events) == {
        "kernels": 2, "launches": 3, "to_device": 1, "to_host": 1, "on_device": 2, "waits": 1,
        "gpu_ms": 2.0,
    }  # fmt: skip


def test_profile_refuses_a_recording_without_kernels_or_step():
    with pytest.raises(KVFoldError, match="recorded 0 steps"):
        profile.count([])
    with pytest.raises(KVFoldError, match="no kernel"):
        profile.count([Event(profile.MARK, 0, 10)])


def test_profile_says_what_grows():
    same = dict.fromkeys(profile.COLUMNS, 3)

    def row(context, **changed):
        return SimpleNamespace(method="kivi", mode="eager", closes=False, context=context, **{**same, **changed})

    assert profile.grows([row(4096), row(65536)]) == []
    (found,) = profile.grows([row(4096), row(65536, allocations=5)])
    assert "allocations 3 / 5" in found


def test_a_cache_says_when_it_closes_a_block():
    model = tiny_llama()
    cache = kvfold.fold(model, "kivi:recent=32")
    with torch.no_grad():
        model(torch.zeros(1, 100, dtype=torch.long), past_key_values=cache)
        for _ in range(40):
            before, left = cache.folded[0].packed[0], profile.closing_in(cache)
            model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
            assert (cache.folded[0].packed[0] > before) == (left == 1)
    kvfold.unfold(model)


# ---- modes -----------------------------------------------------------------------------------------------------------


def test_modes_measures_symmetric_first():
    works = modes.works()
    assert len(works) == 3 * 9 * 3
    for group in zip(*[iter(works)] * 3, strict=True):
        assert [work.method for _, work in group] == ["innerq-sym", "innerq-asym", "innerq-hybrid"]
        assert len({(name, work.context, work.head_dim) for name, work in group}) == 1


def test_modes_prints_the_figure_from_saved_rows(run):
    status, out, _ = run("bench", "modes", "--saved", str(COMMITTED / "encode.csv"))
    head, *lines = out.splitlines()
    assert status == 0 and head.split()[-3:] == ["hybrid", "/", "sym"] and len(lines) >= 5
    assert all(float(line.split()[-1]) > 0 for line in lines)
    status, _, err = run("bench", "modes", "--saved", str(COMMITTED / "attention.csv"))
    assert status == 2 and "attention.csv has no row" in err


def test_the_figure_takes_the_last_row_of_a_mode():
    def row(work, ms):
        return {"work": work, "p50_ms": ms, "num_kv_heads": 8, "head_dim": 128, "context": 512}

    rows = [row("encode one layer innerq-sym 2-bit g32", "1"), row("llama-2-13b encode sym", 2.0)]
    rows += [row("llama-2-13b encode hybrid", 3.0), row("llama-2-13b encode asym", None), row("encode innerq-sym", 9.0)]
    assert modes.table(rows)[1].split() == ["8", "128", "512", "2.0000", "-", "3.0000", "1.50"]


def test_a_row_as_json_is_one_object(capsys):
    rows.show(Sample("a", 1.5, None), "text", True)
    rows.show(Sample("a", 1.5, None), "text", False)
    first, second = capsys.readouterr().out.splitlines()
    assert json.loads(first) == {"name": "a", "value": 1.5, "count": None} and second == "text"


# ---- matvec ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", matvec.LAYOUTS)
@pytest.mark.parametrize("side", matvec.SIDES)
def test_a_product_reads_the_storage_of_its_layout(side, layout):
    product = matvec.Product("llama-3.1-8b", side, layout, 1024)
    inner = {"key": "channel", "value": "token"}  # along what the product sums
    assert (product.format.axis == inner[side]) == (layout != "outer")
    assert product.format.bits == (3.5 if layout == "inner-hybrid" else 3.0)
    assert product.nbytes == 8 * 1024 * 128 * product.format.bits / 8
    operands = matvec.Operands(product, 2, torch.device("cpu"))
    assert operands.reference().shape == (8, 4, 1024 if side == "key" else 128)
    assert all(torch.equal(x[0], x[1]) for x in operands.fields.values())


def test_the_two_tables_compare_with_matmul_and_with_outer_groups():
    def row(layout, ms, context=512):
        return SimpleNamespace(work=f"llama-2-13b q K' {layout}", context=context, p50_ms=ms, ratio=ms and 1 / ms)

    lines = matvec.tables([row("outer", 0.5), row("inner", 0.25), row("outer", None, 1024), row("inner", 0.5, 1024)])
    assert [line.split()[-2:] for line in lines] == [["512", "1024"], ["2.00", "-"], ["4.00", "2.00"], ["2.00", "-"]]


@pytest.mark.slow
def test_product_kernels_compile_without_spills():
    pytest.importorskip("triton")
    from triton.experimental.gluon._runtime import GluonASTSource

    from aot.report import _compile
    from kvfold.bench._matvec_gluon import scores_kernel, values_kernel
    from kvfold.kernels.affine.decode import MODES
    from kvfold.kernels.device import STATIC_SHARED

    pointers = {"q_ptr": "*fp16", "meta": "*fp16", "codes": "*i16", "aux": "*i16", "scale": "fp32"}
    pointers |= dict.fromkeys(("packed_len_ptr", "out_ptr", "p_ptr"), "*i32")
    pointers |= dict.fromkeys(("part_out", "part_top", "part_sum"), "*fp32")
    for kernel, side, layout in ((scores_kernel, "key", "inner"), (values_kernel, "value", "outer")):
        form = matvec.Product("llama-3.1-8b", side, layout, 512).format
        fixed = {"D": 128, "BITS": 2, "AXIS": 1, "MODE": MODES[form.mode], "GROUP": 32, "NT": 1, "NB": 4}
        fixed |= {"CENTER": False} if side == "key" else {}
        assert form.axis == "channel"
        names = kernel.arg_names
        signature = {n: "constexpr" if n in fixed else pointers.get(n, "i32") for n in names}
        source = GluonASTSource(kernel, signature, {(names.index(n),): v for n, v in fixed.items()}, {})
        report = _compile(source, 90, num_warps=4)
        assert report.spilled == 0 and report.registers <= 168 and report.shared <= STATIC_SHARED + 1024
        assert report.instructions["HMMA"] > 64


# ---- plots -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    pytest.importorskip("matplotlib")
    return plot.draw(list(plot.PLOTS), COMMITTED, tmp_path_factory.mktemp("plots"))


def test_the_committed_rows_can_be_drawn(drawn, tmp_path):
    assert [path.stem for path in drawn] == list(plot.PLOTS)
    (picture,) = plot.draw(["memory"], COMMITTED, tmp_path, "png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    for path in (*drawn, picture):
        assert 10_000 < path.stat().st_size < 150_000


def test_a_plot_shows_labels_units_and_baseline(drawn):
    text = {path.stem: path.read_text() for path in drawn}
    for name, words in {
        "speed": ("tokens of context", "times as fast", "torch.matmul, fp16", "p V"),
        "floor": ("% of the byte floor", "fastest fp16 kernel"),
        "memory": ("peak memory, GB", "batch", "cap", "bf16"),
        "throughput": ("tokens/s, prefill included", "decoding alone", "bf16"),
    }.items():
        for word in words:
            assert word in text[name], (name, word)


def test_committed_plots_are_small_and_all_there():
    folder = COMMITTED.parent.parent / "docs" / "plots"
    assert {path.stem for path in folder.glob("*.svg")} == set(plot.PLOTS) | {"pareto"}  # which scripts/tables.py draws
    assert all(path.stat().st_size < 150_000 for path in folder.iterdir())


def test_plots_name_the_file_that_is_missing(run, tmp_path):
    pytest.importorskip("matplotlib")
    status, _, err = run("bench", "plot", "memory", "--rows", str(tmp_path), "--out", str(tmp_path / "out"))
    assert status == 2 and "memory.csv" in err and not (tmp_path / "out").exists()


def test_without_matplotlib_the_extra_is_named(run, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    status, _, err = run("bench", "plot")
    assert status == 2 and "pip install 'kvfold[plot]'" in err


def test_attention_prints_a_json_object_per_row(monkeypatch, capsys):
    from kvfold.bench import attention

    saved = [row for row in rows.read(attention.ROWS) if row["kernel"] == "gluon"][:2]
    numbers = {"batch": int, "p50_ms": float, "error": float, "limit": float, "ratio": float}
    found = [rows.Row(**{k: numbers.get(k, str)(v) for k, v in row.items()}) for row in saved]
    monkeypatch.setattr(attention, "run", lambda works, dtype, path: iter(found))
    assert attention.main(["--json", "--calls", "decode"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(x["p50_ms"], x["error"], x["limit"]) for x in printed] == [(x.p50_ms, x.error, x.limit) for x in found]


@pytest.mark.parametrize("method, kernel", [
    ("commvq", "tables"), ("vqllm", "blocks"), ("tasq", "blocks"), ("tasq:bits=2,values=fold", "tables"),
    ("kvquant", "blocks"), ("turboquant", "blocks"), ("qjl", "fragments"),
    ("kvarn", "blocks"), ("nova", "blocks"), ("gsrq", "blocks"),
])  # fmt: skip
def test_formats_are_measured_in_the_kernel_that_serves_them(method, kernel, monkeypatch):
    pytest.importorskip("triton")
    from kvfold.bench import attention, storage
    from kvfold.kernels.common import tables

    monkeypatch.setattr(tables, "device_info", lambda device: HOPPER)
    made = storage.formats
    monkeypatch.setattr(storage, "formats", lambda name, heads, dim, _: made(name, heads, dim, torch.device("cpu")))
    assert attention.Work(method, 0, 1, 1024).kernel == kernel
    if kernel == "tables":  # 16 query rows of a KV head, and long calls, which are unpacked
        assert attention.Work(method, 0, 1, 1024, query_tokens=4).kernel == "blocks"
        assert attention.Work(method, 0, 1, 1024, query_tokens=512).kernel == "tables"
