"""What an index keeps of its tokens, in few tensors that never change: appending copies each token rarely."""

from __future__ import annotations

import torch

AXIS = 2
"""The axis of tokens, or of pages of them."""


def length_of(stretches: list[torch.Tensor]) -> int:
    """Entries of all stretches."""
    return sum(stretch.shape[AXIS] for stretch in stretches)


def add(stretches: list[torch.Tensor], newest: torch.Tensor) -> None:
    """Append a stretch, and join the newest ones while they are of like size."""
    stretches.append(newest)
    while len(stretches) > 1 and stretches[-2].shape[AXIS] <= stretches[-1].shape[AXIS]:
        stretches[-2:] = [torch.cat(stretches[-2:], dim=AXIS)]


def first(stretches: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """The first ``count`` entries; a stretch that is cut is copied, so that the rest is let go."""
    kept = []
    for stretch in stretches:
        own = min(stretch.shape[AXIS], count)
        if own:
            kept.append(stretch if own == stretch.shape[AXIS] else stretch.narrow(AXIS, 0, own).clone())
        count -= own
    return kept
