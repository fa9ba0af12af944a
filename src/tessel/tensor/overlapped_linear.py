"""Products with a weight whose outputs are split: gradients are sent while others are computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.context import is_compiling
from tessel.core.linop import in_transform, record, record_product
from tessel.core.move import Move
from tessel.core.shared import Replicate
from tessel.tensor.table import outlining


class ColumnProduct:
    """y = x Wᵀ + b, where workers share x and each has some rows of W and b.

    Gradients:  of x, Σ_k g_k W̄_k over the workers k;  of W_k, g_kᵀ x̄;  of b_k, g_k over all rows.

    The sum is started before the gradient of the weight is computed, and waited for afterwards.

    Args:
        use: how the workers use x; its adjoint is the sum.
    """

    def __init__(self, use: Replicate) -> None:
        self.use = use
        self.group = use.group

    def _apply(self, x: Tensor, *factors: Tensor | None) -> Tensor:
        weight, bias = factors
        assert weight is not None
        return F.linear(x, weight, bias)

    def vjp(
        self,
        grad: Tensor,
        anchor: Tensor | None,
        needs: Sequence[bool],
        x: Tensor,
        *factors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x, W and b."""
        weight, _ = factors
        assert weight is not None
        needs_x, _, _, needs_weight, needs_bias = needs
        total = self.use.H
        assert isinstance(total, Move)
        share = grad.matmul(weight.conj()) if needs_x else None
        records = torch.is_grad_enabled()
        wait = None
        if share is not None and not records:
            wait, share = total.start(share), None  # freed as soon as it is sent
        if needs_weight and records:
            # each worker uses the shared x for the gradient of its own rows: what that is derived
            # by x is summed again
            x = record(self.use, x, anchor=anchor)
        of_weight = _rows(grad).t().mm(_rows(x).conj()) if needs_weight else None
        of_bias = _rows(grad).sum(0) if needs_bias else None
        if share is not None:
            return record(total, share, anchor=anchor), of_weight, of_bias
        return None if wait is None else wait(), of_weight, of_bias


def _rows(x: Tensor) -> Tensor:
    """A tensor of any number of dimensions as a matrix of its last one."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def can_overlap(x: Tensor, weight: Tensor) -> bool:
    """Whether messages may travel while a product is derived: in plain reverse mode."""
    if not (x.requires_grad and torch.is_grad_enabled()) or outlining.get():
        return False
    is_plain = not in_transform() and not is_compiling()
    return is_plain and not torch.is_autocast_enabled(weight.device.type)


def multiply_overlapping(use: Replicate, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product, so that the gradient of x travels while that of the weight is computed."""
    return record_product(ColumnProduct(use), x, weight, bias)
