"""Directional ablation: take one direction out of everything a model writes (Arditi et al. 2024, "refusal direction").

    x <- x - (r . x) r      at every block's input and at what attention and MLP add, all layers, all tokens

The direction is chosen among candidates r[i, k] = mean z_k[i] of wanted texts - of unwanted ones, i over the last
tokens of the prompt (those of the chat template), k over layers, by three numbers on validation prompts:

    ablated    mean score of wanted prompts under ablation of r (lowest is best)
    induced    mean score of unwanted prompts with r added at its layer; discarded if not above 0
    kl         KL(base || ablated) at the last token of unwanted prompts; discarded if 0.1 or more
    layer      discarded in the last fifth

where score = log p_R - log(1 - p_R), p_R the next-token probability of a set of tokens (such as those that begin a
refusal; any first tokens that mark the behaviour do).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from microtome.capture.anatomy import Anatomy
from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.interventions.artefact import Artefact, made_on
from microtome.interventions.contrast import LEAST_GAP
from microtome.interventions.operations import Add
from microtome.interventions.positions import Positions
from microtome.interventions.steering import Intervention, Steering, anatomy_of

WRITERS = ("attn_out", "mixer_out", "mlp_out")
MOST_KL, DEEPEST = 0.1, 0.8


def ablation_sites(anatomy: Anatomy) -> tuple[str, ...]:
    """Every block's input, every term that blocks add as far as the model offers them, and what leaves the last one."""
    found = [str(site) for site in anatomy.expand("resid_pre")]
    for kind in WRITERS:
        found += [str(site) for site in anatomy.taps if site.kind == kind]
    return (*found, f"resid_post.{anatomy.layers - 1}")


def stream_sites(anatomy: Anatomy) -> tuple[str, ...]:
    """The stream wherever something reads it: blocks' inputs, between attention and MLP, and behind the last block."""
    found = [str(site) for site in anatomy.taps if site.kind in ("resid_pre", "resid_mid")]
    return (*found, f"resid_post.{anatomy.layers - 1}")


def ablation(
    model: LoadedModel,
    direction: Float[Tensor, "*k d"],
    *,
    value: float | None = None,
    keep_norm: bool = False,
    positions: Positions = "all",
    names: tuple[str, str] = ("wanted", "unwanted"),
) -> Artefact:
    """Project a direction (or several) out everywhere.

    Args:
        value: coordinate it is set to in place of 0 (mean ablation), wherever something reads the stream; what blocks
            add is then left alone.
        keep_norm: scale each vector back to its length.
        positions: "all" as published; "rest" leaves the first token alone, whose massive activations are a sink in many
            models and may lie along any direction.
    """
    anatomy = anatomy_of(model)
    sites = ablation_sites(anatomy) if value is None else stream_sites(anatomy)
    tensors = {"basis": direction.float().expand(len(sites), *direction.shape).clone()}
    options: dict[str, Any] = {"keep_norm": keep_norm} | ({} if value is None else {"values": value})
    return Artefact(
        "project",
        sites,
        tensors,
        options,
        method="ablation" if value is None else "mean ablation",
        positive=names[0],
        negative=names[1],
        positions=positions,
        facts=made_on(model),
    )


def token_odds(
    model: LoadedModel, prompts: Sequence[Any], tokens: Sequence[int], steering: Steering | None = None, **options: Any
) -> tuple[Float[np.ndarray, " prompt"], Float[Tensor, "prompt vocab"]]:
    """log p_R - log(1 - p_R) at each prompt's last token, and all log-probabilities there."""
    edits = None if steering is None else steering.edits(model)
    acts = capture(model, list(prompts), ["logits"], "last", edits=edits, progress=False, **options)
    logp = acts["logits"].double().log_softmax(-1)
    chosen = logp[:, list(tokens)].logsumexp(1).clamp(max=-1e-12)
    return (chosen - torch.log(-torch.expm1(chosen))).numpy(), logp


