"""Timing in turns: every candidate once in each round, so that what disturbs a machine disturbs them all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True)
class Candidate:
    """Something that is timed.

    Attributes
    ----------
    call : what is timed.
    around : makes what surrounds each call and is not timed.
    """

    call: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Timed:
    """Medians of one candidate.

    Attributes
    ----------
    ms : wall time, milliseconds.
    cpu_ms : processor time, milliseconds: of the calling thread at one thread, of the process at more.
    threads : threads of torch and of the kernels.
    """

    ms: float
    cpu_ms: float
    threads: int

    @property
    def fair_ms(self) -> float:
        """What ratios are made of: processor time at one thread, which waiting does not touch; wall time at more."""
        return self.cpu_ms if self.threads == 1 else self.ms

    def speedup(self, base: Timed | None) -> float | None:
        """How many times faster than ``base``; None without one."""
        return base.fair_ms / self.fair_ms if base is not None and self.fair_ms else None


def in_turns(
    candidates: Sequence[Candidate], repeats: int, threads: int, before: Callable[[], Any] = lambda: None
) -> list[Timed]:
    """Time all candidates round after round, and give the medians of each.

    A round before the first warms up and is not counted.

    Parameters
    ----------
    candidates : what is timed, in this order in each round.
    repeats : rounds that count, 1 or more.
    threads : threads of torch and of the kernels.
    before : called before each candidate and not timed.
    """
    clock = time.thread_time if threads == 1 else time.process_time
    taken: list[list[tuple[float, float]]] = [[] for _ in candidates]
    with _torch_threads(threads):
        for _ in range(1 + repeats):
            for candidate, times in zip(candidates, taken, strict=True):
                before()
                times.append(_once(candidate, clock))
    return [
        Timed(1000 * median(wall for wall, _ in times[1:]), 1000 * median(cpu for _, cpu in times[1:]), threads)
        for times in taken
    ]


def _once(candidate: Candidate, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of wall and of processor time that a call takes."""
    with candidate.around():
        wall, cpu = time.perf_counter(), clock()
        candidate.call()
        return time.perf_counter() - wall, clock() - cpu


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
