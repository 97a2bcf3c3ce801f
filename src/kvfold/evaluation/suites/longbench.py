"""LongBench's tasks (Bai et al., 2023, arXiv 2308.14508) over its own records, with this project's wording of the questions.

Which tasks there are, what they ask, how much may be generated and how answers are graded is the paper's. Prompts longer than
the length asked for lose their middle, as there.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from kvfold.evaluation.suites import metrics
from kvfold.evaluation.suites.base import answers_of
from kvfold.evaluation.suites.records import Records, Task

WHERE = "https://huggingface.co/datasets/THUDM/LongBench (data.zip)"
FIELDS = ("input", "context", "answers")
_question = partial(Task, ask="Question: {input}\nAnswer with as few words as possible.", lead="Answer:")
_summary = partial(Task, lead="Summary:", grade=metrics.rouge_l)
_examples = partial(Task, one_line=True, plain=True, ask="\n\n{input}")
_code = partial(Task, ask="", grade=metrics.similar_line, plain=True)

TASKS: dict[str, Task] = {
    "narrativeqa": _question(128, "This is a story. A question about it follows.\n\n"),
    "qasper": _question(
        128,
        "This is a scientific article. A question about it follows; if it cannot be answered, the answer is unanswerable.\n\n",
    ),
    "multifieldqa_en": _question(64, "A question about this text follows.\n\n"),
    "multifieldqa_zh": _question(64, "A question about this text follows.\n\n"),
    "hotpotqa": _question(32, "A question about these passages follows.\n\n"),
    "2wikimqa": _question(32, "A question about these passages follows.\n\n"),
    "musique": _question(32, "A question about these passages follows.\n\n"),
    "gov_report": _summary(512, "This is a report of a government.\n\n", "Summarize the report on one page."),
    "qmsum": _summary(
        512, "This is the transcript of a meeting.\n\n", "{input}\nAnswer in one or a few sentences.", lead="Answer:"
    ),
    "multi_news": _summary(
        512, "These are articles about the same news.\n\n", "Summarize all of the news on one page."
    ),
    "trec": _examples(64, "Name the type of each question, as in these examples.\n\n", ask="\n{input}", grade=None),
    "triviaqa": _examples(32, "Answer each question from its passage, as in these examples.\n\n"),
    "samsum": _examples(128, "Summarize each dialogue, as in these examples.\n\n", grade=metrics.rouge_l),
    "passage_count": Task(
        32,
        "These are paragraphs, some of them more than once.\n\n",
        "How many different paragraphs are there? Answer with the number.",
        "The number is",
        metrics.numbers_right,
    ),
    "passage_retrieval_en": Task(
        32,
        "These are thirty paragraphs.\n\n",
        "Which paragraph is this a summary of?\n\n{input}\n\nAnswer with its name, such as Paragraph 1.",
        "It is",
        metrics.numbers_right,
    ),
    "lcc": _code(64),
    "repobench-p": _code(64, ask="{input}"),
}


@dataclasses.dataclass(frozen=True)
class LongBench(Records):
    """Records with ``input``, ``context``, ``answers`` and, for ``trec``, ``all_classes``."""

    name = "longbench"
    summary = "LongBench's tasks over its own records, each with its own grade"
    table = TASKS
    fields = FIELDS
    where = WHERE
    version = 2

    def expected(self, task: Task, record: dict[str, Any]) -> tuple[str, ...]:
        return answers_of(record["answers"])
