"""Aliases: which tensors share memory in torch, and what becomes of those that do not here.

Torch has a slice as a view. Along a split dimension values have to move, so it is a copy here. A
change in place would reach one of the two, and not the other: then the one that it does not reach
gives its part away, and whoever uses it gets an error. Who shares memory with whom follows from
layouts, so that all workers raise alike.
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

    They hold this, and it refers to them weakly: a view must not keep alive what nobody else holds.
    So do copies of them, which are copies of all that has these values.
    """

    def __init__(self, x: Tensor) -> None:
        self._members = [weakref.ref(x)]
        self._copies: list[weakref.ref[Aliases]] = []
        self._others: list[weakref.ref[Aliases]] = []
        x.__dict__["_aliases"] = self

    @classmethod
    def of(cls, x: Tensor) -> Aliases:
        """Those of a tensor."""
        known: Aliases | None = x.__dict__.get("_aliases")
        return cls(x) if known is None else known

    def __iter__(self) -> Iterator[Tensor]:
        return iter(_alive(self._members))

    def begin_with(self, x: Tensor) -> bool:
        """Whether all of these are views of this tensor, or it is the only one."""
        return self._members[0]() is x

    @property
    def copies(self) -> list[Aliases]:
        """Those of tensors that do not share this memory here, and may do so in torch."""
        return _alive(self._copies)

    @property
    def others(self) -> list[Aliases]:
        """Copies of which nobody knows whether torch has them as views, see `either`."""
        return _alive(self._others)

    @property
    def are_there(self) -> bool:
        """Whether a change of a copy would have to change anything."""
        return any(True for each in (self, *self.others) for _ in each)

    def add(self, x: Tensor) -> None:
        """Let another tensor be one of these."""
        self._members = [known for known in self._members if known() is not None]
        self._members.append(weakref.ref(x))
        x.__dict__["_aliases"] = self

    def drop(self, x: Tensor) -> None:
        """Let one of these share other memory from now on."""
        self._members = [known for known in self._members if known() is not x]
        del x.__dict__["_aliases"]

    def add_copy(self, copy: Aliases, is_other: bool = False) -> None:
        """Let a change of these outdate a copy."""
        self._copies = [*map(weakref.ref, self.copies), weakref.ref(copy)]
        if is_other:
            self._others = [*map(weakref.ref, self.others), weakref.ref(copy)]


def _alive(known: list[weakref.ref[Any]]) -> list[Any]:
    return [each for reference in known if (each := reference()) is not None]


