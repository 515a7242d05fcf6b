"""What a cache holds and what the default cache would hold, as data and as a table."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table


@dataclass
class ReadStats:
    """What reading far tokens ahead of their step was good for.

    Attributes
    ----------
    wanted, hit : rows that steps needed, and those that had been read ahead.
    failed : guesses that could not be made.
    read_seconds : time that reading ahead took.
    waited_seconds : what of it steps had to wait for.
    missed_seconds : time that steps took to read the rows that were not there.
    """

    wanted: int = 0
    hit: int = 0
    failed: int = 0
    read_seconds: float = 0.0
    waited_seconds: float = 0.0
    missed_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the rows needed that had been read ahead."""
        return self.hit / self.wanted if self.wanted else 0.0

    @property
    def hidden(self) -> float:
        """Share of all reading time that no step waited for."""
        total = self.read_seconds + self.missed_seconds
        return max(0.0, self.read_seconds - self.waited_seconds) / total if total else 0.0

    def __add__(self, other: ReadStats) -> ReadStats:
        """Both together."""
        return ReadStats(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def as_dict(self) -> dict[str, float]:
        """Everything as plain data."""
        return {**asdict(self), "hit_rate": self.hit_rate, "hidden": self.hidden}


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes
    ----------
    index, attention : which layer, of "self" or "cross" attention.
    kept_as : how it is kept, in words.
    tokens_seen, tokens_kept : per sequence; kept is the mean over KV heads and sequences.
    bytes_by_kind : bytes held in memory: keys, values, codes, scales, positions, marks, queries, index; "host" is what
        lives in slow host memory.
    bytes_default : bytes that the default cache would hold.
    bytes_on_disk : bytes in files, not in memory.
    reads : what reading ahead was good for, in layers that do.
    kept_by_head : tokens kept by each KV head, mean over sequences; empty where that is not known.
    """

    index: int
    attention: str
    kept_as: str
    tokens_seen: int
    tokens_kept: float
    bytes_by_kind: dict[str, int]
    bytes_default: int
    bytes_on_disk: int = 0
    reads: ReadStats | None = None
    kept_by_head: list[float] = field(default_factory=list)

    @property
    def bytes_held(self) -> int:
        """Bytes of all kinds, in memory."""
        return sum(self.bytes_by_kind.values())

    @property
    def bytes_fast(self) -> int:
        """Bytes held without those in slow host memory."""
        return self.bytes_held - self.bytes_by_kind.get("host", 0)


@dataclass(frozen=True)
class Report:
    """A whole cache.

    Attributes
    ----------
    layers : layer by layer.
    plan : the plan's name.
    bytes_peak : most bytes held at any moment so far.
    attention_seconds, room_seconds : time spent in attention, and in dropping and packing.
    """

    layers: list[LayerReport]
    plan: str
    bytes_peak: int
    attention_seconds: float
    room_seconds: float

    @property
    def bytes_held(self) -> int:
        """Bytes of all storages that the cache keeps in memory, spare room included."""
        return sum(layer.bytes_held for layer in self.layers)

    @property
    def bytes_fast(self) -> int:
        """Bytes held without those in slow host memory, from which steps read single tokens."""
        return sum(layer.bytes_fast for layer in self.layers)

    @property
    def bytes_on_disk(self) -> int:
        """Bytes in files, not in memory."""
        return sum(layer.bytes_on_disk for layer in self.layers)

    @property
    def reads(self) -> ReadStats | None:
        """What reading ahead was good for, in all layers that do; None where none does."""
        known = [layer.reads for layer in self.layers if layer.reads is not None]
        return sum(known, ReadStats()) if known else None

    @property
    def bytes_default(self) -> int:
        """Bytes that the default cache would hold for the same tokens."""
        return sum(layer.bytes_default for layer in self.layers)

    @property
    def tokens_seen(self) -> int:
        """Tokens seen by self attention, per sequence, padding included."""
        return max((layer.tokens_seen for layer in self.layers if layer.attention == "self"), default=0)

    @property
    def tokens_kept(self) -> float:
        """Tokens kept by self attention, mean over layers, heads and sequences."""
        own = [layer.tokens_kept for layer in self.layers if layer.attention == "self"]
        return sum(own) / len(own) if own else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "plan": self.plan,
            "tokens_seen": self.tokens_seen,
            "tokens_kept": self.tokens_kept,
            "bytes_held": self.bytes_held,
            "bytes_fast": self.bytes_fast,
            "bytes_on_disk": self.bytes_on_disk,
            "bytes_peak": self.bytes_peak,
            "bytes_default": self.bytes_default,
            "attention_seconds": self.attention_seconds,
            "room_seconds": self.room_seconds,
            "reads": None if self.reads is None else self.reads.as_dict(),
            "layers": [
                {
                    "index": layer.index,
                    "attention": layer.attention,
                    "kept_as": layer.kept_as,
                    "tokens_seen": layer.tokens_seen,
                    "tokens_kept": layer.tokens_kept,
                    "kept_by_head": list(layer.kept_by_head),
                    "bytes_held": layer.bytes_held,
                    "bytes_default": layer.bytes_default,
                    "bytes_by_kind": dict(layer.bytes_by_kind),
                    "bytes_on_disk": layer.bytes_on_disk,
                }
                for layer in self.layers
            ],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kinds = [kind for kind in _KINDS if any(kind in layer.bytes_by_kind for layer in self.layers)]
        table = Table(title=f"KV cache, plan {self.plan}", title_justify="left", box=SIMPLE, pad_edge=False)
        table.add_column("layers")
        table.add_column("kept as")
        for name in ("seen", "kept", *kinds, "held"):
            table.add_column(name, justify="right")
        for alike in self._alike():
            first, last, count = alike[0], alike[-1], len(alike)
            numbers = f"{first.index}" if count == 1 else f"{first.index}-{last.index}"
            table.add_row(
                numbers + (" cross" if first.attention == "cross" else ""),
                first.kept_as,
                str(first.tokens_seen),
                f"{first.tokens_kept:.0f}",
                *(human_bytes(sum(layer.bytes_by_kind.get(kind, 0) for layer in alike)) for kind in kinds),
                human_bytes(sum(layer.bytes_held for layer in alike)),
            )
        yield table
        share = f" ({self.bytes_held / self.bytes_default:.0%} of the default cache)" if self.bytes_default else ""
        if self.bytes_fast < self.bytes_held or self.bytes_on_disk:
            yield (
                f"in fast memory {human_bytes(self.bytes_fast)}, in slow host memory "
                f"{human_bytes(self.bytes_held - self.bytes_fast)}, on disk {human_bytes(self.bytes_on_disk)}"
            )
        yield (
            f"held {human_bytes(self.bytes_held)}{share}, at most {human_bytes(self.bytes_peak)}, "
            f"default {human_bytes(self.bytes_default)}"
        )
        if self.reads is not None and self.reads.wanted:
            yield (
                f"read ahead {self.reads.hit_rate:.0%} of {self.reads.wanted} rows wanted; "
                f"{self.reads.hidden:.0%} of the reading time hidden"
            )
        yield f"attention {self.attention_seconds:.2f} s, making room {self.room_seconds:.2f} s"

    def _alike(self) -> list[list[LayerReport]]:
        """Neighbouring layers that are kept alike and hold as many tokens."""

        def look(layer: LayerReport) -> tuple[str, str, int, int]:
            return layer.attention, layer.kept_as, layer.tokens_seen, round(layer.tokens_kept)

        return [list(group) for _, group in groupby(self.layers, key=look)]

    def __str__(self) -> str:
        console = Console(width=120, file=io.StringIO())
        console.print(self)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


_KINDS = ("keys", "values", "codes", "scales", "positions", "marks", "queries", "index", "host", "stock")


def human_bytes(count: float) -> str:
    """A number of bytes for people: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
