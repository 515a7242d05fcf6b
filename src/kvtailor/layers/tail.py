"""The dense part of a row: tokens held exactly, each KV head with its own number of them and nothing padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvtailor.formats import GROUP_TOKENS
from kvtailor.kernels import native

NO_LIMIT = 2**62


def whole_blocks(tokens: int) -> int:
    """The least number of tokens that fills whole blocks and holds ``tokens``."""
    return -(-tokens // GROUP_TOKENS) * GROUP_TOKENS


class Tail:
    """Keys, values and positions of one sequence in one layer, flat over heads: head ``h`` owns a run of rows.

    Tokens of a head stand in the order of their positions. Runs grow by whole blocks.

    Parameters
    ----------
    key, value : (Hkv, n, Dk) and (Hkv, n, Dv), any n: what dtype, device and sizes are taken from.
    marked : whether each token carries a float32 mark for the policy.
    is_native : whether the C++ kernels move tokens.
    """

    @torch.inference_mode(False)  # what is written in place later must be an ordinary tensor
    def __init__(self, key: torch.Tensor, value: torch.Tensor, marked: bool = False, is_native: bool = False) -> None:
        heads = key.shape[0]
        self.keys = key.new_empty(0, key.shape[-1])  # (rows, Dk)
        self.values = value.new_empty(0, value.shape[-1])  # (rows, Dv)
        self.positions = torch.empty(0, dtype=torch.int32, device=key.device)  # (rows,)
        self.marks = torch.empty(0, dtype=torch.float32, device=key.device) if marked else None
        self.starts = [0] * heads
        self.rooms = [0] * heads
        self.lengths = [0] * heads
        self.aligned = True  # whether all heads hold the same positions
        self.is_native = is_native
        self.moves = 0  # how often the arrays were replaced
        self._handed: Any = None
        self.limit = NO_LIMIT  # tokens per head beyond which no spare room is taken

    @property
    def heads(self) -> int:
        """Number of KV heads."""
        return len(self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether all heads hold equally many tokens in equal runs."""
        return len(set(self.lengths)) == 1 and len(set(self.rooms)) == 1

    @property
    def longest(self) -> int:
        """Tokens of the head that holds the most."""
        return max(self.lengths)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is stored."""
        yield from (self.keys, self.values, self.positions)
        if self.marks is not None:
            yield self.marks

    @property
    def handed(self) -> Any:
        """The arrays as the C++ kernels hold them."""
        if self._handed is None:
            self._handed = native.hand_tail(self.keys, self.values, self.positions, self.starts, self.rooms)
        return self._handed

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes: it hands its own arrays to the C++ kernels."""
        return {**self.__dict__, "_handed": None}

    def reserve(self, lengths: list[int]) -> None:
        """Make each head's run large enough for ``lengths`` tokens: whole blocks, unless the limit comes first."""
        if all(n <= room for n, room in zip(lengths, self.rooms, strict=True)):
            return
        self._move([max(n, min(whole_blocks(n), self.limit)) for n in lengths], [slice(0, n) for n in self.lengths])

    def append(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor | range,
        marks: torch.Tensor | float = 0.0,
    ) -> None:
        """Add tokens to every head.

        Parameters
        ----------
        key, value : (Hkv, n, Dk) and (Hkv, n, Dv).
        positions : (n,) their slots, or a range of them.
        marks : (n,) or one number, what their marks start from.
        """
        count = key.shape[1]
        self.reserve([n + count for n in self.lengths])
        alike = key.dtype == self.keys.dtype and value.dtype == self.values.dtype
        if self.is_native and alike and isinstance(positions, range) and key.stride(-1) == value.stride(-1) == 1:
            self.handed.append(key, value, positions.start, self.lengths)
        else:
            slots = torch.as_tensor(positions, device=self.keys.device)
            self._write(self.keys, key, count)
            self._write(self.values, value, count)
            self._write(self.positions, slots, count)
        if self.marks is not None:
            self._write(self.marks, marks, count)
        self.lengths = [n + count for n in self.lengths]

    def _write(self, flat: torch.Tensor, added: torch.Tensor | float, count: int) -> None:
        if self.is_even:
            length = self.lengths[0]
            flat.view(self.heads, self.rooms[0], *flat.shape[1:])[:, length : length + count] = added
            return
        for head, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            by_head = isinstance(added, torch.Tensor) and added.dim() == 3
            flat[start + length : start + length + count] = added[head] if by_head else added  # type: ignore[index]

    def run(self, head: int) -> slice:
        """Where a head's tokens lie in the flat arrays."""
        return slice(self.starts[head], self.starts[head] + self.lengths[head])

    def even(self, flat: torch.Tensor) -> torch.Tensor:
        """A flat array as (Hkv, n, …), for an even tail."""
        return flat.view(self.heads, self.rooms[0], *flat.shape[1:])[:, : self.lengths[0]]

    def padded(self, flat: torch.Tensor) -> torch.Tensor:
        """A flat array as (Hkv, longest, …): a view of an even tail, else a copy that repeats last entries."""
        if self.is_even:
            return self.even(flat)
        place = torch.arange(self.longest, device=flat.device)[None, :]
        start = torch.tensor(self.starts, device=flat.device)[:, None]
        length = torch.tensor(self.lengths, device=flat.device)[:, None]
        return flat[start + torch.minimum(place, length - 1)]

    def keep(self, index: list[torch.Tensor], rooms: list[int]) -> None:
        """Hold on to the tokens at ``index`` (ascending, per head) in runs of ``rooms`` tokens."""
        self.aligned = self.aligned and all(torch.equal(i, index[0]) for i in index[1:])
        if rooms == self.rooms:
            self._compact(index)
        else:
            self._move(rooms, index)
        self.lengths = [len(i) for i in index]

    def drop_from(self, slot: int) -> int:
        """Forget all tokens at ``slot`` and later; returns how many the longest head lost."""
        lost = 0
        for head in range(self.heads):
            held = int((self.positions[self.run(head)] < slot).sum())
            lost = max(lost, self.lengths[head] - held)
            self.lengths[head] = held
        return lost

    def drop_first(self, count: int) -> None:
        """Forget the first ``count`` tokens of every head."""
        index = torch.arange(count, self.longest, device=self.keys.device)
        self.keep([index[: n - count] for n in self.lengths], [whole_blocks(n - count + 1) for n in self.lengths])

    @torch.inference_mode(False)
    def copy(self) -> Tail:
        """A tail of its own with the same content."""
        other = object.__new__(Tail)
        other.keys, other.values, other.positions = self.keys.clone(), self.values.clone(), self.positions.clone()
        other.marks = None if self.marks is None else self.marks.clone()
        other.starts, other.rooms, other.lengths = list(self.starts), list(self.rooms), list(self.lengths)
        other.aligned, other.limit = self.aligned, self.limit
        other.is_native, other.moves, other._handed = self.is_native, 0, None
        return other

    def _compact(self, index: list[torch.Tensor]) -> None:
        if self.is_native:
            self.handed.keep(index)
        for flat in self.tensors() if not self.is_native else [] if self.marks is None else [self.marks]:
            for start, kept in zip(self.starts, index, strict=True):
                flat[start : start + len(kept)] = flat[start + kept]

    @torch.inference_mode(False)
    def _move(self, rooms: list[int], index: Sequence[torch.Tensor | slice]) -> None:
        starts = [sum(rooms[:head]) for head in range(self.heads)]
        self._handed = None  # it keeps the old arrays alive
        self.moves += 1

        def moved(flat: torch.Tensor) -> torch.Tensor:
            fresh = flat.new_zeros(sum(rooms), *flat.shape[1:])
            for old, new, room, kept in zip(self.starts, starts, self.rooms, index, strict=True):
                part = flat[old : old + room][kept]
                fresh[new : new + len(part)] = part
            return fresh

        self._each(moved)
        self.starts, self.rooms = starts, rooms

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        # One array after the other, so that the old and the new copy of only one are alive at a time.
        self.keys = change(self.keys)
        self.values = change(self.values)
        self.positions = change(self.positions)
        if self.marks is not None:
            self.marks = change(self.marks)
