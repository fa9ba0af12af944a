"""Conversion: any torch model, over tensors that are spread over workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tessel.agreement import Claim, Meeting, Terms, admit, reach_together
from tessel.graph import eagerly
from tessel.layout import Layout, Shape, zero_volume_tensor
from tessel.nn import fusion, ledger
from tessel.nn.adaptive import (
    DistributedAdaptiveAvgPool1d,
    DistributedAdaptiveAvgPool2d,
    DistributedAdaptiveAvgPool3d,
    DistributedAdaptiveMaxPool1d,
    DistributedAdaptiveMaxPool2d,
    DistributedAdaptiveMaxPool3d,
)
from tessel.nn.conv_transpose import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from tessel.nn.convolution import DistributedConv1d, DistributedConv2d, DistributedConv3d
from tessel.nn.layer import Entry, Layer, needs_of
from tessel.nn.ledger import Ledger, note
from tessel.nn.linear import DistributedLinear
from tessel.nn.norm import (
    DistributedBatchNorm,
    DistributedBatchNorm1d,
    DistributedBatchNorm2d,
    DistributedBatchNorm3d,
    DistributedGroupNorm,
    DistributedInstanceNorm1d,
    DistributedInstanceNorm2d,
    DistributedInstanceNorm3d,
    DistributedLayerNorm,
    DistributedRMSNorm,
)
from tessel.nn.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from tessel.nn.rules import follow
from tessel.nn.rules.book import gathered, is_split, move
from tessel.nn.upsample import DistributedUpsample
from tessel.partition import Partition
from tessel.shared import equalize, even
from tessel.transport import kept_in_job

nn = torch.nn

REPLACEMENTS: dict[type[nn.Module], type[Layer]] = {
    nn.Conv1d: DistributedConv1d,
    nn.Conv2d: DistributedConv2d,
    nn.Conv3d: DistributedConv3d,
    nn.ConvTranspose1d: DistributedConvTranspose1d,
    nn.ConvTranspose2d: DistributedConvTranspose2d,
    nn.ConvTranspose3d: DistributedConvTranspose3d,
    nn.AvgPool1d: DistributedAvgPool1d,
    nn.AvgPool2d: DistributedAvgPool2d,
    nn.AvgPool3d: DistributedAvgPool3d,
    nn.MaxPool1d: DistributedMaxPool1d,
    nn.MaxPool2d: DistributedMaxPool2d,
    nn.MaxPool3d: DistributedMaxPool3d,
    nn.AdaptiveAvgPool1d: DistributedAdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d: DistributedAdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d: DistributedAdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d: DistributedAdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d: DistributedAdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d: DistributedAdaptiveMaxPool3d,
    nn.BatchNorm1d: DistributedBatchNorm1d,
    nn.BatchNorm2d: DistributedBatchNorm2d,
    nn.BatchNorm3d: DistributedBatchNorm3d,
    nn.SyncBatchNorm: DistributedBatchNorm,
    nn.InstanceNorm1d: DistributedInstanceNorm1d,
    nn.InstanceNorm2d: DistributedInstanceNorm2d,
    nn.InstanceNorm3d: DistributedInstanceNorm3d,
    nn.GroupNorm: DistributedGroupNorm,
    nn.LayerNorm: DistributedLayerNorm,
    nn.RMSNorm: DistributedRMSNorm,
    nn.Linear: DistributedLinear,
    nn.Upsample: DistributedUpsample,
    nn.UpsamplingNearest2d: DistributedUpsample,
    nn.UpsamplingBilinear2d: DistributedUpsample,
}

# layers of torch that treat each element on its own, or whose functions have rules
UNCHANGED: tuple[type[nn.Module], ...] = (
    *(nn.Identity, nn.Flatten, nn.Unflatten, nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.Softmin),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU),
    *(nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish),
    *(nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Hardshrink, nn.Softshrink, nn.Threshold),
    *(nn.GLU, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.FeatureAlphaDropout, nn.PixelShuffle, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
    *(nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.ReflectionPad1d, nn.ReflectionPad2d),
    *(nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    *(nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d, nn.ParameterList, nn.ParameterDict),
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict),
)


def distribute_module(model: nn.Module, P_x: Partition) -> nn.Module:
    """Let a torch model work on tensors that are spread over `P_x`.

    Every supported layer, at any depth, is replaced by its distributed form, in place, and the
    model is returned. It keeps its parameters (tied ones stay tied), buffers, `state_dict`, hooks
    and flags. All workers get the parameters and buffers of the first. The model's own code may
    stay as it is: inside of the model `x.shape` is the global shape; additions, activations,
    `torch.cat`, `flatten`, means, slices, functional pools and interpolations do what they do in
    one process; and a function that is not known raises and names itself.

    Workers pass their parts of the input, tensors with as many dimensions as `P_x` has axes; what
    else they pass must be the same on all of them. They agree on the shapes once for each call of
    the model. An output that has the dimensions of the input is spread as the input is, in balanced
    parts. After `flatten` or a mean over split dimensions a tensor is *shared*: every worker has it
    whole and computes the same with it. A loss of it is the loss of the whole, and every worker
    calls `backward()`. If the batch is split, each worker has the rows of its part, and its loss is
    a share: the sum over its rows, divided by what one process would divide by.

    From the second call on, gradients of the parameters are summed in few messages, while others
    are computed: see `fuse_gradients`.

    Args:
        model: a torch model; a single layer is returned in its distributed form.
        P_x: where the input lies; axis d splits dimension d.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU())
    >>> tessel.nn.distribute_module(model, P)(torch.ones(2, 3, 16, 16)).shape
    torch.Size([2, 8, 16, 16])
    """
    _check_layers(model)
    seed = _agree_on_model(model, P_x)
    equalize([value for _, value in _values(model)], P_x)
    return _converted(model, P_x, Stream(seed), {})


def _converted(
    module: nn.Module, P_x: Partition, stream: Stream, done: dict[int, nn.Module]
) -> nn.Module:
    """A module over `P_x`; one that occurs twice is converted once."""
    if id(module) in done:
        return done[id(module)]
    replacement: Any = REPLACEMENTS.get(type(module))
    new: nn.Module = module if replacement is None else replacement.from_torch(module, P_x)
    done[id(module)] = new
    for name, child in module._modules.items():
        if child is not None:
            new._modules[name] = _converted(child, P_x, stream, done)
    if not isinstance(new, Layer):
        new.forward = Entrance(new, P_x, stream)
    return new


def _check_layers(model: nn.Module) -> None:
    """Raise if a layer is not supported, naming all of them."""
    modules = [(path or "the model", module) for path, module in model.named_modules()]
    changed = [path for path, module in modules if _is_changed(module)]
    if changed:
        raise NotImplementedError(
            f"these modules have a forward of their own: {', '.join(changed)}; write it into a "
            f"class"
        )
    wrong = [
        f"{path} ({type(module).__name__})" for path, module in modules if not _is_supported(module)
    ]
    if wrong:
        raise NotImplementedError(
            f"these layers have no distributed form: {', '.join(wrong)}; replace them, or convert "
            f"only the parts of the model that do not hold them"
        )


def _is_changed(module: nn.Module) -> bool:
    """Whether somebody put another forward into a module."""
    return not isinstance(module.__dict__.get("forward"), Entrance | None)


def _is_supported(module: nn.Module) -> bool:
    if type(module) in REPLACEMENTS or type(module) in UNCHANGED or isinstance(module, Layer):
        return True
    of_torch = type(module).__module__.startswith("torch.")
    return not of_torch and not isinstance(module, tuple(REPLACEMENTS))


def _agree_on_model(model: nn.Module, P_x: Partition) -> int:
    """Raise on all workers if their models differ in form; else a number that all of them have."""
    form: list[tuple[Any, ...]] = [
        (name, tuple(value.shape), str(value.dtype), value.requires_grad)
        for name, value in _values(model)
    ]
    form += [(p, type(m).__qualname__, m.extra_repr()) for p, m in model.named_modules()]
    if not P_x.active:
        return 0
    forms = P_x.group.share_objects((form, int(torch.randint(2**62, ()))))
    for worker, (other, _) in zip(P_x.group.workers, forms, strict=True):
        for theirs, ours in zip_longest(other, forms[0][0]):
            if theirs != ours:
                raise ValueError(
                    f"distribute_module needs the same model on all workers: worker "
                    f"{P_x.group.workers[0]} has {ours}, worker {worker} has {theirs}"
                )
    return forms[0][1]


def _values(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers but for those of layers that are distributed already."""
    placed = {
        id(value)
        for module in model.modules()
        if isinstance(module, Layer)
        for value in (*module.parameters(), *module.buffers())
    }
    values = (*model.named_parameters(), *model.named_buffers())
    return [(name, value) for name, value in values if id(value) not in placed]


