"""Calibration and the planner: what is measured is what a model does, and what is chosen is the best there is."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvtailor
from kvtailor._compat import output_cache_argument
from kvtailor.calibrate import calibrate, option, options, within_bytes, within_loss
from kvtailor.calibrate import run as calibration
from kvtailor.calibrate.capture import Capture, capture
from kvtailor.calibrate.compare import compare
from kvtailor.calibrate.density import density, head_density
from kvtailor.calibrate.evaluate import default, evaluate
from kvtailor.calibrate.exact import held_out_attention
from kvtailor.calibrate.measure import errors, step_through
from kvtailor.calibrate.options import plan_of
from kvtailor.calibrate.planner import choose
from kvtailor.calibrate.plans import at_length, default_bytes, labelled, read_budget, uniform, with_measurements
from kvtailor.calibrate.plot import draw
from kvtailor.calibrate.replay import divergence, log_probabilities, losses, replay
from kvtailor.calibrate.table import LayerTable, Measurement, Table
from kvtailor.cli.main import app
from kvtailor.cli.plan import finite
from kvtailor.errors import KVTailorError, ModelError, PlanError
from kvtailor.indexes.pages import PagesIndex
from kvtailor.models.text import paragraphs
from kvtailor.plan import Plan
from zoo import ZOO, kv_cache

HELD_OUT = 6
TRIED = ("full", "int4", "int2", "channel2", "fifo:20%", "snapkv:50%", "codes:10%")
SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()
    for parameter in model.parameters():  # larger weights, so that attention is not flat
        if parameter.dim() > 1:
            parameter.data.mul_(3.0)
    return model


def text(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 61, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def seen(llama: LlamaForCausalLM) -> Capture:
    return capture(llama, text(300), HELD_OUT)


@pytest.fixture(scope="module")
def table(llama: LlamaForCausalLM) -> Table:
    with torch.no_grad():
        return calibrate(llama, [text(300), text(260, 2)], options(TRIED), held_out=HELD_OUT, name="tiny")


@pytest.fixture(scope="module")
def headed(llama: LlamaForCausalLM) -> Table:
    """The same with what single heads lose."""
    with torch.no_grad():
        return calibrate(llama, [text(300), text(260, 2)], options(TRIED), held_out=HELD_OUT, heads=True)


# Density.


def test_density_of_each_head_by_loops():
    query, keys = torch.randn(4, 5, 16), torch.randn(2, 40, 16)
    found = head_density(query, keys, share=0.1)
    for head in range(4):
        uncovered = []
        for row in range(5):
            visible = 40 - 5 + row + 1
            logits = [float(query[head, row] @ keys[head // 2, token]) / 4 for token in range(visible)]
            weights = [math.exp(logit - max(logits)) for logit in logits]
            shares = sorted((weight / sum(weights) for weight in weights), reverse=True)
            uncovered.append(1 - sum(shares[:4]))
        assert found[head] == pytest.approx(sum(uncovered) / 5, abs=1e-5)
    assert density(query, keys, share=0.1) == pytest.approx(float(found.mean()))


# What the model saw.


@pytest.mark.parametrize("name", [name for name, kind in ZOO.items() if not kind.build().config.is_encoder_decoder])
def test_exact_outputs_put_back_give_the_models_own_logits(name):
    """Every layer: soft caps, sinks, windows, norms of queries, and the layers before it passed by."""
    model, ids = ZOO[name].build(), text(80)
    found = capture(model, ids, HELD_OUT)
    expected = model(input_ids=ids).logits[0, -HELD_OUT:]
    torch.testing.assert_close(found.logits, expected)
    assert len(found.layers) == len(found.passed) == 3
    for number, layer in found.layers.items():
        exact = held_out_attention(layer, HELD_OUT)
        twice = replay(model, found, number, torch.stack([exact, exact]))
        torch.testing.assert_close(twice, expected.expand(2, -1, -1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(input_ids=ids).logits[0, -HELD_OUT:], expected, atol=0, rtol=0)


def test_a_model_is_as_before(llama, seen):
    config, forward = llama.model.layers[0].self_attn.config, llama.model.layers[0].forward
    replay(llama, seen, 2, torch.zeros(1, HELD_OUT, 4, 16))
    with pytest.raises(RuntimeError):
        replay(llama, seen, 2, torch.zeros(1, HELD_OUT, 4, 15))
    capture(llama, text(50), HELD_OUT)
    assert llama.model.layers[0].self_attn.config is config
    assert llama.model.layers[0].forward == forward
    assert not [name for module in llama.modules() for name in module.__dict__ if "listener" in name]


# What is measured.


def test_errors_are_those_of_a_direct_computation(llama, seen):
    """The first four tokens and the newest 96 of them, attended one step after the other."""
    entry, number, budget = option("fifo:100").entry, 1, 100
    found = errors(step_through(llama, seen, number, entry).outputs, held_out_attention(seen.layers[number], HELD_OUT))
    layer = seen.layers[number]
    for head in range(4):
        apart = []
        for slot in range(seen.prompt, seen.prompt + HELD_OUT):
            kept = [*range(4), *range(slot + 1 - budget + 4, slot + 1)]
            outs = []
            for tokens in (kept, list(range(slot + 1))):
                logits = layer.keys[0, head // 2, tokens] @ layer.query[0, head, slot] / 4
                outs.append(logits.softmax(dim=0) @ layer.values[0, head // 2, tokens])
            apart.append(float((outs[0] - outs[1]).norm() / outs[1].norm()))
        assert found[head] == pytest.approx(sum(apart) / HELD_OUT, rel=1e-3)


@pytest.mark.parametrize("name", TRIED)
def test_the_loss_of_an_option_is_that_of_a_plan_for_its_layer_alone(llama, seen, kernels, name):
    one = option(name)
    for number in (0, 2):
        stepped = step_through(llama, seen, number, one.entry)
        (loss,) = losses(llama, seen, number, stepped.outputs[None])
        whole = evaluate(llama, [seen], plan_of({number: [one]}))
        assert loss == pytest.approx(whole.loss, rel=2e-2, abs=1e-7)


def test_bytes_are_those_that_a_cache_reports(llama, seen, kernels):
    for name in TRIED:
        stepped = [step_through(llama, seen, number, option(name).entry) for number in range(3)]
        whole = evaluate(llama, [seen], plan_of({number: [option(name)] for number in range(3)}))
        assert sum(one.bytes_held for one in stepped) == whole.bytes_held
        assert sum(one.bytes_fast for one in stepped) == whole.bytes_fast
        assert (whole.bytes_fast < whole.bytes_held) == (name == "codes:10%")


def test_an_evaluation_is_what_the_attached_model_does(llama):
    plan, ids = Plan.preset("int2"), text(200, 5)
    name = output_cache_argument(inspect.signature(llama.forward).parameters)
    cache, rows = kvtailor.KVCache(llama, plan), []
    with kvtailor.attach(llama, plan):
        llama(input_ids=ids[:, :-HELD_OUT], **{name: cache})
        for slot in range(200 - HELD_OUT, 200):
            rows.append(llama(input_ids=ids[:, slot : slot + 1], **{name: cache}).logits[0, -1])
    found = evaluate(llama, [capture(llama, ids, HELD_OUT)], plan)
    expected = llama(input_ids=ids).logits[0, -HELD_OUT:].double().log_softmax(-1)
    apart = (expected.exp() * (expected - torch.stack(rows).double().log_softmax(-1))).sum(-1).mean()
    assert found.loss == pytest.approx(float(apart), rel=1e-2)
    assert found.bytes_held == cache.report().bytes_held


def test_the_default_cache_loses_nothing(llama, seen):
    row = default([seen])
    assert row.loss == 0 and row.agreement == 1
    assert row.bytes_held == 3 * 2 * 300 * 2 * 16 * 4
    assert evaluate(llama, [seen], Plan()).loss == pytest.approx(0, abs=1e-9)


def test_the_default_caches_bytes_are_what_transformers_holds_behind_windows():
    model, ids = ZOO["gemma2"].build(), text(120)
    held = kv_cache(model(input_ids=ids, use_cache=True)).layers
    expected = sum(part.nbytes for layer in held for part in (layer.keys, layer.values))
    assert default([capture(model, ids, 4)]).bytes_held == expected


def test_a_distribution_that_is_none_lies_infinitely_far_from_the_exact_one():
    exact = log_probabilities(torch.tensor([[0.0, 1.0, -math.inf], [0.0, 5.0, 1.0]]))
    assert divergence(torch.tensor([[0.0, 1.0, -math.inf], [0.0, 5.0, 1.0]]), exact) == 0
    for wrong in (math.nan, math.inf, -math.inf):
        assert divergence(torch.tensor([[0.0, 1.0, 0.0], [0.0, wrong, 1.0]]), exact) == math.inf


def test_a_model_whose_own_logits_are_not_finite_is_an_error():
    model = tiny_llama()
    model.lm_head.weight.data[3] = math.inf
    with pytest.raises(KVTailorError, match="LlamaForCausalLM in float32 gives logits that are not finite numbers"):
        calibrate(model, [text(60)], options(["int4"]), held_out=4)


@pytest.mark.parametrize("heads", [False, True])
def test_an_option_that_gives_no_numbers_is_never_chosen(llama, monkeypatch, tmp_path, heads):
    """Though it holds the fewest bytes."""
    step = calibration.step_through

    def broken(model: Any, seen: Capture, number: int, entry: Any) -> Any:
        found = step(model, seen, number, entry)
        if entry.form.bits != 2:
            return found
        outputs = found.outputs.clone()
        outputs[:, :2] = math.nan  # of the first KV head
        return replace(found, outputs=outputs, bytes_held=1, bytes_fast=1)

    monkeypatch.setattr(calibration, "step_through", broken)
    found = calibrate(llama, [text(300)], options(["int4", "int2"]), held_out=4, heads=heads, notes=tmp_path)
    for layer in found.layers.values():
        assert layer.options["int2"].loss == layer.options["int2"].error == math.inf
        assert layer.options["int2"].head_losses == ([math.inf, pytest.approx(0, abs=0.1)] if heads else [])
    for planned in (within_loss(found, 100.0, heads=heads), within_bytes(found, 1e9, heads=heads)):
        assert math.isfinite(planned.loss)
        assert {name for names in planned.choice.values() for name in names} <= {"full", "int4"}
    with pytest.raises(PlanError, match="budget 2 B is below"):
        within_bytes(found, 2, heads=heads)
    assert draw(found, planned, tmp_path / "picture.png").stat().st_size > 10_000
    (notes,) = tmp_path.glob("measured-*.json")
    monkeypatch.setattr(calibration, "capture", None)
    again = calibrate(llama, [text(300)], options(["int4", "int2"]), held_out=4, heads=heads, notes=tmp_path)
    assert again.as_dict() == found.as_dict() and notes.exists()


def test_a_layer_without_a_finite_loss_is_named(table):
    layer = table.layers[1]
    lost = {name: replace(one, loss=math.inf) for name, one in layer.options.items()}
    broken = replace(table, layers={**table.layers, 1: replace(layer, options=lost)})
    for choose_within in (within_bytes, within_loss):
        with pytest.raises(PlanError, match=r"layer 1: none of full, int4, .* leaves the model logits that are finite"):
            choose_within(broken, 1e9)


def test_a_table_holds_every_option_of_every_layer(table):
    assert list(table.layers) == [0, 1, 2]
    for layer in table.layers.values():
        assert list(layer.options) == list(TRIED)
        assert len(layer.density) == 4 and all(0 <= score <= 1 for score in layer.density)
        assert layer.options["full"].error < 1e-4 and layer.options["full"].loss < 1e-6
        assert layer.options["int4"].error < layer.options["int2"].error
    assert table.tokens == [294, 254] and table.bytes_default == 280 * 2 * 2 * 16 * 4


def test_layers_with_windows_are_left_alone():
    model = ZOO["gemma2"].build()
    found = calibrate(model, [text(120)], options(["int4"]), held_out=4)
    assert list(found.layers) == [1]
    evaluate(model, [capture(model, text(120), 4)], within_bytes(found, 1e9).plan)


# The planner.

NUMBERS = st.integers(0, 12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=4), min_size=1, max_size=5),
    limit=st.integers(0, 40),
    scale=st.sampled_from([1.0, 1e-7, 1e7]),
)
def test_the_planner_finds_what_trying_everything_finds(rows, limit, scale):
    """Ties, tables without a choice and limits that nothing fits in among them."""
    costs, weights = (
        [[pair[part] * factor for pair in row] for row in rows] for part, factor in ((0, scale), (1, 1.0))
    )
    ways = itertools.product(*(range(len(row)) for row in rows))
    allowed = [way for way in ways if sum(weights[n][place] for n, place in enumerate(way)) <= limit]
    found = choose(costs, weights, limit)
    if not allowed:
        assert found is None
        return
    assert found is not None and tuple(found) in allowed
    best = min(sum(costs[n][place] for n, place in enumerate(way)) for way in allowed)
    assert sum(costs[n][place] for n, place in enumerate(found)) == pytest.approx(best, rel=1e-9)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.lists(st.tuples(NUMBERS, st.floats(0, 1)), min_size=1, max_size=3), min_size=1, max_size=6),
    picks=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_a_limit_that_a_choice_just_meets_is_met(rows, picks):
    """Weights that are no whole numbers round differently in every order of adding."""
    costs, weights = ([[float(pair[part]) for pair in row] for row in rows] for part in (0, 1))
    places = [pick % len(row) for pick, row in zip(picks, rows, strict=False)]
    for way in (places, [row.index(min(row)) for row in weights]):
        limit = 0.0
        for row, place in zip(weights, way, strict=True):
            limit += row[place]
        found = choose(costs, weights, limit)
        assert found is not None
        total = 0.0
        for row, place in zip(weights, found, strict=True):
            total += row[place]
        assert total <= limit
        assert sum(row[place] for row, place in zip(costs, found, strict=True)) <= sum(
            row[place] for row, place in zip(costs, way, strict=True)
        )


def test_the_planner_passes_over_what_is_not_finite():
    weights = [[3, 1], [2, 4]]
    for wrong in (math.inf, math.nan):
        assert choose([[wrong, 1.0], [0.5, 0.2]], weights, 100) == [1, 1]
        assert choose([[0.1, 1.0], [0.5, 0.2]], [[3, wrong], [2, 4]], 5) == [0, 0]
        assert choose([[wrong, wrong], [0.5, 0.2]], weights, 100) is None
    assert choose([[0.0, 1.0], [0.5, 0.2]], weights, math.inf) == [0, 1]
    assert choose([[0.0, 1.0], [0.5, 0.2]], weights, math.nan) is None


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), layers=st.integers(1, 30), heads=st.booleans())
def test_the_least_loss_and_the_one_that_the_message_allows_are_met(seed, layers, heads):
    source = torch.Generator().manual_seed(seed)

    def measured(place: int) -> Measurement:
        own = (torch.rand(2, generator=source) / 100).tolist()
        return Measurement([0.1, 0.1], 0.8 * sum(own), 100 + place, 100 + place, own)

    names = ("int4", "int2")
    random = Table(
        made_for={"model": "m", "layers": layers, "kv_heads": 2, "date": "2026-11-30"},
        texts=["a"],
        tokens=[10],
        held_out=2,
        dtype="float32",
        layers={
            number: LayerTable([0.1, 0.1], {name: measured(place) for place, name in enumerate(names)})
            for number in range(layers)
        },
        options={name: option(name) for name in names},
    )
    if not heads:
        least = sum(min(one.loss for one in layer.options.values()) for layer in random.layers.values())
        within_loss(random, least)
    with pytest.raises(PlanError) as caught:
        within_loss(random, 0, heads=heads)
    allowed = float(str(caught.value).split("allowed are ")[1].split(" or more")[0])
    found = within_loss(random, allowed, heads=heads)
    assert found.loss <= allowed * (1 + 1e-12)
    assert within_loss(random, found.loss, heads=heads).bytes_held == found.bytes_held


def test_the_planner_is_quick_where_there_are_many_layers():
    source = torch.Generator().manual_seed(0)
    weights = (torch.rand(80, 25, generator=source) * 1e8).round().tolist()
    costs = [[1e4 / (weight + 1e4) * float(torch.rand(1, generator=source)) for weight in row] for row in weights]
    found = choose(costs, weights, sum(max(row) for row in weights) / 5)
    assert found is not None and len(found) == 80


def test_plans_stay_within_bytes_and_lose_less_with_more_of_them(table):
    found = [within_bytes(table, share * default_bytes(table)) for share in (0.3, 0.5, 1.0)]
    assert all(
        one.bytes_held <= share * default_bytes(table) for one, share in zip(found, (0.3, 0.5, 1.0), strict=True)
    )
    assert found[0].loss >= found[1].loss >= found[2].loss
    for name in TRIED:
        alike = uniform(table, name)
        for count in ("held", "fast"):
            assert within_bytes(table, alike.bytes_of(count), count).loss <= alike.loss


@pytest.mark.parametrize("name", TRIED)
def test_bytes_for_another_length_are_those_measured_there(llama, table, name):
    found = at_length(table, llama.config, 494)
    (seen,) = (capture(llama, text(495), 1),)
    measured = step_through(llama, seen, 1, option(name).entry)
    for counted in ("bytes_held", "bytes_fast"):
        assert getattr(found.layers[1].options[name], counted) == pytest.approx(getattr(measured, counted), rel=0.02)
    assert found.context == 494 and found.layers[1].options[name].loss == table.layers[1].options[name].loss


def test_plans_within_a_loss_hold_no_more_than_needed(table):
    least = uniform(table, "int4")
    found = within_loss(table, least.loss)
    assert found.loss <= least.loss and found.bytes_held <= least.bytes_held
    assert within_bytes(table, found.bytes_held).loss <= found.loss


def test_labels_pack_the_dense_layers(table):
    dense = [number for number, layer in table.layers.items() if layer.mean_density > 0.2]
    found = labelled(table, "codes:10%")
    assert [number for number, names in found.choice.items() if names == ("channel2",)] == dense
    assert set(labelled(table, "codes:10%", tau=1.0).choice.values()) == {("codes:10%",)}


def test_a_comparison_gives_the_planner_each_rivals_bytes(llama, table):
    seen = [capture(llama, text(280, 9), HELD_OUT)]
    found = compare(llama, table, seen, "fast")
    assert [pair.other.plan for pair in found.pairs if pair.other.plan not in TRIED] == ["TailorKV labels"]
    for pair in found.pairs:
        assert pair.planned_predicted <= pair.other_predicted


# Plans.


def test_layers_of_a_plan_are_written_as_ranges():
    choice = {number: [option("int4" if number in (0, 1, 2, 5) else "full")] for number in range(7)}
    plan = plan_of(choice | {6: [option("snapkv:50%+int2")]})
    assert [entry.layers for entry in plan.layers] == ["0-2,5", "6"]
    assert plan.layer(6, 7).in_words == "snapkv 50%, rotated 2-bit"
    assert plan.layer(3, 7).is_full


def test_heads_of_a_plan_are_written_once_for_all_layers_alike():
    names = {0: ("int4",), 1: ("int4", "full", "int2"), 2: ("int4", "full", "int2"), 3: ("full", "int4", "int4")}
    plan = plan_of({number: [option(name) for name in own] for number, own in names.items()})
    assert [(entry.layers, entry.heads) for entry in plan.layers] == [
        ("0", "*"),
        ("1-2", "0"),
        ("1-2", "2"),
        ("3", "1-2"),
    ]
    for number, own in names.items():
        found = {head: entry for heads, entry in plan.parts(number, 4, "self", 3) for head in heads}
        for head, name in enumerate(own * 3 if len(own) == 1 else own):
            assert found[head].form == option(name).entry.form


def test_a_choice_by_heads_is_predicted_to_lose_no_more_and_holds_no_more(llama, headed):
    both = [capture(llama, ids, HELD_OUT) for ids in (text(300), text(260, 2))]
    for share in (0.22, 0.3, 0.5):
        limit = share * default_bytes(headed)
        layers, heads = within_bytes(headed, limit), within_bytes(headed, limit, heads=True)
        assert heads.loss <= layers.loss * (1 + 1e-9)
        row = evaluate(llama, both, heads.plan)
        assert row.bytes_held <= 1.02 * limit and heads.bytes_held <= limit
    assert any(len(names) == 2 for names in heads.choice.values())
    found = within_loss(headed, heads.loss * (1 + 1e-9), heads=True)
    assert found.loss <= heads.loss * (1 + 2e-9) and found.bytes_held <= heads.bytes_held


def test_what_one_head_loses_is_the_models_loss_with_that_head_kept_so(llama, headed, seen):
    """Against whole runs with a plan that speaks of that head alone."""
    for number, head in ((0, 1), (2, 0)):
        entry = option("int2").entry.model_copy(update={"layers": str(number), "heads": str(head)})
        whole = evaluate(llama, [seen, capture(llama, text(260, 2), HELD_OUT)], Plan(layers=[entry]))
        loss = headed.layers[number].options["int2"].head_losses[head]
        assert loss == pytest.approx(whole.loss, rel=5e-2, abs=1e-7)


def test_a_choice_by_heads_needs_their_measurements(table):
    with pytest.raises(PlanError, match="single heads"):
        within_bytes(table, default_bytes(table), heads=True)


def test_a_plan_with_measurements_reads_back_and_serves_its_model(llama, table, tmp_path):
    planned = within_bytes(table, 0.4 * default_bytes(table))
    plan = with_measurements(table, planned, {"budget": "40%"})
    plan.save(tmp_path / "plan.yaml")
    read = Plan.load(tmp_path / "plan.yaml")
    assert read.layers == plan.layers and read.made_for == plan.made_for
    assert read.measured["layers"]["0"]["option"] == planned.choice[0][0]
    assert read.made_for is not None and read.made_for.name == "tiny"
    with kvtailor.attach(llama, read):
        llama(input_ids=text(20))
    assert "made_for" not in Plan.preset("int4").to_yaml()


@pytest.mark.parametrize("change", [{"num_hidden_layers": 2}, {"hidden_size": 32}, {"head_dim": 32}])
def test_a_plan_for_another_model_is_refused_and_both_are_named(table, change):
    plan = within_bytes(table, default_bytes(table)).plan
    other = tiny_llama(**change)
    for use in (lambda: kvtailor.KVCache(other, plan), lambda: kvtailor.attach(other, plan)):
        with pytest.raises(
            PlanError, match=r"made for LlamaForCausalLM of 3 layers.*this model is LlamaForCausalLM of"
        ):
            use()
    kvtailor.KVCache(other, plan.model_copy(update={"made_for": None}))


# Going on.


def test_a_calibration_goes_on_where_it_was_interrupted(llama, table, tmp_path, monkeypatch):
    measured: list[tuple[int, list[str]]] = []
    measure = calibration.measure_layer

    def noted(model: Any, seen: Capture, number: int, tried: Any, heads: bool) -> Any:
        measured.append((number, [one.name for one in tried]))
        return measure(model, seen, number, tried, heads)

    def interrupt(words: str) -> None:
        if len(measured) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "measure_layer", noted)
    texts = [text(300), text(260, 2)]

    def once(names: Any = TRIED, **more: Any) -> Table:
        return calibrate(llama, texts, options(names), held_out=HELD_OUT, notes=tmp_path, name="tiny", **more)

    with pytest.raises(KeyboardInterrupt):
        once(progress=interrupt)
    assert [number for number, _ in measured] == [0, 1, 2, 0]
    assert once().as_dict() == table.as_dict()
    assert [number for number, _ in measured] == [0, 1, 2, 0, 1, 2]
    found = once((*TRIED, "int3"))
    assert {tuple(names) for _, names in measured[6:]} == {("int3",)} and len(measured) == 12
    monkeypatch.setattr(calibration, "capture", None)
    assert once((*TRIED, "int3")).as_dict() == found.as_dict()
    assert len(list(tmp_path.iterdir())) == 1


def test_another_text_has_measurements_of_its_own(llama, tmp_path):
    for seed in (1, 2):
        calibrate(llama, [text(120, seed)], options(["int4"]), held_out=4, notes=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_name_that_stands_for_another_plan_now_is_measured_again(llama, tmp_path):
    path = tmp_path / "mine.yaml"
    found = []
    for bits in (8, 2):
        path.write_text(f"layers: [{{form: {{kind: rotated, bits: {bits}}}}}]")
        table = calibrate(llama, [text(300)], options([str(path)]), held_out=4, notes=tmp_path)
        found.append(table.layers[0].options[str(path)].error)
    assert found[1] > 5 * found[0]


def test_weights_that_differ_anywhere_have_measurements_of_their_own(tmp_path):
    found = []
    for change in (0.0, 0.5):
        model = tiny_llama()
        model.model.layers[1].self_attn.q_proj.weight.data[-1, -1] += change
        calibrate(model, [text(120)], options(["int2"]), held_out=4, notes=tmp_path)
        found.append(calibration.weights_hash(model))
    assert found[0] != found[1] and len(list(tmp_path.iterdir())) == 2
    assert found[0] == calibration.weights_hash(tiny_llama())


def test_another_release_and_another_default_have_measurements_of_their_own(llama, tmp_path, monkeypatch):
    def error() -> float:
        table = calibrate(llama, [text(300)], options(["pages:10%"]), held_out=4, notes=tmp_path)
        return table.layers[0].options["pages:10%"].error

    first = error()
    monkeypatch.setattr(PagesIndex.__init__, "__defaults__", (64,))
    assert error() != first
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(calibration, "__version__", "0.0.1")
    error()
    assert len(list(tmp_path.iterdir())) == 2


WRONG_NOTES: dict[str, Any] = {
    "loss": ["x", None, math.nan, True],
    "errors": [[], 5, ["x"], [0.1, 0.1]],
    "bytes_held": ["1"],
    "head_losses": [None, ["x"]],
    "density": [[], 5, ["x"]],
}


def test_notes_that_hold_anything_but_numbers_are_named(llama, tmp_path):
    def again() -> Table:
        return calibrate(llama, [text(120)], options(["int4"]), held_out=4, notes=tmp_path)

    before = again().as_dict()
    (path,) = tmp_path.iterdir()
    good = path.read_text()
    for field, values in WRONG_NOTES.items():
        for value in values:
            data = json.loads(good)
            layer = data["layers"]["0/0"]
            (layer if field == "density" else layer["options"]["int4"])[field] = value
            path.write_text(json.dumps(data))
            with pytest.raises(KVTailorError, match="is no file of measurements"):
                again()
    path.write_text(good)
    assert again().as_dict() == before


# Wrong inputs.


@pytest.mark.parametrize(
    "name",
    [
        "int4+snapkv:50%", "quest:64+int4", "snapkv:50%+codes:10%", "int8+int4", "snapkv:50%+full", "full+int4",
        "snapkv:50%+h2o:25%", "channel2+int4", "snapkv:50%+tailor:64",
    ],
)  # fmt: skip
def test_two_ways_that_do_not_go_together_are_refused(name):
    with pytest.raises(PlanError, match=r"must be an eviction preset and .* a packed one|does not keep all layers"):
        option(name)


@pytest.mark.parametrize("name", ["snapkv:50%+int4", "h2o:25%+channel2", "fifo:500+kivi2"])
def test_an_eviction_preset_and_a_packed_one_are_one_way(name):
    first, second = name.split("+")
    entry = option(name).entry
    assert (entry.keep, entry.form) == (option(first).entry.keep, option(second).entry.form)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{prompt_share: 0.25}", "has prompt_share 0.25"),
        ("{keep: {policy: h2o, budget: 25%, hard: true}}", "has hard budget 25%"),
    ],
)
def test_ways_that_change_what_a_prompt_sees_are_not_measured(tmp_path, entry, said):
    path = tmp_path / "mine.yaml"
    path.write_text(f"layers: [{entry}]")
    with pytest.raises(PlanError, match=said):
        option(str(path))


def test_wrong_inputs_are_named(llama, table, tmp_path):
    with pytest.raises(KVTailorError, match=r"text of 37 tokens is too short.*allowed are 38 or more"):
        calibrate(llama, [text(37)], options(), held_out=6)
    with pytest.raises(KVTailorError, match="600 tokens is beyond the 512 positions of LlamaForCausalLM"):
        calibrate(llama, [text(600)], options(), held_out=6)
    with pytest.raises(KVTailorError, match="there is no text"):
        calibrate(llama, [], options())
    with pytest.raises(KVTailorError, match="6 held-out tokens of 6: allowed are 1 to 5"):
        capture(llama, text(6), 6)
    with pytest.raises(PlanError, match="unknown preset 'int5'"):
        option("int5")
    with pytest.raises(PlanError, match="'tailor' does not keep all layers alike: allowed are full, channel2"):
        option("tailor")
    with pytest.raises(PlanError, match="shares 1MiB among its layers"):
        option("snapkv:1MiB")
    with pytest.raises(PlanError, match="divides its budget over layers"):
        option("pyramidkv:25%")
    with pytest.raises(PlanError, match=r"budget 1\.0 KiB is below what the smallest options hold: allowed are"):
        within_bytes(table, 1024)
    with pytest.raises(PlanError, match="loss 0 is below what the exactest options lose"):
        within_loss(table, 0)
    for loss in (-1, math.inf, math.nan):
        with pytest.raises(PlanError, match=f"loss {loss} cannot be used: allowed are finite numbers from 0"):
            within_loss(table, loss)
    for budget in ("512", "much", "0%"):
        with pytest.raises(PlanError, match=f"budget '{budget}' cannot be used: allowed are a share"):
            read_budget(budget)
    (tmp_path / "x").mkdir()
    calibrate(llama, [text(120)], options(["int4"]), held_out=4, notes=tmp_path / "x")
    (notes,) = (tmp_path / "x").iterdir()
    notes.write_text("[]")
    with pytest.raises(KVTailorError, match="is no file of measurements"):
        calibrate(llama, [text(120)], options(["int4"]), held_out=4, notes=tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("whisper", "is an encoder-decoder"), ("mistral-window", "no layer that attends to all tokens")],
)
def test_models_that_cannot_be_calibrated_are_named(name, reason):
    with pytest.raises(ModelError, match=reason):
        calibrate(ZOO[name].build(), [text(60)], options(["int4"]), held_out=4)


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama and a tokenizer whose tokens are bytes."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama(vocab_size=260, num_hidden_layers=2).save_pretrained(path)
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = Tokenizer(models.BPE(vocabulary, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(path)
    return path


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *(str(argument) for argument in arguments)], prog_name="kvtailor")


def refused(*arguments: object) -> str:
    """The one line of a command that must refuse its input, without "error: "."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("error: ")


