"""``kvtailor doctor``: what this machine can run, and what a plan would hold."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtailor.cli.settings import active_kernels, console, count, dtype_of, heard, quiet, warn
from kvtailor.errors import KVTailorError

if TYPE_CHECKING:
    import torch

    from kvtailor.estimate import Estimate
    from kvtailor.plan import Plan


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A folder, a .gguf file, a hub name or an embedded model.")
    ] = None,
    plan: Annotated[str, typer.Option(help="A preset such as int4 or snapkv:25%, or a plan file.")] = "full",
    tokens: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Tokens of the prompt that the estimate is for.")
    ] = 4096,
    dtype: Annotated[str, typer.Option(help="Of the cache: float32, bfloat16 or float16.")] = "float32",
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure memory, disk and links to GPUs, and answer the usual complaints.")
    ] = False,
    folder: Annotated[Path | None, typer.Option(help="Where the disk is measured, with --measure.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Tell what this machine has, and with a model what its cache would hold after a prompt."""
    from kvtailor.plan import Plan

    numbers, chosen = dtype_of(dtype), Plan.of(plan)
    with quiet():
        found = {**machine(), "kernels": kernels(), "embedded_models": embedded_models()}
        if measure:
            found["measured"] = measured(folder)
        if model is not None:
            found["model"] = examine(model, chosen, tokens, numbers, progress=not as_json)
            if measure:
                found["model"]["advice"] = advised(chosen, found)
    if as_json:
        typer.echo(json.dumps(found))
        return
    show(found)


def measured(folder: Path | None) -> dict[str, Any]:
    """Bandwidths of this machine as plain data; raises KVTailorError for a folder that is none."""
    from kvtailor.cli.bandwidth import measure

    if folder is not None and not folder.is_dir():
        raise KVTailorError(f"--folder {str(folder)!r} is no folder: allowed is one that exists")
    return measure(folder)


def advised(plan: Plan, found: dict[str, Any]) -> list[str]:
    """Lines on the usual complaints, from the plan and from what was measured."""
    from kvtailor.cli.advice import advice

    model = found["model"]
    return advice(plan, found["measured"], model["bytes_held"], model["bytes_default"], model["free_bytes"])


def machine() -> dict[str, Any]:
    """The machine as plain data."""
    from kvtailor.cli.machine import describe_machine

    return describe_machine()


def kernels() -> dict[str, Any]:
    """Which kernels run and which could, as plain data; raises KernelError for ones that cannot run here."""
    from kvtailor.kernels.choice import available, built, note

    return {"active": active_kernels(), "available": available(), "built": built(), "note": note()}


def embedded_models() -> list[dict[str, Any]]:
    """The embedded models, and whether each has been fetched."""
    from kvtailor.models.fetch import EMBEDDED, is_complete, model_home

    return [
        {
            "name": name,
            "describes": package.describes,
            "is_fetched": is_complete(model_home() / "fetched" / name, package),
        }
        for name, package in EMBEDDED.items()
    ]


def examine(name: str, plan: Plan, tokens: int, dtype: torch.dtype, *, progress: bool = False) -> dict[str, Any]:
    """What a plan would hold for a model after a prompt of ``tokens``, as plain data, with warnings.

    Raises
    ------
    ModelError
        If the model cannot be found, read or served.
    PlanError
        If the plan cannot be used with the model.
    """
    from kvtailor import attach
    from kvtailor.cli.advice import recommended
    from kvtailor.cli.configuration import load_config, on_meta
    from kvtailor.cli.machine import free_bytes
    from kvtailor.estimate import estimate, length_limit

    config = load_config(name, progress=progress)
    model = on_meta(name, config)
    warnings: list[str] = []
    with heard(warnings), attach(model, plan):
        pass
    held = estimate(config, plan, tokens, dtype)
    limit = length_limit(config)
    if limit is not None and tokens > limit:
        warnings.append(f"{tokens} tokens are more than the {limit} positions of model {name!r}")
    warnings += dict.fromkeys(layer.note for layer in held.layers if layer.note)
    free = free_bytes()
    fitting = recommended(config, tokens, dtype, free)
    return {
        "name": name,
        "class": type(model).__name__,
        "length_limit": limit,
        "plan": plan.name,
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes_held": held.bytes_held,
        "bytes_default": held.bytes_default,
        "free_bytes": free,
        "recommended": None if fitting is None else {"plan": fitting[0], "bytes_held": fitting[1]},
        "layer_groups": layer_groups(held),
        "warnings": warnings,
    }


