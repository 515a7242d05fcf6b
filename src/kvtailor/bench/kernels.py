"""Which kernels are timed: attention of one token over a layer, dense and packed, beside SDPA; and packing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from kvtailor.bench.kernel import BASE, SCALE, Kernel, dtype_name, rows_of
from kvtailor.bench.layer import DIM, GROUP, HEADS, Layer, row_of, whole_form
from kvtailor.bench.result import KernelRow
from kvtailor.bench.retrieval import retrieval
from kvtailor.bench.timing import Candidate, in_turns
from kvtailor.kernels import native
from kvtailor.layers.call import Call
from kvtailor.layers.row import Row
from kvtailor.plan import Form

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# (kind, bits, precision)
FORMS = (
    ("rotated", 8, "default"),
    ("rotated", 4, "default"),
    ("rotated", 3, "default"),
    ("rotated", 2, "default"),
    ("rotated", 1, "default"),
    ("rotated", 1, "fast"),
    ("channel", 1, "default"),
    ("channel", 1, "fast"),
)
PACKED = (("rotated", 8), ("rotated", 4), ("rotated", 3), ("rotated", 2), ("rotated", 1), ("channel", 1))
SWEPT_BYTES = 128 * 2**20
"""Most bytes that are read between two kernels."""

Progress = Callable[[str], None]


def measure_kernels(
    lengths: Sequence[int], threads: Sequence[int], dtype: torch.dtype, repeats: int, progress: Progress
) -> tuple[list[KernelRow], list[str]]:
    """Time all kernels at each length, in turns.

    Parameters
    ----------
    lengths : tokens of the caches. Other dtypes, masks, sinks and packing are timed at the first length alone.
    threads : numbers of threads.
    dtype : of queries and of what is not packed.
    repeats : rounds.
    progress : called with a few words before each group of measurements.

    Returns
    -------
    The rows, and a line for what could not be measured.
    """
    rows: list[KernelRow] = []
    for tokens in lengths:
        kernels = kernels_at(tokens, dtype, everything=tokens == lengths[0])
        for count in threads:
            progress(f"{tokens} tokens")
            timed = in_turns([kernel.candidate for kernel in kernels], repeats, count, sweep_of(kernels))
            rows += rows_of(kernels, timed, tokens)
    return rows, [] if path_for(dtype) else ["Retrieval is not measured: the reference kernels have none"]


def sweep_of(kernels: Sequence[Kernel]) -> Callable[[], Any]:
    """A read of other memory, so that no kernel finds its numbers in the processor's caches, as between two layers."""
    most = max(kernel.nbytes or 0 for kernel in kernels)
    other = torch.ones(min(SWEPT_BYTES, 4 * most) // 8, dtype=torch.int64)
    return other.sum


def path_for(dtype: torch.dtype) -> str | None:
    """The C++ kernels that are timed; None for the reference."""
    return native.path_for(torch.device("cpu"), dtype, (DIM, DIM))


def kernels_at(tokens: int, dtype: torch.dtype, everything: bool) -> list[Kernel]:
    """The kernels of one length.

    Parameters
    ----------
    tokens : the length.
    dtype : of queries and of what is not packed.
    everything : whether to take other dtypes, masks, sinks and packing too.
    """
    path = path_for(dtype)
    layer = Layer(tokens, path)
    kernels = [sdpa(layer, BASE, "grouped"), sdpa(layer, BASE, "enable_gqa")]
    dtypes = dict.fromkeys((dtype, *DTYPES)) if everything else [dtype]
    for one in dtypes:
        kernels += [sdpa(layer, one, "grouped")] if one != BASE else []
        kernels.append(dense(layer, one, path))
    for kind, bits, precision in FORMS:
        kernels += packed(layer, whole_form(kind, bits, precision), dtype, path, everything and bits == 4)
    kernels += retrieval(layer, dtype, path) if path else []
    if everything:
        kernels.append(sdpa(layer, BASE, "grouped", "mask"))
        kernels += [dense(layer, dtype, path, case) for case in cases(path)]
        kernels += [packing(layer, whole_form(kind, bits), dtype) for kind, bits in PACKED]
    return kernels


def cases(path: str | None) -> tuple[str, ...]:
    """What can be asked for besides; the reference gives no log-sum-exp on its own."""
    return ("mask", "sinks") if path is None else ("mask", "sinks", "lse")


def sdpa(layer: Layer, dtype: torch.dtype, form: str, case: str = "plain") -> Kernel:
    """PyTorch's attention.

    Parameters
    ----------
    layer, dtype : what is attended, and in which dtype.
    form : "grouped", its best form, has the query heads of a KV head as rows, (1, Hkv, G, D); "enable_gqa" is the call
        that Transformers makes.
    case : "plain" or "mask".
    """
    keys, values = layer.dense(dtype)
    key, value, query = keys[None], values[None], layer.query.to(dtype)
    mask = hiding_mask(layer.tokens) if case == "mask" else None
    options: dict[str, Any] = {"attn_mask": mask, "scale": SCALE}
    if form == "grouped":
        query = query.view(1, HEADS, GROUP, DIM)
    else:
        options["enable_gqa"] = True

    def call() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, **options)

    return Kernel("sdpa", form, dtype_name(dtype), case, keys.nbytes + values.nbytes, Candidate(call))


