"""Entries of torchvision: classifiers, segmentation, detection, video, flow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from entries import (
    BEAMS,
    CHANGES_LISTS,
    COLUMNS,
    QUARTERS,
    ROWS,
    SAMPLES,
    SLABS,
    THIRDS,
    ZooEntry,
    floats,
    made_by,
)


def model(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A model by its name; no weights are loaded."""
    return made_by("torchvision.models", "get_model", name, weights=None, **settings)


def resnet(block: str, **settings: Any) -> nn.Module:
    from torchvision.models import resnet as module

    return module.ResNet(getattr(module, block), [1, 1, 1, 1], num_classes=5, **settings)


def densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 2, 2, 2), 16, num_classes=5)


def efficientnet() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, _efficientnet_conf

    settings, _ = _efficientnet_conf("efficientnet_b0", width_mult=0.25, depth_mult=0.3)
    return EfficientNet(settings, dropout=0.2, num_classes=5)


def convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 1), CNBlockConfig(24, None, 2)]
    return ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=5)


def swin(version: int) -> nn.Module:
    from torchvision.models import swin_transformer as module

    blocks = {}
    if version == 2:
        blocks = {
            "block": module.SwinTransformerBlockV2,
            "downsample_layer": module.PatchMergingV2,
        }
    return module.SwinTransformer(
        *([4, 4], 16, [2, 2], [2, 4], [4, 4]), stochastic_depth_prob=0.1, num_classes=5, **blocks
    )


def vision_transformer() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 16, 32, dropout=0.1, num_classes=5)


def maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    sizes = {"block_channels": [8, 16], "block_layers": [1, 2], "head_dim": 4}
    return MaxVit((64, 64), 8, 4, **sizes, stochastic_depth_prob=0.1, num_classes=5)


def regnet() -> nn.Module:
    from torchvision.models.regnet import BlockParams, RegNet

    blocks = BlockParams.from_init_params(4, 16, 8.0, 2.0, 8, se_ratio=0.25)
    return RegNet(blocks, num_classes=5, stem_width=8)


def shufflenet() -> nn.Module:
    from torchvision.models import ShuffleNetV2

    return ShuffleNetV2([2, 2, 2], [8, 16, 32, 64, 64], num_classes=5)


def segmentation(kind: str) -> nn.Module:
    from torchvision.models import mobilenet_v3_large
    from torchvision.models.segmentation import deeplabv3, fcn, lraspp

    backbone = mobilenet_v3_large(width_mult=0.25, dilated=True)
    if kind == "deeplabv3":
        return deeplabv3._deeplabv3_mobilenetv3(backbone, 4, aux=True)
    if kind == "lraspp":
        return lraspp._lraspp_mobilenetv3(backbone, 4)
    layers = fcn.IntermediateLayerGetter(backbone.features, {"16": "out", "6": "aux"})
    channels = [backbone.features[place].out_channels for place in (16, 6)]
    return fcn.FCN(layers, *(fcn.FCNHead(each, 4) for each in channels))


def pyramid() -> nn.Module:
    from torchvision.models import mobilenet_v2
    from torchvision.models.detection.backbone_utils import _mobilenet_extractor

    return _mobilenet_extractor(
        mobilenet_v2(width_mult=0.25), fpn=True, trainable_layers=6, returned_layers=[2, 3, 4]
    )


def marked(count: int) -> list[dict[str, Tensor]]:
    """Boxes and labels for each picture."""
    boxes = torch.tensor([[3.0, 4.0, 30.0, 40.0], [20.0, 22.0, 50.0, 61.0]])
    return [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in range(count)]


def anchors() -> Any:
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    return AnchorGenerator(((16,),) * 4, ((0.5, 1.0),) * 4)


PLAIN = {"min_size": 64, "max_size": 64, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}


class RetinaNet(nn.Module):
    """RetinaNet with its transform, or from pictures on; its loss, or what heads give."""

    def __init__(self, transforms: bool) -> None:
        from torchvision.models.detection import RetinaNet

        super().__init__()
        self.net = RetinaNet(pyramid(), 3, anchor_generator=anchors(), **PLAIN)
        self.transforms = transforms

    def forward(self, x: Tensor) -> Any:
        from torchvision.models.detection.image_list import ImageList

        if self.transforms:
            return self.net(list(x), marked(len(x)))
        features = list(self.net.backbone(x).values())
        found = self.net.head(features)
        if not self.training:
            return found
        places = self.net.anchor_generator(ImageList(x, [x.shape[-2:]] * len(x)), features)
        return self.net.compute_loss(marked(len(x)), found, places)


class Proposals(nn.Module):
    """Faster R-CNN as far as it is torch code: pyramid, proposals of all anchors, their loss."""

    def __init__(self) -> None:
        from torchvision.models.detection import FasterRCNN

        super().__init__()
        net = FasterRCNN(pyramid(), 3, rpn_anchor_generator=anchors(), **PLAIN)
        self.backbone, self.rpn = net.backbone, net.rpn

    def forward(self, x: Tensor) -> Any:
        from torchvision.models.detection.image_list import ImageList
        from torchvision.models.detection.rpn import concat_box_prediction_layers

        features = list(self.backbone(x).values())
        scores, shifts = concat_box_prediction_layers(*self.rpn.head(features))
        places = self.rpn.anchor_generator(ImageList(x, [x.shape[-2:]] * len(x)), features)
        boxes = self.rpn.box_coder.decode(shifts, places)
        labels, matched = self.rpn.assign_targets_to_anchors(places, marked(len(x)))
        targets = self.rpn.box_coder.encode(matched, places)
        return boxes, scores, self.rpn.compute_loss(scores, shifts, labels, targets)


