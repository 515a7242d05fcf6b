"""Every difference between the Transformers releases that are served (5.16 and newer), and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, cache_utils
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

# "cache" from 5.24 on, "past_key_values" before; both are looked up, the newer first.
CACHE_ARGUMENTS = ("cache", "past_key_values")

# The name under which `generate` hands a cache to the model.
GENERATE_CACHE_NAME = ALL_CACHE_NAMES[0]

# Ways into continuous batching, which has a paged cache of its own.
CONTINUOUS_BATCHING = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def register_attention(name: str, function: AttentionFunction, *, eager: bool) -> None:
    """Register an attention function with the mask that its stock counterpart takes.

    Without the mask half, Transformers builds no mask at all for an unknown name.

    Parameters
    ----------
    name : name for ``config._attn_implementation``; free of "/", "|", "flash" and "sdpa", which trigger other paths.
    function : called as Transformers calls its own attention functions.
    eager : True for the additive float mask of eager attention, False for the boolean one of SDPA.
    """
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, eager_mask if eager else sdpa_mask)


def stock_sdpa(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Transformers' own SDPA attention."""
    return sdpa_attention_forward(module, *args, **kwargs)


def stock_eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The eager attention of the file that defines ``module`` (it knows the model's soft cap and sinks)."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function(module, *args, **kwargs)
    return stock_sdpa(module, *args, **kwargs)


def decoder_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the part of a model that keeps a KV cache."""
    return config.get_text_config(decoder=True)


def decoder_depth(config: PretrainedConfig) -> int | None:
    """Number of decoder layers where ``num_hidden_layers`` counts something else (Whisper: the encoder's)."""
    return getattr(config, "decoder_layers", None) or getattr(config, "num_decoder_layers", None)


def stock_layers(config: PretrainedConfig) -> list[tuple[str, Any]]:
    """The cache layers that Transformers itself would build, as (layer type, layer) pairs.

    Parameters
    ----------
    config : configuration of the model.

    Returns
    -------
    One pair per layer of the cache; layers that consume another layer's KV are "dummy" where the release knows them
    and missing at the end where it does not.
    """
    depth = decoder_depth(config)
    types, kwargs = get_layer_types_and_kwargs(decoder_config(config))
    if depth is not None and depth != len(types):
        types = [types[0]] * depth
        kwargs = [kwargs[0]] * depth if isinstance(kwargs, list) else kwargs
    per_layer = kwargs if isinstance(kwargs, list) else [kwargs] * len(types)
    missing = [t for t in types if t not in DYNAMIC_LAYER_TYPE_MAPPING]
    if missing:
        return [(t, None) for t in types]
    return [(t, DYNAMIC_LAYER_TYPE_MAPPING[t](**kw)) for t, kw in zip(types, per_layer, strict=True)]


def is_plain_attention(layer_type: str, layer: Any) -> bool:
    """Whether a stock layer keeps every token's key and value and nothing else: the only kind that is tailored."""
    return layer_type == "full_attention" and type(layer) is cache_utils.DynamicLayer


def shares_kv(config: PretrainedConfig) -> bool:
    """Whether later layers of this model attend to the keys and values of earlier ones (Gemma 3n, Gemma 4)."""
    modes = getattr(config, "kv_sharing_modes", None)
    return bool(getattr(config, "num_kv_shared_layers", 0)) or bool(modes and "reuse" in modes)


def cache_argument(call_arguments: dict[str, Any]) -> tuple[str, Any]:
    """The (name, value) of the cache among a forward call's arguments; the value is None if there is none."""
    for name in CACHE_ARGUMENTS:
        if call_arguments.get(name) is not None:
            return name, call_arguments[name]
    return "", None


def output_cache_argument(parameters: Any) -> str:
    """The name under which a forward signature takes its cache."""
    return next((name for name in CACHE_ARGUMENTS if name in parameters), CACHE_ARGUMENTS[0])


def removed_tokens(crop_argument: int) -> int:
    """How many tokens ``crop`` is asked to remove; raises ValueError for a positive argument, as Transformers does."""
    if crop_argument > 0:
        raise ValueError(
            f"crop: got {crop_argument}; from Transformers 5.16 on the argument is the number of tokens to remove, "
            "as zero or a negative number"
        )
    return -crop_argument


def supports_cache(model: Any) -> bool:
    """Whether ``generate`` would give the model a DynamicCache."""
    return bool(model._supports_default_dynamic_cache()) if hasattr(model, "_supports_default_dynamic_cache") else True


def kv_heads(config: PretrainedConfig) -> int | None:
    """KV heads of a layer as the configuration tells them, or None."""
    names = ("num_key_value_heads", "decoder_attention_heads", "num_attention_heads")
    return next((int(count) for name in names if (count := getattr(config, name, None))), None)


def head_dim(config: PretrainedConfig) -> int | None:
    """Channels of a key head as the configuration tells them, or None."""
    if getattr(config, "head_dim", None):
        return int(config.head_dim)
    if getattr(config, "d_kv", None):
        return int(config.d_kv)
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    return width // heads if heads and width else None
