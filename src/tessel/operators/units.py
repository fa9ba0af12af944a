"""Readable numbers: bytes, seconds, operations, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

MOST_RANKED = 8  # rows


def table_of_numbers(first: str, *others: str, header_style: str = "bold") -> Table:
    """A table without lines, with names in the first column, and numbers in the others."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=header_style)
    table.add_column(first, no_wrap=True)
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def ranking(first: str, *others: str, rows: Sequence[Sequence[str]]) -> Group:
    """A table of what was compared, the best first, limited to a few rows."""
    table = table_of_numbers(first, *others)
    for number, row in enumerate(rows[:MOST_RANKED]):
        table.add_row(*row, style="" if number else "bold green")
    left = len(rows) - MOST_RANKED
    return Group(table, *([Text(f"and {left} more, slower")] if left > 0 else []))


def num_bytes(count: float) -> str:
    """A number of bytes in readable form.

    >>> num_bytes(512), num_bytes(1536), num_bytes(4 * 2**20)
    ('512 B', '1.5 KiB', '4 MiB')
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f}".removesuffix(".0") + f" {unit}"


def num_seconds(seconds: float) -> str:
    """A time in readable form.

    >>> num_seconds(0.25), num_seconds(0.0000125), num_seconds(90)
    ('250 ms', '12.5 µs', '90 s')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-6:.3g} µs"


def num_flops(count: float) -> str:
    """A number of operations in readable form.

    >>> num_flops(0), num_flops(1536), num_flops(2.5e9)
    ('0', '1.54 k', '2.5 G')
    """
    size, unit = float(count), ""
    for larger in (" k", " M", " G", " T", " P"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g}{unit}"
