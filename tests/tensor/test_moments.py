"""Moments by the compiled loop and by torch's functions: both are those of the definition.

Tests `tensor/moments.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tessel.tensor.moments as moments
from tessel.tensor.moments import local_moments

needs_loops = pytest.mark.skipif(moments.loops is None, reason="the loops are not compiled")


def exact(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of the definition, by sums that round once."""
    found = []
    for values in x.double().transpose(0, 1).flatten(1).tolist():
        mean = math.fsum(values) / len(values)
        found.append((mean, math.fsum((each - mean) ** 2 for each in values) / len(values)))
    mean, variance = torch.tensor(found, dtype=torch.float64).unbind(1)
    return mean, variance


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(moments, "loops", None)
    elif moments.loops is None:
        pytest.skip("the loops are not compiled")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape",
    [(1, 3, 128), (2, 1, 129), (3, 2, 13, 11), (1, 2, 1024), (2, 3, 1025), (1, 2, 3, 40, 50)],
)
@pytest.mark.parametrize("offset", [0.0, 100.0, -3e4])
def test_they_are_those_of_the_definition(
    shape: tuple[int, ...], dtype: torch.dtype, offset: float
) -> None:
    x = (torch.randn(shape, dtype=torch.float64) + offset).to(dtype)
    mean, variance = local_moments(x)
    assert mean.dtype == variance.dtype == dtype
    eps = torch.finfo(dtype).eps
    for found, expected, scale in zip(
        (mean, variance), exact(x), (abs(offset) + 1, 1), strict=True
    ):
        # the variance is as exact as the mean's last digit lets it be
        error = (found - expected).abs().max().item()
        assert error <= 16 * eps * scale + (8 * eps * (abs(offset) + 1)) ** 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_that_differ_from_those_before_them(dtype: torch.dtype) -> None:
    ramp = torch.linspace(0, 1, 10_000, dtype=dtype).reshape(1, 1, -1)
    steps = (torch.arange(8_192) // 1_024).to(dtype).mul(1e3).reshape(1, 1, -1)
    rest = torch.full((1, 1, 5_000), 1e4, dtype=dtype)
    rest[..., 0] = -1e4  # the first block's mean is far from all but one value
    for x in (ramp, steps, rest, torch.full((1, 1, 3_000), 0.1, dtype=dtype)):
        mean, variance = local_moments(x)
        of_mean, of_variance = exact(x)
        torch.testing.assert_close(mean.double(), of_mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(variance.double(), of_variance, rtol=1e-5, atol=1e-12)
        assert (variance >= 0).all()


def test_infinite_and_huge_values_give_what_torch_gives() -> None:
    x = torch.randn(1, 4, 3_000)
    x[0, 0, 10], x[0, 1, 2_999], x[0, 2, 5] = math.inf, math.nan, -math.inf
    mean, variance = local_moments(x)
    assert mean[0] == math.inf and mean[1].isnan() and mean[2] == -math.inf and mean[3].isfinite()
    assert variance[:3].isnan().all() and variance[3].isfinite()
    _, variance = local_moments(torch.tensor([1e30, -1e30]).repeat(500).reshape(1, 1, -1))
    assert variance.item() == math.inf  # 1e60 is no float32


def test_what_has_no_memory_of_its_own_values_is_read_by_torch() -> None:
    x = torch.randn(2, 3, 150, dtype=torch.float64)
    lazy = torch._neg_view(x)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    zeros = torch._efficientzerotensor((2, 3, 150))
    for each in (lazy, strided, zeros, x.expand(2, 3, 150), x[:0], x[:, :0], x[..., :0]):
        expected = exact(each) if each.numel() else (torch.zeros(each.shape[1]),) * 2
        for found, value in zip(local_moments(each), expected, strict=True):
            torch.testing.assert_close(found.double(), value.double())


def test_gradients_and_transforms_see_functions_of_torch() -> None:
    x = torch.randn(2, 3, 150, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(local_moments, x[..., :16])
    many = torch.randn(5, 2, 3, 150)
    means, variances = torch.vmap(local_moments)(many)
    for k in range(5):
        torch.testing.assert_close((means[k], variances[k]), local_moments(many[k]))
    with FlopCounterMode(display=False):
        torch.testing.assert_close(local_moments(many[0]), local_moments(many[0]))


@needs_loops
def test_what_the_loop_cannot_read_raises() -> None:
    x, found = torch.randn(1, 1, 128), torch.empty(2, 1)
    assert moments.loops is None or pytest.raises(
        ValueError, moments.loops.moments, x.data_ptr(), found.data_ptr(), 1, 1, 128, 2
    )


def test_the_loop_is_what_runs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.Tensor, "sum", lambda *args: asked.append(args) or torch.zeros(3))
    local_moments(torch.randn(2, 3, 150))
    assert bool(asked) == (way == "torch")
