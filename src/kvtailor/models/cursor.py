"""Reading little-endian values one after another from a file that may be cut short."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np


class CutShortError(Exception):
    """The bytes end before what was asked for; the reader of the format turns this into a ``ModelError``."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"{needed} bytes are asked for")
        self.needed = needed


class Cursor:
    """A position in a file's bytes that moves as values are read.

    Parameters
    ----------
    data
        The file's bytes, ``uint8`` of shape (bytes,); a memory map is not copied.
    """

    def __init__(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.data = data.data
        self.position = 0

    def take(self, count: int) -> memoryview:
        """Give the next ``count`` bytes.

        Raises
        ------
        CutShortError
            The bytes end before.
        """
        end = self.position + count
        if end > len(self.data):
            raise CutShortError(end)
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def number(self, code: str) -> Any:
        """Give the next value of a ``struct`` code, such as ``I`` for a 32-bit unsigned integer."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self, length_code: str) -> str:
        """Give the next UTF-8 string, whose length in bytes stands before it."""
        return str(self.take(self.number(length_code)), "utf-8")
