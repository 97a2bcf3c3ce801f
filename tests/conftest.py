"""Set-up that every test shares.

Tests of modules marked ``targets`` run on the CPU in float32 and, where there is a CUDA device, there as well, in float16
and bfloat16 with the GPU's kernels; those variants are marked ``gpu``. Their storage is poisoned: what reads memory that
nothing wrote reads NaN.
"""

import os
import signal
import time

# Before Transformers is imported: no test may reach for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

import targets
import tested

torch.set_num_threads(1)  # as many workers as cores
# Started in a shell's background, this process ignores Ctrl-C, and so would those that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _share_the_gpus() -> None:
    """Workers take turns in which GPU is their first; each still sees all of them."""
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
    if not worker.startswith("gw") or gpus < 2 or "CUDA_VISIBLE_DEVICES" in os.environ:
        return
    first = int(worker[2:]) % gpus
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((first + i) % gpus) for i in range(gpus))


_share_the_gpus()

_left_to_the_cpu: dict[str, str] = {}
_unchanged: list[int] = []
"""How many tests were left out since the kernels are those that were tested last."""


def pytest_addoption(parser):
    parser.addoption(
        "--targets", help="where targeted tests run, e.g. cpu-float32,cuda-bfloat16; default: all there is"
    )
    parser.addoption(
        "--kernels",
        choices=("all", "changed", "record"),
        default="all",
        help="tests of tests/kernels: all; only if what they depend on has changed since they passed; or all, and keep that "
        "they passed",
    )


def pytest_configure(config):
    for marker in (
        "targets: the module's tests run on every target",
        "takes_turns: on a GPU each of the module's cases runs in one of the dtypes (in all that --targets names)",
        "cpu_only(reason): left out on a GPU, and why",
        "float32(reason): runs in float32 on every device, and why",
        "compile_all: compiles one of the kernels' whole set of specializations; deselected unless asked for by -m",
    ):
        config.addinivalue_line("markers", marker)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # who hears of all workers' tests
        config.pluginmanager.register(_Whereabouts(config), "whereabouts")


class _Whereabouts:
    """Says once a minute how far the tests are, for who reads a log: dots name no file."""

    EVERY = 60.0

    def __init__(self, config):
        self.config, self.session, self.done = config, None, 0
        self.begun = self.said = time.monotonic()

    def pytest_sessionstart(self, session):
        self.session = session

    def pytest_runtest_logreport(self, report):
        if report.when != "teardown":
            return
        self.done += 1
        now = time.monotonic()
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or now - self.said < self.EVERY:
            return
        self.said, seconds = now, int(now - self.begun)
        of = self.session.testscollected or self.done
        reporter.write(
            f"\n[{seconds // 60}:{seconds % 60:02}] {self.done:,} of {of:,} tests, {100 * self.done // of} %; "
            f"in {report.nodeid.partition('::')[0]}\n"
        )


def _targets(config) -> list[targets.Target]:
    names = config.getoption("--targets")
    return [targets.Target(name) for name in names.split(",")] if names else targets.available()


def pytest_report_header(config):
    missing = "" if torch.cuda.is_available() else "; no CUDA device, so none of the GPU suite"
    how = config.getoption("--kernels")
    same = how == "changed" and tested.unchanged()
    kernels = "not run, for nothing that they depend on has changed since they passed" if same else "run"
    return [
        f"targets: {', '.join(t.name for t in _targets(config))}{missing}",
        f"tests of kernels: {kernels} (--kernels={how})",
    ]


def pytest_sessionfinish(session, exitstatus):
    """Keep which kernels all tests passed with."""
    config = session.config
    if config.getoption("--kernels") != "record" or hasattr(config, "workerinput") or exitstatus != 0:
        return
    if tested.whole(config.args) and not config.option.keyword and not config.option.markexpr:
        tested.RECORD.write_text(f"{tested.digest()}\n")


def pytest_generate_tests(metafunc):
    definition = metafunc.definition
    if definition.get_closest_marker("targets") is None:
        return
    single = definition.get_closest_marker("float32") is not None
    names = [f"{t.device.type}-float32" if single else t.name for t in _targets(metafunc.config)]
    params = [targets.Target(name) for name in dict.fromkeys(names)]
    marked = [pytest.param(t, id=t.name, marks=[pytest.mark.gpu] if t.is_gpu else []) for t in params]
    metafunc.parametrize("target", marked, indirect=True, scope="session")


def pytest_collection_modifyitems(config, items):
    """Leave CPU-only tests out on GPUs, and the whole set of compilations unless ``-m`` asks for it; both visibly."""
    left = []
    if config.getoption("--kernels") == "changed" and tested.unchanged():
        left += [item for item in items if tested.left_out(item.path)]
        _unchanged.append(len(left))
        gone = set(map(id, left))
        items[:] = [item for item in items if id(item) not in gone]
    for item in items:
        target = getattr(item, "callspec", None) and item.callspec.params.get("target")
        only = item.get_closest_marker("cpu_only")
        if only and isinstance(target, targets.Target) and target.is_gpu:
            _left_to_the_cpu[f"{item.path.name}::{item.originalname}"] = only.args[0]
            left.append(item)
        elif item.get_closest_marker("takes_turns") and not _has_its_turn(item, target, config):
            left.append(item)
        elif item.get_closest_marker("compile_all") and "compile_all" not in config.getoption("-m"):
            left.append(item)
    config.hook.pytest_deselected(items=left)
    gone = set(map(id, left))
    items[:] = [item for item in items if id(item) not in gone]


def _has_its_turn(item, target, config) -> bool:
    names = [t.name for t in targets.available() if t.is_gpu]
    if config.getoption("--targets") or target is None or target.name not in names:
        return True
    return target.name == targets.turn(item.nodeid.replace(target.name, ""), names)


def pytest_terminal_summary(terminalreporter):
    if _left_to_the_cpu:
        terminalreporter.section("left to the CPU")
        for name, reason in sorted(_left_to_the_cpu.items()):
            terminalreporter.line(f"{name}: {reason}")


@pytest.fixture(scope="session", autouse=True)
def target(request) -> targets.Target:
    """The device and dtype the test's helpers use; the CPU in float32 outside of targeted modules."""
    chosen = getattr(request, "param", targets.CPU)
    targets.use(chosen)
    return chosen


@pytest.fixture(autouse=True)
def poisoned_storage(request, monkeypatch):
    """Uninitialized memory holds NaN, and -1 as an integer: whatever reads it shows."""
    if not any(request.node.get_closest_marker(name) for name in ("targets", "gpu")):
        return

    def poisoning(allocate):
        def allocated(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.dtype.is_floating_point:
                return tensor.fill_(float("nan"))
            return tensor.fill_(255 if tensor.dtype == torch.uint8 else -1)

        return allocated

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))
