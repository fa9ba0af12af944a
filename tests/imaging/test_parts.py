"""Imaging with the image in parts gives what the undistributed operators give.

Tests `imaging/parts/operators.py`, `imaging/parts/layouts.py`, `imaging/parts/local_rules.py`,
`imaging/parts/rows.py`, `imaging/fidelity.py`.
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
from tessel import Layout, Partition
from tessel.imaging import (
    DistributedContext,
    DistributedDataFidelity,
    DistributedLinearPhysics,
    DistributedMeasurements,
    DistributedPrior,
    DistributedSignal,
    DistributedSignalStrategy,
    solvers,
)
from tessel.imaging.fidelity import L2, PartFidelity
from tessel.imaging.parts import (
    Convolution,
    Decimation,
    Differences,
    Mask,
    Whole,
    operator_grid,
    partition_physics,
)
from tessel.imaging.solvers.linear import wave_in
from tessel.testing import check_adjoint, check_gradient, count_memory, count_traffic

Run = Callable[..., list[Any]]
TOLERANCE = 1e-10
PADDINGS = ("valid", "circular", "reflect", "replicate", "constant")
GRIDS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1)], 4: [(1, 4), (4, 1), (2, 2)]}


def spatial_layout(shape: tuple[int, ...], grid: tuple[int, ...]) -> Layout:
    """The last dimensions on a grid of the first workers."""
    count = 1
    for size in grid:
        count *= size
    row = tessel.world().create_partition_inclusive(range(count))
    P = row.create_cartesian_topology_partition(grid)
    axes = [None] * (len(shape) - len(grid)) + list(range(len(grid)))
    return Layout.split(P, shape, axes)


def check_physics(physics: Any, layout: Layout, is_local: bool = True, laws: bool = True) -> None:
    """A, A_adjoint, gradients of both, and the laws."""
    operator = partition_physics(physics, layout)
    assert operator.is_local == is_local
    x = values(layout.shape, 1)
    whole = x.clone().requires_grad_()
    part = layout.local_part(x).clone().requires_grad_()
    expected = physics.A(whole)
    got = operator.A(part)
    owner = Partition(layout.partition.ranks[:1], (1,))
    out = operator.codomain if is_local else Layout.whole(owner, expected.shape)
    close("A", got, out.local_part(expected), TOLERANCE)
    y = values(expected.shape, 2)
    whole_y = y.clone().requires_grad_()
    part_y = out.local_part(y).clone().requires_grad_()
    image, mine = physics.A_adjoint(whole_y), operator.A_adjoint(part_y)
    close("A_adjoint", mine, layout.local_part(image), TOLERANCE)
    weights = values(expected.shape, 3)
    (slope,) = torch.autograd.grad((expected.square() * weights).sum(), whole)
    (own,) = torch.autograd.grad((got.square() * out.local_part(weights)).sum(), part)
    close("the gradient through A", own, layout.local_part(slope), TOLERANCE)
    weights = values(layout.shape, 4)
    (slope,) = torch.autograd.grad((image.square() * weights).sum(), whole_y)
    (own,) = torch.autograd.grad((mine.square() * layout.local_part(weights)).sum(), part_y)
    close("the gradient through A_adjoint", own, out.local_part(slope), TOLERANCE)
    if is_local and laws:
        check_adjoint(operator)
        check_gradient(operator)


def filter_of(*sizes: int, seed: int = 5) -> Tensor:
    f = values((1, 1, *sizes), seed).abs()
    return f / f.sum()


def check_blurs(grid: tuple[int, ...]) -> None:
    from deepinv.physics import Blur

    for padding in PADDINGS:
        for sizes, shape in (
            ((5, 3), (1, 3, 17, 22)),
            ((4, 6), (2, 1, 16, 19)),
            ((7, 9), (1, 2, 9, 11)),  # halos wider than a neighbour
        ):
            layout = spatial_layout(shape, grid)
            blur = Blur(filter_of(*sizes), padding=padding)
            check_physics(blur, layout, laws=sizes == (5, 3))
    check_physics(Blur(filter_of(1, 1)), spatial_layout((1, 1, 5, 6), grid))
    filters = values((2, 3, 3, 5), 9)
    check_physics(Blur(filters, padding="circular"), spatial_layout((2, 3, 12, 13), grid))
    check_physics(Blur(filters[:1], padding="reflect"), spatial_layout((2, 3, 12, 13), grid))
    check_physics(
        Blur(filter_of(5, 5), padding="circular", use_fft=True),
        spatial_layout((1, 1, 20, 21), grid),
    )


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_blurs_are_those_of_deepinv(run: Run, nprocs: int) -> None:
    for grid in GRIDS[nprocs]:
        run(check_blurs, grid, nprocs=nprocs)


def check_others(grid: tuple[int, ...]) -> None:
    from deepinv.physics import BlurFFT, Denoising, Downsampling, Inpainting

    layout = spatial_layout((2, 3, 13, 18), grid)
    blur = BlurFFT((3, 13, 18), filter=filter_of(5, 4)).double()
    check_physics(blur, layout)
    mask = (values((1, 3, 13, 18), 8) > 0).double()
    check_physics(Inpainting((3, 13, 18), mask=mask), layout)
    check_physics(Inpainting((3, 13, 18), mask=mask[:, :1]), layout)
    check_physics(Denoising(), layout)
    for factor, padding, size in ((2, "circular", 4), (3, "reflect", 5), (2, "valid", 3)):
        down = Downsampling(
            (3, 13, 18), filter=filter_of(size, size), factor=factor, padding=padding
        )
        check_physics(down, layout)
    check_physics(Downsampling((3, 13, 18), filter=None, factor=2), layout)
    blur.factor = 1  # an attribute that says nothing new
    check_physics(blur, layout)
    composed = (
        Inpainting((3, 13, 18), mask=mask) * BlurFFT((3, 13, 18), filter=filter_of(3, 3)).double()
    )
    check_physics(composed, layout)


def check_volumes(grid: tuple[int, ...]) -> None:
    from deepinv.physics import Blur

    for padding in ("circular", "valid"):
        layout = spatial_layout((1, 2, 7, 9, 10), grid)
        check_physics(Blur(filter_of(3, 4, 3), padding=padding), layout)


def check_differences(grid: tuple[int, ...]) -> None:
    from deepinv.models import TVDenoiser

    for shape in ((1, 3, 9, 11), (2, 1, 4, 5), (1, 1, 5, 6, 7), (1, 1, 2, 2)):
        layout = spatial_layout(shape, grid)
        D = Differences(layout)
        x = values(shape, 1)
        expected = TVDenoiser.nabla(x)
        close("differences", D.A(layout.local_part(x)), D.codomain.local_part(expected))
        y = values(expected.shape, 2)
        divergence = TVDenoiser.nabla_adjoint(y)
        close("divergence", D.A_adjoint(D.codomain.local_part(y)), layout.local_part(divergence))
        check_adjoint(D)
        check_gradient(D)


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_other_operators_are_those_of_deepinv(run: Run, nprocs: int) -> None:
    for grid in GRIDS[nprocs]:
        run(check_others, grid, nprocs=nprocs)
        run(check_volumes, grid, nprocs=nprocs)
        run(check_differences, grid, nprocs=nprocs)


class Turned:
    """It has what a blur has and does something else: a matrix along the last dimension."""

    padding = "circular"

    def __init__(self, length: int) -> None:
        self.filter = filter_of(3, 3)
        self.matrix = values((length + 2, length), 6)

    def A(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T

    def A_adjoint(self, y: Tensor) -> Tensor:
        return y @ self.matrix

    def A_vjp(self, x: Tensor, v: Tensor) -> Tensor:
        return self.A_adjoint(v)


class Squared:
    """Not linear, and without a derivative of its own."""

    def A(self, x: Tensor) -> Tensor:
        return x.square()


def changed_blurs() -> list[Any]:
    """Blurs of which one method does something else than that of a blur."""
    from deepinv.physics import Blur

    class Adjoint(Blur):  # type: ignore[misc]
        def A_adjoint(self, y: Tensor, **_: Any) -> Tensor:
            return 3 * super().A_adjoint(y)

    class Derivative(Blur):  # type: ignore[misc]
        def A_vjp(self, x: Tensor, v: Tensor) -> Tensor:
            return 3 * super().A_vjp(x, v)

    class Normal(Blur):  # type: ignore[misc]
        def A_adjoint_A(self, x: Tensor, **_: Any) -> Tensor:
            return 3 * super().A_adjoint_A(x)

    return [kind(filter_of(3, 3), padding="circular") for kind in (Adjoint, Derivative, Normal)]


class Conjugate:
    """A mask for real images, and something else for complex ones."""

    mask = values((7, 9), 4)

    def A(self, x: Tensor) -> Tensor:
        return self.mask * x.conj()

    def A_adjoint(self, y: Tensor) -> Tensor:
        return (self.mask * y).conj()


class RealPart(Conjugate):
    """Another one, whose measurements are real."""

    def A(self, x: Tensor) -> Tensor:
        return self.mask * x.real

    def A_adjoint(self, y: Tensor) -> Tensor:
        return self.mask * y


class Fourier:
    """Complex measurements of a real image."""

    def A(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return torch.fft.ifft2(y, norm="forward").real


def check_complex_measurements(grid: tuple[int, ...] | None) -> None:
    """Of real images: all workers of a row must know what lies on the one that has them."""
    x0, f = values((1, 1, 6, 5), 1), Fourier()
    y0 = torch.complex(values(x0.shape, 2), values(x0.shape, 3))
    with DistributedContext() as ctx:
        signal = DistributedSignal(ctx, x0.shape, torch.float64, grid, init=x0)
        part = signal.layout.local_part
        physics = DistributedLinearPhysics(
            ctx, 2, lambda i, *_: (Fourier(), Halved())[i], layout=signal.layout
        )
        ys = DistributedMeasurements(ctx, 2, lambda i, *_: (y0, x0)[i], physics=physics)
        fidelity = DistributedDataFidelity(ctx, physics, ys)
        gradient = f.A_adjoint(f.A(x0) - y0) + 0.5 * (0.5 * x0 - x0)
        close("gradient", fidelity.grad(signal), part(gradient), TOLERANCE)
        x = signal.data.clone().requires_grad_()
        fidelity(x).sum().backward()
        if physics.active:  # others have no part of the image
            close("gradient by autograd", x.grad, part(gradient), TOLERANCE)
        for _ in range(2):
            back = physics.A_adjoint(physics.A(signal))
            close("adjoint", back, part(30 * x0 + 0.25 * x0), TOLERANCE)
        close("normal", physics.A_adjoint_A(signal), part(30.25 * x0), TOLERANCE)
        close("inverse", physics.A_dagger(physics.A(signal)), part(x0), TOLERANCE)
        close("norm", physics.norm(signal), torch.tensor(30.25).double().sqrt(), 1e-6)


class Halved:
    mask = torch.full((1, 1), 0.5).double()

    def A(self, x: Tensor) -> Tensor:
        return self.mask * x

    A_adjoint = A


def check_complex_measurements_of_rows() -> None:
    """One row measures complex numbers, the other one real ones, a third one nothing."""
    P = tessel.world().create_cartesian_topology_partition((3, 1, 1))
    x0, f = values((1, 1, 6, 5), 1), Fourier()
    with DistributedContext() as ctx:
        layout = operator_grid(P, x0.shape)
        physics = DistributedLinearPhysics(
            ctx, 2, lambda i, *_: (Fourier(), Halved())[i], layout=layout
        )
        x = layout.local_part(x0)
        close("adjoint", physics.A_adjoint(physics.A(x)), 30.25 * x, TOLERANCE)
        close("inverse", physics.A_dagger(physics.A(x)), x, TOLERANCE)
        ys = DistributedMeasurements(ctx, 2, lambda i, *_: (f.A(x0), x0)[i], physics=physics)
        fidelity = DistributedDataFidelity(ctx, physics, ys)
        close("gradient", fidelity.grad(x), -0.25 * x, TOLERANCE)
        close("loss", fidelity(x), 0.125 * x0.square().sum()[None], TOLERANCE)


def test_rows_with_measurements_of_other_kinds(run: Run) -> None:
    run(check_complex_measurements_of_rows, nprocs=3)


def check_variation_of_copies() -> None:
    """Total variation of an image of which two rows of workers have a copy each."""
    whole = values((1, 2, 7, 6), 1)
    P = tessel.world().create_cartesian_topology_partition((2, 2))
    layout = operator_grid(P, whole.shape)
    D, x = Differences(layout), layout.local_part(whole)
    with DistributedContext() as ctx:
        physics = DistributedLinearPhysics(ctx, 2, lambda *_: Halved(), layout=layout)
        fidelity = DistributedDataFidelity(
            ctx, physics, DistributedMeasurements(ctx, 2, lambda *_: whole, physics=physics)
        )
        method = solvers.CondatVu(fidelity, step=0.9, weight=0.1)
        got = solvers.solve(method, torch.zeros_like(x), layout=layout, max_iterations=20).x
        space = solvers.Space.of(x, layout)
        variation = solvers.total_variation(x, space)
    plain = SimpleNamespace(grad=lambda u: 0.5 * u - whole)
    u, z = torch.zeros_like(whole), torch.zeros((*whole.shape, 2), dtype=whole.dtype)
    differ = lambda u: torch.stack(  # noqa: E731
        [
            torch.nn.functional.pad(u.diff(dim=-2), (0, 0, 0, 1)),
            torch.nn.functional.pad(u.diff(dim=-1), (0, 1)),
        ],
        -1,
    )
    back = lambda z: torch.func.vjp(differ, u)[1](z)[0]  # noqa: E731
    for _ in range(20):
        new = u - 0.9 * (plain.grad(u) + back(z))
        z = solvers.splitting.projected(z + differ(2 * new - u) / (2 * 0.9 * 8), 0.1)
        u = new
    close("A", D.A(x), D.codomain.local_part(differ(whole)), TOLERANCE)
    close("adjoint", D.A_adjoint(D.A(x)), layout.local_part(back(differ(whole))), TOLERANCE)
    close("solution", got, layout.local_part(u), TOLERANCE)
    lengths = torch.linalg.vector_norm(differ(whole), dim=-1).sum()
    close("variation", variation, lengths, TOLERANCE)


def test_total_variation_of_several_copies(run: Run) -> None:
    run(check_variation_of_copies, nprocs=4)


@pytest.mark.parametrize(("grid", "nprocs"), [(None, 2), ((2, 1), 2), ((2, 1), 3), ((1, 1), 1)])
def test_complex_measurements_of_a_real_image(run: Run, grid: Any, nprocs: int) -> None:
    run(check_complex_measurements, grid, nprocs=nprocs)


def check_whole(grid: tuple[int, ...]) -> None:
    from deepinv.physics import MRI

    layout = spatial_layout((2, 3, 7, 9), grid)
    check_physics(Turned(9), layout, is_local=False)
    real, imaginary = values(layout.shape, 5), values(layout.shape, 6)
    x = torch.complex(real, imaginary)
    for physics in (Conjugate(), RealPart()):
        operator = partition_physics(physics, layout)
        assert isinstance(operator, Whole), type(physics).__name__
        measured = operator.A(layout.local_part(x))
        if operator.here:
            close("of complex images", measured, physics.A(x), TOLERANCE)
    for blur in changed_blurs():
        check_changed(blur, layout)
    mri = MRI(img_size=(2, 7, 9), mask=(values((1, 2, 7, 9), 2) > 0).double())
    check_physics(mri, spatial_layout((1, 2, 7, 9), grid), is_local=False)
    operator = partition_physics(Squared(), layout, owner=layout.partition.ranks[-1])
    assert isinstance(operator, Whole)
    x, v = values(layout.shape, 1), values(layout.shape, 2)
    mine = v if operator.here else v.new_empty(0)
    close("A_vjp", operator.A_vjp(layout.local_part(x), mine), layout.local_part(2 * x * v))


def check_changed(blur: Any, layout: Layout) -> None:
    """All methods are those of the object itself."""
    operator = partition_physics(blur, layout)
    assert isinstance(operator, Whole), type(blur).__name__
    x, y = values(layout.shape, 1), values(layout.shape, 2)
    part, mine = layout.local_part(x), y if operator.here else y.new_empty(0)
    for got, expected in (
        (operator.A_adjoint(mine), blur.A_adjoint(y)),
        (operator.A_vjp(part, mine), blur.A_vjp(x, y)),
        (operator.A_adjoint_A(part), blur.A_adjoint_A(x)),
    ):
        close(type(blur).__name__, got, layout.local_part(expected), TOLERANCE)


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_operators_without_a_local_kernel_see_the_whole_image(run: Run, nprocs: int) -> None:
    run(check_whole, GRIDS[nprocs][-1], nprocs=nprocs)


def some_physics() -> list[Any]:
    """Local operators and one that is not."""
    from deepinv.physics import Blur, Downsampling, Inpainting

    mask = (values((1, 3, 13, 18), 8) > 0).double()
    return [
        Blur(filter_of(5, 5), padding="circular"),
        Inpainting((3, 13, 18), mask=mask),
        Turned(18),
        Downsampling((3, 13, 18), filter=filter_of(4, 4), factor=2),
        Blur(filter_of(3, 5), padding="reflect"),
    ]


def spread(layout: Layout, physics: list[Any]) -> DistributedLinearPhysics:
    """Operators on the parts of an image."""
    with DistributedContext() as ctx:
        return DistributedLinearPhysics(ctx, len(physics), lambda i, *_: physics[i], layout=layout)


def fidelity_of(
    parts: DistributedLinearPhysics, ys: list[Tensor], fidelities: list[Any]
) -> DistributedDataFidelity:
    """That of operators on parts, with this worker's parts of measurements, and its fidelities."""
    given: Any = SimpleNamespace(num_items=parts.num_ops, local=ys)
    left = iter(fidelities)
    return DistributedDataFidelity(parts.ctx, parts, given, lambda *_: next(left))


