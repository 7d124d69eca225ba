"""vLLM's files of a model on the Hub are counted and fetched, and no others; each error is a sentence."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy import machine
from deploy.errors import DeployError
from deploy.fleet import parse_fleet
from deploy.fleet.model_architecture import model_directory
from deploy.home import FleetHome
from deploy.lifecycle import up
from deploy.models import hub as hugging_face
from deploy.models.built_in import fetch_model
from tests.support.hub import standing_in
from workers.processes import free_port

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
TEXT = {"config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}"}
FETCH = "from deploy.models import hub; print(hub.describe('a/b')); hub.fetch('a/b')"


def weights(*names: str) -> dict[str, bytes]:
    return {name: bytes(1_000) for name in names}


def index(*names: str) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": dict(enumerate(names))}).encode()


SHARDS = ("model-1.safetensors", "model-2.safetensors")
DAMAGED = (b"{}", b"[]", b'{"weight_map": []}', b"no JSON")
SHARDED = {**weights(*SHARDS), "model.safetensors.index.json": index(*SHARDS)}


@pytest.mark.parametrize(
    ("files", "loaded"),
    [
        ({**weights("model.safetensors", "onnx/model.safetensors")}, ("model.safetensors",)),
        ({**SHARDED, **weights("original/model.safetensors", "extra.safetensors")}, SHARDS),
        ({**SHARDED, **weights("consolidated.safetensors")}, ("consolidated.safetensors",)),
        *(({**SHARDED, "model.safetensors.index.json": damaged}, SHARDS) for damaged in DAMAGED),
    ],
    ids=["a copy in a folder", "what the index does not name", "Mistral's own format", *map(repr, DAMAGED)],
)
def test_a_second_copy_of_the_weights_is_neither_counted_nor_fetched(
    tmp_path: Path, files: dict[str, bytes], loaded: tuple[str, ...]
) -> None:
    with standing_in({**TEXT, **files, "original/config.json": b"{}"}) as hub:
        done = hub.run(tmp_path, "-c", FETCH)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 1_000 * len(loaded)
    assert {name for name in hub.sent if name.endswith(".safetensors")} == set(loaded)
    assert hub.sent.issuperset(TEXT) and "original/config.json" not in hub.sent
    here = "import deploy.fleet; from deploy.models.built_in import is_here; print(is_here('a/b'))"
    assert hub.run(tmp_path, "-c", here).stdout == "True\n"


INVALID = {"X-Error-Message": "Invalid credentials in Authorization header"}
UNKNOWN = {"X-Error-Code": "RepoNotFound"}


@pytest.mark.parametrize(
    ("path", "status", "why", "said"),
    [
        ("/api/models", 429, {}, "Hugging Face answers 429 for a/b: wait a minute, and run it again"),
        ("/api/models", 503, {}, "Hugging Face answers 503 for a/b: wait a minute, and run it again"),
        ("/api/models", 401, INVALID, "Hugging Face answers 401 for a/b: make a valid HF_TOKEN, or unset it"),
        ("/api/models", 401, UNKNOWN, "does not show a/b: it is private, or there is no such model"),
        ("model.safetensors", 403, {}, "Hugging Face answers 403 for a/b: make a valid HF_TOKEN"),
    ],
)
def test_each_error_of_the_hub_has_a_sentence_of_its_own(
    tmp_path: Path, path: str, status: int, why: dict[str, str], said: str
) -> None:
    with standing_in({**TEXT, **weights("model.safetensors")}) as hub:
        hub.refuses, hub.why = {path: status}, why
        done = hub.run(tmp_path, "-c", FETCH)
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/api/models", "a/b is not on this machine, and Hugging Face cannot be reached: "),
        ("config.json", "a/b is not on this machine, and Hugging Face cannot be reached: "),
        ("model.safetensors", "a/b is not whole, because the connection to Hugging Face is lost ("),
    ],
)
def test_the_error_of_a_lost_connection_says_what_is_missing(tmp_path: Path, path: str, said: str) -> None:
    with standing_in({**TEXT, **weights("model.safetensors")}) as hub:
        hub.drops = path
        done = hub.run(tmp_path, "-c", FETCH)
    assert said in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize("error", ["ConnectionResetError(104, 'reset')", "TimeoutError(110, 'timed out')"])
def test_a_socket_error_is_reported_as_a_lost_connection(tmp_path: Path, error: str) -> None:
    lost = f"from deploy.models import hub\nwith hub._errors('a/b', hub._LOST): raise {error}"
    with standing_in({}) as hub:
        done = hub.run(tmp_path, "-c", lost)
    assert "a/b is not whole, because the connection" in done.stderr.splitlines()[-1]


def test_a_model_without_config_json_is_refused(tmp_path: Path) -> None:
    with standing_in({"tokenizer_config.json": b"{}", **weights("model.safetensors")}) as hub:
        done = hub.run(tmp_path, "-c", FETCH)
    assert "DeployError: a/b has no config.json" in done.stderr


def test_the_error_names_a_model_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("a file, and no folder")
    with standing_in({**TEXT, **weights("model.safetensors")}) as hub:
        done = hub.run(tmp_path, "-c", FETCH)
    last = done.stderr.splitlines()[-1]
    assert (
        last.startswith(f"deploy.errors.DeployError: a/b cannot be written: {tmp_path}/hf")
        and "run it again" in last
    )


def test_a_taken_port_is_reported_before_anything_large_is_fetched(tmp_path: Path) -> None:
    with (
        standing_in({**TEXT, **weights("model.safetensors")}) as hub,
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        port = str(taken.getsockname()[1])
        done = hub.run(tmp_path, "-m", "deploy.cli", "serve", "a/b", "--port", port)
    assert (
        f"cannot listen on 127.0.0.1:{port}" in done.stderr and "choose another port (--port" in done.stderr
    )
    assert "config.json" in hub.sent and "model.safetensors" not in hub.sent


FLEET = {
    "policy": "collocated",
    "model": {"path": "a/b"},
    "tiers": [{"name": "mixed", "role": "mixed"}],
    "engine": {"device": "cpu"},
}
CODE = """
from deploy.fleet import parse_fleet
from deploy.home import FleetHome
from deploy.lifecycle.up import prepare
from deploy.models.built_in import fetch_model
fleet = parse_fleet({text!r}, "f")
prepare(fleet, FleetHome.of("f"), print)
fetch_model(fleet, print)
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="c-") as made:
        yield Path(made)


