"""Tiles cover the image once, and a tiled prior is the untiled one once its reach is covered.

Tests `imaging/tiling.py`, `imaging/distribution_strategies/strategies.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import ceil, prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity import values
from tessel.imaging import DistributedContext, DistributedPrior, TilingConfig
from tessel.imaging.distribution_strategies.strategies import (
    BasicStrategy,
    DistributedSignalStrategy,
    SmartTilingStrategy,
    create_strategy,
    ramps,
    tiles,
    tiles_along,
)
from tessel.testing import count_memory

Run = Callable[..., list[Any]]
SIZES = [
    ((130, 131), 64, 8),
    ((481, 321), 128, 32),
    ((100, 40), 32, 20),
    ((64, 64), 64, 8),  # the patch is the image
    ((96, 96), 128, 8),  # and larger
    ((65, 33), 32, 4),  # one pixel remains
    ((256, 256), 64, 0),
    ((256, 250), 64, 8),
]


class Box(nn.Module):
    """A filter of this reach on each side, of whole numbers, so that sums are exact in any order.

    What lies outside of the image is zero.
    """

    def __init__(self, reach: int, dims: int = 2) -> None:
        super().__init__()
        self.reach, self.dims = reach, dims

    def forward(self, x: Tensor) -> Tensor:
        for dim in range(2, 2 + self.dims):
            pad = [0, 0] * (x.ndim - 1 - dim) + [self.reach, self.reach]
            length = x.shape[dim]
            wide = nn.functional.pad(x, pad)
            x = sum((1 + k) * wide.narrow(dim, k, length) for k in (0, self.reach, 2 * self.reach))
        return x


def whole_numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(1)).double()


def tiled(prior: Any, x: Tensor, **settings: Any) -> Tensor:
    with DistributedContext() as ctx:
        return DistributedPrior(ctx, prior, "smart_tiling", x.shape, settings).prox(x)


@pytest.mark.parametrize(("size", "patch", "reach"), SIZES)
def test_tiles_cover_the_image_once(size: tuple[int, ...], patch: int, reach: int) -> None:
    found = tiles(size, (patch,) * 2, (reach,) * 2, (1, 1))
    assert len(found) == prod(ceil(n / patch) for n in size)
    times = torch.zeros(size)
    for window in found:
        times[tuple(slice(*each) for each in window.core)] += 1
        assert window.shape == tuple(min(patch + 2 * reach, n) for n in size)
        for (a, b), (i, j), n in zip(window.core, window.read, size, strict=True):
            assert max(0, a - reach) >= i >= 0 and min(n, b + reach) <= j <= n
    assert (times == 1).all()


@pytest.mark.parametrize(("size", "patch", "reach"), SIZES)
def test_tiled_is_untiled(size: tuple[int, ...], patch: int, reach: int) -> None:
    """To the last bit, borders included, and no longer if one pixel less is read.

    Windows that are shifted inwards at a border of the image read more than was asked for. Where
    each window is at one, as where there are two along a dimension, one pixel less is enough.
    """
    x = whole_numbers((2, 1, *size))
    prior = Box(reach)
    settings = {"patch_size": patch, "receptive_field_size": reach}
    assert torch.equal(tiled(prior, x, **settings), prior(x))
    if reach:
        settings["receptive_field_size"] = reach - 1
        is_enough = all(_reads_enough(n, patch, reach) for n in size)
        assert torch.equal(tiled(prior, x, **settings), prior(x)) == is_enough


def _reads_enough(length: int, patch: int, reach: int) -> bool:
    """Whether windows that were asked for one pixel less than `reach` read as far all the same."""
    return all(
        i <= max(0, a - reach) and min(length, b + reach) <= j
        for (a, b), (i, j) in tiles_along(length, patch, reach - 1, 1)
    )


def test_there_are_windows_of_both_kinds() -> None:
    enough = [all(_reads_enough(n, p, r) for n in size) for size, p, r in SIZES if r]
    assert enough.count(False) >= 3 and enough.count(True) >= 2


def test_volumes() -> None:
    x, prior = whole_numbers((1, 2, 9, 21, 11)), Box(2, dims=3)
    settings = {"patch_size": (4, 5, 6), "receptive_field_size": 2}
    strategy = SmartTilingStrategy(x.shape, **settings)
    assert strategy.get_num_patches() == 3 * 5 * 2
    assert torch.equal(tiled(prior, x, **settings), prior(x))
    settings["receptive_field_size"] = (2, 1, 2)
    assert not torch.equal(tiled(prior, x, **settings), prior(x))


class Halves(nn.Module):
    """What a U-Net does to an image: half the size, a filter, and back; whole numbers all along."""

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        even = nn.functional.pad(x, (0, w % 2, 0, h % 2))
        small = even[..., ::2, ::2] + 2 * even[..., 1::2, 1::2]
        back = Box(1)(small).repeat_interleave(2, -1).repeat_interleave(2, -2)
        return x + back[..., :h, :w]


@pytest.mark.parametrize("size", [(64, 60), (63, 61), (40, 23)])
@pytest.mark.parametrize(("patch", "reach"), [(16, 4), (15, 3), (13, 4)])
def test_windows_at_multiples_of_a_stride(size: tuple[int, int], patch: int, reach: int) -> None:
    x, prior = whole_numbers((1, 1, *size)), Halves()
    settings = {"patch_size": patch, "receptive_field_size": reach}
    assert torch.equal(tiled(prior, x, stride=2, **settings), prior(x))
    if patch % 2 or reach % 2:
        assert not torch.equal(tiled(prior, x, **settings), prior(x))


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_every_tile_along_a_dimension(stride: int) -> None:
    for length, patch, margin in product((1, 7, 16, 33, 40), (1, 3, 8, 50), (0, 1, 5)):
        for (a, b), (i, j) in tiles_along(length, patch, margin, stride):
            assert i % stride == 0 and (j % stride == 0 or j == length)
            assert 0 <= i <= max(0, a - margin) and min(length, b + margin) <= j <= length


class Network(nn.Module):
    """A small convolutional denoiser of reach 3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
        self.layers = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return x - self.layers(x)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_network(overlap: bool) -> None:
    x, prior = values((2, 3, 50, 37), 0), Network()
    settings = {"patch_size": 16, "receptive_field_size": 3, "overlap": overlap}
    with torch.no_grad():
        error = (tiled(prior, x, **settings) - prior(x)).abs().max().item()
        far = (tiled(prior, x, **{**settings, "receptive_field_size": 2}) - prior(x)).abs().max()
    assert far > 1e-6
    # blended windows do not give up their margins, where they know too little
    assert error > 1e-6 if overlap else error < 1e-14


