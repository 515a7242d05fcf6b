"""The errors that users meet. Each names the thing, the value it held and what is allowed."""

from __future__ import annotations


class KVTailorError(ValueError):
    """Base of every error that kvtailor raises on purpose."""


class PlanError(KVTailorError):
    """A plan, preset or budget cannot be used."""


class ModelError(KVTailorError):
    """A model, or a file that should hold one, cannot be served."""


class CacheError(KVTailorError):
    """A cache was used in a way that it cannot answer rightly."""


class KernelError(KVTailorError):
    """Kernels were asked for that do not exist or cannot run here."""


class StoreError(KVTailorError):
    """Slow memory could not hold, or no longer holds, what was written to it."""


class EvaluationError(KVTailorError):
    """A task, metric or result of an evaluation cannot be used."""
