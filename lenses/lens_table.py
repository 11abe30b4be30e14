"""One text under lenses, cell by cell: at every depth and token the first words, how sure, and how far from the model.

A row per lens, depth and position: the first word and its probability, the next ones, KL to the model and entropy in
nats, the rank of the model's own first word (0: the lens says it too) and of the true next token. `figures.lens_table`
draws it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from torch import nn

from microtome.capture.models import LoadedModel
from microtome.figures.lens_table import lens_table as lens_table_figure
from microtome.lenses.attribution_rows import token_numbers
from microtome.lenses.lens import Lens, logit_lens_of
from microtome.lenses.lens_statistics import LensStatistics, lens_statistics
from microtome.lenses.short_repr import short_repr
from microtome.lenses.token_words import token_words
from microtome.lenses.unembedding import unembedding_of


@dataclass(frozen=True, eq=False)
class LensTable:
    """What lenses say of one text.

    Attributes:
        table: columns lens, site, depth, position, token (the text's own, as a word), word, prob, words and probs (top
            ones, lists), kl, entropy, rank (of the model's first word), final_word, next_word ("" at the end),
            next_prob, next_rank.
        statistics: by the lens's name, for what else is asked.
    """

    table: pd.DataFrame
    statistics: dict[str, LensStatistics]

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """The table."""
        return self.table

    def at(self, position: int = -1, lens: str | None = None) -> pd.DataFrame:
        """One token's rows, depth after depth, of one lens or the first; -1 is the last token. IndexError."""
        name = lens if lens is not None else self.table["lens"].iloc[0]
        rows = self.table[self.table["lens"] == name]
        last = int(rows["position"].max())
        wanted = last + 1 + position if position < 0 else position
        if not 0 <= wanted <= last:
            raise IndexError(f"position {position} is out of range: the text has {last + 1} tokens.")
        return rows[rows["position"] == wanted].reset_index(drop=True)

    def plot(self, lens: str | None = None, **options: Any) -> go.Figure:
        """The layer by token figure of one lens, or of the first; options as `figures.lens_table` takes them."""
        name = lens if lens is not None else self.table["lens"].iloc[0]
        if name not in self.statistics:
            raise KeyError(f"there is no lens {name!r}; there are {list(self.statistics)}.")
        return lens_table_figure(self.table[self.table["lens"] == name], **options)


def lens_table(
    model: LoadedModel | nn.Module,
    text: Any,
    lenses: Sequence[Lens] | Lens | None = None,
    *,
    answers: Sequence[str | int] | str = (),
    top: int = 5,
    **options: Any,
) -> LensTable:
    """The table of one text, a string or token ids; the logit lens at every depth if no lens is given.

    Args:
        answers: words of one token (" Paris") or token ids to follow, whatever the model says: the table has columns
            "prob of  Paris" and "rank of  Paris" (0 is first).
        options: of `lens_statistics` (max_length, truncate and others).

    Raises:
        ValueError: several texts, an answer that is no single token, a lens that is none, and what `lens_statistics`
            raises.
    """
    is_ids = isinstance(text, Sequence) and not isinstance(text, str) and all(isinstance(n, int) for n in text)
    if not isinstance(text, str) and not is_ids:
        raise ValueError("a lens table is of one text: a string, or its token ids. Many texts go to lens_statistics.")
    lenses = logit_lens_of(model) if lenses is None else lenses
    given = [lenses] if isinstance(lenses, Lens) else list(lenses)
    if strange := [each for each in given if not isinstance(each, Lens)]:
        raise ValueError(
            f"{strange[0]!r} is no lens. Give logit_lens_of(model), translated_lens(model, maps) or tuned.lens(model)."
        )
    named = _answers(model, answers)
    found = lens_statistics(model, [text], given, top=top, final_rank=True, named=named, **options)
    parts = [_rows(model, statistics, tuple(named)) for statistics in found.values()]
    return LensTable(pd.concat(parts, ignore_index=True), found)


def _answers(model: LoadedModel | nn.Module, answers: Sequence[str | int] | str) -> dict[str, int]:
    """Token ids by word."""
    asked = [answers] if isinstance(answers, str) else list(answers)
    tokenizer = model.tokenizer if isinstance(model, LoadedModel) else None
    ids = token_numbers(asked, tokenizer, unembedding_of(model).vocab, len(asked), "answers") or []
    names = [word if isinstance(word, str) else token_words(model, [word])[0] for word in asked]
    return dict(zip(names, ids, strict=True))


def _rows(model: LoadedModel | nn.Module, found: LensStatistics, named: Sequence[str]) -> pd.DataFrame:
    frame = found.to_frame()
    places = range(found.top_ids.shape[2])
    words = [token_words(model, frame[f"top_{place}"].tolist()) for place in places]
    probs = [frame[f"prob_{place}"].tolist() for place in places]
    final = dict(zip(found.position.tolist(), token_words(model, found.final_top.tolist()), strict=True))
    has_next = frame["target"] >= 0
    return pd.DataFrame(
        {
            "lens": frame["lens"],
            "site": frame["site"],
            "depth": frame["depth"],
            "position": frame["position"],
            "token": token_words(model, frame["token"].tolist()),
            "word": words[0],
            "prob": frame["prob_0"].astype(float),
            "words": [list(each) for each in zip(*words, strict=True)],
            "probs": [[float(prob) for prob in each] for each in zip(*probs, strict=True)],
            "kl": frame["kl"].astype(float),
            "entropy": frame["entropy"].astype(float),
            "rank": frame["final_rank"].astype(int),
            "final_word": frame["position"].map(final),
            "next_word": [
                word if there else ""
                for word, there in zip(
                    token_words(model, frame["target"].clip(lower=0).tolist()), has_next, strict=True
                )
            ],
            "next_prob": frame["target_prob"].astype(float),
            "next_rank": frame["target_rank"].astype(int),
            **{f"{value} of {name}": frame[f"{value} of {name}"] for name in named for value in ("prob", "rank")},
        }
    )
