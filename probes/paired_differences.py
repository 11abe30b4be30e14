"""Features of pairs: f(right) - f(decoy), one row per pair, and heads of all layers side by side as one site.

    logit P(first of the pair is right) = w . (f(first) - f(second)),     no intercept

The label of a difference is always "right first": the negated row says the same, so exchanging the two at random and
labelling 0 and 1 adds nothing but duplicates, and an intercept would have nothing to estimate. Fit differences by
`PreferenceProbe`, or by logistic regression without intercept. "It's All in the Heads" (Tikhonov and Ryabinin 2021,
arXiv:2106.12066) negates every second row instead. Beware: what is the same for both, such as the length of the text,
cancels; what differs with the order, such as distance to the pronoun, does not.
"""

import pandas as pd
import torch
from torch import Tensor

from microtome.capture.activations import Activations
from microtome.capture.sites import KINDS, Site
from microtome.capture.stored_tensor import in_memory


def key_features(features: Activations, key: str) -> Activations:
    """One key group of `attention_features`: sites `attention.L` of `[row, head, 1]`.

    Raises:
        KeyError: no group of that name, or activations that are no attention features.
    """
    keys = features.provenance.get("keys", [])
    if key not in keys:
        raise KeyError(
            f"no key group {key!r}; these features have {keys}. Make them with attention_features(keys=...)."
        )
    place = keys.index(key)
    tensors = {site: in_memory(tensor)[..., place : place + 1] for site, tensor in features.tensors.items()}
    return Activations(features.rows, tensors, {**features.provenance, "keys": [key]})


def paired_differences(right: Activations, decoy: Activations) -> Activations:
    """f(right) - f(decoy) of every site, row by row, with the rows of `right`.

    Args:
        right, decoy: the same sites, row i of both about the same pair (two key groups of one call, or two captures).

    Returns:
        The differences. Columns of the row table that differ between the two are kept as those of `right`.

    Raises:
        ValueError: other sites, shapes or numbers of rows; groups or labels that differ, which two rows of one pair
            never do; a difference that is zero at every site (the two are the same).
    """
    if right.n_rows != decoy.n_rows:
        raise ValueError(f"right has {right.n_rows} rows, decoy {decoy.n_rows}. Row i of both is one pair.")
    layouts = [{str(site): tuple(t.shape[1:]) for site, t in acts.tensors.items()} for acts in (right, decoy)]
    if layouts[0] != layouts[1]:
        raise ValueError(f"right is {right!r}, decoy {decoy!r}. Sites and widths must agree.")
    for name in ("label", "group"):
        if name in right.rows and name in decoy.rows and not right.rows[name].equals(decoy.rows[name]):
            row = int((right.rows[name] != decoy.rows[name]).to_numpy().argmax())
            raise ValueError(f"row {row}: the {name} of right and decoy differ. Bring both into the same order.")
    tensors = {site: in_memory(tensor) - in_memory(decoy.tensors[site]) for site, tensor in right.tensors.items()}
    if not any(bool((tensor != 0).any()) for tensor in tensors.values()):
        raise ValueError("right and decoy are equal at every site. Give the two members of each pair.")
    provenance = {"difference": [right.provenance, decoy.provenance]}
    return Activations(right.rows, tensors, provenance)


def heads_together(features: Activations, *, site: str | None = None) -> Activations:
    """All sites side by side as one, `[row, sites x heads x width]`: a probe over every head of every layer at once.

    Columns run by site in order, then head, then feature; `column_names` says which is which.

    Args:
        site: name of the new site; the kind of the sites if None ("attention", "z_together").

    Raises:
        ValueError: no name, and sites of several kinds.
    """
    kinds = list(dict.fromkeys(each.kind for each in features.sites))
    if site is None and len(kinds) > 1:
        raise ValueError(f"sites of kinds {kinds}: say what they are together, such as site='heads'.")
    flat = [in_memory(tensor).flatten(1) for tensor in features.tensors.values()]
    dtype = flat[0].dtype
    for tensor in flat:
        dtype = torch.promote_types(dtype, tensor.dtype)
    joined: Tensor = torch.cat([tensor.to(dtype) for tensor in flat], dim=1)
    name = site or (f"{kinds[0]}_together" if kinds[0] in KINDS else kinds[0])  # ours prescribe other axes
    return Activations(features.rows, {Site(name): joined}, {**features.provenance, "together": len(flat)})


def column_names(features: Activations) -> pd.DataFrame:
    """What the columns of `heads_together(features)` are: `site`, `head` (-1 without heads) and `feature` numbers."""
    parts = []
    for site, tensor in features.tensors.items():
        heads = tensor.shape[1] if tensor.dim() == 3 else 1
        part = pd.MultiIndex.from_product([[str(site)], range(heads), range(tensor.shape[-1])]).to_frame(index=False)
        part.columns = ["site", "head", "feature"]
        parts.append(part.assign(head=part["head"] if tensor.dim() == 3 else -1))
    return pd.concat(parts, ignore_index=True)
