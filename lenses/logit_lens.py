"""The logit lens: every depth of the stream read with the model's own last norm and unembedding.

    lens_l = softmax(n(r_l) W_U + b_U)        (nostalgebraist 2020; statistics of the norm recomputed on r_l)

r_0 enters the first block, r_L leaves the last; at L the lens is the model, so that its curve ends at a KL of 0.
Beware: a model whose early stream lies in another basis looks ignorant here and is not; `tuned_lens` and `ridge_lens`
ask that.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.lens import logit_lens_of
from microtome.lenses.lens_statistics import LensStatistics, lens_statistics


def logit_lens(
    model: LoadedModel | nn.Module,
    texts: Any,
    sites: Sequence[str | tuple | Site] | str | tuple | Site | None = None,
    *,
    norm: str = "own",
    documents: Iterable[Any] | None = None,
    named: Mapping[str, int] | None = None,
    top: int = 5,
    **options: Any,
) -> LensStatistics:
    """What the model's end says at these sites of texts, token by token: every depth if no site is named.

    Args:
        sites: streams (`resid_pre.0`, `resid_mid`) and writes (`attn_out`, `mlp_out.3`, `head_out.3.1`).
        norm: for writes; `lenses/lens.py` says what it means.
        documents, named, top, options: as for `lens_statistics`.

    Raises what `logit_lens_of` and `lens_statistics` raise.
    """
    lens = logit_lens_of(model, sites, norm=norm)
    return lens_statistics(model, texts, lens, documents=documents, named=named, top=top, **options)[lens.name]
