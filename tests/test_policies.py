"""Every eviction policy against loops: what stays per row and head, and what attention makes of it.

Heads of 8 channels are always served by the reference kernels; tests of compiled ones take 16.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from kvtailor._compat import output_cache_argument
from kvtailor.attachment import attach
from kvtailor.cache import KVCache
from kvtailor.layers.base import Place, Step
from kvtailor.layers.evicting import EvictingLayer
from kvtailor.layers.full import FullLayer
from kvtailor.plan import Keep, LayerPlan, Plan
from kvtailor.policies.base import Held
from kvtailor.policies.registry import POLICY_NAMES, policy_class
from kvtailor.policies.selection import strongest
from reference import DrivenLayer, pyramid_capacities

PROPERTY = settings(max_examples=4, deadline=None, derandomize=True)

WINDOW = {"window": 3, "kernel": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fifo": ("fifo", {}),
    "lru": ("lru", {"top": 3}),
    "random": ("random", {"seed": 7}),
    "keynorm": ("keynorm", {}),
    "keydiff": ("keydiff", {}),
    "streaming": ("streaming", {"positions": "original"}),
    "h2o online": ("h2o", {"mode": "online", "heavy": 0.4}),
    "h2o online normalized": ("h2o", {"mode": "online", "normalize": True}),
    "h2o oneshot": ("h2o", {"mode": "oneshot", "window": 3}),
    "h2o oneshot normalized": ("h2o", {"mode": "oneshot", "window": 2, "normalize": True}),
    "snapkv": ("snapkv", WINDOW),
    "snapkv no pooling sum": ("snapkv", {"window": 2, "kernel": 1, "reduce": "sum"}),
    "snapkv avg max": ("snapkv", {"window": 4, "kernel": 5, "pool": "avg", "reduce": "max"}),
    "snapkv max mean": ("snapkv", {"window": 3, "kernel": 5, "pool": "max", "reduce": "mean"}),
    "snapkv max max": ("snapkv", {"window": 1, "kernel": 3, "pool": "max", "reduce": "max"}),
    "snapkv max sum": ("snapkv", {"window": 3, "kernel": 3, "pool": "max", "reduce": "sum"}),
    "pyramidkv one layer": ("pyramidkv", WINDOW),
    "adakv": ("adakv", WINDOW),
    "adakv no floor max": ("adakv", {"window": 2, "kernel": 3, "pool": "max", "floor": 0.0}),
    "adakv even": ("adakv", {"window": 3, "kernel": 1, "reduce": "max", "floor": 1.0}),
}
every_case = pytest.mark.parametrize("case", CASES, ids=[name.replace(" ", "-") for name in CASES])


def keep_of(case: str, budget: int | str, sinks: int = 2, recent: int = 0) -> Keep:
    policy, options = CASES[case]
    return Keep(policy=policy, budget=budget, sinks=sinks, recent=recent, options=options)


def check_pass(driven: DrivenLayer, count: int, shown: torch.Tensor | None = None) -> None:
    """One pass: the layer's attention and the tokens it holds afterwards are the loops'."""
    out, expected = driven.feed(count, shown)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
    assert driven.kept() == [loop.kept() for loop in driven.loops]


@every_case
@PROPERTY
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    prompt=st.integers(12, 26),
    budget=st.integers(9, 11),
    sinks=st.integers(0, 3),
    recent=st.integers(0, 4),
    steps=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_kept_tokens_and_outputs_equal_loops(case, heads, group, prompt, budget, sinks, recent, steps, seed):
    """Prompt, decode steps, a second prompt, more steps; the budget binds, sinks and newest tokens stay."""
    keep = keep_of(case, budget, sinks, recent)
    driven = DrivenLayer(keep, 1, heads, group, seed=seed)
    check_pass(driven, prompt)
    assert driven.layer.kept == pytest.approx(budget)
    for count in [1] * steps + [5] + [1] * steps:
        check_pass(driven, count)
        guarded = [*range(sinks), *range(driven.layer.seen - recent, driven.layer.seen)]
        assert all(set(guarded) <= set(kept) for kept in driven.kept()[0])
    loop = driven.loops[0]
    added = 0 if loop.acts_always else steps
    assert driven.layer.kept == pytest.approx(budget + added)
    assert driven.layer.kept < driven.layer.seen == prompt + 5 + 2 * steps


@every_case
@PROPERTY
@given(
    counts=st.lists(st.integers(1, 4), min_size=6, max_size=10),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    budget=st.integers(10, 13),
    sinks=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_a_hard_budget_is_held_at_every_pass(case, counts, heads, group, budget, sinks, seed):
    """Room is made before tokens come, in a prompt too, and the policy goes on watching; the loops agree throughout."""
    policy, options = CASES[case]
    driven = DrivenLayer(
        Keep(policy=policy, budget=budget, sinks=sinks, hard=True, options=options), 1, heads, group, seed=seed
    )
    for count in counts:
        check_pass(driven, count)
        assert driven.layer.kept <= budget


@every_case
@PROPERTY
@given(
    prompt=st.integers(1, 8),
    budget=st.sampled_from([8, "1%", "25%", "50%", "100%"]),
    sinks=st.integers(0, 3),
    group=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_short_prompts_keep_a_token_and_never_give_nan(case, prompt, budget, sinks, group, seed):
    """Prompts of 1 to 8 tokens at any budget, then decode steps."""
    driven = DrivenLayer(keep_of(case, budget, sinks), 1, 2, group, seed=seed)
    for count in (prompt, 1, 1, 1):
        check_pass(driven, count)
        assert all(len(kept) >= 1 for kept in driven.kept()[0])


@every_case
@PROPERTY
@given(
    pads=st.lists(st.integers(0, 9), min_size=2, max_size=3),
    left=st.booleans(),
    budget=st.sampled_from([9, "60%"]),
    group=st.integers(1, 2),
    seed=st.integers(0, 10**6),
)
def test_padding_is_never_held_nor_counted(case, pads, left, budget, group, seed):
    """Rows padded on the left or the right: each row is the loops' for its real tokens alone."""
    left = left or "normalized" in case  # sums are divided by slots seen, which holds for padding on the left
    prompt = 16
    shown = torch.ones(len(pads), prompt, dtype=torch.bool)
    for row, count in enumerate(pads):
        shown[row, :count] = not left
        shown[row, prompt - count :] &= left
        if left:
            shown[row, :count] = False
    driven = DrivenLayer(keep_of(case, budget, sinks=1), len(pads), 2, group, seed=seed)
    check_pass(driven, prompt, shown)
    for _ in range(3):
        check_pass(driven, 1)
    for row, count in enumerate(pads):
        hidden = set(range(count) if left else range(prompt - count, prompt))
        assert not any(hidden & set(kept) for kept in driven.kept()[row])


