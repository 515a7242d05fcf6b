"""Division of budgets over layers and heads: exact sums, floors, ceilings, order, and the released code's leak."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvtailor.policies.allocation import apportion, waterfill, within
from kvtailor.policies.base import Held
from kvtailor.policies.snapkv import AdaKV, PyramidKV
from reference import pyramid_capacities

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
WEIGHTS = st.lists(st.integers(0, 1000), min_size=1, max_size=12)


@PROPERTY
@given(WEIGHTS, st.integers(0, 500))
def test_apportioned_shares_add_up_and_lie_within_one_of_the_exact_ones(weights, total):
    assume(sum(weights) > 0)
    shares = [weight * total / sum(weights) for weight in weights]
    counts = apportion(shares, total)
    assert sum(counts) == total
    assert all(abs(count - share) < 1 for count, share in zip(counts, shares, strict=True))
    for count, weight in zip(counts, weights, strict=True):
        assert all(count >= other for other, less in zip(counts, weights, strict=True) if less < weight)


@PROPERTY
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=8))
def test_within_keeps_the_sum_as_far_as_the_rooms_allow(pairs):
    counts, rooms = [count for count, _ in pairs], [room for _, room in pairs]
    fitted = within(counts, rooms)
    assert all(0 <= count <= room for count, room in zip(fitted, rooms, strict=True))
    assert sum(fitted) == min(sum(counts), sum(rooms))
    assert all(now >= min(before, room) for now, before, room in zip(fitted, counts, rooms, strict=True))


@PROPERTY
@given(WEIGHTS, st.integers(0, 20), st.integers(0, 60), st.integers(0, 700))
def test_waterfilled_shares_add_up_between_floor_and_ceiling_in_the_order_of_the_weights(
    weights, floor, ceiling, extra
):
    total = len(weights) * min(floor, ceiling) + extra
    shares = waterfill(weights, total, floor, ceiling)
    assert sum(shares) == min(total, len(weights) * ceiling)
    assert all(min(floor, ceiling) <= share <= ceiling for share in shares)
    for share, weight in zip(shares, weights, strict=True):
        assert all(share >= other for other, less in zip(shares, weights, strict=True) if less < weight)


@PROPERTY
@given(st.integers(1, 12), st.integers(0, 9), st.integers(0, 9), st.integers(0, 300))
def test_equal_weights_give_uniform_shares(count, weight, floor, extra):
    shares = waterfill([weight] * count, count * floor + extra, floor, 10**6)
    assert max(shares) - min(shares) <= 1
    assert sum(shares) == count * floor + extra


@PROPERTY
@given(
    st.lists(st.integers(1, 1000), min_size=2, max_size=10), st.integers(0, 5), st.integers(1, 40), st.integers(0, 300)
)
def test_waterfilling_is_proportional_wherever_no_ceiling_is_hit(weights, floor, ceiling, extra):
    """A level exists: every open share is the floor plus level times weight, every other one stands at the ceiling."""
    total = len(weights) * min(floor, ceiling) + extra
    shares = waterfill(weights, total, floor, ceiling)
    spare = [(share - floor, weight) for share, weight in zip(shares, weights, strict=True) if share < ceiling - 1]
    for count, weight in spare:
        for other, theirs in spare:
            assert abs(count - other * weight / theirs) <= 1 + weight / theirs


def test_waterfill_refuses_floors_beyond_the_total():
    with pytest.raises(ValueError, match="a total of 5 cannot give 3 shares 2 each"):
        waterfill([1, 1, 1], 5, 2, 10)


def held_of(lengths: list[int]) -> Held:
    positions = torch.arange(max(lengths)).expand(len(lengths), -1)
    return Held(positions, lengths, max(lengths), 0, 0, None, lambda: positions.float(), lambda: positions.float())


@PROPERTY
@given(
    st.lists(st.integers(12, 40), min_size=1, max_size=6),
    st.integers(6, 30),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    st.integers(0, 10**6),
)
def test_adakv_heads_share_the_layers_budget_exactly(lengths, capacity, sinks, floor, seed):
    """Sums are exact; every head has its window, its sinks, its floor and no more tokens than it holds."""
    window, held = 2, held_of(lengths)
    importance = torch.rand(len(lengths), max(lengths), generator=torch.Generator().manual_seed(seed))
    counts = AdaKV(window=window, floor=floor).head_capacities(importance, held, capacity, sinks, window)
    assert sum(counts) == min(len(lengths) * capacity, sum(lengths))
    for count, length in zip(counts, lengths, strict=True):
        assert min(length, window + max(sinks, int(floor * (capacity - window)))) <= count <= length


@PROPERTY
@given(st.integers(1, 6), st.integers(8, 20), st.integers(0, 10**6))
def test_adakv_gives_uniform_budgets_to_equal_heads_and_more_to_stronger_ones(heads, capacity, seed):
    length, window = 60, 2
    row = torch.rand(length, generator=torch.Generator().manual_seed(seed))
    policy, held = AdaKV(window=window), held_of([length] * heads)
    assert policy.head_capacities(row.expand(heads, -1), held, capacity, 0, window) == [capacity] * heads
    stronger = row * torch.arange(1, heads + 1)[:, None]
    counts = policy.head_capacities(stronger, held, capacity, 0, window)
    assert all(weaker <= stronger + 1 for weaker, stronger in itertools.pairwise(counts))  # one: how equal shares round
    assert counts[-1] >= capacity
    even = AdaKV(window=window, floor=1.0)
    assert even.head_capacities(stronger, held, capacity, 0, window) == [capacity] * heads


@PROPERTY
@given(
    layers=st.integers(1, 40),
    average=st.integers(40, 600),
    seen=st.integers(33, 3000),
    beta=st.integers(1, 30),
    sinks=st.integers(0, 7),
)
def test_pyramid_budgets_add_up_fall_and_fit_the_prompt(layers, average, seen, beta, sinks):
    """Exact rounding: sum = layers * average, never rising, no layer above the prompt or below the protected tokens."""
    policy = PyramidKV(window=32, beta=beta)
    counts = policy.layer_capacities(average, seen, layers, 32 + sinks)
    assert counts == pyramid_capacities(average, seen, layers, 32, beta, sinks + 1)
    assert sum(counts) == layers * average
    assert counts == sorted(counts, reverse=True)
    assert min(counts) >= 32 + sinks + 1
    if seen > average:
        assert max(counts) <= seen


@pytest.mark.parametrize(
    ("average", "window", "leak"),
    [(96, 32, 0.151), (128, 32, 0.113), (64, 8, 0.117), (256, 32, 0.045), (2048, 32, 0.005)],
)
def test_reference_rounding_leaks_what_the_released_code_leaks(average, window, leak):
    """32 layers, 8192 tokens: the floored step keeps more than the nominal average; exact rounding does not."""
    released = PyramidKV(window=window, rounding="reference").layer_capacities(average, 8192, 32, window)
    assert sum(released) / (32 * average) - 1 == pytest.approx(leak, abs=5e-4)
    exact = PyramidKV(window=window).layer_capacities(average, 8192, 32, window)
    assert sum(exact) == 32 * average


def test_reference_rounding_gives_the_released_codes_branches():
    """Short prompts get uniform budgets, and the last layer of a budget of 128 gets 33 tokens instead of 4."""
    policy = PyramidKV(window=32, rounding="reference")
    assert policy.layer_capacities(128, 100, 32, 32) == [128] * 32
    assert policy.layer_capacities(128, 191, 32, 32) == [128] * 32
    budgets = policy.layer_capacities(128, 8192, 32, 32)
    assert (budgets[0] - 32, budgets[-1] - 32) == (188, 33)
