"""Stacked physics and data fidelities, with the interface of `deepinv.distributed`.

A stack takes and returns all measurements, while `DistributedPhysics` has those of each worker.
`gather=False` leaves results where they are computed.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import repeat
from math import prod
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tessel import transport
from tessel.core import (
    Layout,
    Move,
    Partition,
    Shape,
    agree,
    anchored_zeros,
    copying,
    shared_whole,
    tell,
    total,
)
from tessel.errors import check_choice
from tessel.imaging.context import DistributedContext
from tessel.imaging.fidelity import REDUCTIONS, DistributedDataFidelity
from tessel.imaging.linear_physics import DistributedLinearPhysics
from tessel.imaging.measurements import LocalTensors
from tessel.imaging.parameters import anchor_of, depending_on, needs_grad
from tessel.imaging.parts.operators import normal
from tessel.imaging.physics import AT_IMAGE, DistributedPhysics, Factory, Term
from tessel.imaging.signal import Image, local_data
from tessel.imaging.solvers.linear import largest_eigenvalue
from tessel.imaging.solvers.method import Space
from tessel.imaging.solvers.splitting import fidelity_prox

GATHER_STRATEGIES = ("naive", "concatenated", "broadcast")
MeasurementKind = tuple[int, Shape, torch.dtype]  # the number of a measurement, its shape and dtype
REDUCE_OPS = (None, "sum", "mean")


class DistributedStackedPhysics(DistributedPhysics):
    """Operators of one image, spread over workers, whose measurements every worker gets.

    Forward:  x ↦ (A_0(x), …, A_{N−1}(x)), as shared values: every worker may differentiate them.

    Args:
        ctx: the workers.
        num_operators: the number N of operators.
        factory: `factory(i, device, factory_kwargs)` makes operator i; called on its worker only.
        factory_kwargs: objects that all operators may use, by name; see `DistributedPhysics`.
        gather_strategy: how measurements are sent. "concatenated": those of a worker as one row, in
            one exchange. "broadcast": one exchange for each, which needs no second copy of all of
            them. "naive": pickled, which is slow and does not support gradients.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import DistributedContext, distribute
    >>> with DistributedContext() as ctx:
    ...     scales = [SimpleNamespace(A=lambda x, i=i: i * x) for i in (1, 2)]
    ...     list(distribute(scales, ctx).A(torch.ones(1)))
    [tensor([1.]), tensor([2.])]
    """

    def __init__(
        self,
        ctx: DistributedContext,
        num_operators: int,
        factory: Factory,
        *,
        factory_kwargs: Mapping[str, Any] | None = None,
        gather_strategy: str = "concatenated",
    ) -> None:
        check_choice("gather_strategy", gather_strategy, GATHER_STRATEGIES)
        super().__init__(ctx, num_operators, factory, factory_kwargs)
        self._kinds: dict[
            tuple[int, ...], list[list[MeasurementKind]]
        ] = {}  # the measurements of all workers, by checksums
        # deepinv's names of the same attributes.
        self.num_operators, self.gather_strategy = self.num_ops, gather_strategy
        self.local_physics, self.local_indexes = self.local_operators, self.local_indices

    def A(
        self, x: Image, gather: bool = True, reduce_op: str | None = None, **settings: Any
    ) -> Any:
        """The measurements y_i = A_i(x), without noise.

        Args:
            x: the image.
            gather: False: only those of this worker's operators.
            reduce_op: "sum" or "mean" over the operators, whose measurements must have one shape.
            settings: settings of the operators.
        """
        return self._finished("A", super().A(x, **settings), gather, reduce_op)

    def __call__(
        self, x: Image, gather: bool = True, reduce_op: str | None = None, **settings: Any
    ) -> Any:
        """The measurements with noise; that of measurement i depends on the seed and on i."""
        found = super().__call__(x, **settings)
        return self._finished("__call__", found, gather, reduce_op)

    def A_vjp(
        self, x: Image, v: Sequence[Tensor], gather: bool = True, reduce_op: str | None = "sum"
    ) -> Any:
        """The products J_i(x)ᵀ v_i, summed; see `DistributedStackedLinearPhysics.A_adjoint`."""
        return self._images("A_vjp", x, self.own(v), gather, reduce_op, AT_IMAGE)

    def own(self, ys: Sequence[Tensor]) -> Sequence[Tensor]:
        """This worker's measurements, from those of all operators or from its own ones."""
        count, partition = len(self.local_indices), self.ctx.partition
        if len(ys) == count and (isinstance(ys, LocalTensors) or count != self.num_ops):
            self._needed(None)
            return ys
        if len(ys) == self.num_ops:
            # Shared values, of which each worker uses some: gradients of all uses are summed.
            given = [ys[i] for i in range(len(ys))]
            needed = self._needed([needs_grad(each) for each in given])
            for i in needed:
                # A tensor that needs no gradient on this worker takes part in the sum of the
                # others.
                y = given[i] if given[i].requires_grad else given[i].detach().requires_grad_()
                given[i] = copying(partition, tuple(y.shape)).apply(y)
            # A worker without operators depends on the others' tensors, whose gradients it sums.
            anchor = anchored_zeros((), *(given[i] for i in needed)) if needed else None
            return LocalTensors([given[i] for i in self.local_indices], anchor)
        call = (
            f"{self!r}: expected {self.num_ops} measurements, one for each operator, or the "
            f"{count} of worker {self.ctx.rank}, got {len(ys)}"
        )
        agree(partition, call)  # all workers raise, or those with correct arguments would wait
        raise ValueError(call)

    def _needed(self, flags: list[bool] | None) -> list[int]:
        """The measurements of all operators that need a gradient on any worker.

        Args:
            flags: whether they do on this worker; None if it only has its own ones.
        """
        own = [i for i, is_needed in enumerate(flags or ()) if is_needed]
        if self.ctx.world_size == 1 or not torch.is_grad_enabled():
            return own
        # A checksum in each call; the flags themselves only if workers differ.
        said = [0 if flags is None else 1 + zlib.crc32(bytes(flags))]
        call = f"the measurements that {self._label} was given"
        _, told = agree(self.ctx.partition, call, numbers=said)
        if len(set(told.values())) == 1:
            return own
        needed = sorted(set().union(*tell(self.ctx.partition, own).values()))
        alone = [worker for worker, (number,) in told.items() if number == 0]
        if needed and alone:
            raise ValueError(
                f"{self!r}: on some workers, measurements of all operators need gradients, but "
                f"workers {alone} got only their own measurements; pass all measurements on all "
                "workers"
            )
        return needed

    def _images(
        self,
        method: str,
        x: Image | None,
        ys: Sequence[Tensor] | None,
        gather: bool,
        reduce_op: str | None,
        terms: Iterable[Term] | None = None,
        **settings: Any,
    ) -> Any:
        """The images of the operators: their sum or mean, or each of them."""
        if not gather or reduce_op is None:
            found = self._each(method, x, ys, terms, **settings)
            like = None if x is None else local_data(x)
            return self._finished(method, found, gather, reduce_op, like)
        _check_reduce_op(reduce_op)
        image = self._summed(method, x, ys, terms, **settings)
        return image / self.num_ops if reduce_op == "mean" else image

    def _finished(
        self,
        method: str,
        found: LocalTensors,
        gather: bool,
        reduce_op: str | None,
        like: Tensor | None = None,
    ) -> Any:
        """The results of each worker, those of all workers, or a sum of either."""
        _check_reduce_op(reduce_op)
        if reduce_op is None:
            if not gather:
                return found
            return self._collected(f"{self._label}.{method}", found)
        share = None if like is None else torch.zeros_like(like)
        if found:
            share = reduce(torch.add, found)
        if gather or like is None:  # workers without operators learn the shape from others
            share, _ = self.completed(f"{self._label}.{method}(reduce_op={reduce_op!r})", share)
        assert share is not None
        share = depending_on(share, anchor_of(found))
        found_sum = total(share, self.ctx.partition) if gather else share
        return found_sum / self.num_ops if reduce_op == "mean" else found_sum

    def _collected(self, call: str, items: LocalTensors) -> Any:
        """The measurements of all workers on every worker, each a shared value, in order."""
        if self.ctx.world_size == 1:
            return as_tensor_list(list(items))
        partition, anchor = self.ctx.partition, items.anchor
        described = zip(self.local_indices, items, strict=True)
        mine = [(i, tuple(y.shape), y.dtype) for i, y in described]
        needs = any(each.requires_grad for each in (*items, *([] if anchor is None else [anchor])))
        # Descriptions are sent once: later a checksum shows that they did not change. All workers
        # have all checksums, so that either all or none know the others' tensors.
        said = [zlib.crc32(repr(mine).encode()), needs and torch.is_grad_enabled()]
        _, told = agree(partition, call, numbers=said)
        sums, records = zip(*told.values(), strict=True)
        if sums not in self._kinds:
            self._kinds[sums] = list(tell(partition, mine).values())
        kinds, found = self._kinds[sums], dict[int, Tensor]()
        if self.gather_strategy == "naive":
            if any(records):
                raise ValueError(
                    f"{call}: gather_strategy='naive' does not support gradients, but one is "
                    "needed; use 'concatenated' or 'broadcast', or call it under torch.no_grad()"
                )
            everyones = tell(partition, [each.detach().cpu() for each in items]).values()
            for theirs, tensors in zip(kinds, everyones, strict=True):
                for (i, _, _), tensor in zip(theirs, tensors, strict=True):
                    found[i] = tensor.to(self.ctx.device)
        else:
            own = dict(zip(self.local_indices, items, strict=True))
            # Sent together: one item at a time, or all of one dtype.
            key = 0 if self.gather_strategy == "broadcast" else 2
            for batch in dict.fromkeys(each[key] for one in kinds for each in one):
                some = [[each for each in one if each[key] == batch] for one in kinds]
                found |= self._moved(some, own, anchor, any(records))
        return as_tensor_list([found[i] for i in range(self.num_ops)])

    def _moved(
        self,
        kinds: list[list[MeasurementKind]],
        own: dict[int, Tensor],
        anchor: Tensor | None,
        records: bool,
    ) -> dict[int, Tensor]:
        """Measurements of all workers by their numbers, after one exchange of rows."""
        partition = self.ctx.partition
        dtype = next(dtype for theirs in kinds for _, _, dtype in theirs)
        lengths = [sum(prod(shape) for _, shape, _ in theirs) for theirs in kinds]
        parts = [own[i].reshape(-1) for i, _, _ in kinds[self.ctx.rank]]
        row = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=self.ctx.device)
        if records:
            row = depending_on(row, anchor)
            # Graphs of all workers are alike, also of one that needs no gradient.
            row = row if row.requires_grad else row.detach().requires_grad_()
        layout = Layout.from_lengths(partition, [lengths])
        rows = Move(layout, shared_whole(partition, layout.shape)).apply(row)
        found, start = {}, 0
        for i, shape, _ in (each for theirs in kinds for each in theirs):
            found[i] = rows[start : start + prod(shape)].reshape(shape)
            start += prod(shape)
        return found


