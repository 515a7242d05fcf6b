"""Packing in C++ on every instruction set of this processor: the codes of the reference, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtailor.arranged import Arranged, arrange, block_bytes
from kvtailor.errors import KernelError
from kvtailor.formats import PackedFormat, default_group, plane_bits
from kvtailor.kernels import _native
from kvtailor.kernels.native import hand_codes
from kvtailor.kernels.reference import dequantise
from kvtailor.quantize.hadamard import rotate
from kvtailor.quantize.pack import pack, unpack, widest_channels

PATHS = tuple(_native.instruction_sets())
PROPERTY = settings(max_examples=40, deadline=None)
BITS = (1, 2, 3, 4, 8)
DIMS = (16, 48, 64, 80, 96, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALE_DTYPES = (torch.float16, torch.bfloat16)

paths = pytest.mark.parametrize("path", PATHS)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def room(fmt: PackedFormat, heads: int, length: int, dim: int, values: bool, dtype: torch.dtype) -> Arranged:
    """Arranged codes that hold nothing sensible yet."""
    blocks = length // 64
    token_axis = fmt.axis == "token"
    shape = (heads, blocks, dim // fmt.group, 64) if token_axis else (heads, blocks, 64 // fmt.group, dim)
    planes = (torch.full((heads, blocks, block_bytes(w, dim, values)), 0xAA).byte() for w in plane_bits(fmt.bits))
    scale, zero = torch.full(shape, 7.0, dtype=dtype), torch.full(shape, 7.0, dtype=dtype)
    return Arranged(fmt, dim, length, values, tuple(planes), scale, zero)


def pack_into(path: str, x: Any, out: Arranged, threads: int = 1) -> Arranged:
    fmt = out.format
    _native.pack(
        path, x, fmt.bits, fmt.group, fmt.axis == "channel", fmt.rotated, out.values, fmt.levels, list(out.planes),
        out.scale, out.zero, threads,
    )  # fmt: skip
    return out


def pack_natively(
    path: str, x: Tensor, fmt: PackedFormat, values: bool, dtype: torch.dtype = torch.float16, threads: int = 1
) -> Arranged:
    return pack_into(path, x, room(fmt, *x.shape, values, dtype), threads)


def unpack_natively(path: str, codes: Arranged, unrotate: bool = False, threads: int = 1) -> Tensor:
    out = torch.full((codes.heads, codes.length, codes.dim), torch.nan)
    _native.unpack(path, hand_codes(codes), out, threads, unrotate)
    return out


def make_format(bits: int, form: str, group: int, levels: str, rotated: bool) -> PackedFormat:
    """On the channel axis `group` tokens share a scale, else `group` channels."""
    return PackedFormat(bits, form, group, levels, rotated)  # type: ignore[arg-type]


@st.composite
def formats(draw: Any, levels: tuple[str, ...]) -> tuple[PackedFormat, int, bool]:
    """A format, a head size that it fits and whether values are packed."""
    dim = draw(st.sampled_from(DIMS))
    form = draw(st.sampled_from(("token", "token", "channel")))
    sizes = [size for size in range(16, dim + 1, 16) if dim % size == 0] if form == "token" else [32, 64]
    level = draw(st.sampled_from(levels))
    bits = 1 if level == "centroid" else draw(st.sampled_from(BITS))
    fmt = make_format(bits, form, draw(st.sampled_from(sizes)), level, draw(st.booleans()))
    return fmt, dim, form == "token" and draw(st.booleans())


def assert_equal(found: Arranged, wanted: Arranged) -> None:
    for a, b in zip(found.tensors(), wanted.tensors(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def step_of_each(codes: Arranged) -> Tensor:
    """The step of every number, (H, n, D)."""
    if codes.format.axis == "token":
        return codes.scale.float().mT.flatten(1, 2).repeat_interleave(codes.format.group, dim=-1)
    return codes.scale.float().flatten(1, 2).repeat_interleave(codes.format.group, dim=1)


@paths
@PROPERTY
@given(
    seed=st.integers(0, 999),
    form=formats(("minmax",)),
    heads=st.integers(1, 3),
    blocks=st.integers(1, 3),
    bias=st.sampled_from((0.0, -7.3, 100.0, 5000.0)),
    spread=st.sampled_from((1e-6, 1e-3, 1.0, 30.0)),
    dtype=st.sampled_from(DTYPES),
    scale_dtype=st.sampled_from(SCALE_DTYPES),
)
def test_minmax_codes_are_those_of_the_reference(path, seed, form, heads, blocks, bias, spread, dtype, scale_dtype):
    fmt, dim, values = form
    x = (numbers(seed, heads, blocks * 64, dim) * spread + bias).to(dtype)
    found = pack_natively(path, x, fmt, values, scale_dtype)
    assert_equal(found, arrange(pack(x, fmt, scale_dtype=scale_dtype), values))
    stored = rotate(x) if fmt.rotated else x.float()
    error = (stored - unpack_natively(path, found)).abs()
    if not fmt.rotated or bias < 5000:  # rotated, the bias of a whole head stands in one channel
        assert bool((error <= step_of_each(found) / 2 * 1.0001 + stored.abs() * 3e-7).all())


@paths
@PROPERTY
@given(
    seed=st.integers(0, 999),
    form=formats(("fit", "centroid")),
    bias=st.sampled_from((0.0, -3.0, 100.0)),
    dtype=st.sampled_from(DTYPES),
    scale_dtype=st.sampled_from(SCALE_DTYPES),
)
def test_fitted_levels_are_as_near_as_those_of_the_reference(path, seed, form, bias, dtype, scale_dtype):
    fmt, dim, values = form
    x = (numbers(seed, 2, 128, dim) + bias).to(dtype)
    found = pack_natively(path, x, fmt, values, scale_dtype)
    stored, wanted = rotate(x) if fmt.rotated else x.float(), pack(x, fmt, scale_dtype=scale_dtype)
    error = stored - unpack_natively(path, found)
    assert float(error.square().mean()) <= 1.05 * float((stored - dequantise(wanted)).square().mean())
    # Other dtypes lie on a grid whose many ties each order of sums may break in its own way; the sums of a rotation lose
    # the last bits of what stands beside a large bias.
    if dtype == torch.float32 and not (fmt.rotated and bias == 100):
        there = arrange(wanted, values)
        assert float((found.scale != there.scale).float().mean()) < 0.1
        assert float((found.zero != there.zero).float().mean()) < 0.1


@paths
@pytest.mark.parametrize("levels", ["minmax", "fit"])
@pytest.mark.parametrize("bits", BITS)
def test_every_number_gets_the_nearest_of_the_stored_levels(path, bits, levels):
    x = numbers(3, 2, 128, 80)
    for fmt in (make_format(bits, "token", 16, levels, False), make_format(bits, "channel", 32, levels, False)):
        found = pack_natively(path, x, fmt, False)
        numbers_of_codes, step = unpack_natively(path, found), step_of_each(found)
        zero = step_of_each(Arranged(fmt, 80, 128, False, found.planes, found.zero, found.scale))
        nearest = ((x - zero) / step.where(step > 0, 1.0)).round().clamp(0, 2**bits - 1) * step + zero
        assert float((numbers_of_codes - nearest).abs().max()) <= 1e-6


CORNERS = {
    "zeros": torch.zeros(64),
    "negative zeros": torch.full((64,), -0.0),
    "one number": torch.full((64,), 1.1),
    "two numbers": torch.tensor([-65504.0, 65504.0]).repeat(32),
    "beyond half": torch.linspace(-2e5, 3e5, 64),
    "the largest": torch.tensor([3.4e38, -3.4e38]).repeat(32),
    "the least": torch.linspace(-2.0, 3.0, 64) * 1e-44,
    "below half": torch.linspace(-1.0, 2.0, 64) * 1e-7,
    "below bfloat16": torch.linspace(-1.0, 2.0, 64) * 1e-38,
    "one apart": torch.cat([torch.full((63,), 0.3), torch.tensor([0.3 + 1e-6])]),
}


@paths
@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
def test_corners_of_the_range_are_coded_as_by_the_reference(path, name, dtype):
    x = CORNERS[name].expand(1, 64, 64)
    for bits in BITS:
        for form in ("token", "channel"):
            fmt = make_format(bits, form, 64, "minmax", False)
            for y in (x, x.mT):
                found = pack_natively(path, y.contiguous(), fmt, False, dtype)
                assert_equal(found, arrange(pack(y, fmt, scale_dtype=dtype), False))


@paths
@pytest.mark.parametrize("levels", ["minmax", "fit", "centroid"])
@pytest.mark.parametrize("value", [0.0, 1.1, -3.7, 1000.3])
def test_a_constant_group_stays_within_the_step_that_covers_what_16_bits_lose(path, levels, value):
    x = torch.full((1, 64, 64), value)
    found = pack_natively(path, x, make_format(1, "token", 64, levels, False), True)
    error = (x - unpack_natively(path, found)).abs()
    assert bool((error <= step_of_each(found).abs() / 2 * 1.0001 + 1e-6).all())


@paths
@PROPERTY
@given(seed=st.integers(0, 999), form=formats(("minmax", "fit", "centroid")), dtype=st.sampled_from(DTYPES))
def test_tokens_may_lie_anywhere(path, seed, form, dtype):
    fmt, dim, values = form
    x = numbers(seed, 2, 128, dim).to(dtype)
    wanted = pack_natively(path, x, fmt, values)
    by_token = x.transpose(0, 1).contiguous().transpose(0, 1)
    apart = torch.full((2, 3 * 128, dim + 5), torch.nan, dtype=dtype)[:, ::3, :dim]
    apart.copy_(x)
    for y in (by_token, apart):
        assert_equal(pack_natively(path, y, fmt, values), wanted)
    one = x[:1].expand(2, -1, -1)
    assert_equal(pack_natively(path, one, fmt, values), pack_natively(path, one.contiguous(), fmt, values))


@paths
def test_numpy_arrays_that_may_only_be_read_are_packed(path):
    x = numbers(1, 1, 64, 32)
    fixed = x.numpy().copy()
    fixed.flags.writeable = False
    fmt = make_format(4, "token", 32, "minmax", False)
    assert_equal(pack_into(path, fixed, room(fmt, 1, 64, 32, True, torch.float16)), pack_natively(path, x, fmt, True))
    assert _native.peak(path, fixed) == float(x.abs().max())


@paths
def test_codes_may_be_written_into_the_middle_of_a_larger_store(path):
    x = numbers(2, 2, 128, 64)
    fmt = make_format(3, "channel", 32, "minmax", False)
    large = room(fmt, 3, 4 * 64, 64, False, torch.float16)
    before = [tensor.clone() for tensor in large.tensors()]
    part = Arranged(
        fmt, 64, 128, False, tuple(p[1:, 1:3] for p in large.planes), large.scale[1:, 1:3], large.zero[1:, 1:3]
    )  # fmt: skip
    assert_equal(pack_into(path, x, part), arrange(pack(x, fmt), False))
    for tensor, old in zip(large.tensors(), before, strict=True):
        assert torch.equal(tensor[0], old[0]) and torch.equal(tensor[:, 0], old[:, 0])
        assert torch.equal(tensor[:, 3], old[:, 3])


@paths
@pytest.mark.parametrize("values", [False, True])
def test_threads_change_nothing(path, values):
    x = numbers(3, 2, 4096, 128).bfloat16()
    fmt = make_format(2, "token", 64, "minmax", True)
    one = pack_natively(path, x, fmt, values)
    assert_equal(pack_natively(path, x, fmt, values, threads=3), one)
    assert torch.equal(unpack_natively(path, one, True, threads=3), unpack_natively(path, one, True))
    assert _native.peak(path, x, False, 3) == _native.peak(path, x)


@paths
@pytest.mark.parametrize("threads", [-1, 0, 20000, 2**31 - 1])
def test_no_number_of_threads_is_too_large_or_too_small(path, threads):
    x = numbers(3, 16, 1024, 64)  # enough over all heads together
    fmt = make_format(4, "token", 64, "minmax", False)
    one = pack_natively(path, x, fmt, True)
    assert_equal(pack_natively(path, x, fmt, True, threads=threads), one)
    assert torch.equal(unpack_natively(path, one, threads=threads), unpack_natively(path, one))
    assert _native.peak(path, x, False, threads) == _native.peak(path, x)


@paths
@PROPERTY
@given(
    seed=st.integers(0, 999),
    form=formats(("minmax",)),
    length=st.integers(1, 200),
    outliers=st.sampled_from((0, 1, 5)),
    dtype=st.sampled_from(DTYPES),
)
def test_codes_are_read_back_as_what_they_stand_for(path, seed, form, length, outliers, dtype):
    fmt, dim, values = form
    x = numbers(seed, 2, -(-length // 64) * 64, dim).to(dtype)
    channels = None if fmt.rotated or not outliers else widest_channels(x, outliers)
    codes = arrange(pack(x, fmt, channels), values).narrow(length)
    assert torch.equal(unpack_natively(path, codes), dequantise(codes.packed()))
    exact = unpack(codes.packed())
    assert float((unpack_natively(path, codes, unrotate=True) - exact).abs().max()) <= 1e-6 * float(exact.abs().max())


@paths
@PROPERTY
@given(
    seed=st.integers(0, 999),
    heads=st.integers(1, 3),
    length=st.integers(1, 100),
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(DTYPES),
)
def test_the_peak_is_the_largest_absolute_number(path, seed, heads, length, dim, dtype):
    x = (numbers(seed, heads, length, dim) * 100).to(dtype)
    assert _native.peak(path, x) == float(x.abs().max())
    assert _native.peak(path, x, rotated=True) == float(rotate(x).abs().max())
    assert _native.peak(path, x.transpose(0, 1)) == float(x.abs().max())


@paths
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_that_is_not_finite_is_named(path, bad, dtype):
    x = numbers(5, 2, 128, 48).to(dtype)
    x[1, 100, 17] = bad
    forms = [
        (make_format(bits, form, 16 if form == "token" else 32, levels, rotated), values)
        for bits, levels in ((1, "centroid"), (2, "fit"), (8, "minmax"))
        for form, values in (("token", False), ("token", True), ("channel", False))
        for rotated in (False, True)
    ]
    for fmt, values in forms:
        with pytest.raises(KernelError, match=r"x is -?(nan|inf) in head 1, token 100, channel 17"):
            pack_natively(path, x, fmt, values)
    for rotated in (False, True):
        with pytest.raises(KernelError, match="in head 1, token 100, channel 17; allowed: finite"):
            _native.peak(path, x, rotated)


@paths
def test_numbers_whose_rotation_is_not_finite_are_an_error(path):
    x = torch.full((1, 64, 64), 3e38)
    with pytest.raises(KernelError, match="too large to rotate"):
        pack_natively(path, x, make_format(2, "token", 64, "minmax", True), True, torch.bfloat16)
    with pytest.raises(KernelError, match="too large to rotate"):
        _native.peak(path, x, rotated=True)
    assert _native.peak(path, x) == float(x[0, 0, 0])


PLANE = torch.zeros(2, 2, block_bytes(4, 64, False), dtype=torch.uint8)
SCALE = torch.zeros(2, 2, 1, 64, dtype=torch.float16)


def call_pack(**changed: Any) -> None:
    given: dict[str, Any] = {
        "kernels": PATHS[-1], "x": torch.zeros(2, 128, 64), "bits": 4, "group": 64, "per_channel": False,
        "rotated": False, "values": False, "levels": "minmax", "planes": [PLANE.clone()], "scale": SCALE.clone(),
        "zero": SCALE.clone(), "threads": 1,
    }  # fmt: skip
    _native.pack(**{**given, **changed})


def test_the_calls_that_are_changed_below_are_right_as_they_stand():
    call_pack()
    call_pack(per_channel=True)


BAD_PACKS = {
    "kernels": ({"kernels": "none"}, "kernels none cannot run"),
    "dtype": ({"x": torch.zeros(2, 128, 64, dtype=torch.float64)}, "x: dtype"),
    "whole numbers": ({"x": torch.zeros(2, 128, 64, dtype=torch.int16)}, "x: dtype"),
    "axes": ({"x": torch.zeros(128, 64)}, "x: shape is (128, 64)"),
    "no tokens": ({"x": torch.zeros(2, 0, 64)}, "no axis of 0"),
    "no heads": ({"x": torch.zeros(0, 128, 64)}, "no axis of 0"),
    "part of a block": ({"x": torch.zeros(2, 100, 64)}, "100 tokens; allowed: whole blocks of 64"),
    "stride": ({"x": torch.zeros(2, 128, 128)[..., ::2]}, "x: the stride of axis 2 is 2"),
    "channels": ({"x": torch.zeros(2, 128, 72)}, "72 channels"),
    "many channels": ({"x": torch.zeros(2, 128, 272)}, "272 channels"),
    "heads": ({"x": torch.zeros(3, 128, 64)}, "2 heads for x of 3"),
    "blocks": ({"x": torch.zeros(2, 64, 64)}, "codes: shape"),
    "bits": ({"bits": 5}, "bits is 5"),
    "other bits": ({"bits": 2}, "codes: shape"),
    "group": ({"group": 24}, "group is 24"),
    "tokens of a group": ({"group": 16, "per_channel": True}, "group is 16"),
    "values per channel": ({"values": True, "per_channel": True}, "values with scales per channel"),
    "levels": ({"levels": "best"}, "levels is 'best'"),
    "centroid": ({"levels": "centroid"}, "'centroid' at 4 bits"),
    "no planes": ({"planes": []}, "planes: 0"),
    "planes": ({"planes": [PLANE, PLANE]}, "planes: 2"),
    "plane dtype": ({"planes": [PLANE.view(torch.int8)]}, "codes: dtype"),
    "plane shape": ({"planes": [PLANE[..., :-64]]}, "codes: shape"),
    "plane stride": ({"planes": [torch.zeros(2, 4, 2048, dtype=torch.uint8)[:, ::2]]}, "stride of axis 1"),
    "plane for all heads": ({"planes": [PLANE[:1].expand(2, -1, -1)]}, "codes: the stride of axis 0 is 0"),
    "scale dtype": ({"scale": SCALE.float()}, "scales: dtype"),
    "scale shape": ({"scale": SCALE[..., :32]}, "scales: shape"),
    "scale for all heads": ({"scale": SCALE[:1].expand(2, -1, -1, -1)}, "scales: the stride of axis 0"),
    "zero dtype": ({"zero": SCALE.bfloat16()}, "different dtypes"),
    "zero shape": ({"zero": SCALE.mT}, "zeros: shape"),
    "zero for all heads": ({"zero": SCALE[:1].expand(2, -1, -1, -1)}, "zeros: the stride of axis 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PACKS)
def test_a_bad_call_of_pack_is_one_clear_error(name):
    changed, message = BAD_PACKS[name]
    with pytest.raises(KernelError) as error:
        call_pack(**changed)
    assert message in str(error.value)


CODES = hand_codes(arrange(pack(torch.ones(2, 128, 64), make_format(4, "token", 64, "minmax", False)), True))

BAD_READS = {
    "kernels": (lambda: _native.unpack("none", CODES, torch.empty(2, 128, 64), 1, False), "kernels none"),
    "dtype": (lambda: _native.unpack(PATHS[-1], CODES, torch.empty(2, 128, 64).half(), 1, False), "out: dtype"),
    "tokens": (lambda: _native.unpack(PATHS[-1], CODES, torch.empty(2, 127, 64), 1, False), "out: shape"),
    "heads": (lambda: _native.unpack(PATHS[-1], CODES, torch.empty(1, 128, 64), 1, False), "out: shape"),
    "stride": (lambda: _native.unpack(PATHS[-1], CODES, torch.empty(2, 128, 80)[..., :64], 1, False), "stride of axis 1"),
    "one head": (
        lambda: _native.unpack(PATHS[-1], CODES, torch.empty(1, 128, 64).expand(2, -1, -1), 1, False), "stride of axis 0"
    ),
    "peak kernels": (lambda: _native.peak("none", torch.ones(1, 1, 16)), "kernels none"),
    "peak dtype": (lambda: _native.peak(PATHS[-1], torch.ones(1, 1, 16).int()), "x: dtype"),
    "peak axes": (lambda: _native.peak(PATHS[-1], torch.ones(1, 16)), "x: shape"),
    "peak of nothing": (lambda: _native.peak(PATHS[-1], torch.ones(1, 0, 16)), "no axis of 0"),
    "peak channels": (lambda: _native.peak(PATHS[-1], torch.ones(1, 1, 20)), "20 channels"),
    "peak stride": (lambda: _native.peak(PATHS[-1], torch.ones(1, 16, 16).mT), "stride of axis 2 is 16"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_READS)
def test_a_bad_call_of_unpack_or_peak_is_one_clear_error(name):
    call, message = BAD_READS[name]
    with pytest.raises(KernelError) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize("dim", [64, 80])
def test_default_groups_are_packed_too(dim):
    x = numbers(9, 1, 64, dim)
    fmt = make_format(2, "token", default_group(dim), "minmax", False)
    for path in PATHS:
        assert_equal(pack_natively(path, x, fmt, True), arrange(pack(x, fmt), True))
