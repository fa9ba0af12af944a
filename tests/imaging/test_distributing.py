"""distribute(): what deepinv.distributed does with an object, with values and gradients of one
process.

Tests `imaging/distributing.py`, `imaging/stacked.py`, `imaging/parameters.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import deepinv
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
    DistributedProcessing,
    DistributedStackedFidelity,
    DistributedStackedLinearPhysics,
    DistributedStackedPhysics,
    distribute,
    solvers,
)
from tessel.imaging.distribution_strategies.strategies import BasicStrategy
from tessel.imaging.fidelity import L2
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
SHAPE = (2, 1, 12, 10)
TOLERANCE = 1e-12


def operators() -> list[Any]:
    """Three, two of which give measurements of other shapes than the image."""
    Blur, Down = deepinv.physics.Blur, deepinv.physics.Downsampling
    filters = [values((1, 1, 3, 3), seed) for seed in (1, 2)]
    down = Down(img_size=SHAPE[1:], factor=2, filter=None)
    return [Blur(filters[0], padding="circular"), Blur(filters[1], padding="valid"), down.double()]


def measured(ops: list[Any]) -> list[Tensor]:
    return [values(tuple(op.A(values(SHAPE, 0)).shape), 10 + i) for i, op in enumerate(ops)]


def physics_methods(strategy: str) -> None:
    ops, x = operators(), values(SHAPE, 3)
    ys = measured(ops)
    with DistributedContext() as ctx:
        physics = distribute(operators(), ctx, gather_strategy=strategy)
        assert type(physics) is DistributedStackedLinearPhysics
        assert (physics.num_operators, physics.gather_strategy) == (3, strategy)
        assert physics.local_indexes == ctx.local_indices(3) == physics.local_indices
        for _ in range(2):  # the second time, shapes are known
            found = physics.A(x)
            assert isinstance(found, deepinv.utils.TensorList) and len(found) == 3
            for i in range(3):
                close("A", found[i], ops[i].A(x), TOLERANCE)
        local = physics.A(x, gather=False)
        for k, i in enumerate(physics.local_indexes):
            close("A here", local[k], ops[i].A(x), TOLERANCE)
        images = [op.A_adjoint(y) for op, y in zip(ops, ys, strict=True)]
        close("A_adjoint", physics.A_adjoint(ys), sum(images), TOLERANCE)
        close("of local ones", physics.A_adjoint(physics.own(ys)), sum(images), TOLERANCE)
        close("mean", physics.A_adjoint(ys, reduce_op="mean"), sum(images) / 3, TOLERANCE)
        mine = [images[i] for i in physics.local_indexes]
        share = physics.A_adjoint(ys, gather=False)
        close("share", share, sum(mine, torch.zeros(SHAPE).double()), TOLERANCE)
        for a, b in zip(physics.A_adjoint(ys, gather=False, reduce_op=None), mine, strict=True):
            close("images here", a, b, TOLERANCE)
        gathered = physics.A_adjoint(ys, reduce_op=None)
        for i in range(3):
            close("images", gathered[i], images[i], TOLERANCE)
        normal = sum(op.A_adjoint(op.A(x)) for op in ops)
        close("A_adjoint_A", physics.A_adjoint_A(x), normal, TOLERANCE)
        close("A_vjp", physics.A_vjp(x, ys), sum(images), TOLERANCE)
        back = physics.A_A_adjoint(ys)
        for i in range(3):
            close("A_A_adjoint", back[i], ops[i].A(sum(images)), TOLERANCE)
        total = physics.A_adjoint_A(x, gather=False)
        close("shares", tessel.core.shared.total(total, ctx.partition), normal, TOLERANCE)
        exact = physics.A_dagger(ys, local_only=False, tol=1e-10)
        rest = physics.A_adjoint([a - y for a, y in zip(physics.A(exact), ys, strict=True)])
        assert rest.norm() < 1e-8 * sum(images).norm()
        mean = sum(op.A_dagger(y) for op, y in zip(ops, ys, strict=True)) / 3
        close("A_dagger", physics.A_dagger(ys), mean, TOLERANCE)
        exact_norm = physics.compute_sqnorm(x, 200, 1e-9, verbose=False, local_only=False)
        bound = physics.compute_sqnorm(x, verbose=False)
        assert exact_norm <= 1.01 * bound


@pytest.mark.parametrize("strategy", ["concatenated", "broadcast", "naive"])
@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_stacked_physics_is_that_of_one_process(run: Run, nprocs: int, strategy: str) -> None:
    run(physics_methods, strategy, nprocs=nprocs, timeout=100)


def count_exchanges(strategy: str) -> list[int]:
    with DistributedContext() as ctx:
        physics = distribute(operators(), ctx, gather_strategy=strategy)
        x = values(SHAPE, 3)
        with torch.no_grad():
            physics.A(x)
            with count_traffic() as traffic:
                physics.A(x)
        return [traffic.messages, traffic.bytes_received]


def test_strategies_differ_in_messages(run: Run) -> None:
    """One for all of a worker's measurements, one for each, and none of tensors."""
    sizes = [op.A(values(SHAPE, 0)).nbytes for op in operators()]
    rows = [sizes[1], sizes[0] + sizes[2]]  # what worker 0 and worker 1 get
    assert run(count_exchanges, "concatenated", nprocs=2) == [[1, rows[0]], [1, rows[1]]]
    assert run(count_exchanges, "broadcast", nprocs=2) == [[2, rows[0]], [1, rows[1]]]
    assert run(count_exchanges, "naive", nprocs=2) == [[0, 0], [0, 0]]