def as_tensor_list(items: list[Tensor]) -> Any:
    """Items in a list with sums and multiples: deepinv's if it is imported."""
    deepinv = sys.modules.get("deepinv.utils.tensorlist")
    return LocalTensors(items) if deepinv is None else deepinv.TensorList(items)


def _check_reduce_op(reduce_op: str | None) -> None:
    if reduce_op not in REDUCE_OPS:
        raise ValueError(f"reduce_op must be one of {REDUCE_OPS}, got {reduce_op!r}")


class DistributedStackedLinearPhysics(DistributedStackedPhysics, DistributedLinearPhysics):
    """Linear operators of one image, spread over workers, whose measurements every worker gets.

    Forward:  x ↦ (A_0 x, …, A_{N−1} x).    Adjoint:  y ↦ Σ_i A_iᵀ y_i.

    Args:
        ctx, num_operators, factory, factory_kwargs, gather_strategy: those of
            `DistributedStackedPhysics`.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import DistributedContext, distribute
    >>> double = SimpleNamespace(A=lambda x: 2 * x, A_adjoint=lambda y: 2 * y)
    >>> with DistributedContext() as ctx:
    ...     physics = distribute([double, double], ctx)
    ...     physics.A_adjoint(physics.A(torch.ones(1)))
    tensor([8.])
    """

    def A_adjoint(
        self, y: Sequence[Tensor], gather: bool = True, reduce_op: str | None = "sum"
    ) -> Any:
        """The image Σ_i A_iᵀ y_i.

        Args:
            y: the measurements of all operators, or of this worker's.
            gather: False: the share of this worker's operators.
            reduce_op: "sum", "mean", or None for the images A_iᵀ y_i themselves.
        """
        return self._images("A_adjoint", None, self.own(y), gather, reduce_op)

    def A_vjp(
        self, x: Image, v: Sequence[Tensor], gather: bool = True, reduce_op: str | None = "sum"
    ) -> Any:
        """The same as `A_adjoint(v)`, since the operators are linear."""
        return self.A_adjoint(v, gather, reduce_op)

    def A_adjoint_A(
        self, x: Image, gather: bool = True, reduce_op: str | None = "sum", **settings: Any
    ) -> Any:
        """The image Σ_i A_iᵀ A_i x."""
        return self._images("A_adjoint_A", x, None, gather, reduce_op, **settings)

    def A_A_adjoint(self, y: Sequence[Tensor], gather: bool = True) -> Any:
        """The measurements A_i Σ_j A_jᵀ y_j, of the image of all operators."""
        return self.A(self.A_adjoint(y), gather)

    @property
    def spread(self) -> DistributedLinearPhysics:
        """The same operators, called with the measurements of this worker."""
        plain = DistributedLinearPhysics.__new__(DistributedLinearPhysics)
        plain.__dict__ = self.__dict__  # one state, two ways to call it: `CGLS` calls this one
        return plain

    def A_dagger(  # type: ignore[override]
        self,
        y: Sequence[Tensor],
        solver: str = "CG",
        max_iter: int | None = None,
        tol: float | None = None,
        *,
        local_only: bool = True,
        gather: bool = True,
    ) -> Any:
        """The mean of the operators' pseudo-inverses, or that of the stacked operator.

        Args:
            y: the measurements of all operators, or of this worker's.
            solver: the solver of operators without a pseudo-inverse in closed form; passed on to
                each. The stacked operator is solved by conjugate gradients, "CG".
            max_iter, tol: settings of the solver; None for its own.
            local_only: True: (1/N) Σ_i A_i⁺ y_i, an approximation that needs one sum over workers.
                False: A⁺ y, exactly, with a sum in each iteration.
            gather: False with `local_only`: the share of this worker's operators.
        """
        if not local_only:
            if solver != "CG" or not gather:
                raise ValueError(
                    "A_dagger(local_only=False) supports only the solver 'CG' and gather=True, got "
                    f"{solver!r} and {gather}"
                )
            steps = {} if max_iter is None else {"max_iter": max_iter}
            return self.spread.A_dagger(self.own(y), tol, **steps)
        asked = {"solver": None if solver == "CG" else solver, "max_iter": max_iter, "tol": tol}
        given = {name: value for name, value in asked.items() if value is not None}
        inverses = repeat(lambda op, y, call: op.physics.A_dagger(y, **given))
        images = self._each("A_dagger", None, self.own(y), inverses)
        return self._finished("A_dagger", images, gather, "mean")

    def compute_sqnorm(
        self,
        x0: Image,
        max_iter: int = 50,
        tol: float = 1e-3,
        verbose: bool = True,
        *,
        local_only: bool = True,
        gather: bool = True,
    ) -> Tensor:
        """An upper bound of the squared norm ‖A‖², or its value.

        Args:
            x0: an image of the shape and dtype of the domain.
            max_iter: the number of power iterations.
            tol: stop when the estimate changes by less than this, relative to it.
            verbose: whether the first worker prints it.
            local_only: True: Σ_i ‖A_i‖², which is at least ‖A‖². False: ‖A‖² itself, with a sum
                over workers in each iteration.
            gather: False with `local_only`: the share of this worker's operators.
        """
        if local_only:
            like = local_data(x0)
            found = like.new_zeros((), dtype=like.real.dtype)
            here = Partition((transport.this_worker(),), (1,))
            alone = Space(shared_whole(here, tuple(like.shape)), here)
            for each in self.local_physics:
                if hasattr(each, "compute_sqnorm"):
                    own = each.compute_sqnorm(like, max_iter=max_iter, tol=tol, verbose=False)
                else:
                    term = partial(normal, each)
                    own = largest_eigenvalue(term, torch.rand_like(like), alone, max_iter, tol)
                found = found + torch.as_tensor(own, device=like.device).to(found)
            found = total(found, self.ctx.partition) if gather else found
        elif gather:
            found = self.compute_norm(x0, max_iter, tol)
        else:
            raise ValueError("compute_sqnorm(local_only=False) supports only gather=True")
        if verbose and self.ctx.rank == 0:
            print(f"‖A‖² {'≤' if local_only else '='} {found.item():.4g}")
        return found


