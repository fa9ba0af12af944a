"""A prior in patches over workers: values, gradients of the image and of all parameters.

Tests `imaging/prior.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import deepinv
import pytest
import torch
from torch import Tensor, nn

from parity import close, values
from tessel.core import boxes
from tessel.imaging import (
    DistributedContext,
    DistributedPrior,
    DistributedSignal,
    FactoryConfig,
    TilingConfig,
    make_distrib_bundle,
)
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
NUMBERS = (1, 2, 4)
SHAPE = (2, 2, 20, 14)
TILES = {"patch_size": 8, "receptive_field_size": 3}
TOLERANCE = 1e-10  # in float64; convolutions of other sizes sum in another order


class Denoiser(nn.Module):
    """A small convolutional network of reach 3, which takes the level of noise."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        first, second, last = (nn.Conv2d(*n, 3, padding=1) for n in ((2, 4), (4, 4), (4, 2)))
        self.layers = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last).double()

    def forward(self, x: Tensor, sigma: Any) -> Tensor:
        return x - sigma * self.layers(x)


def compare(batch: int, overlap: bool) -> list[Tensor]:
    """prox and grad of deepinv's priors with a denoiser, in patches and whole."""
    with DistributedContext(debug=True) as ctx:
        x = values((batch, *SHAPE[1:]), 0)
        pnp = deepinv.optim.PnP(denoiser=Denoiser())
        red = deepinv.optim.RED(denoiser=Denoiser())
        settings = {**TILES, "overlap": overlap, "receptive_field_size": 30 if overlap else 3}
        signal = DistributedSignal(ctx, x.shape, torch.float64, init=x)
        prior = DistributedPrior(
            ctx=ctx,
            prior=pnp,
            strategy="smart_tiling",
            signal_shape=x.shape,
            strategy_kwargs=settings,
        )
        assert prior.num_patches == 3 * 2
        with torch.no_grad():
            got = prior.prox(signal, sigma_denoiser=0.1)
            close("prox", got, pnp.prox(x, sigma_denoiser=0.1), TOLERANCE)
            vjps = DistributedPrior(ctx, red, "smart_tiling", x.shape, settings)
            slope = vjps.grad(x, 0.1)
            close("grad", slope, red.grad(x, 0.1), TOLERANCE)
            whole = DistributedPrior(ctx, pnp, "smart_tiling", x.shape, {"patch_size": None})
            assert whole.num_patches == 1
            close("one patch", whole.prox(x, 0.1), pnp.prox(x, 0.1), TOLERANCE)
        return [got, slope]


def compare_all() -> list[Tensor]:
    cases = [(1, False), (2, False), (1, True), (2, True)]
    return [each for case in cases for each in compare(*case)]


@pytest.mark.parametrize("nprocs", NUMBERS)
def test_a_prior_is_that_of_one_process(run: Run, nprocs: int) -> None:
    results = run(compare_all, nprocs=nprocs, timeout=100)
    for other in results[1:]:  # bit by bit
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def sent(kind: str, settings: dict[str, Any], sharding: str) -> tuple[int, int, int]:
    """What a worker receives, what it has itself of the result, and the size of the image."""
    with DistributedContext(sharding=sharding) as ctx:
        x = values((2, 3, 33, 20), 0)
        prior = DistributedPrior(ctx, lambda x: 2 * x, kind, x.shape, settings)
        close("twice", prior.prox(x), 2 * x, 1e-15)
        with count_traffic() as traffic:
            prior.prox(x)
        windows = prior.strategy.windows  # type: ignore[attr-defined]
        own = sum(boxes.volume(windows[i].core) for i in prior.local_indices)
        return traffic.bytes_received, own * 6 * x.element_size(), x.nbytes


@pytest.mark.parametrize("sharding", ["round_robin", "block"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("smart_tiling", {"patch_size": 8, "receptive_field_size": 2}),
        ("smart_tiling", {"patch_size": (8, 20), "receptive_field_size": 2, "max_batch_size": 1}),
        ("smart_tiling", {"patch_size": (33, 20)}),  # one window: three workers have none
        ("basic", {"num_splits": 3, "receptive_field_size": 1}),
    ],
)
def test_cores_are_sent_once(run: Run, kind: str, settings: dict[str, Any], sharding: str) -> None:
    for received, own, whole in run(sent, kind, settings, sharding):
        assert received == whole - own


