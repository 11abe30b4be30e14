"""What is said of a store: damaged manifests and logs, merged stores, environments that differ."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from microtome.app import store_commands
from microtome.capture import store_request, store_writer
from microtome.capture.collect import capture
from microtome.capture.generated import Generation
from microtome.capture.models import LoadedModel
from microtome.capture.store import Store
from microtome.capture.store_check import said_of_differences, store_info, verify_store
from microtome.capture.store_files import differing_environments, read_log, read_manifest, shard_file, table_file
from microtome.capture.store_merge import merge_stores

TEXTS = [f"the {animal} sat on the {thing} ." for animal in ("cat", "dog") for thing in ("house", "book", "tree")]


@pytest.fixture(scope="module")
def model(tiny, word_tokenizer) -> LoadedModel:
    return LoadedModel.from_module(tiny("llama"), word_tokenizer, name="llama")


@pytest.fixture
def part(model, tmp_path):
    """`part(name, first, stop)`: a store of some of the texts."""

    def make(name: str, first: int = 0, stop: int = 6, **changes) -> Store:
        given = {"store": tmp_path / name, "shard_tokens": 20, "progress": False}
        return capture(changes.pop("model", model), TEXTS[first:stop], ["z", "embed"], "all", **(given | changes))

    return make


@pytest.fixture
def merged(part, tmp_path) -> Store:
    return merge_stores(tmp_path / "merged", [part("a", 0, 3).path, part("b", 3, 6).path])


def rewrite(path: Path, **changes: object) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def damage(path: Path, shard: int = 1) -> None:
    data = bytearray(shard_file(path, shard).read_bytes())
    data[-1] ^= 1
    shard_file(path, shard).write_bytes(data)


# Damage by hand

SITE = {"name": "embed", "site": {"kind": "embed"}, "dtype": "float32", "inner": [32]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shards": None}, "shards is None, not a list"),
        ({"shards": []}, "shards is empty"),
        ({"shards": [3]}, r"shards\[0\] is 3, which does not go on at text 0"),
        ({"shards": [{"first": 0}]}, r"shards\[0\] is \{'first': 0\}, which"),
        ({"shards": [{"first": 0, "stop": 3}, {"first": 4, "stop": 6}]}, r"shards\[1\] .* does not go on at text 3"),
        ({"environments": []}, "shard 0 was made in environment 0, of which it has 0"),
        ({"environments": {}}, r"environments is \{\}, not a list"),
        ({"environments": [7]}, r"environments\[0\] is 7, not a mapping"),
        ({"sites": "z"}, "sites is 'z', not a list"),
        ({"sites": []}, "sites is empty"),
        ({"sites": [7]}, r"sites\[0\]: 7 is no site"),
        ({"sites": [SITE, SITE]}, "sites names one twice"),
        ({"sites": [SITE | {"dtype": "float3"}]}, r"sites\[0\]: dtype is 'float3', not one of float64, float32"),
        ({"sites": [SITE | {"dtype": "nn"}]}, r"sites\[0\]: dtype is 'nn', not one of float64, float32"),
        ({"sites": [SITE | {"dtype": [1]}]}, r"sites\[0\]: dtype is \[1\], not one of float64, float32"),
        ({"sites": [SITE | {"inner": 32}]}, r"sites\[0\]: inner is 32, not the sizes"),
        ({"sites": [SITE | {"inner": [0]}]}, r"sites\[0\]: inner is \[0\], not the sizes"),
        ({"sites": [SITE | {"site": {"name": "z"}}]}, r"sites\[0\]: \{'name': 'z'\} is no site"),
        ({"sites": [SITE | {"site": {"kind": ["z"]}}]}, r"sites\[0\]: \{'kind': \['z'\]\} is no site"),
        ({"provenance": []}, r"provenance is \[\], not a mapping"),
        ({"provenance": {"model": "llama"}}, "provenance says of the model 'llama', not a mapping with its name"),
        ({"request": None}, "request is None, not a mapping"),
    ],
)
def test_a_manifest_that_no_capture_wrote_is_damaged(part, changes, said) -> None:
    path = part("s").path
    rewrite(path, **changes)
    for read in (store_info, verify_store, Store.open, lambda path: merge_stores(path / "x", [path, path])):
        with pytest.raises(ValueError, match=rf"manifest.json is damaged: {said}"):
            read(path)


def test_a_manifest_that_lacks_a_part_is_damaged(part) -> None:
    path = part("s").path
    manifest = read_manifest(path)
    del manifest["shards"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"manifest.json is damaged: shards is None"):
        Store.open(path)


def test_environments_that_are_not_there_count_for_nothing(part) -> None:
    path = part("s").path
    manifest, records = read_manifest(path), read_log(path)
    assert differing_environments(manifest | {"environments": []}, records.values()) == {}
    assert differing_environments(manifest, records.values()) == {}


def test_a_log_that_names_shards_beyond_the_manifest(part) -> None:
    path = part("s").path
    lines = (path / "shards.jsonl").read_text().splitlines()
    shutil.copyfile(shard_file(path, 0), shard_file(path, 99))
    shutil.copyfile(table_file(path, 0), table_file(path, 99))
    for number in (99, -1):
        more = json.dumps(json.loads(lines[0]) | {"shard": number})
        (path / "shards.jsonl").write_text("\n".join([*lines, more]) + "\n")
        assert store_info(path).finished == len(lines)
        assert [fault.what for fault in verify_store(path)] == [
            f"the manifest has {len(lines)} shards, no shard {number}"
        ]


# Merged stores


def test_damaged_shards_of_a_merged_store_are_kept(merged, capsys) -> None:
    path = merged.path
    assert verify_store(path, discard_damaged=True) == []
    damage(path)
    log = (path / "shards.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"shard 1: .*hash differs \(1 of 4 .*Remove it and merge its parts again"):
        verify_store(path, discard_damaged=True)
    assert (path / "shards.jsonl").read_bytes() == log
    assert not store_commands.verify_store(path)
    assert "1 shard(s) damaged. It was merged from other stores: remove it and merge" in capsys.readouterr().out


def test_stores_merged_before_they_said_so_are_known_too(merged) -> None:
    manifest = read_manifest(merged.path)
    del manifest["merged"]
    (merged.path / "manifest.json").write_text(json.dumps(manifest))
    damage(merged.path)
    with pytest.raises(ValueError, match="merge its parts again"):
        verify_store(merged.path, discard_damaged=True)


def test_a_merged_store_that_lacks_a_shard_is_not_captured_again(merged, part, capsys) -> None:
    shard_file(merged.path, 1).unlink()
    store_commands.show_store(merged.path)
    assert "3 of 4 (not whole: merge its parts again)" in capsys.readouterr().out
    lines = (merged.path / "shards.jsonl").read_text().splitlines(keepends=True)
    (merged.path / "shards.jsonl").write_text("".join([lines[0], *lines[2:]]))
    store_commands.verify_store(merged.path)
    assert "the others are missing: merge its parts again" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"merged has 3 of 4 shards. Merge its parts again first"):
        merge_stores(merged.path.with_name("more"), [merged.path, part("c").path])
    path = part("c").path
    shard_file(path, 1).unlink()
    store_commands.show_store(path)
    assert "(not finished: run the same capture again)" in capsys.readouterr().out


# Environments that differ


@pytest.mark.parametrize(
    ("model_dtype", "changes", "said"),
    [
        (torch.float32, {}, "Equal to rounding (1e-5), not byte for byte."),
        (torch.float32, {"dtype": torch.float64}, "Equal to rounding (1e-5), not byte for byte."),
        (torch.float32, {"dtype": torch.float16}, "Equal to rounding of float16, not byte for byte."),
        (torch.bfloat16, {}, "Equal to rounding of bfloat16, not byte for byte."),
        (torch.bfloat16, {"dtype": torch.float32}, "Equal to rounding of bfloat16, not byte for byte."),
        (
            torch.float32,
            {"generate": Generation(2)},
            "What the model wrote may differ between them; where it does not, values are equal to rounding (1e-5).",
        ),
    ],
)
def test_what_differing_environments_mean(
    tiny, word_tokenizer, part, capsys, monkeypatch, model_dtype, changes, said
) -> None:
    model = LoadedModel.from_module(tiny("llama").to(model_dtype), word_tokenizer, name="llama")
    path = part("s", model=model, **changes).path
    assert said_of_differences(store_info(path)) == []
    shard_file(path, 1).unlink()
    with_threads(monkeypatch, 64)
    part("s", model=model, **changes)
    differed = f"torch_threads differed between shards: {torch.get_num_threads()}, 64"
    assert said_of_differences(store_info(path)) == [differed, said]
    store_commands.show_store(path)
    assert capsys.readouterr().out.endswith(f"{differed}\n{said}\n")


def with_threads(monkeypatch, number: int) -> None:
    """As if the next captures ran with that many threads."""
    facts = store_request.environment_of
    monkeypatch.setattr(store_writer, "environment_of", lambda job: facts(job) | {"torch_threads": number})


def test_merged_stores_say_what_their_parts_wrote(part, tmp_path, monkeypatch) -> None:
    paths = []
    for name, first, n in (("a", 0, 16), ("b", 3, 32)):
        with_threads(monkeypatch, n)
        paths.append(part(name, first, first + 3, generate=Generation(2)).path)
    info = store_info(merge_stores(tmp_path / "both", paths).path)
    assert said_of_differences(info)[-1].startswith("What the model wrote may differ between them")


# Commands


def test_info_and_verify_print_what_they_find(part, tmp_path, capsys) -> None:
    path = part("s").path
    store_commands.show_store(path)
    said = capsys.readouterr().out
    assert "shards    3 of 3 (whole)" in said
    assert "sites     z.0-2 [4 x 8], embed [32]; float32" in said
    store_commands.show_store(path, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert (facts["is_whole"], facts["texts"], facts["model"]) == (True, 6, "llama")
    assert store_commands.verify_store(path)
    assert "every byte as it was written" in capsys.readouterr().out
    data = bytearray(shard_file(path, 1).read_bytes())
    data[-1] ^= 1
    shard_file(path, 1).write_bytes(data)
    assert not store_commands.verify_store(path)
    assert "--discard-damaged" in capsys.readouterr().out
    assert not store_commands.verify_store(path, discard_damaged=True, as_json=True)
    assert [fault["shard"] for fault in json.loads(capsys.readouterr().out)["faults"]] == [1]
    assert store_commands.verify_store(path)
    assert "the others are not finished" in capsys.readouterr().out
