"""What steering does to SmolLM2-135M-Instruct, and what it costs: the tables of docs/results.md.

    python docs/steering_study.py [methods controls positions heads truth ablation lora loops]

All parts without a name: methods (every method's curve of target against KL, 100 held-out prompts, 32 tokens, five
strengths each), controls (random directions, covariance, sign, labels, layer, prompt, P-control), positions ("all",
"last", "generated", "prompt"), heads (ITI's against random ones), truth (multiple choice on held-out cities), ablation
(the sentiment direction taken out, at all tokens and at commas), lora (a trained rank-one update read as a classifier
and a steering vector), loops (blocks left out and run again). Layer and strength are chosen on development prompts and
passages; what is told is of test prompts and other passages. Records and tables are kept in runs/steering_study/, and a
study that was stopped goes on from there.
"""

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from lens_study import show, smollm2
from sklearn.metrics import roc_auc_score

from microtome.app.kept_fits import kept_table
from microtome.capture.collect import capture
from microtome.capture.generated import Generation
from microtome.capture.sites import Site
from microtome.data.cities import cities
from microtome.data.sentiment import sentiment
from microtome.figures.trade_off_curves import trade_off_curves
from microtome.interventions.accuracy_lost import (
    WordClassifier,
    ablation_accuracies,
    lost_interval,
    matched_directions,
    mean_ablation,
    projection_means,
)
from microtome.interventions.artefact import Artefact
from microtome.interventions.contrast import ContrastRows, contrast, direction_cosines, separation
from microtome.interventions.controls import (
    asked,
    covariance_directions,
    random_directions,
    sign_flip,
)
from microtome.interventions.evaluation import Evaluation, EvaluationRecord, mean_interval
from microtome.interventions.looping import effect_on, loop_ranges, loop_report, skipped
from microtome.interventions.lora_split import LoraSplit
from microtome.interventions.matched_effort import effort_of, strength_for_effort
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
from microtome.interventions.multiple_choice import Choices
from microtome.interventions.operations import Add
from microtome.interventions.positions import Tokens
from microtome.interventions.steering import Intervention, Steering, anatomy_of
from microtome.interventions.steering_task import (
    NEGATIVE_WORDS,
    POSITIVE_WORDS,
    SteeringTask,
    neutral_passages,
    sentiment_task,
    shards_of_groups,
    split_task,
)
from microtome.interventions.targets import AttributeWords, ProbeScore, VaderScore
from microtome.interventions.trade_off import compare_at, trade_off_table
from microtome.lenses.next_token import CleanTexts

FOLDER = Path("runs/steering_study")
LIMIT = 0.25  # nats of KL a token on neutral text
PROBE_SITE = "resid_post.14"
TOKENS = 32
GATED = 8  # tokens of a neutral passage by which a gate decides
TARGETS = ("independent_probe", "vader_same_source", "word_odds")


kept = partial(kept_table, FOLDER / "tables")


@cache
def task() -> SteeringTask:
    """Tweets and films for directions and prompts, products and editorials for the probe."""
    return sentiment_task()


@cache
def probe() -> ProbeScore:
    """The judge: other sources, another layer."""

    def make() -> pd.DataFrame:
        found = ProbeScore.fit(smollm2(), task().other, PROBE_SITE)
        return pd.DataFrame({"weight": found.direction.numpy()}).assign(
            bias=found.bias, held_out_auroc=found.facts["held_out_auroc"]
        )

    table = kept("probe", make)
    facts = {"held_out_auroc": float(table["held_out_auroc"].iloc[0])}
    return ProbeScore(PROBE_SITE, torch.tensor(table["weight"].to_numpy()), float(table["bias"].iloc[0]), facts)


@cache
def word_odds() -> AttributeWords:
    """log p(good, great, ...) - log p(bad, awful, ...)."""
    return AttributeWords.of(smollm2(), POSITIVE_WORDS, NEGATIVE_WORDS)


