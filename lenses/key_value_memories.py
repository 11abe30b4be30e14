"""MLPs as key-value memories: what sets a neuron off, and which words its value says.

    mlp_out = sum_i c_i v_i + bias,     c_i the neuron's coefficient (`mlp_act`), v_i its row of the last matrix

A neuron is a memory: its key is what its coefficient answers to (one input column, or gate and up column in a gated
MLP), its value the vector v_i. Trigger examples of a key are the tokens with its largest coefficients in a corpus, with
the text up to them. A value's words are the largest entries of g (v_i) W_U, with g the final norm's gain (centred first
for LayerNorm), and the gain of the norm behind the MLP where there is one. The value agrees with the trigger if its
first word is the token that follows the largest trigger that is not its text's last token. Geva et al. 2021,
arXiv:2012.14913 (sections 3 and 4): 25 triggers were annotated there [U], 50 are in the code.

A pass keeps k coefficients per neuron, by merging the largest k of every batch: nothing of size tokens x neurons stays.
Beware: in a gated MLP (Llama) coefficients have two signs, and a large negative one writes -v_i: `sign=-1` looks there.
The first token of each text is left out, as its activations are of another size (attention sinks), and so are special
tokens. A text's last token is a trigger like any other, but nothing follows it (next_token -1).
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.running_model import running_model
from microtome.capture.sites import Site
from microtome.capture.store_files import writing
from microtome.kernels.vocabulary_statistics import vocabulary_statistics
from microtome.lenses.corpus_pass import Chunk, CorpusPass, corpus_pass
from microtome.lenses.frozen_norm import frozen_norm
from microtome.lenses.memory_files import read_triggers, write_triggers
from microtome.lenses.stream_terms import LastMap, last_map
from microtome.lenses.token_words import token_words
from microtome.lenses.unembedding import unembedding_of

NEURONS_AT_ONCE = 256
_SAVE_EVERY_TOKENS = 100_000


@dataclass(frozen=True, eq=False)
class Triggers:
    """The largest coefficients of every neuron over a corpus, largest first.

    Attributes:
        coefficient: by layer; times `sign` they fall along the last axis; fewer than k where there were fewer tokens.
        text, position: of the token.
        next_token: the token id that follows it, -1 behind a text's last token.
        sign: 1 for the largest coefficients, -1 for the most negative ones.
        tokens: number of tokens looked at: all but the first of each text and special ones.
        texts: tokens of every text, for showing.
    """

    coefficient: Mapping[int, Float[Tensor, "neuron k"]]
    text: Mapping[int, Int64[Tensor, "neuron k"]]
    position: Mapping[int, Int64[Tensor, "neuron k"]]
    next_token: Mapping[int, Int64[Tensor, "neuron k"]]
    sign: int
    tokens: int
    texts: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        layers = list(self.coefficient)
        neurons, k = self.coefficient[layers[0]].shape
        return f"Triggers({len(layers)} layers, {neurons} neurons, {k} largest of {self.tokens} tokens)"

    def examples(self, layer: int, neuron: int, k: int = 10, *, before: int = 12) -> pd.DataFrame:
        """One row per trigger: coefficient, text, position, prefix (its last `before` tokens), token, follows
        ("" behind a text's last token).

        Raises:
            KeyError: a layer that was not looked at. IndexError: a neuron that there is not.
        """
        if layer not in self.coefficient:
            raise KeyError(f"layer {layer} was not looked at; these were: {list(self.coefficient)}.")
        if not 0 <= neuron < len(self.coefficient[layer]):
            raise IndexError(f"layer {layer} has {len(self.coefficient[layer])} neurons; there is no {neuron}.")
        rows = []
        for place in range(min(k, self.coefficient[layer].shape[1])):
            text, position = (int(x[layer][neuron, place]) for x in (self.text, self.position))
            words = self.texts[text]
            rows.append(
                {
                    "coefficient": float(self.coefficient[layer][neuron, place]),
                    "text": text,
                    "position": position,
                    "prefix": "".join(words[max(0, position + 1 - before) : position + 1]),
                    "token": words[position],
                    "follows": words[position + 1] if position + 1 < len(words) else "",
                }
            )
        return pd.DataFrame(rows, columns=["coefficient", "text", "position", "prefix", "token", "follows"])


def trigger_examples(
    model: LoadedModel | nn.Module,
    texts: Any,
    k: int = 25,
    *,
    layers: Sequence[int] | None = None,
    sign: int = 1,
    folder: str | Path | None = None,
    max_tokens: int = MAX_TOKENS,
    progress: bool = False,
    anatomy: Anatomy | None = None,
    **encoding: Any,
) -> Triggers:
    """The tokens with the largest coefficients of every neuron, the first of each text and special ones left out.

    Args:
        model: in eval mode; an encoder works as well as a language model.
        texts: strings, message lists or token ids, as `capture` takes them.
        k: how many per neuron.
        layers: all that offer `mlp_act` if None.
        sign: -1 for the most negative coefficients.
        folder: where the state is kept, so that a stopped pass goes on with the same texts and settings; None keeps it
            in memory alone.
        max_tokens: padded tokens per batch. progress: show a bar over tokens.
        encoding: as for `capture`.

    Raises:
        ValueError: k below 1, another sign, no token to look at, NaN, or a folder with a pass of other texts, settings
            or weights.
        BlockingIOError: another process writes to the folder.
        KeyError: the model offers no neurons in a layer (the reason is said).
    """
    if k < 1:
        raise ValueError(f"k={k}: give at least one trigger per neuron.")
    if sign not in (1, -1):
        raise ValueError(f"sign={sign}: give 1 for the largest coefficients or -1 for the most negative.")
    names: list[Any] = ["mlp_act"] if layers is None else [Site("mlp_act", layer) for layer in layers]
    run = corpus_pass(model, texts, names, anatomy=anatomy, max_tokens=max_tokens, **encoding)
    words = tuple(text.tokens for text in run.texts)
    settings = {"k": k, "sign": sign, "sites": [str(site) for site in run.sites], "max_tokens": max_tokens}
    settings["left out"] = "first and special tokens"  # earlier states also lack each text's last token
    # the hash of the weights as they are now: those of a checkpoint may have been edited since
    settings |= {"texts": run.provenance["texts"], "model": running_model(run.module)}
    state: dict[str, Tensor] = {}
    start = tokens = since = 0
    with ExitStack() as stack:
        if folder is not None:
            folder = Path(folder)
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(writing(folder))
            if (found := read_triggers(folder, settings)) is not None:
                state, start, tokens = found
        done = sum(run.tokens_of(number) for number in range(start))
        bar = stack.enter_context(
            tqdm(total=run.tokens, initial=done, unit="tok", desc="triggers", disable=not progress)
        )
        for chunk in run.chunks(start):
            tokens += _merge(state, chunk, k, sign)
            bar.update(len(chunk))
            since += len(chunk)
            if folder is not None and since >= _SAVE_EVERY_TOKENS:
                write_triggers(folder, state, settings, chunk.number + 1, tokens)
                since = 0
        if folder is not None and start < len(run.batches):
            write_triggers(folder, state, settings, len(run.batches), tokens)
    if not tokens:
        raise ValueError("No token to look at: the first token of each text and special tokens are left out.")
    return _triggers(state, run, sign, tokens, words)


def _merge(state: dict[str, Tensor], chunk: Chunk, k: int, sign: int) -> int:
    """Take a batch's largest coefficients into the state; returns how many tokens were looked at."""
    kept = ((chunk.position > 0) & ~chunk.is_special).nonzero()[:, 0]
    if not len(kept):
        return 0
    for site, value in chunk.values.items():
        values = sign * value[kept.to(value.device)].float().T
        if bool(values.isnan().any()):  # topk would take it for the largest
            where = kept[int(values.isnan().any(0).nonzero()[0, 0])]
            raise ValueError(
                f"{site} is NaN at text {int(chunk.text[where])}, position {int(chunk.position[where])}. Look at that "
                "text; a model in float16 overflows at 65504, load it in float32."
            )
        best, at = values.topk(min(k, values.shape[1]), dim=1)
        at = kept[at.to(kept.device)]
        found = {"coefficient": best.cpu()}
        found |= {"text": chunk.text[at].cpu(), "position": chunk.position[at].cpu(), "next": chunk.targets[at].cpu()}
        if (before := state.get(f"{site}/coefficient")) is not None:
            joined = torch.cat([before, found["coefficient"]], 1)
            # stable, so that of equal coefficients the one met first stays
            order = joined.argsort(dim=1, descending=True, stable=True)[:, :k]
            found = {
                name: torch.cat([state[f"{site}/{name}"], value], 1).gather(1, order) for name, value in found.items()
            }
        state.update({f"{site}/{name}": value for name, value in found.items()})
    return len(kept)


def _triggers(
    state: dict[str, Tensor], run: CorpusPass, sign: int, tokens: int, words: tuple[tuple[str, ...], ...]
) -> Triggers:
    by_name = {
        name: {site.layer: state[f"{site}/{name}"] for site in run.sites}
        for name in ("coefficient", "text", "position", "next")
    }
    coefficients = {layer: sign * value for layer, value in by_name["coefficient"].items()}
    return Triggers(coefficients, by_name["text"], by_name["position"], by_name["next"], sign, tokens, words)


@dataclass(frozen=True, eq=False)
class Values:
    """Value vectors of a model as the vocabulary sees them.

    Attributes:
        maps: the last matrix of every MLP, by layer.
    """

    module: nn.Module
    anatomy: Anatomy
    maps: Mapping[int, LastMap]

    def __repr__(self) -> str:
        return f"Values({type(self.module).__name__}, layers {list(self.maps)})"

    @classmethod
    def of(cls, model: LoadedModel | nn.Module, layers: Sequence[int], anatomy: Anatomy | None = None) -> "Values":
        """Those of some layers. Raises KeyError for a layer without neurons, ValueError for an unknown norm."""
        module = model.module if isinstance(model, LoadedModel) else model
        anatomy = dissect(module) if anatomy is None else anatomy
        maps = {}
        for layer in layers:
            site = Site("mlp_act", layer)
            tap = anatomy.tap(site)
            block = next(b for b in anatomy.main if b.layer == layer)
            point = next(c.point for c in block.contributions if c.role == "mlp")
            maps[layer] = last_map(module, tap.point.module, point.module, anatomy.d_model)
        return cls(module, anatomy, maps)

    def folded(self, layer: int, neurons: Tensor | None = None) -> Float[Tensor, "neuron d_model"]:
        """Value vectors with the gains of the norms on their way, up to positive factors, as the unembedding reads."""
        end = unembedding_of(self.module, self.anatomy)
        last = self.maps[layer]
        rows = last.weight if neurons is None else last.weight[neurons.to(last.weight.device)]
        seen = last.folded(rows.double())
        if end.norm is not None:
            seen = frozen_norm(end.norm, self.anatomy.d_model).folded(seen)
        return seen.to(end.weight)

    def statistics(
        self, layer: int, neurons: Tensor | None = None, *, sign: int = 1, targets: Tensor | None = None, top: int = 1
    ) -> dict[str, Tensor]:
        """top_ids and, with targets, target_rank of every value, some neurons at once; biases are left out."""
        end = unembedding_of(self.module, self.anatomy)
        vectors = sign * self.folded(layer, neurons)
        found: dict[str, list[Tensor]] = {}
        for start in range(0, len(vectors), NEURONS_AT_ONCE):
            part = slice(start, start + NEURONS_AT_ONCE)
            stats = vocabulary_statistics(
                vectors[None, part],
                end.weight,
                factor=end.factor,
                targets=None if targets is None else targets[part].to(end.weight.device),
                top=top,
            )
            found.setdefault("top_ids", []).append(stats.top_ids[0].cpu())
            if targets is not None:
                found.setdefault("target_rank", []).append(stats.target_rank[0].cpu())
        return {name: torch.cat(values) for name, values in found.items()}


def value_words(
    model: LoadedModel | nn.Module,
    layer: int,
    neurons: Any = None,
    *,
    top: int = 10,
    anatomy: Anatomy | None = None,
) -> pd.DataFrame:
    """The words at both ends of values: neuron, words (largest first), negative_words (those of -v), top_id, bottom_id.

    neurons: one, several, or None for all.

    Raises:
        KeyError: a layer without neurons. IndexError: a neuron that there is not. ValueError: no unembedding.
    """
    values = Values.of(model, [layer], anatomy)
    count = len(values.maps[layer].weight)
    numbers = list(range(count)) if neurons is None else np.atleast_1d(np.asarray(neurons, dtype=np.int64)).tolist()
    if wrong := [n for n in numbers if not 0 <= n < count]:
        raise IndexError(f"layer {layer} has {count} neurons; there is no {wrong[0]}.")
    ids = [values.statistics(layer, torch.tensor(numbers), sign=s, top=top)["top_ids"].numpy() for s in (1, -1)]

    return pd.DataFrame(
        {
            "neuron": numbers,
            "words": [tuple(token_words(model, row)) for row in ids[0]],
            "negative_words": [tuple(token_words(model, row)) for row in ids[1]],
            "top_id": ids[0][:, 0],
            "bottom_id": ids[1][:, 0],
        }
    )
