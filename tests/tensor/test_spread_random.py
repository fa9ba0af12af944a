"""Random functions of spread tensors: the same numbers for every layout and number of workers.

Tests `tensor/rules/random.py`, `tensor/counter_random.py`, `tensor/shared_random.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tessel
from parity import values
from tessel.tensor import seeded
from tessel.tensor.counter_random import is_at_least, uniform_in
from tessel.tensor.shared_random import common_number
from tessel.testing import count_memory
from test_spread import grids, ways

Run = Callable[..., list[Any]]

SHAPE = (4, 6, 8)


def own() -> torch.Generator:
    """A generator of the caller's, in another state on each worker."""
    return torch.Generator().manual_seed(11 + tessel.world().rank)


def chances(x: Tensor) -> Tensor:
    return x.sigmoid()


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "rand_like": torch.rand_like,
    "rand_like of another type": lambda x: torch.rand_like(x, dtype=torch.float32),
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "randint_like of one limit": lambda x: torch.randint_like(x, 9, dtype=torch.int32),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "dropout1d of one sample": lambda x: F.dropout1d(x[:, 0] * 1, 0.4),
    "dropout3d": lambda x: F.dropout3d(x.reshape(4, 6, 8, 1, 1), 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of a number": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: torch.zeros_like(x.detach()).bernoulli_(0.3),
    "bernoulli_ of chances": lambda x: torch.zeros_like(x.detach()).bernoulli_(
        torch.linspace(0, 1, 8, dtype=x.dtype)
    ),
    "normal_": lambda x: torch.empty_like(x.detach()).normal_(1.0, 2.0),
    "uniform_": lambda x: torch.empty_like(x.detach()).uniform_(-1, 3),
    "random_": lambda x: torch.empty_like(x.detach()).random_(5),
    "random_ between": lambda x: torch.empty_like(x.detach(), dtype=torch.int64).random_(2, 5),
    "random_ of all": lambda x: torch.empty_like(x.detach(), dtype=torch.int64).random_(),
    "exponential_": lambda x: torch.empty_like(x.detach()).exponential_(2.0),
    "log_normal_": lambda x: torch.empty_like(x.detach()).log_normal_(0.1, 0.3),
    "cauchy_": lambda x: torch.empty_like(x.detach()).cauchy_(),
    "geometric_": lambda x: torch.empty_like(x.detach()).geometric_(0.3),
    "normal": lambda x: torch.normal(x, 0.5),
    "normal of two": lambda x: torch.normal(0.5, x.detach().abs()),
    "dropout_": lambda x: torch.dropout_(x * 1, 0.4, True),
    "alpha_dropout_": lambda x: torch.alpha_dropout_(x * 1, 0.4, True),
    "dropout2d": lambda x: F.dropout2d(x.reshape(4, 6, 8, 1), 0.4),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.4, True),
    "feature_dropout_": lambda x: torch.feature_dropout_(x * 1, 0.4, True),
    "feature_alpha_dropout_": lambda x: torch.feature_alpha_dropout_(x * 1, 0.4, True),
    "rrelu_": lambda x: torch.rrelu_(x * 1, training=True),
    "poisson": lambda x: torch.poisson(x.detach().exp()),
    "binomial": lambda x: torch.binomial(torch.full_like(x.detach(), 9), x.detach().sigmoid()),
    "_standard_gamma": lambda x: torch._standard_gamma(x.detach().exp()),
    "_sample_dirichlet": lambda x: torch._sample_dirichlet(x.detach().exp()),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x.reshape(4, 6, 4, 2), 1, (2, 1)),
    "fractional_max_pool2d with indices": lambda x: F.fractional_max_pool2d(
        x.reshape(4, 6, 4, 2), 1, (2, 1), return_indices=True
    ),
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(x.reshape(4, 6, 2, 2, 2), 1, 1),
    "fractional_max_pool3d with indices": lambda x: F.fractional_max_pool3d(
        x.reshape(4, 6, 2, 2, 2), 1, 1, return_indices=True
    ),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: F.rrelu(x * 1, training=True, inplace=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, 0.7, dim=1),
    "gumbel_softmax, hard": lambda x: F.gumbel_softmax(x, hard=True),
    "multinomial": lambda x: torch.multinomial(x[0].detach().exp() * 1, 3),
    "multinomial with replacement": lambda x: torch.multinomial(
        x[0].detach().exp() * 1, 9, replacement=True
    ),
    "rand_like by a generator": lambda x: torch.rand_like(x, generator=own()),
    "randn_like by a generator": lambda x: torch.randn_like(x, generator=own()),
    "randint_like by a generator": lambda x: torch.randint_like(x, 9, generator=own()),
    "normal by a generator": lambda x: torch.normal(x.detach(), 0.5, generator=own()),
    "bernoulli by a generator": lambda x: torch.bernoulli(x.sigmoid(), generator=own()),
    "bernoulli_ by a generator": lambda x: torch.zeros_like(x.detach()).bernoulli_(generator=own()),
    "normal_ by a generator": lambda x: torch.empty_like(x.detach()).normal_(generator=own()),
    "uniform_ by a generator": lambda x: torch.empty_like(x.detach()).uniform_(generator=own()),
    "random_ by a generator": lambda x: torch.empty_like(x.detach()).random_(5, generator=own()),
    "exponential_ by a generator": lambda x: torch.empty_like(x.detach()).exponential_(
        generator=own()
    ),
    "init by a generator": lambda x: nn.init.trunc_normal_(x.detach() * 1, generator=own()),
    "poisson by a generator": lambda x: torch.poisson(x.detach().exp(), generator=own()),
    "poisson by a generator at its place": lambda x: torch.poisson(x.detach().exp(), own()),
    "rrelu by a generator at its place": lambda x: torch.rrelu(x, 0.1, 0.3, True, own()),
    "rrelu by a generator": lambda x: torch.ops.aten.rrelu(x, 0.1, 0.3, True, generator=own()),
    "multinomial by a generator": lambda x: torch.multinomial(
        x[0].detach().exp() * 1, 3, generator=own()
    ),
    "multinomial with replacement by a generator": lambda x: torch.multinomial(
        x[0].detach().exp() * 1, 9, replacement=True, generator=own()
    ),
    "tessel.rand": lambda x: tessel.rand(3, where=world_of(x), generator=own()),
    "tessel.randn": lambda x: tessel.randn(3, where=world_of(x), generator=own()),
    "tessel.randint": lambda x: tessel.randint(9, (3,), where=world_of(x), generator=own()),
    "attention with dropout": lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.4),
    "heads with dropout": lambda x: heads().train()(x, x, x)[0],
    "LSTM with dropout": lambda x: recurrent(nn.LSTM)(x)[0],
    "GRU with dropout": lambda x: recurrent(nn.GRU, bidirectional=True)(x),
    "GRU of packed sequences with dropout": lambda x: recurrent(nn.GRU)(
        pack_padded_sequence(x, [6, 4, 3, 1], batch_first=True)
    )[0].data,
}