@cache
def evaluation(split: str = "test", neutral_prompt: int = 1) -> Evaluation:
    """100 test or 40 development prompts."""
    return Evaluation(
        smollm2(),
        task().prompts[split]["text"].tolist(),
        [probe(), VaderScore(), word_odds()],
        task().neutral if split == "test" else dev_passages(),
        Generation(max_new_tokens=TOKENS),
        neutral_prompt=neutral_prompt,
    )


@cache
def dev_passages() -> list[str]:
    """Neutral text that no test number is of."""
    known = set(task().neutral)
    return [text for text in neutral_passages(80) if text not in known][:12]


@cache
def dev_clean(neutral_prompt: int = 1) -> CleanTexts:
    """The same, as the unsteered model takes it."""
    return CleanTexts.of(smollm2(), dev_passages(), prompt_tokens=neutral_prompt)


def neutral_prompt_of(steering: Steering | None) -> int:
    """Tokens of a neutral passage that count as its prompt: a gate needs some to decide by."""
    return GATED if any(one.gate is not None for one in steering or ()) else 1


def dev_kl(steering: Steering) -> float:
    """KL on the development passages."""
    clean = dev_clean(neutral_prompt_of(steering))
    return float(clean.kl(steering.edits(smollm2())).kl.mean())


def record(name: str, steer: Callable[[], Steering | None], split: str = "test", **more: object) -> EvaluationRecord:
    """One condition; nothing is fitted where it is there already."""
    folder = FOLDER / split / name.replace(" ", "_")
    if (folder / "record.json").is_file():
        return EvaluationRecord.load(folder)
    begun = time.perf_counter()
    prompts = more.pop("prompts", None)
    steering = steer()
    bench = evaluation(split, neutral_prompt_of(steering))
    found = bench.run(name, steering, prompts=prompts, facts=more)  # pyright: ignore[reportArgumentType]
    found.save(folder)
    print(f"[{time.perf_counter() - begun:4.0f} s] {found!r}", flush=True)
    return found


def base(split: str = "test") -> EvaluationRecord:
    """The unsteered model."""
    return record("unsteered", lambda: None, split)


def calibrated(name: str, fitted: Callable[[], FittedMethod]) -> pd.DataFrame:
    """The search for the strength whose KL on development passages is the limit."""
    return kept(f"strength {name}", lambda: strengths_tried(fitted(), dev_kl, LIMIT))


def at_limit(name: str, fitted: Callable[[], FittedMethod]) -> float:
    """The strength at the limit (the largest, where it is out of reach)."""
    return strength_at_limit(calibrated(name, fitted))


@cache
def captured() -> MethodFits:
    """What methods of the sentiment task share."""
    return MethodFits(smollm2(), task(), "resid_post.0")


def rows() -> ContrastRows:
    """The stream behind every block at the last token of the contrast's texts."""
    return captured().rows


@cache
def site() -> str:
    """Where single-site methods act: the depth that moves the probe most at the limit, on development prompts."""

    def make() -> pd.DataFrame:
        found = []
        for place in [one for one in depths_to_try(smollm2(), rows(), 5) if one != PROBE_SITE]:
            artefact = contrast(smollm2(), rows(), sites=[place])
            one = FittedMethod(
                "mean", lambda s, a=artefact: a.steering(smollm2(), strength=s), (0.5, 1.0, 2.0, 3.0, 4.0)
            )
            strength = at_limit(f"depth {place}", lambda one=one: one)
            steered = record(f"mean {place}", lambda one=one, s=strength: one.steer(s), "dev", strength=strength)
            row = {"site": place, "strength": strength, "kl": steered.kl}
            found.append(row | {name: steered.texts[name].mean() for name in TARGETS})
        return pd.DataFrame(found)

    table = kept("depths", make)
    return str(table.loc[table["independent_probe"].idxmax(), "site"])


@cache
def fits() -> MethodFits:
    """Of the chosen depth."""
    rows()  # captured once, for every depth
    return captured().at(site())


def fitted(name: str) -> FittedMethod:
    """A method of the sentiment task."""
    return fit_method(name, fits())


