"""Prompts that ask for the object of a subject, with other pairs as examples before them, and where the subject ends.

    The capital of Italy is Rome
    The capital of France is          -> the subject's last token, and the first token of "Paris"

Each example stands on a line of its own, followed by a newline. A pair is never an example of its own prompt. The
object begins after a space, unless the template ends with a quotation mark or a space. The subject's last token is the
last of those that hold its last character: byte-level tokenizers cut one character into several tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from microtome.capture.models import LoadedModel
from microtome.lenses.short_repr import short_repr
from microtome.lenses.token_windows import special_tokens_around


@dataclass(frozen=True, eq=False)
class RelationPrompts:
    """Prompts of one template.

    Attributes:
        ids: tokens of each prompt, special tokens before it included.
        subject_place: place of the subject's last token, counted from the end of the prompt (-1 is the last token).
        object_ids: the first token of each object as it follows the prompt.
        subjects, objects: the pairs.
        texts: the prompts as text.
        template, examples: as given, "" and none where unknown.
    """

    ids: list[list[int]]
    subject_place: Int64[Tensor, " example"]
    object_ids: Int64[Tensor, " example"]
    subjects: list[str]
    objects: list[str]
    texts: list[str]
    template: str = ""
    examples: tuple[tuple[str, str], ...] = ()

    __repr__ = short_repr

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Iterable[int]) -> "RelationPrompts":
        """Some of the prompts, in this order."""
        rows = [int(row) for row in rows]
        index = torch.tensor(rows, dtype=torch.long)
        parts = (self.ids, self.subjects, self.objects, self.texts)
        ids, subjects, objects, texts = ([part[row] for row in rows] for part in parts)
        places, object_ids = self.subject_place[index], self.object_ids[index]
        return replace(
            self,
            ids=ids,
            subject_place=places,
            object_ids=object_ids,
            subjects=subjects,
            objects=objects,
            texts=texts,
        )


def relation_prompts(
    model: LoadedModel | Any,
    pairs: Iterable[tuple[str, str]],
    template: str,
    *,
    examples: Sequence[tuple[str, str]] = (),
) -> RelationPrompts:
    """A prompt for each pair of subject and object.

    Args:
        model: a loaded model with a tokenizer, or a fast tokenizer of transformers.
        template: with {subject} once, ending where the object follows.
        examples: pairs put before each prompt, in this order, without the prompt's own.

    Raises:
        ValueError: no pairs, a template without {subject}, a tokenizer without character offsets, or an object that
            changes the tokens of its prompt (the message names the pair).
    """
    pairs = [(str(subject), str(thing)) for subject, thing in pairs]
    if not pairs:
        raise ValueError("there are no pairs. Give one or more of subject and object.")
    if template.count("{subject}") != 1:
        raise ValueError(f"the template is {template!r}. It must hold {{subject}} once.")
    tokenizer = getattr(model, "tokenizer", model)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("relation prompts need a fast tokenizer: it says which characters a token stands for.")
    before, _ = special_tokens_around(tokenizer)
    joint = "" if template.endswith(('"', "'", " ")) else " "
    head, tail = template.split("{subject}")
    rows, places, objects, texts = [], [], [], []
    for subject, thing in pairs:
        shots = [template.replace("{subject}", s) + joint + o + "\n" for s, o in examples if s != subject]
        start = "".join(shots) + head
        text = start + subject + tail
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        last = len(start) + len(subject) - 1
        place = max((i for i, (first, stop) in enumerate(offsets) if first <= last < stop), default=None)
        whole = list(tokenizer(text + joint + thing, add_special_tokens=False)["input_ids"])
        if place is None or whole[: len(ids)] != ids or len(whole) <= len(ids):
            raise ValueError(f"the pair ({subject!r}, {thing!r}) does not continue {text!r} by tokens of its own.")
        rows.append([*before, *ids])
        places.append(place - len(ids))
        objects.append(whole[len(ids)])
        texts.append(text)
    return RelationPrompts(
        rows,
        torch.tensor(places),
        torch.tensor(objects),
        [s for s, _ in pairs],
        [o for _, o in pairs],
        texts,
        template,
        tuple((str(s), str(o)) for s, o in examples),
    )
