"""Layers, losses, operators and imaging, on any device: as in one process on the CPU.

`test_kinds_of_layers.py` runs these on CPU workers, and on NCCL workers where there is a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import tessel
from kinds_of_models import TOLERANCE, compare, row
from parity import Case, close, values
from tessel import Layout
from tessel.imaging import (
    DistributedContext,
    FactoryConfig,
    TilingConfig,
    distribute,
    make_distrib_bundle,
)
from tessel.nn import ParallelEmbedding

SPACE = (11, 8, 6)
PADDED = {"padding": 1}
STRIDED = {"padding": 1, "stride": 2}
# By name, of each number of dimensions: arguments after the channels, and settings.
WINDOWS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Conv", (3, 4, 3), STRIDED),
    ("Conv", (3, 6, 3), {"padding": 2, "dilation": 2, "groups": 3, "bias": False}),
    ("Conv", (3, 4, 3), {"padding": 1, "padding_mode": "circular"}),
    ("Conv", (3, 4, 1), {}),
    ("ConvTranspose", (3, 4, 3), {"stride": 2, "output_padding": 1}),
    ("MaxPool", (3,), STRIDED),
    ("AvgPool", (3,), {**STRIDED, "count_include_pad": False}),
    ("AdaptiveAvgPool", (3,), {}),
    ("AdaptiveMaxPool", (1,), {}),
    ("BatchNorm", (3,), {}),
    ("InstanceNorm", (3,), {"affine": True}),
]
MODES = {1: ("nearest", "linear"), 2: ("nearest", "bilinear", "bicubic"), 3: ("trilinear",)}


def layer_cases(size: int) -> list[Case]:
    """All layers of `tessel.nn` that have torch's names, in one to three dimensions."""
    cases = []

    def add(name: str, args: tuple[Any, ...], settings: dict[str, Any], ndim: int) -> None:
        grid, shape = (1, 1, size, *[1] * (ndim - 1)), (2, 3, *SPACE[:ndim])
        cases.append(Case(name, args, grid, shape, tuple(settings.items())))

    for ndim in (1, 2, 3):
        for name, args, settings in WINDOWS:
            add(f"{name}{ndim}d", args, settings, ndim)
        for mode in MODES[ndim]:
            add("Upsample", (), {"scale_factor": 2, "mode": mode}, ndim)
        add("GroupNorm", (3, 3), {}, ndim)
        add("LayerNorm", (SPACE[:ndim],), {}, ndim)
        add("RMSNorm", (SPACE[ndim - 1],), {}, ndim)
    add("UpsamplingBilinear2d", (), {"scale_factor": 2}, 2)
    add("UpsamplingNearest2d", (), {"scale_factor": 2}, 2)
    add("Conv2d", (3, 4, 3), PADDED, 2)
    return cases


def check_layers(device: str) -> None:
    """Also where channels lie last in memory, for which GPUs have other kernels."""
    for case in layer_cases(tessel.world().size):
        for lies_last in (False, True):
            try:
                _compare_parts(case, device, lies_last)
            except AssertionError as error:
                last = ", channels last" if lies_last else ""
                raise AssertionError(f"{case}{last}: {error}") from None


def _compare_parts(case: Case, device: str, lies_last: bool) -> None:
    """A layer that is called with parts, against torch's own."""
    alone, spread, layout = case.torch_layer(), case.layer().to(device), case.layout()
    spread.load_state_dict(alone.state_dict())
    x = values(case.shape, 3)
    whole = x.clone().requires_grad_()
    part = layout.local_part(x).to(device)
    part = part.movedim(1, -1).contiguous().movedim(-1, 1) if lies_last else part
    expected, got = alone(whole), spread(part.requires_grad_())
    assert got.device.type == device
    out = layout.resized(expected.shape)
    close("output", got.detach().cpu(), out.local_part(expected.detach()), TOLERANCE)
    weights = values(tuple(expected.shape), 5)
    (expected * weights).sum().backward()
    (got * out.local_part(weights).to(device)).sum().backward()
    assert part.grad is not None and whole.grad is not None and part.grad.device.type == device
    close("gradient", part.grad.cpu(), layout.local_part(whole.grad), TOLERANCE)
    for p, q in zip(alone.parameters(), spread.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        close("gradient of a parameter", q.grad.cpu(), p.grad, TOLERANCE)


def check_linear(device: str) -> None:
    """Samples, or features, are split."""
    for grid in ((-1, 1), (1, -1)):
        P = row(*grid)
        torch.manual_seed(0)
        alone = nn.Linear(9, 5).double()
        spread = tessel.nn.distribute_module(copy.deepcopy(alone).to(device), P)
        x = values((7, 9), 3)
        compare(alone, spread, (alone, spread), x, Layout.balanced(P, x.shape), device)


SHARES = ("BCELoss", "BCEWithLogitsLoss", "KLDivLoss")  # targets are between 0 and 1
LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("MSELoss", {}),
    ("MSELoss", {"reduction": "sum"}),
    ("L1Loss", {}),
    ("HuberLoss", {"delta": 0.5}),
    ("SmoothL1Loss", {"beta": 0.5}),
    ("BCELoss", {}),
    ("BCEWithLogitsLoss", {}),
    ("KLDivLoss", {"reduction": "batchmean"}),
    ("PoissonNLLLoss", {"full": True}),
    ("GaussianNLLLoss", {}),
    ("NLLLoss", {"ignore_index": 1}),
    ("CrossEntropyLoss", {"label_smoothing": 0.1}),
    ("CrossEntropyLoss", {"reduction": "sum"}),
]


