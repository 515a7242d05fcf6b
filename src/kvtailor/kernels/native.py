"""The C++ kernels, given the package's own structures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvtailor.arranged import MOST_DIM, Arranged, block_bytes
from kvtailor.formats import GROUP_TOKENS, PackedFormat, half_limit, plane_bits
from kvtailor.kernels import choice

PATHS = ("avx512", "avx2", "plain")
MOST_ROWS = 16
"""Queries of a KV head up to which attention is computed on the codes; more go through fp32 blocks."""

Precision = Literal["exact", "default", "fast"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# One sequence: handed segments, a handed tail or None, tokens of the tail per head.
Row = tuple[list[Any], Any, list[int]]


def path_for(device: torch.device, dtype: torch.dtype, dims: Sequence[int]) -> str | None:
    """The C++ kernels that serve a layer of these sizes here, or None.

    Parameters
    ----------
    device, dtype : of the keys and values.
    dims : channels of a key head and a value head.

    Raises
    ------
    KernelError
        If KVTAILOR_KERNELS asks for what cannot run here.
    """
    active = choice.active()
    fits = all(dim % 16 == 0 and 16 <= dim <= MOST_DIM for dim in dims)
    return active if active in PATHS and device.type == "cpu" and dtype in _DTYPES and fits else None


@dataclass(frozen=True)
class Weighing:
    """How products become logits.

    Attributes
    ----------
    scale, softcap : factor, and bound or 0 for none.
    causal, window, first : whether a query sees no slot after its own; newest slots that it sees, 0 for all; slot of
        the first query.
    mask : bool (B or 1, Hq or 1, q or 1, slots), True where a query may look, in place of causal and window; or None.
    bias : float32 of such a shape, added; -inf hides; or None.
    """

    scale: float
    softcap: float = 0.0
    causal: bool = False
    window: int = 0
    first: int = 0
    mask: Tensor | None = None
    bias: Tensor | None = None


def hand_segment(keys: Tensor | Arranged, values: Tensor | Arranged, positions: Tensor | range) -> Any:
    """Hand a sealed stretch of tokens to the kernels; its tensors are checked now and used where they lie.

    Parameters
    ----------
    keys, values : (Hkv, n, D), or arranged codes of as many tokens.
    positions : (n,) int32 slots, ascending, or a range of them.

    Raises
    ------
    KernelError
        For anything that the kernels cannot take: no heads or tokens, slots that do not ascend or exceed int32, scales
        of values that are negative or not finite.
    """
    native = _module()
    first = positions.start if isinstance(positions, range) else 0
    slots = None if isinstance(positions, range) else positions
    if isinstance(keys, Arranged) and isinstance(values, Arranged):
        return native.Segment(hand_codes(keys), hand_codes(values), slots, first)
    return native.Segment(keys, values, slots, first)


def hand_keys(codes: Arranged) -> Any:
    """Hand packed keys alone to the kernels, as a segment that scores can be computed of and nothing else.

    Raises
    ------
    KernelError
        For codes that the kernels cannot take, and for codes of values.
    """
    return _module().Segment(hand_codes(codes))


def hand_codes(codes: Arranged) -> Any:
    """Hand arranged codes to the kernels.

    Raises
    ------
    KernelError
        For codes that the kernels cannot take.
    """
    fmt = codes.format
    return _module().Codes(
        fmt.bits, codes.dim, fmt.group, fmt.axis == "channel", fmt.rotated, codes.values, codes.length,
        list(codes.planes), codes.scale, codes.zero, codes.outlier_channels, codes.outliers,
    )  # fmt: skip


def hand_tail(keys: Tensor, values: Tensor, positions: Tensor | None, starts: list[int], rooms: list[int]) -> Any:
    """Hand the dense end of a row to the kernels.

    Parameters
    ----------
    keys, values : (rows, Dk) and (rows, Dv).
    positions : (rows,) int32 slots, ascending within a head; None where a head's tokens stand in slots 0, 1, ….
    starts, rooms : the rows that each head owns alone.

    Raises
    ------
    KernelError
        For anything that the kernels cannot take, and for rows of two heads. Slots may be written later; their order is
        checked where a mask or bias is read by them.
    """
    return _module().Tail(keys, values, positions, starts, rooms)


def attend(
    path: str,
    rows: list[Row],
    query: Tensor,
    out: Tensor,
    weighing: Weighing,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    precision: Precision = "default",
) -> None:
    """Attention over all segments and tails of each row, with one softmax.

    Parameters
    ----------
    path : "avx512", "avx2" or "plain".
    rows : what each sequence holds.
    query : (B, Hq, q, Dk).
    out : (B, Hq, q, Dv), written; zero for a query that may see nothing.
    weighing : how products become logits.
    sinks : (Hq,) logits without a value, or None.
    lse : (B, Hq, q) float32 that log-sum-exp without sinks is written to, or None.
    precision : of attention on codes: "exact" takes 16-bit queries and weights, "default" 16-bit queries and 8-bit
        weights, "fast" 8 bits for both.

    Raises
    ------
    KernelError
        For anything that the kernels cannot take, and where a query or key is no finite number.
    """
    w = weighing
    _module().attend(
        path, rows, _with_unit_stride(query), out, lse, _in_fp32(sinks), w.scale, w.softcap, w.causal, w.window,
        w.first, w.mask, w.bias, precision, torch.get_num_threads(),
    )  # fmt: skip


def mass(
    path: str, rows: list[Row], query: Tensor, weighing: Weighing, length: int, sinks: Tensor | None = None
) -> Tensor:
    """The attention that each token gets, summed over the queries; nothing of the size of queries times tokens is made.

    Parameters
    ----------
    path, rows, query, weighing : as for :func:`attend`.
    length : tokens of the longest head.
    sinks : (Hq,) logits without a value that take part in the softmax, or None.

    Returns
    -------
    (B, Hq, length) float32, in the order of segments and tail; 0 behind the tokens of a shorter head.

    Raises
    ------
    KernelError
        As for :func:`attend`.
    """
    w = weighing
    out = torch.zeros(query.shape[0], query.shape[1], length, device=query.device)
    _module().mass(
        path, rows, _with_unit_stride(query), out, _in_fp32(sinks), w.scale,
        w.softcap, w.causal, w.window, w.first, w.mask, w.bias, torch.get_num_threads(),
    )  # fmt: skip
    return out


def scores(
    path: str, rows: list[Row], query: Tensor, out: Tensor, weighing: Weighing, precision: Precision = "default"
) -> None:
    """Weighed logits of queries over everything that each row holds, from the codes where keys are packed.

    Parameters
    ----------
    path, rows, query, weighing, precision : as for :func:`attend`.
    out : (B, Hq, q, n) float32, written, n the tokens of the longest head; -1e30 where a query may not look, and behind
        the tokens of a shorter head.

    Raises
    ------
    KernelError
        As for :func:`attend`.
    """
    w = weighing
    _module().scores(
        path, rows, _with_unit_stride(query), out, w.scale, w.softcap, w.causal, w.window, w.first, w.mask, w.bias,
        precision, torch.get_num_threads(),
    )  # fmt: skip


def channel_scores(
    path: str, query: Tensor, keys: Tensor, channels: Tensor, out: Tensor, scale: Tensor | None = None
) -> None:
    """Products of queries and keys over chosen channels only.

    Parameters
    ----------
    path : "avx512", "avx2" or "plain".
    query : (Hkv, G, D) float32.
    keys : (Hkv, m, n) float16, bfloat16, float32 or int8, channel by channel.
    channels : (Hkv, m) integers, which channels these are.
    out : (Hkv, G, n) float32, written.
    scale : (Hkv, m) float32 steps of int8 keys, or None.
    """
    _module().channel_scores(path, query, keys, scale, channels, out, torch.get_num_threads())


def best_of_group(path: str, scores: Tensor, out: Tensor, mode: Literal["max", "sum", "softmax"]) -> None:
    """One score of each token for all query heads of a KV head.

    Parameters
    ----------
    path : "avx512", "avx2" or "plain".
    scores : (Hkv, G, n) float32.
    out : (Hkv, n) float32, written.
    mode : greatest distance from the head's greatest score, sum of scores, or sum of softmax probabilities.
    """
    _module().best_of_group(path, scores, out, mode, torch.get_num_threads())


def topk(scores: Tensor, out: Tensor) -> None:
    """The places of the greatest scores of each row, ascending; of equal scores the first ones.

    Parameters
    ----------
    scores : (rows, n) float32.
    out : (rows, k) int64, written.

    Raises
    ------
    KernelError
        For k below 1 or above n, and for a score that is no number.
    """
    _module().topk(scores, out.shape[-1], torch.get_num_threads(), out)


def gather_attend(
    path: str,
    query: Tensor,
    keys: Any,
    values: Any,
    index: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Attention over chosen rows only, read where they lie: in memory, or in a file that is mapped into it.

    Parameters
    ----------
    path : "avx512", "avx2" or "plain".
    query : (Hkv, G, D).
    keys, values : (Hkv, n, D) tensors or NumPy arrays with any strides between rows.
    index : int64 (Hkv, k), or (Hkv, G, k) for each query head its own.
    scale : factor on the logits.
    out : (Hkv, G, D), written.
    lse : (Hkv, G) float32 that log-sum-exp is written to, or None.

    Raises
    ------
    KernelError
        For an index that names no row, before anything is read.
    """
    _module().gather_attend(path, query, keys, values, index, scale, out, lse, torch.get_num_threads())


