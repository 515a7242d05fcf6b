"""What a model's attention sees of a text: queries, keys and values of every layer, in one pass."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from kvtailor import _compat
from kvtailor.attention import name_over
from kvtailor.errors import KVTailorError, ModelError
from kvtailor.layers.base import Stock
from kvtailor.served import check_served

# Names free of what Transformers looks for in them ("sdpa", "flash", "/", "|").
OVER_SDPA = "kvtailor_calibration"
OVER_EAGER = "kvtailor_calibration_eager"
LISTENER = "_kvtailor_listener"

Listener = Callable[..., tuple[Tensor, Tensor | None]]
"""Called with the attention module, Transformers' own function, and what that function would be called with."""


@dataclass(frozen=True)
class LayerCapture:
    """What one layer's attention saw, after position encoding.

    Attributes
    ----------
    query : (1, Hq, n, Dk).
    keys, values : (1, Hkv, n, D).
    module, stock : the attention module, and the function that Transformers calls for it.
    given : what else Transformers hands to the attention function (scaling, softcap, s_aux, …).
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    module: nn.Module
    stock: Stock
    given: dict[str, Any]


@dataclass(frozen=True)
class Capture:
    """What a model saw of a text; its last ``held_out`` tokens are the decode steps that options are measured on.

    Attributes
    ----------
    ids : (1, n).
    held_out : tokens at the end of the text.
    layers : by number; layers that keep something else than keys and values of all tokens are among them.
    logits : (held_out, vocabulary) float32, behind each held-out token.
    passed : what each module of the decoder's stack handed on, of the held-out tokens; empty where there is no stack.
    """

    ids: Tensor
    held_out: int
    layers: dict[int, LayerCapture]
    logits: Tensor
    passed: list[Any] = field(default_factory=list)

    @property
    def prompt(self) -> int:
        """Tokens before the held-out ones."""
        return self.ids.shape[1] - self.held_out


@torch.no_grad()
def capture(model: PreTrainedModel, ids: Tensor, held_out: int) -> Capture:
    """Run a model over a text and keep what every layer's attention saw, on the CPU.

    Parameters
    ----------
    model : goes on with a text.
    ids : (1, n).
    held_out : tokens at the end that options are measured on.

    Raises
    ------
    ModelError
        If the model's cache cannot be tailored, or its layers cannot be listened to.
    KVTailorError
        If nothing is left of the text before the held-out tokens, or the model's own logits are not finite.
    """
    check_capturable(model)
    if not 0 < held_out < ids.shape[1]:
        raise KVTailorError(f"{held_out} held-out tokens of {ids.shape[1]}: allowed are 1 to {ids.shape[1] - 1}")
    layers: dict[int, LayerCapture] = {}

    def note(
        module: nn.Module, stock: Stock, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
    ) -> Any:
        seen = query.detach().cpu(), key.detach().cpu(), value.detach().cpu()
        layers[layer_of(module)] = LayerCapture(*seen, module, stock, given)
        return stock(module, query, key, value, mask, **given)

    parameters = inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": held_out} if "logits_to_keep" in parameters else {}
    with listening(model, note), handed_on(model, held_out) as passed:
        output = model(input_ids=ids.to(model.device), use_cache=False, **keep)
    logits = output.logits[0, -held_out:].float()
    check_finite(model, logits)
    return Capture(ids, held_out, layers, logits, passed)


def check_finite(model: PreTrainedModel, logits: Tensor) -> None:
    """Raise KVTailorError unless a model's exact logits are finite: nothing can be held against them."""
    if not logits.isfinite().all():
        dtype = str(model.dtype).removeprefix("torch.")
        raise KVTailorError(
            f"{type(model).__name__} in {dtype} gives logits that are not finite numbers with its default cache: "
            "allowed is a model, or another dtype, whose logits are"
        )


def check_capturable(model: PreTrainedModel) -> None:
    """Raise ModelError for a model whose layers calibration cannot measure."""
    check_served(model)
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder: calibration serves models that go on with a text")
    if _compat.shares_kv(_compat.decoder_config(model.config)):
        raise ModelError(f"{name} shares keys and values among its layers, which calibration does not serve")
    types = {layer_type for layer_type, _ in _compat.stock_layers(model.config)}
    if other := types - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{name} has layers of type {', '.join(sorted(other))}: calibration serves attention layers")


def layer_of(module: nn.Module) -> int:
    """Number of the layer that an attention module serves; raises ModelError if it does not say."""
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int):
        raise ModelError(f"attention module {type(module).__name__} does not say its layer: calibration cannot tell")
    return number


@contextmanager
def listening(model: PreTrainedModel, listener: Listener) -> Iterator[None]:
    """Have a model's attention answered by ``listener``; the model is as before on exit."""
    for name, stock, eager in ((OVER_SDPA, _compat.stock_sdpa, False), (OVER_EAGER, _compat.stock_eager, True)):
        _compat.register_attention(name, _asking_listener(stock), eager=eager)
    decoder: Any = model.get_decoder()
    supports_sdpa = bool(getattr(decoder, "_supports_sdpa", True))
    replaced: list[tuple[nn.Module, PretrainedConfig]] = []
    copies: dict[int, PretrainedConfig] = {}
    try:
        for module in decoder.modules():
            config = module.__dict__.get("config")
            if not isinstance(config, PretrainedConfig):
                continue
            if id(config) not in copies:
                copies[id(config)] = own = copy.copy(config)
                eager = name_over(config._attn_implementation, supports_sdpa) == name_over("eager", True)
                own._attn_implementation_internal = OVER_EAGER if eager else OVER_SDPA
            replaced.append((module, config))
            module.__dict__["config"], module.__dict__[LISTENER] = copies[id(config)], listener
        yield
    finally:
        for module, config in replaced:
            module.__dict__["config"] = config
            module.__dict__.pop(LISTENER, None)


def _asking_listener(stock: Stock) -> Stock:
    def attention(module: nn.Module, *args: Any, **given: Any) -> tuple[Tensor, Tensor | None]:
        listener: Listener = module.__dict__[LISTENER]
        return listener(module, stock, *args, **given)

    return attention


def stack(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's modules that run one after the other, one for each layer of the cache; empty where none stand."""
    depth = len(_compat.stock_layers(model.config))
    decoder: Any = model.get_decoder()
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == depth]
    return list(lists[0]) if len(lists) == 1 else []


@contextmanager
def handed_on(model: PreTrainedModel, count: int) -> Iterator[list[Any]]:
    """Note what each module of the stack hands on, of the last ``count`` tokens."""
    noted: list[Any] = []
    hooks = [
        module.register_forward_hook(lambda _, args, output: noted.append(_newest(output, count)))
        for module in stack(model)
    ]
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


def _newest(output: Any, count: int) -> Any:
    if isinstance(output, tuple):
        return tuple(_newest(part, count) for part in output)
    return output[:, -count:].clone() if isinstance(output, Tensor) and output.dim() == 3 else output
