"""Settings of `microtome probe FEATURES`: probes of activations or features that are on disk, as one frozen model."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from microtome.app.grid_config import LabelSettings


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed), Field(min_length=1)]


class ProbeConfig(BaseModel):
    """What is probed for what, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    features: Path = Field(
        description="a store, a folder of saved activations, or a .npy, .npz, .parquet, .csv or .safetensors file"
    )
    rows: Path | None = Field(None, description="a .csv or .parquet file with a row of labels for each row of features")
    columns: Names | dict[str, Names] | None = Field(
        None,
        description="feature columns of a table: a name, or a prefix such as eeg_, again for more; SITE=NAME puts them "
        "at a site; all numbers if left out, but label, group, types and those in 'where'",
    )
    label: str = Field(min_length=1, description="column of the label")
    positive: bool | int | float | str | None = Field(None, description="this class against all others")
    above: Literal["median"] | float | None = Field(None, description="above this number, or above the median")
    target: Literal["classes", "numbers"] | None = Field(None, description="what whole numbers are")
    group: str = Field(
        min_length=1,
        description="column of groups, which folds keep together; 'rows' declares that rows are independent",
    )
    where: str | None = Field(None, description="only rows for which this holds, 'position > 0 and kind == \"a\"'")
    sites: tuple[str, ...] | None = Field(None, description="sites or kinds; all if left out")
    method: str | None = Field(None, description="logistic, ridge, lda, ...; by default what suits the label")
    class_weight: Literal["balanced"] | None = Field(None, description="balanced lets the classes weigh the same")
    types: str | None = Field("token", description="column whose values the control task draws labels for")
    folds: int = Field(5, ge=2, description="outer folds, for the scores")
    inner_folds: int = Field(4, ge=2, description="inner folds, for the strength of the penalty")
    permutations: int = Field(999, ge=0, description="permuted labellings for the null of the best site; 0 for none")
    bootstraps: int = Field(2000, ge=100, description="bootstrap draws for the intervals")
    seed: int = Field(0, ge=0, description="seed of the folds, the controls and the bootstrap")
    out: Path = Field(Path("runs"), description="folder of runs")
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$",
        description="name of the run; by default made of features, label and method",
    )

    @model_validator(mode="after")
    def _label_can_be_read(self) -> "ProbeConfig":
        LabelSettings(column=self.label, positive=self.positive, above=self.above, target=self.target)
        return self

    @property
    def no_features(self) -> tuple[str, ...]:
        """Columns that are never features: of the label, the groups, the types, and those that `where` asks."""
        asked = re.findall(r"`([^`]+)`|([^\W\d]\w*)", re.sub(r"'[^']*'|\"[^\"]*\"", "", self.where or ""))
        names = (self.label, *([] if self.group == "rows" else [self.group]), self.types, *map("".join, asked))
        return tuple(dict.fromkeys(name for name in names if name is not None))

    @property
    def of_label(self) -> LabelSettings:
        """The label as grids know it."""
        return LabelSettings(column=self.label, positive=self.positive, above=self.above, target=self.target)


def given_columns(values: list[str]) -> tuple[str, ...] | dict[str, tuple[str, ...]]:
    """`--columns` as the setting: names and prefixes, or SITE=NAME pairs by site. ValueError for some of each."""
    pairs = [value.partition("=") for value in values]
    if not any(equals for _, equals, _ in pairs):
        return tuple(values)
    if bad := [value for value, (site, _, name) in zip(values, pairs, strict=True) if not (site and name)]:
        raise ValueError(f"--columns {bad[0]} is no SITE=NAME, as others are. Give every --columns a site, or none.")
    return {site: tuple(name for other, _, name in pairs if other == site) for site, _, _ in pairs}
