"""Drawing a comparison: quality over bytes, over depth and length, time over context, and what heads keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kvtailor.evals.naming import cache_name
from kvtailor.evals.result import Row
from kvtailor.evals.statistics import Cell, front

# The Okabe-Ito palette, black and grey: told apart by people who do not see all colours, and by their markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8c6d31", "#595959")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
GREY = "#8a8a8a"
WIDTH, HEIGHT = 5.6, 4.2  # of a panel, inches
ACROSS = 3
ALONE = 9.0  # the width of a panel alone
LEGEND_ENTRY, LEGEND_LINE = 2.2, 0.19  # inches
DEPTHS = 5  # bands
ALIKE = 0.02  # shares kept that differ by no more are not drawn
MOST_HEADS = 12  # plans in the picture of what heads keep


def draw(found: Sequence[Cell], rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every picture that there is something for, and write PNGs.

    Parameters
    ----------
    found : cells.
    rows : what they were made of.
    folder : where the pictures go.
    """
    placed = list(dict.fromkeys(row.task for row in rows if row.depth is not None))
    figures = {
        "quality.png": quality(found),
        **{f"depth-{task}.png": depth([row for row in rows if row.task == task]) for task in placed},
        "time.png": time(found),
        "kept.png": kept(rows),
    }
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(folder / name)
            paths.append(folder / name)
    return paths


def quality(found: Sequence[Cell]) -> Any:
    """Score over bytes held, a panel for each task and length; a line joins the plans that none beats in both."""
    places = list(dict.fromkeys((one.task, one.tokens) for one in found))
    styles = _styles(found)
    width = ALONE if len(places) == 1 else WIDTH
    figure, panels = _panels(
        len(places), HEIGHT, width=width, below=_legend_height(styles, width * min(ACROSS, len(places)))
    )
    for axes, (task, tokens) in zip(panels, places, strict=False):
        own = [one for one in found if (one.task, one.tokens) == (task, tokens)]
        _quality(axes, own, styles)
        axes.set_title(f"{task}, {tokens} tokens, {own[0].samples} samples", loc="left", fontsize=10)
    _legend_below(figure, panels[0], styles)
    return figure


def _quality(axes: Any, own: Sequence[Cell], styles: dict[str, tuple[str, str]]) -> None:
    factor = 1 if own[0].is_better_low else 100
    best = front(own)
    axes.plot(
        [100 * one.share for one in best], [factor * one.score.mean for one in best], color=GREY, linewidth=5,
        alpha=0.3, solid_capstyle="round", zorder=1,
    )  # fmt: skip
    for name, (colour, marker) in styles.items():
        line = sorted((one for one in own if _name(one) == name), key=lambda one: one.share)
        for one in line:
            axes.plot(
                [100 * one.share] * 2, [factor * one.score.low, factor * one.score.high], color=colour, linewidth=0.8,
                alpha=0.6,
            )  # fmt: skip
        if line:
            axes.plot(
                [100 * one.share for one in line], [factor * one.score.mean for one in line], color=colour,
                marker=marker, markersize=6, linewidth=1.3,
            )  # fmt: skip
    axes.set_xlabel("bytes held, % of the default cache")
    axes.set_ylabel("loss, nats per token (less is better)" if own[0].is_better_low else "score, %")
    axes.set_xlim(left=0)
    if not own[0].is_better_low:
        axes.set_ylim(-3, 103)
    _bare(axes)


