"""Entries of timm: families of its classifiers, in few and narrow layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from entries import (
    CHANGES_LISTS,
    COLUMNS,
    QUARTERS,
    ROWS,
    SAMPLES,
    THIRDS,
    ZooEntry,
    floats,
    made_by,
)


def model(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A model by its name; no weights are loaded."""
    return made_by("timm", "create_model", name, pretrained=False, num_classes=5, **settings)


def of_class(place: str, *args: Any, **settings: Any) -> Callable[[], nn.Module]:
    """A model by its class, for those whose names fix all sizes."""
    module, name = place.split(".")
    return made_by(f"timm.models.{module}", name, *args, num_classes=5, **settings)


def nfnet() -> nn.Module:
    from timm.models.nfnet import NfCfg, NormFreeNet

    return NormFreeNet(NfCfg((1, 1, 1, 1), (16, 32, 48, 64), stem_chs=16), num_classes=5)


def maxxvit(*blocks: str) -> nn.Module:
    """MaxViT and CoAtNet: convolutions, and attention of windows and of grids, or of everything."""
    from timm.models.maxxvit import MaxxVit, MaxxVitCfg, MaxxVitConvCfg, MaxxVitTransformerCfg

    attention = MaxxVitTransformerCfg(
        dim_head=4, rel_pos_type="mlp", rel_pos_dim=8, window_size=(4, 4), grid_size=(4, 4)
    )
    settings = MaxxVitCfg(
        (8, 16), (1, 1), blocks, 8, conv_cfg=MaxxVitConvCfg(), transformer_cfg=attention
    )
    return MaxxVit(settings, 32, num_classes=5)


def caformer() -> nn.Module:
    from timm.layers import LayerNorm, LayerNorm2d
    from timm.models.metaformer import Attention, MetaFormer, SepConv

    layers = {"token_mixers": [SepConv, Attention], "norm_layers": [LayerNorm2d, LayerNorm]}
    return MetaFormer(depths=(1, 1), dims=(8, 32), **layers, num_classes=5)


def tf_efficientnet() -> nn.Module:
    """As the name in timm says, but narrow: paddings as of TensorFlow, which depend on sizes."""
    from timm.models.efficientnet import _gen_efficientnet

    return _gen_efficientnet(
        "efficientnet_b0", 0.25, 0.3, pad_type="same", bn_eps=1e-3, num_classes=5
    )


entry = partial(ZooEntry, "timm")
pictures, small = floats(4, 3, 64, 64), floats(2, 3, 32, 32)
two = floats(2, 3, 64, 64)
# of transformers with one resolution, and with several
one = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
stages = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4)}
windows = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}

