"""Where a model came from: weights, tokenizer, settings and versions, as a value to be written beside every result.

    weight_sha256 = SHA-256 of the weight file, or
                    of several: SHA-256 of their lines "<sha256>  <name>", as sha256sum prints them, or
                    of a model built in memory: that of its state_dict (`microtome.capture.hashes`)

File hashes are computed when they are first asked for. A file that changed since it was loaded is then an error, never
the hash of other weights. `weight_hash_of` says which of the three it is: they differ for the same weights.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from microtome.capture.hashes import FileStamp, text_sha256

PROBE_TEXT = "a"  # any text will do: what the tokenizer puts around it is asked, not how it is split


@dataclass(frozen=True)
class Provenance:
    """What a loaded model is.

    name: as given to load_model. source: "bundled", "gguf", "folder", "hub" or "module". location: folder, file or hub
    id; empty for "module". package: `name==version` of the package that ships the model, or None. revision: commit hash
    on the hub, or None. architectures: classes the checkpoint names; model_class: the class that was built. untrained:
    parameters the checkpoint lacks, drawn at random. weight_files: the files that were read. state_sha256: hash of the
    state_dict, for "module" only. source_sha256: hash of the GGUF file the weight files were made from, or None.
    quantisation: what was done to the weights before, or None if the checkpoint says nothing. dtype, device: of the
    parameters ("float32", "cpu"; several are joined by "+"). attention: name of transformers' implementation.
    special_before, special_after: the tokens that the tokenizer puts around a plain text.
    """

    name: str
    source: str
    location: str
    package: str | None
    revision: str | None
    architectures: tuple[str, ...]
    model_class: str
    untrained: tuple[str, ...]
    weight_files: tuple[FileStamp, ...]
    state_sha256: str | None
    source_sha256: str | None
    quantisation: str | None
    dtype: str
    device: str
    attention: str | None
    tokenizer_class: str | None
    tokenizer_sha256: str | None
    chat_template_sha256: str | None
    special_before: tuple[str, ...]
    special_after: tuple[str, ...]
    transformers_version: str
    torch_version: str

    @cached_property
    def weight_sha256(self) -> str:
        """SHA-256 of the weights (module docstring). The first call on new files reads them once.

        Raises ValueError if a weight file changed since the model was loaded from it.
        """
        if self.state_sha256 is not None:
            return self.state_sha256
        hashes = sorted((Path(file.path).name, file.sha256()) for file in self.weight_files)
        if len(hashes) == 1:
            return hashes[0][1]
        return text_sha256("".join(f"{digest}  {name}\n" for name, digest in hashes))

    @property
    def weight_hash_of(self) -> str:
        """What `weight_sha256` is taken over: "file", "files" or "state_dict"."""
        if self.state_sha256 is not None:
            return "state_dict"
        return "file" if len(self.weight_files) == 1 else "files"

    @property
    def bos_policy(self) -> str:
        """What the tokenizer adds to a plain text, in words: "adds nothing", "adds [CLS] before and [SEP] after"."""
        if self.tokenizer_class is None:
            return "no tokenizer"
        sides = (self.special_before, "before"), (self.special_after, "after")
        return "adds " + (" and ".join(f"{' '.join(tokens)} {side}" for tokens, side in sides if tokens) or "nothing")

    def to_dict(self) -> dict[str, object]:
        """All fields and derived values, of JSON types only. Hashes the weight files if that was not done before."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
        plain["weight_files"] = [file.path for file in self.weight_files]
        return plain | {name: getattr(self, name) for name in ("weight_sha256", "weight_hash_of", "bos_policy")}


def special_tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tokens put before and after a plain text, found by tokenizing one with and without special tokens.

    Raises ValueError if the text's own tokens do not appear among those with special tokens.
    """
    alone = tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    whole = tokenizer.encode(PROBE_TEXT, add_special_tokens=True)
    for start in range(len(whole) - len(alone) + 1):
        end = start + len(alone)
        if whole[start:end] == alone:
            before, after = (tokenizer.convert_ids_to_tokens(ids) for ids in (whole[:start], whole[end:]))
            return tuple(before), tuple(after)
    raise ValueError(
        f"{type(tokenizer).__name__} turns {PROBE_TEXT!r} into {whole} with special tokens and {alone} without: what "
        "it adds cannot be told. Load the model without it and pass token ids."
    )
