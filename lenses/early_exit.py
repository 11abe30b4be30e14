"""Early exit by a lens: how many blocks are saved when a token leaves as soon as a lens is sure of its next word.

A token leaves at the first depth where the rule holds, and runs to the end where it never does:

    gap        p(first) - p(second) >= tau                    (Yom Din et al. 2023, section 6, without its decay)
    max_prob   p(first) >= tau
    entropy    H <= tau, nats
    patience   the same first token at k depths in a row
    kl         KL(lens here || lens at the depth before) <= tau, nats

tau (k) is chosen on validation documents: the one that saves most blocks with agreement of at least the target; what
is reported is of test documents. Beside the rules: one fixed depth for all, random exits with the rule's own histogram
(what the rule's choice of tokens adds), and the oracle (the first depth from which the model's token stays).
Beware: a lens costs a product with the unembedding at every depth that is tried, on SmolLM2 as much as 10 blocks, and
later tokens miss the keys and values of skipped blocks. Both are counted or said, neither is subtracted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from microtome.lenses.documents import document_draws
from microtome.lenses.lens_statistics import LensStatistics
from microtome.lenses.short_repr import short_repr

RULES = ("gap", "max_prob", "entropy", "patience", "kl")
TARGETS = (0.90, 0.95, 0.99)
_GRID = 200


@dataclass(frozen=True, eq=False)
class EarlyExits:
    """What rules of several lenses save.

    Attributes:
        table: one row per lens, rule and target: lens, rule, target, tau (NaN for baselines), validation_agreement, and
            of the test documents agreement (_low, _high), blocks_run, blocks_saved (_low, _high), share_saved,
            cross_entropy (nats, of the distributions that tokens left with), model_cross_entropy, head_products (per
            token), tokens, documents.
        curves: agreement and blocks saved over all values of tau that were tried, on the test documents: lens, rule,
            tau, agreement, blocks_saved, share_saved.
    """

    table: pd.DataFrame
    curves: pd.DataFrame

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """The table."""
        return self.table


def early_exits(
    statistics: Mapping[str, LensStatistics] | LensStatistics,
    *,
    rules: Sequence[str] = ("gap", "max_prob", "entropy", "patience"),
    targets: Sequence[int | float] = TARGETS,
    validation_share: int | float = 0.5,
    draws: int = 1000,
    seed: int = 0,
) -> EarlyExits:
    """Tune every rule on some documents and report it on the others; first tokens and BOS are left out.

    Args:
        statistics: of lenses over the same texts, by name; depths ascending, the last one r_L.
        rules: of RULES; "kl" needs statistics with `previous=True`.
        targets: agreement with the whole model that is asked for.
        validation_share: of documents.
        draws: of the bootstrap over test documents. seed: of the split and the draws.

    Raises:
        ValueError: unknown rules, targets outside (0, 1], statistics that do not end at r_L or are of other tokens than
            the first, fewer than two documents, "kl" without its statistics.
    """
    by_name = {statistics.lens: statistics} if isinstance(statistics, LensStatistics) else dict(statistics)
    if strange := [rule for rule in rules if rule not in RULES]:
        raise ValueError(f"there is no rule {strange[0]!r}. Rules are {', '.join(RULES)}.")
    if bad := [target for target in targets if not 0 < target <= 1]:
        raise ValueError(f"target {bad[0]} is no share of tokens above 0 and up to 1.")
    if not 0 < validation_share < 1:
        raise ValueError(f"validation_share is {validation_share}. Give a share of documents between 0 and 1.")
    if not by_name:
        raise ValueError("there are no statistics. Give those of at least one lens.")
    rows, curves, first = [], [], None
    for name, found in by_name.items():
        _require_whole(name, found)
        kept = found.at(~found.is_sink)
        first = kept if first is None else first
        if not (np.array_equal(kept.text, first.text) and np.array_equal(kept.position, first.position)):
            raise ValueError(f"{name} is of other tokens than {first.lens}. Make the statistics in one call.")
        is_validation = _validation(kept.document, validation_share, seed)
        tune, test = kept.at(is_validation), kept.at(~is_validation)
        for rule in rules:
            taus = thresholds(rule, tune)
            agreement = np.array([_agreement(tune, exits(rule, tune, tau)) for tau in taus])
            saved = np.array([_saved(tune, exits(rule, tune, tau)) for tau in taus])
            curves.append(_curve(name, rule, taus, test))
            for target in targets:
                best = np.flatnonzero(agreement >= target)
                tau = taus[best[np.argmax(saved[best])]] if len(best) else never(rule)
                left = exits(rule, test, tau)
                held = _agreement(tune, exits(rule, tune, tau))
                tried = _head_products(left)
                rows.append(_row(name, rule, target, tau, held, test, left, tried, draws, seed))
                rows.append(_random_row(name, rule, target, test, left))
        for target in targets:
            agrees = tune.agrees.mean(1)
            depth = int(np.flatnonzero(agrees >= target)[0])
            left = np.full(test.text.shape, depth)
            rows.append(_row(name, "fixed depth", target, np.nan, agrees[depth], test, left, 1.0, draws, seed))
        left = _oracle(test)
        rows.append(_row(name, "oracle", 1.0, np.nan, 1.0, test, left, np.nan, draws, seed))
    return EarlyExits(pd.DataFrame(rows), pd.concat(curves, ignore_index=True))


def exits(rule: str, found: LensStatistics, tau: int | float) -> Int[np.ndarray, " token"]:
    """The number of the site (in `found.sites`) at which each token leaves; the last one where the rule never holds."""
    holds = _holds(rule, found, tau)
    holds[-1] = True
    return holds.argmax(0)


def never(rule: str) -> float:
    """The threshold at which no token leaves early."""
    return -np.inf if rule in ("entropy", "kl") else np.inf


def thresholds(rule: str, found: LensStatistics) -> Float[np.ndarray, " tau"]:
    """Values worth trying: quantiles of the scores, or numbers of depths for patience; `never` among them."""
    if rule == "patience":
        return np.array([*range(2, len(found.sites) + 1), np.inf])
    scores = _scores(rule, found)[:-1]
    scores = scores[np.isfinite(scores)]
    values = np.unique(np.quantile(scores, np.linspace(0, 1, _GRID))) if len(scores) else []
    return np.array([*values, never(rule)])


def _scores(rule: str, found: LensStatistics) -> Float[np.ndarray, "depth token"]:
    """To six decimals: a threshold within float32's rounding of a sure word would sort tokens by noise."""
    if rule == "kl" and found.kl_previous is None:
        raise ValueError("the rule 'kl' needs the KL to the depth before. Make the statistics with previous=True.")
    names = {"gap": "gap", "max_prob": "max_prob", "entropy": "entropy", "kl": "kl_previous"}
    return np.round(getattr(found, names[rule]), 6) + 0.0


