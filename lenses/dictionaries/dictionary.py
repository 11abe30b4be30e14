"""A sparse dictionary of one site: x = sum of a few feature directions, found by an encoder of one layer.

    u   = normalised x  (- b_dec where the dictionary centres its input)
    pre = u W_enc + b_enc
    z   = relu(pre)                       "relu"
          relu(pre) at the k largest      "topk": a row may have fewer than k where pre is negative
          relu(pre) where pre > threshold "jumprelu", one threshold per feature, and "batchtopk", one for all
    x_hat = (z W_dec + b_dec), normalisation undone

BatchTopK chooses its k on average over a training batch; at inference it is a threshold (Bussmann et al. 2024,
arXiv 2412.06410), so that a token's features do not depend on its neighbours. Normalisations of the input, as SAELens
has them: "scale" (x s; "expected_average_only_in"), "layer_norm" ((x - mean) / (std + 1e-5) of each token, its std
unbiased) and "constant_norm" (x sqrt(width) / |x|).
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from microtome.capture.sites import Site
from microtome.lenses.dictionaries.dictionary_files import read_folder, write_folder
from microtome.lenses.short_repr import short_repr

KINDS = ("relu", "topk", "jumprelu", "batchtopk")
NORMALISATIONS = ("none", "scale", "layer_norm", "constant_norm")
_EPS = 1e-5


@dataclass(frozen=True, eq=False)
class Dictionary:
    """One dictionary; made by `train_dictionary` or `load_dictionary`.

    Attributes:
        encoder, encoder_bias: W_enc, b_enc.
        decoder, decoder_bias: W_dec, a row per feature, and b_dec.
        kind: "relu", "topk", "jumprelu" or "batchtopk".
        site: what it reads and rebuilds, such as "resid_post.12"; whole heads are laid side by side.
        k: of "topk"; of "batchtopk" the mean it was trained with, where known.
        threshold: of "jumprelu" and "batchtopk": one number, or one per feature.
        centred: whether b_dec is subtracted before encoding.
        normalisation, scale: of the input; `scale` is the factor of "scale".
        model: name of the model it belongs to, "" where unknown.
        facts: anything else worth keeping: layout, config, training. JSON values.
    """

    encoder: Float[Tensor, "width feature"]
    encoder_bias: Float[Tensor, " feature"]
    decoder: Float[Tensor, "feature width"]
    decoder_bias: Float[Tensor, " width"]
    kind: str
    site: str
    k: int | None = None
    threshold: Float[Tensor, "*some"] | None = None
    centred: bool = True
    normalisation: str = "none"
    scale: float | None = None
    model: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        object.__setattr__(self, "site", str(Site.parse(self.site)))
        require_shapes(self.tensors)
        _require_settings(self)
        for name, tensor in self.tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} of the dictionary of {self.site} holds NaN or infinity. Get it anew.")

    @property
    def width(self) -> int:
        """Channels of the site."""
        return self.encoder.shape[0]

    @property
    def features(self) -> int:
        """How many features."""
        return self.encoder.shape[1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name, the threshold where there is one."""
        names = ("encoder", "encoder_bias", "decoder", "decoder_bias", "threshold")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def encode(self, x: Float[Tensor, "*any width"]) -> Float[Tensor, "*any feature"]:
        """Activations z, in the dictionary's dtype.

        Raises:
            ValueError: x of another width.
        """
        return activations_of(self.before(x), self.kind, self.k, self.threshold)

    def before(self, x: Float[Tensor, "*any width"]) -> Float[Tensor, "*any feature"]:
        """What the features have before their activation function: pre."""
        self.require_width(x.shape[-1])
        u, _, _ = self._normalised(x.to(self.encoder))
        return (u - self.decoder_bias if self.centred else u) @ self.encoder + self.encoder_bias

    def decode(
        self, z: Float[Tensor, "*any feature"], x: Float[Tensor, "*any width"] | None = None
    ) -> Float[Tensor, "*any width"]:
        """x_hat of activations.

        Args:
            x: what z was encoded from; needed where each token was normalised by its own norm.

        Raises:
            ValueError: another number of features, or no x where it is needed.
        """
        if z.shape[-1] != self.features:
            raise ValueError(f"z has {z.shape[-1]} features; the dictionary of {self.site} has {self.features}.")
        found = z.to(self.decoder) @ self.decoder + self.decoder_bias
        if self.normalisation == "none":
            return found
        if self.normalisation == "scale":
            return found / self.scale
        if x is None:
            raise ValueError(f"this dictionary undoes {self.normalisation} of each token: give decode(z, x).")
        _, times, plus = self._normalised(x.to(self.encoder))
        return found * times + plus

    def __call__(self, x: Float[Tensor, "*any width"]) -> Float[Tensor, "*any width"]:
        """x_hat in x's dtype."""
        return self.decode(self.encode(x), x).to(x.dtype)

    def directions(self, *, unit: bool = False) -> Float[Tensor, "feature width"]:
        """Rows of the decoder in the site's own units; unit: each of length 1, a row of zeros staying so."""
        rows = self.decoder / self.scale if self.normalisation == "scale" else self.decoder
        return torch.nn.functional.normalize(rows, dim=1) if unit else rows

    def require_width(self, width: int) -> None:
        """Raise ValueError for a site of another width."""
        if width != self.width:
            raise ValueError(
                f"the dictionary of {self.site} has directions of {self.width} channels, and {width} are given. "
                "It belongs to another model or site."
            )

    def require_site(self, site: str | tuple | Site) -> None:
        """Raise ValueError for another site; resid_pre.l + 1 is resid_post.l by another name."""
        if _stream_name(Site.parse(site)) != _stream_name(Site.parse(self.site)):
            raise ValueError(
                f"the dictionary is of {self.site} ({self.model or 'model unknown'}), and is asked for at "
                f"{Site.parse(site)}. Use it at its own site, or load the one of that site."
            )

    def to(self, like: torch.dtype | torch.device | str) -> "Dictionary":
        """The same in another dtype or on another device."""
        return replace(self, **{name: tensor.to(like) for name, tensor in self.tensors.items()})

    def save(self, folder: str | Path) -> Path:
        """Write dictionary.safetensors and dictionary.json; the folder is made. `load_dictionary` reads it.

        Raises:
            TypeError: a fact that JSON cannot hold.
        """
        names = ("kind", "site", "k", "centred", "normalisation", "scale", "model")
        said = {name: getattr(self, name) for name in names} | {"facts": dict(self.facts)}
        return write_folder(Path(folder), self.tensors, said)

    @classmethod
    def load(cls, folder: str | Path) -> "Dictionary":
        """Read what `save` wrote, on the CPU.

        Raises:
            FileNotFoundError: one of the two files is missing.
            ValueError: the files are damaged, do not belong together, or are of another format.
        """
        tensors, said = read_folder(Path(folder))
        known = {one.name: one.default is MISSING and one.default_factory is MISSING for one in fields(cls)}
        given = [*tensors, *said]
        wrong = [name for name in given if name not in known or given.count(name) > 1]
        wrong += [name for name, is_needed in known.items() if is_needed and name not in given]
        types = {"kind": str, "site": str, "k": int | None, "centred": bool, "normalisation": str, "model": str}
        types |= {"scale": float | int | None, "facts": dict}
        wrong += [name for name, kind in types.items() if name in said and not isinstance(said[name], kind)]
        if wrong:
            raise ValueError(f"{wrong[0]} is missing in {folder}, or unknown, or of another type. Write it again.")
        return cls(**tensors, **said)

    def to_frame(self) -> pd.DataFrame:
        """A row per feature: norms of its two directions, their cosine, bias and threshold (NaN where none)."""
        inward, outward = self.encoder.T.double(), self.decoder.double()
        threshold = torch.tensor(torch.nan) if self.threshold is None else self.threshold
        columns = {
            "encoder_norm": inward.norm(dim=1),
            "decoder_norm": outward.norm(dim=1),
            "cosine": torch.cosine_similarity(inward, outward, dim=1),
            "encoder_bias": self.encoder_bias,
            "threshold": threshold.expand(self.features),
        }
        frame = {name: value.detach().double().cpu().numpy() for name, value in columns.items()}
        return pd.DataFrame({"feature": range(self.features), **frame})

    def _normalised(self, x: Tensor) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """u, and what undoes it: u times + plus."""
        if self.normalisation == "scale":
            return x * self.scale, 1 / self.scale, 0.0
        if self.normalisation == "layer_norm":
            mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
            return (x - mean) / (deviation + _EPS), deviation, mean
        if self.normalisation == "constant_norm":
            length = x.norm(dim=-1, keepdim=True) / self.width**0.5
            return x / length.where(length > 0, 1.0), length, 0.0
        return x, 1.0, 0.0


