"""A sealed stretch of tokens of one row: never changed, so rows may share it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvtailor.arranged import Arranged, Codes
from kvtailor.formats import GROUP_TOKENS
from kvtailor.kernels import native


@dataclass(frozen=True)
class Segment:
    """Tokens of one sequence in one layer, dense or packed.

    Attributes
    ----------
    keys, values : (Hkv, n, D) tensors, or packed codes of as many tokens.
    positions : (n,) int32 slots, ascending, the same for all heads; a range where they follow each other.
    marks : (Hkv, n) float32 for policies, or None. Observing attention makes a new segment.
    """

    keys: torch.Tensor | Codes
    values: torch.Tensor | Codes
    positions: torch.Tensor | range
    marks: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.positions)

    @property
    def is_packed(self) -> bool:
        """Whether keys and values are codes."""
        return isinstance(self.keys, Codes)

    @property
    def device(self) -> torch.device:
        """Where the segment lives."""
        return next(self.tensors()).device

    @cached_property
    def handed(self) -> Any:
        """The segment as the C++ kernels hold it; packed ones must be arranged."""
        if isinstance(self.keys, torch.Tensor | Arranged) and isinstance(self.values, torch.Tensor | Arranged):
            return native.hand_segment(self.keys, self.values, self.positions)
        raise TypeError("codes in the canonical order cannot be handed to the C++ kernels")

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes: it hands its own tensors to the C++ kernels."""
        return {name: value for name, value in self.__dict__.items() if name != "handed"}

    def slots(self) -> torch.Tensor:
        """The positions as a tensor, (n,) int64."""
        if isinstance(self.positions, range):
            return torch.arange(self.positions.start, self.positions.stop, device=self.device)
        return self.positions.long()

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is stored."""
        for part in (self.keys, self.values):
            if isinstance(part, Codes):
                yield from part.tensors()
            else:
                yield part
        if isinstance(self.positions, torch.Tensor):
            yield self.positions
        if self.marks is not None:
            yield self.marks

    @torch.inference_mode(False)  # what is kept must be ordinary tensors
    def before(self, slot: int) -> list[Segment]:
        """The tokens at slots below ``slot``: whole blocks, and what is left of a block on its own."""
        count = int((self.slots() < slot).sum())
        if count == self.length:
            return [self]
        whole = count // GROUP_TOKENS * GROUP_TOKENS if self.is_packed else 0
        return [self._between(*ends) for ends in ((0, whole), (whole, count)) if ends[0] < ends[1]]

    def _between(self, start: int, stop: int) -> Segment:
        keys, values = (_between(part, start, stop) for part in (self.keys, self.values))
        marks = None if self.marks is None else self.marks[:, start:stop].clone()
        return Segment(keys, values, self.positions[start:stop], marks)

    def with_marks(self, marks: torch.Tensor) -> Segment:
        """The same tokens with other marks."""
        return Segment(self.keys, self.values, self.positions, marks)


def run_of(positions: torch.Tensor) -> torch.Tensor | range:
    """Positions as a range where each follows the one before, else as they are."""
    first, last = int(positions[0]), int(positions[-1])
    return range(first, last + 1) if last - first + 1 == len(positions) else positions


def _between(part: torch.Tensor | Codes, start: int, stop: int) -> torch.Tensor | Codes:
    if not isinstance(part, Codes):
        return part[:, start:stop].clone()
    if start == 0:
        return part.narrow(stop)
    block = torch.tensor([start // GROUP_TOKENS], device=part.scale.device)
    return part.select_blocks(block).narrow(stop - start)