def _holds(rule: str, found: LensStatistics, tau: int | float) -> Bool[np.ndarray, "depth token"]:
    if rule == "patience":
        tops = found.top_ids[..., 0]
        run = np.ones(tops.shape)
        for depth in range(1, len(tops)):
            run[depth] = np.where(tops[depth] == tops[depth - 1], run[depth - 1] + 1, 1)
        return run >= tau
    scores = _scores(rule, found)
    with np.errstate(invalid="ignore"):
        return scores <= tau if rule in ("entropy", "kl") else scores >= tau


def _at(values: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Each token's value at the site where it left."""
    return np.take_along_axis(values, left[None], axis=0)[0]


def _agreement(found: LensStatistics, left: np.ndarray) -> float:
    return float(_at(found.agrees, left).mean())


def _saved(found: LensStatistics, left: np.ndarray) -> float:
    return float((found.blocks - found.depth[left]).mean())


def _head_products(left: np.ndarray) -> float:
    """Products with the unembedding per token: one at each site up to the one where it left."""
    return float((left + 1).mean())


def _oracle(found: LensStatistics) -> np.ndarray:
    stays = np.flip(np.logical_and.accumulate(np.flip(found.agrees, 0), 0), 0)
    return stays.argmax(0)


def _curve(name: str, rule: str, taus: np.ndarray, test: LensStatistics) -> pd.DataFrame:
    left = [exits(rule, test, tau) for tau in taus]
    frame = pd.DataFrame({"lens": name, "rule": rule, "tau": taus})
    frame["agreement"] = [_agreement(test, each) for each in left]
    frame["blocks_saved"] = [_saved(test, each) for each in left]
    frame["share_saved"] = frame["blocks_saved"] / test.blocks
    return frame


def _row(
    lens: str,
    rule: str,
    target: float,
    tau: float,
    held: float,
    test: LensStatistics,
    left: np.ndarray,
    head_products: float,
    draws: int,
    seed: int,
) -> dict:
    agrees = _at(test.agrees, left).astype(float)
    saved = (test.blocks - test.depth[left]).astype(float)
    documents, of_row = np.unique(test.document, return_inverse=True)
    counts = np.bincount(of_row)
    drawn = document_draws(len(documents), draws, seed)

    def interval(values: np.ndarray) -> tuple[float, float]:
        if len(documents) < 2:
            return np.nan, np.nan
        means = (drawn @ np.bincount(of_row, values)) / (drawn @ counts)
        low, high = np.quantile(means, [0.025, 0.975])
        return float(low), float(high)

    agreement, blocks = interval(agrees), interval(saved)
    return {
        "lens": lens,
        "rule": rule,
        "target": target,
        "tau": tau,
        "validation_agreement": held,
        "agreement": agrees.mean(),
        "agreement_low": agreement[0],
        "agreement_high": agreement[1],
        "blocks_run": test.blocks - saved.mean(),
        "blocks_saved": saved.mean(),
        "blocks_saved_low": blocks[0],
        "blocks_saved_high": blocks[1],
        "share_saved": saved.mean() / test.blocks,
        "cross_entropy": _mean(_at(test.cross_entropy, left)),
        "model_cross_entropy": _mean(test.final_cross_entropy),
        "head_products": head_products,
        "tokens": len(left),
        "documents": len(documents),
    }


def _random_row(lens: str, rule: str, target: float, test: LensStatistics, left: np.ndarray) -> dict:
    """The expectation over random assignments of the same exits to tokens."""
    share = np.bincount(left, minlength=len(test.sites)) / len(left)
    saved = float(share @ (test.blocks - test.depth))
    return {
        "lens": lens,
        "rule": f"random as {rule}",
        "target": target,
        "tau": np.nan,
        "validation_agreement": np.nan,
        "agreement": float(share @ test.agrees.mean(1)),
        "blocks_run": test.blocks - saved,
        "blocks_saved": saved,
        "share_saved": saved / test.blocks,
        "cross_entropy": float(share @ [_mean(values) for values in test.cross_entropy]),
        "model_cross_entropy": _mean(test.final_cross_entropy),
        "head_products": 1.0,
        "tokens": len(left),
        "documents": len(np.unique(test.document)),
    }


def _mean(nats: np.ndarray) -> float:
    """Over tokens that have a next one; NaN if none has."""
    nats = nats[np.isfinite(nats)]
    return float(nats.mean()) if len(nats) else np.nan


def _validation(document: np.ndarray, share: int | float, seed: int) -> np.ndarray:
    names = np.unique(document)
    if len(names) < 2:
        raise ValueError("the tokens are of one document; rules are tuned on some documents and tested on others.")
    count = min(max(1, round(share * len(names))), len(names) - 1)
    return np.isin(document, names[np.random.default_rng([seed, 5]).permutation(len(names))[:count]])


def _require_whole(name: str, found: LensStatistics) -> None:
    if (np.diff(found.depth) <= 0).any() or found.depth[-1] != found.blocks:
        raise ValueError(
            f"{name} has sites {', '.join(found.sites[:3])} ... at depths {found.depth.tolist()}; early exit needs "
            f"depths of the stream, ascending, with the last one, {found.blocks}."
        )
    if not found.agrees[-1].all():
        raise ValueError(f"{name} is not the model at its last depth. Give the last depth no translator.")
