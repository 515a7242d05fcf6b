"""Codes to bytes and back, in the one canonical bit order."""

from __future__ import annotations

from torch import Tensor

from kvtailor.formats import plane_bits, unpack_codes, write_plane

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
        return (write_plane(codes, bits),)
    low, high = widths
    return write_plane(codes & ((1 << low) - 1), low), write_plane(codes >> low, high)
