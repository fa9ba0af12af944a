"""Models of other packages on two workers against one process, one thread each.

A step is forward and backward (of the autoencoder, decoding without gradients) with random weights,
at sizes at which one process takes more than a second. Before it is timed the converted model is
compared with the model itself on a small input. Memory is that of tensors that are alive at once.
Cases whose package is not installed are left out; `make zoo` installs them.

    python benchmarks/zoo.py [--rounds 3] [--quick] [--only TEXT]
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from harness.claim import Case, Claim, Settings, is_counted, is_timed
from harness.command import main
from harness.contenders import Counted, InOneProcess, OnWorkers
from torch import Tensor, nn
from values import check_close, peak

import tessel

ALONE = "one process"


def resnet() -> nn.Module:
    from torchvision.models import resnet50

    return resnet50()


def unet() -> nn.Module:
    from segmentation_models_pytorch import Unet

    return Unet("resnet34", encoder_weights=None)


def segresnet() -> nn.Module:
    from monai.networks.nets import SegResNet

    return SegResNet(init_filters=16, in_channels=1, out_channels=2)


def swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    # swin_t, without stochastic depth, so that it can be compared with itself
    return SwinTransformer(
        [4, 4], 96, [2, 2, 6, 2], [3, 6, 12, 24], [7, 7], stochastic_depth_prob=0.0
    )


def vit() -> nn.Module:
    from timm.models.vision_transformer import vit_base_patch16_224

    return vit_base_patch16_224(dynamic_img_size=True)


def decoder() -> nn.Module:
    from diffusers import AutoencoderKL

    blocks = (32, 64, 128, 128)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=blocks,
        layers_per_block=2,
        latent_channels=4,
    )


# by name: the package, what makes the model, a shape that takes a second, and a small one
MODELS: dict[str, tuple[str, Callable[[], nn.Module], list[int], list[int]]] = {
    "ResNet-50": ("torchvision", resnet, [8, 3, 256, 256], [2, 3, 64, 64]),
    "U-Net (SMP)": ("segmentation_models_pytorch", unet, [2, 3, 512, 512], [2, 3, 64, 64]),
    "U-Net (SMP), four images": (
        "segmentation_models_pytorch",
        unet,
        [4, 3, 512, 512],
        [2, 3, 64, 64],
    ),
    "SegResNet (MONAI)": ("monai", segresnet, [1, 1, 80, 80, 80], [1, 1, 16, 16, 16]),
    "Swin-T": ("torchvision", swin, [2, 3, 448, 448], [1, 3, 64, 64]),
    "Swin-T, four images": ("torchvision", swin, [4, 3, 448, 448], [1, 3, 64, 64]),
    "ViT-B": ("timm", vit, [1, 3, 384, 384], [1, 3, 64, 64]),
    "ViT-B, two images": ("timm", vit, [2, 3, 384, 384], [1, 3, 64, 64]),
    "decoder (AutoencoderKL)": ("diffusers", decoder, [1, 4, 80, 80], [1, 4, 16, 16]),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][1]()
    return model.eval() if name.startswith("decoder") else model


def call(name: str, model: Any, x: Any) -> Any:
    """What a step computes."""
    if name.startswith("decoder"):
        with torch.no_grad():
            return model.decode(x).sample
    y = model(x)
    y.square().mean().backward()
    return y.detach()


def whole(shape: list[int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def partition(shape: list[int]) -> tessel.Partition:
    """All workers in slabs along the first dimension of space."""
    world = tessel.world()
    return world.create_cartesian_topology_partition([1, 1, world.size, *[1] * (len(shape) - 3)])


def check(name: str) -> None:
    """A converted model gives what the model gives, on a small input."""
    shape = MODELS[name][3]
    P = partition(shape)
    x, one = whole(shape).double(), made(name).double()
    spread = tessel.nn.distribute_module(made(name).double(), P)
    found, expected = call(name, spread, tessel.spread(x, P)), call(name, one, x)
    check_close(f"the output of {name}", found.full(), expected, 1e-9)
    for (label, ours), theirs in zip(spread.named_parameters(), one.parameters(), strict=True):
        if theirs.grad is not None:
            scale = max(float(p.grad.abs().max()) for p in one.parameters() if p.grad is not None)
            error = float((ours.grad - theirs.grad).abs().max())
            assert error <= 1e-8 * scale, f"the gradient of {label} of {name} is wrong by {error}"


def by_tessel(settings: Settings) -> Callable[[], object]:
    name = settings["model"]
    check(name)
    P = partition(settings["shape"])
    model, x = tessel.nn.distribute_module(made(name), P), whole(settings["shape"])
    spread = tessel.spread(x, P)
    return lambda: call(name, model, spread)


def by_one(settings: Settings) -> Callable[[], object]:
    name = settings["model"]
    model, x = made(name), whole(settings["shape"])
    return lambda: call(name, model, x)


def memory_of_tessel(settings: Settings) -> int:
    return peak(by_tessel(settings))


def memory_of_one(settings: Settings) -> int:
    return peak(by_one(settings))


def cases() -> list[Case]:
    found = []
    for name, (package, _, shape, _) in MODELS.items():
        if find_spec(package) is None:
            continue
        settings = {"model": name, "shape": shape}
        text = f"{name} {'×'.join(map(str, shape))}"
        timed = Case(f"{text}, 2 workers", 2, settings, aims={ALONE: 1 / 1.7}, seconds=1.0, most=2)
        found += [timed, Case.counted(f"memory of {text}, 2 workers", 2, settings)]
    return found


CLAIM = Claim(
    "zoo",
    "models of other packages on 2 workers against 1, one thread each",
    cases(),
    [
        OnWorkers("Tessel", by_tessel, covers=is_timed, split=True),
        InOneProcess(ALONE, by_one, covers=is_timed, threads=1),
        Counted("Tessel", "zoo", "memory_of_tessel", covers=is_counted),
        Counted(ALONE, "zoo", "memory_of_one", workers=1, covers=is_counted),
    ],
    rounds=3,
    note="""float32; forward and backward, of the autoencoder decoding without gradients. Memory is
    that of tensors that are alive at once in a step, on the worker that has most.""",
)

if __name__ == "__main__":
    main(CLAIM, __doc__)
