"""Batch norm of a split tensor by torch's own kernels.

The rule composes it of differentiable torch functions: some twenty of them on tensors with a number
for each channel, and their gradients, which take longer than the norm itself where launching a
kernel takes longer than running it. This is the same map in few kernels, with its gradient written
out; the gradient is differentiated again by way of the composition.

With N values in all, x̂ = (x − m) / s and s = √(v + ε):

Forward:   y = w x̂ + b.
Gradient:  of b, Σ g;  of w, Σ g x̂;  of x, w/s (g − (Σ g + x̂ Σ g x̂) / N).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.context import in_transform, is_compiling
from tessel.core.linop import LinearOperator, Tensors, record_map
from tessel.core.memory_format import is_channels_last, memory_format, with_usual_strides
from tessel.core.move import Move
from tessel.core.numbers import constant
from tessel.tensor.moments import RunningMoments, combined, local_moments, update_running
from tessel.tensor.table import outlining
from tessel.transport import Group

_KINDS = (torch.float32, torch.float64)


@dataclass(eq=False)  # made in each call, and a frozen one is slower to make
class KernelNorm:
    """A norm of a split tensor by kernels: (x, w, b) to y and the statistics for its gradient.

    Args:
        gather: brings the two moments of all places together.
        total: the sum of two statistics over all workers.
        counts: how many values of a channel each place has.
        eps: a number that is added to the variance.
        composed: the same norm of differentiable torch functions; it does not update running
            statistics.
    """

    gather: Move
    total: LinearOperator
    counts: tuple[int, ...]
    eps: float
    composed: Callable[..., Tensor]

    first_kept = 1  # y may be changed in place
    num_unread = 1  # no gradient depends on b

    @property
    def group(self) -> Group:
        return self.gather.group


@dataclass(eq=False)  # made in each call, and a frozen one is slower to make
class BatchNorm(KernelNorm):
    """Batch norm: to y, the mean and the variance (1/s on a GPU).

    Args:
        running: the running mean and variance, which are updated, or None.
        momentum: the weight of the new ones.
    """

    running: RunningMoments
    momentum: float

    def _apply(self, *xs: Tensor | None) -> tuple[Tensor, ...]:
        x, weight, bias = xs
        assert x is not None
        given = self._cuda_normalized if x.is_cuda else self._normalized
        if not torch.is_autocast_enabled(x.device.type):
            return given(x, weight, bias)
        with torch.autocast(x.device.type, enabled=False):  # statistics must not be rounded
            return given(x, weight, bias)

    def vjp(
        self, grads: Tensors, needs: Sequence[bool], xs: Tensors, ys: Sequence[Tensor]
    ) -> Tensors:
        """The gradients of x, w and b; by the composition if they are differentiated again."""
        (grad, *_), (x, weight, _) = grads, xs
        assert x is not None
        if grad is None:
            grad = torch.zeros_like(x)
        if torch.is_grad_enabled():
            return derived(self.composed, grad, needs, xs)
        given = self._cuda_gradient if x.is_cuda else self._gradient
        found = given(grad, needs, x, weight, *ys)
        return [each if need else None for each, need in zip(found, needs, strict=True)]

    def _gathered(self, *moments: Tensor) -> Tensor:
        """The moments of all places, two rows for each."""
        return self.gather.apply(torch.stack(moments).reshape(self.gather.domain.local_shape))

    # On a CPU, kernels take means and variances.

    def _normalized(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        moments, total = self._gathered(*local_moments(x)), sum(self.counts)
        shares = constant(tuple(n / total for n in self.counts), moments.dtype, x.device)
        means, variances = moments.unbind(1)
        mean, variance = combined(means, variances, shares.unsqueeze(-1))
        if self.running[0] is not None:
            update_running(self.running, mean, variance, total, self.momentum)
        if not x.numel():
            return torch.empty_like(x), mean, variance
        return _scaled(x, mean, variance, weight, bias, self.eps), mean, variance

    def _gradient(
        self,
        grad: Tensor,
        needs: Sequence[bool],
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        variance: Tensor,
    ) -> Sequence[Tensor | None]:
        both = self.total.apply(torch.stack(gradient_sums(grad, x, mean, variance, self.eps)))
        of_weight, of_bias = both.unbind()
        if not needs[0]:
            return None, of_weight, of_bias
        scale = (variance + self.eps).rsqrt()
        scale = scale if weight is None else scale * weight
        affine = both * (scale / -sum(self.counts))
        return gradient_of(grad, x, mean, variance, self.eps, scale, affine), of_weight, of_bias

    # On a GPU, kernels for several workers take the reciprocal of s.

    @property
    def group_of_places(self) -> Group | None:
        """The group if each of its workers is a place: NCCL has a collective for this."""
        group, places = self.gather.group, self.gather.domain.partition.ranks
        return group if len(self.counts) == len(places) and places == group.workers else None

    def _cuda_normalized(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        if x.numel():
            mean, scale = torch.batch_norm_stats(x, self.eps)
        else:
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            mean = scale = x.new_zeros(x.shape[1], dtype=wide)
        if (group := self.group_of_places) is not None and group.adds_on_devices(mean):
            means, scales = group.all_gather(mean, scale)
        else:
            means, scales = self._gathered(mean, scale).unbind(1)
        there = self.counts
        if 0 in there:  # for no values torch's kernel computes NaN
            places = [place for place, count in enumerate(there) if count]
            there = tuple(there[place] for place in places)
            means, scales = (torch.stack([of[k] for k in places]) for of in (means, scales))
        counts = constant(there, means.dtype, x.device)
        # the kernel takes its dtype from running statistics, or else from its first argument
        running = tuple(r if r is None else r.to(means.dtype) for r in self.running)
        joined: Any = torch.batch_norm_gather_stats_with_counts
        mean, scale = joined(means, means, scales, *running, self.momentum, self.eps, counts)
        for own, updated in zip(self.running, running, strict=True):
            if own is not None and updated is not None and updated is not own:
                own.copy_(updated)
        if not x.numel():
            return torch.empty_like(x), mean, scale
        return torch.batch_norm_elemt(x, weight, bias, mean, scale, self.eps), mean, scale

    def _cuda_gradient(
        self,
        grad: Tensor,
        needs: Sequence[bool],
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        scale: Tensor,
    ) -> Sequence[Tensor | None]:
        if x.numel():
            grad = grad.contiguous(memory_format=memory_format(x))
        of_bias, centred, of_weight = self._cuda_sums(grad, x, weight, mean, scale)
        kind = torch.float32 if weight is None else weight.dtype
        parameters = of_weight.to(kind), of_bias.to(kind)
        if not needs[0]:
            return None, *parameters
        if not x.numel():
            return torch.zeros_like(x), *parameters
        counts = constant(self.counts, torch.int32, x.device)
        of_x = torch.batch_norm_backward_elemt(
            grad, x, mean, scale, weight, of_bias, centred, counts
        )
        return of_x, *parameters

    def _cuda_sums(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Σ g, Σ g (x − m) and Σ g x̂ of all workers."""
        # the kernel computes the gradient of a weight with the sums, if there is one
        if x.numel():
            of_bias, centred, of_weight, _ = torch.batch_norm_backward_reduce(
                grad, x, mean, scale, weight, True, weight is not None, False
            )
        else:
            of_bias, centred, of_weight = (torch.zeros_like(mean) for _ in range(3))
        if (group := self.group_of_places) is not None and group.adds_on_devices(of_bias):
            wanted = (of_bias, centred) if weight is None else (of_bias, centred, of_weight)
            group.all_reduce(*wanted)()
            return of_bias, centred, centred if weight is None else of_weight
        of_bias, centred = self.total.apply(torch.stack([of_bias, centred])).unbind()
        return of_bias, centred, centred * scale


