"""Where benchmarks' data come from: JSON lines in a file or a folder, or a data set of the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from kvfold.errors import KVFoldError
from kvfold.evaluation.suites.base import load_records
from kvfold.files import expanded

HUB = "hf:"
"""Begins the name of a data set of the hub, in place of a file."""


def load_task(
    data: str | None, suite: str, task: str, needs: Sequence[str], where: str
) -> tuple[list[dict[str, Any]], str]:
    """The records of a task, and their SHA-256.

    Parameters
    ----------
    data
        A folder with ``TASK.jsonl``; a file, of which the records whose ``dataset`` is the task are taken, or all if none says;
        or ``hf:REPOSITORY``, which is read with the package ``datasets``.
    needs
        Keys that every record has.
    where
        From where the data can be had; for errors.

    Raises
    ------
    KVFoldError
        Nothing is there; says what is missing and where to get it.
    """
    if data is None:
        raise KVFoldError(
            f"data: {suite} needs its records; get them from {where}, and give --data FOLDER with {task}.jsonl in it, a .jsonl "
            f"file, or --data {HUB}REPOSITORY"
        )
    if data.startswith(HUB):
        return _from_hub(data.removeprefix(HUB), task, needs)
    path = expanded(data)
    if path.is_dir():
        if not (path / f"{task}.jsonl").is_file():
            raise KVFoldError(f"data: {data} has no {task}.jsonl, which {suite} needs; get it from {where}")
        records, digest = load_records(path / f"{task}.jsonl", "data", needs)
    else:
        records, digest = load_records(path, "data", needs)
        named = {str(record["dataset"]) for record in records if "dataset" in record}
        records = [record for record in records if str(record.get("dataset", task)) == task]
        if not records:
            raise KVFoldError(
                f"data: {data} has no records of {task}, which {suite} needs; it has {', '.join(sorted(named))}"
            )
    if not records:
        raise KVFoldError(f"data: {task}.jsonl of {data} has no records")
    return records, digest


def _from_hub(repository: str, task: str, needs: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    try:
        import datasets
    except ImportError as error:
        raise KVFoldError("data: the hub's data sets need the package datasets; run: pip install datasets") from error
    try:
        records = [dict(record) for record in datasets.load_dataset(repository, task, split="test")]
    except Exception as error:  # the network, the hub, and the data set's own code raise what they like
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KVFoldError(
            f"data: the hub does not give {task} of {repository} ({why}); give a file or a folder"
        ) from error
    missing = [key for key in needs if not records or key not in records[0]]
    if missing:
        raise KVFoldError(f"data: {task} of {repository} has no {', '.join(missing)}; needed: {', '.join(needs)}")
    text = "".join(json.dumps(record, sort_keys=True, default=str) + "\n" for record in records)
    return records, hashlib.sha256(text.encode()).hexdigest()
