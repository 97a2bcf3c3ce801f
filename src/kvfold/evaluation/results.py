"""Where results are kept: a folder with one file per set of settings, one line per item and method.

The first line of a file holds the settings: all that must be alike for two rows to stand in one comparison. A line before the
rows of each process says when, with what code and on how many threads it ran. A row is on disk before the next item begins, so
a kill loses one item, and the same command goes on behind it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold import files
from kvfold.arithmetic import lasting
from kvfold.errors import KVFoldError
from kvfold.evaluation import schema
from kvfold.evaluation.schema import read_row

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from transformers import PreTrainedModel

    from kvfold.methods import Method

SCHEMA = 1
SUFFIX = ".jsonl"
PACKED = ".xz"
"""Behind the suffix of files that are committed: compressed, read, and not written to."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What must be alike for rows to be compared.

    Attributes
    ----------
    suite
        Name of the suite.
    options
        Its own settings: tokens scored or generated, shots, templates, the version of its prompts.
    texts
        SHA-256 of every text and data file it reads, by name.
    model, parameters, weights_sha256
        Name, number of weights, and hash of their names, shapes and values.
    dtype, device
        Of the weights; the device's name.
    windows
        Tokens that every method keeps in full precision, (sink, recent), or None where each keeps its own.
    chunk
        Query tokens per call.
    versions
        Of kvfold, torch, transformers and python.
    """

    suite: str
    options: dict[str, Any]
    texts: dict[str, str]
    model: str
    parameters: int
    weights_sha256: str
    dtype: str
    device: str
    windows: tuple[int, int] | None
    chunk: int
    versions: dict[str, str]
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """As JSON gives it back."""
        found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return found

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of all of it: part of the file's name."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Settings:
        """Of what :meth:`to_dict` gave.

        Raises
        ------
        KVFoldError
            A field is missing or unknown.
        """
        found = read_row(cls, fields)  # type: ignore[type-var]
        return dataclasses.replace(
            found, windows=None if found.windows is None else (found.windows[0], found.windows[1])
        )


def differing(a: Settings, b: Settings) -> list[str]:
    """What differs between two sets of settings: ``dtype float32 and bfloat16``, most telling first."""
    left, right = ({field.name: getattr(of, field.name) for field in dataclasses.fields(Settings)} for of in (a, b))
    return schema.differing(left, right)


@dataclasses.dataclass(frozen=True)
class Result:
    """One method on one item. Numbers that are not finite, or do not apply, are None.

    Attributes
    ----------
    method, item
        Canonical string of the method; what it was asked, within the suite.
    task, length, seed, tags
        Kind of item, tokens of its prompt as asked for (None where a suite has no lengths), its seed, and what else places
        it (a needle's depth).
    prompt_sha256
        Of the token ids and of how many of them were prefilled: rows are paired only where it is alike.
    prefilled, read
        Tokens prefilled in the first call, which attends exactly, and tokens scored or generated after it through the cache.
    tested
        Those of them whose call found packed keys and values; where there are none, nothing was tested and `scores` are None.
    scores
        By measure.
    series
        By measure, along the scored tokens: means of pieces of equal length.
    bits_without_tables, effective_bits
        Bits per cached element of the packed part, without and with the tables that all sequences share; None when nothing
        was packed.
    cache_bytes, full_cache_bytes
        Of the cache's tensors at the end, and of a full-precision cache of the same tokens in the model's dtype. None in rows
        of ``kvfold domains``, which do not say.
    sink, recent
        The method's windows. None in rows of ``kvfold compare`` and ``kvfold domains``, which do not say.
    seconds
        Wall-clock time, without the full-precision reference. The model's own work on a prompt is in it only where the row's
        method was the item's first: the others were given what the model had computed.
    run
        Which process made it: the ``run`` of a line above.
    answer
        What was generated; None where nothing was.
    kernel, encoder
        What attended to the folded layers and what encoded them; None in older rows, and where a suite asks by itself.
    decode_tokens_per_s, decode_path
        Of rows of ``compare``, as in :class:`~kvfold.evaluation.schema.Row`.
    costs
        Of rows of ``compare``: bytes of the cache's parts, its tokens, and prefilled tokens per second.
    questions
        Columns of a table with a line per question of the prompt; None where its suite has none, and in older rows. Of
        ``retrieval``: see :meth:`~kvfold.evaluation.suites.text.Retrieval.by_question`.
    """

    method: str
    item: str
    task: str
    length: int | None
    seed: int
    tags: dict[str, Any]
    prompt_sha256: str
    prefilled: int
    read: int
    tested: int
    scores: dict[str, float | None]
    series: dict[str, list[float | None]]
    bits_without_tables: float | None
    effective_bits: float | None
    cache_bytes: int | None
    full_cache_bytes: int | None
    sink: int | None
    recent: int | None
    seconds: float
    run: int
    answer: str | None = None
    kernel: str | None = None
    encoder: str | None = None
    decode_tokens_per_s: float | None = None
    decode_path: str | None = None
    costs: dict[str, float] | None = None
    questions: dict[str, list[float | None]] | None = None

    @property
    def key(self) -> str:
        """Identifies the row within its file."""
        return key_of(self.method, self.item, self.prompt_sha256)


def key_of(method: str, item: str, prompt_sha256: str) -> str:
    """The key of a row that is not there yet."""
    return f"{method}|{item}|{prompt_sha256}"


def content(path: Path) -> bytes:
    """What a file of rows holds, unpacked if it is compressed.

    Raises
    ------
    KVFoldError
        It cannot be read.
    """
    try:
        data = path.read_bytes()
        return lzma.decompress(data) if path.suffix == PACKED else data
    except (OSError, lzma.LZMAError) as error:
        raise KVFoldError(f"results: cannot read {path}: {error}") from error


def files_in(folder: Path, beginning: str = "", suffix: str = SUFFIX) -> list[Path]:
    """Files of rows in a folder, compressed or not, whose names begin so; in the order of their names."""
    return sorted(path for end in (suffix, suffix + PACKED) for path in folder.glob(f"{beginning}*{end}"))


class ResultFile:
    """The rows of one set of settings.

    Attributes
    ----------
    rows
        By key, in the order in which they were made.
    runs
        What the lines before the rows say of the processes that made them.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path, self.settings = path, settings
        self.rows: dict[str, Result] = {}
        self.runs: list[dict[str, Any]] = []
        self._begun = False

    @classmethod
    def of(cls, folder: Path, settings: Settings) -> ResultFile:
        """That of some settings in a folder, with what is in it already.

        Raises
        ------
        KVFoldError
            The file is there and is damaged, or is compressed, or holds rows of other settings.
        """
        path = folder / f"{settings.suite}-{settings.digest}{SUFFIX}"
        packed = path.with_name(path.name + PACKED)
        if packed.is_file():
            raise KVFoldError(
                f"out: {packed} holds rows of these settings, compressed; unpack it (unxz), or give another folder"
            )
        if not path.is_file() or not path.stat().st_size:
            return cls(path, settings)
        found = cls.read(path)
        if found.settings != settings:
            raise KVFoldError(f"out: {path} holds other settings than its name says; move it away")
        return found

    @classmethod
    def read(cls, path: Path) -> ResultFile:
        """Read a file, compressed or not; a last line that a kill cut short is left out.

        Raises
        ------
        KVFoldError
            It cannot be read, or is no file of results; names the line.
        """
        try:
            lines = content(path).decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise KVFoldError(f"results: cannot read {path}: {error}") from error
        found: ResultFile | None = None
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                fields = json.loads(line)
                if found is None:
                    found = cls(path, Settings.read(fields["settings"]))
                elif "run" in fields and "method" not in fields:
                    found.runs.append(fields)
                else:
                    row = read_row(Result, fields)
                    found.rows[row.key] = row
            except (ValueError, KeyError, TypeError) as error:
                if found is not None and isinstance(error, json.JSONDecodeError):
                    continue  # cut short by a kill; the next line stands for itself
                raise KVFoldError(f"results: line {number} of {path} is none of kvfold eval's: {error}") from error
        if found is None:
            raise KVFoldError(f"results: {path} has no settings in its first line")
        return found

    @classmethod
    def joined(cls, found: Sequence[ResultFile]) -> ResultFile:
        """Rows of several files of the same settings, such as the parts of a suite; of rows that are there twice, the first.

        Runs are numbered anew; one that several files have rows of, because they began as copies, is one. Two that only
        say the same of themselves, such as parts that began within one second, stay two.
        """
        whole = cls(found[0].path, found[0].settings)
        rows_of: list[set[str]] = []  # of whole.runs
        for file in found:
            numbers = []
            for said in file.runs:
                rows = {key for key, row in file.rows.items() if row.run == said["run"]}
                alike = (n for n, other in enumerate(whole.runs) if other == {**said, "run": n} and rows & rows_of[n])
                number = next(alike, len(whole.runs))
                if number == len(whole.runs):
                    whole.runs.append({**said, "run": number})
                    rows_of.append(set())
                rows_of[number] |= rows
                numbers.append(number)
            for key, row in file.rows.items():
                whole.rows.setdefault(key, dataclasses.replace(row, run=numbers[row.run]))
        return whole

    def lock(self) -> BaseFileLock:
        """Held while rows are added.

        Raises
        ------
        KVFoldError
            Another process adds rows, or the folder cannot be written.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise KVFoldError(f"out: another process is writing {self.path}; wait, or give another folder") from error
        except OSError as error:
            raise KVFoldError(f"out: cannot write in {self.path.parent}: {error.strerror}") from error
        return lock

    def has(self, method: str, item: str, prompt_sha256: str) -> bool:
        """Whether a row is there already."""
        return key_of(method, item, prompt_sha256) in self.rows

    def check_artefacts(self, learned: Mapping[str, str]) -> None:
        """Refuse rows of other artefacts than those that are in their places now: they would be paired as one method's.

        Parameters
        ----------
        learned
            Hash of every artefact by its place, of :func:`artefacts`.

        Raises
        ------
        KVFoldError
            A run that is in the file had another one in the same place.
        """
        for run in self.runs:
            for place, digest in run.get("artefacts", {}).items():
                if learned.get(place, digest) != digest:
                    raise KVFoldError(
                        f"artefact: {place} is another ({learned[place]}) than when {self.path.name} got rows of it "
                        f"({digest}); give it another name, or another --out"
                    )

    @property
    def run(self) -> int:
        """Number of the process that adds rows now."""
        return len(self.runs) - 1 if self._begun else len(self.runs)

    def add(self, row: Result, run: dict[str, Any]) -> None:
        """Put a row on disk; the first one of a process brings the settings, if they are not there, and ``run``.

        Raises
        ------
        KVFoldError
            It cannot be written.
        """
        lines: list[dict[str, Any]] = []
        try:
            if not self.runs and not self.rows:  # in one step: a file without settings would be nobody's
                files.write(self.path, json.dumps({"settings": self.settings.to_dict()}) + "\n")
        except OSError as error:
            raise KVFoldError(f"out: cannot write {self.path}: {error.strerror}") from error
        if not self._begun:
            self.runs.append({"run": len(self.runs), **run})
            lines.append(self.runs[-1])
            self._begun = True
        lines.append(dataclasses.asdict(row))
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        try:
            files.append(self.path, text)
        except OSError as error:
            raise KVFoldError(f"out: cannot write {self.path}: {error.strerror}") from error
        self.rows[row.key] = row


def as_folder(path: Path) -> Path:
    """A folder for results; made if it is not there.

    Raises
    ------
    KVFoldError
        It cannot be made or written, or is a file.
    """
    if path.exists() and not path.is_dir():
        raise KVFoldError(f"out: {path} is a file; give a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVFoldError(f"out: cannot make the folder {path}: {error.strerror}") from error
    files.check(path / f"results{SUFFIX}", "out")
    return path


def check_folder(path: Path) -> None:
    """Fail as :func:`as_folder` does, and leave nothing: what follows may be refused for another reason."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    as_folder(path)
    with contextlib.suppress(OSError):  # somebody else's run has begun to write there
        for folder in made:
            folder.rmdir()


def weights_sha256(model: PreTrainedModel) -> str:
    """Of all weights: names, types, shapes and bytes. Shared ones count once."""
    import torch

    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def prompt_sha256(ids: Sequence[int], prefilled: int) -> str:
    """Sixteen hexadecimal digits of a prompt's tokens and of how it is cut."""
    return hashlib.sha256(json.dumps([prefilled, list(ids)]).encode()).hexdigest()[:16]


@lasting(None)
def code_sha256() -> str:
    """Twelve hexadecimal digits of the package's source: versions name releases, rows are also made between them."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def artefacts(methods: Iterable[Method]) -> dict[str, str]:
    """Twelve hexadecimal digits of what each artefact holds, by its place: a method's string names the place alone."""
    from kvfold.artefact import checksum, load_cached
    from kvfold.methods.learned import places

    found = {place for method in methods for place in places(method)}
    return {place: checksum({}, load_cached(place).tensors)[:12] for place in sorted(found)}


def made_of(model: PreTrainedModel, methods: Iterable[Method]) -> dict[str, Any]:
    """Hashes of weights and artefacts, whose names say nothing of what they hold."""
    return {"weights": weights_sha256(model), "artefacts": artefacts(methods)}


def this_run(threads: int, learned: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What is written down of this process, and of the artefacts that it reads."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    said = {"date": date, "threads": threads, "code": code_sha256()}
    return {**said, "artefacts": dict(learned)} if learned else said


def rows_of(found: Sequence[ResultFile]) -> Iterator[Result]:
    """All rows, file by file."""
    for file in found:
        yield from file.rows.values()
