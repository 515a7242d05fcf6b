"""Layers that hold each sequence on its own, so that padding is never stored and rows may differ in length."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvtailor.errors import CacheError
from kvtailor.kernels import native
from kvtailor.layers import by_parts
from kvtailor.layers.base import Place, Step, Stock, TailoredLayer, batch_indices
from kvtailor.layers.call import Call
from kvtailor.layers.row import Part, Row
from kvtailor.plan import LayerPlan


@dataclass
class Observation:
    """Queries that the layer has yet to look at.

    Attributes
    ----------
    query : (B, Hq, q, Dk).
    call : how their logits are weighed.
    real : per row, the places of queries that are no padding.
    """

    query: torch.Tensor
    call: Call
    real: list[torch.Tensor]

    def first(self, count: int) -> Observation:
        """The same for the first ``count`` queries."""
        return Observation(self.query[:, :, :count], self.call, [real[real < count] for real in self.real])


class RowsLayer(TailoredLayer):
    """Base of the layers that drop or pack tokens.

    A pass comes in two calls: ``update`` takes the new keys and values and hands out a stand-in that leads back here;
    ``attend`` makes room, adds them, attends, and observes. Room for a token is made when the next one comes, except at
    the end of a prompt, where nothing can be taken back any more.
    """

    def __init__(self, plan: LayerPlan, place: Place, step: Step) -> None:
        super().__init__(plan, place, step)
        self.rows: list[Row] = []
        self.incoming: tuple[torch.Tensor, torch.Tensor] | None = None
        self.unobserved: Observation | None = None
        self._shapes: list[tuple[int, ...]] = []  # of the rows when their bytes were last counted
        self.prompt_ended = False  # a prompt came to its end and room was not made since

    # What a subclass decides.

    marked = False

    @abstractmethod
    def make_room(self, count: int) -> None:
        """Drop or pack what must go before ``count`` tokens come."""

    @property
    def is_watching(self) -> bool:
        """Whether queries are to be observed at all."""
        return False

    def observe(self, observation: Observation) -> None:
        """Look at queries once their keys are held."""

    def visible_parts(self, row: Row) -> list[Part]:
        """What a query attends to."""
        return list(row.parts())

    # One pass.

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take dtype, device and sizes from the first keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.dims = key_states.shape[-1], value_states.shape[-1]
        self.heads = key_states.shape[1]
        self.path = native.path_for(self.device, self.dtype, self.dims)
        self.check_sizes()
        self.rows = [self.new_row(key_states[0], value_states[0]) for _ in range(key_states.shape[0])]
        self._zero = torch.zeros(1, dtype=self.dtype, device=self.device)
        self.is_initialized = True

    def check_sizes(self) -> None:
        """Raise PlanError if the plan cannot hold heads of these sizes."""

    def new_row(self, key: torch.Tensor, value: torch.Tensor) -> Row:
        """An empty row for keys and values like these, (Hkv, n, D)."""
        return Row(key, value, self.marked, self.path is not None)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens, (B, Hkv, n, D); returns stand-ins that lead the attention function here."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_batch(key_states, len(self.rows), self.heads)
        if self.incoming is not None:
            raise CacheError(
                f"{self.place} changes its keys between cache and attention, so its KV cannot be tailored; "
                "leave it whole in the plan"
            )
        key_states, value_states = key_states.detach(), value_states.detach()
        if not self.step.active:
            return self._update_unattended(key_states, value_states)
        self.incoming = key_states, value_states
        self.seen += key_states.shape[2]
        return self._stand_ins()

    def _update_unattended(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise CacheError(
            f"{self.place} drops tokens, and the attention that goes with it is not active: run the model inside "
            "kvtailor.attach(model, plan)"
        )

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, stock: Stock, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of ``query`` over what is held and what has just come."""
        self._check_mask(mask)
        call = Call.of(module, query, mask, self.seen - query.shape[2], self.place.cross, **given)
        self.query_heads = query.shape[1]
        if self.incoming is None:
            return self._attend_again(module, query, call)
        (key, value), self.incoming = self.incoming, None
        real = self._real_tokens(key.shape[2], mask)
        with self.step.timing("room_seconds"):
            self.prepare()
            self.make_room(key.shape[2])
        fresh = self.seen == key.shape[2]
        with self.step.timing("attention_seconds"):
            # While nothing is held the new tokens are all there is: Transformers' own attention is exact on them.
            output = self.attend_prompt(stock, module, query, key, value, mask, **given) if fresh else None
            self._add(key, value, real)
            del key, value
            self.account()
            if output is None:
                output = self._attend_rows(query, call), None
        with self.step.timing("room_seconds"):
            self._finish(Observation(query.detach(), call, self._real_queries(query.shape[2], real)))
        return output

    def _attend_again(self, module: nn.Module, query: torch.Tensor, call: Call) -> tuple[torch.Tensor, None]:
        # A later layer that shares these keys, or cross attention after its first step.
        with self.step.timing("room_seconds"):
            if self.place.cross:
                self.prepare()
                self.make_room(0)
        with self.step.timing("attention_seconds"):
            output = self._attend_rows(query, call)
        if self.place.cross:
            every = torch.arange(query.shape[2], device=query.device)
            with self.step.timing("room_seconds"):
                self._finish(Observation(query.detach(), call, [every] * len(self.rows)))
        return output, None

    def _check_mask(self, mask: torch.Tensor | None) -> None:
        if mask is not None and mask.shape[-1] != self.seen:
            raise CacheError(f"{self.place}: the mask has {mask.shape[-1]} columns, and {self.seen} tokens were seen")

    def _real_tokens(self, count: int, mask: torch.Tensor | None) -> list[torch.Tensor]:
        """Per row, the places among ``count`` new tokens that are no padding."""
        every = torch.arange(count, device=self.device)
        if mask is None:
            return [every] * len(self.rows)
        seen = mask[:, 0, :, -count:]  # (B or 1, q, n)
        own = seen[:, 0] if self.place.cross or seen.shape[1] != count else seen.diagonal(dim1=1, dim2=2)
        shown = own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
        return [every[shown[row if shown.shape[0] > 1 else 0]] for row in range(len(self.rows))]

    def _real_queries(self, count: int, real: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.arange(count, device=self.device)] * len(self.rows) if self.place.cross else real

    def _add(self, key: torch.Tensor, value: torch.Tensor, real: list[torch.Tensor]) -> None:
        first = self.seen - key.shape[2]
        for number, (row, places) in enumerate(zip(self.rows, real, strict=True)):
            row_key, row_value = key[number], value[number]
            if len(places) < key.shape[2]:
                row_key, row_value = row_key[:, places], row_value[:, places]
            if row.total == 0 and len(places):
                row.first = first + int(places[0])
            slots = range(first, self.seen) if len(places) == key.shape[2] else first + places
            row.tail.append(row_key, row_value, slots, self.first_marks(first + places) if self.marked else 0.0)
            row.total += len(places)
            if self.step.prompt or self.place.cross:
                padding = self.seen - row.total
                row.prompt = max(row.total, (0 if self.place.cross else self.step.expected) - padding)

    def first_marks(self, slots: torch.Tensor) -> torch.Tensor | float:
        """Marks of new tokens at ``slots``."""
        return 0.0

    def _attend_rows(self, query: torch.Tensor, call: Call) -> torch.Tensor:
        batch, query_heads, count, dim = query.shape
        if self.native_path is not None and self._suits_native(query):
            return self._attend_natively(self.native_path, query, call)
        grouped = query.view(batch, self.heads, query_heads // self.heads, count, dim)
        rows = [self._attend_row(row, grouped[number], call, number) for number, row in enumerate(self.rows)]
        out = torch.stack(rows).to(query.dtype)  # (B, Hkv, G, q, Dv)
        return out.view(batch, query_heads, count, -1).transpose(1, 2).contiguous()

    def _attend_row(self, row: Row, query: torch.Tensor, call: Call, index: int) -> torch.Tensor:
        parts = self.visible_parts(row)
        if by_parts.serves(query, call, parts):
            return by_parts.attend_by_parts(query, call, index, parts, self.dims[1])
        return row.attend(query, call, index, parts)

    @property
    def native_path(self) -> str | None:
        """The C++ kernels that serve this layer, or None."""
        return self.path if self.is_arranged else None

    def _suits_native(self, query: torch.Tensor) -> bool:
        if query.requires_grad and torch.is_grad_enabled():
            return False
        few = query.shape[1] // self.heads * query.shape[2] <= native.MOST_ROWS
        packed = [segment.is_packed for row in self.rows for segment in row.segments]
        return few or any(packed)

    @property
    def is_arranged(self) -> bool:
        """Whether what is held can be handed to the C++ kernels."""
        return True

    def handed(self, row: Row) -> native.Row:
        """What a query attends to, as the C++ kernels take it."""
        return row.handed()

    def _attend_natively(self, path: str, query: torch.Tensor, call: Call) -> torch.Tensor:
        batch, query_heads, count, _ = query.shape
        out = query.new_empty(batch, count, query_heads, self.dims[1])
        rows = [self.handed(row) for row in self.rows]
        native.attend(
            path,
            rows,
            query.detach(),
            out.transpose(1, 2),
            call.weighing(),
            call.sinks,
            precision=self.plan.form.precision,
        )
        return out

    def _finish(self, observation: Observation) -> None:
        self.prompt_ended = self.prompt_ended or (self.step.last and (self.step.prompt or self.place.cross))
        self.unobserved = observation if self.is_watching else None
        # A crop reaches no further back than the pass that ends the prompt.
        if (self.step.recording and self.step.last) or self.place.shared:
            return
        self.prepare()
        if self.step.prompt or self.place.cross:
            self.make_room(0)
            self.account()

    def prepare(self) -> None:
        """Observe the queries that were put off."""
        if self.unobserved is not None:
            observation, self.unobserved = self.unobserved, None
            with torch.no_grad():
                self.observe(observation)

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._stand_ins() if self.step.active else self._dense()

    def _stand_ins(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors of the logical sizes that take no memory and lead the attention function here."""
        shape = len(self.rows), self.heads, self.seen
        key, value = (self._zero.expand(*shape, dim) for dim in self.dims)
        return self.handled(key), value

    def _dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        raise CacheError(
            f"{self.place} has dropped tokens, so it has no keys and values of the full length; run the model inside "
            "kvtailor.attach(model, plan)"
        )

    # Operations on sequences.

    def forget(self, count: int) -> None:
        """Remove the newest ``count`` tokens."""
        if self.unobserved is not None:
            self.unobserved = self.unobserved.first(self.unobserved.query.shape[2] - count)
        self.seen -= count
        self.prepare()
        for row in self.rows:
            row.crop(self.seen)

    def roll_back(self, seen: int) -> None:
        """Return to ``seen`` tokens after a pass that failed; what made room for it stays dropped."""
        super().roll_back(seen)
        self.incoming, self.unobserved = None, None
        for row in self.rows:
            row.crop(seen)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens; then do what waited for the crop."""
        super().crop(tokens_to_remove)
        self.prepare()

    def reset(self) -> None:
        """Forget everything."""
        self.rows, self.seen, self.is_initialized, self._shapes = [], 0, False, []
        self.incoming, self.unobserved, self.prompt_ended = None, None, False

    def _select(self, rows: list[int]) -> None:
        self.prepare()
        used: set[int] = set()
        chosen = []
        for number in rows:
            chosen.append(self.rows[number].copy() if number in used else self.rows[number])
            used.add(number)
        self.rows = chosen

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put sequence ``beam_idx[i]`` at place ``i``."""
        if self.is_initialized:
            self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times."""
        if self.is_initialized:
            self._select([number for number in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences at ``indices``."""
        if self.is_initialized:
            self._select(batch_indices(indices, len(self.rows), self.device).tolist())

    # Accounts.

    def account(self) -> None:
        """Bring the cache's running total up to date, where what is held has changed its size."""
        shapes = [row.shape for row in self.rows]
        if shapes != self._shapes or self.unobserved is not None:
            super().account()
            self._shapes = shapes

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything the rows hold, and queries not yet observed."""
        if self.is_initialized:
            yield "keys", self._zero
        for row in self.rows:
            yield from row.tensors()
        if self.unobserved is not None:
            yield "queries", self.unobserved.query

    @property
    def kept_by_head(self) -> list[float]:
        """Tokens held by each KV head, mean over sequences."""
        return [sum(lengths) / len(lengths) for lengths in zip(*(row.lengths for row in self.rows), strict=True)]

    def default_nbytes(self) -> int:
        """Bytes that the default cache would hold for the tokens seen."""
        if not self.is_initialized:
            return 0
        element = torch.empty(0, dtype=self.dtype).element_size()
        return len(self.rows) * self.heads * self.seen * sum(self.dims) * element
