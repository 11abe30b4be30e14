"""Every method by name: it fits and steers, strength 0 is the model to the bit, and fits are shared and repeatable."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from microtome.interventions.generation import generate
from microtome.interventions.methods import (
    METHODS,
    FittedMethod,
    MethodFits,
    depths_to_try,
    fit_method,
    strength_at_limit,
    strengths_about,
    strengths_tried,
)
from microtome.interventions.steering import steered
from microtome.interventions.steering_task import split_task

NOUNS = ("cat", "dog", "bird", "film", "book", "day", "man", "woman", "child", "house", "river", "tree", "city")
PLACES = ("in the house", "at the river", "with a dog", "by the tree", "on a day", "of the city")
# what leaves the model alone at strength 0; a controller at level 0 still drives towards the unwanted texts' mean
LEVELS = {"p", "pi", "pid"}


@pytest.fixture(scope="module")
def task():
    """Sentences of two kinds, in groups of their noun and place."""
    rows = [
        {"text": f"the {word} {noun} was {other} {place} .", "label": label, "group": f"{noun} {place}"}
        for noun in NOUNS
        for place in PLACES
        for label, word, other in ((True, "happy", "good"), (False, "sad", "bad"))
    ]
    return split_task(
        pd.DataFrame(rows),
        name="toy",
        contrast=40,
        prompts=4,
        dev_prompts=4,
        neutral=["the dog sat in the old house and slept ."],
        attribute_words=(("!", "good"), ("?", "bad")),
    )


@pytest.fixture(scope="module")
def fits(llama, task):
    return MethodFits(llama, task, "resid_post.1", positions="all")


@torch.no_grad()
def logits(model, steering=None):
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
    if steering is None:
        return model.module(input_ids=ids).logits
    with steered(model, steering):
        return model.module(input_ids=ids).logits


@pytest.mark.parametrize("name", METHODS)
def test_every_method_fits_and_steers(llama, task, fits, name):
    fitted = fit_method(name, fits)
    assert fit_method(name, fits) is fitted
    assert list(fitted.strengths) == sorted(set(fitted.strengths))
    assert fitted.strengths[0] > 0
    assert fitted.strengths[-1] <= fitted.largest
    clean = logits(llama)
    strongest = fitted.steer(fitted.strengths[-1])
    if name != "conditional":
        assert (logits(llama, strongest) - clean).abs().max() > 1e-3
    if name not in LEVELS:
        assert torch.equal(logits(llama, fitted.steer(0.0)), clean)
    for strength in (fitted.strengths[0], fitted.strengths[-1]):
        said = generate(llama, task.prompts["test"]["text"].tolist(), fitted.steer(strength), 4)
        frame = said.ledger.to_frame()
        assert set(frame["site"]) == {str(one.site) for one in strongest}
        assert frame[["relative", "effort"]].notna().any(axis=None)
    assert torch.equal(logits(llama), clean)


@pytest.mark.parametrize("name", ["mean", "iti", "nl-iti", "linear-act", "pid-act"])
def test_a_method_is_fitted_the_same_again(llama, task, fits, name):
    one, other = fit_method(name, fits), fit_method(name, MethodFits(llama, task, "resid_post.1", positions="all"))
    assert one is not other
    for key, value in one.artefact.tensors.items():
        assert torch.equal(other.artefact.tensors[key], value)


def test_effort_grows_with_strength(llama, task, fits):
    """Of the methods whose strength scales what is added."""
    for name in ("mean", "whitened", "pca", "logistic", "mean-layers", "iti", "nl-iti", "act-add"):
        fitted = fit_method(name, fits)
        efforts = [
            generate(llama, task.prompts["test"]["text"].tolist(), fitted.steer(s), 2).ledger.to_frame()["effort"].sum()
            for s in fitted.strengths
        ]
        assert efforts == sorted(efforts)


def test_strength_one_of_a_contrast_is_the_gap_of_the_classes(fits):
    rows = fits.rows.activations["resid_post.1"].double()
    difference = rows[fits.rows.wanted].mean(0) - rows[~fits.rows.wanted].mean(0)
    for name in ("mean", "whitened", "pca", "logistic"):
        vector = fit_method(name, fits).artefact.vector().double()
        assert float(vector @ difference) > 0
        assert float(vector @ difference / vector.norm()) == pytest.approx(float(vector.norm()), rel=1e-4)


def test_a_gate_opens_for_what_reads_as_unwanted(llama, fits):
    steering = fit_method("conditional", fits).steer(2.0)
    (one,) = steering
    said = generate(llama, [*fits.task.texts(True), *fits.task.texts(False)], steering, 1, strength=1.0)
    decided = one.gate.decisions().groupby("text")["gate"].last()
    n = len(fits.task.texts(True))
    assert decided[n:].mean() > decided[:n].mean()
    assert len(said.table) == 2 * n


def test_unknown_names_and_sites_are_said(llama, task):
    with pytest.raises(ValueError, match="give one of mean, whitened"):
        fit_method("median", MethodFits(llama, task, "resid_post.1"))
    with pytest.raises(ValueError, match="has no layer"):
        fit_method("mean-layers", MethodFits(llama, task, "resid_post"))
    with pytest.raises((KeyError, IndexError)):
        fit_method("mean", MethodFits(llama, task, "resid_post.9"))


def test_depths_are_spread_over_where_the_classes_differ(llama, fits):
    sites = depths_to_try(llama, fits.rows, 2)
    assert len(sites) == 2
    assert sites == sorted(sites)
    assert set(sites) <= set(fits.rows.sites)


def test_another_site_shares_what_was_captured(fits) -> None:
    other = fits.at("resid_post.2")
    assert other.layer == 2
    assert fit_method("mean", other).artefact.sites == ("resid_post.2",)
    assert other.rows is fits.rows
    assert other.kept is not fits.kept


def test_shuffled_labels_give_a_vector_as_long_as_the_one_they_doubt(fits) -> None:
    vector = fits.means(["resid_post.1"])
    found = fits.of_shuffled_labels(vector)
    assert found.sites == vector.sites
    assert float(found.vector().norm()) == pytest.approx(float(vector.vector().norm()), rel=1e-5)
    assert float(torch.cosine_similarity(found.vector(), vector.vector(), dim=0)) < 0.9


def test_strengths_lie_about_the_limit_or_below_the_largest(fits) -> None:
    def squared(steering) -> float:
        (one,) = steering
        return float(one.strength) ** 2

    free = FittedMethod("free", fit_method("mean", fits).steer, (0.5, 1.0, 2.0, 3.0, 4.0))
    tried = strengths_tried(free, squared, 9.0)
    assert strength_at_limit(tried) == pytest.approx(3.0, rel=0.06)
    assert strengths_about(tried) == pytest.approx([3 * share for share in (0.25, 0.5, 0.75, 1, 1.5)], rel=0.06)
    bound = replace(free, largest=1.0)
    tried = strengths_tried(bound, squared, 9.0)
    assert not tried["is_reached"].any()
    assert strengths_about(tried) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
