"""Losses: one number for a whole tensor, which all workers of its partition share.

Each worker computes the share of its own part, and the shares are summed. The sum is a shared
value: every worker has it and derives it, and the gradients are those of one process.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tessel.agreement import CLAIM, Claim, Meeting, Terms, admit
from tessel.layout import Cut, Layout, Shape
from tessel.move import Move
from tessel.nn.layer import Layer, Result
from tessel.partition import Partition
from tessel.shared import even, spread, total
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.use import used
from tessel.transport import NUM_WORDS

MEMORY = 64  # kinds of calls that a loss remembers
NUM_FAULTS = 8  # of which the first is none
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FAULTS: dict[int, tuple[type[Exception], str]] = {
    1: (RuntimeError, "all elements of input should be between 0 and 1"),
    2: (RuntimeError, "all elements of target should be between 0 and 1"),
    3: (IndexError, "a target is out of bounds: it is none of the classes and not ignore_index"),
    4: (ValueError, "var has negative entry/entries"),
}


@dataclass(frozen=True)
class MarkedClaim(Claim):
    """A claim with one word about values: a fault of them, and a checksum if they are copies."""

    mark: int = 0

    def words(self) -> list[int]:
        return [*super().words(), self.mark]


@dataclass(frozen=True)
class Agreed:
    """What all workers know of a tensor beside the input: its parts, its kind, the marks."""

    workers: tuple[int, ...]
    shapes: tuple[Shape, ...]
    terms: Terms
    marks: tuple[int, ...] = ()


class MarkedMeeting(Meeting[Agreed]):
    """Where workers agree on a tensor beside the input."""

    def _conclude(self, everyones: bytes) -> Agreed:
        marks = memoryview(everyones).cast("q")[1 + CLAIM :: NUM_WORDS]
        return replace(super()._conclude(everyones), marks=tuple(marks.tolist()))


def _agreed(shapes: dict[int, Shape], terms: Terms) -> Agreed:
    return Agreed(tuple(shapes), tuple(shapes.values()), terms)


class DistributedLossBase(Layer):
    """A loss over a partitioned tensor: each worker's share, summed to one shared value.

    A subclass derives from this and from torch's own loss, whose arguments and defaults it has.
    All workers hold the same weights.
    """

    reduction: str
    setting_names: tuple[str, ...] = ("reduction",)  # what torch's own `forward` reads, plain
    weight_names: tuple[str, ...] = ()  # and tensors

    def measure(
        self, x: Tensor, others: Sequence[Any], reduction: str, weights: Sequence[Tensor | None]
    ) -> Tensor:
        """Torch's own loss of local tensors, with this reduction and these weights."""
        plain, _ = self._settings
        settings = {**dict(plain), **dict(zip(self.weight_names, weights, strict=True))}
        own = SimpleNamespace(**{**settings, "reduction": reduction})
        return _torch_loss(type(self)).forward(own, x, *others)

    def sample(self, x: Tensor, others: Sequence[Any], layout: Layout) -> tuple[Any, Any, Any]:
        """The smallest input, others and weights of these kinds on which torch would complain."""
        raise NotImplementedError(f"{type(self).__name__} does not give a sample")

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if isinstance(input, SpreadTensor):  # torch's function of it is the loss of the whole
            found: Tensor = self.torch_forward(input, target)
            return found
        return super().forward(input, target)

    @property
    def weights(self) -> tuple[Tensor | None, ...]:
        """The weights, whole."""
        return tuple(getattr(self, name) for name in self.weight_names)

    def agree_on(self, name: str, value: Any, mark: int, note: str = "") -> Agreed:
        """Learn from all workers what they hold of a tensor beside the input."""
        claim = MarkedClaim.of(value)
        assert isinstance(claim, MarkedClaim)
        return self._marked_meeting(name, note).reach(replace(claim, mark=mark))

    def check_parts(self, name: str, agreed: Agreed, layout: Layout, expected: Layout) -> None:
        """Raise ValueError if the parts of a tensor do not lie as those of the input."""
        misfit = _misfit(agreed.workers, agreed.shapes, expected)
        if misfit is not None:
            worker, shape = misfit
            raise ValueError(
                f"{self!r}: the {name} must lie as the input does: worker {worker} has an "
                f"input of shape {layout.shape_on(worker)} and a {name} of shape {shape}, "
                f"expected {expected.shape_on(worker)}"
            )

    def check_values(self, agreed: Agreed) -> None:
        """Raise what torch raises for bad values, if any worker has some."""
        for worker, mark in zip(agreed.workers, agreed.marks, strict=True):
            if fault := mark % NUM_FAULTS:
                kind, text = _FAULTS[fault]
                raise kind(f"{self!r}: {text}, on worker {worker}")

    def check_copies(self, name: str, agreed: Agreed, layout: Layout, axes: Sequence[int]) -> None:
        """Raise ValueError if workers along `axes` hold other values, by their marks."""
        partition = layout.partition
        marks = dict(zip(agreed.workers, agreed.marks, strict=True))
        for worker, mark in marks.items():
            place = partition.coordinates(worker)
            assert place is not None
            first = partition.worker_at([0 if a in axes else at for a, at in enumerate(place)])
            if mark != marks[first]:
                raise ValueError(
                    f"{self!r}: workers along axes {tuple(axes)} must hold the same {name}, and "
                    f"worker {worker} holds another than worker {first}"
                )

    def check_kind(self, x: Tensor, others: Sequence[Any], layout: Layout) -> None:
        """Let torch say, once for each kind of call, what it does not take.

        Workers without a part of the input hear of it too, since it is said of a sample.
        """
        kinds = tuple((*_kind(each), getattr(each, "ndim", each)) for each in (x, *others))
        key = (layout.shape, self._settings, kinds)
        known: dict[Any, bool] = self.__dict__.setdefault("_known_kinds", {})
        if key not in known:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                x, others, weights = self.sample(x, others, layout)
                self.measure(x, others, self.reduction, weights)
            _remember(known, key, True)

    @property
    def _settings(self) -> tuple[Any, ...]:
        """All that the workers must have in common, but for the values of weights."""
        plain = tuple((name, getattr(self, name)) for name in self.setting_names)
        return plain, tuple((*_kind(each), _shape(each)) for each in self.weights)

    def _marked_meeting(self, name: str, note: str) -> MarkedMeeting:
        """One for each state of the loss, in which all workers must be alike."""
        key = (name, note, self._settings, *map(_version, self.weights))
        meetings: dict[Any, MarkedMeeting] = self.__dict__.setdefault("_marked_meetings", {})
        if key not in meetings:
            sums = ", ".join(f"{_checksum(each):x}" for each in self.weights if each is not None)
            weights = f" with weights of checksum {sums}" if sums else ""
            label = f"the {name} of {self!r}{note}{weights}"
            identity = f"{label} {self._settings}"
            meeting = MarkedMeeting(self._group, label, self.P_x.ranks, _agreed, identity)
            _remember(meetings, key, meeting)
        return meetings[key]

    def _is_derived(self, name: str) -> bool:
        return super()._is_derived(name) or name in ("_known_kinds", "_marked_meetings")

    def extra_repr(self) -> str:
        settings = [f"{name}={value!r}" for name, value in self._settings[0]]
        return ", ".join([super().extra_repr(), *settings])


