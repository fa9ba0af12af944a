"""Entries of segmentation_models_pytorch: its decoders over encoders of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from entries import COLUMNS, THIRDS, ZooEntry, floats, made_by


def model(
    name: str, encoder: str = "tu-mobilenetv3_small_050", **settings: Any
) -> Callable[[], nn.Module]:
    """A model by the name of its class; no weights are loaded."""
    package = "segmentation_models_pytorch"
    return made_by(package, name, encoder, encoder_weights=None, classes=3, **settings)


entry = partial(ZooEntry, "segmentation_models_pytorch")
pictures = floats(2, 3, 64, 64)
narrow = {"decoder_channels": (32, 24, 16, 8, 8)}

ENTRIES = [
    entry("Unet, resnet18", model("Unet", "resnet18", **narrow), pictures),
    entry(
        "Unet, attention",
        model("Unet", decoder_attention_type="scse", decoder_channels=(32, 32, 16, 16, 16)),
        pictures,
        train=(THIRDS,),
    ),
    entry("UnetPlusPlus", model("UnetPlusPlus", **narrow), pictures, eval=(COLUMNS,)),
    entry("MAnet", model("MAnet", **narrow), pictures),
    entry("Linknet", model("Linknet"), pictures),
    entry(
        "FPN", model("FPN", decoder_pyramid_channels=16, decoder_segmentation_channels=32), pictures
    ),
    entry("PSPNet", model("PSPNet", psp_out_channels=16), floats(4, 3, 64, 64)),
    entry(
        "DeepLabV3",
        model("DeepLabV3", "mobilenet_v2", decoder_channels=16),
        floats(4, 3, 64, 64),
        eval=(),
    ),
    entry(
        "DeepLabV3Plus",
        model("DeepLabV3Plus", "mobilenet_v2", decoder_channels=16),
        floats(4, 3, 64, 64),
    ),
    entry("PAN", model("PAN", decoder_channels=8), floats(2, 3, 128, 128)),
    entry("UPerNet", model("UPerNet", decoder_channels=16), floats(4, 3, 64, 64)),
    entry("Segformer", model("Segformer", decoder_segmentation_channels=16), pictures),
    entry(
        "Segformer, mit_b0",
        model("Segformer", "mit_b0", decoder_segmentation_channels=16),
        pictures,
        eval=(),
    ),
    entry(
        "DPT",
        model(
            "DPT",
            "tu-vit_tiny_patch16_224.augreg_in21k",
            decoder_fusion_channels=16,
            decoder_intermediate_channels=(8, 8, 8, 8),
            dynamic_img_size=True,
        ),
        floats(2, 3, 64, 64),
        eval=(),
    ),
]
