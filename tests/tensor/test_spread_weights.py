"""Convolutions and linear maps whose weight is spread, too, give what one process gives.

Axes of a grid are named by what they split: (b)atch, (o)utputs, (i)nputs, the first (s) or the last
(t) dimension of space.

Tests `tensor/rules/products.py`, `tensor/rules/convolution.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import tessel
from parity import values
from spread_cases import Case
from tessel import Layout, Partition
from tessel.core import boxes
from tessel.core.layout import Cut
from tessel.testing import count_traffic
from test_spread import Verdict, check

Run = Callable[..., list[Any]]
Shape = tuple[int, ...]
Lengths = Mapping[str, Sequence[int]]  # of the parts along an axis, where they are not balanced
SPACE: dict[int, Shape] = {0: (), 1: (9,), 2: (7, 8), 3: (4, 5, 6)}
KERNEL: dict[int, Shape] = {0: (), 1: (3,), 2: (3, 2), 3: (3, 2, 3)}


@dataclass(frozen=True)
class Function:
    """A function of inputs and weights.

    Attributes:
        name: in `torch.nn.functional`.
        settings: its arguments.
        inputs, outputs: how many channels there are.
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    inputs: int = 4
    outputs: int = 6

    @property
    def num_dims(self) -> int:
        return int(self.name[-2]) if self.name.startswith("conv") else 0

    @property
    def outputs_first(self) -> bool:
        return not self.name.startswith("conv_transpose")

    def case(self, bias: bool) -> Case:
        D, groups = self.num_dims, dict(self.settings).get("groups", 1)
        channels = (
            (self.outputs, self.inputs // groups)
            if self.outputs_first
            else (self.inputs, self.outputs // groups)
        )
        shapes = (3, self.inputs, *SPACE[D]), (*channels, *KERNEL[D]), (self.outputs,)

        def does(*operands: torch.Tensor) -> Any:
            return getattr(F, self.name)(*operands, **dict(self.settings))

        return Case(does, shapes if bias else shapes[:2])

    def roles(self) -> tuple[tuple[str, ...], ...]:
        """Which axis splits which dimension of the input, the weight and the bias."""
        space = (
            ("s", "", "t")[:1] if self.num_dims == 1 else ("s", *[""] * (self.num_dims - 2), "t")
        )
        weight = ("o", "i") if self.outputs_first else ("i", "o")
        return (
            ("b", "i", *space[: self.num_dims]),
            (*weight, *[""] * self.num_dims),
            ("o",),
        )


def lies(P: Partition, axes: str, shape: Shape, roles: Sequence[str], lengths: Lengths) -> Layout:
    """A tensor whose dimensions are split by the axes of these names, and shared along others."""
    cuts, taken = [], set()
    for length, role in zip(shape, roles, strict=True):
        if not role or role not in axes:
            cuts.append(Cut((), ((0, length),)))
            continue
        axis = axes.index(role)
        taken.add(axis)
        parts = P.shape[axis]
        some = lengths.get(role)
        fits = some is not None and sum(some) == length
        cuts.append(
            Cut((axis,), boxes.consecutive(some) if fits else boxes.balanced(length, parts))
        )
    shared = tuple(axis for axis in range(P.dim) if axis not in taken)
    return Layout(P, shape, tuple(cuts), shared)


def grid(sizes: Sequence[int]) -> Partition:
    return Partition(tuple(range(prod(sizes))), tuple(sizes))


def check_on(functions: Sequence[Function], grids: Sequence[tuple[str, Shape, Lengths]]) -> int:
    """All functions on all grids, with a bias that is spread, one that is plain, and none."""
    verdict = Verdict()
    for function, (axes, sizes, lengths) in product(functions, grids):
        P = grid(sizes)
        roles = function.roles()
        for bias in ("spread", "plain", "none"):
            case = function.case(bias != "none")
            layouts: list[Layout | None] = [
                lies(P, axes, shape, role, lengths)
                for shape, role in zip(case.shapes, roles, strict=False)
            ]
            if bias == "plain":
                layouts[2] = None
            check(f"{function.name} on {axes} {sizes}, {bias} bias", case, layouts, verdict)
    assert not verdict.wrong, f"{len(verdict.wrong)} wrong:\n" + "\n".join(verdict.wrong[:40])
    return verdict.count


FUNCTIONS = [
    *(Function(f"conv{D}d", (("padding", 1),)) for D in (1, 2, 3)),
    Function("conv2d", (("stride", 2), ("padding", "valid"), ("dilation", 2))),
    Function("conv2d", (("padding", 1), ("groups", 2))),
    Function("conv1d", (("padding", 2), ("groups", 4)), 4, 8),
    *(Function(f"conv_transpose{D}d", (("stride", 2), ("padding", 1))) for D in (1, 2, 3)),
    Function("conv_transpose2d", (("groups", 2), ("stride", 2), ("output_padding", 1))),
    Function("linear"),
]
BY_NAME = {f"{each.name} {dict(each.settings)}": each for each in FUNCTIONS}
GRIDS: list[tuple[str, Shape, Lengths]] = [
    *((pair, (2, 2), {}) for pair in ("oi", "io", "os", "is", "ob", "ib", "st", "it")),
    ("o", (4,), {}),
    ("i", (4,), {}),
    # uneven and empty parts
    ("oi", (2, 2), {"o": (5, 1), "i": (1, 3)}),
    ("oi", (2, 2), {"o": (0, 6), "i": (4, 0)}),
    ("is", (2, 2), {"i": (0, 4), "s": (1, 6)}),
    ("bo", (2, 2), {"b": (3, 0), "o": (2, 4)}),
]


@pytest.mark.parametrize("name", BY_NAME)
def test_weights_in_blocks(run: Run, name: str) -> None:
    """Outputs, inputs, space and batch in two parts each, or in four, even, uneven and empty."""
    count = run(check_on, [BY_NAME[name]], GRIDS, nprocs=4, timeout=100)[0]
    assert count == 3 * len(GRIDS)


LARGER: list[tuple[str, Shape, Lengths]] = [("ois", (2, 2, 2), {}), ("boi", (2, 2, 2), {})]


@pytest.mark.parametrize("nprocs", [8])
def test_weights_in_blocks_on_three_axes(run: Run, nprocs: int) -> None:
    functions = [Function("conv2d", (("padding", 1),)), Function("conv_transpose1d")]
    run(check_on, functions, LARGER, nprocs=nprocs, timeout=100)


def check_misfits() -> None:
    """Weights that lie on axes that the input needs, in parts of the kernel, or on another grid."""
    verdict = Verdict()
    row, square = grid((4,)), grid((2, 2))
    for name in ("conv2d", "conv2d of groups", "conv_transpose2d"):
        settings = (("groups", 2),) if "groups" in name else ()
        function = Function(name.partition(" ")[0], settings)
        case = function.case(bias=True)
        inputs = [
            *(Layout.split(row, case.shapes[0], axes) for axes in one_axis(4)),
            Layout.whole(row, case.shapes[0], shared=True),
        ]
        for x in inputs:
            for axes in one_axis(4):
                weight = Layout.split(row, case.shapes[1], axes)
                bias = Layout.split(row, case.shapes[2], [0])
                check(name, case, [x, weight, bias], verdict)
        elsewhere = Layout.split(square, case.shapes[1], (0, 1, None, None))
        check(name, case, [inputs[0], elsewhere, None], verdict)
        # parts of groups
        third = Layout.from_lengths(
            grid((1, 1, 4, 1)), [*([n] for n in case.shapes[0][:2]), [2, 2, 2, 1], [8]]
        )
        uneven = Layout(
            third.partition,
            case.shapes[1],
            (
                Cut((2,), boxes.consecutive((1, 1, 1, case.shapes[1][0] - 3))),
                *(Cut((), ((0, n),)) for n in case.shapes[1][1:]),
            ),
            (0, 1, 3),
        )
        check(name, case, [third.gathered([2]), uneven, None], verdict)
    assert not verdict.wrong, f"{len(verdict.wrong)} wrong:\n" + "\n".join(verdict.wrong[:40])


def one_axis(ndim: int) -> list[list[int | None]]:
    return [[0 if d == dim else None for d in range(ndim)] for dim in range(ndim)]


def test_weights_that_do_not_fit_are_moved(run: Run) -> None:
    run(check_misfits, nprocs=4, timeout=100)


def spread_on(axes: str, sizes: Shape, function: Function) -> list[Any]:
    P, case = grid(sizes), function.case(bias=True)
    return [
        tessel.spread(values(shape, k), lies(P, axes, shape, role, {}))
        for k, (shape, role) in enumerate(zip(case.shapes, function.roles(), strict=True))
    ]


def count_forward(axes: str, sizes: Shape, function: Function) -> tuple[int, int, list[Any]]:
    """What a worker sends, and by which axes the result is split and shared."""
    operands = spread_on(axes, sizes, function)
    case = function.case(bias=True)
    with count_traffic() as traffic:
        y = case.does(*operands)
    cuts = [tuple(axes[axis] for axis in cut.axes) for cut in y.layout.cuts]
    return traffic.messages, traffic.bytes_sent, [*cuts, [axes[axis] for axis in y.layout.shared]]


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_blocks_of_outputs_send_nothing(run: Run, name: str) -> None:
    """The input is whole on all workers, and the outputs lie as the blocks of the weight do."""
    found = run(count_forward, "o", (4,), Function(name), nprocs=4)
    assert found == [(0, 0, [(), ("o",), (), (), []])] * 4


def test_blocks_of_inputs_send_their_terms_only(run: Run) -> None:
    """Two workers swap their terms: 3 outputs of 3 samples of 5 × 7 values, none of the weight."""
    found = run(count_forward, "oi", (2, 2), Function("conv2d"), nprocs=4)
    assert found == [(1, 3 * 3 * 5 * 7 * 8, [(), ("o",), (), (), ["i"]])] * 4


def with_an_infinite_bias(name: str) -> bool:
    """Whether all outputs are infinite, of inputs in two blocks: the bias counts once."""
    x, weight, bias = spread_on("i", (2,), Function(name))
    y = getattr(F, name)(x, weight, bias * float("inf"))
    return bool((y.full().abs() == float("inf")).all())


@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d", "linear"])
def test_an_infinite_bias_is_added_once(run: Run, name: str) -> None:
    assert run(with_an_infinite_bias, name, nprocs=2) == [True] * 2


def on_some_workers() -> None:
    """A worker outside of the partition knows how the result lies, and gets it when it moves."""
    P = Partition((0, 2), (2,))
    x = tessel.spread(values((2, 4, 9), 0), Layout.split(P, (2, 4, 9), (None, 0, None)))
    weight = tessel.spread(values((6, 4, 3), 1), Layout.split(P, (6, 4, 3), (None, 0, None)))
    y = F.conv1d(x, weight)
    everywhere = Partition((0, 1, 2), (1, 3, 1))
    expected = F.conv1d(values((2, 4, 9), 0), values((6, 4, 3), 1))
    part = Layout.balanced(everywhere, expected.shape).local_part(expected)
    torch.testing.assert_close(y.move_to(everywhere).local, part, rtol=1e-12, atol=1e-12)


def test_workers_outside_take_part_in_movements(run: Run) -> None:
    run(on_some_workers, nprocs=3)


def wrong_operands() -> list[Any]:
    """What torch does not take, of which a worker may see a part that fits, or nothing."""
    row = grid((2,))

    def split(shape: Shape, dim: int | None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        axes = [0 if d == dim else None for d in range(len(shape))]
        return tessel.spread(torch.ones(shape, dtype=dtype), Layout.split(row, shape, axes))

    first = tessel.world().create_partition_inclusive([0])
    alone = tessel.spread(torch.ones(4, 4, 3).double(), Layout.whole(first, (4, 4, 3)))
    calls: list[Callable[[], Any]] = [
        lambda: F.linear(torch.ones(3, 1).double(), split((5, 2), 1)),
        lambda: F.linear(split((3, 2), 1), split((2, 1), 0)),
        lambda: F.linear(split((3, 2), 0), split((4, 2), 1), torch.ones(4)),
        lambda: F.linear(split((1, 2), 0), split((4, 2), 0, torch.float32)),
        lambda: F.conv1d(split((2, 4, 6), 2), alone),
        lambda: F.layer_norm(split((2, 4, 4, 3), 0), (4, 4, 3), alone),
    ]
    for axis in (0, 1, None):
        for bias in ((3,), (1,), (), (4, 1), (2, 2), (6,)):
            for x in range(3):
                operands = split((2, 4, 6), x), split((4, 4, 3), axis), torch.ones(bias).double()
                calls += [
                    lambda o=operands: F.conv1d(*o),
                    lambda o=operands: F.conv_transpose1d(*o),
                ]
    found: list[Any] = []
    for call in calls:
        try:
            found.append(tuple(call().shape))
        except (RuntimeError, ValueError) as error:
            found.append(type(error))
        assert tessel.ones(2, where=row).sum().item() == 2  # the workers go on together
    return found


def test_what_torch_does_not_take_raises_on_all_workers(run: Run) -> None:
    for found in run(wrong_operands, nprocs=2, timeout=60):
        assert set(found) <= {RuntimeError, ValueError}, found
        assert found[4:6] == [ValueError, ValueError]
