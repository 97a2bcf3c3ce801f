"""Grades of answers, 0 to 1, as LongBench and InfiniteBench define them (Bai et al., 2308.14508; Zhang et al., 2402.13718)."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

ARTICLES = re.compile(r"\b(a|an|the)\b")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
DIGITS = re.compile(r"\d+")
WIDE = re.compile("[\u3000-\u9fff\uff00-\uffef]")
"""A character of Chinese or Japanese, which is a word of its own here."""


def normalized(text: str) -> str:
    """Lower case, without punctuation and articles, words apart by one space."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation and not _is_wide_mark(c))
    return " ".join(ARTICLES.sub(" ", WIDE.sub(r" \g<0> ", bare)).split())


def _is_wide_mark(char: str) -> bool:
    """Whether a character is punctuation of Chinese or Japanese."""
    return WIDE.match(char) is not None and unicodedata.category(char)[0] in "PSZ"


def f1(answer: str, expected: str) -> float:
    """Harmonic mean of precision and recall of words."""
    given, known = normalized(answer).split(), normalized(expected).split()
    same = sum((Counter(given) & Counter(known)).values())
    if not same:
        return float(not given and not known)
    return 2 * same / (len(given) + len(known))


def rouge_l(answer: str, expected: str) -> float:
    """F-measure of the longest common subsequence of words."""
    given, known = (WIDE.sub(r" \g<0> ", text.lower()).split() for text in (answer, expected))
    if not given or not known:
        return 0.0
    common = _longest_common(given, known)
    return 2 * common / (len(given) + len(known))


def _longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for word in a:
        corner = 0
        for j, other in enumerate(b, 1):
            corner, row[j] = row[j], corner + 1 if word == other else max(row[j], row[j - 1])
    return row[-1]


def among_classes(answer: str, expected: str, classes: Sequence[str]) -> float:
    """One over the number of classes that the answer names, if the right one is among them.

    A class whose name lies within the right one's does not count as named.
    """
    named = [name for name in classes if name in answer]
    named = [name for name in named if name == expected or name not in expected]
    return 1 / len(named) if expected in named else 0.0


def numbers_right(answer: str, expected: str) -> float:
    """Share of the answer's numbers that are the one expected; a dash before one is no sign."""
    found, (wanted, *_) = DIGITS.findall(answer), DIGITS.findall(expected) or ["?"]
    return sum(number == wanted for number in found) / len(found) if found else 0.0


def first_number(answer: str, expected: str) -> float:
    """Whether the first number of the answer is the one expected."""
    found, known = NUMBER.findall(answer), NUMBER.findall(expected)
    return float(bool(found) and bool(known) and float(found[0]) == float(known[0]))


def first_digits(answer: str, expected: str) -> float:
    """Whether the first digits of the answer are those expected: no more, no fewer, zeros before them too."""
    found, known = DIGITS.search(answer), DIGITS.search(expected)
    return float(found is not None and known is not None and found[0] == known[0])


def contains(answer: str, expected: str) -> float:
    """Whether the expected text is somewhere in the answer."""
    return float(expected.strip().lower() in answer.lower())


def similar_line(answer: str, expected: str) -> float:
    """How similar the answer's first line of code is; comments and fences of Markdown are passed over."""
    lines = (line for line in answer.lstrip("\n").split("\n") if not any(mark in line for mark in ("`", "#", "//")))
    return SequenceMatcher(None, next(lines, "").strip(), expected.strip(), autojunk=False).ratio()


def choice(answer: str, expected: str) -> float:
    """Whether the first letter A to D that stands alone, or begins the answer, is the one expected."""
    found = re.search(r"(?:^|[^A-Za-z])([A-D])(?![A-Za-z])", answer)
    return float(found is not None and found[1] == expected)
