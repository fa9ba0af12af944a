"""Losses over a partition are those of torch in one process, and so are their gradients.

Tests `nn/loss.py`, `nn/loss_agreement.py`, `tensor/rules/losses.py`.
"""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import tessel
from covering import repeats
from parity import close, values
from tessel import Layout, Partition
from tessel.nn import loss as losses
from tessel.nn.pooling import DistributedAvgPool1d
from tessel.tensor.rules import losses as rules
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
Shape = tuple[int, ...]
SECONDS = 100
REDUCTIONS = ("mean", "sum", "none")
ELEMENTWISE = (
    *("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss"),
    *("KLDivLoss", "PoissonNLLLoss", "GaussianNLLLoss"),
)
OVER_CLASSES = ("CrossEntropyLoss", "NLLLoss")
IGNORED = 1  # a class that some cases ignore


@dataclass(frozen=True)
class Case:
    """A loss by its name, its settings, the grid, the global shape, and the parts if uneven.

    A setting that names a weight gives its shape. `kind` is of the target of classes, "indices" or
    "probabilities", or of a variance: "full", "last", "short" or "number".
    """

    name: str
    grid: Shape
    shape: Shape
    settings: tuple[tuple[str, Any], ...] = ()
    lengths: tuple[tuple[int, ...], ...] | None = None
    kind: str = ""
    seed: int = 0

    def partition(self) -> Partition:
        row = tessel.world().create_partition_inclusive(range(prod(self.grid)))
        return row.create_cartesian_topology_partition(self.grid)

    def layout(self) -> Layout:
        if self.lengths is None:
            return Layout.balanced(self.partition(), self.shape)
        return Layout.from_lengths(self.partition(), self.lengths)

    def arguments(self) -> dict[str, Any]:
        weights = ("weight", "pos_weight")
        return {
            name: values(value, 5).abs() + 0.1 if name in weights else value
            for name, value in self.settings
        }

    def tensors(self) -> list[Any]:
        """The whole input, the whole target, and the whole variance where there is one."""
        x, y = values(self.shape, self.seed), values(self.shape, self.seed + 1)
        settings = dict(self.settings)
        if self.name == "BCELoss":
            return [0.1 + 0.8 * x.sigmoid(), 0.1 + 0.8 * y.sigmoid()]
        if self.name == "BCEWithLogitsLoss":
            return [x, y.sigmoid()]
        if self.name == "KLDivLoss":
            return [x, y if settings.get("log_target") else y.abs() + 0.1]
        if self.name == "PoissonNLLLoss":
            return [x if settings.get("log_input", True) else x.abs() + 0.1, 2 * y.abs()]
        if self.name == "GaussianNLLLoss":
            return [x, y, self.variance()]
        if self.name in OVER_CLASSES:
            return [
                x,
                y.softmax(self.class_dim) if self.kind == "probabilities" else self.classes(),
            ]
        return [x, y]

    @property
    def class_dim(self) -> int:
        return min(1, len(self.shape) - 1)

    def classes(self) -> Tensor:
        shape = without(self.shape, self.class_dim)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(self.shape[self.class_dim], shape, generator=generator)

    def variance(self) -> Any:
        shapes = {"last": (*self.shape[:-1], 1), "short": self.shape[:-1]}
        if self.kind == "number":
            return 0.7
        return values(shapes.get(self.kind, self.shape), self.seed + 2).abs() + 0.1

    def parts(self, layout: Layout, tensors: Sequence[Any]) -> list[Any]:
        """This worker's parts of them."""
        return [part_of(each, layout, self.class_dim) for each in tensors]


def without(sequence: Any, dim: int) -> Any:
    return tuple(sequence[:dim]) + tuple(sequence[dim + 1 :])


def part_of(whole: Any, layout: Layout, class_dim: int) -> Any:
    """A worker's part: of a tensor of the input's shape, of classes, or of a variance."""
    box = layout.box()
    if not isinstance(whole, Tensor):
        return whole
    assert box is not None
    lacking = len(layout.shape) - 1 if whole.is_floating_point() else class_dim
    shape = layout.shape
    if whole.ndim < len(shape):
        box, shape = without(box, lacking), without(shape, lacking)
    region = tuple(
        slice(*interval) if size == length else slice(None)
        for size, length, interval in zip(whole.shape, shape, box, strict=True)
    )
    return whole[region].clone()


