"""What stands in the context once, letter by letter: passages of random words, and pairs of random identifiers."""

from __future__ import annotations

from dataclasses import dataclass

from kvtailor.evals.rendering import Asked, Prompt
from kvtailor.evals.sample import Sample
from kvtailor.evals.tasks.base import Draw, Drawn, filled, place, single
from kvtailor.evals.tasks.wording import uuid, vocabulary


@dataclass(frozen=True)
class Copy(Drawn):
    """Numbered passages of random words, one of which is to be repeated. Ours.

    Attributes
    ----------
    words : of a passage.
    asked : whether the context holds the question.
    """

    name: str = "copy"
    metric: str = "edit_similarity"
    words: int = 12
    asked: Asked = "known"

    def draw(self, draw: Draw) -> Sample:
        """Draw one sample."""

        def build(units: int) -> Prompt:
            passages = [self._passage(draw, number) for number in range(units + 1)]
            lines = "\n".join(f"Passage {number}: {words}" for number, words in enumerate(passages, 1))
            asked = self._asked(draw, units + 1)
            return Prompt(
                f"Below are numbered passages of words. I will ask you to repeat one of them.\n\n{lines}\n\n",
                f"Repeat passage {asked}, word for word.",
                f"Passage {asked}:",
            )

        prompt = filled(self.name, draw, build)
        number = int(prompt.start.removeprefix("Passage ").removesuffix(":"))
        answer = self._passage(draw, number - 1)
        depth = round(place(prompt.before, f"Passage {number}: {answer}"), 4)
        return single(self.name, draw, prompt, self.asked, (answer,), depth, passage=number)

    def _passage(self, draw: Draw, number: int) -> str:
        return " ".join(draw.random(f"{self.name}/{number}").sample(vocabulary(), self.words))

    def _asked(self, draw: Draw, passages: int) -> int:
        return 1 + int(draw.depth() * passages)


@dataclass(frozen=True)
class Recall(Drawn):
    """A JSON object of random UUIDs, of which the value of one key is asked.

    The key-value retrieval of Liu et al. 2023 ("Lost in the Middle", section 3) and InfiniteBench.

    Attributes
    ----------
    asked : whether the context holds the question.
    """

    name: str = "recall"
    metric: str = "contains"
    asked: Asked = "known"

    def draw(self, draw: Draw) -> Sample:
        """Draw one sample."""
        key, value = self._pair(draw, 0)

        def build(units: int) -> Prompt:
            pairs = [self._pair(draw, number) for number in range(1, units + 1)]
            pairs.insert(int(draw.depth() * (units + 1)), (key, value))
            lines = ",\n".join(f'"{one}": "{other}"' for one, other in pairs)
            return Prompt(
                f"Below is a JSON object. I will ask you for the value of one of its keys.\n\n{{{lines}}}\n\n",
                f'What is the value of the key "{key}"?',
                f'The value of the key "{key}" is',
            )

        prompt = filled(self.name, draw, build)
        depth = round(place(prompt.before, value), 4)
        return single(self.name, draw, prompt, self.asked, (value,), depth, key=key)

    def _pair(self, draw: Draw, number: int) -> tuple[str, str]:
        rng = draw.random(f"{self.name}/{number}")
        return uuid(rng), uuid(rng)


COPYING = (Copy(), Recall())
