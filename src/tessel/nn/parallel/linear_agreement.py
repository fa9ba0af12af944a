"""What workers agree on before a product with a weight in shards: that input and weight fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessel import transport
from tessel.core.agreement import Agreement, TensorMeta, same
from tessel.core.layout import Layout, Shape
from tessel.core.partition import Partition
from tessel.distributed.shard_layouts import shard_layout
from tessel.distributed.shardings import (
    Sharding,
    State,
    check_known,
    describe,
    is_wrapped,
    state_of,
)
from tessel.nn.parallel.agreed import check_parts, check_sharding, misfit
from tessel.transport import kept_in_job

COLUMN, ROW = 1, 0


@dataclass(frozen=True)
class ShardedProduct:
    """A product with a weight in shards, to the last detail in which workers must be alike.

    Args:
        name: what the user calls.
        partition: the workers, in one row.
        dim: `COLUMN` if the outputs are split, `ROW` if the inputs are.
        sizes: the numbers of inputs and outputs of the whole weight.
        state: what is known of the input.
        dtype: of the weight.
        device: of the weight.
        autocast: the dtype of an autocast region, if there is one.
        needs: which parameters get gradients.
        is_off: whether `torch.no_grad()` keeps some from it.
        problem: what is wrong with the tensors of this worker, or nothing.
    """

    name: str
    partition: Partition
    dim: int
    sizes: tuple[int, int]
    state: State
    dtype: torch.dtype
    device: str
    autocast: torch.dtype | None
    needs: tuple[bool, ...]
    is_off: bool
    problem: str

    @property
    def label(self) -> str:
        mode = ", under torch.no_grad()" if self.is_off else ""
        # what is wrong on one worker only is part of what it says, so that all others hear it
        wrong = f" and {self.problem}" if self.problem else ""
        return (
            f"{self.name} over {self.partition}{mode}, where the input is "
            f"{describe(self.state)}{wrong}"
        )

    @property
    def identity(self) -> str:
        """The label and all that it does not say."""
        return f"{self.label} {self.dtype} {self.device} {self.autocast} {self.needs}"

    def conclude(self, shapes: dict[int, Shape], meta: TensorMeta) -> tuple[Layout, TensorMeta]:
        """How the whole input lies; raises, as torch does, if it does not fit the weight."""
        if self.problem:  # on all workers: they all said so
            raise ValueError(f"{self.name} over {self.partition}: {self.problem}")
        check_known(self.state, self.label)
        pairs: list[tuple[str, Any, Any]] = [("device", meta.device, self.device)]
        if self.autocast is None:  # which converts both to one dtype
            pairs.append(("dtype", meta.dtype, self.dtype))
        for what, given, own in pairs:
            if given != own:
                raise RuntimeError(
                    f"{self.label}: input and weight must have the same {what}, got {given} and "
                    f"{own}"
                )
        last = len(shapes[self.partition.ranks[0]]) - 1
        if last < 0:
            raise ValueError(f"{self.label}: an input of at least one dimension is needed")
        expected = Sharding(last, self.partition, self.sizes[0]) if self.dim == ROW else None
        check_sharding(self.state, expected, "the input", self.label)
        batch = {worker: shape[:-1] for worker, shape in shapes.items()}
        shape = (*same(batch, "shape before the last", self.label), self.sizes[0])
        whole = Layout.whole(self.partition, shape, shared=True)
        parts = shard_layout(self.partition, shape, last)
        # Where no sharding says so, inputs are parts by their lengths. Whole ones are as long as
        # the weight everywhere: so parts that are so, too, on one worker or of nothing, are whole.
        fits = all(shapes[worker] == parts.shape_on(worker) for worker in self.partition.ranks)
        are_shorter = any(each != parts.shape for each in shapes.values())
        are_parts = self.dim == ROW and (self.state is not None or (fits and are_shorter))
        layout = parts if are_parts else whole
        hint = ""
        if self.dim == ROW and self.state is None:
            hint = (
                "; all workers pass the whole input, or each its shard, which may be registered by "
                "tessel.register_parallel_dim(x, -1)"
            )
        check_parts(shapes, layout, "an input", self.label, hint)
        return layout, meta


@kept_in_job
def agreement_on(product: ShardedProduct) -> Agreement[tuple[Layout, TensorMeta]]:
    """Where workers agree on the input of a product; made once, as each call of a layer asks."""
    P = product.partition
    return Agreement(P.prepare(), product.label, P.ranks, product.conclude, product.identity)


def problem_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    partition: Partition,
    dim: int,
    sizes: tuple[int, int],
) -> str:
    """What is wrong with the tensors of this worker, in words that name it.

    A parameter that is computed from other values may be another shard than the one that is needed.
    """
    layouts = layouts_of(partition, dim, sizes)
    for name, value in (("weight", weight), ("bias", bias)):
        layout, state = layouts[name], state_of(value)
        # on one worker every shard is the whole, whatever dimension it is split along
        apart = state is not None and partition.size > 1
        if apart and (problem := misfit(state, Sharding.of(layout), f"the {name}")):
            return problem
        if value is not None and tuple(value.shape) != layout.local_shape:
            return (
                f"the {name} of worker {transport.this_worker()} has the shape "
                f"{tuple(value.shape)}, where its shard of {layout.shape} has {layout.local_shape}"
            )
    is_part = dim == ROW and partition.size > 1 and x.ndim and x.shape[-1] != sizes[0]
    if is_part and is_wrapped(x) and state_of(x) is None:
        # functions inside of a transform do not see shards: nobody looked at what stood beside one
        return (
            "a transform of torch.func gives its input, which has the length of a part and no "
            "sharding: gradients of what was used beside a shard would be those of a part; derive "
            "by torch.autograd.grad, or give the transform spread tensors"
        )
    return ""


@kept_in_job
def layouts_of(partition: Partition, dim: int, sizes: tuple[int, int]) -> dict[str, Layout]:
    """Where the weight and the bias of these whole sizes (inputs, outputs) lie."""
    inputs, outputs = sizes
    weight = shard_layout(partition, (outputs, inputs), 0 if dim == COLUMN else 1)
    if dim == COLUMN:
        return {"weight": weight, "bias": shard_layout(partition, (outputs,), 0)}
    return {"weight": weight, "bias": Layout.whole(partition, (outputs,), shared=True)}
