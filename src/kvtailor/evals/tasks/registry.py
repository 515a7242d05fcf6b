"""The tasks by name."""

from __future__ import annotations

from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from kvtailor.errors import EvaluationError
from kvtailor.evals.sample import Task
from kvtailor.evals.tasks.code import Code
from kvtailor.evals.tasks.copying import COPYING
from kvtailor.evals.tasks.infinitebench import INFINITEBENCH
from kvtailor.evals.tasks.longbench import LONGBENCH
from kvtailor.evals.tasks.needle import NEEDLE
from kvtailor.evals.tasks.needles import NEEDLES
from kvtailor.evals.tasks.perplexity import Perplexity
from kvtailor.evals.tasks.qa import QA
from kvtailor.evals.tasks.questions import QUESTIONS
from kvtailor.evals.tasks.scbench import SCBENCH
from kvtailor.evals.tasks.variables import Variables
from kvtailor.evals.tasks.words import WORDS

# Any: the protocol's attributes may be set, those of a frozen task may not, and nobody sets them.
_GENERATED: tuple[Any, ...] = (Perplexity(), *NEEDLE, *NEEDLES, Variables(), *WORDS, *QA, *QUESTIONS, Code(), *COPYING)
_PUBLISHED: tuple[Any, ...] = (*LONGBENCH, *INFINITEBENCH, *SCBENCH)

TASKS: dict[str, Task] = {one.name: one for one in (*_GENERATED, *_PUBLISHED)}
"""Every task with its usual settings: those that need no data first, then those that read published data."""

_FIXED = ("name", "metric", "dataset")  # what a task is, and no option of it


def task_names() -> tuple[str, ...]:
    """Names of all tasks, those that need no data first."""
    return tuple(TASKS)


def task(name: str, **options: Any) -> Task:
    """Give a task by name.

    Parameters
    ----------
    name : one of :func:`task_names`.
    options : attributes of the task that are to differ from its usual settings, such as ``asked="after"``.

    Raises
    ------
    EvaluationError
        If there is no such task, it has no such attribute, or it refuses the value.
    """
    if name not in TASKS:
        close = get_close_matches(name, TASKS, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise EvaluationError(f"no task {name!r}{meant}; allowed are {', '.join(TASKS)}")
    found: Any = TASKS[name]
    allowed = [field.name for field in fields(found) if field.name not in _FIXED]
    unknown = [option for option in options if option not in allowed]
    if unknown:
        raise EvaluationError(f"task {name!r} has no option {unknown[0]!r}; allowed are {', '.join(allowed)}")
    changed: Task = replace(found, **options)
    return changed
