"""``kvtailor schema``: what a plan file may hold."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON schema of a plan file."""
    from kvtailor.plan import Plan

    typer.echo(json.dumps(Plan.model_json_schema(), indent=2))
