"""What prompts over some blocks only save and lose on SmolLM2: time of the prompt, and perplexity of what follows.

python benchmarks/sparse_prompt.py --tokens 4096 --share 0.5 --share 0.25 --share 0.1
"""

from __future__ import annotations

import argparse
import math
import time

import torch

from kvtailor import KVCache, Plan, attach
from kvtailor.models.load import Loaded, load
from kvtailor.models.text import python_reference

FOLLOW = 128


def main() -> None:
    """Measure each share at each length, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, action="append", help="lengths of the prompt; default 2048")
    parser.add_argument("--share", type=float, action="append", help="default 0.5, 0.25 and 0.1; 1 is measured anyway")
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    loaded = load("smollm2", torch.float32, progress=True)
    print("| tokens | blocks attended to | prompt, s | of all | attention, s | perplexity behind it |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for tokens in asked.tokens or [2048]:
        whole = 0.0
        for share in [1.0, *(asked.share or [0.5, 0.25, 0.1])]:
            seconds, attention, perplexity = measured(loaded, tokens, share)
            whole = whole or seconds
            print(
                f"| {tokens} | {share:.0%} | {seconds:.1f} | {seconds / whole:.2f}x | {attention:.1f} "
                f"| {perplexity:.3f} |",
                flush=True,
            )


def measured(loaded: Loaded, tokens: int, share: float) -> tuple[float, float, float]:
    """Seconds of the prompt and of its attention, and the perplexity of what follows."""
    text = python_reference(tokens + FOLLOW + 300, loaded.tokenizer)
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids[:, : tokens + FOLLOW]
    plan = Plan(name=f"{share:.0%}", layers=[{"prompt_share": share, "find": {"index": "codes", "top": tokens}}])
    cache = KVCache(loaded.model, plan)
    with attach(loaded.model, plan):
        begin = time.perf_counter()
        last = loaded.model(ids[:, :tokens], past_key_values=cache, logits_to_keep=1).logits
        seconds, attention = time.perf_counter() - begin, cache.report().attention_seconds
        following = loaded.model(ids[:, tokens:], past_key_values=cache).logits
    logits = torch.cat([last, following[:, :-1]], dim=1)[0]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, tokens:])
    return seconds, attention, math.exp(float(loss))


if __name__ == "__main__":
    main()
