"""One layer under an eviction policy, written as loops over sequences, heads, tokens and queries."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from kvtailor.layers.base import Place, Step
from kvtailor.layers.evicting import EvictingLayer
from kvtailor.plan import Keep, LayerPlan

ALWAYS = ("fifo", "lru", "random", "streaming", "h2o")
DEFAULTS: dict[str, dict[str, Any]] = {
    "fifo": {},
    "streaming": {},
    "keynorm": {},
    "keydiff": {},
    "random": {"seed": 0},
    "lru": {"top": 16},
    "h2o": {"mode": "online", "heavy": 0.5, "window": 32, "normalize": False},
    "snapkv": {"window": 32, "kernel": 5, "pool": "avg", "reduce": "mean"},
    "pyramidkv": {"window": 32, "kernel": 5, "pool": "avg", "reduce": "mean", "beta": 20, "rounding": "exact"},
    "adakv": {"window": 32, "kernel": 5, "pool": "avg", "reduce": "mean", "floor": 0.2},
}


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def hashed_priority(seed: int, layer: int, head: int, slot: int) -> float:
    """The random policy's draw, in whole numbers."""
    state = slot * 0x9E3779B1 + head * 0x85EBCA6B + layer * 0xC2B2AE3D + seed * 0x27D4EB2F
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        state %= 2**32
        state = ((state ^ (state >> shift)) * factor) % 2**32
    return (state >> 8) / 2**24


def pooled(votes: list[float], kernel: int, kind: str) -> list[float]:
    """Pooling with stride 1; an average divides by the kernel's width at the ends too."""
    half, out = kernel // 2, []
    for place in range(len(votes)):
        near = votes[max(0, place - half) : place + half + 1]
        out.append(max(near) if kind == "max" else sum(near) / kernel)
    return out


def pyramid_capacities(average: int, seen: int, layers: int, window: int, beta: int, least: int) -> list[int]:
    """Budgets on a straight line from the first layer to the last, ``layers * average`` tokens in all.

    ``least`` is the smallest number of tokens that the last layer may have beside its window.
    """
    base = average - window
    if seen <= average or layers == 1:
        return [average] * layers
    low = min(float(base), max(base / beta, float(least)))
    top = min(2 * base - low, float(seen - window))
    shares = [top - (2 * top - 2 * base) * layer / (layers - 1) for layer in range(layers)]
    return [count + window for count in largest_remainders(shares, layers * base)]


def largest_remainders(shares: list[float], total: int) -> list[int]:
    whole = [math.floor(share + 1e-9) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: -(shares[i] - whole[i]))
    for index in order[: total - sum(whole)]:
        whole[index] += 1
    return whole


@dataclass
class Token:
    """A token that one head holds."""

    slot: int
    key: np.ndarray
    value: np.ndarray
    mark: float = 0.0


