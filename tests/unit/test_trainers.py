"""Lightning, Hugging Face's Trainer and PEFT, as they are, with small models made from a config."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from isosgd import Posterior, Target, load, sample

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning"),  # runs this short do not settle
    # Of the packages themselves, on a machine without a GPU and without workers:
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(num_workers|GPU|pin_memory|logging interval|val_dataloader|Spec).*"),
]
SHORT: dict[str, Any] = {
    "draws": 6, "keep_every": 5, "warmup": 100, "structure": "layer", "temperature": 0.1, "progress": False,
}  # fmt: skip


@pytest.fixture
def table() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    x = torch.randn(200, 3, generator=generator)
    return x, (x[:, 0] + torch.randn(200, generator=generator) > 0).long()


def loader_of(data: tuple[Tensor, Tensor], **settings: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data), batch_size=20, **settings)


# -- Lightning --------------------------------------------------------------------------------------------------------


def lightning_module() -> Any:
    import lightning.pytorch as pl

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.net(x)
            return found

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Classifier()


def fit(module: Any, callback: Any, folder: Path, *loaders: Any) -> Any:
    import lightning.pytorch as pl

    trainer = pl.Trainer(
        max_epochs=2, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, *loaders)
    return trainer


def test_a_lightning_fit_ends_in_the_draws_of_sample_and_predicts_by_their_average(tmp_path, table):
    from isosgd.lightning import Sampling

    module, loader = lightning_module(), loader_of(table)
    callback = Sampling("categorical", store=tmp_path / "run", seed=3, **SHORT)
    trainer = fit(module, callback, tmp_path, loader)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    assert callback.posterior is not None and callback.posterior.num_draws == 6
    target = Target.from_module(module.eval(), "categorical", "empirical")
    same = sample(target, loader, starts=[module], seed=3, **SHORT)  # the loader has a fixed order: the same batches
    assert all(torch.equal(callback.posterior.draws[name], same.draws[name]) for name in same.draws)
    stored = load(tmp_path / "run", target)
    predicted = torch.cat(trainer.predict(module, loader))
    torch.testing.assert_close(predicted, stored.predict(table[0]).mean)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert "predict_step" not in vars(module)


def test_validation_data_choose_the_temperature_and_a_function_makes_the_target(tmp_path, table):
    from isosgd.lightning import Sampling

    module = lightning_module()
    settings = {**SHORT, "temperature": "auto", "ladder": [0.1], "max_seconds": 1.0}
    callback = Sampling(lambda m: Target.from_module(m.net, "categorical", sampled="last_layer"), **settings)
    fit(module, callback, tmp_path, loader_of(table, shuffle=True), loader_of(table))
    assert callback.posterior is not None
    assert list(callback.posterior.draws) == ["3.weight", "3.bias"]
    assert callback.posterior.info["temperature_choice"]["held_out"] == 200


def test_a_target_that_cannot_be_made_is_found_before_the_training(tmp_path, table):
    from isosgd.lightning import Sampling

    module = lightning_module()
    before = module.net[0].weight.detach().clone()
    with pytest.raises(ValueError, match="'categorial' is not known"):
        fit(module, Sampling("categorial"), tmp_path, loader_of(table))
    assert torch.equal(module.net[0].weight, before)


BY_VALIDATION = {name: value for name, value in SHORT.items() if name != "temperature"}


@pytest.mark.parametrize(
    ("settings", "loaders", "error", "words"),
    [
        ({"drawz": 2}, lambda one: [one], TypeError, "no option 'drawz'"),
        ({"warmup": 100}, lambda one: [one], ValueError, "warmup = 100 is too short for structure 'lowrank'"),
        ({"draws": 0}, lambda one: [one], ValueError, "draws = 0 must be an integer"),
        ({**SHORT, "store": "taken"}, lambda one: [one], FileExistsError, "already holds a run"),
        (BY_VALIDATION, lambda one: [one, [one, one]], ValueError, "there are 2 loaders of validation data, in a list"),
        ({**BY_VALIDATION, "warmup": 50}, lambda one: [one, one], ValueError, "warmup = 50 is too short to measure"),
        (
            {**BY_VALIDATION, "structure": "full"}, lambda one: [one, one], ValueError, "too short for structure 'full'"
        ),
        (SHORT, lambda one: [{"a": one, "b": one}], ValueError, "there are 2 loaders of training data, in a dict"),
    ],
)  # fmt: skip
def test_settings_that_sample_refuses_are_refused_before_the_training(
    tmp_path, table, monkeypatch, settings, loaders, error, words
):
    from isosgd.lightning import Sampling

    monkeypatch.chdir(tmp_path)
    if "store" in settings:
        network = nn.Linear(3, 2)
        sample(Target.from_module(network, "categorical"), table, starts=[network], batch_size=20, **settings)
    module = lightning_module()
    before = module.net[0].weight.detach().clone()
    with pytest.raises(error, match=words):
        fit(module, Sampling("categorical", **settings), tmp_path, *loaders(loader_of(table)))
    assert torch.equal(module.net[0].weight, before)


def test_what_is_checked_before_the_training_does_not_change_it(tmp_path, table):
    from lightning.pytorch import Callback

    from isosgd.lightning import Sampling

    found = []
    for callback in (Sampling("categorical", **{**SHORT, "draws": 1}), Callback()):
        torch.manual_seed(0)
        module, own = lightning_module(), torch.Generator().manual_seed(1)
        fit(module, callback, tmp_path, loader_of(table, shuffle=True, generator=own), loader_of(table, shuffle=True))
        found.append(module.net[0].weight.detach())
    assert torch.equal(*found)


class Stream(IterableDataset):
    """Examples without a known number, and without an end."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from zip(*self.data, strict=True)


