"""Reading a prompt: a model with Transformers' default cache, and with tailored ones."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvtailor import _compat
from kvtailor.attachment import attach
from kvtailor.bench.result import DEFAULT, PromptRow
from kvtailor.bench.steps import text_ids
from kvtailor.bench.timing import Candidate, in_turns
from kvtailor.cache import KVCache
from kvtailor.models.load import Loaded
from kvtailor.plan import Plan

Progress = Callable[[str], None]


def measure_prompts(
    loaded: Loaded,
    lengths: Sequence[int],
    plans: Sequence[Plan],
    threads: Sequence[int],
    repeats: int,
    progress: Progress,
) -> list[PromptRow]:
    """Time prompts with each cache at each length, in turns, in float32.

    Some processors are so slow at matrices of 16-bit numbers that the cache would not show beside them.

    Parameters
    ----------
    loaded : a model that reads text.
    lengths : tokens of the prompts.
    plans : the tailored caches.
    threads : numbers of threads.
    repeats : rounds.
    progress : called with a few words before each group of measurements.
    """
    model: Any = loaded.model if loaded.model.dtype == torch.float32 else copy.deepcopy(loaded.model).float()
    rows = []
    for length in sorted(lengths):
        ids = text_ids(loaded, length)
        for count in threads:
            progress(f"prompt of {length}")
            candidates = [Candidate(partial(_read, model, ids, None))]
            candidates += [Candidate(partial(_read, model, ids, plan), partial(attach, model, plan)) for plan in plans]
            timed = in_turns(candidates, repeats, count)
            for name, time in zip([DEFAULT, *(plan.name for plan in plans)], timed, strict=True):
                rows.append(PromptRow(name, length, count, time.ms, time.cpu_ms, time.fair_ms / timed[0].fair_ms))
    return rows


@torch.no_grad()
def _read(model: Any, ids: Tensor, plan: Plan | None) -> None:
    """A prompt's pass with a fresh cache."""
    cache = DynamicCache(config=_compat.decoder_config(model.config)) if plan is None else KVCache(model, plan)
    name = _compat.output_cache_argument(inspect.signature(model.forward).parameters)
    model(input_ids=ids, use_cache=True, **{name: cache})
