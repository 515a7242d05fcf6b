"""Moving rotated keys to other positions, for policies that renumber what they keep."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn

from kvtailor.errors import ModelError

# Rotary variants whose angles depend on the length: a shift of a stored key is not defined for them.
LENGTH_DEPENDENT = ("dynamic", "longrope")


class Rotation:
    """Turns keys that carry a rotary embedding by a number of positions.

    Parameters
    ----------
    decoder : the model's decoder; its ``rotary_emb`` and the ``apply_rotary_pos_emb`` of its file are used.
    layer_type : type of the layer, for models with several sets of angles.

    Raises
    ------
    ModelError
        If the model has no rotary embedding, or one that cannot be shifted.
    """

    def __init__(self, decoder: nn.Module, layer_type: str = "full_attention") -> None:
        name = type(decoder).__name__
        rotary = getattr(decoder, "rotary_emb", None)
        apply = getattr(sys.modules.get(type(decoder).__module__), "apply_rotary_pos_emb", None)
        if rotary is None or apply is None:
            raise ModelError(f"{name} has no rotary embedding to renumber; use positions: original")
        kind = _rope_type(rotary, layer_type)
        if kind in LENGTH_DEPENDENT:
            raise ModelError(
                f"{name} has {kind!r} rotary embeddings, whose angles depend on the length; use positions: original"
            )
        self._rotary, self._apply, self._layer_type = rotary, apply, layer_type
        self._factor = float(_for_layer(rotary, "attention_scaling", layer_type) or 1.0)
        self._verify(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rotation:
        return copy.copy(self)  # the model's own module is looked at, not owned

    def shift(self, keys: torch.Tensor, positions: int) -> torch.Tensor:
        """Keys as if they stood ``positions`` later.

        Parameters
        ----------
        keys : (Hkv, n, Dk).
        positions : how far; 0 returns the keys as they are.
        """
        if positions == 0:
            return keys
        place = torch.full((1, keys.shape[1]), positions, device=keys.device)
        wide = keys[None].float()
        try:
            cos, sin = self._rotary(wide, place, self._layer_type)
        except TypeError:
            cos, sin = self._rotary(wide, place)
        turned, _ = self._apply(wide, wide, cos / self._factor, sin / self._factor)
        return turned[0].to(keys.dtype)

    def _verify(self, name: str) -> None:
        generator = torch.Generator().manual_seed(0)
        inverse = _for_layer(self._rotary, "inv_freq", self._layer_type)
        dim = self._head_dim(inverse)
        keys = torch.randn(1, 3, dim, generator=generator).to(inverse.device)
        try:
            twice, once = self.shift(self.shift(keys, 5), 7), self.shift(keys, 12)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"{name}: its rotary embedding cannot be shifted ({error}); use positions: original"
            ) from None
        if not torch.allclose(twice, once, atol=1e-4) or not torch.allclose(
            once.norm(dim=-1), keys.norm(dim=-1), rtol=1e-3
        ):
            raise ModelError(f"{name}: shifting its rotary embedding does not add up; use positions: original")

    def _head_dim(self, inverse: torch.Tensor) -> int:
        config = getattr(self._rotary, "config", None)
        dim = getattr(config, "head_dim", None)
        if dim is None and config is not None:
            dim = config.hidden_size // config.num_attention_heads
        return int(dim or 2 * len(inverse))


def _for_layer(rotary: nn.Module, name: str, layer_type: str) -> Any:
    """An attribute that some models keep once per layer type."""
    return getattr(rotary, f"{layer_type}_{name}", getattr(rotary, name, None))


def _rope_type(rotary: nn.Module, layer_type: str) -> str:
    kind = getattr(rotary, "rope_type", "default")
    return kind.get(layer_type, "default") if isinstance(kind, dict) else kind
