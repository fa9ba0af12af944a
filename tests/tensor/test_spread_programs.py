"""Programs as users write them: trained on spread tensors, they are those of one process.

A program is told how to get its data (`put`), and nothing else of workers. Its model is as it is,
or converted. What it reports, losses and parameters step by step, is compared with one process.

Tests `tensor/tensor.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import tessel
from parity import values

Run = Callable[..., list[Any]]
Put = Callable[[Tensor], Any]
Convert = Callable[[nn.Module], nn.Module]
Report = list[Any]

TOLERANCE = 1e-10  # of some steps of an optimizer in float64


def grid(split: int, ndim: int) -> tessel.Partition:
    """All workers along one dimension."""
    world = tessel.world()
    shape = [world.size if dim == split else 1 for dim in range(ndim)]
    return world.create_cartesian_topology_partition(shape)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[int], Any], count: int = 3
) -> Report:
    """The losses and the parameters of some steps."""
    report: Report = []
    for k in range(count):
        optimizer.zero_grad()
        value = loss(k)
        value.backward()
        optimizer.step()
        report += [value.detach(), *(p.detach().clone() for p in model.parameters())]
    return report


# -- programs -------------------------------------------------------------------------------------


class VAE(nn.Module):
    """Encoder and decoder are methods, which the program calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.spread = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.up, self.last = nn.Linear(3, 8), nn.Linear(8, 12)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.first(x))
        return self.mean(hidden), self.spread(hidden)

    def decode(self, z: Tensor) -> Tensor:
        return self.last(F.gelu(self.up(z)))


def vae(put: Put, convert: Convert) -> Report:
    model = convert(VAE().double())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def loss(k: int) -> Any:
        x, noise = put(values((7, 12), k)), values((7, 3), 90 + k)
        mean, log_var = model.encode(x)
        z = mean + noise * torch.exp(0.5 * log_var)
        y = model.decode(z)
        divergence = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp(), dim=1)
        return F.binary_cross_entropy_with_logits(y, x.sigmoid()) + divergence.mean()

    return steps(model, optimizer, loss)


def gan(put: Put, convert: Convert) -> Report:
    """Two models and two optimizers; the second learns from what the first made."""
    width = 6
    # no bias before the norm: its gradient is zero but for rounding, which Adam makes large
    first = nn.Linear(3, 8, bias=False)
    maker = nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, width))
    critic = nn.Sequential(nn.Linear(width, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    maker, critic = convert(maker.double()), convert(critic.double())
    makers = torch.optim.Adam(maker.parameters(), 1e-2, betas=(0.5, 0.999))
    critics = torch.optim.RMSprop(critic.parameters(), 1e-2)
    report: Report = []
    for k in range(4):
        real, noise = put(values((9, width), k)), put(values((9, 3), 30 + k))
        ones, zeros = torch.ones(9, 1, dtype=torch.float64), torch.zeros(9, 1, dtype=torch.float64)
        critics.zero_grad()
        fake = maker(noise)
        loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        loss.backward()
        critics.step()
        makers.zero_grad()
        fooled = F.binary_cross_entropy_with_logits(critic(fake), ones)
        fooled.backward()
        makers.step()
        report += [loss.detach(), fooled.detach(), *maker.parameters(), *maker.buffers()]
    return [*report, *critic.parameters()]


class Reader(nn.Module):
    """A classifier of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.reader = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 4)

    def forward(self, words: Tensor) -> Tensor:
        _, (hidden, _) = self.reader(self.words(words))
        return self.head(torch.cat([hidden[-2], hidden[-1]], dim=1))


def texts(put: Put, convert: Convert) -> Report:
    model = convert(Reader().double())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def loss(k: int) -> Any:
        words = put((values((7, 5), k).abs() * 10).long() % 11)
        labels = torch.arange(7) % 4
        y = model(words)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return F.cross_entropy(y, labels, label_smoothing=0.1)

    return steps(model, optimizer, loss)


class UNet(nn.Module):
    """Two levels, with a path over."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU())
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down(x)
        b = self.up(self.deep(F.max_pool2d(a, 2)))
        return self.last(torch.cat([a, b], dim=1))


def segmentation(put: Put, convert: Convert) -> Report:
    """Cross-entropy and a dice loss, from functions of each element and sums."""
    model = convert(UNet().double())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)

    def loss(k: int) -> Any:
        image = values((3, 1, 12, 8), k)
        target = (image[:, 0] > 0.1).long()
        logits = model(put(image))
        chances = logits.softmax(dim=1)
        truth = F.one_hot(target, 2).permute(0, 3, 1, 2).to(chances.dtype)
        common = (chances * truth).sum(dim=(0, 2, 3))
        both = chances.sum(dim=(0, 2, 3)) + truth.sum(dim=(0, 2, 3))
        dice = 1 - ((2 * common + 1) / (both + 1)).mean()
        return F.cross_entropy(logits, target) + dice

    return steps(model, optimizer, loss)


def contrast(put: Put, convert: Convert) -> Report:
    """Two views of each sample against all others: x @ x.T over the whole batch."""
    model = convert(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double())
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    report: Report = []
    for k in range(3):
        one, two = values((5, 6), k), values((5, 6), 40 + k)

        def loss(one: Tensor = one, two: Tensor = two) -> Any:
            optimizer.zero_grad()
            z = F.normalize(torch.cat([model(put(one)), model(put(two))]), dim=1)
            alike = z @ z.T / 0.5
            alike = alike.masked_fill(torch.eye(10, dtype=torch.bool), -1e9)
            partner = torch.arange(10).roll(5)
            value = F.cross_entropy(alike, partner)
            value.backward()
            return value

        report += [optimizer.step(loss).detach(), *(p.detach().clone() for p in model.parameters())]
    return report


def physics(put: Put, convert: Convert) -> Report:
    """A network that solves u_t = u_xx: derivatives of its output by its input, in the loss."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model = convert(model.double())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def loss(k: int) -> Any:
        points = put(values((9, 2), k)).requires_grad_()
        u = model(points)
        (du,) = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)
        u_x, u_t = du[:, 0:1], du[:, 1:2]
        (ddu,) = torch.autograd.grad(u_x.sum(), points, create_graph=True)
        border = put(values((5, 2), 60 + k))
        return (u_t - ddu[:, 0:1]).square().mean() + model(border).square().mean()

    return steps(model, optimizer, loss)


class Denoiser(nn.Module):
    """Convolutions that know the time, by an embedding of sines."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 4))
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(-math.log(100) * torch.arange(3, dtype=x.dtype, device=x.device) / 3)
        angles = t[:, None].to(x.dtype) * rates[None]
        code = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        y = self.norm(self.first(x)) + code[:, :, None, None]
        return self.last(F.silu(y))


def diffusion(put: Put, convert: Convert) -> Report:
    model = convert(Denoiser().double())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    left = torch.cumprod(1 - torch.linspace(1e-2, 0.2, 10, dtype=torch.float64), 0)

    def loss(k: int) -> Any:
        x, noise = put(values((4, 2, 8, 6), k)), put(values((4, 2, 8, 6), 70 + k))
        t = (torch.arange(4) * 3 + k) % 10
        a = left[t][:, None, None, None]
        return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)

    report = steps(model, optimizer, loss)
    with torch.no_grad():  # a few steps back
        x = put(values((4, 2, 8, 6), 99))
        for t in (9, 6, 3):
            e = model(x, torch.full((4,), t))
            x = (x - (1 - left[t]).sqrt() * e) / left[t].sqrt()
    return [*report, x]


