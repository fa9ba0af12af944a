"""Recurrent layers of converted models and of spread tensors: batch, sequence or features split.

Where the sequence is split, states are passed on from worker to worker. Output, last states and all
gradients are those of one process, and what travels is a state for each border between parts.

Tests `tensor/recurrence.py`, `tensor/rules/recurrent.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import tessel
from parity import close, values
from tessel import Layout, Partition
from tessel.tensor.recurrence import pipeline
from tessel.testing import check_model, count_traffic

Run = Callable[..., list[Any]]
SHAPE = (5, 7, 6)  # samples, time steps, features


def line(axis: int, dims: int = 3) -> Partition:
    """All workers along one axis."""
    sizes = [1] * dims
    sizes[axis] = tessel.world().size
    return tessel.world().create_cartesian_topology_partition(sizes)


class Recurrent(nn.Module):
    """A layer of torch, from zero or from states that are learned."""

    def __init__(self, kind: str, learned: bool = False, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = getattr(nn, kind)(SHAPE[2], 4, **settings)
        self.first_dim = 0 if settings.get("batch_first") else 1
        depth = self.inner.num_layers * (2 if self.inner.bidirectional else 1)
        widths = (self.inner.proj_size or 4, 4)[: 2 if kind == "LSTM" else 1]
        self.states = nn.ParameterList(torch.randn(depth, 1, n) for n in widths if learned)
        self.double()

    def forward(self, x: Tensor) -> Any:
        states = tuple(p.expand(-1, x.shape[self.first_dim], -1) for p in self.states)
        found, last = self.inner(x, (states if len(states) > 1 else states[0]) if states else None)
        return found, *(last if isinstance(last, tuple) else (last,))


BOTH = {"num_layers": 2, "bidirectional": True, "learned": True}
# all kinds with all settings are in `tests/tensor/spread_recurrent.py`
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("LSTM", BOTH | {"proj_size": 3}),
    ("GRU", {"num_layers": 2, "batch_first": True}),
    ("RNN", {"bias": False, "batch_first": True, "learned": True}),
)


def check_layers(axis: int) -> None:
    """Nothing is gathered."""
    for kind, settings in CASES:
        model = Recurrent(kind, **settings)
        check_model(model, values(SHAPE, 1), where=line(axis), fallback="raise")


@pytest.mark.parametrize(("axis", "nprocs"), [(0, 2), (1, 1), (1, 3), (1, 4), (2, 2)], ids=str)
def test_layers_are_those_of_one_process(run: Run, nprocs: int, axis: int) -> None:
    run(check_layers, axis, nprocs=nprocs, timeout=100)


def check_grids() -> None:
    """Samples and sequence split at once; few samples; uneven parts, or without time steps."""
    world = tessel.world()
    for sizes, shape in (([2, 2, 1], SHAPE), ([2, 2, 1], (1, 3, 6)), ([1, 2, 2], (3, 1, 6))):
        grid = world.create_cartesian_topology_partition(sizes)
        model = Recurrent("LSTM", **BOTH, batch_first=True)
        check_model(model, values(shape, 1), where=grid, fallback="raise")
    for time_steps in ((0, 4, 0, 3), (7, 0, 0, 0), (1, 2, 3, 1)):
        where = Layout.from_lengths(line(1), ((5,), time_steps, (6,)))
        model = Recurrent("GRU", **BOTH, batch_first=True)
        check_model(model, values(SHAPE, 1), where=where, fallback="raise")


@pytest.mark.slow
def test_grids_and_uneven_parts(run: Run) -> None:
    run(check_grids, nprocs=4, timeout=100)


def check_uses_of_states() -> None:
    """A loss of the last state, or of the output alone, of states that are given; twice derived."""
    P = line(1)
    torch.manual_seed(0)
    layer = nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True).double()
    x, h, c = values(SHAPE, 1), values((4, 5, 4), 2), values((4, 5, 4), 3)

    def results(spread: bool, picked: int) -> list[Tensor]:
        given = [each.clone().requires_grad_() for each in (x, h, c)]
        lying = [tessel.spread(given[0], P), *given[1:]] if spread else given
        y, (last, cells) = layer(lying[0], (lying[1], lying[2]))
        value = (y, last, cells)[picked]
        loss = (value * values(tuple(value.shape), 5)).square().sum()
        wanted = [*given, *layer.parameters()]
        first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        again = sum((each.square().sum() for each in first if each is not None), torch.zeros(()))
        second = torch.autograd.grad(again, wanted, allow_unused=True)
        return [value.full() if spread else value, *first, *second]

    for picked in range(3):
        ours, theirs = results(True, picked), results(False, picked)
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert (a is None) == (b is None), (picked, number)
            if b is not None:
                close(f"{picked} {number}", a, b, 1e-11)
    with torch.no_grad():
        y, _ = layer(tessel.spread(x, P))
        close("no_grad", y.full(), layer(x)[0], 1e-12)
        assert not y.requires_grad


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_states_are_derived(run: Run, nprocs: int) -> None:
    run(check_uses_of_states, nprocs=nprocs, timeout=60)


def count_what_travels() -> tuple[int, int, int]:
    """Bytes and messages of a forward pass, and those of one in which the sequence was gathered."""
    P = line(1)
    layer = nn.GRU(6, 4, batch_first=True).double()
    x = tessel.spread(values((4, 40, 6), 1), P)
    with torch.no_grad():
        layer(x)
        with count_traffic() as traffic:
            y, last = layer(x)
    assert y.layout == Layout.balanced(P, (4, 40, 4)) and last.shape == (1, 4, 4)
    return traffic.bytes_sent, traffic.messages, 8 * 4 * 40 * 6 // P.size


@pytest.mark.parametrize("nprocs", [2, 4])
def test_states_travel_and_nothing_else(run: Run, nprocs: int) -> None:
    found = run(count_what_travels, nprocs=nprocs, timeout=60)
    state = 8 * 4 * 4
    # to the next worker in as many messages as there are chunks; from the last one to all others
    assert [each[0] for each in found] == [state] * (nprocs - 1) + [state * (nprocs - 1)]
    assert all(sent <= 2 * nprocs * state < whole or nprocs > 2 for sent, _, whole in found)
    chunks = min(4, nprocs)
    assert [each[1] for each in found] == [chunks] * (nprocs - 1) + [nprocs - 1]


def plan_of_four() -> None:
    """While one worker has the second chunk, the next one has the first: all at work in between."""
    P = line(1)
    way = pipeline(Layout.balanced(P, (8, 12, 6)), 1, 0, False)
    assert way.num_chunks == 4 and way.num_steps == 7
    at_work = [
        [rank for rank in range(4) if way.chunk((0, 8), step - rank) != (0, 0)] for step in range(7)
    ]
    assert at_work == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]
    source, target = way.shift(2, 1, 4)
    assert source.cuts[1].intervals == ((0, 2), (2, 4), (4, 6), (6, 6))
    assert target.cuts[1].intervals == ((0, 0), (0, 2), (2, 4), (4, 6))
    assert pipeline(way.layout, 1, 0, True).order == (3, 2, 1, 0)


def test_the_pipeline(run: Run) -> None:
    run(plan_of_four, nprocs=4)


class Cells(nn.Module):
    """Cells in a loop, whose states are made inside; and what was seen before goes into it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.LSTMCell(6, 4), nn.GRUCell(4, 4)
        self.third = nn.RNNCell(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 4, dtype=x.dtype, device=x.device)
        c, g, found = torch.zeros_like(h), x.new_zeros(len(x), 4), []
        for moment in range(x.shape[1]):
            h, c = self.first(x[:, moment], (h, c))
            g = self.second(h, g)
            found.append(self.third(g))
        return torch.stack(found, 1)


