"""Reading Whisper models in the CTranslate2 format, version 6, into transformers' Whisper."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtailor.errors import ModelError
from kvtailor.models.cursor import Cursor, CutShortError
from kvtailor.models.weights import assign_weights

FORMAT_VERSION = 6
SPECIFICATION = "WhisperSpec"
DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}

TIMESTAMP = re.compile(r"<\|\d+\.\d+\|>")

Arrays = dict[str, np.ndarray[Any, Any]]


def read_model_bin(path: str | os.PathLike[str]) -> Arrays:
    """Read every array of a CTranslate2 ``model.bin``.

    Parameters
    ----------
    path
        The file, of a Whisper model in format version 6.

    Returns
    -------
    dict
        Name to array; the arrays are views of a read-only map of the file.

    Raises
    ------
    ModelError
        The file is missing, holds another model or version, or is cut short.
    """
    file = Path(path)
    if not file.is_file():
        raise ModelError(f"{file}: no such file")
    size = file.stat().st_size
    if size == 0:
        raise ModelError(f"{file}: an empty file")
    cursor = Cursor(np.memmap(file, dtype=np.uint8, mode="r"))
    try:
        version, specification = cursor.number("I"), _text(cursor)
        if version != FORMAT_VERSION or specification != SPECIFICATION:
            raise ModelError(
                f"{file}: holds {specification!r} in format version {version}, "
                f"allowed is {SPECIFICATION!r} in version {FORMAT_VERSION}"
            )
        cursor.number("I")  # the specification's revision
        return dict(_array(cursor) for _ in range(cursor.number("I")))
    except CutShortError as error:
        raise ModelError(
            f"{file}: {size:,} bytes, its header asks for at least {error.needed:,}: the file is cut short"
        ) from error
    except (ValueError, KeyError) as error:
        raise ModelError(f"{file}: not a CTranslate2 model: {error}") from error


def _text(cursor: Cursor) -> str:
    return cursor.text("H").rstrip("\0")


def _array(cursor: Cursor) -> tuple[str, np.ndarray[Any, Any]]:
    name = _text(cursor)
    shape = [cursor.number("I") for _ in range(cursor.number("B"))]
    dtype = np.dtype(DTYPES[cursor.number("B")])
    nbytes = cursor.number("I")
    if nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {nbytes} bytes for shape {shape} of {dtype}")
    return name, np.frombuffer(cursor.take(nbytes), dtype).reshape(shape)


def load_ctranslate2_whisper(
    folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32
) -> tuple[Any, Any, Any]:
    """Load a Whisper model from a CTranslate2 folder.

    Parameters
    ----------
    folder
        Holds ``model.bin``, ``config.json`` and ``tokenizer.json``.
    dtype
        Of the weights.

    Returns
    -------
    tuple
        The model in evaluation mode on the CPU, its tokenizer and its feature extractor.

    Raises
    ------
    ModelError
        A file is missing, cut short or unreadable, or the weights are not a Whisper model's.
    """
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    folder = Path(folder)
    arrays = read_model_bin(folder / "model.bin")
    settings, tokens = _read_json(folder / "config.json"), _read_json(folder / "tokenizer.json")
    try:
        state = {name: weight.to(dtype) for name, weight in WhisperWeights(arrays).state().items()}
        token_ids = {token["content"]: int(token["id"]) for token in tokens["added_tokens"]}
        config = whisper_config(arrays, token_ids)
        tokenizer = whisper_tokenizer(tokens)
        generation = whisper_generation_config(settings, token_ids, config)
    except KeyError as error:
        raise ModelError(f"{folder}: not a CTranslate2 Whisper model: {error} is missing") from error
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(config)
    assign_weights(model, state, tied="proj_out.weight", source=folder)
    model.config.dtype = dtype
    model.generation_config = generation
    return model.eval(), tokenizer, WhisperFeatureExtractor(feature_size=config.num_mel_bins)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds a {type(content).__name__}, allowed is an object")
    return content


@dataclass(frozen=True)
class WhisperWeights:
    """CTranslate2's arrays under transformers' names.

    CTranslate2 fuses query, key and value of self-attention into one projection, and key and value of
    cross-attention into another; here they are cut apart again by rows.

    Parameters
    ----------
    arrays
        As :func:`read_model_bin` gives them.
    """

    arrays: Arrays

    @property
    def width(self) -> int:
        """The model's hidden size."""
        return int(self.arrays["encoder/conv1/weight"].shape[0])

    def layers(self, side: str) -> int:
        """Count the layers of the ``encoder`` or the ``decoder``."""
        return len(
            {name.split("/")[1] for name in self.arrays if name.startswith(f"{side}/layer_") and "/ffn/" in name}
        )

    def state(self) -> dict[str, Tensor]:
        """Give every weight, float32."""
        state: dict[str, Tensor] = {}
        for conv in ("conv1", "conv2"):
            state |= self._linear(f"model.encoder.{conv}", f"encoder/{conv}")
        for side in ("encoder", "decoder"):
            positions = f"{side}/position_encodings/encodings"
            state[f"model.{side}.embed_positions.weight"] = self._tensor(positions)
            state |= self._norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
            for layer in range(self.layers(side)):
                state |= self._layer(f"model.{side}.layers.{layer}", f"{side}/layer_{layer}", side == "decoder")
        return state | {"model.decoder.embed_tokens.weight": self._tensor("decoder/embeddings/weight")}

    def _layer(self, target: str, source: str, crosses: bool) -> dict[str, Tensor]:
        state = self._attention(f"{target}.self_attn", f"{source}/self_attention", fused="qkv")
        if crosses:
            state |= self._attention(f"{target}.encoder_attn", f"{source}/attention", fused="kv")
        state |= self._linear(f"{target}.fc1", f"{source}/ffn/linear_0")
        state |= self._linear(f"{target}.fc2", f"{source}/ffn/linear_1")
        return state | self._norm(f"{target}.final_layer_norm", f"{source}/ffn/layer_norm")

    def _attention(self, target: str, source: str, fused: str) -> dict[str, Tensor]:
        state = self._norm(f"{target}_layer_norm", f"{source}/layer_norm")
        linears = [fused, "out"] if fused == "qkv" else ["q", fused, "out"]
        for number, parts in enumerate(linears):
            for row, part in enumerate([parts] if parts == "out" else parts):
                rows = slice(row * self.width, (row + 1) * self.width)
                linear = self._linear(f"{target}.{part}_proj", f"{source}/linear_{number}", rows)
                # Whisper's key projection has no bias; the fused one holds zeros in its place.
                state |= {name: value for name, value in linear.items() if not name.endswith("k_proj.bias")}
        return state

    def _norm(self, target: str, source: str) -> dict[str, Tensor]:
        return {f"{target}.weight": self._tensor(f"{source}/gamma"), f"{target}.bias": self._tensor(f"{source}/beta")}

    def _linear(self, target: str, source: str, rows: slice | None = None) -> dict[str, Tensor]:
        weight = self._tensor(f"{source}/weight", rows)
        if f"{source}/weight_scale" in self.arrays:  # int8 rows, one scale each
            weight = weight / self._tensor(f"{source}/weight_scale", rows).reshape(-1, *[1] * (weight.ndim - 1))
        return {f"{target}.weight": weight, f"{target}.bias": self._tensor(f"{source}/bias", rows)}

    def _tensor(self, name: str, rows: slice | None = None) -> Tensor:
        array = self.arrays[name]
        # The rows are cut before the copy, so that no two weights share memory.
        return torch.from_numpy((array if rows is None else array[rows]).astype(np.float32))


