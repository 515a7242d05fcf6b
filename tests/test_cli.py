"""The command line: what each command prints, and that every wrong input is one line and exit code 2."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvtailor
from kvtailor._compat import output_cache_argument
from kvtailor.cli import bandwidth
from kvtailor.cli.advice import LADDER, SHARE, advice, recommended
from kvtailor.cli.failures import describe
from kvtailor.cli.generate import renumbers
from kvtailor.cli.machine import processor
from kvtailor.cli.main import app
from kvtailor.demo.plot import draw
from kvtailor.demo.run import SHARES, Runner, curve_plans, plan_count, question_prompt, run, stock_bytes
from kvtailor.errors import KVTailorError
from kvtailor.estimate import estimate, length_limit
from kvtailor.models import load as loading
from kvtailor.models.load import Loaded, load
from kvtailor.plan import Plan
from kvtailor.presets import NAMES

LIMIT = 768
CACHE = output_cache_argument(inspect.signature(LlamaForCausalLM.forward).parameters)


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LIMIT,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=259,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama and a tokenizer whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_alone = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    specials = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=bytes_alone, **specials).save_pretrained(folder)
    return folder


def call(*arguments: object, given: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=given, prog_name="kvtailor")


def called(*arguments: object, given: str | None = None) -> str:
    """Standard output of a command that must succeed."""
    result = call(*arguments, given=given)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object, given: str | None = None) -> str:
    """The one line of a command that must refuse its input, without "error: "."""
    result = call(*arguments, given=given)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


# What the commands print


def test_help_names_the_commands_and_the_exit_codes() -> None:
    text = " ".join(called("--help").split())
    for command in ("demo", "generate", "plan", "doctor", "presets", "schema"):
        assert command in text
    assert "2 an input cannot be used" in text
    assert "130 interrupted" in text
    assert "Usage" in called()


def test_version() -> None:
    assert called("--version").strip() == f"kvtailor {kvtailor.__version__}"


def test_presets_are_all_listed_with_a_description_and_a_source() -> None:
    listed = json.loads(called("presets", "--json"))
    assert [entry["name"] for entry in listed] == list(NAMES)
    assert all(entry["description"] and entry["source"] for entry in listed)
    assert {entry["name"]: entry["usage"] for entry in listed}["snapkv"] == "snapkv[:BUDGET]"
    table = called("presets")
    assert all(name in table for name in NAMES)


def test_schema_is_that_of_a_plan() -> None:
    schema = json.loads(called("schema"))
    assert {"name", "layers", "prefill_chunk", "made_for", "measured"} == set(schema["properties"])


def test_doctor_describes_the_machine_and_the_embedded_models() -> None:
    found = json.loads(called("doctor", "--json"))
    assert found["cores"] >= 1
    assert found["kernels"]["active"] in found["kernels"]["available"]
    assert found["kernels"]["built"] == (found["kernels"]["note"] is None)
    assert found["versions"]["torch"] == torch.__version__
    assert {model["name"] for model in found["embedded_models"]} == {"smollm2", "whisper-tiny.en"}
    assert "model" not in found


def test_doctor_tells_how_to_get_compiled_kernels_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTAILOR_KERNELS", raising=False)
    monkeypatch.setitem(sys.modules, "kvtailor.kernels._native", None)  # type: ignore[arg-type]
    found = json.loads(called("doctor", "--json"))["kernels"]
    assert (found["active"], found["built"]) == ("reference", False)
    assert "install a C++17 compiler" in found["note"]
    assert found["note"] in called("doctor")


def test_processor_reads_the_instruction_sets(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("model name\t: Fast One\nflags\t\t: fpu avx2 avx512f avx512_vnni\n\nmodel name\t: Fast One\n")
    found = processor(file)
    assert found["processor"] == "Fast One"
    assert found["instruction_sets"] == ["avx2", "avx512", "vnni"]
    assert processor(tmp_path / "none")["instruction_sets"] == []


def test_doctor_tells_what_a_plan_would_hold(tiny: Path) -> None:
    found = json.loads(called("doctor", tiny, "--plan", "int4", "--tokens", 640, "--json"))["model"]
    held = estimate(tiny_config(), Plan.preset("int4"), 640)
    assert (found["bytes_held"], found["bytes_default"]) == (held.bytes_held, held.bytes_default)
    assert [group["layers"] for group in found["layer_groups"]] == ["0-1"]
    assert found["length_limit"] == LIMIT
    assert found["warnings"] == []


def test_doctor_measures_and_answers_the_usual_complaints(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth, "DISK_BYTES", 1 << 24)
    options = ("doctor", tiny, "--plan", "tailor-offload", "--tokens", 600, "--measure", "--folder", tmp_path)
    found = json.loads(called(*options, "--json"))
    assert found["measured"]["memory_gb_per_s"] > 0 and found["measured"]["disk_rows_ms"] > 0
    assert found["model"]["recommended"]["plan"] == "full"
    answers, steps, memory = found["model"]["advice"]
    assert "2 bits" in answers and "read from disk" in steps and "fits beside" in memory
    assert "Plan full is the safest whose cache" in called(*options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("plan", "words"),
    [("snapkv:25%", "drops tokens"), ("tailor", "2 bits"), ("quest", "raise top"), ("int4", "next to nothing")],
)
def test_advice_names_what_a_plan_risks(plan: str, words: str) -> None:
    measured = {"disk_rows_ms": None, "disk_read_gb_per_s": None, "link_gb_per_s": [2.5]}
    answers, steps, memory = advice(Plan.preset(plan), measured, held=100, default=200, free=110)
    assert words in answers and "does not fit" in memory
    assert "how much is free is not known" in advice(Plan.preset(plan), measured, 1, 2, None)[2]
    assert "name another folder" in advice(Plan.preset("tailor-offload"), measured, 1, 2, None)[1] and steps


@pytest.mark.parametrize(("gigabytes", "name"), [(None, "cpu"), (24, "24gb-gpu"), (8, "24gb-gpu"), (80, "large-gpu")])
def test_the_preset_to_begin_with_is_chosen_by_the_largest_card(monkeypatch, gigabytes, name) -> None:
    from types import SimpleNamespace

    from kvtailor.cli.machine import hardware_preset

    cards = [] if gigabytes is None else [2, gigabytes]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=cards[number] * 2**30)
    )
    assert hardware_preset() == name
    assert (
        Plan.preset(name).layers == Plan.preset({"cpu": "int4", "24gb-gpu": "tailor", "large-gpu": "int8"}[name]).layers
    )


def test_the_safest_plan_that_fits_is_recommended() -> None:
    config, tokens = tiny_config(), 600
    sizes = {name: estimate(config, Plan.preset(name), tokens).bytes_held for name in LADDER}
    for name, held in sizes.items():
        free = int(held / SHARE) + 1
        chosen = recommended(config, tokens, torch.float32, free)
        assert chosen is not None and chosen[1] <= held and LADDER.index(chosen[0]) <= LADDER.index(name)
    assert recommended(config, tokens, torch.float32, 10) is None
    assert recommended(config, tokens, torch.float32, None) is None


def test_a_folder_that_is_none_is_named() -> None:
    assert "--folder 'nowhere' is no folder" in refused("doctor", "--measure", "--folder", "nowhere")


def test_doctor_prints_layer_groups_for_people(tiny: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("layers: [{layers: 1, form: {kind: rotated, bits: 2}}]")
    text = called("doctor", tiny, "--plan", plan)
    assert "full" in text
    assert "rotated 2-bit" in text


@pytest.mark.parametrize(
    ("plan", "tokens", "words"),
    [
        ("full", 10_000, "10000 tokens are more than the 768 positions"),
        ("snapkv:1%", 500, "budget 1% of 500 tokens is 5, not above the 36 protected ones: 37 are kept"),
        ("layers: [{layers: 7, form: {kind: rotated, bits: 4}}]", 500, "changes no layer of LlamaForCausalLM"),
    ],
)
def test_doctor_warns(tiny: Path, tmp_path: Path, plan: str, tokens: int, words: str) -> None:
    if ":" in plan and " " in plan:
        file = tmp_path / "plan.yaml"
        file.write_text(plan)
        plan = str(file)
    (warning,) = json.loads(called("doctor", tiny, "--plan", plan, "--tokens", tokens, "--json"))["model"]["warnings"]
    assert words in warning


# generate


def test_generate_prints_what_transformers_generates(tiny: Path) -> None:
    loaded = load(tiny)
    ids = loaded.tokenizer("Hello there", return_tensors="pt").input_ids
    expected = loaded.model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    text = called("generate", tiny, "--prompt", "Hello there", "--max-new-tokens", 6)
    assert text == loaded.tokenizer.decode(expected, skip_special_tokens=True) + "\n"


def test_generate_prints_one_json_object(tiny: Path) -> None:
    options = ("--plan", "fifo:64", "--max-new-tokens", 4, "--json")
    answer = json.loads(called("generate", tiny, "--prompt", "a" * 200, *options))
    assert answer["plan"] == "fifo:64"
    assert answer["tokens"] == 4
    assert answer["prompt_tokens"] == 200
    assert answer["report"]["tokens_kept"] == 64
    assert answer["seconds"] > 0


def test_generate_reads_a_file_and_standard_input_alike(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("The same words")
    options = ("generate", tiny, "--max-new-tokens", 3)
    assert called(*options, "--file", file) == called(*options, given="The same words")


def test_generate_reports_the_cache(tiny: Path) -> None:
    text = called("generate", tiny, "--prompt", "Hi", "--max-new-tokens", 2, "--plan", "int4", "--report")
    assert "KV cache, plan int4" in text
    assert "% of the default cache" in text


def test_generate_warns_of_a_plan_that_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("layers: [{layers: 7, form: {kind: rotated, bits: 4}}]")
    result = call("generate", tiny, "--prompt", "Hi", "--max-new-tokens", 2, "--plan", plan)
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: plan 'plan' changes no layer")


def test_only_a_plan_that_renumbers_may_go_beyond_the_positions(tiny: Path) -> None:
    long = "a" * (LIMIT + 1)
    line = refused("generate", tiny, "--prompt", long)
    assert "769 tokens" in line
    assert "positions for 768" in line
    answer = json.loads(
        called("generate", tiny, "--prompt", long, "--plan", "streaming:64", "--max-new-tokens", 2, "--json")
    )
    assert answer["prompt_tokens"] == LIMIT + 1
    assert not renumbers(Plan.preset("fifo:64"), tiny_config())


# Wrong inputs


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("snapkvv:25%", "unknown preset 'snapkvv:25%'"),
        ("h2o:0", "budget '0'"),
        ("h2o:-5", "budget '-5'"),
        ("snapkv:20", "budget 20 is below the protected tokens"),
        ("int4:25%", "int4 takes no budget"),
        ("nowhere.yaml", "plan file nowhere.yaml cannot be read"),
    ],
)
def test_a_wrong_plan_is_named(tiny: Path, plan: str, words: str) -> None:
    assert words in refused("generate", tiny, "--prompt", "Hi", "--plan", plan)
    assert words in refused("doctor", tiny, "--plan", plan)


def test_a_budget_in_bytes_below_the_protected_tokens_is_named(tiny: Path) -> None:
    assert "budget 1KiB holds" in refused("doctor", tiny, "--plan", "snapkv:1KiB")


def test_unknown_models_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "is_hub_reachable", lambda name: False)
    for command in (("generate", "--prompt", "Hi"), ("doctor",)):
        assert "'no/such/model/here'" in refused(command[0], "no/such/model/here", *command[1:])
        assert "'nobody/has-this'" in refused(command[0], "nobody/has-this", *command[1:])
        assert f"{tmp_path}: a folder without config.json" in refused(command[0], tmp_path, *command[1:])


def test_a_truncated_gguf_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (10).to_bytes(8, "little") + (20).to_bytes(8, "little"))
    for command in (("generate", "--prompt", "Hi"), ("doctor",)):
        line = refused(command[0], file, *command[1:])
        assert "cut.gguf: 24 bytes" in line
        assert "cut short" in line


def test_prompts_that_cannot_be_used_are_named(tiny: Path, tmp_path: Path) -> None:
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_text(" \n")
    latin.write_bytes(b"caf\xe9")
    assert "the prompt is empty (--prompt '')" in refused("generate", tiny, "--prompt", "")
    assert "empty.txt" in refused("generate", tiny, "--file", empty)
    assert "the prompt is empty (standard input)" in refused("generate", tiny, given="")
    assert "missing.txt' cannot be read: No such file" in refused("generate", tiny, "--file", tmp_path / "missing.txt")
    assert "latin.txt' is not UTF-8" in refused("generate", tiny, "--file", latin)
    assert "allowed is one of them" in refused("generate", tiny, "--prompt", "Hi", "--file", empty)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dtype", "int7"), "--dtype 'int7' is not offered: allowed are float32, bfloat16, float16"),
        (("--max-new-tokens", 0), "'--max-new-tokens': '0' cannot be used: allowed are whole numbers from 1"),
        (("--chat",), "has no chat template"),
        (("--device", "moon"), "'moon'"),
        (("--bogus",), "--bogus"),
        (("--max-new-tokens", "many"), "'many'"),
    ],
)
def test_wrong_options_are_named(tiny: Path, options: tuple[object, ...], words: str) -> None:
    assert words in refused("generate", tiny, "--prompt", "Hi", *options)


def test_unknown_kernels_are_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTAILOR_KERNELS", "foo")
    for command in (("generate", tiny, "--prompt", "Hi"), ("doctor",), ("demo", "--model", tiny)):
        assert refused(*command) == (
            "KVTAILOR_KERNELS is 'foo': allowed are auto, reference, plain, avx2, avx512, triton"
        )


def test_wrong_demos_are_named(tiny: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    to_folder = ("demo", "--model", tiny, "--out", tmp_path)
    assert "--out" in refused("demo", "--model", tiny, "--out", blocked)
    assert "'--tokens': '-1' cannot be used" in refused(*to_folder, "--tokens", -1)
    assert "--tokens 5 leaves no room" in refused(*to_folder, "--tokens", 5)
    assert "--tokens 999999 is beyond the 768 positions" in refused(*to_folder, "--tokens", 999_999)
    assert "unknown preset 'nope'" in refused(*to_folder, "--plan", "nope")


def test_with_json_a_failure_is_one_json_object_too() -> None:
    result = call("doctor", "--plan", "nope", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"] in result.stderr


def test_exit_codes_tell_whose_the_failure_is() -> None:
    assert describe(KVTailorError("budget\n 0")) == (2, "budget 0")
    assert describe(KeyboardInterrupt())[0] == 130
    assert describe(RuntimeError("disk\nfull")) == (1, "RuntimeError: disk full")


def test_other_failures_are_one_line_and_show_a_traceback_only_with_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("kvtailor.cli.presets.names", broken)
    result = call("presets")
    assert (result.exit_code, result.stderr) == (1, "error: RuntimeError: no such luck\n")
    assert isinstance(call("--debug", "presets").exception, RuntimeError)


def test_an_interrupt_leaves_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtailor.cli.presets.names", interrupted)
    assert call("presets").exit_code == 130


def test_a_process_shows_no_traceback() -> None:
    command = [sys.executable, "-m", "kvtailor.cli.main", "generate", "--prompt", ""]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "80"})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


# The estimate


@pytest.mark.parametrize("tokens", [40, 333, 700])
@pytest.mark.parametrize(
    "plan", ["full", "int4", "int1", "snapkv:25%", "fifo:64", "h2o:30%", "adakv:50%", "snapkv:256KiB", "streaming:25%"]
)
def test_the_estimate_is_what_a_real_cache_reports(plan: str, tokens: int) -> None:
    """Within 5 %; all but uneven heads are exact, so most of it is for them."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config()).eval()
    with torch.no_grad(), kvtailor.attach(model, plan) as attachment:
        cache = attachment.new_cache()
        attachment.model(torch.randint(0, 256, (1, tokens)), **{CACHE: cache})
    held, found = cache.report(), estimate(tiny_config(), Plan.preset(plan), tokens)
    assert found.bytes_default == held.bytes_default
    assert found.bytes_held == pytest.approx(held.bytes_held, rel=0.05)
    assert [layer.tokens_kept for layer in found.layers] == pytest.approx([layer.tokens_kept for layer in held.layers])


