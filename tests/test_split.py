"""Layers whose KV heads are kept in different ways: each head gets what it would get if all were kept so."""

from __future__ import annotations

import copy

import pytest
import torch

import kvtailor
from kvtailor.calibrate.capture import capture
from kvtailor.calibrate.measure import step_through
from kvtailor.errors import PlanError
from kvtailor.estimate import estimate
from kvtailor.layers.split import SplitLayer
from kvtailor.plan import LayerPlan, Plan
from zoo import ZOO, causal, kv_cache, left_padded, text

pytestmark = pytest.mark.usefixtures("kernels")

INT4 = {"form": {"kind": "rotated", "bits": 4, "exact": 8, "residual": 16}}
SNAPKV = {"keep": {"policy": "snapkv", "budget": "40%", "options": {"window": 8}}}
FIFO = {"keep": {"policy": "fifo", "budget": 90}}
CODES = {"find": {"index": "codes", "top": 20, "recent": 32, "ahead": True}}
WAYS = {"int4": INT4, "snapkv": SNAPKV, "fifo": FIFO, "codes": CODES, "full": {}}


def split(first: dict, second: dict, rest: str = "1") -> Plan:
    """KV head 0 in one way, the others in another."""
    return Plan(layers=[{"heads": 0, **first}, {"heads": rest, **second}])


def greedy(model, plan: Plan, inputs: dict, count: int = 12, **options) -> torch.Tensor:
    with kvtailor.attach(model, plan):
        return model.generate(**inputs, max_new_tokens=count, do_sample=False, **options)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "qwen3", "phi3"])
@pytest.mark.parametrize("way", ["int4", "snapkv", "full"])
def test_heads_kept_alike_by_two_entries_answer_as_with_one(name, way):
    """Grouped heads, soft caps, attention sinks, norms; a prompt, steps, and a second turn."""
    model = ZOO[name].build()
    prompt, turn = text(150), text(5, seed=3)["input_ids"]
    found = []
    for plan in (Plan(layers=[WAYS[way]]), split(WAYS[way], WAYS[way], "1-7")):
        with kvtailor.attach(model, plan):
            output = model(**prompt, use_cache=True)
            cache = kv_cache(output)
            logits = [output.logits]
            logits += [model(ids, past_key_values=cache).logits for ids in (turn[:, :1], turn[:, 1:2], turn[:, 2:])]
        found.append(torch.cat(logits, dim=1))
    assert all(isinstance(layer, SplitLayer) for layer in cache.tailored())
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("first", list(WAYS))
@pytest.mark.parametrize("second", ["int4", "snapkv", "codes"])
def test_each_head_gets_what_it_gets_where_all_heads_are_kept_so(first, second):
    """One layer alone, on what a model saw: prompts and steps."""
    model = ZOO["llama"].build()
    seen = capture(model, text(220, rows=1)["input_ids"], held_out=70)
    expected = [step_through(model, seen, 1, LayerPlan(**WAYS[way])) for way in (first, second)]
    with kvtailor.attach(model, split(WAYS[first], WAYS[second])) as attachment:
        layer = attachment.new_cache().layers[1]
    assert isinstance(layer, SplitLayer)
    found = stepped(layer, seen)
    torch.testing.assert_close(found[:, :3], expected[0].outputs[:, :3], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found[:, 3:], expected[1].outputs[:, 3:], atol=2e-5, rtol=1e-4)


