"""Linear layers whose weight lies in shards on the workers of a group."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.forward_ad import dual_level

from tessel.core import boxes
from tessel.core.agreement import (
    TensorMeta,
    agree,
    agree_on_call,
    as_agreed,
    conclude,
    in_forward_mode,
    same,
)
from tessel.core.graph import eagerly
from tessel.core.layout import Layout, Shape
from tessel.core.partition import Partition
from tessel.core.shared import grad_alike
from tessel.distributed.group import row_of
from tessel.distributed.shard_layouts import layout_of_shards, shard_layout
from tessel.distributed.shards import (
    Sharding,
    State,
    UnknownSharding,
    check_known,
    describe,
    marked,
    state_of,
    traced_state,
    unmarked,
)
from tessel.nn.layer import needs_of
from tessel.nn.parallel.convert import Conversion, convert
from tessel.nn.parallel.drawing import draw_, equalize_
from tessel.nn.parallel.sharded import ShardedLayer
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.table import opened
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
        problem: what is wrong with the parameters of this worker, or nothing.
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
        """How the whole input lies."""
        if self.problem:
            raise ValueError(f"{self.name} over {self.partition}: {self.problem}")
        check_known(self.state, self.label)
        self._check_kind(meta)
        shape = self._whole_shape(shapes)
        if self.dim == ROW and self._are_shards(shapes):
            return shard_layout(self.partition, shape, len(shape) - 1), meta
        return Layout.whole(self.partition, shape, shared=True), meta

    def _are_shards(self, shapes: dict[int, Shape]) -> bool:
        """Whether the lengths of inputs say that they are shards, where no mark does.

        Whole inputs are as long as the weight on every worker. So shards that are so, too, are
        whole: those on one worker, and those of nothing.
        """
        if self.dim == COLUMN or isinstance(self.state, Sharding):
            return self.dim == ROW
        lengths = [shapes[worker][-1] for worker in self.partition.ranks]
        parts = boxes.balanced(self.sizes[0], self.partition.size)
        fits = lengths == [stop - start for start, stop in parts]
        return fits and any(length != self.sizes[0] for length in lengths)

    def _check_kind(self, meta: TensorMeta) -> None:
        """Raise as torch does if the weight is of another kind than the input."""
        pairs: list[tuple[str, Any, Any]] = [("device", meta.device, self.device)]
        if self.autocast is None:
            pairs.append(("dtype", meta.dtype, self.dtype))
        for what, given, own in pairs:
            if given != own:
                raise RuntimeError(
                    f"{self.label}: input and weight must have the same {what}, got {given} and "
                    f"{own}"
                )

    def _whole_shape(self, shapes: dict[int, Shape]) -> Shape:
        """The shape of the whole input; raises if the inputs do not fit."""
        length = self.sizes[0]
        first = shapes[self.partition.ranks[0]]
        if not first:
            raise ValueError(f"{self.label}: an input of at least one dimension is needed")
        self._check_sharding(len(first))
        same({w: shape[:-1] for w, shape in shapes.items()}, "shape before the last", self.label)
        parts = boxes.balanced(length, self.partition.size)
        for worker, (start, stop) in zip(self.partition.ranks, parts, strict=True):
            expected = stop - start if self._are_shards(shapes) else length
            if shapes[worker][-1] != expected:
                raise ValueError(f"{self.label}: {self._sizes(worker, shapes[worker], expected)}")
        return (*first[:-1], length)

    def _sizes(self, worker: int, shape: Shape, expected: int) -> str:
        text = (
            f"worker {worker} expected an input with {expected} of {self.sizes[0]} features in its "
            f"last dimension, got shape {shape}"
        )
        if self.state is None and self.dim == ROW:
            text += (
                "; all workers pass the whole input, or each its shard, which may be marked by "
                "tessel.register_parallel_dim(x, -1)"
            )
        return text

    def _check_sharding(self, ndim: int) -> None:
        sharding = self.state
        if not isinstance(sharding, Sharding):
            return
        if self.dim == COLUMN:
            raise ValueError(
                f"{self.label}: the outputs of this layer are split, and its input must be whole; "
                f"write x = tessel.distributed.gather(x) before, or take a layer with dim=0"
            )
        if sharding.dim != ndim - 1 or sharding.partition.ranks != self.partition.ranks:
            raise ValueError(
                f"{self.label}: a shard along the last dimension, {ndim - 1}, over the same "
                f"workers is needed; write x = tessel.distributed.gather(x) before"
            )
        if sharding.size not in (None, self.sizes[0]):
            raise ValueError(
                f"{self.label}: the layer has {self.sizes[0]} inputs, the whole tensor "
                f"{sharding.size}"
            )


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    name: str,
    partition: Partition,
    dim: int,
    sizes: tuple[int, int],
) -> Tensor:
    """The product of an input with a weight in shards, which are those of the whole `sizes`."""
    if not partition.active:
        return x.clone()
    # what the result is, is known here; and to ask a shard for its kind takes microseconds
    with torch._C.DisableTorchFunctionSubclass():
        needs, is_off = needs_of([weight] if bias is None else [weight, bias])
        device = weight.device.type
        product = ShardedProduct(
            name=name,
            partition=partition,
            dim=dim,
            sizes=sizes,
            state=traced_state(x),
            dtype=weight.dtype,
            device=device,
            autocast=torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else None,
            needs=tuple(needs),
            is_off=is_off,
            problem=_problem(weight, bias, partition, dim, sizes),
        )
        x = unmarked(x)
        layout, meta = conclude(product, x)
        if partition.size == 1:
            y = F.linear(x, weight, bias)
    if partition.size > 1:
        layouts = layouts_of(partition, dim, sizes)
        # where others carry tangents, this worker's are zeros, and travel with theirs
        with dual_level() if meta.has_tangent and not in_forward_mode() else nullcontext():
            given = SpreadTensor(as_agreed(grad_alike(x, meta), meta, True), layout)
            own = SpreadTensor(unmarked(weight), layouts["weight"])
            added = None if bias is None else SpreadTensor(unmarked(bias), layouts["bias"])
            y = opened(F.linear(given, own, added))[0]
    return marked(y, Sharding(x.ndim - 1, partition, sizes[1])) if dim == COLUMN else y


def multiply_shards(
    x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, partition: Partition
) -> Tensor:
    """The same, for shards of which the workers first learn of which whole they are."""
    if not partition.active:
        return x.clone()
    name = f"parallel_linear(input, weight, {'no bias' if bias is None else 'bias'}, dim={dim!r})"
    state = state_of(weight)
    label = f"{name} over {partition}, where the weight is {describe(state)}"
    [(shapes, _)] = agree(partition, label, weight)
    split = checked_dim(dim, name)
    assert split is not None
    check_known(state, label)
    first, place = shapes[partition.ranks[0]], 1 - split
    if len(first) != 2:
        raise ValueError(f"{label}: a weight (outputs, inputs) is needed, got shape {first}")
    same({w: each[1 - place] for w, each in shapes.items()}, "other length", label)
    unit = f"along dim {place}"
    layout = layout_of_shards(partition, shapes, place, None, label, "the weight", unit)
    expected = Sharding(place, partition, layout.shape[place])
    if isinstance(state, Sharding) and state.merged(expected) is None:
        raise ValueError(f"{label}: {expected} was expected")
    outputs, inputs = layout.shape
    sizes = inputs, outputs
    return multiply(x, weight, bias, name=name, partition=partition, dim=split, sizes=sizes)


def _problem(
    weight: Tensor, bias: Tensor | None, partition: Partition, dim: int, sizes: tuple[int, int]
) -> str:
    """What is wrong with the parameters of this worker, in words that name it.

    One that is computed from other values may be another shard than the one that is needed.
    """
    given = ("weight", weight), ("bias", bias)
    shardings, layouts = _shardings(partition, dim, sizes), layouts_of(partition, dim, sizes)
    for name, value in given:
        state = state_of(value)
        if state is None or partition.size == 1:
            continue
        if isinstance(state, UnknownSharding):
            return f"of the {name} {state.remedy}"
        wanted = shardings[name]
        if wanted is None or state.merged(wanted) is None:
            return f"the {name} is {state}, where one that is {describe(wanted)} is needed"
    for name, value in given:
        layout = layouts[name]
        if value is not None and tuple(value.shape) != layout.local_shape:
            worker = partition.ranks[partition.rank or 0]
            return (
                f"the {name} of worker {worker} has the shape {tuple(value.shape)}, where its "
                f"shard of {layout.shape} has {layout.local_shape}"
            )
    return ""


@kept_in_job
def _shardings(
    partition: Partition, dim: int, sizes: tuple[int, int]
) -> dict[str, Sharding | None]:
    """What the weight and the bias are marked as, if they are."""
    layouts = layouts_of(partition, dim, sizes)
    return {name: Sharding.of(layout) for name, layout in layouts.items()}


@kept_in_job
def layouts_of(partition: Partition, dim: int, sizes: tuple[int, int]) -> dict[str, Layout]:
    """Where the weight and the bias of these whole sizes (inputs, outputs) lie."""
    inputs, outputs = sizes
    weight = shard_layout(partition, (outputs, inputs), 0 if dim == COLUMN else 1)
    if dim == COLUMN:
        return {"weight": weight, "bias": shard_layout(partition, (outputs,), 0)}
    return {"weight": weight, "bias": Layout.whole(partition, (outputs,), shared=True)}


def checked_dim(dim: int | None, name: str) -> int | None:
    """`COLUMN`, `ROW` or None; ValueError for anything else."""
    if dim not in (None, 0, 1, -1) or isinstance(dim, bool | float):
        raise ValueError(
            f"{name}: dim must be None (not split), 0 (row: the inputs are split) or 1 or -1 "
            f"(column: the outputs are split), got {dim!r}"
        )
    return None if dim is None else dim % 2


class ParallelLinear(ShardedLayer, torch.nn.Linear):
    """The linear map of the last dimension, with the weight in shards over a group of workers.

    Forward:  y[…, o] = b[o] + Σ_i w[o, i] x[…, i].

    - `dim=None`: `torch.nn.Linear`, with the same values on all workers. Nothing moves.
    - `dim=1` or `-1`, *column*: each worker has the rows of the weight, and the bias, of its part
      of the outputs. The input is whole on all workers, the output a shard, marked as one. Nothing
      moves forward; the gradient of the input takes one all-reduce.
    - `dim=0`, *row*: each worker has the columns of the weight of its part of the inputs, and the
      whole bias, which is added once. The input is a shard along the last dimension, or whole, of
      which the shard is taken then. The output is whole and takes one all-reduce; the gradient of
      a shard takes none.

    Parts are balanced: n // p long, the first n % p of them one longer. Parameters have the values
    that `torch.nn.Linear` draws with the seed of the first worker of the group.

    Args:
        in_features: the length of the last dimension, of the whole input.
        out_features: the same of the output.
        bias: whether to add one.
        dim: which is split.
        device: of the parameters.
        dtype: of the parameters.
        partition: the workers of the group, in their order; None for the default group.

    >>> import tessel, torch
    >>> column = tessel.nn.ParallelLinear(20, 30, dim=-1)
    >>> row = tessel.nn.ParallelLinear(30, 20, dim=0)
    >>> row(torch.relu(column(torch.ones(4, 20)))).shape
    torch.Size([4, 20])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        partition: Partition | None = None,
    ) -> None:
        row = row_of(partition)
        name = f"ParallelLinear({in_features}, {out_features}, bias={bias}, dim={dim!r})"
        agree_on_call(row, f"{name} over {row}, of {dtype or torch.get_default_dtype()}")
        checked_dim(dim, name)
        if dim is None:
            self.partition = row  # which torch's layer needs when it draws its values
            super().__init__(in_features, out_features, bias, device, dtype)
            self._equalize_own_values(ParallelLinear)
            return
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.dim, self.partition = dim, row
        for each, layout in self.layouts.items():
            if each == "bias" and not bias:
                self.register_parameter("bias", None)
            else:
                empty = torch.empty(layout.local_shape, device=device, dtype=dtype)
                setattr(self, each, torch.nn.Parameter(empty))
        self.reset_parameters()
        self._equalize_own_values(ParallelLinear)

    @property
    def layouts(self) -> dict[str, Layout]:
        """Where the weight and the bias lie, by name; nothing if they are not split."""
        split = checked_dim(self.dim, "ParallelLinear")
        if split is None:
            return {}
        return layouts_of(self.partition, split, (self.in_features, self.out_features))

    def reset_parameters(self) -> None:
        """Draw all values anew, as `torch.nn.Linear` does; a call of all workers of the group."""
        if self.dim is None:
            super().reset_parameters()
            equalize_(self._parameters.values(), self.partition)
            return
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        layouts = self.layouts
        draw_(
            self.weight,
            layouts["weight"],
            lambda whole: torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5)),
        )
        if self.bias is not None:
            draw_(
                self.bias,
                layouts["bias"],
                lambda whole: torch.nn.init.uniform_(whole, -bound, bound),
            )

    def forward(self, input: Tensor) -> Tensor:
        if self.dim is None or isinstance(input, SpreadTensor):  # F.linear has a rule for it
            return super().forward(input)
        return self._multiply(input)

    @eagerly
    def _multiply(self, x: Tensor) -> Tensor:
        split = checked_dim(self.dim, "ParallelLinear")
        assert split is not None
        return multiply(
            x,
            self.weight,
            self.bias,
            name=f"{type(self).__name__}({self.extra_repr()})",
            partition=self.partition,
            dim=split,
            sizes=(self.in_features, self.out_features),
        )

    @classmethod
    def convert_parallel_linear(
        cls,
        module: torch.nn.Module,
        dim: int | None = None,
        partition: Partition | None = None,
        *,
        strict: bool = False,
    ) -> torch.nn.Module:
        """Make a `ParallelLinear` of each `torch.nn.Linear` in a module, with the same values.

        A module that is a `torch.nn.Linear` gives a new layer; any other is changed in place and
        returned. Values are those of the first worker of the group. What the layers have besides
        (dtype, device, mode, hooks, parameters that need no gradient) stays. A layer that is used
        in several places stays one, and so does a parameter that several layers use. Layers that
        are split already stay as they are.

        What cannot be converted exactly stays, too, and one warning names it: attention, which
        reads the weights of its layers itself, subclasses with methods of their own, lazy layers
        that have seen no input, parametrized layers, those with gradients or hooks of parameters.

        Args:
            module: contains one or more `torch.nn.Linear`.
            dim: as in `ParallelLinear`.
            partition: the workers; None for the default group.
            strict: whether to raise NotImplementedError instead, and convert nothing.

        >>> import tessel, torch
        >>> tessel.nn.ParallelLinear.convert_parallel_linear(torch.nn.Linear(20, 30), dim=-1)
        ParallelLinear(in_features=20, out_features=30, bias=True, dim=-1)
        """
        row = row_of(partition)
        name = f"convert_parallel_linear(module, dim={dim!r}) over {row}"
        agree_on_call(row, f"{name}, {strict=}")
        checked_dim(dim, name)
        conversion = Conversion(
            name=name,
            dim=dim,
            partition=row,
            wanted=torch.nn.Linear,
            becomes=cls,
            # a layer that is split in another way stays: its values are as good
            done=lambda layer: (
                isinstance(layer, ParallelLinear) and (dim is None or layer.dim is not None)
            ),
            refused=(torch.nn.MultiheadAttention,),
            also=ParallelLinear,
            is_strict=strict,
        )
        return convert(module, conversion)
