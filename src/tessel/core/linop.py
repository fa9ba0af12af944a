"""Linear operators between layouts, their adjoints and products.

Here is the library's one attachment to autograd: the derivative of a linear operator is the
operator itself, and the gradient is its adjoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise, zip_longest
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tessel import transport
from tessel.core.agreement import (
    Agreement,
    Signature,
    SignaturesOfOutputs,
    TensorMeta,
    as_agreed,
    check_outputs,
)
from tessel.core.context import in_forward_mode, in_transform, is_compiling, setting
from tessel.core.graph import current_trace, outside_of_graphs, placed, settings_in
from tessel.core.handles import HasHandle, constant_in_graphs, object_of
from tessel.core.layout import Layout, Shape
from tessel.core.partition import Outline
from tessel.transport import Again

AgreedOperator = tuple["LinearOperator", TensorMeta]
Tensors = Sequence[Tensor | None]  # None is a zero that was not computed, or is missing
ANCHOR = torch.empty(0, requires_grad=True)  # needs a gradient and never gets one


class LinearOperator(HasHandle):
    """A linear map from tensors in one layout to tensors in another.

    A subclass sets `domain` and `codomain` and writes two methods on local tensors, `_apply` and
    `_apply_adjoint`, which autograd does not see; gradients of every order, forward-mode
    derivatives, products and the laws of `tessel.testing` follow from them.

    >>> import tessel, torch
    >>> class Double(tessel.LinearOperator):
    ...     def __init__(self, layout):
    ...         self.domain = self.codomain = layout
    ...     def _apply(self, x):
    ...         return 2 * x
    ...     _apply_adjoint = _apply
    >>> A = Double(tessel.Layout.balanced(tessel.world(), (3,)))
    >>> (A @ A.H)(torch.ones(3))
    tensor([4., 4., 4.])
    """

    domain: Layout
    codomain: Layout
    _group: transport.Group | None = None
    _again: Again | None = None  # makes a call once more, by one call of the engine
    _derived = HasHandle._derived | {"_group", "_again"}

    def _apply(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must implement `_apply`")

    def _apply_adjoint(self, y: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must implement `_apply_adjoint`")

    @cached_property
    def H(self) -> LinearOperator:
        """The adjoint: ⟨A x, y⟩ = ⟨x, A.H y⟩ in the inner products of the two layouts."""
        return Adjoint(self)

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Apply the operator to this worker's part, after all workers agreed that theirs fit.

        Args:
            x: this worker's part.
            out: where the output is written, on all workers or on none, and without a gradient. It
                is what is returned. A worker that gets nothing passes `torch.empty(0)`.

        >>> import tessel, torch
        >>> layout = tessel.Layout.balanced(tessel.world(), (3,))
        >>> y = torch.empty(3)
        >>> tessel.Move(layout, layout)(torch.ones(3), out=y) is y
        True
        """
        return apply_agreed(self, x, self.domain.partition.active, out)

    def apply(self, x: Tensor, meta: TensorMeta | None = None) -> Tensor:
        """Apply the operator without an agreement.

        Every worker must pass a tensor as `domain` describes it; all inputs require a gradient, or
        none.
        """
        if self._group is None:
            self.prepare()
        if not self.takes_part:
            if not isinstance(self.domain.partition, Outline):
                return x
            # This worker has no part and follows without values: neither x nor the result has any.
            # If it is a sum, it depends on x in autograd's graph, as it does where there are
            # values.
            shape = self.codomain.local_shape
            return x.sum(dtype=x.dtype).expand(shape) if x.requires_grad else x.new_empty(shape)
        if x.shape != self.domain.local_shape:
            raise ValueError(
                f"{self._label}: worker {transport.this_worker()} expected a tensor of shape "
                f"{self.domain.local_shape}, got {tuple(x.shape)}"
            )
        y = record(self, x, meta is not None and meta.needs_grad)
        if meta is not None and meta.has_tangent and not in_forward_mode():
            # others move tangents, so this worker moves one, too: a zero
            self._apply(torch.zeros_like(x))
        return y

    def _apply_into(self, x: Tensor, out: Tensor) -> Tensor:
        """Write the output to `out`, which it fits, and give it; nothing is recorded."""
        with torch.no_grad():
            y = self._apply(x)
            return out.copy_(y) if self.codomain.partition.active else out  # where nothing comes

    def prepare(self) -> transport.Group:
        """Make the group of the operator, on all workers of the job together, and return it.

        Constructors do so, and so does the first call of an operator without a group: a copy, or
        one that was loaded, perhaps by this worker alone.
        """
        group = self._group
        if group is None:
            # not by an attribute: moves are frozen
            with outside_of_graphs() if is_traced() else nullcontext():
                group = transport.group_of(self._members())
            self.__dict__["_group"] = group
            for part in [*vars(self).values()]:  # the operators that it is made of, if it is a copy
                if isinstance(part, LinearOperator):
                    part.prepare()
        return group

    def plan_ahead(self) -> None:
        """Compute now whatever the first calls of the operator and of its adjoint would compute."""
        for operator in (self, self.H):
            operator.prepare()
            _ = operator.takes_part, operator.domain.local_shape

    def __matmul__(self, other: LinearOperator) -> LinearOperator:
        """The product `A @ B`, which applies `B` first."""
        return Product(self, other)

    @property
    def group(self) -> transport.Group:
        """All workers that hold a part of the input or the output; `prepare` makes it."""
        if self._group is None:
            raise RuntimeError(
                f"{self} has no process group yet; call `prepare()` on all workers first"
            )
        return self._group

    @cached_property
    def takes_part(self) -> bool:
        """Whether this worker holds a part of the input or the output."""
        return transport.this_worker() in self._members()

    def _members(self) -> set[int]:
        return {*self.domain.partition.ranks, *self.codomain.partition.ranks}

    def check_dtype(self, dtype: torch.dtype, label: str) -> None:
        """Raise ValueError, in the name of `label`, if tensors of this dtype cannot be mapped."""

    def __repr__(self) -> str:
        return self._label

    @cached_property
    def _label(self) -> str:
        return f"{type(self).__name__}({self.domain} → {self.codomain})"

    @cached_property
    def _agreement(self) -> Agreement[AgreedOperator]:
        identity = f"{self._label} {self.domain.identity} {self.codomain.identity}"
        ranks = self.domain.partition.ranks
        return Agreement(
            self.group, self._label, ranks, self._conclude, identity, self._check_outputs
        )

    def _conclude(self, shapes: dict[int, Shape], meta: TensorMeta) -> AgreedOperator:
        for worker, shape in shapes.items():
            expected = self.domain.shape_on(worker)
            if shape != expected:
                raise ValueError(
                    f"{self._label}: worker {worker} expected a tensor of shape {expected}, "
                    f"got {shape}"
                )
        self.check_dtype(meta.dtype, self._label)
        return self, meta

    def _check_outputs(
        self, _: dict[int, Shape], meta: TensorMeta, outputs: SignaturesOfOutputs
    ) -> None:
        layout = self.codomain
        expected = {
            worker: layout.shape_on(worker) if worker in layout.partition.ranks else None
            for worker in outputs
        }
        check_outputs(self._label, expected, meta, outputs)


