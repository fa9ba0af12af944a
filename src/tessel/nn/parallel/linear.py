"""Linear layers whose weight is sharded over the workers of a group."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel import transport
from tessel.core.agreement import Agreement, TensorMeta, agree, entered, same
from tessel.core.graph import eagerly, in_graphs
from tessel.core.layout import Layout, Shape
from tessel.core.linop import enter
from tessel.core.partition import Partition
from tessel.core.shared import equalize
from tessel.distributed.group import row_of
from tessel.distributed.shardings import is_wrapped
from tessel.distributed.shards import (
    Sharding,
    State,
    as_plain,
    as_shard,
    check_known,
    describe,
    state_of,
    traced_state,
)
from tessel.nn.layer import needs_of, refuse_wrapped
from tessel.nn.parallel.agreed import check_parts, check_sharding, in_mode_of, misfit
from tessel.nn.parallel.convert import Conversion, convert
from tessel.nn.parallel.drawing import draw_
from tessel.nn.parallel.sharded import ShardedLayer, refused
from tessel.primitives.shard_layouts import layout_of_shards, shard_layout
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.table import opened
from tessel.transport import kept_in_job

COLUMN, ROW = 1, 0


@dataclass(frozen=True)
class ShardedProduct:
    """A product with a sharded weight: everything that must be equal on its workers.

    Args:
        name: the function or layer that the user calls.
        partition: the workers, in one row.
        dim: `COLUMN` if the outputs are split, `ROW` if the inputs are.
        sizes: the numbers of inputs and outputs of the whole weight.
        state: the known sharding of the input.
        dtype: the dtype of the weight.
        device: the device of the weight.
        autocast: the dtype of an autocast region, if there is one.
        needs: whether each parameter gets a gradient.
        is_off: whether `torch.no_grad()` prevents some.
        problem: the problem with the tensors of this worker, or an empty text.
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
        # a problem of one worker is part of its text, so that all others learn of it
        wrong = f" and {self.problem}" if self.problem else ""
        return (
            f"{self.name} over {self.partition}{mode}, where the input is "
            f"{describe(self.state)}{wrong}"
        )

    @property
    def identity(self) -> str:
        """The label and everything that it does not contain."""
        return f"{self.label} {self.dtype} {self.device} {self.autocast} {self.needs}"

    def conclude(self, shapes: dict[int, Shape], meta: TensorMeta) -> tuple[Layout, TensorMeta]:
        """The layout of the whole input; raises, like torch, if it does not fit the weight."""
        if self.problem:  # on all workers, since it is part of the agreement
            raise ValueError(f"{self.name} over {self.partition}: {self.problem}")
        check_known(self.state, self.label)
        pairs: list[tuple[str, Any, Any]] = [("device", meta.device, self.device)]
        if self.autocast is None:  # autocast converts both to one dtype
            pairs.append(("dtype", meta.dtype, self.dtype))
        for what, given, own in pairs:
            if given != own:
                raise RuntimeError(
                    f"{self.label}: input and weight must have the same {what}, got {given} and "
                    f"{own}"
                )
        last = len(shapes[self.partition.ranks[0]]) - 1
        if last < 0:
            raise ValueError(f"{self.label}: expected an input of at least one dimension")
        expected = Sharding(last, self.partition, self.sizes[0]) if self.dim == ROW else None
        check_sharding(self.state, expected, "the input", self.label)
        batch = {worker: shape[:-1] for worker, shape in shapes.items()}
        shape = (*same(batch, "shape before the last", self.label), self.sizes[0])
        whole = Layout.whole(self.partition, shape, shared=True)
        parts = shard_layout(self.partition, shape, last)
        # Without a sharding, inputs are recognised as parts by their lengths. Whole inputs are as
        # long as the weight on all workers: so parts of that length, on one worker or of length 0,
        # are whole.
        fits = all(shapes[worker] == parts.shape_on(worker) for worker in self.partition.ranks)
        are_shorter = any(each != parts.shape for each in shapes.values())
        are_parts = self.dim == ROW and (self.state is not None or (fits and are_shorter))
        layout = parts if are_parts else whole
        hint = ""
        if self.dim == ROW and self.state is None:
            hint = (
                "; pass the whole input on all workers, or a shard on each, which can be "
                "registered with tessel.register_parallel_dim(x, -1)"
            )
        check_parts(shapes, layout, "an input", self.label, hint)
        return layout, meta


