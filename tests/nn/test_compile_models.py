"""Layers and converted models inside of `torch.compile(fullgraph=True)`.

Tests `core/graph.py`, `core/handles.py`, `nn/convert.py`, `nn/layer.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import tessel
from compilers import SECONDS, needs_compiler
from tessel.models import FNO
from tessel.nn import (
    DistributedAvgPool2d,
    DistributedBatchNorm,
    DistributedBCELoss,
    DistributedConv2d,
    DistributedConvTranspose2d,
    DistributedCrossEntropyLoss,
    DistributedGroupNorm,
    DistributedMaxPool2d,
    DistributedMSELoss,
    DistributedUpsample,
    DistributedUpsamplingBilinear2d,
    HaloRegion,
    distribute_module,
    fuse_gradients,
)
from tessel.operators import ParDFT, ParIdentity, ParMatrix, distribute, kron
from tessel.tensor.rules import attention_plan

Run = Callable[..., list[Any]]

LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "convolution": lambda P: DistributedConv2d(P, 2, 4, 3, padding=1),
    "strided": lambda P: DistributedConv2d(P, 2, 4, 3, stride=2, dilation=2, groups=2),
    "transposed": lambda P: DistributedConvTranspose2d(P, 2, 3, 4, stride=2, padding=1),
    "maximum": lambda P: DistributedMaxPool2d(P, 3, stride=2, padding=1),
    "mean": lambda P: DistributedAvgPool2d(P, 3, stride=1),
    "batch norm": lambda P: DistributedBatchNorm(P, 2),
    "group norm": lambda P: DistributedGroupNorm(P, 1, 2),
    "upsample": lambda P: DistributedUpsample(P, scale_factor=2, mode="bilinear"),
    "corners": lambda P: DistributedUpsamplingBilinear2d(P, scale_factor=2),
}


class Residual(nn.Module):
    """Convolutions with norms, a step down and one up, and a part that goes around them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4))
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.norm = nn.GroupNorm(2, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.drop(self.up(self.down(x).relu())))


class Tokens(nn.Module):
    """Patches as tokens, attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, 8, 2, stride=2)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class OneHead(nn.Module):
    """Attention of one head, causal, between rows."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x.mean((0, 1), keepdim=True)).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grid(size: int = 0) -> tessel.Partition:
    world = tessel.world()
    return world.create_cartesian_topology_partition([1, 1, size or world.size, 1])


