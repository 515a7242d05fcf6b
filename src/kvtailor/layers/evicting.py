"""A layer that holds a budget of tokens, exactly as they came."""

from __future__ import annotations

from typing import Any

import torch

from kvtailor.kernels import native
from kvtailor.layers.allowance import Costs
from kvtailor.layers.policied import PolicyLayer
from kvtailor.layers.row import Part, Row
from kvtailor.layers.tail import whole_blocks
from kvtailor.policies.order import Streaming
from kvtailor.policies.selection import protect, strongest


class EvictingLayer(PolicyLayer):
    """Tokens held in the model's dtype, a budget of them per KV head; heads may share a layer's budget unevenly."""

    def costs(self) -> Costs:
        """Bytes per token and of the queries kept."""
        return Costs(self.dense_token_bytes(), self.window_bytes())

    def reserve(self, row: Row, capacity: int, count: int) -> None:
        """Take the room of the whole prompt at once where the budget allows it; never more than the budget."""
        if not self._holds_always:
            return
        row.tail.limit = capacity
        ahead = max(count, self.step.expected - self.seen + count if self.step.prompt else 0)
        if row.tail.aligned:
            row.tail.reserve([max(n + count, min(capacity, n + ahead)) for n in row.tail.lengths])

    def evict(self, row: Row, capacity: int, target: int) -> None:
        """Drop the least important tokens of every head."""
        held = self.held(row)
        sinks, recent = self.plan.keep.sinks, self.allowance.recent(capacity, target)
        importance = self.policy.importance(held)
        targets = self.policy.head_capacities(importance, held, target, sinks, recent)
        index = strongest(protect(importance, held.lengths, sinks, recent), held.lengths, targets)
        if [len(i) for i in index] == row.tail.lengths:
            return
        row.tail.keep(index, self._rooms(targets, capacity - target))
        self.dropped = True

    def _rooms(self, targets: list[int], coming: int) -> list[int]:
        if self._holds_always:
            return [target + coming for target in targets]
        return [whole_blocks(target + 1) for target in targets]

    @property
    def _renumbers(self) -> bool:
        return self.rotation is not None and isinstance(self.policy, Streaming) and self.dropped

    def visible_parts(self, row: Row) -> list[Part]:
        """Everything held; a renumbering policy sees the sinks moved up to the rest."""
        parts = super().visible_parts(row)
        return [piece for part in parts for piece in self._renumbered(part, row.total)] if self._renumbers else parts

    def handed(self, row: Row) -> native.Row:
        """The same for the C++ kernels."""
        if not self._renumbers:
            return super().handed(row)
        return [_handed(part) for part in self.visible_parts(row)], row.tail.handed, [0] * self.heads

    def _renumbered(self, part: Part, total: int) -> list[Part]:
        sinks = self.plan.keep.sinks
        keys, values, slots = part.keys, part.values, part.positions
        if sinks == 0 or slots.dim() != 1 or len(slots) <= sinks or not isinstance(keys, torch.Tensor):
            return [part]
        assert self.rotation is not None and isinstance(values, torch.Tensor)
        gap = total - part.length  # tokens dropped: padding between the sinks and the rest has no positions
        near = Part(part.heads, self.rotation.shift(keys[:, :sinks], gap), values[:, :sinks], slots[:sinks])
        return [near, Part(part.heads, keys[:, sinks:], values[:, sinks:], slots[sinks:])]


def _handed(part: Part) -> Any:
    assert isinstance(part.keys, torch.Tensor) and isinstance(part.values, torch.Tensor)
    return native.hand_segment(part.keys, part.values, part.positions.int())
