"""Operators over workers give what deepinv gives in one process, and so do their gradients.

Tests `imaging/physics.py`, `imaging/linear_physics.py`, `imaging/fidelity.py`,
`imaging/measurements.py`, `imaging/parameters.py`, `imaging/problems.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

import deepinv
import pytest
import torch
from torch import Tensor

import tessel
from parity import close, values
from tessel.core import total
from tessel.imaging import (
    DistributedContext,
    DistributedDataFidelity,
    DistributedLinearPhysics,
    DistributedMeasurements,
    DistributedPhysics,
    DistributedSignal,
    FactoryConfig,
    make_distrib_bundle,
)
from tessel.imaging.parts import operator_grid
from tessel.testing import count_traffic

Blur, stack = deepinv.physics.Blur, deepinv.physics.stack
LinearPhysics, GaussianNoise = deepinv.physics.LinearPhysics, deepinv.physics.GaussianNoise
Downsampling = deepinv.physics.Downsampling
L1, L2, PoissonLikelihood = deepinv.optim.L1, deepinv.optim.L2, deepinv.optim.PoissonLikelihood
gaussian_blur = deepinv.physics.blur.gaussian_blur

Run = Callable[..., list[Any]]
NUMBERS = (1, 2, 4)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of gaussian_blur
SHAPE = (2, 3, 12, 10)
TOLERANCE = 1e-10  # in float64: FFTs and sums in another order


def blurs(count: int = 3) -> list[Any]:
    """Operators of deepinv with measurements of different shapes, well conditioned together."""
    sigmas = (0.6, 1.0, (0.8, 1.5))
    found: list[Any] = [
        Blur(filter=gaussian_blur(sigma=sigmas[k % 3]).double(), padding="circular")
        for k in range(count)
    ]
    found[-1] = Downsampling(img_size=SHAPE[1:], factor=2, filter="gaussian").double()
    return found


def truth(batch: int = 2) -> Tensor:
    return values((batch, *SHAPE[1:]), 0).abs()


def spread(ctx: DistributedContext, operators: list[Any]) -> DistributedLinearPhysics:
    return DistributedLinearPhysics(ctx, len(operators), lambda i, device, shared: operators[i])


def measured(ctx: DistributedContext, ys: Any) -> DistributedMeasurements:
    return DistributedMeasurements(ctx, len(ys), lambda i, device, shared: ys[i])


def compare(count: int, batch: int, sharding: str) -> list[Tensor]:
    """All operations of linear physics against those of the stacked operators of deepinv."""
    with DistributedContext(sharding=sharding, debug=True) as ctx:
        operators = blurs(count)
        alone = stack(*operators)
        x, noise = truth(batch), values((batch, *SHAPE[1:]), 1)
        physics = spread(ctx, operators)
        expected = alone.A(x)
        ys = physics.A(x)
        assert len(ys) == len(physics.local_indices)
        for i, y in zip(physics.local_indices, ys, strict=True):
            close(f"A {i}", y, expected[i], TOLERANCE)
        back = physics.A_adjoint(ys)
        close("A_adjoint", back, alone.A_adjoint(expected), TOLERANCE)
        close("A_adjoint_A", physics.A_adjoint_A(x), alone.A_adjoint(alone.A(x)), TOLERANCE)
        close("A_vjp", physics.A_vjp(x, ys), alone.A_vjp(x, expected), TOLERANCE)
        both = physics.A_A_adjoint(ys)
        for i, y in zip(physics.local_indices, both, strict=True):
            close(f"A_A_adjoint {i}", y, alone.A(alone.A_adjoint(expected))[i], TOLERANCE)
        shares = ((a * b).sum() for a, b in zip(physics.A(noise), ys, strict=True))
        left = total(sum(shares, x.new_zeros(())), ctx.partition)
        close("dot-test", left, (noise * back).sum(), 1e-12)
        return [back, left]


def compare_all() -> list[Tensor]:
    cases = product((1, 3), (1, 2), ("round_robin", "block"))
    return [each for case in cases for each in compare(*case)]


@pytest.mark.parametrize("nprocs", NUMBERS)
def test_linear_physics_is_that_of_one_process(run: Run, nprocs: int) -> None:
    """Of one operator and of three, so that workers are idle."""
    results = run(compare_all, nprocs=nprocs, timeout=100)
    for other in results[1:]:  # bit by bit
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


FIDELITIES = {"L2": L2, "scaled L2": lambda: L2(sigma=0.3), "poisson": PoissonLikelihood, "L1": L1}


def compare_fidelity(name: str, batch: int, reduction: str) -> list[Tensor]:
    """Loss and gradient against deepinv's, and the gradient against autograd of the loss."""
    with DistributedContext() as ctx:
        operators, x = blurs(), truth(batch)
        targets = [each.A(truth(batch)) + 0.1 for each in operators]
        alone = FIDELITIES[name]()
        fidelity = DistributedDataFidelity(
            ctx,
            spread(ctx, operators),
            measured(ctx, targets),
            data_fidelity_factory=lambda i, device, shared: FIDELITIES[name](),
            reduction=reduction,
        )
        scale = 1 if reduction == "sum" else 1 / 3
        pairs = list(zip(operators, targets, strict=True))
        loss = scale * sum(alone(x, y, each) for each, y in pairs)
        assert loss.shape == (batch,)  # a number for each image
        slope = scale * sum(alone.grad(x, y, each) for each, y in pairs)
        close("loss", fidelity(x), loss, TOLERANCE)
        signal = DistributedSignal(ctx, x.shape, torch.float64, init=x)
        grad = fidelity.grad(signal)
        close("grad", grad, slope, TOLERANCE)
        leaf, twin = (x.clone().requires_grad_() for _ in range(2))
        (derived,) = torch.autograd.grad(fidelity(leaf).sum(), leaf)
        theirs = scale * sum(alone(twin, y, each).sum() for each, y in pairs)
        close("autograd of the loss", derived, torch.autograd.grad(theirs, twin)[0], TOLERANCE)
        if name != "poisson":  # of which deepinv's gradient is not that of its value
            close("autograd of the loss and grad", derived, grad, TOLERANCE)
        return [grad, derived, fidelity(x)]


