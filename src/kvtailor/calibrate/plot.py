"""Drawing what calibration measured: density, error and loss by layer, and the choice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kvtailor.calibrate.density import TAU
from kvtailor.calibrate.plans import Planned
from kvtailor.calibrate.table import Measurement, Table

PACKED, READ, CHOSEN = "#0072B2", "#E69F00", "#D55E00"  # of the Okabe-Ito palette


def draw(table: Table, one: Planned, path: Path) -> Path:
    """Draw the layers from left to right, and write a PNG.

    Parameters
    ----------
    table, one : what was measured, and the plan chosen from it.
    path : where the picture goes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, layers = len(table.options), len(table.layers)
    heights = [2.2, 0.26 * rows + 0.6, 0.26 * rows + 0.6]
    figure = Figure(figsize=(max(8, 0.32 * layers + 3), sum(heights) + 1), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    density, error, loss = figure.subplots(3, 1, height_ratios=heights, sharex=True)
    _density(density, table)
    _heat(figure, error, table, one, "error of the attention output", lambda found: found.error, 1e-3)
    _heat(figure, loss, table, one, "loss, nats per token", lambda found: found.loss, 1e-6)
    loss.set_xlabel("layer")
    loss.set_xticks(range(layers), [str(number) for number in table.layers], fontsize=7)
    figure.savefig(path)
    return path


def _density(axes: Any, table: Table) -> None:
    scores = [layer.mean_density for layer in table.layers.values()]
    spread = [layer.density for layer in table.layers.values()]
    colours = [PACKED if layer.label == "quantise" else READ for layer in table.layers.values()]
    axes.bar(range(len(scores)), scores, color=colours)
    for place, heads in enumerate(spread):
        axes.plot([place] * len(heads), heads, color="black", marker=".", markersize=3, linestyle="none")
    axes.axhline(TAU, color="#595959", linewidth=0.8, linestyle="--")
    axes.set_ylabel("density")
    axes.set_ylim(0, 1)
    axes.set_title(
        f"{table.made_for.get('name') or table.made_for['model']}: attention outside the strongest 5 % of the tokens "
        f"(dots: heads; above {TAU}, in blue, TailorKV packs)",
        loc="left",
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)


def _heat(figure: Any, axes: Any, table: Table, one: Planned, title: str, value: Any, least: float) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    names = list(table.options)
    found: list[list[Measurement]] = [[layer.options[name] for layer in table.layers.values()] for name in names]
    numbers = [[max(least, value(cell)) for cell in row] for row in found]
    top = max((number for row in numbers for number in row if math.isfinite(number)), default=least)
    colours = colormaps["viridis_r"].with_extremes(bad="black")
    image = axes.imshow(numbers, aspect="auto", cmap=colours, norm=LogNorm(least, max(top, 2 * least)))
    axes.set_yticks(range(len(names)), names, fontsize=7)
    infinite = not all(math.isfinite(number) for row in numbers for number in row)
    marks = "circles: the plan's choice" + ("; black: infinite" if infinite else "")
    axes.set_title(f"{title} ({marks})", loc="left", fontsize=9)
    chosen = [
        (column, names.index(name)) for column, number in enumerate(table.layers) for name in set(one.choice[number])
    ]
    axes.plot(
        *zip(*chosen, strict=True), color=CHOSEN, marker="o", markersize=6, fillstyle="none", markeredgewidth=1.6,
        linestyle="none",
    )  # fmt: skip
    figure.colorbar(image, ax=axes, pad=0.01)
