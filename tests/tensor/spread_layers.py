"""Functions for `test_spread.py` that layers call: convolutions, pools, norms, and others.

Tests `tensor/rules/convolution.py`, `tensor/rules/norms.py`, `tensor/rules/pools.py`,
`tensor/rules/interpolation.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from spread_cases import Case, Shape, positive, quiet

SPACE: dict[int, Shape] = {1: (9,), 2: (7, 8), 3: (4, 5, 6)}


def image(D: int, batch: int = 3, channels: int = 4) -> Shape:
    return (batch, channels, *SPACE[D])


def kernel(D: int, *channels: int) -> Shape:
    return (*channels, *(3, 2, 3)[:D])


CONVOLUTIONS: dict[str, Case] = {}
for _D in (1, 2, 3):
    for _name, _settings in (
        ("", {}),
        (" of groups", {"padding": 1, "stride": 2, "groups": 2}),
        (" dilated", {"padding": "same", "dilation": 2}),
    ):
        CONVOLUTIONS[f"conv{_D}d{_name}"] = Case(
            lambda x, w, b, name=f"conv{_D}d", settings=_settings: getattr(F, name)(
                x, w, b, **settings
            ),
            (image(_D), kernel(_D, 6, 2 if "groups" in _settings else 4), (6,)),
            plain_others=True,
        )
    for _name, _settings in (
        ("", {}),
        (" of groups", {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}),
    ):
        CONVOLUTIONS[f"conv_transpose{_D}d{_name}"] = Case(
            lambda x, w, b, name=f"conv_transpose{_D}d", settings=_settings: getattr(F, name)(
                x, w, b, **settings
            ),
            (image(_D), kernel(_D, 4, 3), (3 * _settings.get("groups", 1),)),
            plain_others=True,
        )
CONVOLUTIONS |= {
    "conv2d of one sample": Case(
        lambda x, w: F.conv2d(x, w, padding=1), ((4, 7, 8), (6, 4, 3, 3)), plain_others=True
    ),
    "conv2d by torch": Case(
        lambda x, w: torch.conv2d(x, w, None, 2), (image(2), (6, 4, 3, 3)), plain_others=True
    ),
    "conv2d with a spread kernel": Case(lambda x, w: F.conv2d(x, w), (image(2), (6, 4, 3, 3))),
    "conv_transpose2d with a spread kernel": Case(
        lambda x, w: F.conv_transpose2d(x, w), (image(2), (4, 6, 3, 3))
    ),
    "conv_tbc": Case(
        lambda x, w, b: torch.conv_tbc(x, w, b, 1),
        ((9, 3, 4), (3, 4, 5), (5,)),
        plain_others=True,
    ),
}

POOLS: dict[str, Case] = {}
for _D in (1, 2, 3):
    for _kind in ("avg", "max"):
        POOLS[f"{_kind}_pool{_D}d"] = Case(
            lambda x, name=f"{_kind}_pool{_D}d": (
                getattr(F, name)(x, 2),
                getattr(F, name)(x, 3, 2, 1, ceil_mode=True),
            ),
            (image(_D, 2),),
        )
        POOLS[f"adaptive_{_kind}_pool{_D}d"] = Case(
            lambda x, name=f"adaptive_{_kind}_pool{_D}d": (
                getattr(F, name)(x, 3),
                getattr(F, name)(x, 1),
            ),
            (image(_D, 2),),
        )
    POOLS[f"max_pool{_D}d with indices"] = Case(
        lambda x, name=f"max_pool{_D}d": getattr(F, f"{name}_with_indices")(x, 3, 2, 1),
        (image(_D, 2),),
    )
    POOLS[f"adaptive_max_pool{_D}d with indices"] = Case(
        lambda x, name=f"adaptive_max_pool{_D}d": getattr(F, f"{name}_with_indices")(x, 3),
        (image(_D, 2),),
    )
    POOLS[f"lp_pool{_D}d"] = Case(
        lambda x, name=f"lp_pool{_D}d": getattr(F, name)(x, 2.0, 2),
        (image(_D, 2),),
        make=positive,
    )
    POOLS[f"max_unpool{_D}d"] = Case(
        lambda x, D=_D: getattr(F, f"max_unpool{D}d")(
            *getattr(F, f"max_pool{D}d_with_indices")(x, 2), 2, output_size=x.shape
        ),
        (image(_D, 2),),
    )
POOLS |= {
    "max_pool2d of one sample": Case(lambda x: F.max_pool2d(x, 2), ((4, 7, 8),)),
    "avg_pool2d with a divisor": Case(
        lambda x: F.avg_pool2d(x, 3, 1, 1, False, False, 5), (image(2, 2),)
    ),
}

MODES: dict[int, tuple[str, ...]] = {
    1: ("nearest", "nearest-exact", "linear", "area"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
    3: ("nearest", "trilinear", "area"),
}
SAMPLING: dict[str, Case] = {
    "upsample": Case(quiet(lambda x: F.upsample(x, scale_factor=2)), ((2, 2, 7, 8),)),
    **{
        f"interpolate {mode} {D}": Case(
            lambda x, mode=mode: (
                F.interpolate(x, scale_factor=2, mode=mode),
                F.interpolate(x, size=[n + 2 for n in x.shape[2:]], mode=mode),
            ),
            ((2, 2, *SPACE[D]),),
        )
        for D, modes in MODES.items()
        for mode in modes
    },
    **{
        f"interpolate {mode} {D} with aligned corners": Case(
            lambda x, mode=mode: F.interpolate(x, scale_factor=1.5, mode=mode, align_corners=True),
            ((2, 2, *SPACE[D]),),
        )
        for D, mode in ((1, "linear"), (2, "bilinear"), (2, "bicubic"), (3, "trilinear"))
    },
    **{
        f"interpolate {mode} with antialias": Case(
            lambda x, mode=mode: F.interpolate(x, size=(3, 12), mode=mode, antialias=True),
            ((2, 2, 7, 8),),
        )
        for mode in ("bilinear", "bicubic")
    },
}

NORMS: dict[str, Case] = {
    "batch_norm": Case(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        (image(2), (4,), (4,)),
        plain_others=True,
    ),
    "batch_norm of statistics": Case(
        lambda x, m, v, w: F.batch_norm(x, m.detach(), v.detach(), w),
        (image(2), (4,), (4,), (4,)),
        make=positive,
        plain_others=True,
    ),
    "batch_norm of rows": Case(lambda x: F.batch_norm(x, None, None, training=True), ((6, 5),)),
    "instance_norm": Case(
        lambda x, w, b: F.instance_norm(x, None, None, w, b),
        (image(2), (4,), (4,)),
        plain_others=True,
    ),
    "group_norm": Case(
        lambda x, w, b: F.group_norm(x, 2, w, b), (image(2), (4,), (4,)), plain_others=True
    ),
    "layer_norm": Case(
        lambda x, w, b: (F.layer_norm(x, (6,), w[0], b), F.layer_norm(x, (5, 6), w)),
        ((4, 5, 6), (5, 6), (6,)),
        plain_others=True,
    ),
    "layer_norm without a weight": Case(
        lambda x, b: (F.layer_norm(x, (6,), None, b), F.layer_norm(x, (6,), eps=0.1)),
        ((4, 5, 6), (6,)),
        plain_others=True,
        order=1,
    ),
    "rms_norm": Case(
        lambda x, w: (F.rms_norm(x, (6,), w[0]), F.rms_norm(x, (5, 6), w, 0.1)),
        ((4, 5, 6), (5, 6)),
        plain_others=True,
    ),
    "norms with spread weights": Case(
        lambda x, w, b: (
            F.group_norm(x, 2, w, b),
            F.batch_norm(x, None, None, w, b, training=True),
            F.instance_norm(x, None, None, w, b),
        ),
        (image(2), (4,), (4,)),
    ),
    "layer_norm with spread weights": Case(
        lambda x, w: (F.layer_norm(x, (5, 6), w, w), F.rms_norm(x, (5, 6), w)),
        ((4, 5, 6), (5, 6)),
    ),
    "local_response_norm": Case(lambda x: F.local_response_norm(x, 3, 0.5), (image(2, 2),)),
}

LINEAR: dict[str, Case] = {
    "linear with a spread weight": Case(
        lambda x, w, b: F.linear(x, w, b), ((3, 4, 5), (6, 5), (6,))
    ),
    "linear of a row": Case(lambda x, w: F.linear(x, w), ((5,), (6, 5))),
    "linear of a plain input": Case(lambda w, x: F.linear(x, w), ((6, 5), (3, 5))),
}


FAMILIES: dict[str, dict[str, Case]] = {
    "convolutions": {n: c for n, c in CONVOLUTIONS.items() if "3d" not in n},
    "convolutions of volumes": {n: c for n, c in CONVOLUTIONS.items() if "3d" in n},
    "pools": {n: c for n, c in POOLS.items() if "3d" not in n},
    "pools of volumes": {n: c for n, c in POOLS.items() if "3d" in n},
    "sampling": SAMPLING,
    "norms": NORMS,
    "linear": LINEAR,
}
