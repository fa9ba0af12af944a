"""The recorder: what this worker does, noted as it happens.

Nothing of this is in the way of a program that is not traced: what moves data (`Move`, `Halo`,
`Group`) is exchanged for something that also looks at the clock, and put back at the end; torch's
own hooks for all modules say which layer runs. What moves inside of the compiled engine passes
`Group.follow`, so it is seen as well.

A worker notes when it came to an exchange and when it left it, not for whom it waited: that follows
when the notes of all workers are put together (`merged`).
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tessel.core.agreement import Agreement
from tessel.core.context import is_compiling
from tessel.core.halo import Halo
from tessel.core.linop import in_transform
from tessel.core.move import Move, Stage
from tessel.core.shared import GradientBucket
from tessel.transport import NOTHING, Group, this_worker
from tessel.transport.buffers import ReceiveBuffer, SendBuffer
from tessel.transport.host import LARGE_FOR_ENGINE

ROWS = ("computing", "packing", "moving", "waiting", "agreeing")
PACKING, MOVING, AGREEING = 1, 2, 4
LIMIT = 200_000  # events, and changes of the layer, of a worker
_MOST_NAMES = 2**16  # of layers that a backward pass may ask for
_HOST_MEMORY, _ENGINE = "shared memory", "shared memory, compiled engine"
_Bytes = dict[int, int]  # by worker
_now = time.monotonic_ns  # which all workers of a host share
_Range = torch._C._profiler._RecordFunctionFast


class Event:
    """Something that took a while.

    Attributes:
        begin, end: nanoseconds.
        row: PACKING for all of a movement, and MOVING or AGREEING for its exchanges.
        layer: whose forward runs, and `is_backward` if it is its derivative.
        operator: that moves; None outside of movements.
        text: what else is known.
        key: of an exchange: the same on all workers that take part.
        others: workers whom it waits for, though it receives nothing of them: those of an
            agreement, and those who read something large where it lies.
        sent, received: bytes, by worker.
        way: by which they went.
        posts: whether this worker's messages leave in it; else it only waits for those of others.
        error: the exception that ended it.
    """

    __slots__ = (
        *("begin", "end", "error", "is_backward", "key", "layer", "operator", "others", "posts"),
        *("received", "row", "sent", "text", "way"),
    )

    def __init__(self, row: int, thread: ThreadNotes, operator: Any, text: str = "") -> None:
        self.row, self.operator, self.text = row, operator, text
        self.layer, self.is_backward = thread.layer()
        self.key: tuple[int, ...] = ()
        self.others: tuple[int, ...] = ()
        self.sent: _Bytes = {}
        self.received: _Bytes = {}
        self.way = self.error = ""
        self.posts = True
        self.begin = _now()
        self.end = self.begin

    @property
    def title(self) -> str:
        """What profilers call it."""
        return f"tessel {ROWS[self.row]} {self.layer}".rstrip()


class Mark(NamedTuple):
    """From here on another layer computes."""

    time: int
    layer: str
    is_backward: bool


class Running(NamedTuple):
    """A module whose forward runs."""

    module: nn.Module
    layer: str
    range: Any


class ThreadNotes:
    """What one thread of this worker does.

    Attributes:
        events: what took a while, in the order in which it ended.
        marks: where another layer began.
        modules: whose forward runs, the innermost last.
        is_inside: of an exchange, which may be made of others.
        bytes: what the exchange that comes next sends and receives, if that is known before.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.name = threading.current_thread().name
        self.events: list[Event] = []
        self.marks: list[Mark] = []
        self.modules: list[Running] = []
        self.operators: list[Any] = []
        self.texts: list[str] = []
        self.is_inside = False
        self.bytes: tuple[_Bytes, _Bytes] | None = None
        self.last: Event | None = None  # the exchange of the engine that may not be finished
        self.backward = -1  # the last backward pass that was noted
        # From which of autograd's sequence numbers on nodes are of which layer, ascending.
        self.numbers: list[int] = []
        self.layers: list[str] = []

    def layer(self) -> tuple[str, bool]:
        """Whose forward runs, or is derived, in this thread."""
        if self.modules:  # also when a checkpoint computes a part again in a backward pass
            return self.modules[-1].layer, False
        node = torch._C._current_autograd_node()
        return ("", False) if node is None else (self.recorder.layer_of(self, node), True)

    def mark(self, layer: str, is_backward: bool = False) -> None:
        if self.recorder.has_room():
            self.marks.append(Mark(_now(), layer, is_backward))

    def note(self, event: Event) -> None:
        event.end = _now()
        if self.recorder.has_room():
            self.events.append(event)
        else:
            self.recorder.add_left_out(event)


