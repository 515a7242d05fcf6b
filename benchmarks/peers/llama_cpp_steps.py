"""Time the decode step of llama.cpp with each cache, at each context and number of threads."""

from __future__ import annotations

import ctypes
import logging
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import llama_cpp
import numpy as np
from peer_rows import POSITIONS, add_row, arguments, checked, prompt_ids, timed_steps

ENGINE = f"llama.cpp {version('llama-cpp-python')}"
F16, Q8_0, Q4_0 = llama_cpp.GGML_TYPE_F16, llama_cpp.GGML_TYPE_Q8_0, llama_cpp.GGML_TYPE_Q4_0


class Cache(NamedTuple):
    """How keys and values are stored, and whether attention is the fused one; it must be where values are quantised."""

    keys: int
    values: int
    flash: bool


CACHES = {
    "f16": Cache(F16, F16, flash=False),
    "f16 flash": Cache(F16, F16, flash=True),
    "q8_0 keys": Cache(Q8_0, F16, flash=False),
    "q8_0 flash": Cache(Q8_0, Q8_0, flash=True),
    "q4_0 flash": Cache(Q4_0, Q4_0, flash=True),
}


class Model:
    """The weights of a GGUF file."""

    def __init__(self, path: Path) -> None:
        self.pointer = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.pointer:
            raise SystemExit(f"{path} is no GGUF file that llama.cpp can load")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.pointer))

    def weights(self) -> str:
        """Give the type of the weights, which is the last word of the description, as in ``llama 135M Q4_1``."""
        text = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(self.pointer, text, len(text))
        return text.value.decode().split(" ", 2)[-1]


class Sequence:
    """One sequence of tokens with its cache."""

    def __init__(self, model: Model, cache: Cache, threads: int) -> None:
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = POSITIONS
        options.n_threads = options.n_threads_batch = threads
        options.type_k, options.type_v = cache.keys, cache.values
        flash, plain = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.flash_attn_type = flash if cache.flash else plain
        self.context = llama_cpp.llama_init_from_model(model.pointer, options)
        if not self.context:
            raise SystemExit(f"llama.cpp cannot make a context with {cache}")
        self.vocabulary = model.vocabulary
        self.longest_batch = llama_cpp.llama_n_batch(self.context)
        self.next = 0

    def fill(self, ids: list[int]) -> None:
        """Append tokens, in batches."""
        for start in range(0, len(ids), self.longest_batch):
            self.append(ids[start : start + self.longest_batch])

    def append(self, ids: list[int]) -> None:
        """Run tokens through the model; the most likely one after them is the next."""
        tokens = (llama_cpp.llama_token * len(ids))(*ids)  # a batch only points to it
        if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, len(ids))) != 0:
            raise SystemExit(f"llama.cpp cannot append {len(ids)} tokens")
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        self.next = int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def step(self) -> None:
        """Decode one token."""
        self.append([self.next])

    def cut(self, length: int) -> None:
        """Drop what stands after the first tokens."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, length, -1)

    def close(self) -> None:
        """Free the cache."""
        llama_cpp.llama_free(self.context)


def main() -> None:
    """Fill each cache once, from context to context, and time its steps at each with each number of threads."""
    parser = arguments(__doc__ or "", "a GGUF file of SmolLM2", CACHES)
    given = checked(parser)
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    model = Model(given.model)
    for name in given.caches:
        sequence = Sequence(model, CACHES[name], max(given.threads))
        held = 0
        for context in given.contexts:
            sequence.fill(prompt_ids(context)[held:])
            for threads in given.threads:
                llama_cpp.llama_set_n_threads(sequence.context, threads, max(given.threads))
                ms, cpu_ms = timed_steps(sequence.step, given.steps)
                sequence.cut(context)
                row = {"engine": ENGINE, "weights": model.weights(), "cache": name, "context": context}
                add_row(given.out, {**row, "threads": threads, "ms": ms, "cpu_ms": cpu_ms})
            held = context
        sequence.close()


if __name__ == "__main__":
    main()
