"""Retrieval, timed step by step and as a whole: a query reads only the tokens that its scores on codes put first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.bench.kernel import SCALE, Kernel, dtype_name
from kvtailor.bench.layer import GROUP, HEADS, Layer, row_of, whole_form
from kvtailor.bench.timing import Candidate
from kvtailor.kernels import native
from kvtailor.kernels.native import Precision, Weighing

CHOSEN = 512
"""Tokens that are read."""

PRECISION: Precision = "fast"  # of scores: they only choose


@dataclass(frozen=True)
class Way:
    """A way to choose tokens.

    Attributes
    ----------
    kind, bits : of the codes that are scored, as the presets of these bits store them.
    by_query_head : whether each query head reads tokens of its own, or those of a KV head the same.
    """

    kind: str
    bits: int
    by_query_head: bool

    @property
    def words(self) -> str:
        """The way in words."""
        return f"{self.bits}-bit, {'query' if self.by_query_head else 'KV'} heads"


WAYS = (Way("channel", 1, by_query_head=False), Way("rotated", 2, by_query_head=True))


def retrieval(layer: Layer, dtype: torch.dtype, path: str) -> list[Kernel]:
    """Both ways of retrieval, each as a whole and in its steps."""
    return [kernel for way in WAYS for kernel in Retrieval(layer, dtype, path, way).kernels()]


class Retrieval:
    """One way of retrieval over a layer, with room for what each step gives.

    Parameters
    ----------
    layer, dtype : what is attended, and in which dtype.
    path : the C++ kernels.
    way : how tokens are chosen.
    """

    def __init__(self, layer: Layer, dtype: torch.dtype, path: str, way: Way) -> None:
        self.path, self.way, self.dtype = path, way, dtype
        self.keys, self.values = layer.dense(dtype)
        self.codes, values = layer.packed(whole_form(way.kind, way.bits), dtype)
        self.rows = [row_of(self.codes, values, layer.tokens, dtype).handed()]
        self.query = layer.query.to(dtype)  # (1, Hq, 1, D)
        heads = (HEADS, GROUP) if way.by_query_head else (HEADS,)
        self.scores = torch.empty(1, HEADS * GROUP, 1, layer.tokens)
        self.best = torch.empty(HEADS, layer.tokens)
        self.index = torch.empty(*heads, min(CHOSEN, layer.tokens), dtype=torch.long)
        self.out = torch.empty(HEADS, GROUP, self.values.shape[-1], dtype=dtype)

    def kernels(self) -> list[Kernel]:
        """The whole and its steps; each step takes what the one before gave last."""
        steps: list[tuple[str, Callable[[], None], int | None]] = [("score", self.score, self.codes.nbytes)]
        if not self.way.by_query_head:
            steps.append(("combine", self.combine, None))
        steps += [("top-k", self.top, None), ("gather", self.gather, self._gathered_bytes())]
        self.retrieve()
        whole = self._kernel("retrieve", self.retrieve, None, "attention")
        return [whole, *(self._kernel(name, call, nbytes, "retrieval") for name, call, nbytes in steps)]

    def retrieve(self) -> Tensor:
        """All steps; gives the output, (Hkv, G, D)."""
        self.score()
        if not self.way.by_query_head:
            self.combine()
        self.top()
        self.gather()
        return self.out

    def score(self) -> None:
        """Scores of all tokens from the codes of their keys."""
        native.scores(self.path, self.rows, self.query, self.scores, Weighing(SCALE), PRECISION)

    def combine(self) -> None:
        """One score of a token for all query heads of a KV head."""
        scores = self.scores.view(HEADS, GROUP, -1)
        native.best_of_group(self.path, scores, self.best, "softmax")

    def top(self) -> None:
        """The tokens of the greatest scores."""
        scores = self.scores.view(HEADS * GROUP, -1) if self.way.by_query_head else self.best
        native.topk(scores, self.index.flatten(0, -2))

    def gather(self) -> None:
        """Attention over the chosen tokens, exact."""
        query = self.query.view(HEADS, GROUP, -1)
        native.gather_attend(self.path, query, self.keys, self.values, self.index, SCALE, self.out)

    def _gathered_bytes(self) -> int:
        return self.index.numel() * 2 * self.query.shape[-1] * self.dtype.itemsize

    def _kernel(self, name: str, call: Callable[[], Any], nbytes: int | None, does: str) -> Kernel:
        precision = dtype_name(self.dtype) if name == "gather" else PRECISION
        return Kernel(name, self.way.words, precision, "plain", nbytes, Candidate(call), does)
