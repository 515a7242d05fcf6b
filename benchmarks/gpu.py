"""Triton kernels on a GPU: checked against double precision, then timed beside PyTorch's attention and a plain read.

    python benchmarks/gpu.py --out out/gpu.json

One layer of Llama 3.1 8B (32 query heads, 8 heads of keys and values of 128 channels) decodes one token. Each time is
the median of replays of a CUDA graph that works through copies of the data, more of them than the L2 cache holds.

Last, tokens that each query head chose are brought from host memory, by the kernel that reads page-locked memory and by
gathering on the CPU and copying. These times are by the clock on the wall, from a GPU at rest to a GPU at rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvtailor.formats import Packed, PackedFormat
from kvtailor.kernels import reference
from kvtailor.layers.pinned import PinnedPool
from kvtailor.quantize.pack import pack as pack_in_torch

HEADS, GROUP, DIM = 8, 4, 128
SCALE = DIM**-0.5
TOKENS = (32768, 131072)
BITS = (8, 4, 3, 2, 1)
CHECKED_TOKENS, CHOSEN = 4096 + 128, 512
CACHE_BYTES = 256 * 2**20
REPLAYS = 15
ALLOWED = {"attend": 1e-3, "scores": 1e-4, "gather": 1e-3, "merge": 1e-5, "pack": 1e-5, "rows": 0.0}
"""Greatest error of each kernel, of the largest number of its result; of packing, beyond that of packing in PyTorch."""

KIVI, ROTATED = "per channel / per token", "rotated, per token"


@dataclass(frozen=True)
class Check:
    kernel: str
    form: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class Time:
    """Milliseconds of one call; `read_bytes` are those of the keys and values that it has to read."""

    kernel: str
    form: str
    tokens: int
    ms: float
    read_bytes: int

    @property
    def gb_per_s(self) -> float:
        return self.read_bytes / self.ms / 1e6


def forms(bits: int) -> dict[str, tuple[PackedFormat, PackedFormat]]:
    """Formats of keys and of values by the name of their form."""
    by_token = PackedFormat(bits, "token", 64, "minmax", False)
    by_channel = PackedFormat(bits, "channel", 64, "minmax", False)
    rotated = replace(by_token, rotated=True)
    return {KIVI: (by_channel, by_token), ROTATED: (rotated, rotated)}


def random(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return (query.double() @ keys.double().mT * SCALE).softmax(-1) @ values.double()


def checks(device: str, tokens: int = CHECKED_TOKENS) -> Iterator[Check]:
    """Errors of every kernel on every form of data."""
    from kvtailor.kernels import triton as kernels

    query = random(HEADS, GROUP, DIM, device=device).float()
    keys = random(HEADS, tokens, DIM, device=device) * torch.randn(DIM, device=device).exp().bfloat16()
    values = random(HEADS, tokens, DIM, device=device) + 1
    for bits in BITS:
        for form, (key_format, value_format) in forms(bits).items():
            name = f"{bits} bit {form}"
            yield Check("pack", name, packing_error(kernels.pack(keys, key_format), keys), ALLOWED["pack"])
            packed, packed_values = pack_in_torch(keys, key_format), pack_in_torch(values, value_format)
            stored, stored_values = reference.dequantise(packed), reference.dequantise(packed_values)
            found = kernels.scores(query, packed)
            yield Check("scores", name, error(found, query.double() @ stored.double().mT), ALLOWED["scores"])
            found = kernels.attend(query, packed, packed_values, SCALE)[0]
            yield Check("attend", name, error(found, attention(query, stored, stored_values)), ALLOWED["attend"])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        dense, dense_values = keys.to(dtype), values.to(dtype)
        found = kernels.attend(query, dense, dense_values, SCALE)[0]
        yield Check("attend", name, error(found, attention(query, dense, dense_values)), ALLOWED["attend"])
        index = torch.randint(0, tokens, (HEADS, CHOSEN), device=device)
        rows = index.unsqueeze(-1).expand(-1, -1, DIM)
        exact = attention(query, dense.gather(1, rows), dense_values.gather(1, rows))
        found = kernels.gather_attend(query, dense, dense_values, index, SCALE)[0]
        yield Check("gather", name, error(found, exact), ALLOWED["gather"])
    outs, lses = torch.randn(9, HEADS, GROUP, DIM, device=device), torch.randn(9, HEADS, GROUP, device=device)
    exact = (lses.double().softmax(0).unsqueeze(-1) * outs.double()).sum(0)
    yield Check("merge", "float32", error(kernels.merge(outs, lses)[0], exact), ALLOWED["merge"])


def row_checks(device: str, tokens: int = CHECKED_TOKENS) -> Iterator[Check]:
    """Errors of the kernel that reads rows from host memory: it copies, so there is none."""
    index = torch.randint(0, tokens, (HEADS * GROUP, CHOSEN), device=device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows = torch.randn(tokens, HEADS, 2 * DIM).to(dtype)
        found = torch.cat(by_kernel(in_chunks(rows, device), index), dim=-1)
        exact = by_cpu(rows, index).double()
        yield Check("rows", str(dtype).removeprefix("torch."), error(found, exact), ALLOWED["rows"])


def in_chunks(rows: Tensor, device: str) -> PinnedPool:
    """Rows (tokens, HEADS, 2 * DIM) in host memory that the device reads."""
    pool = PinnedPool(HEADS, 2 * DIM, rows.dtype, torch.device(device))
    pool.append(rows)
    return pool


def heads_of(index: Tensor) -> Tensor:
    """The KV head of each set of tokens, as often as the set has tokens."""
    return torch.arange(HEADS, device=index.device).repeat_interleave(GROUP)[:, None].expand_as(index)


def by_kernel(pool: PinnedPool, index: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of chosen tokens, read by the GPU where they lie."""
    from kvtailor.kernels.triton.gather_rows import gather_rows

    return gather_rows(pool.chunks, pool.addresses, DIM, heads_of(index), index, check_index=False)