def leaves(tensors: Sequence[Any]) -> list[Tensor]:
    """Those that a gradient goes to, which they ask for from now on."""
    wanted = [each for each in tensors if isinstance(each, Tensor) and each.is_floating_point()]
    return [each.requires_grad_() for each in wanted]


def part(whole: Tensor, layout: Layout, class_dim: int) -> Tensor:
    """A worker's part of a tensor of the input's shape, or of that without its classes."""
    box = layout.box()
    assert box is not None
    box = without(box, class_dim) if whole.ndim < len(box) else box
    return whole[tuple(slice(*interval) for interval in box)]


def vjps(y: Sequence[Tensor], weights: Sequence[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The gradients of Σ w·(y + y²), zero where there is none."""
    pairs = [(w, each) for w, each in zip(weights, y, strict=True) if each.requires_grad]
    objective = sum((w * (each + each.square())).sum() for w, each in pairs)
    if not isinstance(objective, Tensor):
        return [torch.zeros_like(each) for each in inputs]
    grads = torch.autograd.grad(objective, inputs, create_graph=True, allow_unused=True)
    return [
        torch.zeros_like(each) if grad is None else grad
        for each, grad in zip(inputs, grads, strict=True)
    ]


def check_case(case: Case) -> None:
    """Raise AssertionError if a value or gradient of this worker is not that of one process."""
    layout = case.layout()
    make = getattr(losses, f"Distributed{case.name}")
    spread = make(layout.partition, **case.arguments())
    if not layout.partition.active:
        assert spread(*[torch.empty(0)] * len(case.tensors())).numel() == 0
        return
    alone = getattr(torch.nn, case.name)(**case.arguments())
    whole = case.tensors()
    mine = case.parts(layout, whole)
    all_whole, all_mine = leaves(whole), leaves(mine)
    expected, got = alone(*whole), spread(*mine)
    dim = case.class_dim
    weights = values(expected.shape, 99)
    is_none = dict(case.settings).get("reduction") == "none"
    near("value", got, part(expected, layout, dim) if is_none else expected)
    want = vjps([expected], [weights], all_whole)
    have = vjps([got], [part(weights, layout, dim) if is_none else weights], all_mine)
    seeds = [values(each.shape, 7 + k) for k, each in enumerate(all_whole)]
    own_seeds = [part_of(each, layout, dim) for each in seeds]
    for order in (1, 2):
        for k, (a, b) in enumerate(zip(have, want, strict=True)):
            near(f"gradient of order {order} of input {k}", a, part_of(b, layout, dim))
        if order == 1:
            want, have = vjps(want, seeds, all_whole), vjps(have, own_seeds, all_mine)


def near(what: str, got: Tensor, expected: Tensor) -> None:
    if bool(expected.isnan().any()):
        assert torch.equal(got.isnan(), expected.isnan()), f"{what}: {got} is not {expected}"
        return
    close(what, got, expected)


def check_cases(cases: Sequence[Case]) -> int:
    warnings.simplefilter("ignore")
    for case in cases:
        try:
            check_case(case)
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    return len(cases)


def options(name: str, shape: Shape) -> list[dict[str, Any]]:
    """Settings of a loss, each with the kind of its target or variance."""
    C = shape[min(1, len(shape) - 1)]
    found: dict[str, list[dict[str, Any]]] = {
        "SmoothL1Loss": [{"beta": 0.3}, {"beta": 0.0}, {}],
        "HuberLoss": [{"delta": 0.7}],
        "BCELoss": [{}, {"weight": shape[-1:]}, {"weight": shape}],
        "BCEWithLogitsLoss": [
            {},
            {"weight": shape, "pos_weight": shape[1:]},
            {"pos_weight": (C, *(1,) * len(shape[2:]))},
        ],
        "KLDivLoss": [{"log_target": flag} for flag in (False, True)],
        "PoissonNLLLoss": [{}, {"log_input": False, "full": True, "eps": 1e-3}, {"full": True}],
        "GaussianNLLLoss": [
            {"kind": "full", "full": True},
            {"kind": "last", "eps": 0.4},
            {"kind": "short"},
            {"kind": "number"},
        ],
        "NLLLoss": [{}, {"weight": (C,)}, {"ignore_index": IGNORED, "weight": (C,)}],
        "CrossEntropyLoss": [
            *({}, {"weight": (C,)}, {"ignore_index": IGNORED}, {"label_smoothing": 0.2}),
            {"weight": (C,), "label_smoothing": 0.2, "ignore_index": IGNORED},
            {"kind": "probabilities"},
            {"kind": "probabilities", "weight": (C,), "label_smoothing": 0.2},
        ],
    }
    return found.get(name, [{}])


def reductions(name: str) -> tuple[str, ...]:
    return (*REDUCTIONS, "batchmean") if name == "KLDivLoss" else REDUCTIONS


def case_of(
    name: str, setting: dict[str, Any], reduction: str, grid: Shape, shape: Shape, **more: Any
) -> Case:
    kind = setting.get("kind", "")
    settings = {**{k: v for k, v in setting.items() if k != "kind"}, "reduction": reduction}
    return Case(name, grid, shape, tuple(settings.items()), kind=kind, **more)


GRIDS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    3: [(3, 1, 1), (1, 3, 1)],
    4: [(2, 1, 2), (1, 2, 2), (2, 1, 1)],
}


def all_cases(nprocs: int) -> list[Case]:
    """Every loss with all its options and reductions, on all grids of so many workers."""
    shape = (3, 4, 5)
    return [
        case_of(name, setting, reduction, grid, shape)
        for grid in GRIDS[nprocs]
        for name in (*ELEMENTWISE, *OVER_CLASSES)
        for setting in options(name, shape)
        for reduction in reductions(name)
    ]


@pytest.mark.parametrize("nprocs", [1, 2, 3, 4])
def test_losses_are_those_of_one_process(run: Run, nprocs: int) -> None:
    cases = all_cases(nprocs)
    counts = run(check_cases, cases, nprocs=nprocs, timeout=SECONDS)
    assert counts == [len(cases)] * nprocs


def random_cases(nprocs: int, count: int) -> list[Case]:
    """Any loss on any grid, with parts of any length, also empty."""
    choose = random.Random(nprocs)
    return [random_case(choose, nprocs, seed) for seed in range(count)]


def random_case(choose: random.Random, nprocs: int, seed: int) -> Case:
    name = choose.choice((*ELEMENTWISE, *OVER_CLASSES * 3))
    ndim = choose.randint(1, 4)
    grid, left = [], nprocs
    for _ in range(ndim):
        grid.append(choose.choice([n for n in (1, 2, 3, 4) if n <= left]))
        left //= grid[-1]
    choose.shuffle(grid)
    lengths = tuple(tuple(choose.randint(0, 3) for _ in range(parts)) for parts in grid)
    lengths = tuple(each if sum(each) else (2, *each[1:]) for each in lengths)
    shape = tuple(map(sum, lengths))
    setting = choose.choice(options(name, shape))
    if setting.get("kind") == "last" and set(lengths[-1]) == {1}:
        setting = {"kind": "short"}  # else its parts are as those of a full variance
    reduction = choose.choice(reductions(name))
    return case_of(name, setting, reduction, tuple(grid), shape, lengths=lengths, seed=seed)


@pytest.mark.parametrize("nprocs", [3, 4])
def test_random_losses(run: Run, nprocs: int) -> None:
    cases = random_cases(nprocs, repeats(150))
    assert run(check_cases, cases, nprocs=nprocs, timeout=SECONDS) == [len(cases)] * nprocs


SPECIAL = [
    Case("CrossEntropyLoss", (2,), (5,)),  # no batch, its classes split
    Case("NLLLoss", (2,), (5,), (("reduction", "none"),)),
    Case("CrossEntropyLoss", (2, 1), (0, 3)),  # nothing at all: nan
    Case("CrossEntropyLoss", (2, 1), (0, 3), (("reduction", "sum"),)),
    Case("MSELoss", (2, 1), (0, 3)),
    Case("KLDivLoss", (2, 1), (0, 3), (("reduction", "batchmean"),)),
    Case("CrossEntropyLoss", (2, 1), (4, 1), (("ignore_index", 0),)),  # all ignored: nan
    Case("NLLLoss", (1, 1, 2), (2, 1, 3), (("ignore_index", 0),)),
    Case("NLLLoss", (2, 1, 1, 1, 1), (2, 3, 2, 1, 2)),
    Case("MSELoss", (2, 1), (4, 3), (("size_average", False),)),  # torch's old names
    Case("L1Loss", (2, 1), (4, 3), (("reduce", True), ("reduction", "sum"))),
    Case("GaussianNLLLoss", (1, 2), (4, 4), lengths=((4,), (1, 3)), kind="last"),
    Case("GaussianNLLLoss", (1, 2), (4, 3), lengths=((4,), (0, 3)), kind="short"),
    Case("GaussianNLLLoss", (2, 1), (4, 3), kind="short"),
]


def test_special_losses(run: Run) -> None:
    assert run(check_cases, SPECIAL, nprocs=2, timeout=SECONDS) == [len(SPECIAL)] * 2


def derive_behind_a_pool(grid: Shape, shape: Shape, name: str) -> None:
    """All workers call `backward()` on the loss of what a layer with an exchange gives."""
    case = Case(name, grid, (*shape[:-1], shape[-1] // 2))
    P = case.partition()
    source, target = Layout.balanced(P, shape), case.layout()
    _, goal = case.tensors()
    x = values(shape, 0)
    whole = x.clone().requires_grad_()
    expected = getattr(torch.nn, name)()(torch.nn.AvgPool1d(3, 2, 1)(whole), goal)
    expected.backward()
    mine = source.local_part(x).clone().requires_grad_()
    pooled = DistributedAvgPool1d(P, 3, 2, 1)(mine)
    got = getattr(losses, f"Distributed{name}")(P)(pooled, part_of(goal, target, 1))
    got.backward()
    close("value", got, expected)
    assert mine.grad is not None and whole.grad is not None
    close("gradient", mine.grad, source.local_part(whole.grad))


@pytest.mark.parametrize("name", ["MSELoss", "CrossEntropyLoss"])
@pytest.mark.parametrize("grid", [(1, 1, 4), (2, 1, 2), (1, 2, 2), (4, 1, 1)])
def test_every_worker_derives_the_loss_behind_a_layer(run: Run, grid: Shape, name: str) -> None:
    run(derive_behind_a_pool, grid, (4, 4, 12), name)


def derive_one_need(who: int) -> tuple[Any, Any]:
    """One worker alone needs a gradient, of its target."""
    P = tessel.world().create_cartesian_topology_partition([2, 1])
    target = torch.ones(2, 3, dtype=torch.float64, requires_grad=P.rank == who)
    value = losses.DistributedMSELoss(P)(torch.zeros(2, 3, dtype=torch.float64), target)
    value.backward()
    return value.item(), None if target.grad is None else target.grad[0, 0].item()


def test_one_worker_needs_a_gradient(run: Run) -> None:
    results = run(derive_one_need, 1, nprocs=2)
    assert results[0] == (1.0, None)
    assert results[1] == (1.0, pytest.approx(2 / 12))


def weigh(reduction: str) -> None:
    """Weights that need a gradient get that of one process."""
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    case = Case("CrossEntropyLoss", (2, 2), (4, 6), kind="probabilities")
    weight = values((6,), 3).abs().requires_grad_()
    expected = torch.nn.CrossEntropyLoss(weight, reduction=reduction)(*case.tensors())
    (want,) = torch.autograd.grad(expected.sum(), weight)
    mine = case.parts(case.layout(), case.tensors())
    got = losses.DistributedCrossEntropyLoss(P, weight, reduction=reduction)(*mine)
    close("gradient", torch.autograd.grad(got.sum(), weight)[0], want)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_get_their_gradient(run: Run, reduction: str) -> None:
    run(weigh, reduction)


def short_numbers(name: str, dtype: torch.dtype, reduction: str) -> tuple[float, float]:
    """A mean of short numbers whose sum they cannot hold."""
    case = Case(name, (2, 1), (3000, 10))
    x, y = case.tensors()
    x = (x if name == "BCELoss" else 40 * x).to(dtype)
    y = y.to(dtype) if y.is_floating_point() else y
    long = [each.float() if each.is_floating_point() else each for each in (x, y)]
    alone = getattr(torch.nn, name)(reduction=reduction)(*long)
    layer = getattr(losses, f"Distributed{name}")(case.partition(), reduction=reduction)
    got = layer(*case.parts(case.layout(), [x, y]))
    assert got.dtype == dtype
    return got.item(), alone.item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["L1Loss", "MSELoss", "BCELoss", "CrossEntropyLoss"])
def test_short_numbers_do_not_overflow(run: Run, name: str, dtype: torch.dtype) -> None:
    for got, expected in run(short_numbers, name, dtype, "mean", nprocs=2):
        assert got == pytest.approx(expected, rel=4 * torch.finfo(dtype).eps)


def integers() -> list[Any]:
    P = tessel.world().create_cartesian_topology_partition([2])
    x = torch.arange(3) + 3 * P.rank
    value = losses.DistributedL1Loss(P, reduction="sum")(x, torch.zeros_like(x))
    return [value.dtype, value.item()]


def test_integers(run: Run) -> None:
    assert run(integers, nprocs=2) == [[torch.int64, 15]] * 2


def text_of(name: str, change: str, reduction: str) -> tuple[str, str]:
    """What a worker hears when worker 1 passes something else than the others."""
    warnings.simplefilter("ignore")
    P = tessel.world().create_cartesian_topology_partition([2, 1, 2])
    shape = (2, 3, 2)
    mine = Case(name, (1, 1, 1), shape).tensors()
    x, y = mine[:2]
    settings: dict[str, Any] = {"reduction": reduction}
    if P.rank == 1:
        if change == "target shape":
            mine[1] = y[:1]
        elif change == "input value":
            x[0, 0, 0] = 1.5
        elif change == "target value":
            y.view(-1)[0] = 9
        elif change == "nan":
            x[0, 0, 0] = float("nan")
        elif change == "target dtype":
            mine[1] = y.float()
        elif change == "no tensor":
            mine[1] = None
        elif change == "sparse":
            mine[1] = y.to_sparse()
        elif change == "float8":
            mine[1] = y.to(torch.float8_e4m3fn)
        elif change == "sparse var":
            mine[2] = mine[2].to_sparse()
        elif change == "reduction":
            settings["reduction"] = "sum" if reduction == "mean" else "mean"
        elif change == "var":
            mine[2].view(-1)[0] = -1
        elif change == "var shape":
            mine[2] = mine[2][:, :1, :1]
        elif change == "weight":
            settings["weight"] = torch.full((3,), 2.0).double()
    if change == "weight" and P.rank != 1:
        settings["weight"] = torch.ones(3).double()
    try:
        getattr(losses, f"Distributed{name}")(P, **settings)(*mine)
    except (ValueError, IndexError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "", ""


BAD = [
    ("MSELoss", "target shape", "ValueError", "worker 1 has an input of shape (2, 3, 2)"),
    ("MSELoss", "target dtype", "ValueError", "dtype differs between workers"),
    ("MSELoss", "no tensor", "ValueError", "worker 1 passed no tensor"),
    ("BCELoss", "sparse", "ValueError", "worker 1 passed no tensor"),
    ("BCELoss", "float8", "ValueError", "worker 1 passed no tensor"),
    ("CrossEntropyLoss", "sparse", "ValueError", "worker 1 passed no tensor"),
    ("GaussianNLLLoss", "sparse var", "ValueError", "worker 1 passed no tensor"),
    ("MSELoss", "reduction", "ValueError", "same calls"),
    ("BCELoss", "input value", "RuntimeError", "between 0 and 1, on worker 1"),
    ("BCELoss", "nan", "RuntimeError", "between 0 and 1, on worker 1"),
    ("BCELoss", "target value", "RuntimeError", "target should be between 0 and 1, on worker 1"),
    ("CrossEntropyLoss", "target value", "IndexError", "out of bounds"),
    ("CrossEntropyLoss", "target shape", "ValueError", "a target of shape (1, 2)"),
    ("CrossEntropyLoss", "no tensor", "ValueError", "worker 1 passed no tensor"),
    ("CrossEntropyLoss", "weight", "ValueError", "with weights of checksum"),
    ("NLLLoss", "target value", "IndexError", "out of bounds"),
    ("NLLLoss", "target dtype", "ValueError", "dtype differs between workers"),
    ("GaussianNLLLoss", "var", "ValueError", "var has negative entry/entries, on worker 1"),
    ("GaussianNLLLoss", "var shape", "ValueError", "a var of shape (2, 1, 1)"),
]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("name", "change", "kind", "text"), BAD)
def test_bad_input_on_one_worker_raises_on_all(
    run: Run, name: str, change: str, kind: str, text: str, reduction: str
) -> None:
    results = run(text_of, name, change, reduction, timeout=20)
    assert len(set(results)) == 1, results
    assert results[0][0] == kind and text in results[0][1], results[0]


def refusals(name: str, case: str) -> list[tuple[str, str]]:
    """What torch says in one process, and what a worker hears, where one has an empty part."""
    warnings.simplefilter("ignore")
    layout = Layout.from_lengths(
        tessel.world().create_cartesian_topology_partition([2, 1]), [[0, 4], [3]]
    )
    x, y = torch.rand(4, 3), torch.rand(4, 3)
    settings: dict[str, Any] = {}
    if name in OVER_CLASSES:
        y = torch.tensor([0, 1, 2, 0])
    if case == "integers":
        x, y = torch.ones(4, 3, dtype=torch.int64), y.long()
    elif case == "target dtype":
        y = y.int()
    elif case == "weight":
        settings["weight"] = torch.ones(5)
    elif case == "wide weight":
        settings["weight"] = torch.ones(2, 4, 3)
    elif case == "reduction":
        settings["reduction"] = "median"
    elif case == "label_smoothing":
        settings["label_smoothing"] = 1.5
    elif case == "weight dtype":
        settings["weight"] = torch.ones(3, dtype=torch.float64)
    make = getattr(losses, f"Distributed{name}")
    calls: list[Callable[[], Tensor]] = [
        lambda: getattr(torch.nn, name)(**settings)(x, y),
        lambda: make(layout.partition, **settings)(
            part_of(x, layout, 1),
            part_of(y, layout, 1) if y.ndim == 2 else y[slice(*layout.box()[0])],
        ),
    ]
    return [outcome(call) for call in calls]


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except (ValueError, IndexError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("L1Loss", "integers"),
        ("MSELoss", "integers"),
        ("MSELoss", "reduction"),
        ("BCELoss", "integers"),
        ("BCELoss", "target dtype"),
        ("BCELoss", "wide weight"),
        ("BCEWithLogitsLoss", "weight"),
        ("BCEWithLogitsLoss", "wide weight"),
        ("KLDivLoss", "target dtype"),
        ("CrossEntropyLoss", "integers"),
        ("CrossEntropyLoss", "target dtype"),
        ("CrossEntropyLoss", "weight"),
        ("CrossEntropyLoss", "weight dtype"),
        ("CrossEntropyLoss", "label_smoothing"),
        ("NLLLoss", "target dtype"),
        ("NLLLoss", "weight"),
        ("NLLLoss", "reduction"),
    ],
)
def test_what_torch_refuses_all_workers_refuse(run: Run, name: str, case: str) -> None:
    for alone, got in run(refusals, name, case, nprocs=2, timeout=20):
        assert alone[0] and got == alone


def differ(name: str) -> tuple[str, str]:
    """Workers that share the classes of the input hold different targets."""
    P = tessel.world().create_cartesian_topology_partition([1, 2])
    x = torch.rand(4, 2)
    if name == "GaussianNLLLoss":
        others: tuple[Tensor, ...] = (x, torch.full((4, 1), 1.0 + P.rank))
    else:
        others = (torch.tensor([0, 1, 2, P.rank]),)
    return outcome(lambda: getattr(losses, f"Distributed{name}")(P)(x, *others))


@pytest.mark.parametrize("name", [*OVER_CLASSES, "GaussianNLLLoss"])
def test_copies_that_differ_are_found(run: Run, name: str) -> None:
    results = run(differ, name, nprocs=2, timeout=20)
    assert results[0] == results[1]
    assert results[0][0] == "ValueError" and "those of workers 0 and 1 differ" in results[0][1]


def broadcasts() -> list[tuple[str, str]]:
    warnings.simplefilter("ignore")
    P = tessel.world().create_cartesian_topology_partition([tessel.world().size, 1])
    x = torch.rand(2, 3)
    return [
        outcome(lambda: losses.DistributedMSELoss(P)(x, torch.rand(2, 1))),
        outcome(lambda: losses.DistributedL1Loss(P)(x, torch.rand(3))),
        outcome(lambda: losses.DistributedHuberLoss(P)(x, torch.rand(2, 3, 1))),
        outcome(lambda: losses.DistributedCrossEntropyLoss(P)(x, torch.tensor(0))),
    ]


@pytest.mark.parametrize("nprocs", [1, 2])
def test_targets_are_not_broadcast(run: Run, nprocs: int) -> None:
    for result in run(broadcasts, nprocs=nprocs, timeout=20):
        assert [kind for kind, _ in result] == ["ValueError"] * 4


def count(name: str, grid: Shape, settings: dict[str, Any]) -> list[list[int]]:
    """The messages and agreements of the second call, forward and backward."""
    warnings.simplefilter("ignore")
    case = Case(name, grid, (4, 4, 4), tuple(settings.items()))
    layer = getattr(losses, f"Distributed{name}")(case.partition(), **settings)
    mine = case.parts(case.layout(), case.tensors())
    mine[0].requires_grad_()
    layer(*mine)
    with count_traffic() as there:
        value = layer(*mine)
    with count_traffic() as back:
        value.sum().backward()
    return [[each.messages, each.agreements, each.bytes_sent] for each in (there, back)]


SILENT = [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "grid", "settings", "messages", "sent"),
    [
        ("MSELoss", (2, 1, 1), {}, 2, 2 * 8),
        ("MSELoss", (2, 1, 1), {"reduction": "none"}, 0, 0),
        ("MSELoss", (2, 1, 2), {}, 6, 6 * 8),
        ("CrossEntropyLoss", (2, 1, 1), {}, 2, 2 * 16),
        ("CrossEntropyLoss", (2, 1, 1), {"reduction": "sum"}, 2, 2 * 8),
        ("CrossEntropyLoss", (1, 2, 1), {"reduction": "sum"}, 2, 64 * 8),
        ("CrossEntropyLoss", (1, 2, 1), {"reduction": "none"}, 2, 64 * 8),
    ],
)
def test_messages(
    run: Run, name: str, grid: Shape, settings: dict[str, Any], messages: int, sent: int
) -> None:
    results = run(count, name, grid, settings, nprocs=prod(grid))
    assert sum(there[0] for there, _ in results) == messages
    assert sum(there[2] for there, _ in results) == sent
    assert all(there[1] == 2 and back == SILENT for there, back in results)


def with_an_axis_of_one() -> float:
    """An axis of one worker splits the classes of the input, and the samples of the target."""
    P = tessel.world().create_cartesian_topology_partition([1, 2])
    x, target = values((2, 4, 6), 0), torch.arange(12).view(2, 6) % 4
    spread = tessel.spread(x, Layout.split(P, (2, 4, 6), (None, 0, None), shared=(1,)))
    goal = tessel.spread(target, Layout.split(P, (2, 6), (0, 1)))
    return abs(F.cross_entropy(spread, goal).item() - F.cross_entropy(x, target).item())


def test_an_axis_of_one_worker_may_split_anything(run: Run) -> None:
    assert max(run(with_an_axis_of_one, nprocs=2)) < 1e-12


def check_classes_that_stay(cases: Sequence[Case]) -> int:
    """The same where classes that are split are not gathered, however few there are."""
    before, rules.GATHERED = rules.GATHERED, 0
    try:
        return check_cases(cases)
    finally:
        rules.GATHERED = before


@pytest.mark.parametrize("nprocs", [2, 4])
def test_classes_that_stay_where_they_are(run: Run, nprocs: int) -> None:
    cases = [case for case in all_cases(nprocs) if case.name in OVER_CLASSES and case.grid[1] > 1]
    cases += [case for case in random_cases(nprocs, repeats(200)) if case.name in OVER_CLASSES]
    counts = run(check_classes_that_stay, cases, nprocs=nprocs, timeout=SECONDS)
    assert counts == [len(cases)] * nprocs


def of_spread_classes() -> None:
    """Torch's own function of spread logits: what `ParallelCrossEntropyLoss` computes, too."""
    before, rules.GATHERED = rules.GATHERED, 0
    try:
        world = tessel.world()
        grid = world.create_cartesian_topology_partition([world.size // 2, 2])
        goal = torch.tensor([4, 0, 6, 2, 6])
        for dtype, many in ((torch.int64, goal), (torch.uint8, goal.to(torch.uint8))):
            x = values((5, 7), 0).requires_grad_()
            y = tessel.spread(x.detach(), grid).requires_grad_()
            expected, got = F.cross_entropy(x, many), F.cross_entropy(y, many)
            close(f"loss of {dtype}", got.full(), expected)
            (gradient,) = torch.autograd.grad(got, y)
            close(f"gradient of {dtype}", gradient.full(), torch.autograd.grad(expected, x)[0])
        row = world.create_cartesian_topology_partition([world.size])
        for reduction in ("none", "mean", "sum"):
            x, one = values((7,), 0), torch.tensor([6])
            got = F.cross_entropy(tessel.spread(x, row), one, reduction=reduction)
            close("one sample", got.full(), F.cross_entropy(x, one, reduction=reduction))
    finally:
        rules.GATHERED = before


@pytest.mark.parametrize("nprocs", [2, 4])
def test_functions_of_spread_classes(run: Run, nprocs: int) -> None:
    run(of_spread_classes, nprocs=nprocs)


def traffic_of_spread_classes() -> tuple[int, int]:
    P = tessel.world().create_cartesian_topology_partition([1, 2])
    x = tessel.spread(values((4, 10000), 0), P)
    with count_traffic() as traffic:
        F.cross_entropy(x, torch.tensor([0, 4000, 5000, 9999]))
    return traffic.messages, traffic.bytes_sent


def test_a_spread_loss_sends_three_numbers_of_each_sample(run: Run) -> None:
    assert run(traffic_of_spread_classes, nprocs=2) == [(1, 3 * 4 * 8)] * 2


def count_of_many_classes(name: str) -> tuple[int, int]:
    P = tessel.world().create_cartesian_topology_partition([1, 2])
    part = values((4, 5000), 0)
    layer = getattr(losses, f"Distributed{name}")(P)
    with count_traffic() as traffic:
        layer(part, torch.tensor([0, 4000, 5000, 9999]))
    return traffic.bytes_sent, 8 * part.numel()


@pytest.mark.parametrize(("name", "numbers"), [("NLLLoss", 1), ("CrossEntropyLoss", 3)])
def test_many_classes_are_not_gathered(run: Run, name: str, numbers: int) -> None:
    """Of each sample travel the largest score, the sum and the target's, not the classes."""
    for sent, gathered in run(count_of_many_classes, name, nprocs=2):
        assert sent == 4 * 8 * numbers < gathered


def lie_otherwise(name: str, reduction: str) -> None:
    """A layout as inside of a converted model: dimensions on other axes, and shared copies."""
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    case = Case(name, (2, 2), (4, 6))
    for axes, shared_axes in (((1, 0), ()), ((0, None), (1,)), ((None, 1), (0,))):
        layout = Layout.split(P, case.shape, axes, shared_axes)
        whole = case.tensors()
        mine = case.parts(layout, whole)
        all_whole, all_mine = leaves(whole), leaves(mine)
        expected = getattr(torch.nn, name)(reduction=reduction)(*whole)
        layer = getattr(losses, f"Distributed{name}")(P, reduction=reduction)
        got, result = layer.compute(mine[0], layout, *mine[1:])
        near("value", got, result.local_part(expected))
        weights = values(expected.shape, 9)
        want = vjps([expected], [weights], all_whole)
        have = vjps([got], [result.local_part(weights)], all_mine)
        for a, b in zip(have, want, strict=True):
            near("gradient", a, part_of(b, layout, 1))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["MSELoss", "CrossEntropyLoss", "GaussianNLLLoss"])
def test_other_layouts(run: Run, name: str, reduction: str) -> None:
    run(lie_otherwise, name, reduction)


def push_forward(name: str) -> None:
    """The derivative along a tangent, in forward mode."""
    case = Case(name, (2, 2), (4, 6))
    layout = case.layout()
    x, y = case.tensors()
    tangent = values(case.shape, 8)
    _, want = torch.func.jvp(lambda each: getattr(torch.nn, name)()(each, y), (x,), (tangent,))
    layer = getattr(losses, f"Distributed{name}")(layout.partition)
    mine, target, along = (part_of(each, layout, 1) for each in (x, y, tangent))
    _, have = torch.func.jvp(lambda each: layer(each, target), (mine,), (along,))
    close("derivative", have, want)


@pytest.mark.parametrize("name", ["MSELoss", "BCELoss", "CrossEntropyLoss"])
def test_forward_mode(run: Run, name: str) -> None:
    run(push_forward, name)


def copied() -> None:
    """A loss that was copied, pickled or made from torch's own gives the same."""
    case = Case("CrossEntropyLoss", (2, 1), (4, 3))
    P = case.partition()
    alone = torch.nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3]).double(), label_smoothing=0.1)
    first = losses.DistributedCrossEntropyLoss.from_torch(alone, P)
    mine = case.parts(case.layout(), case.tensors())
    expected = alone(*case.tensors())
    close("value", first(*mine), expected)
    for layer in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        close("value", layer(*mine), expected)
    assert list(first.state_dict()) == list(alone.state_dict()) == ["weight"]
    first.reduction = "sum"
    alone.reduction = "sum"
    close("value", first(*mine), alone(*case.tensors()))


def test_copies_of_a_loss(run: Run) -> None:
    run(copied, nprocs=2)
