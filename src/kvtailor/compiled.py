"""A decode step as one compiled graph, in which attention is an operator that leads back to the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvtailor import _compat
from kvtailor.attention import attention_modules
from kvtailor.cache import KVCache
from kvtailor.errors import ModelError
from kvtailor.layers.base import Stock, TailoredLayer
from kvtailor.layers.operator import Serving, serving_now


class NewTokens:
    """The cache that a traced step sees: it hands the new keys and values on to the operator."""

    is_compileable = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new tokens as they are."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """No tokens: positions come with the step."""
        return 0


class CompiledStep:
    """A decoder's forward for one new token per sequence, without padding, compiled at its first use.

    Parameters
    ----------
    decoder : the decoder, its configuration naming our attention function.
    forward : its forward.
    stock : Transformers' own attention.
    """

    def __init__(self, decoder: nn.Module, forward: Callable[..., Any], stock: Stock) -> None:
        self._forward = torch.compile(forward, fullgraph=True, dynamic=False)
        self._stock = stock
        self._modules = attention_modules(decoder)

    def serves(self, arguments: dict[str, Any]) -> bool:
        """Whether a call is a step that the graph is made for."""
        ids = arguments.get("input_ids")
        if ids is None or ids.shape[1] != 1 or torch.is_grad_enabled() or arguments.get("return_dict") is False:
            return False
        known = {"input_ids", "attention_mask", "position_ids", "use_cache", "return_dict", *_compat.CACHE_ARGUMENTS}
        if any(value is not None and value is not False for name, value in arguments.items() if name not in known):
            return False
        mask = arguments.get("attention_mask")
        return mask is None or (mask.dim() == 2 and bool(mask.all()))

    def __call__(self, arguments: dict[str, Any], cache: KVCache) -> Any:
        """Run the step."""
        ids = arguments["input_ids"]
        positions = arguments.get("position_ids")
        if positions is None:
            positions = torch.full((1, 1), cache.get_seq_length(), device=ids.device)
        name = _compat.cache_argument(arguments)[0]
        with self._served(cache), cache.serving(prompt=False):
            output = self._forward(
                input_ids=ids,
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),  # 4-D: taken as it is
                position_ids=positions,
                use_cache=True,
                **{name: NewTokens()},
            )
        output[name] = cache
        return output

    def check(self, cache: Any) -> None:
        """Raise ModelError for a model whose steps cannot be one graph, shown by a cache of it."""
        if not isinstance(cache, KVCache):
            raise ModelError("steps of an encoder-decoder model cannot be compiled; leave out compile=True")
        for index, layer in enumerate(cache.layers):
            if not isinstance(layer, TailoredLayer) or layer.place.shared or index not in self._modules:
                raise ModelError(
                    f"layer {index} cannot be compiled: allowed are models whose layers all attend to everything "
                    "and to keys of their own; leave out compile=True"
                )

    @contextmanager
    def _served(self, cache: KVCache) -> Iterator[None]:
        token = serving_now.set(Serving(cache.layers, self._modules, self._stock))
        try:
            yield
        finally:
            serving_now.reset(token)
