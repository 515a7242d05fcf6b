"""Levels of a group of numbers: its 16-bit zero and step, and the code of every number."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FIT_ROUNDS = 6

# Steps, in standard deviations, of the best uniform quantisers of a normal distribution.
_NORMAL_STEP = {1: 2 * 0.798, 2: 0.9957}


def code_groups(
    x: Tensor, bits: int, levels: Literal["minmax", "centroid", "fit"], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the zero and step of every group and code its numbers against them as they are stored.

    `minmax` spreads the levels over the range of the group (KIVI, arXiv 2402.02750, section 3); the zero is rounded
    down and the step up, so |x - (zero + step * code)| <= step / 2 holds with the stored values. `centroid` (1 bit)
    splits at mid-range and puts the levels at the means of the two parts (ours). `fit` refits zero and step by least
    squares (ours). A constant group has step 0 where 16 bits hold its value, else a step that covers the remainder.

    Parameters
    ----------
    x : fp32 (..., g), the group last and contiguous.
    bits : bits per code.
    levels : "minmax", "centroid" or "fit".
    dtype : torch.float16 or torch.bfloat16, in which zero and step are stored.

    Returns
    -------
    codes uint8 (..., g), scale (...), zero (...).
    """
    if levels == "centroid":
        return _code_halves(x, dtype)
    low, high = x.aminmax(dim=-1) if levels == "minmax" else fit_levels(x, bits)
    steps = (1 << bits) - 1
    zero, scale = _store(low, high, steps, dtype)
    codes = _nearest(x, zero.float().unsqueeze(-1), scale.float().unsqueeze(-1), steps)
    return codes.to(torch.uint8), scale, zero


def fit_levels(x: Tensor, bits: int, rounds: int = FIT_ROUNDS) -> tuple[Tensor, Tensor]:
    """Fit the lowest and highest of 2^bits evenly spaced levels to every group by least squares.

    It starts from the best levels of a normal distribution (1 and 2 bits) or from the range (3, 4, 8 bits), then
    takes turns between nearest codes and the refit of zero and step. Source: ours.

    Parameters
    ----------
    x : fp32 (..., g).
    bits : bits per code.
    rounds : turns; 0 gives the start.

    Returns
    -------
    low, high : fp32 (...).
    """
    steps = (1 << bits) - 1
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    if bits in _NORMAL_STEP:
        scale = _NORMAL_STEP[bits] * centred.square().mean(-1, keepdim=True).sqrt()
        zero = -scale * (steps / 2)
    else:
        zero, high = centred.aminmax(dim=-1, keepdim=True)
        scale = (high - zero) / steps
    for _ in range(rounds):
        codes = _nearest(centred, zero, scale, steps)
        code_mean = codes.mean(-1, keepdim=True)
        codes = codes - code_mean
        spread = codes.square().sum(-1, keepdim=True)
        refit = (codes * centred).sum(-1, keepdim=True) / spread.clamp(min=torch.finfo(torch.float32).tiny)
        scale = torch.where(spread > 0, refit, scale)
        zero = -scale * code_mean
    low = mean + zero
    return low.squeeze(-1), (low + steps * scale).squeeze(-1)


def _code_halves(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    least, most = x.aminmax(dim=-1, keepdim=True)
    upper = x > least + (most - least) / 2
    count = upper.sum(-1, keepdim=True)
    low = x.masked_fill(upper, 0).sum(-1, keepdim=True) / (x.shape[-1] - count)  # the least is always in it
    high = torch.where(count > 0, x.masked_fill(~upper, 0).sum(-1, keepdim=True) / count.clamp(min=1), low)
    zero, scale = _store(low, high, 1, dtype)
    # Where rounding moved the zero by much of the range (biased groups), the split no longer picks the nearer level.
    coarse = low - zero.float() > (most - least) / 8
    nearer = x > zero.float() + scale.float() / 2
    codes = torch.where(coarse, nearer, upper)
    return codes.to(torch.uint8), scale.squeeze(-1), zero.squeeze(-1)


def _nearest(x: Tensor, zero: Tensor, scale: Tensor, steps: int) -> Tensor:
    step = torch.where(scale > 0, scale, 1.0)
    return (x - zero).div_(step).round_().clamp_(0, steps)


def _store(low: Tensor, high: Tensor, steps: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    zero = _round_down(low, dtype)
    scale = -_round_down((zero.float() - high) / steps, dtype)  # rounds the step up
    return zero, scale


def _round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    x = x.clamp(-limit, limit)
    rounded = x.to(dtype)
    bits = rounded.view(torch.int16)
    # Bits of a positive number count up with it, those of a negative one down; below +0 lies the least negative.
    lower = torch.where(bits > 0, bits - 1, bits + 1).masked_fill(bits == 0, -32767)
    return torch.where(rounded.float() > x, lower, bits).view(dtype)
