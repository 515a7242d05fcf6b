"""The layer that kernels are timed on: the sizes of Llama 3.1 8B, random keys and values, dense or packed."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.arranged import Arranged, Codes
from kvtailor.formats import Packed
from kvtailor.layers.packing import Packing
from kvtailor.layers.row import Row
from kvtailor.layers.segment import Segment
from kvtailor.layers.tail import whole_blocks
from kvtailor.plan import Form

HEADS, GROUP, DIM = 8, 4, 128
"""KV heads, query heads of each, and channels of a head."""

RANDOM_TOKENS = 8192
"""Random tokens, which longer caches repeat: reading them takes as long as if they differed."""


class Layer:
    """Keys, values and one query of a layer at one length.

    Parameters
    ----------
    tokens : length of the cache.
    path : the C++ kernels that the codes are for; None for the reference.
    """

    def __init__(self, tokens: int, path: str | None) -> None:
        source = torch.Generator().manual_seed(tokens)
        count = whole_blocks(min(tokens, RANDOM_TOKENS))
        self.tokens, self.path = tokens, path
        self.keys, self.values = (torch.randn(HEADS, count, DIM, generator=source) for _ in range(2))
        self.query = torch.randn(1, HEADS * GROUP, 1, DIM, generator=source)
        self._dense: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values, (Hkv, tokens, D) each; all that ask for a dtype read the same ones."""
        if dtype not in self._dense:
            times = -(-self.tokens // self.keys.shape[1])
            keys, values = (part.to(dtype).repeat(1, times, 1)[:, : self.tokens] for part in (self.keys, self.values))
            self._dense[dtype] = keys, values
        return self._dense[dtype]

    def packed(self, form: Form, dtype: torch.dtype) -> tuple[Codes, Codes]:
        """Codes of keys and of values, of ``tokens`` tokens each.

        Parameters
        ----------
        form : how they are packed; nothing stays exact.
        dtype : of the numbers that are packed.
        """
        row = self.unpacked_row(dtype)
        self.packing(form).seal(row)
        (segment,) = row.segments
        keys, values = (_repeated(part, self.tokens) for part in (segment.keys, segment.values))
        return keys, values

    def packing(self, form: Form) -> Packing:
        """What packs a row of this layer in the whole."""
        return Packing(form, DIM, DIM, self.path)

    def unpacked_row(self, dtype: torch.dtype) -> Row:
        """A row whose tail holds the random tokens, which are whole blocks."""
        keys, values = self.keys.to(dtype), self.values.to(dtype)
        row = Row(keys, values)
        row.tail.append(keys, values, torch.arange(keys.shape[1]))
        return row


def whole_form(kind: str, bits: int, precision: str = "default") -> Form:
    """A form that packs every token."""
    return Form.model_validate({"kind": kind, "bits": bits, "precision": precision, "exact": 0, "residual": 0})


def row_of(keys: Tensor | Codes, values: Tensor | Codes, tokens: int, dtype: torch.dtype) -> Row:
    """A row that holds ``tokens`` tokens as one segment."""
    nothing = torch.empty(HEADS, 0, DIM, dtype=dtype)
    row = Row(nothing, nothing)
    row.segments = [Segment(keys, values, range(tokens))]
    return row


def _repeated(part: Tensor | Codes, tokens: int) -> Codes:
    assert isinstance(part, Codes)
    times = -(-tokens // part.length)
    if isinstance(part, Arranged):
        return Arranged.cat([part] * times).narrow(tokens)
    assert isinstance(part, Packed)
    return Packed.cat([part] * times).narrow(tokens)
