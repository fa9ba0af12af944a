"""TESSEL_CHECK: workers check at each torch function that all of them do the same thing.

Workers agree where parts become spread tensors, and never again after that: if they take different
branches, a program combines data that do not fit together, or hangs. With this check they tell each
other before each function what they are about to do, and the first difference raises on all.

Programs that do not ask for it pay nothing: the functions that run torch functions
(`Tensor.above`) and move data (`Move`, `Halo`) are replaced by ones that compare first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from tessel import transport
from tessel.core.agreement import agree_on_call
from tessel.core.checksum import checksum
from tessel.core.context import is_compiling, setting
from tessel.core.halo import Halo
from tessel.core.layout import Layout
from tessel.core.linop import LinearOperator
from tessel.core.move import Move
from tessel.core.partition import Partition
from tessel.errors import WorkerLost
from tessel.tensor import call
from tessel.tensor.call_site import current_place
from tessel.tensor.table import Arguments, Settings, held_layouts, in_backward
from tessel.tensor.tensor import Tensor
from tessel.transport import Group, code_of, kept_in_job

# attributes and methods that all workers must use alike, since data moves after them; others may be
# read by one worker alone, as in `if rank == 0: print(float(loss))`
_COMPARED_FACTS = frozenset(("backward", "grad", "requires_grad_", "set requires_grad"))
_PLACED = frozenset(("to", "cuda", "xpu"))  # whose integers are devices, which differ by worker
_DEVICE = re.compile(r"(cuda|cpu|xpu|mps)(:\d+)?")

_inside: ContextVar[bool] = ContextVar("inside", default=False)  # a rule, which calls functions
_moves: ContextVar[bool] = ContextVar("moves", default=False)  # within a compared movement


@contextmanager
def check_calls() -> Iterator[None]:
    """Let workers check, at each torch function of spread tensors, that all do the same thing.

    They compare the name of the function; shapes, layouts and dtypes of tensors, and whether these
    require gradients; checksums of plain tensors, which must be the same everywhere; all arguments
    that are numbers, strings and the like; and each movement of data, also in backward passes. At
    the first difference every worker raises the same ValueError, which says what each of them
    called and where. Workers that take different branches of a model, also under `torch.no_grad`,
    or pass different plain inputs to it, find out at the first function.

    All workers enter together. For a whole program, the environment variable TESSEL_CHECK=1 does
    the same. Each function costs a small exchange; without the check it costs nothing.

    >>> import tessel, torch
    >>> with tessel.testing.check_calls():
    ...     float(tessel.spread(torch.ones(4), tessel.world()).sum())
    4.0
    """
    everyone = transport.group_of(range(transport.num_workers()))
    compare(everyone, "tessel.testing.check_calls()")
    with comparing():
        yield
        compare(everyone, "nothing more in tessel.testing.check_calls()")


@contextmanager
def comparing() -> Iterator[None]:
    """The same without an exchange at its beginning and its end."""
    was_on = Tensor.above is compared
    switch(True)
    try:
        yield
    finally:
        switch(was_on)


def switch(on: bool) -> None:
    """Begin or stop to compare."""
    Tensor.above = staticmethod(compared if on else call.above)
    if on == bool(_replaced):
        return  # keep replacements that a trace has made since then
    if on:
        _replaced.extend((kind, name, kind.__dict__[name]) for kind, name in _MOVEMENTS)
        for kind, name, own in _replaced:
            setattr(kind, name, _preceded(own))
        return
    for kind, name, own in _replaced:
        setattr(kind, name, own)
    _replaced.clear()


def compared(func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Call a torch function on spread tensors, after all of their workers compared the call."""
    name = call.name_of(func)
    # handlers that compute or move data, rather than read attributes
    computes = (call.at_once, call.follow, call.follow_cast)
    counts = name in _COMPARED_FACTS or call.rule_of(name) in computes
    if _inside.get() or is_compiling() or not counts:
        return call.above(func, args, kwargs)
    # the first operand may have any values before it is overwritten
    writes = name in ("copy_", "__setitem__", "fill_", "zero_") or name.startswith("set ")
    said = [_said(name, each, not (k == 0 and writes)) for k, each in enumerate(args)]
    said += [f"{key}={_said(name, each, key != 'out')}" for key, each in sorted(kwargs.items())]
    mode = "" if torch.is_grad_enabled() else "; under torch.no_grad()"
    layouts = held_layouts(args, kwargs)
    exactly = " ".join(layout.identity for layout in layouts)
    for group in dict.fromkeys(e.partition.prepare() for e in layouts if e.partition.active):
        compare(group, f"`{name}`({', '.join(said)}{mode})", exactly)
    if name in ("backward", "grad"):  # whose hooks and checkpoints run code of the user
        return call.above(func, args, kwargs)
    with setting(_inside, True):
        return call.above(func, args, kwargs)


