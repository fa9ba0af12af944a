"""What people train, on any device: the workers give what one process gives on the CPU.

`tests/cuda` runs these on NCCL workers, and `test_kinds_of_models.py` on CPU workers as well.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tessel
from parity import close, values
from tessel import Layout
from tessel.imaging import solvers
from tessel.nn.parallel.cross_entropy import parallel_cross_entropy
from tessel.tensor.rules import attention, attention_plan

TOLERANCE = 1e-10
WAYS = ("heads", "queries", "gather", "ring")
WIDTH, HEADS, WORDS = 8, 4, 11


def row(*dims: int) -> tessel.Partition:
    """All workers along the dimension that is given as -1."""
    size = tessel.world().size
    return tessel.world().create_cartesian_topology_partition(
        [size if dim < 0 else dim for dim in dims]
    )


def compare(
    alone: Callable[[Tensor], Tensor],
    spread: Callable[[Any], Any],
    parameters: tuple[nn.Module, nn.Module],
    x: Tensor,
    layout: Layout,
    device: str,
) -> None:
    """Outputs, and gradients of the input and of all parameters."""
    whole = x.clone().requires_grad_()
    part = layout.local_part(x).to(device).requires_grad_()
    expected, got = alone(whole), spread(tessel.Tensor(part, layout))
    close("output", got.full().detach().cpu(), expected.detach(), TOLERANCE)
    weights = values(tuple(expected.shape), 5)
    (expected * weights).sum().backward()
    (got * weights.to(device)).sum().backward()
    assert part.grad is not None and whole.grad is not None
    assert part.grad.device.type == device
    close("gradient", part.grad.cpu(), layout.local_part(whole.grad), TOLERANCE)
    for p, q in zip(*(each.parameters() for each in parameters), strict=True):
        assert p.grad is not None and q.grad is not None
        close("gradient of a parameter", q.grad.cpu(), p.grad, TOLERANCE)


def check_parallel_head(device: str) -> None:
    """A language model's head with its classes in shards, and its loss, without whole logits."""
    torch.manual_seed(0)
    body, head = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WORDS).double()
    ours, split = copy.deepcopy(body).to(device), copy.deepcopy(head)
    split = tessel.nn.ParallelLinear.convert_parallel_linear(split, -1).to(device)
    x, target = values((6, WIDTH), 3), torch.arange(6) * 5 % WORDS
    expected = F.cross_entropy(head(body(x).tanh()), target)
    logits = split(ours(x.to(device)).tanh())
    got = parallel_cross_entropy(logits, target.to(device))
    assert got.device.type == device
    close("loss", got.detach().cpu(), expected.detach(), TOLERANCE)
    expected.backward()
    got.backward()
    for p, q in zip(body.parameters(), ours.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        close("gradient before the head", q.grad.cpu(), p.grad, TOLERANCE)
    for p, q in zip(head.parameters(), split.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        rows = Layout.split(tessel.world(), p.shape, [0, None][: p.dim()])
        close("gradient of the head", q.grad.cpu(), rows.local_part(p.grad), TOLERANCE)


class Quadratic:
    """½‖M x - y‖² + ½‖D x‖², D the differences of neighbours; with a shrinking prox beside it."""

    def __init__(self, layout: Layout, device: str) -> None:
        mask, measured = values(layout.shape, 1).abs() + 0.3, values(layout.shape, 2)
        self.mask, self.measured = (
            layout.local_part(each).clone().to(device) for each in (mask, measured)
        )
        self.differences = solvers.differences(layout)

    def hessian(self, x: Tensor) -> Tensor:
        return self.mask**2 * x + self.differences.A_adjoint(self.differences.A(x))

    def grad(self, x: Tensor) -> Tensor:
        return self.hessian(x) - self.mask * self.measured

    def prox(self, x: Tensor, gamma: float) -> Tensor:
        return F.softshrink(x, 0.1 * gamma)


def whole_hessian(x: Tensor) -> Tensor:
    """The same in plain torch."""
    mask = values(tuple(x.shape), 1).abs() + 0.3
    down, right = (torch.zeros_like(x) for _ in range(2))
    down[..., :-1, :] = x[..., 1:, :] - x[..., :-1, :]
    right[..., :-1] = x[..., 1:] - x[..., :-1]
    back = -down - right
    back[..., 1:, :] += down[..., :-1, :]
    back[..., 1:] += right[..., :-1]
    return mask**2 * x + back


def check_solvers(device: str) -> None:
    """Conjugate gradients reach the solution; others iterate on this device as on the CPU."""
    layout = Layout.balanced(row(1, 1, -1, 1), (1, 1, 6, 5))
    problem = Quadratic(layout, device)
    unit = torch.eye(30, dtype=torch.float64).reshape(30, 1, 1, 6, 5)
    dense = torch.stack([whole_hessian(each).flatten() for each in unit], 1)
    right = (values(layout.shape, 1).abs() + 0.3) * values(layout.shape, 2)
    exact = torch.linalg.solve(dense, right.flatten()).reshape(layout.shape)

    def solved(p: Quadratic, method: solvers.Method, steps: int) -> Tensor:
        start = torch.zeros_like(p.measured)
        return solvers.solve(method, start, max_iterations=steps, layout=layout).x

    found = solved(problem, solvers.CG(problem.hessian, problem.mask * problem.measured), 60)
    assert found.device.type == device
    close("CG", found.cpu(), layout.local_part(exact), 1e-9)  # after all of its iterations
    on_cpu = Quadratic(layout, "cpu")
    for make in (
        lambda p: solvers.FISTA(p, p, step=0.1, weight=0.4),
        lambda p: solvers.CondatVu(p, step=0.1, weight=0.2),
    ):
        close(
            "solver", solved(problem, make(problem), 8).cpu(), solved(on_cpu, make(on_cpu), 8), 1e-9
        )


class Blocks(nn.Module):
    """Two blocks with norms, of which torch recomputes what lies inside."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.GELU())
            for _ in range(2)
        )
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, self.second):
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def check_checkpoint(device: str) -> None:
    for reentrant in (False, True):
        torch.manual_seed(0)
        alone = Blocks(None).double()
        spread = Blocks(reentrant).double()
        spread.load_state_dict(alone.state_dict())
        P = row(1, 1, -1, 1)
        spread = tessel.nn.distribute_module(spread.to(device), P)
        x = values((2, 2, 9, 6), 3)
        compare(alone, spread, (alone, spread), x, Layout.balanced(P, x.shape), device)


def check_empty_parts(device: str) -> None:
    """Fewer rows than workers: some of them have no values, and take part all the same."""
    P = row(1, 1, -1, 1)
    rows = max(1, P.size - 1)
    torch.manual_seed(0)
    alone = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 1)
    ).double()
    spread = tessel.nn.distribute_module(copy.deepcopy(alone).to(device), P)
    x = values((2, 2, rows, 6), 3)
    layout = Layout.balanced(P, x.shape)
    assert P.size == 1 or 0 in tessel.world().group.share_objects(layout.local_part(x).numel())
    compare(alone, spread, (alone, spread), x, layout, device)


@contextmanager
def only(way: str) -> Iterator[list[str]]:
    """Where there is a choice, attention is computed in this way; the list has what was chosen."""
    chosen: list[str] = []
    before, most = attention.ways_of, attention_plan.GATHERED

    def ways_of(*args: Any, **settings: Any) -> Any:
        found = sorted(before(*args, **settings), key=lambda each: each.way != way)
        chosen.append(found[0].way)
        return tuple(found)

    attention.ways_of, attention_plan.GATHERED = ways_of, 1 << 30
    try:
        yield chosen
    finally:
        attention.ways_of, attention_plan.GATHERED = before, most


class Causal(nn.Module):
    """A block as language models have it, each token from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in self.inner(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def check_attention(device: str) -> None:
    """A causal block in every way in which its sequence can be split, and torch's encoder."""
    P = row(1, -1, 1)
    x = values((2, 3 * P.size + 1, WIDTH), 3)
    layout = Layout.balanced(P, x.shape)
    layer = functools.partial(nn.TransformerEncoderLayer, WIDTH, HEADS, 16, 0.0, batch_first=True)
    makers: list[tuple[str, Callable[[], nn.Module]]] = [(way, Causal) for way in WAYS]
    for way, make in (*makers, ("ring", layer)):
        torch.manual_seed(0)
        alone = make().double()
        spread = tessel.nn.distribute_module(copy.deepcopy(alone).to(device), P)
        with only(way) as chosen:
            compare(alone, spread, (alone, spread), x, layout, device)
        # queries travel where they are few
        assert P.size == 1 or way == "queries" or {*chosen} == {way}, (way, chosen)


CHECKS = (check_parallel_head, check_solvers, check_checkpoint, check_empty_parts, check_attention)


def check_all(device: str) -> None:
    for check in CHECKS:
        check(device)