def check_losses(device: str) -> None:
    """All losses of `tessel.nn`, with samples split, and with classes split."""
    shape = (7, 5, 4)
    for grid in ((-1, 1, 1), (1, -1, 1)):
        P = row(*grid)
        layout = Layout.balanced(P, shape)
        for name, settings in LOSSES:
            x, y = values(shape, 1), values(shape, 2)
            others: list[tuple[Tensor, Layout]] = [(y, layout)]
            if name in ("NLLLoss", "CrossEntropyLoss"):
                by = [0 if grid[0] < 0 else None, None]
                classes = Layout.split(P, (7, 4), by, shared=[0, 1, 2] if by[0] is None else [1, 2])
                others = [(torch.arange(28).view(7, 4) % 5, classes)]
            elif name in SHARES:
                x = x.sigmoid() if name == "BCELoss" else x
                others = [(y.sigmoid(), layout)]
            elif name == "PoissonNLLLoss":
                others = [(y.abs(), layout)]
            elif name == "GaussianNLLLoss":
                others.append((values(shape, 3).abs() + 0.1, layout))
            whole = x.clone().requires_grad_()
            part = layout.local_part(x).to(device).requires_grad_()
            expected = getattr(nn, name)(**settings)(whole, *(each for each, _ in others))
            loss = getattr(tessel.nn, f"Distributed{name}")(P, **settings).to(device)
            got = loss(part, *(where.local_part(each).to(device) for each, where in others))
            assert got.device.type == device
            close(f"{name} {grid}", got.detach().cpu(), expected.detach(), TOLERANCE)
            expected.backward()
            got.backward()
            assert part.grad is not None and whole.grad is not None
            close(f"{name} {grid}", part.grad.cpu(), layout.local_part(whole.grad), TOLERANCE)


