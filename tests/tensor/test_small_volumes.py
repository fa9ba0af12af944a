"""Small volumes, which torch convolves slowly: by oneDNN, or in another order of dimensions.

Tests `tensor/small_volumes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

import tessel
from tessel.tensor import small_volumes

Run = Callable[..., list[Any]]
THIN = (1, 8, 4, 48, 56)  # 8·4·48 is small, 8·48·56 is not


def test_which_are_turned() -> None:
    assert small_volumes.order_for(torch.empty(THIN)) == (1, 2, 0)
    assert small_volumes.order_for(torch.empty(1, 8, 48, 4, 56)) == (0, 2, 1)
    assert small_volumes.order_for(torch.empty(1, 1, 4, 8, 8)) is None


def test_which_torch_is_slow_for() -> None:
    is_slow = small_volumes._is_slow
    assert is_slow(torch.empty(THIN))
    for shape in ((2, 8, 4, 48, 56), (1, 64, 40, 48, 56), (8, 4, 48, 56)):
        assert not is_slow(torch.empty(shape))
    assert not is_slow(torch.empty(THIN).double())
    with torch.backends.mkldnn.flags(enabled=False):
        assert not is_slow(torch.empty(THIN))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)])
def test_turning_back(order: Any) -> None:
    x = torch.randn(1, 2, 3, 4, 5)
    turned = small_volumes.turned(x, order)
    assert tuple(turned.shape[2:]) == small_volumes.in_order((3, 4, 5), order)
    back = small_volumes.turned_back(turned, order)
    assert back.equal(x) and back.is_contiguous()


CASES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((1, 8, 9, 48, 56), (4, 8, 3, 1, 3), {"padding": (1, 0, 1)}),
    (
        (1, 8, 9, 48, 56),
        (16, 8, 3, 3, 2),
        {"stride": (1, 2, 1), "padding": (1, 1, 0), "dilation": (1, 1, 2)},
    ),
    ((1, 1, 16, 24, 24), (16, 1, 3, 3, 3), {"padding": 1}),
    ((1, 48, 8, 7, 9), (32, 48, 3, 3, 3), {"padding": 1}),
]


def derived(x: Any, kernel: Any, bias: Any, settings: dict[str, Any], twice: bool) -> list[Any]:
    """The convolution, its gradients, and the gradients of their squares."""
    given = [each.clone().requires_grad_() for each in (kernel, bias)]
    y = F.conv3d(x.requires_grad_(), *given, **settings)
    loss = (y.sin() * y).sum()
    first = torch.autograd.grad(loss, [x, *given], create_graph=twice)
    if not twice:
        return [y, *first]
    return [y, *first, *torch.autograd.grad(sum((g * g).sum() for g in first), [x, *given])]


def operands(shape: tuple[int, ...], kernel: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(each, generator=generator) for each in (shape, kernel, kernel[:1])]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        ours = ours.full() if isinstance(ours, tessel.Tensor) else ours
        scale = theirs.detach().abs().max()
        torch.testing.assert_close(
            ours / scale, (theirs / scale).float(), rtol=1e-3, atol=1e-4, check_stride=False
        )


class Counted:
    """Counts the calls of a function while it is entered."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.count = owner, name, 0

    def __enter__(self) -> Counted:
        self.function = getattr(self.owner, self.name)

        def counted(*args: Any) -> Any:
            self.count += 1
            return self.function(*args)

        setattr(self.owner, self.name, counted)
        return self

    def __exit__(self, *_: Any) -> None:
        setattr(self.owner, self.name, self.function)


def compare(case: int, twice: bool) -> tuple[int, int]:
    """A volume in slabs, beside torch; how many parts oneDNN got, and how many were turned."""
    shape, kernel, settings = CASES[case]
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 1, 1])
    x, *weights = operands(shape, kernel)
    with (
        Counted(small_volumes.SmallConvolution, "_apply") as direct,
        Counted(small_volumes, "turned_back") as turned,
    ):
        found = derived(tessel.spread(x, P), *weights, settings, twice)
    exact = (each.double() for each in (x, *weights))
    assert_equal(found, derived(*exact, settings, twice))
    return direct.count, turned.count


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_they_give_what_torch_gives(run: Run, case: int, twice: bool) -> None:
    for direct, turned in run(compare, case, twice, nprocs=2, timeout=60):
        assert direct >= 1  # by oneDNN, also where the gradient is differentiated again
        assert bool(turned) == (twice and case < 2)


