"""Where minibatches come from: tensors, loaders, several data sets at once, and their transforms."""

from isosgd.data.sources import DataSets, Transform

__all__ = ["DataSets", "Transform"]
