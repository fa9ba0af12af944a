"""What the exchange of a distributed convolution costs.

Workers of one thread convolve a tensor that is split along its rows, forward or with backward.
"nothing exchanged" is torch's own function on each worker's part, which gives wrong values at the
seam and gradients of its own, and is the least that it can cost. Tessel chooses between two ways,
which are measured as well: "by strips" the part stays where it lies and is convolved while its
surroundings travel; "by a copy" it is put into a larger tensor with what lies around it. Values and
all gradients are compared with those of one process first.

    python benchmarks/convolution.py [--rounds 8] [--quick] [--only TEXT]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from harness.claim import Case, Claim, Settings
from harness.command import main
from harness.contenders import OnWorkers
from torch import Tensor
from values import check_close

import tessel
from tessel.tensor import overlapped_convolution

ALONE = "nothing exchanged"
TOLERANCE = 1e-4  # gradients of weights are sums of some hundred thousand numbers in float32


class Problem:
    """A layer, a worker's part of its input, and of the gradient that comes back."""

    def __init__(self, settings: Settings) -> None:
        dims, channels, size = settings["dims"], settings["channels"], settings["size"]
        world = tessel.world()
        P = world.create_cartesian_topology_partition([1, 1, world.size, *[1] * (dims - 1)])
        torch.manual_seed(0)
        self.layer = getattr(tessel.nn, f"DistributedConv{dims}d")(
            P, channels, channels, 3, padding=1
        )
        self.function = getattr(F, f"conv{dims}d")
        self.backward = settings["backward"]
        self.shape = (1, channels, *[size] * dims)
        self.layout = tessel.Layout.balanced(P, self.shape)
        self.layer.requires_grad_(self.backward)
        self.x = self._part(1).requires_grad_(self.backward)
        self.grad = self._part(2)

    def _whole(self, seed: int) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed))

    def _part(self, seed: int) -> Tensor:
        return self.layout.local_part(self._whole(seed)).clone()

    def run(self, convolve: Callable[[Tensor], Tensor]) -> Tensor:
        """A step, after which no gradient is left."""
        y = convolve(self.x)
        if self.backward:
            y.backward(self.grad)
            self.x.grad = None
            self.layer.zero_grad()
        return y

    def alone(self, x: Tensor) -> Tensor:
        return self.function(x, self.layer.weight, self.layer.bias, padding=1)

    def check(self) -> None:
        """The layer gives the result and the gradients of one process."""
        whole = self._whole(1).requires_grad_(self.backward)
        expected, found = self.alone(whole), self.layer(self.x)
        check_close("result", found, self.layout.local_part(expected), TOLERANCE)
        if self.backward:
            over = (self.layer.weight, self.layer.bias)
            names = ("input's gradient", "weight's gradient", "bias's gradient")
            ours = torch.autograd.grad(found, (self.x, *over), self.grad)
            theirs = torch.autograd.grad(expected, (whole, *over), self._whole(2))
            theirs = (self.layout.local_part(theirs[0]), *theirs[1:])
            for each in zip(names, ours, theirs, strict=True):
                check_close(*each, TOLERANCE)


def by_tessel(settings: Settings) -> Callable[[], object]:
    problem = Problem(settings)
    problem.check()
    return lambda: problem.run(problem.layer)


def by_strips(settings: Settings) -> Callable[[], object]:
    overlapped_convolution.LEAST_VALUES = 0
    return by_tessel(settings)


def by_a_copy(settings: Settings) -> Callable[[], object]:
    overlapped_convolution.LEAST_VALUES = 1 << 60
    return by_tessel(settings)


def without_exchange(settings: Settings) -> Callable[[], object]:
    problem = Problem(settings)
    return lambda: problem.run(problem.alone)


def cases() -> list[Case]:
    sizes = [(2, 16, 512, 2), (2, 64, 512, 2), (3, 16, 64, 2), (2, 16, 512, 4)]
    return [
        Case(
            f"{channels} × {'×'.join([str(size)] * dims)}, "
            f"{'with backward' if backward else 'forward'}, {workers} workers",
            workers,
            {"dims": dims, "channels": channels, "size": size, "backward": backward},
            aims={ALONE: 1.1 if workers == 2 else None},  # else it is about too few cores
            seconds=0.2,
        )
        for dims, channels, size, workers in sizes
        for backward in (False, True)
    ]


CLAIM = Claim(
    "convolution",
    "a convolution's step with halo against the same without exchange",
    cases(),
    [
        OnWorkers("Tessel", by_tessel, split=True),
        OnWorkers(ALONE, without_exchange),
        OnWorkers("Tessel by strips", by_strips),
        OnWorkers("Tessel by a copy", by_a_copy),
    ],
    rounds=8,
    note="""Kernels of 3, float32, split along the first dimension of space. With backward, the
    gradients of the weights are summed over the workers, too.""",
)

if __name__ == "__main__":
    main(CLAIM, __doc__)
