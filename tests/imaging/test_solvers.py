"""Solvers: on whole and partitioned images, any number of workers gives what one process does.

Tests `imaging/solvers/method.py`, `imaging/solvers/iteration.py`, `imaging/solvers/proximal.py`,
`imaging/solvers/splitting.py`, `imaging/solvers/linear.py`, `imaging/solvers/checkpoint.py`.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import signal
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

import tessel
from tessel import Layout
from tessel.imaging import (
    DistributedContext,
    DistributedSignal,
    FactoryConfig,
    make_distrib_bundle,
    solvers,
)
from tessel.imaging.parts import operator_grid
from tessel.imaging.parts.operators import Differences
from tessel.state import checkpoint_reader, folders
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
SHAPE = (2, 1, 7, 9)
STEPS = 8
LAYOUTS = {  # the grid of each number of workers; None for the whole image on each
    1: [None, (1, 1)],
    2: [None, (2, 1), (1, 2)],
    3: [None, (3, 1)],
    4: [None, (4, 1), (2, 2), (1, 4)],
}
CASES = [(n, grid) for n, grids in LAYOUTS.items() for grid in grids]


def values(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layout_of(grid: tuple[int, int] | None, shape: tuple[int, ...] = SHAPE) -> Layout:
    P = tessel.world()
    if grid is None:
        return Layout.whole(P, shape, shared=True)
    return Layout.balanced(P.create_cartesian_topology_partition((1, 1, *grid)), shape)


class Reference:
    """min ½‖M x - y‖² + 0.15 ‖D x‖², an ℓ1 norm, and a denoiser, in plain torch."""

    def __init__(self) -> None:
        self.mask, self.measured = values(1).abs() + 0.2, values(2)
        self.mask /= self.mask.max()
        rows, columns = SHAPE[2:]
        self.matrix = torch.zeros(rows * columns * 2, rows * columns, dtype=torch.float64)
        for i in range(rows * columns):
            below, right = i + columns, i + 1
            for d, other in enumerate((below, right)):
                inside = below < rows * columns if d == 0 else right % columns
                if inside:
                    self.matrix[2 * i + d, i], self.matrix[2 * i + d, other] = -1, 1

    def D(self, x: Tensor) -> Tensor:
        return (x.flatten(2) @ self.matrix.T).reshape(*SHAPE, 2)

    def DT(self, z: Tensor) -> Tensor:
        return (z.reshape(*SHAPE[:2], -1) @ self.matrix).reshape(SHAPE)

    def grad(self, x: Tensor) -> Tensor:
        return self.mask * (self.mask * x - self.measured) + 0.3 * self.DT(self.D(x))

    def hessian(self, x: Tensor) -> Tensor:
        return self.mask**2 * x + 0.3 * self.DT(self.D(x))

    def dense(self) -> Tensor:
        smooth = torch.block_diag(*[self.matrix.T @ self.matrix] * (SHAPE[0] * SHAPE[1]))
        return torch.diag(self.mask.flatten() ** 2) + 0.3 * smooth

    def prox(self, x: Tensor, gamma: float) -> Tensor:
        left = torch.eye(math.prod(SHAPE), dtype=torch.float64) + gamma * self.dense()
        right = x + gamma * self.mask * self.measured
        return torch.linalg.solve(left, right.flatten()).reshape(SHAPE)

    def denoise(self, x: Tensor, sigma: float) -> Tensor:
        return x - sigma * self.DT(self.D(x))


class Problem:
    """The same on a layout, with the differences of Tessel."""

    def __init__(self, layout: Layout) -> None:
        whole = Reference()
        self.layout = layout
        self.mask, self.measured = (
            layout.local_part(each).clone() for each in (whole.mask, whole.measured)
        )
        self.differ = solvers.differences(layout)
        assert isinstance(self.differ, Differences)

    def grad(self, x: Tensor) -> Tensor:
        smooth = self.differ.A_adjoint(self.differ.A(x))
        return self.mask * (self.mask * x - self.measured) + 0.3 * smooth

    def hessian(self, x: Tensor) -> Tensor:
        return self.mask**2 * x + 0.3 * self.differ.A_adjoint(self.differ.A(x))

    def denoiser(self) -> Any:
        return Denoiser(self)


class Denoiser:
    def __init__(self, problem: Problem) -> None:
        self.differ = problem.differ

    def prox(self, x: Tensor, sigma: float) -> Tensor:
        return x - sigma * self.differ.A_adjoint(self.differ.A(x))

    def grad(self, x: Tensor, sigma: float) -> Tensor:
        return x - self.prox(x, sigma)


class L1:
    def prox(self, x: Tensor, gamma: float) -> Tensor:
        return F.softshrink(x, gamma)


class Physics:
    """Two measurements: M x, and √0.3 D x. With a context if each number is on one worker."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        if not problem.layout.shared:
            self.ctx = "each measurement is on one worker"

    def A(self, x: Tensor) -> list[Tensor]:
        return [self.problem.mask * x, 0.3**0.5 * self.problem.differ.A(x)]

    def A_adjoint(self, y: list[Tensor]) -> Tensor:
        return self.problem.mask * y[0] + 0.3**0.5 * self.problem.differ.A_adjoint(y[1])

    def measurements(self) -> list[Tensor]:
        return [self.problem.measured, torch.zeros_like(self.A(self.problem.measured)[1])]


# --- each method, and the same in plain torch

SIGMAS = [0.1, 0.05, 0.02]


def sigma_at(k: int) -> dict[str, float]:
    return {"sigma": SIGMAS[k % 3]}


def step_at(k: int) -> float:
    return 0.3 / (k + 1)


def method_of(name: str, p: Problem) -> solvers.Method:
    smooth = {"sigma": 0.1}
    makers: dict[str, Callable[[], solvers.Method]] = {
        "gradient descent": lambda: solvers.GradientDescent(p, step=0.3),
        "gradient descent, prior": lambda: solvers.GradientDescent(
            p, step_at, p.denoiser(), weight=0.7, prior_arguments=smooth
        ),
        "RED": lambda: solvers.RED(p, 0.3, p.denoiser(), weight=0.7, prior_arguments=sigma_at),
        "ISTA": lambda: solvers.ISTA(p, L1(), step=0.3, weight=0.4),
        "PGD": lambda: solvers.PGD(p, p.denoiser(), step=step_at, prior_arguments=sigma_at),
        "FISTA": lambda: solvers.FISTA(p, L1(), step=0.3, weight=0.4),
        "HQS": lambda: solvers.HQS(p, p.denoiser(), step=step_at, prior_arguments=sigma_at),
        "ADMM": lambda: solvers.ADMM(p, L1(), step=0.8, weight=0.4, relaxation=0.9),
        "CG": lambda: solvers.CG(p.hessian, p.mask * p.measured),
        "CGLS": lambda: solvers.CGLS(Physics(p), Physics(p).measurements()),
        "CGLS, damped": lambda: solvers.CGLS(Physics(p), Physics(p).measurements(), damping=0.2),
        "Condat-Vu": lambda: solvers.CondatVu(p, step=0.3, weight=0.2, prior=Positive()),
        "Chambolle-Pock": lambda: solvers.ChambollePock(p, step=0.6, weight=0.2),
    }
    return makers[name]()


METHODS = (
    "gradient descent", "gradient descent, prior", "RED", "ISTA", "PGD", "FISTA", "HQS", "ADMM",
    "CG", "CGLS", "CGLS, damped", "Condat-Vu", "Chambolle-Pock",
)  # fmt: skip


class Positive:
    def prox(self, x: Tensor) -> Tensor:
        return x.clamp(min=0)


