"""What calibration measured: for every layer its density, and for every option its error, its loss and its bytes."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from kvtailor.calibrate.density import TAU, label
from kvtailor.calibrate.options import Option
from kvtailor.errors import KVTailorError
from kvtailor.indexes.registry import index_class
from kvtailor.policies.registry import policy_class


@dataclass(frozen=True)
class Measurement:
    """One option in one layer.

    Attributes
    ----------
    errors : by query head, distance of the attention output from the exact one over its length, mean over tokens.
    loss : divergence of the next token's distribution when this layer alone is kept so, nats per token; infinite where
        logits are not finite.
    bytes_held, bytes_fast : of the layer in memory, and without what lives in slow host memory.
    head_losses : by KV head, the same loss when that head alone is kept so; empty where heads were not measured.
    """

    errors: list[float]
    loss: float
    bytes_held: int
    bytes_fast: int
    head_losses: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Mean over query heads."""
        return fmean(self.errors)

    def bytes_of(self, count: str) -> int:
        """Bytes that count: "held", or "fast"."""
        return self.bytes_held if count == "held" else self.bytes_fast

    def of_head(self, head: int, heads: int) -> Measurement:
        """One KV head's part: its query heads' errors, its share of the bytes, and of the loss as heads alone lose.

        Parameters
        ----------
        head, heads : which of how many KV heads.
        """
        group = len(self.errors) // heads
        return Measurement(
            errors=self.errors[head * group : (head + 1) * group],
            loss=self._loss_of_head(head, heads),
            bytes_held=self.bytes_held // heads,
            bytes_fast=self.bytes_fast // heads,
        )

    def _loss_of_head(self, head: int, heads: int) -> float:
        own = self.head_losses[head]
        if not math.isfinite(self.loss) or not math.isfinite(own):
            return math.inf
        total = sum(loss for loss in self.head_losses if math.isfinite(loss))
        return self.loss * own / total if total else self.loss / heads


@dataclass(frozen=True)
class LayerTable:
    """One layer.

    Attributes
    ----------
    density : by query head.
    options : measurements by the option's name.
    """

    density: list[float]
    options: dict[str, Measurement]

    def kept_as(self, names: Sequence[str]) -> Measurement:
        """The layer kept by one option, or by one for each KV head.

        Parameters
        ----------
        names : one option, or as many as there are KV heads.
        """
        if len(names) == 1:
            return self.options[names[0]]
        parts = [self.options[name].of_head(head, len(names)) for head, name in enumerate(names)]
        return Measurement(
            errors=[error for part in parts for error in part.errors],
            loss=sum(part.loss for part in parts),
            bytes_held=sum(part.bytes_held for part in parts),
            bytes_fast=sum(part.bytes_fast for part in parts),
        )

    @property
    def mean_density(self) -> float:
        """Mean over query heads: TailorKV's score."""
        return fmean(self.density)

    @property
    def label(self) -> str:
        """What TailorKV would do: "quantise" or "retrieve"."""
        return label(self.mean_density, TAU)


@dataclass(frozen=True)
class Table:
    """All layers that can be tailored, and what they were measured on.

    Attributes
    ----------
    made_for : the model, as a plan's ``made_for``.
    texts, tokens, held_out : texts, tokens of each before the held-out ones, and held-out tokens of each.
    dtype : of the model.
    layers : by number.
    options : by name.
    bytes_default : of the default cache, one layer, mean over texts.
    context : tokens of the prompt that bytes are counted for; None for those measured.
    """

    made_for: dict[str, Any]
    texts: list[str]
    tokens: list[int]
    held_out: int
    dtype: str
    layers: dict[int, LayerTable]
    options: dict[str, Option]
    bytes_default: int = 0
    context: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "made_for": self.made_for,
            "texts": self.texts,
            "tokens": self.tokens,
            "held_out": self.held_out,
            "dtype": self.dtype,
            "bytes_default": self.bytes_default,
            "context": self.context,
            "layers": {
                number: {"density": layer.density, "label": layer.label, "options": _plain(layer)}
                for number, layer in self.layers.items()
            },
        }


def _plain(layer: LayerTable) -> dict[str, Any]:
    return {name: {**asdict(one), "error": one.error} for name, one in layer.options.items()}


def mean_of(tables: Sequence[LayerTable]) -> LayerTable:
    """One layer over several texts; options that all of them hold."""
    names = [name for name in tables[0].options if all(name in table.options for table in tables)]
    return LayerTable(
        density=[fmean(heads) for heads in zip(*(table.density for table in tables), strict=True)],
        options={name: _mean([table.options[name] for table in tables]) for name in names},
    )


