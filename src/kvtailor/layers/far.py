"""Tokens of one sequence in one layer that live in slow memory, and the index that finds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from kvtailor.formats import GROUP_TOKENS
from kvtailor.indexes.base import Index
from kvtailor.kernels import native
from kvtailor.layers.row import Part, Row
from kvtailor.store.pool import Pool, Tier


class FarTokens:
    """Keys and values, side by side for each token and head, in a pool of slow memory; always whole blocks of 64.

    Parameters
    ----------
    heads, dims : KV heads; channels of a key head and of a value head.
    like : a tensor whose dtype and device keys and values have.
    index : an empty one.
    tier, folder : as for :class:`Pool`.
    """

    def __init__(
        self, heads: int, dims: tuple[int, int], like: torch.Tensor, index: Index, tier: Tier, folder: str | Path | None
    ) -> None:
        self.heads, self.dims, self.dtype, self.device = heads, dims, like.dtype, like.device
        self.index = index
        self.positions = torch.empty(0, dtype=torch.int32, device=like.device)
        self.pool = self._new_pool(tier, folder)

    def _new_pool(self, tier: Tier, folder: str | Path | None) -> Pool:
        return Pool(self.heads * sum(self.dims) * self.dtype.itemsize, tier, folder)

    @property
    def length(self) -> int:
        """Tokens that live here."""
        return self.pool.rows

    @torch.inference_mode(False)  # what is kept must be ordinary tensors
    def append(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, path: str | None) -> None:
        """Take tokens in, all or none.

        Parameters
        ----------
        keys, values : (Hkv, n, Dk) and (Hkv, n, Dv), n a multiple of 64.
        positions : (n,) their slots.
        path : the C++ kernels that fill the index, or None.

        Raises
        ------
        StoreError
            If they cannot be written.
        """
        before = self.length
        self._write(torch.cat([keys, values], dim=-1).transpose(0, 1).contiguous())
        try:
            self.index.append(keys, path)
        except BaseException:
            self.pool.drop_from(before)
            raise
        self.positions = torch.cat([self.positions, positions.int()])

    def _write(self, token_major: torch.Tensor) -> None:
        """Add tokens (n, Hkv, Dk + Dv) to the pool."""
        self.pool.append(token_major.cpu().view(torch.uint8).flatten().numpy().data)

    def learn(self, path: str | None) -> None:
        """Make the index anew of all tokens, where it was made of a part of them."""
        if self.index.learned_too_early:
            fresh = self.index.emptied()
            fresh.append(self.span(0, self.length)[0], path)
            self.index = fresh

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values where they lie, (Hkv, n, Dk) and (Hkv, n, Dv) on the CPU; StoreError if one is gone."""
        keys, values = self._token_major().transpose(0, 1).split(self.dims, dim=-1)
        return keys, values

    def _token_major(self) -> torch.Tensor:
        return torch.frombuffer(self.pool.read(), dtype=self.dtype).view(self.length, self.heads, sum(self.dims))

    def span(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a run of tokens, (Hkv, n, Dk) and (Hkv, n, Dv) on the device."""
        keys, values = (part[:, first:stop].to(self.device) for part in self.read())
        return keys, values

    def gather(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of chosen tokens, on the device.

        Parameters
        ----------
        index : (S, k) int64, S a multiple of Hkv: sets of a head follow each other.

        Returns
        -------
        (S, k, Dk) and (S, k, Dv).
        """
        head = torch.arange(self.heads, device=index.device).repeat_interleave(index.shape[0] // self.heads)
        return self.rows(head[:, None].expand_as(index), index)

    def rows(self, heads: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of pairs of a head and a token, on the device.

        Parameters
        ----------
        heads, tokens : (...) int64.

        Returns
        -------
        (..., Dk) and (..., Dv).
        """
        heads, tokens = heads.cpu(), tokens.cpu()
        numbers = (tokens * self.heads + heads).flatten()  # of rows, counted token by token
        # Page-locked memory is copied without a halt; PyTorch's allocator keeps it from others until the copy is done.
        lock = self.device.type == "cuda"
        staged = torch.empty(len(numbers), sum(self.dims), dtype=self.dtype, device="cpu", pin_memory=lock)
        self._pick(numbers, staged)
        found = staged.to(self.device, non_blocking=True).view(*tokens.shape, -1)
        return found[..., : self.dims[0]], found[..., self.dims[0] :]

    def _pick(self, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """Copy rows of one token and head each, (m,), to host memory (m, Dk + Dv)."""
        if self.pool.tier == "disk":
            self.pool.expect(_runs(numbers // self.heads))
        torch.index_select(self._token_major().view(-1, sum(self.dims)), 0, numbers, out=out)

    @torch.inference_mode(False)  # what is kept must be ordinary tensors
    def take_from(self, count: int, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Forget all tokens but the whole blocks of the first ``count``; where none is left the index begins anew.

        Parameters
        ----------
        count : tokens, up to :attr:`length`.
        stop : end of those that the caller takes, from the first forgotten one on; ``count`` by default.

        Returns
        -------
        Their keys (Hkv, n, Dk), values (Hkv, n, Dv) and positions (n,).
        """
        whole, stop = count // GROUP_TOKENS * GROUP_TOKENS, count if stop is None else stop
        keys, values = self.span(whole, stop)
        rest = keys.clone(), values.clone(), self.positions[whole:stop].clone()
        self.pool.drop_from(whole)
        if whole:
            self.index.drop_from(whole)
        else:
            self.index = self.index.emptied()
        self.positions = self.positions[:whole].clone()
        return rest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What stands in fast memory, with its kind."""
        for tensor in self.index.tensors():
            yield "index", tensor
        yield "positions", self.positions

    def copy(self) -> FarTokens:
        """A store of its own with the same tokens."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.index, other.pool = self.index.copy(), self.pool.copy()
        return other


def _runs(tokens: torch.Tensor) -> list[tuple[int, int]]:
    """First and number of the tokens in each unbroken run, every token once."""
    once = tokens.unique()
    first = torch.cat([once[:1], once[1:][once.diff() > 1]])
    last = torch.cat([once[:-1][once.diff() > 1], once[-1:]])
    return list(zip(first.tolist(), (last - first + 1).tolist(), strict=True))


class FarRow(Row):
    """A row most of whose tokens live in slow memory: sinks in a segment, the newest tokens in the tail, the rest far.

    Parameters
    ----------
    key, value, is_native : as for every row.
    far : where the rest lives.
    sinks, recent : first tokens, and newest ones at least, that never do.
    """

    def __init__(
        self, key: torch.Tensor, value: torch.Tensor, is_native: bool, far: FarTokens, sinks: int, recent: int
    ) -> None:
        super().__init__(key, value, is_native=is_native)
        self.far, self.sinks, self.recent = far, sinks, recent

    @property
    def lengths(self) -> list[int]:
        """Tokens held per KV head."""
        return [self.far.length + n for n in super().lengths]

    @property
    def shape(self) -> tuple[int, ...]:
        """What the bytes held depend on."""
        return *super().shape, self.far.length

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All that is stored in fast memory, with its kind."""
        yield from super().tensors()
        yield from self.far.tensors()

    def near(self) -> list[Part]:
        """What a query always reads: sinks and newest tokens."""
        return list(super().parts())

    def parts(self) -> Iterator[Part]:
        """Everything."""
        yield from super().parts()
        if self.far.length:
            keys, values = self.far.span(0, self.far.length)
            yield Part(slice(None), keys, values, self.far.positions.long())

    def handed_whole(self) -> native.Row:
        """Everything, as the C++ kernels take it."""
        segments, tail, lengths = self.handed()
        if self.far.length:
            segments = [*segments, native.hand_segment(*self.far.read(), self.far.positions)]
        return segments, tail, lengths

    def positions(self) -> torch.Tensor:
        """Slots of everything held, (Hkv, n) int64."""
        return torch.cat([super().positions(), self.far.positions.long().expand(self.tail.heads, -1)], dim=1)

    def make_room(self, path: str | None) -> None:
        """Move whole blocks of the oldest tokens in fast memory away: the first time all but sinks and newest."""
        if self.sinks and not self.segments:
            if self.tail.longest < self.sinks + self.recent + GROUP_TOKENS:
                return
            self.seal(self.sinks, lambda keys, values: (keys.clone(), values.clone()))
        blocks = (self.tail.longest - self.recent) // GROUP_TOKENS
        if blocks > 0:
            self.move(blocks * GROUP_TOKENS, path)

    def move(self, count: int, path: str | None) -> None:
        """Move the first ``count`` tokens of the tail, a multiple of 64, to slow memory."""
        tail = self.tail
        keys, values, slots = (tail.even(part)[:, :count] for part in (tail.keys, tail.values, tail.positions))
        self.far.append(keys, values, slots[0], path)
        tail.drop_first(count)

    def crop(self, slot: int) -> None:
        """Forget every token at ``slot`` and later; sinks and newest are then those of a row that never had more."""
        super().crop(slot)
        left = int((self.far.positions < slot).sum())
        within = self.sealed + left + self.tail.longest - self.sinks - self.recent
        far = min(left, max(0, within // GROUP_TOKENS * GROUP_TOKENS))
        if far < self.far.length:
            self._bring_back(*self.far.take_from(far, left))
        if 0 < self.sealed < self.sinks:  # then nothing newer is left
            (cut,), self.segments = self.segments, []
            assert isinstance(cut.keys, torch.Tensor) and isinstance(cut.values, torch.Tensor)
            self.tail.append(cut.keys, cut.values, cut.positions)

    def _bring_back(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        """Put tokens before those of the tail."""
        tail = self.tail
        newer = [tail.even(part).clone() for part in (tail.keys, tail.values, tail.positions)]
        tail.drop_from(0)
        tail.append(keys, values, positions)
        tail.append(newer[0], newer[1], newer[2][0])

    def copy(self) -> FarRow:
        """A row of its own with the same tokens."""
        other = super().copy()
        assert isinstance(other, FarRow)
        other.far, other.sinks, other.recent = self.far.copy(), self.sinks, self.recent
        return other
