"""Finding a query's tokens by a few channels of the keys. Source: TailorKV, arXiv 2505.19586, section 3.3."""

from __future__ import annotations

import torch


def channel_peaks(keys: torch.Tensor, known: torch.Tensor | None = None) -> torch.Tensor:
    """Largest absolute value that each channel takes over the tokens.

    Parameters
    ----------
    keys : (Hkv, n, D), one token or more.
    known : (Hkv, D) peaks of earlier tokens, or None.

    Returns
    -------
    (Hkv, D) float32.
    """
    peaks = keys.float().abs().amax(dim=1)
    return peaks if known is None else torch.maximum(peaks, known)


def group_mean(query: torch.Tensor) -> torch.Tensor:
    """One query per KV head, the mean of its query heads: (Hkv, G, D) to (Hkv, D) float32."""
    return query.float().mean(dim=1)


def critical_channels(query: torch.Tensor, peaks: torch.Tensor, count: int) -> torch.Tensor:
    """Channels that can move a logit the most: those of largest ``|query| * peak``.

    Parameters
    ----------
    query : (Hkv, D) from :func:`group_mean`.
    peaks : (Hkv, D) from :func:`channel_peaks`.
    count : channels per KV head, 1 to D; the paper takes 8 or 12.

    Returns
    -------
    (Hkv, count) int64, ascending.
    """
    if not 1 <= count <= peaks.shape[-1]:
        raise ValueError(f"{count} critical channels of heads of {peaks.shape[-1]}; allowed: 1 to {peaks.shape[-1]}")
    return (query.abs() * peaks).topk(count, dim=-1).indices.sort(dim=-1).values


def partial_logits(query: torch.Tensor, keys: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Dot products over some channels, not scaled.

    Parameters
    ----------
    query : (Hkv, D).
    keys : (Hkv, n, D).
    channels : (Hkv, d_s) from :func:`critical_channels`.

    Returns
    -------
    (Hkv, n) float32.
    """
    rows = keys.gather(2, channels[:, None].expand(-1, keys.shape[1], -1))  # (Hkv, n, d_s)
    picked = query.float().gather(1, channels)
    return (rows.float() @ picked[..., None])[..., 0]


def strongest_tokens(logits: torch.Tensor, count: int, first: int = 0, last: int = 0) -> torch.Tensor:
    """Tokens of the largest logits, apart from those that are read anyway.

    Parameters
    ----------
    logits : (Hkv, n).
    count : tokens per KV head; all candidates if there are fewer.
    first, last : tokens at the start and at the end that are no candidates.

    Returns
    -------
    (Hkv, min(count, candidates)) int64, ascending.
    """
    candidates = logits[:, first : max(logits.shape[-1] - last, first)]
    chosen = candidates.topk(min(count, candidates.shape[-1]), dim=-1).indices
    return chosen.sort(dim=-1).values + first