def test_the_estimate_counts_an_evicted_and_packed_layer() -> None:
    torch.manual_seed(0)
    entry = {"keep": {"policy": "h2o", "budget": "50%"}, "form": {"kind": "rotated", "bits": 4}}
    model, plan = LlamaForCausalLM(tiny_config()).eval(), Plan(layers=[entry])
    with torch.no_grad(), kvtailor.attach(model, plan) as attachment:
        cache = attachment.new_cache()
        attachment.model(torch.randint(0, 256, (1, 700)), **{CACHE: cache})
    assert estimate(tiny_config(), plan, 700).bytes_held == pytest.approx(cache.report().bytes_held, rel=0.05)


def test_the_length_limit_is_that_of_the_decoder() -> None:
    assert length_limit(tiny_config()) == LIMIT


# The demo


@pytest.fixture(scope="module")
def tiny_loaded(tiny: Path) -> Loaded:
    return load(tiny)


def test_the_demo_measures_every_plan_against_the_default_cache(tiny_loaded: Loaded, tmp_path: Path) -> None:
    seen: list[str] = []
    demo = run(tiny_loaded, 700, 5, plans=("full", "fifo:64"), curves=False, progress=seen.append)
    assert seen == [row.plan for row in demo.rows] == ["default", "full", "fifo:64"]
    assert len(seen) == plan_count(("full", "fifo:64"), curves=False)
    default, full, fifo = demo.rows
    assert default.bytes_held == 2 * 2 * 2 * 32 * 4 * (demo.prompt_tokens + 5)
    assert (full.agreement, full.is_same, full.answer) == (1.0, True, default.answer)
    assert fifo.bytes_held < default.bytes_held
    assert draw(demo, tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_command_draws_and_prints(tiny: Path, tmp_path: Path) -> None:
    options = ("--model", tiny, "--tokens", 600, "--new-tokens", 3, "--no-curves", "--out", tmp_path)
    text = called("demo", *options, "--plan", "int8")
    assert "int8" in text
    assert (tmp_path / "demo.png").is_file()
    found = json.loads(called("demo", *options, "--plan", "fifo:64", "--json"))
    assert [row["plan"] for row in found["rows"]] == ["default", "fifo:64"]
    assert found["plot"] == str(tmp_path / "demo.png")


def test_the_curves_are_drawn(tiny_loaded: Loaded, tmp_path: Path) -> None:
    demo = run(tiny_loaded, 600, 2, plans=("full",))
    assert {family: len(points) for family, points in demo.curves.items()} == {
        "snapkv": len(SHARES),
        "h2o": len(SHARES),
        "streaming": len(SHARES),
        "packed": 5,
    }
    assert [point.plan for point in demo.curves["h2o"]] == list(curve_plans()["h2o"])
    assert draw(demo, tmp_path / "demo.png").stat().st_size > 10_000


def test_the_demo_prompt_ends_with_the_question_and_fits(tiny_loaded: Loaded) -> None:
    ids = question_prompt(tiny_loaded, 700)
    assert 200 < ids.shape[1] <= 700
    assert tiny_loaded.tokenizer.decode(ids[0]).endswith("that has not been bound?")


def test_the_default_cache_in_the_demo_counts_keys_and_values(tiny_loaded: Loaded) -> None:
    runner = Runner(tiny_loaded, torch.arange(9)[None], 3)
    measured, continuation = runner.default()
    assert len(continuation) == 3
    assert measured.bytes_held == 2 * 2 * 2 * 32 * 4 * 12
    assert stock_bytes(DynamicCache()) == 0


def test_line_ends_of_a_pipe_are_no_part_of_a_chat_message():
    from types import SimpleNamespace

    from kvtailor.cli.generate import encode

    said = []

    class Tokenizer:
        chat_template = "any"

        def apply_chat_template(self, messages, **settings):
            said.append(messages[0]["content"])
            return "text"

        def __call__(self, text, **settings):
            return {
                "input_ids": torch.ones(1, 3, dtype=torch.long),
                "attention_mask": torch.ones(1, 3, dtype=torch.long),
            }

    loaded = SimpleNamespace(name="tiny", tokenizer=Tokenizer(), model=SimpleNamespace(device="cpu"))
    encode(loaded, "\nWhat?\n", chat=None)
    assert said == ["What?"]
