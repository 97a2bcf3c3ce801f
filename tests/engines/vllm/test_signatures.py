"""What kvfold uses of vLLM, in each release that it serves: files made of vLLM's sources, which nothing here runs.

``scripts/vllm_signatures.py`` makes them; a check of ``make serving`` compares the one of the installed release with it.
"""

import ast
import inspect
import json
import sys
from pathlib import Path

import pytest

from kvfold.engines.vllm.refusals import VERSIONS

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import vllm_signatures

RELEASES = {
    path.stem.removeprefix("signatures-"): json.loads(path.read_text())
    for path in sorted(Path(__file__).parent.glob("signatures-*.json"))
}
CHECKED = "0.32.0"
"""The release that runs in the checks on a CPU."""
REASONS = {
    "0.33.0": {
        "vllm.v1.attention.backend.AttentionBackend.supports_kv_cache_update_bypass": (
            "False: a layer is always given its keys and values"
        ),
        "vllm.v1.attention.backend.AttentionImpl.set_interleaved_v_cache": "does nothing where it is not overridden",
        "vllm.v1.attention.backends.fa_utils.flash_attn_varlen_func": "two more arguments, None by default, at the end",
        "vllm.v1.kv_cache_interface.SlidingWindowSpec.is_draft": "draft layers are refused",
        "vllm.v1.kv_cache_interface.SlidingWindowSpec.num_retained_tokens": "RecentSpec has its own: sinks are read",
    }
}
"""What a release has otherwise than :data:`CHECKED`, and why kvfold needs nothing for it or what it has."""


def signature(written):
    """Of a file's ``def(...)``; defaults are all None."""
    kind, _, arguments = written.partition("(")
    made = ast.parse(f"lambda {arguments.removesuffix(')')}: 0", mode="eval").body
    given = made.args
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [default and ast.Constant(None) for default in given.kw_defaults]
    found = inspect.signature(eval(ast.unparse(made)))
    if kind in ("classmethod", "def") and next(iter(found.parameters), "") in ("self", "cls"):
        found = found.replace(parameters=list(found.parameters.values())[1:])
    return found


def is_function(written):
    return written.startswith(("def(", "classmethod(", "staticmethod("))


def test_each_release_that_is_served_was_read():
    assert {f"{name.rpartition('.')[0]}." for name in RELEASES} == set(VERSIONS)


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_all_that_is_imported(release):
    names = vllm_signatures.imported()
    assert len(names) >= 30
    has = RELEASES[release]
    assert [name for name in [*names, *vllm_signatures.REACHED] if has.get(name, "missing") == "missing"] == []


@pytest.mark.parametrize("release", [name for name in RELEASES if name != CHECKED])
def test_a_release_differs_from_the_one_that_is_checked_where_that_is_known(release):
    known, new = RELEASES[CHECKED], RELEASES[release]
    other = {name for name in known.keys() | new.keys() if known.get(name) != new.get(name)}
    assert other == set(REASONS[release])


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_overridden_takes_what_vllm_passes(release):
    has, bound = RELEASES[release], 0
    for theirs, ours in vllm_signatures.classes().items():
        for node in (part for kind in ours for part in kind.body if isinstance(part, ast.FunctionDef)):
            base = has.get(f"{theirs}.{node.name}")
            if base is None or node.name.startswith("__"):
                continue
            own = vllm_signatures.signature(node)
            if not is_function(base):
                assert not is_function(own), f"{theirs}.{node.name}"
                continue
            wanted = [p.name for p in signature(base).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            taken = signature(own)
            taken.bind(**dict.fromkeys(wanted))
            assert [p for p in taken.parameters if p in wanted] == [p for p in wanted if p in taken.parameters]
            bound += 1
    assert bound >= 20


@pytest.mark.parametrize("release", RELEASES)
def test_calls_of_what_is_imported_fit(release):
    has, bound = RELEASES[release], 0
    functions = {name.rpartition(".")[2]: what for name, what in has.items() if is_function(what)}
    imported = {name.rpartition(".")[2] for name in vllm_signatures.imported()}
    methods = {name.rpartition(".")[2] for name in has if name.rpartition(".")[0] in vllm_signatures.REACHED}
    for node in (node for module in vllm_signatures.kvfolds() for node in ast.walk(module)):
        if not isinstance(node, ast.Call) or any(isinstance(arg, ast.Starred) for arg in node.args):
            continue
        known = imported if isinstance(node.func, ast.Name) else methods
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in known and name in functions:
            named = {word.arg: None for word in node.keywords if word.arg}
            signature(functions[name]).bind(*[None] * len(node.args), **named)
            bound += 1
    assert bound >= 12


def test_the_windows_keep_their_first_tokens_in_sight():
    """From 0.33 on vLLM hides blocks of sliding windows that it takes for out of reach; sinks are the oldest."""
    (spec,) = vllm_signatures.classes()["vllm.v1.kv_cache_interface.SlidingWindowSpec"]
    own = {part.name: part for part in spec.body if isinstance(part, ast.FunctionDef)}
    assert ast.unparse(own["num_retained_tokens"].body[-1]) == "return MOST_TOKENS"
    assert RELEASES["0.33.0"]["vllm.v1.kv_cache_interface.SlidingWindowSpec.num_retained_tokens"] == "property"
