"""Norms: values shifted and scaled by the mean and variance of the whole tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from tessel import boxes
from tessel.boxes import Interval
from tessel.layout import Cut, Layout, Shape
from tessel.move import Move
from tessel.nn.layer import Layer, Result
from tessel.nn.windowed import outline
from tessel.shared import nothing, spread
from tessel.tensor.use import used_together
from tessel.transport import kept_in_job

Pair = tuple[Tensor | None, Tensor | None]
Settings = tuple[tuple[str, Any], ...]
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Gathering:
    """How all workers get the moments of all parts of what is averaged.

    The index space is (places, moments, statistics): each place of the grid along the averaged
    dimensions has its own moments, and all of them are everywhere along these axes afterwards.

    Args:
        layout: of the tensor.
        dims: its dimensions that are averaged.
        lengths: the global shape of a statistic.
        cuts: how a statistic lies on the grid, along the axes that split no averaged dimension.
        num_moments: how many there are for each statistic.
        is_shared: whether workers use the moments of all places as one shared value, from which
            all compute the same, or as separate copies.
    """

    layout: Layout
    dims: tuple[int, ...]
    lengths: Shape
    cuts: tuple[Cut, ...]
    num_moments: int = 2
    is_shared: bool = False

    @classmethod
    @kept_in_job
    def over(
        cls, layout: Layout, dims: tuple[int, ...], num_moments: int = 2, is_shared: bool = False
    ) -> Gathering:
        """Averages over `dims`: one statistic for each index of the other dimensions."""
        kept = [dim for dim in range(len(layout.shape)) if dim not in dims]
        return cls(
            layout,
            dims,
            tuple(layout.shape[dim] for dim in kept),
            tuple(layout.cuts[dim] for dim in kept),
            num_moments,
            is_shared,
        )

    @cached_property
    def places(self) -> list[tuple[Interval, ...]]:
        """For each place along the averaged dimensions, what it averages."""
        return list(product(*(self.layout.cuts[dim].intervals for dim in self.dims)))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many values each place averages, for every statistic alike."""
        return tuple(map(boxes.volume, self.places))

    @property
    def stays(self) -> bool:
        """Whether each worker has all of what it averages."""
        return len(self.places) == 1

    @cached_property
    def local_shape(self) -> Shape:
        """The shape of this worker's part of a statistic."""
        return self.move.domain.local_shape[2:]

    @cached_property
    def move(self) -> Move:
        """The one exchange."""
        num = len(self.places)
        apart = Cut(self.axes, tuple((k, k + 1) for k in range(num)))
        shared = self.axes if self.is_shared else ()
        return Move(self._moments(apart), self._moments(Cut((), ((0, num),)), shared))

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the grid that split what is averaged."""
        return tuple(axis for dim in self.dims for axis in self.layout.cuts[dim].axes)

    def _moments(self, places: Cut, shared: tuple[int, ...] = ()) -> Layout:
        shape = (len(self.places), self.num_moments, *self.lengths)
        cuts = (places, Cut((), ((0, self.num_moments),)), *self.cuts)
        return Layout(self.layout.partition, shape, cuts, (*self.layout.shared, *shared))

    @cached_property
    def statistics(self) -> Layout:
        """Two statistics of the whole, one shared value along all axes that split none."""
        split = {axis for cut in self.cuts for axis in cut.axes}
        shared = tuple(axis for axis in range(self.layout.partition.dim) if axis not in split)
        cuts = (Cut((), ((0, 2),)), *self.cuts)
        return Layout(self.layout.partition, (2, *self.lengths), cuts, shared)

    def gather(self, *moments: Tensor) -> tuple[Tensor, ...]:
        """This worker's moments to those of all places, which are the first dimension."""
        local = torch.stack([each.reshape(self.local_shape) for each in moments]).unsqueeze(0)
        return (local if self.stays else self.move.apply(local)).unbind(1)

    def shares(self, like: Tensor) -> Tensor:
        """What part of all averaged values lies at each place."""
        counts = torch.tensor(self.counts, dtype=like.dtype, device=like.device)
        return (counts / sum(self.counts)).reshape(-1, *[1] * len(self.lengths))