def part(P: tessel.Partition, rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = (2, 2, rows, 6)
    whole = torch.arange(2 * 2 * rows * 6.0).reshape(shape).mul(0.7).sin().to(dtype)
    return tessel.Layout.balanced(P, shape).local_part(whole).clone()


def compare(fast: Any, model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """Output, gradients and buffers of compiled code are those of the code that is not."""
    xs = [x.clone().requires_grad_() for _ in range(2)]
    for each in (model, plain):
        each.zero_grad()
    ys = [fast(xs[0]), plain(xs[1])]
    for y in ys:
        (y.square() * (1 + tessel.world().rank)).sum().backward()
    pairs = [ys, [x.grad for x in xs]]
    both = zip(model.parameters(), plain.parameters(), strict=True)
    pairs += [[p.grad, q.grad] for p, q in both]
    pairs += [list(each) for each in zip(model.buffers(), plain.buffers(), strict=True)]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def compile_module(
    make: Callable[[Any], nn.Module], backend: Any, rows: list[int], evaluates: bool = True
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(tessel.world().rank)
    P = grid()
    model = make(P).double()
    plain = copy.deepcopy(model)
    fast = torch.compile(model, fullgraph=True, backend=backend)
    for number in rows:  # a second call runs what the first has compiled; other shapes are others
        compare(fast, model, plain, part(P, number))
    if not evaluates:
        return
    model.eval(), plain.eval()
    compare(fast, model, plain, part(P, rows[0]))
    with torch.no_grad():
        x = part(P, rows[0])
        torch.testing.assert_close(fast(x), plain(x), rtol=1e-11, atol=1e-12)


def compile_layer(name: str) -> None:
    # others have one mode; without gradients, the convolution stands for them
    evaluates = name in ("convolution", "batch norm")
    compile_module(LAYERS[name], "aot_eager", [7, 7, 10], evaluates)


def residual(P: tessel.Partition) -> nn.Module:
    model = Residual()
    model.drop.p = 0.0
    return distribute_module(model, P)


def tokens(P: tessel.Partition) -> nn.Module:
    return distribute_module(Tokens(), P)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(run: Run, name: str) -> None:
    run(compile_layer, name, nprocs=2, timeout=SECONDS)  # on three workers: models, below


@pytest.mark.slow
@pytest.mark.parametrize(("make", "nprocs"), [(residual, 1), (residual, 3), (tokens, 2)])
def test_models(run: Run, make: Callable[[Any], nn.Module], nprocs: int) -> None:
    rows = [8, 8, 14] if make is residual else [8, 8]
    evaluates = nprocs < 3  # tokens and layers say it for several workers
    run(compile_module, make, "aot_eager", rows, evaluates, nprocs=nprocs, timeout=SECONDS)


class Uses(nn.Module):
    """Parameters that are used twice, aside, not at all and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 3, padding=1)
        self.second = nn.Conv2d(2, 2, 3, padding=1)
        self.aside = nn.Conv2d(2, 1, 1)
        self.unused = nn.Linear(2, 2)
        self.first.bias.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        self.aside(x)
        # computed again in the backward pass: what this uses is in no bucket
        x = checkpoint(self.second, x, use_reentrant=False)
        return self.second(self.first(self.first(x).sin()).sin())


def uses(P: tessel.Partition) -> nn.Module:
    return distribute_module(Uses(), P)


def compile_uses(limit: int) -> list[tuple[int, ...]]:
    """The shapes that are summed for parameters, in the order of their sums."""
    torch._dynamo.reset()
    P = grid()
    torch.manual_seed(0)
    model = fuse_gradients(uses(P).double(), limit)
    plain = copy.deepcopy(model)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compare(fast, model, plain, part(P, 7))
    operators = model.forward._traces[-1]  # type: ignore[union-attr]
    sums = (each for each in operators if isinstance(each, tessel.Move) and each.sums_all)
    return [each.domain.shape for each in sums]


class Recurrent(nn.Module):
    """Dynamo cannot look at the module in the middle, whatever calls it."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.before = nn.Linear(6, 5)
        self.cell = kind(5, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.after = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.relu(self.cell(torch.tanh(self.before(x)))[0]))


def compile_recurrence(kind: type[nn.Module], axis: int) -> str:
    """Values and gradients of a compiled recurrence; what is said where one graph is asked for."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Recurrent(kind).double()
    shape = [1, 1, 1]
    shape[axis] = tessel.world().size
    P = tessel.world().create_cartesian_topology_partition(shape)
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    distributed = distribute_module(model, P)
    fast = torch.compile(distributed, backend="aot_eager")
    for length in (7, 5, 7):  # and again, with other lengths of the sequence
        whole = torch.sin(torch.arange(3 * length * 6, dtype=torch.float64)).view(3, length, 6)
        layout = tessel.Layout.balanced(P, whole.shape)
        x = layout.local_part(whole).clone().requires_grad_()
        y, expected = fast(x), plain(whole.requires_grad_())
        into = tessel.Layout.balanced(P, expected.shape)
        torch.testing.assert_close(y, into.local_part(expected), rtol=0, atol=1e-12)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(x.grad, layout.local_part(whole.grad), rtol=0, atol=1e-12)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-11)
    one_graph = torch.compile(distribute_module(other, P), backend="aot_eager", fullgraph=True)
    return said(lambda: one_graph(x.detach()))


@pytest.mark.parametrize("nprocs", [1, 2])
@pytest.mark.parametrize("axis", [0, 1], ids=["batch", "sequence"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrences_are_left_out(run: Run, kind: type[nn.Module], axis: int, nprocs: int) -> None:
    for text in run(compile_recurrence, kind, axis, nprocs=nprocs, timeout=SECONDS):
        assert "LSTM, GRU or RNN, at which torch.compile breaks graphs" in text


@pytest.mark.parametrize("limit", [2**22, 1])
def test_gradients_travel_together(run: Run, limit: int) -> None:
    weight, bias = (2, 2, 3, 3), (2,)  # of the second layer, as the checkpoint uses it
    others = [(36 + 36 + 2 + 3,)] if limit > 1 else [(36,), (36,), (2,)]
    for found in run(compile_uses, limit, nprocs=2, timeout=SECONDS):
        assert sorted(found) == sorted([weight, bias, *others])


@pytest.mark.slow
def test_empty_parts(run: Run) -> None:
    run(compile_module, residual, "aot_eager", [2], False, nprocs=3, timeout=SECONDS)


def with_older_torch(what: str) -> None:
    """Before 2.13 `torch.compiler.is_compiling()` is False while tensors without values travel."""
    kept = getattr(torch.compiler, "_compile_session_context", None)
    if kept is not None:
        torch.compiler._compile_session_context = nullcontext  # type: ignore[assignment]
    try:
        if what == "layer":
            compile_layer("convolution")
        else:
            compile_around()
    finally:
        if kept is not None:
            torch.compiler._compile_session_context = kept


@pytest.mark.parametrize("what", ["layer", "model"])
def test_with_older_torch(run: Run, what: str) -> None:
    run(with_older_torch, what, nprocs=2, timeout=SECONDS)


def normed(P: tessel.Partition) -> nn.Module:
    """Halos, sums of statistics, buffers that change, and gradients that are summed.

    For each function between two movements inductor runs a C++ compiler, for a second.
    """
    model = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    return distribute_module(model, P)


@pytest.mark.slow
@needs_compiler
def test_with_inductor(run: Run) -> None:
    run(compile_module, normed, "inductor", [8, 8], False, nprocs=2, timeout=SECONDS)


def in_own_order(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A compiler that puts nodes into another order on each worker, as each may."""
    random = Random(tessel.world().rank)
    new = torch.fx.Graph()
    copies = {node: new.node_copy(node) for node in graph.graph.find_nodes(op="placeholder")}
    left = [node for node in graph.graph.nodes if node not in copies and node.op != "output"]
    while left:
        ready = [node for node in left if all(each in copies for each in node.all_input_nodes)]
        node = random.choice(ready)
        copies[node] = new.node_copy(node, copies.__getitem__)
        left.remove(node)
    new.node_copy(graph.graph.output_node(), copies.__getitem__)
    return make_boxed_func(torch.fx.GraphModule(graph, new).forward)


class Apart(nn.Module):
    """Layers and movements that do not depend on each other."""

    def __init__(self, P: tessel.Partition) -> None:
        super().__init__()
        self.wide = DistributedConv2d(P, 2, 2, 5, padding=2)
        self.norm = DistributedBatchNorm(P, 2)
        self.narrow = DistributedConv2d(P, 2, 2, 3, padding=1)
        self.sum = tessel.nn.AllSumReduce(P, [2])
        self.gather = tessel.nn.AllGather(P, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean(2, keepdim=True), x.square().mean(2, keepdim=True)
        both = self.sum(means[0]) * self.sum(means[1]).sin() + self.gather(means[0]).mean(3, True)
        return self.wide(x) * self.narrow(x) + self.norm(x) * both


@pytest.mark.parametrize("make", [residual, tokens, Apart])
def test_a_compiler_that_orders_nodes_otherwise_on_each_worker(
    run: Run, make: Callable[[Any], nn.Module]
) -> None:
    run(compile_in_own_order, make, nprocs=2, timeout=SECONDS)


def compile_in_own_order(make: Callable[[Any], nn.Module]) -> None:
    partitioned = min_cut_rematerialization_partition  # as inductor does it
    backend = aot_autograd(fw_compiler=in_own_order, partition_fn=partitioned)
    compile_module(make, backend, [8, 8], False)


def compile_around() -> None:
    """What is around a converted model is in the same graph; gradients pass through."""
    torch._dynamo.reset()
    P = grid()
    inner = residual(P).double()
    other = copy.deepcopy(inner)
    fast = torch.compile(lambda x: inner(x * 2).sin() + x, fullgraph=True, backend="aot_eager")
    compare(fast, inner, Around(other), part(P, 8))


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 2).sin() + x


def test_what_is_around_a_model(run: Run) -> None:
    run(compile_around, nprocs=2, timeout=SECONDS)


def said(function: Callable[[], Any]) -> str:
    """What a call raises, with what that was raised for: compilers put errors into their own."""
    found: list[str] = []
    try:
        function()
    except Exception as error:
        each: BaseException | None = error
        while each is not None:
            found.append(f"{type(each).__name__}: {each}")
            each = each.__cause__ or each.__context__
    return " | ".join(found) or "nothing"


def change_one() -> list[str]:
    """A worker whose part alone has another shape; afterwards all go on."""
    torch._dynamo.reset()
    P = grid()
    model = distribute_module(nn.Conv2d(2, 2, 1), P).double()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    first = said(lambda: fast(part(P, 4)))
    rows = 2 + tessel.world().rank
    found = said(lambda: fast(torch.ones(2, 2, rows, 6, dtype=torch.float64)))
    return [first, found, said(lambda: fast(part(P, 4)))]


def test_a_shape_that_changes_on_one_worker_raises_on_all(run: Run) -> None:
    found = run(change_one, nprocs=2, timeout=SECONDS)
    for first, changed, last in found:
        assert first == last == "nothing", found
        assert "recompile this call" in changed, found


def change_settings() -> list[str]:
    """A setting of a module is in the graph; one that changes raises, and a mode is compiled."""
    torch._dynamo.reset()
    P = grid()
    model = distribute_module(nn.Sequential(nn.Conv2d(2, 2, 3), nn.GroupNorm(2, 2)), P).double()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = part(P, 4)
    found = [said(lambda: fast(x))]
    model[1].eps = 0.5
    found.append(said(lambda: fast(x)))
    torch.compiler.reset()
    return [*found, said(lambda: torch.testing.assert_close(fast(x), model(x)))]


@pytest.mark.slow
def test_settings_that_change_raise(run: Run) -> None:
    for first, changed, anew in run(change_settings, nprocs=2, timeout=SECONDS):
        assert first == anew == "nothing"
        assert "eps is 0.5, but this call was compiled with 1e-05" in changed


def draw() -> list[str]:
    torch._dynamo.reset()
    P = grid()
    model = distribute_module(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Dropout(0.5)), P).double()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    training = said(lambda: fast(part(P, 4)))
    model.eval()
    return [training, said(lambda: fast(part(P, 4)))]


def test_random_numbers_raise(run: Run) -> None:
    for training, evaluation in run(draw, nprocs=2, timeout=SECONDS):
        assert "draws random numbers cannot be compiled" in training
        assert evaluation == "nothing"


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if tessel.world().rank else self.conv(self.conv(x))


def branch() -> str:
    torch._dynamo.reset()
    model = distribute_module(Branches(), grid()).double()
    return said(lambda: torch.compile(model, fullgraph=True, backend="aot_eager")(part(grid(), 4)))


def test_workers_that_take_different_branches_raise(run: Run) -> None:
    for found in run(branch, nprocs=2, timeout=SECONDS):
        assert "all workers must make the same calls in the same order" in found


# -- what agrees on more than its input, or has another way to parts -------------------------------


def region(P: tessel.Partition) -> nn.Module:
    first, last = (DistributedConv2d(P, 2, 2, 3, padding=1) for _ in range(2))
    return HaloRegion(first, nn.ReLU(), last)


def fno(P: tessel.Partition) -> nn.Module:
    return FNO(P, 2, 2, width=3, modes=1, blocks=2)


def fused(P: tessel.Partition) -> nn.Module:
    return fuse_gradients(nn.Sequential(DistributedConv2d(P, 2, 2, 3, padding=1), nn.ReLU()))


def operator(P: tessel.Partition) -> nn.Module:
    """Along the last two dimensions, with a matrix whose values are parameters."""
    kind = torch.float64
    A = kron(*(ParIdentity(kind, n) for n in (2, 2, 7)), ParMatrix(kind, 5, 6))
    return distribute(A, P).module()


@pytest.mark.parametrize(
    ("make", "nprocs"),
    [(region, 1), (region, 3), (fno, 1), (fno, 2), (fused, 2), (operator, 1), (operator, 3)],
)
def test_ways_of_their_own(run: Run, make: Callable[[Any], nn.Module], nprocs: int) -> None:
    rows = [7, 7] if make is operator else [7, 7, 10]
    run(compile_module, make, "aot_eager", rows, make is region, nprocs=nprocs, timeout=SECONDS)


def compile_ring() -> None:
    """Keys that would come block by block are gathered where compilers look at the code."""
    before, attention_plan.GATHERED = attention_plan.GATHERED, 0
    try:
        compile_module(lambda P: distribute_module(OneHead(), P), "aot_eager", [7], False)
    finally:
        attention_plan.GATHERED = before


def test_attention_of_long_sequences(run: Run) -> None:
    run(compile_ring, nprocs=2, timeout=SECONDS)


@pytest.mark.slow
def test_empty_parts_of_regions_and_transforms(run: Run) -> None:
    for make in (region, fno):
        run(compile_module, make, "aot_eager", [2], False, nprocs=3, timeout=SECONDS)


def transform() -> None:
    """An operator without parameters may be called in compiled code as it is."""
    torch._dynamo.reset()
    A = distribute(kron(ParDFT(torch.float64, 6), ParIdentity(torch.float64, 5)), world_row())
    x = A.layout_in.local_part(torch.arange(30.0, dtype=torch.float64).reshape(6, 5).sin())
    found = []
    for call in (
        torch.compile(lambda x: A(x * 2).abs(), fullgraph=True, backend="aot_eager"),
        lambda x: A(x * 2).abs(),
    ):
        own = x.clone().requires_grad_()
        y = call(own)
        (y.square() * (1 + tessel.world().rank)).sum().backward()
        found.append([y, own.grad])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


def world_row() -> list[int]:
    return [1, tessel.world().size]


def test_transforms(run: Run) -> None:
    run(transform, nprocs=2, timeout=SECONDS)


LOSSES: dict[str, Callable[[Any], nn.Module]] = {
    "squares": DistributedMSELoss,
    "units": DistributedBCELoss,
    "classes": lambda P: DistributedCrossEntropyLoss(P, weight=torch.tensor([1.0, 3.0])),
}


def compile_loss(name: str) -> list[str]:
    """Values, and gradients, of runs with other targets; a value that one worker may not have."""
    torch._dynamo.reset()
    P = grid()
    loss = LOSSES[name](P).double()
    fast = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for shift in (0.0, 1.0):
        target: Any = part(P, 4).add(shift).cos().square()
        if name == "classes":
            target = target[:, 0].round().long()
        found = []
        for call in (fast, loss):
            x = part(P, 4).square().requires_grad_()
            value = call(x, target)
            (value * (1 + P.rank)).backward()
            found.append([value, x.grad])
        torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)
    wrong = target + 2 if P.rank == 1 else target
    pairs = ((fast, wrong), (loss, wrong), (fast, target))
    return [said(partial(call, x, given)) for call, given in pairs]


@pytest.mark.parametrize("name", LOSSES)
def test_losses(run: Run, name: str) -> None:
    for compiled, eager, last in run(compile_loss, name, nprocs=2, timeout=SECONDS):
        assert last == "nothing", last
        expected = {"squares": "nothing", "units": "of target should be", "classes": "is none of"}
        assert expected[name] in eager, eager
        assert expected[name] in compiled, compiled


class Recomputed(nn.Module):
    """Convolutions, of which two are computed again in the backward pass."""

    def __init__(self, P: tessel.Partition) -> None:
        super().__init__()
        self.a, self.b = (DistributedConv2d(P, 2, 2, 3, padding=1) for _ in range(2))

    def block(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).sin()).sin()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(checkpoint(self.block, self.b(x), use_reentrant=False)).sin()


