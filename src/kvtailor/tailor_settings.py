"""TailorKV's own settings as a plan: which layers are packed, and how the others find their tokens.

Source: TailorKV, arXiv 2505.19586, and the settings file that it is described with.
"""

from __future__ import annotations

from typing import Any

from kvtailor.errors import PlanError

FIELDS = ("quant_layers", "sparse_ratio", "critical_channels", "prefetch_window", "tau", "bits")
"""Names that such a file may hold."""

BITS = (1, 2, 3, 4, 8)
MOST_CHANNELS = 256
LAYERS = "a list of layer numbers, empty for none"


def is_settings(data: dict[Any, Any]) -> bool:
    """Whether a file holds TailorKV's settings and not a plan."""
    return "quant_layers" in data or ("layers" not in data and any(name in data for name in FIELDS))


def plan_fields(data: dict[Any, Any]) -> dict[str, Any]:
    """The fields of a plan from TailorKV's settings.

    Parameters
    ----------
    data : ``quant_layers`` (list of layers that are packed), ``sparse_ratio`` (share of the far tokens that a step
        reads, 0.03), ``critical_channels`` (8), ``prefetch_window`` (layers whose reads may be under way, 2: this one's
        and the next one's; 1 reads nothing ahead), ``bits`` (of packed layers, 1) and ``tau``, which says where the
        list came from and changes nothing.

    Raises
    ------
    PlanError
        For other names, and for values that cannot be used.
    """
    for name in data:
        if name not in FIELDS:
            raise PlanError(f"field {name!r} is not known beside quant_layers: allowed are {', '.join(FIELDS)}")
    if "quant_layers" not in data:
        raise PlanError(f"quant_layers is missing beside {', '.join(data)}: allowed is {LAYERS}")
    layers = data["quant_layers"]
    if not isinstance(layers, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in layers):
        raise PlanError(f"quant_layers {layers!r} cannot be used: allowed is {LAYERS}")
    channels = data.get("critical_channels", 8)
    if type(channels) is not int or not 1 <= channels <= MOST_CHANNELS:
        raise PlanError(f"critical_channels {channels!r} cannot be used: allowed are 1 to {MOST_CHANNELS}")
    bits = data.get("bits", 1)
    if isinstance(bits, bool) or bits not in BITS:
        raise PlanError(f"bits {bits!r} cannot be used: allowed are {', '.join(map(str, BITS))}")
    tau = data.get("tau", 0.2)
    if isinstance(tau, bool) or not isinstance(tau, int | float) or not 0 <= tau <= 1:
        raise PlanError(f"tau {tau!r} cannot be used: allowed are densities from 0 to 1")
    window = data.get("prefetch_window", 2)
    if window not in (1, 2) or isinstance(window, bool):
        raise PlanError(f"prefetch_window {window!r} cannot be used: allowed are 1 (nothing ahead) and 2")
    ratio = data.get("sparse_ratio", 0.03)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise PlanError(f"sparse_ratio {ratio!r} cannot be used: allowed are shares above 0 and up to 1")
    found = {
        "find": {
            "index": "channels",
            "top": float(ratio),
            "select": "mean",
            "ahead": window == 2,
            "options": {"count": channels},
        },
        "tier": "host",
    }
    packed = {"layers": layers, "form": {"kind": "channel", "bits": bits}}
    return {"name": "tailorkv", "layers": [packed, found] if layers else [found]}
