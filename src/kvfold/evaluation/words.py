"""Words that generated tasks are made of, and how they are looked for in an answer."""

import re

THINGS = tuple(
    (
        "anchor apple arrow barrel basket bell blanket boat bottle bridge brush bucket button candle canoe carpet castle "
        "chair clock cloud coat compass copper cradle crown curtain desk door dragon drum eagle engine feather fence "
        "flute forest fountain garden gate glove hammer harbor harp hat helmet horse island jacket jar kettle key "
        "kitchen ladder lamp lantern leaf lemon letter lion lock map market mask mirror mountain needle nest notebook "
        "ocean orange orchard oven paddle palace pencil piano pillow pilot pitcher planet plow pocket pond prism puzzle "
        "quilt rabbit raven ribbon ring river robin rocket rope saddle sail scarf shadow shell shield silver spoon "
        "stable statue stone stove sword table temple thimble thread tiger torch tower trumpet tunnel turtle valley "
        "vase velvet village violin wagon walnut whale wheel whistle window winter wolf"
    ).split()
)
"""Single words that name things; each is different."""


def whole(expected: str, answer: str) -> bool:
    """Whether an answer has a word, words or a number, not as a part of a longer one; capital letters or not, and however the
    words are apart: a text that is copied brings its ends of lines."""
    words = r"\s+".join(map(re.escape, expected.split()))
    return bool(words) and re.search(rf"(?<!\w){words}(?!\w)", answer, re.I) is not None


def share(expected: tuple[str, ...], answer: str) -> float:
    """Share of what is expected that an answer has."""
    return sum(whole(word, answer) for word in expected) / len(expected)
