"""The C++ kernels on every instruction set of this processor: equal to float64 on dequantised numbers, or an error."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtailor.arranged import Arranged, arrange
from kvtailor.errors import KernelError
from kvtailor.formats import PackedFormat, default_group
from kvtailor.kernels import _native, native
from kvtailor.kernels.native import Weighing
from kvtailor.quantize.pack import pack, unpack, widest_channels

PATHS = tuple(_native.instruction_sets())
PROPERTY = settings(max_examples=60, deadline=None)
BITS = (1, 2, 3, 4, 8)
DIMS = (16, 64, 80, 96, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Largest error allowed, relative to the norm of the output.
TOLERANCE = {"exact": 5e-4, "default": 2e-2, "fast": 1e-1}

paths = pytest.mark.parametrize("path", PATHS)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed_pair(
    seed: int, bits: int, form: str, heads: int, length: int, key_dim: int, value_dim: int, outliers: int = 0
) -> tuple[Arranged, Arranged]:
    """Keys with a few wide channels, and values, packed and arranged, cut to ``length`` tokens."""
    whole = -(-length // 64) * 64
    wide = 1 + 4 * (numbers(seed, key_dim) > 1)
    keys, values = numbers(seed + 1, heads, whole, key_dim) * wide + 0.3, numbers(seed + 2, heads, whole, value_dim)
    rotated = form == "rotated"
    levels = "centroid" if bits == 1 else "minmax"
    value_format = PackedFormat(bits, "token", default_group(value_dim), levels, rotated)  # type: ignore[arg-type]
    key_format = (
        PackedFormat(bits, "token", default_group(key_dim), levels, True)  # type: ignore[arg-type]
        if rotated
        else PackedFormat(bits, "channel", 32 << seed % 2, levels, False)  # type: ignore[arg-type]
    )
    channels = widest_channels(keys, outliers) if outliers and not rotated else None
    return (
        arrange(pack(keys, key_format, channels), values=False).narrow(length),
        arrange(pack(values, value_format), values=True).narrow(length),
    )


def expected(
    query: Tensor, keys: Tensor, values: Tensor, weighing: Weighing, slots: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of one row in float64: query (Hq, q, Dk); keys, values (Hkv, n, D); slots (Hkv, n)."""
    group = query.shape[0] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(group, dim=0) for x in (keys, values))
    logits = query.double() @ keys.mT * weighing.scale
    if weighing.softcap:
        logits = weighing.softcap * torch.tanh(logits / weighing.softcap)
    slots = slots.repeat_interleave(group, dim=0)[:, None]  # (Hq, 1, n)
    at = weighing.first + torch.arange(query.shape[1])[:, None]
    hidden = torch.zeros_like(logits, dtype=torch.bool)
    if weighing.mask is not None:
        shown = weighing.mask[0].expand(query.shape[0], query.shape[1], -1)
        hidden = ~shown.gather(2, slots.expand(-1, query.shape[1], -1))
    else:
        hidden = hidden | (slots > at) if weighing.causal else hidden
        hidden = hidden | (slots <= at - weighing.window) if weighing.window else hidden
    if weighing.bias is not None:
        table = weighing.bias[0].expand(query.shape[0], query.shape[1], -1)
        logits = logits + table.gather(2, slots.expand(-1, query.shape[1], -1)).double()
    logits = logits.masked_fill(hidden, -torch.inf)
    lse = logits.logsumexp(dim=-1)
    probs = (logits - lse.masked_fill(lse.isinf(), 0)[..., None]).exp()
    if sinks is not None:
        probs = probs * torch.sigmoid(lse - sinks.double()[:, None])[..., None]
    return probs @ values, lse


