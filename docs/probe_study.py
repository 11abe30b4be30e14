"""What probes find in SmolLM2 and MiniLM, with controls: the tables of docs/results.md, one part after the other.

    python docs/probe_study.py [layers numbers transfer directions gain attention code erasure]      all without a name

Parts: layers (sweeps of sentiment and of true statements on cities), numbers (ratings, domains), transfer (between the
four domains of sentiment, and from easy to hard), directions (do direction finders agree), gain (network against linear
probe at every head), attention (attention weights against z), code (description length and learning curve), erasure.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch

from microtome.capture import Activations, LoadedModel, Span, attention_features, capture, load_model, untrained
from microtome.data import load_data
from microtome.data.sentiment import sentiment
from microtome.data.sentiment_raters import sentiment_raters
from microtome.probes import (
    MlpSettings,
    compare_sites,
    control_task,
    description_length,
    direction_table,
    erased_sweep_check,
    gap_recovered,
    hardness_strata,
    heads_together,
    learning_curve,
    noise_ceiling_of_means,
    nonlinear_gain,
    rank_stability,
    sweep,
    transfer,
)

TEXTS = 640
MEASURES = ["site", "auroc", "auroc_low", "auroc_high", "control_auroc", "control_task_auroc", "p_best_site"]


def data(name: str) -> pd.DataFrame:
    """Texts, labels and groups of a data set: 640 texts of sentiment, level in domain and label, or of cities."""
    if name == "sentiment":
        return sentiment(per_domain=TEXTS // 4)
    loaded = load_data(name, texts=TEXTS)
    return pd.DataFrame({"text": loaded.texts}).join(pd.DataFrame(loaded.labels).reset_index(drop=True))


def acts_of(model: LoadedModel, table: pd.DataFrame, sites: list[str], position: str) -> Activations:
    """Activations with every column of the table as a label."""
    return capture(
        model,
        table["text"].tolist(),
        sites,
        position,
        labels=table.drop(columns="text"),
        progress=False,
        truncate="left",
    )


def show(title: str, table: pd.DataFrame) -> None:
    """Print a table as it goes into the results."""
    print(f"\n### {title}\n")
    print(table.round(3).to_string(index=False), flush=True)


def layers() -> None:
    """Sweeps of every layer and head, with untrained SmolLM2 as a control."""
    smollm2 = load_model("smollm2")
    models = [("SmolLM2", smollm2, "last"), ("MiniLM", load_model("minilm"), "mean")]
    models.append(("SmolLM2 untrained", untrained(smollm2, seed=0), "last"))
    summary = []
    for name in ("sentiment", "cities"):
        table = data(name)
        for called, model, position in models:
            acts = acts_of(model, table, ["resid_post", "z"], position)
            found = sweep(acts, "label", groups="group", permutations=499, bootstraps=1000, progress=False)
            by_layer = found.table[found.table["head"].isna()]
            columns = [column for column in MEASURES if column in by_layer]
            show(f"{called}, {name}: residual stream by layer", by_layer[columns])
            heads = found.table[found.table["head"].notna()]
            show(f"{called}, {name}: best heads", heads.nlargest(8, "auroc")[columns])
            show(
                f"{called}, {name}: without the model",
                found.baselines[["baseline", "auroc", "auroc_low", "auroc_high"]],
            )
            best, head = by_layer.loc[by_layer["auroc"].idxmax()], heads.loc[heads["auroc"].idxmax()]
            stable = rank_stability(found.scores[heads.index], found.truth, found.groups, found.test, top=10)
            pair = compare_sites(found, [(str(best["site"]), str(head["site"]))], draws=1000, permutations=999)
            summary.append(
                {
                    "model": called,
                    "data": name,
                    "best layer": best["site"],
                    "AUROC": best["auroc"],
                    "best head": head["site"],
                    "AUROC ": head["auroc"],
                    "layer - head, p": pair["p_value"].item(),
                    "heads beyond null": f"{int((heads['p_best_site'] < 0.05).sum())} of {len(heads)}",
                    "selected": found.selected.measures["auroc"],
                    "null line": found.null_line,
                    "top-10 overlap": stable.jaccard,
                    "words": found.baselines.set_index("baseline").loc["bag", "auroc"],
                    "length": found.baselines.set_index("baseline").loc["length", "auroc"],
                }
            )
    show("summary", pd.DataFrame(summary))


def numbers() -> None:
    """The mean rating as a number, beside the ceiling that raters' noise sets; the domain as classes."""
    table = data("sentiment").merge(sentiment_raters(), on="id", how="left", validate="one_to_one")
    acts = acts_of(load_model("smollm2"), table, ["resid_post"], "last")
    few = {"permutations": 199, "bootstraps": 1000, "progress": False}
    rating = sweep(acts, "rating", groups="group", **few)
    show("rating (SmolLM2, resid_post)", rating.best(4))
    show("rating without the model", rating.baselines)
    errors = (table["rating_sd"] / np.sqrt(table["raters"])).to_numpy(dtype=np.float64)
    means = table["rating"].to_numpy(dtype=np.float64)
    print(noise_ceiling_of_means(means, errors, groups=table["group"].to_numpy()))
    domain = sweep(acts, "domain", groups="group", **few)
    show("domain (four classes)", domain.best(3))
    show("domain without the model", domain.baselines)


