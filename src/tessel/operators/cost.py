"""Costs: what each step of a plan costs a worker, known before execution.

Operations, messages and bytes are exact. Memory is that of the tensors that a worker holds during
a step: its input, its output, the packed and unpacked data, its parameters, and terms that sums
keep for later; libraries may need more. Times follow from a machine's rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from tessel.core import boxes
from tessel.core.layout import Layout
from tessel.operators.dct import Trigonometric
from tessel.operators.dft import ParDFT
from tessel.operators.layouts import box_of, num_messages, numel_sent, share_inside
from tessel.operators.leaf import Leaf
from tessel.operators.matrices import ParMatrix, ParMultilinear
from tessel.operators.planning import Branches, Local, OperatorPlan
from tessel.operators.rates import Network, Rates
from tessel.operators.restriction import ParRestriction
from tessel.operators.storage import leaves_of, needed, parameters_sent
from tessel.operators.tasks import OperatorTask, count_flops, dtype_after

KeptTensor = tuple[Layout, torch.dtype]  # a tensor that is kept during a step


@dataclass(frozen=True)
class ExplainedStep:
    """One step of a plan, with the dtypes of its numbers and the tensors that are kept meanwhile.

    Attributes:
        before, after: the layouts of the tensor.
        dtype_before, dtype_after: its dtypes.
        group: the tasks of a local step; empty for others.
        num_terms: the number of results that a sum adds; 0 for other steps.
        held: tensors that are needed later.
        takes_input: whether its input is the plan's input itself.
    """

    before: Layout
    after: Layout
    dtype_before: torch.dtype
    dtype_after: torch.dtype
    group: tuple[OperatorTask, ...] = ()
    num_terms: int = 0
    held: tuple[KeptTensor, ...] = ()
    takes_input: bool = False

    @property
    def is_transfer(self) -> bool:
        return not self.group and not self.num_terms

    @property
    def title(self) -> str:
        if self.num_terms:
            return f"sum of {self.num_terms}"
        if self.group:
            names = []
            for task in self.group:
                kind = "sum" if task.terms else "multiple"
                if isinstance(task.actor, Leaf):
                    kind = type(task.actor).__name__ + task.actor.mode
                dims = ",".join(map(str, task.dims))
                names.append(f"{kind} along {dims}" if dims else kind)
            return ", ".join(names)
        before, after = self.before.partition.shape, self.after.partition.shape
        grid = "×".join(map(str, after))
        return "transfer" if before == after else f"transfer to the grid {grid}"

    @property
    def layout(self) -> str:
        """The layout afterwards, in short: `8/2` is a length of 8 in two parts."""
        return self.after.brief


@dataclass(frozen=True)
class Cost:
    """The cost of a step for one worker; of all steps the largest memory, sums of the rest."""

    flops: float = 0.0
    num_messages: int = 0
    bytes_sent: int = 0
    memory: int = 0
    time: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.num_messages + other.num_messages,
            self.bytes_sent + other.bytes_sent,
            max(self.memory, other.memory),
            self.time + other.time,
        )


@dataclass(frozen=True)
class Counter:
    """Counts what the steps of a plan cost a worker.

    Args:
        rates: the speed of a worker.
        storage: the layout of each parameter.
        columns: the length of a batch, on each worker.
        network: the network between hosts; None for rates alone.
    """

    rates: Rates
    storage: Mapping[Leaf, Layout]
    columns: int = 1
    network: Network | None = None

    def costs(self, lines: Sequence[ExplainedStep], worker: int) -> list[Cost]:
        """The cost of each step for a worker."""
        parameters = self.parameter_bytes(worker)
        found = []
        for line in lines:
            if line.num_terms:
                result = self._bytes(line.after, line.dtype_after, worker)
                additions = (line.num_terms - 1) * result // line.dtype_after.itemsize
                seconds = 3 * (line.num_terms - 1) * result / self.rates.memory  # read two, write
                cost = Cost(float(additions), 0, 0, (line.num_terms + 1) * result, seconds)
            elif line.group:
                cost = self._local(line, worker)
            else:
                width = self.columns * line.dtype_before.itemsize
                sent = numel_sent(line.before, line.after, worker) * width
                received = numel_sent(line.after, line.before, worker) * width
                messages = num_messages(line.before, line.after, worker)
                arriving = num_messages(line.after, line.before, worker)
                source = self._bytes(line.before, line.dtype_before, worker)
                target = self._bytes(line.after, line.dtype_after, worker)
                network, inside = self.network, 1.0
                if network is not None and line.before.partition.size > network.workers_per_host:
                    inside = share_inside(line.before, line.after, network.workers_per_host)
                seconds = self._sending(
                    max(messages, arriving), max(sent, received), inside, line.before.partition.size
                )
                seconds += 2 * (sent + target) / self.rates.memory  # packed, and put together
                cost = Cost(0.0, messages, sent, source + target + sent + received, seconds)
            kept = sum(self._bytes(here, dtype, worker) for here, dtype in line.held)
            found.append(replace(cost, memory=cost.memory + kept + parameters))
        return found

    def _sending(self, messages: int, num_bytes: int, inside: float, workers: int) -> float:
        """The seconds for which messages travel, a share of them inside of a host.

        Between hosts all workers of a host share its connection, and all hosts share the network.
        """
        latency, rates = self.rates.latency, self.rates
        seconds = inside * (latency * messages + num_bytes / rates.bandwidth)
        network = self.network
        if inside == 1 or network is None:
            return seconds
        outside, sharing = 1 - inside, min(workers, network.workers_per_host)
        seconds += outside * messages * network.latency
        seconds += outside * num_bytes * sharing / network.bandwidth
        if network.bisection:
            seconds += outside * num_bytes * workers / network.bisection
        return seconds

    def parameter_bytes(self, worker: int) -> int:
        """The bytes of parameters that a worker stores."""
        return sum(
            boxes.volume(box_of(stored, worker)) * leaf.source.dtype.itemsize
            for leaf, stored in self.storage.items()
        )

    def _bytes(self, here: Layout, dtype: torch.dtype, at: int) -> int:
        return prod(here.shape_on(at)) * self.columns * dtype.itemsize

    def _local(self, line: ExplainedStep, at: int) -> Cost:
        shape = (*line.before.shape_on(at), self.columns)
        source = prod(shape) * line.dtype_before.itemsize
        target = self._bytes(line.after, line.dtype_after, at)
        # Messages and bytes bring parameters to their uses; weights are the bytes that are used.
        messages = sent = weights = 0
        for task in line.group:
            for leaf in leaves_of(task):
                width = leaf.source.dtype.itemsize
                here = needed(leaf, task, line.before)
                values, times = parameters_sent(self.storage[leaf], here, at)
                messages, sent = messages + times, sent + values * width
                weights += boxes.volume(box_of(here, at)) * width
        flops = count_flops(line.group, shape) if source else 0.0
        workers = line.before.partition.size
        near = workers if self.network is None else self.network.workers_per_host
        # parameters come from any worker: from this host as many as it has workers
        seconds = self.rates.step + self._sending(messages, sent, min(1.0, near / workers), workers)
        if source or target:
            seconds += self._work(line, flops, source, target, weights)
        # A sum within a step holds the results of all terms, and their total.
        results = sum(len(task.terms) for task in line.group)
        return Cost(flops, messages, sent, source + (1 + results) * target, seconds)

    def _work(
        self, line: ExplainedStep, flops: float, source: int, target: int, weights: int
    ) -> float:
        """The seconds of a local step without its messages."""
        actor, rates = line.group[0].actor, self.rates
        passing = (source + target + weights) / rates.memory
        last = len(line.before.shape) - 1
        has_rows = self.columns == 1 and any(last in task.dims for task in line.group)
        if isinstance(actor, ParDFT):
            # Weights of a real transform's adjoint, and cutting or filling modes, are passes of
            # their own over the tensor.
            weighing = sum(t.actor.is_weighted for t in line.group) * 2 * max(source, target)
            weighing += sum(t.actor.is_padded for t in line.group) * (source + target)
            return flops / (rates.fft if has_rows else rates.fft_across) + weighing / rates.memory
        if isinstance(actor, Trigonometric):  # numbers are permuted before and after a transform
            return flops / (rates.fft if has_rows else rates.fft_across) + 3 * passing
        if isinstance(actor, ParMultilinear):
            return passing + flops / rates.matrix + weights / rates.weights
        if isinstance(actor, ParMatrix):
            return passing + flops / rates.matrix
        if isinstance(actor, ParRestriction):
            return (min(source, target) + target) / rates.memory
        if terms := line.group[0].terms:
            # Of all kinds, since its transforms and matrices are not distinguished.
            return len(terms) * passing + flops / rates.fft
        return passing


def lines_of(plan: OperatorPlan, dtype: torch.dtype) -> Iterator[ExplainedStep]:
    """The steps of a plan in their order, those of a sum one term after the other.

    The caller keeps the input, so it counts in every step.

    Args:
        plan: the plan.
        dtype: the dtype of its input.
    """
    for line in _lines(plan, dtype, (), True):
        # A step that works on the input itself has counted it already.
        kept = () if line.takes_input else ((plan.source, dtype),)
        yield replace(line, held=(*line.held, *kept))


def _lines(
    plan: OperatorPlan, dtype: torch.dtype, held: tuple[KeptTensor, ...], takes_input: bool
) -> Iterator[ExplainedStep]:
    """The steps while other tensors are held; `takes_input` if the input is the whole plan's."""
    for step in plan.steps:
        if not isinstance(step, Branches):
            group = step.group if isinstance(step, Local) else ()
            after = dtype_after(group, dtype)
            ends = step.before, step.after, dtype, after
            yield ExplainedStep(*ends, group, held=held, takes_input=takes_input)
            dtype = after
        else:
            result = dtype
            kept = () if takes_input else ((step.before, dtype),)  # otherwise it counts anyway
            for number, branch in enumerate(step.plans):
                # All terms read the input, and their results are kept until the last one.
                waiting = (*held, *[(step.after, result)] * number)
                inner = list(_lines(branch, dtype, (*waiting, *kept), takes_input))
                if inner:  # the input of the first one is that of the sum
                    yield replace(inner[0], held=waiting)
                    yield from inner[1:]
                    result = inner[-1].dtype_after
            yield ExplainedStep(step.after, step.after, result, result, (), len(step.plans), held)
            dtype = result
        takes_input = False