def by_cpu(rows: Tensor, index: Tensor) -> Tensor:
    """The same, gathered by the CPU into page-locked memory, side by side, and copied."""
    numbers = (index * HEADS + heads_of(index)).cpu().flatten()
    staged = torch.empty(len(numbers), 2 * DIM, dtype=rows.dtype, pin_memory=index.is_cuda)
    torch.index_select(rows.view(-1, 2 * DIM), 0, numbers, out=staged)
    return staged.to(index.device, non_blocking=True).view(*index.shape, -1)


def row_times(tokens: int, device: str, timer: Callable[[Callable[[], Any]], float]) -> Iterator[Time]:
    """Times of bringing chosen tokens from host memory."""
    rows = torch.empty(tokens, HEADS, 2 * DIM, dtype=torch.bfloat16).normal_()
    pool = in_chunks(rows, device)
    index = torch.randint(0, tokens, (HEADS * GROUP, CHOSEN), device=device)
    read_bytes = index.numel() * 2 * DIM * rows.itemsize
    form = f"bf16, {HEADS * GROUP} x {CHOSEN} rows"
    yield Time("host kernel", form, tokens, timer(lambda: by_kernel(pool, index)), read_bytes)
    yield Time("host copy", form, tokens, timer(lambda: by_cpu(rows, index)), read_bytes)


def wall_milliseconds(call: Callable[[], Any]) -> float:
    """Time of a call by the clock on the wall, the GPU being at rest before and after."""
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def packing_error(found: Packed, x: Tensor) -> float:
    """How much farther from x the codes are than those of packing in PyTorch, at most, of the largest number."""
    from kvtailor.quantize.hadamard import rotate

    stored = rotate(x) if found.format.rotated else x.float()
    own, best = (reference.dequantise(codes) for codes in (found, pack_in_torch(x, found.format)))
    return float(((own - stored).abs() - (best - stored).abs()).max() / stored.abs().max())


def milliseconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Time of one of the calls, which a CUDA graph makes one after another."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / len(calls))
    return statistics.median(times[2:])