KERNEL, VOLUME = (4, 8, 3, 3, 3), (1, 8, 6, 24, 20)


def convolve(x: torch.Tensor, weight: Any, bias: Any, groups: int = 1) -> torch.Tensor | None:
    numbers = (1, 1, 1), (1, 1, 1), (1, 1, 1)
    return small_volumes.convolved(F.conv3d, x, weight, bias, numbers)


@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("channels", [1, 8])
def test_some_gradients(needs: tuple[int, ...], has_bias: bool, channels: int) -> None:
    shape = (1, channels, *VOLUME[2:-1], VOLUME[-1] * 8 // channels)
    given = operands(shape, (16, channels, *KERNEL[2:]))[: 3 if has_bias else 2]
    if not any(needs[: len(given)]):
        return
    found = []
    for function in (convolve, lambda *xs: F.conv3d(*xs, padding=1)):
        xs = [each.clone().requires_grad_(bool(need)) for each, need in zip(given, needs)]  # noqa: B905
        y: Any = function(*(*xs, None)[:3])
        y.relu_().square().sum().backward()
        found.append([y, *(each.grad for each in xs if each.requires_grad)])
        assert [each.grad is not None for each in xs] == [each.requires_grad for each in xs]
    assert_equal(*found)


def calls(act: Callable[..., Any], *xs: Any) -> int:
    with Counted(small_volumes.SmallConvolution, "_apply") as direct:
        act(*xs)
    return direct.count


def test_where_onednn_is_not_called() -> None:
    x, weight, bias = operands(VOLUME, KERNEL)
    assert calls(convolve, x, weight, bias) == 1
    few = operands((1, 2, 4, 4, 4), (2, 2, 3, 3, 3))
    assert calls(convolve, *few) == 0
    assert calls(convolve, x[:, :, :0], weight, bias) == 0
    assert calls(convolve, x.to(memory_format=torch.channels_last_3d), weight, bias) == 0

    def transformed(x: torch.Tensor) -> torch.Tensor:
        y = convolve(x, weight, bias)
        return x if y is None else y

    assert calls(torch.func.vmap(transformed), x[None]) == 0
    assert calls(torch.func.jvp, transformed, (x,), (x,)) == 0
    with torch.autocast("cpu"):
        assert calls(convolve, x, weight, bias) == 0
    with FlopCounterMode(display=False):  # which knows only torch's convolutions
        assert calls(convolve, x, weight, bias) == 0


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "length"), [(7, 3, 4, 8), (7, 2, 3, 7), (3, 2, 2, 4)]
)
def test_kernels_for_which_onednn_is_wrong(
    kernel: int, stride: int, padding: int, length: int
) -> None:
    """Torch's own way is right for one volume, and wrong for two, which oneDNN gets."""
    generator = torch.Generator().manual_seed(0)
    for order in ((0, 1, 2), (2, 0, 1)):  # also where dimensions would be turned
        lengths = small_volumes.in_order((length, 30, 30), order)
        taps = small_volumes.in_order((kernel, 3, 3), order)
        numbers: Any = [
            small_volumes.in_order(each, order)
            for each in ((stride, 1, 1), (padding, 1, 1), (1, 1, 1))
        ]
        x = torch.randn(1, 32, *lengths, generator=generator)
        weight = torch.randn(32, 32, *taps, generator=generator).requires_grad_()
        assert calls(small_volumes.convolved, F.conv3d, x, weight, None, numbers) == 0
        assert small_volumes.convolved(F.conv3d, x, weight, None, numbers) is None


def test_onednn_is_switched_off_before_the_backward_pass() -> None:
    x, weight, bias = operands(VOLUME, KERNEL)
    weight.requires_grad_()
    y: Any = convolve(x, weight, bias)
    with torch.backends.mkldnn.flags(enabled=False):
        y.sum().backward()
    found, weight.grad = weight.grad, None
    F.conv3d(x, weight, bias, padding=1).sum().backward()
    assert_equal([found], [weight.grad])


def test_other_memory_formats() -> None:
    x, weight, bias = operands(VOLUME, KERNEL)
    for each in (
        x.flip(2).mT,
        x.expand(1, 8, 6, 24, 20),
        x.to(memory_format=torch.channels_last_3d),
    ):
        y = convolve(each, weight.flip(0)[:, :, ::2], bias)
        expected = F.conv3d(each, weight.flip(0)[:, :, ::2], bias, padding=1)
        assert_equal([expected if y is None else y], [expected])


