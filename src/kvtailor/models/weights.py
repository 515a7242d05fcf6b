"""Putting weights from a file into a model that was built without memory of its own."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from torch import Tensor, nn

from kvtailor.errors import ModelError


def assign_weights(model: nn.Module, state: dict[str, Tensor], tied: str, source: Path) -> None:
    """Put weights into a model on the meta device; only the tied output weight may be missing.

    Raises
    ------
    ModelError
        A weight is missing, left over or of another shape.
    """
    try:
        result = model.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:
        raise ModelError(f"{source}: the weights do not fit the model that the file describes: {error}") from error
    model.tie_weights()  # type: ignore[operator]
    unfit = result.unexpected_keys + [name for name in result.missing_keys if name != tied]
    unfit += [name for name, value in chain(model.named_parameters(), model.named_buffers()) if value.is_meta]
    if unfit:
        raise ModelError(f"{source}: the weights do not fit the model that the file describes: {', '.join(unfit)}")
