"""Reading far tokens ahead of the step that needs them: a guess that saves time or costs some, and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from kvtailor.layers.far import FarTokens
from kvtailor.layers.side_stream import Branch, branch
from kvtailor.report import ReadStats


@dataclass
class Staged:
    """Rows that were read ahead.

    Attributes
    ----------
    index : (S, k) int64, ascending: which tokens, for each set.
    keys, values : (S, k, D).
    """

    index: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that was made."""
        return self.index, self.keys, self.values


Guess = tuple[list[Staged | None], float]
"""What was read for each row, and the seconds that finding out and reading took; where a GPU reads, that asking for it
took."""


@dataclass
class ReadingAhead:
    """The rows that a layer's next step is thought to need, one read under way at most.

    Attributes
    ----------
    stats : what it was good for.
    """

    stats: ReadStats = field(default_factory=ReadStats)
    _pending: tuple[Future[Guess], Branch[Guess]] | None = None

    def begin(
        self,
        executor: ThreadPoolExecutor,
        guess: Callable[[], list[Staged | None]],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Let another thread find out what to read, and read it; a step before must have taken what it got.

        Parameters
        ----------
        executor : its thread.
        guess : finds out and reads.
        stream : where a GPU does so, from :func:`side_stream`.
        """
        if self._pending is None:
            work = branch(partial(_timed, guess), stream)
            self._pending = executor.submit(work.run), work

    def take(self) -> list[Staged | None]:
        """What was read for each row, once it is there; raises what the reading raised. Nothing is kept."""
        if self._pending is None:
            return []
        (pending, work), self._pending = self._pending, None
        begin = time.perf_counter()
        wait([pending])
        work.join()  # also where it failed: until then nothing that the guess reads may be let go
        staged, seconds = pending.result()
        work.hand_over(tensor for one in staged if one is not None for tensor in one.tensors)
        self.stats.waited_seconds += time.perf_counter() - begin
        self.stats.read_seconds += seconds
        return staged

    def drop(self) -> None:
        """Let go of what was read, once it is there: the tokens change that it was read from."""
        with suppress(Exception):
            self.take()

    @property
    def ready(self) -> list[Staged]:
        """What is there and not taken."""
        pending = self._pending[0] if self._pending is not None else None
        if pending is None or not pending.done() or pending.exception() is not None:
            return []
        return [one for one in pending.result()[0] if one is not None]

    def __deepcopy__(self, memo: dict[int, object]) -> ReadingAhead:
        """A copy has nothing under way."""
        return ReadingAhead()


def _timed(guess: Callable[[], list[Staged | None]]) -> Guess:
    begin = time.perf_counter()
    return guess(), time.perf_counter() - begin


def read(far: FarTokens, index: torch.Tensor) -> Staged:
    """Read rows, (S, k) ascending in each set."""
    return Staged(index, *far.gather(index))


def completed(
    far: FarTokens, index: torch.Tensor, staged: Staged | None, stats: ReadStats
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows at ``index`` (S, k), taken from what was read ahead where they are there, and else read now."""
    stats.wanted += index.numel()
    if staged is None or staged.index.shape[0] != index.shape[0]:
        begin = time.perf_counter()
        found = read(far, index)
        stats.missed_seconds += time.perf_counter() - begin
        return found.keys, found.values
    place = torch.searchsorted(staged.index, index).clamp_(max=staged.index.shape[1] - 1)  # (S, k)
    there = staged.index.gather(1, place) == index
    sets = torch.arange(index.shape[0], device=index.device)[:, None].expand_as(index)
    keys, values = staged.keys[sets, place], staged.values[sets, place]
    stats.hit += int(there.sum())
    missing = ~there
    if bool(missing.any()):
        begin = time.perf_counter()
        keys[missing], values[missing] = far.rows(sets[missing] * far.heads // index.shape[0], index[missing])
        stats.missed_seconds += time.perf_counter() - begin
    return keys, values
