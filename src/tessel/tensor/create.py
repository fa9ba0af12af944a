"""Creation of spread tensors: from whole tensors, from parts, and by functions such as `zeros`.

Here, and only here, workers agree: on shapes, on dtype and device, and whether gradients are
required. From then on every worker knows the layout of everything that is computed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tessel import transport
from tessel.core.agreement import Agreement, TensorMeta, agree, entered
from tessel.core.graph import eagerly, untraced
from tessel.core.layout import Layout, Shape
from tessel.core.partition import Partition, world
from tessel.tensor.counter_random import normal, uniform, whole_numbers
from tessel.tensor.shared_random import common_number
from tessel.tensor.tensor import Tensor, converters, layout_on, move
from tessel.transport import kept_in_job

Where = Partition | Layout
AgreedLayout = tuple[Layout, TensorMeta]

# kinds of tensors that know their layout, with functions that return part and layout, and raise if
# the user passed another one
owners: dict[type, Callable[[Any, Where | None], tuple[torch.Tensor, Where]]] = {}


@eagerly
def spread(x: torch.Tensor, where: Where) -> Tensor:
    """Spread a tensor that all workers have whole, with the same values.

    Forward:  each worker keeps its part, and nothing is sent.    Backward:  every worker gets the
    whole gradient, by an all-gather.

    Args:
        x: the whole tensor, on each worker of `where`; others may pass anything. A spread tensor,
            or a shard of a parallel layer, is moved there.
        where: a partition whose axis d splits dimension d into balanced parts, or a layout.

    >>> import tessel, torch
    >>> tessel.spread(torch.arange(4.0), tessel.world()).sum()
    tessel.Tensor(shape=(), whole on Partition(1 on workers 0))
    tensor(6.)
    """
    partition = _partition(where)
    if type(x) in converters:
        x = converters[type(x)](x, None)
    elif isinstance(x, Tensor):  # raise together with workers that pass something else
        agree(x._layout.partition, "tessel.spread of a tensor that is spread")
    if isinstance(x, Tensor):
        return x.move_to(where)
    layout, meta = _agreement(partition, where, "tessel.spread").agree_on(x)
    whole = Layout.whole(partition, layout.shape, shared=True)
    part = entered(x, meta, partition.active)
    if not partition.active:
        return Tensor(part, layout)
    if layout == whole:
        return Tensor(part.view_as(part), layout)
    return Tensor(move(whole, layout).apply(part), layout)


@eagerly
def from_local(part: torch.Tensor, where: Where | None = None) -> Tensor:
    """Make a spread tensor of its parts; workers agree on shapes, dtype and gradients.

    Args:
        part: this worker's part; workers outside of `where` may pass anything.
        where: a partition whose axis d splits dimension d, into parts of their own lengths; or a
            layout, whose local shapes the parts must have. None for a shard of a parallel layer or
            of `tessel.register_parallel_dim`, which has a layout.

    >>> import tessel, torch
    >>> tessel.from_local(torch.ones(3), tessel.world()).shape
    torch.Size([3])
    """
    if type(part) in owners:
        part, where = owners[type(part)](part, where)
    if where is None:
        agree(world(), "tessel.from_local without `where`, of a tensor that is no shard")
        raise TypeError("from_local: pass where, a tessel.Partition or a tessel.Layout")
    partition = _partition(where)
    if isinstance(part, Tensor):
        agree(world(), "tessel.from_local of a tensor that is spread")
        raise TypeError(f"from_local: expected a plain tensor, got one that is spread, {part}")
    layout, meta = _agreement(partition, where, "tessel.from_local").agree_on(part)
    part = entered(part, meta, partition.active)
    return Tensor(part.view_as(part), layout)


def _partition(where: Where) -> Partition:
    if isinstance(where, Layout):
        return where.partition
    if not isinstance(where, Partition):
        raise TypeError(f"where: expected a tessel.Partition or a tessel.Layout, got {where!r}")
    return where


@kept_in_job
def _agreement(partition: Partition, where: Where, what: str) -> Agreement[AgreedLayout]:
    """The agreement of all workers of the job on the layout, dtype and device of a tensor.

    Workers outside of the partition get a spread tensor, too, and state its shape.
    """

    def of_wholes(shapes: dict[int, Shape], meta: TensorMeta) -> AgreedLayout:
        first, expected = next(iter(shapes.items()))
        for worker, shape in shapes.items():
            if shape != expected:
                raise ValueError(
                    f"{label}: expected the whole tensor on every worker, got shape {expected} on "
                    f"worker {first} and {shape} on worker {worker}; for parts write "
                    f"tessel.from_local"
                )
        return layout_on(where, expected), meta

    def of_parts(shapes: dict[int, Shape], meta: TensorMeta) -> AgreedLayout:
        if isinstance(where, Partition):
            return Layout.from_local_shapes(where, shapes), meta
        for worker, shape in shapes.items():
            if shape != where.shape_on(worker):
                raise ValueError(
                    f"{label}: worker {worker} expected a part of shape {where.shape_on(worker)}, "
                    f"got {shape}"
                )
        return where, meta

    label = f"{what} over {where if isinstance(where, Layout) else partition}"
    identity = f"{what} {where.identity}" if isinstance(where, Layout) else label
    everyone = transport.group_of(range(transport.num_workers()))
    conclude = of_wholes if what == "tessel.spread" else of_parts
    return Agreement(everyone, label, partition.ranks, conclude, identity)


def _sizes(size: tuple[Any, ...]) -> Shape:
    """The shape, given as integers or as one sequence of them."""
    given: Sequence[int] = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return tuple(given)


@untraced
def _filled(shape: Shape, where: Where, make: Any, requires_grad: bool, **kind: Any) -> Tensor:
    layout = layout_on(where, shape)
    part = make(layout.local_shape, **kind)
    return Tensor(part.requires_grad_(requires_grad), layout)


def zeros(
    *size: Any,
    where: Where,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """A spread tensor of zeros; each worker creates its part.

    >>> import tessel
    >>> tessel.zeros(4, where=tessel.world()).shape
    torch.Size([4])
    """
    return _filled(_sizes(size), where, torch.zeros, requires_grad, dtype=dtype, device=device)


def ones(
    *size: Any,
    where: Where,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """A spread tensor of ones; each worker creates its part.

    >>> import tessel
    >>> float(tessel.ones(4, where=tessel.world()).sum())
    4.0
    """
    return _filled(_sizes(size), where, torch.ones, requires_grad, dtype=dtype, device=device)


def empty(
    *size: Any,
    where: Where,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """A spread tensor of uninitialized values; each worker creates its part.

    >>> import tessel
    >>> tessel.empty(4, where=tessel.world()).fill_(2).shape
    torch.Size([4])
    """
    return _filled(_sizes(size), where, torch.empty, requires_grad, dtype=dtype, device=device)


def full(
    size: Sequence[int],
    fill_value: float | complex | bool,
    *,
    where: Where,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """A spread tensor of one value; each worker creates its part.

    >>> import tessel
    >>> float(tessel.full((4,), 0.5, where=tessel.world()).sum())
    2.0
    """

    def make(shape: Shape, **kind: Any) -> torch.Tensor:
        return torch.full(shape, fill_value, **kind)

    return _filled(_sizes((size,)), where, make, requires_grad, dtype=dtype, device=device)


def arange(
    *bounds: float,
    where: Where,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    **named: float,
) -> Tensor:
    """The numbers start, start + step, … below end, as `torch.arange` has them.

    Args:
        bounds: `end`, or `start, end`, or `start, end, step`, by position or by name.

    >>> import tessel
    >>> int(tessel.arange(2, 8, step=2, where=tessel.world()).sum())
    12
    """
    line = torch.arange(*bounds, **named, dtype=dtype, device=device)  # type: ignore[call-overload]
    return _line(line, where, requires_grad)


def linspace(
    start: float,
    end: float,
    steps: int,
    *,
    where: Where,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """`steps` numbers from start to end at equal distances, as `torch.linspace` has them.

    >>> import tessel
    >>> float(tessel.linspace(0, 1, 5, where=tessel.world()).sum())
    2.5
    """
    line = torch.linspace(start, end, steps, dtype=dtype, device=device)
    return _line(line, where, requires_grad)


@untraced
def _line(line: torch.Tensor, where: Where, requires_grad: bool) -> Tensor:
    """The part of a 1-d tensor, which is made whole first to get the values of one process."""
    layout = layout_on(where, line.shape)
    return Tensor(layout.local_part(line).clone().requires_grad_(requires_grad), layout)


def rand(
    *size: Any,
    where: Where,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """Random numbers, uniformly distributed in [0, 1).

    Each is a function of its index and of one number, drawn on the first worker from `generator` or
    torch's own: they do not depend on the number of workers or the layout, and each worker draws
    its own.

    >>> import tessel
    >>> tessel.rand(4, where=tessel.world()).shape
    torch.Size([4])
    """
    kind = dtype or torch.get_default_dtype()
    return _random(_sizes(size), where, uniform, kind, device, requires_grad, generator)


def randn(
    *size: Any,
    where: Where,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """Random numbers, normally distributed with mean 0 and variance 1; see `rand`.

    >>> import tessel
    >>> tessel.randn(4, where=tessel.world()).shape
    torch.Size([4])
    """
    kind = dtype or torch.get_default_dtype()
    return _random(_sizes(size), where, normal, kind, device, requires_grad, generator)


def randint(
    *bounds: Any,
    where: Where,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.int64,
    device: Any = None,
    **named: Any,
) -> Tensor:
    """Random integers in [low, high): `randint(low=0, high, size)`; see `rand`.

    Args:
        bounds: `high, size` or `low, high, size`, by position or by name.

    >>> import tessel
    >>> tessel.randint(3, 7, (4,), where=tessel.world()).shape
    torch.Size([4])
    """
    places = [each for each in ("low", "high", "size") if each not in named]
    if len(bounds) < len(places) and places[0] == "low":
        places = places[1:]
    given = {"low": 0, **dict(zip(places, bounds, strict=False)), **named}
    if len(bounds) != len(places) or given.keys() != {"low", "high", "size"}:
        raise TypeError(f"expected randint([low], high, size, where=...), got {bounds} and {named}")
    low, high, size = given["low"], given["high"], given["size"]
    if not low < high:
        raise ValueError(f"randint: low must be less than high, got {low} and {high}")

    def draw(seed: int, layout: Layout, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return whole_numbers(seed, layout, low, high, dtype, device)

    return _random(_sizes((size,)), where, draw, dtype, device, False, generator)


@untraced
def _random(
    shape: Shape,
    where: Where,
    draw: Any,
    dtype: torch.dtype,
    device: Any,
    requires_grad: bool,
    generator: torch.Generator | None,
) -> Tensor:
    layout = layout_on(where, shape)
    number = common_number(layout.partition, generator, device or torch.get_default_device())
    part = draw(number, layout, dtype, device)
    return Tensor(part.requires_grad_(requires_grad), layout)
