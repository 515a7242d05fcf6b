"""What plans lose on SmolLM2: needles found and perplexity, beside the bytes in fast memory and the time of a token.

    python benchmarks/quality.py --tokens 1000 --tokens 2000 --plan full --plan tailor --plan quest

Each length is read once, with the default cache; every plan's cache is filled with the same keys and values, and then
decodes token by token: what follows in the text (perplexity), and the answer to a question about a number hidden in it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

import torch
from transformers import DynamicCache

from kvtailor import KVCache, Plan, attach
from kvtailor.models.load import Loaded, load
from kvtailor.models.text import needle_prompt, python_reference
from kvtailor.report import human_bytes

PLANS = ("full", "int4", "int2", "tailor:128", "tailor-1bit:128", "quest:128", "pqcache:128")
CITIES = ("Paris", "Nairobi", "Lima", "Oslo", "Hanoi", "Quito", "Accra", "Turin")


def main() -> None:
    """Measure every plan at every length, and print a table."""
    asked = arguments()
    torch.set_grad_enabled(False)
    loaded = load("smollm2", torch.float32, progress=True)
    plans = [Plan.of(name) for name in asked.plan or PLANS]
    rows = []
    for tokens in asked.tokens or [1000]:
        rows += perplexity_rows(loaded, plans, tokens, asked.follow)
        if asked.needles:
            rows = with_needles(rows, loaded, plans, tokens, asked.needles)
    print(json.dumps(rows) if asked.json else table(rows))


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, action="append", help="lengths of the text; default 1000")
    parser.add_argument("--plan", action="append", help=f"default: {', '.join(PLANS)}")
    parser.add_argument("--follow", type=int, default=64, help="tokens that follow the text, for perplexity")
    parser.add_argument("--needles", type=int, default=8, help="numbers hidden, one at a time; 0 for none")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def read(loaded: Loaded, ids: torch.Tensor) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Keys and values of a prompt, and the logits behind it."""
    output = loaded.model(ids, use_cache=True, past_key_values=DynamicCache(), logits_to_keep=1)
    cache: Any = getattr(output, "cache", None) or output.past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers], output.logits[:, -1]


def perplexity_rows(loaded: Loaded, plans: list[Plan], tokens: int, follow: int) -> list[dict[str, Any]]:
    """Perplexity of what follows a text."""
    text = python_reference(tokens + follow + 300, loaded.tokenizer)
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids[:, : tokens + follow]
    pairs, last = read(loaded, ids[:, :tokens])
    rows = []
    for plan in plans:
        cache = KVCache(loaded.model, plan)
        cache.take(pairs)
        logits, seconds = last, 0.0
        loss = 0.0
        with attach(loaded.model, plan):
            for place in range(tokens, tokens + follow):
                loss -= float(logits.log_softmax(-1)[0, ids[0, place]])
                begin = time.perf_counter()
                logits = loaded.model(ids[:, place : place + 1], past_key_values=cache).logits[:, -1]
                seconds += time.perf_counter() - begin
        report = cache.report()
        rows.append(
            {
                "tokens": tokens,
                "plan": plan.name,
                "perplexity": math.exp(loss / follow),
                "ms": 1000 * seconds / follow,
                "bytes_fast": report.bytes_fast,
                "bytes_default": report.bytes_default,
            }
        )
    return rows


def with_needles(
    rows: list[dict[str, Any]], loaded: Loaded, plans: list[Plan], tokens: int, needles: int
) -> list[dict[str, Any]]:
    """The rows of a length with the share of hidden numbers that are found."""
    found = dict.fromkeys((plan.name for plan in plans), 0)
    for number in range(needles):
        digits = str(1_000_003 * (number + 3) % 9_000_000 + 1_000_000)
        text = python_reference(tokens - 150, loaded.tokenizer, skip=200 * number)
        user, start = needle_prompt(text, CITIES[number % len(CITIES)], digits, (number + 0.5) / needles)
        chat = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": user}], add_generation_prompt=True, tokenize=False
        )
        ids = loaded.tokenizer(chat + start, return_tensors="pt", add_special_tokens=False).input_ids
        pairs, last = read(loaded, ids)
        wanted = loaded.tokenizer(" " + digits, add_special_tokens=False).input_ids
        for plan in plans:
            found[plan.name] += digits in answer(loaded, plan, pairs, last, len(wanted) + 4)
    for row in rows:
        if row["tokens"] == tokens:
            row["found"] = f"{found[row['plan']]}/{needles}"
    return rows


def answer(loaded: Loaded, plan: Plan, pairs: list[Any], logits: torch.Tensor, count: int) -> str:
    """Greedy tokens behind a prompt."""
    cache = KVCache(loaded.model, plan)
    cache.take(pairs)
    told = []
    with attach(loaded.model, plan):
        for _ in range(count):
            told.append(int(logits.argmax()))
            logits = loaded.model(torch.tensor([told[-1:]]), past_key_values=cache).logits[:, -1]
    return str(loaded.tokenizer.decode(told))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| tokens | plan | needles | perplexity | fast memory | of the default | ms per token |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        share = row["bytes_fast"] / row["bytes_default"]
        lines.append(
            f"| {row['tokens']} | {row['plan']} | {row.get('found', '-')} | {row['perplexity']:.3f} | "
            f"{human_bytes(row['bytes_fast'])} | {share:.0%} | {row['ms']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
