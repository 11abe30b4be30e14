"""Names of the places in a transformer that can be read or edited, and the spellings people already use for them.

A site is written `[stack.]kind[.layer[.head]][@call]`: `resid_post.12`, `z.5.3`, `final_norm`,
`encoder.resid_post.3`, `resid_post.3@1` (second call of a module that runs several times).
TransformerLens names (`blocks.5.attn.hook_z`, both canonical and legacy) and its shorthands
(`("z", 5)`, `"z5"`) resolve to the same sites. A name without a layer stands for every layer.

What a kind means is in `KINDS`. k and v heads are numbered as key-value heads, so a model with grouped
queries has fewer of them than of q, z, head_out and pattern.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple


class Kind(NamedTuple):
    """What one kind of site is: whether its name takes a layer and a head, its axes, and one sentence."""

    per_layer: bool
    per_head: bool
    axes: str
    meaning: str


KINDS: dict[str, Kind] = {
    "embed": Kind(False, False, "batch position d_model", "output of the token embedding module"),
    "resid_pre": Kind(True, False, "batch position d_model", "residual stream entering a block"),
    "resid_mid": Kind(True, False, "batch position d_model", "residual stream between mixer and MLP"),
    "resid_post": Kind(True, False, "batch position d_model", "residual stream leaving a block"),
    "attn_out": Kind(
        True,
        False,
        "batch position d_model",
        "what attention adds to the stream (after its post-norm, before a factor)",
    ),
    "mixer_out": Kind(
        True,
        False,
        "batch position d_model",
        "what a mixer without softmax adds to the stream: a recurrence, a convolution, linear attention",
    ),
    "mlp_out": Kind(
        True,
        False,
        "batch position d_model",
        "what the MLP adds to the stream (after its post-norm, before a factor)",
    ),
    "cross_out": Kind(True, False, "batch position d_model", "what attention to another sequence adds to the stream"),
    "extra_out": Kind(True, False, "batch position d_model", "what a further input adds at its own position"),
    "mlp_act": Kind(True, False, "batch position d_mlp", "input of the MLP's last linear map: the neurons"),
    "q": Kind(True, True, "batch position head d_head", "queries after any query norm, before rotation"),
    "k": Kind(True, True, "batch position head d_head", "keys after any key norm, before rotation; key-value heads"),
    "q_rot": Kind(True, True, "batch position head d_head", "queries as attention uses them, after rotation"),
    "k_rot": Kind(
        True, True, "batch position head d_head", "keys as attention uses them; with a cache, all keys so far"
    ),
    "v": Kind(True, True, "batch position head d_head", "values; key-value heads"),
    "z_attn": Kind(
        True, True, "batch position head d_head", "attention-weighted values before a gate or norm, where z is after it"
    ),
    "z": Kind(True, True, "batch position head d_head", "attention-weighted values: the output projection's input"),
    "head_out": Kind(True, True, "batch position head d_model", "one head's write: z W_O of that head, without bias"),
    "pattern": Kind(True, True, "batch head query key", "attention probabilities of chosen heads and query rows"),
    "router": Kind(True, False, "batch position expert", "logits of the expert router"),
    "state": Kind(
        True, False, "batch ...", "recurrent state that a call leaves in a cache; not a convolution's window"
    ),
    "final_norm": Kind(False, False, "batch position d_model", "output of the last norm, the unembedding's input"),
    "logits": Kind(False, False, "batch position vocab", "next-token logits as the model returns them"),
}

# TransformerLens 4.3: the last parts of canonical and legacy names, after "blocks.L."
_TRANSFORMER_LENS_BLOCK = {
    "hook_in": "resid_pre",
    "hook_resid_pre": "resid_pre",
    "ln2.hook_in": "resid_mid",
    "hook_resid_mid": "resid_mid",
    "hook_out": "resid_post",
    "hook_resid_post": "resid_post",
    "attn.q.hook_out": "q",
    "attn.hook_q": "q",
    "attn.k.hook_out": "k",
    "attn.hook_k": "k",
    "attn.v.hook_out": "v",
    "attn.hook_v": "v",
    "attn.hook_rot_q": "q_rot",
    "attn.hook_rot_k": "k_rot",
    "attn.o.hook_in": "z",
    "attn.hook_z": "z",
    "attn.hook_result": "head_out",
    "attn.hook_pattern": "pattern",
    "attn.hook_out": "attn_out",
    "hook_attn_out": "attn_out",
    "mlp.hook_out": "mlp_out",
    "hook_mlp_out": "mlp_out",
    "mlp.hook_post": "mlp_act",
    "mlp.out.hook_in": "mlp_act",
}
_TRANSFORMER_LENS_WHOLE = {
    "embed.hook_out": "embed",
    "hook_embed": "embed",
    "ln_final.hook_out": "final_norm",
    "ln_final.hook_normalized": "final_norm",
    "unembed.hook_out": "logits",
}
_SHORTHAND = {"result": "head_out", "attn": "pattern", "post": "mlp_act", "rot_q": "q_rot", "rot_k": "k_rot"}

_BLOCK_NAME = re.compile(r"^blocks\.(\d+)\.(.+)$")
_SHORT_NAME = re.compile(r"^([a-z_]+?)(\d+)$")


@dataclass(frozen=True, order=True)
class Site:
    """One place in a model. Hashable; `str(site)` is the spelling used everywhere.

    Attributes:
        kind: a key of `KINDS`, or any name given to `Activations.from_arrays`.
        layer: block number from 0, None for whole-model kinds, and for "every layer" in a request.
        head: head number from 0 (key-value heads for k and v), None for all heads.
        stack: "" for the stack whose end is the model's output, else its name ("encoder").
        call: number of the module's call within one forward, when it runs several times; else None.
    """

    kind: str
    layer: int | None = None
    head: int | None = None
    stack: str = ""
    call: int | None = None

    def __str__(self) -> str:
        parts = [self.stack, self.kind, *(str(n) for n in (self.layer, self.head) if n is not None)]
        return ".".join(part for part in parts if part) + ("" if self.call is None else f"@{self.call}")

    @property
    def whole(self) -> "Site":
        """The same site with all its heads."""
        return replace(self, head=None)

    def at(self, *, layer: int | None = None, head: int | None = None) -> "Site":
        """The same kind at another layer or head."""
        return replace(self, layer=self.layer if layer is None else layer, head=self.head if head is None else head)

    @classmethod
    def parse(cls, name: "str | tuple | Site") -> "Site":
        """The site that a name means: our spelling, a TransformerLens name, or a shorthand.

        Raises:
            ValueError: the name has no such kind (near matches are listed), or numbers that its kind does not take.
            TypeError: neither a string, a tuple nor a Site.
        """
        if isinstance(name, Site):
            return name
        if isinstance(name, tuple):
            return _from_tuple(name)
        if not isinstance(name, str):
            raise TypeError(f"A site is a string such as 'z.5.3', a tuple such as ('z', 5), or a Site. Got {name!r}.")
        return _from_transformer_lens(name) or _from_text(name)


def _from_tuple(parts: tuple) -> Site:
    if len(parts) == 3 and parts[2] in ("attn", "mlp", "a", "m"):  # TransformerLens: ("pattern", 5, "attn")
        parts = parts[:2]
    if not parts or not isinstance(parts[0], str) or not all(isinstance(n, int) for n in parts[1:]) or len(parts) > 3:
        raise ValueError(f"A site tuple is (kind, layer) or (kind, layer, head), such as ('z', 5). Got {parts!r}.")
    kind = _SHORTHAND.get(parts[0], parts[0])
    return _from_text(".".join([kind, *map(str, parts[1:])]))


def _from_transformer_lens(name: str) -> Site | None:
    if block := _BLOCK_NAME.match(name):
        if (kind := _TRANSFORMER_LENS_BLOCK.get(block[2])) is None:
            known = ", ".join(_TRANSFORMER_LENS_BLOCK)
            raise ValueError(
                f"The TransformerLens hook {name!r} has no counterpart here. "
                f"{near_matches(block[2], _TRANSFORMER_LENS_BLOCK)} After 'blocks.L.' these do: {known}."
            )
        return Site(kind, int(block[1]))
    if name.startswith("blocks."):
        raise ValueError(f"{name!r} is no TransformerLens hook: a block's number from 0 follows 'blocks.'.")
    if kind := _TRANSFORMER_LENS_WHOLE.get(name):
        return Site(kind)
    if (short := _SHORT_NAME.match(name)) and (kind := _SHORTHAND.get(short[1], short[1])) in KINDS:
        return _checked(name, Site(kind, int(short[2])))
    return None


def _from_text(name: str) -> Site:
    body, at, call = name.partition("@")
    if at and not call.isdecimal():
        raise ValueError(f"{name!r}: '@' is followed by a call number, such as 'resid_post.3@1'. Got {call!r}.")
    parts = body.split(".")
    stack = ""
    if parts[0] not in KINDS and len(parts) > 1 and parts[1] in KINDS:
        stack, *parts = parts
    kind, *numbers = parts
    if kind not in KINDS:
        raise ValueError(
            f"No kind of site is called {kind!r} (in {name!r}). {near_matches(kind.lower(), KINDS)} ".rstrip()
            + f" Kinds: {', '.join(KINDS)}."
        )
    if not all(n.isdecimal() for n in numbers):
        raise ValueError(f"{name!r}: after the kind come a layer and a head, both whole numbers from 0, as in 'z.5.3'.")
    layer, head, *rest = [*map(int, numbers), None, None][: max(2, len(numbers))]
    if rest:
        raise ValueError(f"{name!r} has {len(numbers)} numbers; a site has at most a layer and a head, as in 'z.5.3'.")
    return _checked(name, Site(kind, layer, head, stack, int(call) if at else None))


def _checked(name: str, site: Site) -> Site:
    kind = KINDS[site.kind]
    if site.layer is not None and not kind.per_layer:
        raise ValueError(
            f"{name!r}: {site.kind} is one place in the whole model and takes no layer; write {site.kind!r}."
        )
    if site.head is not None and not kind.per_head:
        raise ValueError(f"{name!r}: {site.kind} has no heads; write '{site.kind}.{site.layer}'.")
    return site


def near_matches(name: str, known: Iterable[str]) -> str:
    """A sentence that lists the closest known names, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=4, cutoff=0.5)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else ""
