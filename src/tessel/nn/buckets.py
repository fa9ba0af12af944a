"""Gradient buckets: gradients of shared parameters are sent in few messages, during the backward.

A layer uses parameters that all workers share, and the gradients of these uses have to be summed,
which takes a message for each parameter. Parameters of one bucket take a single message. They must
be known when the first of them is used, so each call follows the schedule of the last one: the
first call of a model records how parameters are used, the next ones put them into buckets.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tessel import transport
from tessel.core.agreement import agree_on_call
from tessel.core.context import in_transform, is_compiling, setting
from tessel.core.linop import is_traced
from tessel.core.memory_format import is_channels_last
from tessel.core.partition import Partition
from tessel.core.shared import BucketInGraph, GradientBucket, Replicate, current_buckets
from tessel.nn.layer import Layer
from tessel.tensor.table import in_backward, in_checkpoint
from tessel.transport import NUM_WORDS, code_of, kept_in_job

# Bytes of a bucket. A bucket is sent when its last gradient is computed: a larger one starts later
# and overlaps with less computation; smaller ones need more messages.
LIMIT = 2**22

MANY = 3  # comparisons of parameters that found equal values, after which there are no others


class Use(NamedTuple):
    """A use of a parameter: on these workers, separately along these axes."""

    partition: Partition
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are sent together.

    Attributes:
        use: the use of all of them.
        numbers: their places among the parameters of the model, in the order of use.
        lasts: whether channels are last in the memory of each; gradients are sent in memory order.
    """

    use: Use
    numbers: tuple[int, ...]
    lasts: tuple[bool, ...]


BucketPlan = tuple[Bucket, ...]


