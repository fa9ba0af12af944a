"""Adoption: a plain tensor that a model made becomes spread when parts are written into it.

Models write `y = torch.zeros(shape); y[...] = f(x)`. All workers have the same zeros, so each can
keep its part of them, and nothing is sent. The Python object stays the same one, so that everything
that refers to it has the spread tensor from then on.

In a graph that a compiler makes of a model, tensors have no values, and the compiler also refers to
them. There, tensors that the model's code creates are known as long as it does nothing else with
them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tessel.core.agreement import agree
from tessel.core.layout import Layout
from tessel.core.linop import is_traced
from tessel.tensor.table import in_backward, in_checkpoint, outlining, running, tensors
from tessel.tensor.tensor import Tensor
from tessel.tensor.unfinished import Zeros, left_unfinished, may_wait

# whether a tensor is an argument of the running model or kept in it, rather than made by its code
belongs_elsewhere: ContextVar[Callable[[torch.Tensor], bool] | None] = ContextVar(
    "belongs_elsewhere", default=None
)


class FreshTensors(TorchFunctionMode):
    """The plain tensors that code creates, as long as it does nothing with them.

    Attributes:
        found: the tensors and whether they are zeros, by `id`; since they are kept here, no other
            tensor gets the same `id`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        is_write = name == "__setitem__" and isinstance(args[2], Tensor)
        if not (is_write or name in _ASKING):
            for each in tensors(args, kwargs):
                self.found.pop(id(each), None)
        result = func(*args, **kwargs)
        if is_write and not isinstance(args[0], Tensor):  # it stays plain, with other values
            self.found.pop(id(args[0]), None)
        if name in _MAKING and isinstance(result, torch.Tensor) and not isinstance(result, Tensor):
            self.found[id(result)] = result, "zeros" in name
        return result

    def are_zero(self, x: torch.Tensor) -> bool | None:
        """Whether a tensor that was only created is all zeros; None for any other tensor."""
        return self.found.get(id(x), (x, None))[1]


# functions that create new tensors, and those that do not read values
_MAKING = frozenset(
    f"{new}{kind}{like}"
    for kind in ("zeros", "ones", "empty", "full")
    for new, like in (("", ""), ("new_", ""), ("", "_like"))
)
_ASKING = frozenset(
    (
        *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cpu", "is_cuda"),
        *("size", "dim", "ndimension", "numel", "is_complex", "is_floating_point"),
    )
)

# the fresh tensors of the model that a compiler traces
fresh: ContextVar[FreshTensors | None] = ContextVar("fresh", default=None)


def adopted(x: torch.Tensor, target: Layout | None, view: torch.Tensor | None = None) -> bool:
    """Make a plain tensor spread, in the layout `target` with the same values, if possible.

    It stays plain outside of models, where its user may need it as it is, and if anything but
    Python names refers to it: a view, a graph of autograd, an array of numpy. These would keep the
    old values. On some workers, garbage that is not collected yet may refer to it, so all workers
    agree.

    Args:
        x: the tensor.
        target: its new layout.
        view: the only view of it, if there is one; it loses its values.

    Returns:
        Whether the tensor is spread now.
    """
    if target is None or target.is_whole or tuple(x.shape) != target.shape or outlining.get():
        return False
    # A checkpoint must recompute what it computed first, perhaps outside of the model.
    model = running.get()
    if model is None and not (in_checkpoint() or in_backward()):
        return False
    if target.is_outside or (model is not None and {*target.partition.ranks} != {*model.ranks}):
        return False
    if is_traced():
        return view is None and _adopted_in_graph(x, target)
    if belongs_to_others(x):
        return False
    call = f"a write of parts into a plain tensor of shape {target.shape}"
    views = () if view is None else (view,)  # it refers to the tensor, and to its storage
    # Spectra begin as zeros, which take no computation while they are left unfinished.
    is_zero = x.is_complex() and may_wait() and not torch.count_nonzero(x)
    heard = agree(target.partition, call, numbers=[int(is_alone(x, *views)), int(is_zero)])
    if not all(alone for alone, _ in heard.numbers.values()):
        return False
    new: Any
    if all(zero for _, zero in heard.numbers.values()):
        like = x.new_empty(())
        new = left_unfinished(like, target, Zeros((0,) * x.dim(), like, target))
    else:
        with torch.no_grad():
            new = Tensor(target.local_part(x).clone(), target)
    for each in views:
        torch.utils.swap_tensors(each, x.new_empty(()))
    torch.utils.swap_tensors(x, new)
    return True


def belongs_to_others(x: torch.Tensor) -> bool:
    """Whether a tensor is not a new one of the running model; the same on all workers."""
    if type(x) is not torch.Tensor or x.layout != torch.strided or x.requires_grad or x._is_view():
        return True
    is_held = belongs_elsewhere.get()
    return is_held is not None and is_held(x)


def is_alone(x: torch.Tensor, *views: torch.Tensor) -> bool:
    """Whether only Python names refer to a tensor and to these views of it, on this worker."""
    storage = x.untyped_storage()  # a reference itself
    return (
        not weakref.getweakrefs(x)  # converted models have these to their parameters and buffers
        and x._use_count() == 1 + len(views)  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(storage._cdata) == 2 + len(views)
        and all(each._use_count() == 1 and not weakref.getweakrefs(each) for each in views)  # type: ignore[attr-defined]
    )


def slices_of(view: torch.Tensor) -> tuple[int | slice, ...] | None:
    """The integers and slices by which a view was taken; None if it was taken in another way.

    They may differ from those in the code if they select the same values: `y[:1, 0]` for
    `y[0, :1]` of one row.
    """
    base = view._base
    if base is None or not base.is_contiguous() or not view.numel():
        return None
    place = int(view.storage_offset()) - int(base.storage_offset())
    axes = [*zip(view.shape, view.stride(), strict=True)]
    key: list[int | slice] = []
    for length, stride in zip(base.shape, base.stride(), strict=True):
        begin, place = place // stride, place % stride
        count, step = axes[0] if axes else (0, 1)
        end = begin + (count - 1) * (step // stride) + 1
        if axes and step >= stride and step % stride == 0 and end <= length:
            key.append(slice(begin, end, step // stride))
            del axes[0]
        else:
            key.append(begin)
    found = tuple(key)
    if axes or any(
        isinstance(each, int) and each >= n for each, n in zip(key, base.shape, strict=True)
    ):
        return None
    with torch.no_grad():
        same = base[found]
    form = (same.shape, same.stride(), same.storage_offset())
    return found if form == (view.shape, view.stride(), view.storage_offset()) else None


def _adopted_in_graph(x: torch.Tensor, target: Layout) -> bool:
    known = fresh.get()
    are_zero = None if known is None else known.are_zero(x)
    if are_zero is None or x.requires_grad:
        return False
    if are_zero and x.is_complex() and may_wait():
        like = x.new_empty(())
        new = left_unfinished(like, target, Zeros((0,) * x.dim(), like, target))
    else:
        new = Tensor(target.local_part(x).clone(), target)
    torch.utils.swap_tensors(x, new)
    return True
