"""A sample's context, read once by the model; every plan's cache is filled with what the model's attention saw."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvtailor.calibrate.capture import Capture, capture
from kvtailor.errors import EvaluationError
from kvtailor.estimate import length_limit
from kvtailor.evals.rendering import context_ids
from kvtailor.evals.sample import Sample
from kvtailor.models.load import Loaded

FOLLOWING = "following"
"""The metric of tasks that are scored by the loss of what follows the context."""


@dataclass(frozen=True)
class Reading:
    """A sample as the model saw it.

    Attributes
    ----------
    sample : the sample.
    asks : ids (1, n) of each question.
    seen : what attention saw of the context, and of what follows it in tasks that are scored so. Its held-out tokens
        are those that caches do not hold at first: what follows, and the context's last token.
    seconds : time of the pass.
    """

    sample: Sample
    asks: list[Tensor]
    seen: Capture
    seconds: float

    @property
    def context_tokens(self) -> int:
        """Tokens of the context."""
        return self.seen.prompt + 1

    @property
    def last(self) -> Tensor:
        """The context's last token, (1, 1): it is fed with the question."""
        return self.seen.ids[:, self.seen.prompt : self.seen.prompt + 1]


def read(loaded: Loaded, sample: Sample, metric: str, dtype: torch.dtype | None = None) -> Reading:
    """Let the model read a context.

    Parameters
    ----------
    loaded : a model that goes on with a text.
    sample : holds the context.
    metric : of the task.
    dtype : of what is handed to caches; default: as it came.

    Raises
    ------
    EvaluationError
        If the context and its longest question and answer are beyond the model's positions.
    """
    context = context_ids(loaded.tokenizer, sample.context)
    asks = [_ids(loaded.tokenizer, ask.text) for ask in sample.asks]
    following = _ids(loaded.tokenizer, sample.asks[0].answers[0]) if metric == FOLLOWING else _ids(loaded.tokenizer, "")
    check_length(loaded, sample, metric, len(context))
    ids = torch.cat([torch.tensor([context]), following], dim=1)
    begin = time.perf_counter()
    seen = capture(loaded.model, ids, following.shape[1] + 1)
    seconds = time.perf_counter() - begin
    return Reading(sample, asks, seen if dtype is None else _cast(seen, dtype), seconds)


def _cast(seen: Capture, dtype: torch.dtype) -> Capture:
    layers = {
        number: replace(layer, query=layer.query.to(dtype), keys=layer.keys.to(dtype), values=layer.values.to(dtype))
        for number, layer in seen.layers.items()
    }
    return replace(seen, layers=layers)


def check_length(loaded: Loaded, sample: Sample, metric: str, tokens: int) -> None:
    """Raise EvaluationError if a sample is beyond the model's positions, its answers included.

    Parameters
    ----------
    loaded, sample, metric : as for :func:`read`.
    tokens : of the context.
    """
    limit = length_limit(loaded.model.config)

    def count(text: str) -> int:
        return int(_ids(loaded.tokenizer, text).shape[1])

    more = [count(ask.answers[0]) if metric == FOLLOWING else count(ask.text) + ask.tokens for ask in sample.asks]
    needed = tokens + (sum(more) if sample.ordering == "turns" else max(more))
    if limit is not None and needed > limit:
        raise EvaluationError(
            f"task {sample.task!r} needs {needed} tokens with questions and answers, and model {loaded.name!r} has "
            f"positions for {limit}: allowed are shorter contexts"
        )


def _ids(tokenizer: Any, text: str) -> Tensor:
    if not text:
        return torch.zeros(1, 0, dtype=torch.long)
    ids: Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return ids
