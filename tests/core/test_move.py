"""Movements that write into a tensor of the caller's.

Tests `core/move.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from tessel import Layout, Move

Run = Callable[..., list[Any]]
SIZES = (6, 100_000)  # columns: small messages, and such as are read where they lie


def moves(columns: int) -> dict[str, Move]:
    P = tessel.world()
    rows, wide = (
        P.create_cartesian_topology_partition(grid) for grid in ([P.size, 1], [1, P.size])
    )
    shape = (3 * P.size, columns)
    by_rows, by_columns = Layout.balanced(rows, shape), Layout.balanced(wide, shape)
    whole, owned = (
        Layout.whole(P, (columns,)),
        Layout.whole(P.create_partition_inclusive([0]), (columns,)),
    )
    return {
        "broadcast": Move(owned, whole),
        "sum": Move(whole, owned),
        "sum on all": Move(whole, whole),
        "repartition": Move(by_rows, by_columns),
        "halo": Move(by_rows, by_rows.grow([(1, 1), (0, 0)])),
        "nothing": Move(by_rows, by_rows),
    }


def part_of(layout: Layout) -> Tensor:
    whole = torch.arange(float(torch.Size(layout.shape).numel())).view(layout.shape)
    return layout.local_part(whole).clone()


def into(columns: int) -> list[str]:
    """Each move, into fresh, strided and used memory, as it is without `out`."""
    wrong = []
    for name, move in moves(columns).items():
        x = part_of(move.domain)
        expected = move(x)
        strided = expected.new_empty((*expected.shape[:-1], 2 * expected.shape[-1]))[..., ::2]
        for out in (torch.full_like(expected, -1), strided):
            for call in (move, move.apply):
                before = out._version
                y = call(x, out=out)
                if y is not out or not torch.equal(y, expected) or out._version == before:
                    wrong.append(name)
        if name in ("sum on all", "nothing"):  # all of it changes, or nothing
            y = move(x, out=x)
            wrong += [] if y is x and torch.equal(x, expected) else [f"{name} in place"]
    return wrong


@pytest.mark.parametrize("nprocs", [1, 2, 4])
@pytest.mark.parametrize("columns", SIZES)
def test_the_output_is_that_of_a_call_without_it(run: Run, columns: int, nprocs: int) -> None:
    assert run(into, columns, nprocs=nprocs) == [[]] * nprocs


def beside(columns: int) -> list[Any]:
    """The root's own tensor, and the interior of a buffer: nothing of it is copied or changed."""
    P, found = tessel.world(), []
    broadcast, halo = moves(columns)["broadcast"], moves(columns)["halo"]
    x = part_of(broadcast.domain)
    out = x if P.rank == 0 else torch.empty(columns)
    found.append(broadcast(x, out=out) is out and torch.equal(out, part_of(broadcast.codomain)))
    for _ in range(2):
        buffer = torch.full(halo.codomain.local_shape, -1.0)
        first = int(P.rank > 0)
        interior = buffer[first : first + 3]
        interior.copy_(part_of(halo.domain))
        halo(interior, out=buffer)
        found.append(torch.equal(buffer, part_of(halo.codomain)))
    # one row further: what others read of it is not where it belongs
    mine = buffer.new_full((len(buffer) + 1, columns), -1.0)
    mine[1 + first : 4 + first] = part_of(halo.domain)
    halo(mine[1 + first : 4 + first], out=mine[:-1])
    return [*found, torch.equal(mine[:-1], part_of(halo.codomain))]


@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize("columns", SIZES)
def test_what_is_in_its_place_stays_there(run: Run, columns: int, nprocs: int) -> None:
    assert run(beside, columns, nprocs=nprocs) == [[True] * 4] * nprocs


def refused(name: str) -> str:
    """An error on all workers, whoever passes what cannot be; then they go on."""
    move, is_first = moves(6)["sum on all"], tessel.world().rank == 0
    x, out = torch.ones(6), torch.empty(6)
    if name == "gradient":
        x.requires_grad_(is_first)
    elif name == "shape":
        out = torch.empty(5)
    elif name == "shape on one":
        out = torch.empty(5 if is_first else 6)
    elif name == "dtype on one":
        out = out.double() if is_first else out
    elif name == "copies":
        out = torch.empty(1).expand(6)
    try:
        move(x, out=out)
    except ValueError as error:
        assert torch.equal(move(torch.ones(6), out=torch.empty(6)), torch.full((6,), 2.0))
        return str(error)
    return ""


ERRORS = {
    "gradient": "which has no derivative: leave it out, or call it under torch.no_grad()",
    "shape": "expected tensors from (6,) to (6,), got (6,) and (5,)",
    "shape on one": "expected tensors from (6,) to (6,), got (6,) and (5,)",
    "dtype on one": "expected torch.float32 on cpu, got torch.float64 on cpu",
    "copies": "some of whose elements share memory",
}


@pytest.mark.parametrize("name", ERRORS)
def test_all_workers_refuse_what_cannot_be_written_to(run: Run, name: str) -> None:
    for said in run(refused, name, nprocs=2):
        assert ERRORS[name] in said
