"""What a model is, as far as a plan that was measured on it is concerned."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvtailor import _compat

# What decides the shapes of a model's layers; another training of the same shapes is the same model here.
DECISIVE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "layer_types", "sliding_window",
)  # fmt: skip


def identity_of(model: Any) -> dict[str, Any]:
    """A model's class, the shape of its cache, and a hash of what decides its layers.

    Parameters
    ----------
    model : a Transformers model.

    Returns
    -------
    "model", "layers", "kv_heads", "head_dim" and "config".
    """
    decoder = _compat.decoder_config(model.config)
    decisive = {name: getattr(decoder, name, None) for name in DECISIVE}
    return {
        "model": type(model).__name__,
        "layers": len(_compat.stock_layers(model.config)),
        "kv_heads": _compat.kv_heads(decoder),
        "head_dim": _compat.head_dim(decoder),
        "config": hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16],
    }


def describe(identity: dict[str, Any]) -> str:
    """An identity in words: "LlamaForCausalLM of 30 layers, 3 KV heads of 64 channels, configuration 0123abcd"."""
    words = f"{identity['model']} of {identity['layers']} layers"
    if identity.get("kv_heads"):
        words += f", {identity['kv_heads']} KV heads of {identity.get('head_dim')} channels"
    return words + (f", configuration {identity['config']}" if identity.get("config") else "")
