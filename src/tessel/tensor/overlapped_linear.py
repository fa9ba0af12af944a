"""Products with a weight whose messages in a backward pass are not those of its factors.

Where the outputs of the weight are split, messages travel while it is derived. Where rows of the
input are split and the weight is large beside them, its gradient is computed in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core import boxes
from tessel.core.layout import Cut, Layout
from tessel.core.linop import in_transform, record, record_product
from tessel.core.move import Move
from tessel.core.shared import Replicate, current_buckets, replication, shared_whole, used
from tessel.tensor.table import outlining
from tessel.transport import kept_in_job

LEAST_WEIGHT = 1 << 17  # values, below which gradients travel with others in a bucket


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
            x = record(self.use, x, False, anchor)
        of_weight = _rows(grad).t().mm(_rows(x).conj()) if needs_weight else None
        of_bias = _rows(grad).sum(0) if needs_bias else None
        if share is not None:
            return record(total, share, False, anchor), of_weight, of_bias
        return None if wait is None else wait(), of_weight, of_bias


def _rows(x: Tensor) -> Tensor:
    """A tensor of any number of dimensions as a matrix of its last one."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def can_overlap(x: Tensor, weight: Tensor) -> bool:
    """Whether messages may travel while a product is derived: in plain reverse mode."""
    if not (x.requires_grad and torch.is_grad_enabled()) or outlining.get():
        return False
    return not in_transform() and not torch.is_autocast_enabled(weight.device.type)


def multiply_overlapping(use: Replicate, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product, so that the gradient of x travels while that of the weight is computed."""
    return record_product(ColumnProduct(use), x, weight, bias)


class RowProduct:
    """y = x Wᵀ + b, where each worker has some rows of x, and all share W and b.

    Gradients:  of x, g W̄;  of W, gᵀ x̄ of all rows;  of b, g over this worker's rows.

    The gradient of W is a sum over workers. Instead of terms as large as W, rows of x and g travel,
    where these are fewer: each worker computes some rows of the gradient, and all get them.

    Args:
        layout: of x, whose last dimension is whole.
        axes: of the grid, which split rows.
        outputs: how many there are.
    """

    def __init__(self, layout: Layout, axes: tuple[int, ...], outputs: int) -> None:
        partition, shared, (*lead, inputs) = layout.partition, layout.shared, layout.shape
        own = Cut(axes, boxes.balanced(outputs, prod(partition.shape[axis] for axis in axes)))
        wholes = tuple(map(Cut.whole, lead))

        def lies(length: int, cuts: tuple[Cut, ...], last: Cut) -> Layout:
            return Layout(partition, (*lead, length), (*cuts, last), shared)

        grad = lies(outputs, layout.cuts[:-1], Cut.whole(outputs))
        self.turn = Move(grad, lies(outputs, wholes, own))
        self.spread = Move(layout, lies(inputs, wholes, Cut.whole(inputs)))
        weight = shared_whole(partition, (outputs, inputs))
        part = Layout(partition, weight.shape, (own, Cut.whole(inputs)), shared)
        self.collect = Move(part, weight)
        use = replication(weight, axes)
        assert use is not None
        self.use, self.group = use, partition.prepare()

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
        of_bias = _rows(grad).sum(0) if needs_bias else None
        moves = [(self.turn, grad), (self.spread, x)] if needs_weight else []
        if torch.is_grad_enabled():
            parts = [record(move, each, False, anchor) for move, each in moves]
            of_weight = record(self.collect, _product(*parts), False, anchor) if parts else None
            # each worker uses the shared W for the gradient of its own rows
            own = record(self.use, weight, False, anchor)
            return grad.matmul(own.conj()) if needs_x else None, of_weight, of_bias
        waits = [move.start(each) for move, each in moves]
        of_x = grad.matmul(weight.conj()) if needs_x else None
        parts = [wait() for wait in waits]
        return of_x, self._collected(*parts) if parts else None, of_bias

    def _collected(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of W; what this worker computes of it is computed in its place."""
        if len(self.collect.stages) > 1:
            return self.collect.apply(_product(grad, x))
        found = x.new_empty(self.use.domain.shape)
        (stage,) = self.collect.stages
        flat = found.view(stage.plan.target_shape)
        _product(grad, x, stage.own(flat).view(-1, x.shape[-1]))
        self.collect.complete(flat)
        return found


def _product(grad: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """gᵀ x̄."""
    return torch.mm(_rows(grad).t(), _rows(x).conj(), out=out)


def multiply_rows(layout: Layout, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The product with a parameter of a model; None if its gradient is to be a sum.

    Args:
        layout: of the whole x, whose last dimension is whole.
        x: this worker's part.
        weight: shared, (outputs, inputs).
        bias: shared, or None.
    """
    if weight.dim() != 2 or weight.numel() < LEAST_WEIGHT or not weight.requires_grad:
        return None
    kinds = {(each.dtype, each.device.type) for each in (x, weight, bias) if each is not None}
    if len(kinds) > 1 or not x.is_cpu or outlining.get() or torch.is_autocast_enabled("cpu"):
        return None
    product, buckets = _row_product(layout, len(weight)), current_buckets.get()
    if product is None or buckets is None or not buckets.note(weight, layout.partition):
        return None
    return record_product(product, x, weight, used(bias, layout))


@kept_in_job
def _row_product(layout: Layout, outputs: int) -> RowProduct | None:
    """None if rows are not split, or too many for it to be worth it."""
    (*lead, inputs), sizes = layout.shape, layout.partition.shape
    axes = tuple(axis for cut in layout.cuts[:-1] for axis in cut.axes if sizes[axis] > 1)
    copies = prod(sizes[axis] for axis in axes)
    # rows of x and g against terms of a sum; in both ways all get the gradient afterwards
    if copies == 1 or prod(lead) * (inputs + outputs // copies) > outputs * inputs:
        return None
    return RowProduct(layout, axes, outputs)
