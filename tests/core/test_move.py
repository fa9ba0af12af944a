"""Operators that write into a tensor of the caller's.

Tests `core/move.py`, `core/linop.py`, `core/agreement.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from tessel import Layout, Move
from tessel.core.agreement import Signature

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
        rows = expected.flatten(1) if expected.dim() > 1 else expected[:, None]
        transposed = torch.empty_like(rows.mT.contiguous()).mT.view_as(expected)
        for out in (torch.full_like(expected, -1), strided, transposed):
            for call in (move, move.apply):
                before = out._version
                y = call(x, out=out)
                is_written = out._version > before or not out.numel()
                if y is not out or not torch.equal(y, expected) or not is_written:
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
    found.append(torch.equal(mine[:-1], part_of(halo.codomain)))
    # one behind the other in one tensor: no element is of both
    size, room = interior.numel(), buffer.numel()
    flat = torch.full((size + room,), -1.0)
    flat[:size] = part_of(halo.domain).view(-1)
    halo(flat[:size].view(interior.shape), out=flat[size:].view(buffer.shape))
    return [*found, torch.equal(flat[size:].view(buffer.shape), part_of(halo.codomain))]


@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize("columns", SIZES)
def test_what_is_in_its_place_stays_there(run: Run, columns: int, nprocs: int) -> None:
    assert run(beside, columns, nprocs=nprocs) == [[True] * 5] * nprocs


def views_of_the_output() -> list[bool]:
    """Conjugates and negatives of what is in its place: of these the memory is not the values."""
    P, found = tessel.world(), []
    broadcast = moves(6)["broadcast"]
    z = torch.complex(torch.arange(6.0), torch.ones(6))
    for values, view in ((z, Tensor.conj), (z.imag, torch._neg_view)):
        out = values.clone() if P.rank == 0 else torch.empty_like(values)
        broadcast(view(out) if P.rank == 0 else torch.empty(0), out=out)
        found.append(torch.equal(out, view(values)))
    halo, dtype = moves(6)["halo"], torch.complex64
    buffer = torch.zeros(halo.codomain.local_shape, dtype=dtype)
    first, mine = int(P.rank > 0), part_of(halo.domain) * 1j
    interior = buffer[first : first + 3]
    interior.copy_(mine)
    halo(interior.conj(), out=buffer)
    return [*found, torch.equal(buffer, part_of(halo.codomain) * -1j)]


def test_views_whose_memory_is_not_their_values_are_written(run: Run) -> None:
    assert run(views_of_the_output, nprocs=3) == [[True] * 3] * 3


def odd_memory() -> list[bool]:
    """A tensor whose memory is not its values, and a parameter."""
    P, found = tessel.world(), []
    copies = Layout.whole(P, (3,))
    x = torch.tensor([1 + 2j, 3 - 1j, 2j])
    for out in (torch.zeros(3, dtype=x.dtype).conj(), torch.zeros(3, dtype=x.dtype).conj().imag):
        y = x if out.is_complex() else x.imag
        move = Move(copies, copies)
        found.append(torch.equal(move(y, out=out), P.size * y) and torch.equal(out, P.size * y))
    weight = torch.nn.Parameter(torch.full((3,), float(P.rank)))
    with torch.no_grad():
        owned = Layout.whole(P.create_partition_inclusive([1]), (3,))
        Move(owned, copies)(weight if P.rank == 1 else torch.empty(0), out=weight)
    return [*found, weight.requires_grad and weight.tolist() == [1.0] * 3]


def test_conjugated_memory_and_parameters_get_the_values(run: Run) -> None:
    assert run(odd_memory, nprocs=2) == [[True] * 3] * 2


def of_products() -> bool:
    """A product, which has no way of its own to write: it copies."""
    move = moves(6)["repartition"]
    there_and_back, x = move.H @ move, part_of(move.domain)
    out = torch.empty_like(x)
    return there_and_back(x, out=out) is out and torch.equal(out, x)


def test_a_product_writes_its_output_too(run: Run) -> None:
    assert all(run(of_products, nprocs=2))


def of_a_product_past_some() -> list[bool]:
    """Each worker gets something of one factor; the output is on the last alone."""
    P, found = tessel.world(), []
    A, B, C = (Layout.whole(P.create_partition_inclusive([worker]), (4,)) for worker in range(3))
    there = Move(B, C) @ Move(A, B)
    for nothing in ((0,), (0, 3), (16, 0)):
        out = torch.empty(4 if P.rank == 2 else nothing)
        x = torch.ones(4 if P.rank == 0 else 0)
        found.append(there(x, out=out) is out and bool((out == 1).all()))
    return found


def test_a_product_writes_nothing_where_nothing_comes(run: Run) -> None:
    assert run(of_a_product_past_some, nprocs=3) == [[True] * 3] * 3


def refused(name: str) -> str:
    """An error on all workers, whoever passes what cannot be; then they go on."""
    move, is_first = moves(6)["sum on all"], tessel.world().rank == 0
    x, out = torch.ones(6), torch.empty(6)
    if name == "gradient":
        x.requires_grad_(is_first)
    elif name == "shape":
        out = torch.empty(5)
    elif name == "something for nothing":
        move = moves(6)["sum"]
    elif name == "copies":
        out = torch.empty(1).expand(6)
    elif name == "spread":
        out = tessel.spread(torch.empty(12), tessel.world())
    elif is_first:
        out = ON_ONE[name](out)
    try:
        move(x, out=out)
    except ValueError as error:
        move = moves(6)["sum on all"]
        assert torch.equal(move(torch.ones(6), out=torch.empty(6)), torch.full((6,), 2.0))
        return str(error)
    return ""


ON_ONE: dict[str, Callable[[Tensor], Any]] = {
    "shape on one": lambda out: out[:5],
    "dtype on one": lambda out: out.double(),
    "device on one": lambda out: out.to("meta"),
    "overlap": lambda out: out.as_strided((6,), (0,)),
    "requires a gradient": lambda out: out.requires_grad_(),
    "on one": lambda out: None,
    "a list": lambda out: out.tolist(),
    "nested": lambda out: torch.nested.nested_tensor([out, out]),
    "nested, jagged": lambda out: torch.nested.nested_tensor([out, out], layout=torch.jagged),
    "inference": torch.inference_mode()(torch.clone),
}
ERRORS = {
    "gradient": "a call with `out` does not support automatic differentiation; omit `out`",
    "shape": "worker 0 passed an `out` of shape (5,), torch.float32 on cpu; expected (6,)",
    "something for nothing": "worker 1 passed an `out` of shape (6,), but receives nothing",
    "copies": "some of whose elements share memory",
    "shape on one": "worker 0 passed an `out` of shape (5,), torch.float32 on cpu",
    "dtype on one": "shape (6,), torch.float64 on cpu; expected (6,), torch.float32 on cpu",
    "device on one": "worker 0 passed an `out` that is not a tensor, or cannot be written to",
    "overlap": "some of whose elements share memory",
    "requires a gradient": "an `out` that requires a gradient: pass out.detach()",
    "on one": "workers [1] passed `out` and workers [0] did not; pass it on all workers",
    "nested": "worker 0 passed an `out` that is not a tensor, or cannot be written to",
    "nested, jagged": "worker 0 passed an `out` that is not a tensor, or cannot be written to",
    "inference": "torch.inference_mode()",
    "a list": "worker 0 passed an `out` that is not a tensor, or cannot be written to",
    "spread": "worker 0 passed an `out` that is not a tensor, or cannot be written to",
}


@pytest.mark.parametrize("name", ERRORS)
def test_all_workers_refuse_what_cannot_be_written_to(run: Run, name: str) -> None:
    for said in run(refused, name, nprocs=2):
        assert ERRORS[name] in said


LIES = {  # shape, strides: whether elements may share memory
    ((3, 4), (4, 1)): False,
    ((4, 3), (1, 4)): False,
    ((2, 2), (2, 3)): False,  # 0, 2, 3, 5
    ((3, 4), (3, 1)): True,
    ((3,), (0,)): True,
    ((1, 3), (0, 2)): False,
    ((0, 3), (0, 0)): False,
    ((), ()): False,
}


@pytest.mark.parametrize(("shape", "strides"), LIES)
def test_elements_that_share_memory_are_seen(shape: tuple[int], strides: tuple[int]) -> None:
    out = torch.empty(20).as_strided(shape, strides)
    assert Signature.of_output(out).overlaps is LIES[shape, strides]
