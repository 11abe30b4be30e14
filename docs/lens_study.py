"""What lenses, maps and heads say of SmolLM2 on plain English, with controls: the tables of docs/results.md.

    python docs/lens_study.py [corpus maps curves exits heads attribution attention memories relations]

All parts without a name: corpus (what is read), maps (how linear steps are, ridge maps between depths, controls),
curves (logit, ridge and tuned lens by depth), exits (layers saved at 90, 95 and 99 % agreement), heads (roles, with an
untrained model), attribution (facts), attention (attention lenses of two layers), memories (values of MLPs and what
sets them off), relations (LRE and LRC). Fits go by document; whole documents are held out. Moments, the tuned lens and
the attention lenses are kept in runs/lens_study/, and a run that was stopped goes on from there.
"""

import argparse
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd

from microtome.capture import LoadedModel, load_model, untrained
from microtome.data import plain_english
from microtome.data.relations import RELATIONS, relation_pairs
from microtome.lenses import (
    LensStatistics,
    LinearMap,
    Moments,
    RelationStudy,
    TokenWindows,
    TunedLens,
    TunedSettings,
    ablation_effects,
    causal_agreement,
    concept_study,
    early_exits,
    fit_tuned_lens,
    head_roles,
    lens_cosine,
    lens_statistics,
    linearity,
    logit_attribution,
    logit_lens_of,
    memory_composition,
    moments_of,
    paraphrase_agreement,
    relation_study,
    ridge_pairs,
    ridge_to_last,
    share_of_heads,
    token_windows,
    train_attention_lens,
    translated_lens,
    trigger_examples,
    value_agreement,
)
from microtome.lenses.head_roles import ROLE_SCORES
from microtome.lenses.lens_statistics_files import read_statistics, write_statistics

FOLDER = Path("runs/lens_study")
CHARACTERS = {"fit": 320_000, "validation": 60_000, "test": 60_000}  # about 4 per token
CURVE_WINDOWS, CURVE_LENGTH = 24, 128
ATTENTION_LAYERS = (14, 25)
TUNED_DEPTHS = (0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 29)


@cache
def smollm2() -> LoadedModel:
    """The model of every part."""
    return load_model("smollm2")


@cache
def windows(split: str, length: int = 256) -> TokenWindows:
    """Windows of one split's documents."""
    corpus = plain_english(characters=CHARACTERS[split], split=split)
    return token_windows(smollm2(), corpus["text"], documents=corpus["document"], length=length)


def show(title: str, table: pd.DataFrame, digits: int = 3) -> None:
    """Print a table as it goes into the results."""
    print(f"\n### {title}\n")
    print(table.round(digits).to_string(index=False), flush=True)


def corpus() -> None:
    """How much of what is read."""
    rows = []
    for split in CHARACTERS:
        found = windows(split)
        source = pd.Series(found.documents).str.split(":").str[0]
        rows.append({"split": split, "windows": len(found.texts), "tokens": found.tokens, **source.value_counts()})
    show("Windows of 256 tokens by split and source", pd.DataFrame(rows).fillna(0))


@cache
def moments(name: str = "trained") -> Moments:
    """Residual streams of all three splits: all pairs; for the controls neighbours only, one window of two."""
    model = untrained(smollm2(), seed=0) if name == "untrained" else smollm2()
    step = 1 if name == "trained" else 2
    texts, documents, shards = [], [], []
    for split in CHARACTERS:
        found = windows(split)
        texts += found.texts[::step]
        documents += found.documents[::step]
        shards += [split] * len(found.texts[::step])
    return moments_of(
        model,
        texts,
        "resid",
        documents=documents,
        shards=shards,
        pairs="all" if name == "trained" else 1,
        shuffled=name == "shuffled",
        save=FOLDER / f"moments_{name}",
    )


def maps() -> None:
    """Linearity of each step, and ridge maps between depths."""
    for name in ("trained", "untrained"):
        found = linearity(moments(name))
        show(f"Linearity of each step ({name})", found.to_frame())
    steps = list(zip(moments("shuffled").sites, moments("shuffled").sites[1:], strict=False))
    shuffled = ridge_pairs(moments("shuffled"), steps, shuffled=True)
    show(
        "Steps paired with another document's tokens",
        shuffled.table[["source", "target", "r2_vw", "r2_ua", "test_count"]],
    )
    pairs = ridge_pairs(moments(), progress=True)
    pairs.table.to_parquet(FOLDER / "ridge_pairs.parquet")
    show("Ridge maps between depths, mean over pairs of one distance", by_distance(pairs.table))


