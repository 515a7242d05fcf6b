"""One sequence in one layer: sealed segments, oldest first, and a dense tail with the newest tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvtailor.arranged import Codes
from kvtailor.kernels import native
from kvtailor.kernels import reference as kernels
from kvtailor.layers.call import Call
from kvtailor.layers.segment import Segment, run_of
from kvtailor.layers.tail import Tail
from kvtailor.quantize.hadamard import rotate, unrotate
from kvtailor.quantize.pack import unpack

Store = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor | Codes, torch.Tensor | Codes]]

# Logits computed at a time: bounds the memory of attention over many queries.
LOGITS_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Part:
    """Keys and values that are attended together.

    Attributes
    ----------
    heads : KV heads that the part belongs to.
    keys, values : (h, n, D) or codes of as many tokens.
    positions : (n,) or (h, n) slots.
    """

    heads: slice
    keys: torch.Tensor | Codes
    values: torch.Tensor | Codes
    positions: torch.Tensor

    @property
    def length(self) -> int:
        """Tokens per head."""
        return self.positions.shape[-1]

    @property
    def is_whole(self) -> bool:
        """Whether the part spans all KV heads."""
        return self.heads == slice(None)

    @property
    def is_packed(self) -> bool:
        """Whether the keys are codes."""
        return isinstance(self.keys, Codes)

    @property
    def rotated(self) -> bool:
        """Whether the numbers are stored in the rotated basis."""
        return isinstance(self.keys, Codes) and self.keys.format.rotated


@dataclass(frozen=True)
class Window:
    """The newest queries of a row, kept for policies that let them vote.

    Attributes
    ----------
    queries : (Hkv, G, w, Dk).
    slots : (w,) their slots.
    """

    queries: torch.Tensor
    slots: torch.Tensor

    def add(self, queries: torch.Tensor, slots: torch.Tensor, size: int) -> Window:
        """The newest ``size`` queries after more came."""
        return Window(
            torch.cat([self.queries, queries], dim=2)[:, :, -size:].clone(),
            torch.cat([self.slots, slots])[-size:].clone(),
        )

    def before(self, slot: int) -> Window | None:
        """The queries at slots below ``slot``; None if there are none."""
        count = int((self.slots < slot).sum())
        return None if count == 0 else Window(self.queries[:, :, :count], self.slots[:count])


class Row:
    """What one sequence holds in one layer.

    Parameters
    ----------
    key, value : (Hkv, n, D), any n: what dtype, device and sizes are taken from.
    marked : whether tokens carry marks for the policy.
    is_native : whether the C++ kernels move tokens.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, marked: bool = False, is_native: bool = False) -> None:
        self.segments: list[Segment] = []
        self.tail = Tail(key, value, marked, is_native)
        self.window: Window | None = None
        self.total = 0  # tokens that came, evicted ones included, padding not
        self.first = 0  # slot of the first token that came
        self.prompt = 0  # the same at the end of the latest prompt: what fractions are taken of

    @property
    def sealed(self) -> int:
        """Tokens in segments."""
        return sum(segment.length for segment in self.segments)

    @property
    def lengths(self) -> list[int]:
        """Tokens held per KV head."""
        sealed = self.sealed
        return [sealed + n for n in self.tail.lengths]

    @property
    def shape(self) -> tuple[int, ...]:
        """What the bytes held depend on: it changes whenever they do."""
        return self.tail.moves, self.window is not None, *(segment.length for segment in self.segments)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All that is stored, with its kind."""
        for segment in self.segments:
            yield from _kinds(segment)
        yield from (("keys", self.tail.keys), ("values", self.tail.values), ("positions", self.tail.positions))
        if self.tail.marks is not None:
            yield "marks", self.tail.marks
        if self.window is not None:
            yield from (("queries", self.window.queries), ("queries", self.window.slots))

    def handed(self) -> native.Row:
        """Everything held, as the C++ kernels take it."""
        return [segment.handed for segment in self.segments], self.tail.handed, self.tail.lengths

    def parts(self) -> Iterator[Part]:
        """Everything held, oldest first; a tail with uneven heads comes head by head."""
        every = slice(None)
        for segment in self.segments:
            yield Part(every, segment.keys, segment.values, segment.slots())
        tail = self.tail
        if tail.longest == 0:
            return
        if tail.is_even:
            slots = tail.even(tail.positions).long()
            yield Part(every, tail.even(tail.keys), tail.even(tail.values), slots[0] if tail.aligned else slots)
            return
        for head in range(tail.heads):
            run = tail.run(head)
            if tail.lengths[head]:
                positions = tail.positions[run].long()
                yield Part(slice(head, head + 1), tail.keys[run][None], tail.values[run][None], positions)

    def attend(self, query: torch.Tensor, call: Call, index: int, parts: list[Part]) -> torch.Tensor:
        """Exact attention over ``parts``, with one softmax over all of them.

        Parameters
        ----------
        query : (Hkv, G, q, Dk).
        call : how logits are weighed.
        index : this row's place in the batch.
        parts : what is attended, usually all of :meth:`parts`.

        Returns
        -------
        (Hkv, G, q, Dv) float32; zero for a query that may see nothing.
        """
        if not parts:
            return query.new_zeros(*query.shape[:3], self.tail.values.shape[-1], dtype=torch.float32)
        if len(parts) == 1 and call.only_hides and parts[0].is_whole and not parts[0].is_packed:
            return self._attend_plainly(query, call, index, parts[0])
        step = max(1, LOGITS_AT_ONCE // max(1, sum(part.length for part in parts) * query.shape[0] * query.shape[1]))
        blocks = [
            self._attend_block(query[:, :, start : start + step], call, index, start, parts)
            for start in range(0, query.shape[2], step)
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)

    def _attend_plainly(self, query: torch.Tensor, call: Call, index: int, part: Part) -> torch.Tensor:
        assert isinstance(part.keys, torch.Tensor) and isinstance(part.values, torch.Tensor)
        heads, group, count, dim = query.shape
        shape = torch.Size((heads, group, count, part.length))
        visible = call.visible(shape, part.positions, index, 0)
        if visible is not None:
            visible = visible.expand(-1 if visible.dim() == 4 else 1, group, count, -1).flatten(-3, -2)
        out = kernels.attend(query.reshape(heads, group * count, dim), part.keys, part.values, call.scale, visible)
        return out.view(heads, group, count, -1).float()

    def _attend_block(self, query: torch.Tensor, call: Call, index: int, start: int, parts: list[Part]) -> torch.Tensor:
        probs, lse = kernels.softmax(self.logits(query, call, index, start, parts))
        return call.beside_sinks(self._weighted(probs, parts), lse)

    def logits(
        self, query: torch.Tensor, call: Call, index: int, start: int, parts: list[Part] | None = None
    ) -> torch.Tensor:
        """Weighed logits over everything held, heads with fewer tokens padded with -inf.

        Parameters
        ----------
        query : (Hkv, G, q, Dk).
        call, index : as for :meth:`attend`.
        start : place of the first query in the call.
        parts : what is looked at, if not all of :meth:`parts`.

        Returns
        -------
        (Hkv, G, q, n) float32, in the order of :meth:`positions`.
        """
        parts = list(self.parts()) if parts is None else parts
        turned = rotate(query) if any(part.rotated for part in parts) else query
        whole = [part for part in parts if part.is_whole]
        raw = [_products(turned if part.rotated else query, part) for part in whole]
        if len(whole) == len(parts):
            joined = raw[0] if len(raw) == 1 else torch.cat(raw, dim=-1)
            return call.weigh(joined, _joined_positions(whole), index, start)
        raw = [call.weigh(logits, part.positions, index, start) for part, logits in zip(whole, raw, strict=True)]
        return torch.cat([*raw, self._uneven_logits(query, call, index, start, parts[len(whole) :])], dim=-1)

    def _uneven_logits(
        self, query: torch.Tensor, call: Call, index: int, start: int, parts: list[Part]
    ) -> torch.Tensor:
        longest = max(part.length for part in parts)
        table = query.new_full((*query.shape[:3], longest), -torch.inf, dtype=torch.float32)
        group = query.shape[1]
        for part in parts:
            head = part.heads.start
            own = call.of_heads(slice(head * group, (head + 1) * group))
            table[part.heads, ..., : part.length] = own.weigh(_products(query, part), part.positions, index, start)
        return table

    def _weighted(self, probs: torch.Tensor, parts: list[Part]) -> torch.Tensor:
        """Values of ``parts`` weighted by probabilities (Hkv, G, q, n), in the model's basis."""
        shape = (*probs.shape[:3], self.tail.values.shape[-1])
        sums = {rotated: probs.new_zeros(shape) for rotated in {part.rotated for part in parts}}
        place = 0
        for part in parts:
            share = probs[part.heads, ..., place : place + part.length].flatten(1, 2)
            out = kernels.weighted_values(share, part.values)
            sums[part.rotated][part.heads] += out.unflatten(1, probs.shape[1:3])
            place += part.length if part.is_whole else 0
        total = [unrotate(out) if rotated else out for rotated, out in sums.items()]
        return total[0] if len(total) == 1 else total[0] + total[1]

    def positions(self) -> torch.Tensor:
        """Slots of everything held, (Hkv, n) int64; heads with fewer tokens repeat their last one."""
        heads = self.tail.heads
        slots = [segment.slots().expand(heads, -1) for segment in self.segments]
        if self.tail.longest:
            slots.append(self.tail.padded(self.tail.positions).long())
        return torch.cat(slots, dim=1) if slots else self.tail.positions.new_empty(heads, 0, dtype=torch.long)

    def marks(self) -> torch.Tensor | None:
        """Marks of everything held, (Hkv, n), in the order of :meth:`positions`."""
        if self.tail.marks is None:
            return None
        heads = self.tail.heads
        tail = self.tail.padded(self.tail.marks) if self.tail.longest else self.tail.marks.new_empty(heads, 0)
        return torch.cat([segment.marks for segment in self.segments if segment.marks is not None] + [tail], dim=1)

    def set_marks(self, marks: torch.Tensor) -> None:
        """Store marks given in the order of :meth:`positions`."""
        place = 0
        for number, segment in enumerate(self.segments):
            self.segments[number] = segment.with_marks(marks[:, place : place + segment.length].clone())
            place += segment.length
        assert self.tail.marks is not None
        for head in range(self.tail.heads):
            self.tail.marks[self.tail.run(head)] = marks[head, place : place + self.tail.lengths[head]]

    def all_keys(self) -> torch.Tensor:
        """The keys held, (Hkv, n, D) float32, in the order of :meth:`positions`."""
        sealed = [
            (unpack(segment.keys) if isinstance(segment.keys, Codes) else segment.keys).float()
            for segment in self.segments
        ]
        return torch.cat([*sealed, self.tail.padded(self.tail.keys).float()], dim=1)

    @torch.inference_mode(False)  # what is kept must be ordinary tensors
    def seal(self, count: int, store: Store) -> None:
        """Turn the first ``count`` tokens of the tail into a segment.

        Parameters
        ----------
        count : tokens, the same for every head.
        store : makes what the segment holds of keys and values, (Hkv, count, D) each.
        """
        tail = self.tail
        keys, values = store(tail.even(tail.keys)[:, :count], tail.even(tail.values)[:, :count])
        positions = run_of(tail.even(tail.positions)[0, :count].clone())
        marks = None if tail.marks is None else tail.even(tail.marks)[:, :count].clone()
        self.segments.append(Segment(keys, values, positions, marks))
        tail.drop_first(count)

    def crop(self, slot: int) -> None:
        """Forget every token at ``slot`` and later."""
        before = self.sealed
        lost = self.tail.drop_from(slot)
        self.segments = [part for segment in self.segments for part in segment.before(slot)]
        # Of what was dropped before, too, no more than stands below the slot is left.
        self.total = max(0, min(self.total - lost - before + self.sealed, slot - self.first))
        self.prompt = min(self.prompt, self.total)
        if self.window is not None:
            self.window = self.window.before(slot)

    def copy(self) -> Row:
        """A row of its own; sealed segments are shared."""
        other = object.__new__(type(self))
        other.segments, other.tail, other.window = list(self.segments), self.tail.copy(), self.window
        other.total, other.first, other.prompt = self.total, self.first, self.prompt
        return other


def _products(query: torch.Tensor, part: Part) -> torch.Tensor:
    """Dot products of queries (Hkv, G, q, Dk), in the part's basis, and its keys: (h, G, q, n)."""
    query = query[part.heads]
    return kernels.scores(query.flatten(1, 2), part.keys).unflatten(1, query.shape[1:3])


def _joined_positions(parts: list[Part]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0].positions
    if all(part.positions.dim() == 1 for part in parts):
        return torch.cat([part.positions for part in parts])
    heads = max(part.positions.shape[0] for part in parts if part.positions.dim() == 2)
    return torch.cat([part.positions.expand(heads, -1) for part in parts], dim=-1)


def _kinds(segment: Segment) -> Iterator[tuple[str, torch.Tensor]]:
    for name, part in (("keys", segment.keys), ("values", segment.values)):
        if isinstance(part, torch.Tensor):
            yield name, part
            continue
        codes = {id(plane) for plane in part.planes}
        for tensor in part.tensors():
            yield ("codes" if id(tensor) in codes else "scales"), tensor
    if isinstance(segment.positions, torch.Tensor):
        yield "positions", segment.positions
    if segment.marks is not None:
        yield "marks", segment.marks
