"""What is wrong, or different, on one worker only: all workers raise alike, and the job goes on.

Tests `imaging/parameters.py`, `imaging/physics.py`, `imaging/measurements.py`,
`imaging/fidelity.py`, `imaging/stacked.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from parity import close, values
from tessel.imaging import (
    DistributedContext,
    DistributedDataFidelity,
    DistributedLinearPhysics,
    DistributedMeasurements,
    DistributedPhysics,
    DistributedSignal,
    distribute,
)
from tessel.imaging.fidelity import L2
from tessel.imaging.parts import operator_grid

Run = Callable[..., list[Any]]
SHAPE = (1, 1, 6, 4)


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


class Twice:
    """2 x; where it is told to, it raises on one worker, with an error that no library raises."""

    failing: int | None = None

    def _times(self, x: Tensor) -> Tensor:
        if tessel.world().rank == self.failing:
            raise KeyError("no calibration")
        return 2 * x

    A = A_adjoint = _times


class Whole(Twice):
    """The same; that it takes all of an image is seen by what it does to the order."""

    def A(self, x: Tensor) -> Tensor:
        return self._times(x.flip(-2))

    def A_adjoint(self, y: Tensor) -> Tensor:
        return self._times(y).flip(-2)


class Sensitive(L2):
    """½‖·‖² that raises on one worker, on what is no small tensor on which it is tried."""

    failing: int | None = None

    def _check(self, x: Tensor) -> None:
        if tessel.world().rank == self.failing and x.dtype == torch.float64:
            raise KeyError("no calibration")

    def __call__(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        self._check(x)
        return super().__call__(x, y, physics)

    def grad(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        self._check(x)
        return super().grad(x, y, physics)


def factories_of_one_worker() -> None:
    def failing(i: int, device: Any, shared: Any) -> Any:
        if i == 1:
            raise OSError("no file for item 1")
        return values(SHAPE, i)

    with DistributedContext(seed=1) as ctx:
        good = DistributedPhysics(ctx, 3, lambda *_: Twice())
        ys = DistributedMeasurements(ctx, 3, lambda i, *_: values(SHAPE, i))
        for make in (
            lambda: DistributedMeasurements(ctx, 3, failing),
            lambda: DistributedPhysics(ctx, 3, failing),
            lambda: DistributedDataFidelity(ctx, good, ys, failing),
        ):
            assert "which raised OSError: no file for item 1" in error_of(make)
        loss = DistributedDataFidelity(ctx, good, ys)(values(SHAPE, 5))
        expected = sum(L2()(2 * values(SHAPE, 5), values(SHAPE, i), IDENTITY) for i in range(3))
        close("after factories that raised", loss, expected, 1e-12)


IDENTITY = SimpleNamespace(A=lambda x: x)


@pytest.mark.parametrize("nprocs", [2, 3])
def test_a_factory_that_raises_on_one_worker(run: Run, nprocs: int) -> None:
    run(factories_of_one_worker, nprocs=nprocs)


def code_of_one_worker(grid: tuple[int, ...] | None) -> None:
    with DistributedContext(seed=1) as ctx:
        check_code(ctx, grid, operator := Whole(), L2(), operator)
        check_code(ctx, grid, Whole(), fidelity := Sensitive(), fidelity)
        mask = SimpleNamespace(mask=torch.full((4,), 2.0).double(), A=lambda x: 2 * x)
        # the fidelity is computed on each part of the image
        check_code(ctx, grid, mask, fidelity := Sensitive(), fidelity)


def check_code(ctx: Any, grid: Any, operator: Any, fidelity: Any, broken: Any) -> None:
    """All raise what one worker raises, and then compute what one process does."""
    x0, y0 = values(SHAPE, 1), values(SHAPE, 2)
    signal = DistributedSignal(ctx, SHAPE, torch.float64, grid, init=x0)
    physics = DistributedPhysics(ctx, 1, lambda *_: operator, layout=signal.layout)
    ys = DistributedMeasurements(ctx, 1, lambda *_: y0, physics=physics)
    distance = DistributedDataFidelity(ctx, physics, ys, lambda *_: fidelity)
    calls = [lambda: distance(signal), lambda: distance.grad(signal)]
    if broken is operator:
        calls += [lambda: physics.A(signal), lambda: physics.A_vjp(signal, ys.local)]
    broken.failing = 0
    with pytest.raises(ValueError) as info:
        calls[0]()
    if ctx.rank == 0:  # whose traceback says where it was
        assert isinstance(info.value.__cause__ or info.value.__context__, KeyError)
    for call in calls:
        assert "which raised KeyError: 'no calibration'" in error_of(call), type(broken).__name__
    broken.failing = None
    is_whole = isinstance(operator, Whole)
    u = 2 * (x0.flip(-2) if is_whole else x0)
    back = 2 * (u - y0)
    gradient = signal.layout.local_part(back.flip(-2) if is_whole else back)
    close("loss", distance(signal), L2()(u, y0, IDENTITY), 1e-12)
    close("gradient", distance.grad(signal), gradient, 1e-12)


@pytest.mark.parametrize("grid", [None, (2, 1), (3, 1)])
def test_code_of_users_that_raises_on_one_worker(run: Run, grid: tuple[int, ...] | None) -> None:
    run(code_of_one_worker, grid, nprocs=3 if grid == (3, 1) else 2)


def results_of_one_worker() -> None:
    """An operator on an image in parts whose adjoint gives something else than an image."""

    class Odd(Whole):
        def A_adjoint(self, y: Tensor) -> Tensor:
            return y[..., 1:]

    with DistributedContext() as ctx:
        signal = DistributedSignal(ctx, SHAPE, torch.float64, (2, 1))
        physics = DistributedLinearPhysics(ctx, 1, lambda *_: Odd(), layout=signal.layout)
        ys = physics.A(signal)
        for call in (lambda: physics.A_adjoint(ys), lambda: physics.A_adjoint_A(signal)):
            assert "(1, 1, 6, 3)" in error_of(call)
        complex_mask = torch.complex(values((4,), 1), values((4,), 2))
        half = SimpleNamespace(
            mask=complex_mask,
            A=lambda x: x * complex_mask,
            A_adjoint=lambda y: y * complex_mask.conj(),
        )
        # One operator on two rows: that of the other one has nothing to add, in another dtype.
        layout = operator_grid(tessel.world().create_cartesian_topology_partition((2, 1)), SHAPE)
        physics = DistributedLinearPhysics(ctx, 1, lambda *_: half, layout=layout)
        x = values(SHAPE, 1)
        for _ in range(2):  # also when the call is repeated
            text = error_of(lambda: physics.A_adjoint_A(x))
            assert "torch.complex128 for one of shape (1, 1, 6, 4) and torch.float64" in text
        z = torch.complex(x, x)
        close("complex", physics.A_adjoint_A(z), half.A_adjoint(half.A(z)), 1e-12)
        assert "complex128 for one" in error_of(lambda: physics.A_adjoint_A(x))
        close("adjoint", physics.A_adjoint(physics.A(x)), half.A_adjoint(half.A(x)), 1e-12)


def test_results_that_do_not_fit(run: Run) -> None:
    run(results_of_one_worker, nprocs=2)


def measurements_that_one_worker_learns() -> None:
    """All measurements are given to all workers, and on one of them they need gradients."""
    x, shape = values(SHAPE, 7), SHAPE
    with DistributedContext() as ctx:
        scales = [
            SimpleNamespace(A=lambda x, i=i: i * x, A_adjoint=lambda y, i=i: i * y)
            for i in (1, 2, 3)
        ]
        physics, fidelity = distribute(scales, ctx), distribute(L2(), ctx)
        for needing in ({0}, {1}, {0, 1}):
            ys = [values(shape, i).requires_grad_(ctx.rank in needing) for i in range(3)]
            alone = [values(shape, i).requires_grad_() for i in range(3)]
            fidelity(x, ys, physics).sum().backward()
            sum(L2()(x, y, each).sum() for y, each in zip(alone, scales, strict=True)).backward()
            physics.A_adjoint(ys).square().sum().backward()
            sum((i + 1) * y for i, y in enumerate(alone)).square().sum().backward()
            for y, expected in zip(ys, alone, strict=True):
                if ctx.rank in needing:
                    close("measurement", y.grad, expected.grad, 1e-12)
                else:
                    assert y.grad is None
        ys = [values(shape, i).requires_grad_() for i in range(3)]
        given = ys if ctx.rank == 0 else [ys[i] for i in physics.local_indices]
        assert "pass all measurements on all workers" in error_of(lambda: physics.A_adjoint(given))
        close(
            "without",
            physics.A_adjoint([y.detach() for y in ys]),
            sum((i + 1) * y.detach() for i, y in enumerate(ys)),
            1e-12,
        )


@pytest.mark.parametrize("nprocs", [2, 4])
def test_measurements_that_need_gradients_on_one_worker(run: Run, nprocs: int) -> None:
    run(measurements_that_one_worker_learns, nprocs=nprocs)
