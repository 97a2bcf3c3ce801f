"""One schema for every result: a header that says what was run, and a row per method."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kvfold import files, outlet
from kvfold.errors import KVFoldError, OutputError


class Keyed(Protocol):
    """A dataclass of measurements that knows what identifies it within a run."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> str: ...


RowType = TypeVar("RowType", bound=Keyed)


@dataclasses.dataclass(frozen=True)
class Header:
    """What was run: two results with equal `identity` can stand in one table.

    Attributes
    ----------
    versions
        Of kvfold, torch, transformers and python.
    model, parameters, dtype
        Name, number of weights and their type. Full-precision sizes are counted in this type.
    device
        Name of the CPU or GPU.
    threads
        CPU threads of torch.
    text, text_sha256
        Where the text came from, and the hash of its UTF-8 bytes; of several texts, their names and the hash of the tokens.
    texts
        SHA-256 of every text in UTF-8, by source.
    prefixes
        Numbers of tokens prefilled; every row has its own. Files of before there were several have ``prefix``, an integer.
    tokens, chunk, new_tokens
        Tokens scored, query tokens per scoring call, tokens generated for the decode speed.
    seed
        Given to torch before each method.
    date
        Start of the run, ISO 8601, UTC.
    pairs
        Key-value pairs that ``compare`` asks for after each prefix at most; 0: none, as in files of before there were any.
    """

    versions: dict[str, str]
    model: str
    parameters: int
    dtype: str
    device: str
    threads: int
    text: str
    text_sha256: str
    texts: dict[str, str]
    prefixes: list[int]
    tokens: int
    chunk: int
    new_tokens: int
    seed: int
    date: str
    pairs: int = 0

    def identity(self) -> dict[str, Any]:
        """Everything but the date."""
        fields = dataclasses.asdict(self)
        del fields["date"]
        return fields


@dataclasses.dataclass(frozen=True)
class Row:
    """One method's cost and saving after one prefix. Numbers that are not finite, or do not apply, are None.

    Attributes
    ----------
    method
        Canonical string of the method.
    prefix
        Tokens prefilled.
    tested
        Scored tokens that read packed keys and values. Where there are none, nothing was tested, and `ppl`, `kld` and `top1`
        are None.
    bits_without_tables, effective_bits
        Bits per cached element of the packed part, without and with the tables that all sequences share; None when nothing
        was packed.
    cache_bytes, full_cache_bytes
        Bytes of the cache's tensors, and of a full-precision cache of the same tokens in the model's dtype, both after
        ``prefix + tokens`` tokens.
    packed_bytes, window_bytes, state_bytes, table_bytes
        The parts of `cache_bytes`: packed tokens, full-precision windows, per-sequence state, and shared tables.
    cache_tokens
        Tokens in the cache when it was measured.
    ppl
        Perplexity of the scored tokens.
    kld
        Mean KL(full || folded) per token, nats.
    top1
        Share of tokens where both predict the same token, 0 to 1.
    prefill_tokens_per_s, decode_tokens_per_s
        Prefill of the prefix, and greedy generation one token at a time, both warm: after a throw-away cache, and after a first
        token, whose step may capture a graph.
    decode_path
        How tokens were generated: ``graph`` (a CUDA graph), or ``steps: `` and why not in one.
    seconds
        Wall-clock time of the row, without its throw-away cache.
    continuation
        Text generated greedily after the scored tokens.
    pairs
        Key-value pairs asked for after a list of them that fills the prefix; 0: none, as in rows of before there were any.
    pairs_exact, full_pairs_exact
        Share of their values of which every token is the first choice, 0 to 1, and that with everything in full precision.
        None where none is asked for; the first also where no token read packed keys and values.
    pairs_nll, full_pairs_nll
        Mean negative log-likelihood of the values' tokens, in nats, likewise.
    """

    method: str
    prefix: int
    tested: int
    bits_without_tables: float | None
    effective_bits: float | None
    cache_bytes: int
    full_cache_bytes: int
    ppl: float | None
    kld: float | None
    top1: float | None
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    decode_path: str
    seconds: float
    packed_bytes: int
    window_bytes: int
    state_bytes: int
    table_bytes: int
    cache_tokens: int
    continuation: str
    pairs: int = 0
    pairs_exact: float | None = None
    pairs_nll: float | None = None
    full_pairs_exact: float | None = None
    full_pairs_nll: float | None = None

    @property
    def key(self) -> str:
        """Identifies the row within a run."""
        return f"{self.method}|{self.prefix}"


def read_row(kind: type[RowType], fields: dict[str, Any]) -> RowType:
    """Read a row that `dataclasses.asdict` wrote; fields that have a default may be missing, as they are in older files. A
    method gets the name that it has now.

    Raises
    ------
    KVFoldError
        Another field is missing, or one is unknown.
    """
    names = {field.name for field in dataclasses.fields(kind)}
    optional = {f.name for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}
    if wrong := (names - optional - set(fields)) | (set(fields) - names):
        raise KVFoldError(f"row: fields {sorted(wrong)} are missing or unknown")
    if "+v=" in str(fields.get("method")):
        from kvfold.methods import canonical

        fields = {**fields, "method": canonical(fields["method"])}
    return kind(**fields)


