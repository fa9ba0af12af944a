"""The spread tensor itself: what it says, what it holds, and what reaches it and its gradients.

Tests `tensor/tensor.py`, `tensor/attributes.py`, `tensor/create.py`, `tensor/grids.py`,
`tensor/windowed.py`.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tessel
from parity import close, values
from tessel import Layout, Partition
from tessel.tensor import gathering, table
from tessel.testing import count_memory, count_traffic

Run = Callable[..., list[Any]]
SHAPE = (6, 5, 4)


def rows(ndim: int = 3) -> Partition:
    """All workers along the first dimension."""
    world = tessel.world()
    return world.create_cartesian_topology_partition([world.size] + [1] * (ndim - 1))


def spread(seed: int = 1, shape: tuple[int, ...] = SHAPE, grad: bool = False) -> tessel.Tensor:
    return tessel.spread(values(shape, seed).requires_grad_(grad), rows(len(shape)))


def check_facts() -> None:
    x = spread()
    assert x.shape == x.size() == torch.Size(SHAPE) and x.size(1) == 5 and len(x) == 6
    assert (x.ndim, x.dim(), x.numel(), x.nelement()) == (3, 3, 120, 120)
    assert x.dtype == torch.float64 and x.device.type == "cpu" and x.is_floating_point()
    assert isinstance(x.layout, Layout) and x.layout.shape == SHAPE
    assert type(x.local) is Tensor and tuple(x.local.shape) == x.layout.local_shape
    close("local", x.local, x.layout.local_part(values(SHAPE, 1)))
    close("full", x.full(), values(SHAPE, 1))
    assert type(x.full()) is Tensor and isinstance(x, Tensor) and torch.is_tensor(x)
    whole = x.sum()
    assert isinstance(whole, tessel.Tensor) and f"{whole:.3f}" == f"{values(SHAPE, 1).sum():.3f}"


def check_text() -> None:
    """Printing sends nothing, and names the shape, the layout and this worker's values."""
    x = spread()
    with count_traffic() as traffic:
        text = repr(x) + str(x) + f"{x}"
    assert traffic.bytes_sent == 0 and traffic.agreements == 0
    assert "shape=(6, 5, 4)" in text
    assert ("Layout(" in text and "holds" in text) == (tessel.world().size > 1)


def check_values() -> None:
    """Numbers of what every worker has; else an error that says what to write, on all workers."""
    x, y = spread(), spread().mean()
    expected = values(SHAPE, 1).mean().item()
    assert y.item() == pytest.approx(expected) and float(y) == pytest.approx(expected)
    assert y.tolist() == pytest.approx(expected) and bool(y > -9) and int(y * 0 + 3.2) == 3
    assert float(y.numpy()) == pytest.approx(expected) == float(np.asarray(y))
    if tessel.world().size == 1:
        return
    for read in (
        lambda: x.tolist(),
        lambda: x.numpy(),
        lambda: np.asarray(x),
        lambda: x[0, 0, :1].squeeze().item() if False else x.sum((1, 2))[:1].tolist(),
        lambda: bool((x > 0).all(2).all(1)),
    ):
        with pytest.raises(ValueError, match=r"x\.full\(\)"):
            read()


def check_moves() -> None:
    """Other layouts, there and back, with gradients; the least is sent."""
    world = tessel.world()
    x = spread(grad=True)
    columns = world.create_cartesian_topology_partition([1, world.size, 1])
    y = x.move_to(columns)
    close("moved", y.local, Layout.balanced(columns, SHAPE).local_part(values(SHAPE, 1)))
    with count_traffic() as traffic:
        again = y.move_to(columns)
    assert again is y and traffic.bytes_sent == 0
    whole = y.move_to(Layout.whole(columns, SHAPE, shared=True))
    close("whole", whole.local, values(SHAPE, 1))
    with pytest.raises(ValueError, match="a layout of shape"):
        x.move_to(Layout.balanced(columns, (1, 2, 3)))
    with pytest.raises(TypeError, match="where"):
        x.move_to([2, 1])  # type: ignore[arg-type]


def check_changes_of_what_was_moved() -> None:
    """Sums of separate copies are tensors of their own, which may be changed in place."""
    P = rows()
    separate = Layout.whole(P, SHAPE)
    x = values(SHAPE, 1).requires_grad_()
    y = tessel.Move(separate, separate.summed)(x)
    close("sum", y.add_(1).detach(), P.size * x.detach() + 1)
    y.sum().backward()
    close("gradient", x.grad, torch.ones_like(x))