def derive(strategy: str) -> None:
    """Through gathered measurements, shares, fidelities and denoisers."""
    ops, ys = operators(), measured(operators())
    L2 = deepinv.optim.L2
    with DistributedContext() as ctx:
        physics = distribute(operators(), ctx, gather_strategy=strategy)
        fidelity = distribute(L2(), ctx)
        x, twin = (values(SHAPE, 3).requires_grad_() for _ in range(2))
        loss = sum((y * a).sum() for y, a in zip(ys, physics.A(x), strict=True))
        expected = sum((y * op.A(twin)).sum() for y, op in zip(ys, ops, strict=True))
        assert isinstance(loss, Tensor) and isinstance(expected, Tensor)
        (got,), (want,) = torch.autograd.grad(loss, x), torch.autograd.grad(expected, twin)
        close("through A", got, want, TOLERANCE)
        loss = fidelity(x, ys, physics)
        expected = sum(L2()(twin, y, op) for y, op in zip(ys, ops, strict=True))
        close("fidelity", loss, expected, TOLERANCE)
        close("fn", fidelity.fn(x, ys, physics), expected, TOLERANCE)
        (got,) = torch.autograd.grad(loss.sum(), x)
        (want,) = torch.autograd.grad(expected.sum(), twin)
        close("through fidelity", got, want, TOLERANCE)
        slope = fidelity.grad(x.detach(), ys, physics)
        close("grad", slope, want, TOLERANCE)
        share = fidelity.grad(x.detach(), ys, physics, gather=False)
        close("share", tessel.core.shared.total(share, ctx.partition), want, TOLERANCE)
        some = fidelity(x.detach(), ys, physics, gather=False)
        close("losses", tessel.core.shared.total(some, ctx.partition), expected, TOLERANCE)
        mean = distribute([L2(), L2(), L2()], ctx, reduction="mean")
        close("mean", mean.grad(x.detach(), ys, physics), want / 3, TOLERANCE)
        u = fidelity.prox(x.detach(), ys, physics, gamma=0.5)
        rest = u + 0.5 * fidelity.grad(u, ys, physics) - x.detach()
        assert rest.norm() < 1e-9


@pytest.mark.parametrize("strategy", ["concatenated", "broadcast"])
@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_gradients_are_those_of_one_process(run: Run, nprocs: int, strategy: str) -> None:
    run(derive, strategy, nprocs=nprocs, timeout=100)


