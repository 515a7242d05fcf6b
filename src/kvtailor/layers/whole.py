"""What every layer of rows has that holds all tokens: it can give them back."""

from __future__ import annotations

import torch

from kvtailor.arranged import Arranged, Codes
from kvtailor.kernels import native
from kvtailor.layers.rows import RowsLayer
from kvtailor.quantize.pack import unpack


class WholeLayer(RowsLayer):
    """Base of the layers that hold every token, packed or far away: outside of attached models they give tensors."""

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether a crop leaves no trace."""
        return True

    def take(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Hold tokens that were computed elsewhere, (B, Hkv, n, Dk) and (B, Hkv, n, Dv), without attending to them."""
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        self._check_batch(key, len(self.rows), self.heads)
        self._append(key.detach(), value.detach())
        self.make_room(0)
        self.account()

    def _update_unattended(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._append(key, value)
        return self._dense()

    def _append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.make_room(key.shape[2])
        places = torch.arange(self.seen, self.seen + key.shape[2], device=self.device)
        self.seen += key.shape[2]
        for row, row_key, row_value in zip(self.rows, key, value, strict=True):
            row.tail.append(row_key, row_value, places)
            row.total += len(places)

    def _dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = len(self.rows), self.heads, self.seen
        key, value = (torch.zeros(*shape, dim, dtype=self.dtype, device=self.device) for dim in self.dims)
        for number, row in enumerate(self.rows):
            for part in row.parts():
                key[number, part.heads, part.positions] = exact(part.keys, self.path).to(self.dtype)
                value[number, part.heads, part.positions] = exact(part.values, self.path).to(self.dtype)
        return key, value


def exact(part: torch.Tensor | Codes, path: str | None = None) -> torch.Tensor:
    """The numbers themselves, (h, n, D), in the model's basis.

    Parameters
    ----------
    part : what is stored.
    path : the C++ kernels that unpack arranged codes, or None.
    """
    if path is not None and isinstance(part, Arranged):
        return native.unpack(path, part)
    return unpack(part) if isinstance(part, Codes) else part