def check_gradients() -> None:
    """Of leaves that are plain, of parts and of spread leaves: all of one process."""
    weights = values(SHAPE, 7)
    expected = 2 * values(SHAPE, 1) * weights
    root = values(SHAPE, 1).requires_grad_()
    (tessel.spread(root, rows()).square() * weights).sum().backward()
    close("of a whole tensor", root.grad, expected)
    layout = Layout.balanced(rows(), SHAPE)
    part = layout.local_part(values(SHAPE, 1)).clone().requires_grad_()
    (tessel.from_local(part, rows()).square() * weights).sum().backward()
    close("of a part", part.grad, layout.local_part(expected))
    leaf = spread().detach().requires_grad_()
    assert leaf.is_leaf and leaf.grad is None
    for factor in (1, 2):
        (leaf.square() * weights).sum().backward()
        assert isinstance(leaf.grad, tessel.Tensor) and leaf.grad.layout == leaf.layout
        close("of a spread leaf", leaf.grad.full(), factor * expected)
    leaf.grad.zero_()
    close("zeroed", leaf.grad.full(), torch.zeros(SHAPE, dtype=torch.float64))
    leaf.grad = None
    assert leaf.grad is None
    (grad,) = torch.autograd.grad((leaf.square() * weights).sum(), leaf)
    close("by autograd.grad", grad.full(), expected)
    (first,) = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    close("second order", second.full(), 6 * values(SHAPE, 1))
    torch.autograd.backward([(leaf * 2).sum(), (leaf * 3).sum()])
    close("by autograd.backward", leaf.grad.full(), torch.full(SHAPE, 5.0, dtype=torch.float64))
    (leaf * 2).backward(tessel.spread(weights, rows()))
    close("with a gradient", leaf.grad.full(), 5 + 2 * weights)
    with pytest.raises(RuntimeError, match="scalar outputs"):
        (leaf * 2).backward()


def check_hooks() -> None:
    x = spread().detach().requires_grad_()
    seen: list[Any] = []
    y = x * 2
    y.register_hook(lambda grad: seen.append(grad) or 10 * grad)
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf))
    y.sum().backward()
    assert isinstance(seen[0], tessel.Tensor) and seen[0].shape == SHAPE and seen[1] is x
    close("gradient", x.grad.full(), torch.full(SHAPE, 20.0, dtype=torch.float64))
    y = x * 3
    y.retain_grad()
    y.sum().backward()
    close("retained", y.grad.full(), torch.ones(SHAPE, dtype=torch.float64))
    check_hooks_before_changes()


def check_hooks_before_changes() -> None:
    """A hook gets the gradient of what it was given, also if that is changed in place later.

    Parts of these are views of what was computed, and torch forgets hooks of views.
    """
    images, weight = values((2, 3, 8, 5), 1), values((3, 3, 3, 3), 2)
    running = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    grid = tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size, 1])
    for make in (
        lambda x: F.conv2d(x, weight, padding=1),
        lambda x: F.batch_norm(x, *running),
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: x.max(1).values,
    ):
        for change in (
            lambda y: F.relu(y, inplace=True),
            lambda y: y.mul_(2.0),
            lambda y: y.masked_fill_(y > 0, 0.5),
            lambda y: y.__setitem__((slice(None), slice(0, 1)), 0.0) or y,
        ):
            seen: list[Tensor] = []
            for x in (images.clone(), tessel.spread(images, grid)):
                y = make(x.requires_grad_())
                y.register_hook(seen.append)
                change(y).square().sum().backward()
                seen.append(x.grad)
            assert len(seen) == 4
            close("hook", seen[2].full(), seen[0])
            close("gradient", seen[3].full(), seen[1])
    y = tessel.spread(images, grid).requires_grad_() * 1
    y.register_hook(seen.append)
    row = y[:, :1]
    y = F.conv2d(y, weight, padding=1)
    y.register_hook(seen.append)
    row = y[:1]
    if y._part._is_view():
        with pytest.raises(NotImplementedError, match="hooks"):
            y.add_(1)
    del row


def check_copies() -> None:
    """deepcopy, pickle and torch.save keep the part and its layout, also of parameters."""
    x = spread().detach().requires_grad_()
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for each in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), loaded):
        assert type(each) is tessel.Tensor and each.layout == x.layout and each.requires_grad
        assert each.local.data_ptr() != x.local.data_ptr()
        close("copy", each.full(), x.full())
    parameter = nn.Parameter(spread())
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, tessel.Tensor)
    assert isinstance(copy.deepcopy(parameter), nn.Parameter)
    module = nn.Module()
    module.weight = parameter
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    (module.weight.square()).sum().backward()
    optimizer.step()
    close("a step", module.weight.full(), torch.zeros(SHAPE, dtype=torch.float64))


