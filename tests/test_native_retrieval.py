"""Retrieval in C++ on every instruction set of this processor: exact, or equal to float64, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtailor.errors import KernelError
from kvtailor.kernels import _native

PATHS = tuple(_native.instruction_sets())
PROPERTY = settings(max_examples=60, deadline=None)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

paths = pytest.mark.parametrize("path", PATHS)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(found: Tensor, wanted: Tensor, tolerance: float = 1e-5, least: float = 1e-3) -> None:
    """To `tolerance` of the largest finite number, or of `least`; what is infinite is so in both."""
    finite = wanted.isfinite()
    assert found.shape == wanted.shape and torch.equal(found.isfinite(), finite)
    if bool(finite.any()):
        most = float(wanted[finite].abs().max())
        assert float((found.double() - wanted)[finite].abs().max()) <= tolerance * max(most, least)


# Top-k.


def top(scores: Tensor, k: int, threads: int = 1) -> Tensor:
    out = torch.full((scores.shape[0], k), -1, dtype=torch.int64)
    _native.topk(scores, k, threads, out)
    return out


def expected_top(scores: Tensor, k: int) -> Tensor:
    """The first k of a stable descending sort, in the order of positions."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(dim=-1).values


@PROPERTY
@given(
    seed=st.integers(0, 999),
    rows=st.integers(1, 4),
    n=st.one_of(st.integers(1, 200), st.integers(200, 6000)),
    share=st.floats(0, 1),
    levels=st.sampled_from((0, 1, 2, 7)),
    hidden=st.booleans(),
)
def test_top_scores_are_exact_and_ties_go_to_the_first(seed, rows, n, share, levels, hidden):
    scores = numbers(seed, rows, n)
    if levels:
        scores = (scores * levels).round() / levels
    if hidden:
        scores[:, : n // 2] = -torch.inf
    k = max(1, int(share**4 * n))
    assert torch.equal(top(scores, k), expected_top(scores, k))


@pytest.mark.parametrize("n", [4096, 20000, 20011])
@pytest.mark.parametrize("k", [1, 5, 64, 1000])
@pytest.mark.parametrize("kind", ["random", "rising", "falling", "constant", "one peak"])
def test_top_scores_of_long_rows_of_every_shape(n, k, kind):
    scores = {
        "random": numbers(k, 2, n),
        "rising": torch.arange(n).float().expand(2, -1).contiguous(),
        "falling": -torch.arange(n).float().expand(2, -1).contiguous(),
        "constant": torch.full((2, n), -2.5),
        "one peak": torch.zeros(2, n).index_fill_(1, torch.tensor([n - 2]), 1.0),
    }[kind]
    assert torch.equal(top(scores, k), expected_top(scores, k))


def test_both_zeros_are_one_score_and_infinite_scores_are_scores():
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -torch.inf, torch.inf]])
    assert top(scores, 3).tolist() == [[0, 1, 5]]
    assert top(scores, 1).tolist() == [[5]]
    assert top(scores, 6).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert top(-scores, 2).tolist() == [[0, 4]]


def test_rows_may_lie_apart_and_threads_change_nothing():
    scores, k = numbers(1, 8, 200000), 100
    one = top(scores, k)
    assert torch.equal(top(scores, k, threads=3), one)
    assert torch.equal(top(scores[::2, 500:90000], k), expected_top(scores[::2, 500:90000], k))
    wide = torch.full((8, 2 * k), -1, dtype=torch.int64)
    _native.topk(scores, k, 1, wide[:, k:])
    assert torch.equal(wide[:, k:], one) and bool((wide[:, :k] == -1).all())


@pytest.mark.parametrize("threads", [-1, 0, 20000, 2**31 - 1])
def test_no_number_of_threads_is_too_large_or_too_small(threads):
    scores, group = numbers(1, 8, 200000), numbers(2, 8, 2, 70000)
    assert torch.equal(top(scores, 100, threads), top(scores, 100))
    for path in PATHS:
        assert torch.equal(combined(path, group, "softmax", threads), combined(path, group, "softmax"))


