"""distribute: one function that spreads the parts of an inverse problem over workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tessel.core import agree, total
from tessel.imaging.context import DistributedContext
from tessel.imaging.distribution_strategies.strategies import DistributedSignalStrategy
from tessel.imaging.factory import items_of, on_device
from tessel.imaging.fidelity import L2
from tessel.imaging.prior import DistributedProcessing
from tessel.imaging.stacked import (
    DistributedStackedFidelity,
    DistributedStackedLinearPhysics,
    DistributedStackedPhysics,
)


def distribute(
    object: Any,
    ctx: DistributedContext,
    *,
    num_operators: int | None = None,
    type_object: str = "auto",
    dtype: torch.dtype | None = None,
    gather_strategy: str = "concatenated",
    tiling_strategy: DistributedSignalStrategy | None = None,
    tiling_dims: int | Sequence[int] | None = None,
    patch_size: int | Sequence[int] = 256,
    overlap: int | Sequence[int] = 64,
    max_batch_size: int | None = None,
    checkpoint_batches: str = "auto",
    checkpoint_use_reentrant: bool = False,
    checkpoint_preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Spread operators, data fidelities, a denoiser, parameters or a whole method over workers.

    | `type_object` | takes | gives |
    |---|---|---|
    | "physics" | a list, a `StackedPhysics`, a function | `DistributedStackedPhysics` |
    | "linear_physics" | the same, with adjoints | `DistributedStackedLinearPhysics` |
    | "data_fidelity" | one, a list, a stack, a function | `DistributedStackedFidelity` |
    | "denoiser" | a function of patches | `DistributedProcessing` |
    | "prior" | a prior with a denoiser | the same prior, with its denoiser spread |
    | "parameters" | one or several | the same, whose gradients are those of all workers |
    | "module" | deepinv's `BaseOptim(unfold=True)` | the same, with its parts spread |

    Args:
        object: the object to spread. A function of (i, device, factory_kwargs) makes operator or
            data fidelity i.
        ctx: the workers.
        num_operators: the number of objects that a function makes.
        type_object: the kind of object; "auto" infers it from the class or the attributes, except
            for functions.
        dtype: the dtype to which operators, data fidelities and denoisers are converted, if any.
        gather_strategy: for physics, see `DistributedStackedPhysics`.
        tiling_strategy: the `strategy` of a denoiser, see `DistributedProcessing`.
        tiling_dims, patch_size, overlap, max_batch_size: for a denoiser, see there.
        checkpoint_batches, checkpoint_use_reentrant, checkpoint_preserve_rng_state: the same.
        kwargs: `factory_kwargs` of physics and data fidelities, `reduction` of data fidelities,
            `average` of parameters and modules: False sums gradients over the workers.

    >>> import torch
    >>> from tessel.imaging import DistributedContext, distribute
    >>> with DistributedContext() as ctx:
    ...     distribute(torch.nn.Conv2d(1, 1, 3), ctx, type_object="denoiser", patch_size=64)
    DistributedProcessing(
      (processor): Conv2d(1, 1, kernel_size=(3, 3), stride=(1, 1))
    )
    """
    given, defaults = locals(), distribute.__kwdefaults__ or {}  # the arguments, and their defaults
    named = [name for name in defaults if name != "type_object"]
    asked = {name: given[name] for name in named if given[name] != defaults[name]} | kwargs
    make, _ = _KINDS[_agreed_kind(object, ctx, type_object, asked)]
    return make(object, ctx, **asked)


