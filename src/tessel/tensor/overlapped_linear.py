"""Products with a part of a weight, with overlapped gradients and little memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.context import in_transform, is_compiling
from tessel.core.linop import record, record_product
from tessel.core.move import Move
from tessel.core.shared import Replicate
from tessel.tensor.table import outlining

# Columns that each thread computes at once: fewer take more time, more take more memory.
_COLUMNS = 1024
_FEW_ROWS = 128


class PartialProduct:
    """y = x Wᵀ + b, where each worker has a part of W, and of b.

    Gradients:  of x, Σ_k g_k W̄_k over the workers k that share it;  of W_k, g_kᵀ x̄;  of b_k, g_k
    over all rows.

    The sum starts before the gradient of the weight is computed, and is awaited afterwards.

    Args:
        use: the use of an x that the workers share; its adjoint is the sum. None if each worker
            has an x of its own.
    """

    def __init__(self, use: Replicate | None) -> None:
        self.use = use
        self.group = None if use is None else use.group

    def _apply(self, x: Tensor, *factors: Tensor | None) -> Tensor:
        weight, bias = factors
        assert weight is not None
        return times(x, weight.t(), bias)

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
        total = None if self.use is None else self.use.H
        share = times(grad, weight.conj()) if needs_x else None
        records = torch.is_grad_enabled()
        wait = None
        if isinstance(total, Move) and share is not None and not records:
            wait, share = total.start(share), None  # to free it as soon as it is sent
        if self.use is not None and needs_weight and records:
            # each worker uses the shared x for the gradient of its own rows: the derivatives of
            # this by x are summed, too
            x = record(self.use, x, anchor=anchor)
        of_weight = _rows(grad).t().mm(_rows(x).conj()) if needs_weight else None
        of_bias = _rows(grad).sum(0) if needs_bias else None
        if wait is not None:
            share = wait()
        elif total is not None and share is not None:
            share = record(total, share, anchor=anchor)
        return share, of_weight, of_bias


def _rows(x: Tensor) -> Tensor:
    """A tensor as a matrix, with all dimensions but the last as one."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def times(x: Tensor, columns: Tensor, bias: Tensor | None = None) -> Tensor:
    """x A + b, for a matrix A, some columns at a time if x has few rows.

    For few rows, MKL copies all columns of one product to memory that it keeps.
    """
    num_columns, step = columns.shape[1], _COLUMNS * torch.get_num_threads()
    if torch.is_grad_enabled() or not _has_many_columns(x, num_columns):
        return F.linear(x, columns.t(), bias)
    rows = _rows(x)
    y = rows.new_empty(len(rows), num_columns)
    for begin in range(0, num_columns, step):
        at = slice(begin, begin + step)
        if bias is None:
            torch.mm(rows, columns[:, at], out=y[:, at])
        else:
            torch.addmm(bias[at], rows, columns[:, at], out=y[:, at])
    return y.view(*x.shape[:-1], num_columns)


def _has_many_columns(x: Tensor, num_columns: int) -> bool:
    """Whether `times` needs less memory in several steps."""
    is_real = x.dtype in (torch.float32, torch.float64) and x.device.type == "cpu"
    few = 0 < x.numel() <= _FEW_ROWS * x.shape[-1]
    return is_real and few and num_columns >= 2 * _COLUMNS * torch.get_num_threads()


def can_overlap(x: Tensor, weight: Tensor) -> bool:
    """Whether messages can be sent during a product's backward: only in plain reverse mode."""
    return x.requires_grad and _is_plain(weight)


def takes_steps(x: Tensor, weight: Tensor) -> bool:
    """Whether a product, or its gradient, needs less memory in several steps."""
    needs_grad = x.requires_grad or weight.requires_grad
    return needs_grad and _has_many_columns(x, max(weight.shape)) and _is_plain(weight)


def _is_plain(weight: Tensor) -> bool:
    """Whether only autograd differentiates what is computed, and autocast changes no dtype."""
    if not torch.is_grad_enabled() or outlining.get() or in_transform() or is_compiling():
        return False
    return not torch.is_autocast_enabled(weight.device.type)


def multiply_part(use: Replicate | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product, whose gradient of x is sent while that of the weight is computed."""
    return record_product(PartialProduct(use), x, weight, bias)
