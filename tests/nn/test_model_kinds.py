"""Small models of the kinds that people use: tables of vectors, places of maxima, pyramids, noise.

Output, all gradients and buffers are those of one process, and nothing is gathered. What a model
draws is the same on any number of workers, however its input is split.

Tests `nn/convert.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import tessel
from parity import close, values
from tessel import Partition
from tessel.testing import check_model

Run = Callable[..., list[Any]]


def line(axis: int, dims: int = 4) -> Partition:
    """All workers along one axis."""
    sizes = [1] * dims
    sizes[axis] = tessel.world().size
    return tessel.world().create_cartesian_topology_partition(sizes)


class Quantized(nn.Module):
    """A VQ-VAE: the nearest vector of a table, with a gradient straight through."""

    def __init__(self, by_distance: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by_distance = by_distance
        self.encoder, self.decoder = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 3, 3, padding=1)
        self.table = nn.Embedding(7, 5)
        self.double()

    def forward(self, x: Tensor) -> Any:
        z = self.encoder(x)
        rows, table = z.permute(0, 2, 3, 1).reshape(-1, 5), self.table.weight
        if self.by_distance:
            nearest = torch.cdist(rows, table).argmin(1)
            found = self.table(nearest)
        else:
            squares = rows.pow(2).sum(1, keepdim=True) + table.pow(2).sum(1)
            nearest = (squares - 2 * rows @ table.t()).argmin(1)
            found = F.one_hot(nearest, 7).to(x.dtype) @ table
        found = found.view(len(x), *z.shape[2:], 5).permute(0, 3, 1, 2)
        loss = F.mse_loss(found, z.detach()) + 0.25 * F.mse_loss(found.detach(), z)
        used = F.one_hot(nearest, 7).to(x.dtype).mean(0)
        perplexity = torch.exp(-(used * (used + 1e-10).log()).sum())
        return self.decoder(z + (found - z).detach()), loss, perplexity


class Averaged(nn.Module):
    """The same with a table of buffers, which averages learn in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Conv2d(3, 5, 3, padding=1)
        self.register_buffer("table", torch.randn(7, 5))
        self.register_buffer("sums", torch.randn(7, 5))
        self.register_buffer("counts", torch.ones(7))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        rows = z.permute(0, 2, 3, 1).flatten(0, 2)
        nearest = torch.cdist(rows, self.table).argmin(1)
        chosen = F.one_hot(nearest, 7).type(rows.dtype)
        found = F.embedding(nearest, self.table).view(len(x), *z.shape[2:], -1).movedim(-1, 1)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.t() @ rows, alpha=0.1)
                self.table.copy_(self.sums / (self.counts + 1e-5).unsqueeze(1))
        return z + (found - z).detach()


class Unpooled(nn.Module):
    """Values go back to where the largest ones were."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pool = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
        self.unpool = getattr(nn, f"MaxUnpool{dims}d")(2)
        self.conv = getattr(nn, f"Conv{dims}d")(3, 3, 3, padding=1).double()

    def forward(self, x: Tensor) -> Tensor:
        y, places = self.pool(self.conv(x))
        return self.conv(self.unpool(torch.tanh(y), places, output_size=x.shape))


class Neighbouring(nn.Module):
    """Attention of each place to a window around it, whose keys and values come by a halo."""

    def __init__(self, by_views: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by_views = by_views
        self.inputs, self.output = nn.Conv2d(3, 12, 1), nn.Conv2d(4, 3, 1)
        self.offsets = nn.Parameter(torch.randn(2, 9, 1, 1))
        self.double()

    def windows(self, x: Tensor) -> Tensor:  # (batch, heads, channels of a head, 9, height, width)
        if self.by_views:
            found = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1).flatten(4)
            return found.movedim(4, 2).unflatten(1, (2, 2))
        return F.unfold(x, 3, padding=1).view(len(x), 2, 2, 9, *x.shape[2:])

    def forward(self, x: Tensor) -> Any:
        query, key, value = self.inputs(x).chunk(3, 1)
        near = (query.unflatten(1, (2, 2)).unsqueeze(3) * self.windows(key)).sum(2) + self.offsets
        found = (near.softmax(2).unsqueeze(2) * self.windows(value)).sum(3)
        return self.output(found.flatten(1, 2))


class Frames(nn.Module):
    """A video autoencoder: chunks of frames, convolved with the last frames of those before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Conv3d(a, b, 3, padding=(0, 1, 1)) for a, b in ((2, 4), (4, 3))
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Any] = [None, None]
        found = []
        for start in range(0, x.shape[2], 2):
            y = x[:, :, start : start + 2]
            for k, layer in enumerate(self.layers):
                before = kept[k]
                joined = y if before is None else torch.cat([before, y], 2)
                kept[k] = joined[:, :, -2:].clone()
                if before is None:
                    joined = F.pad(y, (0, 0, 0, 0, 2, 0), mode="replicate")
                y = F.silu(layer(joined))
            found.append(y)
        return torch.cat(found, 2)


