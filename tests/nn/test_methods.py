"""Methods of a converted model besides `forward`, and tensors that are made anew inside of it.

Tests `nn/convert.py`, `tensor/adoption.py`.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import tessel
from parity import values
from tessel import Layout, Partition

Run = Callable[..., list[Any]]
SHAPE = (2, 1, 9)


def in_space() -> Partition:
    return tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size])


def own_part(x: Tensor) -> Tensor:
    return Layout.balanced(in_space(), x.shape).local_part(x)


class Autoencoder(nn.Module):
    """Methods that call layers, that compute between them, and that call no layer at all."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, 4, 3, padding=1)
        self.decoder = nn.Conv1d(2, 1, 3, padding=1)
        self.temperature = 1.0

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.encoder(x).chunk(2, 1)

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.decoder(z))

    def features(self, x: Tensor) -> Tensor:
        y = self.encoder(x)
        return F.relu(y - y.mean(2, keepdim=True))

    def pooled(self, x: Tensor) -> Tensor:
        return self.features(x).mean(2)

    def functional(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return F.conv1d(x, self.encoder.weight, self.encoder.bias, padding=1).cumsum(2) * scale

    @staticmethod
    def standardized(x: Tensor) -> Tensor:
        return (x - x.mean()) / x.std()

    def set_temperature(self, value: Tensor) -> Tensor:
        self.temperature = float(value)
        return value * 2

    def forward(self, x: Tensor) -> Tensor:
        mean, _ = self.encode(x)
        return self.decode(mean)


class Derived(Autoencoder):
    """A subclass changes a method, and calls that of its parent."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + x.amax(2, keepdim=True)


CALLS = {
    "encode": (2, 1, 9),
    "decode": (2, 2, 9),
    "features": SHAPE,
    "pooled": SHAPE,
    "functional": SHAPE,
    "standardized": SHAPE,
    "forward": SHAPE,
}


def call_methods(kind: type[Autoencoder], is_spread: bool) -> None:
    torch.manual_seed(0)
    alone = kind().double()
    model = tessel.nn.distribute_module(copy.deepcopy(alone), in_space())
    for round_ in range(3):  # from the second call on gradients travel in buckets
        if round_ == 2:
            model = copy.deepcopy(model)
        for name, shape in CALLS.items():
            x = values(shape, 1)
            for each in (alone, model):
                each.zero_grad()
            expected = getattr(alone, name)(x)
            given = tessel.spread(x, in_space()) if is_spread else own_part(x)
            found = getattr(model, name)(given)
            several = isinstance(expected, tuple)
            pairs = list(zip(expected, found, strict=True)) if several else [(expected, found)]
            losses = []
            for wanted, got in pairs:
                weight = values(wanted.shape, 3)
                if isinstance(got, tessel.Tensor):
                    assert torch.allclose(got.full(), wanted, rtol=0, atol=1e-12), name
                    losses.append(((wanted * weight).sum(), (got * weight).sum()))
                else:
                    is_part = wanted.dim() == 3
                    assert torch.allclose(
                        got, own_part(wanted) if is_part else wanted, rtol=0, atol=1e-12
                    ), name
                    mine = own_part(weight) if is_part else weight
                    losses.append(((wanted * weight).sum(), (got * mine).sum()))
            if losses[0][0].requires_grad:
                for total in (sum(each) for each in zip(*losses, strict=True)):
                    total.backward()
            for (label, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), (name, label)
                assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12), name
    # without a tensor that could be a part a method is called as it is, by one worker alone, too
    if tessel.world().rank == 0:
        assert float(model.set_temperature(torch.tensor(0.5))) == 1.0
        assert model.temperature == 0.5


@pytest.mark.parametrize("is_spread", [False, True], ids=["parts", "spread"])
@pytest.mark.parametrize("kind", [Autoencoder, Derived])
def test_all_methods_are_those_of_one_process(
    run: Run, kind: type[Autoencoder], is_spread: bool
) -> None:
    run(call_methods, kind, is_spread, nprocs=2, timeout=60)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return (x + x.mean(2, keepdim=True)).cumsum(2)


def without_grad(y: Tensor) -> Tensor:
    with torch.no_grad():
        return scripted(y)


def through_file(y: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(y.detach(), file)
    file.seek(0)
    return torch.load(file, weights_only=False).cumsum(2)


def bypassed(y: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.cumsum(y, 2)


# what each makes of a part would be another number than what it makes of the whole
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "Parameter": lambda y: nn.Parameter(y).mean(2, keepdim=True) + y,
    "Parameter, detached": lambda y: nn.Parameter(y.detach(), False).cumsum(2),
    "as_subclass": lambda y: y.as_subclass(torch.Tensor).cumsum(2),
    "_make_subclass": lambda y: torch.Tensor._make_subclass(torch.Tensor, y).cumsum(2),
    "Tensor": lambda y: torch.Tensor(y.float()).cumsum(2),
    "DoubleTensor": lambda y: torch.DoubleTensor(y).cumsum(2),
    "tensor": lambda y: torch.tensor(y).cumsum(2),
    "as_tensor": lambda y: torch.as_tensor(y).cumsum(2),
    "asarray": lambda y: torch.asarray(y).cumsum(2),
    "new_tensor": lambda y: y.new_tensor(y).cumsum(2),
    "data": lambda y: y.data.cumsum(2),
    "detach, clone": lambda y: y.detach().clone().cumsum(2),
    "copy": lambda y: copy.copy(y.detach()).cumsum(2),
    "deepcopy": lambda y: copy.deepcopy(y.detach()).cumsum(2),
    "pickle": lambda y: pickle.loads(pickle.dumps(y.detach())).cumsum(2),
    "file": through_file,
    "scripted": scripted,
    "scripted, no_grad": without_grad,
    "aten": lambda y: torch.ops.aten.cumsum.default(y, 2),
    "bypassed": bypassed,
    "as_strided": lambda y: y.as_strided(y.shape, y.stride()).cumsum(2),
    "vmap": lambda y: torch.vmap(lambda row: row.cumsum(1))(y),
    "grad": lambda y: torch.func.grad(lambda z: (z.cumsum(2) ** 2).sum())(y),
    "lengths": lambda y: y.sum(2, keepdim=True) / y.numel() + y / y.shape[-1] * len(y),
    "branch": lambda y: y if y.detach().amax() > 100 else -y.cumsum(2),
    "copy_": lambda y: torch.empty(y.shape, dtype=y.dtype).copy_(y).cumsum(2),
}
RAISE: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": lambda y: torch.from_numpy(np.cumsum(y.detach().numpy(), 2)),
    "asarray of numpy": lambda y: torch.from_numpy(np.asarray(y.detach())).cumsum(2),
    "tolist": lambda y: torch.tensor(y.tolist()).cumsum(2),
    "from_dlpack": lambda y: torch.from_dlpack(y.detach()).cumsum(2),
    "to_dlpack": lambda y: torch.from_dlpack(torch.utils.dlpack.to_dlpack(y.detach())).cumsum(2),
    "set_": lambda y: torch.empty(0, dtype=y.dtype).set_(y.detach()).cumsum(2),
    "storage": lambda y: torch.empty(0, dtype=y.dtype).set_(y.detach().untyped_storage()),
    "share_memory_": lambda y: y.detach().share_memory_().cumsum(2),
    "out": lambda y: torch.cumsum(y.detach(), 2, out=torch.empty(y.shape, dtype=y.dtype)),
    "apply_": lambda y: y.detach().clone().apply_(lambda value: value + 1).cumsum(2),
}


class Within(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return {**RIGHT, **RAISE}[self.name](self.conv(x))


def make_anew(with_grad: bool) -> None:
    for name in RIGHT:
        torch.manual_seed(0)
        alone = Within(name).double()
        model = tessel.nn.distribute_module(copy.deepcopy(alone), in_space())
        x = values(SHAPE, 1)
        with torch.set_grad_enabled(with_grad):
            expected, found = alone(x), model(own_part(x))
        tolerance = 1e-6 if expected.dtype == torch.float32 else 1e-12  # torch.Tensor is float32
        assert torch.allclose(found, own_part(expected), rtol=0, atol=tolerance), name
        if name != "asarray":  # older versions of torch forget where its argument comes from
            assert found.requires_grad == expected.requires_grad, name
        if expected.requires_grad:
            weight = values(expected.shape, 3).to(expected.dtype)
            (expected * weight).sum().backward()
            (found * own_part(weight)).sum().backward()
            for p, q in zip(alone.parameters(), model.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), name
                assert p.grad is None or torch.allclose(p.grad, q.grad, atol=tolerance), name


def cannot_make_anew() -> dict[str, str]:
    found = {}
    for name in RAISE:
        model = tessel.nn.distribute_module(Within(name).double(), in_space())
        try:
            model(own_part(values(SHAPE, 1)))
        except (ValueError, NotImplementedError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("with_grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.filterwarnings("ignore")
def test_what_is_made_anew_stands_for_the_whole(run: Run, with_grad: bool) -> None:
    run(make_anew, with_grad, nprocs=2, timeout=100)


def test_what_would_see_the_part_alone_raises(run: Run) -> None:
    first, second = run(cannot_make_anew, nprocs=2, timeout=60)
    assert first == second
    assert list(first) == list(RAISE)


class IntoPlain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.empty(y.shape, dtype=y.dtype).copy_(y).cumsum(2)


def copy_into_plain() -> None:
    """A tensor that the model makes is whole on every worker, with the gradients of one process."""
    torch.manual_seed(0)
    alone = IntoPlain().double()
    model = tessel.nn.distribute_module(copy.deepcopy(alone), in_space())
    x = values(SHAPE, 1)
    expected, found = alone(x), model(tessel.spread(x, in_space()))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    expected.square().sum().backward()
    found.square().sum().backward()
    for p, q in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad)


@pytest.mark.filterwarnings("ignore")
def test_what_is_put_into_a_plain_tensor_is_whole(run: Run) -> None:
    run(copy_into_plain, nprocs=2, timeout=100)