def transfers() -> None:
    """Between domains of sentiment, the layer chosen with and without the target; from easy to hard."""
    table = data("sentiment")
    acts = acts_of(load_model("smollm2"), table, ["resid_post"], "last")
    found = transfer(acts, "label", "domain", groups="group", bootstraps=500)
    chosen = found.choices[found.choices["rule"] != "hindsight"]
    show(
        "transfer between domains (SmolLM2, resid_post)",
        chosen[["train", "test", "rule", "site", "layer", "auroc", "auroc_low", "auroc_high"]],
    )
    off = chosen[chosen["train"] != chosen["test"]]
    on = chosen[chosen["train"] == chosen["test"]]
    for what, rows in (("within a domain", on), ("between domains", off)):
        print(what, rows.groupby("rule")[["auroc", "layer"]].mean().round(3).to_dict())
    strength = table["rating"].abs()
    strata = hardness_strata(-strength.to_numpy(dtype=float))
    hard = transfer(acts, "label", strata, groups="group", sites=["resid_post.14"], bootstraps=500)
    show(
        "easy (clear ratings) to hard (weak ones), resid_post.14",
        hard.table[["train", "test", "auroc", "auroc_low", "auroc_high", "accuracy", "control_reach"]],
    )
    site = hard.sites[0]
    easy_on_hard, hard_on_hard = hard.pair("easy", "hard", site), hard.pair("hard", "hard", site)
    gap = gap_recovered(
        easy_on_hard["scores"],
        hard_on_hard["scores"],
        hard_on_hard["positive"],
        hard_on_hard["groups"],
        hard_on_hard["test"],
        draws=1000,
    )
    print(gap)


def directions() -> None:
    """Agreement of direction finders in the middle of the model and late."""
    acts = acts_of(load_model("smollm2"), data("sentiment"), ["resid_post.4", "resid_post.14", "resid_post.26"], "last")
    found = direction_table(acts, "label", groups="group", draws=10)
    show("direction finders alone", found.finders[["site", "finder", "auroc", "stability"]])
    show("cosines at resid_post.14", found.matrix("resid_post.14").reset_index())
    show("whitened cosines at resid_post.14", found.matrix("resid_post.14", "whitened_cosine").reset_index())