def compare(group: Group, said: str, exactly: str = "") -> None:
    """Raise on all workers of the group unless all are about to do the same.

    Args:
        group: the workers that must do the same.
        said: a description of it, for errors.
        exactly: a text of everything else that must be equal.
    """
    if group.size == 1 or group.workers[0] < 0:  # placeholder workers cannot answer
        return

    def called() -> str:
        # places are quoted and not compared: workers may make the same call at different lines
        return f"{said} at {current_place()}"

    try:
        agree_on_call(group, called, code_of(f"TESSEL_CHECK {said} {exactly}"))
    except WorkerLost as error:
        text = f"{error}; it waited for the others to say that they call {said} as it does at "
        raise WorkerLost(f"{text}{current_place()}") from error


def _preceded(own: Callable[..., Any]) -> Callable[..., Any]:
    """A method that moves data, after comparing the movement with its other workers."""

    def move(operator: LinearOperator, *args: Any) -> Any:
        # A movement into a tensor makes another movement on workers whose tensor cannot be written
        # to directly, which only they know: movements within movements are not compared again.
        if is_compiling() or _moves.get():
            return own(operator, *args)
        source, target = operator.domain, operator.codomain
        if operator.takes_part and _anything_moves(source, target):
            when = " of a backward pass" if in_backward() else ""
            said = f"a movement{when} from {source} to {target}"
            compare(operator.group, said, f"{source.identity} {target.identity}")
        with setting(_moves, True):
            return own(operator, *args)

    return move


_MOVEMENTS: tuple[tuple[Any, str], ...] = (
    *((Move, name) for name in ("_apply", "_apply_into", "start", "start_apart", "complete")),
    *((Halo, name) for name in ("start", "start_adjoint")),
)
_replaced: list[tuple[Any, str, Any]] = []  # (class, name, method) while workers compare


@kept_in_job
def _anything_moves(source: Layout, target: Layout) -> bool:
    """Whether any worker may send something from one layout to another.

    If none can, a worker may make a movement alone that others do not need, as for an empty part.
    """
    if source.partition != target.partition or source.cuts != target.cuts:
        return True
    sizes = source.partition.shape
    return any(sizes[axis] > 1 for axis in {*source.shared} ^ {*target.shared})


def _said(name: str, value: Any, is_read: bool = True) -> str:
    """A description of an argument that must be equal on all workers.

    It has the kind of a tensor and the value of a number; for a plain tensor that is read, whose
    values must be equal, also a checksum.
    """
    if isinstance(value, torch.Tensor):
        part, where = value, f"plain tensor {tuple(value.shape)}"
        if isinstance(value, Tensor):
            # in `x[1:] += y` the part of `x` is withheld until the view is put back, by this call
            withheld = value.__dict__.get("_withheld")
            part, where = withheld[0] if withheld else value._part, str(value._layout)
        said = f"{where} of {part.dtype}" + (" that needs a gradient" if part.requires_grad else "")
        # tensors of other kinds, such as shards, may differ
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        return f"{said} (checksum {checksum(value):08x})" if is_plain and is_read else said
    if isinstance(value, list | tuple):
        members = ", ".join(_said(name, each, is_read) for each in value)
        return f"[{members}]" if isinstance(value, list) else f"({members})"
    if isinstance(value, dict):
        members = ", ".join(f"{k}: {_said(name, each, is_read)}" for k, each in value.items())
        return "{" + members + "}"
    if isinstance(value, slice):
        ends = (_said(name, each) for each in (value.start, value.stop, value.step))
        return f"slice({', '.join(ends)})"
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, str):
        return value.partition(":")[0] if _DEVICE.fullmatch(value) else repr(value)
    if isinstance(value, int) and not isinstance(value, bool) and name in _PLACED:
        return "device"
    if value is None or value is Ellipsis or isinstance(value, bool | int | float | complex):
        return repr(value)
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout | Layout | Partition):
        return str(value)
    named = getattr(value, "__qualname__", None)
    return str(named) if named else type(value).__name__


def _as_asked() -> None:
    """Compare if TESSEL_CHECK is set, on all workers of a job or on none."""
    switch(transport.checks_calls())


def _first(func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Call the first torch function of a spread tensor in a process that has joined no job."""
    _as_asked()
    return Tensor.above(func, args, kwargs)


Tensor.above = staticmethod(_first)
transport.when_joined(_as_asked)
