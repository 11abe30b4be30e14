"""The gradient of an MLP's weights as vocabulary: what one step of learning writes, and where.

    y_t = x_t W + b,     dLoss/dW = sum_t x_t^T d_t,     d_t = dLoss/dy_t

x_t is what the matrix reads and d_t the gradient at its output, so that the gradient of a [d_in, d_out] matrix is kept
as two small factors; it is never formed. One side of each matrix lives in the stream and has words: x_t for matrices
that read it (up, gate), d_t for the one that writes it (down). A step W - lr dLoss/dW adds -lr (x . x_t) d_t to the
output for an input x: with the loss -log p(target), the words at the BOTTOM of d_t's ranking are written, and the
target is expected there. Katz et al. 2024, arXiv:2402.12865, call it imprint and shift: the first matrix takes an
imprint of x_t (for that input its output changes by -lr |x_t|^2 d_t), the second shifts what is written, by
-lr |c_t|^2 d_t.

At the last block only the loss's own position has a gradient, so that the gradient there has rank 1. Beware: d_t is not
scaled by any norm, and sizes differ by orders of magnitude between layers. Words are read through the gains of the
norms behind the write, a choice of ours.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from microtome.capture.anatomy import Anatomy, Block, Point
from microtome.capture.dissect import dissect
from microtome.capture.forward_arguments import input_device
from microtome.capture.models import LoadedModel
from microtome.capture.padding import call_options
from microtome.capture.plain_hooks import plain_hooks
from microtome.capture.text_source import TextSource, text_source
from microtome.kernels.vocabulary_statistics import vocabulary_statistics
from microtome.lenses.attribution_rows import Token, token_numbers
from microtome.lenses.frozen_norm import FrozenNorm, frozen_norm
from microtome.lenses.stream_terms import last_map
from microtome.lenses.token_words import token_words
from microtome.lenses.unembedding import unembedding_of


@dataclass(frozen=True, eq=False)
class MatrixGradient:
    """The gradient of one matrix in two factors.

    Attributes:
        layer: of its block.
        name: of its module, "mlp.down_proj".
        path: of its module in the model.
        writes_stream: whether its output goes to the stream (the second matrix); else its input comes from it.
        inputs: x_t of every position, float32.
        gradients: d_t of every position.
        post_norm: the norm between its output and the stream, None mostly.
    """

    layer: int
    name: str
    path: str
    writes_stream: bool
    inputs: Float[Tensor, "position d_in"]
    gradients: Float[Tensor, "position d_out"]
    post_norm: FrozenNorm | None = None

    def __repr__(self) -> str:
        side = "writes" if self.writes_stream else "reads"
        d_in, d_out = self.inputs.shape[1], self.gradients.shape[1]
        return f"MatrixGradient({self.path}, {side} the stream, {d_in} to {d_out}, {len(self.inputs)} positions)"

    @property
    def norm(self) -> Float[Tensor, " position"]:
        """|d_t| of every position."""
        return self.gradients.norm(dim=1)

    @property
    def stream_side(self) -> Float[Tensor, "position d_model"]:
        """The factor that has words: d_t of the second matrix, x_t of a first one."""
        return self.gradients if self.writes_stream else self.inputs

    def formed(self) -> Float[Tensor, "d_in d_out"]:
        """sum_t x_t^T d_t, for tests: the whole matrix."""
        return self.inputs.T @ self.gradients


@dataclass(frozen=True, eq=False)
class BackwardLens:
    """Gradients of a loss with respect to the MLPs' matrices, and their words.

    Attributes:
        matrices: in the order of the blocks.
        loss: -log p(target) in nats.
        target_id: the target.
        position: where the target is to be said, from 0.
        original_id: the model's own first token there.
        token_ids: of the text.
        table: layer, matrix, position, token, norm (|d_t|), input_norm (|x_t|), words (largest first), negative_words
            (most negative first) of the side that lives in the stream, target_rank (0 for the first),
            target_rank_from_bottom, imprint or shift (|x_t|^2: how much of d_t one step of lr 1 takes away for the same
            input). Words are those of the gradient: a step of descent writes `negative_words`, which
            `strongest` lists as written.
    """

    matrices: tuple[MatrixGradient, ...]
    loss: float
    target_id: int
    position: int
    original_id: int
    token_ids: Int64[Tensor, " position"]
    table: pd.DataFrame

    def __repr__(self) -> str:
        return f"BackwardLens({len(self.matrices)} matrices, {len(self.token_ids)} positions, loss {self.loss:.3f})"

    def strongest(self, n: int = 10) -> pd.DataFrame:
        """What a step of descent writes, of matrices that write the stream, the largest change first.

        A step takes the gradient away, so that it writes the words at the bottom of d_t's ranking: the target is
        expected first in `written_words`, and the model's own word in `erased_words`.

        Columns: layer, matrix, position, token, change (|x_t| |d_t|: the norm of what a position adds to the matrix's
        gradient), norm (|d_t|), written_words, erased_words, target_rank (of the target among written words, 0 for the
        first), shift (|x_t|^2: for the same input a step of lr 1 moves the output by norm x shift).

        Beware: a first token with a huge input (an attention sink) can change most and write no word.

        Raises ValueError for n below 1.
        """
        if n < 1:
            raise ValueError(f"n={n}: give at least one row.")
        table = self.table[self.table["writes_stream"]].drop(columns=["words", "negative_words", "target_rank"])
        table["written_words"] = self.table["negative_words"]
        table["erased_words"] = self.table["words"]
        table = table.rename(columns={"target_rank_from_bottom": "target_rank"})
        table["change"] = table["norm"] * table["input_norm"]
        table = table.sort_values("change", ascending=False, kind="stable", ignore_index=True).head(n)
        words = ["written_words", "erased_words"]
        return table[["layer", "matrix", "position", "token", "change", "norm", *words, "target_rank", "shift"]]

    def norms(self, *, writes_stream: bool = True) -> Float[Tensor, "layer position"]:
        """|d_t| by layer and position, of the second matrices, or of the first ones (their root sum of squares)."""
        layers = sorted({matrix.layer for matrix in self.matrices})
        rows = []
        for layer in layers:
            chosen = [m for m in self.matrices if m.layer == layer and m.writes_stream == writes_stream]
            rows.append(torch.stack([m.norm for m in chosen]).square().sum(0).sqrt())
        return torch.stack(rows)


def backward_lens(
    model: LoadedModel | nn.Module,
    text: Any,
    target: Token,
    *,
    position: int = -1,
    layers: Sequence[int] | None = None,
    top: int = 5,
    anatomy: Anatomy | None = None,
    **encoding: Any,
) -> BackwardLens:
    """Gradients of -log p(target) behind a position of one text.

    Args:
        model: a language model in eval mode; frozen parameters do not matter, and none gets a gradient.
        text: one string or list of token ids.
        target: the token to be learned, as a string or id.
        position: where it is to be said; negative from the end.
        layers: whose MLPs; all if None.
        top: words of each end.

    Raises:
        ValueError: training mode, a target that is not one token, an MLP without plain matrices.
        TypeError: several texts, or another kind of text.
        IndexError: a position that the text does not have, or a layer.
    """
    loaded, ids = _loaded(model), _token_ids(model, text, encoding)
    module = loaded.module
    if any(parameter.is_inference() for parameter in module.parameters()):
        raise ValueError(
            "The weights were made in torch.inference_mode, which allows no gradients. Load the model outside."
        )
    anatomy = dissect(module) if anatomy is None else anatomy
    end = unembedding_of(module, anatomy)
    (target_id,) = token_numbers(target, loaded.tokenizer, end.vocab, 1, "target") or []
    if not -len(ids) <= position < len(ids):
        raise IndexError(f"the text has {len(ids)} tokens; there is no position {position}.")
    places = _matrices(module, anatomy, layers)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    points = {}
    for path, _, _ in places:
        points[Point(path, "in", 0)] = lambda x, path=path: inputs.__setitem__(path, x.detach().clone())
        points[Point(path, "out", None)] = lambda y, path=path: outputs.__setitem__(path, y)
    weights = [module.get_submodule(path).weight for path, _, _ in places]
    # inference mode would record no graph, whatever enable_grad says
    with torch.inference_mode(False), torch.enable_grad(), _taking_gradients(weights), plain_hooks(module, points):
        logits = module(input_ids=ids.clone()[None].to(input_device(module)), **call_options(module)).logits[
            0, position
        ]
        loss = -logits.float().log_softmax(-1)[target_id]
        found = torch.autograd.grad(loss, [outputs[path] for path, _, _ in places])
    matrices = []
    for (path, layer, writes), gradient in zip(places, found, strict=True):
        post = None
        if writes:
            block = next(b for b in anatomy.main if b.layer == layer)
            point = next(c.point for c in block.contributions if c.role == "mlp")
            post = last_map(module, path, point.module, anatomy.d_model).post_norm
        name = path.split(f".{layer}.", 1)[-1]
        values = [x.reshape(len(ids), -1).float() for x in (inputs[path], gradient)]
        matrices.append(MatrixGradient(layer, name, path, writes, *values, post))
    table = _table(matrices, end, anatomy.d_model, target_id, top, loaded, ids)
    return BackwardLens(
        tuple(matrices), float(loss.detach()), target_id, position % len(ids), int(logits.argmax()), ids, table
    )


@contextmanager
def edited_weights(model: LoadedModel | nn.Module, lens: BackwardLens, *, lr: float = 1.0) -> Iterator[None]:
    """One step of plain gradient descent on the lens's matrices inside the block; the old weights after it, always.

    The gradient is added factor by factor. Raises ValueError for a rate that is no finite number, or a lens of another
    model.
    """
    if not torch.isfinite(torch.tensor(float(lr))):
        raise ValueError(f"lr={lr}: give a finite learning rate.")
    module = _loaded(model).module
    steps = [(projection, matrix) for matrix in lens.matrices for projection in [_projection(module, matrix)]]
    with ExitStack() as stack:
        for projection, matrix in steps:
            weight = projection.weight
            stack.callback(weight.data.copy_, weight.detach().clone())
            x, d = (factor.detach().to(weight) for factor in (matrix.inputs, matrix.gradients))
            if isinstance(projection, Conv1D):
                weight.data.addmm_(x.T, d, alpha=-lr)
            else:
                weight.data.addmm_(d.T, x, alpha=-lr)
        yield


def step_effect(
    model: LoadedModel | nn.Module, lens: BackwardLens, *, lr: float = 1.0, position: int | None = None
) -> pd.DataFrame:
    """What one step does to the text itself: token (target, original), id, and rank, log_prob before and after it.

    lr 1 is the paper's. position: where it is read; the lens's own if None. The weights are put back.
    """
    module = _loaded(model).module
    position = lens.position if position is None else position
    ids = lens.token_ids[None].to(input_device(module))

    def log_probs() -> Tensor:
        with torch.no_grad():
            return module(input_ids=ids, **call_options(module)).logits[0, position].float().log_softmax(-1)

    before = log_probs()
    with edited_weights(model, lens, lr=lr):
        after = log_probs()
    rows = []
    for name, number in (("target", lens.target_id), ("original", lens.original_id)):
        row: dict[str, Any] = {"token": name, "id": number}
        for when, values in (("before", before), ("after", after)):
            row |= {f"rank_{when}": int((values > values[number]).sum()), f"log_prob_{when}": float(values[number])}
        rows.append(row)
    return pd.DataFrame(rows)


def _projection(module: nn.Module, matrix: MatrixGradient) -> nn.Module:
    """The lens's matrix in this model."""
    expected = (matrix.inputs.shape[1], matrix.gradients.shape[1])
    found = dict(module.named_modules()).get(matrix.path)
    shape = () if not isinstance(found, nn.Linear | Conv1D) else tuple(found.weight.shape)
    if shape != (expected if isinstance(found, Conv1D) else expected[::-1]):
        raise ValueError(
            f"{type(module).__name__} has no matrix {matrix.path} of {expected}: the lens is of another model."
        )
    return found


