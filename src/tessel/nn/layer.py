"""Layer: the common base of layers over partitioned tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from typing import Any, Self

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from tessel import transport
from tessel.core.agreement import Agreement, TensorMeta, agree, entered
from tessel.core.graph import fix_lengths, in_graphs
from tessel.core.handles import HasHandle, constant_in_graphs
from tessel.core.layout import Layout, Shape
from tessel.core.linop import enter
from tessel.core.partition import Partition
from tessel.core.shared import equalize
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.table import UnsupportedError, as_spread, opened, parts, running
from tessel.tensor.tensor import is_spread
from tessel.transport import kept_in_job

AgreedInput = tuple[Layout, TensorMeta]
Result = tuple[Tensor, Layout]

# Of the converted model that runs, if one worker has all of its tensors: its conversion, and the
# module of DDP that called it. Its layers are then torch's own.
alone: ContextVar[tuple[Any, Any] | None] = ContextVar("alone", default=None)


def parts_agreement(
    group: transport.Group, P_x: Partition, label: str, identity: str
) -> Agreement[AgreedInput]:
    """The agreement on the layout of a tensor on `P_x` whose parts workers pass."""

    def conclude(shapes: dict[int, Shape], meta: TensorMeta) -> AgreedInput:
        return Layout.from_local_shapes(P_x, shapes), meta

    return Agreement(group, label, P_x.ranks, conclude, identity)


def fix_shapes(arguments: Any) -> bool:
    """Let a compiler take the lengths of tensors for constants; False where a tensor is spread."""
    for each in pytree.tree_leaves(arguments):
        if is_spread(each):
            return False
        if isinstance(each, Tensor):
            fix_lengths(each)
    return True


def refuse_wrapped(x: Any, name: str) -> None:
    """Raise if a transform of `torch.func` stands between a layer and the part of its input."""
    if is_spread(x) and not isinstance(x, SpreadTensor):
        raise UnsupportedError(
            f"{name} got a spread tensor of shape {tuple(x.shape)} that was passed to a transform "
            "of torch.func, which hides its part: let the transformed function close over the "
            "tensor, or differentiate with torch.autograd.grad"
        )


@constant_in_graphs
def is_in_model() -> bool:
    return running.get() is not None


def compute_spread(compute: Callable[..., Result], x: Tensor, *args: Any, **settings: Any) -> Any:
    """Apply a function of parts to a spread tensor; it may return several.

    Separate copies are a pending sum. It is computed first, since a bias must be added to it once.
    """
    refuse_wrapped(x, "a layer that computes with parts")
    assert isinstance(x, SpreadTensor)
    y, layout = compute(*opened(x.move_to(x.layout.summed)), *args, **settings)
    if isinstance(y, tuple):
        return tuple(SpreadTensor(each, layout) for each in y)
    return SpreadTensor(y, layout)


def copied(layer: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a layer, without what is derived, also of one that torch has parametrized.

    Torch would copy all attributes of that, groups of workers and its handle among them.
    """
    kind: Any = type(layer)
    memo[id(layer)] = new = kind.__new__(kind)
    # a parametrized class has a `__getstate__` that raises, so that no file gets its state
    state = HasHandle.__getstate__(layer) if is_parametrized(layer) else layer.__getstate__()
    new.__setstate__(deepcopy(state, memo))
    return new


