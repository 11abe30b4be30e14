"""Rows of two or more captures matched, by text, by token or by word, and moments across them.

    ends = {"word_end": word_ends}                            # where the tokenizers differ
    a = capture(small, texts, "resid_post", "all", token_labels=ends)
    b = capture(other, texts, "resid_post", "all", token_labels=ends)
    aligned = aligned_activations({"a": a, "b": b}, on="word_end")
    moments = moments_of_aligned(aligned, documents=documents)

on            rows that belong together                                      captured at
"text"        the one row of each text                                       "mean", "last", one position per text
"token"       the same position of the same text, and the same token there   "all"
a column, or several: equal in all of them, and the same text; "word_end" is one (rows without a value are left out)

A word is a stretch without white space. Its row is that of its last token: in a model that reads left to right the
first that has seen all of it. It is matched by the place of the word's last character, so the two captures must be of
the same strings. Beware: in a text that was cut on the left by both, words are still where they were in the whole text.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int, Int64
from torch import Tensor
from tqdm.auto import tqdm

from microtome.capture.activations import Activations
from microtome.capture.stored_tensor import in_memory
from microtome.lenses.document_shards import SHARES, shards_by_document
from microtome.lenses.documents import document_numbers
from microtome.lenses.moments import CHUNK, Moments
from microtome.lenses.moments_pass import Shards
from microtome.lenses.short_repr import short_repr
from microtome.lenses.site_pairs import Pairs, SiteKey
from microtome.lenses.strata import TokenRule
from microtome.lenses.transport.model_moments import pairs_between


@dataclass(frozen=True, eq=False)
class AlignedActivations:
    """Rows of several captures that belong together.

    Attributes:
        captures: by name.
        rows: one row per match: text, what was matched on, and of each capture its row number ("row a") and its
            position ("position a").
        is_per_text: whether each text has one row.
    """

    captures: Mapping[str, Activations]
    rows: pd.DataFrame
    is_per_text: bool

    __repr__ = short_repr

    @property
    def unmatched(self) -> dict[str, int]:
        """Rows of each capture that have no partner."""
        return {name: held.n_rows - len(self.rows) for name, held in self.captures.items()}

    def numbers(self, name: str) -> Int64[Tensor, " row"]:
        """Row numbers of one capture, in the order of the matches."""
        return torch.from_numpy(self.rows[f"row {name}"].to_numpy(dtype="int64", copy=True))

    def activations(self, name: str) -> Activations:
        """The matched rows of one capture: row t of each belongs to row t of the others."""
        return self.captures[name].select_rows(self.numbers(name))


def word_ends(text: str, offsets: Int[np.ndarray, "token 2"]) -> list[int | None]:
    """For `capture(..., token_labels={"word_end": word_ends})`: the number of characters of the text up to the end of
    the word whose last token this is; None for other tokens.

    A token that goes on into the next word ends none. Where several tokens share a word's last character (bytes of an
    emoji) it is the last of them.
    """
    found: dict[int, int] = {}
    words = [match.span() for match in re.finditer(r"\S+", text)]
    ends = np.array([end for _, end in words])
    starts = [start for start, _ in words]
    for number, (first, stop) in enumerate(offsets.tolist()):
        if stop <= first or not len(ends):
            continue
        # the first word that ends after this token begins
        word = int(np.searchsorted(ends, first, side="right"))
        if word < len(ends) and stop >= ends[word] and (word + 1 == len(ends) or stop <= starts[word + 1]):
            found[int(ends[word])] = number
    last = {number: end for end, number in found.items()}
    return [last.get(number) for number in range(len(offsets))]


def aligned_activations(captures: Mapping[str, Activations], on: str | Sequence[str] = "token") -> AlignedActivations:
    """Match the rows of two or more captures of the same texts, numbered alike.

    Args:
        captures: by name.
        on: "text", "token", or columns that all have; see the module.

    Raises:
        ValueError: fewer than two captures, a name with "/", several rows of one key (names it), no match, different
            tokens at one position, or more than one row per text for "text".
        KeyError: a column that a capture does not have.
    """
    if len(captures) < 2 or any(not name or "/" in name for name in captures):
        raise ValueError(f"captures are {list(captures)}. Give two or more, by names without '/'.")
    keys = {"text": ["text"], "token": ["text", "position"]}.get(on) if isinstance(on, str) else None
    keys = keys or ["text", *([on] if isinstance(on, str) else [name for name in on if name != "text"])]
    tables = [_keyed(name, held.rows, keys, on) for name, held in captures.items()]
    rows = reduce(lambda left, right: left.merge(right, on=keys, how="inner"), tables)
    if rows.empty:
        shown = "; ".join(f"{name}: {_first(table, keys)}" for name, table in zip(captures, tables, strict=True))
        raise ValueError(
            f"no row of {list(captures)} matches on {keys} ({shown}). Capture the same texts in the same order, and "
            "match by what both have: on='text', 'token' or 'word_end'."
        )
    if on == "token":
        _require_same_tokens(rows, list(captures))
    return AlignedActivations(dict(captures), rows.reset_index(drop=True), on == "text")


def moments_of_aligned(
    aligned: AlignedActivations,
    *,
    documents: Iterable[Any] | None = None,
    pairs: Pairs = "between",
    shards: Shards = SHARES,
    seed: int = 0,
    rule: TokenRule | None = None,
    special_tokens: Sequence[str] = (),
    shuffled: bool = False,
    chunk: int = CHUNK,
    progress: bool = True,
) -> Moments:
    """Moments across captures, sites named "name/site"; of stores, some rows at a time.

    Args:
        aligned: matched rows.
        documents: name or number of the document of each text, in the order of text numbers; each its own if None.
        pairs: "between" the captures, "all", or a list of names.
        rule: which rows are sinks: position 0 or a special token in any of the captures, or massive at a residual site
            that was captured. Of one row per text only massive ones are.
        special_tokens: what the rows' `token` says at tokens such as BOS.
        shards, seed, shuffled, chunk: as in `Moments`. The shuffled control pairs equal positions, counted in the first
            capture; any two texts where there is one row of each.

    Raises:
        ValueError: fewer documents than texts, too little memory, NaN.
    """
    widths: dict[SiteKey, int] = {}
    for name, held in aligned.captures.items():
        widths |= {(name, site): int(torch.Size(tensor.shape[1:]).numel()) for site, tensor in held.tensors.items()}
    text = aligned.rows["text"].to_numpy()
    n_texts = int(text.max()) + 1
    given = np.arange(n_texts).tolist() if documents is None else list(documents)
    if len(given) < n_texts:
        raise ValueError(f"text {n_texts - 1} has no document; {len(given)} were given. Give all.")
    known = document_numbers(given, len(given)).tolist()
    shards = shards_by_document(shards, known)
    moments = Moments(
        widths,
        pairs_between(list(widths)) if isinstance(pairs, str) and pairs == "between" else pairs,
        shards,
        seed=seed,
        rule=rule,
        shuffled=shuffled,
        chunk=chunk,
        provenance={
            "model": {name: held.provenance.get("model") for name, held in aligned.captures.items()},
            "activations": {name: held.provenance for name, held in aligned.captures.items()},
        },
    )
    moments.estimate().require_memory()
    position, special = _places(aligned, set(special_tokens))
    numbers = {name: aligned.numbers(name) for name in aligned.captures}
    with tqdm(total=len(text), unit="rows", desc="moments", disable=not progress) as bar:
        for start in range(0, len(text), CHUNK):
            some = slice(start, start + CHUNK)
            values = {
                (name, site): in_memory(tensor[numbers[name][some].to(tensor.device)])
                for name, held in aligned.captures.items()
                for site, tensor in held.tensors.items()
            }
            moments.update(
                values,
                documents=[known[number] for number in text[some].tolist()],
                position=position[some],
                is_special=special[some],
                text=torch.from_numpy(text[some].astype("int64")),
            )
            bar.update(len(text[some]))
    moments.finish()
    return moments


def _keyed(name: str, table: pd.DataFrame, keys: list[str], on: Any) -> pd.DataFrame:
    """The keys of a capture's rows beside their numbers; rows without a key left out."""
    if missing := [key for key in keys if key not in table.columns]:
        hint = "capture(..., 'all', token_labels={'word_end': word_ends})" if "word_end" in missing else "label them"
        raise KeyError(f"{name} has no column {missing[0]!r}; it has {list(table.columns)}. To match on it, {hint}.")
    found = table[keys].assign(
        **{f"row {name}": np.arange(len(table)), f"position {name}": table["position"], f"token {name}": table["token"]}
    )
    found = found.dropna(subset=keys)
    if on == "token" and bool((found["position"] < 0).any()):
        raise ValueError(f"rows of {name} are means over positions (position -1). Match them with on='text'.")
    twice = found[found.duplicated(keys)]
    if not twice.empty:
        raise ValueError(
            f"{name} has several rows of {_first(twice, keys)}. Give one row for each key: "
            + ("capture one position of each text, or match on='token'." if on == "text" else "match on more columns.")
        )
    return found


