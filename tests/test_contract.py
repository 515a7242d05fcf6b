"""What a cache that drops or packs tokens owes to Transformers: sizes, masks, positions, and every cache operation.

Every test runs on the reference kernels and on the compiled ones, unless it says otherwise.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import kvtailor
from kvtailor.errors import CacheError, KernelError
from zoo import ZOO, kv_cache, left_padded, text

GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
BUDGET, SINKS = 24, 4
FIFO = kvtailor.Plan(layers=[{"keep": {"policy": "fifo", "budget": BUDGET, "sinks": SINKS}}])
HARD_FIFO = kvtailor.Plan(
    layers=[{"keep": {"policy": "fifo", "budget": BUDGET, "sinks": SINKS, "hard": True}}], prefill_chunk=4
)
INT8 = kvtailor.Plan(layers=[{"form": {"kind": "rotated", "bits": 8, "exact": 8, "residual": 8}}])
DROPPING = {
    name: kvtailor.Plan(layers=[{"keep": {"policy": name, "budget": 24, "options": options}}])
    for name, options in {
        "fifo": {}, "lru": {"top": 4}, "random": {}, "keynorm": {}, "keydiff": {}, "streaming": {}, "h2o": {},
        "snapkv": {"window": 8}, "pyramidkv": {"window": 8}, "adakv": {"window": 8},
    }.items()
}  # fmt: skip
PACKING = {
    "int8": INT8,
    "int2": kvtailor.Plan(layers=[{"form": {"kind": "rotated", "bits": 2, "exact": 8, "residual": 8}}]),
    "channel": kvtailor.Plan(layers=[{"form": {"kind": "channel", "bits": 4, "exact": 0, "residual": 8}}]),
    "both": kvtailor.Plan(
        layers=[
            {
                "form": {"kind": "rotated", "bits": 4, "exact": 8, "residual": 8},
                "keep": {"policy": "h2o", "budget": 150},
            }
        ]
    ),
}
EVERY = {**DROPPING, **PACKING}
# What the compiled kernels hold in each way of their own: renumbered, uneven over heads, packed by token and by channel, marked.
COMPILED = ("streaming", "adakv", "channel", "both")

pytestmark = pytest.mark.usefixtures("kernels")
on_reference = pytest.mark.parametrize("kernels", ["reference"], indirect=True)


def with_plans(plans, compiled=COMPILED):
    """Run a test with each plan on the reference kernels, and with some on the compiled ones too."""
    pairs = [*(("reference", name) for name in plans), *(("auto", name) for name in compiled)]
    cases = [pytest.param(kernels, plans[name], id=f"{kernels}-{name}") for kernels, name in pairs]
    return pytest.mark.parametrize(("kernels", "plan"), cases, indirect=["kernels"])


def build(name="llama"):
    return ZOO[name].build()


def generate(model, inputs, tokens, **settings):
    found = model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, **GREEDY, **settings)
    return binding(found)


def binding(output):
    """The output, after a check that every budget below the length of its sequence dropped something."""
    cache = kv_cache(output)
    for layer in cache.tailored() if isinstance(cache, kvtailor.KVCache) else ():
        budget = layer.plan.keep.budget
        if budget is not None and budget.kind == "tokens" and layer.seen > budget.amount + 64:
            assert layer.kept < layer.seen
    return output


def visible(
    seen: int, prompt: int, real_from: int = 0, budget: int = BUDGET, sinks: int = SINKS, chunk: int | None = None
):
    """(seen, seen) mask of what each query sees under FIFO: whole prompt, then sinks and the newest tokens.

    With ``chunk`` the budget holds in the prompt too: before each chunk the row is brought to the budget less the chunk.
    """
    mask = torch.zeros(seen, seen, dtype=torch.bool)
    held: list[int] = []
    start = 0
    while start < seen:
        stop = start + 1 if start >= prompt else (prompt if chunk is None else min(prompt, start + chunk))
        coming = [slot for slot in range(start, stop) if slot >= real_from]
        room = budget - (len(coming) if chunk or start >= prompt else 0)
        if (chunk or start >= prompt) and len(held) > room:
            held = held[:sinks] + held[len(held) - (room - sinks) :]
        held = held + coming
        for slot in coming:
            mask[slot, [other for other in held if other <= slot]] = True
        if start < prompt <= stop and len(held) > budget:
            held = held[:sinks] + held[len(held) - (budget - sinks) :]
        start = stop
    return mask


def by_mask(model, sequence, mask, pads=None):
    """Logits of an uncompressed model that is told by an explicit mask what each query may see."""
    positions = None
    if pads is not None:
        positions = (torch.arange(sequence.shape[1])[None, :] - pads[:, None]).clamp(min=0)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    model.set_attn_implementation("eager")
    logits = model(input_ids=sequence, attention_mask=additive, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation("sdpa")
    return logits


class TestAgainstAnExplicitMask:
    """The reference is independent: no cache, stock eager attention, a 4-D mask of what was held at each step."""

    def check(self, found, model, mask, prompt, pads=None):
        steps = len(found.logits)
        assert kv_cache(found).report().tokens_kept < kv_cache(found).report().tokens_seen
        expected = by_mask(model, found.sequences, mask, pads)[:, prompt - 1 : prompt - 1 + steps]
        torch.testing.assert_close(torch.stack(found.logits, dim=1), expected, atol=2e-5, rtol=1e-4)

    @pytest.mark.parametrize("name", ["llama", "qwen3", "gpt-neox", "phi3", "gemma2", "gpt-oss"])
    def test_decoding(self, name):
        model, inputs = build(name), text(40)
        if name in (
            "gemma2",
            "gpt-oss",
        ):  # beside full layers they have window layers, which an explicit mask cannot tell
            return self.check_hybrid(model, inputs)
        with kvtailor.attach(model, FIFO):
            found = generate(model, inputs, 12)
        self.check(found, model, visible(52, 40).expand(2, 1, -1, -1), 40)

    def check_hybrid(self, model, inputs):
        """The full layer's own mask goes in by kind, as these models take a mask per layer type."""
        model.set_attn_implementation("eager")
        with kvtailor.attach(model, FIFO):
            found = generate(model, inputs, 12)
        seen = found.sequences.shape[1]
        causal = torch.ones(seen, seen, dtype=torch.bool).tril()
        window = causal & ~causal.tril(-16)
        masks = {
            kind: torch.zeros(2, 1, seen, seen).masked_fill(~mask, torch.finfo(torch.float32).min)
            for kind, mask in {"full_attention": visible(seen, 40), "sliding_attention": window}.items()
        }
        logits = model(input_ids=found.sequences, attention_mask=masks, use_cache=False).logits
        torch.testing.assert_close(torch.stack(found.logits, dim=1), logits[:, 39:-1], atol=2e-5, rtol=1e-4)

    def test_left_padded_rows(self):
        model, inputs = build(), left_padded(40, 13)
        with kvtailor.attach(model, FIFO):
            found = generate(model, inputs, 12)
        masks = torch.stack([visible(52, 40, real_from=13), visible(52, 40)])[:, None]
        self.check(found, model, masks, 40, pads=torch.tensor([13, 0]))

    def test_chunked_prefill_under_a_hard_budget(self):
        model, inputs = build(), text(40)
        chunks = []
        with kvtailor.attach(model, HARD_FIFO) as attachment:
            cache = attachment.new_cache()
            chunk_of = cache.chunk
            cache.chunk = lambda tokens, rows: chunks.append(chunk_of(tokens, rows)) or chunks[-1]
            found = generate(model, inputs, 12, past_key_values=cache)
        assert cache.report().tokens_kept <= BUDGET
        mask = visible_by_chunks(52, 40, chunks)
        self.check(found, model, mask.expand(2, 1, -1, -1), 40)

    def test_a_conversation_continues(self):
        model, first = build(), text(40)
        with kvtailor.attach(model, FIFO):
            cache = kvtailor.KVCache(model, FIFO)
            answer = generate(model, first, 8, past_key_values=cache).sequences
            turn = torch.cat([answer, text(9, seed=7)["input_ids"]], dim=1)
            found = generate(
                model, {"input_ids": turn, "attention_mask": torch.ones_like(turn)}, 6, past_key_values=cache
            )
        # All tokens of the second turn see what was held when it began, and each other.
        seen = found.sequences.shape[1]
        mask = visible(48, 40)
        full = torch.zeros(seen, seen, dtype=torch.bool)
        full[:48, :48] = mask
        # 47 tokens were seen: the last answered token comes with the second turn.
        held = [*range(SINKS), *range(47 - (BUDGET - SINKS), 47)]
        for slot in range(47, 57):
            full[slot] = False
            full[slot, [*held, *range(47, slot + 1)]] = True
        held = held + list(range(47, 57))
        for slot in range(57, seen):
            held = [*held[:SINKS], *held[len(held) - (BUDGET - 1 - SINKS) :], slot]
            full[slot, held] = True
        self.check(found, model, full.expand(2, 1, -1, -1), 57)


