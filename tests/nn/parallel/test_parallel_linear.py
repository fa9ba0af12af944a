"""Linear layers with weights in shards give what torch's own layer gives in one process.

Tests `nn/parallel/linear.py`, `nn/parallel/sharded.py`, `nn/parallel/convert.py`,
`nn/parallel/drawing.py`, `nn/functional.py`, `nn/init.py`.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tessel
import tessel.distributed as parallel
from parity import close, values, vjps
from tessel import Layout, Partition, transport
from tessel.core.move import Move
from tessel.distributed.shards import Sharding, as_plain, as_shard, sharding_of
from tessel.nn.functional import parallel_linear
from tessel.nn.init import shard_init_helper_
from tessel.nn.parallel import ParallelEmbedding, ParallelLinear
from tessel.nn.parallel.drawing import layout_of, shard_layout
from tessel.testing import count_memory, count_traffic
from tessel.transport.host import MOST_WRITTEN
from windowed_cases import raised

Run = Callable[..., list[Any]]
WIDTH = 8  # bytes of a float64
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.complex128: 1e-12}


@dataclass(frozen=True)
class Case:
    """A layer, the shape of its input without the features, and where the input lies."""

    dim: int | None
    inputs: int
    outputs: int
    lead: tuple[int, ...] = (5,)
    bias: bool = True
    sharded: bool = False  # the input is a shard, for rows
    dtype: torch.dtype = torch.float64

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, self.inputs)


SIZES = [(6, 4), (9, 3), (3, 9), (1, 1), (4, 1), (1, 5), (8, 8)]
LEADS: list[tuple[int, ...]] = [(), (5,), (2, 3), (0,), (2, 0)]
CASES = [
    Case(dim, inputs, outputs, lead, bias, sharded)
    for dim, sharded in ((None, False), (1, False), (-1, False), (0, False), (0, True))
    for inputs, outputs in SIZES
    for lead, bias in ((LEADS[(inputs + outputs) % 5], True), (LEADS[inputs % 3], False))
]
CASES += [
    Case(dim, 9, 7, lead, True, sharded, dtype)
    for dim, sharded in ((1, False), (0, False), (0, True))
    for lead in LEADS
    for dtype in (torch.float32, torch.float64, torch.complex128)
]


def group(pairs: bool) -> Partition:
    """All workers, or this worker's pair among them."""
    if not pairs:
        return tessel.world()
    found = [Partition((k, k + 1), (2,)) for k in range(0, tessel.world().size, 2)]
    return next(pair for pair in found if pair.active)


