"""What a benchmark found, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvtailor.bench.peers import PeerRow

DEFAULT = "default"
"""The name of Transformers' own cache among plans."""


@dataclass(frozen=True)
class KernelRow:
    """One kernel on one layer of Llama 3.1 8B, one token decoded or all tokens packed.

    Attributes
    ----------
    kernel : "sdpa", "dense", "int8" … "int1", "pack", "retrieve", or a step of it ("score", "combine", "top-k",
        "gather").
    form : how numbers are stored, or how the call is made.
    precision : dtype of dense numbers; "exact", "default" or "fast" for codes.
    case : "plain", "mask", "sinks" or "lse": what is asked for besides.
    tokens, threads : length of the cache, and threads.
    ms, cpu_ms : medians of wall and processor time, milliseconds.
    speedup, speedup_gqa : over PyTorch's SDPA in bfloat16 in its best form, and in its usual call with ``enable_gqa``;
        of processor times at one thread, of wall times at more. None where there is no counterpart.
    gbytes_per_s : GB of keys and values that are read per second, as they are stored; for packing, of its input.
    """

    kernel: str
    form: str
    precision: str
    case: str
    tokens: int
    threads: int
    ms: float
    cpu_ms: float
    speedup: float | None
    speedup_gqa: float | None
    gbytes_per_s: float | None


@dataclass(frozen=True)
class StepRow:
    """Whole decode steps of a model with one cache at one length.

    Attributes
    ----------
    plan : of the cache; "default" for Transformers' DynamicCache, "hqq 4-bit" and "quanto 4-bit" for its
        QuantizedCache.
    context : tokens held before the first step.
    threads, ms, cpu_ms : as in a :class:`KernelRow`.
    speedup : over the default cache; of processor times at one thread, of wall times at more.
    added_ms_per_1k : milliseconds that 1,000 more tokens add, from the shortest context to this one, None there; of
        processor time at one thread, of wall time at more.
    agrees : distance of the logits from those of exact float32 attention over the same stored numbers, as a share of
        their length; None for Transformers' own caches.
    """

    plan: str
    context: int
    threads: int
    ms: float
    cpu_ms: float
    speedup: float | None
    added_ms_per_1k: float | None
    agrees: float | None


@dataclass(frozen=True)
class PromptRow:
    """A prompt read in float32 with one cache.

    Attributes
    ----------
    plan : as in a :class:`StepRow`.
    tokens : length of the prompt.
    threads, ms, cpu_ms : as in a :class:`KernelRow`.
    over_default : time as a multiple of the default cache's; of processor times at one thread, of wall times at more.
    """

    plan: str
    tokens: int
    threads: int
    ms: float
    cpu_ms: float
    over_default: float


@dataclass(frozen=True)
class Bench:
    """All that was measured.

    Attributes
    ----------
    kernels, steps, prompts : the rows; any may be empty.
    peers : rows of other engines, as they were given.
    model, dtype : whose steps were timed; dtype of the weights and of what is not packed.
    repeats : rounds.
    machine : what it ran on.
    notes : what could not be measured, a line each.
    """

    kernels: list[KernelRow]
    steps: list[StepRow]
    prompts: list[PromptRow]
    peers: list[PeerRow]
    model: str
    dtype: str
    repeats: int
    machine: dict[str, Any]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {**asdict(self), "peers": [peer.model_dump() for peer in self.peers]}