def derive_shared_measurements() -> None:
    """All workers have all measurements: each gets the gradient of all uses of them."""
    ops, ys, x = operators(), measured(operators()), values(SHAPE, 3)
    L2 = deepinv.optim.L2
    everywhere = deepinv.physics.stack(*operators())
    many = deepinv.optim.StackedPhysicsDataFidelity([L2()] * 3)
    with DistributedContext() as ctx:
        physics, fidelity = distribute(ops, ctx), distribute(L2(), ctx)
        layout = tessel.Layout.whole(ctx.partition, SHAPE, shared=True)

        def least_squares(physics: Any, y: Any) -> Tensor:
            method = solvers.CGLS(physics, y, damping=0.1)
            start = torch.zeros_like(x)
            return solvers.solve(
                method, start, layout=layout, max_iterations=3, differentiable=True
            ).x

        for name, ours, theirs in (
            ("A_adjoint", physics.A_adjoint, everywhere.A_adjoint),
            ("A_vjp", lambda y: physics.A_vjp(x, y), lambda y: everywhere.A_vjp(x, y)),
            ("loss", lambda y: fidelity(x, y, physics), lambda y: many(x, y, everywhere)),
            ("grad", lambda y: fidelity.grad(x, y, physics), lambda y: many.grad(x, y, everywhere)),
            ("CGLS", lambda y: least_squares(physics, y), lambda y: least_squares(everywhere, y)),
        ):
            found = []
            for function in (ours, theirs):
                scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
                y = deepinv.utils.TensorList([scale * each for each in ys])
                result = function(y)
                found.append([result, *torch.autograd.grad(result.square().sum(), scale)])
            for got, want in zip(*found, strict=True):
                close(name, got, want, TOLERANCE)


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_measurements_of_all_workers_get_all_of_a_gradient(run: Run, nprocs: int) -> None:
    run(derive_shared_measurements, nprocs=nprocs, timeout=100)


def network() -> torch.nn.Module:
    """Of receptive field 2, with the same weights everywhere."""
    made = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3, padding=1), torch.nn.Tanh(), torch.nn.Conv2d(3, 1, 3, padding=1)
    ).double()
    with torch.no_grad():
        for k, each in enumerate(made.parameters()):
            each.copy_(values(tuple(each.shape), 50 + k))
    return made


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_batch_size": 1},
    {"max_batch_size": 1, "checkpoint_batches": "never"},
    {"checkpoint_batches": "always"},
    {"tiling_dims": 2},
    {"tiling_dims": (-2, -1), "patch_size": (4, 10)},
]


def denoise(settings: dict[str, Any]) -> None:
    alone, ours = network(), network()
    with DistributedContext() as ctx:
        given = {"patch_size": 4, "overlap": 2, **settings}
        denoiser = distribute(ours, ctx, type_object="denoiser", **given)
        assert isinstance(denoiser, DistributedProcessing)
        x, twin = (values(SHAPE, 3).requires_grad_() for _ in range(2))
        weights = values(SHAPE, 4)
        expected = alone(twin)
        found = denoiser(x)
        close("denoised", found, expected, TOLERANCE)
        got = torch.autograd.grad((found * weights).sum(), [x, *denoiser.parameters()])
        want = torch.autograd.grad((expected * weights).sum(), [twin, *alone.parameters()])
        for a, b in zip(got, want, strict=True):
            close("gradients", a, b, 1e-11)
        share = denoiser(x.detach(), gather=False)
        close("shares", tessel.core.shared.total(share, ctx.partition), expected, TOLERANCE)
        other = values((1, 1, 7, 20), 5)  # an image of another shape
        close("other shape", denoiser(other), alone(other), TOLERANCE)
        twin_of_it = copy.deepcopy(denoiser)
        close("a copy", twin_of_it(other), alone(other), TOLERANCE)
        fresh = distribute(network(), ctx, type_object="denoiser", **given)
        fresh.load_state_dict(denoiser.state_dict())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("nprocs", [1, 3])
def test_denoisers_are_those_of_one_process(
    run: Run, nprocs: int, settings: dict[str, Any]
) -> None:
    run(denoise, settings, nprocs=nprocs, timeout=100)


