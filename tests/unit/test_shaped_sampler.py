"""I-SGD with a Lambda that knows directions: its steps, what is saved, what is refused."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from isosgd import ISGD, SamplingWarning
from isosgd.geometry.full import Full
from isosgd.noise import AlphaStable
from tests.innovations import Planned

SHAPES = {"a.weight": (3, 2), "a.bias": (3,), "b.weight": (2, 2)}
STRUCTURES = ["diagonal", "kronecker", "full"]
every_structure = pytest.mark.parametrize("structure", STRUCTURES)


def make(structure: Any, params: dict[str, Tensor], **settings: Any) -> ISGD:
    own = {"num_data": 100, "batch_size": 8, "generator": torch.Generator().manual_seed(5)}
    return ISGD(params.items(), structure=structure, **{**own, **settings})


def leaves(chains: int | None = None) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    lead = () if chains is None else (chains,)
    return {name: torch.randn(*lead, *shape, generator=g).requires_grad_() for name, shape in SHAPES.items()}


class Stream:
    """Gradients of ``|theta|^2 / 2`` with noise, and their noise vectors, correlated within a weight matrix."""

    def __init__(self, params: dict[str, Tensor], seed: int = 7) -> None:
        self.params, self.generator = params, torch.Generator().manual_seed(seed)

    def noise(self) -> list[Tensor]:
        drawn = [0.3 * torch.randn(p.shape, generator=self.generator) for p in self.params.values()]
        return [d + 0.5 * d.roll(1, -1) for d in drawn]

    def next(self) -> list[Tensor]:
        for p, d in zip(self.params.values(), self.noise(), strict=True):
            p.grad = p.detach() + d
        return self.noise()

    def warm(self, sampler: ISGD, vectors: int = 64) -> None:
        for _ in range(vectors):
            sampler.observe(self.noise())
        sampler.adapt([1.0 for _ in sampler.param_groups])

    def advance(self, sampler: ISGD, steps: int) -> None:
        for _ in range(steps):
            sampler.step(noise=self.next())


def values(params: dict[str, Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params.values()]


# ------------------------------------------------------------------------------------------------ steps


@every_structure
@pytest.mark.parametrize("averaged", [False, True])
def test_a_step_is_the_displacement_of_its_shape(structure: str, averaged: bool) -> None:
    """Averaged innovations are the mean of this step's and the last one's; the first step has only its own."""
    drawn = torch.randn(4, 13, generator=torch.Generator().manual_seed(2))
    turn = iter(drawn)
    params = leaves()
    sampler, stream = make(structure, params, averaged=averaged), Stream(params)
    stream.warm(sampler)
    for i, xi in enumerate(drawn):
        stream.next()
        before = torch.cat([p.detach().reshape(-1) for p in params.values()])
        gradient = torch.cat([p.grad.reshape(-1) for p in params.values()])
        shaped = sampler.geometry
        with Planned(lambda out, generator: next(turn)):
            sampler.step()
        used = 0.5 * (xi + drawn[i - 1]) if averaged and i else xi
        expected = before - shaped.displace(shaped.tensors(), gradient[None], used[None])[0].float()
        torch.testing.assert_close(torch.cat([p.detach().reshape(-1) for p in params.values()]), expected)


def alone(structure: str, together: dict[str, Tensor], k: int) -> tuple[ISGD, dict[str, Tensor]]:
    """A sampler of one of many chains."""
    own = {name: p.detach()[k].clone().requires_grad_() for name, p in together.items()}
    return make(structure, own), own


@every_structure
def test_chains_together_are_chains_alone(structure: str) -> None:
    """On data sets of their own, noise, curvature and Lambda are: in the warm-up, a new window, and every step."""
    drawn = torch.randn(5, 3, 13, generator=torch.Generator().manual_seed(2))
    params = leaves(chains=3)
    together, stream = make(structure, params, chains=3, sets=3), Stream(params)
    ones = [alone(structure, params, k) for k in range(3)]
    loudness = torch.tensor([1.0, 5.0, 0.2])
    for window in range(2):
        for _ in range(64):
            noise = [d * loudness.view(-1, *[1] * (d.dim() - 1)) for d in stream.noise()]
            together.observe(noise)
            for k, (one, _) in enumerate(ones):
                one.observe([d[k] for d in noise])
        curvatures = (1 + window) * torch.tensor([[1.0, 3.0], [20.0, 2.0], [0.1, 0.2]])
        prior = [torch.full_like(p, 0.3) for p in params.values()]
        together.adapt(list(curvatures.unbind(-1)), prior=prior)
        for k, (one, _) in enumerate(ones):
            one.adapt(curvatures[k].tolist(), prior=[x[k] for x in prior])
            for group, own in zip(together.param_groups, one.param_groups, strict=True):
                assert float(group["rate"][k]) == pytest.approx(own["rate"])
                assert float(group["lam"][k]) == pytest.approx(own["lam"])
        together.forget_noise()
        for one, _ in ones:
            one.forget_noise()
    turn = [iter(drawn), *(iter(drawn[:, k]) for k in range(3))]
    sources = {id(sampler.generator): t for sampler, t in zip([together, *(o for o, _ in ones)], turn, strict=True)}
    for _ in drawn:
        stream.next()
        with Planned(lambda out, generator: next(sources[id(generator)])):
            together.step()
        for k, (one, own) in enumerate(ones):
            for p, q in zip(own.values(), params.values(), strict=True):
                p.grad = q.grad[k].clone()
            with Planned(lambda out, generator: next(sources[id(generator)])):
                one.step()
    for k, (_, own) in enumerate(ones):
        for p, q in zip(params.values(), own.values(), strict=True):
            torch.testing.assert_close(p.detach()[k], q.detach())


@every_structure
def test_curvatures_are_each_chains_own(structure: str) -> None:
    """Only the chains that meet more curvature than they can stand slow down; one number holds for all of them."""
    params = leaves(chains=3)
    sampler, stream = make(structure, params, chains=3), Stream(params)
    stream.warm(sampler)
    before = [group["rate"].clone() for group in sampler.param_groups]
    sampler.adapt([torch.tensor([1e-3, 5e3, 1e-3])] * 2, rise=1.0)
    for group, old in zip(sampler.param_groups, before, strict=True):
        assert torch.equal(group["rate"][[0, 2]], old[[0, 2]]) and float(group["rate"][1]) < 0.1 * float(old[1])
    found = [group["rate"][1].clone() for group in sampler.param_groups]
    sampler.adapt([5e3, 5e3], rise=1.0)
    for group, one, old in zip(sampler.param_groups, found, before, strict=True):
        assert torch.equal(group["rate"][1], one) and bool((group["rate"][[0, 2]] < 0.1 * old[[0, 2]]).all())


@every_structure
def test_rates_and_lambdas_of_groups_are_reported(structure: str) -> None:
    params = leaves()
    sampler, stream = make(structure, params, temperature=0.3), Stream(params)
    stream.warm(sampler)
    for group, rate in zip(sampler.param_groups, sampler.geometry.group_rates()[0].tolist(), strict=True):
        assert group["rate"] == rate > 0
        assert group["lam"] * rate == pytest.approx(0.3 / 100)
        assert sampler.clipped_share(group) == 0.0


@every_structure
def test_curvature_above_the_fisher_information_slows_the_chain(structure: str) -> None:
    """``rate * curvature`` of 3 in the worst direction: every rate falls at once, and by the rule."""
    params = leaves()
    sampler, stream = make(structure, params), Stream(params)
    stream.warm(sampler)
    before = [group["rate"] for group in sampler.param_groups]
    stretch = 3.0 / sampler.geometry.unit_rate
    sampler.adapt([3.0 / rate for rate in before], rise=1.0)
    ratio = [group["rate"] / old for group, old in zip(sampler.param_groups, before, strict=True)]
    assert ratio == pytest.approx([ratio[0]] * 2) and ratio[0] < 1
    torch.testing.assert_close(sampler.geometry.factor, sampler.rule().factor(stretch))
    own = sampler.rule()
    assert 3.0 * ratio[0] == pytest.approx(float(own.scale * stretch / own.factor(stretch)))


@every_structure
def test_the_optimizer_can_warm_up_a_shape_itself(structure: str) -> None:
    params = leaves()
    sampler, stream = make(structure, params, warmup=400), Stream(params)
    stream.advance(sampler, 399)
    assert sampler.geometry.known and sampler.phase == "warming up"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # so short a warm-up need not settle
        stream.advance(sampler, 1)
    before = values(params)
    stream.advance(sampler, 1)
    assert sampler.draws_ready and not any(map(torch.equal, before, values(params)))


@every_structure
def test_too_few_noise_vectors_are_said_so(structure: str) -> None:
    params = leaves()
    sampler, stream = make(structure, params), Stream(params)
    with pytest.raises((ValueError, RuntimeError), match="noise"):
        stream.warm(sampler, vectors=5)


def test_a_noise_tensor_may_be_written_over() -> None:
    """As a training loop does that keeps one buffer; of a model with a single tensor."""
    g = torch.Generator().manual_seed(0)
    samplers = [make("kronecker", {"w": torch.zeros(3, 2, requires_grad=True)}) for _ in range(2)]
    buffer = torch.empty(3, 2)
    for _ in range(64):
        drawn = torch.randn(3, 2, generator=g)
        samplers[0].observe([buffer.copy_(drawn)])
        samplers[1].observe([drawn])
    for sampler in samplers:
        sampler.adapt([1.0])
    torch.testing.assert_close(samplers[0].geometry.rates(), samplers[1].geometry.rates())


# ------------------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize(
    ("saved", "loading"),
    [
        ("layer", "full"),
        ("full", "layer"),
        ("full", "diagonal"),
    ],
)
def test_a_state_of_another_structure_is_refused(saved: str, loading: str) -> None:
    state = make(saved, leaves()).state_dict()
    with pytest.raises(ValueError, match="another structure"):
        make(loading, leaves()).load_state_dict(state)


# ------------------------------------------------------------------------------------------------ refusals


@every_structure
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": None}, "pass batch_size=n, not None"),
        ({"batch_size": 1}, "pass batch_size=n, not 1"),
        ({"lam": 0.7}, "lam = 0.7 is one number"),
        ({"noise": "gaussian"}, "noise='paired'"),
        ({"noise": AlphaStable()}, "noise='paired'"),
        ({"scheme": "a"}, "scheme='windowed', not .* and 'a'"),
    ],
)
def test_what_a_shape_cannot_do_is_refused(structure: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(structure, leaves(), **settings)


def test_an_unknown_structure_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'triangular' is unknown; choose .*'diagonal', 'full', 'kronecker'"):
        make("triangular", leaves())


def test_averaging_goes_with_shapes_alone() -> None:
    with pytest.raises(ValueError, match="averaged=True goes with"):
        make("layer", leaves(), averaged=True)
    assert not make("layer", leaves()).averaged and make(Full(), leaves()).averaged


@pytest.mark.parametrize("own", [{"temperature": 0.1}, {"num_data": 7}])
def test_groups_with_targets_of_their_own_are_refused(own: dict[str, Any]) -> None:
    groups = [{"params": [torch.zeros(2, requires_grad=True)]}, {"params": [torch.zeros(2, requires_grad=True)], **own}]
    with pytest.raises(ValueError, match=next(iter(own))):
        ISGD(groups, num_data=100, batch_size=8, structure="full")


def test_a_step_without_lambda_or_gradient_is_refused() -> None:
    params = leaves()
    sampler, stream = make("full", params), Stream(params)
    stream.next()
    sampler.driven = True  # by something that has not told it anything yet
    with pytest.raises(RuntimeError, match="Lambda is not known yet"):
        sampler.step()
    stream.warm(sampler)
    params["a.bias"].grad = None
    with pytest.raises(RuntimeError, match=r"has no gradient: structure .* needs those of all"):
        sampler.step()


@pytest.mark.parametrize("sets", [0, 2, 1.5])
def test_chains_must_share_out_among_data_sets(sets: Any) -> None:
    with pytest.raises(ValueError, match=f"sets = {sets} must divide the number of chains, 3"):
        make("full", leaves(3), chains=3, sets=sets)


def test_the_level_is_followed_only_where_every_step_measures_the_noise() -> None:
    """A user's own loop need not measure the noise at every step; with so few data `isosgd.sample` does."""
    attended, alone = make("full", leaves(), num_data=30), make("full", leaves(), num_data=30)
    attended.independent_batches = True
    for sampler in (attended, alone):
        Stream(leaves()).warm(sampler)
    assert isinstance(attended.geometry, Full) and attended.geometry.tracks_level
    assert isinstance(alone.geometry, Full) and not alone.geometry.tracks_level
    assert bool(attended.geometry.factor < alone.geometry.factor)
    other = make("full", leaves(), num_data=30)
    other.independent_batches = True
    other.load_state_dict(attended.state_dict())
    assert isinstance(other.geometry, Full) and other.geometry.tracks_level
