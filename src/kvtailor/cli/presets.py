"""``kvtailor presets``: the plans that have a name."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvtailor.cli.settings import console

# name -> (what it does, source)
DESCRIPTIONS = {
    "full": ("every token, exact; the default cache's answers to the bit", "ours"),
    "int8": ("8 bits per number after a Hadamard rotation; sinks and newest tokens exact", "ours"),
    "int4": ("4 bits per number after a Hadamard rotation; sinks and newest tokens exact", "ours"),
    "int3": ("3 bits per number after a Hadamard rotation; sinks and newest tokens exact", "ours"),
    "int2": ("2 bits per number after a Hadamard rotation; sinks and newest tokens exact", "ours"),
    "int1": ("1 bit per number, keys per channel; sinks and newest tokens exact", "ours"),
    "kivi4": ("4 bits, keys per channel and values per token; newest 128 exact", "KIVI, arXiv 2402.02750"),
    "kivi2": ("2 bits, keys per channel and values per token; newest 128 exact", "KIVI, arXiv 2402.02750"),
    "fifo": ("drops the oldest token that is no sink", "classic"),
    "lru": ("drops the token that no query has attended to for longest", "ours after InfiniGen, arXiv 2406.19707"),
    "random": ("drops tokens at random; a baseline", "baseline"),
    "keynorm": ("keeps the keys of smallest norm, once after the prompt", "Devoto et al., arXiv 2406.11430"),
    "keydiff": ("keeps the keys that differ most from the others, once after the prompt", "KeyDiff, arXiv 2504.15364"),
    "streaming": ("sinks and a recent window, renumbered", "StreamingLLM, arXiv 2309.17453"),
    "h2o": ("keeps what gathered the most attention, and recent tokens", "H2O, arXiv 2306.14048"),
    "snapkv": ("keeps what the prompt's last queries attend to, once after the prompt", "SnapKV, arXiv 2404.14469"),
    "pyramidkv": ("SnapKV with more tokens in early layers than in late ones", "PyramidKV, arXiv 2406.02069"),
    "quest": ("reads the tokens of the pages that can score highest at each step", "Quest, arXiv 2406.10774"),
    "pqcache": ("reads the tokens whose product codes score highest at each step", "PQCache, arXiv 2407.12820"),
    "tailor": ("layer 0 at 2 bits; the others read what 2-bit codes put first", "after TailorKV, arXiv 2505.19586"),
    "tailor-1bit": ("the same with 1 bit", "after TailorKV, arXiv 2505.19586"),
    "tailor-offload": ("the same as tailor, with tokens in files", "after TailorKV, arXiv 2505.19586"),
    "large-gpu": ("to begin with on a GPU of 40 GiB or more: int8", "ours"),
    "24gb-gpu": ("to begin with on a smaller GPU: tailor", "ours"),
    "cpu": ("to begin with where there is no GPU: int4", "ours"),
    "adakv": ("SnapKV with a layer's budget divided over its heads", "AdaKV, arXiv 2407.11550"),
}


def presets(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False) -> None:
    """List the presets: what each keeps, whether it takes a budget, and where it comes from."""
    entries = [entry(name) for name in names()]
    if as_json:
        typer.echo(json.dumps(entries))
        return
    from rich.table import Table

    table = Table(title="Presets", title_justify="left")
    for column in ("plan", "what it keeps", "source"):
        table.add_column(column)
    for one in entries:
        table.add_row(one["usage"], one["description"], one["source"])
    console().print(table)
    typer.echo("BUDGET is a number of tokens (512), a share of the prompt (25%) or bytes (64MiB).")
    typer.echo("TOP is what each step reads back: a number of tokens (512), or a share of those that are far (5%).")


def names() -> tuple[str, ...]:
    """All preset names."""
    from kvtailor.presets import NAMES

    return NAMES


def entry(name: str) -> dict[str, str]:
    """One preset as data."""
    from kvtailor.plan import Plan

    description, source = DESCRIPTIONS.get(name, ("", ""))
    layers = Plan.preset(name).layers
    budget = next((layer.keep.budget for layer in layers if layer.keep.budget is not None), None)
    top = next((layer.find.top for layer in layers if layer.find.index != "all"), None)
    entry = {"name": name, "usage": name, "description": description, "source": source}
    if budget is not None:
        entry |= {"usage": f"{name}[:BUDGET]", "default_budget": str(budget)}
    if top is not None:
        entry |= {"usage": f"{name}[:TOP]", "default_top": str(top)}
    return entry
