"""The best choice for every layer from a table of measurements: exact, by dynamic programming over Pareto fronts.

Source: the multiple-choice knapsack problem (Kellerer, Pferschy, Pisinger, Knapsack Problems, chapter 11), with
partial choices dropped that a Lagrangian bound shows to be hopeless.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Table = Sequence[Sequence[float]]

ROUNDING = 1e-13
"""Share by which sums of the same numbers in different order may differ: some hundred terms."""


def choose(costs: Table, weights: Table, limit: float) -> list[int] | None:
    """Choose one option for every layer: the least cost in all whose weights add up to no more than ``limit``.

    Parameters
    ----------
    costs : of every layer's options, 0 or more; an option whose cost or weight is not finite is never chosen.
    weights : of the same, 0 or more.
    limit : most weight in all, summed from the first layer on.

    Returns
    -------
    Places of the options chosen, one for each layer; None if even the lightest weigh more, or a layer has no option.
    """
    every = [
        (np.asarray(c, dtype=np.float64), np.asarray(w, dtype=np.float64)) for c, w in zip(costs, weights, strict=True)
    ]
    usable = [np.flatnonzero(np.isfinite(c) & np.isfinite(w)) for c, w in every]
    if not all(len(places) for places in usable):
        return None
    chosen = _chosen(
        [c[places] for (c, _), places in zip(every, usable, strict=True)],
        [w[places] for (_, w), places in zip(every, usable, strict=True)],
        limit,
    )
    return None if chosen is None else [int(places[one]) for places, one in zip(usable, chosen, strict=True)]


def _chosen(cost: list[np.ndarray], weight: list[np.ndarray], limit: float) -> list[int] | None:
    """The same for finite costs and weights."""
    if not sum(row.min() for row in weight) <= limit:
        return None
    limit = min(limit, float(sum(row.max() for row in weight)))
    rate, incumbent = _relax(cost, weight, limit)
    slack = 1e-9 * (incumbent + rate * limit)  # of rounding
    # Of the layers to come: the least weight, and the least of cost and priced weight together.
    lightest = _from_end([row.min() for row in weight])
    cheapest = _from_end([(c + rate * w).min() for c, w in zip(cost, weight, strict=True)])
    front_cost, front_weight = np.zeros(1), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []  # per layer: where a partial choice came from, and its option
    for layer, (c, w) in enumerate(zip(cost, weight, strict=True)):
        total = (front_weight[:, None] + w).ravel()
        spent = (front_cost[:, None] + c).ravel()
        bound = spent + cheapest[layer + 1] - rate * (limit - total)
        # Sums from both ends round otherwise than those from the first layer on, which are what must fit in the end.
        room = limit * (1 + ROUNDING) if layer + 1 < len(cost) else limit
        hopeful = (total + lightest[layer + 1] <= room) & (bound <= incumbent + slack)
        kept = _undominated(spent, total, np.flatnonzero(hopeful))
        front_cost, front_weight = spent[kept], total[kept]
        steps.append(np.divmod(kept, len(c)))
    place = int(front_cost.argmin())
    chosen = []
    for before, option in reversed(steps):
        chosen.append(int(option[place]))
        place = int(before[place])
    return chosen[::-1]


def _relax(cost: list[np.ndarray], weight: list[np.ndarray], limit: float) -> tuple[float, float]:
    """A price of weight near the best one, and the least cost among the allowed choices met on the way to it."""
    low, high = 0.0, 1e-12

    def priced(rate: float) -> tuple[float, float]:
        spent = total = 0.0
        for c, w in zip(cost, weight, strict=True):
            ranked = np.lexsort((w, c + rate * w))[0]
            spent, total = spent + c[ranked], total + w[ranked]
        return spent, total

    lightest = sum(float(c[np.lexsort((c, w))[0]]) for c, w in zip(cost, weight, strict=True))
    incumbent, total = priced(0.0)
    if total <= limit:
        return 0.0, incumbent
    incumbent = lightest
    while priced(high)[1] > limit and high < 1e300:
        low, high = high, high * 8
    for _ in range(64):
        middle = (low + high) / 2
        spent, total = priced(middle)
        if total <= limit:
            high, incumbent = middle, min(incumbent, spent)
        else:
            low = middle
    return high, incumbent


def _from_end(values: list[float]) -> np.ndarray:
    """Sums of each layer's value and those after it, and 0 behind the last."""
    return np.concatenate([np.cumsum(values[::-1])[::-1], [0.0]])


def _undominated(cost: np.ndarray, weight: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Of some places those that no other beats in both cost and weight, by rising weight."""
    ranked = places[np.lexsort((cost[places], weight[places]))]
    spent = cost[ranked]
    best_before = np.minimum.accumulate(np.concatenate([[np.inf], spent[:-1]]))
    return ranked[spent < best_before]
