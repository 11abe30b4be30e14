"""The tuned lens: an affine translator per depth, behind which the model's end says what it says at the last depth.

    q_l = softmax(n(T_l(r_l)) W_U + b_U),     T_l(r) = r + r A_l + b_l,     loss = token mean of KL(model || q_l)

Belrose et al. 2023 (arXiv:2303.08112), equations 7 to 9. A_l = 0, b_l = 0 is the logit lens exactly. Translators exist
for r_0 .. r_{L-1}; r_L has none. `fit_tuned_lens` trains them; published artefacts are read by `read_published`.
Beware: a translator learns what the corpus makes likely besides what the stream says; judge it on other documents, and
beside the ridge map, which has seen no distribution at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.lens import Lens, depths_of, logit_lens_of
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.made_for import facts_of, weights_of
from microtome.lenses.tuned_files import read_folder, read_published_folder, write_folder


@dataclass(frozen=True, eq=False)
class TunedLens:
    """Translators of a model's depths.

    Attributes:
        sites: the depths that have one, in order.
        weight, bias: A_l and b_l, float32, on the CPU.
        history: columns step, site, kl (held out, nats, tuned), logit_kl, start_kl: one row per evaluation and depth.
        facts: weight_sha256 and name of the model, the settings, where the texts came from; JSON values.
    """

    sites: tuple[str, ...]
    weight: Float[Tensor, "depth d_model d_model"]
    bias: Float[Tensor, "depth d_model"]
    history: pd.DataFrame = field(default_factory=pd.DataFrame)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.sites) == len(self.weight) == len(self.bias):
            raise ValueError(f"{len(self.sites)} sites, {len(self.weight)} weights and {len(self.bias)} biases differ.")

    def __repr__(self) -> str:
        return f"TunedLens({len(self.sites)} depths, d_model {self.bias.shape[1]}, of {self.facts.get('model')!r})"

    def translate(self, site: str | tuple | Site, x: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """x + x A + b of one depth, in float32 or wider. KeyError for a site without a translator."""
        name = str(Site.parse(site))
        if name not in self.sites:
            raise KeyError(f"{name} has no translator; these have: {', '.join(self.sites)}.")
        number = self.sites.index(name)
        return translated(x, self.weight[number], self.bias[number])

    def maps(self) -> dict[str, LinearMap]:
        """The translators as maps r -> r (I + A) + b, by site."""
        eye = torch.eye(self.weight.shape[1])
        last = f"resid_post.{self.facts['layers'] - 1}" if "layers" in self.facts else ""
        return {
            site: LinearMap(eye + weight, bias, "tuned", site, last)
            for site, weight, bias in zip(self.sites, self.weight, self.bias, strict=True)
        }

    def lens(self, model: LoadedModel | nn.Module, *, name: str = "tuned", any_weights: bool = False) -> Lens:
        """The lens on a model: its depths that have a translator, and r_L without one.

        Args:
            any_weights: take a model of other weights too, as published artefacts need that know no hash.

        Raises:
            ValueError: the model has another width, other weights, or not these depths.
        """
        width = self.weight.shape[1]
        plain = logit_lens_of(model)
        if plain.unembedding.weight.shape[1] != width:
            raise ValueError(f"the lens is for d_model {width}; this model has {plain.unembedding.weight.shape[1]}.")
        depths = depths_of(model)
        if strange := [site for site in self.sites if site not in map(str, depths)]:
            raise ValueError(f"the lens has translators for {strange}, which this model of {len(depths) - 1} lacks.")
        held = self.facts.get("weight_sha256")
        if not any_weights and held != weights_of(model):
            raise ValueError(
                f"the lens was made for weights {str(held)[:12]} ({self.facts.get('model')}); this model's are "
                f"{weights_of(model)[:12]}. Train one for this model, or pass any_weights=True if you want it so."
            )
        sites = tuple(site for site in depths if str(site) in self.sites or site == depths[-1])
        device = plain.unembedding.weight.device
        weight, bias = self.weight.to(device), self.bias.to(device)
        translators = {
            site: partial(translated, weight=weight[n], bias=bias[n])
            for n, site in enumerate(map(Site.parse, self.sites))
        }
        return logit_lens_of(model, sites).with_translators(name, translators)

    def save(self, folder: str | Path) -> Path:
        """Write `translators.safetensors` and `tuned_lens.json`, each whole or not at all; returns the folder."""
        history = self.history.to_dict(orient="list")
        return write_folder(Path(folder), self.sites, self.weight, self.bias, history, dict(self.facts))

    @classmethod
    def load(cls, folder: str | Path) -> "TunedLens":
        """Read what `save` wrote. FileNotFoundError, ValueError for a folder that is none or damaged."""
        sites, weight, bias, history, facts = read_folder(Path(folder))
        return cls(sites, weight, bias, pd.DataFrame(history), facts)

    @classmethod
    def read_published(cls, folder: str | Path) -> "TunedLens":
        """Read an artefact of the authors' package: `config.json` and `params.pt`, whose layer l is that of r_l.

        Such a lens knows the name of its model and no hash of its weights: use it with `lens(model, any_weights=True)`.
        Raises FileNotFoundError, and ValueError for anything but the linear tuned lens of that package.
        """
        sites, weight, bias, facts = read_published_folder(Path(folder))
        return cls(sites, weight, bias, pd.DataFrame(), facts)


def translated(
    x: Float[Tensor, "*any d_model"], weight: Float[Tensor, "d_model d_model"], bias: Float[Tensor, " d_model"]
) -> Float[Tensor, "*any d_model"]:
    """x + x A + b: float32 inside (float64 for float64), returned in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    with torch.autocast(x.device.type, enabled=False):
        return (wide + wide @ weight.to(wide) + bias.to(wide)).to(x.dtype)


def zero_tuned_lens(model: LoadedModel | nn.Module) -> TunedLens:
    """All translators zero: the logit lens."""
    depths = depths_of(model)[:-1]
    width = logit_lens_of(model).unembedding.weight.shape[1]
    facts = facts_of(model) | {"layers": len(depths)}
    zeros = torch.zeros(len(depths), width, width)
    return TunedLens(tuple(map(str, depths)), zeros, torch.zeros(len(depths), width), facts=facts)
