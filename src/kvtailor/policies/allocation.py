"""Exact division of a budget over layers or heads. Source: ours (largest remainders, water-filling)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def apportion(shares: Sequence[float], total: int) -> list[int]:
    """Round real shares to whole numbers that add up to ``total`` exactly, by largest remainders.

    Parameters
    ----------
    shares : shares whose sum is ``total`` up to rounding errors, each at least 0.
    total : what the result adds up to.
    """
    exact = np.asarray(shares, dtype=np.float64)
    whole = np.floor(exact + 1e-9).astype(int)
    missing = total - int(whole.sum())
    order = np.argsort(-(exact - whole), kind="stable")
    for place in range(abs(missing)):
        index = order[place % len(order)] if missing > 0 else order[-1 - place % len(order)]
        whole[index] += 1 if missing > 0 else -1
    return [int(n) for n in whole]


def within(counts: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Counts with what exceeds a room handed on to the largest others; the sum stays where the rooms allow."""
    fitted = [min(count, room) for count, room in zip(counts, rooms, strict=True)]
    surplus = sum(counts) - sum(fitted)
    for index in sorted(range(len(fitted)), key=lambda i: -fitted[i]):
        more = min(surplus, rooms[index] - fitted[index])
        fitted[index] += more
        surplus -= more
    return fitted


def waterfill(weights: Sequence[float], total: int, floor: int, ceiling: int) -> list[int]:
    """Divide ``total`` in proportion to weights, each share between ``floor`` and ``ceiling``, nothing lost.

    What a share above its ceiling leaves over goes to the others in proportion (AudioKV eq. 1, the surplus handed on).

    Parameters
    ----------
    weights : at least 0 each; all 0 counts as equal.
    total : tokens to hand out; clipped to ``len(weights) * ceiling``.
    floor, ceiling : least and most tokens of one share; ``len(weights) * floor`` must not exceed ``total``.

    Raises
    ------
    ValueError
        If the floors alone exceed the total.
    """
    weight = np.asarray(weights, dtype=np.float64)
    if weight.sum() <= 0:
        weight = np.ones_like(weight)
    count = len(weight)
    floor = min(floor, ceiling)
    total = min(total, count * ceiling)
    if count * floor > total:
        raise ValueError(f"a total of {total} cannot give {count} shares {floor} each")
    share = np.full(count, float(floor))
    open_ = np.ones(count, dtype=bool)
    while open_.any():
        pool = total - share[~open_].sum() - floor * open_.sum()
        base = weight[open_] if weight[open_].sum() > 0 else np.ones(int(open_.sum()))
        share[open_] = floor + pool * base / base.sum()
        over = open_ & (share > ceiling)
        if not over.any():
            break
        share[over] = ceiling
        open_ &= ~over
    return _round_within(share, total, ceiling)


def _round_within(share: np.ndarray, total: int, ceiling: int) -> list[int]:
    whole = np.minimum(np.floor(share + 1e-9), ceiling).astype(int)
    for index in np.argsort(-(share - whole), kind="stable"):
        if whole.sum() == total:
            break
        if whole[index] < ceiling:
            whole[index] += 1
    return [int(n) for n in whole]
