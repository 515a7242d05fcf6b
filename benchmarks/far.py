"""One layer of Llama 3.1 8B's shape whose tokens live in slow memory: bytes in fast memory and time of a step.

Beside it, in turns: attention over everything in fast memory, and a layer that is read back whole at each step.

    python benchmarks/far.py                                      # 131,072 tokens in host memory
    python benchmarks/far.py --tokens 1048576 --tier disk --index codes
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from kvtailor.layers.base import Place, Step, TailoredLayer
from kvtailor.layers.full import FullLayer
from kvtailor.layers.retrieving import RetrievingLayer
from kvtailor.plan import LayerPlan
from kvtailor.report import human_bytes

HEADS, GROUP, DIM = 8, 4, 128
CHUNK = 16_384
WAYS: dict[str, dict[str, Any]] = {
    "codes 2-bit": {"index": "codes", "options": {"bits": 2}},
    "codes 1-bit": {"index": "codes", "options": {"bits": 1}},
    "codes 2-bit, shared": {"index": "codes", "options": {"bits": 2}, "select": "sum"},
    "channels 8": {"index": "channels", "options": {"count": 8}},
    "channels 8, shared": {"index": "channels", "options": {"count": 8}, "select": "mean"},
    "pq 2x6": {"index": "pq", "select": "sum"},
    "pages 16": {"index": "pages"},
}


def main() -> None:
    """Fill the layers, time steps in turns, and print a table."""
    asked = arguments()
    torch.set_num_threads(asked.threads)
    ways = {name: way for name, way in WAYS.items() if not asked.index or way["index"] in asked.index}
    layers = {name: filled(retrieving(way, asked), asked.tokens) for name, way in ways.items()}
    if not asked.alone:
        layers |= {"full": filled(full(), asked.tokens)}
    times: dict[str, list[float]] = {name: [] for name in (*layers, "read back whole")}
    for _ in range(asked.rounds + 1):
        for name, layer in layers.items():
            times[name].append(timed(layer))
        if not asked.alone:
            times["read back whole"].append(read_back(next(iter(layers.values()))))
    rows = [row(name, layers.get(name), found[1:], times.get("full")) for name, found in times.items() if found]
    print(json.dumps(rows) if asked.json else table(rows, asked))


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--top", type=int, default=512, help="tokens read back at each step")
    parser.add_argument("--tier", choices=("host", "disk"), default="host")
    parser.add_argument("--folder", type=Path, help="of files, with --tier disk")
    parser.add_argument("--index", action="append", choices=sorted({way["index"] for way in WAYS.values()}))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="leave full attention and reading back out")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def retrieving(way: dict[str, Any], asked: argparse.Namespace) -> RetrievingLayer:
    """An empty layer."""
    folder = None if asked.folder is None else str(asked.folder)
    plan = LayerPlan(find={**way, "top": asked.top, "ahead": False}, tier=asked.tier, folder=folder)
    return RetrievingLayer(plan, Place(0), Step(active=True))


def full() -> FullLayer:
    """An empty layer that keeps everything in fast memory."""
    return FullLayer(LayerPlan(), Place(0), Step(active=True))


def filled(layer: TailoredLayer, tokens: int) -> TailoredLayer:
    """The layer with random keys, a few channels of which are large as real ones are, and random values."""
    source = torch.Generator().manual_seed(0)
    widths = torch.ones(HEADS, 1, DIM).index_fill_(2, torch.randperm(DIM, generator=source)[:8], 4.0)
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        key, value = (torch.randn(1, HEADS, count, DIM, generator=source) for _ in range(2))
        layer.take((key * widths).bfloat16(), value.bfloat16())
    return layer


def timed(layer: TailoredLayer) -> float:
    """Milliseconds of processor time of a step with one new token."""
    query = torch.randn(1, HEADS * GROUP, 1, DIM).bfloat16()
    key, value = (torch.randn(1, HEADS, 1, DIM).bfloat16() for _ in range(2))
    layer.step.prompt = False
    begin = time.perf_counter()
    layer.update(key, value)
    layer.attend(nn.Module(), query, None, no_attention)
    return 1000 * (time.perf_counter() - begin)


def no_attention(*arguments: object, **named: object) -> tuple[torch.Tensor, None]:
    """In place of Transformers' attention, which a step does not need."""
    raise AssertionError("a step is attended by the layer")


def read_back(layer: TailoredLayer) -> float:
    """Milliseconds of a step that reads everything back, as caches do that offload whole layers."""
    assert isinstance(layer, RetrievingLayer)
    query = torch.randn(1, HEADS, GROUP, DIM).bfloat16()
    begin = time.perf_counter()
    keys, values = (part.clone()[None] for part in layer.rows[0].far.read())
    nn.functional.scaled_dot_product_attention(query, keys, values)
    return 1000 * (time.perf_counter() - begin)


def row(name: str, layer: TailoredLayer | None, times: list[float], base: list[float] | None) -> dict[str, Any]:
    """One line of the table."""
    held = {} if layer is None else layer.bytes_by_kind()
    fast = sum(held.values()) - held.get("host", 0)
    return {
        "way": name,
        "ms": median(times),
        "speedup": median(base[1:]) / median(times) if base else None,
        "bytes_fast": fast or None,
        "bytes_far": held.get("host", 0) + (0 if layer is None else layer.bytes_on_disk),
    }


def table(rows: list[dict[str, Any]], asked: argparse.Namespace) -> str:
    """The rows as Markdown."""
    lines = [
        f"{asked.tokens} tokens, {asked.top} read back, {asked.tier}, {asked.threads} thread(s)",
        "",
        "| way | ms per step | over full | fast memory | far |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for one in rows:
        speedup = "-" if one["speedup"] is None else f"{one['speedup']:.2f}x"
        fast = "-" if one["bytes_fast"] is None else human_bytes(one["bytes_fast"])
        lines.append(f"| {one['way']} | {one['ms']:.2f} | {speedup} | {fast} | {human_bytes(one['bytes_far'])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
