"""SnapKV and its relatives: what the prompt's last queries attend to stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn.functional import avg_pool1d, max_pool1d

from kvtailor.policies.allocation import apportion, within
from kvtailor.policies.base import Held, Policy, Reduce, Watch, check_choice, check_count, over_group
from kvtailor.policies.selection import protect


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keep what the last ``window`` queries of the prompt attend to. Source: SnapKV, arXiv 2404.14469, section 4.

    Parameters
    ----------
    window : queries that vote; their own tokens always stay.
    kernel : width of the pooling along the tokens, odd; 1 for none.
    pool : "avg" or "max".
    reduce : how the query heads of a KV head are joined, before pooling.
    """

    name: ClassVar[str] = "snapkv"
    watches: ClassVar[Watch] = "window"
    window: int = 32
    kernel: int = 5
    pool: Literal["avg", "max"] = "avg"
    reduce: Reduce = "mean"

    def check(self) -> None:
        """Raise ValueError for settings out of range."""
        check_count(self.name, "window", self.window, 1)
        check_count(self.name, "kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"policy {self.name!r}: kernel {self.kernel} cannot be used: allowed are odd numbers")
        check_choice(self.name, "pool", self.pool, ("avg", "max"))
        check_choice(self.name, "reduce", self.reduce, ("mean", "max", "sum"))

    @property
    def acts(self) -> Literal["prefill", "always"]:
        """Once, at the end of the prompt; tokens generated afterwards are added."""
        return "prefill"

    @property
    def recent(self) -> int:
        """The window's own tokens."""
        return self.window

    @property
    def window_size(self) -> int:
        """Queries to keep at hand."""
        return self.window

    def importance(self, held: Held) -> torch.Tensor:
        """Mean attention of the window's queries, joined over the group and pooled along the tokens."""
        votes = over_group(held.window(), self.reduce)  # (Hkv, n)
        pooled = torch.full_like(votes, torch.inf)
        for head, length in enumerate(held.lengths):
            prefix = max(length - self.window, 0)
            if prefix:
                pooled[head, :prefix] = self._pool(votes[head : head + 1, :prefix])[0]
        return pooled

    def _pool(self, votes: torch.Tensor) -> torch.Tensor:
        pool = avg_pool1d if self.pool == "avg" else max_pool1d
        return pool(votes, kernel_size=self.kernel, stride=1, padding=self.kernel // 2)


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with budgets that fall from the first layer to the last. Source: PyramidKV, arXiv 2406.02069, section 4.

    Parameters
    ----------
    beta : the last layer's budget (without the window) is the average over ``beta``.
    rounding : "exact" makes the layers add up to the budget; "reference" floors the step between layers as the
        released code does, which keeps up to 15 % more than its nominal budget.
    """

    name: ClassVar[str] = "pyramidkv"
    beta: int = 20
    rounding: Literal["exact", "reference"] = "exact"

    def check(self) -> None:
        """Raise ValueError for settings out of range."""
        super().check()
        check_count(self.name, "beta", self.beta, 1)
        check_choice(self.name, "rounding", self.rounding, ("exact", "reference"))

    def layer_capacities(self, average: int, seen: int, layers: int, protected: int) -> list[int]:
        """Linearly falling budgets; with exact rounding their sum is ``layers * average``."""
        base, room = average - self.window, seen - self.window
        if seen <= average or layers == 1 or base <= 0:
            return [average] * layers
        if self.rounding == "reference":
            return [n + self.window for n in self._reference(base, room, layers)]
        low = min(base, max(base / self.beta, protected - self.window + 1))
        high = 2 * base - low
        if high > room:
            high, low = room, 2 * base - room
        shares = [high - (high - low) * layer / (layers - 1) for layer in range(layers)]
        return [n + self.window for n in apportion(shares, layers * base)]

    def _reference(self, base: int, room: int, layers: int) -> list[int]:
        if room + self.window < 2 * base:
            return [base] * layers
        low = base // self.beta
        high = 2 * base - low
        if high >= room:
            high, low = room, 2 * base - room
        step = (high - low) // (layers - 1)
        return [high - layer * step for layer in range(layers)]


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV with a layer's budget divided over its heads by their scores. Source: AdaKV, arXiv 2407.11550, section 4.

    Parameters
    ----------
    floor : share of the uniform budget that every head gets whatever its scores.
    """

    name: ClassVar[str] = "adakv"
    ragged: ClassVar[bool] = True
    floor: float = 0.2

    def check(self) -> None:
        """Raise ValueError for settings out of range."""
        super().check()
        if not isinstance(self.floor, int | float) or not 0 <= self.floor <= 1:
            raise ValueError(f"policy 'adakv': floor {self.floor!r} cannot be used: allowed is 0 to 1")

    def head_capacities(
        self, importance: torch.Tensor, held: Held, capacity: int, sinks: int, recent: int
    ) -> list[int]:
        """Budgets that add up to ``Hkv * capacity``: the heads' shares of the layer's strongest tokens, floored."""
        if sum(held.lengths) <= held.heads * capacity:
            return held.lengths
        base = capacity - recent
        scores = protect(importance, [length - recent for length in held.lengths], sinks, 0)
        strongest = scores.flatten().argsort(descending=True, stable=True)[: held.heads * base]
        won = torch.bincount(strongest // scores.shape[-1], minlength=held.heads).tolist()
        safeguard = self.floor * base
        shares = [count * (1 - self.floor) + safeguard for count in won]
        rooms = [length - recent for length in held.lengths]
        return [n + recent for n in within(apportion(shares, held.heads * base), rooms)]
