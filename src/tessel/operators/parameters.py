"""Parameters of operators: drawn once, and identified by the operator that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from math import prod
from typing import Any, Self, overload

import torch
from torch import Tensor

from tessel.core.boxes import Box, extent
from tessel.core.graph import fix_lengths, in_graphs
from tessel.core.handles import HasHandle, constant_in_graphs, object_of
from tessel.core.layout import Layout
from tessel.core.move import Move
from tessel.core.partition import Partition
from tessel.core.shared import equalize

CHUNK = 1 << 16  # how many numbers are drawn at once


class Parameters(dict[Any, Tensor]):
    """Values of parameters, by their operators.

    The value of A is found by A, by its adjoint and its inverse, by `distribute(A)`, and by every
    expression whose only parameter it is. θ of an expression is also one of each part of it.

    Attributes:
        boxes: which parts of parameters these are, if `init` drew parts.

    >>> import tessel, torch
    >>> A = tessel.ParMatrix(torch.float32, 2, 3)
    >>> S = tessel.kron(A, tessel.ParDiagonal(torch.float32, 4))
    >>> theta = tessel.init(S)
    >>> theta[A].shape, theta[tessel.distribute(A)] is theta[A.H], S in theta
    (torch.Size([2, 3]), True, False)
    """

    def __init__(self, values: Any = (), boxes: Mapping[Any, Box] | None = None) -> None:
        super().__init__()
        self.boxes = dict(boxes or {})
        given = dict(values)
        self.update(given)
        if len(self) < len(given):
            raise ValueError(f"a parameter is given two values: {list(given)}")

    def __missing__(self, key: Any) -> Tensor:
        leaf = leaf_of(key)  # A.H, distribute(A) and A(θ) share the parameter of A
        if leaf is key or leaf not in self:
            raise KeyError(f"θ has no value for {key}")
        return self[leaf]

    def __contains__(self, key: Any) -> bool:
        leaves: tuple[Any, ...] = getattr(key, "leaves", ())
        return len(leaves) == 1 and super().__contains__(leaves[0])

    def __setitem__(self, key: Any, value: Tensor) -> None:
        super().__setitem__(leaf_of(key), value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(leaf_of(key))

    # those of dict itself would not find an operator by another with the same parameter
    get = MutableMapping.get  # type: ignore[assignment]
    pop = MutableMapping.pop
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc]
        self.update(other)
        return self

    def of(self, operator: Any) -> Parameters:
        """The parameters of an operator, if there are others."""
        leaves = operator.leaves
        if len(self) <= len(leaves) or not all(leaf in self for leaf in leaves):
            return self
        return Parameters({leaf: self[leaf] for leaf in leaves}, self.boxes)

    def check(self, operator: Any) -> None:
        """ValueError if values that an operator needs are missing, or do not fit it."""
        leaves, parts = operator.leaves, getattr(operator, "part_boxes", {})
        missing = [leaf for leaf in leaves if leaf not in self]
        if missing and self and not any(leaf in leaves for leaf in self):
            raise ValueError(
                f"θ belongs to another operator: {next(iter(self))} is not a part of {operator}"
            )
        if missing:
            raise ValueError(f"θ has no value for {missing[0]}, a part of {operator}")
        for leaf in leaves:
            value, drawn, used = self[leaf], self.boxes.get(leaf), parts.get(leaf)
            shape = tuple(value.shape)
            # Parts of one length are distinguished by their boxes, not by their shapes.
            if shape != leaf.parameter_shape and drawn is not None and used not in (None, drawn):
                raise ValueError(
                    f"θ was drawn for another distribution of {leaf}, whose parts are not those of "
                    f"{operator}; draw it with init() of this one, or pass it whole"
                )
            fitting = [leaf.parameter_shape, *([] if used is None else [extent(used)])]
            if shape not in fitting or value.dtype != leaf.source.dtype:
                expected = " or ".join(map(str, dict.fromkeys(fitting)))
                raise ValueError(
                    f"θ does not fit {leaf}: expected {leaf.source.dtype} of shape {expected}, "
                    f"got {value.dtype} of shape {shape}"
                )

    def joined(self, other: Mapping[Any, Tensor]) -> Parameters:
        """These parameters and others, which may not contradict them."""
        for leaf in self.keys() & other.keys():
            if self[leaf] is not other[leaf]:
                raise ValueError(f"{leaf} is bound to two values")
        boxes = getattr(other, "boxes", {})
        return Parameters({**self, **other}, {**self.boxes, **boxes})

    def to(self, device: Any) -> Parameters:
        """The same values on another device."""
        return Parameters(
            {
                leaf: value.detach().to(device).requires_grad_(value.requires_grad)
                for leaf, value in self.items()
            },
            self.boxes,
        )

    def requires_grad_(self, requires_grad: bool = True) -> Parameters:
        for value in self.values():
            value.requires_grad_(requires_grad)
        return self

    def __repr__(self) -> str:
        inner = ", ".join(f"{leaf}: {tuple(value.shape)}" for leaf, value in self.items())
        return f"Parameters({inner})"


def leaf_of(operator: Any) -> Any:
    """The only leaf of an operator with a parameter; KeyError if there is none, or several."""
    leaves = getattr(operator, "leaves", None)
    if leaves is None:
        raise KeyError(f"θ is indexed by operators, got {operator!r}")
    if len(leaves) != 1:
        names = ", ".join(map(repr, leaves))
        which = f"{len(leaves)} parameters, ask for one of {names}" if leaves else "no parameters"
        raise KeyError(f"{operator!r} has {which}")
    return leaves[0]


def init(operator: Any, *, requires_grad: bool = True) -> Parameters:
    """Draw parameters from torch's random numbers.

    For a distributed operator they are the same on all workers, drawn by the first one's generator,
    and do not depend on the number of workers. Parameters along dimensions that are split
    are split as well. For an operator that is not distributed they are this worker's own: draw them
    after `distribute`, or with the same seed on all workers.

    >>> import tessel, torch
    >>> A = tessel.ParMatrix(torch.float32, 2, 3)
    >>> theta = tessel.init(A)
    >>> (A(theta) * torch.ones(3)).shape
    torch.Size([2])
    """
    boxes: dict[Any, Box] = getattr(operator, "part_boxes", {})
    agree: Callable[[int], int] = getattr(operator, "agreed_number", int)
    # A seed from torch's own generator: `torch.manual_seed` decides what is drawn. With several
    # workers the first one's counts, so that all draw parts of one whole.
    seed = agree(int(torch.randint(2**62, (), device="cpu").item()))
    theta = Parameters(boxes=boxes)
    for number, leaf in enumerate(operator.leaves):
        value = draw(leaf, seed + number, boxes.get(leaf))
        theta[leaf] = value.requires_grad_(requires_grad)
    return theta


def draw(leaf: Any, seed: int, box: Box | None = None) -> Tensor:
    """Draw normal numbers, or a part of them without the rest in memory."""
    shape = leaf.parameter_shape
    assert shape is not None
    # On the CPU and in chunks, whatever the device and the part: the numbers are the same on
    # any number of workers, and no worker needs memory for all of them at once.
    generator = torch.Generator("cpu").manual_seed(seed)
    dtype = leaf.source.dtype
    row, first = prod(shape[1:]), 0
    rows = max(1, CHUNK // max(1, row))
    box = tuple((0, length) for length in shape) if box is None else box
    part = torch.empty([stop - start for start, stop in box], dtype=dtype, device="cpu")
    start, stop = box[0]
    inner = tuple(slice(*each) for each in box[1:])
    while first < shape[0]:
        count = min(rows, shape[0] - first)
        chunk = leaf.std * torch.randn(
            (count, *shape[1:]), generator=generator, dtype=dtype, device="cpu"
        )
        a, b = max(first, start), min(first + count, stop)
        if a < b:
            part[a - start : b - start] = chunk[(slice(a - first, b - first), *inner)]
        first += count
    return part


def find_values(operator: Any, theta: Parameters | None) -> Mapping[Any, Tensor]:
    """The values to use: those given, or the operator's own; ValueError if there are none."""
    if theta is None:
        theta = own_values(operator)
    missing = [leaf for leaf in operator.leaves if leaf not in theta]
    if missing and theta.keys() <= set(operator.leaves):
        raise ValueError(
            f"{missing[0]} has parameters: apply the operator S as S(θ) * x, with θ = init(S); or "
            f"call S.parameters() first, which gives it its own parameters"
        )
    theta.check(operator)
    return theta.of(operator)


