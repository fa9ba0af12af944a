"""Fourier transforms of a worker's own part, by the library that is fastest for it.

Torch's own transforms are those of MKL, or of cuFFT on a GPU. On some processors FFTW takes half of
MKL's time for small slabs, and more for large ones: so a transform that is repeated is timed, in
some calls of the program. Each worker chooses alone, since nothing travels here.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from math import prod
from statistics import median
from threading import Lock, local
from time import perf_counter, thread_time
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tessel.core.agreement import remember
from tessel.core.context import is_compiling
from tessel.operators.memory import inverse_of, order_of
from tessel.operators.space import Shape, complex_of, real_of
from tessel.settings import chosen
from tessel.transport import is_plain, kept_in_job

LIBRARIES = ("auto", "torch", "scipy", "fftw")
VARIABLE = "TESSEL_FFT"
_MODULES = {"scipy": "scipy.fft", "fftw": "pyfftw"}
_PACKAGES = {"scipy": "scipy", "fftw": "pyfftw"}
_CALLS = 8  # from this call on it is worth importing and timing others
_BLOCK = 4  # consecutive calls by one library, the first of which is not timed
_BLOCKS = 3  # of each library
_HOPELESS = 1.5  # times torch's time: a library that takes longer is dropped
_MOST = 2**22  # for more values only torch's is used: trying slower ones would take too long
_GAIN = 0.9  # another library must be that much faster: noise should not decide between equals
_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


@kept_in_job
def chosen_library() -> str:
    """The value of TESSEL_FFT, which is read once in a job, since each transform asks for it."""
    return chosen(VARIABLE, LIBRARIES)


def flaw_of_choice() -> str:
    """Why the library that TESSEL_FFT names cannot be used by this worker; empty if it can."""
    try:
        if (choice := chosen_library()) in _MODULES:
            _imported(choice)
    except ValueError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class LocalTransform:
    """Transforms along several dimensions in one call.

    Args:
        kind: "fftn", "ifftn", "rfftn" or "irfftn".
        dims: the dimensions; a real transform is along the last one.
        lengths: the numbers of points along them; real transforms have n // 2 + 1 coefficients.
        norm: "backward" or "forward", as torch names them.

    >>> import torch
    >>> LocalTransform("fftn", (0,), (2,), "backward")(torch.tensor([1 + 0j, 2]))
    tensor([ 3.+0.j, -1.+0.j])
    """

    kind: str
    dims: tuple[int, ...]
    lengths: Shape
    norm: str

    def library(self, x: Tensor) -> str:
        """The library that transforms x."""
        # Anything that watches torch's functions (a compiler, a counter of operations) must see
        # one.
        if is_compiling() or _get_current_dispatch_mode() is not None:
            return "torch"
        choice = chosen_library()
        if choice == "torch" or not is_plain(x) or x.dtype not in _DTYPES or not x.numel():
            return "torch"
        if choice != "auto":
            _imported(choice)
            return choice
        others = _others()
        if not others or x.numel() > _MOST or torch.are_deterministic_algorithms_enabled():
            return "torch"
        key = self, x.dtype, x.shape, x.stride(), torch.get_num_threads()
        found = _measured.get(key, 0)
        if isinstance(found, int):  # the number of earlier calls
            found = found + 1 if found + 1 < _CALLS else _Trial(self, others)
            remember(_measured, key, found)
        if isinstance(found, _Trial):
            library = found.next()
            if found.is_over:
                remember(_measured, key, library)
            else:
                _begun.trial = found  # times the call that follows
            return library
        return found if isinstance(found, str) else "torch"

    def __call__(self, x: Tensor, library: str = "torch") -> Tensor:
        """The transform of x, by a library; only torch's is seen by autograd."""
        if is_compiling() or (trial := _begun.__dict__.pop("trial", None)) is None:
            return self._by(library, x)
        # with one thread its own time, which does not count others on its core
        clock = thread_time if torch.get_num_threads() == 1 else perf_counter
        begin = clock()
        y = self._by(library, x)
        if trial.transform == self:  # otherwise it is that of an earlier call that raised
            trial.add(library, clock() - begin)
        return y

    def _by(self, library: str, x: Tensor) -> Tensor:
        if library == "torch":
            function = getattr(torch.fft, self.kind)
            s = self.lengths if self.kind == "irfftn" else None
            return cast(Tensor, function(x, s=s, dim=self.dims, norm=self.norm))
        if library == "fftw":
            return self._by_fftw(x.detach())
        function, threads = getattr(_imported(library), self.kind), torch.get_num_threads()
        y = function(x.detach().numpy(), self.lengths, self.dims, self.norm, workers=threads)
        return torch.from_numpy(y)

    def _by_fftw(self, x: Tensor) -> Tensor:
        aligned, threads = x.data_ptr() % 64 == 0, torch.get_num_threads()
        key = self, x.dtype, x.shape, x.stride(), aligned, threads
        plans = _plans.get(key)
        if plans is None:
            plans = _plan(self, x, aligned, threads)
            remember(_plans, key, plans)
        for plan in plans:
            x = plan(x)
        return x if self.scale == 1 else x.mul_(self.scale)

    @cached_property
    def scale(self) -> float:
        """The factor that libraries without norms leave out."""
        is_there = self.kind in ("fftn", "rfftn")
        return 1.0 if (self.norm == "backward") == is_there else 1 / prod(self.lengths)


