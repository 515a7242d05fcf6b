"""The benchmark: what its rows hold, that its caches are the ones a prompt would leave, and that wrong inputs are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvtailor import KVCache, attach
from kvtailor.bench.kernels import kernels_at, path_for
from kvtailor.bench.layer import Layer, whole_form
from kvtailor.bench.peers import PeerRow, read_peers
from kvtailor.bench.result import Bench, StepRow
from kvtailor.bench.steps import TEXT_TOKENS, Stepper
from kvtailor.bench.table import as_markdown
from kvtailor.bench.timing import Candidate, Timed, in_turns
from kvtailor.cli.main import app
from kvtailor.errors import KVTailorError
from kvtailor.kernels import choice
from kvtailor.models.load import load
from kvtailor.plan import Plan
from kvtailor.quantize.pack import unpack

LIMIT = 768
PEER = {"engine": "other", "weights": "8-bit", "cache": "4-bit", "context": 64, "threads": 1, "ms": 2.5, "cpu_ms": 2.0}
KERNEL_FIELDS = {
    "kernel", "form", "precision", "case", "tokens", "threads", "ms", "cpu_ms", "speedup", "speedup_gqa", "gbytes_per_s",
}  # fmt: skip
STEP_FIELDS = {"plan", "context", "threads", "ms", "cpu_ms", "speedup", "added_ms_per_1k", "agrees"}
PACKED = {"int8", "int4", "int3", "int2", "int1"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama and a tokenizer of a few words."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LIMIT,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = ["<unk>", "the", "a", "of", "is", "in", "to", "and", "name", "names", ".", ",", "block", "value"]
    known = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=known, unk_token="<unk>").save_pretrained(folder)
    return folder


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)], prog_name="kvtailor")


def printed(*arguments: object) -> str:
    """Standard output of a benchmark that must succeed."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    """The one line of a benchmark that must refuse its input, without "error: "."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line.removeprefix("error: ")


