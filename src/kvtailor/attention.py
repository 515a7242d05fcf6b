"""The attention functions that Transformers calls: keys that lead to a tailored layer go there, all others to stock."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvtailor import _compat, prediction
from kvtailor.layers.base import HANDLE, Stock
from kvtailor.layers.operator import traced_attention

# Names free of what Transformers looks for in them ("sdpa", "flash", "/", "|").
OVER_SDPA = "kvtailor"
OVER_EAGER = "kvtailor_eager"


def attention_over(stock: Stock) -> Stock:
    """Make the attention function for models that would otherwise use ``stock``.

    Parameters
    ----------
    stock : Transformers' own attention function.

    Returns
    -------
    A function of the module, the query (B, Hq, q, Dk), key and value (B, Hkv, n, D) or a tailored layer's stand-ins for
    them, a mask over all tokens seen or None, and what Transformers adds by name (scaling, softcap, s_aux, …).
    """

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **given: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if torch.compiler.is_compiling():
            return traced_attention(module, query, key, value, **given)
        prediction.answer(query)
        layer = getattr(key, HANDLE, None)
        if layer is None:
            return stock(module, query, key, value, mask, **given)
        return layer.attend(module, query, mask, stock, **given)

    return attention


def register() -> None:
    """Make both names known to Transformers."""
    _compat.register_attention(OVER_SDPA, attention_over(_compat.stock_sdpa), eager=False)
    _compat.register_attention(OVER_EAGER, attention_over(_compat.stock_eager), eager=True)


def stock_of(module: nn.Module) -> Stock:
    """Transformers' own attention function for a module whose configuration names ours."""
    config: Any = module.config
    return _compat.stock_eager if config._attn_implementation == OVER_EAGER else _compat.stock_sdpa


def name_over(implementation: str | None, supports_sdpa: bool) -> str:
    """Our name for a model whose attention implementation is ``implementation``.

    Models that SDPA does not serve (soft caps, attention sinks) go over their own eager function.
    """
    return OVER_EAGER if implementation == "eager" or not supports_sdpa else OVER_SDPA


def attention_modules(decoder: nn.Module) -> dict[int, nn.Module]:
    """A decoder's attention modules by layer."""
    found: dict[int, nn.Module] = {}
    for module in decoder.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and hasattr(module, "is_causal"):
            found[index] = module
    return found