def note_view(y: Tensor, x: Tensor, copied: bool = False, detached: bool = False) -> Tensor:
    """Remember that torch has a view of `x` in `y`.

    Args:
        y: the view.
        x: of what.
        copied: whether it is a copy here.
        detached: whether it has no history in common with `x`.
    """
    known = Aliases.of(x)
    # a slice that is not finished has no part yet, and must not be asked for it
    empty = (y if copied else x) if "_part" in y.__dict__ else None
    is_empty = empty is not None and not empty._part.numel()
    if is_empty and torch.is_grad_enabled() and y._part.requires_grad:
        # The second derivative of a view of nothing that is changed is a constant in torch, and
        # this worker would skip exchanges: see `share_history`. Where x has values, a view of
        # none of them is torch's own.
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
    """A tensor that is a view of `x` in torch, or one of its own, as strides of the whole decide.

    Strides of a part say nothing of the whole where a worker has one index of a dimension. So it is
    one of its own, and a change of one of the two outdates the other.
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
    """What others are views of in the eyes of autograd, where this worker has no values of it.

    Attributes:
        tensor: gives it, as long as it is there and no view itself.
        part: its part.
    """

    def __init__(self, x: Tensor) -> None:
        self.tensor: Callable[[], Tensor | None] = weakref.ref(x)
        self.part = x._part


def share_history(x: Tensor) -> None:
    """Let all that has the same values depend on what nothing of `x` was changed by.

    Other workers have views, of which torch does so: by way of a view it changes the root, of which
    it has all views again; a change of the root itself leaves nothing of what that was before. The
    graphs have to be alike, or workers make different exchanges in second derivatives.
    """
    if "_root" not in x.__dict__:
        return
    root: Root = x.__dict__["_root"]

    def depending(like: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        # no view: of one that is changed torch has constants as second derivatives, see `note_view`
        return anchored_zeros(tuple(like.shape), *others).to(like.dtype).clone()

    top = root.tensor()
    root.part = x._part if x is top else depending(root.part, root.part, x._part)
    for alike in Aliases.of(x):
        if alike is top:
            alike._part = root.part
        elif alike.__dict__.get("_root") is root:
            alike._part = depending(alike._part, root.part)


def become(x: Tensor, y: Tensor) -> Tensor:
    """Let a tensor be what `y` is, which torch has as a view of it: another shape of its values."""
    known, others = Aliases.of(x), Aliases.of(y)
    if others is not known and len([*known]) > 1:
        # A copy, from now on, of what else has these values: a change of that outdates it.
        known.drop(x)
        others.drop(y)
        others.add(x)
        x._originals = y._originals
    if others is not known:
        x.__dict__.pop("_root", None)
    elif "_root" in x.__dict__ and x.__dict__["_root"].tensor() is x:
        x.__dict__["_root"].tensor = lambda: None  # it is a view now of what it was
    x.__dict__.pop("_taken", None)
    x._part, x._layout = y._part, y._layout
    with torch._C.DisableTorchFunctionSubclass():
        x.data = Tensor(y._part.detach(), y._layout)  # the wrapper has the shape, too
    return x


def become_view(x: torch.Tensor, y: Tensor) -> None:
    """Let a plain tensor be the view `y` of a spread one, and take its place among aliases."""
    now: Any = x
    torch.utils.swap_tensors(x, made(y._part, y._layout))
    known = Aliases.of(y)
    known.drop(y)
    known.add(now)
    now.__dict__.update({key: y.__dict__[key] for key in ("_root", "_taken") if key in y.__dict__})
    now._originals = y._originals


def outdate_copies(x: Tensor, spared: Tensor | None = None) -> None:
    """Take the parts of copies away after a change of `x`, which torch's views would show.

    So whoever uses one of them afterwards gets an error, and not values of before. Nothing is asked
    of a tensor that has its part.

    Args:
        x: what was changed.
        spared: the copy by way of which it is changed.
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
                # its part, and what it would be finished by
                alike.__dict__.pop("_part", None)
                alike.__dict__.pop("_unfinished", None)
            done.append(aliases)
            left.append(aliases)


def apart(value: Any, x: Tensor, itself: bool = False) -> Any:
    """What is written into `x`; a copy, if torch has to read it from the memory that it writes.

    It refuses some of these, by what each worker has.

    Args:
        value: what is written.
        x: where to.
        itself: whether `x` itself is read in another order than it is written, too.
    """
    if not isinstance(value, Tensor) or (value is x and not itself):
        return value
    return value.clone() if Aliases.of(value) is Aliases.of(x) else value


def may_go_back(x: Tensor) -> bool:
    """Whether `x` is a copy of some items of one tensor, which Python may put back there."""
    if len(x._originals) != 1 or "_taken" not in x.__dict__ or open_part(x) is not x._part:
        return False
    base, _ = x.__dict__["_taken"]
    return any(base() is each for each in x._originals[0])


def withhold_original(copy: Tensor) -> None:
    """Take the part of what `copy` is a copy of away, until the copy is put back.

    For `x[1:] += y`, which Python makes of three calls: the last one puts the changed copy into
    `x`. In between, and if it never comes, `x` does not have the values that torch's would have.
    """
    for k, alike in enumerate(copy._originals[0]):
        if "_unfinished" in alike.__dict__:
            _ = alike._part  # it is finished, so that it can be withheld
        if not k:
            outdate_copies(alike, spared=copy)
        if "_part" in alike.__dict__:
            alike.__dict__["_withheld"] = alike.__dict__.pop("_part"), weakref.ref(copy)


def put_back(x: Tensor, items: Any, value: Any) -> None:
    """Give `x` its part again, if `value` is the copy that was changed, of the same items."""
    _, copy = x.__dict__["_withheld"]
    if copy() is not value or value is None:
        return
    base, taken = value.__dict__["_taken"]
    if base() is x and taken == items:
        for alike in Aliases.of(x):
            if "_withheld" in alike.__dict__:
                alike._part, _ = alike.__dict__.pop("_withheld")


def is_copy(x: Any) -> bool:
    """Whether a change of a tensor should change others that are still there, and does not."""
    return isinstance(x, Tensor) and any(known.are_there for known in x._originals)
