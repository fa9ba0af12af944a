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
    in_forward_mode,
    in_transform,
)
from tessel.core.context import is_compiling, setting
from tessel.core.graph import current_trace, outside_of_graphs, placed, settings_in
from tessel.core.handles import HasHandle, constant_in_graphs, object_of
from tessel.core.layout import Layout, Shape
from tessel.core.partition import Outline
from tessel.transport import Again

AgreedOperator = tuple["LinearOperator", TensorMeta]
Tensors = Sequence[Tensor | None]  # None is a zero that nobody computed, or left out
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
    _again: Again | None = None  # makes what was made before once more, in one call of the engine
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
        """Apply the operator without asking the others.

        Every worker must pass what `domain` says, and all or none an input that needs a gradient.
        """
        if self._group is None:
            self.prepare()
        if not self.takes_part:
            if not isinstance(self.domain.partition, Outline):
                return x
            # This worker holds nothing and follows without values: x has none, and so has this.
            # As a sum it hangs on x in autograd's graph, as it does where there are values.
            shape = self.codomain.local_shape
            return x.sum(dtype=x.dtype).expand(shape) if x.requires_grad else x.new_empty(shape)
        if x.shape != self.domain.local_shape:
            raise ValueError(
                f"{self._label}: worker {transport.this_worker()} expected a tensor of shape "
                f"{self.domain.local_shape}, got {tuple(x.shape)}"
            )
        y = record(self, x, meta is not None and meta.needs_grad)
        if meta is not None and meta.has_tangent and not in_forward_mode():
            self._apply(torch.zeros_like(x))  # others move tangents: so does this worker, a zero
        return y

    def _apply_into(self, x: Tensor, out: Tensor) -> Tensor:
        """Write the output to `out`, which it fits, and give it; nothing is recorded."""
        with torch.no_grad():
            return out.copy_(self._apply(x))

    def prepare(self) -> transport.Group:
        """Make the group of the operator, all workers of the job together, and give it.

        Constructors do so, and the first call of an operator that has none: of a copy, or one that
        was loaded, perhaps by this worker alone.
        """
        group = self._group
        if group is None:
            # not by an attribute: moves are frozen
            with outside_of_graphs() if is_traced() else nullcontext():
                group = transport.group_of(self._members())
            self.__dict__["_group"] = group
            for part in [*vars(self).values()]:  # those that it is made of, if it is a copy
                if isinstance(part, LinearOperator):
                    part.prepare()
        return group

    def plan_ahead(self) -> None:
        """Work out now what the first calls of the operator and of its adjoint would work out."""
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
    """The adjoint of an operator that gives its own as a method."""

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
    """What a product is of operators that have a domain, a codomain and an adjoint.

    The last factor is applied first: (A B).H = B.H A.H. Operators between layouts and operators
    between spaces share this; what their products do beyond it is their own.
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
        """Why these two cannot be neighbours."""
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
            # who has no part of a factor's ends has nothing of the product there, either
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
    """The identity, by which every run of compiled code agrees again on what enters it.

    Shapes are fixed when a call is compiled, by an agreement of all workers. In the adjoint nothing
    is done.

    Args:
        layout: of the tensor.
        label: of the call, in the words of its user.
        group: who agrees.
        agree: what agrees in a run, by its values, too, and gives the layout; None in the adjoint.
        module: what is compiled: its settings are in the graph as they were; an operator has none.
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
        if now != self.settings:  # since the first run: the graph has the old one
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
    """What workers conclude of tensors without values, and what agrees again in a run.

    Args:
        agree: called with signatures; in a run also with what is said of values then.
        given: the tensors.
        compiled: keeps conclusions. A call is traced several times; that it is compiled, workers
            tell each other once, if these are kept.
        key: what else tells conclusions apart there.
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
    """How a tensor lies and its kind, as all agree, and the tensor, on which runs of a graph agree.

    Args:
        agreement: of the workers.
        x: what this worker has of the tensor.
        module: what is compiled; None for an operator.
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
    """What workers conclude of a tensor and its values, and the tensor; runs of a graph agree, too.

    Args:
        agree: called with what is given, and with what is said of values where these are.
        given: the tensor, and others of which no values count.
        said: what this worker says of the values of the tensor.
        lies: from what they conclude, how the tensor lies; raises for what does not fit.
        label, group, module: as of `Entering`.
        compiled, key: as of `agreed_in_graphs`.
    """
    x, *_ = given
    if not is_traced():
        return agree(*given, said(x)), x
    agreed, again = agreed_in_graphs(agree, *given, compiled=compiled, key=key)
    entering = Entering(lies(agreed), label, group, lambda x: lies(again(said(x))), module)
    return agreed, entering.apply(x)


