"""Recognition of users' local operators, by their attributes and by trying them.

An operator is recognised by its attributes: `filter` and `padding`, `factor`, `mask`. Attributes
with the same names do not make two classes the same operator, so each candidate is tried: its
values must equal those of the object's own `A`, and of `A_adjoint`, `A_vjp` and `A_adjoint_A` if it
has them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from tessel import transport
from tessel.core import Layout, Partition, Shape, agree, checksum_of
from tessel.imaging.parts.operators import (
    Chain,
    Convolution,
    Decimation,
    Gathered,
    Mask,
    PartOperator,
    RowOperator,
    Whole,
)

MakeOperator = Callable[[Layout], PartOperator]  # makes the operator for an image in any parts
# The exceptions of user objects for tensors that they do not support.
MISFITS = (ValueError, RuntimeError, TypeError, IndexError, AttributeError, AssertionError)


def partition_physics(physics: Any, layout: Layout, owner: int | None = None) -> RowOperator:
    """An operator for an image in parts: the same as `physics` on the whole image.

    An operator with a local kernel, that is, one that has a `filter`, `padding`, `factor` or `mask`
    and acts accordingly, adjoint included, works on the parts and on halos. Any other is applied to
    the whole image, on one worker.

    Args:
        physics: an object with `A`, and `A_adjoint` if it is linear; equal on all workers.
        layout: the layout of the image, in parts. If the image is whole on every worker, of any
            shape, each worker applies its own operators.
        owner: the worker that applies an operator without a local kernel, by default the first one.

    >>> import tessel, torch
    >>> from types import SimpleNamespace
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> blank = SimpleNamespace(mask=torch.tensor([1.0, 0.0]), A=lambda x: x * blank.mask)
    >>> tessel.imaging.parts.partition_physics(blank, tessel.Layout.balanced(P, (1, 2))).is_local
    True
    """
    if layout.is_shared:
        return Whole(physics)
    rule = rule_of(physics, layout.shape)
    first = layout.partition.ranks[0]
    operator: PartOperator | Gathered = (
        Gathered(physics, layout, first if owner is None else owner)
        if rule is None
        else rule(layout)
    )
    values = operator.values()
    held = (
        f" made of tensors with the checksum {checksum_of(values):x}, which must be equal on all "
        f"workers (random ones are inside of `with ctx.shared_random():`)"
    )
    call = f"partition_physics of {operator.identity}"
    agree(layout.partition, f"{call}{held}" if values else call)
    return operator


def rule_of(physics: Any, shape: Shape) -> MakeOperator | None:
    """The function that makes `physics` for images in parts, or None if no local rule matches.

    Args:
        physics: an object with `A`.
        shape: the shape of the whole image.

    >>> import torch
    >>> class Vignette:
    ...     mask = torch.tensor([1.0, 0.5])
    ...     def A(self, x):
    ...         return self.mask * x
    >>> rule_of(Vignette(), (1, 1, 3, 2)) is None
    False
    """
    for rule, smallest in _candidates(physics, shape):
        # A small image first: the whole one may be as large as a worker can hold, and a small one
        # has the same behaviour at its borders.
        for tried in filter(None, (smallest, shape)):
            try:
                operator = rule(_alone(tried))
                is_equal = _is_equal(physics, operator, _random(physics, tried))
                is_equal = is_equal and _is_equal_of_complex(physics, operator)
            except MISFITS:
                # The object supports only images of one size, or the rule does not match. Neither
                # is an error: the operator is then applied to the whole image, on one worker.
                continue
            if is_equal:
                return rule
            if is_equal is not None:
                break
    return None


def _candidates(physics: Any, shape: Shape) -> Iterator[tuple[MakeOperator, Shape | None]]:
    """Rules that an object's attributes suggest, each with the shape of a small trial image."""
    links = getattr(physics, "physics_list", None)
    if links is not None and len(links) > 0 and not isinstance(links, Tensor):
        chain = _chain(list(links), shape)
        if chain is not None:
            yield chain, None
    filter, padding = getattr(physics, "filter", None), getattr(physics, "padding", None)
    factor = getattr(physics, "factor", 1)
    if isinstance(filter, Tensor) and filter.dim() == len(shape) and isinstance(factor, int):
        # Without a padding it may filter by the transform of the image, whose size is then fixed:
        # no other is tried.
        how = padding.lower() if isinstance(padding, str) else "circular"
        small = _small(shape, filter.shape, factor) if isinstance(padding, str) else None
        now = partial(getattr, physics, "filter")  # it may be assigned anew
        yield (lambda layout: Convolution(layout, now, how, factor)), small
    elif filter is None and hasattr(physics, "filter") and isinstance(factor, int):
        yield (lambda layout: Decimation(layout, factor)), _small(shape, (1,) * len(shape), factor)
    mask = getattr(physics, "mask", None)
    if isinstance(mask, Tensor | Number):
        value = lambda: torch.as_tensor(physics.mask)  # noqa: E731  (it may be assigned anew)
        yield (lambda layout: Mask(layout, value)), None


