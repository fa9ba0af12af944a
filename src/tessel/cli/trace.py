"""Show who waited for whom in a trace, and draw it.

A trace is a file written by `with tessel.trace("run.json"):` or `tessel run --trace run.json`. A
table shows how long each worker waited for each other, a second one how each spent its time, and a
third in which layers they waited the longest. The picture has a line for each worker. All events
are in the file itself, which https://ui.perfetto.dev and chrome://tracing display.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tessel.cli import wide_console
from tessel.operators.picture import FAINT, INK, LIGHT, new_figure
from tessel.operators.units import num_bytes, num_seconds, table_of_numbers
from tessel.tracing.recorder import ROWS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "say who waited for whom in a trace of workers, and draw it"

MOST_COLUMNS = 16  # workers in the columns of a table; for more, the longest waits are listed
MOST_PLACES = 8
_COLOURS = dict(zip(ROWS, ("#9db7d5", "#ccbb44", "#228833", "#ee6677", "#aa3377"), strict=True))
_BINS = 2400  # bins of a picture, one for each pixel from left to right


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tessel trace`."""
    parser.add_argument("file", help="what tessel.trace or `tessel run --trace` wrote")
    parser.add_argument(
        "--picture", metavar="FILE", help="where to draw it (PNG, PDF, SVG); FILE.png by default"
    )
    parser.add_argument("--no-picture", action="store_true", help="draw nothing")
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")


def execute(args: argparse.Namespace) -> int:
    """Read, print and draw a trace; return 2 if the file is not one."""
    try:
        trace = loaded(args.file)
        found = read(trace)
        if args.json:
            print(json.dumps(asdict(found), indent=2))
        else:
            wide_console().print(*tables(found), sep="\n")
        if not args.no_picture:
            target = args.picture or Path(args.file).with_suffix(".png")
            draw(trace, found).savefig(target, dpi=150)
            print(f"the picture is in {target}", file=sys.stderr)
    except ImportError as error:  # without matplotlib the tables are still useful
        print(f"tessel trace: {error}; --no-picture draws nothing", file=sys.stderr)
        return 2 if args.picture else 0
    except (ValueError, OSError) as error:
        print(f"tessel trace: {error}", file=sys.stderr)
        return 2
    return 0


@dataclass(frozen=True)
class WaitingPlace:
    """A place where workers waited: a layer, in a pass, and what for."""

    layer: str
    what: str
    seconds: float
    times: int


@dataclass(frozen=True)
class Found:
    """The summary of a trace.

    Attributes:
        workers: the workers in it; `missing`: those that are not in it.
        seconds: its duration.
        rows: for each worker the seconds in each row, in its first thread.
        waits: for each worker the seconds for which it waited for each other.
        sent, received: the bytes of each worker.
        places: the places of the longest waits.
        left_out: the number of events beyond the limit, by worker.
    """

    workers: tuple[int, ...]
    missing: tuple[int, ...]
    seconds: float
    rows: dict[int, dict[str, float]]
    waits: dict[int, dict[int, float]]
    sent: dict[int, int]
    received: dict[int, int]
    places: tuple[WaitingPlace, ...]
    left_out: dict[int, int]


def read(trace: dict[str, Any]) -> Found:
    """Summarize a trace."""
    events, about = trace["traceEvents"], trace["tessel"]
    workers = tuple(sorted({e["pid"] for e in events}))
    rows = {worker: dict.fromkeys(ROWS, 0.0) for worker in workers}
    waits: dict[int, dict[int, float]] = {worker: {} for worker in workers}
    sent, received = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)
    places: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        worker, kind, args = event["pid"], event["cat"], event["args"]
        seconds = event["dur"] / 1e6
        if event["tid"] < len(ROWS):
            rows[worker][kind] += seconds
        sent[worker] += args.get("bytes_sent", 0)
        received[worker] += args.get("bytes_received", 0)
        if kind == "waiting":
            waits[worker][args["worker"]] = waits[worker].get(args["worker"], 0.0) + seconds
            back = " (backward)" if args["pass"] == "backward" else ""
            what = args["kind"] or ("agreement" if args["in"] == "agreeing" else args["about"])
            places[f"{args['layer']}{back}", what].append(seconds)
    for worker, more in about["bytes_left_out"].items():
        sent[int(worker)] += more[0]
        received[int(worker)] += more[1]
    ends = [e["ts"] + e["dur"] for e in events if e["ph"] == "X"] or [0.0]
    longest = sorted(places.items(), key=lambda item: -sum(item[1]))
    return Found(
        workers,
        tuple(about["missing"]),
        max(ends) / 1e6,
        rows,
        waits,
        sent,
        received,
        tuple(WaitingPlace(*where, sum(each), len(each)) for where, each in longest),
        {int(worker): number for worker, number in about["left_out"].items()},
    )


def loaded(path: str | Path) -> dict[str, Any]:
    """Load the trace in a file; ValueError if it is none."""
    try:
        trace = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a trace: {error}") from error
    if not isinstance(trace, dict) or not {"traceEvents", "tessel"} <= trace.keys():
        raise ValueError(
            f"{path} is not a trace of Tessel: `with tessel.trace(...)` and `tessel run --trace` "
            f"write them"
        )
    return trace


