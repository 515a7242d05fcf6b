"""Tasks: what is drawn is as long as asked, the same each time, answerable from the context, and scored rightly."""

from __future__ import annotations

import ast
import json
import re
import sys
import types
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvtailor.errors import EvaluationError
from kvtailor.evals import metrics
from kvtailor.evals.metrics import METRICS, metric
from kvtailor.evals.rendering import Prompt, Renderer, context_ids
from kvtailor.evals.sample import Ask, Sample, Task
from kvtailor.evals.tasks import code, infinitebench, longbench, qa, scbench
from kvtailor.evals.tasks.base import largest_fitting
from kvtailor.evals.tasks.filling import Passage, hide, piece_ends, reference
from kvtailor.evals.tasks.registry import TASKS, task, task_names

TEMPLATE = """{% if messages[0]['role'] != 'system' %}<|system|>
You help.<|end|>
{% endif %}{% for message in messages %}<|{{ message['role'] }}|>
{{ message['content'] | trim }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

PUBLISHED = tuple(name for name in TASKS if "/" in name)
GENERATED = tuple(name for name in TASKS if name not in PUBLISHED)
HIDDEN = tuple(
    name
    for name in GENERATED
    if name.startswith(("needle", "multi-", "niah", "variable", "common", "frequent", "recall", "copy"))
)
TWO_WAYS = tuple(name for name in GENERATED if hasattr(TASKS[name], "asked"))
TOKENS = 1024


def words_tokenizer(template: str | None = None, *, begins: bool = False) -> PreTrainedTokenizerFast:
    """A token for each word and each run of signs, behind ``<s>`` if asked; all unknown, as tasks only count them."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if begins:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>" if begins else None, chat_template=template
    )


TOKENIZERS = {
    "plain": words_tokenizer(),
    "chat": words_tokenizer(TEMPLATE),
    "plain with a first token": words_tokenizer(begins=True),
    "chat with a first token": words_tokenizer("{{ bos_token }}" + TEMPLATE, begins=True),
}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
two_tokenizers = pytest.mark.parametrize("tokenizer", [TOKENIZERS["plain"], TOKENIZERS["chat"]], ids=["plain", "chat"])


def drawn(name: str, tokenizer: Any, count: int = 3, tokens: int = TOKENS, seed: int = 0, **options: Any):
    return task(name, **options).samples(tokenizer, tokens, count, seed)


def ask(*answers: str) -> Ask:
    return Ask("", answers, 8)


# Registry


def test_every_task_is_one_and_has_a_metric() -> None:
    assert len(GENERATED) >= 20 and len(PUBLISHED) == 43
    for name in task_names():
        found = task(name)
        assert isinstance(found, Task) and found.name == name
        assert found.metric == "following" or metric(found.metric) is METRICS[found.metric]


def test_unknown_names_are_refused_with_the_nearest_and_the_allowed() -> None:
    with pytest.raises(EvaluationError, match=r"no task 'nedle'; did you mean 'needle'\?.*niah-single"):
        task("nedle")
    with pytest.raises(EvaluationError, match=r"no option 'depth'; allowed are asked, digits"):
        task("needle", depth=0.5)
    with pytest.raises(EvaluationError, match=r"no option 'dataset'"):
        task("longbench/trec", dataset="lcc")
    with pytest.raises(EvaluationError, match=r"no metric 'contain' of answers; did you mean 'contains'\?"):
        metric("contain")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("niah-single", {"queries": 2}),
        ("niah-single", {"kind": "words"}),
        ("multi-question", {"questions": 9}),
        ("variable-tracking", {"hops": -1}),
    ],
)
def test_options_that_make_no_task_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(EvaluationError, match=name):
        task(name, **options)


