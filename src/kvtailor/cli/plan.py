"""``kvtailor plan``: measure every layer of a model, choose how to keep it, write the plan and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtailor.cli.bench import unique
from kvtailor.cli.demo import bar, make_folder
from kvtailor.cli.machine import describe_machine
from kvtailor.cli.settings import active_kernels, check_reads_text, console, count, dtype_of, quiet
from kvtailor.errors import KVTailorError

if TYPE_CHECKING:
    import torch

    from kvtailor.budget import Budget
    from kvtailor.calibrate.compare import Comparison
    from kvtailor.calibrate.plans import Count, Planned
    from kvtailor.calibrate.table import Table
    from kvtailor.models.load import Loaded

NAME = "plan"  # of the files
CALIBRATED_ON = ("execmodel",)  # topics of the text that ships
COMPARED_ON = ("import", "exceptions")
BUDGET = "25%"


def plan(
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub name or an embedded model.")] = "smollm2",
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A text file to calibrate on; default: a text that ships. Repeatable."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(parser=count, metavar="N", help="The most tokens of each text before the held-out ones.")
    ] = 1024,
    held_out: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Tokens behind them that options are measured on.")
    ] = 24,
    budget: Annotated[
        str | None, typer.Option(help="Bytes: a share of the default cache (default: 25%) or an amount (64MiB).")
    ] = None,
    loss: Annotated[
        float | None, typer.Option(help="Instead of a budget: most loss of all layers together, nats per token.")
    ] = None,
    counted: Annotated[
        str | None,
        typer.Option(
            "--count",
            help="Bytes that count: held (all memory) or fast (without slow host memory); default: fast on a GPU.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(parser=count, metavar="N", help="Count bytes for a prompt of N tokens; default: as calibrated."),
    ] = None,
    heads: Annotated[
        bool, typer.Option("--heads", help="Let each KV head be kept in its own way; measures each alone too.")
    ] = False,
    cache_dtype: Annotated[
        str | None,
        typer.Option(help="Count bytes for a cache of this data type, with --context; default: the model's."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="A way to keep a layer that is tried, instead of the usual ones; may be repeated."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Measure the plan beside others of the same bytes, on other texts.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="The folder of the files; an interrupted run goes on there.")] = Path("out"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure how well each layer can be kept in each way, and write the best plan within a budget."""
    if budget is not None and loss is not None:
        raise KVTailorError(f"--budget {budget} and --loss {loss:g} were both given: allowed is one of them")
    active_kernels()
    numbers = dtype_of(dtype)
    if cache_dtype is not None and context is None:
        raise KVTailorError(f"--cache-dtype {cache_dtype} counts bytes anew, which needs --context: allowed with both")
    make_folder(out)
    with quiet():
        from kvtailor.calibrate.capture import check_capturable
        from kvtailor.calibrate.options import DEFAULT, options
        from kvtailor.calibrate.plans import at_length, check_loss, read_budget
        from kvtailor.calibrate.run import calibrate, check_texts, tailored_layers
        from kvtailor.models.load import load

        tried = options(unique(option) or DEFAULT)
        limit = read_budget(budget or BUDGET)
        if loss is not None:
            check_loss(loss)
        counts = count_of(counted, device)
        loaded = load(model, numbers, device, progress=True)
        check_reads_text(loaded)
        check_capturable(loaded.model)
        sources: list[Path | str] = list(text or CALIBRATED_ON)
        texts = [ids_of(loaded, source, tokens + held_out) for source in sources]
        check_texts(loaded.model, texts, held_out)
        if compare:
            check_apart(loaded, texts)
        with bar(len(texts) * len(tailored_layers(loaded.model))) as step:
            table = calibrate(
                loaded.model,
                texts,
                tried,
                held_out=held_out,
                heads=heads,
                notes=out,
                name=loaded.name,
                progress=step,
            )
        comparison = compared(loaded, table, tokens, held_out, counts, heads) if compare else None
        if context is not None:
            table = at_length(table, loaded.model.config, context, dtype_of(cache_dtype or dtype))
        chosen = choose(table, limit, loss, counts, heads)
        asked: dict[str, Any] = {"budget": str(limit)} if loss is None else {"loss": loss}
        asked |= {"count": counts} | (
            {} if context is None else {"context": context, "cache_dtype": cache_dtype or dtype}
        )
        files = write(table, chosen, comparison, out, asked)
    if as_json:
        typer.echo(json.dumps(finite(as_data(table, chosen, comparison, files)), allow_nan=False))
    else:
        show(table, chosen, comparison, files)


def count_of(name: str | None, device: str) -> Count:
    """The way of counting bytes by name, or the device's default; raises KVTailorError for another name."""
    if name is None:
        return "held" if device == "cpu" else "fast"
    if name not in ("held", "fast"):
        raise KVTailorError(f"--count {name!r} is not offered: allowed are held and fast")
    return "held" if name == "held" else "fast"


