"""From an index's scores to the tokens that a query reads."""

from __future__ import annotations

from typing import Literal

import torch

from kvtailor.indexes.base import Index
from kvtailor.kernels import native

Select = Literal["query", "mean", "max", "sum"]
"""Who shares a choice of tokens: nobody ("query": each query head has its own), or the query heads of a KV head, by the
mean of their queries, the greatest distance from a head's best score, or the sum of softmax probabilities."""


def choose(
    index: Index, query: torch.Tensor, count: int, select: Select, scale: float, path: str | None = None
) -> torch.Tensor:
    """The tokens of the greatest scores.

    Parameters
    ----------
    index : knows one token or more.
    query : (Hkv, G, D).
    count : tokens; all that the index knows if it knows fewer.
    select : who shares a choice.
    scale : factor on the logits, for "sum".
    path : the C++ kernels, or None for the reference.

    Returns
    -------
    int64, ascending: (Hkv, G, k) for "query", else (Hkv, k).
    """
    if select == "mean":
        query = query.float().mean(dim=1, keepdim=True)
    scores = index.scores(query, path)  # (Hkv, G or 1, n)
    if select in ("max", "sum"):
        scores = _shared(scores, select, scale, path)[:, None]
    best = strongest(scores.flatten(0, 1), min(count, scores.shape[-1]), path)
    return best.view(*scores.shape[:2], -1) if select == "query" else best


def strongest(scores: torch.Tensor, count: int, path: str | None) -> torch.Tensor:
    """Places of the ``count`` greatest of each row (rows, n), ascending, (rows, count) int64."""
    if path is None:
        return scores.topk(count, dim=-1).indices.sort(dim=-1).values
    out = torch.empty(scores.shape[0], count, dtype=torch.long)
    native.topk(scores, out)
    return out


def _shared(scores: torch.Tensor, select: Select, scale: float, path: str | None) -> torch.Tensor:
    """One score for all query heads of a KV head: (Hkv, G, n) to (Hkv, n)."""
    if path is not None:
        out = torch.empty(scores.shape[0], scores.shape[2])
        native.best_of_group(path, scores.mul_(scale), out, "max" if select == "max" else "softmax")
        return out
    if select == "max":
        return (scores - scores.amax(dim=-1, keepdim=True)).amax(dim=1)
    return (scores * scale).softmax(dim=-1).sum(dim=1)
