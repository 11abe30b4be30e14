"""A lens: hidden states behind (optional) affine translators, the model's final norm and its unembedding.

    q_l = softmax(cap tanh(factor (n(T_l(x)) W_U + b_U) / cap)),     T_l = identity for the logit lens

The norm's statistics are recomputed on what is read (nostalgebraist 2020, "interpreting GPT: the logit lens"), so that
at the last depth the lens is the model itself. Depths are r_0 = resid_pre.0 and r_l = resid_post.(l-1), L + 1 of them.

What a part writes (attn_out, mlp_out, head_out, a neuron) is no whole stream, and its own size is not the stream's:
    norm="own"    n(write), as if it were the stream: shape of a distribution, but the size of the write does not count;
    norm="gain"   g c(write), the norm's gain without its division: no biases and no cap; scores are proportional to
                  the write's direct effect on the logits at a given stream, so that rankings are those of attribution,
                  while probabilities are only a way to read them.
A head's write is what enters the stream: z W_O, and behind a norm after attention (Gemma 2 and 3) g o_h / rms(sum o).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy, coefficient
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.frozen_norm import FrozenNorm, frozen_norm
from microtome.lenses.head_writes import HeadWrites, head_writes
from microtome.lenses.short_repr import short_repr
from microtome.lenses.unembedding import Unembedding, unembedding_of

Translator = Callable[[Tensor], Tensor]
STREAMS = ("resid_pre", "resid_mid", "resid_post")
WRITES = ("attn_out", "mixer_out", "mlp_out", "head_out")


@dataclass(frozen=True, eq=False)
class Lens:
    """Reads sites as distributions over the vocabulary; made by `logit_lens_of` or by a translator's own `lens`.

    Attributes:
        name: shown in tables.
        unembedding: the model's end.
        sites: what is read, in order; each is one depth of the statistics.
        norm: how writes are normed (module docstring); streams are always normed by their own statistics.
        translators: applied to a site's value before the norm; none is the identity.
    """

    name: str
    unembedding: Unembedding
    sites: tuple[Site, ...]
    norm: str = "own"
    translators: Mapping[Site, Translator] = field(default_factory=dict)
    gain: FrozenNorm | None = None
    heads: Mapping[Site, HeadWrites] = field(default_factory=dict)
    coefficients: Mapping[Site, float | Tensor] = field(default_factory=dict)

    __repr__ = short_repr

    @property
    def reads(self) -> tuple[Site, ...]:
        """What a pass has to read for this lens."""
        needed = [read for site in self.sites for read in (self._head(site).reads if self._head(site) else (site,))]
        return tuple(dict.fromkeys(needed))

    @property
    def readout(self) -> dict:
        """weight, bias, factor, cap as `vocabulary_statistics` takes them."""
        end = self.unembedding
        plain = self.norm == "gain"
        return {
            "weight": end.weight,
            "bias": None if plain else end.bias,
            "factor": end.factor,
            "cap": None if plain else end.cap,
        }

    def with_translators(self, name: str, translators: Mapping[Site, Translator]) -> "Lens":
        """The same sites behind other translators."""
        return replace(self, name=name, translators=dict(translators))

    def normed(self, site: Site, value: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """One site's value, as it enters the stream, behind translator and norm."""
        translate = self.translators.get(site)
        value = value if translate is None else translate(value)
        return self.gain.folded(value) if self.gain is not None else self.unembedding.normed(value)

    def states(self, values: Mapping[Site, Tensor]) -> Float[Tensor, "depth token d_model"]:
        """All sites' states behind the norm, from the values of `reads`."""
        made: dict[Site, Tensor] = {}
        states = []
        for site in self.sites:
            heads = self._head(site)
            if heads is None:
                value = values[site] * self.coefficients.get(site, 1.0)
            else:
                if site.whole not in made:
                    made[site.whole] = heads(values)
                value = made[site.whole][:, site.head]
            states.append(self.normed(site, value))
        return torch.stack(states)

    def _head(self, site: Site) -> HeadWrites | None:
        return self.heads.get(site.whole)


def depths_of(model: LoadedModel | nn.Module | Anatomy) -> tuple[Site, ...]:
    """r_0 .. r_L: the stream before the first block and after each. KeyError where a block does not offer it."""
    anatomy = model if isinstance(model, Anatomy) else dissect(_module(model))
    sites = [anatomy.main[0].site("resid_pre"), *(block.site("resid_post") for block in anatomy.main)]
    for site in sites:
        anatomy.tap(site)
    return tuple(sites)


def logit_lens_of(
    model: LoadedModel | nn.Module,
    sites: Sequence[str | tuple | Site] | str | tuple | Site | None = None,
    *,
    norm: str = "own",
    name: str = "logit",
    anatomy: Anatomy | None = None,
) -> Lens:
    """The logit lens at these sites, by default at every depth.

    Args:
        sites: streams and writes: `"attn_out"` for all layers, `"head_out.3"` for all heads of one, `"head_out.3.1"`.
        norm: for writes, see the module docstring; "gain" is for writes alone.

    Raises:
        ValueError: a site that is neither a stream nor a write; "gain" for a stream; a model without unembedding.
        KeyError, IndexError: a site that this model does not offer.
    """
    if norm not in ("own", "gain"):
        raise ValueError(f"norm is {norm!r}. Give 'own' or 'gain'.")
    module = _module(model)
    anatomy = dissect(module) if anatomy is None else anatomy
    end = unembedding_of(module, anatomy)
    wanted = depths_of(anatomy) if sites is None else _single(anatomy, sites)
    if strange := [site for site in wanted if site.kind not in STREAMS + WRITES]:
        raise ValueError(
            f"{strange[0]} is neither a stream ({', '.join(STREAMS)}) nor what a part writes ({', '.join(WRITES)}). A "
            "vector such as a neuron's output row or a probe's direction is read with vector_words."
        )
    if norm == "gain" and (streams := [site for site in wanted if site.kind in STREAMS]):
        raise ValueError(f"{streams[0]} is a whole stream, which norm='gain' is not for. Read it with norm='own'.")
    layers = dict.fromkeys(site.whole for site in wanted if site.kind == "head_out")
    heads = {site: head_writes(module, site, anatomy=anatomy) for site in layers}
    taps = {site: anatomy.tap(site) for site in wanted if site.kind in WRITES and site.kind != "head_out"}
    return Lens(
        name,
        end,
        tuple(wanted),
        norm,
        gain=frozen_norm(end.norm, anatomy.d_model) if norm == "gain" else None,
        heads=heads,
        coefficients={site: coefficient(module, tap.factor, tap.vectors) for site, tap in taps.items()},
    )


def _single(anatomy: Anatomy, sites: Sequence[str | tuple | Site] | str | tuple | Site) -> tuple[Site, ...]:
    expanded = []
    for site in anatomy.expand(sites):
        if site.kind == "head_out" and site.head is None:
            expanded += [site.at(head=head) for head in range(anatomy.tap(site).head_count)]
        else:
            expanded.append(site)
    if not expanded:
        raise ValueError("sites is empty. Name at least one, such as 'resid_post', or leave it out for every depth.")
    return tuple(expanded)


def _module(model: LoadedModel | nn.Module) -> nn.Module:
    return model.module if isinstance(model, LoadedModel) else model
