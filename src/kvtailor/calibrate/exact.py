"""Exact attention of held-out tokens, in float32: what every option is held against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtailor.calibrate.capture import LayerCapture
from kvtailor.kernels import reference as kernels
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
    call = Call.of(layer.module, query, None, prompt, cross=False, **layer.given)
    every_key, every_value = (
        torch.cat([seen[:, :, :prompt].to(query.device).expand(query.shape[0], -1, -1, -1), own], dim=2).float()
        for seen, own in ((layer.keys, keys), (layer.values, values))
    )
    slots = torch.arange(prompt + count, device=query.device)
    if call.only_hides:  # what PyTorch's fused attention serves
        visible = call.visible(torch.Size((1, 1, count, len(slots))), slots, 0, 0)
        out = scaled_dot_product_attention(
            query.float(), every_key, every_value, attn_mask=visible, scale=call.scale, enable_gqa=True
        )
        return out.transpose(1, 2)
    return torch.stack([_one(call, *row, slots) for row in zip(query, every_key, every_value, strict=True)])


def _one(call: Call, query: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
    """Attention of one sequence's query (Hq, q, Dk) over keys and values (Hkv, n, D): (q, Hq, Dv)."""
    query_heads, count, dim = query.shape
    heads = keys.shape[0]
    logits = kernels.scores(query.float().reshape(heads, -1, dim), keys).view(heads, -1, count, len(slots))
    probs, lse = kernels.softmax(call.weigh(logits, slots, 0, 0))
    found = kernels.weighted_values(probs.flatten(1, 2), values).view(heads, -1, count, values.shape[-1])
    return call.beside_sinks(found, lse).reshape(query_heads, count, -1).transpose(0, 1)
