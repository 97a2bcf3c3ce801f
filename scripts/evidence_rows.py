"""Take the rows of benchmarks/evidence/: every method on three models, by one command, on one or several GPUs.

    python scripts/evidence_rows.py --list
    python scripts/evidence_rows.py --models MODELS --data DATA --out rows --seconds 1500 --snapshot rows.tar.xz

MODELS has a folder for each model, as ``save_pretrained`` writes it, or its GGUF file, which is converted first; artefacts are
learned into it. With ``--wait`` a model's tasks begin when its file is there, under its whole name. DATA has
``wikitext-2-raw/``, ``gutenberg/`` and ``gsm8k/`` as their authors publish them. Texts that lie in the rows' folder ``texts/``
are taken as they are: two of them are sources of the Python that writes them. Every task is a ``kvfold`` command in a
process of its own, with a folder of rows and a log. The same command goes on where a limit or a kill ended it. Rows of equal
settings are put together in the snapshot, which is renewed every minute: what was measured is there whatever ends the machine.
"""

import argparse
import dataclasses
import fnmatch
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from evidence import plain

from kvfold import files
from kvfold.errors import KVFoldError
from kvfold.evaluation.results import PACKED, SUFFIX, ResultFile, content, files_in

SAFETENSORS = ".safetensors"

MODELS = {
    "Qwen2.5-Coder-1.5B-Instruct": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "Qwen2.5-Coder-0.5B-Instruct": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "SmolLM2-135M-Instruct-Q4_1": "SmolLM2-135M-Instruct.Q4_1.gguf",
}
"""Folder of each, and the GGUF file that it is made of. The bare name of the last is the embedded model's."""
LARGEST, MIDDLE, SMALL = MODELS
LENGTHS = {LARGEST: "1024 4096 16384 30000", MIDDLE: "1024 4096 16384 30000", SMALL: "1024 4096 7900"}
PARTS = {LARGEST: 7, MIDDLE: 3, SMALL: 2}
"""Processes that share the windows of divergence; with lengths in turn, seven and three get some of each."""
WINDOWS = {LARGEST: 2, MIDDLE: 1, SMALL: 1}
GIB = {LARGEST: 7, MIDDLE: 5, SMALL: 4}
"""Memory of a GPU that a process of divergence takes, about."""


def _widths(name: str, *bits: int) -> tuple[str, ...]:
    return tuple(f"{name}:bits={b}" for b in bits)


def _folds() -> Iterator[str]:
    """Every pair of bits, as rows name them."""
    for k in range(1, 5):
        for v in range(1, 5):
            yield "fold" if (k, v) == (3, 2) else f"fold:bits={k}" if k == v else f"fold:k_bits={k},v_bits={v}"


