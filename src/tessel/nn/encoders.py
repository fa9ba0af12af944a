"""Encoders that skip padding: `torch.nn.TransformerEncoder` has zeros there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tessel.core.context import is_compiling
from tessel.tensor.tensor import is_spread


def encoded(
    encoder: Any,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """The result of `torch.nn.TransformerEncoder` in one process, for a plain or spread `src`.

    In evaluation mode without gradients, torch computes with nested tensors without the padding,
    and fills it with zeros before the last norm. It never does so for subclasses of tensors.
    """
    forward = nn.TransformerEncoder.forward
    if not is_spread(src) or not _leaves_out_padding(encoder, src, mask, src_key_padding_mask):
        return forward(encoder, src, mask, src_key_padding_mask, is_causal)
    assert src_key_padding_mask is not None
    # the same layers: only the norm, which comes after the zeros, is applied here
    layers: Any = object.__new__(type(encoder))
    modules = encoder._modules | {"norm": None}
    layers.__dict__ = encoder.__dict__ | {"_modules": modules}
    found = forward(layers, src, mask, src_key_padding_mask, is_causal)
    found = found.masked_fill(_hidden(src_key_padding_mask).unsqueeze(-1), 0)
    return found if encoder.norm is None else encoder.norm(found)


def _hidden(padding: Tensor) -> Tensor:
    """The positions of padding: those where a boolean mask is true, or another one is not zero."""
    return padding if padding.dtype == torch.bool else padding != 0


def _leaves_out_padding(
    encoder: Any, src: Tensor, mask: Tensor | None, padding: Tensor | None
) -> bool:
    """Whether torch would skip padding of a plain `src`, by its own conditions."""
    first = encoder.layers[0]
    if padding is None or mask is not None or src.dim() != 3 or first.training or is_compiling():
        return False
    is_switched_on = torch.backends.mha.get_fastpath_enabled()
    if not is_switched_on or not getattr(encoder, "use_nested_tensor", False):
        return False
    if torch.is_autocast_enabled():
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (src, *first.parameters())):
        return False
    if not getattr(encoder, "mask_check", True):
        return True
    hidden = _hidden(padding)
    return not (hidden[:, :-1] & ~hidden[:, 1:]).any()  # padding comes last
