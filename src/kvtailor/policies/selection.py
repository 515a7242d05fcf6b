"""From importance to the tokens that stay: protected tokens first, then the most important, in order of position."""

from __future__ import annotations

import torch


def protect(importance: torch.Tensor, lengths: list[int], sinks: int, recent: int) -> torch.Tensor:
    """Importance with protected tokens at +inf and the padding of short heads at -inf.

    Parameters
    ----------
    importance : (Hkv, n).
    lengths : tokens held per KV head.
    sinks, recent : how many of the first and of the newest tokens are protected.
    """
    scores = importance.float().clone()
    place = torch.arange(scores.shape[-1], device=scores.device)[None, :]
    length = torch.tensor(lengths, device=scores.device)[:, None]
    scores = torch.where((place < sinks) | (place >= length - recent), torch.inf, scores)
    return torch.where(place >= length, -torch.inf, scores)


def strongest(scores: torch.Tensor, lengths: list[int], capacities: list[int]) -> list[torch.Tensor]:
    """Indices of the tokens to keep, ascending, one tensor per KV head.

    Parameters
    ----------
    scores : (Hkv, n) from :func:`protect`.
    lengths : tokens held per KV head.
    capacities : tokens to keep per KV head; among equal scores the newer token stays.
    """
    if all(n == scores.shape[-1] == capacity + 1 for n, capacity in zip(lengths, capacities, strict=True)):
        return list(_all_but_weakest(scores))
    newest_first = scores.flip(-1)
    order = newest_first.argsort(dim=-1, descending=True, stable=True)
    place = scores.shape[-1] - 1 - order
    kept = [place[h, : min(capacity, lengths[h])] for h, capacity in enumerate(capacities)]
    return [index.sort().values for index in kept]


def _all_but_weakest(scores: torch.Tensor) -> torch.Tensor:
    """The usual case of a decode step, (Hkv, n - 1); of the equally weak the oldest leaves."""
    place = torch.arange(scores.shape[-1] - 1, device=scores.device)[None, :]
    return place + (place >= scores.argmin(dim=-1, keepdim=True))
