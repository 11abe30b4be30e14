"""Concept edits at subjects: the closed form on a linear relation, the right tokens of each text, and refusals."""

import pytest
import torch
from steering_steps import noise

from microtome.capture import capture
from microtome.interventions.concept_edit import concept_edit
from microtome.interventions.generation import generate
from microtome.lenses.concept_directions import ConceptDirections, concept_directions
from microtome.lenses.relations import RelationOperator

D = 32
TEXTS = ["the cat sat in the house .", "she liked the good old film .", "a man ran"]


@pytest.fixture(scope="module")
def concepts() -> ConceptDirections:
    vectors = torch.nn.functional.normalize(noise(3, D), dim=1)
    return ConceptDirections(("a", "b", "c"), vectors, (1, 1, 1), 1, torch.zeros(D))


def operator(matrix: torch.Tensor) -> RelationOperator:
    return RelationOperator((1,), matrix[None], noise(D, seed=5)[None])


def test_a_linear_relation_is_inverted() -> None:
    matrix = noise(D, D) / D**0.5 + torch.eye(D)
    relation, subjects = operator(matrix), noise(6, D, seed=1)
    objects = relation(subjects, 1)
    names = [f"{n}" for n in range(6)]
    whole = concept_directions(relation, 1, D, objects, names)
    torch.testing.assert_close(whole.vectors, torch.nn.functional.normalize(subjects, dim=1), rtol=1e-3, atol=1e-3)
    v = torch.linalg.svd(matrix.double()).Vh[:8].float()
    cut = concept_directions(relation, 1, 8, objects, names)
    kept = torch.nn.functional.normalize(subjects @ v.T @ v, dim=1)
    torch.testing.assert_close(cut.vectors, kept, rtol=1e-3, atol=1e-3)


def test_each_text_is_edited_at_its_own_subject(llama, concepts) -> None:
    edit = concept_edit(llama, concepts, ["a", "b", "a"], ["b", "c", "b"], [1, 4, 1], scale=2.0)
    clean, edited = (
        capture(llama, TEXTS, ["resid_pre.1"], "all", edits=edits, progress=False)
        for edits in (None, edit.edits(llama))
    )
    moved = edited["resid_pre.1"] - clean["resid_pre.1"]
    for row, (text, position) in enumerate(zip(clean.rows["text"], clean.rows["position"], strict=True)):
        if position == (1, 4, 1)[text]:
            new, old = concepts.vectors[(1, 2, 1)[text]], concepts.vectors[(0, 1, 0)[text]]
            expected = 2 * clean["resid_pre.1"][row].norm() * (new - old)
            torch.testing.assert_close(moved[row], expected, rtol=1e-4, atol=1e-4)
        else:
            assert not moved[row].any()


def test_it_acts_in_the_prompt_alone_and_at_all_depths_if_asked(llama, concepts) -> None:
    edit = concept_edit(llama, concepts, ["a"], ["b"], [1], depths=[0, 1, 2])
    found = generate(llama, TEXTS[:1], edit, 4).ledger.to_frame()
    assert set(found["site"]) == {"resid_pre.0", "resid_post.0", "resid_post.1"}  # depth l is what block l reads
    assert found.groupby("step")["tokens"].sum().tolist() == [3, 0, 0, 0]


def test_it_is_the_swap_of_the_relation_study(llama, concepts) -> None:
    subject = capture(llama, TEXTS[:1], ["resid_pre.1"], [1], progress=False)["resid_pre.1"]
    edit = concept_edit(llama, concepts, ["a"], ["c"], [1], scale=1.5)
    after = capture(llama, TEXTS[:1], ["resid_pre.1"], [1], edits=edit.edits(llama), progress=False)["resid_pre.1"]
    torch.testing.assert_close(after - subject, concepts.swap(subject, ["a"], ["c"], scale=1.5), rtol=1e-4, atol=1e-5)


def test_what_is_no_edit_is_refused(llama, concepts) -> None:
    with pytest.raises(KeyError, match="no direction"):
        concept_edit(llama, concepts, ["a"], ["z"], [1])
    with pytest.raises(ValueError, match="itself"):
        concept_edit(llama, concepts, ["a"], ["a"], [1])
    with pytest.raises(ValueError, match="one each"):
        concept_edit(llama, concepts, ["a"], ["b"], [1, 2])
    edit = concept_edit(llama, concepts, ["a"], ["b"], [1])
    with pytest.raises(ValueError, match="Positions of 1 texts"):
        capture(llama, TEXTS, ["logits"], "last", edits=edit.edits(llama), progress=False)