class Words(nn.Module):
    """Ids that are split, a table of positions, and one with a row that is not learned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.positions = nn.Embedding(11, 6, padding_idx=2), nn.Embedding(20, 6)
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids) + self.positions(torch.arange(ids.shape[1])))


class Conditioned(nn.Module):
    """Labels that all workers have, beside pictures that are split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.conv = nn.Embedding(11, 3), nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.SyncBatchNorm(3)  # statistics of the whole
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.conv(x) + self.table(labels)[:, :, None, None]
        if type(x) is Tensor:  # in one process torch has it on GPUs only
            return nn.modules.batchnorm._BatchNorm.forward(self.norm, y)
        return self.norm(y)


class Detecting(nn.Module):
    """A feature pyramid with one head for all levels, anchors, and the loss of RetinaNet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        steps = [nn.Conv2d(a, b, 3, 2, 1) for a, b in ((3, 4), (4, 6), (6, 8))]
        self.steps = nn.ModuleList(steps)
        self.inner = nn.ModuleList(nn.Conv2d(channels, 5, 1) for channels in (4, 6, 8))
        self.outer = nn.ModuleList(nn.Conv2d(5, 5, 3, padding=1) for _ in range(3))
        self.head = nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.GroupNorm(5, 5), nn.ReLU())
        self.scores, self.boxes = nn.Conv2d(5, 6, 3, padding=1), nn.Conv2d(5, 8, 3, padding=1)
        self.double()

    def forward(self, x: Tensor, boxes: Tensor, labels: Tensor) -> Any:
        levels, y = [], x
        for step in self.steps:
            y = F.relu(step(y))
            levels.append(y)
        top = self.inner[2](levels[2])
        pyramid = [self.outer[2](top)]
        for k in (1, 0):
            lateral = self.inner[k](levels[k])
            top = lateral + F.interpolate(top, size=lateral.shape[-2:], mode="nearest")
            pyramid.insert(0, self.outer[k](top))
        pyramid.append(F.max_pool2d(pyramid[-1], 1, 2))
        features = [self.head(each) for each in pyramid]
        scores = torch.cat([self.rows(self.scores(each), 3) for each in features], 1)
        shifts = torch.cat([self.rows(self.boxes(each), 4) for each in features], 1)
        anchors = torch.cat([self.anchors(each, x.shape[-2] / each.shape[-2]) for each in features])
        losses = [self.loss(*each, anchors, boxes, labels) for each in zip(scores, shifts)]  # noqa: B905
        return torch.stack(losses).mean(), scores, shifts

    def rows(self, y: Tensor, columns: int) -> Tensor:
        n, _, height, width = y.shape
        y = y.view(n, -1, columns, height, width).permute(0, 3, 4, 1, 2)
        return y.reshape(n, -1, columns)

    def anchors(self, y: Tensor, stride: float) -> Tensor:
        """Two boxes around each place, by their corners."""
        rows, columns = (torch.arange(n, dtype=y.dtype, device=y.device) for n in y.shape[-2:])
        centers = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).reshape(-1, 1, 2)
        sizes = torch.tensor([[1.0, 1.0], [2.0, 1.0]], dtype=y.dtype)
        return torch.cat([centers - sizes, centers + sizes], -1).reshape(-1, 4) * stride

    def loss(
        self, scores: Tensor, shifts: Tensor, anchors: Tensor, boxes: Tensor, labels: Tensor
    ) -> Tensor:
        low = torch.max(anchors[:, None, :2], boxes[:, :2])
        high = torch.min(anchors[:, None, 2:], boxes[:, 2:])
        common = (high - low).clamp(min=0).prod(-1)
        areas = [(each[:, 2:] - each[:, :2]).prod(-1) for each in (anchors, boxes)]
        overlap = common / (areas[0][:, None] + areas[1] - common)
        best, match = overlap.max(1)
        found = best > 0.2
        target = torch.zeros_like(scores)
        target[found, labels[match[found]]] = 1.0
        of_classes = F.binary_cross_entropy_with_logits(scores, target, reduction="sum")
        of_boxes = F.smooth_l1_loss(
            shifts[found], (boxes[match] - anchors)[found] / 8, reduction="sum"
        )
        return (of_classes + of_boxes) / found.sum().clamp(min=1)


class Flow(nn.Module):
    """RAFT: all pairs of two pictures, a pyramid of them, and lookups around where a flow leads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.InstanceNorm2d(4), nn.ReLU())
        self.update = nn.Conv2d(2 * 9 + 2, 2, 3, padding=1)
        self.double()

    def forward(self, first: Tensor, second: Tensor) -> Any:
        a, b = self.encoder(torch.cat([first, second])).chunk(2)
        n, channels, height, width = a.shape
        pairs = (a.flatten(2).transpose(1, 2) @ b.flatten(2)) / channels**0.5
        pairs = pairs.view(n * height * width, 1, height, width)
        pyramid = [pairs, F.avg_pool2d(pairs, 2)]
        steps = torch.meshgrid(*[torch.arange(k, dtype=a.dtype) for k in (height, width)])
        origin = torch.stack(steps[::-1])[None].expand(n, -1, -1, -1)
        near = torch.linspace(-1, 1, 3, dtype=a.dtype)
        window = torch.stack(torch.meshgrid(near, near), -1).view(1, 3, 3, 2)
        places, flows = origin, []
        for _ in range(2):
            places = places.detach()
            around = places.permute(0, 2, 3, 1).reshape(-1, 1, 1, 2)
            read = []
            for level, volume in enumerate(pyramid):
                high, wide = volume.shape[-2:]
                at = around / 2**level + window
                scale = torch.tensor([2 / (wide - 1), 2 / (high - 1)], dtype=a.dtype)
                found = F.grid_sample(volume, at * scale - 1, align_corners=True)
                read.append(found.view(n, height, width, -1))
            looked = torch.cat(read, -1).permute(0, 3, 1, 2)
            places = places + self.update(torch.cat([looked, places - origin], 1))
            flow = F.interpolate(places - origin, scale_factor=2, mode="bilinear")
            flows.append(2 * flow)
        return flows


