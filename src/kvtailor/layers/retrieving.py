"""A layer whose tokens live in slow memory; each decode step reads back those that matter to its query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn

from kvtailor.errors import StoreError
from kvtailor.indexes.registry import index_class
from kvtailor.indexes.selection import choose
from kvtailor.kernels import native
from kvtailor.kernels import reference as kernels
from kvtailor.layers.ahead import ReadingAhead, Staged, completed, read
from kvtailor.layers.base import Place, Step, Stock
from kvtailor.layers.call import Call
from kvtailor.layers.far import FarRow, FarTokens
from kvtailor.layers.pinned import PinnedTokens, serves
from kvtailor.layers.row import Row
from kvtailor.layers.whole import WholeLayer
from kvtailor.plan import LayerPlan
from kvtailor.report import ReadStats
from kvtailor.store.pool import Tier


class RetrievingLayer(WholeLayer):
    """Sinks, newest tokens and an index in fast memory, everything else far; exact attention over what is read.

    Prompts, and the few tokens of a speculative step, read everything. Source: TailorKV, arXiv 2505.19586, section 3.3,
    with indexes of other methods and sliding newest tokens.
    """

    rows: list[FarRow]  # type: ignore[assignment]

    def __init__(self, plan: LayerPlan, place: Place, step: Step) -> None:
        super().__init__(plan, place, step)
        self.find = plan.find
        self.reads_ahead = plan.reads_ahead
        self.ahead = ReadingAhead()
        self._staged: list[Staged | None] = []  # while a step attends
        self._scale: float | None = None  # of the latest pass

    def check_sizes(self) -> None:
        """Raise PlanError if the index cannot hold heads of these sizes."""
        index_class(self.find.index).from_options(self.find.options).check_dim(self.dims[0])

    def new_row(self, key: torch.Tensor, value: torch.Tensor) -> FarRow:
        """An empty row with an empty index."""
        tier: Tier = "disk" if self.plan.tier == "disk" else "host"
        index = index_class(self.find.index).from_options(self.find.options)
        kind = PinnedTokens if serves(tier, key.device) else FarTokens
        far = kind(self.heads, self.dims, key, index, tier, self.plan.folder)
        return FarRow(key, value, self.path is not None, far, self.find.sinks, self.find.recent)

    def make_room(self, count: int) -> None:
        """Move whole blocks of the oldest tokens in fast memory away: the first time all but sinks and newest."""
        self.ahead.drop()  # an index that a guess looks at does not change
        for row in self.rows:
            row.make_room(self.path)
            if self.prompt_ended:
                row.far.learn(self.path)
        self.prompt_ended = False

    def read_ahead(
        self,
        executor: ThreadPoolExecutor,
        ask: Callable[[], torch.Tensor | None],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Let another thread read what the next step is thought to need.

        Parameters
        ----------
        executor : its thread.
        ask : gives a guess at the step's query, (B, Hq, 1, D), or None.
        stream : where a GPU reads, from :func:`kvtailor.layers.side_stream.side_stream`.
        """
        if self.reads_ahead and any(row.far.length for row in self.rows):
            self.ahead.begin(executor, partial(self._guess, ask), stream)

    @torch.no_grad()
    def _guess(self, ask: Callable[[], torch.Tensor | None]) -> list[Staged | None]:
        """Rows read for a guess at the query; none where it cannot be made or is none. StoreError if a file is gone."""
        try:
            if (query := ask()) is not None:
                return [self._read_for(row, one) for row, one in zip(self.rows, self._grouped(query), strict=True)]
        except StoreError:
            raise
        except Exception:  # the step is served as if nobody had been asked
            pass
        self.ahead.stats.failed += 1
        return []

    def _read_for(self, row: FarRow, query: torch.Tensor) -> Staged | None:
        if not row.far.length:
            return None
        scale = query.shape[-1] ** -0.5 if self._scale is None else self._scale
        return read(row.far, self._chosen(row, query, scale).flatten(0, -2))

    def _grouped(self, query: torch.Tensor) -> torch.Tensor:
        """Queries of one token (B, Hq, 1, D) by the KV heads that they read, (B, Hkv, G, D)."""
        return query.reshape(len(self.rows), self.heads, -1, query.shape[-1])

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, stock: Stock, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of ``query`` over what is held and what has just come."""
        self._staged, self._scale = self.ahead.take(), given.get("scaling")  # before tokens move
        try:
            return super().attend(module, query, mask, stock, **given)
        finally:
            self._staged = []

    def account(self) -> None:
        """Bring the cache's running total up to date; rows read ahead count towards its peak while a step has them."""
        super().account()
        staged = sum(tensor.nbytes for one in self._staged if one is not None for tensor in one.tensors)
        self.step.peak = max(self.step.peak, self.step.held + staged)

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything in fast memory, with rows read ahead for a step that has not come."""
        yield from super().stored()
        for one in self.ahead.ready:
            yield from (("positions", one.index), ("keys", one.keys), ("values", one.values))

    # Operations on sequences. What is read ahead is of the tokens before them.

    def forget(self, count: int) -> None:
        """Remove the newest ``count`` tokens."""
        self.ahead.drop()
        super().forget(count)

    def roll_back(self, seen: int) -> None:
        """Return to ``seen`` tokens after a pass that failed."""
        self.ahead.drop()
        super().roll_back(seen)

    def reset(self) -> None:
        """Forget everything."""
        self.ahead.drop()
        super().reset()

    def _select(self, rows: list[int]) -> None:
        self.ahead.drop()
        super()._select(rows)

    def handed(self, row: Row) -> native.Row:
        """Everything, for the queries that read everything."""
        assert isinstance(row, FarRow)
        return row.handed_whole()

    def _attend_rows(self, query: torch.Tensor, call: Call) -> torch.Tensor:
        if query.shape[2] > 1 or self.step.prompt:
            return super()._attend_rows(query, call)
        grouped = self._grouped(query)
        outs = [self._attend_found(row, grouped[number], call, number) for number, row in enumerate(self.rows)]
        return torch.stack(outs).to(query.dtype).view(query.shape[0], 1, query.shape[1], -1)

    def _attend_found(self, row: FarRow, query: torch.Tensor, call: Call, index: int) -> torch.Tensor:
        """Attention of one query per head (Hkv, G, D): (Hkv, G, Dv) float32."""
        if not row.far.length:
            return self._attend_row(row, query[:, :, None], call, index)[:, :, 0]
        chosen = self._chosen(row, query, call.scale)
        native = self.path is not None and not query.requires_grad and self._is_plain(row, call, index)
        if native and not self.reads_ahead:
            found = self._attend_far(query, *row.far.read(), chosen, call)
        else:
            sets = chosen.flatten(0, -2)  # (S, k)
            staged = self._staged[index] if index < len(self._staged) else None
            keys, values = completed(row.far, sets, staged, self.ahead.stats)
            if not native:
                return self._attend_together(row, query, call, index, sets, keys, values)
            every = torch.arange(sets.shape[1]).expand(sets.shape[0], -1)
            found = self._attend_far(query.reshape(sets.shape[0], -1, query.shape[-1]), keys, values, every, call)
        near = self._attend_near(row, query, call)
        out, lse = _merged(*near, *(part.view(*query.shape[:2], *part.shape[2:]) for part in found))
        return call.beside_sinks(out, lse)

    def _chosen(self, row: FarRow, query: torch.Tensor, scale: float) -> torch.Tensor:
        count = self.find.tokens(row.far.length)
        return choose(row.far.index, query, count, self.find.select, scale, self.path)

    def _is_plain(self, row: FarRow, call: Call, index: int) -> bool:
        """Whether logits are scaled, and nothing that the row holds is hidden from the query."""
        if not call.only_hides or call.window is not None:
            return False
        if call.mask is None:
            return True
        shown = call.mask[index if call.mask.shape[0] > 1 else 0, :, 0]  # (1 or Hq, slots)
        return bool(shown[:, row.positions()[0]].all())

    def _attend_near(self, row: FarRow, query: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention (Hkv, G, Dv) over sinks and newest tokens, with its log-sum-exp (Hkv, G)."""
        assert self.path is not None
        heads, group, dim = query.shape
        out, lse = torch.empty(1, heads * group, 1, self.dims[1]), torch.empty(1, heads * group, 1)
        flat = query.detach().reshape(1, heads * group, 1, dim)
        native.attend(self.path, [Row.handed(row)], flat, out, native.Weighing(call.scale), lse=lse)
        return out.view(heads, group, -1), lse.view(heads, group)

    def _attend_far(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over chosen rows, read where they lie, with its log-sum-exp."""
        assert self.path is not None
        out, lse = torch.empty(*query.shape[:2], values.shape[-1]), torch.empty(query.shape[:2])
        native.gather_attend(self.path, query.detach(), keys, values, index, call.scale, out, lse)
        return out, lse

    def _attend_together(
        self,
        row: FarRow,
        query: torch.Tensor,
        call: Call,
        index: int,
        sets: torch.Tensor,
        far_keys: torch.Tensor,
        far_values: torch.Tensor,
    ) -> torch.Tensor:
        """The same in torch, with one softmax; a query head that reads tokens of its own is a KV head of its own."""
        share = sets.shape[0] // self.heads
        asked = query.reshape(sets.shape[0], -1, query.shape[-1])  # (S, query heads, Dk)
        keys, values, slots = [far_keys], [far_values], [row.far.positions.long()[sets]]
        for part in row.near():
            assert isinstance(part.keys, torch.Tensor) and isinstance(part.values, torch.Tensor)
            keys.append(part.keys.repeat_interleave(share, dim=0))
            values.append(part.values.repeat_interleave(share, dim=0))
            slots.append(part.positions.expand(sets.shape[0], -1))
        logits = kernels.scores(asked, torch.cat(keys, dim=1))[:, :, None]  # (S, query heads, 1, n)
        probs, lse = kernels.softmax(call.weigh(logits, torch.cat(slots, dim=1), index, 0))
        out = kernels.weighted_values(probs[:, :, 0], torch.cat(values, dim=1))[:, :, None]
        return call.beside_sinks(out, lse).view(*query.shape[:2], -1)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes held in memory, by kind; what lives on disk is counted by :attr:`bytes_on_disk`."""
        sizes = super().bytes_by_kind()
        host = sum(row.far.pool.nbytes for row in self.rows if row.far.pool.tier == "host")
        return {**sizes, "host": host} if host else sizes

    @property
    def reads(self) -> ReadStats | None:
        """What reading ahead was good for."""
        return self.ahead.stats if self.reads_ahead else None

    @property
    def bytes_on_disk(self) -> int:
        """Bytes in files."""
        return sum(row.far.pool.nbytes for row in self.rows if row.far.pool.tier == "disk")


def _merged(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of tokens (..., D) with log-sum-exps (...), as over both."""
    total = torch.logaddexp(lse, other_lse)
    return out * (lse - total).exp()[..., None] + other * (other_lse - total).exp()[..., None], total
