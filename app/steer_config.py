"""Settings of `microtome steer`: what is moved, by which method, where, and what it may cost."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str | int | float) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Strengths = Annotated[tuple[float, ...], BeforeValidator(_listed)]


class SteerConfig(BaseModel):
    """One steering run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Field("smollm2", min_length=1, description="bundled name, hub id, folder or GGUF file")
    data: str = Field(
        "sentiment",
        description="texts of two classes to find a direction in: a data set (`microtome data list`), or a CSV, JSONL "
        "or Parquet file",
    )
    text_column: str = Field("text", description="the file's column of texts")
    label_column: str = Field("label", description="the column of classes")
    positive: str | None = Field(None, description="the class that is wanted, where the column is not true or false")
    group_column: str | None = Field(
        None, description="the file's column of groups that are kept together; each text if left out"
    )
    methods: Names = Field(("mean",), min_length=1, description="how the direction is found and used; again for more")
    site: str | None = Field(
        None, description="where it acts, such as resid_post.14; the layer is chosen on dev prompts if left out"
    )
    positions: Literal["all", "prompt", "generated", "last"] = Field("generated", description="at which tokens")
    strengths: Strengths = Field(
        (), description="strengths to try; again for more. Found by bracketing up to the limit if left out"
    )
    limit: float = Field(0.25, gt=0, description="KL to the unsteered model on neutral text that is allowed, in nats")
    contrast: int = Field(400, ge=8, description="texts a direction is found in")
    prompts: int = Field(100, ge=4, description="held-out prompts that are steered")
    dev_prompts: int = Field(40, ge=4, description="further prompts on which layer and strength are chosen")
    prompt_file: Path | None = Field(None, description="file of test prompts (one a line, or a column of texts)")
    words: int = Field(6, ge=1, description="words of a text that make its prompt")
    tokens: int = Field(32, ge=1, description="tokens written after each prompt")
    wanted: Names = Field((), description="a word that shows the wanted class, for log-odds; again for more")
    unwanted: Names = Field((), description="a word that shows the other class; again for more")
    neutral_file: Path | None = Field(
        None, description="file of neutral passages (one a line, or a column of texts); books and news if left out"
    )
    random: int = Field(20, ge=0, description="random directions of equal norm, as a control")
    instruction: str | None = Field(
        None, min_length=1, description="what one would ask for in words before each prompt, as a control"
    )
    artefact: Path | None = Field(None, description="folder of a steering vector to use in place of finding one")
    seed: int = Field(0, ge=0, description="seed of the draw, the splits, the controls and the intervals")
    out: Path = Field(Path("runs"), description="folder of runs")
    name: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$", description="name of the run; by default made of the others"
    )

    @model_validator(mode="after")
    def _can_be_run(self) -> "SteerConfig":
        from microtome.data.catalogue import DATA_SETS  # late: the help of the commands imports nothing heavy

        if self.data not in DATA_SETS and not Path(self.data).expanduser().is_file():
            raise ValueError(f"data: {self.data!r} is neither a data set ({', '.join(DATA_SETS)}) nor a file here.")
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods names one twice: {', '.join(self.methods)}.")
        if any(strength == 0 for strength in self.strengths):
            raise ValueError("strengths: 0 is the unsteered model, which is always measured. Leave it out.")
        if bool(self.wanted) != bool(self.unwanted):
            raise ValueError("wanted and unwanted: give words of both, or of neither.")
        for name in ("prompt_file", "neutral_file", "artefact"):
            path = getattr(self, name)
            if path is not None and not path.expanduser().exists():
                raise ValueError(f"{name}: there is nothing at {path}.")
        if self.artefact is not None and self.methods != ("mean",):
            raise ValueError("artefact and methods: a vector that is there needs no method. Give one of the two.")
        return self
