"""Distributed operators: an operator on tensors that are spread over workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from operator import index as as_int
from typing import Any

import torch
from torch import Tensor

from tessel import transport
from tessel.core.agreement import (
    Agreement,
    TensorMeta,
    agree,
    entered,
    remember,
)
from tessel.core.boxes import Balanced, Box
from tessel.core.graph import fix_lengths, in_graphs
from tessel.core.handles import HasHandle, constant_in_graphs, object_of
from tessel.core.layout import Layout
from tessel.core.linop import Entering, agreed_in_graphs, is_traced
from tessel.core.partition import Partition, world
from tessel.operators.algebra import Bound, OperatorSum, ParOperator, kron, lift
from tessel.operators.dft import ParDFT
from tessel.operators.execution import BatchColumns, TensorFunction, program
from tessel.operators.explanation import Explanation, explain
from tessel.operators.input_shape import InputShape
from tessel.operators.layouts import (
    ANYWHERE,
    alike,
    batch_runs,
    on_common_grids,
    on_grid,
    position,
    refined,
    with_batch,
    without_ones,
)
from tessel.operators.leaf import Leaf
from tessel.operators.local_transform import flaw_of_choice
from tessel.operators.matrices import ParIdentity
from tessel.operators.memory import MemoryOrder, in_shape
from tessel.operators.parameters import Parameters, find_values, own_values
from tessel.operators.planning import make_plan
from tessel.operators.space import Shape
from tessel.operators.storage import Storage, storage_of
from tessel.operators.tasks import LeafValues, OperatorTask

# the result of the agreement before a call
AgreedCall = tuple[BatchColumns, TensorMeta, InputShape]


class Distributed(HasHandle, ParOperator):
    """An operator with the layouts of its tensors, and the plan that follows from them.

    Its algebra is that of the operator: products, adjoints and inverses are planned as a whole, so
    that a tensor is not moved back only to be sent again.

    Attributes:
        expression: the operator itself.
        partition: the workers, on the grid that the plan starts from.
        plan: the steps.
    """

    def __init__(
        self,
        expression: ParOperator,
        source: Layout,
        target: Layout | None,
        storage: Mapping[Leaf, Layout] | None = None,
    ) -> None:
        self.expression = expression
        self.partition = source.partition
        self.domain, self.codomain = expression.domain, expression.codomain
        self.plan = make_plan(expression, source, target)
        self.storage: Storage = {**storage_of(self.plan), **(storage or {})}
        self.prepare()

    _group: transport.Group | None = None
    _derived = HasHandle._derived | {"_group", "_traces"}

    def prepare(self) -> transport.Group:
        """Make the group in which workers agree, all of them together.

        The constructor does so; for a copy, its first call does.
        """
        if self._group is None:
            self._group = transport.group_of(self.partition.ranks)
        return self._group

    @cached_property
    def H(self) -> Distributed:
        return self._reversed(self.expression.H)

    @cached_property
    def inv(self) -> Distributed:
        return self._reversed(self.expression.inv)

    def _reversed(self, expression: ParOperator) -> Distributed:
        return Distributed(expression, self.plan.target, self.plan.source, self.storage)

    def combined(
        self, make: Callable[..., ParOperator], operators: Sequence[ParOperator]
    ) -> Distributed:
        """Combine operators to one, and plan it as a whole."""
        for each in operators:
            if not isinstance(each, Distributed):
                raise ValueError(
                    f"cannot combine {each}, which is not distributed, with a distributed "
                    f"operator; distribute both, or their combination"
                )
        spread = [each for each in operators if isinstance(each, Distributed)]
        first, last = spread[0], spread[-1]
        for each in spread[1:]:
            if each.partition.ranks != first.partition.ranks:
                raise ValueError(
                    f"cannot combine operators on different workers: {first.partition} and "
                    f"{each.partition}"
                )
        expression = make(*(each.expression for each in spread))
        ends = [end for each in spread for end in (each.plan.source, each.plan.target)]
        source, target = on_common_grids(last.plan.source, first.plan.target, ends)
        if len(source.shape) != len(expression.domain.shape):
            raise ValueError("cannot combine distributed operators in kron: distribute the product")
        if isinstance(expression, OperatorSum):  # results are added part by part
            for other in spread[1:]:
                starts_alike = alike(first.plan.source, other.plan.source)
                if not (starts_alike and alike(first.plan.target, other.plan.target)):
                    raise ValueError(
                        f"cannot add operators with different layouts: {first} and {other}"
                    )
        # A parameter stays where it is stored, wherever the combination needs it: θ that was drawn
        # for one of the operators fits. If there are several places, the first operator's counts.
        storage = {leaf: here for each in reversed(spread) for leaf, here in each.storage.items()}
        return Distributed(expression, source, target, storage)

    def to_dense(self, theta: Parameters | None = None) -> Tensor:
        """Raise: no worker has whole columns."""
        raise ValueError(f"{self} is distributed: call to_dense of the operator itself")

    def explain(self, columns: int = 1) -> Explanation:
        """The steps, and what each of them costs each worker."""
        return explain(self, columns=columns)

    def expand(self, first: int) -> Iterator[OperatorTask]:
        return self.expression.expand(first)

    def children(self) -> tuple[ParOperator, ...]:
        return (self.expression,)

    @property
    def layout_in(self) -> Layout:
        """The layout of a tensor that the operator takes."""
        return self.plan.source

    @property
    def layout_out(self) -> Layout:
        """The layout of a result."""
        return self.plan.target

    @cached_property
    def part_boxes(self) -> dict[Leaf, Box]:
        """The box of each parameter that this worker stores."""
        nothing = {leaf: ((0, 0),) * len(here.shape) for leaf, here in self.storage.items()}
        return {leaf: here.box() or nothing[leaf] for leaf, here in self.storage.items()}

    def parameter_layout(self, leaf: Leaf) -> Layout:
        """The layout of a parameter; workers that store the same part share it."""
        return self.storage[leaf].summed

    def agreed_number(self, number: int) -> int:
        """The number that the first worker passes."""
        if not self.partition.active:
            return number
        heard = agree(self.partition, f"the parameters of {self._label}", numbers=[number])
        return heard.numbers[self.partition.ranks[0]][0]

    def can_be_traced(self, x: Tensor, theta: Parameters | None = None) -> bool:
        """Whether a compiler may have this call in its graph: parameters must be a module's."""
        return fix_lengths(x) and theta is None and not _has_parameters(self.handle)

    @in_graphs()
    def apply(self, x: Tensor, theta: Parameters | None = None) -> Tensor:
        if not self._is_active:
            return torch.empty(0, dtype=self.codomain.dtype, device=x.device)
        again: Callable[[], AgreedCall] | None = None  # the agreement in each run of compiled code
        if len(self.partition.ranks) == 1:  # no agreement is needed, nor a gradient of others
            key = tuple(map(int, x.shape)), x.dtype, x.device.type  # symbols are no keys
            concluded = self._concluded.get(key)
            if concluded is None:
                shapes = {transport.this_worker(): key[0]}
                concluded = self._conclude(shapes, TensorMeta(*key[1:], False, False))
                remember(self._concluded, key, concluded)
            columns, meta, form = concluded
        else:
            state = self._state(theta) if self.leaves else ""
            # what is no tensor raises in the agreement, on all workers
            transforms = self._transforms and isinstance(x, Tensor) and x.is_cpu
            flaw = flaw_of_choice() if transforms and not is_traced() else ""
            if flaw:  # perhaps of this worker alone: all must raise, before any of them waits
                state += f"{', ' * bool(state)}a wrong library: {flaw}"
            if state not in self._agreements:
                label = f"{self._label} with {state}" if state else self._label
                ends = self.plan.source, self.plan.target
                identity = f"{label} {[(each.partition.shape, each.cuts) for each in ends]}"
                self._agreements[state] = Agreement(
                    self.prepare(), label, self.partition.ranks, self._conclude, identity
                )
            agreement = self._agreements[state]
            if is_traced():
                (columns, meta, form), again = agreed_in_graphs(
                    agreement.agree_on, x, compiled=agreement.compiled
                )
            else:
                columns, meta, form = agreement.agree_on(x)
            if flaw:
                raise ValueError(flaw)
        values = find_values(self, theta) if self.leaves else {}
        for leaf, value in values.items():
            if value.device.type != meta.device:
                raise ValueError(f"{self}: θ of {leaf} is on {value.device}, x on {meta.device}")
        x = entered(x, meta)
        # If workers have columns of their own, a tensor without a batch is one column.
        batch = () if columns is None else (1 if form.columns is None else form.columns,)
        x = in_shape(x, (*form.shape, *batch))
        if again is not None:
            place, told = partial(with_batch, self.plan.source), again
            agrees = self._label, self.prepare(), lambda _: place(told()[0])
            x = Entering(place(columns), *agrees).apply(x, meta)
        y = self.run(x, values, columns)
        return form.unfolded(y if form.columns is not None or not batch else y.squeeze(-1))

    def run(
        self,
        x: Tensor,
        values: LeafValues,
        columns: BatchColumns = None,
        order: MemoryOrder | None = None,
    ) -> Tensor:
        """Apply the operator without an agreement.

        Every worker must pass its part, in the operator's dimensions and one more for `columns`,
        and either all or none one that needs a gradient. `order` is the order of dimensions in
        memory, the same on all workers, if it is not the usual one; only speed depends on it.
        """
        key = columns, tuple(range(x.dim())) if order is None else order
        functions = self._programs.get(key)
        if functions is None:
            functions = program(self.plan, self.storage, *key)
            remember(self._programs, key, functions)
        for function in functions:
            x = function(x, values)
        return x

    @cached_property
    def _programs(self) -> dict[tuple[BatchColumns, MemoryOrder], list[TensorFunction]]:
        return {}  # by the split of the batch and the order of dimensions in memory

    def _state(self, theta: Parameters | None) -> str:
        """A text that must be equal on all workers: the parameters, and what they need."""
        # An invalid θ is described, too, and compared: so it raises on all workers, even if only
        # some of them have it.
        given = own_values(self) if theta is None else theta
        if theta is not None or len(given) == len(self.leaves):
            try:
                given.check(self)
            except ValueError as error:
                return f"a wrong θ: {error}"
        words = []
        for leaf in self.leaves:
            value = given.get(leaf)
            if value is None:
                words.append(f"no θ for {leaf}")
                continue
            part = "all" if tuple(value.shape) == leaf.parameter_shape else "a part"
            needs_grad = value.requires_grad and torch.is_grad_enabled()
            need = ", which needs a gradient" if needs_grad else ""
            words.append(f"{part} of {leaf} on {value.device.type}{need}")
        return ", ".join(words)

    @cached_property
    def _transforms(self) -> bool:
        """Whether workers transform parts, by a library that each of them chooses."""
        operators: list[ParOperator] = [self]
        for each in operators:
            operators += each.children()
        return any(isinstance(each, ParDFT) for each in operators)

    @cached_property
    def _is_active(self) -> bool:
        # stored, since each call asks, and the partition asks torch each time
        return self.partition.active

    @cached_property
    def _agreements(self) -> dict[str, Agreement[AgreedCall]]:
        return {}

    @cached_property
    def _concluded(self) -> dict[tuple[Shape, torch.dtype, str], AgreedCall]:
        return {}  # by the shape, the dtype and the device of the tensor of a single worker

    def _conclude(self, shapes: dict[int, Shape], meta: TensorMeta) -> AgreedCall:
        if meta.dtype != self.domain.dtype:
            raise ValueError(f"{self}: expected a tensor of {self.domain.dtype}, got {meta.dtype}")
        self.check_numbers(meta.device)
        forms = InputShape.of_shapes(
            self, shapes, {each: self.layout_in.shape_on(each) for each in shapes}
        )
        form = forms[transport.this_worker()]
        columns = {worker: each.columns for worker, each in forms.items()}
        if len({each is None for each in columns.values()}) > 1:
            raise ValueError(f"{self}: some workers pass a batch and others none: {shapes}")
        # The number of columns at each place along the batch's axes, which must be equal there.
        runs = batch_runs(self.plan.source)
        if next(iter(columns.values())) is None and not runs:
            return None, meta, form
        found: dict[int, tuple[int, int]] = {}
        for worker, given in columns.items():
            count = 1 if given is None else given
            place = self.partition.place(worker)
            assert place is not None
            other, expected = found.setdefault(position(runs, place), (worker, count))
            if count != expected:
                raise ValueError(
                    f"{self}: workers {other} and {worker} have parts of the same columns, but "
                    f"have {expected} and {count} columns"
                )
        return tuple(found[at][1] for at in sorted(found)), meta, form

    @cached_property
    def _label(self) -> str:
        source, target = self.plan.source.brief, self.plan.target.brief
        return f"{self.expression!r} on {self.partition} from {source} to {target}"

    def __repr__(self) -> str:
        plan = self.plan
        return f"distribute({self.expression!r}, {plan.source.brief} → {plan.target.brief})"


