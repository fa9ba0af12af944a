"""Operators on an image in parts: filters, masks, differences, chains, and gathered operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from tessel.core import (
    Box,
    Cut,
    Layout,
    LinearOperator,
    Move,
    Partition,
    Replicate,
    Shape,
    agree,
    anchored_zeros,
    replicate,
    shared_whole,
)
from tessel.imaging.parameters import as_dtype, current, idle
from tessel.imaging.parts.filtering import FilterSpectrum, convolve
from tessel.imaging.parts.layouts import FilterWindow, check_parts, fetch, gathering
from tessel.imaging.problems import attempted, known, notice, noticed

DTYPES = (  # supported by images and measurements
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128),
)
Value = Callable[[], Tensor]  # returns a tensor, possibly another one at the next call


class PartOperator(LinearOperator):
    """A linear operator on an image in parts, with the methods of physics.

    A subclass implements `A` and `A_adjoint` on this worker's parts with moves and torch functions:
    gradients of the parts, and of the operator's own tensors, follow.
    """

    is_local = True
    is_alone = False

    def A(self, x: Tensor) -> Tensor:
        """This worker's part of the measurement."""
        raise NotImplementedError(f"{type(self).__name__} must implement `A`")

    def A_adjoint(self, y: Tensor) -> Tensor:
        """This worker's part of the image Aᵀ y."""
        raise NotImplementedError(f"{type(self).__name__} must implement `A_adjoint`")

    def A_vjp(self, x: Tensor, v: Tensor) -> Tensor:
        """The product of `v` with the derivative at `x`, which is the adjoint everywhere."""
        return self.A_adjoint(v)

    def A_adjoint_A(self, x: Tensor) -> Tensor:
        """Aᵀ A x."""
        return self.A_adjoint(self.A(x))

    def measured(self, physics: Any, x: Tensor, owner: int, **settings: Any) -> Tensor:
        """This worker's part of `physics(x)`, computed from the whole image on its owner.

        It may draw noise for the whole measurement, as in one process.
        """
        whole = Gathered(physics, self.domain, owner)
        dtypes = [each.dtype for each in self.values()]
        y = whole.computed(
            partial(physics, **settings),
            whole.gather(x),
            whole=self.codomain.shape,
            dtype=reduce(torch.promote_types, dtypes, x.dtype),
        )
        return gathering(self.codomain, owner).H.apply(y)

    def part_of(self, y: Tensor, name: str) -> Tensor:
        """This worker's part of a measurement, which is passed whole or as this part."""
        if tuple(y.shape) == self.codomain.shape:
            return self.codomain.local_part(y).clone()
        if tuple(y.shape) == self.codomain.local_shape:
            return y
        raise ValueError(
            f"{name} must have the shape {self.codomain.shape} of the whole, or "
            f"{self.codomain.local_shape}, this worker's part of it, got {tuple(y.shape)}"
        )

    def values(self) -> list[Tensor]:
        """The operator's own tensors, which may need gradients."""
        return []

    def users(self) -> tuple[Any, ...]:
        """User objects that compute in it, whose parameters may need gradients."""
        return ()

    def problem(self, dtype: torch.dtype | None, y: Tensor | None, name: str, what: str) -> str:
        """What is wrong with its input, as the end of a sentence.

        Args:
            dtype: the dtype of the input.
            y: this worker's part of the measurement.
            name: the number of the operator and its measurement.
            what: the input, in words.
        """
        found = None if dtype is None else self.misfit(dtype)
        if found is not None:
            return (
                f": operator {name} has dtype {found}, but the {what} has {dtype}; convert one of "
                f"them, for example with .to({found})"
            )
        expected = self.codomain.local_shape
        if y is not None and tuple(y.shape) != expected:
            return f": measurement {name} must be of shape {expected}, got {tuple(y.shape)}"
        return ""

    def misfit(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype of a value that does not fit images of this dtype, if there is one.

        Complex values may make complex measurements of real images.
        """
        real, found = dtype.to_real(), (each.dtype for each in self.values())
        return next((e for e in found if torch.promote_types(dtype, e).to_real() != real), None)

    def _apply(self, x: Tensor) -> Tensor:
        return self.A(x)

    def _apply_adjoint(self, y: Tensor) -> Tensor:
        return self.A_adjoint(y)

    @property
    def identity(self) -> str:
        """The operator in words, the same on every worker."""
        return f"{type(self).__name__} on {self.domain.identity}"


class Convolution(PartOperator):
    """The convolution of an image in parts with a filter, at every `stride`-th place.

    Forward:  y[i] = Σ_t f[t] x[s·i + c − t], where c is the middle of the filter: the index
    ⌊(k − 1) / 2⌋ of the window; channels and images of a batch are filtered on their own.

    Each worker reads the halo of its part, for a periodic image also from the other end, filters,
    and stores the outputs whose center is in its part. The filter is whole on all workers.

    Args:
        layout: the layout of the image, (batch, channels, *space), in parts.
        filter: (1 or batch, 1 or channels, *sizes), or a function that returns it at each call.
        padding: "valid", "circular", "reflect", "replicate", "constant" or "zeros".
        stride: the distance between outputs.

    >>> import tessel, torch
    >>> from tessel.imaging.parts import Convolution
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> A = Convolution(tessel.Layout.balanced(P, (1, 1, 1, 4)), torch.ones(1, 1, 1, 3), "circular")
    >>> A.A(torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]]))
    tensor([[[[7., 6., 9., 8.]]]])
    """

    def __init__(
        self, layout: Layout, filter: Tensor | Value, padding: str = "valid", stride: int = 1
    ) -> None:
        check_parts(layout, type(self).__name__)
        # A filter may be learned, or assigned anew: it is looked up in each call.
        self._value: Value = (lambda: filter) if isinstance(filter, Tensor) else filter
        self.filter_shape: Shape = tuple(self._value().shape)
        image, (batch, channels, *_) = layout.shape, (*self.filter_shape, 0, 0)
        fits = len(self.filter_shape) == len(image) and len(image) in (3, 4, 5)
        if not fits or batch not in (1, image[0]) or channels not in (1, image[1]):
            raise ValueError(
                f"expected a filter of shape (1 or batch, 1 or channels, *sizes) for an image of "
                f"{image}, got {self.filter_shape}"
            )
        padding = "constant" if padding == "zeros" else padding
        self.kernel = FilterWindow(self.filter_shape[2:], padding, stride)
        self.domain, self._box = layout, layout.box()
        self._steps, self.codomain = fetch(layout, self.kernel)
        self._read_shape = self._steps[-1].codomain.local_shape
        self._spectrum = FilterSpectrum()
        self.prepare()  # all workers make the group here, not in a first call

    def A(self, x: Tensor) -> Tensor:
        for step in self._steps:  # to what this worker's windows read
            x = step.apply(x)
        filter = self._filter()
        # torch's convolutions do not accept empty images. The result still depends on the inputs:
        # the graphs of all workers have the same moves, in the same order.
        if 0 in x.shape or 0 in self.codomain.local_shape:
            return anchored_zeros(self.codomain.local_shape, x, filter)
        return convolve(x, filter, self.kernel.stride, spectrum=self._spectrum)

    def A_adjoint(self, y: Tensor) -> Tensor:
        # Step by step and under one name, so that each frees the result of the one before it: a
        # product of the steps would keep its input until its end.
        y = self._back(y)
        for step in reversed(self._steps):
            y = step.H.apply(y)
        return y

    def _back(self, y: Tensor) -> Tensor:
        """The adjoint of filtering, in the shape that this worker reads."""
        filter, shape = self._filter(), self._read_shape
        if 0 in shape or 0 in y.shape:
            return anchored_zeros(shape, y, filter)
        read = convolve(y, filter, self.kernel.stride, adjoint=True, spectrum=self._spectrum)
        for dim, length in enumerate(shape):  # the last window may end before the image
            read = _lengthened(read, dim, length)
        return read

    def values(self) -> list[Tensor]:
        return [self._value()]

    def misfit(self, dtype: torch.dtype) -> torch.dtype | None:
        found = self._value().dtype
        return None if found == dtype else found  # torch convolves tensors of one dtype

    def _filter(self) -> Tensor:
        """The filter of this worker: its own copy of the shared one."""
        filter = self._value()
        # Halos were planned for one size of the filter, which users may change by assignment.
        if tuple(filter.shape) != self.filter_shape:
            raise ValueError(
                f"this operator was created for a filter of shape {self.filter_shape}, got one of "
                f"{tuple(filter.shape)}; create another operator"
            )
        return _broadcast_part(_own(filter, self.domain.partition), self._box, dims=2)

    @property
    def identity(self) -> str:
        return f"{super().identity}, filter {self.filter_shape}, {self.kernel}"


class Decimation(Convolution):
    """Every `factor`-th value of an image in parts.

    Forward:  y[i] = x[s·i].
    """

    def __init__(self, layout: Layout, factor: int) -> None:
        super().__init__(layout, torch.ones((1,) * len(layout.shape)), "valid", factor)

    def A(self, x: Tensor) -> Tensor:
        for step in self._steps:
            x = step.apply(x)
        return x[self._places]

    def misfit(self, dtype: torch.dtype) -> torch.dtype | None:
        return None  # nothing is computed

    def _back(self, y: Tensor) -> Tensor:
        read = y.new_zeros(self._read_shape)
        read[self._places] = y
        return read

    @property
    def _places(self) -> tuple[slice, ...]:
        steps = [slice(None, None, self.kernel.stride)] * len(self.kernel.sizes)
        return (slice(None), slice(None), *steps)


class Mask(PartOperator):
    """The elementwise product of an image in parts with a mask: inpainting, a vignette.

    Forward:  y[i] = m[i] x[i].    Nothing is sent.

    Args:
        layout: the layout of the image, in parts.
        mask: a mask whose shape broadcasts to that of the image, whole on all workers; or a
            function that returns it at each call.

    >>> import tessel, torch
    >>> from tessel.imaging.parts import Mask
    >>> A = Mask(tessel.Layout.balanced(tessel.world(), (3,)), torch.tensor([1.0, 0.0, 2.0]))
    >>> A.A(torch.ones(3))
    tensor([1., 0., 2.])
    """

    def __init__(self, layout: Layout, mask: Tensor | Value) -> None:
        check_parts(layout, type(self).__name__)
        self._value: Value = (lambda: mask) if isinstance(mask, Tensor) else mask
        self.mask_shape = tuple(self._value().shape)
        last = layout.shape[len(layout.shape) - len(self.mask_shape) :]
        fits = len(self.mask_shape) <= len(layout.shape) and all(
            n in (1, length) for n, length in zip(self.mask_shape, last, strict=False)
        )
        if not fits:
            raise ValueError(f"a mask of {self.mask_shape} does not fit an image of {layout.shape}")
        self.domain = self.codomain = layout

    def A(self, x: Tensor) -> Tensor:
        return x * self._part()

    def A_adjoint(self, y: Tensor) -> Tensor:
        return y * self._part().conj()

    def values(self) -> list[Tensor]:
        return [self._value()]

    def _part(self) -> Tensor:
        mask = _own(self._value(), self.domain.partition)
        missing = len(self.domain.shape) - mask.dim()
        return _broadcast_part(mask[(None,) * missing], self.domain.box())

    @property
    def identity(self) -> str:
        return f"{super().identity}, mask {self.mask_shape}"


class Differences(PartOperator):
    """The differences of adjacent values of an image, along each spatial dimension.

    Forward:  y[i, d] = x[i + e_d] − x[i], and 0 at the far border.    Adjoint: −divergence.

    This is the gradient in total variation. Each worker reads one row of its next neighbours; if
    the image is whole on every worker, nothing is sent.

    Args:
        layout: the layout of the image, (batch, channels, *space), in parts or whole on every
            worker.

    >>> import tessel, torch
    >>> from tessel.imaging.parts import Differences
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> D = Differences(tessel.Layout.balanced(P, (1, 1, 1, 3)))
    >>> D.A(torch.tensor([[[[1.0, 3.0, 4.0]]]]))[..., 1]
    tensor([[[[2., 1., 0.]]]])
    """

    def __init__(self, layout: Layout) -> None:
        check_parts(layout, type(self).__name__, shared=True)
        num_dims = len(layout.shape) - 2
        if num_dims < 1:
            raise ValueError(f"expected an image (batch, channels, *space), got {layout.shape}")
        self.domain = layout
        self.codomain = replace(
            layout, shape=(*layout.shape, num_dims), cuts=(*layout.cuts, Cut((), ((0, num_dims),)))
        )
        # One value after each part. At the far border there is none, so that parts there read less,
        # and the last difference is zero.
        wide = layout.grow([(0, 0)] * 2 + [(0, 1)] * num_dims)
        self._halo = None if wide == layout else Move(layout, wide)
        self._wide = wide.local_shape

    def A(self, x: Tensor) -> Tensor:
        wide = x if self._halo is None else self._halo.apply(x)
        found, own = [], self.domain.local_shape
        for dim in range(2, wide.dim()):
            along = wide
            for other in range(2, wide.dim()):  # the halo is used along one dimension at a time
                along = along if other == dim else along.narrow(other, 0, own[other])
            steps = along.diff(dim=dim) if along.shape[dim] else along
            found.append(_lengthened(steps, dim, own[dim]))
        return torch.stack(found, -1)

    def A_adjoint(self, y: Tensor) -> Tensor:
        images = []
        for dim in range(2, y.dim() - 1):
            along, length = y[..., dim - 2], self._wide[dim]
            steps = along.narrow(dim, 0, max(length - 1, 0))
            # The transpose of a difference: each step counts at its end, and against its start.
            zero = _lengthened(along.narrow(dim, 0, 0), dim, 1)
            x = torch.cat([zero, steps], dim) - torch.cat([steps, zero], dim)
            x = x.narrow(dim, 0, length)
            for other in range(2, y.dim() - 1):
                x = _lengthened(x, other, self._wide[other])
            images.append(x)
        image = reduce(torch.add, images)
        # The halo's adjoint adds what neighbours computed for values of this part.
        return image if self._halo is None else self._halo.H.apply(image)


class Chain(PartOperator):
    """A chain of operators, the first one applied first."""

    def __init__(self, *operators: PartOperator) -> None:
        self.operators = operators
        self.domain, self.codomain = operators[0].domain, operators[-1].codomain

    def A(self, x: Tensor) -> Tensor:
        for operator in self.operators:
            x = operator.A(x)
        return x

    def A_adjoint(self, y: Tensor) -> Tensor:
        for operator in reversed(self.operators):
            y = operator.A_adjoint(y)
        return y

    def values(self) -> list[Tensor]:
        return [value for operator in self.operators for value in operator.values()]

    def misfit(self, dtype: torch.dtype) -> torch.dtype | None:
        return next(filter(None, (each.misfit(dtype) for each in self.operators)), None)

    @property
    def identity(self) -> str:
        return " then ".join(operator.identity for operator in self.operators)


class Whole:
    """Any operator, applied to whole images of any shape, which every worker has: nothing is sent.

    Args:
        physics: an object with `A`, and `A_adjoint` if it is linear.
    """

    is_local = False
    is_alone = True  # this worker computes by itself, and may get its input back

    def __init__(self, physics: Any) -> None:
        self.physics = physics
        # The derivative of a linear operator does not depend on the image: where this must be
        # gathered, it is not.
        self._asks_image = hasattr(physics, "A_vjp") or not hasattr(physics, "A_adjoint")

    def A(self, x: Tensor, **settings: Any) -> Tensor:
        """The measurement."""
        y: Tensor = self.physics.A(x, **settings)
        return y

    def A_adjoint(self, y: Tensor) -> Tensor:
        """The image Aᵀ y."""
        image: Tensor = self.physics.A_adjoint(y)
        return image

    def A_vjp(self, x: Tensor, v: Tensor) -> Tensor:
        """The product of `v` with the derivative at `x`."""
        return (
            self.image(partial(vjp, self.physics), x, v) if self._asks_image else self.A_adjoint(v)
        )

    def A_adjoint_A(self, x: Tensor, **settings: Any) -> Tensor:
        """Aᵀ A x."""
        return self.image(partial(normal, self.physics, **settings), x)

    def image(
        self, function: Callable[..., Tensor], x: Tensor, *more: Tensor, users: Any = ()
    ) -> Tensor:
        """The image that a function makes of the whole one and `more`.

        Args:
            function: the function of the tensors, which calls the operator.
            x: this worker's part of the image.
            more: further tensors.
            users: further objects whose parameters the function uses.
        """
        return function(x, *more)

    def measured(self, physics: Any, x: Tensor, owner: int, **settings: Any) -> Tensor:
        """The result of `physics(x)`."""
        y: Tensor = physics(x, **settings)
        return y

    def part_of(self, y: Tensor, name: str) -> Tensor:
        """The measurement."""
        return y

    def values(self) -> list[Tensor]:
        """No tensors: those of the operator are the user's."""
        return []

    def users(self) -> tuple[Any, ...]:
        return (self.physics,)

    def problem(self, dtype: torch.dtype | None, y: Tensor | None, name: str, what: str) -> str:
        return ""  # the user's operator checks its input itself


