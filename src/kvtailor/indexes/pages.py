"""Finding a query's tokens by bounds on pages of keys. Source: Quest, arXiv 2406.10774, section 3."""

from __future__ import annotations

import torch

PAGE_TOKENS = 16


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
