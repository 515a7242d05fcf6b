"""How much a layer may keep: a number of tokens, a fraction of the prompt, or bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
ALLOWED = "a number of tokens (512), a fraction of the prompt (25% or 0.25), or bytes (64MiB), above 0"


@dataclass(frozen=True)
class Budget:
    """An amount of KV: ``tokens`` per KV head, a ``fraction`` of the prompt, or ``bytes`` over all its layers."""

    kind: Literal["tokens", "fraction", "bytes"]
    amount: float

    @classmethod
    def parse(cls, text: object) -> Budget:
        """Read a budget as users write it; raises ValueError that says what is allowed."""
        if isinstance(text, Budget):
            return text
        budget = cls._parse(text)
        if budget is None or not math.isfinite(budget.amount) or budget.amount <= 0:
            raise ValueError(f"budget {text!r} cannot be used: allowed is {ALLOWED}")
        if budget.kind == "fraction" and budget.amount > 1:
            raise ValueError(f"budget {text!r} cannot be used: a fraction goes up to 100%")
        return budget

    @classmethod
    def _parse(cls, text: object) -> Budget | None:
        if isinstance(text, bool):
            return None
        if isinstance(text, int):
            return cls("tokens", text)
        if isinstance(text, float):
            return cls("fraction", text)
        if not isinstance(text, str):
            return None
        match = re.fullmatch(r"\s*(-?\d+(?:\.\d*)?|-?\.\d+)\s*([A-Za-z%]*)\s*", text)
        if match is None:
            return None
        number, unit = match.groups()
        if unit == "%":
            return cls("fraction", float(number) / 100)
        if unit in UNITS:
            return cls("bytes", float(number) * UNITS[unit])
        if unit == "":
            return cls("tokens", int(number)) if re.fullmatch(r"-?\d+", number) else cls("fraction", float(number))
        return None

    def __str__(self) -> str:
        if self.kind == "tokens":
            return f"{int(self.amount)}"
        if self.kind == "fraction":
            return f"{self.amount * 100:.12g}%"
        unit = next((u for u in ("GiB", "MiB", "KiB") if self.amount >= UNITS[u]), "B")
        return f"{self.amount / UNITS[unit]:.15g}{unit}"

    def tokens(self, seen: int, bytes_per_token: int) -> int:
        """Tokens per KV head and sequence that this amount allows.

        Parameters
        ----------
        seen : tokens of the prompt, for fractions.
        bytes_per_token : what one token costs in all layers that share this budget, for bytes.
        """
        if self.kind == "tokens":
            return int(self.amount)
        if self.kind == "fraction":
            return max(1, math.ceil(self.amount * seen - 1e-9))
        return int(self.amount // bytes_per_token)
