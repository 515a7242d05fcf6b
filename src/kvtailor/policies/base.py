"""What an eviction policy is: settings, what it must be shown, and an importance for every token held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch

Watch = Literal["nothing", "window", "mass", "use"]
Reduce = Literal["mean", "max", "sum"]


@dataclass(frozen=True)
class Held:
    """What one sequence holds in one layer when room is made; heads with fewer tokens are padded at the end.

    Attributes
    ----------
    positions : (Hkv, n) slot of each token in the sequence as it was seen, ascending.
    lengths : tokens held per KV head; entries of a head beyond its length mean nothing.
    seen : slots whose queries came by so far, pads included; tokens that room is made for are not among them.
    first : slot of the sequence's first token: the padding before it.
    layer : index of the layer.
    mark : (Hkv, n) float32, what observation accumulated per token; None where a policy watches nothing.
    keys : gives the keys, (Hkv, n, D) float32.
    window : gives the mean attention that each token gets of the newest queries, (Hkv, G, n), softmax over all held.
    """

    positions: torch.Tensor
    lengths: list[int]
    seen: int
    first: int
    layer: int
    mark: torch.Tensor | None
    keys: Callable[[], torch.Tensor]
    window: Callable[[], torch.Tensor]

    @property
    def heads(self) -> int:
        """Number of KV heads."""
        return self.positions.shape[0]


@dataclass(frozen=True)
class Policy(ABC):
    """An eviction policy. A subclass is a dataclass whose fields are the policy's settings.

    Class attributes
    ----------------
    name : as plans spell it.
    watches : "nothing"; "window" (the newest queries are kept for it); "mass" (attention is summed per token);
        "use" (when a token last stood among the most attended).
    ragged : whether heads of one layer may keep different numbers of tokens.
    """

    name: ClassVar[str]
    watches: ClassVar[Watch] = "nothing"
    ragged: ClassVar[bool] = False

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Policy:
        """Build the policy from a plan's ``options``; raises ValueError that names the option and what is allowed."""
        known = {field.name: field for field in fields(cls)}
        for option in options:
            if option not in known:
                allowed = ", ".join(known) or "none"
                raise ValueError(f"policy {cls.name!r} has no option {option!r}: allowed are {allowed}")
        policy = cls(**options)
        policy.check()
        return policy

    def check(self) -> None:
        """Raise ValueError if a setting cannot be used."""

    @property
    def acts(self) -> Literal["prefill", "always"]:
        """ "prefill": evict once at the end of each prompt. "always": hold the budget while decoding too."""
        return "always"

    @property
    def recent(self) -> int:
        """Newest tokens that the policy itself protects whatever the budget."""
        return 0

    @property
    def window_size(self) -> int:
        """Newest queries that must be kept for a policy that watches the window."""
        return 0

    def recent_within(self, capacity: int) -> int:
        """Newest tokens protected at a given capacity (tokens per KV head)."""
        return self.recent

    def layer_capacities(self, average: int, seen: int, layers: int, protected: int) -> list[int]:
        """Tokens per KV head for each of ``layers`` layers, ``average`` on average; uniform unless overridden."""
        return [average] * layers

    @abstractmethod
    def importance(self, held: Held) -> torch.Tensor:
        """How much each token held is worth, (Hkv, n) float32; the lowest are evicted first, the older among equals."""

    def head_capacities(
        self, importance: torch.Tensor, held: Held, capacity: int, sinks: int, recent: int
    ) -> list[int]:
        """Tokens to keep per KV head, ``capacity`` on average; uniform unless overridden."""
        return [capacity] * held.heads


def check_choice(policy: str, option: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"policy {policy!r}: {option} {value!r} is not offered: allowed are {', '.join(allowed)}")


def check_count(policy: str, option: str, value: object, least: int) -> None:
    """Raise ValueError unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"policy {policy!r}: {option} {value!r} cannot be used: allowed are whole numbers from {least}"
        )


def over_group(scores: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """Bring scores of query heads to their KV head, (Hkv, G, n) to (Hkv, n)."""
    if reduce == "max":
        return scores.amax(dim=1)
    return scores.sum(dim=1) if reduce == "sum" else scores.mean(dim=1)


__all__ = ["Held", "Policy", "Reduce", "Watch", "check_choice", "check_count", "over_group"]
