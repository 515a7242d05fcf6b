"""What all tasks share: a sample is drawn by its number alone, and filled up to the length that is asked for."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtailor.errors import EvaluationError
from kvtailor.evals.rendering import Asked, Prompt, Renderer
from kvtailor.evals.sample import Ask, Sample

_GOLDEN = (5**0.5 - 1) / 2
_NEARLY = 256  # of so many tokens one may be missing: a long text costs seconds to count
_FIRST_STEP = 16  # units, before anything is known of how long they are


@dataclass(frozen=True)
class Draw:
    """Which sample is drawn, and how long.

    Attributes
    ----------
    renderer : of the tokenizer.
    tokens : the most that the context may have.
    number, seed : which sample.
    """

    renderer: Renderer
    tokens: int
    number: int
    seed: int

    def random(self, task: str) -> random.Random:
        """The sample's own random numbers: of task, seed and number, so that no sample depends on another."""
        return random.Random(f"{task}/{self.seed}/{self.number}")

    def depth(self, part: int = 0, parts: int = 1) -> float:
        """A place from 0 to 1 such that those of the first samples, however many, cover the range evenly.

        Parameters
        ----------
        part, parts : for one of several places in a sample, in the part-th of that many equal stretches.
        """
        offset = random.Random(f"depth/{self.seed}/{part}").random()
        return (part + (offset + self.number * _GOLDEN) % 1) / parts

    def settings(self, context: str, **others: Any) -> dict[str, Any]:
        """What the sample was drawn with: tokens asked for and there, seed, and what else the task varies."""
        return {"tokens": self.tokens, "length": self.renderer.length(context), "seed": self.seed, **others}


class Drawn(ABC):
    """A task whose samples are drawn one by one."""

    name: str
    metric: str

    def samples(self, tokenizer: Any, tokens: int, count: int, seed: int = 0) -> Sequence[Sample]:
        """Draw samples, see :meth:`kvtailor.evals.sample.Task.samples`."""
        check_size(self.name, tokens, count)
        renderer = self.renderer(tokenizer)
        return [self.draw(Draw(renderer, tokens, number, seed)) for number in range(count)]

    def renderer(self, tokenizer: Any) -> Renderer:
        """How messages are written: with the tokenizer's chat template."""
        return Renderer.of(tokenizer)

    @abstractmethod
    def draw(self, draw: Draw) -> Sample:
        """Draw one sample."""


def check_size(name: str, tokens: int, count: int) -> None:
    """Raise EvaluationError for a length or number of samples that is not positive."""
    for what, value in (("tokens", tokens), ("count", count)):
        if value < 1:
            raise EvaluationError(f"task {name!r}: {what} is {value}, allowed is 1 or more")


def filled(name: str, draw: Draw, build: Callable[[int], Prompt], most: int | None = None) -> Prompt:
    """Build the longest prompt whose context, with the question in it, has at most ``draw.tokens`` tokens.

    Parameters
    ----------
    name : of the task.
    draw : the length.
    build : makes a prompt of a number of units (lines, sentences, words), 0 or more; more of them are longer.
    most : units that there are; None where they never end.

    Raises
    ------
    EvaluationError
        If no unit fits, or there are too few.
    """
    renderer = draw.renderer
    return build(
        largest_fitting(name, lambda units: renderer.length(renderer.whole_context(build(units))), draw.tokens, most)
    )


def largest_fitting(name: str, length: Callable[[int], int], tokens: int, most: int | None = None) -> int:
    """Give the largest number of units that are at most so many tokens, or one whose text is nearly as long.

    Parameters
    ----------
    name : of the task, for errors.
    length : tokens of a number of units, 0 or more; grows with it.
    tokens : the most.
    most : units that there are; None where they never end.

    Raises
    ------
    EvaluationError
        If 0 units are too long already, or all of them are shorter than seven eighths of ``tokens``.
    """
    least = length(0)
    if least > tokens:
        raise EvaluationError(f"task {name!r} needs {least} tokens with nothing filled in; {tokens} were asked for")
    low, at_low, high, at_high = 0, least, most if most is None else most + 1, 0
    enough = tokens - tokens // _NEARLY
    steps = 0
    while at_low < enough and (high is None or high - low > 1):
        # The text's mean so far tells where the end should be; halving keeps bad guesses from costing many steps.
        if high is not None and at_high:
            gap = high - low
            probe = low + (gap // 2 if steps % 3 == 2 else gap * (tokens - at_low) // (at_high - at_low))
        elif low:
            probe = low + (tokens - at_low) * low // max(at_low - least, 1)
        else:
            probe = _FIRST_STEP
        probe = max(probe, low + 1) if high is None else min(max(probe, low + 1), high - 1)
        steps += 1
        found = length(probe)
        if found <= tokens:
            low, at_low = probe, found
        else:
            high, at_high = probe, found
    if low == most and at_low < tokens - tokens // 8:
        raise EvaluationError(f"task {name!r} has text of {at_low} tokens at most; {tokens} were asked for")
    return low


def single(
    name: str,
    draw: Draw,
    prompt: Prompt,
    asked: Asked,
    answers: Sequence[str],
    depth: float | None,
    *,
    tokens: int | None = None,
    **settings: Any,
) -> Sample:
    """Give a sample of one question.

    Parameters
    ----------
    name, draw : of the task, and which sample.
    prompt : context and question.
    asked : whether the context holds the question.
    answers : what is scored.
    depth : where the answer stands.
    tokens : the most that the model may answer; None for what all answers in one list need.
    settings : what the task varied.
    """
    context, text = draw.renderer.split(prompt, asked)
    ask = Ask(text, tuple(answers), draw.renderer.room(answers) if tokens is None else tokens, depth)
    stated = draw.settings(context, asked=asked, depth=depth, **settings)
    return Sample(name, draw.number, context, (ask,), settings=stated)


def place(text: str, part: str) -> float:
    """Where in a text a part stands, 0 (first) to 1 (last)."""
    return text.index(part) / max(len(text) - len(part), 1)
