"""What an index is: scores of tokens for a query, without reading the tokens' keys."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import torch


class Index(ABC):
    """What is known of the keys of one sequence in one layer, in fast memory. A subclass's keywords are its options.

    Attributes
    ----------
    name : as plans spell it.
    length : tokens that it knows.
    """

    name: ClassVar[str]
    length: int = 0

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """An empty index; raises ValueError that names the option and what is allowed."""
        known = list(inspect.signature(cls).parameters)
        for option in options:
            if option not in known:
                allowed = ", ".join(known) or "none"
                raise ValueError(f"index {cls.name!r} has no option {option!r}: allowed are {allowed}")
        return cls(**options)

    def check_dim(self, dim: int) -> None:
        """Raise PlanError if heads of ``dim`` channels cannot be indexed."""

    @abstractmethod
    def append(self, keys: torch.Tensor, path: str | None) -> None:
        """Take in the next tokens.

        Parameters
        ----------
        keys : (Hkv, n, D), n a multiple of 64.
        path : the C++ kernels, or None for the reference.
        """

    @property
    def learned_too_early(self) -> bool:
        """Whether the index would be better had it known all its tokens from the start."""
        return False

    @abstractmethod
    def emptied(self) -> Self:
        """A fresh index with the same options."""

    @abstractmethod
    def scores(self, query: torch.Tensor, path: str | None) -> torch.Tensor:
        """Estimates of the products of queries and keys.

        Parameters
        ----------
        query : (Hkv, M, D).
        path : as for :meth:`append`.

        Returns
        -------
        (Hkv, M, length) float32, not scaled.
        """

    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is stored."""

    @abstractmethod
    def token_bytes(self, heads: int, dim: int, element: int) -> float:
        """Bytes of one token over all KV heads.

        Parameters
        ----------
        heads, dim, element : KV heads, their channels, and bytes of a number of the model.
        """

    def fixed_bytes(self, heads: int, dim: int) -> int:
        """Bytes that do not grow with the tokens."""
        return 0

    @abstractmethod
    def drop_from(self, length: int) -> None:
        """Forget all tokens behind the first ``length``, a multiple of 64."""

    @abstractmethod
    def copy(self) -> Self:
        """An index of its own that knows the same tokens."""


def check_option(index: str, option: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    if type(value) not in {type(one) for one in allowed} or value not in allowed:
        raise ValueError(
            f"index {index!r}: {option} {value!r} is not offered: allowed are {', '.join(map(str, allowed))}"
        )


def check_count(index: str, option: str, value: object, least: int, most: int) -> None:
    """Raise ValueError unless ``value`` is a whole number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"index {index!r}: {option} {value!r} cannot be used: allowed are {least} to {most}")