class Norm:
    """A fidelity that is no sum over values."""

    def __call__(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        return torch.linalg.vector_norm(physics.A(x) - y)


def fidelities(name: str, count: int) -> list[Any]:
    from deepinv.optim import L1, L2, PoissonLikelihood

    made = {"L2": L2, "L1": L1, "Poisson": PoissonLikelihood, "Norm": Norm}
    return [made[name]() for _ in range(count)]


def problem_layout(shape: tuple[int, ...], grid: tuple[int, ...], copies: int) -> Layout:
    if copies == 1:
        return spatial_layout(shape, grid)
    P = tessel.world().create_cartesian_topology_partition((copies, *grid))
    return operator_grid(P, shape)


def check_problem(grid: tuple[int, ...], copies: int, name: str, num_ops: int, batch: int) -> None:
    """Measurements, adjoint, loss, gradient, and the gradients of these."""
    physics = some_physics()[:num_ops]
    layout = problem_layout((batch, 3, 13, 18), grid, copies)
    parts = spread(layout, physics)
    x = 0.1 + values(layout.shape, 1).abs()
    whole = x.clone().requires_grad_()
    part = layout.local_part(x).clone().requires_grad_()
    ys = [0.1 + values(p.A(x).shape, 20 + i).abs() for i, p in enumerate(physics)]
    fs = fidelities(name, num_ops)
    mine = [parts.part_of(k, ys[i]) for k, i in enumerate(parts.local_indices)]
    fidelity = fidelity_of(parts, mine, [fs[i] for i in parts.local_indices])

    loss = sum(f(whole, y, p) for f, y, p in zip(fs, ys, physics, strict=True))
    got = fidelity(part)
    close("loss", got, loss, TOLERANCE)  # of each image, if the fidelity tells them apart
    (slope,) = torch.autograd.grad(loss.sum(), whole)
    (through,) = torch.autograd.grad(got.sum(), part)
    close("autograd of the loss", through, layout.local_part(slope), TOLERANCE)
    with torch.no_grad():
        if name != "Norm":  # that of deepinv, which for Poisson is not the derivative of its loss
            slope = sum(f.grad(whole, y, p) for f, y, p in zip(fs, ys, physics, strict=True))
        close("grad", fidelity.grad(part), layout.local_part(slope), TOLERANCE)
    if name == "L2":
        expected = sum(p.A_adjoint(p.A(whole)) for p in physics)
        found = parts.A_adjoint(parts.A(part))
        close("A_adjoint A", found, layout.local_part(expected), TOLERANCE)
        close("A_adjoint_A", parts.A_adjoint_A(part), layout.local_part(expected), TOLERANCE)
        weights = values(layout.shape, 9)
        (slope,) = torch.autograd.grad((expected.square() * weights).sum(), whole)
        share = (found.square() * layout.local_part(weights)).sum()
        (through,) = torch.autograd.grad(share, part)
        close("autograd of A_adjoint A", through, layout.local_part(slope), TOLERANCE)
        second = fidelity.grad(part)
        (curve,) = torch.autograd.grad((second * layout.local_part(weights)).sum(), part)
        reference = sum(f.grad(whole, y, p) for f, y, p in zip(fs, ys, physics, strict=True))
        (expected,) = torch.autograd.grad((reference * weights).sum(), whole)
        close("second order", curve, layout.local_part(expected), TOLERANCE)


PROBLEMS = {
    1: [((1, 1), 1, "L2", 5, 1)],
    2: [((2, 1), 1, "L2", 5, 2), ((1,), 2, "L2", 3, 1), ((1, 2), 1, "Norm", 4, 1)],
    3: [((3, 1), 1, "L1", 5, 1), ((1,), 3, "L2", 2, 1)],
    4: [
        ((2, 2), 1, "L2", 5, 1),
        ((4,), 1, "Poisson", 1, 2),
        ((2,), 2, "L2", 5, 2),
        ((1, 2), 2, "Norm", 3, 1),
        ((1,), 4, "L2", 3, 1),  # an idle worker
    ],
}


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_problems_are_those_of_one_process(run: Run, nprocs: int) -> None:
    for case in PROBLEMS[nprocs]:
        run(check_problem, *case, nprocs=nprocs)


def check_bytes(grid: tuple[int, ...]) -> None:
    """What a worker receives for A and for its adjoint is its halo, and no more."""
    from deepinv.optim import L2
    from deepinv.physics import Blur, Downsampling, Inpainting

    layout = spatial_layout((1, 3, 32, 40), grid)
    rows, columns = (n // parts for n, parts in zip((32, 40), grid, strict=True))
    halo = [4 if parts > 1 else 0 for parts in grid]
    values_read = 3 * ((rows + halo[0]) * (columns + halo[1]) - rows * columns)
    x = layout.local_part(values(layout.shape, 1)).clone()
    for physics, expected in (
        (Blur(filter_of(5, 5), padding="circular"), values_read),
        (Inpainting((3, 32, 40), mask=torch.ones(1, 3, 32, 40, dtype=torch.float64)), 0),
        (Downsampling((3, 32, 40), filter=None, factor=2), 0),
    ):
        operator = partition_physics(physics, layout)
        y = operator.A(x)
        with count_traffic() as forward:
            y = operator.A(x)
        with count_traffic() as backward:
            operator.A_adjoint(y)
        assert forward.bytes_received == 8 * expected, (physics, forward)
        assert backward.bytes_received == 8 * expected, (physics, backward)
    blurs = [Blur(filter_of(5, 5, seed=seed), padding="circular") for seed in range(3)]
    parts = spread(layout, blurs)
    ys = parts.A(x)
    fidelity = fidelity_of(parts, ys, [L2() for _ in blurs])
    fidelity.grad(x)
    with count_traffic() as traffic:
        fidelity.grad(x)
    assert traffic.bytes_received == 3 * 2 * 8 * values_read
    assert traffic.agreements == 1


@pytest.mark.parametrize("grid", [(4, 1), (1, 4), (2, 2)])
def test_bytes_are_those_of_the_halos(run: Run, grid: tuple[int, ...]) -> None:
    run(check_bytes, grid)


def check_bordering(grid: tuple[int, ...]) -> None:
    """Paddings that repeat what a worker has move no more than those of zeros."""
    for padding in ("reflect", "replicate", "constant", "valid"):
        layout = spatial_layout((1, 1, 32, 40), grid)
        operator = Convolution(layout, filter_of(5, 5), padding)
        x = layout.local_part(values(layout.shape, 1)).clone()
        operator.A(x)
        with count_traffic() as traffic:
            operator.A(x)
        box, lengths = layout.box(), layout.shape
        assert box is not None
        grown = 1
        for (start, stop), n in zip(box[2:], lengths[2:], strict=True):
            grown *= min(stop + 2, n) - max(start - 2, 0)
        own = x.numel()
        if padding == "valid":  # windows with their middle in the part
            assert traffic.bytes_received <= 8 * (grown - own)
        else:
            assert traffic.bytes_received == 8 * (grown - own), padding


def test_bytes_at_borders(run: Run) -> None:
    run(check_bordering, (2, 2))


def check_blind() -> None:
    """The filter of all workers gets the gradient of the whole image."""
    from deepinv.physics import Blur

    filter = filter_of(5, 3)
    for padding in PADDINGS:
        layout = spatial_layout((2, 3, 13, 18), (2, 2))
        alone, mine = filter.clone().requires_grad_(), filter.clone().requires_grad_()
        one, many = Blur(None, padding=padding), Blur(None, padding=padding)
        one.filter, many.filter = alone, mine
        x = values(layout.shape, 1)
        operator = partition_physics(many, layout)
        parts = spread(layout, [many])
        expected = one.A_adjoint(one.A(x))
        got = parts.A_adjoint_A(layout.local_part(x).clone())
        weights = values(layout.shape, 9)
        (slope,) = torch.autograd.grad((expected.square() * weights).sum(), alone)
        share = (got.square() * layout.local_part(weights)).sum()
        (found,) = torch.autograd.grad(share, mine)
        close(f"the gradient of the filter, {padding}", found, slope, TOLERANCE)
        many.filter = 2 * filter
        close(
            "another filter",
            operator.A(layout.local_part(x)),
            Convolution(layout, 2 * filter, padding).A(layout.local_part(x)),
        )


def test_filters_get_gradients(run: Run) -> None:
    run(check_blind)


class Vignette:
    """A mask that operators may have in common."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def A(self, x: Tensor) -> Tensor:
        return self.mask * x

    A_adjoint = A


def common_mask(copies: int, listed: bool) -> str:
    """Two operators with one mask that is learned, on as many copies of the image.

    A list is shared by all workers; what a function makes is each worker's own.
    """
    shape = (1, 1, 2, 4)
    with tessel.imaging.DistributedContext() as ctx:
        grid = (copies, 1, ctx.world_size // copies)
        P = ctx.partition.create_cartesian_topology_partition(grid)
        mask = torch.linspace(1, 2, 4).requires_grad_()
        bundle = tessel.imaging.make_distrib_bundle(
            ctx,
            factory_config=tessel.imaging.FactoryConfig(
                physics=[Vignette(mask)] * 2 if listed else lambda *_: Vignette(mask),
                measurements=[torch.zeros(shape)] * 2,
                num_operators=2,
            ),
            signal_shape=shape,
            partition=operator_grid(P, shape),
        )
        part = bundle.signal.layout.local_part(torch.ones(shape))
        with torch.no_grad():
            bundle.physics.A(part)
        text = raised(lambda: bundle.data_fidelity.grad(part))
        if text == "nothing was raised":
            (found,) = torch.autograd.grad(bundle.data_fidelity(part).sum(), mask)
            close("the gradient of the mask", found, 2 * mask)  # two rows, the mean of two
        return text


def test_operators_with_a_parameter_in_common(run: Run) -> None:
    for copies in (1, 2):
        assert run(common_mask, copies, True, nprocs=2) == ["nothing was raised"] * 2
    assert run(common_mask, 1, False, nprocs=2) == ["nothing was raised"] * 2
    for text in run(common_mask, 2, False, nprocs=2):
        assert "used by copy 0 of the image and copy 1 of the image" in text
        assert "pass it in shared={...}" in text


def learned_by_one_row(kind: str) -> None:
    """What operators of one copy of the image learn, and all workers share, all of them learn."""
    shape = (1, 1, 4, 4)
    P = tessel.world().create_cartesian_topology_partition((3, 1, 1))
    layout = operator_grid(P, shape)
    x = values(shape, 1)
    parameter = values((4,), 2).requires_grad_()
    with DistributedContext() as ctx:

        def make(i: int, device: Any, shared: Any) -> Any:
            value = shared["parameter"]
            return Vignette(value) if kind == "local" else Turned4(value)

        for used in (2, 4):  # by one or two operators of the first row; the last one may have none
            physics = DistributedLinearPhysics(ctx, used, make, {"parameter": parameter}, layout)
            ys = DistributedMeasurements(ctx, used, lambda *_: 0 * x, physics=physics)
            fidelity = DistributedDataFidelity(ctx, physics, ys)
            parameter.grad = None
            fidelity(layout.local_part(x)).sum().backward()
            square = x.square().sum((0, 1, 2))
            close("of a loss", parameter.grad, used * square * parameter.detach(), TOLERANCE)
            parameter.grad = None
            back = physics.A_adjoint_A(layout.local_part(x))
            (back * layout.local_part(x)).sum().backward()
            close("of an image", parameter.grad, 2 * used * square * parameter, TOLERANCE)


class Turned4:
    """A mask whose measurements are turned, so that they are made of the whole image."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def A(self, x: Tensor) -> Tensor:
        return (self.weight * x).flip(-2)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return self.weight * y.flip(-2)


@pytest.mark.parametrize("kind", ["local", "whole"])
def test_shared_parameters_of_some_copies(run: Run, kind: str) -> None:
    run(learned_by_one_row, kind, nprocs=3)


class Amplified(torch.nn.Module):
    """An operator without a local kernel that is learned."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(values((length, length), 6))

    def A(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T

    def A_adjoint(self, y: Tensor) -> Tensor:
        return y @ self.matrix


class Weighted(torch.nn.Module):
    """A distance with a learned weight and power, which adds up over values or does not."""

    def __init__(self, weight: float, adds_up: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight, dtype=torch.float64))
        self.adds_up = adds_up

    def forward(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        square = (self.weight * (physics.A(x) - y)).square()
        return square.sum() if self.adds_up else square.sum().sqrt()


def learned_problem(shared: bool, adds_up: bool) -> tuple[list[Any], list[Any]]:
    """Operators and data fidelities with parameters; one for all operators, or one for each."""
    from deepinv.physics import Blur

    blur = Blur(filter_of(3, 3), padding="circular")
    blur.filter = torch.nn.Parameter(blur.filter.clone())
    physics = [blur, Amplified(10), Vignette(torch.linspace(1, 2, 10).double().requires_grad_())]
    one = Weighted(0.5, adds_up)
    return physics, [one if shared else Weighted(0.5 + k, adds_up) for k in range(3)]


def parameters_of(physics: list[Any], fidelities: list[Any]) -> list[Tensor]:
    found = [physics[0].filter, physics[1].matrix, physics[2].mask]
    return [*found, *(each.weight for each in fidelities)]


def check_learned(grid: tuple[int, ...], copies: int, shared: bool, adds_up: bool) -> None:
    """Gradients of all parameters are those of one process, on every worker that has them."""
    shape = (1, 1, 12, 10)
    layout = problem_layout(shape, grid, copies)
    x, ys = values(shape, 1), [values(shape, 40 + i) for i in range(3)]
    physics, fs = learned_problem(shared, adds_up)
    whole = x.clone().requires_grad_()
    loss = sum(f(whole, y, p) for f, y, p in zip(fs, ys, physics, strict=True)) / 3
    expected = torch.autograd.grad(loss, [whole, *parameters_of(physics, fs)], create_graph=True)
    weights = values(shape, 5)
    second = torch.autograd.grad((expected[0] * weights).sum(), parameters_of(physics, fs))

    physics, fs = learned_problem(shared, adds_up)
    with tessel.imaging.DistributedContext() as ctx:
        bundle = tessel.imaging.make_distrib_bundle(
            ctx,
            factory_config=tessel.imaging.FactoryConfig(
                physics=lambda i, *_: physics[i],
                measurements=ys,
                data_fidelity=fs[0] if shared else lambda i, *_: fs[i],
            ),
            signal_shape=shape,
            dtype=torch.float64,
            partition=layout,
        )
        part = layout.local_part(x).clone().requires_grad_()
        mine = parameters_of(physics, fs)
        got = bundle.data_fidelity(part)
        close("the loss", got, loss, TOLERANCE)
        vjps = torch.autograd.grad(got, [part, *mine], allow_unused=True)
        close("the gradient of the image", vjps[0], layout.local_part(expected[0]), TOLERANCE)
        here = bundle.physics.local_indices
        held = [*here, *(3 + k for k in (range(3) if shared else here))]
        for k, (slope, wanted) in enumerate(zip(vjps[1:], expected[1:], strict=True)):
            assert (slope is not None) == (k in held), k
            if slope is not None:
                close(f"the gradient of parameter {k}", slope, wanted, TOLERANCE)
        gradient = bundle.data_fidelity.grad(part)
        close("grad", gradient, layout.local_part(expected[0]), TOLERANCE)
        share = (gradient * layout.local_part(weights)).sum()
        loss = tessel.core.shared.total(share, layout.partition, layout.shared)
        for k, slope in enumerate(torch.autograd.grad(loss, mine, allow_unused=True)):
            assert (slope is not None) == (k in held), k
            if slope is not None:
                close(f"second order of parameter {k}", slope, second[k], TOLERANCE)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("adds_up", [True, False])
def test_operators_and_fidelities_are_learned(run: Run, shared: bool, adds_up: bool) -> None:
    run(check_learned, (2, 1), 1, shared, adds_up, nprocs=2)
    run(check_learned, (2, 2), 1, shared, adds_up)
    run(check_learned, (2,), 2, shared, adds_up)
    run(check_learned, (1,), 4, shared, adds_up)  # an idle worker


SECRETS: dict[str, Tensor] = {}


class Secret(Turned):
    """An operator without a local kernel that uses a tensor which it does not keep."""

    def A(self, x: Tensor) -> Tensor:
        return super().A(x) * SECRETS["scale"]


class SecretDistance:
    def __call__(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        return SECRETS["scale"] * (physics.A(x) - y).square().sum()


def closed_over_in_parts() -> tuple[list[str], float]:
    """An operator without a local kernel that closes over a parameter, and one that keeps it."""
    scale = torch.full((), 3.0, dtype=torch.float64, requires_grad=True)
    layout = spatial_layout((1, 1, 4, 6), (2, 1))
    x = layout.local_part(values(layout.shape, 1)).clone()
    times = lambda x: scale * x.flip(-1)  # noqa: E731
    hides = spread(layout, [SimpleNamespace(A=times, A_adjoint=times)])
    texts = [raised(lambda: hides.A(x)), raised(lambda: hides.A_adjoint_A(x))]
    keeps = spread(layout, [SimpleNamespace(A=times, A_adjoint=times, scale=scale)])
    image = keeps.A_adjoint_A(x)  # scale² x
    (slope,) = torch.autograd.grad((image * x).sum(), scale)
    return texts, slope.item() / (6 * values(layout.shape, 1).square().sum().item())


def test_what_an_operator_on_parts_closes_over_is_refused_by_all(run: Run) -> None:
    for texts, slope in run(closed_over_in_parts, nprocs=2):
        assert all("closures are not" in text for text in texts), texts
        assert abs(slope - 1) < 1e-12


def hidden_in_parts() -> tuple[str, str]:
    """Parameters that nobody knows of, of which a worker would get a part of the gradient."""
    SECRETS["scale"] = torch.ones((), dtype=torch.float64, requires_grad=True)
    shape = (1, 1, 4, 6)
    layout = spatial_layout(shape, (2, 1))
    x = layout.local_part(values(shape, 1)).clone()
    whole = spread(layout, [Secret(6)])
    mask = spread(layout, [Vignette(torch.ones(6, dtype=torch.float64))])
    fidelity = fidelity_of(mask, [x], [SecretDistance()])
    return raised(lambda: whole.A(x)), raised(lambda: fidelity(x))


def test_hidden_parameters_of_an_image_in_parts(run: Run) -> None:
    (first, one), (second, other) = run(hidden_in_parts, nprocs=2)
    # The first worker has the operator, and tells the second one.
    assert all("was not found in it" in text for text in (first, second, one, other))


def noisy_physics() -> list[Any]:
    """Noise of all kinds: one that depends on the values, and one of an operator without kernel."""
    from deepinv.physics import (
        Blur,
        Downsampling,
        GaussianNoise,
        LinearPhysics,
        PoissonNoise,
        UniformNoise,
    )

    turned = Turned(10)
    found = [
        Blur(filter_of(3, 5), padding="circular", noise_model=GaussianNoise(sigma=0.1)),
        Blur(filter_of(3, 3), padding="valid", noise_model=PoissonNoise(gain=0.1)),
        LinearPhysics(A=turned.A, A_adjoint=turned.A_adjoint, noise_model=GaussianNoise(0.2)),
        Downsampling((1, 12, 10), filter=filter_of(3, 3), factor=2, noise_model=UniformNoise(0.1)),
        Vignette(torch.linspace(1, 2, 10).double()),  # without noise
    ]
    found[0].filter = torch.nn.Parameter(found[0].filter.clone())
    return found


def check_noise(grid: tuple[int, ...], copies: int) -> None:
    """What one process draws, to the last bit, call by call; and gradients through it."""
    shape = (2, 1, 12, 10)
    layout = problem_layout(shape, grid, copies)
    x = values(shape, 1).abs()
    with tessel.imaging.DistributedContext(seed=5) as ctx:
        physics, alone = noisy_physics(), noisy_physics()
        noisy = tessel.imaging.DistributedLinearPhysics(
            ctx, 5, lambda i, *_: physics[i], layout=layout
        )
        part = layout.local_part(x).clone().requires_grad_()
        whole = x.clone().requires_grad_()
        for call in range(2):
            ys = noisy(part)
            for k, i in enumerate(noisy.local_indices):
                with ctx.drawing(i, call):
                    expected = alone[i](whole) if callable(alone[i]) else alone[i].A(whole)
                wanted = noisy.part_of(k, expected)
                assert torch.equal(ys[k], wanted) or i == 4, (i, call)
                close(f"noise of {i}", ys[k], wanted, TOLERANCE)
                weights = values(expected.shape, 9)
                mine = noisy.part_of(k, weights)
                row = noisy.rows.own.partition
                loss = tessel.core.shared.total((ys[k].square() * mine).sum(), row)
                vjps = torch.autograd.grad(
                    (expected.square() * weights).sum(), [whole, alone[0].filter], allow_unused=True
                )
                close(f"loss of {i}", loss, (expected.square() * weights).sum(), TOLERANCE)
                if i == 0:
                    (slope,) = torch.autograd.grad(loss, physics[0].filter, retain_graph=True)
                    close("the gradient of the filter", slope, vjps[1], TOLERANCE)
                if copies == 1:
                    (slope,) = torch.autograd.grad(loss, part, retain_graph=True)
                    close(f"gradient of {i}", slope, layout.local_part(vjps[0]), TOLERANCE)


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_noise_is_that_of_one_process(run: Run, nprocs: int) -> None:
    for grid, copies in {1: [((1, 1), 1)], 2: [((2, 1), 1)], 4: [((2, 2), 1), ((2,), 2)]}[nprocs]:
        run(check_noise, grid, copies, nprocs=nprocs)


class RowNorms:
    """A distance that adds up over rows, and not within one."""

    def __call__(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        return torch.linalg.vector_norm(physics.A(x) - y, dim=-1).sum()


def test_trials_do_not_depend_on_the_default_device() -> None:
    layout = Layout.balanced(tessel.world(), (12,))
    with torch.device("meta"):  # a tensor of ours would have no values there
        assert PartFidelity(L2()).is_separable and not PartFidelity(L2()).problem
        wave = wave_in(layout, torch.float64)
    assert torch.equal(wave, wave_in(layout, torch.float64))


def test_which_fidelities_add_up() -> None:
    from deepinv.optim import L1, L2

    assert PartFidelity(L1()).is_separable and PartFidelity(L2()).is_separable
    assert not PartFidelity(Norm()).is_separable
    rows = PartFidelity(RowNorms())
    assert not rows.is_separable and not rows.problem


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "nothing was raised"


def prior_of(layout: Layout) -> DistributedPrior:
    with DistributedContext() as ctx:
        return DistributedPrior(ctx, lambda x: x, "basic", layout.shape, layout=layout)


def errors() -> list[str]:
    from deepinv.optim import L2
    from deepinv.physics import Blur

    layout = spatial_layout((1, 1, 12, 10), (4, 1))
    blur = Blur(filter_of(3, 3), padding="circular")
    parts, vignette = spread(layout, [blur]), spread(layout, [Vignette(torch.ones(10))])
    worker = layout.partition.rank
    x = layout.local_part(values(layout.shape, 1))
    wrong = x[..., :2, :] if worker == 2 else x
    other = Blur(filter_of(3, 5 if worker == 1 else 3), padding="circular")
    P = tessel.world()
    overlapping = layout.grow([(0, 0), (0, 0), (1, 1), (0, 0)])

    class Odd:
        def __call__(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
            return x.square().sum()

    return [
        raised(lambda: parts.A(wrong)),
        raised(lambda: parts.A_adjoint([wrong])),
        raised(lambda: parts.A_adjoint([x, x] if worker == 0 else [x])),
        raised(lambda: fidelity_of(parts, [x, x] if worker == 0 else [x], [L2()]).grad(x)),
        raised(lambda: fidelity_of(parts, [x], [Odd()]).grad(x)),
        raised(lambda: parts.A(x.long() if worker == 1 else x)),
        raised(lambda: parts.A_adjoint([x.tolist() if worker == 1 else x])),
        raised(lambda: parts.A(x > 0)),
        raised(lambda: fidelity_of(vignette, [x.float() if worker == 1 else x], [L2()]).grad(x)),
        raised(lambda: parts.part_of(0, values((1, 1, 5, 5), 1))),
        raised(lambda: partition_physics(other, layout)),
        raised(lambda: partition_physics(blur, overlapping)),
        raised(lambda: prior_of(overlapping)),
        raised(lambda: Convolution(layout, filter_of(25, 3), "reflect")),
        raised(lambda: Convolution(layout, filter_of(13, 3))),
        raised(lambda: Convolution(layout, filter_of(3, 3), "odd")),
        raised(lambda: Convolution(layout, values((1, 2, 3, 3), 0))),
        raised(lambda: Mask(layout, torch.ones(3, 10))),
        raised(lambda: operator_grid(P.create_cartesian_topology_partition((2, 1, 2, 1)), (5, 5))),
        raised(lambda: Decimation(layout, 0)),
    ]


EXPECTED = [
    "worker 2 expected a part of shape (1, 1, 3, 10), got (1, 1, 2, 10)",
    "measurement 0 must be of shape (1, 1, 3, 10), got (1, 1, 2, 10)",
    "needs as many tensors, 1, got 2",
    "needs as many tensors, 1, got 2",
    "Odd is not of the form d(A(x), y)",
    "worker 1 expected tensors of floating point or complex numbers, got torch.int64",
    "worker 1 expected tensors of floating point or complex numbers, got list",
    "expected tensors of floating point or complex numbers, got torch.bool",
    "dtype differs between workers: torch.float64 on worker 0, torch.float32 on worker 1",
    "measurement 0 must have the shape (1, 1, 12, 10) of the whole, or (1, 1, 3, 10)",
    "all workers must make the same calls",
    "needs an image in consecutive parts",
    "needs an image in consecutive parts",
    "does not fit an image of (12, 10): 25 values are too many along 12",
    "does not fit an image of (12, 10): 13 values are too many along 12",
    "padding must be one of valid, circular, reflect, replicate, constant, got 'odd'",
    "expected a filter of shape (1 or batch, 1 or channels, *sizes)",
    "a mask of (3, 10) does not fit an image of (1, 1, 12, 10)",
    "at most 2 dimensions for an image of (5, 5)",
    "sizes and a stride of at least 1, got (1, 1) and 0",
]


def test_errors_are_raised_on_all_workers(run: Run) -> None:
    for found in run(errors):
        for text, expected in zip(found, EXPECTED, strict=True):
            assert expected in text, text


def network(depth: int = 4) -> torch.nn.Module:
    """A small convolutional denoiser; what an output depends on reaches `depth` to each side."""
    from deepinv.models import DnCNN

    torch.manual_seed(1)
    return DnCNN(3, 3, depth=depth, nf=6, pretrained=None).double()


def check_prior(grid: tuple[int, ...], copies: int, settings: dict[str, Any], exact: bool) -> None:
    """Windows on parts are those on the whole image, for values and all gradients."""
    from tessel.imaging.distribution_strategies.strategies import create_strategy

    shape = (2, 3, 33, 42)
    layout = problem_layout(shape, grid, copies)
    kind = settings.get("kind", "smart_tiling")
    given = {key: value for key, value in settings.items() if key != "kind"}
    strategy = create_strategy(kind, shape, **given)
    alone, mine = network(), network()
    prior = prior_on(layout, strategy, mine)
    x = values(shape, 1)
    whole = x.clone().requires_grad_()
    part = layout.local_part(x).clone().requires_grad_()
    expected = alone(whole, 0.1) if exact else tiled(strategy, alone, whole)
    got = prior.prox(part, 0.1)
    close("the prior", got, layout.local_part(expected), TOLERANCE)
    weights = values(shape, 3)
    one, many = list(alone.parameters()), list(mine.parameters())
    vjps = torch.autograd.grad((expected.square() * weights).sum(), [whole, *one])
    loss = prior_loss(prior, part, layout, weights)
    found = torch.autograd.grad(loss, [part, *many])
    close("the gradient of the image", found[0], layout.local_part(vjps[0]), TOLERANCE)
    for each, slope in zip(found[1:], vjps[1:], strict=True):
        close("the gradient of a parameter", each, slope, TOLERANCE)
    close("the loss", loss, (expected.square() * weights).sum(), TOLERANCE)


def prior_on(layout: Layout, strategy: Any, prior: Any) -> DistributedPrior:
    """A prior on the parts of an image."""
    with DistributedContext() as ctx:
        return DistributedPrior(ctx, prior, strategy, layout=layout)


def prior_loss(prior: DistributedPrior, part: Tensor, layout: Layout, weights: Tensor) -> Tensor:
    got = prior.prox(part, 0.1)
    share = (got.square() * layout.local_part(weights)).sum()
    return tessel.core.shared.total(share, layout.partition, layout.shared)


def tiled(strategy: Any, network: Any, x: Tensor) -> Tensor:
    """All windows of the whole image in one process."""
    out = torch.zeros_like(x)
    for i, patch in strategy.get_local_patches(x, list(range(strategy.get_num_patches()))):
        strategy.reduce_patches(out, [(i, network(patch, 0.1))])
    return out


TILINGS = [
    ({"patch_size": 9, "receptive_field_size": 4}, True),
    ({"patch_size": (8, 20), "receptive_field_size": 4, "max_batch_size": 2}, True),
    ({"patch_size": 9, "receptive_field_size": 3}, False),
    ({"patch_size": 50, "receptive_field_size": 4}, True),
    ({"patch_size": 12, "receptive_field_size": 4, "overlap": True}, False),
    ({"patch_size": None, "receptive_field_size": 4}, True),
    ({"kind": "basic", "num_splits": 3, "receptive_field_size": 4}, True),
    ({"kind": "basic", "num_splits": 3, "receptive_field_size": 2, "split_dims": -1}, False),
]


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_priors_see_the_windows_of_the_whole_image(run: Run, nprocs: int) -> None:
    grids = {1: [((1, 1), 1)], 2: [((2, 1), 1)], 4: [((2, 2), 1), ((1, 4), 1), ((2,), 2)]}
    for number, (settings, exact) in enumerate(TILINGS):
        grid, copies = grids[nprocs][number % len(grids[nprocs])]
        run(check_prior, grid, copies, settings, exact, nprocs=nprocs)


def transfer(filter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The Fourier transform of a filter on a periodic image, its middle at the origin."""
    wide = torch.zeros(shape[-2:], dtype=filter.dtype)
    wide[: filter.shape[-2], : filter.shape[-1]] = filter[0, 0]
    middle = [-((size - 1) // 2) for size in filter.shape[-2:]]
    return torch.fft.fft2(wide.roll(middle, (0, 1)))


def norm_after(steps: int, operators: list[Any], shape: tuple[int, ...]) -> Tensor:
    """Power iteration in one process."""
    alone = Partition((tessel.world().rank or 0,), (1,))
    x, value = wave_in(Layout.whole(alone, shape), torch.float64), torch.zeros(())
    x = x / x.norm()
    for _ in range(steps):
        y = sum(each.A_adjoint(each.A(x)) for each in operators)
        assert isinstance(y, Tensor)
        x, value = y / y.norm(), (x * y).sum()
    return value.sqrt()


def check_bundle(partition: Any, iterations: int = 3) -> None:
    """Everything by its public names: the same as in one process."""
    from deepinv.optim import L2, PnP
    from deepinv.physics import Blur

    from tessel.imaging import (
        DistributedContext,
        FactoryConfig,
        TilingConfig,
        make_distrib_bundle,
    )

    shape = (1, 3, 30, 26)
    filters = [filter_of(3, 5, seed=seed) for seed in range(3)]
    for filter in filters:
        filter[0, 0, 1, 2] += 1  # well conditioned
    blurs = [Blur(filter, padding="circular") for filter in filters]
    truth = values(shape, 1)
    ys = [blur.A(truth) + 0.1 * values(shape, 30 + i) for i, blur in enumerate(blurs)]
    denoiser = network()
    with DistributedContext(seed=3) as ctx:
        given = partition(ctx, shape) if callable(partition) else partition
        bundle = make_distrib_bundle(
            ctx,
            factory_config=FactoryConfig(physics=blurs, measurements=ys, data_fidelity=L2()),
            signal_shape=shape,
            dtype=torch.float64,
            prior=PnP(denoiser=denoiser),
            tiling=TilingConfig(patch_size=8, receptive_field_size=4),
            partition=given,
        )
        layout = bundle.signal.layout
        x = torch.zeros(shape, dtype=torch.float64)
        with torch.no_grad():
            for _ in range(iterations):
                x = x - sum(L2().grad(x, y, b) for y, b in zip(ys, blurs, strict=True)) / 9
                bundle.signal.update_(
                    bundle.signal.data - bundle.data_fidelity.grad(bundle.signal) / 3
                )
                x = denoiser(x, 0.1)
                bundle.signal.update_(bundle.prior.prox(bundle.signal, sigma_denoiser=0.1))
        close("the image after some steps", bundle.signal.data, layout.local_part(x), TOLERANCE)
        close("the whole image", bundle.signal.whole(), x, TOLERANCE)
        expected = sum(L2()(x, y, b) for y, b in zip(ys, blurs, strict=True)) / 3
        close("loss", bundle.data_fidelity(bundle.signal), expected, TOLERANCE)
        spectra = [transfer(filter, shape) for filter in filters]
        power = sum(each.abs().square() for each in spectra)
        for steps in (1, 7, 40):
            norm = bundle.physics.norm(bundle.signal, max_iter=steps, tol=0.0)
            close("norm", norm, norm_after(steps, blurs, shape), TOLERANCE)
        close("the true norm", norm, power.max().sqrt(), 0.05)  # of 40 steps of slow convergence
        pairs = zip(spectra, ys, strict=True)
        numerator = sum(each.conj() * torch.fft.fft2(y) for each, y in pairs)
        dagger = torch.fft.ifft2(numerator / power).real
        found = bundle.physics.A_dagger(bundle.measurements.local)
        close("A_dagger", found, layout.local_part(dagger), 1e-9)  # of 1e-12 in the residual


def four_copies(ctx: Any, shape: tuple[int, ...]) -> Layout:
    return operator_grid(ctx.partition.create_cartesian_topology_partition((2, 2, 1)), shape)


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [2, 4])
def test_the_bundle_is_the_problem_of_one_process(run: Run, nprocs: int) -> None:
    if nprocs == 2:
        run(check_bundle, (2, 1), nprocs=2)
    else:
        run(check_bundle, (2, 2))
        run(check_bundle, (4,))
        run(check_bundle, four_copies)


def check_odd_layouts() -> None:
    """Empty parts, parts of any lengths, split batches and channels."""
    from deepinv.physics import Blur, Downsampling

    P = tessel.world().create_cartesian_topology_partition((1, 1, 4, 1))
    lengths = [[2], [3], [7, 0, 1, 6], [9]]
    few = spatial_layout((1, 3, 3, 9), (4, 1))
    uneven = Layout.from_lengths(P, lengths)
    channels = Layout.split(tessel.world(), (2, 3, 8, 9), (None, 0, None, None))
    batch = Layout.split(
        tessel.world().create_cartesian_topology_partition((2, 2)), (2, 3, 8, 9), (0, None, 1, None)
    )
    for padding in PADDINGS:
        for layout in (few, uneven, channels, batch):
            check_physics(Blur(filter_of(3, 4), padding=padding), layout)
    filters = values((2, 3, 3, 3), 4)
    check_physics(Blur(filters, padding="circular"), channels)
    check_physics(Blur(filters, padding="circular"), batch)
    down = Downsampling((3, 14, 9), filter=filter_of(3, 3), factor=3)
    check_physics(down, uneven)
    check_physics(Blur(filter_of(3, 3), padding="circular"), few)


@pytest.mark.slow
def test_parts_of_any_lengths(run: Run) -> None:
    run(check_odd_layouts)


def check_large_filter() -> None:
    """A filter that is applied by way of the Fourier transform."""
    from deepinv.physics import Blur, Downsampling

    layout = spatial_layout((2, 2, 50, 44), (2, 2))
    for padding in PADDINGS:
        check_physics(Blur(filter_of(21, 23), padding=padding), layout)
    filters = values((2, 2, 21, 23), 3)
    check_physics(Blur(filters, padding="circular"), layout)
    down = Downsampling((2, 50, 44), filter=filter_of(21, 23), factor=2, padding="reflect")
    check_physics(down, layout)


def check_positive() -> None:
    """Rounding makes no negative numbers of others, and takes nothing from the derivative."""
    layout = spatial_layout((1, 1, 60, 64), (2, 2))
    x = torch.zeros(layout.shape, dtype=torch.float64)
    x[..., 20:23, 30:33] = 7.0
    operator = Convolution(layout, filter_of(15, 15), "circular")
    part = layout.local_part(x).clone()
    for y in (operator.A(part), operator.A_adjoint(part)):
        assert (y >= 0).all()
    with torch.no_grad():
        assert (operator.A(part) >= 0).all()
    part.requires_grad_()
    weights = layout.local_part(values(layout.shape, 2))
    (slope,) = torch.autograd.grad((operator.A(part) * weights).sum(), part)
    close("the derivative", slope, operator.A_adjoint(weights.clone()))


def test_large_filters_keep_signs(run: Run) -> None:
    run(check_positive)


@pytest.mark.slow
def test_large_filters(run: Run) -> None:
    run(check_large_filter)


def check_some_workers() -> None:
    """Workers that hold no part of the image get through all calls."""
    from deepinv.optim import L2
    from deepinv.physics import Blur

    layout = spatial_layout((1, 1, 12, 10), (2, 1))
    blur = Blur(filter_of(3, 3), padding="circular")
    parts = spread(layout, [blur])
    x = values(layout.shape, 1)
    part = layout.local_part(x).clone()
    ys = parts.A(part)
    found = parts.A_adjoint(ys)
    slope = fidelity_of(parts, ys, [L2() for _ in ys]).grad(part)
    if layout.partition.active:
        close("A_adjoint A", found, layout.local_part(blur.A_adjoint(blur.A(x))), TOLERANCE)
        close("grad", slope, torch.zeros_like(slope), TOLERANCE)
    else:
        assert ys == [] and found.numel() == 0


def test_images_on_some_workers(run: Run) -> None:
    run(check_some_workers)


class Halves(DistributedSignalStrategy):
    """A strategy of a user, without windows: the upper and the lower half."""

    def get_num_patches(self) -> int:
        return 2

    def get_local_patches(self, X: Tensor, local_indices: list[int]) -> list[tuple[int, Tensor]]:
        middle = X.shape[2] // 2
        halves = X[:, :, :middle], X[:, :, middle:]
        return [(i, halves[i]) for i in local_indices]

    def apply_batching(self, patches: list[Tensor]) -> list[Tensor]:
        return patches

    def reduce_patches(self, out_tensor: Tensor, local_pairs: list[tuple[int, Tensor]]) -> None:
        assert not out_tensor.any()  # all of a worker's patches at once
        middle = out_tensor.shape[2] // 2
        for i, patch in local_pairs:
            out_tensor[:, :, slice(middle, None) if i else slice(middle)] = patch


def check_strategies(grid: tuple[int, ...]) -> None:
    shape = (1, 1, 9, 10)
    layout = spatial_layout(shape, grid)
    x = values(shape, 1)
    prior = prior_on(layout, Halves(shape), lambda patch: patch - patch.mean())
    found = prior.prox(layout.local_part(x).clone())
    expected = torch.cat([x[:, :, :4] - x[:, :, :4].mean(), x[:, :, 4:] - x[:, :, 4:].mean()], 2)
    close("halves", found, layout.local_part(expected), TOLERANCE)


def test_strategies_of_users(run: Run) -> None:
    run(check_strategies, (2, 2))
    run(check_strategies, (1, 1))


def check_bytes_of_priors() -> None:
    from tessel.imaging.distribution_strategies.strategies import create_strategy

    layout = spatial_layout((1, 3, 32, 20), (4, 1))
    x = layout.local_part(values(layout.shape, 1)).clone()
    place = layout.partition.rank
    sides = 1 if place in (0, 3) else 2
    for settings in (
        {"kind": "basic", "num_splits": (4, 1), "receptive_field_size": 3},
        {"patch_size": None, "receptive_field_size": 3},
    ):
        kind = settings.pop("kind", "smart_tiling")
        strategy = create_strategy(kind, layout.shape, **settings)
        prior = prior_on(layout, strategy, lambda patch: patch)
        prior.prox(x)
        with count_traffic() as traffic:
            found = prior.prox(x)
        close("the identity", found, x, 0.0)
        assert traffic.bytes_received == 8 * sides * 3 * 3 * 20, settings
        assert prior.num_patches == 4 and len(prior.local_indices) == 1


def test_bytes_of_priors_are_those_of_the_receptive_field(run: Run) -> None:
    run(check_bytes_of_priors)


def peak_of_gradient(grid: tuple[int, ...]) -> tuple[int, int]:
    """The most bytes at once in the gradient of three blurs: on parts, and as deepinv has it."""
    from deepinv.optim import L2
    from deepinv.physics import Blur

    layout = spatial_layout((1, 3, 256, 256), grid)
    x = values(layout.shape, 1)
    blurs = [Blur(filter_of(5, 5, seed=seed), padding="circular") for seed in range(3)]
    fs = [L2() for _ in blurs]
    parts = spread(layout, blurs)
    part = layout.local_part(x).clone()
    fidelity = fidelity_of(parts, parts.A(part), fs)
    with torch.no_grad():
        fidelity.grad(part)
        with count_memory() as own:
            fidelity.grad(part)
        wholes = [blur.A(x) for blur in blurs]
        with count_memory() as whole:
            sum(f.grad(x, y, blur) for f, y, blur in zip(fs, wholes, blurs, strict=True))
    return own.peak, whole.peak


def test_memory_falls_with_the_number_of_workers(run: Run) -> None:
    peaks = run(peak_of_gradient, (4, 1))
    for own, whole in peaks:
        assert own <= 0.35 * whole, (own / whole, peaks)
