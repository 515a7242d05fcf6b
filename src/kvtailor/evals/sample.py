"""What a task asks of a model: a context that is read once, and questions asked behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Ordering = Literal["apart", "turns"]


@dataclass(frozen=True)
class Ask:
    """One question behind a context.

    Attributes
    ----------
    text : what is fed behind the context before the model answers, chat markup and all; "" where the context asks.
    answers : what the answer is scored against; their meaning is the metric's.
    tokens : the most tokens that the model may answer.
    depth : where in the context the answer stands, 0 (first) to 1 (last); None where it is not one place.
    """

    text: str
    answers: tuple[str, ...]
    tokens: int
    depth: float | None = None


@dataclass(frozen=True)
class Sample:
    """One text with its questions.

    Attributes
    ----------
    task, number : which sample of which task.
    context : the text that caches compress, chat markup and all.
    asks : the questions; for a task that is scored by what follows the context, one whose only answer is that text.
    ordering : "apart": each question stands alone behind the context; "turns": each stands behind those before it and
        the answers given to them.
    settings : what the sample was drawn with, as plain data: length, depth, seed, words, …
    """

    task: str
    number: int
    context: str
    asks: tuple[Ask, ...]
    ordering: Ordering = "apart"
    settings: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """A documented generator or loader of samples, with its metric.

    Attributes
    ----------
    name : as users name it.
    metric : name of a metric of :mod:`kvtailor.evals.metrics`, or "following" where the loss of the tokens that follow
        the context is what counts.
    """

    name: str
    metric: str

    def samples(self, tokenizer: Any, tokens: int, count: int, seed: int = 0) -> Sequence[Sample]:
        """Draw samples whose context has at most ``tokens`` tokens, and nearly as many where the text allows.

        The same arguments give the same samples; sample ``i`` does not depend on ``count``.

        Raises
        ------
        EvaluationError
            If the task cannot be that short, or has no text that long.
        """
        ...
