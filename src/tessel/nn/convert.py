"""`distribute_module`: converts a torch model into one that computes with spread tensors."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, zip_longest
from operator import call, is_
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx import GraphModule, Proxy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from tessel.core.agreement import agree, entered, tell
from tessel.core.checksum import checksum
from tessel.core.context import setting
from tessel.core.graph import current_trace, in_graphs, outside_of_graphs
from tessel.core.handles import HasHandle, constant_in_graphs, object_of
from tessel.core.layout import Layout, zero_volume_tensor
from tessel.core.linop import enter, is_traced
from tessel.core.partition import Partition
from tessel.core.shared import equalize
from tessel.distributed.shardings import state_of
from tessel.errors import check_choice
from tessel.nn import buckets
from tessel.nn.encoders import encoded
from tessel.nn.layer import (
    Layer,
    alone,
    fix_shapes,
    is_in_model,
    lies,
    needs_of,
    parts_agreement,
)
from tessel.nn.nesting import members_of, nested, packed_in, tensors_in
from tessel.nn.replacements import place_regions
from tessel.nn.wrapped import (
    check_alike,
    check_replicas,
    is_averaged,
    is_dtensor,
    is_fully_sharded,
    refuse_flattened,
    sharded_kinds,
    unviewed,
    wrappers_of,
)
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.adoption import FreshTensors, belongs_elsewhere, fresh
from tessel.tensor.gathering import FALLBACKS, written_whole
from tessel.tensor.gathering import fallback as choose_fallback
from tessel.tensor.rules.fourier import homes
from tessel.tensor.shared_random import (
    NO_DRAWING,
    capturing,
    common_seed,
    has_common_seed,
    seed_generators,
    seeded,
)
from tessel.tensor.table import in_backward, running
from tessel.tensor.tensor import in_users_backward, is_spread, open_plain
from tessel.transport import kept_in_job

nn = torch.nn


def distribute_module(model: nn.Module, P_x: Partition, fallback: str = "gather") -> nn.Module:
    """Convert a torch model to tensors that are spread over `P_x`.

    The model is changed in place and returned. It keeps its layers, parameters (tied ones stay
    tied), buffers, `state_dict`, hooks and flags; all workers get the parameters and buffers of the
    first. Its own code runs unchanged, on spread tensors: `x.shape` is the global shape, and
    torch's functions do the same as in one process, see `tessel.Tensor`.

    The same holds for the other methods of the model, such as `encode` and `decode`.

    Workers pass their parts of the input, tensors with as many dimensions as `P_x` has axes; all
    other arguments must be the same on all of them. They agree on the shapes once for each call of
    the model. An output with the dimensions of the input is spread like the input, in balanced
    parts. Any other output is whole except for the batch, and *shared*: every worker has the same.
    A loss of it is the loss of the whole, and every worker calls `backward()`. If the batch is
    split, each worker has the rows of its part, and its loss is a share: the sum over its rows,
    divided as in one process. For spread tensors the model returns spread tensors, whose losses are
    those of the whole in any layout.

    From the second call on, gradients of the parameters are summed in few messages, while others
    are computed: see `fuse_gradients`.

    Args:
        model: a torch model.
        P_x: the partition of the input; axis d splits dimension d.
        fallback: how to treat functions that have no rule for split tensors: `"gather"` lets
            every worker compute with whole operands, with a warning; `"raise"` raises
            NotImplementedError.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU())
    >>> tessel.nn.distribute_module(model, P)(torch.ones(2, 3, 16, 16)).shape
    torch.Size([2, 8, 16, 16])
    """
    check_choice("fallback", fallback, FALLBACKS)
    stream = Stream(_agree_on_model(model, P_x))  # before any parameter or buffer is sent
    refuse_flattened(type(model).__name__, model.modules(), P_x)
    for kind in dict.fromkeys(map(type, model.modules())):  # in one order on all workers
        # its layers would be converted, and what stands between them would see parts
        is_called = kind.__call__ is not nn.Module.__call__ and kind.__module__[:6] != "torch."
        if is_called and _found_in(kind, "forward") is nn.Module.forward:
            raise NotImplementedError(
                f"{kind.__name__} defines __call__ in place of forward, which a converted model "
                f"cannot replace; name it forward"
            )
    if split := [(n, p) for n, p in model.named_parameters() if is_dtensor(p)]:
        check_alike(split, P_x)
    equalize([value for _, value in _values(model)], P_x)
    # the same on all workers, as they have just agreed
    number = P_x.prepare().num_calls if P_x.active else 0
    conversion = ModelConversion(P_x, stream, fallback, number)
    conversion.enter(model)
    return model


def _agree_on_model(model: nn.Module, P_x: Partition) -> int:
    """Raise on all workers if their models differ in form; return a number that all share."""
    form: list[tuple[Any, ...]] = [
        (name, tuple(value.shape), str(value.dtype), value.requires_grad)
        for name, value in _values(model)
    ]
    # shards have different shapes on workers: compare their shardings
    form += [
        (name, str(state), str(value.dtype), value.requires_grad)
        for name, value in (*model.named_parameters(), *model.named_buffers())
        if (state := state_of(value)) is not None
    ]
    form += [
        (name, f"{value.placements}", tuple(value.shape), str(value.dtype))  # type: ignore[attr-defined]
        for name, value in model.named_parameters()
        if is_dtensor(value)
    ]
    form += [(p, type(m).__qualname__, m.extra_repr()) for p, m in model.named_modules()]
    if not P_x.active:
        return 0
    # Each worker draws a number, so that generators that are in step stay so; the first one's
    # becomes the seed of the model's random numbers. Counting calls on from it stays in 64 bits.
    forms = tell(P_x, (form, int(torch.randint(2**62, (), device="cpu"))))
    first, (expected, number) = next(iter(forms.items()))
    for worker, (other, _) in forms.items():
        for theirs, ours in zip_longest(other, expected):
            if theirs != ours:
                raise ValueError(
                    f"distribute_module needs the same model on all workers: worker {first} has "
                    f"{ours}, worker {worker} has {theirs}"
                )
    return number


def _values(model: nn.Module, split: bool = False) -> list[tuple[str, Tensor]]:
    """The parameters and buffers that are whole, without shards and those of distributed layers.

    Args:
        model: the model.
        split: whether to include those that `fully_shard` has split.
    """
    placed = {
        id(value)
        for module in model.modules()
        if isinstance(module, Layer)
        for value in (*module.parameters(), *module.buffers())
    }
    values = (*model.named_parameters(), *model.named_buffers())
    return [
        (name, value)
        for name, value in values
        if id(value) not in placed
        and not state_of(value)
        # spread tensors stay where they are; lazy layers draw their parameters in the first call
        and not isinstance(value, SpreadTensor | UninitializedParameter | UninitializedBuffer)
        and (split or not is_dtensor(value))
    ]


@dataclass
class Stream:
    """The random numbers of a converted model, the same on all workers, call by call."""

    seed: int
    num_calls: int = 0
    draws_on_gpu: bool | None = None  # whether the last call did; None before the first

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """Draw torch's random numbers from this stream.

        In a backward pass, when a checkpoint recomputes a part of the model, they are those of the
        forward pass.
        """
        if in_backward():
            yield
            return
        seed = common_seed(self.seed + self.num_calls)
        self.num_calls += 1
        if capturing():  # in which the generator of a GPU cannot be seeded
            if self.draws_on_gpu is None:
                raise RuntimeError(
                    "call this converted model once before capturing it in a CUDA graph: torch "
                    "requires this, too, and the call shows whether the model draws random "
                    "numbers"
                )
            if self.draws_on_gpu:
                raise NotImplementedError(NO_DRAWING)
            with seeded(seed):
                yield
            return
        # a fork of the generators: those of the caller are restored after the model
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            seed_generators(seed)
            yield
            for device in devices:
                self.draws_on_gpu = torch.cuda.default_generators[device].get_offset() > 0


class ModelConversion:
    """The common state of all entrances of a converted model.

    Args:
        P_x: the partition of the input.
        stream: the random numbers of the model.
        fallback: how to treat functions without a rule.
        number: the number of the conversion, the same on all workers: distinguishes equal models.
    """

    def __init__(self, P_x: Partition, stream: Stream, fallback: str, number: int) -> None:
        self.P_x, self.stream, self.fallback, self.number = P_x, stream, fallback, number
        self.num_entered = 0
        self.averaging: set[tuple[int, ...]] = set()  # workers over which wrappers average rightly
        # the parameters and buffers that all workers have alike, by their identities
        self._alike: dict[int, weakref.ref[Tensor]] = {}
        self._last: list[weakref.ref[Tensor]] = []  # values of the last call, in their order

    def enter(self, model: nn.Module) -> None:
        """Add entrances to a model whose parameters and buffers are equal on all workers.

        Then all methods of all its modules agree on their input if they are called from outside.
        """
        place_regions(model, self.P_x)
        of_weights = _modules_of_weights(model.modules())
        for module in model.modules():
            own = module.__dict__.get("forward")
            # converted for other workers
            elsewhere = (
                isinstance(own, Entrance)
                and own.conversion.P_x != self.P_x
                and not _is_of_another(own, module)
            )
            # DDP takes and returns parts: it traverses the graph of its output
            is_called_otherwise = isinstance(module, Layer | DistributedDataParallel)
            if is_called_otherwise or elsewhere or id(module) in of_weights:
                continue
            # Models are also called by methods such as `encode`. Without an entrance these would
            # compute with parts: layers would be right, but a mean between them would be that of
            # the part.
            kinds = [kind for kind in type(module).__mro__ if not issubclass(nn.Module, kind)]
            found = {name: value for kind in reversed(kinds) for name, value in vars(kind).items()}
            others = [
                name
                for name, value in found.items()
                if isinstance(value, FunctionType | staticmethod)
                and not name.startswith("_")
                and not hasattr(nn.Module, name)
                # an attribute of the instance replaces the method
                and isinstance(module.__dict__.get(name), Entrance | None)
            ]
            self.num_entered += 1
            for name in ("forward", *others):
                module.__dict__[name] = Entrance(module, self, name)
            if isinstance(module, GraphModule):
                _keep_entrances(module)
        self.note(Contents(model).values)

    def note(self, values: Iterable[Tensor]) -> None:
        """Remember values that all workers have alike."""
        for value in values:
            self._alike[id(value)] = weakref.ref(value)

    def unknown(self, values: Iterable[Tensor]) -> list[Tensor]:
        """The values that were added since the last call; in a copy of a model, all."""
        values, known, last = list(values), self._alike, self._last
        # Mostly they are those of the last call, one by one: a dictionary lookup of each is twenty
        # times slower.
        if len(values) == len(last) and all(map(is_, map(call, last), values)):
            return []
        # an identity may be that of a tensor that is gone
        found = [v for v in values if (ref := known.get(id(v))) is None or ref() is not v]
        if not found:
            self._last = [known[id(v)] for v in values]
        return found

    def late_form(self, model: nn.Module, contents: Contents) -> tuple[Any, ...]:
        """A description of additions after the conversion, which must be equal on all workers."""
        late = {id(value) for value in self.unknown(contents.values)}
        if not late and not contents.unentered:
            return ()
        values = [
            (name, tuple(value.shape), str(value.dtype))
            for name, value in _values(model, split=True)
            if id(value) in late
        ]
        modules = [(type(each).__qualname__, each.extra_repr()) for each in contents.unentered]
        return (*values, *modules)

    def take_in(self, model: nn.Module, contents: Contents) -> None:
        """Give later additions to a model the values of the first worker, and entrances."""
        late = {id(value) for value in self.unknown(contents.values)}
        if contents.is_split:  # writes to a gathered parameter would be lost
            parameters = list(model.named_parameters())
            check_alike([(name, p) for name, p in parameters if id(p) in late], self.P_x)
            late -= {id(value) for _, value in parameters}
        values = [value for _, value in _values(model) if id(value) in late]
        # Equal values are not written: `functional_call` inserts values that may have a history,
        # belong to others or share memory, and that torch does not allow to change.
        told = tell(self.P_x, [*map(checksum, values)]).values()
        sums = zip(*told, strict=True)
        unlike = [v for v, found in zip(values, sums, strict=True) if len({*found}) > 1]
        equalize(unlike, self.P_x)
        self.enter(model)

    def compare(self, model: nn.Module) -> None:
        """Raise ValueError on all workers if their parameters differ.

        They diverge if one worker catches an exception after the backward pass, and then skips the
        step of its optimizer: later messages still fit together.
        """
        values = [(n, p) for n, p in _values(model) if isinstance(p, nn.Parameter)]
        told = tell(self.P_x, [checksum(value) for _, value in values])
        first, expected = next(iter(told.items()))
        for worker, sums in told.items():
            if unlike := [n for (n, _), a, b in zip(values, sums, expected, strict=True) if a != b]:
                error = ValueError(
                    f"{type(model).__name__} over {self.P_x}: {len(unlike)} of {len(values)} "
                    f"parameters, the first of them {unlike[0]}, have different values on worker "
                    f"{worker} and on worker {first}, which have changed them a different number "
                    "of times: has one worker skipped a step of its optimizer, after an exception? "
                    "Let all workers skip it, or load the same state on all of them"
                )
                error.workers = tuple(told)  # type: ignore[attr-defined]  # all of which raise it
                raise error

    def make_values_plain(self, model: nn.Module) -> None:
        """Make parameters and buffers that a call has assigned plain tensors again.

        Values that every worker has whole become plain: `state_dict` and optimizers use them.
        """
        contents = Contents(model)
        if any(issubclass(kind, SpreadTensor) for kind in {*map(type, contents.values)}):
            for module in model.modules():
                _make_plain(module._parameters, nn.Parameter)
                _make_plain(module._buffers, Tensor.requires_grad_)
            contents = Contents(model)
        self.note(self.unknown(contents.values))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_alike": {}, "_last": [], "averaging": set()}  # of a copy others


def _make_plain(values: dict[str, Any], make: Callable[[Tensor, bool], Tensor]) -> None:
    for name, value in values.items():
        if isinstance(value, SpreadTensor) and value.layout.is_whole:
            values[name] = make(value.local.detach(), value.requires_grad)


class Contents:
    """The contents of a model, which each call collects in one walk that makes no names.

    Attributes:
        parameters: the parameters, in the order of `model.parameters()`.
        values: parameters and buffers.
        unentered: modules that are not converted.
        sharded: modules whose parameters FSDP has split.
        is_split: whether the model contains, or is in, such modules.
    """

    def __init__(self, model: nn.Module) -> None:
        modules: dict[int, nn.Module] = {}
        waiting = [model]  # a stack, and no call for each module, of which there may be many
        while waiting:
            module = waiting.pop()
            if id(module) not in modules:
                modules[id(module)] = module
                if module._modules:
                    waiting += [each for each in module._modules.values() if each is not None][::-1]
        self._held = modules.values()
        self.is_split = False

    @cached_property
    def parameters(self) -> list[Any]:
        return _different([each._parameters.values() for each in self._held])

    @cached_property
    def values(self) -> list[Any]:
        return [*self.parameters, *_different([each._buffers.values() for each in self._held])]

    @cached_property
    def unentered(self) -> list[nn.Module]:
        found = [
            module
            for module in self._held
            if (
                type(own := module.__dict__.get("forward")) is not Entrance
                or _is_of_another(own, module)
            )
            and not isinstance(module, Layer | DistributedDataParallel)
        ]
        of_weights = _modules_of_weights(found) if found else ()
        return [each for each in found if id(each) not in of_weights]

    @cached_property
    def sharded(self) -> list[nn.Module]:
        kinds = sharded_kinds()
        return [each for each in self._held if isinstance(each, kinds)] if kinds else []


def _different(held: Iterable[Iterable[Tensor | None]]) -> list[Any]:
    """The tensors of modules, each once, in their order; in few steps of Python."""
    values = [*chain.from_iterable(held)]
    found = dict(zip(map(id, values), values, strict=True))
    found.pop(id(None), None)
    return list(found.values())


def _modules_of_weights(modules: Iterable[nn.Module]) -> set[int]:
    """The identities of the modules in parametrizations.

    They compute a weight from others, whole on all workers, when an attribute of a layer is read:
    this is no call of the model, and a single worker may do it.
    """
    lists = (each for each in modules if isinstance(each, ParametrizationList))
    return {id(module) for each in lists for module in each.modules()}


def _found_in(kind: type, name: str) -> Any:
    """The attribute of this name of a class or its bases, without binding.

    `inspect.getattr_static` returns the same, but takes longer than many layers.
    """
    for each in kind.__mro__:
        if name in each.__dict__:
            return each.__dict__[name]
    raise AttributeError(f"{kind.__name__} has no attribute {name!r} any more")


_SYNCHRONIZED = nn.SyncBatchNorm.forward


class Entrance(HasHandle):
    """The `forward` of a module in a converted model: the outermost one agrees on the input.

    It also replaces other methods. These may be called without a tensor that could be a part, and
    then run unchanged.

    Args:
        module: the module whose own method it calls.
        conversion: the conversion of the model.
        name: the name of the method.
    """

    _derived = HasHandle._derived | {"_calls", "_agreements", "_traces", "_schedules"}

    def __init__(
        self, module: nn.Module, conversion: ModelConversion, name: str = "forward"
    ) -> None:
        own = module.__dict__.get(name)  # somebody may have put one into this module
        self.own: Any = own.own if isinstance(own, Entrance) else own
        self.module, self.conversion, self.name = module, conversion, name
        # of two equal modules, workers must call the same one
        self.number = f"{conversion.number}.{conversion.num_entered}"
        self.schedule = buckets.BucketSchedule()

    def __getattr__(self, name: str) -> Any:
        # Callers that inspect the arguments of a method find those of the module's own.
        if name == "__signature__" and "module" in self.__dict__:
            if self.own is not None:
                return inspect.signature(self.own)
            method = _found_in(type(self.module), self.name)
            return inspect.signature(method.__get__(self.module, type(self.module)))
        raise AttributeError(
            f"'Entrance' object has no attribute {name!r}: the methods of a converted model are "
            "not plain functions; apply torch.export and other tools that read code before "
            "distribute_module"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own method."""
        module = self.module
        if self.own is not None:
            return self.own(*args, **kwargs)
        if isinstance(module, torch.jit.ScriptModule):  # traced: its class has no code
            return module._c._get_method(self.name)(*args, **kwargs)
        kind = type(module)
        # for most modules it is in their own class
        method = kind.__dict__.get(self.name) or _found_in(kind, self.name)
        if method is nn.TransformerEncoder.forward:
            return encoded(module, *args, **kwargs)
        if type(method) is FunctionType:
            if method is _SYNCHRONIZED:  # it communicates
                method = nn.modules.batchnorm._BatchNorm.forward
            return method(module, *args, **kwargs)
        return method.__get__(module, kind)(*args, **kwargs)  # such as a static method

    @property
    def label(self) -> str:
        """The module in words."""
        return f"{type(self.module).__name__} (number {self.number}) over {self.conversion.P_x}"

    def can_be_traced(self, *args: Any, **kwargs: Any) -> bool:
        """Whether a compiler may have this call in its graph, in which shapes are fixed then."""
        return (
            not _has_recurrence(self.handle)
            and fix_shapes((args, kwargs))
            and not is_in_model()
            and not is_averaged()
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # for a compiler all of this is one call: it does not support context variables
        if is_dynamo_compiling():
            return self.from_outside(*args, **kwargs)
        if running.get() is not None:
            return self.from_inside(*args, **kwargs)
        # The outermost call has looked at all modules: a look of each one at those in it would
        # take longer than many a layer.
        inside = alone.get()
        is_inside = inside is not None and inside == (self.conversion, _active_ddp())
        if is_inside and not any(map(is_spread, _tensors_given(args, kwargs))):
            return self.forward(*args, **kwargs)
        called = _called_module(sys._getframe(1))
        if called is not None and _is_of_another(self, called):
            if type(called) is not type(self.module):
                raise NotImplementedError(
                    f"{type(called).__name__} has all attributes of a converted "
                    f"{type(self.module).__name__}, among them its methods, which would be called "
                    "in place of its own (as in monkeypatch of higher): copy attributes before "
                    "distribute_module, or leave the model as it is and pass spread tensors"
                )
            self.conversion.enter(called)
            return called.__dict__[self.name](*args, **kwargs)
        return self.from_outside(*args, **kwargs)

    def from_inside(self, *args: Any, **kwargs: Any) -> Any:
        """A call by the model's own code."""
        result = self.forward(*args, **kwargs)
        return nested(unviewed, result) if is_fully_sharded(self.module) else result

    @in_graphs("module")
    def from_outside(self, *args: Any, **kwargs: Any) -> Any:
        """The outermost call of the model."""
        if running.get() is not None:
            # A compiler could not trace this, and its version of `__call__` would return here.
            return self.from_inside(*args, **kwargs)
        P_x = self.conversion.P_x
        given = tensors_in(args, kwargs)
        spread = any(map(is_spread, given))
        no_parts = (each.dim() != P_x.dim for each in given)
        if self.name != "forward" and not spread and all(no_parts):
            return self.forward(*args, **kwargs)
        # The recomputation of a checkpoint is also inside, with everything that it calls: plain
        # tensors are whole there. A checkpoint restores the generators.
        if in_backward() and (spread or has_common_seed()):
            held = self._held_by(Contents(self.module), given)
            with (
                setting(running, P_x),
                choose_fallback(self.conversion.fallback),
                setting(belongs_elsewhere, held),
            ):
                return self.forward(*args, **kwargs)
        contents = Contents(self.module)
        wrappers = wrappers_of(contents.sharded)
        wrapping = ""
        if not is_traced():
            name, known = type(self.module).__name__, self.conversion.averaging
            wrapping = check_replicas(name, P_x, wrappers, spread, known)
        if not P_x.active:
            first = next(iter(given), torch.empty(0))
            return zero_volume_tensor(dtype=first.dtype, device=first.device)
        if P_x.size == 1 and not spread:
            if not is_traced() and contents.unentered:
                self.conversion.enter(self.module)
            with setting(alone, (self.conversion, _active_ddp())):
                return self.forward(*args, **kwargs)
        if not spread and in_users_backward() and any(x.dim() == P_x.dim for x in given):
            raise ValueError(
                f"the converted {type(self.module).__name__} was called with plain tensors, which "
                "are parts, in the backward pass of a torch.autograd.Function of spread tensors, "
                "where plain tensors are whole (as in odeint_adjoint of torchdiffeq): pass "
                "tessel.spread(x, where), or do not convert the model"
            )
        if is_traced():
            if wrappers:
                raise NotImplementedError(
                    f"torch.compile of the converted {type(self.module).__name__} over {P_x} "
                    "inside or around fully_shard is not supported; use only one of the two"
                )
            return self._traced(args, kwargs)
        _check_untraced(self.module, (args, kwargs))
        contents.is_split = any(map(is_fully_sharded, wrappers))
        result = self._in_parts(args, kwargs, given, contents, wrapping)
        self.conversion.make_values_plain(self.module)
        result = result if spread else as_parts(result)  # spread if the input was spread
        return nested(unviewed, result) if is_fully_sharded(self.module) else result

    def _in_parts(
        self, args: Any, kwargs: Any, given: list[Tensor], contents: Contents, wrapping: str
    ) -> Any:
        """The result of the outermost call as a spread tensor, after all agreed on the input."""
        P_x = self.conversion.P_x
        # A bucket may wait for gradients of several modules, and `fully_shard` does not.
        fuses = not contents.is_split
        # buckets first: their plan is part of the agreement on the input
        with (
            buckets.in_buckets(self.schedule, contents.parameters, self.module, fuses),
            self.conversion.stream.flowing(),
            setting(running, P_x),
            choose_fallback(self.conversion.fallback),
            setting(written_whole, []),
            setting(homes, {}),
            setting(belongs_elsewhere, self._held_by(contents, given)),
        ):
            args, kwargs = self._entered(args, kwargs, given, contents)
            try:
                result = self.forward(*args, **kwargs)
                # what an autograd.Function gave as a plain tensor has its history between wrappers
                if any(type(y) is Tensor and y.requires_grad for y in tensors_in(result)):
                    result = nested(lambda y: open_plain(y) if type(y) is Tensor else y, result)
                # `fully_shard` frees parameters, or keeps a part of each: these are not compared
                compare = partial(self.conversion.compare, self.module) if fuses else None
                buckets.agree_on_uses(self.module, self.label, wrapping, P_x, compare)
                if not any(map(is_spread, given)):
                    self._check_no_whole(result)
            except BaseException as error:  # others may still wait for this worker
                P_x.prepare().give_up(error)
                if any(map(is_spread, given)):
                    self._note_parts(error, given)
                raise
        return result

    def _note_parts(self, error: BaseException, given: list[Tensor]) -> None:
        """Add a note to an error on the plain tensors that were taken for parts."""
        dim = self.conversion.P_x.dim
        parts = [x for x in given if not is_spread(x) and x.dim() == dim]
        if parts:
            shapes = ", ".join(str(tuple(x.shape)) for x in parts)
            error.add_note(
                f"{type(self.module).__name__} got spread tensors, and plain ones of shape "
                f"{shapes}, which have {dim} dimensions and therefore are this worker's parts; if "
                f"they are whole, pass tessel.spread(x, where)"
            )

    def _traced(self, args: Any, kwargs: Any) -> Any:
        """Trace the call to a graph that computes with parts; every run agrees again.

        It is traced several times: the first trace records how parameters are used, and the others
        put them into buckets.
        """
        P_x, module = self.conversion.P_x, self.module
        parameters = Contents(module).parameters
        flags, is_off = needs_of(parameters)
        mode = "training" if module.training else "evaluation"
        call = f"{self.label}, compiled in {mode}"
        key = (module.training, is_off, *flags)
        agreements = self.__dict__.setdefault("_agreements", {})
        schedules: dict[Any, buckets.BucketSchedule] = self.__dict__.setdefault("_schedules", {})
        schedule = schedules.setdefault(key, buckets.BucketSchedule())
        schedule.limit = self.schedule.limit
        if key not in agreements:
            agreements[key] = parts_agreement(P_x.prepare(), P_x, call, f"{call} {key}")

        def enter_part(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() != P_x.dim:
                return value
            layout, meta, part = enter(agreements[key], value, module)
            return SpreadTensor(entered(part, meta, not layout.is_outside), layout)

        known = FreshTensors()
        with (
            buckets.in_buckets(schedule, parameters, module),
            setting(running, P_x),
            choose_fallback(self.conversion.fallback),
            setting(written_whole, []),
            setting(homes, {}),
            setting(fresh, known),
            known,
        ):
            args, kwargs = nested(enter_part, (args, kwargs))
            try:
                result = self.forward(*args, **kwargs)
                self._check_no_whole(result)
                uses = buckets.described_uses()
            except BaseException as error:  # others may still wait for this worker
                P_x.prepare().give_up(error)
                raise
        trace = current_trace.get()
        moves = [] if trace is None else [repr(each) for each in trace]
        if (key, len(moves), uses) not in agreements:
            with outside_of_graphs():
                what = f"{call}, with {len(moves)} movements and {uses[0]}"
                agree(P_x, what, identity=f"{call} {moves} {uses}")
            agreements[key, len(moves), uses] = True
        return as_parts(result)

    def _held_by(self, contents: Contents, given: list[Tensor]) -> Callable[[Tensor], bool]:
        """A predicate for tensors that code outside of the model may access."""

        def is_held(x: Tensor) -> bool:
            known = (*contents.values, *given)
            return any(each is x for each in known) or any(
                each is x for module in self.module.modules() for each in vars(module).values()
            )

        return is_held

    def _check_no_whole(self, result: Any) -> None:
        """Raise for a plain result that may contain parts which were written into a plain tensor.

        It is whole, but the caller expects a part. It may also come from elsewhere in the model,
        but that cannot be distinguished.
        """
        plain = [
            each
            for each in tensors_in(result)
            if not isinstance(each, SpreadTensor | nn.Parameter)
            and each.dim() == self.conversion.P_x.dim
        ]
        if plain and (names := written_whole.get()):
            raise NotImplementedError(
                f"{type(self.module).__name__}: the model returned a plain tensor of shape "
                f"{tuple(plain[0].shape)} where a part is expected, and {names[0]} wrote parts "
                "into a plain tensor, as a whole. Create that tensor with torch.zeros_like(x) or "
                "x.new_zeros(x.shape) from the tensor that is written to it, or pass spread "
                "tensors to the model"
            )

    def _entered(self, args: Any, kwargs: Any, given: list[Tensor], contents: Contents) -> Any:
        """The arguments, with spread tensors in the places of parts."""
        P_x = self.conversion.P_x
        found = [each for each in given if not is_spread(each)]
        dims = tuple(each.dim() for each in found)
        # Axis d splits dimension d, so that tensors with other dimensions are no parts but whole.
        # So are packed sequences: their rows are those of all samples in turn.
        packed = packed_in(args, kwargs)
        in_packed = {id(each) for sequence in packed for each in tensors_in(*sequence)}
        parts = [each for each in found if each.dim() == P_x.dim and id(each) not in in_packed]
        late = self.conversion.late_form(self.module, contents)
        nothing_is_split = not parts and len(found) == len(given)
        unclear = [
            each
            for each in packed
            if not is_spread(each.data) and (nothing_is_split or each.data.dim() == P_x.dim)
        ]
        if not (parts or late or unclear) and len(found) < len(given):
            return args, kwargs
        # without any part, the other tensors raise on all workers
        brought: list[Any] = parts
        if nothing_is_split:
            brought = [next(iter(found), None)]
        flags, is_off = needs_of(contents.parameters)
        plan = buckets.planned_uses()
        state = (dims, len(unclear), self.module.training, is_off, plan, late, *flags)
        calls: dict[Any, tuple[str, str]] = self.__dict__.setdefault("_calls", {})
        if state not in calls:
            mode = "training" if self.module.training else "evaluation"
            mode += ", under torch.no_grad()" if is_off else ""
            method = "" if self.name == "forward" else f", its method {self.name},"
            call = (
                f"{self.label}{method} in {mode}, with "
                f"{flags.count(True)} of {len(flags)} parameters to train and tensors of {dims} "
                f"dimensions, and {buckets.described(plan)}"
            )
            if unclear:
                call += ", of which some are those of a PackedSequence"
            if late:
                call += f"; put in since the last call: {late[:8]}"
            calls[state] = call, f"{call} {state}"
        call, identity = calls[state]  # in words, and all in which workers must be alike
        names = [f"input {number}" for number in range(len(brought))]
        held, _ = agree(P_x, call, *brought, names=names, identity=identity)
        if unclear:  # on all workers, as they have just agreed
            raise ValueError(
                f"{type(self.module).__name__}: expected a part of each sample, got a "
                "PackedSequence of plain tensors, whose rows belong to all samples in turn; pack "
                "a spread tensor, with pack_padded_sequence(tessel.spread(x, grid), …), or pass "
                "padded parts and all lengths to a model that packs them"
            )
        if late:
            self.conversion.take_in(self.module, contents)
        # in the order of `nested` below
        entries = iter([(lies(P_x, tuple(shapes.items())), meta) for shapes, meta in held])

        def enter(value: Any) -> Any:
            is_plain = isinstance(value, Tensor) and not is_spread(value)
            if not is_plain or value.dim() != P_x.dim or id(value) in in_packed:
                return value
            layout, meta = next(entries)
            part = entered(value, meta, not layout.is_outside)
            return SpreadTensor(part.view_as(value), layout)

        return nested(enter, (args, kwargs))


_active_ddp = DistributedDataParallel._get_active_ddp_module


def _tensors_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    """All tensors among arguments; at once for what most layers get."""
    if not kwargs and len(args) == 1 and type(args[0]) is Tensor:
        return args
    return tensors_in(args, kwargs)


@constant_in_graphs  # not even the module itself may be looked at by Dynamo
def _has_recurrence(handle: str) -> bool:
    """Whether a compiler cannot look into this model: Dynamo breaks graphs at LSTM, GRU and RNN."""
    found = any(isinstance(each, nn.RNNBase) for each in object_of(handle).module.modules())
    return found and not getattr(torch._dynamo.config, "allow_rnn", False)


def as_parts(result: Any) -> Any:
    """The result of a model that was called with parts; packed sequences are whole."""
    return nested(
        lambda y: y.move_to(outside(y.layout)).local if isinstance(y, SpreadTensor) else y,
        result,
        lambda packed: nested(lambda y: y.full() if isinstance(y, SpreadTensor) else y, packed),
    )


_CALL = nn.Module._call_impl.__code__


def _check_untraced(module: nn.Module, arguments: Any) -> None:
    """Raise if a converted model is traced: code between its layers would get parts.

    An existing graph contains converted layers of the model, but is not converted itself.
    """
    frame, around = sys._getframe(1), module
    while frame is not None and around is module:
        if frame.f_code is _CALL:
            around = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    is_graph = isinstance(around, GraphModule) and around is not module
    seen = members_of(arguments)
    is_traced = torch.jit.is_tracing() or any(isinstance(each, Proxy) for each in seen)
    if is_graph or is_traced:
        raise NotImplementedError(
            f"{type(module).__name__} is converted, but the model around it is traced: code "
            "between its layers would see parts in place of whole tensors. Trace first, and "
            "convert the result: tessel.nn.distribute_module(torch.fx.symbolic_trace(model), "
            "P_x); the same holds for torchvision's create_feature_extractor, torch.export and "
            "torch.jit"
        )


def _called_module(frame: FrameType | None) -> nn.Module | None:
    """The module in whose `__call__` a frame is; with hooks, torch calls `forward` in a closure."""
    if frame is not None and frame.f_code.co_filename == _CALL.co_filename:
        frame = frame if frame.f_code is _CALL else frame.f_back
        if frame is not None and frame.f_code is _CALL:
            return frame.f_locals["self"]
    return None


def _is_of_another(entrance: Entrance, module: nn.Module) -> bool:
    """Whether a module got its entrance with all attributes of another, as from `copy.copy`.

    It would compute with the parameters of that one. A wrapper of another class, or around that
    module, may have taken its method as its own.
    """
    original = entrance.module
    return (
        module is not original
        and isinstance(module, type(original))
        and all(each is not original for each in module.modules())
    )


def _keep_entrances(graph: GraphModule) -> None:
    """Keep the entrances in copies of a graph module, which torch creates from the graph."""
    kind: Any = type(graph)  # torch makes one for each graph
    kind.__deepcopy__, kind.__reduce__ = _copied_graph, _reduced_graph


def _entrances(graph: GraphModule) -> dict[str, Any]:
    return {name: each for name, each in vars(graph).items() if isinstance(each, Entrance)}


def _copied_graph(graph: GraphModule, memo: dict[int, Any]) -> GraphModule:
    plain: Any = super(type(graph), graph)
    found: GraphModule = plain.__deepcopy__(memo)
    found.__dict__.update(deepcopy(_entrances(graph), memo))
    _keep_entrances(found)
    return found


def _reduced_graph(graph: GraphModule) -> tuple[Any, ...]:
    reduced: Any = super(type(graph), graph).__reduce__()
    make, (body, imports) = reduced
    entrances = _entrances(graph)
    body = {name: value for name, value in body.items() if name not in entrances}
    return _made_graph, (make, body, imports), entrances  # these last, since they refer to it


def _made_graph(make: Callable[..., GraphModule], body: dict[str, Any], imports: str) -> Any:
    found = make(body, imports)
    _keep_entrances(found)
    return found


@kept_in_job
def outside(layout: Layout) -> Layout:
    """The layout of an output of a model: that of the input, if it has its dimensions.

    Other tensors are whole except for the batch: a plain part of features, or of space that became
    features, would be mistaken for all of them.
    """
    if len(layout.shape) == layout.partition.dim:
        return Layout.balanced(layout.partition, layout.shape)
    dims = (dim for dim, cut in enumerate(layout.cuts) if dim or cut.axes != (0,))
    return layout.gathered(tuple(dim for dim in dims if layout.is_split(dim)))
