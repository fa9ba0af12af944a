"""In steady state a movement allocates its result and nothing else.

Tests `transport/group.py`, `transport/host.py`.
"""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import stress
import tessel
from tessel import Layout, Move, transport

Run = Callable[..., list[Any]]
WIDTH = 8  # bytes of a float64
KIB, MIB = 2**10, 2**20
SIZES = {"small": 4 * KIB, "middle": 256 * KIB, "large": 6 * MIB}  # bytes of a tensor
needs_memory = pytest.mark.skipif(
    not transport.can_share_memory(), reason="processes of this system share no memory"
)


class Allocations(TorchDispatchMode):
    """The bytes of all storages that torch makes, whoever makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {each.untyped_storage()._cdata for each in tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for each in tensors(result):
            storage = each.untyped_storage()
            if storage._cdata not in given and storage.nbytes():
                self.made.append(storage.nbytes())
        return result


def tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def movement(name: str, num_bytes: int) -> Move:
    """A movement of a tensor of about so many bytes on all workers."""
    P = tessel.world()
    rows, columns = 64, num_bytes // (64 * WIDTH)
    P_rows = P.create_cartesian_topology_partition([P.size, 1])
    P_columns = P.create_cartesian_topology_partition([1, P.size])
    by_rows = Layout.balanced(P_rows, (rows, columns))
    by_columns = Layout.balanced(P_columns, (rows, columns))
    whole = Layout.whole(P, (rows, columns))
    first = Layout.whole(P.create_partition_inclusive([0]), (rows, columns))
    return {
        "all-reduce": lambda: Move(whole, whole),
        "repartition": lambda: Move(by_rows, by_columns),
        "halo of rows": lambda: Move(by_rows, by_rows.grow([(2, 2), (0, 0)])),
        "halo of columns": lambda: Move(by_columns, by_columns.grow([(0, 0), (2, 2)])),
        "halo, back": lambda: Move(by_rows.grow([(2, 2), (0, 0)]), by_rows),
        "broadcast": lambda: Move(first, whole),
        "sum-reduce": lambda: Move(whole, first),
    }[name]()


NAMES = (
    *("all-reduce", "repartition", "halo of rows", "halo of columns", "halo, back", "broadcast"),
    "sum-reduce",
)
IN_PLACE = ("halo of rows", "broadcast")  # whole rows are sent, and none is added to another


def input_of(move: Move) -> Tensor:
    return torch.ones(move.domain.local_shape, dtype=torch.float64)


def made_by(name: str, num_bytes: int) -> tuple[list[int], list[int]]:
    """What a call allocates at best, after some others, and the bytes of its result."""
    move = movement(name, num_bytes)
    x = input_of(move)
    for _ in range(3):
        move.apply(x)
    made, results = at_best(lambda: [move.apply(x)])
    return made, added_by(move) + results


def at_best(call: Callable[[], list[Tensor]]) -> tuple[list[int], list[int]]:
    """What the cheapest of five calls allocates, and the bytes of its results.

    On a busy machine, a message that comes before it is asked for is kept meanwhile in a place of
    its own, and the first one that Python has to add where the engine has given up waiting makes
    the room for this and all later ones, of a slot's size.
    """
    made = []
    for _ in range(5):
        with Allocations() as counted:
            results = call()
        made.append(counted.made)
    return min(made, key=sum), filled(*results)


def added_by(move: Move) -> list[int]:
    """The bytes of the part of a sum that this worker adds for another, if it does."""
    first, *rest = move.route
    return [WIDTH * math.prod(first.target_shape)] if rest and rest[-1].kept is None else []


def filled(*results: Tensor) -> list[int]:
    """The bytes of results that have any."""
    return [each.nbytes for each in results if each.nbytes]


def all_made() -> dict[str, list[Any]]:
    """For each movement and size what was allocated, and what should be."""
    with stress.afresh(TESSEL_TRANSPORT="shared"):
        found = {f"{n}, {size}": list(made_by(n, SIZES[size])) for n in NAMES for size in SIZES}
        assert transport.shares_memory()
    return found


@needs_memory
@pytest.mark.parametrize("nprocs", [2, 4])
def test_through_memory_a_movement_allocates_its_result_and_nothing_else(
    run: Run, nprocs: int
) -> None:
    for worker in run(all_made, nprocs=nprocs):
        assert {name: made for name, (made, _) in worker.items()} == {
            name: result for name, (_, result) in worker.items()
        }


def made_by_gloo() -> dict[str, list[Any]]:
    with stress.afresh(TESSEL_TRANSPORT="gloo"):
        found = {f"{n}, {size}": list(made_by(n, SIZES[size])) for n in IN_PLACE for size in SIZES}
        assert not transport.shares_memory()
    return found


@pytest.mark.parametrize("nprocs", [2, 4])
def test_through_gloo_it_does_so_where_nothing_is_packed_or_added(run: Run, nprocs: int) -> None:
    """Other messages are packed into a tensor, and what is added arrives in one."""
    for worker in run(made_by_gloo, nprocs=nprocs):
        assert {name: made for name, (made, _) in worker.items()} == {
            name: result for name, (_, result) in worker.items()
        }


def made_with_gradients(name: str, num_bytes: int) -> tuple[list[int], list[int]]:
    move = movement(name, num_bytes)
    x = input_of(move).requires_grad_()
    weights = torch.ones(move.codomain.local_shape, dtype=torch.float64)

    def call() -> list[Tensor]:
        y = move.apply(x)
        return [y, *torch.autograd.grad(y, x, weights)]

    for _ in range(3):
        call()
    made, _ = at_best(call)
    y, grad = call()
    return made, added_by(move) + filled(y) + added_by(move.H) + filled(grad)


def all_made_with_gradients() -> dict[str, list[Any]]:
    with stress.afresh(TESSEL_TRANSPORT="shared"):
        found = {n: list(made_with_gradients(n, SIZES["middle"])) for n in NAMES}
        assert transport.shares_memory()
    return found


@needs_memory
@pytest.mark.parametrize("nprocs", [2, 4])
def test_a_backward_pass_allocates_the_gradient_and_nothing_else(run: Run, nprocs: int) -> None:
    for worker in run(all_made_with_gradients, nprocs=nprocs):
        assert {name: made for name, (made, _) in worker.items()} == {
            name: result for name, (_, result) in worker.items()
        }


def own_memory() -> int:
    """The bytes of memory of this process that it does not share."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * KIB


