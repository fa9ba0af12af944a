"""DistributedPhysics: many operators of one image, each on the workers that have it.

The image is one shared value, and its layout determines which workers hold it together: a row. An
image that is whole on every worker has rows of one worker. The operators are divided among the
rows, and each works on the parts of its row: one with a local kernel by halos, any other on the
whole image, on one worker of the row. A measurement stays where it is computed, and adjoints are
summed over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from typing import Any, ClassVar

import torch
from torch import Tensor

from tessel.core import (
    Agreement,
    Layout,
    Move,
    Partition,
    Shape,
    Signature,
    TensorMeta,
    agree,
    anchored_zeros,
    grad_alike,
    same,
    setting,
    shared_whole,
)
from tessel.imaging.context import DistributedContext, local_indices
from tessel.imaging.measurements import LocalTensors, checked_count
from tessel.imaging.parameters import (
    WAY_OUT,
    Copies,
    anchor_of,
    both,
    check_common,
    computing_with,
    depending_on,
    gradients_of,
    in_common,
    learned,
    needs_grad,
    tensors_held_by,
    tensors_of,
    unshared_problem,
)
from tessel.imaging.parts.local_rules import partition_physics
from tessel.imaging.parts.operators import DTYPES, RowOperator
from tessel.imaging.parts.rows import NO_ARGUMENTS, CallArguments, rows_of_operators
from tessel.imaging.problems import Problem, made_by_all, noticed, raised
from tessel.imaging.signal import Image, local_data

Factory = Callable[[int, torch.device, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class OperatorCall:
    """The inputs of a call, after all workers agreed on them."""

    name: str  # in the words of its user
    x: Tensor  # this row's copy of the image, empty if there is none
    has_image: bool
    pairs: list[tuple[RowOperator, Tensor]]  # operators, each with its input
    needs_grad: bool
    anchor: Tensor | None  # a zero on which the result must depend
    copies: Copies
    users: tuple[Any, ...]
    args: tuple[Any, ...]
    settings: Mapping[str, Any]
    kind: tuple[Any, ...]  # identifies calls that are known to work
    problems: list[Problem] = field(default_factory=list)  # noticed during the computation


Term = Callable[[RowOperator, Tensor, OperatorCall], Tensor]  # of operator, input, call
# The term of the adjoint derivative at the image of the call.
AT_IMAGE: Iterable[Term] = repeat(lambda op, v, call: op.A_vjp(call.x, v))


def _called(method: str) -> Iterable[Term]:
    """For each operator, a term that calls its method of this name."""
    return repeat(lambda op, value, call: getattr(op, method)(value, **call.settings))


class DistributedPhysics:
    """Operators A_0, …, A_{N−1} of one image, spread over workers.

    Forward:  y_i = A_i(x), for the operators i of this worker.

    An operator is any object with a method `A`. Its derivative is computed with `A_vjp` or
    `A_adjoint` if it has them, else by autograd.

    Args:
        ctx: the workers.
        num_ops: the number N of operators.
        factory: `factory(i, device, shared)` makes operator i; called on its worker only.
        shared: objects that all operators may use, by name. Tensors and modules in it are shared by
            all workers: those that need gradients get that of all operators, on every worker.
            Others get that of the operators of this worker. They are looked for in modules and
            attributes: if operators use one that is not found there, such as a global tensor or one
            in a closure, or if operators of several workers hold the same one, calls that would
            differentiate it raise ValueError.
        layout: the layout of an image in parts, whose operators all workers of a row have; None for
            the whole image on every worker. Along shared axes of the grid there are copies of the
            image, each with some of the operators.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import DistributedContext, DistributedPhysics
    >>> with DistributedContext() as ctx:
    ...     scale = lambda i, device, shared: SimpleNamespace(A=lambda x: (i + 1) * x)
    ...     DistributedPhysics(ctx, 2, scale).A(torch.ones(1))
    [tensor([1.]), tensor([2.])]
    """

    methods: ClassVar[tuple[str, ...]] = ("A",)  # required of each operator

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
        self._label = f"{name}({self.num_ops} operators over {ctx.world_size} workers)"
        seed = ctx.seed_for(f"{name}(num_ops={self.num_ops})")
        # Before operators are made: a factory may keep them, and their tensors are their own.
        held = tensors_held_by((factory, self.shared))
        self.rows = rows_of_operators(layout, ctx.partition)
        self.layout, self.partition = self.rows.layout, self.rows.layout.partition
        self.active = self.partition.active
        row = self.rows.place_of(ctx.rank) if self.active else 0
        self.place = self.rows.name_of(ctx.rank) if self.active else "no copy of the image"
        mine = local_indices(self.num_ops, row, self.rows.count, ctx.sharding)
        self.local_indices: list[int] = mine if self.active else []
        self.local_operators = made_by_all(
            ctx,
            f"the operators of {self._label}",
            lambda: [self._made(factory, i, seed) for i in self.local_indices],
        )
        self._spread: list[RowOperator] = [
            partition_physics(physics, self.rows.own, self._owner(position))
            for position, physics in enumerate(self.local_operators)
        ]
        self._common = in_common(ctx, held, self.place, self.local_operators)
        self._checked: set[tuple[Any, ...]] = set()  # calls that are known to work on all workers
        # The workers of rows that have operators: with more rows than operators, some have none.
        self._owners = [
            worker
            for worker in self.partition.ranks
            if local_indices(
                self.num_ops, self.rows.place_of(worker), self.rows.count, ctx.sharding
            )
        ]
        self._agreements: dict[tuple[str, str, bool], Agreement[tuple[Shape, TensorMeta]]] = {}
        self._num_calls = 0

    def A(self, x: Image, **settings: Any) -> LocalTensors:
        """The measurements y_i = A_i(x) of this worker's operators, without noise."""
        return self._each("A", x, **settings)

    def __call__(self, x: Image, **settings: Any) -> LocalTensors:
        """The measurements with noise; that of measurement i depends on the seed and on i.

        Without a seed in the context it depends on i and on a number that worker 0 draws from
        torch's generator. With an image in parts, each operator that can be called gets all of it,
        on one worker: noise is that of one process. For images that no worker can hold, add noise
        to `A(x)` yourself.
        """
        seed, number = self.ctx.seed, self._num_calls
        self._num_calls += 1
        if seed is None:  # a new one for each call, since torch's generator has advanced
            seed, number = self.ctx.seed_for(f"{self._label}.__call__"), 0

        def measured(position: int, operator: RowOperator, x: Tensor, call: OperatorCall) -> Tensor:
            physics, owner = self.local_operators[position], self._owner(position)
            if not callable(physics):
                return operator.A(x, **call.settings)
            with self.ctx.drawing(self.local_indices[position], number, seed):
                return operator.measured(physics, x, owner, **call.settings)

        terms = [partial(measured, position) for position in range(len(self._spread))]
        return self._each("__call__", x, None, terms, self.local_operators, **settings)

    def A_vjp(self, x: Image, v: Sequence[Tensor]) -> Tensor:
        """The sum Σ_i J_i(x)ᵀ v_i over all operators, with the Jacobians J_i of A_i at x.

        Args:
            x: the image.
            v: one tensor for each of this worker's operators.
        """
        return self._summed("A_vjp", x, v, AT_IMAGE)

    def part_of(self, position: int, y: Tensor) -> Tensor:
        """This worker's part of a measurement, which is passed whole or as this part.

        Args:
            position: the position of the operator among those of this row.
            y: the whole measurement, or this worker's part.
        """
        return self._spread[position].part_of(y, f"measurement {self.local_indices[position]}")

    def everywhere(self, value: Tensor) -> Tensor:
        """A shared value of the workers that have parts of the image, sent to all workers."""
        ours, theirs = self.ctx.partition, self.partition
        if theirs.size == ours.size:
            return value
        # Workers without a part do not know the shape and dtype of the value, and learn them first.
        said, own = f"a value of {self._label}", Signature.of(value)
        shape, _ = self.agree_on_result(said, own, "value of all workers", theirs.ranks, ours)
        move = Move(shared_whole(theirs, shape), shared_whole(ours, shape))
        return move(value if theirs.active else value.new_empty(0))

    def __len__(self) -> int:
        return self.num_ops

    def __getstate__(self) -> dict[str, Any]:
        """The state without groups of workers, which a copy makes again in its calls."""
        return {**self.__dict__, "_agreements": {}}

    def __repr__(self) -> str:
        return self._label

    def _made(self, factory: Factory | None, item: int, seed: int) -> Any:
        assert factory is not None
        with self.ctx.drawing(item, seed=seed):  # the same numbers on any worker
            operator = factory(item, self.ctx.device, self.shared)
        missing = [name for name in self.methods if not hasattr(operator, name)]
        if missing:
            several = "methods" if len(self.methods) > 1 else "a method"
            nonlinear = "; DistributedPhysics needs no A_adjoint" if "A" not in missing else ""
            raise ValueError(
                f"{type(self).__name__}: factory({item}, …) must return an object with {several} "
                f"{' and '.join(self.methods)}, got {operator!r}{nonlinear}"
            )
        return operator

    def _owner(self, position: int) -> int:
        """The worker that applies an operator to the whole image, if necessary."""
        ranks = self.rows.own.partition.ranks
        return ranks[position % len(ranks)]

    def check_call(
        self,
        call: str,
        values: Sequence[Tensor] | None,
        shared: Any = (),
        arguments: CallArguments = NO_ARGUMENTS,
        gather: bool = True,
    ) -> None:
        """Raise on all workers if this call cannot be made; see `enter`."""
        # Other workers may have the right number, and would wait for this one: all are told.
        if values is not None and len(values) != len(self.local_operators):
            call += (
                f": worker {self.ctx.rank} has the operators {self.local_indices} and needs as "
                f"many tensors, {len(self.local_indices)}, got {len(values)}"
            )
            agree(self.partition, call)
            raise ValueError(call)
        if self._common:
            check_common(self._label, self._common, (self.shared, shared), WAY_OUT)
        self.rows.check_call(call, arguments, gather)

    def _each(
        self,
        method: str,
        x: Image | None = None,
        ys: Sequence[Tensor] | None = None,
        terms: Iterable[Term] | None = None,
        users: Any = (),
        **settings: Any,
    ) -> LocalTensors:
        """The result of each of this worker's operators for the image or its measurement.

        Args:
            method: the method that is called.
            x: the image.
            ys: one tensor for each operator; None if all of them use the image.
            terms: for each operator, a function that computes a tensor from it, its input and the
                call; None for its own method.
            users: further objects whose parameters the terms use.
            settings: settings of the operators.
        """
        image = None if x is None else local_data(x)
        said = f"{self._label}.{method}"
        call = self.enter(said, image, ys, users=users, arguments=((), settings))
        if call is None:
            return LocalTensors()
        with self.computing(call) as parameters:
            each = zip(call.pairs, terms or _called(method), strict=False)
            found = [term(*pair, call) for pair, term in each]
        self.check_results(call, found)
        anchor = both(call.anchor, parameters)
        if call.needs_grad:
            anchor = both(anchor, anchored_zeros((), call.x))
        return LocalTensors([depending_on(each, anchor) for each in found], anchor)

    def _summed(
        self,
        method: str,
        x: Image | None = None,
        ys: Sequence[Tensor] | None = None,
        terms: Iterable[Term] | None = None,
        **settings: Any,
    ) -> Tensor:
        """The same, summed over all operators: parts of an image."""
        image = None if x is None else local_data(x)
        call = self.enter(f"{self._label}.{method}", image, ys, arguments=((), settings))
        if call is None:
            return torch.empty(0) if image is None else image
        return self.sum(call, terms or _called(method))

    def enter(
        self,
        call: str,
        x: Tensor | None,
        measured: Sequence[Tensor] | None = None,
        fidelities: Sequence[Any] | None = None,
        shared: Any = (),
        users: Any = (),
        arguments: CallArguments = NO_ARGUMENTS,
        gather: bool = True,
    ) -> OperatorCall | None:
        """The inputs of a call, after all workers agreed on them, or raised.

        A worker without a part of the image gets None.

        Args:
            call: the method that is called, or the value that is computed, in words.
            x: this worker's part of the image; None if there is none yet.
            measured: one tensor for each operator; None if all of them use the image.
            fidelities: one `PartFidelity` for each operator.
            shared: objects that fidelities of all rows use, whose parameters get the gradient of
                all of them; other parameters of fidelities get that of this row.
            users: further objects whose parameters are used.
            arguments: arguments of operators or fidelities, for whole images only.
            gather: whether the result is that of all rows, or the share of this one.
        """
        self.check_call(call, measured, shared, arguments, gather)
        if not self.active:
            return None
        everyones_objects = (self.shared, shared)
        everyones = learned(everyones_objects, arguments)
        said = f"{call}{gradients_of(everyones)}" if everyones else call
        meta, own = self._agreed(said, x, measured, fidelities, users, everyones)
        # Graphs of all workers must be alike: a worker whose tensors need no gradient takes part in
        # the sums of those that do.
        ys = list(measured or ())
        if self.rows.size > 1:  # the workers have parts of one measurement
            ys = [grad_alike(y, meta) for y in ys]
        if x is None:
            image = grad_alike(torch.empty(0, dtype=meta.dtype, device=self.ctx.device), meta)
        else:
            rows = self.rows.of(x.shape)
            if self.ctx.debug and rows.layout.shared:
                self.ctx.check_same(x, rows.layout, f"the input of {call}")
            image = rows.use(grad_alike(x, meta))
        # Only after all agreed on the required gradients: a copy is a node of the graph whose
        # adjoint sums over workers, so that all of them must make the same ones.
        copies, (args, settings) = Copies(), arguments
        if everyones or own:
            copies.add(everyones, self.partition)
            copies.add(own, self.rows.own.partition)
            args, settings = copies.instead(arguments)
        return OperatorCall(
            call,
            image,
            x is not None or measured is None,
            list(zip(self._spread, ys or [image] * len(self._spread), strict=True)),
            meta.needs_grad,
            anchor_of(measured),
            copies,
            (*everyones_objects, self.local_operators, fidelities, users),
            args,
            settings,
            (call, torch.is_grad_enabled(), image.dtype, image.shape),
        )

    def _agreed(
        self,
        said: str,
        x: Any,
        measured: Sequence[Any] | None,
        fidelities: Any,
        users: Any,
        everyones: Sequence[Tensor],
    ) -> tuple[TensorMeta, list[Tensor]]:
        """The inputs of all workers, and the parameters that only this row's objects learn.

        All workers of the row hold these parameters, and their gradients are summed over the row.
        """
        has_image = x is not None or measured is None
        if self.rows.known_shape is None:
            # Without an image, shape and dtype are learned from the result.
            if not has_image or (self.rows.count == 1 and isinstance(x, Tensor)):
                return TensorMeta(torch.float32, self.ctx.device.type, needs_grad(x), False), []
            return self._agreement(said, "shape").agree_on(x)[1], []
        problem = self._problem(x, measured, fidelities)
        if problem:  # the others' texts differ: all raise, and quote this one
            agree(self.partition, f"{said}{problem}")
            raise ValueError(f"{said}{problem}")
        ys, learns, own = measured or (), False, list[Tensor]()
        if torch.is_grad_enabled():
            known = {id(each) for each in everyones}
            inside = [each.users() for each in self._spread]
            own = [e for e in learned((inside, fidelities, users)) if id(e) not in known]
            values = chain.from_iterable(each.values() for each in self._spread)
            learns = any(map(needs_grad, (x, *ys, anchor_of(measured), *everyones, *own, *values)))
        # Shapes were just checked. Rows without operators have no input if there is no image, and
        # learn the dtype from the others.
        brought = (*ys, x)[0]
        dtype, device = (None, "cpu") if brought is None else (brought.dtype, brought.device.type)
        # Measurements of one image may be complex in one row and real in another.
        if dtype is not None:
            is_complex = x is not None and x.is_complex()
            dtype = dtype.to_complex() if is_complex else dtype.to_real()
        signature = Signature((), dtype, device, learns, not torch.is_grad_enabled())
        agreement = self._agreement(said, givers=None if has_image else self._owners)
        return agreement.agree_on(signature)[1], own

    def _problem(self, x: Any, ys: Sequence[Any] | None, fidelities: Sequence[Any] | None) -> str:
        """What is wrong with this worker's parts, as the end of a sentence."""
        for each in (*(ys or ()), *([] if x is None else [x])):
            got = each.dtype if isinstance(each, Tensor) else type(each).__name__
            if got not in DTYPES:
                return (
                    f": worker {self.ctx.rank} expected tensors of floating point or complex "
                    f"numbers, got {got}"
                )
        expected = self.rows.known_shape
        if x is not None and tuple(x.shape) != expected:
            return (
                f": worker {self.layout.partition.rank} expected a part of shape {expected}, got "
                f"{tuple(x.shape)}"
            )
        what, brought = "image", x
        if x is None:
            what, brought = "measurement", next(iter(ys or ()), None)
        dtype = None if brought is None else brought.dtype
        each = zip(self.local_indices, self._spread, ys or repeat(None), strict=False)
        for (i, operator, y), fidelity in zip(each, fidelities or repeat(None), strict=False):
            problem = operator.problem(dtype, y, f"{i}", what)
            if not problem and fidelity is not None and operator.is_local:
                problem = fidelity.problem
            if problem:
                return problem
        return ""

    @contextmanager
    def computing(self, call: OperatorCall) -> Iterator[Tensor | None]:
        """Let operators compute with copies of parameters; yields a zero that depends on them.

        In a first call all workers are told of an error of one operator: the others would wait.
        """
        try:
            with (
                setting(noticed, None if call.kind in self._checked else call.problems),
                computing_with(call.copies, call.users) as parameters,
            ):
                yield parameters
        except Exception as error:  # any exception of user code: others would wait for this worker
            # In a row of several workers the others may wait in a move: exceptions of user code
            # were noticed there (`attempted`), and no worker can be told of others.
            if self.rows.size == 1 and call.kind not in self._checked:
                problem = raised(error)
                # Most often the precisions differ, and torch's message does not say whose.
                real, numbers = call.x.dtype.to_real(), tensors_of(call.users)
                held = {e.dtype for e in numbers if e.is_floating_point() or e.is_complex()}
                others = sorted(str(each) for each in held if each.to_real() != real)
                if call.has_image and others:
                    problem += (
                        f" (the image has {call.x.dtype}, and objects that compute hold "
                        f"{', '.join(others)})"
                    )
                agree(self.partition, f"{call.name}, which raised {problem}")
            raise

    def check_results(self, call: OperatorCall, results: Sequence[Tensor]) -> None:
        """Raise if a parameter that is not found in user objects would get a partial gradient."""
        # With an image in parts, each operator was also checked where it was applied.
        problem, cause = next(iter(call.problems), ("", None))
        if not problem and self.rows.count > 1 and torch.is_grad_enabled():
            given = [brought for _, brought in call.pairs]
            problem = unshared_problem(results, call.users, call.users[:2], given)
        # In the first call all workers raise or none does: one without operators finds nothing
        # itself. Later calls send no message, and only the worker that finds a problem raises.
        try:
            if call.kind not in self._checked:
                agree(self.partition, f"{call.name}{problem}")
            if problem:
                raise ValueError(f"{call.name}{problem}")
        except ValueError as error:
            raise error from cause  # which shows the place in the user's code
        # A call that raised is not added: workers check it again when it is repeated.
        self._checked.add(call.kind)

    def agree_on_result(
        self,
        said: str,
        own: Signature,
        what: str,
        givers: Sequence[int] | None = None,
        partition: Partition | None = None,
    ) -> tuple[Shape, TensorMeta]:
        """Agree on the shape and dtype of a result, so that all workers know them.

        Args:
            said: the call, in words.
            own: this worker's signature; a placeholder on workers that are no givers.
            what: the result, in words.
            givers: the workers that have one; None for those with operators.
            partition: the workers; None for those that have parts of the image.
        """
        have = self._owners if givers is None else givers
        alike = f"shape of the {what}"
        return self._agreement(said, alike, have, partition).agree_on(own)

    def _agreement(
        self,
        said: str,
        alike: str = "",
        givers: Sequence[int] | None = None,
        partition: Partition | None = None,
    ) -> Agreement[tuple[Shape, TensorMeta]]:
        """The agreement on a call, and on one shape if `alike` names it.

        Args:
            said: the call, in words.
            alike: the shape that must be the same on all givers, in words.
            givers: the workers that have a tensor; None for all.
            partition: the workers; None for those that have parts of the image.
        """
        # Cached, since an agreement remembers its conclusions from known signatures.
        key = said, alike, givers is None
        found = self._agreements.get(key)
        if found is None:

            def conclude(shapes: dict[int, Shape], meta: TensorMeta) -> tuple[Shape, TensorMeta]:
                return same(shapes, alike, said) if alike else (), meta

            everyone = partition or self.partition
            have = everyone.ranks if givers is None else givers
            found = self._agreements[key] = Agreement(everyone.prepare(), said, have, conclude)
        return found

    def sum(self, call: OperatorCall, terms: Iterable[Term], gather: bool = True) -> Tensor:
        """The sum of images over the operators of this row and of the others.

        Args:
            call: the inputs.
            terms: for each operator, a function that computes an image from it, its input and the
                call.
            gather: False: the share of this row.
        """
        share, x, is_ours = None, call.x, False
        with self.computing(call) as parameters:
            for pair, term in zip(call.pairs, terms, strict=False):
                each = term(*pair, call)
                is_like = each.shape == x.shape and each.dtype == x.dtype
                if call.has_image and not is_like:
                    problem = (
                        f": an operator returned an image of shape {tuple(each.shape)} and "
                        f"{each.dtype} for one of shape {tuple(x.shape)} and {x.dtype}"
                    )
                    call.problems.append((problem, None))
                    break
                if share is None:
                    # Terms on parts are results of moves and may be changed in place; user code may
                    # return its input, so that the first sum of its images must be a new tensor.
                    share, is_ours = each, not pair[0].is_alone
                elif share.requires_grad or each.requires_grad or not is_ours:
                    share, is_ours = share + each, True
                else:
                    share.add_(each)
        # Before the sum, in which the others would wait for a worker that raises.
        self.check_results(call, [] if share is None else [share])
        meta: TensorMeta | None = None
        if not call.has_image and self.rows.count > 1:
            share, meta = self.completed(call.name, share)
        if share is None:
            share = x.new_zeros(self.rows.of(x.shape).layout.local_shape)
        if call.needs_grad:
            share = depending_on(share, anchored_zeros((), x))
        share = depending_on(depending_on(share, parameters), call.anchor)
        return self.rows.of(share.shape).total(share, meta) if gather else share

    def completed(self, said: str, share: Tensor | None) -> tuple[Tensor, TensorMeta]:
        """The image of the operators, zero on workers without any, and the agreed metadata."""
        own = Signature.of(torch.empty(0, device=self.ctx.device) if share is None else share)
        known_shape = self.rows.known_shape  # set for parts, whose shapes differ
        own = own if known_shape is None else replace(own, shape=())
        shape, meta = self.agree_on_result(said, own, "image that A_adjoint gives")
        if share is None:
            shape = shape if known_shape is None else known_shape
            share = torch.zeros(shape, dtype=meta.dtype, device=self.ctx.device)
        return share, meta
