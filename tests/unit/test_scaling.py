"""Standard units: mean 0 and deviation 1, and back."""

import pytest
import torch

from isosgd.tables import standardise


def test_training_data_have_mean_0_and_deviation_1(generator):
    x = torch.randn(50, 3, dtype=torch.float64, generator=generator) * torch.tensor([1e-3, 1.0, 1e4]) + 7
    y = torch.randn(50, dtype=torch.float64, generator=generator) * 30 - 5
    scaling = standardise(x, y)
    for z in (scaling.transform_x(x), scaling.transform_y(y)):
        assert torch.allclose(z.mean(0), torch.zeros_like(z[0]), atol=1e-9)
        assert torch.allclose(z.square().mean(0), torch.ones_like(z[0]), atol=1e-9)
    other_x, other_y = x[:5] * 2 + 1, y[:5] - 9  # the inverse undoes it for other data too
    assert torch.allclose(scaling.inverse_x(scaling.transform_x(other_x)), other_x)
    assert torch.allclose(scaling.inverse_y(scaling.transform_y(other_y)), other_y)


def test_constant_columns_keep_their_scale():
    x = torch.full((6, 2), 0.1, dtype=torch.float64)  # six times 0.1: their mean rounds, so that std() is 1e-17, not 0
    x[:, 1] = torch.tensor([0, 4, 0, 4, 0, 4])
    scaling = standardise(x, torch.full((6,), 3.3, dtype=torch.float64))
    assert scaling.x_scale[0] == 1
    assert scaling.x_scale[1] == 2
    assert scaling.y_scale == 1
    assert scaling.transform_x(x)[:, 0].abs().max() < 1e-12


@pytest.mark.parametrize(
    ("x", "y", "error", "fault"),
    [
        (torch.ones(3), torch.ones(3), ValueError, "expected"),
        (torch.ones(3, 2), torch.ones(3, 1), ValueError, "expected"),
        (torch.ones(3, 2), torch.ones(4), ValueError, "expected"),
        (torch.ones(0, 2), torch.ones(0), ValueError, "N >= 1"),
        (torch.ones(3, 2, dtype=torch.int64), torch.ones(3), TypeError, "train_x is torch.int64"),
        (torch.ones(3, 2), torch.tensor([1.0, 2.0, float("nan")]), ValueError, "train_y has values"),
    ],
)
def test_standardise_refuses(x, y, error, fault):
    with pytest.raises(error, match=fault):
        standardise(x, y)
