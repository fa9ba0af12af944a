"""Show that several workers compute what one process computes.

Local workers share a tensor and move it in every way that Tessel knows. For each movement the
table says how exact it is, what it sends and how long it takes; the picture shows how the tensor
lies on the workers before and after. Then a picture that is too large for one worker's budget goes
through a U-Net that was written for one process. A tensor in pencils is Fourier transformed, by a
plan that is printed, and a Fourier neural operator is trained for a step. A classifier makes a step
with its classes split over the workers. Last, a blurred and noisy picture is reconstructed. The
exit code is 1 when an error is larger than it should be.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from tessel import viz
from tessel.cli.acts import ACTS, classes, deblur, fourier, picture
from tessel.cli.acts.act import Act, Row, Share, Sketch
from tessel.cli.acts.picture import Report
from tessel.launch import launch
from tessel.partition import world

SUMMARY = "show that several workers compute what one process computes"

Later = fourier.Report | classes.Report | deblur.Report  # of the acts after the picture's

_TIME_LIMIT = 300.0
_POLL_SECONDS = 0.05

_LEGEND = """\
dot-test   relative difference of ⟨Ax, y⟩ and ⟨x, Aᴴy⟩ over all workers
values     largest difference from what plain torch computes in one process
gradients  the same for the gradient of a loss over all outputs
sent       by all workers together, each time; time is the median\
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tessel demo`."""
    parser.add_argument(
        "--workers", type=int, default=4, metavar="N", help="local workers (default: 4)"
    )
    parser.add_argument(
        "--size", type=int, default=256, metavar="S", help="tensors are S × S (default: 256)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="FOLDER",
        help="where the pictures go (default: demo-output)",
    )
    parser.set_defaults(parser=parser)


def execute(args: argparse.Namespace) -> int:
    """Perform all acts, print the table, save the picture; return 1 when an error is too large."""
    if args.workers < 1 or args.size < 1:
        args.parser.error("--workers and --size must be 1 or more")
    console = Console(highlight=False)
    performed = _perform(console, args.workers, args.size)
    shares, sketches, report = performed[:3]
    later: Sequence[Later] = performed[3:]
    results = [
        (act, [Row.of(name, column) for name, column in zip(act.rows, columns, strict=True)])
        for act, columns in zip(ACTS, shares, strict=True)
    ]
    drawn = _try_to_draw(sketches, report, later, args.output)
    console.print(_table(results, args.workers, args.size))
    console.print(_LEGEND, style="dim")
    console.print()
    console.print(picture.table(report))
    console.print(picture.legend(report), style="dim", soft_wrap=True)
    for each in later:
        _print_later(console, each)
    passed = _print_verdict(console, results, report, later, args.workers)
    console.print(drawn, markup=False, soft_wrap=True)
    return 0 if passed else 1


def _perform(
    console: Console, workers: int, size: int
) -> tuple[
    list[list[tuple[Share, ...]]],
    list[Sketch],
    Report,
    fourier.Report,
    classes.Report,
    deblur.Report,
]:
    """Run the acts; for each act and row the shares of all workers, what to draw, and reports."""
    with tempfile.TemporaryDirectory() as folder:
        done = Path(folder) / "done"
        done.touch()
        with _progress(console, workers, done):
            results = launch(_work, workers, size, str(done), timeout=_TIME_LIMIT)
    by_worker = [shares for shares, *_ in results]
    by_act = [
        list(zip(*(shares[a] for shares in by_worker), strict=True)) for a in range(len(ACTS))
    ]
    _, sketches, report, transform, classified, reconstructed = results[0]
    assert report is not None and transform is not None
    assert classified is not None and reconstructed is not None
    return by_act, sketches, report, transform, classified, reconstructed


def _work(
    size: int, done: str
) -> tuple[
    list[list[Share]],
    list[Sketch],
    Report | None,
    fourier.Report | None,
    classes.Report | None,
    deblur.Report | None,
]:
    """What a worker does: every act; the first worker notes each row that is done."""
    first = world().rank == 0
    shares: list[list[Share]] = []
    for act in ACTS:
        shares.append([])
        for name, share in zip(act.rows, act.perform(size), strict=True):
            shares[-1].append(share)
            if first:
                _note(done, name)
    sketches = [sketch for act in ACTS for sketch in act.sketch(size)]
    report = picture.perform(size)
    if first:
        _note(done, picture.TITLE)
    transform = fourier.perform(size)
    if first:
        _note(done, fourier.TITLE)
    classified = classes.perform(size)
    if first:
        _note(done, classes.TITLE)
    tell = partial(_note, done) if first else None
    return shares, sketches, report, transform, classified, deblur.perform(size, tell)


def _note(done: str, name: str) -> None:
    with open(done, "a") as file:
        file.write(f"{name}\n")


@contextmanager
def _progress(console: Console, workers: int, done: Path) -> Iterator[None]:
    """Show a bar that follows the file in which the first worker notes what is done."""
    rows = (name for act in ACTS for name in act.rows)
    iterations = [deblur.TITLE] * deblur.ITERATIONS
    names = [*rows, picture.TITLE, fourier.TITLE, classes.TITLE, *iterations]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(f"starting {workers} workers", total=len(names))
    ended = threading.Event()
    if bar.disable:
        console.print(f"starting {workers} workers on this machine …\n")

    def follow() -> None:
        while not ended.wait(_POLL_SECONDS):
            lines = done.read_text().splitlines()
            if 0 < len(lines) < len(names):
                is_told = lines[-1].startswith(deblur.TITLE)
                text = lines[-1] if is_told else names[len(lines)]
                bar.update(task, completed=len(lines), description=text)

    thread = threading.Thread(target=follow, daemon=True)
    with bar:
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _table(results: Sequence[tuple[Act, Sequence[Row]]], workers: int, size: int) -> Table:
    title = f"{workers} workers, tensors of {size} × {size} in float64"
    table = Table(title=title, box=SIMPLE_HEAD, title_style="bold", pad_edge=False)
    table.add_column("movement", no_wrap=True)
    for title in ("dot-test", "values", "gradients", "sent", "messages", "time"):
        table.add_column(title, justify="right", no_wrap=True)
    for act, rows in results:
        table.add_section()
        if len(results) > 1:
            table.add_row(f"[bold]{act.title}[/]")
        for row in rows:
            table.add_row(
                row.name,
                *(
                    _error(e, act.limit)
                    for e in (row.dot_test, row.value_error, row.gradient_error)
                ),
                viz.num_bytes(row.bytes_sent),
                str(row.messages),
                f"{1e3 * row.seconds:.2f} ms",
            )
    return table


def _print_later(console: Console, report: Later) -> None:
    if isinstance(report, fourier.Report):
        shown = zip(fourier.tables(report), fourier.legends(report), strict=True)
    elif isinstance(report, deblur.Report):
        shown = zip(deblur.tables(report), deblur.legends(report), strict=True)
    else:
        shown = zip(classes.tables(report), classes.legends(report), strict=True)
    for table, legend in shown:
        console.print()
        console.print(table)
        console.print(legend, style="dim", soft_wrap=True)


def _error(value: float, limit: float) -> str:
    text = "0" if value == 0 else f"{value:.0e}"
    return f"[green]{text}[/]" if value <= limit else f"[bold red]{text}[/]"


def _print_verdict(
    console: Console,
    results: Sequence[tuple[Act, Sequence[Row]]],
    report: Report,
    later: Sequence[Later],
    workers: int,
) -> bool:
    wrong = [row.name for act, rows in results for row in rows if not row.worst <= act.limit]
    wrong += [picture.TITLE] if not (report.worst <= picture.LIMIT and report.fits) else []
    wrong += [title for each in later for title in each.wrong]
    errors = [row.worst for _, rows in results for row in rows]
    worst = max(report.worst, *errors, *(each.worst for each in later))
    if not wrong:
        console.print(
            f"\n[bold green]{workers} workers compute what one process computes[/] "
            f"(largest error {worst:.0e})"
        )
        return True
    names = ", ".join(wrong)
    console.print(f"\n[bold red]wrong: {names}[/] (largest error {worst:.0e})")
    return False


def _try_to_draw(
    sketches: Sequence[Sketch], report: Report, later: Sequence[Later], folder: Path
) -> str:
    """Save the pictures and say where they are and what to look at, or why there are none."""
    try:
        draw(sketches, folder / "demo.png")
        picture.draw(report, folder / "unet.png")
        for each in later:
            if isinstance(each, deblur.Report):
                deblur.draw(each, folder / "deblur.png")
    except ImportError as error:
        return f"no picture: {error}"
    return (
        f"pictures: {folder / 'demo.png'}\n"
        "  Every worker has a colour. On the right, look at the colours inside of each frame:\n"
        "  they tell from whom the worker got its values; the arrows are what was sent.\n"
        f"          {folder / 'unet.png'}\n"
        "  The picture, who has which part of it, and what the U-Net makes of it: no seams.\n"
        f"          {folder / 'deblur.png'}\n"
        "  What was measured, what the workers make of it, and the truth."
    )


def draw(sketches: Sequence[Sketch], path: Path) -> None:
    """Draw each sketch as a row, before and after, and save the picture."""
    figure = viz.new_figure(10.5, 5.2 * len(sketches))
    figure.suptitle("How the tensor lies on the workers, and what moves", fontsize=14, y=0.95)
    axes = figure.subplots(
        len(sketches), 2, squeeze=False, gridspec_kw={"wspace": 0.28, "hspace": 0.24}
    )
    for sketch, (before, after) in zip(sketches, axes, strict=True):
        viz.draw_exchange(
            before,
            after,
            sketch.domain,
            sketch.codomain,
            element_size=sketch.element_size,
            titles=sketch.titles,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.3)
