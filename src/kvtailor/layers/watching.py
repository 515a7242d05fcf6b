"""What eviction policies are shown of attention: sums per token, last uses, and the newest queries."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvtailor.kernels import native
from kvtailor.kernels import reference as kernels
from kvtailor.layers.call import Call
from kvtailor.layers.row import LOGITS_AT_ONCE, Row, Window


def add_mass(
    row: Row, query: torch.Tensor, call: Call, index: int, real: torch.Tensor, path: str | None = None
) -> None:
    """Add to each token's mark the attention that it gets, summed over queries and the group. Exact, in blocks.

    Parameters
    ----------
    query : (Hkv, G, q, Dk).
    call, index : as for ``Row.attend``.
    real : places of the queries that are no padding.
    path : the C++ kernels that sum it up, or None.
    """
    marks = row.marks()
    assert marks is not None
    if path is not None:
        marks = marks + _native_mass(path, row, query[:, :, real], call.of_row(index, real), call.sinks).sum(dim=1)
    else:
        for probs, _ in _probabilities(row, query, call, index, real):
            marks = marks + probs.sum(dim=(1, 2))
    row.set_marks(marks)


def note_use(row: Row, query: torch.Tensor, call: Call, index: int, real: torch.Tensor, top: int) -> None:
    """Set the mark of each query's ``top`` most attended tokens to the query's slot.

    Parameters
    ----------
    query, call, index, real : as for :func:`add_mass`.
    """
    marks = row.marks()
    assert marks is not None
    for probs, places in _probabilities(row, query, call, index, real):
        best = probs.topk(min(top, probs.shape[-1]), dim=-1)
        slots = (call.first + places)[None, None, :, None].float().expand_as(best.indices)
        slots = torch.where(best.values > 0, slots, -1.0)
        heads = marks.shape[0]
        marks = marks.scatter_reduce(1, best.indices.reshape(heads, -1), slots.reshape(heads, -1), "amax")
    row.set_marks(marks)


def keep_window(row: Row, query: torch.Tensor, call: Call, real: torch.Tensor, size: int) -> None:
    """Remember the newest ``size`` queries.

    Parameters
    ----------
    query, call, real : as for :func:`add_mass`.
    """
    newest = real[-size:]
    queries, slots = query[:, :, newest], call.first + newest
    if row.window is None:
        row.window = Window(queries[:, :, :0], slots[:0])
    row.window = row.window.add(queries, slots, size)


def window_attention(
    row: Row,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    causal: bool,
    path: str | None = None,
) -> torch.Tensor:
    """Mean attention that each token held gets of the remembered queries, (Hkv, G, n).

    Parameters
    ----------
    scale, softcap, sinks : as in the layer's calls.
    causal : whether a query sees no token after its own.
    path : the C++ kernels that sum it up, or None.
    """
    assert row.window is not None
    count, first = len(row.window.slots), int(row.window.slots[0])
    if path is not None and int(row.window.slots[-1]) - first + 1 == count:
        call = Call(scale, softcap, sinks, None, None, None, causal, first, count)
        return _native_mass(path, row, row.window.queries, call, sinks).div_(count)
    call = Call(scale, softcap, sinks, None, None, None, causal=False, first=0)
    logits = row.logits(row.window.queries, call, 0, 0)
    if causal:
        logits = logits.masked_fill(row.positions()[:, None, None, :] > row.window.slots[:, None], -torch.inf)
    return call.beside_sinks(*kernels.softmax(logits)).mean(dim=2)


def _native_mass(path: str, row: Row, query: torch.Tensor, call: Call, sinks: torch.Tensor | None) -> torch.Tensor:
    """The attention that each token held gets of all queries (Hkv, G, q, Dk): (Hkv, G, n)."""
    flat = query.detach().flatten(0, 1)[None]
    sums = native.mass(path, [row.handed()], flat, call.weighing(), max(row.lengths), sinks)
    return sums.view(*query.shape[:2], -1)


def _probabilities(
    row: Row, query: torch.Tensor, call: Call, index: int, real: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    held = max(row.lengths)
    step = max(1, LOGITS_AT_ONCE // max(1, held * query.shape[0] * query.shape[1]))
    wanted = torch.zeros(query.shape[2], dtype=torch.bool, device=query.device)
    wanted[real] = True
    for start in range(0, query.shape[2], step):
        probs = call.beside_sinks(*kernels.softmax(row.logits(query[:, :, start : start + step], call, index, start)))
        if not wanted[start : start + step].all():
            probs = probs * wanted[start : start + step, None]
        yield probs, torch.arange(start, start + probs.shape[2], device=query.device)
