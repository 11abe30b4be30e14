"""Published layouts of sparse autoencoders, each turned into the fields of a `Dictionary`.

Read as facts on 1 December 2026, shapes and order of operations checked in the source of each package:

SAELens 6 (decoderesearch/SAELens, sae_lens/saes/*.py, loading/pretrained_sae_loaders.py). W_enc [d, F], b_enc [F],
    W_dec [F, d], b_dec [d]; threshold [F] of jumprelu (log_threshold in old checkpoints), topk_threshold of a batchtopk
    in training. u = norm(x) - b_dec if apply_b_dec_to_input; pre = u W_enc + b_enc; topk: relu of the k largest;
    jumprelu: relu(pre) where pre > relu(threshold). A batchtopk is saved as jumprelu when its training ends.
    rescale_acts_by_decoder_norm: pre times |row of W_dec| before choosing, z over it before decoding. Configs before
    6.0 say hook_point or hook_name, activation_fn_str or activation_fn, activation_fn_kwargs {k}, and no `metadata`.
sparsify (EleutherAI/sparsify, sparsify/sparse_coder.py, fused_encoder.py). encoder.weight [F, d], encoder.bias [F],
    W_dec [F, d], b_dec [d]; relu((x - b_dec) W^T + b), then the k largest: the same as relu of the k largest.
dictionary_learning (saprmarks/dictionary_learning, dictionary.py, trainers/top_k.py, batch_top_k.py). encoder.weight
    [F, d], encoder.bias [F], decoder.weight [d, F] and: AutoEncoder: bias [d], subtracted; AutoEncoderNew: decoder.bias
    [d], not subtracted; AutoEncoderTopK, BatchTopKSAE: b_dec [d], subtracted, k, threshold (-1 while unset);
    BatchTopK: relu(pre) where it is > threshold. JumpReluAutoEncoder: W_enc, b_enc, W_dec, b_dec, threshold, b_dec not
    subtracted; pre > threshold, then z times |row of W_dec|, undone in decode.

Norms that are multiplied in and out again are folded: W_enc and b_enc (and the threshold that is compared with their
product) times the norms, W_dec over them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from microtome.lenses.dictionaries.dictionary import require_shapes

Fields = dict[str, Any]
_SAE_LENS_KINDS = {
    "standard": "relu",
    "relu": "relu",
    "topk": "topk",
    "jumprelu": "jumprelu",
    "batchtopk": "batchtopk",
    "matryoshka_batchtopk": "batchtopk",
}
_SAE_LENS_NORMS = {
    None: "none",
    False: "none",
    "none": "none",
    True: "scale",
    "expected_average_only_in": "scale",
    "layer_norm": "layer_norm",
    "constant_norm_rescale": "constant_norm",
}
_LEARNED = ("AutoEncoder", "AutoEncoderNew", "AutoEncoderTopK", "BatchTopKSAE", "JumpReluAutoEncoder")
_GATED = ("r_mag", "b_gate", "gate_bias")


def layout_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[str, Callable[..., Fields]]:
    """Name and reader of the layout that these tensors are in.

    Raises:
        ValueError: a gated dictionary, or names that are of no layout.
    """
    names = set(tensors)
    if names & set(_GATED):
        raise ValueError("a gated sparse autoencoder is not read: its features have a second encoder. Give another.")
    if {"encoder.weight", "W_dec"} <= names:
        return "sparsify", sparsify
    if {"encoder.weight", "decoder.weight"} <= names or ("W_enc" in names and "trainer" in config):
        return "dictionary_learning", dictionary_learning
    if "W_enc" in names:
        return "sae_lens", sae_lens
    raise ValueError(
        f"tensors named {', '.join(sorted(names)[:8]) or '(none)'} are of no known layout. Expected W_enc and W_dec "
        "(SAELens), encoder.weight and W_dec (sparsify), or encoder.weight and decoder.weight (dictionary_learning)."
    )


def sae_lens(tensors: Mapping[str, Tensor], config: Mapping[str, Any], scale: float | None) -> Fields:
    """Fields of a SAELens autoencoder. Errors as of `load_dictionary`."""
    said = config.get("architecture") or "standard"
    activation = config.get("activation_fn") or config.get("activation_fn_str") or "relu"
    if said == "standard" and activation == "topk":
        said, activation = "topk", "relu"
    if said not in _SAE_LENS_KINDS:
        raise ValueError(f"architecture is {said!r}; read are {', '.join(_SAE_LENS_KINDS)}. Give another dictionary.")
    if activation not in ("relu", said):
        raise ValueError(f"the activation function of a {said} is {activation!r}, which is not read. Give another.")
    kind, tensors = _SAE_LENS_KINDS[said], dict(tensors)
    factor = tensors.pop("scaling_factor", tensors.pop("finetuning_scaling_factor", None))
    if factor is not None and not bool((factor == 1).all()):
        raise ValueError("a finetuning scaling factor is not 1. Multiply the rows of W_dec by it first, and remove it.")
    threshold = _threshold(tensors, kind)
    W_enc, b_enc, W_dec, b_dec = _taken(tensors, "W_enc", "b_enc", "W_dec", "b_dec")
    W_enc, b_enc, W_dec = W_enc.float(), b_enc.float(), W_dec.float()
    if kind in ("topk", "batchtopk") and config.get("rescale_acts_by_decoder_norm", False):
        require_shapes({"encoder": W_enc, "encoder_bias": b_enc, "decoder": W_dec, "decoder_bias": b_dec})
        W_enc, b_enc, W_dec = _folded(W_enc, b_enc, W_dec)
    kwargs = config.get("activation_fn_kwargs") or {}
    return {
        "encoder": W_enc,
        "encoder_bias": b_enc,
        "decoder": W_dec,
        "decoder_bias": b_dec.float(),
        "kind": kind,
        "k": _whole(config.get("k") or kwargs.get("k")) if kind == "topk" else None,
        "threshold": threshold,
        "centred": bool(config.get("apply_b_dec_to_input", True)),
        **_normalisation(config, scale),
    }


def sparsify(tensors: Mapping[str, Tensor], config: Mapping[str, Any], scale: float | None) -> Fields:
    """Fields of a sparsify coder. Errors as of `load_dictionary`."""
    _refuse_scale(scale)
    refused = ("transcode", "skip_connection", "signed", "embed_skip", "gram_lookup")
    if on := [name for name in refused if config.get(name)]:
        raise ValueError(f"{on[0]} is on: this is no plain autoencoder of one site. Give one without {', '.join(on)}.")
    if (activation := config.get("activation", "topk")) != "topk":
        raise ValueError(f"activation is {activation!r}; of sparsify's, 'topk' is read. Give another dictionary.")
    if config.get("k") is None:
        raise ValueError("cfg.json says no k: how many features a token has. Put it there.")
    weight, bias, W_dec, b_dec = _taken(dict(tensors), "encoder.weight", "encoder.bias", "W_dec", "b_dec")
    return _plain(_turned("encoder.weight", weight), bias, W_dec, b_dec) | {"kind": "topk", "k": _whole(config["k"])}


def dictionary_learning(tensors: Mapping[str, Tensor], config: Mapping[str, Any], scale: float | None) -> Fields:
    """Fields of a dictionary_learning autoencoder. Errors as of `load_dictionary`."""
    _refuse_scale(scale)
    trainer, tensors = config.get("trainer") or {}, dict(tensors)
    said = trainer.get("dict_class") or _class_of(tensors)
    if said not in _LEARNED:
        raise ValueError(f"dict_class is {said!r}; read are {', '.join(_LEARNED)}. Give another dictionary.")
    if said == "JumpReluAutoEncoder":
        threshold = _threshold(tensors, "jumprelu")
        W_enc, b_enc, W_dec, b_dec = (t.float() for t in _taken(tensors, "W_enc", "b_enc", "W_dec", "b_dec"))
        found = {"encoder": W_enc, "encoder_bias": b_enc, "decoder": W_dec, "decoder_bias": b_dec}
        require_shapes(found | {"threshold": threshold})
        threshold = threshold * W_dec.norm(dim=1)
        return _plain(*_folded(W_enc, b_enc, W_dec), b_dec, centred=False) | {
            "kind": "jumprelu",
            "threshold": threshold,
        }
    k, threshold = tensors.pop("k", trainer.get("k")), tensors.pop("threshold", None)
    bias_name = {"AutoEncoder": "bias", "AutoEncoderNew": "decoder.bias"}.get(said, "b_dec")
    weight, bias, out, b_dec = _taken(tensors, "encoder.weight", "encoder.bias", "decoder.weight", bias_name)
    weight, out = _turned("encoder.weight", weight), _turned("decoder.weight", out)
    fields = _plain(weight, bias, out, b_dec, centred=said != "AutoEncoderNew")
    if said in ("AutoEncoder", "AutoEncoderNew"):
        return fields | {"kind": "relu"}
    if k is None:
        raise ValueError(f"an {said} needs a k, and neither its tensors nor config.json say one.")
    if said == "AutoEncoderTopK":
        return fields | {"kind": "topk", "k": _whole(k)}
    if threshold is None or bool((threshold < 0).any()):
        raise ValueError("the threshold of this BatchTopKSAE was never set (it is -1): train it longer, or give one.")
    return fields | {"kind": "batchtopk", "k": _whole(k), "threshold": threshold.float()}


def _plain(
    encoder: Tensor, encoder_bias: Tensor, decoder: Tensor, decoder_bias: Tensor, *, centred: bool = True
) -> Fields:
    parts = {"encoder": encoder, "encoder_bias": encoder_bias, "decoder": decoder, "decoder_bias": decoder_bias}
    return {name: tensor.float().contiguous() for name, tensor in parts.items()} | {"centred": centred}


def _whole(k: Any) -> int | None:
    if k is None or (isinstance(k, int | float) and k == k // 1) or (isinstance(k, Tensor) and k.numel() == 1):
        return None if k is None else int(k)
    raise ValueError(f"k is {k!s:.40}; expected a whole number of features. Get the file anew.")


def _turned(name: str, weight: Tensor) -> Tensor:
    if weight.ndim != 2:
        raise ValueError(f"{name} is {tuple(weight.shape)}; expected a matrix. Get the file anew.")
    return weight.T


def _class_of(tensors: Mapping[str, Tensor]) -> str:
    """The class where no config says it."""
    if "b_dec" in tensors:
        raise ValueError(
            "AutoEncoderTopK and BatchTopKSAE have the same tensors, and no config.json beside them says which this "
            "is. Put one there: {'trainer': {'dict_class': 'BatchTopKSAE', ...}}."
        )
    return "AutoEncoder" if "bias" in tensors else "AutoEncoderNew"


def _taken(tensors: dict[str, Tensor], *names: str) -> list[Tensor]:
    """These tensors, and no others."""
    if missing := [name for name in names if name not in tensors]:
        raise ValueError(f"there is no tensor {', '.join(missing)}; found {', '.join(sorted(tensors))}.")
    if strange := sorted(set(tensors) - set(names)):
        raise ValueError(
            f"tensors {', '.join(strange[:4])} are not known in this layout, and would be left out without a word. "
            "Remove them if they change nothing."
        )
    return [tensors[name] for name in names]


def _threshold(tensors: dict[str, Tensor], kind: str) -> Tensor | None:
    """The threshold, taken out of the tensors; negative ones count as 0, as relu'd pre-activations make them."""
    if kind not in ("jumprelu", "batchtopk"):
        return None
    if "log_threshold" in tensors:
        return tensors.pop("log_threshold").float().exp()
    name = "topk_threshold" if "topk_threshold" in tensors else "threshold"
    if name not in tensors:
        raise ValueError(f"a {kind} dictionary has no tensor threshold; found {', '.join(sorted(tensors))}.")
    return tensors.pop(name).float().relu()