@pytest.mark.parametrize("case", [case for case in CASES if "max" not in case and "even" not in case])
@pytest.mark.parametrize("hard", [False, True])
def test_compiled_kernels_keep_and_attend_as_loops_do(case, hard):
    """A padded batch: a prompt, steps, and further prompts of few queries, attended natively, and of more."""
    policy, options = CASES[case]
    keep = Keep(policy=policy, budget=26, sinks=1, hard=hard, options=options)
    driven = DrivenLayer(keep, 2, 2, 3, dim=16)
    shown = torch.ones(2, 22, dtype=torch.bool)
    shown[0, :7] = False
    check_pass(driven, 22, shown)
    for count in (1, 1, 5, 1, 1, 9, 1, 1):
        check_pass(driven, count)
    assert driven.layer.kept < driven.layer.seen


@every_case
def test_tokens_leave_while_decoding_only_under_policies_that_hold_the_budget_then(case):
    """ "always" policies stand at the budget after every step, "prefill" policies add each generated token."""
    driven = DrivenLayer(keep_of(case, 10), 1, 2, 2)
    driven.feed(20)
    for step in range(1, 6):
        driven.feed(1)
        added = 0 if driven.loops[0].acts_always else step
        assert driven.layer.kept == 10 + added


def test_room_is_made_before_the_next_token_comes_and_a_prompt_ends_at_its_budget():
    """A prompt below the budget grows up to it in decode, and the token that passes it costs the oldest one."""
    driven = DrivenLayer(Keep(policy="fifo", budget=6, sinks=1), 1, 1, 1)
    driven.feed(4)
    kept = []
    for _ in range(4):
        driven.feed(1)
        kept.append(driven.kept()[0][0])
    assert kept == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 2, 3, 4, 5, 6], [0, 3, 4, 5, 6, 7]]


def test_a_decode_step_attends_to_no_more_than_the_budget():
    """With budget 4 and one sink, the fifth token sees the sink, two older ones and itself."""
    driven = DrivenLayer(Keep(policy="fifo", budget=4, sinks=1), 1, 1, 1, dim=4)
    driven.feed(4)
    values = {token.slot: torch.from_numpy(token.value).float() for token in driven.loops[0].held[0]}
    nothing = torch.zeros(1, 1, 1, 4)
    out, _ = driven.feed_tensors(nothing, nothing, nothing)
    torch.testing.assert_close(out[0, 0, 0], (values[0] + values[2] + values[3]) / 4)


