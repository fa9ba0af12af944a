"""Calls that models seldom make: a plain first operand, numbers as tensors, nothing to compute.

Tests `tensor/call.py`, `tensor/contractions.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tessel
from parity import values
from tessel import Layout, Partition
from tessel.tensor.table import spread_among, tensors
from test_spread import CASES as SPREAD_CASES
from test_spread import Run, Verdict, derived, flat, partition, ways

# a function, the shapes of its operands, and which of them are spread, along which dimension
Rare = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], dict[int, int]]


def targets(x: Tensor) -> Tensor:
    """Numbers of classes up to 3."""
    return (x.detach().abs() * 7).long() % 3


def written(x: Tensor, key: Any, value: Tensor) -> Tensor:
    y = x + 0
    y[key] = value
    return y


CASES: dict[str, Rare] = {
    # torch's derivative refuses strides that the gradient of an empty part may have
    "view_as_real": (
        lambda x: torch.view_as_real(x.to(torch.complex128)).sum(-1),
        ((2, 3),),
        {0: 0},
    ),
    "quantile of one value": (lambda x: x.sum().quantile(0.5, 0, True), ((4, 3),), {0: 0}),
    "diff of order 0": (lambda x, y: torch.diff(x, 0, 0, append=y), ((4, 3), (2, 3)), {1: 0}),
    "diff of order 0 with an end": (lambda x: x.diff(0, 0, x[:1]), ((4, 3),), {0: 0}),
    "a number at indices": (
        lambda x, y: x.index_fill(-1, torch.tensor([0, 2, 4]), y),
        ((5, 5), ()),
        {0: 1},
    ),
    "a number at indices in place": (
        lambda x, y: (x + 0).index_fill_(0, torch.tensor([3, 0]), y * 2),
        ((5, 2), ()),
        {0: 0},
    ),
    # numbers are taken first: the result is (rows, index), not (index, rows) as in NumPy
    "a number, rows and an index": (
        lambda x, y: written(x, (0, slice(None), torch.tensor([2, 0, 1])), y),
        ((2, 3, 3), (3, 3)),
        {0: 1},
    ),
    "a number, rows and a square index": (
        lambda x, y: written(x, (0, slice(None), torch.tensor([[0, 1], [1, 0]])), y),
        ((2, 3, 2), (3, 2, 2)),
        {0: 1},
    ),
    "prelu of a number": (F.prelu, ((), (1,)), {1: 0}),
    "products of whole numbers": (
        lambda x, y: torch.addmv(targets(x), targets(y), targets(x), beta=0.4, alpha=1.6),
        ((4,), (4, 4)),
        {1: 0},
    ),
    "covariances of whole numbers": (lambda x: torch.cov(targets(x)), ((2, 6),), {0: 1}),
    "angles to what is broadcast": (
        lambda x, y: F.cosine_similarity(x, y, -2),
        ((1, 2, 3), (2, 1, 3)),
        {0: 1, 1: 2},
    ),
    # its result does not depend on q, of which torch's own gradient is None
    "quantiles between two": (
        lambda x, q: x.quantile(q.sigmoid(), 1, interpolation="midpoint") + 0 * q.sum(),
        ((2, 5), (3,)),
        {0: 0},
    ),
    "cross_entropy with a spread weight": (
        lambda x, y, w: F.cross_entropy(x, y.softmax(1), w),
        ((2, 3), (2, 3), (3,)),
        {2: 0},
    ),
    "one group of one sample": (
        lambda x, w: F.group_norm(x, 1, w),  # of which some workers have one place
        ((1, 4, 4), (4,)),
        {0: 2},
    ),
    "determinants of no entries": (torch.linalg.slogdet, ((3, 0, 0),), {0: 0}),
    "tolerances": (
        lambda x, y: torch.linalg.pinv(x, rtol=y.detach().abs() / 1e6),
        ((3, 2, 2), (3,)),
        {0: 0},
    ),
    "one variance": (torch.cov, ((1, 6),), {0: 1}),
    "one correlation": (torch.corrcoef, ((1, 6),), {0: 1}),
    "multi_margin_loss of one sample": (
        lambda x, y: F.multi_margin_loss(x, targets(y)),
        ((5,), (1,)),
        {1: 0},
    ),
    "multi_margin_loss with a spread weight": (
        lambda x, w: F.multi_margin_loss(x, torch.tensor([0, 4]), weight=w.detach()),
        ((2, 5), (5,)),
        {1: 0},
    ),
    "lengths of ctc_loss": (
        lambda x, n: F.ctc_loss(
            x.log_softmax(2),
            torch.tensor([[1, 2], [2, 1]]),
            (n.detach() * 0).long() + 5,
            torch.tensor([2, 1]),
        ),
        ((5, 2, 3), (2,)),
        {1: 0},
    ),
    "pad of no samples": (lambda x: F.pad(x, (0, 2, 1, 1), "reflect"), ((0, 2, 3, 3),), {0: 1}),
    "a pool whose stride is ()": (
        lambda x: F.avg_pool2d(x, 2, ()) + F.max_pool2d(x, 2, ()),
        ((1, 2, 6, 4),),
        {0: 2},
    ),
    "take_along_dim from the end": (
        lambda x: torch.take_along_dim(x, torch.tensor([[-1, 0, -4]]), 1),
        ((3, 4),),
        {0: 1},
    ),
}
for _D in (1, 2, 3):
    CASES[f"max_unpool{_D}d of a plain input"] = (
        lambda x, y, D=_D: getattr(F, f"max_unpool{D}d")(
            x, getattr(F, f"max_pool{D}d")(y, 2, return_indices=True)[1], 2
        ),
        ((2, *[2] * _D), (2, *[4] * _D)),
        {1: 1},
    )


def check_rare_calls() -> list[str]:
    verdict, workers = Verdict(), tessel.world().size
    for name, (does, shapes, split) in CASES.items():
        found = []
        for spreads in (False, True):
            leaves = []
            for k, shape in enumerate(shapes):
                x = values(shape, 3 + k).clone()
                if spreads and k in split:
                    grid = partition([workers if d == split[k] else 1 for d in range(len(shape))])
                    x = tessel.spread(x, Layout.balanced(grid, shape))
                leaves.append(x.requires_grad_())
            outputs = flat(does(*leaves))
            found.append([*outputs, *derived(outputs, leaves, 1)])
        assert len(found[0]) == len(found[1]), name
        for k, (expected, got) in enumerate(zip(*found, strict=True)):
            verdict.compare(f"{name}, {k}", got, expected)
    return verdict.wrong


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_rare_calls(run: Run, nprocs: int) -> None:
    for wrong in run(check_rare_calls, nprocs=nprocs):
        assert not wrong, "\n".join(wrong)


class Naming(TorchFunctionMode):
    """Calls of torch's functions in C++, with all arguments by the names that torch takes.

    Which these are, is found where tensors are plain.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, tuple[str, ...]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kinds = [Tensor if isinstance(each, Tensor) else type(each) for each in args]
        key = func, tuple(kwargs), tuple(kinds)
        if key not in self.found and next(spread_among(args, kwargs), None) is None:
            for names in self._names(func, len(args)):
                try:
                    result = self._called(func, names, args, kwargs)
                except TypeError:  # of another overload, or without these names
                    continue
                self.found[key] = names
                return result
        return self._called(func, self.found.get(key, ()), args, kwargs)

    def _called(self, func: Any, names: tuple[str, ...], args: Any, kwargs: Any) -> Any:
        first = len(args) - len(names)
        return func(*args[:first], **dict(zip(names, args[first:], strict=True)), **kwargs)

    def _names(self, func: Any, count: int) -> Iterator[tuple[str, ...]]:
        """The names of the arguments, for each overload; a method has its first without one."""
        name, is_method = func.__name__, isinstance(func, MethodDescriptorType)
        if isinstance(func, FunctionType) or name.endswith("_"):
            return
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
            names = [each.name for each in schema.arguments if not each.kwarg_only]
            names = ["input" if each == "self" else each for each in names]
            if is_method and "input" in names:
                names.remove("input")
            if len(names) >= count - is_method > 0:
                yield tuple(names[: count - is_method])


