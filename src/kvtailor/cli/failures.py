"""How a failure is told: one line on standard error, and an exit code that says whose it is."""

from __future__ import annotations

import json
import sys

import typer

from kvtailor.errors import KVTailorError

INPUT, OTHER, INTERRUPTED = 2, 1, 130
EXIT_CODES = (
    "Exit codes: 0 done; 2 an input cannot be used, named in one line on standard error; 1 any other failure; "
    "130 interrupted. With --json a failure is also one JSON object on standard output."
)


def report_failure(failure: BaseException, as_json: bool) -> int:
    """Print a failure on one line of standard error and give its exit code.

    Parameters
    ----------
    failure : what was raised.
    as_json : whether to print it on standard output too, as one JSON object.
    """
    code, message = describe(failure)
    print(f"error: {message}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": message}))
    return code


def describe(failure: BaseException) -> tuple[int, str]:
    """The exit code and the one line of a failure."""
    if isinstance(failure, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED, "interrupted"
    if isinstance(failure, KVTailorError):
        return INPUT, one_line(str(failure))
    if hasattr(failure, "format_message"):  # the command line could not be read
        return INPUT, one_line(failure.format_message())
    return OTHER, one_line(f"{type(failure).__name__}: {failure}")


def one_line(text: str) -> str:
    """A text with every run of white space as one space."""
    return " ".join(text.split())
