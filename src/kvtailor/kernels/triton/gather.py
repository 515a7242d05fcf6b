"""Attention over chosen rows of dense keys and values."""

from __future__ import annotations

from torch import Tensor

from kvtailor.kernels.triton.attend import attend_launch, merged
from kvtailor.kernels.triton.check import check_gather
from kvtailor.kernels.triton.operand import operand


def gather_attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    scale: float,
    softcap: float | None = None,
    check_index: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention over the rows that `index` names, with its log-sum-exp; the rows are read where they lie.

    Parameters
    ----------
    query : (H, M, D).
    keys : (H, n, D) fp32, fp16 or bf16.
    values : (H, n, Dv) likewise.
    index : integers (H, k), rows for all queries of a head, or (H, M, k), rows for each query. A row named twice
        counts twice.
    scale : factor on the logits.
    softcap : logits x become softcap * tanh(x / softcap), if given.
    check_index : refuse rows out of range, for which the GPU has to be waited for; without it they are not noticed.

    Returns
    -------
    fp32 (H, M, Dv) and fp32 (H, M).

    Raises
    ------
    KernelError : arguments of a shape, dtype or device that the kernel does not serve, or a row out of range.
    """
    check_gather(query, keys, values, index, softcap, check_index)
    heads, rows, dim = query.shape
    share = 1
    if index.dim() == 3:
        # A query with rows of its own is a head of its own.
        query, index, share = query.reshape(heads * rows, 1, dim), index.flatten(0, 1), rows
    launch, out, lse = attend_launch(query, operand(keys), operand(values), scale, softcap, index=index, share=share)
    launch.run()
    out, lse = merged(out, lse)
    return out.view(heads, rows, -1), lse.view(heads, rows)
