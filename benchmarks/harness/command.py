"""The command line that all claims have."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from allocator import KEEP, start_again_with
from rich.console import Console

from harness import report
from harness.claim import TESSEL, Claim, measure
from harness.contenders import BENCHMARKS, BUILD

RESULTS = BENCHMARKS / "results"
QUICK_RESULTS = BUILD / "bench"
QUICK_SECONDS = 0.02
BUSY = 0.1  # share of the processors that others may use


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every claim; a script may add its own."""
    found = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    found.add_argument("--rounds", type=_count, help="in each of which every contender has a turn")
    found.add_argument("--quick", action="store_true", help="two short rounds: does all of it run?")
    found.add_argument("--only", metavar="TEXT", help="cases whose names contain this")
    found.add_argument(
        "--without-peers", action="store_true", help="leave out peers that are not installed"
    )
    found.add_argument("--output", type=Path, metavar="FOLDER", help="for the results")
    return found


def run(claim: Claim, options: argparse.Namespace) -> int:
    """Measure a claim, print and save what was found; the exit code is not about the verdict."""
    start_again_with(KEEP)
    console = Console(width=None if Console().is_terminal else 130)
    claim = _chosen(claim, options)
    missing = [each.missing() for each in claim.contenders]
    if any(missing) and not options.without_peers:
        for each in filter(None, missing):
            console.print(f"[red]{each}, or give --without-peers[/red]")
        return 2
    claim = replace(claim, contenders=[c for c in claim.contenders if c.missing() is None])
    rounds = options.rounds or (2 if options.quick else claim.rounds)
    if not claim.cases or not any(each.name == TESSEL for each in claim.contenders):
        console.print("[red]no case is left to measure[/red]")
        return 2
    with console.status("") as status:
        result = measure(claim, rounds, lambda what: status.update(f"{claim.name}, {what}"))
    for table in report.tables(result):
        console.print(table)
    console.print(report.summary(result), highlight=False)
    if result.others > BUSY:
        console.print("[yellow]measure again on a quiet machine before you believe this[/yellow]")
    if result.note:
        console.print(result.note, highlight=False)
    folder = options.output or (QUICK_RESULTS if options.quick or options.only else RESULTS)
    saved = result.save(folder), report.picture(result, folder)
    console.print("saved", *map(str, saved), soft_wrap=True, highlight=False)
    return 0


def main(claim: Claim, description: str | None) -> None:
    """The whole program of a claim without options of its own."""
    raise SystemExit(run(claim, parser(description).parse_args()))


def _chosen(claim: Claim, options: argparse.Namespace) -> Claim:
    cases = [case for case in claim.cases if not options.only or options.only in case.name]
    if options.quick:
        cases = [replace(case, seconds=QUICK_SECONDS, most=min(case.most, 3)) for case in cases]
    return replace(claim, cases=cases)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of rounds, got {text!r}")
    return int(text)
