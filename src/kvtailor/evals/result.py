"""What a comparison found: a row for each question of each sample with each plan, in a folder of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvtailor.errors import EvaluationError
from kvtailor.evals import naming
from kvtailor.evals.sample import Sample

FORMAT = 1
"""Version of the files."""
ROWS, SAMPLES = "rows.jsonl", "samples.jsonl"


@dataclass(frozen=True)
class Row:
    """One question of one sample with one plan.

    Attributes
    ----------
    engine : "kvtailor", "transformers" or "kvpress": whose cache it was.
    plan, budget : the name asked for, and the share of the default cache's bytes that was asked for, or None.
    settings : the plan itself, as plain data.
    task, metric, tokens, sample, ask, depth : which question; ``tokens`` is the context length asked for.
    context_tokens : of the sample.
    score : by the metric, 0 to 1; in tasks scored by what follows, the negative log-likelihood in nats per token.
    answer, expected : the texts.
    kl, agreement : as in :class:`kvtailor.evals.answering.Answer`.
    bytes_held, bytes_fast : in memory once the context is held, and without slow host memory.
    bytes_on_disk, bytes_peak, bytes_default : in files, at most, and of the default cache.
    read_seconds, compress_seconds : of the context's pass, which all plans share, and of filling the cache.
    token_ms : median time of a decode step, milliseconds.
    tokens_answered : decoded.
    kept : tokens of the context that each KV head of each layer keeps.
    run : model, dtype, seed, versions, threads: see :func:`kvtailor.evals.grid.about`.
    """

    engine: str
    plan: str
    budget: float | None
    settings: dict[str, Any]
    task: str
    metric: str
    tokens: int
    sample: int
    ask: int
    depth: float | None
    context_tokens: int
    score: float
    answer: str
    expected: list[str]
    kl: float | None
    agreement: float | None
    bytes_held: int
    bytes_fast: int
    bytes_on_disk: int
    bytes_peak: int
    bytes_default: int
    read_seconds: float
    compress_seconds: float
    token_ms: float
    tokens_answered: int
    kept: list[list[int]]
    run: dict[str, Any]

    @property
    def label(self) -> str:
        """Engine (where it is not ours), plan and budget for people: "snapkv at 25%"."""
        return naming.label(self.engine, self.plan, self.budget)

    @property
    def share(self) -> float:
        """Bytes held of the default cache's."""
        return self.bytes_held / self.bytes_default

    @property
    def place(self) -> tuple[str, int, int]:
        """The sample: task, length and number."""
        return self.task, self.tokens, self.sample


Key = tuple[str, int, int, str, str]
"""Task, length, sample, engine and candidate."""


class Results:
    """The rows of a folder; they are added as they come.

    Parameters
    ----------
    folder : made if it is not there.
    run : what was run, as plain data; a folder that holds rows of something else is refused.

    Raises
    ------
    EvaluationError
        If the folder or its files cannot be read or written, are of another version or of another run.
    """

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        self.folder, self.run = folder, run
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EvaluationError(f"results {str(folder)!r} cannot be made: {error.strerror}") from None
        self._drop_torn_line()
        self.rows = list(read_rows(folder)) if (folder / ROWS).exists() else []
        for row in self.rows:
            if row.engine == naming.OURS and (other := _differs(row.run, run)):
                raise EvaluationError(
                    f"{folder / ROWS} holds rows of another run ({other}): allowed are the same settings, or another "
                    "folder"
                )
        self._keys = {key_of(row) for row in self.rows}
        self._told = self._samples_told()

    def holds(self, key: Key) -> bool:
        """Whether a sample was measured with a candidate."""
        return key in self._keys

    def add(self, rows: Iterable[Row]) -> None:
        """Append all rows of one sample with one candidate."""
        new = list(rows)
        text = "".join(json.dumps({"format": FORMAT, **asdict(row)}) + "\n" for row in new)
        self._append(ROWS, text)
        self.rows += new
        self._keys |= {key_of(row) for row in new}

    def tell(self, sample: Sample, tokens: int) -> None:
        """Keep a sample with its prompt, once."""
        place = (sample.task, tokens, sample.number)
        if place not in self._told:
            self._append(SAMPLES, json.dumps({"format": FORMAT, "tokens": tokens, **asdict(sample)}) + "\n")
            self._told.add(place)

    def _append(self, name: str, text: str) -> None:
        try:
            with (self.folder / name).open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise EvaluationError(f"{self.folder / name} cannot be written: {error.strerror}") from None

    def _drop_torn_line(self) -> None:
        """A run that was cut off may have left half a line."""
        for name in (ROWS, SAMPLES):
            path = self.folder / name
            if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
                path.write_bytes(data[: data.rfind(b"\n") + 1])

    def _samples_told(self) -> set[tuple[str, int, int]]:
        path = self.folder / SAMPLES
        if not path.exists():
            return set()
        return {(one["task"], one["tokens"], one["number"]) for one in _lines(path)}


def key_of(row: Row) -> Key:
    """What a row's sample and candidate are."""
    return *row.place, row.engine, naming.key(row.plan, row.budget)


def read_rows(folder: Path) -> Iterator[Row]:
    """The rows of a folder, or of a file of rows.

    Raises
    ------
    EvaluationError
        If the file cannot be read, or is of another version.
    """
    path = folder if folder.is_file() else folder / ROWS
    names = {field.name for field in fields(Row)}
    for number, data in enumerate(_lines(path), 1):
        version = data.pop("format", None)
        if version != FORMAT:
            raise EvaluationError(
                f"{path} line {number} is of format {version}, and this version reads {FORMAT}: run the comparison "
                "again in another folder"
            )
        if set(data) != names:
            odd = ", ".join(sorted(set(data) ^ names))
            raise EvaluationError(f"{path} line {number} is no row of results: it has or lacks {odd}")
        yield Row(**data)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise EvaluationError(f"{path} is no text in UTF-8") from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            data = json.loads(line)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise EvaluationError(f"{path} line {number} is no JSON object: remove it, or choose another folder")
        yield data


def _differs(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What of a run differs from another, in words; versions may."""
    odd = [name for name in sorted(now) if name != "versions" and before.get(name) != now[name]]
    return ", ".join(f"{name} {before.get(name)!r}, now {now[name]!r}" for name in odd)
