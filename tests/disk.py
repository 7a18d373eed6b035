"""A disk with no room, for a few lines of a test."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_files(limit: int = 4096) -> Iterator[None]:
    """Makes the kernel refuse files larger than ``limit`` bytes, as a full disk refuses any.

    Only around the lines that write: the limit holds for pytest's own output too, where that goes to a file.
    """
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