def compare_fidelities() -> list[Tensor]:
    cases = product(FIDELITIES, (1, 2), ("sum", "mean"))
    return [each for case in cases for each in compare_fidelity(*case)]


@pytest.mark.parametrize("nprocs", NUMBERS)
def test_data_fidelity_is_that_of_one_process(run: Run, nprocs: int) -> None:
    results = run(compare_fidelities, nprocs=nprocs, timeout=100)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def matrices(count: int, rows: int, columns: int, rank: int) -> list[Tensor]:
    """Matrices whose stack has this rank."""
    basis = values((rank, columns), 9)
    return [values((rows, rank), 10 + k) @ basis for k in range(count)]


def physics_of(parts: list[Tensor]) -> list[Any]:
    return [
        LinearPhysics(A=lambda x, m=each, **_: x @ m.T, A_adjoint=lambda y, m=each, **_: y @ m)
        for each in parts
    ]


def invert(rank: int) -> Tensor:
    """The pseudo-inverse and the norm of the stack, against those of a dense matrix."""
    with DistributedContext() as ctx:
        parts = matrices(3, 5, 6, rank)
        dense = torch.cat(parts)
        physics = spread(ctx, physics_of(parts))
        ys = [values((2, 5), 20 + k) for k in range(3)]
        inverse = physics.A_dagger([ys[i] for i in physics.local_indices])
        close("A_dagger", inverse, torch.cat(ys, 1) @ torch.linalg.pinv(dense).T, TOLERANCE)
        alone = stack(*physics_of(parts))
        stacked = deepinv.utils.TensorList(ys)
        theirs = alone.A_dagger(stacked, solver="CG", max_iter=50, tol=1e-13)
        close("A_dagger of deepinv", inverse, theirs, 1e-6)  # it adds 1e-8 to what it divides by
        largest = torch.linalg.matrix_norm(dense, 2)
        like = torch.zeros(1, 6, dtype=torch.float64)
        norm = physics.norm(like, max_iter=3000, tol=1e-15)
        close("norm", norm, largest, TOLERANCE)
        found = alone.compute_norm(like, max_iter=3000, tol=1e-12, verbose=False, squared=False)
        close("norm of deepinv", norm, found.to(norm), 1e-6)  # which starts from random numbers
        close("its square", physics.compute_norm(like, 3000, 1e-15), largest**2, TOLERANCE)
        return torch.cat([inverse.reshape(-1), norm.reshape(1)])


@pytest.mark.parametrize("rank", [6, 4])
@pytest.mark.parametrize("nprocs", NUMBERS)
def test_pseudo_inverse_and_norm(run: Run, nprocs: int, rank: int) -> None:
    """Also of a stack that has a kernel, of which the pseudo-inverse takes nothing."""
    results = run(invert, rank, nprocs=nprocs)
    assert all(torch.equal(results[0], each) for each in results)


