"""While a layer attends, the next one reads the far tokens that it is thought to need."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from kvtailor.attention import attention_modules
from kvtailor.cache import KVCache
from kvtailor.layers.retrieving import RetrievingLayer
from kvtailor.layers.side_stream import side_stream
from kvtailor.prediction import query_of


class ReadAhead:
    """Hooks on a decoder's attention modules, and the thread that reads, on a GPU in a stream of its own.

    Parameters
    ----------
    decoder : the decoder.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvtailor-read")
        self._streams: dict[torch.device, torch.cuda.Stream | None] = {}
        modules = attention_modules(decoder)
        self._hooks = [
            modules[here].register_forward_pre_hook(partial(self._begin, there, modules[there]), with_kwargs=True)
            for here, there in pairwise(sorted(modules))
        ]

    def _begin(
        self, index: int, following: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
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
        layer = cache.layers[index]
        # A stream waits for the work of its own device alone.
        if isinstance(layer, RetrievingLayer) and layer.is_initialized and layer.device == hidden.device:
            asked = {**kwargs, name: None, "attention_mask": None}
            layer.read_ahead(self._executor, partial(query_of, following, args, asked), self._stream(hidden.device))

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device not in self._streams:
            self._streams[device] = side_stream(device)
        return self._streams[device]

    def close(self) -> None:
        """Take the hooks off, and end the thread once it has read what it was asked to."""
        for hook in self._hooks:
            hook.remove()
        self._executor.shutdown()
