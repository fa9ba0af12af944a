"""What users do with a model of another package around its conversion: its numbers remain.

Every entry goes through every use, split once, and is compared with one process. Models are in
evaluation mode, in which few draw random numbers, and have gradients all the same.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import checkpoint

import tessel
from entries import Grid, UsesResult, ZooEntry, all_entries, entries_of, floating, made_in_double
from tessel.nn import convert
from tessel.tensor.shared_random import common_seed
from tessel.testing.drawing import drawing

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.zoo


class AloneError(Exception):
    """One process cannot do it, either."""


SEED = common_seed(7)  # of all calls, of one process and of converted models


class Used:
    """A model alone and a converted one, and what each is called with.

    Only the first worker has the model alone, which would cost all of them the same time.
    """

    def __init__(self, entry: ZooEntry, grid: Grid, model: nn.Module, device: str) -> None:
        self.entry, self.device = entry, device
        self.model = model.train(entry.uses_in_training).to(device)
        self.grid = tessel.world().create_cartesian_topology_partition(grid)
        self.is_first = self.grid.rank == self.grid.ranks[0]
        self.inputs = tree_map_only(Tensor, lambda each: each.to(device), entry.inputs())
        spread = entry.spread or (lambda inputs, P: tree_map(self.part, inputs))
        self.parts = spread(self.inputs, self.grid)
        if entry.draws:  # the numbers that spread tensors draw
            self.inputs = tree_map(as_drawing, self.inputs)
        self.noted = self.alone(lambda: Noted(self, self.made(), self.inputs))

    def part(self, value: Any) -> Any:
        is_split = isinstance(value, Tensor) and value.dim() == self.grid.dim
        return tessel.spread(value, self.grid) if is_split else value

    def made(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def converted(self, model: nn.Module | None = None) -> Any:
        return tessel.nn.distribute_module(self.made() if model is None else model, self.grid)

    def alone(self, perform: Callable[[], Any]) -> Any:
        """What one process finds, on the first worker; if it raises, all do."""
        found, said = None, ""
        if self.is_first:
            try:
                found = perform()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
        (said, *_) = self.grid.group.share_objects(said)
        if said:
            raise AloneError(said)
        return found

    def called(self, model: Any, inputs: Any) -> list[Tensor]:
        """All numbers that a model gives."""
        torch.manual_seed(SEED)
        method = model if self.entry.method == "forward" else getattr(model, self.entry.method)
        found = method(**inputs) if isinstance(inputs, dict) else method(*inputs)
        return list(numbers_in(found))

    def loss(self, model: Any, inputs: Any) -> Tensor:
        """The sum of the squares of what a model gives."""
        return total(self.called(model, inputs))

    def assert_same(self, spread: Any) -> None:
        """Outputs are those of one process."""
        with torch.no_grad():
            got = self.called(spread, self.parts)
        self.close(self.noted and dict(enumerate(self.noted.outputs)), dict(enumerate(got)))

    def close(
        self, one: dict[Any, Tensor] | None, other: dict[Any, Any], factor: float = 1
    ) -> None:
        """Equal, relative to the largest value of each; nothing is below 1e-4 of the largest.

        Some gradients are zero, but for rounding, as those of biases of keys.
        """
        wholes = {
            name: whole(other[name]) for name in sorted(other, key=str)
        }  # all workers take part
        if one is None:
            return
        assert one.keys() == wholes.keys() and len(one) > 0
        sizes = {
            name: float(each.detach().abs().max()) for name, each in one.items() if each.numel()
        }
        largest = max(sizes.values())
        for name, size in sizes.items():
            assert one[name].shape == wholes[name].shape, name
            error = float((one[name].detach() - wholes[name]).abs().max())
            error /= max(size, 1e-4 * largest, 1e-30)
            assert error <= factor * self.entry.tolerance, f"{name}: {error:.1e}"

    def blocks(self) -> dict[str, int]:
        """Inner modules with parameters that are called, and of how many modules each consists.

        A model that has none, as a single layer, stands for itself.
        """
        names = self.noted.called if self.noted else None
        (names, *_) = self.grid.group.share_objects(names)
        sizes = {name: len([*self.model.get_submodule(name).modules()]) for name in names}
        return dict(sorted(sizes.items(), key=lambda pair: pair[1]))


class Noted:
    """What hooks of all modules see in a forward and a backward pass, and what comes of it."""

    def __init__(self, used: Used, model: nn.Module, inputs: Any) -> None:
        self.calls: list[Any] = []
        self.output_gradients: dict[str, Tensor] = {}
        handles = []
        for name, module in model.named_modules():
            handles += [
                module.register_forward_pre_hook(partial(self.before, name)),
                module.register_forward_hook(partial(self.after, name)),
            ]
        self.outputs = used.called(model, inputs)
        total(self.outputs).backward()
        for handle in handles:
            handle.remove()
        self.gradients = gradients(model)
        own = {name for name, p in model.named_parameters()}
        counts = [each[1] for each in self.calls if each[0] == "after"]
        self.called = [
            name
            for name in dict.fromkeys(counts)
            if name and any(each.startswith(f"{name}.") for each in own)
        ] or [""]

    def before(self, name: str, module: nn.Module, args: Any) -> None:
        self.calls.append(("before", name, forms(args)))

    def after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.calls.append(("after", name, forms(output)))
        for position, each in enumerate(tree_leaves(output)):
            if isinstance(each, Tensor) and each.requires_grad:
                place = f"{name} {self.calls.count(self.calls[-1])} {position}"
                each.register_hook(partial(self.output_gradients.__setitem__, place))


def forms(values: Any) -> list[tuple[Any, ...]]:
    """Shapes and dtypes of tensors: of parts, they would be others."""
    return [(*x.shape, x.dtype) for x in tree_leaves(values) if isinstance(x, Tensor)]


def as_drawing(value: Any) -> Any:
    return drawing(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def numbers_in(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        if found.is_floating_point():
            yield found
    elif isinstance(found, (tuple, list)):
        for each in found:
            yield from numbers_in(each)
    elif hasattr(found, "keys"):
        yield from numbers_in([found[key] for key in found.keys()])  # noqa: SIM118 of others' classes
    elif hasattr(found, "__dict__"):
        yield from numbers_in([*vars(found).values()])


def total(outputs: Iterable[Tensor]) -> Tensor:
    return torch.stack([x.square().sum() for x in outputs]).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def whole(x: Any) -> Tensor:
    return (x.full() if isinstance(x, tessel.Tensor) else x).detach()


def state(used: Used) -> None:
    """States go through a file, from a converted model to a plain one and back."""
    spread, file = used.converted(), io.BytesIO()
    expected = used.model.state_dict()
    torch.save(spread.state_dict(), file)
    read = torch.load(io.BytesIO(file.getvalue()), weights_only=False)  # neuralop's has functions
    plain = nulled(used.made())
    assert not any(plain.load_state_dict(read))
    assert [*expected] == [*plain.state_dict()] == [*spread.state_dict()]
    for name, each in plain.state_dict().items():
        if isinstance(each, Tensor):
            assert type(each) is Tensor and torch.equal(each, expected[name]), name
    assert not any(nulled(spread).load_state_dict(plain.state_dict()))
    used.assert_same(spread)


def nulled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    return model


def copied(used: Used) -> None:
    """A copy that went through pickle, while the first one is changed."""
    used.alone(lambda: pickle.dumps(used.made()))
    spread = used.converted()
    again = pickle.loads(pickle.dumps(copy.deepcopy(spread)))
    nulled(spread)
    used.assert_same(again)


def hooked(used: Used) -> None:
    """Hooks see all modules in the same order, shapes of the whole, and gradients of outputs."""
    seen = Noted(used, used.converted(), used.parts)
    expected = used.noted
    assert len(seen.calls) > 1
    assert expected is None or expected.calls == seen.calls
    # Torch itself forgets hooks of views that are changed in place, as of instance norm.
    names = [*expected.output_gradients] if expected is not None else None
    (names, *_) = used.grid.group.share_objects(names)
    used.close(
        expected and expected.output_gradients,
        {name: seen.output_gradients[name] for name in names},
        10,
    )
    used.close(expected and expected.gradients, seen.gradients)


def recomputed(used: Used) -> None:
    """The whole model is a lambda whose values are computed again in the backward pass."""
    spread = used.converted()
    outputs = checkpoint(lambda parts: used.called(spread, parts), used.parts, use_reentrant=False)
    total(outputs).backward()
    used.close(used.noted and used.noted.gradients, gradients(spread))


class Recomputed(nn.Module):
    """A module in the place of another one, whose values it computes again."""

    def __init__(self, inner: nn.Module, as_module: bool) -> None:
        super().__init__()
        self.inner, self.as_module, self.calls = inner, as_module, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1

        def function(*args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

        chosen = self.inner if self.as_module else function
        return checkpoint(chosen, *args, use_reentrant=False, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the model reads of the module itself, as its weight."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def recomputed_inside(used: Used) -> None:
    """So are a module of the model, and a function that calls another one."""
    got = pieces_recomputed(used, used.converted(), used.parts)
    used.close(used.noted and used.noted.gradients, got)


def pieces_recomputed(used: Used, spread: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The gradients of all parameters."""
    named = dict(spread.named_parameters())
    sizes = used.blocks()
    of_several = [name for name, size in sizes.items() if size > 1] or [*sizes]
    chosen = [of_several[len(of_several) // 2]]
    chosen += [name for name in sizes if are_apart(name, chosen[0])][-1:]
    wrapped = [Recomputed(spread.get_submodule(n), as_module=k == 0) for k, n in enumerate(chosen)]
    for name, each in zip(chosen, wrapped, strict=True):
        parent, _, last = name.rpartition(".")
        if name:
            setattr(spread.get_submodule(parent), last, each)
        else:
            spread = each
    used.loss(spread, inputs).backward()
    assert any(each.calls > 0 for each in wrapped), chosen
    return {name: p.grad for name, p in named.items() if p.grad is not None}


def are_apart(name: str, other: str) -> bool:
    """Whether neither is in the other."""
    return not (f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."))


def averaged(used: Used) -> None:
    """An average that is made before training is used after it."""
    spread = used.converted()
    average = AveragedModel(spread, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(spread)
    nulled(spread)
    used.assert_same(average.module)


def compiled_inside(used: Used) -> None:
    """The smallest module with parameters, and the smallest block of several."""
    spread = used.converted()
    sizes = used.blocks()
    smallest = next(iter(sizes))
    chosen = {smallest, next((name for name, size in sizes.items() if size > 1), smallest)}
    compiled = {name: spread.get_submodule(name) for name in chosen}
    ran: list[str] = []
    for name, each in compiled.items():
        each.compile(backend="eager")
        own = each._compiled_call_impl

        def call(*args: Any, name: str = name, own: Any = own, **kwargs: Any) -> Any:
            ran.append(name)
            return own(*args, **kwargs)

        each._compiled_call_impl = call
    torch._dynamo.utils.counters.clear()
    used.assert_same(spread)
    frames = torch._dynamo.utils.counters["frames"]
    assert {*ran} == chosen and frames["total"] > 0, (ran, frames)


@cache
def torch_convolves_rightly() -> bool:
    """Whether torch's convolutions of few values in bfloat16 are finite whatever is in free memory.

    On some processors the gradient of a weight reads memory that nothing was written to.
    """
    right = True
    for _ in range(50):
        for kind in (torch.bfloat16, torch.float32):
            junk = [torch.full((2**k,), math.nan, dtype=kind) for k in range(6, 18)]
            del junk
        for size, depth, length in ((32, 2, 1), (64, 2, 2), (32, 1, 4), (64, 1, 2)):
            x = torch.ones(1, size, depth, length, length, dtype=torch.bfloat16)
            weight = torch.ones(size, size, 3, 1, 1, dtype=torch.bfloat16, requires_grad=True)
            y = torch.nn.functional.conv3d(x, weight, padding=(1, 0, 0))
            (grad,) = torch.autograd.grad(y.float().sum(), weight)
            right = right and bool(y.isfinite().all() and grad.isfinite().all())
    return right


def in_halves(used: Used) -> None:
    """Autocast and a scaled loss: the same dtypes, and no more rounding than in one process."""
    alone = used.alone(lambda: halved(used, used.made(), used.inputs))
    spread = halved(used, used.converted(singled(used.made())), used.parts)
    outputs, of_parameters = ({n: whole(x) for n, x in each.items()} for each in spread)
    if alone is None or used.noted is None:
        return
    exact = dict(enumerate(used.noted.outputs)), used.noted.gradients
    for true, one, other in zip(exact, alone, (outputs, of_parameters), strict=True):
        assert one.keys() == other.keys() and len(one) > 0
        largest = max(float(each.detach().abs().max()) for each in true.values() if each.numel())
        errors = []
        for name, each in one.items():
            assert each.dtype == other[name].dtype, name
            found, known = other[name].to(true[name].dtype), each.to(true[name].dtype)
            are_finite = known.isfinite().all() and found.isfinite().all()
            if not are_finite and not torch_convolves_rightly():
                continue
            assert are_finite, name
            scale = float(true[name].detach().norm()) + 1e-2 * largest
            ours, theirs = (float((x - true[name]).norm()) / scale for x in (found, known))
            assert ours <= 3 * theirs + 0.15, f"{name}: {ours:.1e}, {theirs:.1e} in one process"
            errors.append((ours, theirs))
        # rounding is another one for each tensor, but not for all of them together
        means = [sum(x * x for x in column) ** 0.5 for column in zip(*errors, strict=True)]
        assert not means or means[0] <= 2.5 * means[1] + 0.01 * len(errors) ** 0.5, means


def halved(
    used: Used, model: nn.Module, inputs: Any
) -> tuple[dict[Any, Tensor], dict[str, Tensor]]:
    """Outputs and gradients of a model in single precision under autocast."""
    with floating(torch.float32):
        model, scaler = singled(model), torch.amp.GradScaler(used.device, init_scale=64.0)
        # torch's scaler does not take complex gradients on a CPU
        real, others = (
            [p for p in model.parameters() if p.is_complex() is k] for k in (False, True)
        )
        optimizer = torch.optim.SGD(real, lr=1.0)
        with torch.autocast(used.device, torch.bfloat16):
            outputs = used.called(model, tree_map(single, inputs))
        scaler.scale(total(x.float() for x in outputs)).backward()
        scaler.unscale_(optimizer)
        for each in others:
            if each.grad is not None:
                each.grad /= scaler.get_scale()
    return {k: x.detach() for k, x in enumerate(outputs)}, gradients(model)


def singled(model: nn.Module) -> nn.Module:
    """In single precision; `float()` leaves complex numbers as they are."""
    for each in (*model.parameters(), *model.buffers()):
        if each.is_complex():
            each.data = each.data.to(torch.complex64)
    return model.float()


def single(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def trained(used: Used) -> None:
    """Gradients of two passes are added up and clipped, and a scheduler sets the second step."""
    one = used.alone(lambda: learned(used, used.made(), used.inputs))
    other = learned(used, used.converted(), used.parts)
    used.close(one, other, 1e2)  # clipping divides by a norm of large numbers


def learned(used: Used, model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """What two steps change in each parameter, and the norms of gradients."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    norms = []
    for passes in (2, 1):
        optimizer.zero_grad()
        for _ in range(passes):
            used.loss(model, inputs).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        scheduler.step()
    changes = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    return {**changes, **{f"norm {k}": each for k, each in enumerate(norms)}}


USES = (
    *(state, copied, hooked, recomputed, recomputed_inside, averaged, compiled_inside),
    *(in_halves, trained),
)


def check_uses(package: str, name: str, grid: Grid, device: str = "cpu") -> UsesResult:
    """What each use of an entry comes to; on all workers."""
    (entry,) = (each for each in entries_of(package) if each.name == name)
    result = UsesResult(package, name, "×".join(map(str, grid)))
    begin = time.process_time()
    model = made_in_double(entry)
    # otherwise a converted model has another seed in each call
    seeding = patch.object(convert, "common_seed", lambda _: SEED)
    with floating(torch.float64), warnings.catch_warnings(), seeding:
        warnings.simplefilter("ignore")
        used = Used(entry, grid, model, device)
        for use in USES:
            start = time.process_time()
            try:
                use(used)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                said = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
                result.failed[use.__name__] = said
            result.times[use.__name__] = time.process_time() - start
    torch.compiler.reset()
    result.seconds = time.process_time() - begin
    return result


def grid_of(entry: ZooEntry) -> Grid:
    """One of two workers, or else the smallest."""
    return min((grid for grid, _ in entry.splits()), key=lambda grid: (prod(grid) != 2, prod(grid)))


def cases() -> Iterator[Any]:
    for entry in all_entries():
        if not entry.raises:
            grid, limit = grid_of(entry), pytest.mark.limit(entry.limit + 30)
            case = f"{entry.package}: {entry.name}"
            yield pytest.param(entry, grid, prod(grid), id=case, marks=limit)


@pytest.mark.parametrize(("entry", "grid", "nprocs"), list(cases()))
def test_uses_of_a_model(run: Run, entry: ZooEntry, grid: Grid, nprocs: int) -> None:
    pytest.importorskip(entry.package, reason=f"{entry.package} is not installed: make zoo")
    found = run(check_uses, entry.package, entry.name, grid, nprocs=nprocs, timeout=entry.limit)
    result = found[0]
    result.unsupported = dict(entry.unsupported)
    for each in found[1:]:
        result.failed = {**each.failed, **result.failed}
    result.save()
    failed = {use: said for use, said in result.failed.items() if use not in entry.unsupported}
    assert not failed, failed
    assert {*entry.unsupported} <= {*result.failed}, "listed as unsupported, but works"
    for use, reason in entry.unsupported.items():
        assert reason.partition(":")[0] in result.failed[use], result.failed[use]