BEST_KIVI = "kivi:k_bits=3,v_bits=2,group=64"
"""KIVI with the bytes of its default, better spent: three bits for keys, paid by groups of 64."""
PLAIN = (
    *("kivi", *_folds()),
    *(f"fold:{bits},codebook=true" for bits in ("bits=1", "bits=2", "k_bits=3,v_bits=2")),
    *(*_widths("kivi", 1, 3, 4), "squat", *_widths("squat", 1, 3, 4)),
    *("squat:rank=5", "squat:rank=20", "squat:lam=0.1", "squat_pre", *_widths("squat_pre", 1, 3, 4)),
    *("innerq", *_widths("innerq", 1, 3, 4), "innerq:mode=asym", "innerq:mode=sym", "innerq:normalize=false"),
    *("qjl", *_widths("qjl", 1, 3, 4), "qjl:v_bits=3"),
    *("turboquant", *_widths("turboquant", 1, 3, 4), "turboquant:bits=3,residual=true"),
    *("gear", *_widths("gear", 1, 3, 4), "zipcache", "zipcache:bits=3", "kvarn", *_widths("kvarn", 1, 3, 4)),
    *(BEST_KIVI, "kivi:bits=2,group=64", "kivi:k_bits=4,v_bits=2,group=64", "squat:k_bits=3,v_bits=2,group=64"),
    *("turboquant:k_bits=3,v_bits=2", "kvarn:k_bits=3,v_bits=2", "qjl:k_bits=3"),
)
"""What learns nothing; the last two lines spend a method's bits otherwise than it is by default."""
PUBLISHED = (
    *("kivi", "kivi:paper=true", "kivi:paper=true,recent=32", "squat:paper=true", "squat_pre:paper=true"),
    *("innerq:paper=true", "qjl:paper=true", "qjl:paper=true,recent=128", "turboquant:bits=3,paper=true"),
    *("qjl:paper=true,recent=128,outliers=8,early_layers=15",),
)
"""As published, and with the windows of those that they are compared with."""
LEARNED = {
    "tasq": ("tasq", "tasq:values=fold", "k=fold:bits=1,codebook=true+v=tasq"),
    "tasq-2": (
        "tasq:bits=2",
        *(f"tasq:bits=2,{values}values=fold" for values in ("", "v_bits=1,", "v_bits=3,")),
        *(f"k=fold:{keys}+v=tasq:bits=2" for keys in ("bits=2,codebook=true", "bits=3")),
    ),
    "tasq-21": ("tasq:k_bits=2,v_bits=1",),
    "nova": ("nova:values=codes", "nova", "nova:values=fold"),
    "gsrq": ("gsrq",),
    "gsrq-1": ("gsrq:bits=1",),
    "vqllm": ("vqllm",),
    "vqllm-1": ("vqllm:bits=1",),
    "commvq": ("commvq",),
    "commvq-1": ("commvq:bits=1",),
    "kvquant": ("kvquant",),
    "kvquant-3": ("kvquant:bits=3",),
}
"""Methods by their artefact, which the first of them learns."""
MAIN = ("fold", "fold:bits=2", "kivi", BEST_KIVI, "squat", "innerq", "qjl", "turboquant:bits=3")
"""What answers tasks; after them, what learned best."""
BEST = ("tasq", "nova")
LEARNED_KEYS = "tasq:bits=2,values=fold"
FAMILIES = ("multikey", "multivalue", "tracking", "aggregation", "qa")
BATCHES = {4096: (10, 10), 16384: (4, 13), 30000: (2, 13)}
"""By length: prompts of a family of RULER that are answered together, and the GiB that they take."""
TEXTS = ("encyclopedia", "prose", "code", "dialogue", "tools")


@dataclasses.dataclass(frozen=True)
class Task:
    """A command.

    Attributes
    ----------
    name
        Of its log and of the folder of its rows.
    arguments
        Of ``kvfold``; without ``--methods`` where ``methods`` has some, and without ``--out`` of an evaluation.
    methods
        Those asked for; one that needs an artefact which could not be learned is left out.
    after
        Tasks that have to have ended well.
    gib
        Of a GPU's memory, about; 0: runs on the host.
    """

    name: str
    arguments: tuple[str, ...]
    methods: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    gib: int = 0

    @property
    def behind(self) -> tuple[str, ...]:
        """Tasks that have to have ended, well or not: those that learn what its methods take."""
        places = (m.partition("artefact=")[2].partition(SAFETENSORS)[0].rsplit("-", 2) for m in self.methods)
        return tuple(dict.fromkeys(f"learn-{place[2]}-{place[0]}" for place in places if len(place) == 3))


def _short(model: str) -> str:
    return model.removesuffix("-Instruct").removesuffix("-Instruct-Q4_1").rpartition("-")[2].lower()


def artefact(name: str, model: str, tag: str) -> str:
    """Where one lies, below the folder of models; rows carry the name, so another ``tag`` makes other rows."""
    return f"{name}-{tag}-{_short(model)}{SAFETENSORS}"


