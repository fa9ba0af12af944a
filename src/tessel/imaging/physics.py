"""DistributedPhysics: many operators of one image, each on the worker that has it.

The image is one shared value. Each worker applies its own operators to it, which gives the local
measurements, and what goes back to the image is summed over all workers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from tessel.agreement import Claim, Meeting, Terms, same
from tessel.distributed.agreeing import agree_on_call
from tessel.imaging.context import DistributedContext
from tessel.imaging.least_squares import NormalInverse, least_squares
from tessel.imaging.measurements import LocalTensors, anchor_of, both, checked_count
from tessel.imaging.parts.operators import normal, vjp
from tessel.imaging.parts.physics import PartitionedPhysics
from tessel.imaging.random import wave_in
from tessel.imaging.signal import DistributedSignal, checked_data, is_whole, local_data
from tessel.imaging.uses import (
    Leaves,
    check_common,
    described,
    hang,
    in_common,
    tensors_of,
    totalled,
    using,
    using_parameters,
)
from tessel.layout import Layout, Shape
from tessel.move import Move

Factory = Callable[[int, torch.device, Mapping[str, Any]], Any]
WAY_OUT = (
    "pass it in shared={...}, which sums the gradients of all workers, or let the factory make one "
    "for each"
)


class DistributedPhysics:
    """Operators A_0, …, A_{N−1} of one image, spread over workers.

    Forward:  y_i = A_i(x), for the operators i of this worker.

    An operator is any object with a method `A`. With `A_vjp` or `A_adjoint` its derivative is taken
    from there, else from autograd.

    Args:
        ctx: the workers.
        num_ops: the number N of operators.
        factory: `factory(i, device, shared)` makes operator i; called on its worker only.
        shared: what all operators may use, by name. Tensors and modules among it are shared by all
            workers: those that need gradients get that of all operators, on every worker. Others
            get that of the operators of this worker; if those of several workers use one, or one
            that is not found in them, as a global tensor, calls that would derive it raise
            ValueError.
        layout: of an image in parts, whose operators all workers of their row have; None for the
            whole image on every worker.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import DistributedContext, DistributedPhysics
    >>> with DistributedContext() as ctx:
    ...     scale = lambda i, device, shared: SimpleNamespace(A=lambda x: (i + 1) * x)
    ...     DistributedPhysics(ctx, 2, scale).A(torch.ones(1))
    [tensor([1.]), tensor([2.])]
    """

    def __init__(
        self,
        ctx: DistributedContext,
        num_ops: int | None = None,
        factory: Factory | None = None,
        shared: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> None:
        name = type(self).__name__
        self.ctx = ctx
        self.num_ops = checked_count(name, "num_ops", num_ops, factory)
        self.shared = dict(shared or {})
        agree_on_call(ctx.partition, f"{name}(num_ops={self.num_ops})")
        self.parts: PartitionedPhysics | None = None
        self.local_operators: list[Any] = []
        held = tensors_of((factory, self.shared))  # before operators are made, which may be kept
        if layout is None or is_whole(layout):
            self.local_indices = ctx.local_indices(self.num_ops)
            self.local_operators = [self._made(factory, i) for i in self.local_indices]
        else:
            make = partial(self._kept, factory)
            self.parts = PartitionedPhysics(layout, self.num_ops, make, ctx.sharding, ctx.device)
            self.local_indices = self.parts.local_indices
        self._common = in_common(ctx, held, self._users())
        self._num_calls = 0
        self._leaves = Leaves(ctx)

    def A(self, x: DistributedSignal | Tensor, **settings: Any) -> LocalTensors:
        """The measurements y_i = A_i(x) of this worker's operators, without noise."""
        if self.parts is not None:
            self.check_parameters(())
            self._check_plain("A", settings)
            return LocalTensors(*self.parts.A(self._part(x, "A")))
        with using(self.ctx, f"{self!r}.A", local_data(x), *self._shared(settings)) as use:
            ys = [operator.A(use.x, **use.settings) for operator in self.local_operators]
        self._check_leaves("A", ys)
        return LocalTensors.hung(ys, use.anchor)

    def __call__(self, x: DistributedSignal | Tensor, **settings: Any) -> LocalTensors:
        """The measurements with noise; that of measurement i depends on the seed and on i.

        Of an image in parts each operator that can be called sees all of it, on one worker: noise
        is that of one process. For images that no worker can hold, add noise to `A(x)` yourself.
        """
        call = self._num_calls
        self._num_calls += 1
        if self.parts is not None:
            self.check_parameters(())
            self._check_plain("__call__", settings)
            ys, anchor = self.parts.measure(
                self._part(x, "__call__"), lambda i: self.ctx.drawing(i, call)
            )
            return LocalTensors(ys, anchor)
        with using(self.ctx, f"{self!r}", local_data(x), *self._shared(settings)) as use:
            ys = []
            for i, operator in zip(self.local_indices, self.local_operators, strict=True):
                with self.ctx.drawing(i, call):
                    measure = operator if callable(operator) else operator.A
                    ys.append(measure(use.x, **use.settings))
        self._check_leaves("__call__", ys)
        return LocalTensors.hung(ys, use.anchor)

    def A_vjp(self, x: DistributedSignal | Tensor, v: Sequence[Tensor]) -> Tensor:
        """The sum Σ_i J_i(x)ᵀ v_i over all operators, with the Jacobians J_i of A_i at x.

        Args:
            x: the image.
            v: one tensor for each of this worker's operators.
        """
        v = self._checked(v, "A_vjp")
        if self.parts is not None:
            self.check_parameters(())
            return self.parts.A_vjp(self._part(x, "A_vjp"), v, anchor_of(v))
        found = self.vjps(x, v)
        like = local_data(x)
        share = hang(image_of(found, like, f"{self!r}.A_vjp"), found.anchor)
        return totalled(share, self.ctx)

    def vjps(self, x: DistributedSignal | Tensor, v: Sequence[Tensor]) -> LocalTensors:
        """The products J_i(x)ᵀ v_i of this worker's operators."""
        with using(self.ctx, f"{self!r}.A_vjp", local_data(x), *self._shared({})) as use:
            shares = [
                vjp(each, use.x, part) for each, part in zip(self.local_operators, v, strict=True)
            ]
        self._check_leaves("A_vjp", shares, v)
        return LocalTensors.hung(shares, both(use.anchor, anchor_of(v)))

    def _part(self, x: DistributedSignal | Tensor, method: str) -> Tensor:
        assert self.parts is not None
        return checked_data(self.ctx, x, self.parts.layout, f"{self!r}.{method}")

    def _kept(self, factory: Factory | None, item: int) -> Any:
        self.local_operators.append(self._made(factory, item))
        return self.local_operators[-1]

    def _shared(self, settings: Mapping[str, Any]) -> tuple[Any, ...]:
        self.check_parameters(self.shared)
        return self.shared, (), settings, self.local_operators

    def check_parameters(self, shared: Any) -> None:
        """Raise ValueError on all workers if a parameter would get parts of its gradient.

        Args:
            shared: objects whose tensors get the gradient of all operators.
        """
        if self.parts is None:
            check_common(f"{self!r}", self._common, shared, WAY_OUT)
        else:
            way_out = "use a signal without partition, or let it need no gradient"
            check_common(f"{self!r} of an image in parts", self._common, (), way_out)

    def _check_leaves(
        self, method: str, results: Sequence[Tensor], given: Sequence[Tensor] = ()
    ) -> None:
        call = f"{self!r}.{method}"
        self._leaves.check(call, results, self.local_operators, self.shared, given)

    def _users(self) -> dict[str, list[Any]]:
        """This worker's operators, by where the gradients of their parameters come together."""
        place = f"worker {self.ctx.rank}" if self.parts is None else self.parts.place
        return {place: self.local_operators}

    def _made(self, factory: Factory | None, item: int) -> Any:
        assert factory is not None
        with self.ctx.drawing(item):
            operator = factory(item, self.ctx.device, self.shared)
        if not hasattr(operator, "A"):
            raise ValueError(
                f"{type(self).__name__}: factory({item}, …) must give an object with a method A, "
                f"got {operator!r}"
            )
        return operator

    def _check_plain(self, method: str, settings: Mapping[str, Any]) -> None:
        if settings:
            raise NotImplementedError(
                f"{self!r}.{method}: operators on an image in parts take no arguments, "
                f"got {dict(settings)}"
            )

    def _agree_on_image(self, share: Tensor, call: str) -> tuple[Shape, Terms]:
        """The shape and kind of the image, which workers without operators learn so."""
        if call not in self._meetings:
            owners = self.ctx.owners(self.num_ops)
            group = self.ctx.partition.group
            self._meetings[call] = Meeting(group, call, owners, _same_shape)
        found = self._meetings[call].reach(Claim.of(share))
        self.ctx.partition.group.number_call()
        return found

    @cached_property
    def _meetings(self) -> dict[str, Meeting[tuple[Shape, Terms]]]:
        return {}

    def everywhere(self, value: Tensor) -> Tensor:
        """A shared value of the workers that have parts of the image, on all workers."""
        ours = self.ctx.partition
        theirs = ours if self.parts is None else self.parts.layout.partition
        if theirs.size == ours.size:
            return value
        meeting = Meeting(ours.group, f"a value of {self!r}", theirs.ranks, _same_value)
        shape = meeting.reach(Claim.of(value))
        ours.group.number_call()
        move = Move(
            Layout.whole(theirs, shape, shared=True), Layout.whole(ours, shape, shared=True)
        )
        return move(value if theirs.active else value.new_empty(0))

    def _checked(self, values: Sequence[Tensor], method: str) -> Sequence[Tensor]:
        """As many tensors as this worker has operators; all workers raise if one has others."""
        if len(values) != len(self.local_operators):
            call = (
                f"{self!r}.{method}: worker {self.ctx.rank} has the operators "
                f"{self.local_indices} and needs as many tensors, {len(self.local_indices)}, got "
                f"{len(values)}"
            )
            layout = None if self.parts is None else self.parts.layout
            agree_on_call(self.ctx.partition if layout is None else layout.partition, call)
            raise ValueError(call)
        return values

    def __len__(self) -> int:
        return self.num_ops

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_ops} operators over {self.ctx.world_size} workers)"


