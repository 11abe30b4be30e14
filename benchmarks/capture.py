"""What capture costs beside the bare model, on texts of all four sentiment domains, without the language-model head.

Claims: every head and layer at every position, cloned, in at most 1.05 x the bare trunk; length-bucketed batches at
least 1.5 x faster than batches of 16 in file order; a capture up to layer 10 of 30 in at most 0.40 x the full trunk.
Pairs run in turn in one process; the ratio is the median over pairs.
"""

import argparse
from collections.abc import Callable

import torch
from ledger import paired, record

from microtome.capture import capture, dissect, load_model, taps
from microtome.capture.batches import MAX_TOKENS, make_batch, plan_batches
from microtome.capture.limits import pad_id
from microtome.capture.texts import encode_texts
from microtome.data import sentiment

PAIRS = 5


def main() -> None:
    """Run the three claims."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=96, help="texts of claims 1 and 3")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    options = parser.parse_args()
    loaded = load_model("smollm2")
    module, anatomy = loaded.module, dissect(loaded)
    trunk = module.base_model

    texts = sentiment(per_domain=options.texts // 4)["text"].tolist()
    encoded = encode_texts(texts, loaded.tokenizer, module=module)
    filler = pad_id(module, loaded.tokenizer)

    def batches(plan: list[list[int]], rows: tuple) -> list[dict]:
        made = [make_batch(rows, ids, pad_id=filler, recipe=anatomy.padding, device="cpu") for ids in plan]
        return [batch.model_inputs() for batch in made]

    planned = batches(plan_batches(encoded.lengths, max_tokens=MAX_TOKENS), encoded.rows)

    @torch.no_grad()
    def bare() -> None:
        for batch in planned:
            trunk(**batch, use_cache=False)

    def everything() -> None:
        for batch in planned:
            with torch.no_grad(), taps(module, ["z", "resid_post"], anatomy=anatomy) as tape:
                trunk(**batch, use_cache=False)
            assert len(tape.sites) == 60

    def whole_capture() -> None:
        capture(loaded, texts, ["z", "resid_post"], "all", progress=False)

    def up_to_ten() -> None:
        capture(loaded, texts, ["z.10", "resid_post.9"], "last", progress=False)

    n = f"n={len(texts)} texts, {sum(encoded.lengths)} tokens, SmolLM2-135M float32, {torch.get_num_threads()} threads"
    ratio, every = paired(everything, bare, options.pairs)
    record(
        "capture: z and resid_post of all 30 layers, all positions, cloned, over the bare trunk",
        ratio,
        "<= 1.05",
        ratio <= 1.05,
        "the trunk on the same batches",
        f"{n}; pairs {every}",
    )
    ratio, every = paired(whole_capture, bare, options.pairs)
    record(
        "capture(): the same into one Activations, tokenising and table included, over the bare trunk",
        ratio,
        "none",
        None,
        "the trunk on the same batches",
        f"{n}; pairs {every}",
    )
    ratio, every = paired(up_to_ten, bare, options.pairs)
    record(
        "capture() up to layer 10 of 30 over the full trunk",
        ratio,
        "<= 0.40",
        ratio <= 0.40,
        "the trunk on the same batches",
        f"{n}; pairs {every}",
    )

    mixed = sentiment(per_domain=128).sample(512, random_state=0)["text"].tolist()
    rows = encode_texts(mixed, loaded.tokenizer, module=module)
    in_file_order = batches([list(range(i, min(i + 16, 512))) for i in range(0, 512, 16)], rows.rows)
    bucketed = batches(plan_batches(rows.lengths, max_tokens=MAX_TOKENS), rows.rows)

    def run(plan: list[dict]) -> Callable[[], None]:
        @torch.no_grad()
        def forward() -> None:
            for batch in plan:
                trunk(**batch, use_cache=False)

        return forward

    ratio, every = paired(run(in_file_order), run(bucketed), min(3, options.pairs))
    record(
        "batches: 16 texts in file order over length-bucketed",
        ratio,
        ">= 1.5",
        ratio >= 1.5,
        "16 consecutive texts padded to the longest",
        f"512 texts, {sum(rows.lengths)} tokens; pairs {every}",
    )


if __name__ == "__main__":
    main()
