"""DistributedPhysics: many operators of one image, each on the workers that have it.

The image is one shared value, whole on every worker or in parts. What its operators measure stays
where it arises, and what goes back to the image is summed over all workers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tessel.core.agreement import Agreement, Signature, TensorMeta, same
from tessel.core.layout import Layout, Shape
from tessel.core.move import Move
from tessel.distributed.agreeing import agree_on_call
from tessel.imaging.context import DistributedContext
from tessel.imaging.measurements import LocalTensors, anchor_of, checked_count
from tessel.imaging.parameters import check_common, in_common, tensors_of
from tessel.imaging.parts.physics import PartitionedPhysics
from tessel.imaging.random import wave_in
from tessel.imaging.signal import DistributedSignal, is_whole, local_data
from tessel.imaging.solvers.conjugate import CGLS, NormalInverse, solved
from tessel.imaging.solvers.power import largest_eigenvalue
from tessel.imaging.solvers.space import Space

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
        # Before operators are made: a factory may keep them, and what they hold is their own.
        held = tensors_of((factory, self.shared))
        whole = layout is None or is_whole(layout)
        self.parts = PartitionedPhysics(
            ctx.partition if whole or layout is None else layout,
            self.num_ops,
            partial(self._made, factory),
            ctx,
            self.shared if whole else (),
            repr(self),
        )
        self.local_indices = self.parts.local_indices
        self.local_operators = self.parts.physics
        self._common = in_common(ctx, held, self.parts.place, self.local_operators)
        self._num_calls = 0

    def A(self, x: DistributedSignal | Tensor, **settings: Any) -> LocalTensors:
        """The measurements y_i = A_i(x) of this worker's operators, without noise."""
        self._check_call("A", settings)
        return LocalTensors(*self.parts.A(local_data(x), **settings))

    def __call__(self, x: DistributedSignal | Tensor, **settings: Any) -> LocalTensors:
        """The measurements with noise; that of measurement i depends on the seed and on i.

        Of an image in parts each operator that can be called sees all of it, on one worker: noise
        is that of one process. For images that no worker can hold, add noise to `A(x)` yourself.
        """
        call = self._num_calls
        self._num_calls += 1
        self._check_call("__call__", settings)
        drawing = lambda i: self.ctx.drawing(i, call)  # noqa: E731
        return LocalTensors(*self.parts.measure(local_data(x), drawing, **settings))

    def A_vjp(self, x: DistributedSignal | Tensor, v: Sequence[Tensor]) -> Tensor:
        """The sum Σ_i J_i(x)ᵀ v_i over all operators, with the Jacobians J_i of A_i at x.

        Args:
            x: the image.
            v: one tensor for each of this worker's operators.
        """
        self._check_call("A_vjp", values=v)
        return self.parts.A_vjp(local_data(x), v, anchor_of(v))

    def check_parameters(self, shared: Any) -> None:
        """Raise ValueError on all workers if a parameter would get parts of its gradient.

        Args:
            shared: objects whose tensors get the gradient of all operators of whole images.
        """
        if self.parts.layout is None:
            check_common(self.parts.label, self._common, shared, WAY_OUT)
        else:
            way_out = "use a signal without partition, or let it need no gradient"
            check_common(f"{self.parts.label} of an image in parts", self._common, (), way_out)

    def _check_call(
        self,
        method: str,
        settings: Mapping[str, Any] | None = None,
        values: Sequence[Tensor] | None = None,
    ) -> None:
        """Raise on all workers if this call cannot be made.

        Args:
            method: that is called.
            settings: of the operators.
            values: tensors, of which there must be one for each of this worker's operators.
        """
        if values is not None and len(values) != len(self.local_operators):
            call = (
                f"{self.parts.label}.{method}: worker {self.ctx.rank} has the operators "
                f"{self.local_indices} and needs as many tensors, {len(self.local_indices)}, got "
                f"{len(values)}"
            )
            agree_on_call(self.parts.partition, call)
            raise ValueError(call)
        self.check_parameters(self.shared)
        if settings and self.parts.layout is not None:
            raise NotImplementedError(
                f"{self.parts.label}.{method}: operators on an image in parts take no arguments, "
                f"got {dict(settings)}"
            )

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

    def everywhere(self, value: Tensor) -> Tensor:
        """A shared value of the workers that have parts of the image, on all workers."""
        ours, theirs = self.ctx.partition, self.parts.partition
        if theirs.size == ours.size:
            return value
        agreement = Agreement(ours.group, f"a value of {self!r}", theirs.ranks, _same_shape)
        shape = agreement.agree(Signature.of(value))
        ours.group.number_call()
        move = Move(
            Layout.whole(theirs, shape, shared=True), Layout.whole(ours, shape, shared=True)
        )
        return move(value if theirs.active else value.new_empty(0))

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
        self._check_call("A_adjoint", values=ys)
        return self.parts.A_adjoint(ys, anchor_of(ys))

    def A_vjp(self, x: DistributedSignal | Tensor, v: Sequence[Tensor]) -> Tensor:
        """The same as `A_adjoint(v)`, since the operators are linear."""
        return self.A_adjoint(v)

    def A_adjoint_A(self, x: DistributedSignal | Tensor, **settings: Any) -> Tensor:
        """The image Σ_i A_iᵀ A_i x."""
        self._check_call("A_adjoint_A", settings)
        return self.parts.A_adjoint_A(local_data(x), **settings)

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
        self._check_call("A_dagger", values=ys)
        ys = LocalTensors(ys, anchor_of(ys))
        with torch.no_grad():
            x = torch.zeros_like(self.A_adjoint(ys))
        if not self.parts.active:
            return x
        layout = self.parts.layout_for(x)
        if tol is None:
            tol = 1e-12 if x.dtype in (torch.float64, torch.complex128) else 1e-6
        with torch.no_grad():
            space = Space(layout, layout.partition)
            found = solved(CGLS(self, ys.map(Tensor.detach)), x, space, tol, max_iter)
        x, reached = found["x"], float(found["residual"])
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
        inverse = NormalInverse(self.A_adjoint_A, layout, tol, max_iter)
        return x + inverse.apply(rest - rest.detach())

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
        layout = self.parts.layout_for(like)
        x = wave_in(layout, like.dtype).to(self.ctx.device)
        value = x.new_zeros((), dtype=x.real.dtype)
        if self.parts.active:
            space = Space(layout, layout.partition)
            value += largest_eigenvalue(self.A_adjoint_A, x, space, max_iter, tol)
        value = self.everywhere(value)
        return value if squared else value.sqrt()


def _same_shape(shapes: dict[int, Shape], meta: TensorMeta) -> Shape:
    found: Shape = same(shapes, "shape of a value of all workers", "DistributedPhysics")
    return found
