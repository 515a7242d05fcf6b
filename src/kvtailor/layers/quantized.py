"""A layer whose older tokens are packed in whole blocks; sinks and newest tokens stay exact."""

from __future__ import annotations

import torch

from kvtailor.arranged import Arranged, Codes
from kvtailor.kernels import native
from kvtailor.layers.packing import Packing
from kvtailor.layers.rows import RowsLayer
from kvtailor.quantize.pack import unpack


class QuantizedLayer(RowsLayer):
    """Tokens packed to few bits; attention is computed from the codes."""

    def check_sizes(self) -> None:
        """Raise PlanError if the format cannot hold heads of these sizes."""
        self.packing = Packing(self.plan.form, *self.dims, path=self.path)

    @property
    def is_arranged(self) -> bool:
        """Whether the codes stand in the order of the C++ kernels."""
        return self.packing.path is not None

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether a crop leaves no trace: within the exact newest tokens it does not."""
        return self.step.recording or self.plan.form.residual > 0

    def make_room(self, count: int) -> None:
        """Pack the blocks that are due."""
        for row in self.rows:
            self.packing.seal(row)

    def _update_unattended(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.make_room(key.shape[2])
        places = torch.arange(self.seen, self.seen + key.shape[2], device=self.device)
        self.seen += key.shape[2]
        for row, row_key, row_value in zip(self.rows, key, value, strict=True):
            row.tail.append(row_key, row_value, places)
            row.total += len(places)
        return self._dense()

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
