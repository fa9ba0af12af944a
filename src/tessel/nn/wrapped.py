"""Converted models under torch's wrappers: the mean over workers must be one over replicas.

The workers of a partition together hold one replica of a converted model, and all of them have its
whole gradients. `DistributedDataParallel` and `fully_shard` take the mean over their workers. If
these include equally many workers of each replica, that is the mean over replicas, as in torch;
otherwise some replicas would have more weight than others, and all workers raise.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from tessel.core.agreement import agree, tell
from tessel.core.checksum import checksum
from tessel.core.handles import constant_in_graphs
from tessel.core.linop import record_local
from tessel.core.partition import Partition
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.tensor import open_part
from tessel.transport import share_over

Ranks = tuple[int, ...]

_CALL = Module._call_impl.__code__
_AVERAGES = DistributedDataParallel.forward.__code__


def is_dtensor(value: Tensor) -> bool:
    """Whether a tensor is a `DTensor`, like the parameters of `fully_shard` between calls."""
    tensors = sys.modules.get("torch.distributed.tensor")  # its import takes long, and few need it
    return tensors is not None and isinstance(value, tensors.DTensor)


def sharded_kinds() -> tuple[Any, ...]:
    """The classes of modules whose parameters FSDP has split; () as long as there are none."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # its import takes long, and few need it
    return () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)


def is_fully_sharded(module: Module) -> bool:
    """Whether `fully_shard` was applied to this very module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # faster than `sharded_kinds`
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_flattened(module: Module) -> bool:
    """Whether it is a `FullyShardedDataParallel`, the FSDP before `fully_shard`."""
    return isinstance(module, sharded_kinds()[1:])


def refuse_flattened(name: str, modules: Iterable[Module], P_x: Partition) -> None:
    """Raise on all workers if parameters are parts of flat ones, which workers take for alike."""
    if any(map(is_flattened, modules)):
        text = (
            f"{name} over {P_x} is in, or contains, a FullyShardedDataParallel, which silently "
            "keeps different values on each worker; use torch.distributed.fsdp.fully_shard"
        )
        _refuse(text, P_x)


def _refuse(text: str, P_x: Partition) -> None:
    if P_x.active and P_x.size > 1:
        agree(P_x, text)  # workers without a problem learn of it
    raise NotImplementedError(text)


def partitions_of(module: Module) -> list[Partition]:
    """The partitions for which a module, or a module inside it, was converted."""
    methods = (vars(each).get("forward") for each in module.modules())
    found = (getattr(each, "conversion", None) for each in methods)
    return list(dict.fromkeys(each.P_x for each in found if each is not None))


def callers() -> Iterator[Module]:
    """The modules in whose forward pass this is called, from the innermost outwards."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL or frame.f_code is _AVERAGES:
            yield frame.f_locals["self"]
        frame = frame.f_back


@constant_in_graphs
def is_averaged() -> bool:
    """Whether DDP calls the code that is compiled; it runs eagerly then, and checks replicas."""
    return DistributedDataParallel._get_active_ddp_module() is not None


def wrappers_of(inside: Iterable[Module]) -> list[Module]:
    """The wrappers that average the gradients of the running model.

    Args:
        inside: modules of the model to which `fully_shard` was applied.
    """
    kinds = (DistributedDataParallel, *sharded_kinds())
    found = [*inside, *(each for each in callers() if isinstance(each, kinds))]
    active = DistributedDataParallel._get_active_ddp_module()  # compiled code has other frames
    found += [] if active is None else [active]
    return list({id(each): each for each in found}.values())


def averaging_groups(wrapper: Module) -> list[tuple[Any, ...]]:
    """The process groups over which a wrapper takes successive means, for each mesh."""
    if isinstance(wrapper, DistributedDataParallel):
        return [(wrapper.process_group,)]
    state: Any = wrapper._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13 there is at most one
        one = getattr(state, "_fsdp_param_group", None)
        groups = [] if one is None else [one]
    infos = [each.mesh_info for each in groups]
    kinds = ("shard_process_group", "replicate_process_group")
    return [tuple(getattr(each, kind) for kind in kinds if hasattr(each, kind)) for each in infos]


def check_replicas(
    name: str, P_x: Partition, wrappers: Iterable[Module], spread: bool, known: set[Ranks]
) -> str:
    """Raise ValueError on all workers if a wrapper's mean is not a mean over replicas.

    Args:
        name: the name of the model.
        P_x: the workers that hold this replica.
        wrappers: the wrappers of this call.
        spread: whether the output of the model will be a spread tensor.
        known: the workers of wrappers that are known to be correct, to which others are added.

    Returns:
        A text that must be the same on all workers of a replica.
    """
    wrappers = list(wrappers)
    refuse_flattened(name, wrappers, P_x)
    ddps = []
    for wrapper in wrappers:
        for groups in averaging_groups(wrapper):
            ranks = map(dist.get_process_group_ranks, groups)
            workers = tuple(sorted({worker for each in ranks for worker in each}))
            if workers not in known:
                _check_mean(name, P_x, wrapper, groups, workers)
                known.add(workers)
        if isinstance(wrapper, DistributedDataParallel):
            if spread and (wrapper.find_unused_parameters or wrapper.static_graph):
                _refuse(
                    f"{name} over {P_x}: DistributedDataParallel with find_unused_parameters or "
                    "static_graph searches the graph of its output, but the graph of a spread "
                    "tensor is that of its part; pass parts to the model, or use neither option",
                    P_x,
                )
            ddps.append("no_sync()" if not wrapper.require_backward_grad_sync else "mean")
    return f"DistributedDataParallel ({', '.join(ddps)})" if ddps else "no wrapper"


