"""Residual networks for 32x32 images.

References:
    He, Zhang, Ren and Sun, Deep residual learning for image recognition, 2016.
    Singh and Krishnan, Filter response normalization layer, 2020.
    Zagoruyko and Komodakis, Wide residual networks, 2016 (dropout between the two convolutions of a block).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from experiments.models.layers import check_size, dropout_layer, initialise

Shortcut = Literal["pad", "conv"]
MakeLayer = Callable[[int], nn.Module]


class FilterResponseNorm(nn.Module):
    """Divides every channel of an image by its root mean square over the pixels, then scales and shifts it.

    Unlike BatchNorm, an example's output does not depend on the rest of its batch, so that a posterior is well defined.

    Example:
        >>> x = torch.randn(2, 3, 4, 4)
        >>> y = FilterResponseNorm(3)(x)
        >>> torch.allclose(y.square().mean((2, 3)), torch.ones(2, 3), atol=1e-3)
        True
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and type as ``x``, ``[n, C, H, W]``."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # bfloat16 is too coarse for the mean
        scale = torch.rsqrt(wide.square().mean((-2, -1), keepdim=True) + self.eps)
        return (x * (scale * self.weight[:, None, None]) + self.bias[:, None, None]).to(x.dtype)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut.

    Where the size changes, the shortcut is either every second pixel with new channels of zeros (``"pad"``, option A of
    He et al., no parameters) or a 1x1 convolution (``"conv"``, option B).
    """

    def __init__(
        self,
        channels: int,
        width: int,
        stride: int,
        norm: MakeLayer,
        activation: nn.Module,
        shortcut: Shortcut,
        dropout: float,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)
        self.activation, self.drop = activation, dropout_layer(dropout)
        self.shortcut: nn.Module = nn.Identity()
        if (stride, channels) != (1, width):
            self.shortcut = (
                PadShortcut(stride, width - channels)
                if shortcut == "pad"
                else nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), norm(width))
            )

    def forward(self, x: Tensor) -> Tensor:
        """Activation of the sum of both ways."""
        hidden = self.drop(self.activation(self.norm1(self.conv1(x))))
        out: Tensor = self.activation(self.norm2(self.conv2(hidden)) + self.shortcut(x))
        return out


class PadShortcut(nn.Module):
    """Every ``stride``-th pixel, and ``extra`` more channels of zeros."""

    def __init__(self, stride: int, extra: int) -> None:
        super().__init__()
        self.stride, self.extra = stride, extra

    def forward(self, x: Tensor) -> Tensor:
        """``[n, C + extra, H / stride, W / stride]``."""
        return pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))


class ResNet(nn.Module):
    """A 3x3 convolution, stages of blocks, the mean over pixels and a linear layer.

    Args:
        widths: channels of each stage; all stages but the first halve the image.
        blocks: blocks in each stage.
        classes: outputs.
        shortcut: form of the shortcut where the size changes, see `Block`.
        norm: makes the normalisation of so many channels.
        activation: the nonlinearity; it must not work in place.
        dropout: probability to drop a value between the two convolutions of a block.
    """

    def __init__(
        self,
        widths: Sequence[int],
        blocks: int,
        classes: int = 10,
        shortcut: Shortcut = "conv",
        norm: MakeLayer = nn.BatchNorm2d,
        activation: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_size("classes", classes)
        self.activation = activation or nn.ReLU()
        channels = widths[0]
        self.conv = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = norm(channels)
        stages: list[nn.Module] = []
        for i, width in enumerate(widths):
            stage: list[nn.Module] = []
            for j in range(blocks):
                stride = 2 if i > 0 and j == 0 else 1
                stage.append(Block(channels, width, stride, norm, self.activation, shortcut, dropout))
                channels = width
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, classes]`` of images ``[n, 3, H, W]``."""
        x = self.stages(self.activation(self.norm(self.conv(x))))
        logits: Tensor = self.fc(x.mean((-2, -1)))
        return logits


def resnet18(classes: int = 10, *, dropout: float = 0.0) -> ResNet:
    """ResNet-18 for 32x32: stages of 64, 128, 256 and 512 channels, two blocks each; 11,173,962 parameters.

    Shortcuts are 1x1 convolutions (option B). Its first layer is 3x3 without pooling, as is usual for CIFAR-10.
    """
    return ResNet((64, 128, 256, 512), 2, classes, "conv", dropout=dropout)


def resnet56(classes: int = 10, *, dropout: float = 0.0) -> ResNet:
    """ResNet-56 of He et al. for CIFAR-10: stages of 16, 32 and 64 channels, nine blocks each; 853,018 parameters.

    Shortcuts without parameters (option A), as in the original.
    """
    return ResNet((16, 32, 64), 9, classes, "pad", dropout=dropout)


def resnet20_frn(classes: int = 10, *, dropout: float = 0.0) -> ResNet:
    """ResNet-20 with filter response normalisation and swish for BatchNorm and ReLU; 269,722 parameters.

    For sampling at T = 1: its likelihood is a smooth function of the parameters, one example at a time. Swish stands in
    place of the thresholded unit that Singh and Krishnan use, and shortcuts have no parameters (option A).
    """
    return ResNet((16, 32, 64), 3, classes, "pad", FilterResponseNorm, nn.SiLU(), dropout)