def check_freed() -> None:
    """What a function of the user's own has computed is freed with the graph."""
    with count_memory() as memory:
        x = spread(grad=True)
        y = Cube.apply(x * 2, torch.ones((), dtype=torch.float64))
        (y * 3).sum().backward()
        del x, y
        assert memory.current < SHAPE[0] * SHAPE[1] * 8, memory.current  # some numbers stay


@pytest.mark.parametrize("nprocs", [1, 2])
def test_functions_of_users_keep_nothing(run: Run, nprocs: int) -> None:
    run(check_freed, nprocs=nprocs)


class Cube(torch.autograd.Function):
    """A function with a backward pass of its own, which mixes values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return scale * x**3 - x.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return 3 * scale * x**2 * grad - grad.mean(), (x**3 * grad).sum()


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.tanh(x) - x.mean()


def check_round_ways() -> None:
    """Code that goes round torch's functions: right, or an error; never a part for the whole."""
    for does in (
        lambda x, s: Cube.apply(x, s) * 2,
        lambda x, s: scripted(x) * s,
        lambda x, s: torch.ops.aten.softmax(x, 0) * s,
        lambda x, s: torch.ops.aten.cumsum.default(x, 0) * s,
    ):
        results = []
        for x in (values(SHAPE, 1).requires_grad_(), spread().detach().requires_grad_()):
            scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
            y = does(x, scale)
            (y * values(SHAPE, 9)).sum().backward()
            grad = x.grad.full() if isinstance(x, tessel.Tensor) else x.grad
            y = y.full() if isinstance(y, tessel.Tensor) else y
            results.append((y.detach(), grad, scale.grad))
        for what, a, b in zip(("output", "gradient", "of the scale"), *results, strict=True):
            close(what, b, a, 1e-11)
    x = spread()
    with torch.no_grad():
        close("scripted", scripted(x).full(), scripted(values(SHAPE, 1)))
    for again in (torch.Tensor(x), x.as_subclass(Tensor), torch.as_tensor(x), nn.Parameter(x)):
        assert isinstance(again, tessel.Tensor) and again.shape == SHAPE
    for taken in (
        lambda: x.data_ptr(),
        lambda: x.untyped_storage(),
        lambda: np.from_dlpack(x),
        lambda: torch.utils.dlpack.to_dlpack(x),
    ):
        with pytest.raises((ValueError, RuntimeError, TypeError, BufferError)):
            taken()


def check_hooks_of_plain_tensors(way: str) -> None:
    """Hooks of a plain tensor that such code uses are called as in one process: for the sum."""
    results = []
    for x in (values(SHAPE, 1).requires_grad_(), spread().detach().requires_grad_()):
        scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        got: list[Tensor] = []
        scale.register_hook(lambda grad, got=got: got.append(grad) or 3 * grad)
        scale.register_post_accumulate_grad_hook(lambda p, got=got: got.append(p.grad.clone()))
        y: Any = x * scale
        if "checkpoint" in way:
            y = checkpoint(torch.mul, y, scale, use_reentrant=True)
        if "function" in way:
            y = Cube.apply(y, scale)
        (y * values(SHAPE, 9)).sum().backward()
        x_grad = x.grad.full() if isinstance(x, tessel.Tensor) else x.grad
        results.append([x_grad, scale.grad, *got])
    assert len(results[0]) == len(results[1]) == 4
    for a, b in zip(*results, strict=True):
        close("gradient", b, a, 1e-11)


@pytest.mark.parametrize("way", ["function", "checkpoint", "function of a checkpoint"])
def test_hooks_of_plain_tensors(run: Run, way: str) -> None:
    run(check_hooks_of_plain_tensors, way, nprocs=2)


@torch.jit.script
def softmax(x: Tensor) -> Tensor:
    """By the name of another function."""
    return torch.tanh(x) - x.mean()


def check_scripts() -> None:
    """Scripted and traced modules, of whole operands; random numbers are the same on all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    expected = model(values(SHAPE, 1))
    for each in (torch.jit.script(model), torch.jit.trace(model, (values(SHAPE, 1),))):
        model.zero_grad()
        y = each(spread())
        close("scripted", y.full(), expected)
        y.sum().backward()
        ours = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(values(SHAPE, 1)).sum().backward()
        for a, b in zip(ours, model.parameters(), strict=True):
            close("gradient", a, b.grad)
    close("of another name", softmax(spread()).full(), softmax(values(SHAPE, 1)))
    torch.manual_seed(tessel.world().rank)  # the first worker's counts
    y = torch.jit.script(nn.Dropout(0.5))(spread())
    parts = tessel.from_local(y.full()[None], rows(4)).full()
    assert bool((parts == parts[:1]).all()), "workers drew different numbers"


class Sorted(torch.autograd.Function):
    """A function whose backward pass has functions with rules, which must not gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (2 * x * grad).flip(1) + grad.sum(1, keepdim=True)