class Matrix(torch.nn.Module):
    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(matrix)

    def A(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T

    def A_adjoint(self, y: Tensor) -> Tensor:
        return y @ self.matrix


def derive_inverse() -> None:
    """Gradients of the measurements, and of the operators themselves."""
    with DistributedContext() as ctx:
        parts = [Matrix(each) for each in matrices(3, 5, 6, 6)]
        physics = spread(ctx, parts)
        ys = [values((2, 5), 20 + k).requires_grad_() for k in range(3)]
        weights = values((2, 6), 3)
        dense = torch.cat([each.matrix for each in parts])
        whole = torch.cat(ys, 1) @ torch.linalg.pinv(dense).T
        leaves = [*ys, *(each.matrix for each in parts)]
        expected = torch.autograd.grad((weights * whole.sin()).sum(), leaves)
        found = physics.A_dagger([ys[i] for i in physics.local_indices])
        (weights * found.sin()).sum().backward()
        for k, (leaf, slope) in enumerate(zip(leaves, expected, strict=True)):
            assert (leaf.grad is not None) == (k % 3 in physics.local_indices)
            if leaf.grad is not None:
                close(f"gradient of {k}", leaf.grad, slope, TOLERANCE)


def test_the_pseudo_inverse_can_be_derived(run: Run) -> None:
    run(derive_inverse)


class Learned(torch.nn.Module):
    """Nonlinear physics with a parameter of its own and one that all share."""

    def __init__(self, own: Tensor, common: torch.nn.Parameter) -> None:
        super().__init__()
        self.own = torch.nn.Parameter(own)
        self.common = common

    def A(self, x: Tensor) -> Tensor:
        return torch.sin(self.own * x) + self.common * x


def learned(common: torch.nn.Parameter) -> list[Learned]:
    return [Learned(values((4,), 30 + k), common) for k in range(3)]


def derive(mode: str) -> None:
    """Gradients of first and second order, of the image and of all parameters."""
    with DistributedContext() as ctx:
        common, twin = (torch.nn.Parameter(values((4,), 5)) for _ in range(2))
        alone, operators = learned(common), learned(twin)
        x = values((2, 4), 6)
        ys = [values((2, 4), 40 + k) for k in range(3)]
        if mode == "list":
            config = FactoryConfig(physics=operators, measurements=ys)
            bundle = make_distrib_bundle(
                ctx, factory_config=config, signal_shape=(2, 4), dtype=x.dtype, reduction="sum"
            )
            physics, fidelity = bundle.physics, bundle.data_fidelity
        else:
            physics = DistributedPhysics(
                ctx, 3, lambda i, device, shared: operators[i], shared={"common": twin}
            )
            fidelity = DistributedDataFidelity(ctx, physics, measured(ctx, ys))
        here = range(3) if mode == "list" else physics.local_indices
        theirs, ours = (x.clone().requires_grad_() for _ in range(2))
        losses = [
            0.5 * (each.A(theirs) - y).square().sum() for each, y in zip(alone, ys, strict=True)
        ]
        wanted = [theirs, common, *(alone[i].own for i in here)]
        held = [ours, twin, *(operators[i].own for i in here)]
        names = ["image", "common parameter", *(f"parameter of {i}" for i in here)]
        first = torch.autograd.grad(sum(losses), wanted, create_graph=True)
        loss = fidelity(ours).sum()
        got = torch.autograd.grad(loss, held, create_graph=True)
        check(names, got, first)
        slope = fidelity.grad(ours)
        close("grad", slope, first[0], TOLERANCE)
        weights = values((2, 4), 7)
        second = torch.autograd.grad((weights * first[0]).sum(), wanted, retain_graph=True)
        check(names, torch.autograd.grad((weights * slope).sum(), held), second)
        check(names, torch.autograd.grad((weights * got[0]).sum(), held), second)
        pairs = zip(alone, ys, strict=True)
        expected = [torch.autograd.grad((each.A(theirs) * y).sum(), theirs)[0] for each, y in pairs]
        own = physics.A_vjp(ours, [ys[i] for i in physics.local_indices])
        close("A_vjp", own, sum(expected), TOLERANCE)


def check(names: list[str], got: Any, expected: Any) -> None:
    for name, a, b in zip(names, got, expected, strict=True):
        close(f"gradient of the {name}", a, b, TOLERANCE)


@pytest.mark.parametrize("mode", ["list", "factory"])
@pytest.mark.parametrize("nprocs", NUMBERS)
def test_gradients_are_those_of_one_process(run: Run, nprocs: int, mode: str) -> None:
    run(derive, mode, nprocs=nprocs)


def closed_over() -> tuple[list[str], list[float]]:
    """What calls say of a parameter that operators close over; gradients where all know of it."""
    scale, factor = (torch.tensor(each, requires_grad=True) for each in (2.0, 3.0))

    def make(i: int, *_: Any) -> Any:
        times = lambda x: (i + 1) * scale * x  # noqa: E731
        return SimpleNamespace(A=times, A_adjoint=times)

    with DistributedContext() as ctx:
        x, ys = torch.ones(3), measured(ctx, [torch.ones(3)] * 3)
        physics = DistributedLinearPhysics(ctx, 3, make)
        known = DistributedLinearPhysics(ctx, 3, make, shared={"scale": scale})
        calls: list[Callable[[], Any]] = [
            lambda: physics.A(x),
            lambda: physics(x),
            lambda: physics.A_adjoint(ys.local),
            lambda: physics.A_adjoint_A(x),
            lambda: DistributedDataFidelity(ctx, physics, ys)(x),
            lambda: DistributedDataFidelity(ctx, physics, ys).grad(x),
            lambda: known.A(x) * factor,
            lambda: known.A(x) - factor.exp(),
        ]
        texts = []
        for call in calls:
            with pytest.raises(ValueError) as error:
                call()
            texts.append(str(error.value))
        with torch.no_grad():
            physics.A(x), known.A(x) * factor
        loss = DistributedDataFidelity(ctx, known, ys)(x).sum()
        back = known.A_adjoint(known.A(x) * tessel.distributed.copy(factor)).sum()
        vjps = torch.autograd.grad(loss, scale), torch.autograd.grad(back, factor)
        return texts, [slope.item() for (slope,) in vjps]


@pytest.mark.parametrize("nprocs", [2, 4])
def test_parts_of_a_gradient_are_refused(run: Run, nprocs: int) -> None:
    for texts, vjps in run(closed_over, nprocs=nprocs):
        assert all("closures are not" in text for text in texts[:6])
        assert all("pass it in shared=" in text for text in texts[:6])
        assert all("tessel.distributed.copy(tensor)" in text for text in texts[6:])
        assert vjps == [66.0, 168.0]  # Σ_i 3 (2 (i + 1) - 1) (i + 1), and Σ_i 3 (2 (i + 1))²


def kept_by_several(where: str) -> tuple[list[str], float]:
    """Operators of all workers keep one parameter, which their factory has from somewhere."""
    scale = EVERYWHERE if where == "global" else torch.tensor(2.0, requires_grad=True)
    build = lambda i: Hidden(i, scale)  # noqa: E731
    factories: dict[str, Callable[..., Any]] = {
        "closure": lambda i, *_: Hidden(i, scale),
        "function": lambda i, *_: build(i),
        "default": lambda i, device, shared, scale=scale: Hidden(i, scale),
        "partial": partial(lambda scale, i, *_: Hidden(i, scale), scale),
        "global": lambda i, *_: next(Hidden(i, EVERYWHERE) for _ in range(1)),
    }
    with DistributedContext() as ctx:
        x, ys, make = torch.ones(3), measured(ctx, [torch.ones(3)] * 3), factories[where]
        physics = DistributedLinearPhysics(ctx, 3, make)
        texts = []
        for call in (physics.A, physics.A_adjoint_A, DistributedDataFidelity(ctx, physics, ys)):
            with pytest.raises(ValueError) as error:
                call(x)
            texts.append(str(error.value))
        known = DistributedLinearPhysics(ctx, 3, make, shared={"scale": scale})
        return texts, torch.autograd.grad(known.A_adjoint_A(x).sum(), scale)[0].item()


@pytest.mark.parametrize("where", ["closure", "function", "default", "partial", "global"])
def test_a_parameter_that_several_operators_keep_is_shared_or_refused(run: Run, where: str) -> None:
    for texts, slope in run(kept_by_several, where, nprocs=2):
        assert all("used by worker 0 and worker 1" in text for text in texts)
        assert all("pass it in shared=" in text for text in texts)
        assert slope == 168.0  # Σ_i 3 (i + 1)² 2 · 2


EVERYWHERE = torch.full((), 2.0, requires_grad=True)  # as a script has it


class Hidden:
    """An operator that uses a global tensor, or one that it keeps."""

    def __init__(self, i: int, scale: Tensor | None = None) -> None:
        self.times, self.scale = i + 1, scale

    def A(self, x: Tensor) -> Tensor:
        return self.times * (EVERYWHERE if self.scale is None else self.scale) * x

    A_adjoint = A


class Keeping(torch.autograd.Function):
    """A function of a user's, who keeps an operator by the name that Tessel's own nodes have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        layout = tessel.Layout.balanced(tessel.world(), (3,))
        ctx.operator = tessel.Move(layout, layout)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class HiddenDistance:
    """A data fidelity that uses a global tensor."""

    def __call__(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        return EVERYWHERE * (physics.A(x) - y).square().sum()


def hidden() -> tuple[list[str], float]:
    """What calls say that would give parts of a gradient to tensors that nobody knows of."""
    plain = SimpleNamespace(A=lambda x: x, A_adjoint=lambda y: y)
    with DistributedContext() as ctx:
        x, ys = torch.ones(3), measured(ctx, [torch.ones(3)] * 3)
        physics = DistributedLinearPhysics(ctx, 3, lambda i, *_: Hidden(i))
        nonlinear = DistributedPhysics(ctx, 3, lambda i, *_: Hidden(i))
        behind = SimpleNamespace(A=lambda x: Keeping.apply(EVERYWHERE) * x, A_adjoint=lambda y: y)
        behind_it = DistributedLinearPhysics(ctx, 3, lambda *_: behind)
        known = DistributedLinearPhysics(
            ctx, 3, lambda i, _, shared: Hidden(i, shared["scale"]), {"scale": EVERYWHERE}
        )
        computed = DistributedLinearPhysics(
            ctx, 3, lambda i, _, shared: Hidden(i, 2 * shared["scale"]), {"scale": EVERYWHERE}
        )
        simple = DistributedLinearPhysics(ctx, 3, lambda *_: plain)
        distance = DistributedDataFidelity(ctx, simple, ys, lambda *_: HiddenDistance())
        calls: list[Callable[[], Any]] = [
            lambda: physics.A(x),
            lambda: physics(x),
            lambda: behind_it.A(x),
            lambda: physics.A_adjoint(ys.local),
            lambda: physics.A_adjoint_A(x),
            lambda: nonlinear.A_vjp(x, ys.local),
            lambda: computed.A(x),
            lambda: DistributedDataFidelity(ctx, physics, ys)(x),
            lambda: DistributedDataFidelity(ctx, physics, ys).grad(x),
            lambda: distance(x),
            lambda: distance.grad(x),
        ]
        texts = []
        for call in calls:
            with pytest.raises(ValueError) as error:
                call()
            texts.append(str(error.value))
        with torch.no_grad():
            physics.A(x), distance.grad(x)
        return texts, torch.autograd.grad(known.A_adjoint_A(x).sum(), EVERYWHERE)[0].item()


@pytest.mark.parametrize("nprocs", [2, 4])
def test_tensors_that_nobody_knows_of_are_found(run: Run, nprocs: int) -> None:
    """On every worker, also on one that has no operator and sees nothing."""
    for texts, slope in run(hidden, nprocs=nprocs):
        assert all("needs a gradient and was not found in it" in text for text in texts), texts
        assert all("pass it in shared=" in text for text in texts)
        assert slope == 168.0  # Σ_i 3 (i + 1)² 2 · 2


def of_other_dtypes(parts: bool) -> list[str]:
    """Filters of float64 and an image of float32; one of three workers has no operator."""
    with DistributedContext() as ctx:
        config = FactoryConfig(physics=blurs()[:2], measurements=[truth()] * 2)
        bundle = make_distrib_bundle(
            ctx, factory_config=config, signal_shape=SHAPE, partition=(3, 1) if parts else None
        )
        x, texts = bundle.signal.layout.local_part(truth().float()).clone(), []
        for call in (bundle.physics.A, bundle.data_fidelity.grad, bundle.data_fidelity):
            with pytest.raises(ValueError) as error:
                call(x)
            texts.append(str(error.value))
        return texts


@pytest.mark.parametrize("parts", [False, True])
def test_an_image_of_another_dtype_is_refused_by_all_workers(run: Run, parts: bool) -> None:
    for texts in run(of_other_dtypes, parts, nprocs=3):
        assert all("the image has torch.float32" in text for text in texts), texts
        assert all("torch.float64" in text for text in texts)


def failing(index: int) -> tuple[str, str]:
    """An operator that raises twice, on one worker of three: what all say, and what comes later."""
    is_broken = [True]

    class Broken(Hidden):
        def A(self, x: Tensor) -> Tensor:
            if is_broken[0] and self.times == index + 1:
                raise IndexError("no such row")
            return x

    with DistributedContext() as ctx, torch.no_grad():
        physics = DistributedPhysics(ctx, 2, lambda i, *_: Broken(i))
        for _ in range(2):  # a program that catches the error may call it again
            with pytest.raises(ValueError) as error:
                physics.A(torch.ones(3))
        is_broken[0] = False
        return str(error.value), str(physics.A(torch.ones(3)))


def test_an_operator_that_raises_is_heard_by_all_workers(run: Run) -> None:
    for k, (text, later) in enumerate(run(failing, 1, nprocs=3)):
        assert "which raised IndexError: no such row" in text
        assert later == ("[tensor([1., 1., 1.])]" if k < 2 else "[]")


def too_many() -> list[str]:
    """Worker 0 has a measurement more than operators."""
    with DistributedContext() as ctx:
        physics = DistributedLinearPhysics(ctx, 3, lambda i, *_: Hidden(i, torch.ones(())))
        ys = measured(ctx, [torch.ones(3)] * 3)
        fidelity = DistributedDataFidelity(ctx, physics, ys)
        if ctx.rank == 0:
            ys.local.append(torch.ones(3))
        texts = []
        for call in (fidelity, fidelity.grad):
            with pytest.raises(ValueError) as error:
                call(torch.ones(3))
            texts.append(str(error.value))
        return texts


def test_each_operator_needs_its_measurement_on_every_worker(run: Run) -> None:
    first, *others = run(too_many, nprocs=2)
    assert [first] == others
    assert all("worker 0 has the operators [0, 2] and needs as many" in text for text in first)


def test_one_worker_gets_all_of_a_gradient() -> None:
    with DistributedContext() as ctx:
        physics = DistributedLinearPhysics(ctx, 3, lambda i, *_: Hidden(i))
        (slope,) = torch.autograd.grad(physics.A_adjoint_A(torch.ones(3)).sum(), EVERYWHERE)
        assert slope == 168.0


def kept_apart() -> bool:
    """Operators that a factory keeps are their worker's own, whatever they look like."""
    with DistributedContext() as ctx:
        made: list[Learned] = []
        common = torch.nn.Parameter(values((4,), 5), requires_grad=False)

        def make(i: int, *_: Any) -> Learned:
            made.append(Learned(values((4,), 30 + i), common))
            return made[-1]

        physics = DistributedPhysics(ctx, 3, make)
        sum(y.sum() for y in physics.A(values((2, 4), 6))).backward()
        return all(each.own.grad is not None for each in made)


def test_parameters_that_a_factory_makes_are_its_own(run: Run) -> None:
    assert run(kept_apart, nprocs=2) == [True, True]


def derive_a_chain() -> None:
    """A loss of A_adjoint(A(x)), also on the worker that has no operator."""
    with DistributedContext() as ctx:
        operators, x = blurs(), truth()
        alone, weights = stack(*operators), values(SHAPE, 8)
        theirs, ours = (x.clone().requires_grad_() for _ in range(2))
        expected = (weights * alone.A_adjoint(alone.A(theirs)).square()).sum()
        physics = spread(ctx, operators)
        got = (weights * physics.A_adjoint(2 * physics.A(ours) - physics.A(ours)).square()).sum()
        (a,), (b,) = (torch.autograd.grad(f, v) for f, v in ((got, ours), (expected, theirs)))
        close("gradient", a, b, TOLERANCE)
        (c,) = torch.autograd.grad((weights * physics.A_adjoint_A(ours).square()).sum(), ours)
        close("gradient of A_adjoint_A", c, b, TOLERANCE)


def test_chains_can_be_derived_where_a_worker_is_idle(run: Run) -> None:
    run(derive_a_chain)


def one_needs() -> float:
    """Only worker 1 asks for the gradient of the image."""
    with DistributedContext() as ctx:
        physics = spread(ctx, blurs())
        x = truth().requires_grad_(ctx.rank == 1)
        physics.A_adjoint_A(x).square().sum().backward()
        return 0.0 if x.grad is None else x.grad.norm().item()


def test_one_worker_needs_a_gradient(run: Run) -> None:
    norms = run(one_needs)
    assert norms[1] > 0 and norms[0] == norms[2] == norms[3] == 0


def count(method: str) -> tuple[int, int]:
    with DistributedContext() as ctx:
        physics, x = spread(ctx, blurs()), truth()
        ys = physics.A(x)
        with count_traffic() as traffic:
            physics.A(x) if method == "A" else physics.A_adjoint(ys)
        return traffic.bytes_received, x.nbytes


def test_what_is_sent(run: Run) -> None:
    """A shared image is used where it is, and what comes back is summed once."""
    assert [received for received, _ in run(count, "A")] == [0] * 4
    for received, whole in run(count, "A_adjoint"):
        assert received <= 2 * 3 / 4 * whole + 4 * 64


def noisy(count: int, seed: int | None = 3) -> list[tuple[int, Tensor]]:
    torch.manual_seed(5)  # on all workers
    with DistributedContext(seed=seed) as ctx:
        operators = [
            Blur(filter=gaussian_blur(sigma=1.0), padding="circular") for _ in range(count)
        ]
        for each in operators:
            each.noise_model = GaussianNoise(sigma=0.1)
        physics, x = spread(ctx, operators), torch.zeros(1, 1, 8, 8)
        first, second = physics(x), physics(x)
        made = DistributedMeasurements(ctx, count, lambda i, device, shared: torch.randn(2))
        pairs = zip(physics.local_indices, first, second, made.local, strict=True)
        return [(i, torch.cat([a.reshape(-1), b.reshape(-1), c])) for i, a, b, c in pairs]


@pytest.mark.parametrize("seed", [3, None])
def test_noise_depends_on_the_seed_and_the_item(run: Run, seed: int | None) -> None:
    found = [dict(chain(*run(noisy, 3, seed, nprocs=nprocs))) for nprocs in NUMBERS]
    for other in found[1:]:
        assert all(torch.equal(found[0][i], other[i]) for i in range(3))
    assert not torch.equal(found[0][0], found[0][1])
    assert not torch.equal(found[0][0][:64], found[0][0][64:128])


def multiples() -> list[Any]:
    """Operators x, 2 x and 3 x."""
    functions = [partial(torch.mul, torch.tensor(k)) for k in (1.0, 2.0, 3.0)]
    return [SimpleNamespace(A=each, A_adjoint=each) for each in functions]


def derive_measurements() -> None:
    """Measurements that depend on one tensor, which all workers have."""

    def problem(ctx: DistributedContext, measurements: Any, **shared: Tensor) -> list[Tensor]:
        made = DistributedMeasurements(ctx, 3, measurements, shared)
        physics = spread(ctx, multiples())
        loss = DistributedDataFidelity(ctx, physics, made)(torch.ones(2, 4))
        return list(torch.autograd.grad(loss.sum(), scale))

    with DistributedContext() as ctx:
        scale = torch.tensor(2.0, requires_grad=True)
        (got,) = problem(ctx, lambda i, device, shared: shared["a"] * torch.ones(2, 4), a=scale)
        assert got == sum(8 * (2.0 - (k + 1)) for k in range(3))
        if ctx.world_size > 1:
            listed = [scale * torch.ones(2, 4) for _ in range(3)]
            for function in (
                lambda i, device, shared: scale * torch.ones(2, 4),
                lambda i, device, shared: listed[i],
            ):
                with pytest.raises(ValueError, match="a part of the gradient"):
                    problem(ctx, function)


@pytest.mark.parametrize("nprocs", NUMBERS)
def test_measurements_share_what_is_passed_as_shared(run: Run, nprocs: int) -> None:
    run(derive_measurements, nprocs=nprocs)


def reach_past_copies() -> None:
    """A factory that reaches a shared tensor by another way than its name in `shared`."""
    with DistributedContext() as ctx:
        net = torch.nn.Linear(2, 2, bias=False).double()
        weight, x = net.weight, torch.arange(2.0).double() + 1
        ways: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
            "module": ({"net": net}, lambda shared: shared["net"](x)),
            "also by name": ({"net": net, "w": weight}, lambda shared: shared["w"] @ x),
            "in a list": ({"net": net, "all": [weight]}, lambda shared: shared["all"][0] @ x),
            "closed over": ({"net": net}, lambda shared: weight @ x),
            "module closed over": ({"w": weight}, lambda shared: net(x)),
        }
        (expected,) = torch.autograd.grad(sum((weight @ x * k).sum() for k in (1, 2, 3)), weight)
        for name, (shared, compute) in ways.items():
            made = DistributedMeasurements(
                ctx, 3, lambda i, device, given, of=compute: of(given) * (i + 1), shared
            )
            assert made.local.anchor is not None
            loss = sum((each.sum() for each in made.local), made.local.anchor)
            (got,) = torch.autograd.grad(loss, weight)
            assert torch.allclose(got, expected), name
        if ctx.world_size > 1:
            view = weight.view(-1)
            with pytest.raises(ValueError, match="must be computed in the factory"):
                DistributedMeasurements(ctx, 3, lambda i, *_: view * i, {"w": weight})


