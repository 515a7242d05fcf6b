"""Which models can be served, and why the others cannot."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from kvtailor import _compat
from kvtailor.errors import ModelError

# Layer types of Transformers that are left to its own layer classes.
LEFT_ALONE = ("sliding_attention", "chunked_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", "dummy")


def check_served(model: Any) -> None:
    """Raise ModelError, with the reason, if the KV of ``model`` cannot be tailored."""
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"model {type(model).__name__} cannot be served: allowed are Transformers models (PreTrainedModel)"
        )
    name = type(model).__name__
    config = _compat.decoder_config(model.config)
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ModelError(
            f"{name} cannot be served: it caches latents of multi-head latent attention (MLA), not keys and values"
        )
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel) or not decoder._can_set_attn_implementation():
        raise ModelError(
            f"{name} cannot be served: its attention does not go through Transformers' attention interface"
        )
    if not _compat.supports_cache(model):
        raise ModelError(f"{name} cannot be served: it keeps its own kind of cache, not Transformers' DynamicCache")
    if not model.config.is_encoder_decoder and not getattr(config, "is_decoder", True) and not model.can_generate():
        raise ModelError(f"{name} cannot be served: it is an encoder and keeps no KV cache")
    stock = _compat.stock_layers(model.config)
    if all(layer_type in ("linear_attention", "conv") for layer_type, _ in stock):
        raise ModelError(f"{name} cannot be served: it has no attention layers, so it keeps no keys and values")
    for number, (layer_type, layer) in enumerate(stock):
        if layer_type != "full_attention" and layer_type not in LEFT_ALONE:
            raise ModelError(
                f"{name} cannot be served: layer {number} is of type {layer_type!r}, which kvtailor does not know"
            )
        if layer is None:
            raise ModelError(
                f"{name} cannot be served: this release of Transformers has no cache layer for {layer_type!r}"
            )