def test_no_gradient_is_wanted() -> None:
    x, weight, bias = operands(VOLUME, KERNEL)
    y: Any = convolve(x, weight, bias)
    assert not y.requires_grad
    weight.requires_grad_()
    with torch.no_grad():
        y = convolve(x, weight, bias)
    assert not y.requires_grad
    with torch.inference_mode():
        y = convolve(x, weight, bias)
    assert_equal([y], [F.conv3d(x, weight, bias, padding=1)])


def test_biases_in_any_memory() -> None:
    x, weight, bias = operands(VOLUME, KERNEL)
    for each in (bias.repeat_interleave(2)[::2], bias[1].expand(4), torch._neg_view(bias)):
        y: Any = convolve(x, weight, each)
        assert_equal([y], [F.conv3d(x, weight, each.clone(), padding=1)])


def by_torch(x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    return F.conv3d(x, weight, bias, padding=1)


@pytest.mark.parametrize("twice", [False, True])
def test_the_bias_is_changed_before_the_backward_pass(twice: bool) -> None:
    found = []
    for function in (convolve, by_torch):
        xs = [each.requires_grad_() for each in operands(VOLUME, KERNEL)]
        y: Any = function(*xs)
        with torch.no_grad():
            xs[2].add_(1)
        found.append(torch.autograd.grad(y.sum(), xs, create_graph=twice))
    assert_equal(*found)


def test_operands_depend_on_one_another_and_have_hooks() -> None:
    """A gradient that is differentiated again is that of each operand alone, and hooks get it."""
    found = []
    for function in (convolve, by_torch):
        xs = [each.requires_grad_() for each in operands(VOLUME, KERNEL)]
        x = xs[0] * xs[1].sum()
        given = [x, xs[1] * xs[2][0], xs[2]]
        for k, each in enumerate(given):
            each.register_hook(lambda grad, factor=k + 2: grad * factor)
        given[0].retain_grad()
        y: Any = function(*given)
        (y.sin() * y).sum().backward(create_graph=True, inputs=xs)
        first = [each.grad for each in (*xs, x)]
        second = torch.autograd.grad(sum((g * g).sum() for g in first[:3] if g is not None), xs)
        found.append([*first, *second])
    assert_equal(*found)


def test_autocast_is_on_in_the_backward_pass() -> None:
    found = []
    for function in (convolve, by_torch):
        xs = [each.requires_grad_() for each in operands(VOLUME, KERNEL)]
        y: Any = function(*xs)
        with torch.autocast("cpu"):
            found.append(torch.autograd.grad(y, xs, y.detach(), create_graph=True))
    assert_equal(*found)


def test_the_backward_pass_is_derived_in_forward_mode() -> None:
    found = []
    for function in (convolve, by_torch):
        xs = [each.requires_grad_() for each in operands(VOLUME, KERNEL)]
        y: Any = function(*xs)
        with forward_ad.dual_level():
            grads = torch.autograd.grad(y, xs, forward_ad.make_dual(y.detach(), y.detach().sin()))
            found.append([part for grad in grads for part in forward_ad.unpack_dual(grad)])
    assert_equal(*found)


class Tenfold(torch.Tensor):
    """A weight with convolutions of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = super().__torch_function__(func, types, args, kwargs or {})
        return 10 * y if func is F.conv3d else y


def test_a_weight_with_convolutions_of_its_own() -> None:
    x, weight, bias = operands(VOLUME, KERNEL)
    assert calls(convolve, x, weight.as_subclass(Tenfold), bias) == 0
    assert calls(convolve, x, weight, bias.as_subclass(Tenfold)) == 0
    assert calls(convolve, x, torch.nn.Parameter(weight), torch.nn.Parameter(bias)) == 1


def test_torch_says_what_is_wrong() -> None:
    x, weight, bias = operands(VOLUME, KERNEL)
    for wrong in (weight[:, :5], weight.repeat(1, 1, 20, 1, 1)):
        with pytest.raises(RuntimeError, match=r"size|channels"):
            y = convolve(x, wrong, bias)
            _ = F.conv3d(x, wrong, bias, padding=1) if y is None else y
