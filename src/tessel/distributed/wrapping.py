"""Guards for torch's own code that would mix shards: wrappers of modules, and some optimizers.

`DistributedDataParallel` sends the values of its first worker to the others and averages all
gradients. That is right for a shard if its workers hold the same one, as replicas of a split model
do, and wrong if each of them holds a different one. Which of the two is the case depends on the
process group, not on the module, so it is decided when a module is wrapped. To this end, the
`__init__` of torch's wrappers is replaced by one that checks first, when the first tensor becomes a
shard; a program without shards finds torch unchanged.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import BoundArguments, signature
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Adafactor, Muon, Optimizer
from torch.optim.optimizer import _foreach_supported_types as of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as of_utilities

from tessel.distributed.shardings import Sharding, UnknownSharding, describe, state_of
from tessel.encoding import encodable
from tessel.transport import share_over

IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's own name for the list of a module
REGISTERED = "_tessel_ddp_parameters"  # the names in that list that Tessel added, being shards

_FSDP = "torch.distributed.fsdp"
_REPLICAS = "tessel.nn.data_parallel(model)"

# what an optimizer computes from several numbers at once, in words
MIXING: dict[type[Optimizer], str] = {
    LBFGS: "takes products over all parameters",
    Adafactor: "takes means over rows and columns",
    Muon: "makes whole matrices orthogonal",
}
CLIPPING = "torch.nn.utils.clip_grad"  # the module in which torch clips gradients

Check = Callable[[BoundArguments], AbstractContextManager[None]]


@cache
def adapt_torch(shards: type[Tensor]) -> None:
    """Make torch treat shards correctly, from the first one on; `shards` is their type."""
    _guard(DistributedDataParallel, _deciding)
    if _FSDP in sys.modules:
        _guard_fsdp()
    else:
        sys.meta_path.insert(0, _ImportGuard())
    # Optimizers step lists of these types in a few kernels, and others one by one; torch's own
    # DTensor adds itself in the same way, since there is no public function.
    for known in (of_optimizers, of_utilities):
        known.append(shards)


def _guard(wrapper: Any, check: Check) -> None:
    """Run a check around the `__init__` of a class, also for its subclasses."""
    init = wrapper.__init__
    parameters = signature(init)

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        try:
            given = parameters.bind(self, *args, **kwargs)
        except TypeError:  # torch explains what is wrong with them
            return init(self, *args, **kwargs)
        with check(given):
            init(*given.args, **given.kwargs)

    wrapper.__init__ = __init__


class _ImportGuard(MetaPathFinder):
    """Guards FSDP once it is imported, which takes a second and which few programs do."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _FSDP:
            return None
        sys.meta_path.remove(self)  # before all finders are asked again
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_guard(module: Any) -> None:
                execute(module)
                _guard_fsdp()

            spec.loader.exec_module = execute_and_guard  # type: ignore[method-assign]
        return spec


