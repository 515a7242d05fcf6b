"""Putting a plan on a model, and taking it off again."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from kvtailor import _compat, attention, prefill
from kvtailor.cache import EncoderDecoderKVCache, KVCache
from kvtailor.compiled import CompiledStep
from kvtailor.errors import ModelError, PlanError
from kvtailor.plan import Plan
from kvtailor.read_ahead import ReadAhead
from kvtailor.served import check_served

_MARK = "_kvtailor_attachment"


class Attachment:
    """A plan on a model. Leaving its ``with`` block, or :meth:`detach`, restores the model exactly.

    While it lasts, the decoder's modules look at copies of their configurations that name our attention function, the
    decoder's ``forward`` feeds prompts in chunks, and ``generate`` makes a fresh cache for each call.

    Parameters
    ----------
    model : the model.
    plan : the plan.
    compile : whether decode steps of one token run as a compiled graph.
    """

    def __init__(self, model: PreTrainedModel, plan: Plan, compile: bool = False) -> None:
        self.model, self.plan, self._compile = model, plan, compile
        self.decoder: nn.Module = model.get_decoder()
        self._configs: list[tuple[nn.Module, PretrainedConfig]] = []
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        self._reading: ReadAhead | None = None
        attention.register()
        try:
            self._switch_attention()
            self._replace(self.decoder, "forward", self._forward())
            if not compile and any(entry.reads_ahead for entry in plan.layers):
                self._reading = ReadAhead(self.decoder)
            if hasattr(model, "_prepare_cache_for_generation"):  # base models do not generate
                self._replace(model, "_prepare_cache_for_generation", self._prepare_cache())
            for name in _compat.CONTINUOUS_BATCHING:
                if hasattr(model, name):
                    self._replace(model, name, _refuse_continuous_batching)
            if hasattr(model, "_postprocess_outputs"):
                self._replace(model, "_postprocess_outputs", self._postprocess())
            model.__dict__[_MARK] = self
        except BaseException:
            self.detach()
            raise

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def detach(self) -> None:
        """Restore the model; a second call does nothing."""
        for module, config in self._configs:
            module.__dict__["config"] = config
        for module, name, before in reversed(self._replaced):
            if before is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = before
        self._configs, self._replaced = [], []
        if self._reading is not None:
            self._reading.close()
            self._reading = None
        self.model.__dict__.pop(_MARK, None)

    def new_cache(self) -> KVCache | EncoderDecoderKVCache:
        """A fresh cache for the model, as ``generate`` gets one."""
        return KVCache(self.model, self.plan)

    def _switch_attention(self) -> None:
        copies: dict[int, PretrainedConfig] = {}
        supports_sdpa = bool(getattr(self.decoder, "_supports_sdpa", True))
        for module in self.decoder.modules():
            config = module.__dict__.get("config")
            if not isinstance(config, PretrainedConfig):
                continue
            if id(config) not in copies:
                own = copy.copy(config)
                own._attn_implementation_internal = attention.name_over(config._attn_implementation, supports_sdpa)
                copies[id(config)] = own
            self._configs.append((module, config))
            module.__dict__["config"] = copies[id(config)]

    def _replace(self, module: nn.Module, name: str, function: Any) -> None:
        self._replaced.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = function

    def _forward(self) -> Any:
        forward = self.decoder.forward
        parameters = inspect.signature(forward).parameters
        names = list(parameters)
        step = self._compiled_step(forward) if self._compile else None

        @functools.wraps(forward)
        def tailored_forward(*args: Any, **arguments: Any) -> Any:
            arguments.update(zip(names, args, strict=False))
            _, cache = _compat.cache_argument(arguments)
            if cache is None and self._wants_cache(arguments):
                cache = self.new_cache()
                arguments = {k: v for k, v in arguments.items() if k not in _compat.CACHE_ARGUMENTS}
                arguments[_compat.output_cache_argument(parameters)] = cache
            if not isinstance(cache, KVCache | EncoderDecoderKVCache):
                return forward(**arguments)
            cache.check_owner(self.decoder)
            if isinstance(cache, EncoderDecoderKVCache):
                cache.check_encoded(arguments.get("encoder_hidden_states"))
            if step is not None and isinstance(cache, KVCache) and step.serves(arguments):
                return step(arguments, cache)
            return prefill.run(forward, arguments, cache)

        return tailored_forward

    def _compiled_step(self, forward: Any) -> CompiledStep:
        step = CompiledStep(self.decoder, forward, attention.stock_of(self._configs[0][0]))
        step.check(self.new_cache())
        return step

    def _wants_cache(self, arguments: dict[str, Any]) -> bool:
        use = arguments.get("use_cache")
        return not self.decoder.training and bool(
            getattr(self.decoder.config, "use_cache", False) if use is None else use
        )

    def _prepare_cache(self) -> Any:
        stock: Callable[..., Any] = self.model._prepare_cache_for_generation  # type: ignore[assignment]

        @functools.wraps(stock)
        def prepare(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            _, given = _compat.cache_argument(model_kwargs)
            if given is not None or generation_config.use_cache is False:
                return stock(generation_config, model_kwargs, *args, **kwargs)
            if generation_config.cache_implementation is not None:
                raise PlanError(
                    f"generate was asked for cache_implementation {generation_config.cache_implementation!r} "
                    f"while plan {self.plan.name!r} is attached: allowed is one of the two"
                )
            cache = self.new_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs[_compat.GENERATE_CACHE_NAME] = cache
            return None

        return prepare

    def _postprocess(self) -> Any:
        # Whisper cuts the cache that it returns into one plain cache per recording; a tailored one is no such thing.
        stock: Callable[..., Any] = self.model._postprocess_outputs  # type: ignore[assignment]

        @functools.wraps(stock)
        def postprocess(seek_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            name, cache = _compat.cache_argument(seek_outputs) if isinstance(seek_outputs, dict) else ("", None)
            if isinstance(cache, EncoderDecoderKVCache):
                seek_outputs = type(seek_outputs)(**{key: value for key, value in seek_outputs.items() if key != name})
            return stock(seek_outputs, *args, **kwargs)

        return postprocess


def _refuse_continuous_batching(*args: Any, **kwargs: Any) -> Any:
    raise ModelError(
        "continuous batching keeps its own paged cache, which a plan cannot tailor: detach the plan, or use generate"
    )


def attach(model: PreTrainedModel, plan: Plan | str | Path, *, compile: bool = False) -> Attachment:
    """Run a model with a tailored KV cache, inside a ``with`` block or until :func:`detach`.

    Parameters
    ----------
    model : a Transformers model that keeps a KV cache.
    plan : a :class:`Plan`, a preset's name such as ``"int4"`` or ``"snapkv:512"``, or the path of a plan file.
    compile : whether decode steps of one token run as a graph that ``torch.compile`` makes at the first of them, which
        takes up to a minute; steps with padding, several tokens or gradients run as without it.

    Raises
    ------
    ModelError
        If the model's cache cannot be tailored, or it carries a plan already.
    PlanError
        If the plan is wrong or cannot be used with the model.
    """
    plan = Plan.of(plan)
    check_served(model)
    if _MARK in model.__dict__:
        raise ModelError(
            f"{type(model).__name__} carries plan {model.__dict__[_MARK].plan.name!r} already: detach it first"
        )
    _warn_if_idle(KVCache(model, plan), plan, model)
    return Attachment(model, plan, compile)


def detach(model: PreTrainedModel) -> None:
    """Take the plan off a model; raises ModelError if it carries none."""
    attachment = model.__dict__.get(_MARK)
    if attachment is None:
        raise ModelError(f"{type(model).__name__} carries no plan")
    attachment.detach()


def _warn_if_idle(cache: KVCache | EncoderDecoderKVCache, plan: Plan, model: PreTrainedModel) -> None:
    halves = [cache] if isinstance(cache, KVCache) else [cache.self_attention_cache, cache.cross_attention_cache]
    layers = [layer for half in halves for layer in half.tailored()]
    if plan.layers and all(layer.plan.is_full for layer in layers):
        warnings.warn(f"plan {plan.name!r} changes no layer of {type(model).__name__}", stacklevel=3)