def data(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    x = values(shape, seed)
    return torch.complex(x, values(shape, seed + 50)) if dtype.is_complex else x.to(dtype)


def part(layer: ParallelLinear, name: str, whole: Tensor) -> Tensor:
    """This worker's part of a whole parameter or its gradient."""
    return layer.layouts[name].local_part(whole) if layer.layouts else whole


def whole_of(y: Tensor) -> Tensor:
    return y if parallel.get_parallel_dim(y) is None else parallel.gather(y)


def check(case: Case, P: Partition, seed: int) -> None:
    torch.manual_seed(seed)
    alone = torch.nn.Linear(case.inputs, case.outputs, case.bias, dtype=case.dtype)
    torch.manual_seed(seed)
    layer = ParallelLinear(
        case.inputs, case.outputs, case.bias, case.dim, dtype=case.dtype, partition=P
    )
    tolerance = TOLERANCE[case.dtype]
    for name, parameter in alone.named_parameters():
        assert torch.equal(getattr(layer, name), part(layer, name, parameter)), name
    whole = data(case.shape, seed, case.dtype).requires_grad_()
    x = whole.detach().clone().requires_grad_()
    given = parallel.scatter(x, -1, P) if case.sharded else x
    expected, got = alone(whole), layer(given)
    shard = None if case.dim in (None, 0) else Sharding(got.ndim - 1, P, case.outputs)
    assert sharding_of(got) == shard
    got = whole_of(got)
    close("output", got, expected, tolerance)
    weights = data(tuple(expected.shape), 99, case.dtype)
    if case.dtype.is_complex:
        expected, got, weights = expected.abs(), got.abs(), weights.abs()
    for order in (1, 2):
        expected = vjps(expected, weights, [whole, *alone.parameters()], order)
        got = vjps(got, weights, [x, *layer.parameters()], order)
        names = ["input", *(name for name, _ in alone.named_parameters())]
        for name, a, b in zip(names, got, expected, strict=True):
            b = b if name == "input" else part(layer, name, b)
            close(f"gradient of order {order} of the {name}", a, b, tolerance * 10**order / 10)
        expected, got, weights = expected[0], got[0], whole.detach()
        if case.dtype.is_complex:
            break


def check_all(cases: list[Case], pairs: bool) -> None:
    P = group(pairs)
    for number, case in enumerate(cases):
        try:
            check(case, P, number + 100 * P.ranks[0])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


@pytest.mark.parametrize(
    ("nprocs", "pairs"), [(1, False), (2, False), (3, False), (4, False), (4, True)]
)
def test_all_equals_one_process(run: Run, nprocs: int, pairs: bool) -> None:
    """Values, output, gradients of first and second order; sizes even and uneven, also empty.

    Second order sums squares of sums of first order, and gets ten times the tolerance.
    """
    run(check_all, CASES, pairs, nprocs=nprocs, timeout=100)


def draw() -> tuple[list[Tensor], list[Tensor]]:
    """Unequal seeds: the parameters are those of the first worker's seed."""
    P = tessel.world()
    torch.manual_seed(100 + (P.rank or 0))
    layers = [ParallelLinear(7, 9, dim=dim) for dim in (0, 1, None)]
    after = torch.rand(3)
    torch.manual_seed(100)
    expected = [torch.nn.Linear(7, 9) for _ in range(3)]
    for layer, alone in zip(layers, expected, strict=True):
        for name, value in alone.named_parameters():
            assert torch.equal(getattr(layer, name), part(layer, name, value))
    torch.manual_seed(100 + (P.rank or 0))
    own = [torch.nn.Linear(7, 9) for _ in range(3)]
    assert torch.equal(torch.rand(3), after)  # each generator goes on as in one process
    assert P.size == 1 or P.rank == 0 or not torch.equal(layers[2].weight, own[2].weight)
    layers[0].reset_parameters()
    biases = [layers[0].bias.detach().clone()]
    optimizer = torch.optim.Adam([p for each in layers[:2] for p in each.parameters()], 0.1)
    for step in range(3):
        optimizer.zero_grad()
        layers[0](layers[0](values((2, 7), step).float())[:, :7]).square().sum().backward()
        optimizer.step()
    return biases, [layers[0].bias.detach()]


@pytest.mark.parametrize("nprocs", [2, 4])
def test_unequal_seeds_give_shared_values(run: Run, nprocs: int) -> None:
    first, *others = run(draw, nprocs=nprocs)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def whole_is_torch() -> None:
    """`dim=None` draws the same values on all workers; then it sends nothing, to the last bit."""
    rank = tessel.world().rank or 0
    torch.manual_seed(rank)
    layer = ParallelLinear(5, 3, True, None)
    torch.manual_seed(0)
    alone = torch.nn.Linear(5, 3)
    torch.manual_seed(rank)
    other = torch.nn.Linear(5, 3)
    before = other.weight
    converted = ParallelLinear.convert_parallel_linear(other)
    assert converted.weight is before and torch.equal(before, alone.weight)
    with count_traffic() as traffic:
        x = torch.randn(rank, 4, 5, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        assert torch.equal(layer(x), alone(y))
        layer(x).square().sum().backward()
        alone(y).square().sum().backward()
        for a, b in zip([x, *layer.parameters()], [y, *alone.parameters()], strict=True):
            assert torch.equal(a, b) and torch.equal(a.grad, b.grad)
        assert torch.equal(converted(x), alone(x))
        z = parallel_linear(x, alone.weight, alone.bias)
        assert torch.equal(z, alone(x))
    assert traffic.messages == traffic.agreements == 0


@pytest.mark.parametrize("nprocs", [1, 3])
def test_without_dim_it_is_torchs_layer(run: Run, nprocs: int) -> None:
    run(whole_is_torch, nprocs=nprocs)


class Block(torch.nn.Module):
    """Column → activation → row, with a residual, twice."""

    def __init__(self, make: Callable[..., torch.nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.up = torch.nn.ModuleList([make(5, 9, dim=1, dtype=dtype) for _ in range(2)])
        self.down = torch.nn.ModuleList([make(9, 5, dim=0, dtype=dtype) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            hidden = up(x)
            x = x + down(F.gelu(hidden) * torch.sigmoid(hidden))
        return x


def plain(*args: Any, dim: int, **kwargs: Any) -> torch.nn.Module:
    return torch.nn.Linear(*args, **kwargs)


def train(pairs: bool, dtype: torch.dtype) -> None:
    P = group(pairs)
    torch.manual_seed(3)
    alone = Block(plain, dtype)
    torch.manual_seed(3 if P.rank == 0 else 17)
    spread = Block(lambda *args, **kwargs: ParallelLinear(*args, partition=P, **kwargs), dtype)
    optimizers = [
        torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in (alone, spread)
    ]
    tolerance = TOLERANCE[dtype]
    for step in range(5):
        x = values((6, 5), step).to(dtype).requires_grad_()
        y = x.detach().clone().requires_grad_()
        losses = [alone(x).square().mean(), spread(y).square().mean()]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        close("loss", losses[1], losses[0], tolerance)
        close("gradient of the input", y.grad, x.grad, tolerance)
        for name, module in spread.named_modules():
            if isinstance(module, ParallelLinear):
                torchs = alone.get_submodule(name)
                for key, parameter in module.named_parameters():
                    expected = getattr(torchs, key)
                    close(key, parameter, part(module, key, expected), tolerance)
                    close(key, parameter.grad, part(module, key, expected.grad), tolerance)


@pytest.mark.parametrize(
    ("nprocs", "pairs"), [(1, False), (2, False), (3, False), (4, False), (4, True)]
)
def test_five_steps_of_training(run: Run, nprocs: int, pairs: bool) -> None:
    for dtype in (torch.float64, torch.float32):
        run(train, pairs, dtype, nprocs=nprocs)


def pair_traffic(needs: bool) -> Any:
    column = ParallelLinear(8, 16, dim=1).double()
    row = ParallelLinear(16, 8, dim=0).double()
    x = values((4, 8), 0).requires_grad_(needs)
    with count_traffic() as there:
        y = row(torch.tanh(column(x)))
    with count_traffic() as back:
        y.square().sum().backward()
    with count_traffic() as reduced:
        parallel.reduce(values((4, 8), 0))
    with torch.no_grad(), count_traffic() as silent:
        row(column(x))
    counts = [(each.messages, each.bytes_sent) for each in (there, back, reduced, silent)]
    return counts, there.agreements, back.agreements


@pytest.mark.parametrize("nprocs", [2, 3, 4])
def test_a_pair_takes_one_all_reduce_each_way(run: Run, nprocs: int) -> None:
    """Of the size of the output, forward, and of the input, backward, if anybody wants that."""
    for (there, back, reduced, silent), agreements, later in run(pair_traffic, True, nprocs=nprocs):
        assert there == back == reduced == silent
        assert (agreements, later) == (2, 0)
        assert there[1] <= 2 * (nprocs - 1) * -(-4 * 8 // nprocs) * WIDTH
    for (there, back, reduced, _), _, _ in run(pair_traffic, False, nprocs=nprocs):
        assert there == reduced and back == (0, 0)


class Products(TorchDispatchMode):
    """Notes the products of matrices."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.append("product")
        return func(*args, **(kwargs or {}))


def order_of_gradients() -> list[str]:
    """What the backward pass of a column layer does, in its order."""
    layer, x = ParallelLinear(6, 4, dim=1).double(), values((3, 6), 0).requires_grad_()
    loss = as_plain(layer(x)).square().sum()
    seen: list[str] = []
    start = Move.start

    def watched(self: Move, share: Tensor) -> Callable[[], Tensor]:
        wait = start(self, share)
        seen.append("messages leave")

        def landed() -> Tensor:
            seen.append("messages are waited for")
            return wait()

        return landed

    with pytest.MonkeyPatch.context() as patch, Products(seen):
        patch.setattr(Move, "start", watched)
        loss.backward()
    return seen


def test_messages_travel_while_the_gradient_of_the_weight_is_computed(run: Run) -> None:
    for seen in run(order_of_gradients, nprocs=2):
        assert seen == ["product", "messages leave", "product", "messages are waited for"]


def single_traffic() -> Any:
    """A whole input of a row layer is cut without messages; its gradient is an all-gather."""
    row = ParallelLinear(8, 6, dim=0).double()
    x = values((4, 8), 0).requires_grad_()
    with count_traffic() as there:
        y = row(x)
    with count_traffic() as back:
        y.sum().backward()
    return there.bytes_sent, back.bytes_sent


def test_a_whole_input_is_cut_for_rows(run: Run) -> None:
    assert run(single_traffic, nprocs=2) == [(4 * 6 * WIDTH, 4 * 4 * WIDTH)] * 2


def only_one_needs_a_gradient() -> None:
    """A constant input on one worker, and parameters that are all frozen."""
    first = tessel.world().rank == 0
    column, row = ParallelLinear(4, 6, dim=1).double(), ParallelLinear(6, 4, dim=0).double()
    for frozen in (False, True):
        for layer in (column, row):
            layer.requires_grad_(not frozen)
        x = values((3, 4), 0).requires_grad_(first)
        y = row(column(x).tanh())
        y.square().sum().backward()
        z = row(values((3, 6), 0).requires_grad_(first))
        z.sum().backward()
        if first:
            expected = torch.autograd.grad(row(column(x).tanh()).square().sum(), x)[0]
        else:
            other = x.detach().requires_grad_()
            expected = torch.autograd.grad(row(column(other).tanh()).square().sum(), other)[0]
        if first:
            close("gradient", x.grad, expected)


def test_a_worker_without_gradients_takes_part(run: Run) -> None:
    run(only_one_needs_a_gradient, nprocs=2)


def memory(dim: int, size: int) -> tuple[int, int, int]:
    with count_memory() as counted:
        layer = ParallelLinear(size, size, dim=dim)
    shard, whole = layer.weight.nbytes, size * size * 4
    # Gloo sends contiguous tensors; and columns, of which a row is short, are packed to be read.
    is_packed = not transport.shares_memory() or (dim == 0 and shard >= MOST_WRITTEN)
    packed = whole - shard if is_packed else 0
    return counted.peak - packed, shard, whole


@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_making_a_layer_needs_one_whole_weight_at_a_time(run: Run, nprocs: int, dim: int) -> None:
    """Beside its own shard, a copy of it that arrives, and the bias."""
    for peak, shard, whole in run(memory, dim, 256, nprocs=nprocs):
        assert shard == whole // nprocs
        assert peak <= whole + 2 * shard + 10_000


def memory_of_pair(features: int, inner: int, batch: int) -> tuple[int, int, int]:
    """The peak of a step, the gradients that stay, and a tensor of hidden features."""
    up, down = ParallelLinear(features, inner, dim=-1), ParallelLinear(inner, features, dim=0)
    x = values((batch, features), 0).float().requires_grad_()

    def step() -> None:
        down(torch.nn.functional.gelu(up(x))).square().mean().backward()

    parameters = [*up.parameters(), *down.parameters()]
    step()
    for each in (x, *parameters):
        each.grad = None
    with count_memory() as counted:
        step()
    kept = sum(each.nbytes for each in parameters)
    return counted.peak, kept, batch * inner // tessel.world().size * 4


@pytest.mark.parametrize("nprocs", [2, 4])
def test_a_pair_of_layers_needs_its_gradients_and_two_hidden_tensors(run: Run, nprocs: int) -> None:
    """At its peak: no copy of a gradient, of the weights or of what is sent."""
    features, inner, batch = 512, 2048, 16
    for peak, kept, hidden in run(memory_of_pair, features, inner, batch, nprocs=nprocs):
        assert peak <= kept + 2 * hidden + batch * features + 100


@pytest.mark.slow
@pytest.mark.limit(180)
def test_without_dim_it_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    layer, x = ParallelLinear(4, 3), torch.ones(2, 4)
    fast = torch.compile(layer, backend="aot_eager", fullgraph=True)
    close("output", fast(x), layer(x), 1e-6)


def plain_shard(inputs: int, dtype: torch.dtype) -> None:
    """A plain input of each worker's own length is its shard."""
    P = tessel.world()
    torch.manual_seed(0)
    layer = ParallelLinear(inputs, 4, dim=0, dtype=dtype)
    torch.manual_seed(0)
    alone = torch.nn.Linear(inputs, 4, dtype=dtype)
    for shape in ((3, inputs), (2, 3, inputs), (inputs,)):
        whole = data(shape, 1, dtype).requires_grad_()
        cut = Layout.split(P, shape, [None] * (len(shape) - 1) + [0])
        x = cut.local_part(whole.detach()).clone().requires_grad_()
        layer.zero_grad()
        alone.zero_grad()
        y = layer(x)
        close("output", y, alone(whole))
        y.square().sum().backward()
        alone(whole).square().sum().backward()
        assert whole.grad is not None
        close("gradient", x.grad, cut.local_part(whole.grad))
        for name, parameter in alone.named_parameters():
            close(name, getattr(layer, name).grad, part(layer, name, parameter.grad))
        bias = layer.bias.detach()
        close("function", parallel_linear(x, layer.weight, bias, 0), alone(whole))
        close("whole", layer(whole), alone(whole))


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_a_plain_input_may_be_a_shard(run: Run, nprocs: int) -> None:
    """Also where some shards are as long as the whole, or empty: lengths of all workers tell."""
    for inputs in (12, 7, 3, 1):
        run(plain_shard, inputs, torch.float64, nprocs=nprocs)


def bad(kind: str) -> Any:
    P = tessel.world()
    last = P.rank == P.size - 1
    column, row = ParallelLinear(6, 9, dim=1), ParallelLinear(9, 6, dim=0)
    x, wide = torch.ones(2, 6), torch.ones(2, 9)
    shard = parallel.scatter(wide, 1)
    if kind == "weight":
        row.weight = torch.nn.Parameter(torch.ones(6, 9 if last else row.weight.shape[1]))
    if kind == "bias everywhere":
        column.bias = torch.nn.Parameter(torch.ones(9))
    if kind == "frozen" and last:
        row.bias.requires_grad_(False)
    with torch.set_grad_enabled(not (kind == "no_grad" and last)):
        return raised(_calls(column, row, x, wide, shard, last, P)[kind])


def _calls(
    column: ParallelLinear,
    row: ParallelLinear,
    x: Tensor,
    wide: Tensor,
    shard: Tensor,
    last: bool,
    P: Partition,
) -> dict[str, Callable[[], Any]]:
    return {
        "dim": lambda: ParallelLinear(6, 9, dim=2),
        "dim of one": lambda: ParallelLinear(6, 9, dim=0 if last else 1),
        "dim as a float": lambda: ParallelLinear(6, 9, dim=1.0),  # type: ignore[arg-type]
        "dim as a truth value": lambda: ParallelLinear(6, 9, dim=True),
        "features of one": lambda: ParallelLinear(6, 8 if last else 9, dim=1),
        "conversion dim": lambda: ParallelLinear.convert_parallel_linear(torch.nn.Linear(2, 3), 5),
        "width": lambda: column(torch.ones(2, 5)),
        "width of one": lambda: column(torch.ones(2, 5) if last else x),
        "rows of one": lambda: column(torch.ones(3, 6) if last else x),
        "no dimension": lambda: column(torch.tensor(1.0)),
        "whole and plain shard": lambda: row(wide if last else as_plain(shard)),
        "shard of nobody": lambda: row(torch.ones(2, 4)),
        "shard of another size": lambda: row(parallel.scatter(torch.ones(2, 10), 1)),
        "shard of wrong length": lambda: row(parallel.register_parallel_dim(wide, 1)),
        "shard along rows": lambda: row(parallel.scatter(torch.ones(4, 9), 0)),
        "shard into columns": lambda: column(parallel.scatter(x, 1)),
        "shard of one": lambda: row(shard if last else wide),
        "lost": lambda: row(shard.cumsum(1)),
        "lost on one": lambda: row(shard.cumsum(1) if last else shard),
        "other dtype": lambda: column(x.double()),
        "dtype of one": lambda: column(x.double() if last else x),
        "weight": lambda: row(shard),
        "bias everywhere": lambda: column(x),
        "frozen": lambda: row(shard),
        "no_grad": lambda: row(shard),
        "other layers": lambda: column(x) if last else row(shard),
        "no tensor for columns": lambda: column(None if last else x),  # type: ignore[arg-type]
        "no tensor for rows": lambda: row(None if last else wide),  # type: ignore[arg-type]
        "function: dim": lambda: parallel_linear(x, column.weight, dim=3),
        "function: parts": lambda: parallel_linear(x, torch.ones(3 + last, 6), dim=1),
        "function: inputs": lambda: parallel_linear(x, torch.ones(3, 6 + last), dim=1),
        "function: bias": lambda: parallel_linear(x, column.weight, torch.ones(9), dim=1),
        "function: sharding": lambda: parallel_linear(x, column.weight, dim=0),
        "function: vector": lambda: parallel_linear(x, torch.ones(3), dim=1),
        "function: input": lambda: parallel_linear(torch.ones(2, 7), column.weight, dim=1),
    }


NINE = "a shard along dim 1, of total length 9, over workers 0..2"
BAD = {
    "dim": "dim must be None",
    "dim of one": "same calls",
    "dim as a float": "dim must be None",
    "dim as a truth value": "dim must be None",
    "features of one": "same calls",
    "conversion dim": "dim must be None",
    "width": "worker 0 expected a part of shape (2, 6) of an input of shape (2, 6)",
    "width of one": "worker 2 expected a part of shape (2, 6) of an input of shape (2, 6)",
    "rows of one": "shape before the last",
    "no dimension": "at least one dimension",
    "whole and plain shard": "pass the whole input on all workers, or a shard on each",
    "shard of nobody": "pass the whole input on all workers, or a shard on each",
    "shard of another size": f"must be {NINE}, got a shard along dim 1, of total length 10",
    "shard of wrong length": "expected a part of shape (2, 3) of an input of shape (2, 9)",
    "shard along rows": f"the input must be {NINE}, got a shard along dim 0",
    "shard into columns": "gather(x)",
    "shard of one": "same calls",
    "lost": "lost in `cumsum`",
    "lost on one": "lost in `cumsum`",
    "other dtype": "same dtype",
    "dtype of one": "dtype",
    "weight": "the weight of worker 2 has the shape (6, 9)",
    "bias everywhere": "the bias of worker 0",
    "frozen": "same calls",
    "no_grad": "torch.no_grad()",
    "other layers": "same calls",
    "no tensor for columns": "worker 2 passed no tensor",
    "no tensor for rows": "worker 2 passed no tensor",
    "function: dim": "dim must be None",
    "function: parts": "balanced shards",
    "function: inputs": "other length",
    "function: bias": "the bias of worker",
    "function: sharding": "the weight must be a shard along dim 1",
    "function: vector": "(outputs, inputs)",
    "function: input": "expected a part of shape (2, 6) of an input of shape (2, 6)",
}
DTYPE_ERRORS = ("other dtype",)


@pytest.mark.parametrize("kind", BAD)
def test_what_does_not_fit_raises_the_same_on_every_worker(run: Run, kind: str) -> None:
    """ValueError, and torch's own RuntimeError for a dtype that does not fit the weight's."""
    first, *others = run(bad, kind, nprocs=3)
    assert all(other == first for other in others), (first, others)
    expected = RuntimeError if kind in DTYPE_ERRORS else ValueError
    assert first is not None and first[0] is expected and BAD[kind] in first[1], first


class Shared(torch.nn.Module):
    """One layer used twice, one parameter used by two layers, layers in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)
        self.again = self.inner
        self.tied = torch.nn.Linear(6, 6, bias=False)
        self.tied.weight = self.inner.weight
        self.deep = torch.nn.ModuleDict({"a": torch.nn.Sequential(torch.nn.Linear(6, 6, False))})

    def forward(self, x: Tensor) -> Tensor:
        return self.deep["a"](self.tied(self.again(self.inner(x).tanh())))


def convert(dim: int) -> None:
    P = tessel.world()
    torch.manual_seed(P.rank or 0)
    model = Shared().double().eval()
    model.inner.train()
    model.inner.bias.requires_grad_(False)
    calls: list[str] = []
    model.inner.register_forward_hook(lambda *_: calls.append("forward"))
    model.inner.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.inner.register_full_backward_hook(lambda *_: calls.append("backward"))
    if dim == 1:
        model.inner.register_forward_hook(lambda m, a, y: parallel.gather(y))
        model.tied.register_forward_hook(lambda m, a, y: parallel.gather(y))
        model.deep["a"][0].register_forward_hook(lambda m, a, y: parallel.gather(y))
    torch.manual_seed(0)
    alone = Shared().double()
    inner = model.inner
    assert ParallelLinear.convert_parallel_linear(model, dim) is model
    layers = [model.inner, model.again, model.tied, model.deep["a"][0]]
    assert all(type(layer) is ParallelLinear and layer.dim == dim for layer in layers)
    assert model.inner is model.again and model.tied.weight is model.inner.weight
    assert type(inner) is torch.nn.Linear and inner.weight.shape == (6, 6)
    assert model.inner.training and not model.tied.training
    assert not model.inner.bias.requires_grad and model.inner.weight.requires_grad
    assert model.inner.weight.dtype == torch.float64 and model.deep["a"][0].bias is None
    assert len(list(model.parameters())) == 3
    x = values((3, 6), 0).requires_grad_()
    y = x.detach().clone().requires_grad_()
    expected, got = alone(x), model(y)
    close("output", got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    close("gradient", y.grad, x.grad)
    weight = model.inner.weight.grad
    close("gradient of the weight", weight, part(model.inner, "weight", alone.inner.weight.grad))
    assert calls == ["before", "forward"] * 2 + ["backward"] * 2
    assert ParallelLinear.convert_parallel_linear(model, 1 - dim) is model
    assert model.inner is layers[0] and model.inner.dim == dim  # what is parallel already stays


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_a_model_is_converted(run: Run, nprocs: int) -> None:
    """Nested and shared modules and parameters, hooks, modes; values are the first worker's."""
    for dim in (0, 1):
        run(convert, dim, nprocs=nprocs)


def convert_one() -> None:
    alone = torch.nn.Linear(7, 5, dtype=torch.bfloat16)
    before = alone.weight
    layer = ParallelLinear.convert_parallel_linear(alone, dim=-1)
    assert repr(layer) == "ParallelLinear(in_features=7, out_features=5, bias=True, dim=-1)"
    assert layer.weight.dtype == torch.bfloat16 and alone.weight is before
    whole = ParallelLinear.convert_parallel_linear(alone, dim=None)  # not split, and then it is
    again = ParallelLinear.convert_parallel_linear(whole, dim=-1)
    assert whole.dim is None and torch.equal(again.weight, layer.weight)
    assert ParallelLinear.convert_parallel_linear(again, dim=0) is again
    with torch.device("meta"):
        empty = torch.nn.Linear(7, 5)
    layer = ParallelLinear.convert_parallel_linear(empty, dim=0)
    assert layer.weight.is_meta and layer.bias.shape == (5,)
    assert ParallelLinear(7, 5, dim=0, device="meta").weight.is_meta


def test_one_layer_gives_a_new_one(run: Run) -> None:
    run(convert_one, nprocs=2)


class Same(torch.nn.Linear):
    """Another name for torch's layer."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)


class Sub(torch.nn.Linear):
    """A layer that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Zoo(torch.nn.Module):
    """Layers of all kinds, of which some can be converted."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.attention = torch.nn.MultiheadAttention(6, 2, batch_first=True)
        settings: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
        encoder = torch.nn.TransformerEncoderLayer(6, 2, 7, **settings)
        self.encoder = torch.nn.TransformerEncoder(encoder, 2)
        self.decoder = torch.nn.TransformerDecoderLayer(6, 2, 7, norm_first=True, **settings)
        self.same, self.sub = Same(6), Sub(6, 6)
        self.norm = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 6))
        self.hooked = torch.nn.Linear(6, 6)
        self.hooked.weight.register_hook(lambda grad: grad * 3)
        self.one, self.two = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.three, self.four = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.four.bias = self.three.bias
        self.three.weight = self.hooked.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.attention(x, x, x)[0]
        x = self.decoder(self.encoder(x), x)
        for layer in (self.same, self.sub, self.norm, self.hooked):
            x = x + layer(x)
        return self.four(self.three(self.two(self.one(x))))


STAY = [
    *("attention (MultiheadAttention)", "encoder.layers.0.self_attn", "encoder.layers.1.self_attn"),
    *("decoder.self_attn", "decoder.multihead_attn", "sub (Sub)", "norm (Parametrized"),
    *("weight of hooked (Linear) has hooks", "weight of three (Linear) has hooks"),
    "three.bias, four.bias are one parameter",
]
CONVERTED = {
    *("first", "same", "one", "two", "decoder.linear1", "decoder.linear2"),
    *(f"encoder.layers.{k}.linear{n}" for k in range(2) for n in (1, 2)),
}


def convert_zoo() -> list[str]:
    torch.manual_seed(0)
    alone = Zoo().double()
    model = Zoo().double()
    model.load_state_dict(alone.state_dict())
    x = data((2, 5, 6), 0, torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ParallelLinear.convert_parallel_linear(model, dim=0) is model
    found = {name for name, each in model.named_modules() if type(each) is ParallelLinear}
    assert found == CONVERTED
    assert model.two.weight is model.one.weight and model.three.weight is model.hooked.weight
    for mode in (True, False, True):
        for each in (alone, model):
            each.train(mode)
            each.zero_grad()
        with torch.no_grad():
            close("output without gradients", model(x), alone(x))
        with torch.inference_mode():
            close("output of inference", model(x), alone(x))
        for each in (alone, model):
            each(x).square().sum().backward()
        close("output", model(x), alone(x))
        for name, parameter in alone.named_parameters():
            got = model.get_parameter(name)
            layout = layout_of(got)
            assert got.grad is not None and parameter.grad is not None
            grad = parameter.grad if layout is None else layout.local_part(parameter.grad)
            close(name, got.grad, grad)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("nprocs", [1, 3])
def test_what_cannot_be_converted_stays_and_is_named(run: Run, nprocs: int) -> None:
    """In all modes: torch's layers of transformers have a path that reads weights directly."""
    for said in run(convert_zoo, nprocs=nprocs):
        assert len(said) == 1 and all(text in said[0] for text in STAY), said


def convert_lazy() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 4))
    with pytest.warns(UserWarning, match=r"0 \(LazyLinear\) does not know its sizes yet"):
        ParallelLinear.convert_parallel_linear(model, dim=0)
    assert type(model[0]) is torch.nn.LazyLinear and type(model[1]) is ParallelLinear
    with pytest.raises(NotImplementedError, match="LazyLinear"):
        ParallelLinear.convert_parallel_linear(model, dim=0, strict=True)
    torch.manual_seed(0)
    expected = model(torch.ones(2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ParallelLinear.convert_parallel_linear(model, dim=0, strict=True)
    assert type(model[0]) is ParallelLinear
    close("output", model(torch.ones(2, 3)), expected, 1e-6)
    alone = torch.nn.LazyLinear(4)
    with pytest.warns(UserWarning, match="the module"):
        assert ParallelLinear.convert_parallel_linear(alone, dim=0) is alone


def test_lazy_layers_are_converted_once_they_have_sizes(run: Run) -> None:
    run(convert_lazy, nprocs=2)


def refuse(kind: str) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    last = tessel.world().rank == 1
    if kind == "attention":
        model.append(torch.nn.MultiheadAttention(4, 2))
    elif kind == "transformer":
        model.append(torch.nn.TransformerEncoderLayer(4, 2))
    elif kind == "subclass":
        model.append(Sub(4, 4))
    elif kind == "parametrized":
        torch.nn.utils.parametrizations.weight_norm(model[1])
    elif kind == "tied":
        model.append(torch.nn.Embedding(4, 4))
        model[2].weight = model[1].weight
    elif kind == "gradient":
        model(torch.ones(2, 4)).sum().backward()
    elif kind == "hook":
        model[0].weight.register_hook(lambda grad: grad)
    elif kind == "forward":
        model[0].forward = lambda x: x
    elif kind == "others":
        model.append(torch.nn.Linear(4, 5 if last else 4))
    elif kind == "attention of one" and last:
        model.append(torch.nn.MultiheadAttention(4, 2))
    error = raised(lambda: ParallelLinear.convert_parallel_linear(model, 0, strict=True))
    assert type(model[0]) is torch.nn.Linear, "nothing is converted"
    return error


REFUSED = {
    "attention": "2 (MultiheadAttention)",
    "transformer": "2.self_attn (MultiheadAttention)",
    "subclass": "2 (Sub) is a subclass",
    "parametrized": "is a subclass",
    "tied": "1.weight, 2.weight are one parameter",
    "gradient": "has a gradient",
    "hook": "has hooks",
    "forward": "forward of its own",
    "others": "same calls",
    "attention of one": "same calls",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_converted_is_refused(run: Run, kind: str) -> None:
    first, second = run(refuse, kind, nprocs=2)
    assert first == second
    assert first is not None and REFUSED[kind] in first[1], first
    expected = ValueError if REFUSED[kind] == "same calls" else NotImplementedError
    assert first[0] is expected


METHODS: dict[str, dict[str, Any]] = {
    "kaiming_normal_": {"a": 0, "mode": "fan_in", "nonlinearity": "leaky_relu"},
    "kaiming_uniform_": {"mode": "fan_out"},
    "xavier_uniform_": {"gain": 2.0},
    "orthogonal_": {},
    "trunc_normal_": {"std": 0.1},
    "eye_": {},
    "constant_": {"val": 0.1},
}


def initialize(dtype: torch.dtype) -> None:
    P = tessel.world()
    layers = [ParallelLinear(7, 9, dim=dim, dtype=dtype) for dim in (0, 1, None)]
    for name, settings in METHODS.items():
        method = getattr(torch.nn.init, name)
        for layer in layers:
            torch.manual_seed(5 + (P.rank or 0))
            assert shard_init_helper_(method, layer.weight, **settings) is layer.weight
            torch.manual_seed(5)
            expected = method(torch.empty(9, 7, dtype=dtype), **settings)
            assert torch.equal(layer.weight, part(layer, "weight", expected)), name
            assert layer.weight.requires_grad
    for layer in layers:
        torch.manual_seed(5 + (P.rank or 0))
        shard_init_helper_(torch.nn.init.normal_, layer.bias, std=2.0)
        torch.manual_seed(5)
        expected = torch.nn.init.normal_(torch.empty(9, dtype=dtype), std=2.0)
        assert torch.equal(layer.bias, part(layer, "bias", expected))
    check_by_hand(P, dtype)


class OwnLinear(ParallelLinear):
    """Draws its values in a way of its own."""

    def reset_parameters(self) -> None:
        for each in self.parameters():
            torch.nn.init.normal_(each)


class OwnEmbedding(ParallelEmbedding):
    """Draws its values in a way of its own."""

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight, std=0.02)


def other_seeds() -> list[Tensor]:
    """All whole values that a parallel layer has, or that its helper draws, with other seeds."""
    torch.manual_seed(tessel.world().rank)
    linear, table = ParallelLinear(5, 3), ParallelEmbedding(7, 3, padding_idx=2)
    found = [*linear.parameters(), *table.parameters()]
    found = [each.detach().clone() for each in found]
    for layer in (linear, table):
        layer.reset_parameters()
        found += [each.detach().clone() for each in layer.parameters()]
    assert not torch.equal(found[0], found[3]) and not table.weight[2].any()
    shard_init_helper_(torch.nn.init.normal_, linear.bias)
    plain = torch.empty(4, 3, dtype=torch.float64)
    assert shard_init_helper_(torch.nn.init.xavier_normal_, plain) is plain
    own = torch.nn.Parameter(torch.empty(0, 3))
    shard_init_helper_(torch.nn.init.normal_, own)
    given = ParallelEmbedding.from_pretrained(torch.randn(4, 2))
    converted = ParallelEmbedding.convert_parallel_embedding(torch.nn.Embedding(3, 2))
    subclasses = (*OwnLinear(5, 3).parameters(), OwnEmbedding(7, 3).weight)
    bias = OwnLinear(5, 3, dim=0).bias
    own_shard = OwnLinear(5, 8, dim=-1)
    assert sharding_of(own_shard.weight) is not None and own_shard.weight.any()
    empty = torch.empty(3, 2, device="meta")
    assert shard_init_helper_(torch.nn.init.normal_, empty) is empty
    return [
        each.detach()
        for each in (
            *(*found, linear.bias, plain, own, given.weight, converted.weight),
            *(*subclasses, bias),
        )
    ]


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_whole_values_are_equal_whatever_the_seeds(run: Run, nprocs: int) -> None:
    first, *others = run(other_seeds, nprocs=nprocs)
    torch.manual_seed(0)
    assert torch.equal(first[0], torch.nn.Linear(5, 3).weight)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def one_initializes(kind: str) -> tuple[type[BaseException], str] | None:
    """One worker fills a tensor and another does something else."""
    first = tessel.world().rank == 0
    if kind == "shape":
        x = torch.empty(3 if first else 4)
        return raised(lambda: shard_init_helper_(torch.nn.init.normal_, x))
    if first:
        return raised(lambda: shard_init_helper_(torch.nn.init.normal_, torch.empty(3)))
    return raised(lambda: ParallelLinear(3, 4))


@pytest.mark.parametrize("kind", ["shape", "other call"])
def test_one_worker_alone_cannot_fill_a_whole_tensor(run: Run, kind: str) -> None:
    results = run(one_initializes, kind, nprocs=2)
    assert len(set(results)) == 1 and results[0] is not None and results[0][0] is ValueError
    assert "shard_init_helper_ of a tensor of shape (3,)" in results[0][1]


def check_by_hand(P: Partition, dtype: torch.dtype) -> None:
    """Shards of any lengths that the user registered: tensors and parameters."""
    rank = P.rank or 0
    lengths = [1 + k for k in range(P.size)]
    start = sum(lengths[:rank])
    torch.manual_seed(5)
    expected = torch.nn.init.xavier_normal_(torch.empty(4, sum(lengths), dtype=dtype))
    expected = expected[:, start : start + lengths[rank]]
    plain = torch.empty(4, lengths[rank], dtype=dtype)
    for tensor in (parallel.register_parallel_dim(plain, 1), torch.nn.Parameter(plain.clone())):
        tensor = parallel.register_parallel_dim(tensor, 1)
        torch.manual_seed(5 + rank)
        shard_init_helper_(torch.nn.init.xavier_normal_, tensor)
        assert torch.equal(as_plain(tensor), expected)
    assert torch.equal(plain, expected)


@pytest.mark.parametrize("nprocs", [1, 3])
def test_initialization_sees_the_whole(run: Run, nprocs: int) -> None:
    for dtype in (torch.float32, torch.float64):
        run(initialize, dtype, nprocs=nprocs)


def as_function() -> None:
    """With shardings on the shards of the weight and without."""
    P = tessel.world()
    for dim, inputs, outputs in ((1, 5, 7), (0, 7, 5), (1, 2, 1), (0, 1, 2)):
        weight, bias = values((outputs, inputs), 1), values((outputs,), 2)
        layout = shard_layout(P, (outputs, inputs), 0 if dim == 1 else 1)
        for with_bias in (True, False):
            whole = [
                each.clone().requires_grad_() for each in (values((3, inputs), 3), weight, bias)
            ]
            x = whole[0].detach().clone().requires_grad_()
            w = layout.local_part(weight).clone().requires_grad_()
            b = (Layout.balanced(P, (outputs,)).local_part(bias) if dim == 1 else bias).clone()
            b.requires_grad_()
            expected = F.linear(whole[0], whole[1], whole[2] if with_bias else None)
            sharding = Sharding(0 if dim == 1 else 1, P, outputs if dim == 1 else inputs)
            for shard in (w, as_shard(w, sharding)):
                got = whole_of(parallel_linear(x, shard, b if with_bias else None, dim=dim))
                close("output", got, expected)
                grads = torch.autograd.grad(got.square().sum(), [x, w])
                truth = torch.autograd.grad(expected.square().sum(), whole[:2], retain_graph=True)
                close("gradient of the input", grads[0], truth[0])
                close("gradient of the weight", grads[1], layout.local_part(truth[1]))


@pytest.mark.parametrize("nprocs", [1, 3])
def test_the_function_takes_shards(run: Run, nprocs: int) -> None:
    run(as_function, nprocs=nprocs)


def copied() -> None:
    x = values((3, 5), 0)
    for dim in (0, 1):
        layer = ParallelLinear(5, 7, dim=dim).double()
        expected = whole_of(layer(x))
        other = ParallelLinear(5, 7, dim=dim).double()
        other.load_state_dict(layer.state_dict())
        for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other):
            assert torch.equal(whole_of(each(x)), expected)
        named = {name: value.detach().clone() for name, value in layer.named_parameters()}
        assert torch.equal(whole_of(torch.func.functional_call(layer, named, (x,))), expected)
        doubled = {name: 2 * value for name, value in named.items()}
        close("doubled", whole_of(torch.func.functional_call(layer, doubled, (x,))), 2 * expected)


@pytest.mark.parametrize("nprocs", [1, 3])
def test_a_layer_can_be_copied_pickled_and_called_with_others(run: Run, nprocs: int) -> None:
    run(copied, nprocs=nprocs)


def in_low_precision() -> None:
    """To the rounding of the dtype: sums over workers go in another order."""
    torch.manual_seed(0)
    column, row = ParallelLinear(8, 16, dim=1), ParallelLinear(16, 8, dim=0)
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    x = values((4, 8), 0).float()
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = alone(x), row(column(x).tanh())
    assert got.dtype == expected.dtype == torch.bfloat16
    close("autocast", got.float(), expected.float(), 0.03)
    half = [copy.deepcopy(each).bfloat16() for each in (column, row)]
    got = half[1](half[0](x.bfloat16()).tanh())
    close("bfloat16", got.float(), copy.deepcopy(alone).bfloat16()(x.bfloat16()).float(), 0.03)


def test_low_precision_and_autocast(run: Run) -> None:
    run(in_low_precision, nprocs=2)


def outside() -> Any:
    """A layer over some workers: the others store nothing and get back what they pass."""
    P = tessel.world().create_partition_inclusive([1, 0])
    torch.manual_seed(0)
    layer = ParallelLinear(5, 7, dim=1, partition=P).double()
    back = ParallelLinear(7, 5, dim=0, partition=P).double()
    x = values((3, 5), 0)
    y = back(layer(x))
    if not P.active:
        assert layer.weight.numel() == 0 and torch.equal(y, x) and y is not x
        return None
    torch.manual_seed(0)
    torchs = torch.nn.Linear(5, 7), torch.nn.Linear(7, 5)
    assert layer.weight.shape[0] == (3 if P.rank == 1 else 4)
    return [y.tolist(), torchs[1].double()(torchs[0].double()(x)).tolist()]


def test_other_workers_store_nothing(run: Run) -> None:
    first, second, *others = run(outside, nprocs=4)
    assert first[0] == second[0] and others == [None, None]
    close("output", torch.tensor(first[0]), torch.tensor(first[1]), 1e-12)


def forward_mode() -> None:
    P = tessel.world()
    torch.manual_seed(0)
    column, row = ParallelLinear(5, 7, dim=1).double(), ParallelLinear(7, 5, dim=0).double()
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5))
    alone = alone.double()
    for layer, torchs in ((column, alone[0]), (row, alone[2])):
        with torch.no_grad():
            for name, value in torchs.named_parameters():
                getattr(layer, name).copy_(part(layer, name, value))
    x, direction = values((3, 5), 1), values((3, 5), 2)
    expected = torch.func.jvp(alone, (x,), (direction,))
    got = torch.func.jvp(lambda each: row(column(each).tanh()), (x,), (direction,))
    close("value", got[0], expected[0])
    close("derivative", got[1], expected[1])
    gradient = torch.func.grad(lambda each: row(column(each).tanh()).square().sum())(x)
    close("gradient", gradient, torch.func.grad(lambda each: alone(each).square().sum())(x))
    assert P.active


@pytest.mark.parametrize("nprocs", [1, 2])
def test_forward_mode_and_torch_func(run: Run, nprocs: int) -> None:
    run(forward_mode, nprocs=nprocs)


class Named(ParallelLinear):
    """A layer with a setting of its own, which its words contain."""

    title = "first"

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, title={self.title}"


def test_words_are_made_once_for_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    torchs = torch.nn.Linear.extra_repr

    def counted(self: torch.nn.Linear) -> str:
        made.append(torchs(self))
        return made[-1]

    monkeypatch.setattr(torch.nn.Linear, "extra_repr", counted)
    layer, x = ParallelLinear(4, 3, dim=-1), torch.ones(2, 4)
    for _ in range(3):
        layer(x)
    assert made == ["in_features=4, out_features=3, bias=True"]
    layer.bias = None
    layer(x)
    layer(x)
    assert made[1:] == ["in_features=4, out_features=3, bias=False"]
    copy.deepcopy(layer)(x)  # a layer of its own
    layer.dim = 0
    layer(x)
    assert len(made) == 4 and layer._in_words().endswith("bias=False, dim=0)")
    named = Named(4, 5, dim=-1)
    said = named._in_words()
    named.title = "second"
    assert named._in_words() == said.replace("first", "second") != said
