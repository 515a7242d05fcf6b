# mypy: allow-untyped-defs
"""Keys and values of chosen tokens, read by the GPU where they lie in host memory.

What a GPU has to know is the address at which it reaches host memory. For page-locked memory that is the address which
the host uses: memory from `cudaHostAlloc` has one address for both (cuda.h, unified addressing, which 64-bit processes
always have), and PyTorch's allocator refuses memory that it locked by `cudaHostRegister` if its two addresses differ.
So the addresses of chunks go to the kernel as numbers, in a tensor on the GPU, and a chunk more is a number more.

Triton 3.9 would take a page-locked tensor itself as well, though it lies on the CPU. Its launcher (driver.c of the
NVIDIA backend, `extractPointer`) looks at no device: it asks the driver for CU_POINTER_ATTRIBUTE_DEVICE_POINTER of
`data_ptr()`, passes on what it gets, and says "cannot be accessed from Triton (cpu tensor?)" where the driver knows of
none, as for ordinary memory. But a kernel takes as many tensors as it has parameters, and chunks grow in number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtailor.errors import KernelError
from kvtailor.kernels.triton.launch import Launch, padded
from kvtailor.kernels.triton.numbers import INTERPRETED
from kvtailor.kernels.triton.operand import DENSE_KINDS

# Rows of a program: 16 bytes of keys for each of its 128 threads at 128 channels of 16 bits.
_ROWS = 8


def gather_rows(
    chunks: Sequence[Tensor],
    addresses: Tensor,
    key_dim: int,
    heads: Tensor,
    tokens: Tensor,
    check_index: bool = True,
) -> tuple[Tensor, Tensor]:
    """Keys and values of pairs of a head and a token, on the device.

    Parameters
    ----------
    chunks : host memory, page-locked where the device is a GPU: each (n, Hkv, Dk + Dv) contiguous fp32, fp16 or bf16,
        the same n tokens in each, keys and values of a token and head side by side.
    addresses : int64 (chunks,) on the device: where each of them begins.
    key_dim : Dk.
    heads, tokens : int64 (...) on the device; tokens are counted through all chunks.
    check_index : refuse pairs out of range, for which the GPU has to be waited for, and memory that is not page-locked;
        without it they are not noticed.

    Returns
    -------
    (..., Dk) and (..., Dv).

    Raises
    ------
    KernelError : arguments of a shape, dtype or device that the kernel does not serve, or a pair out of range.
    """
    _check(chunks, addresses, key_dim, heads, tokens)
    if check_index:
        _check_reach(chunks, heads, tokens)
    launch, keys, values = gather_rows_launch(chunks[0], addresses, key_dim, heads, tokens)
    launch.run()
    return keys.view(*tokens.shape, -1), values.view(*tokens.shape, -1)


def gather_rows_launch(
    chunk: Tensor, addresses: Tensor, key_dim: int, heads: Tensor, tokens: Tensor
) -> tuple[Launch, Tensor, Tensor]:
    """Prepare the launch for chunks like `chunk`, with room for its results, (pairs, D)."""
    heads, tokens = heads.reshape(-1), tokens.reshape(-1)
    value_dim = chunk.shape[2] - key_dim
    keys, values = (
        torch.empty(len(tokens), dim, dtype=chunk.dtype, device=tokens.device) for dim in (key_dim, value_dim)
    )
    arguments = {
        "addresses": addresses,
        "heads": heads,
        "head_stride": heads.stride(0),
        "tokens": tokens,
        "token_stride": tokens.stride(0),
        "keys": keys,
        "values": values,
        "pairs": len(tokens),
        "CHUNK": chunk.shape[0],
        "HEADS": chunk.shape[1],
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_BLOCK": padded(key_dim),
        "VALUE_BLOCK": padded(value_dim),
        "ALIGNED": math.gcd(16, chunk.shape[2] * chunk.itemsize),
        "ROWS": _ROWS,
    }
    launch = Launch(
        name=f"gather rows {DENSE_KINDS[chunk.dtype]} D={key_dim}",
        kernel=_gather_rows,
        grid=(-(-len(tokens) // _ROWS), 1, 1),
        arguments=arguments,
        device=tokens.device,
        dots=False,
    )
    return launch, keys, values


def _check(chunks: Sequence[Tensor], addresses: Tensor, key_dim: int, heads: Tensor, tokens: Tensor) -> None:
    if not chunks or addresses.shape != (len(chunks),) or addresses.dtype != torch.int64:
        raise KernelError(
            f"addresses are {addresses.dtype} of shape {tuple(addresses.shape)}; allowed: torch.int64, one for each of "
            f"{len(chunks)} chunks, 1 or more"
        )
    shape, dtype = tuple(chunks[0].shape), chunks[0].dtype
    if len(shape) != 3 or 0 in shape or dtype not in DENSE_KINDS or not 0 < key_dim < shape[2]:
        raise KernelError(
            f"chunks are {dtype} of shape {shape} with {key_dim} channels of keys; allowed: torch.float32, "
            "torch.float16 or torch.bfloat16, (tokens, heads, channels of keys and values), nothing empty"
        )
    for name, index in (("heads", heads), ("tokens", tokens)):
        if index.dtype != torch.int64 or index.shape != tokens.shape or not index.numel():
            raise KernelError(
                f"{name} are {index.dtype} of shape {tuple(index.shape)}; allowed: torch.int64, as many heads as "
                "tokens, 1 or more"
            )
    allowed = "cpu" if INTERPRETED else "cuda"
    devices = [tensor.device for tensor in (addresses, heads, tokens)]
    if len(set(devices)) > 1 or devices[0].type != allowed:
        where = ", ".join(map(str, devices))
        raise KernelError(f"addresses, heads and tokens are on {where}; allowed: one device of type {allowed}")


def _check_reach(chunks: Sequence[Tensor], heads: Tensor, tokens: Tensor) -> None:
    limits = {"heads": (heads, chunks[0].shape[1]), "tokens": (tokens, len(chunks) * chunks[0].shape[0])}
    for name, (index, limit) in limits.items():
        least, most = (int(bound) for bound in index.aminmax())
        if least < 0 or most >= limit:
            raise KernelError(f"{name} are {least} to {most}; allowed: 0 to {limit - 1}")
    for number, chunk in enumerate(chunks):
        if chunk.shape != chunks[0].shape or chunk.dtype != chunks[0].dtype or not chunk.is_contiguous():
            raise KernelError(
                f"chunk {number} is {chunk.dtype} of shape {tuple(chunk.shape)} and strides {chunk.stride()}; allowed: "
                f"contiguous {chunks[0].dtype} of shape {tuple(chunks[0].shape)}, as the first"
            )
        if chunk.device.type != "cpu" or not (INTERPRETED or chunk.is_pinned()):
            raise KernelError(f"chunk {number} is ordinary memory on {chunk.device}; allowed: page-locked host memory")


@triton.jit(do_not_specialize=["pairs"])
def _gather_rows(
    addresses,
    heads,
    head_stride,
    tokens,
    token_stride,
    keys,
    values,
    pairs,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (pairs): both parts of a row are on their way before either is written."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = pair < pairs
    head = tl.load(heads + pair * head_stride, mask=inside, other=0)
    token = tl.load(tokens + pair * token_stride, mask=inside, other=0)
    address = tl.load(addresses + token // CHUNK, mask=inside, other=0)
    start = address.to(tl.pointer_type(keys.dtype.element_ty))
    # Without the hint a row whose address was loaded is read number by number.
    row = tl.multiple_of(start + (token % CHUNK * HEADS + head) * (KEY_DIM + VALUE_DIM), [ALIGNED])
    key_channel, value_channel = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    of_keys = inside[:, None] & (key_channel < KEY_DIM)[None, :]
    of_values = inside[:, None] & (value_channel < VALUE_DIM)[None, :]
    key = tl.load(row[:, None] + key_channel[None, :], mask=of_keys)
    value = tl.load(row[:, None] + (KEY_DIM + value_channel)[None, :], mask=of_values)
    tl.store(keys + pair[:, None] * KEY_DIM + key_channel[None, :], key, mask=of_keys)
    tl.store(values + pair[:, None] * VALUE_DIM + value_channel[None, :], value, mask=of_values)