def curve(name: str) -> list[EvaluationRecord]:
    """A method at its five strengths."""
    return [
        record(
            f"{name} {strength:.4g}",
            lambda s=strength: fitted(name).steer(s),
            method=name,
            strength=strength,
            site=site(),
        )
        for strength in strengths_about(calibrated(name, lambda: fitted(name)))
    ]


def methods() -> None:
    """Every method on one set of axes."""
    table = kept("separation", lambda: separation(rows()))
    show("Separation of the two classes by depth (held-out folds)", table[::3])
    print(f"\nprobe at {PROBE_SITE}: AUROC on held-out groups {probe().facts['held_out_auroc']:.3f}; site {site()}")
    show("Depths at the limit, 40 development prompts", kept("depths", pd.DataFrame))
    curves = {name: curve(name) for name in METHODS}
    found = trade_off_table([one for each in curves.values() for one in each], base())
    (FOLDER / "tables").mkdir(parents=True, exist_ok=True)
    found.to_parquet(FOLDER / "tables" / "methods.parquet")
    columns = [*("method", "strength", "kl"), *(f"{name}_gain" for name in TARGETS)]
    more = ["perplexity", "perplexity_whole", "distinct_2", "repetition", "empty", "effort", "relative"]
    show("Every condition", found[[*columns, *more]])
    for target in TARGETS:
        at = compare_at(curves, base(), target, LIMIT, reference="mean")
        half = compare_at(curves, base(), target, LIMIT / 2, reference="mean")
        show(f"Gain in {target} at a KL of {LIMIT}", at.sort_values("gain", ascending=False))
        show(f"Gain in {target} at a KL of {LIMIT / 2}", half.sort_values("gain", ascending=False))
        figure = trade_off_curves(found.assign(control=False), f"{target}_gain", limit=LIMIT)
        figure.write_html(FOLDER / f"{target}.html", include_plotlyjs="directory")
    single = [fitted(name).artefact for name in ("mean", "whitened", "pca", "logistic")]
    show("Cosines of directions", direction_cosines([one for one in single if one is not None], site()).reset_index())


def brief(records: Sequence[EvaluationRecord]) -> pd.DataFrame:
    """Gains with intervals over the unsteered model, and what they cost."""
    gains = [f"{name}_gain{end}" for name in TARGETS for end in ("", "_low", "_high")]
    return trade_off_table(records, base())[["condition", "kl", "effort", *gains, "perplexity", "repetition"]]


def scored(name: str, steerings: dict[str, Callable[[], Steering]]) -> pd.DataFrame:
    """KL on development passages and log-odds of words on the test prompts, without writing."""

    def make() -> pd.DataFrame:
        prompts = task().prompts["test"]["text"].tolist()
        clean = word_odds().log_odds(smollm2(), prompts, None)
        found = []
        for condition, steer in steerings.items():
            steering = steer()
            odds = word_odds().log_odds(smollm2(), prompts, steering) - clean
            mean, low, high = mean_interval(odds)
            found.append({"condition": condition, "kl": dev_kl(steering), "odds": mean, "low": low, "high": high})
        return pd.DataFrame(found)

    return kept(name, make)


