# mypy: allow-untyped-defs
"""Codes and dense numbers as operands of matrix products in fp16.

A code is an operand as it lies in its byte: masked, not shifted. The 16-bit float whose bits are a small integer k is
the subnormal number k * 2^-24, which tensor cores multiply exactly; that factor, and the place of the code in its byte,
are undone on the other operand or on the sum. So a code costs a single instruction before its product.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Of fp16 operands beside codes and dense numbers: small ones must not become subnormal nor large ones infinite. A
# query is below 2, times a scale below 2 and the 4 of a high plane; a weight is at most 1, times a scale below 2.
QUERY_GAIN = tl.constexpr(2048.0)
WEIGHT_GAIN = tl.constexpr(16384.0)
CODE_UNIT = tl.constexpr(2.0**24)


@triton.jit
def power_of_two(exponent):
    """2^exponent in fp32, exactly."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


INTERPRETED = not isinstance(power_of_two, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, on the CPU."""


@triton.jit
def leading_power(x):
    """The greatest power of two that x >= 0 holds, and its inverse; 2^-100 for less, 2^100 for more."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -100), 100)
    return power_of_two(exponent), power_of_two(-exponent)


@triton.jit
def in_two_halves(x):
    """x as the sum of two fp16 numbers: 22 bits of it, down to 2^-25."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def place(PLANE: tl.constexpr, L: tl.constexpr):
    """What undoes the place of codes in their bytes and gives them the weight of their plane, fp32 (block)."""
    BITS: tl.constexpr = L.high_bits if PLANE else L.low_bits
    SHIFT: tl.constexpr = L.low_bits if PLANE else 0
    return power_of_two(SHIFT - BITS * (tl.arange(0, L.block) % (8 // BITS)))


@triton.jit
def load_codes(x, strides, head, row, inside, chunk: tl.constexpr, PLANE: tl.constexpr, L: tl.constexpr):
    """Codes of a chunk of channels, fp16 (tokens, block), of the value code * 2^-24 / `place`, for tokens at `row`."""
    BITS: tl.constexpr = L.high_bits if PLANE else L.low_bits
    PER_BYTE: tl.constexpr = 8 // BITS
    byte = tl.arange(0, L.block // PER_BYTE)
    within = inside[:, None] & (byte < (L.width + PER_BYTE - 1) // PER_BYTE)[None, :]
    column = (chunk * L.width * BITS // 8 + byte) * strides[3 * PLANE + 2]
    at = head * strides[3 * PLANE] + row[:, None] * strides[3 * PLANE + 1] + column[None, :]
    codes = tl.load(x[PLANE] + at, mask=within, other=0).to(tl.int16)
    if BITS == 4:
        codes = _either(codes, 0x0F, 0xF0)
    elif BITS == 2:
        codes = tl.interleave(_either(codes, 0x03, 0x30), _either(codes, 0x0C, 0xC0))
    elif BITS == 1:
        even = tl.interleave(_either(codes, 0x01, 0x10), _either(codes, 0x04, 0x40))
        odd = tl.interleave(_either(codes, 0x02, 0x20), _either(codes, 0x08, 0x80))
        codes = tl.interleave(even, odd)
    return codes.to(tl.float16, bitcast=True)


@triton.jit
def _either(codes, even: tl.constexpr, odd: tl.constexpr):
    return tl.interleave(codes & even, codes & odd)


@triton.jit
def load_levels(x, strides, head, row, column, within):
    """Scales and zeros, fp32."""
    scale = tl.load(x[2] + head * strides[6] + row * strides[7] + column * strides[8], mask=within, other=0.0)
    zero = tl.load(x[3] + head * strides[9] + row * strides[10] + column * strides[11], mask=within, other=0.0)
    return scale.to(tl.float32), zero.to(tl.float32)


@triton.jit
def load_dense(x, strides, head, row, inside, L: tl.constexpr):
    """Dense numbers of a tile, (tokens, block), and a factor on them: fp16, or fp32 where they were stored so."""
    channel = tl.arange(0, L.block)
    within = inside[:, None] & (channel < L.dim)[None, :]
    at = head * strides[0] + row[:, None] * strides[1] + channel[None, :] * strides[2]
    numbers = tl.load(x[0] + at, mask=within, other=0.0)
    if L.kind == "bf16":
        # bf16 has the greater range: what fp16 cuts is 2^-24 of the largest number of the tile.
        numbers = numbers.to(tl.float32)
        power, inverse = leading_power(tl.max(tl.abs(numbers)))
        return (numbers * inverse).to(tl.float16), power
    else:
        return numbers, 1.0
