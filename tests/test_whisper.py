"""A real recogniser: Whisper tiny.en, with self and cross attention tailored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvtailor
from kvtailor.models.load import load

GREEDY = {
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
    "max_new_tokens": 24,
    "min_new_tokens": 24,
}


@pytest.fixture(scope="module")
def whisper():
    return load("whisper-tiny.en")


@pytest.fixture(scope="module")
def features(whisper):
    """Two sounds of some structure; what is said does not matter, that it is the same with and without us does."""
    time = np.arange(16_000 * 4) / 16_000
    sounds = [np.sin(2 * np.pi * (200 + 60 * n) * time) * np.sin(2 * np.pi * 3 * time) ** 2 for n in range(2)]
    return whisper.feature_extractor(
        [s.astype(np.float32) for s in sounds], sampling_rate=16_000, return_tensors="pt"
    ).input_features


def run(whisper, features, plan):
    caches = []
    with kvtailor.attach(whisper.model, plan) as attachment:
        fresh = attachment.new_cache
        attachment.new_cache = lambda: caches.append(fresh()) or caches[-1]
        logits = torch.stack(whisper.model.generate(features, **GREEDY).logits)
    return logits, caches[-1].report()


@pytest.fixture(scope="module")
def expected(whisper, features):
    with torch.no_grad():
        return torch.stack(whisper.model.generate(features, **GREEDY).logits)


@pytest.mark.usefixtures("reference_kernels")
def test_full_retention_is_bit_identical(whisper, features, expected):
    assert torch.equal(run(whisper, features, "full")[0], expected)


@pytest.mark.usefixtures("kernels")
def test_packed_self_and_cross_attention_stay_close(whisper, features, expected):
    logits, report = run(whisper, features, "int8")
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
    assert report.bytes_held < 0.45 * report.bytes_default


@pytest.mark.usefixtures("reference_kernels")
def test_half_the_frames_leave_half_the_bytes(whisper, features, expected):
    plan = kvtailor.Plan(layers=[{"attention": "cross", "keep": {"policy": "random", "budget": "50%"}}])
    logits, report = run(whisper, features, plan)
    cross = [layer for layer in report.layers if layer.attention == "cross"]
    assert {layer.tokens_kept for layer in cross} == {750.0} and {layer.tokens_seen for layer in cross} == {1500}
    assert torch.isfinite(logits).all() and not torch.equal(logits, expected)


@pytest.mark.usefixtures("reference_kernels")
def test_beams_share_one_recording(whisper, features):
    settings = {"num_beams": 3, "do_sample": False, "max_new_tokens": 10}
    expected = whisper.model.generate(features, **settings)
    with kvtailor.attach(whisper.model, "full"):
        assert torch.equal(whisper.model.generate(features, **settings), expected)
