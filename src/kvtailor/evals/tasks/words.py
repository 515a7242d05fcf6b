"""Long lists of words, of which the most frequent are asked for: no part of the context can be left out."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from kvtailor.evals.rendering import Asked, Prompt
from kvtailor.evals.sample import Sample
from kvtailor.evals.tasks.base import Draw, Drawn, filled, single
from kvtailor.evals.tasks.wording import vocabulary

_FEWEST_WORDS = 40  # in coded text: with fewer, words of neighbouring ranks are equally frequent
_TOKENS_OF_A_WORD = 2  # at least, with its number


@dataclass(frozen=True)
class CommonWords(Drawn):
    """A numbered list in which some words stand at least three times as often as each of the others.

    RULER's common-words extraction (Hsieh et al. 2024, section 3, "aggregation"), where common words stand 30 times and
    others 3 times. Here common words stand up to 30 times, fewer in a short context; in a very long one both stand more
    often, because there are only so many words.

    Attributes
    ----------
    words : common words, all of which are asked for.
    asked : whether the context holds the question.
    """

    name: str = "common-words"
    metric: str = "contains"
    words: int = 10
    asked: Asked = "known"

    def draw(self, draw: Draw) -> Sample:
        """Draw one sample."""
        every = draw.random(self.name).sample(vocabulary(), len(vocabulary()))
        common, others = every[: self.words], every[self.words :]
        times = min(max(draw.tokens // (self.words * 20), 3), 30)
        other_times = max(times // 10, -(-draw.tokens // (_TOKENS_OF_A_WORD * len(others))))
        times = max(times, 3 * other_times)

        def build(units: int) -> Prompt:
            words = [*common * times, *others[:units] * other_times]
            draw.random(f"{self.name}/{units}").shuffle(words)
            return _list_prompt(words, self.words)

        prompt = filled(self.name, draw, build, len(others))
        return single(self.name, draw, prompt, self.asked, common, None, times=times, other_times=other_times)


@dataclass(frozen=True)
class FrequentWords(Drawn):
    """Made-up words whose frequencies fall with the power of their rank; the most frequent three are asked for.

    RULER's frequent-words extraction (Hsieh et al. 2024, section 3, "aggregation"), which also has noise between words.

    Attributes
    ----------
    words : that are asked for.
    power : frequencies are those of ranks 1, 2, 3, … to minus this.
    asked : whether the context holds the question.
    """

    name: str = "frequent-words"
    metric: str = "contains"
    words: int = 3
    power: float = 2.0
    asked: Asked = "known"

    def draw(self, draw: Draw) -> Sample:
        """Draw one sample."""

        def build(units: int) -> Prompt:
            words: list[str] = []
            for word, times in zip(*self._counted(draw, units), strict=True):
                words += [word] * times
            draw.random(f"{self.name}/{units}").shuffle(words)
            return _coded_prompt(words, self.words)

        prompt = filled(self.name, draw, build)
        names = _coded_words(draw.random(self.name), self.words)
        return single(self.name, draw, prompt, self.asked, names, None)

    def _counted(self, draw: Draw, units: int) -> tuple[list[str], list[int]]:
        """Words by rank, and how often each stands in a text of so many words."""
        total = units + _FEWEST_WORDS
        counts: list[int] = []
        scale = total / sum(rank**-self.power for rank in range(1, total + 1))
        while sum(counts) < total:
            counts.append(max(1, round(scale * (len(counts) + 1) ** -self.power)))
        return _coded_words(draw.random(self.name), len(counts)), counts


WORDS = (CommonWords(), FrequentWords())


def _list_prompt(words: Sequence[str], asked: int) -> Prompt:
    lines = "\n".join(f"{number}. {word}" for number, word in enumerate(words, 1))
    return Prompt(
        "Below is a numbered list of words. Some of them appear in it much more often than the others. "
        f"Remember which ones.\n\n{lines}\n\n",
        f"Which {asked} words appear most often in the list?",
        f"The {asked} words that appear most often in the list are",
    )


def _coded_prompt(words: Sequence[str], asked: int) -> Prompt:
    return Prompt(
        f"Read the following coded text and keep count of how often each coded word appears.\n\n{' '.join(words)}\n\n",
        f"Which {asked} coded words appear most often in the text?",
        f"The {asked} coded words that appear most often are",
    )


def _coded_words(rng: random.Random, count: int) -> list[str]:
    """Words of six letters, each once; the first are the same however many are asked for."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    return list(words)
