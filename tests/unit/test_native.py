"""Operations of our own in C++: the same as in torch, built once, and done without where they cannot be built."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.models import mlp
from isosgd import Target, likelihoods, load, priors
from isosgd.engine.compiled import Compiled
from isosgd.engine.gradients import Layout, Many
from isosgd.native import build, lowrank, perceptron

pytestmark = pytest.mark.long  # it is built first
needs_compiler = pytest.mark.usefixtures("built")


SLOW = [pytest.param(name, out, marks=pytest.mark.slow) for name, out in (("heteroscedastic", 2), ("student_t", 1))]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def built() -> None:
    if said := build.unsupported_reason():
        pytest.skip(f"no operations here: {said}")


def in_process(code: str, **environment: Any) -> str:
    """What another process prints, in which nothing has been built or loaded yet."""
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {name: str(value) for name, value in environment.items()},
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout + found.stderr


# ------------------------------------------------------------------------------------------------ perceptron


def plain(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, slope: Tensor, on: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Outputs, hidden units and gradients by torch, in float64; ``on``: which units are, where rounding may decide."""
    x, w1, b1, w2, b2, slope = (t.double() for t in (x, w1, b1, w2, b2, slope))
    hidden = torch.relu(x @ w1.mT + b1.unsqueeze(-2))
    back = (slope @ w2) * (hidden > 0 if on is None else on)
    return hidden @ w2.mT + b2.unsqueeze(-2), hidden, back.mT @ x, back.sum(-2), slope.mT @ hidden, slope.sum(-2)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


UNITS = [16, 17, 50, 64, 75, 200]  # a vector, one and a bit, ..., many tiles
INPUTS = [(1, 1), (7, 3), (128, 13), (257, 5), (600, 21)]  # rows come in blocks of 256
NETWORKS = [(*INPUTS[(i + out + 3) % 5], units, out) for i, units in enumerate(UNITS) for out in (1, 2, 3)]


@needs_compiler
@pytest.mark.parametrize(("rows", "features", "units", "out"), NETWORKS)
def test_a_network_is_that_of_torch(rows: int, features: int, units: int, out: int) -> None:
    sizes = (rows, features), (units, features), (units,), (out, units), (out,), (rows, out)
    x, w1, b1, w2, b2, slope = (drawn(i, 2, *size) for i, size in enumerate(sizes))
    found, units_found = perceptron.forward(x, w1, b1, w2, b2)
    outputs, hidden, *gradients = plain(x, w1, b1, w2, b2, slope, units_found > 0)
    close(found, outputs)
    close(units_found, hidden)
    for mine, theirs in zip(perceptron.backward(x, w2, units_found, slope), gradients, strict=True):
        scale = theirs.abs().amax().clamp_min(1.0)
        close(mine / scale, theirs / scale)


@needs_compiler
def test_leading_dimensions_and_gaps() -> None:
    """Weights as parts of flat vectors, inputs that all networks share, two dimensions of networks, transposes."""
    flat = drawn(0, 3, 2, 50 * 4 + 50 + 50 + 1)
    w1, b1, w2, b2 = (part for part in torch.split(flat, [200, 50, 50, 1], -1))
    w1, w2 = w1.unflatten(-1, (50, 4)), w2.unflatten(-1, (1, 50))
    x, slope = drawn(1, 20, 4).expand(3, 2, 20, 4), drawn(2, 3, 2, 1, 20).mT
    outputs, _, *gradients = plain(x, w1, b1, w2, b2, slope)
    found, units = perceptron.forward(x, w1, b1, w2, b2)
    close(found, outputs)
    for mine, theirs in zip(perceptron.backward(x, w2, units, slope), gradients, strict=True):
        close(mine, theirs)


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", range(4))
def test_what_is_not_finite_shows(which: int, bad: float) -> None:
    weights = [drawn(1, 1, 50, 3), drawn(2, 1, 50), drawn(3, 1, 1, 50), drawn(4, 1, 1)]
    weights[which].view(-1)[-1] = bad
    x = drawn(0, 1, 9, 3)
    outputs, _ = perceptron.forward(x, *weights)
    expected = plain(x, *weights, drawn(5, 1, 9, 1))[0]
    assert torch.equal(outputs.isfinite(), expected.isfinite()) and not bool(outputs.isfinite().all())


def target(model: nn.Module, likelihood: Any = "gaussian", **options: Any) -> Target:
    return Target.from_module(model, likelihood, priors.FanInNormal(), **options)