@pytest.mark.parametrize("nprocs", NUMBERS)
def test_measurements_find_shared_tensors_wherever_they_are(run: Run, nprocs: int) -> None:
    run(reach_past_copies, nprocs=nprocs)


class Quartic:
    """A data fidelity that derives itself, as deepinv's do by default."""

    def __call__(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        return (physics.A(x) - y).pow(4).flatten(1).sum(1)

    def grad(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        with torch.enable_grad():
            u = physics.A(x).requires_grad_()
            (slope,) = torch.autograd.grad((u - y).pow(4).sum(), u, create_graph=True)
        return physics.A_vjp(x, slope)


def derive_itself() -> None:
    with DistributedContext() as ctx:
        physics = spread(ctx, multiples())
        made = DistributedMeasurements(ctx, 3, lambda i, device, shared: torch.ones(2, 4))
        fidelity = DistributedDataFidelity(ctx, physics, made, lambda *_: Quartic())
        x = torch.full((2, 4), 0.5)
        wanted = sum(4 * (k + 1) * ((k + 1) * x - 1) ** 3 for k in range(3))
        close("gradient", fidelity.grad(x), wanted, 1e-6)


@pytest.mark.parametrize("nprocs", NUMBERS)
def test_fidelities_may_derive_themselves(run: Run, nprocs: int) -> None:
    run(derive_itself, nprocs=nprocs)


def own_operator() -> None:
    """An operator that is no object of deepinv and has A alone."""

    class Square:
        def A(self, x: Tensor) -> Tensor:
            return x.square()

    with DistributedContext() as ctx:
        physics = DistributedPhysics(ctx, 3, lambda i, device, shared: Square())
        x = values((2, 3), 1)
        fidelity = DistributedDataFidelity(
            ctx, physics, measured(ctx, [torch.zeros(2, 3).double()] * 3)
        )
        close("grad", fidelity.grad(x), 3 * 2 * x**3, 1e-12)
        plain = DistributedDataFidelity(
            ctx,
            physics,
            measured(ctx, [torch.zeros(2, 3).double()] * 3),
            data_fidelity_factory=lambda *_: lambda x, y, physics: (physics.A(x) - y).sum(),
        )
        close("grad of a function", plain.grad(x), 3 * 2 * x, 1e-12)


def test_operators_need_the_methods_they_have(run: Run) -> None:
    run(own_operator)


def wrong(what: str) -> str:
    with DistributedContext() as ctx:
        physics, x = spread(ctx, blurs()), truth()
        one = ctx.rank == 1
        calls: dict[str, Callable[[], Any]] = {
            "shape": lambda: physics.A(x[:1] if one else x),
            "dtype": lambda: physics.A(x.float() if one else x),
            "method": lambda: physics.A(x) if one else physics.A_adjoint_A(x),
            "no tensor": lambda: physics.A(None if one else x),  # type: ignore[arg-type]
            "number": lambda: DistributedPhysics(ctx, 2 + one, lambda *_: blurs()[0]),
            "count": lambda: physics.A_adjoint([*physics.A(x), *[x] * one]),
        }
        try:
            calls[what]()
        except ValueError as error:
            return str(error)
        return ""


WRONG = {
    "shape": "the shape differs between workers: (2, 3, 12, 10) on worker 0, (1, 3, 12, 10)",
    "dtype": "the dtype differs between workers",
    "method": "must make the same calls",
    "no tensor": "worker 1 passed no tensor",
    "number": "num_ops=3",
    "count": "worker 1 has the operators [1] and needs as many tensors, 1, got 2",
}


@pytest.mark.parametrize("what", list(WRONG))
def test_all_workers_raise_together(run: Run, what: str) -> None:
    texts = run(wrong, what)
    assert len(set(texts)) == 1 and WRONG[what] in texts[0], texts


def test_bad_numbers() -> None:
    with DistributedContext() as ctx:
        physics = spread(ctx, blurs())
        with pytest.raises(ValueError, match="3 physics operators and 2 measurements"):
            DistributedDataFidelity(ctx, physics, measured(ctx, [truth()] * 2))
        with pytest.raises(ValueError, match="3 physics operators and 2 measurements"):
            FactoryConfig(physics=blurs(), measurements=[truth()] * 2)
        with pytest.raises(ValueError, match="one of sum, mean, got 'median'"):
            DistributedDataFidelity(ctx, physics, measured(ctx, [truth()] * 3), reduction="median")
        with pytest.raises(ValueError, match="num_ops=None"):
            DistributedPhysics(ctx, factory=lambda *_: None)
        with pytest.raises(ValueError, match="num_items=None"):
            DistributedMeasurements(ctx, factory=lambda *_: truth())
        with pytest.raises(ValueError, match="num_operators=None"):
            FactoryConfig(physics=lambda *_: None, measurements=lambda *_: None)
        with pytest.raises(ValueError, match="num_ops must be 1 or more, got 0"):
            DistributedPhysics(ctx, 0, lambda *_: None)
        with pytest.raises(ValueError, match="must return an object with a method A, got None"):
            DistributedPhysics(ctx, 1, lambda *_: None)
        with pytest.raises(ValueError, match="passed no tensor"):
            physics.A(None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="needs as many tensors, 3, got 2"):
            physics.A_adjoint([truth()] * 2)
        with pytest.raises(ValueError, match="there are 4 operators, but physics has 3"):
            FactoryConfig(physics=blurs(), measurements=[truth()] * 3, num_operators=4)


def test_measurements_are_not_broadcast() -> None:
    """A measurement of one row would fit an image of many, and give a wrong number."""
    same = SimpleNamespace(A=lambda x: x, A_adjoint=lambda y: y)
    config = FactoryConfig(physics=[same], measurements=[torch.ones(1, 1, 1, 4)])
    with DistributedContext() as ctx:
        bundle = make_distrib_bundle(ctx, factory_config=config, signal_shape=(1, 1, 3, 4))
        for call in (bundle.data_fidelity, bundle.data_fidelity.grad):
            with pytest.raises(
                ValueError, match=r"\(1, 1, 1, 4\), but the operator returns \(1, 1, 3"
            ):
                call(bundle.signal)


def test_operators_that_give_back_another_image() -> None:
    class Single:
        def A(self, x: Tensor) -> Tensor:
            return x.float()

        def A_adjoint(self, y: Tensor) -> Tensor:
            return y[:1]

    with DistributedContext() as ctx:
        physics = DistributedLinearPhysics(ctx, 1, lambda *_: Single())
        fidelity = DistributedDataFidelity(ctx, physics, measured(ctx, [truth().float()]))
        for call in (physics.A_adjoint_A, fidelity.grad):
            with pytest.raises(
                ValueError, match=r"returned an image of shape \(1, 3, 12, 10\) and torch"
            ):
                call(truth())
        assert fidelity(truth()).dtype == torch.float64


def test_a_solution_that_is_not_reached_is_said() -> None:
    with DistributedContext() as ctx:
        physics = spread(ctx, blurs())
        with pytest.warns(UserWarning, match="after 2 steps, above tol"):
            physics.A_dagger(physics.A(truth()), max_iter=2)


def mixed_losses(in_parts: bool, different: bool) -> Any:
    """Losses for each image, and a data fidelity that gives one number."""
    with DistributedContext() as ctx:
        blur, x = blurs()[0], truth(4)
        one = lambda x, y, physics: (physics.A(x) - y).square().sum()  # noqa: E731
        each = lambda x, y, physics: (physics.A(x) - y).square().flatten(1).sum(1)  # noqa: E731
        bundle = make_distrib_bundle(
            ctx,
            factory_config=FactoryConfig(
                physics=[blur] * 2,
                measurements=[0 * blur.A(x)] * 2,
                data_fidelity=lambda i, *_: one if i == 0 and different else each,
            ),
            signal_shape=x.shape,
            dtype=x.dtype,
            reduction="sum",
            partition=(2, 1, 1, 1) if in_parts else None,  # the batch is split
        )
        part = bundle.signal.layout.local_part(x)
        try:
            loss = bundle.data_fidelity(part)
        except ValueError as error:
            return str(error)
        close("losses", loss, 2 * blur.A(x).square().flatten(1).sum(1), TOLERANCE)
        return ""


@pytest.mark.parametrize("in_parts", [False, True])
def test_losses_have_one_shape(run: Run, in_parts: bool) -> None:
    for nprocs in (2, 3):  # of three, one has no operator or no part
        assert run(mixed_losses, in_parts, False, nprocs=nprocs) == [""] * nprocs
    texts = run(mixed_losses, in_parts, True, nprocs=2)
    assert len(set(texts)) == 1
    assert ("for each image of the batch, and others one number" in texts[0]) == in_parts
    assert in_parts or "number of dimensions" in texts[0] or "shape of the loss" in texts[0]


def own_kernels(shared: bool) -> str:
    """Operators of an image in parts, of kernels that every worker draws."""
    with DistributedContext(seed=2) as ctx:
        if shared:
            with ctx.shared_random():
                kernel = torch.rand(1, 1, 3, 3)
        else:
            kernel = torch.rand(1, 1, 3, 3)
        blur = deepinv.physics.Blur(kernel, padding="circular")
        config = FactoryConfig([blur], [torch.ones(1, 1, 8, 8)])
        try:
            make_distrib_bundle(
                ctx, factory_config=config, signal_shape=(1, 1, 8, 8), partition=(2, 1)
            )
        except ValueError as error:
            return str(error)
        return ""


def test_kernels_that_differ_between_workers_are_refused(run: Run) -> None:
    """Each would blur its own part with a kernel of its own."""
    assert run(own_kernels, True, nprocs=2) == [""] * 2
    texts = run(own_kernels, False, nprocs=2)
    assert len(set(texts)) == 1 and "shared_random" in texts[0] and "checksum" in texts[0]


def drifting_copies(method: str) -> str:
    """In debug mode, of an image in parts of which there are copies."""
    with DistributedContext(debug=True) as ctx:
        P = ctx.partition.create_cartesian_topology_partition((2, 1, 1))
        bundle = make_distrib_bundle(
            ctx,
            factory_config=FactoryConfig([deepinv.physics.Denoising()] * 2, [truth()] * 2),
            signal_shape=truth().shape,
            dtype=torch.float64,
            prior=deepinv.models.MedianFilter(3),
            partition=operator_grid(P, truth().shape),
        )
        assert bundle.prior is not None
        x = truth() + ctx.rank
        calls: dict[str, Callable[[], Any]] = {
            "A": lambda: bundle.physics.A(x),
            "grad": lambda: bundle.data_fidelity.grad(x),
            "prox": lambda: bundle.prior.prox(x, 0.1),  # type: ignore[union-attr]
            "update_": lambda: bundle.signal.update_(x),
        }
        try:
            calls[method]()
        except ValueError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("method", ["A", "grad", "prox", "update_"])
def test_copies_that_drift_apart_are_found(run: Run, method: str) -> None:
    texts = run(drifting_copies, method, nprocs=2)
    assert len(set(texts)) == 1 and "worker 1 has other values than worker 0" in texts[0]


def copied(in_parts: bool) -> None:
    """A copy of a fidelity and of its operators, after calls that made groups of workers."""
    with DistributedContext() as ctx:
        x = truth()
        config = FactoryConfig(
            physics=lambda i, *_: blurs()[i],
            measurements=lambda i, *_: blurs()[i].A(x),
            num_operators=3,
        )
        bundle = make_distrib_bundle(
            ctx,
            factory_config=config,
            signal_shape=x.shape,
            dtype=x.dtype,
            partition=(ctx.world_size,) if in_parts else None,
        )
        part = bundle.signal.layout.local_part(torch.ones_like(x))

        def results(fidelity: DistributedDataFidelity) -> list[Tensor]:
            physics = fidelity.physics
            assert isinstance(physics, DistributedLinearPhysics)
            images = [physics.A_adjoint(physics.A(part)), fidelity.grad(part)]
            return [*images, fidelity(part)]

        wanted = results(bundle.data_fidelity)
        for got, expected in zip(results(deepcopy(bundle.data_fidelity)), wanted, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_copies_of_physics_that_were_used(run: Run, nprocs: int, in_parts: bool) -> None:
    run(copied, in_parts, nprocs=nprocs)


def loss_in_half_precision(in_parts: bool) -> Tensor:
    """The loss of an image in half precision that half precision cannot represent."""
    with DistributedContext() as ctx:
        double = SimpleNamespace(A=lambda x: 2 * x, A_adjoint=lambda y: 2 * y)
        x = torch.full((1, 3, 32, 32), 4.0, dtype=torch.float16)
        bundle = make_distrib_bundle(
            ctx,
            factory_config=FactoryConfig(physics=[double] * 2, measurements=[0 * x] * 2),
            signal_shape=x.shape,
            dtype=x.dtype,
            reduction="sum",
            partition=(2, 1) if in_parts else None,
        )
        bundle.signal.update_(x)
        loss = bundle.data_fidelity(bundle.signal)
        assert bundle.data_fidelity.grad(bundle.signal).dtype == x.dtype
        return loss.detach()


@pytest.mark.parametrize("in_parts", [False, True])
def test_losses_have_single_precision_at_least(run: Run, in_parts: bool) -> None:
    expected = torch.tensor([2 * 0.5 * 3 * 32 * 32 * 64.0])  # three times the largest number
    for loss in run(loss_in_half_precision, in_parts, nprocs=3):
        assert torch.equal(loss, expected), loss