def pack(path: str, x: Tensor, fmt: PackedFormat, values: bool) -> Arranged | None:
    """Pack tokens straight into the order of the kernels.

    Parameters
    ----------
    path : "avx512", "avx2" or "plain".
    x : (H, n, D) keys or values, not rotated; n a multiple of 64.
    fmt : how to write them.
    values : whether they are values.

    Returns
    -------
    The codes, equal to those of `kvtailor.quantize.pack.pack` but for ties; None where a number is too large for scales
    in float16.

    Raises
    ------
    KernelError
        For a number that is not finite.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    threads = torch.get_num_threads()
    if _module().peak(path, x, fmt.rotated, threads) > half_limit(fmt):
        return None
    heads, length, dim = x.shape
    blocks = length // GROUP_TOKENS
    planes = tuple(
        torch.empty(heads, blocks, block_bytes(width, dim, values), dtype=torch.uint8, device=x.device)
        for width in plane_bits(fmt.bits)
    )
    rows = (dim // fmt.group, GROUP_TOKENS) if fmt.axis == "token" else (GROUP_TOKENS // fmt.group, dim)
    scale, zero = (torch.empty(heads, blocks, *rows, dtype=torch.float16, device=x.device) for _ in range(2))
    _module().pack(
        path, x, fmt.bits, fmt.group, fmt.axis == "channel", fmt.rotated, values, fmt.levels, list(planes), scale, zero,
        threads,
    )  # fmt: skip
    return Arranged(fmt, dim, length, values, planes, scale, zero)


def unpack(path: str, codes: Arranged) -> Tensor:
    """The numbers that arranged codes stand for, not rotated: fp32 (H, n, D)."""
    out = torch.empty(codes.heads, codes.length, codes.dim, device=codes.scale.device)
    _module().unpack(path, hand_codes(codes), out, torch.get_num_threads(), codes.format.rotated)
    return out


def _in_fp32(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.detach().float()


def _with_unit_stride(query: Tensor) -> Tensor:
    return query if query.stride(-1) == 1 else query.contiguous()


def _module() -> Any:
    native = choice.native()
    assert native is not None
    return native