def _first(table: pd.DataFrame, keys: list[str]) -> str:
    return ", ".join(f"{key} {table.iloc[0][key]}" for key in keys) if len(table) else "no rows"


def _require_same_tokens(rows: pd.DataFrame, names: list[str]) -> None:
    for name in names[1:]:
        differing = rows[rows[f"token {names[0]}"].astype(str) != rows[f"token {name}"].astype(str)]
        if not differing.empty:
            row = differing.iloc[0]
            raise ValueError(
                f"text {row['text']}, position {row['position']} is {row[f'token {names[0]}']!r} in {names[0]} and "
                f"{row[f'token {name}']!r} in {name}: other tokenizers or texts. Match by words, on='word_end'."
            )


def _places(aligned: AlignedActivations, special: set[str]) -> tuple[Tensor, Tensor]:
    """Position of each match, 0 where it is 0 in any capture, and whether a token of it is special."""
    names, rows = list(aligned.captures), aligned.rows
    if aligned.is_per_text:
        return torch.ones(len(rows), dtype=torch.int64), torch.zeros(len(rows), dtype=torch.bool)
    places = np.stack([rows[f"position {name}"].to_numpy(dtype="int64") for name in names])
    is_special = np.stack([rows[f"token {name}"].astype(str).isin(special).to_numpy() for name in names]).any(0)
    return torch.from_numpy(np.where((places == 0).any(0), 0, places[0])), torch.from_numpy(is_special)