def _agreed_kind(
    given: Any, ctx: DistributedContext, type_object: str, asked: dict[str, Any]
) -> str:
    """The kind of the object. All workers raise unless they pass the same arguments, valid for it.

    So an argument that is invalid on one worker raises on all of them.
    """
    kind, problem = type_object, ""
    if type_object not in ("auto", *_KINDS):
        problem = f"type_object must be one of auto, {', '.join(_KINDS)}, got {type_object!r}"
    elif type_object == "auto":
        try:
            kind = _kind_of(given)
        except ValueError as error:
            problem = str(error)
    # Objects are compared by the names of their classes: their repr may contain an address.
    plain = str | int | float | tuple | list | torch.dtype | None
    said = {n: repr(v) if isinstance(v, plain) else type(v).__name__ for n, v in asked.items()}
    told = ", ".join(f"{name}={value}" for name, value in said.items())
    agree(ctx.partition, f"distribute(…, type_object={kind!r}, {told}) {problem}".rstrip())
    if problem:
        raise ValueError(problem)
    for name, value in asked.items():
        if name not in _KINDS[kind][1]:
            raise TypeError(f"distribute: {name}={value!r} is not used for type_object={kind!r}")
    return kind


def _factory(
    given: Any, count: int | None, dtype: torch.dtype | None, kind: str
) -> tuple[Callable[..., Any], int]:
    """A function that makes object i, and the number of objects."""
    items = items_of(given)
    if items is not None:
        if count is not None and count != len(items):
            raise ValueError(f"distribute: num_operators={count}, but there are {len(items)}")
        return lambda i, device, shared: on_device(items[i], device, dtype), len(items)
    if not callable(given):
        raise TypeError(
            f"distribute: expected a {kind}, a list of them or a function that makes them, got "
            f"{given!r}"
        )
    if count is None:
        raise ValueError(
            f"distribute: pass num_operators, the number of objects that the function {given!r} "
            "creates; got num_operators=None"
        )
    return lambda i, device, shared: on_device(given(i, device, shared), device, dtype), count


def _physics(
    given: Any,
    ctx: DistributedContext,
    num_operators: int | None = None,
    dtype: torch.dtype | None = None,
    *,
    cls: type[DistributedStackedPhysics] = DistributedStackedPhysics,
    **settings: Any,
) -> DistributedStackedPhysics:
    make, count = _factory(given, num_operators, dtype, "physics")
    return cls(ctx, count, make, **settings)


def _data_fidelity(
    given: Any,
    ctx: DistributedContext,
    num_operators: int | None = None,
    dtype: torch.dtype | None = None,
    **settings: Any,
) -> DistributedStackedFidelity:
    """One data fidelity for all operators, or one for each, from a list, a stack or a function."""
    if hasattr(given, "grad") and items_of(given) is None:
        made = on_device(given, ctx.device, dtype)
    else:
        made, num_operators = _factory(given, num_operators, dtype, "data_fidelity")
    return DistributedStackedFidelity(ctx, made, num_operators, **settings)


def _denoiser(
    given: Any, ctx: DistributedContext, dtype: torch.dtype | None = None, **tiling: Any
) -> DistributedProcessing:
    if not callable(given):
        raise TypeError(f"distribute: expected a denoiser that can be called, got {given!r}")
    settings = {name.replace("tiling_strategy", "strategy"): v for name, v in tiling.items()}
    return DistributedProcessing(ctx, on_device(given, ctx.device, dtype), **settings)


def _prior(prior: Any, ctx: DistributedContext, **settings: Any) -> Any:
    """The prior itself, with a denoiser that works in patches; the rest stays as it is."""
    denoiser = getattr(prior, "denoiser", None)
    if denoiser is None:
        raise TypeError(
            f"distribute: expected a prior with a denoiser, got {prior!r}; distribute other priors "
            "with DistributedPrior, which splits prox and grad into patches"
        )
    if not isinstance(denoiser, DistributedProcessing):
        prior.denoiser = _denoiser(denoiser, ctx, **settings)
    return prior


def _parameters(given: Any, ctx: DistributedContext, average: bool = True) -> Any:
    """Make gradients of parameters the mean or the sum over all workers."""
    several = list(given) if isinstance(given, list | tuple) else [given]
    for number, each in enumerate(several):
        if not isinstance(each, torch.nn.Parameter):
            raise TypeError(
                f"distribute: expected a torch.nn.Parameter at position {number}, got {each!r}"
            )
    moved = [
        each
        if each.device == ctx.device
        else torch.nn.Parameter(each.detach().to(ctx.device), each.requires_grad)
        for each in several
    ]
    ctx.check_same_state(moved, "distribute: a list of parameters")
    if ctx.world_size > 1:
        for each in moved:
            # For this kind of object a hook on the user's own parameter is needed: its gradient is
            # that of all workers, whatever computes it.
            each.register_hook(
                lambda grad: total(grad, ctx.partition) / (ctx.world_size if average else 1)
            )
    return moved if isinstance(given, list | tuple) else moved[0]


