"""Plans on a model whose weights are packed to 4 bits by torchao: tokens that agree with the default cache.

pip install torchao
python benchmarks/four_bit_weights.py --plan int4 --plan tailor:128
"""

from __future__ import annotations

import argparse

import torch
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup

from kvtailor import attach
from kvtailor.models.load import load
from kvtailor.models.text import python_reference

PLANS = ("full", "int8", "int4", "snapkv:50%", "tailor:128", "tailor-offload:128")
TOKENS, FOLLOW = 600, 24


def main() -> None:
    """Generate with each plan, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="append", help=f"default: {', '.join(PLANS)}")
    plans = parser.parse_args().plan or PLANS
    torch.set_grad_enabled(False)
    loaded = load("smollm2", torch.float32, progress=True)
    quantize_(loaded.model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(64)))
    text = python_reference(TOKENS, loaded.tokenizer)
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    asked = {"max_new_tokens": FOLLOW, "min_new_tokens": FOLLOW, "do_sample": False}
    expected = loaded.model.generate(ids, **asked)[0, ids.shape[1] :]
    print(f"weights: {type(loaded.model.get_decoder().layers[0].self_attn.q_proj.weight).__name__}")
    print("| plan | tokens that agree |")
    print("| --- | ---: |")
    for plan in plans:
        with attach(loaded.model, plan):
            found = loaded.model.generate(ids, **asked)[0, ids.shape[1] :]
        print(f"| {plan} | {int((found == expected).sum())}/{FOLLOW} |", flush=True)


if __name__ == "__main__":
    main()
