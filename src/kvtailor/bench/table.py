"""The tables of a benchmark, for people: in the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from kvtailor.bench.peers import PeerRow
from kvtailor.bench.result import DEFAULT, Bench, KernelRow, PromptRow, StepRow

NOTHING = "-"
HOW = (
    "Medians over rounds in which every candidate ran once; rounds: {repeats}. Speedups are ratios of processor times "
    "at one thread (of the calling thread), and of wall times at more."
)
KERNELS = (
    "One layer of Llama 3.1 8B (32 query heads, 8 KV heads of 128), batch 1; other memory is read between two kernels. "
    "Speedups over PyTorch's SDPA in bfloat16: in its best form, and in its usual call with enable_gqa. GB/s of what "
    "is read, as it is stored; for pack of its input."
)
STEPS = (
    "Whole decode steps of {model} in {dtype}, caches filled with the keys and values of one text over and over. "
    "Speedups over Transformers' default cache at the same length. Error: distance of the logits from those of exact "
    "attention over the same stored numbers; at full it is what rounding alone makes of them. Medians leave out the "
    "one step in 64 in which a packed cache packs a block."
)
PROMPTS = (
    "Prompts of a text read by {model} in float32 with a fresh cache, as a multiple of the time that Transformers' "
    "default cache takes."
)


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes
    ----------
    title : above it.
    columns : group and name of each; the group is "" where there is none.
    rows : cells, as many as columns.
    words : columns of words, which come first; the others hold numbers.
    """

    title: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[str]]
    words: int


def grids(bench: Bench) -> list[Grid]:
    """All tables: kernels by length, steps by number of threads with the other engines beside them, prompts."""
    return [*_kernel_grids(bench.kernels), *_step_grids(bench), *_prompt_grids(bench.prompts)]


def captions(bench: Bench) -> list[str]:
    """What the numbers are, and what could not be measured, a line each."""
    lines = [HOW.format(repeats=bench.repeats)] if bench.kernels or bench.steps or bench.prompts else []
    lines += [KERNELS] if bench.kernels else []
    lines += [STEPS.format(model=bench.model, dtype=bench.dtype)] if bench.steps else []
    lines += [PROMPTS.format(model=bench.model)] if bench.prompts else []
    return [*lines, *(f"{note}." for note in bench.notes)]


def as_rich(grid: Grid) -> Table:
    """A table for the terminal."""
    table = Table(title=grid.title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    shown = ""
    for number, (group, name) in enumerate(grid.columns):
        head = f"{'' if group == shown else group}\n{name}"
        table.add_column(head, justify="left" if number < grid.words else "right", no_wrap=True)
        shown = group
    for row in grid.rows:
        table.add_row(*row)
    return table


def as_markdown(bench: Bench) -> str:
    """Machine, tables and captions as one Markdown text."""
    machine = [f"- {name}: {_in_words(value)}" for name, value in bench.machine.items()]
    tables = [_markdown(grid) for grid in grids(bench)]
    return "\n\n".join(["# kvtailor bench", "\n".join(machine), *tables, *captions(bench)]) + "\n"


def _markdown(grid: Grid) -> str:
    heads = [f"{group} {name}".strip() for group, name in grid.columns]
    rules = ["---" if number < grid.words else "---:" for number in range(len(heads))]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (heads, rules, *grid.rows)]
    return "\n".join([f"**{grid.title}**", "", *lines])


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _kernel_grids(rows: Sequence[KernelRow]) -> Iterator[Grid]:
    threads = list(dict.fromkeys(row.threads for row in rows))
    measures = ("ms", "CPU ms", "speedup", "over gqa", "GB/s")
    columns = [("", "kernel"), ("", "form"), *((in_threads(count), name) for count in threads for name in measures)]
    for tokens in dict.fromkeys(row.tokens for row in rows):
        lines: dict[tuple[str, str], list[str]] = {}
        for count in threads:
            for row in rows:
                if (row.tokens, row.threads) == (tokens, count):
                    lines.setdefault((row.kernel, _form(row)), []).extend(_kernel_cells(row))
        yield Grid(f"Kernels, {tokens} tokens", columns, [[*words, *cells] for words, cells in lines.items()], 2)


