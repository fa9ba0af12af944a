"""Settings of the allocators of glibc and torch, which they read when a process starts."""

from __future__ import annotations

import os
import sys

# what is freed is kept, else the kernel clears every large tensor anew
KEEP = {
    "MALLOC_MMAP_THRESHOLD_": "2147483647",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
    "THP_MEM_ALLOC_ENABLE": "1",  # huge pages for torch's large tensors; numpy's have them anyway
}
# what is larger than 4 MiB is given back
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20)}


def start_again_with(settings: dict[str, str]) -> None:
    """Let this script, and all processes that it starts, have these settings."""
    if any(os.environ.get(key) != value for key, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})