@lru_cache(maxsize=1024)
def _misfit(
    workers: tuple[int, ...], shapes: tuple[Shape, ...], layout: Layout
) -> tuple[int, Shape] | None:
    """The first worker whose part is not that of the layout, and its shape."""
    parts = zip(workers, shapes, strict=True)
    return next((each for each in parts if each[1] != layout.shape_on(each[0])), None)


def _torch_loss(kind: type) -> Any:
    """The loss of torch that a class derives from."""
    return next(each for each in kind.__mro__ if each.__module__ == torch.nn.modules.loss.__name__)


def _kind(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Tensor):
        return (type(value),)
    return value.dtype, value.device.type, value.requires_grad


def _shape(value: Any) -> Shape | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _version(weight: Tensor | None) -> Any:
    """What changes on this worker when a weight does."""
    if weight is None or weight.is_inference():
        return None
    return weight.data_ptr(), weight._version


def _checksum(value: Tensor) -> int:
    """A number that tells values apart."""
    if not value.numel():
        return 0
    with torch._C._DisableFuncTorch():  # a checksum belongs to no transform of torch.func
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return zlib.crc32(flat.view(torch.uint8).cpu().numpy().data)


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= MEMORY:
        del known[next(iter(known))]
    known[key] = value


def _admitted(value: Tensor, agreed: Agreed) -> Tensor:
    """A tensor that needs a gradient, or carries a tangent, here if it does so anywhere."""
    return even(admit(value, agreed.terms, True), agreed.terms)


