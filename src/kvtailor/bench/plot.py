"""Drawing a benchmark: how much faster each kernel is than SDPA, and how a step grows with the cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtailor.bench.peers import PeerRow
from kvtailor.bench.result import Bench, KernelRow, StepRow
from kvtailor.bench.table import in_threads

# The Okabe-Ito palette, and black.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#595959")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLES = ("-", "--", ":")
MANY = 8  # lines beyond which the legend stands beside them, in the order of their ends
DRAWN = ("dense", "int8", "int4", "int3", "int2", "int1", "retrieve")


def draw(bench: Bench, path: Path) -> Path:
    """Draw kernels and steps at the smallest number of threads, and write a PNG.

    Parameters
    ----------
    bench : what was measured, kernels or steps or both.
    path : where the picture goes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for panel, rows in ((_kernels, bench.kernels), (_steps, bench.steps or bench.peers)) if rows]
    wide = 3 if len({row.plan for row in bench.steps}) + len(bench.peers) > MANY else 0
    figure = Figure(figsize=(7 * max(1, len(panels)) + wide, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        panel(axes, bench)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        _add_legend(axes)
    figure.savefig(path)
    return path


def _add_legend(axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    if len(handles) <= MANY:
        if handles:
            axes.legend(frameon=False, fontsize=8)
        return
    order = sorted(range(len(handles)), key=lambda number: -handles[number].get_ydata()[-1])
    axes.legend(
        [handles[number] for number in order],
        [names[number] for number in order],
        frameon=False,
        fontsize=7,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
    )


def _kernels(axes: Any, bench: Bench) -> None:
    threads = min(row.threads for row in bench.kernels)
    rows = [row for row in bench.kernels if row.threads == threads and _is_drawn(row, bench.dtype)]
    bars = list(dict.fromkeys(_bar(row) for row in rows))
    lengths = list(dict.fromkeys(row.tokens for row in rows))
    width = 0.8 / max(1, len(lengths))
    for number, tokens in enumerate(lengths):
        heights = {_bar(row): row.speedup or 0.0 for row in rows if row.tokens == tokens}
        places = [place + (number - (len(lengths) - 1) / 2) * width for place in range(len(bars))]
        colour = COLOURS[1 + number % (len(COLOURS) - 1)]
        drawn = axes.bar(places, [heights.get(bar, 0.0) for bar in bars], width, color=colour, label=f"{tokens} tokens")
        axes.bar_label(drawn, fmt="%.1f", fontsize=7)
    axes.axhline(1.0, color=COLOURS[-1], linewidth=0.8)
    axes.set_xticks(range(len(bars)), bars, fontsize=8)
    axes.set_ylabel("times as fast as SDPA in bfloat16, its best form")
    axes.set_title(f"Decode attention of one layer, {in_threads(threads)}", loc="left")


def _is_drawn(row: KernelRow, dtype: str) -> bool:
    usual = row.precision == dtype if row.kernel == "dense" else row.kernel == "retrieve" or row.precision != "fast"
    return row.kernel in DRAWN and row.case == "plain" and usual


def _bar(row: KernelRow) -> str:
    words = [] if row.form in ("dense", "rotated") else row.form.split(", ")
    return "\n".join([row.kernel, *words])


def _steps(axes: Any, bench: Bench) -> None:
    rows: list[StepRow | PeerRow] = [*bench.steps, *bench.peers]
    threads = min(row.threads for row in rows)
    lines = _lines([row for row in bench.steps if row.threads == threads])
    for peer in bench.peers:
        if peer.threads == threads:
            name = f"{peer.engine.split()[0]}, {peer.weights}, {peer.cache}"
            lines.setdefault(name, []).append((peer.context, peer.fair_ms))
    for number, (name, points) in enumerate(lines.items()):
        x, y = zip(*sorted(points), strict=True)
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        style = STYLES[number // len(COLOURS) % len(STYLES)]
        axes.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.4, linestyle=style, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens held")
    axes.set_ylabel(f"{'processor' if threads == 1 else 'wall'} time of a step, ms")
    model = f"{bench.model} in {bench.dtype}, " if bench.steps else ""
    axes.set_title(f"Decode steps, {model}{in_threads(threads)}", loc="left")


def _lines(rows: Sequence[StepRow]) -> dict[str, list[tuple[int, float]]]:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        lines.setdefault(row.plan, []).append((row.context, row.cpu_ms if row.threads == 1 else row.ms))
    return lines
