"""Read a dictionary from a folder: ours, or one published by SAELens, sparsify or dictionary_learning.

    load_dictionary("gpt2-small-res-jb/blocks.8.hook_resid_pre")      SAELens: sae_weights.safetensors, cfg.json
    load_dictionary("sae-pythia-70m", site="resid_post.3")            sparsify: layers.3/sae.safetensors, cfg.json
    load_dictionary("trainer_0", site="resid_post.8")                 dictionary_learning: ae.pt or ae.safetensors

Which layout it is follows from the names of its tensors; what each layout means, and where that was checked, stands in
`layouts`. Nothing is fetched, and no code of a file is run (`ae.pt` is read as tensors alone).
"""

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from microtome.capture.sites import Site
from microtome.lenses.dictionaries import dictionary_files
from microtome.lenses.dictionaries.dictionary import Dictionary, require_shapes
from microtome.lenses.dictionaries.layouts import as_tensors, layout_of

_WEIGHTS = ("sae_weights.safetensors", "sae.safetensors", "ae.safetensors", "ae.pt")
_CONFIGS = ("cfg.json", "config.json")
_BLOCK = re.compile(r"^(?:.*\.)?(?:layers|h|blocks)\.(\d+)$")  # a whole block: its output is the stream behind it
_KINDS_OF_VALUES: tuple[tuple[tuple[str, ...], Any, str], ...] = (
    (("", "metadata", "trainer", "activation_fn_kwargs"), dict, "an object"),
    (("k",), int | float, "a number"),
    (("d_in", "d_sae", "num_latents", "hook_head_index", "hook_point_head_index"), int, "a whole number"),
    (("architecture", "hook_name", "hook_point", "activation_fn", "activation_fn_str"), str, "a name"),
)
_LEARNED_SITE = re.compile(r"^(resid_pre|resid_post|attn_out|mlp_out)(?:_layer)?_(\d+)$")


def load_dictionary(
    path: str | Path, site: str | tuple | Site | None = None, *, scale: float | None = None
) -> Dictionary:
    """The dictionary in a folder, or of a weights file with its JSON beside it, in float32 on the CPU.

    Args:
        path: the folder; one of several folders is chosen by `site`, by their names.
        site: what it is a dictionary of, where the files do not say; checked where they do.
        scale: factor of the input, for a SAELens config with "expected_average_only_in".

    Raises:
        FileNotFoundError: no weights there.
        ValueError: another architecture than relu, topk, jumprelu and batchtopk (a gated one, a transcoder), tensors
            missing, unknown or of wrong shapes, NaN, a site that is not known or another one, damaged files.
    """
    wanted = None if site is None else Site.parse(site)
    weights = _weights(Path(path), wanted)
    if weights.name == dictionary_files.TENSORS:
        found = Dictionary.load(weights.parent)
        if wanted is not None:
            found.require_site(wanted)
        return found
    try:
        config = _config(weights.parent)
        tensors = as_tensors(_tensors(weights))
        layout, read = layout_of(tensors, config)
        fields = read(tensors, config, scale)
        told = _told_site(config, weights.parent.name)
        chosen = wanted if told is None else told
        if chosen is None:
            raise ValueError("no file says which site it is of. Give site=, such as site='resid_post.12'.")
        require_shapes(fields)
        facts = {"layout": layout, "config": config}
        found = Dictionary(**fields, site=str(chosen), model=_model(config), facts=facts)
        if wanted is not None:
            found.require_site(wanted)
        _require_said_shape(found, config)
    except ValueError as error:
        raise ValueError(f"{weights}: {error}") from error
    return found


def _weights(path: Path, site: Site | None) -> Path:
    """The weights file of a folder, or of the one of its folders that has the site's name."""
    if path.is_file():
        return path
    names = (dictionary_files.TENSORS, *_WEIGHTS)
    for name in names:
        if (path / name).is_file():
            return path / name
    within = [each for each in sorted(path.iterdir()) if each.is_dir()] if path.is_dir() else []
    named = [each for each in within if site is not None and _named_site(each.name) == site]
    for name in names:
        if named and (named[0] / name).is_file():
            return named[0] / name
    others = [each.name for each in within if any((each / name).is_file() for name in names)]
    said = f" It has {', '.join(others[:6])}: give one of these folders, or its site." if others else ""
    raise FileNotFoundError(f"there is no {', '.join(names)} in {path}.{said}")


def _tensors(path: Path) -> Any:
    if path.suffix != ".pt":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"it is damaged ({error}). Get the file anew.") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"it cannot be read as tensors: {error}") from error


def _config(folder: Path) -> dict[str, Any]:
    """cfg.json or config.json, `metadata` within it laid flat; empty where there is none."""
    for name in _CONFIGS:
        if (folder / name).is_file():
            try:
                said = json.loads((folder / name).read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"{name} is damaged ({error}). Get the file anew.") from error
            _require_kinds(name, {"": said})
            _require_kinds(name, said)
            flat = {**(said.get("metadata") or {}), **said}
            for part in (flat, flat.get("trainer") or {}, flat.get("activation_fn_kwargs") or {}):
                _require_kinds(name, part)
            return flat
    return {}


def _require_kinds(file: str, said: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that is of another JSON type than its key calls for; null stands for no key."""
    for keys, kind, word in _KINDS_OF_VALUES:
        for key in keys:
            value = said.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
                what = f"{key} of {file}" if key else file
                raise ValueError(f"{what} is {type(value).__name__} ({value!s:.40}), expected {word}. Get it anew.")


def _told_site(config: Mapping[str, Any], folder: str) -> Site | None:
    """The site that the config names, or the folder."""
    hook, out = config.get("hook_name") or config.get("hook_point"), config.get("hook_name_out")
    if out and out != hook:
        raise ValueError(f"it reads {hook} and writes {out}: a transcoder is not read. Give an autoencoder.")
    head = config.get("hook_head_index", config.get("hook_point_head_index"))
    if hook is not None:
        site = Site.parse(hook)
        return site if head is None else site.at(head=head)
    trainer = config.get("trainer") or {}
    if learned := _LEARNED_SITE.match(str(trainer.get("submodule_name", ""))):
        return Site(learned[1], int(learned[2]))
    return _named_site(folder)


def _named_site(folder: str) -> Site | None:
    """The site that a folder is named after, None for any other name. Parts of a block are not guessed."""
    if block := _BLOCK.match(folder):
        return Site("resid_post", int(block[1]))
    try:
        return Site.parse(folder)
    except ValueError:
        return None


def _model(config: Mapping[str, Any]) -> str:
    return str(config.get("model_name") or (config.get("trainer") or {}).get("lm_name") or "")


def _require_said_shape(found: Dictionary, config: Mapping[str, Any]) -> None:
    for name, number in (("d_in", found.width), ("d_sae", found.features), ("num_latents", found.features)):
        if config.get(name) and int(config[name]) != number:
            raise ValueError(f"the config says {name} {config[name]}, the tensors {number}. They do not go together.")
