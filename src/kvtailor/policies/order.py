"""Policies that need no attention: first in first out, streaming with sinks, random, norms and directions of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn.functional import normalize

from kvtailor.policies.base import Held, Policy, check_choice, check_count


@dataclass(frozen=True)
class Fifo(Policy):
    """Evict the oldest token that is not protected. Source: classic; with ``sinks: 0`` a plain sliding window."""

    name: ClassVar[str] = "fifo"

    def importance(self, held: Held) -> torch.Tensor:
        """The position: older is worth less."""
        return held.positions.float()


@dataclass(frozen=True)
class Streaming(Fifo):
    """Attention sinks and a recent window. Source: StreamingLLM, arXiv 2309.17453, section 3.2.

    Parameters
    ----------
    positions : "renumbered" gives the tokens held consecutive positions at each step, as the paper does, which a text
        longer than the trained context needs; "original" keeps the positions that the tokens came with.
    """

    name: ClassVar[str] = "streaming"
    positions: Literal["renumbered", "original"] = "renumbered"

    def check(self) -> None:
        """Raise ValueError for an unknown kind of positions."""
        check_choice(self.name, "positions", self.positions, ("renumbered", "original"))


@dataclass(frozen=True)
class Random(Policy):
    """Evict tokens at random: each token draws one priority per layer and head, the lowest leave. A baseline.

    Parameters
    ----------
    seed : of the priorities; the same seed keeps the same tokens, however the prompt is cut into chunks.
    """

    name: ClassVar[str] = "random"
    seed: int = 0

    def check(self) -> None:
        """Raise ValueError for a seed that is no whole number."""
        check_count(self.name, "seed", self.seed, 0)

    def importance(self, held: Held) -> torch.Tensor:
        """A hash of (seed, layer, head, place in the sequence) in [0, 1)."""
        head = torch.arange(held.heads, device=held.positions.device)[:, None]
        place = held.positions.long() - held.first
        state = place * 0x9E3779B1 + head * 0x85EBCA6B + held.layer * 0xC2B2AE3D + self.seed % 2**32 * 0x27D4EB2F
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            state = state & 0xFFFFFFFF
            state = ((state ^ (state >> shift)) * factor) & 0xFFFFFFFF
        return (state >> 8).float() / 2**24


@dataclass(frozen=True)
class KeyNorm(Policy):
    """Keep the keys of smallest norm. Source: Devoto et al., arXiv 2406.11430, section 3."""

    name: ClassVar[str] = "keynorm"

    @property
    def acts(self) -> Literal["prefill", "always"]:
        """Once, at the end of the prompt."""
        return "prefill"

    def importance(self, held: Held) -> torch.Tensor:
        """Minus the key's L2 norm."""
        return -held.keys().norm(dim=-1)


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keep the keys that differ most from the others. Source: KeyDiff, arXiv 2504.15364, section 3."""

    name: ClassVar[str] = "keydiff"

    @property
    def acts(self) -> Literal["prefill", "always"]:
        """Once, at the end of the prompt."""
        return "prefill"

    def importance(self, held: Held) -> torch.Tensor:
        """Minus the cosine of the key and the mean of all keys' directions."""
        directions = normalize(held.keys(), dim=-1)
        ends = torch.tensor(held.lengths, device=directions.device)[:, None]
        there = torch.arange(directions.shape[1], device=directions.device) < ends  # (Hkv, n)
        anchor = normalize((directions * there[..., None]).sum(dim=1), dim=-1)
        return -(directions @ anchor[..., None]).squeeze(-1)