@pytest.mark.parametrize("n", [1, 15, 100, 5000, 5003])
def test_a_score_that_is_no_number_is_an_error(n):
    for place in {0, n // 2, n - 1}:
        scores = torch.zeros(2, n)
        scores[1, place] = torch.nan
        with pytest.raises(KernelError, match="not a number"):
            top(scores, 1)


BAD_TOPS = {
    "k": ((torch.zeros(2, 9), 0, 1, torch.empty(2, 0).long()), "k is 0; allowed: 1 to the 9"),
    "negative k": ((torch.zeros(2, 9), -1, 1, torch.empty(2, 1).long()), "k is -1"),
    "k of more": ((torch.zeros(2, 9), 10, 1, torch.empty(2, 10).long()), "k is 10"),
    "dtype": ((torch.zeros(2, 9).half(), 1, 1, torch.empty(2, 1).long()), "scores: dtype"),
    "whole numbers": ((torch.zeros(2, 9).int(), 1, 1, torch.empty(2, 1).long()), "scores: dtype"),
    "axes": ((torch.zeros(9), 1, 1, torch.empty(2, 1).long()), "scores: shape"),
    "nothing": ((torch.zeros(2, 0), 1, 1, torch.empty(2, 1).long()), "no axis of 0"),
    "stride": ((torch.zeros(9, 2).T, 1, 1, torch.empty(2, 1).long()), "scores: the stride"),
    "out dtype": ((torch.zeros(2, 9), 1, 1, torch.empty(2, 1).int()), "out: dtype"),
    "out shape": ((torch.zeros(2, 9), 2, 1, torch.empty(2, 1).long()), "out: shape"),
    "out rows": ((torch.zeros(2, 9), 2, 1, torch.empty(1, 2).long()), "out: shape"),
    "out stride": ((torch.zeros(2, 9), 2, 1, torch.empty(2, 2).long().T), "out: the stride"),
    "out of one row": ((torch.zeros(2, 9), 2, 1, torch.empty(1, 2).long().expand(2, -1)), "out: the stride of axis 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TOPS)
def test_a_bad_call_of_topk_is_one_clear_error(name):
    given, message = BAD_TOPS[name]
    with pytest.raises(KernelError) as error:
        _native.topk(*given)
    assert message in str(error.value)


# One score for the query heads of a group.


def combined(path: str, scores: Tensor, mode: str, threads: int = 1) -> Tensor:
    out = torch.full((scores.shape[0], scores.shape[2]), torch.nan)
    _native.best_of_group(path, scores, out, mode, threads)
    return out


def expected_combined(scores: Tensor, mode: str) -> Tensor:
    scores = scores.double()
    seeing = scores.amax(dim=-1, keepdim=True) > -1e29
    if mode == "sum":
        return scores.sum(dim=1)
    if mode == "max":
        relative = scores - scores.amax(dim=-1, keepdim=True)
        return relative.masked_fill(~seeing, -torch.inf).amax(dim=1)
    return scores.softmax(dim=-1).masked_fill(~seeing, 0).sum(dim=1)


@paths
@PROPERTY
@given(
    seed=st.integers(0, 999),
    heads=st.integers(1, 3),
    group=st.integers(1, 9),
    n=st.one_of(st.integers(1, 100), st.integers(2000, 5000)),
    mode=st.sampled_from(("max", "sum", "softmax")),
    hidden=st.sampled_from((None, -torch.inf, -1e30)),
    threads=st.integers(1, 3),
)
def test_scores_of_a_group_become_one(path, seed, heads, group, n, mode, hidden, threads):
    scores = numbers(seed, heads, group, n) * 5
    if hidden is not None:
        scores[numbers(seed + 1, heads, group, n) > 0] = hidden
        scores[0, 0] = hidden
    least = 1 if mode == "sum" else 1e-3  # sums may cancel
    assert_near(combined(path, scores, mode, threads), expected_combined(scores, mode), least=least)


@paths
def test_scores_of_a_group_may_lie_apart(path):
    scores = numbers(3, 4, 2, 100)
    for part in (scores.transpose(0, 1), scores[::2, :, 10:90], scores[:, :1].expand(-1, 3, -1)):
        for mode in ("max", "sum", "softmax"):
            assert_near(combined(path, part, mode), expected_combined(part, mode))


@paths
@pytest.mark.parametrize("mode", ["max", "sum", "softmax"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("n", [1, 13, 300])
def test_scores_of_a_group_that_are_no_numbers_are_an_error(path, mode, bad, n):
    for place in {0, n // 2, n - 1}:
        scores = torch.zeros(2, 3, n)
        scores[1, 2, place] = bad
        with pytest.raises(KernelError, match="inf or not a number"):
            combined(path, scores, mode)


BAD_GROUPS = {
    "kernels": (("none", torch.zeros(2, 3, 9), torch.empty(2, 9), "max", 1), "kernels none"),
    "mode": ((PATHS[-1], torch.zeros(2, 3, 9), torch.empty(2, 9), "mean", 1), "mode is 'mean'"),
    "axes": ((PATHS[-1], torch.zeros(3, 9), torch.empty(2, 9), "max", 1), "scores: shape"),
    "nothing": ((PATHS[-1], torch.zeros(2, 3, 0), torch.empty(2, 0), "max", 1), "no axis of 0"),
    "no heads of the group": ((PATHS[-1], torch.zeros(2, 0, 9), torch.empty(2, 9), "max", 1), "no axis of 0"),
    "dtype": ((PATHS[-1], torch.zeros(2, 3, 9).double(), torch.empty(2, 9), "max", 1), "scores: dtype"),
    "stride": ((PATHS[-1], torch.zeros(2, 9, 3).mT, torch.empty(2, 9), "max", 1), "scores: the stride"),
    "out dtype": ((PATHS[-1], torch.zeros(2, 3, 9), torch.empty(2, 9).half(), "max", 1), "out: dtype"),
    "out shape": ((PATHS[-1], torch.zeros(2, 3, 9), torch.empty(2, 8), "max", 1), "out: shape"),
    "out stride": ((PATHS[-1], torch.zeros(2, 3, 9), torch.empty(9, 2).T, "max", 1), "out: the stride"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_GROUPS)
def test_a_bad_call_of_best_of_group_is_one_clear_error(name):
    given, message = BAD_GROUPS[name]
    with pytest.raises(KernelError) as error:
        _native.best_of_group(*given)
    assert message in str(error.value)


# Scores on chosen channels.


def channel_scores(path: str, query: Tensor, keys: Tensor, scale: Tensor | None, channels: Tensor) -> Tensor:
    out = torch.full((*query.shape[:2], keys.shape[2]), torch.nan)
    _native.channel_scores(path, query, keys, scale, channels, out, 1)
    return out


def assert_channel_scores(found: Tensor, query: Tensor, keys: Tensor, scale: Tensor | None, channels: Tensor) -> None:
    """Equal to float64, up to a small part of the terms of each sum."""
    picked = query.double().gather(2, channels.long()[:, None].expand(-1, query.shape[1], -1))
    numbers = keys.double() if scale is None else keys.double() * scale.double()[..., None]
    assert bool(((found.double() - picked @ numbers).abs() <= 2e-6 * (picked.abs() @ numbers.abs())).all())


def keys_of(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    x = numbers(seed, *shape)
    return (x * 40).round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else x.to(dtype)


@paths
@PROPERTY
@given(
    seed=st.integers(0, 999),
    heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dim=st.sampled_from((5, 64, 128)),
    count=st.integers(1, 20),
    n=st.one_of(st.integers(1, 70), st.integers(500, 1100)),
    dtype=st.sampled_from((*DTYPES, torch.int8)),
    scaled=st.booleans(),
    whole=st.sampled_from((torch.int32, torch.int64)),
)
def test_scores_on_chosen_channels_equal_float64(path, seed, heads, group, dim, count, n, dtype, scaled, whole):
    query, keys = numbers(seed, heads, group, dim), keys_of(seed + 1, dtype, heads, count, n)
    scale = numbers(seed + 2, heads, count).abs() if scaled else None
    channels = torch.randint(dim, (heads, count), generator=torch.Generator().manual_seed(seed)).to(whole)
    found = channel_scores(path, query, keys, scale, channels)
    assert_channel_scores(found, query, keys, scale, channels)


@paths
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_keys_by_channel_may_lie_apart_and_threads_change_nothing(path, dtype):
    store = keys_of(4, dtype, 5, 2, 300000)  # (m, H, room)
    query, channels = numbers(5, 2, 4, 64), torch.arange(10).view(2, 5) * 3
    keys = store.transpose(0, 1)[..., 7:270000]
    one, other = torch.empty(2, 4, keys.shape[2]), torch.empty(4, 2, keys.shape[2]).transpose(0, 1)
    _native.channel_scores(path, query, keys, None, channels, one, 1)
    _native.channel_scores(path, query, keys, None, channels, other, 3)
    assert torch.equal(one, other)
    assert_channel_scores(one, query, keys, None, channels)


@paths
def test_a_key_that_is_no_number_is_seen_in_the_score(path):
    keys = torch.ones(1, 3, 50)
    keys[0, 1, 20] = torch.nan
    found = channel_scores(path, torch.ones(1, 2, 16), keys, None, torch.tensor([[0, 5, 9]]))
    assert found.isnan().nonzero().tolist() == [[0, 0, 20], [0, 1, 20]]


def call_channels(**changed: Any) -> None:
    given: dict[str, Any] = {
        "kernels": PATHS[-1], "query": torch.zeros(2, 4, 64), "keys_by_channel": torch.zeros(2, 3, 50), "scale": None,
        "channels": torch.zeros(2, 3, dtype=torch.int64), "out": torch.empty(2, 4, 50), "threads": 1,
    }  # fmt: skip
    _native.channel_scores(**{**given, **changed})


BAD_CHANNELS = {
    "kernels": ({"kernels": "none"}, "kernels none"),
    "query dtype": ({"query": torch.zeros(2, 4, 64).half()}, "query: dtype"),
    "query axes": ({"query": torch.zeros(4, 64)}, "query: shape"),
    "query stride": ({"query": torch.zeros(2, 64, 4).mT}, "query: the stride"),
    "no query": ({"query": torch.zeros(2, 0, 64)}, "no axis of 0"),
    "keys dtype": ({"keys_by_channel": torch.zeros(2, 3, 50).double()}, "keys: dtype"),
    "bytes": ({"keys_by_channel": torch.zeros(2, 3, 50).byte()}, "keys: dtype"),
    "keys axes": ({"keys_by_channel": torch.zeros(3, 50)}, "keys: shape"),
    "no keys": ({"keys_by_channel": torch.zeros(2, 3, 0), "out": torch.empty(2, 4, 0)}, "no axis of 0"),
    "keys heads": ({"keys_by_channel": torch.zeros(1, 3, 50)}, "keys: shape"),
    "keys stride": ({"keys_by_channel": torch.zeros(2, 50, 3).mT}, "keys: the stride"),
    "channels dtype": ({"channels": torch.zeros(2, 3)}, "channels: dtype"),
    "short numbers": ({"channels": torch.zeros(2, 3).short()}, "channels: dtype"),
    "channels shape": ({"channels": torch.zeros(2, 4).long()}, "channels: shape"),
    "channels axes": ({"channels": torch.zeros(3).long()}, "channels: shape"),
    "channels stride": ({"channels": torch.zeros(3, 2).long().T}, "channels: the stride"),
    "negative channel": ({"channels": torch.full((2, 3), -1)}, "channel -1; allowed: 0 to 63"),
    "channel": ({"channels": torch.full((2, 3), 64)}, "channel 64; allowed: 0 to 63"),
    "scale dtype": ({"scale": torch.zeros(2, 3).half()}, "scale: dtype"),
    "scale shape": ({"scale": torch.zeros(2, 4)}, "scale: shape"),
    "out dtype": ({"out": torch.empty(2, 4, 50).half()}, "out: dtype"),
    "out shape": ({"out": torch.empty(2, 4, 49)}, "out: shape"),
    "out stride": ({"out": torch.empty(2, 50, 4).mT}, "out: the stride"),
    "out of one head": ({"out": torch.empty(1, 4, 50).expand(2, -1, -1)}, "out: the stride of axis 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CHANNELS)
def test_a_bad_call_of_channel_scores_is_one_clear_error(name):
    changed, message = BAD_CHANNELS[name]
    call_channels()
    with pytest.raises(KernelError) as error:
        call_channels(**changed)
    assert message in str(error.value)


# Attention over chosen rows.


def gather_attend(path: str, query: Any, keys: Any, values: Any, index: Any, scale: float) -> tuple[Tensor, Tensor]:
    out = torch.full((*query.shape[:2], values.shape[2]), torch.nan)
    lse = torch.full(tuple(query.shape[:2]), torch.nan)
    _native.gather_attend(path, query, keys, values, index, scale, out, lse, 1)
    return out, lse


def expected_gather(query: Tensor, keys: Tensor, values: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    index = index[:, None].expand(-1, query.shape[1], -1) if index.dim() == 2 else index  # (H, G, k)
    heads = torch.arange(len(index))[:, None, None]
    logits = (query.double()[:, :, None] * keys.double()[heads, index]).sum(-1) * scale
    return (logits.softmax(-1)[..., None] * values.double()[heads, index]).sum(-2), logits.logsumexp(-1)


@paths
@PROPERTY
@given(
    seed=st.integers(0, 999),
    heads=st.integers(1, 3),
    group=st.sampled_from((1, 2, 3, 4, 7, 20)),
    key_dim=st.sampled_from((16, 64, 80, 128)),
    value_dim=st.sampled_from((16, 96, 128)),
    n=st.integers(1, 300),
    k=st.integers(1, 150),
    by_head=st.booleans(),
    dtypes=st.tuples(*(st.sampled_from(DTYPES) for _ in range(3))),
)
def test_attention_over_chosen_rows_equals_float64(path, seed, heads, group, key_dim, value_dim, n, k, by_head, dtypes):
    query, keys, values = (
        numbers(seed + i, heads, rows, dim).to(dtype)
        for i, (rows, dim, dtype) in enumerate(zip((group, n, n), (key_dim, key_dim, value_dim), dtypes, strict=True))
    )
    shape = (heads, group, k) if by_head else (heads, k)
    index = torch.randint(n, shape, generator=torch.Generator().manual_seed(seed))
    out, lse = gather_attend(path, query, keys, values, index, 0.2)
    wanted, wanted_lse = expected_gather(query, keys, values, index, 0.2)
    assert_near(out, wanted, 1e-4)
    assert_near(lse, wanted_lse, least=1)  # its terms may cancel


@paths
@pytest.mark.parametrize("by_head", [False, True])
def test_one_mapped_file_serves_keys_and_values_and_only_chosen_rows_are_read(path, by_head, tmp_path):
    heads, n, dim = 2, 500, 64
    rows = numbers(1, n, 2, heads, dim).half()
    index = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(h))[:70] for h in range(heads)])
    for h in range(heads):
        rows[torch.ones(n, dtype=torch.bool).index_fill_(0, index[h], False), :, h] = torch.nan
    name = tmp_path / "rows"
    rows.numpy().tofile(name)
    mapped = np.memmap(name, dtype=np.float16, mode="r", shape=(n, 2, heads, dim)).transpose(1, 2, 0, 3)
    query = numbers(2, heads, 4, dim)
    chosen = index[:, None].expand(-1, 4, -1) if by_head else index
    out, lse = gather_attend(path, query, mapped[0], mapped[1], chosen, 0.125)
    keys, values = rows.permute(1, 2, 0, 3)
    wanted, wanted_lse = expected_gather(query, keys, values, chosen, 0.125)
    assert_near(out, wanted, 1e-4)
    assert_near(lse, wanted_lse, least=1)  # its terms may cancel


@paths
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_has_any_dtype_and_place_and_threads_change_nothing(path, dtype):
    query, keys, values = numbers(1, 2, 8, 64), numbers(2, 2, 9000, 64), numbers(3, 2, 9000, 64)
    index = torch.arange(9000).flip(0).expand(2, -1)
    wanted = expected_gather(query, keys, values, index, 0.125)[0]
    out = torch.zeros(2, 8, 100, dtype=dtype)
    for threads in (1, 3):
        _native.gather_attend(path, query, keys, values, index, 0.125, out[..., :64], None, threads)
        assert_near(out[..., :64].float(), wanted, 1e-2 if dtype != torch.float32 else 1e-4)
        assert not out[..., 64:].any()


@paths
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_chosen_keys_that_are_no_numbers_are_an_error(path, bad):
    keys = torch.ones(1, 9, 16)
    keys[0, 4, 3] = bad
    query, values, index = torch.ones(1, 2, 16), torch.ones(1, 9, 16), torch.tensor([[2, 4]])
    for chosen in (index, index[:, None].expand(1, 2, 2)):
        with pytest.raises(KernelError, match="not a finite number"):
            gather_attend(path, query, keys, values, chosen, 1.0)


@paths
def test_rows_that_all_count_as_hidden_give_zero(path):
    far = torch.full((1, 9, 16), -1e16)
    out, lse = gather_attend(path, torch.full((1, 2, 16), 1e16), far, torch.ones(1, 9, 16), torch.tensor([[2, 4]]), 1.0)
    assert not out.any() and bool((lse == -torch.inf).all())


def call_gather(**changed: Any) -> None:
    given: dict[str, Any] = {
        "kernels": PATHS[-1], "query": torch.zeros(2, 4, 64), "keys": torch.zeros(2, 50, 64),
        "values": torch.zeros(2, 50, 32), "index": torch.zeros(2, 7, dtype=torch.int64), "scale": 1.0,
        "out": torch.empty(2, 4, 32), "lse": torch.empty(2, 4), "threads": 1,
    }  # fmt: skip
    _native.gather_attend(**{**given, **changed})


BAD_GATHERS = {
    "kernels": ({"kernels": "none"}, "kernels none"),
    "query dtype": ({"query": torch.zeros(2, 4, 64).double()}, "query: dtype"),
    "query axes": ({"query": torch.zeros(4, 64)}, "query: shape"),
    "query heads": ({"query": torch.zeros(3, 4, 64)}, "query: shape"),
    "query channels": ({"query": torch.zeros(2, 4, 32)}, "query: shape"),
    "no query": ({"query": torch.zeros(2, 0, 64), "out": torch.empty(2, 0, 32)}, "no axis of 0"),
    "query stride": ({"query": torch.zeros(2, 64, 4).mT}, "query: the stride"),
    "keys dtype": ({"keys": torch.zeros(2, 50, 64).int()}, "keys: dtype"),
    "keys axes": ({"keys": torch.zeros(50, 64)}, "keys: shape"),
    "no keys": ({"keys": torch.zeros(2, 0, 64), "values": torch.zeros(2, 0, 32)}, "no axis of 0"),
    "keys stride": ({"keys": torch.zeros(2, 64, 50).mT}, "keys: the stride"),
    "channels": ({"keys": torch.zeros(2, 50, 72), "query": torch.zeros(2, 4, 72)}, "72 channels"),
    "values dtype": ({"values": torch.zeros(2, 50, 32).long()}, "values: dtype"),
    "values tokens": ({"values": torch.zeros(2, 49, 32)}, "values: shape"),
    "values heads": ({"values": torch.zeros(1, 50, 32)}, "values: shape"),
    "values stride": ({"values": torch.zeros(2, 50, 64)[..., ::2]}, "values: the stride"),
    "values channels": ({"values": torch.zeros(2, 50, 8), "out": torch.empty(2, 4, 8)}, "8 channels"),
    "index dtype": ({"index": torch.zeros(2, 7, dtype=torch.int32)}, "index: dtype"),
    "index axes": ({"index": torch.zeros(7).long()}, "index: shape"),
    "index heads": ({"index": torch.zeros(1, 7).long()}, "index: shape"),
    "index of other heads": ({"index": torch.zeros(2, 3, 7).long()}, "index: shape"),
    "index stride": ({"index": torch.zeros(7, 2).long().T}, "index: the stride"),
    "no index": ({"index": torch.zeros(2, 0).long()}, "no axis of 0"),
    "negative row": ({"index": torch.full((2, 7), -1)}, "index: row -1 of head 0; allowed: 0 to 49"),
    "row": ({"index": torch.tensor([[0, 49], [3, 50]])}, "index: row 50 of head 1; allowed: 0 to 49"),
    "row of a query head": ({"index": torch.full((2, 4, 7), 1 << 40)}, "index: row 1099511627776"),
    "scale": ({"scale": float("nan")}, "scale is nan"),
    "out dtype": ({"out": torch.empty(2, 4, 32).double()}, "out: dtype"),
    "out shape": ({"out": torch.empty(2, 4, 64)}, "out: shape"),
    "out stride": ({"out": torch.empty(2, 32, 4).mT}, "out: the stride"),
    "out of one head": ({"out": torch.empty(1, 4, 32).expand(2, -1, -1)}, "out: the stride of axis 0"),
    "lse dtype": ({"lse": torch.empty(2, 4).half()}, "lse: dtype"),
    "lse shape": ({"lse": torch.empty(2, 3)}, "lse: shape"),
    "lse stride": ({"lse": torch.empty(4, 2).T}, "lse: the stride"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_GATHERS)
def test_a_bad_call_of_gather_attend_is_one_clear_error(name):
    changed, message = BAD_GATHERS[name]
    call_gather()
    with pytest.raises(KernelError) as error:
        call_gather(**changed)
    assert message in str(error.value)
