"""One trace from the records of all workers, in Chrome's format, with the waits between workers.

A worker waits in an exchange from its entry until the last of the workers that it needs has
entered: both are known when the records of all are merged. So waits in the loop of the compiled
engine are found as well as those in Python, without any overhead in them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from tessel.core.halo import Halo
from tessel.core.layout import Layout
from tessel.core.move import Move
from tessel.tracing.recorder import PACKING, ROWS, Event, Recorder
from tessel.version import __version__

WorkerNotes = dict[str, Any]  # the record of one worker, in lists, numbers and text
COMPUTING, WAITING = ROWS.index("computing"), ROWS.index("waiting")
_OF_BYTES = ("bytes_sent", "bytes_received", "sent", "received", "by")
_THREAD = 10  # rows of a thread, of which a few are used
_SHORTEST = 100  # nanoseconds of computing that are shown


class Noted(NamedTuple):
    """An event in the form that is sent: a list, with numbers instead of texts, which repeat.

    See `Event` for the meaning of the fields; `source` and `target` are layouts.
    """

    begin: int
    end: int
    row: int
    is_backward: int
    posts: int
    others: list[int]
    sent: dict[str, int]
    received: dict[str, int]
    layer: Any
    kind: Any
    source: Any
    target: Any
    text: Any
    key: Any
    way: Any
    error: Any

    @classmethod
    def of(cls, event: Event, number: Callable[[str], int]) -> Noted:
        """An event, with the numbers of its texts."""
        operator, ends = event.operator, ("", "", "")
        if operator is not None:
            ends = kind_of(operator), str(operator.domain), str(operator.codomain)
        key = " ".join(map(str, event.key))
        sent, received = (
            {str(peer): count for peer, count in each.items()}
            for each in (event.sent, event.received)
        )
        times = event.begin, event.end, event.row, int(event.is_backward), int(event.posts)
        texts = event.layer, *ends, event.text, key, event.way, event.error
        return cls(*times, list(event.others), sent, received, *map(number, texts))

    @classmethod
    def read(cls, found: list[Any], texts: list[str], clock: Callable[[int], int]) -> Noted:
        """The same with its texts, and by the clock of the first worker."""
        begin, end, *numbers = found[:_NUMBERS]
        rest = (texts[number] for number in found[_NUMBERS:])
        return cls(clock(begin), clock(end), *numbers, *rest)


_NUMBERS = Noted._fields.index("layer")  # texts follow


def part_of(recorder: Recorder, worker: int, host: str, begin: int, end: int) -> WorkerNotes:
    """The record of this worker between two times."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    threads = []
    for notes in recorder.threads:
        events = [e for e in list(notes.events) if begin <= e.begin and e.end <= end]
        marks = [mark for mark in list(notes.marks) if begin <= mark.time <= end]
        if events or marks:
            threads.append(
                {
                    "name": notes.name,
                    "events": [Noted.of(event, number) for event in events],
                    "marks": [[m.time, number(m.layer), int(m.is_backward)] for m in marks],
                }
            )
    return {
        "worker": worker,
        "host": host,
        "begin": begin,
        "end": min(end, recorder.full_at or end),
        "left_out": recorder.num_left_out,
        "bytes_left_out": recorder.bytes_left_out,
        "threads": threads,
        "clock": [],
        "texts": list(texts),
    }


def kind_of(operator: Any) -> str:
    """The name of a movement."""
    if isinstance(operator, Halo):
        return "halo exchange"
    if not isinstance(operator, Move):
        return type(operator).__name__
    source, target = operator.domain, operator.codomain
    is_sum, copies = not source.owns_once, has_copies(target)
    if is_sum and not has_copies(source):
        return "adjoint of a halo exchange"
    if is_sum:
        return "all-reduce" if copies else "sum-reduce"
    if copies:
        return "broadcast" if len(source.partition.ranks) == 1 else "all-gather"
    if source.partition == target.partition and not target.owns_once:
        return "halo exchange"
    return "repartition"