def with_artefact(spec: str, place: str) -> str:
    """Given to every method of a recipe that learns."""
    return "+".join(_with(part, place) for part in spec.split("+"))


def _with(part: str, place: str) -> str:
    side = part[:2] if part[:2] in ("k=", "v=") else ""
    name, _, options = part.removeprefix(side).partition(":")
    if name not in {spec.partition(":")[0] for spec, *_ in LEARNED.values()}:
        return part
    return f"{side}{name}:{options}{',' if options else ''}artefact={place}"


def learned(model: str, tag: str, names: Sequence[str] = tuple(LEARNED)) -> tuple[str, ...]:
    """Method strings with their artefacts."""
    return tuple(with_artefact(spec, artefact(name, model, tag)) for name in names for spec in LEARNED[name])


def turned(methods: Sequence[str], part: int, parts: int) -> tuple[str, ...]:
    """The same in another order for each part: processes that begin together then compile different kernels first."""
    first = len(methods) * (part - 1) // parts
    return (*methods[first:], *methods[:first])


def tasks(texts: Path, data: Path, tag: str) -> list[Task]:
    """All of them, the most wanted first."""
    found = [Task(f"convert-{_short(m)}", (), gib=0) for m in MODELS]
    for m in MODELS:
        text = str(data / "gutenberg/pride-and-prejudice.txt")
        for name, (spec, *_) in LEARNED.items():
            length = "8192" if name.startswith("kvquant") else "32768"
            given = ("--model", m, "--method", spec, "--text", text, "--tokens", length)
            out = ("--out", artefact(name, m, tag), "--force")
            found.append(
                Task(f"learn-{_short(m)}-{name}", ("calibrate", *given, *out), (), (f"convert-{_short(m)}",), 6)
            )
    found += _divergence(texts, tag)
    return [*found, *_questions(texts, data, tag)]


def _divergence(texts: Path, tag: str) -> Iterator[Task]:
    scored = tuple(word for name in TEXTS for word in ("--text", f"{name}={texts / name}.txt"))
    for kind in ("learned", "plain", "published"):
        for m in MODELS:
            lengths = ("--lengths", *LENGTHS[m].split(), "--limit", str(WINDOWS[m]), "--chunk", "64")
            lengths += ("--own-windows",) if kind == "published" else ()
            every = {"plain": PLAIN, "published": PUBLISHED, "learned": ("kivi", "fold", *learned(m, tag))}
            methods = every[kind]
            for part in range(1, PARTS[m] + 1):
                of = ("--part", f"{part}/{PARTS[m]}")
                yield Task(
                    f"divergence-{_short(m)}-{part}-{kind}",
                    ("eval", "--model", m, "--suite", "divergence", *lengths, *of, *scored),
                    turned(methods, part, PARTS[m]),
                    (f"convert-{_short(m)}",),
                    GIB[m],
                )


def _questions(texts: Path, data: Path, tag: str) -> Iterator[Task]:
    """Tasks that are answered: on the largest model."""
    ready, hidden = (f"convert-{_short(LARGEST)}",), f"prose={texts / 'prose.txt'}"
    methods = (*MAIN, *learned(LARGEST, tag, BEST), with_artefact(LEARNED_KEYS, artefact("tasq-2", LARGEST, tag)))

    def asked(name: str, suite: str, methods: Sequence[str], gib: int, *given: str) -> Task:
        return Task(name, ("eval", "--model", LARGEST, "--suite", suite, *given), tuple(methods), ready, gib)

    for length in reversed(BATCHES):
        at = ("--lengths", str(length))
        pairs = (*methods, "fold:bits=1")
        yield asked(f"retrieval-{length}", "retrieval", pairs, 8, *at, "--limit", "40", "--chunk", "64")
        few = ("fold", "fold:bits=2", "kivi", BEST_KIVI, "squat", *learned(LARGEST, tag, BEST))
        for part in (1, 2):
            given = ("--limit", "20", "--chunk", "64", "--text", hidden, "--part", f"{part}/2")
            yield asked(f"needle-{length}-{part}", "needle", few, 8, *at, *given)
    for length, (batch, gib) in reversed(BATCHES.items()):
        at = ("--lengths", str(length))
        for family in FAMILIES:
            given = ("--tasks", family, "--batch", str(batch), "--limit", "40", "--chunk", "256", "--text", hidden)
            yield asked(f"ruler-{length}-{family}", "ruler", methods, gib, *at, *given)
    records = ("--data", str(data / "gsm8k/test.jsonl"), "--examples", str(data / "gsm8k/train.jsonl"))
    for part in (1, 2):
        given = ("--limit", "200", "--batch", "50", "--chunk", "256", "--part", f"{part}/2")
        chains = ("fold", "kivi", BEST_KIVI, *learned(LARGEST, tag, ("tasq", "commvq", "nova")))
        yield asked(f"gsm8k-{part}", "gsm8k", chains, 12, *records, *given)