@lru_cache
def expected(name: str, seed: int | None, steps: int = STEPS) -> Tensor:
    """The method in one process, written out, from `values(seed)` or from zero."""
    x = torch.zeros(SHAPE, dtype=torch.float64) if seed is None else values(seed)
    r, rhs = Reference(), Reference().mask * Reference().measured
    z, ahead, dual = torch.zeros_like(x), x, torch.zeros(*SHAPE, 2, dtype=x.dtype)
    if name in ("CG", "CGLS", "CGLS, damped"):
        return krylov(r, rhs, x, steps, 0.2 if name == "CGLS, damped" else 0.0)
    for k in range(steps):
        before = x
        if name == "gradient descent":
            x = x - 0.3 * r.grad(x)
        elif name == "gradient descent, prior":
            x = x - step_at(k) * (r.grad(x) + 0.7 * (x - r.denoise(x, 0.1)))
        elif name == "RED":
            x = x - 0.3 * (r.grad(x) + 0.7 * (x - r.denoise(x, SIGMAS[k % 3])))
        elif name == "ISTA":
            x = F.softshrink(x - 0.3 * r.grad(x), 0.12)
        elif name == "PGD":
            x = r.denoise(x - step_at(k) * r.grad(x), SIGMAS[k % 3])
        elif name == "FISTA":
            x = F.softshrink(ahead - 0.3 * r.grad(ahead), 0.12)
            ahead = x + k / (k + 4) * (x - before)
        elif name == "HQS":
            x = r.denoise(r.prox(x, step_at(k)), SIGMAS[k % 3])
        elif name == "ADMM":
            u = r.prox(x - z, 0.8)
            x = F.softshrink(u + z, 0.32)
            z = z + 0.9 * (u - x)
        else:
            step, second = (0.3, 1 / (2 * 0.3 * 8)) if name == "Condat-Vu" else (0.6, 1 / (0.6 * 8))
            if name == "Condat-Vu":
                x = (x - step * (r.grad(x) + r.DT(dual))).clamp(min=0)
            else:
                x = r.prox(x - step * r.DT(dual), step)
            dual = dual + second * r.D(2 * x - before)
            dual = dual / (dual.norm(dim=-1, keepdim=True) / 0.2).clamp(min=1)
    return x


def krylov(r: Reference, rhs: Tensor, x: Tensor, steps: int, damping: float) -> Tensor:
    """The best image in x₀ + the space of Hᵏ(b - H x₀), k < steps, in the norm of H."""
    H = r.dense() + damping * torch.eye(math.prod(SHAPE), dtype=torch.float64)
    rest = rhs.flatten() - H @ x.flatten()
    basis = [rest / rest.norm()]
    for _ in range(steps - 1):
        new = H @ basis[-1]
        for _ in range(2):
            new = new - sum(each * (each @ new) for each in basis)
        basis.append(new / new.norm())
    V = torch.stack(basis, 1)
    return x + (V @ torch.linalg.solve(V.T @ H @ V, V.T @ rest)).reshape(SHAPE)


def follow(
    grid: tuple[int, int] | None, wanted: dict[str, Tensor]
) -> dict[str, tuple[float, float, int]]:
    """The difference from one process, that between workers that share, and the iterations."""
    layout = layout_of(grid)
    start = layout.local_part(values(3)).clone()
    results = {}
    for name, want in wanted.items():
        method = method_of(name, Problem(layout))
        found = solvers.solve(method, start, layout=layout, max_iterations=STEPS)
        assert torch.equal(start, layout.local_part(values(3))), "the start was changed"
        others = tessel.world().group.share_objects(found.x) if grid is None else [found.x]
        apart = max(float((other - found.x).abs().max()) for other in others)
        error = float((found.x - layout.local_part(want)).abs().max())
        results[name] = error, apart, found.iterations
    return results


@pytest.mark.parametrize(("nprocs", "grid"), CASES)
def test_every_method_is_that_of_one_process(
    run: Run, nprocs: int, grid: tuple[int, int] | None
) -> None:
    """At 1e-10: proxes are by conjugate gradients, to a relative residual of 1e-12."""
    wanted = {name: expected(name, 3) for name in METHODS}
    for results in run(follow, grid, wanted, nprocs=nprocs):
        wrong = {
            name: found
            for name, found in results.items()
            if not (found[0] < 1e-10 and found[1:] == (0, STEPS))
        }
        assert list(results) == list(METHODS) and not wrong


@pytest.mark.parametrize("name", ["ISTA", "FISTA", "ADMM"])
def test_methods_of_one_problem_end_at_one_image(name: str) -> None:
    """The minimiser of f + 0.4 ‖x‖₁, for which -∇f(x) is a subgradient."""
    p = Problem(layout_of(None))
    found = solvers.solve(
        method_of(name, p), torch.zeros(SHAPE).double(), max_iterations=3000,
        stop=solvers.RelativeChange(1e-13),
    )  # fmt: skip
    slope = Reference().grad(found.x)
    at_zero = found.x == 0
    assert found.converged and 0.1 < at_zero.double().mean() < 0.9
    assert float(slope[at_zero].abs().max()) <= 0.4 + 1e-9
    assert float((slope + 0.4 * found.x.sign())[~at_zero].abs().max()) < 1e-9


@pytest.mark.slow
def test_both_primal_dual_methods_end_at_one_image() -> None:
    p, zero = Problem(layout_of(None)), torch.zeros(SHAPE).double()
    ways = [
        solvers.CondatVu(p, step=0.3, weight=0.2),
        solvers.ChambollePock(p, step=0.6, weight=0.2),
    ]
    first, second = (solvers.solve(way, zero, max_iterations=300) for way in ways)
    assert float((first.x - second.x).abs().max()) < 3e-4  # both converge as 1 / k
    space = solvers.Space.of(zero)
    best = value_of(p, first.x, space)
    for seed in range(20):
        nearby = first.x + 1e-3 * values(seed)
        assert value_of(p, nearby, space) > best


def value_of(p: Problem, x: Tensor, space: solvers.Space) -> float:
    quadratic = 0.5 * (x * p.hessian(x)).sum() - (x * p.mask * p.measured).sum()
    return float(quadratic + 0.2 * solvers.total_variation(x, space))


# --- norms


def norms(grid: tuple[int, int] | None) -> tuple[float, float, float]:
    layout = layout_of(grid)
    p, start = Problem(layout), layout.local_part(values(5))
    options: dict[str, Any] = {"layout": layout, "max_iterations": 3000, "tolerance": 1e-14}
    return (
        solvers.power_iteration(p.hessian, start, **options),
        solvers.lipschitz(p, start, **options),
        float(solvers.total_variation(start, solvers.Space.of(start, layout))),
    )


@pytest.mark.parametrize(("nprocs", "grid"), CASES)
def test_norms(run: Run, nprocs: int, grid: tuple[int, int] | None) -> None:
    r = Reference()
    largest = float(torch.linalg.eigvalsh(r.dense()).max())
    variation = float(r.D(values(5)).norm(dim=-1).sum())
    for found in run(norms, grid, nprocs=nprocs):
        assert found == pytest.approx((largest, largest, variation), rel=1e-9)


# --- stopping


def stop_early(grid: tuple[int, int] | None, name: str) -> tuple[int, str, bool, list[float]]:
    layout = layout_of(grid)
    criteria: dict[str, Any] = {
        "change": solvers.RelativeChange(1e-3),
        "residual": [solvers.TimeLimit(1e6), solvers.Below("residual", 1e-6)],
        "plateau": solvers.Plateau("psnr", patience=3),
        "one worker": lambda history: tessel.world().rank == 0 and history.iterations == 5,
        "time": solvers.TimeLimit(1e-9),
        "never": lambda history: False,
    }
    truth = layout.local_part(expected("CG", None, 40))
    found = solvers.solve(
        method_of("CG" if name == "residual" else "gradient descent", Problem(layout)),
        layout.local_part(values(3)),
        layout=layout,
        max_iterations=300,
        stop=criteria[name],
        metrics={"psnr": solvers.PSNR(truth + 0.01, layout, peak=2.0)},
    )
    column = "residual" if name == "residual" else "change"
    return found.iterations, found.reason, found.converged, found.history[column]


