"""Data of a grid's cells: a set of the catalogue or a user's table, with the labels that are probed in it.

Labels are checked here, before any model is loaded: a column that is not there, one class where two are needed, and a
label of tokens where single tokens are not kept are errors now and not in the fifth hour.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from microtome.app.grid_config import CatalogueData, FileData, LabelSettings
from microtome.app.grid_labels import binary_label
from microtome.data.catalogue import DATA_SETS, load_data
from microtome.data.table import read_table, table_sha256
from microtome.data.text_groups import text_groups


@dataclass(frozen=True, eq=False)
class GridData:
    """Texts and labels of one entry under `data`.

    table: columns text, group, and the labels of texts. token_labels: as `capture` takes them. defaults: the columns
    probed if nobody names one. facts: plain values, for the provenance.
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

        Without any that are wanted: the set's defaults, those of tokens where all tokens are kept, else those of texts.
        Raises ValueError for a column that is not there, a token's label at other positions than "all", no label at
        all, and whatever `binary_label` finds wrong with a text's label.
        """
        if wanted is None:
            is_of_tokens = positions == "all" and any(name in self.token_labels for name in self.defaults)
            names = [name for name in self.defaults if (name in self.token_labels) == is_of_tokens]
            wanted = [LabelSettings(column=name) for name in names]
        if not wanted:
            raise ValueError(
                f"data set {self.name!r} has no label to probe at positions: {positions}. {self._offered()}"
            )
        for label in wanted:
            self._check(label, positions)
        return list(wanted)

    def _check(self, label: LabelSettings, positions: str | int) -> None:
        if label.column in self.token_labels:
            if positions != "all":
                raise ValueError(
                    f"label {label.column!r} of {self.name!r} has a value per token, and positions: {positions} keeps "
                    "one row per text. Write positions: all (in a grid of its own if others are wanted too)."
                )
        elif label.column in self.text_labels:
            try:
                binary_label(self.table[label.column], label)
            except (ValueError, TypeError) as error:
                raise ValueError(f"data set {self.name!r}: {error}") from error
        else:
            known = [*self.text_labels, *self.token_labels]
            near = difflib.get_close_matches(label.column, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"data set {self.name!r} has no label {label.column!r}. {self._offered()}{hint}")

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
    return GridData(name, loaded.table, loaded.token_labels, (*kind.labels, *kind.token_labels), dict(loaded.facts))


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
