"""What a method gives for what it costs: curves of target against side effect, compared pair by pair.

Two methods are compared at equal side effect: each method's curve is interpolated linearly between its strengths
(through the unsteered model at 0, in order of KL), and the difference of the means has a bootstrap interval in which
the same prompts are drawn for both. KL is taken as it was measured; records that have none (a model that broke) are
left out.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from microtome.interventions.evaluation_record import DRAWS, EvaluationRecord, mean_interval
from microtome.lenses.documents import document_draws


def trade_off_table(records: Sequence[EvaluationRecord], base: EvaluationRecord, *, seed: int = 0) -> pd.DataFrame:
    """The records' rows, with each target's paired difference from the unsteered model and its interval.

    Raises ValueError for records of other prompts than the unsteered model's.
    """
    frames = []
    for record in [base, *(r for r in records if r.name != base.name)]:
        frame = record.to_frame(seed=seed)
        for name in record.targets:
            gain = _gain(record, base, name)
            mean, low, high = mean_interval(gain, seed=seed)
            frame[[f"{name}_gain", f"{name}_gain_low", f"{name}_gain_high"]] = [mean, low, high]
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def gain_at(
    curve: Sequence[EvaluationRecord], base: EvaluationRecord, target: str, limit: float, counts: np.ndarray
) -> np.ndarray:
    """Mean gain of a method where its KL is `limit`, for each draw of prompts; NaN where the curve never gets there.

    counts: how often each prompt counts, [draw, prompt].
    """
    ordered = sorted((one for one in curve if not np.isnan(one.kl)), key=lambda record: record.kl)
    kl = np.array([0.0, *(record.kl for record in ordered)])
    gains = np.stack([np.zeros(len(base.texts)), *(_gain(record, base, target) for record in ordered)])
    known = ~np.isnan(gains)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (counts @ np.nan_to_num(gains).T) / (counts @ known.T.astype(float))
    if limit > kl[-1]:
        return np.full(len(counts), np.nan)
    above = int(np.searchsorted(kl, limit))
    if above == 0:
        return means[:, 0]
    share = (limit - kl[above - 1]) / max(kl[above] - kl[above - 1], 1e-12)
    return (1 - share) * means[:, above - 1] + share * means[:, above]


def compare_at(
    curves: Mapping[str, Sequence[EvaluationRecord]],
    base: EvaluationRecord,
    target: str,
    limit: float,
    *,
    reference: str | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Gain of every method at one KL, and its paired difference from the reference method.

    Returns:
        method, gain, gain_low, gain_high, difference, difference_low, difference_high; NaN where a method's curve does
        not reach the limit.

    Raises:
        KeyError: a reference that is no method.
        ValueError: a limit below 0, records of other prompts than the unsteered model's.
    """
    if not limit >= 0:
        raise ValueError(f"limit={limit}: give a KL of 0 or more.")
    if reference is not None and reference not in curves:
        raise KeyError(f"reference={reference!r} is no method here: {', '.join(curves)}.")
    n = len(base.texts)
    counts = document_draws(n, draws, seed)
    once = np.ones((1, n))
    drawn = {name: gain_at(curve, base, target, limit, counts) for name, curve in curves.items()}
    whole = {name: gain_at(curve, base, target, limit, once)[0] for name, curve in curves.items()}
    rows = []
    for name in curves:
        row = {"method": name, "gain": whole[name]}
        row["gain_low"], row["gain_high"] = _interval(drawn[name])
        if reference is not None:
            row["difference"] = whole[name] - whole[reference]
            row["difference_low"], row["difference_high"] = _interval(drawn[name] - drawn[reference])
        rows.append(row)
    return pd.DataFrame(rows)


def _gain(record: EvaluationRecord, base: EvaluationRecord, target: str) -> np.ndarray:
    if len(record.texts) != len(base.texts):
        raise ValueError(
            f"{record.name} has {len(record.texts)} prompts, {base.name} {len(base.texts)}: differences are of "
            "the same prompts. Evaluate both on one list."
        )
    return record.texts[target].to_numpy() - base.texts[target].to_numpy()


def _interval(values: np.ndarray) -> tuple[float, float]:
    if np.isnan(values).all():
        return (np.nan, np.nan)
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)


def best_within(records: Sequence[EvaluationRecord], target: str, limit: float) -> EvaluationRecord:
    """The record of the highest mean target among those whose KL is at most the limit: for a development split.

    A record without a target counts as the worst. Raises ValueError if none is within it.
    """
    within = [record for record in records if record.kl <= limit]
    if not within:
        known = [record for record in records if not np.isnan(record.kl)]
        least = min(known, key=lambda record: record.kl, default=None)
        nearest = "" if least is None else f"; {least.name} comes nearest with {least.kl:.3g}"
        raise ValueError(
            f"None of {len(records)} conditions has a KL of {limit:g} or less{nearest}. Try weaker ones, or allow more."
        )
    means = [float(record.texts[target].mean()) for record in within]
    return within[int(np.argmax(np.nan_to_num(means, nan=-np.inf, posinf=np.inf, neginf=-np.inf)))]
