"""Recurrence along a split sequence: states are passed on from worker to worker, in a pipeline.

Each worker keeps its time steps of the sequences. The samples are cut into chunks. In step s the
worker at place p of the sequence takes chunk s - p through its time steps, from the state that the
place before has sent: while one worker has the second half of the samples, the next one has the
first half. What travels is one state of each sample for each border between parts.

A state is passed on by a `Move`: in step s the states of all places, one behind the other along the
samples, are one tensor, of which every place gets the piece of the place before. So derivatives go
back along the same way, in the same pipeline, and each worker makes the same movements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tessel.core import boxes
from tessel.core.boxes import Interval
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.shared import anchored_zeros
from tessel.tensor.tensor import move
from tessel.transport import kept_in_job

# What the samples of a place do in a chunk: from its input and states to its output and states.
Compute = Callable[[torch.Tensor, list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Pipeline:
    """How states travel along a sequence.

    Args:
        layout: of the input; sequence and samples may be split.
        time: the dimension of the sequence.
        batch: that of the samples.
        backward: whether the recurrence goes from the end of the sequence to its beginning.
        num_chunks: into how many chunks the samples of a worker are cut; some may be empty.
    """

    layout: Layout
    time: int
    batch: int
    backward: bool
    num_chunks: int

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The places along the axes of the sequence in the order in which states pass them."""
        intervals = self.layout.cuts[self.time].intervals
        found = sorted(range(len(intervals)), key=lambda place: intervals[place])
        return tuple(reversed(found) if self.backward else found)

    @property
    def num_steps(self) -> int:
        return self.num_chunks + len(self.order) - 1

    @cached_property
    def rank(self) -> int:
        """How many places states have passed before they come here."""
        index = self.layout.partition.index
        assert index is not None
        return self.order.index(self.layout.places(index)[self.time])

    def chunk(self, samples: Interval, number: int) -> Interval:
        """A chunk of some samples, counted from their first; an empty one for other numbers."""
        if not 0 <= number < self.num_chunks:
            return 0, 0
        return boxes.balanced(samples[1] - samples[0], self.num_chunks)[number]

    def held_at(self, rank: int, depth: int, width: int) -> Layout:
        """States of all samples where states begin, or end: at one place of the sequence.

        Args:
            rank: of the place.
            depth: how many states a sample has, one for each layer.
            width: of a state.
        """
        intervals = [
            (start, stop if place == self.order[rank] else start)
            for start, stop in self.layout.cuts[self.batch].intervals
            for place in range(len(self.order))
        ]
        return self._states(intervals, self.layout.shape[self.batch], depth, width)

    @kept_in_job
    def by_samples(self, shape: Shape) -> Layout:
        """States that lie as the samples do, and are the same along all other axes."""
        grid, cut = self.layout.partition, self.layout.cuts[self.batch]
        shared = tuple(axis for axis in range(grid.dim) if axis not in cut.axes)
        return Layout(grid, shape, (Cut.whole(shape[0]), cut, Cut.whole(shape[2])), shared)

    @kept_in_job
    def shift(self, step: int, depth: int, width: int) -> tuple[Layout, Layout]:
        """How states lie after a step, and before the next."""
        places, at = range(len(self.order)), {p: q for q, p in enumerate(self.order)}
        own: list[Interval] = []
        before: list[Interval] = []
        for samples in self.layout.cuts[self.batch].intervals:
            first, length = len(own), own[-1][1] if own else 0
            for place in places:
                start, stop = self.chunk(samples, step - at[place])
                own.append((length, length + stop - start))
                length += stop - start
            before += [
                own[first + self.order[at[place] - 1]] if at[place] else (0, 0) for place in places
            ]
        length = own[-1][1]
        return (
            self._states(own, length, depth, width),
            self._states(before, length, depth, width),
        )

    def _states(self, intervals: Sequence[Interval], length: int, depth: int, width: int) -> Layout:
        """Of (layers, samples, features), the samples cut by all axes of samples and sequence."""
        axes = (*self.layout.cuts[self.batch].axes, *self.layout.cuts[self.time].axes)
        cuts = (Cut.whole(depth), Cut(axes, tuple(intervals)), Cut.whole(width))
        return replace(self.layout, shape=(depth, length, width), cuts=cuts)


