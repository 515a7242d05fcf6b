"""Whole plans on a text: how far the next token's distributions lie from those of the default cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvtailor import _compat
from kvtailor.attachment import attach
from kvtailor.cache import KVCache
from kvtailor.calibrate.capture import Capture
from kvtailor.calibrate.measure import fill
from kvtailor.calibrate.replay import divergence, log_probabilities
from kvtailor.layers.base import TailoredLayer
from kvtailor.plan import Plan


@dataclass(frozen=True)
class Evaluation:
    """One plan on one or more texts.

    Attributes
    ----------
    plan : its name.
    loss : divergence of the next token's distribution from the default cache's, nats per token.
    perplexity : of the held-out tokens.
    agreement : share of the default cache's most likely next tokens that are the plan's too.
    bytes_held, bytes_fast : of the cache in memory after the last token, and without what lives in slow host memory.
    """

    plan: str
    loss: float
    perplexity: float
    agreement: float
    bytes_held: int
    bytes_fast: int

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def evaluate(model: PreTrainedModel, seen: Sequence[Capture], plan: Plan) -> Evaluation:
    """Feed the held-out tokens one by one behind the prompt, with the cache that the plan leaves.

    Prompts are not run again: the cache is given what the model saw. That is what a prompt leaves, unless a hard budget
    makes the prompt's own attention forget, or a ``prompt_share`` makes it pass over tokens.

    Parameters
    ----------
    model : the model.
    seen : what it saw of each text.
    plan : the plan.
    """
    return mean_of(plan.name, [_on_text(model, one, plan) for one in seen])


def default(seen: Sequence[Capture]) -> Evaluation:
    """The default cache on the same tokens."""
    held = [_default_nbytes(one) for one in seen]
    rows = [
        Evaluation("default", 0.0, _negative_log_likelihood(one, one.logits), 1.0, held_bytes, held_bytes)
        for one, held_bytes in zip(seen, held, strict=True)
    ]
    return mean_of("default", rows)


def _default_nbytes(seen: Capture) -> int:
    """Bytes of Transformers' own cache after the text: layers with a window hold the newest tokens of it."""
    total = 0
    for number, one in seen.layers.items():
        config: Any = one.module.config
        window = getattr(_compat.stock_layers(config)[number][1], "sliding_window", None)
        tokens = one.keys.shape[2]
        held = min(tokens, window - 1) if window else tokens
        total += (one.keys.nbytes + one.values.nbytes) // tokens * held
    return total


def mean_of(name: str, rows: Sequence[Evaluation]) -> Evaluation:
    """Rows of single texts, whose ``perplexity`` is still a mean of logarithms, as one."""
    return Evaluation(
        plan=name,
        loss=fmean(row.loss for row in rows),
        perplexity=float(torch.tensor(fmean(row.perplexity for row in rows)).exp()),
        agreement=fmean(row.agreement for row in rows),
        bytes_held=round(fmean(row.bytes_held for row in rows)),
        bytes_fast=round(fmean(row.bytes_fast for row in rows)),
    )


@torch.no_grad()
def _on_text(model: PreTrainedModel, seen: Capture, plan: Plan) -> Evaluation:
    parameters = inspect.signature(model.forward).parameters
    argument = _compat.output_cache_argument(parameters)
    with attach(model, plan) as attachment:
        cache = attachment.new_cache()
        assert isinstance(cache, KVCache)
        fill_cache(cache, seen)
        rows = []
        for slot in range(seen.prompt, seen.ids.shape[1]):
            token = seen.ids[:, slot : slot + 1].to(model.device)
            rows.append(model(input_ids=token, use_cache=True, **{argument: cache}).logits[0, -1].float())
        report = cache.report()
    logits = torch.stack(rows)
    agreed = (logits.argmax(dim=-1) == seen.logits.argmax(dim=-1)).double().mean()
    return Evaluation(
        plan=plan.name,
        loss=divergence(logits, log_probabilities(seen.logits)),
        perplexity=_negative_log_likelihood(seen, logits),
        agreement=float(agreed),
        bytes_held=report.bytes_held,
        bytes_fast=report.bytes_fast,
    )


def fill_cache(cache: KVCache, seen: Capture) -> None:
    """Give every layer of an empty cache a prompt, as far as ``seen`` goes before the held-out tokens."""
    with cache.serving(prompt=True):
        for number, one in seen.layers.items():
            layer: Any = cache.layers[number]
            if isinstance(layer, TailoredLayer):
                fill(layer, one, seen.prompt)
            else:
                device = next(one.module.parameters()).device
                layer.update(*(part[:, :, : seen.prompt].to(device) for part in (one.keys, one.values)))


def _negative_log_likelihood(seen: Capture, logits: Tensor) -> float:
    """Mean over the held-out tokens but the first, nats."""
    following = seen.ids[0, seen.prompt + 1 :].to(logits.device)
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), following)) if len(following) else 0.0
