"""Codes to bytes and back, in the one canonical bit order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvtailor.formats import plane_bits, unpack_codes

__all__ = ["pack_codes", "unpack_codes"]


def pack_codes(codes: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Write codes into planes of bytes, low bits first along the channels.

    Parameters
    ----------
    codes : uint8 (..., D), values 0 to 2^bits - 1.
    bits : 1, 2, 3, 4 or 8.

    Returns
    -------
    uint8 (..., ceil(D * width / 8)) for each width of `plane_bits(bits)`; bits beyond the last channel are zero.
    """
    widths = plane_bits(bits)
    if len(widths) == 1:
        return (_write_plane(codes, bits),)
    low, high = widths
    return _write_plane(codes & ((1 << low) - 1), low), _write_plane(codes >> low, high)


def _write_plane(codes: Tensor, width: int) -> Tensor:
    if width == 8:
        return codes
    per_byte = 8 // width
    codes = functional.pad(codes, (0, -codes.shape[-1] % per_byte))
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    return (codes.unflatten(-1, (-1, per_byte)) << shifts).sum(-1, dtype=torch.uint8)
