# mypy: allow-untyped-defs
"""Attention over parts of the tokens, merged by log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtailor.kernels.triton.check import check_merge
from kvtailor.kernels.triton.launch import Launch, empty

_PARTS_AT_ONCE = 16


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over parts of the tokens into attention over all of them.

    Parameters
    ----------
    outs : fp32 (parts, H, M, D), each of a softmax over its own tokens.
    lses : fp32 (parts, H, M), log-sum-exp of the logits of the part; -inf where a query saw nothing.

    Returns
    -------
    fp32 (H, M, D) and fp32 (H, M); 0 and -inf for a query that saw nothing in any part.

    Raises
    ------
    KernelError : arguments of a shape, dtype or device that the kernel does not serve.
    """
    check_merge(outs, lses)
    launch, out, lse = merge_launch(outs, lses)
    launch.run()
    return out, lse


def merge_launch(outs: Tensor, lses: Tensor) -> tuple[Launch, Tensor, Tensor]:
    """Prepare the launch, with room for its results."""
    parts, heads, rows, dim = outs.shape
    out, lse = empty((heads, rows, dim), outs), empty((heads, rows), outs)
    arguments = {
        "outs": outs,
        "out_strides": outs.stride(),
        "lses": lses,
        "lse_strides": lses.stride(),
        "out": out,
        "lse": lse,
        "parts": parts,
        "dim": dim,
        "PARTS": triton.next_power_of_2(parts),
        "AT_ONCE": min(_PARTS_AT_ONCE, triton.next_power_of_2(parts)),
        "BLOCK": triton.next_power_of_2(dim),
    }
    launch = Launch(
        name=f"merge D={dim}",
        kernel=_merge,
        grid=(rows, heads, 1),
        arguments=arguments,
        device=outs.device,
        dots=False,
    )
    return launch, out, lse


@triton.jit(do_not_specialize=["parts"])
def _merge(
    outs,
    out_strides,
    lses,
    lse_strides,
    out,
    lse,
    parts,
    dim,
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (query, head)."""
    row, head = tl.program_id(0), tl.program_id(1)
    lses += head.to(tl.int64) * lse_strides[1] + row * lse_strides[2]
    outs += head.to(tl.int64) * out_strides[1] + row * out_strides[2]
    part = tl.arange(0, PARTS)
    logs = tl.load(lses + part.to(tl.int64) * lse_strides[0], mask=part < parts, other=float("-inf"))
    most = tl.max(logs)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(tl.exp(logs - base))
    channel = tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        logs = tl.load(lses + part.to(tl.int64) * lse_strides[0], mask=part < parts, other=float("-inf"))
        within = (logs > float("-inf"))[:, None] & (channel < dim)[None, :]
        at = part.to(tl.int64)[:, None] * out_strides[0] + channel[None, :] * out_strides[3]
        own = tl.load(outs + at, mask=within, other=0.0)
        found += tl.sum(own * tl.exp(logs - base)[:, None], axis=0)
    at = head.to(tl.int64) * tl.num_programs(0) + row
    tl.store(lse + at, base + tl.log(total))
    tl.store(out + at * dim + channel, found / tl.where(total > 0, total, 1.0), mask=channel < dim)
