def run(program: int, y: int, x: int, call: int, /) -> int:
    """Make the exchange of the program at an address, from one tensor to another.

    How many entries were taken, in their order; -1 if nothing was done; -2 if all were, but others
    still read from this worker's memory.
    """

def share(program: int, said: bytes, size: int, call: int, /) -> tuple[int, bytes]:
    """The same, from bytes to `size` times as many, which are made."""

def clock(on: bool, /) -> tuple[float, float, float]:
    """Measure from now on, or not; the seconds of packing, moving and waiting until now."""
