"""The Triton kernels equal double precision on the dequantised numbers.

They are not part of the suite that runs everywhere:

    pip install 'kvtailor[gpu]' && TRITON_INTERPRET=1 pytest tests/gpu

runs them on the CPU, in Triton's interpreter; without the variable they run on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtailor.arranged import arrange
from kvtailor.errors import KVTailorError
from kvtailor.formats import Packed, PackedFormat, default_group
from kvtailor.kernels import reference
from kvtailor.kernels import triton as kernels
from kvtailor.kernels.triton import launch
from kvtailor.quantize.hadamard import rotate
from kvtailor.quantize.pack import pack

# The interpreter computes with NumPy, which warns where 0 and infinity are the right results of a row that sees nothing.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
PROPERTY = settings(max_examples=6, deadline=None)
EXACT, HALF = 1e-4, 1e-3
"""Of the largest number: queries as two fp16 numbers, and probabilities as one."""

bits = st.sampled_from((1, 2, 3, 4, 8))
axes = st.sampled_from(("token", "channel"))
dims = st.sampled_from((64, 80, 96, 128, 256))
dtypes = st.sampled_from((torch.float32, torch.float16, torch.bfloat16))
lengths = st.integers(1, 150)
rows = st.sampled_from((1, 3, 4, 7, 17))
seeds = st.integers(0, 999)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def packed_tokens(seed: int, bits: int, axis: Any, heads: int, length: int, dim: int, bias: float = 0.5) -> Packed:
    """Tokens with some channels much larger than others; on the channel axis a last group may be cut."""
    group = default_group(dim) if axis == "token" else 32 << seed % 2
    x = random(seed, heads, -(-length // 64) * 64, dim) * random(seed + 1, dim).exp() + bias
    return pack(x, PackedFormat(bits, axis, group, "minmax", False)).narrow(length)


def dense(x: Tensor | Packed) -> Tensor:
    return (x if isinstance(x, Tensor) else reference.dequantise(x)).double()


def exact(
    query: Tensor, keys: Tensor | Packed, values: Tensor | Packed, scale: float, softcap: float | None, visible: Any
) -> tuple[Tensor, Tensor]:
    logits = query.double() @ dense(keys).mT * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    probs, lse = reference.softmax(logits)
    return probs @ dense(values), lse


def assert_close(result: Tensor, expected: Tensor, tolerance: float) -> None:
    assert result.dtype == torch.float32 and result.shape == expected.shape
    assert float((result.double() - expected).abs().max()) <= tolerance * float(expected.abs().max())


def assert_attention(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert_close(found[0], expected[0], HALF)
    sees = expected[1] > -torch.inf
    assert torch.equal(found[1] > -torch.inf, sees)
    assert torch.allclose(found[1][sees].double(), expected[1][sees], rtol=EXACT, atol=EXACT)


@PROPERTY
@given(seed=seeds, bits=bits, axis=axes, dim=dims, length=lengths, rows=rows)
def test_scores_on_codes(seed, bits, axis, dim, length, rows):
    keys, query = packed_tokens(seed, bits, axis, 2, length, dim), random(seed + 2, 2, rows, dim)
    assert_close(kernels.scores(query, keys), query.double() @ dense(keys).mT, EXACT)


@PROPERTY
@given(seed=seeds, dtype=dtypes, query_dtype=dtypes, dim=dims, length=lengths, rows=rows)
def test_scores_of_dense_keys(seed, dtype, query_dtype, dim, length, rows):
    keys, query = random(seed, 2, length, dim).to(dtype), random(seed + 2, 2, rows, dim).to(query_dtype)
    assert_close(kernels.scores(query, keys), query.double() @ dense(keys).mT, EXACT)


@settings(max_examples=10, deadline=None)
@given(seed=seeds, bits=bits, axis=axes, value_bits=bits, value_axis=axes, dim=dims, length=lengths, rows=rows)
def test_attention_on_codes(seed, bits, axis, value_bits, value_axis, dim, length, rows):
    keys = packed_tokens(seed, bits, axis, 2, length, dim)
    values = packed_tokens(seed + 3, value_bits, value_axis, 2, length, dim)
    query = random(seed + 2, 2, rows, dim)
    found = kernels.attend(query, keys, values, dim**-0.5, splits=1 + seed % 3)
    assert_attention(found, exact(query, keys, values, dim**-0.5, None, None))


@PROPERTY
@given(seed=seeds, dtype=dtypes, value_dtype=dtypes, dim=dims, value_dim=dims, length=lengths, rows=rows)
def test_attention_over_dense_numbers(seed, dtype, value_dtype, dim, value_dim, length, rows):
    keys, values = random(seed, 2, length, dim).to(dtype), random(seed + 1, 2, length, value_dim).to(value_dtype)
    query = random(seed + 2, 2, rows, dim)
    found = kernels.attend(query, keys, values, dim**-0.5, splits=1 + seed % 3)
    assert_attention(found, exact(query, keys, values, dim**-0.5, None, None))


@PROPERTY
@given(
    seed=seeds,
    bits=bits,
    axis=axes,
    length=lengths,
    rows=rows,
    shared=st.booleans(),
    cap=st.sampled_from((None, 0.5, 20.0)),
)
def test_attention_where_not_all_is_visible(seed, bits, axis, length, rows, shared, cap):
    """Codes as keys, dense values; the first query sees nothing."""
    keys, values = packed_tokens(seed, bits, axis, 2, length, 64), random(seed, 2, length, 64).bfloat16()
    visible = random(seed + 4, 1 if shared else 2, rows, length) > 0.3
    visible[:, 0] = False
    query = random(seed + 2, 2, rows, 64)
    found = kernels.attend(query, keys, values, 0.3, cap, visible, splits=2)
    expected = exact(query, keys, values, 0.3, cap, visible)
    assert not found[0][:, 0].any() and bool((found[1][:, 0] == -torch.inf).all())
    if rows > 1:
        assert_attention(found, expected)


@PROPERTY
@given(seed=seeds, dtype=dtypes, dim=dims, length=lengths, rows=rows, chosen=st.integers(1, 80), each=st.booleans())
def test_attention_over_chosen_rows(seed, dtype, dim, length, rows, chosen, each):
    """Rows for all queries of a head, or for each; one may be named twice."""
    keys, values = random(seed, 2, length, dim).to(dtype), random(seed + 1, 2, length, dim).to(dtype)
    query = random(seed + 2, 2, rows, dim)
    shape = (2, rows, chosen) if each else (2, chosen)
    index = torch.randint(0, length, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    found = kernels.gather_attend(query, keys, values, index.int() if seed % 2 else index, dim**-0.5)
    rows_of_each = index if each else index.unsqueeze(1).expand(2, rows, chosen)
    expected = [
        exact(query[h, m][None, None], keys[h, own][None], values[h, own][None], dim**-0.5, None, None)
        for h in range(2)
        for m, own in enumerate(rows_of_each[h])
    ]
    out, lse = (torch.cat(parts).view(2, rows, *parts[0].shape[2:]) for parts in zip(*expected, strict=True))
    assert_attention(found, (out, lse))


@PROPERTY
@given(seed=seeds, dim=dims, parts=st.integers(1, 40), rows=rows)
def test_parts_are_merged_by_their_log_sum_exp(seed, dim, parts, rows):
    """A part may have seen nothing; the first query saw nothing in any part."""
    outs, lses = random(seed, parts, 2, rows, dim), 5 * random(seed + 1, parts, 2, rows)
    lses[random(seed + 2, *lses.shape) > 1] = -torch.inf
    lses[:, :, 0] = -torch.inf
    out, lse = kernels.merge(outs, lses)
    shares, whole = reference.softmax(lses.double().movedim(0, -1))
    expected = (shares.unsqueeze(-1) * outs.double().movedim(0, -2)).sum(-2)
    assert torch.allclose(out.double(), expected, atol=1e-5)
    assert torch.allclose(lse.double(), whole, atol=1e-5)


@settings(max_examples=16, deadline=None)
@given(
    seed=seeds, bits=bits, axis=axes, dim=dims, dtype=dtypes, rotated=st.booleans(), length=lengths, half=st.booleans()
)
def test_packing_gives_the_codes_of_the_packing_in_plain_torch(seed, bits, axis, dim, dtype, rotated, length, half):
    """Scales and zeros equal; codes differ by one at most, and only between two that are as near."""
    group = default_group(dim) >> seed % 2 if axis == "token" else 32
    fmt = PackedFormat(bits, axis, group, "minmax", rotated)
    length = length if axis == "token" else -(-length // 32) * 32
    x = (random(seed, 2, length, dim) + random(seed + 1, dim)).to(dtype)
    x[0, 0] = 0.25
    scale_dtype = torch.float16 if half else torch.bfloat16
    found, expected = kernels.pack(x, fmt, scale_dtype), pack(x, fmt, scale_dtype=scale_dtype)
    assert found.format == expected.format and found.dim == expected.dim
    assert torch.equal(found.scale, expected.scale) and torch.equal(found.zero, expected.zero)
    mine, theirs = reference.dequantise(found), reference.dequantise(expected)
    stored = rotate(x) if rotated else x.float()
    assert torch.equal((mine - stored).abs() > (theirs - stored).abs() * (1 + 1e-5) + 1e-6, torch.zeros_like(x) > 0)
    last = expected.planes[0].shape[-1] * 8 - dim * min(bits, 2 if bits == 3 else bits)
    assert last == 0 or not (found.planes[0][..., -1] >> (8 - last)).any()


@pytest.mark.parametrize("peak", [1.0, 70000.0])
def test_numbers_beyond_half_precision_get_scales_in_bfloat16(peak):
    x = random(1, 1, 64, 64)
    x[0, 3, 5] = peak
    fmt = PackedFormat(4, "token", 64, "minmax", False)
    found, expected = kernels.pack(x, fmt), pack(x, fmt)
    assert found.scale.dtype == expected.scale.dtype
    assert all(torch.equal(mine, own) for mine, own in zip(found.tensors(), expected.tensors(), strict=True))


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_numbers_of_any_size_are_read(axis, size):
    """Whatever fp16 operands cannot hold goes into factors outside the products."""
    fmt = PackedFormat(3, axis, 64, "minmax", False)
    x = random(3, 2, 64, 128) * random(4, 128).exp()
    keys, values = (
        pack(x * size, fmt, scale_dtype=torch.bfloat16),
        pack(x.flip(1) * size, fmt, scale_dtype=torch.bfloat16),
    )
    query = random(5, 2, 4, 128) / size
    found = kernels.attend(query, keys, values, 0.1)
    assert_attention(found, exact(query, keys, values, 0.1, None, None))
    assert_attention(
        kernels.attend(query, (x * size).bfloat16(), (x * size).bfloat16(), 0.1),
        exact(query, (x * size).bfloat16(), (x * size).bfloat16(), 0.1, None, None),
    )


def test_attention_equals_a_loop_over_tokens_and_channels():
    keys, values = packed_tokens(7, 3, "channel", 1, 40, 64), packed_tokens(8, 2, "token", 1, 40, 64)
    query = random(9, 1, 2, 64)
    found, lse = kernels.attend(query, keys, values, 0.1)
    k, v, q = dense(keys)[0].tolist(), dense(values)[0].tolist(), query[0].double().tolist()
    for m in range(2):
        weights = [
            torch.tensor(0.1 * sum(a * b for a, b in zip(q[m], k[t], strict=True))).exp().item() for t in range(40)
        ]
        out = [sum(w * v[t][c] for t, w in enumerate(weights)) / sum(weights) for c in range(64)]
        assert float((found[0, m].double().cpu() - torch.tensor(out)).abs().max()) < HALF * max(map(abs, out))
        assert abs(float(lse[0, m]) - torch.tensor(sum(weights)).log().item()) < EXACT


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_views_are_read_where_they_lie(axis):
    """Slices of tokens, queries between others, heads out of a larger tensor, channels far apart."""
    keys = packed_tokens(10, 2, axis, 2, 192, 64).slice(64, 150)
    keys = replace(keys, planes=tuple(plane.mT.contiguous().mT for plane in keys.planes))
    values = random(11, 2, 300, 192)[:, 7:93, 64:128]
    query = random(12, 2, 64, 9).mT[:, ::2]
    visible = (random(13, 2, 86, 5) > 0).mT
    found = kernels.attend(query, keys, values, 0.2, None, visible)
    assert_attention(found, exact(query, keys, values, 0.2, None, visible))
    index = torch.arange(0, 160, 2, device=DEVICE).expand(2, -1)[:, ::2]
    values = values.mT.contiguous().mT
    found = kernels.gather_attend(query, values, values, index % 86, 0.2)
    chosen = values[:, index[0] % 86]
    assert_attention(found, exact(query, chosen, chosen, 0.2, None, None))
    assert_close(kernels.scores(query, values), query.double() @ values.double().mT, EXACT)
    packed = kernels.pack(values, keys.format if axis == "token" else replace(keys.format, axis="token", group=32))
    assert_close(reference.dequantise(packed), reference.dequantise(pack(values, packed.format)).double(), 0.0)


@pytest.mark.parametrize(("group", "dim"), [(8, 32), (24, 96), (48, 96), (96, 96)])
def test_any_group_of_whole_bytes_is_read(group, dim):
    x = random(14, 2, 70, dim)
    keys = pack(x, PackedFormat(3, "token", group, "minmax", False))
    query = random(15, 2, 3, dim)
    assert_attention(kernels.attend(query, keys, keys, 0.1), exact(query, keys, keys, 0.1, None, None))


def test_all_levels_are_read():
    """Levels say how scales were chosen, which a reader need not know."""
    for levels in ("fit", "centroid"):
        keys = pack(random(16, 2, 70, 64), PackedFormat(1, "token", 64, levels, False))
        query = random(17, 2, 3, 64)
        assert_close(kernels.scores(query, keys), query.double() @ dense(keys).mT, EXACT)


@pytest.mark.parametrize("splits", [1, 2, 5, 1000])
def test_splits_do_not_change_the_result(splits):
    keys = packed_tokens(18, 4, "token", 2, 330, 64)
    query = random(19, 2, 4, 64)
    assert_attention(kernels.attend(query, keys, keys, 0.1, splits=splits), exact(query, keys, keys, 0.1, None, None))


def test_many_queries_take_several_programs():
    keys = packed_tokens(20, 2, "token", 1, 64, 64)
    query = random(21, 1, 130, 64)
    assert_attention(kernels.attend(query, keys, keys, 0.1), exact(query, keys, keys, 0.1, None, None))


def test_inputs_are_left_as_they_were():
    keys, query = packed_tokens(22, 3, "channel", 2, 70, 64), random(23, 2, 3, 64)
    before = [tensor.clone() for tensor in (*keys.tensors(), query)]
    kernels.attend(query, keys, keys, 0.1)
    kernels.scores(query, keys)
    assert all(torch.equal(a, b) for a, b in zip(before, (*keys.tensors(), query), strict=True))


def wrong_calls() -> dict[str, tuple[str, Any]]:
    """By name: what the message must hold, and the call."""
    query, keys = random(1, 2, 3, 64), random(2, 2, 70, 64)
    packed = packed_tokens(3, 4, "token", 2, 70, 64)
    outlier = pack(keys, PackedFormat(4, "token", 64, "minmax", False), torch.tensor([[1], [2]], device=DEVICE))
    odd = pack(random(4, 2, 70, 36), PackedFormat(1, "token", 4, "minmax", False))
    index = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)
    fmt = PackedFormat(4, "token", 64, "minmax", False)
    meta = torch.zeros(2, 70, 64, device="meta")
    attend, gather, scores = kernels.attend, kernels.gather_attend, kernels.scores
    return {
        "double": ("torch.float64", lambda: scores(query.double(), keys)),
        "integers": ("torch.int64", lambda: scores(query, keys.long())),
        "device of keys": ("meta", lambda: scores(query, meta)),
        "device of all": ("meta", lambda: scores(meta, meta)),
        "two axes": ("(3, 64)", lambda: scores(query[0], keys)),
        "no tokens": ("(2, 0, 64)", lambda: scores(query, keys[:, :0])),
        "no queries": ("(2, 0, 64)", lambda: scores(query[:, :0], keys)),
        "wide heads": ("256 channels", lambda: scores(random(1, 1, 1, 300), random(1, 1, 5, 300))),
        "heads": ("heads of keys: 1", lambda: scores(query, keys[:1])),
        "channels": ("channels of keys: 64", lambda: scores(query[..., :32], packed)),
        "another order": ("keys are Arranged", lambda: scores(query, arrange(packed, False))),
        "outliers": ("outlier", lambda: scores(query, outlier)),
        "half bytes": ("group of packed keys is 4", lambda: scores(random(1, 2, 3, 36), odd)),
        "tokens": ("tokens of values: 69", lambda: attend(query, packed, keys[:, 1:], 1.0)),
        "softcap": ("softcap is 0", lambda: attend(query, keys, keys, 1.0, 0.0)),
        "numbers as mask": (
            "visible is torch.float32",
            lambda: attend(query, keys, keys, 1.0, None, random(1, 2, 3, 70)),
        ),
        "mask shape": ("visible has shape", lambda: attend(query, keys, keys, 1.0, None, random(1, 2, 3, 71) > 0)),
        "index of floats": ("index is torch.float32", lambda: gather(query, keys, keys, index.float(), 1.0)),
        "index shape": ("index has shape", lambda: gather(query, keys, keys, index[0], 1.0)),
        "index of other queries": ("index has shape", lambda: gather(query, keys, keys, index[:, None], 1.0)),
        "empty index": ("index has shape", lambda: gather(query, keys, keys, index[:, :0], 1.0)),
        "index beyond": ("0 to 69", lambda: gather(query, keys, keys, index + 70, 1.0)),
        "negative index": ("0 to 69", lambda: gather(query, keys, keys, index - 1, 1.0)),
        "codes gathered": ("keys are Packed", lambda: gather(query, packed, keys, index, 1.0)),
        "parts": ("(parts, H, M, D)", lambda: kernels.merge(random(1, 2, 2, 3, 64), random(1, 2, 2, 4))),
        "parts in half": ("torch.float16", lambda: kernels.merge(random(1, 2, 2, 3, 64).half(), random(1, 2, 2, 3))),
        "no parts": ("1 to 4096", lambda: kernels.merge(random(1, 0, 2, 3, 64), random(1, 0, 2, 3))),
        "fitted levels": ("'fit'", lambda: kernels.pack(keys, replace(fmt, levels="fit"))),
        "bits": ("bits is 5", lambda: kernels.pack(keys, replace(fmt, bits=5))),
        "odd group": ("power of two", lambda: kernels.pack(random(1, 2, 5, 96), replace(fmt, group=48))),
        "cut group": ("whole groups", lambda: kernels.pack(keys, replace(fmt, axis="channel"))),
        "scale dtype": ("scale dtype", lambda: kernels.pack(keys, fmt, torch.float32)),
    }


@pytest.mark.parametrize("name", list(wrong_calls()))
def test_what_is_not_served_is_refused_before_a_launch(name, monkeypatch):
    message, call = wrong_calls()[name]
    monkeypatch.setattr(launch.Launch, "run", lambda self: pytest.fail("launched"))
    with pytest.raises(KVTailorError, match="allowed") as refused:
        call()
    assert message in str(refused.value)


def test_kernels_compile_without_a_gpu_and_reach_the_tensor_cores():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "kvtailor.kernels.compile_triton",
        "--arch",
        "90",
        "--only",
        "scores K token 1 bit",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    _, row, last = done.stdout.splitlines()
    assert row.startswith("scores K token 1 bit D=128") and int(row.split()[-1]) > 0 and last == "all 1 compiled"
