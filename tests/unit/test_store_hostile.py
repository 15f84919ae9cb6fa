"""Stores made to do harm are refused, by one kind of error and in little memory; nothing in them is ever run."""

import copy
import hashlib
import json
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from isosgd import Target, load, priors, sample
from isosgd.store import StoreError, writer
from isosgd.store.files import MOST_JSON, from_json, pack, read_header, unpack
from isosgd.store.manifest import Manifest, _digest

MEGABYTE = 1 << 20
ROOM = 200 * MEGABYTE  # of memory that refusing may take


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound run of three shards."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    target = Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Normal(1.0), init={"mu": 0.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "LEAST_WAIT", 0.0)
        sample(
            target, (torch.zeros(20),), method="sgld", lr=1e-3, warmup=0, keep_every=1, draws=3, chains=2,
            progress=False, store=folder,
        )  # fmt: skip
    return folder


@pytest.fixture
def run(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "run"))


def use(folder: Path) -> None:
    """Whatever one does with a store."""
    for damaged in ("refuse", "drop"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = load(folder, damaged=damaged)
        for part in (posterior.draws, posterior.buffers):
            for name in part:
                assert tuple(part[name].shape) == part.shape(name)
            if part.num_draws:
                part.draw(0, -1)


def harmless(action: Callable[[], Any]) -> bool:
    """Do something that may be refused, by `StoreError` alone; returns whether it was."""
    try:
        action()
    except StoreError:
        return True
    return False


def sign(folder: Path, body: dict[str, Any]) -> None:
    """Write a manifest whose own SHA-256 is right."""
    body = {name: value for name, value in body.items() if name != "sha256"}
    (folder / "manifest.json").write_text(json.dumps({"sha256": _digest(body), **body}))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ------------------------------------------------------------------------------------------------ one by one


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "draws-000000.safetensors/../../x", "draws-1.safetensors", "manifest.json",
     "draws-000000.safetensors\n", "..", "", "checkpoint-000000.safetensors", "frozen.safetensors", 5, None],
)  # fmt: skip
def test_names_lead_nowhere_else(run: Path, name: Any) -> None:
    body = json.loads((run / "manifest.json").read_text())
    body["shards"][0]["file"] = name
    sign(run, body)
    with pytest.raises(StoreError, match=r"manifest.json cannot be used: .*name of a file"):
        load(run)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("tensors", "mu", "shape"), [1 << 60]),
        (("tensors", "mu", "shape"), [1 << 40, 1 << 40]),
        (("tensors", "mu", "shape"), [-1]),
        (("tensors", "mu", "shape"), [2.0]),
        (("tensors", "mu", "shape"), [True]),
        (("tensors", "mu", "shape"), [1] * 33),
        (("tensors", "mu", "shape"), [0]),
        (("tensors", "mu", "dtype"), "object"),
        (("tensors", "mu", "stored"), "bool"),
        (("tensors", "mu", "stored"), ["float32"]),
        (("shards", 0, "count"), 1 << 47),
        (("shards", 0, "count"), 0),
        (("shards", 0, "stop"), 1 << 40),
        (("shards", 1, "start"), 0),
        (("shards", 1, "file"), "draws-000000.safetensors"),
        (("shards", 2, "first"), 1),
        (("shards", 0, "sha256"), "0"),
        (("shards", 0, "bytes"), 10**30),
        (("lost",), [[0]]),
        (("number",), -1),
        (("complete",), 1),
        (("info",), {"$tensor": "0"}),
        (("info",), {"$items": [[[], 1]]}),
        (("info",), {"x": {"$run": "rm"}}),
        (("extra",), 1),
    ],
)
def test_numbers_that_cannot_be(run: Path, where: tuple[Any, ...], value: Any) -> None:
    body = json.loads((run / "manifest.json").read_text())
    place = body
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    sign(run, body)
    with pytest.raises(StoreError):
        load(run)


