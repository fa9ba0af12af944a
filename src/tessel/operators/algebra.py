"""The algebra of operators: linear maps between spaces, and their combinations.

An operator knows its domain and its codomain before it runs. It is a tree: leaves that act along
one dimension or a few (`leaf.py`), and products, Kronecker products, sums and multiples of others.
When it is applied, a tree becomes a list of tasks (`tasks.py`), in the order that computes the
least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessel.core.linop import Composed
from tessel.core.shared import anchored_zeros
from tessel.operators.input_shape import InputShape
from tessel.operators.parameters import OperatorModule, Parameters, find_values, own_parameters
from tessel.operators.space import Shape, TensorSpace, complex_of, real_of
from tessel.operators.tasks import OperatorTask, Scaling, ordered, perform

ORDERS = ("tensor", "julia")  # of the factors in kron


class ParOperator:
    """A linear map from tensors of one space to tensors of another.

    `A * x` applies it, as `A(x)` does, to a tensor of the domain's shape, or to its `vec`, the same
    values in one dimension; the result has the same form. Further dimensions are a batch:
    `A * X` applies the operator to each column of a matrix.

    `A @ B` applies `B` first; `A + B`, `a * A`, `-A`; `A.H` is the exact adjoint in the real inner
    product, `A.inv` the inverse. `A(θ)` binds parameters that `init(A)` drew.

    >>> import tessel, torch
    >>> A = 2 * tessel.ParRestriction(torch.float32, 3, [range(2)])
    >>> A.H * (A * torch.ones(3))
    tensor([4., 4., 0.])
    """

    domain: TensorSpace
    codomain: TensorSpace

    @property
    def H(self) -> ParOperator:
        """The adjoint: Re⟨A x, y⟩ = Re⟨x, A.H y⟩."""
        raise NotImplementedError(f"{type(self).__name__} must implement `H`")

    @property
    def inv(self) -> ParOperator:
        """The inverse; ValueError if there is none."""
        raise ValueError(f"{self} has no inverse")

    def expand(self, first: int) -> Iterator[OperatorTask]:
        """The tasks of the operator on the dimensions from `first` on, in a possible order."""
        raise NotImplementedError(f"{type(self).__name__} must implement `expand`")

    def children(self) -> tuple[ParOperator, ...]:
        """The operators that this one is made of."""
        return ()

    def sized(self, shape: Shape) -> ParOperator:
        """The operator for tensors of this shape, if it takes any shape; otherwise itself."""
        return self

    def __matmul__(self, other: ParOperator) -> ParOperator:
        if not isinstance(other, ParOperator):
            return NotImplemented
        left, right = self.sized(other.codomain.shape), other.sized(self.domain.shape)
        return _joined(Composition, "factors", left, right)

    def __add__(self, other: ParOperator) -> ParOperator:
        if not isinstance(other, ParOperator):
            return NotImplemented
        return _joined(OperatorSum, "terms", self, other)

    def __radd__(self, other: Any) -> ParOperator:
        """Let `sum` add operators."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __sub__(self, other: ParOperator) -> ParOperator:
        return self + (-other) if isinstance(other, ParOperator) else NotImplemented

    def __neg__(self) -> ParOperator:
        return -1 * self

    # A numpy array must not multiply itself with the operator element by element.
    __array_ufunc__ = None

    def __rmul__(self, factor: Any) -> ParOperator:
        if isinstance(factor, np.ndarray):
            raise TypeError(
                f"an array cannot be multiplied by {self} from the right; {self} * array applies "
                "the operator"
            )
        if isinstance(factor, np.generic):
            factor = factor.item()
        if not isinstance(factor, int | float | complex):
            return NotImplemented
        return lift(lambda each: Multiple(factor, each), self)

    def __truediv__(self, factor: Any) -> ParOperator:
        return (1 / factor) * self if isinstance(factor, int | float | complex) else NotImplemented

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Tensor | np.ndarray):
            return self(other)
        if isinstance(other, ParOperator):
            raise TypeError(
                f"{self} * {other} is not an operator: use A @ B for the product, kron(A, B) for "
                "the Kronecker product"
            )
        return self.__rmul__(other)

    def __call__(self, argument: Any) -> Any:
        """Bind parameters, or apply the operator to a tensor."""
        if isinstance(argument, Tensor):
            return self.apply(argument)
        if isinstance(argument, np.ndarray):
            forward = all(step >= 0 for step in argument.strides)
            try:  # without a copy if torch can
                x = torch.as_tensor(argument if forward else argument.copy())
            except TypeError as error:
                raise TypeError(
                    f"an array of {argument.dtype} is not a tensor; operators take arrays of "
                    f"real or complex numbers"
                ) from error
            return self.apply(x)
        return self.bind(argument)

    @cached_property
    def leaves(self) -> tuple[Any, ...]:
        """The leaves that have parameters, each once, in the order in which they are written."""
        found = [leaf for child in self.children() for leaf in child.leaves]
        return tuple(dict.fromkeys(found))

    @cached_property
    def reductions(self) -> tuple[Any, ...]:
        """The operators in the tree that sum over workers by themselves."""
        return tuple(each for child in self.children() for each in child.reductions)

    def bind(self, theta: Any) -> ParOperator:
        """The operator with these parameters."""
        return Bound(self, theta)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The operator's own parameters, drawn on first access.

        From then on the operator can be applied without binding others, and a torch optimizer
        with these parameters trains it.
        """
        return iter(own_parameters(self).values())

    def module(self) -> torch.nn.Module:
        """The operator, with its own parameters, as a torch module."""
        return OperatorModule(self)

    def apply(self, x: Tensor, theta: Parameters | None = None) -> Tensor:
        """Apply the operator in this process."""
        # Errors must be raised on all workers before one of them waits in a sum.
        for reduction in self.reductions[:1]:
            reduction.check_together(self, x)
        form = InputShape.of(self, x, self.domain.shape)
        self.check_numbers(x.device)
        x, values = form.folded(x), find_values(self, theta)
        if x.numel():
            return form.unfolded(perform(self.order, x, values))
        shape = *self.codomain.shape, 0  # transforms do not accept an empty batch
        return form.unfolded(anchored_zeros(shape, x, *values.values()).to(self.codomain.dtype))

    @cached_property
    def order(self) -> tuple[tuple[OperatorTask, ...], ...]:
        """The tasks in the order that computes the least, grouped by calls."""
        return ordered(tuple(self.expand(0)))

    def to_dense(self, theta: Parameters | None = None) -> Tensor:
        """The matrix of a small operator: `vec(A * x)` is `A.to_dense() @ vec(x)`.

        For an operator from complex to real tensors it is the real part of that product.
        """
        count = self.domain.numel
        # The columns of the matrix are the images of the unit vectors, as a batch.
        unit = torch.eye(count).to(self.domain.dtype).reshape(*self.domain.shape, count)
        columns = self.apply(unit, theta).reshape(-1, count)
        if not self.domain.is_complex or self.is_complex_linear:
            return columns
        if self.codomain.is_complex:
            raise ValueError(f"{self} is only real-linear: no complex matrix represents it")
        return torch.complex(columns, -self.apply(1j * unit, theta).reshape(-1, count))

    def check_numbers(self, device: torch.device | str) -> None:
        """ValueError if torch does not support the operator or its gradient on a device.

        Torch has every function for 32 and 64 bits. For 16 bits it has some, on some devices, for
        some lengths. There is no list, so small tensors are tried. Otherwise a worker would
        fail between two messages.
        """
        kind = torch.device(device).type
        if real_of(self.domain.dtype).itemsize > 2 or kind in self.supported_on:
            return
        for task in self.expand(0):
            for term in task.terms:
                term.check_numbers(kind)
            if hasattr(task.actor, "try_on"):
                try:
                    task.actor.try_on(kind)
                except RuntimeError as error:  # NotImplementedError is one
                    dtype = str(task.actor.domain.dtype).removeprefix("torch.")
                    raise ValueError(
                        f"{task.actor}: torch does not support {dtype} on {kind} here ({error}); "
                        f"use float32 or complex64"
                    ) from None
        self.supported_on.add(kind)

    @cached_property
    def supported_on(self) -> set[str]:
        """The devices on which torch is known to support the operator in 16 bits."""
        return set()

    @cached_property
    def is_complex_linear(self) -> bool:
        """Whether A(a x) = a A(x) for complex numbers a as well."""
        return all(task.is_complex_linear for task in self.expand(0))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.domain} → {self.codomain})"


class Bound(ParOperator):
    """An operator with parameters; its algebra is that of the operator."""

    operator: ParOperator
    theta: Parameters

    def __init__(self, operator: ParOperator, theta: Any) -> None:
        if not isinstance(theta, Parameters):
            raise ValueError(
                f"{operator} takes a tensor, or parameters that init() drew; got {theta!r}"
            )
        if isinstance(operator, Bound):
            theta = operator.theta.joined(theta)
            operator = operator.operator
        # In a distributed operator, an error on one worker must not be raised there alone: workers
        # check together when it is applied.
        if not hasattr(operator, "combined"):
            theta.check(operator)
        self.operator, self.theta = operator, theta.of(operator)
        self.domain, self.codomain = operator.domain, operator.codomain

    def children(self) -> tuple[ParOperator, ...]:
        return (self.operator,)

    def expand(self, first: int) -> Iterator[OperatorTask]:
        return self.operator.expand(first)

    def apply(self, x: Tensor, theta: Parameters | None = None) -> Tensor:
        return self.operator.apply(x, self.theta if theta is None else theta)

    @cached_property
    def H(self) -> ParOperator:
        return _bound(self.operator.H, self.theta)

    @cached_property
    def inv(self) -> ParOperator:
        return _bound(self.operator.inv, self.theta)

    def parameters(self) -> Iterator[Any]:
        """The parameters that are bound."""
        return iter(self.theta.values())

    def module(self) -> torch.nn.Module:
        raise ValueError(f"{self} is bound: use S.module(), which has its own parameters")

    def __getattr__(self, name: str) -> Any:
        """Return what only a distributed operator has: its layouts, its plan."""
        if name.startswith("_") or "operator" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.operator, name)

    def __repr__(self) -> str:
        return f"{self.operator!r}(θ)"


def lift(make: Callable[..., ParOperator], *operators: ParOperator) -> ParOperator:
    """Combine operators, whether or not they are bound or distributed."""
    theta: Parameters | None = None
    plain = []
    for each in operators:
        if isinstance(each, Bound):
            theta = each.theta if theta is None else theta.joined(each.theta)
            each = each.operator
        plain.append(each)
    spread = [each for each in plain if hasattr(each, "combined")]
    result = spread[0].combined(make, plain) if spread else make(*plain)
    return result if theta is None else _bound(result, theta)


def _bound(operator: ParOperator, theta: Parameters) -> ParOperator:
    """The operator with the values that are given; others can be bound later."""
    new = Bound.__new__(Bound)
    new.operator, new.theta = operator, theta
    new.domain, new.codomain = operator.domain, operator.codomain
    return new


class Composition(Composed, ParOperator):
    """A product of operators between spaces: the tasks of all factors, planned as a whole."""

    def children(self) -> tuple[ParOperator, ...]:
        return self.factors

    def expand(self, first: int) -> Iterator[OperatorTask]:
        for factor in reversed(self.factors):
            yield from factor.expand(first)

    @cached_property
    def inv(self) -> ParOperator:
        return Composition(*(factor.inv for factor in reversed(self.factors)))

    def __repr__(self) -> str:
        return " @ ".join(_bracketed(each) for each in self.factors)


class Kronecker(ParOperator):
    """A Kronecker product: each factor acts along dimensions of its own.

    The matrix is never formed. A factor from real to complex numbers acts before factors that
    take complex ones; one from complex to real acts last.
    """

    def __init__(self, *factors: ParOperator) -> None:
        self.factors = factors
        turns = [_turn(each) for each in factors]
        self.domain = _joint([each.domain for each in factors], 0 in turns)
        self.codomain = _joint([each.codomain for each in factors], 2 in turns)
        # All numbers of a tensor have one precision, and become complex, or real, once.
        first = self.factors[0]
        for other in self.factors[1:]:
            if real_of(first.domain.dtype) != real_of(other.domain.dtype):
                raise ValueError(
                    f"cannot combine in kron: {first} is of {first.domain.dtype}, {other} of "
                    f"{other.domain.dtype}"
                )
        if 0 in turns and 2 in turns:
            raise ValueError(
                f"cannot combine in kron: {self.factors[turns.index(0)]} maps real to complex "
                f"numbers, {self.factors[turns.index(2)]} complex to real"
            )
        for turn, what in ((0, "real to complex"), (2, "complex to real")):
            changing = [each for each in self.factors if _turn(each) == turn]
            if len(changing) > 1:
                raise ValueError(
                    f"cannot combine in kron: {changing[0]} and {changing[1]} both map {what} "
                    f"numbers; only one may, the others need {complex_of(first.domain.dtype)} on "
                    f"both sides"
                )
        # An operator through the other kind of numbers needs its own kind on one side.
        for factor in self.factors:
            if not _goes_there_and_back(factor):
                continue
            others = [each for each in self.factors if each is not factor]
            mixed = factor.domain.is_complex and any(
                each.domain.is_complex and each.codomain.is_complex for each in others
            )
            if mixed or (
                not factor.domain.is_complex and self.domain.is_complex & self.codomain.is_complex
            ):
                raise ValueError(
                    f"cannot combine in kron: {factor} is only real-linear, and "
                    f"another factor is complex in {self}"
                )

    def children(self) -> tuple[ParOperator, ...]:
        return self.factors

    def expand(self, first: int) -> Iterator[OperatorTask]:
        placed = []
        for factor in self.factors:
            placed.append((factor, first))
            first += len(factor.domain.shape)
        # `sorted` keeps equals in order, so that all workers expand a product alike.
        for factor, start in sorted(placed, key=lambda each: self._turn(each[0])):
            yield from factor.expand(start)

    def _turn(self, factor: ParOperator) -> int:
        """The order of a factor; those that go there and back between numbers act outside."""
        if _goes_there_and_back(factor) and not factor.domain.is_complex:
            return -1 if not self.domain.is_complex else 3
        return _turn(factor)

    @cached_property
    def H(self) -> ParOperator:
        return Kronecker(*(factor.H for factor in self.factors))

    @cached_property
    def inv(self) -> ParOperator:
        return Kronecker(*(factor.inv for factor in self.factors))

    def __repr__(self) -> str:
        return f"kron({', '.join(map(repr, self.factors))})"


class OperatorSum(ParOperator):
    """A sum of operators between the same spaces."""

    def __init__(self, *terms: ParOperator) -> None:
        self.terms = terms
        for other in terms[1:]:
            if (other.domain, other.codomain) != (terms[0].domain, terms[0].codomain):
                raise ValueError(
                    f"cannot add: {terms[0]} maps {terms[0].domain} to {terms[0].codomain}, "
                    f"{other} maps {other.domain} to {other.codomain}"
                )
        self.domain, self.codomain = terms[0].domain, terms[0].codomain

    def children(self) -> tuple[ParOperator, ...]:
        return self.terms

    def expand(self, first: int) -> Iterator[OperatorTask]:
        yield OperatorTask(self, tuple(range(first, first + len(self.domain.shape))))

    @cached_property
    def H(self) -> ParOperator:
        return OperatorSum(*(term.H for term in self.terms))

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.terms))


class Multiple(ParOperator):
    """A number times an operator.

    The number multiplies the results, or the input if results are real. The adjoint and the
    inverse multiply on the other side, which differs where an operator is linear for real
    factors only.
    """

    def __init__(self, number: Any, operator: ParOperator, is_early: bool | None = None) -> None:
        self.domain, self.codomain = operator.domain, operator.codomain
        if not isinstance(number, Real) and not self.domain.is_complex | self.codomain.is_complex:
            raise ValueError(f"{operator} is real: it cannot be multiplied by {number}")
        self.number, self.operator = number, operator
        self.is_early = not self.codomain.is_complex if is_early is None else is_early

    def children(self) -> tuple[ParOperator, ...]:
        return (self.operator,)

    def expand(self, first: int) -> Iterator[OperatorTask]:
        dtype = (self.domain if self.is_early else self.codomain).dtype
        if isinstance(self.number, Real):
            dtype = real_of(dtype)  # may be multiplied at any time
        factor = OperatorTask(Scaling(self.number, TensorSpace((), dtype)), ())
        tasks = self.operator.expand(first)
        yield from (factor, *tasks) if self.is_early else (*tasks, factor)

    @cached_property
    def H(self) -> ParOperator:
        number = self.number if isinstance(self.number, Real) else self.number.conjugate()
        return Multiple(number, self.operator.H, not self.is_early)

    @cached_property
    def inv(self) -> ParOperator:
        if self.number == 0:
            raise ValueError(f"{self} has no inverse")
        return Multiple(1 / self.number, self.operator.inv, not self.is_early)

    def __repr__(self) -> str:
        return f"{self.number} * {_bracketed(self.operator)}"


def kron(*factors: ParOperator, order: str = "tensor") -> ParOperator:
    """The Kronecker product, with factors in the order of the tensor's dimensions.

    The first factor acts along the first dimension, and in a `vec` the last index runs fastest, as
    in `torch.kron`. Where the first index of a `vec` runs fastest, as in Julia, the same product
    is written in reverse: `Fz ⊗ Fy ⊗ Fx` for a tensor of x, y and z. A `vec` does not show which
    order is meant, as its length is the same in both, so it must be specified.

    Args:
        factors: the operators.
        order: `"tensor"`, the first factor for the first dimension, or `"julia"`, the last factor
            for the first dimension. Tensors and partitions have their dimensions in the same order
            in both cases.

    >>> from tessel.operators import ParDFT, kron
    >>> Fx, Fy = ParDFT(torch.float32, 10), ParDFT(torch.complex64, 20)
    >>> kron(Fx, Fy).codomain, kron(Fy, Fx, order="julia").codomain
    (complex64 6×20, complex64 6×20)
    """
    if order not in ORDERS:
        raise ValueError(f'kron: order is "tensor" or "julia", got {order!r}')
    if not factors:
        raise ValueError("kron needs at least one operator")
    for each in factors:
        if not isinstance(each, ParOperator):
            raise ValueError(f"kron takes operators, got {each!r}")
    factors = factors[::-1] if order == "julia" else factors

    def make(*each: ParOperator) -> ParOperator:
        # A product of products is one: all its factors are planned together.
        flat = [f for one in each for f in (one.factors if isinstance(one, Kronecker) else (one,))]
        return each[0] if len(each) == 1 else Kronecker(*flat)

    return lift(make, *factors)


def _joined(kind: Any, parts: str, left: ParOperator, right: ParOperator) -> ParOperator:
    """A product or a sum of two; products of products, and sums of sums, are flattened."""

    def make(*both: ParOperator) -> ParOperator:
        several = (getattr(each, parts) if type(each) is kind else (each,) for each in both)
        return kind(*chain.from_iterable(several))

    return lift(make, left, right)


def _joint(spaces: Sequence[TensorSpace], changes_numbers: bool) -> TensorSpace:
    """The space of all dimensions; complex if a factor is complex and none changes the numbers.

    Next to a factor between real and complex numbers the others act on its complex side: the
    tensors on its real side are real.
    """
    shape = tuple(length for space in spaces for length in space.shape)
    is_complex = any(space.is_complex for space in spaces) and not changes_numbers
    dtype = spaces[0].dtype
    return TensorSpace(shape, complex_of(dtype) if is_complex else real_of(dtype))


def _turn(factor: ParOperator) -> int:
    """The order of a factor: 0 if it makes numbers complex, 2 if it makes them real, else 1."""
    if factor.codomain.is_complex and not factor.domain.is_complex:
        return 0
    return 2 if factor.domain.is_complex and not factor.codomain.is_complex else 1


def _goes_there_and_back(factor: ParOperator) -> bool:
    """Whether numbers become complex, or real, only in between."""
    if factor.domain.is_complex != factor.codomain.is_complex:
        return False
    return any(task.changes_numbers for task in factor.expand(0))


def _bracketed(operator: ParOperator) -> str:
    return (
        f"({operator})"
        if isinstance(operator, OperatorSum | Multiple | Composition)
        else repr(operator)
    )
