"""Whole decode steps of a model: Transformers' own caches and tailored ones, filled to a length without its prompt."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import QuantizedCache

from kvtailor import _compat
from kvtailor.attachment import attach
from kvtailor.bench.result import DEFAULT, StepRow
from kvtailor.bench.timing import Candidate, Timed, in_turns
from kvtailor.cache import KVCache
from kvtailor.errors import KVTailorError
from kvtailor.estimate import length_limit
from kvtailor.layers.base import TailoredLayer
from kvtailor.layers.full import FullLayer
from kvtailor.layers.rows import RowsLayer
from kvtailor.models.load import Loaded
from kvtailor.models.text import paragraphs
from kvtailor.plan import Plan

# name -> (package, options of QuantizedCache); the axes are those that Transformers' documentation advises.
QUANTIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "hqq 4-bit": ("hqq", {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1}),
    "quanto 4-bit": ("optimum-quanto", {"backend": "quanto", "nbits": 4}),
}

TEXT_TOKENS = 256
"""Tokens of text whose keys and values fill the caches, over and over: on random ones a model enlarges all rounding."""

Progress = Callable[[str], None]
Prompt = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, (1, Hkv, n, D)."""


@dataclass(frozen=True)
class Held:
    """A filled cache.

    Attributes
    ----------
    name : of the plan, or of Transformers' cache.
    cache, model : the cache, and the model that steps with it.
    around : what the model needs for a step with it.
    agrees : as in a :class:`StepRow`.
    """

    name: str
    cache: Any
    model: Any
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    agrees: float | None = None


def measure_steps(
    loaded: Loaded,
    contexts: Sequence[int],
    plans: Sequence[Plan],
    threads: Sequence[int],
    repeats: int,
    progress: Progress,
    compiled: bool = False,
) -> tuple[list[StepRow], list[str]]:
    """Time decode steps with each cache at each length, in turns.

    Parameters
    ----------
    loaded : a model that reads text.
    contexts : tokens held before the first step; each step adds one.
    plans : the tailored caches.
    threads : numbers of threads.
    repeats : rounds.
    progress : called with a few words before each group of measurements.
    compiled : whether each plan is measured with compiled steps as well.

    Returns
    -------
    The rows, and a line for each cache that could not be measured.

    Raises
    ------
    KVTailorError
        If the model has layers that cannot be filled.
    """
    stepper = Stepper(loaded, compiled)
    rows: list[StepRow] = []
    notes: dict[str, None] = {}
    shortest: dict[tuple[str, int], tuple[int, Timed]] = {}
    for context in sorted(contexts):
        held, problems = stepper.fill(context, plans)
        notes |= dict.fromkeys(problems)
        for count in threads:
            progress(f"{context} held")
            timed = in_turns([stepper.candidate(one) for one in held], repeats, count)
            for one, time in zip(held, timed, strict=True):
                least, first = shortest.setdefault((one.name, count), (context, time))
                added = 1000 * (time.fair_ms - first.fair_ms) / (context - least) if context > least else None
                rows.append(
                    StepRow(
                        plan=one.name,
                        context=context,
                        threads=count,
                        ms=time.ms,
                        cpu_ms=time.cpu_ms,
                        speedup=time.speedup(timed[0]),
                        added_ms_per_1k=added,
                        agrees=one.agrees,
                    )
                )
    return rows, list(notes)


def check_positions(loaded: Loaded, option: str, tokens: int, steps: int = 0) -> None:
    """Raise KVTailorError if a model has no positions for ``tokens``, as ``option`` asks, and ``steps`` more."""
    limit = length_limit(loaded.model.config)
    if limit is not None and tokens + steps > limit:
        behind = f" and {steps} steps are" if steps else " is"
        raise KVTailorError(
            f"{option} {tokens}{behind} beyond the {limit} positions of model {loaded.name!r}: "
            f"allowed are 1 to {limit - steps}"
        )