class First(nn.Module):
    """The output of a recurrence, without its state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(6, 5, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Steps(nn.Module):
    """Cells, one time step after the other, whose states go on, and back to front in a layer."""

    def __init__(self, kind: type[nn.RNNCellBase], again: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.again = kind(6, 5), again(5, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        state, found = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            found.append(state[0] if isinstance(state, tuple) else state)
        y, last = self.again(torch.stack(found, 1))
        z, _ = self.again(y.flip(1), last)  # states that a call gave
        return z


RECURRENCES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: First(nn.LSTM),
    "GRU": lambda: First(nn.GRU),
    "RNN": lambda: First(nn.RNN),
    "LSTM cells": lambda: Steps(nn.LSTMCell, nn.LSTM),
    "GRU cells": lambda: Steps(nn.GRUCell, nn.GRU),
    "RNN cells": lambda: Steps(nn.RNNCell, nn.RNN),
}


def check_recurrences(device: str) -> None:
    """Layers and cells, with samples split, and with the sequence split."""
    for make in RECURRENCES.values():
        for grid in ((-1, 1, 1), (1, -1, 1)):
            P = row(*grid)
            torch.manual_seed(0)
            alone = make().double()
            spread = tessel.nn.distribute_module(copy.deepcopy(alone).to(device), P)
            x = values((5, 7, 6), 3)
            compare(alone, spread, (alone, spread), x, Layout.balanced(P, x.shape), device)


def check_embedding(device: str) -> None:
    """A table whose rows, or columns, are split, of ids that are split or whole."""
    ids = torch.arange(12).view(3, 4) * 5 % 9
    for dim in (0, -1):
        torch.manual_seed(2)
        table = ParallelEmbedding(9, 5, padding_idx=3, dim=dim).double().to(device)
        torch.manual_seed(2)
        plain = nn.Embedding(9, 5, padding_idx=3).double()
        weights = values((3, 4, 5), 1)
        expected = plain(ids)
        (expected * weights).sum().backward()
        assert plain.weight.grad is not None
        split = Layout.balanced(row(1, -1), (3, 4))
        for layout in (split, Layout.whole(row(1, -1), (3, 4), shared=True)):
            y = table(tessel.Tensor(layout.local_part(ids).to(device), layout))
            assert y.local.device.type == device
            close("rows", y.full().detach().cpu(), expected.detach(), TOLERANCE)
            table.zero_grad()
            (y * weights.to(device)).sum().backward()
            found = table.weight.grad
            assert found is not None and found.device.type == device
            mine = Layout.split(
                tessel.world(), (9, 5), (0, None) if dim == 0 else (None, 0)
            ).local_part(plain.weight.grad)
            close("gradient of the table", torch.as_tensor(found).cpu(), mine, TOLERANCE)


def check_operators(device: str) -> None:
    """Cosine transforms, matrices for each mode, and other grids; their adjoints, too."""
    n, real = tessel.world().size, torch.float64
    makers: list[tuple[Any, list[int]]] = [
        (tessel.kron(tessel.ParDCT(real, 8), tessel.ParDST(real, 5, type=3)), [n, 1]),
        (tessel.kron(tessel.ParDCT(real, 8, type=4), tessel.ParDCT(real, 5)), [1, n]),
        (tessel.ParMultilinear(real, 4, 3, modes=[6, 5]), [1, n, 1]),
    ]
    for number, (operator, grid) in enumerate(makers):
        spread = tessel.distribute(operator, grid)
        torch.manual_seed(4)
        theta = tessel.init(operator)
        there = theta.to(device)
        on_cpu, on_device = (operator(theta), spread(there)) if len(theta) else (operator, spread)
        x = values(spread.layout_in.shape, 3)
        expected = on_cpu * x
        part = spread.layout_in.local_part(x).to(device)
        got = on_device * part
        assert got.device.type == device
        close(f"operator {number}", got.cpu(), spread.layout_out.local_part(expected), TOLERANCE)
        back, whole = on_device.H * got, on_cpu.H * expected
        close(f"adjoint {number}", back.cpu(), spread.layout_in.local_part(whole), TOLERANCE)
    to_columns = tessel.ParRepartition(real, (8, 6), [n, 1], [1, n])
    x = values((8, 6), 3)
    rows, columns = to_columns.layout_in, to_columns.layout_out
    got = to_columns * rows.local_part(x).to(device)
    assert got.device.type == device and torch.equal(got.cpu(), columns.local_part(x))
    assert torch.equal((to_columns.H * got).cpu(), rows.local_part(x))


class Blur:
    """A convolution of an image with one kernel, and its adjoint, on the device of the image."""

    def __init__(self, seed: int) -> None:
        self.kernel = values((1, 1, 3, 3), seed).abs()

    def A(self, x: Tensor, **_: Any) -> Tensor:
        return F.conv2d(x, self.kernel.to(x.device), padding=1)

    def A_adjoint(self, y: Tensor, **_: Any) -> Tensor:
        return F.conv_transpose2d(y, self.kernel.to(y.device), padding=1)


class Smooth(nn.Module):
    """A denoiser that reads one pixel around each."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return F.avg_pool2d(x.abs(), 3, 1, 1, count_include_pad=False)


class Half:
    """½‖A x - y‖²."""

    def grad(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        return physics.A_adjoint(physics.A(x) - y)


class Prior:
    """A denoiser as the proximal operator of a prior."""

    def __init__(self) -> None:
        self.denoiser = Smooth()

    def prox(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.denoiser(x)


def check_imaging(device: str) -> None:
    """Operators and their adjoints; a gradient, and a prior in patches, of one image for all."""
    blurs = [Blur(k) for k in range(3)]
    x, start = values((1, 1, 16, 12), 3), values((1, 1, 16, 12), 4)
    measured = [each.A(x) for each in blurs]
    slope = sum(each.A_adjoint(each.A(start) - y) for each, y in zip(blurs, measured, strict=True))
    mode = {"cpu": "cpu", "cuda": "gpu"}[device]
    with DistributedContext(device_mode=mode, cleanup=False) as ctx:
        physics = distribute(blurs, ctx, type_object="linear_physics", dtype=torch.float64)
        back = physics.A_adjoint(physics.A(x.to(device)))
        assert back.device.type == device
        expected = sum(each.A_adjoint(each.A(x)) for each in blurs)
        close("A_adjoint(A(x))", back.cpu(), expected, TOLERANCE)
        bundle = make_distrib_bundle(
            ctx,
            factory_config=FactoryConfig(
                physics=blurs,
                measurements=[each.to(ctx.device) for each in measured],
                data_fidelity=Half(),
            ),
            signal_shape=x.shape,
            reduction="sum",
            prior=Prior(),
            tiling=TilingConfig(patch_size=6, receptive_field_size=1),
            dtype=torch.float64,
        )
        bundle.signal.update_(start.to(device))
        found = bundle.data_fidelity.grad(bundle.signal)
        denoised = bundle.prior.prox(bundle.signal)
        assert found.device.type == denoised.device.type == device
        close("gradient", found.cpu(), slope, TOLERANCE)
        close("denoised", denoised.cpu(), Smooth()(start), TOLERANCE)


CHECKS = (
    *(check_layers, check_linear, check_losses, check_recurrences, check_embedding),
    *(check_operators, check_imaging),
)


def check_all(device: str) -> None:
    for check in CHECKS:
        check(device)