@pytest.mark.slow
@pytest.mark.parametrize(("nprocs", "grid"), [(1, None), (2, None), (4, (2, 2))])
def test_criteria(run: Run, nprocs: int, grid: tuple[int, int] | None) -> None:
    for name in ("change", "residual"):
        results = run(stop_early, grid, name, nprocs=nprocs)
        iterations, reason, converged, numbers = results[0]
        limit = 1e-3 if name == "change" else 1e-6
        assert results == [results[0]] * nprocs and converged
        assert reason == f"{name} below {limit:g}" and 3 < iterations < 300
        assert numbers[-1] < limit <= min(numbers[:-1])
    for name, iterations in (("one worker", 5), ("time", 1), ("never", 300)):
        results = run(stop_early, grid, name, nprocs=nprocs)
        assert [result[0] for result in results] == [iterations] * nprocs
        assert results[0][2] == (name != "never")
    assert results[0][1] == "the largest number of iterations"
    assert run(stop_early, grid, "plateau", nprocs=nprocs)[0][0] < 300


def test_a_plateau_is_no_better_for_so_long() -> None:
    plateau = solvers.Plateau("loss", patience=2, margin=0.1, larger_is_better=False)
    losses = [3.0, 2.0, 1.95, 1.8, 1.75, 1.74]
    met = [plateau(solvers.History({"loss": losses[: k + 1]})) for k in range(len(losses))]
    assert met == [False, False, False, False, False, True]


# --- history, metrics, progress


def record(grid: tuple[int, int] | None) -> tuple[dict[str, list[float]], list[int], float]:
    layout = layout_of(grid)
    problem, truth = Problem(layout), values(9)
    seen: list[int] = []
    space = solvers.Space.of(layout.local_part(truth), layout)
    found = solvers.solve(
        method_of("PGD", problem),
        layout.local_part(values(3)),
        layout=layout,
        max_iterations=STEPS,
        metrics={
            "psnr": solvers.PSNR(layout.local_part(truth), layout, peak=3.0),
            "norm": space.norm,
        },
        each=lambda k, x: seen.append(k),
    )
    columns = dict(found.history)
    assert len(columns.pop("seconds")) == STEPS
    whole = 10 * math.log10(9 / float((expected("PGD", 3) - truth).square().mean()))
    return columns, seen, whole


@pytest.mark.parametrize(("nprocs", "grid"), CASES)
def test_history(run: Run, nprocs: int, grid: tuple[int, int] | None) -> None:
    results = run(record, grid, nprocs=nprocs)
    for columns, seen, whole in results:
        assert columns == results[0][0]
        assert seen == list(range(1, STEPS + 1))
        assert list(columns) == ["change", "psnr", "norm"]
        assert columns["psnr"][-1] == pytest.approx(whole, rel=1e-12)
        images = [expected("PGD", 3, k) for k in range(STEPS + 1)]
        pairs = zip(images[1:], images[:-1], strict=True)
        changes = [float((a - b).norm() / a.norm()) for a, b in pairs]
        assert columns["change"] == pytest.approx(changes, rel=1e-10)
        assert columns["norm"] == pytest.approx([float(x.norm()) for x in images[1:]], rel=1e-12)


def show() -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    layout = layout_of(None)
    solvers.solve(
        method_of("CG", Problem(layout)), values(3), layout=layout, max_iterations=3,
        metrics={"psnr": solvers.PSNR(values(4), layout)}, progress=console,
    )  # fmt: skip
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_progress_is_shown_on_the_first_worker(run: Run) -> None:
    first, second = run(show, nprocs=2)
    assert "CG" in first and "3/3" in first and "psnr" in first and "residual" in first
    assert second == ""


def messages(name: str) -> tuple[int, int]:
    """What two more iterations send and agree on, beyond the work of the method's operators."""
    layout = layout_of(None)
    counts = []
    for iterations in (3, 5):
        with count_traffic() as traffic:
            solvers.solve(
                method_of(name, Problem(layout)), values(3), layout=layout,
                max_iterations=iterations,
            )  # fmt: skip
        counts.append((traffic.messages, traffic.bytes_sent))
    (a, b), (c, d) = counts
    return c - a, d - b


def test_a_solver_sends_a_few_numbers_an_iteration(run: Run) -> None:
    """To the other worker: those of the change; conjugate gradients need two more products."""
    assert run(messages, "PGD", nprocs=2) == [(2, 2 * 16)] * 2
    assert run(messages, "CG", nprocs=2) == [(2 * 3, 2 * (16 + 8 + 8))] * 2


# --- checkpoints


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def all_resumed(folder: str, grid: tuple[int, int] | None) -> list[str]:
    """The methods that do not resume as they should."""
    return [name for name in METHODS if not resumed(f"{folder}/{name}", grid, name)]


def resumed(folder: str, grid: tuple[int, int] | None, name: str) -> bool:
    """A run that was ended after 5 of 8 iterations goes on to the same image, bit by bit."""
    layout = layout_of(grid)
    problem, start = Problem(layout), layout.local_part(values(3))
    truth = solvers.PSNR(layout.local_part(values(9)), layout)
    options: dict[str, Any] = {"layout": layout, "metrics": {"psnr": truth}}
    want = solvers.solve(method_of(name, problem), start, max_iterations=STEPS, **options)
    keep = solvers.Checkpoint(Path(folder), every=2)

    def end(k: int, x: Tensor) -> None:
        if k == 5:
            raise KeyboardInterrupt

    seen: list[int] = []
    options["checkpoint"] = keep
    try:
        solvers.solve(method_of(name, problem), start, max_iterations=STEPS, each=end, **options)
    except KeyboardInterrupt:
        seen.append(0)
    found = solvers.solve(
        method_of(name, problem), start, max_iterations=STEPS,
        each=lambda k, x: seen.append(k), **options,
    )  # fmt: skip
    again = solvers.solve(method_of(name, problem), start, max_iterations=STEPS, **options)
    same = torch.equal(found.x, want.x) and torch.equal(again.x, want.x)
    columns = [{k: v for k, v in s.history.items() if k != "seconds"} for s in (want, found, again)]
    return same and seen == [0, 5, 6, 7, 8] and columns[0] == columns[1] == columns[2]


def with_a_new_metric(folder: str) -> tuple[list[int], int, str]:
    """A run that resumes with a metric, and criteria on it, that the first run had not."""
    layout = layout_of(None)
    options: dict[str, Any] = {"layout": layout, "checkpoint": solvers.Checkpoint(folder, every=1)}
    method, start = solvers.GradientDescent(Halving(), step=1.0), values(3)
    solvers.solve(method, start, max_iterations=2, **options)
    stop = [solvers.Plateau("size", patience=1, larger_is_better=True), solvers.Below("size", 1e-9)]
    size = lambda x: float(x.abs().max())  # noqa: E731
    found = solvers.solve(
        method, start, max_iterations=9, stop=stop, metrics={"size": size}, **options
    )
    return [len(found.history[name]) for name in ("change", "size")], found.iterations, found.reason


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_metric_may_be_new_when_a_run_resumes(run: Run, tmp_path: Path, nprocs: int) -> None:
    expected = [4, 2], 4, "size no better for 1 iterations"
    assert run(with_a_new_metric, str(tmp_path), nprocs=nprocs) == [expected] * nprocs


@pytest.mark.slow
@pytest.mark.parametrize(("nprocs", "grid"), [(1, None), (2, None), (4, (2, 2))])
def test_resume(run: Run, tmp_path: Path, nprocs: int, grid: tuple[int, int] | None) -> None:
    assert run(all_resumed, str(tmp_path), grid, nprocs=nprocs) == [[]] * nprocs
    for name in METHODS:
        assert files_in(tmp_path / name) == [  # two generations
            f"iteration-{i:08d}/{file}"
            for i in (6, 8)
            for file in (".metadata", *(f"__{k}_0.distcp" for k in range(nprocs)))
        ]


