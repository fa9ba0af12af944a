"""Entries of deepinv: denoisers, in few and narrow layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from entries import COLUMNS, QUARTERS, ROWS, THIRDS, ZooEntry, floats, made_by


def noisy(*shape: int, level: float | None = 0.1) -> Callable[[], tuple[Any, ...]]:
    """Pictures, and how strong their noise is."""
    return lambda: (*floats(*shape)(), level)


def picture_and_step() -> tuple[Tensor, Tensor]:
    """The primal variable of an unrolled method, with its memory, and a gradient."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(2, 5, 16, 12, generator=draw), torch.randn(2, 1, 16, 12, generator=draw)


model = partial(made_by, "deepinv.models")
RGB = {"in_channels": 3, "out_channels": 3}
entry = partial(ZooEntry, "deepinv", train=(ROWS, THIRDS), eval=(QUARTERS, COLUMNS))

ENTRIES = [
    entry(
        "DRUNet",
        model("DRUNet", nc=(4, 6, 8, 10), nb=1, pretrained=None),
        noisy(1, 3, 32, 24),
    ),
    entry(
        "DRUNet, pooling and upsampling",
        model(
            "DRUNet",
            nc=(4, 6, 8, 10),
            nb=1,
            act_mode="E",
            downsample_mode="avgpool",
            upsample_mode="upconv",
            pretrained=None,
        ),
        noisy(1, 3, 32, 24),
    ),
    entry("UNet", model("UNet", scales=3, **RGB), noisy(2, 3, 24, 16, level=None)),
    entry(
        "UNet, circular, without norms",
        model("UNet", scales=2, circular_padding=True, batch_norm=False, **RGB),
        noisy(2, 3, 24, 16, level=None),
    ),
    entry("DnCNN", model("DnCNN", depth=4, nf=8, pretrained=None), noisy(2, 3, 13, 11)),
    entry(
        "Restormer",
        model("Restormer", dim=8, num_blocks=(1, 1, 1, 1), heads=(1, 2, 2, 4), pretrained=None),
        noisy(1, 3, 32, 32),
    ),
    entry(
        "SwinIR",
        model(
            "SwinIR",
            img_size=16,
            embed_dim=12,
            depths=(2, 2),
            num_heads=(2, 2),
            window_size=4,
            drop_path_rate=0.0,
            pretrained=None,
        ),
        noisy(1, 3, 16, 16),
        train=(ROWS,),
    ),
    entry(
        "SCUNet",
        model("SCUNet", config=(1, 1, 1, 1, 1, 1, 1), dim=64, pretrained=None),
        noisy(1, 3, 64, 64),
        train=(ROWS,),
    ),
    entry("PDNet, primal", model("PDNet_PrimalBlock", nf=8), picture_and_step),
    entry("FFDNet", model("FFDNet", n_conv_layers=4, nf=8, pretrained=None), noisy(2, 1, 16, 12)),
    entry("ICNN", model("ICNN", num_filters=6, num_layers=3), floats(1, 3, 12, 10)),
]