@constant_in_graphs
def _has_parameters(handle: str) -> bool:
    return bool(object_of(handle).leaves)


def distribute(
    operator: ParOperator,
    partition_in: Sequence[int] | Partition | Layout | None = None,
    partition_out: Sequence[int] | Partition | Layout | str | None = None,
) -> ParOperator:
    """Let an operator act on tensors that are spread over workers.

    Args:
        operator: any operator, also a product or a sum: it is planned as a whole.
        partition_in: the number of workers along each dimension, or a partition with such a grid;
            further numbers split a batch. A layout allows parts of any lengths. By default each
            worker has columns of its own and all share the parameters.
        partition_out: the same for the result, on the same workers; by default that of the input.
            `"anywhere"` leaves it where the last step ends.

    >>> import tessel, torch
    >>> F = tessel.kron(tessel.ParDFT(torch.float32, 4), tessel.ParDFT(torch.complex64, 3))
    >>> (tessel.distribute(F, [1, 1]) * torch.ones(4, 3)).shape
    torch.Size([3, 3])
    """
    if isinstance(operator, Bound):
        return lift(lambda each: distribute(each, partition_in, partition_out), operator)
    if not isinstance(operator, ParOperator):
        raise ValueError(f"distribute takes an operator, got {operator!r}")
    if isinstance(operator, Distributed):
        raise ValueError(f"{operator} is already distributed")
    if operator.reductions:
        raise ValueError(f"{operator} already sums over workers and cannot be distributed")
    ndim = len(operator.domain.shape)
    partition_in = [*[1] * ndim, world().size] if partition_in is None else partition_in
    start = _partition(partition_in, ndim, operator)
    source = _layout(operator.domain.shape, partition_in, start)
    if isinstance(partition_out, str):
        if partition_out != ANYWHERE:
            raise ValueError(
                f"partition_out must be a partition or {ANYWHERE!r}, got {partition_out!r}"
            )
        return Distributed(operator, source, None)
    if partition_out is None:
        partition_out, shape = start, operator.codomain.shape
        if isinstance(partition_in, Layout):
            same = partition_in.shape == shape
            partition_out = partition_in if same else partition_in.resized(shape)
    end = _partition(partition_out, ndim, operator)
    check_ends(start, end)
    target = _layout(operator.codomain.shape, partition_out, end)
    if batch_runs(source) != batch_runs(target):
        both = f"{start} and {end}"
        raise ValueError(f"the batch must be split in the same way before and after: {both}")
    return Distributed(operator, *on_common_grids(source, target))