def draw_on(folder: str, ends: bool) -> Tensor:
    """A method whose denoiser draws random numbers."""

    class Noise:
        def prox(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.randn(x.shape, dtype=x.dtype)

    layout = layout_of(None)
    torch.manual_seed(0)
    keep = solvers.Checkpoint(folder, every=3)
    method = solvers.PGD(Problem(layout), Noise(), step=0.3)
    steps = 3 if ends else 8
    return solvers.solve(method, values(3), layout=layout, max_iterations=steps, checkpoint=keep).x


def test_resume_with_random_numbers(tmp_path: Path) -> None:
    want = draw_on(str(tmp_path / "whole"), False)
    draw_on(str(tmp_path / "ended"), True)
    assert torch.equal(draw_on(str(tmp_path / "ended"), False), want)


def half_written(folder: str, damage: str) -> tuple[list[int], bool, list[str]]:
    """Something is wrong with the last file of one worker, after 8 of 8 iterations."""
    layout = layout_of(None)
    problem = Problem(layout)
    keep = solvers.Checkpoint(folder, every=4)
    method, rank = method_of("FISTA", problem), tessel.world().rank
    options: dict[str, Any] = {"layout": layout, "max_iterations": STEPS, "checkpoint": keep}
    want = solvers.solve(method, values(3), **options)
    tessel.world().group.share_objects(None)
    if rank == 1:
        own = Path(folder, "iteration-00000008", "__1_0.distcp")
        if damage == "unnamed":  # as when it is ended in the moment before
            own.parent.rename(own.parent.with_name(f".{own.parent.name}.0123456789ab"))
        elif damage == "missing":
            own.unlink()
        else:
            data = bytearray(own.read_bytes())
            data[-5] ^= 16
            own.write_bytes(data)
    tessel.world().group.share_objects(None)
    seen: list[int] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = solvers.solve(method, values(3), each=lambda k, x: seen.append(k), **options)
    texts = [str(each.message) for each in warned if "checkpoint" in str(each.message)]
    return seen, torch.equal(found.x, want.x), texts


@pytest.mark.parametrize("damage", ["unnamed", "missing", "flipped"])
def test_the_generation_before_is_used_with_a_warning(
    run: Run, tmp_path: Path, damage: str
) -> None:
    (seen, same, texts), (seen_too, same_too, no_texts) = run(
        half_written, str(tmp_path), damage, nprocs=2
    )
    assert same and same_too and no_texts == []
    assert seen == seen_too == [5, 6, 7, 8]
    assert {path.name for path in tmp_path.iterdir()} == {f"iteration-0000000{k}" for k in (4, 8)}
    if damage == "unnamed":
        assert texts == []
        return
    (text,) = texts
    assert f"the checkpoint in {tmp_path} " in text and "resumes from iteration 4" in text
    assert "iteration-00000008/__1_0.distcp" in text
    if damage == "flipped":
        assert "are not those that were written" in text


MOMENTS = {  # of the sixth iteration, in which a worker is killed; from which one it resumes
    "the seventh": 6,
    "has written": 3,
    "before the name": 3,
    "after the name": 6,
}


def solve_in_ten_iterations(folder: str, moment: str, grid: tuple[int, int]) -> int:
    """Keep the solution in a folder, unless a worker is killed on the way; how many were made."""
    P, layout, done = tessel.world(), layout_of(grid), [0]

    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def each(k: int, x: Tensor) -> None:
        done.append(k)
        if moment == "the seventh" and k == 7 and P.rank == 1:
            die()
        commit = folders.commit
        if k == 6 and moment == "has written" and P.rank == 1:
            checkpoint_reader.checksum_at = die
        elif k == 6 and moment == "before the name" and P.rank == 0:
            folders.commit = die
        elif k == 6 and moment == "after the name" and P.rank == 0:
            folders.commit = lambda *paths: (commit(*paths), die())

    found = solvers.solve(
        method_of("ADMM", Problem(layout)), layout.local_part(values(3)), layout=layout,
        max_iterations=10, each=each, checkpoint=solvers.Checkpoint(folder, every=3),
    )  # fmt: skip
    torch.save((found.x, found.iterations), f"{folder}-{P.rank}.pt")
    return len(done) - 1


@pytest.mark.ends_workers
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes(run: Run, tmp_path: Path, moment: str) -> None:
    """Also one that is killed while it writes: it goes on from what is complete."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(solve_in_ten_iterations, str(whole), "", (2, 1), nprocs=2)
    with pytest.raises(tessel.WorkerLost, match="SIGKILL"):
        run(solve_in_ten_iterations, str(killed), moment, (2, 1), nprocs=2)
    left = {path.name for path in killed.glob("iteration-*")}
    assert left == {f"iteration-0000000{k}" for k in (3, MOMENTS[moment])}
    results = run(solve_in_ten_iterations, str(killed), "", (2, 1), nprocs=2)
    assert results == [10 - MOMENTS[moment]] * 2
    assert files_in(killed) == files_in(whole)
    for rank in range(2):
        want, found = (torch.load(f"{each}-{rank}.pt") for each in (whole, killed))
        assert torch.equal(want[0], found[0]) and want[1] == found[1] == 10


def text_of(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except (ValueError, NotImplementedError, FloatingPointError) as error:
        return type(error).__name__, str(error)
    return "", ""


def other_problem(folder: str, change: str) -> tuple[str, str]:
    layout = layout_of(None)
    keep = solvers.Checkpoint(folder, every=1)
    options: dict[str, Any] = {"max_iterations": 2, "checkpoint": keep}
    solvers.solve(method_of("PGD", Problem(layout)), values(3), layout=layout, **options)
    tessel.world().group.share_objects(None)
    parts = layout_of((2, 1)) if change == "method, parts" else layout
    x = parts.local_part(values(3))
    if change == "dtype":
        x = x.float()
    if change == "shape":
        x, parts = values(3)[..., 1:], Layout.whole(tessel.world(), x[..., 1:].shape, shared=True)
    name = "CG" if change.startswith("method") else "PGD"
    method: Any = method_of(name, Problem(layout if change == "shape" else parts))
    return text_of(lambda: solvers.solve(method, x, layout=parts, **options))


@pytest.mark.parametrize("change", ["method", "method, parts", "dtype", "shape"])
@pytest.mark.parametrize("nprocs", [2])
def test_a_checkpoint_of_another_problem_is_refused(
    run: Run, tmp_path: Path, nprocs: int, change: str
) -> None:
    results = run(other_problem, str(tmp_path), change, nprocs=nprocs)
    change = change.partition(",")[0]
    assert results[0] == results[1]
    assert results[0][0] == "ValueError" and f"on worker 0, the {change} was" in results[0][1]


KEEPING = ("PGD", "FISTA", "ADMM", "CG", "CGLS, damped", "Condat-Vu")  # each keeps other values


def part_way(folder: str, grid: tuple[int, int] | None, steps: int) -> dict[str, Any]:
    """Methods up to some iteration, each from where a run in whatever parts was ended."""
    layout = layout_of(grid)
    problem, found = Problem(layout), {}
    start = layout.local_part(values(3))
    for name in KEEPING:
        keep = solvers.Checkpoint(f"{folder}/{name}", every=2)
        seen: list[int] = []
        solution = solvers.solve(
            method_of(name, problem), start, max_iterations=steps, layout=layout, checkpoint=keep,
            each=lambda k, x, seen=seen: seen.append(k),
        )  # fmt: skip
        wanted = layout.local_part(expected(name, 3))
        error = float((solution.x - wanted).abs().max()) if steps == STEPS else 0.0
        found[name] = seen, solution.history.iterations, error
    return found


MOVES = [
    ((2, None), (1, None)),
    ((1, None), (4, (2, 2))),
    ((4, (2, 2)), (2, (1, 2))),
    ((4, (2, 2)), (4, (4, 1))),
    ((4, (1, 4)), (2, None)),
    ((2, None), (2, (2, 1))),
]


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_a_run_goes_on_in_other_parts(run: Run, tmp_path: Path, before: Any, after: Any) -> None:
    """On more or fewer workers, or with another partition: to the same image, but for rounding."""
    run(part_way, str(tmp_path), before[1], 5, nprocs=before[0])
    for found in run(part_way, str(tmp_path), after[1], STEPS, nprocs=after[0]):
        for name, (seen, iterations, error) in found.items():
            assert seen == [6, 7, 8] and iterations == 8, name
            assert error < 1e-10, (name, error)
    for name in KEEPING:
        files = {path.name for path in (tmp_path / name).rglob("*_0.distcp")}
        assert files == {f"__{k}_0.distcp" for k in range(after[0])}


class Collector(solvers.Method):
    """A method of a user, which keeps what lies otherwise than the image."""

    def begin(self, x: Tensor, space: Any) -> dict[str, Any]:
        return {"x": x, "rows": x.sum(-1), "count": 0}

    def iterate(self, values: dict[str, Any], iteration: int, space: Any) -> dict[str, Any]:
        x = values["x"] / 2
        return {"x": x, "rows": values["rows"] + x.sum(-1), "count": values["count"] + 1}


class Summing(Collector):
    """It says how to make what is missing."""

    def complete(self, values: dict[str, Any], space: Any) -> dict[str, Any]:
        return {**values, "rows": values["x"].sum(-1)}


def collected(folder: str, grid: Any, steps: int, kind: type[Collector]) -> tuple[str, Any]:
    layout = layout_of(grid)
    keep = solvers.Checkpoint(folder, every=1)
    x, found = layout.local_part(values(3)), []

    def go() -> None:
        solution = solvers.solve(kind(), x, layout=layout, max_iterations=steps, checkpoint=keep)
        found.append(solution.values["count"])

    return text_of(go)[1], found


def test_methods_say_what_lies_otherwise(run: Run, tmp_path: Path) -> None:
    for kind, folder in ((Collector, tmp_path / "a"), (Summing, tmp_path / "b")):
        run(collected, str(folder), None, 3, kind, nprocs=2)
        for text, found in run(collected, str(folder), (1, 4), 4, kind):
            if kind is Summing:
                assert (text, found) == ("", [4])
            else:
                assert "to which Collector cannot convert ['rows']" in text and not found


def lone(folder: str) -> tuple[str, str]:
    """A worker that does not see the files of the others."""
    layout = layout_of((2, 1))
    own = f"{folder}/{tessel.world().rank}"
    keep = solvers.Checkpoint(own, every=1)
    options: dict[str, Any] = {"max_iterations": 2, "checkpoint": keep}
    x = layout.local_part(values(3))
    solvers.solve(method_of("PGD", Problem(layout)), x, layout=layout, **options)
    again = solvers.solve(method_of("PGD", Problem(layout)), x, layout=layout, **options)
    assert again.iterations == 2  # which need not be shared for that
    other = layout_of((1, 2))
    x = other.local_part(values(3))
    method = method_of("PGD", Problem(other))
    return text_of(lambda: solvers.solve(method, x, layout=other, **options))


def test_files_that_a_worker_does_not_see(run: Run, tmp_path: Path) -> None:
    results = run(lone, str(tmp_path), nprocs=2)
    for folder, (kind, text) in enumerate(results):
        assert kind == "ValueError" and "the image lay in other parts" in text
        assert f"the checkpoint in {tmp_path}/{folder} cannot be read" in text
        assert "on worker 0, " in text and "lacks pieces of 'values.x'" in text


def few(folder: str) -> tuple[str, str]:
    layout = layout_of(None)
    keep = solvers.Checkpoint(folder, every=1)
    return text_of(
        lambda: solvers.solve(
            method_of("PGD", Problem(layout)), values(3), layout=layout, max_iterations=2,
            checkpoint=keep,
        )
    )  # fmt: skip


def test_a_checkpoint_that_lacks_a_file_is_refused(run: Run, tmp_path: Path) -> None:
    """Never a silent start from the beginning; the file is named."""
    assert run(few, str(tmp_path), nprocs=2) == [("", "")] * 2
    for iteration in (1, 2):
        (tmp_path / f"iteration-{iteration:08d}" / "__1_0.distcp").unlink()
    first, second = run(few, str(tmp_path), nprocs=2)
    assert first == second and first[0] == "ValueError"
    assert "on worker 1, FileNotFoundError: [Errno 2] No such file" in first[1]
    assert "iteration-00000002/__1_0.distcp" in first[1]
    # One worker alone needs what the first one wrote, which has the whole image, and its notes.
    assert run(few, str(tmp_path), nprocs=1) == [("", "")]
    for iteration in (1, 2):
        (tmp_path / f"iteration-{iteration:08d}" / ".metadata").unlink()
    ((kind, text),) = run(few, str(tmp_path), nprocs=1)
    assert kind == "ValueError" and "iteration-00000002/.metadata" in text


def few_that_cannot_be_named(folder: str, steps: int) -> tuple[tuple[str, str], int]:
    """Workers can write files, and the first cannot give the folder of the third its name."""
    layout, replace, done = layout_of(None), os.replace, []

    def refuse(source: Any, target: Any) -> None:
        if Path(target).name == "iteration-00000003":
            raise PermissionError(13, "not allowed", str(target))
        replace(source, target)

    def go() -> None:
        solvers.solve(
            method_of("PGD", Problem(layout)), values(3), layout=layout, max_iterations=steps,
            checkpoint=solvers.Checkpoint(folder, every=1), each=lambda k, x: done.append(k),
        )  # fmt: skip

    os.replace = refuse
    try:
        return text_of(go), len(done)
    finally:
        os.replace = replace


def test_a_folder_that_cannot_get_its_name_raises_on_all_workers(run: Run, tmp_path: Path) -> None:
    """All raise before the next iteration, and the next run resumes."""
    first, second = run(few_that_cannot_be_named, str(tmp_path), 5, nprocs=2)
    assert first == second and first[0][0] == "ValueError"
    assert "cannot be written: on worker 0, PermissionError: [Errno 13]" in first[0][1]
    assert first[1] == 3
    results = run(few_that_cannot_be_named, str(tmp_path), 2, nprocs=2)
    assert results == [(("", ""), 0)] * 2
    assert {path.name for path in tmp_path.iterdir()} == {f"iteration-0000000{k}" for k in (1, 2)}


class Halving:
    def grad(self, x: Tensor) -> Tensor:
        return x / 2


def from_the_second(folder: str) -> tuple[list[int], float]:
    """The first worker holds no part of the image, and writes nothing of it."""
    with DistributedContext() as ctx:
        second = Layout.whole(ctx.partition.create_partition_inclusive([1]), SHAPE)
        seen: list[int] = []
        for layout, steps in ((second, 2), (None, 4)):
            signal = DistributedSignal(ctx, SHAPE, torch.float64, layout, init=values(3))
            found = solvers.solve(
                solvers.GradientDescent(Halving(), step=1.0), signal, max_iterations=steps,
                checkpoint=solvers.Checkpoint(folder, every=1),
                each=lambda k, x: seen.append(k),
            )  # fmt: skip
        return seen, float((found.x - values(3) / 16).abs().max())


def test_a_run_goes_on_where_the_first_worker_held_nothing(run: Run, tmp_path: Path) -> None:
    assert run(from_the_second, str(tmp_path), nprocs=2) == [([1, 2, 3, 4], 0.0)] * 2


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda data: data[:200],
    "empty": lambda data: b"",
    "too long": lambda data: b"x" + data,
    "flipped": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "flipped in the header": lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:],
    "foreign": lambda data: b"\x08\0\0\0\0\0\0\0{}      ",
    "a pickle": lambda data: pickle.dumps({"notes": 1}) + data,
}


def damaged(folder: str, moves: bool, damage: str, name: str) -> tuple[str, str]:
    layout = layout_of((2, 1))
    keep = solvers.Checkpoint(folder, every=2)
    options: dict[str, Any] = {"max_iterations": 2, "checkpoint": keep}
    method = method_of("PGD", Problem(layout))
    solvers.solve(method, layout.local_part(values(3)), layout=layout, **options)
    tessel.world().group.share_objects(None)
    if tessel.world().rank == 1:
        data = Path(folder, "iteration-00000002", name)
        data.write_bytes(DAMAGES[damage](data.read_bytes()))
    tessel.world().group.share_objects(None)
    layout = layout_of((1, 2)) if moves else layout
    method = method_of("PGD", Problem(layout))
    x = layout.local_part(values(3))
    return text_of(lambda: solvers.solve(method, x, layout=layout, **options))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("moves", "name"), [(False, "__1_0.distcp"), (True, "__1_0.distcp"), (True, ".metadata")]
)
def test_a_damaged_file_raises_on_all_workers(
    run: Run, tmp_path: Path, moves: bool, name: str, damage: str
) -> None:
    """One worker alone finds its file cut short, or each finds it: nobody waits for the other."""
    first, second = run(damaged, str(tmp_path), moves, damage, name, nprocs=2)
    assert first == second and first[0] == "ValueError"
    assert f"the checkpoint in {tmp_path} cannot be read" in first[1] and "on worker " in first[1]
    assert f"{tmp_path}/iteration-00000002/{name}" in first[1]
    assert "pass resume=False, or use another folder" in first[1]


def few_steps(folder: Path) -> solvers.Solution:
    keep = solvers.Checkpoint(folder, every=2)
    method = solvers.GradientDescent(Halving(), step=0.5)
    return solvers.solve(method, values(3), max_iterations=2, checkpoint=keep)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_found(tmp_path: Path, data: st.DataObject) -> None:
    """A flipped bit, or an end that is missing: an error that names the file, or what was kept."""
    want = few_steps(tmp_path)
    path = (
        tmp_path / "iteration-00000002" / data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    )
    right = path.read_bytes()
    damaged, at = bytearray(right), data.draw(st.integers(0, 8 * len(right) - 1))
    damaged[at // 8] ^= 1 << at % 8
    for content in (damaged, right[: at // 8]):
        path.write_bytes(content)
        try:
            assert torch.equal(few_steps(tmp_path).x, want.x)
        except ValueError as error:
            assert str(path) in str(error)
    path.write_bytes(right)


def with_a_folder_that_one_cannot_list(folder: str) -> tuple[str, int]:
    layout = layout_of(None)
    options: dict[str, Any] = {"layout": layout, "max_iterations": 2}
    method, own = solvers.GradientDescent(Halving(), step=1.0), folder
    if tessel.world().rank == 1:
        own += "/" + "x" * 300  # longer than a name can be
    try:
        solvers.solve(method, values(3), checkpoint=solvers.Checkpoint(own), **options)
        text = ""
    except ValueError as error:
        text = str(error)
    keep = solvers.Checkpoint(folder)
    return text, solvers.solve(method, values(3), checkpoint=keep, **options).iterations


def test_all_workers_raise_if_one_cannot_list_the_folder(run: Run, tmp_path: Path) -> None:
    for text, iterations in run(with_a_folder_that_one_cannot_list, str(tmp_path), nprocs=2):
        assert "cannot be read: on worker 1, OSError" in text and iterations == 2


def test_files_without_names_are_no_checkpoint(tmp_path: Path) -> None:
    """A run that was ended before its first checkpoint was complete begins anew."""
    want = few_steps(tmp_path)
    written, name = files_in(tmp_path), "iteration-00000002"
    (tmp_path / name).rename(tmp_path / f".{name}.0123456789ab")
    assert torch.equal(few_steps(tmp_path).x, want.x)
    assert files_in(tmp_path) == written


@pytest.mark.parametrize(
    "name", ["iteration-00000009", "iteration-00000002", ".iteration-00000001.0"]
)
def test_plain_files_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    """They are not read, and what is in the way of a generation is removed."""
    (tmp_path / name).write_text("not a checkpoint")
    want = few_steps(tmp_path)
    assert want.iterations == 2
    assert (tmp_path / "iteration-00000002" / ".metadata").exists()
    for resume in (True, False):
        keep = solvers.Checkpoint(tmp_path, resume=resume)
        method = solvers.GradientDescent(Halving(), step=0.5)
        x = solvers.solve(method, values(3), max_iterations=2, checkpoint=keep).x
        assert torch.equal(x, want.x)


def further_than_wanted(folder: str) -> str:
    method = solvers.GradientDescent(Problem(layout_of(None)), step=0.3)
    call = {"layout": layout_of(None), "checkpoint": solvers.Checkpoint(folder)}
    solvers.solve(method, values(3), max_iterations=5, **call)
    with pytest.raises(ValueError) as caught:
        solvers.solve(method, values(3), max_iterations=3, **call)
    return str(caught.value)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_checkpoint_is_further_than_wanted(run: Run, tmp_path: Path, nprocs: int) -> None:
    for text in run(further_than_wanted, str(tmp_path), nprocs=nprocs):
        assert text.startswith("max_iterations=3, but the checkpoint in ")
        assert "is at iteration 5; pass 5 or more" in text


def test_tessel_and_torch_read_it(tmp_path: Path) -> None:
    """A generation is a checkpoint of torch.distributed.checkpoint, of whole tensors."""
    want = few_steps(tmp_path)
    folder = tmp_path / "iteration-00000002"
    assert torch.equal(tessel.load(folder)["values"]["x"], want.x)
    state = {"values": {"x": torch.empty(SHAPE, dtype=torch.float64)}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder)
    assert torch.equal(state["values"]["x"], want.x)


class Measured:
    """A problem with measurements of its own."""

    def __init__(self, seed: int) -> None:
        self.measurements = values(seed)

    def grad(self, x: Tensor) -> Tensor:
        return x - self.measurements


def with_other_measurements(folder: str) -> tuple[str, str]:
    layout = layout_of(None)
    keep = solvers.Checkpoint(folder, every=1)
    options: dict[str, Any] = {"layout": layout, "checkpoint": keep}
    for _ in range(2):  # the same ones, in other objects, and another step: it resumes
        method = solvers.GradientDescent(Measured(1), step=0.5)
        solvers.solve(method, values(3), max_iterations=2, **options)
    method = solvers.GradientDescent(Measured(1), step=0.25)
    assert solvers.solve(method, values(3), max_iterations=3, **options).iterations == 3
    method = solvers.GradientDescent(Measured(2), step=0.5)
    return text_of(lambda: solvers.solve(method, values(3), max_iterations=4, **options))


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_checkpoint_of_other_measurements_is_refused(
    run: Run, tmp_path: Path, nprocs: int
) -> None:
    """Else a run would end at once, with the image of another problem."""
    for kind, text in run(with_other_measurements, str(tmp_path), nprocs=nprocs):
        assert (
            kind == "ValueError" and "belongs to another problem: on worker 0, the checksum" in text
        )


def on_a_full_disk(folder: str) -> tuple[str, str]:
    """The second worker cannot write."""
    layout = layout_of((2, 1))
    own = folder if tessel.world().rank == 0 else "/dev/null/absent"
    keep = solvers.Checkpoint(own, every=1)
    return text_of(
        lambda: solvers.solve(
            method_of("PGD", Problem(layout)), layout.local_part(values(3)), layout=layout,
            max_iterations=2, checkpoint=keep,
        )
    )  # fmt: skip


def test_a_worker_that_cannot_write_ends_all(run: Run, tmp_path: Path) -> None:
    for kind, text in run(on_a_full_disk, str(tmp_path), nprocs=2):
        assert kind == "ValueError" and "cannot be written: on worker 1, NotADirectory" in text
    assert not list(tmp_path.iterdir())


# --- gradients through all iterations


def unrolled(name: str, grid: tuple[int, int] | None) -> float:
    """The gradients of the start and of the measurements, against one process."""
    layout = layout_of(grid)
    problem = Problem(layout)
    start = layout.local_part(values(3)).clone().requires_grad_()
    problem.measured.requires_grad_()  # both measurements are made of it, the second of zeros
    weights = values(8)
    found = solvers.solve(
        method_of(name, problem), start, layout=layout, max_iterations=4, differentiable=True
    )
    found.x.backward(layout.local_part(weights))
    whole = Reference()
    x = values(3).requires_grad_()
    whole.measured.requires_grad_()
    want = once(name, whole, x)
    want.backward(weights)
    errors = [0.0]
    pairs = ((start.grad, x.grad), (problem.measured.grad, whole.measured.grad))
    for mine, theirs in pairs:
        assert mine is not None and theirs is not None
        errors.append(float((mine - layout.local_part(theirs)).abs().max()))
    return max(errors)


def once(name: str, r: Reference, x: Tensor) -> Tensor:
    """Four iterations that autograd follows, in one process."""
    if name in ("CG", "CGLS"):
        rhs = r.mask * r.measured
        rest = rhs - r.hessian(x)
        along, square = rest, (rest * rest).sum()
        for _ in range(4):
            image = r.hessian(along)
            by = square / (along * image).sum()
            x, rest = x + by * along, rest - by * image
            new = (rest * rest).sum()
            along, square = rest + new / square * along, new
        return x
    for k in range(4):
        x = r.denoise(x - step_at(k) * r.grad(x), SIGMAS[k % 3])
    return x


@pytest.mark.parametrize(("nprocs", "grid"), [(1, None), (2, None), (2, (1, 2)), (4, (2, 2))])
@pytest.mark.parametrize("name", ["PGD", "CG", "CGLS"])
def test_gradients(run: Run, name: str, nprocs: int, grid: tuple[int, int] | None) -> None:
    assert max(run(unrolled, name, grid, nprocs=nprocs)) < 1e-10


class Dense(torch.nn.Module):
    """A matrix on the pixels of an image."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(5, 4, generator=generator, dtype=torch.float64)
        self.matrix = torch.nn.Parameter(numbers)

    def A(self, x: Tensor) -> Tensor:
        return x.reshape(1, 4) @ self.matrix.T

    def A_adjoint(self, y: Tensor) -> Tensor:
        return (y @ self.matrix).reshape(1, 1, 2, 2)


def learned_least_squares(grid: str) -> list[float]:
    """The gradients of three operators and of the measurements, through CGLS over them."""
    with DistributedContext() as ctx:
        operators = [Dense(seed) for seed in range(3)]
        numbers = [torch.linspace(k, 2, 5, dtype=torch.float64)[None] for k in range(3)]
        ys = [each.clone().requires_grad_() for each in numbers]
        shape = (1, 1, 2, 2)
        partition: Any = None
        if grid == "parts":
            partition = (ctx.world_size, 1)
        elif grid == "operators":
            P = ctx.partition.create_cartesian_topology_partition((2, ctx.world_size // 2))
            partition = operator_grid(P, shape)
        config = FactoryConfig(physics=operators, measurements=ys)
        b = make_distrib_bundle(
            ctx, factory_config=config, signal_shape=shape, dtype=torch.float64, partition=partition
        )
        method = solvers.CGLS(b.physics, b.measurements, damping=0.1)
        found = solvers.solve(method, b.signal, max_iterations=2, differentiable=True)
        found.x.pow(3).sum().backward()
        return [0.0 if p.grad is None else float(p.grad.sum())
                for p in (*(each.matrix for each in operators), *ys)]  # fmt: skip


@pytest.mark.parametrize(
    ("nprocs", "grid"),
    [(2, "whole"), (4, "whole"), (2, "parts"), (2, "operators"), (4, "operators")],
)
def test_gradients_through_measurements_of_workers(run: Run, nprocs: int, grid: str) -> None:
    (expected,) = run(learned_least_squares, "whole", nprocs=1)
    results = run(learned_least_squares, grid, nprocs=nprocs)
    for k, wanted in enumerate(expected):
        mine = [found[k] for found in results if found[k]]
        assert mine and max(abs(each - wanted) for each in mine) < 1e-10


def test_there_is_no_graph_by_default() -> None:
    start = values(3).requires_grad_()
    found = solvers.solve(method_of("PGD", Problem(layout_of(None))), start, max_iterations=2)
    assert not found.x.requires_grad


# --- bad numbers

NUMBERS: list[tuple[str, dict[str, Any]]] = [
    ("GradientDescent", {"step": 0.0}),
    ("GradientDescent", {"step": -1.0}),
    ("GradientDescent", {"step": math.nan}),
    ("GradientDescent", {"step": "1"}),
    ("GradientDescent", {"weight": -1.0}),
    ("GradientDescent", {"weight": 2.0}),  # of no prior
    ("GradientDescent", {"prior_arguments": {"sigma": 1.0}}),
    ("CondatVu", {"prior_arguments": {"sigma": 1.0}}),
    ("ChambollePock", {"prior_arguments": {"sigma": 1.0}}),
    ("RED", {"prior": None}),
    ("PGD", {"step": math.inf}),
    ("PGD", {"weight": -0.5}),
    ("FISTA", {"inertia": 2.0}),
    ("HQS", {"inner_iterations": 0}),
    ("HQS", {"inner_iterations": 1.5}),
    ("ADMM", {"relaxation": 0.0}),
    ("CGLS", {"damping": -1.0}),
    ("CondatVu", {"weight": -1.0}),
    ("CondatVu", {"dual_step": 0.0}),
    ("ChambollePock", {"step": 0.0}),
    ("RelativeChange", {"limit": 0.0}),
    ("Below", {"name": "change", "limit": -1.0}),
    ("Plateau", {"name": "psnr", "patience": 0}),
    ("Plateau", {"name": "psnr", "margin": -1.0}),
    ("TimeLimit", {"seconds": 0}),
    ("Checkpoint", {"folder": "x", "every": 0}),
]
FIRST = {
    "GradientDescent": ("fidelity",), "RED": ("fidelity",), "PGD": ("fidelity", "prior"),
    "FISTA": ("fidelity", "prior"), "HQS": ("fidelity", "prior"), "ADMM": ("fidelity", "prior"),
    "CGLS": ("physics", "measurements"), "CondatVu": ("fidelity",), "ChambollePock": ("fidelity",),
}  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), NUMBERS)
def test_bad_numbers_are_refused_where_they_are_given(name: str, settings: dict[str, Any]) -> None:
    number = list(settings.values())[-1]
    with pytest.raises(ValueError, match=name) as error:
        getattr(solvers, name)(*(None for _ in FIRST.get(name, ())), **settings)
    assert repr(number) in str(error.value) or str(number) in str(error.value)


def test_other_bad_input() -> None:
    problem = Problem(layout_of(None))
    method = method_of("gradient descent", problem)
    with pytest.raises(ValueError, match="max_iterations must be a whole number of 0 or more"):
        solvers.solve(method, values(3), max_iterations=-1)
    with pytest.raises(ValueError, match=r"floating point or complex numbers, got torch.int64"):
        solvers.solve(method, torch.zeros(SHAPE, dtype=torch.int64))
    with pytest.raises(TypeError, match="expected a tensor or a DistributedSignal, got"):
        solvers.solve(method, [1.0])
    with pytest.raises(ValueError, match="dual_step"):
        solvers.CondatVu(problem, operator=problem.differ)
    with pytest.raises(ValueError, match="takes no prior"):
        solvers.ChambollePock(problem, prior=L1())
    with pytest.raises(ValueError, match="must be finite and not zero"):
        solvers.power_iteration(problem.hessian, torch.zeros(SHAPE).double())
    with pytest.raises(ValueError, match="step of iteration 1 must be a number above 0, got -1"):
        solvers.solve(solvers.GradientDescent(problem, lambda k: 1 - 2 * k), values(3))
    with pytest.raises(ValueError, match="operator must be positive"):
        solvers.solve(solvers.CG(lambda x: -x, values(1)), values(3))
    with pytest.raises(KeyError, match="no 'loss'; it has change, seconds"):
        solvers.solve(method, values(3), stop=solvers.Below("loss", 1.0))
    assert torch.equal(solvers.solve(method, values(3), max_iterations=0).x, values(3))


def test_a_fidelity_that_is_not_quadratic_needs_its_own_prox() -> None:
    class Quartic:
        def grad(self, x: Tensor) -> Tensor:
            return x**3

    class WithProx(Quartic):
        def prox(self, x: Tensor, gamma: float) -> Tensor:
            return x / (1 + gamma)

    with pytest.raises(ValueError, match="Quartic: its gradient is not that of a quadratic"):
        solvers.solve(solvers.HQS(Quartic(), L1(), weight=0.1), values(3))
    found = solvers.solve(solvers.HQS(WithProx(), L1(), weight=0.0), values(3), max_iterations=1)
    torch.testing.assert_close(found.x, values(3) / 2)


def at_the_solution(name: str) -> float:
    """Conjugate gradients that begin at the solution stay there, without 0 / 0."""
    p = Problem(layout_of(None))
    zero = torch.zeros(SHAPE).double()
    p.measured = zero
    return float(solvers.solve(method_of(name, p), zero, max_iterations=3).x.abs().max())


@pytest.mark.parametrize("name", ["CG", "CGLS"])
def test_nothing_is_left_to_do(name: str) -> None:
    assert at_the_solution(name) == 0


def spoil(change: str) -> tuple[str, str]:
    layout = layout_of((2, 1))
    problem = Problem(layout)
    start = layout.local_part(values(3)).clone()
    options: dict[str, Any] = {"layout": layout}
    if tessel.world().rank == 1:
        if change == "nan":
            start[0, 0, 0, 0] = math.nan
        elif change == "shape":
            start = start[:1]
    method = method_of("gradient descent", problem)
    if change == "diverge":
        method = solvers.GradientDescent(problem, step=1e30)
    if change == "no layout":
        options = {}
    if change == "separate":
        options = {"layout": Layout.whole(tessel.world(), SHAPE)}
        start = values(3)
    return text_of(lambda: solvers.solve(method, start, **options))


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ("nan", "FloatingPointError", "not finite after iteration 1"),
        ("diverge", "FloatingPointError", "a smaller step may help"),
        ("shape", "ValueError", "got (1, 1, 3, 9)"),
        ("no layout", "ValueError", "how it is split over 2 workers"),
        ("separate", "ValueError", "one value for each index"),
    ],
)
def test_all_workers_raise_the_same(run: Run, change: str, kind: str, text: str) -> None:
    results = run(spoil, change, nprocs=2, timeout=20)
    assert results[0] == results[1]
    assert results[0][0] == kind and text in results[0][1]


