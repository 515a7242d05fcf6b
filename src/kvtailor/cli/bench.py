"""``kvtailor bench``: kernels and whole decode steps, timed in turns."""

from __future__ import annotations

import json
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtailor.cli.demo import bar, make_folder
from kvtailor.cli.machine import describe_machine, usable_cores
from kvtailor.cli.settings import WIDTH, active_kernels, check_reads_text, console, count, dtype_of, quiet
from kvtailor.errors import KVTailorError

if TYPE_CHECKING:
    from kvtailor.bench.result import Bench
    from kvtailor.models.load import Loaded

NAME = "bench"  # of the files


def bench(
    tokens: Annotated[
        list[int] | None,
        typer.Option(parser=count, metavar="N", help="Cache lengths of kernels, by default 8192 and 32768."),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(parser=count, metavar="N", help="Cache lengths of steps, by default 16, 1024 and 8000."),
    ] = None,
    prompt: Annotated[
        list[int] | None,
        typer.Option(parser=count, metavar="N", help="Lengths of prompts to be read, in float32; by default none."),
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(help="Plans of steps and prompts, by default full, int8, int4, int2, int1 and snapkv:1024."),
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(parser=count, metavar="N", help="Numbers of threads, by default 1 and 2."),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Rounds that medians are of, by default 11.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the model and of what is not packed: bfloat16, float32 or float16.")
    ] = "bfloat16",
    model: Annotated[str, typer.Option(help="Whose steps: a folder, a .gguf file, a hub name or smollm2.")] = "smollm2",
    kernels_only: Annotated[bool, typer.Option("--kernels-only", help="Leave steps and prompts out.")] = False,
    steps_only: Annotated[bool, typer.Option("--steps-only", help="Leave the kernels out.")] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="Time every plan with compiled steps as well.")] = False,
    peers: Annotated[list[Path] | None, typer.Option(help="JSON files with steps of other engines.")] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for bench.json, bench.md and bench.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Time kernels beside PyTorch's attention, and decode steps and prompts beside Transformers' caches.

    --tokens, --context, --prompt, --plan, --threads and --peers may be repeated.
    """
    if kernels_only and steps_only:
        raise KVTailorError("--kernels-only and --steps-only leave nothing to measure: allowed is one of them")
    kernels, numbers = active_kernels(), dtype_of(dtype)
    if out is not None:
        make_folder(out)
    with quiet():
        from kvtailor.bench import run
        from kvtailor.bench.peers import read_peers
        from kvtailor.plan import Plan

        request = run.Request(
            tokens=() if steps_only else unique(tokens) or run.TOKENS,
            contexts=() if kernels_only else unique(context) or run.CONTEXTS,
            prompts=() if kernels_only else unique(prompt),
            plans=[Plan.of(name) for name in unique(plan) or run.PLANS],
            threads=checked_threads(unique(threads)),
            dtype=numbers,
            repeats=repeats or run.REPEATS,
            compiled=compiled,
        )
        others = [row for path in peers or () for row in read_peers(path)]
        machine = {**describe_machine(), "kernels": kernels, "date": date.today().isoformat()}
        with bar(request.groups) as step:
            found = run.run(request, partial(text_model, model, numbers), machine, others, step)
        if out is not None:
            write(found, out)
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
    else:
        show(found, out)


def unique(given: list[Any] | None) -> list[Any]:
    """What was given, each once."""
    return list(dict.fromkeys(given or ()))


def checked_threads(given: list[int]) -> list[int]:
    """The numbers of threads, by default one and two; raises KVTailorError for more than there are cores."""
    cores = usable_cores()
    for number in given:
        if number > cores:
            raise KVTailorError(
                f"--threads {number} is more than the cores that this process may use: allowed are 1 to {cores}"
            )
    return given or list(range(1, 1 + min(2, cores)))


def text_model(name: str, dtype: Any) -> Loaded:
    """Load a model that goes on with a text; raises KVTailorError for another kind."""
    from kvtailor.models.load import load

    loaded = load(name, dtype, progress=True)
    check_reads_text(loaded)
    if loaded.model.config.is_encoder_decoder:
        raise KVTailorError(f"model {name!r} is an encoder-decoder: allowed are models that go on with a text")
    return loaded


def write(found: Bench, folder: Path) -> None:
    """Write the rows, the tables and the plot; raises KVTailorError that names what cannot be written."""
    from kvtailor.bench.plot import draw
    from kvtailor.bench.table import as_markdown

    try:
        (folder / f"{NAME}.json").write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
        (folder / f"{NAME}.md").write_text(as_markdown(found), encoding="utf-8")
        draw(found, folder / f"{NAME}.png")
    except OSError as error:
        raise KVTailorError(f"{error.filename}: cannot be written: {error.strerror}") from None


def show(found: Bench, folder: Path | None) -> None:
    """Print the tables and what they say."""
    from kvtailor.bench.table import as_rich, captions, grids

    shown = console()
    machine = found.machine
    shown.print(f"{machine['processor']}, {machine['cores']} cores, kernels {machine['kernels']}, {machine['date']}")
    for grid in grids(found):
        shown.print(as_rich(grid), width=max(shown.width, WIDTH), crop=False)
    for line in captions(found):
        shown.print(line)
    if folder is not None:
        shown.print(f"Written: {', '.join(str(folder / f'{NAME}.{kind}') for kind in ('json', 'md', 'png'))}")
