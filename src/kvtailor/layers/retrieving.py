"""A layer whose tokens live in slow memory; each decode step reads back those that matter to its query."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from kvtailor.formats import GROUP_TOKENS
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
        self._staged: list[Staged | None] = []

    def check_sizes(self) -> None:
        """Raise PlanError if the index cannot hold heads of these sizes."""
        index_class(self.find.index).from_options(self.find.options).check_dim(self.dims[0])

    def new_row(self, key: torch.Tensor, value: torch.Tensor) -> FarRow:
        """An empty row with an empty index."""
        tier: Tier = "disk" if self.plan.tier == "disk" else "host"
        index = index_class(self.find.index).from_options(self.find.options)
        kind = PinnedTokens if serves(tier, key.device) else FarTokens
        far = kind(self.heads, self.dims, key, index, tier, self.plan.folder)
        return FarRow(key, value, self.path is not None, far)

    def make_room(self, count: int) -> None:
        """Move whole blocks of the oldest tokens in fast memory away: the first time all but sinks and newest."""
        sinks, recent = self.find.sinks, self.find.recent
        for row in self.rows:
            if sinks and not row.segments:
                if row.tail.longest < sinks + recent + GROUP_TOKENS:
                    continue
                row.seal(sinks, lambda keys, values: (keys.clone(), values.clone()))
            blocks = (row.tail.longest - recent) // GROUP_TOKENS
            if blocks > 0:
                row.move(blocks * GROUP_TOKENS, self.path)
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
        try:
            query = ask()
        except Exception:  # a module that cannot be asked is served as if nobody had
            query = None
        if query is None:
            self.ahead.stats.failed += 1
            return []
        grouped = query.reshape(len(self.rows), self.heads, -1, query.shape[-1])
        scale = query.shape[-1] ** -0.5
        return [
            read(row.far, self._chosen(row, one, scale).flatten(0, -2)) if row.far.length else None
            for row, one in zip(self.rows, grouped, strict=True)
        ]

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, stock: Stock, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of ``query`` over what is held and what has just come."""
        self._staged = self.ahead.take()  # before tokens move
        return super().attend(module, query, mask, stock, **given)

    def roll_back(self, seen: int) -> None:
        """Return to ``seen`` tokens after a pass that failed, once what it had begun to read is there."""
        with suppress(Exception):
            self.ahead.take()
        super().roll_back(seen)

    def handed(self, row: Row) -> native.Row:
        """Everything, for the queries that read everything."""
        assert isinstance(row, FarRow)
        return row.handed_whole()

    def _attend_rows(self, query: torch.Tensor, call: Call) -> torch.Tensor:
        if query.shape[2] > 1 or self.step.prompt:
            return super()._attend_rows(query, call)
        grouped = query.view(len(self.rows), self.heads, -1, query.shape[-1])  # (B, Hkv, G, D)
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
