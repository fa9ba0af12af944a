"""Environment: the parts of the caller's process that a call on a worker sees."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tessel.machine import keep_freed_memory, loopback
from tessel.settings import OF_TASKS

OUTPUTS = [1, 2]  # the file descriptors of stdout and stderr
_OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


class Environment(NamedTuple):
    """The variables, paths, arguments, directory and number of threads of a call."""

    environ: dict[str, str]
    path: list[str]
    argv: list[str]
    directory: str
    threads: int

    @classmethod
    def present(cls, threads: int) -> Environment:
        """The environment of this process, with another number of torch threads."""
        # Gloo and NCCL would listen on the address of the host's name, which may not be one of its
        # own, and which others can reach.
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        interface = loopback()
        local = {} if interface is None else dict.fromkeys(names, interface)
        return cls(
            environ={**local, **os.environ, "OMP_NUM_THREADS": str(threads)},
            path=[str(entry) for entry in sys.path],
            argv=list(sys.argv),
            directory=os.getcwd(),
            threads=threads,
        )

    def enter(self, known: dict[str, str], variables: dict[str, str]) -> None:
        """Adopt this environment, with these variables instead of those that launchers set.

        `known` has the variables of the previous environment, and is updated to those of this one.
        """
        environ = {
            name: value
            for name, value in self.environ.items()
            if not name.startswith("TORCHELASTIC_") and name not in (*_OF_TORCHRUN, *OF_TASKS)
        } | variables
        # Only variables that changed since the last call: those that the worker set itself stay.
        for name in known.keys() - environ.keys():
            os.environ.pop(name, None)
        for name, value in environ.items():
            if known.get(name) != value:
                os.environ[name] = value
        known.clear()
        known.update(environ)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        os.chdir(self.directory)
        keep_freed_memory()
        use_threads(self.threads)


def use_threads(count: int) -> None:
    """Let torch and numpy use as many threads as if this process had begun with OMP_NUM_THREADS."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    use_threads_in_numpy(count)


def use_threads_in_numpy(count: int) -> None:
    """Let numpy use as many threads, or as many as the user has set for OpenBLAS.

    Forks need not set again what a process has set. That would start a thread for each core in
    them, however many are used.
    """
    global _openblas_threads
    wanted = os.environ.get("OPENBLAS_NUM_THREADS", "")
    count = int(wanted) if wanted.isdecimal() and int(wanted) else count
    if _openblas_threads != count:
        _openblas_threads = count
        for path in _libraries("openblas"):
            with contextlib.suppress(OSError):  # data of this name, or replaced on the disk
                library = ctypes.CDLL(path)
                for name in _OPENBLAS_SETTERS:
                    if (setter := getattr(library, name, None)) is not None:
                        setter(count)


_openblas_threads: int | None = None  # as they were set here
_OPENBLAS_SETTERS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}"
    for prefix in ("", "scipy_")
    for suffix in ("", "64_")  # and not "_64_", which takes the address of a number
)


def _libraries(name: str) -> list[str]:
    """The files of the libraries in this process whose names contain a word."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps}
    except OSError:  # only Linux tells
        return []
    return sorted(path for path in paths if name in os.path.basename(path))


def flush_outputs() -> None:
    """Flush Python's buffers of the outputs."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def redirect_outputs(fds: Sequence[int]) -> None:
    """Redirect the outputs of this process to other files, whose descriptors are closed."""
    for output, fd in zip(OUTPUTS, fds, strict=True):
        os.dup2(fd, output)
        os.close(fd)


def keep_lines_whole() -> None:
    """Write line by line, so that the lines of several workers do not mix."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)