class Twice(nn.Identity):
    """Looks like nothing, and is something."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_which_modules_are_meant() -> None:
    names = target(mlp(3, 50, 1)).perceptron()
    assert names is not None and names.first_weight == "0.weight" and names.second_bias.endswith(".bias")
    assert target(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)), "heteroscedastic").perceptron()
    hooked = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    hooked[1].register_forward_hook(lambda module, given, output: output + 1)
    idle = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Identity(), nn.Linear(16, 1))
    idle[2].register_forward_hook(lambda module, given, output: output + 1)
    patched, act, square = mlp(3, 50, 1), nn.ReLU(), nn.Linear(50, 50)
    patched[0].forward = lambda x: torch.zeros(len(x), 50)
    for other in (
        idle,
        patched,
        nn.Sequential(nn.Linear(3, 50), act, nn.Linear(50, 1), act),  # a layer that stands twice
        nn.Sequential(nn.Linear(3, 50), nn.ReLU(), square, square),
        nn.Sequential(nn.Linear(3, 50), nn.ReLU(), Twice(), nn.Linear(50, 1)),
        mlp(3, 50, 1, "tanh"),
        mlp(3, [50, 50], 1),
        mlp(3, 8, 1),  # fewer units than a vector may have
        nn.Sequential(nn.Linear(3, 50, bias=False), nn.ReLU(), nn.Linear(50, 1)),
        nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 1), nn.ReLU()),
        hooked,
        type("Own", (nn.Sequential,), {})(*mlp(3, 50, 1)),  # whose forward may be anything
    ):
        assert target(other).perceptron() is None
    assert target(mlp(3, 50, 1), sampled="last_layer").perceptron() is None


class Pulled(likelihoods.Gaussian):
    """A likelihood that looks at the weights of the network, too."""

    def log_prob(self, output: Tensor, y: Tensor, params: Any) -> Tensor:
        return super().log_prob(output, y, params) - params["0.weight"].square().sum()


@needs_compiler
@pytest.mark.parametrize(
    ("likelihood", "out"),
    [("gaussian", 1), *SLOW, ("categorical", 3), (Pulled(0.5), 1)],
)
def test_gradients_of_chains_in_compiled_code(likelihood: Any, out: int) -> None:
    """Those of torch, and by our operations: halves of a minibatch, and scales of the likelihood, too."""
    posterior = target(mlp(13, 50, out), likelihood)
    layout = Layout(posterior.initial())
    many, chains, rows = Many(posterior, 455, layout), 4, 100
    theta = 0.3 * drawn(0, chains, sum(layout.sizes))
    y = torch.randint(3, (chains, rows)) if likelihood == "categorical" else drawn(1, chains, rows, 1)
    batch = drawn(2, chains, rows, 13), y
    posterior.check({name: x[0] for name, x in layout.views(theta).items()}, (batch[0][0], batch[1][0]))
    wanted = many.flat(theta, batch, True)
    compiled = Compiled(lambda theta: many.flat(theta, batch, True), 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = compiled(theta)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not compiled.unsupported_reason
    assert {event.name for event in profile.events()} >= {"isosgd::perceptron", "isosgd::perceptron_backward"}


@needs_compiler
def test_tensors_that_do_not_go_together_are_refused() -> None:
    w1, b1, w2, b2 = drawn(1, 3, 50, 4), drawn(2, 3, 50), drawn(3, 3, 1, 50), drawn(4, 3, 1)
    for given in (
        (drawn(0, 2, 9, 4), w1, b1, w2, b2),  # other networks
        (drawn(0, 3, 9, 5), w1, b1, w2, b2),  # other inputs
        (drawn(0, 3, 9, 4), w1, b1[:, :-1], w2, b2),
        (drawn(0, 3, 9, 4).double(), w1, b1, w2, b2),
        (drawn(0, 3, 9, 4), w1[:, :3], b1[:, :3], w2[:, :, :3], b2),  # fewer units than lanes
    ):
        with pytest.raises(RuntimeError):
            perceptron.forward(*given)
    with pytest.raises(RuntimeError):
        perceptron.backward(drawn(0, 1, 4, 3), drawn(1, 1, 1, 2), drawn(2, 1, 4, 2), drawn(3, 1, 4, 1))
    with pytest.raises(RuntimeError):
        lowrank.displace(*(drawn(0, *shape) for shape in ((2, 3, 16), (1, 3, 3), (2, 3, 3), *[(2, 16)] * 4, (2, 3))))


RUN = """
import sys, warnings, torch
from isosgd import Target, likelihoods, priors, sample
from experiments.models import mlp
warnings.simplefilter("ignore")  # the warm-up is short, and `native` another
g = torch.Generator().manual_seed(0)
x, noise = torch.randn(200, 6, generator=g), torch.randn(200, 1, generator=g)
torch.manual_seed(0)
target = Target.from_module(mlp(6, 50, 1), likelihoods.Gaussian(0.1), priors.FanInNormal())
settings = {"chains": 10, "keep_every": 4, "warmup": 700, "seed": 1, "progress": False, "compile": True}
sample(target, (x, x[:, :1].sin() + 0.1 * noise), batch_size=100, structure="lowrank", **settings,
       store=sys.argv[1], draws=int(sys.argv[2]), resume=True)
