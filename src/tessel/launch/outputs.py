"""Outputs: stdout and stderr, which a worker shares with the process that calls it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

OUTPUTS = [1, 2]  # the file descriptors


def flush_outputs() -> None:
    """Write out what Python holds back."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def redirect_outputs(fds: Sequence[int]) -> None:
    """Let the outputs of this process go to other files, whose descriptors are used up."""
    for output, fd in zip(OUTPUTS, fds, strict=True):
        os.dup2(fd, output)
        os.close(fd)


def keep_lines_whole() -> None:
    """Write line by line, so that the lines of several workers do not mix."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)
