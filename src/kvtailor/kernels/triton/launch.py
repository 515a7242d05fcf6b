"""A kernel with its arguments: run on the device of its tensors, or read by `kvtailor.kernels.compile_triton`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

# Programs per multiprocessor that a split aims at: whole waves of 2 or 3, which is what its registers hold.
_PROGRAMS_PER_PROCESSOR = 6
_MOST_SPLITS = 128


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Parameters
    ----------
    name : what it computes and on which data, for tables.
    kernel : the jitted function.
    grid : programs along three axes.
    arguments : by parameter name; tensors, numbers, tuples of them, and the constants of the compilation.
    device : of every tensor in `arguments`.
    dots : the kernel multiplies matrices, which must reach the tensor cores.
    options : of the compiler, such as the number of warps.
    """

    name: str
    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    device: torch.device
    dots: bool
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Launch the kernel on the current stream of its device."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**self.arguments, **self.options)


def padded(size: int) -> int:
    """Return the power of two, at least 16, that holds `size`: the shortest side of a matrix product is 16."""
    return max(16, triton.next_power_of_2(size))


def split_tiles(tiles: int, programs: int, device: torch.device, splits: int | None) -> tuple[int, int]:
    """Cut the tiles of a row into parts that run side by side.

    Parameters
    ----------
    tiles : of tokens, 1 or more.
    programs : that run side by side without a split.
    device : on which they run.
    splits : parts wanted, or None to fill the device.

    Returns
    -------
    Parts, none of them empty, and the tiles of each part but the last.
    """
    if splits is None:
        splits = min(_MOST_SPLITS, _PROGRAMS_PER_PROCESSOR * _processors(device) // programs)
    each = -(-tiles // max(1, min(splits, tiles)))
    return -(-tiles // each), each


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return fp32 room for results on the device of `like`."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)
