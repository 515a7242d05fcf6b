"""How dense a layer's attention is: whether its tokens are better packed than left unread."""

from __future__ import annotations

from typing import Literal

import torch

from kvtailor.kernels import reference as kernels

TAU = 0.2
SHARE = 0.05


def density(query: torch.Tensor, keys: torch.Tensor, share: float = SHARE, scale: float | None = None) -> float:
    """Attention that the strongest tokens leave uncovered, averaged over queries and heads.

    Source: TailorKV, arXiv 2505.19586, section 3.1, divided by the number of queries as the released code does; unlike
    there, no query sees tokens after its own.

    Parameters
    ----------
    query : (Hq, n_q, D), queries of the newest ``n_q`` tokens, after position encoding; the paper takes 32.
    keys : (Hkv, n, D) of all tokens, after position encoding.
    share : share of the ``n`` tokens that counts as strongest in each row, at least one token.
    scale : factor on the logits; default: one over the root of D.

    Returns
    -------
    0 (each query reads one token) to 1.

    Raises
    ------
    ValueError
        If there are more queries than tokens, or the heads do not divide.
    """
    return float(head_density(query, keys, share, scale).mean())


def head_density(
    query: torch.Tensor, keys: torch.Tensor, share: float = SHARE, scale: float | None = None
) -> torch.Tensor:
    """The same for each query head, (Hq,) float64.

    Parameters
    ----------
    query, keys, share, scale : as for :func:`density`.

    Raises
    ------
    ValueError
        As for :func:`density`.
    """
    _check_shapes(query, keys)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads, tokens, dim = keys.shape
    grouped = query.view(heads, -1, *query.shape[1:])  # (Hkv, G, n_q, D)
    scores = []
    for members, own in zip(grouped, keys, strict=True):  # head by head: (G, n_q, n) at a time
        logits = kernels.scores(members.reshape(1, -1, dim), own[None]).view(*members.shape[:2], tokens) * scale
        scores.append(uncovered(_causal(logits).softmax(dim=-1), share).double().mean(dim=-1))
    return torch.cat(scores)


def uncovered(attention: torch.Tensor, share: float = SHARE) -> torch.Tensor:
    """Attention outside each row's strongest tokens.

    Parameters
    ----------
    attention : (..., n), rows that add up to 1.
    share : as for :func:`density`.

    Returns
    -------
    (...), 0 to 1.
    """
    count = max(1, int(share * attention.shape[-1]))
    return (1 - attention.topk(count, dim=-1).values.sum(dim=-1)).clamp(0, 1)


def label(score: float, tau: float = TAU) -> Literal["quantise", "retrieve"]:
    """What suits a layer of a density: to pack all its tokens, or to read the few that matter.

    Source: TailorKV, arXiv 2505.19586, section 3.1, with its threshold.
    """
    return "quantise" if score > tau else "retrieve"


def _causal(logits: torch.Tensor) -> torch.Tensor:
    """Logits (G, n_q, n) of the newest queries with -inf at tokens after each query's own."""
    queries, tokens = logits.shape[-2:]
    later = torch.ones(queries, tokens, dtype=torch.bool, device=logits.device).triu(tokens - queries + 1)
    return logits.masked_fill(later, -torch.inf)


def _check_shapes(query: torch.Tensor, keys: torch.Tensor) -> None:
    if query.shape[1] > keys.shape[1]:
        raise ValueError(
            f"density of {query.shape[1]} queries over {keys.shape[1]} tokens; allowed: no more queries than tokens"
        )
    if query.shape[0] % keys.shape[0]:
        raise ValueError(
            f"density of {query.shape[0]} query heads over {keys.shape[0]} KV heads; allowed: a multiple of them"
        )
