"""Model inputs that a processor already made (images, audio, padded ids): kept as they are, split along their rows.

A position is then an index along the sequence that the model makes of them: patch (with the model's own class token
first, where it has one) or audio frame. Its number is known only once the model ran, so masks are made late.

Beware: padded token ids are useless without their mask, and a mask with holes has no well-defined positions; both are
errors. Ids with nothing but a mask and token types are unpadded and treated as texts, whatever side they were padded
on. Positions of a model that shortens its input (audio) follow the model's own frame mask.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from microtome.capture.encoded_text import EncodedText

# The input that says how many rows there are, first match wins.
_MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")
_PLAIN_TEXT = {"input_ids", "attention_mask", "token_type_ids"}


@dataclass(frozen=True)
class ReadyInputs:
    """Inputs of one model call, not yet split.

    Attributes:
        tensors: by the model's argument names.
        others: arguments that are no tensors, handed on unchanged.
        main: name of the input whose first axis counts the rows.
        provenance: JSON-able: kind, shapes.
    """

    tensors: dict[str, Tensor]
    others: dict[str, Any]
    main: str
    provenance: dict[str, Any]

    @classmethod
    def from_mapping(cls, inputs: Mapping[str, Any], *, pad_id: int | None = None) -> "ReadyInputs":
        """Check a mapping of model inputs and make the mask of token ids explicit.

        Raises:
            ValueError: none of the known inputs, no rows, ids that look padded but come without a mask, a mask of
                another shape, a mask without a real token or with holes.
        """
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in inputs.items() if not isinstance(value, Tensor) and value is not None}
        main = next((name for name in _MAIN_INPUTS if name in inputs), None)
        if main is None:
            raise ValueError(
                f"The mapping has {list(inputs)}; expected one of {', '.join(_MAIN_INPUTS)} among its keys."
            )
        if main not in tensors or tensors[main].dim() < 2 or not len(tensors[main]):
            raise ValueError(
                f"{main} must be a tensor with a leading row axis and at least one row. Got "
                f"{tuple(tensors[main].shape) if main in tensors else type(inputs[main]).__name__}; ask the processor "
                'for return_tensors="pt".'
            )
        if main == "input_ids":
            tensors["attention_mask"] = _checked_mask(tensors["input_ids"], tensors.get("attention_mask"), pad_id)
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        return cls(tensors, others, main, {"kind": "ready", "n_texts": len(tensors[main]), "shapes": shapes})

    @property
    def n_rows(self) -> int:
        """Number of texts, images or sounds."""
        return len(self.tensors[self.main])

    @property
    def is_plain_text(self) -> bool:
        """Whether there is nothing but token ids, their mask and their types."""
        return self.main == "input_ids" and not self.others and self.tensors.keys() <= _PLAIN_TEXT

    @property
    def is_splittable(self) -> bool:
        """Whether every tensor has one entry per row; if not (flattened patches), all rows go in one batch."""
        return all(tensor.dim() > 0 and len(tensor) == self.n_rows for tensor in self.tensors.values())

    def token_rows(self, name: str) -> list[list[int]]:
        """The unpadded rows of `input_ids` or `token_type_ids`."""
        mask = self.tensors["attention_mask"].bool()
        return [row[real].tolist() for row, real in zip(self.tensors[name], mask, strict=True)]

    def model_inputs(
        self, row_ids: Iterable[int] | None = None, *, device: torch.device | str, dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Arguments of the model for some rows (all by default); floating inputs are cast to `dtype` if given.

        Raises:
            ValueError: some of the rows, of inputs that cannot be split.
        """
        index = torch.arange(self.n_rows) if row_ids is None else torch.tensor(list(row_ids))
        if not self.is_splittable and index.tolist() != list(range(self.n_rows)):
            raise ValueError(
                f"These inputs hold tensors without a row axis ({self.provenance['shapes']}, {self.n_rows} rows): they "
                "run as one batch, or prepare them in smaller mappings."
            )
        moved = {}
        for name, tensor in self.tensors.items():
            rows = tensor[index.to(tensor.device)] if self.is_splittable else tensor
            moved[name] = rows.to(device, dtype if rows.is_floating_point() else None)
        return moved | self.others


def position_mask(
    inputs: Mapping[str, Any], *, n_rows: int, n_positions: int, module: nn.Module
) -> Int[Tensor, "batch position"]:
    """1 at the real positions of the sequence that a model made of some inputs.

    Args:
        inputs: the arguments the model was called with.
        n_positions: length of the sequence it made.
        module: asked for its frame mask if it shortens the input.

    Raises:
        ValueError: a mask of another length that the model offers no way to shorten.
    """
    mask = inputs.get("attention_mask")
    if mask is None or bool(mask.all()):
        device = None if mask is None else mask.device
        return torch.ones(n_rows, n_positions, dtype=torch.long, device=device)
    if mask.shape == (n_rows, n_positions):
        return mask.long()
    shorten = getattr(module, "_get_feature_vector_attention_mask", None)  # wav2vec2 and its relatives
    if shorten is None:
        raise ValueError(
            f"The attention mask has shape {tuple(mask.shape)}, but the model made {n_positions} positions of it and "
            "does not say which are real. Run inputs of equal length together, without padding."
        )
    return shorten(n_positions, mask).long()


def describe_positions(mask: Int[Tensor, "batch position"]) -> list[EncodedText]:
    """Rows without words, one per row of the mask: positions of images and audio then resolve like those of texts."""
    lengths = mask.sum(1).tolist()
    return [EncodedText(n, torch.zeros(n, dtype=torch.bool), ("",) * n) for n in lengths]


def _checked_mask(
    ids: Int[Tensor, "batch position"], mask: Tensor | None, pad_id: int | None
) -> Int[Tensor, "batch position"]:
    if mask is None:
        padded = [row for row, ends in enumerate(ids[:, [0, -1]].tolist()) if pad_id in ends]
        if padded:
            raise ValueError(
                f"input_ids has the pad token {pad_id} at an end of row {padded[0]} and no attention_mask. Pass "
                "attention_mask too, or give each text's ids as a list of its own."
            )
        return torch.ones_like(ids, dtype=torch.long)
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}; they must agree."
        )
    mask = (mask != 0).long()
    starts = torch.diff(mask, dim=1, prepend=torch.zeros_like(mask[:, :1])).eq(1).sum(1)
    for row, n_starts in enumerate(starts.tolist()):
        if n_starts != 1:
            found = "no real token" if n_starts == 0 else "padding between real tokens"
            raise ValueError(f"attention_mask of row {row} has {found}. Give one block of ones per row.")
    return mask
