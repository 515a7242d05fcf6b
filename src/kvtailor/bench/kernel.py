"""A kernel that is timed, and the row that its times make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtailor.bench.layer import DIM
from kvtailor.bench.result import KernelRow
from kvtailor.bench.timing import Candidate, Timed

BASE = torch.bfloat16
"""The dtype of the attention that all are compared with."""

SCALE = DIM**-0.5


@dataclass(frozen=True)
class Kernel:
    """A kernel that is timed.

    Attributes
    ----------
    kernel, form, precision, case : as in a :class:`KernelRow`.
    nbytes : bytes that it reads, or None where they do not tell its speed.
    candidate : the call.
    does : "attention", which is compared with SDPA, or something else.
    """

    kernel: str
    form: str
    precision: str
    case: str
    nbytes: int | None
    candidate: Candidate
    does: str = "attention"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, as the command line takes it."""
    return str(dtype).removeprefix("torch.")


def rows_of(kernels: Sequence[Kernel], timed: Sequence[Timed], tokens: int) -> list[KernelRow]:
    """The rows of kernels that were timed together.

    Parameters
    ----------
    kernels, timed : the kernels, PyTorch's attention in ``BASE`` among them, and their times.
    tokens : length of the cache.
    """
    bases = {
        kernel.form: time
        for kernel, time in zip(kernels, timed, strict=True)
        if (kernel.kernel, kernel.precision, kernel.case) == ("sdpa", dtype_name(BASE), "plain")
    }
    rows = []
    for kernel, time in zip(kernels, timed, strict=True):
        compared = bases if kernel.does == "attention" else {}
        rows.append(
            KernelRow(
                kernel=kernel.kernel,
                form=kernel.form,
                precision=kernel.precision,
                case=kernel.case,
                tokens=tokens,
                threads=time.threads,
                ms=time.ms,
                cpu_ms=time.cpu_ms,
                speedup=time.speedup(compared.get("grouped")),
                speedup_gqa=time.speedup(compared.get("enable_gqa")),
                gbytes_per_s=kernel.nbytes / time.fair_ms / 1e6 if kernel.nbytes and time.fair_ms else None,
            )
        )
    return rows
