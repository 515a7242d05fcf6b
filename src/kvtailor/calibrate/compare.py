"""Planned layers beside one option everywhere, and beside TailorKV's labels, each pair within the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from kvtailor.calibrate.capture import Capture
from kvtailor.calibrate.evaluate import Evaluation, default, evaluate
from kvtailor.calibrate.options import CHANNEL
from kvtailor.calibrate.plans import Count, Names, Planned, default_bytes, labelled, uniform, within_bytes
from kvtailor.calibrate.table import Table

LABELS_TOP = "codes:10%"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Pair:
    """A plan, and the planner's within the same bytes.

    Attributes
    ----------
    share : the bytes, of the default cache.
    other, planned : on the texts that were not calibrated on.
    other_predicted, planned_predicted : sums of the layers' losses in the table.
    """

    share: float
    other: Evaluation
    planned: Evaluation
    other_predicted: float
    planned_predicted: float

    @property
    def is_won(self) -> bool:
        """Whether the planned layers lose no more."""
        return self.planned.loss <= self.other.loss


@dataclass(frozen=True)
class Comparison:
    """All pairs.

    Attributes
    ----------
    count : how bytes are counted, "held" or "fast".
    tokens, held_out : of each text.
    texts : number of texts.
    default : the default cache.
    pairs : by rising bytes.
    """

    count: Count
    tokens: int
    held_out: int
    texts: int
    default: Evaluation
    pairs: list[Pair]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return asdict(self)


def rivals(table: Table, count: Count) -> list[Planned]:
    """Plans that the planner must beat, by rising bytes: those that hold less than the default cache.

    Every option everywhere, and TailorKV's labels where the table has them.
    """
    plans = [uniform(table, name) for name, one in table.options.items() if not one.entry.is_full]
    if {CHANNEL, LABELS_TOP} <= set(table.options):
        plans.append(labelled(table, LABELS_TOP))
    smaller = [one for one in plans if one.bytes_of(count) < default_bytes(table)]
    return sorted(smaller, key=lambda one: one.bytes_of(count))


def compare(
    model: PreTrainedModel,
    table: Table,
    seen: Sequence[Capture],
    count: Count = "held",
    heads: bool = False,
    progress: Progress = lambda words: None,
) -> Comparison:
    """Measure every rival, and what the planner makes of the rival's bytes.

    Parameters
    ----------
    model : the model.
    table : what was measured on other texts.
    seen : what the model saw of the texts to compare on.
    count : how bytes are counted.
    heads : whether the planner may keep each KV head in its own way.
    progress : called with a few words before each plan.
    """
    pairs = []
    known: dict[tuple[Names, ...], Evaluation] = {}
    for rival in rivals(table, count):
        progress(rival.plan.name)
        limit = rival.bytes_of(count)
        ours = within_bytes(table, limit, count, heads=heads)
        layers = tuple(ours.choice.values())
        if layers not in known:
            known[layers] = evaluate(model, seen, ours.plan)
        pairs.append(
            Pair(
                share=limit / default_bytes(table),
                other=evaluate(model, seen, rival.plan),
                planned=known[layers],
                other_predicted=rival.loss,
                planned_predicted=ours.loss,
            )
        )
    return Comparison(count, seen[0].prompt, seen[0].held_out, len(seen), default(seen), pairs)