def strategy_and_prior() -> None:
    alone = network()
    with DistributedContext() as ctx:
        x = values(SHAPE, 3)
        own = BasicStrategy(SHAPE, num_splits=2, receptive_field_size=2)
        denoiser = distribute(network(), ctx, type_object="denoiser", tiling_strategy=own)
        close("denoised", denoiser(x), alone(x), TOLERANCE)
        pnp = deepinv.optim.PnP(denoiser=WithSigma(network()))
        same = distribute(pnp, ctx, patch_size=4, overlap=2)
        assert same is pnp and isinstance(pnp.denoiser, DistributedProcessing)
        close("prox", pnp.prox(x, sigma_denoiser=0.1), alone(x) * 0.1, TOLERANCE)
        half = distribute(network(), ctx, type_object="denoiser", dtype=torch.float32)
        assert half(x.float()).dtype == torch.float32


class WithSigma(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, sigma: float) -> Tensor:
        return self.inner(x) * sigma


def test_strategies_and_priors(run: Run) -> None:
    run(strategy_and_prior, nprocs=2)


def parameters(average: bool) -> list[float]:
    """Each worker derives a term of its own."""
    with DistributedContext() as ctx:
        first, second = (torch.nn.Parameter(torch.tensor(float(k))) for k in (2, 3))
        one = distribute(first, ctx, average=average)
        (other,) = distribute([second], ctx, average=average)
        assert one is first and other is second
        for _ in range(2):
            ((ctx.rank + 1) * one + one * other).backward()
        return [one.grad.item(), other.grad.item()]


def test_gradients_of_parameters_are_those_of_all(run: Run) -> None:
    assert run(parameters, True, nprocs=3) == [[2 * (2.0 + 3), 2 * 2.0]] * 3
    assert run(parameters, False, nprocs=3) == [[2 * (6.0 + 9), 2 * 6.0]] * 3
    assert run(parameters, True, nprocs=1) == [[2 * (1.0 + 3), 2 * 2.0]]


def unfolded(spread: bool) -> list[Tensor]:
    """Two steps of proximal gradient descent, whose steps and denoiser are learned."""
    ops = operators()[:1] * 2
    y = [values(SHAPE, 10), values(SHAPE, 11)]
    with DistributedContext() as ctx:
        model = deepinv.optim.PGD(
            data_fidelity=deepinv.optim.L2(),
            prior=deepinv.optim.PnP(WithSigma(network())),
            stepsize=[0.3, 0.2],
            sigma_denoiser=[0.5, 0.5],
            max_iter=2,
            unfold=True,
        ).double()
        physics: Any = deepinv.physics.stack(*ops)
        measurements: Any = deepinv.utils.TensorList(y)
        if spread:
            physics = distribute(physics, ctx)
            assert distribute(model, ctx, patch_size=4, overlap=2) is model
            assert isinstance(model.data_fidelity[0], DistributedStackedFidelity)
        found = model(measurements, physics)
        (found * values(SHAPE, 12)).sum().backward()
        grads = [each.grad for each in model.parameters() if each.grad is not None]
        return [found.detach(), *grads]


@pytest.mark.parametrize("nprocs", [1, 2])
def test_an_unfolded_method_is_that_of_one_process(run: Run, nprocs: int) -> None:
    expected = unfolded(False)
    for found in run(unfolded, True, nprocs=nprocs, timeout=100):
        assert len(found) == len(expected) > 6
        for a, b in zip(found, expected, strict=True):
            close("unfolded", a, b, 1e-10)


