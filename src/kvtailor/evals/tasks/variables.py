"""Variables that are set to other variables, all over a text: what holds a value is found in several steps."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from itertools import pairwise

from kvtailor.errors import EvaluationError
from kvtailor.evals.rendering import Asked, Prompt
from kvtailor.evals.sample import Sample
from kvtailor.evals.tasks.base import Draw, Drawn, filled, place, single
from kvtailor.evals.tasks.filling import Filler, haystack, hide
from kvtailor.evals.tasks.wording import distinct_values

_NAME_LENGTH = 5


@dataclass(frozen=True)
class Variables(Drawn):
    """Chains of assignments between lines of text; asked are all variables of one of the chains.

    RULER's variable tracking (Hsieh et al. 2024, section 3, "multi-hop tracing") in words of our own and without its
    example. Assignments stand evenly over the context, those of a chain in order.

    Attributes
    ----------
    hops : assignments of a chain behind its first.
    chains : of which one is asked for.
    filler : what they are hidden in, "noise" or "reference".
    asked : whether the context holds the question.
    """

    name: str = "variable-tracking"
    metric: str = "contains"
    hops: int = 4
    chains: int = 2
    filler: Filler = "noise"
    asked: Asked = "known"

    def __post_init__(self) -> None:
        if self.hops < 0 or self.chains < 1:
            raise EvaluationError(
                f"task {self.name!r}: {self.chains} chains of {self.hops} hops; "
                "allowed are 1 or more chains of 0 or more"
            )

    def draw(self, draw: Draw) -> Sample:
        """Draw one sample."""
        rng = draw.random(self.name)
        length = self.hops + 1
        names = _names(rng, self.chains * length)
        values = distinct_values(rng, "numbers", self.chains, 5)
        chains = [names[number * length : (number + 1) * length] for number in range(self.chains)]
        stack = haystack(self.filler, rng)
        turns = rng.sample([number for number in range(self.chains) for _ in range(length)], len(names))
        waiting = [iter(assignments(chain, value)) for chain, value in zip(chains, values, strict=True)]
        hidden = [(draw.depth(place, len(turns)), next(waiting[number])) for place, number in enumerate(turns)]

        def build(units: int) -> Prompt:
            return prompt_of(hide(stack.parts(units), hidden, stack.joint), values[0])

        prompt = filled(self.name, draw, build)
        depths = [round(place(prompt.before, line), 4) for line in assignments(chains[0], values[0])]
        return single(self.name, draw, prompt, self.asked, chains[0], None, value=values[0], depths=depths)


def assignments(chain: list[str], value: str) -> list[str]:
    """The lines of a chain: its first variable is set to the value, each other to the one before it."""
    return [f"Let {chain[0]} = {value}.", *(f"Let {new} = {old}." for old, new in pairwise(chain))]


def prompt_of(text: str, value: str) -> Prompt:
    """Ask for all variables that hold a value."""
    before = (
        "The following text sets variables, to numbers or to other variables. Keep track of what each of them holds."
        f"\n\n{text}\n\n"
    )
    question = f"Which variables hold the number {value}, be it directly or through other variables? Name all of them."
    return Prompt(before, question, f"The variables that hold the number {value} are")


def _names(rng: random.Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=_NAME_LENGTH))] = None
    return list(names)
