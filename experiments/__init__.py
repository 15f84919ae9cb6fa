"""The experiments behind the pages of the documentation, run from a clone; no part of the installed package.

- ``python -m experiments.uci``: regressions on the published UCI splits (docs/uci.md).
- ``python -m experiments.images mnist`` or ``cifar10``: the classification tables (docs/classification.md).
- ``python -m experiments.posteriors``: posteriors with known moments, by structure and method (docs/posteriors.md).
- ``python -m experiments.family``: every method at equal numbers of gradients (docs/methods.md).
- ``python -m experiments.lenet``: structures of Lambda on LeNet-5, by temperature (docs/posteriors.md).

Each says more with ``--help``; ``python -m experiments.uci.tables`` and so on make the pages from what was found.
"""
