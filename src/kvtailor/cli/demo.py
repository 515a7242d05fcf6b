"""``kvtailor demo``: one question about a long text, with the default cache and with plans."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtailor.cli.settings import active_kernels, check_reads_text, console, count, quiet
from kvtailor.errors import KVTailorError

if TYPE_CHECKING:
    from kvtailor.demo.run import Demo, Measured, Progress

PICTURE = "demo.png"


def demo(
    model: Annotated[str, typer.Option(help="A folder, a .gguf file, a hub name or an embedded model.")] = "smollm2",
    tokens: Annotated[int, typer.Option(parser=count, metavar="N", help="The most tokens of the prompt.")] = 1536,
    new_tokens: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Tokens that are compared after the prompt.")
    ] = 32,
    plan: Annotated[
        list[str] | None, typer.Option(help="A plan for the table, instead of the usual ones; may be repeated.")
    ] = None,
    curves: Annotated[
        bool, typer.Option("--curves/--no-curves", help="Measure budgets and bits for the plot too.")
    ] = True,
    out: Annotated[Path, typer.Option(help="The folder of the plot.")] = Path("out"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Answer one question about a long text with the default cache and with plans; print a table and draw a plot."""
    active_kernels()
    begin = time.perf_counter()
    make_folder(out)
    with quiet():
        from kvtailor.demo import run
        from kvtailor.demo.plot import draw
        from kvtailor.models.load import load

        plans = tuple(plan) if plan else run.TABLE_PLANS
        loaded = load(model, progress=True)
        check_reads_text(loaded)
        if loaded.model.config.is_encoder_decoder:
            raise KVTailorError(f"model {model!r} is an encoder-decoder: allowed are models that go on with a text")
        with bar(run.plan_count(plans, curves)) as step:
            measured = run.run(loaded, tokens, new_tokens, plans, curves, step)
        picture = draw(measured, out / PICTURE)
    seconds = time.perf_counter() - begin
    if as_json:
        typer.echo(json.dumps({**measured.as_dict(), "plot": str(picture), "seconds": seconds}))
    else:
        show(measured, picture, seconds)


def make_folder(folder: Path) -> None:
    """Make the output folder; raises KVTailorError that names it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVTailorError(f"--out {str(folder)!r} cannot be made: {error.strerror}; allowed is a folder") from None


@contextmanager
def bar(steps: int) -> Iterator[Progress]:
    """A progress bar on standard error that moves on with each plan."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as shown:
        task = shown.add_task("", total=steps)
        begun = False

        def step(plan: str) -> None:
            nonlocal begun
            shown.update(task, description=plan, advance=1 if begun else 0)
            begun = True

        yield step


def show(demo: Demo, picture: Path, seconds: float) -> None:
    """Print the question and the table."""
    from rich.table import Table

    from kvtailor.demo.run import RIGHT

    shown = console()
    shown.print(f"{demo.model}, a prompt of {demo.prompt_tokens} tokens that ends with: {demo.question}")
    table = Table()
    table.add_column("plan", no_wrap=True)
    table.add_column("answer", ratio=1)
    for name in (
        "right",
        "same\nwords",
        "next tokens\nthat agree",
        "held",
        "of the\ndefault",
        "peak",
        "prefill\ns",
        "per token\nms",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in demo.rows:
        table.add_row(*cells(row, demo.bytes_default))
    shown.print(table)
    shown.print(
        f"Right: the answer names {RIGHT}. Same words: the answer is the default cache's. Agreement: share of "
        f"the default cache's next {demo.continuation_tokens} tokens that the plan ranks first. "
        f"Plot: {picture}. {seconds:.0f} s in all."
    )


def cells(row: Measured, default: int) -> tuple[str, ...]:
    """A table row of one plan."""
    from kvtailor.report import human_bytes

    return (
        row.plan,
        row.answer or "",
        "yes" if row.is_right else "no",
        "yes" if row.is_same else "no",
        f"{row.agreement:.0%}",
        human_bytes(row.bytes_held),
        f"{row.bytes_held / default:.0%}",
        human_bytes(row.bytes_peak),
        f"{row.prefill_seconds:.2f}",
        f"{row.token_milliseconds:.0f}",
    )
