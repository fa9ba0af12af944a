"""Semaphores in shared memory: writes before a post are visible to a process that waits for it."""

from __future__ import annotations

import ctypes
import errno
import time

_C = ctypes.CDLL(None, use_errno=True)
_QUICK = ctypes.PyDLL(None, use_errno=True)  # for calls that cannot wait: it keeps Python's lock


_Timespec = ctypes.c_long * 2  # seconds and nanoseconds


def _function(library: ctypes.CDLL, name: str, *argument_types: type) -> ctypes._NamedFuncPointer:
    function = getattr(library, name)
    function.argtypes = argument_types
    return function


def are_available() -> bool:
    """Whether this system's C library has the functions that are used here."""
    return all(
        hasattr(_C, f"sem_{name}") for name in ("init", "post", "trywait", "timedwait", "getvalue")
    )


if are_available():
    _init = _function(_C, "sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    _post = _function(_QUICK, "sem_post", ctypes.c_void_p)
    _try = _function(_QUICK, "sem_trywait", ctypes.c_void_p)
    _wait = _function(_C, "sem_timedwait", ctypes.c_void_p, ctypes.POINTER(_Timespec))
    _value = _function(_QUICK, "sem_getvalue", ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))


class Semaphore:
    """A count that one process raises and another lowers.

    Args:
        address: its address in the memory of this process.
    """

    __slots__ = ("_address", "address")

    def __init__(self, address: int) -> None:
        self.address = address
        self._address = ctypes.c_void_p(address)

    def initialise(self) -> None:
        """Set the count to zero; once, by one process, before any other uses it."""
        if _init(self._address, 1, 0):
            raise OSError(ctypes.get_errno(), "sem_init")

    def post(self) -> None:
        """Raise the count. The process that lowers it sees all earlier writes of this one."""
        _post(self._address)

    def try_wait(self) -> bool:
        """Lower the count if it is not zero; return whether it was lowered."""
        return not _try(self._address)

    @property
    def count(self) -> int:
        """The count at this moment."""
        value = ctypes.c_int()
        _value(self._address, ctypes.byref(value))
        return value.value

    def wait(self, seconds: float) -> bool:
        """Wait for the count to be nonzero and lower it; return False if the time is over."""
        until = time.time() + seconds
        deadline = _Timespec(int(until), int(until % 1 * 1e9))
        if not _wait(self._address, ctypes.byref(deadline)):
            return True
        if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "sem_timedwait")
        return False
