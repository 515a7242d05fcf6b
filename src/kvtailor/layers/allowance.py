"""How many tokens a row may hold: from a plan's budget, the policy and what a token costs."""

from __future__ import annotations

from dataclasses import dataclass

from kvtailor.errors import PlanError
from kvtailor.layers.base import Place
from kvtailor.plan import Keep
from kvtailor.policies.base import Policy


@dataclass(frozen=True)
class Costs:
    """Bytes that one layer's row takes.

    Attributes
    ----------
    token : of one token in all KV heads.
    fixed : of what does not grow with tokens.
    undroppable : tokens that the layer's form holds whatever the policy says.
    """

    token: float
    fixed: int = 0
    undroppable: int = 0


@dataclass(frozen=True)
class Allowance:
    """The budget of one layer.

    Attributes
    ----------
    keep : the plan's choice.
    policy : the policy that it names.
    place : where the layer stands.
    """

    keep: Keep
    policy: Policy
    place: Place

    @property
    def protected(self) -> int:
        """Tokens that are never evicted."""
        return self.keep.sinks + max(self.keep.recent, self.policy.recent)

    def capacity(self, prompt: int, rows: int, costs: Costs) -> int:
        """Tokens per KV head that a row may hold.

        Parameters
        ----------
        prompt : tokens of the row's prompt, for fractions.
        rows : sequences that share a budget in bytes.
        costs : of this layer's rows; all layers of the entry cost the same.

        Raises
        ------
        PlanError
            If a budget in bytes is below the tokens that are never dropped.
        """
        assert self.keep.budget is not None
        least = max(self.protected, costs.undroppable) + 1
        average = self.keep.budget.tokens(prompt, 1)
        if self.keep.budget.kind == "bytes":
            shares = rows * self.place.peers
            average = int((self.keep.budget.amount / shares - costs.fixed) // costs.token)
            if average < least:
                enough = int((costs.token * least + costs.fixed) * shares) + 1
                raise PlanError(
                    f"budget {self.keep.budget} holds {max(average, 0)} tokens per head in {self.place.peers} layers "
                    f"and {rows} sequences, and {least - 1} are never dropped; allowed is {enough} bytes or more"
                )
        average = max(average, least)
        layers = self.policy.layer_capacities(average, prompt, self.place.peers, least - 1)
        return layers[self.place.rank]

    def recent(self, capacity: int, target: int) -> int:
        """Newest tokens to protect when a row of ``capacity`` is brought to ``target`` tokens."""
        return max(0, min(max(self.keep.recent, self.policy.recent_within(capacity)), target - self.keep.sinks))
