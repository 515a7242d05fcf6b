"""Text that answers are hidden in: the Python language reference, lines of noise, and where things are put in them."""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from kvtailor.errors import EvaluationError
from kvtailor.models.text import TOPICS, paragraphs

Filler = Literal["reference", "noise"]
FILLERS: tuple[Filler, ...] = ("reference", "noise")

NOISE = (
    "The kettle is on the stove.",
    "The rain has stopped for now.",
    "A boat lies in the harbour.",
    "The street is quiet today.",
    "Somebody left the window open.",
)

# Beyond this a paragraph is a table or a grammar, and too coarse to fill a short context with.
_LONGEST_PARAGRAPH = 1500  # characters
_LONGEST_PIECE = 160  # characters, beyond which a piece ends with its line
_PIECE_END = re.compile(r"[.!?:][\"')\]]*(?=\s)|(?=\n)|\Z")


@lru_cache(maxsize=1)
def reference() -> tuple[str, ...]:
    """The paragraphs of the Python language reference of the running interpreter, each once."""
    found = (part.strip("\n") for part in paragraphs(TOPICS[0]))
    return tuple(dict.fromkeys(part for part in found if len(part) <= _LONGEST_PARAGRAPH))


class Passage:
    """Paragraphs from one of them on, over and over, that may end with any sentence.

    Parameters
    ----------
    texts : the paragraphs.
    start : which of them is the first, 0 or more; counted round.
    """

    def __init__(self, texts: Sequence[str], start: int = 0) -> None:
        start %= len(texts)
        self.texts = [*texts[start:], *texts[:start]]
        self.ends = [piece_ends(text) for text in self.texts]
        self.pieces = list(accumulate(len(ends) for ends in self.ends))

    def parts(self, pieces: int) -> list[str]:
        """The paragraphs of the first so many sentences; the last may be cut behind a sentence or line."""
        rounds, pieces = divmod(pieces, self.pieces[-1])
        whole = bisect_right(self.pieces, pieces)
        left = pieces - (self.pieces[whole - 1] if whole else 0)
        cut = [self.texts[whole][: self.ends[whole][left - 1]]] if left else []
        return [*self.texts * rounds, *self.texts[:whole], *cut]


@lru_cache(maxsize=4096)
def piece_ends(text: str) -> tuple[int, ...]:
    """Where a paragraph may be cut, in characters: behind sentences, and behind lines of long ones."""
    ends: list[int] = []
    for match in _PIECE_END.finditer(text):
        is_line = match.group() == "" and match.end() < len(text)
        if not is_line or match.end() - (ends[-1] if ends else 0) > _LONGEST_PIECE:
            ends.append(match.end())
    return tuple(dict.fromkeys(ends))


@dataclass(frozen=True)
class Haystack:
    """Text without end, or with, that is taken from its beginning in small units.

    Attributes
    ----------
    parts : gives so many units as the parts between which other text may stand.
    joint : stands between parts.
    most : units that there are; None where they never end.
    """

    parts: Callable[[int], list[str]]
    joint: str
    most: int | None = None


def haystack(filler: Filler, rng: random.Random) -> Haystack:
    """Give a haystack that starts at a random place: sentences of the Python "reference", or lines of "noise".

    Raises
    ------
    EvaluationError
        If the filler is neither.
    """
    if filler == "reference":
        return Haystack(Passage(reference(), rng.randrange(len(reference()))).parts, "\n\n")
    if filler == "noise":
        start = rng.randrange(len(NOISE))
        return Haystack(lambda lines: [NOISE[(start + number) % len(NOISE)] for number in range(lines)], "\n")
    raise EvaluationError(f"filler is {filler!r}; allowed are {', '.join(FILLERS)}")


def hide(parts: Sequence[str], hidden: Sequence[tuple[float, str]], joint: str) -> str:
    """Join parts and put others between them, each at the joint that is nearest to its depth.

    Parameters
    ----------
    parts : of the text, in order.
    hidden : a depth from 0 (first) to 1 (last) and a part, each; those at one joint stand by depth.
    joint : between two parts.
    """
    so_far = [0, *accumulate(len(part) for part in parts)]
    at: dict[int, list[str]] = {}
    for depth, text in sorted(hidden):
        at.setdefault(_nearest(so_far, depth * so_far[-1]), []).append(text)
    woven: list[str] = []
    for number in range(len(so_far)):
        woven += at.get(number, [])
        woven += parts[number : number + 1]
    return joint.join(woven)


def _nearest(ascending: Sequence[int], value: float) -> int:
    above = min(bisect_right(ascending, value), len(ascending) - 1)
    return above if ascending[above] - value < value - ascending[above - 1] else max(above - 1, 0)