@kept_in_job
def pipeline(layout: Layout, time: int, batch: int, backward: bool) -> Pipeline:
    """The way of states along a sequence that is split."""
    most = max(stop - start for start, stop in layout.cuts[batch].intervals)
    # As many chunks as places: with more, workers would wait less at the ends, and longer for
    # torch, whose small products of a time step take as long as larger ones.
    return Pipeline(layout, time, batch, backward, min(most, len(layout.cuts[time].intervals)))


class Wave:
    """One recurrence over this worker's time steps, chunk by chunk.

    Every movement hangs on the one before, and the results hang on the last one, also on workers
    that have nothing to compute in a step: all of them come to all movements in a backward pass.

    Args:
        way: how states travel.
        x: this worker's part of the input.
        states: what the first place begins with; empty on others.
        anchors: all that the recurrence is computed from.
        width: of the output.
        compute: what torch does with a chunk.
    """

    def __init__(
        self,
        way: Pipeline,
        x: torch.Tensor,
        states: Sequence[torch.Tensor],
        anchors: Sequence[torch.Tensor],
        width: int,
        compute: Compute,
    ) -> None:
        self.way, self.compute, self.width = way, compute, width
        self.shape = list(x.shape)
        self.widths = [each.shape[-1] for each in states]
        self.depth = len(states[0])
        box = way.layout.box()
        assert box is not None
        self.samples = box[way.batch]
        # at once: a gradient of each piece by itself would be one of all of the input
        lengths = [b - a for a, b in (way.chunk(self.samples, k) for k in range(way.num_chunks))]
        self.chunks = x.split(lengths, way.batch)
        self.firsts = [each.split(lengths, 1) if way.rank == 0 else () for each in states]
        self.token = anchored_zeros((), *anchors)  # what came last hangs on it
        self.received: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.ends: list[list[torch.Tensor]] = []

    def step(self, number: int) -> None:
        """Compute a chunk, if this worker has one in this step."""
        way = self.way
        start, stop = way.chunk(self.samples, number - way.rank)
        if start == stop:
            self.passed = [self.token.expand(self.depth, 0, width) for width in self.widths]
            return
        given = self.received
        if way.rank == 0:
            given = [each[number] + self.token for each in self.firsts]
        x = self.chunks[number - way.rank]
        if x.shape[way.time]:
            y, *self.passed = self.compute(x, given)
        else:  # no time steps here: states pass through
            y, self.passed = self._nothing(stop - start), given
        self.outputs.append(y)
        self.ends.append(self.passed)

    def exchange(self, number: int) -> None:
        """Pass the states on, and get those for the next step, in one message."""
        if number >= self.way.num_steps - 1:
            return
        between = move(*self.way.shift(number, self.depth, sum(self.widths)))
        found = between.apply(torch.cat(self.passed, -1))
        self.token = anchored_zeros((), found)
        self.received = list(found.split(self.widths, -1))

    def result(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """This worker's part of the output, and the last states, empty but at the last place."""
        # an empty piece behind the others costs nothing, and hangs on all that came
        y = torch.cat([*self.outputs, self._nothing(0)], self.way.batch)
        is_last = self.way.rank == len(self.way.order) - 1
        ends = [each for each in self.ends if is_last]
        ends.append([self.token.expand(self.depth, 0, width) for width in self.widths])
        return y, [torch.cat(each, 1) for each in zip(*ends, strict=True)]

    def _nothing(self, count: int) -> torch.Tensor:
        shape = [*self.shape[:-1], self.width]
        shape[self.way.batch] = count
        return self.token.expand(shape)


def run_together(*waves: Wave) -> None:
    """Let waves go their ways, which may be opposite ones, step by step."""
    for number in range(waves[0].way.num_steps):
        for each in waves:
            each.step(number)
        for each in waves:
            each.exchange(number)
