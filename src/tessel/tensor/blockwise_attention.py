"""Attention block by block: exact, and with no more scores than a worker's queries × one block.

Forward:  a pass over the blocks of keys keeps, for each query, the largest score so far and the sum
of exponentials and the values relative to it.    Gradient:  one more pass. With the logarithm L of
the sum known, weights are P = exp(S - L), and the gradient of ⟨g, O⟩ is that of the sum over blocks
of P ∘ (g Vᵀ - δ) with δ = ⟨g, O⟩ of each query, which accounts for the change of L. These terms are
the gradient of S; torch differentiates their sum for derivatives of higher order (`BlockSum`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessel.core.boxes import Box
from tessel.core.layout import Shape
from tessel.core.linop import Tensors
from tessel.core.numbers import constant
from tessel.tensor.block_sum import (
    ROWS,
    BlockSchedule,
    BlockSum,
    Operand,
    Tile,
    pieces_of,
    visits,
)
from tessel.tensor.counter_random import is_at_least
from tessel.tensor.table import widened
from tessel.transport import Group

_FAR = -256.0  # a logarithm of a sum has four digits beside this number in float32


@dataclass(frozen=True)
class Dropout:
    """Dropout of weights, each by its place among the weights of the whole.

    Args:
        p: the probability of a zero.
        seed: a number that all workers have.
        shape: the shape of the weights, (batch …, queries, keys).
        box: this worker's box of the dimensions before the last two.
    """

    p: float
    seed: int
    shape: Shape
    box: Box

    def factors(self, tile: Tile, like: Tensor) -> Tensor:
        """Zeros, and elsewhere the factor that keeps the mean."""
        box = (*self.box, tile.rows, tile.columns)
        kept = is_at_least(self.p, self.seed, self.shape, box, like.dtype, like.device)
        return kept.mul_(1 / (1 - self.p) if self.p < 1 else 0.0)


@dataclass(frozen=True)
class Scores:
    """The scores of queries and keys.

    Args:
        scale: the factor of the products.
        is_causal: whether a query sees only keys up to its own index.
        heads: for each head of the queries its head of the keys, if these have fewer.
        dropout: the dropout of the weights.
    """

    scale: float
    is_causal: bool = False
    heads: tuple[int, ...] | None = None
    dropout: Dropout | None = None

    def __call__(self, tile: Tile, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """The scores of a tile; -inf where a query does not see a key."""
        found = (widened(q) * self.scale) @ widened(self.of_heads(k)).mT
        if mask is not None and mask.dtype == torch.bool:
            found = found.masked_fill(~mask, -math.inf)
        elif mask is not None:
            found = found + widened(mask)
        if self.is_causal and tile.columns[1] - 1 > tile.rows[0]:
            rows = torch.arange(*tile.rows, device=q.device).unsqueeze(-1)
            hidden = torch.arange(*tile.columns, device=q.device) > rows
            found = found.masked_fill(hidden, -math.inf)
        return found

    def of_heads(self, x: Tensor) -> Tensor:
        """Keys or values for each head of the queries."""
        if self.heads is None:
            return x
        return x.index_select(-3, constant(self.heads, torch.int64, x.device))

    def of_keys(self, grad: Tensor, x: Tensor) -> Tensor:
        """The adjoint: the gradient of keys or values x, summed over the heads that share them."""
        if self.heads is None or grad.shape == x.shape:
            return grad
        index = constant(self.heads, torch.int64, grad.device)
        return x.new_zeros(x.shape, dtype=grad.dtype).index_add_(-3, index, grad)

    def dropped(self, tile: Tile, weights: Tensor) -> Tensor:
        """Weights, or a tensor in their place, with dropout."""
        drop = self.dropout
        return weights if drop is None else weights * drop.factors(tile, weights)


@dataclass(frozen=True)
class BlockwiseAttention:
    """(q, k, v, mask) to the attention, and the logarithm of the sum of exponentials of each query.

    The result of a query that sees nothing is zero, as in torch.

    Args:
        schedule: its rows are queries, its columns are keys.
        scores: the function that computes scores.
        operands: the layouts of q, k, v and the mask.
        batch: the dimensions before the last two of the result.
    """

    schedule: BlockSchedule
    scores: Scores
    operands: tuple[Operand, ...]
    batch: Shape

    first_kept = 0
    num_unread = 0

    def __post_init__(self) -> None:
        self.schedule.partition.prepare()

    @property
    def group(self) -> Group:
        return self.schedule.partition.group

    def _apply(self, *xs: Tensor | None) -> tuple[Tensor, ...]:
        q, k, v, mask = (None if x is None else x.detach() for x in xs)
        assert q is not None and v is not None
        rows = (*self.batch, q.shape[-2])
        most = widened(q).new_full((*rows, 1), -math.inf)
        total, found = torch.zeros_like(most), most.new_zeros((*rows, v.shape[-1]))
        for _, held, tiles in visits(self.schedule, self.operands, (q, k, v, mask)):
            for tile in tiles:
                state = [ROWS.piece(x, tile) for x in (most, total, found)]
                # without a name for the result, which would live while the next tile is computed
                self._merge(*state, *self._attended(tile, *pieces_of(held, self.operands, tile)))
        found.div_(total.masked_fill(total == 0, 1))
        logarithm = most.add_(total.log_())
        return found.to(q.dtype), logarithm.masked_fill_(logarithm == -math.inf, 0)

    @staticmethod
    def _merge(
        most: Tensor, total: Tensor, out: Tensor, more: Tensor, sums: Tensor, count: Tensor | float
    ) -> None:
        """Merge the attention to more keys into that to earlier ones.

        Largest scores and sums relative to them are separate: where all scores are -1e9, as of
        padding, a logarithm of the sum has no digits for the number of keys.
        """
        new = torch.maximum(most, sums)
        # where nothing is seen yet both are -inf, and their difference is NaN
        base = new.masked_fill(new == -math.inf, 0)
        before, after = (most - base).exp_(), (sums - base).exp_().mul_(count)
        out.mul_(before).add_(more.mul_(after))
        total.mul_(before).add_(after)
        most.copy_(new)

    def _attended(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        """The attention to the keys of a tile, the largest scores, and the sums relative to them.

        Torch's kernel gives only the logarithms of the sums: they count as the largest scores.
        """
        kernel = self._kernel(tile, q, k, v, mask)
        if kernel is not None:
            return *kernel.attended(), 1.0
        scores = self.scores(tile, q, k, mask)
        most = scores.amax(-1, keepdim=True)
        weights = scores.sub_(most.masked_fill(most == -math.inf, 0)).exp_()
        total = weights.sum(-1, keepdim=True)
        weights = self.scores.dropped(tile, weights.div_(total.masked_fill(total == 0, 1)))
        return weights @ widened(self.scores.of_heads(v)), most, total

    def _kernel(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> FlashKernel | None:
        """Torch's kernel for a tile, if it supports it."""
        if self.scores.dropout is not None or not FlashKernel.takes(q, v):
            return None
        if self.scores.is_causal and self.scores.scale <= 0:
            return None  # it scales -inf where a query does not see a key
        if mask is not None and mask.is_floating_point():
            largest = mask.amax(-1)
            if ((largest < _FAR) & (largest > -math.inf)).any():
                return None  # its logarithms would have few digits
        k, v = self.scores.of_heads(k), self.scores.of_heads(v)
        if any(each.shape[:-2] != self.batch for each in (q, k, v)):
            return None
        is_diagonal = self.scores.is_causal and tile.columns[1] - 1 > tile.rows[0]
        return FlashKernel(q, k, v, mask, is_diagonal, self.scores.scale)

    def vjp(
        self, grads: Tensors, needs: Sequence[bool], xs: Tensors, ys: Sequence[Tensor]
    ) -> Tensors:
        """The gradients, by one more pass over the blocks."""
        (grad, of_logarithm), (out, logarithm) = grads, ys
        grad = torch.zeros_like(out) if grad is None else grad
        delta = (widened(grad) * widened(out)).sum(-1, keepdim=True)
        if of_logarithm is not None:  # in derivatives of higher order
            delta = delta - of_logarithm
        operands = (*self.operands, ROWS, ROWS, ROWS)
        given = (*xs, grad, logarithm, delta)
        if torch.is_grad_enabled():
            shares = BlockSum(self.schedule, self._shares, operands, (ROWS,))
            ones = torch.ones_like(logarithm)
            return shares.vjp([ones], (*needs, *[False] * 3), given)[:4]
        wanted = tuple(k for k, need in enumerate(needs) if need)
        # torch's kernel computes no gradient of a mask, and takes none of the logarithm
        may_use_kernel = of_logarithm is None and 3 not in wanted

        def gradients(tile: Tile, *pieces: Any) -> Sequence[Tensor]:
            q, k, v, mask, grad, logarithm, _, out = pieces
            kernel = self._kernel(tile, q, k, v, mask) if may_use_kernel else None
            if kernel is None:
                return self._gradients(wanted, tile, *pieces[:-1])
            found = kernel.gradients(grad, out, logarithm)
            return [self.scores.of_keys(found[k], pieces[k]) for k in wanted]

        outputs = tuple(self.operands[k] for k in wanted)
        total = BlockSum(self.schedule, gradients, (*operands, ROWS), outputs, wanted)
        found: list[Tensor | None] = [None] * 4
        for k, each in zip(wanted, total._apply(*given, out), strict=True):
            found[k] = each
        return found

    def _gradients(
        self, wanted: Sequence[int], tile: Tile, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> list[Tensor]:
        """The gradients of operands by the term of a tile, with three tensors of its scores."""
        mask, grad, logarithm, delta = rest
        scores, drop, grad = self.scores, self.scores.dropout, widened(grad)
        keys, values = widened(scores.of_heads(k)), widened(scores.of_heads(v))
        weights = (scores(tile, q, k, mask) - logarithm).exp_()
        of_scores = grad @ values.mT
        dropped = weights
        if drop is not None:
            dropped = drop.factors(tile, weights)
            of_scores.mul_(dropped)
            dropped.mul_(weights)
        found = {}
        if 2 in wanted:
            found[2] = scores.of_keys((dropped.mT @ grad).sum_to_size(values.shape), v)
        del dropped
        of_scores.sub_(delta).mul_(weights)
        del weights
        if 0 in wanted:
            found[0] = (of_scores @ keys).sum_to_size(q.shape).mul_(scores.scale)
        if 1 in wanted:
            of_keys = (of_scores.mT @ widened(q)).sum_to_size(keys.shape)
            found[1] = scores.of_keys(of_keys.mul_(scores.scale), k)
        if 3 in wanted:
            found[3] = of_scores.sum_to_size(mask.shape)
        return [found[k] for k in wanted]

    def _shares(self, tile: Tile, *pieces: Tensor | None) -> tuple[Tensor]:
        """The term of a tile for each query in the sum whose gradient is computed."""
        q, k, v, mask, grad, logarithm, delta = pieces
        assert q is not None and k is not None and v is not None and grad is not None
        assert logarithm is not None and delta is not None
        weights = (self.scores(tile, q, k, mask) - logarithm).exp()
        gains = self.scores.dropped(tile, widened(grad) @ widened(self.scores.of_heads(v)).mT)
        return ((weights * (gains - delta)).sum(-1, keepdim=True),)


class FlashKernel:
    """Torch's own attention of a tile on a CPU, which holds only as many scores as fit in a cache.

    Args:
        q, k, v: (batch, heads, rows, features), with equal lengths except for the number of rows.
        mask: booleans, or numbers that are added to scores, or None.
        is_diagonal: whether row i sees columns up to i.
        scale: the factor of the products.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_diagonal: bool, scale: float
    ) -> None:
        self.q, self.k, self.v = (_in_rows(x) for x in (q, k, v))
        self.is_diagonal, self.scale = is_diagonal, scale
        self.mask = None
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = q.new_zeros(mask.shape).masked_fill(~mask, -math.inf)
            self.mask = mask.to(q.dtype).expand(*q.shape[:2], q.shape[2], k.shape[2])

    @staticmethod
    def takes(q: Tensor, v: Tensor) -> bool:
        """Whether the kernel supports such tensors."""
        kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        is_plain = q.dim() == 4 and q.shape[-1] == v.shape[-1] > 0 and q.dtype in kinds
        return is_plain and q.numel() > 0 and q.device.type == "cpu"

    def attended(self) -> tuple[Tensor, Tensor]:
        """The attention, and the logarithm of the sum of exponentials."""
        found, logarithm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.q, self.k, self.v, 0.0, self.is_diagonal, attn_mask=self.mask, scale=self.scale
        )
        logarithm = logarithm.unsqueeze(-1)
        if self.mask is not None:  # the kernel returns 0 for rows that see nothing
            hidden = (self.mask == -math.inf).all(-1, keepdim=True)
            logarithm = logarithm.masked_fill(hidden, -math.inf)
        return widened(found), logarithm

    def gradients(self, grad: Tensor, out: Tensor, logarithm: Tensor) -> Sequence[Tensor]:
        """The gradients of q, k, v, by the result and the logarithm of the sum over all tiles."""
        # in the memory order in which the kernel returns logarithms
        sums = logarithm.squeeze(-1).transpose(1, 2).contiguous().transpose(1, 2)
        found: Sequence[Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(grad.to(self.q.dtype), self.q, self.k, self.v, _in_rows(out), sums),
                *(0.0, self.is_diagonal),
                attn_mask=self.mask,
                scale=self.scale,
            )
        )
        return found


def _in_rows(x: Tensor) -> Tensor:
    """A tensor with contiguous features in each row, as the kernel assumes without a check.

    It supports any strides of rows, masks and gradients; torch's own function does not call it for
    other tensors.
    """
    return x if x.stride(-1) == 1 else x.contiguous()
