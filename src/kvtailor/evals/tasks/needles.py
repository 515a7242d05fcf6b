"""Several keys with values of their own in one text, in the manner of RULER's needle tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvtailor.errors import EvaluationError
from kvtailor.evals.rendering import Asked, Prompt
from kvtailor.evals.sample import Sample
from kvtailor.evals.tasks.base import Draw, Drawn, filled, place, single
from kvtailor.evals.tasks.filling import Filler, Haystack, haystack, hide
from kvtailor.evals.tasks.wording import (
    CITIES,
    KINDS,
    Kind,
    distinct_values,
    key_names,
    needle,
    needle_question,
)
from kvtailor.models.text import NEEDLE_INTRODUCTION


@dataclass(frozen=True)
class Needles(Drawn):
    """Keys with one or more magic values each, hidden in text; some of the keys are asked for in one question.

    The kinds of RULER (Hsieh et al. 2024, section 3, "retrieval") in words of our own: single, multi-key (several
    keys, one asked), multi-value (a key with several values) and multi-query (several keys asked). Values stand evenly
    over the context, each in a stretch of its own; which key has which is drawn.

    Attributes
    ----------
    keys : keys in the text.
    values : of each key.
    queries : keys that are asked for, at most ``keys``.
    filler : what they are hidden in: lines of "noise", the paragraphs of the Python "reference", or "needles": lines
        that are needles of other keys.
    kind : what values are, "numbers" or "uuids".
    names : keys are "things" or "cities".
    digits : of numbers.
    asked : whether the context holds the question.
    """

    name: str
    keys: int = 1
    values: int = 1
    queries: int = 1
    filler: Filler | Literal["needles"] = "noise"
    kind: Kind = "numbers"
    names: Literal["things", "cities"] = "things"
    digits: int = 7
    asked: Asked = "known"
    metric: str = "contains"

    def __post_init__(self) -> None:
        if not 1 <= self.queries <= self.keys or self.values < 1:
            raise EvaluationError(
                f"task {self.name!r}: {self.queries} queries of {self.keys} keys with {self.values} values; "
                "allowed are 1 or more values, and 1 to as many queries as keys"
            )
        if self.kind not in KINDS:
            raise EvaluationError(f"task {self.name!r}: kind is {self.kind!r}; allowed are {', '.join(KINDS)}")

    def draw(self, draw: Draw) -> Sample:
        """Draw one sample."""
        rng = draw.random(self.name)
        names = rng.sample(CITIES, len(CITIES)) if self.names == "cities" else key_names(rng)
        keys = rng.sample(names[: self.keys] * self.values, self.keys * self.values)
        values = distinct_values(rng, self.kind, len(keys), self.digits)
        asked = rng.sample(names[: self.keys], self.queries)
        stack = self._haystack(rng, names[self.keys :], values)
        hidden = [
            (draw.depth(number, len(keys)), needle(key, value, self.kind))
            for number, (key, value) in enumerate(zip(keys, values, strict=True))
        ]
        introduction = NEEDLE_INTRODUCTION.replace("numbers", self.kind)
        question, start = needle_question(asked, self.values, self.kind)

        def build(units: int) -> Prompt:
            text = hide(stack.parts(units), hidden, stack.joint)
            return Prompt(f"{introduction}\n\n{text}\n\n", question, start)

        prompt = filled(self.name, draw, build, stack.most)
        answers = [value for name in asked for key, value in zip(keys, values, strict=True) if key == name]
        depths = [round(place(prompt.before, value), 4) for value in answers]
        depth = depths[0] if len(depths) == 1 else None
        return single(self.name, draw, prompt, self.asked, answers, depth, keys=asked, depths=depths)

    def _haystack(self, rng: random.Random, names: Sequence[str], taken: Sequence[str]) -> Haystack:
        if self.filler != "needles":
            return haystack(self.filler, rng)
        values = distinct_values(rng, self.kind, len(names), self.digits)
        lines = [needle(name, value, self.kind) for name, value in zip(names, values, strict=True)]
        lines = [line for line, value in zip(lines, values, strict=True) if value not in taken]
        return Haystack(lambda count: lines[:count], "\n", len(lines))


NEEDLES = (
    Needles("multi-needle", keys=4, filler="reference", names="cities", digits=5),
    Needles("niah-single"),
    Needles("niah-single-text", filler="reference"),
    Needles("niah-single-uuid", kind="uuids", filler="reference"),
    Needles("niah-multikey", keys=4, filler="reference"),
    Needles("niah-multikey-lines", filler="needles"),
    Needles("niah-multikey-uuid", filler="needles", kind="uuids"),
    Needles("niah-multivalue", values=4, filler="reference"),
    Needles("niah-multiquery", keys=4, queries=4, filler="reference"),
)