@pytest.mark.parametrize("kind", ["deep", "long", "utf-16", "nan", "huge number"])
def test_json_is_bounded_before_it_is_read(run: Path, kind: str) -> None:
    text = {
        "deep": b"[" * 1_000_000,
        "long": b'"' + b"x" * MOST_JSON + b'"',
        "utf-16": ("[" * 5000).encode("utf-16"),
        "nan": b"[NaN]",
        "huge number": b"[" + b"9" * 100_000 + b", 1e999]",
    }[kind]
    before = peak()
    with pytest.raises(StoreError, match=r"manifest.json"):
        from_json(text, "manifest.json")
    (run / "manifest.json").write_bytes(text)
    with pytest.raises(StoreError, match=r"manifest.json"):
        load(run)
    assert peak() - before < ROOM


@pytest.mark.slow
def test_a_gigabyte_of_nesting(run: Path) -> None:
    before = peak()
    with open(run / "manifest.json", "wb") as file:
        for _ in range(1024):
            file.write(b"[" * MEGABYTE)
    with pytest.raises(StoreError, match="more than"):
        load(run)
    shard = run / "draws-000000.safetensors"
    with open(shard, "wb") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        for _ in range(1024):
            file.write(b"[" * MEGABYTE)
    with pytest.raises(StoreError, match="its header is wrong"):
        read_header(shard)
    assert peak() - before < ROOM


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        (1 << 63).to_bytes(8, "little"),
        with_header(b"[]"),
        with_header(b"[" * 100_000),
        with_header({"mu": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}, b"\0" * 4),
        with_header({"mu": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, b"\0" * 8),
        with_header({"mu": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}),
        with_header({"mu": {"dtype": "O", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4),
        with_header({"mu": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"\0" * 8),
        with_header({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, b"\0" * 4),
        with_header({"mu": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 9),
        with_header({"__metadata__": {"a": 1}}),
        with_header({"mu": 5}),
    ],
)  # fmt: skip
def test_headers_that_lie(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(StoreError, match=r"x\.safetensors"):
        read_header(tmp_path / "x.safetensors")


def test_a_shard_must_hold_what_the_manifest_says(run: Path) -> None:
    """Its SHA-256 is right, its tensors are of another kind."""
    content = with_header({"mu": {"dtype": "I32", "shape": [1, 2], "data_offsets": [0, 8]}}, b"\0" * 8)
    replace_shard(run, json.loads((run / "manifest.json").read_text()), content)
    with pytest.raises(StoreError, match=r"draws-000000.safetensors is damaged: it holds other tensors"):
        load(run).draws.draw(0, 0)


def replace_shard(folder: Path, body: dict[str, Any], content: bytes) -> None:
    shard = body["shards"][0]
    (folder / shard["file"]).write_bytes(content)
    shard["sha256"], shard["bytes"] = hashlib.sha256(content).hexdigest(), len(content)
    sign(folder, body)


# ------------------------------------------------------------------------------------------------ at random

NAMES = st.sampled_from(
    ["../x", "/etc/passwd", "draws-000001.safetensors", "frozen.safetensors", "mu", "buffer:mu", "__metadata__", "nan",
     "$tensor", "$items", "$tuple", "$permuted", "$array", "$float", "0", "F32", "BF16", "float32", "bfloat16", "bool",
     "O", "\0"]
)  # fmt: skip
NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 8, 1 << 20, 1 << 31, 1 << 47, 1 << 48, 1 << 63, 10**40, -1]) | st.integers()
LEAVES = NAMES | NUMBERS | st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(), inner, max_size=4),
    max_leaves=12,
)
HEADERS = st.dictionaries(
    NAMES,
    ANYTHING
    | st.fixed_dictionaries({
        "dtype": st.sampled_from(["F32", "F64", "BF16", "I64", "U8", "BOOL", "O"]) | LEAVES,
        "shape": st.lists(st.sampled_from([0, 1, 2, 3]) | NUMBERS, max_size=3) | ANYTHING,
        "data_offsets": st.lists(st.sampled_from([0, 4, 8, 16]) | NUMBERS, min_size=2, max_size=2) | ANYTHING,
    }),
    max_size=3,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested values."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def fuzz(stored: Path, folder: Path, cases: int) -> None:
    """Spoil a store in many ways and use it."""
    sound = json.loads((stored / "manifest.json").read_text())
    sound.pop("sha256")
    text = (stored / "manifest.json").read_bytes()
    shard = (stored / "draws-000000.safetensors").read_bytes()
    spots = list(places(sound))
    shutil.copytree(stored, folder)
    refused = {"manifest": 0, "bytes": 0, "shard": 0, "header": 0, "tree": 0}
    options = settings(
        max_examples=cases // 5, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    @options
    @given(
        st.lists(
            st.tuples(st.sampled_from(spots), st.sampled_from(["set", "drop", "twice"]), ANYTHING),
            min_size=1,
            max_size=3,
        )
    )
    def manifests(changes: list[tuple[tuple[Any, ...], str, Any]]) -> None:
        body = copy.deepcopy(sound)
        for path, what, value in changes:
            try:
                place = body
                for key in path[:-1]:
                    place = place[key]
                if what == "set":
                    place[path[-1]] = value
                elif what == "drop":
                    del place[path[-1]]
                elif isinstance(place, list):
                    place.append(copy.deepcopy(place[path[-1]]))
            except (KeyError, IndexError, TypeError):
                continue  # an earlier change has taken this place away
        sign(folder, body)
        refused["manifest"] += harmless(lambda: use(folder))

    def spoiled(content: bytes, spots: list[tuple[int, int]], cut: int | None) -> bytes:
        found = bytearray(content)
        for spot, value in spots:
            found[spot % len(found)] = value
        return bytes(found[:cut])

    edits = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4)
    cuts = st.none() | st.integers(0, 5000)

    @options
    @given(edits, cuts)
    def raw(changes: list[tuple[int, int]], cut: int | None) -> None:
        (folder / "manifest.json").write_bytes(spoiled(text, changes, cut))
        refused["bytes"] += harmless(lambda: use(folder))

    @options
    @given(edits, cuts)
    def shards(changes: list[tuple[int, int]], cut: int | None) -> None:
        replace_shard(folder, copy.deepcopy(sound), spoiled(shard, changes, cut))
        refused["shard"] += harmless(lambda: use(folder))

    @options
    @given(HEADERS, st.sampled_from([0, 4, 8, 16]))
    def headers(header: dict[str, Any], data: int) -> None:
        replace_shard(folder, copy.deepcopy(sound), with_header(header, b"\0" * data))
        refused["header"] += harmless(lambda: use(folder))

    packed, tensors = pack({"a": (torch.ones(2, 3).mT, [1, 2.0, None]), "b": {0: torch.zeros(())}})

    @options
    @given(ANYTHING, st.booleans())
    def trees(value: Any, inside: bool) -> None:
        refused["tree"] += harmless(lambda: unpack({"x": value, "y": packed} if inside else value, tensors))

    before = peak()
    manifests()
    (folder / "manifest.json").write_bytes(text)
    raw()
    shards()
    headers()
    trees()
    assert peak() - before < ROOM
    assert min(refused.values()) > 0, refused
    assert refused["manifest"] < cases // 5, "some changes, such as one of the info, are harmless"


def test_random_harm(stored: Path, tmp_path: Path) -> None:
    fuzz(stored, tmp_path / "run", 120)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_ways_to_do_harm(stored: Path, tmp_path: Path) -> None:
    fuzz(stored, tmp_path / "run", 12_000)


def test_a_sound_store_is_not_refused(run: Path) -> None:
    sign(run, json.loads((run / "manifest.json").read_text()))
    use(run)
    assert Manifest.read(run).complete
