"""Packing a row: which tokens stay exact, and which go into sealed blocks of codes."""

from __future__ import annotations

import torch

from kvtailor.arranged import Arranged, Codes, can_arrange, code_bytes
from kvtailor.errors import PlanError
from kvtailor.formats import GROUP_TOKENS, Packed, PackedFormat, check_format, default_group
from kvtailor.layers.row import Row
from kvtailor.layers.segment import Segment
from kvtailor.layers.tail import whole_blocks
from kvtailor.plan import Form
from kvtailor.quantize.pack import pack_for, widest_channels


class Packing:
    """How a layer's rows are packed: the formats of keys and values, and which tokens stay exact.

    Parameters
    ----------
    form : the plan's choice.
    key_dim, value_dim : channels of a head.
    path : the C++ kernels that pack and read the codes, where the form has an order for them; None for the reference.
    """

    def __init__(self, form: Form, key_dim: int, value_dim: int, path: str | None = None) -> None:
        assert form.bits is not None
        self.form = form
        rotated = form.kind == "rotated"
        self.values = PackedFormat(
            form.bits, "token", form.group or default_group(value_dim), form.resolved_levels, rotated
        )
        if rotated:
            self.keys = PackedFormat(
                form.bits, "token", form.group or default_group(key_dim), form.resolved_levels, True
            )
        else:
            self.keys = PackedFormat(form.bits, "channel", form.group or GROUP_TOKENS, form.resolved_levels, False)
        check_format(self.keys, key_dim)
        check_format(self.values, value_dim)
        fits = can_arrange(self.keys, key_dim, values=False) and can_arrange(self.values, value_dim, values=True)
        self.path = path if fits else None
        if form.outliers >= key_dim:
            raise PlanError(
                f"outliers {form.outliers} cannot be used: the head has {key_dim} channels; allowed are fewer"
            )

    def seal(self, row: Row) -> None:
        """Move what is due from the row's tail into segments: the sinks as they are, then whole blocks of codes."""
        if not row.segments and self.form.exact:
            if row.tail.longest < self.form.exact + self.form.residual + GROUP_TOKENS:
                return
            row.seal(self.form.exact, lambda keys, values: (keys.clone(), values.clone()))
        blocks = (row.tail.longest - self.form.residual) // GROUP_TOKENS
        if blocks > 0:
            outliers = self._outlier_channels(row, blocks * GROUP_TOKENS)
            row.seal(
                blocks * GROUP_TOKENS,
                lambda k, v: (
                    pack_for(self.path, k, self.keys, False, outliers),
                    pack_for(self.path, v, self.values, True),
                ),
            )
            merge_newest(row)

    def _outlier_channels(self, row: Row, count: int) -> torch.Tensor | None:
        if not self.form.outliers:
            return None
        for segment in row.segments:
            if isinstance(segment.keys, Codes):
                return segment.keys.outlier_channels
        # The first block alone decides, so that the choice does not depend on how the prompt was cut.
        first = row.tail.even(row.tail.keys)[:, :GROUP_TOKENS]
        return widest_channels(first, self.form.outliers)

    @property
    def exact_room(self) -> int:
        """Tokens for which a row has exact room: whole blocks, with one open and a chunk coming in."""
        return self.form.exact + whole_blocks(self.form.residual + 2 * GROUP_TOKENS - 1)

    def token_bytes(self, heads: int, dims: tuple[int, int], element: int) -> float:
        """Bytes of one packed token over all KV heads, scales included."""
        total = 0.0
        for dim, fmt, values in zip(dims, (self.keys, self.values), (False, True), strict=True):
            total += code_bytes(fmt, dim, values, self.path is not None) + 4 * dim / fmt.group
        return heads * (total + self.form.outliers * element)


def merge_newest(row: Row) -> None:
    """Join the newest packed segments where they are of like size, so that a row holds few of them."""
    while len(row.segments) > 1:
        older, newer = row.segments[-2:]
        if older.length > newer.length or older.length % GROUP_TOKENS or not _alike(older, newer):
            return
        row.segments[-2:] = [joined(older, newer)]


def _alike(older: Segment, newer: Segment) -> bool:
    pairs = ((older.keys, newer.keys), (older.values, newer.values))
    return all(isinstance(a, Codes) and isinstance(b, Codes) and a.scale.dtype == b.scale.dtype for a, b in pairs)


def joined(older: Segment, newer: Segment) -> Segment:
    """Two packed segments as one."""
    slots: torch.Tensor | range
    if (
        isinstance(older.positions, range)
        and isinstance(newer.positions, range)
        and older.positions.stop == newer.positions.start
    ):
        slots = range(older.positions.start, newer.positions.stop)
    else:
        slots = torch.cat([older.slots(), newer.slots()]).int()
    marks = None if older.marks is None or newer.marks is None else torch.cat([older.marks, newer.marks], dim=1)
    return Segment(_cat(older.keys, newer.keys), _cat(older.values, newer.values), slots, marks)


def _cat(older: torch.Tensor | Codes, newer: torch.Tensor | Codes) -> Codes:
    if isinstance(older, Arranged) and isinstance(newer, Arranged):
        return Arranged.cat([older, newer])
    assert isinstance(older, Packed) and isinstance(newer, Packed)
    return Packed.cat([older, newer])
