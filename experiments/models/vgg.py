"""VGG-16 with BatchNorm for 32x32 images."""

from __future__ import annotations

from torch import Tensor, nn

from experiments.models.layers import check_size, dropout_layer, initialise

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG(nn.Module):
    """Five stages of 3x3 convolutions, each ended by 2x2 max pooling, and one linear layer; see `vgg16_bn`."""

    def __init__(self, classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        check_size("classes", classes)
        layers: list[nn.Module] = []
        channels = 3
        for stage in STAGES:
            for width in stage:
                layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
            layers += [nn.MaxPool2d(2), dropout_layer(dropout)]
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, classes]`` of images ``[n, 3, 32, 32]``."""
        logits: Tensor = self.fc(self.features(x).flatten(1))
        return logits


def vgg16_bn(classes: int = 10, *, dropout: float = 0.0) -> VGG:
    """VGG-16 with BatchNorm for CIFAR-10: 13 convolutions and one linear layer; 14,724,042 parameters.

    The three large linear layers of the original are made for 224x224 images and left out, as is usual. So are the
    biases before BatchNorm, which subtracts them again: their posterior would be their prior. Dropout, when asked for,
    follows every pooling.

    References:
        Simonyan and Zisserman, Very deep convolutional networks for large-scale image recognition, 2015.
    """
    return VGG(classes, dropout)
