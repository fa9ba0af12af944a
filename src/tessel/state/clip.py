"""Clipping of gradients by their norm, over all shards of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import Module

from tessel.core.agreement import agree
from tessel.core.graph import eagerly
from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.core.shared import shared_whole
from tessel.distributed.movements import gathering
from tessel.distributed.shards import as_plain, sharding_of, shared_by
from tessel.operators.parameters import StoredInParts
from tessel.primitives.shard_layouts import shard_layout
from tessel.state.places import check_inside, row_of_model
from tessel.transport import code_of, kept_in_job

NO_GRADIENT = -1.0  # where the norm of a gradient would be, which is never negative
NOT_FINITE = (  # torch's own words
    "The total norm of order {} for gradients from `parameters` is non-finite, so it cannot be "
    "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
    "`error_if_nonfinite=False`"
)


@dataclass(frozen=True)
class ParameterPiece:
    """This worker's piece of a parameter, and the workers whose pieces make up the whole.

    Attributes:
        name: the name of the parameter, for errors.
        value: the parameter.
        counted: the workers whose gradients count in the norm of the whole.
        holders: for each worker that counts, those that have the same gradient.
    """

    name: str
    value: Tensor
    counted: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, name: str, value: Tensor, layout: Layout | None, row: Partition) -> ParameterPiece:
        """The piece of a parameter with this layout; without one, all workers share it."""
        counted, holders = _holders(layout or shared_whole(row, ()))
        check_inside("clip_grad_norm_", row, f"parameter {name}", chain.from_iterable(holders))
        return cls(name, value, counted, holders)

    def norm(self, norm_type: float) -> Tensor:
        """The norm of its gradient; without values, the neutral element."""
        grad = self.value.grad
        if grad is None:
            return torch.tensor(NO_GRADIENT, dtype=torch.float64)
        values = grad.coalesce().values() if grad.is_sparse else as_plain(grad)
        if not values.numel():
            least = 0.0 if norm_type >= 0 else float("inf")
            return torch.tensor(least, dtype=torch.float64, device=grad.device)
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()  # the squares of half precision overflow at 256
        return vector_norm(values, norm_type).double()  # norms of all dtypes are sent in one tensor

    def check(self, norms: Mapping[int, Tensor]) -> None:
        """Raise ValueError if workers that share it have other gradients, or only some have one."""
        found = {worker: float(norm) for worker, norm in norms.items()}
        without = [worker for worker, norm in found.items() if norm == NO_GRADIENT]
        if without and len(without) < len(found):
            raise ValueError(
                f"clip_grad_norm_: workers {without} have no gradient of the parameter "
                f"{self.name}, and others have one; all must take part in the same backward pass"
            )
        # Equal up to rounding, in which accelerators differ: half of the digits must agree.
        tolerance = torch.finfo(self.value.dtype).eps ** 0.5
        for same in self.holders:
            first = found[same[0]]
            for worker in same[1:]:
                other = found[worker]
                bound = tolerance * max(abs(first), abs(other))
                equal = first == other or (first != first and other != other)  # nan on both
                if not equal and not abs(first - other) <= bound < float("inf"):
                    raise ValueError(
                        f"clip_grad_norm_: the parameter {self.name}, of shape "
                        f"{tuple(self.value.shape)} here, is treated as shared by all workers, "
                        f"but its gradient has norm {first:.6g} on worker {same[0]} and "
                        f"{other:.6g} on worker {worker}; if it is a shard, register it with "
                        "tessel.register_parallel_dim(parameter, dim) or pass the module that "
                        "has it; if not, use it through tessel.distributed.copy, which sums its "
                        "gradient"
                    )


@eagerly
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor] | Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    partition: Partition | None = None,
) -> Tensor:
    """Clip the norm of the whole model's gradients: `torch.nn.utils.clip_grad_norm_`.

    Forward:  ‖g‖ = (Σ |g_i|^p)^(1/p) over all shards and, once, all shared parameters; then
    g ← g · min(1, max_norm / (‖g‖ + 1e-6)), on every worker.

    Parameters that are registered as shards count on each worker of their group. All others are
    treated as shared: every worker has the same gradient, which counts once; if the gradients
    differ, every worker raises ValueError. Layers that store blocks of their weights without a
    sharding, such as `DistributedLinear` with `P_w`, are recognised if the module itself is passed.
    Sparse gradients count like the equivalent dense ones.

    Args:
        parameters: the parameters, as in torch; or a module, for all of its parameters.
        max_norm: the largest norm of the gradients.
        norm_type: p, which may be infinite.
        error_if_nonfinite: whether to raise RuntimeError for a norm that is not finite.
        foreach: whether torch scales all gradients in one call; None for torch's choice.
        partition: the workers that together hold one copy of the model; None for those of the
            shards, or without shards for the default group.

    >>> import tessel, torch
    >>> layer = tessel.nn.ParallelLinear(3, 2, dim=-1)
    >>> layer(torch.ones(4, 3)).sum().backward()
    >>> round(tessel.nn.clip_grad_norm_(layer.parameters(), 1.0).item(), 3)
    11.314
    >>> round(layer.bias.grad.norm().item(), 3)
    0.5
    """
    found = list(_named(parameters))
    settings = f"{max_norm=!r}, {norm_type=!r}, {error_if_nonfinite=!r}"
    with torch.no_grad():
        total = total_norm(found, norm_type, partition, settings)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(NOT_FINITE.format(norm_type))
        torch.nn.utils.clip_grads_with_norm_(
            [each for _, each, _ in found], max_norm, total, foreach
        )
    return total


Named = tuple[str, Tensor, Layout | None]


def _named(parameters: Tensor | Iterable[Tensor] | Module) -> Iterator[Named]:
    """Each parameter with a name, and its layout if a sharding or its module defines one."""
    if isinstance(parameters, Module):
        known: dict[int, Layout | None] = {}
        for module in parameters.modules():
            own = module.stored_parameters() if isinstance(module, StoredInParts) else ()
            known.update((id(module._parameters.get(name)), each) for name, each in own)
        for name, value in parameters.named_parameters():
            yield name, value, known.get(id(value)) or _layout_of(value)
        return
    several = [parameters] if isinstance(parameters, Tensor) else parameters
    for number, value in enumerate(several):
        yield f"number {number}", value, _layout_of(value)


def _layout_of(parameter: Tensor) -> Layout | None:
    """The layout of the workers' parts by the sharding; the shape is not used."""
    sharding, sharing = sharding_of(parameter), shared_by(parameter)
    if sharding is not None:
        return Layout.balanced(sharding.partition, (sharding.partition.size,))
    return None if sharing is None else shared_whole(sharing, ())


