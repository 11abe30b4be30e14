"""One pass of texts through a model, batch by batch: the values of sites at real tokens, and nothing kept.

What lenses, moments and head statistics stand on. Each batch gives flat rows, one per real token, with the text, the
position, the token and the token that follows; padding never appears. The plan of batches depends on the texts alone,
so that a pass that was stopped after batch k goes on with `start=k + 1`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS, Batch, PaddingRecipe, make_batch, plan_batches
from microtome.capture.dissect import dissect
from microtome.capture.encoded_text import EncodedText
from microtome.capture.forward_arguments import input_device
from microtome.capture.forward_call import batch_rows
from microtome.capture.limits import pad_id
from microtome.capture.models import LoadedModel
from microtome.capture.padding import call_options
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Edit, EditFunction, Read, SiteName
from microtome.capture.taps import taps
from microtome.capture.text_source import TextSource, text_source

NO_TARGET = -1


@dataclass(frozen=True, eq=False)
class Chunk:
    """The real tokens of one batch, text after text, positions ascending within a text.

    Attributes:
        number: of the batch in the pass.
        text: number of each token's text.
        position: of each token in its text, special tokens counted.
        token_ids: the tokens.
        targets: the token that follows in the text, -1 at its end.
        is_special: BOS and the like.
        values: by site, `[token, ...]` as the model computes them, on its device; of several models at once, by
            (model's name, site).
        is_real, input_ids: of the batch, False at padding: `is_real.nonzero()` are the rows above, in their order.
        patterns: by head, of the batch with its padding; what they say at padding means nothing.
    """

    number: int
    text: Int64[Tensor, " token"]
    position: Int64[Tensor, " token"]
    token_ids: Int64[Tensor, " token"]
    targets: Int64[Tensor, " token"]
    is_special: Bool[Tensor, " token"]
    values: Mapping[Site | tuple[str, Site], Tensor]
    is_real: Bool[Tensor, "batch column"]
    input_ids: Int64[Tensor, "batch column"]
    patterns: Mapping[Site, Float[Tensor, "batch query key"]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.text)

    @property
    def has_target(self) -> Bool[Tensor, " token"]:
        """Where a token follows."""
        return self.targets != NO_TARGET


@dataclass(frozen=True, eq=False)
class CorpusPass:
    """Texts, a model and the sites to read; made by `corpus_pass`. `chunks()` runs it.

    Attributes:
        batches: which texts run together, in the order of the pass.
        patterns: single heads whose attention is read at all queries.
        prompt_tokens: of each text, for edits that act at "prompt" or "generated"; empty where texts are prompts.
    """

    module: nn.Module
    anatomy: Anatomy
    sites: tuple[Site, ...]
    texts: Sequence[EncodedText]
    batches: tuple[tuple[int, ...], ...]
    pad: int
    edits: Mapping[SiteName, EditFunction | Edit]
    provenance: Mapping[str, Any]
    patterns: tuple[Site, ...] = ()
    prompt_tokens: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Real tokens of all texts."""
        return sum(text.length for text in self.texts)

    def tokens_of(self, number: int) -> int:
        """Real tokens of one batch."""
        return sum(self.texts[row].length for row in self.batches[number])

    def chunks(self, start: int = 0, *, keep_graph: bool = False) -> Iterator[Chunk]:
        """The batches from number `start` on. keep_graph: values stay in the autograd graph."""
        recipe = self.anatomy.padding or PaddingRecipe()
        options, home = call_options(self.module), input_device(self.module)
        for number in range(start, len(self.batches)):
            batch = make_batch(self.texts, self.batches[number], pad_id=self.pad, recipe=recipe, device=home)
            yield self._chunk(number, batch, options, keep_graph)

    def _chunk(self, number: int, batch: Batch, options: dict[str, Any], keep_graph: bool) -> Chunk:
        mask = batch.attention_mask.bool()
        row, place = mask.nonzero(as_tuple=True)

        def real(value: Tensor) -> Tensor:
            return value[row.to(value.device), place.to(value.device)]

        reads = [Read(site, select=real, keep_graph=keep_graph) for site in self.sites]
        reads += [Read(site, queries="all") for site in self.patterns]
        values: dict[Site, Tensor] = {}
        patterns: dict[Site, Tensor] = {}
        if reads:
            stop = all(site.kind != "logits" for site in self.sites)
            prompts = [self.prompt_tokens[i] for i in batch.row_ids] if self.prompt_tokens else None
            with (
                torch.set_grad_enabled(keep_graph),
                batch_rows(batch.row_ids, prompts),
                taps(self.module, reads, self.edits, anatomy=self.anatomy, stop=stop) as tape,
            ):
                self.module(**batch.model_inputs(), **options)
            values = {site: tape[site] for site in self.sites}
            patterns = {site: tape[site] for site in self.patterns}
        text = torch.tensor(batch.row_ids, device=row.device)[row]
        ids = batch.input_ids[row, place]
        is_last = torch.cat([text[1:] != text[:-1], text.new_ones(1, dtype=torch.bool)])
        specials = torch.cat([self.texts[i].is_special for i in batch.row_ids]).to(row.device)
        return Chunk(
            number,
            text,
            (mask.cumsum(1) - 1)[row, place],
            ids,
            torch.where(is_last, NO_TARGET, ids.roll(-1)),
            specials,
            values,
            mask,
            batch.input_ids,
            patterns,
        )


def corpus_pass(
    model: LoadedModel | nn.Module,
    texts: Any,
    sites: Sequence[SiteName] | SiteName = (),
    *,
    patterns: Sequence[SiteName] = (),
    anatomy: Anatomy | None = None,
    edits: Mapping[SiteName, EditFunction | Edit] | None = None,
    max_tokens: int = MAX_TOKENS,
    shuffle: int | None = None,
    truncate: Literal["left", "right"] | None = None,
    max_length: int | None = None,
    add_special_tokens: bool = True,
) -> CorpusPass:
    """Plan a pass; nothing runs yet.

    Args:
        model: from `load_model`, or a transformers module in eval mode.
        texts: strings, message lists or token ids, as `capture` takes them.
        sites: to read; `pattern` and `state` have no single row per token and are refused.
        patterns: single heads, as "pattern.5.2", to read at all queries; 4 bytes x queries x keys of a batch each.
        edits: acting in every batch.
        max_tokens: padded tokens per batch.
        shuffle: seed for the order of batches (for training); None runs the longest texts first.
        truncate, max_length, add_special_tokens: as for `capture`.

    Raises:
        ValueError: inputs that are no texts, a module in training mode, an encoder-decoder, a site without tokens,
            a pattern that is not of one head.
        KeyError, IndexError: a site that this model does not offer.
    """
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.from_module(model, name=type(model).__name__)
    module = loaded.module
    if module.training:
        raise ValueError(f"{type(module).__name__} is in training mode. Call model.eval() first.")
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"{type(module).__name__} is an encoder-decoder, which texts alone do not run.")
    source = text_source(texts, loaded, truncate=truncate, max_length=max_length, add_special_tokens=add_special_tokens)
    if not isinstance(source, TextSource):
        raise ValueError("A corpus pass needs texts, whose tokens have positions; these are ready inputs.")
    anatomy = dissect(module) if anatomy is None else anatomy
    wanted = anatomy.expand(sites) if sites else []
    if wrong := [str(site) for site in wanted if site.kind in ("pattern", "state")]:
        raise ValueError(f"{wrong[0]} has no row per token. Read it with taps(model, {wrong[0]!r}).")
    seen = anatomy.expand(patterns) if patterns else []
    if wrong := [str(site) for site in seen if site.kind != "pattern" or site.head is None]:
        raise ValueError(f"{wrong[0]} is no single head's pattern. Give patterns=['pattern.5.2'], one head each.")
    encoded = source.encode(0, len(source))
    max_rows = {} if anatomy.padding is not None else {"max_rows": 1}
    batches = plan_batches(encoded.lengths, max_tokens=max_tokens, **max_rows)
    if shuffle is not None:
        batches = [batches[i] for i in np.random.default_rng(shuffle).permutation(len(batches))]
    return CorpusPass(
        module,
        anatomy,
        tuple(wanted),
        encoded.rows,
        tuple(tuple(batch) for batch in batches),
        pad_id(module, loaded.tokenizer),
        edits or {},
        {"model": loaded.provenance.to_dict(), "texts": encoded.provenance},
        tuple(seen),
    )
