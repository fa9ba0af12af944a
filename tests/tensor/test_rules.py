"""Torch functions in the code of a converted model: right, or refused by name on every worker.

Tests `tensor/table.py`, `tensor/gathering.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import tessel
from parity import close, values, vjps
from tessel import Layout
from tessel.nn.convert import outside
from tessel.tensor.table import tensors

Shape = tuple[int, ...]
Function = Callable[["Body", Tensor], Any]

EVEN, ODD = (4, 4, 8, 6), (3, 5, 7, 9)


@dataclass(frozen=True)
class Place:
    """A grid, a global shape, and the lengths of the parts if they are not balanced."""

    grid: Shape
    shape: Shape
    lengths: tuple[Shape, ...] | None = None

    def layout(self) -> Layout:
        row = tessel.world().create_partition_inclusive(range(prod(self.grid)))
        partition = row.create_cartesian_topology_partition(self.grid)
        if self.lengths is None:
            return Layout.balanced(partition, self.shape)
        return Layout.from_lengths(partition, self.lengths)


PLACES = (
    Place((1, 1, 2, 2), EVEN),
    Place((2, 2, 1, 1), EVEN),
    Place((1, 1, 4, 1), ODD),
    Place((2, 1, 1, 2), ODD),
    Place((1, 2, 2, 1), ODD),
    Place((1, 1, 2, 2), ODD, ((3,), (5,), (1, 6), (6, 3))),
    Place((2, 1, 2, 1), EVEN, ((1, 3), (4,), (8, 0), (6,))),
    Place((4, 1, 1, 1), ODD),
)


@dataclass(frozen=True)
class Rule:
    """What a forward does, and where it may raise: else, and otherwise too, it is right."""

    does: Function
    whole: Shape = ()  # dimensions that must be whole, or it may raise
    only_even: bool = False
    never: bool = False  # it may raise for any tensor that is split


class Body(nn.Module):
    """A model whose forward is a function, with parameters and layers of all kinds."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        _, channels, height, width = shape
        self.does: Function = lambda m, x: x
        self.number = nn.Parameter(values((), 1))
        self.channel = nn.Parameter(values((channels, 1, 1), 2))
        self.channels = nn.Parameter(values((channels,), 3))
        self.image = nn.Parameter(values((1, channels, height, width), 4))
        self.row = nn.Parameter(values((width,), 5))
        self.matrix = nn.Parameter(values((5, width), 6))
        self.register_buffer("offset", values((channels, 1, 1), 7))
        self.conv = nn.Conv2d(channels, channels, 3, padding=1).double()
        self.pointwise = nn.Conv2d(channels, channels, 1).double()
        self.shrink = nn.Conv2d(channels, channels, 3, stride=2, padding=1).double()
        self.linear = nn.Linear(width, 5).double()
        self.squeeze = nn.Linear(channels, channels).double()
        self.norm = nn.BatchNorm2d(channels).double()
        self.layouts: list[Layout | None] = []

    def forward(self, x: Tensor) -> Any:
        y = self.does(self, x)
        self.layouts = [
            each.layout if isinstance(each, tessel.Tensor) else None for each in tensors(y)
        ]
        return y


def bodies(place: Place) -> tuple[Body, Body]:
    """A model as it is, and converted."""
    torch.default_generator.manual_seed(0)
    alone = Body(place.shape)
    torch.default_generator.manual_seed(0)
    return alone, tessel.nn.distribute_module(
        Body(place.shape), place.layout().partition, fallback="raise"
    )


def check(case: Rule, layout: Layout, alone: Body, spread: Body) -> None:
    """One rule on one grid: equal to torch in one process, or the same error on all."""
    alone.does = spread.does = case.does
    x = values(layout.shape, 3)
    whole, part = x.clone().requires_grad_(), layout.local_part(x).clone().requires_grad_()
    split = {dim for dim, cut in enumerate(layout.cuts) if len(cut.intervals) > 1}
    may_raise = split & set(case.whole) or (case.never and split)
    try:
        got = spread(part)
    except (NotImplementedError, ValueError) as error:
        said = layout.partition.group.share_objects(str(error))
        assert may_raise, f"raised {error}"
        assert "in a converted model" in str(error) or "x.full()" in str(error), f"says {error}"
        assert len(set(said)) == 1, f"workers say different things: {said}"
        return
    expected = alone(whole)
    if isinstance(expected, torch.Size | int | float | bool | str | torch.dtype):
        assert got == expected, f"{got} is not {expected}"
        return
    wrong = compare(alone, spread, (whole, part), (expected, got), layout)
    assert not wrong, ", ".join(wrong)


def compare(alone: Body, spread: Body, inputs: Any, outputs: Any, layout: Layout) -> list[str]:
    """What is wrong with the outputs, by the layouts that the model wrote down, and gradients."""
    expected, got = (list(tensors(each)) for each in outputs)
    assert len(expected) == len(got) == len(spread.layouts)
    wrong, losses = [], []
    for k, (a, b, held) in enumerate(zip(expected, got, spread.layouts, strict=True)):
        where = outside(held) if held else Layout.whole(layout.partition, a.shape, shared=True)
        wrong += difference(f"output {k}", b, where.local_part(a))
        weights = values(a.shape, 99 + k).to(a.dtype)
        if a.requires_grad:
            losses.append((a, weights, b, where.local_part(weights)))
    if losses:
        wanted = [inputs[0], *alone.parameters()], [inputs[1], *spread.parameters()]
        one = summed([vjps(a, w, wanted[0], 1) for a, w, _, _ in losses])
        many = summed([vjps(b, w, wanted[1], 1) for _, _, b, w in losses])
        names = ["input", *(name for name, _ in alone.named_parameters())]
        for name, a, b in zip(names, one, many, strict=True):
            a = layout.local_part(a) if name == "input" else a
            wrong += difference(f"gradient of the {name}", b.detach(), a.detach())
    return wrong


