"""DistributedDataFidelity: the distance of an image from all measurements, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from tessel.core import Layout, Shape, Signature, agree, anchored_zeros, total
from tessel.errors import check_choice
from tessel.imaging.context import DistributedContext
from tessel.imaging.measurements import DistributedMeasurements, check_counts
from tessel.imaging.parameters import (
    WAY_OUT,
    as_dtype,
    check_common,
    depending_on,
    idle,
    in_common,
    tensors_held_by,
)
from tessel.imaging.parts.local_rules import MISFITS
from tessel.imaging.parts.operators import Gathered, RowOperator, Whole, vjp
from tessel.imaging.physics import DistributedPhysics, OperatorCall
from tessel.imaging.problems import attempted, known, made_by_all
from tessel.imaging.signal import Image, local_data
from tessel.transport import kept_in_job

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
        difference = difference.to(torch.promote_types(difference.dtype, torch.float32))
        return 0.5 * torch.stack([each.square().sum() for each in difference.unbind()])

    def grad(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        """The gradient J(x)ᵀ (A(x) − y)."""
        return vjp(physics, x, _difference(physics.A(x), y))


def _difference(measured: Tensor, y: Tensor) -> Tensor:
    """The difference of tensors of one shape; torch would broadcast, which is a mistake here."""
    if measured.shape != y.shape:
        raise ValueError(
            f"a measurement has shape {tuple(y.shape)}, but the operator returns "
            f"{tuple(measured.shape)}"
        )
    return measured - y


class DistributedDataFidelity:
    """The data fidelity of all operators: f(x) = Σ_i f_i(x), where f_i(x) = d(A_i(x), y_i).

    Forward:  f(x) = c·Σ_i f_i(x), ∇f(x) = c·Σ_i ∇f_i(x), the same on all workers; c is 1 for the
    reduction "sum", and 1/N for "mean", with which a step that suits each of N operators suits all
    of them together. This class sums by default; `make_distrib_bundle` uses the mean, since a step
    of 1 diverges with a sum.

    A data fidelity is any object with `grad(x, y, physics)` that can be called with these
    arguments, such as deepinv's, or a function of them. The loss has the shape that they return:
    (batch,), a number for each image, for deepinv's and for ½‖·‖²; differentiate `loss.sum()`.

    Args:
        ctx: the workers.
        physics: the operators.
        measurements: as many as there are operators.
        data_fidelity_factory: `data_fidelity_factory(i, device, shared)` makes f_i; None for ½‖·‖².
        reduction: "sum" or "mean" over the operators.
        shared: objects that all of them may use, by name; their parameters get gradients on all
            workers.

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
        check_choice("reduction", reduction, REDUCTIONS)
        check_counts(physics.num_ops, measurements.num_items)
        self.ctx = ctx
        self.physics = physics
        self.measurements = measurements
        self.reduction = reduction
        self.shared = dict(shared or {})
        self._label = f"DistributedDataFidelity({reduction!r} over {physics!r})"
        # Workers compare the names of calls in each of them, so these are made once.
        self._names = f"the loss of {physics!r}", f"the gradient of {physics!r}"
        make = data_fidelity_factory or (lambda *_: L2())
        held = tensors_held_by(make)
        self.local_fidelities = made_by_all(
            ctx,
            f"the data fidelities of {physics!r}",
            lambda: [make(i, ctx.device, self.shared) for i in physics.local_indices],
        )
        self._on_parts = [PartFidelity(each, ctx.device) for each in self.local_fidelities]
        self._gradients = [each.grad for each in self._on_parts]
        self._common = in_common(ctx, held, physics.place, self.local_fidelities)

    def __call__(self, x: Image, *args: Any, gather: bool = True, **settings: Any) -> Tensor:
        """The loss f(x) of each image, a shared value: every worker may differentiate its sum.

        It has a number for each image of the batch if the fidelities return that, else it is one
        number. It is in the precision of the image, float32 at least.

        Args:
            x: the image.
            args, settings: arguments of the data fidelities.
            gather: False: the share of this worker's operators, whose sum over workers is the loss.
        """
        physics, image = self.physics, local_data(x)
        call = self._entered(self._names[0], image, args, settings, gather)
        if call is None:
            return physics.everywhere(image.new_zeros(()))
        # The batch of the whole image: this worker's part may have only some of the images.
        batch = physics.rows.of(image.shape).layout.shape[0]
        with physics.computing(call) as parameters:
            losses = [
                f.loss(*pair, call, batch)
                for f, pair in zip(self._on_parts, call.pairs, strict=True)
            ]
        physics.check_results(call, losses)
        # In float32 at least: losses of images in half precision would overflow, or lose digits.
        dtype = torch.promote_types(call.x.real.dtype, torch.float32)
        share = anchored_zeros(self._shape_of(call.name, losses, batch), call.x.real).to(dtype)
        for each in losses:
            share = share + as_dtype(each, share.dtype)
        share = depending_on(depending_on(share, parameters), call.anchor)
        loss = total(share, physics.partition) if gather else share
        return physics.everywhere(self._reduced(loss))

    def grad(self, x: Image, *args: Any, gather: bool = True, **settings: Any) -> Tensor:
        """The gradient ∇f(x); with `gather=False` the share of this worker's operators."""
        image = local_data(x)
        call = self._entered(self._names[1], image, args, settings, gather)
        if call is None:
            return image
        return self._reduced(self.physics.sum(call, self._gradients, gather))

    def _entered(
        self, name: str, x: Tensor, args: tuple[Any, ...], settings: dict[str, Any], gather: bool
    ) -> OperatorCall | None:
        """The call that all workers agreed on, or raise; None on a worker without a part."""
        if self._common:
            check_common(self._label, self._common, (self.physics.shared, self.shared), WAY_OUT)
        ys, arguments = self.measurements.local, (args, settings)
        return self.physics.enter(name, x, ys, self._on_parts, self.shared, (), arguments, gather)

    def _reduced(self, found: Tensor) -> Tensor:
        return found if self.reduction == "sum" else found / self.physics.num_ops

    def _shape_of(self, call: str, losses: Sequence[Tensor], batch: int) -> Shape:
        """One shape for the losses of all workers, some of which may have none; or all raise."""
        physics = self.physics
        if physics.rows.size == 1:  # each worker has whole images
            shapes = {tuple(each.shape) for each in losses}
            if len(shapes) == physics.partition.size == 1:
                return shapes.pop()
            if len(shapes) > 1:
                call += (
                    f": data fidelities of {physics.place} return losses of different shapes, "
                    f"{shapes}"
                )
            own = Signature(next(iter(shapes), ()), torch.float32, "cpu")
            shape, _ = physics.agree_on_result(call, own, "loss")
            if len(shapes) > 1:
                raise ValueError(call)
            return shape
        # On parts a loss does not have the shape of the whole one: the fidelities are tried.
        kinds = {f.is_batched for f in self._on_parts}
        _, told = agree(physics.partition, call, numbers=[True in kinds, False in kinds])
        some, others = map(any, zip(*told.values(), strict=True))
        if some and others:
            raise ValueError(
                f"{call}: some data fidelities return a number for each image of the batch, and "
                "others one number; all must return the same kind"
            )
        return (batch,) if some else ()

    def __repr__(self) -> str:
        return self._label


