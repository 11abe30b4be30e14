import pandas as pd
import pytest

from microtome.figures.sweep_rows import described, rows_of_kind


def test_rows_are_those_of_the_kind_in_order(sweep_table):
    table = sweep_table(3, 4)
    rows = rows_of_kind(table.sample(frac=1, random_state=0), "z", "auroc")
    assert rows[["layer", "head"]].to_numpy().tolist() == [[layer, head] for layer in range(3) for head in range(4)]
    assert rows_of_kind(table, "resid_post", "auroc")["head"].tolist() == [-1, -1, -1]


def test_a_row_in_words():
    row = {
        "layer": 5,
        "head": 3,
        "auroc": 0.8123,
        "auroc_low": 0.78,
        "auroc_high": 0.84,
        "control_auroc": 0.508,
        "p_best_site": 0.001,
        "accuracy": 0.74,
        "accuracy_low": 0.7,
        "accuracy_high": 0.78,
        "selectivity": 0.304,
    }
    assert described(pd.Series(row, dtype=object), "auroc") == (
        "<b>L5H3</b>  AUROC 0.81 [0.78, 0.84], control 0.51, p 0.001<br>accuracy 0.74 [0.70, 0.78], selectivity 0.30"
    )
    bare = {"layer": 12, "head": -1, "selectivity": 0.3, "p_best_site": float("nan"), "auroc": None}
    assert described(pd.Series(bare, dtype=object), "selectivity") == "<b>L12</b>  selectivity 0.30"


def test_errors_name_what_is_there(sweep_table):
    table = sweep_table(3, 2)
    with pytest.raises(KeyError, match=r"no column \['kind', 'head'\]; it has \['site'"):
        rows_of_kind(table.drop(columns=["kind", "head"]), "z", "auroc")
    with pytest.raises(KeyError, match=r"no column \['f1'\]"):
        rows_of_kind(table, "z", "f1")
    with pytest.raises(ValueError, match=r"no rows of kind 'q'; its kinds are \['resid_post', 'z'\]"):
        rows_of_kind(table, "q", "auroc")
    with pytest.raises(ValueError, match=r"column 'site' holds no numbers. Draw one of \['layer'"):
        rows_of_kind(table, "z", "site")
    with pytest.raises(ValueError, match="several rows for layer 1, head 0"):
        rows_of_kind(pd.concat([table, table[table["site"] == "z.1.0"]]), "z", "auroc")
    with pytest.raises(ValueError, match="has rows without a layer"):
        rows_of_kind(table.assign(layer=table["layer"].astype("Int64").where(table["head"].isna())), "z", "auroc")
