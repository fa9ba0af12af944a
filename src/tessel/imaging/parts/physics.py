"""Physics on an image in parts: operators with a local kernel by halos, others by the whole image.

Every operator works on the parts of its row of workers. Its measurement stays where it arises:
that of a local operator in parts, beside those of the image; that of any other on one worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tessel.agreement import Terms
from tessel.distributed.agreeing import agree, agree_on_call
from tessel.distributed.movements import copying
from tessel.imaging import sharding as shardings
from tessel.imaging.checksum import checksum_of
from tessel.imaging.parts.fidelity import PartFidelity
from tessel.imaging.parts.grid import Rows, rows_of
from tessel.imaging.parts.operators import PartOperator, Whole, gathering
from tessel.imaging.parts.recognition import rule_of
from tessel.imaging.uses import Slot, hang, idle, known, replaced, slots_of
from tessel.layout import Layout
from tessel.shared import even, nothing, total
from tessel.transport import NUM_WORDS, code_of

Operator = PartOperator | Whole
_KINDS = (
    *(torch.bool, torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128),
)  # of images; the first stands for workers that bring nothing


@dataclass(frozen=True)
class Parameters:
    """Tensors that need a gradient, of objects that several workers have.

    Args:
        rows: the rows of workers that hold the image.
        own: where objects of this row keep such tensors.
        everyones: where objects of all rows do.
        users: where objects of this row keep tensors of `everyones`.
    """

    rows: Rows
    own: list[Slot] = field(default_factory=list)
    everyones: list[Slot] = field(default_factory=list)
    users: list[Slot] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Rows, own: Any, everyones: Any = ()) -> Parameters:
        """Those of objects of a row, and of objects that all rows have."""
        shared = slots_of(everyones)
        known = {id(slot.tensor) for slot in shared}
        apart = [slot for slot in slots_of(own) if id(slot.tensor) not in known]
        users = [slot for slot in slots_of(own) if id(slot.tensor) in known]
        return cls(rows, apart, shared, users)

    @property
    def tensors(self) -> list[Tensor]:
        return [slot.tensor for slot in (*self.own, *self.everyones)]

    @contextmanager
    def in_use(self) -> Iterator[Tensor | None]:
        """Let objects use copies, whose gradients are summed; an anchor that hangs on them."""
        used: dict[int, Tensor] = {}
        for slots, partition in (
            (self.everyones, self.rows.layout.partition),
            (self.own, self.rows.own.partition),
        ):
            for slot in slots:
                if id(slot.tensor) not in used:
                    copies = copying(partition, tuple(slot.tensor.shape))
                    used[id(slot.tensor)] = copies.apply(slot.tensor)
        with replaced((*self.own, *self.everyones, *self.users), used):
            yield nothing((), *used.values()) if used else None


@dataclass(frozen=True)
class Entry:
    """What a call works on: this row's copy of the image, operators with their measurements."""

    x: Tensor
    pairs: list[tuple[Operator, Tensor]]
    needs_grad: bool
    anchor: Tensor | None
    parameters: Parameters


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
    """Operators A_0, …, A_{N−1} of one image in parts.

    Args:
        layout: of the image. Axes of the grid along which it is shared are for operators: each
            row of workers that holds a copy has some of them. Without such axes all workers take
            part in all operators.
        num_ops: the number N of operators.
        make: `make(i)` gives operator i, on every worker of its row.
        sharding: how operators are given to rows, "round_robin" or "block".
        device: of this worker's tensors.
    """

    def __init__(
        self,
        layout: Layout,
        num_ops: int,
        make: Callable[[int], Any],
        sharding: str = "round_robin",
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout, self.num_ops, self.device = layout, num_ops, torch.device(device)
        self._fidelities: dict[int, PartFidelity] = {}
        self.physics: list[Any] = []
        self.rows: Rows = rows_of(layout)
        self.active = layout.partition.active
        count, place = self.rows.count, self.rows.place if self.active else 0
        mine = shardings.local_indices(num_ops, place, count, sharding)
        self.local_indices: list[int] = mine if self.active else []
        self.operators: list[Operator] = [
            self._made(make(i), position) for position, i in enumerate(self.local_indices)
        ]

    def _made(self, physics: Any, position: int) -> Operator:
        self.physics.append(physics)
        return partition_physics(physics, self.rows.own, self._owner(position))

    def _owner(self, position: int) -> int:
        """The worker that sees the whole image for an operator, where one must."""
        ranks = self.rows.own.partition.ranks
        return ranks[position % len(ranks)]

    @property
    def place(self) -> str:
        """The row of this worker, where gradients of parameters come together, in words."""
        return f"copy {self.rows.place} of the image" if self.active else "no copy of the image"

    def A(self, x: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """The parts of the measurements y_i = A_i(x), and a zero that hangs on the image."""
        if not self.active:
            return [], None
        entry = self._enter("A", x)
        with entry.parameters.in_use() as hung:
            ys = [hang(operator.A(entry.x), hung) for operator in self.operators]
        return ys, self._anchor(entry, hung)

    def measure(
        self, x: Tensor, drawing: Callable[[int], AbstractContextManager[None]]
    ) -> tuple[list[Tensor], Tensor | None]:
        """The parts of the measurements with noise, and a zero that hangs on the image.

        An object that can be called is called with the whole image, on one worker for each, so that
        it draws the numbers that it draws in one process; what it gives goes to the parts.

        Args:
            x: this worker's part of the image.
            drawing: `drawing(i)` is a context in which the numbers of measurement i are drawn.
        """
        if not self.active:
            return [], None
        entry = self._enter("the measurements", x, users=self.physics)
        with entry.parameters.in_use() as hung:
            ys = [
                hang(self._measured(entry.x, position, drawing(i)), hung)
                for position, i in enumerate(self.local_indices)
            ]
        return ys, self._anchor(entry, hung)

    def _measured(self, x: Tensor, position: int, drawn: AbstractContextManager[None]) -> Tensor:
        """This worker's part of one measurement with noise."""
        operator, physics = self.operators[position], self.physics[position]
        if not callable(physics):
            return operator.A(x)
        gather = gathering(self.rows.own, self._owner(position))
        whole = gather.apply(x)
        if gather.codomain.partition.active:
            with drawn:
                y = known(physics(whole), (), (whole,))
        else:
            y = idle((0,), (whole,), physics)
        if isinstance(operator, Whole):
            return y
        return gathering(operator.codomain, self._owner(position)).H.apply(y)

    def A_adjoint(self, ys: Sequence[Tensor], anchor: Tensor | None = None) -> Tensor:
        """The parts of Σ_i A_iᵀ y_i.

        Args:
            ys: one tensor for each operator of this row.
            anchor: a zero on which the result shall hang, where there are no operators.
        """
        if not self.active:
            return torch.empty(0)
        entry = self._enter("A_adjoint", None, ys, anchor)
        return self._sum(entry, lambda op, y: op.A_adjoint(y))

    def A_vjp(self, x: Tensor, vs: Sequence[Tensor], anchor: Tensor | None = None) -> Tensor:
        """The parts of Σ_i J_i(x)ᵀ v_i, with the Jacobians of the operators."""
        if not self.active:
            return x
        entry = self._enter("A_vjp", x, vs, anchor)
        return self._sum(entry, lambda op, v: op.A_vjp(entry.x, v))

    def A_adjoint_A(self, x: Tensor) -> Tensor:
        """The parts of Σ_i A_iᵀ A_i x."""
        if not self.active:
            return x
        entry = self._enter("A_adjoint_A", x)
        return self._sum(entry, lambda op, _: op.A_adjoint_A(entry.x))

    def loss(
        self, x: Tensor, ys: Sequence[Tensor], fidelities: Sequence[Any], shared: Any = ()
    ) -> Tensor:
        """The sum Σ_i f_i(A_i(x), y_i), one shared value on all workers of the layout.

        It has a number for each image of the batch if the fidelities give that, else it is one.

        Args:
            x: this worker's part of the image.
            ys: the parts of the measurements, one for each operator of this row.
            fidelities: objects that are called `f(x, y, physics)`, one for each operator.
            shared: objects that fidelities of all rows use, whose parameters get the gradient of
                all of them; other parameters of fidelities get that of this row.
        """
        if not self.active:
            return x.new_zeros(())
        entry = self._enter("the loss", x, ys, None, fidelities, shared)
        batch = self.layout.shape[0]
        share = nothing((batch,) if self._are_batched(fidelities) else (), entry.x)
        with entry.parameters.in_use() as hung:
            for f, (operator, y) in zip(fidelities, entry.pairs, strict=True):
                share = share + self._fidelity(f).loss(entry.x, y, operator, batch)
        return total(hang(share, hung), self.layout.partition)

    def _are_batched(self, fidelities: Sequence[Any]) -> bool:
        """Whether fidelities give a number for each image; all workers raise if only some do.

        A row of workers may have no operators: it learns that from the others.
        """
        call = f"the shape of the loss of {self.num_ops} operators on {self.layout}"
        kinds = {self._fidelity(f).is_batched for f in fidelities}
        group = self.layout.partition.group
        said = group.share_words([code_of(call), int(True in kinds), int(False in kinds)])
        group.check_same_call(said, call)
        words = memoryview(said).cast("q")
        some, others = (any(words[place::NUM_WORDS].tolist()) for place in (1, 2))
        if some and others:
            raise ValueError(
                f"{call}: some data fidelities give a number for each image of the batch and "
                f"others one number; let all give the same"
            )
        return some

    def grad(
        self, x: Tensor, ys: Sequence[Tensor], fidelities: Sequence[Any], shared: Any = ()
    ) -> Tensor:
        """The parts of the gradient Σ_i ∇ f_i(A_i(x), y_i).

        Args:
            x: this worker's part of the image.
            ys: the parts of the measurements, one for each operator of this row.
            fidelities: objects with `grad(x, y, physics)`, one for each operator.
            shared: objects that fidelities of all rows use, as in `loss`.
        """
        if not self.active:
            return x
        entry = self._enter("the gradient", x, ys, None, fidelities, shared)
        left = iter(fidelities)
        return self._sum(entry, lambda op, y: self._fidelity(next(left)).grad(entry.x, y, op))

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
        return total(share, self.layout.partition)

    def _enter(
        self,
        call: str,
        x: Tensor | None,
        measured: Sequence[Tensor] | None = None,
        anchor: Tensor | None = None,
        fidelities: Sequence[Any] | None = None,
        shared: Any = (),
        users: Any = (),
    ) -> Entry:
        """What goes into a call, after all workers agreed that it fits together."""
        ys = measured or ()
        given = [*ys, *([] if x is None else [x])]
        kind = _KINDS.index(given[0].dtype) if given else 0
        whole = [each.physics for each in self.operators if isinstance(each, Whole)]
        parameters = Parameters.of(self.rows, [whole, fidelities, users], shared)
        needs = [*ys, *([] if anchor is None else [anchor]), *self._values, *parameters.tensors]
        sign = torch.empty(kind, requires_grad=any(each.requires_grad for each in needs))
        problem = self._problem(x, measured, fidelities)
        shapes = [tuple(slot.tensor.shape) for slot in parameters.everyones]
        call += f", gradients of tensors of shapes {shapes}" if shapes else ""
        call = f"{call} of {self.num_ops} operators on {self.layout}{problem}"
        found = agree(self.layout.partition, call, sign, *([] if x is None else [x]))
        kinds = {shape for shape in found[0][0].values() if shape != (0,)}
        if len(kinds) > 1:
            names = ", ".join(str(_KINDS[each]) for (each,) in sorted(kinds))
            raise ValueError(f"{call}: all workers must bring one dtype, got {names}")
        if problem:
            raise ValueError(call)
        needs_grad = any(terms.needs_grad for _, terms in found)
        if x is None:
            dtype = _KINDS[max(kinds)[0]] if kinds else torch.get_default_dtype()
            own = _even(torch.empty(0, dtype=dtype, device=self.device), needs_grad)
        else:
            own = self.rows.use(_even(x, needs_grad))
        brought = [_even(y, needs_grad) for y in ys] or [own] * len(self.operators)
        pairs = list(zip(self.operators, brought, strict=True))
        return Entry(own, pairs, needs_grad, anchor, parameters)

    def _problem(
        self, x: Tensor | None, ys: Sequence[Tensor] | None, fidelities: Sequence[Any] | None
    ) -> str:
        """What is wrong with this worker's tensors, as the end of a sentence."""
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

    def _anchor(self, entry: Entry, hung: Tensor | None) -> Tensor | None:
        """A zero that hangs on the image and on parameters, if something needs a gradient."""
        return hang(nothing((), entry.x), hung) if entry.needs_grad else None

    def _sum(self, entry: Entry, term: Callable[[Operator, Tensor], Tensor]) -> Tensor:
        """The sum of terms over the operators of this row and of the others.

        Args:
            entry: what the call works on.
            term: makes an image of an operator and of what was brought for it.
        """
        share: Tensor | None = None
        with entry.parameters.in_use() as hung:
            for operator, brought in entry.pairs:
                each = term(operator, brought)
                if share is None:
                    share = each
                else:
                    share = share + each if entry.needs_grad else share.add_(each)
        if share is None:
            share = entry.x.new_zeros(self.layout.local_shape)
        if entry.needs_grad:
            share = share + nothing((), entry.x)
        return self.rows.total(hang(hang(share, hung), entry.anchor))


def _even(x: Tensor, needs_grad: bool) -> Tensor:
    return even(x, Terms(x.dtype, x.device.type, needs_grad, False))