def _guard_fsdp() -> None:
    """Guard both kinds of FSDP.

    Programs import `fully_shard` itself long before there is a shard, so it cannot be replaced; the
    class in which it keeps the parameters of a module can be guarded at any time.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    _guard(FullyShardedDataParallel, _refusing_flat)
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    except ImportError:
        known = False
    else:
        known = {"params", "modules", "mesh_info"} <= {*signature(FSDPParamGroup).parameters}
    if known:
        _guard(FSDPParamGroup, _refusing_group)
    else:  # a private class of torch, which may change: importing FSDP must not fail for that
        text = "fully_shard of this version of torch is not supported by Tessel and may mix shards"
        warnings.warn(text, stacklevel=2)


@encodable
class HeldShard(NamedTuple):
    """One worker's report of a shard in the module that it wraps.

    Args:
        name: the name of the parameter or buffer.
        what: the sharding in words, or the remedy for a lost one.
        is_lost: whether the sharding was lost.
        dim: the dimension that is split.
        size: the length of the whole along it, if known.
        workers: the workers of the shard, in their order.
        place: the place of this worker among them, or None.
        is_ignored: whether the user asked DDP to leave it alone.
        is_delayed: whether the user asked for a delayed reduction of its gradient.
    """

    name: str
    what: str
    is_lost: bool
    dim: int
    size: int | None
    workers: tuple[int, ...]
    place: int | None
    is_ignored: bool
    is_delayed: bool

    @property
    def is_split(self) -> bool:
        return len(self.workers) > 1


@encodable
class ModuleReport(NamedTuple):
    """One worker's report of a module that it wraps: its shards, and whether it has others."""

    shards: tuple[HeldShard, ...]
    has_others: bool

    @classmethod
    def of(cls, module: Module, given: dict[str, Any]) -> ModuleReport:
        """Return the report of a module, given the arguments of its wrapper."""
        asked, delays = set(_asked(module)), given.get("delay_all_reduce_named_params") or ()
        delayed = {id(value) for _, value in delays} if isinstance(delays, list | tuple) else set()
        ignored = {id(value) for name, value in _named(module, False) if name in asked}
        shards = []
        for name, value in _named(module):
            state = state_of(value)
            if state is None:
                continue
            known, row = isinstance(state, Sharding), state.partition
            dim, size = (state.dim, state.size) if isinstance(state, Sharding) else (0, None)
            shards.append(
                HeldShard(
                    name=name,
                    what=describe(state) if isinstance(state, Sharding) else state.remedy,
                    is_lost=not known and (row is None or row.size > 1),
                    dim=dim,
                    size=size,
                    workers=() if row is None else row.ranks,
                    place=None if row is None else row.rank,
                    is_ignored=id(value) in ignored,
                    is_delayed=id(value) in delayed,
                )
            )
        split = {each.name for each in shards if each.is_split}
        others = (name not in split and p.requires_grad for name, p in module.named_parameters())
        return cls(tuple(shards), any(others))


@contextmanager
def _deciding(given: BoundArguments) -> Iterator[None]:
    """Let DDP ignore the shards of a module that differ between its workers, for this call only.

    All workers exchange reports of their shards and come to the same decision, or raise.
    """
    module, mesh = given.arguments.get("module"), given.arguments.get("device_mesh")
    handle = given.arguments.get("process_group")  # None is the group of all workers
    if mesh is not None and mesh.ndim == 1:
        handle = mesh.get_group(0)
    workers = _workers_of(handle)
    report = ModuleReport.of(module, given.arguments) if isinstance(module, Module) else None
    if report is None or not report.shards or len(workers) < 2:
        yield
        return
    assert isinstance(module, Module)
    apart = decide(workers, share_over(handle, report))
    before = module.__dict__.get(IGNORED)
    asked = [name for name in _asked(module) if name not in apart]
    # A value that several modules use has several names. A value of the module itself has two: DDP
    # looks up some names with a leading dot.
    known = dict(_named(module))
    wanted = {id(known[name]) for name in apart}
    names = [name for name, value in _named(module, False) if id(value) in wanted]
    names += [f".{name}" for name in names if "." not in name]
    setattr(module, IGNORED, [*asked, *names])
    try:
        yield
    finally:  # DDP has its own copy; the next wrapper may have a different group
        delattr(module, IGNORED)
        if before is not None:
            setattr(module, IGNORED, before)


