"""Which kernels run: what this installation has, what this machine can run, and what the environment asks for."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

from kvtailor.errors import KernelError

KERNELS = ("auto", "reference", "plain", "avx2", "avx512", "triton")
VARIABLE = "KVTAILOR_KERNELS"
NATIVE = "kvtailor.kernels._native"
NOT_BUILT = "The compiled kernels were not built: install a C++17 compiler (GCC or Clang) and reinstall kvtailor"


def native() -> ModuleType | None:
    """The compiled kernels, or None where they were not built or cannot be loaded; `note` says why."""
    return _load()[0]


def built() -> bool:
    """Whether the compiled kernels were built and can be loaded."""
    return native() is not None


def note() -> str | None:
    """Why there are no compiled kernels and how to get them, in one line; None where they are there."""
    return _load()[1]


def available() -> list[str]:
    """The kernels that run here: compiled ones first, the best of them in front; "reference" is always among them."""
    return [*_instruction_sets(), *([] if _triton_lacks() else ["triton"]), "reference"]


def active() -> str:
    """The kernels that run, after the environment's choice: any of `KERNELS` but "auto".

    Raises
    ------
    KernelError
        If the environment asks for kernels that do not exist, or that cannot run here.
    """
    asked = os.environ.get(VARIABLE, "auto")
    if asked not in KERNELS:
        raise KernelError(f"{VARIABLE} is {asked!r}: allowed are {', '.join(KERNELS)}")
    if asked == "reference":
        return asked
    if asked == "auto":
        return [*_instruction_sets(), "reference"][0]
    lacks = _triton_lacks() if asked == "triton" else _native_lacks(asked)
    if lacks is not None:
        allowed = ", ".join(["auto", *available()])
        raise KernelError(f"{VARIABLE} is {asked!r}, which cannot run here: allowed are {allowed}. {lacks}")
    return asked


def _load() -> tuple[ModuleType | None, str | None]:
    """The compiled kernels, or why there are none."""
    try:
        return import_module(NATIVE), None
    except ModuleNotFoundError as error:
        if error.name == NATIVE:
            return None, NOT_BUILT
        return None, _not_loaded(error)
    except ImportError as error:
        return None, _not_loaded(error)


def _not_loaded(error: ImportError) -> str:
    return f"The compiled kernels cannot be loaded ({error}): reinstall kvtailor"


def _instruction_sets() -> list[str]:
    """The instruction sets of the compiled kernels that this processor has, best first."""
    module = native()
    return [] if module is None else list(module.instruction_sets())


def _native_lacks(name: str) -> str | None:
    """What compiled kernels need to run here and do not have, or None."""
    sets = _instruction_sets()
    if name in sets:
        return None
    return note() or f"This processor can run {', '.join(sets)}"


def _triton_lacks() -> str | None:
    """What Triton's kernels need to run here and do not have, or None."""
    try:
        import_module("triton")
    except ImportError as error:
        return f"The package triton cannot be imported ({error})"
    import torch

    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "Torch finds no GPU, and TRITON_INTERPRET is not 1"
