"""Texts of any accepted kind to encoded rows: ids, which of them are special, character offsets, token strings.

One call takes one kind: strings, message lists (rendered by the model's chat template), token ids, or a ready
model-input mapping (see `ready_inputs`). Nothing is padded here, and everything wrong with a text is an error that
names its row.

Beware: message lists follow the transformers convention that the template writes every special token itself, so none
is added to a rendered text, and offsets count characters of the rendered text. `truncate="left"` drops the beginning
of a text, `"right"` its end; special tokens that the tokenizer adds around a string stay, as does a leading BOS.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from jinja2 import TemplateError
from torch import nn

from microtome.capture.encoded_text import EncodedText, EncodedTexts
from microtome.capture.limits import length_limit, vocabulary_size
from microtome.capture.ready_inputs import ReadyInputs
from microtome.capture.special_tokens import SpecialTokens
from microtome.capture.text_kinds import kind_of_texts, list_ids, list_texts, name_rows

_SHOWN_ROWS = 5


def encode_texts(
    texts: Any,
    tokenizer,
    *,
    module: nn.Module | None = None,
    truncate: str | None = None,
    max_length: int | None = None,
    add_special_tokens: bool = True,
    add_generation_prompt: bool = False,
    first_row: int = 0,
) -> EncodedTexts | ReadyInputs:
    """Encode texts of one kind; a mapping that is more than ids and their mask comes back as `ReadyInputs`.

    Args:
        texts: strings; message lists (lists of {"role", "content"}); lists or 1-D integer tensors of token ids; or a
            mapping of model inputs with a leading row axis. A 2-D integer tensor counts as {"input_ids": tensor}.
        tokenizer: a transformers tokenizer; None will do for token ids and ready inputs.
        module: the model, for its length limit and its vocabulary size; without it, neither is checked.
        truncate: which end of an over-long text goes; None makes an over-long text an error.
        max_length: tokens per text, special ones included; by default the model's own limit.
        add_special_tokens: whether the tokenizer adds its BOS, [CLS] and the like (strings only).
        add_generation_prompt: whether a rendered message list ends with the opening of the assistant's turn.
        first_row: number of the first text in errors, where these are a part of more.

    Raises:
        TypeError: not a list of texts, a row of no accepted kind, kinds mixed.
        ValueError: no texts; or rows that are empty, hold nothing but special tokens, are too long, contain ids
            outside the vocabulary, begin with BOS twice, or that the chat template refuses.
    """
    if truncate not in (None, "left", "right"):
        raise ValueError(
            f'truncate={truncate!r}: expected None, "left" (drop the beginning) or "right" (drop the end).'
        )
    if isinstance(texts, np.ndarray) and texts.ndim == 2 and np.issubdtype(texts.dtype, np.integer):
        texts = torch.from_numpy(np.ascontiguousarray(texts))
    if isinstance(texts, torch.Tensor) and texts.dim() == 2:
        texts = {"input_ids": texts}
    settings: dict[str, Any] = {}
    if isinstance(texts, Mapping):
        ready = ReadyInputs.from_mapping(texts, pad_id=getattr(tokenizer, "pad_token_id", None))
        if not ready.is_plain_text:
            return ready
        kind, items = "token_ids", ready.token_rows("input_ids")
        types = ready.token_rows("token_type_ids") if "token_type_ids" in ready.tensors else None
    else:
        items, types = list_texts(texts), None
        kind = kind_of_texts(items, first_row)
    if kind == "token_ids":
        id_rows = [list_ids(item) for item in items]
        _check_ids(id_rows, vocabulary_size(module), first_row)
        encoded = _encode_ids(id_rows, types, tokenizer)
    else:
        if tokenizer is None:
            raise ValueError(
                f"{kind} need a tokenizer, and this model has none. Pass token ids, or the model with its "
                "tokenizer: what load_model returns, or LoadedModel.from_module(module, tokenizer, name=...)."
            )
        if kind == "messages":
            items = _render(items, tokenizer, add_generation_prompt, first_row)
            template_hash = hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()
            settings |= {"chat_template_sha256": template_hash, "add_generation_prompt": add_generation_prompt}
        settings["add_special_tokens"] = add_special_tokens and kind == "strings"
        encoded = _encode_strings(items, tokenizer, settings["add_special_tokens"], first_row)
        _check_ids([text.token_ids.tolist() for text in encoded], vocabulary_size(module), first_row)
    limit = length_limit(module, tokenizer) if max_length is None else max_length
    rows = _fit(encoded, limit, truncate, getattr(tokenizer, "bos_token_id", None), first_row)
    ids = TokenIdsHash()
    ids.add(rows)
    settings |= {"kind": kind, "n_texts": len(rows), "truncate": truncate, "max_length": limit}
    settings |= {"n_truncated": sum(row.n_dropped > 0 for row in rows), "token_ids_sha256": ids.hexdigest()}
    return EncodedTexts(tuple(rows), kind, settings)


class TokenIdsHash:
    """SHA-256 of the ids of texts as JSON, `[[1, 2], [3]]`, whether they are added at once or in parts."""

    def __init__(self):
        self._digest, self._opening = hashlib.sha256(), "["

    def add(self, rows: Sequence[EncodedText]) -> None:
        """The next texts."""
        for row in rows:
            self._digest.update((self._opening + json.dumps(row.token_ids.tolist())).encode())
            self._opening = ", "

    def hexdigest(self) -> str:
        """The hash of all texts so far."""
        whole = self._digest.copy()
        whole.update(b"]" if self._opening == ", " else b"[]")
        return whole.hexdigest()


def text_checks(rows: Sequence[EncodedText]) -> Int64[np.ndarray, " text"]:
    """A checksum (CRC-32) of each text's token ids."""
    return np.array([zlib.crc32(row.token_ids.numpy().tobytes()) for row in rows], dtype=np.int64)


