"""The texts of a capture, encoded a part at a time: a list, or anything that can be asked for text i.

A sequence (`collections.abc.Sequence`) is asked for its texts when their turn comes, so that one that reads them from
disk keeps memory small; other collections are listed at once. Mappings of token ids are encoded as a whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from microtome.capture.encoded_text import EncodedTexts
from microtome.capture.models import LoadedModel
from microtome.capture.ready_inputs import ReadyInputs
from microtome.capture.text_kinds import list_texts
from microtome.capture.texts import encode_texts


class TextSource:
    """Texts by number. `len(source)` of them; `source.encode(first, stop)` encodes some."""

    def __init__(self, texts: Any, loaded: LoadedModel, **settings: Any):
        self._loaded, self._settings = loaded, settings
        self._whole: EncodedTexts | None = None
        self.kind: str | None = None
        self._last: tuple[int, int, EncodedTexts] | None = None  # a plan and a run right after it encode once
        if isinstance(texts, Mapping):
            self._whole = encode_texts(texts, loaded.tokenizer, module=loaded.module, **settings)
            self._texts: Sequence = self._whole.rows
        elif isinstance(texts, Sequence) and not isinstance(texts, str | bytes):
            self._texts = texts
            list_texts([texts[0]] if len(texts) else [])
        else:
            self._texts = list_texts(texts)

    def __len__(self) -> int:
        return len(self._texts)

    def encode(self, first: int, stop: int) -> EncodedTexts:
        """Texts `first` up to, not including, `stop`. Raises what `encode_texts` raises, rows numbered among all texts.

        Raises:
            TypeError: texts of another kind than those encoded before.
        """
        if self._whole is not None:
            return replace(self._whole, rows=self._whole.rows[first:stop])
        if self._last is not None and self._last[0] <= first and stop <= self._last[1]:
            start, _, encoded = self._last
            return replace(encoded, rows=encoded.rows[first - start : stop - start])
        encoded = encode_texts(
            [self._texts[number] for number in range(first, stop)],
            self._loaded.tokenizer,
            module=self._loaded.module,
            first_row=first,
            **self._settings,
        )
        if self.kind not in (None, encoded.kind):
            raise TypeError(
                f"texts mix kinds: {self.kind}, from row {first} on {encoded.kind}. Make one call per kind."
            )
        self.kind = encoded.kind
        self._last = (first, stop, encoded)
        return encoded


def text_source(texts: Any, loaded: LoadedModel, **settings: Any) -> "TextSource | ReadyInputs":
    """Texts to be encoded, or inputs that a processor already made."""
    if isinstance(texts, np.ndarray) and texts.ndim == 2 and np.issubdtype(texts.dtype, np.integer):
        texts = torch.from_numpy(np.ascontiguousarray(texts))
    if isinstance(texts, torch.Tensor) and texts.dim() == 2:
        texts = {"input_ids": texts}
    if isinstance(texts, Mapping):
        ready = ReadyInputs.from_mapping(texts, pad_id=getattr(loaded.tokenizer, "pad_token_id", None))
        if not ready.is_plain_text:
            return ready
    return TextSource(texts, loaded, **settings)