def test_blended_windows_are_summed(run: Run) -> None:
    settings = {"patch_size": 8, "receptive_field_size": 2, "overlap": True}
    for received, _, whole in run(sent, "smart_tiling", settings, "block"):
        assert received == 2 * 3 / 4 * whole


def classical() -> None:
    """Denoisers of deepinv without weights; those whose reach is no limit only come close."""
    with DistributedContext() as ctx:
        x = values((1, 3, 32, 32), 0).float()
        median = deepinv.models.MedianFilter(kernel_size=5)
        spread = DistributedPrior(ctx, median, "smart_tiling", x.shape, TILES)
        # at the border it reflects, which windows that end there do alike
        assert torch.equal(spread.prox(x), median(x))
        settings = {"patch_size": 16, "receptive_field_size": 16, "stride": 8}
        torch.manual_seed(0)
        drunet = deepinv.models.DRUNet(nc=(4, 8, 8, 8), nb=1, pretrained=None)
        with torch.no_grad():
            expected = drunet(x, 0.1)
            got = DistributedPrior(ctx, drunet, "smart_tiling", x.shape, settings).prox(x, 0.1)
        assert (got - expected).abs().max() < 1e-2 * expected.abs().max()


@pytest.mark.parametrize("nprocs", [1, 2])
def test_denoisers_of_deepinv(run: Run, nprocs: int) -> None:
    run(classical, nprocs=nprocs)


def denoised(net: nn.Module, how: str) -> Any:
    """A network inside of all kinds of objects."""
    if how == "module":
        return deepinv.optim.PnP(denoiser=net)
    if how == "closure":
        return lambda x, sigma: net(x, sigma)
    if how == "partial":
        return partial(net.forward)
    return type("Plain", (), {"net": net, "prox": lambda self, x, sigma: self.net(x, sigma)})()


def derive(how: str, overlap: bool, size: int) -> None:
    """Gradients of image, parameters and level of noise, of two orders, where workers are idle."""
    with DistributedContext() as ctx:
        x = values(SHAPE, 0)
        weights = values(SHAPE, 1)
        theirs, ours = Denoiser(), Denoiser()
        settings = {"patch_size": size, "receptive_field_size": 30, "overlap": overlap}
        shared = {"net": ours} if how == "closure" else None
        make = partial(DistributedPrior, ctx, denoised(ours, how), "smart_tiling", SHAPE, settings)
        if how == "closure":
            with pytest.raises(ValueError, match=r"closures are not\); pass it in shared="):
                make().prox(x, 0.3)
        prior = make(shared=shared)
        level, twin = (torch.tensor(0.3, dtype=torch.float64).requires_grad_() for _ in range(2))
        a, b = (x.clone().requires_grad_() for _ in range(2))
        expected, got = theirs(a, level), prior.prox(b, twin)
        close("prox", got, expected, TOLERANCE)
        wanted, held = [a, level, *theirs.parameters()], [b, twin, *ours.parameters()]
        for order in (1, 2):
            losses = [(weights * (y + y.square())).sum() for y in (expected, got)]
            first = torch.autograd.grad(losses[0], wanted, create_graph=order == 1)
            second = torch.autograd.grad(losses[1], held, create_graph=order == 1)
            for k, (p, q) in enumerate(zip(second, first, strict=True)):
                close(f"gradient of order {order} of {k}", p, q, TOLERANCE)
            expected, got = first[0], second[0]


def derive_all() -> None:
    for how in ("module", "closure", "partial", "plain"):
        derive(how, False, 8)
    derive("module", True, 8)
    derive("module", False, 16)  # two patches


@pytest.mark.parametrize("nprocs", NUMBERS)
def test_gradients_are_those_of_one_process(run: Run, nprocs: int) -> None:
    run(derive_all, nprocs=nprocs, timeout=100)


