"""The grid of a comparison: tasks, lengths, samples and plans, one reading of a context for all plans."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import kvtailor
from kvtailor.errors import EvaluationError
from kvtailor.evals import naming
from kvtailor.evals.answering import Answered, answers
from kvtailor.evals.candidates import Candidate, candidates
from kvtailor.evals.metrics import metric
from kvtailor.evals.reading import FOLLOWING, Reading, check_length, read
from kvtailor.evals.rendering import context_ids
from kvtailor.evals.result import Results, Row
from kvtailor.evals.sample import Sample, Task
from kvtailor.identity import identity_of
from kvtailor.kernels.choice import active
from kvtailor.models.load import Loaded

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """One sample, and the candidates that it is still to be measured with."""

    task: Task
    tokens: int
    sample: Sample
    missing: list[Candidate]

    @property
    def words(self) -> str:
        """What is being done, for people."""
        return f"{self.sample.task} {self.tokens} #{self.sample.number}"


@dataclass(frozen=True)
class Grid:
    """What is to be measured.

    Attributes
    ----------
    tasks : the tasks.
    lengths : tokens of a context.
    plans : names; see :func:`kvtailor.evals.candidates.candidates`.
    budgets : shares of the default cache's bytes.
    samples : of each task at each length.
    seed : of the samples.
    """

    tasks: Sequence[Task]
    lengths: Sequence[int]
    plans: Sequence[str]
    budgets: Sequence[float]
    samples: int
    seed: int = 0

    def check(self) -> None:
        """Raise EvaluationError if there is nothing to measure."""
        for name, count in (("tasks", len(self.tasks)), ("lengths", len(self.lengths)), ("samples", self.samples)):
            if count < 1:
                raise EvaluationError(f"{count} {name} leave nothing to measure: allowed are 1 or more")

    def works(self, loaded: Loaded, results: Results) -> tuple[list[Work], list[str]]:
        """Everything that the results lack, and a line for each candidate that was left out.

        Parameters
        ----------
        loaded : the model.
        results : what was measured before.
        """
        self.check()
        found, notes = [], []
        for tokens in self.lengths:
            for task in self.tasks:
                for sample in task.samples(loaded.tokenizer, tokens, self.samples, self.seed):
                    context = len(context_ids(loaded.tokenizer, sample.context))
                    check_length(loaded, sample, task.metric, context)
                    tried, left_out = self.candidates(loaded, context - 1)  # its last token comes with the question
                    place = sample.task, tokens, sample.number
                    missing = [one for one in tried if not results.holds((*place, naming.OURS, one.key))]
                    notes += [f"{sample.task} at {tokens} tokens: {line}" for line in left_out]
                    if missing:
                        found.append(Work(task, tokens, sample, missing))
        return found, list(dict.fromkeys(notes))

    def candidates(self, loaded: Loaded, tokens: int) -> tuple[list[Candidate], list[str]]:
        """The plans for a context of ``tokens`` tokens, and what was left out."""
        return candidates(self.plans, self.budgets, loaded.model.config, tokens, loaded.model.dtype)


def run(
    loaded: Loaded,
    works: Sequence[Work],
    results: Results,
    progress: Progress = lambda words: None,
    reader: Loaded | None = None,
) -> None:
    """Measure what is missing, sample by sample; each candidate's rows are kept as they come.

    Parameters
    ----------
    loaded : the model.
    works : from :meth:`Grid.works`.
    results : where rows go.
    progress : called with a few words before each sample.
    reader : the same model in the data type that contexts are read in; default: ``loaded``.
    """
    for work in works:
        keep(results, work, measured(loaded, work, results.run, reader), progress)


def keep(results: Results, work: Work, found: Iterable[list[Row]], progress: Progress) -> None:
    """Take in a sample and its rows, candidate by candidate as they come.

    Parameters
    ----------
    results, progress : as for :func:`run`.
    work : the sample.
    found : its rows.
    """
    progress(work.words)
    results.tell(work.sample, work.tokens)
    for rows in found:
        results.add(rows)


def measured(
    loaded: Loaded, work: Work, about_run: dict[str, Any], reader: Loaded | None = None
) -> Iterator[list[Row]]:
    """The rows of one sample, candidate by candidate; the model reads the context once.

    Parameters
    ----------
    loaded, reader : as for :func:`run`.
    work : the sample and its candidates.
    about_run : goes into every row.
    """
    reading = read(reader or loaded, work.sample, work.task.metric, loaded.model.dtype)
    for one in work.missing:
        answered = answers(loaded, reading, one.plan, work.task.metric)
        yield rows_of(work, one, reading, answered, about_run)


def rows_of(work: Work, one: Candidate, reading: Reading, answered: Answered, about_run: dict[str, Any]) -> list[Row]:
    """A row for each question."""
    name, held, rows = work.task.metric, answered.held, []
    for answer in answered.answers:
        ask = work.sample.asks[answer.ask]
        score = answer.loss if name == FOLLOWING else metric(name)(answer.text, ask)
        assert score is not None
        rows.append(
            Row(
                engine=naming.OURS,
                plan=one.name,
                budget=one.budget,
                settings=one.plan.model_dump(mode="json", exclude_defaults=True, exclude={"measured"}),
                task=work.sample.task,
                metric=name,
                tokens=work.tokens,
                sample=work.sample.number,
                ask=answer.ask,
                depth=ask.depth,
                context_tokens=reading.context_tokens,
                score=score,
                answer=answer.text,
                expected=[] if name == FOLLOWING else list(ask.answers),
                kl=answer.kl,
                agreement=answer.agreement,
                bytes_held=held.bytes_held,
                bytes_fast=held.bytes_fast,
                bytes_on_disk=sum(layer.bytes_on_disk for layer in held.layers),
                bytes_peak=answered.bytes_peak,
                bytes_default=held.bytes_default,
                read_seconds=reading.seconds,
                compress_seconds=answered.compress_seconds,
                token_ms=answer.token_ms,
                tokens_answered=answer.tokens,
                kept=[[round(kept) for kept in layer.kept_by_head] for layer in held.layers],
                run=about_run,
            )
        )
    return rows


def about(loaded: Loaded, seed: int, reader: Loaded | None = None) -> dict[str, Any]:
    """What a run was made with, as plain data: it stands in every row, and a folder holds rows of one run."""
    return {
        "model": loaded.name,
        "identity": identity_of(loaded.model)["config"],
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "read_dtype": str((reader or loaded).model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
        "kernels": active(),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "versions": {
            "kvtailor": kvtailor.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
