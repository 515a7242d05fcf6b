"""Packed codes in the order that the C++ kernels read: blocks of 64 tokens, in lines of 64 bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kvtailor.errors import CacheError
from kvtailor.formats import GROUP_TOKENS, Coded, Packed, PackedFormat, plane_bits, read_plane, write_plane

_OUTPUTS = 16  # of a line
_QUAD = 4  # numbers that a line contracts at a time
MOST_DIM = 256


@dataclass(frozen=True, eq=False)
class Arranged(Coded):
    """n tokens of `dim` channels for H heads: the same codes, scales and zeros as a `Packed`, in another order.

    A line of 64 bytes belongs to 16 outputs and packs 8 / b quads of contracted codes into the bits of its bytes: byte
    4 * output + place in the quad, quad s of the line from bit s * b. Outputs are tokens for keys, whose lines contract
    channels, and channels for values, whose lines contract tokens.

    Parameters
    ----------
    format : how the numbers are written.
    dim : channels of a head, a multiple of 16.
    length : tokens held; the last block may hold fewer than 64.
    values : whether the lines are those of values.
    planes : uint8 (H, blocks, bytes of a block), one for each width of `plane_bits(format.bits)`.
    scale, zero : 16-bit float; (H, blocks, D / group, 64) on the token axis, (H, blocks, 64 / group, D) on the channel
        axis.
    outlier_channels, outliers : as in a `Packed`.
    """

    format: PackedFormat
    dim: int
    length: int
    values: bool
    planes: tuple[Tensor, ...]
    scale: Tensor
    zero: Tensor
    outlier_channels: Tensor | None = None
    outliers: Tensor | None = None

    def narrow(self, length: int) -> Arranged:
        """Return the first `length` tokens as views; a block that is cut stays whole underneath.

        Raises
        ------
        CacheError : `length` is less than 1 or more than the tokens held.
        """
        if not 1 <= length <= self.length:
            raise CacheError(f"the first {length} of {self.length} packed tokens; allowed: 1 to {self.length}")
        blocks = -(-length // GROUP_TOKENS)
        return self._along_blocks(length, lambda rows: rows[:, :blocks], lambda rows: rows[:, :length])

    def select_blocks(self, index: Tensor) -> Arranged:
        """Return a copy of whole blocks of 64 tokens, in the order of `index`.

        Parameters
        ----------
        index : int64 (blocks,), block numbers counted from the first token.

        Raises
        ------
        CacheError : the tokens held are no whole number of blocks.
        """
        self.check_whole_blocks(self.length)

        def tokens(rows: Tensor) -> Tensor:
            return rows.unflatten(1, (-1, GROUP_TOKENS)).index_select(1, index).flatten(1, 2)

        return self._along_blocks(len(index) * GROUP_TOKENS, lambda rows: rows.index_select(1, index), tokens)

    @staticmethod
    def cat(parts: Sequence[Arranged]) -> Arranged:
        """Join packed tokens of the same heads, in order; a single part is returned as it is.

        Raises
        ------
        CacheError : nothing to join, parts that differ in form, or a part before the last that ends inside a block.
        """
        if not parts:
            raise CacheError("0 packed parts to join; allowed: 1 or more")
        for part in parts[1:]:
            if (part.format, part.dim, part.values, part.heads, part.scale.dtype) != (
                parts[0].format, parts[0].dim, parts[0].values, parts[0].heads, parts[0].scale.dtype,
            ):  # fmt: skip
                raise CacheError("packed parts of different forms joined; allowed: the same form in all parts")
        for part in parts[:-1]:
            if part.length % GROUP_TOKENS:
                raise CacheError(f"a part of {part.length} tokens joined before another; allowed: multiples of 64")
        if len(parts) == 1:
            return parts[0]
        outliers = [part.outliers for part in parts if part.outliers is not None]
        return replace(
            parts[0],
            length=sum(part.length for part in parts),
            planes=tuple(torch.cat(planes, dim=1) for planes in zip(*(part.planes for part in parts), strict=True)),
            scale=torch.cat([part.scale for part in parts], dim=1),
            zero=torch.cat([part.zero for part in parts], dim=1),
            outliers=torch.cat(outliers, dim=1) if outliers else None,
        )

    def packed(self) -> Packed:
        """Return the same tokens in the canonical order."""
        planes = []
        for plane, width in zip(self.planes, plane_bits(self.format.bits), strict=True):
            codes = _codes_of_lines(plane, width, self.dim, self.values)  # (H, blocks, 64, D)
            planes.append(write_plane(codes.flatten(1, 2)[:, : self.length], width))
        if self.format.axis == "token":
            scale, zero = (part.mT.flatten(1, 2)[:, : self.length] for part in (self.scale, self.zero))
        else:
            rows = -(-self.length // self.format.group)
            scale, zero = (part.flatten(1, 2)[:, :rows] for part in (self.scale, self.zero))
        return Packed(
            self.format, self.dim, tuple(planes), scale, zero, self.outlier_channels, self.outliers
        )  # fmt: skip

    def _along_blocks(
        self, length: int, blocks: Callable[[Tensor], Tensor], tokens: Callable[[Tensor], Tensor]
    ) -> Arranged:
        return replace(
            self,
            length=length,
            planes=tuple(blocks(plane) for plane in self.planes),
            scale=blocks(self.scale),
            zero=blocks(self.zero),
            outliers=None if self.outliers is None else tokens(self.outliers),
        )


Codes = Packed | Arranged
"""Packed tokens in either order."""


def can_arrange(fmt: PackedFormat, dim: int, values: bool) -> bool:
    """Whether codes of this form have an arranged order: heads of whole lines, groups of whole outputs."""
    whole = dim % _OUTPUTS == 0 and dim <= MOST_DIM
    return whole and (fmt.group % _OUTPUTS == 0 if fmt.axis == "token" else not values)


def block_bytes(width: int, dim: int, values: bool) -> int:
    """Bytes that a plane of `width` bits takes in a block of 64 tokens."""
    outputs, contracted = (dim, GROUP_TOKENS) if values else (GROUP_TOKENS, dim)
    return outputs // _OUTPUTS * 64 * -(-(contracted // _QUAD) * width // 8)


def code_bytes(fmt: PackedFormat, dim: int, values: bool, arranged: bool) -> float:
    """Bytes of one token's codes in one head, in this order or in the canonical one."""
    widths = plane_bits(fmt.bits)
    if not arranged:
        return sum(-(-dim * width // 8) for width in widths)
    return sum(block_bytes(width, dim, values) for width in widths) / GROUP_TOKENS


def arrange(packed: Packed, values: bool) -> Arranged:
    """Put packed tokens into the order of the C++ kernels.

    Parameters
    ----------
    packed : tokens in the canonical order.
    values : whether they are values.
    """
    fill = -packed.length % GROUP_TOKENS
    planes = []
    for plane, width in zip(packed.planes, plane_bits(packed.format.bits), strict=True):
        codes = functional.pad(read_plane(plane, width, packed.dim), (0, 0, 0, fill))
        planes.append(_lines_of_codes(codes.unflatten(1, (-1, GROUP_TOKENS)), width, values))
    return Arranged(
        packed.format,
        packed.dim,
        packed.length,
        values,
        tuple(planes),
        _arranged_scales(packed.scale, packed.format, packed.length),
        _arranged_scales(packed.zero, packed.format, packed.length),
        packed.outlier_channels,
        None if packed.outliers is None else packed.outliers.contiguous(),
    )


def _arranged_scales(scale: Tensor, fmt: PackedFormat, length: int) -> Tensor:
    blocks = -(-length // GROUP_TOKENS)
    rows = GROUP_TOKENS if fmt.axis == "token" else GROUP_TOKENS // fmt.group
    filled = functional.pad(scale, (0, 0, 0, blocks * rows - scale.shape[1])).unflatten(1, (blocks, rows))
    return filled.mT.contiguous() if fmt.axis == "token" else filled.contiguous()


def _lines_of_codes(codes: Tensor, width: int, values: bool) -> Tensor:
    """(H, blocks, 64, D) to (H, blocks, bytes)."""
    slots = 8 // width
    outputs_last = codes if values else codes.mT  # (H, blocks, contracted, outputs)
    filled = functional.pad(outputs_last, (0, 0, 0, -outputs_last.shape[2] % (slots * _QUAD)))
    split = filled.unflatten(3, (-1, _OUTPUTS)).unflatten(2, (-1, slots, _QUAD))  # (H, b, lines, slots, 4, groups, 16)
    shifted = split << (width * torch.arange(slots, device=codes.device, dtype=torch.uint8)).view(-1, 1, 1, 1)
    lines = shifted.sum(dim=3, dtype=torch.uint8)  # (H, b, lines, 4, groups, 16)
    return lines.permute(0, 1, 4, 2, 5, 3).flatten(2)


def _codes_of_lines(plane: Tensor, width: int, dim: int, values: bool) -> Tensor:
    """(H, blocks, bytes) to (H, blocks, 64, D)."""
    slots = 8 // width
    groups = (dim if values else GROUP_TOKENS) // _OUTPUTS
    lines = plane.unflatten(2, (groups, -1, _OUTPUTS, _QUAD))  # (H, b, groups, lines, 16, 4)
    shifts = (width * torch.arange(slots, device=plane.device, dtype=torch.uint8)).view(-1, 1)
    codes = (lines.unsqueeze(-2) >> shifts) & ((1 << width) - 1)  # (H, b, groups, lines, 16, slots, 4)
    spread = codes.permute(0, 1, 2, 4, 3, 5, 6).flatten(4).flatten(2, 3)  # (H, b, outputs, contracted)
    return spread.mT if values else spread[..., :dim]