@kept_in_job
def agreement_on(product: ShardedProduct) -> Agreement[tuple[Layout, TensorMeta]]:
    """The agreement on the input of a product; cached, since each call of a layer needs it."""
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
    """The problem with the tensors of this worker, in words that name the worker.

    A parameter that is computed from other values may be a different shard than the required one.
    """
    layouts = layouts_of(partition, dim, sizes)
    for name, value in (("weight", weight), ("bias", bias)):
        layout, state = layouts[name], state_of(value)
        # on one worker every shard is the whole, for any dimension
        apart = state is not None and partition.size > 1
        if apart and (problem := misfit(state, Sharding.of(layout), f"the {name}")):
            return problem
        if value is not None and tuple(value.shape) != layout.local_shape:
            return (
                f"the {name} of worker {transport.this_worker()} has the shape "
                f"{tuple(value.shape)}, where its shard of {layout.shape} has {layout.local_shape}"
            )
    # what is no tensor raises in the agreement, on all workers
    could_be_part = dim == ROW and partition.size > 1 and isinstance(x, Tensor) and x.ndim > 0
    is_part = could_be_part and x.shape[-1] != sizes[0]
    if is_part and is_wrapped(x) and state_of(x) is None:
        # functions inside a transform do not see shards: the other operands were not checked
        return (
            "the input comes from a transform of torch.func and has the length of a part, but no "
            "sharding: gradients of tensors that are combined with a shard would be those of a "
            "part; differentiate with torch.autograd.grad, or pass spread tensors to the transform"
        )
    return ""


@kept_in_job
def layouts_of(partition: Partition, dim: int, sizes: tuple[int, int]) -> dict[str, Layout]:
    """The layouts of weight and bias of these whole sizes (inputs, outputs)."""
    inputs, outputs = sizes
    weight = shard_layout(partition, (outputs, inputs), 0 if dim == COLUMN else 1)
    if dim == COLUMN:
        return {"weight": weight, "bias": shard_layout(partition, (outputs,), 0)}
    return {"weight": weight, "bias": Layout.whole(partition, (outputs,), shared=True)}


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    name: str,
    partition: Partition,
    dim: int,
    sizes: tuple[int, int],
    module: torch.nn.Module | None = None,
) -> Tensor:
    """The product of an input with a sharded weight of the whole `sizes`.

    Compiled code reads the settings of `module` in each run.
    """
    if not partition.active:
        return x.clone()
    # the kind of the result is known here, and looking up that of a shard takes microseconds
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
            problem=problem_of(x, weight, bias, partition, dim, sizes),
        )
        x = as_plain(x)
        layout, meta, x = enter(agreement_on(product), x, module)
        if partition.size == 1:
            y = F.linear(x, weight, bias)
    # With several workers the rule of F.linear decides what is moved. It must get spread tensors,
    # and so is outside of the block above, in which torch's functions ignore types.
    if partition.size > 1:
        layouts = layouts_of(partition, dim, sizes)
        with in_mode_of(meta):
            given = SpreadTensor(entered(x, meta), layout)
            own = SpreadTensor(as_plain(weight), layouts["weight"])
            added = None if bias is None else SpreadTensor(as_plain(bias), layouts["bias"])
            y = opened(F.linear(given, own, added))[0]
    return as_shard(y, Sharding(x.ndim - 1, partition, sizes[1])) if dim == COLUMN else y


@eagerly
def multiply_shards(
    x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, workers: Partition | None
) -> Tensor:
    """The same for shards of which the size of the whole must be learned first."""
    partition = row_of(workers)
    if not partition.active:
        return x.clone()
    name = name_of_product(bias, dim)
    state = state_of(weight)
    label = f"{name} over {partition}, where the weight is {describe(state)}"
    # The length of the whole is the sum over all workers: no worker knows it by itself.
    [(shapes, _)], _ = agree(partition, label, weight)
    split = checked_dim(dim, name)
    assert split is not None
    first, place = shapes[partition.ranks[0]], 1 - split
    if len(first) != 2:
        raise ValueError(
            f"{label}: expected a weight of shape (outputs, inputs), got shape {first}"
        )
    same({w: each[1 - place] for w, each in shapes.items()}, "other length", label)
    unit = f"along dim {place}"
    layout = layout_of_shards(partition, shapes, place, None, label, "the weight", unit)
    check_sharding(state, Sharding.of(layout), "the weight", label)
    outputs, inputs = layout.shape
    sizes = inputs, outputs
    return multiply(x, weight, bias, name, partition, split, sizes)


def name_of_product(bias: Tensor | None, dim: int) -> str:
    """The call of a user who passes shards, for errors."""
    return f"parallel_linear(input, weight, {'no bias' if bias is None else 'bias'}, dim={dim!r})"


def checked_dim(dim: int | None, name: str) -> int | None:
    """Return `COLUMN`, `ROW` or None; raise ValueError for anything else."""
    if dim not in (None, 0, 1, -1) or isinstance(dim, bool | float):
        raise ValueError(
            f"{name}: dim must be None (not split), 0 (row: the inputs are split) or 1 or -1 "
            f"(column: the outputs are split), got {dim!r}"
        )
    return None if dim is None else dim % 2


