"""What an attention lens is trained and judged on: the mixed values of one layer's heads beside the final state.

    v_h[t] = sum over s of A_h[t, s] v[s]   (site z.L.h, width d_head),      n(r_L)[t]   (the final norm's output)

One row per chosen token. Rows come from `corpus_pass`, which hands on real tokens alone: padding is never among them,
on whichever side the model wants it. Positions "last" is the last real token of each text (Sakarvadia et al. 2023,
arXiv:2310.16270; their code takes the last column of a right-padded batch, which is padding in all but the longest
text); "all" is every token but position 0 and the tokenizer's special tokens, whose values are those of attention
sinks; "every" leaves out none, for reading rather than for fitting. Rows are split by document.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.anatomy import Anatomy
from microtome.capture.dissect import dissect
from microtome.capture.encoded_text import EncodedText
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Edit, EditFunction, SiteName
from microtome.data.free_memory import free_memory
from microtome.lenses.corpus_pass import Chunk, corpus_pass
from microtome.lenses.documents import document_numbers
from microtome.lenses.short_repr import short_repr
from microtome.lenses.unembedding import Unembedding, unembedding_of

# "last", "all" or "every"; told by a message of ours, so not a Literal
Positions = str
SHARDS = ("fit", "validation", "test")


@dataclass(frozen=True, eq=False)
class LensRows:
    """Rows of one layer, sorted by text and position, float32 (float64 from a float64 model), on the CPU.

    Attributes:
        layer: of the heads.
        mixed: v_h, the site z.
        normed: what the final norm returns: the teacher's state.
        stream: the stream before the layer's attention behind the final norm, for the residual mode; else None.
        text, position, token_ids: where each row is, and the token there.
        targets: the token that follows, -1 at the end of a text.
        document: of the row's text.
        weight_sha256: of the model whose rows they are, "" where unknown.
    """

    layer: int
    mixed: Float[Tensor, "token head d_head"]
    normed: Float[Tensor, "token d_model"]
    stream: Float[Tensor, "token d_model"] | None
    text: Int64[Tensor, " token"]
    position: Int64[Tensor, " token"]
    token_ids: Int64[Tensor, " token"]
    targets: Int64[Tensor, " token"]
    document: Int64[Tensor, " token"]
    weight_sha256: str = ""

    __repr__ = short_repr

    def __len__(self) -> int:
        return len(self.mixed)

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.mixed.shape[1]

    def take(self, rows: Tensor) -> "LensRows":
        """Some rows, by number or mask."""
        cut = {f.name: v[rows] for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **cut)

    def split(self, *, validation: float = 0.15, test: float = 0.15, seed: int = 0) -> dict[str, "LensRows"]:
        """ "fit", "validation" and "test" by document: no document is in two of them.

        Raises:
            ValueError: shares that leave nothing, or fewer than three documents.
        """
        if not (0 < validation < 1 and 0 < test < 1 and validation + test < 1):
            raise ValueError(f"validation={validation}, test={test}: give shares above 0 that leave some for the fit.")
        names = self.document.unique()
        if len(names) < 3:
            raise ValueError(f"{len(names)} documents cannot be in three shards. Give more texts, or other documents.")
        order = names[torch.from_numpy(np.random.default_rng(seed).permutation(len(names)))]
        n_validation, n_test = (max(1, round(share * len(names))) for share in (validation, test))
        n_fit = len(names) - n_validation - n_test
        if n_fit < 1:
            raise ValueError(f"{len(names)} documents leave none for the fit beside {n_validation} and {n_test}.")
        parts = order.split([n_fit, n_validation, n_test])
        return {name: self.take(torch.isin(self.document, part)) for name, part in zip(SHARDS, parts, strict=True)}


def lens_rows(
    model: LoadedModel | nn.Module,
    texts: Any,
    layer: int,
    *,
    positions: Positions = "all",
    documents: Iterable[Any] | None = None,
    with_stream: bool = False,
    max_rows: int | None = None,
    seed: int = 0,
    max_tokens: int = 2048,
    edits: Mapping[SiteName, EditFunction | Edit] | None = None,
    anatomy: Anatomy | None = None,
    progress: bool = False,
) -> LensRows:
    """Run the texts once and keep the rows of one layer.

    Args:
        model: from `load_model`, or a transformers module in eval mode.
        texts: as `capture` takes them.
        layer: whose heads.
        positions: "last" real token of each text, "all" but sinks, or "every" one (module docstring).
        documents: name or number of the document of each text; each its own if None.
        with_stream: keep the stream before attention too, for the residual mode.
        max_rows: at most so many, drawn at random; None keeps all.
        max_tokens: padded tokens per batch.
        edits: acting in every forward, as for `taps`.
        progress: print the bytes that the rows will take, and show a bar.

    Raises:
        KeyError: a layer without z or head_out; the reason is said.
        ValueError: max_rows below 1, documents of another number than texts, or no token to keep.
        MemoryError: the rows do not fit into free memory.
    """
    if positions not in ("last", "all", "every"):
        raise ValueError(f"positions={positions!r}. Give 'last', 'all' or 'every'.")
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows={max_rows}. Give 1 or more, or None for all.")
    module = model.module if isinstance(model, LoadedModel) else model
    anatomy = dissect(module) if anatomy is None else anatomy
    end = unembedding_of(module, anatomy)
    z, last = anatomy.expand([("z", layer)])[0], anatomy.expand([("resid_post", anatomy.layers - 1)])[0]
    anatomy.tap(anatomy.expand([("head_out", layer)])[0])
    before = anatomy.expand([("resid_pre", layer)])[0]
    sites = [z, last, *([before] if with_stream else [])]
    run = corpus_pass(model, texts, sites, anatomy=anatomy, edits=edits, max_tokens=max_tokens)
    numbers = torch.from_numpy(document_numbers(documents, len(run.texts)))
    chosen = _chosen(run.texts, positions)
    if not len(chosen):
        raise ValueError(f"positions={positions!r} leave no token: every text has its first token alone.")
    if max_rows is not None and len(chosen) > max_rows:
        picked = np.random.default_rng(seed).permutation(len(chosen))[:max_rows]
        chosen = chosen[np.sort(picked)]
    tap = anatomy.tap(z)
    size = 4 * len(chosen) * (tap.head_count * tap.width + anatomy.d_model * (2 if with_stream else 1))
    require_memory(size, f"{len(chosen)} rows of layer {layer}", progress=progress)
    wanted = set(map(tuple, chosen.tolist()))
    kept: list[tuple[Tensor, ...]] = []
    bar = tqdm(total=run.tokens, unit="token", desc=f"layer {layer}", disable=not progress)
    for chunk in run.chunks():
        places = zip(chunk.text.tolist(), chunk.position.tolist(), strict=True)
        rows = torch.tensor([i for i, place in enumerate(places) if place in wanted], dtype=torch.long)
        if len(rows):
            kept.append(_cut(chunk, rows, z, last, before if with_stream else None, end))
        bar.update(len(chunk))
    bar.close()
    mixed, normed, stream, text, position, ids, targets = (
        None if parts[0] is None else torch.cat(parts) for parts in zip(*kept, strict=True)
    )
    order = torch.from_numpy(np.lexsort((position.numpy(), text.numpy())))
    return LensRows(
        layer,
        mixed[order],
        normed[order],
        None if stream is None else stream[order],
        text[order],
        position[order],
        ids[order],
        targets[order],
        numbers[text[order]],
        run.provenance["model"]["weight_sha256"],
    )


def last_real_positions(attention_mask: Tensor) -> Int64[Tensor, " batch"]:
    """Column of each row's last real token, wherever the padding is.

    Raises:
        ValueError: a row without a real token.
    """
    mask = attention_mask.bool()
    if not bool(mask.any(1).all()):
        raise ValueError(f"row {int((~mask.any(1)).nonzero()[0, 0])} of the mask is padding alone.")
    return mask.shape[1] - 1 - mask.flip(1).long().argmax(1)


def _chosen(texts: Sequence[EncodedText], positions: Positions) -> np.ndarray:
    """(text, position) of the rows to keep, known before anything runs."""
    rows: list[tuple[int, int]] = []
    for number, text in enumerate(texts):
        if positions == "last":
            rows.append((number, text.length - 1))
        else:
            kept = ~text.is_special.bool()
            kept[0] = False
            if positions == "every":
                kept[:] = True
            rows += [(number, place) for place in kept.nonzero()[:, 0].tolist()]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _cut(
    chunk: Chunk, rows: Tensor, z: Site, last: Site, before: Site | None, end: Unembedding
) -> tuple[Tensor | None, ...]:
    mixed = chunk.values[z][rows]
    wide = torch.promote_types(mixed.dtype, torch.float32)
    with torch.no_grad():
        normed = end.normed(chunk.values[last][rows])
        stream = None if before is None else end.normed(chunk.values[before][rows]).to(wide).cpu()
    return (
        mixed.to(wide).cpu(),
        normed.to(wide).cpu(),
        stream,
        chunk.text[rows],
        chunk.position[rows],
        chunk.token_ids[rows],
        chunk.targets[rows],
    )


def require_memory(size: int, what: str, *, progress: bool = False, advice: str = "Give max_rows.") -> None:
    """Say how many bytes are about to be taken (progress), and refuse more than nine tenths of what is free.

    Raises:
        MemoryError: they do not fit.
    """
    left = free_memory()
    if progress:
        tqdm.write(f"{what}: {size / 1e6:,.0f} MB" + (f" of {left / 1e9:.1f} GB free" if left else ""))
    if left is not None and size > 0.9 * left:
        raise MemoryError(f"{what} take {size / 1e9:.1f} GB, {left / 1e9:.1f} GB are free. {advice}")
