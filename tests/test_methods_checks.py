"""Properties that the published methods have, checked without trained weights.

Heads of 8 channels are always served by the reference kernels; tests of compiled ones take 16.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvtailor._compat import output_cache_argument
from kvtailor.attachment import attach
from kvtailor.cache import KVCache
from kvtailor.calibrate.density import density, label, uncovered
from kvtailor.indexes.channels import channel_peaks, critical_channels, group_mean, partial_logits, strongest_tokens
from kvtailor.indexes.pages import page_bounds, page_scores, top_pages
from kvtailor.layers import row as row_module
from kvtailor.layers import watching
from kvtailor.layers.base import Place, Step
from kvtailor.layers.call import Call
from kvtailor.layers.evicting import EvictingLayer
from kvtailor.layers.packed_evicting import PackedEvictingLayer
from kvtailor.layers.row import Row
from kvtailor.layers.whole import exact
from kvtailor.plan import Form, Keep, LayerPlan, Plan
from kvtailor.policies.registry import POLICY_NAMES
from reference import exact_attention, pooled, softmax

PROPERTY = settings(max_examples=20, deadline=None, derandomize=True)


def tiny_llama(layers: int = 1, seed: int = 0, head_dim: int = 8) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=256, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # larger weights, so that attention is not flat
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    return model


def keep_plan(policy: str, budget: int | str, sinks: int = 2, **options: Any) -> Plan:
    return Plan(layers=[{"keep": {"policy": policy, "budget": budget, "sinks": sinks, "options": options}}])


def forward(model: LlamaForCausalLM, ids: torch.Tensor, cache: Any, **given: Any) -> torch.Tensor:
    name = output_cache_argument(inspect.signature(model.forward).parameters)
    return model(input_ids=ids, **{name: cache}, **given).logits


def slots_of(layer: EvictingLayer, row: int = 0, head: int = 0) -> list[int]:
    tail = layer.rows[row].tail
    return tail.positions[tail.run(head)].tolist()


# A budget that holds everything.


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("budget", [10_000, "100%", "64MiB"])
def test_an_unbound_budget_gives_the_default_caches_logits(policy, budget):
    """The prompt's logits to the bit; those of later passes up to the order of sums."""
    model, ids = tiny_llama(layers=2), torch.randint(1, 61, (2, 40))
    default, cache = DynamicCache(config=model.config), KVCache(model, keep_plan(policy, budget))
    with attach(model, keep_plan(policy, budget)):
        for start, stop in ((0, 40),) if budget == "100%" else ((0, 30), (30, 31), (31, 32), (32, 40)):
            found = forward(model, ids[:, start:stop], cache)
            expected = forward(model, ids[:, start:stop], default)
            assert start or budget == "64MiB" or torch.equal(found, expected)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert all(layer.kept == layer.seen == ids.shape[1] for layer in cache.tailored())


# Positions.


@PROPERTY
@given(prompt=st.integers(10, 40), budget=st.integers(3, 9), steps=st.integers(1, 5), seed=st.integers(0, 1000))
def test_a_kept_suffix_attends_as_a_dense_run_of_it_from_position_zero(prompt, budget, steps, seed):
    """Rotary attention sees differences of positions alone: one layer, a sliding window, far from position zero."""
    check_suffix(prompt, budget, steps, tiny_llama(seed=seed))


@pytest.mark.parametrize(("prompt", "budget", "steps"), [(40, 9, 5), (150, 70, 3)])
def test_a_kept_suffix_on_compiled_kernels(prompt, budget, steps):
    check_suffix(prompt, budget, steps, tiny_llama(head_dim=16))


