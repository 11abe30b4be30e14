"""Whatever is wrong with an edit is said with what to do, and no hook acts after it."""

import math

import pytest
import torch
from steering_steps import noise

from microtome.capture.hooks import active_taps, detach
from microtome.capture.taps import TapNeverFired
from microtome.interventions.activation_addition import activation_addition
from microtome.interventions.artefact import Artefact, made_on
from microtome.interventions.contrast import ContrastRows, contrast, contrast_rows
from microtome.interventions.generation import generate
from microtome.interventions.ledger import NeverActed
from microtome.interventions.operations import Add, Affine, Feedback, Function, Project, Rotate
from microtome.interventions.positions import Tokens, checked_positions
from microtome.interventions.steering import Intervention, Steering, checked_strength, steered

PROMPTS = ["the cat", "she liked the good old film"]


def push(site="resid_post.1", width=32, **more) -> Steering:
    return Steering(Intervention(site, Add(noise(width)), **more))


def write(steering: Steering, **more):
    return lambda model: generate(model, PROMPTS, steering, 3, **more)


def fails(x, at):
    raise ArithmeticError("inside the edit")


def half_way(x, at):
    if at.call.step == 2:
        raise ArithmeticError("inside the edit")
    return torch.zeros_like(x)


def no_forward(model):
    with steered(model, push()):
        pass


def trunk_alone(model):
    """The norm after the blocks is called without them: the edit's site is never reached."""
    with steered(model, push()):
        model.module.model.norm(torch.zeros(1, 1, 32))


def one_class(model):
    return contrast_rows(model, PROMPTS, [])


def identical(model):
    return contrast_rows(model, PROMPTS, PROMPTS[::-1])


def same_there(model):
    """The first token of both sets is the same word, so that position 0 reads the same."""
    rows = contrast_rows(model, ["the cat ran", "the happy dog"], ["the sad man", "the house"], positions=0)
    return contrast(model, rows)


def one_label(model):
    rows = ContrastRows({"resid_post.1": noise(4, 32)}, torch.ones(4, dtype=torch.bool), "last")
    return contrast(model, rows)


def other_model(model):
    facts = {**made_on(model), "weight_sha256": "0" * 64, "model": "another"}
    return Artefact("add", ("resid_post.1",), {"vector": noise(1, 32)}, facts=facts).steering(model)


BAD = {
    "wrong width": (write(push(width=16)), ValueError, r"16 channels, resid_post\.1 has 32"),
    "wrong width at a head": (write(push("z.1.2")), ValueError, r"32 channels, z\.1\.2 has 8"),
    "unknown layer": (write(push("resid_post.3")), IndexError, "layer"),
    "unknown head": (write(push("z.1.4", 8)), IndexError, "head"),
    "unknown kind": (lambda model: push("residual.1"), ValueError, "Kinds: embed"),
    "site of another model": (write(push("cross_out.1")), KeyError, "cross_out"),
    "made for another model": (other_model, ValueError, "Fit it on this model, or load the other one"),
    "zero direction": (lambda model: Add(torch.zeros(32)), ValueError, "is zero.*two equal sets"),
    "zero projection": (lambda model: Project(torch.zeros(32)), ValueError, "is zero"),
    "zero reading": (lambda model: Feedback(torch.zeros(32), noise(32), 1.0), ValueError, "is zero"),
    "flat plane": (lambda model: Rotate(noise(32).expand(2, 32), 1.0), ValueError, "parallel"),
    "NaN direction": (lambda model: Add(noise(32) * math.nan), ValueError, "NaN"),
    "NaN gain": (lambda model: Affine(noise(32) * math.nan, noise(32)), ValueError, "NaN"),
    "NaN strength": (write(push(), strength=math.nan), ValueError, "finite number"),
    "infinite strength": (lambda model: push(strength=math.inf), ValueError, "finite number"),
    "NaN among strengths": (lambda model: push(strength=[1.0, math.nan]), ValueError, "finite number"),
    "no strength": (lambda model: push(strength=[]), ValueError, "finite number"),
    "strength in words": (lambda model: checked_strength("2"), TypeError, "give a number"),
    "strengths of other texts": (write(push(), strength=[1.0, 2.0, 3.0]), ValueError, "3 texts for 2 prompts"),
    "position no token meets": (write(push(positions=(60,))), NeverActed, "no token met.*prompts"),
    "token nobody says": (write(push(positions=Tokens((90,), "x"))), NeverActed, "no token met"),
    "unknown positions": (lambda model: checked_positions("everywhere"), ValueError, "give one of all, rest, prompt"),
    "no positions": (lambda model: push(positions=[]), ValueError, "acts nowhere"),
    "fractional positions": (lambda model: checked_positions([1.5]), TypeError, "whole numbers"),
    "no forward": (no_forward, TapNeverFired, r"resid_post\.1"),
    "site that is not reached": (trunk_alone, TapNeverFired, r"resid_post\.1"),
    "no interventions": (lambda model: Steering([]), ValueError, "at least one"),
    "no operation": (lambda model: Intervention("resid_post.1", noise(32)), TypeError, "operation"),
    "no prompts": (lambda model: generate(model, [], push(), 3), ValueError, "give at least one text"),
    "contrast of one class": (one_class, ValueError, "needs both"),
    "contrast of identical prompts": (identical, ValueError, "Give two sets"),
    "contrast that reads the same": (same_there, ValueError, "read the same there.*another token"),
    "labels of one class": (one_label, ValueError, "one class"),
    "the same two prompts": (lambda m: activation_addition(m, "good", "good", "resid_post.1"), ValueError, "Give two"),
    "error in an edit": (write(Steering(Intervention("resid_post.1", Function(fails)))), ArithmeticError, "inside"),
    "error in a later step": (
        write(Steering(Intervention("resid_post.1", Function(half_way)))),
        ArithmeticError,
        "inside the edit",
    ),
    "another shape": (
        write(Steering(Intervention("resid_post.1", Function(lambda x, at: x[:, :1])))),
        ValueError,
        "expected",
    ),
}


def hooks(model) -> list:
    """Hooks of torch on any module."""
    return [
        (name, list(held))
        for name, part in model.module.named_modules()
        for held in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)
        if held
    ]


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.module(input_ids=torch.tensor([[5, 6, 7], [8, 9, 10]])).logits


@pytest.mark.parametrize("what", BAD)
def test_it_is_said_and_nothing_stays(loaded, what):
    model = loaded("llama")
    call, error, says = BAD[what]
    clean = logits(model)
    with pytest.raises(error, match=f"(?s){says}"):
        call(model)
    assert not active_taps()
    assert torch.equal(logits(model), clean)
    assert generate(model, PROMPTS, push(strength=0.0), 3).token_ids == generate(model, PROMPTS, None, 3).token_ids
    detach(model.module)  # what waits on a model for the next use, and does nothing meanwhile
    assert not hooks(model)
    assert torch.equal(logits(model), clean)


def test_a_steering_that_failed_works_when_what_was_wrong_is_right(llama):
    """State of the failed run does not stay with the steering."""
    wanted = generate(llama, PROMPTS, push(), 4).token_ids
    steering = push()
    with pytest.raises(ValueError, match="3 texts"):
        generate(llama, PROMPTS, steering, 4, strength=[1.0, 2.0, 3.0])
    with pytest.raises(ArithmeticError, match="inside"):
        generate(llama, PROMPTS, steering + Steering(Intervention("resid_post.2", Function(fails))), 4)
    assert generate(llama, PROMPTS, steering, 4).token_ids == wanted
