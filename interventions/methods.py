"""Methods by name, each fitted to one task and ready at any strength: what the command and the study compare.

fitted = fit_method("mean", model, task, site="resid_post.20")
fitted.steer(2.0)          the steering; strength is in the method's own unit (class gaps, deviations, lambda, ...)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch

from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.interventions.activation_addition import activation_addition
from microtome.interventions.angular import angular
from microtome.interventions.artefact import Artefact
from microtome.interventions.contrast import ContrastRows, contrast, contrast_rows, separation
from microtome.interventions.controllers import controlled, open_loop
from microtome.interventions.controls import shuffled_labels
from microtome.interventions.directional_ablation import ablation
from microtome.interventions.gate import fit_gate
from microtome.interventions.head_rows import HeadRows, head_rows
from microtome.interventions.iti import HeadShifts, head_shifts
from microtome.interventions.positions import Positions
from microtome.interventions.steering import Steering, anatomy_of
from microtome.interventions.steering_task import SteeringTask
from microtome.interventions.strength_search import search_strength
from microtome.interventions.transport_maps import transport_maps

HEADS = 48
NONLINEAR_TOKENS = 4
SHARES = (0.25, 0.5, 0.75, 1.0, 1.5)  # of the strength at the limit
SHARES_BELOW = (0.2, 0.4, 0.6, 0.8, 1.0)  # of the largest strength, where the limit is out of reach


@dataclass(frozen=True, eq=False)
class FittedMethod:
    """A method that was fitted.

    Attributes:
        name: of the method.
        steer: the steering of a strength.
        strengths: a grid that spans its useful range.
        artefact: its vectors, where it has one set of them.
        unit: what strength counts.
        largest: strength beyond which the method is another one (a turn past its angle, more than the whole map).
    """

    name: str
    steer: Callable[[float], Steering]
    strengths: tuple[float, ...]
    artefact: Artefact | None = None
    unit: str = "class gaps"
    largest: float = math.inf


@dataclass(eq=False)
class MethodFits:
    """What methods of one task share: activations of the contrast, captured once.

    Attributes:
        model, task: whose.
        site: where single-site methods act.
        positions: at which tokens additive methods act.
        extraction: which token speaks for a text.
        seed: of whatever is drawn.
    """

    model: LoadedModel
    task: SteeringTask
    site: str
    positions: Positions = "generated"
    extraction: str = "last"
    seed: int = 0
    kept: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def layer(self) -> int:
        """Of the site."""
        layer = Site.parse(self.site).layer
        if layer is None:
            raise ValueError(f"{self.site} has no layer: give a site such as resid_post.14.")
        return layer

    @cached_property
    def rows(self) -> ContrastRows:
        """The stream behind every block, for both classes."""
        return contrast_rows(self.model, self.task.texts(True), self.task.texts(False), "resid_post", self.extraction)

    @cached_property
    def heads(self) -> HeadRows:
        """z of every head at the last token."""
        return head_rows(self.model, self.task.contrast["text"].tolist())

    @cached_property
    def heads_of_several(self) -> HeadRows:
        """z of every head, averaged over the last tokens."""
        return head_rows(self.model, self.task.contrast["text"].tolist(), tokens=NONLINEAR_TOKENS)

    @cached_property
    def depths(self) -> list[str]:
        """Sites of methods that act at many depths: the middle third of the layers up to the site's, and it."""
        layers = anatomy_of(self.model).layers
        first = max(min(self.layer, layers - 1) - layers // 3, 0)
        return [f"resid_post.{layer}" for layer in range(first, self.layer + 1)]

    def at(self, site: str) -> "MethodFits":
        """The same at another site; what was captured is shared."""
        found = replace(self, site=str(Site.parse(site)), kept={})
        for name in ("rows", "heads", "heads_of_several"):  # of all sites
            if name in vars(self):
                vars(found)[name] = vars(self)[name]
        return found

    def of_shuffled_labels(self, vector: Artefact) -> Artefact:
        """A control: the mean difference at the vector's sites of labels shuffled between groups, as long as it."""
        table = self.task.contrast
        order = [*table.index[table["label"]], *table.index[~table["label"]]]  # as the rows are
        labels = shuffled_labels(table["label"].tolist(), table["group"].tolist(), seed=self.seed)[order]
        anew = replace(self.rows, wanted=torch.tensor(labels.astype(bool)))
        found = contrast(self.model, anew, sites=list(vector.sites), positions=vector.positions)
        unit = found.tensors["vector"] / found.tensors["vector"].norm(dim=-1, keepdim=True)
        scaled = unit * vector.tensors["vector"].norm(dim=-1, keepdim=True)
        return found.with_tensors("shuffled labels", vector=scaled)

    def shifts(self, rows: HeadRows, probe: str) -> HeadShifts:
        """Heads ranked by a probe."""
        table = self.task.contrast
        return head_shifts(
            rows,
            table["label"].tolist(),
            table["group"].tolist(),
            probe=probe,  # pyright: ignore[reportArgumentType]
            seed=self.seed,
        )

    def means(self, sites: Sequence[str]) -> Artefact:
        """Differences of means at some sites."""
        return contrast(self.model, self.rows, "mean", sites=sites, names=self.task.names, positions=self.positions)


def _contrast(method: str) -> Callable[[MethodFits], FittedMethod]:
    def fit(fits: MethodFits) -> FittedMethod:
        found = contrast(
            fits.model,
            fits.rows,
            method,  # pyright: ignore[reportArgumentType]
            sites=[fits.site],
            names=fits.task.names,
            positions=fits.positions,
        )
        return _added(method, fits, found)

    return fit


def _added(
    name: str, fits: MethodFits, found: Artefact, strengths: tuple[float, ...] | None = None, **more: Any
) -> FittedMethod:
    def steer(strength: float) -> Steering:
        return found.steering(fits.model, strength=strength)

    return FittedMethod(name, steer, strengths or (0.5, 1.0, 2.0, 3.0, 4.0), found, **more)


def _all_layers(fits: MethodFits) -> FittedMethod:
    return _added("mean, many layers", fits, fits.means(fits.depths), (0.1, 0.2, 0.3, 0.5, 0.8))


def _iti(fits: MethodFits) -> FittedMethod:
    shifts = fits.shifts(fits.heads, "logistic")
    found = shifts.artefact(fits.model, heads_of(shifts), names=fits.task.names, positions=fits.positions)
    return _added("ITI", fits, found, (1.0, 2.0, 4.0, 6.0, 10.0), unit="deviations")


def _nl_iti(fits: MethodFits) -> FittedMethod:
    shifts = fits.shifts(fits.heads_of_several, "mlp")
    found = shifts.artefact(fits.model, heads_of(shifts), names=fits.task.names, positions=fits.positions)
    return _added("NL-ITI", fits, found, (1.0, 2.0, 4.0, 6.0, 10.0), unit="deviations")


def heads_of(shifts: HeadShifts) -> int:
    """As many heads as the paper's best setting has, a fifth of them where there are few."""
    return min(HEADS, max(len(shifts.table) // 5, 1))


def _act(kind: str) -> Callable[[MethodFits], FittedMethod]:
    def fit(fits: MethodFits) -> FittedMethod:
        sites = [site.replace("resid_post", "mlp_out") for site in fits.depths][::2]
        found = transport_maps(
            fits.model,
            fits.task.texts(True),
            fits.task.texts(False),
            sites,
            kind,  # pyright: ignore[reportArgumentType]
            extraction="last",
            names=fits.task.names,
            progress=False,
        )
        return _added(found.method, fits, found, (0.2, 0.4, 0.6, 0.8, 1.0), unit="lambda", largest=1.0)

    return fit


def _angular(adaptive: bool) -> Callable[[MethodFits], FittedMethod]:
    def fit(fits: MethodFits) -> FittedMethod:
        found = angular(fits.model, fits.rows, [fits.site], 0.0, adaptive=adaptive, names=fits.task.names)
        name = "angular adaptive" if adaptive else "angular"
        return _added(name, fits, found, (0.1, 0.2, 0.3, 0.5, 1.0), unit="share of the turn", largest=1.0)

    return fit


def _ablation(name: str, positions: Positions) -> Callable[[MethodFits], FittedMethod]:
    def fit(fits: MethodFits) -> FittedMethod:
        vector = fits.means([fits.site]).vector()
        found = ablation(fits.model, vector, positions=positions, names=fits.task.names)
        shares = (0.2, 0.4, 0.6, 0.8, 1.0)
        return _added(name, fits, found, shares, unit="share taken out", largest=1.0)

    return fit


def _controller(name: str, ki: float, kd: float) -> Callable[[MethodFits], FittedMethod]:
    def fit(fits: MethodFits) -> FittedMethod:
        means = fits.means(fits.depths)

        def steer(strength: float) -> Steering:
            return controlled(fits.model, means, kp=0.1, ki=ki, kd=kd, level=strength, positions=fits.positions)

        return FittedMethod(name, steer, (1.0, 2.0, 3.0, 4.0, 6.0), means, "level: 0 unwanted, 1 wanted")

    return fit


def _pid_act(fits: MethodFits) -> FittedMethod:
    found = open_loop(
        fits.model,
        fits.task.texts(True),
        fits.task.texts(False),
        fits.depths[::2],
        kp=0.5,
        ki=0.05,
        kd=0.01,
        names=fits.task.names,
        positions=fits.positions,
        progress=False,
    )
    return _added("PID-AcT", fits, found, (0.25, 0.5, 1.0, 1.5, 2.0))


def _act_add(fits: MethodFits) -> FittedMethod:
    plus, minus = (words[0] for words in fits.task.words) if all(fits.task.words) else fits.task.names
    site = f"resid_post.{max(fits.layer // 3, 1)}"

    def steer(strength: float) -> Steering:
        return activation_addition(fits.model, plus.capitalize(), minus.capitalize(), site, strength=strength)

    return FittedMethod("activation addition", steer, (1.0, 2.0, 4.0, 8.0, 16.0), None, "the two prompts' difference")


def _gated(fits: MethodFits) -> FittedMethod:
    """The mean difference, only on prompts that read as unwanted."""
    look = f"resid_post.{max(fits.layer - 4, 0)}"
    direction = contrast(fits.model, fits.rows, "mean", sites=[look], names=fits.task.names).vector()
    gate = fit_gate(
        fits.model, fits.task.texts(False), fits.task.texts(True), {look: direction}, pooling="last", measure="cosine"
    ).gate
    found = fits.means([fits.site])

    def steer(strength: float) -> Steering:
        return found.steering(fits.model, strength=strength, gate=gate)

    return FittedMethod("conditional", steer, (0.5, 1.0, 2.0, 3.0, 4.0), found)


METHODS: dict[str, Callable[[MethodFits], FittedMethod]] = {
    "mean": _contrast("mean"),
    "whitened": _contrast("whitened"),
    "pca": _contrast("pca"),
    "logistic": _contrast("logistic"),
    "mean-layers": _all_layers,
    "iti": _iti,
    "nl-iti": _nl_iti,
    "linear-act": _act("linear"),
    "mean-act": _act("mean"),
    "angular": _angular(False),
    "angular-adaptive": _angular(True),
    "ablation": _ablation("ablation", "all"),
    "ablation-rest": _ablation("ablation, first token left alone", "rest"),
    "p": _controller("P", 0.0, 0.0),
    "pi": _controller("PI", 0.02, 0.0),
    "pid": _controller("PID", 0.02, 0.02),
    "pid-act": _pid_act,
    "act-add": _act_add,
    "conditional": _gated,
}


def methods_named(names: Sequence[str]) -> tuple[str, ...]:
    """The same names. Raises ValueError for one that is no method."""
    for name in names:
        if name not in METHODS:
            raise ValueError(f"method {name!r}: give one of {', '.join(METHODS)}.")
    return tuple(names)


def fit_method(name: str, fits: MethodFits) -> FittedMethod:
    """Fit a method by name; kept for the next time it is asked for.

    Raises ValueError for an unknown name, and what the method raises.
    """
    methods_named([name])
    if name not in fits.kept:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(fits.seed)
            fits.kept[name] = METHODS[name](fits)
    return fits.kept[name]


def strengths_tried(method: FittedMethod, kl: Callable[[Steering], float], limit: float) -> pd.DataFrame:
    """A search for the strength whose KL is the limit: a row per strength, with `side_effect`; in every row what was
    `found`, and whether the limit `is_reached`."""
    start = min(method.strengths[2], method.largest)
    found = search_strength(
        lambda strength: kl(method.steer(strength)),
        limit,
        start=start,
        largest=min(16 * start, method.largest),
        tolerance=0.1,
        most=9,
    )
    return found.table.assign(found=found.strength, is_reached=found.is_reached)


def strength_at_limit(tried: pd.DataFrame) -> float:
    """What `strengths_tried` found: at the limit, or the largest where that is out of reach; 0 if none is within it."""
    return float(tried["found"].iloc[0])


def strengths_about(tried: pd.DataFrame) -> tuple[float, ...]:
    """Five strengths about the one that was found."""
    shares = SHARES if bool(tried["is_reached"].iloc[0]) else SHARES_BELOW
    return tuple(strength_at_limit(tried) * share for share in shares)


def depths_to_try(model: LoadedModel, rows: ContrastRows, count: int = 4) -> list[str]:
    """Sites at which to look for the best layer: spread over the depths where the classes are told apart (d' of 1 or
    more on held-out rows), or all if none is."""
    table = separation(rows)
    good = table[table["d_prime"] >= 1]
    sites = (good if len(good) else table)["site"].tolist()
    places = np.linspace(0, len(sites) - 1, min(count, len(sites))).round().astype(int)
    return [sites[place] for place in dict.fromkeys(places.tolist())]
