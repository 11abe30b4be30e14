"""The ridge lens: every depth behind the ridge map to the last one, fitted from moments, no distribution seen.

    q_l = softmax(n(r_l W_l + c_l) W_U + b_U),     W_l, c_l = ridge regression of r_L on r_l     (`ridge_map`)

The closed form beside the tuned lens (its warm start too), and the shortcut of Yom Din et al. 2023 (arXiv:2303.09435)
to the last depth with intercept and penalty. One pass over texts, then one eigendecomposition per depth.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.lens import Lens, depths_of, logit_lens_of
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.moments import Moments
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.ridge_map import ridge_map


def ridge_to_last(
    model: LoadedModel | nn.Module,
    texts: Any,
    *,
    documents: Iterable[Any] | None = None,
    depths: Sequence[int] | None = None,
    strengths: Sequence[int | float] | None = None,
    save: str | Path | None = None,
    seed: int = 0,
    progress: bool = False,
    **options: Any,
) -> dict[str, LinearMap]:
    """Maps r_l -> r_L by the name of r_l, the strength of each chosen on documents of their own.

    Args:
        documents: name or number of the document of each text, each its own if None; 80, 10 and 10 percent of the
            documents fit, choose and are left alone.
        depths: numbers 0 .. L-1, all if None.
        save: a folder in which the moments are kept and gone on with.

    Raises:
        ValueError: depths out of range, and what `moments_of` and `ridge_map` raise (too few documents for a shard).
    """
    module = model.module if isinstance(model, LoadedModel) else model
    known = depths_of(dissect(module))
    numbers = range(len(known) - 1) if depths is None else sorted(set(depths))
    if not len(numbers) or any(not 0 <= n < len(known) - 1 for n in numbers):
        raise ValueError(f"depths are {list(numbers)}. This model has maps from depths 0 to {len(known) - 2}.")
    sites = [*(known[n] for n in numbers), known[-1]]
    pairs = [(site, known[-1]) for site in sites]
    moments = moments_of(
        model, texts, sites, documents=documents, pairs=pairs, save=save, seed=seed, progress=progress, **options
    )
    return maps_to_last(moments, sites, strengths=strengths)


def maps_to_last(
    moments: Moments, sites: Sequence[Site], *, strengths: Sequence[int | float] | None = None
) -> dict[str, LinearMap]:
    """The same from moments that are there already; the last site is the target. Raises what `Moments.pair` raises."""
    last = sites[-1]
    maps = {}
    for site in sites[:-1]:
        fit, validation = moments.pair(site, last, "fit"), moments.pair(site, last, "validation")
        found = ridge_map(fit, validation, strengths=strengths).map
        maps[str(site)] = replace(found, source=str(site), target=str(last))
    return maps


def translated_lens(
    model: LoadedModel | nn.Module, maps: Mapping[str | tuple | Site, LinearMap], *, name: str = "ridge"
) -> Lens:
    """The lens behind maps to the last depth, by site or its name; the last depth itself is read without one.

    Raises:
        ValueError: a map of another width, to another site than the last depth, or from no depth of this model.
    """
    depths = depths_of(model)
    maps = {str(Site.parse(site)): each for site, each in maps.items()}
    if strange := [site for site in maps if site not in map(str, depths[:-1])]:
        raise ValueError(f"{strange[0]} is no depth before the last of this model of {len(depths) - 1} blocks.")
    chosen = [site for site in depths[:-1] if str(site) in maps]
    lens = logit_lens_of(model, [*chosen, depths[-1]])
    width = lens.unembedding.weight.shape[1]
    for site in chosen:
        each = maps[str(site)]
        if (each.d_in, each.d_out) != (width, width):
            raise ValueError(f"the map from {site} is {each.d_in} to {each.d_out}; the stream has {width}.")
        if each.target and each.target != str(depths[-1]):
            raise ValueError(
                f"the map from {site} ends at {each.target}, and the unembedding reads {depths[-1]}. Fit maps to "
                f"{depths[-1]}: moments_of(..., sites that include it), or ridge_to_last."
            )
    like = lens.unembedding.weight
    return lens.with_translators(name, {site: maps[str(site)].to(like) for site in chosen})
