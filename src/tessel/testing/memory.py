"""The memory of tensors, counted."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from tessel.core.context import setting
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.table import tensors

_STORAGE: Any = torch.UntypedStorage
_counts: ContextVar[bool] = ContextVar("_counts", default=True)  # whether tensors do now


@contextmanager
def count_memory() -> Iterator[Memory]:
    """Count the bytes of tensors that are created in the `with` block and alive at the same time.

    The memory of the system contains more (cached by allocators, temporary in kernels), and changes
    from run to run; this does not. Tensors that were created before do not count, nor do those of
    other threads, such as gradients on a GPU.

    >>> import tessel, torch
    >>> with tessel.testing.count_memory() as memory:
    ...     y = torch.ones(100) + torch.ones(100)
    >>> memory.peak, memory.current
    (1200, 400)
    """
    with Memory() as memory:
        yield memory


@contextmanager
def uncounted() -> Iterator[None]:
    """Do not count tensors that are created in the `with` block, such as those of a check."""
    with setting(_counts, False):
        yield


class Memory(TorchDispatchMode):
    """Bytes of tensors that were made in a block: `current` now, and `peak` at most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._known: dict[int, int] = {}  # the bytes of each storage that counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not _counts.get():
            return func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            key, size = storage._cdata, storage.nbytes()
            # A view has the storage of its base, which counts at most once.
            if key not in self._known and key not in given:
                self._note(storage, size)
        return result

    def __enter__(self) -> Any:
        # `fully_shard` frees the storage of a tensor, which no torch function reports.
        resize, counter = _STORAGE.resize_, self
        self._before = vars(_STORAGE).get("resize_")  # possibly that of an outer counter

        def resize_(storage: Any, size: int) -> Any:
            before = storage.nbytes()
            result = resize(storage, size)
            change = storage.nbytes() - before
            if storage._cdata in counter._known:
                counter._known[storage._cdata] += change
                counter._add(change)
            elif change > 0:
                counter._note(storage, change)
            return result

        _STORAGE.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *problem: Any) -> Any:
        if self._before is None:
            del _STORAGE.resize_
        else:
            _STORAGE.resize_ = self._before
        return super().__exit__(*problem)

    def _add(self, count: int) -> None:
        self.current += count
        self.peak = max(self.peak, self.current)

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        self._known[key] = size
        self._add(size)
        # the address may be reused by another storage
        weakref.finalize(storage, lambda: self._add(-self._known.pop(key)))


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for each in tensors(values):
        if isinstance(each, SpreadTensor):
            yield from _storages(each._part)  # this worker's part
        elif is_traceable_wrapper_subclass(each):  # such as a DTensor, whose own storage is empty
            yield from _storages([getattr(each, name) for name in each.__tensor_flatten__()[0]])
        elif each.device.type != "meta":
            yield each.untyped_storage()
