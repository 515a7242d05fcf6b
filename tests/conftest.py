"""Settings that every test runs under, and the kernels that it runs on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from transformers import logging

from kvtailor.kernels import choice

logging.set_verbosity_error()

# How far logits of two ways to compute the same lie apart, in parts of the largest one, by what the model computes in.
ROUNDING = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
Logits = torch.Tensor | Iterable[torch.Tensor]


@dataclass(frozen=True)
class Kernels:
    """What the kernels that a test runs on owe.

    Attributes
    ----------
    exact : whether a layer kept whole computes what the default cache does, to the bit.
    """

    exact: bool

    def check(self, found: Logits, expected: Logits, dtype: torch.dtype = torch.float32) -> None:
        """Hold logits of a plan that keeps everything against the default cache's: the same bits, or equal to rounding.

        Parameters
        ----------
        found, expected : logits, or those of each step.
        dtype : what the model computes in.
        """
        found, expected = (x if isinstance(x, torch.Tensor) else torch.stack(tuple(x)) for x in (found, expected))
        if self.exact:
            assert torch.equal(found, expected)
            return
        torch.testing.assert_close(found, expected, atol=ROUNDING[dtype] * float(expected.abs().max()), rtol=0)


@pytest.fixture(params=["reference", "auto"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The test runs on the reference kernels and on the best that were compiled, if any."""
    monkeypatch.setenv(choice.VARIABLE, request.param)
    return Kernels(exact=choice.active() == "reference")


@pytest.fixture
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs on the reference kernels, because it holds what only they promise or costs too much to do twice."""
    monkeypatch.setenv(choice.VARIABLE, "reference")


@pytest.fixture(autouse=True)
def _no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
