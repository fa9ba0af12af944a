"""Leaves: operators that act by themselves, along one dimension or a few."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import cached_property
from math import prod
from typing import Self

import torch
from torch import Tensor
from torch.nn import Parameter

from tessel.core.boxes import Box
from tessel.core.partition import Partition
from tessel.operators.algebra import ParOperator
from tessel.operators.memory import MemoryOrder
from tessel.operators.space import Shape, TensorSpace
from tessel.operators.tasks import OperatorTask


class Leaf(ParOperator):
    """An operator that is not made of others.

    It stands for four: A, its adjoint, its inverse and the adjoint of its inverse, which all have
    the parameter of A. A subclass defines the spaces of A itself, and acts according to
    `is_adjoint` and `is_inverse`.

    Attributes:
        source, target: the domain and the codomain of A itself.
        std: the standard deviation of the parameters that `init` draws.
    """

    source: TensorSpace
    target: TensorSpace
    is_adjoint = False
    is_inverse = False
    is_swapped = False  # whether it maps the codomain of A to its domain
    std = 1.0
    own: Parameter | None = None  # the parameter that `parameters()` drew, kept by A itself
    own_box: Box | None = None  # its box, if it was drawn as a part
    shared_by: Partition | None = None  # the workers that have the same part

    @property
    def domain(self) -> TensorSpace:  # type: ignore[override]
        return self.target if self.is_swapped else self.source

    @property
    def codomain(self) -> TensorSpace:  # type: ignore[override]
        return self.source if self.is_swapped else self.target

    @cached_property
    def H(self) -> Self:
        return self._other(adjoint=not self.is_adjoint, inverse=self.is_inverse)

    @property
    def inv(self) -> Self:
        if not self.is_invertible:
            raise ValueError(f"{self} has no inverse")
        return self._other(adjoint=self.is_adjoint, inverse=not self.is_inverse)

    def _other(self, adjoint: bool, inverse: bool) -> Self:
        base = self.base
        if not adjoint and not inverse:
            return base
        # Kept by A, so that A.H.H is A and all four share one parameter, own or bound.
        others: dict[tuple[bool, bool], Self] = base.__dict__.setdefault("_others", {})
        if (adjoint, inverse) not in others:
            new = copy(base)
            for name in list(new.__dict__):  # values cached by A are not valid for A.H
                if isinstance(getattr(type(base), name, None), cached_property):
                    del new.__dict__[name]
            new.__dict__.pop("_others", None)
            new.__dict__["_base"] = base
            new.is_adjoint, new.is_inverse, new.is_swapped = adjoint, inverse, adjoint != inverse
            others[adjoint, inverse] = new
        return others[adjoint, inverse]

    @property
    def base(self) -> Self:
        """A itself, which identifies the parameter."""
        return self.__dict__.get("_base", self)

    @property
    def mode(self) -> str:
        """The name of this one of the four."""
        return (".inv" if self.is_inverse else "") + (".H" if self.is_adjoint else "")

    @property
    def is_invertible(self) -> bool:
        return False

    @property
    def is_nothing(self) -> bool:
        """Whether it is an identity."""
        return False

    @property
    def mixes(self) -> tuple[bool, ...]:
        """For each dimension, whether a result depends on values at other indices along it."""
        return (True,) * len(self.domain.shape)

    @property
    def parameter_shape(self) -> Shape | None:
        """The shape of the parameter of A, if it has one."""
        return None

    @property
    def parameter_dims(self) -> tuple[int | None, ...]:
        """For each dimension of the parameter, the dimension whose index it shares, if any."""
        return ()

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        """The result along the dimensions from `first` on.

        In a worker's part of a tensor, dimensions that are not mixed may be shorter; `value` is
        the corresponding part of the parameter.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `act`")

    def order_after(self, order: MemoryOrder, dims: list[int]) -> MemoryOrder:
        """The likely order of dimensions in memory afterwards: only speed depends on it."""
        return order

    def flops(self, shape: Shape, dims: tuple[int, ...]) -> float:
        """The number of operations on a local tensor of this shape."""
        return float(prod(shape))

    def miniature(self) -> Leaf:
        """A short operator of this kind that needs the same functions of torch; itself if only
        one of its length does."""
        return self

    def _shrunk(self, base: Self) -> Leaf:
        """The operator made of `base` as this one is of its own."""
        return base._other(self.is_adjoint, self.is_inverse)

    def try_on(self, device: str) -> None:
        """Apply it to a small tensor and a batch, and differentiate: torch raises if it cannot."""
        small = self.miniature()
        space, shape = small.domain, small.parameter_shape
        for batch in ((), (2,)):
            x = torch.zeros((*space.shape, *batch), dtype=space.dtype, device=device)
            value = None if shape is None else torch.ones(shape, dtype=space.dtype, device=device)
            inputs = [each.requires_grad_() for each in (x, value) if each is not None]
            with torch.enable_grad():
                y = small.act(x, 0, value)
                torch.autograd.grad(y, inputs, torch.ones_like(y))

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        return () if self.parameter_shape is None else (self.base,)

    def expand(self, first: int) -> Iterator[OperatorTask]:
        if not self.is_nothing:
            yield OperatorTask(self, tuple(range(first, first + len(self.domain.shape))))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source} → {self.target}){self.mode}"