@pytest.mark.parametrize(("name", "options"), [("needle", {"asked": "before"}), ("niah-single", {"filler": "novel"})])
def test_unknown_ways_are_refused_when_samples_are_drawn(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(EvaluationError, match="allowed are"):
        drawn(name, TOKENIZERS["plain"], **options)


# Properties of all generated tasks


@two_tokenizers
@pytest.mark.parametrize("name", GENERATED)
def test_contexts_are_nearly_as_long_as_asked_and_never_longer(name: str, tokenizer: Any) -> None:
    for sample in drawn(name, tokenizer):
        length = len(context_ids(tokenizer, sample.context))
        assert 0.88 * TOKENS <= length <= TOKENS
        assert sample.settings["length"] == length and "depth" in sample.settings
        assert sample.settings["tokens"] == TOKENS and sample.settings["seed"] == 0
        assert sample.task == name and sample.asks and json.dumps(sample.settings)
        assert all(one.tokens > 0 and one.answers for one in sample.asks)


@pytest.mark.parametrize("name", GENERATED)
def test_samples_are_the_same_each_time_and_whatever_their_number(name: str) -> None:
    tokenizer = TOKENIZERS["chat"]
    three = list(drawn(name, tokenizer))
    assert three == list(drawn(name, tokenizer))
    assert three[:1] == list(drawn(name, tokenizer, count=1))
    assert [sample.number for sample in three] == [0, 1, 2]
    assert len({sample.context for sample in three}) == 3
    assert drawn(name, tokenizer, count=1, seed=1)[0].context != three[0].context


@pytest.mark.parametrize("name", HIDDEN)
def test_answers_stand_in_the_context(name: str) -> None:
    for sample in drawn(name, TOKENIZERS["chat"]):
        for one in sample.asks:
            assert all(answer in sample.context for answer in one.answers)
            assert metric(TASKS[name].metric)(" and ".join(one.answers), one) == 1


@every_tokenizer
@pytest.mark.parametrize("name", TWO_WAYS)
def test_both_ways_of_asking_make_the_same_text(name: str, tokenizer: Any) -> None:
    known, after = (drawn(name, tokenizer, count=2, tokens=600, asked=asked) for asked in ("known", "after"))
    for one, other in zip(known, after, strict=True):
        assert one.context + one.asks[0].text == other.context + other.asks[0].text
        assert len(one.context) > len(other.context) and other.asks[0].text.endswith(one.asks[0].text)
        assert one.asks[0].answers == other.asks[0].answers
        assert tokenizer(one.asks[0].text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("name", [name for name in GENERATED if name not in ("perplexity", "code")])
def test_what_is_too_short_is_refused(name: str) -> None:
    with pytest.raises(EvaluationError, match=rf"'{name}' needs \d+ tokens with nothing filled in; 12 were asked for"):
        drawn(name, TOKENIZERS["plain"], tokens=12)


@pytest.mark.parametrize(("tokens", "count"), [(0, 1), (100, 0)])
@pytest.mark.parametrize("name", ["needle", "perplexity", "longbench/trec", "infinitebench/passkey", "scbench/kv"])
def test_lengths_and_counts_are_positive(name: str, tokens: int, count: int) -> None:
    with pytest.raises(EvaluationError, match="is 0, allowed is 1 or more"):
        drawn(name, TOKENIZERS["plain"], tokens=tokens, count=count)


# Rendering


@every_tokenizer
@settings(max_examples=30, deadline=None)
@given(before=st.text(max_size=40), question=st.text(min_size=1, max_size=20), start=st.text(max_size=10))
def test_markup_stands_around_a_message_that_is_kept_as_it_is(tokenizer, before, question, start) -> None:
    renderer = Renderer.of(tokenizer)
    known, after = (renderer.split(Prompt(before, question, start), asked) for asked in ("known", "after"))
    assert "".join(known) == "".join(after)
    assert before + question in known[0] and known[0].endswith(question) and after[0].endswith(before)
    assert known[1].endswith(start) and len(known[1]) > len(start)


def test_a_chat_is_what_the_template_makes_of_it() -> None:
    tokenizer = TOKENIZERS["chat with a first token"]
    renderer = Renderer.of(tokenizer)
    first, second = Prompt("Text.\n\n", "Who?"), Prompt("Text.\n\n", "When?", "It was")
    messages = [
        {"role": "user", "content": "Text.\n\nWho?"},
        {"role": "assistant", "content": "She"},
        {"role": "user", "content": "When?"},
    ]
    context, text = renderer.split(first, "after")
    whole = context + text + "She" + renderer.asking_again(second)
    assert whole == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) + "It was"


def test_a_first_token_stands_once_before_a_context() -> None:
    for name, tokenizer in TOKENIZERS.items():
        context = Renderer.of(tokenizer).split(Prompt("a b\n\n", "c"), "known")[0]
        assert context_ids(tokenizer, context).count(1) == int("first token" in name)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('no messages here') }}", "fails with 1 messages: no messages here"),
        ("{{ messages[0]['content'] | upper }}", "holds 1 of 1 messages not once and unchanged"),
        ("{{ messages[-1]['content'] }}", "holds 2 of 3 messages not once and unchanged"),
    ],
)
def test_templates_that_hold_no_messages_are_refused(template: str, match: str) -> None:
    with pytest.raises(EvaluationError, match=match):
        Renderer.of(words_tokenizer(template))


