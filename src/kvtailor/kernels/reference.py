"""Kernels in plain torch: they run on every device and say what the others must compute."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from kvtailor.arranged import Arranged, Codes
from kvtailor.formats import Packed, plane_bits, unpack_codes

BLOCK_TOKENS = 1024
"""Tokens read at a time: bounds the fp32 copies that a kernel makes. A whole number of every group of tokens."""


def scores(query: Tensor, keys: Tensor | Codes) -> Tensor:
    """Dot products of queries and keys, read from the codes where keys are packed.

    Parameters
    ----------
    query : (H, M, D), in the basis of the stored keys (rotated where `keys.format.rotated`).
    keys : (H, n, D) of any floating dtype, or packed.

    Returns
    -------
    fp32 (H, M, n), not scaled.
    """
    query = query.float()
    if isinstance(keys, Tensor):
        return _dense_scores(query, keys)
    blocks = [_packed_scores(query, block) for block in _blocks(canonical(keys))]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)


def weighted_values(probs: Tensor, values: Tensor | Codes) -> Tensor:
    """Sums of values weighted by probabilities, read from the codes where values are packed.

    Parameters
    ----------
    probs : (H, M, n), summed in fp32.
    values : (H, n, D) of any floating dtype, or packed.

    Returns
    -------
    fp32 (H, M, D), in the basis of the stored values (to be rotated back where `values.format.rotated`).
    """
    probs = probs.float()
    if isinstance(values, Tensor):
        return _dense_values(probs, values)
    start, out = 0, None
    for block in _blocks(canonical(values)):
        part = _packed_values(probs[..., start : start + block.length], block)
        out = part if out is None else out.add_(part)
        start += block.length
    assert out is not None
    return out


def _packed_scores(query: Tensor, keys: Packed) -> Tensor:
    fmt = keys.format
    if keys.outliers is not None or (fmt.axis == "channel" and keys.length % fmt.group):
        return query @ dequantise(keys).mT
    codes, scale, zero = _centred(keys)
    if fmt.axis == "channel":
        by_block = codes.unflatten(1, (-1, fmt.group))  # (H, blocks, g, D)
        turned = query.unsqueeze(1) * scale.unsqueeze(2)  # (H, blocks, M, D)
        found = turned @ by_block.mT + (query @ zero.mT).mT.unsqueeze(-1)  # (H, blocks, M, g)
        return found.transpose(1, 2).flatten(-2)
    by_group = codes.unflatten(-1, (-1, fmt.group)).transpose(1, 2)  # (H, groups, n, g)
    q = query.unflatten(-1, (-1, fmt.group))  # (H, M, groups, g)
    found = (q.transpose(1, 2) @ by_group.mT) * scale.mT.unsqueeze(2)  # (H, groups, M, n)
    return found.sum(dim=1) + q.sum(dim=-1) @ zero.mT


def _packed_values(probs: Tensor, values: Packed) -> Tensor:
    fmt = values.format
    if values.outliers is not None or fmt.axis == "channel":
        return probs @ dequantise(values)
    codes, scale, zero = _centred(values)
    by_group = codes.unflatten(-1, (-1, fmt.group)).transpose(1, 2)  # (H, groups, n, g)
    found = (probs.unsqueeze(1) * scale.mT.unsqueeze(2)) @ by_group  # (H, groups, M, g)
    return (found.transpose(1, 2) + (probs @ zero).unsqueeze(-1)).flatten(-2)


def _centred(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Codes counted from the middle level, fp32 (H, n, D), and the scale and zero that go with them.

    Numbers that cancel in a sum then do so exactly, which they do not where all codes are positive.
    """
    bits = packed.format.bits
    middle = (2**bits - 1) / 2
    scale = packed.scale.float()
    zero = packed.zero.float().addcmul(scale, scale.new_tensor(middle))
    if bits == 8:
        return packed.planes[0].float().sub_(middle), scale, zero
    codes, shift = None, 1
    for plane, width in zip(packed.planes, plane_bits(bits), strict=True):
        read = functional.embedding(plane.int(), _levels(width, float(shift), plane.device)).flatten(-2)[
            ..., : packed.dim
        ]
        codes = read if codes is None else codes.add_(read)
        shift <<= width
    assert codes is not None
    return codes, scale, zero


