"""Masks: the values that a boolean tensor selects, in torch's order.

Their number depends on values. If the first masked dimension is split, and the others are whole,
each worker finds a run of the result in its own part: the workers tell each other the lengths of
their runs, one number each, and the result is split into parts of these lengths. With a mask that
all workers have, no message is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tessel.core import boxes
from tessel.core.layout import Cut, Layout
from tessel.core.numbers import constant
from tessel.tensor.rules.pointwise import changed, check_change, common_layout, fitted, pointwise
from tessel.tensor.rules.reductions import argument
from tessel.tensor.table import (
    ApartError,
    Arguments,
    Settings,
    as_spread,
    computed,
    made,
    moved,
    outlines,
    rule,
    unsupported,
)
from tessel.tensor.tensor import Tensor, move
from tessel.transport import kept_in_job


def is_mask(item: Any) -> bool:
    """Whether an item of a key is a boolean tensor, or a list of booleans."""
    if isinstance(item, torch.Tensor):
        return item.dtype == torch.bool and item.dim() > 0
    return isinstance(item, list) and bool(item) and all(isinstance(each, bool) for each in item)


def is_truth(key: Any) -> bool:
    """Whether a key is a single boolean, or a 0-d boolean tensor."""
    if isinstance(key, torch.Tensor):
        return key.dtype == torch.bool and not key.dim()
    return isinstance(key, bool)


@dataclass(frozen=True)
class MaskedChoice:
    """The values of a tensor that a mask selects.

    Attributes:
        there: the layout of the tensor meanwhile, with the masked dimensions in runs.
        mask: this worker's part of the mask.
        result: the layout of the selected values, with one dimension for the masked ones.
        at: the first masked dimension.
    """

    there: Layout
    mask: torch.Tensor
    result: Layout
    at: int

    @property
    def key(self) -> tuple[Any, ...]:
        """The index of the values that this worker selects in its part."""
        return (*[slice(None)] * self.at, self.mask)


@kept_in_job
def _in_runs(layout: Layout, mask: Layout | None, at: int, count: int) -> Layout:
    """A layout with only the first of the masked dimensions split.

    Args:
        layout: the layout of the tensor.
        mask: the layout of the mask, if it is spread.
        at: the first masked dimension.
        count: the number of masked dimensions.
    """
    cuts = list(layout.cuts)
    masked = slice(at, at + count)
    others = {axis for cut in (*cuts[:at], *cuts[at + count :]) for axis in cut.axes}
    split = any(len(cut.intervals) > 1 for cut in cuts[masked])
    if mask is not None and not split and not others & {a for c in mask.cuts for a in c.axes}:
        cuts[masked] = mask.cuts  # dimensions that are whole are split like the mask
    if any(len(cut.intervals) > 1 for cut in cuts[at + 1 : at + count]):
        axes = tuple(axis for cut in cuts[masked] for axis in cut.axes)
        parts = prod(layout.partition.shape[axis] for axis in axes)
        cuts[masked] = [Cut.whole(length) for length in layout.shape[masked]]
        cuts[at] = Cut(axes, boxes.balanced(layout.shape[at], parts))
    return Layout.of_cuts(layout.partition, layout.shape, tuple(cuts))


@torch.no_grad()
def chosen(name: str, layout: Layout, mask: Any, at: int = 0) -> MaskedChoice:
    """The values that a mask selects in a tensor of this layout, from a dimension on.

    Args:
        name: the name of the function.
        layout: the layout of the tensor.
        mask: the mask, spread or the same on all workers, with lengths of the tensor.
        at: the first masked dimension.
    """
    if not isinstance(mask, torch.Tensor):
        mask = torch.tensor(mask, dtype=torch.bool)
    lengths = layout.shape[at : at + mask.dim()]
    for dim, (n, m) in enumerate(zip(mask.shape, lengths, strict=False), at):
        if n != m:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {dim - at} does not match the "
                f"shape of the indexed tensor {list(layout.shape)} at index {dim}"
            )
    if len(lengths) < mask.dim():
        raise IndexError(f"too many indices for tensor of dimension {len(layout.shape)}")
    lies = mask._layout if isinstance(mask, Tensor) and not mask._layout.is_whole else None
    if isinstance(mask, Tensor) and mask._layout.partition != layout.partition:
        raise ApartError(name, (layout, mask._layout))
    there = _in_runs(layout, lies, at, mask.dim())
    masked, cut, partition = slice(at, at + mask.dim()), there.cuts[at], layout.partition
    # The mask is split like the tensor, and shared along axes that split other dimensions.
    beside = Layout.of_cuts(partition, there.shape[masked], there.cuts[masked])
    part = moved(as_spread(mask.detach(), partition), beside)
    # the numbers of selected values in intervals of the first masked dimension, on all workers
    if len(cut.intervals) == 1:
        counts = [int(part.sum())]
    elif lies is None:  # all workers have the whole mask
        whole = mask._part if isinstance(mask, Tensor) else mask
        counts = [int(whole[start:stop].sum()) for start, stop in cut.intervals]
    else:
        own = Cut(cut.axes, tuple((k, k + 1) for k in range(len(cut.intervals))))
        source = Layout.of_cuts(partition, (len(cut.intervals),), (own,))
        told = move(source, source.gathered((0,))).apply(part.sum().reshape(1))
        counts = told.tolist()
    runs = boxes.consecutive(counts)
    shape, cuts = list(there.shape), list(there.cuts)
    shape[masked], cuts[masked] = [runs[-1][1]], [Cut(there.cuts[at].axes, runs)]
    # axes of other masked dimensions, which are in one part, split nothing any more
    return MaskedChoice(
        there, part, Layout.of_cuts(layout.partition, tuple(shape), tuple(cuts)), at
    )


def masked_values(name: str, x: Tensor, mask: Any, at: int = 0) -> Tensor:
    """The values that a mask selects; it covers some dimensions from `at` on."""
    choice = chosen(name, x._layout, mask, at)
    return made(computed(lambda part: part[choice.key], moved(x, choice.there)), choice.result)


def put_at_mask(name: str, x: Tensor, mask: Any, value: torch.Tensor, at: int = 0) -> None:
    """Replace the values that a mask selects, in place."""
    choice = chosen(name, x._layout, mask, at)
    _put(x, choice, value)


def _put(x: Tensor, choice: MaskedChoice, value: torch.Tensor) -> None:
    lengths = indexed_lengths(value, choice.result.shape)
    if value.is_complex() and not x.is_complex():
        raise RuntimeError(f"values of {value.dtype} cannot be put into a tensor of {x.dtype}")
    new = fitted(value.reshape(lengths).to(x.dtype), choice.result)
    if choice.there == x._layout:
        x._part[choice.key] = new
    else:
        part = moved(x, choice.there).clone()
        part[choice.key] = new
        x._part.copy_(moved(made(part, choice.there), x._layout))
    changed(x)


def indexed_lengths(value: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """The lengths of values for a selection, without leading dimensions of length one."""
    given = list(value.shape)
    while len(given) > len(shape) and given[0] == 1:
        given.pop(0)
    pairs = zip(reversed(given), reversed(shape), strict=False)
    if len(given) > len(shape) or any(n not in (1, m) for n, m in pairs):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(value.shape)} cannot be broadcast to "
            f"indexing result of shape {list(shape)}"
        )
    return given


@rule("masked_select", plain=True)
def masked_select(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The values that a mask selects after broadcasting, as a 1-d tensor."""
    x, mask = args[0], argument(args, kwargs, 1, "mask")
    if mask.dtype != torch.bool:
        func(torch.empty(0), torch.empty(0, dtype=mask.dtype))  # torch's own error
    layout = common_layout(name, (x, mask))
    if not layout.shape:
        raise unsupported(name, "tensors without dimensions are not supported", layout)
    x, mask = (as_spread(each, layout.partition).expand(layout.shape) for each in (x, mask))
    return masked_values(name, made(fitted(x, layout), layout), mask)