# Filling


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.integers(0, 9), max_size=80),
    least=st.integers(0, 5),
    tokens=st.integers(0, 600),
    is_finite=st.booleans(),
)
def test_the_largest_number_that_fits_is_nearly_found(
    steps: list[int], least: int, tokens: int, is_finite: bool
) -> None:
    """Against a search that tries all."""

    def length(units: int) -> int:
        return least + sum(steps[:units]) + max(units - len(steps), 0)

    most = len(steps) if is_finite else None
    if least > tokens or (is_finite and length(len(steps)) < tokens - tokens // 8):
        with pytest.raises(EvaluationError, match="were asked for"):
            largest_fitting("some", length, tokens, most)
        return
    found = largest_fitting("some", length, tokens, most)
    best = 0
    while (most is None or best < most) and length(best + 1) <= tokens:
        best += 1
    assert found == best or (found < best and length(found) >= tokens - tokens // 256)


def test_passages_grow_by_sentences_and_begin_again_at_their_end() -> None:
    texts = ["A title\n*******", "One. Two? Three:\nfour", "x" * 200 + "\n" + "y" * 200 + "\nend"]
    passage = Passage(texts, 1)
    grown = ["\n\n".join(passage.parts(pieces)) for pieces in range(18)]
    whole = "\n\n".join([*texts[1:], *texts[:1]] * 4)
    assert grown[0] == "" and all(whole.startswith(text) for text in grown)
    assert all(len(longer) > len(shorter) for shorter, longer in pairwise(grown))
    assert grown[1:4] == ["One.", "One. Two?", "One. Two? Three:"]
    assert [texts[2][:end][-1] for end in piece_ends(texts[2])] == ["x", "y", "d"]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), depths=st.lists(st.floats(0, 1), max_size=4))
def test_hidden_parts_stand_at_the_nearest_joint(lengths: list[int], depths: list[float]) -> None:
    parts = ["a" * length for length in lengths]
    hidden = [(depth, f"needle {number}") for number, depth in enumerate(depths)]
    woven = hide(parts, hidden, "|").split("|")
    assert [part for part in woven if part.startswith("a")] == parts
    assert Counter(part for part in woven if not part.startswith("a")) == Counter(text for _, text in hidden)
    total = sum(lengths)
    for depth, text in hidden:
        before = sum(len(part) for part in woven[: woven.index(text)] if part.startswith("a"))
        joints = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
        assert abs(before - depth * total) <= min(abs(joint - depth * total) for joint in joints) + 1e-6


# Families


def test_needles_depths_cover_the_context_evenly_whatever_their_number() -> None:
    samples = drawn("needle", TOKENIZERS["plain"], count=32)
    for count in (8, 16, 32):
        depths = sorted(float(sample.asks[0].depth) for sample in samples[:count])
        gaps = [b - a for a, b in zip([0.0, *depths], [*depths, 1.0], strict=True)]
        assert max(gaps) < 3 / count + 0.1


