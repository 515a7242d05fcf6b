# mypy: allow-untyped-defs
"""Attention of a few queries over many tokens, computed on the codes and split over the tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtailor.formats import Packed
from kvtailor.kernels.triton.check import check_attend
from kvtailor.kernels.triton.launch import Launch, empty, padded, split_tiles
from kvtailor.kernels.triton.logits import load_query, tile_logits
from kvtailor.kernels.triton.merge import merge_launch
from kvtailor.kernels.triton.operand import Layout, Operand, operand
from kvtailor.kernels.triton.sums import finished, no_sums, with_tile

# Of a tile. Beyond 64 tokens the compiler stores values that are packed in 1 to 3 bits number by number.
_MOST_TOKENS = 64
_TILE_BYTES = 16384
# Of the queries that a program holds in registers.
_MOST_ROWS = 64
_MOST_NUMBERS = 8192
_LOG2_E = tl.constexpr(1.4426950408889634)


def attend(
    query: Tensor,
    keys: Tensor | Packed,
    values: Tensor | Packed,
    scale: float,
    softcap: float | None = None,
    visible: Tensor | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with its log-sum-exp, so that parts over other tokens can be merged.

    Tokens are split into parts that run side by side, each with a softmax of its own, and the parts are merged
    (Flash-Decoding; the online softmax is that of FlashAttention, arXiv 2205.14135).

    Parameters
    ----------
    query : (H, M, D), in the basis of the stored keys; all queries that share a head of keys lie along M.
    keys : (H, n, D) fp32, fp16 or bf16, or packed without outlier channels.
    values : (H, n, Dv) likewise.
    scale : factor on the logits.
    softcap : logits x become softcap * tanh(x / softcap), if given.
    visible : (1 or H, M, n) boolean, True where a query may look; None for everywhere.
    splits : parts of the tokens; None for as many as fill the device.

    Returns
    -------
    fp32 (H, M, Dv), in the basis of the stored values, and fp32 (H, M). A query that may look nowhere gets 0 and -inf.

    Raises
    ------
    KernelError : arguments of a shape, dtype, device or format that the kernel does not serve.
    """
    check_attend(query, keys, values, softcap, visible)
    launch, out, lse = attend_launch(query, operand(keys), operand(values), scale, softcap, visible, splits=splits)
    launch.run()
    return merged(out, lse)