def derived(
    composed: Callable[..., Tensor],
    grad: Tensor,
    needs: Sequence[bool],
    xs: Sequence[Tensor | None],
) -> Sequence[Tensor | None]:
    """The gradients of the composition, which can be differentiated again."""
    # They are those of aliases. An input may depend on another, as where a weight is used twice,
    # and this would count too; and the inputs' hooks are for the sum of all gradients.
    given = [_alias(x) if need and x is not None else x for x, need in zip(xs, needs, strict=True)]
    wanted = [x for x, need in zip(given, needs, strict=True) if need and x is not None]
    with torch.autocast(grad.device.type, enabled=False):  # as in the map itself
        found: Any = torch.autograd.grad(
            composed(*given), wanted, grad, create_graph=True, materialize_grads=True
        )
    each = iter(found)
    return [next(each) if need else None for need in needs]


def _alias(x: Tensor) -> Tensor:
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def gradient_sums(
    grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Σ g x̂ and Σ g over all dimensions but the second, of this worker's part."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    # Without the gradient of x, and so without memory for it: torch's kernel for that takes three
    # times as long as `gradient_of`.
    grad, x = with_usual_strides(grad), with_usual_strides(x)
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        grad, x, None, mean, variance, None, None, False, eps, [False, True, True]
    )
    return of_weight, of_bias


def gradient_of(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    scale: Tensor,
    affine: Tensor,
) -> Tensor:
    """c g + a x̂ + b, with the numbers c, a and b of each index of the second dimension."""
    if not x.numel():
        return torch.zeros_like(x)
    factor, term = affine.unbind()
    found = _scaled(x, mean, variance, factor, term, eps)
    return found.addcmul_(grad, scale.view(-1, *[1] * (x.dim() - 2)))


def _scaled(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """w (x − m) / √(v + ε) + b: F.batch_norm of plain tensors, without its checks."""
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, x.is_cuda)


def by_torch(function: Callable[..., Tensor], x: Tensor, *given: Any, **named: Any) -> Tensor:
    """Torch's own norm of a part, with the gradient that torch derives.

    As in `with_usual_strides`, the kernel of its batch and instance norms for CPUs may read a
    gradient in the wrong order if a dimension has one index, as that of samples often has in a
    part. A gradient has any strides, so the kernel gets tensors of fewer dimensions, which have one
    memory format only.
    """
    of_instances = function is F.instance_norm  # torch takes all samples for channels of one
    is_safe = not of_instances and (function is not F.batch_norm or 1 not in x.shape)
    if x.is_cuda or x.dim() < 4 or is_safe or not x.numel():
        return function(x, *given, **named)
    if is_channels_last(x) and not of_instances:
        rows = x.movedim(1, -1)
        found = function(rows.flatten(0, -2), *given, **named)
        return found.view(rows.shape).movedim(-1, 1)
    return function(x.flatten(2), *given, **named).view(x.shape)


def can_use_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """Whether torch's kernels support these tensors, and only reverse mode is needed."""
    if outlining.get() or in_transform() or is_compiling():
        return False
    if x.device.type not in ("cpu", "cuda"):
        return False
    kinds = {each.dtype for each in others if each is not None}
    if x.is_cuda:  # its kernels compute half precision in float32
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return kinds <= {wide}
    return x.dtype in _KINDS and kinds <= {x.dtype}


def normalize(norm: BatchNorm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm of this worker's part."""
    if x.is_cuda:
        x = x.contiguous(memory_format=memory_format(x))
    return record_map(norm, x, weight, bias)[0]
