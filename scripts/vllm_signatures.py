"""Write down what kvfold uses of vLLM, as a release has it, from sources that are read and never run.

    python scripts/vllm_signatures.py vllm-0.33.0-*.whl     # or the folder of an installed vllm
    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 vllm==0.33.0

The file, ``tests/engines/vllm/signatures-RELEASE.json``, has a line for each name that kvfold imports, for each of their
attributes that its code mentions, and for whatever a class of kvfold's inherits: a method with its arguments, or ``value``. Two
of these files say what a new release changes for kvfold.
"""

import ast
import copy
import json
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "kvfold"
FILES = ROOT / "tests" / "engines" / "vllm"
REACHED = {
    "vllm.config.CompilationConfig": "VllmConfig.compilation_config",
    "vllm.config.DeviceConfig": "VllmConfig.device_config",
    "vllm.config.ModelConfig": "VllmConfig.model_config",
    "vllm.config.ParallelConfig": "VllmConfig.parallel_config",
    "vllm.config.SchedulerConfig": "VllmConfig.scheduler_config",
    "vllm.config.SpeculativeConfig": "VllmConfig.speculative_config",
    "vllm.forward_context.ForwardContext": "get_forward_context()",
    "vllm.model_executor.layers.attention.Attention": "a layer in static_forward_context",
    "vllm.platforms.cuda.CudaPlatformBase": "current_platform, on a GPU",
    "vllm.v1.core.block_pool.BlockPool": "SlidingWindowManager.block_pool",
}
"""Classes whose objects kvfold comes by without importing them, and where."""
Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ImportFrom | ast.Import | ast.Assign | ast.AnnAssign


def kvfolds() -> list[ast.Module]:
    """The modules of kvfold that import vLLM, or are of its engine."""
    sources = [(path, path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))]
    engine = PACKAGE / "engines" / "vllm"
    return [ast.parse(text) for path, text in sources if engine in path.parents or "from vllm" in text]