def check_suffix(prompt: int, budget: int, steps: int, model: LlamaForCausalLM) -> None:
    plan = keep_plan("fifo", budget, sinks=0)
    ids = torch.randint(1, 61, (1, prompt + steps))
    with attach(model, plan):
        cache = KVCache(model, plan)
        forward(model, ids[:, :prompt], cache)
        for stop in range(prompt + 1, prompt + steps + 1):
            found = forward(model, ids[:, stop - 1 : stop], cache)[:, -1]
            assert cache.get_seq_length() == stop
            assert slots_of(cache.layers[0]) == list(range(stop - budget, stop))
    dense = model(input_ids=ids[:, -budget:]).logits[:, -1]
    torch.testing.assert_close(found, dense, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_next_token_stands_at_the_number_of_tokens_seen(policy):
    """Eviction moves no position: the model asks for angles at the slots that the default cache would give."""
    model, asked = tiny_llama(layers=2), []
    plan = keep_plan(policy, 12, **({"window": 4} if policy in ("snapkv", "pyramidkv", "adakv") else {}))

    def note(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        whole = (x for x in (*args, *given.values()) if isinstance(x, torch.Tensor) and not x.is_floating_point())
        asked.append(next(whole)[0].tolist())

    hook = model.model.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
    with attach(model, plan):
        ids, cache = torch.randint(1, 61, (1, 30)), KVCache(model, plan)
        forward(model, ids, cache)
        for step in range(4):
            assert cache.get_seq_length() == 30 + step
            asked.clear()
            forward(model, ids[:, step : step + 1], cache)
            assert [positions for positions in asked if len(positions) == 1] == [[30 + step]]  # others: two sinks moved
    hook.remove()
    assert all(layer.kept < layer.seen == 34 for layer in cache.tailored())


# Streaming.


@PROPERTY
@given(prompt=st.integers(14, 40), budget=st.integers(6, 12), sinks=st.integers(0, 4), steps=st.integers(1, 6))
def test_renumbered_streaming_is_a_dense_run_over_sinks_and_recent_tokens(prompt, budget, sinks, steps):
    """One layer: what is kept is the first ``sinks`` and the newest tokens, and attention sees them at 0, 1, 2, …"""
    check_streaming(prompt, budget, sinks, steps, tiny_llama(seed=prompt))


@pytest.mark.parametrize("sinks", [0, 3])
def test_renumbered_streaming_on_compiled_kernels(sinks):
    check_streaming(40, 12, sinks, 5, tiny_llama(head_dim=16))


def check_streaming(prompt: int, budget: int, sinks: int, steps: int, model: LlamaForCausalLM) -> None:
    plan = keep_plan("streaming", budget, sinks=sinks)
    ids = torch.randint(1, 61, (1, prompt + steps))
    with attach(model, plan):
        cache = KVCache(model, plan)
        forward(model, ids[:, :prompt], cache)
        for stop in range(prompt + 1, prompt + steps + 1):
            found = forward(model, ids[:, stop - 1 : stop], cache)[:, -1]
            kept = [*range(sinks), *range(stop - budget + sinks, stop)]
            assert slots_of(cache.layers[0]) == kept
    dense = model(input_ids=ids[:, kept]).logits[:, -1]
    torch.testing.assert_close(found, dense, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("positions", ["renumbered", "original"])
def test_streamed_keys_are_those_that_rotary_embedding_gives_at_their_slots(positions):
    """Keys computed anew from the embeddings, turned to slots in the cache (ending at the query's) or left in place."""
    model, plan = tiny_llama(), keep_plan("streaming", 9, sinks=3, positions=positions)
    ids = torch.randint(1, 61, (1, 25))
    with attach(model, plan):
        cache = KVCache(model, plan)
        forward(model, ids, cache)
        layer = cache.layers[0]
        parts = layer.visible_parts(layer.rows[0])
    found = torch.cat([part.keys for part in parts], dim=1)
    kept = slots_of(layer)
    block = model.model.layers[0]
    hidden = block.input_layernorm(model.model.embed_tokens(ids[0, kept]))
    plain = block.self_attn.k_proj(hidden).view(9, 2, 8).transpose(0, 1)
    slots = range(25 - 9, 25) if positions == "renumbered" else kept
    frequencies = [model.config.rope_parameters["rope_theta"] ** (-2 * i / 8) for i in range(4)]
    for head in range(2):
        for place, slot in enumerate(slots):
            for i, frequency in enumerate(frequencies):
                x, y = float(plain[head, place, i]), float(plain[head, place, i + 4])
                cos, sin = math.cos(slot * frequency), math.sin(slot * frequency)
                assert float(found[head, place, i]) == pytest.approx(x * cos - y * sin, abs=1e-4)
                assert float(found[head, place, i + 4]) == pytest.approx(y * cos + x * sin, abs=1e-4)


# Attention sums.


@PROPERTY
@given(
    tokens=st.integers(1, 30), heads=st.integers(1, 3), group=st.integers(1, 4), pads=st.integers(0, 9),
    at_once=st.integers(1, 400), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_blockwise_column_sums_are_those_of_the_whole_matrix(tokens, heads, group, pads, at_once, seed):
    """In any blocks; the total is one per query and head, padding counts for nothing."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(heads, tokens, 8, generator=generator) for _ in range(2))
    query = torch.randn(heads, group, pads + tokens, 8, generator=generator)
    mask = torch.ones(pads + tokens, pads + tokens, dtype=torch.bool).tril()
    mask[:, :pads] = False
    call = Call(8**-0.5, None, None, None, mask[None, None], None, causal=True, first=0)
    held, real = Row(key, value, marked=True), torch.arange(pads, pads + tokens)
    held.tail.append(key, value, real)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "LOGITS_AT_ONCE", at_once)
        watching.add_mass(held, query, call, 0, real)
    logits = torch.einsum("hgqd,hnd->hgqn", query[:, :, pads:], key) * 8**-0.5
    eager = logits.masked_fill(~mask[pads:, pads:], -torch.inf).softmax(-1).sum(dim=(1, 2))
    torch.testing.assert_close(held.marks(), eager, atol=1e-5, rtol=1e-5)
    assert float(held.marks().sum()) == pytest.approx(tokens * heads * group, rel=1e-5)


@pytest.mark.parametrize("policy", ["h2o", "lru", "snapkv", "adakv"])
def test_the_size_of_blocks_changes_neither_attention_nor_what_is_kept(policy, monkeypatch):
    model, ids = tiny_llama(layers=2), torch.randint(1, 61, (2, 40))
    plan = keep_plan(policy, 15, **({"window": 4} if policy in ("snapkv", "adakv") else {}))
    runs = []
    for at_once in (4_000_000, 500):
        monkeypatch.setattr(watching, "LOGITS_AT_ONCE", at_once)
        monkeypatch.setattr(row_module, "LOGITS_AT_ONCE", at_once)
        with attach(model, plan):
            cache = KVCache(model, plan)
            forward(model, ids[:, :30], cache)
            logits = forward(model, ids[:, 30:], cache)
        kept = [slots_of(layer, row, head) for layer in cache.tailored() for row in range(2) for head in range(2)]
        runs.append((logits, kept))
    torch.testing.assert_close(runs[0][0], runs[1][0], atol=1e-4, rtol=1e-4)
    assert runs[0][1] == runs[1][1]


# Density.


def loop_density(query: torch.Tensor, keys: torch.Tensor, share: float) -> float:
    group, (count, dim), tokens = query.shape[0] // keys.shape[0], query.shape[1:], keys.shape[1]
    strongest, total = max(1, int(share * tokens)), 0.0
    for head in range(query.shape[0]):
        for place in range(count):
            visible = keys[head // group, : tokens - count + place + 1].double().numpy()
            row = sorted(softmax(visible @ query[head, place].double().numpy() / math.sqrt(dim)), reverse=True)
            total += max(0.0, 1 - sum(row[:strongest]))
    return total / (query.shape[0] * count)


@PROPERTY
@given(
    heads=st.integers(1, 3), group=st.integers(1, 3), queries=st.integers(1, 8), older=st.integers(0, 60),
    share=st.sampled_from([0.05, 0.2, 1.0]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_density_is_the_mean_uncovered_attention(heads, group, queries, older, share, seed):
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(heads * group, queries, 8, generator=generator)
    keys = torch.randn(heads, queries + older, 8, generator=generator)
    found = density(query, keys, share)
    assert found == pytest.approx(loop_density(query, keys, share), abs=1e-5)
    assert 0 <= found <= 1


def test_flat_attention_is_packed_and_attention_to_one_token_is_looked_up():
    """Uniform rows leave 95 % uncovered, one-hot rows nothing."""
    flat = density(torch.zeros(4, 1, 8), torch.randn(2, 400, 8))
    assert flat == pytest.approx(0.95, abs=1e-6) and label(flat) == "quantise"
    keys = torch.zeros(2, 400, 8)
    keys[:, 7, 0] = 1
    peaked = torch.zeros(4, 32, 8)
    peaked[..., 0] = 1000
    assert density(peaked, keys) == pytest.approx(0, abs=1e-6) and label(0.0) == "retrieve"
    assert uncovered(torch.full((3, 100), 0.01)).tolist() == pytest.approx([0.95] * 3)
    assert (label(0.2), label(0.21), label(0.3, tau=0.5)) == ("retrieve", "quantise", "retrieve")


def test_no_query_covers_tokens_after_its_own():
    """The newest key draws all attention, and only the newest query may see it."""
    keys = torch.zeros(1, 41, 4)
    keys[0, -1, 0] = 100
    query = torch.zeros(1, 2, 4)
    query[..., 0] = 100
    assert density(query, keys) == pytest.approx((1 - 2 / 40) / 2, abs=1e-6)


def test_density_refuses_what_it_cannot_score():
    with pytest.raises(ValueError, match="density of 5 queries over 4 tokens"):
        density(torch.zeros(2, 5, 8), torch.zeros(1, 4, 8))
    with pytest.raises(ValueError, match="density of 3 query heads over 2 KV heads"):
        density(torch.zeros(3, 1, 8), torch.zeros(2, 4, 8))


# Retrieval by channels.


@PROPERTY
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    tokens=st.integers(1, 40),
    count=st.integers(1, 8),
    seed=st.integers(0, 10**6),
)
def test_channels_are_those_of_largest_query_times_peak(heads, group, tokens, count, seed):
    generator = torch.Generator().manual_seed(seed)
    query, keys = torch.randn(heads, group, 8, generator=generator), torch.randn(heads, tokens, 8, generator=generator)
    mean, peaks = group_mean(query), channel_peaks(keys)
    channels = critical_channels(mean, peaks, count)
    logits = partial_logits(mean, keys, channels)
    for head in range(heads):
        scores = []
        for channel in range(8):
            average = sum(float(query[head, member, channel]) for member in range(group)) / group
            scores.append(abs(average) * max(abs(float(keys[head, t, channel])) for t in range(tokens)))
        best = sorted(sorted(range(8), key=lambda c: -scores[c])[:count])
        assert channels[head].tolist() == best
        for token in range(tokens):
            dot = sum(float(mean[head, c]) * float(keys[head, token, c]) for c in best)
            assert float(logits[head, token]) == pytest.approx(dot, abs=1e-5)
    older = channel_peaks(keys[:, : (tokens + 1) // 2])
    assert tokens < 2 or torch.equal(channel_peaks(keys[:, (tokens + 1) // 2 :], older), peaks)


@PROPERTY
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    tokens=st.integers(1, 50),
    top=st.integers(1, 60),
    seed=st.integers(0, 10**6),
)
def test_all_channels_retrieve_the_exact_strongest_tokens(heads, group, tokens, top, seed):
    """d_s = d: the top-k of the averaged query's logits; top_k >= n: full attention."""
    generator = torch.Generator().manual_seed(seed)
    query, keys, values = (torch.randn(heads, n, 8, generator=generator) for n in (group, tokens, tokens))
    mean = group_mean(query)
    chosen = strongest_tokens(partial_logits(mean, keys, critical_channels(mean, channel_peaks(keys), 8)), top)
    for head in range(heads):
        logits = [float(mean[head] @ keys[head, token]) for token in range(tokens)]
        assert chosen[head].tolist() == sorted(sorted(range(tokens), key=lambda t: -logits[t])[:top])
    if top >= tokens:
        read = chosen[..., None].expand(-1, -1, 8)
        full = (query @ keys.mT).softmax(-1) @ values
        torch.testing.assert_close((query @ keys.gather(1, read).mT).softmax(-1) @ values.gather(1, read), full)


def test_static_tokens_are_no_candidates():
    logits = torch.tensor([[9.0, 1.0, 5.0, 3.0, 8.0, 7.0]])
    assert strongest_tokens(logits, 2, first=1, last=2).tolist() == [[2, 3]]
    assert strongest_tokens(logits, 9, first=1, last=2).tolist() == [[1, 2, 3]]
    assert strongest_tokens(logits, 3, first=4, last=4).shape == (1, 0)


@pytest.mark.parametrize("count", [0, 9])
def test_a_number_of_channels_that_heads_lack_is_refused(count):
    with pytest.raises(ValueError, match=f"{count} critical channels of heads of 8"):
        critical_channels(torch.zeros(1, 8), torch.zeros(1, 8), count)


# Retrieval by pages.


@PROPERTY
@given(
    heads=st.integers(1, 3), queries=st.integers(1, 4), tokens=st.integers(1, 50), page=st.integers(1, 20),
    top=st.integers(1, 5), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_a_pages_score_bounds_the_products_with_its_keys(heads, queries, tokens, page, top, seed):
    """Quest's score is the bound itself, summed channel by channel; top pages are those of largest score."""
    generator = torch.Generator().manual_seed(seed)
    query, keys = (
        torch.randn(heads, queries, 6, generator=generator),
        torch.randn(heads, tokens, 6, generator=generator),
    )
    low, high = page_bounds(keys, page)
    scores = page_scores(query, low, high)
    assert scores.shape == (heads, queries, math.ceil(tokens / page))
    for head in range(heads):
        for place in range(queries):
            bounds = []
            for number in range(scores.shape[-1]):
                own, q = keys[head, number * page : (number + 1) * page], query[head, place]
                bounds.append(
                    sum(
                        max(float(q[c]) * float(own[:, c].min()), float(q[c]) * float(own[:, c].max()))
                        for c in range(6)
                    )
                )
                assert float(scores[head, place, number]) == pytest.approx(bounds[-1], abs=1e-5)
                assert float(scores[head, place, number]) >= float((own @ q).max()) - 1e-5
            best = sorted(sorted(range(len(bounds)), key=lambda i: -bounds[i])[:top])
            assert top_pages(scores, top)[head, place].tolist() == best


def test_pages_of_one_token_give_exact_products_and_pages_of_none_are_refused():
    query, keys = torch.randn(2, 3, 8), torch.randn(2, 20, 8)
    torch.testing.assert_close(page_scores(query, *page_bounds(keys, 1)), query @ keys.mT)
    with pytest.raises(ValueError, match="pages of 0 tokens"):
        page_bounds(keys, 0)


# Traces.


@PROPERTY
@given(
    reads=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=14),
    policy=st.sampled_from(["lru", "fifo"]),
)
def test_fifo_and_lru_follow_a_simulated_trace(reads, policy):
    """Orthogonal keys, and queries written to read two tokens each: six tokens stay, as in a simulated cache."""
    capacity, prompt, size, step = 6, 8, 24, Step()
    keep = Keep(policy=policy, budget=capacity, sinks=0, options={"top": 2} if policy == "lru" else {})
    layer = EvictingLayer(LayerPlan(keep=keep), Place(0), step)
    keys = 30 * torch.eye(size)[None, None]

    def run(start: int, stop: int, reading: list[tuple[int, int]]) -> None:
        query = torch.zeros(1, 1, stop - start, size)
        for place, tokens in enumerate(reading):
            query[0, 0, place, list(tokens)] = 1
        step.active, step.prompt = True, stop - start > 1
        layer.update(keys[:, :, start:stop], keys[:, :, start:stop])
        layer.attend(nn.Module(), query, None, exact_attention)

    run(0, prompt, [(slot, max(slot - 1, 0)) for slot in range(prompt)])
    last_used = {slot: min(slot + 1, prompt - 1) if policy == "lru" else slot for slot in range(prompt)}
    while len(last_used) > capacity:
        del last_used[min(last_used, key=lambda s: (last_used[s], s))]
    for slot, (one, away) in enumerate(reads, start=prompt):
        del last_used[min(last_used, key=lambda s: (last_used[s], s))]
        last_used[slot] = slot
        held = sorted(last_used)
        tokens = held[one], held[(one + away) % capacity]
        run(slot, slot + 1, [tokens])
        assert slots_of(layer) == held
        if policy == "lru":
            last_used.update(dict.fromkeys(tokens, slot))


# Packed and evicted.


class WatchedPackedLayer:
    """A packed and evicting layer of one row; each eviction is held against loops over what the row held before it."""

    heads, group, dim = 2, 2, 16

    def __init__(self, keep: Keep, form: Form) -> None:
        self.keep, self.step = keep, Step()
        self.layer = PackedEvictingLayer(LayerPlan(keep=keep, form=form), Place(0), self.step)
        self.marks: dict[tuple[int, int], float] = {}  # (head, slot)
        self.queries: list[tuple[int, torch.Tensor]] = []
        self.evictions, self.seen = 0, 0
        self._evict, self._observe = self.layer.evict, self.layer.observe
        self.layer.evict, self.layer.observe = self.evict, self.observe  # type: ignore[method-assign]

    def slots(self) -> list[int]:
        return self.layer.rows[0].positions()[0].tolist()

    def keys(self) -> Any:
        """(Hkv, n, D), what the codes stand for."""
        return torch.cat([exact(part.keys) for part in self.layer.rows[0].parts()], dim=1).double().numpy()

    def attention(self, keys: Any, slots: list[int], head: int, query: torch.Tensor, slot: int) -> dict[int, float]:
        seen = [place for place, other in enumerate(slots) if other <= slot]
        probs = softmax(keys[head, seen] @ query.double().numpy() / math.sqrt(self.dim))
        return {slots[place]: float(p) for place, p in zip(seen, probs, strict=True)}

    def observe(self, observation: Any) -> None:
        self._observe(observation)
        slots, keys, count = self.slots(), self.keys(), observation.query.shape[2]
        for place in range(count):
            slot = self.seen - count + place
            query = observation.query[0, :, place].view(self.heads, self.group, self.dim)
            self.queries.append((slot, query))
            for head in range(self.heads if self.keep.policy == "h2o" else 0):
                for member in range(self.group):
                    for other, share in self.attention(keys, slots, head, query[head, member], slot).items():
                        self.marks[head, other] = self.marks.get((head, other), 0.0) + share

    def importance(self, slots: list[int]) -> dict[int, float]:
        """Per slot, the mean over heads."""
        if self.keep.policy == "fifo":
            return {slot: float(slot) for slot in slots}
        if self.keep.policy == "h2o":
            return {s: sum(self.marks.get((h, s), 0.0) for h in range(self.heads)) / self.heads for s in slots}
        window, keys = self.keep.options["window"], self.keys()
        votes = dict.fromkeys(slots, 0.0)
        prefix = len(slots) - window
        for head in range(self.heads):
            raw = dict.fromkeys(slots, 0.0)
            for slot, query in self.queries[-window:]:
                for member in range(self.group):
                    for other, share in self.attention(keys, slots, head, query[head, member], slot).items():
                        raw[other] += share / window / self.group
            smooth = pooled([raw[slot] for slot in slots[:prefix]], 5, "avg") + [math.inf] * window
            for slot, vote in zip(slots, smooth, strict=True):
                votes[slot] += vote / self.heads
        return votes

    def expected(self, capacity: int, target: int) -> list[int]:
        row, slots = self.layer.rows[0], self.slots()
        worth = self.importance(slots)
        recent = self.layer.allowance.recent(capacity, target)
        guarded = {*slots[: self.keep.sinks], *slots[len(slots) - recent :]}
        blocks = []
        for segment in row.segments:
            own = segment.slots().tolist()
            for start in range(0, len(own) if segment.is_packed else 0, 64):
                block = own[start : start + 64]
                if not guarded & set(block):
                    blocks.append((sum(worth[slot] for slot in block) / 64, block))
        going = math.ceil((len(slots) - target) / 64)
        dropped = {slot for _, block in sorted(blocks)[:going] for slot in block}
        return [slot for slot in slots if slot not in dropped]

    def evict(self, row: Row, capacity: int, target: int) -> None:
        before, expected = self.slots(), self.expected(capacity, target)
        self._evict(row, capacity, target)
        assert self.slots() == expected
        self.evictions += len(before) > len(expected)

    def feed(self, count: int, generator: torch.Generator) -> torch.Tensor:
        query, key, value = (
            torch.randn(1, heads, count, self.dim, generator=generator)
            for heads in (self.heads * self.group, self.heads, self.heads)
        )
        self.seen += count
        self.step.active, self.step.prompt, self.step.last = True, count > 1, True
        self.step.expected = self.seen if count > 1 else 0
        self.layer.update(key, value)
        out, _ = self.layer.attend(nn.Module(), 2 * query, None, exact_attention)
        return out


@pytest.mark.parametrize(
    ("policy", "options"),
    [("fifo", {}), ("h2o", {}), ("h2o", {"mode": "oneshot", "window": 16}), ("snapkv", {"window": 16, "kernel": 5})],
    ids=["fifo", "h2o-online", "h2o-oneshot", "snapkv"],
)
@pytest.mark.parametrize(
    ("kernels", "bits", "first", "residual"),
    [("reference", 4, 0, 0), ("reference", 3, 64, 30), ("auto", 3, 64, 30)],
    indirect=["kernels"],
)
def test_packed_layers_drop_the_blocks_that_loops_would_drop(policy, options, kernels, bits, first, residual):
    """Whole blocks of 64 for all heads, within a block of the budget; sinks and newest tokens stay."""
    keep = Keep(policy=policy, budget=300, sinks=4, recent=10, options=options)
    form = Form(kind="rotated", bits=bits, exact=first, residual=residual)
    watched, generator = WatchedPackedLayer(keep, form), torch.Generator().manual_seed(bits)
    assert torch.isfinite(watched.feed(400, generator)).all()
    assert 300 - 64 < watched.layer.kept <= 300
    always = watched.layer.policy.acts == "always"
    for _ in range(70):
        assert torch.isfinite(watched.feed(1, generator)).all()
        assert not always or watched.layer.kept <= 300
        assert {*range(4), *range(watched.seen - 10, watched.seen)} <= set(watched.slots())
    gone = sorted(set(range(watched.seen)) - set(watched.slots()))
    assert len(gone) % 64 == 0
    for start in range(0, len(gone), 64):
        assert (gone[start] - first) % 64 == 0 and gone[start : start + 64] == list(
            range(gone[start], gone[start] + 64)
        )
    assert watched.evictions >= (2 if always else 1)


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "fifo"])
@pytest.mark.parametrize(("hard", "head_dim"), [(False, 8), (True, 8), (True, 16)])
def test_packed_and_evicted_models_generate_within_their_budget(policy, hard, head_dim):
    """A model with rotated 4-bit codes: logits finite, the budget held within a block, the first tokens there."""
    model, ids = tiny_llama(layers=2, head_dim=head_dim), torch.randint(1, 61, (2, 240))
    entry = {
        "keep": {"policy": policy, "budget": 150, "hard": hard, "options": {"window": 8} if policy == "snapkv" else {}},
        "form": {"kind": "rotated", "bits": 4, "exact": 4, "residual": 4},
    }
    settings = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with attach(model, Plan(layers=[entry])) as attachment:
        cache = attachment.new_cache()
        name = output_cache_argument(inspect.signature(model.forward).parameters)
        output = model.generate(input_ids=ids, **{name: cache}, **settings)
    assert torch.isfinite(torch.stack(output.logits)).all()
    for layer in cache.tailored():
        assert layer.seen == 251
        assert layer.kept <= 150 + (0 if hard or policy != "snapkv" else 11)
        assert all(row.positions()[:, :4].tolist() == [[0, 1, 2, 3]] * 2 for row in layer.rows)
