"""Networks that only this suite needs: a small CNN, a small VGG, a transformer over rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.models.layers import dropout_layer

NORMS = {"batch": nn.BatchNorm2d, "group": lambda width: nn.GroupNorm(8, width), "none": lambda width: nn.Identity()}


def cnn(
    dropout: float = 0.0, *, norm: str = "none", widths: tuple[int, ...] = (16, 32, 64), size: int = 28
) -> nn.Module:
    """Convolutions 3x3, each with normalisation, ReLU and pooling, then 64 hidden units and ten classes."""
    layers: list[nn.Module] = []
    channels = 1
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=norm != "batch"), NORMS[norm](width), nn.ReLU()]
        layers += [nn.MaxPool2d(2), dropout_layer(dropout)]
        channels, size = width, size // 2
    hidden = [nn.Flatten(), nn.Linear(channels * size**2, 64), nn.ReLU(), dropout_layer(dropout)]
    return nn.Sequential(*layers, *hidden, nn.Linear(64, 10))


def small_vgg(dropout: float = 0.0) -> nn.Module:
    """Pairs of convolutions with BatchNorm for 32x32 colour images."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers += [nn.MaxPool2d(2), dropout_layer(dropout)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


class Transformer(nn.Module):
    """A classifier of sequences ``[n, tokens, features]``: torch's own encoder layers, then the mean over tokens."""

    def __init__(self, tokens: int, features: int, classes: int = 10, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.place = nn.Parameter(0.02 * torch.randn(tokens, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, classes]``."""
        logits: Tensor = self.head(self.encoder(self.embed(x) + self.place).mean(1))
        return logits
