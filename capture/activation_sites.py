"""Which of the captured sites a name means, and which satisfy a selection by kind, layer and head.

Names beyond our vocabulary are allowed for features from elsewhere: trailing numbers are read as layer and head
("backbone.3" is kind "backbone" at layer 3), the rest is the kind.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from microtome.capture.sites import KINDS, Site, near_matches
from microtome.capture.stored_tensor import StoredTensor

Values = Tensor | StoredTensor

_NUMBERED = re.compile(r"^(?P<kind>.+?)\.(?P<layer>\d+)(?:\.(?P<head>\d+))?$")


def any_site(name: str | tuple | Site) -> Site:
    """The site of a name, in our vocabulary if it is one of ours, else with the name as its kind.

    Raises:
        ValueError: an empty name, a tuple that does not begin with a kind, or one of our kinds with wrong numbers.
        TypeError: neither a string, a tuple nor a Site.
    """
    if isinstance(name, Site):
        return name
    try:
        return Site.parse(name)
    except ValueError:
        text = ".".join(map(str, name)) if isinstance(name, tuple) else name
        if not text or any(part in KINDS for part in text.split(".")[:2]):  # ours, with something wrong about it
            raise
    numbered = _NUMBERED.match(text)
    if numbered is None:
        return Site(text)
    return Site(numbered["kind"], int(numbered["layer"]), None if numbered["head"] is None else int(numbered["head"]))


def find_tensor(tensors: Mapping[Site, Values], name: str | tuple | Site) -> Values:
    """The tensor that a name means; one head's slice where the name has a head and all heads were captured.

    Raises:
        KeyError: nothing captured has this name (near matches are listed), it is out of range, or it means several.
    """
    by_name = {str(site): site for site in tensors}
    if isinstance(name, str) and name in by_name:
        return tensors[by_name[name]]
    try:
        site = any_site(name)
    except ValueError as error:
        raise KeyError(f"{error} Captured: {summarise(tensors)}.") from error
    if site in tensors:
        return tensors[site]
    whole = tensors.get(site.whole)
    if site.head is not None and whole is not None and whole.dim() == 3:
        if site.head >= whole.shape[1]:
            raise KeyError(f"{site}: {site.whole} has {whole.shape[1]} heads, 0 to {whole.shape[1] - 1}.")
        return whole[:, site.head]
    several = [other for other in tensors if other.kind == site.kind]
    if site.layer is None and several:
        raise KeyError(f"{site} means {len(several)} sites: name one, as in {str(several[0])!r}, or use sel(kind=...).")
    raise KeyError(f"{site} was not captured. {near_matches(str(site), by_name)} Captured: {summarise(tensors)}.")


def select_tensors(
    tensors: Mapping[Site, Values],
    *,
    kind: str | Iterable[str] | None = None,
    layer: int | Iterable[int] | None = None,
    head: int | Iterable[int] | None = None,
    stack: str | Iterable[str] | None = None,
) -> dict[Site, Values]:
    """The sites that satisfy every condition given; `head` turns tensors of all heads into one per head asked for.

    Raises:
        KeyError: a value that no captured site has, or that a selected site's heads do not reach.
    """
    chosen = dict(tensors)
    for field, wanted in (("stack", stack), ("kind", kind), ("layer", layer)):
        if wanted is None:
            continue
        values = _as_list(wanted)
        present = list(dict.fromkeys(getattr(site, field) for site in chosen))
        if missing := [value for value in values if value not in present]:
            raise KeyError(
                f"sel({field}={wanted!r}): no site with {field} {missing[0]!r}; there are {summarise(chosen)}."
            )
        chosen = {site: tensor for site, tensor in chosen.items() if getattr(site, field) in values}
    if head is None:
        return chosen
    by_head: dict[Site, Values] = {}
    heads = _as_list(head)
    for site, tensor in chosen.items():
        if site.head is not None:
            if site.head in heads:
                by_head[site] = tensor
        elif tensor.dim() == 3:
            if outside := [value for value in heads if not 0 <= value < tensor.shape[1]]:
                raise KeyError(
                    f"sel(head={head!r}): {site} has heads 0 to {tensor.shape[1] - 1}, no head {outside[0]}. Restrict "
                    "kind= as well if other kinds have more heads."
                )
            by_head |= {replace(site, head=value): tensor[:, value] for value in heads}
    found = {site.head for site in by_head}
    if missing := [value for value in heads if value not in found]:
        raise KeyError(f"sel(head={head!r}): no site with head {missing[0]}; there are {summarise(chosen)}.")
    return by_head


def choose_tensors(tensors: Mapping[Site, Values], names: Iterable[str | tuple | Site]) -> dict[Site, Values]:
    """The sites that names mean: a captured site, one head of it, or a kind ("z") for all of that kind.

    Raises:
        KeyError: a name that was not captured (near matches are listed).
        TypeError: one name that was not wrapped in a list.
        ValueError: a site that is named twice, or beside its own heads.
    """
    if isinstance(names, str | Site):
        raise TypeError(f"sites={names!r} is one name. Pass a list of names, such as [{str(names)!r}].")
    chosen: list[tuple[Site, Values]] = []
    for name in names:
        site = any_site(name)
        of_kind = [(s, t) for s, t in tensors.items() if (s.kind, s.stack) == (site.kind, site.stack)]
        if site.layer is None and site.head is None and site not in tensors and of_kind:
            chosen += of_kind
        else:
            chosen.append((site, find_tensor(tensors, name)))
    apart = [probe for site, tensor in chosen for probe in heads_apart({site: tensor})]
    if twice := sorted({str(site) for site in apart if apart.count(site) > 1}):
        raise ValueError(
            f"sites names {twice[0]} twice ({len(twice)} such probes). Name each once, or its block alone."
        )
    return dict(chosen)


def heads_apart(tensors: Mapping[Site, Values]) -> dict[Site, Values]:
    """A `[row, d]` tensor per site or head, in order."""
    parts: dict[Site, Values] = {}
    for site, tensor in tensors.items():
        if tensor.dim() == 3:
            parts |= {site.at(head=head): tensor[:, head] for head in range(tensor.shape[1])}
        else:
            parts[site] = tensor
    return parts


def summarise(tensors: Mapping[Site, Values]) -> str:
    """The sites in a line: "resid_post.0-29 [576], z.0-29 [9 x 64]"."""
    groups: dict[tuple, list[int]] = {}
    for site, tensor in tensors.items():
        shape = " x ".join(map(str, tensor.shape[1:]))
        groups.setdefault((site.stack, site.kind, site.head, site.call, shape), []).append(
            -1 if site.layer is None else site.layer
        )
    parts = []
    for (stack, kind, head, call, shape), layers in groups.items():
        name = ".".join(part for part in (stack, kind, _ranges(layers)) if part)
        name += ("" if head is None else f".{head}") + ("" if call is None else f"@{call}")
        parts.append(f"{name} [{shape}]")
    shown = ", ".join(parts[:12])
    return shown + (f" and {len(parts) - 12} more" if len(parts) > 12 else "") if parts else "nothing"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"; nothing for the layer of a site without one."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers) - {-1}):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _as_list(wanted: object) -> Sequence:
    return [wanted] if isinstance(wanted, str | int) else list(wanted)
