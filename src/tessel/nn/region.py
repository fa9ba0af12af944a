"""A region: a chain of layers whose halo is fetched at once.

Without a region, each windowed layer of a chain fetches its own halo. Going backwards from the
outputs of the last layer, through the windows of all layers, gives the box that the chain reads of
its input. Workers fetch it in one exchange and then compute, layer by layer, boxes that shrink:
near borders between workers some values are computed twice instead of being sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from types import FunctionType
from typing import Any, ClassVar

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tessel.core.agreement import Agreement, entered
from tessel.core.graph import in_graphs
from tessel.core.handles import HasHandle
from tessel.core.layout import Layout, Shape
from tessel.core.linop import enter
from tessel.core.partition import Partition
from tessel.core.shared import anchored_zeros, used
from tessel.core.windows import Mirrored, ReceptiveField, Window
from tessel.nn.blocks import Weighted
from tessel.nn.layer import (
    AgreedInput,
    Layer,
    Result,
    compute_spread,
    lies,
    needs_of,
    parts_agreement,
)
from tessel.nn.pooling import DistributedPoolingBase, MayGiveIndices
from tessel.nn.upsample import DistributedUpsample
from tessel.tensor.padding import PeriodicHalo, periodic_halo
from tessel.tensor.rules import convolution, interpolation, norms, pools, transposed
from tessel.tensor.table import as_spread, check_dtypes, running
from tessel.tensor.tensor import is_spread
from tessel.tensor.windowed import ReceptiveFields, Windowed, leading, outline
from tessel.transport import kept_in_job

LayerParameters = tuple[Tensor | None, ...]

POINTWISE: tuple[type[nn.Module], ...] = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU),
    *(nn.Mish, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish),
    *(nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Hardshrink, nn.Softshrink, nn.Threshold),
)
RANDOM: tuple[type[nn.Module], ...] = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.FeatureAlphaDropout, nn.RReLU),
)
_PADDINGS: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), "constant"),
    **dict.fromkeys((nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d), "constant"),
    **dict.fromkeys((nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d), "reflect"),
    **dict.fromkeys((nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d), "replicate"),
    **dict.fromkeys((nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d), "circular"),
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class HaloRegion(HasHandle, nn.Sequential):
    """A chain of layers over a partitioned tensor that fetches the halo of all of them at once.

    Forward:  y = f_k(… f_1(x)), where each worker computes its part of y from the box of x that the
    chain reads: one exchange, and none between the layers. The gradient of x takes one exchange
    back.

    Outputs, gradients and `state_dict` are those of `torch.nn.Sequential` of the same layers. It
    pays off if messages are small and layers are cheap in comparison; near the borders of its part
    each worker repeats computations of its neighbours.

    A region of torch's own layers is a `Sequential`; `distribute_module` makes it a region.

    Args:
        layers: convolutions, including transposed ones, pools, interpolations and norms in
            evaluation mode of `tessel.nn`, all on one partition; paddings and activations of torch.
            Or one `Sequential` of those.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> conv = [tessel.nn.DistributedConv1d(P, 2, 2, 3, padding=1) for _ in range(2)]
    >>> region = tessel.nn.HaloRegion(conv[0], torch.nn.ReLU(), conv[1])
    >>> region(torch.ones(1, 2, 6)).shape
    torch.Size([1, 2, 6])
    """

    _derived = HasHandle._derived | {"_agreements", "_traces"}  # agreements hold groups
    can_be_traced = Layer.can_be_traced

    def __init__(self, *layers: nn.Module | OrderedDict[str, nn.Module]) -> None:
        if len(layers) == 1 and type(layers[0]) in _CHAINS:
            check_code(layers[0])  # type: ignore[arg-type]
            layers = (OrderedDict(layers[0].named_children()),)  # type: ignore[union-attr]
        super().__init__(*layers)  # type: ignore[arg-type]
        if self.P_x is not None:
            self._steps()  # layers that cannot be in a region raise now

    @property
    def P_x(self) -> Partition | None:
        """The partition of the tensor; None for a region of torch's own layers."""
        return next((each.P_x for each in _chain(self) if isinstance(each, Layer)), None)

    @in_graphs()
    def forward(self, input: Tensor) -> Tensor:
        if self.P_x is None:
            result: Tensor = super().forward(input)
            return result
        model = running.get()
        if model is not None and not is_spread(input):
            input = as_spread(input, model)
        if is_spread(input):
            y: Tensor = compute_spread(self.compute, input)
            return y
        if not self.P_x.active:
            return input.clone()
        if self.P_x.size == 1:
            layout = lies(self.P_x, ((self.P_x.ranks[0], tuple(input.shape)),))
        else:
            layout, meta, input = enter(self._agreement(self.P_x), input, self)
            input = entered(input, meta, not layout.is_outside)
        y, _ = self.compute(input, layout)
        return y

    def compute(self, x: Tensor, layout: Layout) -> Result:
        """This worker's part of the result, and its layout."""
        # Steps are made for each call: layers may have got hooks, or another mode, since the last.
        steps = self._steps()
        # All layers are traced before anything is sent: invalid inputs raise on all workers.
        shape, shapes, fields = layout.shape, [], []
        for step in steps:
            shape, field = step.trace(shape, x, layout)
            shapes.append(shape)
            fields.append(field)
        wraps, windowed = planned(layout, tuple(shapes), tuple(fields))
        parameters = [step.parameters(layout) for step in steps]
        for wrap in wraps:
            x = wrap.apply(x)
        y = windowed[0].fetch(x)  # all that this worker reads
        for step, between, given in zip(steps, windowed, parameters, strict=True):
            y = step.compute(y, between, *given)
        return y, windowed[-1].target

    def _steps(self) -> list[RegionStep]:
        P_x = self.P_x
        assert P_x is not None
        for chain in self.modules():
            if chain is not self and type(chain) in _CHAINS:
                check_code(chain)
        return [region_step(layer, P_x) for layer in _chain(self)]

    def _agreement(self, P_x: Partition) -> Agreement[AgreedInput]:
        """One for each state of the layers, in which all workers must be alike."""
        needs, is_off = needs_of(self.parameters())
        training = tuple(each.training for each in self.modules())
        state = (P_x, training, is_off, *needs)
        agreements: dict[Any, Agreement[AgreedInput]] = self.__dict__.setdefault("_agreements", {})
        if state not in agreements:
            names = ", ".join(type(each).__name__ for each in _chain(self))
            modes = ["training" if each.training else "evaluation" for each in _chain(self)]
            mode = modes[0] if len(set(modes)) == 1 else ", ".join(modes)
            layers = [each for each in _chain(self) if isinstance(each, Layer)]
            for each in layers:
                each.prepare()  # those of a copy are numbered then
            numbers = ", ".join(str(each._number) for each in layers)
            # with their numbers: of two equal regions, workers must call the same one
            label = (
                f"HaloRegion({names}; number {numbers}) over {P_x} in {mode}, with "
                f"{needs.count(True)} of {len(needs)} parameters to train"
                f"{', under torch.no_grad()' if is_off else ''}"
            )
            identity = f"{label} {state[1:]} {[each.extra_repr() for each in _chain(self)]}"
            agreements[state] = parts_agreement(P_x.prepare(), P_x, label, identity)
        return agreements[state]


