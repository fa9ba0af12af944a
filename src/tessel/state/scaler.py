"""Scaled losses: all workers of a group skip a step, or none does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel.core.partition import Partition
from tessel.distributed.group import row_of
from tessel.distributed.movements import reduce


class ParallelGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for sharded parameters.

    If a gradient is not finite on one worker, all workers of the group skip the step, and all have
    the same scale afterwards, as in one process. All of them must call `unscale_` and `step`.

    Args:
        device: as in torch, like all further arguments.
        partition: the workers of the shards; None for the default group.

    >>> import tessel, torch
    >>> scaler = tessel.nn.ParallelGradScaler("cpu", init_scale=8.0)
    >>> layer = tessel.nn.ParallelLinear(2, 2, dim=-1)
    >>> optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    >>> layer.weight.grad = torch.full_like(layer.weight, float("inf"))
    >>> scaler.scale(torch.ones(())).item(), scaler.step(optimizer), scaler.update()
    (8.0, None, None)
    >>> scaler.get_scale()
    4.0
    """

    def __init__(
        self, device: str = "cuda", *args: Any, partition: Partition | None = None, **settings: Any
    ) -> None:
        super().__init__(device, *args, **settings)
        self.partition = row_of(partition)

    def _unscale_grads_(self, *args: Any, **settings: Any) -> dict[torch.device, Tensor]:
        """Whether gradients are infinite, for each device: the same on all workers."""
        found = super()._unscale_grads_(*args, **settings)
        assert self._scale is not None
        here = sum(
            (each.to(self._scale.device) for each in found.values()), torch.zeros_like(self._scale)
        )
        count = torch.full_like(here, len(found))
        # a sum, not a maximum: flags are zero or more, so that it is zero where all of them are
        anywhere, checks = reduce(torch.stack([here, count]), self.partition).unbind()
        if not found and checks:  # the gradients are those of other workers
            return {anywhere.device: anywhere}
        return {device: anywhere.to(device) for device in found}  # torch steps where this is zero
