"""Group norm of a split tensor by torch's kernels for batch norm.

For these kernels, each channel of each sample is a channel of its own, and so is each group, whose
values are contiguous. Composed of differentiable torch functions, the norm is dozens of functions
on small tensors. This is the same map, with one exchange each way and its gradient written out; the
gradient is differentiated again by way of the composition. Instance norm has groups of one channel.

With N values in a group, x̂ = (x − m) / s and s = √(v + ε):

Forward:   y = w x̂ + b.
Gradient:  of b, Σ g and of w, Σ g x̂, over samples and space, terms of a sum over workers;
           of x, (w g − (Σ w g + x̂ Σ w g x̂) / N) / s, where groups sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.numbers import constant
from tessel.tensor.batch_norm import KernelNorm, derived, gradient_of, gradient_sums
from tessel.tensor.moments import combined, local_moments


@dataclass(eq=False)  # made in each call, and a frozen one is slower to make
class GroupNorm(KernelNorm):
    """Group norm: to y, and the mean and variance of each sample's groups.

    Args:
        size: the number of channels of a group, all of which are on one worker.
    """

    size: int

    def _apply(self, *xs: Tensor | None) -> tuple[Tensor, ...]:
        x, weight, bias = xs
        assert x is not None
        shape = self.gather.domain.local_shape  # (1, 2, samples, groups)
        with torch.autocast(x.device.type, enabled=False):  # statistics must not be rounded
            groups = x.reshape(1, prod(shape[2:]), self.size * prod(x.shape[2:]))
            moments = self.gather.apply(torch.stack(local_moments(groups)).view(shape))
            total = sum(self.counts)
            shares = constant(tuple(n / total for n in self.counts), moments.dtype, x.device)
            means, variances = moments.unbind(1)
            mean, variance = combined(means, variances, shares.view(-1, 1, 1))
            if not x.numel():
                return torch.empty_like(x), mean, variance
            weight, bias = (
                None if each is None else each.expand(x.shape[:2]).reshape(-1)
                for each in (weight, bias)
            )
            rows = _rows(x), self._of_rows(mean), self._of_rows(variance)
            y = F.batch_norm(*rows, weight, bias, False, 0.0, self.eps)
            # no view: torch would not allow changes in place
            return y.view(x.shape).detach(), mean, variance

    def vjp(
        self,
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
        xs: Sequence[Tensor | None],
        ys: Sequence[Tensor],
    ) -> Sequence[Tensor | None]:
        """The gradients of x, w and b; by the composition if they are differentiated again."""
        (grad, *_), (x, weight, _), (mean, variance) = grads, xs, ys
        assert x is not None
        if grad is None:
            grad = torch.zeros_like(x)
        if torch.is_grad_enabled():
            return derived(self.composed, grad, needs, xs)
        rows = _rows(grad), _rows(x), self._of_rows(mean), self._of_rows(variance), self.eps
        sums = torch.stack(gradient_sums(*rows)).view(2, *x.shape[:2])
        weighted = (sums if weight is None else sums * weight).view(2, *mean.shape, self.size)
        both = self.total.apply(weighted.sum(-1))
        of_x = None
        if needs[0]:
            scale = (variance + self.eps).rsqrt()
            affine = both * (scale / -(self.size * sum(self.counts)))
            each = self._of_rows(scale)
            if weight is not None:
                each = (each.view(x.shape[:2]) * weight).view(-1)
            of_x = gradient_of(*rows, each, self._of_rows(affine).view(2, each.numel()))
            of_x = of_x.view(x.shape)
        # terms of a shared weight's gradient, which its use sums
        terms = (each if need else None for each, need in zip(sums.sum(1), needs[1:], strict=True))
        return of_x, *terms

    def _of_rows(self, statistic: Tensor) -> Tensor:
        """The statistics of groups, repeated for each channel of each sample."""
        # For a single group `reshape` returns a view of one number, and the kernel for parts with
        # one position reads beyond it.
        return statistic.unsqueeze(-1).expand(*statistic.shape, self.size).reshape(-1).contiguous()


def _rows(x: Tensor) -> Tensor:
    """A tensor of shape (1, samples × channels, space)."""
    return x.reshape(1, prod(x.shape[:2]), prod(x.shape[2:]))
