"""Far tokens in chunks of host memory: as those in a mapped file, however they come, go and are asked for."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtailor
from kvtailor.errors import StoreError
from kvtailor.indexes.registry import index_class
from kvtailor.layers import pinned
from kvtailor.layers.far import FarTokens
from kvtailor.layers.pinned import PinnedPool, PinnedTokens
from zoo import ZOO, kv_cache, text

DIMS = (16, 24)
CPU = torch.device("cpu")
dtypes = st.sampled_from((torch.float32, torch.float16, torch.bfloat16))


def small_chunks(patch: pytest.MonkeyPatch, heads: int, dtype: torch.dtype, blocks: int) -> None:
    """Chunks of so many blocks of 64 tokens."""
    patch.setattr(pinned, "CHUNK_BYTES", blocks * 64 * heads * sum(DIMS) * dtype.itemsize)


def both(heads: int, dtype: torch.dtype) -> tuple[FarTokens, PinnedTokens]:
    """Empty far tokens of either kind."""
    like = torch.empty(0, dtype=dtype)
    mapped, chunked = (
        kind(heads, DIMS, like, index_class("pages").from_options({}), "host", None)
        for kind in (FarTokens, PinnedTokens)
    )
    assert isinstance(chunked, PinnedTokens)
    return mapped, chunked


def append(far: FarTokens, blocks: int, seed: int) -> None:
    source, count = torch.Generator().manual_seed(seed), 64 * blocks
    keys, values = (torch.randn(far.heads, count, dim, generator=source).to(far.dtype) for dim in DIMS)
    far.append(keys, values, torch.arange(far.length, far.length + count), None)


def assert_same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == other.dtype and torch.equal(own, other)


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 3),
    share=st.integers(1, 3),
    dtype=dtypes,
    chunk_blocks=st.integers(1, 3),
    actions=st.lists(st.integers(-200, 4), min_size=1, max_size=6),
    chosen=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_chunks_hold_what_a_mapped_file_holds(heads, share, dtype, chunk_blocks, actions, chosen, seed):
    """Blocks that come and tokens that are taken back (numbers below 0); then runs, sets, pairs and a copy of it."""
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, heads, dtype, chunk_blocks)
        kinds = both(heads, dtype)
        for number, action in enumerate((2, *actions)):
            if action > 0:
                for far in kinds:
                    append(far, action, seed + number)
            elif kinds[0].length:
                assert_same(*(far.take_from(max(0, far.length + action)) for far in kinds))
        for far in kinds:
            append(far, 1, seed)
        other = copy.deepcopy(kinds[1]), kinds[1].copy()
        append(kinds[1], 1, seed + 1)
        append(other[0], 1, seed + 2)
        mapped, chunked, length = *kinds, kinds[0].length
        assert chunked.pool.chunk_tokens == 64 * chunk_blocks and chunked.length == length + 64
        source = torch.Generator().manual_seed(seed)
        index = torch.randint(0, length, (heads * share, chosen), generator=source)
        pairs = torch.randint(0, heads, (chosen,), generator=source), index[0]
        for one in (chunked, *other):
            assert_same(one.gather(index), mapped.gather(index))
            assert_same(one.rows(*pairs), mapped.rows(*pairs))
            assert_same(one.span(0, length), mapped.read())
            first = int(index.min())
            assert_same(one.span(first, length - 3), mapped.span(first, length - 3))


@settings(max_examples=20, deadline=None)
@given(heads=st.integers(1, 3), blocks=st.integers(1, 4), seed=st.integers(0, 99))
def test_rows_are_those_of_a_loop(heads, blocks, seed):
    for far in both(heads, torch.float32):
        append(far, blocks, seed)
        source = torch.Generator().manual_seed(seed)
        keys, values = (torch.randn(heads, 64 * blocks, dim, generator=source) for dim in DIMS)
        index = torch.randint(0, far.length, (2 * heads, 5), generator=source)
        found_keys, found_values = far.gather(index)
        for number, own in enumerate(index):
            for place, token in enumerate(own.tolist()):
                assert torch.equal(found_keys[number, place], keys[number // 2, token])
                assert torch.equal(found_values[number, place], values[number // 2, token])


def test_growing_moves_nothing_and_bytes_are_those_of_whole_chunks(monkeypatch):
    small_chunks(monkeypatch, 2, torch.float32, 2)
    _, far = both(2, torch.float32)
    assert far.pool.nbytes == 0
    starts: list[int] = []
    for blocks, chunks in ((1, 1), (1, 1), (3, 3), (1, 3)):
        append(far, blocks, 0)
        found = far.pool.addresses.tolist()
        assert found[: len(starts)] == starts and found == [chunk.data_ptr() for chunk in far.pool.chunks]
        assert len(found) == chunks and far.pool.nbytes == chunks * 128 * 2 * sum(DIMS) * 4
        starts = found
    far.take_from(0)
    assert far.length == 0 and far.pool.addresses.tolist() == starts


def test_memory_that_cannot_be_locked_is_an_error_and_what_was_there_stays(monkeypatch):
    small_chunks(monkeypatch, 2, torch.float32, 1)
    _, far = both(2, torch.float32)
    append(far, 1, 0)
    before = far.span(0, 64)

    def no_memory(*shape, **given):
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(pinned.torch, "empty", no_memory)
        with pytest.raises(StoreError, match="bytes of host memory cannot be page-locked: CUDA error: out of memory"):
            append(far, 2, 1)
    assert far.length == far.index.length == 64
    assert_same(far.span(0, 64), before)
    append(far, 2, 1)
    assert far.length == 192 and len(far.pool.chunks) == len(far.pool.addresses) == 3


def test_chunks_are_locked_where_the_device_is_a_gpu(monkeypatch):
    asked = []
    empty = torch.empty

    def watched(*shape, pin_memory=False, **given):
        asked.append(pin_memory)
        return empty(*shape, **given)

    for kind, locked in (("cpu", False), ("cuda", True)):
        pool = PinnedPool(1, 8, torch.float32, CPU)
        pool.device = torch.device(kind)
        with monkeypatch.context() as patch:
            patch.setattr(pinned.torch, "empty", watched)
            pool._chunk()
        assert asked.pop() is locked


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_model_answers_as_on_a_mapped_file(monkeypatch, kernels, ahead):
    """While tokens go on moving away, and after a crop into them; the index learns anew when the prompt ends."""
    monkeypatch.setenv("KVTAILOR_KERNELS", kernels)
    model, step = ZOO["llama"].build(), torch.tensor([[5], [6]])
    find = {"index": "pq", "top": 40, "recent": 64, "sinks": 8, "ahead": ahead}
    plan = kvtailor.Plan(layers=[{"find": find, "tier": "host"}], prefill_chunk=150)
    answers = []
    for chunked in (False, True):
        monkeypatch.setattr("kvtailor.layers.retrieving.serves", lambda *_, chunked=chunked: chunked)
        with kvtailor.attach(model, plan):
            cache = kv_cache(model(**text(300), use_cache=True))
            kinds = {type(row.far) for layer in cache.tailored() for row in layer.rows}
            found = [model(step, past_key_values=cache).logits for _ in range(40)]
            cache.crop(-150)
            found += [model(step, past_key_values=copy.deepcopy(cache)).logits]
        assert kinds == {PinnedTokens if chunked else FarTokens}
        answers.append(torch.cat(found, dim=1))
    assert torch.equal(*answers)


@pytest.mark.parametrize(("tier", "device", "kernels", "expected"), [
    ("host", "cuda", "reference", True),
    ("disk", "cuda", "reference", False),
    ("host", "cpu", "reference", False),
    ("host", "cpu", "triton", True),
    ("disk", "cpu", "triton", False),
])  # fmt: skip
def test_which_tokens_live_in_locked_memory(monkeypatch, tier, device, kernels, expected):
    monkeypatch.setattr(pinned.choice, "active", lambda: kernels)
    assert pinned.serves(tier, torch.device(device)) is expected
