"""The ledger: inside of a converted model, the layout of every tensor is written down.

The model's own code between its layers is plain torch. A ledger sees each torch function that it
calls, so that a tensor's layout is known and never guessed: results get their layout from the rules
of `tessel.nn.rules`, and a function without a rule raises. `shape` and `size()` give the global
shape there, as they would in one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode

from tessel.layout import Layout
from tessel.partition import Partition

Rule = Callable[["Ledger", Any, tuple[Any, ...], dict[str, Any]], Any]
_active: ContextVar[Ledger | None] = ContextVar("ledger", default=None)
_alone: ContextVar[bool] = ContextVar("alone", default=False)
F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_tessel_layout"
_ORIGINALS = "_tessel_originals"


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
        self.level = _transform_level()
        self.saving = _saving()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _transform_level() != self.level:
            raise NotImplementedError(
                f"torch's `{func.__name__}` in a transform of torch.func in a converted model: "
                f"which part it works on is not known there; transform the whole model"
            )
        if not any(written(each) is not None for each in tensors(args, kwargs)):
            return func(*args, **kwargs)
        if _saving() is not self.saving:
            raise NotImplementedError(
                f"torch's `{func.__name__}` in a checkpoint in a converted model: its layouts are "
                f"not known when it is computed again; checkpoint a module, not a function"
            )
        return self.rule(self, func, args, kwargs)

    @contextmanager
    def module(self) -> Iterator[None]:
        """What a module computes, which a checkpoint may compute again."""
        before, self.saving = self.saving, _saving()
        try:
            yield
        finally:
            self.saving = before

    def __enter__(self) -> Ledger:
        self._token = _active.set(self)
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        _active.reset(self._token)


@contextmanager
def alone() -> Iterator[None]:
    """A converted model runs whose tensors one worker has: nothing needs to be written down."""
    mark = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(mark)


def is_alone() -> bool:
    """Whether such a model runs now."""
    return _alone.get()


def active() -> Ledger | None:
    """The ledger of the converted model that runs now."""
    return _active.get()


def layout_of(x: Any) -> Layout | None:
    """The layout of a tensor inside of a converted model, or None outside of one.

    A tensor whose layout nobody wrote down comes from parameters, or was made by all workers
    alike: it is whole on all of them.
    """
    ledger = _active.get()
    if ledger is None:
        return getattr(x, _MARK, None) if in_backward() else None
    layout = written(x)
    if layout is not None:
        return layout
    check_origin(x)
    return Layout.whole(ledger.partition, x.shape, shared=True)


def is_whole(layout: Layout) -> bool:
    """Whether every worker has the whole tensor, as one shared value."""
    sizes = layout.partition.shape
    split = any(len(cut.intervals) > 1 for cut in layout.cuts)
    return not split and all(sizes[axis] == 1 for axis in layout.separate)


def check_origin(x: Tensor) -> None:
    """Raise if a tensor of no known layout was computed from a part of another, unseen."""
    seen: set[Any] = set()
    nodes: list[Any] = [x.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        layouts = node.metadata.get(_MARK, {}).values()
        if not all(map(is_whole, layouts)):
            raise NotImplementedError(
                f"a tensor in a converted model comes from parts of {next(iter(layouts))} by "
                f"compiled code, whose functions are not seen; use plain torch"
            )
        nodes += [] if layouts else [source for source, _ in node.next_functions]


def written(x: Any) -> Layout | None:
    """The layout of a tensor that was written down, or None."""
    node = getattr(x, "grad_fn", None)
    if isinstance(node, BackwardCFunction):
        return _written_before(x, node)
    layout: Layout | None = getattr(x, _MARK, None)
    return layout


def _written_before(x: Tensor, node: Any) -> Layout | None:
    """The layout of what came out of a Python function: of this library, or of a backward hook."""
    function = node._forward_cls
    place = x.output_nr
    while function is BackwardHookFunction:  # gives what it gets
        if _MARK in node.metadata:
            break
        node, place = node.next_functions[place]
        function = getattr(node, "_forward_cls", None)
    of_torch = function is not None and function.__name__ == "_NoopSaveInputs"  # of checkpoints
    if (
        function is not None
        and not of_torch
        and not function.__module__.startswith(("tessel.", "torch.nn.modules."))
    ):
        raise NotImplementedError(
            f"the result of {function.__qualname__} in a converted model: what a function with a "
            f"backward pass of its own does with a part of a tensor is not known; apply it "
            f"outside of the model"
        )
    layout: Layout | None = getattr(x, _MARK, None)
    return node.metadata.get(_MARK, {}).get(place) if layout is None and node else layout


def note(x: Any, layout: Layout) -> Any:
    """Write down the layout of a tensor, or of several, inside of a converted model."""
    if _active.get() is not None:
        for each in x if isinstance(x, tuple) else (x,):
            setattr(each, _MARK, layout)
            if each.grad_fn is not None:  # backward hooks make another tensor of it
                each.grad_fn.metadata.setdefault(_MARK, {})[each.output_nr] = layout
    return x


def note_view(y: Tensor, x: Tensor, copied: bool = False) -> Tensor:
    """Write down that torch has a view of `x` in `y`, which may be a copy here."""
    originals = getattr(x, _ORIGINALS, ())
    setattr(y, _ORIGINALS, (*originals, weakref.ref(x)) if copied else originals)
    return y


def is_copy(x: Any) -> bool:
    """Whether a change of a tensor should change others that are still there, and does not."""
    return any(original() is not None for original in getattr(x, _ORIGINALS, ()))


def in_backward() -> bool:
    """Whether a backward pass runs, in which a checkpoint may compute something again."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Whether a checkpoint runs, which will compute again what is computed now."""
    return _saving() is not None


def _saving() -> Any:
    """The checkpoint that runs now, by how it saves tensors, or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    checkpointed = hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", "")
    return hooks[0] if checkpointed else None


def _transform_level() -> int:
    level: int = torch._C._functorch.maybe_current_level() or 0
    return level


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