def recompute() -> None:
    compile_module(Recomputed, "aot_eager", [1, 7], evaluates=False)


def test_movements_are_not_repeated_where_torch_checkpoints(run: Run) -> None:
    """Checkpoints inside of compiled code; a movement is in no backward graph again."""
    run(recompute, nprocs=3, timeout=SECONDS)


def one_gradient() -> None:
    """What cannot be compiled on all workers alike is called as it is, without `fullgraph`."""
    torch._dynamo.reset()
    P = grid()
    torch.manual_seed(tessel.world().rank)
    plain = nn.Sequential(LAYERS["convolution"](P), nn.Tanh()).double().requires_grad_(False)
    fast = torch.compile(copy.deepcopy(plain), backend="aot_eager")
    found = []
    for model in (fast, plain, fast):
        x = part(P, 7).requires_grad_(tessel.world().rank == 0)
        y = model(x)
        if y.requires_grad:
            y.square().sum().backward()
        found.append((y.detach(), x.grad))
    assert (found[0][1] is not None) == (tessel.world().rank == 0)
    for each in (found[0], found[2]):
        torch.testing.assert_close(each, found[1], rtol=1e-11, atol=1e-12)


def test_a_gradient_on_one_worker_alone(run: Run) -> None:
    run(one_gradient, nprocs=2, timeout=SECONDS)