def check_detection_and_flow() -> None:
    boxes = torch.tensor([[2.0, 3.0, 9.0, 12.0], [8.0, 1.0, 22.0, 14.0]], dtype=torch.float64)
    labels = torch.tensor([2, 0])
    picture = values((2, 3, 24, 20), 1)
    for axis in (0, 2, 3):
        given = (picture, boxes, labels)
        check_model(Detecting(), *given, where=line(axis), fallback="raise")
    frames = values((2, 3, 16, 12), 2), values((2, 3, 16, 12), 3)
    for axis in (0, 2):
        check_model(Flow(), *frames, where=line(axis), fallback="raise")


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 3])
def test_detection_and_flow(run: Run, nprocs: int) -> None:
    run(check_detection_and_flow, nprocs=nprocs, timeout=100)


def check_kinds() -> None:
    x = values((2, 3, 7, 6), 1)
    for model in (Quantized(True), Quantized(False), Averaged(), Averaged().eval()):
        check_model(model, x, where=line(2), fallback="raise")
    for axis, by_views in product((2, 3), (True, False)):
        check_model(Neighbouring(by_views), x, where=line(axis), fallback="raise")
    for dims in (1, 2, 3):
        picture = values((2, 3, *(9, 6, 4)[:dims]), 1)
        check_model(Unpooled(dims), picture, where=line(2, dims + 2), fallback="raise")
    frames = values((1, 2, 5, 7, 6), 1)  # the last chunk has one, some workers none of a chunk
    for axis in (2, 3, 4):
        check_model(Frames(), frames, where=line(axis, 5), fallback="raise", calls=1)
    ids = torch.arange(36).reshape(4, 9) * 7 % 11
    for axis in (0, 1):
        check_model(Words(), ids, where=line(axis, 2), fallback="raise")
    for axis in (0, 2):
        labels = torch.tensor([1, 5])
        check_model(Conditioned(), x, labels, where=line(axis), fallback="raise")


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 3])
def test_kinds(run: Run, nprocs: int) -> None:
    run(check_kinds, nprocs=nprocs, timeout=100)


