"""Attention part by part, each in one launch of the Triton kernels, merged by log-sum-exp."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvtailor.kernels import choice
from kvtailor.layers.call import Call
from kvtailor.layers.row import Part
from kvtailor.quantize.hadamard import rotate, unrotate


def serves(query: torch.Tensor, call: Call, parts: list[Part]) -> bool:
    """Whether the environment asks for the Triton kernels, and they know everything that the call asks for.

    Parameters
    ----------
    query, call, parts : as for :func:`attend_by_parts`.
    """
    if choice.active() != "triton" or call.bias is not None or not parts:
        return False
    if call.mask is not None and not _only_hides(call.mask):
        return False
    from kvtailor.kernels.triton.check import can_attend

    return all(
        can_attend(query[part.heads].flatten(1, 2), part.keys, part.values, call.softcap)  # type: ignore[arg-type]
        for part in parts
    )


def _only_hides(mask: torch.Tensor) -> bool:
    if mask.dtype == torch.bool:
        return True
    return bool(((mask == 0) | (mask <= torch.finfo(mask.dtype).min / 2)).all())


def attend_by_parts(query: torch.Tensor, call: Call, index: int, parts: list[Part], value_dim: int) -> torch.Tensor:
    """Attention over all parts as with one softmax.

    Parameters
    ----------
    query : (Hkv, G, q, Dk).
    call, index : as for ``Row.attend``.
    parts : what is attended; all heads, or one.
    value_dim : channels of a value head.

    Returns
    -------
    (Hkv, G, q, Dv) float32; zero for a query that may see nothing.
    """
    from kvtailor.kernels import triton

    if call.mask is not None and call.mask.dtype != torch.bool:
        call = replace(call, mask=call.mask == 0)
    heads, group, count, _ = query.shape
    outs = query.new_zeros(len(parts), heads, group * count, value_dim, dtype=torch.float32)
    lses = query.new_full(outs.shape[:3], -torch.inf, dtype=torch.float32)
    turned = rotate(query) if any(part.rotated for part in parts) else query
    for number, part in enumerate(parts):
        own = (turned if part.rotated else query)[part.heads].flatten(1, 2)
        of_heads = slice(None) if part.is_whole else slice(part.heads.start * group, part.heads.stop * group)
        shape = torch.Size((own.shape[0], group, count, part.length))
        seen = call.of_heads(of_heads).visible(shape, part.positions, index, 0)
        visible = None if seen is None else seen.broadcast_to(shape).flatten(1, 2)
        out, lse = triton.attend(own, part.keys, part.values, call.scale, call.softcap, visible)  # type: ignore[arg-type]
        outs[number, part.heads] = unrotate(out) if part.rotated else out
        lses[number, part.heads] = lse
    out, lse = triton.merge(outs, lses)
    shaped = out.view(heads, group, count, value_dim)
    return call.beside_sinks(shaped, lse.view(heads, group, count))
