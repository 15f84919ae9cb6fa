"""The shape of the package: import arrows, few hard dependencies, no pickle, no local paths, one version.

Every rule is a function from source text to a list of complaints, so that each is also shown to find what it looks for.
"""

import ast
import importlib
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "isosgd"

# A part imports only what stands left of it. "isosgd" is the package's own __init__, which gathers the public names.
ORDER = (
    "errors", "names", "differences", "progress", "native", "target", "data", "noise", "geometry", "samplers", "store",
    "metrics", "diagnostics", "posterior", "engine", "warmup", "baselines", "sampling", "isosgd", "trainers",
    "lightning", "transformers", "tables", "sklearn", "report", "demo", "cli", "__main__",
)  # fmt: skip
# Arrows that the order alone would allow.
FORBIDDEN = {
    "geometry": {"target", "data"},
    "samplers": {"target", "data"},
    "report": {"samplers", "baselines"},
}
# What `import isosgd` may load besides the standard library; the other parts may also use the extras.
HARD_DEPENDENCIES = {"torch", "numpy", "safetensors"}
CORE = ORDER[: ORDER.index("isosgd") + 1]

PICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
LOCAL_PATH = re.compile(r"(?<![\w.~)}\]-])/(?:work|tmp|home|root|opt|mnt|Users)\b(?:/[\w.-]+)*")


def part_of(path: Path) -> str:
    """The part a file of the package belongs to: its folder or name directly under src/isosgd."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "isosgd" if first == "__init__" else first


def statements(body: Iterable[ast.AST], at_module_level: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every statement, those inside others too, and whether it runs when the module is imported."""
    for node in body:
        if isinstance(node, ast.stmt):
            yield node, at_module_level
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            inner = at_module_level and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from statements(ast.iter_child_nodes(node), inner)


@cache
def imported_modules(source: str, module: str, is_package: bool) -> list[tuple[int, str, bool]]:
    """(line, full dotted name, at module level) of every import, relative ones resolved.

    `from a import b` is `a.b`: whether b is a module or a name in a, the part it comes from is the same.
    """
    found = []
    for node, at_module_level in statements(ast.parse(source).body, at_module_level=True):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(node.lineno, name, at_module_level) for name in names]
    return found


def target_part(name: str) -> str | None:
    """The part that an imported dotted name comes from; None when it is not ours."""
    top, *rest = name.split(".")
    if top != "isosgd":
        return None
    return rest[0] if rest and rest[0] in ORDER else "isosgd"


def wrong_arrows(source: str, part: str, module: str, is_package: bool = False) -> list[str]:
    """Complaints about imports of a part that stands to the right, or of one that is forbidden."""
    found = []
    for line, name, _ in imported_modules(source, module, is_package):
        target = target_part(name)
        if target is None or target == part:
            continue
        if ORDER.index(target) > ORDER.index(part) or target in FORBIDDEN.get(part, ()):
            found.append(f"{module}, line {line}: {part} must not import {target} ({name})")
    return found


def soft_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """Complaints about module-level imports beyond the standard library and the hard dependencies."""
    allowed = HARD_DEPENDENCIES | set(sys.stdlib_module_names) | {"isosgd"}
    return [
        f"{module}, line {line}: {name} is not a hard dependency; import it where it is used"
        for line, name, at_module_level in imported_modules(source, module, is_package)
        if at_module_level and name.split(".")[0] not in allowed
    ]


def pickle_loads(source: str) -> list[str]:
    """Complaints about anything that could run a pickle: the modules, torch.load, and numpy's allow_pickle."""
    if not re.search(rf"import.*({'|'.join(PICKLERS)})|from ({'|'.join(PICKLERS)})|torch.*load|allow_pickle", source):
        return []  # most files: to parse them all takes seconds
    found = [
        f"line {line}: imports {name}"
        for line, name, _ in imported_modules(source, "module", is_package=False)
        if name.split(".")[0] in PICKLERS or name == "torch.load"
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node) == "torch.load":
            found.append(f"line {node.lineno}: torch.load")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append(f"line {node.value.lineno}: allow_pickle")
    return found


