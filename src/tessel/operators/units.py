"""Numbers for people: bytes, seconds, operations."""

from __future__ import annotations


def num_bytes(count: float) -> str:
    """A number of bytes for people.

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
    """A time for people.

    >>> num_seconds(0.25), num_seconds(0.0000125), num_seconds(90)
    ('250 ms', '12.5 µs', '90 s')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-6:.3g} µs"


def num_flops(count: float) -> str:
    """A number of operations for people.

    >>> num_flops(0), num_flops(1536), num_flops(2.5e9)
    ('0', '1.54 k', '2.5 G')
    """
    size, unit = float(count), ""
    for larger in (" k", " M", " G", " T", " P"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g}{unit}"