def _module(model: Any, ctx: DistributedContext, average: bool = True, **settings: Any) -> Any:
    """Spread an unfolded method of deepinv in place: its fidelities, denoisers and parameters."""
    if not getattr(model, "unfold", False):
        raise TypeError(
            "distribute: type_object='module' takes a method of deepinv with unfold=True, got "
            f"{type(model).__name__}; distribute its physics, data fidelities and denoisers "
            "separately"
        )
    model = on_device(model, ctx.device, settings.get("dtype"))
    ctx.check_same_state(list(model.parameters()), f"distribute: {type(model).__name__}")
    if model.data_fidelity is not None:
        model.data_fidelity = torch.nn.ModuleList(
            each
            if isinstance(each, DistributedStackedFidelity)
            else DistributedStackedFidelity(ctx, each)
            for each in model.data_fidelity
        )
    for prior in model.prior or ():
        if getattr(prior, "denoiser", None) is not None:
            _prior(prior, ctx, **settings)
    learned = getattr(model, "params_algo", None)
    if isinstance(learned, torch.nn.ParameterDict):
        found = [each for each in learned.parameters() if each.requires_grad]
        _parameters(found, ctx, average)
    return model


_OPERATORS = ("num_operators", "dtype", "factory_kwargs")
_TILING = (
    *("dtype", "tiling_strategy", "tiling_dims", "patch_size", "overlap", "max_batch_size"),
    *("checkpoint_batches", "checkpoint_use_reentrant", "checkpoint_preserve_rng_state"),
)
# the function that spreads each kind of object, and the arguments that it uses
_KINDS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "physics": (_physics, (*_OPERATORS, "gather_strategy")),
    "linear_physics": (
        partial(_physics, cls=DistributedStackedLinearPhysics),
        (*_OPERATORS, "gather_strategy"),
    ),
    "data_fidelity": (_data_fidelity, (*_OPERATORS, "reduction")),
    "denoiser": (_denoiser, _TILING),
    "prior": (_prior, _TILING),
    "parameters": (_parameters, ("average",)),
    "module": (_module, (*_TILING, "average")),
}


def _kind_of(given: Any) -> str:
    """The kind of an object, by its class if it is one of deepinv, else by its attributes."""
    first = given[0] if isinstance(given, list | tuple) and given else given
    if isinstance(first, torch.nn.Parameter):
        return "parameters"
    operators = items_of(given) or []
    if operators and all(hasattr(each, "A") for each in operators):
        # Classes of deepinv are decisive: some have adjoints and are not linear.
        base, linear = "deepinv.physics", "LinearPhysics"
        is_linear = all(
            _is_a(each, base, linear)
            if _is_a(each, base, "Physics")
            else hasattr(each, "A_adjoint")
            for each in operators
        )
        return "linear_physics" if is_linear else "physics"
    is_fidelity = _is_a(first, "deepinv.optim.data_fidelity", "DataFidelity")
    if hasattr(given, "data_fidelity_list") or isinstance(first, L2) or is_fidelity:
        return "data_fidelity"
    if _is_a(given, "deepinv.optim.optimizers", "BaseOptim"):
        return "module"
    if _is_a(given, "deepinv.models.base", "Denoiser"):
        return "denoiser"
    if _is_a(given, "deepinv.optim.prior", "Prior"):
        return "prior"
    raise ValueError(
        f"distribute: cannot infer the kind of {type(given).__name__}; pass type_object, one of "
        f"{', '.join(_KINDS)}"
    )


def _is_a(given: Any, module: str, name: str) -> bool:
    """Whether an object is of a class of deepinv, without importing it."""
    found = sys.modules.get(module)
    return found is not None and isinstance(given, getattr(found, name))