def train(workers: bool) -> list[Tensor]:
    """Three steps of an unrolled plug-and-play method with a learned step length."""
    kernels = [deepinv.physics.blur.gaussian_blur(sigma=s).double() for s in (0.6, 1.0, 1.4)]
    operators = [deepinv.physics.Blur(filter=each, padding="circular") for each in kernels]
    clean = values(SHAPE, 0)
    ys = [each.A(clean) + 0.01 * values(SHAPE, 1 + k) for k, each in enumerate(operators)]
    net, step = Denoiser(3), nn.Parameter(torch.tensor(0.8, dtype=torch.float64))
    pnp, fidelity = deepinv.optim.PnP(denoiser=net), deepinv.optim.L2()
    optimizer = torch.optim.Adam([*net.parameters(), step], lr=0.01)

    def fit(grad: Callable[[Tensor], Tensor], prox: Callable[[Tensor], Tensor]) -> list[Tensor]:
        losses = []
        for _ in range(3):
            x = torch.zeros_like(clean)
            for _ in range(2):
                x = prox(x - step * grad(x))
            loss = (x - clean).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, step.detach(), *(each.detach() for each in net.parameters())]

    if not workers:
        pairs = list(zip(operators, ys, strict=True))
        return fit(
            lambda x: sum(fidelity.grad(x, y, each) for each, y in pairs) / 3,
            lambda x: pnp.prox(x, sigma_denoiser=0.2),
        )
    with DistributedContext() as ctx:
        bundle = make_distrib_bundle(
            ctx,
            factory_config=FactoryConfig(operators, ys, fidelity),
            signal_shape=SHAPE,
            dtype=torch.float64,
            prior=pnp,
            tiling=TilingConfig(patch_size=8, receptive_field_size=3),
        )
        assert bundle.prior is not None
        prox = bundle.prior.prox
        return fit(bundle.data_fidelity.grad, lambda x: prox(x, sigma_denoiser=0.2))


def compare_training() -> list[Tensor]:
    got, expected = train(True), train(False)
    for k, (a, b) in enumerate(zip(got, expected, strict=True)):
        close(f"value {k} after training", a, b, 1e-8)  # Adam divides small gradients by their size
    return got


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("nprocs", NUMBERS)
def test_an_unrolled_method_is_trained(run: Run, nprocs: int) -> None:
    results = run(compare_training, nprocs=nprocs, timeout=100)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


class GradientStep(Denoiser):
    """A step down the gradient of a potential, which it derives itself."""

    def forward(self, x: Tensor, sigma: Any) -> Tensor:
        with torch.enable_grad():
            x = x.requires_grad_()
            rest = x - self.layers(x)
            (slope,) = torch.autograd.grad(rest.square().sum() / 2, x, create_graph=True)
        return x - sigma * slope


def step(grid: tuple[int, int] | None, patch_size: int, sigma: Any, learns: bool) -> None:
    with DistributedContext() as ctx:
        x = values(SHAPE, 1)
        denoiser = GradientStep().requires_grad_(learns)
        signal = DistributedSignal(ctx, SHAPE, torch.float64, grid)
        tiles = {"patch_size": patch_size, "receptive_field_size": 6}
        prior = DistributedPrior(ctx, denoiser, "smart_tiling", SHAPE, tiles, signal.layout)
        signal.update_(prior.prox(signal.layout.local_part(x), sigma))
        close("prox", signal.whole(), denoiser(x.clone(), sigma), TOLERANCE)


@pytest.mark.parametrize("nprocs", NUMBERS)
@pytest.mark.parametrize("learns", [False, True])
def test_denoisers_that_derive_themselves(run: Run, nprocs: int, learns: bool) -> None:
    for grid in (None, (nprocs, 1)):
        for patch_size in (8, 20):  # some workers have no patch
            run(step, grid, patch_size, 0.1, learns, nprocs=nprocs)


