"""Collecting: the measurements of all workers, on every one of them."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from tessel.core import Layout, Move, Shape
from tessel.imaging.context import DistributedContext
from tessel.imaging.measurements import LocalTensors, anchor_of
from tessel.imaging.parameters import depending_on
from tessel.transport import NUM_WORDS, code_of

GATHER_STRATEGIES = ("naive", "concatenated", "broadcast")
Kind = tuple[int, Shape, torch.dtype]  # the number of an item, its shape and dtype


@dataclass
class MeasurementGatherer:
    """Gives every worker the items of all, each a shared value, in their order.

    Args:
        ctx: the workers.
        num_items: how many items there are on all workers.
        strategy: "concatenated": those of a worker travel as one row, in one exchange. "broadcast":
            one exchange for each item, which needs no second copy of all of them. "naive": items
            are pickled, which is slow and carries no gradient.
    """

    ctx: DistributedContext
    num_items: int
    strategy: str = "concatenated"
    _known: dict[bytes, list[list[Kind]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.strategy not in GATHER_STRATEGIES:
            raise ValueError(
                f"gather_strategy must be one of {', '.join(GATHER_STRATEGIES)}, "
                f"got {self.strategy!r}"
            )

    def collect(self, call: str, indices: Sequence[int], items: Sequence[Tensor]) -> Any:
        """All items, as a deepinv `TensorList` if deepinv is in use, else as a list.

        Args:
            call: what is called, the same on all workers.
            indices: the numbers of this worker's items.
            items: this worker's.
        """
        if self.ctx.world_size == 1:
            return as_tensor_list(list(items))
        anchor = anchor_of(items)
        kinds, needs_grad = self._agree(call, indices, items, anchor)
        if needs_grad and self.strategy == "naive":
            raise ValueError(
                f"{call}: gather_strategy='naive' carries no gradient, and one is needed; take "
                f"'concatenated' or 'broadcast', or call it under torch.no_grad()"
            )
        found: dict[int, Tensor] = {}
        if self.strategy == "naive":
            mine = [each.detach().cpu() for each in items]
            for theirs, tensors in zip(
                kinds, self.ctx.partition.group.share_objects(mine), strict=True
            ):
                for (i, _, _), tensor in zip(theirs, tensors, strict=True):
                    found[i] = tensor.to(self.ctx.device)
        else:
            own = dict(zip(indices, items, strict=True))
            # What travels together: one item at a time, or all of one dtype.
            key = 0 if self.strategy == "broadcast" else 2
            for batch in dict.fromkeys(each[key] for one in kinds for each in one):
                some = [[each for each in one if each[key] == batch] for one in kinds]
                found |= self._moved(some, own, anchor if needs_grad else None, needs_grad)
        return as_tensor_list([found[i] for i in range(self.num_items)])

    def _agree(
        self, call: str, indices: Sequence[int], items: Sequence[Tensor], anchor: Tensor | None
    ) -> tuple[list[list[Kind]], bool]:
        """What every worker has, and whether gradients are wanted.

        Descriptions are sent once: later a checksum says that they are those of before.
        """
        mine = [(i, tuple(y.shape), y.dtype) for i, y in zip(indices, items, strict=True)]
        needs = any(each.requires_grad for each in (*items, *([] if anchor is None else [anchor])))
        needs = needs and torch.is_grad_enabled()
        group = self.ctx.partition.group
        said = [code_of(call), zlib.crc32(repr(mine).encode()), int(needs)]
        everyones = group.share_words(said)
        group.check_same_call(everyones, call)
        group.number_call()
        words = memoryview(everyones).cast("q")
        # All workers have all checksums, so that all know or none knows what the others hold.
        key = repr(words[1::NUM_WORDS].tolist()).encode()
        if key not in self._known:
            self._known[key] = group.share_objects(mine)
        return self._known[key], any(words[2::NUM_WORDS].tolist())

    def _moved(
        self,
        kinds: list[list[Kind]],
        own: dict[int, Tensor],
        anchor: Tensor | None,
        needs_grad: bool,
    ) -> dict[int, Tensor]:
        partition = self.ctx.partition
        dtype = next(dtype for theirs in kinds for _, _, dtype in theirs)
        lengths = tuple(sum(prod(shape) for _, shape, _ in theirs) for theirs in kinds)
        parts = [own[i].reshape(-1) for i, _, _ in kinds[self.ctx.rank]]
        row = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=self.ctx.device)
        row = depending_on(row, anchor)
        if needs_grad and not row.requires_grad:
            row = row.detach().requires_grad_()  # graphs of all workers are alike
        layout = Layout.from_lengths(partition, [lengths])
        everywhere = Layout.whole(partition, layout.shape, shared=True)
        rows = Move(layout, everywhere).apply(row)
        found, start = {}, 0
        for theirs in kinds:
            for i, shape, _ in theirs:
                found[i] = rows[start : start + prod(shape)].reshape(shape)
                start += prod(shape)
        return found


def as_tensor_list(items: list[Tensor]) -> Any:
    """Items in a list of which sums and multiples can be taken: deepinv's if it is imported."""
    deepinv = sys.modules.get("deepinv.utils.tensorlist")
    return LocalTensors(items) if deepinv is None else deepinv.TensorList(items)
