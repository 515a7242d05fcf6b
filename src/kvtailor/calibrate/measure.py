"""How far each option's attention lies from the exact one, on tokens held out, and the bytes that it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvtailor.cache import build_layer
from kvtailor.calibrate.capture import Capture, LayerCapture
from kvtailor.calibrate.exact import newest_attention
from kvtailor.layers.base import Place, Step, TailoredLayer
from kvtailor.plan import LayerPlan


@dataclass(frozen=True)
class Stepped:
    """What a layer gave when the held-out tokens came one by one.

    Attributes
    ----------
    outputs : (held_out, Hq, Dv) float32, after each.
    bytes_held, bytes_fast : in memory afterwards, and without what lives in slow host memory.
    """

    outputs: Tensor
    bytes_held: int
    bytes_fast: int


@torch.no_grad()
def step_through(model: PreTrainedModel, capture: Capture, number: int, entry: LayerPlan) -> Stepped:
    """Give a layer of the cache the prompt and then the held-out tokens, as a model would.

    Parameters
    ----------
    model, capture : the model, and what it saw.
    number : which layer.
    entry : how it is kept.
    """
    seen, step = capture.layers[number], Step(active=True)
    layer = build_layer(model, entry, Place(number, model=type(model).__name__), step)
    fill(layer, seen, capture.prompt)
    outputs = []
    step.prompt = False
    for slot in range(capture.prompt, capture.ids.shape[1]):
        outputs.append(_attend(layer, seen, slot, slot + 1)[0, 0].float())
    held = layer.bytes_by_kind()
    total = sum(held.values())
    return Stepped(torch.stack(outputs), total, total - held.get("host", 0))


def fill(layer: TailoredLayer, seen: LayerCapture, prompt: int) -> None:
    """Give a layer a prompt's queries, keys and values, in the chunks that it asks for; nobody reads the output.

    Parameters
    ----------
    layer : an empty one, whose step is active.
    seen : what the model's layer saw.
    prompt : tokens.
    """
    step = layer.step
    step.prompt, step.expected, start = True, prompt, 0
    while start < prompt:
        stop = min(prompt, start + layer.chunk(prompt, 1))
        step.last = stop == prompt
        _attend(layer, seen, start, stop)
        start = stop
    step.expected = 0


def _attend(layer: TailoredLayer, seen: LayerCapture, start: int, stop: int) -> Tensor:
    stock = _unread if layer.step.prompt else partial(_exact, seen)
    device = next(seen.module.parameters()).device
    query, keys, values = (part[:, :, start:stop].to(device) for part in (seen.query, seen.keys, seen.values))
    layer.update(keys, values)
    return layer.attend(seen.module, query, None, stock, **seen.given)[0]


def _exact(
    seen: LayerCapture, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Any, **given: Any
) -> tuple[Tensor, None]:
    return newest_attention(module, seen.stock, query, keys, values, given), None


def _unread(module: nn.Module, query: Tensor, *rest: Any, **given: Any) -> tuple[Tensor, None]:
    """In place of a prompt's attention."""
    return query.transpose(1, 2), None


def errors(found: Tensor, exact: Tensor) -> list[float]:
    """Distance of outputs from the exact ones over the length of those, by query head, mean over tokens.

    Infinite where an output is not a finite number.

    Parameters
    ----------
    found, exact : (n, Hq, Dv).
    """
    apart = (found.double() - exact.double()).norm(dim=-1) / exact.double().norm(dim=-1).clamp_min(1e-30)
    return [float(error) for error in apart.mean(dim=0).nan_to_num(nan=math.inf, posinf=math.inf)]