def check_names() -> tuple[list[str], set[str]]:
    """What differs from one process where all arguments have names; the functions that do."""
    verdict, workers = Verdict(), tessel.world().size
    naming = Naming()
    for name, case in SPREAD_CASES.items():
        plain = [case.operand(k) for k in range(len(case.shapes))]
        layouts = [ways(shape, workers)[0] for shape in case.shapes]
        spread = [
            x if case.plain_others and k else tessel.spread(x, layout)
            for k, (x, layout) in enumerate(zip(plain, layouts, strict=True))
        ]
        found = []
        with warnings.catch_warnings(), torch.no_grad(), naming:
            warnings.simplefilter("ignore")
            for operands in (plain, spread):
                torch.default_generator.manual_seed(0)
                try:
                    found.append(flat(case.does(*operands)))
                except NotImplementedError:
                    break
                except Exception as error:
                    verdict.wrong.append(f"{name}: {error!r}")
                    break
        for k, (expected, got) in enumerate(zip(*found, strict=True) if len(found) > 1 else ()):
            verdict.compare(f"{name}, {k}", got, expected, case.tolerance)
    return verdict.wrong, {func.__name__ for func, *_ in naming.found}


def test_operands_by_their_names(run: Run) -> None:
    # rules read their arguments alike on any number of workers
    wrong, names = run(check_names, nprocs=1, timeout=100)[0]
    assert not wrong, "\n".join(wrong)
    expected = {"addmm", "addbmm", "baddbmm", "addmv", "addr", "where", "bmm", "scatter", "conv2d"}
    assert names >= expected and len(names) > 200, sorted(names)