def whisper_config(arrays: Arrays, token_ids: dict[str, int]) -> Any:
    """Derive a ``WhisperConfig`` from the arrays' shapes and the special tokens' ids."""
    from transformers import WhisperConfig

    weights = WhisperWeights(arrays)
    heads, end = int(arrays["decoder/num_heads"]), token_ids["<|endoftext|>"]
    return WhisperConfig(
        vocab_size=arrays["decoder/embeddings/weight"].shape[0],
        num_mel_bins=arrays["encoder/conv1/weight"].shape[1],
        d_model=weights.width,
        encoder_layers=weights.layers("encoder"),
        decoder_layers=weights.layers("decoder"),
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=arrays["encoder/layer_0/ffn/linear_0/weight"].shape[0],
        decoder_ffn_dim=arrays["decoder/layer_0/ffn/linear_0/weight"].shape[0],
        max_source_positions=arrays["encoder/position_encodings/encodings"].shape[0],
        max_target_positions=arrays["decoder/position_encodings/encodings"].shape[0],
        decoder_start_token_id=token_ids["<|startoftranscript|>"],
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        tie_word_embeddings=True,
    )


def whisper_tokenizer(content: dict[str, Any]) -> Any:
    """Build a ``WhisperTokenizer`` from the content of a ``tokenizer.json``."""
    from tokenizers import AddedToken
    from transformers import WhisperTokenizer

    model = content["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    tokenizer = WhisperTokenizer(vocab=model["vocab"], merges=merges, pad_token="<|endoftext|>")
    # Timestamps stand behind the last special token, and are no special tokens themselves.
    special = [token for token in content["added_tokens"] if not TIMESTAMP.fullmatch(token["content"])]
    added = [AddedToken(token["content"], special=True, normalized=False) for token in special]
    tokenizer.add_special_tokens({"extra_special_tokens": added})
    for token in special:
        if tokenizer.convert_tokens_to_ids(token["content"]) != token["id"]:
            raise ModelError(f"tokenizer.json: the special token {token['content']!r} cannot keep its id {token['id']}")
    tokenizer.set_prefix_tokens()
    return tokenizer


def whisper_generation_config(settings: dict[str, Any], token_ids: dict[str, int], config: Any) -> Any:
    """Derive a ``GenerationConfig`` from CTranslate2's ``config.json`` and the special tokens' ids."""
    from transformers import GenerationConfig

    languages = {token: number for token, number in token_ids.items() if number in set(settings["lang_ids"])}
    values: dict[str, Any] = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "decoder_start_token_id": config.decoder_start_token_id,
        "max_length": config.max_target_positions,
        "suppress_tokens": settings["suppress_ids"],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
        "alignment_heads": settings["alignment_heads"],
        "no_timestamps_token_id": token_ids["<|notimestamps|>"],
        "prev_sot_token_id": token_ids["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "is_multilingual": config.vocab_size >= 51_865,
        "return_timestamps": False,
    }
    if values["is_multilingual"]:
        values["lang_to_id"] = languages
        values["task_to_id"] = {task: token_ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    return GenerationConfig(**values)
