"""The parts of solvers: the space of images, methods, histories, criteria and metrics.

A method defines one iteration. A criterion is a function of the history, and its `str` is the
reason in the solution; all workers stop when one of them would.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from tessel.core import Layout, Partition, replicate, shared_whole, tell, total, world
from tessel.imaging.signal import DistributedSignal, local_data
from tessel.transport import Group

TensorPair = tuple[Tensor, Tensor]
Schedule = float | Callable[[int], float]
PriorArguments = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]
Iterates = dict[str, Any]  # tensors by name, or lists of them; "x" is the image


@dataclass(frozen=True)
class Space:
    """The space of an image that is whole on every worker or in parts on them.

    ⟨a, b⟩ = Σ over all indices of Re(conj(a) b), where copies of one value count once.

    Args:
        layout: the layout of the image.
        workers: the workers that solve together, and get all inner products.
        differentiable: whether gradients go through inner products.

    >>> import tessel, torch
    >>> from tessel.imaging.solvers import Space
    >>> space = Space.of(torch.ones(3))
    >>> space.norm(torch.tensor([2.0, 1.0, 2.0])).item()
    3.0
    """

    layout: Layout
    workers: Partition
    differentiable: bool = False

    @classmethod
    def of(cls, start: Any, layout: Layout | None = None, differentiable: bool = False) -> Space:
        """The space of a signal, or of a tensor in this layout."""
        if isinstance(start, DistributedSignal):
            if layout not in (None, start.layout):
                raise ValueError(f"a signal has a layout of its own, {start.layout}, got {layout}")
            space = cls(start.layout, start.ctx.partition, differentiable)
        elif not isinstance(start, Tensor):
            raise TypeError(f"expected a tensor or a DistributedSignal, got {start!r}")
        elif layout is None and world().size > 1:
            raise ValueError(
                f"a tensor does not say how it is split over {world().size} workers; pass "
                f"layout=, or a DistributedSignal"
            )
        else:
            layout = layout or shared_whole(world(), tuple(start.shape))
            space = cls(layout, layout.partition, differentiable)
        if not space.workers.active:  # it would wait for sums of workers that do not expect it
            raise ValueError(
                f"this worker is not one of {space.workers}, which have a tensor in {layout}; call "
                "solvers on these workers alone, or pass a DistributedSignal on all workers"
            )
        if not space.layout.owns_once:
            raise ValueError(
                f"a solver needs an image with one value for each index, got {space.layout}; "
                "declare equal copies with shared=True"
            )
        if differentiable and space.workers.size != space.layout.partition.size:
            raise NotImplementedError(
                "gradients through a solver need the image on all workers of the solver: the "
                f"image is on {space.layout.partition}, the solver on {space.workers}"
            )
        return space

    def check(self, x: Tensor, who: str) -> None:
        """Raise on all workers if the start of one is not its part of an image."""
        for worker, (shape, dtype) in tell(self.workers, (tuple(x.shape), x.dtype)).items():
            if shape != self.layout.shape_on(worker):
                raise ValueError(
                    f"{who}: expected a start of shape {self.layout.shape_on(worker)} on worker "
                    f"{worker}, its part of {self.layout}, got {shape}"
                )
            if not dtype.is_floating_point and not dtype.is_complex:
                raise ValueError(
                    f"{who}: expected a start of floating point or complex numbers, got {dtype} "
                    f"on worker {worker}"
                )

    def inners(self, *pairs: TensorPair) -> Tensor:
        """Several inner products in one exchange, as one tensor."""
        if self.differentiable:
            # A shared number, of which each part of the image uses a copy: the gradients of all
            # uses are summed.
            wide = [(_wide(a).reshape(-1), _wide(b).reshape(-1)) for a, b in pairs]
            shares = torch.stack([torch.vdot(a, b).real for a, b in wide])
            return self._own(total(shares, self.layout.partition, self.layout.shared))
        return self.numbers(*pairs)

    def numbers(self, *pairs: TensorPair) -> Tensor:
        """Inner products as numbers that are the same, bit by bit, on all workers."""
        # Of several copies of a value the first one counts, as the layout defines.
        wide = [(_wide(a.detach()), _wide(b.detach())) for a, b in pairs]
        shares = torch.stack([self.layout.local_inner(a, b).real for a, b in wide])
        return self.prepare().sum(shares)

    def sum(self, shares: Tensor) -> Tensor:
        """The sum of all workers' shares, without a gradient."""
        return self.prepare().sum(shares.detach())

    def total(self, share: Tensor) -> Tensor:
        """The sum of all workers' shares of a number, on every worker."""
        if self.differentiable:
            return self._own(total(share, self.layout.partition))
        return self.sum(share)

    def apart(self, number: Tensor) -> Tensor:
        """A copy of such a number for values that only this worker has, such as measurements."""
        if not self.differentiable:
            return number
        partition, shared = self.layout.partition, self.layout.shared
        each = tuple(partition.shape[axis] for axis in self._others)  # one number for each part
        layout = Layout.split(partition, each, self._others, shared)
        return replicate(number.reshape([1] * len(each)), layout, shared).reshape(())

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """The inner product of two images, on every worker."""
        return self.inners((a, b))[0]

    def norm(self, a: Tensor) -> Tensor:
        """The Euclidean norm of an image, on every worker."""
        return self.inner(a, a).sqrt()

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is true on any worker: the same answer on all."""
        if not flags or self.workers.size == 1:
            return list(flags)
        # A sum, not an exchange of objects: the transport does this in one message.
        said = self.sum(torch.tensor([float(flag) for flag in flags], device="cpu"))
        return [count > 0 for count in said.tolist()]

    def _own(self, number: Tensor) -> Tensor:
        """A copy of a shared number for this worker's part of the image."""
        whole = shared_whole(self.layout.partition, tuple(number.shape))
        return replicate(number, whole, self._others)

    @cached_property
    def _others(self) -> list[int]:
        """The axes of the grid along which workers hold different parts."""
        return [a for a in range(self.layout.partition.dim) if a not in self.layout.shared]

    def prepare(self) -> Group:
        """The group of the workers, which all of them make together."""
        group: Group | None = self.__dict__.get("_group")
        if group is None:  # cached: each iteration of a solver sums several times
            group = self.__dict__["_group"] = self.workers.prepare()
        return group

    def __getstate__(self) -> dict[str, Any]:
        # without the group, which belongs to this worker and its job
        return {each.name: getattr(self, each.name) for each in fields(self)}