def test_validation_data_may_be_a_stream(tmp_path, table):
    import lightning.pytorch as pl

    from isosgd.lightning import Sampling

    callback = Sampling("categorical", ladder=[0.1], **BY_VALIDATION)
    trainer = pl.Trainer(
        max_epochs=1, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, limit_val_batches=3,
    )  # fmt: skip
    trainer.fit(lightning_module(), loader_of(table), DataLoader(Stream(table), batch_size=20))
    assert callback.posterior is not None
    assert callback.posterior.info["temperature_choice"]["held_out"] == 60


def test_what_a_trainer_knows_is_not_given_to_it_again():
    from isosgd.lightning import Sampling

    with pytest.raises(TypeError, match="starts= is the trainer's"):
        Sampling("categorical", starts=[])
    with pytest.raises(TypeError, match="a function from the module to a Target"):
        Sampling(3)  # type: ignore[arg-type]


def test_the_page_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    known: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(compile(block, "trainers.md", "exec"), known)
    assert known["posterior"].num_draws == 10


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def language_model() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def texts(n: int = 40) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(n):
        length = 4 + i % 5
        ids = torch.randint(3, 23, (length,), generator=generator)
        padding = torch.zeros(8 - length, dtype=torch.long)
        mask = torch.cat([torch.ones(length, dtype=torch.long), padding])
        found.append(
            {
                "input_ids": torch.cat([ids, padding]),
                "attention_mask": mask,
                "labels": torch.cat([ids, padding - 100]),
            }
        )
    return found


def as_batch(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def arguments(folder: Path, **more: Any) -> Any:
    import transformers

    return transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], per_device_train_batch_size=10, num_train_epochs=1,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0, **more,
    )  # fmt: skip


def test_the_likelihood_of_tokens_is_the_loss_of_a_language_model():
    model, batch = language_model().eval(), as_batch(texts())
    target = Target.from_module(model, "tokens")
    with torch.no_grad():
        loss = model(**batch).loss
        found = -target.log_likelihood(target.initial(), batch).sum() / (batch["labels"][:, 1:] != -100).sum()
    assert float(found) == pytest.approx(float(loss), rel=1e-5)


def test_a_trainer_ends_in_draws_and_evaluates_by_their_average(tmp_path):
    from isosgd.transformers import Sampling, SamplingTrainer

    model, rows = language_model(), texts()
    trainer = SamplingTrainer(
        model, args=arguments(tmp_path), train_dataset=rows, eval_dataset=rows,
        sampling=Sampling("tokens", store=tmp_path / "run", **SHORT),
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    posterior = trainer.sampling.posterior
    assert posterior is not None and posterior.num_draws == 6
    batch = as_batch(rows)
    mean, y = posterior.predict(batch).mean.movedim(1, -1)[:, :-1], batch["labels"][:, 1:]
    by_hand = F.nll_loss(mean[y != -100].log(), y[y != -100])
    # The Trainer averages batches by examples, not by tokens: close, not the same.
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(by_hand), rel=0.02)
    assert before > 0
    predictions = trainer.predict(rows).predictions
    torch.testing.assert_close(torch.tensor(predictions).exp(), posterior.predict(batch).mean.movedim(1, -1))
    assert load(tmp_path / "run").num_draws == 6


def test_a_second_training_is_not_judged_by_the_draws_of_the_first(tmp_path, monkeypatch):
    from isosgd.transformers import Sampling, SamplingTrainer

    rows = texts()
    trainer = SamplingTrainer(
        language_model(), args=arguments(tmp_path, eval_strategy="epoch"), train_dataset=rows, eval_dataset=rows,
        sampling=Sampling("tokens", **SHORT),
    )  # fmt: skip
    trainer.train()
    first, calls = trainer.sampling.posterior, []
    predict = Posterior.predict
    monkeypatch.setattr(Posterior, "predict", lambda *args, **more: calls.append(1) or predict(*args, **more))
    trainer.train()
    assert not calls  # what is evaluated within a training is the network itself
    assert trainer.sampling.posterior is not None and trainer.sampling.posterior is not first
    trainer.evaluate()
    assert calls