ENTRIES = [
    entry("vit_tiny_patch16_224", model("vit_tiny_patch16_224", **one), small),
    entry(
        "vit, pooled, with registers",
        model("vit_tiny_patch16_224", **one, reg_tokens=2, global_pool="avg", drop_path_rate=0.1),
        small,
        eval=(THIRDS,),
    ),
    entry(
        "deit_tiny_distilled_patch16_224", model("deit_tiny_distilled_patch16_224", **one), small
    ),
    entry("beit_base_patch16_224", model("beit_base_patch16_224", **one), small),
    entry("eva02_tiny_patch14_224", model("eva02_tiny_patch14_224", **one), small),
    entry("cait_xxs24_224", model("cait_xxs24_224", **one), small),
    entry(
        "xcit_nano_12_p8_224",
        model("xcit_nano_12_p8_224", img_size=32, embed_dim=16, depth=2, num_heads=2),
        small,
    ),
    entry("swin_tiny_patch4_window7_224", model("swin_tiny_patch4_window7_224", **windows), small),
    entry("swinv2_tiny_window8_256", model("swinv2_tiny_window8_256", **windows), small),
    entry(
        "MlpMixer",
        of_class("mlp_mixer.MlpMixer", img_size=32, patch_size=8, num_blocks=2, embed_dim=16),
        small,
    ),
    entry(
        "CoaT",
        of_class(
            "coat.CoaT",
            img_size=64,
            patch_size=4,
            embed_dims=(16,) * 4,
            serial_depths=(1,) * 4,
            parallel_depth=1,
            num_heads=8,
        ),
        two,
    ),
    entry(  # in evaluation mode it keeps a graph from call to call, and raises in one process, too
        "levit_128s",
        model(
            "levit_128s",
            img_size=64,
            embed_dim=(16, 24, 32),
            key_dim=8,
            depth=(1, 1, 1),
            num_heads=(2, 3, 4),
        ),
        pictures,
        train=(ROWS, THIRDS),
        eval=(),
        uses_in_training=True,
    ),
    entry(
        "MetaFormer, pooling (PoolFormer)",
        of_class("metaformer.MetaFormer", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
        pictures,
    ),
    entry("MetaFormer, attention (CAFormer)", caformer, small),
    entry(
        "DaVit",
        of_class(
            "davit.DaVit", depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4), window_size=4
        ),
        floats(2, 3, 36, 36),
    ),
    entry("MaxxVit, windows and grids", partial(maxxvit, "M", "M"), small),
    entry("MaxxVit, CoAtNet", partial(maxxvit, "C", "T"), small),
    entry(
        "convnext_tiny",
        model("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), drop_path_rate=0.1),
        pictures,
        train=(ROWS, SAMPLES),
    ),
    entry(
        "convnextv2_atto",
        model("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
        pictures,
    ),
    entry("resnet50d", model("resnet50d", layers=(1, 1, 1, 1), channels=(8, 16, 24, 32)), pictures),
    entry(
        "seresnext50_32x4d",
        model(
            "seresnext50_32x4d",
            layers=(1, 1, 1, 1),
            channels=(16, 32, 48, 64),
            cardinality=4,
            base_width=16,
        ),
        pictures,
    ),
    entry(
        "resnetv2_50",
        model("resnetv2_50", layers=(1, 1, 1, 1), channels=(16, 32, 48, 64), stem_chs=16),
        pictures,
        eval=(COLUMNS,),
    ),
    entry(
        "ResNetV2, group norm and standardised weights (BiT)",
        of_class(
            "resnetv2.ResNetV2",
            (1, 1, 1, 1),
            (32, 64, 96, 128),
            stem_chs=32,
            stem_type="fixed",
            bottle_ratio=1.0,
        ),
        two,
    ),
    entry("NormFreeNet", nfnet, pictures),
    entry("EfficientNet, same padding", tf_efficientnet, floats(4, 3, 63, 61)),
    entry("mobilenetv3_small_050", model("mobilenetv3_small_050"), pictures),
    entry("mobilenetv4_conv_small_050", model("mobilenetv4_conv_small_050"), pictures, eval=()),
    entry("regnety_002", model("regnety_002"), pictures, eval=()),
    entry("ghostnet_050", model("ghostnet_050"), pictures, train=(THIRDS,), eval=()),
    entry("repvgg_a0", model("repvgg_a0"), small, eval=()),
    entry("mobilevit_xxs", model("mobilevit_xxs"), pictures, train=(THIRDS, SAMPLES), eval=()),
    entry(
        "pvt_v2_b0",
        model("pvt_v2_b0", **stages),
        two,
    ),
    entry(
        "twins_svt_small",
        model("twins_svt_small", img_size=64, **stages, wss=(4, 4, 4, 2)),
        two,
    ),
    entry(
        "pit_ti_224",
        model("pit_ti_224", img_size=64, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(1, 2, 2)),
        two,
    ),
    entry(
        "sequencer2d_s",
        model(
            "sequencer2d_s",
            layers=(1, 1, 1, 1),
            embed_dims=(8, 8, 8, 8),
            hidden_sizes=(4, 4, 4, 4),
            img_size=64,
        ),
        two,
    ),
    entry(
        "hrnet_w18_small",
        model("hrnet_w18_small"),
        two,
        eval=(),
        unsupported={"recomputed_inside": f"AssertionError: {CHANGES_LISTS}"},
    ),
    entry(
        "FocalNet",
        of_class(
            "focalnet.FocalNet",
            depths=(1, 1),
            embed_dim=8,
            focal_levels=(2, 2),
            focal_windows=(3, 3),
        ),
        two,
    ),
    entry(
        "edgenext_xx_small",
        model("edgenext_xx_small", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), heads=(2, 2, 2, 2)),
        two,
    ),
    entry(
        "FastVit",
        of_class(
            "fastvit.FastVit",
            layers=(1, 1, 1, 1),
            embed_dims=(16, 32, 64, 128),
            token_mixers=("repmixer", "repmixer", "repmixer", "attention"),
        ),
        pictures,
        train=(QUARTERS,),
        eval=(),
    ),
]