def _is_dense(value: Any, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether values can be looked at; what the workers agree on says what else is wrong."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        return False
    return value.dtype in dtypes


def _within_unit(x: Any) -> bool:
    """Whether all values lie in [0, 1]; on an accelerator torch's kernel itself stops if not."""
    if not _is_dense(x, _FLOATS) or x.device.type != "cpu" or not x.numel():
        return True
    low, high = x.detach().aminmax()
    return bool((low >= 0) & (high <= 1))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What shares are summed in, which for short numbers is torch's float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _summed(share: Tensor, layout: Layout) -> Tensor:
    """The sum of all shares of the workers of `layout`."""
    if not layout.owns_once:
        raise NotImplementedError(
            f"a loss of separate copies of a tensor: got {layout}; sum or share them before"
        )
    return total(share, layout.partition, layout.shared)


@lru_cache(maxsize=1024)
def _one_number(partition: Partition) -> Layout:
    return Layout.whole(partition, (), shared=True)


class _Elementwise(DistributedLossBase):
    """A loss of each element by itself."""

    def compute(self, x: Tensor, layout: Layout, *args: Any) -> Result:
        goal = layout if self.reduction == "none" else _one_number(layout.partition)
        alone = layout.partition.size == 1
        if alone and all(_shape(each) == x.shape for each in args):
            return self.torch_forward(x, *args), goal
        others = self.others(x, layout, *args)
        if alone:
            return self.torch_forward(x, *others), goal
        self.check_kind(x, others, layout)
        weights = [self._own_weight(weight, layout) for weight in self.weights]
        if self.reduction == "none":
            return self.measure(x, others, "none", weights), goal
        return self._reduced(x, others, layout, weights), goal

    def others(self, x: Tensor, layout: Layout, *args: Any) -> tuple[Any, ...]:
        """What goes with the input, after all workers agreed on it."""
        (target,) = args
        return (self.target(x, target, layout),)

    def target(self, x: Tensor, target: Tensor, layout: Layout, note: str = "") -> Tensor:
        agreed = self.agree_on("target", target, self.fault(x, target), note)
        self.check_parts("target", agreed, layout, layout)
        self.check_values(agreed)
        return _admitted(target, agreed)

    def fault(self, x: Tensor, target: Any) -> int:
        """What torch would not take in the values of this worker's parts, or zero."""
        return 0

    def sample(self, x: Tensor, others: Sequence[Any], layout: Layout) -> tuple[Any, Any, Any]:
        for weight in self.weights:
            if weight is not None:
                _check_broadcast(tuple(weight.shape), layout.shape)
        one = (1,) * x.ndim
        small = [_zeros(each, one) if isinstance(each, Tensor) else each for each in (x, *others)]
        weights = [None if weight is None else _zeros(weight, ()) for weight in self.weights]
        return small[0], small[1:], weights

    def _own_weight(self, weight: Tensor | None, layout: Layout) -> Tensor | None:
        if weight is None:
            return None
        return layout.local_part(weight.expand(layout.shape))  # torch gives it no gradient

    def _reduced(
        self, x: Tensor, others: Sequence[Any], layout: Layout, weights: Sequence[Tensor | None]
    ) -> Tensor:
        if self.reduction == "mean" and x.numel():
            mean = self.measure(x, others, "mean", weights)
            share = mean.to(_wide(mean.dtype)) * (x.numel() / prod(layout.shape))
            return _summed(share, layout).to(mean.dtype)
        sum = self.measure(x, others, "sum", weights)
        share = sum.to(_wide(sum.dtype))
        if self.reduction != "sum":
            share = share / (prod(layout.shape) if self.reduction == "mean" else layout.shape[0])
        return _summed(share, layout).to(sum.dtype)


def _zeros(like: Tensor, shape: Shape) -> Tensor:
    """A small tensor of the same kind."""
    zeros = torch.zeros(shape, dtype=like.dtype, device=like.device)
    return zeros.requires_grad_() if like.requires_grad else zeros


def _check_broadcast(weight: Shape, shape: Shape) -> None:
    """Raise torch's error if a weight cannot be broadcast to this shape."""
    value = torch.zeros(())
    result = tuple(torch.broadcast_tensors(value.expand(shape), value.expand(weight))[0].shape)
    if result != shape:
        raise RuntimeError(
            f"output with shape {list(shape)} doesn't match the broadcast shape {list(result)}"
        )


class DistributedL1Loss(_Elementwise, torch.nn.L1Loss):
    """The absolute error of a tensor that is spread over `P_x`: `torch.nn.L1Loss`.

    Forward:  L = mean or sum of |x − y|, on every worker; with "none", this worker's part of it.

    Args:
        P_x: where input and target lie; axis d splits dimension d.
        size_average, reduce: torch's old names of reductions.
        reduction: "mean", "sum" or "none".

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedL1Loss(P)(torch.ones(2, 3), torch.zeros(2, 3))
    tensor(1.)
    """


class DistributedMSELoss(_Elementwise, torch.nn.MSELoss):
    """The squared error of a tensor that is spread over `P_x`: `torch.nn.MSELoss`.

    Forward:  L = mean or sum of (x − y)², on every worker; with "none", this worker's part of it.

    Args:
        P_x: where input and target lie; axis d splits dimension d.
        size_average, reduce: torch's old names of reductions.
        reduction: "mean", "sum" or "none".

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedMSELoss(P)(torch.ones(2, 3), torch.zeros(2, 3))
    tensor(1.)
    """


class DistributedSmoothL1Loss(_Elementwise, torch.nn.SmoothL1Loss):
    """The smooth absolute error of a tensor spread over `P_x`: `torch.nn.SmoothL1Loss`.

    Forward:  L = mean or sum of d²/2β where d = |x − y| < β, else d − β/2, on every worker.

    Args:
        P_x: where input and target lie; axis d splits dimension d.
        size_average, reduce: torch's old names of reductions.
        reduction: "mean", "sum" or "none", which gives this worker's part.
        beta: below which distance the loss is square.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedSmoothL1Loss(P)(torch.ones(2, 3), torch.zeros(2, 3))
    tensor(0.5000)
    """

    setting_names = ("reduction", "beta")


class DistributedHuberLoss(_Elementwise, torch.nn.HuberLoss):
    """The Huber loss of a tensor that is spread over `P_x`: `torch.nn.HuberLoss`.

    Forward:  L = mean or sum of d²/2 where d = |x − y| < δ, else δ(d − δ/2), on every worker.

    Args:
        P_x: where input and target lie; axis d splits dimension d.
        reduction: "mean", "sum" or "none", which gives this worker's part.
        delta: below which distance the loss is square.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedHuberLoss(P)(torch.ones(2, 3), torch.zeros(2, 3))
    tensor(0.5000)
    """

    setting_names = ("reduction", "delta")


class DistributedBCELoss(_Elementwise, torch.nn.BCELoss):
    """The binary cross entropy of a tensor that is spread over `P_x`: `torch.nn.BCELoss`.

    Forward:  L = mean or sum of −w(y·log x + (1 − y)·log(1 − x)), on every worker.

    Args:
        P_x: where input and target lie; axis d splits dimension d.
        weight: of each element; the same whole tensor on every worker, broadcast to the whole
            input.
        size_average, reduce: torch's old names of reductions.
        reduction: "mean", "sum" or "none", which gives this worker's part.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedBCELoss(P)(torch.ones(2, 3) / 2, torch.ones(2, 3))
    tensor(0.6931)
    """

    weight_names = ("weight",)

    def fault(self, x: Tensor, target: Any) -> int:
        if not _within_unit(x):
            return 1
        return 0 if _within_unit(target) else 2


class DistributedBCEWithLogitsLoss(_Elementwise, torch.nn.BCEWithLogitsLoss):
    """The binary cross entropy of logits spread over `P_x`: `torch.nn.BCEWithLogitsLoss`.

    Forward:  L = mean or sum of −w(p·y·log σ(x) + (1 − y)·log(1 − σ(x))), on every worker.

    Args:
        P_x: where input and target lie; axis d splits dimension d.
        weight: of each element; the same whole tensor on every worker, broadcast to the whole
            input.
        size_average, reduce: torch's old names of reductions.
        reduction: "mean", "sum" or "none", which gives this worker's part.
        pos_weight: of positive targets, broadcast likewise.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedBCEWithLogitsLoss(P)(torch.zeros(2, 3), torch.ones(2, 3))
    tensor(0.6931)
    """

    weight_names = ("weight", "pos_weight")


class DistributedKLDivLoss(_Elementwise, torch.nn.KLDivLoss):
    """The Kullback-Leibler divergence of log-probabilities over `P_x`: `torch.nn.KLDivLoss`.

    Forward:  L = mean or sum of y(log y − x), or that sum over the whole batch size, on every
    worker.

    Args:
        P_x: where input and target lie; axis d splits dimension d.
        size_average, reduce: torch's old names of reductions.
        reduction: "mean", "batchmean", "sum" or "none", which gives this worker's part.
        log_target: whether the target is given as logarithms.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> loss = tessel.nn.DistributedKLDivLoss(P, reduction="batchmean")
    >>> loss(torch.zeros(2, 2), torch.ones(2, 2) / 2)
    tensor(-0.6931)
    """

    setting_names = ("reduction", "log_target")


class DistributedPoissonNLLLoss(_Elementwise, torch.nn.PoissonNLLLoss):
    """Minus the log-likelihood of Poisson rates spread over `P_x`: `torch.nn.PoissonNLLLoss`.

    Forward:  L = mean or sum of exp(x) − y·x, or of x − y·log(x + ε), on every worker.

    Args:
        P_x: where input and target lie; axis d splits dimension d.
        log_input: whether the input is the logarithm of the rate.
        full: whether to add Stirling's approximation of the constant.
        size_average, reduce: torch's old names of reductions.
        eps: added to a rate before its logarithm.
        reduction: "mean", "sum" or "none", which gives this worker's part.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedPoissonNLLLoss(P)(torch.zeros(2, 3), torch.ones(2, 3))
    tensor(1.)
    """

    setting_names = ("reduction", "log_input", "full", "eps")

    def forward(self, log_input: Tensor, target: Tensor) -> Tensor:  # torch's own names
        return super().forward(log_input, target)


class DistributedGaussianNLLLoss(_Elementwise, torch.nn.GaussianNLLLoss):
    """Minus the log-likelihood of Gaussian means spread over `P_x`: `torch.nn.GaussianNLLLoss`.

    Forward:  L = mean or sum of (log v + (x − y)²/v)/2, on every worker, where v is at least ε.

    The variance is a number, or lies as the input does, or has length one along one dimension or
    lacks the last; workers along the axes that split this dimension hold the same values then.
    Where no worker has more than one element along a dimension, a variance of length one along it
    is taken to lie as the input does.

    Args:
        P_x: where input and target lie; axis d splits dimension d.
        full: whether to add the constant log(2π)/2.
        eps: the least variance.
        reduction: "mean", "sum" or "none", which gives this worker's part.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> loss = tessel.nn.DistributedGaussianNLLLoss(P)
    >>> loss(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3))
    tensor(0.5000)
    """

    setting_names = ("reduction", "full", "eps")

    def forward(  # type: ignore[override]
        self, input: Tensor, target: Tensor, var: Tensor | float
    ) -> Tensor:
        if isinstance(input, SpreadTensor):
            found: Tensor = self.torch_forward(input, target, var)
            return found
        return Layer.forward(self, input, target, var)

    def others(self, x: Tensor, layout: Layout, *args: Any) -> tuple[Any, ...]:
        target, var = args
        given = isinstance(var, Tensor)
        target = self.target(x, target, layout, " and var" if given else f" with var={var!r}")
        return target, self._variance(var, layout) if given else var

    def _variance(self, var: Tensor, layout: Layout) -> Tensor:
        agreed = self.agree_on("var", var, self._mark(var, layout))
        dim = _narrow_dim(agreed, layout)
        if dim is None:
            self.check_parts("var", agreed, layout, layout)
            self.check_values(agreed)
            return _admitted(var, agreed)
        axes = layout.cuts[dim].axes
        self.check_values(agreed)
        self.check_copies("var", agreed, layout, axes)
        var = _admitted(var, agreed)
        var = var if var.ndim == len(layout.shape) else var.unsqueeze(-1)
        return spread(var, _narrowed(layout, dim), axes)

    def _mark(self, var: Tensor, layout: Layout) -> int:
        if not _is_dense(var, _FLOATS):
            return 0
        fault = 4 if bool((var.detach() < 0).any()) else 0
        lengths = zip(var.shape, layout.cuts, strict=False)
        splits = (length == 1 and len(cut.intervals) > 1 for length, cut in lengths)
        is_copy = var.ndim != len(layout.shape) or any(splits)
        return fault + NUM_FAULTS * _checksum(var) if is_copy else fault


def _narrow_dim(agreed: Agreed, layout: Layout) -> int | None:
    """Along which dimension a variance is the same for all of the input, if along any."""
    inputs = [layout.shape_on(worker) for worker in agreed.workers]
    if list(agreed.shapes) == [shape[:-1] for shape in inputs]:
        return len(layout.shape) - 1
    if list(agreed.shapes) == inputs:
        return None
    for dim in range(len(layout.shape)):
        if list(agreed.shapes) == [_with_one(shape, dim) for shape in inputs]:
            return dim
    return None


def _with_one(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], 1, *shape[dim + 1 :])


