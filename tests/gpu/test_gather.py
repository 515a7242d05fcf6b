"""Rows that the gather kernel reads from chunks of host memory equal those that indexing reads."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Executor, Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvtailor
from kvtailor.errors import KernelError
from kvtailor.indexes.registry import index_class
from kvtailor.layers import pinned
from kvtailor.layers.pinned import PinnedTokens

sys.path.append(str(Path(__file__).parent.parent))

from zoo import ZOO, kv_cache, text

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
__test__ = find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())

dtypes = st.sampled_from((torch.float32, torch.float16, torch.bfloat16))
dims = st.sampled_from((8, 16, 20, 64, 80, 128, 256))


def chunks_of(rows: Tensor, chunk_tokens: int) -> tuple[list[Tensor], Tensor]:
    """Tokens (n, Hkv, D) in chunks of host memory, locked where a GPU reads them, and where these begin."""
    chunks = []
    for part in rows.split(chunk_tokens):
        chunks.append(torch.zeros(chunk_tokens, *rows.shape[1:], dtype=rows.dtype, pin_memory=DEVICE == "cuda"))
        chunks[-1][: len(part)] = part
    return chunks, torch.tensor([chunk.data_ptr() for chunk in chunks], device=DEVICE)


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 4),
    share=st.integers(1, 4),
    tokens=st.integers(1, 300),
    chunk_tokens=st.sampled_from((64, 128, 192)),
    chosen=st.integers(1, 40),
    key_dim=dims,
    value_dim=dims,
    dtype=dtypes,
    seed=st.integers(0, 999),
)
def test_rows_equal_index_select(heads, share, tokens, chunk_tokens, chosen, key_dim, value_dim, dtype, seed):
    """A set for each KV head (share 1) or query head, in any order, tokens named twice included; or single pairs."""
    from kvtailor.kernels.triton.gather_rows import gather_rows

    source = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, heads, key_dim + value_dim, generator=source).to(dtype)
    rows[0, 0, :2] = torch.tensor([torch.nan, torch.inf])
    index = torch.randint(0, tokens, (heads * share, chosen), generator=source)
    head = torch.arange(heads).repeat_interleave(share)[:, None].expand_as(index)
    flat = rows.flatten(0, 1).index_select(0, (index * heads + head).flatten())
    expected = flat.view(heads * share, chosen, -1).split((key_dim, value_dim), dim=-1)
    chunks, addresses = chunks_of(rows, chunk_tokens)
    index, head = index.to(DEVICE), head.to(DEVICE)
    assert_same(gather_rows(chunks, addresses, key_dim, head, index), expected)
    assert_same(gather_rows(chunks, addresses, key_dim, head[:, 0], index[:, 0]), [part[:, 0] for part in expected])
    strided = gather_rows(chunks, addresses, key_dim, head.mT[0], index.mT[0], check_index=False)
    assert_same(strided, [part[:, 0] for part in expected])


def assert_same(found: tuple[Tensor, Tensor], expected: Any) -> None:
    """To the bit, whatever the bits mean."""
    for own, other in zip(found, expected, strict=True):
        assert own.shape == other.shape and own.dtype == other.dtype and own.device.type == DEVICE
        bits = torch.int32 if own.dtype == torch.float32 else torch.int16
        assert torch.equal(own.cpu().view(bits), other.contiguous().view(bits))


def test_far_tokens_are_read_by_the_kernel(monkeypatch):
    """Over several chunks, and after some were given back; the same as without it."""
    monkeypatch.setattr(pinned, "CHUNK_BYTES", 128 * 2 * 48 * 4)
    far = PinnedTokens(2, (16, 32), torch.empty(0, device=DEVICE), index_class("pages").from_options({}), "host", None)
    for count in (64, 320, 64):
        keys, values = (torch.randn(2, count, dim).to(DEVICE) for dim in far.dims)
        far.append(keys, values, torch.arange(count, device=DEVICE), None)
    far.take_from(300)
    far.append(keys, values, torch.arange(64, device=DEVICE), None)
    index = torch.randint(0, far.length, (6, 50)).to(DEVICE)
    found = {}
    for kernels in ("reference", "triton"):
        monkeypatch.setenv("KVTAILOR_KERNELS", kernels)
        found[kernels] = [part.cpu() for part in far.gather(index)]
    assert len(far.pool.chunks) == 4
    for own, other in zip(found["triton"], found["reference"], strict=True):
        assert torch.equal(own, other)


class AtOnce(Executor):
    """Runs a job when it is handed in: Triton's interpreter cannot run kernels in two threads."""

    def submit(self, job, /, *args: Any, **kwargs: Any) -> Future:
        done: Future = Future()
        done.set_result(job(*args, **kwargs))
        return done


