"""Layers whose tokens live far away: what a step reads, what it makes of it, and that nothing is lost or torn."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtailor
from kvtailor.errors import CacheError, KVTailorError, PlanError, StoreError
from kvtailor.indexes.registry import INDEX_NAMES, index_class
from kvtailor.indexes.selection import choose
from kvtailor.kernels import native
from kvtailor.layers.base import Place, Step
from kvtailor.layers.retrieving import RetrievingLayer
from kvtailor.store import pool as pool_module
from kvtailor.store.pool import Pool
from zoo import ZOO, kv_cache, left_padded, text

SELECTS = ("query", "mean", "max", "sum")
EVERYTHING = 10**6
STEP = torch.tensor([[5], [6]])

pytestmark = pytest.mark.usefixtures("kernels")


def plan(index: str = "codes", top: int | str = EVERYTHING, select: str = "query", **entry) -> kvtailor.Plan:
    find = {"index": index, "top": top, "select": select, "recent": 64, "sinks": 8}
    return kvtailor.Plan(layers=[{"find": find, **entry}])


def far_of(cache) -> list:
    return [row.far for layer in cache.tailored() for row in layer.rows]


def steps(model, cache, count: int) -> torch.Tensor:
    """Logits of greedy steps, (B, count, vocabulary)."""
    found, ids = [], STEP
    for _ in range(count):
        found.append(model(ids, past_key_values=cache).logits)
        ids = found[-1].argmax(-1)
    return torch.cat(found, dim=1)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


# What is read


@pytest.mark.parametrize("index", INDEX_NAMES)
@pytest.mark.parametrize("select", SELECTS)
def test_reading_every_token_is_full_attention(index, select):
    """Whatever the index and whoever shares a choice, over many steps, while tokens go on moving away."""
    model, inputs = ZOO["llama"].build(), text(300)
    expected = steps(model, kv_cache(model(**inputs, use_cache=True)), 70)
    with kvtailor.attach(model, plan(index, select=select)):
        cache = kv_cache(model(**inputs, use_cache=True))
        before = far_of(cache)[0].length
        close(steps(model, cache, 70), expected)
        assert before == 192 and far_of(cache)[0].length == 256


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "qwen3", "gpt-neox", "phi3"])
@pytest.mark.parametrize("select", ["query", "max"])
def test_models_with_soft_caps_sinks_and_other_heads_answer_as_with_the_default_cache(name, select):
    model, inputs = ZOO[name].build(), text(200)
    expected = steps(model, kv_cache(model(**inputs, use_cache=True)), 3)
    with kvtailor.attach(model, plan(select=select)):
        cache = kv_cache(model(**inputs, use_cache=True))
        close(steps(model, cache, 3), expected)
    assert far_of(cache)[0].length == 128


def test_relative_position_biases_reach_far_tokens():
    """T5: self attention whose logits carry a bias for each pair of places."""
    model, tokens = ZOO["t5"].build(), text(150)["input_ids"]
    encoded = {"input_ids": tokens[:, :20]}
    expected = model(**encoded, decoder_input_ids=tokens, use_cache=True)
    found = model(**encoded, decoder_input_ids=STEP, past_key_values=kv_cache(expected)).logits
    with kvtailor.attach(model, plan()):
        output = model(**encoded, decoder_input_ids=tokens, use_cache=True)
        close(model(**encoded, decoder_input_ids=STEP, past_key_values=kv_cache(output)).logits, found)
    assert far_of(kv_cache(output).self_attention_cache)[0].length == 64


@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    blocks=st.integers(3, 6),
    top=st.integers(1, 80),
    select=st.sampled_from(SELECTS),
    index=st.sampled_from(INDEX_NAMES),
    seed=st.integers(0, 99),
)
def test_a_step_attends_to_what_the_index_chose_and_to_what_is_near(heads, group, blocks, top, select, index, seed):
    """Against loops over heads: one softmax over sinks, chosen and newest tokens."""
    torch.manual_seed(seed)
    tokens, dim = 64 * blocks, 16
    layer = RetrievingLayer(plan(index, top, select).layers[0], Place(0), Step(active=True, prompt=True))
    key, value = torch.randn(1, heads, tokens, dim), torch.randn(1, heads, tokens, dim)
    feed(layer, key, value, torch.randn(1, heads * group, tokens, dim))
    layer.step.prompt = False
    row, query = layer.rows[0], 3 * torch.randn(1, heads * group, 1, dim)
    new_key, new_value = torch.randn(1, heads, 1, dim), torch.randn(1, heads, 1, dim)
    out = feed(layer, new_key, new_value, query)
    grouped = query.view(heads, group, dim)
    chosen = choose(row.far.index, grouped, top, select, dim**-0.5, layer.path)
    keys, values = torch.cat([key, new_key], dim=2)[0], torch.cat([value, new_value], dim=2)[0]
    for head in range(heads):
        for member in range(group):
            picked = chosen[head, member] if select == "query" else chosen[head]
            assert len(picked) == min(top, row.far.length) and (picked.diff() > 0).all()
            far = row.far.positions.long()[picked]
            slots = sorted({*range(8), *far.tolist(), *range(8 + row.far.length, tokens + 1)})
            logits = keys[head, slots] @ grouped[head, member] * dim**-0.5
            expected = logits.softmax(0) @ values[head, slots]
            torch.testing.assert_close(out[0, 0, head * group + member], expected, atol=2e-5, rtol=1e-4)


def feed(layer, key, value, query) -> torch.Tensor:
    def stock(module, query, key, value, mask, **given):
        return query.transpose(1, 2), None

    layer.update(key, value)
    return layer.attend(torch.nn.Module(), query, None, stock)[0]


@settings(max_examples=25, deadline=None)
@given(heads=st.integers(1, 3), count=st.integers(1, 4), blocks=st.integers(1, 5), seed=st.integers(0, 99))
def test_indexes_that_know_enough_find_the_strongest_tokens(heads, count, blocks, seed):
    """8-bit codes nearly, all channels and a centroid for every key exactly, pages as bounds."""
    torch.manual_seed(seed)
    keys, query = torch.randn(heads, 64 * blocks, 32), torch.randn(heads, count, 32)
    exact = query @ keys.mT
    found = {}
    for name, options in {
        "codes": {"bits": 8},
        "channels": {"count": 32},
        "pq": {"bits": 8, "parts": 1},
        "pages": {},
    }.items():
        index = index_class(name).from_options(options)
        for block in keys.split(64, dim=1):
            index.append(block, path())
        assert index.length == keys.shape[1]
        found[name] = index.scores(query, path())
        assert found[name].shape == exact.shape and found[name].dtype == torch.float32
    assert (found["codes"] - exact).abs().max() < 0.2
    torch.testing.assert_close(found["channels"], exact, atol=1e-4, rtol=1e-4)
    assert (found["pages"] >= exact - 1e-4).all()
    if blocks == 1:  # the first tokens that come make the centroids
        torch.testing.assert_close(found["pq"], exact, atol=1e-4, rtol=1e-4)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99))
def test_product_codes_find_more_with_more_parts_and_bits(seed):
    """Recall of the strongest tokens, over queries; later tokens are coded by their nearest centroids."""
    source = torch.Generator().manual_seed(seed)
    keys, query = torch.randn(2, 512, 32, generator=source), torch.randn(2, 8, 32, generator=source)
    best = (query @ keys.mT).topk(64, dim=-1).indices
    recalls = []
    for parts, bits in ((1, 2), (2, 4), (4, 6), (16, 8)):
        index = index_class("pq")(parts=parts, bits=bits)
        index.append(keys[:, :384], path())
        index.append(keys[:, 384:], path())
        found = index.scores(query, path()).topk(64, dim=-1).indices
        recalls.append(float((found[..., None] == best[..., None, :]).any(-1).float().mean()))
        pieces = keys[:, 384:].unflatten(-1, (parts, -1)).transpose(1, 2)
        distances = torch.cdist(pieces, index.centroids)  # (H, parts, n, 2**bits)
        codes = torch.cat(index.codes, dim=2)[:, :, 384:].long()[..., None]
        torch.testing.assert_close(distances.gather(-1, codes)[..., 0], distances.amin(-1), atol=1e-4, rtol=1e-4)
    assert recalls[0] < recalls[1] < recalls[2] < recalls[3] and recalls[3] > 0.9


def test_centroids_are_of_the_whole_prompt_however_it_was_cut():
    model, inputs = ZOO["llama"].build(), text(500)
    whole = plan("pq", top=64)
    chunked = whole.model_copy(update={"prefill_chunk": 150})
    caches = []
    for one in (whole, chunked):
        with kvtailor.attach(model, one):
            caches.append(kv_cache(model(**inputs, use_cache=True)))
            steps(model, caches[-1], 1)
    for ours, theirs in zip(*map(far_of, caches), strict=True):
        assert ours.index.learned == theirs.index.learned == ours.length == 384
        torch.testing.assert_close(ours.index.centroids, theirs.index.centroids, atol=1e-3, rtol=1e-3)


def path() -> str | None:
    return native.path_for(torch.device("cpu"), torch.float32, (32, 32))


@settings(max_examples=10, deadline=None)
@given(index=st.sampled_from(INDEX_NAMES), blocks=st.integers(2, 9), kept=st.integers(0, 8), seed=st.integers(0, 99))
def test_what_an_index_forgets_leaves_no_trace_and_copies_are_their_own(index, blocks, kept, seed):
    torch.manual_seed(seed)
    keys, query = torch.randn(2, 64 * blocks, 32), torch.randn(2, 3, 32)
    kept = min(kept, blocks - 1)
    known = index_class(index).from_options({})
    for block in keys.split(64, dim=1):
        known.append(block, path())
    before = known.scores(query, path())
    other = known.copy()
    other.drop_from(64 * kept)
    assert other.length == 64 * kept and known.length == 64 * blocks
    if kept:
        torch.testing.assert_close(other.scores(query, path()), before[..., : 64 * kept])
    other.append(keys[:, :64], path())
    assert other.length == 64 * (kept + 1)
    torch.testing.assert_close(known.scores(query, path()), before)


# What a cache owes to Transformers


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_padded_rows_answer_as_they_do_alone(tier):
    model = ZOO["llama"].build()
    padded = left_padded(300, 250)
    expected = steps(model, kv_cache(model(**padded, use_cache=True)), 1)
    with kvtailor.attach(model, plan(tier=tier)):
        cache = kv_cache(model(**padded, use_cache=True))
        found = model(STEP, past_key_values=cache, attention_mask=longer(padded["attention_mask"])).logits
    stock = kv_cache(model(**padded, use_cache=True))
    expected = model(STEP, past_key_values=stock, attention_mask=longer(padded["attention_mask"])).logits
    close(found, expected)
    assert len({far.length for far in far_of(cache)}) == 2


def longer(mask: torch.Tensor) -> torch.Tensor:
    return torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)


@pytest.mark.parametrize("index", INDEX_NAMES)
def test_a_crop_into_far_tokens_is_exact(index):
    model, inputs = ZOO["llama"].build(), text(300)
    with kvtailor.attach(model, plan(index)):
        cache = kv_cache(model(**inputs, use_cache=True))
        cache.crop(-170)
        assert cache.get_seq_length() == 130 and {far.length for far in far_of(cache)} == {0}
        found = steps(model, cache, 3)
    stock = kv_cache(model(**{name: part[:, :130] for name, part in inputs.items()}, use_cache=True))
    close(found, steps(model, stock, 3))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 500),
    steps=st.integers(0, 70),
    kept=st.integers(0, 570),
    sinks=st.sampled_from([0, 1, 8, 70]),
    recent=st.sampled_from([1, 33, 64]),
    seed=st.integers(0, 99),
)
def test_a_crop_leaves_near_what_is_near_where_nothing_more_ever_came(tokens, steps, kept, sinks, recent, seed):
    """Sinks, newest and far tokens, once room is made; then both go on and move the same tokens away."""
    total = tokens + steps
    kept = min(kept, total)
    key = torch.randn(1, 2, total + 200, 16, generator=torch.Generator().manual_seed(seed))
    find = {"index": "pages", "top": 5, "sinks": sinks, "recent": recent}
    entry = kvtailor.Plan(layers=[{"find": find}]).layers[0]
    cropped, fresh = (RetrievingLayer(entry, Place(0), Step(active=True, prompt=True)) for _ in range(2))
    feed(cropped, *[key[:, :, :tokens]] * 3)
    cropped.step.prompt = False
    for slot in range(tokens, total):
        feed(cropped, *[key[:, :, slot : slot + 1]] * 3)
    cropped.crop(kept - total)
    if kept:
        feed(fresh, *[key[:, :, :kept]] * 3)
    for more in (0, 200):
        for layer in (cropped, fresh):
            if more:
                layer.step.prompt = True
                feed(layer, *[key[:, :, kept : kept + more]] * 3)
            layer.make_room(0)
        if not fresh.rows:
            continue
        rows = cropped.rows[0], fresh.rows[0]
        assert len({(row.sealed + row.tail.longest, row.far.length, row.total) for row in rows}) == 1
        for name, dim in (("positions", -1), ("keys", 1), ("values", 1)):
            ours, theirs = (torch.cat([getattr(part, name) for part in row.parts()], dim=dim) for row in rows)
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("index", "kept"), [*((index, kept) for index in INDEX_NAMES for kept in (80, 5)), ("codes", 330), ("pages", 330)]
)
def test_steps_behind_a_crop_read_what_they_read_in_a_fresh_cache(index, kept):
    """Few tokens are read. Peaks of channels and centroids keep what was cropped while something is far."""
    model, ids = ZOO["llama"].build(), text(420)["input_ids"]
    with kvtailor.attach(model, plan(index, top=20)):
        cropped = kv_cache(model(ids, use_cache=True))
        cropped.crop(kept - 420)
        fresh = kv_cache(model(ids[:, :kept], use_cache=True))
        more = text(200, seed=9)["input_ids"]
        for cache in (cropped, fresh):
            if kept < 330:
                model(more, past_key_values=cache)
        close(steps(model, cropped, 3), steps(model, fresh, 3))
        assert far_of(cropped)[0].length == far_of(fresh)[0].length > 0


def test_reorder_repeat_select_copy_and_reset_carry_far_tokens():
    model, inputs = ZOO["llama"].build(), text(300)
    with kvtailor.attach(model, plan()):
        cache = kv_cache(model(**inputs, use_cache=True))
        expected = steps(model, copy.deepcopy(cache), 2)
        cache.reorder_cache(torch.tensor([1, 0, 1]))
        assert torch.equal(cache.layers[0].keys[0], cache.layers[0].keys[2])
        cache.batch_select_indices(torch.tensor([1, 0]))
        close(steps(model, cache, 2), expected)
        cache.reset()
        assert cache.get_seq_length() == 0
        again = kv_cache(model(**inputs, past_key_values=cache))
        close(steps(model, again, 2), expected)


def test_a_prompt_in_chunks_reads_everything_and_tokens_move_between_chunks():
    model, inputs = ZOO["llama"].build(), text(400)
    chunked = plan().model_copy(update={"prefill_chunk": 90})
    expected = model(**inputs).logits
    with kvtailor.attach(model, chunked):
        output = model(**inputs, use_cache=True)
        close(output.logits, expected)
        assert far_of(kv_cache(output))[0].length == 320


def test_outside_of_attached_models_the_cache_gives_true_tensors():
    model, inputs = ZOO["llama"].build(), text(300)
    with kvtailor.attach(model, plan()):
        cache = kv_cache(model(**inputs, use_cache=True))
    stock = kv_cache(model(**inputs, use_cache=True))
    for ours, theirs in zip(cache.layers, stock.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)


# What is held


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("index", INDEX_NAMES)
def test_bytes_are_told_by_tier_and_estimated(index, tier):
    model, inputs = ZOO["llama"].build(), text(1000)
    with kvtailor.attach(model, plan(index, top=64, tier=tier)):
        cache = kv_cache(model(**inputs, use_cache=True))
    report, far = cache.report(), far_of(cache)
    stored = sum(one.pool.nbytes for one in far)
    assert (
        stored
        == 3 * 2 * far[0].length * 2 * 32 * 4
        == (report.bytes_on_disk if tier == "disk" else report.bytes_held - report.bytes_fast)
    )
    tensors = [t for one in far for _, t in one.tensors()]
    assert report.bytes_fast >= sum(t.untyped_storage().nbytes() for t in tensors)
    from kvtailor.estimate import estimate

    guess = estimate(model.config, cache.plan, 1000, rows=2)
    assert guess.bytes_held == pytest.approx(report.bytes_held, rel=0.02)
    assert report.as_dict()["bytes_on_disk"] == report.bytes_on_disk
    assert "in fast memory" in str(report)


# What goes wrong


def test_a_file_that_was_cut_is_an_error_at_the_step_that_needs_it():
    model, inputs = ZOO["llama"].build(), text(300)
    with kvtailor.attach(model, plan(tier="disk")):
        cache, other = (kv_cache(model(**inputs, use_cache=True)) for _ in range(2))
        expected = steps(model, copy.deepcopy(other), 1)
        os.ftruncate(far_of(cache)[0].pool._file, 10)
        with pytest.raises(StoreError, match=r"was cut to 10 bytes, and .* were written"):
            steps(model, cache, 1)
        close(steps(model, other, 1), expected)


def test_a_full_disk_is_an_error_and_the_cache_is_as_before(monkeypatch):
    model, inputs = ZOO["llama"].build(), text(300)
    with kvtailor.attach(model, plan(tier="disk")):
        cache = kv_cache(model(**inputs, use_cache=True))
        steps(model, cache, 34)  # the next one moves a block
        expected = copy.deepcopy(cache)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", no_space)
            with pytest.raises(StoreError, match=r"cannot be written to a file in .*: No space left"):
                for _ in range(64):
                    steps(model, cache, 1)
        for _ in range(cache.get_seq_length() - expected.get_seq_length()):
            steps(model, expected, 1)
        close(steps(model, cache, 1), steps(model, expected, 1))


@pytest.mark.parametrize(("change", "copies"), [
    (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), 1),
    (lambda cache: cache.batch_repeat_interleave(2), 2),
    (lambda cache: cache.batch_select_indices(torch.tensor([0, 0])), 1),
])  # fmt: skip
@pytest.mark.parametrize("heads", ["*", "1"])
def test_a_choice_of_sequences_that_fails_midway_is_an_error_at_the_next_pass(monkeypatch, change, copies, heads):
    """In the first layer (or part of one) nothing has changed; behind it the cache is of no use until a reset."""
    model, inputs, write = ZOO["llama"].build(), text(200), os.pwrite
    entries = [{"heads": heads, **plan(tier="disk").model_dump()["layers"][0]}] if heads == "1" else None
    disk = kvtailor.Plan(layers=entries) if entries else plan(tier="disk")
    with kvtailor.attach(model, disk):
        cache = kv_cache(model(**inputs, use_cache=True))
        expected = steps(model, copy.deepcopy(cache), 1)
        for written in (0, copies):
            left = [written]

            def writes_some(*arguments, left=left):
                left[0] -= 1
                return write(*arguments) if left[0] >= 0 else no_space()

            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", writes_some)
                with pytest.raises(StoreError, match="No space left"):
                    change(cache)
            if not written and heads == "*":
                close(steps(model, copy.deepcopy(cache), 1), expected)
        with pytest.raises(CacheError, match=r"choice of sequences failed midway .*: call cache.reset\(\)"):
            steps(model, cache, 1)
        cache.reset()
        close(steps(model, kv_cache(model(**inputs, past_key_values=cache)), 1), expected)


def test_halves_of_a_cache_that_no_longer_go_together_are_an_error_at_the_next_pass(monkeypatch):
    model, tokens = ZOO["t5"].build(), text(150)["input_ids"]
    encoded = {"input_ids": tokens[:, :20]}
    with kvtailor.attach(model, plan(attention="both")):
        cache = kv_cache(model(**encoded, decoder_input_ids=tokens, use_cache=True))
        monkeypatch.setattr(cache.cross_attention_cache.layers[0], "reorder_cache", no_space)
        with pytest.raises(OSError, match="No space left"):
            cache.reorder_cache(torch.tensor([1, 1]))
        with pytest.raises(CacheError, match="choice of sequences failed midway"):
            model(**encoded, decoder_input_ids=STEP, past_key_values=cache)


def test_a_crop_that_cannot_read_far_tokens_is_an_error_then_and_at_the_next_pass():
    model = ZOO["llama"].build()
    with kvtailor.attach(model, plan(tier="disk")):
        cache = kv_cache(model(**text(300), use_cache=True))
        os.ftruncate(far_of(cache)[2].pool._file, 10)
        with pytest.raises(StoreError, match="was cut to 10 bytes"):
            cache.crop(-150)
        with pytest.raises(CacheError, match=r"a crop of a cache .* failed midway"):
            steps(model, cache, 1)


def no_space(*arguments) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("index", "option", "value"),
    [
        ("pages", "page", 16.0), ("pages", "page", True), ("codes", "bits", 2.0), ("codes", "kind", 1),
        ("pq", "parts", 2.0), ("pq", "bits", 6.0), ("channels", "count", 8.0),
    ],
)  # fmt: skip
def test_options_of_an_index_are_of_the_kind_that_it_takes(index, option, value):
    with pytest.raises(PlanError, match=f"index '{index}': {option} {value!r} .*: allowed are"):
        kvtailor.Plan(layers=[{"find": {"index": index, "options": {option: value}}}])


KEPT = {
    "retrieving": plan(),
    "packed": kvtailor.Plan.preset("int8"),
    "whole": kvtailor.Plan.preset("full"),
    "split": kvtailor.Plan(layers=[{"heads": 0, "form": {"kind": "rotated", "bits": 8}}]),
}


@pytest.mark.parametrize("kept", KEPT)
def test_tokens_that_cannot_be_taken_leave_the_cache_as_before(kept):
    """Whatever is wrong with one layer's: nothing is held of any, and other tokens can be taken, in any number."""
    model, inputs = ZOO["llama"].build(), text(200)
    pairs = [(layer.keys, layer.values) for layer in kv_cache(model(**inputs, use_cache=True)).layers]
    key, value = pairs[2]
    wrong = {
        "fewer tokens": (key[:, :, :150], value[:, :, :150]),
        "fewer values": (key, value[:, :, :150]),
        "fewer sequences": (key[:1], value[:1]),
        "other heads of values": (key, value[:, :1]),
        "other numbers": (key, value.half()),
        "no heads": (key[:, 0], value[:, 0]),
        "no tensors": (key.numpy(), value.numpy()),
    }
    with kvtailor.attach(model, KEPT[kept]) as attachment:
        cache = attachment.new_cache()
        for pair in wrong.values():
            with pytest.raises(CacheError, match=r"layer 2 of LlamaForCausalLM: got .*; allowed: "):
                cache.take([*pairs[:2], pair])
            assert cache.get_seq_length() == 0
        with pytest.raises(CacheError, match="one or more tokens"):
            cache.take([(key[:, :, :0], value[:, :, :0]) for key, value in pairs])
        cache.take([(key[:1], value[:1]) for key, value in pairs])
        alone = model(STEP[:1], past_key_values=copy.deepcopy(cache)).logits
        for pair in ((key, value), (key[:1, :1], value[:1, :1]), (key[:1, :, :, :8], value[:1])):
            with pytest.raises(CacheError, match=r"and the cache holds|of which the plan speaks"):
                cache.take([pair] * 3)
        assert torch.equal(model(STEP[:1], past_key_values=cache).logits, alone)


