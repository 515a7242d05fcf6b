"""A layer whose older tokens are packed in whole blocks; sinks and newest tokens stay exact."""

from __future__ import annotations

from kvtailor.layers.packing import Packing
from kvtailor.layers.whole import WholeLayer


class QuantizedLayer(WholeLayer):
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
