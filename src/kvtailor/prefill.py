"""Feeding a prompt to a decoder in chunks: ids or embeddings, any mask, several kinds of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvtailor.cache import TailoredCache
from kvtailor.errors import CacheError

# Arguments that belong to the whole input, not to a stretch of it.
WHOLE = ("encoder_hidden_states", "encoder_attention_mask", "logits_to_keep")


def run(forward: Callable[..., Any], arguments: dict[str, Any], cache: TailoredCache) -> Any:
    """Run a decoder's forward over an input, in as many passes as the plan asks for.

    Parameters
    ----------
    forward : the decoder's own forward.
    arguments : its arguments by name.
    cache : the cache among them.

    Returns
    -------
    What one pass over the whole input would return, with hidden states joined.

    Raises
    ------
    CacheError
        If the input is empty, or holds an argument that cannot be cut.
    """
    rows, total = _shape(arguments)
    if total == 0:
        raise CacheError("the prompt is empty: allowed are prompts of one token or more")
    seen = cache.get_seq_length()
    # A few tokens that a crop may take back (assisted decoding) are steps, not a prompt.
    if total == 1 or (cache.step.recording and seen):
        with cache.serving(prompt=False):
            return forward(**arguments)
    cache.expect(seen + total)
    outputs, start = [], 0
    try:
        while start < total:
            stop = min(total, start + cache.chunk(seen + total, rows))
            chunk = arguments if stop - start == total else _cut(arguments, start, stop, total, seen)
            with cache.serving(prompt=True, last=stop == total):
                outputs.append(forward(**chunk))
            start = stop
    except BaseException:
        if start:  # a prompt comes whole or not at all
            cache.roll_back(seen)
        raise
    if len(outputs) == 1:
        return outputs[0]
    joined = _join(outputs)
    return joined.to_tuple() if arguments.get("return_dict") is False else joined


def _shape(arguments: dict[str, Any]) -> tuple[int, int]:
    for name in ("inputs_embeds", "input_ids"):
        if arguments.get(name) is not None:
            return arguments[name].shape[0], arguments[name].shape[1]
    raise CacheError("the model was called without input_ids and inputs_embeds")


def _cut(arguments: dict[str, Any], start: int, stop: int, total: int, seen: int) -> dict[str, Any]:
    chunk = {name: _cut_one(name, value, start, stop, total, seen) for name, value in arguments.items()}
    if "return_dict" in chunk:
        chunk["return_dict"] = True
    return chunk


def _cut_one(name: str, value: Any, start: int, stop: int, total: int, seen: int) -> Any:
    several = isinstance(value, list | tuple) and any(isinstance(part, torch.Tensor) for part in value)
    if name in WHOLE or not (several or isinstance(value, torch.Tensor | dict)):
        return value
    if name == "attention_mask":
        return _cut_mask(value, start, stop, total, seen)
    if isinstance(value, torch.Tensor):
        if name in ("position_ids", "cache_position") and value.shape[-1] == total:
            return value[..., start:stop]
        if value.dim() >= 2 and value.shape[1] == total:
            return value[:, start:stop]
    raise CacheError(f"a prompt with {name} cannot be fed in chunks of tokens: leave prefill_chunk out of the plan")


def _cut_mask(mask: Any, start: int, stop: int, total: int, seen: int) -> Any:
    if isinstance(mask, dict):
        return {
            kind: None if part is None else _cut_mask(part, start, stop, total, seen) for kind, part in mask.items()
        }
    if mask.dim() == 2:
        return mask[:, : mask.shape[1] - total + stop]
    shown, ahead = mask[:, :, start:stop, : seen + stop], mask[:, :, start:stop, seen + stop :]
    visible = ahead if ahead.dtype == torch.bool else ahead > torch.finfo(ahead.dtype).min / 2
    if visible.any():
        raise CacheError(
            "the prompt's mask lets tokens see later ones across the end of a chunk (as inside an image): "
            "leave prefill_chunk out of the plan, or choose a larger one"
        )
    return shown


def _join(outputs: list[Any]) -> Any:
    last = outputs[-1]
    last.last_hidden_state = torch.cat([output.last_hidden_state for output in outputs], dim=1)
    if getattr(last, "hidden_states", None) is not None:
        last.hidden_states = tuple(
            torch.cat(states, dim=1) for states in zip(*(o.hidden_states for o in outputs), strict=True)
        )
    for weights in ("attentions", "cross_attentions"):
        if getattr(last, weights, None) is not None:
            setattr(last, weights, None)  # weights of different passes have different widths
    return last