def check_ends(start: Partition, end: Partition) -> None:
    """Raise ValueError unless the result is on the workers that have the input."""
    if sorted(start.ranks) != sorted(end.ranks):
        raise ValueError(f"the result must be on the same workers: {start} and {end}")
    if start.ranks != end.ranks:
        raise ValueError(
            f"the result must be on the same workers in the same order: {start} and {end}; "
            f"distribute to one of them and move the result to the other with a tessel.Move"
        )


def _partition(given: Any, ndim: int, operator: ParOperator) -> Partition:
    if isinstance(given, Layout):
        return given.partition
    if isinstance(given, Partition):
        partition = given
    else:
        try:
            sizes = tuple(as_int(size) for size in given)
        except TypeError:
            raise ValueError(
                f"a partition is a number of workers for each dimension, got {given!r}"
            ) from None
        everyone = world()
        if any(size < 1 for size in sizes) or prod(sizes) != everyone.size:
            raise ValueError(
                f"the partition {list(sizes)} needs {prod(sizes)} workers, there are "
                f"{everyone.size}"
            )
        partition = everyone.create_cartesian_topology_partition(sizes)
    if partition.dim < ndim:
        raise ValueError(
            f"the partition {list(partition.shape)} has {partition.dim} numbers, {operator} has "
            f"{ndim} dimensions"
        )
    return partition