LAYERS, AVERAGE, PYRAMID_PROMPT = 4, 12, 30


@pytest.mark.parametrize("rank", range(LAYERS))
@pytest.mark.parametrize("rounding", ["exact", "reference"])
def test_each_layer_of_a_pyramid_keeps_its_own_share(rank, rounding):
    """A layer's budget follows its place among the layers of its entry; what it keeps is the loops' choice."""
    options = {"window": 3, "kernel": 3, "beta": 4, "rounding": rounding}
    keep = Keep(policy="pyramidkv", budget=AVERAGE, sinks=1, options=options)
    if rounding == "exact":
        capacity = pyramid_capacities(AVERAGE, PYRAMID_PROMPT, LAYERS, 3, 4, 2)[rank]
    else:  # base 9, lowest 9 // 4, highest 18 - 2, steps of 14 // 3
        capacity = 3 + [16, 12, 8, 4][rank]
    driven = DrivenLayer(keep, 1, 2, 2, place=Place(index=rank + 5, rank=rank, peers=LAYERS), capacity=capacity)
    for count in (PYRAMID_PROMPT, 1, 1):
        check_pass(driven, count)
    assert driven.layer.kept == capacity + 2


@PROPERTY
@given(tokens=st.integers(5, 20), top=st.integers(1, 30), seed=st.integers(0, 10**6))
def test_among_tokens_last_used_at_the_same_time_the_older_one_leaves(tokens, top, seed):
    """With ``top`` above what is held every token is used by every query, so that LRU is FIFO."""
    lru = DrivenLayer(Keep(policy="lru", budget=4, sinks=1, options={"top": max(top, tokens + 4)}), 1, 2, 2, seed=seed)
    fifo = DrivenLayer(Keep(policy="fifo", budget=4, sinks=1), 1, 2, 2, seed=seed)
    for count in (tokens, 1, 1, 3, 1):
        lru.feed(count)
        fifo.feed(count)
        assert lru.kept() == fifo.kept()


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(2, 12), drop=st.integers(1, 2), seed=st.integers(0, 99))
def test_the_weakest_leave_and_of_equals_the_older(tokens, drop, seed):
    """However many leave: one, as in a decode step, or more."""
    scores = torch.randint(0, 4, (3, tokens), generator=torch.Generator().manual_seed(seed)).float()
    capacity = max(0, tokens - drop)
    kept = strongest(scores, [tokens] * 3, [capacity] * 3)
    for head, index in enumerate(kept):
        order = sorted(range(tokens), key=lambda token: (float(scores[head, token]), token))
        assert index.tolist() == sorted(order[tokens - capacity :])


def test_equal_importance_goes_against_the_older_token():
    """Equal key norms: the newest tokens stay."""
    driven = DrivenLayer(Keep(policy="keynorm", budget=5, sinks=1), 1, 1, 1)
    ones = torch.ones(1, 1, 12, 8)
    driven.feed_tensors(ones, ones, ones)
    assert driven.kept() == [[[0, 8, 9, 10, 11]]]


def test_attention_sinks_of_a_model_take_part_in_the_votes():
    """A logit without a value weighs down the queries that it draws: SnapKV sees attention as the model computes it."""
    keep = Keep(policy="snapkv", budget="100%", sinks=0, options={"window": 2, "kernel": 1})
    step = Step(active=True, prompt=True)
    layer = EvictingLayer(LayerPlan(keep=keep), Place(0), step)
    query, key, value = torch.randn(1, 2, 6, 8), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    sinks, seen = torch.tensor([3.0, -1.0]), []
    layer.evict = lambda *_: None  # type: ignore[method-assign]
    layer.make_room = lambda _: seen.append(layer.held(layer.rows[0]).window()) if layer.rows[0].total else None  # type: ignore
    layer.update(key, value)
    layer.attend(nn.Module(), query, None, lambda *_, **__: (query.transpose(1, 2), None), s_aux=sinks)
    for head in (0, 1):
        expected = torch.zeros(2, 6)
        for place in (0, 1):
            logits = torch.cat([key[0, 0, : 5 + place] @ query[0, head, 4 + place] / 8**0.5, sinks[head : head + 1]])
            expected[place, : 5 + place] = logits.softmax(0)[:-1]
        torch.testing.assert_close(seen[0][0, head], expected.mean(dim=0))