# ---- running ---------------------------------------------------------------------------------------------------------

Start = Callable[[Task, Sequence[str], int], "subprocess.Popen[bytes]"]


class Run:
    """Tasks on GPUs, by what their memory holds.

    Parameters
    ----------
    models, out
        Folders: of models and artefacts, and of rows and logs.
    start
        Begins a task with its arguments on a GPU.
    gpus, memory
        How many, and GiB that may be taken of each.
    """

    def __init__(self, tasks: Sequence[Task], models: Path, out: Path, start: Start, gpus: int, memory: int) -> None:
        self.tasks, self.models, self.out, self.start = list(tasks), models, out, start
        self.free, self.memory = [memory] * gpus, memory
        self.running: dict[str, tuple[subprocess.Popen[bytes], Task, int, float]] = {}
        self.ended: dict[str, int] = {}
        self.notes = out / "done.txt"
        if self.notes.is_file():
            known = set(self.notes.read_text(encoding="utf-8").splitlines())
            self.ended = {task.name: 0 for task in self.tasks if self._line(task) in known}
        self.ended |= {f"convert-{_short(m)}": 0 for m in MODELS if (models / m / "config.json").is_file()}

    @staticmethod
    def _line(task: Task) -> str:
        return shlex.join((task.name, *task.arguments, *task.methods))

    def command(self, task: Task) -> list[str] | None:
        """Arguments of ``kvfold``; None: all of its methods wait for artefacts that are not there."""
        if not task.methods:
            return list(task.arguments)
        there = [method for method in task.methods if self._there(method)]
        if not there:
            return None
        return [*task.arguments, "--methods", *there, "--out", str(self.out / "rows" / task.name)]

    def _there(self, method: str) -> bool:
        place = method.partition("artefact=")[2]
        return not place or (self.models / place).is_file()

    def _ready(self, task: Task) -> bool:
        source = next((file for m, file in MODELS.items() if task.name == f"convert-{_short(m)}"), None)
        if source is not None and not (self.models / source).is_file():
            return False  # still on its way
        return all(self.ended.get(name) == 0 for name in task.after) and all(name in self.ended for name in task.behind)

    def _lost(self, task: Task) -> bool:
        return any(self.ended.get(name, 0) != 0 for name in task.after)

    def step(self) -> bool:
        """Note what ended and begin what fits; whether something is left to do."""
        for name, (process, task, gpu, begun) in list(self.running.items()):
            status = process.poll()
            if status is None:
                continue
            del self.running[name]
            self.free[gpu] += task.gib
            self.ended[name] = status
            print(
                f"{name}: {'ended' if status == 0 else f'status {status}'}, {time.monotonic() - begun:.0f} s",
                flush=True,
            )
            if status == 0:
                files.append(self.notes, self._line(task) + "\n")
        for task in self.tasks:
            if task.name in self.ended or task.name in self.running:
                continue
            if self._lost(task):
                self.ended[task.name] = 1
                continue
            gpu = self.free.index(max(self.free))
            if not self._ready(task) or min(task.gib, self.memory) > self.free[gpu]:
                continue
            command = self.command(task)
            if command is None:
                self.ended[task.name] = 1
                continue
            self.free[gpu] -= task.gib
            self.running[task.name] = self.start(task, command, gpu), task, gpu, time.monotonic()
        return bool(self.running) or any(task.name not in self.ended for task in self.tasks)

    def stop(self) -> None:
        """End what runs; its rows are kept."""
        for process, *_ in self.running.values():
            process.terminate()
        for process, *_ in self.running.values():
            process.wait()


