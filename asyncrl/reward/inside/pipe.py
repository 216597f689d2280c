"""Length-prefixed JSON over two descriptors, both ends blocking."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

Frame = dict[str, Any]


class SessionOver(BaseException):
    """The process at the other end of the pipe is gone, has said that it ended, or does not keep to the protocol."""


class Pipe:
    """Length-prefixed JSON over a pair of file descriptors; refuses frames larger than `max_bytes`."""

    def __init__(self, read_fd: int, write_fd: int, max_bytes: int) -> None:
        self.read_fd, self.write_fd, self.max_bytes = read_fd, write_fd, max_bytes

    def read(self) -> Frame:
        """Return the next frame, or raise SessionOver."""
        (size,) = struct.unpack("<I", self._exactly(4))
        if size > self.max_bytes:
            raise SessionOver(f"frame of {size} bytes")
        frame = json.loads(self._exactly(size))
        if not isinstance(frame, dict):
            raise SessionOver("not a frame")
        return frame

    def write(self, frame: Frame) -> None:
        """Send a frame, or raise ValueError where it is larger than the other end takes."""
        payload = json.dumps(frame).encode()
        if len(payload) > self.max_bytes:
            raise ValueError(f"frame of {len(payload)} bytes, {self.max_bytes} are allowed")
        left = memoryview(struct.pack("<I", len(payload)) + payload)
        while left:
            left = left[os.write(self.write_fd, left) :]

    def _exactly(self, size: int) -> bytes:
        chunks = []
        while size:
            chunk = os.read(self.read_fd, min(size, 1 << 20))
            if not chunk:
                raise SessionOver("end of file")
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)
