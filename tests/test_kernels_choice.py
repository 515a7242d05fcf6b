"""Which kernels run: the environment's choice among what was built and what the machine can run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kvtailor.kernels
from kvtailor.errors import KernelError
from kvtailor.kernels.choice import KERNELS, NATIVE, NOT_BUILT, VARIABLE, active, available, built, native, note


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins with an environment that asks for nothing."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def give_native(monkeypatch: pytest.MonkeyPatch, *sets: str) -> ModuleType:
    """Compiled kernels for a processor with these instruction sets."""
    module = ModuleType(NATIVE)
    module.instruction_sets = lambda: list(sets)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, NATIVE, module)
    return module


def take_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NATIVE, None)  # type: ignore[arg-type]


def break_native(monkeypatch: pytest.MonkeyPatch, folder: Path, line: str) -> None:
    """Put a module in the place of the compiled kernels that fails while it is loaded."""
    (folder / "_native.py").write_text(line)
    monkeypatch.delitem(sys.modules, NATIVE, raising=False)
    monkeypatch.setattr(kvtailor.kernels, "__path__", [str(folder)])


def give_triton(monkeypatch: pytest.MonkeyPatch, *, gpu: bool) -> None:
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)


def take_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]


def refusal(monkeypatch: pytest.MonkeyPatch, asked: str) -> str:
    monkeypatch.setenv(VARIABLE, asked)
    with pytest.raises(KernelError) as refused:
        active()
    return str(refused.value)


def test_everything_that_this_installation_offers_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = available()
    assert "reference" in offered
    assert len(set(offered)) == len(offered)
    assert active() in offered
    for name in offered:
        monkeypatch.setenv(VARIABLE, name)
        assert active() == name


def test_what_is_not_offered_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(KERNELS) - {"auto", *available()}:
        assert f"{VARIABLE} is {name!r}" in refusal(monkeypatch, name)


def test_auto_is_the_best_that_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    module = give_native(monkeypatch, "avx2", "plain")
    take_triton(monkeypatch)
    assert native() is module
    assert built()
    assert note() is None
    assert active() == "avx2"
    monkeypatch.setenv(VARIABLE, "auto")
    assert active() == "avx2"
    assert available() == ["avx2", "plain", "reference"]


def test_the_environment_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    give_native(monkeypatch, "avx512", "avx2", "plain")
    for name in ("plain", "avx512", "reference", "avx2"):
        monkeypatch.setenv(VARIABLE, name)
        assert active() == name


def test_kernels_that_were_not_built_leave_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    take_native(monkeypatch)
    take_triton(monkeypatch)
    assert native() is None
    assert not built()
    assert note() == NOT_BUILT
    assert active() == "reference"
    assert available() == ["reference"]
    assert refusal(monkeypatch, "plain") == (
        "KVTAILOR_KERNELS is 'plain', which cannot run here: allowed are auto, reference. "
        "The compiled kernels were not built: install a C++17 compiler (GCC or Clang) and reinstall kvtailor"
    )


@pytest.mark.parametrize("line", ["raise ImportError('libgone.so: cannot open')", "import libgone"])
def test_kernels_that_cannot_be_loaded_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str) -> None:
    break_native(monkeypatch, tmp_path, line)
    assert not built()
    assert "The compiled kernels cannot be loaded" in (note() or "")
    assert "libgone" in (note() or "")
    assert active() == "reference"
    assert "libgone" in refusal(monkeypatch, "avx2")


def test_failures_other_than_of_the_import_are_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    break_native(monkeypatch, tmp_path, "raise MemoryError")
    with pytest.raises(MemoryError):
        active()


def test_instruction_sets_that_the_processor_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    give_native(monkeypatch, "avx2", "plain")
    take_triton(monkeypatch)
    assert refusal(monkeypatch, "avx512") == (
        "KVTAILOR_KERNELS is 'avx512', which cannot run here: allowed are auto, avx2, plain, reference. "
        "This processor can run avx2, plain"
    )


def test_unknown_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("sse9", "", "AVX2"):
        assert refusal(monkeypatch, asked) == f"KVTAILOR_KERNELS is {asked!r}: allowed are {', '.join(KERNELS)}"


def test_triton_needs_its_package_and_a_gpu_or_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    give_native(monkeypatch, "plain")
    take_triton(monkeypatch)
    assert "The package triton cannot be imported" in refusal(monkeypatch, "triton")

    give_triton(monkeypatch, gpu=False)
    assert "Torch finds no GPU, and TRITON_INTERPRET is not 1" in refusal(monkeypatch, "triton")
    assert available() == ["plain", "reference"]

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert active() == "triton"
    assert available() == ["plain", "triton", "reference"]

    monkeypatch.delenv("TRITON_INTERPRET")
    give_triton(monkeypatch, gpu=True)
    assert active() == "triton"
    monkeypatch.setenv(VARIABLE, "auto")
    assert active() == "plain"