def _folded(encoder: Tensor, bias: Tensor, decoder: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    norms = decoder.norm(dim=1)
    if not bool((norms > 0).all()):
        raise ValueError(f"row {int(norms.argmin())} of W_dec is zero, and z is divided by its norm. Remove it.")
    return encoder * norms, bias * norms, decoder / norms[:, None]


def _normalisation(config: Mapping[str, Any], scale: float | None) -> Fields:
    said = config.get("normalize_activations")
    if isinstance(said, list | dict) or said not in _SAE_LENS_NORMS:
        known = ", ".join(name for name in _SAE_LENS_NORMS if isinstance(name, str))
        raise ValueError(f"normalize_activations is {said!r}; read are {known}. Give another dictionary.")
    found = _SAE_LENS_NORMS[said]
    if found != "scale":
        _refuse_scale(scale)
        return {"normalisation": found}
    if scale is None:
        raise ValueError(
            "normalize_activations is 'expected_average_only_in', and its factor is in no file: give scale=, "
            "sqrt(width) / mean |x| over the training tokens, or scale=1 if the factor is in the weights already."
        )
    return {"normalisation": "scale", "scale": float(scale)}


def _refuse_scale(scale: float | None) -> None:
    if scale is not None:
        raise ValueError(f"scale={scale} is given for a dictionary whose input is not scaled. Leave it out.")


def as_tensors(held: Any) -> dict[str, Tensor]:
    """Refuses what is no tensor of numbers. ValueError says which."""
    if not isinstance(held, Mapping) or not all(isinstance(name, str) for name in held):
        raise ValueError(f"it holds {type(held).__name__}, not tensors by name. Give the state of the autoencoder.")
    for name, value in held.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {type(value).__name__}, not a tensor. Give the state of the autoencoder.")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"tensor {name} holds NaN or infinity. Get the file anew.")
    return dict(held)