def controls() -> None:
    """What the same push does elsewhere."""
    model, strength = smollm2(), at_limit("mean", lambda: fitted("mean"))
    mean = fitted("mean").artefact
    assert mean is not None
    drawn = {
        "sphere": random_directions(mean, 20),
        "covariance": covariance_directions(mean, [rows().activations[site()]], 20),
    }

    def steer(artefact: Artefact) -> Callable[[], Steering]:
        return lambda: artefact.steering(model, strength=strength)

    named = {f"{kind} {n}": steer(one) for kind, each in drawn.items() for n, one in enumerate(each)}
    table = scored("random", {"mean": steer(mean), "sign flip": steer(sign_flip(mean)), **named})
    kinds = table.assign(kind=table["condition"].str.replace(r" \d+$", "", regex=True))
    show(
        f"Equal push ({strength:.3g} class gaps at {site()}): KL and gain in log odds of words",
        kinds.groupby("kind", sort=False)
        .agg(n=("kl", "size"), kl=("kl", "mean"), odds=("odds", "mean"), least=("odds", "min"), most=("odds", "max"))
        .reset_index(),
    )
    own = float(table["kl"].iloc[0])
    records = []
    for kind in drawn:
        some = kinds[kinds["kind"] == kind]
        nearest = some.loc[(some["kl"] - own).abs().sort_values().index[:3], "condition"]
        records += [record(f"control {name}", named[name], method=kind, strength=strength) for name in nearest]
    layer = Site.parse(site()).layer or 0
    elsewhere = f"resid_post.{layer - 8}"
    conditions: dict[str, Callable[[], Steering | None]] = {
        "sign flip": steer(sign_flip(mean)),
        "shuffled labels": steer(fits().of_shuffled_labels(mean)),
        f"the vector at {elsewhere}": steer(mean.moved(elsewhere)),
    }
    records += [record(f"control {name}", one, method=name, strength=strength) for name, one in conditions.items()]
    wish = "Write something positive and happy."
    prompts = asked(task().prompts["test"]["text"].tolist(), wish)
    records.append(record("control prompt only", lambda: None, method="prompt only", prompts=prompts))

    def p_level() -> pd.DataFrame:
        effort = effort_of(model, steer(mean)(), dev_passages(), prompt_tokens=2)
        level = strength_for_effort(fitted("p").steer, effort, model, dev_passages(), prompt_tokens=2, start=2.0)
        return pd.DataFrame({"effort": [effort], "level": [level]})

    level = float(kept("p at matched effort", p_level)["level"].iloc[0])
    records.append(
        record("control P at matched effort", lambda: fitted("p").steer(level), method="P, matched", strength=level)
    )
    mine = record(f"mean {strength:.4g}", steer(mean), method="mean", strength=strength, site=site())
    show("Controls, written", brief([mine, *records]))


def positions() -> None:
    """Where along the text the same vector acts."""
    strength = at_limit("mean", lambda: fitted("mean"))
    mean = fitted("mean").artefact
    assert mean is not None
    records = [
        record(
            f"mean {where}",
            lambda w=where: mean.steering(smollm2(), strength=strength, positions=w),
            positions=where,
            strength=strength,
            method=where,
        )
        for where in ("generated", "last", "all", "prompt")
    ]
    show("The same push at other tokens", brief(records))
    same = (records[0].texts["completion"] == records[1].texts["completion"]).mean()
    print(f"\n`last` with a cache writes what `generated` writes in {same:.0%} of texts")


def heads() -> None:
    """ITI's heads against as many random others, with their own directions."""
    strength = at_limit("iti", lambda: fitted("iti"))
    shifts = fits().shifts(fits().heads, "logistic")
    show("ITI's best heads (accuracy on inner folds)", shifts.table.head(10))
    count = 48
    drawn = {
        f"random {seed}": (
            lambda s=seed: shifts.random_heads(smollm2(), count, seed=s).steering(smollm2(), strength=strength)
        )
        for seed in range(10)
    }
    top = fitted("iti").artefact
    assert top is not None
    table = scored("iti heads", {"top": lambda: top.steering(smollm2(), strength=strength), **drawn})
    show(f"{count} heads at {strength:.3g} deviations: KL and gain in log odds", table)
    nearest = table.iloc[1:].loc[(table["kl"].iloc[1:] - table["kl"].iloc[0]).abs().sort_values().index[:2]]
    records = [record(f"iti {strength:.4g}", lambda: fitted("iti").steer(strength), method="iti")]
    records += [record(f"iti {name}", drawn[name], method=name) for name in nearest["condition"]]
    show("Written", brief(records))


