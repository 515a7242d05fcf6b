"""One run of the benchmark: kernels, then whole decode steps, then prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtailor.bench.kernel import dtype_name
from kvtailor.bench.kernels import measure_kernels
from kvtailor.bench.peers import PeerRow
from kvtailor.bench.prompts import measure_prompts
from kvtailor.bench.result import Bench, KernelRow, PromptRow, StepRow
from kvtailor.bench.steps import check_positions, measure_steps
from kvtailor.models.load import Loaded
from kvtailor.plan import Plan

TOKENS = (8192, 32768)
CONTEXTS = (16, 1024, 8000)
PLANS = ("full", "int8", "int4", "int2", "int1", "snapkv:1024")
REPEATS = 11

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes
    ----------
    tokens : lengths of the caches of kernels; none for no kernels.
    contexts : lengths of the caches of decode steps; none for no steps.
    prompts : lengths of prompts that are read; none by default.
    plans : presets or plan files, for steps and prompts.
    threads : numbers of threads.
    dtype : of the model, of queries and of what is not packed.
    repeats : rounds.
    compiled : whether steps are measured compiled as well.
    """

    tokens: Sequence[int] = TOKENS
    contexts: Sequence[int] = CONTEXTS
    prompts: Sequence[int] = ()
    plans: Sequence[Plan] = ()
    threads: Sequence[int] = (1,)
    dtype: torch.dtype = torch.bfloat16
    repeats: int = REPEATS
    compiled: bool = False

    @property
    def groups(self) -> int:
        """How often progress is told."""
        return len(self.threads) * (len(self.tokens) + len(self.contexts) + len(self.prompts))


def run(
    request: Request,
    load: Callable[[], Loaded],
    machine: dict[str, Any],
    peers: Sequence[PeerRow] = (),
    progress: Progress = lambda words: None,
) -> Bench:
    """Measure what was asked for.

    Parameters
    ----------
    request : what to measure.
    load : gives the model, and is called where steps or prompts are asked for alone.
    machine : what it runs on, as plain data.
    peers : rows of other engines.
    progress : called with a few words before each group of measurements.

    Raises
    ------
    KVTailorError
        If the model or a plan cannot be used.
    """
    kernels: list[KernelRow] = []
    steps: list[StepRow] = []
    prompts: list[PromptRow] = []
    notes: list[str] = []
    loaded = load() if request.contexts or request.prompts else None
    if loaded is not None:
        _check_positions(request, loaded)
    if request.tokens:
        kernels, notes = measure_kernels(request.tokens, request.threads, request.dtype, request.repeats, progress)
    if loaded is not None and request.contexts:
        steps, more = measure_steps(
            loaded, request.contexts, request.plans, request.threads, request.repeats, progress, request.compiled
        )
        notes += more
    if loaded is not None and request.prompts:
        prompts = measure_prompts(loaded, request.prompts, request.plans, request.threads, request.repeats, progress)
    return Bench(
        kernels=kernels,
        steps=steps,
        prompts=prompts,
        peers=list(peers),
        model="" if loaded is None else loaded.name,
        dtype=dtype_name(request.dtype),
        repeats=request.repeats,
        machine=machine,
        notes=notes,
    )


def _check_positions(request: Request, loaded: Loaded) -> None:
    if request.contexts:
        steps = 1 + len(request.threads) * (1 + request.repeats)
        check_positions(loaded, "--context", max(request.contexts), steps)
    if request.prompts:
        check_positions(loaded, "--prompt", max(request.prompts))