def test_conserve_up_fetches_a_whole_model_once(short_path: Path) -> None:
    code = CODE.format(text=json.dumps({**FLEET, "gateway": {"port": free_port("127.0.0.1")}}))
    with standing_in({**TEXT, **SHARDED}) as hub:
        hub.drops = "/api/models"
        said = hub.run(short_path, "-c", code).stderr.splitlines()[-1]
        assert "a/b is not on this machine, and Hugging Face cannot be reached: " in said
        hub.drops = ""
        first = hub.run(short_path, "-c", code)
        assert "fetching a/b from Hugging Face" in first.stdout, first.stderr
        assert hub.sent.issuperset(SHARDS)
        hub.sent.clear()
        assert hub.run(short_path, "-c", code).returncode == 0 and not hub.sent


@pytest.mark.parametrize(
    ("device", "said", "fetched"),
    [("cpu", "engines would start", ["a/b"]), ("cuda", "1 x mixed take 1 GPU, and this machine has 0", [])],
)
def test_conserve_up_fetches_a_model_only_if_engines_fit_and_before_they_start(
    device: str, said: str, fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any) -> None:
        raise DeployError("engines would start")

    done: list[str] = []
    monkeypatch.setattr(hugging_face, "fetch", done.append)
    monkeypatch.setattr("deploy.lifecycle.actors.Actors", start)
    ray = SimpleNamespace(cluster_resources=dict, shutdown=lambda: None)
    monkeypatch.setattr(up, "connect", lambda *_: ray)
    for name in ("prepare", "start_own_cluster", "refuse_open_cluster", "bring_down", "ended_elsewhere"):
        monkeypatch.setattr(up, name, lambda *_: None)
    fleet = parse_fleet(json.dumps({**FLEET, "engine": {"device": device}}), "f")
    with pytest.raises(DeployError, match=said):
        up.bring_up(fleet, FleetHome(tmp_path), print, end_with_us=True)
    assert done == fetched


@pytest.mark.parametrize(
    ("blocks", "fetched"),
    [
        ({}, ["a/b"]),
        ({"ray": {"address": "127.0.0.1:1"}}, []),
        ({"engine": {"device": "cpu", "args": {"revision": "old"}}}, []),
        ({"model": {"path": "small"}}, []),
    ],
    ids=["one machine", "several machines", "another revision", "a generated model"],
)
def test_conserve_up_leaves_downloads_for_other_machines_or_revisions_to_the_engines(
    blocks: dict[str, Any], fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(hugging_face, "fetch", done.append)
    fetch_model(parse_fleet(json.dumps({**FLEET, **blocks}), "f"), print)
    assert done == fetched


@pytest.mark.parametrize(
    "variables",
    [(), ("XDG_CACHE_HOME",), ("XDG_CACHE_HOME", "HF_HOME"), ("HF_HOME", "HF_HUB_CACHE")],
    ids=", ".join,
)
def test_models_are_found_where_huggingface_hub_stores_them(
    variables: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", *variables):
        monkeypatch.setenv(name, str(tmp_path / name))
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, check=True
    )
    cached = Path(done.stdout.strip())
    assert hugging_face.cache() == cached
    refs = cached / "models--a--b" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("abc")
    assert model_directory("a/b") == cached / "models--a--b" / "snapshots" / "abc"
    variable = next(name for name, (what, _) in machine.folders().items() if what == "model cache")
    assert machine.folders()[variable][1] == cached
    assert variable == ("HF_HUB_CACHE" if "HF_HUB_CACHE" in variables else "HF_HOME")
