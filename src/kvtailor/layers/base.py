"""What every tailored layer of the cache is to Transformers, and what it is to the attention function."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer

from kvtailor._compat import removed_tokens
from kvtailor.errors import CacheError
from kvtailor.layers import sparse_prompt
from kvtailor.plan import LayerPlan
from kvtailor.report import ReadStats

# The attribute of a key tensor that leads the attention function to its layer.
HANDLE = "kv_layer"

Stock = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass
class Step:
    """What the layers of one cache must know of the forward pass that they serve.

    Attributes
    ----------
    active : whether an attached model is running, so that our attention function will be called.
    prompt : whether the pass brings (part of) a prompt, not a decode step.
    last : whether the prompt ends with this pass.
    expected : tokens, padding included, that the sequence will have when the prompt ends.
    recording : whether a crop may take back what the pass brings (assisted decoding).
    held, peak : bytes that the tailored layers hold, now and at most.
    attention_seconds, room_seconds : time spent in attention and in making room.
    """

    active: bool = False
    prompt: bool = False
    last: bool = True
    expected: int = 0
    recording: bool = False
    held: int = 0
    peak: int = 0
    attention_seconds: float = 0.0
    room_seconds: float = 0.0

    def timing(self, what: str) -> Timing:
        """Add the time of a ``with`` block to ``attention_seconds`` or ``room_seconds``."""
        return Timing(self, what)


class Timing:
    """The time of a ``with`` block, added to an attribute of a step."""

    __slots__ = ("begin", "step", "what")

    def __init__(self, step: Step, what: str) -> None:
        self.step, self.what = step, what

    def __enter__(self) -> None:
        self.begin = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        setattr(self.step, self.what, getattr(self.step, self.what) + time.perf_counter() - self.begin)


@dataclass(frozen=True)
class Place:
    """Where a layer stands in its model.

    Attributes
    ----------
    index : layer index in its cache.
    cross : whether it serves cross attention.
    rank, peers : its place among the layers that share its entry of the plan, and their number.
    shared : whether later layers of the model attend to this layer's keys and values.
    model : name of the model's class, for messages.
    """

    index: int
    cross: bool = False
    rank: int = 0
    peers: int = 1
    shared: bool = False
    model: str = field(default="model", compare=False)

    def __str__(self) -> str:
        return f"{'cross-attention ' if self.cross else ''}layer {self.index} of {self.model}"


class TailoredLayer(DynamicLayer):
    """A layer whose sizes are logical: it reports the tokens seen, whatever it holds.

    Parameters
    ----------
    plan : what is done with this layer.
    place : where it stands.
    step : state of the forward pass, shared by all layers of a cache.
    """

    def __init__(self, plan: LayerPlan, place: Place, step: Step) -> None:
        super().__init__()
        self.plan = plan
        self.place = place
        self.step = step
        self.seen = 0
        self._accounted = 0

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length

    @property
    def record_past(self) -> bool:
        """Whether a crop may follow each pass."""
        return self.step.recording

    def activate_past_recording(self) -> None:
        """Defer what a crop could not take back until the crop came."""
        self.step.recording = True

    @property
    def in_words(self) -> str:
        """How the layer is kept, for people."""
        return self.plan.in_words

    @property
    def prefix_pure(self) -> bool:
        """Whether what is held depends on nothing but the tokens before it."""
        return True

    @abstractmethod
    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, stock: Stock, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of ``query`` (B, Hq, q, Dk) over this layer; returns (B, q, Hq, Dv) and weights or None."""

    @abstractmethod
    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors held, each with its kind ("keys", "codes", "scales", "positions", …)."""

    @property
    @abstractmethod
    def kept_by_head(self) -> list[float]:
        """Tokens held by each KV head, mean over sequences; empty while nothing is held."""

    @property
    def kept(self) -> float:
        """Tokens held per KV head and sequence, on average."""
        heads = self.kept_by_head
        return sum(heads) / len(heads) if heads else 0.0

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of the storages held, by kind; a storage that rows share counts once."""
        sizes: dict[str, int] = {}
        counted: set[int] = set()
        for kind, tensor in self.stored():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                sizes[kind] = sizes.get(kind, 0) + storage.nbytes()
        return sizes

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(self.bytes_by_kind().values())

    @property
    def bytes_on_disk(self) -> int:
        """Bytes in files."""
        return 0

    @property
    def reads(self) -> ReadStats | None:
        """What reading ahead was good for; None in layers that do not."""
        return None

    def account(self) -> None:
        """Bring the cache's running total up to date with this layer."""
        held = self.nbytes()
        self.step.held += held - self._accounted
        self._accounted = held
        self.step.peak = max(self.step.peak, self.step.held)

    def chunk(self, tokens: int, rows: int) -> int:
        """Most tokens of a prompt of ``tokens`` that the next pass may bring for ``rows`` sequences."""
        return tokens

    @abstractmethod
    def default_nbytes(self) -> int:
        """Bytes that the default cache would hold for the tokens seen."""

    def attend_prompt(
        self,
        stock: Stock,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **given: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of a prompt's tokens to each other: Transformers' own, or over some blocks if the plan says so."""
        share = self.plan.prompt_share
        if share < 1 and not self.place.cross and sparse_prompt.serves(module, query, key, mask, given):
            return sparse_prompt.attend(query, key, value, share, given.get("scaling")), None
        return stock(module, query, key, value, mask, **given)

    def take(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Hold tokens that were computed elsewhere, (B, Hkv, n, Dk) and (B, Hkv, n, Dv), without attending to them.

        Raises
        ------
        CacheError
            If the layer must see attention to know what to hold.
        """
        raise CacheError(
            f"{self.place} is kept as {self.in_words}, which must see the attention that its tokens get: "
            "run the prompt through the model"
        )

    def prepare(self) -> None:
        """Do what was put off, before the next pass or crop."""

    def read_ahead(
        self,
        executor: ThreadPoolExecutor,
        ask: Callable[[], torch.Tensor | None],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Begin to read what the next step is thought to need, where reading is slow; most layers need not.

        Parameters
        ----------
        executor : the thread that reads.
        ask : gives a guess at the step's query, (B, Hq, 1, D), or None.
        stream : where a GPU reads, from :func:`kvtailor.layers.side_stream.side_stream`.
        """

    @abstractmethod
    def forget(self, count: int) -> None:
        """Remove the newest ``count`` tokens."""

    def roll_back(self, seen: int) -> None:
        """Return to ``seen`` tokens after a pass that failed."""
        self.seen = seen

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens from the end; nothing from a layer that passes left out (early exits).

        Raises
        ------
        CacheError
            If more tokens are to be removed than were seen.
        """
        count = removed_tokens(tokens_to_remove)
        if not self.seen:
            return
        if count > self.seen:
            raise CacheError(f"{self.place}: crop of {count} tokens, and only {self.seen} were seen")
        if count:
            self.forget(count)

    def handled(self, key: torch.Tensor) -> torch.Tensor:
        """The tensor as given, leading to this layer."""
        setattr(key, HANDLE, self)
        return key

    def _check_batch(self, key: torch.Tensor, batch: int, heads: int) -> None:
        if key.shape[0] != batch or key.shape[1] != heads:
            raise CacheError(
                f"{self.place}: got keys of {key.shape[0]} sequences and {key.shape[1]} heads, and the cache holds "
                f"{batch} and {heads}; use a fresh cache, or batch_repeat_interleave for more sequences"
            )

    @property
    def keys(self) -> Any:
        """Keys as Transformers may read them; None while nothing is held."""
        return self._read()[0] if self.seen else None

    @keys.setter
    def keys(self, value: Any) -> None:
        if value is not None:
            raise CacheError(f"{self.place}: keys cannot be set from outside")

    @property
    def values(self) -> Any:
        """Values as Transformers may read them; None while nothing is held."""
        return self._read()[1] if self.seen else None

    @values.setter
    def values(self, value: Any) -> None:
        if value is not None:
            raise CacheError(f"{self.place}: values cannot be set from outside")

    @abstractmethod
    def _read(self) -> tuple[torch.Tensor, torch.Tensor]: ...


def batch_indices(indices: torch.Tensor | list[int], batch: int, device: torch.device) -> torch.Tensor:
    """Row numbers from indices or a boolean choice of rows."""
    return torch.arange(batch, device=device)[torch.as_tensor(indices, device=device)]
