"""Make a subject one of another concept: the edit of linear relational concepts (LRC, Chanin et al. 2023, section 3).

    x <- x + m |x| (v_new - v_old)      at the subject's last token, in the prompt

v are unit directions from the truncated inverse of a relation (`microtome.lenses.concept_directions`). The authors take
m of about 3 at one depth, or 0.1 at all of them. Positions are absolute, so that cached steps leave the edit alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from microtome.capture.models import LoadedModel
from microtome.interventions.operations import Add
from microtome.interventions.positions import ByText
from microtome.interventions.steering import Intervention, Steering, anatomy_of
from microtome.lenses.concept_directions import ConceptDirections
from microtome.lenses.relations import stream_site


def concept_edit(
    model: LoadedModel,
    concepts: ConceptDirections,
    old: Sequence[str],
    new: Sequence[str],
    places: Sequence[int],
    *,
    scale: float = 3.0,
    depths: Sequence[int] | None = None,
) -> Steering:
    """The edits of some texts, each from its own old concept to its own new one.

    Args:
        old, new: names of concepts, for each text.
        places: absolute position of each text's subject (its last token).
        scale: m.
        depths: where it acts, counted as the concepts' own depth; that one if left out.

    Raises:
        KeyError: a concept that has no direction.
        ValueError: numbers of texts that differ, an edit from a concept to itself.
    """
    if not len(old) == len(new) == len(places) or not len(places):
        raise ValueError(f"{len(old)} old, {len(new)} new concepts, {len(places)} places: give one each for a text.")
    if unknown := sorted((set(old) | set(new)) - set(concepts.names)):
        raise KeyError(f"there is no direction for {unknown}; there are {list(concepts.names)}.")
    if same := [name for name, other in zip(old, new, strict=True) if name == other]:
        raise ValueError(f"{same[0]!r} is to become itself: the edit would do nothing.")
    anatomy = anatomy_of(model)
    sites = [stream_site(anatomy, depth) for depth in ([concepts.depth] if depths is None else depths)]
    found = []
    for pair in dict.fromkeys(zip(old, new, strict=True)):
        rows = [number for number, one in enumerate(zip(old, new, strict=True)) if one == pair]
        where = ByText([[place] if number in rows else [] for number, place in enumerate(places)])
        change = direction(concepts, pair[1]) - direction(concepts, pair[0])
        name = f"{pair[0]} to {pair[1]}"
        found += [Intervention(site, Add(change, relative=True), where, scale, name=name) for site in sites]
    return Steering(found)


def direction(concepts: ConceptDirections, name: str) -> Tensor:
    """v of one concept."""
    return torch.as_tensor(concepts.vectors[concepts.names.index(name)])