def test_a_needles_depth_says_where_it_stands() -> None:
    for name in ("needle", "niah-single"):
        for sample in drawn(name, TOKENIZERS["plain"], count=4):
            (answer,), depth = sample.asks[0].answers, sample.asks[0].depth
            assert sample.context.count(answer) == 1
            assert abs(sample.context.index(answer) / len(sample.context) - depth) < 0.05


def test_keys_have_the_values_that_the_context_says() -> None:
    for name in ("multi-needle", "niah-multikey", "niah-multikey-lines", "niah-multivalue", "niah-multiquery"):
        for sample in drawn(name, TOKENIZERS["chat"]):
            said = re.findall(r"magic \w+ for ([\w-]+) is: (\S+?)\.", sample.context)
            expected = [value for key in sample.settings["keys"] for found, value in said if found == key]
            assert sorted(expected) == sorted(sample.asks[0].answers)
            assert all(key in sample.context.splitlines()[-1] for key in sample.settings["keys"])


def test_questions_apart_and_in_turns_are_the_same() -> None:
    tokenizer = TOKENIZERS["chat"]
    for apart, turns in zip(*(drawn(name, tokenizer) for name in ("multi-question", "multi-turn")), strict=True):
        assert (apart.ordering, turns.ordering) == ("apart", "turns")
        assert apart.context == turns.context and 5 <= len(apart.asks) <= 8
        assert apart.asks[0] == turns.asks[0]
        for one, other in zip(apart.asks[1:], turns.asks[1:], strict=True):
            assert other.text == "<|end|>\n<|user|>\n" + one.text and one.answers == other.answers
        assert len({one.answers for one in apart.asks}) == len(apart.asks)
        assert not any(one.text in apart.context for one in apart.asks)


def test_variables_are_those_that_assignments_lead_to() -> None:
    for sample in drawn("variable-tracking", TOKENIZERS["plain"]):
        held: dict[str, str] = {}
        for name, value in re.findall(r"Let (\w+) = (\w+)\.", sample.context):
            held[name] = held.get(value, value)
        assert len(held) == 10
        assert [name for name, value in held.items() if value == sample.settings["value"]] == list(
            sample.asks[0].answers
        )


@pytest.mark.parametrize("tokens", [600, 3000, 60000])
def test_common_words_stand_at_least_three_times_as_often_as_others(tokens: int) -> None:
    (sample,) = drawn("common-words", TOKENIZERS["plain"], count=1, tokens=tokens)
    found = Counter(re.findall(r"^\d+\. (\w+)$", sample.context, re.MULTILINE))
    common = [found.pop(word) for word in sample.asks[0].answers]
    assert len(common) == 10 and min(common) == sample.settings["times"] >= 3 * max(found.values())


@pytest.mark.parametrize("tokens", [100, 3000])
def test_frequent_words_are_asked_by_their_rank(tokens: int) -> None:
    (sample,) = drawn("frequent-words", TOKENIZERS["plain"], count=1, tokens=tokens)
    ranks = Counter(sample.context.split("\n\n")[1].split()).most_common(4)
    assert [word for word, _ in ranks[:3]] == list(sample.asks[0].answers)
    assert all(one > other for (_, one), (_, other) in pairwise(ranks))


def test_the_passage_to_copy_stands_once_under_its_number() -> None:
    for sample in drawn("copy", TOKENIZERS["plain"]):
        (answer,) = sample.asks[0].answers
        assert sample.context.count(f"Passage {sample.settings['passage']}: {answer}\n") == 1
        assert len(answer.split()) == 12


def test_recall_is_an_object_that_holds_the_answer() -> None:
    for sample in drawn("recall", TOKENIZERS["plain"]):
        found = json.loads(sample.context[sample.context.index("{") : sample.context.rindex("}") + 1])
        assert found[sample.settings["key"]] == sample.asks[0].answers[0]