class Gathered(Whole):
    """Any operator on an image in parts, which is gathered on the operator's owner.

    The owner applies it; the measurement stays there, and other workers hold an empty tensor. The
    adjoint scatters.

    Args:
        physics: as for `Whole`; equal on all workers, used only on its owner.
        layout: the layout of the image.
        owner: the worker that applies the operator.
    """

    is_alone = False

    def __init__(self, physics: Any, layout: Layout, owner: int) -> None:
        super().__init__(physics)
        check_parts(layout, "Whole")
        self.domain, self.owner = layout, owner
        self._move = gathering(layout, owner)
        self.here = self._move.codomain.partition.active  # whether this worker is the owner
        # The dtype of results by method and dtype of the input, as the owner told all workers.
        self._dtypes: dict[tuple[str, torch.dtype], torch.dtype] = {}

    def gather(self, x: Tensor) -> Tensor:
        """The whole image on the owner, an empty tensor elsewhere."""
        return self._move.apply(x)

    def scatter(self, image: Tensor) -> Tensor:
        """This worker's part of the owner's image; the adjoint of `gather`."""
        return self._move.H.apply(image)

    def A(self, x: Tensor, **settings: Any) -> Tensor:
        """The measurement on the owner, an empty tensor elsewhere."""
        y = self.computed(lambda image: self.physics.A(image, **settings), self.gather(x))
        return self._as_on_owner("A", x, y)

    def A_adjoint(self, y: Tensor) -> Tensor:
        """This worker's part of the image Aᵀ y."""
        image = self.computed(lambda y: self.physics.A_adjoint(y), y, whole=self.domain.shape)
        return self.scatter(self._as_on_owner("A_adjoint", y, image))

    def image(
        self, function: Callable[..., Tensor], x: Tensor, *more: Tensor, users: Any = ()
    ) -> Tensor:
        """This worker's part of the image that a function makes of the whole one and `more`."""
        given, shape, dtype = (self.gather(x), *more), self.domain.shape, x.dtype
        return self.scatter(self.computed(function, *given, whole=shape, dtype=dtype, users=users))

    def computed(
        self,
        function: Callable[..., Tensor],
        *given: Tensor,
        shape: Shape = (0,),
        whole: Shape | None = None,
        dtype: torch.dtype | None = None,
        users: Any = (),
    ) -> Tensor:
        """The result of a function of tensors on the owner, and an empty tensor elsewhere.

        Args:
            function: the function of the tensors, which calls the operator.
            given: the tensors, which are empty on other workers.
            shape: the shape of the result on other workers.
            whole, dtype: shape and dtype that the result must have, since it is sent on; None for
                any.
            users: further objects whose parameters the function uses.
        """
        users = (self.physics, users)
        if self.here:
            result = attempted(partial(function, *given))
            if result is not None and (
                (whole is None or tuple(result.shape) == whole)
                and (dtype is None or result.dtype == dtype)
            ):
                return known(result, users, given)
            if result is not None:
                notice(
                    f": expected {type(self.physics).__name__} to return a result of shape "
                    f"{whole or tuple(result.shape)} and {dtype or result.dtype}, got "
                    f"{tuple(result.shape)} and {result.dtype}"
                )
            shape = whole or shape
        nothing = idle(shape, users, *given)
        return nothing if dtype is None else as_dtype(nothing, dtype)

    def _as_on_owner(self, method: str, given: Tensor, result: Tensor) -> Tensor:
        """A result in the dtype that it has on the owner: complex for a real image, for example."""
        told = self._dtypes.get((method, given.dtype))
        if told is None:
            call = f"the dtype that {method} of {self.identity} gives for {given.dtype}"
            code = DTYPES.index(result.dtype) if result.dtype in DTYPES else -1
            _, said = agree(self.domain.partition, call, numbers=[-1 if noticed.get() else code])
            code = said[self.owner][0]
            if code < 0:  # all workers raise after the call
                return as_dtype(result, given.dtype)
            told = self._dtypes[method, given.dtype] = DTYPES[code]
        if self.here and result.dtype != told:
            notice(
                f": {method} of {type(self.physics).__name__} returned {told} before, now "
                f"{result.dtype}"
            )
        return as_dtype(result, told)

    def measured(self, physics: Any, x: Tensor, owner: int, **settings: Any) -> Tensor:
        """The result of `physics(x)` for the whole image on its owner, else an empty tensor."""
        y = self.computed(partial(physics, **settings), self.gather(x))
        return self._as_on_owner("__call__", x, y)

    def part_of(self, y: Tensor, name: str) -> Tensor:
        """The measurement on the owner, an empty tensor elsewhere."""
        return y if self.here else y.new_empty(0)

    @property
    def identity(self) -> str:
        """The operator in words, the same on every worker."""
        return f"Whole on worker {self.owner} of {self.domain.identity}"


