"""How a comparison names its caches: for people, and to tell them apart in results."""

from __future__ import annotations

OURS = "kvtailor"
"""The engine of our own caches."""


def cache_name(engine: str, plan: str) -> str:
    """A plan, behind its engine where that is not ours."""
    return plan if engine == OURS else f"{engine} {plan}"


def label(engine: str, plan: str, budget: float | None) -> str:
    """The same with its budget: "snapkv at 25%"."""
    name = cache_name(engine, plan)
    return name if budget is None else f"{name} at {100 * budget:g}%"


def key(plan: str, budget: float | None) -> str:
    """What tells the candidates of one engine apart."""
    return f"{plan}@{'' if budget is None else format(budget, '.6g')}"