def test_each_question_is_answered_by_one_paragraph_of_the_reference() -> None:
    """All of them on Python 3.11, whose reference they are about."""
    found = qa.answerable()
    assert len(qa.PAIRS) >= 30 and found
    if sys.version_info[:2] == (3, 11):
        assert [pair for pair, _ in found] == list(qa.PAIRS)
    for pair, paragraph in found:
        assert paragraph in reference() and pair.answer.lower() in paragraph.lower()
        assert pair.answer.lower() not in pair.question.lower()
        assert len(pair.answer.split()) <= 3


def test_only_the_questions_paragraph_holds_the_answer() -> None:
    paragraphs = {pair.question: (pair, paragraph) for pair, paragraph in qa.answerable()}
    samples = drawn("qa", TOKENIZERS["plain"], count=len(paragraphs), tokens=3000)
    assert {sample.settings["question"] for sample in samples} == set(paragraphs)
    for sample in samples:
        pair, paragraph = paragraphs[sample.settings["question"]]
        assert sample.context.count(paragraph) == 1
        assert pair.answer.lower() not in sample.context.replace(paragraph, "").lower()


def test_code_is_continued_with_a_statement_inside_a_function() -> None:
    library = Path(ast.__file__).parent
    for sample in drawn("code", TOKENIZERS["plain"], count=6):
        lines = (library / sample.settings["file"]).read_text(encoding="utf-8").splitlines(keepends=True)
        at = sample.settings["line"] - 1
        text = sample.context + sample.asks[0].text
        before = f"# {sample.settings['file']}\n" + "".join(lines[:at])
        assert before.endswith(text) or text.endswith(before)
        assert lines[at].rstrip("\n") == sample.asks[0].answers[0]
        functions = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.FunctionDef)]
        assert any(function.lineno < at + 1 <= function.end_lineno for function in functions)


def test_code_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(code, "_library", lambda: tmp_path)
    with pytest.raises(EvaluationError, match="holds no source files of the standard library"):
        drawn("code", TOKENIZERS["plain"])


def test_perplexity_is_of_the_words_that_follow(tmp_path: Path) -> None:
    file = tmp_path / "numbers.txt"
    file.write_text("\n\n".join(f"{number} and {number}" for number in range(900)), encoding="utf-8")
    for options in ({}, {"file": file}):
        text = file.read_text(encoding="utf-8") if options else "\n\n".join(reference())
        samples = drawn("perplexity", TOKENIZERS["plain"], count=6, **options)
        assert len({sample.settings["start"] for sample in samples}) == 6
        for sample in samples:
            (answer,) = sample.asks[0].answers
            at = sample.settings["start"]
            assert text.startswith(sample.context + answer, at) and sample.asks[0].text == ""
            assert text[at + len(sample.context + answer)].isspace()
            assert 120 <= len(context_ids(TOKENIZERS["plain"], answer)) <= 128


def test_perplexity_reports_files_that_it_cannot_read(tmp_path: Path) -> None:
    latin, short = tmp_path / "latin.txt", tmp_path / "short.txt"
    latin.write_bytes(b"caf\xe9")
    short.write_text("Not much.", encoding="utf-8")
    for file, match in (
        (tmp_path / "none.txt", "none.txt' cannot be read"),
        (latin, "latin.txt' is not UTF-8 text.*byte 3"),
        (short, "has text of 3 tokens; 1152 were asked for"),
    ):
        with pytest.raises(EvaluationError, match=match):
            drawn("perplexity", TOKENIZERS["plain"], file=file)


# Published data


