"""Compile the Triton kernels ahead of time, without a GPU: `python -m kvtailor.kernels.compile_triton --arch 90`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtailor.formats import BITS, Packed, PackedFormat, default_group
from kvtailor.kernels.triton.attend import attend_launch
from kvtailor.kernels.triton.gather_rows import gather_rows_launch
from kvtailor.kernels.triton.launch import Launch
from kvtailor.kernels.triton.merge import merge_launch
from kvtailor.kernels.triton.numbers import INTERPRETED
from kvtailor.kernels.triton.operand import operand
from kvtailor.kernels.triton.pack import pack_launch, room
from kvtailor.kernels.triton.scores import scores_launch

ARCHITECTURES = (80, 90)
_SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448}
"""Bytes of shared memory that a program may use, by architecture."""

_HEADS, _TOKENS, _ROWS, _DIM = 2, 256, 4, 128
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Compiled:
    """What came of one kernel on one architecture; `failure` is empty where all is well."""

    launch: Launch
    arch: int
    binary_bytes: int
    shared_bytes: int
    products: int
    failure: str


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compile the kernel of a launch for NVIDIA GPUs of compute capability `arch` / 10."""
    signature, constants, attributes = _source(launch)
    try:
        source = ASTSource(launch.kernel, signature, constants, attributes)
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    except Exception as error:  # whatever the compiler raises is the answer
        return Compiled(launch, arch, 0, 0, 0, f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}")
    ptx, shared = kernel.asm["ptx"], kernel.metadata.shared
    products = ptx.count("mma.sync") + ptx.count("wgmma.mma_async")
    failure = ""
    if launch.dots and not products:
        failure = "no product reaches the tensor cores"
    if shared > _SHARED_LIMIT.get(arch, shared):
        failure = f"{shared} bytes of shared memory; allowed: {_SHARED_LIMIT[arch]}"
    return Compiled(launch, arch, len(kernel.asm["cubin"]), shared, products, failure)


