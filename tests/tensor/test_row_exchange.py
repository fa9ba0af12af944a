"""What travels when rows of a split dimension are read and written to at an index.

Tests `tensor/row_exchange.py`, `tensor/rules/rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tessel
from parity import values
from tessel import Layout
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
NODES, FEATURES = 12, 5
ROW = FEATURES * 8  # bytes


def nodes() -> tessel.Tensor:
    world = tessel.world()
    layout = Layout.split(world, (NODES, FEATURES), [0, None])
    return tessel.spread(values((NODES, FEATURES), 1), layout)


def chain() -> torch.Tensor:
    """The node after each node but the last, twice."""
    return 1 + torch.arange(NODES - 1).repeat_interleave(2)


def read_a_chain() -> list[int]:
    """Of a chain in parts, each worker reads the first row of the next, however often."""
    tails = chain()
    x = nodes().requires_grad_()
    with count_traffic() as forward:
        y = x.index_select(0, tails)
    assert torch.equal(y.full(), x.detach().full()[tails])
    assert y._layout.is_split(0)
    total = (y * y).sum()
    with count_traffic() as backward:
        (grad,) = torch.autograd.grad(total, [x])
    whole = values((NODES, FEATURES), 1).requires_grad_()
    (expected,) = torch.autograd.grad(whole[tails].square().sum(), [whole])
    assert torch.allclose(grad.full(), expected)
    return [forward.bytes_sent, backward.bytes_sent]


def add_to_a_chain() -> list[int]:
    """Sums of messages: one row for each node of another worker, however many messages it gets."""
    tails = chain()
    world = tessel.world()
    cut = nodes().index_select(0, tails)._layout
    y = tessel.spread(values((len(tails), FEATURES), 2), cut)
    z = nodes()
    with count_traffic() as traffic:
        sums = z.new_zeros((NODES, FEATURES)).index_add_(0, tails, y)
    expected = torch.zeros(NODES, FEATURES, dtype=torch.float64).index_add(
        0, tails, values((len(tails), FEATURES), 2)
    )
    assert torch.allclose(sums.full(), expected)
    assert sums._layout == z._layout
    index = tessel.spread(tails, Layout(world, (len(tails),), cut.cuts[:1]))
    with count_traffic() as asked:
        sums = torch.zeros_like(z).scatter_add_(0, index.view(-1, 1).expand_as(y), y)
    assert torch.allclose(sums.full(), expected)
    return [traffic.bytes_sent, asked.bytes_sent]


def crossing(workers: int) -> list[int]:
    """How many rows each worker gives to others: of edges in equal parts, what is not its own."""
    tails = chain()
    nodes_of = torch.arange(NODES).tensor_split(workers)
    read = [set(part.tolist()) for part in tails.tensor_split(workers)]
    return [
        sum(len(asked & set(own.tolist())) for k, asked in enumerate(read) if k != place)
        for place, own in enumerate(nodes_of)
    ]


@pytest.mark.parametrize("nprocs", [2, 3, 4])
def test_only_rows_of_others_are_read(run: Run, nprocs: int) -> None:
    forward, backward = zip(*run(read_a_chain, nprocs=nprocs, timeout=60), strict=True)
    assert list(forward) == [ROW * rows for rows in crossing(nprocs)]
    assert sum(backward) == sum(forward)


@pytest.mark.parametrize("nprocs", [2, 3, 4])
def test_sums_travel_once_for_each_row(run: Run, nprocs: int) -> None:
    known, asked = zip(*run(add_to_a_chain, nprocs=nprocs, timeout=60), strict=True)
    assert sum(known) == ROW * sum(crossing(nprocs))
    # Without the whole index, workers say of their part whether it names rows, its bounds, how many
    # rows they write to each other, and which.
    said = nprocs * (nprocs - 1) * (1 + 2 * 8 + nprocs * 8)
    assert sum(asked) == (ROW + 8) * sum(crossing(nprocs)) + said


def look_up_nothing() -> None:
    world = tessel.world()
    x = tessel.spread(torch.ones(0, 3), Layout.split(world, (0, 3), [0, None]))
    whole = torch.zeros(2, dtype=torch.int64)
    for index in (whole, tessel.spread(whole, world)):
        with pytest.raises(
            IndexError, match="index 0 is out of bounds for dimension 0 with size 0"
        ):
            x.index_select(0, index)
        with pytest.raises(
            IndexError, match="index 0 is out of bounds for dimension 0 with size 0"
        ):
            x.index_add(0, index, torch.ones(2, 3))
        assert x.index_select(0, index[:0]).shape == (0, 3)


@pytest.mark.parametrize("nprocs", [2, 3])
def test_a_dimension_of_length_0_has_no_rows(run: Run, nprocs: int) -> None:
    run(look_up_nothing, nprocs=nprocs)
