# mypy: ignore-errors
# ruff: noqa: RUF005
"""Sums of a tile of values weighted by probabilities, values dense or packed.

Triton's language has tuples that grow by concatenation alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtailor.kernels.triton.numbers import (
    CODE_UNIT,
    WEIGHT_GAIN,
    leading_power,
    load_codes,
    load_dense,
    load_levels,
    place,
)


@triton.jit
def no_sums(ROWS: tl.constexpr, L: tl.constexpr):
    """Sums over no token: a tuple by chunk of channels and plane, and one of what is added to all channels of a chunk.

    Per token they are sums of codes as they lie in their bytes, which `finished` turns into sums of values.
    """
    sums, shifts = (), ()
    CHUNKS: tl.constexpr = L.chunks
    BLOCK: tl.constexpr = L.block
    PIECES: tl.constexpr = L.chunks * (L.planes if L.kind == "token" else 1)
    for _ in tl.static_range(PIECES):
        sums = sums + (tl.zeros((ROWS, BLOCK), tl.float32),)
    for _ in tl.static_range(CHUNKS):
        shifts = shifts + (tl.zeros((ROWS,), tl.float32),)
    return sums, shifts


@triton.jit
def with_tile(sums, shifts, probs, decay, values, strides, head, first_token, row, inside, L: tl.constexpr):
    """The sums, shrunk by `decay` (ROWS), and a tile of values weighted by `probs` (ROWS, tokens), at most 1.

    Weights are rounded to fp16. What the rounding takes from the middle level is added back, so that only differences
    from it suffer: rounding does not cancel where all codes are positive.
    """
    if L.kind == "token":
        return _with_tile_by_token(sums, shifts, probs, decay, values, strides, head, row, inside, L)
    else:
        tile = _tile(probs, values, strides, head, first_token, row, inside, L)
        return (sums[0] * decay[:, None] + tile,), shifts


@triton.jit
def _tile(probs, values, strides, head, first_token, row, inside, L: tl.constexpr):
    if L.kind == "channel":
        return _tile_by_channel(probs, values, strides, head, first_token, row, inside, L)
    elif L.kind == "fp32":
        dense, _ = load_dense(values, strides, head, row, inside, L)
        return tl.dot(probs, dense, input_precision="tf32x3")
    else:
        dense, factor = load_dense(values, strides, head, row, inside, L)
        return tl.dot((probs * WEIGHT_GAIN).to(tl.float16), dense) * (factor / WEIGHT_GAIN)


@triton.jit
def _tile_by_channel(probs, values, strides, head, first_token, row, inside, L: tl.constexpr):
    MIDDLE: tl.constexpr = ((1 << L.bits) - 1) / 2
    channel = tl.arange(0, L.block)
    scale, zero = load_levels(values, strides, head, first_token // L.group, channel, channel < L.dim)
    weights = probs * WEIGHT_GAIN
    rounded = weights.to(tl.float16)
    lost = tl.sum(weights - rounded.to(tl.float32), axis=1) * (MIDDLE / WEIGHT_GAIN)
    codes = load_codes(values, strides, head, row, inside, 0, 0, L)
    levels = tl.dot(rounded, codes) * (place(0, L) * (CODE_UNIT / WEIGHT_GAIN))[None, :] + lost[:, None]
    if L.planes == 2:
        codes = load_codes(values, strides, head, row, inside, 0, 1, L)
        levels += tl.dot(rounded, codes) * (place(1, L) * (CODE_UNIT / WEIGHT_GAIN))[None, :]
    return levels * scale[None, :] + tl.sum(probs, axis=1)[:, None] * zero[None, :]


@triton.jit
def _with_tile_by_token(sums, shifts, probs, decay, values, strides, head, row, inside, L: tl.constexpr):
    CHUNKS: tl.constexpr = L.chunks
    PLANES: tl.constexpr = L.planes
    more, moved = (), ()
    for chunk in tl.static_range(CHUNKS):
        tiles, shift = _chunk_by_token(probs, values, strides, head, row, inside, chunk, L)
        moved = moved + (shifts[chunk] * decay + shift,)
        for plane in tl.static_range(PLANES):
            more = more + (sums[chunk * PLANES + plane] * decay[:, None] + tiles[plane],)
    return more, moved


@triton.jit
def _chunk_by_token(probs, values, strides, head, row, inside, chunk: tl.constexpr, L: tl.constexpr):
    MIDDLE: tl.constexpr = ((1 << L.bits) - 1) / 2
    PLANES: tl.constexpr = L.planes
    scale, zero = load_levels(values, strides, head, row, chunk, inside)
    power, inverse = leading_power(tl.max(tl.abs(scale)))
    weights = probs * (scale * (inverse * WEIGHT_GAIN))[None, :]
    rounded = weights.to(tl.float16)
    factor = power / WEIGHT_GAIN
    lost = (weights - rounded.to(tl.float32)) * (factor * MIDDLE)
    tiles = ()
    for plane in tl.static_range(PLANES):
        codes = load_codes(values, strides, head, row, inside, chunk, plane, L)
        tiles = tiles + (tl.dot(rounded, codes) * (factor * CODE_UNIT),)
    return tiles, tl.sum(probs * zero[None, :] + lost, axis=1)


@triton.jit
def finished(sums, shifts, chunk: tl.constexpr, L: tl.constexpr):
    """Weighted sums of the values of a chunk of channels, fp32 (ROWS, block)."""
    if L.kind == "token":
        found = sums[chunk * L.planes] * place(0, L)[None, :] + shifts[chunk][:, None]
        if L.planes == 2:
            found += sums[chunk * 2 + 1] * place(1, L)[None, :]
        return found
    else:
        return sums[0]