def _loaded(model: LoadedModel | nn.Module) -> LoadedModel:
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.from_module(model, name=type(model).__name__)
    if loaded.module.training:
        raise ValueError(f"{type(loaded.module).__name__} is in training mode. Call model.eval() first.")
    return loaded


def _token_ids(model: LoadedModel | nn.Module, text: Any, encoding: dict[str, Any]) -> Int64[Tensor, " position"]:
    several = isinstance(text, list | tuple) and (not len(text) or any(isinstance(part, str | list) for part in text))
    if several or isinstance(text, dict):
        raise TypeError(f"text={text!r}: a backward lens is of one text. Give one string, or one list of token ids.")
    source = text_source([text], _loaded(model), **encoding)
    if not isinstance(source, TextSource):
        raise ValueError("text is a ready model input; give one string or one list of token ids.")
    return source.encode(0, 1).rows[0].token_ids.long()


def _matrices(module: nn.Module, anatomy: Anatomy, layers: Sequence[int] | None) -> list[tuple[str, int, bool]]:
    """Path, layer and whether it writes the stream, of every matrix of the MLPs; those that read the stream first."""
    numbers = [block.layer for block in anatomy.main] if layers is None else list(layers)
    if not numbers:
        raise ValueError("layers is empty. Name at least one, or None for all.")
    found = []
    for layer in dict.fromkeys(numbers):
        path = anatomy.tap(f"mlp_act.{layer}").point.module
        if not isinstance(module.get_submodule(path), nn.Linear | Conv1D):
            raise ValueError(f"{path} is a {type(module.get_submodule(path)).__name__}, no plain matrix.")
        block = next(block for block in anatomy.main if block.layer == layer)
        found += [(first, layer, False) for first in _first_matrices(module, block, path, anatomy.d_model)]
        found.append((path, layer, True))
    return found