def identity_of(header: dict[str, Any]) -> dict[str, Any]:
    """What :meth:`Header.identity` says, of a header that was written; fields that older files lack have their defaults."""
    known = {f.name: f.default for f in dataclasses.fields(Header) if f.default is not dataclasses.MISSING}
    return {name: value for name, value in (known | header).items() if name != "date"}


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def write_json(path: Path, value: Any, result: object = None) -> None:
    """Write a JSON file, as :func:`kvfold.files.write` does.

    Raises
    ------
    OutputError
        It cannot be written; carries ``result``, or the value.
    """
    text = outlet.as_json(value)  # a name may be no text, such as a path in another encoding
    try:
        files.write(path, text + "\n")
    except OSError as error:
        why = f"json: cannot write {path}: {error.strerror or error}"
        raise OutputError(why, value if result is None else result) from error


NOW = ", now "


def differing(old: dict[str, Any], new: dict[str, Any], then: str = " and ") -> list[str]:
    """What differs between what two runs say of themselves: ``tokens 256 and 512``, with ``then`` between them."""
    lines = []
    for name in dict.fromkeys((*old, *new)):
        left, right = old.get(name), new.get(name)
        if left == right:
            continue
        if isinstance(left, dict) and isinstance(right, dict):
            lines += [f"{name} {line}" for line in differing(left, right, then)]
        else:
            lines.append(f"{name} {brief(left)}{then}{brief(right)}")
    return lines


def differing_origins(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The same of hashes of weights and artefacts, old and ``now`` new; what only one of them read is no difference."""
    shared = old.get("artefacts", {}).keys() & new["artefacts"].keys()
    weights = differing({"weights": old.get("weights")}, {"weights": new.get("weights")}, NOW)
    artefacts: list[str] = []
    for place in sorted(shared):
        artefacts += differing({place: old["artefacts"][place]}, {place: new["artefacts"][place]}, NOW)
    return weights + [f"artefact {line}" for line in artefacts]


def number(rows: int) -> str:
    """``1 row``, ``2 rows``."""
    return f"{rows} row{'' if rows == 1 else 's'}"


def brief(value: Any) -> str:
    """For a sentence: of a hash the first digits."""
    return value[:12] if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else str(value)


class Sidecar(Generic[RowType]):
    """Finished rows next to the result that is being made, so that a killed run goes on where it stopped.

    Line 1 is the header's identity and the hashes of what was read, every further line a row.
    """

    def __init__(self, path: Path, kind: type[RowType]) -> None:
        self.path, self.kind, self.lost = path, kind, False

    @classmethod
    def of(cls, json_path: Path | None, kind: type[RowType]) -> Sidecar[RowType] | None:
        """That of a result; None where there is no file for it to lie beside."""
        if json_path is None or files.is_stream(json_path):
            return None
        return cls(json_path.with_name(json_path.name + ".partial"), kind)

    @staticmethod
    def kept(json_path: Path) -> int:
        """How many finished rows lie next to a result; an interrupt may come between writing one and telling of it."""
        try:
            lines = json_path.with_name(json_path.name + ".partial").read_text(encoding="utf-8").splitlines()
        except OSError:
            return 0
        return max(0, len(lines) - 1)

    def start(self, header: Header, made_of: dict[str, Any], force: bool = False) -> dict[str, RowType]:
        """Rows kept from a run with the same header, by key; starts afresh when there are none.

        A line that was cut short by the kill is dropped.

        Parameters
        ----------
        made_of
            Hashes of weights and artefacts, which may be others under the same names: rows of both are no one table.
        force
            Drop rows of a run with another header.

        Raises
        ------
        KVFoldError
            Nothing can be written there, or there are rows of a run with another header, or a file that no run left.
        """
        rows: dict[str, RowType] = {}
        held = b""
        with contextlib.suppress(OSError):
            held = self.path.read_bytes()
        if held and not held.startswith(b'{"versions": '):  # with what every header begins
            raise KVFoldError(
                f"json: {self.path}, where rows are kept, is another file; move it away, or give another name"
            )
        why: list[str] = []
        lines: list[str] = []
        with contextlib.suppress(ValueError, TypeError):
            lines = held.decode("utf-8").splitlines()
            begun: dict[str, Any] = json.loads(lines[0]) if lines else {}
            origins = begun.pop("made_of", {})
            if begun:
                why = differing(identity_of(begun), header.identity(), NOW) + differing_origins(origins, made_of)
            for line in [] if why else lines[1:]:
                with contextlib.suppress(json.JSONDecodeError, KVFoldError, TypeError):
                    row = read_row(self.kind, json.loads(line))
                    rows[row.key] = row
            if not why:
                made_of = {**made_of, "artefacts": origins.get("artefacts", {}) | made_of["artefacts"]}
        if why and len(lines) > 1 and not force:  # of whatever command: its rows may have other fields
            raise KVFoldError(
                f"json: {self.path} holds {number(len(lines) - 1)} of a stopped run of other settings ({'; '.join(why)}); "
                "finish that run, give another name, move them away, or drop them with --force"
            )
        first = {**header.identity(), "made_of": made_of}
        kept = [first, *(dataclasses.asdict(row) for row in rows.values())]
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in kept)
        try:
            files.write(self.path, text)
        except OSError as error:
            raise KVFoldError(f"json: cannot keep rows in {self.path}: {error.strerror}") from error
        return rows

    def add(self, row: RowType) -> None:
        """Keep a row. A run whose rows cannot be kept any more goes on, and says so once: it may still be printed."""
        try:
            files.append(self.path, json.dumps(dataclasses.asdict(row), allow_nan=False) + "\n")
        except OSError as error:
            if not self.lost:
                print(f"kvfold: a row is not kept in {self.path.name}: {error.strerror}", file=sys.stderr)
            self.lost = True

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
