"""Layers that slide windows over a tensor: cases to check, chosen by hand and at random.

Random cases come from a seeded generator, and torch's own layer accepts all of them. They are made
in one process and sent to the workers, so that all see the same list.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import tessel
from covering import repeats
from parity import Case, close, first, values, vjps
from tessel import Layout, Partition
from tessel.testing import count_traffic

WIDTH = 8  # bytes of a float64
LONGEST, WIDEST = 40, 7  # the greatest length of a random tensor and of a random kernel
VOLUME, WORK = 3000, 60_000  # the most indices of its space, and of these times those of a kernel

Settings = tuple[tuple[str, Any], ...]
Shape = tuple[int, ...]
Numbers = int | tuple[int, ...]


@dataclass(frozen=True)
class Peer:
    """A case on which implementations are commonly compared."""

    grid: Shape
    shape: Shape
    kernel: Numbers
    padding: Numbers
    stride: Numbers
    dilation: Numbers = 1

    @property
    def num_dims(self) -> int:
        return len(self.shape) - 2

    def convolution(self, outputs: int) -> Case:
        return Case(
            f"Conv{self.num_dims}d",
            (self.shape[1], outputs, self.kernel),
            self.grid,
            self.shape,
            (("stride", self.stride), ("padding", self.padding), ("dilation", self.dilation)),
        )

    def pools(self) -> list[Case]:
        """The pools with these settings that torch has."""
        common = (("stride", self.stride), ("padding", self.padding))
        kinds: list[tuple[str, Settings]] = [("Max", (*common, ("dilation", self.dilation)))]
        if self.dilation == 1:
            kinds.append(("Avg", common))
        cases = [
            Case(
                f"{kind}Pool{self.num_dims}d",
                (self.kernel,),
                self.grid,
                self.shape,
                settings,
            )
            for kind, settings in kinds
        ]
        return [case for case in cases if is_accepted(case)]


PEERS = [
    Peer((1, 1, 2, 2), (1, 5, 10, 10), 3, 1, 1),
    Peer((1, 1, 2, 2), (1, 5, 10, 10), 5, 2, 2),
    Peer((1, 1, 2, 2), (1, 5, 5, 5), 3, 1, 2),
    Peer((1, 1, 2, 2), (1, 5, 6, 10), 5, 2, 4),
    Peer((1, 1, 2, 1, 2), (1, 3, 5, 5, 6), 5, 2, (2, 2, 1)),
    Peer((1, 1, 4), (1, 3, 15), 3, 1, 1),
    Peer((1, 1, 2, 2), (1, 3, 10, 10), 5, 1, 1, 2),
]
WIDE_PEER = Peer((1, 1, 3, 3, 2), (1, 5, 50, 50, 50), (5, 4, 3), (1, 1, 1), (3, 1, 2), (3, 3, 1))
WIDE_POOL = replace(WIDE_PEER, padding=(1, 1, 1), dilation=1)
BIG_PEER = Peer((1, 1, 1, 4), (2, 64, 150, 150), 7, 3, 2)


def row(name: str, lengths: Sequence[int], *args: Any, **settings: Any) -> Case:
    """A layer on a tensor of one dimension whose parts have these lengths."""
    channels = 2 if "Conv" in name else 3
    parts = ((1,), (channels,), tuple(lengths))
    return Case(
        name,
        args,
        (1, 1, len(lengths)),
        (1, channels, sum(lengths)),
        tuple(settings.items()),
        parts,
    )


def is_accepted(case: Case) -> bool:
    """Whether torch's own layer takes the case, and no window of a maximum sees padding only."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = case.torch_layer()(torch.zeros(case.shape, dtype=torch.float64))
    except (RuntimeError, ValueError):
        return False
    return bool(first(result).isfinite().all())


def compute_to_file(case: Case, folder: Path) -> Path:
    """What torch's own layer gives for a tensor too large to let every worker compute it."""
    layer = case.torch_layer()
    x = values(case.shape, case.seed).requires_grad_()
    y = layer(x)
    grads = vjps(y, values(y.shape, 99), [x, *layer.parameters()], 1)
    second = vjps(grads[0], x.detach(), [x, *layer.parameters()], 2)
    path = folder / f"{case.name}.pt"
    orders = [[each.detach() for each in order] for order in (grads, second)]
    torch.save((layer.state_dict(), x.detach(), y.detach(), orders), path)
    return path


