"""DistributedDataFidelity: how far an image is from all measurements, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tessel.imaging.context import DistributedContext
from tessel.imaging.measurements import DistributedMeasurements, check_counts
from tessel.imaging.parameters import check_common, in_common, tensors_of
from tessel.imaging.parts.operators import vjp
from tessel.imaging.physics import WAY_OUT, DistributedPhysics
from tessel.imaging.signal import DistributedSignal, local_data

REDUCTIONS = ("sum", "mean")


class L2:
    """Half the squared distance ½‖A(x) − y‖² of each image of a batch, for Gaussian noise.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> identity = SimpleNamespace(A=lambda x: x)
    >>> L2()(torch.ones(2, 3), torch.zeros(2, 3), identity)
    tensor([1.5000, 1.5000])
    """

    def __call__(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        difference = _difference(physics.A(x), y)
        if difference.is_complex():
            difference = torch.view_as_real(difference.resolve_conj())
        return 0.5 * torch.stack([each.square().sum() for each in difference.unbind()])

    def grad(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        """The gradient J(x)ᵀ (A(x) − y)."""
        return vjp(physics, x, _difference(physics.A(x), y))


def _difference(measured: Tensor, y: Tensor) -> Tensor:
    """The difference of tensors of one shape: what torch would broadcast is a mistake here."""
    if measured.shape != y.shape:
        raise ValueError(
            f"a measurement has the shape {tuple(y.shape)}, and the operator gives "
            f"{tuple(measured.shape)}"
        )
    return measured - y


class DistributedDataFidelity:
    """The data fidelity of all operators: f(x) = Σ_i f_i(x), where f_i(x) = d(A_i(x), y_i).

    Forward:  f(x) = c·Σ_i f_i(x), ∇f(x) = c·Σ_i ∇f_i(x), the same on all workers; c is 1 for the
    reduction "sum", and 1/N for "mean", with which a step length that suits each of N operators
    suits them all together. This class sums by default, as the formula of the document says;
    `make_distrib_bundle` takes the mean by default, since a step of 1 diverges with a sum.

    A data fidelity is any object with `grad(x, y, physics)` that can be called with these, as those
    of deepinv, or a function of them. The loss has the shape that they give: (batch,), a number for
    each image, for those of deepinv and for ½‖·‖²; write `loss.sum()` to derive it.

    Args:
        ctx: the workers.
        physics: the operators.
        measurements: as many as there are operators.
        data_fidelity_factory: `data_fidelity_factory(i, device, shared)` makes f_i; None for ½‖·‖².
        reduction: "sum" or "mean" over the operators; the bundle's default is "mean".
        shared: what all of them may use, by name; parameters in it get gradients on all workers.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import (
    ...     DistributedContext, DistributedDataFidelity, DistributedMeasurements, DistributedPhysics
    ... )
    >>> with DistributedContext() as ctx:
    ...     physics = DistributedPhysics(ctx, 2, lambda *_: SimpleNamespace(A=lambda x: 2 * x))
    ...     measurements = DistributedMeasurements(ctx, 2, lambda *_: torch.ones(1))
    ...     fidelity = DistributedDataFidelity(ctx, physics, measurements)
    ...     fidelity(torch.ones(1)), fidelity.grad(torch.ones(1))
    (tensor([1.]), tensor([4.]))
    """

    def __init__(
        self,
        ctx: DistributedContext,
        physics: DistributedPhysics,
        measurements: DistributedMeasurements,
        data_fidelity_factory: Callable[[int, torch.device, Mapping[str, Any]], Any] | None = None,
        reduction: str = "sum",
        shared: Mapping[str, Any] | None = None,
    ) -> None:
        check_reduction(reduction)
        check_counts(physics.num_ops, measurements.num_items)
        self.ctx = ctx
        self.physics = physics
        self.measurements = measurements
        self.reduction = reduction
        self.shared = dict(shared or {})
        self._label = f"DistributedDataFidelity({reduction!r} over {physics!r})"
        make = data_fidelity_factory or (lambda *_: L2())
        held = tensors_of(make)
        self.local_fidelities = [make(i, ctx.device, self.shared) for i in physics.local_indices]
        self._common = in_common(ctx, held, physics.parts.place, self.local_fidelities)

    def __call__(
        self, x: DistributedSignal | Tensor, *args: Any, gather: bool = True, **settings: Any
    ) -> Tensor:
        """The loss f(x) of each image, a shared value: every worker may derive its sum.

        Args:
            x: the image.
            args, settings: of the data fidelities.
            gather: False: the share of this worker's operators, whose sum over workers is the loss.
        """
        loss = self._reduced(self.physics.parts.loss, x, args, settings, gather)
        return self.physics.everywhere(loss)

    def grad(
        self, x: DistributedSignal | Tensor, *args: Any, gather: bool = True, **settings: Any
    ) -> Tensor:
        """The gradient ∇f(x); with `gather=False` the share of this worker's operators."""
        return self._reduced(self.physics.parts.grad, x, args, settings, gather)

    def _reduced(
        self,
        method: Callable[..., Tensor],
        x: DistributedSignal | Tensor,
        args: tuple[Any, ...],
        settings: dict[str, Any],
        gather: bool,
    ) -> Tensor:
        """The sum or mean over all operators of what a method of the physics gives."""
        if self.physics.parts.layout is not None:
            if not gather:
                raise NotImplementedError(
                    f"{self!r}: gather=False is for a whole image on every worker; of one in parts "
                    f"each worker gets its part"
                )
            if args or settings:
                raise NotImplementedError(
                    f"{self!r}: fidelities of an image in parts take no arguments, got {args} and "
                    f"{settings}"
                )
        shared = [self.physics.shared, self.shared]
        self.physics.check_parameters(shared)
        check_common(self._label, self._common, shared, WAY_OUT)
        found = method(
            local_data(x),
            self.measurements.local,
            self.local_fidelities,
            self.shared,
            (args, settings),
            gather,
        )
        return found if self.reduction == "sum" else found / self.physics.num_ops

    def __repr__(self) -> str:
        return self._label


def check_reduction(reduction: str) -> None:
    """Raise ValueError unless there is a reduction of this name."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
