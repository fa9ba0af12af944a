"""A user's program, which `mypy --strict` accepts: the types of what is public are of use.

`make types` checks it, and `tests/test_typed_user.py` runs it. `assert_type` says what a user sees.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import nn

import tessel
from tessel import Layout, LinearOperator, Move, Partition
from tessel.imaging import DistributedContext, FactoryConfig, make_distrib_bundle, solvers
from tessel.models import FNO


class Halved(LinearOperator):
    """An operator of a user's own."""

    def __init__(self, layout: Layout) -> None:
        self.domain = self.codomain = layout

    def _apply(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    def _apply_adjoint(self, y: torch.Tensor) -> torch.Tensor:
        return y / 2


class Mirror:
    """A physics of a user's own."""

    def A(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1)

    def A_adjoint(self, y: torch.Tensor) -> torch.Tensor:
        return y.flip(-1)


def move(P: Partition) -> torch.Tensor:
    rows = Layout.balanced(P.create_cartesian_topology_partition([P.size, 1]), [6, 4])
    columns = Layout.balanced(P.create_cartesian_topology_partition([1, P.size]), [6, 4])
    across = Move(rows, columns)
    assert_type(across.H, Move)
    product = Halved(columns) @ across
    tessel.testing.check_adjoint(product)
    y = product(torch.ones(rows.local_shape, dtype=torch.float64))
    assert_type(y, torch.Tensor)
    return tessel.all_gather(y, columns.partition)


def train(P: Partition) -> float:
    grid = P.create_cartesian_topology_partition([1, 1, P.size, 1])
    torch.manual_seed(0)
    model = tessel.nn.distribute_module(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), grid)
    layer = tessel.nn.DistributedConv2d(grid, 2, 1, kernel_size=3, padding=1)
    x = tessel.spread(torch.ones(1, 1, 8, 8), grid)
    assert_type(x, tessel.Tensor)
    y: torch.Tensor = layer(model(x))
    loss = y.square().mean()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's, which has no types here
    return loss.item()


def classify() -> torch.Tensor:
    head = tessel.nn.ParallelLinear(4, 10, dim=-1)
    loss = tessel.nn.ParallelCrossEntropyLoss()
    value: torch.Tensor = loss(head(torch.ones(2, 4)), torch.tensor([1, 2]))
    return value


def transform(P: Partition) -> torch.Tensor:
    F = tessel.kron(tessel.ParDFT(torch.complex64, 4), tessel.ParDFT(torch.float32, 6))
    spread = tessel.distribute(F, [P.size, 1])
    assert isinstance(spread, tessel.operators.Distributed)  # of a ParReduce alone it is not
    x = torch.ones(spread.layout_in.local_shape)
    y: torch.Tensor = spread * x
    back: torch.Tensor = spread.inv * y
    return back


def predict(P: Partition) -> torch.Size:
    grid = P.create_cartesian_topology_partition([1, 1, P.size, 1])
    model = FNO(grid, 1, 1, width=2, modes=2, blocks=1)
    y: torch.Tensor = model(torch.ones(Layout.balanced(grid, [1, 1, 8, 8]).local_shape))
    return y.shape


def reconstruct() -> torch.Tensor:
    with DistributedContext(device_mode="cpu") as ctx:
        bundle = make_distrib_bundle(
            ctx,
            factory_config=FactoryConfig(physics=[Mirror()], measurements=[torch.ones(1, 1, 4, 4)]),
            signal_shape=(1, 1, 4, 4),
        )
        method = solvers.GradientDescent(bundle.data_fidelity, step=0.5)
        found = solvers.solve(method, bundle.signal, max_iterations=3)
        assert_type(found, solvers.Solution)
        assert_type(found.x, torch.Tensor)
        return found.x


def main() -> dict[str, Any]:
    P = tessel.world()
    assert_type(P, Partition)
    return {
        "moved": move(P),
        "loss": train(P),
        "classified": classify().item(),
        "transformed": transform(P),
        "predicted": tuple(predict(P)),
        "reconstructed": reconstruct(),
    }


if __name__ == "__main__":
    results = tessel.launch(main, 2)
    assert_type(results, list[dict[str, Any]])
    print(*results, sep="\n")