class Adjoint(LinearOperator):
    """The adjoint of an operator whose class defines it by a method."""

    def __init__(self, operator: LinearOperator) -> None:
        self.operator = operator
        self.domain, self.codomain = operator.codomain, operator.domain

    def _apply(self, x: Tensor) -> Tensor:
        return self.operator._apply_adjoint(x)

    @property
    def H(self) -> LinearOperator:
        return self.operator

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Adjoint) and self.operator == other.operator

    def __hash__(self) -> int:
        return hash((Adjoint, self.operator))


class Composed:
    """The properties that all products of operators have: domain, codomain and adjoint.

    The last factor is applied first: (A B).H = B.H A.H. Operators between layouts and operators
    between spaces both derive from it, and add the rest themselves.
    """

    factors: tuple[Any, ...]

    def __init__(self, *factors: Any) -> None:
        for left, right in pairwise(factors):
            if left.domain != right.codomain:
                raise ValueError(f"cannot compose: {self._mismatch(left, right)}")
        self.factors = factors
        self.domain, self.codomain = factors[-1].domain, factors[0].codomain

    @staticmethod
    def _mismatch(left: Any, right: Any) -> str:
        """The reason why two operators cannot be neighbors."""
        return f"{left} takes {left.domain}, {right} gives {right.codomain}"

    @cached_property
    def H(self) -> Any:
        return type(self)(*(factor.H for factor in reversed(self.factors)))


