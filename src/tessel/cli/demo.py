"""Show that several workers compute the same as one process.

Local workers share a tensor and move it in every way that Tessel supports. For each movement the
table shows its accuracy, the bytes that it sends and the time that it takes; the picture shows the
parts of the workers before and after. Then a picture that is too large for one worker's budget is
processed by a U-Net that was written for one process. A tensor in pencils is Fourier transformed by
a plan that is printed, and a Fourier neural operator is trained for a step. A classifier makes a
step with its classes split over the workers. Finally, a blurred and noisy picture is reconstructed.
The models and problems are those of the scripts in examples/. The exit code is 1 if an error is too
large.
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from tessel.cli.demos import demos
from tessel.cli.demos.report import Report, worst_of
from tessel.core.partition import world
from tessel.launch import launch

SUMMARY = "show that several workers compute what one process computes"

_TIME_LIMIT = 300.0  # seconds for all demos; then an error shows where workers hang
_POLL_SECONDS = 0.05


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
        help="folder of the pictures (default: demo-output)",
    )
    parser.set_defaults(parser=parser)


def execute(args: argparse.Namespace) -> int:
    """Run all demos, print tables and save pictures; return 1 if an error is too large."""
    if args.workers < 1 or args.size < 1:
        args.parser.error("--workers and --size must be 1 or more")
    try:
        demos()
    except ModuleNotFoundError as missing:
        if missing.name != "tessel.examples":
            raise
        args.parser.error("the demos need the folder examples/ of Tessel, which is missing here")
    console = Console(highlight=False)
    reports = run_demos(console, args.workers, args.size)
    pictures = _try_to_draw(reports, args.output)
    for report in reports:
        console.print(report.table)
        console.print(report.text, style="dim", soft_wrap=True)
        console.print()
    wrong = [title for report in reports for title in report.wrong]
    error = f"(largest error {worst_of([report.worst for report in reports]):.0e})"
    if wrong:
        console.print(f"[bold red]wrong: {', '.join(wrong)}[/] {error}")
    else:
        verdict = f"{args.workers} workers compute what one process computes"
        console.print(f"[bold green]{verdict}[/] {error}")
    console.print(pictures, markup=False, soft_wrap=True)
    return 1 if wrong else 0


def run_demos(console: Console, workers: int, size: int) -> list[Report]:
    """Run the demos on local workers; return the reports of the first."""
    with tempfile.TemporaryDirectory() as folder:
        # Workers reply only at the end: they write their progress to a file.
        done = Path(folder) / "done"
        done.touch()
        with progress(console, workers, done):
            # Only the first worker has reports, which include the results of all workers.
            return launch(work, workers, size, str(done), timeout=_TIME_LIMIT)[0]


def work(size: int, done: str) -> list[Report]:
    """Run every demo on a worker; the first worker notes each completed step."""

    def note(text: str) -> None:
        if world().rank == 0:
            with open(done, "a") as file:
                file.write(f"{text}\n")

    # All of them in one job, which takes seconds to start.
    return [report for demo in demos() for report in demo.run(size, note)]


@contextmanager
def progress(console: Console, workers: int, done: Path) -> Iterator[None]:
    """Show a progress bar that follows the file in which the first worker notes its steps."""
    names = [name for demo in demos() for name in demo.STEPS]
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
                name = names[len(lines)]  # the current step, or its last note if more detailed
                text = lines[-1] if lines[-1].startswith(f"{name}:") else name
                bar.update(task, completed=len(lines), description=text)

    # This thread waits in `launch`, so another one reads the file.
    thread = threading.Thread(target=follow, daemon=True)
    with bar:
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _try_to_draw(reports: Sequence[Report], folder: Path) -> str:
    """Save the pictures; return where they are and what they show, or why there are none."""
    try:
        import matplotlib.figure  # noqa: F401  (before a folder is made)
    except ImportError:
        return "no pictures: they need matplotlib, which `pip install 'tessel[viz]'` installs"
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [report.draw(folder) for report in reports if report.draw is not None]
    return "\n".join(
        f"{'pictures:' if number == 0 else '':9} {path}\n{textwrap.indent(text, '  ')}"
        for number, (path, text) in enumerate(pictures)
    )
