"""Prompts that a model's losses are measured on: listed once and asked for again, and a text. The same ones everywhere.

They are made of what is in this file alone, so that a model has the same profile on every machine, and of forms that no suite
of ``kvfold eval`` has: what is chosen on them can be judged there.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase

from kvfold.errors import KVFoldError

LISTED, TEXT = 2048, 1024
"""Tokens before those that are scored: of a list, of the text."""
SCORED = 96
"""Tokens that follow."""
LEAST = 192
"""Tokens before the scored ones at least: the windows of most methods alone hold 128."""
COLOURS = (
    "amber black blue brown coral green grey ivory lilac olive pink plum red rust silver teal violet white".split()
)
THINGS = (
    "anchor basket bell bottle bridge button candle carpet chair clock drum fence flute garden glove hammer harbour kettle "
    "ladder lamp lantern market mirror needle paddle pencil pillow plate ribbon river saddle shelf spoon stable table tower "
    "tunnel violin wagon window"
).split()


@dataclasses.dataclass(frozen=True)
class Probe:
    """A prompt.

    Attributes
    ----------
    kind
        ``retrieval`` or ``text``.
    ids : Tensor, int64 [1, tokens]
    prefilled
        Tokens that are folded.
    predicted : tuple of int
        Positions in ``ids`` whose prediction counts, all from ``prefilled`` + 1 on.
    """

    kind: str
    ids: torch.Tensor
    prefilled: int
    predicted: tuple[int, ...]


def probes(tokenizer: PreTrainedTokenizerBase, most: int | None = None) -> list[Probe]:
    """Two lists and a text.

    Parameters
    ----------
    most
        Tokens that the model's context has; shorter prompts are made for less.

    Raises
    ------
    KVFoldError
        The context is too short for any.
    """
    room = LISTED if most is None else min(LISTED, most - SCORED - 1)
    if room < LEAST:
        raise KVFoldError(f"model: a context of {most} tokens leaves nothing to fold; {LEAST + SCORED + 1} are needed")
    return [
        _listed(tokenizer, room, "Where everything is kept:\n", _places),
        _listed(tokenizer, room, "| number | item |\n|---|---|\n", _rows),
        _text(tokenizer, min(TEXT, room)),
    ]


Draw = Callable[[random.Random], tuple[str, str, str]]
"""An entry: what is asked, what is answered, how it ends."""


def _places(draw: random.Random) -> tuple[str, str, str]:
    return f"The {draw.choice(COLOURS)} {draw.choice(THINGS)}", f" {draw.randrange(1000, 10000)}", "\n"


def _rows(draw: random.Random) -> tuple[str, str, str]:
    return f"| {draw.randrange(100, 1000)} |", f" {draw.choice(COLOURS)} {draw.choice(THINGS)}", " |\n"


def _listed(tokenizer: PreTrainedTokenizerBase, room: int, head: str, make: Draw) -> Probe:
    """Entries, each once, and then some of them again, of all depths, whose answers count."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    draw = random.Random(head)
    again = encode("\nOnce more:\n\n")
    ids = list(tokenizer("").input_ids)[:1] + encode(head)  # with the token that begins a text, if there is one
    entries: dict[str, tuple[list[int], list[int], list[int]]] = {}
    while len(entries) < len(COLOURS) * len(THINGS):
        asked, answer, end = make(draw)
        if asked in entries:
            continue
        entry = encode(asked), encode(answer), encode(end)
        if len(ids) + sum(map(len, entry)) + len(again) > room:
            break
        entries[asked] = entry
        ids += [token for part in entry for token in part]
    ids += again
    prefilled = len(ids)
    order = list(entries.values())
    draw.shuffle(order)
    predicted: list[int] = []
    for asked_ids, answer_ids, end_ids in order:
        if len(ids) + len(asked_ids) + len(answer_ids) > prefilled + SCORED:
            break
        ids += asked_ids
        predicted += range(len(ids), len(ids) + len(answer_ids))
        ids += answer_ids + end_ids
    if not predicted:
        raise KVFoldError(f"tokenizer: {SCORED} tokens hold no question of a list")
    return Probe("retrieval", torch.tensor([ids]), prefilled, tuple(predicted))


def _text(tokenizer: PreTrainedTokenizerBase, room: int) -> Probe:
    ids = list(tokenizer(PASSAGE, verbose=False).input_ids)[: room + SCORED]
    prefilled = len(ids) - SCORED
    if prefilled < LEAST:
        raise KVFoldError(f"tokenizer: it makes {len(ids)} tokens of the passage, and {LEAST + SCORED} are needed")
    return Probe("text", torch.tensor([ids]), prefilled, tuple(range(prefilled + 1, len(ids))))


