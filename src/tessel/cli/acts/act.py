"""Act: one part of the demo, and the examination that its rows are made of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessel.layout import Layout
from tessel.partition import world
from tessel.testing import count_traffic

Reference = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Share:
    """What one worker saw of an operator A that all workers applied together.

    Args:
        value_error: the largest difference of its output from the reference.
        gradient_error: the largest difference of its input's gradient from the reference.
        forward_product: its share of ⟨Ax, y⟩.
        adjoint_product: its share of ⟨x, Aᴴy⟩.
        bytes_sent: what it sent in one application.
        messages: in how many messages.
        seconds: the median time of an application.
    """

    value_error: float
    gradient_error: float
    forward_product: float
    adjoint_product: float
    bytes_sent: int
    messages: int
    seconds: float


@dataclass(frozen=True)
class Row:
    """What all workers saw of one operator: a line of the demo's table."""

    name: str
    dot_test: float
    value_error: float
    gradient_error: float
    bytes_sent: int
    messages: int
    seconds: float

    @classmethod
    def of(cls, name: str, shares: Sequence[Share]) -> Row:
        """Put the workers' shares together."""
        forward = sum(share.forward_product for share in shares)
        adjoint = sum(share.adjoint_product for share in shares)
        return cls(
            name,
            dot_test=abs(forward - adjoint) / max(abs(forward), abs(adjoint), 1e-300),
            value_error=max(share.value_error for share in shares),
            gradient_error=max(share.gradient_error for share in shares),
            bytes_sent=sum(share.bytes_sent for share in shares),
            messages=sum(share.messages for share in shares),
            seconds=max(share.seconds for share in shares),
        )

    @property
    def worst(self) -> float:
        """The largest of the three errors."""
        return max(self.dot_test, self.value_error, self.gradient_error)


@dataclass(frozen=True)
class Sketch:
    """A tensor before and after, for the demo's picture."""

    titles: tuple[str, str]
    domain: Layout
    codomain: Layout
    element_size: int


@dataclass(frozen=True)
class Act:
    """One part of the demo.

    Args:
        title: what it shows.
        rows: the names of its rows.
        perform: runs on every worker, for a tensor of this size; yields one share for each row.
        sketch: runs on every worker; gives what to draw.
        limit: the largest error that passes.
    """

    title: str
    rows: tuple[str, ...]
    perform: Callable[[int], Iterator[Share]]
    sketch: Callable[[int], Sequence[Sketch]] = lambda size: ()
    limit: float = 1e-12


def wave(shape: Sequence[int], phase: float = 0.0) -> Tensor:
    """A tensor whose values are a function of the global index, so that every layout sees it.

    >>> from tessel.cli.acts.act import wave
    >>> wave((2, 2)).shape
    torch.Size([2, 2])
    """
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(0.7 * index + phase).reshape(tuple(shape))


def examine(
    operator: Callable[[Tensor], Tensor],
    inputs: Sequence[Tensor],
    reference: Reference,
    repeats: int = 9,
) -> Share:
    """Compare an operator on all workers with what one process computes, on every worker.

    Args:
        operator: takes this worker's input to this worker's output, together with the others.
        inputs: the inputs of all workers.
        reference: takes them to the outputs of all workers, in one process, with plain torch.
        repeats: how often to apply the operator for its time.
    """
    me = world().rank or 0
    x = inputs[me].clone().requires_grad_()
    with count_traffic() as traffic:
        y = operator(x)
    outputs, weights, gradient = _one_process(inputs, reference, me)
    (adjoint,) = torch.autograd.grad(y, x, weights, retain_graph=True)
    (spread,) = torch.autograd.grad(y, x, weights * y.detach())
    return Share(
        value_error=_largest(y.detach() - outputs),
        gradient_error=_largest(spread - gradient),
        forward_product=float((y.detach() * weights).sum()),
        adjoint_product=float((x.detach() * adjoint).sum()),
        bytes_sent=traffic.bytes_sent,
        messages=traffic.messages,
        seconds=_median_seconds(operator, x.detach(), repeats),
    )


def _one_process(
    inputs: Sequence[Tensor], reference: Reference, me: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The output of worker `me`, its weights w, and the gradient of ½ Σ w y² over all workers."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = reference(leaves)
    weights = [wave(y.shape, phase=1.0 + worker) for worker, y in enumerate(outputs)]
    loss = sum((w * y * y).sum() / 2 for w, y in zip(weights, outputs, strict=True))
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)  # type: ignore[arg-type]
    gradient = gradients[me]
    return (
        outputs[me].detach(),
        weights[me],
        torch.zeros_like(leaves[me]) if gradient is None else gradient,
    )


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


def _median_seconds(operator: Callable[[Tensor], Tensor], x: Tensor, repeats: int) -> float:
    times = []
    with torch.no_grad():
        for _ in range(repeats):
            begin = time.perf_counter()
            operator(x)
            times.append(time.perf_counter() - begin)
    return statistics.median(times)
