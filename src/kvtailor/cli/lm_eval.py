"""``kvtailor lm-eval``: EleutherAI's evaluation harness on a model with a plan."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtailor.cli.settings import active_kernels, dtype_of


def lm_eval(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub name or an embedded model.")],
    plan: Annotated[str, typer.Option(help="A preset or a plan file.")] = "full",
    dtype: Annotated[str, typer.Option(help="Of weights and cache: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda.")] = "cpu",
) -> None:
    """Run lm-eval on a model with a plan; all other options are lm-eval's own, such as --tasks and --limit."""
    active_kernels()
    dtype_of(dtype)
    from kvtailor.integrations.lm_eval import run
    from kvtailor.plan import Plan

    Plan.of(plan)  # what is wrong with it is told before anything is loaded
    run(model, plan, dtype, device, context.args)
