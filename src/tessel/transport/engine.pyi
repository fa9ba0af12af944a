from collections.abc import Callable
from typing import Any

from torch import Tensor

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

def repeat(
    x: Tensor,
    make: Callable[[], Tensor],
    program: int,
    owner: object,
    numbers: tuple[int, int, int, int, int],
    job: tuple[Any, Any, Callable[..., bool], Callable[[], None], Callable[[], Any]],
    pinned: Callable[[Tensor], bool] | None,
    alarm: Any,
    counted: Any,
    process: Any,
    earlier: Callable[[Tensor], Any] | None,
    /,
) -> Callable[[Tensor], Any] | None:
    """What makes the exchange of a program again, from tensors that lie as x does to new ones.

    Called with a tensor it gives the output; None if nothing was done, since the tensor lies
    otherwise, is of another kind, needs a derivative, or something else is not as usual; or, of
    what takes longer, the owner of the program, the output, and what `run` gives.

    Args:
        x: a tensor on the CPU.
        make: gives a new tensor for the output.
        program, owner: the address of the program, and what keeps its words.
        numbers: the addresses of the alarm and of the counts of messages and of bytes that were
            sent and received, what the exchange adds to the latter two, and the address of the
            number of the process, which is 0 when it has left the job.
        job: the group, what its threads have for themselves, how the lock of the host is taken and
            given back, and what raises if the job is broken.
        pinned: says whether x is pinned, if others read it where it lies.
        alarm, counted, process: what keeps the words at the three addresses.
        earlier: the same for tensors that lie otherwise.
    """

def ask(exchange: Any, /, *asked: Any) -> bool:
    """Let `repeat` use torch: its table for DLPack, and what it asks; whether it can."""

def keep_unchanged(owner: Any, name: str, /) -> None:
    """Let nothing be repeated while an attribute is another than now."""

def clock(on: bool, /) -> tuple[float, float, float]:
    """Measure from now on, or not; the seconds of packing, moving and waiting until now."""