@pytest.mark.parametrize("strategy", ["smart_tiling", "basic"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("reach", [0, 3, 40])
def test_the_identity_returns_the_image(strategy: str, overlap: bool, reach: int) -> None:
    x = values((2, 3, 33, 20), 0)
    with DistributedContext() as ctx:
        settings = {"patch_size": 8, "receptive_field_size": reach, "overlap": overlap}
        prior = DistributedPrior(ctx, lambda x: x, strategy, x.shape, settings)
        assert (prior.prox(x) - x).abs().max() <= (1e-15 if overlap else 0) * 10


def test_weights_sum_to_one() -> None:
    for length, patch, margin in product((7, 16, 33), (3, 8, 50), (0, 1, 5)):
        reads = [read for _, read in tiles_along(length, patch, margin, 1)]
        sums = torch.zeros(length, dtype=torch.float64)
        for (i, j), weights in zip(reads, ramps(reads, length), strict=True):
            assert min(weights) > 0
            sums[i:j] += torch.tensor(weights, dtype=torch.float64)
        assert (sums - 1).abs().max() < 1e-15


def test_blended_windows_are_blended() -> None:
    """Where two windows say 0 and 1 the result goes from one to the other in steps."""
    strategy = SmartTilingStrategy((1, 1, 1, 12), (1, 6), (0, 2), overlap=True)
    out = torch.zeros(1, 1, 1, 12)
    pairs = strategy.get_local_patches(out, [0, 1])
    strategy.reduce_patches(out, [(i, torch.full_like(patch, i)) for i, patch in pairs])
    steps = out[0, 0, 0]
    assert steps[0] == 0 and steps[-1] == 1 and (steps.diff() >= 0).all()
    assert steps.unique().numel() > 4


class Greedy(nn.Module):
    """A prior whose need of memory grows with its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x] * 20).amax(0)


def test_a_batch_limit_needs_less_memory() -> None:
    x = values((1, 1, 64, 64), 0)
    found, peaks = [], []
    for limit in (None, 4, 1):
        with count_memory() as memory:
            found.append(
                tiled(Greedy(), x, patch_size=16, receptive_field_size=4, max_batch_size=limit)
            )
        peaks.append(memory.peak)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert peaks[0] > 2 * peaks[1] > 2 * peaks[2]


def test_basic_strategy() -> None:
    strategy = BasicStrategy((1, 3, 10, 9), split_dims=(-2,), num_splits=3)
    assert [w.core for w in strategy.windows] == [((0, 4),), ((4, 7),), ((7, 10),)]
    assert BasicStrategy((1, 3, 10, 9)).get_num_patches() == 4
    assert BasicStrategy((1, 3, 10, 9), patch_size=5).get_num_patches() == 4
    assert BasicStrategy((1, 3, 2, 9), split_dims=2, num_splits=5).get_num_patches() == 2
    x, prior = whole_numbers((1, 1, 30, 21)), Box(3)
    with DistributedContext() as ctx:
        settings = {"num_splits": 3, "receptive_field_size": 3}
        assert torch.equal(
            DistributedPrior(ctx, prior, "basic", x.shape, settings).prox(x), prior(x)
        )


class Rows(DistributedSignalStrategy):
    """A strategy of a user: one patch for each few rows."""

    def __init__(self, signal_shape: Any, rows: int = 3) -> None:
        super().__init__(signal_shape)
        self.rows = rows

    def get_num_patches(self) -> int:
        return ceil(self.signal_shape[2] / self.rows)

    def get_local_patches(self, X: Tensor, local_indices: list[int]) -> list[tuple[int, Tensor]]:
        return [(i, X[:, :, i * self.rows : (i + 1) * self.rows]) for i in local_indices]

    def apply_batching(self, patches: list[Tensor]) -> list[Tensor]:
        return patches

    def reduce_patches(self, out_tensor: Tensor, local_pairs: list[tuple[int, Tensor]]) -> None:
        for i, patch in local_pairs:
            out_tensor[:, :, i * self.rows : (i + 1) * self.rows] = patch


def use_own_strategy() -> Tensor:
    with DistributedContext() as ctx:
        x = values((2, 3, 10, 4), 0)
        for strategy in (Rows(x.shape), Rows):
            prior = DistributedPrior(ctx, lambda x: 2 * x, strategy, x.shape)
            assert prior.num_patches == 4 and torch.equal(prior.prox(x), 2 * x)
        other = DistributedPrior(ctx, lambda x: 2 * x, Rows, x.shape, {"rows": 5})
        assert other.num_patches == 2
        return other.prox(x)


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_a_strategy_of_a_user(run: Run, nprocs: int) -> None:
    run(use_own_strategy, nprocs=nprocs)


class Broken(Rows):
    def apply_batching(self, patches: list[Tensor]) -> list[Tensor]:
        raise KeyError("no batches today")


def test_an_error_inside_of_a_strategy_propagates() -> None:
    with DistributedContext() as ctx:
        prior = DistributedPrior(ctx, lambda x: x, Broken, (1, 1, 4, 4))
        with pytest.raises(KeyError, match="no batches today"):
            prior.prox(torch.zeros(1, 1, 4, 4))


def break_one_worker() -> None:
    with DistributedContext() as ctx:
        kind = Broken if ctx.rank == 1 else Rows
        DistributedPrior(ctx, lambda x: x, kind, (1, 1, 9, 4)).prox(torch.zeros(1, 1, 9, 4))


def test_an_error_of_one_worker_ends_the_call(run: Run) -> None:
    """While the others wait for what it would give."""
    with pytest.raises(KeyError, match="no batches today"):
        run(break_one_worker, nprocs=2, timeout=60)


def test_batches_of_other_lengths_are_noticed() -> None:
    class Short(Rows):
        def apply_batching(self, patches: list[Tensor]) -> list[Tensor]:
            return patches[:-1]

    class Half(Rows):
        def apply_batching(self, patches: list[Tensor]) -> list[Tensor]:
            return [torch.cat(patches)[:3]]

    with DistributedContext() as ctx:
        for kind, text in ((Short, "fewer patches"), (Half, "whole patches")):
            prior = DistributedPrior(ctx, lambda x: x, kind, (2, 1, 6, 4))
            with pytest.raises(ValueError, match=text):
                prior.prox(torch.zeros(2, 1, 6, 4))
        prior = DistributedPrior(ctx, lambda x: x[..., 1:], Rows, (2, 1, 6, 4))
        with pytest.raises(ValueError, match="of the shape of its input"):
            prior.prox(torch.zeros(2, 1, 6, 4))


BAD = [
    ({"patch_size": 0}, "patch_size must be 1 or more, got 0"),
    ({"patch_size": -3}, "patch_size must be 1 or more, got -3"),
    ({"patch_size": (4, 0)}, r"patch_size must be 1 or more, got \(4, 0\)"),
    ({"receptive_field_size": -1}, "receptive_field_size must be 0 or more, got -1"),
    ({"strategy": "clever"}, "one of smart_tiling, basic, a class or a strategy, got 'clever'"),
    ({"stride": 0}, "stride must be 1 or more, got 0"),
    ({"max_batch_size": 0}, "max_batch_size must be 1 or more, got 0"),
    ({"strategy": "basic", "stride": 2}, "stride=2 is only used by"),
    ({"strategy": "basic", "patch_size": None}, "patch_size=None, one patch, is only for"),
    ({"strategy": Rows((1, 1, 8, 8)), "patch_size": 4}, "patch_size=4 cannot be used with"),
    ({"strategy": Rows((1, 1, 8, 8)), "overlap": True}, "overlap=True cannot be used with"),
]


@pytest.mark.parametrize(("settings", "text"), BAD)
def test_bad_settings(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TilingConfig(**settings)
    if "strategy" not in settings:
        with pytest.raises(ValueError, match=r"must be [01] or more"):
            create_strategy("smart_tiling", (1, 1, 8, 8), **settings)


def test_numbers_that_are_not_whole() -> None:
    with pytest.raises(ValueError, match=r"patch_size must be whole numbers, got 3\.5"):
        TilingConfig(patch_size=3.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"patch_size must be whole numbers, got 3\.5"):
        create_strategy("smart_tiling", (1, 1, 8, 8), patch_size=3.5)


def test_bad_strategies() -> None:
    shape = (1, 1, 8, 8)
    with pytest.raises(ValueError, match="got 'clever'"):
        create_strategy("clever", shape)
    with pytest.raises(ValueError, match="got 3"):
        create_strategy(3, shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"was created for \(1, 1, 8, 8\)"):
        create_strategy(Rows(shape), (1, 1, 9, 9))
    with pytest.raises(ValueError, match="expected one number, or 2"):
        SmartTilingStrategy(shape, (1, 2, 3))
    with pytest.raises(ValueError, match="from -4 to 3 can be cut, got"):
        SmartTilingStrategy(shape, 4, tiling_dims=(7,))
    with pytest.raises(ValueError, match="got 2 and 3; pass only one"):
        BasicStrategy(shape, num_splits=2, patch_size=3)
    with pytest.raises(ValueError, match="none besides batch and channels"):
        SmartTilingStrategy((1, 8))
    with DistributedContext() as ctx:
        with pytest.raises(ValueError, match="needs signal_shape"):
            DistributedPrior(ctx, lambda x: x)
        with pytest.raises(ValueError, match="a prior with prox or grad, or a denoiser"):
            DistributedPrior(ctx, 3, signal_shape=shape)
        prior = DistributedPrior(ctx, lambda x: x, signal_shape=shape)
        with pytest.raises(
            ValueError, match=r"expected a part of shape \(1, 1, 8, 8\), got \(1, 1, 8, 9\)"
        ):
            prior.prox(torch.zeros(1, 1, 8, 9))
        with pytest.raises(NotImplementedError, match="has no method grad"):
            prior.grad(torch.zeros(shape))
