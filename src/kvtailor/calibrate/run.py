"""Calibration: every option in every layer of a model, on one or more texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvtailor import __version__, _compat
from kvtailor.calibrate.capture import Capture, capture, check_capturable
from kvtailor.calibrate.density import head_density
from kvtailor.calibrate.exact import held_out_attention
from kvtailor.calibrate.measure import errors, step_through
from kvtailor.calibrate.options import Option, options
from kvtailor.calibrate.replay import losses
from kvtailor.calibrate.table import LayerTable, Measurement, Notes, Table, mean_of
from kvtailor.errors import KVTailorError, ModelError
from kvtailor.estimate import length_limit
from kvtailor.identity import identity_of
from kvtailor.kernels.choice import active

WINDOW = 32
"""Newest queries of a prompt that density is measured on."""
HELD_OUT = 24

Progress = Callable[[str], None]


def calibrate(
    model: PreTrainedModel,
    texts: Sequence[torch.Tensor],
    tried: Sequence[Option] | None = None,
    *,
    held_out: int = HELD_OUT,
    heads: bool = False,
    notes: Path | None = None,
    name: str | None = None,
    progress: Progress = lambda words: None,
) -> Table:
    """Measure every option in every layer that can be tailored.

    The last tokens of each text are decode steps behind the rest of it. An option's error is that of its layer's
    attention; its loss is what becomes of the next token's distribution when that layer alone is kept so.

    Parameters
    ----------
    model : a model that goes on with a text, in evaluation mode.
    texts : ids (1, n) each.
    tried : options; default: those of ``options()``.
    held_out : tokens at the end of each text.
    heads : whether to measure what each KV head alone loses too, which a choice head by head needs.
    notes : a folder for measurements as they come, from which a later call with the same model and texts goes on.
    name : what was loaded, for the plan's ``made_for``.
    progress : called with a few words before each layer of each text.

    Raises
    ------
    ModelError
        If the model cannot be calibrated.
    KVTailorError
        If a text is too short or too long, or the notes cannot be read or written.
    PlanError
        If an option does not fit the model's heads.
    """
    chosen = options() if tried is None else list(tried)
    check_capturable(model)
    check_texts(model, texts, held_out)
    identity = identity_of(model)
    dtype = str(model.dtype).removeprefix("torch.")
    key: dict[str, Any] = {
        "model": identity,
        "texts": [text_hash(ids) for ids in texts],
        "held_out": held_out,
        "dtype": dtype,
        "kernels": active(),
        "weights": weights_hash(model),
        "version": __version__,
    }
    kept = Notes.open(notes, key)
    numbers = tailored_layers(model)
    for place, ids in enumerate(texts):
        _measure_text(model, ids, held_out, heads, numbers, chosen, kept, str(place), progress)
    layers = {n: mean_of([kept.layers[f"{place}/{n}"] for place in range(len(texts))]) for n in numbers}
    wanted = [one.name for one in chosen]
    return Table(
        made_for={**identity, "name": name, "date": date.today().isoformat()},
        texts=key["texts"],
        tokens=[ids.shape[1] - held_out for ids in texts],
        held_out=held_out,
        dtype=dtype,
        layers={n: LayerTable(one.density, {w: one.options[w] for w in wanted}) for n, one in layers.items()},
        options={one.name: one for one in chosen},
        bytes_default=_default_bytes(model, texts),
    )


def _measure_text(
    model: PreTrainedModel,
    ids: torch.Tensor,
    held_out: int,
    heads: bool,
    numbers: Sequence[int],
    chosen: Sequence[Option],
    kept: Notes,
    text: str,
    progress: Progress,
) -> None:
    seen: Capture | None = None
    for number in numbers:
        place = f"{text}/{number}"
        progress(f"layer {number}")
        known = kept.known(place, chosen, heads)
        missing = [one for one in chosen if one.name not in known]
        if not missing:
            continue
        seen = seen or capture(model, ids, held_out)
        kept.add(place, layer_density(seen, number), measure_layer(model, seen, number, missing, heads))


def measure_layer(
    model: PreTrainedModel, seen: Capture, number: int, tried: Sequence[Option], heads: bool = False
) -> dict[Option, Measurement]:
    """Measure options in one layer.

    Parameters
    ----------
    model, seen : the model, and what it saw of a text.
    number : the layer.
    tried : options.
    heads : whether to measure each KV head alone too.
    """
    exact = held_out_attention(seen.layers[number], seen.held_out)
    stepped = [step_through(model, seen, number, one.entry) for one in tried]
    outputs = torch.stack([one.outputs.to(exact.device) for one in stepped])
    count = seen.layers[number].keys.shape[1] if heads else 0
    alone = by_head(outputs, exact, count)  # (options * KV heads, held_out, Hq, Dv)
    found = losses(model, seen, number, torch.cat([outputs, alone]))
    return {
        one: Measurement(
            errors=errors(outputs[place], exact),
            loss=found[place],
            bytes_held=stepped[place].bytes_held,
            bytes_fast=stepped[place].bytes_fast,
            head_losses=found[len(tried) + place * count :][:count],
        )
        for place, one in enumerate(tried)
    }


def by_head(outputs: torch.Tensor, exact: torch.Tensor, heads: int) -> torch.Tensor:
    """Outputs of which all but one KV head's are exact, head by head, (B * heads, held_out, Hq, Dv).

    Parameters
    ----------
    outputs : (B, held_out, Hq, Dv).
    exact : (held_out, Hq, Dv).
    heads : KV heads; 0 for none.
    """
    group = exact.shape[1] // max(1, heads)
    alone = exact.expand(len(outputs), heads, *exact.shape).clone()
    for head in range(heads):
        own = slice(head * group, (head + 1) * group)
        alone[:, head, :, own] = outputs[:, :, own]
    return alone.flatten(0, 1)


def layer_density(seen: Capture, number: int) -> list[float]:
    """Density of each query head over the newest queries of the prompt."""
    layer = seen.layers[number]
    query, keys = layer.query[0, :, : seen.prompt], layer.keys[0, :, : seen.prompt]
    found = head_density(query[:, -WINDOW:], keys, scale=layer.given.get("scaling"))
    return [float(score) for score in found]


def tailored_layers(model: PreTrainedModel) -> list[int]:
    """Numbers of the layers that a plan can speak of; raises ModelError if there are none."""
    stock = _compat.stock_layers(model.config)
    numbers = [number for number, (kind, layer) in enumerate(stock) if _compat.is_plain_attention(kind, layer)]
    if not numbers:
        raise ModelError(f"{type(model).__name__} has no layer that attends to all tokens: there is nothing to plan")
    return numbers


def check_texts(model: PreTrainedModel, texts: Sequence[torch.Tensor], held_out: int) -> None:
    """Raise KVTailorError for a text that is shorter than the windows, or longer than the model's positions."""
    if not texts:
        raise KVTailorError("there is no text to calibrate on: allowed are one or more")
    limit = length_limit(model.config)
    for ids in texts:
        count = ids.shape[1]
        if count < WINDOW + held_out:
            raise KVTailorError(
                f"a calibration text of {count} tokens is too short: {held_out} are held out, and density needs the "
                f"{WINDOW} before them; allowed are {WINDOW + held_out} or more"
            )
        if limit is not None and count > limit:
            raise KVTailorError(
                f"a calibration text of {count} tokens is beyond the {limit} positions of {type(model).__name__}: "
                f"allowed are {WINDOW + held_out} to {limit}"
            )


def text_hash(ids: torch.Tensor) -> str:
    """Short name of a text's tokens."""
    return hashlib.sha256(ids.cpu().long().numpy().tobytes()).hexdigest()[:16]


def weights_hash(model: PreTrainedModel) -> str:
    """Short name of a model's weights, from every byte of each of its tensors and the tensor's name."""
    found: Any = hashlib.sha256()
    known: dict[tuple[int, torch.Size, torch.dtype], str] = {}  # tied tensors are read once
    for name, tensor in model.state_dict().items():
        first = known.setdefault((tensor.data_ptr(), tensor.shape, tensor.dtype), name)
        found.update(f"{name} {first} {tensor.dtype} {tuple(tensor.shape)};".encode())
        if first == name and tensor.numel():
            found.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return str(found.hexdigest()[:16])


def _default_bytes(model: PreTrainedModel, texts: Sequence[torch.Tensor]) -> int:
    identity = identity_of(model)
    mean = sum(ids.shape[1] for ids in texts) / len(texts)
    return round(2 * mean * identity["kv_heads"] * identity["head_dim"] * model.dtype.itemsize)