class BucketSchedule:
    """The recorded uses of a model's parameters, from call to call.

    Args:
        limit: the largest number of bytes of gradients in one message, unless one parameter has
            more.

    Attributes:
        uses: the uses in the last call, by the number of the parameter, in order.
        unsteady: parameters that were once planned for but not used, and are left out since.
        num_changes: how often parameters had been changed in place when workers last compared
            their values.
        num_compared: how often they have compared them, and found them equal.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.uses: dict[int, Use] = {}
        self.unsteady: set[int] = set()
        self.num_changes = self.num_compared = 0

    def plan(self, parameters: Sequence[Tensor]) -> BucketPlan:
        """The parameters that will be used together, if this call is like the last."""
        if not torch.is_grad_enabled():
            return ()
        found: list[tuple[Use, list[int]]] = []
        room: dict[Any, tuple[list[int], int]] = {}  # an open bucket, and its bytes
        for number, use in self.uses.items():
            # since the last call parameters may have been removed or frozen
            if number >= len(parameters) or not parameters[number].requires_grad:
                continue
            parameter = parameters[number]
            kind = use, parameter.dtype, parameter.device
            numbers, size = room.get(kind, ([], self.limit + 1))  # as if full: the first opens one
            size += parameter.nbytes
            if size > self.limit:
                numbers, size = [], parameter.nbytes
                found.append((use, numbers))
            numbers.append(number)
            if size <= self.limit:  # a larger one is sent alone, and the others continue
                room[kind] = numbers, size
        return tuple(
            Bucket(use, tuple(numbers), tuple(is_channels_last(parameters[n]) for n in numbers))
            for use, numbers in found
        )

    def learn(self, plan: BucketPlan, uses: dict[int, Use]) -> None:
        """Remember a call that followed a plan."""
        if uses:  # a call without uses, such as one without gradients, does not predict the next
            self.unsteady.update(n for bucket in plan for n in bucket.numbers if n not in uses)
            self.uses = {n: use for n, use in uses.items() if n not in self.unsteady}

    def __getstate__(self) -> dict[str, Any]:
        return vars(BucketSchedule(self.limit))  # a copy has learned nothing


class BucketedCall:
    """One call of a model: buckets of its parameters, made when the first of each is used.

    A bucket is prepared one bucket ahead, so that the backward pass waits for the sums of a bucket
    after those of the next have started; for those of a large one, when the next gradients are
    computed. In a graph, where moves are single nodes, there is no waiting.
    """

    def __init__(
        self,
        schedule: BucketSchedule,
        parameters: Iterable[Tensor],
        module: torch.nn.Module | None = None,
        fuses: bool = True,
    ) -> None:
        self.schedule = schedule
        self.parameters = list(parameters)
        self.plan = schedule.plan(self.parameters) if fuses else ()
        self._module = module
        self._in_graph = is_traced()
        self.uses: dict[int, Use] = {}
        self.sequence = array("q")  # the numbers of the parameters, use by use
        # by identity: tensors compare element by element, and a shared parameter is one
        self._numbers = {id(each): number for number, each in enumerate(self.parameters)}
        self._buckets = {n: k for k, bucket in enumerate(self.plan) for n in bucket.numbers}
        self._prepared: dict[int, tuple[GradientBucket, Tensor]] = {}
        self._aliases: dict[int, Tensor] = {}

    def alias(self, value: Tensor, use: Replicate) -> Tensor | None:
        """The parameter for this use of it; None if it was not planned for."""
        number: int | None = self._numbers.get(id(value))
        if number is None and self._module is not None and isinstance(value, torch.nn.Parameter):
            # `fully_shard` puts another one into its place while a module computes
            for found, parameter in enumerate(self._module.parameters()):
                self._numbers.setdefault(id(parameter), found)
            number = self._numbers.get(id(value))
        can_be_used = value.requires_grad and use.is_whole and use.axes
        if number is None or not (can_be_used and _plain(self._in_graph)):
            return None
        how = Use(use.domain.partition, use.axes)
        self.uses.setdefault(number, how)
        self.sequence.append(number)
        if not self._in_graph:
            # A separate number: if results of workers depend on different parameters, their sums
            # wait for each other and are not confused. Nodes have their own numbers.
            use.prepare().number_call()
        place = self._buckets.get(number)
        if place is None or self.plan[place].use != how:
            return None
        if number in self._aliases:
            return self._aliases[number]
        if self._in_graph:
            numbers = self.plan[place].numbers
            used = [self.parameters[one] for one in numbers]
            aliases = BucketInGraph.of(*how, used).use(used)
            self._aliases.update(zip(numbers, aliases, strict=True))
            return self._aliases[number]
        # Also the next bucket: the backward of everything between `prepare` and `use` overlaps with
        # the sums of the bucket. A large one is prepared after this one is used: in the backward
        # pass its sums complete before those of this one start, so that never two large ones are in
        # transit.
        self._prepare(place)
        is_last = place + 1 == len(self.plan)
        following = () if is_last else self.plan[place + 1].numbers
        is_large = sum(self.parameters[one].nbytes for one in following) > LIMIT
        if not is_last and not is_large:
            self._prepare(place + 1)
        bucket, token = self._prepared[place]
        self._aliases.update(zip(self.plan[place].numbers, bucket.use(token), strict=True))
        if is_large:
            self._prepare(place + 1)
        return self._aliases[number]

    def _prepare(self, place: int) -> None:
        """Make a bucket of the plan, unless it is there."""
        if place not in self._prepared:
            planned = self.plan[place]
            values = [self.parameters[one] for one in planned.numbers]
            shapes = [tuple(one.shape) for one in values]
            bucket = GradientBucket(*planned.use, shapes, values[0], planned.lasts)
            self._prepared[place] = bucket, bucket.prepare(values)


def _plain(in_graph: bool) -> bool:
    """Whether buckets can be used: in plain reverse mode, outside of checkpoints.

    A checkpoint recomputes a forward pass, perhaps after other calls: it must save the same tensors
    both times. In a graph, buckets are different: their messages are nodes.
    """
    if not torch.is_grad_enabled() or in_transform() or is_compiling() != in_graph:
        return False
    return not in_backward() and not in_checkpoint()


@contextmanager
def in_buckets(
    schedule: BucketSchedule,
    parameters: Iterable[Tensor],
    module: torch.nn.Module | None = None,
    fuses: bool = True,
) -> Iterator[None]:
    """A call of a model that follows the schedule of the last one; inside another call, nothing.

    Args:
        schedule: the schedule of the model.
        parameters: the parameters of the model at the beginning of the call.
        module: the module if its parameters may be replaced during the call; else None.
        fuses: whether gradients of several parameters may be sent together.
    """
    if current_buckets.get() is not None or not _plain(is_traced()):
        yield
        return
    call = BucketedCall(schedule, parameters, module, fuses)
    with setting(current_buckets, call):
        yield
    # not in a `finally`: a call that raised has not used all that the next one will
    if fuses:
        schedule.learn(call.plan, call.uses)


def agree_on_uses(
    module: torch.nn.Module,
    label: str,
    wrapping: str,
    partition: Partition,
    compare: Callable[[], None] | None = None,
) -> None:
    """Raise on all workers if they used different parameters, or the same ones in another order.

    Then they took different branches of the model, and gradients of different parameters would be
    added. All workers call this at the end of a call whose parameters get gradients. They must also
    have the same `label`, the module in words, the same `wrapping`, a text that names the wrappers
    that average these gradients, and the module in the same mode.

    If some workers have changed their parameters in place more often than others, as after a step
    of an optimizer that one of them has skipped, all call `compare`, which raises if their values
    differ.
    """
    call = current_buckets.get()
    if not isinstance(call, BucketedCall) or not any(p.requires_grad for p in call.parameters):
        return
    group = partition.prepare()
    head, code = _beginning(label, module.training, wrapping)
    schedule = call.schedule
    # Some workers may change parameters more often in each step, and all get the same values: with
    # `ZeroRedundancyOptimizer`, each changes its own and is sent the others.
    compare = compare if schedule.num_compared < MANY else None
    num_changes = _num_changes(call.parameters) if compare else 0

    def said() -> str:
        names = {id(value): name for name, value in module.named_parameters()}
        used = (names.get(id(call.parameters[number]), "another") for number in call.sequence)
        return head + ", ".join(used)

    try:
        since = (num_changes - schedule.num_changes) % 2**62 if compare else 0
        rows = agree_on_call(group, said, zlib.crc32(call.sequence, code), words=[since])
    except ValueError as error:
        calls: list[str] = error.calls  # type: ignore[attr-defined]
        if not all(each.startswith(head) for each in calls):
            raise  # others are elsewhere, for example in an exception
        uses = [each.removeprefix(head).split(", ") for each in calls]
        other = next(k for k, each in enumerate(uses) if each != uses[0])
        pairs = enumerate(zip_longest(uses[0], uses[other]))
        place, (ours, theirs) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        different = ValueError(
            f"{type(module).__name__} over {partition}: workers take different branches, so that "
            f"gradients of different parameters would be added: use {place} of a parameter is that "
            f"of {ours} on worker {group.workers[0]} and of {theirs} on worker "
            f"{group.workers[other]}. Branch only on values that all workers share: spread "
            "tensors, equal arguments, random numbers drawn inside the model"
        )
        different.workers = group.workers  # type: ignore[attr-defined]  # all of which raise it
        raise different from None
    if compare and (rows[:, 0] != rows[0, 0]).any():
        compare()
        schedule.num_changes = num_changes
        schedule.num_compared += 1


def _num_changes(parameters: Iterable[Tensor]) -> int:
    """How often parameters have been changed in place, as torch counts it for its derivatives.

    Those that a worker has no copy of are left out: shards, spread tensors, and DTensors.
    """
    own = (p for p in parameters if type(p) is torch.nn.Parameter and p.requires_grad)
    try:
        return sum(p._version for p in own)
    except RuntimeError:  # of inference mode, which does not count
        return 0


@kept_in_job
def _beginning(label: str, training: bool, wrapping: str) -> tuple[str, int]:
    """The part of a call's text that does not depend on its parameters, and its code; cached."""
    mode = "training" if training else "evaluation"
    head = f"{label} in {mode}, under {wrapping}, with the parameters "
    return head, code_of(head)