RowOperator = PartOperator | Whole


def vjp(operator: Any, x: Tensor, v: Tensor) -> Tensor:
    """The product J(x)ᵀ v with the Jacobian of an operator, by its own method if it has one."""
    if hasattr(operator, "A_vjp"):
        return operator.A_vjp(x, v)
    if hasattr(operator, "A_adjoint"):
        return operator.A_adjoint(v)
    return torch.func.vjp(operator.A, x)[1](v)[0]


def normal(operator: Any, x: Tensor, **settings: Any) -> Tensor:
    """The product Aᵀ A x, by the operator's own method if it has one."""
    if hasattr(operator, "A_adjoint_A"):
        return operator.A_adjoint_A(x, **settings)
    return operator.A_adjoint(operator.A(x, **settings))


def _own(value: Tensor, partition: Partition) -> Tensor:
    """A shared value as this worker's own copy; its gradient is summed over all workers."""
    if not (value.requires_grad and torch.is_grad_enabled()):
        return value
    value = current.get().get(id(value), value)  # a copy that more workers use
    if isinstance(getattr(value.grad_fn, "operator", None), Replicate):
        return value  # it already is a copy
    layout = shared_whole(partition, tuple(value.shape))
    return replicate(value, layout, layout.shared)


def _broadcast_part(value: Tensor, box: Box | None, dims: int | None = None) -> Tensor:
    """The part of a tensor, of length 1 or n along each dimension, that belongs to a box."""
    if box is None:
        return value
    for dim, (start, stop) in enumerate(box[:dims]):
        if value.shape[dim] > 1:
            value = value.narrow(dim, start, stop - start)
    return value


def _lengthened(x: Tensor, dim: int, length: int) -> Tensor:
    """A tensor padded with zeros at its end, up to a length."""
    if x.shape[dim] == length:
        return x
    shape = (*x.shape[:dim], length - x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat([x, x.new_zeros(shape)], dim)
