"""Scores and weighted values on codes: equal to double precision on the dequantised numbers."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtailor.formats import Packed, PackedFormat, default_group
from kvtailor.kernels import reference
from kvtailor.kernels.reference import BLOCK_TOKENS, dequantise, scores, weighted_values
from kvtailor.quantize.hadamard import rotate, unrotate
from kvtailor.quantize.pack import pack, unpack, widest_channels

DIMS = (36, 64, 80, 96, 128, 256)
PROPERTY = settings(max_examples=40, deadline=None)


def random_heads(seed: int, heads: int, length: int, dim: int) -> Tensor:
    return torch.randn(heads, length, dim, generator=torch.Generator().manual_seed(seed))


def assert_close(result: Tensor, exact: Tensor) -> None:
    """To 1e-5 of the largest number."""
    assert result.dtype == torch.float32 and result.shape == exact.shape
    assert float((result.double() - exact).abs().max()) <= 1e-5 * float(exact.abs().max())


def random_packed(
    seed: int,
    bits: int,
    axis: Literal["token", "channel"],
    dim: int,
    heads: int,
    length: int,
    outliers: int,
    bias: float,
) -> Packed:
    """Packed tokens of any length: on the channel axis cut from whole groups."""
    fmt = PackedFormat(bits, axis, default_group(dim) if axis == "token" else 32 << seed % 2, "minmax", False)
    x = random_heads(seed, heads, -(-length // 64) * 64, dim) + bias
    return pack(x, fmt, widest_channels(x, outliers)).narrow(length)


packed_tokens = st.builds(
    random_packed,
    seed=st.integers(0, 999),
    bits=st.sampled_from((1, 2, 3, 4, 8)),
    axis=st.sampled_from(("token", "channel")),
    dim=st.sampled_from(DIMS),
    heads=st.integers(1, 4),
    length=st.one_of(st.integers(1, 300), st.sampled_from((64, 128, 192))),
    outliers=st.sampled_from((0, 1, 5)),
    bias=st.sampled_from((0.0, 3.0)),
)
query_rows = st.sampled_from((1, 2, 7, 33))


@PROPERTY
@given(packed=packed_tokens, rows=query_rows, seed=st.integers(0, 99))
def test_scores_on_codes_equal_those_on_dequantised_keys(packed, rows, seed):
    query = random_heads(seed, packed.heads, rows, packed.dim)
    assert_close(scores(query, packed), query.double() @ dequantise(packed).double().mT)


@PROPERTY
@given(packed=packed_tokens, rows=query_rows, seed=st.integers(0, 99))
def test_weighted_values_on_codes_equal_those_on_dequantised_values(packed, rows, seed):
    probs = random_heads(seed, packed.heads, rows, packed.length).softmax(-1)
    assert_close(weighted_values(probs, packed), probs.double() @ dequantise(packed).double())


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_both_equal_a_loop_over_tokens_and_channels(axis):
    packed = random_packed(3, 3, axis, 36, 2, 70, 2, 0.5)
    numbers = unpack(packed).double().tolist()
    query, probs = random_heads(1, 2, 3, 36), random_heads(2, 2, 3, 70)
    logits, out = torch.zeros(2, 3, 70).double(), torch.zeros(2, 3, 36).double()
    for h in range(2):
        for m in range(3):
            for t in range(70):
                for c in range(36):
                    logits[h, m, t] += float(query[h, m, c]) * numbers[h][t][c]
                    out[h, m, c] += float(probs[h, m, t]) * numbers[h][t][c]
    assert_close(scores(query, packed), logits)
    assert_close(weighted_values(probs, packed), out)


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("rows", [2, 33])
@pytest.mark.parametrize("length", [BLOCK_TOKENS, 2 * BLOCK_TOKENS + 77])
def test_long_inputs_are_read_in_blocks_with_the_same_result(axis, rows, length):
    packed = random_packed(4, 2, axis, 64, 2, length, 1, 0.0)
    query, probs = random_heads(1, 2, rows, 64), random_heads(2, 2, rows, length).softmax(-1)
    assert_close(scores(query, packed), query.double() @ dequantise(packed).double().mT)
    assert_close(weighted_values(probs, packed), probs.double() @ dequantise(packed).double())


@pytest.mark.parametrize("rows", [1, 33])
def test_no_more_than_a_block_is_read_at_a_time(rows, monkeypatch):
    seen: list[int] = []
    centred = reference._centred

    def watch(packed):
        seen.append(packed.length)
        return centred(packed)

    monkeypatch.setattr(reference, "_centred", watch)
    packed = random_packed(5, 2, "token", 64, 1, 3 * BLOCK_TOKENS, 0, 0.0)
    scores(random_heads(1, 1, rows, 64), packed)
    weighted_values(random_heads(1, 1, rows, packed.length), packed)
    assert seen == [BLOCK_TOKENS] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [1, 100, BLOCK_TOKENS + 5])
def test_dense_keys_and_values_of_any_dtype(dtype, length):
    x = random_heads(6, 2, length, 80).to(dtype)
    query, probs = random_heads(7, 2, 3, 80), random_heads(8, 2, 3, length).softmax(-1)
    assert_close(scores(query, x), query.double() @ x.double().mT)
    assert_close(weighted_values(probs, x), probs.double() @ x.double())


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [80, 128])
def test_rotated_tokens_are_read_in_their_own_basis(bits, dim):
    fmt = PackedFormat(bits, "token", default_group(dim), "fit", True)
    packed = pack(random_heads(9, 2, 100, dim), fmt)
    query, probs = random_heads(10, 2, 3, dim), random_heads(11, 2, 3, 100).softmax(-1)
    assert_close(scores(rotate(query), packed), query.double() @ unpack(packed).double().mT)
    assert_close(unrotate(weighted_values(probs, packed)), probs.double() @ unpack(packed).double())


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_inputs_are_left_as_they_were(axis):
    packed = random_packed(12, 8, axis, 64, 2, 100, 3, 0.0)
    before = [tensor.clone() for tensor in packed.tensors()]
    query, probs = random_heads(1, 2, 3, 64), random_heads(2, 2, 3, 100)
    query_before, probs_before = query.clone(), probs.clone()
    scores(query, packed)
    weighted_values(probs, packed)
    dequantise(packed)
    assert all(torch.equal(a, b) for a, b in zip(before, packed.tensors(), strict=True))
    assert torch.equal(query, query_before) and torch.equal(probs, probs_before)


def test_outlier_channels_enter_exactly():
    x = random_heads(13, 2, 64, 64)
    x[:, :, 9] *= 500
    packed = pack(x, PackedFormat(8, "token", 64, "minmax", False), torch.tensor([[9], [9]]))
    query = torch.zeros(2, 1, 64)
    query[..., 9] = 2.0
    assert torch.equal(scores(query, packed)[:, 0], 2 * x[..., 9])
    probs = torch.zeros(2, 1, 64)
    probs[..., 17] = 1.0
    assert torch.equal(weighted_values(probs, packed)[:, 0, 9], x[:, 17, 9])