def _source(launch: Launch) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Types, constants and alignments of the arguments, as a launch on a GPU would find them."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def describe(value: Any, path: tuple[int, ...], constant: bool, aligned: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(describe(part, (*path, i), constant, aligned) for i, part in enumerate(value))
        if constant or value is None:
            constants[path] = value
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        if aligned and isinstance(value, int) and value == 1:
            constants[path] = 1
            return "constexpr"
        if aligned and (isinstance(value, Tensor) or value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        return f"*{_TYPES[value.dtype]}" if isinstance(value, Tensor) else "i32"

    for number, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        aligned = not parameter.do_not_specialize
        signature[parameter.name] = describe(value, (number,), parameter.is_constexpr, aligned)
    return signature, constants, attributes


def launches() -> Iterator[Launch]:
    """Every kernel on every form of data that it is compiled for, and some head sizes."""
    yield from _attend_launches()
    forms: list[Tensor | Packed] = [*_packed_forms(_DIM), *_dense_forms(_DIM)]
    yield from (scores_launch(_query(_DIM), keys)[0] for keys in forms)
    for dim in (80, _DIM, 256):
        yield from (_gather_rows_launch(dim, keys.dtype) for keys in _dense_forms(dim))
        yield merge_launch(torch.empty(4, _HEADS, _ROWS, dim), torch.empty(4, _HEADS, _ROWS))[0]
        for bits in BITS if dim == _DIM else (3,):
            yield _pack_launch(PackedFormat(bits, "token", default_group(dim), "minmax", True), dim, torch.bfloat16)
            yield _pack_launch(PackedFormat(bits, "channel", 64, "minmax", False), dim, torch.float16)


def _attend_launches() -> Iterator[Launch]:
    for bits in BITS:
        by_token = _packed(bits, "token", _DIM)
        yield _attend_launch(by_token, by_token)
        yield _attend_launch(_packed(bits, "channel", _DIM), by_token)
        yield _attend_launch(_packed(bits, "channel", _DIM), _packed(bits, "channel", _DIM))
    for dense in _dense_forms(_DIM):
        yield _attend_launch(dense, dense)
        index = torch.zeros(_HEADS, 64, dtype=torch.int64)
        yield attend_launch(_query(_DIM), operand(dense), operand(dense), 1.0, index=index)[0]
    for bits, dim, rows in ((1, 80, _ROWS), (3, 80, _ROWS), (2, 256, 64), (8, 256, 64)):
        yield _attend_launch(_packed(bits, "token", dim), _packed(bits, "token", dim), rows)
    for dense in _dense_forms(256):
        yield _attend_launch(dense, dense)
    mixed = _packed(1, "token", _DIM)
    visible = torch.ones(1, _ROWS, _TOKENS, dtype=torch.bool)
    dense = torch.empty(_HEADS, _TOKENS, _DIM, dtype=torch.bfloat16)
    yield attend_launch(_query(_DIM), operand(mixed), operand(dense), 1.0, softcap=30.0, visible=visible)[0]


def _attend_launch(keys: Tensor | Packed, values: Tensor | Packed, rows: int = _ROWS) -> Launch:
    dim = keys.shape[2] if isinstance(keys, Tensor) else keys.dim
    return attend_launch(_query(dim, rows), operand(keys), operand(values), 1.0)[0]


def _gather_rows_launch(dim: int, dtype: torch.dtype) -> Launch:
    index, addresses = torch.zeros(_HEADS, 64, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    return gather_rows_launch(torch.empty(_TOKENS, _HEADS, 2 * dim, dtype=dtype), addresses, dim, index, index)[0]


def _pack_launch(fmt: PackedFormat, dim: int, dtype: torch.dtype) -> Launch:
    return pack_launch(torch.empty(_HEADS, _TOKENS, dim, dtype=dtype), fmt, torch.float16)[0]


def _query(dim: int, rows: int = _ROWS) -> Tensor:
    return torch.empty(_HEADS, rows, dim, dtype=torch.bfloat16)


def _packed_forms(dim: int) -> Iterator[Packed]:
    for bits in BITS:
        yield _packed(bits, "token", dim)
        yield _packed(bits, "channel", dim)


def _packed(bits: int, axis: Any, dim: int) -> Packed:
    fmt = PackedFormat(bits, axis, default_group(dim) if axis == "token" else 64, "minmax", False)
    return room(torch.empty(_HEADS, _TOKENS, dim), fmt, torch.float16)


def _dense_forms(dim: int) -> Iterator[Tensor]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield torch.empty(_HEADS, _TOKENS, dim, dtype=dtype)


def _row(done: Compiled) -> str:
    sizes = f"{done.binary_bytes:>9,} {done.shared_bytes:>9,} {done.products:>5}"
    return f"{done.launch.name:<58} {f'sm_{done.arch}':>5} {sizes}  {done.failure}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile all kernels, print a table and return an exit code: 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m kvtailor.kernels.compile_triton", description=__doc__)
    parser.add_argument("--arch", type=int, action="append", help="compute capability times ten; default: 80 and 90")
    parser.add_argument("--only", default="", help="compile kernels whose name holds this text; default: all")
    chosen = parser.parse_args(arguments)
    if INTERPRETED:
        print("TRITON_INTERPRET is set; allowed: unset, since interpreted kernels are not compiled", file=sys.stderr)
        return 2
    compiled = failed = 0
    print(f"{'kernel':<58} {'arch':>5} {'binary':>9} {'shared':>9} {'mma':>5}")
    for launch in launches():
        for arch in (chosen.arch or ARCHITECTURES) if chosen.only in launch.name else ():
            done = compile_launch(launch, arch)
            compiled += 1
            failed += bool(done.failure)
            print(_row(done), flush=True)
    if not compiled:
        print(f"--only is {chosen.only!r}; allowed: part of a name that this command prints", file=sys.stderr)
        return 2
    print(f"{failed} of {compiled} failed" if failed else f"all {compiled} compiled")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
