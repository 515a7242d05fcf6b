# mypy: allow-untyped-defs
"""Packing with min-max levels: the same codes, scales and zeros as the package's packing in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtailor.formats import Packed, PackedFormat, half_limit, plane_bits
from kvtailor.kernels.triton.check import check_pack
from kvtailor.kernels.triton.launch import Launch

_TILE_NUMBERS = 4096


def pack(x: Tensor, fmt: PackedFormat, scale_dtype: torch.dtype | None = None) -> Packed:
    """Pack tokens, rotated before by a Hadamard transform where `fmt.rotated`.

    Levels are those of KIVI (arXiv 2402.02750, section 3); a stored zero is rounded down and a stored step up, so that
    every number is within half a step of its code.

    Parameters
    ----------
    x : (H, n, D) fp32, fp16 or bf16, not rotated; n a multiple of the group on the channel axis.
    fmt : how to write them; levels "minmax", and a power of two of channels to a group on the token axis.
    scale_dtype : of scales and zeros; by default float16, or bfloat16 where a number may exceed 60,000 (30,000 at 1
        bit), for which the GPU has to be waited for.

    Raises
    ------
    KernelError : a shape, dtype, device or format that the kernel does not serve.
    PlanError : the format cannot hold x.
    """
    check_pack(x, fmt, scale_dtype)
    launch, packed = pack_launch(x, fmt, scale_dtype or _scale_dtype(x, fmt))
    launch.run()
    return packed


def pack_launch(x: Tensor, fmt: PackedFormat, scale_dtype: torch.dtype) -> tuple[Launch, Packed]:
    """Prepare the launch, with room for its results."""
    heads, tokens, dim = x.shape
    by_token = fmt.axis == "token"
    packed = room(x, fmt, scale_dtype)
    block = triton.next_power_of_2(max(dim, 16))
    tile = max(1, _TILE_NUMBERS // block) if by_token else fmt.group
    planes = (*packed.planes, None)[:2]
    arguments = {
        "x": x,
        "x_strides": x.stride(),
        "low": planes[0],
        "high": planes[1],
        "scale": packed.scale,
        "zero": packed.zero,
        "tokens": tokens,
        "F": _Form(
            by_token, fmt.bits, fmt.group, dim, block, dim & -dim if fmt.rotated else 1, scale_dtype == torch.float16
        ),
        "TOKENS": tile,
    }
    launch = Launch(
        name=f"pack {fmt.axis} {fmt.bits} bit D={dim}{' rotated' if fmt.rotated else ''}",
        kernel=_pack,
        grid=(-(-tokens // tile), heads, 1),
        arguments=arguments,
        device=x.device,
        dots=False,
        # A fused multiply-add rounds once where the package's packing rounds twice.
        options={"num_warps": 8 if tile * block > _TILE_NUMBERS else 4, "enable_fp_fusion": False},
    )
    return launch, packed


@dataclass(frozen=True)
class _Form:
    """What the kernel is compiled for; `rotate` is the size of the Hadamard blocks, 1 for none."""

    by_token: bool
    bits: int
    group: int
    dim: int
    block: int
    rotate: int
    half: bool


def room(x: Tensor, fmt: PackedFormat, scale_dtype: torch.dtype) -> Packed:
    """Return room for tokens of the shape of x, on its device."""
    heads, tokens, dim = x.shape
    planes = tuple(
        torch.empty((heads, tokens, -(-dim * width // 8)), dtype=torch.uint8, device=x.device)
        for width in plane_bits(fmt.bits)
    )
    groups = (tokens, dim // fmt.group) if fmt.axis == "token" else (tokens // fmt.group, dim)
    scale = torch.empty((heads, *groups), dtype=scale_dtype, device=x.device)
    return Packed(fmt, dim, planes, scale, torch.empty_like(scale))


def _scale_dtype(x: Tensor, fmt: PackedFormat) -> torch.dtype:
    growth = (x.shape[2] & -x.shape[2]) ** 0.5 if fmt.rotated else 1.0  # the most that a rotation enlarges a number
    least, most = x.aminmax()
    return torch.float16 if max(-float(least), float(most)) * growth <= half_limit(fmt) else torch.bfloat16


@triton.jit
def _butterfly(x, TOKENS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    pairs = tl.reshape(x, (TOKENS, BLOCK // (2 * SPAN), 2, SPAN))
    even, odd = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 1, 3, 2)), (TOKENS, BLOCK))


@triton.jit
def _rotated(x, TOKENS: tl.constexpr, F: tl.constexpr):
    if F.rotate >= 2:
        x = _butterfly(x, TOKENS, F.block, 1)
    if F.rotate >= 4:
        x = _butterfly(x, TOKENS, F.block, 2)
    if F.rotate >= 8:
        x = _butterfly(x, TOKENS, F.block, 4)
    if F.rotate >= 16:
        x = _butterfly(x, TOKENS, F.block, 8)
    if F.rotate >= 32:
        x = _butterfly(x, TOKENS, F.block, 16)
    if F.rotate >= 64:
        x = _butterfly(x, TOKENS, F.block, 32)
    if F.rotate >= 128:
        x = _butterfly(x, TOKENS, F.block, 64)
    if F.rotate >= 256:
        x = _butterfly(x, TOKENS, F.block, 128)
    return x * F.rotate**-0.5


@triton.jit
def _round_down(x, HALF: tl.constexpr):
    """The greatest fp16 or bf16 number up to x, as fp32; of the finite ones."""
    if HALF:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        rounded = x.to(tl.float16)
        bits = rounded.to(tl.int16, bitcast=True).to(tl.int32)
        # Bits of a positive number count up with it, those of a negative one down; below +0 lies the least negative.
        lower = tl.where(bits > 0, bits - 1, tl.where(bits == 0, -32767, bits + 1))
        bits = tl.where(rounded.to(tl.float32) > x, lower, bits)
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = tl.minimum(tl.maximum(x, -3.3895313892515355e38), 3.3895313892515355e38)
        bits = x.to(tl.int32, bitcast=True)
        cut = bits & -65536
        return tl.where((bits < 0) & (bits != cut), cut + 65536, cut).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(x, zero, step, STEPS: tl.constexpr):
    """Codes nearest to x, int32; ties to even."""
    code = tl.div_rn(x - zero, tl.broadcast_to(tl.where(step > 0, step, 1.0), x.shape))
    code = tl.minimum(tl.maximum(code, 0.0), STEPS)
    # Numbers of this size are whole in fp32, so the sum rounds.
    return (code + 12582912.0 - 12582912.0).to(tl.int32)


@triton.jit
def _store_plane(plane, codes, head, token, inside, tokens, BITS: tl.constexpr, TOKENS: tl.constexpr, F: tl.constexpr):
    PER_BYTE: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = (F.dim + PER_BYTE - 1) // PER_BYTE
    parts = tl.reshape(codes, (TOKENS, F.block // PER_BYTE, PER_BYTE)) << (tl.arange(0, PER_BYTE) * BITS)[None, None, :]
    byte = tl.arange(0, F.block // PER_BYTE)
    at = (head * tokens + token)[:, None] * BYTES + byte[None, :]
    tl.store(plane + at, tl.sum(parts, axis=2).to(tl.uint8), mask=inside[:, None] & (byte < BYTES)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _pack(x, x_strides, low, high, scale, zero, tokens, F: tl.constexpr, TOKENS: tl.constexpr):
    """Program (tile of tokens, head)."""
    STEPS: tl.constexpr = (1 << F.bits) - 1
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    channel = tl.arange(0, F.block)
    inside = token < tokens
    at = token[:, None] * x_strides[1] + channel[None, :] * x_strides[2]
    within = inside[:, None] & (channel < F.dim)[None, :]
    numbers = tl.load(x + head * x_strides[0] + at, mask=within, other=0.0).to(tl.float32)
    if F.rotate > 1:
        numbers = _rotated(numbers, TOKENS, F)
    if F.by_token:
        numbers = tl.reshape(numbers, (TOKENS, F.block // F.group, F.group))
        least, most = tl.min(numbers, axis=2), tl.max(numbers, axis=2)
    else:
        least, most = tl.min(numbers, axis=0), tl.max(numbers, axis=0)
    start = _round_down(least, F.half)
    step = -_round_down(tl.div_rn(start - most, tl.full(most.shape, STEPS, tl.float32)), F.half)
    if F.by_token:
        codes = tl.reshape(_nearest(numbers, start[:, :, None], step[:, :, None], STEPS), (TOKENS, F.block))
        group = tl.arange(0, F.block // F.group)
        row = (head * tokens + token)[:, None] * (F.dim // F.group) + group[None, :]
        kept = inside[:, None] & (group < F.dim // F.group)[None, :]
    else:
        codes = _nearest(numbers, start[None, :], step[None, :], STEPS)
        row = (head * (tokens // F.group) + tile) * F.dim + channel
        kept = channel < F.dim
    tl.store(scale + row, step.to(scale.dtype.element_ty), mask=kept)
    tl.store(zero + row, start.to(zero.dtype.element_ty), mask=kept)
    codes = tl.where((channel < F.dim)[None, :], codes, 0)
    if F.bits == 3:
        _store_plane(low, codes & 3, head, token, inside, tokens, 2, TOKENS, F)
        _store_plane(high, codes >> 2, head, token, inside, tokens, 1, TOKENS, F)
    else:
        _store_plane(low, codes, head, token, inside, tokens, F.bits, TOKENS, F)
