"""One magic number hidden in real text."""

from __future__ import annotations

from dataclasses import dataclass

from kvtailor.evals.rendering import Asked, Prompt
from kvtailor.evals.sample import Sample
from kvtailor.evals.tasks.base import Draw, Drawn, filled, place, single
from kvtailor.evals.tasks.filling import Passage, reference
from kvtailor.evals.tasks.wording import CITIES, digits
from kvtailor.models.text import needle_prompt


@dataclass(frozen=True)
class Needle(Drawn):
    """The magic number of a city, hidden between paragraphs of the Python language reference.

    Samples differ in city, number, text and depth; depths cover the context evenly. Both ways of asking make the same
    text. The idea is Kamradt's needle in a haystack (2023), with the wording of
    :func:`kvtailor.models.text.needle_prompt`.

    Attributes
    ----------
    asked : whether the context holds the question.
    digits : of the number.
    """

    name: str = "needle"
    metric: str = "contains"
    asked: Asked = "known"
    digits: int = 5

    def draw(self, draw: Draw) -> Sample:
        """Draw one sample."""
        rng = draw.random("needle")
        city, number = rng.choice(CITIES), digits(rng, self.digits)
        passage = Passage(reference(), rng.randrange(len(reference())))
        prompt = filled(
            self.name, draw, lambda pieces: _prompt("\n\n".join(passage.parts(pieces)), city, number, draw.depth())
        )
        depth = round(place(prompt.before, number), 4)
        return single(self.name, draw, prompt, self.asked, (number,), depth, city=city)


def _prompt(text: str, city: str, number: str, depth: float) -> Prompt:
    message, start = needle_prompt(text, city, number, depth)
    question = message.rpartition("\n\n")[2]
    return Prompt(message.removesuffix(question), question, start)


NEEDLE = (Needle(), Needle("needle-after", asked="after"))