def write(folder: Path, name: str, *rows: Any) -> Path:
    (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return folder


def long_row(**fields: Any) -> dict[str, Any]:
    return {
        "input": "Who was it?",
        "context": "BEGIN " + "some words about it. " * 60 + "END",
        "answers": ["Ada"],
        "length": 1200,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": "a1",
        **fields,
    }


@pytest.mark.parametrize("name", list(longbench.FORMS))
@two_tokenizers
def test_longbench_rows_become_samples(name: str, tokenizer: Any, tmp_path: Path) -> None:
    """The middle of a long context is left out, and both ways of asking make the same text."""
    asked = "Question: Who was it?\nType:"
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", name, long_row(input=asked, all_classes=["Ada", "Ad", "Bea"]), long_row(context="Short."))
    long, short = drawn(f"longbench/{name}", tokenizer, count=2, tokens=200, source=tmp_path)
    length = len(context_ids(tokenizer, long.context))
    assert 176 <= length <= 200 and "BEGIN some words" in long.context and "about it. END" in long.context
    assert "Short." in short.context and long.settings["row"] == "a1"
    after = drawn(f"longbench/{name}", tokenizer, count=1, tokens=200, source=tmp_path, asked="after")[0]
    assert long.context + long.asks[0].text == after.context + after.asks[0].text
    assert long.asks[0].text and long.asks[0].answers[0] == "Ada"
    if not longbench.FORMS[name].chat:
        assert "<|user|>" not in long.context and long.asks[0].text in ("Type:", "Next line of code:\n")
    if longbench.FORMS[name].metric == "classification":
        assert long.asks[0].answers == ("Ada", "Ad", "Bea")


@pytest.mark.parametrize("name", list(infinitebench.FORMS))
def test_infinitebench_rows_become_samples(name: str, tmp_path: Path) -> None:
    rows = [
        {"id": 7, "context": "some text " * 200, "input": "What is it?", "answer": answer, "options": options}
        for answer, options in (([42], []), ("42", ["41", "42", "43", "44"]))
    ]
    write(tmp_path, name, *rows[int(infinitebench.FORMS[name].metric == "choice") :])
    (sample,) = drawn(f"infinitebench/{name}", TOKENIZERS["chat"], count=1, tokens=150, source=tmp_path)
    (one,) = sample.asks
    assert 132 <= sample.settings["length"] <= 150 and sample.settings["row"] == 7
    assert metric(TASKS[f"infinitebench/{name}"].metric)(one.answers[0], one) == 1
    if infinitebench.FORMS[name].metric == "choice":
        assert one.answers == ("B", "42") and "B. 42\n" in sample.context


@pytest.mark.parametrize("name", list(scbench.FORMS))
def test_scbench_rows_become_samples_of_turns(name: str, tmp_path: Path) -> None:
    turns = [
        {"input": f"What is {number}?", "answer": answer, "options": ["7", "8", "9", "10"]}
        for number, answer in enumerate(("8", ["9"], 7))
    ]
    write(tmp_path, name, {"id": 3, "context": "some text " * 200, "multi_turns": turns})
    short = f"scbench/{name.removeprefix('scbench_')}"
    (sample,) = drawn(short, TOKENIZERS["chat"], count=1, tokens=150, source=tmp_path)
    (apart,) = drawn(short, TOKENIZERS["chat"], count=1, tokens=150, source=tmp_path, ordering="apart")
    assert 132 <= sample.settings["length"] <= 150 and sample.context == apart.context
    assert len(sample.asks) == 3 and (sample.ordering, apart.ordering) == ("turns", "apart")
    for number, (one, alone) in enumerate(zip(sample.asks, apart.asks, strict=True)):
        assert f"What is {number}?" in one.text and one.answers == alone.answers
        assert one.text == ("<|end|>\n<|user|>\n" if number else "") + alone.text
    expected = (
        [("B", "8"), ("C", "9"), ("A", "7")] if scbench.FORMS[name].metric == "choice" else [("8",), ("9",), ("7",)]
    )
    assert [one.answers for one in sample.asks] == expected


def test_rows_come_as_published_or_in_an_order_of_the_seed(tmp_path: Path) -> None:
    write(tmp_path, "trec", *(long_row(context=f"row {number}") for number in range(12)))

    def numbers(count: int, seed: int) -> list[str]:
        found = drawn("longbench/trec", TOKENIZERS["plain"], count=count, tokens=60, seed=seed, source=tmp_path)
        return [re.search(r"row (\d+)", sample.context).group(1) for sample in found]

    assert numbers(12, 0) == [str(number) for number in range(12)]
    assert numbers(5, 1) == numbers(12, 1)[:5] != numbers(5, 0)
    assert sorted(numbers(12, 1)) == sorted(numbers(12, 0))


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b'{"input": ', r"trec.jsonl', line 2 is no JSON: .* at column \d+"),
        (b'{"input": "\xff"}', r"trec.jsonl', line 2 is not UTF-8 text"),
        (b"[1]", r"trec.jsonl', line 2 is a list; allowed is an object"),
        (b'{"input": "", "context": ""}', r"trec.jsonl', line 2 has no field 'answers'; needed are input, context"),
        (
            b'{"input": "", "context": 3, "answers": [], "all_classes": []}',
            r"trec.jsonl', line 2 has a context that is no text",
        ),
    ],
)
def test_a_broken_line_is_named(line: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / "trec.jsonl").write_bytes(json.dumps(long_row()).encode() + b"\n" + line + b"\n")
    with pytest.raises(EvaluationError, match=match):
        drawn("longbench/trec", TOKENIZERS["plain"], count=1, source=tmp_path)


