"""One trace of what all workers have noted, in Chrome's format, and who waited for whom in it.

A worker waits in an exchange from when it comes there until the last of those has come from whom it
needs something: both are known when the notes of all are put together. So a wait that the compiled
engine spends in its own loop is seen as well as one in Python, and costs nothing while it lasts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from tessel.core.halo import Halo
from tessel.core.layout import Layout
from tessel.core.move import Move
from tessel.tracing.recorder import PACKING, ROWS, Event, Recorder
from tessel.version import __version__

Part = dict[str, Any]  # what one worker has noted, in lists, numbers and text
COMPUTING, WAITING = ROWS.index("computing"), ROWS.index("waiting")
_OF_BYTES = ("bytes_sent", "bytes_received", "sent", "received", "by")
_THREAD = 10  # rows of a thread, of which a few are used
_SHORTEST = 100  # nanoseconds of computing that are shown


def part_of(recorder: Recorder, worker: int, host: str, begin: int, end: int) -> Part:
    """What this worker has noted between two times."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def row(event: Event) -> list[Any]:
        ends = event.operator is not None
        return [
            event.begin,
            event.end,
            event.row,
            number(event.layer),
            int(event.is_backward),
            number(kind_of(event.operator) if ends else ""),
            number(str(event.operator.domain) if ends else ""),
            number(str(event.operator.codomain) if ends else ""),
            number(event.text),
            number(" ".join(map(str, event.key))),
            list(event.others),
            {str(peer): n for peer, n in event.sent.items()},
            {str(peer): n for peer, n in event.received.items()},
            number(event.way),
            int(event.posts),
            number(event.error),
        ]

    stop = min(end, recorder.full_at or end)
    threads = [
        {
            "name": notes.name,
            "events": [row(e) for e in list(notes.events) if begin <= e.begin and e.end <= end],
            "marks": [
                [mark.time, number(mark.layer), int(mark.is_backward)]
                for mark in list(notes.marks)
                if begin <= mark.time <= end
            ],
        }
        for notes in recorder.threads
    ]
    return {
        "worker": worker,
        "host": host,
        "begin": begin,
        "end": stop,
        "left_out": recorder.num_left_out,
        "bytes_left_out": recorder.bytes_left_out,
        "threads": [each for each in threads if each["events"] or each["marks"]],
        "clock": [],
        "texts": list(texts),
    }


def kind_of(operator: Any) -> str:
    """What a movement is called."""
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


def merge(parts: list[Part], num_workers: int) -> dict[str, Any]:
    """The trace of all workers whose parts are there."""
    parts = sorted(parts, key=lambda part: int(part["worker"]))
    clocks = {part["worker"]: _corrected(part["clock"]) for part in parts}
    posted = _posted(parts, clocks)
    zero = min(clocks[part["worker"]](part["begin"]) for part in parts)
    events: list[dict[str, Any]] = []
    for part in parts:
        worker, clock = part["worker"], clocks[part["worker"]]
        host = part["host"].partition(" ")[0]
        events += _names(worker, host, [each["name"] for each in part["threads"]])
        for place, thread in enumerate(part["threads"]):
            for begin, end, row, name, args in _pieces(part, thread, place == 0, posted, clock):
                tid = place * _THREAD + row
                ts, dur = (begin - zero) / 1e3, (end - begin) / 1e3
                shown = {"name": name, "cat": ROWS[row], "ph": "X", "ts": ts, "dur": dur}
                events.append({**shown, "pid": worker, "tid": tid, "args": args})
    events.sort(key=lambda event: (event["ph"] != "M", event["ts"]))
    missing = sorted({*range(num_workers)} - {part["worker"] for part in parts})
    about = {
        "version": __version__,
        "workers": num_workers,
        "missing": missing,
        "hosts": {str(part["worker"]): part["host"] for part in parts},
        "left_out": {str(p["worker"]): p["left_out"] for p in parts if p["left_out"]},
        "bytes_left_out": {str(p["worker"]): p["bytes_left_out"] for p in parts if p["left_out"]},
        "clock_offsets_ns": {str(p["worker"]): p["clock"] for p in parts if p["clock"]},
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "tessel": about}


def _names(worker: int, host: str, threads: list[str]) -> Iterator[dict[str, Any]]:
    """What a viewer calls the worker and its rows."""

    def say(what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"name": what, "ph": "M", "ts": 0, "pid": worker, "tid": tid, "args": args}

    yield say("process_name", 0, name=f"worker {worker} on {host}")
    yield say("process_sort_index", 0, sort_index=worker)
    for place, thread in enumerate(threads or [""]):
        for row, name in enumerate(ROWS):
            tid, other = place * _THREAD + row, f" (thread {thread})" if place else ""
            yield say("thread_name", tid, name=name + other)
            yield say("thread_sort_index", tid, sort_index=tid)


def _corrected(clock: list[list[int]]) -> Callable[[int], int]:
    """From the time of a worker to that of the first one: the offset grows evenly in between."""
    if not clock:
        return lambda time: time
    (start, before), (stop, after) = clock[0], clock[-1]
    drift = (after - before) / (stop - start) if stop > start else 0.0
    return lambda time: time + before + round(drift * (time - start))