def test_tokens_that_fail_midway_leave_the_cache_as_before():
    model, inputs = ZOO["llama"].build(), text(200)
    pairs = [(layer.keys, layer.values) for layer in kv_cache(model(**inputs, use_cache=True)).layers]
    broken = pairs[2][0].clone()
    broken[1, 0, 70] = torch.nan
    with kvtailor.attach(model, plan()) as attachment:
        cache = attachment.new_cache()
        with pytest.raises(KVTailorError, match="finite"):
            cache.take([*pairs[:2], (broken, pairs[2][1])])
        cache.take([(key[:1], value[:1]) for key, value in pairs])
        assert cache.get_seq_length() == 200


@pytest.mark.parametrize("kept", KEPT)
def test_a_first_prompt_that_failed_does_not_say_how_many_sequences_may_come(kept):
    model, inputs = ZOO["llama"].build(), text(200)

    def fail(*arguments) -> None:
        raise RuntimeError("failed on purpose")

    with kvtailor.attach(model, KEPT[kept]) as attachment:
        cache = attachment.new_cache()
        hook = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(**inputs, past_key_values=cache)
        hook.remove()
        one = {name: part[:1] for name, part in inputs.items()}
        again = model(**one, past_key_values=cache).logits
        torch.testing.assert_close(again, model(**one).logits)


