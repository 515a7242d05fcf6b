"""Tiny models with random weights, one of each kind that the cache must serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

VOCAB = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Kind:
    """A model of the zoo.

    Attributes
    ----------
    build : makes it.
    inputs : makes the arguments of ``generate`` and of a forward pass for a batch of two prompts.
    logits_atol : how far logits of two exact ways to compute may lie apart.
    """

    build: Callable[[], PreTrainedModel]
    inputs: Callable[[int], dict[str, Any]] = field(default=lambda tokens: text(tokens))


def text(tokens: int, seed: int = 1, rows: int = 2) -> dict[str, Any]:
    """Random prompts without padding."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(5, VOCAB, (rows, tokens), generator=generator),
        "attention_mask": torch.ones(rows, tokens, dtype=torch.long),
    }


def left_padded(tokens: int, pads: int) -> dict[str, Any]:
    """Two prompts, the first one shorter by ``pads`` tokens and padded on the left."""
    inputs = text(tokens)
    inputs["input_ids"][0, :pads] = 0
    inputs["attention_mask"][0, :pads] = 0
    return inputs


def seeded(make: Callable[[], PreTrainedModel]) -> Callable[[], PreTrainedModel]:
    """The same random weights at each call."""

    def build() -> PreTrainedModel:
        torch.manual_seed(0)
        model = make().eval()
        for parameter in model.parameters():  # larger weights, so that attention is not flat
            if parameter.dim() > 1:
                parameter.data.mul_(3.0)
        return model

    return build


def causal(config: str, model: str, **changes: Any) -> Kind:
    """A decoder-only text model."""
    settings = {**SMALL, **changes}
    return Kind(seeded(lambda: getattr(tf, model)(getattr(tf, config)(**settings))))


def _speech(tokens: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    return {
        "input_features": torch.randn(2, 8, 60, generator=generator),
        "decoder_input_ids": text(tokens)["input_ids"],
    }


def _encoder_text(tokens: int) -> dict[str, Any]:
    inputs = text(20, seed=3)
    inputs["attention_mask"][0, 15:] = 0
    return {**inputs, "decoder_input_ids": text(tokens)["input_ids"]}


def _whisper() -> PreTrainedModel:
    config = tf.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=8, d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=30,
        max_target_positions=256, decoder_start_token_id=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return tf.WhisperForConditionalGeneration(config)


def _t5() -> PreTrainedModel:
    config = tf.T5Config(
        vocab_size=VOCAB, d_model=48, d_kv=48, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return tf.T5ForConditionalGeneration(config)


def _bart() -> PreTrainedModel:
    config = tf.BartConfig(
        vocab_size=VOCAB, d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=256,
        decoder_start_token_id=1, pad_token_id=0, eos_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    return tf.BartForConditionalGeneration(config)


IMAGE, AUDIO = 3, 4


def _llava() -> PreTrainedModel:
    vision = tf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4
    )
    config = tf.LlavaConfig(vision_config=vision, text_config=tf.LlamaConfig(**SMALL), image_token_index=IMAGE)
    return tf.LlavaForConditionalGeneration(config)


def _llava_inputs(tokens: int) -> dict[str, Any]:
    inputs = text(tokens)
    inputs["input_ids"][:, 2:6] = IMAGE  # an image of 2 x 2 patches
    inputs["pixel_values"] = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    return inputs


def _qwen2_audio() -> PreTrainedModel:
    audio = tf.Qwen2AudioEncoderConfig(
        num_mel_bins=8,
        d_model=32,
        encoder_layers=1,
        encoder_attention_heads=4,
        encoder_ffn_dim=32,
        max_source_positions=16,
    )
    text_config = tf.Qwen2Config(**SMALL)
    return tf.Qwen2AudioForConditionalGeneration(
        tf.Qwen2AudioConfig(audio_config=audio, text_config=text_config, audio_token_index=AUDIO)
    )


def _qwen2_audio_inputs(tokens: int) -> dict[str, Any]:
    inputs = text(tokens)
    inputs["input_ids"][:, 2:10] = AUDIO  # 32 mel frames: 16 after the convolution, 8 after pooling
    inputs["input_features"] = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(5))
    inputs["feature_attention_mask"] = torch.ones(2, 32, dtype=torch.long)
    return inputs


SLIDING: dict[str, Any] = {"sliding_window": 16}
EVERY_OTHER: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], **SLIDING}

ZOO: dict[str, Kind] = {
    "llama": causal("LlamaConfig", "LlamaForCausalLM"),
    "mistral": causal("MistralConfig", "MistralForCausalLM", sliding_window=None),
    "mistral-window": causal("MistralConfig", "MistralForCausalLM", **SLIDING),
    "qwen2": causal("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": causal("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma2": causal("Gemma2Config", "Gemma2ForCausalLM", query_pre_attn_scalar=16, attn_logit_softcapping=5.0, **EVERY_OTHER),
    "gemma3": causal("Gemma3TextConfig", "Gemma3ForCausalLM", query_pre_attn_scalar=16, **EVERY_OTHER),
    "phi3": causal("Phi3Config", "Phi3ForCausalLM", partial_rotary_factor=1.0, sliding_window=None),
    "gpt-neox": causal("GPTNeoXConfig", "GPTNeoXForCausalLM", hidden_size=96, rotary_pct=0.5),
    "gpt-oss": causal("GptOssConfig", "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **EVERY_OTHER),
    "whisper": Kind(seeded(_whisper), _speech),
    "t5": Kind(seeded(_t5), _encoder_text),
    "bart": Kind(seeded(_bart), _encoder_text),
    "llava": Kind(seeded(_llava), _llava_inputs),
    "qwen2-audio": Kind(seeded(_qwen2_audio), _qwen2_audio_inputs),
}  # fmt: skip


def kv_cache(output: Any) -> Any:
    """The cache among a model's outputs, under either of its names."""
    return output["cache"] if "cache" in output else output["past_key_values"]
