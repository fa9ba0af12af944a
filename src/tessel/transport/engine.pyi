def run(program: int, y: int, x: int, call: int, room: int, /) -> int:
    """Make the exchange of the program at an address, from one tensor to another.

    `room` is the address of the room that the program needs to pack what it gives, or 0.

    How many entries were taken, in their order; -1 if nothing was done; -2 if all were, but others
    still read from this worker's memory.
    """

def share(program: int, said: bytes, size: int, call: int, /) -> tuple[int, bytes]:
    """The same, from bytes to `size` times as many, which are made."""

def start(program: int, y: int, x: int, call: int, started: int, /) -> bool:
    """Give what the program gives, and ask for what it takes; False if nothing was done.

    Args:
        program, y, x, call: as those of `run`.
        started: the address of words that are 0: one for each give, and RECEIVE for each take.
    """

def finish(program: int, started: int, channels: int, count: int, /) -> bool:
    """Wait a short while until all has come and what was given was read; whether that is so.

    Args:
        program, started: as they were given to `start`.
        channels: the address of what leads to this worker, rows of words as steps begin.
        count: of the channels.
    """

def await_any(waiting: int, /) -> bool:
    """Wait, as long as the words at an address say, until a semaphore is not 0; whether one is.

    The words are those of a program without copies; addresses of semaphores come after them.
    """

def clock(on: bool, /) -> tuple[float, float, float]:
    """Measure from now on, or not; the seconds of packing, moving and waiting until now."""
