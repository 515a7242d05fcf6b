"""Far tokens in page-locked host memory, from which a GPU reads the chosen ones itself."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

from kvtailor.errors import StoreError
from kvtailor.formats import GROUP_TOKENS
from kvtailor.kernels import choice
from kvtailor.layers.far import FarTokens
from kvtailor.store.pool import Tier

CHUNK_BYTES = 1 << 21
"""Room that is locked at once, or a block if that is larger: 512 tokens of a layer of Llama 3.1 8B in 16 bits. It
bounds what is locked and not used."""


def serves(tier: Tier, device: torch.device) -> bool:
    """Whether a pool of this tier is one of these: in host memory of a GPU.

    Where the Triton kernels are asked for on the CPU, Triton's interpreter stands in for a GPU, and ordinary memory for
    page-locked memory.
    """
    return tier == "host" and (device.type == "cuda" or choice.active() == "triton")


class PinnedPool:
    """Tokens in chunks of equal size, page-locked where the device is a GPU.

    Growing adds a chunk and moves nothing: one region that doubles would be copied in the middle of a generation, with
    three times the memory locked meanwhile, and must not be freed before the last kernel that reads it is done. Chunks
    are held until the pool goes.

    Parameters
    ----------
    heads, width : KV heads; channels of a key and a value together.
    dtype, device : of keys and values; the device that reads.
    """

    tier: Tier = "host"

    def __init__(self, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.heads, self.width, self.dtype, self.device = heads, width, dtype, device
        blocks = CHUNK_BYTES // (GROUP_TOKENS * heads * width * dtype.itemsize)
        self.chunk_tokens = max(1, blocks) * GROUP_TOKENS
        self.rows = 0
        self.chunks: list[torch.Tensor] = []  # each (chunk_tokens, Hkv, Dk + Dv)
        self.addresses = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held, spare room included."""
        return sum(chunk.nbytes for chunk in self.chunks)

    def append(self, tokens: torch.Tensor) -> None:
        """Add tokens, (n, Hkv, Dk + Dv) on any device, and return once they are there; StoreError without room."""
        self._make_room(self.rows + len(tokens))
        taken = 0
        while taken < len(tokens):
            number, first = divmod(self.rows + taken, self.chunk_tokens)
            some = tokens[taken : taken + self.chunk_tokens - first]
            # Blocking, hence behind every kernel of this stream that still reads rows which a crop gave up.
            self.chunks[number][first : first + len(some)].copy_(some)
            taken += len(some)
        self.rows += len(tokens)

    def _make_room(self, rows: int) -> None:
        missing = -(-rows // self.chunk_tokens) - len(self.chunks)
        if missing > 0:
            chunks = [*self.chunks, *(self._chunk() for _ in range(missing))]
            starts = [chunk.data_ptr() for chunk in chunks]
            self.addresses = torch.tensor(starts, dtype=torch.int64, device=self.device)
            self.chunks = chunks

    def _chunk(self) -> torch.Tensor:
        shape, lock = (self.chunk_tokens, self.heads, self.width), self.device.type == "cuda"
        try:
            return torch.empty(shape, dtype=self.dtype, device="cpu", pin_memory=lock)
        except RuntimeError as error:
            size = math.prod(shape) * self.dtype.itemsize
            raise StoreError(f"{size} bytes of host memory cannot be page-locked: {error}") from None

    def pieces(self, first: int, stop: int) -> list[torch.Tensor]:
        """Tokens ``first`` to ``stop`` where they lie, chunk by chunk."""
        size = self.chunk_tokens
        touched = range(first // size, -(-stop // size))
        return [self.chunks[n][max(first - n * size, 0) : stop - n * size] for n in touched]

    def drop_from(self, rows: int) -> None:
        """Forget all tokens behind the first ``rows``; their room stays for others."""
        self.rows = min(self.rows, rows)

    def copy(self) -> PinnedPool:
        """A pool of its own with the same tokens."""
        other = PinnedPool(self.heads, self.width, self.dtype, self.device)
        other._make_room(self.rows)
        for piece in self.pieces(0, self.rows):
            other.append(piece)
        return other

    def __deepcopy__(self, memo: dict[int, object]) -> PinnedPool:
        return self.copy()

    def __del__(self) -> None:
        # PyTorch gives host memory to others at once, unless a copy of its own reads it; of kernels it does not know.
        if self.device.type == "cuda" and self.chunks and not sys.is_finalizing():
            torch.cuda.synchronize(self.device)


class PinnedTokens(FarTokens):
    """Far tokens in a :class:`PinnedPool`; parameters as for :class:`FarTokens`."""

    pool: PinnedPool  # type: ignore[assignment]

    def _new_pool(self, tier: Tier, folder: str | Path | None) -> PinnedPool:  # type: ignore[override]
        return PinnedPool(self.heads, sum(self.dims), self.dtype, self.device)

    def _write(self, token_major: torch.Tensor) -> None:
        self.pool.append(token_major)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, (Hkv, n, Dk) and (Hkv, n, Dv), put together on the device."""
        return self.span(0, self.length)

    def span(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a run of tokens, on the device."""
        pieces = [piece.to(self.device, non_blocking=True) for piece in self.pool.pieces(first, stop)]
        if not pieces:
            pieces = [torch.empty(0, self.heads, sum(self.dims), dtype=self.dtype, device=self.device)]
        keys, values = torch.cat(pieces).transpose(0, 1).split(self.dims, dim=-1)
        return keys, values

    def rows(self, heads: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As for :class:`FarTokens`; where the Triton kernels are asked for, the device reads them itself."""
        if choice.active() != "triton":
            return super().rows(heads, tokens)
        from kvtailor.kernels.triton.gather_rows import gather_rows

        pool = self.pool
        return gather_rows(pool.chunks, pool.addresses, self.dims[0], heads, tokens, check_index=False)

    def _pick(self, numbers: torch.Tensor, out: torch.Tensor) -> None:
        chunk = numbers // (self.pool.chunk_tokens * self.heads)
        inside = numbers % (self.pool.chunk_tokens * self.heads)
        for number in chunk.unique().tolist():
            mine = chunk == number
            out[mine] = self.pool.chunks[number].view(-1, sum(self.dims))[inside[mine]]
