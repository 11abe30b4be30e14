"""Data of a grid's cells: a set of the catalogue or a user's table, with the labels that are probed in it.

Labels are checked here, before any model is loaded: a column that is not there, one class where two are needed, and a
label of tokens where single tokens are not kept are errors now and not in the fifth hour.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int64

from microtome.app.grid_config import CatalogueData, FileData, LabelSettings
from microtome.app.grid_labels import grid_label
from microtome.data.catalogue import DATA_SETS, load_data
from microtome.data.table import read_table, table_sha256
from microtome.data.text_groups import text_groups

_TEXTS_TRIED = 100


@dataclass(frozen=True, eq=False)
class GridData:
    """Texts and labels of one entry under `data`.

    table: columns text, group, and the labels of texts. token_labels: as `capture` takes them. defaults: columns, the
    first of which (of its kind) is probed if nobody names one. facts: plain values, for the provenance.
    """

    name: str
    table: pd.DataFrame
    token_labels: Mapping[str, Any]
    defaults: tuple[str, ...]
    facts: dict

    @property
    def text_labels(self) -> list[str]:
        """Columns with one value per text that may be labels."""
        return [name for name in self.table if name not in ("text", "group")]

    def labels_at(self, positions: str | int, wanted: Sequence[LabelSettings] | None) -> list[LabelSettings]:
        """The labels to probe at these positions, checked.

        Without any that are wanted: the first default, of tokens where all tokens are kept and the set has labels of
        tokens, else of texts; numbers are taken above their median.
        Raises ValueError for a column that is not there, a token's label at other positions than "all", no label at
        all, and whatever `grid_label` finds wrong with a label.
        """
        if wanted is None:
            is_of_tokens = positions == "all" and any(name in self.token_labels for name in self.defaults)
            names = [name for name in self.defaults if (name in self.token_labels) == is_of_tokens]
            wanted = [self._default(name) for name in names[:1]]
        if not wanted:
            raise ValueError(
                f"data set {self.name!r} has no label to probe at positions: {positions}. {self._offered()}"
            )
        for label in wanted:
            self._check(label, positions)
        return list(wanted)

    def _default(self, column: str) -> LabelSettings:
        values = self._values(column)
        is_numeric = pd.api.types.is_numeric_dtype(values.dropna().infer_objects()) and values.nunique() > 2
        return LabelSettings(column=column, above="median" if is_numeric else None)

    def _check(self, label: LabelSettings, positions: str | int) -> None:
        is_of_tokens = label.column in self.token_labels
        if is_of_tokens and positions != "all":
            raise ValueError(
                f"label {label.column!r} of {self.name!r} has a value per token, and positions: {positions} keeps "
                "one row per text. Write positions: all (in a grid of its own if others are wanted too)."
            )
        if not is_of_tokens and label.column not in self.text_labels:
            known = [*self.text_labels, *self.token_labels]
            near = difflib.get_close_matches(label.column, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"data set {self.name!r} has no label {label.column!r}. {self._offered()}{hint} Labels of one data set "
                "alone go into its entry: data: [{name: ..., labels: [...]}]."
            )
        values = self._values(label.column)
        is_plain = label.positive is None and label.above is None and label.target is None
        if callable(self.token_labels.get(label.column)) and not (is_plain and values.nunique() > 2):
            return  # words of some texts show that there are too many values, not that there are too few
        try:
            grid_label(values, label)
        except (ValueError, TypeError) as error:
            raise ValueError(f"data set {self.name!r}: {error}") from error

    def _values(self, column: str) -> pd.Series:
        """All values of a label; of a function of tokens, its values at the words of the first texts."""
        if column not in self.token_labels:
            return self.table[column]
        given = self.token_labels[column]
        if callable(given):
            texts = self.table["text"].iloc[:_TEXTS_TRIED]
            given = [given(text, _word_offsets(text)) for text in texts]
        # a list of spans (start, end, value) or of one value per token, for each text
        values = [value[2] if isinstance(value, tuple) else value for of_text in given for value in of_text]
        return pd.Series(values, dtype=object)

    def _offered(self) -> str:
        tokens = f"; of tokens, at positions: all, {list(self.token_labels)}" if self.token_labels else ""
        return f"It has labels of texts {self.text_labels}{tokens}."


def load_grid_data(source: CatalogueData | FileData, name: str, wanted: Sequence[LabelSettings], seed: int) -> GridData:
    """Texts and labels of an entry. `wanted` are the labels that will be asked for: the columns read from a file.

    Raises ValueError for a name that is not in the catalogue, and what `load_data` and `read_table` raise.
    """
    if isinstance(source, FileData):
        return _from_file(source, name, wanted, seed)
    if source.name not in DATA_SETS:
        raise ValueError(
            f"data: there is no data set {source.name!r}; there are {', '.join(DATA_SETS)}. Write {{file: ...}} for a "
            "file of your own."
        )
    loaded = load_data(source.name, texts=source.texts, seed=seed)
    kind = DATA_SETS[source.name]
    table = loaded.table.rename(columns={kind.group: "group"})
    return GridData(name, table, loaded.token_labels, (*kind.labels, *kind.token_labels), dict(loaded.facts))


def _word_offsets(text: str) -> Int64[np.ndarray, "word 2"]:
    return np.array([match.span() for match in re.finditer(r"\S+", text)], dtype=np.int64).reshape(-1, 2)


def _from_file(source: FileData, name: str, wanted: Sequence[LabelSettings], seed: int) -> GridData:
    if not wanted:
        raise ValueError(f"data: {source.file} needs labels: name its columns under 'labels', here or for the grid.")
    columns = list(dict.fromkeys(label.column for label in wanted))
    group = None if source.group == "texts" else source.group
    table = read_table(source.file, text=source.text, label=None, group=group, keep=columns)
    table = table.assign(**{column: _with_gaps(table[column]) for column in columns})
    if source.texts is not None and len(table) > source.texts:
        table = table.sample(source.texts, random_state=seed).sort_index().reset_index(drop=True)
    if group is None:
        table = table.assign(group=text_groups(table["text"].tolist()))
    facts = {"source": str(source.file), "rows": len(table), "table_sha256": table_sha256(table)}
    return GridData(name, table, {}, tuple(columns), facts)


def _with_gaps(column: pd.Series) -> pd.Series:
    """Empty fields as missing; what is left as numbers or as true and false if all of it is."""
    if pd.api.types.is_numeric_dtype(column):
        return column
    known = column[column.notna() & (column != "")]
    if known.isin(["True", "False", "true", "false"]).all():
        kept = known.str.lower() == "true"
    else:
        numbers = pd.to_numeric(known, errors="coerce")
        kept = known if numbers.isna().any() else numbers
    return kept.astype(object).reindex(column.index).infer_objects()