@dataclass
class LoopSequence:
    """One sequence in one layer; settings as in a plan, and ``average`` the budget in tokens."""

    keep: Keep
    heads: int
    group: int
    layer: int = 0
    fixed_capacity: int | None = None  # in place of the budget's tokens
    total: int = 0
    held: list[list[Token]] = field(default_factory=list)
    queries: list[tuple[int, np.ndarray]] = field(default_factory=list)  # (slot, (Hkv, G, D))
    seen: int = 0
    first: int | None = None  # slot of the first token
    prompt: int = 0

    def __post_init__(self) -> None:
        self.held = self.held or [[] for _ in range(self.heads)]
        self.options = {**DEFAULTS[self.keep.policy], **self.keep.options}

    @property
    def acts_always(self) -> bool:
        return self.keep.policy in ALWAYS and self.options.get("mode") != "oneshot"

    @property
    def holds_always(self) -> bool:
        return self.acts_always or self.keep.is_hard

    @property
    def own_recent(self) -> int:
        return self.options["window"] if "window" in self.options and not self.acts_always else 0

    def capacity(self) -> int:
        assert self.keep.budget is not None
        if self.fixed_capacity is not None:
            return self.fixed_capacity
        amount = self.keep.budget.amount
        tokens = (
            int(amount) if self.keep.budget.kind == "tokens" else math.ceil(amount * (self.prompt or self.total) - 1e-9)
        )
        return max(tokens, self.keep.sinks + max(self.keep.recent, self.own_recent) + 1)

    def recent(self, capacity: int, target: int) -> int:
        wanted = max(self.keep.recent, self.own_recent)
        if self.keep.policy == "h2o" and self.acts_always:
            wanted = max(wanted, capacity - int(capacity * self.options["heavy"]))
        return max(0, min(wanted, target - self.keep.sinks))

    def feed(
        self, query: np.ndarray, key: np.ndarray, value: np.ndarray, slots: list[int], seen: int, prompt: bool
    ) -> np.ndarray:
        """One pass of real tokens: query (Hkv, G, n, D), key and value (Hkv, n, D); gives (Hkv, G, n, D)."""
        if self.keep.is_hard or (not prompt and self.acts_always):
            self.make_room(len(slots))
        for head in range(self.heads):
            for place, slot in enumerate(slots):
                mark = float(slot) if self.keep.policy == "lru" else 0.0
                self.held[head].append(Token(slot, key[head, place], value[head, place], mark))
        self.total, self.seen = self.total + len(slots), seen
        self.first = slots[0] if self.first is None else self.first
        if prompt:
            self.prompt = self.total
        out = np.zeros((*query.shape[:3], value.shape[-1]))
        for head in range(self.heads):
            for member in range(self.group):
                for place, slot in enumerate(slots):
                    probs = self.attention(head, query[head, member, place], slot)
                    out[head, member, place] = sum(p * t.value for p, t in zip(probs, self.held[head], strict=True))
                    if prompt or self.holds_always:
                        self.observe(head, probs, slot)
        self.queries += [(slot, query[:, :, place]) for place, slot in enumerate(slots) if prompt or self.holds_always]
        if prompt:
            self.make_room(0)
            self.queries = self.queries if self.holds_always else []
        return out

    def attention(self, head: int, query: np.ndarray, slot: int) -> np.ndarray:
        logits = [t.key @ query / math.sqrt(len(query)) if t.slot <= slot else -np.inf for t in self.held[head]]
        return softmax(np.array(logits))

    def observe(self, head: int, probs: np.ndarray, slot: int) -> None:
        if self.keep.policy == "h2o":
            for token, share in zip(self.held[head], probs, strict=True):
                token.mark += share
        if self.keep.policy == "lru":
            for place in np.argsort(-probs)[: self.options["top"]]:
                if probs[place] > 0:
                    self.held[head][place].mark = max(self.held[head][place].mark, float(slot))

    def make_room(self, coming: int) -> None:
        capacity = self.capacity()
        target = capacity - coming
        if sum(map(len, self.held)) + coming * self.heads <= capacity * self.heads:
            return
        recent = self.recent(capacity, target)
        scores = [self.importance(head) for head in range(self.heads)]
        targets = self.head_targets(scores, target, recent)
        for head in range(self.heads):
            self.held[head] = self.strongest(head, scores[head], targets[head], recent)

    def strongest(self, head: int, scores: list[float], target: int, recent: int) -> list[Token]:
        tokens = self.held[head]
        guarded = {*range(self.keep.sinks), *range(len(tokens) - recent, len(tokens))}
        rank = sorted(range(len(tokens)), key=lambda i: (i in guarded, scores[i], tokens[i].slot), reverse=True)
        return [tokens[i] for i in sorted(rank[:target])]

    def importance(self, head: int) -> list[float]:
        tokens = self.held[head]
        match self.keep.policy:
            case "fifo" | "streaming":
                return [float(t.slot) for t in tokens]
            case "lru":
                return [t.mark for t in tokens]
            case "random":
                return [
                    hashed_priority(self.options["seed"], self.layer, head, t.slot - (self.first or 0)) for t in tokens
                ]
            case "keynorm":
                return [-math.sqrt(sum(x * x for x in t.key)) for t in tokens]
            case "keydiff":
                units = [[x / math.sqrt(sum(y * y for y in t.key)) for x in t.key] for t in tokens]
                mean = [sum(column) for column in zip(*units, strict=True)]
                length = math.sqrt(sum(x * x for x in mean))
                return [-sum(x * y for x, y in zip(unit, mean, strict=True)) / length for unit in units]
            case "h2o":
                return [t.mark / (self.seen - t.slot) if self.options["normalize"] else t.mark for t in tokens]
            case _:
                return self.votes(head)

    def votes(self, head: int) -> list[float]:
        window = self.options["window"]
        newest = self.queries[-window:]
        members = []
        for member in range(self.group):
            rows = [self.attention(head, query[head, member], slot) for slot, query in newest]
            members.append([sum(row[i] for row in rows) / len(rows) for i in range(len(self.held[head]))])
        join = {"mean": lambda x: sum(x) / len(x), "max": max, "sum": sum}[self.options["reduce"]]
        joined = [join(column) for column in zip(*members, strict=True)]
        prefix = max(len(joined) - window, 0)
        votes = pooled(joined[:prefix], self.options["kernel"], self.options["pool"])
        return votes + [math.inf] * (len(joined) - prefix)

    def head_targets(self, scores: list[list[float]], target: int, recent: int) -> list[int]:
        if self.keep.policy != "adakv":
            return [target] * self.heads
        base, floor = target - recent, self.options["floor"]
        rooms = [len(tokens) - recent for tokens in self.held]
        entries = []
        for head in range(self.heads):
            for place in range(rooms[head]):
                entries.append((math.inf if place < self.keep.sinks else scores[head][place], -head, head))
        winners = [head for _, _, head in sorted(entries, reverse=True)[: self.heads * base]]
        shares = [winners.count(head) * (1 - floor) + floor * base for head in range(self.heads)]
        counts = largest_remainders(shares, self.heads * base)
        fitted = [min(count, room) for count, room in zip(counts, rooms, strict=True)]
        for head in sorted(range(self.heads), key=lambda h: -fitted[h]):
            fitted[head] += min(sum(counts) - sum(fitted), rooms[head] - fitted[head])
        return [count + recent for count in fitted]

    def kept(self) -> list[list[int]]:
        return [[token.slot for token in tokens] for tokens in self.held]


