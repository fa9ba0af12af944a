"""Indexing of spread tensors: what is refused, on all workers alike, and what is written to.

Tests `tensor/rules/indexing.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tessel
from parity import values
from tessel import Layout
from tessel.tensor.gathering import noted_gathers

Run = Callable[..., list[Any]]


def rows(shape: tuple[int, ...] = (6, 5)) -> tessel.Tensor:
    world = tessel.world()
    return tessel.spread(
        values(shape, 1), Layout.split(world, shape, [0, *[None] * (len(shape) - 1)])
    )


WRONG: dict[str, Callable[[tessel.Tensor], Any]] = {
    "number": lambda x: x[6],
    "too many": lambda x: x[0, 0, 0],
    "two dots": lambda x: x[..., 0, ...],
    "step": lambda x: x[::-1],
    "list": lambda x: x[[0, 6]],
    "index": lambda x: x.index_select(0, torch.tensor([-1])),
    "gather": lambda x: x.gather(0, torch.full((6, 5), 6)),
    "gather by what is split": lambda x: x.gather(0, (x * 0).long() + 7),
    "value": lambda x: x.__setitem__(slice(2), torch.ones(3, 5)),
    "complex value": lambda x: x.__setitem__(0, 1j),
    "mask": lambda x: x.__setitem__(torch.ones(5, dtype=torch.bool), 1.0),
    "assignment at an index": lambda x: x.__setitem__([0, 6], 1.0),
    "values at indices": lambda x: x.__setitem__([0, 5], torch.ones(3, 5)),
    "index_put_": lambda x: x.index_put_((torch.tensor([6]),), torch.ones(5).double()),
    "repeats": lambda x: x.repeat_interleave(torch.tensor([1, 2]), 0),
    "quantile": lambda x: x.quantile(1.5, 0),
    "kinds of views": lambda x: x.view(torch.complex128),
    "cat": lambda x: torch.cat([x, torch.ones(2, 4)]),
    "reshape": lambda x: x.reshape(7, 5),
    "reflect": lambda x: torch.nn.functional.pad(x, (5, 0), "reflect"),
    "out of another shape": lambda x: torch.add(x, 1, out=x[:3].clone()),
    "out of another type": lambda x: torch.add(x, 1, out=x.long()),
}


def refuse(name: str) -> str:
    x = rows()
    with pytest.raises((IndexError, ValueError, RuntimeError, TypeError)) as caught:
        WRONG[name](x)
    assert torch.equal(x.full(), values((6, 5), 1)), "it changed"  # and all workers go on
    return str(caught.value)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_keys_raise_on_all_workers(run: Run, name: str) -> None:
    said = run(refuse, name, nprocs=3, timeout=60)
    assert len(set(said)) == 1, said


def write() -> None:
    x = rows()
    whole = x.full().clone()
    x[0] = 9.0  # was lost: it went to a gathered copy
    whole[0] = 9.0
    assert torch.equal(x.full(), whole)
    target = rows()
    assert torch.add(x, 1, out=target) is target
    assert torch.equal(target.full(), whole + 1)
    torch.add(whole, 2, out=target)
    assert torch.equal(target.full(), whole + 2)
    pair = rows()[0].clone(), rows()[0].long()
    torch.max(x, 0, out=pair)
    assert torch.equal(pair[0].full(), whole.max(0)[0])
    x[:, 1:3].zero_()  # a view, since columns are whole
    whole[:, 1:3].zero_()
    assert torch.equal(x.full(), whole)
    with pytest.raises(NotImplementedError, match="copy"):
        x[1:].zero_()
    with pytest.raises(NotImplementedError, match="copy"):
        x.T[:, 1:].zero_()  # of a view that nobody keeps: x would not change


def test_what_is_written_arrives(run: Run) -> None:
    run(write, nprocs=3, timeout=60)


def outdate() -> None:
    """A copy, where torch has a view, is not used after its base was changed."""
    x, part = rows(), rows()
    copy, clone, view = x[1:], x[1:].clone(), x[:, :2]
    of_copy = copy[:, :2]
    assert torch.equal(copy.full(), x.full()[1:])
    x[0] = 9.0
    part[1:].sum()  # of another tensor
    for outdated in (copy, of_copy):
        for use in (lambda y: y + 1, lambda y: y.full(), lambda y: y.sum(), lambda y: y.local):
            with pytest.raises(ValueError, match="take the view after the change"):
                use(outdated)
    assert torch.equal(view.full(), x.full()[:, :2])  # which shares its memory
    assert torch.equal(clone.full(), rows().full()[1:])
    assert torch.equal(x[1:].full(), x.full()[1:])
    x[:2] = x[-2:]  # what was read before the change is read
    assert torch.equal(x.full()[:2], x.full()[-2:])


def test_copies_of_what_was_changed_are_not_used(run: Run) -> None:
    run(outdate, nprocs=3, timeout=60)


def parted(shape: tuple[int, int], dim: int, uneven: bool) -> Layout:
    """One dimension split: in balanced parts, or in all but one value, one, and none."""
    axes: list[int | None] = [None, None]
    axes[dim] = 0
    if not uneven:
        return Layout.split(tessel.world(), shape, axes)
    grid = tessel.world().create_cartesian_topology_partition(
        [3 if d == dim else 1 for d in (0, 1)]
    )
    lengths = [[n - 1, 1, 0] if d == dim else [n] for d, n in enumerate(shape)]
    return Layout.from_lengths(grid, lengths)


KEYS: list[Any] = [slice(1, None), slice(None, None, 2), 0, -1, (slice(1, -1), slice(1, -1))]
KEYS += [(slice(None), slice(0, 1)), (..., 0), (None, slice(1, 4)), (slice(2, 2),), slice(0, 6)]


def augment(dim: int, uneven: bool) -> None:
    """`x[1:] += y` takes a view, changes it, and puts it back: three calls of torch's functions."""
    layout = parted((6, 5), dim, uneven)

    def program(x: torch.Tensor, key: Any) -> torch.Tensor:
        y = x * 1.5
        turned = y.t()
        y[key] *= 2
        y[key] += y[key].clone().sin()
        z = turned.clone().cos()
        y[key] -= 0.5
        y[key] /= 3
        return y * z.t()

    for key in KEYS:
        alone, root = (values((6, 5), 1).requires_grad_() for _ in range(2))
        found: list[list[torch.Tensor]] = []
        for x, leaf in (
            (alone, alone),
            (tessel.spread(root, layout), root),
        ):
            y = program(x, key)
            (first,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), leaf)
            found.append([y.full() if isinstance(y, tessel.Tensor) else y, first, second])
        for expected, got in zip(*found, strict=True):
            assert torch.allclose(expected, got, 1e-11, 1e-11), (key, dim)


