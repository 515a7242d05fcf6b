"""The attention of one new token as an operator of torch.library, so that a compiled step can hold it."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from kvtailor.layers.base import Stock, TailoredLayer

_library = torch.library.Library("kvtailor", "DEF")
_library.define(
    "step(Tensor query, Tensor key, Tensor value, int layer, float? scaling, float? softcap, int? window, "
    "Tensor? sinks) -> Tensor"
)


class Serving:
    """What the operator needs beside tensors while a compiled step runs.

    Parameters
    ----------
    layers : of the cache that the step goes to.
    modules : the decoder's attention modules by layer.
    stock : Transformers' own attention.
    """

    def __init__(self, layers: Sequence[Any], modules: dict[int, nn.Module], stock: Stock) -> None:
        self.layers, self.modules, self.stock = layers, modules, stock


serving_now: ContextVar[Serving] = ContextVar("kvtailorserving_now")


def step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Add one token to a layer of the cache that is being served, and attend.

    Parameters
    ----------
    query : (B, Hq, 1, Dk).
    key, value : (B, Hkv, 1, Dk) and (B, Hkv, 1, Dv), of the new token.
    layer : index of the layer.
    scaling, softcap, window, sinks : as Transformers hands them to an attention function.

    Returns
    -------
    (B, 1, Hq, Dv).
    """
    serving = serving_now.get()
    held: TailoredLayer = serving.layers[layer]
    held.update(key, value)
    out, _ = held.attend(
        serving.modules[layer],
        query,
        None,
        serving.stock,
        scaling=scaling,
        softcap=softcap,
        sliding_window=window,
        s_aux=sinks,
    )
    return out


def _fake_step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


_library.impl("step", step, "CompositeExplicitAutograd")
torch.library.register_fake("kvtailor::step", _fake_step, lib=_library)


def traced_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, None]:
    """The attention function while a step is traced."""
    out = torch.ops.kvtailor.step(
        query, key, value, module.layer_idx, given.get("scaling"), given.get("softcap"), given.get("sliding_window"),
        given.get("s_aux"),
    )  # fmt: skip
    return out, None
