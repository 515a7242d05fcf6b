"""The layers of the cache on the Triton kernels: as on the reference kernels, to the rounding of 16-bit products."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import kvtailor

sys.path.append(str(Path(__file__).parent.parent))

from zoo import ZOO, left_padded, text


@pytest.mark.parametrize("plan", ["int4", "int1", "adakv:60", "fifo:24"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_agree_with_the_reference_kernels(monkeypatch, kind, plan, padded):
    model = ZOO[kind].build()
    inputs = left_padded(150, 9) if padded else text(150)
    logits = {}
    for kernels in ("reference", "triton"):
        monkeypatch.setenv("KVTAILOR_KERNELS", kernels)
        with kvtailor.attach(model, plan):
            found = model.generate(
                **inputs, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
        logits[kernels] = torch.stack(found.logits)
    assert not torch.equal(logits["reference"], logits["triton"])  # the kernels ran
    torch.testing.assert_close(logits["triton"], logits["reference"], atol=2e-2, rtol=2e-2)