class _Trial:
    """A comparison of libraries for one form of tensors: they take turns in calls, and are timed.

    The calls are those of the program, with its caches and other workers. In isolation,
    consecutive calls were twice as fast as in the program, or noise affected all of them.

    Args:
        transform: the transform that is timed.
        others: the libraries besides torch's.

    Attributes:
        is_over: whether the library was chosen.
    """

    def __init__(self, transform: LocalTransform, others: tuple[str, ...]) -> None:
        self.transform, self.is_over = transform, False
        self._seconds: dict[str, list[float]] = {"torch": []}
        for library in others:
            with suppress(ValueError):  # a library whose own libraries are missing is of no use
                _imported(library)
                self._seconds[library] = []
        self._left = 4 * _BLOCK * _BLOCKS * len(self._seconds)  # how often it may be asked

    def next(self) -> str:
        """The library of the next call; the fastest, if enough calls were timed."""
        self._left -= 1  # calls that raise are not timed
        usual, waiting = self._timed("torch"), []
        for name, calls in self._seconds.items():
            times = self._timed(name)
            is_hopeless = len(times) >= _BLOCK - 1 and min(times) > _HOPELESS * min(usual)
            if len(calls) % _BLOCK > 0 or (len(calls) < _BLOCK * _BLOCKS and not is_hopeless):
                waiting.append(name)
        self.is_over = len(self._seconds) == 1 or not waiting or self._left < 0
        if self.is_over:
            found = {name: median(each) for name in self._seconds if (each := self._timed(name))}
            best = min(found, key=found.__getitem__, default="torch")
            is_faster = best in found and found[best] < _GAIN * found.get("torch", 0.0)
            return best if is_faster else "torch"
        # after another library, a library's code and tables are not in the caches
        begun = (name for name in waiting if len(self._seconds[name]) % _BLOCK)
        return next(begun, min(waiting, key=lambda name: len(self._seconds[name])))

    def add(self, library: str, seconds: float) -> None:
        """Record the time of a call."""
        self._seconds[library].append(seconds)

    def _timed(self, library: str) -> list[float]:
        return [each for n, each in enumerate(self._seconds[library]) if n % _BLOCK]


# the fastest library, or how often it was not asked yet
_measured: dict[Any, str | int | _Trial] = {}
_begun = local()  # the trial of the call that this thread is about to make
_plans: dict[Any, list[_FftwPlan]] = {}
_planner = Lock()  # FFTW's planner is not safe for several threads


class _FftwPlan:
    """A plan of FFTW: from tensors of one form to new ones, whose transformed dimensions are last.

    Plans are estimated, not measured, so they are the same, and so are the bits, in every run.

    Args:
        x: a tensor of that form; its values do not matter.
        dims: the dimensions.
        length: the length of the result along the last of them.
        dtype: the dtype of the result.
        flags, settings: pyfftw's.
    """

    def __init__(
        self, x: Tensor, dims: Shape, length: int, dtype: torch.dtype, *flags: str, **settings: Any
    ) -> None:
        order = sorted(order_of(x), key=lambda dim: dim in dims)
        shape = {**dict(enumerate(x.shape)), dims[-1]: length}
        self._lengths, self._back = [shape[dim] for dim in order], inverse_of(tuple(order))
        self._dtype, self._lock = dtype, Lock()
        with _planner:
            arrays = x.numpy(), self.room().numpy()
            self._plan = _imported("fftw").FFTW(*arrays, dims, flags=flags, **settings)

    def room(self) -> Tensor:
        return torch.empty(self._lengths, dtype=self._dtype, device="cpu").permute(self._back)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.room()
        with self._lock:  # a plan has arrays of its own
            self._plan.update_arrays(x.numpy(), y.numpy())
            self._plan.execute()
        return y


def _plan(transform: LocalTransform, x: Tensor, aligned: bool, threads: int) -> list[_FftwPlan]:
    """The plans of a transform, one after the other."""
    kind, dims, n = transform.kind, transform.dims, transform.lengths[-1]
    flags = ("FFTW_ESTIMATE", *(() if aligned else ("FFTW_UNALIGNED",)))
    direction = "FFTW_FORWARD" if kind in ("fftn", "rfftn") else "FFTW_BACKWARD"
    settings = {"direction": direction, "threads": threads}
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    if kind == "rfftn":
        return [_FftwPlan(like, dims, n // 2 + 1, complex_of(x.dtype), *flags, **settings)]
    if kind != "irfftn":
        return [_FftwPlan(like, dims, n, x.dtype, *flags, **settings)]
    real = real_of(x.dtype)
    if len(dims) == 1:
        return [_FftwPlan(like, dims, n, real, *flags, **settings)]
    # Others first: input that is no transform of real numbers is then treated as torch does, and
    # the last step may overwrite its input.
    others = _FftwPlan(like, dims[:-1], x.shape[dims[-2]], x.dtype, *flags, **settings)
    flags = (*flags, "FFTW_DESTROY_INPUT")
    return [others, _FftwPlan(others.room(), dims[-1:], n, real, *flags, **settings)]


@cache
def _others() -> tuple[str, ...]:
    """The installed libraries besides torch's."""
    return tuple(name for name, module in _PACKAGES.items() if find_spec(module) is not None)


@cache
def _imported(library: str) -> Any:
    try:
        return import_module(_MODULES[library])
    except ImportError as error:
        raise ValueError(
            f"{VARIABLE}={library} needs the package {_PACKAGES[library]}, which cannot be "
            f"imported ({error}); install it, or set {VARIABLE}=torch"
        ) from error