def test_a_folder_that_cannot_hold_files_is_named(tmp_path):
    model = ZOO["llama"].build()
    there = plan(tier="disk", folder=str(tmp_path / "nowhere"))
    with kvtailor.attach(model, there), pytest.raises(StoreError, match="nowhere' cannot hold cache files: No such"):
        model(**text(20), use_cache=True)


def test_files_have_no_names_and_are_gone_with_the_cache(tmp_path):
    model = ZOO["llama"].build()
    with kvtailor.attach(model, plan(tier="disk", folder=str(tmp_path))):
        cache = kv_cache(model(**text(300), use_cache=True))
        assert far_of(cache)[0].pool.nbytes > 0 and list(tmp_path.iterdir()) == []
        handles = [far.pool._file for far in far_of(cache)]
        del cache
    for handle in handles:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)


def test_keys_that_are_no_numbers_leave_pool_and_index_alike():
    layer = RetrievingLayer(plan("codes").layers[0], Place(0), Step(active=True, prompt=True))
    key = torch.randn(1, 1, 200, 16)
    key[0, 0, 100] = torch.nan
    with pytest.raises(kvtailor.errors.KVTailorError, match="finite"):
        feed(layer, key, key, key)
    assert layer.rows[0].far.length == layer.rows[0].far.index.length == 0