def activations_of(
    pre: Float[Tensor, "*any feature"], kind: str, k: int | None, threshold: Float[Tensor, "*some"] | None
) -> Float[Tensor, "*any feature"]:
    """z of pre, by the formulas of the module docstring."""
    if kind == "relu":
        return pre.relu()
    if kind == "topk":
        largest, places = pre.topk(k, dim=-1, sorted=False)
        return torch.zeros_like(pre).scatter(-1, places, largest.relu())
    return pre.relu() * (pre > threshold)


def require_shapes(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for fields of a dictionary, by name, whose shapes do not go together."""
    if tensors["encoder"].ndim != 2:
        raise ValueError(f"the encoder is {tuple(tensors['encoder'].shape)}; expected [width, feature].")
    width, features = tensors["encoder"].shape
    if not width or not features:
        raise ValueError(f"the encoder is {(width, features)}: there is no feature, or no channel. Get it anew.")
    expected = {"encoder_bias": (features,), "decoder": (features, width), "decoder_bias": (width,)}
    for name, shape in expected.items():
        if (found := tuple(tensors[name].shape)) != shape:
            raise ValueError(f"an encoder {(width, features)} goes with a {name} {shape}, got {found}.")
    threshold = tensors.get("threshold")
    if threshold is not None and tuple(threshold.shape) not in ((), (features,)):
        raise ValueError(f"the threshold is {tuple(threshold.shape)}; expected one number, or {features}.")


def _require_settings(it: Dictionary) -> None:
    if it.kind not in KINDS:
        raise ValueError(f"kind is {it.kind!r}; a dictionary is one of {', '.join(KINDS)}.")
    if it.kind == "topk" and (it.k is None or not 1 <= it.k <= it.features):
        raise ValueError(f"a topk dictionary of {it.features} features needs a k from 1 to that, got {it.k}.")
    if it.kind in ("jumprelu", "batchtopk") and it.threshold is None:
        raise ValueError(f"a {it.kind} dictionary needs a threshold: one number, or one per feature.")
    if it.kind in ("relu", "topk") and it.threshold is not None:
        raise ValueError(f"a {it.kind} dictionary has no threshold. Leave it out, or give kind='jumprelu'.")
    if it.normalisation not in NORMALISATIONS:
        raise ValueError(f"normalisation is {it.normalisation!r}; one of {', '.join(NORMALISATIONS)}.")
    if (it.normalisation == "scale") != (it.scale is not None) or not (it.scale is None or 0 < it.scale < torch.inf):
        raise ValueError(
            f"normalisation {it.normalisation!r} with scale={it.scale}: 'scale' needs a positive factor, others none."
        )


def _stream_name(site: Site) -> Site:
    """One name for the two of a place between blocks."""
    if site.kind == "resid_pre" and site.layer:
        return Site("resid_post", site.layer - 1, stack=site.stack, call=site.call)
    return site