class Recorder:
    """All that this worker does while it is recorded.

    Args:
        limit: how many events are kept; what comes later is counted.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.threads: list[ThreadNotes] = []
        self.begin = _now()
        self.num_left_out = 0
        self.full_at: int | None = None  # when the first one was left out
        self.bytes_left_out = [0, 0]  # sent and received in events that were left out
        self.keys: Counter[tuple[int, ...]] = Counter()
        self._room = itertools.count()
        self._own = threading.local()
        self._names: WeakKeyDictionary[nn.Module, dict[int, str]] = WeakKeyDictionary()
        self._bytes: dict[Any, tuple[_Bytes, _Bytes]] = {}
        self._plans: list[Any] = []  # kept alive, so that their identities stay theirs
        self.has_nvtx = torch.cuda.is_available()

    def thread(self) -> ThreadNotes:
        """The notes of this thread."""
        try:
            return self._own.notes
        except AttributeError:
            notes = self._own.notes = ThreadNotes(self)
            self.threads.append(notes)
            return notes

    def has_room(self) -> bool:
        """Whether one more event may be kept."""
        has_room = next(self._room) < self.limit
        if not has_room and self.full_at is None:
            self.full_at = _now()
        return has_room

    @property
    def num_kept(self) -> int:
        return sum(len(each.events) + len(each.marks) for each in self.threads)

    def add_left_out(self, event: Event) -> None:
        self.num_left_out += 1
        self.bytes_left_out[0] += sum(event.sent.values())
        self.bytes_left_out[1] += sum(event.received.values())

    def layer_of(self, thread: ThreadNotes, node: Any) -> str:
        """The layer whose forward made a node of autograd's graph."""
        # Sequence numbers are counted by the thread of the forward; on GPUs the backward pass has a
        # thread of its own, and only one forward thread can be told then.
        if not thread.numbers:
            able = [each for each in self.threads if each.numbers]
            if len(able) != 1:
                return ""
            thread = able[0]
        place = bisect_right(thread.numbers, node._sequence_nr()) - 1
        return thread.layers[place] if place >= 0 else ""

    def number(self, key: tuple[int, ...]) -> tuple[int, ...]:
        """A key of exchanges, with the place of this one among those that have it."""
        self.keys[key] += 1
        return (*key, self.keys[key])

    def name_of(self, module: nn.Module, outer: list[Running]) -> str:
        """What a module is called in the model whose forward runs; its class if it is the model."""
        if not outer:
            return type(getattr(module, "_orig_mod", module)).__name__  # of torch.compile
        root = outer[0].module
        names = self._names.get(root)
        if names is None or id(module) not in names:
            names = {id(each): name for name, each in root.named_modules()}
            self._names[root] = names
        # a module that the model does not hold, as one that its forward has made
        inner = names.get(id(module)) or f"{outer[-1].layer}/{type(module).__name__}"
        return inner.removeprefix("_orig_mod.")  # of torch.compile

    def bytes_of(self, stage: Stage, itemsize: int, is_there: bool) -> tuple[_Bytes, _Bytes]:
        """What a stage sends and receives, by worker."""
        key = id(stage.plan), itemsize, is_there
        found = self._bytes.get(key)
        if found is None:
            plan = stage.plan
            sent = {piece.peer: piece.numel * itemsize for piece in plan.gives}
            received = {piece.peer: piece.numel * itemsize for piece in plan.arrives}
            found = self._bytes[key] = sent, received
            self._plans.append(plan)
        return found


