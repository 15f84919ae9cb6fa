"""Runs on the disk: they hold what was drawn, open whatever happened, and say what is wrong with them."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from isosgd import DataSets, Posterior, SamplingWarning, Target, likelihoods, load, priors, sample
from isosgd.noise import MovingAverage
from isosgd.store import DamagedError, StoreError, rectangle
from isosgd.store.files import pack, unpack, write_tensors
from isosgd.store.writer import Waiting

DATA = (3.0 + torch.randn(60, 2, generator=torch.Generator().manual_seed(0)),)
QUICK: dict[str, Any] = {
    "method": "sgld", "lr": 1e-3, "warmup": 0, "keep_every": 2, "draws": 6, "progress": False, "compile": False,
}  # fmt: skip


def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
    return -0.5 * ((batch[0] - params["mu"]) / params["sigma"]).square().sum(-1) - 2 * params["sigma"].log()


def make_target(function: Callable[..., Tensor] = log_likelihood) -> Target:
    prior = {"mu": priors.Normal(10.0), "sigma": priors.HalfNormal(2.0)}
    return Target(function, prior, positive=["sigma"], init={"mu": torch.full((2,), 3.0), "sigma": 1.0})


def same(a: Posterior, b: Posterior) -> bool:
    return list(a.draws) == list(b.draws) and all(torch.equal(a.draws[name], b.draws[name]) for name in a.draws)


# ------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.usefixtures("eager_store")
def test_a_store_holds_the_draws(tmp_path: Path, chains: int) -> None:
    wanted = sample(make_target(), DATA, chains=chains, **QUICK)
    found = sample(make_target(), DATA, chains=chains, store=tmp_path / "run", **QUICK)
    assert same(found, wanted) and same(load(tmp_path / "run"), wanted)
    assert len(list((tmp_path / "run").glob("draws-*"))) == 6
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 1  # a complete run can be extended
    for chain in range(chains):
        for index in (0, 3, -1):
            one = found.draws.draw(chain, index)
            assert all(torch.equal(one[name], wanted.draws[name][chain, index]) for name in wanted.draws)
    with pytest.raises(IndexError, match="draw 6 of 6"):
        found.draws.draw(0, 6)
    skipped = {"seconds", "store", "lengths"}
    assert {k: v for k, v in found.info.items() if k not in skipped} == {
        k: v for k, v in wanted.info.items() if k not in skipped
    }


def test_several_draws_go_into_a_shard(tmp_path: Path) -> None:
    posterior = sample(make_target(), DATA, store=tmp_path / "run", **QUICK)
    (shard,) = (tmp_path / "run").glob("draws-*")
    with safe_open(shard, "pt") as file:  # any reader of safetensors will do
        assert torch.equal(file.get_tensor("mu")[:, 0], posterior.draws["mu"][0])


def test_shards_are_written_when_enough_is_gathered(tmp_path: Path) -> None:
    """Of draws of 8 MB, so that they need not wait in memory for a second to pass."""

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        return -0.5 * (batch[0] - params["mu"].mean()).square().sum(-1)

    target = Target(log_likelihood, priors.Normal(10.0), init={"mu": torch.zeros(1 << 21)})
    posterior = sample(target, DATA, store=tmp_path / "run", **QUICK)
    shards = list((tmp_path / "run").glob("draws-*"))
    assert len(shards) >= 3 and all(shard.stat().st_size < 17e6 for shard in shards)
    assert same(posterior, sample(target, DATA, **QUICK))


def test_the_manifest_says_how_the_draws_came_about(tmp_path: Path) -> None:
    sample(make_target(), DATA, chains=2, seed=7, store=tmp_path / "run", **QUICK)
    found = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert found["format"] == 2 and found["complete"] is True
    assert found["info"]["method"] == "sgld" and found["info"]["seed"] == 7
    assert set(found["info"]["versions"]) == {"isosgd", "torch", "numpy", "python", "native"}
    assert found["info"]["target"]["parameters"] == {"mu": [2], "sigma": []}
    assert found["tensors"]["mu"] == {"shape": [2], "dtype": "float32", "stored": "float32"}
    (shard,) = found["shards"]
    assert shard["step"] == 12 and len(shard["sha256"]) == 64


def test_a_reduced_dtype_is_on_the_disk_alone(tmp_path: Path) -> None:
    wanted = sample(make_target(), DATA, **QUICK)
    found = sample(make_target(), DATA, store=tmp_path / "run", store_dtype="bfloat16", **QUICK)
    with safe_open(next((tmp_path / "run").glob("draws-*")), "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert found.draws["mu"].dtype == torch.float32 == found.draws.draw(0, 0)["mu"].dtype
    assert torch.equal(found.draws["mu"], wanted.draws["mu"].bfloat16().float())


class Half(nn.Module):
    """A frozen layer, a BatchNorm in training mode, and a sampled layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.front = nn.Linear(2, 4)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.head = nn.Linear(4, 1)
        for p in self.parameters():
            p.data.normal_(generator=generator)
        self.front.requires_grad_(False)
        self.register_buffer("constant", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.front(x)))


