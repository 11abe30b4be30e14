"""What splices did to the next token, with intervals from a bootstrap over documents.

    kl = sum of KL(clean || spliced) / positions,   cross_entropy = nats / tokens,   perplexity = exp(cross_entropy)
    recovered_null = (CE_null - CE) / (CE_null - CE_clean),     1 for clean, 0 for that null

each sum over texts. A draw weighs every document by how often it was drawn, the same draws for every condition, so that
a difference of conditions has the interval of the paired difference. Percentile intervals, 95 %.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from microtome.lenses.documents import document_draws
from microtome.lenses.short_repr import short_repr
from microtome.lenses.transport.splice_conditions import CLEAN, NULLS
from microtome.lenses.transport.splice_pass import SUMS, TEXT_SUMS
from microtome.lenses.transport.splice_positions import ALL

DRAWS = 1000
_LEVEL = (0.025, 0.975)
_PAIR = ["source", "target", "route", "positions"]


@dataclass(frozen=True, eq=False)
class SpliceEffects:
    """Sums by text and case, from which every number comes.

    Attributes:
        cases: a row per case: source, target, route, positions ("1", "5", "all"), condition.
        sums: `[text, case, SUMS]`, 0 for a text that is left out of the case.
        text_sums: `[text, TEXT_SUMS]`: predicted tokens, their clean nats, tokens that are sinks.
        document: of each text.
        facts: model, texts, seed and the like.
        draws, draw_seed: of the intervals.
    """

    cases: pd.DataFrame
    sums: Float64[np.ndarray, "text case sum"]
    text_sums: Float64[np.ndarray, "text of_text"]
    document: Int64[np.ndarray, " text"]
    facts: Mapping[str, Any] = field(default_factory=dict)
    draws: int = DRAWS
    draw_seed: int = 0

    __repr__ = short_repr

    @property
    def left_out(self) -> pd.DataFrame:
        """source, target, route, texts, left_out: how many texts offered too few tokens to write over."""
        rows = []
        for pair, group in self.cases.groupby(_PAIR[:3], sort=False):
            has = self._spliced[:, group.index].any(1)
            rows.append((*pair, len(has), int((~has).sum())))
        return pd.DataFrame(rows, columns=[*_PAIR[:3], "texts", "left_out"])

    def to_frame(self) -> pd.DataFrame:
        """A row per operator, number of positions and condition, "clean" among them.

        Columns source, target, route, positions, condition; texts, documents, spliced, sinks (of the spliced), later,
        tokens: what it is about; and, each with `_low` and `_high`: kl_spliced, kl_later, kl (both together), agrees_*
        likewise, cross_entropy, ce_increase, perplexity (of the continuation: every token behind the first that was
        written over), text_perplexity (of the whole texts), recovered_mean, recovered_zero, recovered_intercept,
        recovered_shuffled (NaN without that null), kl_minus_identity and ce_minus_identity (paired differences). NaN
        where there is nothing to score, and intervals NaN with fewer than two documents.

        Beware: `recovered` divides by what the null costs; where its interval holds 0, it says nothing.
        """
        parts = [self._group(group) for _, group in self.cases.groupby(_PAIR, sort=False)]
        return pd.concat(parts, ignore_index=True)

    def per_text(self) -> pd.DataFrame:
        """A row per case and text that is not left out: document, text, and the sums themselves."""
        case, text = np.nonzero(self._spliced.T)
        frame = self.cases.iloc[case].reset_index(drop=True)
        frame = frame.assign(document=self.document[text], text=text)
        for number, name in enumerate(SUMS):
            frame[name] = self.sums[text, case, number]
        whole = ["spliced", "sinks", "later", "tokens"]
        return frame.astype(dict.fromkeys(whole, "int64"))

    @property
    def _spliced(self) -> np.ndarray:
        return self.sums[:, :, SUMS.index("spliced")] > 0

    def _group(self, group: pd.DataFrame) -> pd.DataFrame:
        """One operator and number of positions."""
        texts = np.flatnonzero(self._spliced[:, group.index].any(1))
        documents, owner = np.unique(self.document[texts], return_inverse=True)
        names = [CLEAN, *group["condition"]]
        sums = np.zeros((len(documents), len(names), len(SUMS)))
        np.add.at(sums[:, 1:], owner, self.sums[np.ix_(texts, group.index)])
        sums[:, 0] = _clean(sums[:, 1])
        of_text = np.zeros((len(documents), len(TEXT_SUMS)))
        np.add.at(of_text, owner, self.text_sums[texts])
        estimate = _values(sums.sum(0)[None], of_text.sum(0)[None], names)
        frame = pd.DataFrame({name: [group[name].iloc[0]] * len(names) for name in _PAIR} | {"condition": names})
        frame["texts"], frame["documents"] = len(texts), len(documents)
        for name in ("spliced", "sinks", "later", "tokens"):
            frame[name] = sums[:, :, SUMS.index(name)].sum(0).astype("int64")
        low, high = {}, {}
        if len(documents) > 1:
            drawn = _drawn(sums, of_text, names, self.draws, self.draw_seed)
            low, high = ({name: _quantile(value, q) for name, value in drawn.items()} for q in _LEVEL)
        for name, value in estimate.items():
            frame[name] = value[0]
            frame[f"{name}_low"], frame[f"{name}_high"] = low.get(name, np.nan), high.get(name, np.nan)
        return frame


def _clean(sums: np.ndarray) -> np.ndarray:
    """What the clean run has where another has `sums`."""
    found = dict(zip(SUMS, np.moveaxis(sums, -1, 0), strict=True))
    nothing = np.zeros_like(found["kl_spliced"])
    found |= {"kl_spliced": nothing, "kl_later": nothing, "nats": found["clean_nats"]}
    found |= {"agrees_spliced": found["spliced"], "agrees_later": found["later"]}
    return np.stack([found[name] for name in SUMS], -1)


def _drawn(
    sums: np.ndarray, of_text: np.ndarray, names: list[str], draws: int, seed: int
) -> dict[str, Float64[np.ndarray, "draw condition"]]:
    count = len(sums)
    weights = document_draws(count, draws, seed)
    return _values(np.tensordot(weights, sums, 1), weights @ of_text, names)


def _values(
    sums: Float64[np.ndarray, "draw condition sum"], of_text: Float64[np.ndarray, "draw of_text"], names: list[str]
) -> dict[str, Float64[np.ndarray, "draw condition"]]:
    s = dict(zip(SUMS, np.moveaxis(sums, -1, 0), strict=True))
    whole = dict(zip(TEXT_SUMS, (column[:, None] for column in of_text.T), strict=True))
    with np.errstate(invalid="ignore", divide="ignore"):
        found = {}
        for kind in ("kl", "agrees"):
            there, behind = s[f"{kind}_spliced"], s[f"{kind}_later"]
            found[f"{kind}_spliced"] = there / s["spliced"]
            found[f"{kind}_later"] = behind / s["later"]
            found[kind] = (there + behind) / (s["spliced"] + s["later"])
        entropy = s["nats"] / s["tokens"]
        found["cross_entropy"] = entropy
        found["ce_increase"] = (s["nats"] - s["clean_nats"]) / s["tokens"]
        found["perplexity"] = np.exp(entropy)
        found["text_perplexity"] = np.exp((whole["nats"] + s["nats"] - s["clean_nats"]) / whole["tokens"])
        for null in NULLS:
            at = entropy[:, [names.index(null)]] if null in names else np.full_like(entropy[:, :1], np.nan)
            found[f"recovered_{null}"] = (at - entropy) / (at - entropy[:, :1])
        for short, name in (("kl", "kl"), ("ce", "cross_entropy")):
            value = found[name]
            own = value[:, [names.index("identity")]] if "identity" in names else np.full_like(value[:, :1], np.nan)
            found[f"{short}_minus_identity"] = value - own
    return found


def _quantile(drawn: np.ndarray, level: float) -> np.ndarray:
    """By condition, of the draws that are numbers; NaN where none is."""
    found = np.full(drawn.shape[1], np.nan)
    has = np.isfinite(drawn).any(0)
    if has.any():
        found[has] = np.nanquantile(np.where(np.isfinite(drawn[:, has]), drawn[:, has], np.nan), level, axis=0)
    return found


def positions_name(at: int | str) -> str:
    """As the table says it."""
    return ALL if at == ALL else str(at)