def _check_mean(
    name: str, P_x: Partition, wrapper: Module, groups: Sequence[Any], workers: Ranks
) -> None:
    heard = [(tuple(P_x.ranks), P_x.rank is not None)]
    for handle in groups:  # successively along the axes of a mesh
        heard = [each for some in share_over(handle, heard) for each in some]
    is_ddp = isinstance(wrapper, DistributedDataParallel)
    kind = "DistributedDataParallel" if is_ddp else "fully_shard"
    problem = unfit(heard)
    text = f"{kind} over workers {list(workers)} around the converted {name}: {problem}"
    if not problem:  # the same on all workers of a replica, which may be in other groups
        replicas = sorted({ranks for ranks, _ in heard})
        text = f"{kind} around the converted {name}, with the replicas on workers {replicas}"
    if P_x.active and P_x.size > 1:
        agree(P_x, text)  # one that is not wrapped, or otherwise, is found out here
    if problem:
        raise ValueError(text)


def unfit(heard: Sequence[tuple[Ranks, bool]]) -> str:
    """Why a mean over workers is not a mean over replicas; "" if it is.

    Args:
        heard: for each worker of the wrapper, the workers of its replica, and whether it is one.

    >>> unfit([((0, 1), True), ((2, 3), True)])
    ''
    >>> unfit([((0, 1), True), ((0, 1), True), ((2, 3), True)])[:60]
    'it has 2 workers of the replica on workers [0, 1] and 1 of t'
    """
    counts = Counter(ranks for ranks, _ in heard)
    (first, most), *others = counts.most_common()
    remedy = (
        "as process_group= or mesh=, pass the workers at the same place of all replicas, or all "
        "workers of all replicas"
    )
    if not all(is_in for _, is_in in heard):
        return f"some of these workers are not in the partition of the model; {remedy}"
    if len({rank for ranks in counts for rank in ranks}) < sum(map(len, counts)):
        return f"the replicas {[list(each) for each in counts]} have workers in common; {remedy}"
    if others and others[-1][1] != most:
        last, fewest = others[-1]
        return (
            f"it has {most} workers of the replica on workers {list(first)} and {fewest} of that "
            f"on workers {list(last)}, so that its mean would count one more than the other; "
            f"{remedy}"
        )
    return ""


class Unviewed:
    """The same values as a tensor that is no view of another, without a copy."""

    @property
    def H(self) -> Unviewed:
        return self

    def _apply(self, x: Tensor) -> Tensor:
        return x.detach()


def unviewed(y: Any) -> Any:
    """Replace an output of a module to which `fully_shard` was applied by one that is no view.

    Torch gathers the parameters again when a gradient of the output arrives. If the output is a
    view and is changed in place, for example by the next activation, that hook is lost: parts of
    outputs may be views where outputs in one process are not.
    """
    part = open_part(y) if isinstance(y, SpreadTensor) else y
    if not isinstance(part, Tensor) or not (part.requires_grad and part._is_view()):
        return y
    part = record_local(Unviewed(), part)
    return SpreadTensor(part, y.layout) if isinstance(y, SpreadTensor) else part


def check_alike(values: Iterable[tuple[str, Tensor]], P_x: Partition) -> None:
    """Raise ValueError on all workers if holders of the same part have different values.

    Parameters that `fully_shard` has split cannot be sent as a whole: they must already be equal.
    """
    own = {}
    for name, value in values:
        part, place = value.detach(), ()
        if is_dtensor(value):
            mesh, part = value.device_mesh, part.to_local()  # type: ignore[attr-defined]
            at = mesh.get_coordinate() or ()
            pairs = zip(value.placements, at, strict=True)  # type: ignore[attr-defined]
            place = tuple(k for each, k in pairs if each.is_shard())
        # a copy: memory that numpy has seen cannot be freed as `fully_shard` does it
        own[name, tuple(value.shape), str(value.dtype), place] = checksum(part.clone())
    told = tell(P_x, list(own.items()))
    first: dict[Any, tuple[int, int]] = {}
    for worker, items in told.items():
        for key, number in items:
            known, expected = first.setdefault(key, (worker, number))
            if number != expected:
                raise ValueError(
                    f"{key[0]} under fully_shard has different values on workers {known} and "
                    f"{worker}, which belong to one replica, over {P_x}; apply "
                    "tessel.nn.distribute_module first, which makes them equal, or use the same "
                    "seed"
                )
