"""Reading far tokens ahead of the step that needs them: a guess that saves time or costs some, and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

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
    seconds : time that reading took; where a GPU reads, that asking for it took.
    """

    index: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    seconds: float

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that was made."""
        return self.index, self.keys, self.values


@dataclass
class ReadingAhead:
    """The rows that a layer's next step is thought to need, one read under way at most.

    Attributes
    ----------
    stats : what it was good for.
    """

    stats: ReadStats = field(default_factory=ReadStats)
    _pending: tuple[Future[list[Staged | None]], Branch[list[Staged | None]]] | None = None

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
            work = branch(guess, stream)
            self._pending = executor.submit(work.run), work

    def take(self) -> list[Staged | None]:
        """What was read for each row, once it is there; raises what the reading raised. Nothing is kept."""
        if self._pending is None:
            return []
        (pending, work), self._pending = self._pending, None
        begin = time.perf_counter()
        wait([pending])
        work.join()  # also where it failed: until then nothing that the guess reads may be let go
        staged = pending.result()
        work.hand_over(tensor for one in staged if one is not None for tensor in one.tensors)
        self.stats.waited_seconds += time.perf_counter() - begin
        self.stats.read_seconds += sum(one.seconds for one in staged if one is not None)
        return staged

    def __deepcopy__(self, memo: dict[int, object]) -> ReadingAhead:
        """A copy has nothing under way."""
        return ReadingAhead()


def read(far: FarTokens, index: torch.Tensor) -> Staged:
    """Read rows, (S, k) ascending in each set."""
    begin = time.perf_counter()
    keys, values = far.gather(index)
    return Staged(index, keys, values, time.perf_counter() - begin)


def completed(
    far: FarTokens, index: torch.Tensor, staged: Staged | None, stats: ReadStats
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows at ``index`` (S, k), taken from what was read ahead where they are there, and else read now."""
    stats.wanted += index.numel()
    if staged is None or staged.index.shape[0] != index.shape[0]:
        found = read(far, index)
        stats.missed_seconds += found.seconds
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