class ParallelLinear(ShardedLayer, torch.nn.Linear):
    """A linear map of the last dimension, with a weight that is sharded over a group of workers.

    Forward:  y[…, o] = b[o] + Σ_i w[o, i] x[…, i].

    - `dim=None`: `torch.nn.Linear`, with the same values on all workers. Nothing is sent.
    - `dim=1` or `-1`, *column*: each worker has the rows of the weight, and the bias, of its part
      of the outputs. The input is whole on all workers, the output a shard. The forward pass sends
      nothing; the gradient of the input takes one all-reduce.
    - `dim=0`, *row*: each worker has the columns of the weight of its part of the inputs, and the
      whole bias, which is added once. The input is a shard along the last dimension, or whole, and
      then its shard is used. The output is whole and takes one all-reduce; the gradient of a shard
      takes none.

    Parts are balanced: of length n // p, the first n % p of them one longer. Parameters have the
    values of `torch.nn.Linear` with the seed of the first worker of the group.

    Args:
        in_features: the length of the last dimension, of the whole input.
        out_features: the same for the output.
        bias: whether to add a bias.
        dim: the dimension that is split, as above.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
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
        # first agree on the arguments, then check them: so all workers raise, or none
        kind = torch.get_default_dtype() if dtype is None else dtype
        agree(row, f"{name} over {row}, of {kind}{refused(device, dtype)}")
        checked_dim(dim, name)
        if dim is None:
            self.partition = row  # which torch's layer needs when it draws its values
            super().__init__(in_features, out_features, bias, device, dtype)
            self._equalize_own_values(ParallelLinear)
            return
        torch.nn.Module.__init__(self)  # torch's layer would make the whole weight, and draw it
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
        """The layouts of weight and bias, by name; empty if they are not split."""
        split = checked_dim(self.dim, "ParallelLinear")
        if split is None:
            return {}
        return layouts_of(self.partition, split, (self.in_features, self.out_features))

    def reset_parameters(self) -> None:
        """Draw new values, as `torch.nn.Linear` does; all workers of the group must call this."""
        if self.dim is None:
            super().reset_parameters()
            equalize(self._parameters.values(), self.partition)
            return
        # as torch.nn.Linear, whose bounds are those of the whole weight, not of a shard
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        layouts, init = self.layouts, torch.nn.init
        kaiming = functools.partial(init.kaiming_uniform_, a=math.sqrt(5))
        draw_(self.weight, layouts["weight"], kaiming)
        if self.bias is not None:
            draw_(self.bias, layouts["bias"], lambda whole: init.uniform_(whole, -bound, bound))

    def forward(self, input: Tensor) -> Tensor:
        refuse_wrapped(input, "ParallelLinear")
        if self.dim is None or isinstance(input, SpreadTensor):  # F.linear has a rule for it
            return super().forward(input)
        return self._multiply(input)

    @in_graphs()
    def _multiply(self, x: Tensor) -> Tensor:
        split = checked_dim(self.dim, "ParallelLinear")
        assert split is not None
        sizes = self.in_features, self.out_features
        call = self._in_words(), self.partition, split, sizes, self
        return multiply(x, self.weight, self.bias, *call)

    def _in_words(self) -> str:
        """The name of this layer in errors; made again when its settings change.

        A subclass may include its own settings: its text is made in each call.
        """
        said: Any = self.extra_repr
        if getattr(said, "__func__", None) is not ParallelLinear.extra_repr:
            return f"{type(self).__name__}({said()})"
        sizes = self.in_features, self.out_features
        settings = type(self), *sizes, self.bias is None, self.dim
        kept: tuple[Any, str] | None = self.__dict__.get("_words")
        if kept is None or kept[0] != settings:
            kept = self.__dict__["_words"] = settings, f"{type(self).__name__}({said()})"
        return kept[1]

    @classmethod
    def convert_parallel_linear(
        cls,
        module: torch.nn.Module,
        dim: int | None = None,
        partition: Partition | None = None,
        *,
        strict: bool = False,
    ) -> torch.nn.Module:
        """Convert each `torch.nn.Linear` in a module to a `ParallelLinear` with the same values.

        For a `torch.nn.Linear` a new layer is returned; any other module is changed in place and
        returned. Values are those of the first worker of the group. All else (dtype, device, mode,
        hooks, parameters that need no gradient) is kept. A layer that is used in several places
        stays one layer, and a parameter that several layers use stays tied. Layers that are already
        split do not change.

        Layers that cannot be converted exactly do not change either, and one warning names them:
        those of attention, which reads their weights itself, subclasses with their own methods,
        lazy layers before their first input, parametrized layers, and those with gradients or hooks
        of parameters.

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
        agree(row, f"{name}, {strict=}")
        checked_dim(dim, name)
        conversion = Conversion(
            name=name,
            dim=dim,
            partition=row,
            wanted=torch.nn.Linear,
            becomes=cls,
            # a layer that is split in another way stays: its values are the same
            done=lambda layer: (
                isinstance(layer, ParallelLinear) and (dim is None or layer.dim is not None)
            ),
            refused=(torch.nn.MultiheadAttention,),
            also=ParallelLinear,
            is_strict=strict,
        )
        return convert(module, conversion)
