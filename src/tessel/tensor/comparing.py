"""TESSEL_CHECK: at each torch function, workers compare that all of them do the same thing.

Agreement happens where parts become spread tensors, and never again inside: a program whose workers
take different branches moves what does not fit together, or waits. Here they say before each
function what they are about to do, and the first difference raises on all of them.

Nothing of this is in the way of a program that does not ask for it: what runs a torch function
(`Tensor.above`) and what moves data (`Move`, `Halo`) is exchanged for something that compares
first.
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

# facts that all workers must state alike, since something moves after them; others may be read by
# one worker alone, as in `if rank == 0: print(float(loss))`
_COMPARED_FACTS = frozenset(("backward", "grad", "requires_grad_", "set requires_grad"))
_PLACED = frozenset(("to", "cuda", "xpu"))  # whose whole numbers are devices, one for each worker
_DEVICE = re.compile(r"(cuda|cpu|xpu|mps)(:\d+)?")

_inside: ContextVar[bool] = ContextVar("inside", default=False)  # of a rule, which calls others
_moves: ContextVar[bool] = ContextVar("moves", default=False)  # within a movement that was compared


@contextmanager
def check_calls() -> Iterator[None]:
    """Let workers compare, at each torch function of spread tensors, that all do the same thing.

    They compare the name of the function, shapes, layouts and dtypes of tensors, whether these need
    a gradient, checksums of plain tensors, which must be the same everywhere, and all arguments
    that are numbers, strings and the like; and each movement of data, in backward passes, too. At
    the first difference every worker raises the same ValueError, which says what each of them
    called and where. Workers that take different branches of a model, also under `torch.no_grad`,
    or give it plain inputs that differ, find out at the first function.

    All workers enter together. In a whole program the environment variable TESSEL_CHECK=1 does the
    same. Each function costs a small exchange; without either it costs nothing.

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
    """The same without a word when it begins and when it ends."""
    was_on = Tensor.above is compared
    switch(True)
    try:
        yield
    finally:
        switch(was_on)


def switch(on: bool) -> None:
    """Compare from here on, or no longer."""
    Tensor.above = staticmethod(compared if on else call.above)
    if on == bool(_replaced):
        return  # what a trace has put in the place of movements since then stays
    if on:
        _replaced.extend((kind, name, kind.__dict__[name]) for kind, name in _MOVEMENTS)
        for kind, name, own in _replaced:
            setattr(kind, name, _preceded(own))
        return
    for kind, name, own in _replaced:
        setattr(kind, name, own)
    _replaced.clear()


def compared(func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Call a torch function on spread tensors, after all of their workers said that they do so."""
    name = call.name_of(func)
    # what computes or moves something, rather than tell a fact
    computes = (call.at_once, call.follow, call.follow_cast)
    counts = name in _COMPARED_FACTS or call.rule_of(name) in computes
    if _inside.get() or is_compiling() or not counts:
        return call.above(func, args, kwargs)
    # the first operand may hold anything before it is overwritten
    writes = name in ("copy_", "__setitem__", "fill_", "zero_") or name.startswith("set ")
    said = [_said(name, each, not (k == 0 and writes)) for k, each in enumerate(args)]
    said += [f"{key}={_said(name, each, key != 'out')}" for key, each in sorted(kwargs.items())]
    mode = "" if torch.is_grad_enabled() else "; under torch.no_grad()"
    layouts = held_layouts(args, kwargs)
    exactly = " ".join(layout.identity for layout in layouts)
    for group in dict.fromkeys(e.partition.prepare() for e in layouts if e.partition.active):
        compare(group, f"`{name}`({', '.join(said)}{mode})", exactly)
    if name in ("backward", "grad"):  # whose hooks and checkpoints call functions of the user's
        return call.above(func, args, kwargs)
    with setting(_inside, True):
        return call.above(func, args, kwargs)


def compare(group: Group, said: str, exactly: str = "") -> None:
    """Raise on all workers of the group unless all are about to do the same.

    Args:
        group: who must do the same.
        said: what that is, for the reader of an error.
        exactly: what else must be the same.
    """
    if group.size == 1 or group.workers[0] < 0:  # of workers that are only supposed, nobody speaks
        return

    def called() -> str:
        # places are said and not compared: workers may come to the same call by different lines
        return f"{said} at {current_place()}"

    try:
        agree_on_call(group, called, code_of(f"TESSEL_CHECK {said} {exactly}"))
    except WorkerLost as error:
        text = f"{error}; it waited for the others to say that they call {said} as it does at "
        raise WorkerLost(f"{text}{current_place()}") from error


def _preceded(own: Callable[..., Any]) -> Callable[..., Any]:
    """What moves data, after all workers of it said that they move the same."""

    def move(operator: LinearOperator, *args: Any) -> Any:
        # A movement into a tensor makes another one on workers whose tensor cannot be written to at
        # once, which only they know: what a movement makes is compared with it, not by itself.
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
_replaced: list[tuple[Any, str, Any]] = []  # of which class what, while workers compare


@kept_in_job
def _anything_moves(source: Layout, target: Layout) -> bool:
    """Whether something can travel between two layouts, for any worker.

    Where nothing can, a worker may do alone what others have no need of, as with an empty part.
    """
    if source.partition != target.partition or source.cuts != target.cuts:
        return True
    sizes = source.partition.shape
    return any(sizes[axis] > 1 for axis in {*source.shared} ^ {*target.shared})


def _said(name: str, value: Any, is_read: bool = True) -> str:
    """What all workers must pass alike, in words: a tensor by its kind, a number by its value.

    Of a plain tensor that is read the values must be alike, too.
    """
    if isinstance(value, torch.Tensor):
        part, where = value, f"plain tensor {tuple(value.shape)}"
        if isinstance(value, Tensor):
            # in `x[1:] += y` the part of `x` is withheld until the view is put back, as it is here
            withheld = value.__dict__.get("_withheld")
            part, where = withheld[0] if withheld else value._part, str(value._layout)
        said = f"{where} of {part.dtype}" + (" that needs a gradient" if part.requires_grad else "")
        # tensors of other kinds, as shards, are a worker's own
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
    """Compare if TESSEL_CHECK says so: on all workers of a job, or on none."""
    switch(transport.checks_calls())


def _first(func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The first torch function of a spread tensor in a process that has joined no job."""
    _as_asked()
    return Tensor.above(func, args, kwargs)


Tensor.above = staticmethod(_first)
transport.when_joined(_as_asked)