def by_distance(table: pd.DataFrame) -> pd.DataFrame:
    """Means over the pairs whose target lies so many blocks above the source."""
    depth = {name: number for number, name in enumerate(moments().sites)}
    distance = table["target"].map(depth) - table["source"].map(depth)
    numbers = table.select_dtypes("number")
    means = numbers.groupby(distance).mean().rename_axis("distance").reset_index()
    return means[means["distance"].isin([1, 2, 3, 5, 10, 15, 20, 30])]


@cache
def curve_texts() -> TokenWindows:
    """Test windows for lens curves: the same number of each source."""
    found = windows("test", CURVE_LENGTH)
    table = pd.DataFrame({"source": pd.Series(found.documents).str.split(":").str[0], "document": found.documents})
    each = CURVE_WINDOWS // table["source"].nunique()
    kept = table.sample(frac=1, random_state=0).groupby("source").head(each).index.sort_values()
    texts, documents = ([values[i] for i in kept] for values in (found.texts, found.documents))
    return TokenWindows(texts, documents, [found.starts[i] for i in kept], sum(map(len, texts)), 0)


@cache
def to_last() -> dict[str, LinearMap]:
    """Ridge maps from every depth to the last, of every second window."""
    found = windows("fit")
    return ridge_to_last(smollm2(), found.texts[::2], documents=found.documents[::2], save=FOLDER / "moments_to_last")


@cache
def tuned() -> TunedLens:
    """A tuned lens of eleven depths from the ridge start."""
    found = windows("fit")
    return fit_tuned_lens(
        smollm2(),
        found.texts,
        documents=found.documents,
        depths=TUNED_DEPTHS,
        start=to_last(),
        settings=TunedSettings(optimizer="adam", rate=5e-4, steps=40, tokens=256),
        checkpoint=FOLDER / "tuned",
        progress=True,
    )


@cache
def curves_of() -> dict[str, LensStatistics]:
    """Statistics of the three lenses on held-out documents."""
    model, found = smollm2(), curve_texts()
    ridge = translated_lens(model, to_last(), name="ridge")
    lenses = [logit_lens_of(model), ridge, tuned().lens(model)]
    files = {lens.name: FOLDER / f"statistics_{lens.name}.safetensors" for lens in lenses}
    if all(file.is_file() for file in files.values()):
        return {name: read_statistics(file) for name, file in files.items()}
    made = lens_statistics(model, found.texts, lenses, documents=found.documents, previous=True, progress=True)
    for name, file in files.items():
        write_statistics(file, made[name])
    return made


def curves() -> None:
    """KL, agreement and cross-entropy by depth."""
    for name, found in curves_of().items():
        columns = ["depth", "tokens", "kl", "kl_low", "kl_high", "agrees", "agrees_low", "agrees_high", "cross_entropy"]
        show(f"{name} lens by depth, sinks left out", found.curve()[columns])
        print(f"first word settles at depth {found.settled['depth'].mean():.1f} (mean of tokens)")


def exits() -> None:
    """Layers saved by leaving early."""
    columns = ["lens", "rule", "target", "tau", "agreement", "blocks_saved", "cross_entropy", "model_cross_entropy"]
    table = early_exits(curves_of()).to_frame()
    show("Early exit", table[[name for name in columns if name in table]])


def heads() -> None:
    """Roles of heads on test windows, with repeated and needle texts, and an untrained model beside."""
    found = windows("test")
    roles = head_roles(smollm2(), found.texts, documents=found.documents, checkpoint=FOLDER / "heads")
    table = roles.to_frame()
    table.to_parquet(FOLDER / "head_roles.parquet")
    show("Heads by role", table["role"].value_counts().rename_axis("role").reset_index())
    for role, score in ROLE_SCORES.items():
        columns = ["layer", "head", "kv_head", *(c for c in (score, f"{score}_low", f"{score}_high") if c in table)]
        columns += [c for c in (f"fresh_{score}", f"{role}_control") if c in table]
        show(f"Strongest: {role}", roles.strongest(role, 5)[columns])


FACTS = {
    "The capital of France is": (" Paris", " London"),
    "The capital of Italy is": (" Rome", " London"),
    "The capital of Japan is": (" Tokyo", " London"),
    "The largest planet in the solar system is": (" Jupiter", " Mars"),
    "The opposite of hot is": (" cold", " warm"),
}
PARAPHRASES = ["The capital of France is", "France's capital city is", "The name of the capital of France is"]