def half_target() -> Target:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BatchNorm in training mode is frowned upon
        return Target.from_module(Half(), "gaussian")


NORMED = (DATA[0], DATA[0].sum(1, keepdim=True))


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.filterwarnings("ignore:chains run in turn")
@pytest.mark.usefixtures("eager_store")
def test_buffers_go_with_each_draw_and_frozen_tensors_are_written_once(tmp_path: Path, chains: int) -> None:
    wanted = sample(half_target(), NORMED, chains=chains, **QUICK)
    sample(half_target(), NORMED, chains=chains, store=tmp_path / "run", **QUICK)
    found = load(tmp_path / "run", half_target())
    assert same(found, wanted)
    assert set(found.buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert all(torch.equal(found.buffers[name], wanted.buffers[name]) for name in wanted.buffers)
    assert not torch.equal(found.buffers["norm.running_mean"][0, 0], found.buffers["norm.running_mean"][0, 1])
    with safe_open(tmp_path / "run" / "frozen.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("front.weight"), Half().front.weight)
        assert torch.equal(file.get_tensor("norm.running_mean"), torch.zeros(4))
        assert torch.equal(file.get_tensor("constant"), torch.arange(3.0))
    assert found.predict(NORMED[0][:5]).mean.shape == (5, 1)


def test_a_target_with_other_frozen_tensors_is_refused(tmp_path: Path) -> None:
    sample(half_target(), NORMED, store=tmp_path / "run", **QUICK)
    model = Half()
    model.front.weight.data += 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = Target.from_module(model, "gaussian")
    with pytest.raises(ValueError, match=r"'front.weight' of the target's model is not as it was"):
        load(tmp_path / "run", other)
    with pytest.raises(ValueError, match=r"is not the one that .* was drawn from:(?s:.*)head.weight was there"):
        load(tmp_path / "run", make_target())


def test_a_target_with_another_likelihood_or_prior_is_refused(tmp_path: Path) -> None:
    """The parameters have the same names and shapes, so that nothing else would tell."""

    def linear(likelihood: Any = "gaussian", prior: Any = None, **settings: Any) -> Target:
        return Target.from_module(nn.Linear(2, 1), likelihood, prior, **settings)

    sample(linear(), NORMED, store=tmp_path, **QUICK)
    for other, lines in {
        linear("student_t"): ["likelihood.name was 'Gaussian' and is 'StudentT'", "likelihood.df was not there"],
        linear(likelihoods.Gaussian(priors.HalfNormal(1.0))): ["likelihood.scale.name was 'HalfCauchy'"],
        linear(prior=priors.Normal(0.1)): ["prior.name was 'FanInNormal' and is 'Normal'"],
        linear(num_data=90): ["num_data was 60 and is 90"],
    }.items():
        with pytest.raises(ValueError, match="is not the one that") as caught:
            load(tmp_path, other)
        assert all(any(told.strip().startswith(line) for told in str(caught.value).splitlines()) for line in lines)
        with pytest.raises(ValueError, match="cannot be resumed"):
            sample(other, NORMED, store=tmp_path, resume=True, **QUICK)
    assert load(tmp_path, linear(num_data=60)).target is not None  # it says what was found before


def test_a_store_may_be_read_without_its_target(tmp_path: Path) -> None:
    sample(make_target(), DATA, store=tmp_path / "run", **QUICK)
    posterior = load(str(tmp_path / "run"))
    assert "mu [2]" in repr(posterior) and posterior.info["store"] == str(tmp_path / "run")
    with pytest.raises(ValueError, match=r"isosgd.load\(path, target="):
        posterior.predict(torch.zeros(2))


def test_draws_that_come_all_at_once_are_stored_too(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    settings: dict[str, Any] = {"method": "swag", "draws": 3, "warmup": 60, "progress": False}
    wanted = sample(Target.from_module(model, "gaussian"), NORMED, **settings)
    target = Target.from_module(model, "gaussian")
    found = sample(target, NORMED, store=tmp_path / "run", **settings)
    assert same(found, wanted) and same(load(tmp_path / "run"), wanted) and found.info["complete"]
    assert same(sample(target, NORMED, store=tmp_path / "run", resume=True, **settings), wanted)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text("{}")
    sample(make_target(), DATA, store=tmp_path, **QUICK)
    assert (tmp_path / "table.json").read_text() == "{}"


# ------------------------------------------------------------------------------------------------ refusals


def test_a_run_is_not_written_over(tmp_path: Path) -> None:
    sample(make_target(), DATA, store=tmp_path, **QUICK)
    with pytest.raises(FileExistsError, match="already holds a run: pass resume=True"):
        sample(make_target(), DATA, store=tmp_path, **QUICK)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resume": True}, "go with store="),
        ({"store_dtype": "bfloat16"}, "go with store="),
        ({"store": 5}, "store = 5 must be the path"),
        ({"store": "x", "store_dtype": "float16"}, "store_dtype = 'float16' is unknown; choose 'float32'"),
    ],
)
def test_bad_settings_of_a_store(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        sample(make_target(), DATA, **QUICK, **settings)


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be made"):
        sample(make_target(), DATA, store=tmp_path / "file", **QUICK)
    with pytest.raises(StoreError, match="holds no run"):
        load(tmp_path)
    with pytest.raises(ValueError, match="damaged = 'mend' is unknown"):
        load(tmp_path, damaged="mend")


@pytest.mark.long  # the second run waits five seconds for the first to end
def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    refused = []

    def meanwhile(batch: Any, generator: torch.Generator) -> Any:
        if (tmp_path / "manifest.json").exists() and not refused:
            refused.append(True)
            with pytest.raises(StoreError, match="is being written by another process"):
                sample(make_target(), DATA, store=tmp_path, resume=True, **QUICK)
        return batch

    sample(make_target(), DATA, store=tmp_path, transform=meanwhile, **QUICK)
    assert refused and load(tmp_path, verify=True).num_draws == 6


# ------------------------------------------------------------------------------------------------ damage


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, written_at_once: Callable[[], Any]) -> Path:
    """A run of six shards."""
    folder = tmp_path_factory.mktemp("stored") / "run"
    with written_at_once():
        sample(make_target(), DATA, chains=2, store=folder, **QUICK)
    return folder


@pytest.fixture
def run(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "run"))


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("place", [3, 30, -1])
def test_a_flipped_byte_is_found_and_named_and_the_rest_is_usable(run: Path, stored: Path, place: int) -> None:
    wanted = load(stored)
    flip(run / "draws-000002.safetensors", place)
    lazy = load(run)
    assert torch.equal(lazy.draws.draw(1, 1)["mu"], wanted.draws["mu"][1, 1])
    for use in (lambda: lazy.draws.draw(0, 2), lambda: lazy.draws["mu"], lambda: load(run, verify=True)):
        with pytest.raises(DamagedError, match=r"draws-000002.safetensors is damaged: its SHA-256") as caught:
            use()
        assert caught.value.file == "draws-000002.safetensors"
    with pytest.warns(SamplingWarning, match=r"2 draws are left out: draws-000002.safetensors is damaged"):
        rest = load(run, damaged="drop")
    left = [0, 1, 3, 4, 5]
    assert torch.equal(rest.draws["mu"], wanted.draws["mu"][:, left])
    assert all(torch.equal(rest.draws.draw(1, i)["mu"], wanted.draws["mu"][1, j]) for i, j in enumerate(left))


