"""kvtailor: keep, evict or pack the key-value cache of Hugging Face models, layer by layer."""

from kvtailor.attach import Attachment, attach, detach
from kvtailor.cache import EncoderDecoderKVCache, KVCache
from kvtailor.errors import CacheError, KVTailorError, ModelError, PlanError
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
    "LayerPlan",
    "ModelError",
    "Plan",
    "PlanError",
    "Report",
    "attach",
    "detach",
]