def _wide(a: Tensor) -> Tensor:
    """A tensor in the dtype of sums: torch has no inner product in half precision."""
    return a.float() if a.dtype in (torch.float16, torch.bfloat16) else a


class Method(ABC):
    """An iterative method: how its values begin, and how they change.

    All its state between iterations is in its values, so that these can be written to a checkpoint.
    Tensors whose shape begins with that of the image have its layout; numbers are the same on all
    workers. A subclass implements `iterate`, and `begin` if it keeps more than the image.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> class Half(solvers.Method):
    ...     def iterate(self, values, iteration, space):
    ...         return {"x": values["x"] / 2}
    >>> solvers.solve(Half(), torch.ones(2), max_iterations=2).x
    tensor([0.2500, 0.2500])
    """

    reports: ClassVar[tuple[str, ...]] = ()  # the names of values that go into the history

    def begin(self, x: Tensor, space: Space) -> Iterates:
        """The values before the first iteration."""
        return {"x": x}

    @abstractmethod
    def iterate(self, values: Iterates, iteration: int, space: Space) -> Iterates:
        """The values after an iteration; the old ones are not changed."""

    def complete(self, values: Iterates, space: Space) -> Iterates:
        """Compute all values from those of a checkpoint that have the image's layout, and numbers.

        It is called when a run resumes with the image in other parts; a method that keeps more,
        such as measurements, computes it again.
        """
        return values

    @property
    def name(self) -> str:
        """The title of a progress bar."""
        return type(self).__name__


def check_positive(who: object, **numbers: Any) -> None:
    """Raise ValueError for a number that is not finite and above zero; functions pass."""
    _check(who, numbers, lambda n: callable(n) or (_is_number(n) and n > 0), "number above 0")


def check_not_negative(who: object, **numbers: Any) -> None:
    """Raise ValueError for a number that is not finite, or below zero; functions pass."""
    _check(who, numbers, lambda n: callable(n) or (_is_number(n) and n >= 0), "number 0 or above")


def check_prior(method: Any, weight: float = 1.0) -> None:
    """Raise ValueError if a method has arguments of a prior, but no prior."""
    if method.prior is None and (method.prior_arguments != {} or weight != 1.0):
        raise ValueError(
            f"{type(method).__name__}: arguments of a prior need one, got prior=None, "
            f"prior_arguments={method.prior_arguments!r} and weight={weight}"
        )


def check_count(who: object, least: int, **numbers: Any) -> None:
    """Raise ValueError for anything but an integer of at least `least`."""
    is_count = lambda n: isinstance(n, int) and _is_number(n) and n >= least  # noqa: E731
    _check(who, numbers, is_count, f"whole number of {least} or more")


def step_at(method: Any, iteration: int) -> float:
    """The step of a method in an iteration, which must be finite and above zero."""
    if not callable(method.step):
        return method.step
    step = method.step(iteration)
    check_positive(method, **{f"step of iteration {iteration}": step})
    return step


def arguments_at(arguments: PriorArguments, iteration: int) -> Mapping[str, Any]:
    """The keyword arguments of an iteration."""
    return arguments(iteration) if callable(arguments) else arguments


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check(
    who: object, numbers: Mapping[str, Any], is_right: Callable[[Any], bool], expected: str
) -> None:
    for name, value in numbers.items():
        if not is_right(value):
            caller = who if isinstance(who, str) else type(who).__name__
            raise ValueError(f"{caller}: {name} must be a {expected}, got {value!r}")