@pytest.mark.parametrize("damage", ["gone", "short", "link", "pipe"])
def test_a_shard_that_is_no_longer_there(run: Path, damage: str) -> None:
    path = run / "draws-000002.safetensors"
    content = path.read_bytes()
    path.unlink()
    if damage == "short":
        path.write_bytes(content[:-1])
    elif damage == "link":
        (run / "elsewhere").write_bytes(content)
        path.symlink_to("elsewhere")
    elif damage == "pipe":
        os.mkfifo(path)
    with pytest.raises(DamagedError, match=r"draws-000002.safetensors is damaged"):
        load(run)
    with pytest.warns(SamplingWarning, match="left out"):
        assert load(run, damaged="drop").num_draws == 5


def test_a_changed_manifest_is_noticed(run: Path) -> None:
    text = (run / "manifest.json").read_text()
    (run / "manifest.json").write_text(text.replace('"temperature":1.0', '"temperature":2.0'))
    with pytest.raises(StoreError, match="its own SHA-256 is another"):
        load(run)
    (run / "manifest.json").write_text(text.replace('"format":2', '"format":99'))
    with pytest.raises(StoreError, match="format 99, this version of isosgd reads 2"):
        load(run)


def test_chains_of_different_lengths_show_most_draws() -> None:
    assert rectangle({}) == ([], 0)
    assert rectangle({0: 0}) == ([], 0)
    assert rectangle({0: 10, 1: 10, 2: 4}) == ([0, 1], 10)
    assert rectangle({0: 10, 1: 9, 2: 8}) == ([0, 1, 2], 8)


