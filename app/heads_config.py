"""Settings of `microtome heads`: the roles of a model's attention heads, as one frozen model."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from microtome.data.catalogue import DATA_SETS
from microtome.lenses.head_roles import THRESHOLDS


class HeadsConfig(BaseModel):
    """Which model, on which texts, and from where on a score is a role."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Field("smollm2", description="bundled name, hub id, folder or GGUF file")
    data: str = Field("lines", description="a data set (`microtome data list`), or a CSV, JSONL or Parquet file")
    text_column: str = Field("text", description="the file's column of texts")
    group_column: str | None = Field(
        None, description="the file's column of documents, which intervals draw whole; each text alone if left out"
    )
    texts: int = Field(64, ge=2, description="how many texts, drawn at random")
    max_length: int = Field(256, ge=16, description="tokens of each text at most; the rest is cut off")
    copy_length: int = Field(64, ge=2, description="tokens of each half of the repeated random texts")
    made_texts: int = Field(16, ge=2, description="how many repeated random texts, and texts with a needle")
    thresholds: dict[str, float] = Field(
        {},
        description=f"scores from which on a head has a role: {', '.join(f'{k} {v}' for k, v in THRESHOLDS.items())}",
    )
    untrained: bool = Field(True, description="run a model with fresh weights too, as a control")
    bootstraps: int = Field(1000, ge=100, description="bootstrap draws over documents for the intervals")
    seed: int = Field(0, ge=0, description="seed of the draw, the made texts, the control and the bootstrap")
    out: Path = Field(Path("runs"), description="folder of runs")
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$",
        description="name of the run; by default made of model and data",
    )

    @model_validator(mode="after")
    def _can_be_used(self) -> "HeadsConfig":
        if self.data not in DATA_SETS and not Path(self.data).expanduser().is_file():
            raise ValueError(f"data: {self.data!r} is neither a data set ({', '.join(DATA_SETS)}) nor a file here.")
        if unknown := sorted(set(self.thresholds) - set(THRESHOLDS)):
            raise ValueError(f"thresholds: no role {unknown[0]!r}; there are {', '.join(THRESHOLDS)}.")
        return self


def given_thresholds(values: list[str]) -> dict[str, float]:
    """`--threshold sink=0.4`, again for more, as the setting. ValueError for what is no ROLE=NUMBER."""
    found = {}
    for value in values:
        role, _, number = value.partition("=")
        try:
            found[role] = float(number)
        except ValueError as error:
            raise ValueError(f"--threshold {value} is no ROLE=NUMBER, such as sink=0.4.") from error
    return found
