"""What calibration found, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvtailor.calibrate.compare import Comparison
from kvtailor.calibrate.density import TAU
from kvtailor.calibrate.plans import Names, Planned, default_bytes, in_words
from kvtailor.calibrate.table import LayerTable, Table
from kvtailor.report import human_bytes


def as_markdown(table: Table, one: Planned, machine: str, comparison: Comparison | None = None) -> str:
    """The choice, the layers, every option in every layer, and the comparison if there is one.

    Parameters
    ----------
    table, one : what was measured, and the plan chosen from it.
    machine : where, in words.
    comparison : with other plans.
    """
    made_for = table.made_for
    parts = [
        f"# Plan for {made_for.get('name') or made_for['model']}",
        f"{summary(table, one)} {machine}, {made_for['date']}.",
        "## Layers",
        markdown(LAYER_COLUMNS, [layer_row(table, number, names) for number, names in one.choice.items()]),
        f"Density: attention that the strongest 5 % of the tokens leave uncovered; TailorKV's label (tau {TAU}). "
        "Error: distance of the attention output from the exact one over its length, mean over query heads (range over "
        "them). Loss: divergence of the next token's distribution when this layer alone is kept so.",
        "## Error of every option, %",
        _grid(table, lambda layer, name: f"{100 * layer.options[name].error:.1f}"),
        "## Loss of every option, thousandths of a nat per token",
        _grid(table, lambda layer, name: f"{1000 * layer.options[name].loss:.2f}"),
    ]
    if comparison is not None:
        parts += ["## Beside other plans of the same bytes", comparison_words(comparison), comparison_table(comparison)]
    return "\n\n".join(parts) + "\n"


LAYER_COLUMNS = ("layer", "density", "label", "kept as", "error, % (heads)", "loss, mnat", "held", "fast")


def summary(table: Table, one: Planned) -> str:
    """The choice in two sentences."""
    default = default_bytes(table)
    begin = "The" if table.context is None else f"With {table.context} tokens the"
    texts = f"{len(table.texts)} text" + ("s" if len(table.texts) > 1 else "")
    return (
        f"{len(table.options)} options in {len(table.layers)} layers, measured on {table.held_out} held-out tokens "
        f"behind {', '.join(str(count) for count in table.tokens)} tokens of {texts}, in {table.dtype}. "
        f"{begin} plan holds {human_bytes(one.bytes_held)} ({one.bytes_held / default:.0%} of the default cache), "
        f"{human_bytes(one.bytes_fast)} ({one.bytes_fast / default:.0%}) of it in fast memory; its layers' losses add "
        f"up to {one.loss:.3g} nats per token."
    )


def layer_row(table: Table, number: int, names: Names) -> tuple[str, ...]:
    """One layer and its option, or those of its heads, as cells under ``LAYER_COLUMNS``."""
    layer = table.layers[number]
    found = layer.kept_as(names)
    heads = f"{100 * min(found.errors):.1f}-{100 * max(found.errors):.1f}"
    return (
        str(number),
        f"{layer.mean_density:.3f}",
        layer.label,
        in_words(names),
        f"{100 * found.error:.1f} ({heads})",
        f"{1000 * found.loss:.2f}",
        human_bytes(found.bytes_held),
        human_bytes(found.bytes_fast),
    )


def comparison_words(comparison: Comparison) -> str:
    """What stands in the comparison, and where the planner loses."""
    lost = [pair.other.plan for pair in comparison.pairs if not pair.is_won]
    verdict = f"The planner loses to {', '.join(lost)}." if lost else "The planner loses to none."
    return (
        f"On {comparison.texts} text(s) that nothing was calibrated on, {comparison.held_out} held-out tokens behind "
        f"{comparison.tokens} each; bytes {comparison.count}. Loss: divergence of the next token's distribution from "
        f"the default cache's, nats per token; in brackets the sum that the table predicts. The default cache's "
        f"perplexity is {comparison.default.perplexity:.2f}. {verdict}"
    )


COMPARISON_COLUMNS = (
    "plan", "bytes", "loss", "planned, same bytes", "times less", "perplexity", "planned", "agreement", "planned",
)  # fmt: skip


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Pairs as cells under ``COMPARISON_COLUMNS``."""
    return [
        (
            pair.other.plan,
            f"{pair.share:.1%}",
            f"{pair.other.loss:.4f} ({pair.other_predicted:.4f})",
            f"{pair.planned.loss:.4f} ({pair.planned_predicted:.4f})",
            _times(pair.other.loss, pair.planned.loss),
            f"{pair.other.perplexity:.2f}",
            f"{pair.planned.perplexity:.2f}",
            f"{pair.other.agreement:.0%}",
            f"{pair.planned.agreement:.0%}",
        )
        for pair in comparison.pairs
    ]


def _times(more: float, less: float) -> str:
    if less == 0 or not math.isfinite(less):
        return "-"
    return f"{more / less:.2f}" if more < 100 * less else "over 100"


def comparison_table(comparison: Comparison) -> str:
    """The same as Markdown."""
    return markdown(COMPARISON_COLUMNS, comparison_rows(comparison))


def _grid(table: Table, cell: Callable[[LayerTable, str], str]) -> str:
    names = list(table.options)
    rows = [(str(number), *(cell(layer, name) for name in names)) for number, layer in table.layers.items()]
    return markdown(("layer", *names), rows)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