"""


@pytest.mark.slow
@needs_compiler
def test_a_run_is_the_same_with_and_without(tmp_path: Path) -> None:
    """Up to rounding: the same random numbers, the same steps, a Lambda with directions.

    Rounding grows with the steps: both go on from one and the same draw, and not for long.
    """

    def run(folder: Path, draws: int, switch: str) -> Tensor:
        code = f"import sys; sys.argv[1:] = {[str(folder), str(draws)]}\n" + RUN
        in_process(code, ISOSGD_NATIVE=switch)
        return load(folder).draws["0.weight"]

    run(tmp_path / "0", 1, "0")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    with_, without = (run(tmp_path / switch, 3, switch) for switch in "10")
    assert not torch.equal(with_, without)
    torch.testing.assert_close(with_, without, rtol=1e-5, atol=1e-5)


CACHED = """
import json, torch
from torch._dynamo.utils import counters
from isosgd import Target, likelihoods, priors, sample
from experiments.models import mlp
torch.manual_seed(0)
x = torch.randn(200, 6)
target = Target.from_module(mlp(6, 50, 1), likelihoods.Gaussian(0.1), priors.FanInNormal())
settings = {"chains": 10, "draws": 2, "keep_every": 4, "warmup": 600, "seed": 1, "progress": False, "compile": True}
sample(target, (x, x[:, :1]), batch_size=100, structure="lowrank", **settings)
print(json.dumps(counters["inductor"]))
"""


@pytest.mark.slow
@needs_compiler
def test_the_next_process_does_not_compile_again(tmp_path: Path) -> None:
    """Code that calls the operations is kept in the compiler's cache like any other."""
    found = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CACHED],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(run.stdout.splitlines()[-1]))
    first, second = found
    assert first["fxgraph_cache_miss"] > 0
    assert second["fxgraph_cache_hit"] >= first["fxgraph_cache_miss"]
    assert not second.get("fxgraph_cache_miss") and not second.get("fxgraph_cache_bypass")
    code = "".join(path.read_text() for path in tmp_path.rglob("*.cpp"))
    assert "isosgd::perceptron" in code and "isosgd::lowrank_displace" in code


# ------------------------------------------------------------------------------------------------ lowrank


@needs_compiler
@pytest.mark.parametrize("k", [1, 4, 5, 20, 33])
@pytest.mark.parametrize("d", [16, 19, 751, 2000])
def test_a_step_along_directions_is_that_of_torch(d: int, k: int) -> None:
    sizes = (k, d), (k, k), (k, k), (d,), (d,), (d,), (d,), (k,)
    given = [drawn(i, 3, *size) for i, size in enumerate(sizes)]
    basis, back, add, pace, ratio, gradient, own, shared = (t.double() for t in given)
    force = gradient + ratio * own
    along = torch.einsum("cij,cj->ci", back, torch.einsum("cij,cj->ci", basis, force))
    along = along + torch.einsum("cij,cj->ci", add, shared)
    wanted = pace * force + torch.einsum("cij,ci->cj", basis, along)
    torch.testing.assert_close(lowrank.displace(*given).double() / k / d, wanted / k / d, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ how it is built


OPERATIONS = "from isosgd.native import build; print(repr(build.unsupported_reason()))"
LIBRARY = "from isosgd.native import build; print(build.layers() is not None)"  # the one that is built sooner


def test_it_can_be_switched_off() -> None:
    assert "'ISOSGD_NATIVE=0'" in in_process(OPERATIONS, ISOSGD_NATIVE=0)


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler_everything_goes_on(tmp_path: Path, compiler: str) -> None:
    code = OPERATIONS + "; import torch; print('ready' if build.ready(torch.ones(3)) else 'not ready')"
    said = in_process(code, CXX=compiler, TORCH_EXTENSIONS_DIR=tmp_path)
    assert "RuntimeWarning: small networks are slower" in said and said.count(compiler) >= 2 and "not ready" in said
    assert not list(tmp_path.glob("*/*.so"))


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A compiler that notes its calls; the first result is cut short where there is a file ``fails`` beside it."""
    real = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    script = tmp_path / "compiler"
    script.write_text(
        f"""#!/bin/sh
cd "$(dirname "$0")" && echo call >> calls
for last; do :; done
if [ -e fails ]; then rm fails; echo cut short > "$last"; else exec {real} "$@"; fi
"""
    )
    script.chmod(0o755)
    return script


def calls(compiler: Path) -> int:
    return len((compiler.parent / "calls").read_text().splitlines())


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_built_again(tmp_path: Path, compiler: Path) -> None:
    """As after a crash, or from another system."""
    (tmp_path / "fails").touch()
    assert in_process(LIBRARY, CXX=compiler, TORCH_EXTENSIONS_DIR=tmp_path / "built").strip() == "True"
    assert calls(compiler) == 2


ELSEWHERE = """
from pathlib import Path
read = Path.read_text
Path.read_text = lambda path, *given, **named: read(path, *given, **named) + (
    "\\nflags : other\\n" if str(path) == "/proc/cpuinfo" else ""
)
"""


@needs_compiler
def test_what_was_built_is_found_again(tmp_path: Path, compiler: Path) -> None:
    """One call of the compiler for all runs on a machine; nothing is found that another processor's would have made."""
    for code, times in ((LIBRARY, 1), (LIBRARY, 1), (ELSEWHERE + LIBRARY, 2)):
        assert in_process(code, CXX=compiler, TORCH_EXTENSIONS_DIR=tmp_path / "built").strip() == "True"
        assert calls(compiler) == times