def imported() -> list[str]:
    """Names that kvfold imports: ``vllm.module.Name``."""
    found = set()
    for node in (node for module in kvfolds() for node in ast.walk(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {f"{alias.name}.__version__" for alias in node.names if alias.name == "vllm"}
    return sorted(found)


def mentioned() -> set[str]:
    """Attributes and arguments that kvfold's engine names, whosever they are; in ``getattr`` too."""
    found = set()
    for node in (node for module in kvfolds() for node in ast.walk(module)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            found |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def classes() -> dict[str, list[ast.ClassDef]]:
    """Classes of kvfold's by the class of vLLM's that they inherit from, directly or through another of kvfold's."""
    names = {name.rpartition(".")[2]: name for name in imported()}
    found: dict[str, list[ast.ClassDef]] = {}
    origin: dict[str, str] = {}
    for node in (node for module in kvfolds() for node in module.body if isinstance(node, ast.ClassDef)):
        for base in node.bases:
            of = ast.unparse(base).partition("[")[0]
            if theirs := names.get(of) or origin.get(of):
                origin[node.name] = theirs
                found.setdefault(theirs, []).append(node)
    return found


class Release:
    """The sources of one release.

    Parameters
    ----------
    place : Path
        A wheel, or the folder of the package.
    """

    def __init__(self, place: Path) -> None:
        if place.is_dir():
            self.texts = {str(p.relative_to(place.parent)): p for p in place.rglob("*.py")}
            self.wheel = None
        else:
            self.wheel = zipfile.ZipFile(place)
            self.texts = {name: place for name in self.wheel.namelist() if name.endswith(".py")}

    @cache  # noqa: B019  (a few releases at most)
    def module(self, name: str) -> tuple[ast.Module, bool] | None:
        """A module, and whether it is a package; None if there is none."""
        path = name.replace(".", "/")
        for file, package in ((f"{path}.py", False), (f"{path}/__init__.py", True)):
            if file in self.texts:
                text = self.wheel.read(file) if self.wheel else self.texts[file].read_bytes()
                return ast.parse(text), package
        return None

    @property
    def version(self) -> str:
        found = self.find("vllm._version", "__version__")
        for node in ast.walk(found[1] if found else ast.Module([], [])):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                return node.value.partition("+")[0]
        raise ValueError("version: vllm/_version.py does not say it")

    def find(self, module: str, name: str) -> tuple[str, Node] | None:
        """Where a name is made, through modules that only pass it on: that module, and the statement."""
        loaded = self.module(module)
        if loaded is None:
            return None
        tree, package = loaded
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom) and any(name in (a.asname, a.name) for a in node.names):
                alias = next(a for a in node.names if name in (a.asname, a.name))
                source = _absolute(node, module, package)
                if self.module(source) is None:
                    return module, node  # of another package
                return self.find(source, alias.name) or (module, node)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and name in _targets(node):
                return module, node
            if isinstance(node, ast.FunctionDef) and node.name == "__getattr__" and name in _constants(tree):
                return module, ast.Import([ast.alias(name)])  # made when it is first asked for
        return None

    def lineage(self, module: str, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """A class, and those of vLLM's that it inherits from."""
        yield node
        for base in node.bases:
            found = self.find(module, ast.unparse(base).partition("[")[0])
            if found and isinstance(found[1], ast.ClassDef):
                yield from self.lineage(found[0], found[1])


def _constants(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, also those under a condition."""
    for node in body:
        yield node
        for part in ("body", "handlers", "orelse"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _statements(getattr(node, part, []))


def _absolute(node: ast.ImportFrom, module: str, package: bool) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".")[: len(module.split(".")) - node.level + package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Names, kinds and defaults of a function's arguments, and whether it is a property or a method of the class."""
    kinds = [ast.unparse(d).rpartition(".")[2] for d in node.decorator_list]
    kind = next((k for k in kinds if k in ("property", "cached_property", "classmethod", "staticmethod")), "def")
    if kind in ("property", "cached_property"):
        return "property"
    arguments = copy.deepcopy(node.args)
    for part in ast.walk(arguments):
        if isinstance(part, ast.arg):
            part.annotation = None
    return f"{kind}({ast.unparse(arguments)})"


def members(release: Release, module: str, node: ast.ClassDef) -> dict[str, str]:
    """What objects of a class have: methods, fields, and what methods assign to ``self``. The nearest definition counts."""
    found: dict[str, str] = {}
    for kind in release.lineage(module, node):
        for part in kind.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(part.name, signature(part))
            elif isinstance(part, ast.Assign | ast.AnnAssign):
                for name in _targets(part):
                    found.setdefault(name, "value")
        for part in ast.walk(kind):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                if isinstance(part.value, ast.Name) and part.value.id == "self":
                    found.setdefault(part.attr, "value")
    return found


def signatures(place: Path) -> dict[str, str]:
    """By name, ``vllm.module.Class.member`` for members: a signature, ``class``, ``value``; ``missing`` if it is not there."""
    release, inherited, attributes = Release(place), classes(), mentioned()
    found: dict[str, str] = {}
    for name in [*imported(), *REACHED]:
        module, _, last = name.rpartition(".")
        made = release.find(module, last)
        if made is None:
            found[name] = "missing"
            continue
        where, node = made
        if isinstance(node, ast.FunctionDef):
            found[name] = signature(node)
        elif not isinstance(node, ast.ClassDef):
            found[name] = "value"
        else:
            found[name] = "class"
            for member, what in members(release, where, node).items():
                called = name not in REACHED if member == "__init__" else member in attributes
                if called or (name in inherited and not member.startswith("__")):
                    found[f"{name}.{member}"] = what
    return dict(sorted(found.items()))


def main() -> None:
    for given in sys.argv[1:]:
        place = Path(given)
        version = Release(place).version
        out = FILES / f"signatures-{version}.json"
        out.write_text(json.dumps(signatures(place), indent=1) + "\n", encoding="utf-8")
        print(out.relative_to(ROOT))


if __name__ == "__main__":
    main()