def check_backward_code() -> None:
    """Backward code of users follows the rules, as all their code does."""
    x, alone = spread().detach().requires_grad_(), values(SHAPE, 1).requires_grad_()
    (Sorted.apply(alone) * values(SHAPE, 2)).sum().backward()
    with tessel.fallback("raise"):
        (Sorted.apply(x) * values(SHAPE, 2)).sum().backward()
    close("gradient", x.grad.full(), alone.grad)


class Assigned(torch.autograd.Function):
    """Writes values into a plain tensor that it gives back, as solvers of `torchdiffeq` do."""

    @staticmethod
    def forward(ctx: Any, scratch: Tensor, value: Tensor, index: Any) -> Tensor:
        ctx.operator = index  # Tessel's own nodes have an attribute of this name
        scratch.data[index] = value
        return scratch

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, grad[ctx.operator], None


def check_plain_results() -> None:
    """Was: gradients of what a function gave as a plain tensor ended, and nobody was told."""
    found = []
    for is_alone in (True, False):
        x, scale = values((6,), 1).requires_grad_(), values((), 2).requires_grad_()
        y: Any = (x if is_alone else tessel.spread(x, rows(1))) * scale
        k = torch.zeros(6, 2, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plain tensor is written whole
            k = Assigned.apply(k, y, (..., 0))
            k = Assigned.apply(k, y * y, (..., 1))
        z = y + (k * values((2,), 3)).sum(-1).view_as(y)
        loss = (z * z).sum()
        first = torch.autograd.grad(loss, [x, scale, y], create_graph=True)
        again = torch.autograd.grad(first[0].sum(), [x, scale], retain_graph=True)
        alone = torch.autograd.grad((k * values((6, 2), 4)).sum(), y)
        results = (loss, *first, *again, *alone)
        found.append([e.full() if isinstance(e, tessel.Tensor) else e for e in results])
    for number, (a, b) in enumerate(zip(*found, strict=True)):
        close(f"result {number}", b.detach(), a.detach())


def check_lost_gradients() -> list[str]:
    """Was: no gradient, and no error, where a plain loss is computed from such plain results alone.

    So were gradients of the initial values of `torchdiffeq.odeint_adjoint`.
    """
    said = []
    for is_leaf in (True, False):
        x = tessel.spread(values((6,), 1), rows(1)).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plain tensor is written whole
            y: Any = x if is_leaf else x * 2
            k = Assigned.apply(torch.zeros(6, 2, dtype=torch.float64), y.exp(), (..., 0))
            whole = Whole.apply(y)
        for loss in (k.sum(), whole.sum()):
            with pytest.raises(NotImplementedError, match="gradient of a spread tensor would be l"):
                loss.backward(retain_graph=True)
            (found,) = torch.autograd.grad(loss, x, retain_graph=True)
            assert found.full().shape == (6,)
        with torch.no_grad():
            norm = x.square().sum()
        ((y * norm).sum() + whole.sum() * y.mean()).backward()  # nothing is lost
        said.append(str(x.grad.layout))

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"whole": Whole.apply(super().forward(x))}

    model = Model(3, 2).double()
    report = tessel.testing.check_model(model, values((6, 3), 1), where=rows(2))
    own = tessel.nn.distribute_module(nn.Linear(3, 2).double(), rows(2))
    y = Called.apply(tessel.spread(values((6, 3), 1), rows(2)).requires_grad_(), own)
    if tessel.world().size > 1:
        with pytest.raises(ValueError, match="where plain tensors are whole"):
            (y * tessel.spread(values((6, 2), 2), rows(2))).sum().backward()
    assert report.passed  # the result of a converted model has its gradients
    return said


