"""Rows of bytes in slow memory: host memory, or a file that is mapped into it."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import tempfile
from pathlib import Path
from typing import Literal

from kvtailor.errors import StoreError

Tier = Literal["host", "disk"]

PAGE = mmap.ALLOCATIONGRANULARITY
LEAST_ROOM = 1 << 20  # bytes of addresses that are mapped at once


class Pool:
    """Rows of equal size, one behind the other, in a file without a name: it is gone with the process or the pool.

    Addresses are mapped ahead; memory and disk are taken by what is written. Rows are written by the file, so that a
    full disk is an error and not a signal, and read where they are mapped.

    Parameters
    ----------
    row_bytes : size of a row, 1 or more.
    tier : "host" for a file in memory, "disk" for one in ``folder``.
    folder : of files on disk; the system's temporary folder by default.

    Raises
    ------
    StoreError
        If the file cannot be made. Where the process may open no more files, its soft limit is raised to the hard one
        first: a cache has a file for each sequence of each layer.
    """

    def __init__(self, row_bytes: int, tier: Tier, folder: str | Path | None = None) -> None:
        self.row_bytes, self.tier, self.rows = row_bytes, tier, 0
        self.folder = Path(tempfile.gettempdir()) if folder is None else Path(folder)
        self._file = self._open()
        self._map: mmap.mmap | None = None
        self._room = 0  # bytes mapped

    def _open(self) -> int:
        try:
            return self._make_file()
        except (OSError, ValueError) as error:  # ValueError: a name that no folder can have
            if getattr(error, "errno", None) == errno.EMFILE:
                if _may_open_more():
                    return self._open()
                most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                raise StoreError(
                    f"{self._where} cannot hold one more cache file, of which each layer has one for each sequence: "
                    f"{most} files are open, and the process is allowed no more (ulimit -Hn); use a smaller batch"
                ) from None
            raise StoreError(f"{self._where} cannot hold cache files: {_reason(error)}") from None

    @property
    def _where(self) -> str:
        return "host memory" if self.tier == "host" else f"folder {str(self.folder)!r}"

    def _make_file(self) -> int:
        if self.tier == "host":
            return os.memfd_create("kvtailor")
        return os.open(self.folder, os.O_TMPFILE | os.O_RDWR, 0o600)

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.rows * self.row_bytes

    def append(self, data: memoryview) -> None:
        """Add whole rows.

        Parameters
        ----------
        data : contiguous bytes of them.

        Raises
        ------
        StoreError
            If they cannot be written, the disk being full, say; the rows before are as they were.
        """
        data = data.cast("B")
        if len(data) % self.row_bytes:
            raise StoreError(f"{len(data)} bytes to store; allowed: whole rows of {self.row_bytes}")
        start, done = self.nbytes, 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, data[done:], start + done)
        except OSError as error:
            self._give_back()
            where = "host memory" if self.tier == "host" else f"a file in {str(self.folder)!r}"
            raise StoreError(f"{len(data)} bytes cannot be written to {where}: {error.strerror}") from None
        self.rows += len(data) // self.row_bytes

    def read(self) -> memoryview:
        """All rows, where they lie, until the next :meth:`append`.

        Raises
        ------
        StoreError
            If the file lost some of them, or they cannot be mapped.
        """
        held = os.fstat(self._file).st_size
        if held < self.nbytes:
            raise StoreError(
                f"a cache file of {self.tier} memory was cut to {held} bytes, and {self.nbytes} were written"
            )
        if self._map is None or self._room < self.nbytes:
            self._map = self._mapped()
        return memoryview(self._map)[: self.nbytes]

    def _mapped(self) -> mmap.mmap:
        wanted = max(LEAST_ROOM, self.nbytes + self.nbytes // 2)
        self._room = -(-wanted // PAGE) * PAGE
        try:
            os.ftruncate(self._file, self._room)  # addresses alone: nothing is written
            return mmap.mmap(self._file, self._room, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise StoreError(f"{self._room} bytes of {self.tier} memory cannot be mapped: {error}") from None

    def expect(self, runs: list[tuple[int, int]]) -> None:
        """Tell the system that rows will be read now, so that it reads them side by side.

        Parameters
        ----------
        runs : first row and number of rows of each run.
        """
        size = self.row_bytes
        for first, count in runs:
            os.posix_fadvise(self._file, first * size, count * size, os.POSIX_FADV_WILLNEED)

    def drop_from(self, rows: int) -> None:
        """Forget all rows behind the first ``rows``, and give their memory or disk back."""
        if rows < self.rows:
            self.rows = rows
            self._give_back()

    def _give_back(self) -> None:
        """Cut the file behind the rows. What is mapped keeps its addresses, and later rows lie there again."""
        if os.fstat(self._file).st_size > self.nbytes:
            os.ftruncate(self._file, self.nbytes)

    def copy(self) -> Pool:
        """A pool of its own with the same rows."""
        other = Pool(self.row_bytes, self.tier, self.folder)
        if self.rows:
            other.append(self.read())
        return other

    def __deepcopy__(self, memo: dict[int, object]) -> Pool:
        return self.copy()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def _may_open_more() -> bool:
    """Let this process open as many files as the system allows it to; whether those are more than before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft != hard


def _reason(error: OSError | ValueError) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