@pytest.mark.parametrize("nprocs", NUMBERS)
def test_arguments_of_each_image(run: Run, nprocs: int) -> None:
    sigma = torch.tensor([0.1, 0.7], dtype=torch.float64).reshape(2, 1, 1, 1)
    for grid in (None, (nprocs, 1)):
        run(step, grid, 8, sigma, False, nprocs=nprocs)


SECRET: list[Tensor] = []


def test_a_hidden_parameter_is_noticed() -> None:
    """Of which each worker would get a part of the gradient."""
    SECRET[:] = [torch.ones((), requires_grad=True)]
    with DistributedContext() as ctx:
        prior = DistributedPrior(
            ctx, lambda x: x * __import__(__name__).SECRET[0], "basic", (1, 1, 4, 4)
        )
        with pytest.raises(ValueError, match="was not found among its parameters"):
            prior.prox(torch.zeros(1, 1, 4, 4))
        with torch.no_grad():
            prior.prox(torch.zeros(1, 1, 4, 4))


def hidden_from_some() -> str:
    """Two patches on three workers: one of them sees nothing of what the others compute."""
    scale = torch.ones((), requires_grad=True)
    with DistributedContext() as ctx:
        settings = {"split_dims": -1, "num_splits": 2}
        prior = DistributedPrior(ctx, lambda x: scale * x, "basic", (1, 1, 4, 4), settings)
        with pytest.raises(ValueError) as error:
            prior.prox(torch.zeros(1, 1, 4, 4))
        prior = DistributedPrior(ctx, lambda x: x[5], "basic", (1, 1, 4, 4), settings)
        with torch.no_grad(), pytest.raises(ValueError, match="prox, which raised IndexError: "):
            prior.prox(torch.zeros(1, 1, 4, 4))
        return str(error.value)


def test_what_a_prior_does_wrong_is_noticed_by_all(run: Run) -> None:
    for text in run(hidden_from_some, nprocs=3):
        assert "pass it in shared={...} of DistributedPrior" in text


def repaired() -> float:
    """A prior that raises twice on two workers of three, those with patches; then it works."""
    is_broken = [True]

    def denoise(x: Tensor) -> Tensor:
        if is_broken[0]:
            raise IndexError("no such patch")
        return 2 * x

    with DistributedContext() as ctx, torch.no_grad():
        settings = {"split_dims": -1, "num_splits": 2}
        prior = DistributedPrior(ctx, denoise, "basic", (1, 1, 4, 4), settings)
        for _ in range(2):
            with pytest.raises(ValueError, match="prox, which raised IndexError: no such patch"):
                prior.prox(torch.ones(1, 1, 4, 4))
        is_broken[0] = False
        return float(prior.prox(torch.ones(1, 1, 4, 4)).sum())


def test_a_prior_that_raised_can_be_called_again(run: Run) -> None:
    assert run(repaired, nprocs=3) == [32.0] * 3


def frozen() -> bool:
    """Worker 1 does not train, which the others must hear of."""
    with DistributedContext() as ctx:
        net = Denoiser().requires_grad_(ctx.rank != 1)
        prior = DistributedPrior(ctx, net, "smart_tiling", SHAPE, TILES)
        with pytest.raises(ValueError, match="must make the same calls"):
            prior.prox(values(SHAPE, 0), 0.1)
        return True


def test_workers_agree_on_what_is_trained(run: Run) -> None:
    assert run(frozen, nprocs=2) == [True, True]


def test_parameters_are_put_back() -> None:
    with DistributedContext() as ctx:
        net = Denoiser()
        before = list(net.parameters())

        def broken(x: Tensor) -> Tensor:
            net(x, 0.1)
            raise KeyError("broken")

        prior = DistributedPrior(ctx, broken, "basic", SHAPE, shared={"net": net})
        with pytest.raises(KeyError, match="broken"):
            prior.prox(values(SHAPE, 0))
        assert all(a is b for a, b in zip(before, net.parameters(), strict=True))


