"""Signals: initialised from one worker, updated with a small message, equal on all workers.

Tests `imaging/signal.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from parity import close, values
from tessel.core.checksum import checksum, checksum_of, mixed_sum
from tessel.imaging import (
    DistributedContext,
    DistributedDataFidelity,
    DistributedMeasurements,
    DistributedPhysics,
    DistributedSignal,
)
from tessel.imaging.parts import operator_grid
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
SHAPE = (2, 3, 9, 7)
GRIDS: dict[int, list[Any]] = {
    1: [None, (1, 1)],
    2: [None, (2, 1), (1, 2), (2,)],
    4: [None, (2, 2), (4, 1), (3,), (1, 1, 4, 1)],
}


def begin(grid: Any, everywhere: bool) -> Tensor:
    """All workers get the values of worker 0, whatever the others have."""
    with DistributedContext(debug=True) as ctx:
        mine = values(SHAPE, ctx.rank)
        init = mine if everywhere or ctx.rank == 0 else None
        signal = DistributedSignal(ctx, SHAPE, torch.float64, partition=grid, init=init)
        assert signal.shape == torch.Size(SHAPE)
        assert signal.is_whole == (grid is None)
        first = values(SHAPE, 0)
        assert torch.equal(signal.data, signal.layout.local_part(first))
        assert torch.equal(signal.whole(), first)
        if signal.layout.partition.active:
            close("norm", signal.norm(signal.data), first.norm(), 1e-12)
            close("inner", signal.inner(signal.data, signal.data), first.square().sum(), 1e-12)
        signal.update_(2 * signal.data)
        assert torch.equal(signal.whole(), 2 * first)
        signal.update_(3 * first)  # of the global shape
        assert torch.equal(signal.whole(), 3 * first)
        signal.update_(mine if ctx.rank == ctx.world_size - 1 else None, source=ctx.world_size - 1)
        assert torch.equal(signal.whole(), values(SHAPE, ctx.world_size - 1))
        return signal.whole()


def begin_all(nprocs: int) -> None:
    for grid in GRIDS[nprocs]:
        for everywhere in (True, False):
            begin(grid, everywhere)


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_signals_begin_with_the_values_of_one_worker(run: Run, nprocs: int) -> None:
    run(begin_all, nprocs, nprocs=nprocs)


def zeros() -> list[Any]:
    with DistributedContext() as ctx:
        signal = DistributedSignal(ctx, SHAPE)
        return [signal.dtype, bool((signal.data == 0).all()), tuple(signal.data.shape)]


def test_signals_begin_with_zeros(run: Run) -> None:
    assert run(zeros, nprocs=2) == [[torch.float32, True, SHAPE]] * 2


def count_updates() -> list[int]:
    with DistributedContext() as ctx:
        signal = DistributedSignal(ctx, SHAPE)
        with count_traffic() as traffic:
            signal.update_(torch.ones(SHAPE))
            signal.update_(signal.data * 2)
        return [traffic.bytes_sent, traffic.bytes_received, traffic.messages]


def test_values_that_are_equal_are_not_sent(run: Run) -> None:
    assert run(count_updates) == [[0, 0, 0]] * 4


def keep_history() -> bool:
    with DistributedContext() as ctx:
        x = torch.ones(SHAPE, requires_grad=True)
        signal = DistributedSignal(ctx, SHAPE)
        signal.update_(3 * x)
        signal.data.sum().backward()
        return x.grad is not None and bool((x.grad == 3).all())


def test_an_update_keeps_the_history(run: Run) -> None:
    assert all(run(keep_history, nprocs=2))


def wrong(what: str) -> str:
    with DistributedContext() as ctx:
        one = ctx.rank == 1
        whole = torch.ones(SHAPE)
        signal = DistributedSignal(ctx, SHAPE)
        parts = DistributedSignal(ctx, SHAPE, partition=(2, 2))
        calls: dict[str, Callable[[], Any]] = {
            "shape": lambda: signal.update_(whole[:1] if one else whole),
            "part": lambda: parts.update_(whole[..., :2] if one else parts.data),
            "dtype": lambda: signal.update_(whole.double()),
            "own dtype": lambda: signal.update_(whole.double() if one else whole),
            "none": lambda: signal.update_(None if one else whole),
            "no source": lambda: signal.update_(None, source=1),
            "far source": lambda: signal.update_(whole, source=9),
            "source dtype": lambda: signal.update_(whole.double(), source=0),
            "init": lambda: DistributedSignal(ctx, SHAPE, init=whole if one else None),
            "init shape": lambda: DistributedSignal(ctx, SHAPE, init=whole[:1]),
            "other shape": lambda: DistributedSignal(ctx, (2, 2 + one)),
        }
        try:
            calls[what]()
        except ValueError as error:
            assert (signal.data == 0).all(), "a failed update changes nothing"
            return str(error)
        return ""


WRONG = {
    "shape": "worker 1 expected a tensor of shape (2, 3, 9, 7), got (1, 3, 9, 7)",
    "part": "its part, or (2, 3, 9, 7), the whole, got (2, 3, 9, 2)",
    "dtype": "expected a tensor of torch.float32, got torch.float64",
    "own dtype": "the dtype differs between workers",
    "none": "worker 1 passed no tensor",
    "no source": "worker 1 passed no tensor",
    "far source": "a worker from 0 to 3, got 9",
    "source dtype": "expected a tensor of torch.float32, got torch.float64",
    "init": "init was given on workers [1] but not on worker 0",
    "init shape": "expected a tensor of shape (2, 3, 9, 7), got (1, 3, 9, 7)",
    "other shape": "must make the same calls",
}


@pytest.mark.parametrize("what", list(WRONG))
def test_all_workers_raise_together(run: Run, what: str) -> None:
    texts = run(wrong, what)
    assert len(set(texts)) == 1 and WRONG[what] in texts[0], texts


def drift(debug: bool, where: str) -> str:
    """Worker 2 holds other numbers than the rest."""
    with DistributedContext(debug=debug) as ctx:
        x = torch.full(SHAPE, 1.0 + (ctx.rank == 2) * 1e-6)
        try:
            if where == "signal":
                DistributedSignal(ctx, SHAPE).update_(x)
            else:
                DistributedPhysics(ctx, 1, lambda *_: Scale()).A(x)
        except ValueError as error:
            return str(error)
        return ""


class Scale:
    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def A(self, x: Tensor) -> Tensor:
        return self.factor * x


def copies(workers: int) -> list[Any]:
    """What signals lie on: whole, and grids with copies along one axis or two."""
    row = tessel.world()
    grids: dict[int, list[tuple[int, ...]]] = {
        1: [(1, 1, 1)],
        2: [(2, 1), (2, 1, 1), (1, 2)],
        3: [(3, 1), (1, 3)],
        4: [(2, 2), (2, 1, 2), (4, 1), (2, 2, 1)],
    }
    made = [row.create_cartesian_topology_partition(shape) for shape in grids[workers]]
    turned = row.create_partition_inclusive(range(row.size - 1, -1, -1))
    return [None, *(operator_grid(each, SHAPE) for each in made), _two_axes(row, turned)]


def _two_axes(row: Any, turned: Any) -> Any:
    """The first dimension is split, and copies lie along two axes of workers in another order."""
    sizes = {1: (1, 1, 1), 2: (1, 1, 2), 3: (3, 1, 1), 4: (2, 1, 2)}[row.size]
    grid = turned.create_cartesian_topology_partition(sizes)
    return tessel.Layout.split(grid, SHAPE, [1, None, None, None], shared=[0, 2])


def mend(nprocs: int) -> None:
    """Every worker passes its own numbers: all get those of the first that holds the part."""
    with DistributedContext() as ctx:
        for partition in copies(nprocs):
            signal = DistributedSignal(ctx, SHAPE, torch.float64, partition=partition)
            layout = signal.layout
            coordinates = layout.partition.index
            assert coordinates is not None
            first = layout.holders(coordinates)[0]
            for passes in ("whole", "part"):
                own = values(SHAPE, 10 + ctx.rank)
                given = own if passes == "whole" else layout.local_part(own)
                signal.update_(given)
                expected = layout.local_part(values(SHAPE, 10 + first))
                assert torch.equal(signal.data, expected), (partition, passes)
                given.zero_()
                assert torch.equal(signal.data, expected), "the argument was copied"
                signal.data = layout.local_part(values(SHAPE, 20 + ctx.rank))
                assert torch.equal(signal.data, layout.local_part(values(SHAPE, 20 + first)))
                signal.data -= signal.data  # in place, and assigned
                assert not signal.data.any()


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_values_that_differ_become_those_of_the_first_worker(run: Run, nprocs: int) -> None:
    run(mend, nprocs, nprocs=nprocs)


def gradient_of_own_numbers() -> list[Tensor]:
    """The gradient Σ_i ∇f_i of a signal of which each worker passes its own numbers."""
    with DistributedContext(seed=3) as ctx:
        physics = DistributedPhysics(ctx, 3, lambda i, *_: Scale(i + 1.0))
        measured = DistributedMeasurements(ctx, 3, lambda i, *_: values(SHAPE, i))
        fidelity = DistributedDataFidelity(ctx, physics, measured)
        signal = DistributedSignal(ctx, SHAPE, torch.float64)
        signal.update_(values(SHAPE, 30 + ctx.rank))
        return [signal.data, fidelity.grad(signal)]


def test_gradients_are_those_of_one_image(run: Run) -> None:
    """Before updates compared numbers, each operator saw the image of its own worker."""
    x = values(SHAPE, 30)
    expected = sum((i + 1) * ((i + 1) * x - values(SHAPE, i)) for i in range(3))
    assert isinstance(expected, Tensor)
    for nprocs in (1, 2, 4):
        for data, gradient in run(gradient_of_own_numbers, nprocs=nprocs):
            assert torch.equal(data, x)
            close("gradient", gradient, expected, 1e-12)


def count_mending(differs: bool) -> list[int]:
    with DistributedContext() as ctx:
        signal = DistributedSignal(ctx, SHAPE, torch.float64)
        signal.update_(values(SHAPE, ctx.rank))  # what movements need is set up
        with count_traffic() as traffic:
            signal.update_(values(SHAPE, ctx.rank if differs else 0))
        return [traffic.bytes_received, traffic.agreements]


def test_an_update_takes_one_small_exchange(run: Run) -> None:
    image = values(SHAPE, 0).nbytes
    assert run(count_mending, False, nprocs=2) == [[0, 1], [0, 1]]
    assert run(count_mending, True, nprocs=2) == [[0, 1], [image, 1]]
    assert sum(each[0] for each in run(count_mending, True, nprocs=4)) == 3 * image


SMALL = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(3, 4)
NAN = torch.tensor(float("nan"), dtype=torch.float64)


def other(how: str) -> tuple[Tensor, Tensor]:
    """Two tensors that differ in a way that a plain sum would not see."""
    x = SMALL.clone()
    pairs: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "order": lambda: (x, x.flip(0)),
        "swap": lambda: (x, x[:, [1, 0, 2, 3]]),
        "signs": lambda: (x, -x),
        "two signs": lambda: (x, x * torch.tensor([1, -1, -1, 1])),
        "zeros": lambda: (x * 0, x * 0 * torch.tensor([1, -1, -1, 1])),
        "nan": lambda: (x, torch.where(x == 5, NAN, x)),
        "place of nan": lambda: (torch.where(x == 5, NAN, x), torch.where(x == 6, NAN, x)),
        "last bit": lambda: (x, torch.where(x == 7, x.nextafter(2 * x), x)),
    }
    return pairs[how]()


HOWS = ["order", "swap", "signs", "two signs", "zeros", "nan", "place of nan", "last bit"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", HOWS)
def test_checksums_differ(how: str, dtype: torch.dtype) -> None:
    first, second = other(how)
    if how != "last bit":  # of float64
        first, second = first.to(dtype), second.to(dtype)
    assert checksum(first) != checksum(second)
    assert mixed_sum(first.reshape(-1)) != mixed_sum(second.resolve_conj().reshape(-1))
    assert checksum_of([first, second]) != checksum_of([second, first])


def test_checksums_are_of_values_alone() -> None:
    """Not of strides, histories or wrappers."""
    complex_ = torch.complex(SMALL, SMALL)
    assert checksum(complex_) != checksum(complex_.conj())
    assert checksum(complex_.conj()) == checksum(complex_.conj().resolve_conj())
    assert mixed_sum(complex_.reshape(-1)) != mixed_sum(complex_.conj().resolve_conj().reshape(-1))
    expected = checksum(SMALL)
    assert checksum(SMALL.t().contiguous().t()) == expected
    assert checksum(SMALL.clone().requires_grad_() * 1) == expected
    assert checksum(SMALL.to(torch.complex128).conj().real) == expected
    assert checksum(torch.ones(1).expand(4)) == checksum(torch.ones(4))
    assert checksum(torch.empty(0)) == checksum(torch.empty(2, 0))
    seen: list[int] = []
    torch.func.grad(lambda x: (seen.append(checksum(x)), x.sum())[1])(SMALL)
    torch.func.jvp(lambda x: (seen.append(checksum(x)), x)[1], (SMALL,), (SMALL,))
    assert seen == [expected] * 2


def mend_kinds() -> None:
    """What a checksum has to see, between workers."""
    with DistributedContext() as ctx:
        for how in HOWS:
            pair = other(how)
            signal = DistributedSignal(ctx, SMALL.shape, pair[0].dtype)
            signal.update_(pair[ctx.rank])
            kept, expected = signal.data, pair[0]
            assert torch.equal(torch.isnan(kept), torch.isnan(expected)), how
            assert torch.equal(kept.nan_to_num(), expected.nan_to_num()), how
            assert torch.equal(kept.real.signbit(), expected.real.signbit()), how


def test_all_kinds_of_differences_are_mended(run: Run) -> None:
    run(mend_kinds, nprocs=2)


def differ_with_gradients(how: str) -> Any:
    with DistributedContext() as ctx:
        x = values(SHAPE, ctx.rank).requires_grad_(how != "one" or ctx.rank == 1)
        signal = DistributedSignal(ctx, SHAPE, torch.float64)
        try:
            if how == "source":
                signal.update_(3 * x, source=1)
                (signal.data * values(SHAPE, 5)).sum().backward()
                return x.grad
            if how == "forward":
                with torch.autograd.forward_ad.dual_level():
                    dual = torch.autograd.forward_ad.make_dual(x.detach(), x.detach())
                    signal.update_(dual)
            signal.update_(3 * x)
        except ValueError as error:
            assert not signal.data.any(), "a failed update changes nothing"
            return str(error)
        return ""


@pytest.mark.parametrize("how", ["all", "one", "forward"])
def test_values_that_differ_and_need_a_gradient_raise(run: Run, how: str) -> None:
    texts = run(differ_with_gradients, how, nprocs=2)
    assert len(set(texts)) == 1
    assert "worker 1 has other values than worker 0" in texts[0]
    assert "a gradient flows through it" in texts[0] and "update_(data, source=0)" in texts[0]


def test_the_source_of_values_gets_the_gradient(run: Run) -> None:
    first, second = run(differ_with_gradients, "source", nprocs=2)
    assert first is None or not first.any()
    close("gradient", second, 3 * values(SHAPE, 5), 1e-12)


def keep_the_argument(source: int | None) -> None:
    """What is changed after the call, in place, is not the signal."""
    with DistributedContext() as ctx:
        x = values(SHAPE, 0)
        signal = DistributedSignal(ctx, SHAPE, torch.float64, init=x)
        expected = x.clone()
        x += 1
        assert torch.equal(signal.data, expected)
        signal.update_(x, source=source)
        before = signal.data
        x += 1
        assert torch.equal(signal.data, expected + 1)
        signal.update_(x, source=source)
        assert torch.equal(before, expected + 1), "what was given out stays"


@pytest.mark.parametrize("source", [None, 0])
@pytest.mark.parametrize("nprocs", [1, 2])
def test_an_update_copies(run: Run, nprocs: int, source: int | None) -> None:
    run(keep_the_argument, source, nprocs=nprocs)


def copied(grid: tuple[int, ...] | None) -> bool:
    """Whether a copy that is kept of a signal stays as it is, and can be updated by itself."""
    with DistributedContext() as ctx:
        signal = DistributedSignal(ctx, (1, 1, 6, 5), torch.float64, partition=grid)
        first, second = values((1, 1, 6, 5), 1), values((1, 1, 6, 5), 2)
        signal.update_(first)
        kept = copy.deepcopy(signal)
        signal.update_(second)
        assert torch.equal(kept.whole(), first) and torch.equal(signal.whole(), second)
        kept.update_(second + ctx.rank)  # those of the first worker, where all hold all
        again = copy.deepcopy(kept)
        expected = second if grid is None else second + ctx.rank
        return torch.equal(again.data, again.layout.local_part(expected))


@pytest.mark.parametrize("nprocs", [1, 2])
@pytest.mark.parametrize("split", [False, True])
def test_a_signal_can_be_copied(run: Run, nprocs: int, split: bool) -> None:
    assert all(run(copied, (nprocs,) if split else None, nprocs=nprocs))


@pytest.mark.parametrize("where", ["signal", "physics"])
def test_workers_that_drift_apart_are_found(run: Run, where: str) -> None:
    assert run(drift, False, where) == [""] * 4
    texts = run(drift, True, where)
    assert len(set(texts)) == 1
    assert "worker 2 has other values than worker 0" in texts[0]


def test_the_environment_asks_for_the_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not DistributedContext().debug
    monkeypatch.setenv("TESSEL_DEBUG", "1")
    assert DistributedContext().debug
    assert not DistributedContext(debug=False).debug


def test_bad_shapes() -> None:
    with DistributedContext() as ctx:
        with pytest.raises(ValueError, match=r"length at least 1, got \(2, 0\)"):
            DistributedSignal(ctx, (2, 0))
        with pytest.raises(ValueError, match="one axis for each of the 2 dimensions"):
            DistributedSignal(ctx, (2, 2), partition=(1, 1, 1))
        for grid in ((2, 1), (0,), ()):
            with pytest.raises(ValueError, match="expected a grid of 1 to 1 workers, got"):
                DistributedSignal(ctx, (2, 2), partition=grid)
        other = tessel.Layout.balanced(tessel.world(), (3,))
        with pytest.raises(ValueError, match=r"the signal's shape \(2, 2\)"):
            DistributedSignal(ctx, (2, 2), partition=other)


def whole_signals_of_some_workers() -> None:
    """Signals that all workers of a grid have whole, be they all of the job or not."""
    with DistributedContext() as ctx:
        some = ctx.partition.create_partition_inclusive(range(ctx.world_size - 1))
        grid = ctx.partition.create_cartesian_topology_partition((1, ctx.world_size))
        for partition in (some, grid):
            layout = tessel.Layout.whole(partition, (2, 3), shared=True)
            x = values((2, 3), 1).float()
            signal = DistributedSignal(ctx, (2, 3), partition=layout, init=x)
            assert signal.is_whole
            close("whole", signal.whole(), x, 0)


@pytest.mark.parametrize("nprocs", [2, 3])
def test_a_whole_signal_of_some_workers_reaches_all(run: Run, nprocs: int) -> None:
    run(whole_signals_of_some_workers, nprocs=nprocs)
