"""The Jacobian lens: the mean effect of a stream on the last stream, as a translator.

    J_l = mean over texts of mean over t in V of sum over t' in V of d r_L[t'] / d r_l[t],        lens_l(x) = J_l x

V holds a text's positions from `skip_first` on, without the last (which no token follows). In a causal model only
t' >= t count. The row-vector map of a translator is J^T without intercept; the logit lens is J = 1.
Source: Gurnee et al. (2026), "Verbalizable Representations Form a Global Workspace in Language Models", Transformer
Circuits; the estimator is that of anthropics/jacobian-lens and of TransformerLens 4.3's JacobianLens, whose files are
read and written here: {"J": {block: [d_model, d_model]}, "n_prompts", "source_layers", "d_model"}, block b standing
for the stream behind block b, which is depth b + 1. TransformerLens fits on a model that it has rewritten; this runs on
the model as it is. d_model backward passes per text, `rows` of them at once, for all depths together.
Beware: a mean of derivatives is no regression: it says what a small change does, and may be far from the state that the
model reaches. The sum over t' is of the last stream at all later positions, not at t alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.anatomy import Anatomy
from microtome.capture.dissect import dissect
from microtome.capture.forward_arguments import input_device
from microtome.capture.models import LoadedModel
from microtome.capture.padding import call_options
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps
from microtome.capture.text_source import TextSource, text_source
from microtome.data.replaced_file import replaced_file
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.made_for import facts_of
from microtome.lenses.relations import stream_site
from microtome.lenses.short_repr import short_repr

SKIP_FIRST = 16


@dataclass(frozen=True, eq=False)
class JacobianLens:
    """Mean Jacobians by depth, float32.

    Attributes:
        jacobians: J_l: row i is the gradient of output i.
        texts: how many were averaged over.
        left_out: texts that were too short.
        facts: where it comes from.
    """

    jacobians: Mapping[int, Float[Tensor, "d_model d_model"]]
    texts: int
    left_out: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    __repr__ = short_repr

    @property
    def depths(self) -> list[int]:
        """The depths, ascending."""
        return sorted(self.jacobians)

    def translator(self, depth: int) -> LinearMap:
        """x J_l^T as a map between sites. Raises KeyError for a depth that was not fitted."""
        if depth not in self.jacobians:
            raise KeyError(f"the lens has no depth {depth}; there are {self.depths}.")
        jacobian = self.jacobians[depth]
        return LinearMap(
            jacobian.T.contiguous(),
            jacobian.new_zeros(len(jacobian)),
            "jacobian",
            f"depth {depth}",
            "last stream",
            facts={**self.facts, "texts": self.texts},
        )

    def save(self, path: str | Path, *, dtype: torch.dtype = torch.float16) -> None:
        """Write the file that JacobianLens of TransformerLens and the reference read; float16 by default, as they do.

        Raises:
            ValueError: depth 0, which that format has no place for; numbers that are too large for the dtype.
        """
        if 0 in self.jacobians:
            raise ValueError("depth 0 is the stream before block 0, which this file cannot name. Fit depths from 1 on.")
        width = len(next(iter(self.jacobians.values())))
        kept = {depth - 1: self.jacobians[depth].to(dtype) for depth in self.depths}
        if lost := [block + 1 for block, matrix in kept.items() if not bool(torch.isfinite(matrix).all())]:
            raise ValueError(f"the Jacobian of depth {lost[0]} does not fit into {dtype}. Give dtype=torch.float32.")
        payload = {
            "J": kept,
            "n_prompts": self.texts,
            "source_layers": [depth - 1 for depth in self.depths],
            "d_model": width,
        }
        if self.facts:
            payload["metadata"] = dict(self.facts)
        with replaced_file(Path(path)) as scratch:
            torch.save(payload, scratch)

    @classmethod
    def load(cls, path: str | Path) -> "JacobianLens":
        """Read such a file, of either origin; nothing in it is executed.

        Raises:
            ValueError: a file without these keys, or matrices of another width.
        """
        payload = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(payload, dict) or not {"J", "n_prompts", "d_model"} <= payload.keys():
            raise ValueError(f"{path} is no Jacobian lens: expected the keys J, n_prompts, source_layers and d_model.")
        width = int(payload["d_model"])
        if wrong := [block for block, matrix in payload["J"].items() if tuple(matrix.shape) != (width, width)]:
            raise ValueError(f"{path}: the matrix of block {wrong[0]} is not {width} x {width}, as d_model says.")
        jacobians = {int(block) + 1: matrix.float() for block, matrix in payload["J"].items()}
        return cls(jacobians, int(payload["n_prompts"]), facts=dict(payload.get("metadata") or {}))


@torch.inference_mode(False)
def jacobian_lens(
    model: LoadedModel | nn.Module,
    texts: Any,
    depths: Sequence[int] | None = None,
    *,
    anatomy: Anatomy | None = None,
    skip_first: int = SKIP_FIRST,
    max_length: int | None = None,
    rows: int = 8,
    progress: bool = False,
) -> JacobianLens:
    """Fit a lens.

    Args:
        texts: as `capture` takes them; token windows of 128 are a usual length.
        depths: 0 to L - 1; default 1 to L - 1, those that the file format knows.
        skip_first: first positions left out: sinks have derivatives of their own.
        max_length: longer texts are cut to so many tokens.
        rows: copies of the text that run at once, each with the gradient of another output.

    Raises:
        ValueError: depths out of range, negative skip_first, rows below 1, no text longer than skip_first + 1, a module
            in training mode, or a text whose derivatives are not finite.
    """
    module = model.module if isinstance(model, LoadedModel) else model
    if module.training:
        raise ValueError(f"{type(module).__name__} is in training mode. Call model.eval() first.")
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.from_module(model, name=type(model).__name__)
    anatomy = dissect(module) if anatomy is None else anatomy
    count = len(anatomy.blocks)
    depths = list(range(1, count)) if depths is None else sorted(set(depths))
    if not depths or depths[0] < 0 or depths[-1] >= count:
        raise ValueError(
            f"depths are {depths}. Give some of 0 to {count - 1}; depth {count} is the last stream itself."
        )
    if skip_first < 0 or rows < 1:
        raise ValueError(f"skip_first is {skip_first} and rows {rows}. Give 0 or more, and 1 or more.")
    source = text_source(texts, loaded, truncate="right" if max_length else None, max_length=max_length)
    if not isinstance(source, TextSource):
        raise ValueError("A Jacobian lens needs texts, whose tokens have positions; these are ready inputs.")
    encoded = source.encode(0, len(source)).rows
    usable = {row: text.token_ids for row, text in enumerate(encoded) if text.length > skip_first + 1}
    if not usable:
        raise ValueError(f"no text has more than {skip_first + 1} tokens. Give longer texts or a smaller skip_first.")
    total = torch.zeros(len(depths), anatomy.d_model, anatomy.d_model, dtype=torch.float64)
    for row, ids in tqdm(usable.items(), desc="Jacobian lens", disable=not progress):
        one = _mean_jacobians(module, anatomy, ids, depths, skip_first, min(rows, anatomy.d_model)).double()
        if not bool(torch.isfinite(one).all()):
            raise ValueError(f"text {row} gives NaN or infinity. Load the model in float32, or leave that text out.")
        total += one
    mean = (total / len(usable)).float()
    return JacobianLens(
        {depth: mean[number] for number, depth in enumerate(depths)},
        len(usable),
        len(encoded) - len(usable),
        {"model_name": loaded.provenance.name, **facts_of(loaded), "skip_first_positions": skip_first},
    )


def _mean_jacobians(
    module: nn.Module, anatomy: Anatomy, ids: Tensor, depths: Sequence[int], skip_first: int, rows: int
) -> Float[Tensor, "depth d_model d_model"]:
    """For one text: gradients of each output, summed over V, averaged over V."""
    width = anatomy.d_model
    sites = [stream_site(anatomy, depth) for depth in depths]
    final = stream_site(anatomy, len(anatomy.blocks))
    copies = ids.to(input_device(module)).expand(rows, -1)
    reads = [Read(site, keep_graph=True) for site in [*sites, final]]
    with torch.enable_grad(), taps(module, reads, anatomy=anatomy, stop=True) as tape:
        module(input_ids=copies, **call_options(module))
    end = tape[final]
    valid = slice(skip_first, len(ids) - 1)
    found = torch.zeros(len(depths), width, width)
    for first in range(0, width, rows):
        outputs = torch.arange(first, min(first + rows, width), device=end.device)
        wanted = torch.zeros_like(end)
        wanted[torch.arange(len(outputs), device=end.device), valid, outputs] = 1
        gradients = torch.autograd.grad(end, [tape[site] for site in sites], wanted, retain_graph=first + rows < width)
        for number, gradient in enumerate(gradients):
            found[number, outputs.cpu()] = gradient[: len(outputs), valid].float().mean(1).cpu()
    return found