def dense(layer: Layer, dtype: torch.dtype, path: str | None, case: str = "plain") -> Kernel:
    """Our attention over dense keys and values."""
    keys, values = layer.dense(dtype)
    row = row_of(keys, values, layer.tokens, dtype)
    candidate = attention(row, layer, dtype, path, case)
    return Kernel("dense", "dense", dtype_name(dtype), case, keys.nbytes + values.nbytes, candidate)


def packed(layer: Layer, form: Form, dtype: torch.dtype, path: str | None, every_case: bool) -> list[Kernel]:
    """Our attention over codes, plain and, if asked for, in every case."""
    keys, values = layer.packed(form, dtype)
    row = row_of(keys, values, layer.tokens, dtype)
    precision = form.precision if path else "exact"
    if path is None and form.precision != "default":
        return []  # the reference knows no other precision than exact
    return [
        Kernel(
            f"int{form.bits}",
            form.kind,
            precision,
            case,
            keys.nbytes + values.nbytes,
            attention(row, layer, dtype, path, case, form),
        )
        for case in ("plain", *(cases(path) if every_case else ()))
    ]


def attention(
    row: Row, layer: Layer, dtype: torch.dtype, path: str | None, case: str, form: Form | None = None
) -> Candidate:
    """Attention of the layer's query over a row, by the C++ kernels of ``path`` or by the reference."""
    query = layer.query.to(dtype)
    asked = call_for(layer.tokens, case)
    if path is None:
        grouped, parts = query.view(HEADS, GROUP, 1, DIM), list(row.parts())
        return Candidate(lambda: row.attend(grouped, asked, 0, parts))
    out, rows = torch.empty_like(query), [row.handed()]
    lse = torch.empty(query.shape[:3]) if case == "lse" else None
    precision: native.Precision = "default" if form is None else form.precision

    def call() -> torch.Tensor:
        native.attend(path, rows, query, out, asked.weighing(), asked.sinks, lse, precision)
        return out

    return Candidate(call)


def call_for(tokens: int, case: str) -> Call:
    """One query at the end of ``tokens``, with a mask or sinks if the case asks for them."""
    mask = hiding_mask(tokens) if case == "mask" else None
    sinks = torch.zeros(HEADS * GROUP) if case == "sinks" else None
    return Call(SCALE, None, sinks, None, mask, None, causal=True, first=tokens - 1)


def hiding_mask(tokens: int) -> torch.Tensor:
    """A mask (1, 1, 1, tokens) that hides the first eighth, as padding does."""
    mask = torch.ones(1, 1, 1, tokens, dtype=torch.bool)
    mask[..., : tokens // 8] = False
    return mask


def packing(layer: Layer, form: Form, dtype: torch.dtype) -> Kernel:
    """Packing of the layer's random tokens, keys and values, as a cache does it."""
    packs, held = layer.packing(form), layer.unpacked_row(dtype)
    nbytes = sum(part.nbytes for part in (held.tail.keys, held.tail.values))
    rows: list[Row] = []

    @contextmanager
    def unpacked() -> Iterator[None]:
        rows[:] = [layer.unpacked_row(dtype)]
        yield

    candidate = Candidate(lambda: packs.seal(rows[0]), unpacked)
    return Kernel("pack", f"{form.kind} {form.bits}-bit", dtype_name(dtype), "plain", nbytes, candidate, "packing")