@dataclass(frozen=True)
class _Scaled:
    """Physics that multiplies the image by a number."""

    factor: float = 1.0

    def A(self, x: Tensor) -> Tensor:
        return x if self.factor == 1.0 else self.factor * x

    A_adjoint = A

    def A_vjp(self, x: Tensor, v: Tensor) -> Tensor:
        return self.A(v)


_PLAIN = _Scaled()


@dataclass(frozen=True)
class PartFidelity:
    """A data fidelity f(x, y, physics) = d(A(x), y) on parts of an image and of its measurement.

    If its distance d is a sum over the values of a measurement, it is computed on each part.
    Otherwise, as for a norm or a mean, it is computed on the whole measurement, on one worker.

    Args:
        fidelity: called as `f(x, y, physics)`; it may have its own `grad(x, y, physics)`.
        device: the device on which it computes.
    """

    fidelity: Any
    device: torch.device | str = "cpu"

    def loss(self, operator: RowOperator, y: Tensor, call: OperatorCall, batch: int) -> Tensor:
        """This worker's share of f: a number for each image of the batch if f does so, or one.

        Args:
            operator: the operator from the image to the measurement.
            y: this worker's part of the measurement.
            call: the call, with this worker's part of the image, and arguments of f for whole
                images.
            batch: the number of images.
        """
        f, x = self.fidelity, call.x
        shape = (batch,) if self.is_batched else ()
        if isinstance(operator, Gathered):
            return operator.computed(
                lambda image, y: f(image, y, operator.physics).reshape(shape),
                *(operator.gather(x), y),
                shape=shape,
                whole=shape,
                users=f,
            )
        if isinstance(operator, Whole):
            alone: Tensor = f(x, y, operator.physics, *call.args, **call.settings)
            return alone
        u = operator.A(x)
        if not self.is_separable:
            whole = _whole_of(operator.codomain)
            return whole.computed(
                lambda u, y: f(u, y, _PLAIN).reshape(shape),
                *(whole.gather(u), whole.gather(y)),
                shape=shape,
                whole=shape,
                users=f,
            )
        if 0 in u.shape:  # a mean or a maximum of nothing is NaN, or raises
            return idle(shape, f, u, y)
        found = attempted(lambda: f(u, y, _PLAIN))
        if found is None:
            return idle(shape, f, u, y)
        share = known(found, (), (u, y))
        if not shape:
            return share
        # This worker may have some images of the batch: their numbers among those of all.
        box = operator.codomain.box()
        assert box is not None
        start, stop = box[0]
        return torch.nn.functional.pad(share, (start, batch - stop))

    def grad(self, operator: RowOperator, y: Tensor, call: OperatorCall) -> Tensor:
        """This worker's part of the gradient of f with respect to x; see `loss`."""
        f, x = self.fidelity, call.x
        if isinstance(operator, Whole):
            of_image = partial(gradient, f, operator.physics, **call.settings)
            return operator.image(of_image, x, y, *call.args, users=f)
        # The gradient of d takes the name of the measurement, which is thereby freed before the
        # adjoint begins: at the peak a worker holds only one of the two besides the image.
        u = operator.A(x)
        if not self.is_separable:
            whole = _whole_of(operator.codomain)
            u = whole.image(partial(gradient, f, _PLAIN), u, whole.gather(y), users=f)
        elif 0 in u.shape:
            u = idle(tuple(u.shape), f, u, y)
        else:
            found = attempted(partial(gradient, f, _PLAIN, u, y))
            u = idle(tuple(u.shape), f, u, y) if found is None else known(found, (), (u, y))
        return operator.A_adjoint(u)

    # The form of a user's fidelity is not declared: it is tried on small tensors, once.

    @cached_property
    def problem(self) -> str:
        """What is wrong with the fidelity, as the end of a sentence."""
        x, y = _tried(self.device)
        try:
            # For A = 2, f(x) = d(2 x, y) has ∇f(x) = 2 ∇d(2 x). One that looks at x differs.
            expected = 2 * gradient(self.fidelity, _PLAIN, 2 * x, y)
            got = gradient(self.fidelity, _Scaled(2.0), x, y)
        except MISFITS as error:
            reason = f"could not be tried on small tensors ({error})"
        else:
            if torch.allclose(got, expected, rtol=1e-4, atol=1e-6):
                return ""
            reason = "is not of the form d(A(x), y), which an image in parts requires"
        return f": {type(self.fidelity).__name__} {reason}; use a signal without partition"

    @cached_property
    def is_batched(self) -> bool:
        """Whether f gives one number for each image of a batch.

        >>> PartFidelity(lambda x, y, physics: (physics.A(x) - y).square().sum()).is_batched
        False
        """
        u, y = _tried(self.device)
        try:  # a fidelity may need other tensors than these: then it is assumed to be one number
            return tuple(self.fidelity(u, y, _PLAIN).shape) == (len(u),)
        except MISFITS:
            return False

    @cached_property
    def is_separable(self) -> bool:
        """Whether d of two halves adds up to that of the whole, along each dimension.

        >>> class Square:
        ...     def __call__(self, x, y, physics):
        ...         return (physics.A(x) - y).square().sum()
        ...     def grad(self, x, y, physics):
        ...         return 2 * physics.A_vjp(x, physics.A(x) - y)
        >>> PartFidelity(Square()).is_separable
        True
        """
        f, (u, y) = self.fidelity, _tried(self.device)
        # In float32, sums of halves are equal to about 1e-7. A fidelity that rounds a thousand
        # times worse is computed on one worker, which is slower but not wrong.
        try:
            for dim in range(u.dim()):
                halves = list(zip(u.chunk(2, dim), y.chunk(2, dim), strict=True))
                gradients = torch.cat([gradient(f, _PLAIN, *half) for half in halves], dim)
                shares = torch.stack([f(*half, _PLAIN).sum() for half in halves])
                if not torch.allclose(gradient(f, _PLAIN, u, y), gradients, rtol=1e-4, atol=1e-6):
                    return False
                if not torch.allclose(f(u, y, _PLAIN).sum(), shares.sum(), rtol=1e-4):
                    return False
        except MISFITS:
            return False
        return True


