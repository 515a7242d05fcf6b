"""What a layer's error does to the model: held-out tokens run again with that layer's attention replaced.

Source: ours. The layers before the replaced one see what they saw, so they need not run; the layers after it attend
exactly to the prompt that was captured.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvtailor.calibrate.capture import Capture, layer_of, listening, stack
from kvtailor.calibrate.exact import attention_behind
from kvtailor.errors import ModelError

ROWS = 24
"""Replaced outputs that run side by side."""


def losses(model: PreTrainedModel, capture: Capture, number: int, outputs: Tensor) -> list[float]:
    """Divergence of the next token's distribution when one layer's attention is replaced, in nats, mean over tokens.

    Parameters
    ----------
    model, capture : the model, and what it saw.
    number : the layer.
    outputs : (B, held_out, Hq, Dv), what it gives instead, in each of B ways.
    """
    exact = log_probabilities(capture.logits)
    return [
        divergence(logits, exact) for some in outputs.split(ROWS) for logits in replay(model, capture, number, some)
    ]


@torch.no_grad()
def replay(model: PreTrainedModel, capture: Capture, number: int, outputs: Tensor) -> Tensor:
    """Logits (B, held_out, vocabulary) behind the held-out tokens when a layer's attention gives ``outputs``.

    Parameters
    ----------
    model, capture, number, outputs : as for :func:`losses`.
    """
    batch, count = outputs.shape[:2]

    def answer(
        module: nn.Module, stock: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
    ) -> Any:
        layer = layer_of(module)
        if layer == number:
            return outputs.to(query.device, query.dtype), None
        return attention_behind(capture.layers[layer], count, query, key, value).to(query.dtype), None

    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        raise ModelError(f"{type(model).__name__} takes no position_ids: calibration cannot run single layers again")
    slots = torch.arange(capture.prompt, capture.ids.shape[1], device=model.device)
    ids = capture.ids[:, -count:].to(model.device)
    with listening(model, answer), passing_by(model, capture, number, batch):
        output = model(input_ids=ids.expand(batch, -1), position_ids=slots.expand(batch, -1), use_cache=False)
    logits: Tensor = output.logits
    return logits


@contextmanager
def passing_by(model: PreTrainedModel, capture: Capture, number: int, batch: int) -> Iterator[None]:
    """Have the modules before a layer hand on what they did, for ``batch`` rows, without running."""
    modules = stack(model)[:number] if capture.passed else []
    try:
        for module, output in zip(modules, capture.passed, strict=False):
            module.__dict__["forward"] = _handing(_rows(output, batch))
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def _handing(output: Any) -> Any:
    return lambda *args, **given: output


def _rows(output: Any, batch: int) -> Any:
    if isinstance(output, tuple):
        return tuple(_rows(part, batch) for part in output)
    return output.expand(batch, -1, -1) if isinstance(output, Tensor) and output.dim() == 3 else output


def log_probabilities(logits: Tensor) -> Tensor:
    """Logarithms of the distributions that logits (n, vocabulary) stand for, float64."""
    return logits.double().log_softmax(dim=-1)


def divergence(logits: Tensor, exact: Tensor) -> float:
    """Kullback-Leibler divergence of the distributions of ``logits`` from the exact ones, mean over tokens, in nats.

    Parameters
    ----------
    logits : (n, vocabulary).
    exact : :func:`log_probabilities` of the exact logits.

    Returns
    -------
    0 or more; infinite where ``logits`` hold NaN, or stand for no distribution.
    """
    shares = exact.exp()
    apart = torch.where(shares > 0, shares * (exact - log_probabilities(logits)), 0.0)
    found = float(apart.sum(dim=-1).mean())
    return math.inf if math.isnan(found) else max(0.0, found)
