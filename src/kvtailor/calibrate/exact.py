"""Exact attention of held-out tokens, in float32: what every option is held against."""

from __future__ import annotations

import torch
from torch import Tensor

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
    batch, query_heads, _, dim = query.shape
    heads, prompt = layer.keys.shape[1], layer.keys.shape[2] - count
    call = Call.of(layer.module, query, None, prompt, cross=False, **layer.given)
    slots = torch.arange(prompt + count, device=query.device)
    before = [part[0, :, :prompt].to(query.device).float() for part in (layer.keys, layer.values)]
    out = []
    for row in range(batch):
        own_keys, own_values = (
            torch.cat([before[0], keys[row].float()], 1),
            torch.cat([before[1], values[row].float()], 1),
        )
        grouped = query[row].float().reshape(heads, -1, dim)  # (Hkv, G * count, Dk)
        logits = kernels.scores(grouped, own_keys).view(heads, -1, count, prompt + count)
        probs, lse = kernels.softmax(call.weigh(logits, slots, 0, 0))
        found = kernels.weighted_values(probs.flatten(1, 2), own_values).view(heads, -1, count, own_values.shape[-1])
        out.append(call.beside_sinks(found, lse).reshape(query_heads, count, -1).transpose(0, 1))
    return torch.stack(out)