def has_copies(layout: Layout) -> bool:
    """Whether several workers hold the same box."""
    axes = {axis for cut in layout.cuts for axis in cut.axes}
    sizes = layout.partition.shape
    return any(size > 1 for axis, size in enumerate(sizes) if axis not in axes)


def merge(parts: list[WorkerNotes], num_workers: int) -> dict[str, Any]:
    """The trace of all workers whose parts exist."""
    parts = sorted(parts, key=lambda part: int(part["worker"]))
    clocks = {part["worker"]: corrected(part["clock"]) for part in parts}
    # the events of each worker, by thread; and when each entered each exchange
    noted: dict[int, list[list[Noted]]] = {}
    posted: dict[str, dict[int, int]] = {}
    for part in parts:
        worker, texts = part["worker"], part["texts"]
        noted[worker] = [
            [Noted.read(each, texts, clocks[worker]) for each in thread["events"]]
            for thread in part["threads"]
        ]
        for event in chain.from_iterable(noted[worker]):
            if event.key and event.posts:
                posted.setdefault(event.key, {})[worker] = event.begin
    zero = min(clocks[part["worker"]](part["begin"]) for part in parts)
    shown: list[dict[str, Any]] = []
    for part in parts:
        worker = part["worker"]
        shown += names(worker, part["host"], [each["name"] for each in part["threads"]])
        for place, events in enumerate(noted[worker]):
            found = pieces(part, place, events, posted, clocks[worker])
            for begin, end, row, name, args in found:
                when = {"ts": (begin - zero) / 1e3, "dur": (end - begin) / 1e3}
                what = {"name": name, "cat": ROWS[row], "ph": "X", **when}
                shown.append({**what, "pid": worker, "tid": place * _THREAD + row, "args": args})
    shown.sort(key=lambda event: (event["ph"] != "M", event["ts"]))
    by_worker = {str(part["worker"]): part for part in parts}
    full = {worker: part for worker, part in by_worker.items() if part["left_out"]}
    about = {
        "version": __version__,
        "workers": num_workers,
        "missing": sorted({*range(num_workers)} - {part["worker"] for part in parts}),
        "hosts": {worker: part["host"] for worker, part in by_worker.items()},
        "left_out": {worker: part["left_out"] for worker, part in full.items()},
        "bytes_left_out": {worker: part["bytes_left_out"] for worker, part in full.items()},
        "clock_offsets_ns": {w: part["clock"] for w, part in by_worker.items() if part["clock"]},
    }
    return {"traceEvents": shown, "displayTimeUnit": "ms", "tessel": about}


def names(worker: int, host: str, threads: list[str]) -> Iterator[dict[str, Any]]:
    """The names of a worker and its rows in a viewer."""

    def say(what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"name": what, "ph": "M", "ts": 0, "pid": worker, "tid": tid, "args": args}

    yield say("process_name", 0, name=f"worker {worker} on {host.partition(' ')[0]}")
    yield say("process_sort_index", 0, sort_index=worker)
    for place, thread in enumerate(threads or [""]):
        for row, name in enumerate(ROWS):
            tid, other = place * _THREAD + row, f" (thread {thread})" if place else ""
            yield say("thread_name", tid, name=name + other)
            yield say("thread_sort_index", tid, sort_index=tid)


def corrected(clock: list[list[int]]) -> Callable[[int], int]:
    """The function from a worker's time to that of the first one, with a linear offset."""
    if not clock:
        return lambda time: time
    (start, before), (stop, after) = clock[0], clock[-1]
    drift = (after - before) / (stop - start) if stop > start else 0.0
    return lambda time: time + before + round(drift * (time - start))


TimedPiece = tuple[int, int, int, str, dict[str, Any]]  # begin, end, row, name, arguments


