"""DistributedProcessing: a denoiser on images of any shape, patch by patch by all workers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tessel.imaging.context import DistributedContext
from tessel.imaging.distribution_strategies.strategies import (
    DistributedSignalStrategy,
    SmartTilingStrategy,
)
from tessel.imaging.parameters import state_of
from tessel.imaging.prior import DistributedPrior

CHECKPOINTING = ("auto", "always", "never")


class DistributedProcessing(torch.nn.Module):
    """A denoiser whose patches all workers share out among them, for images of any shape.

    Forward:  x ↦ Σ_k R_kᵀ D(R_k x), where R_k cuts out patch k; each worker has some of them.

    Args:
        ctx: the workers.
        processor: the denoiser, the same on all workers; a module gets the gradient of all patches.
        strategy: how images of one shape are cut; None for patches of `patch_size`.
        patch_size: of the patches, a number or one for each dimension that is cut.
        overlap: what is read on each side of a patch, which the denoiser depends on.
        tiling_dims: the dimensions that are cut; None for all but the first two.
        max_batch_size: at most so many patches at once; None for no limit.
        checkpoint_batches: which batches keep no activations and are computed again in a backward
            pass: "always", "never", or "auto" for those of workers with several batches.
        checkpoint_use_reentrant: of `torch.utils.checkpoint`; True is refused for a denoiser with
            parameters to learn on several workers, where the sums of gradients would not match.
        checkpoint_preserve_rng_state: of `torch.utils.checkpoint`, for denoisers that draw numbers.

    >>> import torch
    >>> from tessel.imaging import DistributedContext, distribute
    >>> with DistributedContext() as ctx:
    ...     denoiser = distribute(torch.nn.Identity(), ctx, type_object="denoiser", patch_size=4)
    ...     denoiser(torch.ones(1, 1, 8, 8)).sum()
    tensor(64.)
    """

    def __init__(
        self,
        ctx: DistributedContext,
        processor: Any,
        *,
        strategy: DistributedSignalStrategy | None = None,
        patch_size: int | Sequence[int] = 256,
        overlap: int | Sequence[int] = 64,
        tiling_dims: int | Sequence[int] | None = None,
        max_batch_size: int | None = None,
        checkpoint_batches: str = "auto",
        checkpoint_use_reentrant: bool = False,
        checkpoint_preserve_rng_state: bool = True,
    ) -> None:
        super().__init__()
        if checkpoint_batches not in CHECKPOINTING:
            raise ValueError(
                f"checkpoint_batches must be one of {', '.join(CHECKPOINTING)}, "
                f"got {checkpoint_batches!r}"
            )
        if strategy is not None and max_batch_size is not None:
            raise ValueError(
                f"max_batch_size={max_batch_size} is for the tiling of this library: the strategy "
                f"{strategy!r} batches its patches itself, in apply_batching"
            )
        self.ctx = ctx
        self.processor = processor.to(ctx.device) if hasattr(processor, "to") else processor
        self.strategy = strategy
        self.patch_size, self.overlap, self.tiling_dims = patch_size, overlap, tiling_dims
        self.max_batch_size = max_batch_size
        self.checkpoint_batches = checkpoint_batches
        self.checkpoint_use_reentrant = checkpoint_use_reentrant
        self.checkpoint_preserve_rng_state = checkpoint_preserve_rng_state
        self._priors: dict[torch.Size, DistributedPrior] = {}  # patches depend on the shape

    def forward(self, x: Tensor, *args: Any, gather: bool = True, **settings: Any) -> Tensor:
        """The denoised image.

        Args:
            x: the image, the same on all workers.
            args, settings: of the denoiser.
            gather: False: this worker's patches in their places, and zeros elsewhere.
        """
        found = self._priors.get(x.shape)
        if found is None:
            strategy = self.strategy
            if strategy is None:
                dims, batch = self.tiling_dims, self.max_batch_size
                strategy = SmartTilingStrategy(
                    x.shape, self.patch_size, self.overlap, tiling_dims=dims, max_batch_size=batch
                )
            found = self._priors[x.shape] = DistributedPrior(self.ctx, self.processor, strategy)
            found.apply_to = partial(self._processed, found)
        return found.prox(x, *args, gather=gather, **settings)

    def _processed(self, prior: DistributedPrior, batch: Tensor, *args: Any, **kw: Any) -> Tensor:
        """What the denoiser makes of a batch of patches, with its activations or without."""
        derives = torch.is_grad_enabled()
        learned = derives and any(each.requires_grad for each in state_of(self.processor))
        several = len(prior.local_indices) * prior.strategy.signal_shape[0] > len(batch)
        wanted = {"never": False, "always": True, "auto": several}[self.checkpoint_batches]
        if not (derives and wanted and (learned or batch.requires_grad)):
            return cast(Tensor, self.processor(batch, *args, **kw))
        # A reentrant checkpoint runs a backward pass of its own for each batch, with a sum of the
        # parameters' gradients in each: as many sums as batches, which differ between workers.
        if self.checkpoint_use_reentrant and learned and self.ctx.world_size > 1:
            raise ValueError(
                "checkpoint_use_reentrant=True derives each batch on its own, and workers have "
                "different numbers of them: the sums of their gradients would not match; pass False"
            )
        found = checkpoint(
            self.processor,
            batch,
            *args,
            use_reentrant=self.checkpoint_use_reentrant,
            preserve_rng_state=self.checkpoint_preserve_rng_state,
            **kw,
        )
        return cast(Tensor, found)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_priors"] = {}  # made anew for the shapes that are met
        return state