def world_of(x: Any) -> tessel.Partition:
    """All of its workers in one line."""
    ranks = x.layout.partition.ranks
    return tessel.Partition(ranks, (len(ranks),))


def heads() -> nn.Module:
    torch.manual_seed(3)
    layer = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True).double()
    torch.manual_seed(7)
    return layer


def recurrent(kind: Any, **settings: Any) -> nn.Module:
    torch.manual_seed(3)
    layer: nn.Module = kind(8, 3, 3, dropout=0.4, batch_first=True, **settings).double()
    torch.manual_seed(7 + tessel.world().rank)  # the first worker's counts
    return layer


def drawn(does: Callable[[Tensor], Any], layout: Any) -> list[Tensor]:
    """What a function gives for one seed, whole, and the gradient of its input."""
    root = values(SHAPE, 3).requires_grad_()
    torch.manual_seed(7 + tessel.world().rank)  # the first worker's counts
    if tessel.world().rank == 0:
        torch.manual_seed(7)
    found = does(tessel.spread(root, layout))
    results = list(found) if isinstance(found, tuple) else [found]
    whole = [each.full() for each in results]
    if whole[0].requires_grad:
        weights = values(tuple(whole[0].shape), 9)
        whole.append(torch.autograd.grad((results[0] * weights).sum(), root)[0])
    return [each.detach() for each in whole]


