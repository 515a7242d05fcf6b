"""Heavy hitters: keep the tokens that gathered the most attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvtailor.policies.base import Held, Policy, Watch, check_choice, check_count


@dataclass(frozen=True)
class H2O(Policy):
    """Heavy hitters and recent tokens. Source: H2O, arXiv 2306.14048, section 4; sums are exact, in blocks.

    Parameters
    ----------
    mode : "online" sums attention over all queries and holds the budget at every step, half of it for recent tokens;
        "oneshot" evicts once at the end of the prompt and protects the last ``window`` tokens (the variant that most
        comparisons run).
    heavy : share of the budget for heavy hitters (online).
    window : newest tokens protected (oneshot).
    normalize : divide each sum by the number of queries that saw the token, which frees late tokens of their handicap
        (kvpress does so).
    """

    name: ClassVar[str] = "h2o"
    watches: ClassVar[Watch] = "mass"
    mode: Literal["online", "oneshot"] = "online"
    heavy: float = 0.5
    window: int = 32
    normalize: bool = False

    def check(self) -> None:
        """Raise ValueError for settings out of range."""
        check_choice(self.name, "mode", self.mode, ("online", "oneshot"))
        check_count(self.name, "window", self.window, 1)
        if not isinstance(self.heavy, int | float) or not 0 < self.heavy <= 1:
            raise ValueError(f"policy 'h2o': heavy {self.heavy!r} cannot be used: allowed is above 0 and up to 1")

    @property
    def acts(self) -> Literal["prefill", "always"]:
        """Always when online, once when one-shot."""
        return "always" if self.mode == "online" else "prefill"

    @property
    def recent(self) -> int:
        """The window of the one-shot variant."""
        return self.window if self.mode == "oneshot" else 0

    def recent_within(self, capacity: int) -> int:
        """Online: what the heavy hitters leave of the budget."""
        return self.recent if self.mode == "oneshot" else capacity - int(capacity * self.heavy)

    def importance(self, held: Held) -> torch.Tensor:
        """Attention gathered, summed over queries and the query heads of the KV head."""
        assert held.mark is not None
        if not self.normalize:
            return held.mark
        return held.mark / (held.seen - held.positions).clamp(min=1)
