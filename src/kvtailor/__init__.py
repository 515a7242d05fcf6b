"""kvtailor: keep, evict or pack the key-value cache of Hugging Face models, layer by layer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtailor.attachment import Attachment, attach, detach
    from kvtailor.cache import EncoderDecoderKVCache, KVCache
    from kvtailor.errors import CacheError, KernelError, KVTailorError, ModelError, PlanError
    from kvtailor.plan import Form, Keep, LayerPlan, Plan
    from kvtailor.report import Report

__version__ = "0.1.0"

__all__ = [
    "Attachment",
    "CacheError",
    "EncoderDecoderKVCache",
    "Form",
    "KVCache",
    "KVTailorError",
    "Keep",
    "KernelError",
    "LayerPlan",
    "ModelError",
    "Plan",
    "PlanError",
    "Report",
    "attach",
    "detach",
]

# Names are looked up when they are used, so that the command line can answer without importing torch.
_HOMES = {
    "kvtailor.attachment": ("Attachment", "attach", "detach"),
    "kvtailor.cache": ("EncoderDecoderKVCache", "KVCache"),
    "kvtailor.errors": ("CacheError", "KVTailorError", "KernelError", "ModelError", "PlanError"),
    "kvtailor.plan": ("Form", "Keep", "LayerPlan", "Plan"),
    "kvtailor.report": ("Report",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'kvtailor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
