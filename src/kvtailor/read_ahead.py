"""While a layer attends, the next one reads the far tokens that it is thought to need."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from kvtailor.attention import attention_modules
from kvtailor.cache import KVCache
from kvtailor.layers.base import TailoredLayer
from kvtailor.layers.side_stream import side_stream
from kvtailor.prediction import query_of


class ReadAhead:
    """Hooks on a decoder's attention modules, and the thread that reads, on a GPU in a stream of its own.

    There are none on decoders with cross attention, and none that ask a module whose weights Accelerate brings in for
    each call: two threads would bring them in and take them away.

    Parameters
    ----------
    decoder : the decoder.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvtailor-read")
        self._streams: dict[torch.device, torch.cuda.Stream | None] = {}
        self._decoder = decoder
        config: Any = decoder.config
        modules = {} if config.is_encoder_decoder else attention_modules(decoder)
        self._hooks = [
            modules[here].register_forward_pre_hook(partial(self._begin, here, there, modules[there]), with_kwargs=True)
            for here, there in pairwise(sorted(modules))
            if not _is_offloaded(modules[there])
        ]

    def _begin(
        self,
        here: int,
        there: int,
        following: nn.Module,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Before an attention module runs: its input tells what the following one will look for."""
        caches = [(name, value) for name, value in kwargs.items() if isinstance(value, KVCache)]
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if len(caches) != 1:
            return
        ((name, cache),) = caches
        if not cache.step.active or cache.step.prompt:
            return
        if not isinstance(hidden, torch.Tensor) or hidden.shape[1] != 1:
            return
        layer = cache.layers[there]
        if not isinstance(layer, TailoredLayer) or layer.reads is None or not layer.is_initialized:
            return
        if layer.device == hidden.device:  # a stream waits for the work of its own device alone
            rotation = self._rotation(here, there, hidden, kwargs)
            if rotation is not None:
                asked = {**kwargs, **rotation, name: None, "attention_mask": None}
                layer.read_ahead(self._executor, partial(query_of, following, args, asked), self._stream(hidden.device))

    def _rotation(
        self, here: int, there: int, hidden: torch.Tensor, kwargs: dict[str, Any]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]] | None:
        """What replaces the rotation of one layer for another: nothing where all share one, None if it is not known."""
        types, rotary = getattr(self._decoder.config, "layer_types", None), getattr(self._decoder, "rotary_emb", None)
        if types is None or rotary is None or types[here] == types[there]:
            return {}
        if "layer_type" not in inspect.signature(rotary.forward).parameters:
            return {}
        if kwargs.get("position_embeddings") is None or kwargs.get("position_ids") is None:
            return None
        return {"position_embeddings": rotary(hidden, kwargs["position_ids"], layer_type=types[there])}

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device not in self._streams:
            self._streams[device] = side_stream(device)
        return self._streams[device]

    def close(self) -> None:
        """Take the hooks off, and end the thread once it has read what it was asked to."""
        for hook in self._hooks:
            hook.remove()
        self._executor.shutdown()


def _is_offloaded(module: nn.Module) -> bool:
    """Whether Accelerate brings weights of the module in for each call."""
    hooks = [hook for part in module.modules() if (hook := getattr(part, "_hf_hook", None)) is not None]
    return any(getattr(one, "offload", False) for hook in hooks for one in (hook, *getattr(hook, "hooks", ())))
