"""Models for the tests of conversion, of torch's own layers, and a function of a user's own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        around = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + around)


class ResNet18(nn.Module):
    """The usual one, with a width that may be smaller."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(BasicBlock(a, b, 1 if number == 0 else 2), BasicBlock(b, b, 1))
                for number, (a, b) in enumerate(pairwise(widths))
            )
        )
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.stages(x)), 1))


class UNet(nn.Module):
    """Down and up again in two or three dimensions, with ways across; any size of image."""

    def __init__(self, num_dims: int, width: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[num_dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[num_dims - 1]
        up = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[num_dims - 1]
        pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[num_dims - 1]

        def twice(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                self.convolution(inputs, outputs, 3, padding=1),
                norm(outputs),
                nn.ReLU(inplace=True),
                self.convolution(outputs, outputs, 3, padding=1),
                norm(outputs),
                nn.ReLU(inplace=True),
            )

        widths = [width << level for level in range(depth + 1)]
        self.pool = pool(2)
        self.down = nn.ModuleList(
            twice(a, b) for a, b in zip([1, *widths], widths[:-1], strict=False)
        )
        self.bottom = twice(widths[-2], widths[-1])
        self.up = nn.ModuleList(up(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.merge = nn.ModuleList(twice(2 * w, w) for w in reversed(widths[:-1]))
        self.last = self.convolution(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = []
        for level in self.down:
            x = level(x)
            across.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x, skip = up(x), across.pop()
            missing = [n - m for n, m in zip(skip.shape[2:], x.shape[2:], strict=True)]
            if any(missing):
                x = F.pad(x, [w for n in reversed(missing) for w in (n // 2, n - n // 2)])
            x = merge(torch.cat([skip, x], dim=1))
        return self.last(x)


class VGG(nn.Module):
    """Convolutions, pools and a fully connected head."""

    def __init__(self, size: int, classes: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(8 * (size // 4) ** 2, 16),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(16, 12),
            nn.ReLU(),
            nn.Linear(12, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Doubled(torch.autograd.Function):
    """Nobody but its author knows what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad
