"""What the package makes once and keeps is made of ordinary tensors, whatever is around its first use."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kvfold
from helpers import llama, logits, prompt, relative
from kvfold.arithmetic import beside, lasting
from kvfold.errors import UnsupportedModelError

pytestmark = [
    pytest.mark.cpu_only("settings of torch on the host"),
    pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated"),
]

ROOT = Path(kvfold.__file__).parent

OTHERS = {
    "arithmetic": "the mechanism",
    "engines.transformers.attentions": "source of classes, no tensors",
    "engines.transformers.compiled": "compiled functions by model",
    "engines.transformers.fused": "how norms round, found out by an `ordinary` function",
    "engines.transformers.names": "names of arguments",
    "engines.transformers.originals": "names of attention implementations",
    "engines.transformers.profiles": "tokenizers by model",
    "engines.vllm.backend": "classes",
    "calibration.subspace": "sums of one run, which are taken out at its end",
    "evaluation.report.page": "summaries of one page, while it is made",
    "evaluation.suites": "texts of a suite",
    "kernels.call": "what belongs to one call",
    "kernels.paged.call": "what belongs to one step",
    "kernels.paged.layout": "places of fields, no tensors",
    "methods.specs": "classes",
    "models": "what a file's tensors are called, while it is read",
    "files": "open files",
}
"""Modules that may keep something by other means, and what."""

KEEPERS = {"lru_cache", "cache", "cached_property", "WeakKeyDictionary", "WeakValueDictionary"}


def keeps(tree: ast.Module) -> list[str]:
    """What of a module keeps results: functools' and weakref's means, and module's dicts that begin empty."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("functools", "weakref"):
            found += [alias.name for alias in node.names if alias.name in KEEPERS]
        if isinstance(node, ast.Attribute) and node.attr in KEEPERS and isinstance(node.value, ast.Name):
            found += [node.attr] if node.value.id in ("functools", "weakref") else []
        if isinstance(node, ast.Attribute) and node.attr == "_devices":
            found.append("_devices")
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict) and not node.value.keys:
            found.append(ast.unparse(node))
    return found


def test_nothing_is_kept_by_other_means():
    """A new cache of tensors goes through `lasting` or `beside`, or this fails."""
    wrong = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if (found := keeps(ast.parse(path.read_text()))) and not any(name.startswith(other) for other in OTHERS):
            wrong[name] = found
    assert not wrong, wrong


def surroundings():
    def nothing(make):
        return make()

    def fake(make):
        with FakeTensorMode():
            return make()

    def inference(make):
        with torch.inference_mode():
            return make()

    def somewhere(make):
        with torch.device("meta"):
            return make()

    def autocast(make):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return make()

    def functional(make):
        torch.func.functionalize(lambda x: (make(), x + 1)[1])(torch.ones(2))

    def mapped(make):
        torch.func.vmap(lambda x: (make(), x + 1)[1])(torch.ones(2))

    def traced(make):
        make_fx(lambda x: (make(), x + 1)[1])(torch.ones(2))

    def traced_fake(make):
        make_fx(lambda x: (make(), x + 1)[1], tracing_mode="symbolic")(torch.ones(2))

    def exported(make):
        class Asks(torch.nn.Module):
            def forward(self, x):
                make()
                return x + 1

        torch.export.export(Asks(), (torch.ones(2),), strict=False)

    def compiled(make):
        torch.compile(lambda x: (torch.compiler.disable(make)(), x + 1)[1], backend="eager")(torch.ones(2))

    return [value for value in locals().values() if callable(value)]


class Book:
    pass


@pytest.mark.parametrize("around", surroundings(), ids=lambda around: around.__name__)
def test_what_lasts_is_made_of_ordinary_tensors(around):
    @lasting(4)
    def table(count):
        x = torch.arange(count).float()
        return x @ torch.ones(count, count), torch.randn(3, generator=torch.Generator().manual_seed(0))

    @beside
    def of_book(_, count):
        return table.__wrapped__(count)

    book = Book()
    around(lambda: (table(5), of_book(book, 5)))
    expected = torch.arange(5).float() @ torch.ones(5, 5), torch.randn(3, generator=torch.Generator().manual_seed(0))
    for made in (table(5), of_book(book, 5)):
        assert made[0] is table(5)[0] or made[0] is of_book(book, 5)[0]
        for t, right in zip(made, expected, strict=True):
            assert type(t) is torch.Tensor and not t.is_inference() and not t.is_meta and t.dtype == right.dtype
            assert torch.equal(t, right)


CUTS = [130, 40, 1]

RUN = """
import functools, gc, sys, types
from contextlib import suppress
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

torch.set_num_threads(1)
import kvfold
from helpers import llama, logits, prompt

def tensors(root):
    seen, todo = set(), [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (type, types.ModuleType, types.FunctionType, torch.nn.Module)):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        else:
            todo += gc.get_referents(one)

model, ids = llama(), prompt(1, 171)
found = {}
for method in sys.argv[2:]:
    cache = kvfold.fold(model, method)
    with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        logits(model, cache, torch.ones_like(ids), CUTS)
    kvfold.fold(model, method, always=True)
    with suppress(Exception):
        torch.export.export(model, (), {"input_ids": ids}, strict=False)
    kvfold.unfold(model)
    of = cache.folded[0]
    with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
        of.method.tables(of.spec, torch.device("cpu"))
        x = torch.randn(1, 2, 128, 64, device="cpu")
        for form in of.layout.formats:
            form.decode(form.encode(x))
for kept in gc.get_objects():
    if isinstance(kept, functools._lru_cache_wrapper) and kept.__module__.startswith("kvfold"):
        for t in tensors(kept):
            plain = type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_inference() and not t.is_meta
            assert plain, (kept.__module__, kept.__qualname__, type(t))
for method in sys.argv[2:]:
    found[method] = logits(model, kvfold.fold(model, method), ids, CUTS)
torch.save(found, sys.argv[1])
"""


def test_a_method_that_is_traced_first_serves_as_ever(tmp_path):
    """In a process of its own, where nothing was used before: the first who ask for tables have fake tensors."""
    methods, out = (
        [*kvfold.DEFAULT, "kivi:bits=8,sink=0,recent=0,group=16", "fold:sink=0,recent=0,bits=4"],
        tmp_path / "out",
    )
    folders = [str(Path(kvfold.__file__).parents[1]), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    program = RUN.replace("CUTS", str(CUTS))
    done = subprocess.run(
        [sys.executable, "-c", program, str(out), *methods],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    model, ids = llama(), prompt(1, 171)
    for method, got in torch.load(out).items():
        assert relative(got, logits(model, kvfold.fold(model, method), ids, CUTS)) < 1e-6, method


# ---- folded models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["torch.export", "torch.jit.trace"])
def test_a_folded_model_is_not_exported_and_says_what_to_do(how):
    model, ids = llama().requires_grad_(False), prompt(1, 40)
    kvfold.fold(model, "kivi", always=True)

    def export(**more):
        if how == "torch.export":
            return torch.export.export(model, (), {"input_ids": ids, **more}, strict=False)
        return torch.jit.trace(lambda x: model(x, **more).logits, (ids,))

    with pytest.raises(
        UnsupportedModelError, match=rf"{how}: a FoldedCache cannot be exported .*kvfold.unfold\(model\)"
    ):
        export()
    cache = kvfold.fold(model, "kivi")
    if how == "torch.jit.trace":
        with pytest.raises(UnsupportedModelError, match=r"kvfold.unfold\(model\)"):
            export(past_key_values=cache)
    assert torch.isfinite(logits(model, cache, ids)).all()
    kvfold.unfold(model)
    assert export(use_cache=False) is not None


def test_transformers_own_export_of_a_folded_model_is_told_what_to_do():
    """Dynamo, which follows the model, says the reason that the function it may not enter has."""
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    model, ids = llama(), prompt(1, 40)
    model.generation_config.use_cache, model.generation_config.cache_implementation = True, "static"
    kvfold.fold(model, "kivi", always=True)
    with pytest.raises(Exception, match=r"torch.export takes unfolded models; call kvfold.unfold\(model\) first"):
        TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=128).export(
            input_ids=ids, cache_position=torch.arange(40)
        )
