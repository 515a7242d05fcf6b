"""Layers live where their keys live: nothing is made on the default device."""

from __future__ import annotations

import pytest
import torch

import kvtailor
from kvtailor._compat import stock_sdpa
from test_contract import COMPILED, EVERY, with_plans
from zoo import ZOO


class Attention(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 2


@with_plans({**EVERY, "full": kvtailor.Plan()}, (*COMPILED, "full"))
@pytest.mark.usefixtures("kernels")
def test_no_tensor_is_made_on_the_default_device(plan):
    """The default device is one that cannot compute, so a tensor made there would fail at its first use."""
    model = ZOO["llama"].build()
    layer = kvtailor.KVCache(model, plan).layers[0]
    layer.step.active = True
    keys, values, query = torch.randn(2, 2, 220, 16), torch.randn(2, 2, 220, 16), torch.randn(2, 4, 220, 16)
    mask = torch.ones(220, 220, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask[0, ..., :9] = False
    rows, cuts = torch.tensor([1, 0]), [(0, 130), (130, 200), *((n, n + 1) for n in range(200, 210)), (210, 213)]
    with torch.device("meta"):
        assert torch.empty(1).device.type == "meta"
        for start, stop in cuts:
            layer.step.prompt, layer.step.last = stop <= 200, True
            key, _ = layer.update(keys[:, :, start:stop], values[:, :, start:stop])
            out, _ = key.kv_layer.attend(
                Attention(), query[:, :, start:stop], mask[:, :, start:stop, :stop], stock_sdpa
            )
        layer.crop(-2)
        layer.reorder_cache(rows)
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices(rows)
    assert out.device.type == "cpu" and torch.isfinite(out).all()
    assert all(tensor.device.type == "cpu" for _, tensor in layer.stored())


def test_each_layer_takes_its_own_device():
    layers = kvtailor.KVCache(ZOO["llama"].build(), "full").layers
    for layer, device in zip(layers, ("cpu", "meta", "cpu"), strict=True):
        layer.update(torch.zeros(1, 2, 5, 16, device=device), torch.zeros(1, 2, 5, 16, device=device))
        assert {tensor.device.type for _, tensor in layer.stored()} == {device}
