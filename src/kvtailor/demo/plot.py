"""Drawing what the demonstration measured: agreement over bytes held."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtailor.demo.run import Demo, Measured

# family -> (label, colour of the Okabe-Ito palette, marker)
STYLES = {
    "snapkv": ("snapkv, budgets of 10 to 50 %", "#0072B2", "o"),
    "h2o": ("h2o, same budgets", "#D55E00", "s"),
    "streaming": ("streaming, same budgets", "#009E73", "^"),
    "packed": ("all tokens, packed to 1 to 8 bits", "#000000", "D"),
}
GREY = "#595959"
NEAR = 3.0  # percent; points closer than this share a label


def draw(demo: Demo, path: Path) -> Path:
    """Draw agreement with the default cache over bytes held, and write a PNG.

    Parameters
    ----------
    demo : what was measured.
    path : where the picture goes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _frame(axes, demo)
    for family, points in demo.curves.items():
        _curve(axes, family, points, demo.bytes_default)
    _points(axes, demo)
    if demo.curves:
        axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)
    return path


def _frame(axes: Any, demo: Demo) -> None:
    axes.set_xlabel("bytes held, % of the default cache")
    axes.set_ylabel("next tokens that agree with the default cache, %")
    axes.set_title(
        f"{demo.model}: {demo.prompt_tokens} tokens of prompt, {demo.continuation_tokens} next tokens compared",
        loc="left",
    )
    axes.set_xlim(0, 106)
    axes.set_ylim(_floor(demo), 102)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _floor(demo: Demo) -> float:
    """The lower end of the vertical axis: a multiple of ten well below every point."""
    every = [*demo.rows, *(point for points in demo.curves.values() for point in points)]
    return max(0, 10 * (min(100 * point.agreement for point in every) // 10) - 10)


def _curve(axes: Any, family: str, points: list[Measured], default: int) -> None:
    label, colour, marker = STYLES[family]
    x, y = _places(points, default)
    axes.plot(x, y, color=colour, marker=marker, markersize=6, linewidth=1.6, label=label)
    if family == "packed":
        for point, left, up in zip(points, x, y, strict=True):
            _label(axes, point.plan, left, up, colour, (-7, 3), "right")


def _points(axes: Any, demo: Demo) -> None:
    """The plans of the table that no curve holds; neighbours share a label."""
    drawn = {point.plan for points in demo.curves.values() for point in points}
    loose = [row for row in demo.rows if row.plan not in drawn]
    x, y = _places(loose, demo.bytes_default)
    axes.plot(x, y, color=GREY, marker="*", markersize=10, linestyle="none")
    labels: dict[tuple[float, float], str] = {}
    for row, left, up in zip(loose, x, y, strict=True):
        near = next((at for at in labels if abs(at[0] - left) < NEAR and abs(at[1] - up) < NEAR), None)
        labels[near or (left, up)] = f"{labels[near]}, {row.plan}" if near else row.plan
    for (left, up), text in labels.items():
        _label(axes, text, left, up, GREY, (4, -15), "center")


def _label(axes: Any, text: str, left: float, up: float, colour: str, shift: tuple[int, int], side: str) -> None:
    axes.annotate(text, (left, up), xytext=shift, textcoords="offset points", ha=side, color=colour, fontsize=9)


def _places(points: list[Measured], default: int) -> tuple[list[float], list[float]]:
    return [100 * point.bytes_held / default for point in points], [100 * point.agreement for point in points]
