"""The ways to keep a layer that calibration tries, each by a short name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtailor.errors import PlanError
from kvtailor.indexes.registry import INDEX_NAMES
from kvtailor.plan import Form, LayerPlan, Plan
from kvtailor.policies.base import Policy
from kvtailor.policies.registry import policy_class

FULL = "full"
CHANNEL = "channel2"
DEFAULT = (
    FULL, "int8", "int4", "int3", "int2", CHANNEL, "int1",
    "snapkv:50%", "snapkv:25%", "h2o:25%", "h2o:12.5%", "h2o:6.25%", "fifo:6.25%", "snapkv:50%+int4",
    "codes:10%", "codes:2.5%", "channels:10%", "pages:10%", "pq:10%",
)  # fmt: skip
ALLOWED = (
    f"full, {CHANNEL}, a preset such as int4 or snapkv:25%, an index with its top such as codes:5% "
    f"({', '.join(INDEX_NAMES)}), an eviction preset and a packed one such as snapkv:50%+int4, or a plan file with one "
    "entry"
)


@dataclass(frozen=True, eq=False)
class Option:
    """A way to keep a layer.

    Attributes
    ----------
    name : as :func:`option` reads it.
    entry : what a plan says of a layer that is kept so; it addresses every layer.
    """

    name: str
    entry: LayerPlan


def option(name: str) -> Option:
    """An option by name.

    Raises
    ------
    PlanError
        For a name that cannot be read, or a plan whose layers cannot be measured one by one.
    """
    if name == FULL:
        return Option(name, LayerPlan())
    if name == CHANNEL:  # KIVI's and TailorKV's form, with sinks exact
        return Option(name, LayerPlan(form=Form(kind="channel", bits=2)))
    index, colon, top = name.partition(":")
    if colon and index in INDEX_NAMES:
        plan = Plan(layers=[{"find": {"index": index, "top": top}}])
    elif "+" in name:
        dropped, packed = _dropped_and_packed(name)
        plan = Plan(layers=[{"keep": dropped.keep, "form": packed.form}])
    else:
        plan = Plan.of(name)
    if len(plan.layers) != 1 or (plan.layers[0].layers, plan.layers[0].heads) != ("*", "*"):
        raise PlanError(f"option {name!r} does not keep all layers alike: allowed are {ALLOWED}")
    _check_alone(name, plan.layers[0])
    return Option(name, plan.layers[0].model_copy(update={"attention": "self"}))


def _dropped_and_packed(name: str) -> tuple[LayerPlan, LayerPlan]:
    """The two entries of "snapkv:50%+int4"; raises PlanError for parts that say something else of a layer."""
    first, second = name.split("+", 1)
    dropped, packed = option(first).entry, option(second).entry
    drops_only = dropped == LayerPlan(keep=dropped.keep) and dropped.keep.policy != "all"
    packs_only = packed == LayerPlan(form=packed.form) and packed.form.kind != "dense"
    if not (drops_only and packs_only):
        raise PlanError(
            f"option {name!r} cannot be read: {first!r} must be an eviction preset and {second!r} a packed one; "
            f"allowed are {ALLOWED}"
        )
    return dropped, packed


def _check_alone(name: str, entry: LayerPlan) -> None:
    """Raise PlanError for an option that a layer cannot be measured with, alone and behind a prompt seen in full."""
    keep = entry.keep
    if keep.budget is not None and keep.budget.kind == "bytes":
        raise PlanError(
            f"option {name!r} shares {keep.budget} among its layers: allowed are tokens (512) and shares (25%)"
        )
    if keep.policy != "all" and policy_class(keep.policy).layer_capacities is not Policy.layer_capacities:
        raise PlanError(f"option {name!r} divides its budget over layers, which is what the planner does: name another")
    if keep.is_hard or entry.prompt_share < 1:
        what = f"hard budget {keep.budget}" if keep.is_hard else f"prompt_share {entry.prompt_share:g}"
        raise PlanError(
            f"option {name!r} has {what}: what a prompt's own tokens lose by it is not measured; allowed is an option "
            "without it"
        )


def options(names: Sequence[str] = DEFAULT) -> list[Option]:
    """Options by name, each once, ``full`` first: every layer may be kept whole."""
    return [option(name) for name in dict.fromkeys([FULL, *names])]


def plan_of(choice: dict[int, Sequence[Option]], name: str = "plan") -> Plan:
    """A plan that keeps each layer, or each of its KV heads, by an option; what is kept whole needs no entry.

    Parameters
    ----------
    choice : by layer, one option, or one for each KV head.
    name : of the plan.
    """
    alike: dict[tuple[str, str], list[int]] = {}
    for layer in sorted(choice):
        for option, heads in _heads_alike([one.name for one in choice[layer]]).items():
            alike.setdefault((option, heads), []).append(layer)
    entries = {one.name: one.entry for options in choice.values() for one in options}
    layers = [
        entries[option].model_copy(update={"layers": _ranges(numbers), "heads": heads})
        for (option, heads), numbers in alike.items()
        if not entries[option].is_full
    ]
    return Plan(name=name, layers=layers)


def _heads_alike(names: Sequence[str]) -> dict[str, str]:
    """The KV heads that each option keeps, as a plan writes them."""
    if len(set(names)) == 1:
        return {names[0]: "*"}
    return {one: _ranges([head for head, name in enumerate(names) if name == one]) for one in dict.fromkeys(names)}


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as a plan writes them: "0-3,8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