class Product(Composed, LinearOperator):
    """The product of operators between layouts: the movements of all factors, one by one."""

    def __init__(self, *factors: LinearOperator) -> None:
        super().__init__(*factors)
        self.prepare()

    def _apply(self, x: Tensor) -> Tensor:
        for factor in reversed(self.factors):
            # a worker without a part at the ends of a factor has none of the product there, either
            x = factor._apply(x) if factor.takes_part else x
        return x

    @cached_property
    def _label(self) -> str:
        return " @ ".join(map(repr, self.factors))

    def prepare(self) -> transport.Group:
        for factor in self.factors:
            factor.prepare()
        return super().prepare()

    def plan_ahead(self) -> None:
        super().plan_ahead()
        for factor in self.factors:
            factor.plan_ahead()

    def check_dtype(self, dtype: torch.dtype, label: str) -> None:
        for factor in self.factors:
            factor.check_dtype(dtype, label)

    @staticmethod
    def _mismatch(left: Any, right: Any) -> str:
        return (
            f"left expects {left.domain}, right gives {right.codomain}; "
            f"insert Move({right.codomain}, {left.domain})"
        )

    def _members(self) -> set[int]:
        return {rank for factor in self.factors for rank in factor._members()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Product) and self.factors == other.factors

    def __hash__(self) -> int:
        return hash((Product, self.factors))


class Entering(LinearOperator):
    """The identity, by which every run of compiled code agrees again on its inputs.

    Shapes are fixed when a call is compiled, by an agreement of all workers. The adjoint does
    nothing.

    Args:
        layout: the layout of the tensor.
        label: the call, in the words of its user.
        group: the workers that agree.
        agree: the function that agrees in a run, also on values, and returns the layout; None in
            the adjoint.
        module: the compiled module, whose settings are constants of the graph; None for an
            operator.
    """

    def __init__(
        self,
        layout: Layout,
        label: str,
        group: transport.Group,
        agree: Callable[[Tensor], Layout] | None,
        module: torch.nn.Module | None = None,
    ) -> None:
        self.domain = self.codomain = layout
        self.label, self.agree = label, agree
        self.module = None if module is None else weakref.ref(module)
        self.settings: list[Any] | None = None  # those of the first run
        self.__dict__["_group"] = group

    @property
    def H(self) -> LinearOperator:
        return Entering(self.domain, self.label, self.group, None)

    def _apply(self, x: Tensor) -> Tensor:
        if self.agree is None:
            return x
        if is_compiling():
            return placed(x, self)
        module = None if self.module is None else self.module()
        now = [] if module is None else settings_in(module)
        if self.settings is None:
            self.settings = now
        if now != self.settings:  # changed since the first run: the graph has the old ones
            pairs = zip_longest(now, self.settings, fillvalue=("a module", None))
            (name, new), (_, old) = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"{self.label}: {name} is {new}, but this call was compiled with {old}; restore "
                "it, or call torch.compiler.reset() on all workers to recompile"
            )
        layout = self.agree(x)
        if layout != self.domain:
            raise ValueError(
                f"{self.label}: this call was compiled for {self.domain}, not for {layout}; "
                "compiled calls have fixed shapes on all workers"
            )
        return x.clone()


T = TypeVar("T")


def agreed_in_graphs(
    agree: Callable[..., T], *given: Any, compiled: dict[Any, T] | None = None, key: Any = None
) -> tuple[T, Callable[..., T]]:
    """The conclusion for tensors without values, and a function that agrees again in a run.

    Args:
        agree: called with signatures; in a run also with the words about values.
        given: the tensors.
        compiled: keeps conclusions. A call is traced several times; if conclusions are kept,
            workers tell each other only once that they compile it.
        key: anything else that distinguishes conclusions.
    """
    signatures = tuple(map(Signature.of, given))
    known = {} if compiled is None else compiled
    if (key, signatures) not in known:
        with outside_of_graphs():
            found = agree(*(replace(each, compiles=True) for each in signatures))
            known[key, signatures] = found
    return known[key, signatures], partial(agree, *signatures)


