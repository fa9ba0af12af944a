"""The Fourier neural operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from tessel.core import boxes
from tessel.core.agreement import Agreement
from tessel.core.graph import in_graphs
from tessel.core.layout import Cut, Layout
from tessel.core.move import Move
from tessel.core.partition import Partition
from tessel.core.shared import used
from tessel.models.spectral import (
    Modes,
    batch_first,
    spectral_convolution,
    spread,
    usual_convolution,
)
from tessel.models.weights import Mixing, SpectralWeight
from tessel.nn import buckets
from tessel.nn.layer import AgreedInput, ComputingLayer, Result, needs_of, parts_agreement
from tessel.operators import Distributed, ParIdentity, ParMatrix, kron
from tessel.operators.local_transform import flaw_of_choice
from tessel.operators.space import COMPLEX_OF, Shape, checked_length
from tessel.state import clip_grad_norm_
from tessel.transport import kept_in_job

MAX_DIMS = 4  # of space


class FNO(ComputingLayer, torch.nn.Module):
    """A Fourier neural operator on tensors (batch, channels, *space) that are spread over workers.

    It has a lift to `width` channels, `blocks` of a spectral convolution plus a mixing of the
    channels at each point, with GELU between them, and a projection by two mixings:

        v ← gelu(F⁻¹ Rᴴ W R F v + A v + b)

    R keeps the low modes, W has a matrix for each of them. Workers exchange only kept modes, twice
    a block if some dimension of space is whole, and nothing if only the batch is split.

    Space has one to four dimensions. The parameters do not depend on the number of points: a model
    supports tensors of any size that has these modes. All workers have the same parameters for any
    random seeds; the spectral weights are split, and each worker stores those of its modes.
    `state_dict()` gathers the whole, the same on any number of workers, so all workers have to call
    it; `load_state_dict` loads it. A result has the layout of the input, in balanced parts of
    space.

    Gradients are those of one process if every worker differentiates its share of a loss, or a loss
    that all of them share. Elementwise optimizers, such as SGD or Adam, work unchanged; clip
    gradients with `clip_grad_norm_`.

    Args:
        P_x: the partition of the input; axis d splits dimension d. The channels are not split.
        in_channels, out_channels: the numbers of channels of the input and of the result.
        width: the number of channels in between.
        modes: the number k of low modes, one number or one for each dimension of space. Along the
            last dimension the modes from 0 to k - 1 are kept, along others those from -k to k - 1.
        blocks: the number of blocks.
        hidden: the number of channels inside the projection, by default twice the width.
        dtype: float32 or float64; by default torch's.
        device: the device of the parameters.

    >>> import tessel, torch
    >>> from tessel.models import FNO
    >>> P_x = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> model = FNO(P_x, 1, 1, width=8, modes=4, blocks=2)
    >>> model(torch.ones(2, 1, 16, 16)).shape, model(torch.ones(2, 1, 24, 20)).shape
    (torch.Size([2, 1, 16, 16]), torch.Size([2, 1, 24, 20]))
    """

    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        width: int,
        modes: int | Sequence[int],
        blocks: int = 4,
        *,
        hidden: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        with self.refused_together(P_x):
            if not 1 <= P_x.dim - 2 <= MAX_DIMS:
                raise ValueError(
                    f"FNO: expected a partition with axes for the batch, the channels and 1 to "
                    f"{MAX_DIMS} dimensions of space, got {P_x}"
                )
            if P_x.shape[1] > 1:
                raise ValueError(
                    f"FNO: channels cannot be split, got {P_x}; use one worker along the second "
                    f"axis, and split space or the batch"
                )
            self.in_channels = checked_length("FNO", "in_channels", in_channels)
            self.out_channels = checked_length("FNO", "out_channels", out_channels)
            self.width = checked_length("FNO", "width", width)
            self.hidden = (
                2 * self.width if hidden is None else checked_length("FNO", "hidden", hidden)
            )
            self.modes = Modes.of(modes, P_x.dim - 2)
            kind = torch.get_default_dtype() if dtype is None else dtype
            if kind not in COMPLEX_OF:
                raise ValueError(f"FNO: dtype must be torch.float32 or torch.float64, got {kind}")
            checked_length("FNO", "blocks", blocks)
        self.place_on(P_x)
        # a worker that cannot use its library for transforms would raise alone in a call
        flaw = flaw_of_choice()
        wrong = {"library": flaw} if flaw else {}
        self.agree_on_form(blocks=blocks, modes=str(self.modes), dtype=kind, **wrong)
        usual = usual_convolution(P_x, self.width, self.modes, kind).operator
        # The seed of the first worker, so that all have the same parameters for any random seeds.
        seed = usual.agreed_number(int(torch.randint(2**62, (), device="cpu")))
        mixing = partial(Mixing, generator=torch.Generator().manual_seed(seed), dtype=kind)
        self.lift = mixing(self.width, self.in_channels)
        # Each spectral weight draws with its own generator, and workers keep their parts.
        spectral = partial(SpectralWeight, P_x, self.width, self.modes, dtype=kind)
        self.blocks: Any = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {"spectral": spectral(seed + 1 + k), "mix": mixing(self.width, self.width)}
            )
            for k in range(blocks)
        )
        inner, outer = mixing(self.hidden, self.width), mixing(self.out_channels, self.hidden)
        self.projection: Any = torch.nn.ModuleDict({"inner": inner, "outer": outer})
        self.to(device)  # after drawing, which is done on the CPU: the same numbers on any device

    def place_on(self, P_x: Partition) -> None:
        super().place_on(P_x)
        self.schedule = buckets.BucketSchedule()

    @in_graphs()
    def forward(self, input: Tensor) -> Tensor:
        """Call the model as a layer; gradients of shared parameters are sent in few messages."""
        if self.P_x.size == 1:  # gradients need no messages
            return super().forward(input)
        with buckets.in_buckets(self.schedule, self.parameters()):
            return super().forward(input)

    def fits_torch(self, layout: Layout, *others: Any) -> bool:
        return False  # torch has no such model

    def compute(self, x: Tensor, layout: Layout) -> Result:
        # Workers have agreed on the layout and the dtype: the checks raise on all of them.
        channels = layout.shape[1]
        if channels != self.in_channels:
            raise ValueError(f"{self.label}: expected {self.in_channels} channels, got {channels}")
        if x.dtype != self.dtype or x.dtype not in COMPLEX_OF:
            raise ValueError(
                f"{self.label}: the input is {x.dtype}, the parameters are {self.dtype}; both "
                f"must be float32 or float64"
            )
        self.modes.check(layout.shape[2:])
        place = field_layout(layout, self.dtype)
        if place.layout != layout:  # operators are planned for balanced parts of space
            x = Move(layout, place.layout).apply(x)
        v = place.mix(x.movedim(0, -1), self.lift)  # (channels, *space, batch) from here
        for number, block in enumerate(self.blocks, 1):
            v = place.convolve(v, block.spectral, self.modes) + place.mix(v, block.mix)
            v = gelu(v) if number < len(self.blocks) else v  # the projection has its own
        v = place.mix(gelu(place.mix(v, self.projection.inner)), self.projection.outer)
        return v.movedim(-1, 0), place.with_channels(self.out_channels)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters, and of the inputs of the model."""
        return self.lift.weight.dtype

    def spectral_operator(self, space: Sequence[int]) -> Distributed:
        """The spectral convolution of the blocks for tensors with these dimensions of space.

        Its plan lists the steps, and what is sent.

        >>> import tessel
        >>> from tessel.models import FNO
        >>> P_x = tessel.world().create_cartesian_topology_partition([1, 1, 1])
        >>> model = FNO(P_x, 1, 1, width=8, modes=4, blocks=2)
        >>> model.spectral_operator([32]).plan.num_transfers
        0
        """
        lengths = tuple(space)
        self.modes.check(lengths)
        found = spectral_convolution(self.P_x, self.width, self.modes, lengths, self.dtype)
        return found.operator

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm, over all workers, is at most `max_norm`.

        `torch.nn.utils.clip_grad_norm_` would only use this worker's parts, and scale differently
        on each worker. All workers have to call this one. It returns the norm before scaling.

        >>> import tessel, torch
        >>> from tessel.models import FNO
        >>> P_x = tessel.world().create_cartesian_topology_partition([1, 1, 1])
        >>> model = FNO(P_x, 1, 1, width=8, modes=4, blocks=2)
        >>> model(torch.ones(2, 1, 16)).sum().backward()
        >>> bool(model.clip_grad_norm_(0.1) > 0.1), bool(model.clip_grad_norm_(0.1) > 0.1001)
        (True, False)
        """
        return clip_grad_norm_(self, max_norm, partition=self.P_x)

    def _agreement(self) -> Agreement[AgreedInput]:
        """One for the whole model, for each state in which all workers must be alike."""
        needs, is_off = needs_of(self.parameters())
        # Whether parameters need gradients decides on messages of the backward pass.
        dtypes = (each.dtype for each in self.parameters())
        kinds = (is_off, buckets.planned_uses(), *needs, *dtypes)
        agreements: dict[Any, Agreement[AgreedInput]] = self.__dict__.setdefault("_agreements", {})
        if kinds not in agreements:
            # with its number: of two equal models, workers must call the same one
            label = f"{self.label} (number {self._number})"
            label += " under torch.no_grad()" if is_off else ""
            agreements[kinds] = parts_agreement(
                self.prepare(), self.P_x, label, f"{self!r} {label} {kinds}"
            )
        return agreements[kinds]

    @property
    def label(self) -> str:
        """The model in a few words, for messages."""
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        counts = ", ".join(map(str, self.modes.counts))
        return f"{self.P_x}, {self.in_channels}, {self.out_channels}, {self.width}, ({counts})"


@dataclass(frozen=True)
class FieldLayout:
    """The layout and the dtype of the tensors in a call of a model."""

    layout: Layout
    dtype: torch.dtype

    @cached_property
    def columns(self) -> Shape:
        """The batch at each place along its axis."""
        return tuple(stop - start for start, stop in self.layout.cuts[0].intervals)

    @property
    def space(self) -> Shape:
        return self.layout.shape[2:]

    def with_channels(self, channels: int) -> Layout:
        batch, _, *space = self.layout.shape
        cuts = list(self.layout.cuts)  # all others stay: a mixing moves no point
        cuts[1] = Cut(cuts[1].axes, ((0, channels),))
        return Layout(self.layout.partition, (batch, channels, *space), tuple(cuts))

    def mix(self, x: Tensor, mixing: Mixing) -> Tensor:
        """A v + b, at each point."""
        # `run` needs no agreement: the workers have agreed once, for the whole model.
        m, n = mixing.weight.shape
        matrix, operator = mixing_operator(self.layout.partition, m, n, self.space, self.dtype)
        y = operator.run(x, {matrix: mixing.weight}, self.columns, batch_first(x))
        bias = used(mixing.bias, self.layout)
        assert bias is not None
        return y + bias.reshape(-1, *[1] * (y.dim() - 1))

    def convolve(self, x: Tensor, spectral: SpectralWeight, modes: Modes) -> Tensor:
        """F⁻¹ Rᴴ W R F v."""
        P_x, width = self.layout.partition, x.shape[0]
        convolution = spectral_convolution(P_x, width, modes, self.space, self.dtype)
        return convolution(x, spectral.complex, self.columns)


@kept_in_job
def field_layout(layout: Layout, dtype: torch.dtype) -> FieldLayout:
    """The layout of a tensor with balanced parts of space; the batch may have any parts."""
    cuts = tuple(
        cut if dim < 2 else Cut(cut.axes, boxes.balanced(length, len(cut.intervals)))
        for dim, (cut, length) in enumerate(zip(layout.cuts, layout.shape, strict=True))
    )
    return FieldLayout(Layout(layout.partition, layout.shape, cuts), dtype)


@kept_in_job
def mixing_operator(
    P_x: Partition, m: int, n: int, space: Shape, dtype: torch.dtype
) -> tuple[ParMatrix, Distributed]:
    """A matrix over the channels at each point, and the operator that it is a factor of."""
    matrix = ParMatrix(dtype, m, n)
    return matrix, spread(kron(matrix, *(ParIdentity(dtype, length) for length in space)), P_x)
