"""A chain of layers that fetches its halo at once gives what the chain gives, and torch's own.

Tests `nn/region.py`, `nn/replacements.py`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import tessel
from covering import repeats
from parity import OnGrid, check_layers, close, values, vjps
from tessel import Layout, Partition
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
Shape = tuple[int, ...]
WIDTH = 8  # bytes of a float64
BATCH = 20  # cases in one call to the workers

by_draw = settings(
    max_examples=repeats(5),
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@dataclass(frozen=True)
class Link:
    """A layer of a chain by torch's name."""

    name: str
    args: tuple[Any, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    def alone(self) -> nn.Module:
        return getattr(nn, self.name)(*self.args, **dict(self.settings))

    def spread(self, P: Partition) -> nn.Module:
        make = getattr(tessel.nn, f"Distributed{self.name}", None)
        return self.alone() if make is None else make(P, *self.args, **dict(self.settings))

    @property
    def is_padding(self) -> bool:
        return "Pad" in self.name


@dataclass(frozen=True)
class Chain(OnGrid):
    """Layers, the grid, the shape of the whole tensor, and its parts if they are uneven."""

    links: tuple[Link, ...]
    grid: Shape
    shape: Shape
    lengths: tuple[Shape, ...] | None = None
    seed: int = 0
    second: bool = True

    def alone(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        chain = nn.Sequential(*(link.alone() for link in self.links)).double().eval()
        for name, buffer in chain.named_buffers():
            if buffer.is_floating_point():
                noise = torch.rand_like(buffer)
                buffer.copy_(0.5 + noise if name.endswith("var") else noise - 0.5)
        return chain

    def layers(self) -> list[nn.Module]:
        P = self.partition()
        return [link.spread(P).double().eval() for link in self.links]


def chained(*links: Link, grid: Shape, shape: Shape, **settings: Any) -> Chain:
    return Chain(links, grid, shape, **settings)


def check_chain(chain: Chain) -> None:
    """The region against torch in one process, and against the chain layer by layer."""
    alone = chain.alone()
    region = tessel.nn.HaloRegion(*chain.layers())
    assert list(region.state_dict()) == list(alone.state_dict())
    region.load_state_dict(alone.state_dict())
    x, layout = values(chain.shape, chain.seed), chain.layout()
    try:
        check_layers(alone, region, x, layout, chain.second)
        check_like_the_chain(chain, region, x, layout)
    except (AssertionError, RuntimeError) as error:
        raise AssertionError(f"{chain}: {error}") from error


def check_like_the_chain(chain: Chain, region: nn.Module, x: Tensor, layout: Layout) -> None:
    """Torch's own paddings and PReLU are no layers for parts; all else is compared."""
    if any(link.is_padding or link.name == "PReLU" for link in chain.links):
        return
    layers = nn.Sequential(*chain.layers())
    layers.load_state_dict(region.state_dict())
    results = []
    for model in (layers, region):
        part = layout.local_part(x).clone().requires_grad_()
        y = model(part)
        if not layout.partition.active:
            continue
        weights = layout.resized(_whole_shape(chain)).local_part(values(_whole_shape(chain), 7))
        results.append((y, *vjps(y, weights, [part, *model.parameters()], 2)))
    for number, (expected, got) in enumerate(zip(*results, strict=True) if results else ()):
        assert got.shape == expected.shape
        close(f"value {number} of the chain", got, expected)


def _whole_shape(chain: Chain) -> Shape:
    with torch.no_grad():
        return tuple(chain.alone()(torch.zeros(chain.shape, dtype=torch.float64)).shape)


def check_chains(chains: Sequence[Chain]) -> int:
    for chain in chains:
        check_chain(chain)
    return len(chains)


def conv(D: int, inputs: int, outputs: int, kernel: Any, **settings: Any) -> Link:
    return Link(f"Conv{D}d", (inputs, outputs, kernel), tuple(settings.items()))


def layer(name: str, *args: Any, **settings: Any) -> Link:
    return Link(name, args, tuple(settings.items()))


RELU = layer("ReLU")
SMOOTH = (conv(1, 2, 3, 3, padding=1), layer("Tanh"), conv(1, 3, 2, 3, padding=1))
WIDE = (conv(1, 2, 2, 5, padding=2), conv(1, 2, 2, 5, padding=2), conv(1, 2, 2, 3, padding=1))
DOWN = (
    conv(2, 3, 4, 3, stride=2, padding=1),
    layer("BatchNorm2d", 4),
    RELU,
    layer("MaxPool2d", 3, stride=2, padding=1),
)
UP = (
    layer("ConvTranspose2d", 2, 3, 4, stride=2, padding=1),
    layer("Upsample", scale_factor=2, mode="bilinear"),
    conv(2, 3, 2, 3, padding=1),
)
CIRCULAR = tuple(conv(1, 2, 2, 3, padding=1, padding_mode="circular") for _ in range(3))


def in_parts(links: tuple[Link, ...], *lengths: int) -> Chain:
    """A chain on a tensor of one dimension whose parts have these lengths."""
    channels = links[0].args[0] if links[0].args else 2
    shape = (1, channels, sum(lengths))
    return Chain(links, (1, 1, len(lengths)), shape, ((1,), (channels,), lengths))


BY_HAND = [
    chained(*SMOOTH, grid=(1, 1, 4), shape=(2, 2, 17)),
    chained(*WIDE, grid=(1, 1, 4), shape=(1, 2, 9)),  # halos wider than the neighbour
    chained(*WIDE, grid=(1, 1, 4), shape=(1, 2, 3)),  # fewer values than workers
    chained(*DOWN, grid=(1, 1, 2, 2), shape=(2, 3, 15, 14)),
    chained(*DOWN, grid=(2, 2, 1, 1), shape=(3, 3, 9, 8)),  # batch and channels are split
    chained(*DOWN, grid=(1, 1, 1, 4), shape=(1, 3, 4, 6)),  # fewer outputs than workers
    chained(*UP, grid=(1, 1, 2, 2), shape=(1, 2, 5, 4)),
    chained(*UP, grid=(1, 2, 1, 2), shape=(2, 2, 3, 5)),
    in_parts(SMOOTH, 0, 7, 0, 6),
    in_parts(SMOOTH, 1, 0, 0, 0),
    in_parts(SMOOTH, 2, 11, 1, 1),
    in_parts(CIRCULAR, 5, 4, 6, 5),
    in_parts(CIRCULAR, 2, 1, 1, 1),
    in_parts((*CIRCULAR, layer("MaxPool1d", 2), *SMOOTH), 5, 7),
    in_parts((*SMOOTH, *CIRCULAR), 5, 5, 6),  # the period is not that of the input's values
    chained(
        conv(1, 2, 4, 4, stride=2, padding=1, padding_mode="circular"),
        conv(1, 4, 4, 3, padding=2, dilation=2, padding_mode="circular", groups=2),
        RELU,
        layer("AvgPool1d", 3, 2, 1),
        grid=(1, 1, 4),
        shape=(1, 2, 24),
    ),
    chained(
        *(conv(2, 2, 2, 3, padding=1, padding_mode=mode) for mode in ("reflect", "replicate")),
        grid=(1, 1, 2, 2),
        shape=(1, 2, 7, 6),
    ),
    chained(
        layer("ReflectionPad1d", (2, 1)),
        conv(1, 2, 2, 3),
        layer("ConstantPad1d", (1, 3), 0.5),
        conv(1, 2, 1, 4, stride=3),
        grid=(1, 1, 3),
        shape=(1, 2, 11),
    ),
    chained(
        layer("CircularPad2d", (1, 2, 2, 1)),
        conv(2, 2, 2, 4),
        layer("ReplicationPad2d", 2),
        layer("AvgPool2d", 3, 1),
        grid=(1, 1, 2, 2),
        shape=(1, 2, 8, 7),
    ),
    chained(conv(1, 4, 4, 3), layer("PReLU", 4), conv(1, 4, 4, 3), grid=(1, 2, 2), shape=(1, 4, 9)),
    chained(conv(1, 2, 3, 3), layer("Softplus"), conv(1, 3, 1, 2), grid=(1, 4), shape=(2, 12)),
    chained(layer("Dropout", 0.5), layer("Sigmoid"), *SMOOTH, grid=(1, 1, 2), shape=(1, 2, 8)),
]


@pytest.mark.limit(300)
@pytest.mark.parametrize("third", range(3))
def test_chains_chosen_by_hand_are_exact(run: Run, third: int) -> None:
    """Output, gradients of the input and of every parameter, and second order."""
    some = BY_HAND[third::3]
    assert run(check_chains, some, nprocs=4, timeout=200) == [len(some)] * 4


def test_one_worker_computes_what_torch_does() -> None:
    check_chains([replace(chain, grid=(1,) * len(chain.shape), lengths=None) for chain in BY_HAND])


def numbers(D: int, low: int, high: int) -> st.SearchStrategy[Shape]:
    return st.tuples(*[st.integers(low, high)] * D)


MODES = ["zeros"] * 3 + ["reflect", "replicate", "circular", "circular"]
UPSAMPLINGS = {1: ["nearest", "linear"], 2: ["nearest", "bilinear", "bicubic"]}
ACTIVATIONS = ["ReLU", "Tanh", "GELU", "LeakyReLU", "Identity", "Hardtanh"]


@st.composite
def links(draw: st.DrawFn, D: int, channels: int) -> tuple[Link, int]:
    """A layer that takes so many channels, and how many it gives."""
    kind = draw(st.sampled_from(["conv"] * 4 + ["pool", "pool", "up", "pad", "point", "norm"]))
    if kind == "conv":
        groups = draw(st.sampled_from([1, 1, channels]))
        outputs = groups * draw(st.integers(1, 2))
        settings = {
            "stride": draw(numbers(D, 1, 3)),
            "padding": draw(numbers(D, 0, 3)),
            "dilation": draw(numbers(D, 1, 2)),
            "groups": groups,
            "bias": draw(st.booleans()),
            "padding_mode": draw(st.sampled_from(MODES)),
        }
        return conv(D, channels, outputs, draw(numbers(D, 1, 4)), **settings), outputs
    if kind == "pool":
        kernel = draw(numbers(D, 1, 4))
        padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
        stride, ceil = draw(numbers(D, 1, 3)), draw(st.booleans())
        settings = {"stride": stride, "padding": padding, "ceil_mode": ceil}
        return layer(
            f"{draw(st.sampled_from(['Avg', 'Max']))}Pool{D}d", kernel, **settings
        ), channels
    if kind == "up" and D < 3 and draw(st.booleans()):
        mode = draw(st.sampled_from(UPSAMPLINGS[D]))
        return layer("Upsample", scale_factor=draw(st.sampled_from([2, 1.5])), mode=mode), channels
    if kind == "up":
        settings = {
            "stride": draw(numbers(D, 1, 3)),
            "padding": draw(numbers(D, 0, 2)),
            "dilation": draw(numbers(D, 1, 2)),
        }
        outputs = draw(st.integers(1, 2))
        link = layer(f"ConvTranspose{D}d", channels, outputs, draw(numbers(D, 1, 4)), **settings)
        return link, outputs
    if kind == "pad":
        name = draw(st.sampled_from(["Zero", "Reflection", "Replication", "Circular"]))
        return layer(f"{name}Pad{D}d", draw(numbers(2 * D, 0, 2))), channels
    if kind == "norm":
        return layer(f"BatchNorm{D}d", channels), channels
    return layer(draw(st.sampled_from(ACTIVATIONS))), channels


@st.composite
def chains(draw: st.DrawFn, workers: int) -> Chain:
    """Two to four layers on a tensor of one to three dimensions in any parts."""
    D = draw(st.sampled_from([1, 1, 2, 2, 3]))
    channels = draw(st.integers(1, 3))
    space = draw(numbers(D, 1, {1: 20, 2: 10, 3: 6}[D]))
    shape = (draw(st.integers(1, 2)), channels, *space)
    x, found = torch.zeros(shape, dtype=torch.float64), []
    for _ in range(draw(st.integers(2, 4))):
        link, channels, x = draw(accepted(D, channels, x))
        found.append(link)
    if not any(hasattr(tessel.nn, f"Distributed{link.name}") for link in found):
        found.append(conv(D, channels, 1, 1))
    grid = draw(grids(len(shape), workers))
    parts = [draw(cuts(n, p)) for n, p in zip(shape, grid, strict=True)]
    uneven = tuple(parts) if draw(st.booleans()) else None
    return Chain(tuple(found), grid, shape, uneven, draw(st.integers(0, 99)), draw(st.booleans()))


@st.composite
def accepted(draw: st.DrawFn, D: int, channels: int, x: Tensor) -> tuple[Link, int, Tensor]:
    """A layer that torch takes for `x`, how many channels it gives, and its result."""
    for _ in range(5):
        link, outputs = draw(links(D, channels))
        y = result(link, x)
        if y is not None and y.isfinite().all() and y.numel() < 3000:
            return link, outputs, y
    return layer("Tanh"), channels, x


def result(link: Link, x: Tensor) -> Tensor | None:
    try:
        return link.alone().double().eval()(x).detach()
    except (RuntimeError, ValueError):
        return None


@st.composite
def grids(draw: st.DrawFn, ndim: int, workers: int) -> Shape:
    """At most so many workers, most of them along the dimensions of space."""
    grid, left = [1] * ndim, workers
    dims = draw(st.permutations(range(ndim)))
    for dim in sorted(dims, key=lambda dim: dim < 2):
        grid[dim] = draw(st.integers(1, left))
        left //= grid[dim]
    return tuple(grid)


@st.composite
def cuts(draw: st.DrawFn, length: int, parts: int) -> Shape:
    """Parts of any lengths, also empty ones."""
    bounds = sorted(draw(st.integers(0, length)) for _ in range(parts - 1))
    return tuple(b - a for a, b in zip([0, *bounds], [*bounds, length], strict=True))


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("nprocs", [3, 4])  # and grids of fewer workers
def test_any_chain_is_exact(run: Run, nprocs: int) -> None:
    @by_draw
    @given(st.lists(chains(nprocs), min_size=BATCH, max_size=BATCH))
    def check(drawn: list[Chain]) -> None:
        run(check_chains, drawn, nprocs=nprocs, timeout=200)

    check()


@dataclass(frozen=True)
class Sent:
    """Messages and bytes that a worker sent, and how often workers agreed."""

    forward: tuple[int, int]
    backward: tuple[int, int]
    agreements: int


def sent(chain: Chain, at_once: bool) -> Sent:
    """What a pass sends through layers whose parameters need no gradient."""
    layers = chain.layers()
    model = tessel.nn.HaloRegion(*layers) if at_once else nn.Sequential(*layers)
    model.requires_grad_(False)
    x = chain.layout().local_part(values(chain.shape, 0)).clone().requires_grad_()
    model(x)
    with count_traffic() as forward:
        y = model(x)
    with count_traffic() as backward:
        y.sum().backward()
    return Sent(
        (forward.messages, forward.bytes_sent),
        (backward.messages, backward.bytes_sent),
        forward.agreements,
    )


def traffic(chain: Chain) -> tuple[Sent, Sent]:
    return sent(chain, True), sent(chain, False)


THREE = tuple(conv(1, 2, 2, 3, padding=1) for _ in range(3))
SQUARE = tuple(conv(2, 1, 1, 3, padding=1) for _ in range(2))
STRIDED = (conv(1, 2, 3, 3, stride=2, padding=1), layer("MaxPool1d", 3, 2, 1))


def test_a_chain_of_three_convolutions_takes_one_exchange_each_way(run: Run) -> None:
    results = run(traffic, chained(*THREE, grid=(1, 1, 4), shape=(1, 2, 32)))
    for worker, (region, chain) in enumerate(results):
        neighbours = 1 if worker in (0, 3) else 2
        wide, narrow = 3 * 2 * WIDTH, 2 * WIDTH  # three rows of two channels; one of them
        assert region == Sent(*[(neighbours, neighbours * wide)] * 2, 1)
        assert chain == Sent(*[(3 * neighbours, 3 * neighbours * narrow)] * 2, 3)


def test_on_a_grid_a_corner_is_one_message_too(run: Run) -> None:
    results = run(traffic, chained(*SQUARE, grid=(1, 1, 2, 2), shape=(1, 1, 12, 12)))
    for region, chain in results:
        wide, narrow = (2 * 6 + 2 * 6 + 2 * 2) * WIDTH, (6 + 6 + 1) * WIDTH
        assert region == Sent((3, wide), (3, wide), 1)
        assert chain == Sent((6, 2 * narrow), (6, 2 * narrow), 2)


def test_what_goes_around_takes_one_exchange_and_one_at_each_end(run: Run) -> None:
    results = run(traffic, chained(*CIRCULAR, grid=(1, 1, 4), shape=(1, 2, 32)))
    wide, narrow = 3 * 2 * WIDTH, 2 * WIDTH
    for region, chain in results:
        assert region == Sent((2, 2 * wide), (2, 2 * wide), 1)
        assert chain == Sent((6, 6 * narrow), (6, 6 * narrow), 3)


def test_strides_read_no_more_than_they_must(run: Run) -> None:
    """Outputs 2 and 3 read 3 to 7 of the first layer's 8, and these 5 to 15 of the input's 16."""
    (first, chain), (second, _) = run(
        traffic, chained(*STRIDED, grid=(1, 1, 2), shape=(1, 2, 16)), nprocs=2
    )
    three = 3 * 2 * WIDTH  # 5, 6 and 7 in two channels
    assert first == Sent((1, three), (0, 0), 1)
    assert second == Sent((0, 0), (1, three), 1)
    assert chain.forward == (2, (2 + 3) * WIDTH)  # two channels, then three


def silent() -> Sent:
    """1 × 1 convolutions and pools of whole windows need nothing of others."""
    links = (conv(1, 2, 2, 1), RELU, layer("AvgPool1d", 2), conv(1, 2, 1, 1))
    return sent(chained(*links, grid=(1, 1, 4), shape=(1, 2, 16)), True)


def test_where_nothing_is_needed_nothing_is_sent(run: Run) -> None:
    assert run(silent) == [Sent((0, 0), (0, 0), 1)] * 4


def parameter_traffic() -> tuple[int, int]:
    """Messages of the backward pass beside those of the data, in a region and in the chain."""
    chain = chained(*THREE, grid=(1, 1, 4), shape=(1, 2, 32))
    counts = []
    for model in (tessel.nn.HaloRegion(*chain.layers()), nn.Sequential(*chain.layers())):
        y = model(chain.layout().local_part(values(chain.shape, 0)).clone())
        with count_traffic() as backward:
            y.sum().backward()
        counts.append(backward.bytes_sent)
    return counts[0], counts[1]


def test_gradients_of_parameters_take_what_they_take_in_the_chain(run: Run) -> None:
    """The input of a first layer needs no gradient: its way back is not taken."""
    for region, chain in run(parameter_traffic):
        assert 0 < region < chain  # the chain sends the halos of its inner tensors back, too


class Doubled(tessel.nn.DistributedConv1d):
    """The code of a user in a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Centered(tessel.nn.DistributedConv1d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


class Renamed(tessel.nn.DistributedConv1d):
    """Code that computes nothing else."""

    def __init__(self, P: Partition, channels: int, size: int = 3) -> None:
        super().__init__(P, channels, channels, size, padding=size // 2)

    def extra_repr(self) -> str:
        return "renamed"


def replaced() -> nn.Module:
    found = nn.ReLU()
    found.forward = lambda x: 2 * x  # type: ignore[method-assign]
    return found


def hooked_chain(*layers: nn.Module) -> nn.Module:
    found = nn.Sequential(*layers)
    found.register_forward_hook(lambda module, inputs, output: 2 * output)
    return found


def check_code_inside() -> None:
    """What computes nothing else is the layer that it was; in converted models nothing is lost."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    x = values((1, 2, 16), 0)
    part = Layout.balanced(P, x.shape).local_part
    for layer in (Renamed(P, 2), weight_norm(Renamed(P, 2))):
        layer.double()
        expected = F.conv1d(x, layer.weight, layer.bias, padding=1).relu()
        close("output", tessel.nn.HaloRegion(layer, nn.ReLU())(part(x)), part(expected), 1e-12)
    for inner in (replaced(), hooked_chain(nn.ReLU())):
        model = nn.Sequential(tessel.nn.HaloRegion(nn.Conv1d(2, 2, 3, padding=1), inner)).double()
        tessel.nn.distribute_module(model, P)
        with pytest.raises(NotImplementedError, match="in a HaloRegion"):
            model(part(x))
    with pytest.raises(NotImplementedError, match="hooks of Sequential"):
        tessel.nn.HaloRegion(hooked_chain(nn.ReLU()))


def test_code_of_users_in_a_region(run: Run) -> None:
    run(check_code_inside)


def made_without_a_loss(where: str) -> Any:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    c = tessel.nn.DistributedConv1d(P, 2, 2, 3, padding=1)
    other = tessel.world().create_cartesian_topology_partition([1, 4, 1])
    elsewhere = tessel.nn.DistributedConv1d(other, 2, 2, 3, padding=1)
    blocks = tessel.nn.DistributedConv1d(
        P, 2, 2, 1, P_w=tessel.world().create_cartesian_topology_partition([2, 2, 1])
    )
    hooked = tessel.nn.DistributedConv1d(P, 2, 2, 3)
    hooked.register_forward_hook(lambda *_: None)
    unfit: dict[str, Callable[[], Any]] = {
        "another partition": lambda: (c, elsewhere),
        "a weight in blocks": lambda: (c, blocks),
        "a hook": lambda: (c, hooked),
        "a hook of a chain": lambda: (hooked_chain(c, nn.ReLU()), c),
        "a subclass": lambda: (c, Doubled(P, 2, 2, 3)),
        "another product": lambda: (c, Centered(P, 2, 2, 3)),
        "a forward of its own": lambda: (c, replaced()),
        "a linear layer": lambda: (c, tessel.nn.DistributedLinear(P, P, None, 4, 4)),
        "a group norm": lambda: (c, tessel.nn.DistributedGroupNorm(P, 1, 2)),
        "a softmax": lambda: (c, nn.Softmax(1)),
        "a layer of torch": lambda: (c, nn.Conv1d(2, 2, 3)),
        "an adaptive pool": lambda: (c, tessel.nn.DistributedAdaptiveAvgPool1d(P, 1)),
    }
    with pytest.raises((NotImplementedError, ValueError)) as caught:
        tessel.nn.HaloRegion(*unfit[where]())
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("another partition", "all layers of a HaloRegion must be on one partition"),
        ("a weight in blocks", "leave out P_w and P_y"),
        ("a hook", "hooks of DistributedConv1d"),
        ("a hook of a chain", "hooks of Sequential"),
        ("a subclass", "Doubled in a HaloRegion has its own forward"),
        ("another product", "Centered in a HaloRegion has its own _conv_forward"),
        ("a forward of its own", "ReLU in a HaloRegion has its own forward"),
        ("a linear layer", "DistributedLinear cannot be in a HaloRegion"),
        ("a group norm", "DistributedGroupNorm cannot be in a HaloRegion"),
        ("a softmax", "Softmax cannot be in a HaloRegion"),
        ("a layer of torch", "Conv1d cannot be in a HaloRegion"),
        ("an adaptive pool", "DistributedAdaptiveAvgPool1d cannot be in a HaloRegion"),
    ],
)
def test_what_cannot_be_in_a_region_is_refused_when_it_is_made(
    run: Run, what: str, says: str
) -> None:
    errors = run(made_without_a_loss, what)
    assert len(set(errors)) == 1
    kind, text = errors[0]
    assert says in text
    assert kind is (ValueError if what == "another partition" else NotImplementedError)


