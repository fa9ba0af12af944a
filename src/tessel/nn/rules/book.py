"""The book of rules: which torch functions are known on tensors of known layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tessel.layout import Layout, Shape
from tessel.move import Move
from tessel.nn.layer import used
from tessel.nn.ledger import check_origin, is_whole, layout_of, note, tensors, written
from tessel.transport import kept_in_job

Arguments = tuple[Any, ...]
Settings = dict[str, Any]
Rule = Callable[[str, Any, Arguments, Settings], Any]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for the torch functions of these names."""

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter


def unsupported(name: str, why: str, *layouts: Layout) -> NotImplementedError:
    """What to raise for a function that has no rule for such layouts."""
    held = ", ".join(map(str, layouts))
    return NotImplementedError(
        f"torch's `{name}` in a converted model: {why}, got {held}; put it into a layer that "
        f"`tessel.nn` has, or outside of the model"
    )


def whole(x: Tensor) -> Layout:
    """The layout of a tensor, which must have one."""
    layout = layout_of(x)
    assert layout is not None
    return layout


def held_layouts(*values: Any) -> list[Layout]:
    """The layouts of all tensors among the arguments that have one."""
    return [layout for each in tensors(*values) if (layout := written(each)) is not None]


def is_split(layout: Layout, dim: int) -> bool:
    """Whether a dimension lies in several parts."""
    return layout.is_split(dim)


def check_whole(name: str, *values: Any) -> None:
    """Raise if operands that a function takes whole are split."""
    layouts = held_layouts(values)
    if not all(map(is_whole, layouts)):
        raise unsupported(name, "all but its first argument must be whole", *layouts)


def moved(x: Tensor, target: Layout) -> Tensor:
    """A tensor of known layout in another layout."""
    source = whole(x)
    return x if source == target else move(source, target).apply(x)


@kept_in_job
def move(source: Layout, target: Layout) -> Move:
    """The move between two layouts."""
    return Move(source, target)


@kept_in_job
def gathered(layout: Layout, dims: tuple[int, ...]) -> Layout:
    """The same with some dimensions whole on all workers, as shared values."""
    return layout.gathered(dims)


def sliced(value: Tensor, layout: Layout) -> Tensor:
    """This worker's part of a tensor that all workers have whole, to combine with its own.

    The tensor is broadcast against `layout`: its dimensions are the last ones.
    """
    check_origin(value)
    part = used(value, layout)
    box = layout.box()
    assert part is not None and box is not None
    for dim in range(-value.dim(), 0):
        if value.shape[dim] > 1 and is_split(layout, dim):
            start, stop = box[dim]
            part = part.narrow(dim, start, stop - start)
    return part


def outlines(func: Any, args: Arguments, kwargs: Settings) -> Any:
    """What a function gives for tensors of the global shapes, without values."""
    return func(*_outline(args), **_outline(kwargs))


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor):
        layout = written(value)
        shape: Shape = tuple(value.shape) if layout is None else layout.shape
        return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(map(_outline, value)) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {name: _outline(each) for name, each in value.items()}
    return value


def noted(y: Any, layout: Layout) -> Any:
    """Write down the layout of a result, which must have the shape that it says."""
    assert tuple(y.shape) == layout.local_shape, (tuple(y.shape), layout)
    return note(y, layout)
