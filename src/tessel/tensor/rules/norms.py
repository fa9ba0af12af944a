"""Norms: values shifted and scaled by the mean and variance of the whole tensor.

If each worker has all values that are averaged, the norm is torch's own of the part. Otherwise the
workers exchange the moments of their parts, from which all compute those of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core import boxes
from tessel.core.boxes import Interval
from tessel.core.context import in_transform
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.linop import LinearOperator, record_map
from tessel.core.move import Move
from tessel.core.numbers import constant
from tessel.core.shared import anchored_zeros, replicate, replication, used_together
from tessel.tensor.batch_norm import BatchNorm, by_torch, can_use_kernels, normalize
from tessel.tensor.group_norm import GroupNorm
from tessel.tensor.moments import (
    RunningMoments,
    combined,
    local_moments,
    mean_square,
    update_running,
)
from tessel.tensor.table import (
    Arguments,
    Settings,
    held_layouts,
    made,
    named,
    opened,
    rule,
    tensors,
    whole_part,
    widened,
)
from tessel.tensor.tensor import Tensor as SpreadTensor
from tessel.tensor.tensor import move
from tessel.transport import kept_in_job


@dataclass(frozen=True)
class Gathering:
    """The exchange that gives all workers the moments of all averaged parts.

    The index space is (places, moments, statistics): each place of the grid along the averaged
    dimensions has its own moments, and all of them are everywhere along these axes afterwards.

    Args:
        layout: the layout of the tensor.
        dims: its dimensions that are averaged.
        lengths: the global shape of a statistic.
        cuts: the cuts of a statistic on the grid, by axes that split no averaged dimension.
        num_moments: the number of moments for each statistic.
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
        """For each place along the averaged dimensions, the box that it averages."""
        return list(product(*(self.layout.cuts[dim].intervals for dim in self.dims)))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of values that each place averages, equal for every statistic."""
        return tuple(map(boxes.volume, self.places))

    @cached_property
    def stays(self) -> bool:
        """Whether each worker has all values of its averages."""
        return len(self.places) == 1

    @cached_property
    def local_shape(self) -> Shape:
        """The shape of this worker's part of a statistic."""
        return self.move.domain.local_shape[2:]

    @cached_property
    def move(self) -> Move:
        """The single exchange."""
        num = len(self.places)
        apart = Cut(self.axes, tuple((k, k + 1) for k in range(num)))
        shared = self.axes if self.is_shared else ()
        return Move(self._moments(apart), self._moments(Cut.whole(num), shared))

    @cached_property
    def total(self) -> LinearOperator | None:
        """The sum of two statistics over all workers; None if each has all values."""
        use = replication(self.statistics, self.axes)
        return None if use is None else use.H

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes of the grid that split averaged dimensions."""
        return tuple(axis for dim in self.dims for axis in self.layout.cuts[dim].axes)

    def _moments(self, places: Cut, shared: tuple[int, ...] = ()) -> Layout:
        shape = (len(self.places), self.num_moments, *self.lengths)
        cuts = (places, Cut.whole(self.num_moments), *self.cuts)
        return Layout(self.layout.partition, shape, cuts, (*self.layout.shared, *shared))

    @cached_property
    def statistics(self) -> Layout:
        """The layout of two statistics of the whole, shared along axes that do not split them."""
        cuts = (Cut.whole(2), *self.cuts)
        return Layout.of_cuts(self.layout.partition, (2, *self.lengths), cuts)

    def gather(self, *moments: Tensor) -> tuple[Tensor, ...]:
        """Gather the moments of all places along the first dimension, given this worker's."""
        local = torch.stack([each.reshape(self.local_shape) for each in moments]).unsqueeze(0)
        return (local if self.stays else self.move.apply(local)).unbind(1)

    def shares(self, like: Tensor) -> Tensor:
        """The fraction of all averaged values that each place has."""
        total = sum(self.counts)
        shares = constant(tuple(count / total for count in self.counts), like.dtype, like.device)
        return shares.reshape(-1, *[1] * len(self.lengths))


