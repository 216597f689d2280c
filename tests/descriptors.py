"""What a test asks about the file descriptors of its own process."""

import contextlib
import os
import resource
from collections.abc import Iterator


def open_descriptors() -> set[int]:
    """Return those that are open, and the one that looking takes; compare with `<=`."""
    return set(map(int, os.listdir("/proc/self/fd")))


@contextlib.contextmanager
def descriptors_left(free: int) -> Iterator[None]:
    """Let this process open so many more."""
    before, used = resource.getrlimit(resource.RLIMIT_NOFILE), open_descriptors()
    # From 3 on: below, poll(2) refuses what libzmq asks it, which then aborts the process.
    limit = next(limit for limit in range(3, before[0]) if limit - sum(number < limit for number in used) >= free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
