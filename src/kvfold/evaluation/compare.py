"""The main job: the same text and prompt under every method, one row each at every prefix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation import loop
from kvfold.evaluation.beside import Beside
from kvfold.evaluation.checked import OnMethod, checked
from kvfold.evaluation.earlier import Earlier
from kvfold.evaluation.machine import make_header
from kvfold.evaluation.perplexity import CHUNK, perplexity_of
from kvfold.evaluation.results import Result, made_of
from kvfold.evaluation.schema import Header, Row, Sidecar, write_json
from kvfold.evaluation.suites.beginning import NEW_TOKENS, Beginning
from kvfold.evaluation.suites.pairs import PAIRS
from kvfold.evaluation.text import Text
from kvfold.evaluation.windows import encode
from kvfold.models import ModelInfo

if TYPE_CHECKING:
    from kvfold.methods.base import Method

PREFIX = 1024
TOKENS = 512

Job = tuple[str, int]
"""Method and prefix of a row."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Header and rows: prefix by prefix, in the order of the methods; where a file is written, hashes of what was read."""

    header: Header
    rows: list[Row]
    made_of: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        held = {"header": dataclasses.asdict(self.header), "rows": [dataclasses.asdict(row) for row in self.rows]}
        return held | ({"made_of": self.made_of} if self.made_of else {})


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    info: ModelInfo,
    methods: Sequence[str | Method],
    text: Text,
    *,
    prefix: int | Sequence[int] = PREFIX,
    tokens: int = TOKENS,
    new_tokens: int = NEW_TOKENS,
    pairs: int = PAIRS,
    chunk: int = CHUNK,
    seed: int = 0,
    json_path: Path | None = None,
    force: bool = False,
    on_method: OnMethod | None = None,
    on_earlier: Callable[[int, int], None] | None = None,
    on_start: Callable[[list[Job], dict[Job, Row]], None] | None = None,
    on_tokens: Callable[[str, int], None] | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> Comparison:
    """Score the same text under every method, at every prefix.

    Each method prefills a prefix, scores the next `tokens` through its cache, and goes on greedily for `new_tokens`.
    Full-precision logits are computed once per prefix. Then it is asked for values of a list of random key-value pairs
    that fills a prefix of the same length; the model reads the list once for all methods.

    Parameters
    ----------
    model, tokenizer, info
        As `kvfold.models.load` returns them.
    methods
        Method strings or objects; repeated ones are run once.
    text
        What is read, from its beginning; see `encode`.
    prefix
        Tokens prefilled: a number, or several for as many rows of each method.
    tokens, new_tokens, chunk
        Token counts; see `Header`.
    pairs
        Values to ask for at most; a short prefix lists fewer pairs. 0: none.
    seed
        Given to torch before each row. The methods carry their own seeds; this one is for the rest.
    json_path
        Where the result goes, written at the end in one step. Rows are kept beside it meanwhile, and a later call with
        the same header takes them over. Other rows of the same settings that the file holds stay in it.
    force
        Replace the file, and rows beside it, whatever they are of.
    on_method, on_earlier, on_start, on_tokens, on_row
        For progress: each method that was checked (see :func:`~kvfold.evaluation.checked.checked`); how many rows of the file
        stay and how many are made anew, where it holds any; all rows to be made, as (method, prefix), and those taken over;
        (what runs, tokens done); each new row.

    Raises
    ------
    KVFoldError
        A method, the text or a count does not fit the model, or `json_path` holds rows of other settings. All are tried before
        the first is run.
    OutputError
        The result cannot be written; it carries the :class:`Comparison`, and the rows stay beside the file.
    """
    from kvfold import methods as registry

    if not methods:
        raise KVFoldError(f"methods: none given; known: {', '.join(registry.REGISTRY)}")
    if pairs < 0:
        raise KVFoldError(f"pairs: {pairs}; give 0 or more")
    pieces = encode(tokenizer, text, prefix, tokens, new_tokens, info.max_context)
    suite = Beginning(tokenizer, text, tokens, new_tokens, info.max_context, on_tokens, pairs)
    suite.check_pairs(list(pieces))
    specs = checked(model, methods, on_method)
    header = make_header(
        model,
        info,
        text=text.source,
        text_sha256=text.sha256,
        texts={text.name: text.sha256},
        prefixes=list(pieces),
        tokens=tokens,
        chunk=chunk,
        new_tokens=new_tokens,
        seed=seed,
        pairs=pairs,
    )
    jobs: list[Job] = [(name, length) for length in pieces for name in specs]
    sidecar = Sidecar.of(json_path, Row)
    origins = made_of(model, specs.values()) if sidecar else {}
    asked = {f"{name}|{length}" for name, length in jobs}
    earlier = Earlier.of(json_path, Row, header, origins, asked, force)
    earlier.tell(on_earlier)
    kept = sidecar.start(header, origins, force) if sidecar else {}
    done = {(row.method, row.prefix): row for row in kept.values() if (row.method, row.prefix) in jobs}
    if on_start is not None:
        on_start(jobs, done)
    items = [dataclasses.replace(item, seed=seed) for item in suite.items(list(pieces), 1, 1)]
    length_of = {item.name: item.length for item in items}
    keeper = Beside(sidecar, kept, lambda method, item: f"{method}|{length_of[item]}", row_of)
    planned = loop.Plan(specs, [(suite, items)], None, chunk)
    for result in loop.rows(model, tokenizer, suite, items, planned, keeper):
        done[result.method, result.prefilled] = row = row_of(result)
        if on_row is not None:
            on_row(row)
    found = Comparison(header, [done[job] for job in jobs], origins)
    if json_path is not None:
        rest = [row for row in kept.values() if row.key not in asked]
        whole = Comparison(header, *earlier.joined(found.rows, rest, origins))
        write_json(json_path, whole.to_dict(), found)
    if sidecar is not None:
        sidecar.remove()
    return found


def row_of(result: Result) -> Row:
    """A row of the suite ``compare`` in this command's schema."""
    costs, bytes_ = result.costs, ("packed_bytes", "window_bytes", "state_bytes", "table_bytes")
    assert costs is not None and result.decode_tokens_per_s is not None and result.decode_path is not None
    assert result.cache_bytes is not None and result.full_cache_bytes is not None
    return Row(
        method=result.method,
        prefix=result.prefilled,
        tested=result.tested,
        bits_without_tables=result.bits_without_tables,
        effective_bits=result.effective_bits,
        cache_bytes=result.cache_bytes,
        full_cache_bytes=result.full_cache_bytes,
        ppl=perplexity_of(result.scores["nll"]),
        kld=result.scores["kld"],
        top1=result.scores["top1"],
        prefill_tokens_per_s=costs["prefill_tokens_per_s"],
        decode_tokens_per_s=result.decode_tokens_per_s,
        decode_path=result.decode_path,
        seconds=result.seconds,
        **{name: int(costs[name]) for name in (*bytes_, "cache_tokens")},
        continuation=result.answer or "",
        pairs=int(costs.get("pairs", 0)),
        pairs_exact=result.scores.get("pairs_exact"),
        pairs_nll=result.scores.get("pairs_nll"),
        full_pairs_exact=costs.get("full_pairs_exact"),
        full_pairs_nll=costs.get("full_pairs_nll"),
    )
