"""Which columns are features: names, prefixes, what is reserved, and how they are said."""

import pytest

from microtome.capture.feature_columns import chosen_names, few_or_ends, said_columns

KNOWN = ["eeg_1", "eeg_10", "eeg_11", "frontal_0", "frontal_1", "y"]


def chosen(wanted, reserved=("y",)) -> list[str]:
    return chosen_names(KNOWN, wanted, reserved, "eeg.csv has no column")


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("eeg_1", ["eeg_1"]),  # a column of that name comes before the prefix
        ("eeg_", ["eeg_1", "eeg_10", "eeg_11"]),
        (["frontal_", "eeg_11"], ["frontal_0", "frontal_1", "eeg_11"]),
        (["eeg_", "eeg_10"], ["eeg_1", "eeg_10", "eeg_11"]),
    ],
)
def test_a_name_or_else_a_prefix(wanted, names) -> None:
    assert chosen(wanted) == names


def test_a_reserved_name_is_in_no_prefix_and_refused_by_name() -> None:
    assert chosen("eeg_1", reserved=()) == ["eeg_1"]
    assert chosen("eeg", reserved=("eeg_10",)) == ["eeg_1", "eeg_11"]
    with pytest.raises(ValueError, match=r"^eeg\.csv: 'y' is a feature and a label or group"):
        chosen(["frontal_0", "y"])
    with pytest.raises(ValueError, match="named twice"):
        chosen(["eeg_1", "eeg_1"])
    for nothing in ([], "", ["eeg_1", ""]):
        with pytest.raises(ValueError, match="columns is empty"):
            chosen(nothing)


@pytest.mark.parametrize(
    ("wanted", "near"), [("frontl_", "frontal_0"), ("frontal0", "frontal_0"), ("EEG_", ""), ("z", "")]
)
def test_what_matches_nothing_names_what_is_near(wanted: str, near: str) -> None:
    with pytest.raises(KeyError, match=f"no column '{wanted}' and none that begins so; there are .*{near}") as error:
        chosen(wanted)
    assert ("Did you mean" in str(error.value)) == bool(near)


def test_features_are_said_so_that_a_stray_one_is_seen() -> None:
    frontal = [f"frontal_{n}_alpha" for n in range(33)]
    assert said_columns({"features": [*frontal, "trial"]}) == (
        "34 features: frontal_0_alpha ... frontal_32_alpha, trial"
    )
    stray = [*frontal[:20], "trial", *frontal[20:]]
    assert "frontal_19_alpha, trial, frontal_20_alpha ..." in said_columns({"features": stray})
    assert said_columns({"a.0": ["x"], "a.1": ["y", "z"]}) == "a.0: 1 feature: x; a.1: 2 features: y, z"
    assert said_columns({f"a.{n}": ["x", "y"] for n in range(9)}) == "18 features at 9 sites: a.0 ... a.8"
    words = [letter * 3 for letter in "abcdefghijklmn"]
    assert said_columns({"s": words}) == "14 features: aaa, bbb, ccc, ddd, eee, fff ... mmm, nnn"


def test_many_names_are_kept_by_their_ends() -> None:
    assert few_or_ends(KNOWN) == KNOWN
    assert few_or_ends([str(n) for n in range(13)]) == {"count": 13, "first": "0", "last": "12"}


def test_a_prefix_is_near_to_the_beginning_of_a_long_name() -> None:
    with pytest.raises(KeyError, match="Did you mean 'frontal_0_alpha_power_db'"):
        chosen_names(["frontal_0_alpha_power_db", "y"], "frontl_", (), "eeg.csv has no column")