class Stepper:
    """Fills caches and runs steps of one model.

    Parameters
    ----------
    loaded : the model.
    compiled : whether steps run compiled as well.
    """

    def __init__(self, loaded: Loaded, compiled: bool = False) -> None:
        self.name, self.model = loaded.name, loaded.model
        self.config = _compat.decoder_config(self.model.config)
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_argument = _compat.output_cache_argument(parameters)
        self.ids = text_ids(loaded, min(TEXT_TOKENS, length_limit(loaded.model.config) or TEXT_TOKENS))
        self.token = self.ids[:, -1:]
        self.text = self._keys_and_values(self.ids)
        # A model of its own, whose plan stays on: one graph serves the caches of all plans.
        self.compiled = copy.deepcopy(self.model) if compiled else None
        if self.compiled is not None:
            attach(self.compiled, "full", compile=True)

    def fill(self, context: int, plans: Sequence[Plan]) -> tuple[list[Held], list[str]]:
        """All caches with the same keys and values, the default one first; and a line for each that cannot be had."""
        prompt = self._prompt(context)
        held, problems = [Held(DEFAULT, self._stock(DynamicCache(config=self.config), prompt), self.model)], []
        for name, (package, options) in QUANTIZED.items():
            try:
                cache = self._stock(QuantizedCache(config=self.config, **options), prompt)
                self.step(self.model, cache)
                held.append(Held(name, cache, self.model))
            except ImportError:
                problems.append(f"QuantizedCache {name} is not measured: package {package} cannot be imported")
            except Exception as error:  # a package that does not fit this release may fail in any way
                problems.append(f"QuantizedCache {name} is not measured: it fails with {_in_a_line(error)}")
        for plan in plans:
            tailored = self._tailored(self.model, plan, prompt)
            around = partial(attach, self.model, plan)
            held.append(Held(plan.name, tailored, self.model, around, self._disagreement(plan, tailored)))
            if self.compiled is not None:
                cache = self._tailored(self.compiled, plan, prompt)
                held.append(Held(f"{plan.name} compiled", cache, self.compiled))
        return held, problems

    def candidate(self, held: Held) -> Candidate:
        """A step with a cache, to be timed."""
        return Candidate(lambda: self.step(held.model, held.cache), held.around)

    @torch.no_grad()
    def step(self, model: Any, cache: Any) -> Tensor:
        """Logits (vocabulary,) behind one more token, which the cache takes in."""
        output = model(input_ids=self.token, use_cache=True, **{self.cache_argument: cache})
        logits: Tensor = output.logits[0, -1]
        return logits

    @torch.no_grad()
    def _keys_and_values(self, ids: Tensor) -> Prompt:
        """Those of a text, computed in float32: some processors are very slow at a prompt in 16 bits."""
        dtype = self.model.dtype
        model = self.model if dtype == torch.float32 else copy.deepcopy(self.model).float()
        cache = DynamicCache(config=self.config)
        model(input_ids=ids, use_cache=True, **{self.cache_argument: cache})
        pairs = []
        for number, layer in enumerate(cache.layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.dim() != 4:
                raise KVTailorError(
                    f"layer {number} of model {self.name!r} keeps no keys and values: allowed are models of attention"
                )
            pairs.append((keys.to(dtype), values.to(dtype)))
        return pairs

    def _prompt(self, context: int) -> Prompt:
        def repeated(part: Tensor) -> Tensor:
            return part.repeat(1, 1, -(-context // part.shape[2]), 1)[:, :, :context]

        return [(repeated(keys), repeated(values)) for keys, values in self.text]

    def _stock(self, cache: Any, prompt: Prompt) -> Any:
        for number, (keys, values) in enumerate(prompt):
            cache.update(keys, values, number)
        return cache

    @torch.no_grad()
    def _tailored(self, model: Any, plan: Plan, prompt: Prompt) -> KVCache:
        """A cache that was given the prompt's keys and values, in the chunks that the plan asks for."""
        cache = KVCache(model, plan)
        context = prompt[0][0].shape[2]
        source = torch.Generator().manual_seed(context)
        dim = prompt[0][0].shape[3]
        queries = torch.randn(1, self.config.num_attention_heads, context, dim, generator=source)
        queries = queries.to(self.model.device, self.model.dtype)
        cache.expect(context)
        start = 0
        while start < context:
            stop = min(context, start + cache.chunk(context, 1))
            with cache.serving(prompt=True, last=stop == context):
                for number, (keys, values) in enumerate(prompt):
                    cache.update(keys[:, :, start:stop], values[:, :, start:stop], number)
                    layer = cache.layers[number]
                    if isinstance(layer, TailoredLayer):
                        layer.attend(nn.Module(), queries[:, :, start:stop], None, _no_attention)
            start = stop
        return cache

    def _disagreement(self, plan: Plan, cache: KVCache) -> float:
        """Distance of a step's logits from those of exact attention over the same stored numbers, as a share."""
        exact = copy.deepcopy(cache)
        for layer in exact.tailored():
            if isinstance(layer, FullLayer | RowsLayer):
                layer.path = None  # the reference attends, in float32
        with attach(self.model, plan):
            found, wanted = (self.step(self.model, one).double() for one in (cache, exact))
        return float((found - wanted).norm() / wanted.norm())


def text_ids(loaded: Loaded, count: int) -> Tensor:
    """``count`` tokens of a text, (1, count)."""
    text = "\n\n".join(islice(paragraphs(), max(1, count // 8)))
    ids: Tensor = loaded.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return ids.repeat(1, -(-count // ids.shape[1]))[:, :count].to(loaded.model.device)


def _no_attention(module: nn.Module, query: Tensor, *rest: Any, **given: Any) -> tuple[Tensor, None]:
    """In place of a prompt's attention, whose output nobody reads."""
    return query, None


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(". ")
