"""The class-parallel cross entropy is torch's own with all options, and so are its gradients.

Tests `nn/parallel/cross_entropy.py`, `nn/parallel/agreed.py`, `tensor/rules/split_classes.py`.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tessel
from covering import pairs, repeats
from parity import close, values
from tessel import Layout, Partition
from tessel.distributed.shards import Sharding, as_shard
from tessel.nn.parallel.cross_entropy import ParallelCrossEntropyLoss, parallel_cross_entropy
from tessel.tensor.rules import split_classes
from tessel.testing import count_memory, count_traffic

Run = Callable[..., list[Any]]
Shape = tuple[int, ...]
SECONDS = 100
REDUCTIONS = ("mean", "sum", "none")
SMOOTHINGS = (0.0, 0.3)
SHAPES: tuple[Shape, ...] = ((5,), (4, 5), (3, 9, 2), (2, 3, 2, 2))
TARGETS = ("classes", "some ignored", "one class ignored", "all ignored", "whole", "shard")
PROBABILITIES = ("whole", "shard")
IGNORED = 1  # a class that some cases ignore
# Numbers of 8 and 11 bits: torch rounds all logarithms to them, this library the loss alone.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}


@dataclass(frozen=True)
class Case:
    """A loss by the shape of the whole logits and its options.

    `target` is one of TARGETS, `logits` says which values they have, `workers` who has a shard:
    all, or of four workers two and two.
    """

    shape: Shape
    target: str = "classes"
    reduction: str = "mean"
    label_smoothing: float = 0.0
    weighted: bool = False
    dtype: torch.dtype = torch.float64
    logits: str = "usual"
    workers: str = "all"
    needs_grad: bool = True  # also of probabilities, and of the weight with them
    orders: tuple[int, ...] = (1, 2)
    sized: bool = True  # whether the sharding knows the number of classes
    seed: int = 0

    @property
    def dim(self) -> int:
        return min(1, len(self.shape) - 1)

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]

    def partition(self) -> Partition:
        world = tessel.world()
        if self.workers == "reversed":
            return world.create_partition_inclusive(reversed(range(world.size)))
        if self.workers == "all":
            return world
        pairs = [world.create_partition_inclusive(ranks) for ranks in ((0, 1), (2, 3))]
        return next(pair for pair in pairs if pair.active)

    def layout(self) -> Layout:
        axes = [0 if d == self.dim else None for d in range(len(self.shape))]
        return Layout.split(self.partition(), self.shape, axes)

    def sharding(self) -> Sharding:
        return Sharding(self.dim, self.partition(), self.shape[self.dim] if self.sized else None)

    def whole_logits(self) -> Tensor:
        x = values(self.shape, self.seed)
        if self.logits == "large":
            x = torch.where(x > 0.5, 1000.0, torch.where(x < -0.5, -1000.0, x))
        elif self.logits == "offset":
            x = 1000 + x
        elif self.logits == "some infinite":
            x = torch.where(values(self.shape, self.seed + 50) > 0.6, -torch.inf, x)
        elif self.logits == "all infinite":  # of one sample
            x[0 if x.ndim > 1 else ...] = -torch.inf
        elif self.logits == "positive infinite":
            x.view(-1)[0] = torch.inf
        elif self.logits == "nan":
            x.view(-1)[-1] = torch.nan
        return x.to(self.dtype)

    def whole_target(self) -> Tensor:
        if self.target in PROBABILITIES:
            return values(self.shape, self.seed + 1).softmax(self.dim).to(self.dtype)
        samples = self.shape[: self.dim] + self.shape[self.dim + 1 :]
        generator = torch.Generator().manual_seed(self.seed)
        classes = torch.randint(max(1, self.shape[self.dim]), samples, generator=generator)
        if self.target == "some ignored":
            return torch.where(values(samples, self.seed + 2) > 0, -100, classes)
        if self.target == "all ignored":
            return torch.full_like(classes, -100)
        return classes

    def options(self) -> dict[str, Any]:
        """The options but for the weight."""
        ignored = {"ignore_index": IGNORED} if self.target == "one class ignored" else {}
        chosen = {"reduction": self.reduction, "label_smoothing": self.label_smoothing}
        return {**chosen, **ignored}

    def whole_weight(self) -> Tensor | None:
        if not self.weighted:
            return None
        return (values((self.shape[self.dim],), 5).abs() + 0.1).to(self.dtype)


@dataclass
class Tensors:
    """Logits, target and weight, of which some get gradients."""

    x: Tensor
    target: Tensor
    weight: Tensor | None

    @classmethod
    def whole(cls, case: Case) -> Tensors:
        found = cls(case.whole_logits(), case.whole_target(), case.whole_weight())
        for each in found.leaves(case):
            each.requires_grad_()
        return found

    @classmethod
    def mine(cls, case: Case) -> Tensors:
        layout, whole = case.layout(), cls.whole(case)
        x = layout.local_part(whole.x.detach()).clone()
        target = whole.target.detach()
        target = layout.local_part(target).clone() if case.target == "shard" else target
        weight = None if whole.weight is None else whole.weight.detach()
        found = cls(x, target, weight)
        for each in found.leaves(case):
            each.requires_grad_()
        return found

    def leaves(self, case: Case) -> list[Tensor]:
        if case.target not in PROBABILITIES or not case.needs_grad:
            return [self.x]
        return [each for each in (self.x, self.target, self.weight) if each is not None]


def loss_of_mine(case: Case, mine: Tensors) -> Tensor:
    sharding = case.sharding()
    target = as_shard(mine.target, sharding) if case.target == "shard" else mine.target
    return parallel_cross_entropy(as_shard(mine.x, sharding), target, mine.weight, **case.options())


def parts(case: Case, wholes: Sequence[Tensor]) -> list[Tensor]:
    """This worker's parts of what belongs to the leaves."""
    layout = case.layout()
    split = (True, case.target == "shard", False)
    return [
        layout.local_part(each) if is_split else each
        for each, is_split in zip(wholes, split, strict=False)
    ]


