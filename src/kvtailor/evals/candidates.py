"""The plans of a comparison: as they were named, or each at the bytes that it may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from kvtailor import presets
from kvtailor.calibrate.options import option
from kvtailor.errors import EvaluationError, PlanError
from kvtailor.estimate import estimate
from kvtailor.evals import naming
from kvtailor.plan import Plan

FULL = "full"


@dataclass(frozen=True)
class Candidate:
    """A plan of a comparison.

    Attributes
    ----------
    name : as it was asked for; of a plan file its name without folder and ending.
    budget : share of the default cache's bytes that it may hold after the context; None where it takes what it takes.
    plan : the plan.
    """

    name: str
    budget: float | None
    plan: Plan

    @property
    def key(self) -> str:
        """What tells candidates apart in a result."""
        return naming.key(self.name, self.budget)


def takes_budget(name: str) -> bool:
    """Whether a plan by this name is made for each budget: an eviction preset without one, packed or not."""
    policy = name.partition("+")[0]
    return ":" not in policy and policy in presets.EVICTING


def candidates(
    names: Sequence[str], budgets: Sequence[float], config: PretrainedConfig, tokens: int, dtype: torch.dtype
) -> tuple[list[Candidate], list[str]]:
    """Plans by name, ``full`` first, each name that takes a budget once for every budget.

    Parameters
    ----------
    names : presets, plan files, options such as ``snapkv+int4``.
    budgets : shares of the default cache's bytes, above 0 and up to 1.
    config : of the model.
    tokens : of the context.
    dtype : of the cache.

    Returns
    -------
    The candidates, and a line for each that cannot hold as little as it was asked to.

    Raises
    ------
    PlanError
        For a name that cannot be read.
    EvaluationError
        For a budget out of bounds, or a name that needs one where there is none.
    """
    for budget in budgets:
        if not 0 < budget <= 1:
            raise EvaluationError(f"budget {budget:g} cannot be used: allowed are shares of the bytes, above 0 to 1")
    found, notes = [Candidate(FULL, None, Plan.of(FULL))], []
    for name in dict.fromkeys(names):
        if name == FULL:
            continue
        if not takes_budget(name):
            found.append(Candidate(Path(name).stem if is_file(name) else name, None, plan_named(name)))
            continue
        if not budgets:
            raise EvaluationError(f"plan {name!r} needs a budget: name budgets, or write {name}:25%")
        for budget in budgets:
            plan = within(name, budget, config, tokens, dtype)
            if plan is None:
                notes.append(f"{name} cannot hold as little as {budget:.0%} of the bytes, and was left out there")
            else:
                found.append(Candidate(name, budget, plan))
    if twice := {one.name for one in found if sum(other.key == one.key for other in found) > 1}:
        raise EvaluationError(f"two plan files are called {', '.join(sorted(twice))}: allowed are files of other names")
    return found, notes


def is_file(name: str) -> bool:
    """Whether a plan's name is that of a file."""
    return name.endswith((".yaml", ".yml", ".json"))


def plan_named(name: str) -> Plan:
    """A plan from a preset, a plan file or an option's name."""
    if is_file(name) or ("+" not in name and name.partition(":")[0] in presets.NAMES):
        return Plan.of(name)
    return Plan(name=name, layers=[option(name).entry])


def within(name: str, budget: float, config: PretrainedConfig, tokens: int, dtype: torch.dtype) -> Plan | None:
    """The plan of a policy that keeps the most tokens and holds no more than a share of the default cache's bytes.

    Parameters
    ----------
    name : an eviction preset, or one and a packed form such as ``snapkv+int4``.
    budget : the share.
    config, tokens, dtype : as for :func:`candidates`.
    """
    policy, plus, form = name.partition("+")
    low, high, best = 1, tokens, None
    while low <= high:
        kept = (low + high) // 2
        share = f"{100 * kept / tokens:.6g}%"
        plan = plan_named(f"{policy}:{share}{plus}{form}")
        if _share(plan, config, tokens, dtype) <= budget:
            low, best = kept + 1, plan
        else:
            high = kept - 1
    return best


def _share(plan: Plan, config: PretrainedConfig, tokens: int, dtype: torch.dtype) -> float:
    try:
        found = estimate(config, plan, tokens, dtype)
    except PlanError:
        return 0.0  # too few tokens to be a plan: the search goes up
    return found.bytes_held / found.bytes_default