def _first_matrices(module: nn.Module, block: Block, path: str, width: int) -> list[str]:
    """Matrices of this width of input beside the last one at `path`: in its module, or in the block where the MLP has
    none (OPT), those that are nearer to what else the block adds left out."""
    others = [
        point.module for c in block.contributions if c.role != "mlp" for point in (c.point, c.projection) if point
    ]
    around = path.rpartition(".")[0]
    for scope in dict.fromkeys((around, block.path)):
        found = []
        for name, child in module.get_submodule(scope).named_modules(prefix=scope):
            if name == path or not isinstance(child, nn.Linear | Conv1D):
                continue
            d_in = child.in_features if isinstance(child, nn.Linear) else child.weight.shape[0]
            if d_in == width and all(_shared(name, other) <= _shared(name, path) for other in others):
                found.append(name)
        if found:
            return found
    return []


def _shared(one: str, other: str) -> int:
    """How many names two paths have in common from the left."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@contextmanager
def _taking_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Frozen parameters would leave no graph; their own gradients are not asked for."""
    before = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, was in zip(parameters, before, strict=True):
            parameter.requires_grad_(was)


def _table(
    matrices: list[MatrixGradient],
    end: Any,
    width: int,
    target: int,
    top: int,
    loaded: LoadedModel,
    ids: Int64[Tensor, " position"],
) -> pd.DataFrame:
    norm = None if end.norm is None else frozen_norm(end.norm, width)
    names = token_words(loaded, ids)
    rows = []
    for matrix in matrices:
        side = matrix.stream_side.double()
        if matrix.post_norm is not None:
            side = matrix.post_norm.folded(side)
        side = (side if norm is None else norm.folded(side)).to(end.weight)
        targets = torch.full((len(side),), target, device=side.device)
        both = [
            vocabulary_statistics(sign * side[None], end.weight, factor=end.factor, targets=targets, top=top)
            for sign in (1, -1)
        ]
        for place in range(len(ids)):
            rows.append(
                {
                    "layer": matrix.layer,
                    "matrix": matrix.name,
                    "writes_stream": matrix.writes_stream,
                    "position": place,
                    "token": names[place],
                    "norm": float(matrix.norm[place]),
                    "input_norm": float(matrix.inputs[place].norm()),
                    "words": tuple(token_words(loaded, both[0].top_ids[0, place])),
                    "negative_words": tuple(token_words(loaded, both[1].top_ids[0, place])),
                    "target_rank": int(both[0].target_rank[0, place]),
                    "target_rank_from_bottom": int(both[1].target_rank[0, place]),
                    "imprint" if not matrix.writes_stream else "shift": float(matrix.inputs[place].square().sum()),
                }
            )
    return pd.DataFrame(rows)
