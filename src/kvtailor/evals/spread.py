"""Samples spread over the machines of a Ray cluster, each of which loads the model once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvtailor.errors import EvaluationError
from kvtailor.evals.grid import Progress, Work, keep, measured
from kvtailor.evals.result import Results, Row
from kvtailor.models.load import Loaded, load


class Worker:
    """A model on one machine; Ray makes an actor of it.

    Parameters
    ----------
    name, dtype, device : of the model, as they were loaded first.
    read_dtype : that contexts are read in.
    """

    def __init__(self, name: str, dtype: torch.dtype, device: str, read_dtype: torch.dtype) -> None:
        self.loaded = load(name, dtype, device)
        self.reader = self.loaded if read_dtype == dtype else load(name, read_dtype, device)

    def measure(self, work: Work, run: dict[str, Any]) -> list[list[Row]]:
        """All rows of one sample."""
        return list(measured(self.loaded, work, run, self.reader))


def run(
    loaded: Loaded,
    works: Sequence[Work],
    results: Results,
    progress: Progress = lambda words: None,
    reader: Loaded | None = None,
) -> None:
    """Measure what is missing on every machine of the cluster, one sample on one machine at a time.

    Parameters
    ----------
    loaded, works, results, progress, reader : as for :func:`kvtailor.evals.grid.run`.

    Raises
    ------
    EvaluationError
        If Ray is not installed.
    """
    try:
        import ray
        from ray.util import ActorPool
    except ImportError:
        raise EvaluationError(
            "--ray needs the package ray, which is not installed: install it (pip install ray), or leave --ray out"
        ) from None
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    machines = max(1, len([node for node in ray.nodes() if node["Alive"]]))
    cores = torch.get_num_threads()
    actor = ray.remote(num_cpus=cores)(Worker)
    model, read_dtype = loaded.model, (reader or loaded).model.dtype
    workers = [
        actor.remote(loaded.name, model.dtype, str(model.device), read_dtype) for _ in range(min(machines, len(works)))
    ]
    pool = ActorPool(workers)
    by_place = {(work.sample.task, work.tokens, work.sample.number): work for work in works}
    for found in pool.map_unordered(lambda one, work: one.measure.remote(work, results.run), list(works)):
        keep(results, by_place[found[0][0].place], found, progress)