def check_against_file(case: Case, path: Path) -> None:
    """Output and gradients are those of `compute_to_file`, or their parts."""
    layout, layer = case.layout(), case.layer()
    state, x, expected, orders = torch.load(path, mmap=True)
    layer.load_state_dict(state)
    part = layout.local_part(x).clone().requires_grad_()
    y = layer(part)
    out = layout.resized(expected.shape)
    close("output", y, out.local_part(expected))
    mine = out.local_part(values(expected.shape, 99))
    for order, wanted in enumerate(orders, start=1):
        got = vjps(y, mine, [part, *layer.parameters()], order)
        close(f"gradient of order {order} of the input", got[0], layout.local_part(wanted[0]))
        for a, b in zip(got[1:], wanted[1:], strict=True):
            close(f"gradient of order {order} of a parameter", a, b)
        y, mine = got[0], layout.local_part(x)


def random_cases(
    make: Callable[[Random, int], Case], count: int, workers: int, seed: int
) -> list[Case]:
    """Cases of `make` that torch accepts, on at most so many workers; `count` is for `repeats`."""
    rng = Random(seed)
    cases: list[Case] = []
    while len(cases) < repeats(count):
        case = make(rng, workers)
        if is_accepted(case):
            cases.append(case)
    return cases


def random_pool(rng: Random, workers: int) -> Case:
    D = rng.choice([1, 1, 2, 2, 3])
    kind = rng.choice(["Avg", "Max"])
    space, kernel = _space(rng, D)
    settings = [
        ("stride", rng.choice([None, *[_numbers(rng, D, 1, 4)] * 4])),
        ("padding", tuple(rng.randint(0, length // 2) for length in kernel)),  # at most 3
        ("ceil_mode", rng.random() < 0.5),
    ]
    if kind == "Max":
        settings.append(("dilation", _numbers(rng, D, 1, 3)))
    else:
        settings.append(("count_include_pad", rng.random() < 0.5))
        if D > 1 and rng.random() < 0.3:
            settings.append(("divisor_override", rng.randint(1, 5)))
    return _random_case(
        rng, f"{kind}Pool{D}d", (kernel,), rng.randint(1, 3), space, workers, settings
    )


def random_convolution(rng: Random, workers: int) -> Case:
    D = rng.choice([1, 1, 2, 2, 3])
    groups, inputs, outputs = _channels(rng)
    stride, padding = _numbers(rng, D, 1, 4), rng.choice(["same", "valid", *[None] * 6])
    if padding == "same":
        stride = (1,) * D
    settings = [
        ("stride", stride),
        ("padding", _numbers(rng, D, 0, 3) if padding is None else padding),
        ("dilation", _numbers(rng, D, 1, 3)),
        ("groups", groups),
        ("bias", rng.random() < 0.7),
        ("padding_mode", rng.choice([*["zeros"] * 3, "reflect", "replicate", "circular"])),
    ]
    space, kernel = _space(rng, D)
    args = inputs, outputs, kernel
    return _random_case(rng, f"Conv{D}d", args, inputs, space, workers, settings)


def random_transposed(rng: Random, workers: int) -> Case:
    D = rng.choice([1, 1, 2, 2, 3])
    groups, inputs, outputs = _channels(rng)
    settings = [
        ("stride", _numbers(rng, D, 1, 4)),
        ("padding", _numbers(rng, D, 0, 3)),
        ("output_padding", _numbers(rng, D, 0, 2)),
        ("dilation", _numbers(rng, D, 1, 3)),
        ("groups", groups),
        ("bias", rng.random() < 0.7),
    ]
    space, kernel = _space(rng, D, work=WORK // 4)  # the output is larger than the input
    args = inputs, outputs, kernel
    return _random_case(rng, f"ConvTranspose{D}d", args, inputs, space, workers, settings)


def _space(rng: Random, D: int, work: int = WORK) -> tuple[Shape, Shape]:
    """Lengths of a tensor's space and of a kernel, any of them, but few that are large at once."""
    while True:
        space, kernel = _numbers(rng, D, 1, LONGEST), _numbers(rng, D, 1, WIDEST)
        if prod(space) <= VOLUME and prod(space) * prod(kernel) <= work:
            return space, kernel


def _numbers(rng: Random, D: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(rng.randint(low, high) for _ in range(D))


def _channels(rng: Random) -> tuple[int, int, int]:
    """Groups, inputs and outputs; sometimes each input is a group of its own."""
    groups = rng.choice([1, 1, 1, 2, 3])
    inputs = groups * rng.randint(1, 3)
    if rng.random() < 0.2:
        groups = inputs
    return groups, inputs, groups * rng.randint(1, 3)


def _random_case(
    rng: Random, name: str, args: Any, channels: int, space: Shape, workers: int, settings: Any
) -> Case:
    """The layer on a tensor in random parts; sometimes without a batch."""
    batch = () if rng.random() < 0.15 else (rng.randint(1, 3),)
    shape = (*batch, channels, *space)
    grid = random_grid(rng, len(shape), workers)
    return Case(
        name,
        args,
        grid,
        shape,
        tuple(settings),
        random_lengths(rng, shape, grid) if rng.random() < 0.5 else None,
        rng.randrange(1000),
        second=rng.random() < 0.35,
    )


def random_grid(rng: Random, ndim: int, workers: int) -> Shape:
    """At most so many workers, 1 to 4 along each dimension, in space more often than elsewhere."""
    grid, left = [1] * ndim, workers
    for dim in rng.sample(range(ndim), ndim):
        if dim > ndim - 3 or rng.random() < 0.3:
            grid[dim] = rng.choice([size for size in (1, 2, 3, 4) if size <= left])
            left //= grid[dim]
    return tuple(grid)


def random_lengths(rng: Random, shape: Shape, grid: Shape) -> tuple[Shape, ...]:
    """Parts of any lengths, also empty ones."""
    lengths = []
    for length, parts in zip(shape, grid, strict=True):
        cuts = [0, *sorted(rng.randint(0, length) for _ in range(parts - 1)), length]
        lengths.append(tuple(b - a for a, b in pairwise(cuts)))
    return tuple(lengths)


@dataclass(frozen=True)
class Place:
    """Workers on a grid."""

    ranks: tuple[int, ...]
    grid: Shape

    def partition(self) -> Partition:
        row = tessel.world().create_partition_inclusive(self.ranks)
        return row.create_cartesian_topology_partition(self.grid)


@dataclass(frozen=True)
class GridCase:
    """A layer whose input, output and weight lie on grids of their own.

    `w` is a grid of outputs × inputs × space, or one that has the leading dimensions before.
    """

    name: str
    args: tuple[Any, ...]
    shape: Shape
    x: Place
    y: Place | None
    w: Place | None
    settings: Settings = ()
    seed: int = 0
    frozen: tuple[str, ...] = ()  # what needs no gradient: "input", "weight", "bias"
    second: bool = False

    @property
    def num_dims(self) -> int:
        return 0 if self.name == "Linear" else int(self.name[-2])

    def torch_layer(self) -> torch.nn.Module:
        torch.default_generator.manual_seed(self.seed)
        return getattr(torch.nn, self.name)(*self.args, **dict(self.settings)).double()

    def layer(self) -> Any:
        torch.default_generator.manual_seed(100 + tessel.world().rank)
        P_x, P_y, P_w = (place and place.partition() for place in (self.x, self.y, self.w))
        make = getattr(tessel.nn, f"Distributed{self.name}")
        if self.name == "Linear":
            return make(P_x, P_y, P_w, *self.args, **dict(self.settings)).double()
        return make(P_x, *self.args, P_y=P_y, P_w=P_w, **dict(self.settings)).double()

    def block(self, name: str, whole: Tensor) -> Tensor:
        """What this worker of the weight's grid stores of a parameter."""
        if self.w is None:
            return whole
        index = self.w.partition().index
        assert index is not None
        axis = len(self.w.grid) - self.num_dims - 2
        outputs, inputs = ((index[k], self.w.grid[k]) for k in (axis, axis + 1))
        if name == "bias":
            return _part(whole, 0, *outputs)
        out_dim = 1 if "Transpose" in self.name else 0
        grouped = dict(self.settings).get("groups", 1) > 1
        part = _part(whole, out_dim, *outputs)
        return part if grouped else _part(part, 1 - out_dim, *inputs)


def _part(whole: Tensor, dim: int, place: int, parts: int) -> Tensor:
    return whole.tensor_split(parts, dim)[place]


def check_grid_case(case: GridCase) -> None:
    """Outputs, gradients and the `state_dict` are those of torch's own layer, or their parts."""
    try:
        _check_grid_case(case)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from None


def _check_grid_case(case: GridCase) -> None:
    alone, spread = case.torch_layer(), case.layer()
    everyone = {rank for each in (case.x, case.y, case.w) if each for rank in each.ranks}
    takes_part = tessel.world().rank in everyone
    spread.load_state_dict(alone.state_dict())
    if takes_part:
        check_state(spread, alone)
    inputs = Layout.balanced(case.x.partition(), case.shape)
    x = values(case.shape, case.seed)
    named = {"input": x.clone().requires_grad_(), **dict(alone.named_parameters())}
    local = {"input": inputs.local_part(x).clone(), **dict(spread.named_parameters())}
    for name in named:
        named[name].requires_grad_(name not in case.frozen)
        local[name].requires_grad_(name not in case.frozen)
    expected, got = alone(named["input"]), spread(local["input"])
    if not takes_part:
        return
    assert expected.requires_grad == got.requires_grad
    outputs = Layout.balanced((case.y or case.x).partition(), expected.shape)
    _close_part("output", got, expected, outputs)
    weights = values(expected.shape, 99)
    names = [name for name in named if name not in case.frozen]
    for order in (1, 2) if case.second else (1,):
        mine = outputs.local_part(weights)
        mine = mine if outputs.partition.active else mine.new_empty(got.shape)
        wanted = vjps(expected, weights, [named[name] for name in names], order)
        found = vjps(got, mine, [local[name] for name in names], order)
        for name, a, b in zip(names, found, wanted, strict=True):
            what = f"gradient of order {order} of the {name}"
            if name == "input":
                _close_part(what, a, b, inputs)
            elif (case.w or case.x).partition().active:
                close(what, a, case.block(name, b))
        expected, got, weights, outputs = wanted[0], found[0], x, inputs


def _close_part(what: str, got: Tensor, expected: Tensor, layout: Layout) -> None:
    if layout.partition.active:
        close(what, got, layout.local_part(expected))


def check_state(spread: torch.nn.Module, alone: torch.nn.Module) -> None:
    """The state is whole here, and torch's own layer takes it."""
    state, expected = spread.state_dict(), alone.state_dict()
    assert list(state) == list(expected), f"{list(state)} are not {list(expected)}"
    for name, value in expected.items():
        assert torch.equal(state[name], value), f"{name} of the state is another"
    copy.deepcopy(alone).load_state_dict(state)


def check_grid_cases(cases: Sequence[GridCase]) -> int:
    for case in cases:
        check_grid_case(case)
    return len(cases)


# which workers of four hold the input, the output and the weight
RANKS = [
    ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)),
    ((0, 1), (2, 3), (0, 1, 2, 3)),
    ((0, 1), (2,), (3,)),
    ((3, 1), (1, 2), (2, 0, 1)),
    ((0,), (0,), (1, 2, 3)),
    ((1, 2, 3), (1, 2, 3), (0, 1)),
]


def random_grid_case(rng: Random, kind: str) -> GridCase:
    """A convolution, a transposed convolution or a linear layer with a grid of weights."""
    D = 0 if kind == "Linear" else rng.choice([1, 1, 2])
    inputs, outputs = rng.randint(1, 6), rng.randint(1, 6)
    x, y, w = rng.choice(RANKS)
    if kind == "Linear":
        shape = (*_numbers(rng, rng.randint(0, 2), 1, 5), inputs)
        args: tuple[Any, ...] = (inputs, outputs)
        settings = [("bias", rng.random() < 0.7)]
    else:
        shape = (rng.randint(1, 3), inputs, *_numbers(rng, D, 3, 9))
        args = (inputs, outputs, _numbers(rng, D, 1, 3))
        settings = [
            ("bias", rng.random() < 0.7),
            ("stride", _numbers(rng, D, 1, 3)),
            ("padding", _numbers(rng, D, 0, 2)),
            ("dilation", _numbers(rng, D, 1, 2)),
        ]
        if kind == "Conv" and rng.random() < 0.4:
            settings.append(("padding_mode", rng.choice(["reflect", "replicate", "circular"])))
    lead = len(shape) - D - 1
    weight_axes = D + 2 + (lead if rng.random() < 0.5 else 0)
    return GridCase(
        "Linear" if kind == "Linear" else f"{kind}{D}d",
        args,
        shape,
        _place(rng, x, len(shape)),
        rng.choice([None, _place(rng, y, len(shape)), _place(rng, y, len(shape))]),
        _place(rng, w, weight_axes) if rng.random() < 0.9 else None,
        tuple(settings),
        rng.randrange(1000),
        frozen := rng.choice([(), (), (), ("input",), ("weight",), ("input", "bias")]),
        second="input" not in frozen and rng.random() < 0.4,
    )


def _place(rng: Random, ranks: tuple[int, ...], ndim: int) -> Place:
    """The workers, or the first of them, on a random grid."""
    grid = [1] * ndim
    left = len(ranks)
    for dim in rng.sample(range(ndim), ndim):
        grid[dim] = rng.choice([size for size in (1, 2, 3, 4) if size <= left])
        left //= grid[dim]
    return Place(ranks[: prod(grid)], tuple(grid))


def random_grid_cases(kind: str, count: int, seed: int) -> list[GridCase]:
    """Cases that torch accepts; `count` is for `repeats`."""
    rng = Random(seed)
    cases: list[GridCase] = []
    while len(cases) < repeats(count):
        case = random_grid_case(rng, kind)
        if is_accepted(case):  # type: ignore[arg-type]
            cases.append(case)
    return cases


def parts_of(length: int, parts: int) -> list[range]:
    """Balanced parts of a dimension: the first ones are longer."""
    lengths = [length // parts + (k < length % parts) for k in range(parts)]
    return consecutive(lengths)


def consecutive(lengths: Sequence[int]) -> list[range]:
    stops = list(accumulate(lengths))
    return [range(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)]


def read_by(
    length: int, kernel: int, stride: int, padding: int, dilation: int, outputs: int
) -> list[set[int]]:
    """The inputs that each output reads, found by sliding a window over a tensor of indices."""
    span = dilation * (kernel - 1) + 1
    enough = max(0, (outputs - 1) * stride + span - length - padding)
    indices = F.pad(torch.arange(length), (padding, enough), value=-1)
    windows = indices.unfold(0, span, stride)[:outputs, ::dilation]
    return [set(window.tolist()) - {-1} for window in windows]


def halo(case: Case, outputs: Shape) -> dict[tuple[int, int], int]:
    """How many values worker b must get from worker a, for windows that leave no gaps."""
    D = int(case.name[-2])
    kernel = case.args[-1]
    settings = {"stride": 1, "padding": 0, "dilation": 1, **dict(case.settings)}
    lead = len(case.shape) - D
    wanted, stored = [], []
    for dim, (length, parts) in enumerate(zip(case.shape, case.grid, strict=True)):
        own = parts_of(length, parts)
        if case.lengths is not None:
            own = consecutive(case.lengths[dim])
        stored.append([set(each) for each in own])
        mine = parts_of(outputs[dim], parts)
        if dim < lead:
            reads_all = "Conv" in case.name and dim == lead - 1
            wanted.append([set(range(length)) if reads_all else set(each) for each in mine])
            continue
        chosen = (kernel, settings["stride"], settings["padding"], settings["dilation"])
        numbers = [each if isinstance(each, int) else each[dim - lead] for each in chosen]
        reads = read_by(length, *numbers, outputs[dim])
        wanted.append([set().union(*(reads[i] for i in each)) for each in mine])
    places = list(product(*(range(size) for size in case.grid)))
    lacks = {}
    for a, place_a in enumerate(places):
        for b, place_b in enumerate(places):
            common = [
                len(has[i] & wants[j])
                for has, wants, i, j in zip(stored, wanted, place_a, place_b, strict=True)
            ]
            empty = any(not wants[j] for wants, j in zip(wanted, place_b, strict=True))
            if a != b and prod(common) and not empty:
                lacks[a, b] = prod(common)
    return lacks


@dataclass(frozen=True)
class Sent:
    """What a worker sends: messages and bytes, forward and, for the input's gradient, back."""

    forward: tuple[int, int]
    backward: tuple[int, int]


def measure(case: Case, needs_grad: bool = True) -> Sent:
    """What this worker sends in a pass through a layer whose parameters need no gradient."""
    layer = case.layer().requires_grad_(False)
    layout = case.layout()
    x = layout.local_part(values(case.shape, 0)).clone().requires_grad_(needs_grad)
    layer(x)  # the first call makes groups
    with count_traffic() as forward:
        y = layer(x)
    with count_traffic() as backward:
        if y.requires_grad:
            y.sum().backward()
    return Sent((forward.messages, forward.bytes_sent), (backward.messages, backward.bytes_sent))


def expected_traffic(case: Case) -> list[Sent]:
    """The least that each worker can send; the gradients go the way back."""
    with torch.no_grad():
        outputs = case.torch_layer()(torch.zeros(case.shape, dtype=torch.float64)).shape
    lacks = halo(case, tuple(outputs))
    result = []
    for worker in range(case.workers):
        gives = [count for (a, _), count in lacks.items() if a == worker]
        takes = [count for (_, b), count in lacks.items() if b == worker]
        result.append(Sent((len(gives), WIDTH * sum(gives)), (len(takes), WIDTH * sum(takes))))
    return result


def raised(make: Callable[[], Any]) -> tuple[type[BaseException], str] | None:
    """What a call raises, if anything."""
    try:
        make()
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
        return type(error), str(error)
    return None
