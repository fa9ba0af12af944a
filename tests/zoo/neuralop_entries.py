"""Entries of neuraloperator: Fourier neural operators on squares, cubes and spheres."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from entries import BEAMS, COLUMNS, QUARTERS, ROWS, SAMPLES, SLABS, ZooEntry, floats


def model(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A model by its name, all in double precision."""

    def make() -> nn.Module:
        from neuralop import models

        made = getattr(models, name)(in_channels=3, out_channels=1, hidden_channels=8, **settings)
        for parameter in made.parameters():  # `double()` leaves complex ones as they are
            if parameter.is_complex():
                parameter.data = parameter.data.to(torch.complex128)
        return made

    return make


SCALINGS = [[1, 1], [0.5, 0.5], [2, 2]]
UNO = {
    "lifting_channels": 8,
    "projection_channels": 8,
    "n_layers": 3,
    "uno_out_channels": [8, 8, 8],
    "uno_n_modes": [[4, 4]] * 3,
    "uno_scalings": SCALINGS,
    "channel_mlp_skip": "linear",
}

entry = partial(ZooEntry, "neuralop", train=(ROWS, SAMPLES), eval=(QUARTERS, COLUMNS))

ENTRIES = [
    entry(
        "FNO of lines",
        model("FNO", n_modes=(8,), n_layers=2),
        floats(2, 3, 40),
        train=((1, 1, 2), (2, 1, 1)),
        eval=((1, 1, 3),),
    ),
    entry("FNO", model("FNO", n_modes=(6, 6), n_layers=2), floats(2, 3, 16, 12)),
    entry(
        "FNO of volumes",
        model("FNO", n_modes=(4, 4, 4), n_layers=2),
        floats(1, 3, 8, 8, 6),
        train=(SLABS,),
        eval=(BEAMS,),
    ),
    entry("TFNO", model("TFNO", n_modes=(6, 6), n_layers=2, rank=0.3), floats(2, 3, 16, 12)),
    entry("UNO", model("UNO", **UNO), floats(2, 3, 16, 12)),
    entry(
        "SFNO",
        model("SFNO", n_modes=(6, 6), n_layers=2),
        floats(2, 3, 12, 24),
        unsupported={"copied": "AloneError: its class has no name by which pickle finds it"},
    ),
]