def gain() -> None:
    """Network against linear probe at every head, the same tokens, with the published epochs and with more."""
    for name, types in (("sentiment", "token"), ("cities", None)):  # every statement ends in the same token
        acts = acts_of(load_model("smollm2"), data(name), ["z"], "last")
        for epochs in (10, 60):
            few = {"permutations": 499, "bootstraps": 1000, "progress": False}
            settings = MlpSettings(epochs=epochs)
            found = nonlinear_gain(acts, "label", groups="group", types=types, settings=settings, **few)
            shown = ["site", "linear_auroc", "mlp_auroc", "gain", "gain_low", "gain_high", "p_gain", "p_gain_best_site"]
            show(f"{name}, {epochs} epochs: heads with the largest gain", found.table.nlargest(5, "gain")[shown])
            kept = [c for c in found.table if c.endswith(("auroc", "bits", "selectivity")) or c == "gain"]
            spread = found.table[kept].agg(["mean", "min", "max"]).T.reset_index(names="of 270 heads")
            show(f"{name}, {epochs} epochs: all heads", spread)


def attention() -> None:
    """Does the last token's attention to entity and object tell true statements from false ones, beside z?"""
    table = data("cities")
    texts = table["text"].tolist()
    model = load_model("smollm2")

    def spans(column: str) -> list[Span]:
        starts = [text.index(str(value)) for text, value in zip(texts, table[column], strict=True)]
        return [Span(start, start + len(str(value))) for start, value in zip(starts, table[column], strict=True)]

    plain = (table["variant"] == "plain").to_numpy() if "variant" in table else np.ones(len(table), dtype=bool)
    keys = {"entity": spans("entity"), "object": spans("object"), "previous": "previous", "first": "first"}
    weights = attention_features(model, texts, keys=keys, labels=table.drop(columns="text"), progress=False)
    together = heads_together(weights)
    acts = acts_of(model, table, ["z", "resid_post"], "last")
    z = torch.cat([acts["z", layer].flatten(1) for layer in range(30)], dim=1)
    features = {"attention weights, all heads": together[next(iter(together))], "z, all heads": z}
    print(int(plain.sum()), "of", len(table), "statements are plain")
    for name, values in features.items():
        some = Activations.from_arrays({"x": values}, rows=acts.rows)
        found = sweep(some, "label", groups="group", permutations=199, bootstraps=500, progress=False)
        show(
            f"{name} ({values.shape[1]} features)",
            found.table[["auroc", "auroc_low", "auroc_high", "control_auroc", "p_best_site"]],
        )
    by_head = sweep(weights, "label", groups="group", permutations=199, bootstraps=500, progress=False)
    show("attention weights, best heads", by_head.best(5)[["site", "auroc", "auroc_low", "auroc_high", "p_best_site"]])


def code() -> None:
    """Description length and learning curve, trained against untrained."""
    table = data("sentiment")
    smollm2 = load_model("smollm2")
    for called, model in (("SmolLM2", smollm2), ("untrained", untrained(smollm2, seed=0))):
        acts = acts_of(model, table, ["resid_post.0", "resid_post.14", "resid_post.29"], "last")
        task = {"control task": control_task(acts.rows["token"], acts.rows["label"].to_numpy(dtype=bool))}
        found = description_length(acts, "label", groups="group", controls=task, shuffles=5)
        show(f"{called}: online code", found.table)
        curve = learning_curve(acts, "label", groups="group", repeats=3)
        show(f"{called}: learning curve", curve.table)


def erasure() -> None:
    """Erased inside the folds: what a probe fitted again still reads."""
    acts = acts_of(load_model("smollm2"), data("sentiment"), ["resid_post.4", "resid_post.14", "resid_post.26"], "last")
    for method in ("leace", "inlp"):
        show(method, erased_sweep_check(acts, "label", groups="group", method=method))


PARTS: dict[str, Callable[[], None]] = {
    "layers": layers,
    "numbers": numbers,
    "transfer": transfers,
    "directions": directions,
    "gain": gain,
    "attention": attention,
    "code": code,
    "erasure": erasure,
}


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    options = parser.parse_args()
    pd.set_option("display.width", 200)
    for name in options.parts or PARTS:
        started = time.perf_counter()
        print(f"\n## {name}", flush=True)
        PARTS[name]()
        print(f"({name}: {time.perf_counter() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