def enter(
    agreement: Agreement[tuple[Layout, TensorMeta]], x: Tensor, module: torch.nn.Module | None
) -> tuple[Layout, TensorMeta, Tensor]:
    """The agreed layout and meta of a tensor, and the tensor, on which runs of a graph agree.

    Args:
        agreement: the agreement of the workers.
        x: this worker's part of the tensor.
        module: the compiled module; None for an operator.
    """
    if not is_traced():
        return *agreement.agree_on(x), x
    (layout, meta), again = agreed_in_graphs(agreement.agree_on, x, compiled=agreement.compiled)
    agrees = agreement.label, agreement.group, lambda _: again()[0]
    return layout, meta, Entering(layout, *agrees, module).apply(x, meta)


def enter_by_values(
    agree: Callable[..., T],
    given: tuple[Any, ...],
    said: Callable[[Any], Any],
    lies: Callable[[T], Layout],
    label: str,
    group: transport.Group,
    module: torch.nn.Module | None = None,
    compiled: dict[Any, T] | None = None,
    key: Any = None,
) -> tuple[T, Any]:
    """The conclusion about a tensor and its values, and the tensor, on which runs of a graph agree.

    Args:
        agree: called with the tensors, and with `said` where there are values.
        given: the tensor, and others whose values do not matter.
        said: a function that returns what this worker says of the values of the tensor.
        lies: a function from the conclusion to the layout of the tensor; it raises if something is
            wrong.
        label, group, module: as in `Entering`.
        compiled, key: as in `agreed_in_graphs`.
    """
    x, *_ = given
    if not is_traced():
        return agree(*given, said(x)), x
    agreed, again = agreed_in_graphs(agree, *given, compiled=compiled, key=key)
    entering = Entering(lies(agreed), label, group, lambda x: lies(again(said(x))), module)
    return agreed, entering.apply(x)


class Compiled(LinearOperator):
    """An operator in compiled code, whose every run agrees again.

    Shapes are fixed when a call is compiled, by an agreement of all workers. If a tensor changes
    its shape on some of them later, all raise.
    """

    def __init__(
        self, operator: LinearOperator, agreement: Agreement[AgreedOperator], signature: Signature
    ) -> None:
        self.operator, self.agreement, self.signature = operator, agreement, signature
        self.domain, self.codomain = operator.domain, operator.codomain
        operator.plan_ahead()
        self.plan_ahead()

    @property
    def H(self) -> LinearOperator:
        return self.operator.H

    def _apply(self, x: Tensor) -> Tensor:
        if is_compiling():
            return placed(x, self)
        operator, _ = self.agreement.agree_on(self.signature)
        if operator != self.operator:
            raise ValueError(
                f"{self.agreement.label}: this call was compiled for shapes other than "
                f"{operator.domain}; compiled calls have fixed shapes on all workers"
            )
        return operator._apply(x)


def apply_agreed(caller: Any, x: Tensor, gives: bool, out: Tensor | None = None) -> Tensor:
    """Apply the operator that the workers agree on in the agreement of `caller`.

    A worker that takes no part in it gets a clone, or what it passed for the output.
    """
    if out is not None and is_compiling():
        raise NotImplementedError("a movement with `out` cannot be compiled; omit `out`")
    if is_compiling():
        lengths = [len(range(length)) for length in x.shape]  # so that a compiler fixes them
        enabled = torch.is_grad_enabled()
        kind = lengths, x.dtype, x.device.type, x.requires_grad and enabled, not enabled
        name = _agreed_while_compiling(caller.handle, *kind)
        if not name:
            return x.clone()
        operator, meta = getattr(caller, name)
        return operator.apply(as_agreed(x, meta, gives), meta)
    caller.prepare()
    if not caller.takes_part:
        return x.clone() if out is None else out
    operator, meta = caller._agreement.agree_on(x, out)
    try:
        x = as_agreed(x, meta, gives)
        return operator.apply(x, meta) if out is None else operator._apply_into(x, out)
    except BaseException as error:  # others may still wait for this worker
        operator.group.give_up(error)
        raise


