"""Inference-time intervention: shift the few heads that tell true from false (Li et al. 2023, "ITI").

    o[k, h] <- o[k, h] + alpha sigma[k, h] theta[k, h]      for the K best heads, before the output projection

theta is the difference of class means at length 1 (or the probe's weights, or random), sigma the deviation of o . theta
over the training rows. Heads are ranked by a probe's accuracy on inner folds of the training rows; nothing of the rows
that the intervention is scored on enters ranking, theta, sigma, K or alpha. Groups (a question, a city) stay whole.

NL-ITI (Hoscilowicz et al. 2024) ranks by a small network (`probe="mlp"`) on z averaged over the last tokens; its theta
is the same difference of means.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from microtome.capture.models import LoadedModel
from microtome.interventions.artefact import Artefact, made_on
from microtome.interventions.contrast import LEAST_GAP
from microtome.interventions.controls import shuffled_labels
from microtome.interventions.head_rows import HeadRows
from microtome.interventions.positions import Positions
from microtome.lenses.short_repr import short_repr
from microtome.probes.folds import grouped_folds
from microtome.probes.groups import group_codes
from microtome.probes.logistic_solver import fit_logistic
from microtome.probes.mlp_fits import fit_mlps
from microtome.probes.mlp_networks import MlpSettings

Probe = Literal["logistic", "mlp"]
Direction = Literal["mean", "probe", "random"]
INNER_FOLDS = 4
PENALTY = 0.1  # C of the logistic probes
STEPS = 600  # of Adam at least, however few the rows: ten epochs of some hundred rows leave a network at its start
RATE = 5e-3


@dataclass(frozen=True, eq=False)
class HeadShifts:
    """Heads in the order of their probes, with what ITI adds to each.

    Attributes:
        table: site, accuracy (inner folds), rank; best first.
        theta: unit directions, sigma: deviations, of the heads in the table's order.
        probe, direction, tokens: how they were found.
        counts: training rows of either class.
    """

    table: pd.DataFrame
    theta: Float[Tensor, "head d_head"]
    sigma: Float[Tensor, " head"]
    probe: str
    direction: str
    tokens: int
    counts: tuple[int, int]

    __repr__ = short_repr

    def artefact(
        self,
        model: LoadedModel,
        heads: int,
        *,
        skip: int = 0,
        names: tuple[str, str] = ("true", "false"),
        positions: Positions = "generated",
    ) -> Artefact:
        """The K best heads (after the first `skip`); strength is alpha, in deviations.

        Raises ValueError for more heads than there are, or a head without a shift.
        """
        if not 1 <= heads <= len(self.table) - skip:
            raise ValueError(f"heads={heads}: there are {len(self.table) - skip} after the first {skip}.")
        return self._of(
            model, range(skip, skip + heads), "ITI" if self.probe == "logistic" else "NL-ITI", names, positions
        )

    def random_heads(
        self,
        model: LoadedModel,
        heads: int,
        *,
        seed: int = 0,
        names: tuple[str, str] = ("true", "false"),
        positions: Positions = "generated",
    ) -> Artefact:
        """The control: as many heads drawn among those that are not the best, with their own theta and sigma."""
        rest = np.arange(heads, len(self.table))
        if not 1 <= heads <= len(rest):
            raise ValueError(f"heads={heads}: only {len(rest)} others are left to draw from.")
        drawn = np.random.default_rng(seed).permutation(rest)[:heads]
        return self._of(model, sorted(drawn.tolist()), f"random heads {seed}", names, positions)

    def _of(
        self, model: LoadedModel, numbers: Sequence[int], method: str, names: tuple[str, str], positions: Positions
    ) -> Artefact:
        rows = list(numbers)
        sites = tuple(self.table["site"].iloc[rows])
        if silent := [site for site, row in zip(sites, rows, strict=True) if not bool(self.theta[row].any())]:
            several = ", ..." if len(silent) > 4 else ""
            raise ValueError(
                f"{', '.join(silent[:4])}{several}: what the head holds is the same for both classes, so that it has "
                f"no shift. Take fewer heads than {len(rows)}, or read other tokens: the end of a chat template may be "
                "the same in all texts."
            )
        return Artefact(
            "add",
            sites,
            {"vector": self.sigma[rows, None] * self.theta[rows]},
            method=method,
            positive=names[0],
            negative=names[1],
            extraction="last" if self.tokens == 1 else f"mean of last {self.tokens}",
            positions=positions,
            counts=self.counts,
            facts=made_on(model, probe=self.probe, direction=self.direction, heads=len(rows)),
        )


def head_shifts(
    rows: HeadRows,
    labels: Sequence[bool] | Bool[np.ndarray, " text"],
    groups: Sequence[object],
    *,
    train: Bool[np.ndarray, " text"] | None = None,
    probe: Probe = "logistic",
    direction: Direction = "mean",
    seed: int = 0,
) -> HeadShifts:
    """Rank heads and find their shifts, on the training rows alone.

    Args:
        labels: True is wanted. groups: rows of a group are in one inner fold.
        train: rows that may be used; all by default.
        probe: what ranks the heads. direction: what theta is.

    Raises:
        ValueError: one class, fewer than four groups, numbers that do not match.
    """
    label = np.asarray(labels, dtype=bool)
    n = rows.z.shape[1]
    used = np.ones(n, dtype=bool) if train is None else np.asarray(train, dtype=bool)
    if not len(label) == len(groups) == n == len(used):
        raise ValueError(f"{n} texts, {len(label)} labels, {len(groups)} groups, {len(used)} in train: give one each.")
    if len(set(label[used].tolist())) < 2:
        raise ValueError("The training rows are of one class: a shift needs texts of both.")
    z, y = rows.z[:, torch.tensor(used)], label[used]
    codes = group_codes([group for group, is_used in zip(groups, used, strict=True) if is_used], n_rows=len(y))
    accuracy = head_accuracy(z, y, codes, probe=probe, seed=seed)
    order = np.argsort(-accuracy, kind="stable")
    theta = head_directions(z, y, direction, seed=seed)
    sigma = (z * theta[:, None]).sum(-1).std(dim=1)
    places = torch.from_numpy(order.copy())
    table = pd.DataFrame({"site": np.array(rows.sites)[order], "accuracy": accuracy[order], "rank": range(len(order))})
    return HeadShifts(
        table, theta[places], sigma[places], probe, direction, rows.tokens, (int(y.sum()), int((~y).sum()))
    )


def head_accuracy(
    z: Float[Tensor, "head row d_head"],
    labels: Bool[np.ndarray, " row"],
    groups: np.ndarray,
    *,
    probe: Probe = "logistic",
    seed: int = 0,
) -> Float[np.ndarray, " head"]:
    """Accuracy of a probe at each head, on held-out inner folds that never split a group."""
    codes = groups if isinstance(groups, np.ndarray) else np.asarray(groups)
    test = grouped_folds(labels.astype(int), codes, folds=INNER_FOLDS, seed=seed)
    train, y = torch.from_numpy(~test), torch.tensor(labels)[None]
    if probe == "logistic":
        decision = fit_logistic(z, y, train, [PENALTY]).decision(z)[:, 0, :, 0]
    else:
        decision = fit_mlps(z, y, train, settings=_network(int(train.sum(1).min())), seed=seed).logits(z)[:, 0]
    own = torch.from_numpy(test)[None]
    right = ((decision > 0) == y[:, None]) & own
    return (right.sum((1, 2)) / own.sum()).numpy()


def _network(rows: int) -> MlpSettings:
    """NL-ITI's hidden units; its ten epochs, or as many more as the number of steps takes."""
    batch = MlpSettings().batch
    return MlpSettings(epochs=max(MlpSettings().epochs, -(-STEPS // max(rows // batch, 1))), learning_rate=RATE)


def head_directions(
    z: Float[Tensor, "head row d_head"], labels: Bool[np.ndarray, " row"], kind: Direction = "mean", *, seed: int = 0
) -> Float[Tensor, "head d_head"]:
    """theta of each head, at length 1; 0 for a head that holds the same for both classes."""
    y = torch.tensor(labels)
    if kind == "mean":
        apart = z[:, y].double().mean(1) - z[:, ~y].double().mean(1)
        found = torch.where(apart.norm(dim=1) > LEAST_GAP * z.double().norm(dim=2).mean(1), apart.T, 0).T
    elif kind == "probe":
        everything = torch.ones(1, len(y), dtype=torch.bool)
        found = fit_logistic(z, y[None], everything, [PENALTY]).raw_weights[:, 0, 0, 0]
    elif kind == "random":
        found = torch.randn(len(z), z.shape[2], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    else:
        raise ValueError(f"direction={kind!r}: give 'mean', 'probe' or 'random'.")
    return (found / found.norm(dim=1, keepdim=True).clamp_min(1e-30)).float()


def best_by_luck(
    rows: HeadRows, labels: Sequence[bool] | np.ndarray, groups: Sequence[object], *, draws: int = 20, seed: int = 0
) -> Float[np.ndarray, " draw"]:
    """Accuracy of the best head on labels exchanged between groups: what choosing among all heads gives by luck."""
    codes = group_codes(list(groups), n_rows=rows.z.shape[1])
    label = np.asarray(labels, dtype=bool)
    return np.array(
        [
            head_accuracy(rows.z, shuffled_labels(label, list(groups), seed=seed + draw), codes, seed=seed).max()
            for draw in range(draws)
        ]
    )


def choose_shift(
    shifts: HeadShifts,
    model: LoadedModel,
    measure: Callable[[Artefact, float], float],
    *,
    heads: Sequence[int] = (16, 48),
    strengths: Sequence[float] = (5.0, 15.0),
    positions: Positions = "generated",
) -> pd.DataFrame:
    """Every K and alpha, measured (on validation rows: the caller's measure sees to it); best first.

    Returns: heads, strength, score.
    """
    table = [
        {"heads": k, "strength": alpha, "score": measure(shifts.artefact(model, k, positions=positions), alpha)}
        for k in heads
        for alpha in strengths
    ]
    return pd.DataFrame(table).sort_values("score", ascending=False, kind="stable").reset_index(drop=True)
