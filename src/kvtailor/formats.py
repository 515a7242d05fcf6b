"""Packed formats as data: how a block of keys or values is written in few bits, and nothing about who reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvtailor.errors import CacheError, PlanError

GROUP_TOKENS = 64
"""Tokens of a sealed block; segments are whole numbers of it."""

BITS = (1, 2, 3, 4, 8)
AXES = ("token", "channel")
LEVELS = ("minmax", "centroid", "fit")
CHANNEL_GROUPS = (32, 64)


@dataclass(frozen=True)
class PackedFormat:
    """How numbers are written: a code of `bits` bits per number, one 16-bit scale and zero per group.

    Parameters
    ----------
    bits : 1, 2, 3, 4 or 8.
    axis : "token": one (scale, zero) per token and `group` channels; "channel": one per channel and `group` tokens.
    group : numbers that share one scale and zero.
    levels : how scale and zero are chosen; see `kvtailor.quantize.levels`.
    rotated : the numbers were rotated by a Hadamard transform over the head before packing.
    """

    bits: int
    axis: Literal["token", "channel"]
    group: int
    levels: Literal["minmax", "centroid", "fit"]
    rotated: bool


def check_format(fmt: PackedFormat, dim: int) -> None:
    """Refuse a format that cannot hold heads of `dim` channels.

    Raises
    ------
    PlanError : naming the field, its value and what is allowed.
    """
    if fmt.bits not in BITS:
        raise PlanError(f"bits is {fmt.bits!r}; allowed: 1, 2, 3, 4 or 8")
    if fmt.axis not in AXES:
        raise PlanError(f"axis is {fmt.axis!r}; allowed: 'token' or 'channel'")
    if fmt.levels not in LEVELS:
        raise PlanError(f"levels is {fmt.levels!r}; allowed: 'minmax', 'centroid' or 'fit'")
    if fmt.levels == "centroid" and fmt.bits != 1:
        raise PlanError(
            f"levels is 'centroid' at {fmt.bits} bits; allowed: 'centroid' at 1 bit, else 'minmax' or 'fit'"
        )
    if fmt.axis == "token" and (fmt.group < 1 or dim % fmt.group):
        raise PlanError(
            f"group is {fmt.group} channels for a head size of {dim}; allowed: a divisor of the head size, "
            f"such as {default_group(dim)}"
        )
    if fmt.axis == "channel" and fmt.group not in CHANNEL_GROUPS:
        raise PlanError(f"group is {fmt.group} tokens on the channel axis; allowed: 32 or 64")


def default_group(dim: int) -> int:
    """Return the largest power of two, at most 64, that divides the head size `dim`."""
    return min(64, dim & -dim)


def half_limit(fmt: PackedFormat) -> float:
    """The largest number that a group may hold if its scale and zero are to fit into float16.

    Steps of one bit and of fitted levels can be twice as large as those of a range.
    """
    return 60000.0 if fmt.levels == "minmax" and fmt.bits > 1 else 30000.0


def plane_bits(bits: int) -> tuple[int, ...]:
    """Return the widths of the planes of a code: one plane, except 3 bits, which are 2 low bits and 1 high bit."""
    return (2, 1) if bits == 3 else (bits,)


def unpack_codes(planes: Sequence[Tensor], bits: int, dim: int) -> Tensor:
    """Read codes from their planes; the inverse of `kvtailor.quantize.bits.pack_codes`.

    Parameters
    ----------
    planes : uint8 (..., ceil(dim * width / 8)) for each width of `plane_bits(bits)`.
    bits, dim : bits per code, channels per token.

    Returns
    -------
    uint8 (..., dim), values 0 to 2^bits - 1.
    """
    widths = plane_bits(bits)
    codes = read_plane(planes[0], widths[0], dim)
    if len(widths) == 2:
        codes = codes | (read_plane(planes[1], widths[1], dim) << widths[0])
    return codes


def read_plane(plane: Tensor, width: int, dim: int) -> Tensor:
    """Read the numbers of one plane: uint8 (..., bytes) to uint8 (..., dim), values 0 to 2^width - 1."""
    if width == 8:
        return plane
    mask = (1 << width) - 1
    codes = torch.stack([(plane >> shift) & mask for shift in range(0, 8, width)], dim=-1)  # (..., bytes, codes of one)
    return codes.flatten(-2)[..., :dim]


def write_plane(codes: Tensor, width: int) -> Tensor:
    """Write one plane; the inverse of `read_plane`: uint8 (..., dim) to uint8 (..., ceil(dim * width / 8))."""
    if width == 8:
        return codes
    per_byte = 8 // width
    codes = functional.pad(codes, (0, -codes.shape[-1] % per_byte))
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    return (codes.unflatten(-1, (-1, per_byte)) << shifts).sum(-1, dtype=torch.uint8)


class Coded:
    """What packed tokens have whatever the order of their codes: planes, scales, zeros, and outliers if any."""

    planes: tuple[Tensor, ...]
    scale: Tensor
    zero: Tensor
    outlier_channels: Tensor | None
    outliers: Tensor | None

    @property
    def heads(self) -> int:
        """Heads held."""
        return self.planes[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: codes, scales, zeros, outliers and their channel numbers."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def check_whole_blocks(self, length: int) -> None:
        """Raise CacheError unless ``length`` tokens are whole blocks of 64, which alone can be selected."""
        if length % GROUP_TOKENS:
            raise CacheError(f"blocks selected from {length} packed tokens; allowed: multiples of {GROUP_TOKENS}")

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over every tensor held: planes, scale, zero, then outlier channels and outliers if any."""
        yield from self.planes
        yield self.scale
        yield self.zero
        if self.outlier_channels is not None and self.outliers is not None:
            yield self.outlier_channels
            yield self.outliers


