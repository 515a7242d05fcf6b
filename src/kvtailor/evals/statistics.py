"""Means and intervals of a comparison, and paired differences on the same samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from kvtailor.evals import naming
from kvtailor.evals.candidates import FULL
from kvtailor.evals.reading import FOLLOWING
from kvtailor.evals.result import Row

RESAMPLES = 10_000
SOLVED = 0.5
"""Mean score of the full cache from which on a task tells something about other caches."""


@dataclass(frozen=True)
class Interval:
    """A mean, and where it lies with 95 % confidence."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """One plan on one task at one length.

    Attributes
    ----------
    engine, plan, budget, task, metric, tokens : as in a row.
    samples : how many.
    score : mean over samples; of a sample the mean over its questions.
    difference : from the full cache on the same samples, or None where it was not measured.
    share, share_fast, share_peak : bytes of the default cache's: held, held in fast memory, and at most; means.
    bytes_held : mean.
    token_ms, compress_seconds, read_seconds : medians.
    kl, agreement : means, or None where nothing follows.
    """

    engine: str
    plan: str
    budget: float | None
    task: str
    metric: str
    tokens: int
    samples: int
    score: Interval
    difference: Interval | None
    share: float
    share_fast: float
    share_peak: float
    bytes_held: float
    token_ms: float
    compress_seconds: float
    read_seconds: float
    kl: float | None
    agreement: float | None

    @property
    def label(self) -> str:
        """Engine (where it is not ours), plan and budget."""
        return naming.label(self.engine, self.plan, self.budget)

    @property
    def is_full(self) -> bool:
        """Whether this is the full cache."""
        return self.plan == FULL and self.engine == naming.OURS

    @property
    def is_better_low(self) -> bool:
        """Whether less is better: a loss."""
        return self.metric == FOLLOWING


def cells(rows: Iterable[Row]) -> list[Cell]:
    """The means of a comparison: by task and length, the full cache first and then by falling bytes.

    Parameters
    ----------
    rows : of one or more results.
    """
    grouped: dict[tuple[str, int, str, str, float | None], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.task, row.tokens, row.engine, row.plan, row.budget), []).append(row)
    found = []
    for (task, tokens, *_), own in grouped.items():
        full = grouped.get((task, tokens, naming.OURS, FULL, None), [])
        found.append(_cell(own, full))
    places = {place: number for number, place in enumerate(dict.fromkeys((one.task, one.tokens) for one in found))}
    return sorted(found, key=lambda one: (places[one.task, one.tokens], not one.is_full, -one.share))


def _cell(rows: Sequence[Row], full: Sequence[Row]) -> Cell:
    first, own, whole = rows[0], by_sample(rows), by_sample(full)
    paired = [own[number] - whole[number] for number in own if number in whole]
    told = [row for row in rows if row.kl is not None and row.agreement is not None]
    return Cell(
        engine=first.engine,
        plan=first.plan,
        budget=first.budget,
        task=first.task,
        metric=first.metric,
        tokens=first.tokens,
        samples=len(own),
        score=interval(list(own.values())),
        difference=interval(paired) if paired else None,
        share=fmean(row.share for row in rows),
        share_fast=fmean(row.bytes_fast / row.bytes_default for row in rows),
        share_peak=fmean(row.bytes_peak / row.bytes_default for row in rows),
        bytes_held=fmean(row.bytes_held for row in rows),
        token_ms=median(row.token_ms for row in rows),
        compress_seconds=median(row.compress_seconds for row in rows),
        read_seconds=median(row.read_seconds for row in rows),
        kl=fmean(row.kl for row in told if row.kl is not None) if told else None,
        agreement=fmean(row.agreement for row in told if row.agreement is not None) if told else None,
    )


def by_sample(rows: Iterable[Row]) -> dict[int, float]:
    """Score of each sample: the mean over its questions."""
    scores: dict[int, list[float]] = {}
    for row in rows:
        scores.setdefault(row.sample, []).append(row.score)
    return {number: fmean(own) for number, own in sorted(scores.items())}


def interval(values: Sequence[float]) -> Interval:
    """Mean of values, with the 95 % interval of the percentile bootstrap (10,000 resamples, fixed seed).

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
    """
    mean = fmean(values)
    if len(values) < 2 or min(values) == max(values):
        return Interval(mean, mean, mean)
    drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Interval(mean, float(low), float(high))


def paired_difference(ours: Sequence[Row], theirs: Sequence[Row]) -> Interval | None:
    """Mean of our score less theirs on the samples that both hold, with its interval; None if there are none.

    Parameters
    ----------
    ours, theirs : rows of one task at one length.
    """
    own, other = by_sample(ours), by_sample(theirs)
    both = [own[number] - other[number] for number in own if number in other]
    return interval(both) if both else None


def unsolved(found: Iterable[Cell]) -> list[Cell]:
    """Cells of the full cache that fail their task: other caches cannot be told apart there."""
    return [one for one in found if one.is_full and not one.is_better_low and one.score.mean < SOLVED]


def front(found: Sequence[Cell]) -> list[Cell]:
    """The cells that no other beats in both score and bytes, by rising bytes; of one task at one length.

    Parameters
    ----------
    found : cells.
    """

    def gain(one: Cell) -> float:
        return -one.score.mean if one.is_better_low else one.score.mean

    best, kept = -math.inf, []
    for one in sorted(found, key=lambda one: (one.share, -gain(one))):
        if gain(one) > best:
            best = gain(one)
            kept.append(one)
    return kept
