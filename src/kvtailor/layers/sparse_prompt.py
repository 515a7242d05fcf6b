"""A prompt's attention over some blocks of tokens only: less time for long prompts, and some loss.

Source: the block-sparse pattern of MInference, arXiv 2407.02490, section 3: blocks of keys by the products of pooled
queries and keys; one choice for the query heads of a KV head, with the first and the newest blocks always read: ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

BLOCK = 128
"""Tokens of a block, of queries and of keys."""

NEAR = 2
"""Newest blocks that each block of queries reads, its own among them; the first block is read too."""

ROWS_AT_ONCE = 1024
"""Rows of a mask that are looked at together: bounds the memory for it."""


def serves(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, given: dict[str, Any]
) -> bool:
    """Whether a pass is a prompt without padding whose logits are scaled and nothing else, and nobody asks for weights.

    Parameters
    ----------
    module : the attention module.
    query, key : (B, Hq, n, Dk) and (B, Hkv, n, Dk).
    mask, given : as Transformers hands them to an attention function.
    """
    plain = all(given.get(name) is None for name in ("softcap", "s_aux", "position_bias", "sliding_window"))
    causal = given.get("is_causal") is not False
    long = query.shape[2] == key.shape[2] > (NEAR + 2) * BLOCK
    told = given.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False)
    return plain and causal and long and not told and (mask is None or _hides_later_tokens_alone(mask, query.shape[2]))


def _hides_later_tokens_alone(mask: torch.Tensor, tokens: int) -> bool:
    """Whether a mask, boolean or additive, says what none would say: eager attention always gets one."""
    if mask.shape[-2:] != (tokens, tokens):
        return False
    places = torch.arange(tokens, device=mask.device)
    for asked in places.split(ROWS_AT_ONCE):
        rows = mask[..., asked[0] : asked[-1] + 1, :]
        hidden = ~rows if rows.dtype == torch.bool else rows <= torch.finfo(rows.dtype).min / 2
        if not torch.equal(hidden, (places > asked[:, None]).expand_as(hidden)):
            return False
        if rows.dtype != torch.bool and bool(rows.masked_fill(hidden, 0.0).any()):
            return False
    return True


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: float, scaling: float | None = None
) -> torch.Tensor:
    """Causal attention in which each block of queries reads a share of the blocks before it.

    Parameters
    ----------
    query : (B, Hq, n, Dk).
    key, value : (B, Hkv, n, Dk) and (B, Hkv, n, Dv).
    share : of the blocks before a block of queries that it reads, besides the first and the newest, 0 to 1.
    scaling : factor on the logits; default: one over the root of Dk.

    Returns
    -------
    (B, n, Hq, Dv).
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = [_attend_row(*parts, share, scale) for parts in zip(query, key, value, strict=True)]
    return torch.stack(rows).transpose(1, 2)


def _attend_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: float, scale: float
) -> torch.Tensor:
    """One sequence: (Hq, n, Dk), (Hkv, n, Dk) and (Hkv, n, Dv) to (Hq, n, Dv)."""
    heads, tokens, _ = key.shape
    grouped = query.view(heads, -1, tokens, query.shape[-1])  # (Hkv, G, n, Dk)
    out = query.new_empty(*grouped.shape[:3], value.shape[-1])
    worth = block_scores(grouped, key, scale)  # (Hkv, blocks, blocks)
    for block in range(worth.shape[1]):
        asked = slice(block * BLOCK, min((block + 1) * BLOCK, tokens))
        chosen = chosen_blocks(worth[:, block], block, share)  # (Hkv, m)
        keys, values = (_gathered(part, chosen, asked) for part in (key, value))
        out[:, :, asked] = _attend_block(grouped[:, :, asked], keys, values, scale)
    return out.flatten(0, 1)


def block_scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of pooled queries to pooled keys, summed over the query heads of a KV head.

    Parameters
    ----------
    query : (Hkv, G, n, Dk).
    key : (Hkv, n, Dk).
    scale : factor on the logits.

    Returns
    -------
    (Hkv, blocks, blocks) float32; 0 for blocks that come later.
    """
    pooled = _pooled(query), _pooled(key)[:, None]
    logits = pooled[0] @ pooled[1].mT * scale  # (Hkv, G, blocks, blocks)
    later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
    return logits.masked_fill(later, -torch.inf).softmax(-1).sum(1)


def chosen_blocks(worth: torch.Tensor, block: int, share: float) -> torch.Tensor:
    """The blocks that a block of queries reads, ascending, (Hkv, m) int64: the first, the newest, and the most worth.

    Parameters
    ----------
    worth : (Hkv, blocks) of the block's row.
    block : its number.
    share : as for :func:`attend`.
    """
    fixed = sorted({0, *range(max(0, block - NEAR + 1), block + 1)})
    free = block + 1 - len(fixed)
    count = min(free, int(share * block + 0.5))
    always = torch.tensor(fixed, device=worth.device).expand(worth.shape[0], -1)
    if count <= 0:
        return always
    others = worth[:, : block + 1].clone()
    others[:, fixed] = -torch.inf
    return torch.cat([always, others.topk(count, dim=-1).indices], dim=-1).sort(dim=-1).values


def _pooled(x: torch.Tensor) -> torch.Tensor:
    """Means of blocks of tokens, float32: (..., n, D) to (..., blocks, D); the last block may be short."""
    tokens = x.shape[-2]
    whole = tokens // BLOCK * BLOCK
    means = x[..., :whole, :].float().unflatten(-2, (-1, BLOCK)).mean(-2)
    return means if whole == tokens else torch.cat([means, x[..., whole:, :].float().mean(-2, keepdim=True)], dim=-2)


def _gathered(x: torch.Tensor, chosen: torch.Tensor, asked: slice) -> torch.Tensor:
    """Tokens of chosen blocks up to the last one asked, (Hkv, m tokens, D)."""
    places = (chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=x.device)).flatten(1)
    short = asked.start + BLOCK - asked.stop  # of the last block
    places = places[:, : places.shape[1] - short]
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


def _attend_block(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries (Hkv, G, q, Dk) over keys whose last q are their own tokens: (Hkv, G, q, Dv)."""
    heads, group, count, dim = query.shape
    seen = torch.ones(count, keys.shape[1], dtype=torch.bool, device=keys.device).tril(keys.shape[1] - count)
    out = functional.scaled_dot_product_attention(
        query.reshape(1, heads, group * count, dim), keys[None], values[None], seen.repeat(group, 1), scale=scale
    )
    return out.view(heads, group, count, -1)
