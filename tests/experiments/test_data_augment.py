"""Shifts and flips: exactly the transformations meant, each as often as it should be."""

import pytest
import torch
from torch.nn.functional import pad

from experiments.data import crop_flip

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def chi_square_bound(counts: torch.Tensor) -> tuple[float, float]:
    """The statistic of equal frequencies, and five standard deviations above its mean."""
    expected = counts.sum() / counts.numel()
    degrees = counts.numel() - 1
    return float(((counts - expected) ** 2 / expected).sum()), degrees + 5 * (2 * degrees) ** 0.5


def every_crop(image: torch.Tensor, padding: int) -> torch.Tensor:
    """All shifts and flips of one image ``[C, H, W]``, by slicing a padded copy."""
    _, height, width = image.shape
    padded = pad(image, (padding,) * 4)
    crops = [padded[:, i : i + height, j : j + width] for i in range(2 * padding + 1) for j in range(2 * padding + 1)]
    return torch.stack([*crops, *(crop.flip(-1) for crop in crops)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_every_crop_and_flip_comes_equally_often(generator, dtype):
    image = torch.arange(1, 61).reshape(2, 5, 6).to(dtype)  # all pixels differ, none is the border's 0
    candidates = every_crop(image, 1)
    n = 400 * len(candidates)
    found = crop_flip(image.expand(n, -1, -1, -1), generator, padding=1)
    assert found.dtype == dtype
    same = (found[:, None] == candidates).flatten(2).all(2)
    assert bool((same.sum(1) == 1).all()), "an image is not one of the crops"
    statistic, bound = chi_square_bound(same.sum(0).double())
    assert statistic < bound


def test_images_of_a_batch_are_shifted_independently(generator):
    images = torch.arange(1, 37, dtype=torch.uint8).reshape(1, 1, 6, 6).expand(200, -1, -1, -1)
    found = crop_flip(images, generator, padding=2)
    assert len(torch.unique(found.flatten(1), dim=0)) > 30  # of 50 that there are


def test_images_stay_with_their_index(generator):
    images = torch.arange(1, 101, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8)
    found = crop_flip(images, generator, padding=3)
    assert torch.equal(found.amax((1, 2, 3)), images[:, 0, 0, 0])


def test_images_are_mirrored_that_one_is_told_to(generator):
    images = torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8, generator=generator)
    mirror = torch.tensor([True, False, False, True, True, False])
    found = crop_flip(images, generator, padding=0, mirror=mirror)
    assert torch.equal(found, torch.where(mirror[:, None, None, None], images.flip(-1), images))
    for bad in (mirror[:5], mirror.long()):
        with pytest.raises(ValueError, match=r"expected bool \[6\]"):
            crop_flip(images, generator, mirror=bad)


def test_crop_flip_without_padding_only_flips(generator):
    image = torch.randn(1, 3, 4, 4)
    found = crop_flip(image.expand(20, -1, -1, -1), generator, padding=0)
    flipped = (found == image.flip(-1)).flatten(1).all(1)
    assert bool((flipped | (found == image).flatten(1).all(1)).all())
    assert 0 < int(flipped.sum()) < 20


def test_the_same_generator_gives_the_same_batch():
    images = torch.randn(16, 3, 32, 32)
    first, second = (crop_flip(images, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, crop_flip(images.to(memory_format=torch.channels_last), torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(
    ("images", "padding", "fault"),
    [
        (torch.zeros(3, 32, 32), 4, r"\[n, C, H, W\]"),
        (torch.zeros(1, 3, 4, 4), -1, "-1"),
        (torch.zeros(1, 3, 4, 4), 1.5, "1.5"),
    ],
)
def test_crop_flip_refuses(images, padding, fault):
    with pytest.raises(ValueError, match=fault):
        crop_flip(images, None, padding)


@gpu
def test_a_whole_batch_is_captured_in_one_cuda_graph():
    """Shifts and flips replay without the host, with fresh randomness each time."""
    images = torch.randint(1, 256, (64, 3, 32, 32), dtype=torch.uint8, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(0)

    def batch() -> torch.Tensor:
        return crop_flip(images, generator)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        batch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        x = batch()
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(x.clone())
    assert not torch.equal(seen[0], seen[1])
    for x in seen:
        plain = {tuple(v) for v in images[0].flatten(1).T.tolist()}
        inside = [tuple(v) in plain for v in x[0, :, 4:-4, 4:-4].flatten(1).T.tolist()]
        assert all(inside)  # each pixel of the middle is one of its own image