@cache
def truth_task() -> SteeringTask:
    """Statements on cities; whole cities are held out."""
    table = cities()
    known = pd.DataFrame({"text": table["text"], "label": table["label"].astype(bool), "group": table["group"]})
    return split_task(known, name="cities", contrast=600, words=4, neutral=task().neutral, names=("true", "false"))


def choices(split: str) -> Choices:
    """Pairs of statements on cities of one split, in popularity's order."""
    table = cities()
    shard = {"dev": "validation", "test": "test"}[split]
    mine = table[shards_of_groups(table["group"].tolist(), 0) == shard]
    return Choices.of_statements(mine)


def truth() -> None:
    """Does the model choose the true country more often?"""
    model = smollm2()
    own = MethodFits(model, truth_task(), "resid_post.18")
    asked_of = choices("test")

    def make() -> pd.DataFrame:
        clean = asked_of.margins(model)
        found = [_choice_row("unsteered", 0.0, clean, clean, 0.0)]
        for name in ("mean", "whitened", "pca", "logistic", "iti", "nl-iti", "linear-act", "ablation", "p"):
            one = fit_method(name, own)
            top = at_limit(f"truth {name}", lambda one=one: one)
            for strength in (0.25 * top, 0.5 * top, top):
                steering = one.steer(strength)
                margins = asked_of.margins(model, steering)
                found.append(_choice_row(name, strength, margins, clean, dev_kl(steering)))
            print(name, flush=True)
        shifts = own.shifts(own.heads, "logistic")
        top = at_limit("truth iti", lambda: fit_method("iti", own))
        for seed in range(5):
            steering = shifts.random_heads(model, 48, seed=seed).steering(model, strength=top)
            found.append(
                _choice_row(f"random heads {seed}", top, asked_of.margins(model, steering), clean, dev_kl(steering))
            )
        mean = fit_method("mean", own).artefact
        assert mean is not None
        top = at_limit("truth mean", lambda: fit_method("mean", own))
        for number, one in enumerate(random_directions(mean, 5)):
            steering = one.steering(model, strength=top)
            margins = asked_of.margins(model, steering)
            found.append(_choice_row(f"random direction {number}", top, margins, clean, dev_kl(steering)))
        return pd.DataFrame(found)

    table = kept("truth", make)
    show(f"Multiple choice on {len(asked_of)} questions on held-out cities", table)


def _choice_row(name: str, strength: float, margins: np.ndarray, clean: np.ndarray, kl: float) -> dict[str, object]:
    right, before = (margins > 0).astype(float), (clean > 0).astype(float)
    gain, low, high = mean_interval(right - before)
    shift, shift_low, shift_high = mean_interval(margins - clean)
    row = {"method": name, "strength": strength, "kl": kl, "accuracy": right.mean(), "margin": margins.mean()}
    row |= {"gain": gain, "gain_low": low, "gain_high": high}
    return row | {"margin_gain": shift, "margin_low": shift_low, "margin_high": shift_high}


