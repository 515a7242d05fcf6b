"""The policies by name. A new one is one file and one line here."""

from __future__ import annotations

from kvtailor.policies.base import Policy
from kvtailor.policies.h2o import H2O
from kvtailor.policies.lru import Lru
from kvtailor.policies.order import Fifo, KeyDiff, KeyNorm, Random, Streaming
from kvtailor.policies.snapkv import AdaKV, PyramidKV, SnapKV

_POLICIES: dict[str, type[Policy]] = {
    cls.name: cls for cls in (Fifo, Lru, Random, KeyNorm, KeyDiff, Streaming, H2O, SnapKV, PyramidKV, AdaKV)
}

POLICY_NAMES = tuple(_POLICIES)


def policy_class(name: str) -> type[Policy]:
    """The class of a policy's name (a KeyError for an unknown one; plans check names first)."""
    return _POLICIES[name]
