"""Attaching and detaching: the model is exactly as before, other models never notice, wrong models are refused.

Every test runs on the reference kernels and on the compiled ones, unless it says otherwise.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf

import kvtailor
from kvtailor.errors import CacheError, ModelError, PlanError
from zoo import SMALL, ZOO, kv_cache, seeded, text

pytestmark = pytest.mark.usefixtures("kernels")
on_reference = pytest.mark.parametrize("kernels", ["reference"], indirect=True)

GREEDY = {
    "max_new_tokens": 6,
    "min_new_tokens": 6,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def snapshot(model):
    """Everything that attaching could leave behind."""
    return {
        name: (
            dict(module.__dict__),
            id(module.__dict__.get("config")),
            getattr(module.__dict__.get("config"), "_attn_implementation", None),
        )
        for name, module in model.named_modules()
    }


def same(before, after):
    assert before.keys() == after.keys()
    for name, (members, config, implementation) in before.items():
        assert members.keys() == after[name][0].keys(), name
        assert (config, implementation) == after[name][1:], name


@on_reference
@pytest.mark.parametrize("name", ["llama", "gemma2", "whisper", "llava", "qwen2-audio"])
def test_the_model_is_as_before(name):
    kind = ZOO[name]
    model = kind.build()
    model.generate(**kind.inputs(20), max_new_tokens=3)  # Transformers notes on modules that they were called
    before, settings = snapshot(model), copy.deepcopy(model.config.to_dict())
    with kvtailor.attach(model, "int4"):
        model.generate(**kind.inputs(20), max_new_tokens=3)
    same(before, snapshot(model))
    assert model.config.to_dict() == settings


def test_the_model_is_as_before_after_an_exception():
    model = ZOO["llama"].build()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), kvtailor.attach(model, "int4"):
        raise ZeroDivisionError
    same(before, snapshot(model))

    def broken(*args, **kwargs):
        raise RuntimeError("inside")

    with kvtailor.attach(model, "int4"):
        inner = model.model.layers[1].mlp
        inner.forward = broken
        with pytest.raises(RuntimeError, match="inside"):
            model.generate(**text(20), max_new_tokens=3)
        del inner.forward
    same(before, snapshot(model))
    assert torch.isfinite(model(**text(20)).logits).all()


def test_attach_and_detach_as_a_pair_of_calls():
    model = ZOO["llama"].build()
    before = snapshot(model)
    attachment = kvtailor.attach(model, "int4")
    assert isinstance(kv_cache(model.generate(**text(20), **GREEDY)), kvtailor.KVCache)
    kvtailor.detach(model)
    same(before, snapshot(model))
    attachment.detach()  # a second time does nothing
    with pytest.raises(ModelError, match="carries no plan"):
        kvtailor.detach(model)


def test_a_second_plan_on_the_same_model_is_refused():
    model = ZOO["llama"].build()
    with kvtailor.attach(model, "int4"):
        with pytest.raises(ModelError, match="carries plan 'int4' already"):
            kvtailor.attach(model, "int8")
        assert isinstance(kv_cache(model.generate(**text(20), **GREEDY)), kvtailor.KVCache)


def test_every_generate_gets_a_fresh_cache():
    model = ZOO["llama"].build()
    with kvtailor.attach(model, "fifo:16"):
        one, two = model.generate(**text(30), **GREEDY), model.generate(**text(30), **GREEDY)
    assert kv_cache(one) is not kv_cache(two)
    assert all(torch.equal(a, b) for a, b in zip(one.logits, two.logits, strict=True))


def test_two_models_at_once_each_with_its_own_plan():
    one, two = ZOO["llama"].build(), ZOO["gemma2"].build()
    expected = {}
    for plan, model in (("fifo:16", one), ("int4", two)):
        with kvtailor.attach(model, plan):
            expected[plan] = model.generate(**text(30), **GREEDY).logits
    with kvtailor.attach(one, "fifo:16"), kvtailor.attach(two, "int4"):
        found = {
            "int4": two.generate(**text(30), **GREEDY).logits,
            "fifo:16": one.generate(**text(30), **GREEDY).logits,
        }
    for plan, logits in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(logits, found[plan], strict=True))


def test_two_models_of_one_config_do_not_touch_each_other():
    config = tf.LlamaConfig(**SMALL)
    one, two = (seeded(lambda: tf.LlamaForCausalLM(config))() for _ in range(2))
    assert one.config is two.config
    expected = two.generate(**text(30), **GREEDY).logits
    first = kvtailor.attach(one, "fifo:16")
    assert two.model.config._attn_implementation == "sdpa"
    assert all(torch.equal(a, b) for a, b in zip(two.generate(**text(30), **GREEDY).logits, expected, strict=True))
    second = kvtailor.attach(two, "fifo:20")
    first.detach()  # not in the order of attaching
    assert kv_cache(two.generate(**text(30), **GREEDY)).report().tokens_kept == 20
    second.detach()
    assert all(torch.equal(a, b) for a, b in zip(one.generate(**text(30), **GREEDY).logits, expected, strict=True))


def test_a_cache_of_ones_own_serves_other_caches_too():
    """Inside attach a plain DynamicCache still works, as stock."""
    model = ZOO["llama"].build()
    expected = model.generate(**text(30), **GREEDY)
    with kvtailor.attach(model, "fifo:16"):
        found = model.generate(**text(30), **GREEDY, past_key_values=tf.DynamicCache(config=model.config))
    assert all(torch.equal(a, b) for a, b in zip(found.logits, expected.logits, strict=True))


def test_use_cache_false_and_cache_implementation_are_respected():
    model = ZOO["llama"].build()
    expected = model.generate(**text(30), **GREEDY)
    with kvtailor.attach(model, "fifo:16"):
        found = model.generate(**text(30), **GREEDY, use_cache=False)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-5, rtol=1e-4)
        with pytest.raises(PlanError, match="cache_implementation 'static' while plan"):
            model.generate(**text(30), **GREEDY, cache_implementation="static")


def test_a_plan_is_not_changed_by_use():
    plan = kvtailor.Plan(layers=[{"keep": {"policy": "snapkv", "budget": 20, "options": {"window": 8}}}])
    before = plan.model_dump()
    model = ZOO["llama"].build()
    with kvtailor.attach(model, plan):
        model.generate(**text(30), **GREEDY)
    assert plan.model_dump() == before


def test_a_plan_that_changes_nothing_says_so():
    model = ZOO["mistral-window"].build()
    with pytest.warns(UserWarning, match="changes no layer of MistralForCausalLM"):
        kvtailor.attach(model, "int4").detach()


class TestRefusedModels:
    def test_latent_attention(self):
        config = tf.DeepseekV3Config(
            vocab_size=96, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1, n_routed_experts=4,
            num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, v_head_dim=8,
            qk_nope_head_dim=8, n_group=1, topk_group=1, num_experts_per_tok=2,
        )  # fmt: skip
        with pytest.raises(ModelError, match=r"DeepseekV3ForCausalLM cannot be served.*latents"):
            kvtailor.attach(tf.DeepseekV3ForCausalLM(config), "int4")

    def test_no_attention_interface(self):
        model = tf.BloomForCausalLM(tf.BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=2))
        with pytest.raises(ModelError, match=r"BloomForCausalLM cannot be served.*attention interface"):
            kvtailor.attach(model, "int4")

    def test_no_attention_layers(self):
        model = tf.MambaForCausalLM(tf.MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=1, state_size=4))
        with pytest.raises(ModelError, match="MambaForCausalLM cannot be served: it has no attention layers"):
            kvtailor.attach(model, "int4")

    def test_an_encoder(self):
        config = tf.BertConfig(
            vocab_size=96, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
        with pytest.raises(ModelError, match="BertModel cannot be served"):
            kvtailor.attach(tf.BertModel(config), "int4")

    def test_something_else(self):
        with pytest.raises(ModelError, match="Linear cannot be served: allowed are Transformers models"):
            kvtailor.attach(torch.nn.Linear(2, 2), "int4")

    def test_paged_continuous_batching(self):
        model = ZOO["llama"].build()
        with kvtailor.attach(model, "int4"), pytest.raises(ModelError, match="continuous batching"):
            model.generate_batch([[5, 6, 7]], generation_config=tf.GenerationConfig(max_new_tokens=2))

    def test_keys_that_a_model_changes_after_the_cache(self):
        """Padding between cache and attention loses the way to the layer: an error, never an answer from stand-ins."""
        config = tf.MoonshineConfig(
            vocab_size=96, hidden_size=40, intermediate_size=32, encoder_num_hidden_layers=1, decoder_num_hidden_layers=1,
            encoder_num_attention_heads=2, decoder_num_attention_heads=2, pad_head_dim_to_multiple_of=8, decoder_start_token_id=1,
            eos_token_id=2, pad_token_id=0, bos_token_id=1,
        )  # fmt: skip
        model = seeded(lambda: tf.MoonshineForConditionalGeneration(config))()
        sound = torch.randn(1, 4000)
        expected = model.generate(sound, max_new_tokens=4)
        with kvtailor.attach(model, "full"):
            assert torch.equal(model.generate(sound, max_new_tokens=4), expected)
        with (
            kvtailor.attach(model, "fifo:10"),
            pytest.raises(CacheError, match="changes its keys between cache and attention"),
        ):
            model.generate(sound, max_new_tokens=4)


class TestOtherArchitectures:
    def test_linear_attention_layers_are_left_to_transformers(self, kernels):
        config = tf.Qwen3NextConfig(
            **SMALL, layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_value_heads=4,
            linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0, mlp_only_layers=[0, 1, 2],
        )  # fmt: skip
        model = seeded(lambda: tf.Qwen3NextForCausalLM(config))()
        expected = model.generate(**text(30), **GREEDY)
        with kvtailor.attach(model, "full"):
            found = model.generate(**text(30), **GREEDY)
        kernels.check(found.logits, expected.logits)
        with kvtailor.attach(model, "fifo:16"):
            found = model.generate(**text(30), **GREEDY)
        report = kv_cache(found).report()
        assert report.layers[1].tokens_kept == 16 and report.layers[0].kept_as == "LinearAttentionLayer"

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_layers_that_share_keys_and_values(self, implementation, kernels):
        """Gemma 3n: later layers attend to earlier layers' keys; the drop must wait until they have."""
        model = seeded(lambda: tf.Gemma3nForCausalLM(gemma3n()))()
        model.set_attn_implementation(implementation)
        expected = model.generate(**text(30), **GREEDY)
        with kvtailor.attach(model, "full"):
            found = model.generate(**text(30), **GREEDY)
        kernels.check(found.logits, expected.logits)
        for plan, atol in (("fifo:100", 1e-4), ("int8", 2e-2)):
            with kvtailor.attach(model, plan):
                found = model.generate(**text(30), **GREEDY)
            torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=atol, rtol=1e-3)
        with kvtailor.attach(model, "fifo:16"):
            dropped = model.generate(**text(30), **GREEDY)
        torch.testing.assert_close(
            dropped.logits[0], expected.logits[0], atol=1e-4, rtol=1e-3
        )  # the prompt sees itself whole
        assert (
            min(layer.tokens_kept for layer in kv_cache(dropped).report().layers if layer.kept_as.startswith("fifo"))
            == 16
        )

    @on_reference
    def test_whisper_long_form_gets_a_fresh_cache_for_each_window(self):
        model = ZOO["whisper"].build()
        model.generation_config.no_timestamps_token_id = 90
        model.generation_config.is_multilingual = False
        features = torch.randn(1, 8, 150, generator=torch.Generator().manual_seed(3))
        settings = {
            "return_timestamps": True,
            "max_new_tokens": 12,
            "do_sample": False,
            "attention_mask": torch.ones(1, 150, dtype=torch.long),
        }
        expected = model.generate(features, **settings)
        with kvtailor.attach(model, "full") as attachment:
            made, fresh = [], attachment.new_cache
            attachment.new_cache = lambda: made.append(fresh()) or made[-1]
            assert torch.equal(model.generate(features, **settings), expected)
        assert len(made) > 1

    def test_whisper_returns_its_outputs_with_an_evicting_plan(self):
        model, inputs = ZOO["whisper"].build(), ZOO["whisper"].inputs(20)
        with kvtailor.attach(model, "fifo:10"):
            found = model.generate(**inputs, **GREEDY)
        assert len(found.logits) == 6

    def test_a_cache_of_another_recording_is_refused(self):
        model = ZOO["whisper"].build()
        cache = kvtailor.KVCache(model, "full")
        ids = torch.tensor([[1]])
        with kvtailor.attach(model, "full"):
            model(input_features=torch.randn(1, 8, 60), decoder_input_ids=ids, past_key_values=cache)
            with pytest.raises(CacheError, match="cross attention of another input"):
                model(input_features=torch.randn(1, 8, 60), decoder_input_ids=ids, past_key_values=cache)
            cache.reset()
            model(input_features=torch.randn(1, 8, 60), decoder_input_ids=ids, past_key_values=cache)

    def test_cross_attention_has_entries_of_its_own(self):
        model, inputs = ZOO["whisper"].build(), ZOO["whisper"].inputs(20)
        plan = kvtailor.Plan(
            layers=[
                {"attention": "cross", "keep": {"policy": "h2o", "budget": 12}},
                {"form": {"kind": "rotated", "bits": 4}},
            ]
        )
        with kvtailor.attach(model, plan):
            cache = kvtailor.KVCache(model, plan)
            encoded = model.get_encoder()(inputs["input_features"])
            for ids in ([[1], [1]], [[5], [6]], [[7], [8]]):
                model(encoder_outputs=encoded, decoder_input_ids=torch.tensor(ids), past_key_values=cache)
        kept = {layer.attention: (layer.kept_as, layer.tokens_kept) for layer in cache.report().layers}
        assert kept == {"self": ("rotated 4-bit", 3.0), "cross": ("h2o 12", 12.0)}


def gemma3n():
    return tf.Gemma3nTextConfig(
        vocab_size=96, vocab_size_per_layer_input=96, hidden_size=48, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, hidden_size_per_layer_input=8, laurel_rank=8,
        altup_num_inputs=2, altup_active_idx=0, sliding_window=16, num_kv_shared_layers=2, activation_sparsity_pattern=[0.0] * 5,
        layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"],
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip


def test_a_base_model_without_a_head_is_served():
    model, inputs = seeded(lambda: tf.LlamaModel(tf.LlamaConfig(**SMALL)))(), text(30)
    before, expected = snapshot(model), model(**inputs).last_hidden_state
    with kvtailor.attach(model, "fifo:16"):
        output = model(**inputs, use_cache=True)
        assert kv_cache(output).report().tokens_kept == 16
        torch.testing.assert_close(output.last_hidden_state, expected)
    same(before, snapshot(model))