@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=8), tier=st.sampled_from(["host", "disk"]))
def test_a_pool_reads_what_was_written(counts, tier):
    pool, expected = Pool(24, tier), b""
    for number, count in enumerate(counts):
        data = bytes([number]) * (24 * count)
        pool.append(memoryview(data))
        expected += data
        assert bytes(pool.read()) == expected and pool.rows * 24 == len(expected)
    pool.drop_from(counts[0])
    other = pool.copy()
    other.append(memoryview(b"x" * 24))
    assert bytes(pool.read()) == expected[: 24 * counts[0]] and other.rows == counts[0] + 1
    with pytest.raises(StoreError, match="whole rows of 24"):
        pool.append(memoryview(b"x" * 23))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_is_forgotten_takes_no_room_and_what_was_read_stays_where_it_was(tier):
    pool, row = Pool(4096, tier), b"a" * 4096
    pool.append(memoryview(row * 600))
    seen = pool.read()
    pool.drop_from(10)
    assert os.fstat(pool._file).st_blocks * 512 <= pool.nbytes + 4096 and pool.nbytes == 10 * 4096
    assert bytes(seen[: pool.nbytes]) == row * 10
    pool.append(memoryview(b"b" * 4096 * 700))
    assert bytes(pool.read()) == row * 10 + b"b" * 4096 * 700
    os.ftruncate(pool._file, 100)
    pool.drop_from(5)
    with pytest.raises(StoreError, match="was cut to 100 bytes, and 20480 were written"):
        pool.read()


