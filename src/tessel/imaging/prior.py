"""DistributedPrior: a prior of a large image, applied patch by patch by all workers.

Patches are those of the whole image, so that results do not depend on the number of workers. A
tiling (`tiling.py`) defines which worker has which patches, what it reads, and what it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tessel.core import (
    Agreement,
    Layout,
    TensorMeta,
    agree,
    anchored_zeros,
    grad_alike,
    shared_whole,
)
from tessel.errors import check_choice
from tessel.imaging.context import DistributedContext
from tessel.imaging.distribution_strategies.strategies import (
    DistributedSignalStrategy,
    SmartTilingStrategy,
    check_its_own,
    create_strategy,
)
from tessel.imaging.parameters import (
    Copies,
    computing_with,
    depending_on,
    gradients_of,
    learned,
    needs_grad,
    state_of,
    unshared_leaf,
)
from tessel.imaging.parts.layouts import bringing
from tessel.imaging.parts.local_rules import MISFITS
from tessel.imaging.parts.rows import rows_of
from tessel.imaging.problems import raised
from tessel.imaging.signal import Image, local_data
from tessel.imaging.tiling import Tiling, tiling_of

Strategy = str | DistributedSignalStrategy | Callable[..., DistributedSignalStrategy]
CHECKPOINTING = ("auto", "always", "never")
_TILING = ("patch_size", "overlap", "tiling_dims", "max_batch_size")  # settings of a strategy


class DistributedPrior:
    """A prior whose patches are divided among all workers.

    Forward:  x ↦ Σ_k R_kᵀ prox(R_k x), where R_k cuts out patch k; each worker has some of them.

    A prior is any object with `prox(x, …)` or `grad(x, …)`, such as deepinv's, or a denoiser: a
    function that is used as the prox. All workers must hold the same one: if parameters or buffers
    of a module differ, for example because each worker initialised its own network, all workers
    raise. Its parameters get the gradient of all patches, on every worker.

    Args:
        ctx: the workers.
        prior: the prior or denoiser.
        strategy: how the image is cut: "smart_tiling", "basic", a class or a strategy.
        signal_shape: the shape of the image.
        strategy_kwargs: settings of the strategy, such as patch_size and receptive_field_size.
        layout: the layout of an image in parts; None for the whole image on every worker.
        shared: objects that the prior uses but does not hold, by name, such as a network in a
            closure: parameters are looked for in modules and attributes of the prior, and here.
            Calls that would differentiate others raise ValueError.

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
        shared: Mapping[str, Any] | None = None,
    ) -> None:
        if signal_shape is None:
            if not isinstance(strategy, DistributedSignalStrategy):
                raise ValueError(
                    f"DistributedPrior: strategy={strategy!r} needs signal_shape, got None"
                )
            signal_shape = strategy.signal_shape
        if not (callable(prior) or hasattr(prior, "prox") or hasattr(prior, "grad")):
            raise ValueError(
                f"DistributedPrior: expected a prior with prox or grad, or a denoiser, got "
                f"{prior!r}"
            )
        self.ctx = ctx
        self.prior = prior
        self.shared = dict(shared or {})
        self._users = prior, self.shared
        # calls that all workers know to work, and whether gradients were enabled
        self._checked: set[tuple[str, bool]] = set()
        self._agreements: dict[str, Agreement[TensorMeta]] = {}
        name = type(prior).__name__
        ctx.check_same_state(state_of(self._users), f"DistributedPrior: the prior {name}")
        self.apply_to: Callable[..., Tensor] | None = None  # replaces the prior itself
        self.strategy = create_strategy(strategy, signal_shape, **dict(strategy_kwargs or {}))
        shape = tuple(self.strategy.signal_shape)
        self.layout = layout or shared_whole(ctx.partition, shape)
        if self.layout.shape != shape:
            raise ValueError(
                f"the strategy {self.strategy!r} is for an image of shape {shape}, but the parts "
                f"are of {self.layout.shape}"
            )
        self.rows = rows_of(self.layout)
        self._in_place = Tiling(self.layout, self.strategy, ctx.sharding)  # for gather=False
        self.tiling = tiling_of(self.layout, self.strategy, ctx.sharding)
        self.num_patches = self.tiling.count
        self.active = self.layout.partition.active
        self.local_indices = self.tiling.indices() if self.active else []
        self._label = f"DistributedPrior({self.num_patches} patches over {ctx.world_size} workers)"
        self._read = bringing(self.layout, self.tiling.read)

    def prox(self, x: Image, *args: Any, gather: bool = True, **settings: Any) -> Tensor:
        """Apply the proximal operator or denoiser to each patch, with the further arguments.

        They may have a value for each image of the batch: then it gets the patches one by one. With
        `gather=False` the result has this worker's patches in their places, and zeros elsewhere.
        """
        own = self.apply_to or (self.prior.prox if hasattr(self.prior, "prox") else self.prior)
        return self._apply("prox", own, x, args, settings, gather)

    def grad(self, x: Image, *args: Any, gather: bool = True, **settings: Any) -> Tensor:
        """Compute the gradient of each patch; the prior gets the further arguments."""
        if not hasattr(self.prior, "grad"):
            raise NotImplementedError(f"{self!r}: the prior {self.prior!r} has no method grad")
        return self._apply("grad", self.prior.grad, x, args, settings, gather)

    def _apply(
        self,
        name: str,
        function: Callable[..., Tensor],
        signal: Image,
        args: tuple[Any, ...],
        settings: Mapping[str, Any],
        gather: bool,
    ) -> Tensor:
        """This worker's part of the image that a function of patches gives."""
        call, layout = f"{self._label}.{name}", self.layout
        self.rows.check_call(call, gather=gather)
        if not self.active:
            return local_data(signal)
        tensors = learned(self._users, (args, settings))
        said = f"{call}{gradients_of(tensors)}" if tensors else call
        x = self._agreed(call, said, local_data(signal))
        copies = Copies()
        if tensors:  # each worker has some of the patches: gradients of shared tensors are summed
            copies.add(tensors, layout.partition)
            args, settings = copies.instead((args, settings))
        read, tiling = self._read.apply(x), self.tiling if gather else self._in_place
        # An argument with several values may have one for each image: a prior that gets one patch
        # of all images, and no second patch, can match them as in the whole image.
        is_batch = self.strategy.signal_shape[0] > 1
        one_by_one = is_batch and any(map(_has_several, (*args, *settings.values())))
        problems: list[str] = []
        # In the first call all workers raise or none does: one without patches finds nothing
        # itself. Later calls send no message, and only the worker that finds a problem raises.
        mode = said, torch.is_grad_enabled()
        is_new = mode not in self._checked
        try:
            with computing_with(copies, self._users) as parameters:
                made = partial(self._made, function, args, settings, problems)
                written = tiling.put_together(made, read, self.local_indices, one_by_one)
        except MISFITS as error:
            if is_new:
                agree(layout.partition, f"{said}, which raised {raised(error)}")
            raise
        problem = problems[0] if problems else ""
        if is_new:
            agree(layout.partition, f"{said} {problem}")
        if problem:
            raise ValueError(problem)
        # Of a call that raised, workers tell each other again when it is repeated.
        self._checked.add(mode)
        if needs_grad(read):  # a worker without patches also takes part in the backward pass
            written = depending_on(written, anchored_zeros((), read))
        written = depending_on(written, parameters)
        return tiling.finish(written) if gather else written

    def _agreed(self, call: str, said: str, x: Tensor) -> Tensor:
        """This worker's part of an image, if all workers agree on the call; else all raise."""
        layout = self.layout
        if not isinstance(x, Tensor) or tuple(x.shape) != layout.local_shape:
            # the part of another worker may fit: all are told, and raise
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            problem = f"{said}: expected a part of shape {layout.local_shape}, got {got}"
            agree(layout.partition, problem)
            raise ValueError(problem)
        if self.ctx.debug and layout.shared:
            self.ctx.check_same(x, layout, f"the input of {call}")
        P = layout.partition
        if len(P.ranks) == 1:  # nobody to agree with
            return x
        if said not in self._agreements:
            found = Agreement(P.prepare(), said, P.ranks, lambda shapes, meta: meta)
            self._agreements[said] = found
        return grad_alike(x, self._agreements[said].agree_on(x))  # graphs of all workers are alike

    def _made(
        self,
        function: Any,
        args: tuple[Any, ...],
        settings: Mapping[str, Any],
        problems: list[str],
        batch: Tensor,
    ) -> Tensor:
        """The result of a function of the prior for a batch of patches, or ValueError."""
        result = function(batch, *args, **settings)
        if not isinstance(result, Tensor) or result.shape != batch.shape:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"a prior must return a tensor of the shape of its input, {tuple(batch.shape)}, "
                f"got {got}"
            )
        # A gradient of a tensor that is not known to be shared would be that of this worker's
        # patches only, a silent wrong number. The prior may have made the batch itself require a
        # gradient, in order to differentiate something.
        leaf = unshared_leaf(result, given=[batch])
        if leaf is not None:
            problems.append(
                f"{type(self.prior).__name__} uses a tensor of shape {tuple(leaf.shape)} that "
                "needs a gradient and was not found among its parameters: each worker would get "
                "only a part of the gradient (modules and attributes are searched, closures are "
                "not); pass it in shared={...} of DistributedPrior, make it a parameter or "
                "attribute of the prior, pass it as an argument, or detach it"
            )
        return result

    def __getstate__(self) -> dict[str, Any]:
        """All but what holds groups of workers, which a copy makes anew in its calls."""
        return {**self.__dict__, "_agreements": {}}

    def __repr__(self) -> str:
        return self._label