class Autoencoder(nn.Module):
    """With checkpoints of modules, functions and lambdas."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.down = nn.Sequential(nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.Tanh())
        self.middle = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.GELU(), nn.Conv1d(4, 4, 1))
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv1d(4, 2, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        x = checkpoint_sequential(self.middle, 2, x, use_reentrant=self.reentrant)
        x = checkpoint(lambda y: y * y.sigmoid(), x, use_reentrant=self.reentrant)
        return checkpoint(self.up, x, use_reentrant=self.reentrant)


def checkpoints(put: Put, convert: Convert, reentrant: bool = False) -> Report:
    model = convert(Autoencoder(reentrant).double())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)

    def loss(k: int) -> Any:
        x = put(values((4, 2, 12), k))
        return F.l1_loss(model(x), x)

    return steps(model, optimizer, loss)


def reentrant_checkpoints(put: Put, convert: Convert) -> Report:
    return checkpoints(put, convert, reentrant=True)


def recurrent_cells(put: Put, convert: Convert) -> Report:
    """A loop over the time, step by step."""
    cell, head = nn.GRUCell(3, 5).double(), nn.Linear(5, 2).double()
    model = convert(nn.ModuleDict({"cell": cell, "head": head}))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(k: int) -> Any:
        x, state = put(values((5, 4, 3), k)), None
        total: Any = 0.0
        for moment in x.unbind(1):
            state = cell(moment, state)
            total = total + head(state).square().mean()
        return total

    return steps(model, optimizer, loss)


# program → splits of its data that are tried, by the number of dimensions
PROGRAMS: dict[Callable[..., Report], Sequence[int]] = {
    vae: (0, 1),
    gan: (0, 1),
    texts: (0, 1),
    segmentation: (0, 2, 3),
    contrast: (0, 1),
    physics: (0, 1),
    diffusion: (0, 1, 2),
    checkpoints: (0, 1, 2),
    reentrant_checkpoints: (0, 2),
    recurrent_cells: (0, 1, 2),
}


def check_program(name: str, split: int) -> None:
    program = globals()[name]

    def put(x: Tensor) -> Any:
        return tessel.spread(x, grid(split, x.dim()))

    def converted(model: nn.Module) -> nn.Module:
        dims = 3 if program in (checkpoints, reentrant_checkpoints, recurrent_cells) else 2
        dims = 4 if program in (segmentation, diffusion) else dims
        return tessel.nn.distribute_module(model, grid(split, dims))

    def plain(model: nn.Module) -> nn.Module:
        return model

    torch.manual_seed(0)
    expected = program(plain, plain)
    for convert in (plain, converted):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tessel.tensor.GatherWarning)
            got = program(put, convert)
        assert len(got) == len(expected)
        for k, (a, b) in enumerate(zip(got, expected, strict=True)):
            a = a.full() if isinstance(a, tessel.Tensor) else a
            off = (a - b).abs().max().item()
            assert off < TOLERANCE, f"{convert.__name__}, number {k} is off by {off}"


@pytest.mark.parametrize("nprocs", [1, 3, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=[each.__name__ for each in PROGRAMS])
def test_programs(run: Run, program: Callable[..., Report], nprocs: int) -> None:
    for split in PROGRAMS[program]:
        run(check_program, program.__name__, split, nprocs=nprocs, timeout=100)