def layer_groups(held: Estimate) -> list[dict[str, Any]]:
    """Neighbouring layers that are kept alike, as plain data."""
    groups = []
    for (attention, words), members in groupby(held.layers, key=lambda layer: (layer.attention, layer.kept_as)):
        layers = list(members)
        first, last = layers[0].index, layers[-1].index
        groups.append(
            {
                "layers": f"{first}" if first == last else f"{first}-{last}",
                "attention": attention,
                "kept_as": words,
                "tokens_kept": sum(layer.tokens_kept for layer in layers) / len(layers),
                "bytes_held": sum(layer.bytes_held for layer in layers),
                "bytes_default": sum(layer.bytes_default for layer in layers),
            }
        )
    return groups


def show(found: dict[str, Any]) -> None:
    """Print what was found for people."""
    from rich.table import Table

    from kvtailor.report import human_bytes

    table = Table(show_header=False, box=None)
    memory = found["memory_bytes"]
    rows = {
        "processor": found["processor"],
        "instruction sets": ", ".join(found["instruction_sets"]) or "not known",
        "cores": str(found["cores"]),
        "memory": "not known" if memory is None else human_bytes(memory),
        "GPU": ", ".join(found["gpus"]) or "none",
        "preset to begin with": found["preset"],
        "kernels": f"{found['kernels']['active']} (available: {', '.join(found['kernels']['available'])})",
        **found["versions"],
    }
    for one in found["embedded_models"]:
        state = "fetched" if one["is_fetched"] else "not fetched yet; the first use fetches it"
        rows[f"model {one['name']}"] = f"{one['describes']}: {state}"
    for name, value in rows.items():
        table.add_row(name, value)
    console().print(table)
    if found["kernels"]["note"]:
        console().print(f"{found['kernels']['note']}.")
    if "measured" in found:
        show_measured(found["measured"])
    if "model" in found:
        show_model(found["model"])
        warn(found["model"]["warnings"])


def show_measured(rates: dict[str, Any]) -> None:
    """Print bandwidths."""
    links = ", ".join(f"{rate:.1f}" for rate in rates["link_gb_per_s"]) or "none"
    lines = [f"memory {rates['memory_gb_per_s']:.1f} GB/s, links to GPUs: {links}"]
    if rates["disk_rows_ms"] is None:
        lines.append("disk: no file could be written")
    else:
        lines.append(
            f"disk: write {rates['disk_write_gb_per_s']:.2f} GB/s, read {rates['disk_read_gb_per_s']:.2f} GB/s, "
            f"256 scattered rows in {rates['disk_rows_ms']:.1f} ms"
        )
    for line in lines:
        console().print(line)


def show_model(model: dict[str, Any]) -> None:
    """Print what a plan would hold."""
    from rich.table import Table

    from kvtailor.report import human_bytes

    title = f"{model['name']} ({model['class']}), plan {model['plan']}, {model['tokens']} tokens, {model['dtype']}"
    table = Table(title=title, title_justify="left")
    table.add_column("layers")
    table.add_column("kept as")
    for column in ("tokens kept", "held", "default", "share"):
        table.add_column(column, justify="right")
    for group in model["layer_groups"]:
        table.add_row(
            group["layers"] + (" cross" if group["attention"] == "cross" else ""),
            group["kept_as"],
            f"{group['tokens_kept']:.0f}",
            *held_and_default(group),
        )
    table.add_row("all", "", "", *held_and_default(model), style="bold")
    growth = sum(group["bytes_default"] for group in model["layer_groups"] if group["attention"] == "self")
    shown = console()
    shown.print()
    shown.print(table)
    shown.print(
        "Estimated from the configuration, at the end of the prompt. The default cache takes "
        f"{human_bytes(growth / model['tokens'])} per token."
    )
    fitting = model["recommended"]
    if fitting is not None:
        shown.print(
            f"Plan {fitting['plan']} is the safest whose cache ({human_bytes(fitting['bytes_held'])}) fits the "
            f"{human_bytes(model['free_bytes'])} of free memory with a fifth to spare."
        )
    for line in model.get("advice", []):
        shown.print(line)


def held_and_default(sizes: dict[str, Any]) -> tuple[str, str, str]:
    """Bytes held, bytes of the default cache, and their ratio, in words."""
    from kvtailor.report import human_bytes

    held, default = sizes["bytes_held"], sizes["bytes_default"]
    return human_bytes(held), human_bytes(default), f"{held / default:.0%}" if default else "-"
