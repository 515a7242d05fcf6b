# mypy: ignore-errors
# ruff: noqa: RUF005
"""Dot products of queries with a tile of keys, dense or packed.

Triton's language has tuples that grow by concatenation alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtailor.kernels.triton.numbers import (
    CODE_UNIT,
    QUERY_GAIN,
    in_two_halves,
    leading_power,
    load_codes,
    load_dense,
    load_levels,
    place,
)


@triton.jit
def load_query(query, strides, rows, ROWS: tl.constexpr, L: tl.constexpr):
    """Queries as the products need them: high and low fp16 halves, sums over the channels, and a factor on logits.

    The first three are tuples, by chunk of channels and plane. A query is halved in two, so that its rounding costs
    far less than that of the probabilities; tensor cores have time for it, since reading keys takes longer.
    """
    CHUNKS: tl.constexpr = L.chunks
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    peak = tl.zeros((ROWS,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        peak = tl.maximum(peak, tl.max(tl.abs(_query_chunk(query, strides, row, rows, chunk, L)), axis=1))
    power, inverse = leading_power(peak)
    high, low, sums = (), (), ()
    for chunk in tl.static_range(CHUNKS):
        x = _query_chunk(query, strides, row, rows, chunk, L) * inverse[:, None]  # below 2
        if L.kind == "token":
            sums = sums + (tl.sum(x, axis=1),)
            more_high, more_low = _query_planes(x * QUERY_GAIN, L)
            high, low = high + more_high, low + more_low
        elif L.kind == "fp16" or L.kind == "bf16":
            first, second = in_two_halves(x * QUERY_GAIN)
            high, low = (first,), (second,)
        else:
            high = (x,)
    return high, low, sums, power


@triton.jit
def _query_chunk(query, strides, row, rows, chunk: tl.constexpr, L: tl.constexpr):
    channel = tl.arange(0, L.block)
    within = (row < rows)[:, None] & (channel < L.width)[None, :]
    at = row[:, None] * strides[1] + (chunk * L.width + channel)[None, :] * strides[2]
    return tl.load(query + at, mask=within, other=0.0).to(tl.float32)


@triton.jit
def _query_planes(x, L: tl.constexpr):
    """Halves of the queries for each plane, where the places of its codes are undone."""
    PLANES: tl.constexpr = L.planes
    high, low = (), ()
    for plane in tl.static_range(PLANES):
        first, second = in_two_halves(x * place(plane, L)[None, :])
        high, low = high + (first,), low + (second,)
    return high, low


@triton.jit
def tile_logits(
    query, keys, strides, head, first_token, row, inside, ROWS: tl.constexpr, TOKENS: tl.constexpr, L: tl.constexpr
):
    """Dot products, fp32 (ROWS, TOKENS), not scaled.

    `row` (TOKENS) says where each token lies, `first_token` where the tile begins, which packed tokens do in order.
    """
    high, low, sums, power = query
    if L.kind == "token":
        CHUNKS: tl.constexpr = L.chunks
        found = tl.zeros((ROWS, TOKENS), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            scale, zero = load_levels(keys, strides, head, row, chunk, inside)
            dots = _code_products(high, low, keys, strides, head, row, inside, chunk, L)
            found += dots * scale[None, :] + sums[chunk][:, None] * zero[None, :]
    elif L.kind == "channel":
        found = _logits_by_channel(high[0], keys, strides, head, first_token, row, inside, L)
    elif L.kind == "fp32":
        dense, _ = load_dense(keys, strides, head, row, inside, L)
        found = tl.dot(high[0], tl.trans(dense), input_precision="tf32x3")
    else:
        dense, factor = load_dense(keys, strides, head, row, inside, L)
        found = _halves_product(high[0], low[0], tl.trans(dense)) * (factor / QUERY_GAIN)
    return found * power[:, None]


@triton.jit
def _logits_by_channel(x, keys, strides, head, first_token, row, inside, L: tl.constexpr):
    """All tokens of the tile share their scales, which are folded into the queries."""
    channel = tl.arange(0, L.block)
    scale, zero = load_levels(keys, strides, head, first_token // L.group, channel, channel < L.dim)
    power, inverse = leading_power(tl.max(tl.abs(scale)))
    high, low = _query_planes(x * (scale * (inverse * QUERY_GAIN))[None, :], L)
    dots = _code_products(high, low, keys, strides, head, row, inside, 0, L)
    return dots * power + tl.sum(x * zero[None, :], axis=1)[:, None]


@triton.jit
def _code_products(high, low, keys, strides, head, row, inside, chunk: tl.constexpr, L: tl.constexpr):
    codes = load_codes(keys, strides, head, row, inside, chunk, 0, L)
    dots = _halves_product(high[chunk * L.planes], low[chunk * L.planes], tl.trans(codes))
    if L.planes == 2:
        codes = load_codes(keys, strides, head, row, inside, chunk, 1, L)
        dots += _halves_product(high[chunk * 2 + 1], low[chunk * 2 + 1], tl.trans(codes))
    return dots * (CODE_UNIT / QUERY_GAIN)


@triton.jit
def _halves_product(high, low, turned):
    return tl.dot(low, turned, tl.dot(high, turned))
