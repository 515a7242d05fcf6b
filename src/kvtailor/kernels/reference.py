"""Kernels in plain torch: they run on every device and say what the others must compute."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from kvtailor.formats import Packed, unpack_codes

BLOCK_TOKENS = 1024
"""Tokens read at a time: bounds the fp32 copies that a kernel makes. A whole number of every group of tokens."""


def scores(query: Tensor, keys: Tensor | Packed) -> Tensor:
    """Dot products of queries and keys, read from the codes where keys are packed.

    Parameters
    ----------
    query : (H, M, D), in the basis of the stored keys (rotated where `keys.format.rotated`).
    keys : (H, n, D) of any floating dtype, or packed.

    Returns
    -------
    fp32 (H, M, n), not scaled.
    """
    query = query.float()
    if isinstance(keys, Tensor):
        return _dense_scores(query, keys)
    logits = query.new_empty(*query.shape[:2], keys.length)
    for span, block in _blocks(keys):
        logits[..., span] = query @ dequantise(block).mT
    return logits


def weighted_values(probs: Tensor, values: Tensor | Packed) -> Tensor:
    """Sums of values weighted by probabilities, read from the codes where values are packed.

    Parameters
    ----------
    probs : (H, M, n), summed in fp32.
    values : (H, n, D) of any floating dtype, or packed.

    Returns
    -------
    fp32 (H, M, D), in the basis of the stored values (to be rotated back where `values.format.rotated`).
    """
    probs = probs.float()
    if isinstance(values, Tensor):
        return _dense_values(probs, values)
    out = probs.new_zeros(*probs.shape[:2], values.dim)
    for span, block in _blocks(values):
        out += probs[..., span] @ dequantise(block)
    return out


def dequantise(packed: Packed) -> Tensor:
    """Return the numbers that the codes stand for, outlier channels included.

    Returns
    -------
    fp32 (H, n, D), in the stored basis.
    """
    fmt = packed.format
    codes = unpack_codes(packed.planes, fmt.bits, packed.dim).float()
    scale, zero = packed.scale.float(), packed.zero.float()
    if fmt.axis == "token":
        groups = codes.unflatten(-1, (-1, fmt.group))  # (H, n, D / g, g)
        x = groups.mul_(scale.unsqueeze(-1)).add_(zero.unsqueeze(-1)).flatten(-2)
    else:
        groups = _token_groups(codes, fmt.group)  # (H, ceil(n / g), g, D)
        x = groups.mul_(scale.unsqueeze(2)).add_(zero.unsqueeze(2)).flatten(1, 2)[:, : packed.length]
    if packed.outlier_channels is not None and packed.outliers is not None:
        index = packed.outlier_channels.long().unsqueeze(1).expand_as(packed.outliers)
        x.scatter_(-1, index, packed.outliers.float())
    return x


def _dense_scores(query: Tensor, keys: Tensor) -> Tensor:
    if keys.dtype == torch.float32:
        return query @ keys.mT
    return torch.cat([query @ block.float().mT for block in keys.split(BLOCK_TOKENS, dim=1)], dim=-1)


def _dense_values(probs: Tensor, values: Tensor) -> Tensor:
    if values.dtype == torch.float32:
        return probs @ values
    out = probs.new_zeros(*probs.shape[:2], values.shape[-1])
    for part, block in zip(probs.split(BLOCK_TOKENS, dim=-1), values.split(BLOCK_TOKENS, dim=1), strict=True):
        out += part @ block.float()
    return out


def _blocks(packed: Packed) -> Iterator[tuple[slice, Packed]]:
    for start in range(0, packed.length, BLOCK_TOKENS):
        stop = min(start + BLOCK_TOKENS, packed.length)
        yield slice(start, stop), packed.slice(start, stop)


def _token_groups(codes: Tensor, group: int) -> Tensor:
    """(H, n, D) to (H, ceil(n / g), g, D); a last group that was cut is filled with zeros."""
    return functional.pad(codes, (0, 0, 0, -codes.shape[1] % group)).unflatten(1, (-1, group))


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    """Attention over dense keys and values in one go, without its log-sum-exp.

    Parameters
    ----------
    query : (H, M, Dk).
    keys, values : (H, n, Dk) and (H, n, Dv), in the query's dtype.
    scale : factor on the logits.
    visible : (1 or H, M, n) boolean, True where a query may look; None for everywhere.

    Returns
    -------
    (H, M, Dv) in the query's dtype; zero for a query that may look nowhere.
    """
    mask = None if visible is None else visible.expand(query.shape[0], -1, -1)[None]
    out = functional.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]
    return out if visible is None else out.nan_to_num_(0.0)


def softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last axis with its log-sum-exp, so that parts can be merged.

    Parameters
    ----------
    logits : (..., n) float32, -inf where nothing may be seen.

    Returns
    -------
    Probabilities (..., n), zero in a row that sees nothing, and log-sum-exp (...), -inf there.
    """
    lse = logits.logsumexp(dim=-1)
    return (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_(), lse


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention over disjoint sets of tokens exactly.

    Parameters
    ----------
    parts : outputs (..., D) and their log-sum-exp (...), each normalised over its own tokens.

    Returns
    -------
    Output and log-sum-exp over all tokens.
    """
    weights, lse = softmax(torch.stack([lse for _, lse in parts], dim=-1))
    out = torch.stack([out for out, _ in parts], dim=-1)
    return (out * weights[..., None, :]).sum(dim=-1), lse