def check_sizes_of_tensors() -> None:
    """Sizes and shifts may be tensors without dimensions, plain or spread."""
    workers = tessel.world().size
    x = values((4, 6), 3)
    y = tessel.spread(x, partition([workers, 1]))
    two = torch.tensor(2)
    shared = (y > -10).sum() // 12  # spread, and whole
    for n in (two, torch.div(4, 2, rounding_mode="trunc"), shared):
        for call in (
            lambda x, n: x.view(n, 2, 6),
            lambda x, n: x.reshape((n, -1)),
            lambda x, n: x[:, None].expand(-1, n, -1),
            lambda x, n: x.repeat(n, 1),
            lambda x, n: torch.roll(x, n, 0),
            lambda x, n: x.roll(shifts=(n, 1), dims=(0, 1)),
            lambda x, n: x.unflatten(0, (n, 2)),
            lambda x, n: x.new_ones(n, 6),
        ):
            expected, got = call(x, two), call(y, n)
            got = got.full() if isinstance(got, tessel.Tensor) else got
            assert torch.equal(got, expected)
    with pytest.raises((RuntimeError, TypeError)):
        y.view(torch.tensor(2.0), 12)
    z = tessel.spread(x, Partition((0,), (1, 1)))  # the other worker is outside
    assert z.view(two, -1).shape == (2, 12) and z.roll(two, 0).shape == (4, 6)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Own(Pair):
    """A named tuple that is made in another way."""

    def __new__(cls, *given: Tensor) -> Own:
        found = super().__new__(cls, *given[::-1])
        found.count = len(given)
        return found


class Row(list[Tensor]):
    def __init__(self, *given: Tensor) -> None:
        super().__init__(given)


class Several(tuple[Tensor, ...]):
    __slots__ = ()

    def __new__(cls, *given: Tensor) -> Several:
        return super().__new__(cls, given)


CONTAINERS: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    *(Pair, Own, Row, Several),
    lambda x, y: torch.return_types.max((x, y)),
)


