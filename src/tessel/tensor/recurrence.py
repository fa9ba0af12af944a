"""Recurrence along a split sequence: states are passed on from worker to worker, in a pipeline.

Each worker has some time steps of the sequences. The samples are cut into chunks. In step s the
worker at place p of the sequence takes chunk s - p through its time steps, from the state that the
previous place has sent: while one worker computes the second half of the samples, the next one
computes the first half. The data sent are one state of each sample for each border between parts.

A state is passed on by a `Move`: in step s the states of all places, concatenated along the
samples, are one tensor, of which each place gets the piece of the previous one. So gradients return
along the same way, in the same pipeline, and each worker makes the same movements.
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

# The recurrence of a chunk at one place: from its input and states to its output and states.
Compute = Callable[[torch.Tensor, list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Pipeline:
    """The way of states along a sequence.

    Args:
        layout: the layout of the input; sequence and samples may be split.
        time: the dimension of the sequence.
        batch: the dimension of the samples.
        backward: whether the recurrence runs from the end of the sequence to its beginning.
        num_chunks: the number of chunks of a worker's samples; some may be empty.
    """

    layout: Layout
    time: int
    batch: int
    backward: bool
    num_chunks: int

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The places along the axes of the sequence, in the order in which states visit them."""
        intervals = self.layout.cuts[self.time].intervals
        found = sorted(range(len(intervals)), key=lambda place: intervals[place])
        return tuple(reversed(found) if self.backward else found)

    @property
    def num_steps(self) -> int:
        return self.num_chunks + len(self.order) - 1

    @cached_property
    def rank(self) -> int:
        """The number of places that states visit before this worker."""
        index = self.layout.partition.index
        assert index is not None
        return self.order.index(self.layout.places(index)[self.time])

    def chunk(self, samples: Interval, number: int) -> Interval:
        """A chunk of some samples, counted from their first; empty for other numbers."""
        if not 0 <= number < self.num_chunks:
            return 0, 0
        return boxes.balanced(samples[1] - samples[0], self.num_chunks)[number]

    def held_at(self, rank: int, depth: int, width: int) -> Layout:
        """The layout of the states of all samples at one place, where they begin or end.

        Args:
            rank: the rank of the place.
            depth: the number of states of a sample, one for each layer.
            width: the length of a state.
        """
        intervals = [
            (start, stop if place == self.order[rank] else start)
            for start, stop in self.layout.cuts[self.batch].intervals
            for place in range(len(self.order))
        ]
        return self._states(intervals, self.layout.shape[self.batch], depth, width)

    @kept_in_job
    def by_samples(self, shape: Shape) -> Layout:
        """The layout of states that are split like the samples, and shared along all other axes."""
        grid, cut = self.layout.partition, self.layout.cuts[self.batch]
        shared = tuple(axis for axis in range(grid.dim) if axis not in cut.axes)
        return Layout(grid, shape, (Cut.whole(shape[0]), cut, Cut.whole(shape[2])), shared)

    @kept_in_job
    def shift(self, step: int, depth: int, width: int) -> tuple[Layout, Layout]:
        """The layouts of states after a step, and before the next one."""
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
        """A layout of (layers, samples, features): axes of samples and sequence cut the samples."""
        axes = (*self.layout.cuts[self.batch].axes, *self.layout.cuts[self.time].axes)
        cuts = (Cut.whole(depth), Cut(axes, tuple(intervals)), Cut.whole(width))
        return replace(self.layout, shape=(depth, length, width), cuts=cuts)


@kept_in_job
def pipeline(layout: Layout, time: int, batch: int, backward: bool) -> Pipeline:
    """The pipeline along a split sequence."""
    most = max(stop - start for start, stop in layout.cuts[batch].intervals)
    # As many chunks as places: with more, workers would idle less at both ends, but compute longer,
    # since torch takes as long for small products of a time step as for larger ones.
    return Pipeline(layout, time, batch, backward, min(most, len(layout.cuts[time].intervals)))


class Wave:
    """One recurrence over this worker's time steps, chunk by chunk.

    Each movement depends on the previous one, and the results depend on the last one, also on
    workers without work in a step: so all of them take part in all movements of a backward pass.

    Args:
        way: the way of states.
        x: this worker's part of the input.
        states: the initial states at the first place; empty at others.
        anchors: all tensors that the recurrence is computed from.
        width: the number of features of the output.
        compute: torch's recurrence of a chunk.
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
        # by one split: the gradient of each single slice would have the size of the input
        lengths = [b - a for a, b in (way.chunk(self.samples, k) for k in range(way.num_chunks))]
        self.chunks = x.split(lengths, way.batch)
        self.firsts = [each.split(lengths, 1) if way.rank == 0 else () for each in states]
        self.token = anchored_zeros((), *anchors)  # depends on the last movement
        self.received: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.ends: list[list[torch.Tensor]] = []

    def step(self, number: int) -> None:
        """Compute the chunk of this worker, if it has one in this step."""
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
        else:  # no time steps here: states are passed on unchanged
            y, self.passed = self._nothing(stop - start), given
        self.outputs.append(y)
        self.ends.append(self.passed)

    def exchange(self, number: int) -> None:
        """Pass the states on, and receive those for the next step, in one movement."""
        if number >= self.way.num_steps - 1:
            return
        between = move(*self.way.shift(number, self.depth, sum(self.widths)))
        found = between.apply(torch.cat(self.passed, -1))
        self.token = anchored_zeros((), found)
        self.received = list(found.split(self.widths, -1))

    def result(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """This worker's part of the output, and the last states, which only the last place has."""
        # a final empty piece costs nothing, and depends on all movements
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
    """Run waves, possibly in opposite directions, step by step."""
    for number in range(waves[0].way.num_steps):
        for each in waves:
            each.step(number)
        for each in waves:
            each.exchange(number)
