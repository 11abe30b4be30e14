"""Settings of each command: one frozen model per command, which is its YAML, its flags and its form."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DemoConfig(BaseModel):
    """Settings of `microtome demo`: from text to a per-head probe map of a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field("smollm2", description="bundled name, hub id, folder or GGUF file")
    data: str = Field("sentiment", description="'sentiment', 'toy', or a CSV, JSONL or Parquet file")
    text_column: str = Field("text", description="the file's column of texts")
    label_column: str = Field("label", description="the file's column of labels (two values)")
    group_column: str | None = Field(
        None,
        description="the file's column of groups (author, document, template), which folds keep together; 'texts' "
        "declares that only equal and nearly equal texts belong together",
    )
    texts: int = Field(640, ge=20, description="how many texts, drawn at random, balanced between domains and labels")
    position: Literal["last", "mean", "first"] = Field("last", description="which token of each text")
    truncate: Literal["left", "right"] | None = Field(None, description="which end of an over-long text goes")
    folds: int = Field(5, ge=2, description="outer folds, for the scores")
    inner_folds: int = Field(4, ge=2, description="inner folds, for the strength of the penalty")
    permutations: int = Field(999, ge=20, description="permuted labellings for the null of the best site")
    bootstraps: int = Field(2000, ge=100, description="bootstrap draws for the intervals")
    seed: int = Field(0, ge=0, description="seed of the draw, the folds, the controls and the bootstrap")
    out: Path = Field(Path("runs"), description="folder of runs")
    name: str = Field("demo", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$", description="name of the run")

    @model_validator(mode="after")
    def _data_can_be_used(self) -> "DemoConfig":
        if self.data not in ("sentiment", "toy") and not Path(self.data).is_file():
            raise ValueError(f"data: {self.data!r} is neither 'sentiment', 'toy' nor a file here ({Path.cwd()}).")
        if self.data not in ("sentiment", "toy") and self.group_column is None:
            raise ValueError(
                "group_column: rows that share an author, document or template must not be split between training and "
                "test. Name the column that says which do; 'texts' declares that only equal texts belong together."
            )
        return self
