"""kvtailor inside of other systems: lm-eval's likelihoods, and Transformers' pipeline."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import pipeline
from typer.testing import CliRunner

import kvtailor
from kvtailor.cli.main import app
from kvtailor.errors import EvaluationError
from kvtailor.integrations.lm_eval import likelihood, register
from test_evals import lettered
from zoo import ZOO, text


@pytest.mark.parametrize("count", [1, 5, 149])
def test_a_likelihood_is_that_of_the_model_reading_all_at_once(count):
    model = ZOO["llama"].build()
    ids = text(150, rows=1)["input_ids"][0].tolist()
    logits = model(torch.tensor([ids])).logits[0, -count - 1 : -1].log_softmax(-1)
    expected = sum(float(row[token]) for row, token in zip(logits, ids[-count:], strict=True))
    with kvtailor.attach(model, "full") as attachment:
        found, greedy = likelihood(attachment, ids, count)
    assert found == pytest.approx(expected, rel=1e-4) and not greedy


def test_what_the_model_would_say_is_greedy():
    model, ids = ZOO["llama"].build(), text(40, rows=1)["input_ids"]
    said = model.generate(ids, max_new_tokens=4, do_sample=False)[0].tolist()
    with kvtailor.attach(model, "full") as attachment:
        assert likelihood(attachment, said, 4)[1]


def test_the_plan_acts_on_likelihoods():
    model, ids = ZOO["llama"].build(), text(150, rows=1)["input_ids"][0].tolist()
    found = []
    for plan in ("full", "fifo:20"):
        with kvtailor.attach(model, plan) as attachment:
            found.append(likelihood(attachment, ids, 8)[0])
    assert abs(found[0] - found[1]) > 1e-3


def test_lm_eval_is_asked_for_and_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    with pytest.raises(EvaluationError, match="pip install"):
        register()
    result = CliRunner().invoke(app, ["lm-eval", "smollm2", "--plan", "int4", "--tasks", "arc_easy"])
    assert result.exit_code == 2 and "pip install" in result.output and "Traceback" not in result.output
    wrong = CliRunner().invoke(app, ["lm-eval", "smollm2", "--plan", "int5"])
    assert wrong.exit_code == 2 and "int5" in wrong.output


def test_a_pipeline_runs_with_an_attached_model():
    model, tokenizer = ZOO["llama"].build(), lettered()
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompt, options = "One two three. " * 8, {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    expected = generate(prompt, **options)[0]["generated_text"]
    with kvtailor.attach(model, "full"):
        assert generate(prompt, **options)[0]["generated_text"] == expected
    with kvtailor.attach(model, "int4"):
        assert isinstance(generate(prompt, **options)[0]["generated_text"], str)
    assert generate(prompt, **options)[0]["generated_text"] == expected