def drop_path(x: Tensor) -> Tensor:  # as timm has it
    kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.6)
    return x * kept.div_(0.6)


def drop_path_by_rand(x: Tensor) -> Tensor:
    noise = 0.6 + torch.rand(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device)
    return x.div(0.6) * noise.floor_()


def stochastic_depth(x: Tensor) -> Tensor:  # as torchvision has it
    noise = torch.empty([x.shape[0], 1, 1, 1], dtype=x.dtype, device=x.device)
    return x * noise.bernoulli_(0.6).div_(0.6)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "drop path": drop_path,
    "drop path by rand": drop_path_by_rand,
    "stochastic depth": stochastic_depth,
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout2d": lambda x: F.dropout2d(x, 0.4),
    "gaussian noise": lambda x: x + 0.1 * torch.randn_like(x),
    "noise of a shape": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
    "noise in place": lambda x: x + x.new_empty(x.shape).normal_(),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "drop connect": lambda x: F.conv2d(x, F.dropout(torch.ones(2, 4, 3, 3, dtype=x.dtype), 0.5)),
    "permutation": lambda x: x[:, torch.randperm(x.shape[1])],
}


class Drawing(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name, self.conv = name, nn.Conv2d(3, 4, 3, padding=1).double()

    def forward(self, x: Tensor) -> Tensor:
        return DRAWS[self.name](self.conv(x))


def drawn(axis: int) -> list[Any]:
    """Two calls of each model, and the gradient of its weight, after the same seed."""
    found = []
    for name in DRAWS:
        model = Drawing(name)
        torch.manual_seed(5)
        model = tessel.nn.distribute_module(model, line(axis), "raise")
        x = tessel.spread(values((4, 3, 7, 6), 1), line(axis))
        one, two = model(x), model(x)
        assert not torch.equal(one.full(), two.full()), name
        two.square().sum().backward()
        found += [one.detach().full().flatten(), two.detach().full().flatten()]
        found.append(model.conv.weight.grad.flatten())
    return torch.cat(found).tolist()


def test_draws_are_the_same_on_any_number_of_workers(run: Run) -> None:
    first, *others = (run(drawn, axis, nprocs=n)[0] for axis, n in ((0, 1), (0, 2), (2, 2), (2, 3)))
    for each in others:
        close("draws", torch.tensor(each), torch.tensor(first), 1e-10)


def check_draws() -> None:
    """A model that draws can be compared with one process, which draws the same numbers."""
    for name in DRAWS:
        check_model(
            Drawing(name), values((4, 3, 7, 6), 1), where=line(2), fallback="raise", calls=1
        )


def test_draws_are_those_of_one_process(run: Run) -> None:
    run(check_draws, nprocs=2, timeout=100)
