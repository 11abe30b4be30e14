"""Directions as they are given, by target site: checked, of unit length, with names."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from microtome.capture.sites import Site

Directions = Tensor | Mapping[str, Tensor]


def unit_rows(directions: Tensor, site: str, width: int) -> Float64[Tensor, "direction width"]:
    """Each row over its length; a single vector is one row.

    Raises:
        ValueError: no rows, another width, a row that is not finite or of length 0 (by number).
    """
    rows = directions.detach().to("cpu", torch.float64)
    rows = rows[None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or rows.shape[1] != width or not len(rows):
        raise ValueError(
            f"directions for {site} are {tuple(directions.shape)}; expected [direction, {width}], rows in the channels "
            f"of {site}. Is this a decoder of another site or model, or to be transposed?"
        )
    if not bool(torch.isfinite(rows).all()):
        number = int((~torch.isfinite(rows)).any(1).nonzero()[0])
        raise ValueError(f"direction {number} for {site} holds NaN or infinity. Drop it.")
    rows = rows / rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)  # squares stay in range
    lengths = rows.norm(dim=1, keepdim=True)
    if not bool((lengths > 0).all()):
        number = int((lengths[:, 0] == 0).nonzero()[0])
        raise ValueError(f"direction {number} for {site} has length 0: nothing lies along it. Drop it.")
    return rows / lengths


def directions_by_site(directions: Directions, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Unit rows of every site of `widths`. One tensor serves all of them, if it has their width.

    Raises:
        ValueError: a site without directions, directions for another site, and what `unit_rows` raises.
    """
    if isinstance(directions, Tensor):
        return {site: unit_rows(directions, site, width) for site, width in widths.items()}
    given = {str(Site.parse(site)): rows for site, rows in directions.items()}
    if other := [site for site in given if site not in widths]:
        raise ValueError(f"directions for {other[0]}, which no operator writes. Targets: {', '.join(widths)}.")
    if missing := [site for site in widths if site not in given]:
        raise ValueError(f"there are no directions for {missing[0]}. Give rows for every target.")
    return {site: unit_rows(given[site], site, width) for site, width in widths.items()}


def names_by_site(
    names: Sequence[str] | Mapping[str, Sequence[str]] | None, rows: Mapping[str, Tensor]
) -> dict[str, list[str]]:
    """A name for every direction; their numbers where none are given.

    Raises:
        ValueError: another number of names than of directions.
    """
    given: Mapping[str, Sequence[str] | None] = dict.fromkeys(rows, None)
    if isinstance(names, Mapping):
        given = {str(Site.parse(site)): own for site, own in names.items()}
    elif names is not None:
        given = dict.fromkeys(rows, names)
    found = {}
    for site, there in rows.items():
        own = given.get(site)
        found[site] = [str(i) for i in range(len(there))] if own is None else [str(name) for name in own]
        if len(found[site]) != len(there):
            raise ValueError(f"{len(found[site])} names for {len(there)} directions of {site}. Name each, or none.")
    return found
