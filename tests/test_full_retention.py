"""A plan that keeps everything changes nothing, on every kind of model.

On the reference kernels logits are the default cache's to the bit, on the compiled ones equal to rounding.
"""

from __future__ import annotations

import pytest
import torch

import kvtailor
from kvtailor.kernels import native
from zoo import ZOO, kv_cache, left_padded

STEPS = {
    "max_new_tokens": 10,
    "min_new_tokens": 10,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def logits(model, inputs, **settings):
    return torch.stack(model.generate(**inputs, **STEPS, **settings).logits)


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        *(("reference", name) for name in ZOO),
        *(("auto", name) for name in ("llama", "gemma2", "gemma3", "gpt-neox", "gpt-oss", "whisper", "t5", "bart")),
    ],
    indirect=["kernels"],
)
def test_logits_of_generate_are_the_default_caches(name, kernels):
    kind = ZOO[name]
    model, inputs = kind.build(), kind.inputs(40)
    expected = logits(model, inputs)
    with kvtailor.attach(model, "full"):
        kernels.check(logits(model, inputs), expected)
    assert torch.equal(logits(model, inputs), expected)


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        *(("reference", name) for name in ZOO if name not in ("gemma2", "gpt-oss")),
        *(("auto", name) for name in ("llama", "gemma3", "whisper", "t5")),
    ],
    indirect=["kernels"],
)
def test_logits_of_eager_attention_too(name, kernels):
    kind = ZOO[name]
    model, inputs = kind.build(), kind.inputs(20)
    model.set_attn_implementation("eager")
    expected = logits(model, inputs)
    with kvtailor.attach(model, "full"):
        kernels.check(logits(model, inputs), expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "qwen3", "gpt-neox"])
def test_logits_of_left_padded_batches_too(name, kernels):
    model, inputs = ZOO[name].build(), left_padded(40, 15)
    expected = logits(model, inputs)
    with kvtailor.attach(model, "full"):
        kernels.check(logits(model, inputs), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision_too(dtype, kernels):
    model, inputs = ZOO["llama"].build().to(dtype), ZOO["llama"].inputs(40)
    expected = logits(model, inputs)
    with kvtailor.attach(model, "full"):
        kernels.check(logits(model, inputs), expected, dtype)


@pytest.mark.parametrize(
    "policy", ["fifo", "lru", "random", "keynorm", "keydiff", "streaming", "h2o", "snapkv", "pyramidkv", "adakv"]
)
@pytest.mark.parametrize(
    ("kernels", "budget"), [("reference", "100%"), ("reference", "1000"), ("auto", "100%")], indirect=["kernels"]
)
def test_a_budget_that_holds_everything_agrees_with_the_default_cache(policy, kernels, budget):
    """A larger budget than the sequence drops nothing; attention is exact up to the order of its sums."""
    if budget == "100%":  # of the prompt, so that the answer is beyond it for policies that hold the budget always
        plan = kvtailor.Plan(layers=[{"keep": {"policy": policy, "budget": 200}}])
    else:
        plan = kvtailor.Plan.preset(f"{policy}:{budget}")
    model, inputs = ZOO["llama"].build(), left_padded(40, 15)
    expected = model.generate(**inputs, **STEPS)
    with kvtailor.attach(model, plan):
        found = model.generate(**inputs, **STEPS)
    rtol = 1e-5 if kernels.exact else 1e-4
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=2e-5, rtol=rtol)
    assert kv_cache(found).report().tokens_kept < kv_cache(found).report().tokens_seen  # padding is never stored


def test_compiled_kernels_attend_the_steps_and_transformers_the_prompt(kernels, monkeypatch):
    """So that the tests above compare what they say: each of 3 layers attends 9 steps after the prompt's own pass."""
    counts, attend = [], native.attend
    monkeypatch.setattr(
        native, "attend", lambda *args, **given: counts.append(args[2].shape[2]) or attend(*args, **given)
    )
    model, inputs = ZOO["llama"].build(), ZOO["llama"].inputs(40)
    with kvtailor.attach(model, "full"):
        logits(model, inputs)
    assert counts == ([] if kernels.exact else [1] * 27)


def test_a_forward_pass_without_a_cache_argument_gets_a_tailored_one():
    model, inputs = ZOO["llama"].build(), ZOO["llama"].inputs(20)
    expected = model(**inputs).logits
    with kvtailor.attach(model, "full"):
        output = model(**inputs, use_cache=True)
        assert isinstance(kv_cache(output), kvtailor.KVCache)
        assert torch.equal(output.logits, expected)
        assert torch.equal(model(**inputs, use_cache=False).logits, expected)


@pytest.mark.usefixtures("kernels")
def test_sinks_that_sdpa_passes_over_are_passed_over():
    """So are soft caps on older releases, which run Gemma 2 over SDPA; newer ones refuse to."""
    from kvtailor._compat import stock_sdpa
    from kvtailor.layers.base import Place, Step
    from kvtailor.layers.full import FullLayer

    module = torch.nn.Module()
    module.num_key_value_groups = 2
    layer = FullLayer(kvtailor.LayerPlan(), Place(0), Step(active=True))
    keys, values, query = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 4, 1, 16)
    layer.update(keys[:, :, :8], values[:, :, :8])
    layer.update(keys[:, :, 8:], values[:, :, 8:])
    found, _ = layer.attend(module, query, None, stock_sdpa, s_aux=torch.ones(4))
    assert torch.equal(found, stock_sdpa(module, query, keys, values, None)[0])


@pytest.mark.parametrize(("kernels", "dim"), [("reference", 24), ("auto", 32)], indirect=["kernels"])
def test_two_dimensional_head_sizes_may_differ_between_keys_and_values(kernels, dim):
    """Dk != Dv, as in models whose values are narrower than their keys: every kind of layer returns values of Dv."""
    from kvtailor.layers.base import Place, Step
    from kvtailor.layers.evicting import EvictingLayer
    from kvtailor.layers.full import FullLayer
    from kvtailor.layers.quantized import QuantizedLayer

    class Module(torch.nn.Module):
        is_causal = True
        num_key_value_groups = 2

    from kvtailor._compat import stock_sdpa

    keys, values, query = torch.randn(2, 2, 200, dim), torch.randn(2, 2, 200, 16), torch.randn(2, 4, 200, dim)
    expected = stock_sdpa(Module(), query, keys, values, None)[0]
    for layer_class, entry, atol in [
        (FullLayer, {}, 0.0 if kernels.exact else 1e-5),
        (EvictingLayer, {"keep": {"policy": "fifo", "budget": 500}}, 1e-5),
        (QuantizedLayer, {"form": {"kind": "rotated", "bits": 8, "exact": 8, "residual": 8}}, 0.05),
    ]:
        step = Step(active=True, prompt=True)
        layer = layer_class(kvtailor.LayerPlan(**entry), Place(0), step)
        rows = []
        for start, stop in ((0, 150), (150, 199), (199, 200)):
            key, _ = layer.update(keys[:, :, start:stop], values[:, :, start:stop])
            mask = torch.ones(stop, stop, dtype=torch.bool).tril()[start:stop].expand(2, 1, -1, -1)
            rows.append(key.kv_layer.attend(Module(), query[:, :, start:stop], mask, stock_sdpa)[0])
        torch.testing.assert_close(torch.cat(rows, dim=1), expected, atol=max(atol, 1e-6), rtol=1e-4)
