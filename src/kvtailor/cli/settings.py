"""Settings that several commands read: data types, kernels, and the silence of Transformers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from kvtailor.errors import KVTailorError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

DTYPES = ("float32", "bfloat16", "float16")
WIDTH = 140  # columns of a table where the output is no terminal


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name; raises KVTailorError for another one."""
    import torch

    if name not in DTYPES:
        raise KVTailorError(f"--dtype {name!r} is not offered: allowed are {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def active_kernels() -> str:
    """The kernels that run, after the environment's choice; raises KernelError for ones that cannot run here."""
    from kvtailor.kernels.choice import active

    return active()


def count(text: str) -> int:
    """Read a number of tokens from the command line; raises BadParameter unless it is 1 or more."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise typer.BadParameter(f"{text!r} cannot be used: allowed are whole numbers from 1")
    return number


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Transformers' progress bars and warnings; errors still pass."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def heard(messages: list[str]) -> Iterator[None]:
    """Append the warnings that come up inside the block, each as one line, to ``messages``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages += [str(warning.message) for warning in caught]


def warn(messages: list[str]) -> None:
    """Print each message as one warning line on standard error."""
    for message in messages:
        print(f"warning: {message}", file=sys.stderr)


def console() -> Console:
    """The standard output, wide enough for tables where it is no terminal."""
    from rich.console import Console

    shown = Console(highlight=False, markup=False)
    return shown if shown.is_terminal else Console(width=WIDTH, highlight=False, markup=False)


def check_reads_text(loaded: Any) -> None:
    """Raise KVTailorError for a model whose input is not text."""
    if loaded.model.main_input_name != "input_ids":
        raise KVTailorError(
            f"model {loaded.name!r} takes {loaded.model.main_input_name}, and this command feeds text: "
            "allowed are models that read text"
        )
