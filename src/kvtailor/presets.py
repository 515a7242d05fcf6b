"""Plans by name."""

from __future__ import annotations

from typing import Any

from kvtailor.budget import ALLOWED, Budget
from kvtailor.errors import PlanError

# A preset with a policy takes a budget after a colon, one with an index the tokens of a step, a packed one nothing.
_PACKED: dict[str, dict[str, Any]] = {
    "int8": {"kind": "rotated", "bits": 8},
    "int4": {"kind": "rotated", "bits": 4},
    "int3": {"kind": "rotated", "bits": 3},
    "int2": {"kind": "rotated", "bits": 2},
    "int1": {"kind": "channel", "bits": 1},
    "kivi4": {"kind": "channel", "bits": 4, "levels": "minmax", "group": 32, "residual": 128, "exact": 0},
    "kivi2": {"kind": "channel", "bits": 2, "levels": "minmax", "group": 32, "residual": 128, "exact": 0},
}
EVICTING = ("fifo", "lru", "random", "keynorm", "keydiff", "streaming", "h2o", "snapkv", "pyramidkv", "adakv")
DEFAULT_BUDGET = "25%"

_CODES = {"find": {"index": "codes", "options": {"bits": 2}}}
# How the layers are kept that look at few tokens, and the first one, which looks at all of them.
_RETRIEVING: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "quest": ({"find": {"index": "pages", "select": "query"}}, None),
    "pqcache": ({"find": {"index": "pq", "select": "sum", "sinks": 32}}, None),
    "tailor": (_CODES, {"kind": "channel", "bits": 2}),
    "tailor-1bit": ({"find": {"index": "codes", "options": {"bits": 1}}}, {"kind": "channel", "bits": 1}),
    "tailor-offload": ({**_CODES, "tier": "disk"}, {"kind": "channel", "bits": 2}),
}
DEFAULT_TOP = "512"

# What to begin with on a kind of machine, as another preset: nearly lossless everywhere; on a small card the tokens lie
# in host memory, where long contexts would crowd out the weights; a processor is fastest on codes.
HARDWARE = {"large-gpu": "int8", "24gb-gpu": "tailor", "cpu": "int4"}

NAMES = ("full", *_PACKED, *EVICTING, *_RETRIEVING, *HARDWARE)


def fields(name: str) -> dict[str, Any]:
    """The fields of a preset's plan, by a name such as ``"int4"`` or ``"snapkv:512"``.

    Raises
    ------
    PlanError
        For any other name, and for a budget that cannot be used.
    """
    preset, colon, budget = name.partition(":")
    if preset not in NAMES:
        raise PlanError(
            f"unknown preset {name!r}: allowed are {', '.join(NAMES)}, or a file that ends in .yaml or .json"
        )
    if preset in HARDWARE and not colon:
        return {**fields(HARDWARE[preset]), "name": name}
    if preset in EVICTING:
        keep = {"policy": preset, "budget": _budget(name, budget if colon else DEFAULT_BUDGET)}
        return {"name": name, "layers": [{"keep": keep}]}
    if preset in _RETRIEVING:
        return {"name": name, "layers": _retrieving(preset, _budget(name, budget if colon else DEFAULT_TOP))}
    if colon:
        raise PlanError(f"preset {name!r}: {preset} takes no budget; allowed is {preset!r}")
    return {"name": preset, "layers": [{"attention": "both", "form": _PACKED[preset]}] if preset in _PACKED else []}


def _retrieving(preset: str, top: str) -> list[dict[str, Any]]:
    entry, first = _RETRIEVING[preset]
    rest = {**entry, "find": {**entry["find"], "top": top}}
    return [rest] if first is None else [{"layers": 0, "form": first}, rest]


def _budget(name: str, text: str) -> str:
    try:
        return str(Budget.parse(text))
    except ValueError:
        raise PlanError(f"preset {name!r}: budget {text!r} cannot be used: allowed is {ALLOWED}") from None