def exact_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention as a model's own, (B, q, Hq, Dv); a query that sees nothing gives anything but NaN."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    logits = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(~mask, torch.finfo(query.dtype).min)
    return (logits.softmax(-1) @ value).transpose(1, 2), None


class DrivenLayer:
    """A real layer fed as the cache feeds it, beside one loop-written sequence per row."""

    def __init__(
        self, keep: Keep, rows: int, heads: int, group: int, dim: int = 8, seed: int = 0,
        place: Place | None = None, capacity: int | None = None,
    ) -> None:  # fmt: skip
        place = place or Place(index=0)
        self.step = Step()
        self.layer = EvictingLayer(LayerPlan(keep=keep), place, self.step)
        self.loops = [LoopSequence(keep, heads, group, place.index, capacity) for _ in range(rows)]
        self.rows, self.heads, self.group, self.dim = rows, heads, group, dim
        self.generator = torch.Generator().manual_seed(seed)
        self.shown = torch.zeros(rows, 0, dtype=torch.bool)  # which slots hold real tokens

    def random(self, heads: int, count: int) -> torch.Tensor:
        return torch.randn(self.rows, heads, count, self.dim, generator=self.generator)

    def feed(self, count: int, shown: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of random tokens; gives the layer's and the loops' output, (B, Hq, q, D), zero for padding."""
        query, key, value = (
            2 * self.random(self.heads * self.group, count),
            self.random(self.heads, count),
            self.random(self.heads, count),
        )
        return self.feed_tensors(query, key, value, shown)

    def feed_tensors(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shown: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = key.shape[2]
        shown = torch.ones(self.rows, count, dtype=torch.bool) if shown is None else shown
        first = self.shown.shape[1]
        self.shown = torch.cat([self.shown, shown], dim=1)
        out = self._layer_pass(query, key, value, first)
        expected = torch.zeros_like(out)
        for row, loop in enumerate(self.loops):
            real = shown[row].nonzero().flatten()
            q = query[row].view(self.heads, self.group, count, -1)[:, :, real].double().numpy()
            k, v = (x[row][:, real].double().numpy() for x in (key, value))
            slots = [first + int(place) for place in real]
            result = torch.from_numpy(loop.feed(q, k, v, slots, first + count, count > 1))
            expected[row][:, real] = result.flatten(0, 1).float()
            hidden = (~shown[row]).nonzero().flatten()
            out[row][:, hidden] = 0
        return out, expected

    def _layer_pass(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int) -> torch.Tensor:
        count = key.shape[2]
        self.step.active, self.step.last, self.step.prompt = True, True, count > 1
        self.step.expected = first + count if count > 1 else 0
        self.layer.update(key, value)
        mask = None
        if not bool(self.shown.all()):
            causal = torch.ones(count, first + count, dtype=torch.bool).tril(first)
            mask = causal & self.shown[:, None, None, :]
        out, _ = self.layer.attend(nn.Module(), query, mask, exact_attention)
        self.step.active, self.step.expected = False, 0
        return out.transpose(1, 2).clone()

    def kept(self) -> list[list[list[int]]]:
        """Slots that each row's heads hold."""
        rows = []
        for row in self.layer.rows:
            rows.append([row.tail.positions[row.tail.run(head)].tolist() for head in range(self.heads)])
        return rows
