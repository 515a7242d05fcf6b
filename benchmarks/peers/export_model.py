"""Write a model that kvtailor loads as a folder that other programs load: weights in float32, and the tokenizer.

python benchmarks/peers/export_model.py smollm2 out/model
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from kvtailor.models.load import load

if __name__ == "__main__":
    loaded, folder = load(sys.argv[1], torch.float32, progress=True), Path(sys.argv[2])
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    print(folder)
