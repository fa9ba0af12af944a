"""The recorder: events of this worker, recorded as they happen.

It has no overhead in programs that are not traced: methods that move data (of `Move`, `Halo`,
`Group`) are replaced by versions that also read the clock, and restored at the end; torch's global
module hooks report the running layer. Moves in the compiled engine pass through `Group.follow`, so
they are also recorded.

A worker records when it entered and left an exchange, not which worker it waited for: that follows
when the records of all workers are merged (`merged`).
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
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
from tessel.core.context import in_transform, is_compiling
from tessel.core.halo import Halo
from tessel.core.move import Move, Stage
from tessel.core.shared import GradientBucket
from tessel.transport import NOTHING, Group, this_worker
from tessel.transport.buffers import ReceiveBuffer, SendBuffer
from tessel.transport.copy_program import CopyProgram
from tessel.transport.host import LARGE_FOR_ENGINE

ROWS = ("computing", "packing", "moving", "waiting", "agreeing")
PACKING, MOVING, AGREEING = 1, 2, 4
LIMIT = 200_000  # events, and changes of the layer, of a worker
_MOST_NAMES = 2**16  # of layers, for the backward pass
_HOST_MEMORY, _ENGINE = "shared memory", "shared memory, compiled engine"
_Bytes = dict[int, int]  # by worker
_now = time.monotonic_ns  # which all workers of a host share
_Range = torch._C._profiler._RecordFunctionFast


class Event:
    """An event with a duration.

    Attributes:
        begin, end: nanoseconds.
        row: PACKING for a whole movement, and MOVING or AGREEING for its exchanges.
        layer: the layer whose forward runs, or its backward if `is_backward`.
        operator: the operator that moves; None outside of movements.
        text: further information.
        key: the key of an exchange, the same on all workers that take part.
        others: workers that it waits for without receiving from them: those of an agreement, and
            those that read a large tensor directly.
        sent, received: the bytes, by worker.
        way: the way of the messages.
        posts: whether this worker sends its messages in it; otherwise it only waits for those of
            others.
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
        """The name of the event in profilers."""
        return f"tessel {ROWS[self.row]} {self.layer}".rstrip()


class Mark(NamedTuple):
    """The time from which another layer computes."""

    time: int
    layer: str
    is_backward: bool


class Running(NamedTuple):
    """A module whose forward is running."""

    module: nn.Module
    layer: str
    range: Any


