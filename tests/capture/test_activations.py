"""The Activations value: names, selections, arrays from elsewhere, joining, display."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture.activations import Activations
from microtome.capture.sites import Site

N = 6


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(n_rows: int = N, first_text: int = 0, seed: int = 0) -> Activations:
    rows = pd.DataFrame(
        {
            "text": np.arange(n_rows) // 2 + first_text,
            "position": np.arange(n_rows) % 2,
            "token": [f"<{n}>" for n in range(n_rows)],
            "label": np.arange(n_rows) % 3,
        }
    )
    tensors = {Site("resid_post", layer): draw(n_rows, 8, seed=seed + layer) for layer in range(3)}
    tensors |= {Site("z", layer): draw(n_rows, 4, 2, seed=seed + 10 + layer) for layer in range(3)}
    tensors[Site("k", 1)] = draw(n_rows, 2, 2, seed=seed + 20)
    return Activations(rows, tensors, {"model": "tiny"})


@pytest.fixture
def acts() -> Activations:
    return make()


def assert_same(one: Activations, other: Activations) -> None:
    pd.testing.assert_frame_equal(one.rows, other.rows)
    assert list(one.tensors) == list(other.tensors)
    for site, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[site].dtype
        assert torch.equal(tensor, other.tensors[site])
    assert one.provenance == other.provenance


# Names


@pytest.mark.parametrize("name", ["z.1", ("z", 1), "blocks.1.attn.hook_z", "z1", Site("z", 1)])
def test_every_spelling_is_the_same_tensor(acts, name):
    assert acts[name] is acts.tensors[Site("z", 1)]
    assert name in acts


@pytest.mark.parametrize("name", ["z.1.3", ("z", 1, 3), Site("z", 1, 3)])
def test_one_head_is_its_slice(acts, name):
    assert torch.equal(acts[name], acts["z", 1][:, 3])
    assert torch.equal(acts[name], acts.sel(head=3, kind="z", layer=1)[name])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "z.7",
            r"z.7 was not captured. Did you mean .*'z.[012]'.*Captured: resid_post.0-2 \[8\], z.0-2 \[4 x 2\], k.1",
        ),
        ("resid_pots.1", "resid_pots.1 was not captured. Did you mean 'resid_post.1'"),
        ("resid_mid.1", "resid_mid.1 was not captured"),
        ("z.1.4", "z.1.4: z.1 has 4 heads, 0 to 3"),
        ("z", r"z means 3 sites: name one, as in 'z.0', or use sel\(kind"),
        ("resid_post.1.2", "resid_post has no heads"),
        ("nothing", "nothing was not captured"),
    ],
)
def test_unknown_names_list_near_matches(acts, name, message):
    with pytest.raises(KeyError, match=message):
        acts[name]
    assert name not in acts


def test_iteration_goes_over_sites(acts):
    assert tuple(acts) == acts.sites == tuple(acts.tensors)
    assert all(site in acts for site in acts)


# Selections of sites


def test_selecting_everything_changes_nothing(acts):
    assert_same(acts.sel(), acts)
    assert_same(acts.sel(kind=["resid_post", "z", "k"], layer=range(3), stack=""), acts)


def test_selections_meet(acts):
    assert acts.sel(layer=1).sites == (Site("resid_post", 1), Site("z", 1), Site("k", 1))
    assert_same(acts.sel(kind="z").sel(layer=[0, 2]), acts.sel(layer=[0, 2], kind="z"))
    assert acts.sel(kind="z", head=[3, 0]).sites[:2] == (Site("z", 0, 3), Site("z", 0, 0))


def test_selecting_a_head_twice_is_selecting_it_once(acts):
    once = acts.sel(kind="z", head=[1, 2])
    assert_same(once.sel(head=2), acts.sel(kind="z", head=2))
    assert {tensor.shape for tensor in once.tensors.values()} == {(N, 2)}


def test_selecting_heads_drops_what_has_none(acts):
    assert acts.sel(layer=1, head=1).sites == (Site("z", 1, 1), Site("k", 1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 9}, r"sel\(layer=9\): no site with layer 9; there are resid_post.0-2"),
        ({"layer": [1, 9]}, "no site with layer 9"),
        ({"kind": "q"}, r"sel\(kind='q'\): no site with kind 'q'"),
        ({"kind": "k", "layer": 0}, r"no site with layer 0; there are k.1 \[2 x 2\]"),
        ({"head": 3}, r"k.1 has heads 0 to 1, no head 3. Restrict kind= as well"),
        ({"kind": "resid_post", "head": 0}, "no site with head 0; there are resid_post.0-2"),
        ({"stack": "encoder"}, "no site with stack 'encoder'"),
    ],
)
def test_selecting_what_is_not_there(acts, options, message):
    with pytest.raises(KeyError, match=message):
        acts.sel(**options)


# Selections of rows


@pytest.mark.parametrize(
    "which",
    [
        "label == 1",
        lambda acts: acts.rows["label"] == 1,
        lambda acts: (acts.rows["label"] == 1).to_numpy(),
        lambda acts: torch.tensor((acts.rows["label"] == 1).to_numpy()),
        lambda acts: [label == 1 for label in acts.rows["label"]],
        lambda acts: [1, 4],
        lambda acts: [-5, -2],
        lambda acts: slice(1, 5, 3),
        lambda acts: (1, 4),
        lambda acts: range(1, 5, 3),
        lambda acts: pd.Index([1, 4]),
        lambda acts: np.array([1, 4], dtype=np.uint8),
        lambda acts: np.array([1, 4], dtype=object),
        lambda acts: (acts.rows["label"] == 1).astype(object),
        lambda acts: (acts.rows["label"] == 1).to_numpy(dtype=object),
        lambda acts: (acts.rows["label"] == 1).astype("boolean").mask(acts.rows["label"] == 0),
        lambda acts: pd.Series([1, 4], index=[7, 9]),
        "(label == 1).astype('boolean')",
        "(label == 1).tolist()",
        "index in [1, 4]",
    ],
)
def test_every_way_to_name_rows_is_the_same(acts, which):
    chosen = acts.select_rows(which(acts) if callable(which) else which)
    assert chosen.rows["token"].tolist() == ["<1>", "<4>"]
    for site, tensor in chosen.tensors.items():
        assert torch.equal(tensor, acts.tensors[site][[1, 4]])


def test_all_rows_and_both_halves_are_the_whole(acts):
    assert_same(acts.select_rows(np.ones(N, dtype=bool)), acts)
    assert_same(Activations.concat([acts.select_rows("text < 1"), acts.select_rows("text >= 1")]), acts)


def test_rows_are_given_in_the_order_wanted(acts):
    backwards = acts.select_rows(range(N - 1, -1, -1))
    assert_same(backwards.select_rows(range(N - 1, -1, -1)), acts)
    assert backwards.rows["token"].iloc[0] == "<5>"


@pytest.mark.parametrize(
    ("which", "error", "message"),
    [
        ("label == 7", ValueError, "No row left of 6: 'label == 7' matches none"),
        ([True], ValueError, r"mask has shape \(1,\); expected one Boolean per row, \(6,\)"),
        ([6], IndexError, "out-of-bounds"),
        ([], ValueError, r"No row left of 6: \[\] matches none"),
        (slice(9, 12), ValueError, r"No row left of 6: slice\(9, 12, None\) matches none"),
        (np.array([True], dtype=object), ValueError, r"mask has shape \(1,\); expected one Boolean per row, \(6,\)"),
        *(
            (query, ValueError, rf"'{re.escape(query)}' is no condition, true or false of each row. An example: ")
            for query in (
                "label + 1",
                "label",
                "-label",
                "label = 1",
                "1",
                "True",
                "[0, 1]",
                "label.head(2) > 0",
                "token",
                "index",
            )
        ),
        ("label.nothing > 1", ValueError, "'label.nothing > 1' is no query over the columns"),
        ("[x for x in label]", ValueError, "is no query over the columns"),
        *(
            (which, TypeError, r"^select_rows\(.*expected a condition .*one Boolean per row, a slice, or a list")
            for which in (
                5,
                True,
                {1, 4},
                (n for n in range(2)),
                None,
                [0.0, 1.0],
                ["0"],
                [[0, 1]],
                {0: 1},
                [None, True],
            )
        ),
        (torch.tensor(3), TypeError, r"^select_rows\(tensor\(3\)\): expected a condition"),
    ],
)
def test_impossible_rows(acts, which, error, message):
    with pytest.raises(error, match=message):
        Activations.select_rows.__wrapped__(acts, which)


# Arrays from elsewhere


def test_features_of_any_backbone():
    arrays = {
        "backbone.3": np.ones((4, 5)),
        "backbone.4": torch.ones(4, 5, dtype=torch.float64),
        "wave.2.1": draw(4, 3),
        "heads": draw(4, 2, 3),
        "model.layers.7": draw(4, 5).tolist(),
        ("z", 5): draw(4, 2, 3),
    }
    acts = Activations.from_arrays(arrays, labels=["a", "b", "a", "b"], groups=[1, 1, 2, 2])
    assert acts.sites == (
        Site("backbone", 3),
        Site("backbone", 4),
        Site("wave", 2, 1),
        Site("heads"),
        Site("model.layers", 7),
        Site("z", 5),
    )
    for name in arrays:
        assert name in acts
    assert torch.equal(acts["backbone", 3], acts["backbone.3"])
    assert torch.equal(acts[Site("heads", head=1)], acts["heads"][:, 1])
    assert acts.sel(kind="backbone", layer=4).sites == (Site("backbone", 4),)
    assert acts.rows["text"].tolist() == [0, 1, 2, 3]
    assert (acts.rows["position"] == -1).all()
    assert acts.rows["label"].tolist() == ["a", "b", "a", "b"]
    assert acts.rows["group"].tolist() == [1, 1, 2, 2]


def test_rows_given_are_kept_and_completed():
    rows = pd.DataFrame({"subject": ["x", "y"], "text": [7, 7]}, index=[5, 3])
    acts = Activations.from_arrays({"eeg": draw(2, 3)}, rows=rows)
    assert list(acts.rows) == ["subject", "text", "position", "token"]
    assert acts.rows["subject"].tolist() == ["x", "y"]
    assert list(rows) == ["subject", "text"], "the caller's table is not touched"


@pytest.mark.parametrize("array", [np.arange(6.0)[::-1].reshape(2, 3), np.broadcast_to(np.float32(1), (2, 3))])
def test_awkward_arrays_are_taken(array):
    array.flags.writeable = False
    assert np.array_equal(Activations.from_arrays({"eeg": array})["eeg"].numpy(), array)


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        ({}, {}, ValueError, "arrays is empty"),
        ({"a": np.ones(3)}, {}, ValueError, r"a has shape \[3\]; expected \[row, d\] or \[row, head, d\]"),
        ({"a": np.ones((0, 3))}, {}, ValueError, "no axis empty"),
        ({"z.5": np.ones((2, 3))}, {}, ValueError, r"z.5 has shape \[2, 3\]; expected \[row, head, d\].*'z.5.0'"),
        ({"resid_post.1": np.ones((2, 3, 4))}, {}, ValueError, r"expected \[row, d\], no axis empty"),
        ({"a": np.ones((2, 3)), "b": np.ones((3, 3))}, {}, ValueError, "b has 3 rows, the row table 2"),
        ({"a": np.ones((2, 3), dtype=int)}, {}, TypeError, "'a' holds int64; activations are floating point"),
        ({"z.5.0": np.ones((2, 3)), ("z", 5, 0): np.ones((2, 3))}, {}, ValueError, "both mean the site z.5.0"),
        ({"z.5.0.1": np.ones((2, 3))}, {}, ValueError, "a site has at most a layer and a head"),
        ({"": np.ones((2, 3))}, {}, ValueError, "No kind of site is called ''"),
        ({"a": np.ones((2, 3))}, {"labels": [1]}, ValueError, "labels has 1 entries, the table 2 rows"),
        ({"a": np.ones((2, 3))}, {"rows": pd.DataFrame({"n": [1]})}, ValueError, "a has 2 rows, the row table 1"),
        (
            {"a": np.ones((2, 3))},
            {"rows": pd.DataFrame({"label": [1, 2]}), "labels": [1, 2]},
            ValueError,
            "rows has a column 'label' already",
        ),
        (
            {"a": np.ones((2, 3))},
            {"rows": pd.DataFrame({"text": ["the cat", "a dog"]})},
            TypeError,
            r"rows\['text'\] holds str; expected whole numbers. Rename that column",
        ),
    ],
)
def test_bad_arrays_are_named(arrays, options, error, message):
    with pytest.raises(error, match=message):
        Activations.from_arrays(arrays, **options)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_are_named_unless_allowed(bad):
    array = np.ones((3, 2))
    array[1, 1] = bad
    rows = pd.DataFrame({"text": [4, 5, 6], "position": [0, 9, 0], "token": ["a", "b", "c"]})
    with pytest.raises(ValueError, match=r"eeg is NaN or infinite in 1 of 3 rows, first in row 1 \(text 5, position 9"):
        Activations.from_arrays({"eeg": array}, rows=rows)
    kept = Activations.from_arrays({"eeg": array}, rows=rows, allow_nonfinite=True)
    np.testing.assert_array_equal(kept["eeg"].numpy(), array)


# Joining


def test_concat_of_one_is_itself(acts):
    assert_same(Activations.concat([acts]), acts)


def test_concat_keeps_disjoint_texts_and_renumbers_others_on_request(acts):
    other = make(4, first_text=50, seed=5)
    joined = Activations.concat([acts, other])
    assert joined.rows["text"].tolist() == [0, 0, 1, 1, 2, 2, 50, 50, 51, 51]
    assert torch.equal(joined["z", 2], torch.cat([acts["z", 2], other["z", 2]]))
    again = Activations.concat([acts, make(4, seed=5)], same_texts=False)
    assert again.rows["text"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    same = Activations.concat([acts, make(4, seed=5)], same_texts=True)
    assert same.rows["text"].tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]
    assert same.provenance == {"model": "tiny"}


def test_concat_refuses_what_does_not_fit(acts):
    with pytest.raises(ValueError, match=r"Several parts have text 0 \(3 such numbers\). Pass same_texts=True"):
        Activations.concat([acts, acts])
    with pytest.raises(ValueError, match="at least one"):
        Activations.concat([])
    with pytest.raises(ValueError, match=r"part 1 has Activations.*Sites, widths and dtypes must agree"):
        Activations.concat([acts, acts.sel(kind="z")])
    unlabelled = Activations(acts.rows.drop(columns="label"), acts.tensors, {})
    with pytest.raises(ValueError, match="part 1 has columns"):
        Activations.concat([acts, unlabelled], same_texts=True)


# Construction and display


def test_rows_and_tensors_must_agree(acts):
    with pytest.raises(ValueError, match=r"rows lacks \['position', 'token'\]"):
        Activations(acts.rows[["text"]], acts.tensors, {})
    with pytest.raises(ValueError, match="index other than 0, 1"):
        Activations(acts.rows.iloc[::-1], acts.tensors, {})
    with pytest.raises(ValueError, match=r"resid_post.0 has 6 rows, the row table 5"):
        Activations(acts.rows.head(5), acts.tensors, {})
    with pytest.raises(ValueError, match=r"Two sites are both spelled 'x.3'"):
        Activations(acts.rows, {Site("x", 3): draw(N, 2), Site("x.3"): draw(N, 2)}, {})


def test_repr_says_what_is_inside(acts):
    assert repr(acts) == (
        "Activations(6 rows of 3 texts, 7 sites: resid_post.0-2 [8], z.0-2 [4 x 2], k.1 [2 x 2]; float32, 0.0 MB)"
    )
    assert acts.nbytes == 4 * N * (3 * 8 + 3 * 8 + 4)
    assert acts.n_rows == N


def test_html_escapes_what_the_texts_say(acts):
    rows = acts.rows.assign(token="<script>alert(1)</script>")
    page = Activations(rows, acts.tensors, {})._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    named = Activations.from_arrays({"<b>": draw(2, 3)})._repr_html_()
    assert "<b>" not in named
