"""Least recently used: evict the token whose last use lies furthest back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtailor.policies.base import Held, Policy, Watch, check_count


@dataclass(frozen=True)
class Lru(Policy):
    """Evict the least recently used token. Source: ours after InfiniGen's pool policies, arXiv 2406.19707.

    A token is used at a step if it stands among the ``top`` most attended tokens of that step's query, in any query
    head of its KV head; a new token counts as used when it comes.

    Parameters
    ----------
    top : how many tokens a query uses.
    """

    name: ClassVar[str] = "lru"
    watches: ClassVar[Watch] = "use"
    top: int = 16

    def check(self) -> None:
        """Raise ValueError for a ``top`` below 1."""
        check_count(self.name, "top", self.top, 1)

    def importance(self, held: Held) -> torch.Tensor:
        """The slot of the last query that used the token; ties go against the older token."""
        assert held.mark is not None
        return held.mark
