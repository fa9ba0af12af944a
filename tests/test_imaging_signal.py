"""Signals: initialised from one worker, updated without a message, compared in debug mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from parity import close, values
from tessel.imaging import DistributedContext, DistributedPhysics, DistributedSignal
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
    "dtype": "torch.float32 was expected, got torch.float64",
    "own dtype": "the dtype differs between workers",
    "none": "worker 1 passed no tensor",
    "no source": "worker 1 passed no tensor",
    "far source": "a worker from 0 to 3, got 9",
    "source dtype": "torch.float32 was expected, got torch.float64",
    "init": "init was given on workers [1] and not on worker 0",
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
    def A(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("where", ["signal", "physics"])
def test_workers_that_drift_apart_are_found(run: Run, where: str) -> None:
    assert run(drift, False, where) == [""] * 4
    texts = run(drift, True, where)
    assert len(set(texts)) == 1
    assert "worker 2 holds other numbers than worker 0" in texts[0]


def test_the_environment_asks_for_the_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not DistributedContext().debug
    monkeypatch.setenv("TESSEL_DEBUG", "1")
    assert DistributedContext().debug
    assert not DistributedContext(debug=False).debug


def test_bad_shapes() -> None:
    with DistributedContext() as ctx:
        with pytest.raises(ValueError, match=r"length 1 or more, got \(2, 0\)"):
            DistributedSignal(ctx, (2, 0))
        with pytest.raises(ValueError, match="one axis for each of the 2 dimensions"):
            DistributedSignal(ctx, (2, 2), partition=(1, 1, 1))
        for grid in ((2, 1), (0,), ()):
            with pytest.raises(ValueError, match="a grid of 1 to 1 workers is needed, got"):
                DistributedSignal(ctx, (2, 2), partition=grid)
        other = tessel.Layout.balanced(tessel.world(), (3,))
        with pytest.raises(ValueError, match=r"the signal's shape \(2, 2\)"):
            DistributedSignal(ctx, (2, 2), partition=other)