def _workers_of(handle: Any) -> list[int]:
    """The workers of a process group if this is one of them; else torch raises by itself."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank(handle) < 0:
        return []
    return list(dist.get_process_group_ranks(handle))


def _asked(module: Module) -> list[str]:
    """The names that the user asked DDP to ignore, without those added only because of shards."""
    registered = getattr(module, REGISTERED, ())
    return [name for name in getattr(module, IGNORED, ()) if name not in registered]


def _named(module: Module, once: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=once)
    yield from module.named_buffers(remove_duplicate=once)


def decide(workers: Sequence[int], reports: Sequence[ModuleReport]) -> list[str]:
    """The names of the shards that DDP must ignore; ValueError if DDP could not be right.

    Args:
        workers: the workers of its process group.
        reports: their reports, in the same order.

    A shard that all workers hold alike is averaged:

    >>> weight = HeldShard("weight", "a shard", False, 0, 8, (0, 1), 0, False, False)
    >>> other = weight._replace(workers=(2, 3))
    >>> decide([0, 2], [ModuleReport((weight,), True), ModuleReport((other,), True)])
    []

    Of shards that differ between the workers, each keeps its own:

    >>> other = weight._replace(place=1)
    >>> decide([0, 1], [ModuleReport((weight,), True), ModuleReport((other,), True)])
    ['weight']
    """
    label = f"DistributedDataParallel over workers {list(workers)}"
    for worker, report in zip(workers, reports, strict=True):
        if [each.name for each in report.shards] != [each.name for each in reports[0].shards]:
            raise ValueError(
                f"{label}: the shards of the model differ between workers: "
                f"{[each.name for each in reports[0].shards]} on worker {workers[0]}, "
                f"{[each.name for each in report.shards]} on worker {worker}; wrap one model"
            )
    apart = {
        held[0].name: _is_apart(label, workers, held)
        for held in zip(*(report.shards for report in reports), strict=True)
        if any(each.is_split or each.is_lost for each in held)
    }
    if apart and all(apart.values()) and not all(report.has_others for report in reports):
        raise ValueError(
            f"{label}: all parameters that need a gradient are shards, of which each of these "
            f"workers has its own, and there is nothing to average; take the model as it is"
        )
    return [name for name, is_apart in apart.items() if is_apart]


def _is_apart(label: str, workers: Sequence[int], held: Sequence[HeldShard]) -> bool:
    """Whether each of these workers has its own shard, not all the same; ValueError if neither."""
    lost = next((each for each in held if each.is_lost), None)
    if lost is not None:
        raise ValueError(f"{label}: of {lost.name} {lost.what}")
    name, what = held[0].name, held[0].what
    # either all hold different shards of one tensor …
    if len({each.workers for each in held}) == 1 and {*workers} <= {*held[0].workers}:
        if any(each.is_delayed for each in held):
            raise ValueError(
                f"{label}: {name} is in delay_all_reduce_named_params, and is {what}, of which "
                f"each worker has its own part; leave it out"
            )
        return True
    # … or all hold the same shard, each in a group of its own
    pairs = [*zip(workers, held, strict=True)]
    is_alone = all({*workers} & {*each.workers} == {worker} for worker, each in pairs)
    if is_alone and len({(e.place, len(e.workers), e.dim, e.size) for e in held}) == 1:
        if any(each.is_ignored for each in held):
            raise ValueError(
                f"{label}: {name} is {what}; these workers hold the same shard and are asked to "
                f"ignore its gradient, so that their copies would drift apart; take it out of "
                f"{IGNORED}"
            )
        return False
    which = [
        f"{each.what} on worker {worker}, which has part {each.place} of it"
        if each.place is not None
        else f"{each.what} for worker {worker}, which is not one of these"
        for worker, each in pairs
    ]
    raise ValueError(
        f"{label}: {name} is {'; '.join(dict.fromkeys(which))}. A mean over all would mix "
        f"different shards, and without one those that hold the same shard would drift apart; "
        f"{_REPLICAS} takes the mean over the workers that hold the same shards"
    )


@contextmanager
def _refusing_flat(given: BoundArguments) -> Iterator[None]:
    """Check a module that `FullyShardedDataParallel` is to wrap."""
    arguments = given.arguments
    for name in ("ignored_modules", "ignored_states"):  # iterators can be read only once
        if arguments.get(name) is not None:
            arguments[name] = list(arguments[name])
    ignored = [*(arguments.get("ignored_modules") or ()), *(arguments.get("ignored_states") or ())]
    left_out = {
        id(value)
        for each in ignored
        for value in (each.parameters() if isinstance(each, Module) else (each,))
    }
    module = arguments.get("module")
    if isinstance(module, Module):
        workers = _workers_of_fsdp(arguments.get("process_group"), arguments.get("device_mesh"))
        call = f"FullyShardedDataParallel over workers {workers}", "ignored_states=[…]"
        _check_left_out([module], lambda value: id(value) in left_out, workers, *call)
    yield


@contextmanager
def _refusing_group(given: BoundArguments) -> Iterator[None]:
    """Check modules to which `fully_shard` is applied."""
    managed = {id(value) for value in given.arguments["params"]}
    workers = _workers_of_fsdp(None, given.arguments["mesh_info"].mesh)
    call = f"fully_shard over workers {workers}", "ignored_params={…}"
    modules = given.arguments["modules"]
    _check_left_out(modules, lambda value: id(value) not in managed, workers, *call)
    yield


def _workers_of_fsdp(process_group: Any, mesh: Any) -> list[int]:
    if mesh is not None:
        return sorted(mesh.mesh.flatten().tolist())
    handles = process_group if isinstance(process_group, tuple) else (process_group,)
    return sorted({worker for handle in handles for worker in _workers_of(handle)})


def _check_left_out(
    modules: Iterable[Module],
    is_left_out: Callable[[Tensor], bool],
    workers: Sequence[int],
    label: str,
    remedy: str,
) -> None:
    """Raise ValueError unless FSDP ignores all shards, and none has copies that would drift apart.

    FSDP concatenates the shards of its workers, or takes them for one tensor; a layer gets back
    neither its shard nor a sharding.
    """
    if len(workers) < 2:
        return
    for name, value in (each for module in modules for each in module.named_parameters()):
        state = state_of(value)
        if state is None or (state.partition is not None and state.partition.size == 1):
            continue
        if isinstance(state, UnknownSharding):
            raise ValueError(f"{label}: of {name} {state.remedy}")
        if not is_left_out(value):
            raise ValueError(
                f"{label}: {name} is {state}, and FSDP would take shards of different workers for "
                f"one tensor; leave all shards to their workers by {remedy}, or wrap the model by "
                f"{_REPLICAS}"
            )
        if not {*workers} <= {*state.partition.ranks}:
            raise ValueError(
                f"{label}: {name} is {state}, and other workers hold copies of it, which would "
                f"drift apart; apply FSDP over workers {list(state.partition.ranks)} alone, or "
                f"wrap the model by {_REPLICAS}"
            )


def is_redundant(optimizer: Optimizer) -> bool:
    """Whether this is a `ZeroRedundancyOptimizer`, whose state is divided among the workers."""
    # by name: its module takes long to import, and few programs do
    return any(each.__name__ == "ZeroRedundancyOptimizer" for each in type(optimizer).__mro__)


def check_optimizer(stepping: Optimizer, *_: Any) -> None:
    """Raise ValueError for an optimizer whose steps mix the shards of different workers.

    Each worker would compute different products, norms and means, and shared values would drift
    apart.
    """
    sends = is_redundant(stepping)
    mixes = next((why for kind, why in MIXING.items() if isinstance(stepping, kind)), None)
    if mixes is None and not sends:
        return
    name = type(stepping).__name__
    for parameter in (each for group in stepping.param_groups for each in group["params"]):
        sharding = state_of(parameter)
        if not isinstance(sharding, Sharding) or sharding.partition.size == 1:
            continue
        if not sends:
            raise ValueError(
                f"{name} of a parameter that is {sharding}: it {mixes}, of which each worker has "
                f"its shards only; take an optimizer that treats each number by itself, as "
                f"torch.optim.Adam"
            )
        workers = _workers_of(stepping.process_group)  # type: ignore[attr-defined]
        if len({*workers} & {*sharding.partition.ranks}) > 1:
            raise ValueError(
                f"{name} over workers {workers} of a parameter that is {sharding}: it sends each "
                f"parameter from one worker to all others, which have other shards; take the "
                f"optimizer of torch that it is made of, or as process_group= the workers that "
                f"hold the same shards"
            )


def check_gradient_reader(frame: FrameType, sharding: Sharding | UnknownSharding) -> None:
    """Raise ValueError for code of torch that takes the gradients of one worker for all gradients.

    The gradient of a parameter is a plain tensor, which does not show that it belongs to a shard;
    this is known only here, where it is read. Torch's own scaler and clipping would find a
    different number on each worker.
    """
    if sharding.partition is None or sharding.partition.size == 1:
        return
    asking = frame.f_locals.get("self")
    if (
        isinstance(asking, GradScaler)
        and type(asking)._unscale_grads_ is GradScaler._unscale_grads_
    ):
        raise ValueError(
            f"{type(asking).__name__} of a parameter that is {sharding}: it looks for infinite "
            f"gradients on one worker, which would leave out a step that others make; take "
            f"tessel.nn.ParallelGradScaler"
        )
    if frame.f_globals.get("__name__") == CLIPPING and frame.f_code.co_qualname.startswith(
        "clip_grad_norm_"
    ):
        raise ValueError(
            f"torch.nn.utils.clip_grad_norm_ of a parameter that is {sharding}: it takes the norm "
            f"of one worker's shards, which is another one on each; take "
            f"tessel.nn.clip_grad_norm_"
        )
