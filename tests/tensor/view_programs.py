"""Random programs of views, changes in place and reads: the same on plain and on spread tensors.

A program is drawn while it runs on plain tensors. Then spread tensors do what it says; a step that
raises there is left out on the plain ones, too. So what a step that raised has changed shows.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import tessel
from parity import values
from programs import layout_of, reshaped

Held = dict[int, Any]  # the tensors of a program, by their numbers
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Step:
    """One line of a program.

    Args:
        text: the line.
        does: gives the new tensor of the step, if it makes one.
        reads: the numbers of its tensors.
        makes: the number of the new one.
        records: whether autograd sees it.
    """

    text: str
    does: Callable[..., Any]
    reads: tuple[int, ...]
    makes: int | None = None
    records: bool = True

    def run(self, held: Held) -> None:
        with nullcontext() if self.records else torch.no_grad():
            result = self.does(*[held[k] for k in self.reads])
        if self.makes is not None:
            held[self.makes] = result


def key_of(draw: random.Random, shape: tuple[int, ...]) -> Key:
    """Slices, numbers, as tensors, too, and new dimensions."""
    key: list[Any] = []
    for n in shape:
        start = draw.randrange(n + 1)
        stop = draw.randrange(start, n + 1)
        choices: list[Any] = [slice(None)] * 4 + [slice(start, stop), slice(start, None)]
        choices += [slice(None, stop), slice(start % 2, None, 2)]
        if n:
            choices += [draw.randrange(n), -1 - draw.randrange(n), torch.tensor(draw.randrange(n))]
        key.append(draw.choice(choices))
    while len(key) > 1 and key[-1] == slice(None) and draw.random() < 0.5:
        key.pop()
    if draw.random() < 0.1:
        key.insert(draw.randrange(len(key) + 1), None)
    return tuple(key)


def view(draw: random.Random, x: Tensor, reshapes: bool) -> tuple[str, Callable[[Any], Any]]:
    """What torch has as a view, or as the tensor itself."""
    D, shape = x.dim(), tuple(x.shape)
    dim, other = (draw.randrange(-D, D) for _ in range(2)) if D else (0, 0)
    n = shape[dim] if D else 0
    start = draw.randrange(n + 1)
    length = draw.randrange(n - start + 1)
    key, order, new = key_of(draw, shape), draw.sample(range(D), D), reshaped(draw, shape)
    views: dict[str, Any] = {
        f"[{key}]": lambda x: x[key],
        f"[{key}] ": lambda x: x[key],
        f".reshape({new})": lambda x: x.reshape(new),
        f".view({new})": lambda x: x.view(new),
        f".permute({order})": lambda x: x.permute(order),
        ".flatten()": lambda x: x.flatten(),
        ".squeeze()": lambda x: x.squeeze(),
        ".detach()": lambda x: x.detach(),
        ".data": lambda x: x.data,
        ".contiguous()": lambda x: x.contiguous(),
        ".double()": lambda x: x.double(),
        ".to(float64)": lambda x: x.to(torch.float64),
        ".real": lambda x: x.real,
        ".conj()": lambda x: x.conj(),
        ".resolve_conj()": lambda x: x.resolve_conj(),
        ".cpu()": lambda x: x.cpu(),
        ".view_as(self)": lambda x: x.view_as(x),
        ".ravel()": lambda x: x.ravel(),
        "dropout": lambda x: F.dropout(x, 0.5, training=False),
        ".clone()": lambda x: x.clone(),
        "* 2": lambda x: x * 2,
    }
    if D < 4:
        views |= {
            f".unsqueeze({dim})": lambda x: x.unsqueeze(dim),
            f".expand(2, *{shape})": lambda x: x.expand(2, *shape),
        }
    if D:
        views |= {
            f".transpose({dim}, {other})": lambda x: x.transpose(dim, other),
            f".movedim({dim}, {other})": lambda x: x.movedim(dim, other),
            f".narrow({dim}, {start}, {length})": lambda x: x.narrow(dim, start, length),
            f".chunk(2, {dim})[-1]": lambda x: x.chunk(2, dim)[-1],
            f".split(2, {dim})[0]": lambda x: x.split(2, dim)[0],
            f".tensor_split(3, {dim})[1]": lambda x: x.tensor_split(3, dim)[1],
            f".unflatten({dim}, (1, -1))": lambda x: x.unflatten(dim, (1, -1)),
        }
        if n:
            views |= {
                f".select({dim}, {start % n})": lambda x: x.select(dim, start % n),
                f".unbind({dim})[-1]": lambda x: x.unbind(dim)[-1],
            }
        if n > 1 and D < 4:
            views[f".unfold({dim}, 2, 1)"] = lambda x: x.unfold(dim, 2, 1)
    if D == 2:
        views[".T"] = lambda x: x.T
    if D > 1:
        views[".mT"] = lambda x: x.mT
        views[".diagonal()"] = lambda x: x.diagonal(0, -2, -1)
    # `contiguous` may give the tensor itself, which gets another shape where that is changed
    names = [name for name in sorted(views) if not reshapes or name != ".contiguous()"]
    name = draw.choice(names)
    return name, views[name]


def change(draw: random.Random, x: Tensor, reshapes: bool) -> tuple[str, Callable[[Any], Any]]:
    """What torch does in place."""
    D, shape = x.dim(), tuple(x.shape)
    dim, other = (draw.randrange(-D, D) for _ in range(2)) if D else (0, 0)
    n = shape[dim] if D else 0
    table, seed, number = values(shape, draw.randrange(99)), draw.randrange(99), draw.randrange(9)
    mask, key = table > 0, key_of(draw, shape)
    region = values(tuple(torch.empty(shape)[key].shape), seed)
    rows = torch.tensor([draw.randrange(n) for _ in range(3)]) if n else None

    def set_item(x: Any, key: Any, value: Any) -> None:
        x[key] = value

    def add_item(x: Any, key: Any, value: Any) -> None:
        x[key] += value

    def mul_item(x: Any, key: Any, value: Any) -> None:
        x[key] *= value

    def add(x: Any, value: Any) -> None:
        x += value

    changes: dict[str, Any] = {
        ".add_(number)": lambda x: x.add_(number),
        ".mul_(number)": lambda x: x.mul_(0.5),
        ".add_(table)": lambda x: x.add_(table),
        ".mul_(table)": lambda x: x.mul_(table),
        " += table": lambda x: add(x, table),
        ".copy_(table)": lambda x: x.copy_(table),
        ".fill_(number)": lambda x: x.fill_(number),
        ".zero_()": lambda x: x.zero_(),
        ".clamp_()": lambda x: x.clamp_(-0.5, 0.5),
        ".tanh_()": lambda x: x.tanh_(),
        "relu": lambda x: F.relu(x, inplace=True),
        ".masked_fill_(mask)": lambda x: x.masked_fill_(mask, 0.25),
        f"[{key}] = number": lambda x: set_item(x, key, number),
        f"[{key}] = region": lambda x: set_item(x, key, region),
        f"[{key}] = region ": lambda x: set_item(x, key, region),
        f"[{key}] += region": lambda x: add_item(x, key, region),
        f"[{key}] += region ": lambda x: add_item(x, key, region),
        f"[{key}] *= region": lambda x: mul_item(x, key, region),
        f"[{key}] = own": lambda x: set_item(x, key, x[key].clone() * 2),
        f"[{key}].mul_()": lambda x: [x[key].mul_(0.5)],
        f"[{key}].zero_()": lambda x: [x[key].zero_()],
        "[mask] = number": lambda x: set_item(x, mask, number),
        "[mask] += number": lambda x: add_item(x, mask, number),
        "out": lambda x: torch.add(table, 1, out=x),
        "out of itself": lambda x: torch.mul(x, 2, out=x),
        ".data.add_()": lambda x: [x.data.add_(1)],
        ".detach().mul_()": lambda x: [x.detach().mul_(2)],
    }
    if D and reshapes:
        changes |= {
            f".transpose_({dim}, {other})": lambda x: [x.transpose_(dim, other)],
            ".squeeze_()": lambda x: [x.squeeze_()],
            f".unsqueeze_({dim})": lambda x: [x.unsqueeze_(dim)],
        }
    if D:
        changes |= {
            f".cumsum_({dim})": lambda x: x.cumsum_(dim),
            "own rows": lambda x: set_item(x, slice(1, None), x[:-1].clone()),
            "overlap": lambda x: [x[..., :1].copy_(x[..., -1:].clone())],
        }
    if rows is not None:
        lengths = tuple(3 if d == dim % D else m for d, m in enumerate(shape))
        some = values(lengths, seed)
        along = (*[slice(None)] * (dim % D), rows)
        changes |= {
            f".index_put_({rows})": lambda x: x.index_put_((rows % x.size(0),), x.new_tensor(1.5)),
            f".index_put_({rows}, add)": lambda x: x.index_put_(
                (rows % x.size(0),), x.new_tensor(1.5), accumulate=True
            ),
            f".index_fill_({dim}, {rows})": lambda x: x.index_fill_(dim, rows, 0.5),
            f".index_add_({dim}, {rows})": lambda x: x.index_add_(dim, rows, some),
            f"[{along}] = some": lambda x: set_item(x, along, 0.75),
            f"[{along}] += some": lambda x: add_item(x, along, 1.25),
            f".scatter_({dim})": lambda x: x.scatter_(
                dim, torch.zeros(lengths, dtype=torch.int64), 0.5
            ),
        }
    name = draw.choice(sorted(changes))
    return name, changes[name]


def between(draw: random.Random, x: Tensor, y: Tensor) -> tuple[str, Callable[[Any, Any], Any]]:
    """A change of one tensor by another."""
    key = key_of(draw, tuple(x.shape))

    def set_item(x: Any, y: Any) -> None:
        x[key] = y

    def add_item(x: Any, y: Any) -> None:
        x[key] += y

    changes: dict[str, Any] = {
        ".copy_(other)": lambda x, y: x.copy_(y),
        ".add_(other)": lambda x, y: x.add_(y),
        ".mul_(other)": lambda x, y: x.mul_(y),
        "[:] = other": lambda x, y: x.__setitem__(slice(None), y),
        f"[{key}] = other": set_item,
        f"[{key}] += other": add_item,
        "out other": lambda x, y: torch.sub(y, 1, out=x),
        ".masked_fill_(other > 0)": lambda x, y: x.masked_fill_(y > 0, 0.25),
        "[other > 0] = number": lambda x, y: x.__setitem__(y > 0, 0.25),
    }
    name = draw.choice(sorted(changes))
    return name, changes[name]


def overlaps(x: Tensor) -> bool:
    """Whether several indices share memory, as those of windows do."""
    places = torch.arange(x.untyped_storage().nbytes() // x.element_size())
    found = places.as_strided(x.shape, x.stride(), x.storage_offset())
    return len(found.unique()) < found.numel()


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether torch may read what it has just written, if it changes one by the other."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


@dataclass
class Program:
    """What is drawn from a seed.

    Args:
        seed: of all that is random.
    """

    seed: int
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = draw = random.Random(self.seed)
        self.shape = tuple(draw.choice((1, 2, 3, 4, 5)) for _ in range(draw.randrange(1, 4)))
        self.layout = layout_of(draw, self.shape, tessel.world().size)
        self.needs_grad, self.records = draw.random() < 0.7, draw.random() < 0.7
        self.reshapes = draw.random() < 0.3
        self.kept = draw.random() < 0.2  # the leaf itself is changed
        held = self.begin(values(self.shape, self.seed % 97))
        for _ in range(draw.randrange(10, 31)):
            step = self._drawn(held)
            try:
                step.run(held)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue  # torch's own error
            if all(each.numel() < 200 for each in held.values()):
                self.steps.append(step)
            elif step.makes is not None:
                del held[step.makes]

    def begin(self, x: Any) -> Held:
        """The first tensors."""
        if self.kept:
            return {0: x}
        x.requires_grad_(self.needs_grad)
        return {-1: x, 0: x * x * 0.5}

    def _drawn(self, held: Held) -> Step:
        draw = self.draw
        numbers = [k for k in held if k >= 0]
        at = draw.choice(numbers)
        records = self.records and draw.random() < 0.8
        kind = draw.random()
        # what torch does to indices that share memory depends on its kernels
        if kind < 0.42 or overlaps(held[at]):
            text, does = view(draw, held[at], self.reshapes)
            new = max(numbers) + 1
            return Step(f"t{new} = t{at}{text}", does, (at,), new, self.records)
        if kind < 0.82:
            text, does = change(draw, held[at], self.reshapes)
            return Step(f"t{at}{text}", does, (at,), None, records)
        other = draw.choice(numbers)
        if kind < 0.95 and (other == at or not share_memory(held[at], held[other])):
            two, change_by = between(draw, held[at], held[other])
            return Step(f"t{at}{two} by t{other}", change_by, (at, other), None, records)
        return Step(f"read t{at}", lambda x: x.sum(), (at,), max(numbers) + 1, self.records)


def run_program(seed: int) -> tuple[str, list[str]]:
    """What is wrong with a program, or nothing; and all that spread tensors raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = Program(seed)
        raised: list[str] = []
        leaf = values(program.shape, seed % 97)
        ours = program.begin(spread := tessel.spread(leaf.clone(), program.layout))
        theirs = program.begin(leaf)
        said = [f"{program.shape} in {program.layout}, grad {program.needs_grad}"]
        for step in program.steps:
            if not all(each in ours for each in step.reads):
                continue
            said.append(("" if step.records else "no_grad ") + step.text)
            try:
                step.run(ours)
            except (NotImplementedError, ValueError, RuntimeError, IndexError) as error:
                raised.append(f"{step.text}: {type(error).__name__}: {error}")
                said[-1] += "  # raised"
                continue
            try:
                step.run(theirs)
            except (RuntimeError, IndexError) as error:
                raised.append(f"{step.text}: only torch: {error}")
                break
            for number, mine in ours.items():
                wrong = compared(mine, theirs[number])
                if wrong:
                    return f"{seed}: t{number} is {wrong}\n  " + "\n  ".join(said), raised
        wrong = gradients(ours, theirs, spread, leaf, raised) if program.records else ""
        return (f"{seed}: {wrong}\n  " + "\n  ".join(said) if wrong else ""), raised