def check_layouts(names: list[str]) -> dict[str, list[Tensor]]:
    """Each function in all layouts; what it draws."""
    workers = tessel.world().size
    first: dict[str, list[Tensor]] = {}
    for name in names:
        for layout in (*ways(SHAPE, workers), *grids(SHAPE, workers)):
            got = drawn(FUNCTIONS[name], layout)
            expected = first.setdefault(name, got)
            for a, b in zip(got, expected, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape
                assert torch.allclose(a, b, 1e-12, 1e-12), f"{name} depends on {layout}"
    return first


@pytest.mark.slow
def test_numbers_are_the_same_for_every_layout_and_number_of_workers(run: Run) -> None:
    names = list(FUNCTIONS)
    alone = run(check_layouts, names, nprocs=1, timeout=100)[0]
    for nprocs in (3, 4):
        for worker in run(check_layouts, names, nprocs=nprocs, timeout=100):
            for name in names:
                for a, b in zip(worker[name], alone[name], strict=True):
                    assert torch.allclose(a, b, 1e-12, 1e-12), f"{name} on {nprocs} workers"


def check_laws() -> None:
    """Mean and variance of each distribution, and that the next call draws others."""
    world = tessel.world()
    x = tessel.zeros(200, 500, where=world.create_cartesian_topology_partition([1, world.size]))
    x = x.double()
    torch.manual_seed(5)
    laws: dict[str, tuple[Callable[[], Tensor], float, float]] = {
        "rand_like": (lambda: torch.rand_like(x), 1 / 2, 1 / 12),
        "randn_like": (lambda: torch.randn_like(x), 0, 1),
        "randint_like": (lambda: torch.randint_like(x, 2, 7), 4, 2),
        "dropout": (lambda: F.dropout(x + 1, 0.2), 1, 0.25),
        "alpha_dropout": (lambda: F.alpha_dropout(torch.randn_like(x), 0.2, True), 0, 1),
        "bernoulli": (lambda: torch.bernoulli(x + 0.3), 0.3, 0.21),
        "normal_": (lambda: torch.empty_like(x).normal_(1, 2), 1, 4),
        "uniform_": (lambda: torch.empty_like(x).uniform_(-1, 2), 0.5, 0.75),
        "exponential_": (lambda: torch.empty_like(x).exponential_(2), 0.5, 0.25),
        "geometric_": (lambda: torch.empty_like(x).geometric_(0.5), 2, 2),
        "log_normal_": (lambda: torch.empty_like(x).log_normal_(0, 0.5).log(), 0, 0.25),
        "cauchy_": (lambda: torch.empty_like(x).cauchy_().atan(), 0, torch.pi**2 / 12),
        "random_": (lambda: torch.empty_like(x).random_(3), 1, 2 / 3),
        "rrelu": (lambda: F.rrelu(x - 1, 0.25, 0.75, True), -0.5, 1 / 48),
        "normal": (lambda: torch.normal(x + 2, 3.0), 2, 9),
        "multinomial": (
            lambda: torch.multinomial(
                torch.tensor([0.2, 0.0, 0.8]) + 0 * x[:, :3].float(), 500, replacement=True
            ).double(),
            1.6,
            0.64,
        ),
        "multinomial of one": (
            lambda: torch.multinomial((x[:, :4] + 1).reshape(-1, 4), 1).double(),
            1.5,
            1.25,
        ),
        "gumbel_softmax": (lambda: F.gumbel_softmax(x[:, :4], hard=True), 0.25, 3 / 16),
    }
    for name, (draws, mean, variance) in laws.items():
        y, again = draws().full(), draws().full()
        error = 6 * (variance / y.numel()) ** 0.5
        assert abs(float(y.mean()) - mean) < error, f"{name}: mean {float(y.mean())}"
        assert abs(float(y.var()) / variance - 1) < 60 / y.numel() ** 0.5, f"{name}: {y.var()}"
        assert not torch.equal(y, again), f"{name} draws the same twice"


@pytest.mark.parametrize("nprocs", [1, 3])
def test_laws_of_distribution(run: Run, nprocs: int) -> None:
    run(check_laws, nprocs=nprocs, timeout=100)


def check_channels() -> None:
    """Whole channels of a sample fall, and others of the next sample."""
    world = tessel.world()
    for axes in ([0, None, None, None], [None, 0, None, None], [None, None, 0, None]):
        layout = tessel.Layout.split(world, (6, 40, 5, 3), axes)
        y = F.dropout2d(tessel.spread(torch.ones(6, 40, 5, 3), layout), 0.5).full()
        assert set(y.unique().tolist()) == {0.0, 2.0}
        assert bool((y == y[:, :, :1, :1]).all())
        assert not torch.equal(y[0], y[1])
    single = tessel.spread(torch.ones(40, 6), tessel.Layout.split(world, (40, 6), [None, 0]))
    y = F.dropout1d(single, 0.5).full()
    assert bool((y == y[:, :1]).all()) and len(y.unique()) == 2


def check_alpha() -> None:
    """Values that stay are scaled and shifted as torch does it, in double precision."""
    whole = torch.full((9, 50), 1.3, dtype=torch.float64)
    x = tessel.spread(whole, tessel.Layout.split(tessel.world(), (9, 50), [0, None]))
    expected = F.alpha_dropout(whole, 0.3, True).unique()
    for does in (F.alpha_dropout, F.feature_alpha_dropout):
        assert torch.allclose(does(x, 0.3, True).full().unique(), expected, 1e-14, 0)


def check_together() -> None:
    """Functions that gather draw the same numbers on all workers."""
    for axes in ([0, None], [None, None]):
        shared = [] if 0 in axes else [0]
        layout = tessel.Layout.split(tessel.world(), (9, 50), axes, shared)
        x = tessel.spread(torch.full((9, 50), 3.0), layout)
        torch.manual_seed(tessel.world().rank)
        y, z = torch.poisson(x), torch.poisson(x)
        assert not torch.equal(y.full(), z.full())
        assert y.layout == x.layout
        world = tessel.world()
        rows = world.create_cartesian_topology_partition([world.size, 1, 1])
        mine = tessel.from_local(y.full().unsqueeze(0), rows).full()
        assert bool((mine == mine[:1]).all()), "workers drew different numbers"


def check_nothing_is_drawn() -> None:
    x = tessel.spread(values((6, 5), 1), tessel.Layout.split(tessel.world(), (6, 5), [0, None]))
    state = torch.get_rng_state()
    assert torch.equal(F.dropout(x, 0.5, False).full(), x.full())
    assert torch.equal(F.dropout(x, 0.0).full(), x.full())
    assert torch.equal(F.rrelu(x).full(), F.rrelu(x.full()))
    channels = (6, 5, 1, 1)
    for drop, shape in ((F.dropout1d, (6, 5)), (F.dropout3d, channels), (F.dropout2d, channels)):
        one, alone = x.reshape(shape), x.full().reshape(shape)
        assert (drop(one, 0.5, False) is one) == (drop(alone, 0.5, False) is alone), drop
        drop(one, 0.5, False).mul_(2)  # a view, or the operand
        assert torch.equal(one.full(), 2 * alone), drop
        one.mul_(0.5)
    assert torch.equal(state, torch.get_rng_state())


def check_errors() -> None:
    """Bad arguments raise on all workers, also where only one has the bad value."""
    x = tessel.spread(
        torch.linspace(0, 2, 9).double(), tessel.Layout.split(tessel.world(), (9,), [0])
    )
    for does, kind in (
        (lambda: torch.bernoulli(x), RuntimeError),
        (lambda: torch.zeros_like(x).bernoulli_(x), RuntimeError),
        (lambda: torch.normal(0.0, 1 - x), RuntimeError),
        (lambda: F.dropout(x, 1.5), ValueError),
        (lambda: torch.multinomial(1 - x, 2), RuntimeError),
        (lambda: torch.multinomial((x > 1.8).double(), 2), RuntimeError),
        (lambda: torch.empty_like(x).normal_(0, -1), RuntimeError),
        (lambda: torch.rand_like(x.long()), RuntimeError),
        (lambda: common_number(tessel.world(), torch.Generator(), "cuda"), RuntimeError),
    ):
        with pytest.raises(kind):
            does()
        assert float(tessel.ones(9, where=tessel.world()).sum()) == 9  # all go on


def check_operators_without_rules() -> None:
    """Where torch does not say that an operator draws, its generator does; nobody draws alone."""
    x = tessel.spread(torch.ones(9).double(), tessel.Layout.split(tessel.world(), (9,), [0]))
    for does in (
        lambda: torch.ops.aten.uniform.default(x),
        lambda: torch.ops.aten.normal_functional.default(x),
    ):
        with pytest.raises(NotImplementedError):
            does()


def test_random_operators_without_rules_raise(run: Run) -> None:
    run(check_operators_without_rules, nprocs=2, timeout=60)


def check_generators() -> None:
    """A generator draws one number for a call, as torch's own does, which stays where it was."""
    world = tessel.world()
    x = tessel.spread(torch.linspace(0, 1, 9).double(), tessel.Layout.split(world, (9,), [0]))
    generator, other = own(), own()
    before = torch.get_rng_state()
    calls: list[Callable[[], Tensor]] = [
        lambda: torch.rand_like(x, generator=generator),
        lambda: torch.bernoulli(x, generator=generator),
        lambda: torch.empty_like(x).normal_(generator=generator),
        lambda: torch.multinomial(x, 3, generator=generator),
        lambda: torch.poisson(x, generator=generator),
        lambda: tessel.rand(9, where=world, generator=generator),
    ]
    for does in calls:
        assert not torch.equal(does().full(), does().full())
        for _ in range(2):
            torch.randint(2**62, (), generator=other)
        assert torch.equal(generator.get_state(), other.get_state())
    assert torch.equal(before, torch.get_rng_state())
    # the same numbers as those of torch's own generator in this state
    torch.manual_seed(generator.initial_seed())
    generator.manual_seed(generator.initial_seed())
    assert torch.equal(torch.rand_like(x).full(), torch.rand_like(x, generator=generator).full())


def check_generators_in_models() -> None:
    """In a converted model, too, a generator is the caller's, and need not be alike on workers."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = own()

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x, generator=self.generator)

    world = tessel.world()
    model = tessel.nn.distribute_module(Noisy(), world)
    x = tessel.spread(torch.zeros(9).double(), world)
    first, second = model(x).full(), model(x).full()
    generator = torch.Generator().manual_seed(11)  # that of the first worker
    alone = tessel.Layout.whole(world, (9,), shared=True)
    nothing = tessel.spread(torch.zeros(9).double(), alone)
    assert torch.equal(torch.rand_like(nothing, generator=generator).full(), first)
    assert torch.equal(torch.rand_like(nothing, generator=generator).full(), second)


def check_checkpoint() -> None:
    """What is computed again in the backward pass draws the same numbers."""
    root = values((6, 5), 1).requires_grad_()
    x = tessel.spread(root, tessel.Layout.split(tessel.world(), (6, 5), [0, None]))
    y = checkpoint(lambda x: F.dropout(x, 0.5).square(), x, use_reentrant=False)
    kept = y.full() != 0
    y.sum().backward()
    assert torch.equal(root.grad != 0, kept)


@pytest.mark.parametrize(
    "check",
    [
        check_channels,
        check_alpha,
        check_together,
        check_nothing_is_drawn,
        check_errors,
        check_generators,
        check_generators_in_models,
        check_checkpoint,
    ],
)
@pytest.mark.parametrize("nprocs", [1, 3])
def test_random(run: Run, check: Callable[[], None], nprocs: int) -> None:
    run(check, nprocs=nprocs, timeout=60)


def generators_beside(devices: tuple[torch.device, ...]) -> list[bool]:
    """Whether generators go on as if nothing was, after numbers were drawn from a seed."""
    lazy = len(torch.cuda._queued_calls)
    before = torch.get_rng_state()
    with seeded(7, *devices):
        first = torch.rand(3)
    with seeded(7, *devices):
        again = torch.rand(3)
    nothing_waits = len(torch.cuda._queued_calls) == lazy
    return [torch.equal(first, again), torch.equal(before, torch.get_rng_state()), nothing_waits]


@pytest.mark.parametrize("devices", [(), (torch.device("cpu"),)])
def test_a_block_with_a_seed_leaves_generators_alone(devices: tuple[torch.device, ...]) -> None:
    """Also that of a GPU: a seed that `torch.manual_seed` keeps for it would wait there."""
    assert generators_beside(devices) == [True, True, True]


@pytest.mark.parametrize("p", [0.0, 1e-17, 0.3, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (300_000,), (2, 150_001), (700, 3, 101)])
def test_numbers_that_are_at_least_p(shape: tuple[int, ...], p: float) -> None:
    """Of wholes and of boxes, also where they are computed part by part."""
    for box in (
        tuple((0, n) for n in shape),
        tuple((n // 3, n - n // 5) for n in shape),
    ):
        for dtype in (torch.bool, torch.float32):
            found = is_at_least(p, 7, shape, box, dtype)
            assert found.dtype == dtype
            assert torch.equal(found > 0, uniform_in(7, shape, box) >= p)


class Calls(TorchDispatchMode):
    """How many operators are called."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_other_devices_compute_more_numbers_at_once() -> None:
    """Tensors without values stand for those of a GPU, where each operator launches a kernel."""
    box = ((0, 1024), (0, 1024))
    with Calls() as calls:
        is_at_least(0.3, 7, (1024, 1024), box, torch.bool, "meta")
    assert calls.count < 60


def peak_of_dropout() -> float:
    """What dropout has at once, in tensors of its operand's size."""
    x = tessel.spread(
        torch.ones(1024, 1024), tessel.Layout.split(tessel.world(), (1024, 1024), [0, None])
    )
    F.dropout(x, 0.3)
    with count_memory() as memory:
        F.dropout(x, 0.3)
    return memory.peak / x.local.nbytes


def test_dropout_needs_little_memory(run: Run) -> None:
    found = run(peak_of_dropout, nprocs=2)
    assert max(found) < 3  # its result, factors, and truth values