class Layer(HasHandle):
    """A mixin with which a torch layer works on tensors that are spread over a partition.

    A subclass derives from this and from torch's own layer, whose arguments, parameters and
    `state_dict` it keeps. It is a layout and torch's function: workers agree on the shapes of their
    parts, which then form a spread tensor, and torch's own layer is called with it. Inside a
    converted model tensors are already spread.
    """

    P_x: Partition
    is_converted = False  # from torch's layer, in a model
    _group: transport.Group | None = None
    _takes_part: bool  # whether this worker is one of the group
    __signature__: inspect.Signature | None
    _number: int  # the number of the call that made the group: distinguishes equal layers
    _derived = HasHandle._derived | {"_agreements", "_group", "_number", "_takes_part", "_traces"}

    __deepcopy__ = copied

    def __init__(self, P_x: Partition, *args: Any, **settings: Any) -> None:
        with self.refused_together(P_x):
            super().__init__(*args, **settings)  # torch's own layer
        self.place_on(P_x)
        self.agree_on_form()
        self.equalize_parameters()

    def __init_subclass__(cls, **settings: Any) -> None:
        """Make the signature of a layer name all arguments: those of torch's layer, and its own."""
        super().__init_subclass__(**settings)
        kinds = [each for each in cls.__mro__ if issubclass(each, torch.nn.Module)]
        theirs = next((each for each in kinds if not issubclass(each, Layer)), None)
        if theirs in (None, torch.nn.Module):  # a model defines all of its arguments itself
            return
        if any(issubclass(each, Layer) and issubclass(each, theirs) for each in kinds[1:]):
            # The class of a user, or of torch, which makes one of each layer that it parametrizes
            # or splits: it may take any arguments.
            if "__init__" in vars(cls):
                cls.__signature__ = None  # rather than that of its base
            return
        # `help` and editors would see *args of `__init__` above. Signatures of functions, not of
        # classes, which inherit `__signature__` from their bases.
        own, torchs = (
            list(inspect.signature(each.__init__).parameters.values())[1:] for each in (cls, theirs)
        )
        # its own first arguments, all of torch's, and its own keyword-only ones
        lead = [each for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
        named = [each for each in own if each.kind is each.KEYWORD_ONLY]
        taken = {each.name for each in (*lead, *named)}
        between = [each for each in torchs if each.name not in taken]
        # keyword-only arguments must be last; a stable sort keeps the rest
        between.sort(key=lambda each: each.kind is each.KEYWORD_ONLY)
        cls.__signature__ = inspect.Signature([*lead, *between, *named])

    @contextmanager
    def refused_together(self, P_x: Partition) -> Iterator[None]:
        """Let all workers raise if a constructor refuses its arguments on one.

        The others make the groups of the layer, and agree on its form: so does this worker, with
        the text of its error, which differs from theirs.
        """
        try:
            yield
        except Exception as error:  # of torch's layer, or of a subclass, which may raise anything
            if isinstance(P_x, Partition):
                self.place_on(P_x)
                workers = self.prepare().workers
                agree(Partition(workers, (len(workers),)), f"{type(self).__name__}: {error}")
            raise

    def place_on(self, P_x: Partition) -> None:
        """Make the layer work on tensors that are spread over `P_x`."""
        # Groups are made by all workers of the job together: here, where all of them make the
        # layer, rather than in a call.
        self.P_x, self._group = P_x, None
        self.prepare()

    @classmethod
    def from_torch(cls, layer: torch.nn.Module, P_x: Partition) -> Self:
        """The same layer over `P_x`: it shares parameters, buffers, hooks and flags with `layer`.

        The parameters of all workers are taken to be equal.
        """
        new: Self = cls.__new__(cls)  # not __init__, which would draw parameters
        new.__dict__.update(
            {name: value for name, value in layer.__dict__.items() if name != "handle"}
        )
        new.place_on(P_x)
        new.is_converted = True
        return new

    def agree_on_form(self, **more: Any) -> None:
        """Raise on all workers if they create different layers, before parameters are sent.

        Args:
            more: settings of the layer that are not among its attributes.
        """
        assert isinstance(self, torch.nn.Module)
        group = self.prepare()
        if not self._takes_part or group.size == 1:
            return
        # The settings of torch's layer are plain attributes; those of losses are not in their
        # `repr`.
        plain = int | float | str | tuple | None
        given = more | {
            name: value
            for name, value in sorted(vars(self).items())
            if isinstance(value, plain) and name[0] != "_" and name != "handle"
        }
        form = {name: (tuple(p.shape), p.dtype) for name, p in self.named_parameters(recurse=False)}
        over = ", ".join(map(str, self.partitions()))
        call = f"{type(self).__name__} over {over} with {given} and parameters {form}"
        agree(Partition(group.workers, (group.size,)), call)
        self._number = group.num_calls

    def equalize_parameters(self) -> None:
        """Give all workers the parameters of the first."""
        assert isinstance(self, torch.nn.Module)
        equalize(self.parameters(recurse=False), self.P_x)

    def can_be_traced(self, *args: Any, **settings: Any) -> bool:
        """Whether a compiler may have this call in its graph, in which shapes are fixed then."""
        return fix_shapes((args, settings)) and not is_in_model()

    @in_graphs()
    def forward(self, input: Tensor, *args: Any, **settings: Any) -> Tensor:
        group = self._group or self.prepare()
        if self.is_converted and len(group.workers) == 1 and alone.get() is not None:
            return self.torch_forward(input, *args, **settings)
        # Spread tensors have a layout. Only for parts an agreement is needed, since each worker
        # knows its own.
        model = running.get()
        if model is not None and not is_spread(input):
            input = as_spread(input, model)  # inside a model, plain tensors are whole
        if is_spread(input):
            return self.of_spread(input, *args, **settings)
        if not self._takes_part:
            return self.placeholder(input)
        if len(group.workers) == 1:  # nobody to agree with
            layout = lies(self.P_x, ((self.P_x.ranks[0], tuple(input.shape)),))
            if self.fits_torch(layout, *args):
                return self.torch_forward(input, *args, **settings)
        else:
            assert isinstance(self, torch.nn.Module)
            layout, meta, input = enter(self._agreement(), input, self)
            input = entered(input, meta, not layout.is_outside)
        y, _ = self.compute(input, layout, *args, **settings)
        return y

    def of_spread(self, x: Tensor, *args: Any, **settings: Any) -> Any:
        """The result of the layer for a spread tensor."""
        return self.torch_forward(x, *args, **settings)

    def fits_torch(self, layout: Layout, *others: Any) -> bool:
        """Whether a single worker may call torch's own layer with these arguments."""
        return True

    def compute(self, x: Tensor, layout: Layout, *args: Any, **settings: Any) -> Result:
        """This worker's part of the result, and its layout."""
        if layout.summed is not layout:
            raise NotImplementedError(
                f"{type(self).__name__} expected a tensor that is stored once, or as one shared "
                f"value, got separate copies in {layout}"
            )
        y = self.torch_forward(SpreadTensor(x, layout), *args, **settings)
        return (parts(y), y[0].layout) if isinstance(y, tuple) else opened(y)

    def placeholder(self, x: Tensor) -> Any:
        """The result on a worker that takes no part."""
        return x.clone()

    def torch_forward(self, x: Tensor, *args: Any, **settings: Any) -> Any:
        """The result of torch's own layer."""
        return super().forward(x, *args, **settings)  # type: ignore[misc]

    def _agreement(self) -> Agreement[AgreedInput]:
        """One for each state of the layer, in which all workers must be alike."""
        assert isinstance(self, torch.nn.Module)
        # The state of this worker; the state that must be equal on all is in the identity.
        state = [self.training, torch.is_grad_enabled()]
        # not self.parameters(recurse=False), which takes as long as the exchange does
        for each in self._parameters.values():
            state.append(each is not None and each.requires_grad)
        agreements: dict[Any, Agreement[AgreedInput]] = self.__dict__.setdefault("_agreements", {})
        key = tuple(state)
        if key not in agreements:
            needs, is_off = needs_of(each for each in self._parameters.values() if each is not None)
            mode = "training" if self.training else "evaluation"
            # with its number: of two equal layers, workers must call the same one
            label = f"{self!r} (number {self._number}) in {mode}"
            label += ", under torch.no_grad()" if is_off else ""
            identity = f"{label} {(self.training, is_off, *needs)}"
            agreements[key] = parts_agreement(self.prepare(), self.P_x, label, identity)
        return agreements[key]

    def prepare(self) -> transport.Group:
        """Make and return the group, all workers together, here or in the first call of a copy."""
        if self._group is None:
            workers = {rank for each in self.partitions() for rank in each.ranks}
            self._group = transport.group_of(workers)
            # once, since each lookup of this worker's rank calls torch.distributed
            self._takes_part = transport.this_worker() in self._group.workers
            self._number = self._group.num_calls
        return self._group

    def partitions(self) -> Iterable[Partition]:
        """All partitions whose workers take part."""
        return (self.P_x,)

    def extra_repr(self) -> str:
        assert isinstance(self, torch.nn.Module)
        own = super().extra_repr()  # type: ignore[misc]
        return f"{self.P_x}, {own}" if own else f"{self.P_x}"


class ComputingLayer(Layer):
    """A layer that computes with parts in its own way.

    It implements `compute`, which decides about moves by the layout alone, since that is the same
    on all workers.
    """

    def of_spread(self, x: Tensor, *args: Any, **settings: Any) -> Any:
        return compute_spread(self.compute, x, *args, **settings)

    def compute(self, x: Tensor, layout: Layout, *args: Any, **settings: Any) -> Result:
        raise NotImplementedError(f"{type(self).__name__} must implement `compute`")


def needs_of(parameters: Iterable[Tensor]) -> tuple[list[bool], bool]:
    """Which parameters currently get gradients, and whether `torch.no_grad()` prevents some."""
    could = [each.requires_grad for each in parameters]
    derives = torch.is_grad_enabled()
    return [each and derives for each in could], any(could) and not derives


@kept_in_job
def lies(partition: Partition, parts: tuple[tuple[int, Shape], ...]) -> Layout:
    """The layout of a tensor whose parts have these shapes, by worker."""
    return Layout.from_local_shapes(partition, dict(parts))