def _form(row: KernelRow) -> str:
    words = [row.precision if row.form == "dense" else row.form]
    words += [row.precision] if row.kernel == "sdpa" or row.precision in ("fast", "exact") else []
    return ", ".join(words + ([] if row.case == "plain" else [row.case]))


def _kernel_cells(row: KernelRow) -> list[str]:
    times = [_number(row.ms), _number(row.cpu_ms)]
    return [*times, _ratio(row.speedup), _ratio(row.speedup_gqa), _number(row.gbytes_per_s)]


def _step_grids(bench: Bench) -> Iterator[Grid]:
    rows: list[StepRow | PeerRow] = [*bench.steps, *bench.peers]
    for threads in dict.fromkeys(row.threads for row in rows):
        own = [row for row in bench.steps if row.threads == threads]
        others = [row for row in bench.peers if row.threads == threads]
        contexts = sorted({row.context for row in own} | {row.context for row in others})
        words = [("", name) for name in ("engine", "weights", "cache")]
        numbers = [(f"at {context}", name) for context in contexts for name in ("ms", "CPU ms", "speedup")]
        columns = [*words, *numbers, ("ms per 1,000", "more tokens"), ("", "error")]
        lines = [_step_line(plan, own, contexts, bench.dtype) for plan in dict.fromkeys(row.plan for row in own)]
        engines = dict.fromkeys((row.engine, row.weights, row.cache) for row in others)
        bases = {row.context: row for row in own if row.plan == DEFAULT}
        lines += [_peer_line(engine, others, contexts, bases) for engine in engines]
        yield Grid(f"Decode steps, {in_threads(threads)}", columns, lines, 3)


def _step_line(plan: str, rows: Sequence[StepRow], contexts: Sequence[int], dtype: str) -> list[str]:
    found = {row.context: row for row in rows if row.plan == plan}
    cells: list[str] = []
    for context in contexts:
        row = found.get(context)
        cells += [NOTHING] * 3 if row is None else [_number(row.ms), _number(row.cpu_ms), _ratio(row.speedup)]
    last = found[max(found)]
    errors = [row.agrees for row in found.values() if row.agrees is not None]
    error = f"{max(errors):.1e}" if errors else NOTHING
    return ["Transformers", dtype, plan, *cells, _number(last.added_ms_per_1k), error]


def _peer_line(
    engine: tuple[str, str, str], rows: Sequence[PeerRow], contexts: Sequence[int], bases: dict[int, StepRow]
) -> list[str]:
    found = {row.context: row for row in rows if (row.engine, row.weights, row.cache) == engine}
    cells: list[str] = []
    for context in contexts:
        row = found.get(context)
        cells += [NOTHING] * 3 if row is None else [*_peer_cells(row, bases.get(context))]
    first, last = found[min(found)], found[max(found)]
    more = last.context - first.context
    added = 1000 * (last.fair_ms - first.fair_ms) / more if more else None
    return [*engine, *cells, _number(added), NOTHING]


def _peer_cells(row: PeerRow, base: StepRow | None) -> tuple[str, str, str]:
    speedup = None if base is None else (base.ms if row.fair_ms == row.ms else base.cpu_ms) / row.fair_ms
    return _number(row.ms), _number(row.cpu_ms), _ratio(speedup)


def _prompt_grids(rows: Sequence[PromptRow]) -> Iterator[Grid]:
    threads = list(dict.fromkeys(row.threads for row in rows))
    columns = [("", "cache"), *((in_threads(n), name) for n in threads for name in ("ms", "CPU ms", "of default"))]
    for tokens in dict.fromkeys(row.tokens for row in rows):
        lines: dict[str, list[str]] = {}
        for row in rows:
            if row.tokens == tokens:
                cells = [_number(row.ms), _number(row.cpu_ms), _ratio(row.over_default)]
                lines.setdefault(row.plan, []).extend(cells)
        yield Grid(f"Prompts, {tokens} tokens", columns, [[name, *cells] for name, cells in lines.items()], 1)


def in_threads(count: int) -> str:
    """A number of threads in words."""
    return "1 thread" if count == 1 else f"{count} threads"


def _number(value: float | None) -> str:
    """A number with three digits or so."""
    if value is None:
        return NOTHING
    digits = next((digits for digits, below in ((3, 1), (2, 10), (1, 100)) if abs(value) < below), 0)
    return f"{value:.{digits}f}"


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{_number(value) if value >= 100 else f'{value:.2f}'}x"
