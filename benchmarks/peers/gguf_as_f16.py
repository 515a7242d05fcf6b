"""Rewrite a GGUF file with its quantised weights as float16, so that llama.cpp runs on as many bits as the others."""

from __future__ import annotations

import argparse
import ctypes
import logging
from pathlib import Path

import llama_cpp


def main() -> None:
    """Read one file and write the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_F16
    options.allow_requantize = True
    if llama_cpp.llama_model_quantize(str(given.source).encode(), str(given.target).encode(), ctypes.byref(options)):
        raise SystemExit(f"{given.source} cannot be written to {given.target} as float16")


if __name__ == "__main__":
    main()