@lru_cache(maxsize=1024)
def _narrowed(layout: Layout, dim: int) -> Layout:
    """The layout of a tensor of length one along `dim`, shared along the axes that split it."""
    cuts = (*layout.cuts[:dim], Cut((), ((0, 1),)), *layout.cuts[dim + 1 :])
    shared = (*layout.shared, *layout.cuts[dim].axes)
    return replace(layout, shape=_with_one(layout.shape, dim), cuts=cuts, shared=shared)


class _OverClasses(DistributedLossBase):
    """A loss over classes, which stand along dimension 1, or 0 of an input without a batch."""

    ignore_index: int
    setting_names: tuple[str, ...] = ("reduction", "ignore_index")
    weight_names = ("weight",)
    takes_probabilities = False

    def compute(self, x: Tensor, layout: Layout, *args: Any) -> Result:
        (target,) = args
        dim = min(1, len(layout.shape) - 1)
        samples = _without(layout, dim)
        goal = samples if self.reduction == "none" else _one_number(layout.partition)
        fitting = (samples.shape, layout.shape) if self.takes_probabilities else (samples.shape,)
        if layout.partition.size == 1 and _shape(target) in fitting:
            return self.torch_forward(x, target), goal
        target, is_probable = self._target(target, layout, samples, dim)
        self.check_kind(x, (target,), layout)
        if len(layout.cuts[dim].intervals) > 1:
            gather = Move(layout, layout.gathered([dim]))
            x = gather.apply(x)
            target = gather.apply(target) if is_probable else target
        each = self.measure(x, (target,), "none", self._own_weights(samples))
        if self.reduction == "none":
            return each, goal
        share = each.sum(dtype=_wide(each.dtype))
        return self._reduced(share, target, samples, is_probable).to(each.dtype), goal

    def sample(self, x: Tensor, others: Sequence[Any], layout: Layout) -> tuple[Any, Any, Any]:
        (target,) = others
        dim = min(1, len(layout.shape) - 1)
        shape = tuple(n if d == dim else 1 for d, n in enumerate(layout.shape))
        is_probable = target.ndim == len(shape)
        zeros = _zeros(target, shape if is_probable else (1,) * target.ndim)
        return _zeros(x, shape), (zeros,), self.weights

    def _target(
        self, target: Tensor, layout: Layout, samples: Layout, dim: int
    ) -> tuple[Tensor, bool]:
        """The target, after all workers agreed on it, and whether it gives probabilities."""
        is_split = len(layout.cuts[dim].intervals) > 1
        agreed = self.agree_on("target", target, self._mark(target, layout.shape[dim], is_split))
        is_probable = self.takes_probabilities and len(agreed.shapes[0]) == len(layout.shape)
        self.check_parts("target", agreed, layout, layout if is_probable else samples)
        self.check_values(agreed)
        if is_split and not is_probable:
            self.check_copies("target", agreed, layout, layout.cuts[dim].axes)
        return _admitted(target, agreed), is_probable

    def _mark(self, target: Any, num_classes: int, is_split: bool) -> int:
        """What is wrong with the classes that this worker was given, and their checksum."""
        if not _is_dense(target, (torch.int64, torch.uint8)):
            return 0
        fault = 0 if self._are_classes(target.long(), num_classes) else 3
        return fault + NUM_FAULTS * _checksum(target) if is_split else fault

    def _are_classes(self, target: Tensor, num_classes: int) -> bool:
        """On an accelerator torch's kernel itself stops at those that are none."""
        if target.device.type != "cpu" or not target.numel():
            return True
        low, high = target.aminmax()
        if low >= 0 and high < num_classes:
            return True
        wrong = (target < 0) | (target >= num_classes)
        return not bool((wrong & (target != self.ignore_index)).any())

    def _own_weights(self, samples: Layout) -> list[Tensor | None]:
        return [
            used(each, samples) if each is not None and each.requires_grad else each
            for each in self.weights
        ]

    def _reduced(self, share: Tensor, target: Tensor, samples: Layout, is_probable: bool) -> Tensor:
        if self.reduction == "sum":
            return _summed(share, samples)
        if is_probable:
            return _summed(share / prod(samples.shape), samples)
        both = _summed(torch.stack([share, self._weight_of(target).to(share)]), samples)
        return both[0] / both[1]

    def _weight_of(self, target: Tensor) -> Tensor:
        """The weight of all samples of this worker that count, which a mean divides by."""
        target = target.long()
        counts = target != self.ignore_index
        (weight,) = self.weights
        if weight is None:
            return counts.sum()
        each = weight.detach()[torch.where(counts, target, 0)]
        return torch.where(counts, each, 0).sum(dtype=_wide(weight.dtype))


