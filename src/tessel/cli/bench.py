"""Measure the claims about Tessel's speed against its peers, on this machine.

The claims are scripts in the folder benchmarks/ of a checkout, each with its aim. They run one
after the other, print their tables, and save JSON and a picture under benchmarks/results/ (with
--quick under build/bench/, since such numbers mean little). `benchmarks/setup_peers.sh` installs
the peers once; `make bench` does that, too, and then measures all claims.

A verdict is "met" or "missed" if 5th percentile and median agree, else "noisy".
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tessel.cli import wide_console

SUMMARY = "measure the claims about speed against peers; needs a checkout"

_PACKAGE = Path(__file__).resolve().parents[1]
_COLOURS = {"met": "green", "missed": "red", "noisy": "yellow", "failed": "red"}
_FAILED = "failed"


@dataclass(frozen=True)
class Claim:
    """A claim of the checkout.

    Args:
        name: the name of its script.
        says: the claim in one line.
        aim: the intended ratios to peers.
        folder: the folder of the benchmarks.
    """

    name: str
    says: str
    aim: str
    folder: Path

    @property
    def script(self) -> Path:
        return self.folder / f"{self.name}.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tessel bench`."""
    parser.add_argument("claims", nargs="*", metavar="claim", help="all by default")
    parser.add_argument("--list", action="store_true", help="list the claims without measuring")
    parser.add_argument("--rounds", type=int, help="turns of every contender in each case")
    parser.add_argument(
        "--quick", action="store_true", help="two short rounds, to check that everything runs"
    )
    parser.add_argument(
        "--without-peers", action="store_true", help="skip peers that are not installed"
    )


def execute(args: argparse.Namespace) -> int:
    """Measure; return 2 for invalid arguments, and 1 if a claim could not be measured."""
    try:
        chosen = choose(find_claims(Path.cwd()), args.claims)
        if args.rounds is not None and args.rounds < 1:
            raise ValueError(f"--rounds must be at least 1, got {args.rounds}")
    except ValueError as error:
        print(f"tessel bench: {error}", file=sys.stderr)
        return 2
    wide = wide_console(130)
    if args.list:
        listing = Table("claim", "what is compared", "aim")
        for claim in chosen:
            listing.add_row(claim.name, claim.says, claim.aim)
        wide.print(listing)
        return 0
    options = [] if args.rounds is None else ["--rounds", str(args.rounds)]
    options += ["--quick"] if args.quick else []
    options += ["--without-peers"] if args.without_peers else []
    folder = chosen[0].folder
    # Two short rounds must not replace careful measurements.
    results = folder.parent / "build" / "bench" if args.quick else folder / "results"
    found = [measure(claim, options, results) for claim in chosen]
    wide.print(_table(chosen, found))
    return 1 if any(each["verdict"] == _FAILED for each in found) else 0


def find_claims(directory: Path) -> list[Claim]:
    """The claims of the checkout around a directory, or of the one that Tessel runs from."""
    # The checkout around the user comes before the one that Tessel runs from.
    places = [directory, *directory.parents, _PACKAGE.parents[1]]
    folders = (place / "benchmarks" for place in places)
    folder = next((each for each in folders if (each / "claims.toml").is_file()), None)
    if folder is None:
        raise ValueError(
            f"the claims are in the folder benchmarks/ of a checkout of Tessel, and neither "
            f"{directory} nor {_PACKAGE} is in one: change to a checkout"
        )
    with (folder / "claims.toml").open("rb") as file:
        return [
            Claim(name, told["says"], told["aim"], folder)
            for name, told in tomllib.load(file).items()
        ]


def choose(claims: list[Claim], names: list[str]) -> list[Claim]:
    """The claims with these names, or all; ValueError for an unknown name."""
    known = {claim.name: claim for claim in claims}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown claim {', '.join(unknown)}; known are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)] or claims


def measure(claim: Claim, options: list[str], results: Path) -> dict[str, Any]:
    """Run the script of a claim and return what it saved."""
    saved = results / f"{claim.name}.json"
    before = _written(saved)
    command = [sys.executable, str(claim.script), *options, "--output", str(results)]
    # In a separate process, as if a user ran the script: nothing remains of the previous claim.
    code = subprocess.run(command).returncode
    if code == 0 and _written(saved) != before:
        return json.loads(saved.read_text())
    print(f"tessel bench: {claim.name} ended with exit code {code}", file=sys.stderr)
    return {"verdict": _FAILED, "cases": []}


def _written(path: Path) -> int | None:
    """The modification time of a file, by which results of an earlier run are recognized."""
    return path.stat().st_mtime_ns if path.is_file() else None


def _table(claims: list[Claim], found: list[dict[str, Any]]) -> Table:
    """For each claim the number of aims met, the ratio furthest from its aim, noise and seconds."""
    table = Table("claim", "aim", title="all claims")
    for heading in ("aims met", "worst ratio", "others' CPU", "time"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for claim, result in zip(claims, found, strict=True):
        verdict = result["verdict"]
        colour = _COLOURS.get(verdict, "blue")
        numbers = ["–"] * 4
        if verdict != _FAILED:
            compared = [each for case in result["cases"] for each in case["comparisons"]]
            aimed = [each for each in compared if each["aim"] is not None]
            met = sum(each["verdict"] == "met" for each in aimed)
            worst = max(
                aimed, key=lambda each: max(each["p5"], each["median"]) / each["aim"], default=None
            )
            numbers = [
                f"{met} of {len(aimed)}" if aimed else "–",
                "–" if worst is None else f"{worst['median']:.2f} (≤ {worst['aim']:.3g})",
                f"{100 * result['others']:.0f} %",
                f"{result['seconds']:.0f} s",
            ]
        table.add_row(claim.name, claim.aim, *numbers, f"[{colour}]{verdict}[/{colour}]")
    return table
