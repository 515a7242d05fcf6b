"""What every layer that evicts has: it shows the policy what the policy watches, and knows its budget."""

from __future__ import annotations

from abc import abstractmethod

import torch

from kvtailor.errors import CacheError
from kvtailor.layers.allowance import Allowance, Costs
from kvtailor.layers.base import Place, Step
from kvtailor.layers.call import Call
from kvtailor.layers.row import Row
from kvtailor.layers.rows import Observation, RowsLayer
from kvtailor.layers.watching import add_mass, keep_window, note_use, window_attention
from kvtailor.plan import LayerPlan
from kvtailor.policies.base import Held, Policy
from kvtailor.policies.lru import Lru
from kvtailor.policies.registry import policy_class
from kvtailor.rope import Rotation


class PolicyLayer(RowsLayer):
    """Base of the layers that evict: shows the policy what it watches, and knows the budget.

    Parameters
    ----------
    plan, place, step : as for every layer.
    rotation : turns keys to other positions, for policies that renumber; else None.
    """

    def __init__(self, plan: LayerPlan, place: Place, step: Step, rotation: Rotation | None = None) -> None:
        super().__init__(plan, place, step)
        self.policy: Policy = policy_class(plan.keep.policy).from_options(plan.keep.options)
        self.allowance = Allowance(plan.keep, self.policy, place)
        self.rotation = rotation
        self.marked = self.policy.watches in ("mass", "use")
        self.dropped = False
        # Scale, softcap and sinks of the latest call.
        self.weighing: tuple[float, float | None, torch.Tensor | None] = (1.0, None, None)
        self.watched = 0  # slots whose queries came by; what is coming now is not among them

    @property
    def prefix_pure(self) -> bool:
        """Never: what is held depends on what came later."""
        return False

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether a crop leaves no trace: it does where a token was dropped to make room for what is cropped."""
        return self.step.recording or not self.dropped or not self._holds_always

    @property
    def _holds_always(self) -> bool:
        return self.policy.acts == "always" or self.plan.keep.is_hard

    def first_marks(self, slots: torch.Tensor) -> torch.Tensor | float:
        """A new token counts as used when it comes; it has gathered no attention."""
        return slots.float() if self.policy.watches == "use" else 0.0

    def observe(self, observation: Observation) -> None:
        """Show the queries to the policy."""
        call = observation.call
        self.weighing = call.scale, call.softcap, call.sinks
        self.watched = call.first + observation.query.shape[2]
        batch, query_heads, count, dim = observation.query.shape
        grouped = observation.query.view(batch, self.heads, query_heads // self.heads, count, dim)
        for index, (row, real) in enumerate(zip(self.rows, observation.real, strict=True)):
            if len(real):
                self._watch(row, grouped[index], call, index, real)

    @property
    def is_watching(self) -> bool:
        """Whether the policy watches attention; one that acts on prompts alone is shown prompts alone."""
        needed = self._holds_always or self.step.prompt or self.prompt_ended or self.place.cross
        return needed and self.policy.watches != "nothing"

    def _watch(self, row: Row, query: torch.Tensor, call: Call, index: int, real: torch.Tensor) -> None:
        if self.policy.watches == "mass":
            add_mass(row, query, call, index, real, self.native_path)
        elif isinstance(self.policy, Lru):
            note_use(row, query, call, index, real, self.policy.top)
        else:
            keep_window(row, query, call, real, self.policy.window_size)

    def make_room(self, count: int) -> None:
        """Bring every row to its budget, with ``count`` tokens to come."""
        if self.plan.keep.is_hard:
            coming = count
        elif self.policy.acts == "always" and not self.step.prompt:
            # While a crop may take back what comes, evicting for it would leave a trace.
            coming = 0 if self.step.recording else count
        elif self.prompt_ended:
            coming = 0
        else:
            return
        for row in self.rows:
            if self.policy.watches == "window" and row.window is None:
                continue  # it brought nothing to this prompt, so nothing votes
            capacity = self.allowance.capacity(row.prompt or row.total, len(self.rows), self.costs())
            self._check_fits(capacity, coming)
            if sum(row.lengths) + coming * self.heads > capacity * self.heads:
                self.evict(row, capacity, capacity - coming)
            if not self._holds_always:
                row.window = None
            self.reserve(row, capacity, count)
        self.prompt_ended = False

    def reserve(self, row: Row, capacity: int, count: int) -> None:
        """Prepare the row's storage for ``count`` tokens to come."""

    def _check_fits(self, capacity: int, coming: int) -> None:
        room = capacity - self.allowance.protected
        if coming > room and self.plan.keep.is_hard:
            raise CacheError(
                f"{self.place}: {coming} tokens come at once, and the hard budget {self.plan.keep.budget} has room for "
                f"{room} beside the protected ones; feed the prompt in chunks of {room} or fewer (prefill_chunk)"
            )

    @abstractmethod
    def costs(self) -> Costs:
        """Bytes of a row of this layer."""

    @abstractmethod
    def evict(self, row: Row, capacity: int, target: int) -> None:
        """Bring a row that may hold ``capacity`` tokens per head to ``target``."""

    def chunk(self, tokens: int, rows: int) -> int:
        """A quarter of a hard budget while there is room, an eighth when it is full: less is evicted ahead of need."""
        if not self.plan.keep.is_hard:
            return tokens
        if not self.is_initialized:
            return 1  # sizes, and so the budget in tokens, are known after the first token
        capacity = self.allowance.capacity(tokens, rows, self.costs())
        spare = capacity - max(max(row.lengths) for row in self.rows)
        wanted = capacity // 4 if spare >= capacity // 4 else capacity // 8
        return max(1, min(wanted, self.most_at_once, capacity - self.allowance.protected))

    most_at_once = 512

    def dense_token_bytes(self) -> int:
        """Bytes of one token held exactly, over all KV heads: keys, values, position and mark."""
        element = torch.empty(0, dtype=self.dtype).element_size()
        return self.heads * (sum(self.dims) * element + 4 + (4 if self.marked else 0))

    def window_bytes(self) -> int:
        """Bytes of the queries kept for the policy, with their slots."""
        if self.policy.watches != "window":
            return 0
        element = torch.empty(0, dtype=self.dtype).element_size()
        return self.policy.window_size * (self.query_heads * self.dims[0] * element + 8)

    def held(self, row: Row) -> Held:
        """What the policy sees of a row."""
        weighing = self.weighing
        return Held(
            positions=row.positions(),
            lengths=row.lengths,
            seen=min(self.seen, self.watched),
            first=row.first,
            layer=self.place.index,
            mark=row.marks(),
            keys=row.all_keys,
            window=lambda: window_attention(row, *weighing, causal=not self.place.cross, path=self.native_path),
        )

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.dropped, self.watched = False, 0
