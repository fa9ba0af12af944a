"""The `tessel` command: `demo`, `run`, `plan`, `doctor`, `bench` and `trace`.

A command is a module of this package with `SUMMARY` (one line), `add_arguments(parser)` and
`execute(args) -> int` (the exit code); `COMMANDS` lists them. This package may import everything.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import TypeVar

from rich.console import Console

from tessel.version import __version__

T = TypeVar("T")

COMMANDS = ("demo", "run", "plan", "doctor", "bench", "trace")

_DESCRIPTION = """\
Tensors spread over processes: distribution as linear algebra, with exact adjoints.
"""

_EPILOG = """\
start here:
  tessel demo                          show that 4 workers compute what one process computes
  tessel run -n 4 train.py --epochs 3  run a script on 4 workers of this machine
  tessel plan --shape 64,64 --workers 8  the best way to split a Fourier transform
  tessel doctor                        what this machine has, how fast it is, what to fix
  tessel bench --list                  the claims about speed, and the peers
  tessel trace run.json                who waited for whom in `tessel run --trace run.json`

`tessel COMMAND --help` explains each command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `tessel` command and return its exit code.

    Args:
        argv: the arguments after the program's name; those of this process by default.

    >>> from tessel.cli import main
    >>> main(["doctor", "--no-measure"])  # doctest: +SKIP
    0
    """
    args = build_parser().parse_args(argv)
    args.is_program = argv is None
    try:
        code: int = args.execute(args)
    except KeyboardInterrupt:
        return 130  # as in shells: 128 plus the number of SIGINT
    return code


def argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a parser of arguments, so that users see the text of its ValueError."""

    @wraps(read, updated=())
    def parse(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def wide_console(width: int = 160) -> Console:
    """A console for the terminal; for a file it is wider, so that no column is wrapped."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the `tessel` command with all of its subcommands."""
    parser = argparse.ArgumentParser(
        prog="tessel",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tessel {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = import_module(f"tessel.cli.{name}")
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(execute=module.execute)
    return parser