class DistributedLinearPhysics(DistributedPhysics):
    """Linear operators of one image, spread over workers: A = (A_0; …; A_{N−1}).

    Forward:  y_i = A_i x.    Adjoint:  x = Σ_i A_iᵀ y_i.

    An operator has the methods `A` and `A_adjoint`.

    Args:
        ctx: the workers.
        num_ops: the number N of operators.
        factory: `factory(i, device, shared)` makes operator i; called on its worker only.
        shared: what all operators may use, by name; see `DistributedPhysics`.
        layout: of an image in parts, or None.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import DistributedContext, DistributedLinearPhysics
    >>> def scale(i, device, shared):
    ...     return SimpleNamespace(A=lambda x: (i + 1) * x, A_adjoint=lambda y: (i + 1) * y)
    >>> with DistributedContext() as ctx:
    ...     physics = DistributedLinearPhysics(ctx, 2, scale)
    ...     physics.A_adjoint(physics.A(torch.ones(1)))
    tensor([5.])
    """

    def _made(self, factory: Factory | None, item: int) -> Any:
        operator = super()._made(factory, item)
        if not hasattr(operator, "A_adjoint"):
            raise ValueError(
                f"DistributedLinearPhysics: factory({item}, …) must give an object with methods A "
                f"and A_adjoint, got {operator!r}; DistributedPhysics needs no A_adjoint"
            )
        return operator

    def A_adjoint(self, ys: Sequence[Tensor]) -> Tensor:
        """The image Σ_i A_iᵀ y_i, summed over all operators.

        Args:
            ys: one tensor for each of this worker's operators.
        """
        ys = self._checked(ys, "A_adjoint")
        self.check_parameters(self.shared)
        if self.parts is not None:
            return self.parts.A_adjoint(ys, anchor_of(ys))
        found = self.adjoints(ys)
        share = sum_of(found) if found else torch.empty(0, device=self.ctx.device)
        call = f"{self!r}.A_adjoint{described(self.shared)}"
        shape, terms = self._agree_on_image(share, call)
        if not found:
            share = torch.zeros(shape, dtype=terms.dtype, device=self.ctx.device)
        return totalled(hang(share, found.anchor), self.ctx, terms)

    def adjoints(
        self, ys: Sequence[Tensor], apply: Callable[[Any, Tensor], Tensor] | None = None
    ) -> LocalTensors:
        """The images A_iᵀ y_i of this worker's operators, or what else they make of the y_i."""
        make = apply or (lambda operator, y: operator.A_adjoint(y))
        with using_parameters(self.ctx, self.shared, self.local_operators) as anchor:
            images = [make(op, y) for op, y in zip(self.local_operators, ys, strict=True)]
        self._check_leaves("A_adjoint", images, ys)
        return LocalTensors.hung(images, both(anchor, anchor_of(ys)))

    def A_vjp(self, x: DistributedSignal | Tensor, v: Sequence[Tensor]) -> Tensor:
        """The same as `A_adjoint(v)`, since the operators are linear."""
        return self.A_adjoint(v)

    def A_adjoint_A(self, x: DistributedSignal | Tensor, **settings: Any) -> Tensor:
        """The image Σ_i A_iᵀ A_i x."""
        if self.parts is not None:
            self.check_parameters(())
            self._check_plain("A_adjoint_A", settings)
            return self.parts.A_adjoint_A(self._part(x, "A_adjoint_A"))
        found = self.normals(x, **settings)
        share = image_of(found, local_data(x), f"{self!r}.A_adjoint_A")
        return totalled(hang(share, found.anchor), self.ctx)

    def normals(self, x: DistributedSignal | Tensor, **settings: Any) -> LocalTensors:
        """The images A_iᵀ A_i x of this worker's operators."""
        label = f"{self!r}.A_adjoint_A"
        with using(self.ctx, label, local_data(x), *self._shared(settings)) as use:
            images = [normal(each, use.x, **use.settings) for each in self.local_operators]
        self._check_leaves("A_adjoint_A", images)
        return LocalTensors.hung(images, use.anchor)

    def A_A_adjoint(self, ys: Sequence[Tensor]) -> LocalTensors:
        """The measurements A_i Σ_j A_jᵀ y_j of this worker's operators."""
        return self.A(self.A_adjoint(ys))

    def A_dagger(
        self, ys: Sequence[Tensor], tol: float | None = None, max_iter: int = 1000
    ) -> Tensor:
        """The pseudo-inverse of the stacked operator: x = A⁺ y.

        Of all images that minimise Σ_i ‖A_i x − y_i‖² it is the smallest; found by conjugate
        gradients on the normal equations (CGLS) from zero. It has first derivatives, in the
        measurements and in parameters of operators that keep their rank.

        Args:
            ys: one tensor for each of this worker's operators.
            tol: stop when ‖Aᵀ(A x − y)‖ ≤ tol·‖Aᵀ y‖; None for 1e-12 of float64, 1e-6 of others.
            max_iter: at most so many steps; a warning says if they did not suffice.
        """
        ys = LocalTensors(self._checked(ys, "A_dagger"), anchor_of(ys))
        with torch.no_grad():
            slope = self.A_adjoint(ys)
        layout = self._layout(slope)
        if tol is None:
            tol = 1e-12 if slope.dtype in (torch.float64, torch.complex128) else 1e-6
        x, reached = least_squares(self, ys, slope, layout, tol, max_iter)
        if reached > tol:
            warnings.warn(
                f"{self!r}.A_dagger: the residual fell to {reached:.2g} of its first size in "
                f"{max_iter} steps, not to tol = {tol:.2g}; allow more, or a larger tol",
                stacklevel=2,
            )
        rest = self.A_adjoint(ys - self.A(x)) if torch.is_grad_enabled() else x
        if not rest.requires_grad:
            return x
        # AᵀA dx = d(Aᵀ(y − A x)) for a fixed x: the value of this term is zero, its derivative dx
        return x + NormalInverse(self, layout, tol, max_iter).apply(rest - rest.detach())

    def norm(
        self, x0: DistributedSignal | Tensor, max_iter: int = 500, tol: float = 1e-8
    ) -> Tensor:
        """The norm ‖A‖ = √λ_max(AᵀA) of the stacked operator, by power iteration.

        Args:
            x0: an image of the shape and dtype of the domain; its values do not matter. The first
                image is one without order, the same for any number of workers.
            max_iter: at most so many steps.
            tol: stop when the estimate changes by less than this, relative to it.
        """
        return self.compute_norm(x0, max_iter, tol, squared=False)

    def compute_norm(
        self,
        x0: DistributedSignal | Tensor,
        max_iter: int = 500,
        tol: float = 1e-8,
        squared: bool = True,
    ) -> Tensor:
        """The largest eigenvalue ‖A‖² of AᵀA, or its root if not `squared`."""
        like = local_data(x0)
        layout = self._layout(like)
        x = wave_in(layout, like.dtype).to(self.ctx.device)
        value = x.new_zeros((), dtype=x.real.dtype)
        with torch.no_grad():
            x = x / layout.inner(x, x).real.sqrt()
            for _ in range(max_iter):
                y = self.A_adjoint_A(x)
                before, value = value, layout.inner(x, y).real
                size = layout.inner(y, y).real.sqrt()
                if size.item() == 0 or (value - before).abs().item() <= tol * value.abs().item():
                    break
                x = y / size
        value = self.everywhere(value)
        return value if squared else value.sqrt()

    def _layout(self, x: Tensor) -> Layout:
        """Where images as `x` lie."""
        if self.parts is not None:
            return self.parts.layout
        return Layout.whole(self.ctx.partition, x.shape, shared=True)


