"""What papers measured, as suites: their tasks, and how they put them into one number."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvfold.evaluation.suites.infinitebench import TASKS as INFINITE
from kvfold.evaluation.suites.lm_tasks import PREFIX

EIGHT = ("qasper", "qmsum", "multi_news", "trec", "triviaqa", "samsum", "lcc", "repobench-p")
SIX = ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh", "hotpotqa", "2wikimqa")
REASONING = {
    "gsm8k": 0.2,
    "mmlu_pro_math": 0.1,
    "mmlu_pro_law": 0.1,
    "ifeval": 0.2,
    "gpqa_main_cot_zeroshot": 0.2,
    "bbh": 0.2,
}
"""SQuat's tasks of lm-eval and what they weigh (appendix E.2)."""


@dataclasses.dataclass(frozen=True)
class Paper:
    """What a paper's tables are made of.

    Attributes
    ----------
    title
    suites
        Suites of this package and their tasks; none: the suite's own.
    averages
        The paper's own averages by what they are over, each as its tasks' weights.
    """

    title: str
    suites: dict[str, tuple[str, ...]]
    averages: dict[str, dict[str, float]]


def _mean(tasks: Sequence[str]) -> dict[str, float]:
    return {task: 1 / len(tasks) for task in tasks}


PAPERS: dict[str, Paper] = {
    "paper:kivi": Paper(
        "KIVI (2402.02750): eight tasks of LongBench", {"longbench": EIGHT}, {"LongBench": _mean(EIGHT)}
    ),
    "paper:squat": Paper(
        "SQuat (2503.24358): six tasks of lm-eval, eight of LongBench, MATH",
        {**{f"{PREFIX}{task}": () for task in REASONING}, "longbench": EIGHT, "math": ()},
        {"lm-eval": REASONING, "LongBench": _mean(EIGHT)},
    ),
    "paper:qjl": Paper(
        "QJL (2406.03482): six question-answering tasks of LongBench, five short tasks of lm-eval",
        {
            "longbench": SIX,
            **{f"{PREFIX}{task}": () for task in ("lambada_openai", "hellaswag", "piqa", "mathqa", "mmlu")},
        },
        {"LongBench": _mean(SIX)},
    ),
    "paper:innerq": Paper("InnerQ (2602.23200): GSM8K, strict and flexible", {"gsm8k": ()}, {"GSM8K": {"gsm8k": 1.0}}),
    "paper:commvq": Paper(
        "CommVQ (2506.18879): eight tasks of LongBench, nine of InfiniteBench, GSM8K",
        {"longbench": EIGHT, "infinitebench": (), "gsm8k": ()},
        {"LongBench": _mean(EIGHT), "InfiniteBench": _mean(tuple(INFINITE))},
    ),
}