def pieces(
    part: WorkerNotes, place: int, events: list[Noted], posted: Any, clock: Callable[[int], int]
) -> Iterator[TimedPiece]:
    """The activities of a thread, each moment in one row."""
    # A movement starts before its exchanges, which cut it into pieces of packing.
    events = sorted(events, key=lambda event: (event.begin, -event.end))
    taken: list[tuple[int, int]] = []  # intervals without computing
    for event in events:
        if event.row == PACKING:
            continue
        begin, end, args = event.begin, event.end, _arguments(event)
        others = {*map(int, event.received), *event.others} - {part["worker"]}
        came = posted.get(event.key, {})
        # Workers that are not in the trace have not entered, if the wait failed.
        lost = sorted(others - {*came}) if event.error else []
        last = max((each for each in others if each in came), key=lambda w: came[w], default=None)
        until = end if lost else begin if last is None else min(max(came[last], begin), end)
        if until > begin:
            for_whom: list[Any] = lost or [last]
            inner = {k: v for k, v in args.items() if k not in _OF_BYTES}
            inner |= {"worker": for_whom[0], "in": ROWS[event.row]}
            yield (
                begin,
                until,
                WAITING,
                f"waiting for worker {', '.join(map(str, for_whom))}",
                inner,
            )
        name = args["about"] or args["kind"] or ROWS[event.row]
        yield until, end, event.row, _titled(args, name), args
        taken.append((begin, end))
    outer: list[tuple[int, int]] = []
    for event in events:
        # one inside of another is part of it, and has the same name
        if event.row != PACKING or (outer and event.end <= outer[-1][1]):
            continue
        begin, end, args = event.begin, event.end, _arguments(event)
        inside = taken[bisect_left(taken, (begin, begin)) : bisect_right(taken, (end, end))]
        for first, stop in _gaps(inside, begin, end):
            yield first, stop, PACKING, _titled(args, f"packing of {args['kind']}"), args
        outer.append((begin, end))
    yield from computing(part, place, sorted([*taken, *outer]), clock)


def computing(
    part: WorkerNotes, place: int, busy: list[tuple[int, int]], clock: Callable[[int], int]
) -> Iterator[TimedPiece]:
    """The remaining time of a thread, cut where another layer begins."""
    # The first thread computes during the whole trace, others from their first event to their last.
    begin, end = clock(part["begin"]), clock(part["end"])
    if place > 0:
        if not busy:
            return
        begin, end = busy[0][0], max(stop for _, stop in busy)
    marks = [
        (clock(time), part["texts"][layer], back)
        for time, layer, back in part["threads"][place]["marks"]
    ]
    at, layer, back = 0, "", 0
    for start, end_of_gap in _gaps(busy, begin, end):
        while start < end_of_gap:
            while at < len(marks) and marks[at][0] <= start:
                _, layer, back = marks[at]
                at += 1
            stop = min(end_of_gap, marks[at][0]) if at < len(marks) else end_of_gap
            if stop - start >= _SHORTEST:
                args = {"layer": layer, "pass": "backward" if back else "forward"}
                yield start, stop, COMPUTING, _titled(args, "") or "outside of layers", args
            start = stop


def _titled(args: dict[str, Any], name: str) -> str:
    layer = args["layer"]
    back = " (backward)" if args["pass"] == "backward" else ""
    return (f"{layer}{back}: {name}" if name else f"{layer}{back}") if layer else name + back


def _arguments(event: Noted) -> dict[str, Any]:
    """The arguments of an event in the trace."""
    found: dict[str, Any] = {
        "layer": event.layer,
        "pass": "backward" if event.is_backward else "forward",
        "kind": event.kind,
        "from": event.source,
        "to": event.target,
        "about": event.text,
        "bytes_sent": sum(event.sent.values()),
        "bytes_received": sum(event.received.values()),
        "sent": event.sent,
        "received": event.received,
        "by": event.way,
        "exchange": event.key,
    }
    if event.row == PACKING:
        found = {k: v for k, v in found.items() if k not in (*_OF_BYTES, "exchange")}
    return {**found, "error": event.error} if event.error else found


def _gaps(intervals: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The gaps between intervals within [begin, end]."""
    found = []
    for first, stop in intervals:
        if begin < first:
            found.append((begin, min(first, end)))
        begin = max(begin, stop)
    return [*found, (begin, end)] if begin < end else found