def test_a_trainer_refuses_settings_before_the_training(tmp_path):
    from isosgd.transformers import Sampling, SamplingTrainer

    model, rows = language_model(), texts()
    before = model.lm_head.weight.detach().clone()
    sampling = Sampling("tokens", drawz=2)
    with pytest.raises(TypeError, match="no option 'drawz'"):
        SamplingTrainer(
            model, args=arguments(tmp_path), train_dataset=rows, eval_dataset=rows, sampling=sampling
        ).train()
    assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize("how", [{"fsdp": ["full_shard"]}, {"deepspeed": "config.json"}, {}])
def test_a_trainer_with_a_sharded_model_is_refused(monkeypatch, how):
    from isosgd.transformers import Sampling

    if not how:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    args = SimpleNamespace(**{"world_size": 2, "fsdp": [], "deepspeed": None, **how})
    with pytest.raises(RuntimeError, match="in 2 processes by FSDP or DeepSpeed: only replicas"):
        Sampling("tokens", parallel="data").on_train_begin(args, None, None)


def test_a_lightning_strategy_that_shards_the_model_is_refused():
    from lightning.pytorch.strategies import FSDPStrategy

    from isosgd.lightning import Sampling

    trainer: Any = SimpleNamespace(world_size=2, strategy=FSDPStrategy())
    with pytest.raises(RuntimeError, match="in 2 processes by FSDPStrategy: only replicas"):
        Sampling("categorical", parallel="data").on_train_start(trainer, lightning_module())


def test_adapters_of_a_peft_model_alone_are_sampled_and_the_draws_are_those_of_sample(tmp_path):
    import peft
    import transformers

    from isosgd.transformers import Sampling

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model, rows = peft.get_peft_model(language_model(), config), texts()
    callback = Sampling("tokens", seed=2, **SHORT)
    trainer = transformers.Trainer(
        model, args=arguments(tmp_path, train_sampling_strategy="sequential"), train_dataset=rows, callbacks=[callback]
    )
    trainer.train()
    assert callback.posterior is not None
    names = list(callback.posterior.draws)
    assert len(names) == 8 and all("lora_" in name for name in names)
    target = Target.from_module(model.eval(), "tokens", "empirical", sampled="*lora_*")
    loader = DataLoader(rows, batch_size=10)  # type: ignore[arg-type]
    same = sample(target, loader, starts=[model], seed=2, **SHORT)
    assert all(torch.equal(callback.posterior.draws[name], same.draws[name]) for name in names)
    _compares(same, model, as_batch(rows))


def _compares(posterior: Posterior, model: Any, batch: dict[str, Tensor]) -> None:
    """The start's NLL is the model's loss."""
    compared = posterior.against_start(batch)
    count = int((batch["labels"][:, 1:] != -100).sum())
    with torch.no_grad():
        loss = float(model(**batch).loss)
    assert compared.start.nll * len(batch["labels"]) / count == pytest.approx(loss, rel=1e-4)


def test_classes_of_padded_texts_with_a_sampled_head(tmp_path):
    import transformers

    from isosgd.transformers import Sampling, SamplingTrainer

    config = transformers.BertConfig(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )
    torch.manual_seed(0)
    settings = {**SHORT, "temperature": "auto", "ladder": [0.1], "max_seconds": 2.0}
    rows = [{**row, "labels": row["input_ids"][0] % 3} for row in texts()]
    trainer = SamplingTrainer(
        transformers.BertForSequenceClassification(config), args=arguments(tmp_path), train_dataset=rows,
        eval_dataset=rows, compute_metrics=lambda found: {"right": float((found[0].argmax(-1) == found[1]).mean())},
        sampling=Sampling(lambda m: Target.from_module(m, "categorical", sampled="last_layer"), **settings),
    )  # fmt: skip
    trainer.train()
    found, posterior = trainer.evaluate(), trainer.sampling.posterior
    assert posterior is not None and posterior.info["temperature_choice"]["held_out"] == 40
    assert posterior is not None and list(posterior.draws) == ["classifier.weight", "classifier.bias"]
    batch = as_batch(rows)
    mean = posterior.predict(batch).mean
    assert found["eval_loss"] == pytest.approx(float(F.nll_loss(mean.log(), batch["labels"])), rel=1e-4)
    assert found["eval_right"] == pytest.approx(float((mean.argmax(1) == batch["labels"]).float().mean()))
    again = sample(posterior.target, batch, batch_size=10, **SHORT)
    assert again.info["engine"].endswith("features of the head computed once")