def vjps(y: Sequence[Tensor], weights: Sequence[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The gradients of Σ w·(y + y²), zero where there is none."""
    objective = sum((w * (each + each.square())).sum() for w, each in zip(weights, y, strict=True))
    assert isinstance(objective, Tensor)
    grads = torch.autograd.grad(objective, inputs, create_graph=True, allow_unused=True)
    return [
        torch.zeros_like(each) if grad is None else grad
        for each, grad in zip(inputs, grads, strict=True)
    ]


def near(what: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal numbers, and nan and infinities at the same places."""
    got, expected = got.detach(), expected.detach()
    assert got.dtype == expected.dtype, f"{what}: {got.dtype} is not {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape} is not {expected.shape}"
    assert type(got) is Tensor
    usual = expected.isfinite()
    same = (got == expected) | (got.isnan() & expected.isnan()) | usual
    assert bool(same.all()) and bool(got.isfinite()[usual].all()), f"{what}: {got} not {expected}"
    close(what, got[usual].double(), expected[usual].double(), tolerance)


def check_case(case: Case) -> None:
    """Raise AssertionError if a value or gradient of this worker is not that of one process."""
    whole, mine = Tensors.whole(case), Tensors.mine(case)
    expected = F.cross_entropy(whole.x, whole.target, whole.weight, **case.options())
    got = loss_of_mine(case, mine)
    near("loss", got, expected, case.tolerance)
    inputs, own = whole.leaves(case), mine.leaves(case)
    seed = values(expected.shape, 99).to(case.dtype)
    want, have, seeds, own_seeds = [expected], [got], [seed], [seed]
    for order in case.orders:
        want, have = vjps(want, seeds, inputs), vjps(have, own_seeds, own)
        for name, a, b in zip(("input", "target", "weight"), have, parts(case, want), strict=False):
            near(f"gradient of order {order} of the {name}", a, b, case.tolerance)
        seeds = [values(each.shape, 7 + k).to(case.dtype) for k, each in enumerate(inputs)]
        own_seeds = parts(case, seeds)


def check_cases(cases: Sequence[Case]) -> int:
    warnings.simplefilter("ignore")
    for case in cases:
        try:
            check_case(case)
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    return len(cases)


OPTIONS = SHAPES, TARGETS, REDUCTIONS, SMOOTHINGS, (False, True)


def grid(chosen: Iterable[tuple[Any, ...]], **more: Any) -> list[Case]:
    """Cases of so many options, those of each by two with `pairs`, or all with each other."""
    return [Case(*options, **more) for options in chosen]


def all_equal(run: Run, cases: list[Case], nprocs: int) -> None:
    assert run(check_cases, cases, nprocs=nprocs, timeout=SECONDS) == [len(cases)] * nprocs


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 3])
def test_all_options_are_those_of_one_process(run: Run, nprocs: int) -> None:
    all_equal(run, grid(product(*OPTIONS)), nprocs)


@pytest.mark.slow
def test_all_options_on_two_and_two_workers(run: Run) -> None:
    all_equal(run, grid(pairs(*OPTIONS), workers="pairs"), 4)


def test_workers_in_another_order(run: Run) -> None:
    all_equal(run, grid(pairs(*OPTIONS), workers="reversed"), 4)


