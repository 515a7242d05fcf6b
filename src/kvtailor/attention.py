"""The attention functions that Transformers calls: keys that lead to a tailored layer go there, all others to stock."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvtailor import _compat
from kvtailor.layers.base import HANDLE

# Names free of what Transformers looks for in them ("sdpa", "flash", "/", "|").
OVER_SDPA = "kvtailor"
OVER_EAGER = "kvtailor_eager"


def attention_over_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention for models that would use SDPA.

    Parameters
    ----------
    module : the attention module.
    query : (B, Hq, q, Dk).
    key, value : (B, Hkv, n, D), or a tailored layer's stand-ins for them.
    mask : boolean, over all tokens seen, or None.
    given : what Transformers adds (scaling, softcap, s_aux, sliding_window, …).
    """
    layer = getattr(key, HANDLE, None)
    if layer is None:
        return _compat.stock_sdpa(module, query, key, value, mask, **given)
    return layer.attend(module, query, mask, _compat.stock_sdpa, **given)


def attention_over_eager(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention for models that would use their own eager function; arguments as above, the mask additive."""
    layer = getattr(key, HANDLE, None)
    if layer is None:
        return _compat.stock_eager(module, query, key, value, mask, **given)
    return layer.attend(module, query, mask, _compat.stock_eager, **given)


def register() -> None:
    """Make both names known to Transformers."""
    _compat.register_attention(OVER_SDPA, attention_over_sdpa, eager=False)
    _compat.register_attention(OVER_EAGER, attention_over_eager, eager=True)


def name_over(implementation: str | None) -> str:
    """Our name for a model whose attention implementation is ``implementation``."""
    return OVER_EAGER if implementation == "eager" else OVER_SDPA