def compared(mine: Any, theirs: Tensor) -> str:
    """How a spread tensor, or a plain one, differs; nothing if it says that it has no values."""
    if not isinstance(theirs, Tensor):
        return ""
    if tuple(mine.shape) != tuple(theirs.shape):
        return f"of shape {tuple(mine.shape)}, not {tuple(theirs.shape)}"
    with torch.no_grad():
        try:
            found = mine.detach().full() if isinstance(mine, tessel.Tensor) else mine.detach()
            expected = theirs.clone()
        except (ValueError, RuntimeError):  # torch does not let outputs of `unbind` be read
            return ""
    same = torch.allclose(found, expected, 1e-9, 1e-9, equal_nan=True)
    return "" if same else f"{found}, not {expected}"


def needs_grad(x: Any) -> bool | None:
    """Whether a tensor needs a gradient; None if it has no values."""
    try:
        x.sum()
        return bool(x.requires_grad)
    except (ValueError, RuntimeError):
        return None


def gradients(ours: Held, theirs: Held, spread: Any, leaf: Tensor, raised: list[str]) -> str:
    """How derivatives differ."""
    numbers = []
    for k in ours:
        mine, other = needs_grad(ours[k]), needs_grad(theirs[k])
        if None not in (mine, other) and mine != other:
            return f"t{k} needs a gradient: {mine}"
        if mine and other and k >= 0:
            numbers.append(k)
    if not numbers or not leaf.requires_grad:
        return ""
    found: list[Any] = []
    for held, x in ((theirs, leaf), (ours, spread)):  # what torch refuses is left out
        loss: Any = 0.0
        for k in numbers:
            loss = loss + (held[k] * values(tuple(held[k].shape), k)).sum()
        try:
            (grad,) = torch.autograd.grad(loss, x)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raised.append(f"backward, {'torch' if x is leaf else 'spread'}: {error}")
            return ""
        found.append(grad.full() if isinstance(grad, tessel.Tensor) else grad)
    other, mine = found
    same = torch.allclose(mine, other, 1e-8, 1e-8, equal_nan=True)
    return "" if same else f"the gradient is {mine}, not {other}"


def run_programs(first: int, count: int) -> list[tuple[str, list[str]]]:
    """Some programs, see `run_program`."""
    return [run_program(seed) for seed in range(first, first + count)]