def test_parts_of_different_sizes_are_filled_as_whole_layers_are():
    """Three KV heads, two of which are kept alike."""
    model = causal("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=3).build()
    seen = capture(model, text(220, rows=1)["input_ids"], held_out=3)
    expected = [step_through(model, seen, 1, LayerPlan(**WAYS[way])) for way in ("int4", "fifo")]
    with kvtailor.attach(model, split(INT4, FIFO, "1-2")) as attachment:
        found = stepped(attachment.new_cache().layers[1], seen)
    torch.testing.assert_close(found[:, :2], expected[0].outputs[:, :2], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found[:, 2:], expected[1].outputs[:, 2:], atol=2e-5, rtol=1e-4)


def stepped(layer, seen) -> torch.Tensor:
    from kvtailor.calibrate.measure import _attend, fill

    layer.step.active = True
    fill(layer, seen.layers[1], seen.prompt)
    layer.step.prompt = False
    outs = [_attend(layer, seen.layers[1], slot, slot + 1)[0, 0] for slot in range(seen.prompt, seen.ids.shape[1])]
    return torch.stack(outs)


def test_padded_prompts_beams_and_several_sequences():
    model, plan = ZOO["llama"].build(), split(INT4, SNAPKV)
    inputs = left_padded(120, 30)
    both = greedy(model, plan, inputs)
    for row, pads in ((0, 30), (1, 0)):
        alone = {name: value[row : row + 1, pads:] for name, value in inputs.items()}
        assert torch.equal(greedy(model, plan, alone)[0, 120 - pads :], both[row, 120:])
    beams = greedy(model, plan, inputs, num_beams=3)
    whole = greedy(model, Plan(layers=[{"heads": 0}, {"heads": 1}]), inputs, num_beams=3)
    assert torch.equal(whole, model.generate(**inputs, max_new_tokens=12, do_sample=False, num_beams=3))
    assert beams.shape == whole.shape


def test_crop_copy_reset_and_tensors_outside_of_attached_models():
    model = ZOO["llama"].build()
    prompt, turn = text(130), text(6, seed=3)["input_ids"]
    with kvtailor.attach(model, split(INT4, {})):
        cache = kv_cache(model(**prompt, use_cache=True))
        other = copy.deepcopy(cache)
        expected = model(turn[:, :1], past_key_values=cache).logits
        model(turn[:, 1:], past_key_values=cache)
        cache.crop(-6)
        assert cache.get_seq_length() == other.get_seq_length() == 130
        torch.testing.assert_close(model(turn[:, :1], past_key_values=cache).logits, expected)
        torch.testing.assert_close(model(turn[:, :1], past_key_values=other).logits, expected)
    stock = kv_cache(model(**prompt, use_cache=True))
    keys = other.layers[0].keys
    assert keys.shape == (2, 2, 131, 16)
    torch.testing.assert_close(keys[:, 1, :130], stock.layers[0].keys[:, 1])
    assert 0 < float((keys[:, 0, :130] - stock.layers[0].keys[:, 0]).norm() / stock.layers[0].keys[:, 0].norm()) < 0.2
    other.reset()
    assert other.get_seq_length() == 0 and other.nbytes() == 0


def test_assisted_decoding_gives_the_same_tokens():
    model, plan = ZOO["llama"].build(), split(INT4, CODES)
    inputs = text(150, rows=1)
    whole = greedy(model, plan, inputs, 20)
    guessed = greedy(model, plan, inputs, 20, prompt_lookup_num_tokens=3)
    assert torch.equal(whole[:, :150], guessed[:, :150]) and guessed.shape == whole.shape


def test_parts_read_ahead_and_answer_as_without():
    model, inputs = ZOO["llama"].build(), text(220, rows=1)
    found = []
    for ahead in (False, True):
        codes = {"find": {**CODES["find"], "ahead": ahead}, "tier": "disk"}
        with kvtailor.attach(model, split(INT4, codes)):
            cache = kv_cache(model(**inputs, use_cache=True))
            steps = [model(torch.tensor([[token]]), past_key_values=cache).logits for token in range(5, 11)]
        found.append((torch.cat(steps), cache.report().reads))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] is None and found[1][1].hit > 0


def test_what_is_estimated_is_what_is_held():
    model, plan = ZOO["llama"].build(), split(SNAPKV, INT4)
    with kvtailor.attach(model, plan):
        cache = kv_cache(model(**text(150, rows=1), use_cache=True))
    report, found = cache.report(), estimate(model.config, plan, 150)
    assert 0 <= report.bytes_held - found.bytes_held <= 2 * 3 * 4  # of the stand-ins: a number for each part
    assert found.bytes_default == report.bytes_default
    assert report.layers[0].kept_as == "heads 0: snapkv 40%; heads 1: rotated 4-bit" == found.layers[0].kept_as
    assert report.layers[0].tokens_kept == (60 + 150) / 2


def test_heads_that_no_entry_names_are_kept_whole_and_whole_layers_are_not_split():
    model = ZOO["llama"].build()
    cache = kvtailor.KVCache(model, Plan(layers=[{"layers": 1, "heads": 1, **INT4}, {"layers": 2, **INT4}]))
    assert [type(layer).__name__ for layer in cache.layers] == ["FullLayer", "SplitLayer", "QuantizedLayer"]
    assert [layer.in_words for layer in cache.layers[1].layers] == ["full", "rotated 4-bit"]
    alike = kvtailor.KVCache(model, Plan(layers=[{"heads": "0-5", **INT4}]))
    assert {type(layer).__name__ for layer in alike.layers} == {"QuantizedLayer"}


def test_cross_attention_of_another_number_of_heads_is_told():
    with pytest.raises(PlanError, match="names nothing"):
        Plan(layers=[{"heads": []}])
    with pytest.raises(PlanError, match=r"heads.*cannot be read"):
        Plan(layers=[{"heads": "first"}])
    layer = kvtailor.KVCache(ZOO["llama"].build(), split(INT4, {})).layers[0]
    with pytest.raises(PlanError, match="has 3 KV heads, and its plan speaks of 2"):
        layer.update(torch.zeros(1, 3, 4, 16), torch.zeros(1, 3, 4, 16))


def test_whisper_keeps_heads_of_cross_attention_apart():
    kind = ZOO["whisper"]
    model, inputs = kind.build(), kind.inputs(20)
    way = {"attention": "cross", **INT4}
    plans = (Plan(layers=[way]), Plan(layers=[{"heads": 0, **way}, {"heads": "1-9", **way}]))
    whole, apart = (greedy(model, plan, inputs) for plan in plans)
    assert torch.equal(whole, apart)
