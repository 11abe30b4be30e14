"""Features from files of five kinds: the same numbers, labels beside them, and errors that name the file."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xxhash
from safetensors.torch import save_file

from microtome.capture.activations import Activations
from microtome.capture.feature_tables import read_features
from microtome.capture.store_export import export

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
LABELS = [0, 1, 0, 1, 0, 1]
SUBJECTS = ["007", "007", "7", "7", "9", "9"]
TABLE = pd.DataFrame(X, columns=[f"eeg_{n}" for n in range(4)]).assign(state=LABELS, subject=SUBJECTS)


def written(folder: Path, suffix: str) -> Path:
    path = folder / f"table{suffix}"
    if suffix == ".csv":
        TABLE.to_csv(path, index=False)
    else:
        TABLE.to_parquet(path)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("columns", [None, "eeg_", ["eeg_0", "eeg_1", "eeg_2", "eeg_3"], {"features": "eeg_"}])
def test_a_table_gives_its_columns_of_numbers(tmp_path, suffix: str, columns) -> None:
    acts = read_features(written(tmp_path, suffix), columns=columns, labels="state", groups="subject")
    assert [str(site) for site in acts.sites] == ["features"]
    np.testing.assert_allclose(acts["features"].numpy(), X, rtol=1e-6)
    assert acts.rows["label"].tolist() == LABELS
    assert acts.rows["group"].tolist() == SUBJECTS  # "007" is another subject than "7"
    assert acts.rows["text"].tolist() == list(range(6))


def test_a_label_is_no_feature_although_its_name_begins_alike(tmp_path) -> None:
    acts = read_features(written(tmp_path, ".parquet"), columns="eeg_", labels="eeg_3")
    np.testing.assert_array_equal(acts["features"].numpy(), X[:, :3])
    np.testing.assert_array_equal(acts.rows["label"], X[:, 3])


def test_numbers_of_a_csv_keep_their_digits(tmp_path) -> None:
    wide = RNG.normal(size=(500, 4))
    pd.DataFrame(wide).add_prefix("f").to_csv(tmp_path / "x.csv", index=False)
    np.testing.assert_allclose(read_features(tmp_path / "x.csv")["features"].numpy(), wide, rtol=1e-15)


def test_several_sites_of_a_table_and_what_is_left_stays_in_the_rows(tmp_path) -> None:
    path = written(tmp_path, ".parquet")
    acts = read_features(path, columns={"eeg.0": ["eeg_1", "eeg_0"], "eeg.1": ["eeg_2"]}, labels="state")
    np.testing.assert_array_equal(acts["eeg.0"].numpy(), X[:, [1, 0]])
    assert acts["eeg.1"].shape == (6, 1)
    assert "subject" in acts.rows
    np.testing.assert_array_equal(acts.rows["eeg_3"], X[:, 3])


@pytest.mark.parametrize("shape", [(6, 4), (6, 2, 2)])
def test_npy_is_mapped_and_not_read_at_once(tmp_path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "x.npy", X.reshape(shape))
    np.save(tmp_path / "y.npy", np.array(LABELS))
    TABLE[["subject"]].to_csv(tmp_path / "rows.csv", index=False)
    acts = read_features(
        tmp_path / "x.npy", rows=tmp_path / "rows.csv", labels=tmp_path / "y.npy", groups="subject", site="vit.3"
    )
    np.testing.assert_array_equal(acts["vit", 3].numpy(), X.reshape(shape))
    assert acts.rows["group"].tolist() == SUBJECTS
    changed = np.lib.format.open_memmap(tmp_path / "x.npy", mode="r+")
    changed[0] = 7  # a copy in memory would not see it
    changed.flush()
    assert float(acts["vit.3"].reshape(6, -1)[0, 0]) == 7
    acts["vit.3"][1] = 5  # and what is changed in memory never reaches the file
    assert float(np.load(tmp_path / "x.npy").reshape(6, -1)[1, 0]) == X[1, 0]


def test_archives_give_a_site_per_array(tmp_path) -> None:
    arrays = {"vit.0": X, "vit.1": X[:, ::-1].copy(), "heads.1": X.reshape(6, 2, 2)}
    np.savez(tmp_path / "x.npz", **arrays, y=np.array(LABELS), subject=np.array(SUBJECTS))
    tensors = {name: torch.tensor(array) for name, array in arrays.items()} | {"y": torch.tensor(LABELS)}
    save_file(tensors, tmp_path / "x.safetensors")
    one = read_features(tmp_path / "x.npz", labels="y", groups="subject")
    other = read_features(tmp_path / "x.safetensors", labels="y", groups=np.array(SUBJECTS))
    for acts in (one, other):
        assert {str(site) for site in acts.sites} == set(arrays)
        assert all(np.array_equal(acts[name].numpy(), array) for name, array in arrays.items())
        assert acts.rows["label"].tolist() == LABELS
        assert acts.rows["group"].tolist() == SUBJECTS
    only = read_features(tmp_path / "x.npz", columns={"first": "vit.0"})
    assert [str(site) for site in only.sites] == ["first"]
    assert len(read_features(tmp_path / "x.npz", columns="vit").sites) == 2


def test_whole_numbers_and_booleans_become_float32(tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6).reshape(3, 2))
    pd.DataFrame({"a": [True, False, True], "b": [1, 2, 3]}).to_parquet(tmp_path / "x.parquet")
    assert read_features(tmp_path / "x.npy")["features"].dtype == torch.float32
    assert read_features(tmp_path / "x.parquet")["features"].tolist() == [[1, 1], [0, 2], [1, 3]]


def test_what_export_writes_is_read_back(tmp_path) -> None:
    acts = Activations.from_arrays({"resid_post.3": X, "z.1": X.reshape(6, 2, 2)}, labels=LABELS, groups=SUBJECTS)
    export(acts, tmp_path / "x.parquet", format="parquet")
    back = read_features(tmp_path / "x.parquet", labels="label", groups="group")
    np.testing.assert_array_equal(back["resid_post.3"].numpy(), X)
    np.testing.assert_array_equal(back["z.1.1"].numpy(), X.reshape(6, 2, 2)[:, 1])
    assert back.rows["label"].tolist() == LABELS


def test_a_column_of_texts_becomes_the_strings_that_groups_are_checked_by(tmp_path) -> None:
    TABLE.assign(text=list("abcdef")).to_parquet(tmp_path / "x.parquet")
    acts = read_features(tmp_path / "x.parquet", labels="state")
    assert acts.rows["string"].tolist() == list("abcdef")
    assert acts.rows["text"].tolist() == list(range(6))


def test_labels_of_the_table_and_groups_of_a_second_file(tmp_path) -> None:
    TABLE.drop(columns="subject").to_csv(tmp_path / "x.csv", index=False)
    acts = read_features(tmp_path / "x.csv", labels="state", groups="subject", rows=TABLE[["subject"]])
    assert acts["features"].shape == (6, 4)
    assert acts.rows["label"].tolist() == LABELS
    assert acts.rows["group"].tolist() == SUBJECTS


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_labels_and_groups_of_a_second_file_are_no_features_of_the_first(tmp_path, suffix: str) -> None:
    path = written(tmp_path, suffix)
    acts = read_features(path, rows=TABLE, labels="state", groups="eeg_3", beside=["subject"])
    np.testing.assert_allclose(acts["features"].numpy(), X[:, :3], rtol=1e-6)
    assert acts.rows["label"].tolist() == LABELS
    for options in ({"columns": "eeg_"}, {"columns": {"eeg.0": ["eeg_"]}}):
        assert read_features(path, rows=TABLE, groups="eeg_3", **options).tensors.popitem()[1].shape == (6, 3)
    with pytest.raises(ValueError, match="'eeg_3' is a feature and a label or group"):
        read_features(path, rows=TABLE, groups="eeg_3", columns=["eeg_3"])


def test_columns_beside_stay_in_the_rows_under_their_names(tmp_path) -> None:
    acts = read_features(written(tmp_path, ".csv"), beside=["state", "subject", "eeg_0", "not there"])
    assert acts["features"].shape == (6, 3)
    assert acts.rows["state"].tolist() == LABELS
    np.savez(tmp_path / "x.npz", a=X, b=X, y=np.array(LABELS))
    acts = read_features(tmp_path / "x.npz", beside=["y"])
    assert [str(site) for site in acts.sites] == ["a", "b"]
    assert acts.rows["y"].tolist() == LABELS
    assert len(read_features(tmp_path / "x.npz", beside=["b", "y"], rows=TABLE, labels="state").sites) == 1


def test_the_provenance_has_names_and_hash(tmp_path) -> None:
    path = written(tmp_path, ".csv")
    facts = read_features(path, columns={"e.0": "eeg_", "e.1": "state"}).provenance
    assert facts["columns"] == {"e.0": [f"eeg_{n}" for n in range(4)], "e.1": ["state"]}
    assert facts["xxh3_128"] == xxhash.xxh3_128_hexdigest(path.read_bytes())
    wide = pd.DataFrame(RNG.normal(size=(3, 40))).add_prefix("f")
    wide.to_parquet(tmp_path / "wide.parquet")
    facts = read_features(tmp_path / "wide.parquet").provenance
    assert facts["columns"] == {"features": {"count": 40, "first": "f0", "last": "f39"}}
    np.save(tmp_path / "x.npy", X)
    facts = read_features(tmp_path / "x.npy", rows=path).provenance
    assert facts["rows"] == {"file": "table.csv", "xxh3_128": xxhash.xxh3_128_hexdigest(path.read_bytes())}
    assert "columns" not in facts


def test_a_copy_of_the_label_is_warned_of(tmp_path) -> None:
    state = np.arange(40) % 2
    table = pd.DataFrame(RNG.normal(size=(40, 3))).add_prefix("f").assign(state=state, answer=4 - 3 * state)
    table.to_csv(tmp_path / "x.csv", index=False)
    with pytest.warns(UserWarning, match=r"x\.csv: 'answer' tells the label exactly.*Leave it out with columns="):
        read_features(tmp_path / "x.csv", labels="state")
    with pytest.warns(UserWarning, match="'state', 'answer' tell the label exactly"):
        read_features(tmp_path / "x.csv", labels=np.array(["a", "b"])[state])
    read_features(tmp_path / "x.csv", labels="state", columns="f")


def csv(text: str):
    return lambda path: path.with_suffix(".csv").write_text(text)


def npy(array: np.ndarray):
    return lambda path: np.save(path.with_suffix(".npy"), array, allow_pickle=True)


BAD = {
    "suffix": (lambda path: path.with_suffix(".mat").write_text(""), ".mat", {}, r"suffix '\.mat'. Give a \.npy"),
    "pickle": (npy(np.array([[1, "a"]], dtype=object)), ".npy", {}, "Python objects"),
    "not npy": (lambda path: path.with_suffix(".npy").write_text("x"), ".npy", {}, "bad.npy cannot be read"),
    "not npz": (lambda path: path.with_suffix(".npz").write_text("x"), ".npz", {}, "bad.npz"),
    "one axis": (npy(X[0]), ".npy", {}, r"shape \[4\]; expected \[row, d\]"),
    "NaN": (npy(np.where(np.arange(24).reshape(6, 4) == 9, np.nan, 0)), ".npy", {}, r"row 2, feature 1"),
    "columns of npy": (npy(X), ".npy", {"columns": "a"}, "has no names"),
    "labels": (npy(X), ".npy", {"labels": [1, 0]}, r"labels has shape \[2\] for 6 rows"),
    "rows": (npy(X), ".npy", {"rows": TABLE[:3]}, "6 rows of features, rows=the table 3 rows"),
    "no numbers": (csv("a,b\nx,y\n"), ".csv", {}, "no columns of numbers"),
    "no rows": (csv("a,b\n"), ".csv", {}, "has no rows"),
    "empty": (csv(""), ".csv", {}, "not a CSV table"),
    "twice": (csv("a,a\n1,2\n"), ".csv", {}, "names a column twice: 'a'"),
    "row numbers": (csv(",a\n0,2\n1,3\n"), ".csv", {}, "index=False"),
    "missing": (csv("a,b\n1,2\n3,\n"), ".csv", {}, "row 1 .counted from 0.: feature 'b' is missing"),
    "nearly": (csv("a,b\n1,2\n3,n/a\n5,6\n"), ".csv", {}, "column 'b' holds 'n/a' among numbers, in 1 of 3"),
    "text": (csv("a,b\n1,x\n"), ".csv", {"columns": ["a", "b"]}, "column .b. holds .* not numbers"),
    "infinite": (csv("a,b\n1,inf\n"), ".csv", {}, "infinite at row 0, feature 1"),
    "long line": (csv("a,b\n1,2,3\n"), ".csv", {}, "not a CSV table"),
    "empty label": (csv("a,label\n1,x\n2,\n"), ".csv", {"labels": "label"}, "row 1 .counted from 0.: column 'label'"),
    "parquet": (lambda path: path.with_suffix(".parquet").write_text("x"), ".parquet", {}, "cannot be read as Parquet"),
    "safetensors": (
        lambda path: path.with_suffix(".safetensors").write_text("x"),
        ".safetensors",
        {},
        "no safetensors",
    ),
    "feature and label": (csv("a,b\n1,2\n"), ".csv", {"columns": ["a"], "labels": "a"}, "a feature and a label"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_name_the_file_and_what_to_do(tmp_path, case: str) -> None:
    write, suffix, options, message = BAD[case]
    write(tmp_path / "bad")
    with pytest.raises(ValueError, match=message):
        read_features((tmp_path / "bad").with_suffix(suffix), **options)


def test_names_that_are_not_there_and_values_that_are_no_numbers(tmp_path) -> None:
    path = written(tmp_path, ".csv")
    with pytest.raises(KeyError, match=r"no column 'subjet'.*Did you mean 'subject'"):
        read_features(path, groups="subjet")
    with pytest.raises(KeyError, match="no column 'emg_'"):
        read_features(path, columns="emg_")
    np.savez(tmp_path / "x.npz", a=X, b=X[:3])
    with pytest.raises(KeyError, match="no array 'c'"):
        read_features(tmp_path / "x.npz", columns=["c"])
    np.savez(tmp_path / "y.npz", vit_0=X, vit_1=X)
    assert len(read_features(tmp_path / "y.npz", columns=["vit_"]).sites) == 2
    with pytest.raises(ValueError, match="site 's' is given 2 arrays"):
        read_features(tmp_path / "y.npz", columns={"s": "vit_"})
    with pytest.raises(ValueError, match="columns is empty"):
        read_features(path, columns={})
    with pytest.raises(ValueError, match=r"different numbers of rows, {'a': 6, 'b': 3}"):
        read_features(tmp_path / "x.npz")
    np.save(tmp_path / "text.npy", np.array([["a", "b"]]))
    with pytest.raises(TypeError, match=r"text\.npy: 'features' holds <U1"):
        read_features(tmp_path / "text.npy")
    with pytest.raises(FileNotFoundError, match=r"no file .*nowhere\.npy"):
        read_features(tmp_path / "nowhere.npy")
