"""Planted features get the verdict that they were made for; intervals cover where tokens of a document are alike."""

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.lenses.documents import document_draws
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.ridge_map import ridge_map
from microtome.lenses.transport.direction_rows import unit_rows
from microtome.lenses.transport.document_sums import r2_interval
from microtome.lenses.transport.feature_scores import FeatureTransport, feature_scores
from microtome.lenses.transport.feature_sums import FeatureSums
from microtome.lenses.transport.feature_verdict import feature_verdicts, null_bar, ways_carried
from microtome.lenses.transport.operator import TransportOperator, operator_of
from microtome.lenses.transport.routes import Route
from microtome.lenses.transport.transport_rows import TransportRows

X, Y = "resid_post.0", "resid_post.1"
NAMES = ["copied", "doubled", "rotated", "made", "half", "weak", "dead", "by document"]


def planted(documents: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows x, y of 8 channels and their document. y is x turned by `copied ... by document` along its channels."""
    generator = torch.Generator().manual_seed(seed)
    document = torch.arange(documents).repeat_interleave(tokens)
    x = torch.randn(documents * tokens, 8, generator=generator, dtype=torch.float64)
    noise = torch.randn(documents * tokens, 8, generator=generator, dtype=torch.float64)
    x[:, 7] += 3 * torch.randn(documents, generator=generator, dtype=torch.float64)[document]
    y = torch.empty_like(x)
    y[:, 0] = x[:, 0]
    y[:, 1] = 2 * x[:, 1] + 9
    y[:, 2] = (x[:, 0] + x[:, 1]) / 2**0.5
    y[:, 3] = noise[:, 3]
    y[:, 4] = (x[:, 4] + noise[:, 4]) / 2**0.5
    y[:, 5] = 0.45 * x[:, 5] + 0.9 * noise[:, 5]
    y[:, 6] = 3 + 4.44e-16 * noise[:, 6].sign().clamp_min(0)  # nothing but rounding
    y[:, 7] = x[:, 7] + 0.5 * noise[:, 7]
    x[:, 1] += 2
    return x, y, document


def operator_from(x: torch.Tensor, y: torch.Tensor) -> TransportOperator:
    found = ridge_map(PairMoments.from_rows(x, y), strengths=[1e-6]).map
    return operator_of(LinearMap(found.weight, found.intercept, "ridge", X, Y))


def rows_of(x: torch.Tensor, y: torch.Tensor, document: torch.Tensor) -> TransportRows:
    rest = torch.zeros(len(x), dtype=torch.int64)
    return TransportRows({X: x, Y: y}, document, rest, {Route(): torch.arange(len(x))})


def scored(x, y, document, operator, null=None, **options) -> FeatureTransport:
    sums = FeatureSums([operator], [null], {Y: unit_rows(torch.eye(8), Y, 8)}, {}, int(document.max()) + 1)
    for some in torch.arange(len(x)).split(500):
        sums.update(rows_of(x[some], y[some], document[some]))
    return feature_scores(sums, {Y: NAMES}, **options)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    x, y, document = planted(60, 40, 0)
    fit_x, fit_y, _ = planted(100, 40, 1)
    null = operator_from(fit_x.roll(40 * 7, 0), fit_y)
    found = scored(x, y, document, operator_from(fit_x, fit_y), null)
    assert found.null_quantiles[0] == pytest.approx(found.table["null_r2"].quantile(0.975))
    return found.table.set_index("name")


def test_planted_features_get_their_verdicts(table):
    verdicts = table["verdict"].to_dict()
    assert verdicts == {
        "copied": "carried",
        "doubled": "carried",
        "rotated": "carried",
        "made": "made here",
        "half": "undecided",
        "weak": "made here",
        "dead": "undecided",
        "by document": "carried",
    }


def test_and_how_they_are_carried(table):
    assert table["way"].to_dict() == {
        "copied": "as it is",
        "doubled": "rescaled",
        "rotated": "rotated",
        "made": "",
        "half": "",
        "weak": "",
        "dead": "",
        "by document": "as it is",
    }


def test_their_r2_are_the_planted_ones(table):
    assert table["r2"].drop("dead").to_dict() == pytest.approx(
        {"copied": 1, "doubled": 1, "rotated": 1, "made": 0, "half": 0.5, "weak": 0.2, "by document": 10 / 10.25},
        abs=0.03,
    )
    assert table.loc["dead", ["r2", "r2_low", "identity_r2", "null_r2"]].isna().all()
    assert table["within_null"].to_dict() == {name: name in ("made", "dead") for name in NAMES}


def test_the_identity_s_mean_counts_and_the_rescaled_one_s_does_not(table):
    """x.u is n + 2, y.u 2 n + 9: R2 of the copy is 1 - E (n + 7)^2 / 4."""
    assert table.loc["doubled", "identity_r2"] == pytest.approx(1 - (1 + 7**2) / 4, abs=0.6)
    assert table.loc["doubled", "rescaled_r2"] == pytest.approx(1, abs=1e-9)
    assert table.loc["rotated", "rescaled_r2"] == pytest.approx(0, abs=0.01)


def test_a_null_that_explains_as_much_leaves_it_undecided():
    low, high = np.array([0.8, 0.8, 0.1]), np.array([0.9, 0.9, 0.2])
    top, bar = null_bar(np.array([0.1, 0.85, 0.0]), 0.5)
    assert (top, bar.tolist()) == (0.1, [0.1, 0.85, 0.1])
    assert feature_verdicts(low, high, bar, 0.5).tolist() == ["carried", "undecided", "made here"]
    nothing = np.full(3, np.nan)
    assert feature_verdicts(low, high, null_bar(nothing, 0.5)[1], 0.5).tolist() == ["carried", "carried", "made here"]
    assert feature_verdicts(nothing, nothing, bar, 0.5).tolist() == ["undecided"] * 3


def test_sites_of_other_widths_can_only_rotate():
    nothing = np.full(2, np.nan)
    verdict = np.array(["carried", "made here"])
    assert ways_carried(verdict, np.array([0.9, 0.1]), nothing, nothing).tolist() == ["rotated", ""]


def test_one_document_decides_nothing():
    x, y, _ = planted(20, 40, 2)
    found = scored(x, y, torch.zeros(len(x), dtype=torch.int64), operator_from(x, y), draws=20)
    assert found.table["r2_low"].isna().all()
    assert set(found.table["verdict"]) == {"undecided"}


def test_sums_of_documents_are_those_of_the_rows():
    x, y, document = planted(7, 30, 3)
    document = document[torch.randperm(len(document), generator=torch.Generator().manual_seed(0))]
    operator = operator_from(*planted(50, 40, 4)[:2])
    found = scored(x, y, document, operator, draws=300, seed=5).table
    alive = [i for i, name in enumerate(NAMES) if name not in ("dead", "copied", "doubled", "rotated")]
    missed, y = (y - operator(x)).square().numpy()[:, alive], y.numpy()[:, alive]
    everything = y.mean(0)

    def log_ratio(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        each = times[document.numpy()]
        below = ((y - np.average(y, axis=0, weights=each)) ** 2 * each[:, None]).sum(0)
        ratio = (missed * each[:, None]).sum(0) / below
        left = missed - ratio * (y - everything) ** 2
        by_document = np.array([left[document == number].sum(0) for number in range(7)])
        return np.log(ratio), np.sqrt((times[:, None] * by_document**2).sum(0)) / (ratio * below)

    centre, error = log_ratio(np.ones(7))
    weights = np.random.default_rng(5).multinomial(7, np.full(7, 1 / 7), size=300)
    drawn = [log_ratio(weight) for weight in weights]
    studentized = [(ratio - centre) / wide for ratio, wide in drawn]
    high, low = 1 - np.exp(centre - np.percentile(studentized, [97.5, 2.5], axis=0) * error)
    np.testing.assert_allclose(found["r2_low"].iloc[alive], low, atol=1e-9)
    np.testing.assert_allclose(found["r2_high"].iloc[alive], high, atol=1e-9)


@pytest.mark.parametrize(("documents", "heavy"), [(50, 0.0), (100, 0.5)])
def test_intervals_over_documents_cover_where_tokens_are_alike(documents, heavy):
    """400 corpora of documents of 30 tokens, y of one document shifted alike: R2 of y = x + shift + noise is known.
    Drawing tokens as if they were independent covers in half of them."""
    runs, tokens = 400, 30
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(runs, documents, tokens) + 0.5 * normal(runs, documents, 1)
    size = (heavy * normal(runs, documents, 1) - heavy**2).exp()  # of mean square 1
    y = x + size * normal(runs, documents, 1) + 0.3 * normal(runs, documents, tokens)
    true = 1.25 / (1.25 + 1 + 0.09)

    def covered(groups: int, per_group: int) -> float:
        counts = torch.full((groups, 1), float(per_group), dtype=torch.float64)
        parts = [part.view(runs, groups, per_group).sum(2).T for part in ((y - x) ** 2, y, y**2)]
        low, high = r2_interval(torch.from_numpy(document_draws(groups, 400, 1)), parts[0], counts, *parts[1:], False)
        return float(((low < true) & (true < high)).double().mean())

    assert 0.90 <= covered(documents, tokens) <= 0.98
    if documents == 50:
        assert covered(documents * tokens, 1) < 0.6


def test_an_error_that_is_no_number_has_no_interval():
    weights = torch.from_numpy(document_draws(6, 20, 0))
    ones = torch.ones(6, 2, dtype=torch.float64)
    errors = torch.tensor([[torch.nan, 0.0]] * 6, dtype=torch.float64)
    low, high = r2_interval(weights, errors, ones[:, :1], ones, ones, True)
    assert low.isnan().tolist() == high.isnan().tolist() == [True, False]


def test_of_a_few_documents_nothing_is_sure():
    """Two documents gave intervals without width, and with them verdicts."""
    generator = torch.Generator().manual_seed(0)
    errors, squares = torch.rand(2, 4, 3, generator=generator, dtype=torch.float64)
    for count in (2, 4):
        weights = torch.from_numpy(document_draws(count, 200, 0))
        ones = torch.ones(count, 1, dtype=torch.float64)
        low, high = r2_interval(weights, errors[:count] / 9, ones, squares[:count], squares[:count], True)
        assert bool(low.isnan().all())
        assert bool(high.isnan().all())
