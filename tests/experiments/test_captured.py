"""Whole steps of training and sampling on images, without a GPU."""

import copy

import pytest
import torch
from torch import nn

from experiments.data import jitter
from experiments.images.captured import Chain, descend, one_cycle, probabilities, refresh_statistics
from experiments.images.images import Images


def bright_columns(count=300, augment="none", channels=None):
    """Images whose bright column says of which class they are."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (count,), generator=generator)
    pixels = torch.randint(60, (count, 8, 8), generator=generator, dtype=torch.uint8)
    pixels[torch.arange(count), :, labels] = 255
    if channels:
        pixels = pixels[:, None].repeat(1, channels, 1, 1)
    return Images.make(pixels, labels, 0.2, 0.3, augment)


def small(channels=1, norm=False, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, padding=1),
        nn.BatchNorm2d(6) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(6 * 64, 4),
    )


@pytest.mark.parametrize("augment", ["none", "crop-flip", "jitter"])
def test_images_are_normalised_and_labels_stay_with_them(augment):
    images = bright_columns(50, augment)
    index = torch.arange(49, -1, -1)
    x, y = images.take(index, torch.Generator().manual_seed(0))
    assert x.shape == (50, 1, 8, 8) and torch.equal(y, images.labels.flip(0))
    if augment == "none":
        expected = (images.pixels.flip(0) / 255 - 0.2) / 0.3
        torch.testing.assert_close(x, expected)
        torch.testing.assert_close(torch.cat([a for a, _ in images.plain(16)]), expected.flip(0))
    else:
        assert not torch.equal(x, images.take(index, torch.Generator().manual_seed(1))[0])


def test_a_split_is_disjoint_and_covering():
    images = bright_columns(40)
    marked = Images.make(torch.arange(40, dtype=torch.uint8).view(40, 1, 1).expand(40, 8, 8), images.labels, 0.0, 1.0)
    part, rest = marked.split(0.1, seed=3)
    assert (len(part), len(rest)) == (36, 4)
    assert sorted([*part.pixels[:, 0, 0, 0].tolist(), *rest.pixels[:, 0, 0, 0].tolist()]) == list(range(40))


def test_images_that_are_no_images_are_refused():
    with pytest.raises(ValueError, match=r"torch\.float32"):
        Images.make(torch.zeros(3, 8, 8), torch.zeros(3), 0.0, 1.0)
    with pytest.raises(ValueError, match="with 2 labels"):
        Images.make(torch.zeros(3, 8, 8, dtype=torch.uint8), torch.zeros(2), 0.0, 1.0)


def test_jitter_moves_little_and_nothing_when_told():
    generator = torch.Generator().manual_seed(0)
    images = torch.zeros(400, 1, 15, 15)
    images[:, :, 7, 7] = 1.0
    torch.testing.assert_close(jitter(images, generator, 0.0, 0.0, 0.0), images)
    moved = jitter(images, generator, 0.0, 2.0, 0.0)
    at = torch.arange(15.0)
    rows = (moved.sum((1, 3)) * at).sum(1) / moved.sum((1, 2, 3))
    assert float((rows - 7).abs().max()) <= 2.0 + 1e-4
    assert abs(float(rows.var()) - 4 / 3) < 4.5 * 4 / 3 * (0.8 / 400) ** 0.5 * 1.5  # uniform from -2 to 2
    for bad in ({"degrees": -1.0}, {"scale": 1.0}, {"shift": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            jitter(images, generator, **bad)
    with pytest.raises(ValueError, match=r"torch\.uint8"):
        jitter(images.to(torch.uint8), generator)


def test_the_gradient_is_that_of_the_mean_loss_and_the_prior():
    images, model = bright_columns(), small()
    chain = Chain(copy.deepcopy(model), images, 32, decay=0.01, seed=1)
    seen = []
    take = Images.take

    def watched(self, index, generator, mirror):
        seen.append(index)
        return take(self, index, generator, mirror)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Images, "take", watched)
        chain.step()
    found = chain.flat_gradient(torch.zeros_like(chain.flat.values))
    x, y = images.take(seen[0], None)
    prior = sum(p.square().sum() for p in model.parameters()) * 0.005
    (nn.functional.cross_entropy(model(x), y) + prior).backward()
    assert float(chain.update.rates.abs().max()) == 0.0  # no rate was set: nothing moved
    for view, p in zip(chain.flat.views(found), model.parameters(), strict=True):
        torch.testing.assert_close(view, p.grad)


def test_epochs_see_every_image_once_and_independent_minibatches_do_not():
    images = bright_columns(64)
    take = Images.take
    for shuffled in (True, False):
        chain = Chain(small(), images, 16, decay=0.0, shuffled=shuffled, seed=1)
        seen = []

        def watched(self, index, generator, mirror, seen=seen):
            seen.append(index.clone())
            return take(self, index, generator, mirror)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Images, "take", watched)
            chain.step(8)
        epochs = torch.cat(seen).view(2, 64)
        once = [len(set(epoch.tolist())) == 64 for epoch in epochs]
        assert once == [shuffled, shuffled]
        assert not torch.equal(epochs[0], epochs[1])


def test_training_mirrors_every_image_in_every_second_epoch():
    images = bright_columns(64, "crop-flip")
    chain = Chain(small(), images, 16, decay=0.0, shuffled=True, seed=1)
    take, seen = Images.take, []

    def watched(self, index, generator, mirror):
        seen.append((index.clone(), mirror[index].clone()))
        return take(self, index, generator, mirror)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Images, "take", watched)
        chain.step(12)
    mirrored = torch.zeros(3, 64, dtype=torch.bool)
    for i, (index, mirror) in enumerate(seen):
        mirrored[i // 4, index] = mirror
    assert torch.equal(mirrored[0], ~mirrored[1]) and torch.equal(mirrored[0], mirrored[2])
    assert abs(int(mirrored[0].sum()) - 32) < 4.5 * 4  # a coin for each image


def test_chains_side_by_side_may_have_rates_of_their_own():
    images = bright_columns()
    chains = [Chain(small(), images, 32, decay=1e-4, friction=0.1, noise=False, seed=k) for k in range(2)]
    descend(chains, [one_cycle(60, 0.02), one_cycle(7, 0.02)])
    assert [chain.gradients for chain in chains] == [60, 7]
    alone = Chain(small(), images, 32, decay=1e-4, friction=0.1, noise=False, compiled=True, seed=1)
    descend([alone], one_cycle(7, 0.02))
    assert torch.equal(alone.flat.values, chains[1].flat.values)


def test_chains_side_by_side_train_and_injected_noise_moves_them():
    images = bright_columns()
    chains = [Chain(small(), images, 32, decay=1e-4, friction=0.1, noise=False, seed=k) for k in range(2)]
    descend(chains, one_cycle(60, 0.02))
    assert all(float(chain.loss) < 0.3 for chain in chains)
    assert not torch.equal(chains[0].flat.values, chains[1].flat.values)
    noisy = Chain(small(), images, 32, decay=0.0, seed=0)
    before = noisy.flat.values.clone()
    noisy.update.set([torch.tensor(1e-9)] * 2, [torch.tensor(1e12)] * 2)
    noisy.step(5)
    moved = torch.cat(noisy.flat.parts(noisy.flat.values - before, range(4)))
    # Kicks of rate sqrt(2 lam) each, the gradient is nothing beside them.
    assert abs(float(moved.double().var()) / (5 * 2 * 1e-18 * 1e12) - 1) < 4.5 * (2 / moved.numel()) ** 0.5


def test_statistics_are_those_of_the_images_and_predictions_are_probabilities():
    images, model = bright_columns(1000, channels=3), small(3, norm=True, dropout=0.5)
    refresh_statistics(model, images, torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = model[0](torch.cat([x for x, _ in images.plain()]))
    norm = model[1]
    torch.testing.assert_close(norm.running_mean, hidden.mean((0, 2, 3)), rtol=0.1, atol=0.05)
    torch.testing.assert_close(norm.running_var, hidden.var((0, 2, 3)), rtol=0.1, atol=0.05)
    assert norm.momentum == 0.1
    batches = images.plain(300)
    p = probabilities(model, batches)
    torch.testing.assert_close(p.sum(1), torch.ones(1000))
    assert torch.equal(p, probabilities(model, batches)) and model.training
    assert not torch.equal(probabilities(model, batches, dropout=True), probabilities(model, batches, dropout=True))


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="batch_size = 301"):
        Chain(small(), bright_columns(), 301, decay=0.0)
    with pytest.raises(ValueError, match="0 steps"):
        one_cycle(0, 0.1)
