"""Modules as log likelihoods: the user's own stays as it is, and what defines no posterior is refused."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isosgd import Target, likelihoods, priors
from isosgd.target.priors import Extra

F64 = torch.float64


def mlp(inputs: int = 3, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))


def test_the_users_module_stays_bit_for_bit() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before, mode = copy.deepcopy(model.state_dict()), model.training
    with pytest.warns(UserWarning, match=r"layer '1' \(BatchNorm1d\)"):
        target = Target.from_module(model, "gaussian")
    free = target.initial()
    batch = (torch.randn(8, 3), torch.randn(8))
    for _ in range(3):
        for x, g in zip(free.values(), target.gradient(free, batch, 8)[1], strict=True):
            x.data -= 0.1 * g
    target.predictive(free, batch[0])
    assert model.training == mode
    assert all(p.grad is None and isinstance(p, nn.Parameter) for p in model.parameters())
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])


def test_a_target_does_not_follow_what_happens_to_the_module_later() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).eval()
    target = Target.from_module(model, "gaussian")
    free, batch = target.initial(), (torch.randn(8, 3), torch.randn(8))
    loss = target.gradient(free, batch, 8)[0]
    model.train()
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(target.gradient(target.initial(), batch, 8)[0], loss)


def test_output_is_that_of_the_module() -> None:
    model = mlp()
    x = torch.randn(7, 3)
    target = Target.from_module(model, likelihoods.Gaussian(0.5))
    pieces = target.predictive(target.initial(), x)
    torch.testing.assert_close(pieces["mean"], model(x).detach())
    torch.testing.assert_close(pieces["variance"], torch.full((7, 1), 0.25))


def test_which_parameters_are_sampled() -> None:
    model = mlp()
    everything = ["0.weight", "0.bias", "2.weight", "2.bias"]

    def names(model: nn.Module, sampled: Any) -> list[str]:
        return list(Target.from_module(model, "categorical", sampled=sampled).initial())

    assert names(model, "all") == everything
    assert names(model, "last_layer") == ["2.weight", "2.bias"]
    assert names(nn.Linear(2, 2), "last_layer") == ["weight", "bias"]
    assert names(model, lambda name, p: p.ndim == 1) == ["0.bias", "2.bias"]
    model[0].requires_grad_(False)
    assert names(model, "all") == ["2.weight", "2.bias"]
    assert names(model, lambda name, p: True) == everything


def test_frozen_parameters_are_shared_and_move_to_the_type_of_the_sampled() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    target = Target.from_module(model, "gaussian", sampled="last_layer")
    x = torch.randn(6, 3)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    for dtype in (torch.float32, F64, torch.float32):
        mean = target.predictive(target.initial(dtype=dtype), x.to(dtype))["mean"]
        assert mean.dtype == dtype
        torch.testing.assert_close(mean.float(), model(x).detach())


def test_tied_parameters_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    model = Tied().double()
    target = Target.from_module(model, likelihoods.Gaussian(1.0), priors.Flat())
    free = target.initial()
    assert list(free) == ["first.weight", "first.bias", "second.bias"]
    x, y = torch.randn(5, 3, dtype=F64), torch.randn(5, 3, dtype=F64)
    _, grads = target.gradient(free, (x, y), 5)
    loss = 0.5 * (model(x) - y).square().sum(1).mean()
    torch.testing.assert_close(grads, list(torch.autograd.grad(loss, list(model.parameters()))))


def test_recurrent_and_attention_models_work() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)
            self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.rnn(x)[0]
            return self.head(self.attend(hidden, hidden, hidden)[0][:, -1])

    model = Last()
    target = Target.from_module(model, "categorical", priors.Flat())
    x, y = torch.randn(5, 6, 3), torch.randint(2, (5,))
    _, grads = target.gradient(target.initial(), (x, y), 5)
    expected = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    torch.testing.assert_close(grads, list(expected))


def test_several_inputs_and_a_callable_likelihood() -> None:
    model = nn.Bilinear(2, 3, 1)
    target = Target.from_module(model, lambda output, y: -(output[:, 0] - y).abs())
    a, b, y = torch.randn(5, 2), torch.randn(5, 3), torch.randn(5)
    free = target.initial()
    torch.testing.assert_close(target.log_likelihood(free, (a, b, y)), -(model(a, b)[:, 0] - y).abs())
    torch.testing.assert_close(target.predictive(free, (a, b)), model(a, b).detach())


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.1), nn.Dropout2d(0.1), nn.AlphaDropout(0.1), nn.RReLU(), nn.MultiheadAttention(4, 2, dropout=0.1)],
)
def test_random_layers_are_switched_off_with_one_warning(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 4), layer)
    with pytest.warns(UserWarning, match=rf"dropout is off: layer '1' \({type(layer).__name__}\) is random") as heard:
        Target.from_module(model, "gaussian")
    assert len(heard) == 1
    assert model.training
    assert all(m.training for m in model.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Target.from_module(model.eval(), "gaussian")


def test_a_network_in_training_mode_is_sampled_without_its_dropout_and_with_its_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Dropout(0.2), nn.Linear(4, 1))
    with pytest.warns(UserWarning) as heard:
        target = Target.from_module(model, likelihoods.Gaussian(1.0))
    assert [str(w.message).split(" random")[0].split(" uses")[0] for w in heard] == [
        "dropout is off: layer '2' (Dropout) and 1 other layer are",
        "layer '1' (BatchNorm1d)",
    ]
    x = torch.randn(16, 3)
    quiet = copy.deepcopy(model)
    quiet[2].eval()
    quiet[3].eval()
    torch.testing.assert_close(target.predictive(target.initial(), x)["mean"], quiet(x).detach())


def test_recurrent_layers_lose_their_dropout_but_not_their_mode() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(3, 4, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0][:, -1])

    model = Recurrent()
    with pytest.warns(UserWarning, match=r"layer 'rnn' \(GRU\)"):
        target = Target.from_module(model, likelihoods.Gaussian(1.0))
    x = torch.randn(5, 6, 3)
    expected = copy.deepcopy(model).eval()(x).detach()
    torch.testing.assert_close(target.predictive(target.initial(), x)["mean"], expected)
    assert model.rnn.dropout == 0.5


def test_randomness_written_by_hand_is_found_too() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(len(x), 1)

    target = Target.from_module(Noisy(3, 1), "gaussian")
    with pytest.raises(ValueError, match="different outputs for the same input"):
        target.gradient(target.initial(), (torch.zeros(4, 3), torch.zeros(4)), 4)


def test_batch_norm_warns_only_where_it_looks_at_the_batch() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Target.from_module(model, "categorical")
    with pytest.warns(UserWarning, match="statistics of the minibatch"):
        Target.from_module(nn.BatchNorm1d(4, track_running_stats=False).eval(), "categorical")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Target.from_module(lambda x: x, "gaussian"), TypeError, "function"),
        (lambda: Target.from_module(mlp(), "normal"), ValueError, "'normal'.*gaussian"),
        (lambda: Target.from_module(mlp(), 3), TypeError, "got 3"),
        (lambda: Target.from_module(mlp(), "gaussian", sampled="first"), ValueError, "'first'"),
        (lambda: Target.from_module(mlp(), "gaussian", sampled=lambda n, p: False), ValueError, "none of the 4"),
        (lambda: Target.from_module(mlp().requires_grad_(False), "gaussian"), ValueError, "requires_grad"),
        (lambda: Target.from_module(mlp().requires_grad_(False), "gaussian", sampled="last_layer"), ValueError, "none"),
        (lambda: Target.from_module(nn.ReLU(), "gaussian"), ValueError, "none of the 0"),
        (lambda: Target.from_module(nn.LazyLinear(2), "gaussian"), ValueError, "no shape yet"),
        (lambda: Target.from_module(nn.Linear(2, 1, dtype=torch.complex64), "gaussian"), TypeError, "complex64"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_bad_modules_are_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.zeros(4, 3), "got a Tensor"),
        ((torch.zeros(4, 3),), "got a tuple of 1"),
        ((torch.zeros(4, 3), torch.tensor([0, 1, 2, 5])), "label 5, but the output has 3 classes"),
        ((torch.full((4, 3), math.nan), torch.zeros(4).long()), "input 0 has 12 values that are NaN"),
        ((torch.zeros(4, 3), torch.zeros(4)), r"y\.long"),
        ((torch.zeros(4, 5), torch.zeros(4).long()), r"cannot take inputs of shape \[4, 5\]: .*mat1 and mat2"),
    ],
)
def test_bad_batches_are_refused(batch: Any, words: str) -> None:
    target = Target.from_module(mlp(outputs=3), "categorical")
    with pytest.raises(ValueError, match=words):
        target.gradient(target.initial(), batch, 4)


def test_check_looks_at_every_target() -> None:
    y = torch.zeros(500)
    y[-1] = 2
    target = Target.from_module(mlp(), "bernoulli")
    with pytest.raises(ValueError, match="got 2"):
        target.check(target.initial(), (torch.zeros(500, 3), y))


class Heavy(likelihoods.StudentT):
    """Student-t noise whose degrees of freedom are sampled, as a user may write it."""

    def extra(self) -> dict[str, Extra]:
        return {**super().extra(), "likelihood.df": Extra(torch.tensor(4.0), priors.HalfNormal(10.0))}

    def log_prob(self, output: Tensor, y: Tensor, params: dict[str, Tensor]) -> Tensor:
        df = params["likelihood.df"]
        z = (y - output).squeeze(-1) / params["likelihood.scale"]
        return torch.distributions.StudentT(df).log_prob(z) - params["likelihood.scale"].log()


@pytest.mark.parametrize("name", ["gaussian", "student_t"])
def test_the_scale_of_the_noise_is_known_as_one(name: str) -> None:
    target = Target.from_module(nn.Linear(2, 1), name, priors.HierarchicalNormal())
    free = target.initial()
    assert target.noise_scales() == ["likelihood.scale"]
    assert target.prior_scales(free) == ["prior.scale"] and set(target.extras(free)) == {
        "likelihood.scale",
        "prior.scale",
    }


def test_what_is_no_scale_of_the_noise_has_no_curvature_that_is_known_before() -> None:
    """Each example tells of the logarithm of a scale, not of degrees of freedom."""
    from isosgd.data.sources import TensorBatches
    from isosgd.engine.chains import Chains
    from isosgd.samplers import SGLD

    target = Target.from_module(nn.Linear(2, 1), Heavy(), num_data=1000)
    assert target.noise_scales() == ["likelihood.scale"] and target.prior_scales(target.initial()) == []
    data = (torch.randn(1000, 2), torch.randn(1000, 1))
    chains = Chains(
        target, [target.initial()], TensorBatches(data, 10, 0), 1000,
        lambda groups, generator, many: SGLD(groups, num_data=1000, lr=1e-3, generator=generator), 0,
    )  # fmt: skip
    alone = dict(zip(chains.params, target.prior_curvature(chains.params), strict=True))
    known = dict(zip(chains.params, chains._known_curvature(), strict=True))
    more = {name: float((known[name] - alone[name]).max()) for name in known}
    assert more["likelihood.scale"] > 100 and all(more[n] == 0 for n in more if n != "likelihood.scale")
