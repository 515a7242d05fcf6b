"""A layer kept whole: the default cache's content, grown in place instead of copied at every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kvtailor._compat import stock_sdpa
from kvtailor.kernels import native
from kvtailor.layers.base import Stock, TailoredLayer, batch_indices
from kvtailor.layers.call import Call
from kvtailor.layers.tail import whole_blocks


class FullLayer(TailoredLayer):
    """Keys and values of all tokens, padding included, in the model's dtype.

    Prompts are attended by Transformers' own function, and so is everything on the reference kernels: there the output
    is the default cache's to the bit. The C++ kernels attend decode steps, equal to rounding.
    """

    _keys: torch.Tensor  # (B, Hkv, room, Dk)
    _values: torch.Tensor  # (B, Hkv, room, Dv)
    _handed: list[Any] | None = None

    @torch.inference_mode(False)  # what is written in place later must be an ordinary tensor
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take dtype, device and sizes from the first keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads = key_states.shape[:2]
        self._keys = key_states.new_empty(batch, heads, 0, key_states.shape[-1])
        self._values = value_states.new_empty(batch, heads, 0, value_states.shape[-1])
        self.path = native.path_for(self.device, self.dtype, (key_states.shape[-1], value_states.shape[-1]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens; returns all keys and values, (B, Hkv, seen, D)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_batch(key_states, *self._keys.shape[:2])
        seen = self.seen + key_states.shape[2]
        self._reserve(max(seen, self.step.expected if not self.place.cross else 0))
        self._keys[:, :, self.seen : seen] = key_states.detach()
        self._values[:, :, self.seen : seen] = value_states.detach()
        self.seen = seen
        return self._read()

    def take(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Hold tokens that were computed elsewhere, (B, Hkv, n, Dk) and (B, Hkv, n, Dv)."""
        self.update(key, value)

    def _reserve(self, tokens: int) -> None:
        if tokens > self._keys.shape[2]:
            self._handed = None  # it keeps the old arrays alive
            self._keys = self._grown(self._keys, tokens)
            self._values = self._grown(self._values, tokens)
            self.account()

    @torch.inference_mode(False)
    def _grown(self, held: torch.Tensor, tokens: int) -> torch.Tensor:
        batch, heads, _, dim = held.shape
        grown = held.new_zeros(batch, heads, whole_blocks(tokens), dim)
        grown[:, :, : self.seen] = held[:, :, : self.seen]
        return grown

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.handled(self._keys[:, :, : self.seen]), self._values[:, :, : self.seen]

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, stock: Stock, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over everything held."""
        with self.step.timing("attention_seconds"):
            if self.path is not None and self._suits_native(query, stock, given):
                call = Call.of(module, query, mask, self.seen - query.shape[2], self.place.cross, **given)
                return self._attend_natively(self.path, query, call), None
            key, value = self._read()
            if self.seen == query.shape[2]:
                return self.attend_prompt(stock, module, query, key, value, mask, **given)
            return stock(module, query, key, value, mask, **given)

    def _suits_native(self, query: torch.Tensor, stock: Stock, given: dict[str, Any]) -> bool:
        few = query.shape[1] // self._keys.shape[1] * query.shape[2] <= native.MOST_ROWS
        plain = not given.get("output_attentions") and not (query.requires_grad and torch.is_grad_enabled())
        # SDPA passes over sinks, and on older releases over soft caps: so does the default cache under it.
        heard = stock is not stock_sdpa or (given.get("softcap") is None and given.get("s_aux") is None)
        return few and plain and heard and self.seen > query.shape[2]

    def _attend_natively(self, path: str, query: torch.Tensor, call: Call) -> torch.Tensor:
        batch, query_heads, count, _ = query.shape
        out = query.new_empty(batch, count, query_heads, self._values.shape[-1])
        lengths = [self.seen] * self._keys.shape[1]
        rows: list[native.Row] = [([], tail, lengths) for tail in self._tails()]
        native.attend(path, rows, query.detach(), out.transpose(1, 2), call.weighing(), call.sinks)
        return out

    def _tails(self) -> list[Any]:
        """Each sequence's keys and values as the C++ kernels hold them."""
        if self._handed is None:
            _, heads, room, _ = self._keys.shape
            starts, rooms = [head * room for head in range(heads)], [room] * heads
            self._handed = [
                native.hand_tail(keys.flatten(0, 1), values.flatten(0, 1), None, starts, rooms)
                for keys, values in zip(self._keys, self._values, strict=True)
            ]
        return self._handed

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes: it hands its own arrays to the C++ kernels."""
        return {**self.__dict__, "_handed": None}

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Keys and values, room to grow included."""
        if self.is_initialized:
            yield from (("keys", self._keys), ("values", self._values))

    @property
    def kept_by_head(self) -> list[float]:
        """All tokens seen."""
        return [float(self.seen)] * (self._keys.shape[1] if self.is_initialized else 0)

    def default_nbytes(self) -> int:
        """Bytes of the tokens seen."""
        if not self.is_initialized:
            return 0
        return sum(
            t.shape[0] * t.shape[1] * self.seen * t.shape[3] * t.element_size() for t in (self._keys, self._values)
        )

    def forget(self, count: int) -> None:
        """Remove the newest ``count`` tokens."""
        self.seen -= count

    def reset(self) -> None:
        """Forget everything."""
        self.seen = 0
        self.is_initialized = False
        self.__dict__.pop("_keys", None)
        self.__dict__.pop("_values", None)
        self._handed = None

    @torch.inference_mode(False)
    def _select(self, rows: torch.Tensor) -> None:
        self._handed = None
        self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put sequence ``beam_idx[i]`` at place ``i``."""
        if self.is_initialized:
            self._select(beam_idx.to(self.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times."""
        if self.is_initialized:
            self._select(torch.arange(self._keys.shape[0], device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences at ``indices``."""
        if self.is_initialized:
            self._select(batch_indices(indices, self._keys.shape[0], self.device))
