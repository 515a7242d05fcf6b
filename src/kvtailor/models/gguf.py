"""Reading GGUF files: the header, and Llama models that are served without a converter.

The header is read here rather than with the ``gguf`` package's reader, because the message for a file that is cut short
needs the size the header asks for. The format is that of the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtailor.errors import ModelError
from kvtailor.models.cursor import Cursor, CutShortError
from kvtailor.models.weights import assign_weights

MAGIC = b"GGUF"
NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
CONTROL_TOKEN = 3

# llama.cpp's name of a layer's tensor -> the module in transformers' LlamaDecoderLayer.
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# Values of tokenizer.ggml.pre whose text is split here; the first group sets every digit apart.
DIGIT_SPLITTERS = frozenset({"smollm", "starcoder", "refact"})
PLAIN_SPLITTERS = frozenset({"gpt-2"})


@dataclass(frozen=True)
class TensorEntry:
    """What the header says of one tensor: torch-ordered shape, GGML type, first byte in the file and bytes."""

    name: str
    shape: tuple[int, ...]
    ggml_type: Any
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """A GGUF file's metadata and tensor table.

    Parameters
    ----------
    path
        The file.
    metadata
        Key to value, with the array values as lists.
    tensors
        The tensor table in the file's order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]

    @property
    def architecture(self) -> str:
        """The model family as llama.cpp names it."""
        return str(self.metadata.get("general.architecture", "unknown"))

    def hyper(self, key: str, default: Any = None) -> Any:
        """Give an architecture's own entry, such as ``attention.head_count``.

        Raises
        ------
        ModelError
            The entry is missing and has no default.
        """
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{self.path}: the GGUF header has no {self.architecture}.{key}")
        return value


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Read and check a GGUF header.

    Parameters
    ----------
    path
        A GGUF file, version 2 or 3, little-endian.

    Raises
    ------
    ModelError
        The file is missing, is no GGUF file, is cut short, or holds a type that is not known.
    """
    file = Path(path)
    if not file.is_file():
        raise ModelError(f"{file}: no such file")
    size = file.stat().st_size
    with file.open("rb") as opened:
        magic = opened.read(len(MAGIC))
    if magic != MAGIC:
        raise ModelError(f"{file}: not a GGUF file: it starts with {magic!r}, allowed is {MAGIC!r}")
    cursor = Cursor(np.memmap(file, dtype=np.uint8, mode="r"))
    try:
        metadata, tensors = _parse(cursor)
    except CutShortError as error:
        raise ModelError(_cut_short(file, size, f"at least {error.needed:,}")) from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ModelError(f"{file}: the GGUF header cannot be read: {error}") from error
    needed = max((tensor.start + tensor.nbytes for tensor in tensors), default=cursor.position)
    if needed > size:
        raise ModelError(_cut_short(file, size, f"{needed:,}"))
    return GgufHeader(file, metadata, tensors)


def _cut_short(file: Path, size: int, needed: str) -> str:
    return f"{file}: {size:,} bytes, its header asks for {needed}: the file is cut short"


def _parse(cursor: Cursor) -> tuple[dict[str, Any], tuple[TensorEntry, ...]]:
    cursor.take(len(MAGIC))
    version = cursor.number("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}, allowed are 2 and 3")
    tensor_count, entry_count = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(entry_count):
        key = cursor.text("Q")
        metadata[key] = _value(cursor, cursor.number("I"))
    table = [_tensor_line(cursor) for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", 32))
    data_start = -(-cursor.position // alignment) * alignment
    return metadata, tuple(_entry(*line, data_start=data_start) for line in table)


def _value(cursor: Cursor, kind: int) -> Any:
    if kind == STRING:
        return cursor.text("Q")
    if kind != ARRAY:
        return cursor.number(NUMBER_CODES[kind])
    item, count = cursor.number("I"), cursor.number("Q")
    if item in NUMBER_CODES:
        dtype = np.dtype("<" + NUMBER_CODES[item])
        return np.frombuffer(cursor.take(count * dtype.itemsize), dtype).tolist()
    return [_value(cursor, item) for _ in range(count)]


def _tensor_line(cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text("Q")
    dims = [cursor.number("Q") for _ in range(cursor.number("I"))]
    # GGML writes the fastest dimension first, torch last.
    return name, tuple(reversed(dims)), cursor.number("I"), cursor.number("Q")


def _entry(name: str, shape: tuple[int, ...], type_number: int, offset: int, data_start: int) -> TensorEntry:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    ggml_type = GGMLQuantizationType(type_number)
    block_items, block_bytes = GGML_QUANT_SIZES[ggml_type]
    return TensorEntry(name, shape, ggml_type, data_start + offset, math.prod(shape) // block_items * block_bytes)


def load_gguf(path: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Load a model and its tokenizer from a GGUF file.

    Llama models with a byte-level tokenizer are read here, with the same result on every version of transformers; any
    other model is handed to transformers' own GGUF reader.

    Parameters
    ----------
    path
        The file.
    dtype
        Of the weights, which are dequantised.

    Returns
    -------
    tuple
        The model in evaluation mode on the CPU, and the tokenizer.

    Raises
    ------
    ModelError
        The file is missing, is no GGUF file, is cut short, or holds a model that cannot be read.
    """
    header = read_header(path)
    if not is_read_here(header):
        return _load_with_transformers(header, dtype)
    model = load_llama(header, dtype)
    return model, byte_level_tokenizer(header, model.config.max_position_embeddings)