def reviews(split: str, count: int) -> pd.DataFrame:
    """Tweets and films of groups that no direction was found in, texts with a comma only, as many of either class."""
    table = sentiment(["tweets", "movie"], per_domain=2000)
    shard = {"dev": "validation", "test": "test"}[split]
    mine = table[shards_of_groups(table["group"].tolist(), 0) == shard]
    mine = mine[mine["text"].str.contains(",") & (mine["text"].str.len() < 300)]
    drawn = mine.sample(frac=1, random_state=0)
    return pd.concat([drawn[drawn["label"] == label].head(count // 2) for label in (True, False)])


def ablation() -> None:
    """How much of the model's own classification hangs on the sentiment direction, at all tokens and at commas."""
    model = smollm2()
    dev, test = reviews("dev", 200), reviews("test", 300)
    labels = test["label"].astype(bool).tolist()
    classifier = WordClassifier("Review: {text}\nThe sentiment of this review is", " positive", " negative")

    def make() -> pd.DataFrame:
        asked_of = classifier.fitted(model, dev["text"].tolist(), dev["label"].astype(bool).tolist())
        direction = contrast(model, rows(), sites=[site()]).vector()
        sites = [f"resid_post.{layer}" for layer in range(anatomy_of(model).layers)]
        prompts = [asked_of.template.format(text=text) for text in task().contrast["text"].head(120)]
        commas = Tokens.saying(model, ",")
        acts = capture(model, prompts, [site()], "all", progress=False)
        held = acts[site()][torch.tensor((acts.rows["position"] > 0).to_numpy())].float()
        isotropic = torch.nn.functional.normalize(noise(10, len(direction)), dim=1)
        directions = torch.cat([direction[None], isotropic, matched_directions(held, direction, 10)])
        directions = torch.nn.functional.normalize(directions, dim=1)
        names = ["sentiment", *(f"sphere {n}" for n in range(10)), *(f"matched {n}" for n in range(10))]
        found = {}
        for where, tokens, positions in (("all", None, "rest"), ("commas", commas, commas)):
            means, _ = projection_means(model, prompts, sites, directions, tokens)
            for number, name in enumerate(names):
                found[f"{where}: {name}"] = mean_ablation(
                    directions[number], sites, means[:, number].tolist(), positions
                )
        table = ablation_accuracies(model, asked_of, test["text"].tolist(), labels, found)
        groups = test["group"].tolist()
        base_right = table[table["condition"] == "base"]["right"].to_numpy()
        each = []
        for condition, part in table.groupby("condition", sort=False):
            row: dict[str, object] = {"condition": condition, "accuracy": part["right"].mean()}
            if condition != "base":
                share = lost_interval(base_right, part["right"].to_numpy(), groups)
                row |= dict(zip(("lost", "lost_low", "lost_high"), share, strict=True))
            each.append(row)
        return pd.DataFrame(each)

    table = kept("ablation", make)
    table["kind"] = table["condition"].str.replace(r" \d+$", "", regex=True)
    shown = table.groupby("kind", sort=False).agg(
        n=("accuracy", "size"), accuracy=("accuracy", "mean"), lost=("lost", "mean"), most=("lost", "max")
    )
    show(f"Accuracy of {classifier.yes!r} against {classifier.no!r} on {len(test)} texts", shown.reset_index())
    own = table[table["condition"].str.endswith("sentiment")]
    show("The sentiment direction, with intervals over groups", own)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LORA_LAYER, LORA_STEPS = 14, 60


def lora() -> None:
    """A rank-one update trained on positive texts: what it reads, and what its writer does as a steering vector."""
    model = smollm2()
    update = kept("lora", _trained_update)
    down = torch.tensor(update["down"].dropna().to_numpy(), dtype=torch.float32)[None]
    up = torch.tensor(update["up"].dropna().to_numpy(), dtype=torch.float32)[:, None]
    split = LoraSplit.of(down, up)
    inner, outer = f"mlp_act.{LORA_LAYER}", f"mlp_out.{LORA_LAYER}"
    merged = split.edit(inner, outer)

    def reads() -> pd.DataFrame:
        test = reviews("test", 300)
        x = capture(model, test["text"].tolist(), [inner], "mean", progress=False)[inner].flatten(1)
        labels = test["label"].astype(bool).to_numpy()
        own = split.auroc(x, labels)
        drawn = [roc_auc_score(labels, (x @ one).numpy()) for one in noise(20, x.shape[1])]
        every = capture(model, test["text"].tolist(), [inner], "all", progress=False)[inner].flatten(1)
        tokens = split.scores(every)
        return pd.DataFrame(
            [
                {
                    "auroc": own,
                    "random_low": min(drawn),
                    "random_high": max(drawn),
                    "mean_score": float(tokens.mean()),
                    "deviation": float(tokens.std()),
                    "written": float(split.write.norm()),
                }
            ]
        )

    classifier = kept("lora classifier", reads)
    show(f"The classifier: a . mlp_act.{LORA_LAYER}, positive against negative texts", classifier)
    score = float(classifier["mean_score"].iloc[0])
    direction = contrast(model, rows(), sites=[f"resid_post.{LORA_LAYER}"]).vector()
    cosine = float(torch.cosine_similarity(split.write[0], direction, dim=0))
    print(f"\ncosine of the writer to the mean difference at resid_post.{LORA_LAYER}: {cosine:.3f}")
    writer = Steering(Intervention(outer, split.vector(score), "all", name="writer"))
    records = [
        record("lora update", lambda: merged, method="rank-one update"),
        record("lora writer", lambda: writer, method="writer at the mean score"),
        record(
            "lora random writer",
            lambda: Steering(
                Intervention(
                    outer, Add(score * split.write.norm() * torch.nn.functional.normalize(noise(576), dim=0)), "all"
                )
            ),
            method="random writer",
        ),
    ]
    show("Written", brief(records))


def _trained_update() -> pd.DataFrame:
    """A rank-one LoRA of one down projection, trained to predict positive texts; columns down and up, scaled."""
    import peft

    model = smollm2()
    module = copy.deepcopy(model.module)
    settings = peft.LoraConfig(
        r=1, lora_alpha=8, target_modules=["down_proj"], layers_to_transform=[LORA_LAYER], lora_dropout=0.0
    )
    torch.manual_seed(0)
    trained = peft.get_peft_model(module, settings)
    layer = trained.base_model.model.model.layers[LORA_LAYER].mlp.down_proj
    texts = task().texts(True)
    tokenizer = model.require_tokenizer()
    optimiser = torch.optim.Adam([p for p in trained.parameters() if p.requires_grad], lr=3e-3)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    for step in range(LORA_STEPS):
        some = [texts[order[(8 * step + i) % len(texts)]] for i in range(8)]
        batch = tokenizer(some, return_tensors="pt", padding=True, truncation=True, max_length=64)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = trained(**batch, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 10 == 0:
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)
    scale = layer.scaling["default"]
    down = layer.lora_A["default"].weight.detach()[0]
    up = scale * layer.lora_B["default"].weight.detach()[:, 0]
    return pd.DataFrame({"down": pd.Series(down.numpy()), "up": pd.Series(up.numpy())})


def loops() -> None:
    """Every block left out, and ranges run again."""
    model, texts = smollm2(), dev_passages()
    layers = anatomy_of(model).layers

    def skips() -> pd.DataFrame:
        clean, found = dev_clean().run(), []
        for layer in range(layers):
            with skipped(model, layer):
                found.append({"layer": layer, **effect_on(clean)})
        return pd.DataFrame(found)

    show("Each block left out: KL and cross-entropy added, nats a token", kept("skips", skips))
    for weighting in ("uniform", "plain"):
        table = kept(
            f"ranges {weighting}",
            lambda w=weighting: loop_ranges(model, texts, 4, 2, w, firsts=range(0, layers - 3, 2)),
        )
        show(f"Four blocks run twice, {weighting}", table)
    best = int(kept("ranges uniform", pd.DataFrame).set_index("first")["cross_entropy_added"].idxmin())
    reports = kept(
        "loop reports",
        lambda: pd.concat(
            [
                loop_report(model, texts, best, best + 4, repeats, weighting).assign(n=repeats, weighting=weighting)
                for repeats in (2, 4)
                for weighting in ("uniform", "average", "plain")
            ]
        ),
    )
    show(f"Blocks {best} to {best + 3} run again", reports)


PARTS: dict[str, Callable[[], None]] = {
    "methods": methods,
    "controls": controls,
    "positions": positions,
    "heads": heads,
    "truth": truth,
    "ablation": ablation,
    "lora": lora,
    "loops": loops,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run some parts, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="parts to run; all without a name")
    chosen = parser.parse_args(argv).parts or list(PARTS)
    pd.set_option("display.width", 250)
    pd.set_option("display.max_columns", 40)
    for name in chosen:
        begun = time.perf_counter()
        print(f"\n## {name}", flush=True)
        PARTS[name]()
        print(f"\n({name}: {time.perf_counter() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
