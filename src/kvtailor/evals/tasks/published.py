"""Data sets that others publish, row by row: from a folder of JSONL files or from the Hugging Face hub."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtailor.errors import EvaluationError
from kvtailor.evals.rendering import Prompt
from kvtailor.evals.tasks.base import Draw, largest_fitting

Source = str | os.PathLike[str] | None
Row = Mapping[str, Any]

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_KEPT_BY_A_UNIT = 4  # characters at either end


@dataclass(frozen=True)
class Form:
    """How the rows of a data set are asked about.

    Attributes
    ----------
    before : stands before the question; ``{context}`` is the row's.
    question : ``{input}`` is the row's.
    metric : that answers are scored with.
    tokens : the most of an answer.
    start : what the answer starts with.
    chat : whether chat markup stands around it; without, ``start``, or else the last line of the question, is what is
        fed behind the context.
    """

    before: str
    question: str
    metric: str
    tokens: int
    start: str = ""
    chat: bool = True

    def prompt(self, context: str, asked: str) -> Prompt:
        """The prompt for a row's context and input."""
        # Not str.format: both may hold braces.
        before = self.before.replace("{context}", context)
        question = self.question.replace("{input}", asked)
        if self.chat or self.start:
            return Prompt(before, question, self.start)
        lines, end, last = question.rstrip("\n").rpartition("\n")
        return Prompt(before, lines + end, last + question[len(question.rstrip("\n")) :])


@dataclass(frozen=True)
class Place:
    """Where data is.

    Attributes
    ----------
    task : that reads it, for errors.
    source : a folder, or the name of a data set on the hub.
    file : without folder and ending.
    hub : arguments of ``datasets.load_dataset`` behind the name.
    fields : that every row has.
    """

    task: str
    source: Source
    file: str
    hub: Mapping[str, str]
    fields: tuple[str, ...]

    def rows(self, count: int, seed: int) -> list[Row]:
        """Give the first rows: as published for seed 0, else in an order that depends on the seed.

        Raises
        ------
        EvaluationError
            If the source is missing or cannot be read, a line or row is broken, or there are too few.
        """
        rows = self._read()
        if len(rows) < count:
            raise EvaluationError(f"task {self.task!r} has {len(rows)} rows; {count} samples were asked for")
        if seed:
            random.Random(f"{self.task}/{seed}").shuffle(rows)
        return rows[:count]

    def _read(self) -> list[Row]:
        if self.source is None:
            raise EvaluationError(
                f"task {self.task!r} needs source=…: a folder that holds {self.file}.jsonl, or a data set on the hub"
            )
        folder = Path(self.source).expanduser()
        if folder.is_dir():
            return [self._checked(row, where) for row, where in self._lines(folder)]
        if not _HUB_NAME.fullmatch(os.fspath(self.source)):
            raise EvaluationError(
                f"task {self.task!r}: {os.fspath(self.source)!r} is no folder and no name of a data set on the hub"
            )
        return [self._checked(row, where) for row, where in self._hub_rows(os.fspath(self.source))]

    def _lines(self, folder: Path) -> Iterator[tuple[Any, str]]:
        files = [folder / f"{self.file}.jsonl", folder / "data" / f"{self.file}.jsonl"]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            raise EvaluationError(f"task {self.task!r}: no file {str(files[0])!r}, nor {str(files[1])!r}")
        try:
            for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
                where = f"{str(file)!r}, line {number}"
                if line.strip():
                    yield _parsed(line, f"task {self.task!r}: {where}"), where
        except OSError as error:
            raise EvaluationError(f"task {self.task!r}: {str(file)!r} cannot be read: {error.strerror}") from error

    def _hub_rows(self, name: str) -> Iterator[tuple[Any, str]]:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise EvaluationError(
                f"task {self.task!r}: {name!r} is no folder, and reading it from the hub needs the package 'datasets'"
            ) from error
        try:
            rows = load_dataset(name, **self.hub)
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise EvaluationError(f"task {self.task!r}: data set {name!r} cannot be loaded: {first_line}") from error
        for number, row in enumerate(rows, 1):
            yield row, f"{name!r}, row {number}"

    def _checked(self, row: Any, where: str) -> Row:
        if not isinstance(row, Mapping):
            raise EvaluationError(f"task {self.task!r}: {where} is a {type(row).__name__}; allowed is an object")
        missing = [field for field in self.fields if field not in row]
        if missing:
            raise EvaluationError(
                f"task {self.task!r}: {where} has no field {missing[0]!r}; needed are {', '.join(self.fields)}"
            )
        if not isinstance(row["context"], str):
            raise EvaluationError(f"task {self.task!r}: {where} has a context that is no text")
        return {**row, "where": where}


def middle_cut(name: str, draw: Draw, context: str, build: Callable[[str], Prompt]) -> Prompt:
    """Build a prompt around a context, whose middle is left out where the whole is too long.

    LongBench (Bai et al. 2024) cuts the middle out of the whole prompt; here instructions and question are kept whole.

    Parameters
    ----------
    name, draw : of the task, and how long.
    context : of the row.
    build : makes the prompt of what is left of the context.

    Raises
    ------
    EvaluationError
        If the prompt is too long without any context.
    """
    renderer = draw.renderer

    def ends(units: int) -> str:
        kept = units * _KEPT_BY_A_UNIT
        return context[:kept] + context[len(context) - kept :]

    if renderer.length(renderer.whole_context(build(context))) <= draw.tokens:
        return build(context)
    most = len(context) // (2 * _KEPT_BY_A_UNIT)
    units = largest_fitting(
        name, lambda units: renderer.length(renderer.whole_context(build(ends(units)))), draw.tokens, most
    )
    return build(ends(units))


def texts(value: Any) -> tuple[str, ...]:
    """Answers of a row, which are published as a text, a number, or a list of these."""
    return tuple(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else (str(value),)


def options_text(options: Sequence[Any]) -> str:
    """Options to choose from, each on a line behind its letter."""
    return "\n".join(f"{letter}. {option}" for letter, option in zip(_LETTERS, options, strict=False))


def option_answers(name: str, row: Row, answer: Any, options: Sequence[Any]) -> tuple[str, str]:
    """The right option as its letter and its words, whichever of both the row gives.

    Raises
    ------
    EvaluationError
        If the answer is none of the options.
    """
    words = [str(option) for option in options]
    for one in texts(answer):
        if one in words:
            return _LETTERS[words.index(one)], one
        if len(one) == 1 and one in _LETTERS[: len(words)]:
            return one, words[_LETTERS.index(one)]
    raise EvaluationError(f"task {name!r}: {row['where']} has the answer {answer!r}, which is none of {words}")


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{where} is not UTF-8 text: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise EvaluationError(f"{where} is no JSON: {error.msg} at column {error.colno}") from error
