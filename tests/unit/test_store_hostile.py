"""Spoiled stores are refused by one kind of error, and no name in a manifest leads out of the folder."""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from isosgd import Target, load, priors, sample
from isosgd.store import StoreError


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, written_at_once: Callable[[], Any]) -> Path:
    """A sound run of three shards."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    target = Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Normal(1.0), init={"mu": 0.0})
    with written_at_once():
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
    digest = hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"sha256": digest, **body}))


# ------------------------------------------------------------------------------------------------ one by one


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "draws-000000.safetensors/../../x", "draws-1.safetensors", "manifest.json",
     "draws-000000.safetensors\n", "..", "", 5, None],
)  # fmt: skip
def test_names_lead_nowhere_else(run: Path, name: Any) -> None:
    body = json.loads((run / "manifest.json").read_text())
    body["shards"][0]["file"] = name
    sign(run, body)
    with pytest.raises(StoreError, match=r"manifest.json cannot be used"):
        load(run)


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
def test_headers_that_lie(run: Path, content: bytes) -> None:
    """The SHA-256 of the shard is right."""
    replace_shard(run, json.loads((run / "manifest.json").read_text()), content)
    with pytest.raises(StoreError, match=r"draws-000000.safetensors is damaged: its header is wrong"):
        load(run).draws.draw(0, 0)


def test_a_shard_must_hold_what_the_manifest_says(run: Path) -> None:
    """Its SHA-256 is right, its tensors are of another kind."""
    content = with_header({"mu": {"dtype": "I32", "shape": [1, 2], "data_offsets": [0, 8]}}, b"\0" * 8)
    replace_shard(run, json.loads((run / "manifest.json").read_text()), content)
    with pytest.raises(StoreError, match=r"draws-000000.safetensors is damaged: it holds other tensors"):
        load(run).draws.draw(0, 0)


@pytest.mark.parametrize("known", [[[]], [0, 0], [True], "01", None, 3])
def test_what_a_manifest_says_of_chains_need_not_be_so(run: Path, known: Any) -> None:
    body = json.loads((run / "manifest.json").read_text())
    body["info"] |= {"chain_indices": known, "rates": [1.0], "warmup": {}}
    sign(run, body)
    assert load(run).info["chain_indices"] == [0, 1]


def replace_shard(folder: Path, body: dict[str, Any], content: bytes) -> None:
    shard = body["shards"][0]
    (folder / shard["file"]).write_bytes(content)
    shard["sha256"], shard["bytes"] = hashlib.sha256(content).hexdigest(), len(content)
    sign(folder, body)


# ------------------------------------------------------------------------------------------------ at random


def spoiled(content: bytes, spots: list[tuple[int, int]], cut: int | None) -> bytes:
    found = bytearray(content)
    for spot, value in spots:
        found[spot % len(found)] = value
    return bytes(found[:cut])


@settings(
    max_examples=60, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    st.sampled_from(["manifest", "shard", "signed shard"]),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4),
    st.none() | st.integers(0, 5000),
)
def test_random_damage(run: Path, stored: Path, what: str, changes: list[tuple[int, int]], cut: int | None) -> None:
    """Bytes that were changed or lost; in a signed shard its SHA-256 has been made to match."""
    name = "manifest.json" if what == "manifest" else "draws-000000.safetensors"
    sound = (stored / name).read_bytes()
    content = spoiled(sound, changes, cut)
    (run / "manifest.json").write_bytes((stored / "manifest.json").read_bytes())
    (run / name).write_bytes(content)
    if what == "signed shard":
        replace_shard(run, json.loads((stored / "manifest.json").read_text()), content)
    refused = harmless(lambda: use(run))
    if what == "shard":
        assert refused == (content != sound)


def test_a_sound_store_is_not_refused(run: Path) -> None:
    sign(run, json.loads((run / "manifest.json").read_text()))
    use(run)
    assert load(run).info["complete"]