class ThreadNotes:
    """The record of one thread of this worker.

    Attributes:
        events: the events, in the order in which they ended.
        marks: the times at which another layer began.
        modules: the modules whose forward is running, the innermost last.
        is_inside: whether it is inside an exchange, which may consist of others.
        bytes: the bytes that the next exchange sends and receives, if known in advance.
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
        # The first of autograd's sequence numbers for the nodes of each layer, ascending.
        self.numbers: list[int] = []
        self.layers: list[str] = []

    def layer(self) -> tuple[str, bool]:
        """The layer whose forward or backward runs in this thread."""
        if self.modules:  # also when a checkpoint recomputes in a backward pass
            return self.modules[-1].layer, False
        node = torch._C._current_autograd_node()
        return ("", False) if node is None else (self.recorder.layer_of(self, node), True)

    def mark(self, layer: str, is_backward: bool = False) -> None:
        if self.recorder.has_room():
            self.marks.append(Mark(_now(), layer, is_backward))

    def change_layer(self, layer: str) -> None:
        """Another layer computes from here on."""
        self.mark(layer, torch._C._current_autograd_node() is not None and not self.modules)
        if torch.is_grad_enabled():
            if len(self.numbers) >= _MOST_NAMES:
                del self.numbers[: _MOST_NAMES // 2], self.layers[: _MOST_NAMES // 2]
            self.numbers.append(torch.autograd._get_sequence_nr())
            self.layers.append(layer)

    def note(self, event: Event) -> None:
        event.end = _now()
        if self.recorder.has_room():
            self.events.append(event)
        else:
            self.recorder.add_left_out(event)


class Recorder:
    """The record of this worker.

    Args:
        limit: the largest number of events; later ones are only counted.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.changes = ExitStack()  # of torch's and our functions, undone when closed
        self.threads: list[ThreadNotes] = []
        self.begin = _now()
        self.num_left_out = 0
        self.full_at: int | None = None  # when the first event was left out
        self.bytes_left_out = [0, 0]  # sent and received in events that were left out
        self.keys: Counter[tuple[int, ...]] = Counter()
        self._room = itertools.count()
        self._own = threading.local()
        self._names: WeakKeyDictionary[nn.Module, dict[int, str]] = WeakKeyDictionary()
        self._bytes: dict[Any, tuple[_Bytes, _Bytes]] = {}
        self._plans: list[Any] = []  # kept alive, so that their identities are not reused
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
        """Whether another event may be recorded."""
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
        # Sequence numbers are counted per forward thread; on GPUs the backward pass has its own
        # thread, and then only one forward thread can be identified.
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
        """The name of a module in the model whose forward runs; the class of the model itself."""
        if not outer:
            return type(getattr(module, "_orig_mod", module)).__name__  # of torch.compile
        root = outer[0].module
        names = self._names.get(root)
        if names is None or id(module) not in names:
            names = {id(each): name for name, each in root.named_modules()}
            self._names[root] = names
        # a module that the model does not contain, such as one that its forward has created
        inner = names.get(id(module)) or f"{outer[-1].layer}/{type(module).__name__}"
        return inner.removeprefix("_orig_mod.")  # of torch.compile

    def bytes_of(self, stage: Stage, itemsize: int, is_there: bool) -> tuple[_Bytes, _Bytes]:
        """The bytes that a stage sends and receives, by worker."""
        key = id(stage.plan), itemsize, is_there
        found = self._bytes.get(key)
        if found is None:
            plan = stage.plan
            sent = {piece.peer: piece.numel * itemsize for piece in plan.gives}
            received = {piece.peer: piece.numel * itemsize for piece in plan.arrives}
            found = self._bytes[key] = sent, received
            self._plans.append(plan)
        return found

    def enter(self, module: nn.Module, args: Any) -> None:
        """The forward of a module begins."""
        if is_compiling():
            return
        notes = self.thread()
        layer = self.name_of(module, notes.modules)
        shown = self.begin_range(f"tessel computing {layer}")
        notes.modules.append(Running(module, layer, shown))
        notes.change_layer(layer)

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """The forward of a module has ended."""
        if is_compiling():
            return
        notes = self.thread()
        if not any(each.module is module for each in notes.modules):
            return  # it was entered before the trace began
        while True:  # leave modules that an exception has left
            left = notes.modules.pop()
            self.end_range(left.range)
            if left.module is module:
                break
        notes.change_layer(notes.modules[-1].layer if notes.modules else "")
        # The backward of the layer begins with the gradient of its result.
        part = getattr(result, "_part", result)
        if isinstance(part, torch.Tensor) and part.grad_fn is not None and not in_transform():
            part.grad_fn.register_prehook(partial(self.derive, left.layer))

    def derive(self, layer: str, grads: Any) -> None:
        """Record that the gradient of a layer's output is available."""
        notes, task = self.thread(), torch._C._current_graph_task_id()
        notes.mark(layer, True)
        if task != notes.backward:
            notes.backward = task
            ending = partial(notes.mark, "")
            torch.autograd.Variable._execution_engine.queue_callback(ending)

    def step(self, begins: bool, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The step of an optimizer begins, or has ended."""
        self.thread().mark(f"{type(optimizer).__name__}.step" if begins else "")

    def begin_range(self, name: str) -> Any:
        """Begin a range in torch's profiler and in Nsight; pass the result to `end_range`."""
        shown = _Range(name)
        shown.__enter__()
        if self.has_nvtx:
            torch.cuda.nvtx.range_push(name)
        return shown

    def end_range(self, shown: Any) -> None:
        if self.has_nvtx:
            torch.cuda.nvtx.range_pop()
        shown.__exit__(None, None, None)


def switch_on(limit: int) -> Recorder:
    """Record from here on."""
    recorder = Recorder(limit)
    for kind, name, around in _WRAPPED:
        own = kind.__dict__[name]  # which TESSEL_CHECK may have replaced before
        wrapped = _wrapped(recorder, own, around)
        setattr(kind, name, wrapped)
        recorder.changes.callback(put_back, kind, name, own, wrapped)
    modules = nn.modules.module
    for hook in (
        modules.register_module_forward_pre_hook(recorder.enter),
        modules.register_module_forward_hook(recorder.leave, always_call=True),
        register_optimizer_step_pre_hook(partial(recorder.step, True)),
        register_optimizer_step_post_hook(partial(recorder.step, False)),
    ):
        recorder.changes.callback(hook.remove)
    # compiled modules would warn at each call that global module hooks run twice
    warnings.filterwarnings(
        "ignore", message=r"Using `torch\.compile\(module\)` when there are global"
    )
    recorder.changes.enter_context(suppress(ValueError))  # somebody may have taken it away
    recorder.changes.callback(warnings.filters.remove, warnings.filters[0])  # type: ignore[attr-defined]
    return recorder


def put_back(kind: Any, name: str, own: AnyFunction, wrapped: AnyFunction) -> None:
    """Put a function back that was replaced, unless somebody has replaced it again."""
    if kind.__dict__[name] is wrapped:
        setattr(kind, name, own)


def switch_off(recorder: Recorder) -> None:
    """Put everything back as it was."""
    recorder.limit = 0  # hooks of graphs that live on note nothing more
    recorder.changes.close()


# The events around a replaced function are recorded by a context manager, which gets the recorder
# and the arguments of the function. If the function only starts something, and returns an object to
# wait for, the context manager yields another one, for the wait.

AnyFunction = Callable[..., Any]
Later = Callable[[], AbstractContextManager[Any]]


def _wrapped(recorder: Recorder, own: AnyFunction, around: AnyFunction) -> AnyFunction:
    """A function whose calls, and the waits for their results, are recorded."""
    if around is _follow:
        return _follow(recorder, own)

    def call(*args: Any, **named: Any) -> Any:
        if around is movement and is_compiling():
            return own(*args, **named)  # which becomes a node of a graph
        with around(recorder, *args, **named) as later:
            result = own(*args, **named)
        if later is None or not callable(result) or isinstance(result, torch.Tensor):
            return result

        def wait() -> Any:
            with later():
                return result()

        return wait

    return call


@contextmanager
def noted(notes: ThreadNotes, event: Event) -> Iterator[None]:
    """An event, which ends with the block; the exchanges of an exchange are part of it."""
    shown, was_inside = notes.recorder.begin_range(event.title), notes.is_inside
    notes.is_inside = was_inside or event.row != PACKING
    try:
        yield
    except BaseException as error:
        event.error = type(error).__name__
        raise
    finally:
        notes.is_inside = was_inside
        notes.recorder.end_range(shown)
        notes.note(event)


@contextmanager
def about(recorder: Recorder, text: str) -> Iterator[None]:
    """Describe the exchanges inside the block by a text."""
    notes = recorder.thread()
    notes.texts.append(text)
    try:
        yield
    finally:
        notes.texts.pop()


@contextmanager
def known_bytes(recorder: Recorder, sent: _Bytes, received: _Bytes) -> Iterator[None]:
    """Set the bytes that the exchange inside the block sends to and receives from each worker."""
    notes = recorder.thread()
    notes.bytes = sent, received
    try:
        yield
    finally:
        notes.bytes = None


@contextmanager
def movement(recorder: Recorder, operator: Any, *args: Any) -> Iterator[Later]:
    """Record a method of an operator that moves, starts a move, or waits for one."""
    notes = recorder.thread()
    event = Event(PACKING, notes, operator)
    notes.operators.append(operator)
    try:
        with noted(notes, event):
            yield lambda: movement(recorder, operator)
    finally:
        notes.operators.pop()


def stage(recorder: Recorder, stage: Stage, x: Any, y: Any, is_there: bool) -> Any:
    """Record the bytes of a stage, which the engine may run."""
    return known_bytes(recorder, *recorder.bytes_of(stage, x.element_size(), is_there))


def _follow(recorder: Recorder, own: AnyFunction) -> AnyFunction:
    """Record an exchange of the engine, if its result shows that it ran."""

    def follow(group: Group, program: CopyProgram, *exchange: Any) -> int:
        notes = recorder.thread()
        if notes.is_inside:
            return own(group, program, *exchange)
        key = group._key()
        event = _exchange_event(notes)
        shown = recorder.begin_range(event.title)
        try:
            num_received = own(group, program, *exchange)
        except BaseException as error:
            event.error, event.key = type(error).__name__, recorder.number(key)
            notes.note(event)
            raise
        finally:
            recorder.end_range(shown)
        if num_received != NOTHING:  # otherwise it is sent in another way
            event.key, event.way = recorder.number(key), _ENGINE
            event.sent, event.received = notes.bytes or ({}, {})
            event.others = program.readers
            notes.note(event)
            notes.last = event
        return num_received

    return follow


@contextmanager
def finish(recorder: Recorder, group: Group, *args: Any) -> Iterator[None]:
    """Record the rest of an exchange that the engine has started."""
    notes = recorder.thread()
    begun = None if notes.is_inside else notes.last
    try:
        yield
    except BaseException as error:
        if begun is not None:
            begun.error = type(error).__name__
        raise
    finally:
        if begun is not None:
            begun.end = _now()


def _exchange_event(notes: ThreadNotes) -> Event:
    operator = notes.operators[-1] if notes.operators else None
    return Event(MOVING, notes, operator, notes.texts[-1] if notes.texts else "")


@contextmanager
def exchange(
    recorder: Recorder,
    group: Group,
    sends: Iterable[SendBuffer],
    receives: Iterable[ReceiveBuffer],
    device: torch.device,
    dense: bool = False,
    *prepared: Any,
    at_once: bool = False,
) -> Iterator[Later | None]:
    """Messages that are started, or waited for at once; then also those that a GPU gets."""
    notes = recorder.thread()
    if notes.is_inside:
        yield None
        return
    event = _exchange_event(notes)
    event.key, event.way = recorder.number(group._key()), _way(group, device, dense)
    own = this_worker()
    event.sent = {each.worker: each.tensor.nbytes for each in sends if each.worker != own}
    come = {each.worker: each.place.nbytes for each in receives if each.worker != own}
    # workers that read directly: the owner waits until they have
    readers = tuple(worker for worker, size in event.sent.items() if size > LARGE_FOR_ENGINE)
    if at_once:
        event.received, event.others = come, readers
    with noted(notes, event):
        yield None if at_once else lambda: exchange_wait(recorder, event, come, readers)


@contextmanager
def exchange_wait(
    recorder: Recorder, begun: Event, received: _Bytes, others: tuple[int, ...]
) -> Iterator[None]:
    """Record the wait for an exchange, and for workers that read the sent tensor directly."""
    notes = recorder.thread()
    if notes.is_inside:
        yield
        return
    event = _exchange_event(notes)
    event.key, event.way, event.posts = begun.key, begun.way, False
    event.layer, event.is_backward = begun.layer, begun.is_backward
    event.received, event.others = received, others
    with noted(notes, event):
        yield


@contextmanager
def on_devices(
    recorder: Recorder, group: Group, name: str, size: int, begin: Any
) -> Iterator[Later]:
    """A collective that the library of the GPUs makes, in a ring."""
    notes = recorder.thread()
    event = _exchange_event(notes)
    event.key = recorder.number(group._key())
    event.way = f"{name} of {torch.distributed.get_backend(group.handle)}"
    place = group.workers.index(this_worker())
    event.sent = {group.workers[(place + 1) % group.size]: size}
    event.received = {group.workers[place - 1]: size}
    event.others = group.workers
    with noted(notes, event):
        yield lambda: exchange_wait(recorder, event, {}, group.workers)


def _way(group: Group, device: torch.device, dense: bool) -> str:
    """The way by which messages are sent."""
    ways = group._ways
    if device.type == "cpu" and ways.all_near:
        return _HOST_MEMORY
    backend = torch.distributed.get_backend(group.handle)
    if device.type == "cuda" or (dense and not group._membership.tag and ways.are_all_by_gloo):
        return f"one all-to-all of {backend}"
    far = backend if ways.mpi is None else "MPI"
    return f"messages of {far}" + (f", and {_HOST_MEMORY}" if ways.near else "")


@contextmanager
def small_sum(recorder: Recorder, group: Group, value: Any) -> Iterator[None]:
    """Record an all-reduce of a few numbers."""
    others = {worker: value.nbytes for worker in group.workers if worker != this_worker()}
    with known_bytes(recorder, others, others), about(recorder, "sum of a small tensor"):
        yield


@contextmanager
def agreement(
    recorder: Recorder, group: Group, *args: Any, by_wire: bool = False
) -> Iterator[None]:
    """Record an agreement, or, by wire, another collective call: shared objects, new groups."""
    notes = recorder.thread()
    if notes.is_inside or (group.size == 1 and not by_wire):
        yield
        return
    text = "set-up" if by_wire else ""
    event = Event(AGREEING, notes, None, notes.texts[-1] if notes.texts else text)
    number = 0 if by_wire else ~(group.num_exchanges << 1 | 1)
    event.key, event.others = recorder.number((group._code, number)), group.workers
    notes.last = notes.last if by_wire else event
    with noted(notes, event):
        yield


@contextmanager
def comparison(recorder: Recorder, group: Group, codes: Any, call: Any) -> Iterator[None]:
    """Record the call that follows an agreement, which names it."""
    last = recorder.thread().last
    if last is not None and last.row == AGREEING and isinstance(call, str):
        last.text = call
    yield


@contextmanager
def gradients(recorder: Recorder, bucket: GradientBucket, grads: Any) -> Iterator[Later]:
    """A bucket of gradients."""
    text = f"gradients of {len(bucket.shapes)} parameters"
    with about(recorder, text):
        yield lambda: about(recorder, text)


_WRAPPED: tuple[tuple[Any, str, AnyFunction], ...] = (
    *((Move, name, movement) for name in ("_apply", "_apply_into", "start")),
    *((Move, name, movement) for name in ("start_adding", "start_apart", "complete")),
    *((Halo, name, movement) for name in ("start", "start_adjoint", "finish", "add_arrived")),
    (Stage, "_follow", stage),
    (Group, "follow", _follow),
    (Group, "finish", finish),
    (Group, "exchange", exchange),
    (Group, "exchange_at_once", partial(exchange, at_once=True)),
    (Group, "bring", partial(exchange, at_once=True)),
    (Group, "_on_devices", on_devices),
    (Group, "sum", small_sum),
    (Group, "share", agreement),
    (Group, "attempt_by_wire", partial(agreement, by_wire=True)),
    (Group, "check_same_call", comparison),
    (Agreement, "agree_on", lambda recorder, agreement, x, *out: about(recorder, agreement.label)),
    (GradientBucket, "start", gradients),
)
