"""Entries of transformers: models of text with split sequences, and of pictures and sound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from entries import COLUMNS, QUARTERS, ROWS, THIRDS, TOKENS, ZooEntry, floats

HALVES, IN_THREE, IN_FOUR = (1, 2), (1, 3), (1, 4)  # of sequences of tokens
LENGTH, WORDS = 13, 50


def model(name: str, attention: str = "sdpa", **settings: Any) -> Callable[[], nn.Module]:
    """A model by its class, with random weights and the configuration of its class."""

    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        config = kind.config_class(**settings)
        return kind._from_config(config, attn_implementation=attention)

    return make


def text(padding: str = "", labels: bool = True, **more: Any) -> Callable[[], dict[str, Any]]:
    """Tokens, with padding before or behind the first of two sequences, and what is to follow."""

    def make() -> dict[str, Any]:
        ids = torch.randint(3, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
        found = {"input_ids": ids, **more}
        if padding:
            mask = torch.ones(2, LENGTH, dtype=torch.long)
            mask[0, slice(0, 4) if padding == "left" else slice(-4, None)] = 0
            found["attention_mask"] = mask
        if labels:
            found["labels"] = ids.clone()
        return found

    return make


def states(length: int = LENGTH, width: int = 16, **more: Any) -> Callable[[], dict[str, Any]]:
    """Embeddings of tokens."""
    (values,) = floats(2, length, width)()
    return lambda: {"inputs_embeds": values.double(), **more}


def both() -> dict[str, Any]:
    """Text and pictures; with the axes of pictures, the text stays whole."""
    ids = text(labels=False)()["input_ids"]
    ids[:, -1] = WORDS - 1  # where a text ends
    return {"input_ids": ids, "pixel_values": floats(2, 3, 32, 32)()[0]}


def detr() -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    names = ("encoder_layers", "decoder_layers")
    heads = ("encoder_attention_heads", "decoder_attention_heads")
    widths = ("encoder_ffn_dim", "decoder_ffn_dim")
    sizes = dict.fromkeys(names, 1) | dict.fromkeys(heads, 2) | dict.fromkeys(widths, 16)
    return DetrForObjectDetection(
        DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=backbone,
            d_model=16,
            num_queries=5,
            **sizes,
        )
    )


entry = partial(ZooEntry, "transformers")
sequence = partial(entry, train=(HALVES, IN_THREE), eval=(HALVES, IN_FOUR))

body = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
small = {**body, "intermediate_size": 24, "vocab_size": WORDS}
groups = {**small, "num_key_value_heads": 2}
patches = {**body, "intermediate_size": 24, "image_size": 32, "patch_size": 4}
windows = {
    **{"image_size": 32, "patch_size": 2, "embed_dim": 8, "window_size": 4},
    **{"depths": [2, 2], "num_heads": [2, 4]},
}
once = {"use_cache": False}
gpt2 = {
    **{"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
t5 = {
    **{"vocab_size": WORDS, "d_model": 16, "d_kv": 4, "d_ff": 24},
    **{"num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
}
clip_text = {**small, "max_position_embeddings": 32, "eos_token_id": WORDS - 1, "bos_token_id": 0}
whisper = {
    **{"vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8},
    **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_source_positions": 20},
    **{"max_target_positions": 20, "decoder_start_token_id": 1, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
segformer = {
    **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [4, 2], "hidden_sizes": [8, 16]},
    **{"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2]},
    **{"mlp_ratios": [2, 2], "decoder_hidden_size": 16},
}

ENTRIES = [
    sequence("Llama", model("LlamaForCausalLM", **groups), text(**once)),
    sequence("Llama, padded before", model("LlamaForCausalLM", **groups), text("left", **once)),
    sequence("Llama, padded behind", model("LlamaForCausalLM", **groups), text("right", **once)),
    sequence("Llama, eager", model("LlamaForCausalLM", "eager", **groups), text("left", **once)),
    sequence(
        "Llama, of embeddings",
        model("LlamaForCausalLM", **groups),
        states(**once),
        train=(TOKENS,),
        eval=((1, 3, 1), (2, 2, 1)),
    ),
    sequence(
        "Mistral, sliding window",
        model("MistralForCausalLM", **groups, sliding_window=5),
        text("left", **once),
    ),
    sequence("Qwen2", model("Qwen2ForCausalLM", **groups), text("right", **once)),
    sequence("Qwen3", model("Qwen3ForCausalLM", **groups, head_dim=4), text(**once)),
    sequence("GPT2", model("GPT2LMHeadModel", **gpt2), text("left", **once)),
    sequence("BERT", model("BertForMaskedLM", **small, max_position_embeddings=32), text("right")),
    sequence(
        "RoBERTa",
        model("RobertaForMaskedLM", **small, max_position_embeddings=32, pad_token_id=1),
        text("right"),
    ),
    sequence("T5", model("T5ForConditionalGeneration", "eager", **t5), text("right", **once)),
    sequence(
        "Mamba",
        model(
            "MambaForCausalLM",
            "eager",
            **{"vocab_size": WORDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
        ),
        text(**once),
        train=(HALVES,),
    ),
    entry(
        "Whisper",
        model("WhisperForConditionalGeneration", **whisper),
        lambda: {
            "input_features": floats(2, 8, 40)()[0],
            "decoder_input_ids": text()()["input_ids"],
            **once,
        },
        train=((1, 1, 2),),
        eval=((1, 1, 3), (1, 1, 4)),
    ),
    entry(
        "ViT", model("ViTForImageClassification", **patches), floats(2, 3, 32, 32), (ROWS, THIRDS)
    ),
    entry(
        "CLIP",
        model("CLIPModel", text_config=clip_text, vision_config=patches, projection_dim=8),
        both,
    ),
    entry("Swin", model("SwinForImageClassification", **windows), floats(1, 3, 32, 32)),
    entry(
        "Swinv2", model("Swinv2ForImageClassification", "eager", **windows), floats(1, 3, 32, 32)
    ),
    entry(
        "SegFormer",
        model("SegformerForSemanticSegmentation", "eager", **segformer),
        floats(2, 3, 32, 32),
        eval=(QUARTERS, COLUMNS),
    ),
    entry("DETR", detr, floats(1, 3, 64, 64)),
]