@kept_in_job
def _holders(layout: Layout) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The workers that count, and for each of them all that have the same value."""
    P = layout.partition
    places = {worker: P.coordinates(worker) or () for worker in P.ranks}
    counted = [w for w, at in places.items() if not any(at[axis] for axis in layout.shared)]
    return tuple(counted), tuple(tuple(layout.holders(places[worker])) for worker in counted)


def total_norm(
    found: Sequence[Named], norm_type: float, partition: Partition | None, settings: str
) -> Tensor:
    """The norm of the whole model, with the dtype and device of torch's.

    The workers that hold it agree on the parameters and on the settings first.
    """
    row = row_of_model((layout.partition for _, _, layout in found if layout), partition)
    if not row.active:
        if any(value.grad is not None and value.grad.numel() for _, value, _ in found):
            raise ValueError(
                f"clip_grad_norm_ over {row}: this worker is not one of these, but has gradients; "
                "pass `partition`, with all workers that hold the model"
            )
        return torch.tensor(0.0)
    pieces = [ParameterPiece.of(name, value, layout, row) for name, value, layout in found]
    # as a number, since errors quote the texts of workers, and this may be long
    code = code_of(" ".join(f"{each.counted} {each.holders}" for each in pieces))
    agree(
        row,
        f"clip_grad_norm_ of {len(pieces)} parameters, {settings}, over {row}, whose shards lie as "
        f"the number {code} says",
    )
    norm_type = float(norm_type)  # only now: what is no number is part of the settings
    if not pieces:
        return torch.tensor(0.0)  # as torch has it
    # Only norms are sent, a number for each parameter, and all of them in one message.
    device = pieces[0].value.device
    own = torch.stack([piece.norm(norm_type).to(device) for piece in pieces])
    # A row for each worker, in their order. One copy to the CPU, since each number will be read.
    norms = gathering(shard_layout(row, (row.size, len(pieces)), 0)).apply(own[None]).cpu()
    wholes = []
    for number, piece in enumerate(pieces):
        workers = sorted(worker for some in piece.holders for worker in some)
        column = {worker: norms[row.place(worker) or 0, number] for worker in workers}
        piece.check(column)  # every worker has all norms: all raise, or none
        counted = torch.stack([column[worker] for worker in piece.counted])
        if not bool((counted == NO_GRADIENT).all()):
            # the norms of p = 0 are counts, which add
            norm = counted.sum() if norm_type == 0 else vector_norm(counted, norm_type)
            wholes.append(norm)
    if not wholes:
        return torch.tensor(0.0)
    total = vector_norm(torch.stack(wholes), norm_type)
    values = [value for _, value, _ in found]
    with_grads = [value for value in values if value.grad is not None] or values
    real = (d.to_real() if (d := value.dtype).is_complex else d for value in with_grads)
    dtype = reduce(torch.promote_types, real)
    return total.to(with_grads[0].device, dtype)
