"""What the machine and the installed packages are, as plain data."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

CPU_INFO = Path("/proc/cpuinfo")
LARGE_GPU = 40 * 2**30
MEMORY_INFO = Path("/proc/meminfo")
INSTRUCTION_SETS = {
    "avx2": ("avx2",),
    "avx512": ("avx512f",),
    "vnni": ("avx512_vnni", "avx_vnni"),
    "neon": ("asimd", "neon"),
}


def describe_machine() -> dict[str, Any]:
    """Processor, memory, versions and accelerators of this machine."""
    return {
        **processor(),
        "memory_bytes": memory_bytes(),
        "versions": versions(),
        "gpus": gpus(),
        "preset": hardware_preset(),
    }


def processor(cpu_info: Path = CPU_INFO) -> dict[str, Any]:
    """Name, instruction sets and cores of the processor.

    Parameters
    ----------
    cpu_info : the kernel's description of the processor; elsewhere than on Linux the instruction sets are not known.
    """
    fields: dict[str, str] = {}
    if cpu_info.is_file():
        for line in cpu_info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip().lower(), value.strip())
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    return {
        "processor": fields.get("model name") or platform.processor() or platform.machine(),
        "instruction_sets": [name for name, any_of in INSTRUCTION_SETS.items() if flags & set(any_of)],
        "cores": usable_cores(),
    }


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Bytes of memory in the machine, where the system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def free_bytes(memory_info: Path = MEMORY_INFO) -> int | None:
    """Bytes of memory that are free: of the largest GPU where there is one, else of the machine, where it tells."""
    import torch

    if torch.cuda.is_available():
        return max(torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count()))
    if not memory_info.is_file():
        return None
    for line in memory_info.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def hardware_preset() -> str:
    """The preset to begin with on this machine: by the memory of its largest GPU, or "cpu" where there is none."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    devices = range(torch.cuda.device_count())
    largest = max(torch.cuda.get_device_properties(number).total_memory for number in devices)
    return "large-gpu" if largest >= LARGE_GPU else "24gb-gpu"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter."""
    import torch
    import transformers

    import kvtailor

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "kvtailor": kvtailor.__version__,
    }


def gpus() -> list[str]:
    """Names of the accelerators that torch can use."""
    import torch

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return names + (["Apple MPS"] if torch.backends.mps.is_available() else [])