def depth(kind: type) -> int:
    """Classes of ours from which a class comes, itself included; interfaces do not count."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("isosgd")]
    return sum(not getattr(base, "_is_protocol", False) for base in ours)


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(("isosgd", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def python_files() -> list[Path]:
    return sorted(
        path for folder in ("src", "tests", "experiments", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    )


def test_every_part_has_its_place() -> None:
    unknown = {part_of(path) for path in modules()} - set(ORDER)
    assert not unknown, f"give {sorted(unknown)} a place in ORDER"


def test_every_folder_is_a_package() -> None:
    """Without its __init__.py a folder's doctests would run on a second copy of its modules."""
    folders = {path.parent for path in modules()}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_arrows() -> None:
    paths = [path for path in modules() if part_of(path) in ORDER]
    found = {
        dotted(path): wrong_arrows(path.read_text(), part_of(path), dotted(path), path.name == "__init__.py")
        for path in paths
    }
    assert paths and not {name: wrong for name, wrong in found.items() if wrong}


def test_core_needs_only_hard_dependencies() -> None:
    paths = [path for path in modules() if part_of(path) in CORE]
    found = {dotted(path): soft_imports(path.read_text(), dotted(path), path.name == "__init__.py") for path in paths}
    assert paths and not {name: soft for name, soft in found.items() if soft}


