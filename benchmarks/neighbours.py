"""Neighbours on a grid of workers, and what two of them exchange for a halo.

Pure integers, for all contenders of benchmarks/halo.py: also for those without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

Region = tuple[slice, ...]


@dataclass(frozen=True)
class Neighbourhood:
    """One worker's place on a grid; all workers hold blocks of one shape.

    Args:
        grid: of workers.
        shape: of a block.
        halo: the width of the halo in each dimension, on both sides where there is a neighbour.
        rank: of the worker, in row-major order.
    """

    grid: Sequence[int]
    shape: Sequence[int]
    halo: Sequence[int]
    rank: int

    @property
    def coordinates(self) -> tuple[int, ...]:
        rest, found = self.rank, []
        for size in reversed(self.grid):
            rest, at = divmod(rest, size)
            found.append(at)
        return tuple(reversed(found))

    @property
    def before(self) -> list[int]:
        """How much is added in front of the block."""
        return [h if at > 0 else 0 for h, at in zip(self.halo, self.coordinates, strict=True)]

    @property
    def after(self) -> list[int]:
        places = zip(self.halo, self.coordinates, self.grid, strict=True)
        return [h if at < size - 1 else 0 for h, at, size in places]

    @property
    def grown(self) -> tuple[int, ...]:
        """The shape of the block with its halo."""
        return tuple(map(sum, zip(self.before, self.shape, self.after, strict=True)))

    @property
    def inner(self) -> Region:
        """Where the block lies in the block with its halo."""
        return tuple(slice(b, b + n) for b, n in zip(self.before, self.shape, strict=True))

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The block with its halo in the whole tensor."""
        corner = [at * n for at, n in zip(self.coordinates, self.shape, strict=True)]
        return [
            (c - b, c + n + a)
            for c, b, n, a in zip(corner, self.before, self.shape, self.after, strict=True)
        ]

    def messages(self) -> Iterator[tuple[int, Region, Region]]:
        """For each neighbour, corners included: its rank, what leaves, and where its part goes."""
        ways = [(-1, 0, 1) if h else (0,) for h in self.halo]
        for step in product(*ways):
            there = [at + s for at, s in zip(self.coordinates, step, strict=True)]
            is_there = all(0 <= at < size for at, size in zip(there, self.grid, strict=True))
            if any(step) and is_there:
                rank = sum(at * prod(self.grid[d + 1 :]) for d, at in enumerate(there))
                dims = list(zip(step, self.shape, self.halo, self.before, strict=True))
                leaves = tuple(_edge(s, n, h) for s, n, h, _ in dims)
                arrives = tuple(_border(s, n, h, b) for s, n, h, b in dims)
                yield rank, leaves, arrives


def _edge(step: int, length: int, halo: int) -> slice:
    return (slice(0, length), slice(length - halo, length), slice(0, halo))[step]


def _border(step: int, length: int, halo: int, before: int) -> slice:
    end = before + length
    return (slice(before, end), slice(end, end + halo), slice(0, halo))[step]
