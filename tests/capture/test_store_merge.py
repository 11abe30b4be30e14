"""Merged stores hold the rows of all, in files of their own; what is not of one kind, or twice there, is refused."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from microtome.app import store_commands
from microtome.capture import store_merge
from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.capture.store import Store
from microtome.capture.store_alike import Part, require_alike
from microtome.capture.store_check import store_info, verify_store
from microtome.capture.store_files import read_manifest, shard_file, table_file
from microtome.capture.store_merge import merge_stores

TEXTS = [
    f"the {animal} sat on the {thing} ." for animal in ("cat", "dog", "bird") for thing in ("house", "book", "tree")
]


@pytest.fixture(scope="module")
def model(tiny, word_tokenizer) -> LoadedModel:
    return LoadedModel.from_module(tiny("llama"), word_tokenizer, name="llama")


@pytest.fixture
def part(model, tmp_path):
    """`part(name, first, stop)`: a store of some of the texts."""

    def make(name: str, first: int = 0, stop: int = 2, sites=("z", "resid_post.1"), **changes) -> Store:
        labels = {"label": [i % 2 for i in range(first, stop)], "group": [f"g{i}" for i in range(first, stop)]}
        given = {"labels": labels, "store": tmp_path / name, "shard_tokens": 20, "progress": False}
        texts, positions = changes.pop("texts", TEXTS[first:stop]), changes.pop("positions", "all")
        return capture(model, texts, list(sites), positions, **(given | changes))

    return make


def test_the_rows_of_all(model, part, tmp_path) -> None:
    parts = [part("a", 0, 4), part("b", 4, 6), part("c", 6, 9)]
    merged = merge_stores(tmp_path / "all", [store.path for store in parts])
    labels = {"label": [i % 2 for i in range(9)], "group": [f"g{i}" for i in range(9)]}
    whole = capture(model, TEXTS, ["z", "resid_post.1"], "all", labels=labels, progress=False)
    pd.testing.assert_frame_equal(merged.rows.astype({"string": "str"}), whole.rows.astype({"string": "str"}))
    assert all(torch.equal(merged[s], torch.cat([store[s] for store in parts])) for s in merged.sites)
    assert verify_store(merged.path) == []
    info = store_info(merged.path)
    assert (info.is_whole, info.texts, info.rows, info.model) == (True, 9, whole.n_rows, "llama")
    assert shard_file(merged.path, 0).read_bytes() == shard_file(parts[0].path, 0).read_bytes()
    again = merge_stores(tmp_path / "twice", [merged.path, part("d", 2, 3).path], allow_repeated=True)
    assert again.rows["text"].max() == 9
    with pytest.raises(ValueError, match="holds another capture"):
        capture(model, TEXTS, ["z", "resid_post.1"], "all", labels=labels, store=merged.path, progress=False)


def test_what_cannot_be_merged(part, tmp_path) -> None:
    a, out = part("a", 0, 4).path, tmp_path / "out"
    cases = [
        ([a], ValueError, r"1 store\(s\) given"),
        ([a, part("sites", 4, 6, sites=["z"]).path], ValueError, "differ in: sites, dtype"),
        ([a, part("half", 4, 6, dtype=torch.float16).path], ValueError, "differ in: dtype"),
        ([a, part("columns", 4, 6, labels={"other": [0, 1]}).path], ValueError, "differ in: columns"),
        ([a, part("last", 4, 6, positions="last").path], ValueError, r"differ in: positions \('last' and 'all'\)"),
        (
            [a, part("special", 4, 6, include_special=True).path],
            ValueError,
            r"differ in: include_special \(True and False\)",
        ),
        ([a, tmp_path / "nothing"], FileNotFoundError, "There is no store"),
    ]
    for paths, kind, said in cases:
        with pytest.raises(kind, match=said):
            merge_stores(out, paths)
    b = part("b", 4, 9).path
    shard_file(b, 1).unlink()
    with pytest.raises(FileNotFoundError, match=r"shard-00001.safetensors is missing. Run its capture again"):
        merge_stores(out, [a, b])
    (b / "shards.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"has 0 of 3 shards. Run its capture again first"):
        merge_stores(out, [a, b])
    with pytest.raises(FileExistsError, match=r"exists. Give another folder to merge into"):
        merge_stores(a, [a, b])
    assert sorted(file.name for file in tmp_path.iterdir() if file.name.startswith(".")) == []
    assert not out.exists()


def test_texts_that_are_in_two_parts_are_refused(part, tmp_path) -> None:
    a, b, out = part("a", 0, 4).path, part("b", 4, 6).path, tmp_path / "out"
    both = merge_stores(tmp_path / "both", [a, b]).path
    longer = part("longer", 0, 5).path
    deep = merge_stores(tmp_path / "deep", [part("c", 6, 9).path, both]).path
    cases = [
        ([a, a], f"4 of 4 texts of {a} are in {a} too, such as 'the cat sat on the house .': their rows would count"),
        ([a, part("same", 0, 4).path], f"4 of 4 texts of {tmp_path / 'same'} are in {a} too"),
        ([both, a], f"4 of 4 texts of {a} are in {both} too"),
        ([b, both], f"2 of 6 texts of {both} are in {b} too, such as 'the dog sat on the book .'"),
        ([a, longer], f"4 of 5 texts of {longer} are in {a} too"),
        ([deep, part("d", 5, 6).path], f"1 of 1 texts of {tmp_path / 'd'} are in {deep} too"),
    ]
    for paths, said in cases:
        with pytest.raises(ValueError, match=rf"^{said}.*pass allow_repeated=True \(--allow-repeated\)"):
            merge_stores(out, paths)
        assert not out.exists()
    twice = merge_stores(out, [a, longer], allow_repeated=True)
    assert twice.rows["text"].nunique() == 9
    own = part("own", texts=[TEXTS[7], TEXTS[7]], labels={"label": [0, 1], "group": ["a", "b"]}).path
    assert merge_stores(tmp_path / "fine", [a, own]).rows["text"].nunique() == 6


def test_repeated_token_ids_and_ready_inputs_are_refused(model, part, tmp_path) -> None:
    ids = [part(f"ids{n}", texts=texts, labels=None).path for n, texts in enumerate(([[5, 6], [7]], [[8], [7]]))]
    with pytest.raises(ValueError, match=r"1 of 2 texts of .*ids1 are in .*ids0 too, such as '7'"):
        merge_stores(tmp_path / "out", ids)
    with pytest.raises(ValueError, match=r"differ in: .*kind of texts \('token_ids' and 'strings'\)"):
        merge_stores(tmp_path / "out", [part("strings", 0, 2, labels=None).path, ids[0]])
    embeddings = model.module.get_input_embeddings()
    ready = []
    for seed in (0, 1, 0):
        drawn = torch.randint(3, 100, (4, 5), generator=torch.Generator().manual_seed(seed))
        inputs = {"inputs_embeds": embeddings(drawn).detach()}
        ready.append(part(f"ready{len(ready)}", texts=inputs, labels=None).path)
    merged = merge_stores(tmp_path / "images", ready[:2])
    assert merged.rows["text"].nunique() == 8
    for paths in ([merged.path, ready[2]], [ready[0], ready[2]]):
        with pytest.raises(ValueError, match=f"1 of 1 texts of {ready[2]} are in {paths[0]} too"):
            merge_stores(tmp_path / "out", paths)


def test_stores_captured_in_other_ways_are_refused(part, tmp_path) -> None:
    a = part("a", 0, 4, labels={"label": [0, 1, 0, 1]}).path
    words = {"label": lambda text, offsets: [0] * len(offsets)}
    cases = [
        ("tokens", {"labels": None, "token_labels": words}, r"token_labels \(\['label'\] and \[\]\)"),
        ("special", {"add_special_tokens": False}, r"add_special_tokens \(False and True\)"),
        ("cut", {"truncate": "right", "max_length": 4}, r"truncate \('right' and None\), max_length \(4 and 64\)"),
        ("index", {"positions": 0}, r"positions \(0 and 'all'\)"),
    ]
    for name, changes, said in cases:
        other = part(name, 4, 6, **({"labels": {"label": [0, 1]}} | changes)).path
        with pytest.raises(ValueError, match=f"{other} and {a} differ in: {said}"):
            merge_stores(tmp_path / "out", [a, other])
    fits = part("fits", 4, 6, labels={"label": [0, 1]}, truncate="left", max_length=40).path
    assert merge_stores(tmp_path / "out", [a, fits]).n_rows == 42


def test_positions_given_one_by_one_are_of_one_kind(part, tmp_path) -> None:
    listed = part("listed", 0, 2, positions=[0, 1]).path
    array = part("array", 2, 4, positions=torch.tensor([0, 1]).numpy()).path
    spans = part("spans", 4, 6, positions=[(4, 7), (0, 3)]).path
    merged = merge_stores(tmp_path / "out", [listed, array, spans])
    assert merged.rows["span"].tolist() == [-1, -1, -1, -1, *Store.open(spans).rows["span"]]


def test_a_store_merged_before_from_unlike_parts_is_refused(part) -> None:
    a = read_manifest(part("a", 0, 4).path)
    mixed = [a["provenance"], a["provenance"] | {"positions": "last"}]
    whole = Part(part("b", 4, 6).path, a | {"provenance": {"model": {"name": "llama"}, "parts": mixed}}, ())
    with pytest.raises(ValueError, match=r"^The parts of .*b differ in: positions \('last' and 'all'\)"):
        require_alike([whole, whole])


def test_stores_with_edits_are_refused(part, tmp_path) -> None:
    paths = [part("a", 0, 4).path, part("b", 4, 6, edits={"resid_post.0": torch.zeros_like}).path]
    for given in (paths, paths[::-1], [paths[1]] * 2):
        with pytest.raises(ValueError, match=r"b was captured with edits at resid_post\.0\. Edits are functions"):
            merge_stores(tmp_path / "out", given)


def test_columns_of_types_that_do_not_go_together_are_refused(part, tmp_path) -> None:
    out = tmp_path / "out"
    whole = part("whole", 0, 2, labels={"label": [0, 1]}).path
    refused = {"text": ["a", "b"], "truth": [True, False]}
    for name, values in refused.items():
        other = part(name, 2, 4, labels={"label": values}).path
        kind = "string" if name == "text" else "bool"
        with pytest.raises(ValueError, match=f"'label' holds int64 in {whole} and (large_)?{kind} in {other}"):
            merge_stores(out, [whole, other])
    assert not out.exists()
    nothing = part("nothing", 4, 6, labels={"label": [None, None]}).path
    half = part("half", 6, 8, labels={"label": [0.5, None]}).path
    assert merge_stores(out, [nothing, whole, half]).rows.groupby("text")["label"].first().tolist()[2:5] == [0, 1, 0.5]
    with pytest.raises(ValueError, match=f"'label' holds double in {whole} and (large_)?string in {tmp_path / 'text'}"):
        merge_stores(tmp_path / "more", [nothing, whole, half, tmp_path / "text"])


def test_damage_to_the_merged_store_does_none_to_its_parts(part, tmp_path) -> None:
    paths = [part("a", 0, 4).path, part("b", 4, 6).path]
    merged = merge_stores(tmp_path / "all", paths).path
    for file in merged.glob("*.safetensors"):
        assert file.stat().st_nlink == 1
    with open(shard_file(merged, 0), "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert [fault.shard for fault in verify_store(merged)] == [0]
    assert [verify_store(path) for path in paths] == [[], []]


def test_a_merged_store_says_that_it_is_one(part, tmp_path) -> None:
    paths = [part("a", 0, 4).path, part("b", 4, 6).path]
    merged = read_manifest(merge_stores(tmp_path / "all", paths).path)
    assert merged["merged"] is True
    assert merged["provenance"]["include_special"] is False
    assert [made["positions"] for made in merged["provenance"]["parts"]] == ["all", "all"]
    assert "merged" not in read_manifest(paths[0])


def test_one_path_is_no_list_of_stores(part, tmp_path) -> None:
    path = part("a", 0, 4).path
    for given in (path, str(path)):
        with pytest.raises(TypeError, match=r"is one path. Pass a list of stores: merge_stores\(out, \[path"):
            merge_stores.__wrapped__(tmp_path / "out", given)


def test_a_damaged_row_table_is_not_merged(part, tmp_path) -> None:
    paths = [part("a", 0, 4).path, part("b", 4, 6).path]
    file = table_file(paths[1], 0)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"rows-00000.parquet is not the file that was written. Run `microtome store"):
        merge_stores(tmp_path / "out", paths)


def test_too_little_room_is_said_before_anything_is_copied(part, tmp_path, monkeypatch) -> None:
    paths = [part("a", 0, 4).path, part("b", 4, 6).path]
    monkeypatch.setattr(store_merge.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"The merged store takes 1.* MB; the disk of .* has 1.0 kB free. Make room"):
        merge_stores(tmp_path / "out", paths)
    assert not (tmp_path / "out").exists()


# Command


def test_merge_says_what_came_of_it(part, tmp_path, capsys) -> None:
    paths = [part("a", 0, 4).path, part("b", 4, 9).path]
    store_commands.merge_stores(tmp_path / "all", paths, as_json=True)
    assert json.loads(capsys.readouterr().out)["parts"] == 2
    store_commands.show_store(tmp_path / "all")
    assert "of 9 texts" in capsys.readouterr().out


def test_merge_takes_repeated_texts_if_told_to(part, tmp_path, capsys) -> None:
    paths = [part("a", 0, 4).path, part("b", 3, 9).path]
    with pytest.raises(ValueError, match="1 of 6 texts of"):
        store_commands.merge_stores(tmp_path / "all", paths)
    store_commands.merge_stores(tmp_path / "all", paths, allow_repeated=True)
    assert "Store(70 rows" in capsys.readouterr().out


def test_a_damaged_shard_is_not_merged(part, tmp_path) -> None:
    """One flipped bit in a part must not pass into the whole with nothing said."""
    parts = [part("a", 0, 4).path, part("b", 4, 6).path]
    data = bytearray(shard_file(parts[1], 0).read_bytes())
    data[-5] ^= 1
    shard_file(parts[1], 0).write_bytes(data)
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors is not the file that was written"):
        merge_stores(tmp_path / "all", parts)
    assert not (tmp_path / "all").exists()