@dataclass
class Stream:
    """The random numbers of a converted model, the same on all workers, call by call."""

    seed: int
    num_calls: int = 0

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """Let torch's random numbers come from here.

        In a backward pass, when a checkpoint computes a part of the model again, they come from
        where they came from before.
        """
        if ledger.in_backward():
            yield
            return
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed((self.seed + self.num_calls) % 2**63)
            self.num_calls += 1
            yield


class Entrance:
    """The `forward` of a module in a converted model: the outermost agrees on the input.

    Args:
        module: whose own forward it calls.
        P_x: where the input lies.
        stream: the random numbers of the model.
    """

    def __init__(self, module: nn.Module, P_x: Partition, stream: Stream) -> None:
        self.module, self.P_x, self.stream = module, P_x, stream
        self.habit = fusion.Habit()
        self._meetings: dict[Any, Meeting[Entry]] = {}

    @eagerly
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.module).forward
        if (running := ledger.active()) is not None:
            with running.module():
                return forward(self.module, *args, **kwargs)
        if not self.P_x.active:
            dtype, device = _kind(args, kwargs)
            return zero_volume_tensor(dtype=dtype, device=device)
        if self.P_x.size == 1:
            with ledger.alone():
                return forward(self.module, *args, **kwargs)
        with (
            fusion.guided(self.habit, self.module.parameters()),
            self.stream.flowing(),
            Ledger(self.P_x, follow),
        ):
            args, kwargs = self._entered(args, kwargs)
            result = forward(self.module, *args, **kwargs)
            with ledger.paused():
                return tree_map(_left, result)

    def _entered(self, args: Any, kwargs: Any) -> Any:
        """The arguments, with the layouts of all parts of tensors written down."""
        found = list(ledger.tensors(args, kwargs))
        dims = tuple(each.dim() for each in found)
        again = ledger.in_backward()  # a checkpoint computes it again: its layouts are written

        def is_part(value: Any) -> bool:
            return isinstance(value, Tensor) and value.dim() == self.P_x.dim

        def is_known(value: Tensor) -> bool:
            return again and ledger.written(value) is not None

        def enter(value: Any) -> Any:
            if not is_part(value):
                return value
            if (known := ledger.written(value) if again else None) is not None:
                return note(value.view_as(value), known)
            layout, terms = next(entries)
            return note(even(admit(value, terms, True), terms).view_as(value), layout)

        with ledger.paused():
            parts = [each for each in found if is_part(each) and not is_known(each)]
            claims = [Claim.of(each) for each in parts]
            if not parts and not again:  # that raises, on all workers
                claims = [Claim.of(next(iter(found), None))]  # type: ignore[arg-type]
            meetings = [self._meeting(number, dims) for number in range(len(claims))]
            entries = iter(reach_together(meetings, claims))
            entered = tree_map(enter, (args, kwargs))
            if not again:
                self.P_x.group.number_call()
        return entered

    def _meeting(self, number: int, dims: tuple[int, ...]) -> Meeting[Entry]:
        """One for each state of the model and kind of arguments, alike on all workers."""
        flags, is_off = needs_of(self.module.parameters())
        plan = fusion.foreseen()
        state = (number, dims, self.module.training, is_off, plan, *flags)
        if state not in self._meetings:
            mode = "training" if self.module.training else "evaluation"
            mode += ", under torch.no_grad()" if is_off else ""
            label = (
                f"input {number} of {type(self.module).__name__} over {self.P_x} in {mode}, with "
                f"{flags.count(True)} of {len(flags)} parameters to train and tensors of {dims} "
                f"dimensions, and {fusion.described(plan)}"
            )
            self._meetings[state] = Meeting(
                self.P_x.group, label, self.P_x.ranks, self._conclude, f"{label} {state}"
            )
        return self._meetings[state]

    def _conclude(self, shapes: dict[int, Shape], terms: Terms) -> Entry:
        return Layout.from_local_shapes(self.P_x, shapes), terms

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_meetings": {}}


def _left(value: Any) -> Any:
    """An output on its own: what was written on it inside of the model stays there."""
    if not isinstance(value, Tensor):
        return value
    layout = ledger.written(value)
    if layout is None:
        ledger.check_origin(value)
        return value
    target = outside(layout)
    return value.view_as(value) if target == layout else move(layout, target).apply(value)


@kept_in_job
def outside(layout: Layout) -> Layout:
    """How an output leaves a model: as the input lies, if it has its dimensions.

    Of other tensors the features are whole.
    """
    if len(layout.shape) == layout.partition.dim:
        return Layout.balanced(layout.partition, layout.shape)
    dims = (dim for dim, cut in enumerate(layout.cuts) if 1 in cut.axes and is_split(layout, dim))
    return gathered(layout, tuple(dims))


def _kind(*values: Any) -> tuple[torch.dtype | None, torch.device | None]:
    found = next(ledger.tensors(*values), None)
    return (None, None) if found is None else (found.dtype, found.device)
