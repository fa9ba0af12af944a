"""The ledger: inside of a converted model, the layout of every tensor is written down.

The model's own code between its layers is plain torch. A ledger sees each torch function that it
calls, so that a tensor's layout is known and never guessed: results get their layout from the rules
of `tessel.nn.rules`, and a function without a rule raises. `shape` and `size()` give the global
shape there, as they would in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tessel.layout import Layout
from tessel.partition import Partition

Rule = Callable[["Ledger", Any, tuple[Any, ...], dict[str, Any]], Any]
_active: ContextVar[Ledger | None] = ContextVar("ledger", default=None)
_MARK = "_tessel_layout"


class Ledger(TorchFunctionMode):
    """Writes down layouts while it is active.

    Args:
        partition: the workers of the model.
        rule: what happens when a torch function is called on a tensor of known layout.
    """

    def __init__(self, partition: Partition, rule: Rule) -> None:
        super().__init__()
        self.partition = partition
        self.rule = rule

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(getattr(each, _MARK, None) is not None for each in tensors(args, kwargs)):
            return func(*args, **kwargs)
        return self.rule(self, func, args, kwargs)

    def __enter__(self) -> Ledger:
        self._token = _active.set(self)
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        _active.reset(self._token)


def active() -> Ledger | None:
    """The ledger of the converted model that runs now."""
    return _active.get()


def layout_of(x: Any) -> Layout | None:
    """The layout of a tensor inside of a converted model, or None if it is not known."""
    mark = getattr(x, _MARK, None)
    return mark[1] if mark is not None and mark[0] is _active.get() else None


def note(x: Any, layout: Layout) -> Any:
    """Write down the layout of a tensor, or of several, inside of a converted model."""
    ledger = _active.get()
    if ledger is not None:
        for each in x if isinstance(x, tuple) else (x,):
            setattr(each, _MARK, (ledger, layout))
    return x


@contextmanager
def paused() -> Iterator[None]:
    """Let torch compute with local tensors as what they are."""
    if _active.get() is None:
        yield
        return
    with torch._C.DisableTorchFunction():
        yield


def tensors(*values: Any) -> Iterator[Tensor]:
    """All tensors in arguments, also in lists, tuples and dictionaries."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(*value)
        elif isinstance(value, dict):
            yield from tensors(*value.values())
