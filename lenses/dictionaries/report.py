"""How good a dictionary is on texts it was not trained on: what it explains, and what the model loses with it in place.

    explained      = 1 - sum |x - x_hat|^2 / sum |x - mean|^2        of tokens that are no sinks; "_all" of all
    loss_recovered = (CE_zero - CE) / (CE_zero - CE_clean)           x_hat in place of x at the site; zero: x_hat = 0
    loss_recovered_mean: the same with x_hat = mean in place of zero, a harder baseline

    l0: features on per token; dead: share of features that are on at no token of these texts (few texts, many dead).

Sinks (first tokens, BOS, massive activations) stay as they are in the model unless `replace_sinks`: a dictionary that
was trained without them cannot rebuild them, attention breaks where they are gone, and CE_zero would be worse for it.
Beside the dictionary, in the same units: "pca", the k components of these very texts' rows (k numbers per token, its
best case), and "untrained", as many random unit directions with the same k, tied, around the mean (where training
starts). Cross-entropies are nats per predicted token, all tokens with one after them. Intervals: percentiles over
documents drawn with replacement (`head_sums`: every score is a ratio of sums over texts).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import normalize
from tqdm.auto import tqdm

from microtome.capture.batches import MAX_TOKENS
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.dictionaries.dictionary import Dictionary
from microtome.lenses.dictionaries.rebuilt_site import Rebuild, RebuiltForwards, RebuiltRun, TokenPlaces, token_places
from microtome.lenses.dictionaries.site_rows import site_rows
from microtome.lenses.documents import document_numbers
from microtome.lenses.head_sums import HeadSums
from microtome.lenses.made_for import require_same_weights
from microtome.lenses.short_repr import short_repr
from microtome.lenses.strata import TokenRule

SCORES = ("explained", "explained_all", "cross_entropy", "loss_recovered", "loss_recovered_mean", "l0")


@dataclass(frozen=True, eq=False)
class DictionaryReport:
    """Scores of dictionaries and controls at one site.

    Attributes:
        table: a row per reconstruction: name, then each of SCORES with _low and _high (95 %), and dead. NaN where a
            score means nothing (l0 of a mean).
        site: where x_hat stood.
        facts: tokens, sinks, documents, predicted tokens, k of the controls, rule.
    """

    table: pd.DataFrame
    site: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """The table."""
        return self.table


def dictionary_report(
    model: LoadedModel | nn.Module,
    dictionary: Dictionary | Mapping[str, Dictionary],
    texts: Any,
    *,
    documents: Iterable[Any] | None = None,
    rule: TokenRule | None = None,
    replace_sinks: bool = False,
    controls: bool = True,
    draws: int = 1000,
    seed: int = 0,
    max_tokens: int = MAX_TOKENS,
    progress: bool = False,
    **encoding: Any,
) -> DictionaryReport:
    """Run the texts clean, and with each reconstruction in place of the site.

    Args:
        dictionary: one, or several of the same site by name.
        texts: as for `capture`, of two tokens at least; ones that no dictionary was trained on.
        documents: name or number of the document of each text, each its own if None.
        rule: which tokens are sinks, `TokenRule()` if None.
        replace_sinks: put x_hat in place of sinks too.
        controls: "pca" and "untrained"; clean, mean and zero are always there.
        encoding: truncate, max_length, add_special_tokens, as for `capture`.

    Raises:
        ValueError: dictionaries of two sites, of another width or other weights, no token but sinks, or what `text_nll`
            refuses.
        KeyError, IndexError: a site that the model does not offer.
    """
    given = {"dictionary": dictionary} if isinstance(dictionary, Dictionary) else dict(dictionary)
    if not given:
        raise ValueError("there is no dictionary. Give one, or several by name.")
    site = Site.parse(next(iter(given.values())).site)
    for name, each in given.items():
        each.require_site(site)
        require_same_weights(each.facts, model, f"dictionary {name!r}")
    anatomy = dissect(model.module if isinstance(model, LoadedModel) else model)
    options = {"anatomy": anatomy, "max_tokens": max_tokens, **encoding}
    texts = list(texts)
    source = site_rows(model, texts, site, rule=rule, **options)
    for each in given.values():
        each.require_width(source.width)
    places = token_places(source)
    run = RebuiltForwards(model, texts, site, options, places, replace_sinks)
    with tqdm(total=3 + len(given) + 2 * controls, desc=f"report {site}", disable=not progress) as bar:
        runs = [run("clean", lambda x: x)]
        bar.update()
        for name, each in given.items():
            runs.append(run(name, each, each))
            bar.update()
        k = max(1, round(runs[1].l0.sum() / float(places.rest_tokens.sum())))
        for name, rebuild, untrained in _controls(places, next(iter(given.values())).features, k, seed, controls):
            runs.append(run(name, rebuild, untrained))
            bar.update()
    table = _table(runs, places, document_numbers(documents, len(texts)), draws, seed)
    facts = {
        "tokens": int(places.tokens.sum()),
        "sinks": int(places.tokens.sum() - places.rest_tokens.sum()),
        "predicted_tokens": int(runs[0].predicted.sum()),
        "documents": len(set(document_numbers(documents, len(texts)).tolist())),
        "k_of_controls": k,
        "replace_sinks": replace_sinks,
        "rule": source.rule.described(),
        "draws": draws,
    }
    return DictionaryReport(table, str(site), facts)


def _controls(
    places: TokenPlaces, features: int, k: int, seed: int, wanted: bool
) -> Iterable[tuple[str, Rebuild, Dictionary | None]]:
    mean = places.mean
    if wanted:
        k = min(k, len(mean))
        basis = torch.linalg.eigh(places.covariance).eigenvectors[:, -k:]
        yield "pca", lambda x: mean.to(x) + (x - mean.to(x)) @ basis.to(x) @ basis.T.to(x), None
        untrained = untrained_dictionary(mean.float(), features, k, seed=seed)
        yield "untrained", untrained, untrained
    yield "mean", lambda x: mean.to(x).expand_as(x), None
    yield "zero", torch.zeros_like, None


def untrained_dictionary(
    mean: Float[Tensor, " width"], features: int, k: int, *, site: str = "resid_post.0", seed: int = 0
) -> Dictionary:
    """A TopK dictionary of random unit directions around a mean, tied: where training starts, and a control."""
    generator = torch.Generator().manual_seed(seed)
    rows = normalize(torch.randn(features, len(mean), generator=generator), dim=1)
    return Dictionary(rows.T.contiguous(), torch.zeros(features), rows, mean, "topk", site, k=k)


def _table(
    runs: list[RebuiltRun], places: TokenPlaces, documents: Int64[np.ndarray, " text"], draws: int, seed: int
) -> pd.DataFrame:
    by_name = {run.name: run for run in runs}
    clean, zero, mean = by_name["clean"].nats, by_name["zero"].nats, by_name["mean"].nats
    above, below = [], []
    for run in runs:
        pairs = (
            (run.deviations[0] - run.errors[0], run.deviations[0]),
            (run.deviations[1] - run.errors[1], run.deviations[1]),
            (run.nats, run.predicted),
            (zero - run.nats, zero - clean),
            (mean - run.nats, mean - clean),
            (run.l0, places.rest_tokens.numpy()),
        )
        above.append([pair[0] for pair in pairs])
        below.append([pair[1] for pair in pairs])
    # [run, score, text] -> [text, score, run, 1]: every score is a ratio of sums over texts, as those of heads are
    sums, weights = (np.asarray(part).transpose(2, 1, 0)[..., None] for part in (above, below))
    held = HeadSums(SCORES, sums, weights)
    means, ends = held.means(), held.intervals(documents, draws=draws, seed=seed)
    columns: dict[str, Any] = {"reconstruction": [run.name for run in runs]}
    for name in SCORES:
        columns[name] = means[name][:, 0]
        columns[f"{name}_low"], columns[f"{name}_high"] = (end[:, 0] for end in ends[name])
    return pd.DataFrame(columns | {"dead": [run.dead for run in runs]})
