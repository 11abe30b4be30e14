import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from microtome.probes.hardness import gap_recovered, hardness_strata
from microtome.probes.metrics import fold_auroc
from microtome.probes.transfer import transfer
from microtome.probes.transfer_fits import source_scores

FEW = {"folds": 3, "inner_folds": 3, "bootstraps": 100}
STRENGTHS = (0.01, 0.1, 1.0)


@pytest.fixture(scope="module")
def case():
    """Three domains of 80 rows. Site 0: one direction in a and b, turned over in c. Site 1: strong, but only in a."""
    rng = np.random.default_rng(0)
    domain = np.repeat(["a", "b", "c"], 80)
    positive = np.tile(rng.permutation(np.arange(80) % 2 == 0), 3)
    features = rng.normal(size=(2, 240, 5))
    features[0, :, 0] += 1.5 * positive * np.where(domain == "c", -1, 1)
    features[1, domain == "a", 1] += 3.0 * positive[domain == "a"]
    sites = {f"resid_post.{layer}": torch.from_numpy(x) for layer, x in enumerate(features)}
    return sites, positive, domain


@pytest.fixture(scope="module")
def made(case):
    sites, positive, domain = case
    return transfer(sites, positive, domain, groups="rows", **FEW)


def test_shared_turned_and_private_directions_show(made):
    auroc = made.table.set_index(["site", "train", "test"])["auroc"]
    shared, private = auroc["resid_post.0"], auroc["resid_post.1"]
    for train, test in (("a", "a"), ("a", "b"), ("b", "a"), ("c", "c")):
        assert shared[train, test] > 0.75
    for train, test in (("a", "c"), ("c", "b")):
        assert shared[train, test] < 0.25
    assert private["a", "a"] > 0.95
    assert all(0.25 < private[pair] < 0.75 for pair in (("a", "b"), ("a", "c"), ("b", "c"), ("c", "b")))
    # probes of noise lean along a's private direction by luck, and the interval does not know it
    to_a = made.table.query("test == 'a' and train != 'a' and site == 'resid_post.1'").set_index("train")
    assert to_a.loc["b", "auroc_high"] < 0.3
    assert to_a.loc["c", "auroc_low"] > 0.7
    assert to_a["control_reach"].min() > 0.15
    assert ((made.table["auroc_low"] <= made.table["auroc"]) & (made.table["auroc"] <= made.table["auroc_high"])).all()
    assert made.table["test_rows"].eq(80).all()
    assert made.domains == ("a", "b", "c")
    assert made.table["train"].tolist() == ["a"] * 6 + ["b"] * 6 + ["c"] * 6


def test_the_source_chooses_without_the_target(case, made):
    sites, positive, domain = case
    chosen = made.choices.set_index(["train", "test", "rule"])
    # in a the private site is the better one; for b it is worth nothing
    assert chosen.loc[("a", "b", "source"), "site"] == "resid_post.1"
    assert chosen.loc[("a", "b", "target"), "site"] == "resid_post.0"
    assert chosen.loc[("a", "b", "target"), "layer"] == 0
    assert chosen.loc[("a", "b", "source"), "auroc"] < 0.7 < 0.75 < chosen.loc[("a", "b", "target"), "auroc"]
    best = made.table.groupby(["train", "test"])["auroc"].max()
    for pair, auroc in best.items():
        assert chosen.loc[(*pair, "hindsight"), "auroc"] == pytest.approx(auroc)
    # a's choice stays what it is when the target's labels are turned over
    turned = np.where(domain == "b", ~positive, positive)
    again = transfer(sites, turned, domain, groups="rows", **FEW).choices.set_index(["train", "test", "rule"])
    assert again.loc[("a", "b", "source"), "site"] == "resid_post.1"


def test_the_choice_by_the_target_sees_none_of_the_rows_it_is_scored_on():
    rng = np.random.default_rng(7)
    positive, domain = np.arange(120) % 2 == 0, np.repeat(["a", "b"], 60)
    noise = {f"resid_post.{layer}": rng.normal(size=(120, 3)) for layer in range(12)}
    made = transfer(noise, positive, domain, groups="rows", **FEW)
    chosen = made.choices.set_index(["train", "test", "rule"])["auroc"]
    for train, test in (("a", "b"), ("b", "a")):
        pairs = [made.pair(train, test, site) for site in made.sites]
        labels, folds = pairs[0]["positive"], pairs[0]["test"]
        scores = torch.stack([pair["scores"] for pair in pairs])
        composed = torch.empty_like(scores[0])
        for number, rows in enumerate(folds):
            others = folds[[fold for fold in range(3) if fold != number]]
            composed[rows] = scores[fold_auroc(scores, labels, others).argmax(), rows]
        assert chosen[train, test, "target"] == pytest.approx(fold_auroc(composed, labels, folds).item())
        assert chosen[train, test, "target"] < chosen[train, test, "hindsight"]