def test_bytes_of_a_crop_are_given_back_by_the_system_too():
    model = ZOO["llama"].build()
    for tier in ("host", "disk"):
        with kvtailor.attach(model, plan(tier=tier)):
            cache = kv_cache(model(**text(500), use_cache=True))
            cache.crop(-300)
        taken = sum(os.fstat(far.pool._file).st_blocks * 512 for far in far_of(cache))
        told = sum(far.pool.nbytes for far in far_of(cache))
        assert 0 < told <= taken <= told + 4096 * len(far_of(cache))


def test_a_write_that_fails_leaves_nothing_on_the_disk(monkeypatch):
    pool, write = Pool(4096, "disk"), os.pwrite
    pool.append(memoryview(b"a" * 4096 * 4))
    tried: list[int] = []

    def writes_a_part(handle: int, data: memoryview, place: int) -> int:
        tried.append(place)
        return write(handle, data[:40960], place) if len(tried) == 1 else no_space()

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", writes_a_part)
        with pytest.raises(StoreError, match="No space left"):
            pool.append(memoryview(b"b" * 4096 * 100))
    assert len(tried) == 2 and os.fstat(pool._file).st_size == pool.nbytes == 4096 * 4


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_limit_of_open_files_is_raised_before_it_is_an_error(monkeypatch, tier):
    """The soft one as far as the hard one, once: what the process may have then is all there is."""
    limits, opened = [16, 20], []

    def raised(kind: int, wanted: tuple[int, int]) -> None:
        limits[:] = wanted

    def opens(*arguments) -> int:
        if len(opened) == limits[0]:
            raise OSError(24, "Too many open files")
        opened.append(os.dup(1))
        return opened[-1]

    monkeypatch.setattr(pool_module.resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(pool_module.resource, "setrlimit", raised)
    monkeypatch.setattr(os, "memfd_create" if tier == "host" else "open", opens)
    pools = [Pool(8, tier) for _ in range(20)]
    where = "host memory" if tier == "host" else "folder '.*'"
    with pytest.raises(StoreError, match=rf"{where} cannot hold one more cache file.*: 20 files are open"):
        Pool(8, tier)
    assert limits == [20, 20] and len(pools) == 20


def test_a_folder_that_no_file_can_have_is_a_store_error():
    with pytest.raises(StoreError, match="cannot hold cache files: embedded null byte"):
        Pool(8, "disk", "a\0b")