@rule("nonzero", "argwhere")
def nonzero(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The indices of nonzero values, one row for each."""
    x = args[0].detach()
    if not x.dim():
        raise unsupported(name, "tensors without dimensions are not supported", x._layout)
    choice = chosen(name, x._layout, x if x.dtype == torch.bool else x != 0)
    box = choice.there.box()
    assert box is not None
    starts = constant(tuple(start for start, _ in box), torch.int64, x.device)
    (runs,) = choice.result.cuts
    rows = replace(
        choice.result,
        shape=(*choice.result.shape, x.dim()),
        cuts=(runs, Cut.whole(x.dim())),
    )
    found = made(choice.mask.nonzero() + starts, rows)
    return found.unbind(1) if argument(args, kwargs, 1, "as_tuple", False) else found


@rule("where", plain=True)
def where(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The indices where a condition holds; with values, one of the two for each element."""
    if len(args) == 1 and not kwargs:
        return nonzero("nonzero", torch.nonzero, (args[0], True), {})
    return pointwise(name, func, args, kwargs)


@rule("masked_scatter", "masked_scatter_")
def masked_scatter(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Put values of a source, one after the other, where a mask holds."""
    x, mask = args[0], argument(args, kwargs, 1, "mask")
    source = argument(args, kwargs, 2, "source")
    if mask.dtype != torch.bool or source.dtype != x.dtype or not x.dim():
        raise unsupported(name, "a mask and a source of the tensor's type are needed", x._layout)
    if name.endswith("_"):
        check_change(name, x, [x._layout])
        outlines(torch.broadcast_to, (mask, tuple(x.shape)), {})  # torch's own error
        y = x
    else:
        shape = torch.broadcast_shapes(x.shape, mask.shape)
        y = x.expand(shape).clone()
    choice = chosen(name, y._layout, mask.expand(y.shape))
    (count,) = choice.result.shape
    if source.numel() < count:
        raise RuntimeError(
            f"masked_scatter: expected a source of at least {count} values, got {source.numel()}"
        )
    _put(y, choice, source.reshape(-1)[:count])
    return y


def places_of(masks: Sequence[Any]) -> list[torch.Tensor]:
    """The indices at which masks hold, for each of their dimensions, on all workers."""
    found: list[torch.Tensor] = []
    for mask in masks:
        whole = mask.full() if isinstance(mask, Tensor) else torch.as_tensor(mask)
        found += whole.nonzero(as_tuple=True)
    return found
