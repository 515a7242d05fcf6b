"""Plans from what was measured: the best one within a budget, one option everywhere, and TailorKV's labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from kvtailor.budget import Budget
from kvtailor.calibrate.density import TAU
from kvtailor.calibrate.options import CHANNEL, plan_of
from kvtailor.calibrate.planner import ROUNDING, choose
from kvtailor.calibrate.table import Measurement, Table
from kvtailor.errors import PlanError
from kvtailor.estimate import estimate
from kvtailor.plan import LayerPlan, MadeFor, Plan
from kvtailor.report import human_bytes

Count = Literal["held", "fast"]
Names = tuple[str, ...]
COUNTS: tuple[Count, ...] = ("held", "fast")


@dataclass(frozen=True)
class Planned:
    """A plan, and what the table says of it.

    Attributes
    ----------
    plan : the plan.
    choice : by layer, one option, or one for each KV head.
    loss : sum of the layers' losses, nats per token; what the whole plan loses is measured elsewhere.
    bytes_held, bytes_fast : of all layers.
    """

    plan: Plan
    choice: dict[int, Names]
    loss: float
    bytes_held: int
    bytes_fast: int

    def bytes_of(self, count: Count) -> int:
        """Bytes, counted in one of the two ways."""
        return self.bytes_held if count == "held" else self.bytes_fast


def within_bytes(
    table: Table, limit: float, count: Count = "held", name: str = "planned", heads: bool = False
) -> Planned:
    """The plan of least measured loss whose layers hold no more than ``limit`` bytes.

    Parameters
    ----------
    table : what was measured.
    limit : bytes.
    count : which bytes.
    name : of the plan.
    heads : whether each KV head may be kept in its own way.

    Raises
    ------
    PlanError
        If the smallest options hold more, no option of a layer has a finite loss, or heads were not measured.
    """
    places = _places(table, heads)
    weights = [[one.bytes_of(count) for one in place] for place in places]
    chosen = choose([[one.loss for one in place] for place in places], weights, limit)
    if chosen is None:
        least = _least(places, lambda one: one.bytes_of(count))
        raise PlanError(
            f"budget {human_bytes(limit)} is below what the smallest options hold: allowed are {human_bytes(least)} "
            f"({int(least)} bytes) or more, of {human_bytes(default_bytes(table))} in the default cache"
        )
    return planned(table, _picked(table, chosen), name)


def within_loss(
    table: Table, limit: float, count: Count = "held", name: str = "planned", heads: bool = False
) -> Planned:
    """The plan of fewest bytes whose layers' losses add up to no more than ``limit`` nats per token.

    Parameters
    ----------
    table, count, name, heads : as for :func:`within_bytes`.
    limit : nats per token; a sum that is greater by its rounding alone is within it.

    Raises
    ------
    PlanError
        If the limit is no finite number from 0, the exactest options lose more, no option of a layer has a finite loss,
        or heads were not measured.
    """
    check_loss(limit)
    places = _places(table, heads)
    costs = [[one.loss for one in place] for place in places]
    chosen = choose([[one.bytes_of(count) for one in place] for place in places], costs, limit * (1 + ROUNDING))
    if chosen is None:
        least = _rounded_up(_least(places, lambda one: one.loss))
        raise PlanError(f"loss {limit:g} is below what the exactest options lose: allowed are {least} or more")
    return planned(table, _picked(table, chosen), name)


def check_loss(limit: float) -> None:
    """Raise PlanError unless ``limit`` is a loss that a plan can stay within: a finite number from 0."""
    if not 0 <= limit < math.inf:
        raise PlanError(f"loss {limit:g} cannot be used: allowed are finite numbers from 0, in nats per token")


def _least(places: Sequence[Sequence[Measurement]], value: Callable[[Measurement], float]) -> float:
    """Sum of the least values among options that may be chosen."""
    return sum(min(value(one) for one in place if math.isfinite(one.loss)) for place in places)


def _rounded_up(value: float) -> str:
    """Two digits, and no less than ``value``: what is allowed must be accepted."""
    return f"{float(Context(prec=2, rounding=ROUND_CEILING).create_decimal(value)):g}"


def uniform(table: Table, name: str) -> Planned:
    """The plan that keeps every layer by one option of the table."""
    return planned(table, dict.fromkeys(table.layers, (name,)), name)


def labelled(table: Table, top: str, tau: float = TAU) -> Planned:
    """TailorKV's plan: dense layers packed to 2 bits, the others retrieved by 2-bit codes.

    Parameters
    ----------
    table : holds ``channel2`` and the option for the others.
    top : that option, such as "codes:10%".
    tau : density above which a layer is packed.
    """
    dense = {number: layer.mean_density > tau for number, layer in table.layers.items()}
    return planned(
        table, {number: (CHANNEL if is_dense else top,) for number, is_dense in dense.items()}, "TailorKV labels"
    )


def planned(table: Table, choice: dict[int, Names], name: str) -> Planned:
    """A plan from a choice of options, with what the table says of it.

    Parameters
    ----------
    table : holds them.
    choice : by layer, one option, or one for each KV head.
    name : of the plan.
    """
    found = [table.layers[number].kept_as(names) for number, names in choice.items()]
    plan = plan_of({number: [table.options[one] for one in names] for number, names in choice.items()}, name)
    return Planned(
        plan=plan.model_copy(update={"made_for": MadeFor(**table.made_for)}),
        choice=choice,
        loss=sum(one.loss for one in found),
        bytes_held=sum(one.bytes_held for one in found),
        bytes_fast=sum(one.bytes_fast for one in found),
    )


def at_length(table: Table, config: PretrainedConfig, tokens: int, dtype: torch.dtype | None = None) -> Table:
    """The same measurements, with the bytes that layers hold after a prompt of another length.

    Parameters
    ----------
    table : what was measured.
    config : of the model.
    tokens : of the prompt.
    dtype : of the cache; default: that of the model measured.

    Raises
    ------
    PlanError
        If an option cannot be used at that length.
    """
    modelled: torch.dtype = getattr(torch, table.dtype)
    cached = dtype or modelled

    def held(entry: LayerPlan) -> list[int]:
        return [layer.bytes_held for layer in estimate(config, Plan(layers=[entry]), tokens, cached).layers]

    entries = {name: one.entry for name, one in table.options.items()}
    all_held = {name: held(entry) for name, entry in entries.items()}
    fast = {name: held(_without_host(entry)) for name, entry in entries.items()}
    layers = {
        number: replace(
            layer,
            options={
                name: replace(one, bytes_held=all_held[name][number], bytes_fast=fast[name][number])
                for name, one in layer.options.items()
            },
        )
        for number, layer in table.layers.items()
    }
    measured = sum(table.tokens) / len(table.tokens) + table.held_out
    default = round(table.bytes_default * tokens / measured * cached.itemsize / modelled.itemsize)
    return replace(table, layers=layers, bytes_default=default, context=tokens)


def _without_host(entry: LayerPlan) -> LayerPlan:
    """An entry whose far tokens take no memory."""
    return entry if entry.find.index == "all" else entry.model_copy(update={"tier": "disk"})


def default_bytes(table: Table) -> int:
    """Bytes of the default cache in the layers of the table."""
    return table.bytes_default * len(table.layers)


def read_budget(text: str) -> Budget:
    """A budget for all layers together: "25%" of the default cache, or "64MiB"; raises PlanError for anything else."""
    try:
        budget = Budget.parse(text)
    except ValueError:
        budget = Budget("tokens", 0)
    if budget.kind == "tokens":
        raise PlanError(
            f"budget {text!r} cannot be used: allowed are a share of the default cache (25%) and bytes (64MiB)"
        )
    return budget


def bytes_of(budget: Budget, table: Table) -> float:
    """Bytes that a share or an amount stands for."""
    return budget.amount * (default_bytes(table) if budget.kind == "fraction" else 1)


def with_measurements(table: Table, one: Planned, settings: dict[str, Any]) -> Plan:
    """A plan with what was measured, for the reader.

    Parameters
    ----------
    table, one : the measurements, and the plan chosen from them.
    settings : what was asked for.
    """
    measured = {
        **settings,
        "tokens": table.tokens,
        "held_out": table.held_out,
        "texts": table.texts,
        "dtype": table.dtype,
        "tau": TAU,
        "loss_summed": _rounded(one.loss),
        "bytes_held": one.bytes_held,
        "bytes_fast": one.bytes_fast,
        "bytes_default": default_bytes(table),
        "layers": {str(number): _of_layer(table, number, names) for number, names in one.choice.items()},
    }
    return one.plan.model_copy(update={"measured": measured})


def _of_layer(table: Table, number: int, names: Names) -> dict[str, Any]:
    layer = table.layers[number]
    found = layer.kept_as(names)
    return {
        "density": _rounded(layer.mean_density),
        "label": layer.label,
        "option": in_words(names),
        "error": _rounded(found.error),
        "error_of_heads": [_rounded(error) for error in found.errors],
        "loss": _rounded(found.loss),
        "bytes_held": found.bytes_held,
        "bytes_fast": found.bytes_fast,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def in_words(names: Names) -> str:
    """A choice for people: "int4", or "int4 | full | codes:10%" head by head."""
    return " | ".join(names)


def _places(table: Table, heads: bool) -> list[list[Measurement]]:
    """Every option of each layer, or of each KV head of each layer.

    Raises
    ------
    PlanError
        If no option of a layer has a finite loss, or heads were not measured.
    """
    layers = table.layers.values()
    for number, layer in table.layers.items():
        if not any(math.isfinite(one.loss) for one in layer.options.values()):
            raise PlanError(
                f"layer {number}: none of {', '.join(layer.options)} leaves the model logits that are finite numbers; "
                "allowed are other options, or another dtype"
            )
    if not heads:
        return [list(layer.options.values()) for layer in layers]
    count = table.made_for["kv_heads"]
    if any(len(one.head_losses) != count for layer in layers for one in layer.options.values()):
        raise PlanError("what single heads lose was not measured: calibrate with heads, or choose whole layers")
    return [[one.of_head(head, count) for one in layer.options.values()] for layer in layers for head in range(count)]


def _picked(table: Table, chosen: Sequence[int]) -> dict[int, Names]:
    """The names chosen for each layer, once where its heads are kept alike."""
    share = len(chosen) // len(table.layers)
    found = {}
    for place, (number, layer) in enumerate(table.layers.items()):
        names = tuple(list(layer.options)[one] for one in chosen[place * share : (place + 1) * share])
        found[number] = names[:1] if len(set(names)) == 1 else names
    return found
