"""Text in pieces: the same as at once, stopped by its reader, errors where they are read, two at once kept apart."""

import threading

import pytest
import torch
from steering_steps import noise

from microtome.capture import Generation
from microtome.interventions.generation import generate, stream
from microtome.interventions.ledger import NeverActed
from microtome.interventions.operations import Add, Function
from microtome.interventions.steering import Intervention, Steering

PROMPT = "she liked the good old film"
LONG = Generation(max_new_tokens=24)


def push(size: float = 3.0, seed: int = 0, **more) -> Steering:
    return Steering(Intervention("resid_post.1", Add(size * noise(32, seed=seed)), **more))


def hooks(model) -> int:
    """Of torch, on any module, beside those that stay on the model and do nothing outside of taps."""
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.module.modules())


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.module(input_ids=torch.tensor([[5, 6, 7]])).logits


@pytest.mark.parametrize("steering", [None, push()])
def test_pieces_are_the_text(llama, steering):
    pieces = list(stream(llama, PROMPT, steering, LONG))
    assert len(pieces) > 1
    assert "".join(pieces) == generate(llama, [PROMPT], steering, LONG).completions[0]


def test_options_are_those_of_generate(llama):
    said = "".join(stream(llama, PROMPT, push(), LONG, strength=0.0))
    assert said == "".join(stream(llama, PROMPT, None, LONG))
    assert said != "".join(stream(llama, PROMPT, push(), LONG))


@pytest.mark.parametrize("way", ["close", "break", "throw"])
def test_a_reader_that_leaves_stops_the_writing(llama, way):
    written = []
    slow = Function(lambda x, at: written.append(1) or torch.zeros_like(x))
    steering = Steering(Intervention("resid_post.1", slow))
    before, clean, threads = hooks(llama), logits(llama), threading.active_count()
    pieces = stream(llama, PROMPT, steering, Generation(max_new_tokens=50))
    next(pieces)
    if way == "throw":
        with pytest.raises(RuntimeError, match="reader"):
            pieces.throw(RuntimeError("reader"))
    elif way == "close":
        pieces.close()
    else:
        for _ in pieces:
            break
        del pieces
    steps = len(written)
    assert steps < 50
    assert threading.active_count() == threads
    assert hooks(llama) == before
    assert torch.equal(logits(llama), clean)
    assert len(written) == steps


def test_nothing_runs_until_the_first_piece_is_asked_for(llama):
    threads = threading.active_count()
    pieces = stream(llama, PROMPT, push(), LONG)
    assert threading.active_count() == threads
    pieces.close()


@pytest.mark.parametrize(
    ("steering", "error", "says"),
    [
        (Steering(Intervention("resid_post.1", Add(noise(16)))), ValueError, "16 channels"),
        (Steering(Intervention("resid_post.9", Add(noise(32)))), IndexError, "9"),
        (push(positions=(60,)), NeverActed, "no token met"),
    ],
)
def test_errors_come_to_the_reader(llama, steering, error, says):
    before, clean, threads = hooks(llama), logits(llama), threading.active_count()
    with pytest.raises(error, match=says):
        list(stream(llama, PROMPT, steering, 4))
    assert threading.active_count() == threads
    assert hooks(llama) == before
    assert torch.equal(logits(llama), clean)


def test_an_error_in_a_later_step_comes_behind_what_was_written(llama):
    def fails(x, at):
        if at.call.step == 3:
            raise ArithmeticError("step three")
        return torch.zeros_like(x)

    pieces, read = stream(llama, PROMPT, Steering(Intervention("resid_post.1", Function(fails))), LONG), []
    with pytest.raises(ArithmeticError, match="step three"):
        read.extend(pieces)
    assert "".join(stream(llama, PROMPT, None, 24)).startswith("".join(read))


def test_two_streams_at_once_do_not_mix(llama):
    """Read piece by piece in turn, each on its own steering; and a third forward in between is unsteered."""
    steerings = [push(seed=1), push(seed=2), None]
    alone = ["".join(stream(llama, PROMPT, steering, LONG)) for steering in steerings]
    assert len(set(alone)) == 3
    clean = logits(llama)
    running = [stream(llama, PROMPT, steering, LONG) for steering in steerings]
    texts = [""] * 3
    live = set(range(3))
    while live:
        for number in sorted(live):
            try:
                texts[number] += next(running[number])
            except StopIteration:
                live.remove(number)
        assert torch.equal(logits(llama), clean)
    assert texts == alone
