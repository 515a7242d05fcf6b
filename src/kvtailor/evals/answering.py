"""Answers of a model that keeps a context as a plan says."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvtailor import _compat
from kvtailor.attachment import attach
from kvtailor.cache import KVCache
from kvtailor.calibrate.evaluate import fill_cache
from kvtailor.calibrate.replay import divergence, log_probabilities
from kvtailor.evals.reading import FOLLOWING, Reading
from kvtailor.evals.sample import Ask
from kvtailor.models.load import Loaded
from kvtailor.plan import Plan
from kvtailor.report import Report


@dataclass(frozen=True)
class Answer:
    """What a model said to one question, or how it fared with what follows the context.

    Attributes
    ----------
    ask : place of the question in its sample.
    text : the answer; "" where nothing was asked.
    tokens : how many were decoded.
    token_ms : median time of a decode step, milliseconds; 0 where there was none.
    loss, kl : of the tokens that follow, nats per token: their negative log-likelihood, and the divergence of their
        distributions from those of attention over everything; None where a question was asked.
    agreement : share of those tokens for which both put the same one first.
    """

    ask: int
    text: str
    tokens: int
    token_ms: float
    loss: float | None = None
    kl: float | None = None
    agreement: float | None = None


@dataclass(frozen=True)
class Answered:
    """One sample with one plan.

    Attributes
    ----------
    answers : by question.
    held : the cache once it holds the context.
    bytes_peak : the most bytes held, answers included.
    compress_seconds : time of filling the cache.
    """

    answers: list[Answer]
    held: Report
    bytes_peak: int
    compress_seconds: float


@torch.no_grad()
def answers(loaded: Loaded, reading: Reading, plan: Plan, metric: str) -> Answered:
    """Ask every question of a sample, the context kept as a plan says.

    Plans act once the context was read: the cache is given what the model saw, as a prompt leaves it.

    Parameters
    ----------
    loaded, reading : the model, and what it saw.
    plan : the plan.
    metric : of the task.
    """
    with attach(loaded.model, plan) as attachment:
        cache = attachment.new_cache()
        assert isinstance(cache, KVCache)
        begin = time.perf_counter()
        fill_cache(cache, reading.seen)
        seconds = time.perf_counter() - begin
        held = cache.report()
        speaker = Speaker(loaded)
        follows = metric == FOLLOWING
        told = [_followed(speaker, reading, cache)] if follows else list(_asked(speaker, reading, cache))
        return Answered(told, held, max(held.bytes_peak, cache.report().bytes_peak), seconds)


def _asked(speaker: Speaker, reading: Reading, cache: KVCache) -> Iterator[Answer]:
    """Questions apart are each asked of a copy of the cache, turns of the cache itself."""
    last = reading.last
    for number, (ask, ids) in enumerate(zip(reading.sample.asks, reading.asks, strict=True)):
        apart = reading.sample.ordering == "apart"
        own = copy.deepcopy(cache) if apart and number + 1 < len(reading.asks) else cache
        said = speaker.answer(own, torch.cat([last, ids], dim=1), ask)
        yield Answer(number, speaker.text(said.tokens), len(said.tokens), said.token_ms)
        if not apart:
            last = torch.tensor([said.unfed], dtype=torch.long)


def _followed(speaker: Speaker, reading: Reading, cache: KVCache) -> Answer:
    seen, rows, times = reading.seen, [], []
    for slot in range(seen.prompt, seen.ids.shape[1] - 1):  # behind the last token nothing follows
        begin = time.perf_counter()
        rows.append(speaker.step(cache, seen.ids[:, slot : slot + 1]))
        times.append(time.perf_counter() - begin)
    logits, exact = torch.stack(rows), seen.logits[:-1]
    following = seen.ids[0, seen.prompt + 1 :].to(logits.device)
    return Answer(
        ask=0,
        text="",
        tokens=len(following),
        token_ms=1000 * median(times),
        loss=float(cross_entropy(logits.double(), following)),
        kl=divergence(logits, log_probabilities(exact)),
        agreement=float((logits.argmax(-1) == exact.argmax(-1)).double().mean()),
    )


@dataclass
class Said:
    """Tokens of an answer, those of them that the cache does not hold yet, and the time of a step."""

    tokens: list[int] = field(default_factory=list)
    unfed: list[int] = field(default_factory=list)
    token_ms: float = 0.0


class Speaker:
    """Greedy decoding, token by token.

    Parameters
    ----------
    loaded : the model, inside of ``attach``.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        parameters = inspect.signature(self.model.forward).parameters
        self._argument = _compat.output_cache_argument(parameters)
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        end = self.model.generation_config.eos_token_id if self.model.generation_config is not None else None
        self._ends = {end} if isinstance(end, int) else set(end or ())

    def step(self, cache: KVCache, ids: Tensor) -> Tensor:
        """Feed tokens (1, n); gives the logits behind the last, (vocabulary,) float32."""
        output = self.model(
            input_ids=ids.to(self.model.device), use_cache=True, **{self._argument: cache}, **self._options
        )
        logits: Tensor = output.logits[0, -1].float()
        return logits

    def answer(self, cache: KVCache, ids: Tensor, ask: Ask) -> Said:
        """Feed a question (1, n), and decode up to ``ask.tokens`` tokens or the model's end."""
        said, times = Said(), []
        logits = self.step(cache, ids)
        while len(said.tokens) < ask.tokens:
            token = int(logits.argmax())
            said.unfed = [token]
            if token in self._ends:
                break
            said.tokens.append(token)
            if len(said.tokens) == ask.tokens:
                break
            begin = time.perf_counter()
            logits = self.step(cache, torch.tensor([[token]]))
            times.append(time.perf_counter() - begin)
        if said.unfed and said.unfed[0] in self._ends:
            said.unfed = []  # the next turn closes the answer itself
        said.token_ms = 1000 * median(times) if times else 0.0
        return said

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