def check_containers() -> list[str]:
    """Operands in lists and tuples of any class: split, in separate copies, elsewhere."""
    verdict, workers = Verdict(), tessel.world().size
    row, values_of = tessel.world(), (values((4, 3), 3), values((4, 3), 4))
    grids = {
        "split": [Layout.balanced(partition([workers, 1]), (4, 3))] * 2,
        "split and whole": [
            Layout.split(row, (4, 3), [0, None]),
            Layout.whole(row, (4, 3), shared=True),
        ],
        "copies": [Layout.whole(row, (4, 3))] * 2,
        "elsewhere": [Layout.whole(Partition((0,), (1,)), (4, 3))] * 2,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(scripted)
    functions: dict[str, Callable[[Any], Any]] = {
        "cat": lambda xs: torch.cat(xs, 1),
        "stack": torch.stack,
        "vstack": torch.vstack,
        "broadcast_tensors": lambda xs: torch.broadcast_tensors(*xs),
        "block_diag": lambda xs: torch.block_diag(*xs),
        "foreach": lambda xs: torch._foreach_mul(xs, 3.0),
        "of names": lambda xs: torch.cat(tensors=xs, dim=0),
        "einsum": lambda xs: torch.einsum("ij,kj->ik", xs),
        "norms": lambda xs: torch.nn.utils.get_total_norm(xs),
        "scripted": script,
    }
    for name, layouts in grids.items():
        for make in CONTAINERS:
            spread, plain = [], []
            for x, layout in zip(values_of, layouts, strict=True):
                part = layout.local_part(x)
                spread.append(tessel.from_local(part, layout).requires_grad_())
                terms = workers if name == "copies" else 1  # these are a sum
                plain.append((terms * x).requires_grad_())
            for called, function in functions.items():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    got, wanted = (list(tensors(function(make(*each)))) for each in (spread, plain))
                    got += derived(got, spread, 1)
                    wanted += derived(wanted, plain, 1)
                    for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
                        if isinstance(a, tessel.Tensor):
                            everywhere = Layout.whole(row, a.shape, shared=True)
                            # each copy has a gradient of its own, all alike
                            is_copy = name == "copies" and a.layout.separate
                            a = a.local if is_copy else a.move_to(everywhere).local
                        verdict.compare(f"{called} of {make}, {name}, {k}", a, b)
    return verdict.wrong


def scripted(xs: list[Tensor]) -> dict[str, Tensor]:
    return {"sum": xs[0] + xs[1], "first": xs[0] * 2}


@pytest.mark.parametrize("nprocs", [1, 3])
def test_containers(run: Run, nprocs: int) -> None:
    for wrong in run(check_containers, nprocs=nprocs):
        assert not wrong, "\n".join(wrong)


def check_formats() -> None:
    """A tensor without dimensions is its number in a text."""
    x = tessel.spread(values((4, 6), 3), partition([tessel.world().size, 1]))
    for y in (x.argmax(), x.sum(), x.sum().requires_grad_(), (x > 0).any(), x[2, 3]):
        assert f"{y}" == f"{y.detach().full()}" and "tessel" not in f"{y}"
    assert f"{x.sum():.3f}" == f"{x.sum().full():.3f}" and f"{x}" == repr(x)


@pytest.mark.parametrize("does", [check_sizes_of_tensors, check_formats])
def test_tensors_without_dimensions(run: Run, does: Callable[[], None]) -> None:
    run(does, nprocs=2)


def check_longer_operands() -> None:
    x = tessel.spread(values((4, 1), 3), partition([3, 1]))
    for y in (values((4, 5), 4), tessel.spread(values((4, 5), 4), partition([3, 1]))):
        for call in (Tensor.sub_, Tensor.clamp_, Tensor.copy_):
            with pytest.raises(RuntimeError, match=r"shape \[4, 1\] doesn't match .* \[4, 5\]"):
                call(x, y)
    assert torch.equal(x.full(), values((4, 1), 3))


def test_no_operand_makes_a_tensor_longer(run: Run) -> None:
    run(check_longer_operands, nprocs=3)


def check_no_derivative() -> None:
    x = tessel.spread(values((2, 3), 3), partition([3, 1]))  # nothing of it on the last worker
    w = values((3,), 4).requires_grad_()
    with pytest.raises(RuntimeError, match="'weight' is not implemented"):
        F.multi_margin_loss(x, torch.tensor([0, 2]), weight=w)
    for train in (False, True):
        with pytest.raises(RuntimeError, match="not differentiable with respect to running"):
            F.batch_norm(x, w, w, training=train)


def test_what_has_no_derivative_raises_everywhere(run: Run) -> None:
    run(check_no_derivative, nprocs=3)


def beside(function: Callable[..., Tensor], constants: Any, x: Tensor) -> Tensor:
    return function(x, *constants)


def check_torch_func() -> list[str]:
    """A spread tensor by which a transform derives, beside others by which it does not."""
    verdict, workers = Verdict(), tessel.world().size
    x, m, t = values((4, 6), 3), values((4, 6), 4), torch.tensor([1, 5, 0, 3])
    functions: dict[str, Callable[..., Tensor]] = {
        "cross_entropy": lambda x, m, t: F.cross_entropy(x, t, reduction="sum"),
        "gather": lambda x, m, t: x.gather(1, t[:, None]).square().sum(),
        "index": lambda x, m, t: x[:, t].pow(3).sum(),
        "where": lambda x, m, t: torch.where(m > 0, x, m).square().sum(),
        "mask": lambda x, m, t: x[m > 0].square().sum(),
        "product": lambda x, m, t: (m.mT @ x).square().sum() + (m * x).sum().square(),
        "cat": lambda x, m, t: torch.cat([m * 2, x]).square().sum(),
    }
    for split in range(2):
        grid = partition([workers if d == split else 1 for d in range(2)])
        constants = tessel.spread(m, grid), tessel.spread(t, partition([workers]))
        y = tessel.spread(x, grid)
        for name, f in functions.items():
            expected = torch.func.grad(f)(x, m, t)
            got = torch.func.grad(partial(beside, f, constants))(y)
            verdict.compare(f"{name}, {split}", got, expected)
    one = torch.tensor(2.0, dtype=torch.float64)  # plain, as what comes of the rest of a program
    _, pull = torch.func.vjp(F.mse_loss, x, m)
    _, pull_spread = torch.func.vjp(F.mse_loss, y, m)
    for expected, got in zip(pull(one), pull_spread(one), strict=True):
        verdict.compare("mse_loss", got, expected)
    return verdict.wrong


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_torch_func_beside_constants(run: Run, nprocs: int) -> None:
    for wrong in run(check_torch_func, nprocs=nprocs):
        assert not wrong, "\n".join(wrong)


def check_negative_eps() -> None:
    x = tessel.spread(values((2, 6, 4), 3), partition([1, 3, 1]))
    for call in (
        lambda: F.layer_norm(x[:, :2], (2, 4), eps=-0.5),  # nothing of it on the last worker
        lambda: F.rms_norm(x[:, :2], (2, 4), eps=-0.5),
        lambda: F.group_norm(x, 2, eps=-0.5),
    ):
        with pytest.raises(ValueError, match="eps must not be negative"):
            call()


def test_negative_eps(run: Run) -> None:
    run(check_negative_eps, nprocs=3)
