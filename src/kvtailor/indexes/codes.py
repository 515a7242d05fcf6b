"""Finding a query's tokens by packed keys: all channels, few bits. Source: ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch

from kvtailor.arranged import Arranged, Codes, can_arrange, code_bytes
from kvtailor.formats import GROUP_TOKENS, PackedFormat, check_format, default_group
from kvtailor.indexes.base import Index, check_option
from kvtailor.kernels import native
from kvtailor.kernels import reference as kernels
from kvtailor.quantize.hadamard import rotate
from kvtailor.quantize.pack import pack_for


@dataclass(frozen=True)
class Stretch:
    """Packed keys of some tokens."""

    codes: Codes

    @cached_property
    def handed(self) -> Any:
        """The keys as the C++ kernels hold them; they must be arranged."""
        assert isinstance(self.codes, Arranged)
        return native.hand_keys(self.codes)


class CodesIndex(Index):
    """Keys packed to few bits; a score is the product of the query and what the codes stand for.

    Parameters
    ----------
    bits : of a code: 1, 2, 3, 4 or 8.
    kind : "channel" packs keys per channel over 64 tokens; "rotated" each token after a Hadamard rotation.
    """

    name: ClassVar[str] = "codes"

    def __init__(self, bits: int = 2, kind: Literal["channel", "rotated"] = "channel") -> None:
        check_option(self.name, "bits", bits, (1, 2, 3, 4, 8))
        check_option(self.name, "kind", kind, ("channel", "rotated"))
        self.bits, self.kind = bits, kind
        self.stretches: list[Stretch] = []

    def format(self, dim: int) -> PackedFormat:
        """How keys of ``dim`` channels are packed; raises PlanError for a head that cannot be."""
        if self.kind == "rotated":
            fmt = PackedFormat(self.bits, "token", default_group(dim), "minmax", True)
        else:
            fmt = PackedFormat(self.bits, "channel", GROUP_TOKENS, "minmax", False)
        check_format(fmt, dim)
        return fmt

    def check_dim(self, dim: int) -> None:
        """Raise PlanError if heads of ``dim`` channels cannot be packed."""
        self.format(dim)

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens that the index knows."""
        return sum(stretch.codes.length for stretch in self.stretches)

    @torch.inference_mode(False)  # what is kept must be ordinary tensors
    def append(self, keys: torch.Tensor, path: str | None) -> None:
        """Pack the next tokens, and join stretches of like size."""
        fmt = self.format(keys.shape[-1])
        path = path if can_arrange(fmt, keys.shape[-1], values=False) else None
        self.stretches.append(Stretch(pack_for(path, keys, fmt, values=False)))
        while len(self.stretches) > 1:
            older, newer = (stretch.codes for stretch in self.stretches[-2:])
            if older.length > newer.length or older.scale.dtype != newer.scale.dtype:
                return
            self.stretches[-2:] = [Stretch(type(older).cat([older, newer]))]  # type: ignore[list-item]

    def emptied(self) -> Self:
        """A fresh index with the same options."""
        return type(self)(self.bits, self.kind)

    def scores(self, query: torch.Tensor, path: str | None) -> torch.Tensor:
        """Products of queries and what the codes stand for, (Hkv, M, length)."""
        heads, count, dim = query.shape
        if path is not None and all(isinstance(stretch.codes, Arranged) for stretch in self.stretches):
            out = torch.empty(1, heads * count, 1, self.length)
            rows: list[native.Row] = [([stretch.handed for stretch in self.stretches], None, [])]
            flat = query.detach().reshape(1, heads * count, 1, dim)
            native.scores(path, rows, flat, out, native.Weighing(1.0), "fast")
            return out.view(heads, count, -1)
        turned = rotate(query) if self.kind == "rotated" else query
        return torch.cat([kernels.scores(turned, stretch.codes) for stretch in self.stretches], dim=-1)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Codes and scales."""
        for stretch in self.stretches:
            yield from stretch.codes.tensors()

    def token_bytes(self, heads: int, dim: int, element: int) -> float:
        """Bytes of one token's codes and scales."""
        fmt = self.format(dim)
        codes = code_bytes(fmt, dim, False, can_arrange(fmt, dim, values=False))
        return heads * (codes + 4 * dim / fmt.group)

    def drop_from(self, length: int) -> None:
        """Forget all tokens behind the first ``length``."""
        kept = []
        for stretch in self.stretches:
            count = min(stretch.codes.length, length)
            if count:
                kept.append(stretch if count == stretch.codes.length else Stretch(stretch.codes.narrow(count)))
            length -= count
        self.stretches = kept

    def copy(self) -> Self:
        """An index of its own; codes are shared, since they never change."""
        other = self.emptied()
        other.stretches = list(self.stretches)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes: it hands its own codes to the C++ kernels."""
        return {**self.__dict__, "stretches": [Stretch(stretch.codes) for stretch in self.stretches]}