def visible_by_chunks(seen, prompt, chunks):
    """What each query sees under a hard FIFO budget, for the chunks that were really taken."""
    mask = torch.zeros(seen, seen, dtype=torch.bool)
    held: list[int] = []
    start, sizes = 0, list(chunks)
    while start < seen:
        size = 1 if start >= prompt else min(sizes.pop(0), prompt - start)
        room = BUDGET - size
        if len(held) > room:
            held = held[:SINKS] + held[len(held) - (room - SINKS) :]
        held += range(start, start + size)
        for slot in range(start, start + size):
            mask[slot, [other for other in held if other <= slot]] = True
        start += size
    return mask


@with_plans(EVERY)
class TestEveryPlan:
    def test_a_padded_row_is_the_same_row_alone(self, plan):
        model = build()
        inputs = left_padded(200, 30)
        alone = {"input_ids": inputs["input_ids"][:1, 30:], "attention_mask": inputs["attention_mask"][:1, 30:]}
        with kvtailor.attach(model, plan):
            batch, single = generate(model, inputs, 8), generate(model, alone, 8)
        for together, apart in zip(batch.logits, single.logits, strict=True):
            torch.testing.assert_close(together[0], apart[0], atol=5e-4, rtol=1e-3)

    def test_right_padding_is_never_held(self, plan):
        model, inputs = build(), text(200)
        inputs["input_ids"][0, 180:] = 0
        inputs["attention_mask"][0, 180:] = 0
        alone = {name: part[:1, :180] for name, part in inputs.items()}
        next_ids, cut = torch.tensor([[7], [8]]), torch.ones(2, 1, dtype=torch.long)
        with kvtailor.attach(model, plan):
            output = binding(model(**inputs, position_ids=torch.arange(200).expand(2, -1), use_cache=True))
            mask = torch.cat([inputs["attention_mask"], cut], dim=1)
            place = torch.tensor([[180], [200]])
            padded = model(next_ids, attention_mask=mask, position_ids=place, past_key_values=kv_cache(output)).logits
            output = binding(model(**alone, use_cache=True))
            single = model(next_ids[:1], position_ids=place[:1], past_key_values=kv_cache(output)).logits
        torch.testing.assert_close(padded[0], single[0], atol=5e-4, rtol=1e-3)

    def test_the_content_of_padding_never_matters(self, plan):
        model, inputs = build(), left_padded(200, 30)
        other = {**inputs, "input_ids": inputs["input_ids"].clone()}
        other["input_ids"][0, :30] = 77
        with kvtailor.attach(model, plan):
            one, two = generate(model, inputs, 6), generate(model, other, 6)
        assert all(torch.equal(a[1], b[1]) for a, b in zip(one.logits, two.logits, strict=True))
        assert all(torch.allclose(a[0], b[0], atol=1e-6) for a, b in zip(one.logits, two.logits, strict=True))

    def test_chunks_change_nothing_while_the_budget_is_soft(self, plan):
        model, inputs = build(), left_padded(200, 30)
        chunked = plan.model_copy(update={"prefill_chunk": 48})
        with kvtailor.attach(model, plan):
            whole = generate(model, inputs, 6)
        with kvtailor.attach(model, chunked):
            parts = generate(model, inputs, 6)
        assert kept_positions(kv_cache(whole))[0] == kept_positions(kv_cache(parts))[0]
        if plan.layers[0].form.kind == "dense":  # later chunks see the earlier ones exactly
            torch.testing.assert_close(whole.logits[0], parts.logits[0], atol=2e-5, rtol=1e-4)
            assert kept_positions(kv_cache(whole)) == kept_positions(kv_cache(parts))

    def test_embeddings_instead_of_ids(self, plan):
        model, inputs = build(), text(200)
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        with kvtailor.attach(model, plan.model_copy(update={"prefill_chunk": 64})):
            by_ids = generate(model, inputs, 6)
            by_embeds = generate(model, {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}, 6)
        torch.testing.assert_close(torch.stack(by_ids.logits), torch.stack(by_embeds.logits))

    def test_reset_and_use_again(self, plan):
        model, inputs = build(), text(200)
        with kvtailor.attach(model, plan):
            cache = kvtailor.KVCache(model, plan)
            first = generate(model, inputs, 6, past_key_values=cache)
            generate(model, text(50, seed=9), 3, past_key_values=(other := kvtailor.KVCache(model, plan)))
            cache.reset()
            assert cache.get_seq_length() == 0 and cache.nbytes() == 0
            second = generate(model, inputs, 6, past_key_values=cache)
        assert other.get_seq_length() == 52
        assert all(torch.equal(a, b) for a, b in zip(first.logits, second.logits, strict=True))

    def test_lengths_from_one_token_keep_at_least_one(self, plan):
        model = build()
        with kvtailor.attach(model, plan):
            for length in range(1, 9):
                found = generate(model, text(length), 3)
                assert torch.isfinite(torch.stack(found.logits)).all()
                assert kv_cache(found).report().tokens_kept >= 1

    def test_fractions_keep_at_least_the_protected_tokens_of_short_prompts(self, plan):
        keep = plan.layers[0].keep
        if keep.policy == "all":
            return
        options = {"window": 1} if "window" in keep.options else {}
        plan = kvtailor.Plan(layers=[{"keep": {"policy": keep.policy, "budget": "1%", "sinks": 0, "options": options}}])
        model = build()
        with kvtailor.attach(model, plan):
            for length in range(1, 9):
                found = generate(model, text(length), 4)
                assert torch.isfinite(torch.stack(found.logits)).all()
                assert kv_cache(found).report().tokens_kept >= 1

    def test_batch_operations_touch_everything(self, plan):
        """Selecting, repeating and reordering rows equals having run those rows from the start."""
        model, inputs = build(), left_padded(200, 30)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], dim=1)
        step = torch.tensor([[11], [12]])

        def after(change, rows):
            with kvtailor.attach(model, plan):
                output = binding(model(**inputs, use_cache=True))
                cache = kv_cache(model(step, attention_mask=mask, past_key_values=kv_cache(output), use_cache=True))
                change(cache)
                mask_now = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)[rows]
                return model(torch.tensor([[13], [14]])[rows], attention_mask=mask_now, past_key_values=cache).logits

        base = after(lambda cache: None, [0, 1])
        for change, rows in [
            (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
            (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
            (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
            (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        ]:
            torch.testing.assert_close(after(change, rows), base[rows], atol=1e-5, rtol=1e-4)

    def test_rows_that_were_one_part_ways(self, plan):
        """After a row was taken twice, what one copy sees does not reach the other."""
        model, inputs = build(), text(200, rows=1)
        with kvtailor.attach(model, plan):
            cache = kv_cache(binding(model(**inputs, use_cache=True)))
            cache.batch_repeat_interleave(2)
            for ids in ([[5], [6]], [[7], [8]], [[9], [9]]):
                together = model(torch.tensor(ids), past_key_values=cache).logits
            for row in (0, 1):
                cache = kv_cache(binding(model(**inputs, use_cache=True)))
                for ids in ([[5], [6]], [[7], [8]], [[9], [9]]):
                    alone = model(torch.tensor(ids)[row : row + 1], past_key_values=cache).logits
                torch.testing.assert_close(together[row], alone[0], atol=2e-5, rtol=1e-4)

    def test_a_crop_right_after_a_step_leaves_no_trace(self, plan, kernels):
        """Compiled kernels attend few queries to codes in 8 and 16 bits, and many, as a guess brings them, in fp32."""
        near = (2e-5, 1e-4) if kernels.exact or plan.layers[0].form.kind == "dense" else (4e-3, 1e-2)
        model, inputs = build(), text(200)
        with kvtailor.attach(model, plan):
            straight = kvtailor.KVCache(model, plan)
            tried = kvtailor.KVCache(model, plan)
            for cache in (straight, tried):
                cache.activate_past_recording()
                model(**inputs, past_key_values=cache)
                cache.crop(0)
            for ids in ([5, 6, 7], [8], [9, 10], [11, 12, 13, 14]):
                guess = torch.tensor([[*ids, 1, 2, 3]]).expand(2, -1)
                found = model(guess, past_key_values=tried).logits[:, : len(ids)]
                tried.crop(-3)
                expected = model(guess[:, : len(ids)], past_key_values=straight).logits
                straight.crop(0)
                torch.testing.assert_close(found, expected, atol=near[0], rtol=near[1])
                assert tried.get_seq_length() == straight.get_seq_length()
        binding({"cache": tried})
        assert kept_positions(tried) == kept_positions(straight)

    def test_beams_run_and_keep_their_own_tokens(self, plan):
        model, inputs = build(), text(60)
        with kvtailor.attach(model, plan):
            found = model.generate(**inputs, max_new_tokens=8, num_beams=3, do_sample=False)
        assert found.shape[0] == 2 and found.shape[1] <= 68

    def test_prompt_lookup_and_assisted_decoding_give_the_greedy_tokens(self, plan):
        model, inputs = build(), text(200, rows=1)
        inputs["input_ids"][:, 100:] = inputs["input_ids"][:, :100]
        with kvtailor.attach(model, plan):
            greedy = generate(model, inputs, 12)
            looked_up = generate(model, inputs, 12, prompt_lookup_num_tokens=3)
            assistant = build()
            assisted = generate(model, inputs, 12, assistant_model=assistant)
        for found in (looked_up, assisted):
            assert found.sequences.shape == greedy.sequences.shape
            if plan in DROPPING.values():
                # A speculative step makes room before its guesses, not for each of them, and the first one brings
                # prompt and guesses at once: what is dropped may differ from one token at a time.
                assert kv_cache(found).report().tokens_kept <= BUDGET + 20
            else:
                assert torch.equal(found.sequences, greedy.sequences)

    def test_a_model_that_assists_itself_by_exiting_early_gives_the_greedy_tokens(self, plan):
        """Crops reach the layers that the guesses left out, too."""
        model, inputs = build(), text(100, rows=1)
        with kvtailor.attach(model, plan):
            greedy, early = generate(model, inputs, 8), generate(model, inputs, 8, assistant_early_exit=1)
        assert early.sequences.shape == greedy.sequences.shape
        if plan not in DROPPING.values():
            assert torch.equal(early.sequences, greedy.sequences)

    def test_deep_copies_are_independent(self, plan):
        model, inputs = build(), text(200)
        with kvtailor.attach(model, plan):
            first, step = torch.tensor([[3], [4]]), torch.tensor([[5], [6]])
            cache, again = (kv_cache(binding(model(**inputs, use_cache=True))) for _ in range(2))
            for held in (cache, again):
                model(first, past_key_values=held)
            other = copy.deepcopy(cache)
            model(torch.tensor([[7], [8]]), past_key_values=cache)
            assert other.get_seq_length() == 201 and cache.get_seq_length() == 202
            found = model(step, past_key_values=other).logits
            torch.testing.assert_close(found, model(step, past_key_values=again).logits)

    def test_bytes_reported_are_bytes_held(self, plan):
        model, inputs = build(), left_padded(200, 30)
        with kvtailor.attach(model, plan):
            cache = kv_cache(generate(model, inputs, 6))
        report = cache.report()
        assert report.bytes_held == storage_bytes(cache)
        assert report.bytes_peak >= report.bytes_held
        assert report.tokens_seen == 205
        stock = kv_cache(generate(model, inputs, 6))
        assert report.bytes_default == sum(
            t.numel() * t.element_size() for layer in stock.layers for t in (layer.keys, layer.values)
        )


def kept_positions(cache):
    return [
        [[row.positions()[h, :n].tolist() for h, n in enumerate(row.lengths)] for row in layer.rows]
        for layer in cache.layers
    ]


def storage_bytes(cache):
    """Bytes of every storage reachable from a cache's layers, walked independently of the report."""
    storages, pending, known = {}, [vars(layer) for layer in cache.layers], set()
    while pending:
        value = pending.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
        # What compiled kernels were handed has no attributes: it reads tensors that are met elsewhere.
        elif type(value).__module__.startswith("kvtailor") and hasattr(value, "__dict__"):
            pending.append(vars(value))
    storages.pop(0, None)
    return sum(storages.values())


class TestBeams:
    @pytest.mark.parametrize("name", ["llama", "whisper", "bart", "t5"])
    def test_beams_without_loss_equal_the_default_cache(self, name):
        kind = ZOO[name]
        model, inputs = kind.build(), kind.inputs(20)
        settings = {"max_new_tokens": 10, "num_beams": 4, "do_sample": False}
        expected = model.generate(**inputs, **settings)
        for plan in ("full", "int8", "fifo:500"):
            with kvtailor.attach(model, plan):
                assert torch.equal(model.generate(**inputs, **settings), expected)


class TestFullyCachedPrompt:
    def test_a_cache_cropped_by_one_answers_as_a_fresh_one(self):
        model, inputs = build(), text(40)
        for plan in ("full", INT8):
            with kvtailor.attach(model, plan):
                expected = generate(model, inputs, 5)
                cache = kvtailor.KVCache(model, plan)
                model(**inputs, past_key_values=cache)
                cache.crop(-1)
                found = generate(model, inputs, 5, past_key_values=cache)
            assert torch.equal(found.sequences, expected.sequences)

    def test_prefix_then_whole_prompt_equals_one_shot(self):
        model, inputs = build(), text(40)
        prefix = {name: part[:, :25] for name, part in inputs.items()}
        for plan in ("full", INT8):
            with kvtailor.attach(model, plan):
                cache = kvtailor.KVCache(model, plan)
                model(**prefix, past_key_values=cache)
                found = generate(model, inputs, 5, past_key_values=cache)
                expected = generate(model, inputs, 5)
            torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=2e-3, rtol=1e-3)


class TestPerLayerBudgets:
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_layers_may_keep_different_numbers_of_tokens(self, implementation):
        model, inputs = build(), left_padded(60, 10)
        model.set_attn_implementation(implementation)
        plan = kvtailor.Plan(
            layers=[
                {"layers": 0, "keep": {"policy": "fifo", "budget": 12}},
                {"layers": -1, "keep": {"policy": "h2o", "budget": 30}},
            ]
        )
        with kvtailor.attach(model, plan):
            cache = kvtailor.KVCache(model, plan)
            first = generate(model, inputs, 5, past_key_values=cache)
            more = torch.cat([first.sequences, text(6, seed=3)["input_ids"]], dim=1)
            mask = torch.cat([inputs["attention_mask"], torch.ones(2, 11, dtype=torch.long)], dim=1)
            second = generate(model, {"input_ids": more, "attention_mask": mask}, 4, past_key_values=cache)
        kept = [layer.tokens_kept for layer in cache.report().layers]
        assert kept[0] == 12 and kept[2] == 30 and kept[1] == cache.get_seq_length()
        assert torch.isfinite(torch.stack(second.logits)).all()


class TestRefusedUse:
    def test_an_evicting_cache_needs_the_attention(self):
        model, inputs = build(), text(20)
        with pytest.raises(CacheError, match="not active: run the model inside"):
            model(**inputs, past_key_values=kvtailor.KVCache(model, FIFO))

    def test_a_packed_cache_without_the_attention_hands_out_true_tensors(self):
        model, inputs = build(), text(200)
        cache = kvtailor.KVCache(model, INT8)
        expected = generate(model, inputs, 8)
        found = generate(model, inputs, 8, past_key_values=cache)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-2, rtol=1e-2)
        assert cache.report().bytes_held < cache.report().bytes_default

    def test_a_full_cache_without_the_attention_is_the_default_cache(self):
        model, inputs = build(), left_padded(40, 9)
        expected = generate(model, inputs, 8)
        found = generate(model, inputs, 8, past_key_values=kvtailor.KVCache(model, "full"))
        assert all(torch.equal(a, b) for a, b in zip(found.logits, expected.logits, strict=True))

    def test_a_cache_of_another_model_is_refused(self):
        one, two = build(), build()
        cache = kvtailor.KVCache(one, FIFO)
        with (
            kvtailor.attach(two, FIFO),
            pytest.raises(CacheError, match="was made for a LlamaForCausalLM, and another"),
        ):
            two(**text(20), past_key_values=cache)

    def test_an_empty_prompt_is_refused(self):
        model = build()
        with kvtailor.attach(model, FIFO), pytest.raises(CacheError, match="prompt is empty"):
            model(torch.zeros(1, 0, dtype=torch.long), use_cache=True)

    def test_a_batch_of_another_size_is_refused_and_nothing_is_lost(self):
        model, inputs = build(), text(40)
        for plan in (FIFO, INT8, "full"):
            with kvtailor.attach(model, plan):
                cache = kvtailor.KVCache(model, plan)
                model(**inputs, past_key_values=cache)
                with pytest.raises(CacheError, match="got keys of 3 sequences"):
                    model(torch.tensor([[1], [2], [3]]), past_key_values=cache)
                expected = kv_cache(model(**inputs, use_cache=True))
                one = model(torch.tensor([[5], [6]]), past_key_values=cache).logits
                two = model(torch.tensor([[5], [6]]), past_key_values=expected).logits
            torch.testing.assert_close(one, two)

    @with_plans(EVERY)
    def test_a_pass_that_fails_leaves_the_cache_as_it_was(self, plan):
        model, inputs = build(), text(200)
        step, after = torch.tensor([[5], [6]]), torch.tensor([[7], [8]])

        def fail(*args, **kwargs):
            raise RuntimeError("in the middle")

        with kvtailor.attach(model, plan):
            expected = kv_cache(model(**inputs, use_cache=True))
            cache = kv_cache(model(**inputs, use_cache=True))
            model.model.layers[1].mlp.forward = fail
            with pytest.raises(RuntimeError, match="in the middle"):
                model(step, past_key_values=cache)
            with pytest.raises(RuntimeError, match="in the middle"):
                model(**inputs, past_key_values=(unused := kvtailor.KVCache(model, plan)))
            del model.model.layers[1].mlp.forward
            assert cache.get_seq_length() == 200 and unused.get_seq_length() == 0
            for ids in (step, after):
                found = model(ids, past_key_values=cache).logits
                torch.testing.assert_close(found, model(ids, past_key_values=expected).logits, atol=1e-5, rtol=1e-4)
            found = model(**inputs, past_key_values=unused).logits
            torch.testing.assert_close(found, model(**inputs, use_cache=True).logits)

    @pytest.mark.parametrize(
        ("kernels", "plan"),
        [("reference", "streaming:16"), ("auto", "streaming:16"), ("reference", "h2o:50%"), ("reference", "fifo:50%")],
        indirect=["kernels"],
    )
    def test_tokens_that_are_cropped_count_no_more_even_where_they_were_dropped(self, plan):
        """A long second prompt evicts much of itself before it fails or is cropped."""
        model, inputs = build(), text(70)
        first, second = inputs["input_ids"][:, :10], inputs["input_ids"][:, 10:60]
        with kvtailor.attach(model, plan):
            cache = kv_cache(model(first, use_cache=True))
            model(second, past_key_values=cache)
            cache.crop(-40)
            for layer in cache.tailored():
                assert [(row.total, row.prompt <= 20) for row in layer.rows] == [(20, True)] * 2
            if plan.startswith("streaming"):
                row = cache.layers[0].rows[0]
                near, *_ = cache.layers[0].visible_parts(row)
                assert near.length == 4 and 20 - row.lengths[0] >= 0

    def test_what_a_crop_leaves_of_a_packed_block_can_be_evicted_too(self):
        """A hard budget holds after a crop into packed tokens, and FIFO does not keep the oldest for ever."""
        form = {"kind": "rotated", "bits": 4, "exact": 0, "residual": 0}
        plan = kvtailor.Plan(
            layers=[{"keep": {"policy": "fifo", "budget": 260, "hard": True, "sinks": 0}, "form": form}],
            prefill_chunk=16,
        )
        model, inputs = build(), text(257)
        with kvtailor.attach(model, plan):
            cache = kv_cache(model(**inputs, use_cache=True))
            for layer in cache.tailored():
                layer.step.recording = True
            cache.crop(-3)
            for layer in cache.tailored():
                layer.step.recording = False
            most = 0
            for _ in range(140):
                model(inputs["input_ids"][:, :1], past_key_values=cache)
                most = max(most, *(max(row.lengths) for layer in cache.tailored() for row in layer.rows))
            oldest = [min(row.positions().min() for row in layer.rows) for layer in cache.tailored()]
        assert most <= 260 and all(slot > 64 for slot in oldest)

    def test_a_window_of_which_a_crop_leaves_nothing_does_not_vote(self):
        plan = kvtailor.Plan(
            layers=[{"keep": {"policy": "snapkv", "budget": 24, "hard": True, "options": {"window": 4}}}],
            prefill_chunk=4,
        )
        model, inputs = build(), text(60)
        with kvtailor.attach(model, plan):
            cache = kv_cache(model(**inputs, use_cache=True))
            cache.activate_past_recording()
            cache.crop(-4)
            assert model(inputs["input_ids"][:, :10], past_key_values=cache).logits.isfinite().all()

    @with_plans({"channel": PACKING["channel"], "int8": INT8}, compiled=("channel", "int8"))
    def test_what_was_packed_in_inference_mode_serves_steps_with_gradients(self, plan):
        model, inputs = build().requires_grad_(), text(150)
        with kvtailor.attach(model, plan):
            with torch.inference_mode():
                cache = kv_cache(model(**inputs, use_cache=True))
            with torch.enable_grad():
                model(torch.tensor([[5], [6]]), past_key_values=cache).logits.sum().backward()
        assert model.model.layers[0].self_attn.q_proj.weight.grad.isfinite().all()

    def test_packed_tokens_added_without_attention_come_for_all_rows_or_none(self):
        """Sealing one row fails for a number that is not finite before anything is added."""
        layer = kvtailor.KVCache(build(), "int4").layers[0]
        key = torch.randn(2, 2, 300, 16)
        key[1, 0, 100] = torch.nan
        layer.update(key, key)
        before = [row.lengths for row in layer.rows], layer.seen
        with pytest.raises(KernelError, match="finite"):
            layer.update(key[:, :, :1], key[:, :, :1])
        assert layer.seen == before[1] == 300 and sum(layer.rows[1].lengths) == sum(before[0][1])

    @with_plans({**PACKING, "full": "full", "tailor": "tailor:40"}, compiled=("int8", "tailor", "full"))
    def test_tokens_computed_elsewhere_are_held_as_those_of_a_prompt(self, plan):
        model, inputs = build(), text(300)
        stock = kv_cache(model(**inputs, use_cache=True))
        pairs = [(layer.keys, layer.values) for layer in stock.layers]
        cache = kvtailor.KVCache(model, plan)
        if plan is PACKING["both"]:
            with pytest.raises(CacheError, match="h2o 150, rotated 4-bit, which must see the attention"):
                cache.take(pairs)
            assert cache.get_seq_length() == 0
            return
        cache.take(pairs)
        with kvtailor.attach(model, plan):
            expected = kv_cache(model(**inputs, use_cache=True))
            assert cache.report().bytes_held == expected.report().bytes_held
            step = torch.tensor([[5], [6]])
            found = model(step, past_key_values=cache).logits
            torch.testing.assert_close(found, model(step, past_key_values=expected).logits, atol=1e-5, rtol=1e-4)
        with pytest.raises(CacheError, match="2 pairs of keys and values for 3 layers"):
            cache.take(pairs[:2])

    def test_a_crop_beyond_the_beginning_is_refused(self):
        model = build()
        with kvtailor.attach(model, INT8):
            cache = kv_cache(model(**text(20), use_cache=True))
            with pytest.raises(CacheError, match="crop of 21 tokens, and only 20 were seen"):
                cache.crop(-21)
        assert cache.get_seq_length() == 20

    def test_a_crop_is_zero_or_negative_as_in_transformers(self):
        model = build()
        with kvtailor.attach(model, "full"):
            cache = kv_cache(model(**text(20), use_cache=True))
            with pytest.raises(ValueError, match="number of tokens to remove"):
                cache.crop(5)
        assert isinstance(cache, DynamicCache)


ROTATED = {"kind": "rotated", "bits": 8, "exact": 16, "residual": 16}
CHANNEL = {"kind": "channel", "bits": 1, "exact": 16, "residual": 16}


class TestHardBudgets:
    """A budget in bytes holds after every pass, whatever the form, for a batch too."""

    @pytest.mark.parametrize(
        ("kernels", "policy", "form"),
        [
            *(("reference", policy, form) for policy in ("fifo", "h2o", "snapkv") for form in ({}, ROTATED, CHANNEL)),
            *(("auto", "fifo", {}), ("auto", "h2o", ROTATED), ("auto", "snapkv", CHANNEL)),
        ],
        indirect=["kernels"],
    )
    def test_no_pass_of_a_long_prompt_exceeds_the_budget(self, policy, form):
        options = {"window": 8} if policy == "snapkv" else {}
        plan = kvtailor.Plan(
            layers=[{"keep": {"policy": policy, "budget": "400KiB", "options": options}, "form": form}]
        )
        model, inputs = build(), text(1500)
        with kvtailor.attach(model, plan):
            cache = kvtailor.KVCache(model, plan)
            output = model(**inputs, past_key_values=cache, logits_to_keep=1)
            for _ in range(70):
                output = model(output.logits[:, -1:].argmax(-1), past_key_values=cache)
        report = cache.report()
        assert report.tokens_kept < report.tokens_seen == 1570
        assert 0.7 * 400 * 1024 < report.bytes_peak <= 1.03 * 400 * 1024
        assert storage_bytes(cache) == report.bytes_held

    def test_a_prompt_at_once_that_does_not_fit_is_refused_with_the_chunk_that_would(self):
        model, inputs = build(), text(60)
        plan = kvtailor.Plan(layers=[{"keep": {"policy": "fifo", "budget": 24, "hard": True}}])
        with kvtailor.attach(model, plan):
            cache = kvtailor.KVCache(model, plan)
            cache.activate_past_recording()
            model(input_ids=inputs["input_ids"][:, :20], past_key_values=cache)
            with pytest.raises(CacheError, match="40 tokens come at once, and the hard budget 24 has room for 20"):
                model(input_ids=inputs["input_ids"][:, 20:], past_key_values=cache)


class TestOddInputs:
    """What was once wrong, or easily goes wrong."""

    @pytest.mark.parametrize(
        ("kernels", "plan"),
        [("reference", "snapkv:200KiB"), ("reference", "int4"), ("reference", "fifo:24"), ("auto", "int4")],
        indirect=["kernels"],
    )
    def test_a_prompt_whose_rows_all_begin_with_padding(self, plan):
        """The first chunk may then bring nothing but padding."""
        model, inputs = build(), text(140)
        inputs["input_ids"][:, :9] = 0
        inputs["attention_mask"][:, :9] = 0
        alone = {name: part[:, 9:] for name, part in inputs.items()}
        plan = kvtailor.Plan.preset(plan).model_copy(update={"prefill_chunk": 4})
        with kvtailor.attach(model, plan):
            padded, single = generate(model, inputs, 4), generate(model, alone, 4)
        assert torch.isfinite(torch.stack(padded.logits)).all()
        if not plan.layers[0].keep.is_hard:  # chunks under a hard budget end elsewhere, and so drop other tokens
            torch.testing.assert_close(torch.stack(padded.logits), torch.stack(single.logits), atol=0.2, rtol=0.2)
            assert kv_cache(padded).report().tokens_kept == kv_cache(single).report().tokens_kept

    @with_plans(EVERY)
    def test_a_row_that_brings_nothing_to_a_later_turn(self, plan):
        model, inputs = build(), text(200)
        turn, mask = text(5, seed=4)["input_ids"], torch.ones(2, 205, dtype=torch.long)
        mask[0, 200:] = 0
        with kvtailor.attach(model, plan):
            cache = kv_cache(model(**inputs, use_cache=True))
            for _ in range(4):
                mask = torch.cat([mask[:, :200], torch.ones(2, 1, dtype=torch.long), mask[:, 200:]], dim=1)
                model(
                    torch.tensor([[5], [6]]),
                    attention_mask=mask[:, : cache.get_seq_length() + 1],
                    past_key_values=cache,
                )
            logits = model(turn, attention_mask=mask, past_key_values=cache).logits
            more = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
            assert torch.isfinite(logits[1]).all()
            assert torch.isfinite(
                model(torch.tensor([[5], [6]]), attention_mask=more, past_key_values=cache).logits
            ).all()

    @with_plans({**EVERY, "full": kvtailor.Plan()}, (*COMPILED, "full"))
    def test_a_cache_filled_in_inference_mode_goes_on_outside(self, plan):
        model, inputs = build(), text(200)
        with kvtailor.attach(model, plan):
            expected = kv_cache(model(**inputs, use_cache=True))
            with torch.inference_mode():
                cache = kv_cache(model(**inputs, use_cache=True))
            step = torch.tensor([[5], [6]])
            found = model(step, past_key_values=cache).logits
            torch.testing.assert_close(found, model(step, past_key_values=expected).logits)
            with torch.inference_mode():
                model(step, past_key_values=expected)
                expected.reorder_cache(torch.tensor([1, 1]))
            model(step, past_key_values=expected)

    @with_plans({**EVERY, "full": kvtailor.Plan()}, (*COMPILED, "full"))
    def test_nothing_held_keeps_a_graph(self, plan):
        model, inputs = build(), text(200)
        with kvtailor.attach(model, plan), torch.enable_grad():
            cache = kv_cache(model(**inputs, use_cache=True))
            model(torch.tensor([[5], [6]]), past_key_values=cache)
            assert not any(tensor.requires_grad for layer in cache.layers for _, tensor in layer.stored())
            copy.deepcopy(cache)

    def test_while_crops_may_come_a_hard_budget_holds_and_no_idle_queries_wait(self):
        model, inputs = build(), text(400)
        for plan in ("fifo:96KiB", "int4"):
            with kvtailor.attach(model, plan):
                cache = kvtailor.KVCache(model, plan)
                cache.activate_past_recording()
                model(**inputs, past_key_values=cache, logits_to_keep=1)
            assert "queries" not in cache.layers[0].bytes_by_kind()
            if plan.startswith("fifo"):
                assert cache.report().bytes_peak <= 1.03 * 96 * 1024

    @on_reference
    def test_blocks_of_one_query_see_no_later_token(self, monkeypatch):
        from kvtailor.layers import row, watching

        model, inputs = build(), text(60)

        def marks():
            with kvtailor.attach(model, "h2o:50"):
                cache = kv_cache(model(**inputs, use_cache=True))
            return [one.tail.marks[: 2 * 50].clone() for one in cache.layers[0].rows]

        expected = marks()
        monkeypatch.setattr(watching, "LOGITS_AT_ONCE", 1)
        monkeypatch.setattr(row, "LOGITS_AT_ONCE", 1)
        for one, other in zip(marks(), expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)

    @on_reference
    def test_compiled_kernels_sum_up_the_same_attention(self, monkeypatch):
        model, inputs = build(), left_padded(150, 20)
        step = torch.tensor([[5], [6]])
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], dim=1)

        def marks(plan):
            with kvtailor.attach(model, plan):
                cache = kv_cache(model(**inputs, use_cache=True))
                model(step, attention_mask=mask, past_key_values=cache)
            return [row.marks() for layer in cache.layers for row in layer.rows]

        for plan in ("h2o:500", PACKING["both"]):
            expected = marks(plan)
            with monkeypatch.context() as patch:
                patch.setenv("KVTAILOR_KERNELS", "auto")
                found = marks(plan)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)

    def test_an_empty_tail_with_marks(self):
        plan = kvtailor.Plan(
            layers=[
                {
                    "keep": {"policy": "h2o", "budget": 264},
                    "form": {"kind": "rotated", "bits": 4, "residual": 0, "exact": 64},
                }
            ]
        )
        model, inputs = build(), text(320)
        with kvtailor.attach(model, plan):
            assert torch.isfinite(torch.stack(generate(model, inputs, 3).logits)).all()

    def test_renumbering_counts_tokens_not_padding(self):
        plan = kvtailor.Plan(layers=[{"keep": {"policy": "streaming", "budget": 24}}])
        model = build()
        ids = text(61, rows=1)["input_ids"]
        padded = torch.cat([ids[:, :30], torch.zeros(1, 20, dtype=torch.long), ids[:, 30:]], dim=1)
        mask = torch.ones_like(padded)
        mask[:, 30:50] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with kvtailor.attach(model, plan):
            cache = kv_cache(
                model(padded[:, :80], attention_mask=mask[:, :80], position_ids=positions[:, :80], use_cache=True)
            )
            found = model(
                padded[:, 80:], attention_mask=mask, position_ids=positions[:, 80:], past_key_values=cache
            ).logits
            cache = kv_cache(model(ids[:, :60], use_cache=True))
            expected = model(ids[:, 60:], past_key_values=cache).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)

    def test_a_model_that_sdpa_does_not_serve_stays_exact_over_other_implementations(self):
        model, inputs = build("gpt-oss"), text(30)
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(2.0)
        expected = generate(model, inputs, 4).logits
        model.set_attn_implementation("flex_attention")
        with kvtailor.attach(model, "full"):
            found = generate(model, inputs, 4).logits
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))

    def test_a_prompt_comes_whole_or_not_at_all(self):
        model, inputs = build(), text(24)
        ahead = torch.ones(24, 24, dtype=torch.bool).tril()
        ahead[10:20, 10:20] = True
        plan = INT8.model_copy(update={"prefill_chunk": 8})
        with kvtailor.attach(model, plan):
            cache = kvtailor.KVCache(model, plan)
            with pytest.raises(CacheError, match="see later ones across the end of a chunk"):
                model(inputs["input_ids"], attention_mask=ahead.expand(2, 1, -1, -1), past_key_values=cache)
            assert cache.get_seq_length() == 0 and cache.step.expected == 0
            found = model(**inputs, past_key_values=cache).logits
            torch.testing.assert_close(found, model(**inputs, use_cache=True).logits)

    def test_a_failed_pass_that_cannot_be_taken_back_is_told_at_the_next(self):
        model, inputs = build("gemma2"), text(40)

        def fail(*args, **kwargs):
            raise RuntimeError("in the middle")

        with kvtailor.attach(model, INT8):
            cache = kv_cache(model(**inputs, use_cache=True))
            model.model.layers[1].mlp.forward = fail
            with pytest.raises(RuntimeError, match="in the middle"):
                model(torch.tensor([[5], [6]]), past_key_values=cache)
            del model.model.layers[1].mlp.forward
            with pytest.raises(CacheError, match="failed midway"):
                model(torch.tensor([[5], [6]]), past_key_values=cache)
            cache.reset()
            found = model(**inputs, past_key_values=cache).logits
            torch.testing.assert_close(found, model(**inputs, use_cache=True).logits)

    def test_hidden_states_of_chunks_are_joined_whatever_the_return_type(self):
        model, inputs = build(), text(20)
        plan = kvtailor.Plan(prefill_chunk=8)
        expected = model.model(**inputs, output_hidden_states=True, use_cache=True).hidden_states
        with kvtailor.attach(model, plan):
            whole = model.model(**inputs, output_hidden_states=True, use_cache=True).hidden_states
            found = model.model(**inputs, output_hidden_states=True, use_cache=True, return_dict=False)
        joined = next(part for part in found if isinstance(part, tuple))
        for states, reference, other in zip(joined, expected, whole, strict=True):
            torch.testing.assert_close(states, reference, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(other, reference, atol=1e-5, rtol=1e-4)

    def test_inputs_that_cannot_be_cut_into_chunks_are_refused_by_name(self):
        from kvtailor import prefill

        for value in (torch.zeros(3, 7), [torch.zeros(4, 5)]):
            arguments = {"input_ids": torch.ones(1, 20, dtype=torch.long), "deepstack_visual_embeds": value}
            with pytest.raises(CacheError, match="deepstack_visual_embeds cannot be fed in chunks"):
                prefill._cut(arguments, 0, 8, 20, 0)