def is_read_here(header: GgufHeader) -> bool:
    """Tell whether :func:`load_llama` and :func:`byte_level_tokenizer` serve the file."""
    splitters = DIGIT_SPLITTERS | PLAIN_SPLITTERS
    return (
        header.architecture == "llama"
        and header.metadata.get("tokenizer.ggml.model") == "gpt2"
        and header.metadata.get("tokenizer.ggml.pre") in splitters
        and isinstance(header.hyper("attention.head_count"), int)
        and "llama.rope.scaling.type" not in header.metadata
        and all(_module_name(tensor.name) is not None for tensor in header.tensors)
    )


def _load_with_transformers(header: GgufHeader, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = str(header.path.parent), header.path.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
    except Exception as error:
        raise ModelError(
            f"{header.path}: transformers cannot read this GGUF file of architecture {header.architecture!r}: {error}"
        ) from error
    return model.eval(), tokenizer


def load_llama(header: GgufHeader, dtype: torch.dtype) -> Any:
    """Build a ``LlamaForCausalLM`` in evaluation mode from a checked header and the file's tensors.

    Raises
    ------
    ModelError
        The tensors are not those of the model that the header describes.
    """
    from transformers import GenerationConfig, LlamaForCausalLM

    config = llama_config(header)
    # On the meta device nothing is allocated or drawn at random; every parameter comes from the file.
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    state = {name: weight.to(dtype) for name, weight in llama_weights(header)}
    assign_weights(model, state, tied="lm_head.weight", source=header.path)
    model.config.dtype = dtype
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    return model.eval()


def llama_config(header: GgufHeader) -> Any:
    """Translate a header's entries into a ``LlamaConfig``."""
    from transformers import LlamaConfig

    heads, hidden = header.hyper("attention.head_count"), header.hyper("embedding_length")
    special: dict[str, Any] = {
        f"{name}_token_id": _token_id(header, key) for name, key in SPECIAL_TOKENS.items() if name != "unk"
    }
    return LlamaConfig(
        vocab_size=header.hyper("vocab_size", len(header.metadata["tokenizer.ggml.tokens"])),
        hidden_size=hidden,
        intermediate_size=header.hyper("feed_forward_length"),
        num_hidden_layers=header.hyper("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=header.hyper("attention.head_count_kv", heads),
        head_dim=header.hyper("attention.key_length", hidden // heads),
        max_position_embeddings=header.hyper("context_length"),
        rms_norm_eps=header.hyper("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": header.hyper("rope.freq_base", 10_000.0)},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in header.tensors),
        **special,
    )


SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def _token_id(header: GgufHeader, key: str) -> int | None:
    value = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return None if value is None else int(value)


def _module_name(tensor_name: str) -> str | None:
    """Translate ``blk.3.attn_q.weight`` into transformers' parameter name, or give None for an unknown tensor."""
    match tensor_name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_MODULES:
            return f"model.layers.{layer}.{LAYER_MODULES[part]}.weight"
        case [part, "weight"] if part in OUTER_MODULES:
            return f"{OUTER_MODULES[part]}.weight"
    return None


def llama_weights(header: GgufHeader) -> Iterator[tuple[str, Tensor]]:
    """Dequantise the file's tensors one by one, float32, under transformers' names."""
    heads = header.hyper("attention.head_count")
    rotated = {"attn_q": heads, "attn_k": header.hyper("attention.head_count_kv", heads)}
    data = np.memmap(header.path, dtype=np.uint8, mode="r")
    for tensor in header.tensors:
        weight = _dequantised(data, tensor)
        part = tensor.name.split(".")[-2]
        if part in rotated:
            weight = split_halves(weight, rotated[part])
        name = _module_name(tensor.name)
        assert name is not None
        yield name, weight


def _dequantised(data: np.ndarray[Any, Any], tensor: TensorEntry) -> Tensor:
    from gguf import dequantize, quant_shape_to_byte_shape

    rows = data[tensor.start : tensor.start + tensor.nbytes]
    rows = rows.reshape(quant_shape_to_byte_shape(tensor.shape, tensor.ggml_type))
    # An unquantised tensor is a view of the read-only map, and a parameter needs memory of its own.
    return torch.from_numpy(np.array(dequantize(rows, tensor.ggml_type), dtype=np.float32, copy=True))


def split_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder a query or key projection from interleaved rotary pairs to transformers' two halves.

    Parameters
    ----------
    weight
        (H·D, hidden), in each head the rows 2j and 2j+1 are rotated together.
    heads
        H.

    Returns
    -------
    Tensor
        (H·D, hidden), in each head the rows j and j + D/2 are rotated together.
    """
    pairs = weight.unflatten(0, (heads, -1, 2))  # (H, D/2, 2, hidden)
    return pairs.transpose(1, 2).reshape(weight.shape)


def byte_level_tokenizer(header: GgufHeader, model_max_length: int) -> Any:
    """Build the byte-level BPE tokenizer that a header holds, with its chat template.

    Raises
    ------
    ModelError
        The header's vocabulary or merges cannot make a tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = header.metadata
    try:
        tokens, kinds = entries["tokenizer.ggml.tokens"], entries["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ", 1)) for merge in entries["tokenizer.ggml.merges"]]
        backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    except Exception as error:
        raise ModelError(f"{header.path}: the tokenizer in the GGUF header cannot be built: {error}") from error
    splitters: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if entries["tokenizer.ggml.pre"] in DIGIT_SPLITTERS:
        splitters.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    ids = {name: _token_id(header, key) for name, key in SPECIAL_TOKENS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        chat_template=entries.get("tokenizer.chat_template"),
        **{f"{name}_token": tokens[token_id] for name, token_id in ids.items() if token_id is not None},
    )