class Pictures(nn.Module):
    """A ConvLSTM: gates are convolutions, and states are pictures that start as zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gates, self.out = nn.Conv2d(3 + 4, 16, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        b, t, _, height, width = x.shape
        h = torch.zeros(b, 4, height, width, dtype=x.dtype, device=x.device)
        c, found = x.new_zeros(b, 4, height, width), []
        for moment in range(t):
            i, f, g, o = self.gates(torch.cat([x[:, moment], h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            found.append(self.out(h))
        return torch.stack(found, 1)


def check_loops() -> None:
    for axis in range(3):
        check_model(Cells(), values(SHAPE, 1), where=line(axis), fallback="raise")
    for axis in (0, 1, 3, 4):
        check_model(Pictures(), values((2, 3, 3, 5, 4), 1), where=line(axis, 5), fallback="raise")


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 3])
def test_loops_with_states_made_inside(run: Run, nprocs: int) -> None:
    run(check_loops, nprocs=nprocs, timeout=100)


class Packed(nn.Module):
    """Sequences of different length, the longest first or not, in one direction or in two."""

    def __init__(self, kind: str, is_sorted: bool, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = getattr(nn, kind)(6, 4, **settings).double()
        self.is_sorted = is_sorted

    def forward(self, x: Tensor) -> Any:
        batch_first = self.inner.batch_first
        lengths = torch.tensor([7, 5, 5, 3, 1] if self.is_sorted else [2, 7, 5, 3, 1])
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first, self.is_sorted)
        y, last = self.inner(rows)
        return *nn.utils.rnn.pad_packed_sequence(y, batch_first), last


PACKED: tuple[tuple[str, bool, dict[str, Any]], ...] = (
    ("LSTM", False, {"batch_first": True}),
    ("LSTM", True, {"bidirectional": True, "num_layers": 2}),
    ("GRU", False, {"bidirectional": True}),
)


def check_packed() -> None:
    """Sequences of different length gather, or raise."""
    for kind, is_sorted, settings in PACKED:
        x = values(SHAPE, 1) if "batch_first" in settings else values(SHAPE, 1).transpose(0, 1)
        for axis in (0, 1):
            model = Packed(kind, is_sorted, **settings)
            report = check_model(model, x.contiguous(), where=line(axis))
            assert {each.name for each in report.gathers} == {"_pack_padded_sequence"}
            model = tessel.nn.distribute_module(model, line(axis), "raise")
            with pytest.raises(NotImplementedError, match="_pack_padded_sequence"):
                model(Layout.balanced(line(axis), x.shape).local_part(x))


@pytest.mark.slow
def test_packed_sequences(run: Run) -> None:
    run(check_packed, nprocs=2, timeout=60)


def dropped(axis: int) -> list[Any]:
    """A training step with dropout between layers, after the same seed."""
    torch.manual_seed(3)
    layer = nn.Sequential(nn.LSTM(6, 4, 3, batch_first=True, dropout=0.4)).double()
    torch.manual_seed(4)
    model = tessel.nn.distribute_module(layer, line(axis), "raise")
    x = tessel.spread(values(SHAPE, 1), line(axis))
    y, (h, c) = model(x)
    (y.square().sum() + h.sum()).backward()
    assert not torch.equal(model(x)[0].full(), y.full())
    copied = copy.deepcopy(model).eval()
    close("evaluation", copied(x)[0].full(), layer.eval()(x)[0].full(), 1e-12)
    return [each.detach().tolist() for each in (y.full(), c.full(), layer[0].weight_ih_l0.grad)]


def test_dropout_between_layers_is_the_same_everywhere(run: Run) -> None:
    """For every split and number of workers: what a model draws depends on the seed alone."""
    first, *others = (
        torch.cat([torch.tensor(each).flatten() for each in run(dropped, axis, nprocs=n)[0]])
        for axis, n in ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))
    )
    for each in others:
        close("dropout", each, first, 1e-12)


def outside() -> None:
    """A worker outside of the partition follows, and takes part in the backward pass."""
    world = tessel.world()
    P = world.create_partition_inclusive([0, 1]).create_cartesian_topology_partition([1, 2, 1])
    layer = nn.LSTM(6, 4, batch_first=True).double()
    x = tessel.spread(values(SHAPE, 1), P)
    y, (last, _) = layer(x)
    assert y.shape == (5, 7, 4) and last.shape == (1, 5, 4)
    y.sum().backward()


def test_workers_outside_follow(run: Run) -> None:
    run(outside, nprocs=3)


def test_bad_input_raises_as_in_torch(run: Run) -> None:
    run(check_bad_input, nprocs=2)


def check_bad_input() -> None:
    layer = nn.LSTM(6, 4, batch_first=True).double()
    x = tessel.spread(values(SHAPE, 1), line(1))
    wrong = torch.zeros(1, 4, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"Expected hidden\[0\] size"):
        layer(x, (wrong, wrong))
    with pytest.raises(RuntimeError, match=r"input\.size"):
        layer(tessel.spread(values((5, 7, 3), 1), line(1)))
    with pytest.raises((RuntimeError, ValueError), match="dtype"):
        layer(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (layer.float()(each.float())[0] for each in (values(SHAPE, 1), x))
    assert found.dtype == expected.dtype
    close("autocast", found.full().double(), expected.double(), 0.05)
    layer.double()
    close("after it", F.relu(layer(x)[0]).full(), F.relu(layer(values(SHAPE, 1))[0]), 1e-12)
