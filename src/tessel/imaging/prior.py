"""DistributedPrior: a prior of a large image, applied patch by patch by all workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from tessel.imaging.context import DistributedContext
from tessel.imaging.cores import Cores
from tessel.imaging.distribution_strategies.strategies import (
    BasicStrategy,
    DistributedSignalStrategy,
    Pairs,
    SmartTilingStrategy,
    WindowStrategy,
    create_strategy,
)
from tessel.imaging.parts.prior import PartitionedPrior, taken_apart
from tessel.imaging.sharding import local_indices
from tessel.imaging.signal import DistributedSignal, checked_data, is_whole, local_data
from tessel.imaging.uses import Use, state_of, totalled, unshared_leaf, using
from tessel.layout import Layout

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
        self.parts: PartitionedPrior | None = None
        if layout is None or is_whole(layout):
            self.num_patches = self.strategy.get_num_patches()
            self.local_indices = ctx.local_indices(self.num_patches)
        else:
            self.parts = PartitionedPrior(layout, self.strategy)
            self.num_patches = self.parts.num_patches
            self.local_indices = self.parts.local_indices

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
        call, data = f"{self!r}.{name}", local_data(x)
        if self.parts is not None:
            if not gather:
                raise NotImplementedError(
                    f"{call}: gather=False is for a whole image on every worker; of one in parts "
                    f"each worker gets its part"
                )
            data = checked_data(self.ctx, x, self.parts.layout, call)
            checked = partial(_checked, self.prior, function)
            return self.parts.apply(call, checked, data, self.prior, args, settings)
        with using(self.ctx, call, data, self.prior, args, settings) as use:
            self._check_shape(call, use.x)
            if not gather:
                return use.hang(self._put_together(function, use))
            cores = self._cores
            if cores is not None:
                return cores.put_together(use.hang(self._put_together(function, use, cores)))
            return totalled(use.hang(self._put_together(function, use)), self.ctx)

    @cached_property
    def _cores(self) -> Cores | None:
        """The cores of windows that do not overlap, of which each worker has some."""
        strategy = self.strategy
        if type(strategy) not in (SmartTilingStrategy, BasicStrategy) or self.ctx.world_size == 1:
            return None  # what a strategy of a user puts together may overlap
        assert isinstance(strategy, WindowStrategy)
        if strategy.overlap:
            return None
        workers = range(self.ctx.world_size)
        count, how = self.num_patches, self.ctx.sharding
        owned = [local_indices(count, k, self.ctx.world_size, how) for k in workers]
        return Cores(self.ctx.partition, strategy, owned, self.ctx.rank)

    def _put_together(
        self, function: Callable[..., Tensor], use: Use, cores: Cores | None = None
    ) -> Tensor:
        """What the prior makes of this worker's patches: in their places, or their cores in a row.

        Args:
            function: the prior.
            use: what it is applied to.
            cores: if they are put in a row; None for zeros with patches in their places.
        """
        reduce = self.strategy.reduce_patches if cores is None else cores.reduce_patches
        out = torch.zeros_like(use.x) if cores is None else use.x.new_zeros(cores.length)
        pairs = self.strategy.get_local_patches(use.x, self.local_indices)
        processed: Pairs = []
        left = iter(pairs)
        for batch in self.strategy.apply_batching([patch for _, patch in pairs]):
            result = function(batch, *use.args, **use.settings)
            _check_result(self.prior, batch, result)
            _check_parameters(self.prior, result)
            processed += taken_apart(result, left)
            if self.strategy.reduces_in_turn:
                reduce(out, processed)
                processed = []
        if next(left, None) is not None:
            raise ValueError(f"{self.strategy!r}: apply_batching gave fewer patches than it got")
        if processed or not self.strategy.reduces_in_turn:
            reduce(out, processed)
        return out

    def _check_shape(self, call: str, x: Tensor) -> None:
        if x.shape != self.strategy.signal_shape:
            raise ValueError(
                f"{call}: a signal of shape {tuple(self.strategy.signal_shape)} is needed, got "
                f"{tuple(x.shape)}"
            )

    def __repr__(self) -> str:
        return f"DistributedPrior({self.num_patches} patches over {self.ctx.world_size} workers)"


def _check_result(prior: Any, batch: Tensor, result: Any) -> None:
    if not isinstance(result, Tensor) or result.shape != batch.shape:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"a prior gives a tensor of the shape that it got, {tuple(batch.shape)}: "
            f"{type(prior).__name__} gave {got}"
        )


def _checked(prior: Any, function: Callable[..., Tensor], *args: Any, **settings: Any) -> Tensor:
    """What a prior makes of patches, if the gradients of all of its parameters are known."""
    result = function(*args, **settings)
    _check_parameters(prior, result)
    return result


def _check_parameters(prior: Any, result: Tensor) -> None:
    """Raise ValueError if a gradient would go to a tensor that was not seen to be shared.

    That would be the gradient of this worker's patches only, a silent wrong number.
    """
    leaf = unshared_leaf(result)
    if leaf is not None:
        raise ValueError(
            f"{type(prior).__name__} uses a tensor of shape {tuple(leaf.shape)} that needs a "
            f"gradient and is no parameter of it that could be found: each worker would get a "
            f"part of the gradient; make it a parameter or attribute of the prior, pass it as an "
            f"argument, or let it need none"
        )