def check_of(checks: Int64[np.ndarray, " text"]) -> int:
    """One checksum of several texts'."""
    return zlib.crc32(np.ascontiguousarray(checks).tobytes())


def _render(conversations: list, tokenizer, add_generation_prompt: bool, first_row: int) -> list[str]:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "This tokenizer has no chat template, so message lists cannot be rendered. Pass strings, or set "
            "tokenizer.chat_template."
        )
    rendered = []
    for row, messages in enumerate(conversations, start=first_row):
        for number, message in enumerate(messages):
            if not {"role", "content"} <= set(message):
                raise ValueError(f'row {row}: message {number} lacks "role" or "content". Got {message!r:.80}.')
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise ValueError(f"row {row}: the chat template refuses these messages: {error}") from error
        rendered.append(text)
    return rendered


def _encode_strings(texts: list[str], tokenizer, add_special_tokens: bool, first_row: int) -> list[EncodedText]:
    if empty := [row for row, text in enumerate(texts) if not text]:
        raise ValueError(f"{name_rows(empty, first_row)} empty text. Drop or fill it.")
    batch = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        return_special_tokens_mask=True,
        return_offsets_mapping=bool(tokenizer.is_fast),
        verbose=False,
    )
    special, words = SpecialTokens.of(tokenizer), _Words(tokenizer)
    types, all_offsets = batch.get("token_type_ids"), batch.get("offset_mapping")
    encoded, unreal, doubled = [], [], []
    for row, text in enumerate(texts):
        ids, added = batch["input_ids"][row], batch["special_tokens_mask"][row]
        offsets = None if all_offsets is None else all_offsets[row]
        is_special = special.mask(ids, added=added, offsets=offsets, text=text)
        if bool(is_special.all()):
            unreal.append(row)
            continue
        if added[0] and ids[:2] == [tokenizer.bos_token_id] * 2:
            doubled.append(row)
        encoded.append(
            EncodedText(
                length=len(ids),
                is_special=is_special,
                tokens=words(ids),
                token_ids=torch.tensor(ids),
                token_type_ids=None if types is None else torch.tensor(types[row]),
                offsets=None if offsets is None else torch.tensor(offsets),
                text=text,
                n_added=(_leading_ones(added), _leading_ones(added[::-1])),
            )
        )
    if unreal:
        raise ValueError(
            f"{name_rows(unreal, first_row)} no token besides special ones (text {texts[unreal[0]]!r:.60}). Drop the "
            "text, or give its token ids if that is meant."
        )
    if doubled:
        raise ValueError(
            f"{name_rows(doubled, first_row)} the BOS token twice: the text begins with it, and the tokenizer adds "
            "one. Pass add_special_tokens=False, or give message lists instead of rendered templates."
        )
    return encoded


def _encode_ids(rows: list[list[int]], types: list[list[int]] | None, tokenizer) -> list[EncodedText]:
    special, words = SpecialTokens.of(tokenizer), _Words(tokenizer)
    if types is None and "token_type_ids" in getattr(tokenizer, "model_input_names", ()):
        types = [[0] * len(ids) for ids in rows]
    encoded = []
    for row, ids in enumerate(rows):
        row_types = None if types is None else torch.tensor(types[row])
        encoded.append(EncodedText(len(ids), special.mask(ids), words(ids), torch.tensor(ids), row_types))
    return encoded


def _check_ids(rows: list[list[int]], n_known: int | None, first_row: int) -> None:
    for row, ids in enumerate(rows, start=first_row):
        if outside := [index for index in ids if index < 0 or (n_known is not None and index >= n_known)]:
            known = "ids count from 0" if n_known is None else f"this model's vocabulary is 0 to {n_known - 1}"
            raise ValueError(
                f"row {row} holds token id {outside[0]} at position {ids.index(outside[0])}; {known}. Was it encoded "
                "with another tokenizer?"
            )


def _fit(
    encoded: list[EncodedText], limit: int | None, truncate: str | None, bos_id: int | None, first_row: int
) -> list[EncodedText]:
    """Cut over-long rows at the end that `truncate` names, or refuse them."""
    long = [row for row, text in enumerate(encoded) if limit is not None and text.length > limit]
    if long and truncate is None:
        shown = ", ".join(f"row {first_row + row} has {encoded[row].length}" for row in long[:_SHOWN_ROWS])
        raise ValueError(
            f"{len(long)} of {len(encoded)} texts are longer than {limit} tokens ({shown}"
            f'{", ..." if len(long) > _SHOWN_ROWS else ""}). Pass truncate="right" to drop their end, truncate="left" '
            "to drop their beginning, or a larger max_length if the model can take it."
        )
    fitted = list(encoded)
    for row in long:
        begins_with_bos = bos_id is not None and int(encoded[row].token_ids[0]) == bos_id
        fitted[row] = encoded[row].cut(limit, truncate, keep_first=int(begins_with_bos))
    return fitted


def _leading_ones(mask: list[int]) -> int:
    return mask.index(0) if 0 in mask else len(mask)


class _Words:
    """Ids to the strings they decode to, each id decoded once."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, ids: list[int]) -> tuple[str, ...]:
        for index in set(ids) - self._known.keys():
            self._known[index] = str(index) if self._tokenizer is None else self._tokenizer.decode([index])
        return tuple(self._known[index] for index in ids)