_hooks: list[Any] = []
_filters: list[Any] = []  # of warnings
_replaced: list[tuple[Any, str, Any, Any]] = []  # of which class what, by what


def switch_on(limit: int) -> Recorder:
    """Record from here on."""
    recorder = Recorder(limit)
    for kind, name, wrap in _WRAPPED:
        own = kind.__dict__[name]  # which TESSEL_CHECK may have replaced before
        wrapped = wrap(recorder, own)
        setattr(kind, name, wrapped)
        _replaced.append((kind, name, own, wrapped))
    modules = nn.modules.module
    enter, leave = partial(_enter, recorder), partial(_leave, recorder)
    _hooks.append(modules.register_module_forward_pre_hook(enter))
    _hooks.append(modules.register_module_forward_hook(leave, always_call=True))
    begin = partial(_step, recorder, True)
    _hooks.append(register_optimizer_step_pre_hook(begin))
    end = partial(_step, recorder, False)
    _hooks.append(register_optimizer_step_post_hook(end))
    # compiled modules would say at each call that hooks of all modules see them twice
    warnings.filterwarnings(
        "ignore", message=r"Using `torch\.compile\(module\)` when there are global"
    )
    _filters.append(warnings.filters[0])
    return recorder


def switch_off(recorder: Recorder) -> None:
    """Put everything back as it was."""
    recorder.limit = 0  # hooks of graphs that live on note nothing more
    for kind, name, own, wrapped in _replaced:
        if kind.__dict__[name] is wrapped:
            setattr(kind, name, own)
    _replaced.clear()
    while _hooks:
        _hooks.pop().remove()
    while _filters:
        with suppress(ValueError):  # somebody has taken it away
            warnings.filters.remove(_filters.pop())  # type: ignore[attr-defined]


# -- layers ---------------------------------------------------------------------------------------


def _enter(recorder: Recorder, module: nn.Module, args: Any) -> None:
    if is_compiling():
        return
    notes = recorder.thread()
    layer = recorder.name_of(module, notes.modules)
    shown = _begin_range(recorder, f"tessel computing {layer}")
    notes.modules.append(Running(module, layer, shown))
    _change_layer(notes, layer)


def _leave(recorder: Recorder, module: nn.Module, args: Any, result: Any) -> None:
    if is_compiling():
        return
    notes = recorder.thread()
    if not any(each.module is module for each in notes.modules):
        return  # it was entered before the trace began
    while True:  # what an exception has left is left as well
        left = notes.modules.pop()
        _end_range(recorder, left.range)
        if left.module is module:
            break
    outer = notes.modules[-1].layer if notes.modules else ""
    _change_layer(notes, outer)
    # When the gradient of the result is there, the derivative of the layer begins.
    part = getattr(result, "_part", result)
    if isinstance(part, torch.Tensor) and part.grad_fn is not None and not in_transform():
        part.grad_fn.register_prehook(partial(_derive, recorder, left.layer))


def _derive(recorder: Recorder, layer: str, grads: Any) -> None:
    """The gradient of what a layer gave is there."""
    notes, task = recorder.thread(), torch._C._current_graph_task_id()
    notes.mark(layer, True)
    if task != notes.backward:
        notes.backward = task
        ending = partial(notes.mark, "")
        torch.autograd.Variable._execution_engine.queue_callback(ending)


def _step(recorder: Recorder, begins: bool, optimizer: Any, args: Any, kwargs: Any) -> None:
    recorder.thread().mark(f"{type(optimizer).__name__}.step" if begins else "")