def video(convolution: str) -> nn.Module:
    from torchvision.models.video import resnet as module

    first, others = (module.Conv3DSimple, getattr(module, convolution))
    return module.VideoResNet(
        module.BasicBlock, [first, *[others] * 3], [1, 1, 1, 1], module.BasicStem, num_classes=5
    )


def swin3d() -> nn.Module:
    from torchvision.models.video import SwinTransformer3d

    return SwinTransformer3d([2, 4, 4], 16, [2, 2], [2, 4], [2, 4, 4], num_classes=5)


def mvit() -> nn.Module:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(1, 8, 8, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        MSBlockConfig(2, 8, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return MViT(
        *((32, 32), 8, blocks, True, True, True, True, 0.1, 0.0, 0.1, 5),
        patch_embed_kernel=(3, 3, 3),
        patch_embed_stride=(2, 2, 2),
        patch_embed_padding=(1, 1, 1),
    )


def raft() -> nn.Module:
    from torchvision.models.optical_flow import raft as module

    # torchvision makes pixel coordinates in single precision, whatever the model is in
    if module.make_coords_grid.__module__ != __name__:
        coordinates = module.make_coords_grid

        def in_double_precision(*args: Any, **kwargs: Any) -> Tensor:
            return coordinates(*args, **kwargs).to(torch.get_default_dtype())

        module.make_coords_grid = in_double_precision
    return module.raft_small(weights=None)


def two_frames() -> dict[str, Any]:
    first, second = (torch.tanh(each) for each in floats(2, 2, 3, 128, 128)()[0])
    return {"image1": first, "image2": second, "num_flow_updates": 2}


def last_flow(flows: list[Tensor]) -> Tensor:
    return flows[-1].square().mean()


entry = partial(ZooEntry, "torchvision")
pictures = floats(4, 3, 64, 64)
films = floats(2, 3, 4, 32, 32)

ENTRIES = [
    entry("resnet18", model("resnet18", num_classes=5), pictures, train=(ROWS, SAMPLES)),
    entry("ResNet, bottlenecks", partial(resnet, "Bottleneck"), pictures, eval=(THIRDS,)),
    entry(
        "ResNeXt",
        partial(resnet, "Bottleneck", groups=8, width_per_group=4),
        pictures,
        train=(QUARTERS,),
        eval=(COLUMNS,),
    ),
    entry(
        "DenseNet",
        densenet,
        pictures,
        train=(ROWS, THIRDS),
        unsupported={"recomputed_inside": f"RuntimeError: {CHANGES_LISTS}"},
    ),
    entry("EfficientNet", efficientnet, pictures),
    entry("mobilenet_v2", model("mobilenet_v2", width_mult=0.25, num_classes=5), pictures),
    entry(
        "mobilenet_v3_small",
        model("mobilenet_v3_small", width_mult=0.5, num_classes=5),
        pictures,
        train=(SAMPLES,),
    ),
    entry("mnasnet0_5", model("mnasnet0_5", num_classes=5), pictures, train=(COLUMNS,), eval=()),
    entry("squeezenet1_1", model("squeezenet1_1", num_classes=5), pictures, eval=()),
    entry(
        "googlenet",
        model("googlenet", num_classes=5, init_weights=False, aux_logits=True),
        pictures,
        eval=(),
    ),
    entry("RegNet", regnet, pictures),
    entry("ShuffleNet V2", shufflenet, pictures),
    entry("ConvNeXt", convnext, pictures),
    entry("Swin", partial(swin, 1), floats(2, 3, 36, 36)),
    entry("Swin V2", partial(swin, 2), floats(2, 3, 36, 36), train=(THIRDS,)),
    entry("VisionTransformer", vision_transformer, floats(2, 3, 32, 32)),
    entry("MaxViT", maxvit, floats(2, 3, 64, 64), train=(ROWS, SAMPLES)),
    entry("DeepLabV3", partial(segmentation, "deeplabv3"), floats(2, 3, 64, 64)),
    entry("FCN", partial(segmentation, "fcn"), floats(2, 3, 64, 64)),
    entry("LRASPP", partial(segmentation, "lraspp"), floats(2, 3, 64, 64)),
    entry("feature pyramid", pyramid, floats(2, 3, 64, 64)),
    entry("RetinaNet", partial(RetinaNet, False), floats(2, 3, 64, 64), train=(ROWS, THIRDS)),
    entry(
        "RetinaNet, with its transform",
        partial(RetinaNet, True),
        floats(2, 3, 64, 64),
        eval=(),  # what picks among boxes there is compiled, and gathers
        uses_in_training=True,
    ),
    entry("Faster R-CNN, proposals", Proposals, floats(2, 3, 64, 64), train=(ROWS, THIRDS)),
    entry("R3D", partial(video, "Conv3DSimple"), films, train=(SLABS,), eval=()),
    entry("MC3", partial(video, "Conv3DNoTemporal"), films, train=(BEAMS,), eval=(SLABS,)),
    entry("Swin3D", swin3d, floats(1, 3, 5, 32, 32), train=(SLABS,), eval=(BEAMS,)),
    entry("MViT", mvit, floats(1, 3, 8, 32, 32), train=(SLABS,), eval=(BEAMS,)),
    entry("raft_small", raft, two_frames, eval=(COLUMNS,), loss=last_flow),
]
