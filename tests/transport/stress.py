"""Random movements between random layouts, through shared memory and through Gloo, bit by bit.

Every worker draws the same cases from one seed. `python tests/transport/stress.py 100000`
runs as many on 2, 4 and 8 workers.
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

import tessel
from tessel import Layout, Move, Partition, transport
from tessel.transport import job, process
from tessel.transport.group import Group, Membership

DTYPES = (
    *(torch.float32, torch.float64, torch.complex64, torch.bfloat16, torch.int64, torch.int8),
    *(torch.uint8, torch.bool),
)
EARLY, MOST_PENDING = 0.3, 4  # movements that begin before they are waited for
SMALL, LARGE = 60, 1_500_000  # elements: of most tensors, and of some that take many slots


@contextmanager
def afresh(**environment: str) -> Iterator[None]:
    """As if this job had begun with other variables: groups and memory are made anew."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    _forget()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        _forget()


def _forget() -> None:
    if job._current is not None:
        job._current.membership.watch.end()
        if job._current.membership.host is not None:
            job._current.membership.host.leave()
    job._current = None


@contextmanager
def on_hosts(*names: str) -> Iterator[None]:
    """As if the workers ran on several hosts, each on the one of its name."""
    mine = names[transport.this_worker()]
    real, process.this_host = process.this_host, lambda: mine
    _forget()
    try:
        yield
    finally:
        process.this_host = real
        _forget()


def draw_grid(rng: random.Random, dims: int) -> Partition:
    """Some of the workers in any order on a grid."""
    n = transport.num_workers()
    size = rng.randint(1, n)
    ranks = rng.sample(range(n), size)
    shape = [1] * dims
    for factor in _factors(size):
        shape[rng.randrange(dims)] *= factor
    chosen = tessel.world().create_partition_inclusive(ranks)
    return chosen.create_cartesian_topology_partition(shape)


def _factors(number: int) -> list[int]:
    for factor in range(2, number + 1):
        if number % factor == 0:
            return [factor, *_factors(number // factor)]
    return []


def draw_layout(rng: random.Random, shape: tuple[int, ...]) -> Layout:
    """Split, whole or copied along each axis, in even or uneven boxes."""
    P = draw_grid(rng, len(shape))
    axes = [axis if rng.random() < 0.7 else None for axis in range(len(shape))]
    shared = [axis for axis in range(len(shape)) if axis not in axes and rng.random() < 0.5]
    layout = Layout.split(P, shape, axes, shared)
    if rng.random() < 0.3:
        return layout.grow([(rng.randint(0, 2), rng.randint(0, 2)) for _ in shape])
    return layout


def draw_shape(rng: random.Random, limit: int) -> tuple[int, ...]:
    shape = [1] * rng.randint(1, 4)
    for _ in range(8):
        longer = list(shape)
        longer[rng.randrange(len(shape))] = rng.randint(1, max(2, limit // 8))
        shape = longer if math.prod(longer) <= limit else shape
    return tuple(shape)


def draw_values(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def with_gloo(move: Move) -> Move:
    """The same movement, through Gloo."""
    other = Move(move.domain, move.codomain)
    own = move.group
    if own.handle is not None:
        other.__dict__["_group"] = Group(own.workers, own.handle, Membership())
    return other


def movements(count: int, seed: int, compare: bool = True) -> list[str]:
    """Carry out random movements, some of which begin before others; what was wrong with them."""
    rng, wrong = random.Random(seed), []
    pending: list[Callable[[], None]] = []
    moves: list[Move] = []
    for number in range(count):
        if number % 20 == 0 or not moves:  # groups and plans cost more than movements
            shape = draw_shape(rng, LARGE if rng.random() < 0.05 else SMALL)
            moves.append(Move(draw_layout(rng, shape), draw_layout(rng, shape)))
            moves = moves[-50:]
        move = rng.choice(moves)  # which most repeat
        source, shape = move.domain, move.domain.shape
        dtype = rng.choice(DTYPES if source.owns_once else DTYPES[:-1])
        values = draw_values(rng, shape, dtype)
        is_early, next_first = rng.random() < EARLY, rng.random() < 0.5
        if move.takes_part:
            mine = source.local_part(values)
            wait = move.start(mine) if is_early else partial(move.apply, mine)

            def check(
                name: str = f"{number}: {move} {dtype}",
                wait: Callable[[], torch.Tensor] = wait,
                move: Move = move,
                values: torch.Tensor = values,
                mine: torch.Tensor = mine,
            ) -> None:
                y = wait()
                gloo = with_gloo(move).apply(mine) if compare else y
                if not (is_right(move, values, y) and same(y, gloo)):
                    wrong.append(name)
        else:

            def check() -> None: ...  # it counts, so that all wait in one order

        if is_early:
            pending.append(check)
        else:
            check()
        while len(pending) > MOST_PENDING or (pending and next_first and not is_early):
            pending.pop(rng.randrange(len(pending)))()
    for check in pending:
        check()
    return wrong


def is_right(move: Move, values: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether a part is that of the whole, times the copies that were summed."""
    if not move.codomain.partition.active:
        return y.numel() == 0
    source = move.domain
    if not source.owns_once:
        copies = torch.zeros(source.shape, dtype=torch.int64)
        for place in range(source.partition.size):
            worker = source.partition.ranks[place]
            coordinates = source.partition.coordinates(worker)
            box = source.box(worker)
            if box is not None and all(coordinates[axis] == 0 for axis in source.shared):
                copies[tuple(slice(*interval) for interval in box)] += 1
        if y.dtype in (torch.int8, torch.uint8, torch.bfloat16):
            return True  # these wrap or round: compared with Gloo alone
        values = values * copies.to(values.dtype)
    return same(y, move.codomain.local_part(values))


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x, y) and x.dtype == y.dtype


def main() -> None:
    count = int(sys.argv[1])
    for nprocs in (2, 4, 8):
        for compare in (False, True):
            number = count // 10 if compare else count
            begin = time.perf_counter()
            wrong = tessel.launch(movements, nprocs, number, nprocs, compare, timeout=3600)
            seconds = time.perf_counter() - begin
            ways = "both ways" if compare else "shared memory"
            print(f"{nprocs} workers, {number} movements, {ways}: {seconds:.0f} s, {wrong}")


if __name__ == "__main__":
    main()
