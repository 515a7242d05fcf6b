"""One run of the benchmark: kernels, then whole decode steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtailor.bench.kernel import dtype_name
from kvtailor.bench.kernels import measure_kernels
from kvtailor.bench.peers import PeerRow
from kvtailor.bench.result import Bench, KernelRow, StepRow
from kvtailor.bench.steps import measure_steps
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
    plans : presets or plan files, for the steps.
    threads : numbers of threads.
    dtype : of the model, of queries and of what is not packed.
    repeats : rounds.
    compiled : whether steps are measured compiled as well.
    """

    tokens: Sequence[int] = TOKENS
    contexts: Sequence[int] = CONTEXTS
    plans: Sequence[Plan] = ()
    threads: Sequence[int] = (1,)
    dtype: torch.dtype = torch.bfloat16
    repeats: int = REPEATS
    compiled: bool = False

    @property
    def groups(self) -> int:
        """How often progress is told."""
        return len(self.threads) * (len(self.tokens) + len(self.contexts))


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
    load : gives the model, and is called where steps are asked for alone.
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
    notes: list[str] = []
    loaded = load() if request.contexts else None
    if request.tokens:
        kernels, notes = measure_kernels(request.tokens, request.threads, request.dtype, request.repeats, progress)
    if loaded is not None:
        steps, more = measure_steps(
            loaded, request.contexts, request.plans, request.threads, request.repeats, progress, request.compiled
        )
        notes += more
    return Bench(
        kernels=kernels,
        steps=steps,
        peers=list(peers),
        model="" if loaded is None else loaded.name,
        dtype=dtype_name(request.dtype),
        repeats=request.repeats,
        machine=machine,
        notes=notes,
    )