def call_outside() -> str:
    """What a worker that has no part of a tensor is told when it calls solvers, too."""
    P = tessel.world().create_partition_inclusive([0, 1])
    layout = Layout.balanced(P.create_cartesian_topology_partition([1, 1, 2, 1]), SHAPE)
    start = layout.local_part(values(3))
    double = lambda x: 2 * x  # noqa: E731
    texts = set()
    for call in (
        lambda: solvers.power_iteration(double, start, layout=layout),
        lambda: solvers.PSNR(start, layout),
        lambda: solvers.solve(solvers.CG(double, start), start, layout=layout, max_iterations=2),
    ):
        texts.add(text_of(call)[1])
    return texts.pop() if len(texts) == 1 else ""


def test_a_worker_without_a_part_is_told_and_waits_for_nobody(run: Run) -> None:
    first, second, outside = run(call_outside, nprocs=3, timeout=20)
    assert first == second == ""
    assert "this worker is not one of Partition(1×1×2×1 on workers 0, 1)" in outside


def test_a_signal_has_its_own_layout() -> None:
    with DistributedContext() as ctx:
        signal = DistributedSignal(ctx, SHAPE, torch.float64)
        solvers.Space.of(signal, signal.layout)
        with pytest.raises(ValueError, match="a signal has a layout of its own"):
            solvers.PSNR(signal, layout_of((1, 1)))


