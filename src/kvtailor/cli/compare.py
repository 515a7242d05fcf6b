"""``kvtailor compare``: what plans cost in quality, memory and time on a model and on tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtailor.cli.demo import bar, make_folder
from kvtailor.cli.machine import describe_machine
from kvtailor.cli.settings import active_kernels, check_reads_text, console, count, dtype_of, quiet
from kvtailor.errors import EvaluationError, KVTailorError

if TYPE_CHECKING:
    from kvtailor.evals.grid import Grid
    from kvtailor.evals.result import Results, Row
    from kvtailor.evals.sample import Task
    from kvtailor.evals.statistics import Cell
    from kvtailor.models.load import Loaded

PLANS = "int8,int4,int3,int2,snapkv,h2o,streaming,snapkv+int4"
BUDGETS = "0.5,0.25,0.1"
TASKS = "needle,perplexity"
QUICK_TASKS = "needle,needle-after,perplexity"
QUICK_PLANS = "int4,int2,snapkv,streaming"
QUICK_SAMPLES, QUICK_FOLLOWING = 4, 32
SAMPLES = 30
PAGE, TABLE = "report.html", "report.md"


def compare(
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub name or an embedded model.")] = "smollm2",
    plans: Annotated[
        str | None,
        typer.Option(help=f"Presets and plan files, with commas between them. Default: {PLANS}."),
    ] = None,
    budgets: Annotated[
        str, typer.Option(help="Shares of the default cache's bytes, for plans that take a budget and were given none.")
    ] = BUDGETS,
    tasks: Annotated[
        str | None, typer.Option(help=f"With commas between them; see --list-tasks. Default: {TASKS}.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Lengths of a context, with commas between them.")] = "1000",
    samples: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help=f"Of each task at each length. Default: {SAMPLES}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    text: Annotated[Path | None, typer.Option(help="A text of your own for the task perplexity.")] = None,
    following: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Tokens that the task perplexity is measured on.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A folder with LongBench, InfiniteBench or SCBench files, or a name on the hub.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"Few plans and {QUICK_SAMPLES} samples: minutes, and wide intervals.")
    ] = False,
    beside: Annotated[
        list[Path] | None,
        typer.Option("--with", help="Rows of another comparison, of other engines too, to show beside; repeatable."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: float32, bfloat16 or float16.")] = "float32",
    read_dtype: Annotated[
        str | None,
        typer.Option(help="Of the pass that reads a context, where float32 is faster; default: as --dtype."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda.")] = "cpu",
    ray: Annotated[bool, typer.Option("--ray", help="Spread samples over the machines of a Ray cluster.")] = False,
    out: Annotated[Path, typer.Option(help="The folder of the results; an interrupted run goes on there.")] = Path(
        "out"
    ),
    list_tasks: Annotated[bool, typer.Option("--list-tasks", help="Print the tasks and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Compare plans on tasks: quality, bytes and time, with intervals, as a page, pictures and tables."""
    if list_tasks:
        print_tasks(as_json)
        return
    active_kernels()
    numbers, read_numbers = dtype_of(dtype), dtype_of(read_dtype or dtype)
    make_folder(out)
    with quiet():
        from kvtailor.evals.grid import Grid, about
        from kvtailor.evals.result import Results, read_rows
        from kvtailor.models.load import load

        others = [row for folder in beside or [] for row in read_rows(folder)]
        named = words(tasks or (QUICK_TASKS if quick else TASKS), "tasks")
        grid = Grid(
            tasks=[task_of(name, text, following or (QUICK_FOLLOWING if quick else None), data) for name in named],
            lengths=[whole(one, "--tokens") for one in words(tokens, "--tokens")],
            plans=words(plans or (QUICK_PLANS if quick else PLANS), "plans"),
            budgets=[share(one) for one in words(budgets, "--budgets")],
            samples=samples or (QUICK_SAMPLES if quick else SAMPLES),
            seed=seed,
        )
        loaded = load(model, numbers, device, progress=True)
        check_reads_text(loaded)
        if loaded.model.config.is_encoder_decoder:
            raise KVTailorError(f"model {model!r} is an encoder-decoder: allowed are models that go on with a text")
        machine = describe_machine()
        reader = loaded if read_numbers == numbers else load(model, read_numbers, device)
        run = about(loaded, seed, reader) | {"machine": f"{machine['processor']}, {machine['cores']} cores"}
        results = Results(out, run)
        notes = measure(loaded, grid, results, ray, reader)
        found, files = report([*results.rows, *others], out, notes)
    if as_json:
        typer.echo(json.dumps({"cells": [asdict(one) for one in found], "notes": notes, "files": files}))
    else:
        show(found, notes, files)