def circles(imports: dict[str, set[str]]) -> list[str]:
    """Complaints about modules that reach themselves by their imports."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(imports[start])
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += imports.get(name, ())
        return seen

    return [f"{name} imports itself by way of others" for name in imports if name in reached(name)]


def imports_in(part: str) -> dict[str, set[str]]:
    """Which modules of a part each of them imports, but for types alone; `__init__` only gathers names."""
    found = {}
    for path in modules():
        if part_of(path) == part and path.name != "__init__.py":
            source = re.sub(r"^if TYPE_CHECKING:\n(?:    .*\n)+", "", path.read_text(), flags=re.MULTILINE)
            names = {name for _, name, _ in imported_modules(source, dotted(path), is_package=False)}
            found[dotted(path)] = {name.rpartition(".")[0] for name in names} | names
    return {name: wanted & set(found) for name, wanted in found.items()}


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert len(circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == 2


@pytest.mark.parametrize("part", ORDER)
def test_no_import_circle(part: str) -> None:
    assert circles(imports_in(part)) == []


@pytest.mark.parametrize("part", [part for part in ORDER if part not in ("isosgd", "__main__")])
def test_no_class_is_more_than_two_of_ours_deep(part: str) -> None:
    deep = []
    for path in modules():
        if part_of(path) == part and path.name != "__main__.py":
            module = importlib.import_module(dotted(path))
            kinds = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
            deep += [f"{kind.__module__}.{kind.__name__}" for kind in kinds if depth(kind) > 2]
    assert deep == []


def test_declared_dependencies_are_the_hard_ones() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.match(r"[\w-]+", item)[0] for item in declared} == HARD_DEPENDENCIES


def test_nothing_loads_pickle() -> None:
    found = {str(path.relative_to(ROOT)): pickle_loads(path.read_text()) for path in python_files()}
    assert found and not {name: loads for name, loads in found.items() if loads}


def test_no_local_paths() -> None:
    texts = {".py", ".md", ".toml", ".yml", ".txt", ".cff", ".json", ".typed", ""}
    skipped = {"LICENSE", ".git"}  # which is a file in a worktree
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in ("src", "tests", "docs", "experiments", "benchmarks", ".ci"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.suffix in texts and path.name not in skipped
        for match in LOCAL_PATH.finditer(path.read_text(errors="replace"))
    ]
    assert found == []


def test_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/isosgd/__init__.py"
    literal = re.compile(r"""^__version__(?:: \w+)? = ["']([^"']+)["']""", re.MULTILINE)
    stated = {dotted(path): literal.findall(path.read_text()) for path in modules()}
    assert {name for name, versions in stated.items() if versions} == {"isosgd"}
    assert not re.search(r"^version:", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)


def test_installed_version_is_the_stated_one() -> None:
    import isosgd

    try:
        installed = importlib.metadata.version("isosgd")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("isosgd runs from its source tree here, it is not installed")
    assert isosgd.__version__ == installed


# The rules themselves: each finds what it is meant to find, and leaves the rest alone.


@pytest.mark.parametrize(
    ("part", "module", "source"),
    [
        ("noise", "isosgd.noise.paired", "from isosgd.samplers import ISGD"),
        ("noise", "isosgd.noise.paired", "from ..samplers.isgd import ISGD"),
        ("noise", "isosgd.noise.paired", "from .. import engine"),
        ("noise", "isosgd.noise.paired", "def f():\n    import isosgd.engine.loop"),
        ("noise", "isosgd.noise.paired", "import isosgd"),
        ("engine", "isosgd.engine.loop", "from isosgd import sample"),
        ("samplers", "isosgd.samplers.isgd", "from isosgd.target import Target"),
        ("samplers", "isosgd.samplers.isgd", "from ..data import sources"),
        ("report", "isosgd.report", "from .samplers import ISGD"),
        ("isosgd", "isosgd", "from .cli import main"),
    ],
)
def test_a_wrong_arrow_is_found(part: str, module: str, source: str) -> None:
    found = wrong_arrows(source, part, module, is_package=module == "isosgd")
    assert len(found) == 1
    assert f"{part} must not import" in found[0]


@pytest.mark.parametrize(
    ("part", "module", "source"),
    [
        ("samplers", "isosgd.samplers.isgd", "from isosgd.noise import Paired\nfrom . import stepper\nimport torch"),
        ("engine", "isosgd.engine.loop", "from ..samplers.isgd import ISGD\nfrom ..errors import ChainError"),
        ("demo", "isosgd.demo", "import isosgd\nfrom isosgd import sample\nfrom isosgd.tables import tables"),
    ],
)
def test_a_right_arrow_passes(part: str, module: str, source: str) -> None:
    assert wrong_arrows(source, part, module) == []


def test_a_package_resolves_its_own_relative_imports() -> None:
    assert wrong_arrows("from .engine import sample\nfrom . import samplers", "isosgd", "isosgd", is_package=True) == []
    assert wrong_arrows("from .gaussian import G", "noise", "isosgd.noise", is_package=True) == []
    assert len(wrong_arrows("from ..engine import sample", "noise", "isosgd.noise", is_package=True)) == 1


def test_a_soft_import_is_found_only_at_module_level() -> None:
    assert len(soft_imports("import matplotlib.pyplot as plt", "isosgd.engine")) == 1
    assert len(soft_imports("try:\n    import scipy\nexcept ImportError:\n    pass", "isosgd.engine")) == 1
    assert soft_imports("import math\nimport torch\nfrom . import x", "isosgd.engine.loop") == []
    assert soft_imports("def draw():\n    import matplotlib", "isosgd.engine") == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_a_pickle_is_found(source: str) -> None:
    assert len(pickle_loads(source)) == 1


def test_harmless_loads_pass() -> None:
    assert pickle_loads("import numpy as np\nnp.load('x', allow_pickle=False)\nsampler.load_state_dict(state)") == []


@pytest.mark.parametrize("folder", ["work", "tmp", "home", "Users"])
def test_a_local_path_is_found(folder: str) -> None:
    assert LOCAL_PATH.search(f"open('/{folder}/x/data.csv')")
    assert LOCAL_PATH.search(f"see /{folder} there")


@pytest.mark.parametrize("text", ["https://example.org/home/x", "runs/tmp/x", "at home/work", "lr = T / (N * lam)"])
def test_other_slashes_pass(text: str) -> None:
    assert not LOCAL_PATH.search(text)
