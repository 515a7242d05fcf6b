"""The cache that Transformers sees: one tailored layer per layer of the model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from kvtailor import _compat
from kvtailor.errors import CacheError, StoreError
from kvtailor.identity import identity_of
from kvtailor.layers.base import Place, Step, TailoredLayer
from kvtailor.layers.evicting import EvictingLayer
from kvtailor.layers.full import FullLayer
from kvtailor.layers.packed_evicting import PackedEvictingLayer
from kvtailor.layers.packing import Packing
from kvtailor.layers.quantized import QuantizedLayer
from kvtailor.layers.retrieving import RetrievingLayer
from kvtailor.layers.split import SplitLayer
from kvtailor.plan import LayerPlan, Plan
from kvtailor.report import LayerReport, Report
from kvtailor.rope import Rotation
from kvtailor.served import check_served


class KVCache(DynamicCache):
    """A KV cache that keeps each layer as a plan says.

    For an encoder-decoder model the call gives an :class:`EncoderDecoderKVCache`, with one of these for self attention
    and one for cross attention.

    Parameters
    ----------
    model : the model that the cache is for.
    plan : a plan, a preset's name, or the path of a plan file.
    attention : "self" or "cross": which of the plan's entries count.

    Raises
    ------
    ModelError
        If the model's cache cannot be tailored.
    PlanError
        If the plan cannot be used with the model.
    """

    def __new__(cls, model: PreTrainedModel, plan: Plan | str = "full", attention: str | None = None) -> Any:
        """Give an encoder-decoder model a cache of its own kind."""
        if attention is None and model.config.is_encoder_decoder:
            return EncoderDecoderKVCache(model, plan)
        return super().__new__(cls)

    def __init__(self, model: PreTrainedModel, plan: Plan | str = "full", attention: str | None = None) -> None:
        check_served(model)
        self.plan = Plan.of(plan)
        self.plan.check_model(identity_of(model))
        self.step = Step()
        self._decoder = weakref.ref(model.get_decoder())
        self._model_name, self._config = type(model).__name__, model.config
        layers = _build_layers(model, self.plan, self.step, attention or "self")
        super().__init__()
        self.layers = layers
        self.layer_class_to_replicate = None
        self._torn: str | None = None  # why the layers no longer go together, if they do not

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        other = object.__new__(type(self))
        memo[id(self)] = other
        for name, value in self.__dict__.items():
            other.__dict__[name] = value if name in ("_decoder", "_config") else copy.deepcopy(value, memo)
        return other

    def expect(self, tokens: int) -> None:
        """Announce the length of a prompt before its first chunk.

        Relative and per-layer budgets and the room taken follow it; inside ``attach`` it is called for you.

        Parameters
        ----------
        tokens : tokens of the sequence when the prompt ends, those already seen and padding included.
        """
        self.step.expected = tokens

    def take(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Hold the keys and values of tokens that were computed elsewhere, another cache's for example.

        Layers that keep every token can: whole, packed and retrieving ones. No token may be padding.

        Parameters
        ----------
        pairs : for each layer keys (B, Hkv, n, Dk) and values (B, Hkv, n, Dv), after position encoding.

        Raises
        ------
        CacheError
            If there are not as many pairs as layers, they are not of the same sequences and tokens or do not go with
            what is held, or a layer must see attention to know what to hold; the cache is as before.
        """
        if len(pairs) != len(self.layers):
            raise CacheError(f"{len(pairs)} pairs of keys and values for {len(self.layers)} layers; allowed: one each")
        for layer, pair in zip(self.layers, pairs, strict=True):
            if not isinstance(layer, TailoredLayer):
                raise CacheError(f"{type(layer).__name__} of Transformers cannot take tokens: run the prompt")
            _check_pair(layer, pair, pairs[0], self._shapes_held(layer))
        before = [layer.seen for layer in self.tailored()]
        try:
            for layer, (key, value) in zip(self.tailored(), pairs, strict=True):
                layer.take(key, value)
        except BaseException:
            self._return_to(before)
            raise

    def _shapes_held(self, layer: TailoredLayer) -> tuple[torch.Size, torch.Size] | None:
        """Sizes of the keys and values of a layer that holds some, (B, Hkv, seen, D); nothing is unpacked for them."""
        if not layer.seen:
            return None
        before, self.step.active = self.step.active, True
        try:
            return layer.keys.shape, layer.values.shape
        finally:
            self.step.active = before

    def _return_to(self, lengths: Sequence[int]) -> None:
        """Roll tailored layers back to a length each; where that is none, any number of sequences may come next."""
        for layer, seen in zip(self.tailored(), lengths, strict=True):
            layer.roll_back(min(seen, layer.seen))
            if not seen:
                layer.reset()

    def check_owner(self, decoder: nn.Module) -> None:
        """Raise CacheError unless ``decoder`` belongs to the model that the cache was made for."""
        if self._decoder() is not decoder:
            raise CacheError(
                f"this cache was made for a {self._model_name}, and another {type(decoder).__name__} is using it; "
                "make one with KVCache(model, plan)"
            )

    @contextmanager
    def serving(self, prompt: bool, last: bool = True) -> Iterator[None]:
        """Hold the state of one forward pass of an attached model.

        Parameters
        ----------
        prompt : whether the pass brings (part of) a prompt, announced by :meth:`expect`, not a decode step.
        last : whether a prompt ends with it.
        """
        if self._torn is not None:
            raise CacheError(f"{self._torn}: call cache.reset(), or use a fresh cache")
        step = self.step
        step.active, step.prompt, step.last = True, prompt, last
        seen, others = [layer.seen for layer in self.tailored()], self._other_lengths()
        try:
            yield
            self._check_attended()
        except BaseException:
            self._return_to(seen)
            if self._other_lengths() != others or any(self.is_linear):
                self._tear_by_pass()
            step.expected = 0
            raise
        finally:
            step.active = False
            if last:
                step.expected = 0

    def roll_back(self, seen: int) -> None:
        """Return to ``seen`` tokens after a prompt that failed between its chunks."""
        before = self._other_lengths()
        self._return_to([seen] * len(self.tailored()))
        if any(length != seen for length in before) or any(self.is_linear):
            self._tear_by_pass()
        self.step.expected = 0

    def _tear_by_pass(self) -> None:
        self._torn = (
            f"a pass of {self._model_name} failed midway, and layers that are Transformers' own cannot be taken back"
        )

    def _other_lengths(self) -> list[int]:
        layers = [layer for layer in self.layers if not isinstance(layer, TailoredLayer)]
        return [layer.get_seq_length() for layer in layers if hasattr(layer, "get_seq_length")]

    def _check_attended(self) -> None:
        for layer in self.tailored():
            if getattr(layer, "incoming", None) is not None:
                raise CacheError(
                    f"{layer.place} changes its keys between cache and attention, so its KV cannot be tailored; "
                    "leave it whole in the plan"
                )

    def chunk(self, tokens: int, rows: int) -> int:
        """Tokens to bring in the next pass of a prompt that ends at ``tokens``, for ``rows`` sequences."""
        chunks = [self.plan.prefill_chunk or tokens]
        chunks += [layer.chunk(tokens, rows) for layer in self.tailored()]
        return max(1, min(chunks))

    def tailored(self) -> list[TailoredLayer]:
        """The layers that are ours; the others (sliding windows, recurrent states) are Transformers' own."""
        return [layer for layer in self.layers if isinstance(layer, TailoredLayer)]

    def activate_past_recording(self) -> None:
        """Defer what a crop could not take back until the crop came (assisted decoding)."""
        super().activate_past_recording()
        self.step.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens; after a StoreError, which far tokens can raise, no pass is served."""
        try:
            super().crop(tokens_to_remove)
        except StoreError:
            self._torn = f"a crop of a cache of {self._model_name} failed midway"
            raise

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put sequence ``beam_idx[i]`` at place ``i``; see :meth:`batch_select_indices` for what can fail."""
        self._choose(lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times; see :meth:`batch_select_indices` for what can fail."""
        self._choose(lambda layer: layer.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences at ``indices``; if a layer behind the first one fails, no pass is served any more.

        Raises
        ------
        StoreError
            If slow memory has no room for a copy of a sequence.
        """
        self._choose(lambda layer: layer.batch_select_indices(indices))

    def _choose(self, change: Callable[[Any], None]) -> None:
        """Change which sequences every layer holds; each part of a layer either does or stays as it is."""
        parts = [part for layer in self.layers for part in (layer.layers if isinstance(layer, SplitLayer) else [layer])]
        for number, part in enumerate(parts):
            try:
                change(part)
            except BaseException:
                if number:
                    self.tear()
                raise

    def tear(self) -> None:
        """Serve no pass any more until a reset: what is held is not of the same sequences everywhere."""
        self._torn = f"a choice of sequences failed midway in a cache of {self._model_name}"

    def reset(self) -> None:
        """Forget everything, and be ready for another sequence."""
        for number, (_, fresh) in enumerate(_compat.stock_layers(self._config)):
            layer = self.layers[number]
            if isinstance(layer, TailoredLayer):
                layer.reset()
            else:  # some releases zero their layers and keep the length
                self.layers[number] = fresh
        self._torn = None
        self.step.recording = False
        self.step.expected = 0

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(entry.bytes_held for entry in self._layer_reports())

    def _layer_reports(self) -> list[LayerReport]:
        return [_layer_report(number, layer) for number, layer in enumerate(self.layers)]

    def report(self) -> Report:
        """What is held now, layer by layer, and the time spent."""
        return Report(
            layers=self._layer_reports(),
            plan=self.plan.name,
            bytes_peak=max(self.step.peak, self.nbytes()),
            attention_seconds=self.step.attention_seconds,
            room_seconds=self.step.room_seconds,
        )


class EncoderDecoderKVCache(EncoderDecoderCache):
    """The cache of an encoder-decoder model: self and cross attention, each with the plan's entries for it.

    Parameters
    ----------
    model, plan : as for :class:`KVCache`.
    """

    self_attention_cache: KVCache
    cross_attention_cache: KVCache

    def __init__(self, model: PreTrainedModel, plan: Plan | str = "full") -> None:
        plan = Plan.of(plan)
        super().__init__(KVCache(model, plan, "self"), KVCache(model, plan, "cross"))
        self.plan = plan
        self._encoded: torch.Tensor | None = None

    @property
    def step(self) -> Step:
        """State of the forward pass, of the self attention half."""
        return self.self_attention_cache.step

    def expect(self, tokens: int) -> None:
        """Announce the length of a decoder prompt, as for :class:`KVCache`."""
        self.self_attention_cache.expect(tokens)

    def check_owner(self, decoder: nn.Module) -> None:
        """Raise CacheError unless ``decoder`` belongs to the model that the cache was made for."""
        self.self_attention_cache.check_owner(decoder)

    def check_encoded(self, encoded: torch.Tensor | None) -> None:
        """Raise CacheError if cross attention holds another input than ``encoded``, (B, frames, width)."""
        if encoded is None:
            return
        known = self._encoded
        filled = any(self.is_updated.values())
        if (
            filled
            and known is not None
            and known is not encoded
            and not (known.shape == encoded.shape and torch.equal(known, encoded))
        ):
            raise CacheError(
                "this cache holds the cross attention of another input: call cache.reset() before the next one, or let "
                "generate make a fresh cache inside kvtailor.attach(model, plan)"
            )
        self._encoded = encoded

    @contextmanager
    def serving(self, prompt: bool, last: bool = True) -> Iterator[None]:
        """Hold the state of one forward pass of an attached model, as for :class:`KVCache`."""
        try:
            with self.self_attention_cache.serving(prompt, last), self.cross_attention_cache.serving(prompt, last):
                yield
        except BaseException:
            for number in self.is_updated:
                self.is_updated[number] = self.cross_attention_cache.get_seq_length(number) > 0
            raise

    def reset(self) -> None:
        """Forget everything, and be ready for another input."""
        super().reset()
        self._encoded = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put sequence ``beam_idx[i]`` at place ``i``, as for :class:`KVCache`."""
        self._choose(lambda half: half.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times, as for :class:`KVCache`."""
        self._choose(lambda half: half.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences at ``indices``, as for :class:`KVCache`."""
        self._choose(lambda half: half.batch_select_indices(indices))

    def _choose(self, change: Callable[[KVCache], None]) -> None:
        change(self.self_attention_cache)
        try:
            change(self.cross_attention_cache)
        except BaseException:
            self.self_attention_cache.tear()
            raise

    def roll_back(self, seen: int) -> None:
        """Return to ``seen`` decoder tokens after a prompt that failed between its chunks."""
        self.self_attention_cache.roll_back(seen)

    def chunk(self, tokens: int, rows: int) -> int:
        """Tokens to bring in the next pass of a decoder prompt, as for :class:`KVCache`."""
        return self.self_attention_cache.chunk(tokens, rows)

    def nbytes(self) -> int:
        """Bytes held."""
        return self.self_attention_cache.nbytes() + self.cross_attention_cache.nbytes()

    def report(self) -> Report:
        """What is held now in self and cross attention, layer by layer, and the time spent."""
        own, cross = self.self_attention_cache.report(), self.cross_attention_cache.report()
        return Report(
            layers=own.layers + cross.layers,
            plan=self.plan.name,
            bytes_peak=own.bytes_peak + cross.bytes_peak,
            attention_seconds=own.attention_seconds + cross.attention_seconds,
            room_seconds=own.room_seconds + cross.room_seconds,
        )


TailoredCache = KVCache | EncoderDecoderKVCache


def _build_layers(model: PreTrainedModel, plan: Plan, step: Step, attention: str) -> list[Any]:
    config = _compat.decoder_config(model.config)
    stock = _compat.stock_layers(model.config)
    plain = [number for number, (kind, layer) in enumerate(stock) if _compat.is_plain_attention(kind, layer)]
    heads = _compat.kv_heads(config)
    parts = {number: plan.parts(number, len(stock), attention, heads) for number in plain}
    shared = _compat.shares_kv(config)

    def place(number: int, entry: LayerPlan) -> Place:
        peers = [other for other in plain if any(one is entry for _, one in parts[other])]
        return Place(
            index=number,
            cross=attention == "cross",
            rank=peers.index(number),
            peers=len(peers),
            shared=shared,
            model=type(model).__name__,
        )

    layers: list[Any] = [layer for _, layer in stock]
    for number, own in parts.items():
        built = [(some, build_layer(model, entry, place(number, entry), step)) for some, entry in own]
        layers[number] = built[0][1] if len(built) == 1 else SplitLayer(built, place(number, own[0][1]), step)
    return layers


def build_layer(model: PreTrainedModel, entry: LayerPlan, place: Place, step: Step) -> TailoredLayer:
    """An empty layer that keeps its tokens as a plan's entry says.

    Parameters
    ----------
    model : whose layer it is.
    entry : of the plan.
    place : where the layer stands.
    step : state of the forward pass, shared by all layers of a cache.

    Raises
    ------
    PlanError
        If the entry's format does not fit the model's heads.
    """
    if entry.holds_everything:
        return FullLayer(entry, place, step)
    if entry.form.kind != "dense" and (dim := _compat.head_dim(_compat.decoder_config(model.config))):
        Packing(entry.form, dim, dim)  # a format that does not fit the head is refused before any work is done
    if entry.find.index != "all":
        return RetrievingLayer(entry, place, step)
    if entry.keep.policy == "all":
        return QuantizedLayer(entry, place, step)
    if entry.form.kind != "dense":
        return PackedEvictingLayer(entry, place, step)
    return EvictingLayer(entry, place, step, _rotation(model, entry, place))


def _rotation(model: PreTrainedModel, entry: LayerPlan, place: Place) -> Rotation | None:
    keep = entry.keep
    if keep.policy != "streaming" or keep.options.get("positions", "renumbered") != "renumbered" or place.cross:
        return None
    return Rotation(model.get_decoder())


def _check_pair(layer: TailoredLayer, pair: Any, first: Any, held: tuple[torch.Size, torch.Size] | None) -> None:
    """Raise CacheError unless keys and values can be taken: as those of the first layer, and as those held.

    Parameters
    ----------
    layer : that is to take them.
    pair, first : keys and values for this layer and for the first one.
    held : sizes of what the layer holds, or None.
    """
    place = layer.place
    for tensor in pair:
        if not (isinstance(tensor, torch.Tensor) and tensor.dim() == 4 and tensor.is_floating_point()):
            given = f"{type(tensor).__name__} of {tuple(getattr(tensor, 'shape', ()))}"
            raise CacheError(f"{place}: got a {given}; allowed: floating point tensors (B, Hkv, n, D)")
    key, value = pair
    batch, tokens = first[0].shape[0], first[0].shape[2]
    shapes = f"keys {tuple(key.shape)} and values {tuple(value.shape)}"
    if tokens == 0 or any((part.shape[0], part.shape[2]) != (batch, tokens) for part in pair):
        count = tokens or "one or more"
        raise CacheError(f"{place}: got {shapes}; allowed: {batch} sequences of {count} tokens, as the first layer's")
    if isinstance(layer, SplitLayer) and key.shape[1] != layer.heads:
        raise CacheError(f"{place}: got {shapes}; allowed: {layer.heads} heads, of which the plan speaks")
    if key.shape[1] != value.shape[1] or key.dtype != value.dtype:
        raise CacheError(
            f"{place}: got {shapes} of {key.dtype} and {value.dtype}; allowed: as many heads of values, of one dtype"
        )
    if held is not None and any((*a.shape[:2], a.shape[3]) != (*b[:2], b[3]) for a, b in zip(pair, held, strict=True)):
        raise CacheError(f"{place}: got {shapes}, and the cache holds {tuple(held[0])} and {tuple(held[1])}")


def _layer_report(number: int, layer: Any) -> LayerReport:
    if isinstance(layer, TailoredLayer):
        held = layer.bytes_by_kind()
        return LayerReport(
            index=number,
            attention="cross" if layer.place.cross else "self",
            kept_as=layer.in_words,
            tokens_seen=layer.seen,
            tokens_kept=layer.kept,
            bytes_by_kind=held,
            bytes_default=layer.default_nbytes(),
            bytes_on_disk=layer.bytes_on_disk,
            reads=layer.reads,
            kept_by_head=layer.kept_by_head,
        )
    held = {"stock": _tensor_bytes(layer)}
    seen = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
    keys = getattr(layer, "keys", None)
    kept = keys.shape[-2] if isinstance(keys, torch.Tensor) and keys.dim() == 4 else 0
    return LayerReport(number, "self", type(layer).__name__, seen, float(kept), held, held["stock"])


def _tensor_bytes(layer: Any) -> int:
    storages: dict[int, int] = {}
    pending = list(vars(layer).values())
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
    return sum(storages.values())
