"""Aliases: tensors that share memory in torch, also where they do not here.

In torch, a slice is a view. Along a split dimension values have to move, so it is a copy here. A
change in place would reach one of the two and not the other: the one that it does not reach loses
its part, and using it raises an error. Layouts determine which tensors share memory, so that all
workers raise alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tessel.core.layout import Layout
from tessel.core.shared import anchored_zeros
from tessel.tensor.tensor import Tensor, made, open_part


class Aliases:
    """Tensors that share memory: one, and views of it.

    They hold this object, and it refers to them weakly: a view must not keep a tensor alive that
    nothing else refers to. Copies of them are referred to in the same way: they are copies of all
    tensors with these values.
    """

    def __init__(self, x: Tensor) -> None:
        self._members = [weakref.ref(x)]
        self._copies: list[weakref.ref[Aliases]] = []
        self._others: list[weakref.ref[Aliases]] = []
        x.__dict__["_aliases"] = self

    @classmethod
    def of(cls, x: Tensor) -> Aliases:
        """The aliases of a tensor."""
        known: Aliases | None = x.__dict__.get("_aliases")
        return cls(x) if known is None else known

    def __iter__(self) -> Iterator[Tensor]:
        return iter(_alive(self._members))

    def begin_with(self, x: Tensor) -> bool:
        """Whether all of these are views of `x`, or `x` is the only one."""
        return self._members[0]() is x

    @property
    def copies(self) -> list[Aliases]:
        """The aliases of tensors that do not share this memory here, and may share it in torch."""
        return _alive(self._copies)

    @property
    def others(self) -> list[Aliases]:
        """Copies that may or may not be views in torch, see `either`."""
        return _alive(self._others)

    @property
    def are_there(self) -> bool:
        """Whether tensors are left that a change of a copy would have to change."""
        return any(True for each in (self, *self.others) for _ in each)

    def add(self, x: Tensor) -> None:
        """Add a tensor that shares this memory."""
        self._members = [known for known in self._members if known() is not None]
        self._members.append(weakref.ref(x))
        x.__dict__["_aliases"] = self

    def drop(self, x: Tensor) -> None:
        """Remove a tensor, which shares other memory from now on."""
        self._members = [known for known in self._members if known() is not x]
        del x.__dict__["_aliases"]

    def add_copy(self, copy: Aliases, is_other: bool = False) -> None:
        """Add a copy that becomes outdated when these change."""
        self._copies = [*map(weakref.ref, self.copies), weakref.ref(copy)]
        if is_other:
            self._others = [*map(weakref.ref, self.others), weakref.ref(copy)]


def _alive(known: list[weakref.ref[Any]]) -> list[Any]:
    return [each for reference in known if (each := reference()) is not None]


def note_view(y: Tensor, x: Tensor, copied: bool = False, detached: bool = False) -> Tensor:
    """Record that `y` is a view of `x` in torch.

    Args:
        y: the view.
        x: its base.
        copied: whether `y` is a copy here.
        detached: whether `y` has no history in common with `x`.
    """
    known = Aliases.of(x)
    # an unfinished slice has no part yet, and reading it would finish the slice
    empty = (y if copied else x) if "_part" in y.__dict__ else None
    is_empty = empty is not None and not empty._part.numel()
    if is_empty and torch.is_grad_enabled() and y._part.requires_grad:
        # In torch, the second derivative of an empty view that is changed is a constant, and this
        # worker would skip exchanges: see `share_history`. Where x has values, an empty view of
        # it is torch's own.
        y._part = y._part.clone()
    if copied:
        y._originals = (*x._originals, known)
        known.add_copy(Aliases.of(y))
        return y
    known.add(y)
    y._originals = x._originals
    if not x._part.numel():
        y.__dict__["_root"] = Root(y) if detached else x.__dict__.setdefault("_root", Root(x))
    return y


def alone(part: torch.Tensor, layout: Layout, x: Tensor) -> Tensor:
    """A tensor that shares no memory with `x`, of a part that may be a view of its part."""
    if part is x._part or part._is_view() or torch.is_inference_mode_enabled():
        part = part.clone()
    return made(part, layout)


def either(part: torch.Tensor, layout: Layout, x: Tensor) -> Tensor:
    """A tensor that may be a view of `x` or a new one in torch, depending on strides of the whole.

    Strides of a part do not tell which if a worker has a single index of a dimension. So here it is
    a new one, and a change of either of the two outdates the other.
    """
    y = alone(part, layout, x)
    mine, theirs = Aliases.of(y), Aliases.of(x)
    for known, is_other in [(a, True) for a in (theirs, *theirs.others)] + [
        (a, False) for a in x._originals
    ]:
        known.add_copy(mine, is_other)
        mine.add_copy(known, is_other)
    return y


class Root:
    """The tensor that others are views of for autograd, where this worker has no values of it.

    Attributes:
        tensor: returns it, as long as it exists and is not a view itself.
        part: its part.
    """

    def __init__(self, x: Tensor) -> None:
        self.tensor: Callable[[], Tensor | None] = weakref.ref(x)
        self.part = x._part


def share_history(x: Tensor) -> None:
    """Let all aliases of an empty `x` depend on whatever changed it.

    Workers with values have views, for which torch does so: a change through a view changes the
    root, from which all views are made again; a change of the root itself discards its history.
    The graphs of workers must be alike, or they make different exchanges in second derivatives.
    """
    if "_root" not in x.__dict__:
        return
    root: Root = x.__dict__["_root"]

    def depending(like: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        # no view: second derivatives of a changed one are constants in torch, see `note_view`
        return anchored_zeros(tuple(like.shape), *others).to(like.dtype).clone()

    top = root.tensor()
    root.part = x._part if x is top else depending(root.part, root.part, x._part)
    for alike in Aliases.of(x):
        if alike is top:
            alike._part = root.part
        elif alike.__dict__.get("_root") is root:
            alike._part = depending(alike._part, root.part)


def become(x: Tensor, y: Tensor) -> Tensor:
    """Turn `x` into `y`, in torch a view of it: the same values in another shape."""
    known, others = Aliases.of(x), Aliases.of(y)
    if others is not known and len([*known]) > 1:
        # From now on a copy of the other tensors with these values: a change of those outdates it.
        known.drop(x)
        others.drop(y)
        others.add(x)
        x._originals = y._originals
    if others is not known:
        x.__dict__.pop("_root", None)
    elif "_root" in x.__dict__ and x.__dict__["_root"].tensor() is x:
        x.__dict__["_root"].tensor = lambda: None  # `x` is now a view of the former `x`
    x.__dict__.pop("_taken", None)
    x._part, x._layout = y._part, y._layout
    with torch._C.DisableTorchFunctionSubclass():
        x.data = Tensor(y._part.detach(), y._layout)  # the wrapper has the shape, too
    return x


def become_view(x: torch.Tensor, y: Tensor) -> None:
    """Turn a plain tensor into `y`, the view of a spread one, and replace `y` among its aliases."""
    now: Any = x
    torch.utils.swap_tensors(x, made(y._part, y._layout))
    known = Aliases.of(y)
    known.drop(y)
    known.add(now)
    now.__dict__.update({key: y.__dict__[key] for key in ("_root", "_taken") if key in y.__dict__})
    now._originals = y._originals


def outdate_copies(x: Tensor, spared: Tensor | None = None) -> None:
    """Remove the parts of copies after a change of `x`, which views would show in torch.

    So using one of them afterwards raises an error instead of computing with old values. Tensors
    that have their parts need no check.

    Args:
        x: the tensor that was changed.
        spared: the copy through which it is changed.
    """
    if "_aliases" not in x.__dict__:
        return
    changed = Aliases.of(x)
    done = [changed] if spared is None else [changed, Aliases.of(spared)]
    left = [changed]
    while left:
        for aliases in left.pop().copies:
            if any(aliases is each for each in done):
                continue
            for alike in aliases:
                # its part, or what would compute it
                alike.__dict__.pop("_part", None)
                alike.__dict__.pop("_unfinished", None)
            done.append(aliases)
            left.append(aliases)


def apart(value: Any, x: Tensor, itself: bool = False) -> Any:
    """The value to write into `x`; a copy, if torch would read it from the memory that it writes.

    Torch rejects some of these writes, depending on the memory of each worker's part.

    Args:
        value: what is written.
        x: the tensor that it is written into.
        itself: whether `x` itself is also read in another order than it is written.
    """
    if not isinstance(value, Tensor) or (value is x and not itself):
        return value
    return value.clone() if Aliases.of(value) is Aliases.of(x) else value


def may_go_back(x: Tensor) -> bool:
    """Whether `x` is a copy of items of one tensor, which Python may write back."""
    if len(x._originals) != 1 or "_taken" not in x.__dict__ or open_part(x) is not x._part:
        return False
    base, _ = x.__dict__["_taken"]
    return any(base() is each for each in x._originals[0])


def withhold_original(copy: Tensor) -> None:
    """Remove the part of the original of `copy` until the copy is put back.

    This is for `x[1:] += y`, for which Python makes three calls: the last one puts the changed copy
    into `x`. In between, and if it never comes, `x` does not have the values that it has in torch.
    """
    for k, alike in enumerate(copy._originals[0]):
        if "_unfinished" in alike.__dict__:
            _ = alike._part  # finish it, so that it can be withheld
        if not k:
            outdate_copies(alike, spared=copy)
        if "_part" in alike.__dict__:
            alike.__dict__["_withheld"] = alike.__dict__.pop("_part"), weakref.ref(copy)


def put_back(x: Tensor, items: Any, value: Any) -> None:
    """Give `x` its part back, if `value` is the changed copy of the same items."""
    _, copy = x.__dict__["_withheld"]
    if copy() is not value or value is None:
        return
    base, taken = value.__dict__["_taken"]
    if base() is x and taken == items:
        for alike in Aliases.of(x):
            if "_withheld" in alike.__dict__:
                alike._part, _ = alike.__dict__.pop("_withheld")


def is_copy(x: Any) -> bool:
    """Whether a change of a tensor should also change others that still exist, and does not."""
    return isinstance(x, Tensor) and any(known.are_there for known in x._originals)
