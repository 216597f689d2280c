"""The samples' own bytes: files beside the ledger that are only ever appended to, each removed once no row points into it.

A payload is written once, in one call a commit, before the row that says where it lies is committed. So whoever sees the row can
read the payload, and what a crash left without a row is never looked at. SQLite would write every payload twice, page by page: to
the log and to the file. Each start of a run begins a new file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

FILE_BYTES = 16 << 20
"""A file is full from this size on."""

Place = tuple[int, int, int]
"""Number of the file, offset, bytes."""


class PayloadFiles:
    """The writing end, of the ledger at `path`.

    Args:
        flushes: Have the disk itself confirm each append.
    """

    def __init__(self, path: Path, *, flushes: bool) -> None:
        self._path = path
        self._flushes = flushes
        self._number = max(_numbers(path), default=0)
        self._fd = -1
        self._end = 0

    def append(self, bodies: Sequence[bytes]) -> list[Place]:
        """Write these payloads and return where each lies.

        Raises:
            OSError: The disk is full or broken.
        """
        if self._fd < 0 or self._end >= FILE_BYTES:
            self.close()
            self._number, self._end = self._number + 1, 0
            self._fd = os.open(_file(self._path, self._number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        places = []
        for body in bodies:
            places.append((self._number, self._end, len(body)))
            self._end += len(body)
        rest = memoryview(b"".join(bodies))
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        if self._flushes:
            os.fdatasync(self._fd)
        return places

    def remove_all_but(self, used: Collection[int]) -> None:
        """Delete the files that no row points into; the one that is being written stays."""
        for number in _numbers(self._path):
            if number not in used and (number != self._number or self._fd < 0):
                _file(self._path, number).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the file that is being written."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_payload(path: Path, number: int, start: int, num_bytes: int) -> bytes:
    """Return a payload of the ledger at `path`.

    Raises:
        OSError: There is no such file.
        ValueError: The file ends before the payload does.
    """
    with _file(path, number).open("rb") as file:
        if not 0 <= start <= start + num_bytes <= os.fstat(file.fileno()).st_size:
            raise ValueError(f"{num_bytes} bytes at {start} do not lie in {file.name}")
        return os.pread(file.fileno(), num_bytes, start)


def _file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.payloads-{number:06d}")


def _numbers(path: Path) -> list[int]:
    named = re.compile(re.escape(path.name) + r"\.payloads-(\d{6,})")
    return [int(found[1]) for each in path.parent.iterdir() if (found := named.fullmatch(each.name))]
