"""Transport in feature space, from one pass over held-out texts.

    found = feature_transport(model, held_out, operator, decoder, documents=documents, null=shuffled, means=moments)
    found.summary()                                              # how many are carried, how many made here
    found.table[found.table["verdict"] == "made here"]

Directions are rows of any length in the target's channels: a dictionary's decoder, probe weights, unembedding rows,
steering vectors. All rows count, whether a feature fires or not; `encode=` adds the published scores, which take the
others out. One product of 2 d F per token for each operator, each null, each source and each target.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.batches import MAX_TOKENS
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.pair_splits import MomentSource
from microtome.lenses.strata import TokenRule
from microtome.lenses.transport.direction_rows import Directions, directions_by_site, names_by_site
from microtome.lenses.transport.feature_scores import FeatureTransport, feature_scores, require_settings
from microtome.lenses.transport.feature_sums import Encoder, FeatureSums
from microtome.lenses.transport.operator import TransportOperator, operator_of
from microtome.lenses.transport.transport_rows import transport_pass

Operators = TransportOperator | LinearMap | Sequence[TransportOperator | LinearMap]


def feature_transport(
    model: LoadedModel | nn.Module,
    texts: Any,
    operators: Operators,
    directions: Directions,
    *,
    documents: Iterable[Any] | None = None,
    names: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    null: Operators | None = None,
    means: Mapping[str, Tensor] | MomentSource | None = None,
    encode: Encoder | Mapping[str, Encoder] | None = None,
    draws: int = 1000,
    seed: int = 0,
    stratum: str = "rest",
    threshold: float = 0.5,
    null_quantile: float = 0.975,
    rule: TokenRule | None = None,
    medians: Mapping[str, float] | None = None,
    max_tokens: int = MAX_TOKENS,
    progress: bool = False,
    **encoding: Any,
) -> FeatureTransport:
    """Run held-out texts once and score every operator along every direction of its target.

    Args:
        model: what the operators were fitted on.
        texts: that no operator was fitted on.
        operators: one or several, of any sites and routes; maps must say their sites and are taken at the same token.
        directions: rows in the target's channels, or by target's name where there are several.
        documents: name or number of each text's document, which intervals go by; each its own if None.
        names: of the directions, or by target.
        null: as many operators fitted on shuffled pairs, found by source, target, route and (where several) rank.
        means: mean of y in the fit shard by target, or the moments it is taken from.
        encode: activations [row, direction] of the target's dictionary, or by target: for the published scores.
        draws, seed: of the bootstrap over documents, 95 % intervals.
        stratum: of the rows that count, "rest" (neither target nor source is set apart), "sinks" or "all".
        threshold: what share of the variance counts as carried.
        null_quantile: of the null's R2 over directions.
        rule, medians: of sinks; taken from `means` where those are moments.
        max_tokens, encoding: of the pass (truncate, max_length, add_special_tokens).

    Raises:
        ValueError: settings out of range, an operator of another model, directions of another width, of length 0 or
            not finite, for a target that no operator writes; an operator without directions or without its null; no
            token in the stratum.
        KeyError, IndexError: a site that the model does not offer.
    """
    require_settings(draws, threshold, null_quantile)
    chosen = as_operators(operators)
    for operator in chosen:
        operator.require_model(model)
    nulls = _matched(chosen, None if null is None else as_operators(null))
    targets = {operator.target: operator.d_out for operator in chosen}
    units = directions_by_site(directions, targets)
    known = names_by_site(names, units)
    if isinstance(means, MomentSource):
        rule = rule or getattr(means, "rule", None)
        medians = medians or getattr(means, "medians", None)
    centres = _means(means, targets, stratum)
    encoders = {} if encode is None else dict(encode) if isinstance(encode, Mapping) else dict.fromkeys(targets, encode)
    if other := [site for site in encoders if site not in targets]:
        raise ValueError(f"encode is given for {other[0]}, which no operator writes. Targets: {', '.join(targets)}.")
    sites = list(dict.fromkeys(site for operator in chosen for site in (operator.source, operator.target)))
    job = transport_pass(
        model,
        texts,
        sites,
        [operator.route for operator in chosen],
        documents=documents,
        stratum=stratum,
        rule=rule,
        medians=medians,
        max_tokens=max_tokens,
        **encoding,
    )
    sums = FeatureSums(chosen, nulls, units, centres, job.documents, encoders)
    with torch.no_grad():
        for rows in tqdm(job.batches(), total=len(job.job.batches), desc="features", disable=not progress):
            sums.update(rows)
    return feature_scores(
        sums,
        known,
        draws=draws,
        seed=seed,
        threshold=threshold,
        null_quantile=null_quantile,
        facts={"stratum": stratum},
    )


def as_operators(operators: Operators) -> list[TransportOperator]:
    """One or several operators or maps as a list of operators. Raises ValueError for none."""
    listed = [operators] if isinstance(operators, TransportOperator | LinearMap) else list(operators)
    if not listed:
        raise ValueError("there are no operators. Give at least one.")
    return [operator_of(each) if isinstance(each, LinearMap) else each for each in listed]


def _matched(
    operators: Sequence[TransportOperator], nulls: Sequence[TransportOperator] | None
) -> list[TransportOperator | None]:
    if nulls is None:
        return [None] * len(operators)
    found: list[TransportOperator | None] = []
    for wanted in operators:
        same = [n for n in nulls if (n.source, n.target, n.route) == (wanted.source, wanted.target, wanted.route)]
        same = [n for n in same if n.rank == wanted.rank] or same
        if not same:
            raise ValueError(
                f"there is no null for {wanted.source} to {wanted.target}, route {wanted.route}. Fit one on shuffled "
                "pairs of these sites, or give null=None."
            )
        found.append(same[0])
    return found


def _means(
    means: Mapping[str, Tensor] | MomentSource | None, targets: Mapping[str, int], stratum: str
) -> dict[str, Tensor]:
    if means is None:
        return {}
    if isinstance(means, MomentSource):
        return {target: means.pair(target, target, "fit", stratum).mean_y for target in targets}
    found = {str(Site.parse(name)): mean for name, mean in means.items()}
    if wrong := [name for name, mean in found.items() if name in targets and mean.shape != (targets[name],)]:
        raise ValueError(f"the mean of {wrong[0]} is {tuple(found[wrong[0]].shape)}, expected ({targets[wrong[0]]},).")
    return found