def ids_of(loaded: Loaded, source: Path | str, most: int) -> torch.Tensor:
    """The first ``most`` tokens of a file, or of the text that ships from a topic on, (1, n).

    Raises
    ------
    KVTailorError
        If the file cannot be read as text.
    """
    from kvtailor.models.text import paragraphs

    if isinstance(source, str):
        text = "\n\n".join(paragraphs(source))[: 16 * most]
    else:
        try:
            text = source.read_text(encoding="utf-8")
        except OSError as error:
            raise KVTailorError(f"--text {str(source)!r} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise KVTailorError(f"--text {str(source)!r} is no text in UTF-8") from None
    ids: torch.Tensor = loaded.tokenizer(text, return_tensors="pt").input_ids
    return ids[:, :most]


def choose(table: Table, budget: Budget, loss: float | None, counts: Count, heads: bool) -> Planned:
    """The plan within a loss where one is given, else within a budget."""
    from kvtailor.calibrate.plans import bytes_of, within_bytes, within_loss

    name = f"planned for {table.made_for['name']}"
    if loss is not None:
        return within_loss(table, loss, counts, name, heads)
    return within_bytes(table, bytes_of(budget, table), counts, name, heads)


def check_apart(loaded: Loaded, texts: Sequence[torch.Tensor]) -> None:
    """Raise KVTailorError if a calibration text holds the beginning of one to compare on."""
    from kvtailor.models.text import paragraphs

    for ids in texts:
        text = loaded.tokenizer.decode(ids[0])
        for topic in COMPARED_ON:
            if next(paragraphs(topic)) in text:
                raise KVTailorError(
                    f"--compare needs texts not calibrated on, and {ids.shape[1]} tokens reach into {topic!r}; "
                    "allowed are fewer --tokens, or another --text"
                )


def compared(loaded: Loaded, table: Table, tokens: int, held_out: int, counts: Count, heads: bool) -> Comparison:
    """The planner beside other plans, on texts that ship and were not calibrated on."""
    from kvtailor.calibrate.capture import capture
    from kvtailor.calibrate.compare import compare, rivals

    seen = [capture(loaded.model, ids_of(loaded, topic, tokens + held_out), held_out) for topic in COMPARED_ON]
    with bar(len(rivals(table, counts))) as step:
        return compare(loaded.model, table, seen, counts, heads, step)


def write(
    table: Table, chosen: Planned, comparison: Comparison | None, folder: Path, settings: dict[str, Any]
) -> list[str]:
    """Write the plan, the tables and the picture; raises KVTailorError that names what cannot be written."""
    from kvtailor.calibrate.plans import with_measurements
    from kvtailor.calibrate.plot import draw
    from kvtailor.calibrate.report import as_markdown

    paths = [folder / f"{NAME}.{kind}" for kind in ("yaml", "md", "png")]
    machine = describe_machine()
    where = f"Measured on {machine['processor']} ({machine['cores']} cores)"
    try:
        with_measurements(table, chosen, settings).save(paths[0])
        paths[1].write_text(as_markdown(table, chosen, where, comparison), encoding="utf-8")
        draw(table, chosen, paths[2])
    except OSError as error:
        raise KVTailorError(f"{error.filename}: cannot be written: {error.strerror}") from None
    return [str(path) for path in paths]


def as_data(table: Table, chosen: Planned, comparison: Comparison | None, files: list[str]) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "table": table.as_dict(),
        "choice": chosen.choice,
        "loss": chosen.loss,
        "bytes_held": chosen.bytes_held,
        "bytes_fast": chosen.bytes_fast,
        "comparison": None if comparison is None else comparison.as_dict(),
        "files": files,
    }


def finite(data: Any) -> Any:
    """The same with nothing in place of numbers that are not finite, which JSON does not have."""
    if isinstance(data, dict):
        return {name: finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def show(table: Table, chosen: Planned, comparison: Comparison | None, files: list[str]) -> None:
    """Print the choice, and the comparison if there is one."""
    from rich.table import Table as Grid

    from kvtailor.calibrate import report

    shown = console()
    shown.print(report.summary(table, chosen))
    grids: list[tuple[tuple[str, ...], list[tuple[str, ...]]]]
    grids = [(report.LAYER_COLUMNS, [report.layer_row(table, *one) for one in chosen.choice.items()])]
    if comparison is not None:
        grids.append((report.COMPARISON_COLUMNS, report.comparison_rows(comparison)))
    for columns, rows in grids:
        grid = Grid()
        for column in columns:
            grid.add_column(column)
        for row in rows:
            grid.add_row(*row)
        shown.print(grid)
    if comparison is not None:
        shown.print(report.comparison_words(comparison))
    shown.print(f"Written: {', '.join(files)}")