def test_agreement_with_a_loop_over_scikit_learn(case):
    sites, positive, domain = case
    made = transfer(sites, positive, domain, groups="rows", strengths=[0.3], **FEW)
    x = sites["resid_post.0"].numpy()
    won, pairs = 0.0, 0
    for rows in made.test.numpy():
        train = (domain == "a") & ~rows
        mean, scale = x[train].mean(axis=0), x[train].std(axis=0)
        model = LogisticRegression(C=0.3, solver="newton-cholesky", tol=1e-12).fit(
            (x[train] - mean) / scale, positive[train]
        )
        for target in ("a", "b"):
            tested = rows & (domain == target)
            logits = model.decision_function((x[tested] - mean) / scale)
            np.testing.assert_allclose(made.scores[0, 0, tested], logits, atol=1e-3)
        n = positive[tested].sum() * (~positive[tested]).sum()
        won, pairs = won + n * roc_auc_score(positive[tested], logits), pairs + n
    row = made.table.query("train == 'a' and test == 'b' and site == 'resid_post.0'").iloc[0]
    assert row["auroc"] == pytest.approx(won / pairs)
    right = (made.scores[0, 0, domain == "b"] > 0).numpy() == positive[domain == "b"]
    assert row["accuracy"] == pytest.approx(right.mean())


def test_the_strength_is_chosen_on_inner_rows_of_the_source(case):
    sites, positive, domain = case
    x = sites["resid_post.0"].numpy()
    rows = np.arange(240) % 3 == 0
    own = np.flatnonzero((domain == "a") & ~rows)
    train = np.zeros((1, 3, 240), dtype=bool)
    train[0, :, own] = np.stack([own % 2 == 0, own % 2 == 1, np.ones(len(own), dtype=bool)], axis=1)
    _, inner_loss = source_scores(
        torch.from_numpy(x[None]),
        torch.from_numpy(positive[None]),
        torch.from_numpy(rows[None]),
        torch.from_numpy(train),
        STRENGTHS,
    )
    losses = []
    for strength in STRENGTHS:
        total = 0.0
        for mask in train[0, :2]:
            mean, scale = x[mask].mean(axis=0), x[mask].std(axis=0)
            model = LogisticRegression(C=strength, solver="newton-cholesky", tol=1e-12)
            model.fit((x[mask] - mean) / scale, positive[mask])
            held_out = train[0, 2] & ~mask
            p = model.predict_proba((x[held_out] - mean) / scale)
            total -= np.log2(p[np.arange(len(p)), positive[held_out].astype(int)]).sum()
        losses.append(total / len(own))
    assert inner_loss.item() == pytest.approx(min(losses), abs=1e-4)


def test_groups_in_two_domains_never_train_and_test_together():
    # every entity has a row in each domain and a label of its own: its own features alone give it away
    rng = np.random.default_rng(1)
    entity = np.tile(np.arange(90), 2)
    positive = (rng.permutation(90) % 2 == 0)[entity]
    features = rng.normal(size=(90, 60))[entity] + 0.05 * rng.normal(size=(180, 60))
    domain = np.repeat(["affirmed", "negated"], 90)
    table = transfer({"a": features}, positive, domain, groups=entity, **FEW).table
    assert table["auroc"].between(0.3, 0.7).all()
    leaky = LogisticRegression(C=10.0).fit(features[:90], positive[:90])
    assert roc_auc_score(positive[90:], leaky.decision_function(features[90:])) > 0.95


def test_no_bit_of_a_fold_depends_on_its_test_rows(case, made):
    sites, positive, domain = case
    clean = made
    row = int((clean.test[1].numpy() & (domain == "a")).nonzero()[0][0])
    spoiled = {name: x.clone() for name, x in sites.items()}
    for x in spoiled.values():
        x[row] = 1e9
    dirty = transfer(spoiled, positive, domain, groups="rows", **FEW)
    others = clean.test[1].clone()
    others[row] = False
    assert torch.equal(clean.scores[..., others], dirty.scores[..., others])
    assert not torch.equal(clean.scores, dirty.scores)