class DistributedStackedFidelity(torch.nn.Module):
    """The data fidelities of stacked physics: f(x, y) = c·Σ_i d(A_i(x), y_i).

    Args:
        ctx: the workers.
        data_fidelity: one for all operators, or a function of (i, device, factory_kwargs).
        num_operators: the number of operators, required for a function.
        factory_kwargs: objects that functions may use, by name.
        reduction: "sum", c = 1, or "mean", c = 1/N.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import DistributedContext, distribute
    >>> from tessel.imaging.fidelity import L2
    >>> double = SimpleNamespace(A=lambda x: 2 * x, A_adjoint=lambda y: 2 * y)
    >>> with DistributedContext() as ctx:
    ...     physics, fidelity = distribute([double], ctx), distribute(L2(), ctx)
    ...     fidelity.grad(torch.ones(1), [torch.zeros(1)], physics)
    tensor([4.])
    """

    def __init__(
        self,
        ctx: DistributedContext,
        data_fidelity: Any,
        num_operators: int | None = None,
        *,
        factory_kwargs: Mapping[str, Any] | None = None,
        reduction: str = "sum",
    ) -> None:
        super().__init__()
        check_choice("reduction", reduction, REDUCTIONS)
        self.ctx = ctx
        self.reduction = reduction
        self.num_operators = num_operators
        self.single_fidelity = data_fidelity if hasattr(data_fidelity, "grad") else None
        self._make = None if hasattr(data_fidelity, "grad") else data_fidelity
        self._shared = dict(factory_kwargs or {})
        if self.single_fidelity is None and num_operators is None:
            raise ValueError(
                "pass num_operators, the number of data fidelities that the function "
                f"{data_fidelity!r} creates; got num_operators=None"
            )
        # By physics, and dropped with it: a fidelity is often made once and used for many.
        self._made: WeakKeyDictionary[Any, DistributedDataFidelity] = WeakKeyDictionary()

    def forward(
        self,
        x: Image,
        y: Sequence[Tensor],
        physics: DistributedStackedPhysics,
        *args: Any,
        gather: bool = True,
        **settings: Any,
    ) -> Tensor:
        """The loss, a number for each image of the batch.

        Args:
            x: the image.
            y: the measurements of all operators, or of this worker's.
            physics: the operators.
            args, settings: arguments of the data fidelities.
            gather: False: the share of this worker's operators.
        """
        return self._of(physics, y)(x, *args, gather=gather, **settings)

    def fn(self, *args: Any, **settings: Any) -> Tensor:
        """The same as calling it."""
        found: Tensor = self(*args, **settings)
        return found

    def grad(
        self,
        x: Image,
        y: Sequence[Tensor],
        physics: DistributedStackedPhysics,
        *args: Any,
        gather: bool = True,
        **settings: Any,
    ) -> Tensor:
        """The gradient of the loss with respect to x."""
        return self._of(physics, y).grad(x, *args, gather=gather, **settings)

    def prox(
        self,
        x: Tensor,
        y: Sequence[Tensor],
        physics: DistributedStackedPhysics,
        *args: Any,
        gamma: float | Tensor = 1.0,
        **settings: Any,
    ) -> Tensor:
        """Compute argmin_u gamma f(u, y) + ½‖u − x‖² by conjugate gradients, for quadratic f."""
        own = self._of(physics, y)
        gradient = SimpleNamespace(grad=lambda u: own.grad(u, *args, **settings))
        layout = shared_whole(self.ctx.partition, tuple(x.shape))
        derives = torch.is_grad_enabled()
        return fidelity_prox(gradient, x, gamma, Space.of(x, layout, derives))

    def _of(self, physics: Any, y: Sequence[Tensor]) -> DistributedDataFidelity:
        """The fidelities of these operators, with these measurements."""
        if not isinstance(physics, DistributedStackedPhysics):
            raise ValueError(
                "a distributed data fidelity expects distributed physics, got "
                f"{type(physics).__name__}; create them with distribute(physics, ctx)"
            )
        if self.num_operators not in (None, physics.num_ops):
            raise ValueError(
                f"there are {self.num_operators} data fidelities, but {physics!r}: pass as many, "
                "or one for all"
            )
        if physics not in self._made:
            given: Any = SimpleNamespace(num_items=physics.num_ops, local=[])
            shared = dict(self._shared)
            make = self._make
            if self.single_fidelity is not None:
                shared["data_fidelity"] = fidelity = self.single_fidelity
                make = lambda i, device, known: fidelity  # noqa: E731
            self._made[physics] = DistributedDataFidelity(
                self.ctx, physics, given, make, self.reduction, shared
            )
        # Measurements are passed to each call, as in deepinv; operators and fidelities stay.
        found = self._made[physics]
        own = physics.own(y)
        device = self.ctx.device
        found.measurements.local = LocalTensors([each.to(device) for each in own], anchor_of(own))
        return found

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_made"] = WeakKeyDictionary()  # made again for each physics
        return state
