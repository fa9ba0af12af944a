"""Random programs of torch functions: the same on plain and on spread tensors."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import tessel
from parity import values
from tessel import Layout, Partition

Step = Callable[[Tensor], Tensor]


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def reshaped(draw: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of as many values: two dimensions become one, or one becomes two."""
    dims = list(shape)
    if len(dims) > 1 and draw.random() < 0.5:
        at = draw.randrange(len(dims) - 1)
        return (*dims[:at], dims[at] * dims[at + 1], *dims[at + 2 :])
    if not dims:
        return (1,)
    at = draw.randrange(len(dims))
    first = draw.choice(_divisors(dims[at])) if dims[at] else 1
    return (*dims[:at], first, dims[at] // max(1, first), *dims[at + 1 :])


def step(draw: random.Random, shape: tuple[int, ...]) -> tuple[str, Step]:
    """One function of a tensor of this shape, with its name."""
    D = len(shape)
    dim = draw.randrange(-D, D)
    other = draw.randrange(D)
    length = shape[dim]
    start = draw.randrange(length + 1)
    stop = draw.randrange(start, length + 1)
    amount, seed = draw.randrange(-3, 4), draw.randrange(99)
    new = reshaped(draw, shape)
    index = (
        torch.tensor([draw.randrange(length) for _ in range(draw.randrange(1, 5))])
        if length
        else None
    )
    key = (*[slice(None)] * (dim % D), slice(start, stop))
    strided = (*[slice(None)] * (dim % D), slice(start, None, 2))
    order = draw.sample(range(D), D)
    weight = values((length, draw.randrange(1, 5)), seed)
    table = values(shape, seed)
    row = values(shape[-1:], seed)
    pick, can_convolve = index is not None, D == 3 and 0 not in shape and prod(shape) < 400
    kernel = values((draw.randrange(1, 4), shape[1], 3), seed) if can_convolve else None
    steps: dict[str, Step] = {
        "tanh": torch.tanh,
        "affine": lambda x: 2 * x - 0.5,
        "square": lambda x: x * x * 0.3,
        "plus a whole": lambda x: x + table,
        "times a row": lambda x: x * row,
        "where": lambda x: torch.where(x > 0, x, 0.1 * x),
        "in place": lambda x: (x * 1).mul_(0.5).add_(table),
        f"minus mean {dim}": lambda x: x - x.mean(dim, keepdim=True),
        f"sum {dim}": lambda x: x.sum(dim, keepdim=D == 1),
        f"amax {dim}": lambda x: x.amax(dim, keepdim=True) + x if length else x,
        f"softmax {dim}": lambda x: x.softmax(dim),
        f"cumsum {dim}": lambda x: x.cumsum(dim),
        f"sort {dim}": lambda x: x.sort(dim)[0],
        f"flip {dim}": lambda x: x.flip(dim),
        f"roll {amount} {dim}": lambda x: x.roll(amount, dim),
        f"slice {dim} {start} {stop}": lambda x: x[key],
        f"strided {dim} {start}": lambda x: x[strided],
        f"pick {dim}": lambda x: x.index_select(dim, index) if index is not None else x,
        f"permute {order}": lambda x: x.permute(order),
        f"swap {dim} {other}": lambda x: x.transpose(dim, other),
        f"reshape {new}": lambda x: x.reshape(new),
        "flatten": lambda x: x.flatten(),
        f"unsqueeze {dim}": lambda x: x.unsqueeze(dim) if D < 5 else x,
        "squeeze": lambda x: x.squeeze() if prod(shape) != 1 else x,
        f"cat {dim}": lambda x: torch.cat([x, table, 2 * x], dim) if prod(shape) < 400 else x,
        f"stack {dim}": lambda x: torch.stack([x, -x], dim) if D < 4 and prod(shape) < 400 else x,
        f"product {dim}": lambda x: (x.movedim(dim, -1) @ weight).movedim(-1, dim),
        f"pad {dim}": lambda x: F.pad(x, (1, 2), value=0.5),
        f"repeat {dim}": lambda x: x.repeat(2, *[1] * (D - 1)) if prod(shape) < 400 else x,
        f"norm {dim}": lambda x: x / (1 + x.norm(dim=dim, keepdim=True)),
        "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]) if shape[-1] > 1 else x,
        f"chunk {dim}": lambda x: x.chunk(2, dim)[0],
        f"select {dim}": lambda x: x.select(dim, start % length) if D > 1 and length else x,
        f"variance {dim}": lambda x: x * x.var(dim, correction=0, keepdim=True) if length else x,
        f"logsumexp {dim}": lambda x: x - x.logsumexp(dim, keepdim=True) if length else x,
        f"cumprod {dim}": lambda x: x.tanh().cumprod(dim),
        f"topk {dim}": lambda x: x.topk(length // 2, dim)[0],
        f"gather {dim}": lambda x: x.gather(dim, x.argsort(dim=dim, stable=True)),
        f"put {dim}": lambda x: x.index_add(dim, index, x.index_select(dim, index)) if pick else x,
        "masked": lambda x: x.masked_fill(table > 0, 0.25),
        "triangle": lambda x: x.tril(amount) if D > 1 else x,
        f"diagonal {dim}": lambda x: x.diagonal(0, -2, -1) if D > 2 else x,
        "outer": lambda x: torch.einsum("...i,j->...ij", x, row[:3]) if D < 4 else x,
        "convolution": lambda x: F.conv1d(x, kernel, padding=1) if can_convolve else x,
        "pool": lambda x: F.max_pool1d(x, 2, 1) if can_convolve and shape[-1] > 1 else x,
        "interpolation": lambda x: F.interpolate(x, scale_factor=1.5) if can_convolve else x,
        "instances": lambda x: F.instance_norm(x) if can_convolve and shape[-1] > 1 else x,
        f"unfold {dim}": lambda x: x.unfold(dim, 2, 1) if D < 4 and length > 1 else x,
        "clamp": lambda x: x.clamp(-0.5, 1.5),
        f"spectrum {dim}": lambda x: torch.fft.rfft(x, dim=dim).abs() if prod(shape) else x,
    }
    name = draw.choice(sorted(steps))
    return name, steps[name]


def layout_of(draw: random.Random, shape: tuple[int, ...], workers: int) -> Layout:
    """Some layout of a tensor: along one dimension or two, even or not."""
    D = len(shape)
    ranks = tuple(range(workers))
    if workers == 4 and D > 1 and draw.random() < 0.4:
        a, b = draw.sample(range(D), 2)
        axes = [0 if d == a else 1 if d == b else None for d in range(D)]
        return Layout.split(Partition(ranks, (2, 2)), shape, axes)
    at = draw.randrange(D)
    if draw.random() < 0.3:
        marks = sorted(draw.randrange(shape[at] + 1) for _ in range(workers - 1))
        parts = [b - a for a, b in zip([0, *marks], [*marks, shape[at]], strict=True)]
        lengths = [parts if d == at else [n] for d, n in enumerate(shape)]
        grid = Partition(ranks, tuple(workers if d == at else 1 for d in range(D)))
        return Layout.from_lengths(grid, lengths)
    axes = [0 if d == at else None for d in range(D)]
    return Layout.split(Partition(ranks, (workers,)), shape, axes)


def run_program(seed: int) -> str:
    """What is wrong with the result or the gradient of a program, or nothing."""
    draw = random.Random(seed)
    shape = tuple(draw.choice((1, 2, 3, 4, 5, 7)) for _ in range(draw.randrange(1, 5)))
    layout = layout_of(draw, shape, tessel.world().size)
    leaves = [values(shape, seed % 97).requires_grad_() for _ in range(2)]
    x, y = leaves[0], tessel.spread(leaves[1], layout)
    said = [f"{shape} in {layout}"]
    for _ in range(draw.randrange(5, 21)):
        if x.dim() == 0:
            break
        name, does = step(draw, tuple(x.shape))
        said.append(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x, y = does(x), does(y)
        if tuple(y.shape) != tuple(x.shape):
            return f"{seed}: {said}: shape {tuple(y.shape)} is not {tuple(x.shape)}"
    found = y.full()
    wrong = (
        "" if torch.allclose(found, x, 1e-9, 1e-9, equal_nan=True) else f"{seed}: {said}: values"
    )
    if x.requires_grad:
        weights = values(tuple(x.shape), 5)
        (x * weights).sum().backward()
        (y * weights).sum().backward()
        if not torch.allclose(leaves[0].grad, leaves[1].grad, 1e-8, 1e-8, True):
            wrong = wrong or f"{seed}: {said}: gradients"
    return wrong


def run_programs(first: int, count: int) -> list[str]:
    """All that is wrong with some programs."""
    return [wrong for seed in range(first, first + count) if (wrong := run_program(seed))]