def _has_several(value: Any) -> bool:
    """Whether an argument has several values, such as one for each image of a batch."""
    if isinstance(value, Tensor):
        return value.numel() > 1
    return isinstance(value, list | tuple) and len(value) > 1


class DistributedProcessing(torch.nn.Module):
    """A denoiser whose patches are divided among all workers, for images of any shape.

    Forward:  x ↦ Σ_k R_kᵀ D(R_k x), where R_k cuts out patch k; each worker has some of them.

    Args:
        ctx: the workers.
        processor: the denoiser, the same on all workers; a module gets the gradient of all patches.
        strategy: how images of one shape are cut; None for patches of `patch_size`.
        patch_size: the size of patches, a number or one for each dimension that is cut.
        overlap: the width that is read on each side of a patch, as the denoiser needs.
        tiling_dims, max_batch_size: those of `SmartTilingStrategy`.
        checkpoint_batches: whether batches keep no activations and are computed again in a backward
            pass: "always", "never", or "auto" for workers with several batches.
        checkpoint_use_reentrant: see `torch.utils.checkpoint`; True raises for a denoiser with
            trainable parameters on several workers, where the sums of gradients would not match.
        checkpoint_preserve_rng_state: see `torch.utils.checkpoint`, for denoisers that draw
            numbers.

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
        check_choice("checkpoint_batches", checkpoint_batches, CHECKPOINTING)
        if strategy is not None:
            values = patch_size, overlap, tiling_dims, max_batch_size
            given = dict(zip(_TILING, values, strict=True))
            defaults = DistributedProcessing.__init__.__kwdefaults__ or {}
            check_its_own(strategy, given, defaults)
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
            args, settings: arguments of the denoiser.
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
        """The denoiser's result for a batch of patches, with or without a checkpoint."""
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
                "checkpoint_use_reentrant=True differentiates each batch separately, but workers "
                "have different numbers of batches, so the sums of their gradients would not "
                "match; pass False"
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
        state["_priors"] = {}  # made again for each shape that occurs
        return state