def depth(rows: Sequence[Row]) -> Any:
    """Scores of one task by plan and by where the answer stands, a panel for each length of the context."""
    placed = [row for row in rows if row.depth is not None]
    lengths = sorted({row.tokens for row in placed})
    names = list(dict.fromkeys(row.label for row in placed))
    figure, panels = _panels(len(lengths), 0.9 + 0.24 * len(names), across=4, width=4.6)
    image = None
    for axes, tokens in zip(panels, lengths, strict=False):
        own = [[row for row in placed if (row.label, row.tokens) == (name, tokens)] for name in names]
        grid = [[_mean_at(line, band) for band in range(DEPTHS)] for line in own]
        image = axes.imshow(grid, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        _write_scores(axes, grid)
        axes.set_title(f"{placed[0].task}, {tokens} tokens", loc="left", fontsize=9)
        axes.set_yticks(range(len(names)), names if axes is panels[0] else [""] * len(names), fontsize=7)
        axes.set_xticks(range(DEPTHS), [f"{20 * band}-{20 * band + 20}" for band in range(DEPTHS)], fontsize=7)
    figure.supxlabel("depth of the answer in the context, %", fontsize=9)
    figure.colorbar(image, ax=list(panels), label="score, %", pad=0.01, shrink=0.6)
    return figure


def _mean_at(rows: Sequence[Row], band: int) -> float:
    own = [row.score for row in rows if row.depth is not None and min(DEPTHS - 1, int(row.depth * DEPTHS)) == band]
    return 100 * fmean(own) if own else float("nan")


def _write_scores(axes: Any, grid: Sequence[Sequence[float]]) -> None:
    for line, scores in enumerate(grid):
        for column, score in enumerate(scores):
            if score == score:  # a number
                colour = "white" if score < 55 else "black"
                axes.text(column, line, f"{score:.0f}", ha="center", va="center", fontsize=7, color=colour)


def time(found: Sequence[Cell]) -> Any:
    """Milliseconds of a token, and seconds to read and compress a context, over its length."""
    timed = [one for one in found if one.token_ms]
    styles = _styles(timed)
    if len({one.tokens for one in timed}) < 2:
        return None
    figure, panels = _panels(2, HEIGHT, below=_legend_height(styles, 2 * WIDTH))
    for axes, words, value in (
        (panels[0], "ms per decoded token, median", lambda one: one.token_ms),
        (panels[1], "seconds to read and compress the context", lambda one: one.read_seconds + one.compress_seconds),
    ):
        for label, (colour, marker) in styles.items():
            line: dict[float, list[float]] = {}
            for one in timed:
                if _name(one) == label:
                    line.setdefault(one.tokens, []).append(value(one))
            axes.plot(
                sorted(line), [fmean(line[tokens]) for tokens in sorted(line)], color=colour, marker=marker,
                linewidth=1.3, markersize=5,
            )  # fmt: skip
        axes.set_xlabel("tokens of context")
        axes.set_ylabel(words)
        axes.set_ylim(bottom=0)
        _bare(axes)
    _legend_below(figure, panels[0], styles)
    return figure


def kept(rows: Sequence[Row]) -> Any:
    """Share of the longest context that each KV head of each layer keeps, a panel for each plan whose heads differ."""
    longest = max((row.tokens for row in rows if row.kept), default=0)
    chosen: dict[str, Row] = {}
    for row in rows:
        shares = [count / (row.context_tokens - 1) for heads in row.kept for count in heads]
        if row.tokens == longest and shares and max(shares) - min(shares) > ALIKE:
            chosen.setdefault(row.label, row)
    if not chosen:
        return None
    some = dict(list(chosen.items())[:MOST_HEADS])
    heads = max(len(layer) for row in some.values() for layer in row.kept)
    figure, panels = _panels(len(some), 1.1 + 0.22 * heads, across=2, width=7)
    image = None
    for axes, (label, row) in zip(panels, some.items(), strict=False):
        grid = [
            [100 * layer[head] / (row.context_tokens - 1) if head < len(layer) else float("nan") for layer in row.kept]
            for head in range(heads)
        ]
        image = axes.imshow(grid, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        axes.set_title(f"{label}: tokens kept, {row.task}, {longest} tokens", loc="left", fontsize=9)
        axes.set_yticks(range(heads), [str(head) for head in range(heads)], fontsize=7)
        axes.set_ylabel("KV head", fontsize=8)
        axes.set_xlabel("layer", fontsize=8)
    figure.colorbar(image, ax=list(panels), label="kept, %", pad=0.01)
    return figure


def _panels(
    count: int, height: float, across: int = ACROSS, width: float = WIDTH, below: float = 0.0
) -> tuple[Any, list[Any]]:
    """A figure with panels and room below them; those beyond ``count`` stay empty."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(across, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(width * columns + 0.8, height * lines + 0.9 + below), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels


def _name(one: Cell) -> str:
    return cache_name(one.engine, one.plan)


def _styles(found: Sequence[Cell]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each plan, whatever its budget."""
    names = list(dict.fromkeys(_name(one) for one in found))
    return {
        name: (COLOURS[place % len(COLOURS)], MARKERS[(place // len(COLOURS) + place) % len(MARKERS)])
        for place, name in enumerate(names)
    }


def _legend_below(figure: Any, axes: Any, styles: dict[str, tuple[str, str]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, marker=marker, label=name) for name, (colour, marker) in styles.items()]
    handles.append(Line2D([], [], color=GREY, linewidth=5, alpha=0.3, label="none better in both"))
    columns = _legend_columns(figure.get_figwidth(), len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _legend_columns(width: float, entries: int) -> int:
    return min(entries, max(2, int(width / LEGEND_ENTRY)))


def _legend_height(styles: dict[str, tuple[str, str]], width: float) -> float:
    """Inches that a legend takes below panels of a width."""
    entries = len(styles) + 1
    return LEGEND_LINE * -(-entries // _legend_columns(width, entries))


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
