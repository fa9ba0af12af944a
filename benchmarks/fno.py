"""Training steps of a Fourier neural operator on 2 and 4 workers against 1, one thread each.

A step is forward, backward and Adam on a volume of 64³, which lies in slabs. Peers are Tessel's own
model on one worker, and the same network written with functions of torch alone, as it is usually
done. Before it is timed Tessel's model is compared with that: its output and its gradients.

The efficiency on P workers is 1 / (P × ratio), of 2 cores at most 2 / P.

    python benchmarks/fno.py [--rounds 4] [--quick] [--only TEXT]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from harness.claim import Case, Claim, Settings
from harness.command import main
from harness.contenders import InOneProcess, OnWorkers
from torch import Tensor, nn
from torch.nn.functional import gelu
from values import check_close

import tessel
from tessel.models import FNO

ONE, TORCH = "Tessel, 1 worker", "torch, 1 thread"


class PlainFNO(nn.Module):
    """The network with functions of torch alone, from the state of an FNO."""

    def __init__(self, state: dict[str, Tensor], modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.blocks = sum(name.endswith("spectral.weight") for name in state)
        self.values = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(value.clone()) for name, value in state.items()}
        )

    def forward(self, x: Tensor) -> Tensor:  # (batch, channels, *space)
        v = self._mix("lift", x)
        for number in range(1, self.blocks + 1):
            v = self._convolve(number - 1, v) + self._mix(f"blocks/{number - 1}/mix", v)
            v = gelu(v) if number < self.blocks else v
        return self._mix("projection/outer", gelu(self._mix("projection/inner", v)))

    def _mix(self, name: str, v: Tensor) -> Tensor:
        mixed = torch.einsum("oi,bi...->bo...", self.values[f"{name}/weight"], v)
        return mixed + self.values[f"{name}/bias"].reshape(-1, *[1] * (v.dim() - 2))

    def _convolve(self, number: int, v: Tensor) -> Tensor:
        dims = tuple(range(2, v.dim()))
        weight = torch.view_as_complex(self.values[f"blocks/{number}/spectral/weight"])
        spectrum = torch.fft.rfftn(v, dim=dims)
        low = torch.zeros_like(spectrum)
        for corner in self._corners(len(dims)):
            low[corner] = torch.einsum("oi...,bi...->bo...", weight[corner], spectrum[corner])
        return torch.fft.irfftn(low, s=v.shape[2:], dim=dims)

    def _corners(self, num_dims: int) -> Iterator[Any]:
        """Low frequencies, above and below zero in all dimensions but the last."""
        first, last = slice(self.modes), slice(-self.modes, None)
        for halves in product((first, last), repeat=num_dims - 1):
            yield (..., *halves, first)


def slabs() -> tessel.Partition:
    world = tessel.world()
    return world.create_cartesian_topology_partition([1, 1, world.size, 1, 1])


def made(settings: Settings) -> FNO:
    torch.manual_seed(0)
    return FNO(slabs(), 1, 1, settings["width"], settings["modes"], settings["blocks"])


def training(model: nn.Module, settings: Settings) -> Callable[[], object]:
    shape = [1, 1, *[settings["size"]] * 3]
    x = torch.randn(tessel.Layout.balanced(slabs(), shape).local_shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum() / settings["size"] ** 3  # this worker's share of the mean
        loss.backward()
        optimizer.step()
        return loss

    return step


def check(model: FNO, settings: Settings) -> None:
    """The output and the gradients of a small input are those of torch."""
    shape = [1, 1, *[2 * settings["modes"] + 2] * 3]
    layout = tessel.Layout.balanced(model.P_x, shape)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    plain = PlainFNO(model.state_dict(), settings["modes"])
    expected, found = plain(x), model(layout.local_part(x))
    check_close("the output", found, layout.local_part(expected), 1e-5)
    expected.square().sum().backward()
    found.square().sum().backward()
    for name, each in model.named_parameters():
        whole = plain.values[name.replace(".", "/")].grad
        assert each.grad is not None and whole is not None
        if "spectral" in name:  # each worker has those of its modes
            whole = model.get_submodule(name.rpartition(".")[0]).layout.local_part(whole)
        check_close(f"the gradient of {name}", each.grad, whole, 1e-4)
        each.grad = None


def by_tessel(settings: Settings) -> Callable[[], object]:
    model = made(settings)
    check(model, settings)
    return training(model, settings)


def by_torch(settings: Settings) -> Callable[[], object]:
    return training(PlainFNO(made(settings).state_dict(), settings["modes"]), settings)


def cases() -> list[Case]:
    return [
        Case(
            f"64³, width {width}, 8 modes, 4 blocks, {workers} workers",
            workers,
            {"size": 64, "width": width, "modes": 8, "blocks": 4},
        )
        for workers in (2, 4)
        for width in (8, 16, 32)
    ]


CLAIM = Claim(
    "fno",
    "training steps of a Fourier neural operator on 2 and 4 workers against 1",
    cases(),
    [
        OnWorkers("Tessel", by_tessel, split=True),
        InOneProcess(ONE, by_tessel, threads=1),
        InOneProcess(TORCH, by_torch, threads=1),
    ],
    rounds=4,
    note="""float32, a batch of one, in slabs. The efficiency on P workers is 1 / (P × ratio); where
    there are fewer cores than workers it is at most cores / P.""",
)

if __name__ == "__main__":
    main(CLAIM, __doc__)