def peers_file(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "peers.json"
    file.write_text(json.dumps(rows))
    return file


# What is measured


def test_kernels_are_compared_with_sdpa_at_each_length() -> None:
    """One object with every kernel at every length; other dtypes, cases and packing at the first alone."""
    found = json.loads(
        printed("--json", "--kernels-only", "--tokens", 130, "--tokens", 64, "--repeats", 1, "--threads", 1)
    )
    rows = found["kernels"]
    assert found["steps"] == []
    assert all(set(row) == KERNEL_FIELDS and row["threads"] == 1 and row["ms"] > 0 for row in rows)
    for tokens in (130, 64):
        here = [row for row in rows if row["tokens"] == tokens]
        assert {"sdpa", "dense", *PACKED} <= {row["kernel"] for row in here}
        best, usual = here[:2]
        assert (best["form"], best["speedup"], usual["form"], usual["speedup_gqa"]) == (
            "grouped",
            1.0,
            "enable_gqa",
            1.0,
        )
        assert all(
            (row["speedup"] is None) == (row["kernel"] in ("pack", "score", "combine", "top-k", "gather"))
            for row in here
        )
    first = [row for row in rows if row["tokens"] == 130]
    assert {row["precision"] for row in first if row["kernel"] == "dense"} == {"bfloat16", "float16", "float32"}
    assert {"plain", "mask", "sinks"} <= {row["case"] for row in first if row["kernel"] == "int4"}
    assert len([row for row in first if row["kernel"] == "pack"]) == 6
    assert {row["case"] for row in rows if row["tokens"] == 64} == {"plain"}


def test_the_machine_and_the_kernels_that_ran_are_told() -> None:
    machine = json.loads(printed("--json", "--kernels-only", "--tokens", 64, "--repeats", 1, "--threads", 1))["machine"]
    assert {"processor", "instruction_sets", "kernels", "cores", "versions", "date"} <= set(machine)
    assert machine["kernels"] == choice.active()


def test_the_reference_kernels_are_measured_too(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    """Without compiled kernels all but retrieval runs, and steps agree with the reference to the bit."""
    monkeypatch.setenv(choice.VARIABLE, "reference")
    options = (
        "--json",
        "--model",
        tiny,
        "--tokens",
        64,
        "--context",
        64,
        "--plan",
        "int4",
        "--repeats",
        1,
        "--threads",
        1,
    )
    found = json.loads(printed(*options))
    kernels = {row["kernel"] for row in found["kernels"]}
    assert kernels >= PACKED and "retrieve" not in kernels
    assert "Retrieval is not measured: the reference kernels have none" in found["notes"]
    assert [row["agrees"] for row in found["steps"] if row["plan"] == "int4"] == [0.0]


def test_steps_are_compared_with_the_default_cache_at_each_length(tiny: Path, tmp_path: Path) -> None:
    peers = peers_file(tmp_path, PEER)
    options = ("--context", 400, "--context", 20, "--plan", "int4", "--plan", "fifo:64", "--repeats", 1, "--threads", 1)
    found = json.loads(
        printed("--json", "--steps-only", "--model", tiny, "--dtype", "float32", "--peers", peers, *options)
    )
    assert found["kernels"] == []
    assert found["peers"] == [PEER]
    rows = [row for row in found["steps"] if "-bit" not in row["plan"]]
    assert all(set(row) == STEP_FIELDS and row["ms"] > 0 and row["speedup"] > 0 for row in rows)
    assert [(row["context"], row["plan"]) for row in rows] == [
        (context, plan) for context in (20, 400) for plan in ("default", "int4", "fifo:64")
    ]
    assert all((row["added_ms_per_1k"] is None) == (row["context"] == 20) for row in rows)
    assert all(row["agrees"] is None if row["plan"] == "default" else row["agrees"] < 0.01 for row in rows)
    assert rows[0]["speedup"] == rows[3]["speedup"] == 1.0
    packages = [
        package
        for package in ("hqq", "optimum-quanto")
        if any(f"package {package} " in note for note in found["notes"])
    ]
    assert len(packages) + len({row["plan"] for row in found["steps"] if "-bit" in row["plan"]}) == 2


def test_tables_and_files_hold_kernels_steps_and_other_engines(tiny: Path, tmp_path: Path) -> None:
    peers, out = peers_file(tmp_path, PEER, PEER | {"context": 128, "cpu_ms": None}), tmp_path / "out"
    options = (
        "--tokens",
        64,
        "--context",
        64,
        "--plan",
        "int4",
        "--repeats",
        1,
        "--threads",
        1,
        "--peers",
        peers,
        "--out",
        out,
    )
    text = printed("--model", tiny, *options)
    for word in ("Kernels, 64 tokens", "Decode steps, 1 thread", "grouped, bfloat16", "other", "int4", "at 128"):
        assert word in text
    found = json.loads((out / "bench.json").read_text())
    assert [row["plan"] for row in found["steps"] if "-bit" not in row["plan"]] == ["default", "int4"]
    assert "| other | 8-bit | 4-bit |" in (out / "bench.md").read_text()
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_quick_run_of_the_embedded_model() -> None:
    options = ("--tokens", 256, "--context", 64, "--plan", "int4", "--repeats", 1, "--threads", 1)
    found = json.loads(printed("--json", *options))
    (step,) = [row for row in found["steps"] if row["plan"] == "int4"]
    assert (found["model"], found["dtype"], step["context"]) == ("smollm2", "bfloat16", 64)
    assert step["agrees"] < 0.1


# How


def test_every_candidate_runs_once_in_each_round() -> None:
    """One round to warm up, then the rounds that count; other memory is read before each; threads are restored."""
    calls: list[tuple[str, int]] = []
    before = torch.get_num_threads()
    candidates = [Candidate(lambda name=name: calls.append((name, torch.get_num_threads()))) for name in "abc"]
    timed = in_turns(candidates, 2, 1, lambda: calls.append(("sweep", torch.get_num_threads())))
    assert calls == [(name, 1) for _ in range(3) for candidate in "abc" for name in ("sweep", candidate)]
    assert len(timed) == 3 and torch.get_num_threads() == before


@pytest.mark.parametrize("threads", [1, 2])
def test_ratios_are_of_processor_time_at_one_thread_and_of_wall_time_at_more(threads: int) -> None:
    base, other = Timed(8.0, 6.0, threads), Timed(2.0, 1.0, threads)
    assert other.speedup(base) == (6.0 if threads == 1 else 4.0)
    assert other.speedup(None) is None


def test_prompts_are_read_with_each_plan_and_compared_with_the_default_cache(tiny: Path) -> None:
    options = ("--steps-only", "--context", 8, "--prompt", 300, "--plan", "full", "--plan", "fifo:64", "--repeats", 1)
    rows = json.loads(printed("--json", "--model", tiny, "--threads", 1, *options))["prompts"]
    assert [(row["plan"], row["tokens"], row["threads"]) for row in rows] == [
        (name, 300, 1) for name in ("default", "full", "fifo:64")
    ]
    assert rows[0]["over_default"] == 1.0 and all(row["over_default"] > 0 and row["ms"] > 0 for row in rows)
    assert "Prompts, 300 tokens" in printed("--model", tiny, "--threads", 1, *options)


@pytest.mark.parametrize("tokens", [1, 100, 128, 300])
def test_packed_and_dense_layers_hold_the_same_tokens(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr("kvtailor.bench.layer.RANDOM_TOKENS", 128)
    layer = Layer(tokens, path_for(torch.float32))
    for dense, codes in zip(
        layer.dense(torch.float32), layer.packed(whole_form("rotated", 8), torch.float32), strict=True
    ):
        assert codes.length == tokens
        assert float((unpack(codes) - dense).norm() / dense.norm()) < 0.01


@pytest.mark.parametrize("tokens", [70, 200])
def test_what_is_timed_is_attention(tokens: int) -> None:
    """Plain or masked, dense kernels answer as SDPA does, 8 bits nearly so, and retrieval of all tokens as dense ones."""
    kernels = [kernel for kernel in kernels_at(tokens, torch.float32, everything=True) if kernel.does == "attention"]
    answers = {(k.kernel, k.form, k.precision, k.case): k.candidate.call().float().flatten() for k in kernels}
    exact = {
        "plain": answers["sdpa", "grouped", "float32", "plain"],
        "mask": answers["sdpa", "grouped", "bfloat16", "mask"],
    }
    for (kernel, _, precision, case), answer in answers.items():
        assert bool(answer.isfinite().all())
        if case in exact and kernel in ("sdpa", "dense", "int8", "retrieve"):
            half = case == "mask" or precision in ("bfloat16", "float16")
            error = float((answer - exact[case]).norm() / exact[case].norm())
            assert error < (0.03 if half or kernel == "int8" else 1e-5)


@pytest.mark.parametrize("plan", ["full", "int8", "int1", "fifo:64"])
def test_a_filled_cache_answers_as_after_its_prompt(tiny: Path, plan: str) -> None:
    """For plans that do not look at queries, which are random here."""
    loaded, context = load(tiny), TEXT_TOKENS - 1
    stepper = Stepper(loaded)
    (*_, filled), _ = stepper.fill(context, [Plan.of(plan)])
    cache = KVCache(loaded.model, plan)
    with attach(loaded.model, plan):
        loaded.model(stepper.ids[:, :context], **{stepper.cache_argument: cache})
        stepper.step(stepper.model, cache)  # filling took a step to compare
        assert torch.allclose(stepper.step(stepper.model, filled.cache), stepper.step(stepper.model, cache), atol=1e-4)


@pytest.mark.parametrize("plan", ["h2o:64", "snapkv:64", "adakv:25%", "fifo:32KiB", "int4"])
def test_a_filled_cache_holds_what_a_prompt_leaves(tiny: Path, plan: str) -> None:
    loaded, context = load(tiny), TEXT_TOKENS - 1
    stepper = Stepper(loaded)
    (*_, filled), _ = stepper.fill(context, [Plan.of(plan)])
    cache = KVCache(loaded.model, plan)
    with attach(loaded.model, plan):
        loaded.model(stepper.ids[:, :context], **{stepper.cache_argument: cache})
        stepper.step(stepper.model, cache)
    held, expected = filled.cache.report(), cache.report()
    assert (held.tokens_seen, held.tokens_kept, held.bytes_held) == (
        context + 1,
        expected.tokens_kept,
        expected.bytes_held,
    )


# Wrong inputs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--plan", "nope"), "unknown preset 'nope'"),
        (("--tokens", 0), "'--tokens': '0' cannot be used: allowed are whole numbers from 1"),
        (("--context", -1), "'--context': '-1' cannot be used"),
        (("--context", "many"), "'many' cannot be used"),
        (("--repeats", 0), "'--repeats': '0' cannot be used"),
        (("--threads", 0), "'--threads': '0' cannot be used"),
        (("--threads", 100_000), "--threads 100000 is more than the cores that this process may use: allowed are 1 to"),
        (("--dtype", "int7"), "--dtype 'int7' is not offered: allowed are float32, bfloat16, float16"),
        (("--kernels-only", "--steps-only"), "leave nothing to measure"),
        (("--peers", "nowhere.json"), "peers file 'nowhere.json' cannot be read: No such file"),
        (("--model", "no/such/model/here"), "'no/such/model/here'"),
    ],
)
def test_wrong_inputs_are_named(options: tuple[object, ...], words: str) -> None:
    assert words in refused(*options)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "--out" in refused("--out", blocked)


def test_more_tokens_than_positions_are_named(tiny: Path) -> None:
    line = refused("--steps-only", "--model", tiny, "--context", LIMIT, "--threads", 1, "--repeats", 1)
    assert "--context 768 and 3 steps are beyond the 768 positions" in line
    assert "allowed are 1 to 765" in line
    line = refused("--steps-only", "--model", tiny, "--context", 8, "--prompt", LIMIT + 1, "--threads", 1)
    assert "--prompt 769 is beyond the 768 positions" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Invalid JSON"),
        ("{}", "valid array"),
        ('["x"]', "[0]"),
        (json.dumps([PEER, {**PEER, "ms": -1}]), "[1].ms: Input should be greater than 0 (it held -1)"),
        (json.dumps([{**PEER, "speed": 1}]), "[0].speed"),
        (json.dumps([{name: value for name, value in PEER.items() if name != "engine"}]), "[0].engine: Field required"),
    ],
)
def test_wrong_peers_are_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "peers.json"
    file.write_text(text)
    with pytest.raises(KVTailorError) as raised:
        read_peers(file)
    assert str(file) in str(raised.value) and words in str(raised.value)
    assert "engine, weights, cache, context, threads, ms, cpu_ms" in str(raised.value)


def test_other_engines_stand_beside_the_default_cache() -> None:
    """Their speedups are over the default cache, of processor times at one thread where they are known."""
    default = StepRow("default", 64, 1, 8.0, 6.0, 1.0, None, None)
    unknown = PeerRow(**(PEER | {"engine": "unknown", "cpu_ms": None}))
    bench = Bench([], [default], [], [PeerRow(**PEER), unknown], "tiny", "float32", 1, {"cores": 2}, [])
    text = as_markdown(bench)
    assert "| other | 8-bit | 4-bit | 2.50 | 2.00 | 3.00x |" in text
    assert "| unknown | 8-bit | 4-bit | 2.50 | - | 3.20x |" in text