@constant_in_graphs
def _agreed_while_compiling(handle: str, lengths: list[int], *kind: Any) -> str:
    """Agree once, while all workers compile the call; the name of the attribute for the conclusion.

    It is empty on a worker that does not take part.
    """
    caller = object_of(handle)
    caller.prepare()
    if not caller.takes_part:
        return ""
    signature = Signature(tuple(lengths), *kind)
    operator, meta = caller._agreement.agree_on(replace(signature, compiles=True))
    # A string, as handles are, since a graph keeps it. The words distinguish signatures.
    name = "_agreed_" + "_".join(map(str, signature.words()))
    compiled = Compiled(operator, caller._agreement, signature)
    caller.__dict__[name] = compiled, meta
    # A graph finds it by its handle alone, and there may be another one with the same signature.
    caller.__dict__.setdefault("_agreed_in_graphs", []).append(compiled)
    return name


def record(
    operator: LinearOperator | LocalMap,
    x: Tensor,
    needs_grad: bool = False,
    anchor: Tensor | None = None,
) -> Tensor:
    """Apply `operator` so that autograd knows its derivatives.

    If one worker needs a gradient, all must take part in the backward exchange; an anchor that
    requires one makes this worker's autograd do so even if its own input requires none.
    """
    # Not x.requires_grad_(): x belongs to the user, who would find a gradient in it.
    if anchor is None and needs_grad and not x.requires_grad:
        anchor = ANCHOR
    if is_compiling():
        return _Apply.apply(x, anchor, operator)[0]
    is_recorded = x.requires_grad and torch.is_grad_enabled()
    if anchor is None and not is_recorded and not in_transform():
        if not torch.is_grad_enabled():
            y = operator._apply(x)
        else:
            with torch.no_grad():
                y = operator._apply(x)
        # An operator may return its input; the result of a call must not be the argument.
        return y.clone() if y is x else y
    return _ApplyAnyMode.apply(x, anchor, operator)[0]


def is_traced() -> bool:
    """Whether a call runs on tensors without values, for a graph of what it computes."""
    return is_compiling() and not torch.compiler.is_dynamo_compiling()


def is_derived(x: Tensor) -> bool:
    """Whether torch differentiates what is computed from a tensor, in backward or forward mode.

    In forward mode nothing requires a gradient, and one worker does not know which tensors have a
    tangent on the others: all of them are assumed to have one.
    """
    return in_transform() or (x.requires_grad and torch.is_grad_enabled())


class LocalMap(Protocol):
    """A linear map of this worker's tensor, made of functions that torch differentiates."""

    @property
    def H(self) -> LocalMap:
        """The adjoint."""
        ...

    def _apply(self, x: Tensor) -> Tensor: ...


def record_local(operator: LocalMap, x: Tensor) -> Tensor:
    """Apply a map that moves nothing so that its gradient is its adjoint, in one step.

    Compilers and function transforms (vmap, jacrev) see the functions that it is made of.
    """
    if is_compiling() or torch._C._are_functorch_transforms_active():
        return operator._apply(x)
    return record(operator, x)


