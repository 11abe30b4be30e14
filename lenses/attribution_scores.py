"""What to make of direct parts: how few heads carry them, whether paraphrases agree, and what taking a head out does.

    share of the first k heads = sum of the k largest |part| / sum of all |part|
    agreement of two texts     = Spearman's rank correlation of their heads' parts
    direct effect of a head    = its part less the mean of its part (mean z) at the same scale
    total effect               = logit - logit with z_h replaced everywhere by its mean over a reference's tokens
    indirect effect            = total - direct: later layers that read the head, self-repair, and the changed scale

Give ordinary text as the reference: the mean over a few short prompts holds what the head does on those very prompts,
which understates it.

Beware: total effects of heads do not sum to the logit, and mean ablation is out of distribution for a head whose output
hardly varies. A small total effect of a head with a large part is self-repair (McGrath et al. 2023, arXiv:2307.15771)
or cancellation, not an error of either number.
"""

import warnings
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import rankdata
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.attribution import LogitAttribution, logit_attribution
from microtome.lenses.attribution_rows import Tokens
from microtome.lenses.corpus_pass import corpus_pass

ENOUGH_TOKENS = 256


def share_of_heads(attribution: LogitAttribution, k: int = 10) -> pd.DataFrame:
    """Which part of all heads' direct parts, by size, the k largest carry: row, share, heads (how many there are).

    Raises ValueError for parts by layer, or k below 1.
    """
    if k < 1:
        raise ValueError(f"k={k}: give at least one head.")
    rows = []
    for row, parts in attribution.heads().groupby("row"):
        sizes = np.sort(parts["value"].abs().to_numpy())[::-1]
        rows.append({"row": row, "share": sizes[:k].sum() / max(sizes.sum(), 1e-300), "heads": len(sizes)})
    return pd.DataFrame(rows)


def paraphrase_agreement(attribution: LogitAttribution) -> pd.DataFrame:
    """Rank correlation of heads' parts between every two logits: row, other, correlation (NaN for constant parts).

    Meant for texts that ask the same in other words, with one target.
    Raises ValueError for parts by layer, or fewer than two logits.
    """
    wide = attribution.heads().pivot(index="row", columns=["layer", "head"], values="value")
    if len(wide) < 2:
        raise ValueError("Agreement needs two logits or more. Pass several texts to logit_attribution.")
    ranks = np.stack([rankdata(values) for values in wide.to_numpy()])
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = np.corrcoef(ranks)
    first, second = np.triu_indices(len(wide), 1)
    return pd.DataFrame(
        {"row": wide.index[first], "other": wide.index[second], "correlation": correlation[first, second]}
    )


