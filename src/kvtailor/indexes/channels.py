"""Finding a query's tokens by a few channels of the keys. Source: TailorKV, arXiv 2505.19586, section 3.3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import torch

from kvtailor.indexes.base import Index, check_count
from kvtailor.indexes.stretches import add, first, length_of
from kvtailor.kernels import native

MOST_CHANNELS = 256


class ChannelsIndex(Index):
    """The few channels that can move a logit the most: those of largest ``|query| * max |key|``.

    Keys stand a second time, channel by channel, so that only the channels that matter are read.

    Parameters
    ----------
    count : channels per query, 1 or more; the paper takes 8 or 12.
    """

    name: ClassVar[str] = "channels"

    def __init__(self, count: int = 8) -> None:
        check_count(self.name, "count", count, 1, MOST_CHANNELS)
        self.count = count
        self.peaks: torch.Tensor | None = None  # (Hkv, D), of all tokens that ever came
        self.blocks: list[torch.Tensor] = []  # (Hkv, D, n) keys, channel by channel

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens that the index knows."""
        return length_of(self.blocks)

    @torch.inference_mode(False)  # what is kept must be ordinary tensors
    def append(self, keys: torch.Tensor, path: str | None) -> None:
        """Take the next tokens' channels, and join stretches of like size."""
        self.peaks = channel_peaks(keys, self.peaks)
        add(self.blocks, keys.transpose(1, 2).contiguous())  # the copy that makes a channel's tokens neighbours

    def emptied(self) -> Self:
        """A fresh index with the same options."""
        return type(self)(self.count)

    def scores(self, query: torch.Tensor, path: str | None) -> torch.Tensor:
        """Products of queries and keys over each query's own channels, (Hkv, M, length)."""
        assert self.peaks is not None
        heads, count, dim = query.shape
        peaks = self.peaks[:, None].expand(-1, count, -1).flatten(0, 1)
        flat = query.flatten(0, 1).float()
        channels = critical_channels(flat, peaks, min(self.count, dim))  # (Hkv * M, m)
        head = torch.arange(heads, device=query.device).repeat_interleave(count)[:, None]
        found = [_products(flat, block[head, channels], channels, path) for block in self.blocks]
        return torch.cat(found, dim=-1).view(heads, count, -1)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Peaks, and keys by channel."""
        if self.peaks is not None:
            yield self.peaks
        yield from self.blocks

    def token_bytes(self, heads: int, dim: int, element: int) -> float:
        """Bytes of one token's keys."""
        return heads * dim * element

    def fixed_bytes(self, heads: int, dim: int) -> int:
        """Bytes of the peaks."""
        return heads * dim * 4

    def drop_from(self, length: int) -> None:
        """Forget all tokens behind the first ``length``; the peaks stay, as bounds."""
        self.blocks = first(self.blocks, length)

    def copy(self) -> Self:
        """An index of its own; what never changes is shared."""
        other = self.emptied()
        other.peaks, other.blocks = self.peaks, list(self.blocks)
        return other


def _products(query: torch.Tensor, rows: torch.Tensor, channels: torch.Tensor, path: str | None) -> torch.Tensor:
    """Products over some channels: query (H, D), rows (H, m, n) of ``channels`` (H, m), to (H, n)."""
    if path is not None:
        out = torch.empty(rows.shape[0], 1, rows.shape[2])
        native.channel_scores(path, query[:, None].detach(), rows, channels, out)
        return out[:, 0]
    return (query.gather(1, channels)[:, None] @ rows.float())[:, 0]


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