class Called(torch.autograd.Function):
    """Calls a converted model again in its backward pass, with the whole of what it kept."""

    @staticmethod
    def forward(ctx: Any, x: Any, model: Any) -> Any:
        ctx.whole, ctx.model = x.full(), model
        return model(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.model(ctx.whole), None


class Whole(torch.autograd.Function):
    """Gives back the whole values of twice a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        y = 2 * x
        return y.full() if isinstance(y, tessel.Tensor) else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def check_vmap() -> None:
    """It goes round torch's functions: right, or an error where it changes tensors there."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).double()
    close("of rows", torch.func.vmap(layer)(spread()).full(), layer(values(SHAPE, 1)))
    with pytest.raises(NotImplementedError, match=r"as torch\.func\.vmap"):
        torch.func.vmap(layer)(spread(shape=(6, 4)))
    close("afterwards", spread().full(), values(SHAPE, 1))


def check_transforms() -> None:
    """`torch.func`: of functions that spread their input, and of functional calls."""
    weights, P = values(SHAPE, 5), rows()

    def loss(x: Tensor) -> Tensor:
        y: Any = tessel.spread(x, P)
        return ((y.square() - y.mean()) * weights).sum().full()

    x = values(SHAPE, 1)

    def alone(x: Tensor) -> Tensor:
        return ((x.square() - x.mean()) * weights).sum()

    close("grad", torch.func.grad(loss)(x), torch.func.grad(alone)(x))
    torch.manual_seed(0)  # plain tensors are the same on all workers
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    y = torch.func.functional_call(model, parameters, (spread(),))
    close("functional_call", y.full(), torch.func.functional_call(model, parameters, (x,)))


def check_modes() -> None:
    x = spread(grad=True)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        close("inference", (spread() + 1).sum(0).full(), (values(SHAPE, 1) + 1).sum(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(4, 2)(spread().float()).dtype == torch.bfloat16
    y = x.clone()
    y += 1
    y.mul_(2).clamp_(min=0)
    y.sum().backward()
    y = torch.zeros(3, dtype=torch.float64)
    y.add_(x.detach().sum())
    close("in place of a plain one", y, values(SHAPE, 1).sum().expand(3))


def check_fallback() -> None:
    """What has no rule gathers, says so once for each place, or raises."""
    x = spread()
    expected = torch.logdet(torch.eye(6, dtype=torch.float64) * 2)

    def call() -> Any:
        y = tessel.spread(torch.eye(6, dtype=torch.float64) * 2, rows(2))
        return torch.logdet(y)

    gathering._said.clear()
    if tessel.world().size > 1:
        with pytest.warns(tessel.tensor.GatherWarning, match=r"`logdet` has no rule .*288 bytes"):
            close("gathered", call().full(), expected)
        with tessel.fallback("raise"), pytest.raises(NotImplementedError, match="`logdet`"):
            call()
        with pytest.raises(NotImplementedError, match="no rule"):
            x.clone().resize_(2)
    with pytest.raises(ValueError, match="fallback must be"), tessel.fallback("maybe"):
        pass


def check_making() -> None:
    """Factories make parts only; random values do not depend on how the tensor lies."""
    world = tessel.world()
    P = rows(2)
    for made, alone in (
        (tessel.zeros(6, 4, where=P), torch.zeros(6, 4)),
        (tessel.ones((6, 4), where=P, dtype=torch.int64), torch.ones(6, 4, dtype=torch.int64)),
        (tessel.full((6, 4), 2.5, where=P), torch.full((6, 4), 2.5)),
        (tessel.arange(7, where=world), torch.arange(7)),
        (tessel.arange(1, 9, 3, where=world), torch.arange(1, 9, 3)),
        (tessel.linspace(0, 1, 7, where=world), torch.linspace(0, 1, 7)),
    ):
        assert made.dtype == alone.dtype
        close("made", made.full(), alone)
    assert tessel.empty(6, 4, where=P).shape == (6, 4)
    assert tessel.zeros(3, 3, where=P, requires_grad=True).requires_grad
    other = world.create_cartesian_topology_partition([1, world.size])
    for draw in (
        lambda where: tessel.rand(60, 40, where=where),
        lambda where: tessel.randn((60, 40), where=where, dtype=torch.float64),
        lambda where: tessel.randn(60, 40, where=where, dtype=torch.complex64),
        lambda where: tessel.randint(-3, 4, (60, 40), where=where),
        lambda where: tessel.randint(9, (60, 40), where=where),
    ):
        torch.manual_seed(world.rank)  # the first worker's counts
        a = draw(P).full()
        b = draw(P).full()
        torch.manual_seed(world.rank)
        assert torch.equal(a, draw(other).full()) and not torch.equal(a, b)
    u, n = tessel.rand(400, 50, where=P).full(), tessel.randn(400, 50, where=P).full()
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.01
    assert abs(n.mean()) < 0.03 and abs(n.std() - 1) < 0.02
    k = tessel.randint(-3, 4, (400, 50), where=P).full()
    assert k.unique().tolist() == [-3, -2, -1, 0, 1, 2, 3]


def check_bad_input() -> None:
    """One worker's wrong tensor raises on all, with the same words, and nothing is lost."""
    world = tessel.world()
    if world.size == 1:
        return
    mine = (3, 4) if world.rank else (3, 5)
    for call in (
        lambda: tessel.spread(torch.ones(mine), rows(2)),
        lambda: tessel.from_local(torch.ones(mine), rows(2)),
        lambda: tessel.spread(torch.ones(3, 4, dtype=torch.float32 if world.rank else None), world),
        lambda: tessel.from_local(torch.ones(2, 2, 2), rows(2)),
        lambda: tessel.from_local(torch.ones(2), Layout.balanced(world, (3,))),
    ):
        with pytest.raises(ValueError) as error:
            call()
        said = world.group.share_objects(str(error.value))
        assert len(set(said)) == 1, said
    with pytest.raises(TypeError, match="where"):
        tessel.spread(torch.ones(3), 4)  # type: ignore[arg-type]
    if world.size > 2:
        with pytest.raises(ValueError, match="different workers or grids"):
            spread().sum() + tessel.spread(
                values((4,), 1), world.create_partition_inclusive([1, 0])
            )
    close("afterwards", spread().full(), values(SHAPE, 1))


def check_grids() -> None:
    """Operands on several grids of the same workers: as in one process."""
    world = tessel.world()
    n = world.size

    def grid(*shape: int) -> Partition:
        return world.create_cartesian_topology_partition(shape)

    def compute(a: Tensor, b: Tensor, row: Tensor, labels: Tensor) -> list[Tensor]:
        written = a.clone()
        written[1:3] = b[:2]
        written.add_(b, alpha=0.5)
        return [
            *(a + b, a @ b.T, torch.cat([a, b], 1), torch.where(a > 0, b, row)),
            *(nn.functional.linear(a, b, b[:, 0]), a[labels], nn.functional.embedding(labels, b)),
            *(nn.functional.mse_loss(a, b), nn.functional.cross_entropy(a, labels)),
            *(torch.stack([a.sum(), b.sum()]), torch.einsum("ij,j->i", a, row), a[b > 0]),
            *(written, nn.functional.layer_norm(b, (5,), row)),
        ]

    whole = [values((4, 5), 1), values((4, 5), 2), values((5,), 3)]
    labels = torch.tensor([3, 0, 2, 2])
    alone = [each.clone().requires_grad_() for each in whole]
    where = (grid(n, 1), grid(1, n), grid(n))
    apart: Any = [
        tessel.spread(each, there).requires_grad_()
        for each, there in zip(whole, where, strict=True)
    ]
    with tessel.fallback("raise"):
        found = compute(*apart, tessel.spread(labels, grid(n)))
    expected = compute(*alone, labels)
    for got, want in zip(found, expected, strict=True):
        assert isinstance(got, tessel.Tensor)
        close("value", got.full(), want.detach())

    def derived(results: list[Any], inputs: list[Any]) -> list[Any]:
        first = torch.autograd.grad(
            sum((each**2).sum() for each in results), inputs, create_graph=True
        )
        return [*first, *torch.autograd.grad(sum((each**2).sum() for each in first), inputs)]

    for got, want in zip(derived(found, apart), derived(expected, alone), strict=True):
        close("gradient", got.full(), want)
    for each, there in zip(apart, where, strict=True):
        assert each.layout.partition == there
    with count_traffic() as traffic:  # the same parts, in other words
        y = apart[1].detach() * tessel.spread(
            whole[0], Layout.split(grid(n, 1), (4, 5), (None, 0), shared=[1])
        )
        labelled = apart[0].detach().sum(1) + tessel.spread(labels, grid(n))
    assert traffic.bytes_sent == 0
    close("product", y.full(), whole[0] * whole[1])
    close("sum", labelled.full(), whole[0].sum(1) + labels)


def check_comparisons() -> None:
    """`equal`, `allclose` and `in`: one answer, which all workers get."""
    world = tessel.world()
    x, whole = spread(), values(SHAPE, 1)
    columns = tessel.spread(whole, world.create_cartesian_topology_partition([1, world.size, 1]))
    last = torch.zeros(SHAPE, dtype=torch.float64)
    last[-1, -1, -1] = 1e-3
    with tessel.fallback("raise"):
        assert torch.equal(x, whole) and torch.equal(whole, x) and x.equal(columns)
        assert not torch.equal(x, whole + last) and not torch.equal(x, whole[:3])
        assert torch.allclose(x, whole + last * 1e-9) and not torch.allclose(x, whole + last)
        assert torch.allclose(input=x, other=whole + last, rtol=0, atol=1e-2)
        assert whole[5, 4, 3].item() in x and 17.0 not in x


def check_other_dtypes() -> None:
    """`x.data = ...` of another dtype, as `module.float()` sets it: wrapper and part change."""
    module = nn.Module()
    module.weight = nn.Parameter(spread())
    module.register_buffer("table", spread(2))
    (module.weight * module.table).sum().backward()
    with tessel.fallback("raise"):  # a module asks tensors things that are no functions
        module.float()
    weight: Any = module.weight
    assert weight.dtype == weight.local.dtype == weight.grad.dtype == torch.float32
    assert (weight * 2).dtype == torch.float32 and weight.is_leaf and weight.nbytes == 480
    weight.grad = None
    (weight * module.table).sum().backward()
    assert weight.grad.dtype == torch.float32
    close("gradient", weight.grad.full(), values(SHAPE, 2).float())


def check_detach_in_place() -> None:
    x = spread().requires_grad_()
    y = (x * 2).detach_()
    assert not y.requires_grad and y.is_leaf
    (x * y).sum().backward()
    assert x.grad is not None
    close("gradient", x.grad.full(), 2 * values(SHAPE, 1))  # type: ignore[attr-defined]
    assert "local" in dir(x)


def check_initialization() -> None:
    """`torch.nn.init` fills a spread tensor; the values do not depend on its layout."""
    world = tessel.world()
    for fill in (
        *(nn.init.kaiming_uniform_, nn.init.kaiming_normal_, nn.init.xavier_uniform_),
        *(nn.init.uniform_, nn.init.normal_, nn.init.trunc_normal_, nn.init.zeros_),
        lambda x: nn.init.constant_(x, 3.0),
        lambda x: nn.init.kaiming_uniform_(x, a=5**0.5, nonlinearity="relu", mode="fan_out"),
    ):
        drawn = []
        for where in (Layout.balanced(rows(2), (6, 4)), Layout.whole(world, (6, 4), shared=True)):
            torch.manual_seed(3)
            x = fill(tessel.empty(6, 4, where=where, dtype=torch.float64).requires_grad_())
            assert x.requires_grad and x.is_leaf
            drawn.append(x.detach().full())
        close("drawn", *drawn)
    bound = (6 / 4) ** 0.5  # of kaiming_uniform_ for four inputs
    torch.manual_seed(3)
    x = nn.init.kaiming_uniform_(tessel.empty(600, 4, where=rows(2)))
    assert 0.95 * bound < float(x.abs().max()) <= bound


def check_named_arguments() -> None:
    """Factories take arguments by torch's names."""
    world = tessel.world()
    for settings in ({"end": 5}, {"start": 1, "end": 6, "step": 2}):
        got = tessel.arange(where=world, **settings)  # type: ignore[arg-type]
        close("arange", got.full(), torch.arange(**settings))
    close("step", tessel.arange(0, 5, step=2, where=world).full(), torch.arange(0, 5, step=2))
    torch.manual_seed(0)
    one = tessel.randint(2, 9, (7,), where=world).full()
    for settings in ({"low": 2, "high": 9, "size": (7,)},):
        torch.manual_seed(0)
        close("randint", tessel.randint(where=world, **settings).full(), one)
    torch.manual_seed(0)
    close("size", tessel.randint(2, 9, size=(7,), where=world).full(), one)
    assert int(tessel.randint(3, size=(9,), where=world).max()) < 3
    for wrong in ((3,), (1, 2, (3,), 4)):
        with pytest.raises(TypeError, match="randint"):
            tessel.randint(*wrong, where=world)


def check_shapes_in_place() -> None:
    """The tensor and its part get other shapes together; what cannot be so raises."""
    for make in (spread, lambda: spread().sum(0, keepdim=True)):
        for change in (
            lambda x: x.transpose_(0, 1),
            lambda x: x.unsqueeze_(0),
            lambda x: x.squeeze_(),
            lambda x: x.swapaxes_(0, 2),
        ):
            x, alone = make(), make().full()
            assert change(x) is x
            change(alone)
            assert x.shape == alone.shape and tuple(x.local.shape) == x.layout.local_shape
            close("values", (x * 2).full(), alone * 2)
        x = make()
        with pytest.raises(NotImplementedError, match=r"in place|no rule"):
            x.resize_(2, 2)
        assert x.shape == make().shape and tuple(x.local.shape) == x.layout.local_shape
    # what torch has as a view of another tensor still is one, or says that it is not
    x = spread()
    view = x[:, 1:3]
    view.transpose_(1, 2).mul_(3)
    alone = values(SHAPE, 1).clone()
    alone[:, 1:3] *= 3
    close("changed by a view", x.full(), alone)


def check_collectives() -> None:
    """Those of torch.distributed work on whole values; what they would write into parts is lost."""
    world, x = tessel.world(), spread()
    if world.size == 1:
        return
    loss = x.square().mean()
    expected = world.size * loss.item()
    dist.all_reduce(loss)
    assert loss.item() == pytest.approx(expected)
    plain = [torch.zeros(SHAPE, dtype=x.dtype) for _ in range(world.size)]
    for collective in (
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.gather(x, plain if world.rank == 0 else None, 0),
        lambda: dist.scatter(x, plain if world.rank == 0 else None, 0),
        lambda: dist.reduce(x, 0),
        lambda: dist.all_gather_into_tensor(torch.cat(plain), x),
        lambda: dist.all_to_all_single(plain[0], x),
        lambda: dist.recv(x, 0),
        lambda: dist.send(x, 0),
        lambda: dist.all_gather([torch.zeros_like(x) for _ in range(world.size)], x),
    ):
        with pytest.raises(ValueError, match=r"torch.distributed's .* needs all values"):
            collective()
    close("unchanged", x.full(), values(SHAPE, 1))
    if world.size > 1:  # was: the part of another worker was taken for the own one
        with pytest.raises(ValueError, match="got the part that worker"):
            dist.all_gather_object([None] * world.size, x)
    dist.all_gather(plain, x.full())
    close("gathered", plain[-1], values(SHAPE, 1))


def check_layers() -> None:
    """Layers over partitions take spread tensors, and give them."""
    P = rows(3)
    torch.manual_seed(0)
    conv = tessel.nn.DistributedConv1d(P, 5, 3, 3, padding=1).double()
    y = conv(spread())
    assert isinstance(y, tessel.Tensor) and y.shape == (6, 3, 4)
    close("layer", y.local, conv(spread().local))
    model = tessel.nn.distribute_module(nn.Sequential(nn.Conv1d(5, 3, 3).double(), nn.ReLU()), P)
    y = model(spread())
    assert isinstance(y, tessel.Tensor) and y.shape == (6, 3, 2)
    close("model", y.local, model(spread().local))


def check_outside() -> None:
    """A partition of some workers: the others hold the tensor, too, without a part."""
    world = tessel.world()
    if world.size < 3:
        return
    some = world.create_partition_inclusive([0, 1])
    x = tessel.spread(values((5,), 1), some)
    assert x.shape == (5,) and x.local.numel() == (0 if world.rank > 1 else 3 - world.rank)
    y = x.move_to(world)
    close("over all", y.full(), values((5,), 1))
    if some.active:
        close("function", (x * 2).full(), 2 * values((5,), 1))


CHECKS = (
    *(check_facts, check_text, check_values, check_moves, check_gradients, check_hooks),
    *(
        check_copies,
        check_round_ways,
        check_transforms,
        check_scripts,
        check_backward_code,
        check_plain_results,
        check_lost_gradients,
        check_vmap,
        check_modes,
        check_fallback,
    ),
    *(check_making, check_bad_input, check_collectives, check_layers, check_outside, check_grids),
    *(check_comparisons, check_other_dtypes, check_detach_in_place, check_initialization),
    *(check_named_arguments, check_shapes_in_place, check_changes_of_what_was_moved),
)


@pytest.mark.parametrize("nprocs", [1, 3])
@pytest.mark.parametrize("check", CHECKS, ids=[each.__name__[6:] for each in CHECKS])
def test_tensor(run: Run, check: Callable[[], None], nprocs: int) -> None:
    run(check, nprocs=nprocs, timeout=60)


def test_a_rule_that_comes_later_is_followed() -> None:
    """Also one for a function that was called before without it."""
    x = tessel.spread(torch.ones(3), tessel.world())
    name, rules = "erfcx", dict(table.RULES)
    try:
        assert torch.special.erfcx(x).local.sum() < 3
        table.rule("special_erfcx", name)(lambda name, func, args, kwargs: args[0] * 7)
        assert torch.equal(torch.special.erfcx(x).local, torch.full((3,), 7.0))
    finally:
        table.RULES.clear()
        table.RULES.update(rules)
        table.FOUND.clear()
    assert torch.special.erfcx(x).local.sum() < 3
