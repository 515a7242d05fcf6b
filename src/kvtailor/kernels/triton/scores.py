# mypy: allow-untyped-defs
"""Dot products of queries and keys, read from the codes where keys are packed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtailor.formats import Packed
from kvtailor.kernels.triton.attend import rows_at_once, tokens_at_once
from kvtailor.kernels.triton.check import check_scores
from kvtailor.kernels.triton.launch import Launch, empty
from kvtailor.kernels.triton.logits import load_query, tile_logits
from kvtailor.kernels.triton.operand import operand


def scores(query: Tensor, keys: Tensor | Packed) -> Tensor:
    """Dot products of queries and keys.

    Parameters
    ----------
    query : (H, M, D), in the basis of the stored keys.
    keys : (H, n, D) fp32, fp16 or bf16, or packed without outlier channels.

    Returns
    -------
    fp32 (H, M, n), not scaled.

    Raises
    ------
    KernelError : arguments of a shape, dtype, device or format that the kernel does not serve.
    """
    check_scores(query, keys)
    launch, found = scores_launch(query, keys)
    launch.run()
    return found


def scores_launch(query: Tensor, keys: Tensor | Packed) -> tuple[Launch, Tensor]:
    """Prepare the launch, with room for its results."""
    heads, rows, _ = query.shape
    source = operand(keys)
    tokens = keys.shape[1] if isinstance(keys, Tensor) else keys.length
    at_once, warps = rows_at_once(rows, source.layout)
    tile = tokens_at_once(source.layout)
    found = empty((heads, rows, tokens), query)
    arguments = {
        "query": query,
        "query_strides": query.stride(),
        "keys": source.tensors,
        "key_strides": source.strides,
        "found": found,
        "rows": rows,
        "tokens": tokens,
        "K": source.layout,
        "ROWS": at_once,
        "TOKENS": tile,
    }
    launch = Launch(
        name=f"scores K {source.layout.label}",
        kernel=_scores,
        grid=(-(-tokens // tile), heads, -(-rows // at_once)),
        arguments=arguments,
        device=query.device,
        dots=True,
        options={"num_warps": warps},
    )
    return launch, found


@triton.jit(do_not_specialize=["rows", "tokens"])
def _scores(
    query,
    query_strides,
    keys,
    key_strides,
    found,
    rows,
    tokens,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (tile of tokens, head, rows)."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    q = load_query(query + head * query_strides[0], query_strides, rows, ROWS, K)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    logits = tile_logits(q, keys, key_strides, head, tile * TOKENS, token.to(tl.int64), inside, ROWS, TOKENS, K)
    query_row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    at = (head * rows + query_row)[:, None] * tokens + token[None, :]
    tl.store(found + at, logits, mask=(query_row < rows)[:, None] & inside[None, :])
