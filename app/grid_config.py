"""Settings of a grid: the YAML of `microtome capture | probe | sweep`, as one frozen model.

    name: night
    models: [smollm2, {name: /models/mine, called: mine}]
    data: [cities, {name: brown, texts: 500}, {file: reviews.csv, text: review, labels: [stars], group: author}]
    sites: [[resid_post, z], embed]     # a list inside the list is captured together
    positions: [last, mean]             # last, first, mean, all, or an index
    labels: [label, {column: kind, positive: humour}, {column: length, above: median}]

Every combination is a capture; every label of it is a probe cell. What is left out has the default below.
Beware: YAML reads `no`, `off` and `1` as false, false and a number; put a class of that name in quotes.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$"
_CALLED = Field(None, pattern=_NAME, description="name in cells and folders; by default made from the name or file")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


class LabelSettings(_Frozen):
    """A label: a column of two values or of classes, one class against the rest, numbers above a limit, or numbers."""

    column: str = Field(min_length=1, description="column of the data set")
    positive: bool | int | float | str | None = Field(None, description="this class against all others")
    above: Literal["median"] | float | None = Field(None, description="above this number, or above the median")
    target: Literal["classes", "numbers"] | None = Field(None, description="what whole numbers are")

    @model_validator(mode="after")
    def _one_way(self) -> "LabelSettings":
        given = [name for name in ("positive", "above", "target") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"label {self.column!r} has both {given[0]!r} and {given[1]!r}. Give one of them.")
        return self


def _label(value: Any) -> Any:
    return {"column": value} if isinstance(value, str) else value


Label = Annotated[LabelSettings, BeforeValidator(_label)]
Labels = Annotated[tuple[Label, ...], BeforeValidator(_listed), Field(min_length=1)]


class ModelSettings(_Frozen):
    """A model by its name."""

    name: str = Field(min_length=1, description="bundled name, hub id, folder or GGUF file")
    untrained: int | None = Field(
        None, ge=0, description="the same architecture with fresh weights of this seed, as a control"
    )
    called: str | None = _CALLED


def _one_spelling(value: Any) -> Any:
    """`label: kind` is `labels: [kind]`."""
    if not isinstance(value, dict) or "label" not in value:
        return value
    if "labels" in value:
        raise ValueError("has both 'label' and 'labels'. Give one of them.")
    return {("labels" if key == "label" else key): held for key, held in value.items()}


class CatalogueData(_Frozen):
    """A data set of the catalogue."""

    name: str = Field(min_length=1, description="name in the catalogue")
    texts: int | None = Field(None, ge=4, description="how many texts, drawn at random; all if left out")
    labels: Labels | None = Field(None, description="instead of the grid's labels")
    called: str | None = _CALLED

    _label_or_labels = model_validator(mode="before")(_one_spelling)


class FileData(_Frozen):
    """A table of one's own."""

    file: Path = Field(description="CSV, JSONL or Parquet file")
    text: str = Field("text", description="column of texts")
    group: str = Field(
        description="column of groups (author, document, template), which folds keep together; 'texts' declares that "
        "only equal and nearly equal texts belong together"
    )
    texts: int | None = Field(None, ge=4, description="how many texts, drawn at random; all if left out")
    labels: Labels | None = Field(None, description="instead of the grid's labels")
    called: str | None = _CALLED

    _label_or_labels = model_validator(mode="before")(_one_spelling)

    @model_validator(mode="after")
    def _is_there(self) -> "FileData":
        if not self.file.is_file():
            raise ValueError(f"there is no file {self.file}; the working directory is {Path.cwd()}.")
        return self


def _kind_of_data(value: Any) -> str:
    is_file = "file" in value if isinstance(value, dict) else hasattr(value, "file")
    return "a file" if is_file else "a name"


Data = Annotated[
    Annotated[CatalogueData, Tag("a name")] | Annotated[FileData, Tag("a file")],
    Discriminator(_kind_of_data),
    BeforeValidator(_named),
]


def _position(value: Any) -> Any:
    if value not in ("last", "first", "mean", "all") and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError("give last, first, mean, all, or an index such as -2.")
    return value


Position = Annotated[int | str, BeforeValidator(_position)]
SiteSet = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed), Field(min_length=1)]


class CaptureSettings(_Frozen):
    """How activations are captured and kept."""

    dtype: Literal["float32", "float16", "bfloat16"] = Field("float32", description="of the activations that are kept")
    truncate: Literal["left", "right"] | None = Field(
        None, description="which end of an over-long text goes; without it such a text is an error"
    )
    max_tokens: int | None = Field(None, ge=1, description="padded tokens per batch; by default capture's own")
    shard_mb: int | None = Field(None, ge=1, description="size of a shard on disk in MB; by default capture's own")


class ProbeSettings(_Frozen):
    """How sites are probed."""

    folds: int = Field(5, ge=2, description="outer folds, for the scores")
    inner_folds: int = Field(4, ge=2, description="inner folds, for the strength of the penalty")
    permutations: int = Field(999, ge=20, description="permuted labellings for the null of the best site")
    bootstraps: int = Field(2000, ge=100, description="bootstrap draws for the intervals")
    method: str | None = Field(None, description="logistic, ridge, lda, ...; by default what suits the label")
    class_weight: Literal["balanced"] | None = Field(None, description="balanced lets both classes weigh the same")
    rows: int | None = Field(None, ge=20, description="at most so many rows, drawn by whole groups; all if left out")


class GridConfig(_Frozen):
    """Settings of `microtome capture`, `probe` and `sweep`."""

    name: str = Field(pattern=_NAME, description="name of the grid and of its folder")
    out: Path = Field(Path("runs"), description="folder in which the grid's folder lies")
    models: Annotated[
        tuple[Annotated[ModelSettings, BeforeValidator(_named)], ...], BeforeValidator(_listed), Field(min_length=1)
    ] = Field(description="models, by name")
    data: Annotated[tuple[Data, ...], BeforeValidator(_listed), Field(min_length=1)] = Field(description="data sets")
    sites: Annotated[tuple[SiteSet, ...], BeforeValidator(_listed), Field(min_length=1)] = Field(
        (("resid_post", "z"),), description="each entry is captured on its own; a list inside the list, together"
    )
    positions: Annotated[tuple[Position, ...], BeforeValidator(_listed), Field(min_length=1)] = Field(
        ("last",), description="last, first, mean, all, or an index"
    )
    labels: Labels | None = Field(None, description="probed in every data set that names none itself")
    capture: CaptureSettings = CaptureSettings()
    probe: ProbeSettings = ProbeSettings()
    seed: int = Field(0, ge=0, description="seed of the draws, the folds, the controls and the bootstrap")
    keep_activations: bool = Field(True, description="false deletes a capture once all its labels are probed")
    report: bool = Field(True, description="write report.html, 5 MB, for each probe cell")