def assert_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = (found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    assert float(error) <= tolerance, float(error)


def run(
    path: str, rows: list[native.Row], query: Tensor, weighing: Weighing, dim: int, **given: Any
) -> tuple[Tensor, Tensor]:
    out = query.new_full((*query.shape[:3], dim), torch.nan)
    lse = torch.full(query.shape[:3], torch.nan)
    native.attend(path, rows, query, out, weighing, lse=lse, **given)
    return out, lse


@paths
@PROPERTY
@given(
    seed=st.integers(0, 999),
    dtype=st.sampled_from(DTYPES),
    dims=st.tuples(st.sampled_from(DIMS), st.sampled_from(DIMS)),
    heads=st.integers(1, 3),
    group=st.integers(1, 8),
    count=st.sampled_from((1, 1, 2, 5, 40)),
    lengths=st.lists(st.integers(0, 200), min_size=3, max_size=3),
    softcap=st.sampled_from((0.0, 5.0)),
    has_sinks=st.booleans(),
    sees=st.sampled_from(("all", "causal", "window", "mask", "bias")),
)
def test_dense_attention_over_ragged_heads_equals_float64(
    path, seed, dtype, dims, heads, group, count, lengths, softcap, has_sinks, sees
):
    lengths = [max(n, 1) for n in lengths[:heads]]
    rooms = [n + seed % 3 for n in lengths]
    starts = [sum(rooms[:h]) for h in range(heads)]
    total, most = sum(rooms), max(lengths)
    keys, values = numbers(seed, total, dims[0]).to(dtype), numbers(seed + 1, total, dims[1]).to(dtype)
    positions = torch.zeros(total, dtype=torch.int32)
    for start, n in zip(starts, lengths, strict=True):
        chosen = torch.randperm(most + 5, generator=torch.Generator().manual_seed(seed + n))[:n]
        positions[start : start + n] = chosen.sort().values.int()
    slots = most + 5
    query = numbers(seed + 2, 1, heads * group, count, dims[0])
    weighing = Weighing(
        scale=dims[0] ** -0.5,
        softcap=softcap,
        causal=sees in ("causal", "window"),
        window=7 if sees == "window" else 0,
        first=slots - count,
        mask=numbers(seed, 1, heads * group, count, slots) > 0 if sees == "mask" else None,
        bias=numbers(seed, 1, 1, count, slots) if sees == "bias" else None,
    )
    sinks = numbers(seed, heads * group) if has_sinks else None
    tail = native.hand_tail(keys, values, positions, starts, rooms)
    out, lse = run(path, [([], tail, lengths)], query, weighing, dims[1], sinks=sinks)
    for h, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        own = slice(h * group, (h + 1) * group)
        held = slice(start, start + n)
        of_heads = replace(weighing, mask=None if weighing.mask is None else weighing.mask[:, own])
        wanted, wanted_lse = expected(
            query[0, own], keys[held][None], values[held][None], of_heads, positions[held].long()[None],
            None if sinks is None else sinks[own],
        )  # fmt: skip
        torch.testing.assert_close(out[0, own].double(), wanted, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(lse[0, own].double(), wanted_lse, atol=2e-5, rtol=1e-5)


@paths
@PROPERTY
@given(
    seed=st.integers(0, 999),
    bits=st.sampled_from(BITS),
    form=st.sampled_from(("rotated", "channel")),
    precision=st.sampled_from(("exact", "default", "fast")),
    dim=st.sampled_from(DIMS),
    heads=st.integers(1, 3),
    group=st.integers(1, 8),
    count=st.sampled_from((1, 1, 2, 5, 40)),
    length=st.one_of(st.integers(1, 300), st.sampled_from((64, 128))),
    outliers=st.sampled_from((0, 0, 3)),
)
def test_attention_on_codes_equals_float64_on_what_they_stand_for(
    path, seed, bits, form, precision, dim, heads, group, count, length, outliers
):
    keys, values = packed_pair(seed, bits, form, heads, length, dim, dim, outliers)
    query = numbers(seed + 3, 1, heads * group, count, dim)
    weighing = Weighing(scale=dim**-0.5, causal=count > 1, first=max(0, length - count))
    segment = native.hand_segment(keys, values, range(length))
    tail = native.hand_tail(torch.zeros(0, dim), torch.zeros(0, dim), None, [0] * heads, [0] * heads)
    out, lse = run(path, [([segment], tail, [0] * heads)], query, weighing, dim, precision=precision)
    wanted, wanted_lse = expected(
        query[0], unpack(keys), unpack(values), weighing, torch.arange(length).expand(heads, -1)
    )
    assert_near(out[0], wanted, TOLERANCE[precision])
    torch.testing.assert_close(lse[0].double(), wanted_lse, atol=0.2 if precision == "fast" else 5e-3, rtol=0.01)


@paths
@pytest.mark.parametrize("form", ["rotated", "channel"])
@pytest.mark.parametrize("count", [1, 30])
def test_segments_of_every_form_and_the_tail_share_one_softmax(path, form, count):
    heads, group, dim = 2, 3, 64
    sinks = numbers(0, heads, 4, dim), numbers(1, heads, 4, dim)
    pairs = [
        packed_pair(seed, bits, form, heads, n, dim, dim) for seed, bits, n in ((2, 4, 128), (3, 8, 64), (4, 2, 30))
    ]
    rest = numbers(5, heads, 11, dim), numbers(6, heads, 11, dim)
    keys = torch.cat([sinks[0], *(unpack(k) for k, _ in pairs), rest[0]], dim=1)
    values = torch.cat([sinks[1], *(unpack(v) for _, v in pairs), rest[1]], dim=1)
    ends = [4, 132, 196, 226, 237]
    spans = [range(a, b) for a, b in pairwise(ends)]
    segments = [native.hand_segment(*sinks, range(4))]
    segments += [native.hand_segment(k, v, span) for (k, v), span in zip(pairs, spans, strict=False)]
    positions = torch.tensor([*spans[-1], *spans[-1]], dtype=torch.int32)
    tail = native.hand_tail(rest[0].flatten(0, 1), rest[1].flatten(0, 1), positions, [0, 11], [11, 11])
    query = numbers(7, 1, heads * group, count, dim)
    weighing = Weighing(scale=dim**-0.5, causal=True, first=237 - count)
    out, lse = run(path, [(segments, tail, [11, 11])], query, weighing, dim, precision="exact")
    wanted, wanted_lse = expected(query[0], keys, values, weighing, torch.arange(237).expand(heads, -1))
    assert_near(out[0], wanted, 5e-4)
    torch.testing.assert_close(lse[0].double(), wanted_lse, atol=2e-3, rtol=1e-3)


@paths
def test_rows_of_a_batch_differ_in_length_and_threads_change_nothing(path):
    heads, group, dim = 2, 4, 128
    rows: list[native.Row] = []
    for seed, length in enumerate((2000, 1, 70)):
        k, v = numbers(seed, heads * length, dim), numbers(seed + 9, heads * length, dim)
        starts = [h * length for h in range(heads)]
        rows.append(([], native.hand_tail(k, v, None, starts, [length] * heads), [length] * heads))
    query = numbers(5, 3, heads * group, 1, dim)
    weighing = Weighing(scale=dim**-0.5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, _ = run(path, rows, query, weighing, dim)
        torch.set_num_threads(2)
        two, _ = run(path, rows, query, weighing, dim)
    finally:
        torch.set_num_threads(before)
    for number, length in enumerate((2000, 1, 70)):
        k, v = (numbers(number + 9 * i, heads * length, dim).view(heads, length, dim) for i in (0, 1))
        wanted, _ = expected(query[number], k, v, weighing, torch.arange(length).expand(heads, -1))
        torch.testing.assert_close(one[number].double(), wanted, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(two[number], one[number], atol=1e-6, rtol=1e-5)


@paths
@pytest.mark.parametrize("threads", [-1, 0, 20000, 2**31 - 1])
def test_no_number_of_threads_is_too_large_or_too_small(path, threads):
    heads, length, dim = 2, 5000, 16
    keys, values = numbers(0, heads, length, dim), numbers(1, heads, length, dim)
    rows: list[native.Row] = [([native.hand_segment(keys, values, range(length))], None, [])]
    query = numbers(2, 1, heads * 5, 1, dim)

    def found(threads: int) -> list[Tensor]:
        out, scores, sums = torch.empty_like(query), torch.empty(1, 10, 1, length), torch.zeros(1, 10, length)
        weighing = (0.25, 0.0, False, 0, 0, None, None)
        _native.attend(path, rows, query, out, None, None, *weighing, "exact", threads)
        _native.scores(path, rows, query, scores, *weighing, "exact", threads)
        _native.mass(path, rows, query, sums, None, *weighing, threads)
        return [out, scores, sums]

    for many, one in zip(found(threads), found(1), strict=True):
        torch.testing.assert_close(many, one, atol=1e-6, rtol=1e-5)


@paths
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    bits=st.sampled_from((0, 4)),
    heads=st.integers(1, 2),
    group=st.integers(1, 4),
    count=st.sampled_from((3, 20, 70, 300)),
    length=st.integers(1, 450),
    window=st.sampled_from((0, 1, 100)),
)
def test_prompts_of_grouped_heads_see_what_slots_show_them_however_they_are_cut(
    path, seed, bits, heads, group, count, length, window
):
    dim, slots = 16, length + 60
    if bits:
        codes = packed_pair(seed, bits, "rotated", heads, length, dim, dim)
        keys, values = unpack(codes[0]), unpack(codes[1])
    else:
        codes = keys, values = numbers(seed, heads, length, dim), numbers(seed + 1, heads, length, dim)
    positions = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:length].sort().values
    rows: list[native.Row] = [([native.hand_segment(*codes, positions.int())], None, [])]
    query = numbers(seed + 2, 1, heads * group, count, dim)
    weighing = Weighing(scale=0.25, causal=True, window=window, first=seed % slots)
    out, lse = run(path, rows, query, weighing, dim, precision="exact")
    mass = native.mass(path, rows, query, weighing, length)
    of_heads = positions.expand(heads, -1)
    wanted, wanted_lse = expected(query[0], keys, values, weighing, of_heads)
    probs, _ = expected(query[0], keys, torch.eye(length).expand(heads, -1, -1), weighing, of_heads)
    torch.testing.assert_close(out[0].double(), wanted, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse[0].double(), wanted_lse, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(mass[0].double(), probs.sum(dim=1), atol=1e-4, rtol=1e-3)


@paths
@PROPERTY
@given(
    seed=st.integers(0, 999),
    bits=st.sampled_from((0, *BITS)),
    dim=st.sampled_from((64, 80)),
    group=st.integers(1, 4),
    count=st.sampled_from((1, 7, 90)),
    length=st.integers(1, 300),
)
def test_mass_is_what_each_token_gets_of_all_queries(path, seed, bits, dim, group, count, length):
    heads = 2
    query = numbers(seed + 3, 1, heads * group, count, dim)
    weighing = Weighing(scale=dim**-0.5, causal=True, first=max(0, length - count))
    if bits:
        codes = packed_pair(seed, bits, "rotated", heads, length, dim, dim)
        keys, segment = unpack(codes[0]), native.hand_segment(*codes, range(length))
    else:
        keys = numbers(seed, heads, length, dim)
        segment = native.hand_segment(keys, keys, range(length))
    tail = native.hand_tail(torch.zeros(0, dim), torch.zeros(0, dim), None, [0] * heads, [0] * heads)
    found = native.mass(path, [([segment], tail, [0] * heads)], query, weighing, length)
    logits = query[0].double() @ keys.double().repeat_interleave(group, dim=0).mT * weighing.scale
    at = weighing.first + torch.arange(count)[:, None]
    probs = logits.masked_fill(torch.arange(length) > at, -torch.inf).softmax(dim=-1)
    torch.testing.assert_close(found[0].double(), probs.sum(dim=1), atol=1e-4 * count, rtol=1e-3)


@paths
@PROPERTY
@given(
    seed=st.integers(0, 999),
    bits=st.sampled_from((0, 2, 8)),
    group=st.integers(1, 5),
    count=st.sampled_from((1, 2, 9)),
    sealed=st.integers(1, 150),
    lengths=st.lists(st.integers(0, 90), min_size=2, max_size=2),
    softcap=st.sampled_from((0.0, 5.0)),
    sees=st.sampled_from(("all", "causal", "window", "mask")),
)
def test_scores_are_the_weighed_logits_and_hidden_behind_the_tokens_of_a_shorter_head(
    path, seed, bits, group, count, sealed, lengths, softcap, sees
):
    heads, dim = 2, 64
    if bits:
        codes = packed_pair(seed, bits, "rotated", heads, sealed, dim, dim)
        keys, segment = unpack(codes[0]), native.hand_segment(*codes, range(sealed))
    else:
        keys = numbers(seed, heads, sealed, dim)
        segment = native.hand_segment(keys, keys, range(sealed))
    rest = numbers(seed + 1, heads, 90, dim)
    positions = torch.arange(sealed, sealed + 180, 2, dtype=torch.int32).repeat(heads)
    tail = native.hand_tail(rest.flatten(0, 1), rest.flatten(0, 1), positions, [0, 90], [90, 90])
    query, slots = numbers(seed + 2, 1, heads * group, count, dim), sealed + 180
    weighing = Weighing(
        scale=dim**-0.5,
        softcap=softcap,
        causal=sees in ("causal", "window"),
        window=70 if sees == "window" else 0,
        first=sealed + 50,
        mask=numbers(seed, 1, heads * group, count, slots) > 0 if sees == "mask" else None,
    )
    longest = sealed + max(lengths)
    out = torch.full((1, heads * group, count, longest), torch.nan)
    native.scores(path, [([segment], tail, lengths)], query, out, weighing, "exact")
    places, at = torch.arange(longest), weighing.first + torch.arange(count)[:, None]
    slot = torch.cat([places[:sealed], positions[: max(lengths)].long()])
    for head in range(heads * group):
        hidden = (places >= sealed + lengths[head // group]).expand(count, -1)
        hidden = hidden | (slot > at) if weighing.causal else hidden
        hidden = hidden | (slot <= at - weighing.window) if weighing.window else hidden
        hidden = hidden | ~weighing.mask[0, head][:, slot] if weighing.mask is not None else hidden
        own = torch.cat([keys[head // group], rest[head // group]])[:longest].double()
        wanted = query[0, head].double() @ own.T * weighing.scale
        wanted = softcap * torch.tanh(wanted / softcap) if softcap else wanted
        torch.testing.assert_close(out[0, head].double(), wanted.masked_fill(hidden, -1e30), atol=5e-3, rtol=5e-3)


@paths
def test_a_query_that_may_see_nothing_gets_zero(path):
    segment = native.hand_segment(numbers(0, 1, 70, 16), numbers(1, 1, 70, 16), range(70))
    tail = native.hand_tail(torch.zeros(0, 16), torch.zeros(0, 16), None, [0], [0])
    mask = torch.zeros(1, 1, 2, 70, dtype=torch.bool)
    mask[..., 1, 3] = True
    out, lse = run(path, [([segment], tail, [0])], numbers(2, 1, 2, 2, 16), Weighing(1.0, mask=mask), 16)
    assert torch.equal(out[0, :, 0], torch.zeros(2, 16)) and bool((lse[0, :, 0] == -torch.inf).all())
    torch.testing.assert_close(out[0, 0, 1], numbers(1, 1, 70, 16)[0, 3])


def segment_of(length: int = 5, dim: int = 16, heads: int = 1) -> Any:
    return native.hand_segment(numbers(0, heads, length, dim), numbers(1, heads, length, dim), range(length))


def tail_of(dim: int = 16, heads: int = 1) -> Any:
    return native.hand_tail(
        torch.zeros(4 * heads, dim), torch.zeros(4 * heads, dim), None, [4 * h for h in range(heads)], [4] * heads
    )


def attend_with(**changed: Any) -> None:
    given = {
        "path": "plain",
        "rows": [([segment_of()], tail_of(), [2])],
        "query": numbers(2, 1, 2, 1, 16),
        "out": torch.zeros(1, 2, 1, 16),
        "weighing": Weighing(1.0),
        **changed,
    }
    native.attend(**given)


@pytest.mark.parametrize("path", PATHS)
def test_keys_alone_give_scores_and_nothing_else(path):
    """A segment of packed keys without values, as an index holds them."""
    keys = numbers(0, 2, 128, 32)
    codes = arrange(pack(keys, PackedFormat(8, "channel", 64, "minmax", False)), False)
    row, query, out = ([native.hand_keys(codes)], None, []), numbers(1, 1, 4, 1, 32), torch.empty(1, 4, 1, 128)
    native.scores(path, [row], query, out, Weighing(1.0), "exact")
    wanted = query.view(2, 2, 32).double() @ unpack(codes).double().mT
    assert_near(out.view(2, 2, 128), wanted, 1e-3)
    with pytest.raises(KernelError, match="keys alone"):
        native.attend(path, [row], query, torch.empty_like(query), Weighing(1.0))


def test_the_calls_that_are_changed_below_are_right_as_they_stand():
    attend_with()


BAD_CALLS = {
    "unknown kernels": ({"path": "sse9"}, "sse9"),
    "precision": ({"precision": "best"}, "precision is 'best'; allowed: exact, default and fast"),
    "query dtype": ({"query": torch.zeros(1, 2, 1, 16, dtype=torch.float64)}, "query: dtype"),
    "query shape": ({"query": torch.zeros(2, 1, 16)}, "query: shape is (2, 1, 16)"),
    "query batch": ({"query": torch.zeros(2, 2, 1, 16)}, "query: shape"),
    "query channels": ({"query": torch.zeros(1, 2, 1, 32)}, "16 channels"),
    "no query": ({"query": torch.zeros(1, 2, 0, 16)}, "query"),
    "heads": (
        {"query": torch.zeros(1, 3, 1, 16), "rows": [([segment_of(heads=2)], tail_of(heads=2), [1, 1])]},
        "3 heads for 2",
    ),
    "output shape": ({"out": torch.zeros(1, 2, 1, 32)}, "out: shape"),
    "output of one head": ({"out": torch.zeros(1, 1, 1, 16).expand(-1, 2, -1, -1)}, "out: the stride of axis 1 is 0"),
    "output dtype": ({"out": torch.zeros(1, 2, 1, 16, dtype=torch.int32)}, "out: dtype"),
    "nothing held": ({"rows": [([], None, [])]}, "holds nothing"),
    "length": ({"rows": [([], tail_of(), [5])]}, "holds 5 tokens in room for 4"),
    "negative length": ({"rows": [([], tail_of(), [-1])]}, "holds -1"),
    "lengths": ({"rows": [([], tail_of(), [1, 1])]}, "2 lengths"),
    "two sizes": ({"rows": [([segment_of(dim=32)], tail_of(), [1])]}, "channels"),
    "mask columns": ({"weighing": Weighing(1.0, mask=torch.ones(1, 1, 1, 4, dtype=torch.bool))}, "mask: 4 columns"),
    "mask dtype": ({"weighing": Weighing(1.0, mask=torch.ones(1, 1, 1, 9))}, "mask: dtype"),
    "mask of signed bytes": (
        {"weighing": Weighing(1.0, mask=torch.ones(1, 1, 1, 9, dtype=torch.int8))},
        "mask: dtype is not allowed; allowed: bool and uint8",
    ),
    "mask of 8-bit floats": (
        {"weighing": Weighing(1.0, mask=torch.ones(1, 1, 1, 9).to(torch.float8_e4m3fn))},
        "mask: dtype is not allowed; allowed: bool and uint8",
    ),
    "mask shape": ({"weighing": Weighing(1.0, mask=torch.ones(1, 9, dtype=torch.bool))}, "mask: shape"),
    "mask heads": ({"weighing": Weighing(1.0, mask=torch.ones(1, 3, 1, 9, dtype=torch.bool))}, "mask: axis 1"),
    "bias dtype": ({"weighing": Weighing(1.0, bias=torch.ones(1, 1, 1, 9, dtype=torch.bfloat16))}, "bias: dtype"),
    "scale": ({"weighing": Weighing(float("nan"))}, "scale is nan"),
    "window": ({"weighing": Weighing(1.0, window=-3)}, "window is -3"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks: shape"),
    "lse": ({"lse": torch.zeros(1, 2)}, "lse: shape"),
    "query of NaN": ({"query": torch.full((1, 2, 1, 16), torch.nan)}, "not a finite number"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_is_one_clear_error(name):
    changed, message = BAD_CALLS[name]
    with pytest.raises(KernelError) as error:
        attend_with(**changed)
    assert message in str(error.value)


@paths
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("count", [1, 20])
def test_keys_that_are_no_numbers_are_an_error(path, bad, count):
    keys = numbers(0, 1, 70, 16)
    keys[0, 66, 3] = bad
    segment = native.hand_segment(keys, numbers(1, 1, 70, 16), range(70))
    with pytest.raises(KernelError, match="not a finite number"):
        attend_with(
            path=path,
            rows=[([segment], tail_of(), [0])],
            query=numbers(2, 1, 2, count, 16),
            out=torch.zeros(1, 2, count, 16),
        )


@paths
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("where", ["query", "keys", "codes"])
def test_scores_and_mass_of_what_is_no_number_are_an_error(path, bad, count, where):
    query, keys = numbers(2, 1, 2, count, 16), numbers(0, 1, 70, 16)
    segment = native.hand_segment(keys, numbers(1, 1, 70, 16), range(70))
    if where == "query":
        query[0, 1, -1, 5] = bad
    elif where == "keys":
        keys[0, 66, 3] = bad
    else:
        codes, values = packed_pair(0, 4, "rotated", 1, 70, 16, 16)
        codes.zero[0, 1, 0, 3] = bad
        segment = native.hand_segment(codes, values, range(70))
    rows: list[native.Row] = [([segment], tail_of(), [0])]
    with pytest.raises(KernelError, match="not a finite number"):
        native.scores(path, rows, query, torch.zeros(1, 2, count, 70), Weighing(1.0))
    with pytest.raises(KernelError, match="not a finite number"):
        native.mass(path, rows, query, Weighing(1.0), 70)


@paths
def test_a_key_that_is_no_number_is_passed_over_where_no_query_sees_it(path):
    keys, query = numbers(0, 1, 70, 16), numbers(2, 1, 2, 20, 16)
    keys[0, 66, 3] = torch.nan
    rows: list[native.Row] = [([native.hand_segment(keys, numbers(1, 1, 70, 16), range(70))], tail_of(), [0])]
    out, weighing = torch.zeros(1, 2, 20, 70), Weighing(1.0, causal=True, first=46)
    native.scores(path, rows, query, out, weighing)
    assert bool((out[..., 66:] == -1e30).all()) and bool((out[..., :46] > -1e29).all())
    assert bool(native.mass(path, rows, query, weighing, 70).isfinite().all())


BAD_TENSORS = {
    "dtype": (
        lambda: native.hand_segment(torch.zeros(1, 5, 16).double(), torch.zeros(1, 5, 16), range(5)),
        "keys: dtype",
    ),
    "axes": (lambda: native.hand_segment(torch.zeros(5, 16), torch.zeros(5, 16), range(5)), "keys: shape"),
    "tokens": (lambda: native.hand_segment(torch.zeros(1, 5, 16), torch.zeros(1, 6, 16), range(5)), "the same number"),
    "no tokens": (lambda: native.hand_segment(torch.zeros(1, 0, 16), torch.zeros(1, 0, 16), range(0)), "0 tokens"),
    "no heads": (lambda: native.hand_segment(torch.zeros(0, 5, 16), torch.zeros(0, 5, 16), range(5)), "0 heads"),
    "channels": (lambda: native.hand_segment(torch.zeros(1, 5, 20), torch.zeros(1, 5, 20), range(5)), "20 channels"),
    "stride": (lambda: native.hand_segment(torch.zeros(1, 16, 5).mT, torch.zeros(1, 5, 16), range(5)), "stride"),
    "negative slot": (lambda: segment_at(torch.tensor([0, 1, -1, 2, 3], dtype=torch.int32)), "position -1"),
    "slot twice": (lambda: segment_at(torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32)), "position 1 behind 1"),
    "falling slots": (lambda: segment_at(torch.tensor([0, 1, 5, 2, 3], dtype=torch.int32)), "position 2 behind 5"),
    "first slot": (
        lambda: native.hand_segment(torch.zeros(1, 5, 16), torch.zeros(1, 5, 16), range(2**31 - 4, 2**31 + 1)),
        "first slot is 2147483644 for 5 tokens; allowed: 0 to 2147483642",
    ),
    "first slot of 64 bits": (
        lambda: native.hand_segment(torch.zeros(1, 5, 16), torch.zeros(1, 5, 16), range(2**63 - 5, 2**63)),
        "first slot is 9223372036854775803",
    ),
    "negative first slot": (
        lambda: native.hand_segment(torch.zeros(1, 5, 16), torch.zeros(1, 5, 16), range(-1, 4)),
        "first slot is -1",
    ),
    "negative appended slot": (lambda: append_at(-5), "first slot is -5 for 2 tokens; allowed: 0 to 2147483645"),
    "appended slot": (lambda: append_at(2**31 - 2), "first slot is 2147483646"),
    "appended slot of 64 bits": (lambda: append_at(2**33), "first slot is 8589934592"),
    "slots": (lambda: segment_at(torch.zeros(4, dtype=torch.int32)), "positions: shape"),
    "slot dtype": (lambda: segment_at(torch.zeros(5, dtype=torch.int64)), "positions: dtype"),
    "rows": (lambda: native.hand_tail(torch.zeros(4, 16), torch.zeros(4, 16), None, [2], [3]), "rows 2 to 5 of 4"),
    "rows of two heads": (
        lambda: native.hand_tail(torch.zeros(9, 16), torch.zeros(9, 16), None, [6, 0, 3], [3, 4, 3]),
        "heads 1 and 2 both own row 3",
    ),
    "starts": (lambda: native.hand_tail(torch.zeros(4, 16), torch.zeros(4, 16), None, [0, 2], [2]), "2 starts"),
}


def segment_at(positions: Tensor) -> Any:
    return native.hand_segment(torch.zeros(1, 5, 16), torch.zeros(1, 5, 16), positions)


def append_at(first: int) -> None:
    positions = torch.zeros(4, dtype=torch.int32)
    tail = native.hand_tail(torch.zeros(4, 16), torch.zeros(4, 16), positions, [0], [4])
    tail.append(torch.zeros(1, 2, 16), torch.zeros(1, 2, 16), first, [1])


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors_are_one_clear_error(name):
    make, message = BAD_TENSORS[name]
    with pytest.raises(KernelError) as error:
        make()
    assert message in str(error.value)


def test_slots_reach_up_to_the_largest_number_of_32_bits():
    native.hand_segment(torch.zeros(1, 5, 16), torch.zeros(1, 5, 16), range(2**31 - 6, 2**31 - 1))
    append_at(2**31 - 3)


def test_heads_without_room_may_begin_anywhere_in_a_tail():
    native.hand_tail(torch.zeros(4, 16), torch.zeros(4, 16), None, [0, 2, 0, 4], [4, 0, 0, 0])


CODES = packed_pair(0, 3, "rotated", 2, 128, 64, 64)[0]
CHANNELS = packed_pair(1, 2, "channel", 2, 128, 64, 64, outliers=2)[0]

BAD_CODES = {
    "length of a block": (replace(CODES, planes=(CODES.planes[0][..., :-64], CODES.planes[1])), "codes: shape"),
    "blocks": (replace(CODES, length=129), "codes: shape"),
    "length": (replace(CODES, length=0), "packed tokens: 0"),
    "length of 64 bits": (replace(CODES, length=2**63 - 1), "packed tokens: 9223372036854775807"),
    "no heads": (
        replace(
            CODES, planes=tuple(plane[:0] for plane in CODES.planes), scale=CODES.scale[:0], zero=CODES.zero[:0]
        ),
        "codes of 0 heads",
    ),
    "planes": (replace(CODES, planes=CODES.planes[:1]), "planes: 1"),
    "plane dtype": (replace(CODES, planes=tuple(p.view(torch.int8) for p in CODES.planes)), "codes: dtype"),
    "scales": (replace(CODES, scale=CODES.scale[..., :32]), "scales: shape"),
    "scale dtype": (replace(CODES, scale=CODES.scale.float()), "scales: dtype"),
    "two dtypes": (replace(CODES, scale=CODES.scale.bfloat16()), "different dtypes"),
    "bits": (replace(CODES, format=replace(CODES.format, bits=5)), "bits is 5"),
    "group": (replace(CODES, format=replace(CODES.format, group=8)), "group is 8"),
    "channels of a head": (replace(CODES, dim=72), "72 channels"),
    "outlier channel": (
        replace(CHANNELS, outlier_channels=torch.full_like(CHANNELS.outlier_channels, 64)), "outlier channel 64"
    ),
    "outlier channel twice": (
        replace(CHANNELS, outlier_channels=torch.tensor([[3, 8], [5, 5]], dtype=torch.int16)),
        "outlier channel 5 of head 1 twice",
    ),
    "no outliers": (
        replace(CHANNELS, outlier_channels=CHANNELS.outlier_channels[:, :0], outliers=CHANNELS.outliers[..., :0]),
        "outlier channels: shape is (2, 0); allowed: (2, 1 or more)",
    ),
    "outlier channels of all heads": (
        replace(CHANNELS, outlier_channels=CHANNELS.outlier_channels[0]), "outlier channels: shape is (2)"
    ),
    "rotated outliers": (replace(CHANNELS, format=replace(CHANNELS.format, rotated=True)), "rotated"),
    "outliers": (replace(CHANNELS, outliers=None), "come together"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CODES)
def test_bad_codes_are_one_clear_error(name):
    codes, message = BAD_CODES[name]
    with pytest.raises(KernelError) as error:
        native.hand_codes(codes)
    assert message in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, -6e-8])
def test_scales_of_values_are_finite_and_not_negative_and_their_zeros_finite(dtype, bad):
    keys, values = packed_pair(2, 4, "rotated", 2, 128, 64, 64)
    scale, zero = values.scale.to(dtype), values.zero.to(dtype)
    scale[0, 0] = -0.0
    native.hand_segment(keys, replace(values, scale=scale, zero=zero), range(128))
    wrong = scale.clone()
    wrong[1, 1, 0, 63] = bad
    with pytest.raises(KernelError, match="scales of head 1: one is negative or not finite"):
        native.hand_segment(keys, replace(values, scale=wrong, zero=zero), range(128))
    wrong = zero.clone()
    wrong[1, 1, 0, 63] = bad
    if bad == -6e-8:
        native.hand_segment(keys, replace(values, scale=scale, zero=wrong), range(128))
        return
    with pytest.raises(KernelError, match="zeros of head 1: one is not finite"):
        native.hand_segment(keys, replace(values, scale=scale, zero=wrong), range(128))


@PROPERTY
@given(
    seed=st.integers(0, 999),
    bits=st.sampled_from(BITS),
    form=st.sampled_from(("rotated", "channel")),
    dim=st.sampled_from(DIMS),
    length=st.integers(1, 200),
)
def test_arranging_loses_nothing(seed, bits, form, dim, length):
    for codes in packed_pair(seed, bits, form, 2, length, dim, dim):
        there = arrange(codes.packed(), codes.values)
        assert all(torch.equal(a, b) for a, b in zip(there.packed().tensors(), codes.packed().tensors(), strict=True))
        assert there.length == length


def test_blocks_are_cut_chosen_and_joined_as_in_the_canonical_order():
    for codes in packed_pair(0, 3, "channel", 2, 256, 80, 80, outliers=2):
        packed, index = codes.packed(), torch.tensor([3, 0])
        pairs = [
            (codes.narrow(100).packed(), packed.narrow(100)),
            (codes.select_blocks(index).packed(), packed.select_blocks(index)),
            (Arranged.cat([codes, codes.narrow(70)]).packed(), type(packed).cat([packed, packed.narrow(70)])),
        ]
        for found, wanted in pairs:
            assert all(torch.equal(a, b) for a, b in zip(found.tensors(), wanted.tensors(), strict=True))