@pytest.mark.parametrize("select", ["query", "mean"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_layer_on_the_kernel_answers_as_on_the_reference_kernels(monkeypatch, select, ahead):
    """To the bit: what is read is the same, and everything else is computed in PyTorch."""
    from kvtailor.kernels.triton import gather_rows

    model, steps, launches = ZOO["llama"].build(), torch.tensor([[5], [6]]), []
    launch = gather_rows.gather_rows_launch
    monkeypatch.setattr(gather_rows, "gather_rows_launch", lambda *given: launches.append(1) or launch(*given))
    if INTERPRETED:
        monkeypatch.setattr("kvtailor.read_ahead.ThreadPoolExecutor", lambda **given: AtOnce())
    find = {"index": "codes", "top": 20, "select": select, "recent": 64, "sinks": 8, "ahead": ahead}
    plan, found = kvtailor.Plan(layers=[{"find": find, "tier": "host"}]), {}
    for kernels in ("reference", "triton"):
        monkeypatch.setenv("KVTAILOR_KERNELS", kernels)
        with kvtailor.attach(model, plan):
            cache = kv_cache(model(**text(150), use_cache=True))
            found[kernels] = torch.cat([model(steps, past_key_values=cache).logits for _ in range(2)])
    assert torch.equal(found["triton"], found["reference"])
    assert len(launches) >= 2 * 3 * 2  # steps, layers, sequences


def wrong_calls() -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: what the message must hold, and the arguments that differ from right ones."""
    index = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)
    chunks, addresses = chunks_of(torch.zeros(128, 2, 24), 64)
    return {
        "no chunks": ("0 chunks", {"chunks": [], "addresses": addresses[:0]}),
        "addresses": ("of shape (1,)", {"addresses": addresses[:1]}),
        "short addresses": ("torch.int32", {"addresses": addresses.int()}),
        "integers": ("torch.int64 of shape (64, 2, 24)", {"chunks": [chunk.long() for chunk in chunks]}),
        "no values": ("24 channels of keys", {"key_dim": 24}),
        "heads of other tokens": ("heads are torch.int64 of shape (5,)", {"heads": index[0]}),
        "short index": ("tokens are torch.int32", {"tokens": index.int()}),
        "empty index": ("(2, 0)", {"tokens": index[:, :0], "heads": index[:, :0]}),
        "device": ("meta", {"tokens": index.to("meta")}),
        "heads beyond": ("heads are 2 to 2; allowed: 0 to 1", {"heads": index + 2}),
        "tokens beyond": ("tokens are 128 to 128; allowed: 0 to 127", {"tokens": index + 128}),
        "negative tokens": ("tokens are -1 to -1", {"tokens": index - 1}),
        "chunks that differ": (
            "chunk 1 is torch.float32 of shape (32, 2, 24)",
            {"chunks": [chunks[0], chunks[1][:32]]},
        ),
        "chunks with gaps": ("strides", {"chunks": [chunk.mT.contiguous().mT for chunk in chunks]}),
        "chunks elsewhere": ("chunk 0 is ordinary memory on meta", {"chunks": [chunk.to("meta") for chunk in chunks]}),
    }


@pytest.mark.parametrize("name", list(wrong_calls()) if __test__ else [])
def test_what_is_not_served_is_refused_before_a_launch(name, monkeypatch):
    from kvtailor.kernels.triton import launch
    from kvtailor.kernels.triton.gather_rows import gather_rows

    message, given = wrong_calls()[name]
    index = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)
    chunks, addresses = chunks_of(torch.zeros(128, 2, 24), 64)
    right = {"chunks": chunks, "addresses": addresses, "key_dim": 16, "heads": index, "tokens": index}
    monkeypatch.setattr(launch.Launch, "run", lambda self: pytest.fail("launched"))
    with pytest.raises(KernelError, match="allowed") as refused:
        gather_rows(**{**right, **given})
    assert message in str(refused.value)


def test_the_kernel_compiles_without_a_gpu():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kvtailor.kernels.compile_triton", "--only", "gather rows bf16 D=128"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    _, *rows, last = done.stdout.splitlines()
    assert [row.split()[4] for row in rows] == ["sm_80", "sm_90"] and last == "all 2 compiled"