class Doubled(torch.autograd.Function):
    """The product with a parameter, which torch functions do not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * weight * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return 2 * weight * grad, (2 * x * grad).sum()


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x, self.weight)  # type: ignore[no-any-return]


class Scaled:
    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = weights

    def prox(self, x: Tensor) -> Tensor:
        return torch.stack([weight * x for weight in self.weights]).sum(0)


def read_only() -> None:
    """Objects of users are read: while they compute, they hold what the user put there."""
    with DistributedContext() as ctx:
        x = torch.ones(1, 1, 4, 8)
        tensor = torch.tensor(2.0, requires_grad=True)
        kept, is_same = tensor, []

        def closure(x: Tensor) -> Tensor:
            is_same.append(tensor is kept)
            return x * tensor

        class Watched(Scaled):
            def prox(self, x: Tensor) -> Tensor:
                is_same.append(self.weights[0] is kept)
                return super().prox(x)

        for prior, factor in ((closure, 1.0), (Watched([tensor, tensor]), 2.0)):
            spread = DistributedPrior(ctx, prior, "basic", x.shape, shared={"tensor": tensor})
            (slope,) = torch.autograd.grad(spread.prox(x).sum(), tensor)
            close("the gradient of a tensor", slope, torch.tensor(32.0 * factor), 1e-6)
        assert is_same and all(is_same)
        gain = Gain()
        before = gain.weight
        (slope,) = torch.autograd.grad(
            DistributedPrior(ctx, gain, "basic", x.shape).prox(x).sum(), gain.weight
        )
        close("the gradient of a parameter", slope, torch.tensor(64.0), 1e-6)
        assert gain.weight is before


@pytest.mark.parametrize("nprocs", NUMBERS)
def test_objects_of_users_are_only_read(run: Run, nprocs: int) -> None:
    run(read_only, nprocs=nprocs)


def make_for_itself(how: str) -> str:
    """A network that every worker initialises, from its own numbers or from shared ones."""
    with DistributedContext(seed=1) as ctx:
        make = lambda: nn.Conv2d(2, 2, 3, padding=1)  # noqa: E731
        if how == "shared":
            with ctx.shared_random():
                net = make()
        else:
            net = make()
        if how == "frozen":
            net.requires_grad_(False)
        given = {"closure": lambda x: net(x), "object": Holder(net)}.get(how, net)
        used = {"net": net} if how == "closure" else {}
        try:
            prior = DistributedPrior(ctx, given, "smart_tiling", SHAPE, TILES, shared=used)
        except ValueError as error:
            return str(error)
        return f"{prior.prox(values(SHAPE, 0).float()).sum().item()}"


class Holder:
    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def prox(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("how", ["own", "frozen", "closure", "object", "shared"])
def test_priors_that_differ_between_workers_are_refused(run: Run, how: str) -> None:
    """Each would denoise its own patches with a network of its own."""
    texts = run(make_for_itself, how, nprocs=2)
    assert len(set(texts)) == 1
    refuses = "has different parameters on worker 1 and on worker 0" in texts[0]
    assert refuses == (how != "shared"), texts
    assert not refuses or "with ctx.shared_random():" in texts[0]


def tiled_by_default(shape: tuple[int, ...]) -> tuple[int, float]:
    with DistributedContext() as ctx:
        blur = deepinv.physics.Blur(values((1, 1, 3, 3), 1).float(), padding="circular")
        x = values(shape, 2).float()
        bundle = make_distrib_bundle(
            ctx,
            factory_config=FactoryConfig([blur], [x]),
            signal_shape=shape,
            prior=deepinv.models.MedianFilter(3),
        )
        assert bundle.prior is not None
        expected = deepinv.models.MedianFilter(3)(x)
        difference = (bundle.prior.prox(x, 0.1) - expected).abs().max().item()
        return bundle.prior.num_patches, difference


@pytest.mark.parametrize(("size", "count"), [((256, 256), 1), ((257, 8), 2), ((300, 520), 6)])
def test_large_images_are_cut_by_default(run: Run, size: tuple[int, int], count: int) -> None:
    """Into patches of 256, each read with 64 around it: values are those of the whole image."""
    for found in run(tiled_by_default, (1, 1, *size), nprocs=2):
        assert found == (count, 0.0)
