"""Finding a query's tokens by bounds on pages of keys. Source: Quest, arXiv 2406.10774, section 3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import torch

from kvtailor.indexes.base import Index, check_option
from kvtailor.indexes.stretches import add, first, length_of

PAGE_TOKENS = 16


class PagesIndex(Index):
    """The least and greatest value of each channel in each page of tokens; a page's score is the most that a key in it
    can score, and stands for all its tokens.

    Parameters
    ----------
    page : tokens of a page: 8, 16, 32 or 64.
    """

    name: ClassVar[str] = "pages"

    def __init__(self, page: int = PAGE_TOKENS) -> None:
        check_option(self.name, "page", page, (8, 16, 32, 64))
        self.page = page
        self.bounds: list[torch.Tensor] = []  # (2, Hkv, pages, D): least and greatest

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens that the index knows."""
        return length_of(self.bounds) * self.page

    @torch.inference_mode(False)  # what is kept must be ordinary tensors
    def append(self, keys: torch.Tensor, path: str | None) -> None:
        """Bound the next pages, and join stretches of like size."""
        add(self.bounds, torch.stack(page_bounds(keys, self.page)))

    def emptied(self) -> Self:
        """A fresh index with the same options."""
        return type(self)(self.page)

    def scores(self, query: torch.Tensor, path: str | None) -> torch.Tensor:
        """The most that each token's page can score, (Hkv, M, length)."""
        found = torch.cat([page_scores(query, low, high) for low, high in self.bounds], dim=-1)
        return found.repeat_interleave(self.page, dim=-1)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The bounds."""
        yield from self.bounds

    def token_bytes(self, heads: int, dim: int, element: int) -> float:
        """Bytes of one token's share of its page's bounds."""
        return heads * 2 * dim * element / self.page

    def drop_from(self, length: int) -> None:
        """Forget all tokens behind the first ``length``."""
        self.bounds = first(self.bounds, length // self.page)

    def copy(self) -> Self:
        """An index of its own; what never changes is shared."""
        other = self.emptied()
        other.bounds = list(self.bounds)
        return other


def page_bounds(keys: torch.Tensor, page: int = PAGE_TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each channel in each page; the last page may be short.

    Parameters
    ----------
    keys : (H, n, D), one token or more.
    page : tokens of a page.

    Returns
    -------
    Two of (H, ceil(n / page), D), in the dtype of the keys.
    """
    if page < 1:
        raise ValueError(f"pages of {page} tokens; allowed: 1 or more")
    short = -keys.shape[1] % page
    # The last key again and again fills a short page without moving its bounds.
    filled = torch.cat([keys, keys[:, -1:].expand(-1, short, -1)], dim=1) if short else keys
    pages = filled.unflatten(1, (-1, page))  # (H, pages, page, D)
    return pages.amin(dim=2), pages.amax(dim=2)


def page_scores(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The most that the dot product of a query with any key of each page can be.

    Parameters
    ----------
    query : (H, q, D).
    low, high : (H, pages, D) from :func:`page_bounds`.

    Returns
    -------
    (H, q, pages) float32, not scaled.
    """
    query = query.float()
    return query.clamp(min=0) @ high.float().mT + query.clamp(max=0) @ low.float().mT


def top_pages(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Pages of the largest scores.

    Parameters
    ----------
    scores : (..., pages).
    count : pages to read; all if there are fewer.

    Returns
    -------
    (..., min(count, pages)) int64, ascending.
    """
    return scores.topk(min(count, scores.shape[-1]), dim=-1).indices.sort(dim=-1).values
