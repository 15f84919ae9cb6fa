"""Minibatches, shifts and flips: exactly the transformations meant, each as often as it should be."""

import pytest
import torch
from torch.nn.functional import pad

from isosgd.data import CIFAR10_MEAN, CIFAR10_STD, crop_flip, minibatch, normalise

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


# Normalisation


def test_normalise_each_channel():
    images = torch.randint(256, (5, 3, 4, 4), dtype=torch.uint8)
    found = normalise(images, CIFAR10_MEAN, CIFAR10_STD)
    for c in range(3):
        expected = (images[:, c].double() / 255 - CIFAR10_MEAN[c]) / CIFAR10_STD[c]
        assert torch.allclose(found[:, c].double(), expected, atol=1e-6)
    assert found.dtype == torch.float32
    single = normalise(images[0], CIFAR10_MEAN, CIFAR10_STD)
    assert torch.equal(single, found[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_normalise_rounds_once(dtype):
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16)
    exact = (images.double() / 255 - 0.1307) / 0.3081
    found = normalise(images, 0.1307, 0.3081, dtype)
    assert found.dtype == dtype
    # one rounding to the type, after float32 arithmetic at least
    tolerance = torch.finfo(dtype).eps / 2 * exact.abs() + (1e-6 if dtype != torch.float64 else 1e-15)
    assert bool(((found.double() - exact).abs() <= tolerance).all())


@pytest.mark.parametrize(
    ("change", "error", "fault"),
    [
        ({"images": torch.zeros(3, 4, 4)}, TypeError, "torch.float32; expected uint8"),
        ({"dtype": torch.int64}, TypeError, "floating-point"),
        ({"std": 0.0}, ValueError, "std = 0.0 must be positive"),
        ({"std": (1.0, -1.0, 1.0)}, ValueError, "must be positive"),
        ({"mean": float("nan")}, ValueError, "mean = nan"),
        ({"mean": (0.1, 0.2)}, ValueError, "mean has 2 channels"),
    ],
    ids=str,
)
def test_normalise_refuses(change, error, fault):
    arguments = {"images": torch.zeros(3, 4, 4, dtype=torch.uint8), "mean": 0.0, "std": 1.0, "dtype": torch.float32}
    with pytest.raises(error, match=fault):
        normalise(**(arguments | change))


# Minibatches


def test_rows_are_drawn_equally_often_and_together(generator):
    x = torch.arange(20)
    a, b = minibatch((x, x.float()[:, None] * 2), 20_000, generator)
    assert torch.equal(a.float()[:, None] * 2, b)
    statistic, bound = chi_square_bound(a.bincount(minlength=20).double())
    assert statistic < bound


def test_rows_are_drawn_with_replacement(generator):
    (rows,) = minibatch((torch.arange(30),), 30, generator)
    assert len(rows.unique()) < 30  # all differ with probability 1e-12


@pytest.mark.parametrize(
    ("tensors", "n", "fault"),
    [
        ((), 2, "no rows in common"),
        ((torch.ones(3), torch.ones(4)), 2, r"\(3,\), \(4,\)"),
        ((torch.ones(()),), 2, "no rows"),
        ((torch.ones(0, 2),), 2, "no rows"),
        ((torch.ones(3),), 0, "n = 0"),
        ((torch.ones(3),), 2.0, "n = 2.0"),
    ],
)
def test_minibatch_refuses(tensors, n, fault):
    with pytest.raises(ValueError, match=fault):
        minibatch(tensors, n, None)


@gpu
def test_a_whole_batch_is_captured_in_one_cuda_graph():
    """Drawing, cropping and normalising replay without the host, with fresh randomness each time."""
    images = torch.randint(1, 256, (500, 3, 32, 32), dtype=torch.uint8, device="cuda")
    labels = torch.arange(500, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(0)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x, y = minibatch((images, labels), 64, generator)
        return normalise(crop_flip(x, generator), CIFAR10_MEAN, CIFAR10_STD, torch.bfloat16), y

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        batch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        x, y = batch()
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append((x.clone(), y.clone()))
    assert not torch.equal(seen[0][1], seen[1][1])
    for x, y in seen:
        assert x.shape == (64, 3, 32, 32)
        centre = normalise(images[y], CIFAR10_MEAN, CIFAR10_STD, torch.bfloat16)
        plain = {tuple(v) for v in centre[0].flatten(1).T.tolist()}
        inside = [tuple(v) in plain for v in x[0, :, 4:-4, 4:-4].flatten(1).T.tolist()]
        assert all(inside)  # each pixel of the middle is one of its own image