def _chain(links: Sequence[Any], shape: Shape) -> MakeOperator | None:
    """The rule for a chain of operators, if each of them has a rule."""
    rules = []
    for link in links:
        rule = rule_of(link, shape)
        if rule is None:
            return None
        rules.append(rule)
        shape = rule(_alone(shape)).codomain.shape

    def chain(layout: Layout) -> PartOperator:
        operators: list[PartOperator] = []
        for rule in rules:
            operators.append(rule(operators[-1].codomain if operators else layout))
        return Chain(*operators)

    return chain


@torch.no_grad()
def _is_equal(physics: Any, operator: PartOperator, x: Tensor) -> bool | None:
    """Whether all methods are equal for x; None if an adjoint is for images of another size."""
    y = physics.A(x)
    if not isinstance(y, Tensor) or not _close(operator.A(x), y):
        return False
    v = _random(physics, tuple(y.shape)).to(y.dtype)
    images = [
        (getattr(physics, name)(*given), getattr(operator, name)(*given))
        for name, given in (("A_adjoint", (v,)), ("A_vjp", (x, v)), ("A_adjoint_A", (x,)))
        if hasattr(physics, name)
    ]
    if any(isinstance(image, Tensor) and image.shape != x.shape for image, _ in images):
        return None
    return all(isinstance(image, Tensor) and _close(got, image) for image, got in images)


@torch.no_grad()
def _is_equal_of_complex(physics: Any, operator: PartOperator) -> bool:
    """Whether both are equal for complex images, of which some operators read the real part."""
    spaces = {"A": operator.domain, "A_adjoint": operator.codomain}
    # One method at a time: complex images are twice as large as those of the other trials.
    for name in filter(partial(hasattr, physics), spaces):
        try:
            shape = spaces[name].shape
            x = torch.complex(_random(physics, shape), _random(physics, shape, seed=8))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about complex numbers that are cast to real ones
                expected = getattr(physics, name)(x)
            got = getattr(operator, name)(x)
        except MISFITS:  # one of them supports only real images: later complex ones raise
            continue
        if not isinstance(expected, Tensor) or not _close(got, expected):
            return False
    return True


def _random(physics: Any, shape: Shape, seed: int = 7) -> Tensor:
    """Random values in the dtype in which the object computes."""
    found = (value for value in _tensors(physics) if value.is_floating_point())
    like = next(found, torch.empty(0, device="cpu"))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=like.dtype, device="cpu")
    return 4 * x.to(like.device)  # large enough to show saturation


def _tensors(physics: Any) -> Iterator[Tensor]:
    """The tensors of an object, as far as they can be found."""
    for name in ("filter", "mask"):
        value = getattr(physics, name, None)
        if isinstance(value, Tensor):
            yield value
    for link in getattr(physics, "physics_list", ()):
        yield from _tensors(link)


def _close(got: Tensor, expected: Tensor) -> bool:
    """Whether tensors are equal up to rounding, in which transforms differ from sums."""
    if got.shape != expected.shape:
        return False
    accuracy = 1e3 * torch.finfo(got.dtype).eps
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return bool(((got - expected).abs() <= accuracy * scale).all())


def _small(shape: Shape, filter: Sequence[int], factor: int) -> Shape:
    """The shape of an image just large enough to show a filter's behaviour at all borders."""
    sizes = (3 * size + 2 * factor + 1 for size in filter[2:])
    lengths = (min(n, size) for n, size in zip(shape[2:], sizes, strict=True))
    return (*shape[:2], *lengths)


def _alone(shape: Shape) -> Layout:
    """The layout of an image that is whole on this worker alone."""
    return Layout.whole(Partition((transport.this_worker(),), (1,)), shape)