def attribution() -> None:
    """Which parts give the answers, how few heads carry them, and what taking those out does."""
    targets, against = [t for t, _ in FACTS.values()], [a for _, a in FACTS.values()]
    found = logit_attribution(smollm2(), list(FACTS), target=targets, against=against, by="head")
    columns = ["text", "target", "against", "logit", "sum", "residual", "top"]
    show("Facts: logit differences and their sums", found.logits[columns].assign(text=list(FACTS)))
    paris = found.of(0)
    show("Largest parts for Paris against London", paris.reindex(paris["value"].abs().nlargest(12).index))
    show("Share of the ten largest heads", share_of_heads(found))
    same = logit_attribution(smollm2(), PARAPHRASES, target=" Paris", against=" London", by="head")
    show("Agreement of paraphrases", paraphrase_agreement(same))
    effects = ablation_effects(
        smollm2(), list(FACTS), target=targets, against=against, reference=windows("test").texts[:8]
    )
    show("Direct part against mean ablation, largest heads", effects)


def attention() -> None:
    """Attention lenses of two layers."""
    found, test = windows("fit"), curve_texts()
    for layer in ATTENTION_LAYERS:
        runs = [
            train_attention_lens(
                smollm2(),
                found.texts,
                layer,
                documents=found.documents,
                max_rows=8_000,
                steps=40,
                seed=seed,
                folder=FOLDER / f"attention_{layer}_{seed}",
                progress=True,
            )
            for seed in (0, 1)
        ]
        scores = runs[0].scores
        summary = {
            "layer": layer,
            "kl": scores.kl,
            "kl_start": runs[0].start_kl,
            "kl_closed_form": runs[0].closed_form_kl,
            "kl_bias": scores.kl_bias,
            "explained": scores.explained,
            "spearman": causal_agreement(smollm2(), runs[0].lens, test.texts[:20]).mean,
            "seed_cosine": float(lens_cosine(runs[0].lens, runs[1].lens).mean()),
        }
        show(f"Attention lens of layer {layer}", pd.DataFrame([summary]))
        show(f"Words of the heads of layer {layer}", scores.to_frame(smollm2(), shown=6))


def memories() -> None:
    """Whether values of MLP neurons say what follows their triggers, and whether layers compose them."""
    found, layers = windows("fit"), [*range(0, 30, 3), 29]
    triggers = trigger_examples(smollm2(), found.texts, k=25, layers=layers, folder=FOLDER / "triggers", progress=True)
    show("Agreement of values and triggers", value_agreement(smollm2(), triggers, progress=True), 4)
    show("Composition", memory_composition(smollm2(), curve_texts().texts[:10], layers, progress=True))


def relations() -> None:
    """Relations as affine maps (LRE), currencies as directions (LRC)."""
    faithful, causal = [], []
    for name in ("capital", "currency", "plural", "opposite"):
        pairs = relation_pairs([name])
        listed = list(zip(pairs["subject"], pairs["object"], strict=True))
        study = relation_study(
            smollm2(), listed, RELATIONS[name].templates[0], groups=pairs["group"].tolist(), depths=range(0, 30, 2)
        )
        known = study.faithfulness[study.faithfulness["prompts"] == "known"]
        facts = {"name": name, "pairs": len(listed), "known": study.pairs["is_known"].mean()}
        faithful.append(facts | {"depth": study.depth, "count": known["count"].max()} | _shares(known))
        edited = study.causality
        causal.append({"name": name, "depth": study.edit_depth, "count": edited["count"].max()} | _shares(edited))
        if name == "currency":
            show("Directions of currencies (LRC)", _concepts(study, listed, RELATIONS[name].templates[0]), 2)
    show("The map gives the model's own word: unseen pairs that the model knows", pd.DataFrame(faithful), 2)
    show("An edit of the subject's state gives another object's word", pd.DataFrame(causal), 2)


def _shares(table: pd.DataFrame) -> dict[str, float]:
    return table.set_index("method")["share"].to_dict()


def _concepts(study: RelationStudy, pairs: list[tuple[str, str]], template: str) -> pd.DataFrame:
    """Accuracy and edits of LRC, three depths."""
    shown = study.pairs[study.pairs["part"] == "example"]
    examples = list(zip(shown["subject"], shown["object"], strict=True))
    tables = [
        concept_study(smollm2(), pairs, template, study.operator, depth, examples=examples).table.assign(depth=depth)
        for depth in (8, 14, 20)
    ]
    return pd.concat(tables)


PARTS: dict[str, Callable[[], None]] = {
    "corpus": corpus,
    "maps": maps,
    "curves": curves,
    "exits": exits,
    "heads": heads,
    "attribution": attribution,
    "attention": attention,
    "memories": memories,
    "relations": relations,
}


def main() -> None:
    """Run the parts named on the command line, all without one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="part")
    for name in parser.parse_args().parts or PARTS:
        start = time.perf_counter()
        PARTS[name]()
        print(f"\n{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
