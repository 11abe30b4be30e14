"""What SmolLM2's residual stream carries and what its blocks make, with controls: the tables of docs/results.md.

    python docs/transport_study.py [maps efficiency sizes features origins splices routes]

All parts without a name: maps (R2, ceilings, efficiency and sizes of all 465 pairs of depths, with and without sinks),
efficiency (by rank, published estimators beside), sizes (of the subspace, beside null distributions), features (of a
sparse dictionary trained here, carried or made), origins (where directions appear), splices (KL and perplexity when an
operator is written over 1, 5 or all tokens), routes (what other tokens say). Models beside one another are in
alignment_study.py. Fits go by document; whole documents are held out. Corpus and windows are those of lens_study.py;
moments, the dictionary and splices are kept in runs/transport_study/, and a run that was stopped goes on from there.
"""

import argparse
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from lens_study import CHARACTERS, show, smollm2, windows

from microtome.capture import capture
from microtome.data.catalogue import load_data
from microtome.lenses import Moments, TokenWindows, moments_of, pair_splits
from microtome.lenses.dictionaries import Dictionary, DictionarySettings, dictionary_report, train_dictionary
from microtome.lenses.map_scores import map_scores
from microtome.lenses.ridge_map import ridge_map
from microtome.lenses.transport import (
    Splice,
    TransportOperator,
    direction_origin,
    feature_transport,
    route_splits,
    routed_moments,
    splice_effects,
    transport_efficiency,
    transport_map,
    transport_operator,
    transport_subspace,
)
from microtome.lenses.unembedding import unembedding_of
from microtome.probes import MassMeanProbe

FOLDER = Path("runs/transport_study")
# the paper's kinds of pairs: leaps of 1, 3, 7 and 10 blocks to an early and a late target
PAIRS = [(f"resid_post.{target - leap}", f"resid_post.{target}") for target in (10, 20) for leap in (1, 3, 7, 10)]
SPLICES = [(2, 3), (9, 10), (28, 29), (10, 13), (10, 20), (19, 26)]
FEATURES_AT, FEATURES = 14, 4608
_TRACED = (
    *("carried_to_target", "carried_to_target_control", "identity_to_target", "made_at"),
    *("carried_from_previous", "variance"),
)
WORDS = (" the", " not", " she", " Paris", " because")


@cache
def corpus() -> tuple[list[list[int]], list[str], list[str]]:
    """Windows, documents and shards of the three splits together."""
    texts, documents, shards = [], [], []
    for split in CHARACTERS:
        found = windows(split)
        texts += found.texts
        documents += found.documents
        shards += [split] * len(found.texts)
    return texts, documents, shards


@cache
def moments() -> Moments:
    """All pairs of the 31 depths."""
    texts, documents, shards = corpus()
    return moments_of(smollm2(), texts, "resid", documents=documents, shards=shards, save=FOLDER / "moments")


@cache
def shuffled() -> Moments:
    """The pairs of this study with x of another document."""
    texts, documents, shards = corpus()
    pairs = list(dict.fromkeys([*PAIRS, *(splice_pair(each) for each in SPLICES), *feature_pairs()]))
    sites = [site for site in moments().sites if any(site in pair for pair in pairs)]
    return moments_of(
        smollm2(),
        texts,
        sites,
        pairs=pairs,
        documents=documents,
        shards=shards,
        shuffled=True,
        medians=moments().medians,
        save=FOLDER / "shuffled",
    )


def splice_pair(layers: tuple[int, int]) -> tuple[str, str]:
    """Sites of two layers."""
    return f"resid_post.{layers[0]}", f"resid_post.{layers[1]}"


def feature_pairs() -> list[tuple[str, str]]:
    """Leaps of 1, 3, 5 and 10 blocks to the dictionary's site."""
    return [splice_pair((FEATURES_AT - leap, FEATURES_AT)) for leap in (1, 3, 5, 10)]


