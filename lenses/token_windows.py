"""Documents cut into windows of a fixed number of tokens: how a corpus is given to a model of limited context.

    windows = token_windows(model, corpus["text"], documents=corpus["document"], length=256)
    corpus_pass(model, windows.texts, sites)

Each window holds `length` tokens with the special tokens that the tokenizer adds to a text (BOS, or [CLS] and [SEP]),
so that every window looks like a text to the model; none reaches over the end of a document. The tail of a document is
a shorter window if it has `least` tokens of its own, and is left out and counted otherwise.
Beware: windows start anywhere in a sentence; the first tokens of each have little context, so that averages over
positions weigh short contexts more than long texts would. `capture` and `corpus_pass` add no special tokens to ids.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from microtome.capture.models import LoadedModel


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Windows in the order of the documents.

    Attributes:
        texts: token ids of each window, special tokens included, as `capture` and `corpus_pass` take them.
        documents: the document of each window.
        starts: place of each window's first own token among the tokens of its text.
        tokens: own tokens of all texts, special tokens not counted.
        left_out: those of them that are in no window.
    """

    texts: list[list[int]]
    documents: list[Any]
    starts: list[int]
    tokens: int
    left_out: int

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        return (
            f"TokenWindows({len(self):,} windows of {len(set(self.documents)):,} documents; {self.left_out:,} of "
            f"{self.tokens:,} tokens left out)"
        )

    def to_frame(self) -> pd.DataFrame:
        """Columns document, start, tokens (of the window, special tokens counted)."""
        lengths = [len(text) for text in self.texts]
        return pd.DataFrame({"document": self.documents, "start": self.starts, "tokens": lengths})


def token_windows(
    model: LoadedModel | Any,
    texts: Iterable[Any],
    *,
    documents: Iterable[Any] | None = None,
    length: int = 256,
    least: int = 16,
) -> TokenWindows:
    """Cut texts into windows.

    Args:
        model: a loaded model with a tokenizer, or a transformers tokenizer.
        texts: plain strings; one is never joined with another.
        documents: the document of each text; each text its own if None.
        length: tokens of a window, special tokens included.
        least: own tokens of the shortest window.

    Raises:
        ValueError: no texts, another number of documents, a model without a tokenizer, a length that leaves less than
            `least` own tokens, or texts too short for any window.
        TypeError: a text that is no string.
    """
    tokenizer = getattr(model, "tokenizer", model)
    if tokenizer is None or not callable(tokenizer):
        raise ValueError("token_windows needs a tokenizer, and this model has none. Give a loaded model with one.")
    texts = list(texts)
    if not texts:
        raise ValueError("there are no texts. Give one or more strings.")
    if (wrong := next((i for i, text in enumerate(texts) if not isinstance(text, str)), None)) is not None:
        raise TypeError(f"text {wrong} (counted from 0) is {type(texts[wrong]).__name__}, not a string.")
    documents = list(range(len(texts))) if documents is None else list(documents)
    if len(documents) != len(texts):
        raise ValueError(f"there are {len(documents)} documents for {len(texts)} texts. Name the document of each.")
    before, after = special_tokens_around(tokenizer)
    room = length - len(before) - len(after)
    if least < 1 or room < least:
        raise ValueError(
            f"length={length} leaves {room} tokens besides {len(before) + len(after)} special ones, but least={least}. "
            "Give a longer length, or a least from 1 to that."
        )
    windows, owners, starts, total, left_out = [], [], [], 0, 0
    for text, document in zip(texts, documents, strict=True):
        ids = _own_tokens(tokenizer, text)
        total += len(ids)
        for start in range(0, len(ids), room):
            part = ids[start : start + room]
            if len(part) < least:
                left_out += len(part)
                continue
            windows.append([*before, *part, *after])
            owners.append(document)
            starts.append(start)
    if not windows:
        raise ValueError(f"no text has {least} tokens. Give longer texts or a smaller `least`.")
    return TokenWindows(windows, owners, starts, total, left_out)


def special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that this tokenizer puts before and after one text.

    Raises ValueError if what it adds is not plainly around the text.
    """
    plain = _own_tokens(tokenizer, "a")
    whole = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    raise ValueError(
        f"{type(tokenizer).__name__} turns 'a' into {plain} without and {whole} with special tokens: they do not stand "
        "around the text. Cut the token ids yourself."
    )


def _own_tokens(tokenizer: Any, text: str) -> list[int]:
    # verbose=False: a warning that the text is longer than the model's context is the reason to be here
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