def words(text: str, name: str) -> list[str]:
    """The words of a list with commas; raises EvaluationError if there are none."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise EvaluationError(f"{name} {text!r} names nothing: allowed are words with commas between them")
    return found


def whole(text: str, name: str) -> int:
    """A whole number from 1; raises EvaluationError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise EvaluationError(f"{name} {text!r} cannot be used: allowed are whole numbers from 1")
    return int(text)


def share(text: str) -> float:
    """A share such as 0.25 or 25%; raises EvaluationError for anything else."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise EvaluationError(
            f"--budgets {text!r} cannot be used: allowed are shares above 0 to 1, such as 0.25 or 25%"
        )
    return value


def task_of(name: str, text: Path | None, following: int | None, data: str | None) -> Task:
    """A task by name, with the user's text or data where it takes them."""
    from kvtailor.evals.tasks.registry import TASKS, task

    options: dict[str, Any] = {}
    found: Any = TASKS.get(name)
    for option, value in (("file", text), ("following", following), ("source", data)):
        if value is not None and hasattr(found, option):
            options[option] = value
    return task(name, **options)


def measure(loaded: Loaded, grid: Grid, results: Results, ray: bool, reader: Loaded) -> list[str]:
    """Measure what the results lack; gives a line for each plan that was left out somewhere."""
    from kvtailor.evals import grid as local
    from kvtailor.evals import spread

    works, notes = grid.works(loaded, results)
    with bar(len(works)) as step:
        if ray:
            spread.run(loaded, works, results, step, reader)
        else:
            local.run(loaded, works, results, step, reader)
    return notes


def report(rows: Sequence[Row], folder: Path, notes: Sequence[str]) -> tuple[list[Cell], list[str]]:
    """Write the page, the pictures and the tables; raises EvaluationError that names what cannot be written."""
    from kvtailor.evals.page import page
    from kvtailor.evals.plots import draw
    from kvtailor.evals.statistics import cells
    from kvtailor.evals.table import markdown

    found = cells(rows)
    try:
        pictures = draw(found, rows, folder)
        (folder / TABLE).write_text(markdown(found), encoding="utf-8")
        (folder / PAGE).write_text(page(found, rows, pictures, notes), encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"{error.filename}: cannot be written: {error.strerror}") from None
    return found, [str(folder / PAGE), str(folder / TABLE), *map(str, pictures)]


def show(found: Sequence[Cell], notes: Sequence[str], files: Sequence[str]) -> None:
    """Print a table for each task and length."""
    from rich.table import Table

    from kvtailor.evals.table import sections

    shown = console()
    for section in sections(found):
        grid = Table(title=section.title, title_justify="left")
        for number, column in enumerate(section.columns):
            grid.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
        for row in section.rows:
            grid.add_row(*row)
        shown.print(grid)
    for line in notes:
        shown.print(line)
    shown.print(f"Written: {', '.join(files)}")


def print_tasks(as_json: bool) -> None:
    """Print the tasks with their metrics."""
    from kvtailor.evals.tasks.registry import TASKS

    if as_json:
        typer.echo(json.dumps({name: one.metric for name, one in TASKS.items()}))
        return
    for name, one in TASKS.items():
        typer.echo(f"{name:<32}{one.metric}")