SHORT = ("--tokens", 200, "--held-out", 4, "--option", "int4", "--option", "snapkv:50%", "--option", "codes:10%")


def test_the_command_writes_a_plan_that_its_model_takes(folder, tmp_path):
    result = call(folder, *SHORT, "--budget", "70%", "--out", tmp_path, "--option", "channel2", "--compare")
    assert result.exit_code == 0, result.output
    assert "TailorKV labels" in result.stdout and "Written" in result.stdout
    plan = Plan.load(tmp_path / "plan.yaml")
    assert plan.measured["budget"] == "70%" and plan.measured["held_out"] == 4
    with kvtailor.attach(LlamaForCausalLM.from_pretrained(folder), plan):
        pass
    assert "## Beside other plans" in (tmp_path / "plan.md").read_text()
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_the_command_prints_one_object(folder, tmp_path):
    (tmp_path / "mine.txt").write_text("All that is gold does not glitter. " * 20)
    result = call(
        folder,
        *SHORT,
        "--text",
        tmp_path / "mine.txt",
        "--loss",
        1,
        "--count",
        "fast",
        "--context",
        5000,
        "--json",
        "--out",
        tmp_path,
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["choice"].keys() == {"0", "1"} and found["comparison"] is None
    assert found["table"]["tokens"] == [200] and found["table"]["context"] == 5000
    assert found["bytes_fast"] < found["bytes_held"]


def test_numbers_that_json_does_not_have_are_nothing_in_it():
    data = {"loss": math.inf, "errors": [0.5, math.nan], "layers": {0: (1, "int4", True)}}
    assert finite(data) == {"loss": None, "errors": [0.5, None], "layers": {0: [1, "int4", True]}}


def test_wrong_inputs_of_the_command_are_one_line(folder, tmp_path):
    out = ("--out", tmp_path)
    (tmp_path / "short.txt").write_text("few words")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "other.yaml").write_text("layers: [{layers: 0, form: {kind: rotated, bits: 4}}]")
    assert "too short: 24 are held out" in refused(folder, "--text", tmp_path / "short.txt", *out)
    assert "is no text in UTF-8" in refused(folder, "--text", tmp_path / "bytes.txt", *out)
    assert "cannot be read" in refused(folder, "--text", tmp_path / "none.txt", *out)
    assert "allowed is one of them" in refused(folder, "--budget", "25%", "--loss", 0.1, *out)
    assert "--count 'slow' is not offered" in refused(folder, "--count", "slow", *out)
    assert "unknown preset" in refused(folder, "--option", "int5", *out)
    assert "does not keep all layers alike" in refused(folder, "--option", tmp_path / "other.yaml", *out)
    assert "beyond the 512 positions" in refused(folder, "--tokens", 1000, *out)
    import_topic = next(paragraphs("import"))
    (tmp_path / "seen.txt").write_text(f"Of the reference: {import_topic} And more of it.")
    assert "reach into 'import'" in refused(folder, "--text", tmp_path / "seen.txt", "--tokens", 400, "--compare", *out)
    for loss in ("inf", "nan", "-1"):
        assert f"loss {loss} cannot be used: allowed are finite numbers from 0" in refused(folder, "--loss", loss, *out)
    assert "is below what the smallest options hold" in refused(folder, *SHORT, "--budget", "1%", *out)
    assert "budget '100' cannot be used" in refused(folder, *SHORT, "--budget", "100", *out)