def test_broken_turns_and_options_are_named_with_their_line(tmp_path: Path) -> None:
    write(tmp_path, "scbench_kv", {"context": "", "multi_turns": [{"input": "What?"}]})
    with pytest.raises(EvaluationError, match=r"scbench_kv.jsonl', line 1 has a broken 'multi_turns'"):
        drawn("scbench/kv", TOKENIZERS["plain"], count=1, source=tmp_path)
    write(tmp_path, "code_debug", {"context": "", "input": "", "answer": "E", "options": ["f", "g"]})
    with pytest.raises(EvaluationError, match=r"code_debug.jsonl', line 1 has the answer 'E', which is none of"):
        drawn("infinitebench/code_debug", TOKENIZERS["plain"], count=1, source=tmp_path)


def test_missing_data_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "trec", long_row())
    monkeypatch.setitem(sys.modules, "datasets", None)
    for options, match in (
        ({}, "needs source=…: a folder that holds trec.jsonl"),
        ({"source": tmp_path / "none"}, "is no folder and no name of a data set"),
        ({"source": "someone/some-data"}, "needs the package 'datasets'"),
        ({"source": tmp_path, "count": 2}, "has 1 rows; 2 samples were asked for"),
    ):
        with pytest.raises(EvaluationError, match=match):
            drawn("longbench/trec", TOKENIZERS["plain"], **{"count": 1, **options})
    with pytest.raises(EvaluationError, match=r"no file '.*lcc.jsonl', nor '.*data.*lcc.jsonl'"):
        drawn("longbench/lcc", TOKENIZERS["plain"], source=tmp_path)


def test_data_is_read_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((*arguments, options))
        if "broken" in arguments[0]:
            raise OSError("no such data set\nand more")
        return [long_row()]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (sample,) = drawn("longbench/hotpotqa", TOKENIZERS["plain"], count=1, tokens=150, source="someone/LongBench")
    assert sample.asks[0].answers == ("Ada",)
    assert asked == [("someone/LongBench", {"name": "hotpotqa", "split": "test"})]
    with pytest.raises(EvaluationError, match=r"data set 'someone/broken' cannot be loaded: no such data set$"):
        drawn("longbench/hotpotqa", TOKENIZERS["plain"], count=1, source="someone/broken")


# Metrics