def _same_shape(shapes: dict[int, Shape], terms: Terms) -> tuple[Shape, Terms]:
    return same(shapes, "shape of the image that A_adjoint gives", "DistributedPhysics"), terms


def _same_value(shapes: dict[int, Shape], terms: Terms) -> Shape:
    found: Shape = same(shapes, "shape of a value of all workers", "DistributedPhysics")
    return found


def image_of(shares: Sequence[Tensor], x: Tensor, call: str) -> Tensor:
    """The sum of images that operators of this worker gave for `x`, which must be of its kind."""
    for each in shares:
        if each.shape != x.shape or each.dtype != x.dtype:
            raise ValueError(
                f"{call}: for an image of shape {tuple(x.shape)} and {x.dtype} an operator gave "
                f"back one of shape {tuple(each.shape)} and {each.dtype}"
            )
    return sum_of(shares, x)


def sum_of(shares: Sequence[Tensor], like: Tensor | None = None) -> Tensor:
    """The sum of tensors of one shape; zeros like `like` if there are none."""
    if not shares:
        assert like is not None
        return torch.zeros_like(like)
    found = shares[0]
    for each in shares[1:]:
        found = found + each
    return found


def square(x: Tensor) -> Tensor:
    """The sum of the squares of all numbers of a tensor."""
    return (x.real.square() + x.imag.square() if x.is_complex() else x.square()).sum()