def _mean(found: Sequence[Measurement]) -> Measurement:
    return Measurement(
        errors=[fmean(heads) for heads in zip(*(one.errors for one in found), strict=True)],
        loss=fmean(one.loss for one in found),
        bytes_held=round(fmean(one.bytes_held for one in found)),
        bytes_fast=round(fmean(one.bytes_fast for one in found)),
        head_losses=[fmean(heads) for heads in zip(*(one.head_losses for one in found), strict=False)],
    )


@dataclass
class Notes:
    """Measurements as they come, in a file that a later run goes on from.

    Attributes
    ----------
    path : of the file, or None to keep nothing.
    key : what was measured on what.
    layers : by text and layer, as "0/3".
    """

    path: Path | None
    key: dict[str, Any]
    layers: dict[str, LayerTable] = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)  # what the names of options stood for

    @classmethod
    def open(cls, folder: Path | None, key: dict[str, Any]) -> Notes:
        """Notes of an earlier run with the same key, or empty ones.

        Parameters
        ----------
        folder : holds a file for each key, or None to keep nothing.
        key : what is measured on what.

        Raises
        ------
        KVTailorError
            If the file cannot be read, or is no file of measurements.
        """
        if folder is None:
            return cls(None, key)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KVTailorError(f"folder {folder} cannot be made: {error.strerror}") from None
        path = folder / f"measured-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]}.json"
        if not path.exists():
            return cls(path, key)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["key"] != key:
                raise KeyError("key")
            layers = {place: _layer(layer) for place, layer in data["layers"].items()}
            return cls(path, key, layers, dict(data["entries"]))
        except OSError as error:
            raise KVTailorError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise KVTailorError(
                f"{path} is no file of measurements for this model and text: remove it, or choose another folder"
            ) from None

    def known(self, place: str, options: Sequence[Option], heads: bool = False) -> set[str]:
        """Names of options that were measured at a place, as they are now; with ``heads``, head by head too."""
        measured = self.layers[place].options if place in self.layers else {}
        same = {one.name for one in options if one.name in measured and self.entries.get(one.name) == _entry(one)}
        return {name for name in same if measured[name].head_losses or not heads}

    def add(self, place: str, density: list[float], found: dict[Option, Measurement]) -> None:
        """Take in what was measured of one layer on one text, and write everything, whole or not at all."""
        before = self.layers[place].options if place in self.layers else {}
        for option in found:
            if self.entries.get(option.name, _entry(option)) != _entry(option):
                self._forget(option.name)
            self.entries[option.name] = _entry(option)
        named = {option.name: one for option, one in found.items()}
        self.layers[place] = LayerTable(density, {**before, **named})
        self._write()

    def _forget(self, name: str) -> None:
        for layer in self.layers.values():
            layer.options.pop(name, None)

    def _write(self) -> None:
        if self.path is None:
            return
        data = {
            "key": self.key,
            "entries": self.entries,
            "layers": {place: asdict(layer) for place, layer in self.layers.items()},
        }
        partial = self.path.with_name(self.path.name + ".partial")
        try:
            partial.write_text(json.dumps(data), encoding="utf-8")
            os.replace(partial, self.path)
        except OSError as error:
            raise KVTailorError(f"{self.path} cannot be written: {error.strerror}") from None


def _layer(data: dict[str, Any]) -> LayerTable:
    """One layer of a file; raises TypeError for anything but numbers where numbers belong."""
    found = {name: Measurement(**one) for name, one in data["options"].items()}
    for one in found.values():
        _check_numbers(one.errors, least=len(data["density"]))
        _check_numbers(one.head_losses)
        _check_numbers([one.loss, one.bytes_held, one.bytes_fast])
    _check_numbers(data["density"], least=1)
    return LayerTable(data["density"], found)


def _check_numbers(given: Any, least: int = 0) -> None:
    if not isinstance(given, list) or len(given) < least or any(type(one) not in (int, float) for one in given):
        raise TypeError(f"{given!r} are no numbers")
    if any(math.isnan(one) for one in given):
        raise TypeError(f"{given!r} hold NaN")


def _entry(option: Option) -> str:
    """What an option's name stands for, defaults included: they may change."""
    entry = option.entry
    told = entry.model_dump(mode="json")
    if entry.form.kind != "dense":
        told["form"]["levels"] = entry.form.resolved_levels
    if entry.keep.policy != "all":
        told["keep"]["options"] = _with_defaults(policy_class(entry.keep.policy), entry.keep.options)
    if entry.find.index != "all":
        told["find"]["options"] = _with_defaults(index_class(entry.find.index), entry.find.options)
    return json.dumps(told, sort_keys=True)


def _with_defaults(kind: Callable[..., object], options: dict[str, Any]) -> dict[str, Any]:
    return {name: options.get(name, one.default) for name, one in inspect.signature(kind).parameters.items()}
