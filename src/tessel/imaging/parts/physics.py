"""Physics of many operators on one image: whole on every worker, or in parts.

The layout of the image says which workers hold it together: a row. An image that is whole on every
worker has rows of one worker. The operators are given to the rows, and each works on the parts of
its row: one with a local kernel by halos, any other on the whole image, on one worker of the row.
Its measurement stays where it arises. What goes back to the image is summed over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessel.core.agreement import Agreement, Signature, TensorMeta, same
from tessel.core.layout import Layout, Shape
from tessel.core.partition import Partition
from tessel.core.shared import anchored_zeros, grad_alike, total
from tessel.distributed.agreeing import agree, agree_on_call
from tessel.imaging import sharding as shardings
from tessel.imaging.checksum import checksum_of
from tessel.imaging.context import DistributedContext
from tessel.imaging.measurements import anchor_of
from tessel.imaging.parameters import (
    Copies,
    StrayCheck,
    both,
    computing_with,
    depending_on,
    described,
    known,
    learned,
    learned_arguments,
    needs_grad,
)
from tessel.imaging.parts.fidelity import PartFidelity
from tessel.imaging.parts.grid import rows_of
from tessel.imaging.parts.local_rules import rule_of
from tessel.imaging.parts.operators import PartOperator, Whole, gathering
from tessel.transport import NUM_WORDS, code_of

Operator = PartOperator | Whole
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]  # positional, and by name
_NO_ARGUMENTS: Arguments = (), {}
_KINDS = (
    *(torch.bool, torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128),
)  # of images; the first stands for workers that bring nothing


@dataclass(frozen=True)
class OperatorCall:
    """What a call works on, after all workers agreed that it fits together."""

    name: str  # in the words of its user
    x: Tensor  # this row's copy of the image, empty if there is none
    has_image: bool
    pairs: list[tuple[Operator, Tensor]]  # operators, each with what was brought for it
    needs_grad: bool
    anchor: Tensor | None  # a zero on which the result shall depend
    copies: Copies
    users: tuple[Any, ...]
    args: tuple[Any, ...]
    settings: dict[str, Any]

    @contextmanager
    def computing(self) -> Iterator[Tensor | None]:
        """Let objects compute with copies of parameters; an anchor that depends on these."""
        with computing_with(self.copies, self.users):
            yield self.copies.anchor


def partition_physics(physics: Any, layout: Layout, owner: int | None = None) -> Operator:
    """An operator for an image in parts: the same as `physics` on the whole image.

    An operator with a local kernel, which is one that has a `filter`, `padding`, `factor` or
    `mask` and does what these say, adjoint included, works on the parts and on halos. Any other is
    applied to the whole image, on one worker.

    Args:
        physics: an object with `A`, and `A_adjoint` if it is linear; equal on all workers.
        layout: of the image, in parts.
        owner: the worker that applies an operator without local kernel, by default the first one.

    >>> import tessel, torch
    >>> from types import SimpleNamespace
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> blank = SimpleNamespace(mask=torch.tensor([1.0, 0.0]), A=lambda x: x * blank.mask)
    >>> tessel.imaging.parts.partition_physics(blank, tessel.Layout.balanced(P, (1, 2))).is_local
    True
    """
    rule = rule_of(physics, layout.shape)
    first = layout.partition.ranks[0]
    operator: Operator = (
        Whole(physics, layout, first if owner is None else owner) if rule is None else rule(layout)
    )
    values = operator.values() if isinstance(operator, PartOperator) else []
    held = (
        f" made of tensors with the checksum {checksum_of(values):x}, which must be equal on all "
        f"workers (random ones are inside of `with ctx.shared_random():`)"
    )
    call = f"partition_physics of {operator.identity}"
    agree_on_call(layout.partition, f"{call}{held}" if values else call)
    return operator


class PartitionedPhysics:
    """Operators A_0, …, A_{N−1} of one image.

    Args:
        layout: of the image. Axes of the grid along which it is shared are for operators: each
            row of workers that holds a copy has some of them. Without such axes all workers take
            part in all operators. A partition, instead of a layout: every worker of it has the
            whole image, of any shape, and is a row by itself.
        num_ops: the number N of operators.
        make: `make(i)` gives operator i, on every worker of its row.
        ctx: says how operators are given to rows, where tensors lie, and whether copies of images
            are compared; None for the defaults.
        shared: objects of whole images that the operators of all workers use.
        label: whose calls these are, in the words of the user.
    """

    def __init__(
        self,
        layout: Layout | Partition,
        num_ops: int,
        make: Callable[[int], Any],
        ctx: DistributedContext | None = None,
        shared: Any = (),
        label: str = "",
    ) -> None:
        self.layout = layout if isinstance(layout, Layout) else None
        self.partition = layout.partition if isinstance(layout, Layout) else layout
        self.num_ops, self.ctx, self.shared = num_ops, ctx, shared
        self.label = label or f"{num_ops} operators on {layout}"
        self.device = torch.device("cpu") if ctx is None else ctx.device
        self.active = self.partition.active
        if self.layout is None:
            row, count = self.partition.rank, self.partition.size
            self.place = f"worker {row}"
        else:
            self.rows = rows_of(self.layout)
            row, count = self.rows.place if self.active else 0, self.rows.count
            self.place = f"copy {row} of the image" if self.active else "no copy of the image"
        assert row is not None
        self._sharding = "round_robin" if ctx is None else ctx.sharding
        mine = shardings.local_indices(num_ops, row, count, self._sharding)
        self.local_indices: list[int] = mine if self.active else []
        self.physics: list[Any] = []
        self.operators: list[Operator] = []
        for position, i in enumerate(self.local_indices):
            self.physics.append(make(i))
            self.operators.append(self._spread(self.physics[-1], position))
        self._fidelities: dict[int, PartFidelity] = {}
        self._agreements: dict[str, Agreement[tuple[Shape, TensorMeta]]] = {}
        self._check_strays = StrayCheck(self.partition)

    def _spread(self, physics: Any, position: int) -> Operator:
        if self.layout is None:
            return Whole(physics)
        return partition_physics(physics, self.rows.own, self._owner(position))

    def _owner(self, position: int) -> int:
        """The worker that sees the whole image for an operator, where one must."""
        ranks = self.rows.own.partition.ranks
        return ranks[position % len(ranks)]

    def layout_for(self, x: Tensor) -> Layout:
        """Where images as `x` lie."""
        if self.layout is not None:
            return self.layout
        return Layout.whole(self.partition, x.shape, shared=True)

    def A(self, x: Tensor, **settings: Any) -> tuple[list[Tensor], Tensor | None]:
        """The parts of the measurements y_i = A_i(x), and a zero that depends on the image."""
        return self._measurements(
            "A", x, lambda call, op, k: op.A(call.x, **call.settings), settings
        )

    def measure(
        self, x: Tensor, drawing: Callable[[int], AbstractContextManager[None]], **settings: Any
    ) -> tuple[list[Tensor], Tensor | None]:
        """The parts of the measurements with noise, and a zero that depends on the image.

        An object that can be called is called with the whole image, on one worker for each, so that
        it draws the numbers that it draws in one process; what it gives goes to the parts.

        Args:
            x: this worker's part of the image.
            drawing: `drawing(i)` is a context in which the numbers of measurement i are drawn.
            settings: of the operators.
        """

        def measured(call: OperatorCall, operator: Operator, position: int) -> Tensor:
            physics = self.physics[position]
            if not callable(physics):
                return operator.A(call.x, **call.settings)
            draws = drawing(self.local_indices[position])
            if isinstance(operator, Whole) and operator.is_alone:
                with draws:
                    return physics(call.x, **call.settings)
            gather = gathering(self.rows.own, self._owner(position))
            whole = gather.apply(call.x)
            if gather.codomain.partition.active:
                with draws:
                    y = known(physics(whole), (), (whole,))
            else:
                parameters = learned(physics)
                anchor = anchored_zeros((), *parameters) if parameters else None
                y = depending_on(anchored_zeros((0,), whole), anchor)
            if isinstance(operator, Whole):
                return y
            return gathering(operator.codomain, self._owner(position)).H.apply(y)

        return self._measurements("__call__", x, measured, settings, self.physics)

    def _measurements(
        self,
        name: str,
        x: Tensor,
        make: Callable[[OperatorCall, Operator, int], Tensor],
        settings: Mapping[str, Any],
        users: Any = (),
    ) -> tuple[list[Tensor], Tensor | None]:
        if not self.active:
            return [], None
        call = self._enter(name, x, users=users, arguments=((), settings))
        with call.computing() as parameters:
            ys = [make(call, operator, k) for k, operator in enumerate(self.operators)]
        self._check_results(call, ys)
        anchor = (
            depending_on(anchored_zeros((), call.x), parameters) if call.needs_grad else parameters
        )
        return [depending_on(y, anchor) for y in ys], anchor

    def A_adjoint(self, ys: Sequence[Tensor], anchor: Tensor | None = None) -> Tensor:
        """The parts of Σ_i A_iᵀ y_i.

        Args:
            ys: one tensor for each operator of this row.
            anchor: a zero on which the result shall depend, where there are no operators.
        """
        if not self.active:
            return torch.empty(0)
        # The shape of a whole image is not known before: it is agreed on with the result.
        call = self._enter("A_adjoint", None, ys, anchor, has_image=False)
        return self._sum(call, lambda op, y: op.A_adjoint(y))

    def A_vjp(self, x: Tensor, vs: Sequence[Tensor], anchor: Tensor | None = None) -> Tensor:
        """The parts of Σ_i J_i(x)ᵀ v_i, with the Jacobians of the operators."""
        if not self.active:
            return x
        call = self._enter("A_vjp", x, vs, anchor)
        return self._sum(call, lambda op, v: op.A_vjp(call.x, v))

    def A_adjoint_A(self, x: Tensor, **settings: Any) -> Tensor:
        """The parts of Σ_i A_iᵀ A_i x."""
        if not self.active:
            return x
        call = self._enter("A_adjoint_A", x, arguments=((), settings))
        return self._sum(call, lambda op, _: op.A_adjoint_A(call.x, **call.settings))

    def loss(
        self,
        x: Tensor,
        ys: Sequence[Tensor],
        fidelities: Sequence[Any],
        shared: Any = (),
        arguments: Arguments = _NO_ARGUMENTS,
        gather: bool = True,
    ) -> Tensor:
        """The sum Σ_i f_i(A_i(x), y_i), one shared value on all workers of the layout.

        It has a number for each image of the batch if the fidelities give that, else it is one.

        Args:
            x: this worker's part of the image.
            ys: the parts of the measurements, one for each operator of this row.
            fidelities: objects that are called `f(x, y, physics)`, one for each operator.
            shared: objects that fidelities of all rows use, whose parameters get the gradient of
                all of them; other parameters of fidelities get that of this row.
            arguments: of the fidelities of whole images.
            gather: False: this worker's share of the sum.
        """
        if not self.active:
            return x.new_zeros(())
        call = self._enter("the loss", x, ys, None, fidelities, shared, (), arguments)
        batch = x.shape[0] if self.layout is None else self.layout.shape[0]
        with call.computing() as parameters:
            losses = [
                self._fidelity(f).loss(call.x, y, operator, batch, *call.args, **call.settings)
                for f, (operator, y) in zip(fidelities, call.pairs, strict=True)
            ]
        self._check_results(call, losses)
        shape = self._shape_of_losses(call, losses, fidelities, batch)
        share = anchored_zeros(shape, call.x.real)
        for each in losses:
            share = share + each.to(share.dtype)
        share = depending_on(depending_on(share, parameters), anchor_of(ys))
        return total(share, self.partition) if gather else share

    def grad(
        self,
        x: Tensor,
        ys: Sequence[Tensor],
        fidelities: Sequence[Any],
        shared: Any = (),
        arguments: Arguments = _NO_ARGUMENTS,
        gather: bool = True,
    ) -> Tensor:
        """The parts of the gradient Σ_i ∇ f_i(A_i(x), y_i), with the arguments of `loss`."""
        if not self.active:
            return x
        call = self._enter("the gradient", x, ys, anchor_of(ys), fidelities, shared, (), arguments)
        left = iter(fidelities)
        return self._sum(
            call,
            lambda op, y: self._fidelity(next(left)).grad(
                call.x, y, op, *call.args, **call.settings
            ),
            gather,
        )

    def part_of(self, position: int, y: Tensor) -> Tensor:
        """What this worker stores of a measurement that it was given whole, or in its part.

        Args:
            position: of the operator among those of this row.
            y: the whole measurement, or this worker's part.
        """
        operator = self.operators[position]
        if isinstance(operator, Whole):
            return y if operator.here else y.new_empty(0)
        if tuple(y.shape) == operator.codomain.shape:
            return operator.codomain.local_part(y).clone()
        if tuple(y.shape) == operator.codomain.local_shape:
            return y
        raise ValueError(
            f"measurement {self.local_indices[position]} must have the shape "
            f"{operator.codomain.shape} of the whole, or {operator.codomain.local_shape}, this "
            f"worker's part of it, got {tuple(y.shape)}"
        )

    def inner(self, ys: Sequence[Tensor], zs: Sequence[Tensor]) -> Tensor:
        """The inner product Σ_i ⟨y_i, z_i⟩ of measurements in parts, a shared number."""
        shares = [torch.vdot(y.reshape(-1), z.reshape(-1)) for y, z in zip(ys, zs, strict=True)]
        share = sum(shares[1:], shares[0]) if shares else torch.zeros(())
        return total(share, self.partition)

    def each(
        self,
        name: str,
        term: Callable[[Operator, Tensor, OperatorCall], Tensor],
        x: Tensor | None = None,
        ys: Sequence[Tensor] | None = None,
        anchor: Tensor | None = None,
        **settings: Any,
    ) -> tuple[list[Tensor], Tensor | None]:
        """What each of this worker's operators makes of whole images, and an anchor of these.

        Args:
            name: of the method that is called.
            term: makes a tensor of an operator, of what was brought for it, and of the call.
            x: the image.
            ys: one tensor for each operator.
            anchor: of the tensors.
            settings: of the operators.
        """
        has_image = ys is None or x is not None
        call = self._enter(name, x, ys, anchor, arguments=((), settings), has_image=has_image)
        with call.computing() as parameters:
            found = [term(operator, brought, call) for operator, brought in call.pairs]
        self._check_results(call, found)
        if call.needs_grad and call.has_image:
            anchor = both(anchor, anchored_zeros((), call.x))
        anchor = both(anchor, parameters)
        return [depending_on(each, anchor) for each in found], anchor

    def _enter(
        self,
        name: str,
        x: Tensor | None,
        measured: Sequence[Tensor] | None = None,
        anchor: Tensor | None = None,
        fidelities: Sequence[Any] | None = None,
        shared: Any = (),
        users: Any = (),
        arguments: Arguments = _NO_ARGUMENTS,
        has_image: bool = True,
    ) -> OperatorCall:
        """What goes into a call, after all workers agreed that it fits together."""
        ys, images = list(measured or ()), [x] if has_image else []
        everyones = [*learned_arguments(arguments), *learned((self.shared, shared))]
        used = (self.shared, shared, self.physics, fidelities, users)
        own: list[Tensor] = []
        if self.layout is not None:  # in rows of one worker there is nothing to sum
            whole = [each.physics for each in self.operators if isinstance(each, Whole)]
            known_to_all = {id(each) for each in everyones}
            own = learned((whole, fidelities, users))
            own = [each for each in own if id(each) not in known_to_all]
        problem = self._problem(x, measured, fidelities)
        call = f"{name} of {self.label}" if name.startswith("the ") else f"{self.label}.{name}"
        said = f"{call}{described(everyones)}{problem}"
        needs = [*ys, *([] if anchor is None else [anchor]), *everyones]
        if self.layout is None:
            of_image = has_image and self._agree_on_whole(said, x)
            records, dtype = of_image or any(map(needs_grad, needs)), torch.float32
        else:
            needs += [*self._values, *own]
            dtype, records = self._agree_on_parts(said, images, ys, needs, problem)
            of_image, ys = records, [_even(y, records) for y in ys]
        if x is None:  # in rows of one worker, nothing depends on what stands for an image
            image = torch.empty(0, dtype=dtype, device=self.device)
            image = _even(image, records and self.layout is not None)
        else:
            layout = self.layout_for(x)
            if self.ctx is not None and self.ctx.debug and layout.shared:
                self.ctx.check_same(x, layout, f"the input of {call}")
            image = rows_of(layout).use(_even(x, of_image))
        copies = Copies()
        copies.add(everyones, self.partition)
        if own:
            copies.add(own, self.rows.own.partition)
        pairs = list(zip(self.operators, ys or [image] * len(self.operators), strict=True))
        args, settings = copies.instead(arguments)
        return OperatorCall(
            call, image, has_image, pairs, records, anchor, copies, used, args, settings
        )

    def _agree_on_whole(self, said: str, x: Tensor | None) -> bool:
        """Whether the gradient of a whole image is needed, of one shape on all workers."""
        if self.partition.size == 1 and isinstance(x, Tensor):
            return needs_grad(x)
        ((shapes, meta),) = agree(self.partition, said, x)  # type: ignore[arg-type]
        same(shapes, "shape", said)
        return meta.needs_grad

    def _agree_on_parts(
        self, said: str, images: list[Any], ys: list[Tensor], needs: list[Tensor], problem: str
    ) -> tuple[torch.dtype, bool]:
        """The dtype of all that is brought, and whether a gradient is needed somewhere."""
        given = [each for each in (*ys, *images) if isinstance(each, Tensor)]
        # A worker may bring nothing. The length of this tensor says what kind of tensors it brings,
        # so that those without learn it.
        kind = _KINDS.index(given[0].dtype) if given else 0
        sign = torch.empty(kind, requires_grad=any(each.requires_grad for each in needs))
        found = agree(self.partition, said, sign, *images)
        kinds = {shape for shape in found[0][0].values() if shape != (0,)}
        if len(kinds) > 1:
            names = ", ".join(str(_KINDS[each]) for (each,) in sorted(kinds))
            raise ValueError(f"{said}: all workers must bring one dtype, got {names}")
        if problem:
            raise ValueError(said)
        dtype = _KINDS[max(kinds)[0]] if kinds else torch.get_default_dtype()
        return dtype, any(meta.needs_grad for _, meta in found)

    def _problem(
        self, x: Tensor | None, ys: Sequence[Tensor] | None, fidelities: Sequence[Any] | None
    ) -> str:
        """What is wrong with this worker's parts, as the end of a sentence."""
        if self.layout is None:
            return ""
        if x is not None and tuple(x.shape) != self.layout.local_shape:
            worker = self.layout.partition.rank
            return (
                f": worker {worker} expected a part of shape {self.layout.local_shape}, "
                f"got {tuple(x.shape)}"
            )
        if ys is None:
            return ""
        if fidelities is not None and len(fidelities) != len(ys):
            return f": {len(ys)} measurements need as many fidelities, got {len(fidelities)}"
        if len(ys) != len(self.operators):
            return f": operators {self.local_indices} need as many measurements, got {len(ys)}"
        for i, operator, y in zip(self.local_indices, self.operators, ys, strict=False):
            if isinstance(operator, PartOperator):
                expected = operator.codomain.local_shape
                if tuple(y.shape) != expected:
                    return f": measurement {i} must be of shape {expected}, got {tuple(y.shape)}"
        tried = [
            self._fidelity(each).problem
            for each, operator in zip(fidelities or (), self.operators, strict=False)
            if isinstance(operator, PartOperator)
        ]
        return next(filter(None, tried), "")

    def _fidelity(self, fidelity: Any) -> PartFidelity:
        """A fidelity on parts; what it is, is found out once."""
        if id(fidelity) not in self._fidelities:
            self._fidelities[id(fidelity)] = PartFidelity(fidelity, self.device)
        return self._fidelities[id(fidelity)]

    @property
    def _values(self) -> list[Tensor]:
        """The tensors that local operators are made of."""
        local = (each for each in self.operators if isinstance(each, PartOperator))
        return [value for operator in local for value in operator.values()]

    def _check_results(self, call: OperatorCall, results: Sequence[Tensor]) -> None:
        """Raise if a parameter that is not found in user objects would get a part of a gradient."""
        if self.layout is None:  # of parts, each operator is checked where it is applied
            given = [brought for _, brought in call.pairs]
            shared = call.users[:2]
            self._check_strays(call.name, results, call.users, shared, given)

    def _shape_of_losses(
        self, call: OperatorCall, losses: Sequence[Tensor], fidelities: Sequence[Any], batch: int
    ) -> Shape:
        """One shape for the losses of all workers, some of which may have none; or all raise."""
        if self.layout is None:
            shapes = {tuple(each.shape) for each in losses}
            if len(shapes) == self.partition.size == 1:
                return shapes.pop()
            text = call.name
            if len(shapes) > 1:
                text += f": data fidelities of {self.place} give losses of shapes {shapes}"
            own = Signature(next(iter(shapes), ()), torch.float32, "cpu")
            shape, _ = self.agree_on_result(text, own, "loss")
            if len(shapes) > 1:
                raise ValueError(text)
            return shape
        # On parts a loss has not the shape of that of the whole: what fidelities do is tried.
        kinds = {self._fidelity(f).is_batched for f in fidelities}
        group = self.partition.group
        said = group.share_words([code_of(call.name), int(True in kinds), int(False in kinds)])
        group.check_same_call(said, call.name)
        words = memoryview(said).cast("q")
        some, others = (any(words[place::NUM_WORDS].tolist()) for place in (1, 2))
        if some and others:
            raise ValueError(
                f"{call.name}: some data fidelities give a number for each image of the batch and "
                f"others one number; let all give the same"
            )
        return (batch,) if some else ()

    def agree_on_result(self, said: str, own: Signature, what: str) -> tuple[Shape, TensorMeta]:
        """The shape and kind of a result, which workers without operators learn so."""
        if said not in self._agreements:
            count, workers, how = self.num_ops, self.partition.size, self._sharding
            owners = sorted({shardings.owner(i, count, workers, how) for i in range(count)})

            def conclude(shapes: dict[int, Shape], meta: TensorMeta) -> tuple[Shape, TensorMeta]:
                return same(shapes, f"shape of the {what}", said), meta

            self._agreements[said] = Agreement(self.partition.group, said, owners, conclude)
        found = self._agreements[said].agree(own)
        self.partition.group.number_call()
        return found

    def _sum(
        self, call: OperatorCall, term: Callable[[Operator, Tensor], Tensor], gather: bool = True
    ) -> Tensor:
        """The sum of images over the operators of this row and of the others.

        Args:
            call: what it works on.
            term: makes an image of an operator and of what was brought for it.
            gather: False: the share of this row.
        """
        share: Tensor | None = None
        # Terms on parts come from movements and are ours to change; user code may give back what
        # it was given, so that the first sum of its images is a tensor of its own.
        is_ours = self.layout is not None
        with call.computing() as parameters:
            for operator, brought in call.pairs:
                each = term(operator, brought)
                self._check_image(call, each)
                if share is None:
                    share = each
                elif call.needs_grad or each.requires_grad or not is_ours:
                    share, is_ours = share + each, True
                else:
                    share.add_(each)
        self._check_results(call, [] if share is None else [share])
        return self._totalled(call, share, parameters, gather)

    def _check_image(self, call: OperatorCall, image: Tensor) -> None:
        """Raise ValueError unless an operator gave back an image of the kind that it got."""
        x = call.x
        is_like = image.shape == x.shape and image.dtype == x.dtype
        if self.layout is None and call.has_image and not is_like:
            raise ValueError(
                f"{call.name}: for an image of shape {tuple(x.shape)} and {x.dtype} an operator "
                f"gave back one of shape {tuple(image.shape)} and {image.dtype}"
            )

    def _totalled(
        self, call: OperatorCall, share: Tensor | None, parameters: Tensor | None, gather: bool
    ) -> Tensor:
        """The sum of all rows' shares, which may be missing."""
        meta: TensorMeta | None = None
        if self.layout is None and not call.has_image and self.partition.size > 1:
            share, meta = self.completed(call.name, share)
        if share is None:
            shape = call.x.shape if self.layout is None else self.layout.local_shape
            share = call.x.new_zeros(shape)
        if call.needs_grad and (call.has_image or self.layout is not None):
            share = share + anchored_zeros((), call.x)
        share = depending_on(depending_on(share, parameters), call.anchor)
        return rows_of(self.layout_for(share)).total(share, meta) if gather else share

    def completed(self, said: str, share: Tensor | None) -> tuple[Tensor, TensorMeta]:
        """A result of whole images, zero on workers without operators, and what all agreed on."""
        own = torch.empty(0, device=self.device) if share is None else share
        shape, meta = self.agree_on_result(said, Signature.of(own), "image that A_adjoint gives")
        if share is None:
            share = torch.zeros(shape, dtype=meta.dtype, device=self.device)
        return share, meta


def _even(x: Tensor, needs_grad: bool) -> Tensor:
    return grad_alike(x, TensorMeta(x.dtype, x.device.type, needs_grad, False))
