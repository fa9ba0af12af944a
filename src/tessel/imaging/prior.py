"""DistributedPrior: a prior of a large image, applied patch by patch by all workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tessel.core.layout import Layout
from tessel.imaging.context import DistributedContext
from tessel.imaging.distribution_strategies.strategies import (
    DistributedSignalStrategy,
    create_strategy,
)
from tessel.imaging.parameters import state_of, stray_leaf
from tessel.imaging.parts.prior import PartitionedPrior
from tessel.imaging.signal import DistributedSignal, local_data

Strategy = str | DistributedSignalStrategy | Callable[..., DistributedSignalStrategy]


class DistributedPrior:
    """A prior whose patches all workers share out among them.

    Forward:  x ↦ Σ_k R_kᵀ prox(R_k x), where R_k cuts out patch k; each worker has some of them.

    A prior is any object with `prox(x, …)` or `grad(x, …)`, as those of deepinv, or a denoiser: a
    function whose result stands for the prox. All workers hold the same one: if parameters or
    buffers of a module differ, as those of networks that each worker initialised for itself, all
    workers raise. Its parameters get the gradient of all patches, on every worker.

    Args:
        ctx: the workers.
        prior: the prior or denoiser.
        strategy: how the image is cut: "smart_tiling", "basic", a class or a strategy.
        signal_shape: of the image.
        strategy_kwargs: settings of the strategy, as patch_size and receptive_field_size.
        layout: of an image in parts; None for the whole image on every worker.

    >>> import torch
    >>> from tessel.imaging import DistributedContext, DistributedPrior
    >>> with DistributedContext() as ctx:
    ...     prior = DistributedPrior(
    ...         ctx, lambda x: 2 * x, "smart_tiling", (1, 1, 8, 8), {"patch_size": 4}
    ...     )
    ...     prior.num_patches, prior.prox(torch.ones(1, 1, 8, 8)).sum()
    (4, tensor(128.))
    """

    def __init__(
        self,
        ctx: DistributedContext,
        prior: Any,
        strategy: Strategy = "smart_tiling",
        signal_shape: Sequence[int] | None = None,
        strategy_kwargs: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> None:
        if signal_shape is None:
            if not isinstance(strategy, DistributedSignalStrategy):
                raise ValueError(
                    f"DistributedPrior: signal_shape is needed for strategy={strategy!r}, got None"
                )
            signal_shape = strategy.signal_shape
        if not (callable(prior) or hasattr(prior, "prox") or hasattr(prior, "grad")):
            raise ValueError(
                f"DistributedPrior: a prior with prox or grad, or a denoiser, is needed, "
                f"got {prior!r}"
            )
        ctx.check_same_state(state_of(prior), f"DistributedPrior: the prior {type(prior).__name__}")
        self.ctx = ctx
        self.prior = prior
        self.apply_to: Callable[..., Tensor] | None = None  # in the place of the prior itself
        self.strategy = create_strategy(strategy, signal_shape, **dict(strategy_kwargs or {}))
        whole = Layout.whole(ctx.partition, self.strategy.signal_shape, shared=True)
        self.parts = PartitionedPrior(layout or whole, self.strategy, ctx.sharding)
        self.num_patches = self.parts.num_patches
        self.local_indices = self.parts.local_indices
        self._label = f"DistributedPrior({self.num_patches} patches over {ctx.world_size} workers)"

    def prox(
        self, x: DistributedSignal | Tensor, *args: Any, gather: bool = True, **settings: Any
    ) -> Tensor:
        """The proximal operator or denoiser of each patch, which gets the further arguments.

        With `gather=False` this worker's patches in their places, and zeros elsewhere.
        """
        own = self.apply_to or (self.prior.prox if hasattr(self.prior, "prox") else self.prior)
        return self._apply("prox", own, x, args, settings, gather)

    def grad(
        self, x: DistributedSignal | Tensor, *args: Any, gather: bool = True, **settings: Any
    ) -> Tensor:
        """The gradient of each patch; the prior gets the further arguments."""
        if not hasattr(self.prior, "grad"):
            raise NotImplementedError(f"{self!r}: the prior {self.prior!r} has no method grad")
        return self._apply("grad", self.prior.grad, x, args, settings, gather)

    def _apply(
        self,
        name: str,
        function: Callable[..., Tensor],
        x: DistributedSignal | Tensor,
        args: tuple[Any, ...],
        settings: Mapping[str, Any],
        gather: bool,
    ) -> Tensor:
        call, data, layout = f"{self._label}.{name}", local_data(x), self.parts.layout
        if not (gather or self.parts.is_whole):
            raise NotImplementedError(
                f"{call}: gather=False is for a whole image on every worker; of one in parts "
                f"each worker gets its part"
            )
        fits = isinstance(data, Tensor) and tuple(data.shape) == layout.local_shape
        if self.ctx.debug and layout.shared and fits:  # else all raise, as their calls differ
            self.ctx.check_same(data, layout, f"the input of {call}")

        def checked(*given: Any, **named: Any) -> Tensor:
            result = function(*given, **named)
            # A gradient that went to a tensor which was not seen to be shared would be that of this
            # worker's patches only, a silent wrong number.
            leaf = stray_leaf(result) if isinstance(result, Tensor) else None
            if leaf is not None:
                raise ValueError(
                    f"{type(self.prior).__name__} uses a tensor of shape {tuple(leaf.shape)} that "
                    f"needs a gradient and is no parameter of it that could be found: each worker "
                    f"would get a part of the gradient; make it a parameter or attribute of the "
                    f"prior, pass it as an argument, or let it need none"
                )
            return result

        return self.parts.apply(call, checked, data, self.prior, args, settings, gather)

    def __repr__(self) -> str:
        return self._label
