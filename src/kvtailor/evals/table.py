"""A comparison as tables that can be pasted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from kvtailor.evals.statistics import Cell, Interval, unsolved
from kvtailor.report import human_bytes

COLUMNS = (
    "plan", "score (95 %)", "less the full cache's (95 %)", "bytes held", "fast", "peak", "held", "ms per token",
    "s to compress",
)  # fmt: skip
FOLLOWING_COLUMNS = (
    "plan", "perplexity (95 %)", "KL, nats", "agreement", "bytes held", "fast", "peak", "held", "ms per token",
    "s to compress",
)  # fmt: skip


class Section(NamedTuple):
    """The table of one task at one length."""

    title: str
    cells: list[Cell]
    columns: Sequence[str]
    rows: list[tuple[str, ...]]


def sections(found: Sequence[Cell]) -> list[Section]:
    """A table for every task and length, in the order of the cells."""
    return [
        Section(title(own := list(group)), own, columns_of(own[0]), [row(one) for one in own])
        for _, group in groupby(found, key=lambda one: (one.task, one.tokens))
    ]


def title(own: Sequence[Cell]) -> str:
    """Task, length, samples, and whether the full cache fails it."""
    first = own[0]
    words = f"{first.task}, {first.tokens} tokens, {first.samples} sample" + ("s" if first.samples != 1 else "")
    if failed := unsolved(own):
        words += f": the full cache scores {failed[0].score.mean:.0%}, so this tells nothing about caches"
    return words


def columns_of(one: Cell) -> Sequence[str]:
    """Columns of a cell's table."""
    return FOLLOWING_COLUMNS if one.is_better_low else COLUMNS


def row(one: Cell) -> tuple[str, ...]:
    """A cell as text under its columns."""
    scores: tuple[str, ...]
    if one.is_better_low:
        scores = (perplexity(one.score), _optional(one.kl, "{:.4f}"), _optional(one.agreement, "{:.1%}"))
    else:
        scores = (percent(one.score), "" if one.is_full or one.difference is None else points(one.difference))
    return (
        one.label,
        *scores,
        f"{one.share:.1%}",
        f"{one.share_fast:.1%}",
        f"{one.share_peak:.1%}",
        human_bytes(one.bytes_held),
        f"{one.token_ms:.0f}" if one.token_ms else "",
        f"{one.compress_seconds:.2f}",
    )


def percent(found: Interval) -> str:
    """A score for people: "87 (70 to 97) %"."""
    return f"{100 * found.mean:.0f} ({100 * found.low:.0f} to {100 * found.high:.0f}) %"


def points(found: Interval) -> str:
    """A difference in points: "-13 (-27 to -3)"."""
    return f"{100 * found.mean:+.0f} ({100 * found.low:+.0f} to {100 * found.high:+.0f})"


def perplexity(found: Interval) -> str:
    """A mean loss as perplexity: "12.87 (11.90 to 13.80)"."""
    return f"{math.exp(found.mean):.2f} ({math.exp(found.low):.2f} to {math.exp(found.high):.2f})"


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def markdown(found: Sequence[Cell]) -> str:
    """All tables as Markdown."""
    parts = []
    for section in sections(found):
        lines = [section.columns, ["---", *["---:"] * (len(section.columns) - 1)], *section.rows]
        parts += [f"**{section.title}**", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join(parts) + "\n"
