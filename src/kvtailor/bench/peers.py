"""Decode steps of other engines, measured elsewhere on the same machine and given as a file."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvtailor.errors import KVTailorError


class PeerRow(BaseModel):
    """Decode steps of another engine with one cache at one length.

    Attributes
    ----------
    engine, weights, cache : what ran, and how it stores weights and cache.
    context : tokens held.
    threads : threads that it ran on.
    ms, cpu_ms : wall and processor time of a step, milliseconds; the latter may be unknown.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str = Field(min_length=1)
    weights: str
    cache: str
    context: int = Field(ge=1)
    threads: int = Field(ge=1)
    ms: float = Field(gt=0, allow_inf_nan=False)
    cpu_ms: float | None = Field(None, gt=0, allow_inf_nan=False)

    @property
    def fair_ms(self) -> float:
        """What ratios are made of: processor time at one thread where it is known, else wall time."""
        return self.cpu_ms if self.threads == 1 and self.cpu_ms is not None else self.ms


_FILE = TypeAdapter(list[PeerRow])


def read_peers(path: Path) -> list[PeerRow]:
    """Read the rows of a JSON file.

    Raises
    ------
    KVTailorError
        If it cannot be read, is not JSON, or holds anything but a list of such rows; names the row and the field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KVTailorError(f"peers file {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KVTailorError(f"peers file {str(path)!r} is not UTF-8: allowed is JSON text") from None
    try:
        return _FILE.validate_json(text)
    except ValidationError as error:
        raise KVTailorError(f"peers file {str(path)!r}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    where = ".".join(f"[{part}]" if isinstance(part, int) else str(part) for part in problem["loc"])
    held = "" if problem["type"] in ("missing", "json_invalid") else f" (it held {problem['input']!r})"
    fields = ", ".join(PeerRow.model_fields)
    return f"{where + ': ' if where else ''}{problem['msg']}{held}; allowed is a list of objects with {fields}"
