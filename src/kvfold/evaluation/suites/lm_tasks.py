"""Tasks of lm-eval as items of the loop: a document each, its requests answered through the folded cache."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.suites.base import Item, Measure, Own, Prompt, Suite

if TYPE_CHECKING:
    from kvfold.methods.base import Method

PREFIX = "lm-eval:"
"""Begins the name of a suite that is a task of lm-eval."""
FEWSHOT_SEED = 1234
"""Draws solved examples; lm-eval's own default."""


@dataclasses.dataclass(frozen=True)
class LmEval(Suite):
    """Documents of tasks, in the order of their data sets.

    Attributes
    ----------
    tokenizer
    tasks
        Names of tasks, groups or tags.
    folder
        Of further tasks as YAML files; None: lm-eval's own.
    chat
        Whether the model's chat template is used.
    """

    tokenizer: PreTrainedTokenizerBase
    tasks: tuple[str, ...]
    folder: str | None = None
    chat: bool = False

    name = "lm-eval"
    summary = "tasks of lm-eval, each with its own prompts and metrics"
    measures = (Measure("score"),)
    version = 2

    @cached_property
    def _found(self) -> dict[str, Any]:
        """Tasks by name."""
        if importlib.util.find_spec("lm_eval") is None:
            raise KVFoldError('suite: lm-eval is not installed; pip install "kvfold[lm-eval]"')
        from lm_eval.tasks import TaskManager

        try:
            manager = TaskManager(include_path=self.folder, include_defaults=self.folder is None)
            if not set(self.tasks) <= set(manager.all_tasks):  # to index lm-eval's own takes many seconds
                manager = TaskManager(include_path=self.folder)
            return dict(manager.load(list(self.tasks))["tasks"])
        except Exception as error:  # unknown names, and what data sets of the hub raise
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise KVFoldError(
                f"suite: lm-eval does not give {', '.join(self.tasks)} ({why}); `lm-eval ls tasks` lists its names; its data "
                "come from the hub, and tasks of your own from a folder of YAML files: --data FOLDER"
            ) from error

    @cached_property
    def _requests(self) -> dict[tuple[str, int], list[Any]]:
        """Requests by task and document."""
        found: dict[tuple[str, int], list[Any]] = {}
        for name, task in self._found.items():
            options: dict[str, Any] = {}
            if self.chat:
                options = {"apply_chat_template": True, "chat_template": self._rendered}
            task.set_fewshot_seed(FEWSHOT_SEED)  # else every process draws other examples
            task.build_all_requests(limit=None, **options)
            for request in task.instances:
                found.setdefault((name, int(request.doc_id)), []).append(request)
        return found

    def _rendered(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as one prompt; without a generation prompt its last message is the answer's beginning, and goes on."""
        try:
            found = self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # templates raise what they like
            raise KVFoldError(f"model: its chat template refuses a task of lm-eval ({error}); give --raw") from error
        return str(found)

    def items(self, lengths: Sequence[int], limit: int, seeds: int) -> list[Item]:
        """The first ``limit`` documents of every task."""
        found = []
        for name in self._found:
            documents = sorted(document for task, document in self._requests if task == name)
            found += [Item(name, None, 0, document) for document in documents[:limit]]
        return found

    def prompt(self, item: Item) -> Prompt:
        """No tokens, but what is hashed: all requests, and the document with its answer. The model is given the requests by
        :meth:`ask`, cut to its context.
        """
        requests = self._requests[item.task, item.index]
        asked = json.dumps([[request.args for request in requests], requests[0].doc], default=str)
        return Prompt(torch.tensor([list(hashlib.sha256(asked.encode()).digest())]), 1)

    def ask(self, model: PreTrainedModel, item: Item, method: Method, chunk: int) -> Own:
        from kvfold.evaluation.harness import KVFoldLM

        task, requests = self._found[item.task], self._requests[item.task, item.index]
        lm = KVFoldLM.of(model, self.tokenizer, method, chunk)
        said = ""
        for request in requests:
            (response,) = getattr(lm, request.request_type)([request], disable_tqdm=True)
            request.resps, request.filtered_resps = [response], {}
            said = response if isinstance(response, str) else said
        scores: dict[str, float | None] = {}
        for ensemble in task._filters:
            ensemble.apply(requests)
        for name in requests[0].filtered_resps:
            graded = task.process_results(requests[0].doc, [request.filtered_resps[name] for request in requests])
            for metric, value in graded.items():
                if isinstance(value, bool | int | float) or hasattr(value, "item"):
                    scores[metric if name == "none" else f"{metric},{name}"] = float(value)
        return Own({"score": _main(task, scores), **scores}, lm.read, lm.tested, lm.sizes, said)

    def options(self) -> dict[str, Any]:
        import lm_eval

        return {"chat": self.chat, "lm_eval": lm_eval.__version__, "version": self.version}

    def texts(self) -> dict[str, str]:
        """Tasks by their configuration; what they ask is in the rows' hashes."""
        found = {}
        for name, task in self._found.items():
            held = json.dumps(task.config.to_dict(), default=lambda x: type(x).__name__, sort_keys=True)
            found[name] = hashlib.sha256(held.replace(str(Path.cwd()), "").encode()).hexdigest()
        return found


def _main(task: Any, scores: dict[str, float | None]) -> float | None:
    """The first metric that is the better the higher, one whose mean over documents is the task's before others: lambada's
    first metric is a log-likelihood, of which a perplexity is made.

    Raises
    ------
    KVFoldError
        There is none.
    """
    higher, made = task.higher_is_better(), task.aggregation()
    good = {key: value for key, value in scores.items() if higher.get(key.partition(",")[0], True)}
    how = {key: getattr(made.get(key.partition(",")[0]), "__name__", "mean") for key in good}
    means = [key for key in good if how[key] in ("mean", "nanmean")]
    if chosen := means or [key for key in good if how[key] != "bypass"]:
        return good[chosen[0]]
    raise KVFoldError(
        f"suite: {task.config.task} of lm-eval has no metric that is a number per document and the better the higher; it has "
        f"{', '.join(scores) or 'none that is a number'}"
    )
