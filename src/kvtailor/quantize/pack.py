"""Keys or values to packed tokens and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtailor.arranged import Codes, arrange
from kvtailor.errors import CacheError, KernelError, PlanError
from kvtailor.formats import Packed, PackedFormat, check_format, half_limit
from kvtailor.kernels import native
from kvtailor.kernels.reference import canonical, dequantise
from kvtailor.quantize.bits import pack_codes
from kvtailor.quantize.hadamard import rotate, unrotate
from kvtailor.quantize.levels import code_groups

PACK_TOKENS = 4096
"""Tokens packed at a time, a whole number of every group: bounds the fp32 copies that packing makes."""


def pack(
    x: Tensor, fmt: PackedFormat, outlier_channels: Tensor | None = None, scale_dtype: torch.dtype | None = None
) -> Packed:
    """Pack tokens; the same tokens in any chunks of whole groups get the same codes (for one `scale_dtype`).

    Parameters
    ----------
    x : (H, n, D), any floating dtype, not rotated; n a multiple of the group on the channel axis.
    fmt : how to write them.
    outlier_channels : (H, m) integers, channels to keep exactly and out of the groups' ranges; not with `rotated`.
    scale_dtype : of scales and zeros; by default float16, or bfloat16 for the whole call when a stored number exceeds
        60,000 (30,000 at 1 bit and for fitted levels, whose steps can be twice as large).

    Raises
    ------
    PlanError : the format cannot hold x, or the outlier channels cannot be kept.
    CacheError : no tokens, or no whole number of groups of tokens.
    KernelError : a number is not finite.
    """
    heads, length, dim = x.shape
    check_format(fmt, dim)
    if length == 0:
        raise CacheError("0 tokens to pack; allowed: 1 or more")
    if fmt.axis == "channel" and length % fmt.group:
        raise CacheError(f"{length} tokens to pack per channel; allowed: whole groups of {fmt.group} tokens")
    if outlier_channels is not None:
        _check_outliers(outlier_channels, heads, dim, fmt)
        outlier_channels = outlier_channels.to(torch.int16) if outlier_channels.numel() else None
    fill = None if outlier_channels is None else _fill_channels(outlier_channels, fmt, dim)
    blocks = x.split(PACK_TOKENS, dim=1)
    peaks = [_peak(block) for block in blocks]
    if not all(map(math.isfinite, peaks)):
        raise KernelError("numbers to pack: one is not finite; allowed: finite numbers")
    dtype = scale_dtype or _scale_dtype(blocks, max(peaks), fmt, fill)
    return Packed.cat([_pack_block(block, fmt, outlier_channels, fill, dtype) for block in blocks])


def pack_for(
    path: str | None, x: Tensor, fmt: PackedFormat, values: bool, outlier_channels: Tensor | None = None
) -> Codes:
    """Pack tokens in the order in which the C++ kernels read them, by these kernels where they can.

    Parameters
    ----------
    path : the C++ kernels, which must have an order for the format; None for the canonical order.
    x, fmt, outlier_channels : as for :func:`pack`.
    values : whether they are values.
    """
    if path is None:
        return pack(x, fmt, outlier_channels)
    codes = native.pack(path, x, fmt, values) if outlier_channels is None else None
    return arrange(pack(x, fmt, outlier_channels), values) if codes is None else codes


def unpack(packed: Codes) -> Tensor:
    """Return the numbers that the codes stand for, not rotated, with outlier channels as they came.

    Returns
    -------
    fp32 (H, n, D).
    """
    packed = canonical(packed)
    if not packed.format.rotated:
        return dequantise(packed)
    starts = range(0, packed.length, PACK_TOKENS)
    parts = (packed.slice(start, min(start + PACK_TOKENS, packed.length)) for start in starts)
    return torch.cat([unrotate(dequantise(part)) for part in parts], dim=1)


def widest_channels(x: Tensor, m: int) -> Tensor:
    """Return the m channels of widest range (most minus least over the tokens) of each head, in ascending order.

    Parameters
    ----------
    x : (H, n, D), any floating dtype.
    m : channels to name, 0 to D.

    Returns
    -------
    int64 (H, m).

    Raises
    ------
    PlanError : m is negative or more than D.
    """
    if not 0 <= m <= x.shape[-1]:
        raise PlanError(f"outlier channels is {m}; allowed: 0 to the head size, {x.shape[-1]}")
    least, most = x.aminmax(dim=1)
    return (most.float() - least.float()).topk(m, dim=-1).indices.sort(dim=-1).values


def _check_outliers(channels: Tensor, heads: int, dim: int, fmt: PackedFormat) -> None:
    if fmt.rotated:
        raise PlanError("outlier channels given for a rotated format; allowed: only with rotated=False")
    if channels.dim() != 2 or channels.shape[0] != heads:
        raise PlanError(f"outlier channels have shape {tuple(channels.shape)}; allowed: ({heads}, m), m per head")
    if channels.numel() and not 0 <= int(channels.min()) <= int(channels.max()) < dim:
        raise PlanError(f"outlier channels are {channels.tolist()}; allowed: 0 to {dim - 1}")
    if bool((channels.sort(dim=-1).values.diff(dim=-1) == 0).any()):
        raise PlanError(f"outlier channels are {channels.tolist()}; allowed: each channel once per head")


def _fill_channels(channels: Tensor, fmt: PackedFormat, dim: int) -> Tensor:
    """For every channel (H, D), the channel whose numbers are coded in its place, so that outliers widen no range."""
    group = fmt.group if fmt.axis == "token" else dim
    own = torch.arange(dim, device=channels.device).expand(channels.shape[0], dim)
    outlier = torch.zeros_like(own, dtype=torch.bool).scatter_(1, channels.long(), True)
    ordinary = (~outlier).unflatten(1, (-1, group)).to(torch.uint8)  # (H, groups, group)
    offset = torch.arange(0, dim, group, device=channels.device)
    first = (ordinary.argmax(-1) + offset).repeat_interleave(group, dim=1)
    # A group of outliers alone has nothing to protect: its first channel stands for all.
    return torch.where(outlier, first, own)


def _scale_dtype(blocks: tuple[Tensor, ...], peak: float, fmt: PackedFormat, fill: Tensor | None) -> torch.dtype:
    dim = blocks[0].shape[-1]
    limit = half_limit(fmt)
    growth = (dim & -dim) ** 0.5 if fmt.rotated else 1.0  # the most that a rotation can enlarge a number
    if peak * growth <= limit:
        return torch.float16
    stored = max(_peak(_stored(block, fmt, fill)) for block in blocks)
    return torch.float16 if stored <= limit else torch.bfloat16


def _peak(x: Tensor) -> float:
    least, most = x.aminmax()
    return max(-float(least), float(most))


def _stored(x: Tensor, fmt: PackedFormat, fill: Tensor | None) -> Tensor:
    if fill is not None:
        x = x.gather(-1, fill.unsqueeze(1).expand_as(x))
    return rotate(x) if fmt.rotated else x.float()


def _pack_block(
    x: Tensor, fmt: PackedFormat, channels: Tensor | None, fill: Tensor | None, dtype: torch.dtype
) -> Packed:
    groups = _group(_stored(x, fmt, fill), fmt)
    codes, scale, zero = code_groups(groups, fmt.bits, fmt.levels, dtype)
    return Packed(
        format=fmt,
        dim=x.shape[-1],
        planes=pack_codes(_ungroup(codes, fmt), fmt.bits),
        scale=scale,
        zero=zero,
        outlier_channels=channels,
        outliers=None if channels is None else _take_channels(x, channels),
    )


def _group(x: Tensor, fmt: PackedFormat) -> Tensor:
    """(H, n, D) to (H, n, D / g, g) on the token axis, (H, n / g, D, g) on the channel axis."""
    groups = x.unflatten(-1, (-1, fmt.group)) if fmt.axis == "token" else x.unflatten(1, (-1, fmt.group)).mT
    # One layout, whatever the input's: sums depend on it in their last bits, and codes may not.
    return groups.contiguous()


def _ungroup(codes: Tensor, fmt: PackedFormat) -> Tensor:
    return codes.flatten(-2) if fmt.axis == "token" else codes.mT.flatten(1, 2)


def _take_channels(x: Tensor, channels: Tensor) -> Tensor:
    return x.gather(-1, channels.long().unsqueeze(1).expand(-1, x.shape[1], -1))