class Compiled(LinearOperator):
    """An operator in compiled code, whose every run agrees again.

    Shapes are fixed when a call is compiled, by an agreement of all workers. A tensor that changed
    on some of them only then raises on all.
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
    """Agree once, while all workers compile the call; the name of the conclusion's attribute.

    Empty on a worker that takes no part.
    """
    caller = object_of(handle)
    caller.prepare()
    if not caller.takes_part:
        return ""
    signature = Signature(tuple(lengths), *kind)
    operator, meta = caller._agreement.agree_on(replace(signature, compiles=True))
    # Text, as handles are: what a graph keeps of this call. The words tell signatures apart.
    name = "_agreed_" + "_".join(map(str, signature.words()))
    compiled = Compiled(operator, caller._agreement, signature)
    caller.__dict__[name] = compiled, meta
    # A graph knows it by its handle alone, and there may be another of the same signature.
    caller.__dict__.setdefault("_agreed_in_graphs", []).append(compiled)
    return name


def record(
    operator: LinearOperator | LocalMap,
    x: Tensor,
    needs_grad: bool = False,
    anchor: Tensor | None = None,
) -> Tensor:
    """Apply `operator` so that autograd knows its derivatives.

    When some worker needs a gradient all must take part in the backward exchange; an anchor that
    needs one makes this worker's autograd do so even if its own input needs none.
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
        # An operator may give its input back; the result of a call must not be the argument.
        return y.clone() if y is x else y
    return _ApplyAnyMode.apply(x, anchor, operator)[0]


def is_traced() -> bool:
    """Whether a call runs on tensors without values, for a graph of what it computes."""
    return is_compiling() and not torch.compiler.is_dynamo_compiling()


def is_derived(x: Tensor) -> bool:
    """Whether torch derives what is computed from a tensor, in backward or in forward mode.

    In forward mode nothing requires a gradient, and which tensors have a tangent one worker cannot
    say for all: all of them are taken to have one.
    """
    return in_transform() or (x.requires_grad and torch.is_grad_enabled())


class LocalMap(Protocol):
    """What maps this worker's tensor, linearly, by functions that torch can derive itself."""

    @property
    def H(self) -> LocalMap:
        """The adjoint."""
        ...

    def _apply(self, x: Tensor) -> Tensor: ...


def record_local(operator: LocalMap, x: Tensor) -> Tensor:
    """Apply what moves nothing so that its gradient is its adjoint, in one step.

    Compilers and function transforms (vmap, jacrev) look at the functions that it is made of.
    """
    if is_compiling() or torch._C._are_functorch_transforms_active():
        return operator._apply(x)
    return record(operator, x)


class BilinearMap(Protocol):
    """What maps a tensor, linearly, with the help of other tensors that it is linear in, too."""

    @property
    def group(self) -> transport.Group | None:
        """All workers between whom something moves in a backward pass, if anything does."""
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
        """The gradients of x and of the factors, recorded if gradients are."""
        ...


def record_product(product: BilinearMap, x: Tensor, *factors: Tensor | None) -> Tensor:
    """Apply a product so that autograd gets the gradients that it gives itself.

    For what can be done better than factor by factor: data travels while another gradient is
    computed. Not for forward mode, transforms or compilers.
    """
    return _ApplyProduct.apply(x, None, product, *factors)[0]


class Several(Protocol):
    """What maps several tensors to several, linearly; None is a zero that nobody computed."""

    @property
    def group(self) -> transport.Group:
        """All workers between whom something moves."""
        ...

    @property
    def H(self) -> Several:
        """The adjoint."""
        ...

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype and device of those that are mapped."""
        ...

    def _apply(self, *xs: Tensor | None) -> tuple[Tensor | None, ...]: ...


def record_several(
    operator: Several, xs: Tensors, anchor: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Apply `operator` so that autograd knows its derivatives.

    The adjoint is applied once, when the gradients of all results are there. Not for forward mode,
    transforms or Dynamo; what traces tensors without values may look at it.
    """
    needs_grad = any(x is not None and x.requires_grad for x in xs) and torch.is_grad_enabled()
    if anchor is None and not needs_grad:
        with torch.no_grad():
            return operator._apply(*xs)
    found: tuple[Tensor | None, ...] = _ApplySeveral.apply(operator, anchor, *xs)
    return found[:-1]


class DifferentiableMap(Protocol):
    """What maps several tensors, or None, to several, and gives the gradients itself.

    Attributes:
        first_kept: of the results, the first that `vjp` gets, and all behind it. What is not kept
            may be freed, or changed in place.
    """

    @property
    def first_kept(self) -> int: ...

    @property
    def group(self) -> transport.Group:
        """All workers between whom something moves."""
        ...

    def _apply(self, *xs: Tensor | None) -> tuple[Tensor, ...]: ...

    def vjp(
        self, grads: Tensors, needs: Sequence[bool], xs: Tensors, ys: Sequence[Tensor]
    ) -> Tensors:
        """The gradients of the inputs `xs` that need one, recorded if gradients are.

        `ys` are the results that are kept. None in the place of a gradient of a result is a zero.
        """
        ...


