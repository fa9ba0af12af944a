"""Calls of torch functions on shards: their names, tensors, and the tensors' states before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from tessel.core.layout import Shape
from tessel.distributed.shardings import Sharding, State, UnknownSharding, state_of
from tessel.tensor import table
from tessel.tensor.rules import pointwise as rules
from tessel.tensor.table import tensors

# attributes and methods that return no tensor, or that do not depend on a tensor's values
QUESTIONS = frozenset(
    (
        *("shape", "size", "dim", "ndim", "numel", "nelement", "dtype", "device", "layout"),
        *("requires_grad", "is_leaf", "grad_fn", "stride", "is_contiguous", "is_cuda", "is_cpu"),
        *("element_size", "itemsize", "nbytes", "data_ptr", "storage_offset", "untyped_storage"),
        *("is_floating_point", "is_complex", "item", "tolist", "numpy", "__len__", "__bool__"),
        *("__repr__", "__format__", "__hash__", "__reduce_ex__", "register_hook", "retain_grad"),
        *("is_inference", "is_pinned", "is_shared", "get_device", "retains_grad", "is_set_to"),
        *("equal", "allclose", "is_same_size", "sparse_dim", "dense_dim", "_backward_hooks"),
        *("register_post_accumulate_grad_hook", "_post_accumulate_grad_hooks"),
        *("output_nr", "_version", "name", "names"),
        *("is_sparse", "is_meta", "is_nested", "is_quantized"),
    )
)

# functions of lists of tensors: those that treat each place separately, and steps of optimizers
EACH = "_foreach_"
OF_LISTS = (EACH, "_fused_", "_amp_")

# functions that use only the shape or the dtype of their second argument
_LIKE_ANOTHER = frozenset(("to", "type_as", "view_as", "reshape_as"))


@dataclass(frozen=True)
class TorchCall:
    """A call of a torch function, with the shapes and states of its tensors before the call."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]
    shapes: tuple[Shape, ...]
    states: tuple[State, ...]
    called: Any = None

    @classmethod
    def of(
        cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], called: Any = None
    ) -> TorchCall:
        found = tuple(tensors_in(args[:1] if name in _LIKE_ANOTHER else (args, kwargs)))
        shapes = tuple(tuple(each.shape) for each in found)
        return cls(name, args, kwargs, found, shapes, tuple(map(state_of, found)), called)

    @cached_property
    def base(self) -> str:
        """The name of the function without the marks of operators and in-place versions."""
        return plain_name(self.name)

    @property
    def function(self) -> Any:
        """The torch function, out of place; None if there is no such version."""
        if self.called is not None and (self.base == self.name or self.name.startswith("__")):
            return self.called
        return getattr(Tensor, self.base, None) or getattr(torch, self.base, None)

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """Return an argument by its position or by one of its names."""
        if len(self.args) > position:
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def rest(self, *names: str) -> tuple[Any, ...]:
        """Return all arguments after the first, which may also be given as one sequence."""
        given = self.args[1:] or tuple(self.kwargs[n] for n in names if n in self.kwargs)
        sequence = len(given) == 1 and isinstance(given[0], tuple | list)
        return tuple(given[0]) if sequence else given

    @property
    def subject(self) -> tuple[Sharding, Shape] | None:
        """The sharding and the shape of the first argument, if no other tensor has a sharding."""
        first = self.args[0] if self.args else self.kwargs.get("input")
        shards = [k for k, state in enumerate(self.states) if state is not None]
        if len(shards) != 1 or self.tensors[shards[0]] is not first:
            return None
        sharding = self.states[shards[0]]
        assert isinstance(sharding, Sharding)
        return sharding, self.shapes[shards[0]]

    @property
    def first_shard(self) -> tuple[Sharding | None, Shape]:
        """The sharding and the shape of the first shard, or (None, ()) if there is no shard."""
        pairs = zip(self.states, self.shapes, strict=True)
        return next(((s, shape) for s, shape in pairs if isinstance(s, Sharding)), (None, ()))

    def lost(self, why: str = "") -> UnknownSharding:
        """The state of a result whose sharding does not follow from this function."""
        sharding, _ = self.first_shard
        return UnknownSharding(self.name, why, None if sharding is None else sharding.partition)


def targets(call: TorchCall) -> tuple[Tensor, ...]:
    """The tensors that a call writes into."""
    operator = call.name.startswith("__")
    if "out" in call.kwargs:
        return tuple(tensors_in(call.kwargs["out"]))
    if operator and not (call.name == "__setitem__" or call.name.startswith("__i")):
        return ()
    if operator or call.name.endswith("_"):
        return tuple(tensors_in(call.args[:1]))
    return ()


def is_property(func: Any) -> bool:
    """Whether this function reads or writes an attribute of a tensor."""
    return getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")


@lru_cache(maxsize=4096)
def name_of(func: Any) -> str:
    """The name of a torch function, or of the attribute that it reads."""
    if is_property(func):
        return str(getattr(func.__self__, "__name__", "an attribute"))
    return str(getattr(func, "__name__", func))


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in arguments, including those in lists, tuples and dictionaries."""
    return list(tensors(value))


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same arguments, with the function applied to each tensor."""
    return table.mapped(lambda each: function(each) if isinstance(each, Tensor) else each, value)


@lru_cache(maxsize=1024)
def plain_name(name: str) -> str:
    """The name of a function without the marks of operators and in-place versions.

    Operators without a torch function of the same name, such as `__truediv__`, keep theirs.
    """
    if not (name.startswith("__") and name.endswith("__")):
        return name.removesuffix("_")
    inner = name[2:-2]
    for known in (inner, inner[1:] if inner[:1] in "ri" else inner):
        if is_pointwise(known):
            return known
    return "matmul" if inner == "matmul" else name


@lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Whether a torch function of this name treats each element of a shard separately."""
    return name in _OF_SHARDS or (name not in QUESTIONS and rules.is_pointwise(name))


# These have separate rules for spread tensors: they draw numbers, which each worker draws for its
# own shard, or change something other than values.
_OF_SHARDS = frozenset(
    (
        *("dropout", "alpha_dropout", "bernoulli", "rand_like", "randn_like"),
        *("normal", "uniform", "exponential"),
        *("detach", "alias", "copy", "data", "requires_grad_", "requires_grad"),
        *("to", "type_as", "pin_memory", "_make_dual", "_unpack_dual", "_fw_primal"),
    )
)