# ------------------------------------------------------------------------------------------------ states without pickle


def test_nested_states_come_back_as_they_were() -> None:
    state = {
        "numbers": [1, 2.5, True, None, "text", float("inf"), -float("inf")],
        "dict": {0: (1, [2]), "$odd": {}},
        "tensors": (torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 3), torch.arange(3) > 1),
        "array": torch.ones(2, 3).double().numpy(),
    }
    plain, tensors = pack(state)
    found = unpack(json.loads(json.dumps(plain)), tensors)
    assert found["numbers"] == state["numbers"] and found["dict"] == state["dict"]
    for a, b in zip(found["tensors"], state["tensors"], strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert (found["array"] == state["array"]).all() and found["array"].dtype == state["array"].dtype


def test_a_tensor_keeps_its_order_in_memory(tmp_path: Path) -> None:
    """A product with a transposed matrix may round otherwise than with a copy of it."""
    matrix = torch.arange(6.0).view(2, 3).mT
    plain, tensors = pack(matrix)
    write_tensors(tmp_path / "x", tensors)
    with safe_open(tmp_path / "x", "pt") as file:
        found = unpack(plain, {name: file.get_tensor(name) for name in tensors})
    assert torch.equal(found, matrix) and found.stride() == matrix.stride()


def test_what_is_no_tensor_number_or_text_is_refused() -> None:
    with pytest.raises(TypeError, match="type object cannot be written"):
        pack([object()])
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="does it hold itself"):
        pack(loop)


def test_settings_are_described_without_addresses(tmp_path: Path) -> None:
    """They would differ in every process, so that no run could be resumed."""

    class Own(MovingAverage):
        __repr__ = object.__repr__

    first, second = Own(0.5), Own(0.5)
    assert repr(first) != repr(second)
    sample(make_target(), DATA, store=tmp_path, noise=first, **QUICK)
    assert sample(make_target(), DATA, store=tmp_path, noise=second, resume=True, **QUICK).num_draws == 6


# ------------------------------------------------------------------------------------------------ a full disk


class Disk:
    """A disk that fails once it has been asked to keep so many files: this is where systems say that it is full."""

    def __init__(self, keeps: float = math.inf, error: int = errno.ENOSPC, seconds: float = 0.0) -> None:
        self.keeps, self.error, self.seconds, self.calls = keeps, error, seconds, 0
        self._sync = os.fsync

    def fsync(self, file: Any) -> None:
        self.calls += 1
        time.sleep(self.seconds)
        if self.calls == self.keeps:
            raise OSError(self.error, os.strerror(self.error))
        self._sync(file)


