"""Packing: error bounds, bit order, sizes, chunks, rotation, and every refusal."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtailor.errors import CacheError, PlanError
from kvtailor.formats import Packed, PackedFormat, check_format, default_group, unpack_codes
from kvtailor.quantize.bits import pack_codes
from kvtailor.quantize.hadamard import rotate, unrotate
from kvtailor.quantize.levels import code_groups, fit_levels
from kvtailor.quantize.pack import PACK_TOKENS, pack, unpack, widest_channels

DIMS = (36, 64, 80, 96, 128, 256)
BITS = (1, 2, 3, 4, 8)
PROPERTY = settings(max_examples=40, deadline=None)


def random_heads(seed: int, heads: int, length: int, dim: int) -> Tensor:
    return torch.randn(heads, length, dim, generator=torch.Generator().manual_seed(seed))


def token_format(bits: int, dim: int, levels: str = "minmax", rotated: bool = False) -> PackedFormat:
    return PackedFormat(bits, "token", default_group(dim), levels, rotated)  # type: ignore[arg-type]


def channel_format(bits: int, group: int = 64, levels: str = "minmax", rotated: bool = False) -> PackedFormat:
    return PackedFormat(bits, "channel", group, levels, rotated)  # type: ignore[arg-type]


def every_format(dim: int) -> list[PackedFormat]:
    makers = (lambda *a: token_format(a[0], dim, *a[1:]), lambda *a: channel_format(a[0], 64, *a[1:]))
    formats = [make(b, lv, r) for make in makers for b in BITS for lv in ("minmax", "fit") for r in (False, True)]
    return formats + [make(1, "centroid", r) for make in makers for r in (False, True)]


def expand_scale(packed: Packed, rows: Tensor) -> Tensor:
    """Scale or zero of every number, (H, n, D)."""
    if packed.format.axis == "token":
        return rows.float().repeat_interleave(packed.format.group, dim=-1)
    return rows.float().repeat_interleave(packed.format.group, dim=1)[:, : packed.length]


def loop_unpack(packed: Packed) -> Tensor:
    """Stored numbers read bit by bit from the documented order."""
    fmt, out = packed.format, torch.empty(packed.heads, packed.length, packed.dim)
    widths = (2, 1) if fmt.bits == 3 else (fmt.bits,)
    for h, t, c in itertools.product(range(packed.heads), range(packed.length), range(packed.dim)):
        code, shift = 0, 0
        for plane, width in zip(packed.planes, widths, strict=True):
            byte = int(plane[h, t, c * width // 8])
            code |= ((byte >> (c * width % 8)) & ((1 << width) - 1)) << shift
            shift += width
        row, column = (t, c // fmt.group) if fmt.axis == "token" else (t // fmt.group, c)
        out[h, t, c] = float(packed.scale[h, row, column]) * code + float(packed.zero[h, row, column])
    return out


def assert_within_half_step(x: Tensor, packed: Packed) -> None:
    x = x.float()
    error = (x - unpack(packed)).abs()
    bound = expand_scale(packed, packed.scale) / 2
    assert bool((error <= bound * 1.0001 + x.abs() * 3e-7).all())


def group_error(x: Tensor, bits: int, levels: str, dtype: torch.dtype = torch.float16) -> Tensor:
    codes, scale, zero = code_groups(x, bits, levels, dtype)  # type: ignore[arg-type]
    return (x - zero.float().unsqueeze(-1) - scale.float().unsqueeze(-1) * codes).square().mean(-1)


@PROPERTY
@given(
    seed=st.integers(0, 999),
    bits=st.sampled_from(BITS),
    dim=st.sampled_from(DIMS),
    heads=st.integers(1, 4),
    length=st.integers(1, 200),
    bias=st.sampled_from((0.0, 1.0, -7.3, 100.0, -100.0, 5000.0)),
    spread=st.sampled_from((1e-6, 1e-3, 1.0, 30.0)),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
)
def test_minmax_token_error_is_at_most_half_a_stored_step(seed, bits, dim, heads, length, bias, spread, dtype):
    x = (random_heads(seed, heads, length, dim) * spread + bias).to(dtype)
    assert_within_half_step(x, pack(x, token_format(bits, dim)))


@PROPERTY
@given(
    seed=st.integers(0, 999),
    bits=st.sampled_from(BITS),
    dim=st.sampled_from(DIMS),
    blocks=st.integers(1, 3),
    group=st.sampled_from((32, 64)),
    bias=st.sampled_from((0.0, 100.0, -100.0)),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
)
def test_minmax_channel_error_is_at_most_half_a_stored_step(seed, bits, dim, blocks, group, bias, dtype):
    x = (random_heads(seed, 2, blocks * group, dim) + bias).to(dtype)
    assert_within_half_step(x, pack(x, channel_format(bits, group)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_keys_biased_by_100_stay_within_half_a_step_at_8_bits(dtype, axis):
    x = (random_heads(0, 2, 128, 64) + 100).to(dtype)
    packed = pack(x, PackedFormat(8, axis, 64, "minmax", False))
    assert packed.scale.dtype == packed.zero.dtype == torch.float16
    assert float(packed.scale.max()) < 0.05
    assert_within_half_step(x, packed)


@pytest.mark.parametrize("bits", BITS)
def test_values_beyond_half_precision_are_scaled_in_bfloat16_with_the_same_bound(bits):
    x = random_heads(1, 2, 64, 64) * 1e5
    packed = pack(x, token_format(bits, 64))
    assert packed.scale.dtype == packed.zero.dtype == torch.bfloat16
    assert_within_half_step(x, packed)


@pytest.mark.parametrize("fmt", every_format(64), ids=str)
@pytest.mark.parametrize("size", [29000.0, 59000.0, 65504.0, 1e6])
def test_no_size_of_number_makes_a_scale_infinite(fmt, size):
    x = random_heads(2, 1, 64, 64).sign() * size
    packed = pack(x, fmt)
    assert bool(packed.scale.isfinite().all()) and bool(packed.zero.isfinite().all())
    assert bool((packed.scale >= 0).all())
    assert bool(unpack(packed).isfinite().all())


def test_the_widest_allowed_number_keeps_half_precision():
    x = random_heads(3, 1, 64, 64)
    x[0, 0, 0] = 60000
    assert pack(x, token_format(2, 64)).scale.dtype == torch.float16
    x[0, 0, 0] = 60001
    assert pack(x, token_format(2, 64)).scale.dtype == torch.bfloat16
    assert pack(x, token_format(2, 64), scale_dtype=torch.bfloat16).scale.dtype == torch.bfloat16


@pytest.mark.parametrize("fmt", [f for f in every_format(64) if not f.rotated], ids=str)
@pytest.mark.parametrize("constant", [0.0, 1.5, -3.25, 100.0])
def test_a_constant_group_that_16_bits_hold_is_exact_with_step_zero(fmt, constant):
    packed = pack(torch.full((2, 64, 64), constant), fmt)
    assert bool((packed.scale == 0).all())
    assert torch.equal(unpack(packed), torch.full((2, 64, 64), constant))


@pytest.mark.parametrize("fmt", [f for f in every_format(64) if not f.rotated], ids=str)
@pytest.mark.parametrize("constant", [0.1, -0.1, 100.03, 1e-9, -1e-9, 12345.6, 70000.1, -70000.1])
def test_a_constant_group_that_16_bits_do_not_hold_is_covered_by_the_step(fmt, constant):
    error = (unpack(pack(torch.full((1, 64, 64), constant), fmt)) - constant).abs().max()
    half_precision = abs(constant) < 3000
    assert float(error) <= (1e-6 * abs(constant) + 1e-6 if half_precision else 1e-4 * abs(constant))


@PROPERTY
@given(seed=st.integers(0, 999), bits=st.sampled_from(BITS), dim=st.integers(1, 70), length=st.integers(1, 5))
def test_codes_round_trip_through_planes(seed, bits, dim, length):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (2, length, dim), generator=generator, dtype=torch.uint8)
    planes = pack_codes(codes, bits)
    assert [plane.shape[-1] for plane in planes] == [-(-dim * w // 8) for w in ((2, 1) if bits == 3 else (bits,))]
    assert torch.equal(unpack_codes(planes, bits, dim), codes)


def test_bit_order_is_low_bits_first_and_padding_is_zero():
    codes = torch.tensor([[[1, 2, 3, 0, 3]]], dtype=torch.uint8)
    (plane,) = pack_codes(codes, 2)
    assert plane.tolist() == [[[1 | 2 << 2 | 3 << 4, 3]]]
    low, high = pack_codes(torch.tensor([[[5, 3, 4]]], dtype=torch.uint8), 3)
    assert low.tolist() == [[[1 | 3 << 2 | 0 << 4]]]
    assert high.tolist() == [[[1 | 0 << 1 | 1 << 2]]]


@pytest.mark.parametrize("dim", [36, 80])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_unpack_reads_what_a_loop_over_bits_reads(bits, axis, dim):
    fmt = token_format(bits, dim) if axis == "token" else channel_format(bits, 32)
    packed = pack(random_heads(4, 2, 32, dim), fmt)
    torch.testing.assert_close(unpack(packed), loop_unpack(packed), rtol=1e-6, atol=1e-6)


@PROPERTY
@given(
    seed=st.integers(0, 999),
    fmt_number=st.integers(0, 43),
    dim=st.sampled_from(DIMS),
    cuts=st.lists(st.integers(1, 5), min_size=0, max_size=3),
    transposed=st.booleans(),
)
def test_codes_do_not_depend_on_the_chunks_or_the_layout_of_the_input(seed, fmt_number, dim, cuts, transposed):
    fmt = every_format(dim)[fmt_number]
    x = random_heads(seed, 3, 384, dim) + 3
    whole = pack(x, fmt)
    if transposed:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    unit = fmt.group if fmt.axis == "channel" else 7
    edges = sorted({0, 384, *(cut * unit for cut in cuts)})
    joined = Packed.cat([pack(x[:, a:b], fmt) for a, b in itertools.pairwise(edges)])
    for mine, theirs in zip(whole.tensors(), joined.tensors(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_long_inputs_are_packed_in_pieces_with_the_same_codes(axis, rotated):
    x = random_heads(5, 1, PACK_TOKENS + 128, 64)
    fmt = PackedFormat(2, axis, 64, "fit", rotated)
    whole, tail = pack(x, fmt), pack(x[:, PACK_TOKENS:], fmt)
    assert whole.length == PACK_TOKENS + 128
    assert torch.equal(whole.planes[0][:, PACK_TOKENS:], tail.planes[0])
    assert torch.equal(unpack(whole)[:, PACK_TOKENS:], unpack(tail))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_bytes_are_bits_plus_32_over_group_per_element(bits, group, axis):
    packed = pack(random_heads(6, 4, 128, 128), PackedFormat(bits, axis, group, "minmax", False))
    assert packed.nbytes * 8 == 4 * 128 * 128 * (bits + 32 / group)
    assert packed.nbytes == sum(t.untyped_storage().nbytes() for t in packed.tensors())
    assert (packed.heads, packed.length, packed.dim) == (4, 128, 128)


def test_outliers_count_in_the_bytes():
    x = random_heads(6, 2, 64, 64).half()
    plain = pack(x, token_format(2, 64))
    with_outliers = pack(x, token_format(2, 64), widest_channels(x, 3))
    assert with_outliers.nbytes - plain.nbytes == 2 * 64 * 3 * 2 + 2 * 3 * 2


@pytest.mark.parametrize("fmt", [f for f in every_format(64) if f.bits < 8], ids=str)
def test_keys_of_decode_time_blocks_do_change(fmt):
    """A quantiser whose groups hold one number would be exact, and save nothing."""
    x = random_heads(7, 2, 64, 64)
    changed = (unpack(pack(x, fmt)) - x).abs() > 1e-4
    assert float(changed.float().mean()) > 0.8


@PROPERTY
@given(
    seed=st.integers(0, 9999),
    group=st.sampled_from((4, 16, 32, 64, 128)),
    kind=st.sampled_from(("normal", "laplace", "outliers", "two values", "biased")),
    scale=st.sampled_from((1e-2, 1.0, 40.0)),
)
def test_centroid_levels_are_never_worse_than_minmax_in_any_group(seed, group, kind, scale):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, group, generator=generator)
    if kind == "laplace":
        x = x.sign() * x.abs().square()
    elif kind == "outliers":
        x = torch.where(torch.rand(x.shape, generator=generator) < 0.02, x * 10, x)
    elif kind == "two values":
        x = x.sign()
    elif kind == "biased":
        x = x + 30
    x = x * scale
    rounding = (x.abs().amax(-1) * 2**-10).square()
    assert bool((group_error(x, 1, "centroid") <= group_error(x, 1, "minmax") + rounding).all())


def test_centroid_levels_are_never_worse_than_minmax_where_rounding_is_negligible():
    x = random_heads(8, 1, 20000, 64)[0]
    assert bool((group_error(x, 1, "centroid") < group_error(x, 1, "minmax")).all())


@pytest.mark.parametrize(
    "bits, levels, expected", [(1, "minmax", 2.74), (1, "centroid", 0.36), (2, "minmax", 0.20), (4, "minmax", 0.008)]
)
def test_error_on_normal_numbers_has_the_known_size(bits, levels, expected):
    error = float(group_error(random_heads(9, 1, 4000, 64)[0], bits, levels).mean())
    assert error == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("heavy", [False, True])
def test_fitted_levels_are_no_worse_than_their_start(bits, heavy):
    x = random_heads(10, 1, 2000, 64)[0]
    x = x.pow(3) if heavy else x

    def error(rounds: int) -> float:
        low, high = fit_levels(x, bits, rounds)
        steps, low = 2**bits - 1, low.unsqueeze(-1)
        step = (high.unsqueeze(-1) - low) / steps
        codes = ((x - low) / step).round().clamp(0, steps)
        return float((x - low - step * codes).square().mean())

    assert error(6) <= error(0)
    assert float(group_error(x, bits, "fit").mean()) == pytest.approx(error(6), rel=0.05)


def test_rotated_fit_at_2_bits_beats_minmax_on_outliers():
    x = random_heads(11, 4, 256, 128)
    x[..., 5] *= 20
    x[..., 77] *= 8

    def error(fmt: PackedFormat) -> float:
        return float((unpack(pack(x, fmt)) - x).square().mean())

    assert error(token_format(2, 128, "fit", rotated=True)) < 0.6 * error(token_format(2, 128))


@PROPERTY
@given(seed=st.integers(0, 999), dim=st.sampled_from((1, 2, 12, 33, *DIMS)), length=st.integers(1, 40))
def test_rotation_is_orthonormal_keeps_logits_and_is_undone(seed, dim, length):
    x, q = random_heads(seed, 2, length, dim), random_heads(seed + 1, 2, 3, dim)
    torch.testing.assert_close(unrotate(rotate(x)), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotate(q) @ rotate(x).mT, q @ x.mT, rtol=1e-4, atol=1e-4)
    matrix = rotate(torch.eye(dim))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim))
    block = dim & -dim
    expected = torch.block_diag(*[torch.full((block, block), block**-0.5)] * (dim // block))
    torch.testing.assert_close(matrix.abs(), expected)


def test_rotation_answers_in_fp32():
    assert rotate(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_outlier_channels_are_exact_and_widen_no_range(axis, dtype):
    x = random_heads(12, 3, 64, 128)
    wide = torch.tensor([[3, 64], [0, 127], [63, 5]])
    for head in range(3):
        x[head, :, wide[head]] *= 1000
    x = x.to(dtype)
    channels = widest_channels(x, 2)
    assert torch.equal(channels, wide.sort(dim=-1).values)
    fmt = PackedFormat(4, axis, 64, "minmax", False)
    packed = pack(x, fmt, channels)
    out = unpack(packed)
    index = channels.unsqueeze(1).expand(-1, 64, -1)
    assert torch.equal(out.gather(-1, index), x.float().gather(-1, index))
    assert packed.outliers is not None and packed.outliers.dtype == dtype
    assert float((out - x.float()).abs().max()) < 0.5
    assert float(packed.scale.max()) < 1


def test_a_group_of_outliers_alone_is_exact():
    x = random_heads(13, 1, 8, 36) * 100
    channels = torch.arange(4, 8).unsqueeze(0)
    out = unpack(pack(x, token_format(2, 36), channels))
    assert torch.equal(out[..., 4:8], x[..., 4:8])


@pytest.mark.parametrize("fmt", every_format(80), ids=str)
def test_slices_and_blocks_read_as_the_tokens_they_name(fmt):
    x = random_heads(14, 2, 256, 80)
    channels = None if fmt.rotated else widest_channels(x, 2)
    packed, whole = pack(x, fmt, channels), unpack(pack(x, fmt, channels))
    for length in (1, 33, 64, 65, 256):
        part = packed.narrow(length)
        assert part.length == length
        assert torch.equal(unpack(part), whole[:, :length])
        if fmt.axis == "channel":
            assert part.scale.shape[1] == -(-length // fmt.group)
    assert torch.equal(unpack(packed.slice(128, 200)), whole[:, 128:200])
    chosen = packed.select_blocks(torch.tensor([3, 0, 3]))
    expected = torch.cat([whole[:, 192:], whole[:, :64], whole[:, 192:]], dim=1)
    assert torch.equal(unpack(chosen), expected)
    joined = Packed.cat([packed.slice(0, 64), packed.slice(64, 150)])
    assert torch.equal(unpack(joined), whole[:, :150])


def test_default_group_is_the_largest_power_of_two_up_to_64():
    assert [default_group(dim) for dim in (36, 64, 80, 96, 128, 256, 33)] == [4, 64, 16, 32, 64, 64, 1]


@pytest.mark.parametrize(
    "fmt, message",
    [
        (PackedFormat(5, "token", 64, "minmax", False), "bits is 5; allowed: 1, 2, 3, 4 or 8"),
        (PackedFormat(2, "row", 64, "minmax", False), "axis is 'row'; allowed: 'token' or 'channel'"),  # type: ignore[arg-type]
        (
            PackedFormat(2, "token", 64, "best", False),  # type: ignore[arg-type]
            "levels is 'best'; allowed: 'minmax', 'centroid' or 'fit'",
        ),
        (
            PackedFormat(2, "token", 64, "centroid", False),
            "levels is 'centroid' at 2 bits; allowed: 'centroid' at 1 bit, else 'minmax' or 'fit'",
        ),
        (
            PackedFormat(2, "token", 48, "minmax", False),
            "group is 48 channels for a head size of 128; allowed: a divisor of the head size, such as 64",
        ),
        (
            PackedFormat(2, "token", 0, "minmax", False),
            "group is 0 channels for a head size of 128; allowed: a divisor of the head size, such as 64",
        ),
        (
            PackedFormat(2, "channel", 16, "minmax", False),
            "group is 16 tokens on the channel axis; allowed: 32 or 64",
        ),
    ],
)
def test_a_bad_format_is_refused_by_field_value_and_what_is_allowed(fmt, message):
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        check_format(fmt, 128)
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        pack(torch.zeros(1, 64, 128), fmt)


@pytest.mark.parametrize(
    "channels, fmt, message",
    [
        ([[1]], token_format(2, 64, rotated=True), "outlier channels given for a rotated format"),
        ([[1], [2]], token_format(2, 64), "outlier channels have shape (2, 1); allowed: (1, m), m per head"),
        ([[64]], token_format(2, 64), "outlier channels are [[64]]; allowed: 0 to 63"),
        ([[-1]], token_format(2, 64), "outlier channels are [[-1]]; allowed: 0 to 63"),
        ([[7, 1, 7]], token_format(2, 64), "outlier channels are [[7, 1, 7]]; allowed: each channel once per head"),
    ],
)
def test_bad_outlier_channels_are_refused(channels, fmt, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        pack(torch.zeros(1, 64, 64), fmt, torch.tensor(channels))


def test_no_outlier_channels_are_as_none_given():
    x = random_heads(15, 2, 64, 64)
    assert pack(x, token_format(2, 64), widest_channels(x, 0)).outliers is None
    for m in (-1, 65):
        with pytest.raises(PlanError, match=f"outlier channels is {m}; allowed: 0 to the head size, 64"):
            widest_channels(x, m)


def test_groups_of_tokens_must_be_whole_and_there_must_be_tokens():
    with pytest.raises(CacheError, match="100 tokens to pack per channel; allowed: whole groups of 64 tokens"):
        pack(torch.zeros(1, 100, 64), channel_format(2))
    with pytest.raises(CacheError, match="0 tokens to pack; allowed: 1 or more"):
        pack(torch.zeros(1, 0, 64), token_format(2, 64))


def test_bad_ranges_and_blocks_are_refused():
    packed = pack(random_heads(16, 1, 128, 64), channel_format(2))
    for length in (0, 129):
        with pytest.raises(CacheError, match=f"tokens 0 to {length} of 128 packed tokens; allowed: a range of 1"):
            packed.narrow(length)
    with pytest.raises(CacheError, match="tokens from 32 in groups of 64 tokens; allowed: multiples of 64"):
        packed.slice(32, 64)
    with pytest.raises(CacheError, match="blocks selected from 100 packed tokens; allowed: multiples of 64"):
        packed.narrow(100).select_blocks(torch.tensor([0]))


def test_parts_that_do_not_fit_together_are_refused():
    x = random_heads(17, 2, 64, 64)
    channel = pack(x, channel_format(2))
    token = pack(x, token_format(2, 64))
    with pytest.raises(CacheError, match="0 packed parts to join; allowed: 1 or more"):
        Packed.cat([])
    with pytest.raises(CacheError, match="a part of 10 tokens joined before another; allowed: multiples of the group"):
        Packed.cat([channel.narrow(10), channel])
    assert Packed.cat([token.narrow(10), token]).length == 74
    assert Packed.cat([channel, channel.narrow(10)]).length == 74
    for other, name in (
        (channel, "format"),
        (pack(x[:1], token_format(2, 64)), "heads"),
        (pack(random_heads(17, 2, 64, 128), token_format(2, 128)), "head size"),
        (pack(x * 1e5, token_format(2, 64)), "scale dtype"),
        (pack(x, token_format(2, 64), torch.tensor([[1], [2]])), "outlier channels"),
    ):
        with pytest.raises(CacheError, match=f"packed parts joined with {name} .*; allowed: the same in all parts"):
            Packed.cat([token, other])