@dataclass(frozen=True)
class ChannelGroups(Gathering):
    """The gathering for channels in groups, which may be cut anywhere.

    If every cut is between two groups, the groups are split like their channels. Otherwise each
    place has moments of all groups, some of them of no values.

    Args:
        size: the number of channels of a group.
    """

    size: int = 1

    @classmethod
    @kept_in_job
    def of(cls, layout: Layout, num_groups: int) -> ChannelGroups:
        size = layout.shape[1] // num_groups
        batch, channels, *space = layout.cuts
        first = 2
        if all(bound % size == 0 for part in channels.intervals for bound in part):
            parts = tuple((start // size, stop // size) for start, stop in channels.intervals)
            groups = Cut(channels.axes, parts)
        else:
            groups, first = Cut.whole(num_groups), 1
        dims = tuple(range(first, 2 + len(space)))
        return cls(layout, dims, (layout.shape[0], num_groups), (batch, groups), size=size)

    @property
    def members(self) -> list[int]:
        """The group of each of this worker's channels, among those whose moments it has."""
        box = self.layout.box()
        assert box is not None
        whole = 1 in self.dims
        start = 0 if whole else box[1][0] // self.size
        return [channel // self.size - start for channel in range(*box[1])]

    def shares(self, like: Tensor) -> Tensor:
        if 1 not in self.dims:
            return super().shares(like)
        groups = [(group * self.size, (group + 1) * self.size) for group in range(self.lengths[1])]
        # for each place, the number of its channels in each group, times their space
        counts = [
            [boxes.volume((boxes.overlap(part, group) or (0, 0), *space)) for group in groups]
            for part, *space in self.places
        ]
        flat = constant(tuple(n for row in counts for n in row), like.dtype, like.device)
        table = flat.view(len(counts), -1)
        return (table / table.sum(0)).unsqueeze(1)  # (place, 1, group)


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

    Torch's kernel for given statistics takes constants m̄, v̄. With s = √(v + ε), and likewise s̄,
    the result is w' (x − m̄) / s̄ + b' for w' = w s̄ / s and b' = b + (m̄ − m) w / s. This holds
    for all m and v, so gradients of every order are right, and nothing is kept but `x`.

    With a `gathering` everything before w' and b' is shared. Only their use differs between
    workers, so only their gradients are summed, in one exchange.
    """
    dtype = variance.dtype
    weight, bias = (None if each is None else each.to(dtype) for each in (weight, bias))
    constant = variance.detach()
    centre = torch.zeros_like(constant) if mean is None else mean.detach()
    derives = in_transform()  # in forward mode nothing requires a gradient
    if derives or variance.requires_grad:
        scale = ((constant + eps) / (variance + eps)).sqrt()
        weight = scale if weight is None else weight * scale
    if mean is not None and (derives or mean.requires_grad):
        shift = (centre - mean) / (constant + eps).sqrt()
        shift = shift if weight is None else shift * weight
        bias = shift if bias is None else bias + shift
    if gathering is not None and (weight is not None or bias is not None):
        both = [constant if each is None else each for each in (weight, bias)]
        first, second = replicate(torch.stack(both), gathering.statistics, gathering.axes).unbind()
        weight = None if weight is None else first
        bias = None if bias is None else second
    if not x.numel():
        return anchored_zeros(tuple(x.shape), x, weight, bias).to(x.dtype)
    return by_torch(F.batch_norm, x, centre, constant, weight, bias, False, 0.0, eps)


@kept_in_job
def _is_alone(layout: Layout) -> bool:
    """Whether all workers have the whole tensor, so that none needs anything of others."""
    sizes = layout.partition.shape
    return all(sizes[axis] == 1 or axis in layout.shared for axis in range(len(sizes)))


@dataclass
class Norm:
    """A call of one of torch's norms on a split tensor.

    Args:
        function: torch's own function, which takes `given`.
        given: its arguments by name; parameters and statistics are whole on all workers.
        x: this worker's part.
        layout: the layout of the tensor.
        dims: the dimensions that parameters have.
    """

    function: Any
    given: Settings
    x: Tensor
    layout: Layout
    dims: range

    @classmethod
    def of(cls, name: str, x: Any, given: Settings, dims: range) -> Norm:
        """Make a call after torch has checked the whole tensor; parts are balanced."""
        part, layout = opened(x)
        running = given.get("running_mean"), given.get("running_var")
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors(running)):
            raise RuntimeError(f"{name} is not differentiable with respect to running statistics")
        if any([isinstance(each, SpreadTensor) for each in given.values()]):
            changes = given.get("training", given.get("use_input_stats", False))
            if changes and not all(each.is_whole for each in held_layouts(running)):
                raise NotImplementedError(
                    "running statistics that are split cannot be changed in place; every worker "
                    "needs all of them, as plain tensors"
                )
            given = {key: whole_part(each, layout) for key, each in given.items()}
        norm = cls(getattr(F, name), given, part, layout, dims)
        if not _is_alone(layout):
            check(name, norm.given, layout.shape, part, dims)
            balanced = layout.resized(layout.shape)
            if balanced is not layout:
                norm.x, norm.layout = move(layout, balanced).apply(part), balanced
        return norm

    def is_simple(self) -> bool:
        """Whether no worker needs anything of others, or the tensor is empty."""
        return _is_alone(self.layout) or 0 in self.layout.shape

    def simply(self) -> SpreadTensor:
        """Torch's own function on every worker; of empty tensors, to update running statistics."""
        if _is_alone(self.layout):
            return made(by_torch(self.function, self.x, **self.given), self.layout)
        with torch.no_grad():
            self.function(self.x.new_empty(self.layout.shape), **self.given)
        return self.result(self.anchored_zeros(*self.parameters()))

    def anchored_zeros(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The result on a worker without values, which depends on all operands."""
        return anchored_zeros(tuple(self.x.shape), self.x, weight, bias).to(self.x.dtype)

    def parameters(self, shared: tuple[int, ...] = ()) -> RunningMoments:
        """The weight and bias for this worker's part; their gradients are those of the whole.

        Along the axes `shared` all workers compute the same with them.
        """
        return local_parameters(
            self.given["weight"], self.given.get("bias"), self.layout, self.dims, shared
        )

    def running(self) -> RunningMoments:
        """The running statistics of this worker's channels, as views."""
        return local_running(
            self.given["running_mean"], self.given["running_var"], self.layout, self.dims
        )

    @torch.no_grad()
    def collect_running(self) -> None:
        """Get the new statistics of other workers' channels."""
        mean, variance = self.running()
        assert mean is not None and variance is not None
        means, variances = _collected(mean, variance, self.layout, (1,))
        self.given["running_mean"].copy_(means)
        self.given["running_var"].copy_(variances)

    @property
    def tracks(self) -> bool:
        """Whether a call in training updates running statistics."""
        return self.given["running_mean"] is not None

    def result(self, y: Tensor) -> SpreadTensor:
        return made(y if y.shape == self.x.shape else y.view(self.x.shape), self.layout)


def local_parameters(
    weight: Tensor | None,
    bias: Tensor | None,
    layout: Layout,
    dims: range,
    shared: tuple[int, ...] = (),
) -> RunningMoments:
    """This worker's part of parameters that have the dimensions `dims` of a tensor."""
    present = [each for each in (weight, bias) if each is not None]
    if not present:
        return None, None
    several = used_together(present, layout, shared)  # one exchange for their gradients
    if any([layout.is_split(dim) for dim in dims]):
        box = layout.box()
        assert box is not None
        region = tuple(slice(*box[dim]) for dim in dims)
        several = [each[region] for each in several]
    found = iter(several)
    return None if weight is None else next(found), None if bias is None else next(found)


def local_running(
    mean: Tensor | None, var: Tensor | None, layout: Layout, dims: range
) -> RunningMoments:
    """The running statistics of this worker's channels, as views."""
    (dim,) = dims
    if not layout.is_split(dim):
        return mean, var
    box = layout.box()
    assert box is not None
    region = slice(*box[dim])
    return None if mean is None else mean[region], None if var is None else var[region]


def normalize_by_running(
    x: Tensor,
    running: RunningMoments,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dim: int = 1,
) -> Tensor:
    """The norm of a part in evaluation, with channels along `dim`; nothing is sent."""
    if not x.numel():
        return anchored_zeros(tuple(x.shape), x, weight, bias).to(x.dtype)
    batched = x if dim == 1 else x.unsqueeze(0)
    return by_torch(F.batch_norm, batched, *running, weight, bias, False, 0.0, eps).view_as(x)


def check(name: str, given: Settings, shape: Shape, x: Tensor, dims: range) -> None:
    """Raise torch's own errors for a tensor of this shape, like `x`; checked once for each kind."""
    kinds = [
        (key, (each.shape, each.dtype) if isinstance(each, Tensor) else each)
        for key, each in given.items()
        if key != "momentum"  # it may differ for each batch
    ]
    _check(name, tuple(kinds), shape, dims, x.dtype, x.device.type)


@lru_cache(maxsize=1024)
def _check(
    name: str,
    kinds: tuple[tuple[str, Any], ...],
    shape: Shape,
    dims: range,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Let torch check a global shape, and a dtype with the smallest shape."""
    least = tuple(length if dim in dims else 2 for dim, length in enumerate(shape))
    for lengths, where in ((shape, "meta"), (least, device)):
        given = {
            key: torch.ones(each[0], dtype=each[1], device=where)
            if key in ("weight", "bias", "running_mean", "running_var") and each is not None
            else each
            for key, each in kinds
        }
        with torch.no_grad():
            getattr(F, name)(torch.ones(lengths, dtype=dtype, device=where), **given)
    if (given["eps"] or 0) < 0:  # the kernel that all of them call rejects it
        raise ValueError(
            f"{name} over several workers: eps must not be negative, got {given['eps']}"
        )
    if not dtype.is_floating_point:
        raise NotImplementedError(
            f"{name} over several workers expects real numbers, got {dtype}; normalize the real "
            "and the imaginary parts separately"
        )


def _named(args: Arguments, kwargs: Settings, **defaults: Any) -> Settings:
    """The arguments by name, except the flag for cuDNN."""
    given = named(args, kwargs, **defaults)
    for key in ("cudnn_enabled", "cudnn_enable"):
        given.pop(key, None)
    return given


@kept_in_job
def _collecting(layout: Layout, dims: tuple[int, ...]) -> Move | None:
    """The movement of two statistics of each worker's part along `dims` to all workers.

    None if every worker has all of them.
    """
    cuts = tuple(layout.cuts[dim] for dim in dims)
    if all(len(cut.intervals) == 1 for cut in cuts):
        return None
    shape = (2, *(layout.shape[dim] for dim in dims))
    source = Layout.of_cuts(layout.partition, shape, (Cut.whole(2), *cuts))
    return Move(source, Layout.whole(layout.partition, shape, shared=True))


def _collected(mean: Tensor, variance: Tensor, layout: Layout, dims: tuple[int, ...]) -> Tensor:
    """The means and variances of the whole tensor on every worker, without gradient."""
    local = torch.stack([mean.detach(), variance.detach()])
    move = _collecting(layout, dims)
    return local if move is None else move.apply(local)


# the order of arguments after the input in torch.nn.functional, and in the function that it calls
_ORDER = dict.fromkeys(("running_mean", "running_var", "weight", "bias"))
_TORCHS_ORDER = dict.fromkeys(("weight", "bias", "running_mean", "running_var"))


@rule("batch_norm")
def batch_norm(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Normalize each channel over batch and space; torch has two orders of arguments."""
    settings = {"training": False, "momentum": 0.1, "eps": 1e-5}
    order = _ORDER if func is F.batch_norm else _TORCHS_ORDER
    given = _named(args, kwargs, **order, **settings)
    norm = Norm.of(name, args[0], given, range(1, 2))
    if norm.is_simple():
        return norm.simply()
    if not given["training"]:
        return norm.result(
            normalize_by_running(norm.x, norm.running(), *norm.parameters(), given["eps"])
        )
    gathering = _over_channels(norm.layout)
    if gathering.stays:  # each worker has all values of its channels: use torch's own
        weight, bias = norm.parameters()
        if not norm.x.numel():
            y = norm.anchored_zeros(weight, bias)
        else:
            running, numbers = norm.running(), (given["momentum"], given["eps"])
            # torch updates copies, since autograd saves them, and saved tensors must not change
            mean, variance = (None if each is None else each.clone() for each in running)
            y = by_torch(F.batch_norm, norm.x, mean, variance, weight, bias, True, *numbers)
            for each, new in zip(running, (mean, variance), strict=True):
                if each is not None and new is not None:
                    each.copy_(new)
    else:
        y = _normalize_over_parts(norm, gathering)
    if norm.tracks and norm.layout.is_split(1):
        norm.collect_running()
    return norm.result(y)


@kept_in_job
def _over_channels(layout: Layout) -> Gathering:
    """The averages of each channel over batch and space."""
    return Gathering.over(layout, (0, *range(2, len(layout.shape))), is_shared=True)


def _normalize_over_parts(norm: Norm, gathering: Gathering) -> Tensor:
    """The norm of this worker's part by statistics of all workers, which update running ones."""
    eps, momentum = norm.given["eps"], norm.given["momentum"]
    running, parameters = norm.running(), norm.parameters(gathering.axes)

    def composed(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, track: bool = False
    ) -> Tensor:
        means, variances = gathering.gather(*local_moments(x))
        mean, variance = combined(means, variances, gathering.shares(means))
        if track:
            update_running(running, mean, variance, sum(gathering.counts), momentum)
        return _normalized(x, mean, variance, weight, bias, eps, gathering)

    total = gathering.total
    if total is None or not can_use_kernels(norm.x, *parameters, *running):
        return composed(norm.x, *parameters, track=norm.tracks)
    kernels = BatchNorm(gathering.move, total, gathering.counts, eps, composed, running, momentum)
    return normalize(kernels, norm.x, *parameters)


@rule("instance_norm")
def instance_norm(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Normalize each channel of each sample over space; torch has two orders of arguments."""
    settings = {"use_input_stats": True, "momentum": 0.1, "eps": 1e-5}
    order = _ORDER if func is F.instance_norm else _TORCHS_ORDER
    given = _named(args, kwargs, **order, **settings)
    norm = Norm.of(name, args[0], given, range(1, 2))
    if norm.is_simple():
        return norm.simply()
    x, eps = norm.x, given["eps"]
    if not given["use_input_stats"]:
        return norm.result(normalize_by_running(x, norm.running(), *norm.parameters(), eps))
    instances = ChannelGroups.of(norm.layout, norm.layout.shape[1])
    if instances.stays and not norm.tracks:  # each worker has all values of its instances
        weight, bias = norm.parameters()
        if not x.numel():
            return norm.result(norm.anchored_zeros(weight, bias))
        return norm.result(by_torch(F.instance_norm, x, None, None, weight, bias, True, 0.0, eps))
    y, mean, variance = _normalize_groups(norm, instances)
    if norm.tracks:
        # the average over all instances of the batch updates running statistics
        centre, spread = _collected(mean, variance, norm.layout, (0, 1)).mean(1)
        running = given["running_mean"], given["running_var"]
        update_running(running, centre, spread, sum(instances.counts), given["momentum"])
    return norm.result(y)


@rule("group_norm")
def group_norm(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Normalize groups of channels of each sample, also over space."""
    given = _named(args, kwargs, num_groups=1, weight=None, bias=None, eps=1e-5)
    norm = Norm.of(name, args[0], given, range(1, 2))
    if norm.is_simple():
        return norm.simply()
    groups = ChannelGroups.of(norm.layout, given["num_groups"])
    if groups.stays:  # each worker has all values of its groups
        weight, bias = norm.parameters()
        if not norm.x.numel():
            return norm.result(norm.anchored_zeros(weight, bias))
        parameters = groups.local_shape[1], weight, bias, given["eps"]
        return norm.result(torch.group_norm(norm.x, *parameters))
    return norm.result(_normalize_groups(norm, groups)[0])


def _normalize_groups(norm: Norm, groups: ChannelGroups) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of this worker's part, and the mean and variance of each sample's groups."""
    eps, parameters = norm.given["eps"], norm.parameters()

    def composed(x: Tensor, *given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.reshape(1, prod(x.shape[:2]), prod(x.shape[2:]))
        members = constant(tuple(groups.members), torch.int64, x.device)
        means, variances = (each.reshape(x.shape[:2]) for each in local_moments(rows))
        if groups.size > 1:
            # the moments of groups from those of channels; zeros for groups without channels
            like = groups.local_shape
            counts = tuple(max(1.0, float(groups.members.count(k))) for k in range(like[1]))
            sizes = constant(counts, means.dtype, x.device)
            own = means.new_zeros(like).index_add(1, members, means) / sizes
            around = variances + (means - own.index_select(1, members)).square()
            means, variances = own, means.new_zeros(like).index_add(1, members, around) / sizes
        means, variances = groups.gather(means, variances)
        mean, variance = combined(means, variances, groups.shares(means))
        of_rows = [each.index_select(1, members).reshape(-1) for each in (mean, variance)]
        weight, bias = (
            None if each is None else each.expand(x.shape[:2]).reshape(-1) for each in given
        )
        y = _normalized(rows, of_rows[0], of_rows[1], weight, bias, eps)
        return y.view(x.shape), mean, variance

    use = replication(groups.statistics, groups.axes)
    are_whole = 1 not in groups.dims
    on_processor = norm.x.device.type == "cpu"  # kernels on GPUs take other statistics
    if use is None or not (are_whole and on_processor and can_use_kernels(norm.x, *parameters)):
        return composed(norm.x, *parameters)
    kernels = GroupNorm(
        groups.move, use.H, groups.counts, eps, lambda *xs: composed(*xs)[0], groups.size
    )
    y, mean, variance = record_map(kernels, norm.x, *parameters)
    return y, mean, variance


@rule("layer_norm", "rms_norm")
def layer_norm(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Normalize over the last dimensions, with a parameter for each position in them."""
    if name == "layer_norm":
        given = _named(args, kwargs, normalized_shape=(), weight=None, bias=None, eps=1e-5)
    else:
        given = _named(args, kwargs, normalized_shape=(), weight=None, eps=None)
    given["normalized_shape"] = shape = tuple(given["normalized_shape"])
    ndim = args[0].dim()
    norm = Norm.of(name, args[0], given, range(ndim - len(shape), ndim))
    if norm.is_simple():
        return norm.simply()
    x, first = norm.x, ndim - len(shape)
    is_layer = name == "layer_norm"
    gathering = Gathering.over(norm.layout, tuple(norm.dims), 2 if is_layer else 1)
    weight, bias = norm.parameters()
    if gathering.stays:  # each worker has whole rows
        parameters = {"weight": weight, "bias": bias} if is_layer else {"weight": weight}
        return norm.result(norm.function(x, shape, **parameters, eps=given["eps"]))
    rows = x.reshape(1, prod(x.shape[:first]), prod(x.shape[first:]))
    # (1, rows, columns), where rows continue on other workers
    if is_layer:
        means, variances = gathering.gather(*local_moments(rows))
        mean, variance = combined(means, variances, gathering.shares(means))
        y = _normalized(rows, mean.reshape(-1), variance.reshape(-1), None, None, given["eps"])
    else:
        wide = widened(rows)
        (squares,) = gathering.gather(mean_square(wide, wide.new_zeros(rows.shape[1])))
        square = (gathering.shares(squares) * squares).sum(0).reshape(-1)
        least = torch.finfo(square.dtype).eps if given["eps"] is None else given["eps"]
        y = _normalized(rows, None, square, None, None, least)
    y = y.view(x.shape)
    if weight is not None:
        y = (y * weight if bias is None else torch.addcmul(bias, y, weight)).to(y.dtype)
    elif bias is not None:
        y = (y + bias).to(y.dtype)
    return norm.result(y)