def called(what: str) -> Any:
    """What a call raises, after no message but those of an agreement."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    worker = tessel.world().rank
    c = tessel.nn.DistributedConv1d(P, 2, 2, 3, padding=1)
    layers: tuple[nn.Module, ...] = (c, nn.ReLU())
    x = torch.ones(1, 2, 4)
    if what == "batch norm":
        layers = (c, tessel.nn.DistributedBatchNorm1d(P, 2))
    elif what == "instance norm":
        layers = (c, tessel.nn.DistributedInstanceNorm1d(P, 2))
    elif what == "dropout":
        layers = (c, nn.Dropout(0.5))
    elif what == "indices":
        layers = (c, tessel.nn.DistributedMaxPool1d(P, 2, return_indices=True))
    elif what == "area":
        layers = (c, tessel.nn.DistributedUpsample(P, scale_factor=2, mode="area"))
    elif what == "too small":
        layers = (c, tessel.nn.DistributedMaxPool1d(P, 20))
    elif what == "channels":
        layers = (c, tessel.nn.DistributedConv1d(P, 3, 2, 3))
    elif what == "dtype":
        x = x.double()
    elif what == "frozen":
        c.requires_grad_(worker != 2)
    elif what == "mode":
        layers = (c, nn.Dropout(0.0).train(worker == 1))
    elif what == "parts":
        x = torch.ones(1 + (worker == 3), 2, 4)
    region = tessel.nn.HaloRegion(*layers)
    with count_traffic() as counted, pytest.raises((RuntimeError, ValueError)) as caught:
        region(x)
    assert (counted.messages, counted.bytes_sent) == (0, 0)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("what", "kind", "says"),
    [
        ("batch norm", NotImplementedError, "must use running statistics, in eval mode"),
        ("instance norm", NotImplementedError, "must use running statistics, in eval mode"),
        ("dropout", NotImplementedError, "Dropout in training mode draws random numbers"),
        ("indices", NotImplementedError, "return_indices=True cannot be part of it"),
        ("area", NotImplementedError, "interpolation by area"),
        ("too small", RuntimeError, "max_pool1d() Invalid computed output size: 0"),
        ("channels", RuntimeError, "to have 3 channels, but got 2 channels"),
        ("dtype", RuntimeError, "input and weight must have the same dtype"),
        ("frozen", ValueError, "all workers must make the same calls"),
        ("mode", ValueError, "all workers must make the same calls"),
        ("parts", ValueError, "the local shapes do not fit together"),
    ],
)
def test_bad_calls_raise_the_same_on_all_workers(
    run: Run, what: str, kind: type[Exception], says: str
) -> None:
    errors = run(called, what)
    assert len(set(errors)) == 1
    assert errors[0][0] is kind
    assert says in errors[0][1]


def some_need_gradients() -> bool:
    """The input of one worker needs a gradient: all take part in the way back."""
    chain = chained(*THREE, grid=(1, 1, 4), shape=(1, 2, 12))
    region = tessel.nn.HaloRegion(*chain.layers()).requires_grad_(False)
    x = chain.layout().local_part(values(chain.shape, 0)).clone()
    x.requires_grad_(tessel.world().rank == 1)
    region(x).sum().backward()
    return x.grad is not None


def test_one_worker_that_needs_a_gradient_is_enough(run: Run) -> None:
    assert run(some_need_gradients) == [False, True, False, False]


def copies() -> bool:
    """Copies and what was pickled compute the same; workers outside get their tensor back."""
    chain = chained(*DOWN, grid=(1, 1, 2, 1), shape=(1, 3, 9, 8))
    region = tessel.nn.HaloRegion(nn.Sequential(*chain.layers()))
    x = chain.layout().local_part(values(chain.shape, 0))
    y = region(x)
    if not chain.partition().active:
        return torch.equal(y, x)
    others = (copy.deepcopy(region), pickle.loads(pickle.dumps(region)), region[:])
    assert all(isinstance(other, tessel.nn.HaloRegion) for other in others)
    return all(torch.equal(other(x), y) for other in others)


def test_regions_can_be_copied(run: Run) -> None:
    assert run(copies, nprocs=3) == [True] * 3


def test_the_state_is_that_of_a_sequential() -> None:
    chain = chained(*DOWN, grid=(1, 1, 1, 1), shape=(1, 3, 9, 8))
    nested = nn.Sequential(nn.Sequential(*chain.layers()[:2]), *chain.layers()[2:])
    region = tessel.nn.HaloRegion(nested)
    assert list(region.state_dict()) == list(nested.state_dict())
    assert "0.1.running_mean" in region.state_dict()
    x = values(chain.shape, 0)
    close("output", region(x), nested(x))


class Model(nn.Module):
    """A model in which some layers are a region."""

    def __init__(self, region: type[nn.Sequential]) -> None:
        super().__init__()
        self.first = region(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 3, padding=1)
        )
        self.norm = nn.BatchNorm2d(3)
        self.second = region(nn.Sequential(nn.PReLU(), nn.MaxPool2d(2)), nn.Conv2d(3, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(self.norm(y + y.mean()))


def converted() -> int:
    torch.manual_seed(3)
    alone = Model(nn.Sequential).double()
    torch.manual_seed(tessel.world().rank)
    model = Model(tessel.nn.HaloRegion).double()
    if tessel.world().rank == 0:
        model.load_state_dict(alone.state_dict())
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    spread = tessel.nn.distribute_module(model, P)
    assert list(spread.state_dict()) == list(alone.state_dict())
    x = values((2, 2, 11, 10), 0)
    check_layers(alone, spread, x, Layout.balanced(P, x.shape), second=False)
    spread.requires_grad_(False)
    with count_traffic() as counted:
        spread.first(Layout.balanced(P, x.shape).local_part(x))
    return counted.messages


def test_conversion_keeps_a_region_and_converts_its_layers(run: Run) -> None:
    """Two convolutions, and one message to each of the three others."""
    assert run(converted) == [3] * 4


def alone_converted() -> bool:
    """A region may be all of a model; in one process it is a chain of torch's layers."""
    torch.manual_seed(0)
    region = tessel.nn.HaloRegion(nn.Conv1d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv1d(2, 2, 5))
    x = torch.randn(1, 2, 18)
    y = region(x).detach()
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    spread = tessel.nn.distribute_module(region, P)
    part = spread(Layout.balanced(P, x.shape).local_part(x))
    return torch.allclose(part, Layout.balanced(P, y.shape).local_part(y), atol=1e-6)


def test_a_region_can_be_a_model(run: Run) -> None:
    assert run(alone_converted) == [True] * 4
