"""The next layer's query, from this layer's input: what the far tokens of the next layer are read ahead by.

Source: TailorKV, arXiv 2505.19586, section 3.3. The next layer's own module makes the query, so that fused projections,
norms of queries and every kind of rotation are as they will be.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

_asking: ContextVar[bool] = ContextVar("kvtailor_asking", default=False)


class Answered(BaseException):
    """Leaves an attention module as soon as it has made its query.

    Parameters
    ----------
    query : (B, Hq, q, D).
    """

    def __init__(self, query: torch.Tensor) -> None:
        super().__init__()
        self.query = query


def answer(query: torch.Tensor) -> None:
    """Called by the attention function: leaves the module if its query alone was asked for."""
    if _asking.get():
        raise Answered(query)


@torch.no_grad()
def query_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The query that an attention module would make of another layer's input.

    Parameters
    ----------
    module : the attention module.
    args, kwargs : of its forward, without a cache.

    Returns
    -------
    (B, Hq, q, D), or None where the module did not come to its attention.
    """
    token = _asking.set(True)
    try:
        module.forward(*args, **kwargs)
    except Answered as answered:
        return answered.query
    finally:
        _asking.reset(token)
    return None