# --- with deepinv's operators, on signals


def deepinv_problem(name: str = "") -> tuple[list[Any], Tensor, list[Tensor]]:
    """Three blurs; for methods with the prox of f one, whose prox is a formula in deepinv."""
    import deepinv

    kernels = [values(seed, (1, 1, 3, 3)).abs() for seed in (1, 2, 3)]
    physics = [
        deepinv.physics.Blur(filter=kernel / kernel.sum(), padding="circular") for kernel in kernels
    ]
    truth = values(4, (1, 2, 12, 10))
    if name in ("HQS", "ADMM"):
        kernel = kernels[0] / kernels[0].sum()
        physics = [deepinv.physics.BlurFFT(img_size=truth.shape[1:], filter=kernel)]
    measured = [each.A(truth) + 0.1 * values(k, truth.shape) for k, each in enumerate(physics)]
    return physics, truth, measured


def deepinv_method(name: str, fidelity: Any, prior: Any) -> solvers.Method:
    if name == "GD":
        return solvers.GradientDescent(fidelity, step=0.3)
    kind = {"PGD": solvers.PGD, "HQS": solvers.HQS, "ADMM": solvers.ADMM}[name]
    return kind(fidelity, prior, step=0.3, weight=0.1)


@lru_cache
def by_deepinv(name: str) -> Tensor:
    """Deepinv's own algorithm on the stacked operators, in one process."""
    import deepinv

    physics, truth, measured = deepinv_problem(name)
    prior = deepinv.optim.prior.L1Prior() if name != "GD" else deepinv.optim.prior.ZeroPrior()
    fidelity, A, y = deepinv.optim.L2(), physics[0], measured[0]
    if len(physics) > 1:
        fidelity = deepinv.optim.StackedPhysicsDataFidelity([fidelity] * len(physics))
        A, y = deepinv.physics.stack(*physics), deepinv.utils.TensorList(measured)
    model = getattr(deepinv.optim, name)(
        data_fidelity=fidelity, prior=prior, stepsize=0.3, lambda_reg=0.1, max_iter=6,
        early_stop=False,
    )  # fmt: skip
    zero = torch.zeros_like(truth)
    return model(y, A, init=(zero, zero) if name == "ADMM" else zero).detach()


