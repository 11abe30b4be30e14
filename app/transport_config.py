"""Settings of `microtome transport`: which depths are compared, on which texts, with which directions and splices."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str | int) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Numbers = Annotated[tuple[int, ...], BeforeValidator(_listed)]


class TransportConfig(BaseModel):
    """What is carried from where to where."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Field("smollm2", min_length=1, description="bundled name, hub id, folder or GGUF file")
    data: str = Field(
        "english",
        description="a data set (`microtome data list`), or a CSV, JSONL or Parquet file with a column of texts",
    )
    text_column: str = Field("text", description="the file's column of texts")
    group_column: str | None = Field(
        None, description="the file's column of documents, which splits and intervals take whole; each text if left out"
    )
    texts: int = Field(60, ge=10, description="texts drawn from the data set")
    max_length: int = Field(256, ge=8, description="tokens of a window; longer texts are cut into several")
    every: int = Field(3, ge=1, description="every so many-th depth of the residual stream is compared")
    pair: Names = Field(
        (),
        description="two sites, such as resid_post.5:resid_post.9, looked at in full; again for more. By default steps "
        "over 1, 5 and 10 blocks from a third of the depth on",
    )
    rank: int | None = Field(None, ge=1, description="rank of the operators that are kept and tested; full if left out")
    ranks: Numbers = Field((1, 10, 64), description="ranks at which the map of all pairs tells efficiency")
    words: Names = Field((), description="a word of one token (' Paris') whose unembedding is followed; again for more")
    dictionary: Path | None = Field(
        None, description="folder of a sparse autoencoder (safetensors and JSON), whose features are followed"
    )
    directions: Path | None = Field(
        None, description="safetensors file of further directions: one tensor per site, a row per direction"
    )
    splices: int = Field(8, ge=0, description="held-out windows for the causal test; 0 leaves it out")
    draws: int = Field(20, ge=1, description="simulated draws of the null of subspace sizes")
    seed: int = Field(0, ge=0, description="seed of the draw, the splits, the spliced tokens and the intervals")
    out: Path = Field(Path("runs"), description="folder of runs")
    name: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$", description="name of the run; by default made of the others"
    )

    @model_validator(mode="after")
    def _can_be_run(self) -> "TransportConfig":
        from microtome.data.catalogue import DATA_SETS  # late: the help of the commands imports nothing heavy

        if self.data not in DATA_SETS and not Path(self.data).expanduser().is_file():
            raise ValueError(f"data: {self.data!r} is neither a data set ({', '.join(DATA_SETS)}) nor a file here.")
        for pair in self.pair:
            if len(pair.split(":")) != 2 or not all(part.strip() for part in pair.split(":")):
                raise ValueError(f"pair: {pair!r} is no pair. Give source:target, such as resid_post.5:resid_post.9.")
        if len(set(self.pair)) < len(self.pair):
            raise ValueError(f"pair names one twice: {', '.join(self.pair)}.")
        if any(rank < 1 for rank in self.ranks):
            raise ValueError(f"ranks are {list(self.ranks)}. Give numbers of 1 or more.")
        for name in ("dictionary", "directions"):
            path = getattr(self, name)
            if path is not None and not path.expanduser().exists():
                raise ValueError(f"{name}: there is nothing at {path}. Give the {name}'s folder or file.")
        return self

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The pairs that were named."""
        return tuple(tuple(part.strip() for part in pair.split(":")) for pair in self.pair)
