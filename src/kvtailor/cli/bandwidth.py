"""How fast this machine reads memory, a disk and the link to a GPU: what decides between ways of keeping tokens."""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

MEMORY_BYTES = 1 << 28
DISK_BYTES = 1 << 27
ROW_BYTES = 4096
ROWS = 256


def measure(folder: Path | None = None) -> dict[str, Any]:
    """Bandwidths as plain data, in about two seconds.

    Parameters
    ----------
    folder : where the disk is measured; the system's temporary folder by default.

    Returns
    -------
    GB/s of reading memory with all threads; GB/s of writing to disk and of reading what it no longer has in memory;
    milliseconds to read 256 rows of 4 KiB from anywhere in it, announced at once; GB/s to each GPU, from pinned memory.
    """
    return {"memory_gb_per_s": memory(), **disk(folder), "link_gb_per_s": link()}


def memory() -> float:
    """GB/s of reading memory."""
    import torch

    numbers = torch.ones(MEMORY_BYTES // 4)
    numbers.sum()
    return max(_rate(MEMORY_BYTES, lambda: numbers.sum()) for _ in range(3))


def disk(folder: Path | None = None) -> dict[str, float | None]:
    """GB/s of writing and reading a file, and milliseconds of scattered rows; None where no file can be made."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return _of_file(file.fileno())
    except OSError:
        return {"disk_write_gb_per_s": None, "disk_read_gb_per_s": None, "disk_rows_ms": None}


def _of_file(file: int) -> dict[str, float | None]:
    block = os.urandom(1 << 22)

    def write() -> None:
        for start in range(0, DISK_BYTES, len(block)):
            os.pwrite(file, block, start)
        os.fsync(file)

    def read() -> None:
        for start in range(0, DISK_BYTES, len(block)):
            os.pread(file, len(block), start)

    written = _rate(DISK_BYTES, write)
    os.posix_fadvise(file, 0, DISK_BYTES, os.POSIX_FADV_DONTNEED)
    found = _rate(DISK_BYTES, read)
    os.posix_fadvise(file, 0, DISK_BYTES, os.POSIX_FADV_DONTNEED)
    return {"disk_write_gb_per_s": written, "disk_read_gb_per_s": found, "disk_rows_ms": _rows_ms(file)}


def _rows_ms(file: int) -> float:
    starts = [ROW_BYTES * row for row in random.Random(0).sample(range(DISK_BYTES // ROW_BYTES), ROWS)]
    begin = time.perf_counter()
    for start in starts:
        os.posix_fadvise(file, start, ROW_BYTES, os.POSIX_FADV_WILLNEED)
    for start in starts:
        os.pread(file, ROW_BYTES, start)
    return 1000 * (time.perf_counter() - begin)


def link() -> list[float]:
    """GB/s from pinned memory to each GPU."""
    import torch

    rates = []
    for number in range(torch.cuda.device_count()):
        numbers = torch.ones(MEMORY_BYTES // 4).pin_memory()
        numbers.to(f"cuda:{number}")
        torch.cuda.synchronize(number)

        def copy(numbers: Any = numbers, number: int = number) -> None:
            numbers.to(f"cuda:{number}", non_blocking=True)
            torch.cuda.synchronize(number)

        rates.append(_rate(MEMORY_BYTES, copy))
    return rates


def _rate(count: int, call: Any) -> float:
    begin = time.perf_counter()
    call()
    return count / (time.perf_counter() - begin) / 1e9