def held_out(count: int) -> TokenWindows:
    """So many windows of the test split, as many of each source as there are."""
    found = windows("test")
    table = pd.DataFrame({"source": pd.Series(found.documents).str.split(":").str[0]})
    kept = table.sample(frac=1, random_state=0).groupby("source").head(-(-count // table["source"].nunique()))
    rows = sorted(kept.index[:count])
    texts, documents, starts = ([each[i] for i in rows] for each in (found.texts, found.documents, found.starts))
    return TokenWindows(texts, documents, starts, sum(map(len, texts)), 0)


def maps() -> None:
    """All pairs of depths, by distance and by depth, with and without sinks."""
    tables = []
    for stratum, tokens in (("rest", "without sinks"), ("all", "with sinks")):
        file = FOLDER / f"map_{stratum}.parquet"
        if not file.is_file():
            transport_map(moments(), stratum=stratum, progress=True).table.to_parquet(file)
        tables.append(pd.read_parquet(file).assign(tokens=tokens))
    table = pd.concat(tables, ignore_index=True)
    shown = ["r2_vw", "r2_ua", "r2_wh", "r2_increment", "identity_r2_vw", "ceiling", "efficiency"]
    shown += ["efficiency_10", "identity_efficiency", "above_edge", "rank_95", "effective_rank", "participation"]
    for tokens, rows in table.groupby("tokens", sort=False):
        means = rows.groupby("distance")[shown].mean().reset_index()
        show(f"By distance, {tokens}", means[means["distance"].isin([1, 2, 3, 5, 7, 10, 15, 20, 30])])
    rest = table[table["tokens"] == "without sinks"]
    for leap in (1, 5, 10):
        rows = rest[rest["distance"] == leap][["source", "target", *shown]]
        show(f"By depth, leaps of {leap}", rows.iloc[:: 3 if leap == 1 else 5])
    early = rest.assign(third=np.minimum(rest["depth"] // 10, 2)).groupby(["distance", "third"])["r2_vw"].mean()
    by_third = early.unstack().loc[[1, 3, 5, 10]].reset_index()
    show("R2 by distance (down) and third of the depth the source lies in", by_third)


def efficiency() -> None:
    """Efficiency curves beside the published estimators."""
    rows = []
    for source, target in PAIRS:
        found = transport_efficiency(pair_splits(moments(), source, target))
        part = found.table[found.table["rank"].isin([1, 8, 64, 256, 576])]
        rows.append(part.assign(source=source, target=target))
    table = pd.concat(rows)
    columns = ["source", "target", "rank", "score", "ceiling", "efficiency", "bound", "truncated_efficiency"]
    show("Efficiency by rank, test documents", table[[*columns, "published_score", "published_efficiency"]])


def sizes() -> None:
    """Subspace sizes beside their nulls."""
    rows = []
    for source, target in PAIRS:
        null = pair_splits(shuffled(), source, target, shuffled=True)
        found = transport_subspace(pair_splits(moments(), source, target), nulls=[null])
        rows.append(found.table.assign(source=source, target=target, edge=found.edge, null_edge=found.null_edge))
    table = pd.concat(rows)
    for title, value in (
        ("Size of the transport subspace", "value"),
        ("The same of sites that share nothing", "null_mean"),
    ):
        show(title, table.pivot(index=["source", "target"], columns="measure", values=value).reset_index(), 1)
    show("Edges", table.groupby(["source", "target"], sort=False)[["edge", "null_edge"]].first().reset_index())


def dictionary() -> Dictionary:
    """4,608 features of the stream behind block 14, trained on the fit split."""
    found = windows("fit")
    return train_dictionary(
        smollm2(),
        found.texts,
        f"resid_post.{FEATURES_AT}",
        features=FEATURES,
        k=32,
        documents=found.documents,
        settings=DictionarySettings(steps=800),
        checkpoint=FOLDER / "dictionary",
    )


def operators(pairs: list[tuple[str, str]]) -> tuple[list[TransportOperator], list[TransportOperator]]:
    """Ridge operators and those of shuffled pairs."""
    own = [transport_operator(moments(), *pair).to(torch.float32) for pair in pairs]
    null = [transport_operator(shuffled(), *pair, shuffled=True).to(torch.float32) for pair in pairs]
    return own, null


def features() -> None:
    """Features of a dictionary, unembedding rows and random directions: carried or made."""
    held, found = windows("test"), dictionary()
    report = dictionary_report(smollm2(), found, held.texts[:24], documents=held.documents[:24])
    show(f"The dictionary: {FEATURES} features, k 32, resid_post.{FEATURES_AT}", report.to_frame())
    own, null = operators(feature_pairs())
    generator = torch.Generator().manual_seed(0)
    vocabulary = unembedding_of(smollm2()).weight
    kinds = {
        "dictionary": found.directions(),
        "unembedding": vocabulary[torch.randperm(len(vocabulary), generator=generator)[:2000]].detach(),
        "random": torch.randn(2000, 576, generator=generator),
    }
    rows = []
    for kind, directions in kinds.items():
        scored = feature_transport(
            smollm2(),
            held.texts,
            own,
            directions,
            documents=held.documents,
            null=null,
            means=moments(),
            encode=found.encode if kind == "dictionary" else None,
            progress=True,
        )
        scored.table.to_parquet(FOLDER / f"features_{kind}.parquet")
        rows.append(scored.summary().assign(directions_of=kind))
    show("Directions carried to resid_post.14, and made on the way", pd.concat(rows))


def origins() -> None:
    """Where sentiment and some words appear, read at the end and at resid_post.20."""
    drawn = load_data("sentiment", texts=1200, seed=0).table
    acts = capture(smollm2(), drawn["text"].tolist(), "resid_post.20", "last")
    probe = MassMeanProbe().fit(acts["resid_post.20"].numpy(), drawn["label"].to_numpy())
    weight = unembedding_of(smollm2()).weight.detach()
    tokens = [smollm2().require_tokenizer()(word, add_special_tokens=False)["input_ids"][0] for word in WORDS]
    for target, directions, names in (
        ("resid_post.20", torch.from_numpy(probe.coef_).float(), ["sentiment"]),
        ("resid_post.29", weight[tokens], [repr(word) for word in WORDS]),
    ):
        found = direction_origin(moments(), directions, target, names=names)
        found.table.to_parquet(FOLDER / f"origins_{target}.parquet")
        show(f"Origins of directions read at {target}", found.appears)
        shown = ["name", "site", *_TRACED]
        table = found.table[[name for name in shown if name in found.table]]
        show("By depth, the first direction", table[table["name"] == names[0]].iloc[::3])


def splices() -> None:
    """KL and perplexity of continuations when operators are spliced in."""
    held = held_out(12)
    own, null = operators([splice_pair(each) for each in SPLICES])
    given = []
    for operator, mixed in zip(own, null, strict=True):
        pair = operator.source, operator.target
        ranks = {
            f"rank {rank}": transport_operator(moments(), *pair, rank=rank, metric="raw").to(torch.float32)
            for rank in (128,)
        }
        given.append(Splice(operator, mixed, moments().pair(*pair).mean_y.float(), ranks))
    effects = splice_effects(
        smollm2(),
        held.texts,
        given,
        documents=held.documents,
        medians=moments().medians,
        save=FOLDER / "splices",
        progress=True,
    )
    table = effects.to_frame()
    table.to_parquet(FOLDER / "splices.parquet")
    said = ["source", "target", "positions", "condition"]
    for name in ("kl", "perplexity"):
        ends = table[[name, f"{name}_low", f"{name}_high"]].itertuples(index=False)
        table[f"{name}, 95 %"] = [f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in ends]
    show("Splices", table[[*said, "kl, 95 %", "perplexity, 95 %", "agrees", "recovered_mean", "kl_minus_identity"]])
    show("Of", effects.left_out)


def routes() -> None:
    """What other tokens say of a token: one before, a head's, any earlier one; alone and beside the token itself."""
    texts, documents, shards = corpus()
    rows = []
    for layer, heads in ((8, ("2.1",)), (18, ("16.0", "17.3"))):
        named = ["same", "offset 1", "offset 2", "random 0", *(f"head {head}" for head in heads)]
        source, target = splice_pair((layer, layer + 1))
        held = routed_moments(
            smollm2(),
            texts[::3],
            source,
            target,
            named,
            joined=True,
            documents=documents[::3],
            shards=shards[::3],
            save=FOLDER / f"routes_{layer}",
        )
        for route in [*named, *(["same", other] for other in named[1:])]:
            splits = route_splits(held, route, source, target)
            scores = map_scores(ridge_map(splits.fit, splits.validation).map, splits.test, splits.fit)
            said = route if isinstance(route, str) else " + ".join(route)
            rows.append({"target": target, "route": said, "r2_vw": scores.r2_vw, "r2_wh": scores.r2_wh})
    show("R2 by route", pd.DataFrame(rows))


PARTS: dict[str, Callable[[], None]] = {
    "maps": maps,
    "efficiency": efficiency,
    "sizes": sizes,
    "features": features,
    "origins": origins,
    "splices": splices,
    "routes": routes,
}


def main() -> None:
    """Run the parts named on the command line, all without one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="part")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().parts or PARTS:
        start = time.perf_counter()
        PARTS[name]()
        print(f"\n{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
