"""Attention weights of chosen rows as features: does head (l, h) look from the query tokens to the key tokens?

    f[text, l, h, key] = pool over (i in key tokens, j in query tokens) of A[l, h, j, i]     direction "from_query"
                                                                   or of A[l, h, i, j]     direction "to_query"

"It's All in the Heads" (Tikhonov and Ryabinin 2021, arXiv:2106.12066) classifies Winograd schemas by these, the pronoun
being the query and the candidate the key; its code has both directions. Rows of the pattern are pooled inside the
forward: `[layer, head, position, position]` is never stored. Beware: a causal model gives weight only to earlier
tokens; the weights of a row sum to one, so that they fall with the length of the text (columns `n_tokens` and
`distance_KEY` of the row table let that be tested); they are about 1e-2, so that a penalty on raw weights is strong:
standardise, or take `transform`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.activations import Activations
from microtome.capture.attention_pairs import Pool, TokenPairs, pairs_in_batch, pairs_of, tokens_of
from microtome.capture.batches import MAX_TOKENS, PaddingRecipe, make_batch
from microtome.capture.dissect import dissect
from microtome.capture.encoded_text import EncodedText
from microtome.capture.forwards import Forwards
from microtome.capture.job import CaptureJob
from microtome.capture.kept_positions import KeptPositions
from microtome.capture.label_table import label_table
from microtome.capture.limits import pad_id
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps
from microtome.capture.text_source import TextSource, text_source

Direction = Literal["from_query", "to_query"]
Transform = Literal["none", "logit", "arcsine"]
LEAST_WEIGHT = 1e-6  # a softmax in float32 rounds to zero far below; the logit needs a bound


@torch.inference_mode(False)
def attention_features(
    model: LoadedModel | nn.Module,
    texts: Any,
    *,
    keys: Mapping[str, Any],
    queries: Any = "last",
    pool: str = "mean",
    direction: str = "from_query",
    layers: Sequence[int] | int | None = None,
    transform: str = "none",
    labels: Mapping[str, Sequence] | pd.DataFrame | None = None,
    truncate: Literal["left", "right"] | None = None,
    max_length: int | None = None,
    add_special_tokens: bool = True,
    max_tokens: int = MAX_TOKENS,
    progress: bool = True,
) -> Activations:
    """Attention weights between named groups of tokens, one row per text.

    Args:
        model: from `load_model`, or a transformers module in eval mode.
        texts: strings, message lists or token ids.
        keys: groups of tokens by name, each as `positions` of `capture`: "first", "last", "all", an index, a
            (start, end) of characters, a `Span`, or a list with one of these per text. Also "self", the query token,
            and "previous", the token before it. `{"subject": spans, "previous": "previous", "first": "first"}`.
        queries: the query tokens of each text, in the same form.
        pool: mean or largest weight over all pairs of a key token and a query token. "previous" has no pair at the
            first token; other query tokens of the text decide.
        direction: "from_query" reads rows of the query tokens; "to_query" rows of the key tokens, at the query tokens
            (a row is computed for each key token, so keep the groups small).
        layers: numbers of layers; all that offer their pattern if None.
        transform: of each pooled weight: "logit" log(p / (1 - p)), p kept within 1e-6 of 0 and 1; "arcsine"
            2 arcsin(sqrt(p)), which is defined at 0.
        labels: columns for the row table with one entry per text.
        truncate, max_length, add_special_tokens, max_tokens, progress: as for `capture`.

    Returns:
        `Activations` with a site `attention.L` of `[row, head, key]` per layer, keys in the order of `keys`, float32.
        The row table has `n_tokens` and, by key, `distance_KEY`: mean of query position minus key position.
        `microtome.probes.heads_together` makes them one site of layers x heads x keys features.

    Raises:
        KeyError, IndexError: a model or layer that does not offer its pattern.
        ValueError: no keys, an unknown option, positions as `capture` raises, a text without any pair, a key group
            whose weights are zero in every text, head and layer (a causal model asked to look ahead); a module in
            training mode, an encoder-decoder, or inputs that are no texts.
    """
    for name, value, options in (
        ("pool", pool, Pool),
        ("direction", direction, Direction),
        ("transform", transform, Transform),
    ):
        if value not in get_args(options):
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(get_args(options))}.")
    if not isinstance(keys, Mapping):
        raise TypeError(f"keys is {keys!r}; name each group of tokens, such as keys={{'first': 'first'}}.")
    if not keys:
        raise ValueError("keys is empty. Name at least one group, such as keys={'first': 'first'}.")
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.from_module(model, name=type(model).__name__)
    source = text_source(texts, loaded, truncate=truncate, max_length=max_length, add_special_tokens=add_special_tokens)
    if not isinstance(source, TextSource):
        raise ValueError("attention_features needs texts, whose tokens have positions; these are ready inputs.")
    _require_one_sequence(loaded.module)
    labels = None if labels is None else label_table(labels, len(source))
    added = ["n_tokens", *(f"distance_{name}" for name in keys)]
    if labels is not None and (taken := [name for name in added if name in labels]):
        raise ValueError(f"labels has a column {taken[0]!r}, which is added here. Give it another name.")
    anatomy = dissect(loaded.module)
    names: list = (
        ["pattern"] if layers is None else [("pattern", n) for n in ([layers] if isinstance(layers, int) else layers)]
    )
    sites = tuple(anatomy.expand(names))
    encoded = source.encode(0, len(source))
    query_tokens = tokens_of("queries", queries, encoded.rows)
    pairs = [pairs_of(name, wanted, query_tokens, encoded.rows) for name, wanted in keys.items()]
    if direction == "from_query":
        pairs = [group.swapped for group in pairs]
    forwards = Forwards(
        loaded.module,
        anatomy,
        sites,
        {},
        torch.device("cpu"),
        None,
        pad_id(loaded.module, loaded.tokenizer),
        max_tokens,
    )
    weights = _run(forwards, encoded.rows, pairs, pool, progress)
    _require_attention(weights, list(keys), direction)
    kept = _one_row_each(query_tokens, encoded.rows)
    table = CaptureJob(loaded, forwards, source, queries, False, labels, {}).row_table(encoded, kept, 0)
    sign = 1 if direction == "from_query" else -1
    distances = [sign * group.mean_distance(len(table)) for group in pairs]
    table = table.drop(columns="span", errors="ignore")
    table = table.assign(**dict(zip(added, [np.array(encoded.lengths), *distances], strict=True)))
    return Activations(
        table,
        {Site("attention", *_numbers(site)): _transformed(value, transform) for site, value in weights.items()},
        {
            "model": loaded.provenance.to_dict(),
            "texts": encoded.provenance,
            "features": "attention weights",
            "keys": list(keys),
            "pool": pool,
            "direction": direction,
            "transform": transform,
        },
    )


def _require_one_sequence(module: nn.Module) -> None:
    if module.training:
        raise ValueError(f"{type(module).__name__} is in training mode. Call model.eval() first.")
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"{type(module).__name__} is an encoder-decoder, which texts alone do not run.")


def _run(
    forwards: Forwards, texts: Sequence[EncodedText], pairs: list[TokenPairs], pool: str, progress: bool
) -> dict[Site, Float[Tensor, "text head key"]]:
    """Pooled weights of every site; pairs are `row` attends to `key`."""
    recipe = forwards.anatomy.padding or PaddingRecipe()
    lengths = [text.length for text in texts]
    weights: dict[Site, Tensor] = {}
    with tqdm(total=sum(lengths), unit="tok", desc="attention", disable=not progress) as bar:
        for row_ids in forwards.batch_plan(lengths):
            batch = make_batch(texts, row_ids, pad_id=forwards.pad, recipe=recipe, device=forwards.home)
            places = pairs_in_batch(pairs, row_ids, batch.attention_mask)
            reads = [
                Read(site, select=lambda rows, p=places: p.pooled(rows, pool), queries=places.queries)
                for site in forwards.sites
            ]
            with torch.no_grad(), taps(forwards.module, reads, anatomy=forwards.anatomy, stop=True) as tape:
                forwards.module(**batch.model_inputs(), **forwards.options)
            for site in forwards.sites:
                value = tape[site].to(torch.float32).cpu()
                if site not in weights:
                    weights[site] = torch.empty(len(texts), *value.shape[1:])
                weights[site][list(row_ids)] = value
            bar.update(sum(lengths[row] for row in row_ids))
    for site, value in weights.items():
        if not bool(torch.isfinite(value).all()):
            text = int((~torch.isfinite(value)).flatten(1).any(1).nonzero()[0])
            raise ValueError(f"{site}: text {text} has NaN weights. Load the model in float32, or look at that text.")
    return weights


def _require_attention(weights: dict[Site, Tensor], keys: list[str], direction: str) -> None:
    """Raise ValueError for a group that nothing attends to: the wrong direction in a causal model."""
    for number, name in enumerate(keys):
        if not any(bool((value[..., number] != 0).any()) for value in weights.values()):
            other = "to_query" if direction == "from_query" else "from_query"
            raise ValueError(
                f"keys[{name!r}]: every weight is zero, in every text, layer and head. A causal model gives none to "
                f"later tokens: ask for direction={other!r}, or for queries after the keys."
            )


def _one_row_each(tokens: list[np.ndarray], texts: Sequence[EncodedText]) -> KeptPositions:
    """The query tokens of each text as one kept row: that token, or position -1."""
    sizes = np.array([len(found) for found in tokens])
    return KeptPositions(
        text=np.arange(len(texts)),
        position=np.array([int(found[0]) if len(found) == 1 else -1 for found in tokens]),
        size=sizes,
        span=np.where(sizes > 1, 0, -1) if all(text.offsets is not None for text in texts) else np.full(len(texts), -1),
        tokens=np.concatenate(tokens),
        lengths=np.array([text.length for text in texts]),
    )


def _numbers(site: Site) -> tuple[int | None, None, str, int | None]:
    return site.layer, None, site.stack, site.call


def _transformed(weights: Float[Tensor, "text head key"], transform: str) -> Float[Tensor, "text head key"]:
    if transform == "logit":
        return torch.logit(weights.double(), eps=LEAST_WEIGHT).float()
    if transform == "arcsine":
        return 2 * torch.asin(weights.clamp(0, 1).sqrt())
    return weights