@pytest.mark.parametrize("seed", [0, 1, 2**40, 10**30])
def test_any_seed_draws_priorities_that_are_spread_evenly(seed):
    positions = torch.arange(4000).expand(2, -1)
    held = Held(positions, [4000, 4000], 4000, 0, 3, None, lambda: positions.float(), lambda: positions.float())
    draws = policy_class("random").from_options({"seed": seed}).importance(held)
    assert draws.min() >= 0 and draws.max() < 1
    assert (draws.mean(dim=-1) - 0.5).abs().max() < 0.03
    assert ((draws > 0.5).float().mean(dim=-1) - 0.5).abs().max() < 0.04
    assert abs(float(torch.corrcoef(draws)[0, 1])) < 0.06


# Through a model.


def tiny_llama(layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # larger weights, so that attention is not flat
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    return model


def plan_of(case: str, budget: int | str, chunk: int | None = None, layers: str = "*") -> Plan:
    keep = keep_of(case, budget, sinks=2)
    return Plan(prefill_chunk=chunk, layers=[{"layers": layers, "keep": keep.model_dump()}])


def run_prompts(model: LlamaForCausalLM, plan: Plan, *prompts: torch.Tensor) -> KVCache:
    cache = KVCache(model, plan)
    with attach(model, plan):
        for prompt in prompts:
            forward(model, prompt, cache)
    return cache


def forward(model: LlamaForCausalLM, ids: torch.Tensor, cache: Any, **given: Any) -> torch.Tensor:
    name = output_cache_argument(inspect.signature(model.forward).parameters)
    return model(input_ids=ids, **{name: cache}, **given).logits


def kept_of(cache: KVCache) -> list[Any]:
    return [
        [[row.tail.positions[row.tail.run(head)].tolist() for head in range(2)] for row in layer.rows]
        for layer in cache.tailored()
        if isinstance(layer, EvictingLayer)
    ]


def mean_kept(cache: KVCache) -> float:
    """Tokens per KV head and layer; a pyramid's layers differ."""
    return sum(layer.kept for layer in cache.tailored()) / len(cache.layers)


@every_case
@pytest.mark.parametrize("chunk", [1, 7])
def test_a_prompt_in_chunks_keeps_what_one_pass_keeps(case, chunk):
    """Soft budgets act at the end of the prompt, whatever its chunks, one of a single token among them."""
    model, ids = tiny_llama(), torch.randint(1, 61, (2, 15))
    whole, chunked = (run_prompts(model, plan_of(case, 11, c), ids) for c in (None, chunk))
    assert mean_kept(whole) == 11
    assert kept_of(chunked) == kept_of(whole)


@every_case
def test_a_padded_row_keeps_what_it_keeps_alone(case):
    """Left padding, batch of two: the same tokens and the same logits as each sequence by itself."""
    model, ids, pads = tiny_llama(), torch.randint(1, 61, (2, 24)), 9
    plan = plan_of(case, "50%")
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :pads] = 0
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with attach(model, plan):
        both = model.generate(input_ids=ids, attention_mask=mask, **settings)
        alone = [model.generate(input_ids=ids[row : row + 1, start:], **settings) for row, start in ((0, pads), (1, 0))]
    for row, single in enumerate(alone):
        assert torch.equal(both.sequences[row, 24:], single.sequences[0, -4:])
        logits = torch.stack([both.logits[step][row] - single.logits[step][0] for step in range(4)])
        assert logits.abs().max() < 1e-3


@every_case
def test_two_prompts_in_a_row_are_brought_to_the_budget_each(case):
    model = tiny_llama()
    first, second = torch.randint(1, 61, (1, 20)), torch.randint(1, 61, (1, 13))
    cache = run_prompts(model, plan_of(case, 11), first, second)
    assert cache.get_seq_length() == 33
    assert mean_kept(cache) == pytest.approx(11)
    half = run_prompts(model, plan_of(case, "50%"), first, second)
    assert 16 < mean_kept(half) <= 17  # half of the 33 tokens seen; a pyramid's first layer may have dropped too many


@every_case
def test_layers_that_no_entry_names_are_kept_whole(case):
    """ "Keep layer 0 whole" is an option of every policy: the first entry that names a layer decides."""
    model, ids = tiny_llama(layers=3), torch.randint(1, 61, (1, 26))
    cache = run_prompts(model, plan_of(case, 11, layers="1-2"), ids)
    assert isinstance(cache.layers[0], FullLayer) and cache.layers[0].kept == 26
    assert sum(layer.kept for layer in cache.layers[1:]) == pytest.approx(2 * 11)
    exempt = Plan(layers=[{"layers": "0"}, {"keep": keep_of(case, 11).model_dump()}])
    assert run_prompts(model, exempt, ids).layers[0].kept == 26


def test_every_policy_stands_among_the_cases():
    assert {policy for policy, _ in CASES.values()} >= set(POLICY_NAMES)