@lru_cache(maxsize=1024)
def _without(layout: Layout, dim: int) -> Layout:
    """The layout of one value for all of `dim`, shared along the axes that split it."""
    return replace(
        layout,
        shape=layout.shape[:dim] + layout.shape[dim + 1 :],
        cuts=layout.cuts[:dim] + layout.cuts[dim + 1 :],
        shared=layout.shared + layout.cuts[dim].axes,
    )


class DistributedCrossEntropyLoss(_OverClasses, torch.nn.CrossEntropyLoss):
    """The cross entropy of logits that are spread over `P_x`: `torch.nn.CrossEntropyLoss`.

    Forward:  L = Σ w[y]·(−log softmax(x)[y]) / Σ w[y] on every worker; not divided for "sum".

    The target lies as the input does. Classes, rather than probabilities, have no dimension 1:
    workers among which dimension 1 of the input is split hold the same classes, and the result of
    "none" is the same on them.

    Args:
        P_x: where the input lies; axis d splits dimension d.
        weight: of each class, the same on every worker.
        size_average, reduce: torch's old names of reductions.
        ignore_index: a target that does not count.
        reduction: "mean", "sum" or "none", which gives this worker's part.
        label_smoothing: the share of the uniform distribution in the target.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedCrossEntropyLoss(P)(torch.zeros(2, 2), torch.tensor([0, 1]))
    tensor(0.6931)
    """

    setting_names = ("reduction", "ignore_index", "label_smoothing")
    takes_probabilities = True


class DistributedNLLLoss(_OverClasses, torch.nn.NLLLoss):
    """Minus the log-likelihood of classes that are spread over `P_x`: `torch.nn.NLLLoss`.

    Forward:  L = Σ w[y]·(−x[y]) / Σ w[y] on every worker; not divided for "sum".

    The target has no dimension 1 and lies as the others do: workers among which dimension 1 of the
    input is split hold the same classes, and the result of "none" is the same on them.

    Args:
        P_x: where the input lies; axis d splits dimension d.
        weight: of each class, the same on every worker.
        size_average, reduce: torch's old names of reductions.
        ignore_index: a target that does not count.
        reduction: "mean", "sum" or "none", which gives this worker's part.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedNLLLoss(P)(-torch.ones(2, 2), torch.tensor([0, 1]))
    tensor(1.)
    """