def copies(tensors: Sequence[Any], read_bytes: int) -> list[Sequence[Any]]:
    """The tensors and as many copies as exceed the L2 cache together."""
    return [tensors, *([clone(x) for x in tensors] for _ in range(-(-CACHE_BYTES // read_bytes) - 1))]


def clone(x: Tensor | Packed) -> Tensor | Packed:
    if isinstance(x, Tensor):
        return x.clone()
    return replace(x, planes=tuple(p.clone() for p in x.planes), scale=x.scale.clone(), zero=x.zero.clone())


def times(tokens: int, device: str, timer: Callable[[Sequence[Callable[[], Any]]], float]) -> Iterator[Time]:
    """Times of every kernel at one length."""
    from kvtailor.kernels import triton as kernels

    query = random(HEADS, GROUP, DIM, device=device)
    keys, values = (random(HEADS, tokens, DIM, device=device) for _ in range(2))
    dense_bytes = 2 * keys.nbytes
    dense = copies((keys, values), dense_bytes)

    def timed(kernel: str, form: str, read_bytes: int, calls: list[Callable[[], Any]]) -> Time:
        return Time(kernel, form, tokens, timer(calls), read_bytes)

    yield timed("plain read", "bf16", dense_bytes, [lambda k=k, v=v: (plain_read(k), plain_read(v)) for k, v in dense])
    for form, sdpa in SDPA.items():
        yield timed("SDPA", form, dense_bytes, [lambda k=k, v=v, sdpa=sdpa: sdpa(query, k, v) for k, v in dense])
    yield timed("attend", "bf16", dense_bytes, [lambda k=k, v=v: kernels.attend(query, k, v, SCALE) for k, v in dense])
    yield timed("scores", "bf16", keys.nbytes, [lambda k=k: kernels.scores(query, k) for k, _ in dense])
    index = torch.randint(0, tokens, (HEADS, CHOSEN), device=device)
    gathered = [lambda k=k, v=v: kernels.gather_attend(query, k, v, index, SCALE, check_index=False) for k, v in dense]
    yield timed("gather", f"bf16, {CHOSEN} rows", 4 * HEADS * CHOSEN * DIM, gathered)
    for bits in BITS:
        for form, (key_format, value_format) in forms(bits).items():
            packing = [lambda k=k, fmt=key_format: kernels.pack(k, fmt, torch.float16) for k, _ in dense]
            yield timed("pack", f"{bits} bit {form}", keys.nbytes, packing)
            packed = kernels.pack(keys, key_format, torch.float16), kernels.pack(values, value_format, torch.float16)
            read_bytes = sum(x.nbytes for x in packed)
            many = copies(packed, read_bytes)
            attending = [lambda k=k, v=v: kernels.attend(query, k, v, SCALE) for k, v in many]
            yield timed("attend", f"{bits} bit {form}", read_bytes, attending)
            scoring = [lambda k=k: kernels.scores(query, k) for k, _ in many]
            yield timed("scores", f"{bits} bit {form}", packed[0].nbytes, scoring)


def plain_read(x: Tensor) -> Tensor:
    """A reduction that reads every byte once."""
    return x.view(torch.int32).amax()


def grouped(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The queries that share a head of keys as rows of one matrix."""
    return functional.scaled_dot_product_attention(query[None], keys[None], values[None], scale=SCALE)


def repeated(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The usual call: one row per query head."""
    rows = query.reshape(1, HEADS * GROUP, 1, DIM)
    return functional.scaled_dot_product_attention(rows, keys[None], values[None], scale=SCALE, enable_gqa=True)


SDPA = {"bf16, grouped": grouped, "bf16, enable_gqa": repeated}


def print_times(found: Sequence[Time]) -> None:
    print(f"\n{'kernel':<11} {'form':<32} {'tokens':>7} {'ms':>9} {'GB/s':>7} {'vs SDPA':>8} {'vs read':>8}")
    for row in found:
        same = [other for other in found if other.tokens == row.tokens]
        best = min(other.ms for other in same if other.kernel == "SDPA")
        read = next(other.ms for other in same if other.kernel == "plain read")
        ratios = f"{best / row.ms:>7.2f}x {read / row.ms:>7.2f}x" if row.kernel in ("attend", "SDPA") else ""
        line = f"{row.kernel:<11} {row.form:<32} {row.tokens:>7} {row.ms:>9.4f} {row.gb_per_s:>7.0f} {ratios}"
        print(line.rstrip())


def print_checks(found: Sequence[Check]) -> None:
    print(f"{'kernel':<8} {'form':<32} {'error':>9} {'allowed':>9}")
    for row in found:
        print(f"{row.kernel:<8} {row.form:<32} {row.error:>9.1e} {row.allowed:>9.0e}{'' if row.passed else '  FAILED'}")


def obstacle() -> str | None:
    """Why the benchmark cannot run here, or None."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed; allowed: pip install 'kvtailor[gpu]'"
    return None if torch.cuda.is_available() else "no GPU is available to torch; allowed: a CUDA GPU"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and time; exit code 1 if a kernel is wrong, 2 if nothing can run here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/gpu.json"), help="JSON file; default: out/gpu.json")
    parser.add_argument("--tokens", type=int, action="append", help="tokens of the cache; default: 32768 and 131072")
    chosen = parser.parse_args(arguments)
    missing = obstacle()
    if missing is not None:
        print(missing, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    with torch.no_grad():
        checked = [*checks("cuda"), *row_checks("cuda")]
        print_checks(checked)
        timed = [row for tokens in chosen.tokens or TOKENS for row in times(tokens, "cuda", milliseconds)]
        timed += [row for tokens in chosen.tokens or TOKENS for row in row_times(tokens, "cuda", wall_milliseconds)]
    print_times(timed)
    import triton

    report = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shape": {"query_heads": HEADS * GROUP, "kv_heads": HEADS, "dim": DIM},
        "checks": [asdict(row) for row in checked],
        "times": [asdict(row) for row in timed],
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{report['device']}: written to {chosen.out}")
    return 0 if all(row.passed for row in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