@pytest.mark.parametrize(("nprocs", "uneven"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("dim", [0, 1])
def test_operators_in_place_change_what_they_index(
    run: Run, dim: int, nprocs: int, uneven: bool
) -> None:
    run(augment, dim, uneven, nprocs=nprocs, timeout=60)


def change_nothing(dim: int, uneven: bool) -> None:
    """A view of no values is changed, by values that come from elsewhere: its base stays."""
    layout, other = parted((6, 5), dim, uneven), parted((6, 5), 1 - dim, False)
    found: list[list[torch.Tensor]] = []
    for spread in (False, True):
        roots = [values((6, 5), k).requires_grad_() for k in (1, 2)]
        x, w = (
            tessel.spread(root, each) if spread else root
            for root, each in zip(roots, (layout, other), strict=True)
        )
        y = x * 1.5
        turned = y.t()
        # along the whole dimension, where a slice is a view
        for of, given, whole in ((y, w, 1 - dim), (turned, w.t(), dim)):
            view = of.narrow(whole, 2, 0)
            view.mul_(2)
            view.add_(given.sin().narrow(whole, 1, 0))
        z = (y * turned.t()).sin()
        grads = torch.autograd.grad(z.square().sum(), roots, create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in grads), roots, allow_unused=True)
        found.append([z, *grads, *(g for g in twice if g is not None)])
    for expected, got in zip(*found, strict=True):
        got = got.full() if isinstance(got, tessel.Tensor) else got
        assert torch.allclose(expected, got, 1e-11, 1e-11), dim


@pytest.mark.parametrize(("nprocs", "uneven"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("dim", [0, 1])
def test_views_of_nothing_leave_what_they_are_views_of(
    run: Run, dim: int, nprocs: int, uneven: bool
) -> None:
    run(change_nothing, dim, uneven, nprocs=nprocs, timeout=60)


def forget() -> None:
    """What was changed by way of a copy, and did not get it back, is not used."""
    lost = "changed in place through a view"

    def begin() -> tuple[tessel.Tensor, tessel.Tensor, tessel.Tensor, tessel.Tensor]:
        x = rows() * 1
        turned, early, view = x.t(), x[1:3], x[1:]
        view *= 2
        return x, turned, early, view

    x, turned, early, view = begin()
    for each in (x, turned):
        with pytest.raises(ValueError, match=lost):
            each.sum()
    with pytest.raises(ValueError, match="take the view after the change"):
        early.sum()
    for key, value in ((slice(0, -1), view), (slice(1, None), view.clone())):
        with pytest.raises(ValueError, match=lost):
            x[key] = value  # another place, another tensor
    view *= 3
    x[1:] = view
    expected = rows().full()
    expected[1:] *= 6
    assert torch.equal(x.full(), expected) and torch.equal(turned.full(), expected.t())
    x, _, _, view = begin()
    del view
    with pytest.raises(ValueError, match=lost):
        x.full()
    x = rows() * 1
    with pytest.raises(NotImplementedError, match="copy"):
        x[1:][:2].mul_(2)  # a copy of a copy
    x = (rows() * 1)[:, :3]
    x = x[:3] + x.new_zeros(3, 3)
    view = x.t()[:, 1:]
    with pytest.raises(NotImplementedError, match="copy"):
        view *= 2  # of x.t(), which is gone: nobody can put it back
    x = tessel.spread(values((3, 3), 1), x.layout)
    x.t()[:, 1:] *= 2
    expected = values((3, 3), 1)
    expected.t()[:, 1:] *= 2
    assert torch.equal(x.full(), expected)


def test_what_was_changed_by_way_of_a_copy_is_not_used(run: Run) -> None:
    run(forget, nprocs=3, timeout=60)


def truth() -> None:
    x = tessel.spread(values((6, 5), 1), Layout.split(tessel.world(), (6, 5), [None, 0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert x[True].shape == (1, 6, 5), "taken for the number one"


def test_a_truth_value_is_no_number(run: Run) -> None:
    run(truth, nprocs=2, timeout=60)


def put_into_whole() -> None:
    """Tensors that a model makes are plain, and whole: what is put into them is gathered."""

    def does(x: torch.Tensor) -> torch.Tensor:
        items, sums = torch.zeros(7, 5, dtype=x.dtype), torch.zeros(6, 5, dtype=x.dtype)
        items[1:] = x**2
        sums += x**3
        return (items[:6] * x).sum() + (sums * 2).square().sum()

    x, whole = rows().requires_grad_(), values((6, 5), 1).requires_grad_()
    with noted_gathers() as gathers:
        y = does(x)
    assert [each.num_bytes for each in gathers] == [x.nbytes] * 2
    y.backward()
    does(whole).backward()
    assert torch.allclose(y, does(whole), 1e-12)
    assert torch.allclose(x.grad.full(), whole.grad, 1e-12)
    with tessel.fallback("raise"), pytest.raises(NotImplementedError, match="into a whole tensor"):
        does(x)


@pytest.mark.parametrize("nprocs", [2, 3])
def test_a_part_that_is_put_into_a_whole_tensor_is_gathered(run: Run, nprocs: int) -> None:
    run(put_into_whole, nprocs=nprocs, timeout=60)


def put_where_others_are() -> None:
    P = tessel.world().create_partition_inclusive([0, 1])
    x = tessel.spread(values((6,), 1), P.create_cartesian_topology_partition([2]))
    with pytest.raises(NotImplementedError, match="into a whole tensor"):
        torch.zeros(6, dtype=x.dtype)[:] = x


def test_workers_outside_have_no_values_for_a_whole_tensor(run: Run) -> None:
    run(put_where_others_are, nprocs=3, timeout=60)


def index_by_lists_of_lists() -> list[str]:
    """As torch has it: a short list is the key that a tuple would be, any other list a tensor."""
    places = [[0, 1], [2, 3]]
    truths = [[(k + j) % 3 == 0 for j in range(5)] for k in range(6)]
    array = np.array(places)
    pairs: list[tuple[Any, Any]] = [(places, 7.0), ((places,), 7.0), ((slice(None), places), 7.0)]
    pairs += [([(0, 1), (4, 2)], values((2,), 3)), ((truths,), 7.0), (array, values((5,), 3))]
    pairs += [([[0], [1]] * 16, 7.0), ([array, 1], 7.0), ([None, 1], 7.0), ([slice(2), 1], 7.0)]
    x, alone = rows(), values((6, 5), 1)
    with noted_gathers() as gathers, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using a non-tuple sequence")
        for key, value in pairs:
            found: Any = x[key]
            assert torch.equal(found.full(), alone[key]), key
            for each in (x, alone):
                each[key] = value
                each[key] += 1.5
            assert torch.equal(x.full(), alone), key
    return [each.name for each in gathers]


@pytest.mark.parametrize("nprocs", [1, 3])
def test_lists_of_lists_are_indices(run: Run, nprocs: int) -> None:
    assert run(index_by_lists_of_lists, nprocs=nprocs) == [[]] * nprocs
