"""The ``kvtailor`` command: its subcommands, and how every failure becomes one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from kvtailor.cli.bench import bench
from kvtailor.cli.compare import compare
from kvtailor.cli.demo import demo
from kvtailor.cli.doctor import doctor
from kvtailor.cli.failures import EXIT_CODES, report_failure
from kvtailor.cli.generate import generate
from kvtailor.cli.lm_eval import lm_eval
from kvtailor.cli.plan import plan
from kvtailor.cli.presets import presets
from kvtailor.cli.schema import schema

DEBUG = "--debug"
ABOUT = "Keep, evict or pack the key-value cache of Hugging Face models, layer by layer."


class Commands(TyperGroup):
    """The group of commands, with every failure on one line."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> NoReturn:
        """Run a command line and leave with its exit code."""
        arguments = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        try:
            code = super().main(arguments, *rest, **extra)
        except (Exception, KeyboardInterrupt) as failure:
            if DEBUG in arguments:
                raise
            code = report_failure(failure, as_json="--json" in arguments)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, help=ABOUT, epilog=EXIT_CODES)


@app.callback(invoke_without_command=True, help=ABOUT, epilog=EXIT_CODES)
def commands(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of a failure.")] = False,
) -> None:
    """Print the version or the help where no command is given."""
    # Waiting threads that spin take the processor from the ones that work; torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if version:
        import kvtailor

        typer.echo(f"kvtailor {kvtailor.__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (demo, generate, compare, plan, bench, doctor, presets, schema):
    app.command()(command)
app.command("lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(lm_eval)


def run() -> None:
    """Run the command line of this process; the entry of the console script."""
    app(prog_name="kvtailor")


if __name__ == "__main__":
    run()