@pytest.mark.parametrize(
    ("name", "answer", "answers", "expected"),
    [
        ("contains", "It is PARIS, or Rome.", ("paris", "Bonn"), 0.5),
        ("contains", "12345 and 678", ("12345", "678"), 1),
        ("contains", "", ("1",), 0),
        ("contains_any", "It is PARIS.", ("Bonn", "paris"), 1),
        ("contains_any", "It is Rome.", ("Bonn", "paris"), 0),
        ("first_line_exact", "\n  yes \nno", ("yes",), 1),
        ("first_line_exact", "Yes", ("yes",), 0),
        ("edit_similarity", "\n    return x\nmore", ("return x",), 1),
        ("edit_similarity", "abcd", ("abce", "zzzz"), 0.75),
        ("edit_similarity", "", ("",), 1),
        ("edit_similarity", "", ("abc",), 0),
        ("f1", "The cat, sat!", ("a cat sat",), 1),
        ("f1", "the cat sat down there", ("Cat sat", "dog"), 2 / 3),
        ("f1", "cat cat cat", ("cat",), 0.5),
        ("f1", "在北京", ("北京",), 0.8),
        ("f1", "在北京。", ("上海",), 0),
        ("rouge_l", "a b c d", ("A c b d",), 0.75),
        ("rouge_l", "", ("a",), 0),
        ("rouge_l", "北京是首都", ("北京 首都",), 8 / 9),
        ("first_line_f1", "Ada\nQuestion: Bea", ("Ada",), 1),
        ("first_line_rouge_l", "\nAda came\nand went", ("Ada came",), 1),
        ("classification", "Type: Animal or Place", ("Animal", "Place", "Date"), 0.5),
        ("classification", "Animal species", ("Animal species", "Animal"), 1),
        ("classification", "Place\nAnimal", ("Animal", "Place"), 0),
        ("count", "There are 12, not 7.", ("12",), 0.5),
        ("count", "none", ("12",), 0),
        ("retrieval", "Paragraph 12", ("Paragraph 12",), 1),
        ("retrieval", "段落3或段落5", ("段落3",), 0.5),
        ("choice", "The answer is B.", ("B", "the red one"), 1),
        ("choice", "C, the red one", ("B", "the red one"), 0),
        ("choice", "It is The Red One", ("B", "the red one"), 1),
        ("first_number", "It is 12.5, not 3", ("12.50",), 1),
        ("first_number", "no number", ("3",), 0),
        ("last_number", "f(3) gives -7", ("-7",), 1),
        ("last_number", "f(3) gives -7", ("3",), 0),
        ("numbers", "1, 2, 4, 4", ("1", "2", "3", "4"), 0.5),
        ("numbers", "[1, 2]", ("1", "2"), 1),
    ],
)
def test_metrics_against_cases_by_hand(name: str, answer: str, answers: tuple[str, ...], expected: float) -> None:
    assert metric(name)(answer, ask(*answers)) == pytest.approx(expected)


def test_metrics_without_what_they_need_are_refused() -> None:
    for name in METRICS:
        with pytest.raises(EvaluationError, match=r"has no expected answer; allowed is one or more"):
            metric(name)("some", ask())
    for name in ("first_number", "last_number", "retrieval"):
        with pytest.raises(EvaluationError, match="has the expected answer 'none'"):
            metric(name)("some", ask("none"))


short_texts = st.text("ab c", max_size=12)


@settings(max_examples=150, deadline=None)
@given(first=short_texts, second=short_texts)
def test_the_longest_common_subsequence_is_the_textbooks(first: str, second: str) -> None:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first, 1):
        for j, b in enumerate(second, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if a == b else max(table[i - 1][j], table[i][j - 1])
    assert metrics.common_subsequence(first, second) == table[-1][-1]


@settings(max_examples=150, deadline=None)
@given(first=short_texts, second=short_texts)
def test_edit_similarity_counts_insertions_and_deletions(first: str, second: str) -> None:
    one, other = first.strip(), second.strip()
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before = row
        row = [i]
        for j, b in enumerate(other, 1):
            row.append(before[j - 1] if a == b else 1 + min(before[j], row[-1]))
    total = len(one) + len(other)
    expected = 1 - row[-1] / total if total else 1.0
    assert metrics.edit_similarity(first, ask(second)) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(answer=st.text(max_size=30), expected=st.text(min_size=1, max_size=15))
def test_scores_are_shares(answer: str, expected: str) -> None:
    for name in ("contains", "contains_any", "first_line_exact", "edit_similarity", "f1", "rouge_l", "classification"):
        assert 0 <= metric(name)(answer, ask(expected)) <= 1


def test_samples_are_plain_data() -> None:
    (sample,) = drawn("needle", TOKENIZERS["plain"], count=1)
    assert isinstance(sample, Sample) and isinstance(sample.asks[0], Ask)
