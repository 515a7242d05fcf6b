"""Finding a query's tokens by product quantisation of the keys. Source: PQCache, arXiv 2407.12820, section 4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import torch

from kvtailor.errors import PlanError
from kvtailor.indexes.base import Index, check_count, check_option
from kvtailor.indexes.stretches import add, first, length_of

AT_ONCE = 4096
"""Tokens whose distances are computed at a time: bounds the memory of (tokens, centroids) tables."""


class PQIndex(Index):
    """Each part of a key is named by the nearest of few centroids, which the first tokens that come are clustered to.

    Parameters
    ----------
    parts : sub-spaces of a head's channels; the paper takes 2 or 4.
    bits : of a code: a part has ``2**bits`` centroids; the paper takes 6 or 8.
    rounds : of Lloyd's algorithm.
    seed : of the choice of first centroids.
    """

    name: ClassVar[str] = "pq"

    def __init__(self, parts: int = 2, bits: int = 6, rounds: int = 10, seed: int = 0) -> None:
        check_option(self.name, "parts", parts, (1, 2, 4, 8, 16, 32, 64))
        check_count(self.name, "bits", bits, 1, 8)
        check_count(self.name, "rounds", rounds, 0, 100)
        check_count(self.name, "seed", seed, 0, 2**31)
        self.parts, self.bits, self.rounds, self.seed = parts, bits, rounds, seed
        self.centroids: torch.Tensor | None = None  # (Hkv, parts, 2**bits, D / parts) float32
        self.codes: list[torch.Tensor] = []  # (Hkv, parts, n) uint8
        self.learned = 0  # tokens that made the centroids

    def check_dim(self, dim: int) -> None:
        """Raise PlanError if the parts do not divide a head of ``dim`` channels."""
        if dim % self.parts:
            raise PlanError(f"index 'pq': {self.parts} parts do not divide a head of {dim} channels")

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens that the index knows."""
        return length_of(self.codes)

    @torch.inference_mode(False)  # what is kept must be ordinary tensors
    def append(self, keys: torch.Tensor, path: str | None) -> None:
        """Name the next tokens' parts, and join stretches of like size; the first tokens make the centroids."""
        self.check_dim(keys.shape[-1])
        pieces = keys.float().unflatten(-1, (self.parts, -1)).transpose(1, 2)  # (Hkv, parts, n, D / parts)
        if self.centroids is None:
            self.centroids = cluster(pieces, 2**self.bits, self.rounds, self.seed)
            self.learned = keys.shape[1]
        add(self.codes, nearest(pieces, self.centroids).to(torch.uint8))

    @property
    def learned_too_early(self) -> bool:
        """Whether the centroids were made of a part of the tokens."""
        return self.learned < self.length

    def emptied(self) -> Self:
        """A fresh index with the same options."""
        return type(self)(self.parts, self.bits, self.rounds, self.seed)

    def scores(self, query: torch.Tensor, path: str | None) -> torch.Tensor:
        """Products of queries and the centroids that stand for the keys, (Hkv, M, length)."""
        assert self.centroids is not None
        pieces = query.float().unflatten(-1, (self.parts, -1)).transpose(1, 2)  # (Hkv, parts, M, D / parts)
        table = pieces @ self.centroids.mT  # (Hkv, parts, M, 2**bits)
        return torch.cat([_looked_up(table, codes) for codes in self.codes], dim=-1)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Centroids and codes."""
        if self.centroids is not None:
            yield self.centroids
        yield from self.codes

    def token_bytes(self, heads: int, dim: int, element: int) -> float:
        """Bytes of one token's codes."""
        return heads * self.parts

    def fixed_bytes(self, heads: int, dim: int) -> int:
        """Bytes of the centroids."""
        return heads * dim * 2**self.bits * 4

    def drop_from(self, length: int) -> None:
        """Forget all tokens behind the first ``length``; the centroids stay until nothing is left."""
        self.codes = first(self.codes, length)
        if not self.codes:
            self.centroids = None

    def copy(self) -> Self:
        """An index of its own; what never changes is shared."""
        other = self.emptied()
        other.centroids, other.codes, other.learned = self.centroids, list(self.codes), self.learned
        return other


def cluster(points: torch.Tensor, count: int, rounds: int, seed: int) -> torch.Tensor:
    """Centroids by Lloyd's algorithm; a centroid that no point is nearest to moves to the point farthest from its own.

    Parameters
    ----------
    points : (H, parts, n, d) float32, clustered for each head and part on its own.
    count : centroids; where there are fewer points, each is one, and some stand more than once.
    rounds, seed : as for :class:`PQIndex`.

    Returns
    -------
    (H, parts, count, d) float32.
    """
    total = points.shape[2]
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    centroids = points[:, :, order.repeat(-(-count // total))[:count].to(points.device)].clone()
    for _ in range(rounds):
        owner = nearest(points, centroids)  # (H, parts, n)
        index = owner[..., None].expand_as(points)
        sums = torch.zeros_like(centroids).scatter_add_(2, index, points)
        members = torch.zeros((*owner.shape[:2], count), device=points.device)
        members.scatter_add_(2, owner, torch.ones_like(owner, dtype=torch.float32))
        moved = torch.where(members[..., None] > 0, sums / members.clamp(min=1)[..., None], centroids)
        if total > count:
            moved = _reseeded(moved, members, points, owner)
        if torch.equal(moved, centroids):
            break
        centroids = moved
    return centroids


def _reseeded(
    centroids: torch.Tensor, members: torch.Tensor, points: torch.Tensor, owner: torch.Tensor
) -> torch.Tensor:
    distance = (points - centroids.gather(2, owner[..., None].expand_as(points))).square().sum(-1)
    far = distance.topk(centroids.shape[2], dim=-1).indices  # the farthest points, one for each centroid at most
    rank = (members == 0).cumsum(-1).sub_(1).clamp_(min=0)
    chosen = points.gather(2, far.gather(2, rank)[..., None].expand(*rank.shape, points.shape[-1]))
    return torch.where((members == 0)[..., None], chosen, centroids)


def nearest(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The centroid next to each point: (H, parts, n, d) and (H, parts, c, d) to (H, parts, n) int64."""
    half = centroids.square().sum(-1)[:, :, None] / 2
    blocks = [(half - block @ centroids.mT).argmin(-1) for block in points.split(AT_ONCE, dim=2)]
    return torch.cat(blocks, dim=2)


def _looked_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Sums over parts of table (H, parts, M, c) at codes (H, parts, n): (H, M, n)."""
    total = None
    for part in range(codes.shape[1]):
        index = codes[:, part, None].long().expand(-1, table.shape[2], -1)
        found = table[:, part].gather(-1, index)
        total = found if total is None else total.add_(found)
    assert total is not None
    return total
