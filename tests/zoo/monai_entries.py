"""Entries of MONAI: networks for volumes, in few and narrow layers."""

from __future__ import annotations

from functools import partial

from entries import BEAMS, QUARTERS, ROWS, SLABS, ZooEntry, floats, made_by

THIN = (1, 1, 1, 1, 3)
entry = partial(ZooEntry, "monai", train=(SLABS,), eval=(BEAMS,))
volumes = floats(1, 1, 16, 16, 16)
model = partial(made_by, "monai.networks.nets")
pair = {"in_channels": 1, "out_channels": 2}
swin = partial(model, "SwinUNETR", 1, 2, feature_size=12, window_size=3)
vit = {"hidden_size": 24, "mlp_dim": 48, "num_layers": 2, "num_heads": 2}

ENTRIES = [
    entry(
        "UNet",
        model("UNet", 3, **pair, channels=(4, 8, 16), strides=(2, 2), num_res_units=1),
        volumes,
        train=(SLABS, THIN),
    ),
    entry(
        "UNet, 2-D",
        model(
            "UNet",
            2,
            **pair,
            channels=(4, 8, 16),
            strides=(2, 2),
            num_res_units=2,
            norm="batch",
            dropout=0.1,
        ),
        floats(2, 1, 32, 32),
        train=(ROWS,),
        eval=(QUARTERS,),
    ),
    entry(
        "BasicUNet", model("BasicUNet", 3, features=(4, 4, 8, 8, 16, 4)), floats(1, 1, 32, 32, 32)
    ),
    entry(
        "BasicUNetPlusPlus",
        model("BasicUNetPlusPlus", 3, features=(4, 4, 8, 8, 16, 4)),
        floats(1, 1, 32, 32, 32),
        eval=(),
    ),
    entry(
        "AttentionUnet",
        model("AttentionUnet", 3, **pair, channels=(4, 8, 16), strides=(2, 2)),
        volumes,
    ),
    entry(
        "DynUNet",
        model(
            "DynUNet",
            3,
            **pair,
            kernel_size=(3, 3, 3),
            strides=(1, 2, 2),
            upsample_kernel_size=(2, 2),
            filters=(4, 8, 16),
            deep_supervision=True,
            res_block=True,
        ),
        volumes,
    ),
    entry(
        "SegResNet",
        model(
            "SegResNet", init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1), dropout_prob=0.1
        ),
        volumes,
    ),
    entry(
        "SegResNetDS",
        model("SegResNetDS", init_filters=4, blocks_down=(1, 1, 1), norm="instance", dsdepth=2),
        volumes,
    ),
    entry(
        "SegResNetVAE",
        model(
            "SegResNetVAE", (16, 16, 16), init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1)
        ),
        volumes,
    ),
    entry("VNet", model("VNet", 2, out_channels=2), floats(1, 1, 64, 64), train=(ROWS,), eval=()),
    entry(
        "HighResNet",
        model(
            "HighResNet",
            layer_params=(
                {"name": "conv_0", "n_features": 4, "kernel_size": 3},
                {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 1},
                {"name": "res_2", "n_features": 8, "kernels": (3, 3), "repeat": 1},
                {"name": "conv_1", "n_features": 8, "kernel_size": 1},
                {"name": "conv_2", "kernel_size": 1},
            ),
        ),
        volumes,
        eval=(),
    ),
    entry(
        "SwinUNETR",
        swin(depths=(2, 1, 1, 1), num_heads=(1, 2, 2, 2)),
        floats(1, 1, 64, 32, 32),
        limit=240,
    ),
    entry(
        "SwinUNETR, more parts",
        swin(depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2)),
        floats(1, 1, 64, 64, 32),
        train=(),
        eval=((1, 1, 2, 2, 1), (1, 1, 3, 1, 1)),
        limit=240,
    ),
    entry(
        "SwinUNETR V2, 2-D",
        swin(depths=(2, 2, 1, 1), num_heads=(1, 2, 2, 2), use_v2=True, spatial_dims=2),
        floats(1, 1, 64, 64),
        train=(ROWS,),
        eval=(QUARTERS,),
    ),
    entry(
        "UNETR",
        model("UNETR", 1, 2, (32, 32, 32), feature_size=4, hidden_size=24, mlp_dim=48, num_heads=2),
        floats(1, 1, 32, 32, 32),
        eval=(),
    ),
    entry(
        "ViT",
        model("ViT", 1, (16, 16, 16), (4, 4, 4), **vit, classification=True, num_classes=3),
        volumes,
    ),
    entry("ViTAutoEnc", model("ViTAutoEnc", 1, (16, 16, 16), (4, 4, 4), **vit), volumes),
    entry(
        "DenseNet",
        model("DenseNet", 3, **pair, init_features=8, growth_rate=4, block_config=(2, 2)),
        floats(2, 1, 16, 16, 16),
    ),
    entry(
        "ResNet",
        model("ResNet", "basic", [1, 1, 1, 1], [4, 8, 16, 32], 3, 1, num_classes=2),
        floats(2, 1, 32, 32, 32),
    ),
    entry(
        "SENet",
        model("SEResNet50", layers=(1, 1, 1, 1), spatial_dims=2, in_channels=1, num_classes=2),
        floats(2, 1, 64, 64),
        train=(ROWS,),
        eval=(),
    ),
    entry(
        "EfficientNetBN",
        model(
            "EfficientNetBN",
            "efficientnet-b0",
            pretrained=False,
            spatial_dims=2,
            in_channels=1,
            num_classes=2,
        ),
        floats(2, 1, 64, 64),
        train=(ROWS,),
        eval=(),
    ),
    entry(
        "AutoEncoder",
        model("AutoEncoder", 3, **pair, channels=(4, 8), strides=(2, 2), num_res_units=1),
        volumes,
    ),
    entry(  # in evaluation mode its gradients raise in one process, too
        "VarAutoEncoder",
        model("VarAutoEncoder", 3, (1, 16, 16, 16), 1, 8, (4, 8), (2, 2)),
        volumes,
        train=(SLABS, BEAMS),
        eval=(),
        uses_in_training=True,
        draws=True,
    ),
    entry(
        "AutoencoderKL",
        model(
            "AutoencoderKL",
            3,
            channels=(8, 16),
            num_res_blocks=(1, 1),
            attention_levels=(False, True),
            latent_channels=2,
            norm_num_groups=4,
        ),
        volumes,
        draws=True,
    ),
    entry(
        "MedNeXt",
        model(
            "MedNeXt",
            3,
            init_filters=4,
            blocks_down=(1, 1),
            blocks_bottleneck=1,
            blocks_up=(1, 1),
            encoder_expansion_ratio=(2, 2),
            decoder_expansion_ratio=(2, 2),
        ),
        volumes,
    ),
    entry(
        "Discriminator",
        model("PatchDiscriminator", 3, 4, 1, num_layers_d=2),
        floats(2, 1, 32, 32, 32),
        eval=(),
    ),
]