def record_map(function: DifferentiableMap, *xs: Tensor | None) -> tuple[Tensor, ...]:
    """Apply a map so that autograd gets the gradients that it gives itself.

    It keeps inputs and some results, and nothing in between. Not for forward mode, transforms or
    compilers.
    """
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in xs):
        with torch.no_grad():
            return function._apply(*xs)
    found: tuple[Tensor, ...] = _ApplyMap.apply(function, *xs)
    return found


def _number_of_call(operator: Any) -> int:
    """The number of the last call that the workers of an operator agreed on, all of them.

    It is not that of the last agreement of this worker, which the others may have had no part in.
    """
    if is_compiling():
        return 0
    if isinstance(operator, LinearOperator):
        return (operator._group or operator.prepare()).num_calls
    group = getattr(operator, "group", None)  # what moves nothing has none
    return 0 if group is None else group.num_calls


def _values_of(x: Any) -> Any:
    """A tensor as a plain one, of which only the values count.

    Hooks may return a subclass as a gradient, and transforms of `torch.func` unwrap one for an
    operator. A kind that computes in a way of its own, as fake tensors, stays; and so does None.
    """
    kind = type(x)
    if kind is Tensor or x is None or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return x
    return x.as_subclass(Tensor)


def _all_values(xs: Iterable[Any]) -> list[Any]:
    """The same of several, most of which are plain."""
    return [x if type(x) is Tensor or x is None else _values_of(x) for x in xs]


class _Apply(torch.autograd.Function):
    """The gradient of A is A.H, itself recorded, so that derivatives of every order exist.

    Beside the result there is an empty token. The gradient hangs on it: where the loss of one
    worker is linear its gradient does not depend on the result, and still its second backward
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
        # By the number of its call a backward exchange is told apart from those of other calls.
        ctx.call = _number_of_call(ctx.operator)
        # Dynamo, which reads this code, knows no variables of a context; it makes no trace itself.
        ctx.trace = None if torch.compiler.is_dynamo_compiling() else current_trace.get()
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors  # asked for on all workers: a checkpoint recomputes then
        anchor = token if torch.is_grad_enabled() else None
        if ctx.trace is not None:  # movements of a backward pass are numbered on from those before
            with setting(current_trace, ctx.trace):
                return record(ctx.operator.H, grad, anchor=anchor), None, None
        if is_compiling():
            return record(ctx.operator.H, grad, anchor=anchor), None, None
        grad = _values_of(grad)
        # Backward passes are not agreed on: that of another call must not answer this one.
        with transport.Tagged(ctx.call):
            return record(ctx.operator.H, grad, anchor=anchor), None, None


def operator_of(node: Any) -> Any:
    """What a node of autograd's graph applies, if it was recorded here; None for all others."""
    # by the class: a function of the user's may have attributes of these names, too
    if not issubclass(getattr(node, "_forward_cls", object), _Apply):
        return None
    names = ("operator", "product", "function")
    return next(getattr(node, name) for name in names if hasattr(node, name))


class _ApplyAnyMode(_Apply):
    """The same with the forward-mode rule, which compilers do not take."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """The same without binding arguments by name, which takes longer than all the rest."""
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
    """The same for a product, which gives the gradients of its factors itself."""

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
    """The same for a map of several tensors, some of which may be missing."""

    @staticmethod
    def forward(  # type: ignore[override]
        operator: Several, anchor: Tensor | None, *xs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return *operator._apply(*xs), operator.like.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        ctx.operator = inputs[0]
        ctx.call, ctx.trace = _number_of_call(ctx.operator), current_trace.get()
        ctx.set_materialize_grads(False)  # a missing gradient is told to the others as missing
        ctx.save_for_backward(output[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        anchor = token if torch.is_grad_enabled() else None
        with transport.Tagged(ctx.call), setting(current_trace, ctx.trace):
            found = record_several(ctx.operator.H, tuple(_all_values(grads[:-1])), anchor)
        needs = ctx.needs_input_grad[2:]  # what was missing may be there on other workers
        return None, None, *(x if need else None for x, need in zip(found, needs, strict=True))


class _ApplyMap(_ApplyAnyMode):
    """The same for a map of several tensors that is not linear."""

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
        ctx.save_for_backward(*xs, *output[ctx.function.first_kept :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, n = ctx.saved_tensors, ctx.num_inputs
        with transport.Tagged(ctx.call):
            found = ctx.function.vjp(
                _all_values(grads), ctx.needs_input_grad[1:], kept[:n], kept[n:]
            )
        return None, *found