def begin_with(have: Path, rows: Path, names: Sequence[str]) -> None:
    """Put the files of ``have``, unpacked, into tasks' folders: an evaluation goes on behind rows of its settings."""
    for name in names:
        for path in files_in(have, f"{name.partition('-')[0]}-"):
            place = rows / name / path.name.removesuffix(PACKED)
            if not place.is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content(path))


def joined(rows: Path) -> list[ResultFile]:
    """Rows of equal settings, of all folders."""
    by_name: dict[str, list[ResultFile]] = {}
    for path in sorted(rows.glob(f"*/*{SUFFIX}")):
        if path.stat().st_size:
            by_name.setdefault(path.name, []).append(ResultFile.read(path))
    return [ResultFile.joined(found) for found in by_name.values()]


def snapshot(rows: Path, target: Path) -> int:
    """Write all rows to a compressed archive, in one step; how many there are."""
    found = joined(rows)
    work = target.with_name(target.name + ".partial")
    with tarfile.open(work, "w:xz") as archive:
        for file in found:
            lines = [{"settings": file.settings.to_dict()}, *file.runs, *map(dataclasses.asdict, file.rows.values())]
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
            entry = tarfile.TarInfo(file.path.name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    work.replace(target)
    return sum(len(file.rows) for file in found)


def convert(gguf: Path, folder: Path) -> None:
    """A GGUF file as a folder in bfloat16."""
    from kvfold import models

    loaded, tokenizer, _ = models.load(str(gguf), "bfloat16", "cpu")
    work = folder.with_name(folder.name + ".partial")
    loaded.save_pretrained(work)
    tokenizer.save_pretrained(work)
    work.rename(folder)


def starter(models: Path, out: Path) -> Start:
    """Tasks as processes, each seeing one GPU."""
    (out / "logs").mkdir(parents=True, exist_ok=True)

    def start(task: Task, command: Sequence[str], gpu: int) -> "subprocess.Popen[bytes]":
        seen = {
            "CUDA_VISIBLE_DEVICES": str(gpu) if task.gib else "",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        }
        if task.name.startswith("convert-"):
            (model,) = (m for m in MODELS if f"convert-{_short(m)}" == task.name)
            seen["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // 3))
            words = [sys.executable, __file__, "--convert", str(models / MODELS[model]), str(models / model)]
        else:
            words = [sys.executable, "-m", "kvfold", *command]
        with (out / "logs" / f"{task.name}.log").open("ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, cwd=models, env={**os.environ, **seen})

    return start


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("rows"))
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="tasks whose names begin so (with * for any), and what they need",
    )
    parser.add_argument(
        "--methods", nargs="+", default=[], metavar="M", help="only these of a task's methods; artefacts are not named"
    )
    parser.add_argument(
        "--have",
        type=Path,
        metavar="FOLDER",
        help="rows that are there already: nothing of equal settings is asked twice",
    )
    parser.add_argument("--tag", default="e", help="in the names of artefacts: learned anew, they need another one")
    parser.add_argument("--gpus", type=int, help="how many; by default all")
    parser.add_argument("--memory", type=int, default=72, metavar="GIB", help="of each GPU")
    parser.add_argument("--seconds", type=float, metavar="N", help="end after N seconds; the same command goes on")
    parser.add_argument("--snapshot", type=Path, metavar="FILE", help="archive of all rows, renewed every minute")
    parser.add_argument("--wait", action="store_true", help="models' files may still be on their way")
    parser.add_argument("--list", action="store_true", help="print the commands; run nothing")
    parser.add_argument("--convert", type=Path, nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.convert:
        convert(*asked.convert)
        return 0
    models, data, out = (path.absolute() for path in (asked.models, asked.data, asked.out))
    wanted = only_methods(tasks(out / "texts", data, asked.tag), asked.methods)
    wanted = chosen(wanted, asked.only)
    if asked.list:
        for task in wanted:
            print(shlex.join([task.name, *task.arguments, *(["--methods", *task.methods] if task.methods else [])]))
        return 0
    if not data.is_dir() or not models.is_dir():
        raise KVFoldError(
            f"{'models' if data.is_dir() else 'data'}: no folder there; see --help for what it has to have"
        )
    missing = [
        file
        for m, file in MODELS.items()
        if any(t.name == f"convert-{_short(m)}" for t in wanted)
        and not (models / m / "config.json").is_file()
        and not (models / file).is_file()
    ]
    if missing and not asked.wait:
        raise KVFoldError(f"models: {models} has no {', '.join(missing)}; put them there, or let tasks --wait for them")
    return _run(wanted, models, data, out, asked)


def only_methods(found: Sequence[Task], names: Sequence[str]) -> list[Task]:
    """Tasks with those of their methods that are named; without names, all. Tasks that have none of them are left out."""
    if not names:
        return list(found)
    kept = [dataclasses.replace(task, methods=tuple(m for m in task.methods if plain(m) in names)) for task in found]
    return [few for task, few in zip(found, kept, strict=True) if few.methods or not task.methods]


def chosen(found: Sequence[Task], names: Sequence[str]) -> list[Task]:
    """Tasks whose names begin as a pattern of ``names``, and all that these wait for; without names, all."""
    by_name = {task.name: task for task in found}
    kept = {t.name for t in found if not names or any(fnmatch.fnmatchcase(t.name, f"{name}*") for name in names)}
    if names and not kept:
        raise KVFoldError(f"only: no task begins with {' or '.join(names)}; --list has them")
    waiting = list(kept)
    while waiting:
        task = by_name[waiting.pop()]
        new = {*task.after, *task.behind} - kept
        kept |= new
        waiting += new
    return [task for task in found if task.name in kept]


def _run(wanted: Sequence[Task], models: Path, data: Path, out: Path, asked: argparse.Namespace) -> int:
    (out / "rows").mkdir(parents=True, exist_ok=True)
    if not all((out / "texts" / f"{name}.txt").is_file() for name in TEXTS):
        script = Path(__file__).with_name("evidence_texts.py")
        subprocess.run([sys.executable, str(script), str(data), str(out / "texts")], check=True)
    if asked.have is not None:
        begin_with(asked.have, out / "rows", [task.name for task in wanted if task.methods])
    run = Run(wanted, models, out, starter(models, out), asked.gpus or torch.cuda.device_count() or 1, asked.memory)
    begun = renewed = time.monotonic()
    left = True
    try:
        while left and (asked.seconds is None or time.monotonic() - begun < asked.seconds):
            left = run.step()
            if asked.snapshot and time.monotonic() - renewed > 60:
                print(f"{snapshot(out / 'rows', asked.snapshot):,} rows", flush=True)
                renewed = time.monotonic()
            time.sleep(1)
    finally:
        run.stop()
        if asked.snapshot:
            print(f"{snapshot(out / 'rows', asked.snapshot):,} rows", flush=True)
    failed = [name for name, status in run.ended.items() if status != 0]
    if failed:
        print(f"failed: {', '.join(failed)}; {out / 'logs'} says why")
    return int(bool(failed) or left)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KVFoldError as error:
        sys.exit(f"evidence_rows: error: {error}")