def attend_launch(
    query: Tensor,
    keys: Operand,
    values: Operand,
    scale: float,
    softcap: float | None = None,
    visible: Tensor | None = None,
    index: Tensor | None = None,
    share: int = 1,
    splits: int | None = None,
) -> tuple[Launch, Tensor, Tensor]:
    """Prepare the launch, with room for the results of its parts: fp32 (parts, H, M, Dv) and (parts, H, M).

    `index` (H, k) names the rows of keys and values to read; `share` heads of the query read one head of them.
    """
    heads, rows, _ = query.shape
    tokens = _length(keys) if index is None else index.shape[1]
    at_once, warps = rows_at_once(rows, keys.layout, values.layout)
    tile = tokens_at_once(keys.layout, values.layout)
    row_tiles = -(-rows // at_once)
    parts, each = split_tiles(-(-tokens // tile), heads * row_tiles, query.device, splits)
    out = empty((parts, heads, rows, values.layout.dim), query)
    lse = empty((parts, heads, rows), query)
    if visible is not None:
        visible = visible.expand(heads, -1, -1)
    arguments = {
        "query": query,
        "query_strides": query.stride(),
        "keys": keys.tensors,
        "key_strides": keys.strides,
        "values": values.tensors,
        "value_strides": values.strides,
        "visible": visible,
        "visible_strides": (0, 0, 0) if visible is None else visible.stride(),
        "index": index,
        "index_strides": (0, 0) if index is None else index.stride(),
        "out": out,
        "lse": lse,
        "scale": float(scale),
        "softcap": float(softcap or 0.0),
        "rows": rows,
        "tokens": tokens,
        "tiles": each,
        "share": share,
        "K": keys.layout,
        "V": values.layout,
        "ROWS": at_once,
        "TOKENS": tile,
        "CAPPED": softcap is not None,
    }
    launch = Launch(
        name=f"{'attend' if index is None else 'gather'} K {keys.layout.label}, V {values.layout.label}",
        kernel=_attend,
        grid=(parts, heads, row_tiles),
        arguments=arguments,
        device=query.device,
        dots=True,
        options={"num_warps": warps, "num_stages": 3},
    )
    return launch, out, lse


def merged(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the parts of a launch; a single part is returned as it is."""
    if out.shape[0] == 1:
        return out[0], lse[0]
    launch, whole, whole_lse = merge_launch(out, lse)
    launch.run()
    return whole, whole_lse


def rows_at_once(rows: int, *layouts: Layout) -> tuple[int, int]:
    """Queries of a program, and the warps whose registers hold them."""
    widest = max(padded(layout.dim) for layout in layouts)
    at_once = min(padded(rows), _MOST_ROWS, _MOST_NUMBERS // widest)
    return at_once, 8 if 2 * at_once * widest > _MOST_NUMBERS else 4


def tokens_at_once(keys: Layout, values: Layout | None = None) -> int:
    """Tokens of a tile: all of one group where scales belong to channels, else as many as fit on the chip."""
    layouts = [keys] if values is None else [keys, values]
    groups = [layout.group for layout in layouts if layout.kind == "channel"]
    if groups:
        return min(groups)
    fit = min(_TILE_BYTES // padded(layout.bytes_per_token) for layout in layouts)
    return max(16, min(_MOST_TOKENS, fit))


def _length(x: Operand) -> int:
    first = x.tensors[0]
    assert first is not None
    return first.shape[1]


@triton.jit(do_not_specialize=["rows", "tokens", "tiles", "share"])
def _attend(
    query,
    query_strides,
    keys,
    key_strides,
    values,
    value_strides,
    visible,
    visible_strides,
    index,
    index_strides,
    out,
    lse,
    scale,
    softcap,
    rows,
    tokens,
    tiles,
    share,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Program (part, head of the query, rows): attention of the rows over the tiles of the part."""
    CHUNKS: tl.constexpr = V.chunks
    part, query_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head = query_head // share
    q = load_query(query + query_head * query_strides[0], query_strides, rows, ROWS, K)
    query_row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums, shifts = no_sums(ROWS, V)
    for tile in range(part * tiles, tl.minimum((part + 1) * tiles, tl.cdiv(tokens, TOKENS))):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        inside = token < tokens
        row = token.to(tl.int64)
        if index is not None:
            at = query_head * index_strides[0] + token * index_strides[1]
            row = tl.load(index + at, mask=inside, other=0).to(tl.int64)
        logits = tile_logits(q, keys, key_strides, head, tile * TOKENS, row, inside, ROWS, TOKENS, K) * scale
        if CAPPED:
            logits = softcap * (1 - 2 / (tl.exp2(logits * (2 * _LOG2_E) / softcap) + 1))
        seen = inside[None, :]
        if visible is not None:
            at = query_row[:, None].to(tl.int64) * visible_strides[1] + row[None, :] * visible_strides[2]
            within = seen & (query_row < rows)[:, None]
            seen = tl.load(visible + query_head * visible_strides[0] + at, mask=within, other=0) != 0
        logits = tl.where(seen, logits * _LOG2_E, float("-inf"))
        higher = tl.maximum(most, tl.max(logits, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2(most - base)
        probs = tl.exp2(logits - base[:, None])
        total = total * decay + tl.sum(probs, axis=1)
        sums, shifts = with_tile(sums, shifts, probs, decay, values, value_strides, head, tile * TOKENS, row, inside, V)
        most = higher
    within = query_row < rows
    at = (part * tl.num_programs(1) + query_head) * rows + query_row
    tl.store(lse + at, (most + tl.log2(total)) / _LOG2_E, mask=within)
    share_of_one = tl.where(total > 0, 1 / total, 0.0)
    channel = tl.arange(0, V.block)
    for chunk in tl.static_range(CHUNKS):
        found = finished(sums, shifts, chunk, V) * share_of_one[:, None]
        place = at[:, None] * V.dim + (chunk * V.width + channel)[None, :]
        tl.store(out + place, found, mask=within[:, None] & (channel < V.width)[None, :])