@kept_in_job
def _whole_of(layout: Layout) -> Gathered:
    """The operator that gathers a measurement in parts on the first worker."""
    return Gathered(_PLAIN, layout, layout.partition.ranks[0])


class _WithDerivative:
    """A user's operator with an `A_vjp`, which data fidelities of deepinv call."""

    def __init__(self, physics: Any) -> None:
        self._physics = physics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._physics, name)

    def A_vjp(self, x: Tensor, v: Tensor) -> Tensor:
        return vjp(self._physics, x, v)


def gradient(fidelity: Any, physics: Any, x: Tensor, y: Tensor, *args: Any, **kw: Any) -> Tensor:
    """The gradient of one data fidelity at x, its own or by autograd."""
    if hasattr(fidelity, "grad"):
        physics = physics if hasattr(physics, "A_vjp") else _WithDerivative(physics)
        return fidelity.grad(x, y, physics, *args, **kw)
    # Images of a batch do not depend on each other, so that the gradient of the sum of their losses
    # contains the gradient of each.
    return torch.func.grad(lambda x: fidelity(x, y, physics, *args, **kw).sum())(x)


def _tried(device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Two small positive tensors, as distances of counts or intensities need them."""
    generator = torch.Generator().manual_seed(3)
    # Two images, two channels, even sizes: both halves along each dimension have values.
    draw = partial(torch.rand, (2, 2, 4, 6), generator=generator, device="cpu")
    return (0.1 + draw()).to(device), (0.1 + draw()).to(device)