def test_all_options_in_float32(run: Run) -> None:
    all_equal(run, grid(pairs(*OPTIONS), dtype=torch.float32, orders=(1,)), 4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_numbers(run: Run, dtype: torch.dtype) -> None:
    """Torch's dtype of loss and gradients, and better numbers than torch's own."""
    shapes = [shape for shape in SHAPES if shape != (5,)]
    options = pairs(shapes, *OPTIONS[1:])
    all_equal(run, grid(options, dtype=dtype, orders=(1,), needs_grad=False), 3)


EXTREMES = ("large", "offset", "some infinite", "all infinite", "positive infinite", "nan")


def extremes(shape: tuple[int, ...], **more: Any) -> list[Case]:
    targets = ("classes", "some ignored", "one class ignored", "whole")
    return [
        Case(shape, *options, logits=logits, orders=(1,), **more)
        for logits in EXTREMES
        for options in pairs(targets, REDUCTIONS, (*SMOOTHINGS, 1.0), (False, True))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nprocs", "shape", "dtype"),
    [(2, (3, 4, 2), torch.float32), (4, (4, 5), torch.float64)],
)
def test_extreme_logits(run: Run, nprocs: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """±1000, −inf, inf and nan: torch's numbers, and torch's nan at the same places."""
    all_equal(run, extremes(shape, dtype=dtype, needs_grad=False), nprocs)


SPECIAL = [
    *(  # no samples, no classes, one class, as many as workers
        Case(shape, target, reduction, smoothing)
        for shape in ((0, 5), (2, 0), (0, 0), (4, 1), (4, 4), (2, 5, 0), (1,))
        for target in ("classes", "all ignored", "whole", "shard")
        for reduction in REDUCTIONS
        for smoothing in SMOOTHINGS
        if not (target == "classes" and shape == (2, 0))
    ),
    *(Case((4, 9), target, sized=False) for target in ("classes", "shard")),
    Case((4, 2), "classes", sized=False),  # two shards are empty
    Case((3, 7, 1, 2, 1, 2), "some ignored", "none", 0.3, True),
    Case((4, 5), label_smoothing=-0.5),  # which torch takes for none
]


@pytest.mark.slow
def test_special_sizes(run: Run) -> None:
    all_equal(run, SPECIAL, 4)


by_draw = settings(
    max_examples=repeats(3),
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def cases() -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        st.lists(st.integers(0, 5), min_size=1, max_size=4)
        .map(tuple)
        .filter(lambda shape: shape[min(1, len(shape) - 1)] > IGNORED),
        st.sampled_from(TARGETS),
        st.sampled_from(REDUCTIONS),
        st.floats(0, 1),
        st.booleans(),
        st.just(torch.float64),
        st.sampled_from(("usual", "usual", "large", "offset")),
        st.sampled_from(("all", "reversed")),
        st.booleans(),
        st.just((1,)),
        st.booleans(),
        st.integers(0, 99),
    )


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [3, 4])
def test_random_losses(run: Run, nprocs: int) -> None:
    @by_draw
    @given(st.lists(cases(), min_size=30, max_size=30))
    def check(drawn: list[Case]) -> None:
        all_equal(run, drawn, nprocs)

    check()


def in_interior_and_border() -> None:
    """A shard that is worked on in pieces gives the same, to the second order."""
    split_classes.SMALL, usual = 0, split_classes.SMALL
    try:
        check_cases(
            [
                Case((3, 40, 2), target, "mean", smoothing, weighted)
                for target in ("some ignored", "whole", "shard")
                for smoothing in SMOOTHINGS
                for weighted in (False, True)
            ]
        )
        check_cases([Case((3, 11)), Case((3, 2)), Case((2, 13), "shard", "none", 0.3, True)])
    finally:
        split_classes.SMALL = usual


@pytest.mark.parametrize("nprocs", [2, 4])
def test_pieces(run: Run, nprocs: int) -> None:
    run(in_interior_and_border, nprocs=nprocs, timeout=SECONDS)


def whole_and_old_names() -> None:
    """A whole input is torch's own business; old names of reductions mean what torch means."""
    case = Case((4, 5))
    whole, mine = Tensors.whole(case), Tensors.mine(case)
    expected = F.cross_entropy(whole.x, whole.target)
    assert torch.equal(parallel_cross_entropy(whole.x, whole.target), expected)
    assert torch.equal(ParallelCrossEntropyLoss()(whole.x, whole.target), expected)
    shard = as_shard(mine.x, case.sharding())
    for size_average, reduce in product((None, True, False), repeat=2):
        old = {"size_average": size_average, "reduce": reduce}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = F.cross_entropy(whole.x, whole.target, **old)
            near("loss", parallel_cross_entropy(shard, mine.target, **old), expected, 1e-12)
            near("loss", ParallelCrossEntropyLoss(**old)(shard, mine.target), expected, 1e-12)
    with pytest.warns(UserWarning, match="size_average and reduce"):
        parallel_cross_entropy(shard, mine.target, size_average=False)


def test_whole_input_and_old_names(run: Run) -> None:
    run(whole_and_old_names, nprocs=2)


def dtypes_of_torch() -> None:
    """Bytes as classes, and probabilities or weights of another dtype, give torch's dtype."""
    x = values((4, 5), 0)
    P = tessel.world()
    layout = Layout.split(P, (4, 5), (None, 0))
    sharding = Sharding(1, P, 5)
    soft = values((4, 5), 1).softmax(1)
    for logits, target, weight in (
        (torch.float32, torch.tensor([0, 1, 2, 4], dtype=torch.uint8), None),
        (torch.float32, soft, None),
        (torch.bfloat16, soft.float(), None),
        (torch.float32, soft.float(), torch.ones(5, dtype=torch.float64)),
    ):
        whole = x.to(logits).requires_grad_()
        mine = layout.local_part(x).to(logits).requires_grad_()
        expected = F.cross_entropy(whole, target, weight)
        got = parallel_cross_entropy(as_shard(mine, sharding), target, weight)
        tolerance = TOLERANCES[logits]
        near("loss", got, expected, tolerance)
        expected.backward()
        got.backward()
        assert mine.grad is not None and whole.grad is not None
        near("gradient", mine.grad, layout.local_part(whole.grad), tolerance)
    short = torch.tensor([2])  # torch takes it for the class of an input of shape (C)
    for reduction in REDUCTIONS:
        expected = F.cross_entropy(x[0], short, reduction=reduction)
        part = Layout.split(P, (5,), (0,)).local_part(x[0])
        got = parallel_cross_entropy(as_shard(part, Sharding(0, P, 5)), short, reduction=reduction)
        near("loss", got, expected, 1e-12)


def test_dtypes(run: Run) -> None:
    run(dtypes_of_torch, nprocs=2)


def short_numbers_are_better() -> list[float]:
    """The errors of torch's loss of short numbers and of this one, against float64."""
    P = tessel.world()
    x = (3 * values((64, 1001), 0)).bfloat16()
    target = torch.arange(64) * 15
    exact = F.cross_entropy(x.double(), target, reduction="none")
    part = Layout.split(P, (64, 1001), (None, 0)).local_part(x)
    ours = parallel_cross_entropy(as_shard(part, Sharding(1, P, 1001)), target, reduction="none")
    theirs = F.cross_entropy(x, target, reduction="none")
    return [(each.double() - exact).abs().max().item() for each in (theirs, ours)]


def test_short_numbers_are_computed_in_float32(run: Run) -> None:
    for theirs, ours in run(short_numbers_are_better, nprocs=2):
        assert ours <= theirs and ours <= 2**-8 * 16  # half a unit in the last of 8 bits, below 16


def derive_behind_a_head() -> None:
    """Every worker derives the loss; a head in shards before it trains as in one process."""
    P = tessel.world()
    features, num_classes = 6, 9
    layout = Layout.split(P, (num_classes, features), (0, None))
    weight, x = values((num_classes, features), 1), values((4, features), 2)
    target = torch.tensor([0, 8, 4, 3])
    whole = weight.clone().requires_grad_()
    mine = layout.local_part(weight).clone().requires_grad_()
    for _ in range(5):
        want = F.cross_entropy(x @ whole.T, target)
        have = ParallelCrossEntropyLoss()(as_shard(x @ mine.T, Sharding(1, P, num_classes)), target)
        near("loss", have, want, 1e-12)
        for loss, each in ((want, whole), (have, mine)):
            (grad,) = torch.autograd.grad(loss, each)
            each.data -= grad
    near("weight", mine, layout.local_part(whole), 1e-12)


@pytest.mark.parametrize("nprocs", [2, 4])
def test_training_goes_as_in_one_process(run: Run, nprocs: int) -> None:
    run(derive_behind_a_head, nprocs=nprocs)


def losses_here() -> list[float]:
    return [
        loss_of_mine(case, Tensors.mine(case)).item()
        for case in (Case((64, 33)), Case((64, 33), "whole", dtype=torch.float32), Case((3, 9, 2)))
    ]


def test_the_loss_is_the_same_to_the_last_bit(run: Run) -> None:
    first, *others = run(losses_here, nprocs=4)
    assert others == [first] * 3


def derive_one_need(who: int) -> Any:
    """One worker alone needs a gradient of its logits."""
    case = Case((4, 5))
    mine = Tensors.mine(case)
    x = mine.x.detach()
    if tessel.world().rank == who:
        x.requires_grad_()
    loss = parallel_cross_entropy(as_shard(x, case.sharding()), mine.target)
    loss.backward()
    return None if x.grad is None else bool(x.grad.any())


def test_one_worker_needs_a_gradient(run: Run) -> None:
    assert run(derive_one_need, 1, nprocs=2) == [None, True]


def differences() -> None:
    """The gradients of logits, target and weight are the vjps of the loss itself."""
    case = Case((3, 5), "shard", "sum", 0.3, True)
    mine = Tensors.mine(case)
    loss = loss_of_mine(case, mine)
    grads = torch.autograd.grad(loss, mine.leaves(case))
    world = tessel.world()
    along = [values(each.shape, 3 + k) for k, each in enumerate(Tensors.whole(case).leaves(case))]
    own = parts(case, along)
    step = 1e-5
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            x, target, weight = (
                leaf + sign * step * way for leaf, way in zip(mine.leaves(case), own, strict=True)
            )
            ends.append(loss_of_mine(case, Tensors(x, target, weight)))
    slope = (ends[0] - ends[1]) / (2 * step)
    shares = [(a * b).sum() for a, b in zip(grads, own, strict=True)]
    shared = shares[2] / world.size  # the weight's gradient is whole on every worker
    got = tessel.nn.AllSumReduce(world, [0])((shares[0] + shares[1] + shared).reshape(1))
    assert abs(got.item() - slope.item()) < 1e-8  # the error of differences of this step


def test_gradients_are_slopes(run: Run) -> None:
    run(differences, nprocs=3)


def push_forward(target: str) -> None:
    """The derivative along a tangent, in forward mode."""
    case = Case((4, 5), target, label_smoothing=0.3, needs_grad=False)
    layout = case.layout()
    x, goal = case.whole_logits(), case.whole_target()
    along = values(case.shape, 8)
    _, want = torch.func.jvp(
        lambda each: F.cross_entropy(each, goal, **case.options()), (x,), (along,)
    )
    own = Tensors.mine(case).target.detach()
    _, have = torch.func.jvp(
        lambda each: loss_of_mine(case, Tensors(each, own, None)),
        (layout.local_part(x),),
        (layout.local_part(along),),
    )
    near("derivative", have, want, 1e-12)


@pytest.mark.parametrize("target", ["classes", "whole", "shard"])
def test_forward_mode(run: Run, target: str) -> None:
    run(push_forward, target, nprocs=2)


def count(case: Case) -> list[list[int]]:
    """The messages, bytes and agreements of the second call, forward and backward."""
    mine = Tensors.mine(case)
    loss_of_mine(case, mine)
    with count_traffic() as there:
        loss = loss_of_mine(case, mine)
    with count_traffic() as back:
        loss.sum().backward()
    return [[each.messages, each.bytes_sent, each.agreements] for each in (there, back)]


@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize(
    ("case", "facts"),
    [
        (Case((6, 40)), 3),
        (Case((6, 40), weighted=True, reduction="none"), 3),
        (Case((6, 40), "some ignored", dtype=torch.float32), 3),
        (Case((6, 40), dtype=torch.bfloat16), 3),
        (Case((3, 40, 2), label_smoothing=0.3), 4),
        (Case((6, 40), "shard"), 4),
        (Case((6, 40), "whole", needs_grad=False, weighted=True), 4),
    ],
)
def test_messages(run: Run, nprocs: int, case: Case, facts: int) -> None:
    """One exchange of few numbers for each sample forward, and none backward."""
    width = 8 if case.dtype == torch.float64 else 4
    sent = facts * 6 * width * (nprocs - 1)
    for there, back in run(count, case, nprocs=nprocs):
        assert there == [nprocs - 1, sent, 1]
        assert back == [0, 0, 0]


def test_gradients_of_shared_values_move(run: Run) -> None:
    """The gradients of a whole target and of a weight are put together from all workers."""
    for there, back in run(count, Case((6, 40), "whole", weighted=True), nprocs=2):
        assert there == [1, 4 * 6 * 8, 1]
        assert back == [2, (6 * 20 + 20) * 8, 0]


def memory_of(case: Case) -> tuple[int, int]:
    """The bytes of this worker's logits, and the most that a step needs beside them."""
    mine = Tensors.mine(case)
    loss_of_mine(case, mine).backward()
    mine = Tensors.mine(case)
    with count_memory() as memory:
        loss_of_mine(case, mine).backward()
    assert mine.x.grad is not None
    return mine.x.nbytes, memory.peak


@pytest.mark.parametrize(
    ("case", "bound"),
    [
        (Case((64, 16384), dtype=torch.float32), 2.2),
        (Case((64, 16384), dtype=torch.float32, weighted=True, label_smoothing=0.1), 2.4),
        (Case((8, 16384, 8), dtype=torch.float32, label_smoothing=0.1), 2.4),
        (Case((64, 16384), dtype=torch.bfloat16), 2.9),
        (Case((64, 16384), dtype=torch.bfloat16, weighted=True, label_smoothing=0.1), 2.9),
        (Case((64, 16384), "shard", dtype=torch.float32, needs_grad=False), 2.4),
        (
            Case(
                (64, 16384),
                "shard",
                dtype=torch.float32,
                needs_grad=False,
                weighted=True,
                label_smoothing=0.1,
            ),
            2.9,
        ),
    ],
)
def test_memory(run: Run, case: Case, bound: float) -> None:
    """A step needs less than three times the local logits, the gradient among them."""
    for logits, peak in run(memory_of, replace(case, orders=(1,)), nprocs=2):
        assert peak <= bound * logits
        assert logits == prod(case.shape) // 2 * case.dtype.itemsize


def outcome(function: Callable[[], Any]) -> tuple[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function()
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


CLASSES = torch.tensor([0, 1, 2, 4])


def refused(what: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """What torch says to the whole, and what this worker says to its shard."""
    x, target, more = torch.zeros(4, 5), CLASSES, {}
    if what == "out of range":
        target = torch.tensor([0, 1, 5, 4])
    elif what == "negative":
        target = torch.tensor([0, 1, -1, 4])
    elif what == "images out of range":
        x, target = torch.zeros(4, 5, 1), torch.tensor([0, 1, 5, 4]).reshape(4, 1)
    elif what == "batch":
        target = CLASSES[:3]
    elif what == "image":
        x, target = torch.zeros(4, 5, 2), torch.zeros(4, 3, dtype=torch.int64)
    elif what == "one sample":
        x, target = torch.zeros(5), torch.zeros(3, dtype=torch.int64)
    elif what == "numbers as probabilities":
        target = torch.zeros(4, 5, dtype=torch.int64)
    elif what == "float classes":
        target = CLASSES.float()
    elif what == "int32 classes":
        target = CLASSES.int()
    elif what == "integers":
        x = x.long()
    elif what == "complex":
        x = x.cfloat()
    elif what == "weight size":
        more = {"weight": torch.ones(4)}
    elif what == "weight dtype":
        more = {"weight": torch.ones(5).double()}
    elif what == "weight gradient":
        more = {"weight": torch.ones(5, requires_grad=True)}
    elif what == "weight list":
        more = {"weight": [1.0] * 5}
    elif what == "label_smoothing":
        more = {"label_smoothing": 1.5}
    elif what == "reduction":
        more = {"reduction": "average"}
    elif what == "ignored probabilities":
        target, more = torch.ones(4, 5), {"ignore_index": 2}
    alone = outcome(lambda: F.cross_entropy(x, target, **more))
    dim = min(1, x.ndim - 1)
    axes = [0 if d == dim else None for d in range(x.ndim)]
    part = Layout.split(tessel.world(), x.shape, axes).local_part(x)
    shard = as_shard(part, Sharding(dim, tessel.world(), 5))
    return alone, outcome(lambda: parallel_cross_entropy(shard, target, **more))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("out of range", "target 5 is out of bounds on worker 0: the classes are 0 to 4"),
        ("negative", "target -1 is out of bounds on worker 0: the classes are 0 to 4"),
        ("images out of range", "target 5 is out of bounds on worker 0"),
        ("batch", "for an input of shape (4, 5), got (3,)"),
        ("image", "for an input of shape (4, 5, 2), got (4, 3)"),
        ("one sample", "for an input of shape (5,), got (3,)"),
        ("numbers as probabilities", ""),
        ("float classes", ""),
        ("int32 classes", ""),
        ("integers", ""),
        ("complex", ""),
        ("weight size", ""),
        ("weight dtype", ""),
        ("weight gradient", ""),
        ("weight list", "must be Tensor"),
        ("label_smoothing", ""),
        ("reduction", ""),
        ("ignored probabilities", ""),
    ],
)
def test_what_torch_refuses_all_workers_refuse(run: Run, what: str, says: str) -> None:
    """With torch's kind of error, and torch's text where no other is given."""
    results = run(refused, what, nprocs=2, timeout=20)
    assert results[0] == results[1]
    (kind, text), (got, message) = results[0]
    assert kind and got == kind
    assert says in message if says else message == text


def misfit(what: str) -> tuple[str, str]:
    """What a worker says if not all bring what belongs together."""
    world = tessel.world()
    is_last = world.rank == world.size - 1
    x, target, more = torch.zeros(4, 3 - is_last), CLASSES, {}
    sharding, goal_sharding, weight_sharding = Sharding(1, world, 5), None, None
    if what == "unbalanced":
        x = torch.zeros(4, 2 + is_last)
    elif what == "unbalanced, not sized":
        x, sharding = torch.zeros(4, 2 + is_last), Sharding(1, world)
    elif what == "another size":
        sharding = Sharding(1, world, 7)
    elif what == "batch dim":
        sharding = Sharding(0, world, 4)
    elif what == "last dim":
        x, sharding = torch.zeros(2, 4, 3 - is_last), Sharding(2, world, 5)
    elif what == "batches":
        x = torch.zeros(4 + is_last, 3 - is_last)
    elif what == "dtypes":
        x = x.double() if is_last else x
    elif what == "dims":
        x = x[0] if is_last else x
        sharding = Sharding(x.ndim - 1, world, 5)
    elif what == "targets":
        target = CLASSES + is_last * torch.tensor([1, 0, 0, 0])
    elif what == "range":
        target = CLASSES + is_last
    elif what == "target shapes":
        target = CLASSES[: 4 - is_last]
    elif what == "target list":
        target = CLASSES.tolist() if is_last else CLASSES
    elif what == "weights":
        more = {"weight": torch.ones(5) + is_last}
    elif what == "weight of one":
        more = {"weight": torch.ones(5)} if is_last else {}
    elif what == "reductions":
        more = {"reduction": "sum" if is_last else "mean"}
    elif what == "plain target":
        target = torch.rand(x.shape)
    elif what == "target along batch":
        target, goal_sharding = torch.rand(2, 5), Sharding(0, world, 4)
    elif what == "classes in shards":
        target, goal_sharding = CLASSES[:2], Sharding(0, world, 4)
    elif what == "images in shards":
        x, target = torch.zeros(4, 3 - is_last, 4), torch.zeros(4, 2, dtype=torch.int64)
        goal_sharding = Sharding(1, world, 4)
    elif what == "sparse target":
        target = CLASSES.to_sparse() if is_last else CLASSES
    elif what == "sparse weight":
        more = {"weight": torch.ones(5).to_sparse()}
    elif what == "weight shard":
        more, weight_sharding = {"weight": torch.ones(x.shape[1])}, Sharding(0, world, 5)
    elif what == "partition":
        more = {"partition": world.create_partition_inclusive([0])}
    elif what == "no gradient":
        x.requires_grad_()
    if goal_sharding is not None:
        target = as_shard(target, goal_sharding)
    if weight_sharding is not None:
        more["weight"] = as_shard(more["weight"], weight_sharding)
    with torch.set_grad_enabled(not (what == "no gradient" and is_last)):
        return outcome(lambda: parallel_cross_entropy(as_shard(x, sharding), target, **more))


ALONG_1 = "a shard along dim 1 over workers 0, 1"


@pytest.mark.parametrize(
    ("what", "kind", "says"),
    [
        ("unbalanced", "ValueError", "[3, 2] on workers [0, 1], got [2, 3]"),
        ("unbalanced, not sized", "ValueError", "[3, 2] on workers [0, 1], got [2, 3]"),
        ("another size", "ValueError", "7 classes, [4, 3] on workers [0, 1], got [3, 2]"),
        ("batch dim", "ValueError", f"of 2 dimensions, must be {ALONG_1}, got a shard along dim 0"),
        ("last dim", "ValueError", f"of 3 dimensions, must be {ALONG_1}, got a shard along dim 2"),
        ("batches", "ValueError", "(4,) on worker 0, (5,) on worker 1"),
        ("dtypes", "ValueError", "torch.float32 on worker 0, torch.float64 on worker 1"),
        ("dims", "ValueError", "all workers must make the same calls"),
        ("targets", "ValueError", "same target, but the values differ between workers 0 and 1"),
        ("range", "IndexError", "target 5 is out of bounds on worker 1: the classes are 0 to 4"),
        ("target shapes", "ValueError", "(4,) on worker 0, (3,) on worker 1"),
        ("target list", "ValueError", "worker 1 passed no tensor"),
        ("weights", "ValueError", "same weight, but the values differ between workers 0 and 1"),
        ("weight of one", "ValueError", "all workers must make the same calls"),
        ("reductions", "ValueError", "all workers must make the same calls"),
        ("plain target", "ValueError", "write tessel.register_parallel_dim(target, 1)"),
        (
            "target along batch",
            "ValueError",
            f"the target must be {ALONG_1}, got a shard along dim 0",
        ),
        (
            "classes in shards",
            "ValueError",
            f"the target must be {ALONG_1}, got a shard along dim 0",
        ),
        ("images in shards", "ValueError", "class indices must be whole on every worker"),
        ("sparse target", "ValueError", "worker 1 passed no tensor"),
        ("sparse weight", "TypeError", "must be Tensor"),
        ("weight shard", "ValueError", "the weight must be whole on every worker"),
        ("partition", "ValueError", "omit partition="),
        ("no gradient", "ValueError", "workers [1] run under torch.no_grad()"),
    ],
)
def test_misfits_raise_on_every_worker(run: Run, what: str, kind: str, says: str) -> None:
    results = run(misfit, what, nprocs=2, timeout=20)
    assert results[0] == results[1]
    assert results[0][0] == kind and says in results[0][1]


def shardings_that_do_not_fit() -> list[tuple[str, str]]:
    world = tessel.world()
    first = world.create_partition_inclusive([0])
    x = torch.zeros(4, 5)
    soft = as_shard(torch.rand(4, 5), Sharding(1, world, 5 * world.size))
    outside = outcome(lambda: parallel_cross_entropy(as_shard(x, Sharding(1, first, 5)), CLASSES))
    return [outcome(lambda: parallel_cross_entropy(x, soft)), outside]


def test_shardings_that_do_not_fit(run: Run) -> None:
    """A shard as the target of a whole input; a worker outside of those of the sharding."""
    first, second = run(shardings_that_do_not_fit, nprocs=2, timeout=20)
    assert first[0] == second[0] and first[0][0] == "ValueError"
    assert "the input has no sharding, but the target has one" in first[0][1]
    assert first[1] == ("", "")
    assert second[1][0] == "ValueError" and "worker 1 does not belong" in second[1][1]


def lost_on_one() -> tuple[str, str]:
    """Of three classes on two workers one is alone, and may be any dimension of length 1."""
    P = tessel.world()
    x = as_shard(torch.zeros(2, 1, 2 - (P.rank or 0)), Sharding(2, P, 3))
    return outcome(lambda: parallel_cross_entropy(x.view(2, x.shape[2]), CLASSES[:2]))


def lost_on_all() -> tuple[str, str]:
    x = as_shard(torch.zeros(4, 5), Sharding(1, tessel.world(), 5 * tessel.world().size))
    return outcome(lambda: parallel_cross_entropy(x.cumsum(1), CLASSES))


def test_a_lost_sharding_raises_on_every_worker(run: Run) -> None:
    for lose, says in ((lost_on_one, "same calls"), (lost_on_all, "lost in `cumsum`")):
        first, second = run(lose, nprocs=2, timeout=20)
        assert first == second and first[0] == "ValueError" and says in first[1]


def copied() -> None:
    """A loss that was copied or pickled gives the same, and its state is torch's."""
    case = Case((4, 5), label_smoothing=0.3, weighted=True)
    whole, mine = Tensors.whole(case), Tensors.mine(case)
    first = ParallelCrossEntropyLoss(mine.weight, label_smoothing=0.3, partition=tessel.world())
    alone = torch.nn.CrossEntropyLoss(whole.weight, label_smoothing=0.3)
    assert list(first.state_dict()) == list(alone.state_dict()) == ["weight"]
    shard = as_shard(mine.x, case.sharding())
    expected = alone(whole.x, whole.target)
    for loss in (first, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        near("loss", loss(shard, mine.target), expected, 1e-12)
        assert isinstance(loss, torch.nn.CrossEntropyLoss)


def test_copies_of_a_loss(run: Run) -> None:
    run(copied, nprocs=2)


def noncontiguous() -> None:
    """Logits of (batch, time, class), transposed, as a language model gives them."""
    P = tessel.world()
    x = values((2, 3, 7), 0)
    target = torch.randint(7, (2, 3), generator=torch.Generator().manual_seed(0))
    whole = x.clone().requires_grad_()
    part = Layout.split(P, x.shape, (None, None, 0)).local_part(x).clone().requires_grad_()
    shard = as_shard(part, Sharding(2, P, 7))
    expected = F.cross_entropy(whole.transpose(1, 2), target)
    got = parallel_cross_entropy(shard.transpose(1, 2), target)
    flat = parallel_cross_entropy(shard.flatten(0, 1), target.flatten())
    near("loss", got, expected, 1e-12)
    near("loss", flat, expected, 1e-12)
    (want,) = torch.autograd.grad(expected, whole)
    for loss in (got, flat):
        (have,) = torch.autograd.grad(loss, part)
        near("gradient", have, Layout.split(P, x.shape, (None, None, 0)).local_part(want), 1e-12)


def test_logits_of_a_language_model(run: Run) -> None:
    run(noncontiguous, nprocs=3)


def registered() -> None:
    """A shard that was registered by hand, over the default group."""
    case = Case((4, 5))
    whole, mine = Tensors.whole(case), Tensors.mine(case)
    shard = tessel.distributed.register_parallel_dim(mine.x, -1)
    expected = F.cross_entropy(whole.x, whole.target)
    near("loss", parallel_cross_entropy(shard, mine.target), expected, 1e-12)


def test_shardings_by_hand(run: Run) -> None:
    run(registered, nprocs=2)


def compiled() -> None:
    """Compiled code calls the loss as it is."""
    case = Case((4, 5))
    whole, mine = Tensors.whole(case), Tensors.mine(case)
    sharding = case.sharding()

    def step(x: Tensor) -> Tensor:
        return parallel_cross_entropy(as_shard(2 * x, sharding), mine.target) * 3

    expected = F.cross_entropy(2 * whole.x, whole.target) * 3
    got = torch.compile(step, backend="eager")(mine.x)
    near("loss", got, expected, 1e-12)
    want, have = torch.autograd.grad(expected, whole.x), torch.autograd.grad(got, mine.x)
    near("gradient", have[0], case.layout().local_part(want[0]), 1e-12)


def test_compiled_code(run: Run) -> None:
    run(compiled, nprocs=2, timeout=SECONDS)
