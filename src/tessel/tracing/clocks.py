"""Clocks: the offsets of the hosts' clocks from that of the first worker."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tessel.transport import NUM_WORDS, Group

ROUNDS = 16


def compared(group: Group) -> list[int] | None:
    """This worker's time, and the offset of the first worker's clock from it.

    All workers record when they entered an exchange that no worker leaves before all have entered.
    For a worker that entered at a and left at b, and one that entered at c and left at d, each by
    its own clock, the offset of the second is in [a - d, b - c]. The narrowest of several such
    intervals is that of the shortest round trip, and its middle is the estimate.

    It returns None if all workers are on one host, and share a clock.
    """
    if len({process.host for process in group._membership.processes}) < 2:
        return None
    came, left = [], [0]
    rows: list[np.ndarray] = []
    for _ in range(ROUNDS + 1):  # each sends when it left the round before
        came.append(time.monotonic_ns())
        rows.append(np.frombuffer(group.share_words([came[-1], left[-1]]), np.int64))
        left.append(time.monotonic_ns())
    said = np.stack([row.reshape(-1, NUM_WORDS)[0, :2] for row in rows])  # of the first
    theirs = list(zip(said[:-1, 0].tolist(), said[1:, 1].tolist(), strict=True))
    return [came[-1], offset(theirs, list(zip(came[:-1], left[1:-1], strict=True)))]


def offset(first: Sequence[tuple[int, int]], own: Sequence[tuple[int, int]]) -> int:
    """The offset to add to a worker's clock, from the times of exchanges on both.

    >>> offset([(100, 130), (200, 220)], [(5103, 5125), (5204, 5218)])
    -5001
    """
    pairs = zip(first, own, strict=True)
    bounds = [(came - gone, went - here) for (came, went), (here, gone) in pairs]
    low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
    return (low + high) // 2
