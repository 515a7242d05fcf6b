"""Keys and values as arguments of a kernel, and what the kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.formats import Packed, plane_bits
from kvtailor.kernels.triton.launch import padded


@dataclass(frozen=True)
class Layout:
    """What a kernel is compiled for.

    Parameters
    ----------
    kind : "fp16", "bf16" and "fp32" where dense, "token" or "channel" (axis of the scales).
    bits : per code; 0 where dense.
    planes : of a code.
    low_bits, high_bits : widths of the planes; the second is 0 where there is none.
    chunks : parts of a head that have a scale of their own within a token; 1 where dense or per channel.
    width, block : channels of a chunk, and the power of two that holds them.
    group : tokens that share a scale.
    dim : channels of a head.
    """

    kind: str
    bits: int
    planes: int
    low_bits: int
    high_bits: int
    chunks: int
    width: int
    block: int
    group: int
    dim: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a tile reads per token, codes or dense numbers alone."""
        if self.bits:
            return -(-self.dim * self.bits // 8)
        return self.dim * (4 if self.kind == "fp32" else 2)

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.kind} {self.bits} bit D={self.dim}" if self.bits else f"{self.kind} D={self.dim}"


@dataclass(frozen=True)
class Operand:
    """Keys or values of H heads and n tokens, as arguments of a kernel.

    Parameters
    ----------
    tensors : dense numbers or the first plane, second plane, scale, zero; None where there is none.
    strides : three of each of them, in elements; 0 where there is none.
    layout : what the kernel is compiled for.
    """

    tensors: tuple[Tensor | None, ...]
    strides: tuple[int, ...]
    layout: Layout


DENSE_KINDS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def operand(x: Tensor | Packed) -> Operand:
    """Describe keys or values that `kvtailor.kernels.triton.check` has passed."""
    if isinstance(x, Tensor):
        layout = Layout(DENSE_KINDS[x.dtype], 0, 1, 0, 0, 1, x.shape[2], padded(x.shape[2]), 1, x.shape[2])
        return _operand((x, None, None, None), layout)
    fmt = x.format
    low_bits, high_bits = (*plane_bits(fmt.bits), 0)[:2]
    by_token = fmt.axis == "token"
    width = fmt.group if by_token else x.dim
    layout = Layout(
        kind=fmt.axis,
        bits=fmt.bits,
        planes=len(x.planes),
        low_bits=low_bits,
        high_bits=high_bits,
        chunks=x.dim // width,
        width=width,
        block=padded(width),
        group=1 if by_token else fmt.group,
        dim=x.dim,
    )
    return _operand((*x.planes, *(None,) * (2 - len(x.planes)), x.scale, x.zero), layout)


def _operand(tensors: tuple[Tensor | None, ...], layout: Layout) -> Operand:
    strides = (stride for tensor in tensors for stride in ((0, 0, 0) if tensor is None else tensor.stride()))
    return Operand(tensors, tuple(strides), layout)
