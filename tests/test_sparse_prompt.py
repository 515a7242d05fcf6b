"""Prompts that attend to some blocks only: which blocks, and what is made of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtailor
from kvtailor.layers import sparse_prompt
from kvtailor.layers.sparse_prompt import BLOCK, NEAR, attend, block_scores, chosen_blocks
from zoo import ZOO, kv_cache, left_padded, text

pytestmark = pytest.mark.usefixtures("kernels")


def tensors(tokens: int, heads: int, group: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    query = torch.randn(1, heads * group, tokens, 16, generator=source)
    return query, *(torch.randn(1, heads, tokens, 16, generator=source) for _ in range(2))


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 900),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_each_query_attends_to_the_chosen_blocks_up_to_itself(tokens, heads, group, share, seed):
    """Against a mask built in loops; a share of 1 is causal attention."""
    query, key, value = tensors(tokens, heads, group, seed)
    worth = block_scores(query[0].view(heads, group, tokens, 16), key[0], 0.25)
    seen = torch.zeros(heads, tokens, tokens, dtype=torch.bool)
    for head in range(heads):
        for slot in range(tokens):
            for block in chosen_blocks(worth[:, slot // BLOCK], slot // BLOCK, share)[head].tolist():
                seen[head, slot, block * BLOCK : min((block + 1) * BLOCK, slot + 1)] = True
    if share == 1:
        assert torch.equal(seen, torch.ones_like(seen).tril())
    mask = seen.repeat_interleave(group, dim=0)[None]
    grouped = (part.repeat_interleave(group, dim=1) for part in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query, *grouped, mask, scale=0.25)
    found = attend(query, key, value, share, 0.25)
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=2e-5, rtol=1e-4)


@given(block=st.integers(0, 30), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_the_first_and_the_newest_blocks_are_read_and_no_later_one(block, share, seed):
    worth = torch.rand(2, 31, generator=torch.Generator().manual_seed(seed))
    chosen = chosen_blocks(worth, block, share)
    for row in chosen.tolist():
        assert row == sorted(set(row)) and row[-1] == block and row[0] == 0
        assert set(range(max(0, block - NEAR + 1), block + 1)) <= set(row)
        assert len(row) == min(
            block + 1, len({0, *range(max(0, block - NEAR + 1), block + 1)}) + int(share * block + 0.5)
        )


def plan(share: float, **entry) -> kvtailor.Plan:
    return kvtailor.Plan(layers=[{"prompt_share": share, **entry}])


@pytest.mark.parametrize("entry", [{}, {"form": {"kind": "rotated", "bits": 8}}, {"find": "codes"}])
def test_a_prompt_goes_over_blocks_and_what_is_held_is_the_same(entry, monkeypatch):
    """The first layer's keys do not depend on attention; steps go on as ever."""
    model, inputs = ZOO["llama"].build(), text(5 * BLOCK + 7)
    calls = []
    over_blocks = sparse_prompt.attend
    monkeypatch.setattr(sparse_prompt, "attend", lambda *given: calls.append(given[3]) or over_blocks(*given))
    with kvtailor.attach(model, plan(0.2, **entry)):
        output = model(**inputs, use_cache=True)
        cache = kv_cache(output)
        assert calls == [0.2] * 3
        assert model(torch.tensor([[5], [6]]), past_key_values=cache).logits.isfinite().all()
    assert calls == [0.2] * 3
    stock = kv_cache(model(**inputs, use_cache=True))
    if not entry:
        torch.testing.assert_close(cache.layers[0].keys[:, :, : 5 * BLOCK], stock.layers[0].keys[:, :, : 5 * BLOCK])


@pytest.mark.parametrize("entry", [{}, {"find": "codes"}])
def test_under_eager_attention_prompts_go_over_blocks_too(entry):
    """Its mask hides later tokens and nothing else; weights that are asked for are those of whole attention."""
    inputs, found = text(5 * BLOCK + 7), []
    for implementation in ("sdpa", "eager"):
        model = ZOO["llama"].build()
        model.set_attn_implementation(implementation)
        with kvtailor.attach(model, plan(0.0, **entry)):
            found.append(model(**inputs, use_cache=True).logits)
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=1e-4)
    whole = model(**inputs, output_attentions=True)
    assert (whole.logits - found[1]).abs().max() > 1e-2
    with kvtailor.attach(model, plan(0.0, **entry)):
        told = model(**inputs, use_cache=True, output_attentions=True)
    model.config.output_attentions = True
    with kvtailor.attach(model, plan(0.0, **entry)):
        told_always = model(**inputs, use_cache=True)
    for output in (told, told_always):
        torch.testing.assert_close(output.logits, whole.logits, atol=2e-5, rtol=1e-4)
        assert all(torch.equal(*pair) for pair in zip(output.attentions[:1], whole.attentions[:1], strict=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16])
def test_only_a_mask_that_says_nothing_of_its_own_is_passed_over(monkeypatch, dtype):
    monkeypatch.setattr(sparse_prompt, "ROWS_AT_ONCE", 100)
    query, key, _ = tensors(600, 1, 2, 0)
    causal = torch.ones(600, 600, dtype=torch.bool).tril()[None, None]

    def serves(shown: torch.Tensor, added: float = 0.0) -> bool:
        mask = shown
        if dtype != torch.bool:
            mask = torch.full(shown.shape, added, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)
        return sparse_prompt.serves(torch.nn.Module(), query, key, mask, {})

    assert serves(causal) and serves(causal.expand(3, 2, -1, -1))
    assert dtype == torch.bool or not serves(causal, added=0.5)
    assert not serves(causal[..., :-1]) and not serves(torch.cat([causal, causal], dim=-1))
    for row, column in ((599, 0), (0, 0), (250, 249), (250, 251), (0, 599)):
        other = causal.clone()
        other[..., row, column] ^= True
        assert not serves(other)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_padding_soft_caps_sinks_and_short_prompts_are_attended_whole(name):
    model = ZOO[name].build()
    inputs = left_padded(5 * BLOCK, 100) if name == "llama" else text(200)
    expected = model(**inputs).logits
    with kvtailor.attach(model, plan(0.1)):
        found = model(**inputs, use_cache=True).logits
    shown = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[shown], expected[shown], atol=2e-5, rtol=1e-4)


def test_a_share_is_part_of_the_words_and_checked():
    assert plan(0.25).layers[0].in_words == "25% of prompts" and not plan(0.25).layers[0].is_full
    with pytest.raises(kvtailor.PlanError, match="prompt_share"):
        plan(1.5)
