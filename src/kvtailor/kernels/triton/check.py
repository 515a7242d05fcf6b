"""What the kernels serve: every refusal happens here, before a launch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.errors import KernelError
from kvtailor.formats import Packed, PackedFormat, check_format
from kvtailor.kernels.triton.numbers import INTERPRETED
from kvtailor.kernels.triton.operand import DENSE_KINDS

_MOST_CHANNELS = 256
_MOST_PARTS = 4096
_MOST_LAUNCHES = 65_535  # of an axis of a grid
_INDEX_DTYPES = (torch.int32, torch.int64)
_SCALE_DTYPES = (torch.float16, torch.bfloat16)


def check_attend(
    query: Tensor, keys: Tensor | Packed, values: Tensor | Packed, softcap: float | None, visible: Tensor | None
) -> None:
    """Refuse what `attend` does not serve."""
    _check_query(query)
    _check_tokens("keys", keys, query)
    _check_tokens("values", values, query)
    _check_equal("channels of keys", _dim(keys), "the channels of queries", query.shape[2])
    _check_equal("tokens of values", _length(values), "the tokens of keys", _length(keys))
    _check_softcap(softcap)
    if visible is None:
        return
    _check_device("visible", visible, query)
    if visible.dtype != torch.bool:
        raise KernelError(f"visible is {visible.dtype}; allowed: torch.bool")
    allowed = [(heads, query.shape[1], _length(keys)) for heads in (1, query.shape[0])]
    if tuple(visible.shape) not in allowed:
        raise KernelError(f"visible has shape {tuple(visible.shape)}; allowed: {allowed[0]} or {allowed[1]}")


def can_attend(query: Tensor, keys: Tensor | Packed, values: Tensor | Packed, softcap: float | None) -> bool:
    """Whether `attend` serves these."""
    try:
        check_attend(query, keys, values, softcap, None)
    except KernelError:
        return False
    return True


def check_scores(query: Tensor, keys: Tensor | Packed) -> None:
    """Refuse what `scores` does not serve."""
    _check_query(query)
    _check_tokens("keys", keys, query)
    _check_equal("channels of keys", _dim(keys), "the channels of queries", query.shape[2])


def check_gather(
    query: Tensor, keys: Tensor, values: Tensor, index: Tensor, softcap: float | None, check_index: bool
) -> None:
    """Refuse what `gather_attend` does not serve."""
    for name, x in (("keys", keys), ("values", values)):
        if not isinstance(x, Tensor):
            raise KernelError(f"{name} are {type(x).__name__}; allowed: a dense tensor, whose rows can be chosen")
    check_attend(query, keys, values, softcap, None)
    _check_device("index", index, query)
    if index.dtype not in _INDEX_DTYPES:
        raise KernelError(f"index is {index.dtype}; allowed: torch.int32 or torch.int64")
    heads, rows, _ = query.shape
    if tuple(index.shape[:-1]) not in ((heads,), (heads, rows)) or index.shape[-1] == 0:
        raise KernelError(
            f"index has shape {tuple(index.shape)}; allowed: ({heads}, k) or ({heads}, {rows}, k), k 1 or more"
        )
    if index.dim() == 3 and heads * rows > _MOST_LAUNCHES:
        raise KernelError(f"queries with rows of their own: {heads * rows}; allowed: up to {_MOST_LAUNCHES}")
    if check_index:
        least, most = (int(bound) for bound in index.aminmax())
        if least < 0 or most >= keys.shape[1]:
            raise KernelError(f"index names rows {least} to {most}; allowed: 0 to {keys.shape[1] - 1}")


def check_pack(x: Tensor, fmt: PackedFormat, scale_dtype: torch.dtype | None) -> None:
    """Refuse what `pack` does not serve."""
    _check_dense("numbers to pack", x)
    _check_runs(x)
    check_format(fmt, x.shape[2])
    if fmt.levels != "minmax":
        raise KernelError(f"levels is {fmt.levels!r}; allowed in this kernel: 'minmax'")
    if fmt.axis == "token" and fmt.group & (fmt.group - 1):
        raise KernelError(f"group is {fmt.group} channels; allowed in this kernel: a power of two")
    if fmt.axis == "channel" and x.shape[1] % fmt.group:
        raise KernelError(f"{x.shape[1]} tokens to pack per channel; allowed: whole groups of {fmt.group} tokens")
    if scale_dtype not in (None, *_SCALE_DTYPES):
        raise KernelError(f"scale dtype is {scale_dtype}; allowed: torch.float16 or torch.bfloat16")


def check_merge(outs: Tensor, lses: Tensor) -> None:
    """Refuse what `merge` does not serve."""
    if outs.dim() != 4 or outs.shape[:3] != lses.shape:
        raise KernelError(
            f"parts have shapes {tuple(outs.shape)} and {tuple(lses.shape)}; "
            "allowed: (parts, H, M, D) and (parts, H, M)"
        )
    if 0 in outs.shape or outs.shape[0] > _MOST_PARTS:
        raise KernelError(f"parts have shape {tuple(outs.shape)}; allowed: 1 to {_MOST_PARTS} parts, nothing empty")
    for name, x in (("outputs", outs), ("log-sum-exps", lses)):
        if x.dtype != torch.float32:
            raise KernelError(f"{name} of parts are {x.dtype}; allowed: torch.float32")
    _check_device("log-sum-exps", lses, outs)
    _check_runs(outs)


def _check_query(query: Tensor) -> None:
    _check_dense("queries", query)
    _check_runs(query)


def _check_tokens(name: str, x: Tensor | Packed, query: Tensor) -> None:
    if isinstance(x, Tensor):
        _check_dense(name, x)
        _check_device(name, x, query)
        _check_equal(f"heads of {name}", x.shape[0], "the heads of queries", query.shape[0])
        return
    if not isinstance(x, Packed):
        raise KernelError(f"{name} are {type(x).__name__}; allowed: a dense tensor or Packed")
    if x.outliers is not None:
        raise KernelError(f"packed {name} have outlier channels; allowed in this kernel: none")
    _check_layout(name, x)
    for tensor in x.tensors():
        _check_device(name, tensor, query)
    _check_equal(f"heads of {name}", x.heads, "the heads of queries", query.shape[0])


def _check_layout(name: str, x: Packed) -> None:
    fmt = x.format
    check_format(fmt, x.dim)
    if not 1 <= x.dim <= _MOST_CHANNELS or x.length == 0:
        raise KernelError(
            f"packed {name} have {x.length} tokens of {x.dim} channels; allowed: 1 or more, 1 to {_MOST_CHANNELS}"
        )
    if fmt.axis == "token" and fmt.group != x.dim and fmt.group % 8:
        raise KernelError(f"group of packed {name} is {fmt.group} channels; allowed in this kernel: multiples of 8")


def _check_dense(name: str, x: Tensor) -> None:
    if x.dim() != 3 or 0 in x.shape or x.shape[2] > _MOST_CHANNELS:
        raise KernelError(
            f"{name} have shape {tuple(x.shape)}; allowed: (heads, tokens, channels), nothing empty, at most "
            f"{_MOST_CHANNELS} channels"
        )
    if x.dtype not in DENSE_KINDS:
        raise KernelError(f"{name} are {x.dtype}; allowed: torch.float32, torch.float16 or torch.bfloat16")


def _check_device(name: str, x: Tensor, query: Tensor) -> None:
    if x.device != query.device:
        raise KernelError(f"{name} are on {x.device}; allowed: {query.device}, where the other tensors are")


def _check_runs(x: Tensor) -> None:
    """A GPU runs compiled kernels; the interpreter runs on the CPU."""
    if x.device.type != ("cpu" if INTERPRETED else "cuda"):
        allowed = "cpu, since TRITON_INTERPRET is set" if INTERPRETED else "a GPU, or the CPU with TRITON_INTERPRET=1"
        raise KernelError(f"tensors are on {x.device}; allowed: {allowed}")


def _check_softcap(softcap: float | None) -> None:
    if softcap is not None and not 0 < softcap < float("inf"):
        raise KernelError(f"softcap is {softcap}; allowed: a number above 0, or None")


def _check_equal(what: str, found: int, other: str, allowed: int) -> None:
    if found != allowed:
        raise KernelError(f"{what}: {found}; allowed: {allowed}, {other}")


def _dim(x: Tensor | Packed) -> int:
    return x.shape[2] if isinstance(x, Tensor) else x.dim


def _length(x: Tensor | Packed) -> int:
    return x.shape[1] if isinstance(x, Tensor) else x.length