def on_signal(name: str, partition: tuple[int, int] | None) -> Tensor:
    import deepinv

    physics, truth, measured = deepinv_problem(name)
    with DistributedContext() as ctx:
        bundle = make_distrib_bundle(
            ctx,
            factory_config=FactoryConfig(
                physics=physics, measurements=measured, data_fidelity=deepinv.optim.L2()
            ),
            signal_shape=truth.shape,
            dtype=truth.dtype,
            reduction="sum",
            partition=partition,
        )
        if name == "CGLS":
            method: solvers.Method = solvers.CGLS(bundle.physics, bundle.measurements, damping=0.1)
        else:
            prior = deepinv.optim.prior.L1Prior()
            method = deepinv_method(name, bundle.data_fidelity, prior)
        found = solvers.solve(method, bundle.signal, max_iterations=60 if name == "CGLS" else 6)
        if bundle.signal.layout.partition.active:
            assert torch.equal(bundle.signal.data, found.x)  # a copy of it
        return bundle.signal.whole()


# on three workers, one has no part of the image
SIGNALS = [(1, None), (2, None), (4, None), (4, (2, 2)), (2, (2, 1)), (3, (2, 1))]


@pytest.mark.parametrize(("nprocs", "partition"), SIGNALS)
def test_parity_with_deepinv(run: Run, nprocs: int, partition: tuple[int, int] | None) -> None:
    for name in ("GD", "PGD", "HQS", "ADMM"):
        want = by_deepinv(name)
        for found in run(on_signal, name, partition, nprocs=nprocs):
            assert float((found - want).abs().max()) < 1e-10, name


@pytest.mark.parametrize(("nprocs", "partition"), SIGNALS)
def test_least_squares_of_blurs(run: Run, nprocs: int, partition: tuple[int, int] | None) -> None:
    """The solution of (Σ AᵢᵀAᵢ + 0.1) x = Σ Aᵢᵀ yᵢ; on four workers one has no operator."""
    physics, _, measured = deepinv_problem()
    for found in run(on_signal, "CGLS", partition, nprocs=nprocs):
        rest = -0.1 * found
        for each, y in zip(physics, measured, strict=True):
            rest = rest + each.A_adjoint(y - each.A(found))
        assert float(rest.abs().max()) < 1e-10
