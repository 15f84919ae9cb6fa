"""How the name of a parameter tells its layer."""

from __future__ import annotations


def layer_of(name: str) -> str:
    """Layer of a parameter: the module it sits in. A name without a dot is a layer of its own.

    Example:
        >>> layer_of("block.fc1.weight"), layer_of("block.fc1.bias"), layer_of("w")
        ('block.fc1', 'block.fc1', 'w')
    """
    return name.rpartition(".")[0] or name
