"""One attention call: how logits are weighed, whatever the layer stores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from kvtailor.kernels.native import Weighing


@dataclass(frozen=True)
class Call:
    """What an attention call asks for besides query, keys and values.

    Attributes
    ----------
    scale : factor on the logits.
    softcap : logits become ``softcap * tanh(logits / softcap)`` (Gemma 2), or None.
    sinks : (Hq,) logits that take part in the softmax and carry no value (gpt-oss), or None.
    window : a query sees only this many newest slots, itself included; None for all. Used where there is no mask.
    mask : (B or 1, Hq or 1, q, slots), boolean (True: visible) or additive, over all slots seen; None: by position.
    bias : (1 or B, Hq, q, slots) added to the logits (T5), or None.
    causal : whether a query sees no slot after its own. Used where there is no mask.
    first : slot of the first query.
    count : queries of the call.
    """

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    window: int | None
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    causal: bool
    first: int
    count: int = 1

    @classmethod
    def of(
        cls, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, first: int, cross: bool, **given: Any
    ) -> Call:
        """Read a call from the arguments that Transformers hands to an attention function.

        Parameters
        ----------
        module : the attention module.
        query : (B, Hq, q, Dk).
        mask : as given, or None.
        first : slot of the first query.
        cross : whether this is cross attention, where no order holds.
        given : the function's keyword arguments.
        """
        scaling = given.get("scaling")
        causal = given.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", True)
        return cls(
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=given.get("softcap"),
            sinks=given.get("s_aux"),
            window=None if cross else given.get("sliding_window"),
            mask=mask,
            bias=given.get("position_bias"),
            causal=bool(causal) and not cross,
            first=first,
            count=query.shape[2],
        )

    def of_heads(self, heads: slice) -> Call:
        """The same call for some of the query heads."""
        mask = self.mask if self.mask is None or self.mask.shape[1] == 1 else self.mask[:, heads]
        return replace(self, mask=mask, bias=None if self.bias is None else self.bias[:, heads])

    def of_row(self, row: int, real: torch.Tensor) -> Call:
        """The same call for one sequence of the batch and some of its queries.

        Parameters
        ----------
        row : sequence in the batch.
        real : (n,) ascending places of the queries; without a mask they follow each other.
        """
        mask, bias = (
            None if table is None else _one_row(table, row)[:, :, real if table.shape[2] > 1 else slice(None)]
            for table in (self.mask, self.bias)
        )
        return replace(self, mask=mask, bias=bias, first=self.first + int(real[0]), count=len(real))

    def weigh(self, logits: torch.Tensor, positions: torch.Tensor, row: int, start: int) -> torch.Tensor:
        """Turn raw products of query and key into logits, with -inf where a query must not look.

        Parameters
        ----------
        logits : (h, G, q, n) float32, changed in place where it can be.
        positions : (n,) or (h, n) slots of the keys.
        row : sequence in the batch.
        start : index of the first of these queries within the call.
        """
        logits = logits.mul_(self.scale)
        if self.softcap is not None:
            logits = torch.tanh(logits.div_(self.softcap)).mul_(self.softcap)
        if self.bias is not None:
            logits = logits + _columns(self.bias, row, start, positions, logits.shape)
        if self.mask is not None and self.mask.dtype != torch.bool:
            added = _columns(self.mask, row, start, positions, logits.shape)
            return (logits + added).masked_fill_(added <= torch.finfo(added.dtype).min / 2, -torch.inf)
        visible = self.visible(logits.shape, positions, row, start)
        return logits if visible is None else logits.masked_fill_(~visible, -torch.inf)

    def beside_sinks(self, probs: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """What attention sinks leave of probabilities, or of anything weighted by them.

        Parameters
        ----------
        probs : (Hkv, G, q, …) normalised without the sinks.
        lse : (Hkv, G, q) their log-sum-exp.
        """
        if self.sinks is None:
            return probs
        return probs * torch.sigmoid(lse - self.sinks.float().view(*lse.shape[:2], 1))[..., None]

    def weighing(self) -> Weighing:
        """The same for the C++ kernels; sinks go beside it."""
        by_position = self.mask is None
        mask, bias = self.mask, None if self.bias is None else self.bias.float()
        if mask is not None and mask.dtype != torch.bool:
            hidden = mask <= torch.finfo(mask.dtype).min / 2
            added = mask.float().masked_fill(hidden, -torch.inf)
            mask, bias = None, added if bias is None else bias + added
        return Weighing(
            self.scale,
            self.softcap or 0.0,
            causal=by_position and self.causal and (self.count > 1 or self.window is not None),
            window=(self.window or 0) if by_position and self.causal else 0,
            first=self.first,
            mask=mask,
            bias=bias,
        )

    @property
    def only_hides(self) -> bool:
        """Whether logits are scaled and hidden and nothing else happens to them."""
        plain = self.softcap is None and self.sinks is None and self.bias is None
        return plain and (self.mask is None or self.mask.dtype == torch.bool)

    def visible(self, shape: torch.Size, positions: torch.Tensor, row: int, start: int) -> torch.Tensor | None:
        """What each query sees by a boolean mask or by position, broadcastable to ``shape``; None for everything.

        Parameters
        ----------
        shape : (h, G, q, n) of the logits.
        positions, row, start : as for :meth:`weigh`.
        """
        if self.mask is not None:
            return _columns(self.mask, row, start, positions, shape)
        queries = shape[2]
        if not self.causal or (self.count == 1 and self.window is None):
            return None
        slot = self.first + start + torch.arange(queries, device=positions.device)[:, None]  # (q, 1)
        key = positions if positions.dim() == 1 else positions[:, None, None, :]
        seen = key <= slot
        return seen if self.window is None else seen & (key > slot - self.window)


def _one_row(table: torch.Tensor, row: int) -> torch.Tensor:
    return table[row : row + 1] if table.shape[0] > 1 else table


def _columns(table: torch.Tensor, row: int, start: int, positions: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Rows and columns of a mask or bias for logits of ``shape`` (h, G, q, n), broadcastable to it."""
    queries = shape[2]
    table = table[row if table.shape[0] > 1 else 0]  # (1 or Hq, q or 1, slots)
    table = table[:, start : start + queries] if table.shape[1] > 1 else table
    if positions.dim() == 1:
        picked = table[..., positions][:, None]  # (1 or Hq, 1, q, n)
    else:
        picked = table[:, :, positions].permute(0, 2, 1, 3)  # (1 or Hq, h, q, n)
        if table.shape[0] == 1:
            return picked[0][:, None]  # (h, 1, q, n)
    if table.shape[0] == 1:
        return picked
    return _by_query_head(picked, positions, shape)


def _by_query_head(picked: torch.Tensor, positions: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    heads, group = shape[:2]
    if positions.dim() == 1:  # (Hq, 1, q, n)
        return picked.reshape(heads, group, *picked.shape[2:])
    same = picked.reshape(-1, group, *picked.shape[1:])  # (Hkv, G, h, q, n): head h reads its own positions
    index = torch.arange(heads, device=picked.device)
    return same[index, :, index]