def test_pairs_and_figures(made):
    pair = made.pair("a", "b", "resid_post.1")
    assert torch.equal(pair["scores"], made.scores[0, 1, 80:160])
    assert pair["groups"].tolist() == list(range(80))
    figure = made.plot(site="resid_post.0")
    assert list(figure.layout.yaxis.ticktext) == ["a", "b", "c"]
    assert (
        figure.data[0].z[0][1]
        == made.table.query("train == 'a' and test == 'b' and site == 'resid_post.0'")["auroc"].item()
    )
    assert made.plot(rule="target", value="accuracy").data[0].z.shape == (3, 3)
    with pytest.raises(KeyError, match="no rule 'best'"):
        made.plot(rule="best")
    with pytest.raises(KeyError, match="'d' is none of a, b, c"):
        made.pair("a", "d", "resid_post.0")


def test_repr_names_the_best_move_between_domains(made):
    apart = made.table[made.table["train"] != made.table["test"]]
    best = apart.sort_values("auroc", ascending=False).iloc[0]
    assert repr(made).startswith(f"Transfer(3 domains, {len(made.sites)} sites, 240 rows; best between domains ")
    assert f"{best['train']} to {best['test']} at {best['site']} AUROC {best['auroc']:.3f} [" in repr(made)
    assert "<th>rule</th>" in made._repr_html_()


def test_bad_input_is_explained(case):
    sites, positive, domain = case
    with pytest.raises(ValueError, match="All rows are of the domain 'a'"):
        transfer(sites, positive, ["a"] * 240, groups="rows")
    with pytest.raises(ValueError, match="239 entries for 240 rows"):
        transfer(sites, positive, domain[1:], groups="rows")
    with pytest.raises(ValueError, match="Row 3 has no domain"):
        transfer(sites, positive, [*domain[:3], None, *domain[4:]], groups="rows")
    one_sided = np.where(domain == "b", True, positive)
    with pytest.raises(ValueError, match="Domain 'b' has its negative rows in 0 groups"):
        transfer(sites, one_sided, domain, groups="rows")
    with pytest.raises(ValueError, match="labels are classes"):
        transfer(sites, [str(n % 3) for n in range(240)], domain, groups="rows")
    with pytest.raises(ValueError, match="bootstraps=5, controls=3"):
        transfer(sites, positive, domain, groups="rows", bootstraps=5)
    with pytest.raises(KeyError, match="domains='source' is no column"):
        transfer(sites, positive, "source", groups="rows")


def test_strata_are_the_outer_quantiles():
    strata = hardness_strata(np.arange(100)[::-1])
    assert (strata == "easy").sum() == (strata == "hard").sum() == 30
    assert strata[0] == "hard"
    assert strata[-1] == "easy"
    assert strata[50] == "middle"
    with pytest.raises(ValueError, match="Too many rows have the value 1"):
        hardness_strata([1, 1, 1, 1, 2])
    with pytest.raises(ValueError, match="one finite number per row"):
        hardness_strata([1.0, float("nan")])
    with pytest.raises(ValueError, match=r"easy=0\.6, hard=0\.6"):
        hardness_strata([1.0, 2.0], easy=0.6, hard=0.6)


@pytest.mark.parametrize("metric", ["auroc", "accuracy"])
def test_the_gap_recovered_is_the_ratio_and_unbounded_without_a_gap(metric):
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(600, generator=generator) < 0.5
    noise = torch.randn(3, 600, generator=generator, dtype=torch.float64)
    groups, test = torch.arange(600) // 2, torch.arange(600) // 2 % 5 == torch.arange(5)[:, None]
    signed = positive.double() - 0.5
    easy, hard, useless = noise[0] + 1.2 * signed, noise[1] + 2.0 * signed, noise[2]
    found = gap_recovered(easy, hard, positive, groups, test, metric=metric)
    assert 0.5 < found.recovered < 0.95
    assert found.recovered_low < found.recovered < found.recovered_high < 1.2
    assert found.gap_low < found.gap < found.gap_high
    assert found.difference_low < found.difference < 0
    assert found.recovered == pytest.approx(1 + found.difference / found.gap)
    same = gap_recovered(hard, hard, positive, groups, test, metric=metric, unsupervised=useless)
    assert same.recovered == same.recovered_low == same.recovered_high == 1
    assert same.difference == 0
    nothing = gap_recovered(easy, useless, positive, groups, test, metric=metric)
    assert (nothing.recovered_low, nothing.recovered_high) == (-np.inf, np.inf)
    assert nothing.gap_low < 0 < nothing.gap_high