def own_values(operator: Any) -> Parameters:
    """The parameters of an operator that it has drawn itself."""
    found = [leaf for leaf in operator.leaves if leaf.own is not None]
    boxes = {leaf: leaf.own_box for leaf in found if leaf.own_box is not None}
    return Parameters({leaf: leaf.own for leaf in found}, boxes)


def own_parameters(operator: Any) -> dict[str, torch.nn.Parameter]:
    """The operator's own parameters by name, drawn if necessary."""
    if any(leaf.own is None for leaf in operator.leaves):
        drawn = init(operator)
        for leaf, value in drawn.items():
            if leaf.own is None:
                leaf.own = torch.nn.Parameter(value.detach())
                leaf.own_box = drawn.boxes.get(leaf)
                leaf.shared_by = getattr(operator, "partition", None)
    partition: Any = getattr(operator, "partition", None)
    found = {}
    for number, leaf in enumerate(operator.leaves):
        assert leaf.own is not None
        # A parameter that one worker drew becomes that of all when a distributed operator uses it.
        if partition is not None and leaf.own_box is None and leaf.shared_by != partition:
            equalize([leaf.own], partition)
            leaf.shared_by = partition
        found[f"{type(leaf).__name__}_{number}"] = leaf.own
    return found


class StoredInParts:
    """A mixin for a module that stores parts of its parameters, and whose state has them whole.

    A subclass gives `stored_parameters`. All workers collect a state together.
    """

    def stored_parameters(self) -> Iterator[tuple[str, Layout]]:
        """The names of parameters that may be in parts, with their layouts."""
        raise NotImplementedError(f"{type(self).__name__} must implement `stored_parameters`")

    def collected_on(self, layout: Layout) -> Partition:
        """The workers whose state has the whole of a parameter with this layout."""
        return layout.partition

    def _in_parts(self) -> Iterator[tuple[str, Layout, Partition]]:
        """The parameters that some worker does not have whole, and the workers to collect them."""
        for name, layout in self.stored_parameters():
            everyone = self.collected_on(layout)
            is_split = any(layout.is_split(dim) for dim in range(len(layout.shape)))
            others = {*everyone.ranks} - {*layout.partition.ranks}
            if is_split or others or not layout.partition.active:
                yield name, layout, everyone

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for name, layout, everyone in self._in_parts():
            if everyone.active:
                part = getattr(self, name).detach()
                whole = Layout.whole(everyone, layout.shape)
                destination[prefix + name] = Move(layout, whole).apply(part)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, layout, _ in self._in_parts():
            whole = state_dict.get(prefix + name)
            if whole is None or tuple(whole.shape) != layout.shape:
                continue  # a part already, or an error that torch reports better, on all workers
            if layout.partition.active:
                # A copy: torch may assign it, and a view would keep the whole alive.
                state_dict[prefix + name] = layout.local_part(whole).clone()
            elif (own := getattr(self, name)).shape != whole.shape:  # that of a worker outside
                state_dict[prefix + name] = whole.new_empty(own.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class OperatorModule(HasHandle, StoredInParts, torch.nn.Module):
    """An operator as a torch module, which has the operator's own parameters."""

    _derived = HasHandle._derived | {"_traces"}

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator
        for name, value in own_parameters(operator).items():
            self.register_parameter(name, value)

    def can_be_traced(self, x: Tensor) -> bool:
        """Whether a compiler may have this call in its graph; a `ParReduce` agrees in each call."""
        return fix_lengths(x) and not _reduces(self.handle)

    @in_graphs()
    def forward(self, x: Tensor) -> Tensor:
        values = zip(self.operator.leaves, self.parameters(), strict=True)
        theta = Parameters(values, own_values(self.operator).boxes)
        return self.operator.apply(x, theta)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        for leaf, value in zip(self.operator.leaves, self.parameters(), strict=True):
            leaf.own = value  # a different one, if it was assigned

    def stored_parameters(self) -> Iterator[tuple[str, Layout]]:
        names = dict(self.named_parameters(recurse=False))
        for name, leaf in zip(names, self.operator.leaves, strict=True):
            if leaf in getattr(self.operator, "storage", {}):
                yield name, self.operator.parameter_layout(leaf)

    def extra_repr(self) -> str:
        return repr(self.operator)


@constant_in_graphs
def _reduces(handle: str) -> bool:
    return bool(object_of(handle).operator.reductions)


@overload
def gradient(function: Callable[[Parameters], Tensor], at: Parameters) -> Parameters: ...
@overload
def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor: ...
def gradient(function: Any, at: Any) -> Any:
    """The gradient of a real function of parameters, or of a tensor.

    It is zero for parameters that the function does not depend on.

    >>> import tessel, torch
    >>> gradient(lambda x: (x * x).sum(), torch.ones(2))
    tensor([2., 2.])
    """
    if isinstance(at, Parameters):
        points = {leaf: value.detach().requires_grad_() for leaf, value in at.items()}
        theta = Parameters(points, at.boxes)
        grads = torch.autograd.grad(
            function(theta), list(points.values()), allow_unused=True, materialize_grads=True
        )
        return Parameters(zip(points, grads, strict=True), at.boxes)
    point = at.detach().requires_grad_()
    (grad,) = torch.autograd.grad(function(point), point)
    return grad
