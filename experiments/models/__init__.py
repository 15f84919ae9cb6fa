"""Networks of the experiments, in plain torch.

All give raw outputs (logits), take ``dropout`` for their MC-dropout variant, whose parameters have the same names, and
draw their first weights from torch's global generator: call ``torch.manual_seed`` before. None works in place, so that
``torch.func`` can differentiate and batch them, and inputs may be in the channels-last format.
"""

from experiments.models.lenet import LeNet5, lenet5
from experiments.models.mlp import mlp
from experiments.models.resnet import FilterResponseNorm, ResNet, resnet18, resnet20_frn, resnet56
from experiments.models.vgg import VGG, vgg16_bn

__all__ = [
    "VGG",
    "FilterResponseNorm",
    "LeNet5",
    "ResNet",
    "lenet5",
    "mlp",
    "resnet18",
    "resnet20_frn",
    "resnet56",
    "vgg16_bn",
]