def tables(found: Found) -> Iterator[Any]:
    """The summary of a trace, for a terminal."""
    yield f"[bold]{len(found.workers)} workers, {num_seconds(found.seconds)}[/]"
    if found.missing:
        who = f"worker{'s' * (len(found.missing) > 1)} {', '.join(map(str, found.missing))}"
        yield f"[yellow]missing: {who}, which wrote nothing[/]"
    for worker, number in found.left_out.items():
        yield f"[yellow]worker {worker} left out {number} events that came after its limit[/]"
    yield "\n[bold]who waits for whom[/]"
    yield table_of_waits(found)
    yield "\n[bold]what each worker does[/]"
    table = table_of_numbers("  worker", *ROWS, "bytes sent", "bytes received")
    for worker in found.workers:
        total = sum(found.rows[worker].values()) or 1.0
        shares = (f"{num_seconds(s)} {s / total:4.0%}" for s in found.rows[worker].values())
        table.add_row(
            str(worker), *shares, num_bytes(found.sent[worker]), num_bytes(found.received[worker])
        )
    yield table
    if found.places:
        yield "\n[bold]where they wait the longest, all workers together[/]"
        table = table_of_numbers("  layer", "for", "seconds", "times")
        for each in found.places[:MOST_PLACES]:
            table.add_row(each.layer or "–", each.what, num_seconds(each.seconds), str(each.times))
        yield table


def table_of_waits(found: Found) -> Table:
    """A table of how long each waits for each other; for many workers, of the longest waits."""
    everybody = sorted({*found.workers, *(p for each in found.waits.values() for p in each)})
    if len(everybody) <= MOST_COLUMNS:
        table = table_of_numbers("  worker", *(f"for {other}" for other in everybody), "in all")
        for worker in found.workers:
            row = found.waits[worker]
            cells = (num_seconds(row[p]) if p in row else "·" for p in everybody)
            table.add_row(str(worker), *cells, num_seconds(sum(row.values())))
        table.add_section()
        sums = [sum(row.get(p, 0.0) for row in found.waits.values()) for p in everybody]
        cells = (num_seconds(each) if each else "·" for each in sums)
        table.add_row("all", *cells, num_seconds(sum(sums)), style="bold")
        return table
    table = table_of_numbers("  worker", "waits for", "seconds")
    pairs = [(s, w, p) for w, row in found.waits.items() for p, s in row.items()]
    for seconds, worker, other in sorted(pairs, reverse=True)[:MOST_COLUMNS]:
        table.add_row(str(worker), str(other), num_seconds(seconds))
    return table


def draw(trace: dict[str, Any], found: Found) -> Figure:
    """Draw a trace: a line for each worker, coloured by its activity."""
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] < len(ROWS)]
    length = max(found.seconds, 1e-9)
    figure = new_figure(14, 1.7 + 0.62 * len(found.workers))
    height = figure.get_figheight()
    ax = figure.add_axes((0.07, 0.6 / height, 0.80, 1 - 1.05 / height))
    unit, scale = ("s", 1.0) if length >= 2 else ("ms", 1e3)
    for line, worker in enumerate(found.workers):
        own = [e for e in events if e["pid"] == worker]
        for row in ROWS:
            bars = _joined([(e["ts"], e["dur"]) for e in own if e["cat"] == row], length)
            bars = [(start * scale, width * scale) for start, width in bars]
            ax.broken_barh(bars, (line - 0.36, 0.72), facecolors=_COLOURS[row], linewidth=0)
        for event in own:
            width, text = event["dur"] / 1e6, event["name"]
            room = width / length / 0.0085  # in characters of this size
            if event["cat"] == "waiting":
                text = f"for {event['args']['worker']}"
                more = f"{text}, in {event['args']['layer'] or event['args']['in']}"
                text = more if room > len(more) else text
            if room >= max(4, len(text)):
                middle = (event["ts"] / 1e6 + width / 2) * scale
                ax.text(middle, line, text, ha="center", va="center", fontsize=7.5, color=INK,
                        clip_on=True)  # fmt: skip
        total = sum(found.rows[worker].values()) or 1.0
        share = found.rows[worker]["waiting"] / total
        note = f"waits {share:.0%}\n{num_bytes(found.sent[worker])} sent"
        ax.text(1.008, line, note, transform=ax.get_yaxis_transform(), va="center", fontsize=8.5,
                color=INK, clip_on=False)  # fmt: skip
    ax.set_xlim(0, length * scale)
    ax.set_ylim(len(found.workers) - 0.45, -0.55)
    ax.set_yticks(range(len(found.workers)), [f"worker {worker}" for worker in found.workers])
    ax.set_xlabel(unit, color=FAINT)
    ax.tick_params(length=0, colors=INK)
    ax.grid(axis="x", color=LIGHT, linewidth=0.6)
    ax.set_axisbelow(True)
    for side in ax.spines.values():
        side.set_visible(False)
    keys = [ax.barh(0, 0, color=_COLOURS[row], label=row) for row in ROWS]
    figure.legend(handles=keys, loc="upper left", ncols=len(ROWS), frameon=False, fontsize=10,
                  bbox_to_anchor=(0.06, 1.0), handlelength=1.2)  # fmt: skip
    return figure


def _joined(bars: list[tuple[float, float]], length: float) -> list[tuple[float, float]]:
    """The same bars in seconds, with those joined that cannot be distinguished."""
    finest = length / _BINS
    found: list[tuple[float, float]] = []
    for start, width in sorted(bars):
        begin, end = start / 1e6, (start + width) / 1e6
        # only bars less than a pixel apart are joined: others would cover other colours
        if found and begin - sum(found[-1]) < finest / 4 and begin >= found[-1][0]:
            found[-1] = found[-1][0], max(end, sum(found[-1])) - found[-1][0]
        else:
            found.append((begin, end - begin))
    return found