PASSAGE = """\
The harbour at Lowen had three cranes, and only one of them worked. It stood at the end of the long quay, where the
ferries used to turn, and every morning at six Marta climbed the ladder to its cabin with a flask of tea under her arm.
From up there she could see the whole bay: the breakwater, the two islands, the grey line of the railway that came down
from the hills and ended, without any ceremony, in a field of nettles. Nobody had told the railway that the harbour no
longer needed it.

On the ninth of October a ship came in that was not on her list. It was small, painted green, and it flew no flag. Marta
wrote the time in her book, 6:42, and then the name, which she had to read through her glasses: "Patience". Beneath the
name somebody had once painted a second word and then scratched it out again. She rang the office. Mr Hale answered, as
he always did, on the fifth ring.

"There is a ship," she said.

"There are often ships," said Mr Hale. "It is a harbour."

"This one is not on the list."

He was silent for a while. She heard him turn pages. "No," he said at last, "it is not. What does it want?"

That was a good question, and for the next two hours nobody could answer it. The green ship lay at the quay with its
engine off. A man in a yellow coat came on deck, looked at the sky, looked at the crane, and went below again. At nine
the customs officer arrived on his bicycle. He knocked on the hull with the handle of his umbrella, and when nothing
happened he sat down on a bollard and ate an apple. By ten there were about forty people on the quay, and the baker had
sold all of his rolls.

The inventory that was made later that day is still kept in the town's archive. It lists what was found in the hold:

1. Two hundred and twelve wooden boxes, each 40 cm long, 25 cm wide and 20 cm high, numbered from 1 to 213. There was no box 77.
2. A piano without legs, wrapped in sailcloth.
3. Eleven sacks of seed, of which four were wet.
4. A clock, going, eleven minutes slow.
5. One letter, addressed to "the person who works the crane".

Marta opened the letter in the office, while Mr Hale pretended to sharpen a pencil. It was short. "Dear colleague," it
said, "we have sailed a long way and we have little time. Please unload the boxes in the order of their numbers, and put
them down where the railway ends. Do not open them. Whoever asked for them will come. For your trouble, keep the clock.
It is slow, but it has never stopped." It was signed with three letters that could have been R. P. W. or B. F. W.

She worked until dark. A box took her about two and a half minutes, sometimes three when the wind was wrong, so that she
had moved a hundred and ninety of them by the time the lamps were lit. She did the rest the next morning. When the last
box stood in the nettles, the green ship was gone; it had left at night, with the tide, and without a sound that anybody
could remember.

Years later her niece, who studied in the city, tried to work out what the boxes had weighed. The crane kept a record of
its load on a paper strip, and the strip had survived in a drawer. She wrote a few lines to read it:

    def loads(strip, scale=12.5):
        \"\"\"Kilograms of every lift: a peak of the curve, above an empty hook.\"\"\"
        empty = min(strip)
        found, rising = [], False
        for before, after in zip(strip, strip[1:]):
            if after > before:
                rising = True
            elif rising and before - empty > 1:
                found.append((before - empty) * scale)
                rising = False
        return found

    total = sum(loads(read("strip.txt")))
    print(f"{total:.1f} kg in {len(loads(read('strip.txt')))} lifts")

The answer was 4,240.0 kg in 212 lifts, which is exactly twenty kilograms a box. That was odd. Nothing in a harbour
weighs exactly anything: ropes are wet, hooks are rusty, and the wind leans on whatever hangs in it. The niece checked
her program, found no mistake, and then checked the strip, and found none there either. She asked Marta, who was by then
very old, whether the crane had been in good order. "It was the only one that worked," said Marta, and would say no more
about it.

The boxes are gone. Some say that a train came for them, on the very line that nobody used, and that it had one carriage
and no driver. Others say that the people of Lowen took them home, one by one, and that there is a box under every bed
in the town, still closed. The clock stands in the window of the harbour office. It is eleven minutes slow. On the ninth
of October, every year, the office opens at 6:42 by that clock, which is 6:53 by any other, and Mr Hale's daughter puts
a flask of tea beside it. The crane was taken down in the spring of the year after, because the company wanted its iron.
What remains of it is a ring of bolts in the stone, each as thick as a wrist, and a ladder of four steps that leads to
nothing. Children sit on the highest one and say what they can see from there: the breakwater, the two islands, and the
field of nettles where the railway ends.
"""
