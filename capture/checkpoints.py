"""A checkpoint folder (config, weights, tokenizer files) as a module: which class, which files, and nothing missing.

The class is the causal language model if the checkpoint's architecture is one, else the base model (`AutoModel`), which
every family has: encoders, encoder-decoders, vision, audio. Nothing here reaches for a network, and no remote code
runs. Beware: the base model drops a head the checkpoint may have (masked language model, classifier); build the module
yourself and use `LoadedModel.from_module` where the head is wanted.
"""

import json
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)  # single file and index of shards, in the order transformers prefers them
TOKENIZER_FILE_PARTS = ("token", "vocab", "merges", "spiece", "sentencepiece", "bpe")  # no file name has one by chance
_progress_lock = threading.RLock()


def auto_class(config: PreTrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModel]:
    """AutoModelForCausalLM if the checkpoint is a causal language model, else AutoModel.

    Where the configuration names no architecture (GGUF files), a family that has a causal and no masked language model
    counts as causal.
    """
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if config.architectures:
        is_causal = any(name in causal for name in config.architectures)
    else:
        family = config.model_type
        is_causal = family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and family not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return AutoModelForCausalLM if is_causal else AutoModel


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Silence transformers' own progress bars (not those of downloads), and restore what was set before."""
    with _progress_lock:
        previous = transformers_logging.set_tqdm_hook(lambda _, args, kwargs: transformers_logging.EmptyTqdm(*args))
        try:
            yield
        finally:
            transformers_logging.set_tqdm_hook(previous)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The weight files transformers reads from a folder: one file, or the shards an index names.

    Raises ValueError if there are none, if a shard is missing, or if the folder holds an adapter instead of a model.
    """
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} holds a PEFT adapter (adapter_config.json). Merge it into its base model first: "
            "`model.merge_and_unload().save_pretrained(folder)` with peft, then load that folder."
        )
    for single, index in WEIGHTS:
        if (folder / single).is_file():
            return (folder / single,)
        if (folder / index).is_file():
            shards = sorted(set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()))
            if missing := [shard for shard in shards if not (folder / shard).is_file()]:
                raise ValueError(f"{folder} lacks {len(missing)} of {len(shards)} weight shards, e.g. {missing[0]}.")
            return tuple(folder / shard for shard in shards)
    raise ValueError(
        f"{folder} holds no weights: expected one of {', '.join(name for pair in WEIGHTS for name in pair)}. It has "
        f"{sorted(path.name for path in folder.iterdir())[:8]}."
    )


def load_module(folder: Path, *, dtype: torch.dtype) -> tuple[nn.Module, tuple[str, ...]]:
    """The folder's model on the CPU in eval mode, and the names of parameters the checkpoint lacks.

    Those are drawn at random without moving the global generator. For a causal language model they are an error; for a
    base model (often an unused pooling head) a warning. Raises ValueError if the folder does not load.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has no config.json, so it is no model folder. Give the folder that `save_pretrained` wrote; it "
            f"has {sorted(path.name for path in folder.iterdir())[:8]}."
        )
    weight_files(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kind = auto_class(config)
    with without_progress_bars(), torch.random.fork_rng(devices=[]):
        module, loading = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    return module.eval(), check_complete(module, loading["missing_keys"], folder)


def check_complete(module: nn.Module, missing_keys: set[str], source: Path) -> tuple[str, ...]:
    """The parameters that the checkpoint lacks, sorted; ValueError for a causal language model that lacks any."""
    untrained = tuple(sorted(missing_keys))
    if untrained:
        problem = f"{source} lacks {len(untrained)} parameters of {type(module).__name__}, e.g. {untrained[0]!r}"
        if type(module).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            raise ValueError(
                f"{problem}: they would be drawn at random. Use a complete checkpoint, or build the module yourself "
                "and wrap it with LoadedModel.from_module."
            )
        warnings.warn(
            f"{problem}: they were drawn at random and are named in provenance.untrained. Do not read what depends on "
            "them, or use a complete checkpoint.",
            stacklevel=4,
        )
    return untrained


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | str:
    """The folder's tokenizer, or the reason why there is none."""
    if not any(part in path.name.lower() for path in folder.iterdir() for part in TOKENIZER_FILE_PARTS):
        return f"{folder} has no tokenizer files"  # transformers would build an empty tokenizer of the family's class
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        return f"the tokenizer files in {folder} do not load: {error}"