def ablation_effects(
    model: LoadedModel | nn.Module,
    texts: Any,
    *,
    target: Tokens,
    against: Tokens = None,
    heads: Sequence[Any] | None = None,
    largest: int = 10,
    reference: Any = None,
    progress: bool = False,
    **encoding: Any,
) -> pd.DataFrame:
    """Direct and total effect of heads on the logit behind each text's last token, by mean ablation.

    Mean ablation: z of the head is replaced by its mean over the reference, at every position.

    Args:
        texts, target, against: as of `logit_attribution`; a target is needed, as the model's first token may change.
        heads: (layer, head) pairs or names of sites ("z.3.1"); None takes the `largest` ones by mean size of their
            part over the texts.
        reference: texts over whose tokens (the first of each left out) z is averaged: some hundred tokens of ordinary
            text. None takes the texts themselves, which understates heads where these are few and short.
        progress: show a bar over heads.

    Returns:
        One row per text and head: text, layer, head, part, direct, total, indirect; in logits, before a cap.

    Warns:
        UserWarning: no reference, and texts of fewer than ENOUGH_TOKENS tokens behind their first.

    Raises:
        ValueError: no target, a name that is no head's z, fewer than two tokens to average over (the mean would be the
            token itself), or what `logit_attribution` raises.
        TypeError: heads that are no pairs.
        KeyError, IndexError: a head that the model does not offer.
    """
    if target is None:
        raise ValueError("target=None: name the token, since an ablated model may prefer another one.")
    module = model.module if isinstance(model, LoadedModel) else model
    anatomy = dissect(module)
    settings = {"target": target, "against": against, "anatomy": anatomy, **encoding}
    if heads is not None:
        heads = [_head(head) for head in heads]
        for layer, head in heads:
            anatomy.tap(Site("z", layer, head))
    before = logit_attribution(model, texts, by="head", **settings)
    parts = before.heads().merge(before.logits.reset_index(names="row")[["row", "text"]], on="row")
    if heads is None:
        size = parts["value"].abs().groupby([parts["layer"], parts["head"]]).mean()
        heads = [(int(layer), int(head)) for layer, head in size.nlargest(largest).index]
    means, count = _mean_z(model, texts if reference is None else reference, sorted({n for n, _ in heads}), encoding)
    if count < 2:
        raise ValueError(
            f"{'texts hold' if reference is None else 'reference holds'} {count} token{'s' * (count != 1)} behind the "
            "first of each text, so there is no mean to replace a head by. Give reference= some ordinary texts."
        )
    if reference is None and count < ENOUGH_TOKENS:
        warnings.warn(
            f"Mean ablation: z is replaced by its mean over the prompts' own {count} tokens, which understates what a "
            f"head does there. Give reference= ordinary texts ({ENOUGH_TOKENS} tokens or more).",
            UserWarning,
            stacklevel=2,
        )
    rows = []
    for layer, head in tqdm(heads, unit="head", desc="ablation", disable=not progress):
        mean = means[layer][head]
        edit = {Site("z", layer, head): lambda z, mean=mean: mean.to(z) - z}
        after = _edited(model, texts, edit, settings)
        mine = parts[(parts["layer"] == layer) & (parts["head"] == head)].set_index("text")["value"]
        constant = after[0][(after[0]["layer"] == layer) & (after[0]["head"] == head)].set_index("row")["value"]
        scale = after[1]["scale"].to_numpy() / before.logits["scale"].to_numpy()
        for row, logit in enumerate(before.logits.itertuples()):
            part = float(mine[logit.text])
            # the mean's part behind the unablated stream: same weights but the final scale
            direct = part - float(constant[row]) * float(scale[row])
            total = float(logit.logit) - float(after[1]["logit"][row])
            rows.append(
                {
                    "text": logit.text,
                    "layer": layer,
                    "head": head,
                    "part": part,
                    "direct": direct,
                    "total": total,
                    "indirect": total - direct,
                }
            )
    return pd.DataFrame(rows)


def _edited(model: Any, texts: Any, edits: dict, settings: dict) -> tuple[pd.DataFrame, pd.DataFrame]:
    found = logit_attribution(model, texts, by="head", edits=edits, **settings)
    return found.heads(), found.logits


def _head(given: Any) -> tuple[int, int]:
    """Layer and head of a pair or of the name of a head's z."""
    if isinstance(given, str | Site):
        site = Site.parse(given)
        if site.layer is None or site.head is None or site != Site("z", site.layer, site.head):
            raise ValueError(f"heads holds {str(given)!r}: give (layer, head), or a head's z such as 'z.3.1'.")
        return site.layer, site.head
    try:
        layer, head = (index(number) for number in given)
    except (TypeError, ValueError):
        raise TypeError(f"heads holds {given!r}: give (layer, head), or a head's z such as 'z.3.1'.") from None
    return layer, head


def _mean_z(model: Any, texts: Any, layers: Sequence[int], encoding: dict) -> tuple[dict[int, Tensor], int]:
    """Mean of z over tokens behind the first of each text, by layer, float64, and how many there are."""
    run = corpus_pass(model, texts, [Site("z", layer) for layer in layers], **encoding)
    sums: dict[int, Tensor] = {}
    count = 0
    for chunk in run.chunks():
        kept = chunk.position > 0
        count += int(kept.sum())
        for site, value in chunk.values.items():
            total = value[kept.to(value.device)].double().cpu().sum(0)
            sums[site.layer] = sums.get(site.layer, torch.zeros_like(total)) + total
    return {layer: total / max(count, 1) for layer, total in sums.items()}, count
