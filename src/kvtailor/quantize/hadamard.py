"""Hadamard rotation of heads: spreads the outlying channels of a token over all its channels before packing."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor) -> Tensor:
    """Rotate the last dimension by an orthonormal Walsh-Hadamard transform.

    Head sizes that are no power of two rotate in blocks of their largest power-of-two divisor (80 as 5 blocks of 16).
    Dot products of two rotated heads equal those of the heads. Source: QuaRot (arXiv 2404.00456), without its signs.

    Parameters
    ----------
    x : (..., D), any floating dtype.

    Returns
    -------
    fp32 (..., D).
    """
    dim = x.shape[-1]
    block = dim & -dim
    # Butterflies, not a matrix product: their rounding does not depend on how many tokens come in one call.
    y = x.to(torch.float32).reshape(-1, block).T.contiguous()  # (block, rows): every step runs along whole rows
    span = 1
    while span < block:
        even, odd = y.unflatten(0, (-1, 2, span)).unbind(1)  # each (pairs, span, rows)
        y = torch.stack((even + odd, even - odd), dim=1).flatten(0, 2)
        span *= 2
    return (y * block**-0.5).T.reshape(x.shape)


def unrotate(x: Tensor) -> Tensor:
    """Undo `rotate`: the transform is symmetric, so it is its own inverse.

    Parameters
    ----------
    x : (..., D), any floating dtype.

    Returns
    -------
    fp32 (..., D).
    """
    return rotate(x)
