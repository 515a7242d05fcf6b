"""How well a model predicts the text that follows a long context."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any

from kvtailor.errors import EvaluationError
from kvtailor.evals.rendering import Renderer
from kvtailor.evals.sample import Ask, Sample
from kvtailor.evals.tasks.base import Draw, check_size, largest_fitting
from kvtailor.evals.tasks.filling import reference

_PARAGRAPH = re.compile(r".+?(?:\n\s*\n|\Z)", re.DOTALL)
_WORD_END = re.compile(r"(?<=\S)(?=\s|\Z)")


@dataclass(frozen=True)
class Perplexity:
    """Real text: the context is a passage, the answer the text that follows it.

    No chat markup is put around the passage. Passages start with paragraphs that are spread evenly over the text; they
    overlap where it is short. Context and answer end with words.

    Attributes
    ----------
    file : a text file in UTF-8; None for the Python language reference.
    following : the most tokens that follow.
    """

    name: str = "perplexity"
    metric: str = "following"
    file: str | PathLike[str] | None = None
    following: int = 128

    def samples(self, tokenizer: Any, tokens: int, count: int, seed: int = 0) -> Sequence[Sample]:
        """Draw samples, see :meth:`kvtailor.evals.sample.Task.samples`."""
        check_size(self.name, tokens, count)
        text = self._text()
        renderer = Renderer.of(tokenizer)
        starts = self._starts(text, tokenizer, tokens + self.following)
        return [self._draw(Draw(renderer, tokens, number, seed), text, starts) for number in range(count)]

    def _text(self) -> str:
        if self.file is None:
            return "\n\n".join(reference())
        name = f"task {self.name!r}: {str(self.file)!r}"
        try:
            return Path(self.file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise EvaluationError(f"{name} cannot be read: {error.strerror}; allowed is a text file") from error
        except UnicodeDecodeError as error:
            raise EvaluationError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from error

    def _starts(self, text: str, tokenizer: Any, needed: int) -> list[int]:
        """Where paragraphs start that have enough tokens behind them, in characters."""
        matches = list(_PARAGRAPH.finditer(text))
        ids = tokenizer([match.group() for match in matches], add_special_tokens=False).input_ids if matches else []
        behind = list(accumulate(map(len, reversed(ids))))[::-1]
        starts = [match.start() for match, tokens in zip(matches, behind, strict=True) if tokens >= needed]
        if not starts:
            longest = behind[0] if behind else 0
            raise EvaluationError(f"task {self.name!r} has text of {longest} tokens; {needed} were asked for")
        return starts

    def _draw(self, draw: Draw, text: str, starts: Sequence[int]) -> Sample:
        start = starts[int(draw.depth() * len(starts))]
        context = self._words(text, start, draw.tokens, draw.renderer.length)
        answer = self._words(text, start + len(context), self.following, lambda part: len(draw.renderer.ids(part)))
        source = "python reference" if self.file is None else str(self.file)
        settings = draw.settings(context, depth=None, start=start, source=source)
        return Sample(self.name, draw.number, context, (Ask("", (answer,), self.following),), settings=settings)

    def _words(self, text: str, start: int, tokens: int, length: Callable[[str], int]) -> str:
        """The longest piece of text from ``start`` on that ends with a word and has at most so many tokens."""
        ends = [start, *(match.end() for match in _WORD_END.finditer(text, start + 1))]
        return text[
            start : ends[largest_fitting(self.name, lambda n: length(text[start : ends[n]]), tokens, len(ends) - 1)]
        ]