class BilinearMap(Protocol):
    """A map that is linear in a tensor, and also in other tensors, its factors."""

    @property
    def group(self) -> transport.Group | None:
        """All workers between which data moves in a backward pass, if any does."""
        ...

    def _apply(self, x: Tensor, *factors: Tensor | None) -> Tensor: ...

    def vjp(
        self,
        grad: Tensor,
        anchor: Tensor | None,
        needs: Sequence[bool],
        x: Tensor,
        *factors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x and of the factors, recorded if gradients are enabled."""
        ...


def record_product(product: BilinearMap, x: Tensor, *factors: Tensor | None) -> Tensor:
    """Apply a product whose gradients are computed by its own `vjp`.

    It is for gradients that are better computed together than factor by factor: data travels while
    another gradient is computed. Forward mode, transforms and compilers cannot use it.
    """
    return _ApplyProduct.apply(x, None, product, *factors)[0]


class Several(Protocol):
    """A linear map of several tensors to several; None is a zero that was not computed."""

    @property
    def group(self) -> transport.Group:
        """All workers between which data moves."""
        ...

    @property
    def H(self) -> Several:
        """The adjoint."""
        ...

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the tensors that are mapped."""
        ...

    def _apply(self, *xs: Tensor | None) -> tuple[Tensor | None, ...]: ...


def record_several(
    operator: Several, xs: Tensors, anchor: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Apply `operator` so that autograd knows its derivatives.

    The adjoint is applied once, when the gradients of all results are there. Forward mode,
    transforms and Dynamo cannot use it; tracing of tensors without values can.
    """
    needs_grad = any(x is not None and x.requires_grad for x in xs) and torch.is_grad_enabled()
    if anchor is None and not needs_grad:
        with torch.no_grad():
            return operator._apply(*xs)
    found: tuple[Tensor | None, ...] = _ApplySeveral.apply(operator, anchor, *xs)
    return found[:-1]


class DifferentiableMap(Protocol):
    """A map of several tensors, or None, to several, with gradients of its own.

    Attributes:
        first_kept: the index of the first result that `vjp` gets, with all behind it. Results that
            are not kept may be freed, or changed in place.
        num_unread: how many inputs, the last ones, have values on which no gradient depends. They
            may be changed in place, too.
    """

    @property
    def first_kept(self) -> int: ...

    @property
    def num_unread(self) -> int: ...

    @property
    def group(self) -> transport.Group:
        """All workers between which data moves."""
        ...

    def _apply(self, *xs: Tensor | None) -> tuple[Tensor, ...]: ...

    def vjp(
        self, grads: Tensors, needs: Sequence[bool], xs: Tensors, ys: Sequence[Tensor]
    ) -> Tensors:
        """The gradients of the inputs `xs` that require one, recorded if gradients are enabled.

        `ys` are the results that are kept. None instead of a gradient of a result is a zero.
        """
        ...


def record_map(function: DifferentiableMap, *xs: Tensor | None) -> tuple[Tensor, ...]:
    """Apply a map whose gradients are computed by its own `vjp`.

    Inputs and some results are saved, and nothing in between. Forward mode, transforms and
    compilers cannot use it.
    """
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in xs):
        with torch.no_grad():
            return function._apply(*xs)
    found: tuple[Tensor, ...] = _ApplyMap.apply(function, *xs)
    return found


def _number_of_call(operator: Any) -> int:
    """The number of the last call that all workers of an operator agreed on.

    It is not that of this worker's last agreement, in which the others may not have taken part.
    """
    if is_compiling():
        return 0
    if isinstance(operator, LinearOperator):
        return (operator._group or operator.prepare()).num_calls
    group = getattr(operator, "group", None)  # an operator that moves nothing has none
    return 0 if group is None else group.num_calls


def _values_of(x: Any) -> Any:
    """A tensor as a plain one, of which only the values matter.

    Hooks may return a subclass as a gradient, and transforms of `torch.func` unwrap one for an
    operator. Subclasses that compute differently, such as fake tensors, are kept, and so is None.
    """
    kind = type(x)
    if kind is Tensor or x is None or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return x
    return x.as_subclass(Tensor)


def _all_values(xs: Iterable[Any]) -> list[Any]:
    """Plain tensors for several tensors, most of which are plain already."""
    return [x if type(x) is Tensor or x is None else _values_of(x) for x in xs]


class _Apply(torch.autograd.Function):
    """The gradient of A is A.H, which is itself recorded, so that derivatives of every order exist.

    Besides the result there is an empty token. The gradient depends on it: if the loss of one
    worker is linear, its gradient does not depend on the result, and yet its second backward
    pass must go through here, as that of the other workers does.
    """

    @staticmethod
    def forward(
        x: Tensor, anchor: Tensor | None, operator: LinearOperator
    ) -> tuple[Tensor, Tensor]:
        y = operator._apply(x)
        return y, y.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.operator = inputs[2]
        # The number of the call distinguishes a backward exchange from those of other calls.
        ctx.call = _number_of_call(ctx.operator)
        # Dynamo, which traces this code, cannot read context variables; it makes no trace itself.
        ctx.trace = None if torch.compiler.is_dynamo_compiling() else current_trace.get()
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors  # read on all workers: a checkpoint recomputes at this point
        anchor = token if torch.is_grad_enabled() else None
        # movements of a backward pass are numbered on from the forward ones
        if ctx.trace is not None:
            with setting(current_trace, ctx.trace):
                return record(ctx.operator.H, grad, anchor=anchor), None, None
        if is_compiling():
            return record(ctx.operator.H, grad, anchor=anchor), None, None
        grad = _values_of(grad)
        # There is no agreement in a backward pass: the number keeps calls apart.
        with transport.Tagged(ctx.call):
            return record(ctx.operator.H, grad, anchor=anchor), None, None


def operator_of(node: Any) -> Any:
    """The operator that a node of autograd's graph applies, if it was recorded here; else None."""
    # by the class: a user's function may have attributes with these names, too
    if not issubclass(getattr(node, "_forward_cls", object), _Apply):
        return None
    names = ("operator", "product", "function")
    return next(getattr(node, name) for name in names if hasattr(node, name))


class _ApplyAnyMode(_Apply):
    """`_Apply` with the forward-mode rule, which compilers do not accept."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply without binding arguments by name, which takes longer than everything else."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

    @staticmethod
    def forward(
        x: Tensor, anchor: Tensor | None, operator: LinearOperator
    ) -> tuple[Tensor, Tensor]:
        y = operator._apply(_values_of(x))
        return y, y.new_empty(0)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        result = record(ctx.operator, tangent)
        return result, result.new_empty(0)


class _ApplyProduct(_ApplyAnyMode):
    """`_Apply` for a product, which computes the gradients of its factors itself."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, anchor: None, product: BilinearMap, *factors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        y = product._apply(*_all_values((x, *factors)))
        return y, y.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, _, ctx.product, *factors = inputs
        ctx.call = _number_of_call(ctx.product)
        ctx.save_for_backward(output[1], x, *factors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        token, *kept = ctx.saved_tensors
        anchor = token if torch.is_grad_enabled() else None
        with transport.Tagged(ctx.call):
            x, *factors = ctx.product.vjp(_values_of(grad), anchor, ctx.needs_input_grad, *kept)
        return x, None, None, *factors


class _ApplySeveral(_ApplyAnyMode):
    """`_Apply` for a map of several tensors, some of which may be missing."""

    @staticmethod
    def forward(  # type: ignore[override]
        operator: Several, anchor: Tensor | None, *xs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return *operator._apply(*xs), operator.like.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        ctx.operator = inputs[0]
        ctx.call, ctx.trace = _number_of_call(ctx.operator), current_trace.get()
        ctx.set_materialize_grads(False)  # the others are told that a missing gradient is missing
        ctx.save_for_backward(output[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        anchor = token if torch.is_grad_enabled() else None
        with transport.Tagged(ctx.call), setting(current_trace, ctx.trace):
            found = record_several(ctx.operator.H, tuple(_all_values(grads[:-1])), anchor)
        needs = ctx.needs_input_grad[2:]  # a tensor that is missing here may exist on other workers
        return None, None, *(x if need else None for x, need in zip(found, needs, strict=True))


class _ApplyMap(_ApplyAnyMode):
    """`_Apply` for a map of several tensors that is not linear."""

    @staticmethod
    def forward(  # type: ignore[override]
        function: DifferentiableMap, *xs: Tensor | None
    ) -> tuple[Tensor, ...]:
        return function._apply(*_all_values(xs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.function, *xs = inputs
        ctx.call = _number_of_call(ctx.function)
        ctx.num_inputs = len(xs)
        ctx.set_materialize_grads(False)
        for k in range(len(xs) - ctx.function.num_unread, len(xs)):
            xs[k] = None if xs[k] is None else xs[k].data  # which autograd allows to be changed
        ctx.save_for_backward(*xs, *output[ctx.function.first_kept :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, n = ctx.saved_tensors, ctx.num_inputs
        with transport.Tagged(ctx.call):
            found = ctx.function.vjp(
                _all_values(grads), ctx.needs_input_grad[1:], kept[:n], kept[n:]
            )
        return None, *found
