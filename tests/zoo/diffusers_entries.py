"""Entries of diffusers: autoencoders of pictures and films, and the models between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from entries import BEAMS, CHANGES_LISTS, QUARTERS, SLABS, THIRDS, TOKENS, ZooEntry, floats

HEIGHTS, WIDTHS = (1, 1, 1, 2, 1), (1, 1, 1, 1, 2)  # of films


class Method(nn.Module):
    """What encodes, or decodes, and gives one tensor."""

    def __init__(self, inner: Any, method: str) -> None:
        super().__init__()
        self.inner, self.method = inner, method

    def forward(self, x: Tensor) -> Any:
        if self.method == "decode":
            return self.inner.decode(x).sample
        if self.method == "encode":
            return self.inner.encode(x).latent_dist.mode()
        return self.inner(x).sample


def model(name: str, method: str = "", **settings: Any) -> Callable[[], nn.Module]:
    """A model by its class, with random weights; or a method of it."""

    def make() -> nn.Module:
        import diffusers

        inner = getattr(diffusers, name)(**settings)
        return Method(inner, method) if method else inner

    return make


def given(*shape: int, **more: Any) -> Callable[[], dict[str, Any]]:
    """Noisy latents by their name, time steps, a text, and more."""

    def make() -> dict[str, Any]:
        torch.manual_seed(1)
        steps = torch.arange(3, 3 + shape[0])
        beside: dict[str, Any] = {"timestep": steps, "encoder_hidden_states": (shape[0], 5, 8)}
        found = {"hidden_states": shape, **beside, **more, "return_dict": False}
        return {k: torch.randn(v) if type(v) is tuple else v for k, v in found.items()}

    return make


entry = partial(ZooEntry, "diffusers")

TWO = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
FOUR = {"block_out_channels": (4, 4, 8, 8), "layers_per_block": 1, "latent_channels": 4}
WAN = {
    **{"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1},
    "temperal_downsample": [True, False],
}
HUNYUAN = {
    **FOUR,
    "norm_num_groups": 2,
    "down_block_types": ("HunyuanVideoDownBlock3D",) * 4,
    "up_block_types": ("HunyuanVideoUpBlock3D",) * 4,
}
LTX = {
    **{"latent_channels": 4, "patch_size": 2},
    **{"block_out_channels": (4, 8, 8, 8), "decoder_block_out_channels": (4, 8, 8, 8)},
    **{"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5},
}
MOCHI = {
    **{"latent_channels": 4, "layers_per_block": (1,) * 5},
    **dict.fromkeys(("encoder_block_out_channels", "decoder_block_out_channels"), (32,) * 4),
    **{"temporal_expansions": (1, 2, 3), "spatial_expansions": (2, 2, 2)},
}
COG = {**FOUR, "norm_num_groups": 2, "temporal_compression_ratio": 4}
FILMS = {
    "AutoencoderKLWan": (WAN, (1, 4, 3, 8, 8), (1, 3, 5, 16, 16)),
    "AutoencoderKLHunyuanVideo": (HUNYUAN, (1, 4, 3, 4, 4), (1, 3, 9, 32, 32)),
    "AutoencoderKLLTXVideo": (LTX, (1, 4, 3, 4, 4), (1, 3, 9, 32, 32)),
    "AutoencoderKLCogVideoX": (COG, (1, 4, 3, 4, 4), (1, 3, 9, 32, 32)),
    "AutoencoderKLMochi": (MOCHI, (1, 4, 2, 4, 3), (1, 3, 7, 32, 24)),
}


def unet(**settings: Any) -> dict[str, Any]:
    return {
        **{"sample_size": 16, "layers_per_block": 1, "norm_num_groups": 4},
        **{"cross_attention_dim": 8, "attention_head_dim": 4, **settings},
    }


def names(kind: str) -> dict[str, tuple[str, str]]:
    return {
        "down_block_types": (f"CrossAttnDownBlock{kind}", f"DownBlock{kind}"),
        "up_block_types": (f"UpBlock{kind}", f"CrossAttnUpBlock{kind}"),
    }


def conditions(*shape: int) -> Callable[[], tuple[Any, ...]]:
    """Noisy latents, time steps and a text."""

    def make() -> tuple[Any, ...]:
        torch.manual_seed(1)
        return torch.randn(shape), torch.arange(3, 3 + shape[0]), torch.randn(shape[0], 5, 8)

    return make


# of transformers
patches = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "patch_size": 2}
grouped = {**patches, "in_channels": 4, "out_channels": 8, "sample_size": 16, "norm_num_groups": 4}
sizes = {"resolution": None, "aspect_ratio": None}

ENTRIES = [
    entry(
        "AutoencoderKL",
        model("AutoencoderKL", "call", block_out_channels=(8, 16), norm_num_groups=4, **TWO),
        floats(2, 3, 16, 16),
        eval=(QUARTERS, THIRDS),
    ),
    *(
        entry(
            f"{name}, {method}",
            model(name, method, **settings),
            floats(*(latent if method == "decode" else film)),
            train=(HEIGHTS,),
            eval=(SLABS, WIDTHS) if method == "decode" else (SLABS, BEAMS),
            unsupported={"recomputed_inside": f"IndexError: {CHANGES_LISTS}"}
            if name == "AutoencoderKLWan"
            else {},
        )
        for name, (settings, latent, film) in FILMS.items()
        for method in ("decode", "encode")
    ),
    entry(
        "VQModel",
        model(
            *("VQModel", "call"),
            **TWO,
            **{"block_out_channels": (8, 16), "norm_num_groups": 4},
            **{"latent_channels": 3, "num_vq_embeddings": 12},
        ),
        floats(2, 3, 16, 16),
    ),
    entry(
        "AutoencoderTiny",
        model(
            *("AutoencoderTiny", "call"),
            encoder_block_out_channels=(8,) * 4,
            decoder_block_out_channels=(8,) * 4,
            num_encoder_blocks=(1,) * 4,
            num_decoder_blocks=(1,) * 4,
        ),
        floats(2, 3, 32, 32),
    ),
    entry(
        "AutoencoderDC",
        model(
            *("AutoencoderDC", "call"),
            **{"latent_channels": 4, "attention_head_dim": 4},
            **dict.fromkeys(
                ("encoder_block_types", "decoder_block_types"), ("ResBlock", "EfficientViTBlock")
            ),
            **dict.fromkeys(("encoder_block_out_channels", "decoder_block_out_channels"), (8, 8)),
            **dict.fromkeys(("encoder_layers_per_block", "decoder_layers_per_block"), (1, 1)),
            **dict.fromkeys(("encoder_qkv_multiscales", "decoder_qkv_multiscales"), ((), (5,))),
            **{"decoder_norm_types": ["rms_norm"] * 2, "decoder_act_fns": ["silu"] * 2},
        ),
        floats(2, 3, 16, 16),
    ),
    entry(
        "UNet2DConditionModel",
        model(
            "UNet2DConditionModel",
            **unet(block_out_channels=(8, 16), **names("2D")),
        ),
        conditions(2, 4, 16, 16),
    ),
    entry(
        "UNet3DConditionModel",
        model("UNet3DConditionModel", **unet(block_out_channels=(32, 32), **names("3D"))),
        conditions(1, 4, 3, 16, 16),
        train=(HEIGHTS,),
        eval=(SLABS,),
    ),
    entry(
        "UNet2DModel",
        model(
            "UNet2DModel",
            **{"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1},
            **{"norm_num_groups": 4, "attention_head_dim": 4},
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        lambda: (*floats(2, 3, 16, 16)(), torch.tensor([3, 7])),
    ),
    entry(
        "ControlNetModel",
        model(
            "ControlNetModel",
            **{"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4},
            **{"cross_attention_dim": 8, "attention_head_dim": 4},
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            conditioning_embedding_out_channels=(4, 8, 8, 8),
        ),
        lambda: (*conditions(2, 4, 16, 16)(), torch.randn(2, 3, 128, 128)),
    ),
    entry(
        "UNetMotionModel",
        model(
            "UNetMotionModel",
            **{"sample_size": 16, "block_out_channels": (32, 32), "layers_per_block": 1},
            **{"norm_num_groups": 4, "cross_attention_dim": 8, "num_attention_heads": 2},
            **{"motion_num_attention_heads": 2, "motion_max_seq_length": 4},
            **names("Motion"),
        ),
        # a text for each frame
        lambda: (*conditions(1, 4, 3, 8, 8)()[:2], torch.randn(3, 5, 8)),
        train=(HEIGHTS,),
        eval=(SLABS, BEAMS),
    ),
    entry(
        "UNetSpatioTemporalConditionModel",
        model(
            "UNetSpatioTemporalConditionModel",
            **{"sample_size": 16, "block_out_channels": (32, 32), "layers_per_block": 1},
            **{"num_attention_heads": (2, 2), "cross_attention_dim": 8},
            **{"addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 12},
            **names("SpatioTemporal"),
        ),
        # frames come before channels
        lambda: (*conditions(1, 2, 8, 16, 16)(), torch.tensor([[6.0, 127.0, 0.02]])),
        train=(HEIGHTS,),
        eval=((1, 2, 1, 1, 1), BEAMS),
    ),
    entry(
        "Transformer2DModel",
        model(
            "Transformer2DModel",
            **{"num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 8},
            **{"norm_num_groups": 4, "cross_attention_dim": 8},
        ),
        given(2, 8, 12, 12, timestep=None),
    ),
    entry(
        "DiTTransformer2DModel",
        model("DiTTransformer2DModel", **grouped, num_embeds_ada_norm=10),
        lambda: (torch.randn(2, 4, 16, 16), torch.tensor([3, 7]), torch.tensor([1, 2])),
    ),
    entry(
        "PixArtTransformer2DModel",
        model(
            "PixArtTransformer2DModel",
            **grouped,
            **{"cross_attention_dim": 16, "caption_channels": 8, "num_embeds_ada_norm": 10},
        ),
        given(2, 4, 16, 16, added_cond_kwargs=sizes),
    ),
    entry(
        "SD3Transformer2DModel",
        model(
            "SD3Transformer2DModel",
            **patches,
            **{"sample_size": 16, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 16},
            **{"joint_attention_dim": 8, "caption_projection_dim": 16, "pooled_projection_dim": 8},
        ),
        given(2, 4, 16, 16, pooled_projections=(2, 8)),
    ),
    entry(
        "FluxTransformer2DModel",
        model(
            "FluxTransformer2DModel",
            **{"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1},
            **{"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 8},
            **{"pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8)},
        ),
        given(2, 12, 4, pooled_projections=(2, 8), img_ids=(12, 3), txt_ids=(5, 3)),
        train=(TOKENS,),
        eval=((1, 3, 1),),
    ),
    entry(
        "SanaTransformer2DModel",
        model(
            "SanaTransformer2DModel",
            **{"in_channels": 4, "out_channels": 4, "num_layers": 1, "sample_size": 16},
            **{"num_attention_heads": 2, "attention_head_dim": 4, "caption_channels": 8},
            **{"num_cross_attention_heads": 2, "cross_attention_head_dim": 4},
            **{"cross_attention_dim": 8, "mlp_ratio": 2.0},
        ),
        given(2, 4, 16, 16),
    ),
    entry(
        "LTXVideoTransformer3DModel",
        model(
            "LTXVideoTransformer3DModel",
            **{"in_channels": 4, "out_channels": 4, "num_layers": 1, "caption_channels": 8},
            **{"num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16},
        ),
        given(
            *(1, 12, 4),
            **{"num_frames": 3, "height": 2, "width": 2},
            encoder_attention_mask=torch.tensor([[1, 1, 1, 0, 0]]),
        ),
        train=(TOKENS,),
        eval=((1, 3, 1),),
    ),
    entry(
        "CogVideoXTransformer3DModel",
        model(
            "CogVideoXTransformer3DModel",
            **{"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1},
            **{"in_channels": 4, "out_channels": 4, "time_embed_dim": 4, "text_embed_dim": 8},
            **{"sample_width": 8, "sample_height": 8, "sample_frames": 9},
            max_text_seq_length=5,
        ),
        given(1, 3, 4, 8, 8),  # frames come before channels
        train=(HEIGHTS,),
        eval=((1, 2, 1, 1, 1), BEAMS),
    ),
    entry(
        "WanTransformer3DModel",
        model(
            "WanTransformer3DModel",
            **{"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12},
            **{"in_channels": 4, "out_channels": 4, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16},
            **{"num_layers": 2, "rope_max_seq_len": 32},
        ),
        given(1, 4, 3, 8, 8),
        train=(HEIGHTS,),
        eval=(SLABS, BEAMS),
    ),
]