def _change_layer(notes: ThreadNotes, layer: str) -> None:
    notes.mark(layer, torch._C._current_autograd_node() is not None and not notes.modules)
    if torch.is_grad_enabled():
        if len(notes.numbers) >= _MOST_NAMES:
            del notes.numbers[: _MOST_NAMES // 2], notes.layers[: _MOST_NAMES // 2]
        notes.numbers.append(torch.autograd._get_sequence_nr())
        notes.layers.append(layer)


def _begin_range(recorder: Recorder, name: str) -> Any:
    """Show torch's profiler, and Nsight, what runs; `_end_range` takes the result."""
    shown = _Range(name)
    shown.__enter__()
    if recorder.has_nvtx:
        torch.cuda.nvtx.range_push(name)
    return shown


def _end_range(recorder: Recorder, shown: Any) -> None:
    if recorder.has_nvtx:
        torch.cuda.nvtx.range_pop()
    shown.__exit__(None, None, None)


# -- movements ------------------------------------------------------------------------------------

Function = Callable[..., Any]


def _noted(recorder: Recorder, notes: ThreadNotes, event: Event, act: Callable[[], Any]) -> Any:
    """Do something that an event is about."""
    shown = _begin_range(recorder, event.title)
    try:
        return act()
    except BaseException as error:
        event.error = type(error).__name__
        raise
    finally:
        _end_range(recorder, shown)
        notes.note(event)


def _movement(recorder: Recorder, own: Function) -> Function:
    """A method of an operator that moves; if its result is a function, that belongs to it."""

    def move(operator: Any, *args: Any) -> Any:
        if is_compiling():
            return own(operator, *args)
        result = _in_operator(recorder, operator, lambda: own(operator, *args))
        if not callable(result) or isinstance(result, torch.Tensor):
            return result
        return lambda: _in_operator(recorder, operator, result)

    return move


def _in_operator(recorder: Recorder, operator: Any, act: Callable[[], Any]) -> Any:
    notes = recorder.thread()
    event = Event(PACKING, notes, operator)
    notes.operators.append(operator)
    try:
        return _noted(recorder, notes, event, act)
    finally:
        notes.operators.pop()


def _stage(recorder: Recorder, own: Function) -> Function:
    """What may go through the engine: it is known here how much goes to whom."""

    def follow(stage: Stage, x: Any, y: Any, is_there: bool) -> bool:
        notes = recorder.thread()
        notes.bytes = recorder.bytes_of(stage, x.element_size(), is_there)
        try:
            return own(stage, x, y, is_there)
        finally:
            notes.bytes = None

    return follow


def _follow(recorder: Recorder, own: Function) -> Function:
    def follow(group: Group, program: Any, y: Any, x: Any) -> int:
        notes = recorder.thread()
        if notes.is_inside:
            return own(group, program, y, x)
        key = group._key()
        event = _exchange_event(notes)
        shown = _begin_range(recorder, event.title)
        try:
            landed = own(group, program, y, x)
        except BaseException as error:
            event.error, event.key = type(error).__name__, recorder.number(key)
            notes.note(event)
            raise
        finally:
            _end_range(recorder, shown)
        if landed != NOTHING:  # else it goes another way
            event.key, event.way = recorder.number(key), _ENGINE
            event.sent, event.received = notes.bytes or ({}, {})
            event.others = _readers(event.sent)
            notes.note(event)
            notes.last = event
        return landed

    return follow


def _finish(recorder: Recorder, own: Function) -> Function:
    """The rest of what the engine has begun."""

    def finish(group: Group, *args: Any) -> None:
        notes = recorder.thread()
        begun = None if notes.is_inside else notes.last
        try:
            own(group, *args)
        except BaseException as error:
            if begun is not None:
                begun.error = type(error).__name__
            raise
        finally:
            if begun is not None:
                begun.end = _now()

    return finish


def _exchange_event(notes: ThreadNotes) -> Event:
    operator = notes.operators[-1] if notes.operators else None
    return Event(MOVING, notes, operator, notes.texts[-1] if notes.texts else "")


def _fill(event: Event, sends: Iterable[SendBuffer], receives: Iterable[ReceiveBuffer]) -> None:
    worker = this_worker()
    event.sent = {each.worker: each.tensor.nbytes for each in sends if each.worker != worker}
    event.received = {each.worker: each.place.nbytes for each in receives if each.worker != worker}
    event.others = _readers(event.sent)


def _readers(sent: _Bytes) -> tuple[int, ...]:
    """The workers that read what they get where it lies: its owner waits until they have."""
    return tuple(worker for worker, num_bytes in sent.items() if num_bytes > LARGE_FOR_ENGINE)


def _inside(recorder: Recorder, notes: ThreadNotes, event: Event, act: Callable[[], Any]) -> Any:
    """The same as `_noted` with an exchange, whose own exchanges are part of it."""
    notes.is_inside = True
    try:
        return _noted(recorder, notes, event, act)
    finally:
        notes.is_inside = False


def _exchange(recorder: Recorder, own: Function) -> Function:
    """Messages that are started; the result waits for them."""

    def exchange(
        group: Group, sends: Any, receives: Any, device: Any, dense: bool = False
    ) -> Callable[[], None]:
        notes = recorder.thread()
        if notes.is_inside:
            return own(group, sends, receives, device, dense)
        event = _exchange_event(notes)
        event.key = recorder.number(group._key())
        event.way = _way(group, device, dense)
        _fill(event, sends, receives)
        come, event.received = event.received, {}
        readers, event.others = event.others, ()
        wait = _inside(recorder, notes, event, lambda: own(group, sends, receives, device, dense))

        def arrive() -> None:
            here = recorder.thread()
            if here.is_inside:
                return wait()
            arrival = _exchange_event(here)
            arrival.key, arrival.way, arrival.posts = event.key, event.way, False
            arrival.layer, arrival.is_backward = event.layer, event.is_backward
            arrival.received, arrival.others = come, readers
            return _inside(recorder, here, arrival, wait)

        return arrive

    return exchange


def _exchange_at_once(recorder: Recorder, own: Function) -> Function:
    """Messages that are waited for at once; also those that a GPU gets, wherever they come to."""

    def exchange(
        group: Group, sends: Any, receives: Any, device: Any, *dense: Any, **named: Any
    ) -> Any:
        act = partial(own, group, sends, receives, device, *dense, **named)
        notes = recorder.thread()
        if notes.is_inside:
            return act()
        event = _exchange_event(notes)
        event.key = recorder.number(group._key())
        event.way = _way(group, device, any((*dense, *named.values())))
        _fill(event, sends, receives)
        return _inside(recorder, notes, event, act)

    return exchange


def _on_devices(recorder: Recorder, own: Function) -> Function:
    """A collective that the library of the GPUs makes, in a ring; the result waits for it."""

    def start(
        group: Group, name: str, size: int, begin: Callable[[], Callable[[], None]]
    ) -> Callable[[], None]:
        notes = recorder.thread()
        event = _exchange_event(notes)
        event.key = recorder.number(group._key())
        event.way = f"{name} of {torch.distributed.get_backend(group.handle)}"
        place = group.workers.index(this_worker())
        event.sent = {group.workers[(place + 1) % group.size]: size}
        event.received = {group.workers[place - 1]: size}
        event.others = group.workers
        wait = _inside(recorder, notes, event, lambda: own(group, name, size, begin))

        def arrive() -> None:
            here = recorder.thread()
            arrival = _exchange_event(here)
            arrival.key, arrival.way, arrival.posts = event.key, event.way, False
            arrival.others = group.workers
            return _inside(recorder, here, arrival, wait)

        return arrive

    return start


def _way(group: Group, device: torch.device, dense: bool) -> str:
    """By which way messages go."""
    ways = group._ways
    if device.type == "cpu" and ways.all_near:
        return _HOST_MEMORY
    backend = torch.distributed.get_backend(group.handle)
    if device.type == "cuda" or (dense and not group._membership.tag and ways.are_all_by_gloo):
        return f"one all-to-all of {backend}"
    far = backend if ways.mpi is None else "MPI"
    return f"messages of {far}" + (f", and {_HOST_MEMORY}" if ways.near else "")


def _sum(recorder: Recorder, own: Function) -> Function:
    """The sum of a few numbers, which goes to everybody."""

    def add(group: Group, value: Any) -> Any:
        notes = recorder.thread()
        others = {worker: value.nbytes for worker in group.workers if worker != this_worker()}
        notes.bytes = others, others
        try:
            return _with_text(recorder, "sum of a small tensor", lambda: own(group, value))
        finally:
            notes.bytes = None

    return add


def _agreement(recorder: Recorder, own: Function) -> Function:
    """Words that all workers of a group exchange before they move something."""

    def share(group: Group, said: Any) -> Any:
        notes = recorder.thread()
        if notes.is_inside or group.size == 1:
            return own(group, said)
        event = Event(AGREEING, notes, None, notes.texts[-1] if notes.texts else "")
        event.key = recorder.number((group._code, ~(group.num_exchanges << 1 | 1)))
        event.others = group.workers
        notes.last = event
        return _inside(recorder, notes, event, lambda: own(group, said))

    return share


def _by_wire(recorder: Recorder, own: Function) -> Function:
    """What else workers do together: objects that they share, groups that they make."""

    def attempt(group: Group, communicate: Any, key: Any = None) -> Any:
        notes = recorder.thread()
        if notes.is_inside:
            return own(group, communicate, key)
        event = Event(AGREEING, notes, None, notes.texts[-1] if notes.texts else "set-up")
        event.key = recorder.number((group._code, 0))
        event.others = group.workers
        return _inside(recorder, notes, event, lambda: own(group, communicate, key))

    return attempt


def _labelled(recorder: Recorder, own: Function) -> Function:
    """An agreement that knows what it is about."""

    def agree_on(agreement: Agreement[Any], x: Any) -> Any:
        return _with_text(recorder, agreement.label, lambda: own(agreement, x))

    return agree_on


def _compared(recorder: Recorder, own: Function) -> Function:
    """The comparison after an agreement, which says what it was about."""

    def check(group: Group, everyones: bytes, call: Any) -> None:
        last = recorder.thread().last
        if last is not None and last.row == AGREEING and isinstance(call, str):
            last.text = call
        own(group, everyones, call)

    return check


def _gradients(recorder: Recorder, own: Function) -> Function:
    """A bucket of gradients."""

    def start(bucket: GradientBucket, grads: Any) -> Any:
        text = f"gradients of {len(bucket.shapes)} parameters"
        arrive = _with_text(recorder, text, lambda: own(bucket, grads))
        return lambda: _with_text(recorder, text, arrive)

    return start


def _with_text(recorder: Recorder, text: str, act: Callable[[], Any]) -> Any:
    notes = recorder.thread()
    notes.texts.append(text)
    try:
        return act()
    finally:
        notes.texts.pop()


_WRAPPED: tuple[tuple[Any, str, Callable[[Recorder, Function], Function]], ...] = (
    *((Move, name, _movement) for name in ("_apply", "start", "start_adding")),
    *((Move, name, _movement) for name in ("start_apart", "complete")),
    *((Halo, name, _movement) for name in ("start", "start_adjoint", "finish", "add_arrived")),
    (Stage, "_follow", _stage),
    (Group, "follow", _follow),
    (Group, "finish", _finish),
    (Group, "exchange", _exchange),
    (Group, "exchange_at_once", _exchange_at_once),
    (Group, "bring", _exchange_at_once),
    (Group, "_on_devices", _on_devices),
    (Group, "sum", _sum),
    (Group, "share", _agreement),
    (Group, "attempt_by_wire", _by_wire),
    (Group, "check_same_call", _compared),
    (Agreement, "agree_on", _labelled),
    (GradientBucket, "start", _gradients),
)
