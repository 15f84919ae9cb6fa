"""Batches as tokenizers and collators make them: dicts, padded sequences with masks, outputs with logits."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isosgd import Target, likelihoods, load, sample
from isosgd.data.sources import joined

VOCABULARY, WIDTH, LENGTH = 11, 8, 6


class Output(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Reader(nn.Module):
    """A mean over the tokens that are not masked, and logits of classes."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.embed, self.score = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Output:
        mask = attention_mask.unsqueeze(-1).float()
        hidden = (self.embed(input_ids) * mask).sum(1) / mask.sum(1)
        return Output(self.score(hidden), hidden)


class Writer(nn.Module):
    """Logits of the next token, with tied embeddings and a buffer that state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(LENGTH), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = self.embed(input_ids)
        return self.head(hidden), hidden


def sequences(n: int = 60, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (n, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (n,), generator=generator)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": (ids[:, 0] % 3)}


def texts(n: int = 60) -> dict[str, Tensor]:
    data = sequences(n)
    return {**data, "labels": data["input_ids"].masked_fill(data["attention_mask"] == 0, -100)}


SHORT = {"draws": 8, "keep_every": 3, "warmup": 100, "structure": "layer", "progress": False, "compile": False}
pytestmark = pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")  # runs this short do not settle


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


def test_a_dict_of_tensors_gives_the_same_draws_as_a_tuple():
    model, data = Reader(), sequences()
    target = Target.from_module(model, "categorical")
    by_name = sample(target, data, batch_size=20, **SHORT)
    by_place = sample(target, tuple(data.values()), batch_size=20, **SHORT)
    assert all(torch.equal(by_name.draws[name], by_place.draws[name]) for name in by_place.draws)


def test_chains_of_dicts_run_together_and_converge_by_themselves():
    target = Target.from_module(Reader(), "categorical")
    settings = {**SHORT, "draws": "auto", "budget": 20, "chains": 2, "batch_size": 20}
    with pytest.warns(UserWarning, match="not converged"):
        posterior = sample(target, sequences(), **settings)
    assert posterior.info["engine"].startswith("together")
    assert posterior.summary(sequences(20, 1)).rows


def test_predictions_of_a_dict_with_or_without_labels_are_those_of_the_model():
    model, data = Reader(), sequences()
    target = Target.from_module(model, "categorical")
    posterior = sample(target, data, batch_size=20, **SHORT)
    inputs = {name: x for name, x in data.items() if name != "labels"}
    found = posterior.predict(data)
    assert torch.equal(found.mean, posterior.predict(inputs).mean)
    mine = []
    for draw in posterior:
        model.load_state_dict(draw)
        mine.append(model(**inputs).logits.softmax(1))
    torch.testing.assert_close(found.mean, torch.stack(mine).mean(0).detach())
    by_hand = posterior.predict(inputs, function=lambda m, p, x: m(**x).logits.softmax(1))
    torch.testing.assert_close(by_hand.mean, found.mean)


def test_a_loader_of_dicts_and_starts_and_the_comparison_and_the_store(tmp_path):
    model, data, new = Reader(), sequences(), sequences(30, 1)
    rows = [{name: x[i] for name, x in data.items()} for i in range(len(data["labels"]))]
    loader = torch.utils.data.DataLoader(rows, batch_size=20, shuffle=True, generator=torch.Generator().manual_seed(0))
    target = Target.from_module(model, "categorical")
    posterior = sample(target, loader, starts=[model], temperature=0.1, store=tmp_path / "run", **SHORT)
    compared = posterior.against_start(new)
    inputs = {name: x for name, x in new.items() if name != "labels"}
    assert compared == posterior.against_start(inputs, new["labels"])
    with torch.no_grad():
        nll = F.cross_entropy(model(**inputs).logits, new["labels"])
    assert compared.start.nll == pytest.approx(float(nll), rel=1e-5)
    again = load(tmp_path / "run", target)
    assert torch.equal(again.predict(new).mean, posterior.predict(new).mean)


def test_a_ladder_of_temperatures_on_held_out_dicts():
    model, data = Reader(), sequences(200)
    target = Target.from_module(model, "categorical")
    settings = {**SHORT, "batch_size": 20, "ladder": [0.1], "max_seconds": 0.2}
    for held_out in (sequences(40, 1), 0.2, [sequences(20, 1), sequences(20, 2)]):
        posterior = sample(target, data, starts=[model], held_out=held_out, **settings)
        assert posterior.info["temperature_choice"]["held_out"] == 40


def test_held_out_texts_of_different_lengths_are_padded():
    model, short = Writer(), {name: x[:, :4] for name, x in texts(20).items()}
    target = Target.from_module(model, "tokens")
    posterior = sample(target, texts(), starts=[model], temperature=0.1, batch_size=20, **SHORT)
    apart = torch.cat([posterior.log_predictive(part) for part in (short, texts())])
    whole = joined([short, texts()], target, "held_out")
    torch.testing.assert_close(posterior.log_predictive(whole), apart)


def test_a_stored_run_of_a_dict_is_not_resumed_with_other_values(tmp_path):
    target, data = Target.from_module(Reader(), "categorical"), sequences()
    sample(target, data, batch_size=20, store=tmp_path / "run", **SHORT)
    sample(target, data, batch_size=20, store=tmp_path / "run", resume=True, **SHORT)
    other = {**data, "attention_mask": torch.ones_like(data["attention_mask"])}
    with pytest.raises(ValueError, match="attention_mask"):
        sample(target, other, batch_size=20, store=tmp_path / "run", resume=True, **SHORT)


def test_tokens_are_shifted_and_ignored_as_in_training_of_language_models():
    model, data = Writer(), texts()
    target = Target.from_module(model, "tokens")
    found = target.log_likelihood(target.initial(), data).detach()
    with torch.no_grad():
        logits, y = model(data["input_ids"])[0][:, :-1], data["labels"][:, 1:]
        mean = F.cross_entropy(logits.flatten(0, 1), y.flatten())  # as Hugging Face's loss
    assert float(-found.sum()) == pytest.approx(float(mean) * int((y != -100).sum()), rel=1e-5)
    assert target.describe()["likelihood"] == {"name": "Tokens", "shift": True, "per": "token", "ignore": -100}
    each = Target.from_module(model, likelihoods.Tokens(per="example"))
    torch.testing.assert_close(each.log_likelihood(each.initial(), data).detach(), found / (y != -100).sum(1))


def test_masked_tokens_do_not_count_whatever_their_label():
    model, data = Writer(), texts()
    target = Target.from_module(model, "tokens")
    unmasked = {**data, "labels": data["input_ids"]}
    torch.testing.assert_close(
        target.log_likelihood(target.initial(), unmasked), target.log_likelihood(target.initial(), data)
    )


def test_tied_language_models_are_sampled_around_a_start_and_scored_by_token():
    model, data = Writer(), texts()
    target = Target.from_module(model, "tokens")
    posterior = sample(target, data, starts=[model], temperature=0.1, batch_size=20, **SHORT)
    assert list(posterior.draws) == ["embed.weight"]
    assert posterior.predict(data).mean.shape == (60, VOCABULARY, LENGTH)
    compared = posterior.against_start(data)
    with torch.no_grad():
        logits, y = model(data["input_ids"])[0][:, :-1], data["labels"][:, 1:]
        right = (logits.argmax(-1) == y)[y != -100].float().mean()
    assert compared.start.accuracy == pytest.approx(float(right))
    state = model.state_dict()
    state["head.weight"] = state["head.weight"] + 1
    with pytest.raises(ValueError, match="one parameter of the model"):
        sample(target, data, starts=[state], temperature=0.1, batch_size=20, **SHORT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, r"no 'labels', only \['input_ids', 'attention_mask'\]"),
        ({"attention_mask": torch.zeros(60, LENGTH).long()}, "attention_mask of 60 of 60 examples is all zeros"),
        ({"index": torch.arange(60)}, "'index', which Reader.forward"),
        ({"labels": torch.full((60,), 7)}, "label 7"),
        ({"text": ["a"] * 60}, "'text' of type list"),
    ],
)
def test_bad_dicts_are_refused(change, message):
    data = {name: x for name, x in {**sequences(), **change}.items() if x is not None}
    with pytest.raises((ValueError, TypeError), match=message):
        sample(Target.from_module(Reader(), "categorical"), data, batch_size=20, **SHORT)


def test_rows_behind_the_first_batch_are_looked_at_too():
    data = sequences()
    with pytest.raises(ValueError, match=r"no 'labels', only \['input_ids'\]"):
        sample(Target.from_module(Reader(), "categorical"), {"input_ids": data["input_ids"]}, **SHORT)
    data["labels"][59] = 7
    with pytest.raises(ValueError, match="label 7"):
        sample(Target.from_module(Reader(), "categorical"), data, batch_size=10, **SHORT)
    data = texts()
    data["attention_mask"][58] = 0
    with pytest.raises(ValueError, match="attention_mask of 1 of 60 examples is all zeros, of example 58"):
        sample(Target.from_module(Writer(), "tokens"), data, batch_size=10, **SHORT)


def test_sequences_without_a_token_to_predict_are_refused():
    data = texts()
    data["labels"][7] = -100
    with pytest.raises(ValueError, match=r"1 of 60 examples have no token .* example 7"):
        sample(Target.from_module(Writer(), "tokens", num_data=60), [data], **SHORT)
    with pytest.raises(ValueError, match="'answers'"):
        sample(Target.from_module(Writer(), "tokens", labels="answers"), texts(), batch_size=20, **SHORT)


def test_labels_of_any_name():
    data = sequences()
    data["answer"] = data.pop("labels")
    target = Target.from_module(Reader(), "categorical", labels="answer")
    posterior = sample(target, data, batch_size=20, **SHORT)
    assert posterior.predict(data).mean.shape == (60, 3)
    assert posterior.trust(data, examples=4) is not None


def test_outcomes_of_dicts_are_simulated_and_go_to_arviz():
    pytest.importorskip("arviz_base")
    target = Target.from_module(Reader(), "categorical")
    posterior = sample(target, sequences(), batch_size=20, **SHORT)
    tree = posterior.to_arviz(sequences(20, 1))
    assert tree["posterior_predictive"]["y"].shape == (1, 8, 20)
    words = Target.from_module(Writer(), "tokens")
    drawn = sample(words, texts(), batch_size=20, **SHORT).simulate(texts())
    assert drawn.shape == (1, 8, 60, LENGTH)
    assert bool((drawn[..., 0] == -100).all()) and bool((drawn[..., 1:] >= 0).all())