@lru_cache(maxsize=64)
def _levels(width: int, weight: float, device: torch.device) -> Tensor:
    """What the codes in each possible byte of a plane stand for, (256, codes in a byte), centred."""
    byte = torch.arange(256, device=device).unsqueeze(1)
    shifts = torch.arange(0, 8, width, device=device)
    codes = (byte >> shifts) & (2**width - 1)
    return (codes.float() - (2**width - 1) / 2) * weight


def dequantise(packed: Codes) -> Tensor:
    """Return the numbers that the codes stand for, outlier channels included.

    Returns
    -------
    fp32 (H, n, D), in the stored basis.
    """
    packed = canonical(packed)
    fmt = packed.format
    codes = unpack_codes(packed.planes, fmt.bits, packed.dim).float()
    scale, zero = packed.scale.float(), packed.zero.float()
    if fmt.axis == "token":
        groups = codes.unflatten(-1, (-1, fmt.group))  # (H, n, D / g, g)
        x = groups.mul_(scale.unsqueeze(-1)).add_(zero.unsqueeze(-1)).flatten(-2)
    else:
        groups = _token_groups(codes, fmt.group)  # (H, ceil(n / g), g, D)
        x = groups.mul_(scale.unsqueeze(2)).add_(zero.unsqueeze(2)).flatten(1, 2)[:, : packed.length]
    if packed.outlier_channels is not None and packed.outliers is not None:
        index = packed.outlier_channels.long().unsqueeze(1).expand_as(packed.outliers)
        x.scatter_(-1, index, packed.outliers.float())
    return x


def canonical(codes: Codes) -> Packed:
    """The codes in the canonical order."""
    return codes.packed() if isinstance(codes, Arranged) else codes


def _dense_scores(query: Tensor, keys: Tensor) -> Tensor:
    if keys.dtype == torch.float32:
        return query @ keys.mT
    return torch.cat([query @ block.float().mT for block in keys.split(BLOCK_TOKENS, dim=1)], dim=-1)


def _dense_values(probs: Tensor, values: Tensor) -> Tensor:
    if values.dtype == torch.float32:
        return probs @ values
    out = probs.new_zeros(*probs.shape[:2], values.shape[-1])
    for part, block in zip(probs.split(BLOCK_TOKENS, dim=-1), values.split(BLOCK_TOKENS, dim=1), strict=True):
        out += part @ block.float()
    return out


def _blocks(packed: Packed) -> Iterator[Packed]:
    if packed.length <= BLOCK_TOKENS:
        yield packed
        return
    for start in range(0, packed.length, BLOCK_TOKENS):
        yield packed.slice(start, min(start + BLOCK_TOKENS, packed.length))


def _token_groups(codes: Tensor, group: int) -> Tensor:
    """(H, n, D) to (H, ceil(n / g), g, D); a last group that was cut is filled with zeros."""
    return functional.pad(codes, (0, 0, 0, -codes.shape[1] % group)).unflatten(1, (-1, group))


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    """Attention over dense keys and values in one go, without its log-sum-exp.

    Parameters
    ----------
    query : (H, M, Dk).
    keys, values : (H, n, Dk) and (H, n, Dv), in the query's dtype.
    scale : factor on the logits.
    visible : (1 or H, M, n) boolean, True where a query may look; None for everywhere.

    Returns
    -------
    (H, M, Dv) in the query's dtype; zero for a query that may look nowhere.
    """
    mask = None if visible is None else visible.expand(query.shape[0], -1, -1)[None]
    out = functional.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]
    return out if visible is None else out.nan_to_num_(0.0)


def softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last axis with its log-sum-exp, so that parts can be merged.

    Parameters
    ----------
    logits : (..., n) float32, -inf where nothing may be seen.

    Returns
    -------
    Probabilities (..., n), zero in a row that sees nothing, and log-sum-exp (...), -inf there.
    """
    lse = logits.logsumexp(dim=-1)
    return (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_(), lse