def _posted(parts: list[Part], clocks: dict[int, Any]) -> dict[str, dict[int, int]]:
    """When each worker came to each exchange."""
    found: dict[str, dict[int, int]] = {}
    for part in parts:
        clock, texts = clocks[part["worker"]], part["texts"]
        for thread in part["threads"]:
            for event in thread["events"]:
                begin, key, posts = event[0], texts[event[9]], event[14]
                if key and posts:
                    found.setdefault(key, {})[part["worker"]] = clock(begin)
    return found


Piece = tuple[int, int, int, str, dict[str, Any]]  # begin, end, row, name, what is known of it


def _pieces(
    part: Part, thread: Part, is_first: bool, posted: Any, clock: Callable[[int], int]
) -> Iterator[Piece]:
    """What a thread did, each moment in one row."""
    texts = part["texts"]
    # A movement begins before its exchanges: they cut it into pieces of packing.
    events = sorted(thread["events"], key=lambda event: (event[0], -event[1]))
    movements = [event for event in events if event[2] == PACKING]
    exchanges = [event for event in events if event[2] != PACKING]
    taken: list[tuple[int, int]] = []  # when it does not compute
    for event in exchanges:
        begin, end = clock(event[0]), clock(event[1])
        args = _arguments(event, texts)
        others = {*map(int, event[12]), *event[10]} - {part["worker"]}
        came = posted.get(texts[event[9]], {})
        # Who is not in the trace has not come, where the wait was in vain.
        lost = sorted(others - {*came}) if event[15] and texts[event[15]] else []
        last = max((each for each in others if each in came), key=lambda w: came[w], default=None)
        until = end if lost else begin if last is None else min(max(came[last], begin), end)
        if until > begin:
            for_whom = lost or [last]
            names = ", ".join(map(str, for_whom))
            inner = {k: v for k, v in args.items() if k not in _OF_BYTES}
            inner |= {"worker": for_whom[0], "in": ROWS[event[2]]}
            yield begin, until, WAITING, f"waiting for worker {names}", inner
        name = args["about"] or args["kind"] or ROWS[event[2]]
        yield until, end, event[2], _titled(args, name), args
        taken.append((begin, end))
    outer: list[tuple[int, int]] = []
    for event in movements:
        begin, end = clock(event[0]), clock(event[1])
        if outer and end <= outer[-1][1]:
            continue  # part of another, which has the same name
        args = _arguments(event, texts)
        inside = taken[bisect_left(taken, (begin, begin)) : bisect_right(taken, (end, end))]
        for first, stop in _gaps(inside, begin, end):
            yield first, stop, PACKING, _titled(args, f"packing of {args['kind']}"), args
        outer.append((begin, end))
    if not is_first and not events:
        return
    busy = _joined([*taken, *outer])
    begin = clock(part["begin"]) if is_first else min(first for first, _ in busy)
    end = clock(part["end"]) if is_first else max(stop for _, stop in busy)
    marks = [(clock(time), texts[layer], back) for time, layer, back in thread["marks"]]
    yield from _computing(_gaps(busy, begin, end), marks)


def _computing(gaps: Any, marks: list[tuple[int, str, int]]) -> Iterator[Piece]:
    """What is left, cut where another layer begins."""
    place, layer, back = 0, "", 0
    for begin, end in gaps:
        while begin < end:
            while place < len(marks) and marks[place][0] <= begin:
                _, layer, back = marks[place]
                place += 1
            stop = min(end, marks[place][0]) if place < len(marks) else end
            if stop - begin >= _SHORTEST:
                args = {"layer": layer, "pass": "backward" if back else "forward"}
                yield begin, stop, COMPUTING, _titled(args, "") or "outside of layers", args
            begin = stop


def _titled(args: dict[str, Any], name: str) -> str:
    layer = args["layer"]
    back = " (backward)" if args["pass"] == "backward" else ""
    return (f"{layer}{back}: {name}" if name else f"{layer}{back}") if layer else name + back


def _arguments(event: list[Any], texts: list[str]) -> dict[str, Any]:
    """What is known of an event."""
    found: dict[str, Any] = {
        "layer": texts[event[3]],
        "pass": "backward" if event[4] else "forward",
        "kind": texts[event[5]],
        "from": texts[event[6]],
        "to": texts[event[7]],
        "about": texts[event[8]],
        "bytes_sent": sum(event[11].values()),
        "bytes_received": sum(event[12].values()),
        "sent": event[11],
        "received": event[12],
        "by": texts[event[13]],
        "exchange": texts[event[9]],
    }
    if event[2] == PACKING:
        found = {k: v for k, v in found.items() if k not in (*_OF_BYTES, "exchange")}
    if texts[event[15]]:
        found["error"] = texts[event[15]]
    return found


def _joined(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same moments in intervals that do not meet, ascending."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _gaps(intervals: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """What they leave of an interval."""
    found = []
    for first, stop in intervals:
        if begin < first:
            found.append((begin, min(first, end)))
        begin = max(begin, stop)
    return [*found, (begin, end)] if begin < end else found
