"""Counting of messages and bytes between workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from tessel import transport
from tessel.transport import Traffic


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this worker sends and receives in the `with` block; complete when it has ended.

    >>> import tessel, torch
    >>> layer = tessel.nn.AllSumReduce(tessel.world(), [0])
    >>> with tessel.testing.count_traffic() as traffic:
    ...     y = layer(torch.ones(3))
    >>> traffic.bytes_sent
    0
    """
    before = transport.total_traffic()
    counted = Traffic()
    try:
        yield counted
    finally:
        after = transport.total_traffic()
        for each in fields(Traffic):
            change = getattr(after, each.name) - getattr(before, each.name)
            setattr(counted, each.name, change)