class History(dict[str, list[float]]):
    """For each name one number per iteration, the same on all workers except `seconds`.

    `change` is ‖x_k - x_(k-1)‖ / ‖x_k‖, `seconds` the duration of the iteration. The others are
    those of the method and of the metrics.

    >>> from tessel.imaging.solvers import History
    >>> history = History()
    >>> history.append({"psnr": 20.0})
    >>> history["psnr"], history.iterations
    ([20.0], 1)
    """

    def append(self, numbers: Mapping[str, float]) -> None:
        """Add the numbers of one iteration."""
        for name, number in numbers.items():
            self.setdefault(name, []).append(number)

    @property
    def iterations(self) -> int:
        """The number of iterations."""
        return max(map(len, self.values()), default=0)

    def last(self) -> dict[str, float]:
        """The numbers of the last iteration."""
        return {name: numbers[-1] for name, numbers in self.items()}

    def __missing__(self, name: str) -> list[float]:
        known = ", ".join(self) or "nothing yet"
        raise KeyError(f"the history has no {name!r}; it has {known}")


Criterion = Callable[[History], bool]


@dataclass(frozen=True)
class Below:
    """Stop when a number of the history is below a limit.

    >>> from tessel.imaging.solvers import Below, History
    >>> Below("residual", 1e-3)(History({"residual": [0.1, 1e-4]}))
    True
    """

    name: str
    limit: float

    def __post_init__(self) -> None:
        check_positive(self, limit=self.limit)

    def __call__(self, history: History) -> bool:
        return history[self.name][-1] < self.limit

    def __str__(self) -> str:
        return f"{self.name} below {self.limit:g}"


class RelativeChange(Below):
    """Stop when ‖x_k - x_(k-1)‖ < limit ‖x_k‖.

    >>> from tessel.imaging.solvers import RelativeChange
    >>> str(RelativeChange(1e-5))
    'change below 1e-05'
    """

    def __init__(self, limit: float) -> None:
        super().__init__("change", limit)


@dataclass(frozen=True)
class Plateau:
    """Stop when a number has not improved by more than `margin` in `patience` iterations.

    Args:
        name: the name of the number in the history.
        patience: the number of iterations.
        margin: the smallest change that counts as an improvement.
        larger_is_better: whether larger is better, as for a PSNR, or smaller, as for a loss.

    >>> from tessel.imaging.solvers import History, Plateau
    >>> Plateau("psnr", patience=2)(History({"psnr": [20.0, 25.0, 24.0, 25.0]}))
    True
    """

    name: str
    patience: int = 10
    margin: float = 0.0
    larger_is_better: bool = True

    def __post_init__(self) -> None:
        check_count(self, 1, patience=self.patience)
        check_not_negative(self, margin=self.margin)

    def __call__(self, history: History) -> bool:
        sign = 1 if self.larger_is_better else -1
        numbers = [sign * number for number in history[self.name]]
        before, recent = numbers[: -self.patience], numbers[-self.patience :]
        return bool(before) and max(recent) <= max(before) + self.margin

    def __str__(self) -> str:
        return f"{self.name} no better for {self.patience} iterations"


@dataclass(frozen=True)
class TimeLimit:
    """Stop after a number of seconds of iterations, including those before a resume.

    >>> from tessel.imaging.solvers import History, TimeLimit
    >>> TimeLimit(1.0)(History({"seconds": [0.6, 0.6]}))
    True
    """

    seconds: float

    def __post_init__(self) -> None:
        check_positive(self, seconds=self.seconds)

    def __call__(self, history: History) -> bool:
        return sum(history["seconds"]) >= self.seconds

    def __str__(self) -> str:
        return f"{self.seconds:g} seconds"


class PSNR:
    """The peak signal-to-noise ratio in decibels.

    PSNR(x) = 10 log10(peak² n / ‖x - truth‖²), for n numbers in all.

    Args:
        truth: the true image: a signal, or a tensor in its layout.
        layout: the layout of a tensor, required with several workers.
        peak: the largest value of an image.

    >>> import torch
    >>> from tessel.imaging.solvers import PSNR
    >>> round(PSNR(torch.ones(4))(torch.full((4,), 0.9)), 3)
    20.0
    """

    def __init__(self, truth: Any, layout: Layout | None = None, peak: float = 1.0) -> None:
        check_positive(self, peak=peak)
        self.space, self.truth = Space.of(truth, layout), local_data(truth)
        self.peak = peak

    def __call__(self, x: Tensor) -> float:
        if x.shape != self.truth.shape:
            raise ValueError(
                f"PSNR: the image has shape {tuple(x.shape)} and the truth has shape "
                f"{tuple(self.truth.shape)} on this worker; both must have the same layout"
            )
        difference = x - self.truth
        squares = self.space.numbers((difference, difference))[0]
        mean = float(squares) / math.prod(self.space.layout.shape)
        return 10 * math.log10(self.peak**2 / mean) if mean else math.inf
