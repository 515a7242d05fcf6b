"""Exact attention of held-out tokens, in float32: what every option is held against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kvtailor import _compat
from kvtailor.calibrate.capture import LayerCapture
from kvtailor.layers.base import Stock
from kvtailor.layers.call import Call


def held_out_attention(layer: LayerCapture, count: int) -> Tensor:
    """Outputs of the last ``count`` tokens of a text, (count, Hq, Dv) float32.

    Parameters
    ----------
    layer : what the layer saw.
    count : tokens.
    """
    newest = (part[:, :, -count:] for part in (layer.query, layer.keys, layer.values))
    return attention_behind(layer, count, *newest)[0]


def attention_behind(layer: LayerCapture, count: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of other tokens that stand in place of a text's last ones.

    Parameters
    ----------
    layer : what the layer saw of the text.
    count : tokens at its end that are replaced.
    query : (B, Hq, count, Dk) of those that replace them.
    keys, values : (B, Hkv, count, D) of the same.

    Returns
    -------
    (B, count, Hq, Dv) float32.
    """
    prompt = layer.keys.shape[2] - count
    every_key, every_value = (
        torch.cat([seen[:, :, :prompt].to(query.device).expand(query.shape[0], -1, -1, -1), own], dim=2)
        for seen, own in ((layer.keys, keys), (layer.values, values))
    )
    return newest_attention(layer.module, layer.stock, query, every_key, every_value, layer.given)


def newest_attention(
    module: nn.Module, stock: Stock, query: Tensor, keys: Tensor, values: Tensor, given: dict[str, Any]
) -> Tensor:
    """Attention of a text's last tokens, (B, q, Hq, Dv) float32.

    Parameters
    ----------
    module, stock : the attention module, and the function that Transformers calls for it.
    query : (B, Hq, q, Dk) of the last q tokens.
    keys, values : (B, Hkv, n, D).
    given : scaling, softcap, s_aux, …
    """
    count, tokens = query.shape[2], keys.shape[2]
    call = Call.of(module, query, None, tokens - count, cross=False, **given)
    query, keys, values = query.float(), keys.float(), values.float()
    slots = torch.arange(tokens, device=query.device)
    visible = call.visible(torch.Size((1, 1, count, tokens)), slots, 0, 0)  # (q, n), None for everything
    if call.only_hides:  # soft caps and sinks are the model's own affair
        out = scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=call.scale, enable_gqa=True)
        return out.transpose(1, 2)
    mask = torch.ones(count, tokens, dtype=torch.bool, device=query.device) if visible is None else visible
    if stock is _compat.stock_eager:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, torch.finfo(torch.float32).min)
    return stock(module, query, keys, values, mask[None, None], **given)[0].float()
