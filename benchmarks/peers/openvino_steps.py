"""Time the decode step of OpenVINO GenAI with each cache, at each context and number of threads."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openvino
from openvino_genai import (
    AggregationMode,
    CacheEvictionConfig,
    ContinuousBatchingPipeline,
    GenerationConfig,
    SchedulerConfig,
)
from peer_rows import WARM_UP, add_row, arguments, checked, prompt_ids, timed_steps

ENGINE = f"OpenVINO GenAI {version('openvino-genai')}"
POOL_GB = 1  # more than the cache of 8192 tokens takes in any of the types
FIRST_KEPT, RECENT_KEPT = 32, 128  # of the tokens that eviction leaves; blocks are of 32


class Cache(NamedTuple):
    """How keys and values are stored, and to how many tokens they are evicted (0: never)."""

    stored: openvino.Type
    tokens: int = 0


CACHES = {
    "f16": Cache(openvino.Type.f16),
    "u8": Cache(openvino.Type.u8),
    "u4": Cache(openvino.Type.u4),
    "f16 evicted to 1024": Cache(openvino.Type.f16, tokens=1024),
    "u8 evicted to 1024": Cache(openvino.Type.u8, tokens=1024),
}


def weights(folder: Path) -> str:
    """Give the type in which most bytes of the weights are stored."""
    stored: Counter[str] = Counter()
    for node in openvino.Core().read_model(folder / "openvino_model.xml").get_ops():
        if node.get_type_name() == "Constant":
            stored[node.get_element_type().get_type_name()] += node.get_byte_size()
    return stored.most_common(1)[0][0]


def pipeline(folder: Path, cache: Cache, threads: int) -> ContinuousBatchingPipeline:
    """Load the model with a cache of its own."""
    scheduler = SchedulerConfig()
    scheduler.cache_size = POOL_GB
    scheduler.enable_prefix_caching = False
    if cache.tokens:
        scheduler.use_cache_eviction = True
        scheduler.cache_eviction_config = CacheEvictionConfig(
            FIRST_KEPT, RECENT_KEPT, cache.tokens, AggregationMode.NORM_SUM
        )
    properties = {"KV_CACHE_PRECISION": cache.stored, "INFERENCE_NUM_THREADS": threads}
    return ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)


def timed_context(engine: ContinuousBatchingPipeline, context: int, steps: int) -> tuple[float, float]:
    """Fill the cache with a prompt and time the steps after it, in milliseconds of wall and of processor time."""
    greedy = GenerationConfig(max_new_tokens=1 + WARM_UP + steps, ignore_eos=True, do_sample=False)
    prompt = openvino.Tensor(np.array([prompt_ids(context)], dtype=np.int64))
    handle = engine.add_request(context, prompt, greedy)
    while not handle.can_read():  # a prompt takes many steps, the last of which gives the first token
        engine.step()
    taken = timed_steps(engine.step, steps)
    if engine.has_non_finished_requests():
        raise SystemExit(f"OpenVINO GenAI did not decode a token in each step after {context} tokens")
    return taken


def main() -> None:
    """Time one pipeline after the other; the number of threads belongs to a pipeline, so each fills its own cache."""
    given = checked(arguments(__doc__ or "", "a folder that optimum-cli exported SmolLM2 to", CACHES))
    stored = weights(given.model)
    for name in given.caches:
        for threads in given.threads:
            engine = pipeline(given.model, CACHES[name], threads)
            for context in given.contexts:
                ms, cpu_ms = timed_context(engine, context, given.steps)
                row = {"engine": ENGINE, "weights": stored, "cache": name, "context": context}
                add_row(given.out, {**row, "threads": threads, "ms": ms, "cpu_ms": cpu_ms})


if __name__ == "__main__":
    main()
