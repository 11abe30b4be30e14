"""Labels of tokens: probed at every token of a text, grouped by text, several from one capture."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml

from microtome.app import grid_data, grid_run
from microtome.app.grid_commands import run_grid
from microtome.capture import Store
from microtome.data.catalogue import LabelledTexts
from microtome.data.runs import Run

BOTH = ("capture", "probe")
NOUNS = ("cat", "dog", "bird", "film", "book", "day")


def is_noun(text: str, offsets) -> list:
    """For words; the full stop has no label."""
    words = [text[start:stop] for start, stop in offsets]
    return [None if word == "." else ("noun" if word in NOUNS else "other") for word in words]


@pytest.fixture
def tokens(monkeypatch, tmp_path, model_folders):
    """A catalogue with one set, `words`: 30 texts by 15 authors; labels of texts and of tokens."""
    chance = np.random.default_rng(0)
    texts = [
        " ".join(f"the {chance.choice(['good', 'bad', 'old'])} {chance.choice(NOUNS)}" for _ in range(2 + row % 4))
        + " ."
        for row in range(30)
    ]
    table = pd.DataFrame({"text": texts, "group": np.arange(30) // 2, "is_late": np.arange(30) >= 15})
    numbers = [list(range(len(text.split()))) for text in texts]
    labels = {"part": is_noun, "place": numbers}

    kind = SimpleNamespace(labels={"is_late": "of texts"}, token_labels={"part": "", "place": ""}, group="group")
    monkeypatch.setattr(grid_data, "DATA_SETS", {"words": kind})
    monkeypatch.setattr(
        grid_data, "load_data", lambda name, **_: LabelledTexts(name, table, labels, {"rows": len(table)})
    )
    settings = {
        "name": "night",
        "out": str(tmp_path / "runs"),
        "models": model_folders[:1],
        "data": "words",
        "sites": "resid_post",
        "positions": "all",
        "labels": ["part", {"column": "place", "above": "median"}],
        "probe": {"folds": 2, "inner_folds": 2, "permutations": 20, "bootstraps": 100},
        "report": False,
    }

    def write(**changes):
        (tmp_path / "grid.yaml").write_text(yaml.safe_dump(settings | changes), encoding="utf-8")
        return tmp_path / "grid.yaml"

    return write, texts


def test_two_labels_of_tokens_from_one_capture(tokens, tmp_path, monkeypatch) -> None:
    write, texts = tokens
    captures = []
    real = grid_run.capture
    monkeypatch.setattr(grid_run, "capture", lambda *a, **k: captures.append(1) or real(*a, **k))
    assert run_grid(write(), BOTH) == 0
    assert len(captures) == 1
    folder = tmp_path / "runs" / "night"
    table = pd.read_parquet(folder / "summary.parquet").set_index("label")
    n_tokens = sum(len(text.split()) for text in texts)
    assert table.loc["place-above-median", "rows"] == n_tokens
    assert table.loc["part", "rows"] == n_tokens - 30  # full stops have no label
    assert set(table["tokens"]) == {n_tokens}
    assert set(table["groups"]) == {15}
    assert table.loc["part", "best_layer_auroc"] > 0.9
    run = Run.open(table.loc["part", "run"])
    assert run.provenance["rows"] == {"captured": n_tokens, "with_label": n_tokens - 30, "probed": n_tokens - 30}
    rows = run.table("rows")
    assert (rows["token"].str.strip().isin(NOUNS) != rows["label"]).all()  # "other" is the larger of the two
    store = Store.open(folder / "captures" / "words".join(["llama--", "--resid_post--all"]))
    assert store.rows["part"].isna().sum() == 30


def test_at_most_so_many_rows_by_whole_groups(tokens, tmp_path) -> None:
    write, _ = tokens
    limit = {"folds": 2, "inner_folds": 2, "permutations": 20, "bootstraps": 100, "rows": 120}
    assert run_grid(write(probe=limit), BOTH) == 0
    table = pd.read_parquet(tmp_path / "runs" / "night" / "summary.parquet")
    assert (table["rows"] <= 120).all()
    assert (table["rows"] > 90).all()
    assert (table["groups"] < 15).all()


def test_without_labels_the_catalogue_s_own_are_probed(tokens, tmp_path) -> None:
    write, _ = tokens
    assert run_grid(write(labels=None, positions="last"), BOTH) == 0
    [label] = pd.read_parquet(tmp_path / "runs" / "night" / "summary.parquet")["label"]
    assert label == "is_late"


def test_labels_of_tokens_at_other_positions_are_refused_before_any_work(tokens, tmp_path) -> None:
    write, _ = tokens
    with pytest.raises(ValueError, match=r"label 'part' of 'words' has a value per token.*positions: all"):
        run_grid(write(positions=["all", "last"]), BOTH)
    assert not (tmp_path / "runs").exists()