_CHAINS = nn.Sequential, HaloRegion


def _chain(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of a region, including those of nested chains, in order."""
    for child in module.children():
        if type(child) in _CHAINS:
            yield from _chain(child)
        else:
            yield child


@kept_in_job
def planned(
    source: Layout, shapes: tuple[Shape, ...], fields: tuple[ReceptiveFields, ...]
) -> tuple[tuple[PeriodicHalo, ...], tuple[Windowed, ...]]:
    """Plan a chain from a tensor in the layout `source` to balanced parts of the last shape.

    First, dimensions that wrap around in all layers are extended. Then every worker fetches what
    the first layer reads; each layer computes what the next one reads from the output of the one
    before.

    Args:
        source: the layout of the input.
        shapes: the whole shape of the output of each layer.
        fields: the receptive fields of each layer, one for each dimension.
    """
    target = source.resized(shapes[-1])
    inputs = [source.shape, *shapes[:-1]]
    wraps = []
    for dim in range(len(source.shape)):
        if source.is_split(dim):  # whole dimensions wrap around in every layer by themselves
            extensions = _continued([each[dim] for each in (*inputs, shapes[-1])], fields, dim)
            if extensions is not None:
                inputs, fields, (before, after) = _extended(inputs, fields, dim, extensions)
                wraps.append(periodic_halo(source, dim, before, after))
                source = wraps[-1].codomain
    windowed: list[Windowed] = []
    # From the last layer to the first: each computes what the next one reads, including values of
    # its neighbours, so that boxes grow towards the input.
    for shape, field in zip(reversed(inputs), reversed(fields), strict=True):
        is_first = len(windowed) + 1 == len(fields)
        held = source if is_first else Windowed(source.resized(shape), target, field).read
        windowed.insert(0, Windowed(held, target, field))
        target = windowed[0].read
    return tuple(wraps), tuple(windowed)


Extensions = list[tuple[int, int]]  # of the inputs of layers that wrap around


def _continued(
    lengths: Sequence[int], fields: tuple[ReceptiveFields, ...], dim: int
) -> Extensions | None:
    """By how much each layer's input must be extended at its ends, so that none wraps around.

    If a layer wraps around and all before it do, or read their outputs, and if the period is that
    of the input, the input can be extended once for all layers. None if it cannot.

    Args:
        lengths: the lengths of the dimension, in the input and after each layer.
        fields: the receptive fields of the layers.
        dim: the dimension.
    """
    each = [field[dim] for field in fields]
    around = [k for k, field in enumerate(each) if _is_circular(field)]
    if not around:
        return None
    before = after = 0
    extensions: Extensions = []
    for k in range(around[-1], -1, -1):
        field, length, outputs = each[k], lengths[k], lengths[k + 1]
        if _is_circular(field):
            window = field.window  # type: ignore[union-attr]
        elif field is None or field == Window(1):
            window = Window(1)
        else:
            return None
        if k < around[-1] and length != window.stride * outputs:  # then the periods differ
            return None
        last = window.last(outputs + after - 1)
        before, after = max(0, -window.first(-before)), max(0, last + 1 - length)
        if before > length or after > length:  # it would be extended by more than a period
            return None
        extensions.insert(0, (before, after))
    return extensions


def _extended(
    inputs: Sequence[Shape], fields: tuple[ReceptiveFields, ...], dim: int, extensions: Extensions
) -> tuple[list[Shape], tuple[ReceptiveFields, ...], tuple[int, int]]:
    """The same layers on extended tensors, with windows that stay inside."""
    shapes, changed = list(inputs), list(fields)
    for k, (before, after) in enumerate(extensions):
        shapes[k] = _with(shapes[k], dim, shapes[k][dim] + before + after)
        field = fields[k][dim]
        if isinstance(field, Mirrored):
            # index 0 is now what −before was, and output 0 what −ahead was
            ahead = extensions[k + 1][0] if k + 1 < len(extensions) else 0
            window = replace(field.window, before=-before - field.window.first(-ahead))
            changed[k] = _with(fields[k], dim, window)
    return shapes, tuple(changed), extensions[0]


def _with(values: tuple[Any, ...], dim: int, value: Any) -> tuple[Any, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _is_circular(field: ReceptiveField | None) -> bool:
    return isinstance(field, Mirrored) and field.mode == "circular"


class RegionStep(ABC):
    """A layer as seen by a region.

    Args:
        layer: the layer, whose parameters it uses.
    """

    kinds: ClassVar[tuple[type, ...]]
    layer: Any

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    @abstractmethod
    def trace(self, shape: Shape, x: Tensor, layout: Layout) -> tuple[Shape, ReceptiveFields]:
        """Compute the shape of the whole output from that of the input, and the receptive fields.

        It raises on all workers the error of torch's own layer, or why the layer cannot be in a
        region.

        Args:
            shape: the shape of the whole input of the layer.
            x: a part of the input of the region, of which only dtype and device are used.
            layout: the layout of the input of the region.
        """

    def parameters(self, layout: Layout) -> LayerParameters:
        """The layer's parameters for use on this worker's part."""
        return ()

    @abstractmethod
    def compute(self, x: Tensor, plan: Windowed, *parameters: Any) -> Tensor:
        """Compute this worker's outputs from exactly the inputs that they read."""


class _Convolving(RegionStep):
    kinds = (nn.modules.conv._ConvNd,)

    def trace(self, shape: Shape, x: Tensor, layout: Layout) -> tuple[Shape, ReceptiveFields]:
        check_dtypes(x, self.layer.weight, self.layer.bias)
        settings = self.layer.settings
        outputs = convolution.convolved(shape, settings)
        windows = settings.windows(tuple(before for before, _ in settings.widths))
        around = _bordered(windows, shape, settings.widths, settings.mode)
        return outputs, leading(len(shape), (settings.channels, *around))

    def parameters(self, layout: Layout) -> LayerParameters:
        return used(self.layer.weight, layout), used(self.layer.bias, layout)

    def compute(self, x: Tensor, plan: Windowed, *parameters: Any) -> Tensor:
        D = self.layer.num_dims
        padding = (0,) * D
        # Zeros are added only where windows extend beyond the whole tensor; around this worker's
        # part, everything that they read was fetched or computed.
        if 0 not in x.shape and 0 not in plan.target.local_shape:
            x = plan.in_order(x)
            sides = plan.overhang[-D:]
            if all(before == after for before, after in sides):
                padding = tuple(before for before, _ in sides)  # torch pads both sides alike
            else:
                x = F.pad(x, _widths(plan, D))
        weight, bias = parameters
        settings = self.layer.settings
        return convolution.of_read(x, weight, bias, padding, plan.target, settings)


def _bordered(
    windows: Sequence[Window], shape: Shape, widths: Sequence[tuple[int, int]], mode: str
) -> list[ReceptiveField]:
    """The receptive fields of windows on a tensor with this padding mode."""
    if mode in ("zeros", "constant"):
        return list(windows)  # zeros are not read: `F.pad` adds them
    lengths = shape[len(shape) - len(windows) :]
    return [
        Mirrored(window, length, mode) if width != (0, 0) else window
        for window, length, width in zip(windows, lengths, widths, strict=True)
    ]


def _widths(plan: Windowed, num_dims: int) -> list[int]:
    """How far this worker's windows extend beyond, in the order of `torch.nn.functional.pad`."""
    return [width for side in reversed(plan.overhang[-num_dims:]) for width in side]


class _Transposed(_Convolving):
    kinds = (nn.modules.conv._ConvTransposeNd,)

    def trace(self, shape: Shape, x: Tensor, layout: Layout) -> tuple[Shape, ReceptiveFields]:
        check_dtypes(x, self.layer.weight, self.layer.bias)
        settings = self.layer.settings
        outputs = transposed.convolved(shape, settings)
        return outputs, leading(len(shape), (settings.channels, *settings.windows()))

    def compute(self, x: Tensor, plan: Windowed, *parameters: Any) -> Tensor:
        weight, bias = parameters
        settings = self.layer.settings
        return transposed.of_read(x, weight, bias, plan, plan.target, settings)


class _Pooling(RegionStep):
    kinds = (DistributedPoolingBase,)

    def trace(self, shape: Shape, x: Tensor, layout: Layout) -> tuple[Shape, ReceptiveFields]:
        if getattr(self.layer, "return_indices", False):
            raise NotImplementedError(
                f"a HaloRegion returns one tensor: {type(self.layer).__name__} with "
                "return_indices=True cannot be part of it"
            )
        outputs = self.pool.output_shape(shape, (x.dtype, x.device.type))
        return outputs, leading(len(shape), self.pool.windows)

    @cached_property
    def pool(self) -> pools.Pool:
        layer = self.layer
        sizes = layer.num_dims, layer.kernel_size, layer.stride, layer.padding
        if isinstance(self.layer, MayGiveIndices):
            return pools.MaximumPool.of(*sizes, layer.dilation, layer.ceil_mode)
        divisor = getattr(layer, "divisor_override", None)  # which pools of one dimension lack
        return pools.AveragePool.of(*sizes, layer.ceil_mode, layer.count_include_pad, divisor)

    def compute(self, x: Tensor, plan: Windowed, *parameters: Any) -> Tensor:
        pooled: Tensor = self.pool.of_read(x, plan)
        return pooled


class _Interpolating(RegionStep):
    kinds = (DistributedUpsample,)

    def trace(self, shape: Shape, x: Tensor, layout: Layout) -> tuple[Shape, ReceptiveFields]:
        if self.layer.mode == "area":
            raise NotImplementedError(
                "interpolation by area averages over all workers and cannot be in a HaloRegion; "
                "put it between two regions"
            )
        settings = self.settings
        outputs = interpolation.global_shape(shape, x.dtype, settings)
        fields = interpolation.interpolations(shape, outputs, x.dtype, settings, x.is_cpu)
        interpolation.check_exact(layout, fields, x, settings.mode)
        return outputs, leading(len(shape), fields)

    @cached_property
    def settings(self) -> interpolation.InterpolationSettings:
        names = interpolation.InterpolationSettings._fields
        return interpolation.InterpolationSettings.of(
            *(getattr(self.layer, name) for name in names)
        )

    def compute(self, x: Tensor, plan: Windowed, *parameters: Any) -> Tensor:
        fields: Any = plan.fields[2:]
        return interpolation.of_read(x, plan, fields, self.settings)


class _Normalizing(RegionStep):
    kinds = (nn.modules.batchnorm._NormBase,)  # batch and instance norms

    def trace(self, shape: Shape, x: Tensor, layout: Layout) -> tuple[Shape, ReceptiveFields]:
        if self.layer.training or self.layer.running_mean is None:
            raise NotImplementedError(
                f"{type(self.layer).__name__} in a HaloRegion must use running statistics, in eval "
                "mode, since statistics of the tensor itself would need an exchange between the "
                "layers: put it between two regions, or call its eval()"
            )
        self.layer._check_input_dim(outline(shape))
        batched = shape if self._channel(shape) == 1 else (1, *shape)
        names = ("running_mean", "running_var", "weight", "bias", "eps")
        given = {name: getattr(self.layer, name) for name in names}
        norms.check("batch_norm", given, batched, x, range(1, 2))
        return shape, (None,) * len(shape)

    def _channel(self, shape: Shape) -> int:
        """The dimension of the channels, which an instance norm may have first."""
        single = isinstance(self.layer, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
        return 0 if single and len(shape) == self.layer._get_no_batch_dim() else 1

    def compute(self, x: Tensor, plan: Windowed, *parameters: Any) -> Tensor:
        layer, dim = self.layer, self._channel(tuple(x.shape))
        dims = range(dim, dim + 1)
        running = norms.local_running(layer.running_mean, layer.running_var, plan.target, dims)
        both = norms.local_parameters(layer.weight, layer.bias, plan.target, dims)
        return norms.normalize_by_running(x, running, *both, layer.eps, dim)


class _Padding(RegionStep):
    kinds = tuple(_PADDINGS)

    def trace(self, shape: Shape, x: Tensor, layout: Layout) -> tuple[Shape, ReceptiveFields]:
        outputs = tuple(type(self.layer).forward(self.layer, outline(shape)).shape)
        windows = [Window(1, before=before) for before, _ in self.pairs]
        around = _bordered(windows, shape, self.pairs, _PADDINGS[type(self.layer)])
        return outputs, leading(len(shape), around)

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The widths of padding before and after each of the last dimensions."""
        widths = self.layer.padding
        return list(zip(widths[::2], widths[1::2], strict=True))[::-1]

    def compute(self, x: Tensor, plan: Windowed, *parameters: Any) -> Tensor:
        value = getattr(self.layer, "value", 0.0)
        shape = plan.target.local_shape
        if 0 in x.shape or 0 in shape:  # a part that is all padding reads nothing
            return (anchored_zeros(shape, x) + value).to(x.dtype)
        return F.pad(plan.in_order(x), _widths(plan, len(self.pairs)), value=value)


class _Pointwise(RegionStep):
    kinds = (*POINTWISE, *RANDOM)

    def trace(self, shape: Shape, x: Tensor, layout: Layout) -> tuple[Shape, ReceptiveFields]:
        if self.layer.training and isinstance(self.layer, RANDOM):
            raise NotImplementedError(
                f"{type(self.layer).__name__} in training mode draws random numbers, but values "
                "that two workers compute in a HaloRegion must be the same on both; put it "
                "between two regions, or call its eval()"
            )
        return shape, (None,) * len(shape)

    def compute(self, x: Tensor, plan: Windowed, *parameters: Any) -> Tensor:
        result: Tensor = type(self.layer).forward(self.layer, x)
        return result


class _Prelu(_Pointwise):
    kinds = (nn.PReLU,)

    def trace(self, shape: Shape, x: Tensor, layout: Layout) -> tuple[Shape, ReceptiveFields]:
        F.prelu(outline(shape, x.dtype), outline(tuple(self.layer.weight.shape), x.dtype))
        return super().trace(shape, x, layout)

    def parameters(self, layout: Layout) -> LayerParameters:
        return (used(self.layer.weight, layout),)

    def compute(self, x: Tensor, plan: Windowed, *parameters: Any) -> Tensor:
        (weight,) = parameters
        box = plan.target.box()
        assert box is not None
        if weight.numel() > 1:  # one for each channel, of which these are this worker's
            weight = weight[slice(*box[1])]
        return F.prelu(x, weight) if x.numel() else anchored_zeros(tuple(x.shape), x, weight)


_STEPS: tuple[type[RegionStep], ...] = (
    *(_Transposed, _Convolving, _Pooling, _Interpolating, _Normalizing),  # the first that fits
    *(_Padding, _Pointwise, _Prelu),
)


def region_step(layer: nn.Module, P_x: Partition) -> RegionStep:
    """The step of a layer in a region of `P_x`; it raises if the layer cannot be in one."""
    name = type(layer).__name__
    # For a layer of torch only the type itself: a subclass may compute anything.
    kinds = (type(layer),) if not isinstance(layer, Layer) else type(layer).__mro__
    kind = next((each for each in _STEPS if {*kinds} & {*each.kinds}), None)
    if kind is None:
        raise NotImplementedError(
            f"{name} cannot be in a HaloRegion, which supports convolutions, pools, interpolations "
            "and batch norms of tessel.nn, and paddings and activations of torch; put it between "
            "two regions"
        )
    if isinstance(layer, Layer) and layer.P_x != P_x:
        raise ValueError(
            f"all layers of a HaloRegion must be on one partition: expected {P_x}, {name} has "
            f"{layer.P_x}"
        )
    if isinstance(layer, Weighted) and (layer.P_w is not None or layer.P_y not in (None, P_x)):
        raise NotImplementedError(
            f"{name} in a HaloRegion computes on its P_x: leave out P_w and P_y, got {layer.P_w} "
            f"and {layer.P_y}"
        )
    check_code(layer)
    return kind(layer)


def check_code(module: nn.Module) -> None:
    """Raise NotImplementedError if code of a user would have to run inside a region.

    A region computes what its layers compute, and does not call them: hooks and methods of a user
    would get more than the part of this worker.
    """
    name = type(module).__name__
    if any(getattr(module, each) for each in _HOOKS):
        raise NotImplementedError(
            f"hooks of {name} would see more than its part in a HaloRegion, and are not called; "
            f"remove them, or hook the region"
        )
    own = vars(module).get("forward")
    if _is_ours(type(own)):
        own = getattr(own, "own", None)  # of a converted model, with the one that was there before
    found = "forward" if own is not None else None
    for kind in type(module).__mro__ if isinstance(module, Layer) else ():
        if _is_ours(kind) or found:
            break
        # What it inherits from all modules, apart from `forward`, computes nothing.
        methods = (each for each, value in vars(kind).items() if isinstance(value, FunctionType))
        found = next(
            (
                each
                for each in methods
                if hasattr(super(kind, module), each)
                and (each in ("forward", "__call__") or not hasattr(nn.Module, each))
                and each != "reset_parameters"
            ),
            None,
        )
    if found:
        raise NotImplementedError(
            f"{name} in a HaloRegion has its own {found}, which would get more than its part, and "
            f"is not called; put it between two regions"
        )


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "tessel"
