"""What one model's layers say of another's: two seeds, two depths, no training, another architecture.

    python docs/alignment_study.py [seeds untrained words]

seeds: tiny models of `tiny_models.py`, 2 and 4 layers, two seeds each. untrained: SmolLM2 beside SmolLM2 with weights
drawn at random. words: SmolLM2 beside MiniLM, at the last token of every word. Fits go by document.
"""

import argparse

import pandas as pd
from lens_study import show
from tiny_models import train_tiny

from microtome.capture import LoadedModel, capture, load_model, untrained
from microtome.data import plain_english
from microtome.lenses import Moments, token_windows
from microtome.lenses.transport.aligned_activations import aligned_activations, moments_of_aligned, word_ends
from microtome.lenses.transport.alignment import Alignment, alignment
from microtome.lenses.transport.depth_map import depth_map
from microtome.lenses.transport.model_moments import moments_of_models

SHOWN = [
    "source", "target", "r2_vw", "back_r2_vw", "lexical_r2_vw", "beyond_r2_vw", "shuffled_r2_vw", "cka", "cka_null",
    "cka_two", "canonical", "shuffled_canonical", "procrustes",
]  # fmt: skip
SMOLLM2_SITES = ["resid_pre.0", *(f"resid_post.{layer}" for layer in (7, 14, 21, 29))]


def joint(models: dict[str, LoadedModel], characters: int, sites="resid") -> Moments:
    """Moments across models that share the first one's tokenizer, of validation and test documents."""
    corpus = pd.concat([plain_english(characters=characters // 2, split=split) for split in ("validation", "test")])
    windows = token_windows(next(iter(models.values())), corpus["text"], documents=corpus["document"], length=128)
    print(f"{windows.tokens:,} tokens in {len(windows.texts)} windows")
    return moments_of_models(models, windows.texts, sites, documents=windows.documents, shuffled=True)


def report(title: str, found: Alignment) -> None:
    """The best target of each source with its nulls, and the depth map."""
    best = found.table.loc[found.table.groupby("source", sort=False)["back_r2_vw"].idxmax()]
    show(f"{title}: each layer with the one that says most of it", best[SHOWN])
    for value in ("r2_vw", "beyond_r2_vw", "cka_two"):
        depths = depth_map(found, value)
        columns = ["direction", "site", "best", "score", "margin", "close", "close_from", "close_to", "path"]
        show(f"{title}: depths by {value}", depths.table[columns])
        show(f"{title}: paths by {value}", depths.summary)


def seeds() -> None:
    """Two seeds of one depth, and a shallow model beside a deep one, trained and not."""
    two, other, four = train_tiny(2, 0), train_tiny(2, 1), train_tiny(4, 1)
    models = {"two": two, "other": other, "four": four, "fresh": untrained(four, seed=5)}
    moments = joint(models, 800_000)
    for name in ("other", "four", "fresh"):
        report(f"2 layers, seed 0, and {name}", alignment(moments, "two", name))
    report("4 layers, two seeds", alignment(joint({"one": train_tiny(4, 0), "four": four}, 800_000), "one", "four"))


def no_training() -> None:
    """SmolLM2 and the same architecture with random weights."""
    model = load_model("smollm2")
    moments = joint({"trained": model, "fresh": untrained(model, seed=0)}, 60_000, SMOLLM2_SITES)
    report("SmolLM2 and untrained", alignment(moments, "trained", "fresh", progress=True))


def words() -> None:
    """SmolLM2 and MiniLM at the last token of each word."""
    corpus = plain_english(characters=80_000, split="test", passage=600)
    given = {"positions": "all", "token_labels": {"word_end": word_ends}}
    captures = {
        "smollm2": capture(load_model("smollm2"), corpus["text"], SMOLLM2_SITES, **given),
        "minilm": capture(load_model("minilm"), corpus["text"], ["resid_pre.0", "resid_post"], **given),
    }
    aligned = aligned_activations(captures, on="word_end")
    print(f"{len(aligned.rows):,} words; without a partner: {aligned.unmatched}")
    moments = moments_of_aligned(aligned, documents=corpus["document"], shuffled=True)
    report("MiniLM and SmolLM2", alignment(moments, "minilm", "smollm2", progress=True))


def main() -> None:
    """Run the parts that are named."""
    parts = {"seeds": seeds, "untrained": no_training, "words": words}
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; all if none")
    for name in parser.parse_args().parts or parts:
        parts[name]()


if __name__ == "__main__":
    main()