@dataclass(frozen=True, eq=False)
class AblationChoice:
    """The candidates with their numbers, and the one that was chosen.

    Attributes:
        table: position, layer, norm, ablated, induced, kl, discarded (why; empty where not).
        artefact: ablation of the chosen direction.
        direction: the chosen difference of means, at its raw length.
        site: where it was found.
    """

    table: pd.DataFrame
    artefact: Artefact
    direction: Float[Tensor, " d"]
    site: str


def choose_ablation(
    model: LoadedModel,
    fit: tuple[Sequence[Any], Sequence[Any]],
    validation: tuple[Sequence[Any], Sequence[Any]],
    tokens: Sequence[int],
    *,
    positions: Sequence[int] = (-1,),
    layers: Sequence[int] | None = None,
    names: tuple[str, str] = ("wanted", "unwanted"),
    progress: bool = True,
    **options: Any,
) -> AblationChoice:
    """Score every candidate and choose.

    Args:
        fit, validation: texts that show the behaviour and texts that do not.
        tokens: ids whose probability as the next token marks the behaviour.
        positions: tokens counted from the prompt's end.
        layers: of resid_pre; all by default.
        options: of `capture`, such as add_generation_prompt.

    Raises:
        ValueError: positions that are not negative, or no candidate that passes.
    """
    if not positions or any(position >= 0 for position in positions):
        raise ValueError(f"positions={list(positions)}: give negative numbers, -1 being the prompt's last token.")
    anatomy = anatomy_of(model)
    numbers = range(anatomy.layers) if layers is None else layers
    sites = [f"resid_pre.{layer}" for layer in numbers]
    rows = []
    directions: dict[tuple[int, str], Tensor] = {}
    sizes: dict[tuple[int, str], float] = {}
    for position in positions:
        both = [capture(model, list(t), sites, position, progress=False, **options) for t in fit]
        for site in sites:
            wanted, unwanted = (acts[site].double().mean(0) for acts in both)
            directions[position, site] = (wanted - unwanted).float()
            sizes[position, site] = max(float(acts[site].float().norm(dim=-1).mean()) for acts in both)
    base, clean = token_odds(model, validation[1], tokens, **options)
    wanted_base, _ = token_odds(model, validation[0], tokens, **options)
    for (position, site), direction in tqdm(directions.items(), desc="candidates", disable=not progress):
        layer = int(site.split(".")[1])
        row = {"position": position, "layer": layer, "norm": float(direction.norm())}
        if row["norm"] <= LEAST_GAP * sizes[position, site]:
            rows.append(row | {"ablated": np.nan, "induced": np.nan, "kl": np.nan, "discarded": "no difference"})
            continue
        taken = ablation(model, direction).steering(model)
        ablated, _ = token_odds(model, validation[0], tokens, taken, **options)
        _, logp = token_odds(model, validation[1], tokens, taken, **options)
        kl = float((clean.exp() * (clean - logp)).sum(1).mean())
        added = Steering(Intervention(site, Add(direction), "all"))
        induced, _ = token_odds(model, validation[1], tokens, added, **options)
        row |= {"ablated": float(ablated.mean()), "induced": float(induced.mean()), "kl": kl}
        rows.append(row | {"discarded": _why(row, anatomy.layers)})
    table = pd.DataFrame(rows).assign(base_wanted=float(wanted_base.mean()), base_unwanted=float(base.mean()))
    passed = table[table["discarded"] == ""]
    if passed.empty:
        counts = table["discarded"].value_counts().to_dict()
        raise ValueError(f"No candidate passes ({counts}). Look at other positions or tokens, or at a larger fit set.")
    best = passed.loc[passed["ablated"].idxmin()]
    site = f"resid_pre.{int(best['layer'])}"
    direction = directions[int(best["position"]), site]
    return AblationChoice(table, ablation(model, direction, names=names), direction, site)


def _why(row: dict[str, Any], layers: int) -> str:
    if not np.isfinite([row["ablated"], row["induced"], row["kl"]]).all():
        return "not finite"
    if row["layer"] >= DEEPEST * layers:
        return "layer"
    if row["kl"] >= MOST_KL:
        return "kl"
    return "induced" if row["induced"] <= 0 else ""
