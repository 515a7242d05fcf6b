"""A real model: SmolLM2-135M on real text."""

from __future__ import annotations

import gc
import sys
import threading
import time

import pytest
import torch

import kvtailor
from kvtailor.models.load import load
from kvtailor.models.text import needle_prompt, python_reference
from zoo import kv_cache

GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(scope="module")
def smollm2():
    return load("smollm2")


@pytest.fixture(scope="module")
def needle(smollm2):
    """A prompt of about 1,100 tokens that asks for a number hidden in real text."""
    text = python_reference(1000, smollm2.tokenizer, topic="import")
    message, prefix = needle_prompt(text, "Lisbon", "48213", 0.4)
    chat = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    return smollm2.tokenizer(chat + prefix, return_tensors="pt")


def test_full_retention_is_the_default_cache_on_a_real_text(smollm2, kernels):
    inputs = smollm2.tokenizer(python_reference(600, smollm2.tokenizer), return_tensors="pt")
    expected = smollm2.model.generate(**inputs, max_new_tokens=8, **GREEDY)
    with kvtailor.attach(smollm2.model, "full"):
        found = smollm2.model.generate(**inputs, max_new_tokens=8, **GREEDY)
    kernels.check(found.logits, expected.logits)
    assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize(
    ("kernels", "plan"),
    [
        *(("reference", plan) for plan in ("int8", "int4", "int3", "kivi4")),
        ("auto", "int4"),
    ],
    indirect=["kernels"],
)
def test_packed_caches_still_find_the_needle(smollm2, needle, kernels, plan):
    with kvtailor.attach(smollm2.model, plan):
        found = smollm2.model.generate(**needle, max_new_tokens=10, **GREEDY)
    report = kv_cache(found).report()
    assert "48213" in smollm2.tokenizer.decode(found.sequences[0, needle["input_ids"].shape[1] :])
    assert report.bytes_held < 0.45 * report.bytes_default


@pytest.mark.usefixtures("reference_kernels")
def test_dropping_the_needle_is_noticed(smollm2, needle):
    """The check above can fail: what a window of recent tokens has lost is not answered."""
    with kvtailor.attach(smollm2.model, "fifo:300"):
        found = smollm2.model.generate(**needle, max_new_tokens=10, **GREEDY)
    assert "48213" not in smollm2.tokenizer.decode(found.sequences[0, needle["input_ids"].shape[1] :])


@pytest.mark.usefixtures("reference_kernels")
def test_streaming_renumbered_reads_far_beyond_its_budget(smollm2):
    """With sinks the loss on a text stays near that of the full cache; without them it breaks down."""
    ids = smollm2.tokenizer(python_reference(500, smollm2.tokenizer), return_tensors="pt").input_ids

    def loss(keep):
        plan = kvtailor.Plan(
            layers=[{"keep": {"policy": "streaming", "budget": 128, "hard": True, **keep}}], prefill_chunk=32
        )
        with kvtailor.attach(smollm2.model, plan):
            logits = smollm2.model(ids, use_cache=True).logits
        return torch.nn.functional.cross_entropy(logits[0, 256:-1], ids[0, 257:]).item()

    with_sinks, without = loss({"sinks": 4}), loss({"sinks": 0})
    full = torch.nn.functional.cross_entropy(smollm2.model(ids).logits[0, 256:-1], ids[0, 257:]).item()
    assert with_sinks < full + 1.0
    assert without > with_sinks + 0.3


class Poll(threading.Thread):
    """Watches the storages of all live tensors that have the shape of keys, values or positions, from outside."""

    def __init__(self, head_dim: int, heads: int) -> None:
        super().__init__(daemon=True)
        self.head_dim, self.heads = head_dim, heads
        self.stopped = threading.Event()
        self.peak, self.samples = 0, 0

    def is_kv(self, tensor: torch.Tensor) -> bool:
        if tensor.dtype == torch.int32:
            return tensor.dim() == 1
        flat = tensor.dim() == 2 and tensor.shape[1] == self.head_dim
        chunk = tensor.dim() == 4 and tensor.shape[1] == self.heads and tensor.shape[3] == self.head_dim
        return flat or chunk

    def storages(self):
        for thing in gc.get_objects():
            if type(thing) is torch.Tensor and self.is_kv(thing):
                storage = thing.untyped_storage()
                yield storage.data_ptr(), storage.nbytes()

    def sizes(self) -> dict[int, int]:
        """Looks while no other thread runs: one that was making a tuple would find it held here too, and fail."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(10)
        try:
            return dict(self.storages())
        finally:
            sys.setswitchinterval(before)

    def run(self) -> None:
        while not self.stopped.is_set():
            sizes = self.sizes()
            self.peak = max(self.peak, sum(sizes.values()))
            self.samples += 1
            time.sleep(0.005)


@pytest.mark.parametrize(
    ("kernels", "tokens", "mebibytes", "most_kept"),
    [("reference", 8000, 48, 1200), ("auto", 400, 10, 250)],
    indirect=["kernels"],
)
def test_a_hard_budget_holds_at_every_moment_of_a_long_prefill(smollm2, kernels, tokens, mebibytes, most_kept):
    """A long prompt in chunks under a few MiB: all live tensors of KV shape together stay within the budget + 3 %."""
    text = python_reference(tokens + 200, smollm2.tokenizer)
    ids = smollm2.tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    assert ids.shape[1] == tokens
    budget = mebibytes * 2**20
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    gc.collect()
    gc.freeze()  # what lives before is not listed again, so that a look at the rest is quick
    poll = Poll(head_dim=64, heads=3)
    try:
        with kvtailor.attach(smollm2.model, f"snapkv:{mebibytes}MiB") as attachment:
            cache = attachment.new_cache()
            poll.start()
            output = smollm2.model(ids, past_key_values=cache, logits_to_keep=1)
            for _ in range(4):
                output = smollm2.model(output.logits[:, -1:].argmax(-1), past_key_values=cache)
    finally:
        poll.stopped.set()
        poll.join()
        gc.unfreeze()
        sys.setswitchinterval(interval)
    report = cache.report()
    assert poll.samples > tokens // 16
    assert report.tokens_seen == tokens + 4 and report.tokens_kept < most_kept
    assert 0.9 * budget < poll.peak <= 1.03 * budget
    assert report.bytes_held <= report.bytes_peak <= budget
