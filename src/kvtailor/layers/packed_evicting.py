"""A layer that holds a budget of tokens, packed: eviction drops whole blocks of codes."""

from __future__ import annotations

import torch

from kvtailor.arranged import Codes
from kvtailor.formats import GROUP_TOKENS
from kvtailor.layers.allowance import Costs
from kvtailor.layers.packing import Packing
from kvtailor.layers.policied import PolicyLayer
from kvtailor.layers.row import Row
from kvtailor.layers.segment import Segment, run_of
from kvtailor.policies.selection import protect


class PackedEvictingLayer(PolicyLayer):
    """A budget of tokens, packed: eviction drops whole blocks of codes, for all heads together."""

    def check_sizes(self) -> None:
        """Raise PlanError if the format cannot hold heads of these sizes."""
        self.packing = Packing(self.plan.form, *self.dims, path=self.path)

    @property
    def is_arranged(self) -> bool:
        """Whether the codes stand in the order of the C++ kernels."""
        return self.packing.path is not None

    most_at_once = GROUP_TOKENS  # what the exact part leaves room for

    def costs(self) -> Costs:
        """A packed token's bytes; what stays exact is a fixed cost."""
        element = torch.empty(0, dtype=self.dtype).element_size()
        extra = self.heads * (4 + (4 if self.marked else 0))
        token = self.packing.token_bytes(self.heads, self.dims, element) + extra
        fixed = self.window_bytes() + int(self.packing.exact_room * (self.dense_token_bytes() - token))
        return Costs(token, fixed, self.plan.undroppable)

    def make_room(self, count: int) -> None:
        """Pack the blocks that are due, then bring every row to its budget."""
        for row in self.rows:
            self.packing.seal(row)
        super().make_room(count)

    def evict(self, row: Row, capacity: int, target: int) -> None:
        """Drop the packed blocks of least mean importance."""
        going = self._weakest(row, self._block_worth(row, capacity, target), max(row.lengths) - target)
        if going:
            row.segments = [
                kept
                for number, segment in enumerate(row.segments)
                if (kept := without(segment, {block for place, block in going if place == number})) is not None
            ]
            self.dropped = True

    def _weakest(self, row: Row, worth: dict[tuple[int, int], float], excess: int) -> set[tuple[int, int]]:
        """The blocks of least worth that free ``excess`` tokens, or all that may go."""
        going = set()
        for block in sorted((one for one in worth if worth[one] < torch.inf), key=lambda one: (worth[one], one)):
            if excess > 0:
                going.add(block)
                excess -= min(GROUP_TOKENS, row.segments[block[0]].length)
        return going

    def _block_worth(self, row: Row, capacity: int, target: int) -> dict[tuple[int, int], float]:
        held = self.held(row)
        recent = self.allowance.recent(capacity, target)
        scores = protect(self.policy.importance(held), held.lengths, self.plan.keep.sinks, recent).mean(dim=0)
        worth, place = {}, 0
        for number, segment in enumerate(row.segments):
            if segment.is_packed:  # in whole blocks, or what a crop left of one
                blocks = scores[place : place + segment.length].split(GROUP_TOKENS)
                worth.update({(number, block): float(part.mean()) for block, part in enumerate(blocks)})
            place += segment.length
        return worth


def without(segment: Segment, blocks: set[int]) -> Segment | None:
    """A packed segment without some of its blocks; None if nothing is left."""
    if not blocks:
        return segment
    stay = [block for block in range(-(-segment.length // GROUP_TOKENS)) if block not in blocks]
    if not stay:
        return None
    assert isinstance(segment.keys, Codes) and isinstance(segment.values, Codes)
    index = torch.tensor(stay, device=segment.device)
    tokens = (index[:, None] * GROUP_TOKENS + torch.arange(GROUP_TOKENS, device=segment.device)).flatten()
    marks = None if segment.marks is None else segment.marks[:, tokens]
    return Segment(
        segment.keys.select_blocks(index),
        segment.values.select_blocks(index),
        run_of(segment.slots()[tokens].int()),
        marks,
    )
