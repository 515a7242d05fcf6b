"""Comparisons: what a grid measures is what a model does, results go on, and what is wrong is told."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
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
from kvtailor.cli.main import app
from kvtailor.errors import EvaluationError, PlanError
from kvtailor.estimate import estimate
from kvtailor.evals import grid, spread
from kvtailor.evals.answering import answers
from kvtailor.evals.candidates import candidates, plan_named
from kvtailor.evals.page import page
from kvtailor.evals.plots import draw
from kvtailor.evals.reading import read
from kvtailor.evals.result import ROWS, Results, Row, read_rows
from kvtailor.evals.sample import Ask, Sample
from kvtailor.evals.statistics import cells, front, interval, paired_difference, unsolved
from kvtailor.evals.table import markdown, sections
from kvtailor.evals.tasks.registry import task
from kvtailor.models.load import Loaded
from kvtailor.plan import Plan

LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]


def lettered() -> PreTrainedTokenizerFast:
    """One token for each character."""
    tokenizer = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate(LETTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", pad_token=" ")


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(LETTERS), num_key_value_heads=2, head_dim=16, max_position_embeddings=2000, eos_token_id=None,
        bos_token_id=None, **sizes,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3.0)
    return Loaded("tiny", model, lettered())


def sample(context: str = "One two three. " * 20, asks: tuple[Ask, ...] | None = None, **given: Any) -> Sample:
    return Sample("try", 0, context, asks or (Ask("Which? ", ("two",), 6), Ask("And? ", ("one",), 5)), **given)


def greedy(loaded: Loaded, text: str, count: int) -> str:
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    out = loaded.model.generate(ids, max_new_tokens=count, do_sample=False)
    return str(loaded.tokenizer.decode(out[0, ids.shape[1] :]))


# Answers.


def test_questions_apart_are_each_answered_as_if_alone(loaded):
    one = sample()
    found = answers(loaded, read(loaded, one, "contains"), Plan(), "contains")
    assert [answer.text for answer in found.answers] == [
        greedy(loaded, one.context + ask.text, ask.tokens) for ask in one.asks
    ]
    assert found.held.layers[0].tokens_seen == len(one.context) - 1


def test_turns_stand_behind_the_answers_before_them(loaded):
    one = sample(ordering="turns")
    first, second = (
        answer.text for answer in answers(loaded, read(loaded, one, "contains"), Plan(), "contains").answers
    )
    assert first == greedy(loaded, one.context + one.asks[0].text, 6)
    assert second == greedy(loaded, one.context + one.asks[0].text + first + one.asks[1].text, 5)


@pytest.mark.parametrize("name", ["int4", "snapkv:40%", "h2o:40%", "streaming:40%", "int2", "fifo:90", "tailor:20"])
def test_a_filled_cache_answers_as_one_that_read_the_prompt(loaded, name):
    """Against generate inside attach, where the cache sees the context itself; the question comes after."""
    one, plan = sample(), Plan.of(name)
    found = answers(loaded, read(loaded, one, "contains"), plan, "contains").answers[0].text
    ids = loaded.tokenizer(one.context, return_tensors="pt").input_ids
    asked = loaded.tokenizer(one.asks[0].text, return_tensors="pt").input_ids
    with kvtailor.attach(loaded.model, plan) as attachment:
        cache = attachment.new_cache()
        loaded.model(ids[:, :-1], past_key_values=cache)
        fed, said = torch.cat([ids[:, -1:], asked], dim=1), []
        for _ in range(6):
            said.append(int(loaded.model(fed, past_key_values=cache).logits[0, -1].argmax()))
            fed = torch.tensor([said[-1:]])
    assert found == loaded.tokenizer.decode(said)


def test_the_loss_of_what_follows_is_the_models(loaded):
    following = "four five six."
    one = sample(asks=(Ask("", (following,), 0),))
    reading = read(loaded, one, "following")
    (found,) = answers(loaded, reading, Plan(), "following").answers
    ids = loaded.tokenizer(one.context + following, return_tensors="pt").input_ids
    logits = loaded.model(ids).logits[0]
    count = len(following)
    expected = torch.nn.functional.cross_entropy(logits[-count - 1 : -1], ids[0, -count:])
    assert found.loss == pytest.approx(float(expected), rel=1e-4)
    assert found.kl == pytest.approx(0, abs=1e-6) and found.agreement == 1 and found.tokens == count
    (coarse,) = answers(loaded, reading, Plan.of("fifo:8%"), "following").answers
    assert coarse.kl > 1e-4


def test_a_context_beyond_the_models_positions_is_told(loaded):
    with pytest.raises(EvaluationError, match=r"needs 2013 tokens .* positions for 2000"):
        read(loaded, sample("a" * 2000), "contains")


# Candidates.


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(["snapkv", "h2o", "streaming", "fifo", "pyramidkv", "adakv", "snapkv+int4"]),
    budget=st.floats(0.1, 0.9),
    tokens=st.integers(500, 3000),
)
def test_a_candidate_holds_all_it_may_and_no_more(name, budget, tokens):
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=9
    )
    found, notes = candidates([name], [budget], config, tokens, torch.bfloat16)
    if notes:
        assert len(found) == 1 and "cannot hold" in notes[0]
        return
    held = estimate(config, found[1].plan, tokens, torch.bfloat16)
    assert held.bytes_held <= budget * held.bytes_default
    more = found[1].plan.layers[0].keep.budget.amount + 80 / tokens
    if more < 1:
        policy, plus, form = name.partition("+")
        bigger = plan_named(f"{policy}:{100 * more:g}%{plus}{form}")
        assert estimate(config, bigger, tokens, torch.bfloat16).bytes_held > budget * held.bytes_default


def test_names_are_read_once_and_what_is_wrong_is_told(loaded, tmp_path):
    config = loaded.model.config
    Plan.of("int4").save(tmp_path / "mine.yaml")
    names = ["int4", "int4", "full", str(tmp_path / "mine.yaml"), "snapkv:20%", "codes:5%"]
    found, notes = candidates(names, [], config, 500, torch.float32)
    assert [one.name for one in found] == ["full", "int4", "mine", "snapkv:20%", "codes:5%"] and not notes
    assert plan_named("snapkv:50%+int4").layers[0].in_words == "snapkv 50%, rotated 4-bit"
    (tmp_path / "other").mkdir()
    Plan.of("int2").save(tmp_path / "other" / "mine.yaml")
    for given_names, budgets, said in (
        (["snapkv"], [], "needs a budget"),
        (["snapkv"], [1.5], "budget 1.5 cannot be used"),
        (["snapkw"], [0.5], "unknown preset 'snapkw'"),
        ([str(tmp_path / "mine.yaml"), str(tmp_path / "other" / "mine.yaml")], [], "two plan files are called mine"),
    ):
        with pytest.raises((EvaluationError, PlanError), match=said):
            candidates(given_names, budgets, config, 500, torch.float32)


# The grid and its results.


def small_grid(**changes: Any) -> grid.Grid:
    needle = task("needle")
    return grid.Grid(
        **{"tasks": [needle], "lengths": [900], "plans": ["int4", "fifo"], "budgets": [0.5], "samples": 2} | changes
    )


def test_a_grid_measures_every_plan_on_every_sample_and_goes_on_where_it_was_cut_off(loaded, tmp_path):
    asked, about = small_grid(), grid.about(loaded, 0)
    results = Results(tmp_path, about)
    works, notes = asked.works(loaded, results)
    assert [len(work.missing) for work in works] == [3, 3] and not notes
    grid.run(loaded, works[:1], results)
    with (tmp_path / ROWS).open("a") as file:
        file.write('{"format": 1, "engine": "kvt')  # a run that was killed
    again = Results(tmp_path, about)
    assert again.rows == results.rows
    left, _ = asked.works(loaded, again)
    assert [work.sample.number for work in left] == [1]
    grid.run(loaded, left, again)
    rows = list(read_rows(tmp_path))
    assert {(row.sample, row.plan, row.budget) for row in rows} == {
        (number, *plan) for number in (0, 1) for plan in (("full", None), ("int4", None), ("fifo", 0.5))
    }
    assert not asked.works(loaded, Results(tmp_path, about))[0]
    told = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [one["number"] for one in told] == [0, 1] and all("magic number" in one["context"] for one in told)
    for row in rows:
        assert row.bytes_default == 2 * 2 * 2 * 16 * 4 * (row.context_tokens - 1)
        if row.budget:
            assert row.bytes_held <= row.budget * row.bytes_default
            assert all(max(heads) < row.context_tokens / 2 for heads in row.kept)
        assert 0 <= row.score <= 1 and row.tokens_answered <= 20


def test_results_of_another_run_or_version_are_refused(loaded, tmp_path):
    about = grid.about(loaded, 0)
    results = Results(tmp_path, about)
    grid.run(loaded, small_grid(samples=1, plans=["int4"]).works(loaded, results)[0], results)
    with pytest.raises(EvaluationError, match=r"another run \(seed 0, now 1\)"):
        Results(tmp_path, grid.about(loaded, 1))
    path = tmp_path / ROWS
    whole = path.read_text()
    for text, said in (
        (whole.replace('"format": 1', '"format": 7'), "line 1 is of format 7, and this version reads 1"),
        (whole.replace('"token_ms"', '"token_s"'), "has or lacks token_ms, token_s"),
        ("words\n" + whole, "line 1 is no JSON object"),
    ):
        path.write_text(text)
        with pytest.raises(EvaluationError, match=said):
            Results(tmp_path, about)
    with pytest.raises(EvaluationError, match="cannot be made"):
        Results(path, about)


def test_nothing_to_measure_is_told(loaded, tmp_path):
    for change in ({"tasks": []}, {"lengths": []}, {"samples": 0}):
        with pytest.raises(EvaluationError, match="leave nothing to measure"):
            small_grid(**change).check()


def test_ray_is_asked_for_and_not_there(loaded, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EvaluationError, match="pip install ray"):
        spread.run(loaded, [], Results(tmp_path, {}))


# Statistics.


def row(score: float, plan: str = "full", number: int = 0, **changes: Any) -> Row:
    whole = Row(
        engine="kvtailor", plan=plan, budget=None, settings={}, task="needle", metric="contains", tokens=1000,
        sample=number, ask=0, depth=0.5, context_tokens=990, score=score, answer="", expected=["7"], kl=None,
        agreement=None, bytes_held=100, bytes_fast=100, bytes_on_disk=0, bytes_peak=120, bytes_default=200,
        read_seconds=1.0, compress_seconds=0.1, token_ms=50.0, tokens_answered=5, kept=[[99, 99], [50, 70]], run={},
    )  # fmt: skip
    return replace(whole, **changes)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
def test_intervals_hold_their_mean_and_lie_within_what_was_seen(values):
    found = interval(values)
    assert found.mean == pytest.approx(sum(values) / len(values))
    assert (
        min(values) - 1e-9 <= found.low <= found.mean + 1e-9 and found.mean - 1e-9 <= found.high <= max(values) + 1e-9
    )


def test_an_interval_is_about_twice_the_standard_error():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(400, generator=generator).tolist()
    found = interval(values)
    assert found.high - found.low == pytest.approx(2 * 1.96 * math.sqrt(1 / 12 / 400), rel=0.1)


def test_differences_are_of_the_same_samples():
    full = [row(1.0, number=0), row(0.0, number=1), row(1.0, number=2)]
    other = [row(1.0, "int2", 0), row(0.0, "int2", 1), row(0.0, "int2", 5)]
    assert paired_difference(other, full).mean == 0
    (whole, cut) = cells([*full, *other])
    assert whole.is_full and cut.difference.mean == 0 and cut.score.mean == pytest.approx(1 / 3)
    assert paired_difference(other[2:], full) is None


def test_questions_of_a_sample_count_once():
    rows = [row(1.0, number=0, ask=0), row(0.0, number=0, ask=1), row(1.0, number=1)]
    (cell,) = cells(rows)
    assert cell.samples == 2 and cell.score.mean == pytest.approx(0.75)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=8))
def test_the_front_is_what_nothing_beats(points):
    rows = [row(score / 5, f"plan{place}", bytes_held=held) for place, (held, score) in enumerate(points)]
    found = cells(rows)
    best = {one.plan for one in front(found)}
    for one in found:
        beaten = any(
            other.share <= one.share and other.score.mean >= one.score.mean
            and (other.share < one.share or other.score.mean > one.score.mean)
            for other in found
        )  # fmt: skip
        twins = any(other.plan in best and (other.share, other.score) == (one.share, one.score) for other in found)
        assert (one.plan in best) == (not beaten) or twins


def test_a_task_that_the_full_cache_fails_is_reported_as_such():
    found = cells([row(0.2), row(0.1, number=1), row(0.9, "int4")])
    assert len(unsolved(found)) == 1
    assert "the full cache scores 15%, so this tells nothing about caches" in sections(found)[0].title
    assert "tells nothing" in page(found, [row(0.2)], [], [])
    losses = cells([row(2.0, metric="following", kl=0.0, agreement=1.0)])
    assert not unsolved(losses) and "7.39" in markdown(losses)


def test_pictures_and_page_hold_every_plan(tmp_path):
    rows = [
        row(0.1 * number + (plan == "full") * 0.2, plan, number, tokens=tokens, engine=engine, depth=number / 5)
        for plan, engine in (("full", "kvtailor"), ("int4", "kvtailor"), ("snapkv", "kvpress"), ("a<b", "kvtailor"))
        for number in range(3)
        for tokens in (500, 1000)
    ]
    found = cells(rows)
    paths = draw(found, rows, tmp_path)
    assert [path.name for path in paths] == ["quality.png", "depth-needle.png", "time.png", "kept.png"]
    text = page(found, rows, paths, ["left out"])
    assert (
        text.count("data:image/png;base64,") == 4
        and "a&lt;b" in text
        and "<b" not in text.replace("<body", "").replace("<br", "")
    )
    assert "kvpress snapkv" in text and "left out" in text
    assert markdown(found).count("| full |") == 2


# The command.


@pytest.fixture
def folder(loaded, tmp_path) -> Path:
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_writes_a_page_and_goes_on(folder, tmp_path):
    words = ["compare", str(folder), "--plans", "int4,fifo", "--budgets", "50%", "--tasks", "needle,perplexity"]
    words += ["--tokens", "900", "--samples", "1", "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert {(one["task"], one["plan"]) for one in told["cells"]} == {
        (name, plan) for name in ("needle", "perplexity") for plan in ("full", "int4", "fifo")
    }
    rows = (tmp_path / "out" / ROWS).read_text()
    assert json.loads(CliRunner().invoke(app, words).stdout)["cells"] == told["cells"]
    assert (tmp_path / "out" / ROWS).read_text() == rows
    beside = [*words[:-3], "--out", str(tmp_path / "two"), "--with", str(tmp_path / "out"), "--json"]
    other = [asdict(replace(row, engine="kvpress")) for row in read_rows(tmp_path / "out")]
    (tmp_path / "out" / ROWS).write_text("".join(json.dumps({"format": 1, **one}) + "\n" for one in other))
    both = json.loads(CliRunner().invoke(app, beside).stdout)
    assert {one["engine"] for one in both["cells"]} == {"kvtailor", "kvpress"}
    assert "kvpress fifo at 50%" in (tmp_path / "two" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "needel"], "did you mean 'needle'"),
        (["--plans", "int5"], "int5"),
        (["--budgets", "2"], "--budgets '2' cannot be used"),
        (["--tokens", "many"], "--tokens 'many' cannot be used"),
        (["--tasks", ","], "names nothing"),
        (["--tokens", "2100", "--tasks", "needle"], "positions for 2000"),
        (["--with", "nowhere"], "cannot be read"),
        (["--tasks", "longbench-qasper"], "longbench"),
        (["--text", "nowhere.txt", "--tasks", "perplexity"], "nowhere.txt"),
    ],
)
def test_wrong_words_are_one_line_and_an_exit_code(folder, tmp_path, words, said):
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["compare", str(folder), "--samples", "1", "--out", str(out), *words])
    assert result.exit_code == 2, result.output
    assert said in result.output and "Traceback" not in result.output and len(result.output.strip().splitlines()) == 1


def test_the_tasks_are_listed():
    result = CliRunner().invoke(app, ["compare", "--list-tasks", "--json"])
    assert json.loads(result.stdout)["needle"] == "contains"
