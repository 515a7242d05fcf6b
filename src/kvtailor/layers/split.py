"""A layer whose KV heads are kept in different ways: one part for those that are kept alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import nn

from kvtailor.errors import PlanError
from kvtailor.layers.base import Place, Step, Stock, TailoredLayer
from kvtailor.plan import heads_in_words
from kvtailor.report import ReadStats

Part = tuple[tuple[int, ...], TailoredLayer]
"""KV heads, and the layer that keeps them."""


class SplitLayer(TailoredLayer):
    """Parts of a layer side by side, each of which knows its own heads only.

    Parameters
    ----------
    parts : KV heads and the layer that keeps them; every KV head once.
    place, step : as for any layer; the parts share them.
    """

    def __init__(self, parts: Sequence[Part], place: Place, step: Step) -> None:
        tailored = [layer.plan for _, layer in parts if not layer.plan.is_full]
        super().__init__((tailored or [parts[0][1].plan])[0], place, step)
        self.parts = list(parts)
        self.heads = sum(len(heads) for heads, _ in parts)
        self._order = [head for heads, _ in parts for head in heads]

    @property
    def in_words(self) -> str:
        """How each group of heads is kept."""
        return heads_in_words((heads, layer.in_words) for heads, layer in self.parts)

    @property
    def layers(self) -> list[TailoredLayer]:
        """The parts without their heads."""
        return [layer for _, layer in self.parts]

    @property
    def incoming(self) -> Any:
        """What came and was not attended to, of any part."""
        return next((got for layer in self.layers if (got := getattr(layer, "incoming", None)) is not None), None)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether a crop leaves no trace in any part."""
        return all(layer.is_croppable for layer in self.layers)

    @property
    def prefix_pure(self) -> bool:
        """Whether what every part holds depends on nothing but the tokens before it."""
        return all(layer.prefix_pure for layer in self.layers)

    # One pass.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens, (B, Hkv, n, D); returns keys and values that lead the attention function here."""
        if key_states.shape[1] != self.heads:
            raise PlanError(
                f"{self.place} has {key_states.shape[1]} KV heads, and its plan speaks of {self.heads}: use a plan "
                "whose heads are this model's"
            )
        self.device = key_states.device
        for heads, layer in self.parts:
            layer.update(key_states[:, heads], value_states[:, heads], *args, **kwargs)
        self.seen += key_states.shape[2]
        self.is_initialized = True
        return self._read()

    def take(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Hold tokens that were computed elsewhere, (B, Hkv, n, Dk) and (B, Hkv, n, Dv)."""
        for heads, layer in self.parts:
            layer.take(key[:, heads], value[:, heads])
        self.seen += key.shape[2]
        self.is_initialized = True

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, stock: Stock, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of ``query`` over every part's heads."""
        group = query.shape[1] // self.heads
        outs, weights = [], []
        for heads, layer in self.parts:
            own = _query_heads(heads, group)
            out, weight = layer.attend(
                _asking(module, own), query[:, own], _of_heads(mask, own), stock, **_given(given, own)
            )
            outs.append(out)
            weights.append(weight)
        order = torch.tensor(_query_heads(self._order, group), device=query.device).argsort()
        out = torch.cat(outs, dim=2)[:, :, order]
        told = [weight for weight in weights if weight is not None]
        return out, torch.cat(told, dim=1)[:, order] if len(told) == len(weights) else None

    def read_ahead(
        self,
        executor: ThreadPoolExecutor,
        ask: Callable[[], torch.Tensor | None],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Let every part read ahead that does, by its own heads of the guess."""
        for heads, layer in self.parts:
            layer.read_ahead(executor, partial(self._asked, ask, heads), stream)

    def _asked(self, ask: Callable[[], torch.Tensor | None], heads: tuple[int, ...]) -> torch.Tensor | None:
        query = ask()
        return None if query is None else query[:, _query_heads(heads, query.shape[1] // self.heads)]

    def chunk(self, tokens: int, rows: int) -> int:
        """Most tokens of a prompt that the next pass may bring for the most careful part."""
        return min(layer.chunk(tokens, rows) for layer in self.layers)

    def prepare(self) -> None:
        """Do what was put off."""
        for layer in self.layers:
            layer.prepare()

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.step.active:
            return self._joined([(layer.keys, layer.values) for layer in self.layers])
        key, value = self.layers[0].keys, self.layers[0].values
        shape = key.shape[0], self.heads, self.seen
        return self.handled(key.new_zeros(1).expand(*shape, key.shape[-1])), value.new_zeros(1).expand(
            *shape, value.shape[-1]
        )

    def _joined(self, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.tensor(self._order).argsort().to(parts[0][0].device)
        key, value = (torch.cat(list(those), dim=1)[:, order] for those in zip(*parts, strict=True))
        return key, value

    # Operations on sequences.

    def forget(self, count: int) -> None:
        """Remove the newest ``count`` tokens."""
        for layer in self.layers:
            layer.crop(-count)
        self.seen -= count

    def roll_back(self, seen: int) -> None:
        """Return to ``seen`` tokens after a pass that failed, whichever parts it had reached."""
        super().roll_back(seen)
        for layer in self.layers:
            layer.roll_back(min(seen, layer.seen))

    def reset(self) -> None:
        """Forget everything."""
        for layer in self.layers:
            layer.reset()
        self.seen, self.is_initialized = 0, False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put sequence ``beam_idx[i]`` at place ``i``."""
        for layer in self.layers:
            layer.reorder_cache(beam_idx)  # type: ignore[arg-type]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times."""
        for layer in self.layers:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences at ``indices``."""
        for layer in self.layers:
            layer.batch_select_indices(indices)

    # Accounts.

    def account(self) -> None:
        """Every part counts itself."""
        for layer in self.layers:
            layer.account()

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything the parts hold."""
        for layer in self.layers:
            yield from layer.stored()

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes held in memory by all parts, by kind."""
        sizes: dict[str, int] = {}
        for layer in self.layers:
            for kind, count in layer.bytes_by_kind().items():
                sizes[kind] = sizes.get(kind, 0) + count
        return sizes

    @property
    def bytes_on_disk(self) -> int:
        """Bytes in files."""
        return sum(layer.bytes_on_disk for layer in self.layers)

    @property
    def reads(self) -> ReadStats | None:
        """What reading ahead was good for in the parts that do."""
        told = [layer.reads for layer in self.layers if layer.reads is not None]
        return reduce(add, told) if told else None

    @property
    def kept_by_head(self) -> list[float]:
        """Tokens held by each KV head, mean over sequences."""
        found = {
            head: kept
            for heads, layer in self.parts
            for head, kept in zip(heads, layer.kept_by_head, strict=bool(layer.kept_by_head))
        }
        return [found[head] for head in sorted(found)]

    def default_nbytes(self) -> int:
        """Bytes that the default cache would hold for the tokens seen."""
        return sum(layer.default_nbytes() for layer in self.layers)


def _asking(module: nn.Module, own: list[int]) -> nn.Module:
    """An attention module as it is to some query heads: eager attention reads sinks from the module itself."""
    sinks = module._parameters.get("sinks")
    if sinks is None:
        return module
    some = copy.copy(module)
    some.__dict__["_parameters"] = {**module._parameters, "sinks": sinks[own]}
    return some


def _query_heads(heads: Sequence[int], group: int) -> list[int]:
    """The query heads that read some KV heads."""
    return [head * group + number for head in heads for number in range(group)]


def _of_heads(table: torch.Tensor | None, own: list[int]) -> torch.Tensor | None:
    """A mask or bias (B or 1, Hq or 1, …) for some query heads."""
    return table if table is None or table.shape[1] == 1 else table[:, own]


def _given(given: dict[str, Any], own: list[int]) -> dict[str, Any]:
    """An attention function's keyword arguments for some query heads."""
    sinks, bias = given.get("s_aux"), given.get("position_bias")
    mine = dict(given)
    if sinks is not None:
        mine["s_aux"] = sinks[own]
    if bias is not None:
        mine["position_bias"] = _of_heads(bias, own)
    return mine