@pytest.mark.usefixtures("eager_store")
def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = sample(make_target(), DATA, **QUICK)
    disk = Disk()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk.fsync)
        sample(make_target(), DATA, store=tmp_path / "whole", **QUICK)
    seen = set()
    for part in range(8):
        folder, full = tmp_path / f"part-{part}", Disk(1 + part * disk.calls // 8)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full.fsync)
            with pytest.raises(OSError, match="the disk is full") as caught:
                sample(make_target(), DATA, store=folder, **QUICK)
        assert caught.value.errno == errno.ENOSPC and "resume=True" in str(caught.value)
        assert not list(folder.glob(".*"))  # no half-written file takes up the last room
        if (folder / "manifest.json").exists():
            found = load(folder, verify=True)
            seen.add(found.num_draws)
            assert torch.equal(found.draws["mu"], wanted.draws["mu"][:, : found.num_draws]) or not found.num_draws
        assert same(sample(make_target(), DATA, store=folder, resume=True, **QUICK), wanted)
    assert len(seen) > 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files, which Windows has not")
@pytest.mark.usefixtures("eager_store")
def test_a_file_that_the_system_cuts_short_is_taken_for_a_full_disk(tmp_path: Path) -> None:
    """The limit lets the manifest pass, not a checkpoint."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"checkpoint-000000.safetensors cannot be written: the disk is full"):
            sample(make_target(), DATA, store=tmp_path, **QUICK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.glob(".*"))
    assert sample(make_target(), DATA, store=tmp_path, resume=True, **QUICK).num_draws == 6


# ------------------------------------------------------------------------------------------------ while chains go on


@pytest.mark.usefixtures("eager_store")
@pytest.mark.long
def test_shards_are_written_while_the_chains_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk: the next draws are taken meanwhile, and their order is kept."""
    sync, writes, steps = Disk(seconds=0.05).fsync, list[tuple[float, float]](), list[float]()

    def slow(file: Any) -> None:
        began = time.monotonic()
        sync(file)
        writes.append((began, time.monotonic()))

    def observed(params: dict[str, Tensor], batch: Any) -> Tensor:
        steps.append(time.monotonic())
        return log_likelihood(params, batch)

    wanted = sample(make_target(), DATA, **QUICK)
    monkeypatch.setattr(os, "fsync", slow)
    posterior = sample(make_target(observed), DATA, store=tmp_path / "run", **QUICK)
    assert any(began < step < ended for began, ended in writes for step in steps)  # none, were writes waited for
    assert same(posterior, wanted)


def test_writes_are_spaced_by_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own: writes of a run come apart within half an hour."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    waiting = Waiting(1.0)
    assert not waiting.due()
    now[0] += 1.0
    assert waiting.due()
    waiting.sent()
    with waiting.timed():
        now[0] += 0.3  # so that it takes 3% of the time
    now[0] += 9.6
    assert not waiting.due()
    now[0] += 0.2
    assert waiting.due()
    with waiting.timed():
        pass
    now[0] += 1000.0
    waiting.sent()
    now[0] += 19.0
    assert not waiting.due()  # a long run writes less often
    now[0] += 3.0
    assert waiting.due()


MEASURED = """
import resource, sys, time, torch
torch.set_num_threads(1)
from isosgd import Target, load, sample
from isosgd.store.writer import Writer

draws, every, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
spent = 0.0

def timed(function):
    def call(*args, **options):
        global spent
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            spent += time.perf_counter() - began
    return call

for name in ("add", "mark", "finish"):
    setattr(Writer, name, timed(getattr(Writer, name)))
model = torch.nn.Sequential(torch.nn.Linear(1000, 998), torch.nn.Tanh(), torch.nn.Linear(998, 1))
assert 0.99e6 < sum(p.numel() for p in model.parameters()) < 1.01e6
x = torch.randn(200, 1000)
target = Target.from_module(model, "gaussian")
began = time.perf_counter()
posterior = sample(
    target, (x, x[:, :1]), method="sgld", lr=1e-6, warmup=0, batch_size=32, draws=draws, keep_every=every,
    progress=False, store=folder,
)
total = time.perf_counter() - began
assert len(posterior) == draws
load(folder, target).predict(x[:20])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, spent / total)
"""


def measure(folder: Path, draws: int, every: int) -> tuple[float, float]:
    """Peak memory in megabytes, and the share of the time that went into writing."""
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, str(draws), str(every), str(folder)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    shutil.rmtree(folder)
    return float(found[0]), float(found[1])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_does_not_grow_with_the_draws(tmp_path: Path) -> None:
    """A thousand draws of a million parameters, 4 GB in all, sampled and then predicted with."""
    if shutil.disk_usage(tmp_path).free < 6e9:
        pytest.skip("needs 6 GB of disk")
    few, _ = measure(tmp_path / "few", 10, 1)
    many, _ = measure(tmp_path / "many", 1000, 1)
    assert many - few < 300


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_writing_takes_little_of_the_time(tmp_path: Path) -> None:
    """Draws ten cheap steps apart, which is less than they usually are. The best of three: others use the disk too."""
    assert min(measure(tmp_path / str(i), 100, 10)[1] for i in range(3)) < 0.1


def test_data_sets_are_stored(tmp_path: Path) -> None:
    data = DataSets((torch.stack([DATA[0][:50], DATA[0][10:]]),))
    wanted = sample(make_target(), data, chains=2, **QUICK)
    assert same(sample(make_target(), data, chains=2, store=tmp_path / "run", **QUICK), wanted)
    assert load(tmp_path / "run").num_chains == 4
