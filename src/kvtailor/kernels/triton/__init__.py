"""Kernels in Triton, for GPUs: attention, scores and packing on the stored codes.

They need the optional dependency Triton (`pip install 'kvtailor[gpu]'`). With `TRITON_INTERPRET=1` set before this
module is imported they run on the CPU, slowly, so that they can be tested without a GPU.
"""

from __future__ import annotations

from kvtailor.kernels.triton.attend import attend
from kvtailor.kernels.triton.gather import gather_attend
from kvtailor.kernels.triton.merge import merge
from kvtailor.kernels.triton.pack import pack
from kvtailor.kernels.triton.scores import scores

__all__ = ["attend", "gather_attend", "merge", "pack", "scores"]