@dataclass(frozen=True)
class Groups(Gathering):
    """The gathering for channels in groups, which may be cut anywhere.

    Where every cut lies between two groups, the groups are split as their channels are. Elsewhere
    each place has moments of all groups, of which some may be of no value.

    Args:
        size: the number of channels of a group.
    """

    size: int = 1

    @classmethod
    @kept_in_job
    def of(cls, layout: Layout, num_groups: int) -> Groups:
        size = layout.shape[1] // num_groups
        batch, channels, *space = layout.cuts
        first = 2
        if all(bound % size == 0 for part in channels.intervals for bound in part):
            parts = tuple((start // size, stop // size) for start, stop in channels.intervals)
            groups = Cut(channels.axes, parts)
        else:
            groups, first = Cut((), ((0, num_groups),)), 1
        dims = tuple(range(first, 2 + len(space)))
        return cls(layout, dims, (layout.shape[0], num_groups), (batch, groups), size=size)

    @property
    def members(self) -> list[int]:
        """The group of each of this worker's channels, among those that it has moments of."""
        box = self.layout.box()
        assert box is not None
        whole = 1 in self.dims
        start = 0 if whole else box[1][0] // self.size
        return [channel // self.size - start for channel in range(*box[1])]

    def shares(self, like: Tensor) -> Tensor:
        if 1 not in self.dims:
            return super().shares(like)
        counts = [
            [self._channels(part, group) * boxes.volume(tuple(space)) for group in self._groups]
            for part, *space in self.places
        ]
        table = torch.tensor(counts, dtype=like.dtype, device=like.device)
        return (table / table.sum(0)).unsqueeze(1)  # (place, 1, group)

    @property
    def _groups(self) -> range:
        return range(self.lengths[1])

    def _channels(self, part: Interval, group: int) -> int:
        """How many channels of a group lie in `part`."""
        start, stop = boxes.overlap(part, (group * self.size, (group + 1) * self.size)) or (0, 0)
        return stop - start


def _local_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance over all dimensions but the second; zeros where there is no value."""
    x = _widened(x)
    mean = x.sum(_all_but_second(x)) / max(1, _count(x))
    centre = mean.detach()
    return mean, _mean_square(x, centre) - (mean - centre).square()


def _mean_square(x: Tensor, centre: Tensor) -> Tensor:
    """The mean of the squared distances from a constant centre.

    Its gradient is one pass over `x` and keeps nothing else.
    """
    target = centre.reshape(-1, *[1] * (x.dim() - 2)).expand_as(x)
    squares = F.mse_loss(x, target, reduction="none")
    return squares.sum(_all_but_second(x)) / max(1, _count(x))


def _widened(x: Tensor) -> Tensor:
    """In float32 at least, as torch's own norms compute."""
    return x.to(_WIDER.get(x.dtype, x.dtype))


def _all_but_second(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))


def _count(x: Tensor) -> int:
    return prod(x.shape[dim] for dim in _all_but_second(x))


def _combined(means: Tensor, variances: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance of all places from those of each (Chan's formula)."""
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)
    return mean, variance


def _normalized(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor,
    weight: Tensor | None,
    bias: Any,
    eps: float,
    gathering: Gathering | None = None,
) -> Tensor:
    """w (x − m) / √(v + ε) + b, with one number of each for every index of the second dimension.

    Torch's kernel for given statistics takes constants m̄, v̄. With those, s = √(v + ε) and s̄ alike,
    the result is w' (x − m̄) / s̄ + b' for w' = w s̄ / s and b' = b + (m̄ − m) w / s. This holds for
    all m and v, so gradients of every order are right, and nothing is kept but `x`.

    With a `gathering` all that comes before w' and b' is shared. Their use is what differs from
    worker to worker, and their gradients are what is summed, in one exchange.
    """
    dtype = variance.dtype
    weight, bias = (None if each is None else each.to(dtype) for each in (weight, bias))
    constant = variance.detach()
    centre = torch.zeros_like(constant) if mean is None else mean.detach()
    if variance.requires_grad:
        slope = ((constant + eps) / (variance + eps)).sqrt()
        weight = slope if weight is None else weight * slope
    if mean is not None and mean.requires_grad:
        shift = (centre - mean) / (constant + eps).sqrt()
        shift = shift if weight is None else shift * weight
        bias = shift if bias is None else bias + shift
    if gathering is not None and (weight is not None or bias is not None):
        both = [constant if each is None else each for each in (weight, bias)]
        first, second = spread(torch.stack(both), gathering.statistics, gathering.axes).unbind()
        weight = None if weight is None else first
        bias = None if bias is None else second
    if not x.numel():
        return nothing(tuple(x.shape), x, weight, bias).to(x.dtype)
    return F.batch_norm(x, centre, constant, weight, bias, False, 0.0, eps)


@lru_cache(maxsize=1024)
def _check(
    kind: type[torch.nn.Module],
    settings: Settings,
    training: bool,
    shape: Shape,
    least: Shape,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Let torch say what is wrong with a global shape, and with a dtype on the least shape."""
    for example in (outline(shape, dtype), torch.ones(least, dtype=dtype, device=device)):
        with torch.no_grad():
            kind(**dict(settings), device=example.device).train(training)(example)
    if not dtype.is_floating_point:
        raise NotImplementedError(
            f"{kind.__name__} over several workers takes real numbers, got {dtype}; "
            f"normalise the real and the imaginary part on their own"
        )


@kept_in_job
def _balancing(layout: Layout) -> Move | None:
    """To balanced parts; None if the parts are balanced."""
    balanced = layout.resized(layout.shape)
    return None if balanced == layout else Move(layout, balanced)


class _Norm(Layer):
    """What all norms have in common: torch's arguments, and its errors for the whole tensor."""

    torch_type: ClassVar[Any]
    training: bool
    weight: Any
    bias: Any

    def compute(self, x: Tensor, layout: Layout) -> Result:
        sizes = layout.partition.shape
        if all(sizes[axis] == 1 or axis in layout.shared for axis in range(len(sizes))):
            return self.torch_forward(x), layout
        if any(sizes[axis] > 1 for axis in layout.separate):
            raise NotImplementedError(
                f"{type(self).__name__} takes a tensor that is stored once, or as one shared "
                f"value; got separate copies in {layout}"
            )
        self._check(x, layout)
        if (balancing := _balancing(layout)) is not None:
            x, layout = balancing(x), balancing.codomain
        if not prod(layout.shape):
            return self._normalize_nothing(x, layout), layout
        return self.normalize(x, layout), layout

    def normalize(self, x: Tensor, layout: Layout) -> Tensor:
        """This worker's part of the result; the whole tensor has values, this part may not."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it normalises")

    def settings(self) -> Settings:
        """Torch's arguments."""
        raise NotImplementedError(f"{type(self).__name__} does not give its arguments")

    def feature_dims(self, ndim: int) -> range:
        """The dimensions that parameters have."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its parameters are for")

    def _check(self, x: Tensor, layout: Layout) -> None:
        shape = layout.shape
        fixed = self.feature_dims(len(shape))
        least = tuple(length if dim in fixed else 2 for dim, length in enumerate(shape))
        kept = (self.weight, getattr(self, "running_mean", None))
        dtype = next((each.dtype for each in kept if each is not None), None)
        settings = (*self.settings(), ("dtype", dtype))
        _check(self.torch_type, settings, self.training, shape, least, x.dtype, x.device.type)

    def _normalize_nothing(self, x: Tensor, layout: Layout) -> Tensor:
        """An empty result, after all that torch does for an empty tensor."""
        with torch.no_grad():
            self.torch_forward(x.new_empty(layout.shape))
        return nothing(tuple(x.shape), x, *self.local_parameters(layout)).to(x.dtype)

    def local_parameters(self, layout: Layout, shared: tuple[int, ...] = ()) -> Pair:
        """The weight and bias for this worker's part; their gradients are those of the whole.

        Along the axes `shared` all workers compute the same with them.
        """
        given = [self.weight, getattr(self, "bias", None)]
        present = [each for each in given if each is not None]
        if not present:
            return None, None
        both = used_together(present, layout, shared)  # one exchange for the two
        box = layout.box()
        assert box is not None
        region = tuple(slice(*box[dim]) for dim in self.feature_dims(len(box)))
        parts = iter(each[region] for each in both)
        weight, bias = (None if each is None else next(parts) for each in given)
        return weight, bias


class _Tracking(_Norm):
    """A norm that may keep running statistics, which are whole on every worker."""

    num_features: int
    eps: float
    momentum: float | None
    track_running_stats: bool
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def settings(self) -> Settings:
        return (
            ("num_features", self.num_features),
            ("eps", self.eps),
            ("affine", self.weight is not None),
            ("track_running_stats", self.running_mean is not None),
        )

    @property
    def tracks(self) -> bool:
        """Whether this call changes the running statistics."""
        return self.training and self.track_running_stats and self.running_mean is not None

    def local_running(self, layout: Layout) -> Pair:
        """The running statistics of this worker's channels, as views."""
        box = layout.box()
        assert box is not None
        (dim,) = self.feature_dims(len(box))
        mean, variance = (
            None if each is None else each[slice(*box[dim])]
            for each in (self.running_mean, self.running_var)
        )
        return mean, variance

    def normalize_by_running(self, x: Tensor, layout: Layout) -> Tensor:
        """What evaluation does: nothing moves."""
        weight, bias = self.local_parameters(layout)
        mean, variance = self.local_running(layout)
        if not x.numel():
            return nothing(tuple(x.shape), x, weight, bias).to(x.dtype)
        (dim,) = self.feature_dims(x.dim())
        batched = x if dim == 1 else x.unsqueeze(0)
        return F.batch_norm(batched, mean, variance, weight, bias, False, 0.0, self.eps).view_as(x)


@kept_in_job
def _collecting(layout: Layout, dims: tuple[int, ...]) -> Move | None:
    """From statistics of each worker's part along `dims` to all of them, two of each, everywhere.

    None if every worker has all of them.
    """
    cuts = tuple(layout.cuts[dim] for dim in dims)
    if all(len(cut.intervals) == 1 for cut in cuts):
        return None
    shape = (2, *(layout.shape[dim] for dim in dims))
    split = {axis for cut in cuts for axis in cut.axes}
    shared = tuple(axis for axis in range(layout.partition.dim) if axis not in split)
    source = Layout(layout.partition, shape, (Cut((), ((0, 2),)), *cuts), shared)
    return Move(source, Layout.whole(layout.partition, shape, shared=True))


def _collected(mean: Tensor, variance: Tensor, layout: Layout, dims: tuple[int, ...]) -> Tensor:
    """The means and variances of the whole tensor on every worker, without gradient."""
    local = torch.stack([mean.detach(), variance.detach()])
    move = _collecting(layout, dims)
    return local if move is None else move.apply(local)


class _BatchNormLayer(_Tracking):
    def feature_dims(self, ndim: int) -> range:
        return range(1, 2)

    def normalize(self, x: Tensor, layout: Layout) -> Tensor:
        if not self.training and self.running_mean is not None:
            return self.normalize_by_running(x, layout)
        rate = self._rate()
        gathering = Gathering.over(layout, (0, *range(2, x.dim())), is_shared=True)
        normalize = self._normalize_here if gathering.stays else self._normalize_together
        y = normalize(x, gathering, rate)
        if self.tracks:
            self._collect(layout)
        return y

    def _rate(self) -> float:
        """How much the new statistics count among the running ones."""
        if not self.tracks or self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def _normalize_here(self, x: Tensor, gathering: Gathering, rate: float) -> Tensor:
        """Each worker has all values of its channels: this is torch's own."""
        weight, bias = self.local_parameters(gathering.layout)
        if not x.numel():
            return nothing(tuple(x.shape), x, weight, bias).to(x.dtype)
        running = self.local_running(gathering.layout) if self.tracks else (None, None)
        mean, variance = (None if each is None else each.clone() for each in running)
        y = F.batch_norm(x, mean, variance, weight, bias, True, rate, self.eps)
        for each, new in zip(running, (mean, variance), strict=True):
            if each is not None and new is not None:  # autograd keeps the new one: it must stay
                each.copy_(new)
        return y

    def _normalize_together(self, x: Tensor, gathering: Gathering, rate: float) -> Tensor:
        means, variances = gathering.gather(*_local_moments(x))
        mean, variance = _combined(means, variances, gathering.shares(means))
        if self.tracks:
            self._update(mean, variance, gathering, rate)
        both = self.local_parameters(gathering.layout, gathering.axes)
        return _normalized(x, mean, variance, *both, self.eps, gathering)

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor, gathering: Gathering, rate: float) -> None:
        count = sum(gathering.counts)
        unbiased = variance * (count / (count - 1))
        for running, new in zip(
            self.local_running(gathering.layout), (mean, unbiased), strict=True
        ):
            assert running is not None
            running.mul_(1.0 - rate).add_(new, alpha=rate)

    @torch.no_grad()
    def _collect(self, layout: Layout) -> None:
        """Learn the new statistics of other workers' channels."""
        if _collecting(layout, (1,)) is None:
            return
        mean, variance = self.local_running(layout)
        assert mean is not None and variance is not None
        assert self.running_mean is not None and self.running_var is not None
        means, variances = _collected(mean, variance, layout, (1,))
        self.running_mean.copy_(means)
        self.running_var.copy_(variances)


class _InstanceNormLayer(_Tracking):
    def feature_dims(self, ndim: int) -> range:
        dim = ndim - self._get_no_batch_dim()  # type: ignore[attr-defined]
        return range(dim, dim + 1)

    def normalize(self, x: Tensor, layout: Layout) -> Tensor:
        if not self.training and self.track_running_stats:
            return self.normalize_by_running(x, layout)
        (dim,) = self.feature_dims(x.dim())
        gathering = Gathering.over(layout, tuple(range(dim + 1, x.dim())))
        if gathering.stays and not self.tracks:
            return self._normalize_here(x, layout)
        rows = x.reshape(1, prod(x.shape[: dim + 1]), prod(x.shape[dim + 1 :]))
        means, variances = gathering.gather(*_local_moments(rows))
        mean, variance = _combined(means, variances, gathering.shares(means))
        if self.tracks:
            self._update(mean, variance, gathering)
        weight, bias = (
            None if each is None else each.expand_as(mean).reshape(-1)
            for each in self.local_parameters(layout)
        )
        y = _normalized(rows, mean.reshape(-1), variance.reshape(-1), weight, bias, self.eps)
        return y.view(x.shape)

    def _normalize_here(self, x: Tensor, layout: Layout) -> Tensor:
        """Each worker has all values of its instances: this is torch's own."""
        weight, bias = self.local_parameters(layout)
        if not x.numel():
            return nothing(tuple(x.shape), x, weight, bias).to(x.dtype)
        (dim,) = self.feature_dims(x.dim())
        batched = x if dim == 1 else x.unsqueeze(0)
        y = F.instance_norm(batched, None, None, weight, bias, True, 0.0, self.eps)
        return y.view(x.shape)

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor, gathering: Gathering) -> None:
        """The running statistics take in the average over the instances of the whole batch."""
        count = sum(gathering.counts)
        kept = tuple(range(len(gathering.lengths)))
        new = _collected(mean, variance * (count / (count - 1)), gathering.layout, kept)
        new = new.reshape(2, -1, self.num_features).mean(1)
        rate = self.momentum or 0.0
        for running, each in zip((self.running_mean, self.running_var), new, strict=True):
            assert running is not None
            running.mul_(1.0 - rate).add_(each, alpha=rate)


class _AnyBatchNorm(_BatchNorm):
    """Torch's batch norm for any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class _AnyInstanceNorm(_InstanceNorm):
    """Torch's instance norm for any number of dimensions, the first two batch and channels."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if input.size(1) != self.num_features and self.affine:
            raise ValueError(
                f"expected input's size at dim=1 to match num_features ({self.num_features}), "
                f"but got: {input.size(1)}."
            )
        return self._apply_instance_norm(input)


class DistributedBatchNorm(_BatchNormLayer, _AnyBatchNorm):
    """Batch norm of a tensor of two or more dimensions that is spread over `P_x`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance of a channel of
    the whole tensor.

    Parameters and running statistics are whole and equal on all workers, as in one process. In
    evaluation nothing moves but the gradients of the parameters. `torch.nn.SyncBatchNorm` is
    converted to this.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        num_features: the number of channels of the whole tensor.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as `torch.nn.BatchNorm1d`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> norm = tessel.nn.DistributedBatchNorm(P, 3)
    >>> norm(torch.ones(2, 3, 4)).abs().max().item()
    0.0
    """

    torch_type = _AnyBatchNorm


class DistributedBatchNorm1d(_BatchNormLayer, torch.nn.BatchNorm1d):
    """Batch norm of a tensor (N, C) or (N, C, L) over `P_x`: `torch.nn.BatchNorm1d`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance of a channel of
    the whole tensor.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        num_features: the number of channels of the whole tensor.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as `torch.nn.BatchNorm1d`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedBatchNorm1d(P, 3)(torch.ones(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    torch_type = torch.nn.BatchNorm1d


class DistributedBatchNorm2d(_BatchNormLayer, torch.nn.BatchNorm2d):
    """Batch norm of a tensor (N, C, H, W) over `P_x`: `torch.nn.BatchNorm2d`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance of a channel of
    the whole tensor.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        num_features: the number of channels of the whole tensor.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as `torch.nn.BatchNorm2d`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedBatchNorm2d(P, 3)(torch.ones(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    """

    torch_type = torch.nn.BatchNorm2d


class DistributedBatchNorm3d(_BatchNormLayer, torch.nn.BatchNorm3d):
    """Batch norm of a tensor (N, C, D, H, W) over `P_x`: `torch.nn.BatchNorm3d`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance of a channel of
    the whole tensor.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        num_features: the number of channels of the whole tensor.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as `torch.nn.BatchNorm3d`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> tessel.nn.DistributedBatchNorm3d(P, 3)(torch.ones(2, 3, 4, 4, 4)).shape
    torch.Size([2, 3, 4, 4, 4])
    """

    torch_type = torch.nn.BatchNorm3d


class DistributedInstanceNorm(_InstanceNormLayer, _AnyInstanceNorm):
    """Instance norm of a tensor (N, C, …) of any number of dimensions that is spread over `P_x`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance of a channel of
    one instance of the whole tensor.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        num_features: the number of channels of the whole tensor.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as
            `torch.nn.InstanceNorm1d`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedInstanceNorm(P, 3)(torch.ones(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    torch_type = _AnyInstanceNorm

    def feature_dims(self, ndim: int) -> range:
        return range(1, 2)


class DistributedInstanceNorm1d(_InstanceNormLayer, torch.nn.InstanceNorm1d):
    """Instance norm of a tensor (C, L) or (N, C, L) over `P_x`: `torch.nn.InstanceNorm1d`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance of a channel of
    one instance of the whole tensor.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        num_features: the number of channels of the whole tensor.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as
            `torch.nn.InstanceNorm1d`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedInstanceNorm1d(P, 3)(torch.ones(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    torch_type = torch.nn.InstanceNorm1d


class DistributedInstanceNorm2d(_InstanceNormLayer, torch.nn.InstanceNorm2d):
    """Instance norm of a tensor (C, H, W) or (N, C, H, W) over `P_x`: `torch.nn.InstanceNorm2d`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance of a channel of
    one instance of the whole tensor.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        num_features: the number of channels of the whole tensor.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as
            `torch.nn.InstanceNorm2d`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedInstanceNorm2d(P, 3)(torch.ones(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    """

    torch_type = torch.nn.InstanceNorm2d


class DistributedInstanceNorm3d(_InstanceNormLayer, torch.nn.InstanceNorm3d):
    """Instance norm of a tensor (C, D, H, W) or (N, C, D, H, W): `torch.nn.InstanceNorm3d`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance of a channel of
    one instance of the whole tensor.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        num_features: the number of channels of the whole tensor.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as
            `torch.nn.InstanceNorm3d`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> tessel.nn.DistributedInstanceNorm3d(P, 3)(torch.ones(2, 3, 4, 4, 4)).shape
    torch.Size([2, 3, 4, 4, 4])
    """

    torch_type = torch.nn.InstanceNorm3d


class DistributedGroupNorm(_Norm, torch.nn.GroupNorm):
    """Group norm of a tensor (N, C, …) that is spread over `P_x`: `torch.nn.GroupNorm`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance of a group of
    channels of one instance of the whole tensor.

    The channels may be split anywhere, also inside of a group.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        num_groups: the number of groups of the whole tensor.
        num_channels: the number of channels of the whole tensor.
        eps, affine, device, dtype, bias: as `torch.nn.GroupNorm`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedGroupNorm(P, 2, 4)(torch.ones(2, 4, 3)).shape
    torch.Size([2, 4, 3])
    """

    torch_type = torch.nn.GroupNorm

    def settings(self) -> Settings:
        return (
            ("num_groups", self.num_groups),
            ("num_channels", self.num_channels),
            ("eps", self.eps),
            ("affine", self.weight is not None),
        )

    def feature_dims(self, ndim: int) -> range:
        return range(1, 2)

    def normalize(self, x: Tensor, layout: Layout) -> Tensor:
        groups = Groups.of(layout, self.num_groups)
        weight, bias = self.local_parameters(layout)
        if groups.stays:
            return self._normalize_here(x, groups, weight, bias)
        rows = x.reshape(1, prod(x.shape[:2]), prod(x.shape[2:]))
        members = torch.tensor(groups.members, dtype=torch.long, device=x.device)
        means, variances = (each.reshape(x.shape[:2]) for each in _local_moments(rows))
        local = _grouped(means, variances, members, groups.local_shape)
        means, variances = groups.gather(*local)
        mean, variance = (
            each.index_select(1, members).reshape(-1)
            for each in _combined(means, variances, groups.shares(means))
        )
        if weight is not None:
            weight = weight.expand(x.shape[:2]).reshape(-1)
        if bias is not None:
            bias = bias.expand(x.shape[:2]).reshape(-1)
        return _normalized(rows, mean, variance, weight, bias, self.eps).view(x.shape)

    def _normalize_here(
        self, x: Tensor, groups: Groups, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Each worker has all values of its groups: this is torch's own."""
        if not x.numel():
            return nothing(tuple(x.shape), x, weight, bias).to(x.dtype)
        num_groups = groups.local_shape[1]
        return torch.group_norm(x, num_groups, weight, bias, self.eps)


def _grouped(
    means: Tensor, variances: Tensor, members: Tensor, shape: Shape
) -> tuple[Tensor, Tensor]:
    """The moments of groups from those of channels; zeros for a group without a channel."""
    sizes = torch.bincount(members, minlength=shape[1]).clamp(min=1).to(means.dtype)

    def averaged(values: Tensor) -> Tensor:
        return values.new_zeros(shape).index_add(1, members, values) / sizes

    mean = averaged(means)
    offsets = means - mean.index_select(1, members)
    return mean, averaged(variances + offsets.square())


class _RowNorm(_Norm):
    """A norm over the last dimensions, with a parameter for each place there."""

    normalized_shape: Any
    eps: Any
    num_moments: ClassVar[int]

    def settings(self) -> Settings:
        return (
            ("normalized_shape", tuple(self.normalized_shape)),
            ("eps", self.eps),
            ("elementwise_affine", self.weight is not None),
        )

    def feature_dims(self, ndim: int) -> range:
        return range(ndim - len(self.normalized_shape), ndim)

    def normalize(self, x: Tensor, layout: Layout) -> Tensor:
        dims = self.feature_dims(x.dim())
        gathering = Gathering.over(layout, tuple(dims), self.num_moments)
        weight, bias = self.local_parameters(layout)
        if gathering.stays:
            return self.normalize_here(x, weight, bias)
        rows = x.reshape(1, prod(x.shape[: dims.start]), prod(x.shape[dims.start :]))
        y = self.normalize_rows(rows, gathering).view(x.shape)
        return _weighted(y, weight, bias)

    def normalize_here(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Each worker has whole rows: this is torch's own."""
        raise NotImplementedError(f"{type(self).__name__} does not say what torch's own is")

    def normalize_rows(self, rows: Tensor, gathering: Gathering) -> Tensor:
        """A tensor (1, rows, columns), the rows of which go on elsewhere."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it normalises")


def _weighted(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is None:
        return y
    scaled = y * weight if bias is None else torch.addcmul(bias, y, weight)
    return scaled.to(y.dtype)


class DistributedLayerNorm(_RowNorm, torch.nn.LayerNorm):
    """Layer norm of a tensor that is spread over `P_x`: `torch.nn.LayerNorm`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance over the last
    dimensions of the whole tensor.

    Args:
        P_x: where the tensor lies; axis d splits dimension d, also one that is normalised.
        normalized_shape: the lengths of the last dimensions of the whole tensor.
        eps, elementwise_affine, bias, device, dtype: as `torch.nn.LayerNorm`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedLayerNorm(P, 4)(torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    torch_type = torch.nn.LayerNorm
    num_moments = 2

    def normalize_here(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, list(self.normalized_shape), weight, bias, self.eps)

    def normalize_rows(self, rows: Tensor, gathering: Gathering) -> Tensor:
        means, variances = gathering.gather(*_local_moments(rows))
        mean, variance = _combined(means, variances, gathering.shares(means))
        return _normalized(rows, mean.reshape(-1), variance.reshape(-1), None, None, self.eps)


class DistributedRMSNorm(_RowNorm, torch.nn.RMSNorm):  # type: ignore[misc]  # names its input x
    """Root-mean-square norm of a tensor that is spread over `P_x`: `torch.nn.RMSNorm`.

    Forward:  y = w x / √(q + ε), where q is the mean of x² over the last dimensions of the whole
    tensor.

    Args:
        P_x: where the tensor lies; axis d splits dimension d, also one that is normalised.
        normalized_shape: the lengths of the last dimensions of the whole tensor.
        eps, elementwise_affine, device, dtype: as `torch.nn.RMSNorm`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedRMSNorm(P, 4, eps=0.0)(torch.ones(1, 4))
    tensor([[1., 1., 1., 1.]], grad_fn=<MulBackward0>)
    """

    torch_type = torch.nn.RMSNorm
    num_moments = 1

    def normalize_here(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.rms_norm(x, list(self.normalized_shape), weight, self.eps)

    def normalize_rows(self, rows: Tensor, gathering: Gathering) -> Tensor:
        wide = _widened(rows)
        (squares,) = gathering.gather(_mean_square(wide, wide.new_zeros(rows.shape[1])))
        square = (gathering.shares(squares) * squares).sum(0).reshape(-1)
        eps = torch.finfo(square.dtype).eps if self.eps is None else self.eps
        return _normalized(rows, None, square, None, None, eps)
