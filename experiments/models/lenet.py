"""LeNet-5 for 28x28 images of one channel."""

from __future__ import annotations

from torch import Tensor, nn

from experiments.models.layers import check_size, dropout_layer, initialise


class LeNet5(nn.Module):
    """Two convolutions of 20 and 50 filters 5x5, each with ReLU and 2x2 max pooling, then 500 units; see `lenet5`."""

    def __init__(self, classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        check_size("classes", classes)
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(50 * 4 * 4, 500)
        self.fc2 = nn.Linear(500, classes)
        self.relu, self.pool, self.drop = nn.ReLU(), nn.MaxPool2d(2), dropout_layer(dropout)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, classes]`` of images ``[n, 1, 28, 28]``."""
        x = self.drop(self.pool(self.relu(self.conv1(x))))
        x = self.drop(self.pool(self.relu(self.conv2(x))))
        x = self.drop(self.relu(self.fc1(x.flatten(1))))
        logits: Tensor = self.fc2(x)
        return logits


def lenet5(classes: int = 10, *, dropout: float = 0.0) -> LeNet5:
    """LeNet-5 as Caffe has it (20-50-500, 431,080 parameters), the form that the Bayesian literature takes.

    The paper on I-SGD says LeNet-5 and cites LeCun et al. (1998), but gives no layers. Unlike Caffe's file, which has a
    single ReLU, there is one after each convolution too. Dropout, when asked for, follows every layer but the last.

    Example:
        >>> sum(p.numel() for p in lenet5().parameters())
        431080
    """
    return LeNet5(classes, dropout)