def described_uses() -> tuple[str, str]:
    """The uses of parameters in the call that is being traced: a summary, and all of them."""
    call = current_buckets.get()
    if not isinstance(call, BucketedCall):
        return described(()), ""
    return described(call.plan), f"{call.plan} {[*call.sequence]}"


def planned_uses() -> BucketPlan:
    """The parameters that are used together in the current call."""
    call = current_buckets.get()
    return call.plan if isinstance(call, BucketedCall) else ()


class BucketedForward:
    """The `forward` of a module whose gradients are fused.

    Args:
        module: the module whose own forward it calls.
        limit: the largest number of bytes in one message.
    """

    def __init__(self, module: torch.nn.Module, limit: int) -> None:
        self.module = module
        self.schedule = BucketSchedule(limit)
        self._group_of_layers()  # all workers make it

    def _group_of_layers(self) -> transport.Group:
        return transport.group_of({rank for each in self._partitions for rank in each.ranks})

    @property
    def _partitions(self) -> list[Partition]:
        """The partitions of all layers, in their order."""
        layers = [each for each in self.module.modules() if isinstance(each, Layer)]
        return list(dict.fromkeys(each for layer in layers for each in layer.partitions()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.module).forward
        if is_compiling():  # gradients are summed one by one there
            return forward(self.module, *args, **kwargs)
        with in_buckets(self.schedule, self.module.parameters()):
            self._agree(planned_uses())
            return forward(self.module, *args, **kwargs)

    def _agree(self, plan: BucketPlan) -> None:
        """Raise on all workers if workers of a partition would send different messages."""
        group = self._group_of_layers()
        if transport.this_worker() not in group.workers:
            return
        call = f"{type(self.module).__name__} with {described(plan)}"
        known = self._partitions[: NUM_WORDS - 1]  # one word each, after that of the call
        others = [each for each in plan if each.use.partition not in known]
        codes = []
        for partition in known:  # this worker does not know layers on other partitions
            own = [each for each in plan if each.use.partition == partition]
            # a worker outside of the partition passes zero, which agrees with any code
            codes.append(code_of(f"{own}") if partition.active else 0)
        code = code_of(f"{type(self.module).__name__} {len(known)} {others}")
        agree_on_call(group, call, code, codes, alike=len(codes))


def described(plan: BucketPlan) -> str:
    """A plan in a few words."""
    if not plan:
        return "gradients alone"
    num, last = sum(len(each.numbers) for each in plan), sum(sum(each.lasts) for each in plan)
    memory = f", {last} of them with channels last in memory" if last else ""
    return f"gradients of {num} parameters{memory} in {len(plan)} messages"


def fuse_gradients(module: torch.nn.Module, limit: int = LIMIT) -> torch.nn.Module:
    """Send the gradients of shared parameters in few messages, while others are computed.

    Use it for modules that are written with the layers of this package. Modules from
    `distribute_module` and models of `tessel.models` already do so; for these it sets the limit.

    The first call records which parameters are used, and in which order. In the next ones
    consecutive parameters are summed together; the values do not change, nor those of higher
    derivatives. The module is changed in place and returned.

    Args:
        module: a torch module that contains layers over partitions; all workers call this.
        limit: the largest number of bytes of gradients in one message, unless one parameter has
            more.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> layers = [tessel.nn.DistributedConv1d(P, 2, 2, 3, padding=1) for _ in range(3)]
    >>> model = tessel.nn.fuse_gradients(torch.nn.Sequential(*layers))
    >>> model(torch.ones(1, 2, 8)).sum().backward()
    """
    if limit < 0:
        raise ValueError(f"fuse_gradients: expected a limit of bytes, zero or more, got {limit}")
    schedules = [
        schedule for each in module.modules() if (schedule := _schedule_of(each)) is not None
    ]
    for schedule in schedules:
        schedule.limit = limit
    if _schedule_of(module) is None:
        if "forward" in module.__dict__:
            raise NotImplementedError(
                f"{type(module).__name__} has a forward attribute of its own; define forward in "
                "its class"
            )
        if not any(isinstance(each, Layer) for each in module.modules()):
            raise ValueError(
                f"fuse_gradients: {type(module).__name__} holds no layer over a partition; "
                "convert it with distribute_module, or build it from the layers of tessel.nn"
            )
        module.forward = BucketedForward(module, limit)
    return module


def _schedule_of(module: torch.nn.Module) -> BucketSchedule | None:
    """The schedule of a module, if its gradients are fused."""
    found = module.__dict__.get(
        "schedule", getattr(module.__dict__.get("forward"), "schedule", None)
    )
    return found if isinstance(found, BucketSchedule) else None