@dataclass(frozen=True, eq=False)
class Packed(Coded):
    """n tokens of `dim` channels for H heads, written in `format`.

    Within a token the codes follow the channels, low bits first: the code of channel c starts at bit (c * b) % 8 of
    byte (c * b) // 8 of its plane. Bits beyond the last channel are zero.

    Parameters
    ----------
    format : how the numbers are written.
    dim : channels of a head, D.
    planes : uint8 (H, n, ceil(D * b / 8)); one plane, except 3 bits: a plane of the 2 low bits, one of the high bit.
    scale, zero : 16-bit float; (H, n, D / group) on the token axis, (H, ceil(n / group), D) on the channel axis.
    outlier_channels : (H, m) integers, the channels kept exactly, or None.
    outliers : (H, n, m), the exact numbers of these channels in the dtype that they came in, or None.
    """

    format: PackedFormat
    dim: int
    planes: tuple[Tensor, ...]
    scale: Tensor
    zero: Tensor
    outlier_channels: Tensor | None = None
    outliers: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.planes[0].shape[1]

    def slice(self, start: int, stop: int) -> Packed:
        """Return tokens `start` to `stop` as views.

        Raises
        ------
        CacheError : the range is empty or beyond the tokens held, or starts inside a group of tokens.
        """
        if not 0 <= start < stop <= self.length:
            raise CacheError(f"tokens {start} to {stop} of {self.length} packed tokens; allowed: a range of 1 or more")
        group = self._tokens_per_scale
        if start % group:
            raise CacheError(f"tokens from {start} in groups of {group} tokens; allowed: multiples of {group}")
        first, last = start // group, -(-stop // group)
        return self._along_tokens(lambda rows: rows[:, start:stop], lambda rows: rows[:, first:last])

    def narrow(self, length: int) -> Packed:
        """Return the first `length` tokens as views; a group of tokens that is cut keeps its scale and zero.

        Raises
        ------
        CacheError : `length` is less than 1 or more than the tokens held.
        """
        return self.slice(0, length)

    def select_blocks(self, index: Tensor) -> Packed:
        """Return a copy of whole blocks of 64 tokens, in the order of `index`.

        Parameters
        ----------
        index : int64 (blocks,), block numbers counted from the first token.

        Raises
        ------
        CacheError : the tokens held are no whole number of blocks.
        """
        self.check_whole_blocks(self.length)
        if GROUP_TOKENS % self._tokens_per_scale:
            raise CacheError(f"blocks selected from groups of {self.format.group} tokens; allowed: divisors of 64")

        def select(rows: Tensor) -> Tensor:
            blocks = rows.unflatten(1, (self.length // GROUP_TOKENS, -1))  # (H, blocks, rows of a block, ...)
            return blocks.index_select(1, index).flatten(1, 2)

        return self._along_tokens(select, select)

    @staticmethod
    def cat(parts: Sequence[Packed]) -> Packed:
        """Join packed tokens of the same heads, in order; a single part is returned as it is.

        Raises
        ------
        CacheError : nothing to join; parts differ in format, heads, head size, scale dtype or outlier channels; or a
            part before the last ends inside a group of tokens.
        """
        if not parts:
            raise CacheError("0 packed parts to join; allowed: 1 or more")
        for part in parts[1:]:
            _check_alike(parts[0], part)
        for part in parts[:-1]:
            if part.length % part._tokens_per_scale:
                raise CacheError(
                    f"a part of {part.length} tokens joined before another; allowed: multiples of the group of "
                    f"{part.format.group} tokens"
                )
        if len(parts) == 1:
            return parts[0]
        return replace(
            parts[0],
            planes=tuple(torch.cat(planes, dim=1) for planes in zip(*(part.planes for part in parts), strict=True)),
            scale=torch.cat([part.scale for part in parts], dim=1),
            zero=torch.cat([part.zero for part in parts], dim=1),
            outliers=_cat_outliers(parts),
        )

    @property
    def _tokens_per_scale(self) -> int:
        return self.format.group if self.format.axis == "channel" else 1

    def _along_tokens(self, tokens: Callable[[Tensor], Tensor], scales: Callable[[Tensor], Tensor]) -> Packed:
        return replace(
            self,
            planes=tuple(tokens(plane) for plane in self.planes),
            scale=scales(self.scale),
            zero=scales(self.zero),
            outliers=None if self.outliers is None else tokens(self.outliers),
        )


def _check_alike(first: Packed, other: Packed) -> None:
    for name, mine, theirs in (
        ("format", first.format, other.format),
        ("head size", first.dim, other.dim),
        ("heads", first.heads, other.heads),
        ("scale dtype", first.scale.dtype, other.scale.dtype),
    ):
        if mine != theirs:
            raise CacheError(f"packed parts joined with {name} {mine} and {theirs}; allowed: the same in all parts")
    if not _same_channels(first.outlier_channels, other.outlier_channels):
        raise CacheError(
            f"packed parts joined with outlier channels {_as_list(first.outlier_channels)} and "
            f"{_as_list(other.outlier_channels)}; allowed: the same in all parts"
        )


def _same_channels(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return torch.equal(mine, theirs)


def _as_list(channels: Tensor | None) -> list[list[int]] | None:
    return None if channels is None else channels.tolist()


def _cat_outliers(parts: Sequence[Packed]) -> Tensor | None:
    outliers = [part.outliers for part in parts if part.outliers is not None]
    return torch.cat(outliers, dim=1) if outliers else None