def kinds() -> None:
    with DistributedContext() as ctx:
        stack, haze = deepinv.physics.stack(*operators()), deepinv.physics.Haze()
        assert type(distribute(stack, ctx)) is DistributedStackedLinearPhysics
        assert type(distribute([haze, haze], ctx)) is DistributedStackedPhysics
        assert len(distribute(operators()[0], ctx)) == 1
        # A product keeps its factors in a list, as a stack does its operators, and is one operator.
        first, second, *_ = operators()
        product = SimpleNamespace(
            physics_list=[first, second],
            A=lambda x: second.A(first.A(x)),
            A_adjoint=lambda y: first.A_adjoint(second.A_adjoint(y)),
        )
        assert len(distribute(product, ctx)) == 1
        assert len(distribute(deepinv.physics.compose(second, first), ctx)) == 1
        stacked = deepinv.optim.StackedPhysicsDataFidelity([deepinv.optim.L2()] * 3)
        assert isinstance(distribute(stacked, ctx), DistributedStackedFidelity)
        assert isinstance(distribute(deepinv.models.MedianFilter(3), ctx), DistributedProcessing)
        made = distribute(
            lambda i, device, known: SimpleNamespace(A=lambda x: known["factor"] * i * x),
            ctx,
            num_operators=3,
            type_object="physics",
            factory_kwargs={"factor": 2.0},
        )
        close("factory", made.A(torch.ones(1))[2], torch.tensor([4.0]), TOLERANCE)


def test_kinds_are_told_apart(run: Run) -> None:
    run(kinds, nprocs=2)


def refused(what: str) -> str:
    with DistributedContext() as ctx:
        scale = SimpleNamespace(A=lambda x: x, A_adjoint=lambda y: y)
        physics = distribute([scale] * 3, ctx)
        torch.manual_seed(ctx.rank)
        calls: dict[str, Callable[[], Any]] = {
            "function": lambda: distribute(lambda *_: scale, ctx),
            "count": lambda: distribute(lambda *_: scale, ctx, type_object="physics"),
            "other count": lambda: distribute([scale], ctx, num_operators=2),
            "kind": lambda: distribute(scale, ctx, type_object="thing"),
            "module": lambda: distribute(torch.nn.Linear(2, 2), ctx, type_object="module"),
            "useless": lambda: distribute([scale], ctx, patch_size=3),
            "strategy": lambda: distribute([scale], ctx, gather_strategy="tree"),
            "naive": lambda: distribute([scale] * 3, ctx, gather_strategy="naive").A(
                torch.ones(1, requires_grad=True)
            ),
            "reduce": lambda: physics.A(torch.ones(1), reduce_op="max"),
            "measurements": lambda: physics.A_adjoint([torch.ones(1)] * 7),
            "weights": lambda: distribute(
                torch.nn.Conv2d(1, 1, 3, padding=1), ctx, type_object="denoiser", patch_size=4
            )(torch.ones(1, 1, 8, 8)),
            "parameters": lambda: distribute(torch.nn.Parameter(torch.rand(2)), ctx),
            "reentrant": lambda: distribute(
                network().float(),
                ctx,
                type_object="denoiser",
                patch_size=4,
                checkpoint_batches="always",
                checkpoint_use_reentrant=True,
            )(torch.ones(1, 1, 8, 8)),
            "checkpoint": lambda: distribute(
                network(), ctx, type_object="denoiser", checkpoint_batches="some"
            ),
            "tiling": lambda: DistributedProcessing(
                ctx, network(), strategy=BasicStrategy(SHAPE), overlap=1
            ),
            "fidelities": lambda: distribute([L2(), L2()], ctx)(
                torch.ones(1), [torch.ones(1)] * 3, physics
            ),
            "share": lambda: physics.A_dagger([torch.ones(1)] * 3, local_only=False, gather=False),
            "norm": lambda: physics.compute_sqnorm(torch.ones(1), local_only=False, gather=False),
            "mean": lambda: distribute(stacked_by_mean(), ctx),
        }
        try:
            calls[what]()
        except (ValueError, TypeError) as error:
            return str(error)
        return ""


