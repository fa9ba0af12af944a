"""deepinv beside a torch without CUDA: `from deepinv_first import deepinv`.

Its dependency torchvision registers kernels for two operators that only its CUDA builds define.
"""

from __future__ import annotations

import warnings

import torch

_KEPT = []  # a library that is collected takes its definitions with it


def _define() -> None:
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


if not hasattr(torch.ops.torchvision, "nms"):
    _define()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepinv

__all__ = ["deepinv"]
