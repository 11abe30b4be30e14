"""What steering costs: tokens per second of steered against unsteered generation, cached, batch 8.

Edits at all 30 layers of SmolLM2-135M-Instruct, one vector each, at "generated" positions, with the ledger on. Beside
it the share of the edits alone (no ledger), and of low-rank feedback and a projection in place of addition.
"""

import argparse

import torch
from ledger import paired, record

from microtome.capture.batches import PaddingRecipe, make_batch
from microtome.capture.generated import Generation, written
from microtome.capture.limits import pad_id
from microtome.capture.models import load_model
from microtome.capture.taps import taps
from microtome.capture.text_source import text_source
from microtome.interventions.ledger import Ledger
from microtome.interventions.operations import Add, Feedback, Operation, Project
from microtome.interventions.steering import Intervention, Steering, anatomy_of

BATCH, TOKENS, BAR = 8, 64, 0.93


def main() -> None:
    """Time pairs in turn and record the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="pairs of runs per claim")
    options = parser.parse_args()
    model = load_model("smollm2")
    anatomy = anatomy_of(model)
    rows = text_source(["The history of the town begins with the river and"] * BATCH, model).encode(0, BATCH).rows
    pad = pad_id(model.module, model.tokenizer)
    batch = make_batch(rows, range(BATCH), pad_id=pad, recipe=PaddingRecipe("left"), device=torch.device("cpu"))
    settings = Generation(max_new_tokens=TOKENS)
    ends = model.module.generation_config.eos_token_id
    model.module.generation_config.eos_token_id = None  # all texts go on for as long
    generator = torch.Generator().manual_seed(0)
    vectors = 0.01 * torch.randn(anatomy.layers, anatomy.d_model, generator=generator)

    def write() -> None:
        written(model.module, settings, batch, texts=range(BATCH), pad=pad, use_cache=True, on_tokens=None)

    def steered(operation: type, has_ledger: bool) -> None:
        edits = Steering(
            Intervention(f"resid_post.{layer}", made(operation, vector), "generated")
            for layer, vector in enumerate(vectors)
        )
        ledger = Ledger.of(edits)
        with taps(model, (), edits.edits(anatomy, ledger if has_ledger else None), anatomy=anatomy):
            write()
        if has_ledger:
            ledger.by_text()

    for operation, has_ledger, bar in (
        (Add, True, BAR),
        (Add, False, None),
        (Project, True, None),
        (Feedback, True, None),
    ):
        ratio, ratios = paired(write, lambda o=operation, has=has_ledger: steered(o, has), options.pairs)
        record(
            f"steered generation, {operation.__name__.lower()} at all {anatomy.layers} layers"
            + (", ledger on" if has_ledger else ", no ledger"),
            ratio,
            "none" if bar is None else f"at least {bar}",
            None if bar is None else ratio >= bar,
            "unsteered generation, tokens per second",
            f"SmolLM2-135M, batch {BATCH}, {TOKENS} tokens, cached, float32; ratios {ratios}",
        )
    model.module.generation_config.eos_token_id = ends


def made(operation: type, vector: torch.Tensor) -> Operation:
    """One edit of each kind."""
    if operation is Feedback:
        return Feedback(vector, 0.1 * vector, 0.0)
    return operation(vector)


if __name__ == "__main__":
    main()