REFUSED = {
    "function": "cannot infer the kind of function; pass type_object",
    "count": "pass num_operators",
    "other count": "num_operators=2, but there are 1",
    "kind": "type_object must be one of auto, physics",
    "module": "with unfold=True, got Linear",
    "useless": "patch_size=3 is not used for type_object='linear_physics'",
    "strategy": "gather_strategy must be one of naive, concatenated, broadcast, got 'tree'",
    "naive": "does not support gradients",
    "reduce": "reduce_op must be one of",
    "measurements": "expected 3 measurements, one for each operator",
    "weights": "has different parameters on worker 1 and on worker 0",
    "parameters": "has different parameters on worker 1 and on worker 0",
    "reentrant": "the sums of their gradients would not match; pass False",
    "checkpoint": "checkpoint_batches must be one of auto, always, never",
    "tiling": "overlap=1 cannot be used with the strategy BasicStrategy",
    "fidelities": "there are 2 data fidelities, but DistributedStackedLinearPhysics(3 operators",
    "share": "supports only the solver 'CG' and gather=True",
    "norm": "supports only gather=True",
    "mean": "create it with reduction='sum'",
}


def stacked_by_mean() -> Any:
    with pytest.warns(DeprecationWarning, match="breaks the adjointness"):
        return deepinv.physics.StackedLinearPhysics(operators(), reduction="mean")


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_is_refused(run: Run, what: str) -> None:
    texts = run(refused, what, nprocs=2)
    assert all(REFUSED[what] in text for text in texts), texts


UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a strategy that there is not": ({"gather_strategy": "fast"}, {}),
    "two strategies": ({"gather_strategy": "naive"}, {"gather_strategy": "broadcast"}),
    "a kind that there is not": ({"type_object": "camera"}, {}),
    "no use": ({"patch_size": 8}, {}),
    "an argument of nobody": ({"colour": "red"}, {}),
}


def unlike(kind: str) -> tuple[str, bool]:
    """What is raised if one worker passes other arguments, and whether all go on."""
    with DistributedContext() as ctx:
        settings = UNLIKE[kind][min(ctx.rank, 1)]
        with pytest.raises((ValueError, TypeError)) as caught:
            distribute(operators(), ctx, **settings)
        return str(caught.value), len(distribute(operators(), ctx)(values(SHAPE, 0))) == 3


@pytest.mark.parametrize("kind", UNLIKE)
def test_arguments_of_one_worker_raise_on_all(run: Run, kind: str) -> None:
    results = run(unlike, kind, nprocs=3)
    assert len(set(results)) == 1 and results[0][1]


def test_what_cannot_be_told_raises_on_all(run: Run) -> None:
    results = run(object_of_one, nprocs=2)
    assert len(set(results)) == 1 and "cannot infer the kind of object" in results[0]


def object_of_one() -> str:
    with DistributedContext() as ctx:
        given = object() if ctx.rank else operators()
        with pytest.raises(ValueError) as caught:
            distribute(given, ctx)
        return str(caught.value)


class Doubled:
    """An operator with what a user has to write, and no more."""

    def A(self, x: Tensor) -> Tensor:
        return 2 * x

    def A_adjoint(self, y: Tensor) -> Tensor:
        return 2 * y


class Squared:
    """One that is not linear, with nothing but its values."""

    def A(self, x: Tensor) -> Tensor:
        return x.square()


def gradients() -> list[Tensor]:
    found = []
    with DistributedContext() as ctx:
        for make, kind in ((Doubled, DistributedLinearPhysics), (Squared, DistributedPhysics)):
            physics = kind(ctx, 2, lambda *_, make=make: make())
            ys = DistributedMeasurements(ctx, 2, lambda i, *_: torch.full((1, 1, 2, 3), 1.0 + i))
            fidelity = DistributedDataFidelity(ctx, physics, ys, lambda *_: deepinv.optim.L2())
            found.append(fidelity.grad(torch.full((1, 1, 2, 3), 3.0)))
    return found


@pytest.mark.parametrize("nprocs", [1, 3])
def test_fidelities_of_deepinv_take_operators_of_users(run: Run, nprocs: int) -> None:
    doubled, squared = 2 * (6 - 1) + 2 * (6 - 2), 6 * (9 - 1) + 6 * (9 - 2)
    for found in run(gradients, nprocs=nprocs):
        assert [each.unique().tolist() for each in found] == [[doubled], [squared]]
