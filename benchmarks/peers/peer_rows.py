"""What all engines share: the prompt, the clock, the command line, and the file of rows."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

POSITIONS = 8192  # of SmolLM2
ORDINARY = range(17, 49152)  # token ids of SmolLM2 that are no control tokens
WARM_UP = 3
KEY = ("engine", "weights", "cache", "context", "threads")


def prompt_ids(count: int) -> list[int]:
    """Give the first token ids of one fixed random sequence, the same for every engine and every run."""
    draw = random.Random(0)
    return [draw.choice(ORDINARY) for _ in range(count)]


def timed_steps(step: Callable[[], Any], count: int) -> tuple[float, float]:
    """Run decode steps one after the other and give the medians of their times.

    Parameters
    ----------
    step
        Decodes one token and returns when it is known.
    count
        Steps that count; as many as ``WARM_UP`` run before them.

    Returns
    -------
    Wall time and processor time (of all threads of the process) of a step, milliseconds.
    """
    taken = []
    for _ in range(WARM_UP + count):
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        taken.append((time.perf_counter() - wall, time.process_time() - cpu))
    return median_ms(wall for wall, _ in taken[WARM_UP:]), median_ms(cpu for _, cpu in taken[WARM_UP:])


def median_ms(seconds: Iterable[float]) -> float:
    """Give the median in milliseconds, to a microsecond."""
    return round(1000 * median(seconds), 3)


def arguments(description: str, model: str, caches: Iterable[str]) -> argparse.ArgumentParser:
    """Give the command line that all engines have; ``model`` says what theirs is."""
    caches = list(caches)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, help=model)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; rows that it holds already stay in it")
    parser.add_argument("--caches", nargs="+", choices=caches, default=caches, metavar="CACHE", help=", ".join(caches))
    parser.add_argument("--contexts", nargs="+", type=int, default=[16, 1024, 8000], metavar="N", help="tokens held")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--steps", type=int, default=24, help="decoded tokens that each median is of")
    return parser


def checked(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, and refuse what the model has no positions for."""
    given = parser.parse_args()
    longest = POSITIONS - WARM_UP - given.steps
    if min(given.contexts) < 1 or max(given.contexts) > longest:
        parser.error(f"--contexts {given.contexts}: allowed are 1 to {longest} with --steps {given.steps}")
    given.contexts.sort()
    return given


def add_row(file: Path, row: dict[str, Any]) -> None:
    """Put a row into a file of rows, in the place of one that measured the same."""
    print(json.dumps(row), flush=True)
    rows = json.loads(file.read_text()) if file.exists() else []
    rows = [other for other in rows if any(other[name] != row[name] for name in KEY)]
    file.write_text(json.dumps([*rows, row], indent=1) + "\n")