def growth(name: str, num_bytes: int, calls: int) -> int:
    """By how many bytes the memory of this process grows in so many calls."""
    move = movement(name, num_bytes)
    x = input_of(move)
    for _ in range(calls // 10):
        move.apply(x)
    gc.collect()
    before = own_memory()
    for _ in range(calls):
        move.apply(x)
    gc.collect()
    return own_memory() - before


def growth_by(transport_name: str, cases: list[tuple[str, int, int]]) -> list[int]:
    with stress.afresh(TESSEL_TRANSPORT=transport_name):
        return [growth(*case) for case in cases]


SMALL = [  # movements, bytes and calls
    ("all-reduce", 4 * KIB, 1000),
    ("repartition", 64 * KIB, 1000),
    ("halo of columns", 64 * KIB, 1000),
]
LARGE = [("all-reduce", 2 * MIB, 200)]


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say")
@pytest.mark.parametrize("transport_name", ["shared", "gloo"])
def test_a_thousand_calls_do_not_need_more_memory_than_a_hundred(
    run: Run, transport_name: str
) -> None:
    """A kibibyte lost in each call would be a mebibyte; allocators keep a few freed tensors."""
    cases = SMALL if transport_name == "gloo" else [*SMALL, *LARGE]
    for worker in run(growth_by, transport_name, cases, nprocs=2, timeout=200):
        for (name, num_bytes, _), grown in zip(cases, worker, strict=True):
            assert grown < MIB + 4 * num_bytes, name


def objects_kept(name: str, num_bytes: int, calls: int) -> int:
    """The bytes of Python's objects that are left from so many calls, at best of three times.

    What is made once for all calls to come, as a view of a slot, may be made at any time.
    """
    move = movement(name, num_bytes)
    x = input_of(move)
    for _ in range(20):
        move.apply(x)
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(20):
            move.apply(x)
        kept = []
        for _ in range(3):
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(calls):
                move.apply(x)
            gc.collect()
            kept.append(tracemalloc.get_traced_memory()[0] - before)
        return min(kept)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", NAMES)
def test_no_object_is_left_from_a_call(run: Run, name: str) -> None:
    """In 200 calls: less than 20 bytes for each."""
    assert max(run(objects_kept, name, SIZES["small"], 200)) < 4 * KIB


def threads_of_a_job() -> int:
    """The threads of this worker in a job with a group for all and one for two of its workers."""
    gc.disable()  # which would end the last job's, if Python's cycles were all that keeps them
    try:
        world = tessel.world()
        for partition in (world, world.create_partition_inclusive([0, 1])):
            partition.prepare()
        return len(list(Path("/proc/self/task").iterdir()))
    finally:
        gc.enable()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not say")
def test_no_thread_is_left_from_a_job(run: Run) -> None:
    """Gloo's wake up a hundred times in a second, as long as their group lives."""
    counts = [run(threads_of_a_job, nprocs=nprocs)[0] for nprocs in (3, 4, 3, 4, 3)]
    assert len(set(counts)) == 1, counts
