"""attach(..., compile=True): the same tokens from one compiled graph, without a break."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import kvtailor
from kvtailor.errors import ModelError
from zoo import ZOO, kv_cache, left_padded, text

SETTINGS = {"do_sample": False, "max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}


def test_compiled_steps_are_one_graph_for_every_length_and_give_the_same_logits():
    """Prompts, steps with padding and other caches run beside it."""
    model = ZOO["llama"].build()
    torch._dynamo.reset()
    counters.clear()
    with kvtailor.attach(model, "int4"):
        expected = [model.generate(**inputs, **SETTINGS) for inputs in (text(150), text(20), left_padded(30, 7))]
    with kvtailor.attach(model, "int4", compile=True):
        found = [model.generate(**inputs, **SETTINGS) for inputs in (text(150), text(20), left_padded(30, 7))]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.sequences, other.sequences)
        torch.testing.assert_close(torch.stack(one.logits), torch.stack(other.logits), atol=1e-4, rtol=1e-3)
        assert kv_cache(one).get_seq_length() == kv_cache(other).get_seq_length()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("kind", ["gemma3", "whisper"])
def test_a_model_whose_steps_cannot_be_compiled_is_refused_and_left_as_it_was(kind):
    model = ZOO[kind].build()
    before = model.get_decoder().forward
    with pytest.raises(ModelError, match="leave out compile=True"):
        kvtailor.attach(model, "full", compile=True)
    assert model.get_decoder().forward == before
    with kvtailor.attach(model, "int4" if kind == "whisper" else "full"):
        pass


def test_the_operator_says_its_shape_without_running():
    query, key = torch.empty(2, 6, 1, 16, device="meta"), torch.empty(2, 2, 1, 16, device="meta")
    out = torch.ops.kvtailor.step(query, key, key[..., :8], 0, 1.0, None, None, None)
    assert out.shape == (2, 1, 6, 8) and out.dtype == query.dtype