def difference(what: str, got: Tensor, expected: Tensor) -> list[str]:
    """What is different, in words; all workers must go on, to the same exchanges."""
    try:
        assert got.dtype == expected.dtype, f"{what}: {got.dtype} is not {expected.dtype}"
        assert got.requires_grad == expected.requires_grad, f"{what}: only one needs a gradient"
        assert got.shape == expected.shape, f"{what}: {got.shape} is not {expected.shape}"
        close(what, got, expected)
    except AssertionError as error:
        return [str(error)]
    return []


def summed(lists: list[list[Tensor]]) -> list[Tensor]:
    return [sum(each) for each in zip(*lists, strict=True)]


def check_all(names: Sequence[str]) -> int:
    """All rules of these names, each on two grids of eight; how many checks there were.

    Torch's functions are on all of them, and on more, in `test_spread.py` and `test_support.py`.
    """
    wrong: dict[str, str] = {}
    count = 0
    for turn, place in enumerate(PLACES):
        layout, pair = place.layout(), bodies(place)
        for number, name in enumerate(names):
            only_even = RULES[name].only_even
            if place.shape != EVEN if only_even else (number + turn) % 4:
                continue
            count += 1
            try:
                check(RULES[name], layout, *pair)
            except Exception as error:  # all of them are reported
                wrong.setdefault(name, f"{name} on {place}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong.values())
    return count


def gate(m: Body, x: Tensor) -> Tensor:
    """Squeeze and excitation."""
    weights = torch.sigmoid(m.squeeze(x.mean((2, 3))))
    return x * weights[:, :, None, None]


def gate_by_pool(m: Body, x: Tensor) -> Tensor:
    weights = torch.sigmoid(m.pointwise(F.adaptive_avg_pool2d(x, 1)))
    return m.conv(x) * weights


def in_place(m: Body, x: Tensor) -> Tensor:
    y = m.conv(x)
    y += x
    y.mul_(2.0).add_(m.channel)
    return F.relu_(y)


def changed_part(m: Body, x: Tensor) -> Tensor:
    base = x.detach() * 1
    base.flatten(1).detach().split(2, 1)[0].zero_()
    return x + base


def normalized(m: Body, x: Tensor) -> Tensor:
    """A batch norm by hand."""
    mean = x.mean(dim=(0, 2, 3), keepdim=True)
    variance = (x - mean).square().mean(dim=(0, 2, 3), keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-3) * m.channel + m.offset


ARITHMETIC = {
    "scalars": Rule(lambda m, x: (2 * x + 1 - x / 3) * 0.5 - (1 - x)),
    "scalar powers": Rule(lambda m, x: x**2 + 2**x - (-x)),
    "reciprocal": Rule(lambda m, x: 1.0 / (2 + x * x)),
    "floor division": Rule(lambda m, x: x.detach() // 0.5),
    "scalar floor division": Rule(lambda m, x: 3 // (2 + x.detach() ** 2)),
    "remainder": Rule(lambda m, x: x % 0.7),
    "parameter without dimensions": Rule(lambda m, x: m.number * x),
    "function of a parameter without dimensions": Rule(lambda m, x: x + torch.exp(m.number)),
    "parameter of one dimension": Rule(lambda m, x: x * m.row),
    "parameter of channels": Rule(lambda m, x: x * m.channel + m.offset),
    "parameter of channels by view": Rule(lambda m, x: x + m.channels.view(1, -1, 1, 1)),
    "parameter of an image": Rule(lambda m, x: m.image - x),
    "parameters multiplied first": Rule(lambda m, x: x * (m.image * m.channel)),
    "addcmul": Rule(lambda m, x: torch.addcmul(x, m.channel, m.image, value=0.5)),
    "lerp": Rule(lambda m, x: torch.lerp(x, m.conv(x), 0.3)),
    "lerp by parameter": Rule(lambda m, x: torch.lerp(x, m.conv(x), m.number)),
    "two branches": Rule(lambda m, x: x + m.conv(x)),
    "two branches turned round": Rule(lambda m, x: m.conv(x) - x),
    "a branch twice": Rule(lambda m, x: (lambda y: y * y + y)(m.conv(x))),
    "gate": Rule(gate),
    "gate by pool": Rule(gate_by_pool),
    "batch norm by hand": Rule(normalized),
    "minus its mean": Rule(lambda m, x: x - x.mean()),
    "divided by a sum": Rule(lambda m, x: x / (1 + x.square().sum(1, keepdim=True))),
    "times a mean of rows": Rule(lambda m, x: x * x.mean(3, keepdim=True) * x.mean(2).mean()),
    "mean without keepdim": Rule(lambda m, x: x + x.mean((0, 1))),
    "two means": Rule(lambda m, x: x.mean((2, 3)) * x.sum((2, 3))),
    "in place": Rule(in_place),
    "in-place activation": Rule(lambda m, x: F.relu(m.conv(x), inplace=True) + x),
    "in-place of two branches": Rule(
        lambda m, x: (m.shrink(x) * 2).add_(m.shrink(x)).mul_(m.number)
    ),
    "fill": Rule(lambda m, x: m.conv(x).detach().zero_() + x),
    "comparison": Rule(lambda m, x: x > 0),
    "comparison of branches": Rule(lambda m, x: x >= m.conv(x)),
    "comparison with a parameter": Rule(lambda m, x: (x < m.channel) | (x > m.image)),
    "logic": Rule(lambda m, x: ~((x > 0) & (x < 1)) ^ (x == 0)),
    "where": Rule(lambda m, x: torch.where(x > 0, x, 0.1 * m.conv(x))),
    "where with numbers": Rule(lambda m, x: torch.where(x > 0, 1.0, x)),
    "where with a parameter": Rule(lambda m, x: torch.where(x > 0, m.channel, m.image)),
    "where method": Rule(lambda m, x: m.conv(x).where(x > 0, m.number)),
    "masked fill": Rule(lambda m, x: x.masked_fill(m.conv(x) > 0, 0.5)),
    "maximum": Rule(lambda m, x: torch.maximum(x, m.conv(x)) + torch.max(x, m.image)),
    "minimum": Rule(lambda m, x: torch.minimum(x, m.channel) + torch.min(x, m.conv(x))),
    "clamp": Rule(lambda m, x: x.clamp(-0.5, 0.5) + torch.clamp(x, min=m.channel)),
    "conversion": Rule(lambda m, x: x.float().double() + x.to(torch.float64) + x.type_as(m.row)),
    "to another tensor": Rule(lambda m, x: (x > 0).to(m.matrix)),
    "clone and detach": Rule(lambda m, x: x.clone().contiguous() - x.detach()),
    "data": Rule(lambda m, x: x + x.data),
    "like": Rule(lambda m, x: x + torch.ones_like(x) + torch.full_like(x, 2) + x.new_zeros(1)),
    "new zeros of a shape": Rule(lambda m, x: x + x.new_zeros(x.shape) + x.new_ones(x.size(-1))),
    "new tensor": Rule(lambda m, x: x + torch.arange(x.shape[3], dtype=x.dtype)),
    "new grid": Rule(
        lambda m, x: x * torch.linspace(0, 1, x.shape[2], dtype=x.dtype).view(-1, 1) ** m.number
    ),
    "new operand first": Rule(lambda m, x: torch.ones(x.shape, dtype=x.dtype) * x),
    "activations": Rule(
        lambda m, x: F.gelu(x) + F.silu(x) + F.elu(x) + F.mish(x) + F.softplus(x) + x.tanh()
    ),
    "more activations": Rule(
        lambda m, x: F.leaky_relu(x) + F.hardswish(x) + F.hardtanh(x) + F.relu6(x) + F.selu(x)
    ),
    "yet more activations": Rule(
        lambda m, x: F.logsigmoid(x) + F.softsign(x) + F.tanhshrink(x) + F.softshrink(x)
    ),
    "celu, threshold, hardsigmoid": Rule(
        lambda m, x: F.celu(x) + F.threshold(x, 0.1, 0.2) + F.hardsigmoid(x) + F.hardshrink(x)
    ),
    "prelu of one": Rule(lambda m, x: F.prelu(x, m.number.view(1))),
    "prelu of channels": Rule(lambda m, x: F.prelu(x, m.channels)),
    "nan_to_num": Rule(lambda m, x: torch.nan_to_num(x.log())),
    "complex": Rule(lambda m, x: torch.view_as_real(torch.complex(x, x))),
    "addition of a larger parameter": Rule(
        lambda m, x: x + m.image.unsqueeze(0).expand(2, 1, *m.image.shape[1:]), never=True
    ),
    "outer sum": Rule(lambda m, x: x.mean((2, 3), keepdim=True) + x.mean((0, 1)), never=True),
    "power of two tensors": Rule(lambda m, x: (x * x + 1) ** m.conv(x)),
    "hypot and atan2": Rule(lambda m, x: torch.hypot(x, m.conv(x)) + torch.atan2(x, m.image)),
    "addition with alpha": Rule(lambda m, x: torch.add(x, m.conv(x), alpha=2)),
    "sub method": Rule(lambda m, x: x.sub(m.channel, alpha=3)),
    "rsub": Rule(lambda m, x: torch.rsub(x, m.channel)),
    "prelu by keyword": Rule(lambda m, x: F.prelu(x, weight=m.channels)),
    "clamp by a result": Rule(lambda m, x: x.clamp(min=x.mean(1, keepdim=True), max=m.channel)),
    "dropout by a tensor": Rule(
        lambda m, x: x + m.conv(x).detach().bernoulli_((m.channel.detach() > 0).double())
    ),
    "in place of a parameter": Rule(lambda m, x: m.image.detach().clone().add_(x[:1]), never=True),
    "in place of new values": Rule(
        lambda m, x: x * torch.zeros(3, dtype=x.dtype).add_(x.sum((0, 1, 2, 3))).mean()
    ),
    "product of shared and split": Rule(lambda m, x: x.mean((2, 3)).mean(1).view(-1, 1, 1, 1) * x),
    "transposed and added": Rule(lambda m, x: x.mean((0, 1)).T.sum(1) + x),
    "half and back": Rule(lambda m, x: (x.detach() * 4).round().half().double() + x),
    "mixed types": Rule(lambda m, x: x.detach().round().float() + m.number.detach() + (x > 0)),
    "keyword operands": Rule(lambda m, x: torch.add(input=x, other=m.channel)),
}

SHAPES = {
    "flatten": Rule(lambda m, x: x.flatten(1) * 2),
    "flatten all": Rule(lambda m, x: torch.flatten(x)),
    "flatten space": Rule(lambda m, x: x.flatten(2)),
    "flatten batch": Rule(lambda m, x: x.flatten(0, 1)),
    "flatten by keywords": Rule(lambda m, x: torch.flatten(x, start_dim=2, end_dim=-1)),
    "view by shape": Rule(lambda m, x: x.view(x.shape[0], -1)),
    "view by size": Rule(lambda m, x: x.view(x.size(0), x.size(1), -1)),
    "view of heads": Rule(lambda m, x: x.view(x.size(0), 2, -1, *x.shape[2:]), only_even=True),
    "view with ones": Rule(lambda m, x: x.view(x.shape[0], 1, x.shape[1], 1, *x.shape[2:])),
    "view by tuple": Rule(lambda m, x: x.view((-1, x.shape[-1]))),
    "reshape there and back": Rule(lambda m, x: x.reshape(x.shape[0], -1).reshape(x.shape) + x),
    "reshape of patches": Rule(
        lambda m, x: x.reshape(*x.shape[:2], 4, 2, 3, 2).permute(0, 1, 2, 4, 3, 5), only_even=True
    ),
    "reshape_as": Rule(lambda m, x: x.flatten(2).reshape_as(x)),
    "view_as": Rule(lambda m, x: x.flatten(1).view_as(x) * x),
    "unflatten": Rule(lambda m, x: x.unflatten(1, (2, -1)), only_even=True),
    "unflatten by function": Rule(lambda m, x: torch.unflatten(x, -1, (3, x.shape[-1] // 3))),
    "squeeze": Rule(lambda m, x: x.mean(1, keepdim=True).squeeze(1)),
    "squeeze of nothing": Rule(lambda m, x: x.squeeze(1) + x.squeeze()),
    "squeeze of many": Rule(lambda m, x: x.mean((2, 3), keepdim=True).squeeze((2, 3))),
    "squeeze of all": Rule(lambda m, x: x.mean((1, 2), keepdim=True).squeeze()),
    "unsqueeze": Rule(lambda m, x: x.unsqueeze(1) * 2 + x.unsqueeze(-4)),
    "unsqueeze last": Rule(lambda m, x: x.unsqueeze(-1).squeeze(-1) + x),
    "squeeze in place": Rule(lambda m, x: x.clone().unsqueeze_(0), never=True),
    "permute": Rule(lambda m, x: x.permute(0, 2, 3, 1)),
    "permute by tuple": Rule(lambda m, x: torch.permute(x, (3, 1, 0, 2)) * 2),
    "channels last norm": Rule(
        lambda m, x: (x.permute(0, 2, 3, 1) * m.channels).permute(0, 3, 1, 2)
    ),
    "transpose": Rule(lambda m, x: x.transpose(1, 2)),
    "transpose of negative dims": Rule(lambda m, x: torch.transpose(x, -1, -3).contiguous()),
    "movedim": Rule(lambda m, x: x.movedim(1, -1) + torch.moveaxis(x, (1,), (3,))),
    "swapaxes": Rule(lambda m, x: x.swapaxes(2, 3) - x.swapdims(3, 2)),
    "matrix transposes": Rule(lambda m, x: x.mT * 2 + x.mH),
    "permuted and added": Rule(lambda m, x: x + x.permute(0, 1, 3, 2).permute(0, 1, 3, 2)),
    "tokens": Rule(lambda m, x: x.flatten(2).transpose(1, 2)),
    "tokens and back": Rule(
        lambda m, x: x.flatten(2).transpose(1, 2).transpose(1, 2).unflatten(2, x.shape[2:]) + x
    ),
    "cat of channels": Rule(lambda m, x: torch.cat([x, m.conv(x), x], dim=1)),
    "cat of batch": Rule(lambda m, x: torch.cat((m.conv(x), x))),
    "cat of rows": Rule(lambda m, x: torch.cat([x, m.conv(x)[:, :, :3]], 2)),
    "cat of columns": Rule(lambda m, x: torch.cat([m.conv(x), x[..., 1:]], dim=-1)),
    "cat by keywords": Rule(lambda m, x: torch.cat(tensors=[x, x], dim=1)),
    "concat": Rule(lambda m, x: torch.concat([x, x], -1) + torch.concatenate([x, x], axis=-1)),
    "cat of shared": Rule(lambda m, x: torch.cat([x.mean((2, 3)), x.sum((2, 3))], 1)),
    "cat of shared and split": Rule(
        lambda m, x: torch.cat([x, x.mean((2, 3), keepdim=True).expand_as(x)], 1)
    ),
    "cat of types": Rule(lambda m, x: torch.cat([x.detach().round().float(), x], 2)),
    "cat of one": Rule(lambda m, x: torch.cat([x], 3) + x),
    "cat of whole and split": Rule(
        lambda m, x: torch.cat([x.flatten(1).view(x.shape), m.conv(x)], 3)
    ),
    "cat of split and whole": Rule(
        lambda m, x: torch.cat([m.conv(x), x.flatten(1).view(x.shape)], 1)
    ),
    "cat with zeros": Rule(lambda m, x: torch.cat([x, x.new_zeros(x.shape)], 1)),
    "cat with a parameter first": Rule(lambda m, x: torch.cat([m.image.expand(x.shape), x], 1)),
    "stack": Rule(lambda m, x: torch.stack([x, m.conv(x)], 1)),
    "stack at the end": Rule(lambda m, x: torch.stack([x, 2 * x], dim=-1).sum(-1)),
    "select": Rule(lambda m, x: x.select(1, -1)),
    "narrow split": Rule(lambda m, x: x.narrow(-1, -3, 2)),
    "expand a gate": Rule(lambda m, x: x * F.adaptive_avg_pool2d(x, 1).expand_as(x)),
    "expand a shared gate": Rule(lambda m, x: x * x.mean((2, 3), keepdim=True).expand(x.shape)),
    "slice of channels": Rule(lambda m, x: x[:, 1:3] * 2),
    "slice of batch": Rule(lambda m, x: x[1:]),
    "slice of rows": Rule(lambda m, x: x[:, :, 1:-1]),
    "slice of columns": Rule(lambda m, x: x[..., 2:]),
    "slice of all": Rule(lambda m, x: x[:-1, :-1, :-1, :-1]),
    "slices of both sides": Rule(lambda m, x: x[:, :, 1:] - x[:, :, :-1]),
    "slice beyond the end": Rule(lambda m, x: x[:, :, -100:100]),
    "empty slice": Rule(lambda m, x: x[:, :, 3:3]),
    "slice that is everything": Rule(lambda m, x: x[:, :, :] + x[...] + x[:]),
    "new dimensions": Rule(lambda m, x: x[:, None] + x[:, None, :, :]),
    "last of channels": Rule(lambda m, x: x[:, -1]),
    "first of batch": Rule(lambda m, x: x[0]),
    "one column": Rule(lambda m, x: x[..., 1] * 2),
    "every other channel": Rule(lambda m, x: x[:, ::2]),
    "every other row": Rule(lambda m, x: x[:, :, 1::2]),
    "number and slice": Rule(lambda m, x: x[:, 1, 1:]),
    "chunks": Rule(lambda m, x: x.chunk(2, 1)),
    "chunks multiplied": Rule(
        lambda m, x: (lambda a, b: a * b.sigmoid())(*x.chunk(2, dim=-1)),
        only_even=True,
    ),
    "chunks of batch": Rule(lambda m, x: torch.chunk(x, 2)),
    "split": Rule(lambda m, x: torch.split(x, 2, dim=1)),
    "split into sizes": Rule(lambda m, x: x.split([1, x.shape[2] - 1], 2)),
    "tensor_split": Rule(lambda m, x: torch.tensor_split(x, 3, 1)),
    "unbind": Rule(lambda m, x: x.unbind(1)),
    "unbind by keyword": Rule(lambda m, x: torch.unbind(x, dim=-1)),
    "pad with zeros": Rule(lambda m, x: F.pad(x, (1, 2, 3, 0))),
    "pad with negative widths": Rule(lambda m, x: F.pad(x, (-1, -2, 1, -1))),
    "pad both ways": Rule(lambda m, x: F.pad(x, (-1, 1, 2, -2))),
    "pad of channels": Rule(lambda m, x: F.pad(x, (0, 0, 0, 0, 1, 2))),
    "pad that does nothing": Rule(lambda m, x: F.pad(x, (0, 0, 0, 0)) + x),
    "pad with a value": Rule(lambda m, x: F.pad(x, (1, 1), value=2.5)),
    "pad by reflection": Rule(lambda m, x: F.pad(x, (1, 1, 2, 1), "reflect")),
    "pad by reflection of columns": Rule(lambda m, x: F.pad(x, (1, 1, 0, 0), mode="reflect")),
    "pad by replication": Rule(lambda m, x: F.pad(x, (2, 1, 1, 1), "replicate")),
    "pad in a circle": Rule(lambda m, x: F.pad(x, (1, 0, 0, 2), "circular")),
    "pixel shuffle": Rule(lambda m, x: F.pixel_shuffle(x, 2), only_even=True),
    "pixel unshuffle": Rule(lambda m, x: F.pixel_unshuffle(x, 2), only_even=True),
    "channel shuffle": Rule(
        lambda m, x: x.view(x.size(0), 2, -1, *x.shape[2:]).transpose(1, 2).reshape(x.shape),
        only_even=True,
    ),
    "expand": Rule(lambda m, x: x.mean(1, keepdim=True).expand(-1, 3, -1, -1)),
    "repeat": Rule(lambda m, x: x.repeat(1, 2, 1, 1)),
    "view of another type": Rule(lambda m, x: x.detach().view(torch.int64), never=True),
}

REDUCTIONS = {
    **{
        f"{name} over {dims}{' kept' * keep}": Rule(
            lambda m, x, name=name, dims=dims, keep=keep: getattr(torch, name)(
                x, dim=dims, keepdim=keep
            )
        )
        for name in ("sum", "mean")
        for dims in (0, 1, -1, (2, 3), (0, 2, 3), (0, 1, 2, 3), [1, 2])
        for keep in (False, True)
    },
    "sum of all": Rule(lambda m, x: x.sum()),
    "mean of all": Rule(lambda m, x: m.conv(x).mean()),
    "sum kept by numpy's name": Rule(lambda m, x: x.sum(axis=(1, 2), keepdims=True)),
    "softmax by numpy's name": Rule(lambda m, x: x.softmax(axis=1), whole=(1,)),
    "sum by position": Rule(lambda m, x: x.sum((1, 3), True) + torch.mean(x, (1, 3), True)),
    "mean over an axis": Rule(lambda m, x: x.mean(axis=2)),
    "sum to another type": Rule(lambda m, x: (x > 0).double().sum(2, dtype=torch.float32)),
    "mean of another type": Rule(lambda m, x: (x > 0).mean((2, 3), dtype=torch.float64)),
    "count": Rule(lambda m, x: (x > 0).sum()),
    "sum of a sum": Rule(lambda m, x: x.sum(2).sum(1).sum()),
    "mean of a mean": Rule(lambda m, x: x.mean(3).mean(2).mean(0)),
    "softmax": Rule(lambda m, x: x.softmax(1), whole=(1,)),
    "softmax of columns": Rule(lambda m, x: torch.softmax(x, dim=-1), whole=(3,)),
    "softmax of tokens": Rule(lambda m, x: F.softmax(x.flatten(2), dim=-1)),
    "log softmax": Rule(lambda m, x: F.log_softmax(x, dim=1), whole=(1,)),
    "softmin": Rule(lambda m, x: F.softmin(x, 2), whole=(2,)),
    "softmax without dimension": Rule(lambda m, x: F.softmax(x, _stacklevel=5), whole=(0, 1, 2, 3)),
    "softmax by hand": Rule(lambda m, x: x.exp() / x.exp().sum(1, keepdim=True)),
    "cumsum": Rule(lambda m, x: x.cumsum(2), whole=(2,)),
    "cumprod": Rule(lambda m, x: torch.cumprod(x, dim=-1), whole=(3,)),
    "cummax": Rule(lambda m, x: torch.cummax(x, 1)[0], never=True),
    "flip": Rule(lambda m, x: x.flip(3), whole=(3,)),
    "flip of two": Rule(lambda m, x: torch.flip(x, (1, 2)), whole=(1, 2)),
    "flip by many arguments": Rule(lambda m, x: x.flip(1, 2), whole=(1, 2)),
    "roll": Rule(lambda m, x: torch.roll(x, 1, 2), whole=(2,)),
    "roll of two": Rule(lambda m, x: x.roll((1, 2), (1, 3)), whole=(1, 3)),
    "roll of all": Rule(lambda m, x: x.roll(1), whole=(0, 1, 2, 3)),
    "sort": Rule(lambda m, x: x.sort(1)[0], whole=(1,)),
    "sort of the last": Rule(lambda m, x: torch.sort(x)[0], whole=(3,)),
    "stable sort": Rule(lambda m, x: torch.sort(x, stable=True, dim=2)[0], whole=(2,)),
    "sort downwards": Rule(lambda m, x: x.sort(1, True), whole=(1,)),
    "argsort": Rule(lambda m, x: x.argsort(dim=2), whole=(2,)),
    "topk": Rule(lambda m, x: x.topk(2, 1)[0], never=True),
    "normalize": Rule(lambda m, x: F.normalize(x), whole=(1,)),
    "normalize over columns": Rule(lambda m, x: F.normalize(x, 2.0, -1), whole=(3,)),
    "normalize by keyword": Rule(lambda m, x: F.normalize(x, p=1, dim=2), whole=(2,)),
    "glu": Rule(lambda m, x: F.glu(x, 1), whole=(1,), only_even=True),
    "glu of columns": Rule(lambda m, x: F.glu(x), whole=(3,), only_even=True),
    "amax": Rule(lambda m, x: x.amax((2, 3)), whole=(2, 3)),
    "amin kept": Rule(lambda m, x: torch.amin(x, 1, keepdim=True), whole=(1,)),
    "max along a dimension": Rule(lambda m, x: x.max(1)[0] + x.max(dim=1).values, whole=(1,)),
    "min along a dimension": Rule(lambda m, x: x.min(-1, keepdim=True)[0], whole=(3,)),
    "max of all": Rule(lambda m, x: x.max(), whole=(0, 1, 2, 3)),
    "argmax": Rule(lambda m, x: x.argmax(1), whole=(1,)),
    "argmax of all": Rule(lambda m, x: x.argmax(), whole=(0, 1, 2, 3)),
    "argmax kept": Rule(lambda m, x: torch.argmin(x, 2, True), whole=(2,)),
    "logsumexp": Rule(lambda m, x: x.logsumexp((1, 2)), whole=(1, 2)),
    "variance": Rule(lambda m, x: x.var((2, 3)), whole=(2, 3)),
    "variance kept": Rule(lambda m, x: x.var(1, keepdim=True, unbiased=False), whole=(1,)),
    "variance of all, biased": Rule(lambda m, x: x.var(False), whole=(0, 1, 2, 3)),
    "variance by keyword": Rule(lambda m, x: x.var(unbiased=False), whole=(0, 1, 2, 3)),
    "standard deviation": Rule(lambda m, x: torch.std(x, 1, correction=0), whole=(1,)),
    "standard deviation of all": Rule(lambda m, x: torch.std(x, True), whole=(0, 1, 2, 3)),
    "variance and mean": Rule(lambda m, x: torch.var_mean(x, (1,), keepdim=True), whole=(1,)),
    "product": Rule(lambda m, x: x.prod(1), whole=(1,)),
    "norm along a dimension": Rule(lambda m, x: x.norm(dim=1), whole=(1,)),
    "norm by position": Rule(lambda m, x: x.norm(2, 1, True), whole=(1,)),
    "norm of all": Rule(lambda m, x: x.norm(), whole=(0, 1, 2, 3)),
    "norm of order one": Rule(lambda m, x: torch.norm(x, p=1, dim=(2, 3)), whole=(2, 3)),
    "all": Rule(lambda m, x: (x > -9).all(1), whole=(1,)),
    "any of all": Rule(lambda m, x: (x > 2).any(), whole=(0, 1, 2, 3)),
    "median": Rule(lambda m, x: x.median(1)[0], whole=(1,)),
    "count_nonzero": Rule(lambda m, x: (x > 0).count_nonzero(1), whole=(1,)),
    "aminmax": Rule(lambda m, x: torch.aminmax(x.detach(), dim=1), whole=(1,)),
    "reduction of what is shared": Rule(
        lambda m, x: x.mean((2, 3)).softmax(1).amax(1) + x.mean((1, 2, 3)), whole=(1,)
    ),
    "statistics of what is shared": Rule(
        lambda m, x: (lambda y: (y.std(), y.max(), y.norm(), y.flip(0)))(x.mean((0, 2, 3))),
        whole=(1,),
    ),
    "nanmean": Rule(lambda m, x: x.nanmean(1), never=True),
    "nansum": Rule(lambda m, x: x.nansum(), never=True),
    "special softmax": Rule(lambda m, x: torch.special.softmax(x, 1), never=True),
    "linalg norm": Rule(lambda m, x: torch.linalg.norm(x, dim=1), never=True),
    "vector norm": Rule(lambda m, x: torch.linalg.vector_norm(x), never=True),
}

LAYERS = {
    "avg_pool2d": Rule(lambda m, x: F.avg_pool2d(x, 2)),
    "avg_pool2d by position": Rule(lambda m, x: F.avg_pool2d(x, 3, 2, 1, True, False)),
    "avg_pool2d with a divisor": Rule(lambda m, x: F.avg_pool2d(x, 3, 1, divisor_override=2)),
    "max_pool2d": Rule(lambda m, x: F.max_pool2d(x, 2)),
    "max_pool2d by position": Rule(lambda m, x: F.max_pool2d(x, 3, 2, 1, 1, True)),
    "max_pool2d by keywords": Rule(
        lambda m, x: F.max_pool2d(x, kernel_size=2, stride=1, dilation=2, ceil_mode=True)
    ),
    "max_pool2d with indices": Rule(lambda m, x: F.max_pool2d(x, 3, 2, 1, return_indices=True)),
    "torch.max_pool2d": Rule(lambda m, x: torch.max_pool2d(x, 2, 2)),
    "pool by keyword input": Rule(lambda m, x: F.avg_pool2d(input=x, kernel_size=2)),
    "lp_pool2d": Rule(lambda m, x: F.lp_pool2d(x.abs() + 1, 2, 2), never=True),
    "adaptive_avg_pool2d": Rule(lambda m, x: F.adaptive_avg_pool2d(x, (3, 2))),
    "adaptive_avg_pool2d to one": Rule(lambda m, x: F.adaptive_avg_pool2d(x, 1).flatten(1)),
    "adaptive_max_pool2d": Rule(lambda m, x: F.adaptive_max_pool2d(x, (2, None))),
    "adaptive_max_pool2d with indices": Rule(
        lambda m, x: F.adaptive_max_pool2d(x, 3, return_indices=True)
    ),
    "interpolate": Rule(lambda m, x: F.interpolate(x, scale_factor=2)),
    "interpolate to a size": Rule(
        lambda m, x: F.interpolate(m.shrink(x), size=x.shape[2:], mode="bilinear") + x
    ),
    "interpolate with corners": Rule(
        lambda m, x: F.interpolate(x, size=(5, 11), mode="bilinear", align_corners=True)
    ),
    "interpolate smoothly": Rule(
        lambda m, x: F.interpolate(x, None, 1.5, "bicubic", False, True),
    ),
    "interpolate with antialias": Rule(
        lambda m, x: F.interpolate(x, size=(4, 4), mode="bilinear", antialias=True), never=True
    ),
    "upsample": Rule(lambda m, x: F.upsample(x, scale_factor=2, mode="nearest")),
    "linear": Rule(lambda m, x: F.linear(x, m.matrix)),
    "linear with bias": Rule(lambda m, x: F.linear(x, m.matrix, bias=m.channels[:1].expand(5))),
    "linear by a result": Rule(lambda m, x: F.linear(x, x.mean((0, 1))), whole=(2, 3)),
    "linear of what is left out": Rule(
        lambda m, x: F.linear(m.matrix, x.mean((0, 1))), whole=(2, 3)
    ),
    "linear layer": Rule(lambda m, x: m.linear(x)),
    "linear of channels": Rule(lambda m, x: m.squeeze(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
    "linear of features": Rule(lambda m, x: m.squeeze(x.mean((2, 3)))),
    "linear of tokens": Rule(lambda m, x: m.squeeze(x.flatten(2).transpose(1, 2))),
    "norm": Rule(lambda m, x: m.norm(x) + x),
    "conv of a slice": Rule(lambda m, x: m.conv(x[:, :, 1:, 2:])),
    "conv of a pad": Rule(lambda m, x: m.conv(F.pad(x, (0, 1, 0, 1)))),
    "conv of a parameter": Rule(lambda m, x: x + m.conv(m.image)),
    "conv of a parameter alone": Rule(lambda m, x: m.conv(m.image.expand(x.shape) * 1)),
    "conv of new values": Rule(lambda m, x: m.conv(torch.ones(x.shape, dtype=x.dtype)) * x),
    "linear of a parameter": Rule(lambda m, x: x * m.squeeze(m.channels).view(-1, 1, 1)),
    "dropout in evaluation": Rule(
        lambda m, x: F.dropout(x, 0.5, False) + F.dropout2d(x, 0.1, False)
    ),
    "dropout of nothing": Rule(lambda m, x: F.dropout(x, 0.0) + F.alpha_dropout(x, 0.0)),
    "batch_norm function": Rule(
        lambda m, x: F.batch_norm(x, None, None, training=True), never=True
    ),
    "layer_norm function": Rule(lambda m, x: F.layer_norm(x, x.shape[3:]), never=True),
    "group_norm function": Rule(lambda m, x: F.group_norm(x, 1), never=True),
    "local_response_norm": Rule(lambda m, x: F.local_response_norm(x, 3), never=True),
    "conv2d function": Rule(lambda m, x: F.conv2d(x, m.conv.weight), never=True),
    "torch.conv2d": Rule(lambda m, x: torch.conv2d(x, m.conv.weight), never=True),
    "conv_transpose2d function": Rule(
        lambda m, x: F.conv_transpose2d(x, m.conv.weight), never=True
    ),
    "unfold": Rule(lambda m, x: F.unfold(x, 2), never=True),
    "grid_sample": Rule(
        lambda m, x: F.grid_sample(x, x.new_zeros(x.shape[0], 2, 2, 2), align_corners=False)
    ),
    "mse_loss": Rule(lambda m, x: F.mse_loss(x, m.conv(x))),
    "cross_entropy": Rule(
        lambda m, x: F.cross_entropy(x, torch.zeros(x.shape[0], *x.shape[2:]).long())
    ),
    "cosine_similarity": Rule(lambda m, x: F.cosine_similarity(x, m.conv(x))),
    "bilinear": Rule(
        lambda m, x: F.bilinear(x, x, m.row.view(1, 1, -1).expand(2, x.shape[3], -1)), never=True
    ),
}

FACTS = {
    "shape": Rule(lambda m, x: x.shape),
    "shape of a part": Rule(lambda m, x: x.shape[2:]),
    "size": Rule(lambda m, x: x.size()),
    "size of a dimension": Rule(lambda m, x: x.size(-1) + x.size(dim=2)),
    "numel": Rule(lambda m, x: x.numel() + x.nelement() + torch.numel(x)),
    "len": Rule(lambda m, x: len(x)),
    "dim": Rule(lambda m, x: x.dim() + x.ndim),
    "dtype": Rule(lambda m, x: x.dtype),
    "shape of a result": Rule(lambda m, x: m.shrink(x).shape + x.mean(1).shape),
    "is_floating_point": Rule(lambda m, x: x.is_floating_point() and torch.is_tensor(x)),
    "nbytes": Rule(lambda m, x: x.nbytes, never=True),
    "stride": Rule(lambda m, x: x.stride(), never=True),
    "type": Rule(lambda m, x: x.type()),
}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad.sum()


def changed_view(m: Body, x: Tensor) -> Tensor:
    y = m.conv(x)
    y[:, :, 1:].zero_()
    return y


def changed_reshape(m: Body, x: Tensor) -> Tensor:
    y = m.conv(x)
    z = y.view(y.shape[0], -1)
    z.mul_(2)
    return y + x


def assigned(m: Body, x: Tensor) -> Tensor:
    y = m.conv(x)
    y[:, 0] = 1.0
    return y


def written_to(m: Body, x: Tensor) -> Tensor:
    y = torch.zeros(x.shape, dtype=x.dtype)
    torch.add(x.detach(), 1, out=y)
    return y + x


REFUSED = {
    "matmul": Rule(lambda m, x: torch.matmul(x, x.transpose(2, 3)), never=True),
    "matmul operator": Rule(lambda m, x: x @ m.matrix.T, never=True),
    "matmul from the left": Rule(lambda m, x: m.image[0, 0].T @ x, never=True),
    "bmm": Rule(lambda m, x: torch.bmm(x[:, 0], x[:, 0].mT), never=True),
    "einsum": Rule(lambda m, x: torch.einsum("bchw,c->bhw", x, m.channels), never=True),
    "tensordot": Rule(lambda m, x: torch.tensordot(x, m.row, 1), never=True),
    "fft": Rule(lambda m, x: torch.fft.rfft2(x).abs()),
    "attention": Rule(lambda m, x: F.scaled_dot_product_attention(x, x, x)),
    "boolean mask": Rule(lambda m, x: x[x > 0], never=True),
    "mask by a new tensor": Rule(lambda m, x: x[:, torch.arange(x.shape[1]) > 0], never=True),
    "list of indices": Rule(lambda m, x: x[:, [0, 1]]),
    "masked_select": Rule(lambda m, x: x.masked_select(x > 0), never=True),
    "gather": Rule(lambda m, x: x.gather(1, (x > 0).long())),
    "index_select": Rule(lambda m, x: x.index_select(1, torch.tensor([0]))),
    "scatter": Rule(lambda m, x: x.scatter(1, (x > 0).long(), 1.0)),
    "narrow": Rule(lambda m, x: x.narrow(2, 0, 2)),
    "change of a part of a copy": Rule(changed_part, whole=(1, 2, 3)),
    "diagonal": Rule(lambda m, x: x.diagonal()),
    "tril": Rule(lambda m, x: x.tril()),
    "assignment": Rule(assigned),
    "change of a slice": Rule(changed_view, whole=(2,)),
    "change of a reshaped tensor": Rule(changed_reshape, whole=(2, 3)),
    "out": Rule(written_to, never=True),
    "item": Rule(lambda m, x: x[0, 0, 0, 0].item(), never=True),
    "item of a sum": Rule(lambda m, x: m.number * x.sum().item() * 0 + x),
    "tolist": Rule(lambda m, x: x.tolist(), never=True),
    "numpy": Rule(lambda m, x: x.detach().numpy(), never=True),
    "truth": Rule(lambda m, x: x if (x > 0).all() else -x, never=True),
    "truth of a mean": Rule(lambda m, x: x if x.mean() > 0 else -x),
    "number of a mean": Rule(lambda m, x: x * float(x.mean()) + int(x.sum() * 9)),
    "iteration": Rule(lambda m, x: sum(each.mean() for each in x)),
    "equal": Rule(lambda m, x: torch.equal(x, x), never=True),
    "allclose": Rule(lambda m, x: torch.allclose(x, x), never=True),
    "nonzero": Rule(lambda m, x: x.nonzero(), never=True),
    "where of one": Rule(lambda m, x: torch.where(x > 0), never=True),
    "unique": Rule(lambda m, x: x.unique(), never=True),
    "histc": Rule(lambda m, x: x.detach().histc(), never=True),
    "quantile": Rule(lambda m, x: x.quantile(0.5), never=True),
    "frexp": Rule(lambda m, x: torch.frexp(x.detach())[0], never=True),
    "cdist": Rule(lambda m, x: torch.cdist(x, m.image)),
    "cross": Rule(lambda m, x: torch.cross(x[:, :3], x[:, :3], 1), never=True),
    "kron": Rule(lambda m, x: torch.kron(x, x), never=True),
    "diff": Rule(lambda m, x: x.diff(dim=1), never=True),
    "renorm": Rule(lambda m, x: x.renorm(2, 1, 1.0), never=True),
    "meshgrid": Rule(lambda m, x: torch.meshgrid(x[0, 0, 0], m.row)),
    "custom function": Rule(lambda m, x: Double.apply(x) + m.channel, never=True),
    "vmap": Rule(lambda m, x: torch.vmap(lambda r: r / r.sum())(x), never=True),
    "gradient inside": Rule(
        lambda m, x: torch.autograd.grad(m.conv(x).sum(), x, create_graph=True)[0], never=True
    ),
    "aten": Rule(lambda m, x: torch.ops.aten.sum.default(x) + x, never=True),
    "aten packet": Rule(lambda m, x: torch.ops.aten.softmax(x, 1), whole=(1,)),
    "resize": Rule(lambda m, x: x.detach().clone().resize_(2), never=True),
    "as_strided": Rule(lambda m, x: x.as_strided((2,), (1,)), never=True),
    "apply to each": Rule(lambda m, x: x.detach().map_(x.detach(), lambda a, b: a), never=True),
    "broadcast_to": Rule(lambda m, x: x[:, :1].broadcast_to(x.shape)),
    "block of rows": Rule(lambda m, x: torch.hstack([x, x])),
    "tile": Rule(lambda m, x: x.tile(2)),
    "take": Rule(lambda m, x: x.take(torch.tensor([0]))),
    "copy into": Rule(lambda m, x: m.conv(x).detach().copy_(x)),
    "tensor of a part": Rule(lambda m, x: torch.tensor(x.detach()), never=True),
    "as_tensor": Rule(lambda m, x: torch.as_tensor(x.detach()), never=True),
    "new_tensor of a part": Rule(lambda m, x: x.new_tensor(x.detach()), never=True),
    "tensor of a list": Rule(lambda m, x: x * torch.tensor([x.mean().item(), 1.0])[0]),
    "from numpy": Rule(lambda m, x: torch.from_numpy(x.detach().numpy()), never=True),
    "prelu by a result": Rule(lambda m, x: F.prelu(x, x.mean((0, 2, 3))), whole=(1,)),
    "conv by a result": Rule(lambda m, x: F.conv2d(m.image, x[:1]), never=True),
    "batched product": Rule(lambda m, x: m.image @ x.mT, never=True),
    "set data": Rule(lambda m, x: setattr(m.conv(x), "data", x) or x, never=True),
    "gumbel": Rule(lambda m, x: F.gumbel_softmax(x, dim=1).sum(1)),
    "randint_like": Rule(lambda m, x: x + torch.randint_like(x, 3, 4)),
    "normal_": Rule(lambda m, x: x + m.conv(x).detach().normal_(2.0, 0.0)),
}

RULES = ARITHMETIC | SHAPES | REDUCTIONS | LAYERS | FACTS | REFUSED


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [tuple(each) for each in (ARITHMETIC, SHAPES, REDUCTIONS, LAYERS, FACTS, REFUSED)],
    ids=["arithmetic", "shapes", "reductions", "layers", "facts", "refused"],
)
def test_rules(run: Callable[..., list[int]], names: tuple[str, ...]) -> None:
    run(check_all, names, nprocs=4, timeout=100)
