"""Augmentation on the device where the data lives, without any work of the host.

Nothing here waits for the device or has a shape that depends on values, so that all of it can be captured in a CUDA
graph (register the generator with the graph: ``graph.register_generator_state(generator)``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad


def crop_flip(
    images: Tensor, generator: torch.Generator | None, padding: int = 4, mirror: Tensor | None = None
) -> Tensor:
    """Shift every image by up to ``padding`` pixels each way, and mirror half of them: CIFAR's usual augmentation.

    The same as padding with zeros, a random crop to the old size and a random horizontal flip, each image with its own.
    Give uint8 images, so that the border is black.

    Args:
        images: ``[n, C, H, W]``, any type.
        generator: source of randomness on the images' device; None for torch's own.
        padding: largest shift.
        mirror: which images to mirror, bool ``[n]``, where chance is not to say so.

    Example:
        >>> images = torch.full((5, 3, 32, 32), 9, dtype=torch.uint8)
        >>> crop_flip(images, torch.Generator().manual_seed(0)).shape
        torch.Size([5, 3, 32, 32])
    """
    if images.dim() != 4:
        raise ValueError(f"images have shape {tuple(images.shape)}; expected [n, C, H, W]")
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        raise ValueError(f"padding = {padding!r} must be an integer of at least 0")
    n, channels, height, width = images.shape
    if mirror is not None and (mirror.shape != (n,) or mirror.dtype != torch.bool):
        raise ValueError(f"mirror is {mirror.dtype}, {tuple(mirror.shape)}; expected bool [{n}], one for each image")
    device = images.device
    shift = torch.randint(2 * padding + 1, (2, n, 1), generator=generator, device=device)
    if mirror is None:
        mirror = torch.randint(2, (n,), generator=generator, device=device, dtype=torch.bool)
    column = torch.arange(width, device=device)
    rows = torch.arange(height, device=device) + shift[0]
    columns = torch.where(mirror[:, None], column.flip(0), column) + shift[1]
    image, channel = torch.arange(n, device=device), torch.arange(channels, device=device)
    return pad(images, (padding,) * 4)[
        image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]
    ]


def jitter(
    images: Tensor, generator: torch.Generator | None, degrees: float = 10.0, shift: float = 2.0, scale: float = 0.1
) -> Tensor:
    """Turn, move and stretch every image a little, each by its own amounts: for digits, which must not be mirrored.

    Values between pixels are interpolated; outside is zero, so give images whose background is zero.

    Args:
        images: floating-point, ``[n, C, H, W]``.
        generator: source of randomness on the images' device; None for torch's own.
        degrees: the largest turn, either way.
        shift: the largest move in pixels, either way.
        scale: the largest change of width and height, as a share, each on its own.

    Example:
        >>> jitter(torch.ones(5, 1, 28, 28), torch.Generator().manual_seed(0)).shape
        torch.Size([5, 1, 28, 28])
    """
    if images.dim() != 4 or not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}, {tuple(images.shape)}; expected floats [n, C, H, W]")
    for name, value in (("degrees", degrees), ("shift", shift), ("scale", scale)):
        if not (math.isfinite(value) and value >= 0) or (name == "scale" and value >= 1):
            raise ValueError(f"{name} = {value!r} must not be negative{', and below 1' if name == 'scale' else ''}")
    n, _, height, width = images.shape
    u = torch.rand(5, n, generator=generator, device=images.device, dtype=images.dtype) * 2 - 1
    turn = u[0] * math.radians(degrees)
    wide, high = 1 + scale * u[1], 1 + scale * u[2]
    # Rows of the map from a pixel's place in the result to its place in the image, both from -1 to 1.
    right = u[3] * (2 * shift / width)
    down = u[4] * (2 * shift / height)
    theta = torch.stack([wide * turn.cos(), -high * turn.sin(), right, wide * turn.sin(), high * turn.cos(), down], 1)
    grid = torch.nn.functional.affine_grid(theta.view(n, 2, 3), list(images.shape), align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, align_corners=False)