def _layout(shape: Shape, given: Any, partition: Partition) -> Layout:
    if not isinstance(given, Layout):
        return on_grid(partition, shape)
    pairs = zip(given.cuts, given.shape, strict=True)
    in_order = all(cut.is_consecutive(length) for cut, length in pairs)
    if given.shape != shape or given.shared or not given.owns_once or given.blocks or not in_order:
        raise ValueError(
            f"expected a layout of shape {shape} that stores each value once, in consecutive "
            f"parts, got {given}"
        )
    # Balanced parts are marked as such: their parts of another length are known.
    cuts = []
    for cut, length in zip(given.cuts, shape, strict=True):
        balanced = Balanced(length, len(cut.intervals))
        cuts.append(replace(cut, intervals=balanced) if cut.intervals == balanced else cut)
    return refined(replace(given, cuts=tuple(cuts)), without_ones(partition.shape))


def ParRepartition(
    T: Any,
    shape: Sequence[int],
    partition_in: Sequence[int] | Partition,
    partition_out: Sequence[int] | Partition,
) -> ParOperator:
    """The identity, from a tensor on one grid of workers to the same tensor on another.

    >>> import tessel, torch
    >>> R = tessel.ParRepartition(torch.float32, (4, 6), [1, 1], [1, 1])
    >>> (R * torch.ones(4, 6)).shape
    torch.Size([4, 6])
    """
    identities = [ParIdentity(T, length) for length in shape]
    if not identities:
        raise ValueError("ParRepartition: expected a shape with at least one dimension")
    return distribute(kron(*identities), partition_in, partition_out)
