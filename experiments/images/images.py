"""Labelled images on the device where they are worked on: bytes, augmented and made floats a minibatch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from experiments.data import crop_flip, jitter

Augment = Literal["none", "crop-flip", "jitter"]


@dataclass(frozen=True)
class Images:
    """A set of images with labels.

    Attributes:
        pixels: uint8, ``[N, C, H, W]``.
        labels: int64, ``[N]``.
        factor: what pixels are multiplied by, ``[C, 1, 1]``.
        term: what is added then.
        augment: what a minibatch goes through: shifts and mirror images (CIFAR-10), or small turns, shifts and
            stretches (digits).
    """

    pixels: Tensor
    labels: Tensor
    factor: Tensor
    term: Tensor
    augment: Augment = "none"

    @classmethod
    def make(
        cls,
        pixels: Tensor,
        labels: Tensor,
        mean: float | Sequence[float],
        std: float | Sequence[float],
        augment: Augment = "none",
        device: torch.device | str = "cpu",
    ) -> Images:
        """Take images as the readers give them, with the mean and standard deviation of pixels on the scale 0 to 1.

        Example:
            >>> pixels, labels = torch.zeros(4, 28, 28, dtype=torch.uint8), torch.arange(4)
            >>> images = Images.make(pixels, labels, 0.5, 0.25)
            >>> images.plain.shape, float(images.plain[0, 0, 0, 0])
            (torch.Size([4, 1, 28, 28]), -2.0)
        """
        if pixels.dtype != torch.uint8 or pixels.dim() not in (3, 4) or len(pixels) != len(labels):
            raise ValueError(
                f"pixels are {pixels.dtype}, {tuple(pixels.shape)}, with {len(labels)} labels; expected uint8 "
                "[N, H, W] or [N, C, H, W] and a label each"
            )
        pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels
        means = torch.tensor(mean, dtype=torch.float32).reshape(-1, 1, 1)
        stds = torch.tensor(std, dtype=torch.float32).reshape(-1, 1, 1)
        factor, term = 1 / (255 * stds), -means / stds
        return cls(pixels.to(device), labels.to(device), factor.to(device), term.to(device), augment)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.pixels.device

    def rows(self, index: Tensor) -> Images:
        """Some of them."""
        index = index.to(self.device)
        return Images(self.pixels[index], self.labels[index], self.factor, self.term, self.augment)

    def split(self, share: float, seed: int) -> tuple[Images, Images]:
        """All but a share of them, and that share, by chance; the second part is not augmented."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        count = round(share * len(self))
        rest = self.rows(order[:count])
        return self.rows(order[count:]), Images(rest.pixels, rest.labels, rest.factor, rest.term)

    def transform(
        self, batch: tuple[Tensor, Tensor], generator: torch.Generator | None, mirror: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Pixels as augmented floats, and their labels: the ``transform`` of `isosgd.sample`. No host work.

        Args:
            batch: pixels and labels.
            generator: of the augmentation.
            mirror: which of them `crop_flip` mirrors, bool ``[n]``; chance says so by default.
        """
        x, y = batch
        if self.augment == "crop-flip":
            x = crop_flip(x, generator, mirror=mirror)
        if self.augment == "jitter":  # while the background still is zero
            x = jitter(x.float(), generator)
        return torch.addcmul(self.term, x, self.factor), y

    @property
    def plain(self) -> Tensor:
        """All images as floats, in order, not augmented."""
        return torch.addcmul(self.term, self.pixels, self.factor)
