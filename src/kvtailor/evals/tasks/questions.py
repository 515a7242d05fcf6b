"""One context with many numbers, asked for one after the other, which a cache must be ready for beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from kvtailor.errors import EvaluationError
from kvtailor.evals.rendering import Prompt
from kvtailor.evals.sample import Ask, Ordering, Sample
from kvtailor.evals.tasks.base import Draw, Drawn, filled, place
from kvtailor.evals.tasks.filling import Filler, haystack, hide
from kvtailor.evals.tasks.wording import distinct_values

INTRODUCTION = "Some numbers are hidden within the following text. Memorize them: I will ask you about them afterwards."

# Things with little in common: small models mix up numbers whose sentences differ in one name.
THINGS = (
    "the door code of the library",
    "the ticket number of the night train",
    "the price of the red carpet",
    "the weight of the church bell",
    "the year on the old coin",
    "the length of the northern canal",
    "the number of books in the castle",
    "the telephone number of the baker",
    "the height of the lighthouse",
    "the serial number of the piano",
    "the population of the fishing village",
    "the account of the watchmaker",
    "the depth of the mine",
    "the distance to the monastery",
    "the number of stones in the bridge",
    "the licence number of the ferry",
)


@dataclass(frozen=True)
class Questions(Drawn):
    """Numbers of several things, of which some are asked for behind the context, each with its own question.

    The context holds no question, so nothing in it says which numbers will matter. Numbers stand evenly over the
    context, each in a stretch of its own, and are asked for in random order. Ours, after the shared contexts of
    SCBench (Li et al. 2024).

    Attributes
    ----------
    ordering : "apart": each question stands directly behind the context; "turns": behind those before it.
    needles : things with a number in the text.
    questions : that are asked, at most ``needles``.
    filler : what the numbers are hidden in, "reference" or "noise".
    digits : of numbers.
    """

    name: str = "multi-question"
    ordering: Ordering = "apart"
    needles: int = 8
    questions: int = 6
    filler: Filler = "reference"
    digits: int = 5
    metric: str = "contains"

    def __post_init__(self) -> None:
        if not 1 <= self.questions <= self.needles <= len(THINGS):
            raise EvaluationError(
                f"task {self.name!r}: {self.questions} questions about {self.needles} needles; allowed are 1 to "
                f"{len(THINGS)} needles, and 1 to as many questions"
            )

    def draw(self, draw: Draw) -> Sample:
        """Draw one sample; both orderings ask the same of the same text."""
        rng = draw.random("multi-question")
        things = rng.sample(THINGS, self.needles)
        numbers = distinct_values(rng, "numbers", self.needles, self.digits)
        asked = rng.sample(range(self.needles), self.questions)
        stack = haystack(self.filler, rng)
        hidden = [
            (draw.depth(number, self.needles), f"Remember that {thing} is {value}.")
            for number, (thing, value) in enumerate(zip(things, numbers, strict=True))
        ]

        def build(units: int) -> Prompt:
            text = hide(stack.parts(units), hidden, stack.joint)
            return Prompt(f"{INTRODUCTION}\n\n{text}\n\n", "")

        before = filled(self.name, draw, build).before
        asks = tuple(
            self._ask(draw, before, things[number], numbers[number], is_first=turn == 0)
            for turn, number in enumerate(asked)
        )
        context = draw.renderer.head + before
        keys = [things[number] for number in asked]
        settings = draw.settings(context, depth=None, depths=[ask.depth for ask in asks], keys=keys)
        return Sample(self.name, draw.number, context, asks, self.ordering, settings)

    def _ask(self, draw: Draw, before: str, thing: str, number: str, *, is_first: bool) -> Ask:
        prompt = Prompt(before, f"What is {thing}, according to the text?", f"According to the text, {thing} is")
        behind_an_answer = self.ordering == "turns" and not is_first
        text = draw.renderer.asking_again(prompt) if behind_an_answer else draw.renderer.asking(prompt)
        return Ask(text, (number,), draw.renderer.room((number,)), round(place(before, number), 4))


QUESTIONS = (Questions(), Questions("multi-turn", "turns"))
